"""Trials of Ray Tune as branches: what they do with the store, without Ray; and under Tune's own scheduler."""

import json
from pathlib import Path

import numpy as np
import population_loops as loops
import pytest
import ray_apart

import simckpt
from simckpt.branching import tune
from simckpt.errors import CheckpointNotFoundError, ConfigurationError, InvalidNameError


@pytest.fixture
def origin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> simckpt.Checkpoint:
    monkeypatch.chdir(tmp_path)  # outside of git, whose state every start records
    return loops.make_origin(tmp_path / "store")


@pytest.fixture(scope="module")
def untouched(tmp_path_factory: pytest.TempPathFactory) -> simckpt.Checkpoint:
    return loops.make_origin(tmp_path_factory.mktemp("untouched") / "store")


def trial(origin: simckpt.Checkpoint, id: str, **config: object) -> tune.Trial:
    made = tune.Trial(loops.train, origin, "eval/return", 20, "tune", "reseed")
    made.begin(id, config)
    return made


def folder(tmp_path: Path, name: str) -> Path:
    (tmp_path / name).mkdir()
    return tmp_path / name


def test_a_trial_is_a_branch_and_its_results_are_checkpoints(origin: simckpt.Checkpoint, tmp_path: Path) -> None:
    one = trial(origin, "a", rate=np.float64(2.0))
    results = [one.step(iteration) for iteration in (1, 2)]
    run = simckpt.Store(tmp_path / "store").run("tune-a")
    assert run.overrides == {"rate": 2.0}
    assert run.record.origin == origin.id
    assert [(result["run"], result["step"]) for result in results] == [("tune-a", 20), ("tune-a", 40)]
    assert results[1]["checkpoint"] == run.latest().id
    assert results[1]["eval/return"] == run.latest().metrics["eval/return"]


def test_what_is_saved_is_a_pointer_to_a_pinned_checkpoint(origin: simckpt.Checkpoint, tmp_path: Path) -> None:
    one = trial(origin, "a")
    result = one.step(1)
    one.save(folder(tmp_path, "saved"))
    (pointer,) = (tmp_path / "saved").iterdir()
    assert json.loads(pointer.read_text()) == {
        "store": str(tmp_path / "store"),
        "run": "tune-a",
        "checkpoint": result["checkpoint"],
    }
    one.step(2)
    # the training keeps its last checkpoint alone, and this one for Tune
    assert [each.step for each in simckpt.Store(tmp_path / "store").run("tune-a").checkpoints()] == [20, 40]


def test_another_trials_pointer_becomes_a_branch(origin: simckpt.Checkpoint, tmp_path: Path) -> None:
    one, other = trial(origin, "a", rate=2.0), trial(origin, "b", rate=0.5)
    best = one.step(1)
    one.save(folder(tmp_path, "saved"))
    other.step(1)
    other.begin("b", {"rate": 2.4})
    other.load(tmp_path / "saved")
    result = other.step(2)
    run = simckpt.Store(tmp_path / "store").run("tune-b-2")
    assert (run.branch.run, run.branch.step, run.overrides) == ("tune-a", 20, {"rate": 2.4})
    assert run.record.origin == best["checkpoint"]
    assert (result["run"], result["step"]) == ("tune-b-2", 40)


def test_a_trial_goes_on_in_its_own_run(origin: simckpt.Checkpoint, tmp_path: Path) -> None:
    one = trial(origin, "a", rate=2.0)
    one.step(1)
    one.save(folder(tmp_path, "saved"))
    # Tune has paused it, or its process died
    again = trial(origin, "a", rate=2.0)
    again.load(tmp_path / "saved")
    assert again.step(2)["run"] == "tune-a"
    assert loops.trained(tmp_path / "store") == [("tune-a", 0), ("tune-a", 20)]


