"""A training for populations that a fresh process can import, and what goes wrong in it.

The skill of a run grows by its rate times a random number at each step. Beside the store lies `trained`, a line for
each training that began, and `<run>.trouble` with the name of a trouble.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import numpy as np

import simckpt
from simckpt.branching.hyperparameters import Hyperparameters

HYPERPARAMETERS = {"rate": 1.0, "batch": 32}


def make_origin(store: Path) -> simckpt.Checkpoint:
    """Returns the checkpoint of step 0 of a run."""
    train(str(store), "origin", until_step=0)
    return simckpt.Store(store).run("origin").at(step=0)


def train(store: str, run: str, until_step: int) -> None:
    trouble = Path(store).parent / f"{run}.trouble"
    # the process's own streams are saved with torch's where it is loaded, and each fresh process would import it then
    sampler = np.random.default_rng(1)
    with simckpt.Store(store).start(run) as started:
        args = started.configure(HYPERPARAMETERS)
        loop = simckpt.LoopState(step=0, skill=0.0)
        with started.checkpointer(
            {"loop": loop, "sampler": sampler},
            save_when=simckpt.EverySteps(10),
            keep=simckpt.KeepLast(1),
            background=None,
            hyperparameters=Hyperparameters(from_args={"rate", "batch"}),
        ) as checkpointer:
            restored = checkpointer.restore_latest()
            with (Path(store).parent / "trained").open("a") as file:
                file.write(f"{run} {loop.step} {os.getpid()}\n")
            while loop.step < until_step:
                loop.step += 1
                loop.skill += args["rate"] * sampler.uniform()
                if loop.step < until_step:
                    # noise in passing, which no decision may rest on
                    checkpointer.step(loop.step, {"eval/passing": -loop.skill})
                if loop.step % 20 == 15 and trouble.exists():
                    happen(trouble)
            if restored is None or loop.step > restored.step:
                checkpointer.save(loop.step, {"eval/return": loop.skill})


def happen(trouble: Path) -> None:
    text = trouble.read_text()
    if text == "raises":
        raise ValueError("the gradient is gone")
    if text == "dies once":
        trouble.unlink()
    if text == "waits":
        time.sleep(600)
    os.kill(os.getpid(), signal.SIGKILL)


def trained(store: Path) -> list[tuple[str, int]]:
    """Returns (run, step at which it began) of the trainings of members so far."""
    lines = (store.parent / "trained").read_text().splitlines()
    return [(name, int(step)) for name, step, _ in map(str.split, lines) if name != "origin"]


def facts(store: Path) -> dict[str, tuple[object, ...]]:
    """Returns what is the same in every store of a population that was trained with the same settings."""
    found: dict[str, tuple[object, ...]] = {}
    for run in simckpt.Store(store).runs():
        origin = None if run.branch is None else (run.branch.run, run.branch.step, dict(run.overrides))
        head = run.latest()
        # the skill itself, to the last bit
        found[run.name] = (origin, head.step, head.metrics["eval/return"])
    return found
