import dataclasses
import math
import multiprocessing
import re
from pathlib import Path

import numpy as np
import pytest
from branch_helpers import VALUES, origin_run, rows, save, tree

import simckpt
from simckpt.errors import (
    BranchWarning,
    CheckpointNotFoundError,
    ConfigurationError,
    ConflictError,
    InvalidNameError,
    RunNotFoundError,
)
from simckpt.storage import BranchRecord, segments


def written(root: Path) -> dict[str, int]:
    """{file: size} of all files of a store."""
    return {str(path.relative_to(root)): path.stat().st_size for path in root.rglob("*") if path.is_file()}


def test_a_branch_is_a_run_with_the_origins_hyperparameters_and_the_overrides(tmp_path) -> None:
    store, origin = origin_run(tmp_path / "s")
    trial = origin.branch("low-lr", {"learning_rate": 1e-4}, rng="reseed")
    for run in (trial, simckpt.Store(store.path).run("low-lr")):
        assert run.hyperparameters == {**VALUES, "learning_rate": 1e-4}
        assert run.overrides == {"learning_rate": 1e-4}
        assert run.branch == BranchRecord("a", 2, 20, {"learning_rate": 1e-4}, "reseed")
        assert run.origin() == origin
        assert run.checkpoints() == []
    assert store.run("a").branch is None
    assert store.run("a").overrides == {}
    assert store.run("a").origin() is None


def test_a_branch_without_overrides_has_the_origins_hyperparameters(tmp_path) -> None:
    store, origin = origin_run(tmp_path / "s")
    trial = origin.branch("again")
    assert trial.hyperparameters == VALUES
    assert trial.branch == BranchRecord("a", 2, 20, {}, "continue")
    assert [run.name for run in store.runs()] == ["a", "again"]


def test_the_first_commit_of_a_branch_continues_its_origin(tmp_path) -> None:
    store, origin = origin_run(tmp_path / "s")
    origin.branch("b")
    with store.start("b") as run:
        own = save(run, 25, parent=run.origin())
    assert own.parent == origin.id
    assert store.run("b").latest() == own
    assert store.run("b").origin() == origin


def test_branches_of_branches_name_their_own_origin(tmp_path) -> None:
    store, origin = origin_run(tmp_path / "s")
    origin.branch("b", {"learning_rate": 1e-4})
    with store.start("b") as run:
        own = save(run, 25, parent=origin)
    grandchild = own.branch("c", {"epochs": 5})
    assert grandchild.hyperparameters == {**VALUES, "learning_rate": 1e-4, "epochs": 5}
    assert grandchild.overrides == {"epochs": 5}
    assert grandchild.origin() == own
    assert store.run("b").origin() == origin


def test_abandoned_checkpoints_and_post_mortems_can_be_branched_from(tmp_path) -> None:
    store, origin = origin_run(tmp_path / "s")
    with store.start("a") as run:
        abandoned = run.latest()
        back = save(run, 20, parent=origin, kind="rollback", rollback={"abandoned": abandoned.id, "level": 1})
        post_mortem = save(run, 22, parent=back, kind="exception")
    assert abandoned not in store.run("a").checkpoints()
    for place, checkpoint in enumerate((abandoned, back, post_mortem)):
        assert checkpoint.branch(f"b{place}").origin() == checkpoint


def test_a_branch_takes_what_a_rollback_had_changed(tmp_path) -> None:
    store, origin = origin_run(tmp_path / "s")
    with store.start("a") as run:
        run.change_hyperparameters({"learning_rate": 1e-5})
        changes = {"hyperparameters": {"learning_rate": 1e-5}}
        back = save(run, 20, parent=origin, kind="rollback", rollback={"level": 1, "changes": changes})
    assert back.branch("after").hyperparameters["learning_rate"] == 1e-5
    assert origin.branch("before").hyperparameters["learning_rate"] == 3e-4


