"""Takes snapshots of a run's components and has them written, one at a time: the part of a save that training sees."""

from __future__ import annotations

import platform
import time
import warnings
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from simckpt import provenance, restore
from simckpt.background import Save, Snapshot, Writer, preparer
from simckpt.checkpoint import Checkpoint
from simckpt.decisions import DECISIONS, TEXTS, Decisions
from simckpt.errors import ConflictError, SaveFailedWarning, SimckptError, UpkeepWarning
from simckpt.policies import KeepAll
from simckpt.state.shared_memory import Slabs
from simckpt.state.staging import Arena
from simckpt.storage import CommitDraft
from simckpt.storage.writer_process import WriterProcess

if TYPE_CHECKING:
    from simckpt.policies import KeepPolicy, Moment
    from simckpt.run import Run
    from simckpt.storage import StoreFiles


class Saver:
    """Saves what is bound; knows the save in flight, and tells of trouble once it has ended.

    Attributes:
        bound: the components with their handles, the decisions among them.
        writer: knows the head and its line; it is the thread's while a save is in flight.
        process: that writes, or None.
        flight: the save that was begun and not yet collected, or None.
        last_error: what the last failed save raised, or None since the last one that succeeded.
        cost: what the last save cost training [s]; None before the first.
        tried: when the last save was begun, on the clock of `time.monotonic` [s].
        protects: returns {checkpoint id: reason} of what must not be pruned, beside what the store protects. Asked when
            a save is begun, while nothing else changes the line.

    Args:
        run: to write.
        files: of its store.
        components: {name: live object}, without the decisions.
        decisions: what the policies remember; a component of every checkpoint.
        keep: which checkpoints stay.
        background: see `Run.checkpointer`.
    """

    def __init__(
        self,
        run: Run,
        files: StoreFiles,
        components: Mapping[str, Any],
        decisions: Decisions,
        *,
        keep: KeepPolicy,
        background: str | None,
    ) -> None:
        self._run = run
        self._files = files
        self._decisions = decisions
        self._background = background
        self._keep = keep
        self.bound = restore.bind({**components, DECISIONS: decisions})
        self.logs = restore.logs(self.bound)
        slabs = Slabs() if background == "process" else None
        self._arena = Arena() if slabs is None else Arena(slabs.allocate, discard=slabs.discard, pinned=False)
        self.process = None if slabs is None else WriterProcess(slabs)
        self._explanations = restore.Explanations(self.bound, {DECISIONS: TEXTS})
        # finds out now what cannot be captured, and touches the memory that saves will use
        with self._arena.recording():
            restore.rehearse(self.bound)
        self._arena.release()
        self.writer = Writer(
            files, run.name, keep, preparer(files, run.name, self.process), run.protected, run_id=run.id
        )
        self.flight: Save | None = None
        self.last_error: BaseException | None = None
        self.cost: float | None = None
        self.tried = time.monotonic()
        self.protects: Callable[[], Mapping[str, str]] = dict

    def checkpoint(self, id: str) -> Checkpoint:
        """Returns a checkpoint of the head's line."""
        (record,) = [record for record in self.writer.line if record.id == id]
        return Checkpoint(self._files, self._run.name, record)

    def close(self) -> None:
        """Ends the writer process; no save is in flight."""
        if self.process is not None:
            self.process.close()

    def restored(self, checkpoint: Checkpoint, *, untouched: frozenset[str] = frozenset()) -> None:
        """Takes note that a checkpoint was put into the live objects, all but those that were left untouched."""
        leaves = checkpoint.leaves() if self.logs else {}
        for name, log in self.logs.items():
            if name not in untouched:
                log.restored(restore.pieces_of(name, leaves))
        # moments of an optimizer exist only now: their buffers are touched here instead of by the first save
        with self._arena.recording():
            restore.capture(self.bound)
        self._arena.release()

    def go_on_from(self, checkpoint: Checkpoint) -> None:
        """Takes note that training goes on from a checkpoint which is not the head, for newer ones are damaged."""
        is_own = checkpoint.run == self._run.name
        self.writer.go_on_from(checkpoint.id if is_own else None)
        if is_own:
            # else a large leaf that is found unchanged would refer to damaged bytes
            self._files.compare_next_with(self._run.name, checkpoint.seq)

    def begin(
        self,
        moment: Moment,
        reason: str,
        *,
        begun: float,
        explain: bool = False,
        kind: str = "save",
        parent: str | None = None,
        rollback: Mapping[str, Any] | None = None,
        remembered: Mapping[str, float] | None = None,
    ) -> Save:
        """Returns a save of the present state, on its way; no other one may be in flight.

        Args:
            moment: step and metrics of the checkpoint.
            reason: why it is made, for the log.
            begun: when it was due, on the clock of `time.monotonic` [s].
            explain: ask for the texts of all leaves now, where the process may not live to the next save.
            kind: of the commit.
            parent: id of the checkpoint that it continues; the head, or the run's origin, if None.
            rollback: of a commit of that kind.
            remembered: what the policies keep in mind from now on, unless the save fails.
        """
        assert self.flight is None
        memory = self._decisions.memory
        self.tried = begun
        try:
            if remembered is not None:
                self._decisions.previous_step = moment.step
                self._decisions.memory = {**memory, **remembered}
            draft = CommitDraft(
                parent=parent or self.writer.head or self._run.record.origin,
                step=moment.step,
                metrics=dict(moment.metrics),
                kind=kind,
                versions=provenance.versions(),
                host=platform.node(),
                rollback=rollback,
                start=self._run.start_id(),
            )
            snapshot = self._take_snapshot(draft, reason, begun=begun, explain=explain)
            snapshot.memory = memory
            if not isinstance(self._keep, KeepAll):
                snapshot.protected = dict(self.protects())
            save = self.flight = Save(snapshot, self._write)
        except BaseException:
            # not the step: a save that failed is tried again when the next one is due
            self._decisions.memory = memory
            self._arena.release()
            raise
        try:
            if self._background is None:
                save.run()
            else:
                save.start()
        finally:
            self.cost = time.monotonic() - begun
        return save

    def _take_snapshot(self, draft: CommitDraft, reason: str, *, begun: float, explain: bool) -> Snapshot:
        for log in self.logs.values():
            log.forget(self._files.missing_segments(log.segments()))
        with self._arena.recording():
            trees = restore.capture(self.bound)
        snapshot = Snapshot(trees, draft, due=begun, reason=reason)
        if explain or not self._explanations:
            self._arena.wait_for_copies()
            snapshot.encode()
            self._explanations.ask(snapshot.paths)
        snapshot.texts = self._explanations.texts()
        return snapshot

    def _write(self, snapshot: Snapshot) -> Checkpoint:
        self._arena.wait_for_copies()
        return self.writer.write(snapshot)

    def collect(self, *, wait: bool) -> None:
        """Takes note of what became of the save in flight, if it has ended or `wait` is set, and tells of trouble.

        Raises:
            ConflictError: another writer has committed to this run.
        """
        save = self.flight
        if save is None or not (wait or save.done):
            return
        save.join()
        self.flight = None
        self._arena.release()
        snapshot, error = save.snapshot, save.error
        self.last_error = error
        if error is None:
            for name, log in self.logs.items():
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
            self.warn_of_failure(error, snapshot.draft.step)

    def warn_of_failure(self, error: BaseException, step: int) -> None:
        """Tells that a save failed, by a `SaveFailedWarning`."""
        self.last_error = error
        told = str(error) if isinstance(error, SimckptError) else f"{type(error).__name__}: {error}"
        message = f"the save of run {self._run.name!r} at step {step} failed, training goes on: {told}"
        warnings.warn(message, SaveFailedWarning, stacklevel=4)
