"""Population-based training carried out: branches, interruptions, members that fail."""

import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import population_loops as loops
import pytest
from fan_out_loops import until

import simckpt
from simckpt.branching.engines import LocalEngine
from simckpt.branching.generations import Population
from simckpt.branching.population import PopulationBasedTraining, Range
from simckpt.errors import CheckpointNotFoundError, ConfigurationError, ConflictError, SimckptError


def settings(**changes: object) -> PopulationBasedTraining:
    values = {"metric": "eval/return", "explore": {"rate": Range(0.1, 10.0, log=True)}, "size": 4, "interval": 20}
    # that copies are branched with rng="continue" makes equal populations equal, whatever the ids of checkpoints
    return PopulationBasedTraining(**{**values, "rng": "continue", **changes})  # type: ignore[arg-type]


def trained(store: Path, *, generations: int = 3, **changes: object) -> Population:
    origin = simckpt.Store(store).run("origin").at(step=0)
    with ThreadPoolExecutor(1) as engine:
        return settings(**changes).train(
            origin, loops.train, name="pbt", generations=generations, engine=engine, progress=False
        )


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)  # outside of git, whose state every start records
    loops.make_origin(tmp_path / "store")
    return tmp_path / "store"


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Population]:
    path = tmp_path_factory.mktemp("undisturbed") / "store"
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(path.parent)
        loops.make_origin(path)
        return path, trained(path)


def test_every_copy_is_a_branch_of_the_member_it_copies(undisturbed: tuple[Path, Population]) -> None:
    path, population = undisturbed
    copied = [each for each in population.standings if each.copies is not None]
    assert len(copied) == 2  # one of four, after generations 1 and 2
    for standing in copied:
        generation = [each for each in population.standings if each.generation == standing.generation]
        scores = {each.run: each.score for each in generation}
        assert standing.score == min(scores.values())
        assert scores[standing.copies] == max(scores.values())
        run = simckpt.Store(path).run(f"pbt-{standing.member:02d}-g{standing.generation}")
        assert (run.branch.run, run.branch.step) == (standing.copies, 20 * standing.generation)
        (best,) = [each for each in generation if each.run == standing.copies]
        assert run.overrides["rate"] != best.hyperparameters["rate"]
        assert standing.reason.startswith("rank 4 of 4")
    # nobody copies after the last generation
    assert [each.reason for each in population.standings[-4:]] == [""] * 4


def test_members_begin_with_rates_of_their_own(undisturbed: tuple[Path, Population]) -> None:
    path, population = undisturbed
    begun = [dict(simckpt.Store(path).run(f"pbt-{member:02d}").overrides) for member in range(4)]
    assert begun == [settings().first(member) for member in range(4)]
    assert begun == [dict(each.hyperparameters) for each in population.standings[:4]]


def test_each_generation_is_trained_once(undisturbed: tuple[Path, Population]) -> None:
    path, population = undisturbed
    assert sorted(loops.trained(path)) == sorted(
        (each.run, 20 * (each.generation - 1)) for each in population.standings
    )
    assert [each.step for each in population.standings] == [20] * 4 + [40] * 4 + [60] * 4


def test_best_member_and_table(undisturbed: tuple[Path, Population]) -> None:
    _, population = undisturbed
    scores = {each.run: each.score for each in population.standings[-4:]}
    assert tuple(scores) == population.runs
    best = population.best()
    assert (best.run, best.step) == (max(scores, key=scores.__getitem__), 60)
    assert best.metrics["eval/return"] == max(scores.values())
    row = population.table()[0]
    assert list(row) == ["generation", "member", "run", "step", "eval/return", "rate", "copies", "reason", "error"]
    assert repr(population).startswith("<Population 'pbt' of 4 after 3 generations, the best is 'pbt-0")


def test_equal_settings_train_equal_populations(store: Path, undisturbed: tuple[Path, Population]) -> None:
    trained(store)
    assert loops.facts(store) == loops.facts(undisturbed[0])


