"""What checkpoints know of themselves, how they are marked, found and pruned."""

import dataclasses
import json
import math
import platform
import shutil
import subprocess
from pathlib import Path

import pytest
from examples import Counter

import simckpt
from simckpt import provenance
from simckpt.errors import (
    CheckpointNotFoundError,
    ConfigurationError,
    DamagedError,
    DamageWarning,
    InvalidNameError,
    QueryError,
    RunLockedError,
)
from simckpt.policies import KeepLast, KeepTagged
from simckpt.storage import CommitDraft

GOLDEN = Path(__file__).parent / "format" / "golden" / "v0.1"


@dataclasses.dataclass
class Args:
    learning_rate: float = 3e-4
    hidden: tuple[int, ...] = (64, 64)
    optimizer: dict = dataclasses.field(default_factory=lambda: {"name": "adam", "eps": 1e-8})
    total_steps: int = 100


def fill(store: simckpt.Store, name: str, steps: list[int], args: Args | None = None, **start: object) -> None:
    """Starts or restarts a run and saves a counter at each step; the metric is a tenth of the step."""
    with store.start(name, **start) as run:
        run.configure(args or Args(), free={"total_steps"})
        with run.checkpointer({"counter": Counter()}, save_when=simckpt.EverySteps(1)) as checkpointer:
            checkpointer.restore_latest()
            for step in steps:
                checkpointer.save(step, {"eval/return": step / 10, "loss": math.nan})


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> simckpt.Store:
    monkeypatch.chdir(tmp_path)  # no working tree, which someone may be editing
    opened = simckpt.Store(tmp_path / "s")
    fill(opened, "ant", [10, 20, 30], experiment="sweep")
    fill(opened, "bee", [10, 20], Args(learning_rate=1e-4))
    return opened


def steps(checkpoints: list[simckpt.Checkpoint]) -> list[tuple[str, int]]:
    return [(checkpoint.run, checkpoint.step) for checkpoint in checkpoints]


# what a checkpoint knows


def test_a_checkpoint_knows_the_start_that_saved_it(store: simckpt.Store) -> None:
    checkpoint = store.run("ant").latest()
    assert checkpoint.hyperparameters == {
        "learning_rate": 3e-4,
        "hidden": [64, 64],
        "optimizer": {"name": "adam", "eps": 1e-8},
        "total_steps": 100,
    }
    assert checkpoint.experiment == "sweep"
    assert store.run("bee").latest().experiment is None
    assert checkpoint.host == platform.node()
    assert checkpoint.versions == provenance.versions()
    assert checkpoint.device == provenance.device()["cpu"]
    assert 0 < checkpoint.duration < 300
    folder = store.path / "runs/ant/checkpoints/00000003"
    assert checkpoint.size == sum((folder / name).stat().st_size for name in ("state.h5", "leaves.json"))


def test_a_checkpoint_knows_the_hyperparameters_in_force_when_it_was_saved(store: simckpt.Store) -> None:
    fill(store, "ant", [40], Args(total_steps=500))
    run = store.run("ant")
    assert run.at(step=30).hyperparameters["total_steps"] == 100
    assert run.at(step=40).hyperparameters["total_steps"] == 500
    assert run.at(step=30).start != run.at(step=40).start
    assert run.at(step=10).start == run.at(step=30).start


def test_starts_of_the_same_kind_share_one_record(store: simckpt.Store) -> None:
    for step in (40, 50, 60):
        fill(store, "ant", [step])
    assert len({checkpoint.start for checkpoint in store.run("ant").checkpoints()}) == 1
    assert len(list((store.path / "runs/ant/starts").iterdir())) == 1


def test_a_later_start_may_belong_to_another_experiment(store: simckpt.Store) -> None:
    fill(store, "ant", [40], experiment="other")
    assert [checkpoint.experiment for checkpoint in store.run("ant").checkpoints()] == ["sweep"] * 3 + ["other"]


