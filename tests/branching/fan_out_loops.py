"""Trainings of a branch that a fresh process can import, and what goes wrong in them.

Beside the store lies `<run>.trouble` with the name of a trouble, and `trained`, a line for each training that began.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

import simckpt
from simckpt.branching.hyperparameters import Hyperparameters
from simckpt.errors import RolledBack
from simckpt.storage import claims

ORIGIN = {"rate": 1.0, "power": 2}
UNTIL = 40


def make_origin(store: Path) -> simckpt.Checkpoint:
    """Returns the checkpoint of step 10 of a run that went on to step 20."""
    with simckpt.Store(store).start("origin") as run:
        run.configure(ORIGIN)
        train_run(run, until=20)
    return simckpt.Store(store).run("origin").at(step=10)


def train_run(run: simckpt.Run, *, until: int, trouble: str = "") -> None:
    args = run.configure(ORIGIN)
    loop = simckpt.LoopState(step=0, rows=np.zeros(4))
    save_when = simckpt.EverySteps(10) | simckpt.OnSignal()
    declared = Hyperparameters(from_args={"rate", "power"})
    # the process's own streams are saved with torch's where it is loaded, and each fresh process would import it then
    sampler = np.random.default_rng(1)
    components = {"loop": loop, "sampler": sampler}
    with run.checkpointer(components, save_when=save_when, hyperparameters=declared) as checkpointer:
        checkpointer.restore_latest()
        note(run, loop.step)
        while loop.step < until:
            loop.rows[...] += args["rate"] * sampler.uniform(size=4) ** args["power"]
            loop.step += 1
            if trouble == "is told" and loop.step == 12:
                os.kill(os.getpid(), signal.SIGTERM)
            if trouble and loop.step == 25:
                # what was saved at step 20 is on the disk
                checkpointer.wait()
                (Path(run._files.path).parent / f"{run.name}.at-25").touch()
                happen(trouble)
            while trouble == "waits" and loop.step == 28:
                (Path(run._files.path).parent / f"{run.name}.waits").touch()
                checkpointer.step(loop.step, {"sum": float(loop.rows.sum())})
                time.sleep(0.01)
            checkpointer.step(loop.step, {"sum": float(loop.rows.sum())})


def note(run: simckpt.Run, step: int) -> None:
    with (Path(run._files.path).parent / "trained").open("a") as file:
        file.write(f"{run.name} {step} {os.getpid()}\n")


def happen(trouble: str) -> None:
    if trouble == "raises":
        raise ValueError("the gradient is gone")
    if trouble == "exits":
        sys.exit("out of luck")
    if trouble == "dies":
        os.kill(os.getpid(), signal.SIGKILL)
    if trouble == "hangs":
        signal.pause()


def trained(store: Path) -> list[tuple[str, int]]:
    """Returns (run, step at which it began) of the trainings of branches so far."""
    lines = (store.parent / "trained").read_text().splitlines()
    return [(name, int(step)) for name, step, _ in map(str.split, lines) if name != "origin"]


def processes(store: Path) -> dict[str, int]:
    """Returns {run: id of the process that trained it last}."""
    lines = (store.parent / "trained").read_text().splitlines()
    return {name: int(pid) for name, _, pid in map(str.split, lines)}


def train(store: str, run: str, until: int = UNTIL) -> None:
    trouble = Path(store).parent / f"{run}.trouble"
    print(f"training {run}", flush=True)
    with simckpt.Store(store).start(run) as started:
        train_run(started, until=until, trouble=trouble.read_text() if trouble.exists() else "")


def train_until_signalled(store: str, run: str) -> None:
    with simckpt.Store(store).start(run) as started:
        train_run(started, until=UNTIL, trouble="is told")


def train_and_exit(store: str, run: str) -> None:
    train(store, run)
    sys.exit()


def train_after_a_rollback(store: str, run: str) -> None:
    flag = Path(store).parent / "rolled-back"
    if not flag.exists():
        flag.touch()
        raise RolledBack("gone back", run=run, step=30, target_step=20, level=1, reason="a collapse")
    train(store, run)


def train_without_checkpoints(store: str, run: str) -> None:
    simckpt.Store(store).start(run).close()


def train_until_heard_of(store: str, run: str) -> None:
    """Trains until its heartbeat is newer than its claim, for at most 20 s, and saves then."""
    with simckpt.Store(store).start(run) as started:
        loop = simckpt.LoopState(step=0, rows=np.zeros(4))
        declared = Hyperparameters(from_args={"rate", "power"})
        started.configure(ORIGIN)
        components = {"loop": loop, "sampler": np.random.default_rng(1)}
        checkpointer = started.checkpointer(
            components, save_when=simckpt.EverySteps(1_000_000_000), hyperparameters=declared
        )
        with checkpointer:
            checkpointer.restore_latest()
            claimed = claims.heard_of(Path(store) / "runs" / run)
            deadline = time.monotonic() + 20
            while claims.heard_of(Path(store) / "runs" / run) == claimed:
                assert time.monotonic() < deadline, "no heartbeat came"
                loop.step += 1
                checkpointer.step(loop.step)
            checkpointer.save(loop.step)


def interrupt(store: str, run: str) -> None:
    raise KeyboardInterrupt("enough")


def cancel(store: str, run: str) -> None:
    raise asyncio.CancelledError("by a coroutine")


def interrupted(value: int) -> int:
    raise KeyboardInterrupt(f"enough of {value}")


def double(value: int) -> int:
    return 2 * value


def fail(value: int) -> int:
    raise ValueError(f"no {value}")


def die(value: int) -> int:
    os.kill(os.getpid(), signal.SIGKILL)
    return value


def leave_children(file: str) -> None:
    """Starts a child that would stay, and waits for ever, deaf to SIGTERM."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    child = os.fork()
    if not child:
        time.sleep(600)
    partial = Path(file + ".partial")
    partial.write_text(f"{os.getpid()} {child}")
    partial.rename(file)
    time.sleep(600)


def until(condition: Callable[[], object], *, seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it never came"
        time.sleep(0.02)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
