"""Inside the training loop: when to save, what to keep, what to restore."""

from __future__ import annotations

import contextlib
import os
import platform
import time
import warnings
from collections.abc import Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn

from simckpt import policies, provenance, restore
from simckpt.arguments import checked_step
from simckpt.background import Save, Snapshot, Writer, preparer
from simckpt.checkpoint import Checkpoint
from simckpt.decisions import DECISIONS, TEXTS, Decisions, check_arguments, checked_metrics
from simckpt.errors import (
    CheckpointNotFoundError,
    ConfigurationError,
    ConflictError,
    SaveFailedWarning,
    SimckptError,
    StateMismatchError,
    StoreError,
    UpkeepWarning,
)
from simckpt.policies import KeepAll, KeepPolicy, Moment, SavePolicy
from simckpt.signals import EXIT_REQUEUE, SignalWatcher
from simckpt.state.shared_memory import Slabs
from simckpt.state.staging import Arena
from simckpt.storage import CommitDraft
from simckpt.storage.writer_process import WriterProcess

if TYPE_CHECKING:
    from simckpt.run import Run
    from simckpt.storage import Claim, StoreFiles


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
        claim: Claim,
        components: Mapping[str, Any],
        *,
        save_when: SavePolicy,
        keep: KeepPolicy | None = None,
        background: str | None = "thread",
        when_busy: str = "wait",
    ) -> None:
        check_arguments(components, save_when, keep, background, when_busy)
        self.components = dict(components)
        self.last_error: BaseException | None = None
        self.restored_from: str | None = None
        self._run = run
        self._claim = claim
        self._save_when = save_when
        self._background = background
        self._when_busy = when_busy
        self._decisions = Decisions()
        self._bound = restore.bind({**components, DECISIONS: self._decisions})
        self._logs = restore.logs(self._bound)
        slabs = Slabs() if background == "process" else None
        self._arena = Arena() if slabs is None else Arena(slabs.allocate, discard=slabs.discard, pinned=False)
        self._process = None if slabs is None else WriterProcess(slabs)
        self._explanations = restore.Explanations(self._bound, {DECISIONS: TEXTS})
        self._rehearse()
        self._files = files
        self._writer = Writer(
            files,
            run.name,
            keep or KeepAll(),
            preparer(files, run.name, self._process),
            run.protected,
            run_id=run.id,
        )
        damaged = self._writer.read_line()
        self._must_restore = bool(self._writer.head or damaged)
        self._flight: Save | None = None
        self._put_off = ""  # why a save is due that had to wait for another one
        self._last_step = 0
        self._tried = time.monotonic()
        self._save_cost: float | None = None
        answered = policies.signals_of(save_when)
        self._watcher = SignalWatcher(answered) if answered else None
        self._entered = False
        self._pid = os.getpid()
        for seq, error in sorted(damaged.items()):
            message = f"checkpoint number {seq} of run {run.name!r} is damaged: {error}"
            warnings.warn(message, UpkeepWarning, stacklevel=3)
        # here, for training would wait for it in the first save; which asks again, if the disk refuses
        with contextlib.suppress(StoreError):
            run.start_id()

    def _rehearse(self) -> None:
        """Finds out now what cannot be captured, and touches the memory that saves will use."""
        with self._arena.recording():
            restore.rehearse(self._bound)
        self._arena.release()

    def __enter__(self) -> Checkpointer:
        """Takes over the signals that `save_when` answers, until the context is left.

        Raises:
            ConfigurationError: it is entered already, or a signal is asked for outside the main thread.
        """
        if self._entered:
            raise ConfigurationError(
                f"the checkpointer of run {self._run.name!r} is entered already: contexts of one do not nest"
            )
        if self._watcher is not None:
            self._watcher.start()
        self._entered = True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Waits for the save in flight; leaves the run claimed until `Run.close` or the end of the process.

        An exception on its way is first answered by an `OnException`; then all trouble is told by warnings. A signal
        that no `step` has answered ends the process here.

        Raises:
            ConflictError: another writer has committed to this run.
            SystemExit: a signal asked for it.
        """
        if os.getpid() != self._pid:
            return  # a fork has neither the thread that saves nor the claim
        asked = self.stop_requested
        try:
            if isinstance(error, Exception):
                self._save_post_mortem(error)
            self._finish(raising=error is None)
        finally:
            self._entered = False
            if self._watcher is not None:
                # once the process is to exit with a code, a second signal must not give it another one
                self._watcher.stop(ignore=asked is not None and (error is None or isinstance(error, SystemExit)))
        if asked is not None and error is None:
            self._exit(asked, self._last_step, "no step came after the signal")

    def close(self) -> None:
        """Waits for the save in flight and ends the writer process; what goes wrong is told by warnings."""
        self._finish(raising=False)

    def _finish(self, *, raising: bool) -> None:
        try:
            self._collect(wait=True)
        except ConflictError as error:
            if raising:
                raise
            self._warn_of_failure(error, self._last_step)
        finally:
            if self._process is not None:
                self._process.close()
        if self._put_off:
            why = f"due ({self._put_off}) and not made, for another one was in flight and no step came after it"
            message = f"a save of run {self._run.name!r} was {why}; call Checkpointer.save before the end of the loop"
            self._put_off = ""
            warnings.warn(message, SaveFailedWarning, stacklevel=4)

    @property
    def stop_requested(self) -> str | None:
        """The name of the signal that asks the process to end, such as "SIGTERM", or None.

        The next call of `step` saves and exits. Look at this wherever that call may take long to come, as in an
        evaluation or a warm-up, and go there. Only an `OnSignal` in `save_when` asks for signals.
        """
        return None if self._watcher is None or not self._entered else self._watcher.received

    def restore_latest(self) -> Checkpoint | None:
        """Returns the checkpoint that was put into the live objects, or None if the run has none yet.

        Raises:
            StateMismatchError: names, keys or shapes differ from the checkpoint's; nothing was touched.
            RestoreError: a component failed halfway; everything was put back.
            DamagedError: the checkpoint's files are damaged.
            HalfRestoredError: a component failed halfway and could not be put back.
        """
        self._collect(wait=True)
        try:
            checkpoint = self._run.latest()
        except CheckpointNotFoundError:
            return None
        extra = [name for name in checkpoint.components() if name not in self._bound]
        if extra:
            problems = [f"component {name!r} is in the checkpoint but not registered" for name in extra]
            message = f"checkpoint {checkpoint.id} does not fit the live objects, which are untouched:\n  "
            raise StateMismatchError(message + "\n  ".join(problems), problems=problems)
        checkpoint.restore_bound(self._bound)
        leaves = checkpoint.leaves() if self._logs else {}
        for name, log in self._logs.items():
            log.restored(restore.pieces_of(name, leaves))
        self._must_restore = False
        self._put_off = ""
        self._last_step = checkpoint.step
        self.restored_from = checkpoint.id
        self._run.log("restored", checkpoint=checkpoint.id, step=checkpoint.step)
        # moments of an optimizer exist only now: their buffers are touched here instead of by the first save
        with self._arena.recording():
            restore.capture(self._bound)
        self._arena.release()
        return checkpoint

    def read_line(self) -> None:
        """Takes note that checkpoints were pruned by somebody else of this process."""
        self._writer.read_line()

    def step(self, step: int, metrics: Mapping[str, float] | None = None) -> Save | None:
        """Returns the save if one was due and was begun, else None. Call it where the loop's state is whole.

        A save that fails, because the disk refuses or because something in the state cannot be captured, is reported by
        a `SaveFailedWarning` and in `last_error`: by the next call, if it failed in the background. Training goes on,
        and the next due step tries again.

        If a signal asks the process to end, this saves in the foreground, closes the run and exits with the code
        `simckpt.EXIT_REQUEUE`, 75. It does not save if that took longer, last time, than is left of the grace period.

        Args:
            step: the step the loop has reached; must not go back [env steps].
            metrics: {name: number}, kept with the checkpoint; at most 2 KB as JSON in all. None is no value yet.

        Raises:
            ConfigurationError: the arguments make no sense, the run was closed or has another checkpointer by now, or
                it has checkpoints and `restore_latest` was not called: going on would bury them under a new start.
            ConflictError: another writer has committed to this run.
            SystemExit: a signal asked for it.
        """
        begun = time.monotonic()
        self._check(step, metrics)
        self._collect(wait=False)
        moment = self._moment(metrics)
        if moment.signal is not None:
            self._save_and_exit(moment)
        decision = self._save_when.decide(moment)
        reason = decision.reason if decision.due else self._put_off
        if not reason:
            return None
        if self._flight is not None and self._when_busy != "wait":
            self._note_busy(moment, reason)
            return None
        self._collect(wait=True)
        try:
            save = self._begin(moment, reason, begun=begun)
            if self._background is None:
                self._collect(wait=True)
                return save if save.error is None else None
            return save
        except ConflictError:
            raise
        except SimckptError as error:
            self._run.log("save failed", step=moment.step, error=str(error))
            self._warn_of_failure(error, moment.step)
            return None

    def save(self, step: int, metrics: Mapping[str, float] | None = None) -> Checkpoint:
        """Returns a checkpoint saved now, whatever the policy says; it survives a power failure from now on.

        Raises:
            UnsupportedStateError: something in the state cannot be captured.
            StorageError: the disk refused; the checkpoints before this one are untouched.
            ConfigurationError, ConflictError: as `step`.
        """
        return self._save_now(step, metrics).wait()

    def _save_now(self, step: int, metrics: Mapping[str, float] | None) -> Save:
        begun = time.monotonic()
        self._check(step, metrics)
        self._collect(wait=True)
        save = self._begin(self._moment(metrics), "asked for", begun=begun, explain=True)
        try:
            save.wait()
        finally:
            # not after Ctrl-C: the save goes on, and the next call collects it
            self._collect(wait=False)
        return save

    def wait(self) -> Checkpoint | None:
        """Returns the newest checkpoint once no save is in flight; None if there is none.

        Raises:
            ConflictError: another writer has committed to this run.
        """
        self._collect(wait=True)
        line = self._writer.line
        return Checkpoint(self._files, self._run.name, line[-1]) if line else None

    def _check(self, step: Any, metrics: Any) -> None:
        """Refuses a call that makes no sense, and tells other machines that this process lives."""
        step, _ = checked_step(step), checked_metrics(metrics)
        if not self._claim.held:
            raise ConfigurationError(f"run {self._run.name!r} was closed: start it again to go on writing")
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

    def _moment(self, metrics: Mapping[str, float] | None, *, exception: str | None = None) -> Moment:
        return Moment(
            step=self._last_step,
            previous_step=self._decisions.previous_step,
            metrics=checked_metrics(metrics),
            memory=self._decisions.memory,
            elapsed=time.monotonic() - self._tried,
            save_cost=self._save_cost,
            signal=self.stop_requested,
            exception=exception,
        )

    def _begin(self, moment: Moment, reason: str, *, begun: float, explain: bool = False, kind: str = "save") -> Save:
        """Returns a save of the present state, on its way; no other one is in flight."""
        assert self._flight is None
        memory = self._decisions.memory
        self._put_off, self._tried = "", begun
        try:
            if kind == "save":
                self._decisions.previous_step = moment.step
                self._decisions.memory = {**memory, **self._save_when.remember(moment)}
            snapshot = self._take_snapshot(moment, reason, begun=begun, explain=explain, kind=kind)
            snapshot.memory = memory
            save = self._flight = Save(snapshot, self._write)
        except BaseException:
            self._decisions.memory = memory
            self._arena.release()
            raise
        try:
            if self._background is None:
                save.run()
            else:
                save.start()
        finally:
            self._save_cost = time.monotonic() - begun
        return save

    def _take_snapshot(self, moment: Moment, reason: str, *, begun: float, explain: bool, kind: str) -> Snapshot:
        start = self._run.start_id()
        for log in self._logs.values():
            log.forget(self._files.missing_segments(log.segments()))
        with self._arena.recording():
            trees = restore.capture(self._bound)
        draft = CommitDraft(
            parent=self._writer.head,
            step=moment.step,
            metrics=dict(moment.metrics),
            kind=kind,
            versions=provenance.versions(),
            host=platform.node(),
            start=start,
        )
        snapshot = Snapshot(trees, draft, due=begun, reason=reason)
        if explain or not self._explanations:
            self._arena.wait_for_copies()
            snapshot.encode()
            self._explanations.ask(snapshot.paths)
        snapshot.texts = self._explanations.texts()
        return snapshot

    def _write(self, snapshot: Snapshot) -> Checkpoint:
        self._arena.wait_for_copies()
        return self._writer.write(snapshot)

    def _collect(self, *, wait: bool) -> None:
        """Takes note of what became of the save in flight, if it has ended or `wait` is set, and tells of trouble."""
        save = self._flight
        if save is None or not (wait or save.done):
            return
        save.join()
        self._flight = None
        self._arena.release()
        snapshot, error = save.snapshot, save.error
        self.last_error = error
        if error is None:
            for name, log in self._logs.items():
                try:
                    log.committed(restore.pieces_of(name, snapshot.leaves))
                except SimckptError as problem:
                    snapshot.notes.append(f"the next save of {name!r} writes all its rows: {problem}")
            # other leaves than before: the next save has the texts for them
            self._explanations.ask(snapshot.paths)
        else:
            self._decisions.memory = snapshot.memory
        for note in snapshot.notes:
            warnings.warn(note, UpkeepWarning, stacklevel=4)
        if isinstance(error, ConflictError):
            raise error
        if error is not None and not save.told:
            self._warn_of_failure(error, snapshot.draft.step)

    def _warn_of_failure(self, error: BaseException, step: int) -> None:
        self.last_error = error
        told = str(error) if isinstance(error, SimckptError) else f"{type(error).__name__}: {error}"
        message = f"the save of run {self._run.name!r} at step {step} failed, training goes on: {told}"
        warnings.warn(message, SaveFailedWarning, stacklevel=4)

    def _note_busy(self, moment: Moment, reason: str) -> None:
        if self._when_busy == "skip":
            self._decisions.previous_step, self._tried = moment.step, time.monotonic()
            self._run.log("save skipped", step=moment.step, reason=f"{reason}; another save is in flight")
        elif not self._put_off:
            self._put_off = reason
            self._run.log("save put off", step=moment.step, reason=f"{reason}; another save is in flight")

    def _save_and_exit(self, moment: Moment) -> NoReturn:
        assert self._watcher is not None
        assert self._watcher.since is not None
        assert moment.signal is not None
        deadline = self._watcher.since + policies.grace_of(self._save_when, moment.signal)
        problem = ""
        # warnings may be errors: the scheduler must get its code all the same
        with contextlib.suppress(Warning):
            if self._flight is not None and not self._flight.join(max(0.0, deadline - time.monotonic())):
                problem = "the save in flight has not ended within the grace period"
            else:
                with contextlib.suppress(Warning):
                    self._collect(wait=True)
                problem = self._save_within(deadline, moment)
            if problem:
                kept = f"the last checkpoint is {self._writer.head or 'none yet'}"
                message = f"{moment.signal}: nothing was saved at step {moment.step}: {problem}; {kept}"
                warnings.warn(message, SaveFailedWarning, stacklevel=3)
        self._exit(moment.signal, moment.step, problem)

    def _exit(self, asked: str, step: int, problem: str) -> NoReturn:
        with contextlib.suppress(Warning):
            self._run.log("stopped", step=step, signal=asked, problem=problem, exit_code=EXIT_REQUEUE)
        with contextlib.suppress(Warning):
            self._run.close()
        raise SystemExit(EXIT_REQUEUE)

    def _save_within(self, deadline: float, moment: Moment) -> str:
        """Saves in the foreground; returns why that failed or was not begun, or nothing."""
        begun = time.monotonic()
        needed, left = self._writer.duration, deadline - begun
        if needed is not None and needed > left:
            return f"a save took {needed:.1f} s last time, and {max(0.0, left):.1f} s of the grace period are left"
        try:
            self._begin(moment, self._save_when.decide(moment).reason, begun=begun).wait()
        except ConflictError:
            raise
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        finally:
            self._collect(wait=False)
        return ""

    def _save_post_mortem(self, error: Exception) -> None:
        """Saves what an exception left behind, if a policy wants that; never raises anything of its own."""
        begun = time.monotonic()
        if self._must_restore or not self._claim.held or self._run.writer is not self:
            return
        with contextlib.suppress(ConflictError):
            self._collect(wait=True)
        moment = self._moment(None, exception=f"{type(error).__name__}: {error}")
        decision = self._save_when.decide(moment)
        if not decision.due:
            return
        try:
            self._begin(moment, decision.reason, begun=begun, explain=True, kind="exception").wait()
        except Exception as second:
            self._warn_of_failure(second, moment.step)