@pytest.mark.usefixtures("with_git")
def test_a_checkpoint_knows_the_commit_and_the_changes_of_its_start(tmp_path: Path, monkeypatch) -> None:
    tree = tmp_path / "tree"
    tree.mkdir()
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b", "-C", str(tree)]
    subprocess.run([*git, "init", "-q"], check=True)
    (tree / "train.py").write_text("lr = 1\n")
    (tree / ".env").write_text("a\n")
    subprocess.run([*git, "add", "."], check=True)
    subprocess.run([*git, "commit", "-qm", "first"], check=True)
    (tree / "train.py").write_text("lr = 2\napi_key = 'abcdefghijkl'\n")
    (tree / ".env").write_text("hunter2\n")
    (tree / "new.py").touch()
    monkeypatch.chdir(tree)
    with simckpt.Store(tmp_path / "s").start("ant") as run:
        (tree / "train.py").write_text("lr = 3\n")  # the program has been read long since
        run.checkpointer({"counter": Counter()}, save_when=simckpt.EverySteps(1)).save(1)
    found = simckpt.Store(tmp_path / "s").run("ant").latest().git
    assert found is not None
    assert found["commit"] == subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True).stdout.strip()
    assert (found["dirty"], found["left_out"], found["untracked"]) == (True, [".env"], ["new.py"])
    assert "+lr = 2\n" in found["diff"]
    written = b"".join(path.read_bytes() for path in (tmp_path / "s").rglob("*") if path.is_file())
    assert b"hunter2" not in written
    assert b"abcdefghijkl" not in written
    assert b"lr = 2" in written


def test_checkpoints_of_the_first_format_know_what_their_run_knows(tmp_path: Path) -> None:
    shutil.copytree(GOLDEN, tmp_path / "s")
    checkpoint = simckpt.Store(tmp_path / "s").checkpoints()[-1]
    assert checkpoint.start is None
    assert checkpoint.experiment == "golden"
    assert checkpoint.git is not None
    assert checkpoint.git["commit"] == "c" * 40
    assert (checkpoint.device, checkpoint.duration) == ("", 0.0)
    assert "learning_rate" in checkpoint.hyperparameters
    checkpoint.tag("old")
    assert simckpt.Store(tmp_path / "s").checkpoints("tag = 'old' and experiment = 'golden'") == [checkpoint]


# marks


def test_tags_pins_and_later_metrics_are_seen_by_others(store: simckpt.Store) -> None:
    checkpoint = store.run("ant").at(step=20)
    checkpoint.tag("good", "paper-3")
    checkpoint.pin()
    checkpoint.add_metrics({"eval/long": 7, "eval/return": 99.0, "later": None})
    for seen in (checkpoint, simckpt.Store(store.path).checkpoint(checkpoint.id), store.run("ant").at(step=20)):
        assert seen.tags == {"good", "paper-3"}
        assert seen.pinned
        assert seen.metrics["eval/long"] == 7.0
        assert seen.metrics["eval/return"] == 99.0
        assert math.isnan(seen.metrics["loss"])
    checkpoint.untag("good", "never")
    checkpoint.unpin()
    assert (checkpoint.tags, checkpoint.pinned) == ({"paper-3"}, False)
    assert store.run("ant").at(step=20).tags == {"paper-3"}


def test_the_best_checkpoint_is_ranked_by_later_metrics_too(store: simckpt.Store) -> None:
    assert store.run("ant").best("eval/return").step == 30
    store.run("ant").at(step=10).add_metrics({"eval/return": 50.0})
    assert store.run("ant").best("eval/return").step == 10


def test_a_checkpoint_can_be_marked_while_its_run_is_written(store: simckpt.Store) -> None:
    with store.start("ant"):
        simckpt.Store(store.path).run("ant").latest().tag("good")
    assert store.run("ant").latest().tags == {"good"}