def test_a_rollback_is_told_by_its_checkpoint_and_by_its_tombstone(tmp_path) -> None:
    store, origin = origin_run(tmp_path / "s")
    told = {"abandoned": "f" * 32, "level": 2, "changes": {"description": "Reseed()"}, "reason": "it fell"}
    with store.start("a") as run:
        back = save(run, 20, parent=origin, kind="rollback", rollback=told)
        save(run, 25, parent=back)
    assert store.checkpoint(back.id).rollback == told
    assert origin.rollback is None
    store.files.prune("a", back.seq, "test")
    assert store.files.commit_record("a", back.seq).rollback == told
    # through the catalog, too
    (contents,) = store.contents()
    assert [each.step for each in contents.checkpoints] == [10, 20, 30, 25]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"learning_rat": 1e-4}, "did you mean 'learning_rate'"),
        ({"learning_rate": "fast"}, "type float, given 'fast' of type str"),
        ({"learning_rate": True}, "given True of type bool"),
        ({"epochs": 2.5}, "type int, given 2.5 of type float"),
        ({"epochs": False}, "given False of type bool"),
        ({"anneal": 1}, "type bool, given 1 of type int"),
        ({"learning_rate": None}, "given None of type NoneType"),
        ({"layers": 64}, "given 64 of type int"),
        ({"layers": [64, "wide"]}, "type int, given 'wide' of type str"),
        ({"env": Path("x")}, "JSON cannot hold"),
        ({"learning_rate": math.nan}, "would be nan, which is not finite"),
        ({"learning_rate": -math.inf}, "would be -inf, which is not finite"),
        ({"learning_rate": np.float32("inf")}, "would be inf, which is not finite"),
        ({"epochs": np.float64(2.0)}, "type int, given 2.0 of type float"),
        ({"learning_rate": np.ones(1)}, "JSON cannot hold"),
        ({"learning_rate": np.datetime64(1, "s")}, "JSON cannot hold"),
        ({1: 2}, "'learning_rate'"),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_overrides_that_do_not_fit_are_refused_by_name(tmp_path, overrides: dict, message: str) -> None:
    store, origin = origin_run(tmp_path / "s")
    with pytest.raises(ConfigurationError, match=message) as caught:
        origin.branch("b", overrides)
    assert caught.value.keys == tuple(map(str, overrides))
    assert store.files.runs() == ["a"]


def test_all_overrides_that_do_not_fit_are_told_at_once(tmp_path) -> None:
    _, origin = origin_run(tmp_path / "s")
    with pytest.raises(ConfigurationError, match=r"(?s)'lr'.*'epochs'") as caught:
        origin.branch("b", {"lr": 1.0, "epochs": 0.5, "anneal": False})
    assert caught.value.keys == ("lr", "epochs")


@pytest.mark.parametrize(
    ("key", "given", "kept"),
    [
        ("learning_rate", 1, 1.0),
        ("layers", (32, 32, 32), [32, 32, 32]),
        ("layers", [], []),
        ("target_kl", 0.02, 0.02),
        ("target_kl", None, None),
        ("epochs", 2**70, 2**70),
        ("target_kl", math.inf, math.inf),
        ("learning_rate", -1.0, -1.0),  # a sign says nothing about sense: a coefficient may have either
        ("learning_rate", np.float64(0.25), 0.25),
        ("learning_rate", np.float32(0.25), 0.25),
        ("learning_rate", np.array(0.25), 0.25),
        ("learning_rate", np.int64(1), 1.0),
        ("epochs", np.int32(7), 7),
        ("anneal", np.bool_(False), False),
        ("env", np.str_("Hopper-v5"), "Hopper-v5"),
        ("layers", [np.int64(32), np.int64(8)], [32, 8]),
        ("target_kl", np.float64(0.5), 0.5),
    ],
)
def test_overrides_take_the_type_of_the_origins_value(tmp_path, key: str, given: object, kept: object) -> None:
    _, origin = origin_run(tmp_path / "s")
    found = origin.branch("b", {key: given}).hyperparameters[key]
    assert (type(found), found) == (type(kept), kept)


def test_values_inside_of_lists_and_dicts_are_finite_where_the_origins_are(tmp_path) -> None:
    values = {"rates": [0.1, 0.2], "optimizer": {"lr": 1e-3, "limit": math.inf}}
    _, origin = origin_run(tmp_path / "s", values=values)
    for overrides in ({"rates": [0.1, math.nan]}, {"optimizer": {"lr": math.inf, "limit": 1.0}}):
        with pytest.raises(ConfigurationError, match="not finite"):
            origin.branch("b", overrides)
    origin.branch("b", {"optimizer": {"lr": 1e-4, "limit": -math.inf}})


