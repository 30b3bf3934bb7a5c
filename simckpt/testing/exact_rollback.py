"""Does a training loop go on, after it rolled back, bit for bit as a fresh process that restored the same target?"""

from __future__ import annotations

import functools
import os
import shutil
import tempfile
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from simckpt import checkpointer, policies
from simckpt.background import Save
from simckpt.checkpoint import Checkpoint
from simckpt.errors import ConfigurationError, RolledBack
from simckpt.maintenance.fallback import FALL_BACK
from simckpt.policies import EverySteps, RollbackDecision, RollbackPolicy
from simckpt.store import Store
from simckpt.testing.child import Train, run_apart
from simckpt.testing.exact_resume import NOT_DETERMINISTIC, InexactResumeError, compare_checkpoints


class InexactRollbackError(InexactResumeError):
    """A run that rolled back differs from a fresh process that restored the target with the same changes."""


@dataclass(frozen=True)
class ExactRollbackReport:
    """What `assert_exact_rollback` found equal.

    Attributes:
        step: where the rollback was made [env steps].
        target_step: what it went back to [env steps].
        steps: of the checkpoints that were compared: the rollback's, and all after it [env steps].
        compared: the number of leaves compared.
    """

    step: int
    target_step: int
    steps: tuple[int, ...]
    compared: int


@dataclass(frozen=True)
class _Done:
    """A rollback that a training did: what another process needs to do the same."""

    run: str
    step: int
    target: str
    level: int
    reason: str
    decisions: Mapping[str, Any]
    in_place: bool


def assert_exact_rollback(
    train: Train,
    *,
    at_step: int,
    to_step: int,
    folder: str | os.PathLike[str] | None = None,
    timeout: float = 600.0,
) -> ExactRollbackReport:
    """Returns a report if a rollback leaves nothing of the abandoned part behind; raises where it does.

    The training runs in a fresh process and is made to roll back, with the first changes of its `RollbackPolicy`,
    whatever its evaluations are; as by `simckpt.supervise`, `train` is called again then, or goes on if it rolls back
    in place. A copy of its store as it was just before is given to another fresh process, whose objects have seen
    nothing but `train`'s own beginning: it restores the target and makes the same changes. If the training rolls back
    in place, it goes on; otherwise it ends, and a third process resumes, as after a kill. The commit of the rollback
    and every call of `Checkpointer.step` after it, which all save and are kept, are compared leaf by leaf.

    What a `KeepRows` keeps cannot come from the target: it is saved just before the rollback, and the fresh process
    has it from there.

    Args:
        train: called with the store to train in, as for `assert_exact_resume`; its checkpointer has a `RollbackPolicy`.
        at_step: rolls back at the first call of `Checkpointer.step` at or after it [env steps].
        to_step: goes back to the newest checkpoint at or before it [env steps].
        folder: keeps the stores `live` and `fresh` there, for a closer look; they must not exist yet. A temporary
            folder by default.
        timeout: of one process [s].

    Raises:
        InexactRollbackError: the first component, leaf and step that differ, and by how much. If two trainings that
            roll back alike differ already, it says so.
        ConfigurationError: a process failed, with its traceback, or took too long; the training never rolled back, for
            it ends before `at_step`, has nothing saved at or before `to_step`, or has no policy.
    """
    if not 0 <= to_step < at_step:
        message = f"a rollback goes back: to_step lies before at_step; got {to_step} and {at_step}"
        raise ConfigurationError(message, keys=["at_step", "to_step"])
    if folder is None:
        with tempfile.TemporaryDirectory(prefix="simckpt-exact-rollback-") as temporary:
            return _assert_exact_rollback(train, at_step, to_step, Path(temporary), timeout)
    return _assert_exact_rollback(train, at_step, to_step, Path(folder), timeout)