def test_more_generations_go_on_where_the_last_ones_ended(store: Path, undisturbed: tuple[Path, Population]) -> None:
    for generations in (1, 1, 3):
        population = trained(store, generations=generations)
    assert loops.facts(store) == loops.facts(undisturbed[0])
    assert population.table() == undisturbed[1].table()
    assert sorted(loops.trained(store)) == sorted(loops.trained(undisturbed[0]))


def test_population_goes_on_after_a_kill_of_the_whole_program(
    store: Path, undisturbed: tuple[Path, Population]
) -> None:
    # the third member of generation 2 takes the program along, twice in the middle of its way
    for member in ("pbt-00", "pbt-03"):
        trouble = store.parent / f"{member}.trouble"
        trouble.write_text("dies once")
        code = f"import test_generations as t; from pathlib import Path; t.trained(Path({str(store)!r}))"
        paths = [str(Path(__file__).parent)]
        killed = subprocess.run(
            [sys.executable, "-c", f"import sys; sys.path += {paths!r}; {code}"], capture_output=True, timeout=120
        )
        assert killed.returncode == -signal.SIGKILL, killed.stderr.decode()
    trained(store)
    assert loops.facts(store) == loops.facts(undisturbed[0])
    # nothing that was complete was trained again
    assert len(loops.trained(store)) == len(loops.trained(undisturbed[0])) + 2


def test_copies_that_were_made_stay_whatever_the_settings_are(
    store: Path, undisturbed: tuple[Path, Population]
) -> None:
    trained(store, generations=2)
    before = loops.facts(store)
    trained(store, generations=3, seed=7)
    after = loops.facts(store)
    assert {name: origin for name, (origin, _, _) in before.items()}.items() <= {
        name: origin for name, (origin, _, _) in after.items()
    }.items()


def test_a_member_that_fails_is_replaced_and_takes_no_other_with_it(store: Path) -> None:
    (store.parent / "pbt-02.trouble").write_text("raises")
    population = trained(store, generations=2)
    failed = population.standings[2]
    assert (failed.run, failed.step, failed.score) == ("pbt-02", None, None)
    assert "ValueError: the gradient is gone" in failed.error
    assert failed.reason.startswith("rank 4 of 4 with no score: copies member")
    assert population.runs[2] == "pbt-02-g1"
    assert population.standings[6].step == 40
    # started again, it is not tried again: its copy stands for it
    begun = loops.trained(store)
    assert trained(store, generations=2).runs == population.runs
    assert loops.trained(store) == begun


def test_a_training_that_saves_no_score_is_told(store: Path) -> None:
    with pytest.raises(CheckpointNotFoundError, match=r"no member .* generation 1: its training returned without a ch"):
        trained(store, generations=1, metric="eval/other")


def test_a_run_of_the_same_name_from_elsewhere_is_refused(store: Path) -> None:
    loops.train(str(store), "pbt-01", until_step=0)
    with pytest.raises(ConflictError, match="run 'pbt-01' exists and does not come from"):
        trained(store)


def test_nothing_is_made_if_a_later_member_cannot_be(store: Path) -> None:
    # the first takes the value that fits, the last one of the others
    mixed = settings(explore={"batch": [16, 0.5]})
    fits = [type(mixed.first(member)["batch"]) is int for member in range(4)]
    assert fits[0]
    assert not all(fits)
    loops.train(str(store), "foreign-03", until_step=0)
    origin = simckpt.Store(store).run("origin").at(step=0)
    for sound, name, error in ((mixed, "pbt", ConfigurationError), (settings(), "foreign", ConflictError)):
        with pytest.raises(error):
            sound.train(origin, loops.train, name=name, generations=1, progress=False)
    assert {run.name for run in simckpt.Store(store).runs()} == {"origin", "foreign-03"}


TOP_LEVEL = """
import simckpt
from population_loops import train

simckpt.PopulationBasedTraining("eval/return", {"rate": [1.0, 2.0]}, size=2, interval=20).train(
    simckpt.Store("store").run("origin").at(step=0), train, name="pbt", generations=1
)
"""


def test_a_script_without_a_main_part_makes_no_member(store: Path) -> None:
    (store.parent / "script.py").write_text(TOP_LEVEL)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "script.py"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=store.parent, env=environment)
    assert "put `if __name__ == '__main__':` around" in done.stderr.splitlines()[-1]
    assert simckpt.Store(store).files.runs() == ["origin"]