def test_other_hyperparameters_for_a_trials_own_run_become_a_branch(origin: simckpt.Checkpoint, tmp_path: Path) -> None:
    one = trial(origin, "a", rate=2.0)
    one.step(1)
    one.save(folder(tmp_path, "saved"))
    for rate, name in ((3.0, "tune-a-2"), (3.0, "tune-a-2"), (4.0, "tune-a-3")):
        again = trial(origin, "a", rate=rate)
        again.load(tmp_path / "saved")
        assert again.step(2)["run"] == name


def test_a_trial_that_died_before_its_first_result_finds_its_branch(origin: simckpt.Checkpoint, tmp_path: Path) -> None:
    (tmp_path / "tune-a.trouble").write_text("raises")
    with pytest.raises(ValueError, match="gradient"):
        trial(origin, "a", rate=2.0).step(1)
    (tmp_path / "tune-a.trouble").unlink()
    assert trial(origin, "a", rate=2.0).step(1)["run"] == "tune-a"
    assert loops.trained(tmp_path / "store") == [("tune-a", 0), ("tune-a", 10)]


def test_trials_whose_ids_begin_alike_keep_their_runs_apart(origin: simckpt.Checkpoint, tmp_path: Path) -> None:
    for id in ("1_2", "12", "1"):
        assert trial(origin, id).step(1)["run"] == f"tune-{id}"


def test_keys_that_are_no_hyperparameters_are_refused(origin: simckpt.Checkpoint) -> None:
    with pytest.raises(ConfigurationError, match="did you mean 'rate'"):
        trial(origin, "a", rat=1.0).step(1)


def test_a_training_without_the_metric_is_told(origin: simckpt.Checkpoint) -> None:
    made = tune.Trial(loops.train, origin, "eval/other", 20, "tune", "reseed")
    made.begin("a", {})
    with pytest.raises(CheckpointNotFoundError, match="'tune-a' returned without a checkpoint at step 20 that has"):
        made.step(1)


@pytest.mark.parametrize(
    ("wrong", "problem"),
    [
        ({"train": lambda store, run, until_step: None}, "another process cannot find"),
        ({"train": loops.make_origin}, "cannot be called with"),
        ({"checkpoint": "origin@0"}, "branches start from a checkpoint"),
        ({"metric": 3}, "metric"),
        ({"interval": 0}, "whole number"),
        ({"interval": "20"}, "whole number"),
        ({"name": "a/b"}, "cannot be the name of a run"),
        ({"rng": "again"}, "rng is one of"),
    ],
)
def test_wrong_arguments_of_a_trainable_are_refused(
    untouched: simckpt.Checkpoint, wrong: dict[str, object], problem: str
) -> None:
    pytest.importorskip("ray")
    sound = {"train": loops.train, "checkpoint": untouched, "metric": "eval/return", "interval": 20}
    with pytest.raises((ConfigurationError, InvalidNameError), match=problem):
        tune.trainable(**{**sound, **wrong})  # type: ignore[arg-type]


@pytest.mark.slow
def test_under_tunes_own_scheduler_every_exploit_is_a_branch(tmp_path: Path) -> None:
    done = ray_apart.run("under_tune", tmp_path)
    assert done["errors"] == 0
    assert done["iterations"] == [3] * 4
    graph = {run.name: run for run in simckpt.Store(tmp_path / "store").runs()}
    first = {f"tune-{id}" for id in done["trials"]}
    copies = graph.keys() - first - {"origin"}
    assert copies, "nothing was exploited"
    for name in copies:
        branch = graph[name].branch
        # of another trial, at the end of one of its iterations
        assert ".".join(branch.run.split("-")[:2]) != ".".join(name.split("-")[:2])
        assert branch.step in (20, 40)
        assert branch.overrides.keys() == {"rate"}
    # what Tune reports is what the store holds
    for result in done["results"]:
        checkpoint = simckpt.Store(tmp_path / "store").checkpoint(result["checkpoint"])
        assert (checkpoint.run, checkpoint.step) == (result["run"], result["step"])
        assert checkpoint.metrics["eval/return"] == result["eval/return"]
    assert {result["step"] for result in done["results"]} == {60}
    assert done["pointers"] == [["checkpoint", "run", "store"]]