def test_an_override_of_a_key_that_holds_the_runs_name_is_warned_of(tmp_path) -> None:
    _, origin = origin_run(tmp_path / "s", values={"run": "a", "env": "Ant-v5"})
    with pytest.warns(BranchWarning, match="'run' holds the name of run 'a', and the branch 'b' gets 'zzz'"):
        origin.branch("b", {"run": "zzz"})
    # no warning: its own name, and other keys
    origin.branch("c", {"run": "c", "env": "Hopper-v5"})


def test_a_branch_goes_into_a_store_and_not_into_a_path(tmp_path) -> None:
    _, origin = origin_run(tmp_path / "s")
    with pytest.raises(ConfigurationError, match=r"such as simckpt\.Store\('.*to'\)") as caught:
        origin.branch("b", store=tmp_path / "to")
    assert caught.value.keys == ("store",)
    assert not (tmp_path / "to").exists()


def test_an_address_that_names_nothing_is_told_in_whole_sentences(tmp_path) -> None:
    store, _ = origin_run(tmp_path / "s")
    for address, found in (("o", "there are 'a'. A checkpoint"), ("aa", "did you mean 'a'? A checkpoint")):
        with pytest.raises(CheckpointNotFoundError, match=re.escape(found)):
            store.checkpoint(address)


def test_values_that_no_record_can_hold_are_told_with_the_others(tmp_path) -> None:
    _, origin = origin_run(tmp_path / "s")
    with pytest.raises(
        ConfigurationError, match=r"(?s)cannot be branched.*learning_rate.*too large.*JSON.*epoch'"
    ) as told:
        origin.branch("b", {"learning_rate": 10**400, "env": {1, 2}, "epoch": 3})
    assert told.value.keys == ("learning_rate", "env", "epoch")


def test_a_dict_is_overridden_whole_and_with_its_own_keys(tmp_path) -> None:
    _, origin = origin_run(tmp_path / "s", values={"optimizer": {"lr": 1e-3, "eps": 1e-8}})
    assert origin.branch("b", {"optimizer": {"lr": 1, "eps": 1e-5}}).overrides == {
        "optimizer": {"lr": 1.0, "eps": 1e-5}
    }
    with pytest.raises(ConfigurationError, match="'eps'"):
        origin.branch("c", {"optimizer": {"lr": 1e-4}})


@pytest.mark.parametrize("name", ["", "a/b", "..", "x" * 101])
def test_a_name_that_cannot_be_a_folder_is_refused(tmp_path, name: str) -> None:
    store, origin = origin_run(tmp_path / "s")
    with pytest.raises(InvalidNameError):
        origin.branch(name)
    assert store.files.runs() == ["a"]


def test_a_name_that_is_taken_and_an_unknown_rng_are_refused(tmp_path) -> None:
    store, origin = origin_run(tmp_path / "s")
    before = store.files.read_run("a")
    with pytest.raises(ConflictError, match="exists already"):
        origin.branch("a")
    # also by the process that is training that run
    with store.start("a"), pytest.raises(ConflictError, match="exists already"):
        origin.branch("a")
    with pytest.raises(ConfigurationError, match="'continue', 'reseed'") as caught:
        origin.branch("b", rng="copy")
    assert caught.value.keys == ("rng",)
    assert store.files.read_run("a") == before


def test_a_branch_belongs_to_the_origins_experiment_unless_another_is_given(tmp_path) -> None:
    store = simckpt.Store(tmp_path / "s")
    with store.start("a", experiment="sweep-7") as run:
        origin = save(run, 1)
    assert origin.branch("b").record.experiment == "sweep-7"
    assert origin.branch("c", experiment="other").record.experiment == "other"


