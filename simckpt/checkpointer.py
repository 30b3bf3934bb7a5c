"""Inside the training loop: when to save, what to keep, what to restore, when to go back."""

from __future__ import annotations

import contextlib
import os
import time
import warnings
from collections.abc import Collection, Mapping
from dataclasses import replace
from functools import partial
from math import isfinite
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn

from simckpt.arguments import checked_step
from simckpt.checkpoint import Checkpoint
from simckpt.decisions import BARRIER, Decisions, check_arguments, checked_metrics
from simckpt.errors import (
    ConfigurationError,
    ConflictError,
    HalfRestoredError,
    RollbackLimitError,
    RolledBack,
    StoreError,
    UpkeepWarning,
)
from simckpt.loop_end import LoopEnd
from simckpt.maintenance.fallback import FALL_BACK
from simckpt.policies import KeepAll, KeepPolicy, Moment, RollbackDecision, RollbackPolicy, SavePolicy
from simckpt.ranks import ALONE
from simckpt.resuming import resume
from simckpt.rollback import Rollbacks
from simckpt.rollback_notices import with_remedy
from simckpt.saver import Saver

if TYPE_CHECKING:
    from simckpt.background import Save
    from simckpt.branching.hyperparameters import Hyperparameters
    from simckpt.ranks import Held
    from simckpt.run import Run
    from simckpt.storage import StoreFiles