@pytest.mark.parametrize("metrics", [{"a": "x"}, {"a": [1]}, [1], None])
def test_later_metrics_are_numbers(store: simckpt.Store, metrics: object) -> None:
    with pytest.raises(ConfigurationError):
        store.run("ant").latest().add_metrics(metrics)


def test_a_tag_is_checked_before_anything_is_written(store: simckpt.Store) -> None:
    with pytest.raises(InvalidNameError):
        store.run("ant").latest().tag("a b")
    assert store.run("ant").latest().tags == frozenset()


def test_damaged_later_metrics_hide_no_checkpoint(store: simckpt.Store) -> None:
    checkpoint = store.run("ant").at(step=20)
    checkpoint.add_metrics({"eval/long": 7.0})
    (path,) = store.path.glob("runs/ant/marks/*/metrics-1")
    path.write_bytes(path.read_bytes().replace(b"7.0", b"8.0"))
    assert store.run("ant").latest().step == 30  # nobody asked for metrics
    with pytest.raises(DamagedError, match="metrics-1"):
        _ = store.run("ant").at(step=20).metrics
    with pytest.warns(DamageWarning, match="metrics-1"):
        store.checkpoints()
    damaged: dict = {}
    assert len(store.checkpoints("step > 0", damaged=damaged)) == 5
    assert list(damaged) == [("ant", 2)]


# finding


@pytest.mark.parametrize(
    ("where", "expected"),
    [
        (None, [("ant", 10), ("ant", 20), ("ant", 30), ("bee", 10), ("bee", 20)]),
        ("eval/return > 1.5", [("ant", 20), ("ant", 30), ("bee", 20)]),
        ("metrics.eval/return > 1.5 and run = 'bee'", [("bee", 20)]),
        ("learning_rate < 0.0002", [("bee", 10), ("bee", 20)]),
        ("hyperparameters.learning_rate < 0.0002 and step = 10", [("bee", 10)]),
        ("optimizer.name = 'adam' and step = 30", [("ant", 30)]),
        ("experiment = 'sweep' and not step >= 20", [("ant", 10)]),
        ("experiment = null and step = 10", [("bee", 10)]),
        ("loss = nan and step = 30", [("ant", 30)]),
        ("tag = 'good' or pinned", [("ant", 20), ("bee", 10)]),
        ("tag = null and step = 20", [("bee", 20)]),
        ("eval/long >= 7", [("ant", 30)]),
        (f"host = '{platform.node()}' and step = 30", [("ant", 30)]),
        (f"versions.python = '{platform.python_version()}' and step = 30", [("ant", 30)]),
        ("device != null and seq = 3", [("ant", 30)]),
        ("parent = null", [("ant", 10), ("bee", 10)]),
        ("size > 100 and duration > 0 and kind = 'save' and seq = 3", [("ant", 30)]),
        ("created > '2020-01-01' and step = 30", [("ant", 30)]),
        ("step > 1000", []),
    ],
)
def test_conditions_find_checkpoints(store: simckpt.Store, where: str | None, expected: list) -> None:
    store.run("ant").at(step=20).tag("good")
    store.run("bee").at(step=10).pin()
    store.run("ant").at(step=30).add_metrics({"eval/long": 7.0})
    assert steps(store.checkpoints(where)) == expected
    assert steps(simckpt.Store(store.path).checkpoints(where)) == expected


def test_the_beginning_of_an_id_finds_its_checkpoint(store: simckpt.Store) -> None:
    wanted = store.run("ant").at(step=20)
    assert store.checkpoints(f"id = '{wanted.id[:12]}'") == [wanted]
    assert steps(store.checkpoints(f"parent = '{wanted.id}'")) == [("ant", 30)]


def test_names_that_nothing_has_are_an_error(store: simckpt.Store) -> None:
    for name in ("evl/return", "hyperparameters.learning_rat", "metrics.learning_rate", "versions.tensorflow"):
        with pytest.raises(QueryError, match=f"nothing here is called '{name}'"):
            store.checkpoints(f"step > 1 or {name} > 1")