def _assert_exact_rollback(
    train: Train, at_step: int, to_step: int, folder: Path, timeout: float
) -> ExactRollbackReport:
    live, fresh, twin = folder / "live", folder / "fresh", folder / "twin"
    existing = [str(path) for path in (live, fresh, twin) if path.exists()]
    if existing:
        raise ConfigurationError(f"left from before: {', '.join(existing)}; give a new folder", keys=["folder"])
    roll_back = functools.partial(_record_rollback, at_step, to_step)
    done = run_apart(train, live, functools.partial(roll_back, fresh), timeout=timeout)
    if not isinstance(done, _Done):
        problem = f"the training ends before step {at_step}, or saved nothing at or before step {to_step}"
        raise ConfigurationError(problem, keys=["at_step", "to_step"])
    run_apart(train, fresh, functools.partial(_record_redone, done), timeout=timeout)
    if not done.in_place:
        run_apart(train, fresh, _record_rest, timeout=timeout)
    what = (
        f"the run that went back from step {done.step} differs from a fresh process that restored the same checkpoint"
    )
    expected, found = _since_rollback(fresh, done), _since_rollback(live, done)
    try:
        compared = _compare(expected, found, what)
    except InexactRollbackError as error:
        again = run_apart(train, twin, functools.partial(roll_back, None), timeout=timeout)
        if _differ(_since_rollback(twin, again), found):
            message = f"{error}\nSo do two runs that both went back: {NOT_DETERMINISTIC}"
            raise InexactRollbackError(message, step=error.step, differences=error.differences) from None
        raise
    steps = tuple(each.step for each in found)
    return ExactRollbackReport(done.step, steps[0], steps, compared)


def _since_rollback(store: Path, done: _Done) -> list[Checkpoint]:
    line = Store(store).run(done.run).checkpoints()
    first = min(place for place, each in enumerate(line) if each.kind == "rollback")
    return line[first:]


def _compare(expected: list[Checkpoint], found: list[Checkpoint], what: str) -> int:
    compared = 0
    for one, two in zip(expected, found, strict=False):
        if one.step != two.step:
            raise InexactRollbackError(f"{what}: it saved step {two.step} where step {one.step} was due", step=two.step)
        try:
            compared += compare_checkpoints(one, two, what)
        except InexactResumeError as error:
            raise InexactRollbackError(str(error), step=error.step, differences=error.differences) from None
    if len(expected) != len(found):
        message = f"{what}: it saved {len(found)} times from then on instead of {len(expected)}"
        raise InexactRollbackError(message, step=found[-1].step)
    return compared


def _differ(one: list[Checkpoint], two: list[Checkpoint]) -> bool:
    try:
        _compare(one, two, "")
    except InexactRollbackError:
        return True
    return False


class _SavesAll(checkpointer.Checkpointer):
    """Saves at every call of `step` and keeps all, whatever the policies say."""

    def __init__(self, run: Any, files: Any, claim: Any, components: Mapping[str, Any], **options: Any) -> None:
        if not isinstance(options.get("rollback"), RollbackPolicy):
            raise ConfigurationError(
                "the training has no RollbackPolicy, so that it is not known what a rollback changes: give "
                "run.checkpointer(..., rollback=...)",
                keys=["rollback"],
            )
        options = {**options, "save_when": EverySteps(1), "keep": None, "when_busy": "wait"}
        super().__init__(run, files, claim, components, **options)
        self._files = files
        self._restored_step: int | None = None

    def restore_latest(
        self, *, damaged: str = FALL_BACK, untouched: Collection[str] = frozenset()
    ) -> Checkpoint | None:
        restored = super().restore_latest(damaged=damaged, untouched=untouched)
        self._restored_step = restored.step if restored else None
        return restored

    def step(self, step: int, metrics: Mapping[str, Any] | None = None) -> Save | None:
        # a loop that saves before its body comes once more to the step that it was restored to
        if step == self._restored_step:
            return None
        return super().step(step, metrics)

    def _go_back(self, verdict: RollbackDecision, *, begun: float) -> Save:
        save = super()._go_back(verdict, begun=begun)
        self._restored_step = self._last_step
        return save

    def _kept(self, verdict: RollbackDecision) -> dict[str, Any]:
        """Returns the components that a rollback keeps, bound."""
        assert verdict.changes is not None
        return {name: self._saver.bound[name] for name in policies.kept_components(verdict.changes)}


