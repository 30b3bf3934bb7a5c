"""Does a training loop end, after a kill and a resume, bit for bit where it ends undisturbed?"""

from __future__ import annotations

import os
import shutil
import tempfile
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from simckpt.checkpoint import Checkpoint
from simckpt.comparison import compare
from simckpt.errors import ConfigurationError, SimckptError
from simckpt.state import Difference
from simckpt.store import Store
from simckpt.testing.child import Train, train_apart

SHOWN = 10  # differences listed in a message
NOT_DETERMINISTIC = (
    "the training is not deterministic, so nothing can be said about resuming. Is everything seeded: "
    "envs.reset(seed=...), torch.manual_seed, numpy, random? Does it depend on time, threads, or the order of a set?"
)


class InexactResumeError(SimckptError, AssertionError):
    """Two runs that should be equal differ.

    Attributes:
        step: the first step at which they differ [env steps].
        differences: the leaves that differ there.
    """

    def __init__(self, message: str, *, step: int, differences: Sequence[Difference] = ()) -> None:
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
    killed by SIGKILL right after it saved that step and one that resumes it. Every call of `Checkpointer.step` saves
    and is kept, whatever the policies say, and all these checkpoints are compared leaf by leaf. So choose a short
    training: the disk must hold two of them.

    Args:
        train: called with the store to train in; does the whole training, or what is left of it, under a run name of
            its own choice. A fresh process must be able to import it: a function of a module, not a lambda or closure.
        at_steps: where to kill; the first call of `Checkpointer.step` at or after each of them [env steps].
        folder: keeps the stores `twin_a`, `twin_b` and `killed_at_<step>` there, for a closer look; they must not
            exist yet. A temporary folder by default.
        timeout: of one process [s].

    Raises:
        InexactResumeError: the first component, leaf and step that differ, and by how much. If already the two
            undisturbed twins differ, it says so: then nothing can be said about the resume.
        ConfigurationError: a process failed, with its traceback, or took too long; a step of `at_steps` lies beyond the
            end; the training saves nothing.

    Warns:
        UncoveredStateWarning: optimizers, modules and numpy generators alive that no component reaches, and global
            random streams that are drawn from in the loop without an `RNGStreams` component. The search follows
            references, so what is reached may still not be covered, and an evaluation env that is seeded anew each
            time is reported too. It is made at the calls 1, 2, 4, 8, ... of `Checkpointer.step`.
    """
    steps = _checked_steps(at_steps)
    if folder is None:
        with tempfile.TemporaryDirectory(prefix="simckpt-exact-resume-") as temporary:
            return _assert_exact_resume(train, steps, Path(temporary), timeout, keep=False)
    return _assert_exact_resume(train, steps, Path(folder), timeout, keep=True)


def _checked_steps(at_steps: Sequence[int]) -> list[int]:
    steps = sorted(set(at_steps))
    if not steps or steps[0] < 0:
        raise ConfigurationError(f"at_steps needs at least one step, none below 0; got {at_steps!r}", keys=["at_steps"])
    return steps


def _assert_exact_resume(
    train: Train, at_steps: Sequence[int], folder: Path, timeout: float, *, keep: bool
) -> ExactResumeReport:
    resumed_in = {step: folder / f"killed_at_{step}" for step in at_steps}
    twin_a, twin_b = folder / "twin_a", folder / "twin_b"
    existing = [str(path) for path in (twin_a, twin_b, *resumed_in.values()) if path.exists()]
    if existing:
        raise ConfigurationError(f"left from before: {', '.join(existing)}; give a new folder", keys=["folder"])

    finding = train_apart(train, twin_a, timeout=timeout, look_around=True)
    for line in finding.uncovered:
        warnings.warn(line, UncoveredStateWarning, stacklevel=3)
    steps = _recorded_steps(twin_a)
    if at_steps[-1] > steps[-1]:
        raise ConfigurationError(
            f"the training ends at step {steps[-1]}, before step {at_steps[-1]}; choose at_steps inside of it",
            keys=["at_steps"],
        )
    train_apart(train, twin_b, timeout=timeout)
    compared = _compare_twins(Store(twin_a), Store(twin_b), finding.streams)
    _discard(twin_b, keep=keep)
    for step, path in resumed_in.items():
        train_apart(train, path, timeout=timeout, kill_at=step)
        train_apart(train, path, timeout=timeout)
        compared += _compare_resumed(Store(twin_a), Store(path), step)
        _discard(path, keep=keep)
    return ExactResumeReport(tuple(steps), compared, finding.uncovered)


def _recorded_steps(path: Path) -> list[int]:
    # a training that never started a run leaves no folder at all
    runs = Store(path).runs() if path.exists() else []
    steps = [checkpoint.step for run in runs for checkpoint in run.checkpoints()]
    if not steps:
        raise ConfigurationError(
            "the training saved nothing: it has to start a run in the store it is given, and to call Checkpointer.step"
        )
    return sorted(steps)


def _discard(path: Path, *, keep: bool) -> None:
    # found equal: with many steps and large states these would fill the disk
    if not keep:
        shutil.rmtree(path)


def _compare_twins(twin_a: Store, twin_b: Store, streams: Sequence[str]) -> int:
    try:
        return _compare_runs(twin_a, twin_b, "two undisturbed runs differ")
    except InexactResumeError as error:
        unseeded = [
            f"{'random' if stream == 'python' else 'numpy.random'}.seed(...)"
            for stream in ("python", "numpy")
            if any(each.path.startswith(f"{name}/{stream}") for name in streams for each in error.differences)
        ]
        hint = f"\nCall {' and '.join(unseeded)} at the start: nobody seeded what is drawn from." if unseeded else ""
        message = f"{error}\n{NOT_DETERMINISTIC}{hint}"
        raise InexactResumeError(message, step=error.step, differences=error.differences) from None


def _compare_resumed(twin: Store, resumed: Store, kill_at: int) -> int:
    what = f"the run killed and resumed at step {kill_at} differs from the undisturbed one"
    try:
        return _compare_runs(twin, resumed, what)
    except InexactResumeError as error:
        killed = min(
            checkpoint.step for run in twin.runs() for checkpoint in run.checkpoints() if checkpoint.step >= kill_at
        )
        if error.step > killed or not error.differences:
            raise
        message = f"{error}\nIt differs before it was killed: {NOT_DETERMINISTIC}"
        raise InexactResumeError(message, step=error.step, differences=error.differences) from None


def _compare_runs(undisturbed: Store, other: Store, what: str) -> int:
    names = [[run.name for run in store.runs()] for store in (undisturbed, other)]
    if sorted(names[0]) != sorted(names[1]):
        raise InexactResumeError(
            f"{what}: it has the runs {names[1]} where the undisturbed one has {names[0]}; every start has to use the "
            "same names",
            step=0,
        )
    compared = 0
    for run in undisturbed.runs():
        expected, found = run.checkpoints(), other.run(run.name).checkpoints()
        for one, two in zip(expected, found, strict=False):
            if one.step != two.step:
                again = "; was the checkpoint restored, and the step with it?" if two.step < one.step else ""
                raise InexactResumeError(
                    f"{what}: run {run.name!r} saved step {two.step} where step {one.step} was due{again}",
                    step=two.step,
                )
            compared += compare_checkpoints(one, two, what)
        if len(expected) != len(found):
            raise InexactResumeError(
                f"{what}: run {run.name!r} saved {len(found)} times instead of {len(expected)}",
                step=found[-1].step if found else 0,
            )
    return compared


def compare_checkpoints(expected: Checkpoint, found: Checkpoint, what: str) -> int:
    """Returns how many leaves were compared; raises InexactResumeError, beginning with `what`, if one differs."""
    result = compare(expected, found)
    if not result.identical:
        lines = [_line(each) for each in result.differences[:SHOWN]]
        if len(result.differences) > SHOWN:
            lines.append(f"and {len(result.differences) - SHOWN} more")
        listing = "\n  ".join(lines)
        raise InexactResumeError(
            f"{what}, first at step {found.step}, in {result.differences[0].path}:\n  {listing}",
            step=found.step,
            differences=result.differences,
        )
    return result.compared


def _line(difference: Difference) -> str:
    apart = "" if difference.max_abs is None else f", at most {difference.max_abs:.6g} apart"
    return f"{difference.path}: {difference.what}{apart}"