def test_a_hyperparameter_called_like_a_field_or_metric_needs_its_group(tmp_path: Path) -> None:
    store = simckpt.Store(tmp_path / "s")
    with store.start("a") as run:
        run.configure({"step": 5, "loss": 7, "a.b": {"c": 1}})
        run.checkpointer({"counter": Counter()}, save_when=simckpt.EverySteps(1)).save(1, {"loss": 0.5})
    for where in ("step = 1", "hyperparameters.step = 5", "loss = 0.5", "hyperparameters.loss = 7", "a.b.c = 1"):
        assert len(store.checkpoints(where)) == 1, where


def test_an_empty_store_has_no_names_to_miss(tmp_path: Path) -> None:
    store = simckpt.Store(tmp_path / "s")
    store.start("a").close()
    assert store.checkpoints("eval/return > 3") == []


def test_a_damaged_record_is_warned_of_or_told(store: simckpt.Store) -> None:
    (store.path / "runs/bee/run.json").write_bytes(b"")
    with pytest.warns(DamageWarning, match="record of run 'bee'"):
        assert steps(store.checkpoints("step = 10")) == [("ant", 10), ("bee", 10)]
    damaged: dict = {}
    assert steps(store.checkpoints("step = 10", damaged=damaged)) == [("ant", 10), ("bee", 10)]
    assert list(damaged) == [("bee", None)]


@pytest.mark.parametrize("damage", ["empty", "changed", "missing", "of another"])
@pytest.mark.parametrize(
    ("where", "expected"),
    [
        ("git.commit = null and step = 10", [("ant", 10), ("bee", 10)]),
        ("git.dirty or step = 10", [("ant", 10), ("bee", 10)]),
        ("device != null", [("bee", 10), ("bee", 20)]),
        ("experiment = 'sweep'", []),
        ("learning_rate > 0", [("bee", 10), ("bee", 20)]),
        ("hyperparameters.optimizer.name = 'adam'", [("bee", 10), ("bee", 20)]),
        ("known.to.it.alone = 3 or step = 30", [("ant", 30)]),
        ("versions.python != null and learning_rate = null", [("ant", 10), ("ant", 20), ("ant", 30)]),
    ],
)
def test_a_damaged_start_is_told_once_and_hides_no_checkpoint(store: simckpt.Store, where, expected, damage) -> None:
    (path,) = store.path.glob("runs/ant/starts/*.json")
    if damage == "missing":
        path.unlink()
    elif damage == "of another":
        (other,) = store.path.glob("runs/bee/starts/*.json")
        shutil.copy(other, path)
    else:
        path.write_bytes(b"" if damage == "empty" else path.read_bytes().replace(b"sweep", b"swarm"))
    fresh = simckpt.Store(store.path)
    with pytest.warns(DamageWarning, match=path.stem[:8]):
        assert steps(fresh.checkpoints(where)) == expected
    damaged: dict = {}
    assert steps(fresh.checkpoints(where, damaged=damaged)) == expected
    assert list(damaged) == [("ant", 1)]
    # what no start holds can be asked without one
    assert len(fresh.checkpoints("eval/return > 0 and host != null and not pinned")) == 5


def test_a_wrong_name_is_an_error_beside_a_damaged_start_where_its_group_is_known(store: simckpt.Store) -> None:
    (path,) = store.path.glob("runs/ant/starts/*.json")
    path.write_bytes(b"")
    for name in ("versions.tensorflow", "metrics.learning_rate"):
        with pytest.raises(QueryError, match=name):
            simckpt.Store(store.path).checkpoints(f"{name} > 1", damaged={})


# pruning


def commit_after(store: simckpt.Store, run: str, parent: str, **others: object) -> str:
    """Commits a copy of the newest state by hand and returns the id."""
    newest = store.run(run).latest()
    return store.files.commit(run, CommitDraft(parent, newest.step, **others), newest.read()).record.id