def test_unknown_hyperparameters_are_refused_before_anything_is_made(store: Path) -> None:
    with pytest.raises(ConfigurationError, match="did you mean 'rate'"):
        trained(store, explore={"rat": Range(0.0, 1.0)})
    assert [run.name for run in simckpt.Store(store).runs()] == ["origin"]


@pytest.mark.parametrize(
    ("wrong", "problem"),
    [
        ({"checkpoint": "origin@0"}, "branches start from a checkpoint"),
        ({"name": 5}, "cannot be the name of a run"),
        ({"name": "a/b"}, "cannot be the name of a run"),
        ({"engine": "ray"}, "an engine is such as"),
        ({"generations": 0}, "generations"),
        ({"generations": 2.0}, "generations"),
        ({"deadline": -1}, "deadline"),
        ({"heartbeat": "x"}, "heartbeat"),
        ({"heartbeat": 0.1}, "heartbeat"),
        ({"train": ["script.py"]}, "train is a function"),
        ({"train": None}, "train is a function"),
        ({"train": len}, "another process cannot find"),
        ({"train": loops.make_origin}, "cannot be called with"),
    ],
)
def test_wrong_arguments_are_told_before_anything_is_made(undisturbed, wrong: dict, problem: str) -> None:  # type: ignore[no-untyped-def]
    path, _ = undisturbed
    runs = simckpt.Store(path).files.runs()
    origin = simckpt.Store(path).run("origin").at(step=0)
    sound = {"checkpoint": origin, "train": loops.train, "name": "other", "generations": 1, "progress": False}
    with pytest.raises(SimckptError, match=problem):
        settings().train(**{**sound, **wrong})
    assert simckpt.Store(path).files.runs() == runs


def test_a_function_that_no_process_can_find_is_refused(store: Path) -> None:
    origin = simckpt.Store(store).run("origin").at(step=0)
    with pytest.raises(ConfigurationError, match="another process cannot find"):
        settings().train(origin, lambda store, run, until_step: None, name="pbt", generations=1)
    assert [run.name for run in simckpt.Store(store).runs()] == ["origin"]


def test_a_killed_process_fails_its_member_alone_and_is_started_once_more(store: Path) -> None:
    (store.parent / "pbt-00.trouble").write_text("dies once")
    (store.parent / "pbt-01.trouble").write_text("dies")
    origin = simckpt.Store(store).run("origin").at(step=0)
    with LocalEngine(2) as engine:
        population = settings(size=3).train(
            origin, loops.train, name="pbt", generations=1, engine=engine, progress=False
        )
    assert [each.step for each in population.standings] == [20, None, 20]
    assert "killed by SIGKILL" in population.standings[1].error
    assert population.standings[0].error == ""
    # it went on from its checkpoint at step 10
    assert [step for name, step in loops.trained(store) if name == "pbt-00"] == [0, 10]


def test_interrupted_by_hand_the_members_end_and_go_on_later(store: Path, request: pytest.FixtureRequest) -> None:
    (store.parent / "pbt-01.trouble").write_text("waits")
    code = f"""
import sys; sys.path += [{str(Path(__file__).parent)!r}]
import simckpt, test_generations as t, population_loops as loops
from pathlib import Path
if __name__ == "__main__":
    origin = simckpt.Store({str(store)!r}).run("origin").at(step=0)
    t.settings(size=2).train(origin, loops.train, name="pbt", generations=1, progress=False)
"""
    script = store.parent / "script.py"
    script.write_text(code)
    program = subprocess.Popen([sys.executable, script], stderr=subprocess.PIPE)
    request.addfinalizer(program.kill)  # what a failed test leaves running would disturb others
    until(lambda: any(name == "pbt-01" for name, _ in loops.trained(store)), seconds=240)
    program.send_signal(signal.SIGINT)
    _, stderr = program.communicate(timeout=120)
    assert b"KeyboardInterrupt" in stderr
    (store.parent / "pbt-01.trouble").unlink()
    population = trained(store, generations=1, size=2)
    assert [each.step for each in population.standings] == [20, 20]