def test_branching_writes_one_record_whatever_the_checkpoint_holds(tmp_path, monkeypatch) -> None:
    sizes = []
    for count in (1, 100_000):
        store = simckpt.Store(tmp_path / f"s{count}")
        with store.start("a") as run:
            run.configure(dict(VALUES))
            origin = save(run, 1, components={"replay": rows(count), "agent": tree(1)})
        assert list((store.path / "segments").iterdir())
        before = written(store.path)
        with monkeypatch.context() as patched:
            for opener in ("opened", "write"):
                patched.setattr(segments, opener, lambda *_, **__: pytest.fail("a branch touches no segment"))
            origin.branch("b", {"epochs": 5})
        new = {name: size for name, size in written(store.path).items() if before.get(name) != size}
        assert set(new) == {"runs/b/run.json", "runs/b/events.jsonl"}
        sizes.append(sum(new.values()))
    assert max(sizes) < 65_536
    assert abs(sizes[1] - sizes[0]) < 100  # moments and paths differ in length


def test_a_pruned_checkpoint_cannot_be_branched_from(tmp_path) -> None:
    store, origin = origin_run(tmp_path / "s")
    store.files.prune("a", origin.seq, "old")
    with pytest.raises(CheckpointNotFoundError, match=r"has been pruned .*old"):
        origin.branch("b")
    assert store.files.runs() == ["a"]
    assert list((store.path / "tmp").iterdir()) == []


def test_the_origin_of_a_branch_is_not_pruned(tmp_path) -> None:
    store, origin = origin_run(tmp_path / "s")
    origin.branch("b")
    (first, second, _) = store.run("a").prune(simckpt.KeepLast(1))
    assert (first.keep, second.keep) == (False, True)
    assert "origin of run 'b'" in second.reason
    with pytest.raises(ConflictError, match="run 'b' was branched from it"):
        store.files.prune("a", origin.seq, "by hand")
    assert store.run("b").origin() == origin


def test_an_origin_that_was_pruned_by_other_means_is_told(tmp_path) -> None:
    store, origin = origin_run(tmp_path / "s")
    origin.branch("b")
    record = store.files.read_run("b")
    with store.start("b") as run:
        run._files.write_run("b", dataclasses.replace(record, branch=None))  # a record that another program made
        assert simckpt.Store(store.path).run("b").origin() == origin
        lost = dataclasses.replace(record, origin="e" * 32)
        run._files.write_run("b", lost)
    with pytest.raises(CheckpointNotFoundError, match="no longer in the store"):
        simckpt.Store(store.path).run("b").origin()


def test_branches_made_at_once_under_one_name_are_one(tmp_path) -> None:
    store, origin = origin_run(tmp_path / "s")
    context = multiprocessing.get_context("fork")
    with context.Pool(2) as pool:
        results = pool.map(_branch_in_a_process, [(str(store.path), origin.id, rate) for rate in (1e-4, 1e-5) * 4], 1)
    won = [result for result in results if result is not None]
    assert len(won) == 1
    assert store.run("b").overrides == {"learning_rate": won[0]}
    assert list((store.path / "tmp").iterdir()) == []


def _branch_in_a_process(task: tuple[str, str, float]) -> float | None:
    path, origin, rate = task
    try:
        simckpt.Store(path).checkpoint(origin).branch("b", {"learning_rate": rate})
    except ConflictError:
        return None
    return rate


def test_an_origin_in_a_run_that_was_removed_by_hand_is_told(tmp_path) -> None:
    store, origin = origin_run(tmp_path / "s")
    origin.branch("b")
    (store.path / "runs" / "a").rename(tmp_path / "elsewhere")
    with pytest.raises(CheckpointNotFoundError, match="no longer in the store"):
        store.run("b").origin()
    with pytest.raises(RunNotFoundError):
        origin.branch("c")


def test_a_first_save_of_a_branch_shares_the_rows_and_large_arrays_of_its_origin(tmp_path) -> None:
    store = simckpt.Store(tmp_path / "s")
    table = {"table": np.arange(1 << 18, dtype=np.float64)}  # 2 MB that do not change
    with store.start("a") as run:
        run.configure(dict(VALUES))
        first = save(run, 1, components={"agent": table})
        origin = save(run, 2, parent=first, components={"agent": table})
    before = set((store.path / "segments").iterdir())
    origin.branch("b")
    with store.start("b") as run:
        own = save(run, 3, parent=origin, components={"agent": table})
    assert own.size < 65_536
    assert set((store.path / "segments").iterdir()) == before
    assert np.array_equal(own["agent/table"], table["table"])