def test_pruning_says_what_and_why_and_a_dry_run_changes_nothing(store: simckpt.Store) -> None:
    ids = [checkpoint.id for checkpoint in store.run("ant").checkpoints()]
    store.checkpoint(ids[0]).pin()
    store.checkpoint(ids[1]).tag("good")
    before = sorted(str(path) for path in store.path.rglob("*"))
    verdicts = store.run("ant").prune(KeepLast(1), dry_run=True)
    assert [(each.id, each.keep) for each in verdicts] == list(zip(ids, [True, False, True], strict=True))
    assert "pinned" in verdicts[0].reason
    assert "KeepLast" in verdicts[1].reason
    assert "newest" in verdicts[2].reason
    assert sorted(str(path) for path in store.path.rglob("*")) == before
    assert store.run("ant").prune(KeepLast(1)) == verdicts
    assert steps(store.run("ant").checkpoints()) == [("ant", 10), ("ant", 30)]
    with pytest.raises(CheckpointNotFoundError, match="KeepLast"):
        store.files.index("ant", 2)
    assert store.files.events("ant")[-1]["reason"] == verdicts[1].reason


def test_policies_see_tags_and_later_metrics(store: simckpt.Store) -> None:
    store.run("ant").at(step=20).tag("good")
    store.run("ant").prune(KeepTagged("good"))
    assert steps(store.run("ant").checkpoints()) == [("ant", 20), ("ant", 30)]


def test_origins_of_other_runs_and_rollback_targets_are_protected(store: simckpt.Store) -> None:
    first, second, third = (checkpoint.id for checkpoint in store.run("ant").checkpoints())
    with store.start("cow") as run:
        store.files.write_run("cow", dataclasses.replace(run.record, origin=first))
    run = store.run("ant")
    assert run.protected() == {first: "the origin of run 'cow'"}
    rollback = {"abandoned": third, "level": 1, "changes": {}}
    commit_after(store, "ant", second, kind="rollback", rollback=rollback)
    store.checkpoint(second).pin()
    expected = {first: "the origin of run 'cow'", second: "the target of a rollback; pinned"}
    assert run.protected() == expected
    assert store.run("ant").protected() == expected
    assert store.run("bee").protected() == {first: "the origin of run 'cow'"}
    assert all(verdict.keep for verdict in run.prune(KeepLast(1)))


def test_what_another_runs_damaged_record_may_protect_is_not_dropped(store: simckpt.Store) -> None:
    (store.path / "runs/bee/run.json").write_bytes(b"")
    with pytest.raises(DamagedError):
        store.run("ant").prune(KeepLast(1))
    assert len(store.run("ant").checkpoints()) == 3


def test_a_run_in_training_is_not_pruned_by_others(store: simckpt.Store) -> None:
    code = "import sys, simckpt; run = simckpt.Store(sys.argv[1]).start('ant'); print('ready', flush=True); input()"
    command = [__import__("sys").executable, "-c", code, str(store.path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        with pytest.raises(RunLockedError):
            store.run("ant").prune(KeepLast(1))
        store.run("ant").at(step=10).pin()
        process.communicate("\n")
    store.run("ant").prune(KeepLast(1))
    assert steps(store.run("ant").checkpoints()) == [("ant", 10), ("ant", 30)]


def test_a_start_is_written_before_the_first_commit_and_refreshed_by_configure(tmp_path: Path) -> None:
    store = simckpt.Store(tmp_path / "s")
    with store.start("a") as run:
        first = run.start_id()
        assert run.start_id() == first
        run.configure({"learning_rate": 1.0})
        second = run.start_id()
        assert second != first
        assert store.files.read_start("a", second).hyperparameters == {"learning_rate": 1.0}
    with pytest.raises(ConfigurationError, match="opened to read"):
        store.run("a").start_id()
    assert all(json.loads(path.read_text())["format"] == "simckpt start" for path in store.path.glob("runs/a/starts/*"))