class Checkpointer:
    """Saves a training loop's components when a policy says so, and restores them; made by `Run.checkpointer`.

    ```python
    with run.checkpointer({"envs": envs, "agent": agent, "rng": simckpt.RNGStreams(), "loop": loop},
                          save_when=simckpt.EverySteps(50_000) | simckpt.OnSignal()) as checkpointer:
        checkpointer.restore_latest()               # nothing to restore on the first start
        while loop.step < total_steps:
            ...
            checkpointer.step(loop.step, metrics)   # saves when due
    ```

    In a branch that has no checkpoint of its own yet, `restore_latest` restores what it was branched from, and then
    sets what was overridden. With a `RollbackPolicy`, `step` may raise `RolledBack`: see `simckpt.supervise`.

    `step` copies the state and returns; the copy is written in the background, one save at a time. What goes wrong
    there is told by the next call, and training goes on. Leaving the context waits for the save in flight, as do
    `Run.close` and the end of the interpreter.

    Attributes:
        components: {name: live object}, as registered.
        last_error: what the last failed save raised, or None since the last one that succeeded.
        restored_from: id of the checkpoint that `restore_latest` put into the live objects, or None.
    """

    def __init__(
        self,
        run: Run,
        files: StoreFiles,
        claim: Held,
        components: Mapping[str, Any],
        *,
        save_when: SavePolicy,
        keep: KeepPolicy | None = None,
        background: str | None = "thread",
        when_busy: str = "wait",
        hyperparameters: Hyperparameters | None = None,
        rollback: RollbackPolicy | None = None,
        in_place: bool = False,
        per_rank: Mapping[str, bool] | None = None,
        coordination: str = BARRIER,
        timeout: float | None = None,
    ) -> None:
        self._ranks = run.ranks
        given = (components, save_when, keep, background, when_busy, hyperparameters, rollback, in_place)
        self._ranks.each(lambda: check_arguments(*given, coordination, timeout))
        # in the loop the ranks decide together, or each for itself
        self._in_loop = self._ranks if coordination == BARRIER else ALONE
        self.components = dict(components)
        self.restored_from: str | None = None
        self._run = run
        self._files = files
        self._claim = claim
        self._save_when = save_when
        self._hyperparameters = hyperparameters
        self._in_place = in_place
        self._decisions = Decisions()
        if timeout is not None:
            self._ranks.patience = timeout
        how: dict[str, Any] = {"background": background, "when_busy": when_busy, "coordination": coordination}
        made = partial(Saver, run, files, self.components, self._decisions, keep=keep or KeepAll(), **how)
        self._saver = self._ranks.each(lambda: made(per_rank=per_rank or {}))
        self._end = LoopEnd(run, self._saver, save_when, self._in_loop)
        together = {"when_busy": when_busy, "in_place": in_place, "rollback": rollback is not None}
        alike = {"coordination": coordination, "timeout": timeout, "signals": list(self._end.signals)}
        self._saver.meet(alike | (together if coordination == BARRIER else {}), together=coordination == BARRIER)
        damaged = self._saver.writer.read_line()
        self._rollbacks: Rollbacks | None = None
        if rollback is not None:
            self._rollbacks = Rollbacks(
                rollback, run, self._saver, self._decisions, self.components, hyperparameters, in_place=in_place
            )
            self._saver.protects = self._rollbacks.protects
        self._must_restore = self._ranks.first(lambda: bool(self._saver.writer.head or damaged or run.record.origin))
        self._last_step = self._set_at = 0  # the second is where hyperparameters were set last
        self._closed_by = ""  # why the run was closed, if a rollback closed it
        self._entered = False
        self._pid = os.getpid()
        for seq, error in sorted(damaged.items()):
            message = f"checkpoint number {seq} of run {run.name!r} is damaged: {error}"
            warnings.warn(message, UpkeepWarning, stacklevel=3)
        # here, for training would wait for it in the first save; which asks again, if the disk refuses
        with contextlib.suppress(StoreError):
            if self._ranks.leads:
                run.start_id()

    def __enter__(self) -> Checkpointer:
        """Takes over the signals that `save_when` answers, until the context is left.

        Raises:
            ConfigurationError: it is entered already, or a signal is asked for outside the main thread.
        """
        if self._entered:
            raise ConfigurationError(
                f"the checkpointer of run {self._run.name!r} is entered already: contexts of one do not nest"
            )
        self._end.start()
        self._entered = True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Waits for the save in flight; leaves the run claimed until `Run.close` or the end of the process.

        An exception on its way is first answered by an `OnException`, unless it is a `RolledBack`; then all trouble is
        told by warnings. A signal that no `step` has answered ends the process here.

        Raises:
            ConflictError: another writer has committed to this run.
            OverrideNotAppliedError: a hyperparameter that a branch or a rollback has changed is not in force any more.
            SystemExit: a signal asked for it.
        """
        if os.getpid() != self._pid:
            return  # a fork has neither the thread that saves nor the claim
        asked = self.stop_requested
        try:
            # of several ranks the others know nothing of this one's exception
            if isinstance(error, Exception) and not isinstance(error, RolledBack) and self._ranks.size == 1:
                self._save_post_mortem(error, {})
            self._finish(raising=error is None)
            if error is None:
                asked = self._in_loop.part(asked)
            if error is None and self._rollbacks is not None:
                self._rollbacks.ended()
            if error is None and self._hyperparameters is not None:
                self._warn_if_unproven("has ended at", again=True, stacklevel=4)
                self._hyperparameters.verify()
        finally:
            self._entered = False
            # once the process is to exit with a code, a second signal must not give it another one
            self._end.stop(ignore=asked is not None and (error is None or isinstance(error, SystemExit | RolledBack)))
        if asked is not None and (error is None or isinstance(error, RolledBack)):
            self._end.exit(asked, self._last_step, "" if error else "no step came after the signal")

    def close(self) -> None:
        """Waits for the save in flight and ends the writer process; what goes wrong is told by warnings."""
        self._finish(raising=False)

    def _finish(self, *, raising: bool) -> None:
        try:
            self._saver.collect(wait=True)
        except ConflictError as error:
            if raising:
                raise
            self._saver.warn_of_failure(error, self._last_step)
        finally:
            self._saver.close()
        self._saver.tell_of_put_off()

    @property
    def stop_requested(self) -> str | None:
        """The name of the signal that asks the process to end, such as "SIGTERM", or None.

        The next call of `step` saves and exits. Look at this wherever that call may take long to come, as in an
        evaluation or a warm-up, and go there. Only an `OnSignal` in `save_when` asks for signals.
        """
        return self._end.requested

    @property
    def restore_report(self) -> tuple[str, ...]:
        """What became on this rank of a checkpoint of another number of ranks, a line each; empty of as many."""
        return self._saver.report

    @property
    def last_error(self) -> BaseException | None:
        """What the last failed save raised, or None since the last one that succeeded."""
        return self._saver.last_error

    @property
    def hyperparameters(self) -> Mapping[str, Any]:
        """The hyperparameters in force now; a rollback may have changed them since `Run.configure`."""
        return self._run.hyperparameters_in_force

    def restore_latest(
        self, *, damaged: str = FALL_BACK, untouched: Collection[str] = frozenset()
    ) -> Checkpoint | None:
        """Returns the checkpoint that was put into the live objects, or None if the run has none yet.

        Several ranks restore the same checkpoint or none; if there were more or fewer, see `restore_report`.

        A branch that has none of its own starts from its origin. Then, after a rollback, and where a free key was given
        another value, the hyperparameters that were changed are set and found to be in force; at later starts the state
        has them already. The next calls of `step` make sure that they still are.

        If the newest checkpoint is damaged, and in no archive, the run goes on from its newest ancestor that is whole.
        What only a rollback among the damaged ones had changed is then as before: read it from `hyperparameters`.

        Args:
            damaged: "fall back"; "fall back anyway", also if an archive out of reach has the newest whole; or "raise".
            untouched: components, and variables of a `LoopState` as `"loop/counter"`, that stay as they are here.

        Raises:
            ConfigurationError: `untouched` names what there is not.
            StateMismatchError: names, keys or shapes differ from the checkpoint's; nothing was touched.
            OverrideNotAppliedError: a changed hyperparameter is not in force; everything was put back.
            RestoreError: a component failed halfway; everything was put back.
            DamagedError: all checkpoints are damaged, or with "raise" the newest; nothing was touched.
            ArchiveUnavailableError, ArchiveNotNamedError: the archive that has it is out of reach; nothing was touched.
            HalfRestoredError: a component failed halfway and could not be put back.

        Warns:
            DamageWarning: newer checkpoints are damaged; all of them are named, and the one that the run goes on from.
            BranchWarning: parts stay as the program made them, for an overridden hyperparameter changes their shape; or
                the run's own state does not have the value of one that was changed before.
        """
        self._ranks.at("Checkpointer.restore_latest")
        self._saver.collect(wait=True)
        return resume(
            self._run,
            self._files,
            self._saver,
            self.components,
            self._hyperparameters,
            damaged=damaged,
            untouched=frozenset(untouched),
            note_beginning=None if self._rollbacks is None else self._rollbacks.note_beginning,
            note_restored=self._note_restored,
        )

    def _note_restored(self, checkpoint: Checkpoint) -> None:
        self._must_restore, self._saver.put_off = False, ""
        self._last_step = self._set_at = checkpoint.step
        self.restored_from = checkpoint.id

    def read_line(self) -> None:
        """Takes note that checkpoints were pruned by somebody else of this process."""
        self._saver.writer.read_line()

    def step(self, step: int, metrics: Mapping[str, Any] | None = None) -> Save | None:
        """Returns the save if one was due and was begun, else None. Call it where the loop's state is whole.

        A save that fails, because the disk refuses or because something in the state cannot be captured, is reported by
        a `SaveFailedWarning` and in `last_error`: by the next call, if it failed in the background. Training goes on,
        and the next due step tries again.

        If a signal asks the process to end, this saves in the foreground, closes the run and exits with the code
        `simckpt.EXIT_REQUEUE`, 75. It does not save if that took longer, last time, than is left of the grace period.

        If training has gone wrong, as a `RollbackPolicy` sees it, the run goes back before anything is saved: the
        target is in the live objects again, something is changed, and all that is committed. Then the run is closed
        and `RolledBack` raised; or, in place, the save of that commit is returned, of kind "rollback", and the loop
        goes on from the target's step. Both are told to the logger "simckpt", as a warning, which Python prints unless
        logging is set up otherwise.

        Args:
            step: the step the loop has reached; must not go back [env steps].
            metrics: {name: number}, kept with the checkpoint; at most 2 KB as JSON in all. None is no value yet. A 1-D
                sequence holds a value for each episode of an evaluation: its mean is the metric, and the values become
                part of the history that the run keeps. The same list, unchanged, at a later step is no new evaluation.

        Raises:
            ConfigurationError: the arguments make no sense, the run was closed or has another checkpointer by now, or
                it has checkpoints and `restore_latest` was not called: going on would bury them under a new start.
            ConflictError: another writer has committed to this run.
            OverrideNotAppliedError: a hyperparameter that a branch or a rollback has changed is not in force any more.
            RolledBack: the run went back.
            RollbackLimitError: the run would have to go back once more than it may; it was closed.
            RestoreError, StoreError, UnsupportedStateError: going back failed; the head and the live objects are what
                they were.
            HalfRestoredError: going back failed, and something could not be put back; the head is what it was.
            SystemExit: a signal asked for it.
        """
        begun, previous = time.monotonic(), self._last_step
        known, is_new = self._check(step, metrics)
        self._saver.collect(wait=False)
        if self._hyperparameters is not None:
            self._hyperparameters.verify()
        moment = self._moment(known)
        decision = self._save_when.decide(moment)
        look = decision.due and moment.signal is None
        rollbacks = self._rollbacks
        non_finite = "" if rollbacks is None else rollbacks.look(moment, thorough=look or is_new, previous=previous)
        agreed = self._in_loop.agree(
            step,
            due=decision.due,
            signal=moment.signal,
            judge=rollbacks is not None and (is_new or bool(non_finite)),
            busy=self._saver.is_flying,
            signals=self._end.signals,
        )
        if agreed.signal is not None:
            moment = replace(moment, signal=self._end.agree(agreed.signal))
        if rollbacks is not None and agreed.judge:
            verdict = rollbacks.judge(moment, is_new=is_new, non_finite=non_finite)
            if verdict.action == "roll back":
                return self._go_back(verdict, begun=begun)
            if verdict.action == "stop":
                self._stop(verdict, known)
        if moment.signal is not None:
            self._saver.put_off = ""
            self._end.save_and_exit(moment, self._save_when.remember(moment))
        reason = decision.reason or "due on rank 0" if agreed.due else self._saver.put_off
        return self._save_if_free(moment, reason, begun=begun) if reason else None

    def _save_if_free(self, moment: Moment, reason: str, *, begun: float) -> Save | None:
        """Begins a save, or does what is to be done while another one is in flight."""
        if self._saver.is_busy(moment, reason):
            return None
        self._saver.collect(wait=True)
        self._warn_if_unproven("saves", stacklevel=5)
        return self._saver.try_to_save(moment, reason, begun=begun, remembered=self._save_when.remember(moment))

    def save(self, step: int, metrics: Mapping[str, Any] | None = None) -> Checkpoint:
        """Returns a checkpoint saved now, whatever the policies say; it survives a power failure from now on.

        Raises:
            UnsupportedStateError: something in the state cannot be captured.
            StorageError: the disk refused; the checkpoints before this one are untouched.
            ConfigurationError, ConflictError, OverrideNotAppliedError: as `step`.
        """
        begun = time.monotonic()
        known, _ = self._check(step, metrics)
        self._in_loop.agree(step, due=True, signal=None, judge=False, busy=False, signals=(), explicit=True)
        self._saver.collect(wait=True)
        if self._hyperparameters is not None:
            self._hyperparameters.verify()
        self._warn_if_unproven("saves", stacklevel=4)
        moment = self._moment(known)
        remembered = self._save_when.remember(moment)
        save = self._saver.begin(moment, "asked for", begun=begun, explain=True, remembered=remembered)
        try:
            return save.wait(None if self._in_loop is self._ranks else self._ranks.patience)
        finally:
            # not after Ctrl-C: the save goes on, and the next call collects it
            self._saver.collect(wait=False)

    def wait(self) -> Checkpoint | None:
        """Returns the newest checkpoint once no save is in flight; None if there is none.

        Raises:
            ConflictError: another writer has committed to this run.
        """
        self._saver.collect(wait=True)
        self._saver.settle(self._ranks.patience)
        return self._saver.checkpoint(line[-1].id) if (line := self._saver.writer.line) else None

    def _check(self, step: Any, metrics: Any) -> tuple[dict[str, float], bool]:
        """Refuses a call that makes no sense, and notes its evaluations; tells other machines that this process lives.

        Returns the metrics, and whether there is a new evaluation for the rollback policy.
        """
        step = checked_step(step)
        known, given = checked_metrics(metrics)
        episodes = self._decisions.new_ones(metrics, given)
        if not self._claim.held:
            raise ConfigurationError(f"run {self._run.name!r} was closed{self._closed_by}: start it again to go on")
        if self._run.writer is not self:
            raise ConfigurationError(f"another checkpointer of run {self._run.name!r} was made since: use that one")
        if self._must_restore:
            raise ConfigurationError(
                f"run {self._run.name!r} has checkpoints, and this checkpointer has restored none: call "
                "restore_latest() before the loop, or start a run of another name"
            )
        if not self._entered:
            ending = [part for part in self._save_when.parts() if part.ends_the_loop]
            if ending:
                raise ConfigurationError(
                    f"{ending[0]!r} works inside of the context alone: write `with run.checkpointer(...) as "
                    "checkpointer:` around the loop"
                )
        if step < self._last_step:
            raise ConfigurationError(f"steps must not go back: {step} after {self._last_step}", keys=["step"])
        self._last_step = step
        self._claim.beat()
        # without a policy the episodes are kept all the same, for curves and for a policy that comes later
        metric = self._rollbacks.policy.metric if self._rollbacks is not None else None
        if metric in known and metric not in given:
            episodes[metric] = (known[metric],)
        whole = {name: values for name, values in episodes.items() if all(map(isfinite, values))}
        self._decisions.note(step, whole)
        return known, metric in whole

    def _moment(self, metrics: Mapping[str, float], *, exception: str | None = None) -> Moment:
        return Moment(
            step=self._last_step,
            previous_step=self._decisions.previous_step,
            metrics=metrics,
            memory=self._decisions.memory,
            elapsed=time.monotonic() - self._saver.tried,
            save_cost=self._saver.cost,
            signal=self.stop_requested,
            exception=exception,
        )

    def _warn_if_unproven(self, what: str, *, again: bool = False, stacklevel: int) -> None:
        # without a step since, nothing can have been trained
        if self._hyperparameters is not None and self._last_step > self._set_at:
            told = f"run {self._run.name!r} {what} step {self._last_step}"
            self._hyperparameters.warn_if_unproven(told, again=again, stacklevel=stacklevel)

    def _go_back(self, verdict: RollbackDecision, *, begun: float) -> Save:
        """Rolls back; returns the save of its commit in place, and raises RolledBack otherwise."""
        assert self._rollbacks is not None
        step, end, asked = self._last_step, self._end, self._signal_of_all()
        if asked is not None and (problem := self._ranks.first(partial(end.too_late_for, asked))):
            why = f"the run was to go back ({verdict.reason}), which is done at the next start: {problem}"
            end.exit(self._ranks.part(asked) or asked, step, why)
        # after Ctrl-C nobody knows whether the live objects are what the head is
        must_restore, self._must_restore = self._must_restore, True
        try:
            plan = self._rollbacks.plan(verdict, step)
            save = self._rollbacks.go_back(plan, begun=begun)
        except Exception as error:
            self._must_restore = must_restore or isinstance(error, HalfRestoredError)
            # warnings may be errors: what went wrong is to come out all the same
            with contextlib.suppress(Warning):
                self._run.log("rollback failed", step=step, reason=verdict.reason, error=str(error))
            told = with_remedy(error) if isinstance(error, HalfRestoredError) else error
            told.add_note(f"run {self._run.name!r} was going back from step {step}: {verdict.reason}")
            raise told from error.__cause__
        self._note_restored(plan.target)
        self._run.log(
            "rolled back",
            checkpoint=save.wait().id,
            step=step,
            target=plan.target.id,
            target_step=plan.target.step,
            level=verdict.level,
            changes=plan.changes(),
            reason=verdict.reason,
            saw=self._decisions.rollbacks[-1]["saw"],
        )
        rolled_back = self._rollbacks.notices.rolled_back(verdict, step=step, target_step=plan.target.step)
        if (asked := self._signal_of_all()) is not None:
            end.exit(self._ranks.part(asked) or asked, step, "")
        if self._in_place:
            return save
        self._run.close()
        self._closed_by = f" when it went back from step {step} to step {plan.target.step}"
        raise rolled_back

    def _signal_of_all(self) -> str | None:
        """Returns the signal that asks one of the ranks to end, which may have come since they agreed on the step."""
        return next(filter(None, self._ranks.gather(self.stop_requested)), None)

    def _stop(self, verdict: RollbackDecision, metrics: Mapping[str, float]) -> NoReturn:
        count = len(self._decisions.rollbacks)
        message = f"run {self._run.name!r} was stopped at step {self._last_step}: {verdict.reason}"
        error = RollbackLimitError(
            message, run=self._run.name, step=self._last_step, rollbacks=count, reason=verdict.reason
        )
        self._save_post_mortem(error, metrics)
        self._run.log("stopped", step=self._last_step, reason=verdict.reason, rollbacks=count)
        self._run.close()
        raise error

    def _save_post_mortem(self, error: Exception, metrics: Mapping[str, float]) -> None:
        """Saves what an exception left behind, if a policy wants that; never raises anything of its own."""
        if self._must_restore or not self._claim.held or self._run.writer is not self:
            return
        with contextlib.suppress(ConflictError):
            self._saver.collect(wait=True)
        self._end.save_post_mortem(self._moment(metrics, exception=f"{type(error).__name__}: {error}"))
