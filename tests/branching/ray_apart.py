"""Checks that need Ray: a program of their own, in a network that has a loopback alone, with two CPUs.

python ray_apart.py CHECK FOLDER RESULT.json
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import CancelledError
from pathlib import Path
from typing import Any

import pytest

# everything that Ray starts ends with the program
APART = ["unshare", "--net", "--pid", "--fork", "--kill-child", "--mount-proc"]


def run(check: str, folder: Path) -> dict[str, Any]:
    """Returns what a check of this module returned, run in a program of its own."""
    pytest.importorskip("ray")
    if shutil.which("ip") is None or subprocess.run([*APART, "true"], capture_output=True).returncode:
        pytest.skip("no network of its own for Ray: unshare is not permitted here")
    # Ray's sockets have names of at most 107 bytes
    home = tempfile.mkdtemp(prefix="ray-")
    environment = {**os.environ, "HOME": home, "RAY_TMPDIR": home, "OMP_NUM_THREADS": "1", "RAY_DEDUP_LOGS": "0"}
    result = folder / f"{check}.json"
    words = [sys.executable, str(Path(__file__)), check, str(folder), str(result)]
    try:
        done = subprocess.run(
            [*APART, "sh", "-c", 'ip link set lo up && "$@"', "sh", *words],
            env=environment,
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=280,
        )
    finally:
        shutil.rmtree(home)
    assert done.returncode == 0, done.stdout + done.stderr
    answer: dict[str, Any] = json.loads(result.read_text())
    return answer


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline, "it never came"
        time.sleep(0.05)


def outcome(future: Any) -> list[str]:
    """Returns the class and the text of what became of a call."""
    try:
        return ["result", json.dumps(future.result(120))]
    except (Exception, CancelledError) as error:
        return [type(error).__name__, str(error)]


def engine(folder: Path) -> dict[str, Any]:
    """Calls of all kinds, two at a time."""
    import fan_out_loops as loops
    import ray

    import simckpt
    from simckpt.branching.fan_out import fan_out
    from simckpt.branching.jobs import branch_job, train_branch
    from simckpt.branching.ray_engine import RayEngine

    origin = loops.make_origin(folder / "store")
    for name, trouble in (("dies", "dies"), ("waits", "waits")):
        (folder / f"{name}.trouble").write_text(trouble)
        if name == "waits":
            origin.branch(name)
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    answer: dict[str, Any] = {"sockets": listening()}
    with RayEngine(grace=60.0) as used:
        calls = {fn.__name__: used.submit(fn, 3) for fn in (loops.double, loops.die, loops.fail)}
        answer |= {name: outcome(future) for name, future in calls.items()}
        # a training that is asked to end saves, and says so; a call that waits for its turn is taken back
        saving = used.submit(train_branch, branch_job(folder / "store", "waits", loops.train, log=None))
        deaf = used.submit(loops.leave_children, str(folder / "pids"))
        deaf._grace = 0.5
        waiting = used.submit(loops.double, 4)
        run = simckpt.Store(folder / "store").run("waits")
        until(lambda: (folder / "pids").exists() and (folder / "waits.waits").exists())
        answer["running"] = [saving.running(), deaf.running(), waiting.running(), waiting.done()]
        answer["too long"] = outcome_of_timeout(saving)
        for future in (waiting, saving, deaf):
            future.cancel()
        answer |= {"waiting": outcome(waiting), "saving": outcome(saving), "deaf": outcome(deaf)}
        answer["saved at"] = [each.step for each in run.checkpoints()]
    answer["still connected"] = ray.is_initialized()
    with RayEngine() as used:
        variants = {"dies": {"rate": 2.0}, "lives": {"rate": 3.0}}
        results = fan_out(origin, variants, loops.train, engine=used, progress=False)
        answer["branches"] = {name: [result.status, result.step] for name, result in results.items()}
    ray.shutdown()
    return answer


def outcome_of_timeout(future: Any) -> str:
    try:
        return f"returned {future.result(0.2)}"
    except TimeoutError as error:
        return str(error)


def listening() -> list[str]:
    """Returns the addresses at which something listens for TCP, in the hex digits of /proc/net."""
    lines = [
        line.split() for file in ("tcp", "tcp6") for line in Path(f"/proc/net/{file}").read_text().splitlines()[1:]
    ]
    return sorted({line[1].partition(":")[0] for line in lines if line[3] == "0A"})


def population(folder: Path) -> dict[str, Any]:
    """Population-based training, on a Ray that the engine starts itself."""
    import population_loops as loops
    import ray

    from simckpt.branching.population import PopulationBasedTraining, Range
    from simckpt.branching.ray_engine import RayEngine

    origin = loops.make_origin(folder / "store")
    settings = PopulationBasedTraining("eval/return", explore={"rate": Range(0.1, 10.0, log=True)}, size=3, interval=20)
    with RayEngine() as used:
        trained = settings.train(origin, loops.train, name="pbt", generations=2, engine=used, progress=False)
    return {"table": trained.table(), "runs": trained.runs, "stopped": not ray.is_initialized()}


def under_tune(folder: Path) -> dict[str, Any]:
    """Ray Tune's own population-based training."""
    import population_loops as loops
    import ray
    from ray import tune as ray_tune
    from ray.tune.schedulers import PopulationBasedTraining

    from simckpt.branching import tune

    origin = loops.make_origin(folder / "store")
    trial = tune.trainable(loops.train, origin, metric="eval/return", interval=20)
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    rates = [0.1, 0.5, 2.0, 8.0]
    scheduler = PopulationBasedTraining(
        time_attr="training_iteration",
        perturbation_interval=1,
        quantile_fraction=0.25,
        hyperparam_mutations={"rate": ray_tune.loguniform(0.1, 10.0)},
        synch=True,
    )
    tuner = ray_tune.Tuner(
        trial,
        param_space={"rate": ray_tune.grid_search(rates)},
        tune_config=ray_tune.TuneConfig(metric="eval/return", mode="max", scheduler=scheduler, reuse_actors=True),
        run_config=ray_tune.RunConfig(
            name="tuned", storage_path=str(folder / "tune"), stop={"training_iteration": 3}, verbose=0
        ),
    )
    found = tuner.fit()
    keys = ("run", "step", "checkpoint", "eval/return")
    pointers = [json.loads(path.read_text()) for path in (folder / "tune").rglob(tune.POINTER)]
    ray.shutdown()
    return {
        "errors": found.num_errors,
        "iterations": [result.metrics["training_iteration"] for result in found],
        "trials": [result.metrics["trial_id"] for result in found],
        "results": [{key: result.metrics[key] for key in keys} for result in found],
        "pointers": sorted({tuple(sorted(pointer)) for pointer in pointers}),
    }


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    name, folder, result = sys.argv[1:]
    Path(result).write_text(json.dumps(globals()[name](Path(folder))))
