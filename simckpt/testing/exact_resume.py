"""Does a training loop end, after a kill and a resume, bit for bit where it ends undisturbed?"""

from __future__ import annotations

import multiprocessing
import os
import signal
import tempfile
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from simckpt import checkpointer
from simckpt.checkpoint import Checkpoint
from simckpt.comparison import LeafDifference, compare
from simckpt.errors import ConfigurationError, SimckptError
from simckpt.store import Store
from simckpt.testing.coverage import StreamWatch, uncovered_objects

SHOWN = 10  # differences listed in a message

Train = Callable[[Store], object]


class InexactResumeError(SimckptError, AssertionError):
    """Two runs that should be equal differ.

    Attributes:
        step: the first step at which they differ [env steps].
        differences: the leaves that differ there.
    """

    def __init__(self, message: str, *, step: int, differences: Sequence[LeafDifference] = ()) -> None:
        super().__init__(message)
        self.step = step
        self.differences = tuple(differences)


class UncoveredStateWarning(UserWarning):
    """Something in the training process looks like state, and no component covers it."""


@dataclass(frozen=True)
class ExactResumeReport:
    """What `assert_exact_resume` found equal.

    Attributes:
        steps: the steps at which the undisturbed run was recorded [env steps].
        compared: the number of leaves compared, over all pairs of checkpoints.
        uncovered: what looks like state and is covered by no component, one line each.
    """

    steps: tuple[int, ...]
    compared: int
    uncovered: tuple[str, ...]


def assert_exact_resume(
    train: Train, *, at_steps: Sequence[int], folder: str | os.PathLike[str] | None = None, timeout: float = 600.0
) -> ExactResumeReport:
    """Returns a report if the training equals itself after being killed and resumed; raises where it does not.

    Every training runs in a fresh process: first two undisturbed twins, then, for each step of `at_steps`, one that is
    killed by SIGKILL right after it saved that step and one that resumes it. Every call of `Checkpointer.step` saves,
    whatever the policy says, and all these checkpoints are compared leaf by leaf; so choose a short training.

    Args:
        train: called with the store to train in; does the whole training, or what is left of it, under a run name of
            its own choice. A fresh process must be able to import it: a function of a module, not a lambda or closure.
        at_steps: where to kill; the first call of `Checkpointer.step` at or after each of them [env steps].
        folder: keeps the stores `twin_a`, `twin_b` and `killed_at_<step>` there, for a closer look; a temporary folder
            by default.
        timeout: of one process [s].

    Raises:
        InexactResumeError: the first component, leaf and step that differ, and by how much. If already the two
            undisturbed twins differ, it says so: then nothing can be said about the resume.
        ConfigurationError: a process failed, took too long, or never reached one of `at_steps`.

    Warns:
        UncoveredStateWarning: optimizers, modules and generators alive that no component reaches, and global random
            streams that were drawn from without an `RNGStreams` component. The search follows references, so what is
            reached may still not be covered, and an evaluation env that is seeded anew each time is reported too.
    """
    if folder is None:
        with tempfile.TemporaryDirectory(prefix="simckpt-exact-resume-") as temporary:
            return _assert_exact_resume(train, at_steps, Path(temporary), timeout)
    return _assert_exact_resume(train, at_steps, Path(folder), timeout)


def _assert_exact_resume(train: Train, at_steps: Sequence[int], folder: Path, timeout: float) -> ExactResumeReport:
    uncovered = _train_apart(train, folder / "twin_a", timeout=timeout)
    for line in uncovered:
        warnings.warn(line, UncoveredStateWarning, stacklevel=3)
    _train_apart(train, folder / "twin_b", timeout=timeout)
    twin = Store(folder / "twin_a")
    what = "two undisturbed runs differ, so nothing can be said about resuming: the training is not deterministic"
    compared = _compare_runs(twin, Store(folder / "twin_b"), what)
    for step in at_steps:
        resumed = folder / f"killed_at_{step}"
        _train_apart(train, resumed, timeout=timeout, kill_at=step)
        _train_apart(train, resumed, timeout=timeout)
        compared += _compare_runs(twin, Store(resumed), f"the run killed and resumed at step {step} differs")
    steps = tuple(checkpoint.step for run in twin.runs() for checkpoint in run.checkpoints())
    return ExactResumeReport(steps, compared, tuple(uncovered))


def _compare_runs(undisturbed: Store, other: Store, what: str) -> int:
    compared = 0
    for run in undisturbed.runs():
        expected, found = run.checkpoints(), other.run(run.name).checkpoints()
        for one, two in zip(expected, found, strict=False):
            if one.step != two.step:
                raise InexactResumeError(
                    f"{what}: run {run.name!r} saved step {two.step} where step {one.step} was due", step=two.step
                )
            compared += _compare_checkpoints(one, two, what)
        if len(expected) != len(found):
            raise InexactResumeError(
                f"{what}: run {run.name!r} called Checkpointer.step {len(found)} instead of {len(expected)} times",
                step=found[-1].step if found else 0,
            )
    return compared


def _compare_checkpoints(expected: Checkpoint, found: Checkpoint, what: str) -> int:
    result = compare(expected, found)
    if not result.identical:
        listing = "\n  ".join(f"{each.path}: {each.description}" for each in result.differences[:SHOWN])
        more = f"\n  and {len(result.differences) - SHOWN} more" if len(result.differences) > SHOWN else ""
        raise InexactResumeError(
            f"{what}, first at step {found.step} (A is the undisturbed run):\n  {listing}{more}",
            step=found.step,
            differences=result.differences,
        )
    return result.compared


def _train_apart(train: Train, store: Path, *, timeout: float, kill_at: int | None = None) -> list[str]:
    """Trains in a fresh process; returns what it found uncovered."""
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_child, args=(train, store, kill_at, sender))
    process.start()
    sender.close()
    try:
        if not receiver.poll(timeout):
            raise ConfigurationError(
                f"the training in {store} took more than {timeout:g} s; give a shorter one, or a longer timeout"
            )
        outcome, value = receiver.recv()
    except EOFError:
        outcome, value = "killed", ""
    finally:
        if process.is_alive() and not receiver.closed:
            process.join(timeout=10)
        process.kill()
        process.join()
        receiver.close()
    if outcome == "failed":
        raise ConfigurationError(f"the training in {store} failed:\n{value}")
    if outcome == "killed" and (kill_at is None or process.exitcode != -signal.SIGKILL):
        raise ConfigurationError(f"the training in {store} died (exit code {process.exitcode})")
    if kill_at is not None and outcome == "done":
        raise ConfigurationError(f"the training ended before step {kill_at}; choose at_steps inside of it")
    return list(value) if outcome == "done" else []


def _child(train: Train, store: Path, kill_at: int | None, sender: Connection) -> None:
    watch = StreamWatch()
    found: list[str] = []

    class Recording(checkpointer.Checkpointer):
        """Saves at every call, and kills its process at the wanted one."""

        def step(self, step: int, metrics: Mapping[str, float] | None = None) -> Checkpoint | None:
            saved = self.save(step, metrics)
            if kill_at is not None and step >= kill_at:
                os.kill(os.getpid(), signal.SIGKILL)
            found[:] = uncovered_objects(self.components) + watch.uncovered(self.components)
            return saved

    checkpointer.Checkpointer = Recording  # type: ignore[misc]
    outcome: tuple[str, Any]
    try:
        train(Store(store))
        outcome = ("done", found)
    except BaseException:
        outcome = ("failed", traceback.format_exc())
    sender.send(outcome)
