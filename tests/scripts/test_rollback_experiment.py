"""The experiment runs at a small size, counts the steps that a rollback abandons, and prints again what is kept."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import simckpt
from simckpt.policies import RollbackPolicy

SCRIPTS = Path(__file__).parents[2] / "scripts"
TINY = "--num-envs 2 --rollout-steps 32 --epochs 1 --minibatches 1 --total-steps 256 --save-every 64 --eval-every 64"


@pytest.fixture(scope="module")
def experiment():
    before = list(sys.path)
    sys.path.insert(0, str(SCRIPTS))  # the script imports its neighbour by its plain name
    import rollback_experiment

    yield rollback_experiment
    sys.path[:] = before


def evaluation(spent: int, step: int, mean: float, *, abandoned: bool = False) -> list:
    return [spent, step, mean, abandoned]


def test_the_kept_results_are_those_of_the_readme(experiment) -> None:
    results = json.loads(experiment.RESULTS.read_text())
    assert {(run["seed"], run["kind"]) for run in results["runs"]} == {
        (seed, kind) for seed in range(1, 11) for kind in ("without", "with")
    }
    done = subprocess.run(
        [sys.executable, SCRIPTS / "rollback_experiment.py"], capture_output=True, text=True, check=True
    )
    command, _, table = done.stdout.strip().partition("\n\n")
    readme = (SCRIPTS / "README.md").read_text()
    assert command in readme
    assert table in readme


def test_best_counts_abandoned_evaluations_and_final_does_not(experiment) -> None:
    run = {
        "evaluations": [
            evaluation(10, 10, 1.0),
            evaluation(20, 20, 9.0, abandoned=True),
            evaluation(30, 20, 3.0),
            evaluation(40, 30, 5.0),
        ],
        "rollbacks": [{"step": 20, "target_step": 10}],
    }
    assert experiment.summary(run) == {"best": 9.0, "final": 5.0, "last five": 3.0, "rollbacks": 1, "abandoned": 10}


def test_trains_every_run_and_does_not_train_it_again(experiment, tmp_path: Path, monkeypatch, capsys) -> None:
    store, kept = tmp_path / "store", tmp_path / "results.json"
    flags = ["--store", str(store), "--seeds", "3", "--results", str(kept), *TINY.split()]
    monkeypatch.setattr(sys, "argv", ["rollback_experiment.py", *flags])
    printed = []
    for _ in range(2):
        experiment.main()
        printed.append(capsys.readouterr().out)
    assert printed[0] == printed[1]
    assert {run.name: len(run.checkpoints()) for run in simckpt.Store(store).runs()} == {
        "without-rollback-3": 4,
        "with-rollback-3": 4,
    }
    results = json.loads(kept.read_text())
    assert [(run["seed"], run["kind"]) for run in results["runs"]] == [(3, "without"), (3, "with")]
    for run in results["runs"]:
        assert [row[:2] for row in run["evaluations"]] == [[64, 64], [128, 128], [192, 192], [256, 256]]
        assert run["rollbacks"] == []
    # equal seeds, and nothing to go back for: both kinds are the same run
    assert results["runs"][0]["evaluations"] == results["runs"][1]["evaluations"]


def test_abandoned_steps_are_paid_for(experiment, tmp_path: Path, monkeypatch) -> None:
    def hasty(metric: str, **options: Any) -> RollbackPolicy:
        quick = {"warm_up": 1, "cool_down": 0, "patience": 1, "significance": 0.05, "max_rollbacks": 1}
        return RollbackPolicy(metric, **options | quick, then="continue")

    means, evaluate = iter([10.0, *[20.0] * 6, 2.0, *[30.0] * 20]), experiment.train_ppo.evaluate
    monkeypatch.setattr(experiment.train_ppo, "evaluate", lambda *args: 1e-3 * evaluate(*args) + next(means))
    monkeypatch.setattr(experiment.train_ppo.simckpt, "RollbackPolicy", hasty)
    monkeypatch.delitem(experiment.KINDS, "without")
    (run,) = experiment.run_all(str(tmp_path / "store"), [1], [*TINY.split(), "--total-steps", "704"])["runs"]
    (rollback,) = run["rollbacks"]
    left, target = rollback["step"], rollback["target_step"]
    assert left == 512
    assert target < left
    made = [row[0] for row in run["evaluations"]]
    assert made == sorted(made)
    assert made[-1] == 704
    assert run["evaluations"][-1][1] == 704 - (left - target)
    assert [row[1] for row in run["evaluations"] if row[3]] == list(range(target + 64, left + 1, 64))