def _record_rollback(at_step: int, to_step: int, copy: Path | None, sender: Connection) -> Callable[[], _Done | None]:
    """Makes the training of this process roll back once; copies its store to `copy` just before."""
    done: list[_Done] = []

    class Forced(_SavesAll):
        def step(self, step: int, metrics: Mapping[str, Any] | None = None) -> Save | None:
            assert self._rollbacks is not None
            if not done and step >= at_step and step != self._restored_step:
                self._rollbacks.judge = self._judge  # type: ignore[method-assign]
                self._rollbacks.look = lambda *_, **__: "asked for"  # type: ignore[method-assign]
            elif "judge" in vars(self._rollbacks):
                del self._rollbacks.judge, self._rollbacks.look
            return super().step(step, metrics)

        def _judge(self, *_: Any, **__: Any) -> RollbackDecision:
            assert self._rollbacks is not None
            self._saver.collect(wait=True)
            targets = [record for record in self._saver.writer.line if record.step <= to_step]
            if not targets:
                return RollbackDecision("go on")
            changes = self._rollbacks.policy.levels[0]
            return RollbackDecision("roll back", f"asked for at step {at_step}", targets[-1].id, 1, changes)

        def _go_back(self, verdict: RollbackDecision, *, begun: float) -> Save:
            if not done:
                assert verdict.target is not None
                decisions = self._decisions.state_dict()
                step, run = self._last_step, self._run.name
                done.append(_Done(run, step, verdict.target, verdict.level, verdict.reason, decisions, self._in_place))
                if self._kept(verdict):
                    self._saver.begin(self._moment({}), "what KeepRows keeps", begun=begun).wait()
                    self._saver.collect(wait=True)
                if copy is not None:
                    copy_store(self._files.path, copy)
            return super()._go_back(verdict, begun=begun)

    checkpointer.Checkpointer = Forced  # type: ignore[misc]
    return lambda: done[0] if done else None


def _record_redone(done: _Done, sender: Connection) -> Callable[[], None]:
    """Makes the training of this process begin with a rollback that another one did, and end unless it is in place."""
    redone: list[str] = []

    class Redoing(_SavesAll):
        def restore_latest(
            self, *, damaged: str = FALL_BACK, untouched: Collection[str] = frozenset()
        ) -> Checkpoint | None:
            if redone or self._run.name != done.run:
                return super().restore_latest(damaged=damaged, untouched=untouched)
            redone.append(done.run)
            assert self._rollbacks is not None
            self._decisions.load_state_dict(dict(done.decisions))
            self._last_step = done.step
            changes = self._rollbacks.policy.levels[done.level - 1]
            verdict = RollbackDecision("roll back", done.reason, done.target, done.level, changes)
            self._rollbacks.note_beginning()
            if kept := self._kept(verdict):
                head = self._run.latest()
                head.restore_bound(kept)
                self._saver.restored(head, untouched=frozenset(self._saver.bound) - kept.keys())
            try:
                return self._go_back(verdict, begun=self._saver.tried).wait()
            except RolledBack:
                raise SystemExit(0) from None

    checkpointer.Checkpointer = Redoing  # type: ignore[misc]
    return lambda: None


def _record_rest(sender: Connection) -> Callable[[], None]:
    """Makes the training of this process go on from its store, and save all."""
    checkpointer.Checkpointer = _SavesAll  # type: ignore[misc]
    return lambda: None


def copy_store(store: Path, copy: Path) -> None:
    """Copies a store, all but the claims of those that write it."""

    def claims(folder: str, names: list[str]) -> set[str]:
        return {"writer"} & set(names) if Path(folder).parent == store / "runs" else set()

    shutil.copytree(store, copy, ignore=claims)
