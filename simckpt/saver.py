"""Takes snapshots of a run's components and has them written, one at a time: the part of a save that training sees."""

from __future__ import annotations

import platform
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from simckpt import provenance, restore
from simckpt.background import Save, Snapshot
from simckpt.checkpoint import Checkpoint
from simckpt.decisions import DECISIONS, TEXTS, Decisions
from simckpt.errors import (
    ConfigurationError,
    ConflictError,
    SaveFailedWarning,
    SimckptError,
    SupersededError,
    UpkeepWarning,
)
from simckpt.policies import KeepAll
from simckpt.ranks import stored_name
from simckpt.shard_writing import writer_of
from simckpt.state.shared_memory import Slabs
from simckpt.state.staging import Arena
from simckpt.storage import CommitDraft, CommitRecord
from simckpt.storage.writer_process import WriterProcess

if TYPE_CHECKING:
    from simckpt.policies import KeepPolicy, Moment
    from simckpt.run import Run
    from simckpt.storage import StoreFiles


GIVEN_UP_TOLD = 8  # steps in a row that ranks which do not wait have not had in common, until that is told


class Saver:
    """Saves what is bound; knows the save in flight, and tells of trouble once it has ended.

    Attributes:
        bound: the components with their handles, the decisions among them, by their names in a checkpoint.
        components: {name: live object}, without the decisions.
        ranks: of the run.
        names: {component: its name in a checkpoint}.
        publisher: makes the checkpoints.
        writer: knows the head and its line; it is the thread's while a save is in flight.
        process: that writes, or None.
        flight: the save that was begun and not yet collected, or None.
        latest: the save that was begun last, or None.
        last_error: what the last failed save raised, or None since the last one that succeeded.
        cost: what the last save cost training [s]; None before the first.
        tried: when the last save was begun, on the clock of `time.monotonic` [s].
        put_off: why a save is due that had to wait for another one, or nothing.
        known: the components of all ranks.
        report: what a restore did with the components of another number of ranks, a line each.
        protects: returns {checkpoint id: reason} of what must not be pruned, beside what the store protects. Asked when
            a save is begun, while nothing else changes the line.

    Args:
        run: to write.
        files: of its store.
        components: {name: live object}, without the decisions.
        decisions: what the policies remember; a component of every checkpoint.
        keep: which checkpoints stay.
        background: see `Run.checkpointer`.
        when_busy: as there.
        per_rank: as there.
        coordination: as there.
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
        when_busy: str,
        per_rank: Mapping[str, bool],
        coordination: str,
    ) -> None:
        self.components = components
        self.ranks = run.ranks
        self._run = run
        self._files = files
        self._decisions = decisions
        self._background = background
        self._when_busy = when_busy
        self._keep = keep
        self.names = {**run.ranks.stored(components, per_rank), DECISIONS: DECISIONS}
        self.bound = restore.bind({**components, DECISIONS: decisions}, self.names)
        if not self.ranks.leads:
            # what it has where rank 0's copy is that of all
            own = {name: stored_name(name, self.ranks.rank) for name, stored in self.names.items() if name == stored}
            for name, kept in own.items():
                self.bound[name] = replace(self.bound[name], own=kept, ranks=self.ranks.size)
        self.logs = restore.logs(self.bound)
        shared = sorted(name for name in self.logs if name in components) if self.ranks.size > 1 else []
        if shared:
            message = f"a replay buffer is each rank's own: per_rank cannot make {shared[0]!r} one for all ranks"
            raise ConfigurationError(message, keys=["per_rank", *shared])
        slabs = Slabs() if background == "process" else None
        # a save that is done before training goes on can read the tensors where they are
        lent = background is None
        self._arena = Arena(lends=lent) if slabs is None else Arena(slabs.allocate, discard=slabs.discard, pinned=False)
        self.process = None if slabs is None else WriterProcess(slabs)
        self._explanations = restore.Explanations(self.bound, {DECISIONS: TEXTS})
        # finds out now what cannot be captured, and touches the memory that saves will use
        with self._arena.recording():
            restore.rehearse(self.bound)
        self._arena.release()
        self.publisher, self.writer = writer_of(
            run, files, keep, self.process, self.bound, coordination=coordination, lent=lent
        )
        self.flight: Save | None = None
        self._open: list[Save] = []  # written, and not committed yet, for other ranks have not
        self.latest: Save | None = None
        self._marked = False  # whether a save is in flight on other ranks that could not be begun here
        self._given_up = 0  # how many steps in a row no checkpoint came of, of ranks that do not wait
        self.last_error: BaseException | None = None
        self.cost: float | None = None
        self.tried = time.monotonic()
        self.put_off = ""
        self.report: tuple[str, ...] = ()
        self.known = frozenset(self.names)
        self.protects: Callable[[], Mapping[str, str]] = dict

    def checkpoint(self, id: str) -> Checkpoint:
        """Returns a checkpoint of the head's line."""
        known = [record for record in self.writer.line if record.id == id]
        # a rank that follows knows no more of the line than what it saw
        others = [] if known else self._files.records(self._run.name, damaged={})
        (record,) = known or [each for each in others if isinstance(each, CommitRecord) and each.id == id]
        return Checkpoint(self._files, self._run.name, record)

    def meet(self, arguments: Mapping[str, Any], *, together: bool) -> None:
        """Takes note of the components of all ranks; every rank calls it.

        Args:
            arguments: of the checkpointer, that all ranks give alike.
            together: whether the ranks save together, so that they have the same components.

        Raises:
            ConfigurationError: components or arguments are not what they should be.
        """
        shared = {name: stored == name for name, stored in self.names.items()}
        of_ranks = self.ranks.gather({"arguments": dict(arguments), "shared": shared})
        first = of_ranks[0]
        for rank, found in enumerate(of_ranks):
            for key, value in first["arguments"].items():
                if found["arguments"].get(key) != value:
                    differing = f"{key} is {value!r} on rank 0, {found['arguments'].get(key)!r} on rank {rank}"
                    message = f"the ranks give run.checkpointer other arguments, which have to be the same: {differing}"
                    raise ConfigurationError(message, keys=[key])
            single = sorted(found["shared"].keys() ^ first["shared"].keys()) if together else []
            if single:
                message = f"ranks 0 and {rank} register other components: {single[0]!r} is on one of them only"
                raise ConfigurationError(message, keys=single)
            for name in sorted(found["shared"].keys() & first["shared"].keys()):
                if found["shared"][name] != first["shared"][name]:
                    owner, other = (0, rank) if first["shared"][name] else (rank, 0)
                    message = (
                        f"component {name!r} is one for all ranks on rank {owner}, and rank {other} has its own: say "
                        f"which by per_rank={{{name!r}: ...}}, the same on all"
                    )
                    raise ConfigurationError(message, keys=["per_rank", name])
        self.known = frozenset(name for found in of_ranks for name in found["shared"]) | {DECISIONS}

    def place(self, place: str) -> str:
        """Returns what a component, or `component/variable` of a loop, is called in a checkpoint."""
        name, _, variable = (place, "", "") if place in self.names else place.rpartition("/")
        return f"{self.names[name]}/{variable}" if variable and name in self.names else self.names.get(place, place)

    def close(self) -> None:
        """Waits a while for the saves that wait for other ranks, and ends the writer process; none is in flight."""
        try:
            self.settle(self.ranks.patience)
        finally:
            if self.process is not None:
                self.process.close()

    def restored(self, checkpoint: Checkpoint, *, untouched: frozenset[str] = frozenset()) -> None:
        """Takes note that a checkpoint was put into the live objects, all but those that were left untouched."""
        self.writer.note_restored(checkpoint)
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
            self._files.compare_next_with(self._run.name, checkpoint.seq, shard=self._run.ranks.shard)

    @property
    def is_flying(self) -> bool:
        """Whether a save was begun that has not ended here."""
        return self.flight is not None and not self.flight.done

    def is_busy(self, moment: Moment, reason: str) -> bool:
        """Returns whether a save that is due must not be made now, for one is in flight; takes note of it then."""
        if (self.flight is None and not self._marked) or self._when_busy == "wait":
            return False
        if self._when_busy == "skip":
            self._decisions.previous_step, self.tried = moment.step, time.monotonic()
            self._run.log("save skipped", step=moment.step, reason=f"{reason}; another save is in flight")
        elif not self.put_off:
            self.put_off = reason
            self._run.log("save put off", step=moment.step, reason=f"{reason}; another save is in flight")
        return True

    def tell_of_put_off(self) -> None:
        """Tells that the loop has ended before a save could be made that was put off, if there is one."""
        if self.put_off:
            why = f"due ({self.put_off}) and not made, for another one was in flight and no step came after it"
            message = f"a save of run {self._run.name!r} was {why}; call Checkpointer.save before the end of the loop"
            self.put_off = ""
            warnings.warn(message, SaveFailedWarning, stacklevel=5)

    def try_to_save(self, moment: Moment, reason: str, *, begun: float, remembered: Mapping[str, float]) -> Save | None:
        """Returns a save as `begin` does, or None where it failed at once, which is told by a `SaveFailedWarning`.

        Raises:
            ConflictError: another writer has committed to this run.
        """
        try:
            save = self.begin(moment, reason, begun=begun, remembered=remembered)
            if self._background is None:
                self.collect(wait=True)
                return save if save.error is None else None
            return save
        except ConflictError:
            raise
        except SimckptError as error:
            self._run.log("save failed", step=moment.step, error=str(error))
            self.warn_of_failure(error, moment.step, stacklevel=6)
            return None

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
        self.put_off = ""
        memory = self._decisions.memory
        self.latest = None
        self.tried = begun
        self.publisher.announce()
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
                start=self._run.start_id() if self._run.ranks.leads else None,
            )
            snapshot = self._take_snapshot(draft, reason, begun=begun, explain=explain)
            snapshot.memory = memory
            if not isinstance(self._keep, KeepAll):
                snapshot.protected = dict(self.protects())
            save = self.flight = self.latest = Save(snapshot, self._write)
        except BaseException as error:
            self.publisher.withdraw(error)
            # on the other ranks it is in flight, and will fail there
            self._marked = self.ranks.size > 1
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
        for ended in [each for each in self._open if each.done]:
            self._open.remove(ended)
            self._account(ended)
        save = self.flight
        # of several ranks all take note at the same step
        if not (wait or (not self.ranks.busy and (save is None or save.written.is_set()))):
            return
        self._marked = False
        if save is None:
            return
        save.written.wait()
        self.flight = None
        self._arena.release()
        if save.done:
            self._account(save)
        else:
            self._open.append(save)

    def settle(self, timeout: float) -> None:
        """Waits for the saves that are written and wait for other ranks, so long at most [s]; then gives them up.

        If the last one became no checkpoint, a `SaveFailedWarning` says so.
        """
        until = time.monotonic() + timeout
        for save in self._open:
            save.join(max(0.0, until - time.monotonic()))
        if any(not save.done for save in self._open):
            self.publisher.give_up()
            for save in self._open:
                save.join()
        self.collect(wait=False)
        last = self.latest
        if last is not None and isinstance(last.error, SupersededError) and not last.told:
            last.told = True
            newest = self.writer.line[-1].step if self.writer.line else None
            why = f"the last save of this rank is no checkpoint, for it is none of all ranks: {last.error}"
            message = f"step {last.step} of run {self._run.name!r}: {why}; the newest checkpoint is of step {newest}"
            warnings.warn(message, SaveFailedWarning, stacklevel=5)

    def _account(self, save: Save) -> None:
        """Takes note of what became of a save that has ended."""
        save.join()
        snapshot, error = save.snapshot, save.error
        # what a newer snapshot was made from tells nothing of this one
        is_latest = save is self.latest
        if isinstance(error, SupersededError):
            self._given_up += 1
            if self._given_up == GIVEN_UP_TOLD:
                message = f"{self._given_up} steps in a row of run {self._run.name!r} became no checkpoint: {error}"
                warnings.warn(message, UpkeepWarning, stacklevel=5)
            return
        self.last_error, self._given_up = error, 0
        if error is None and is_latest:
            for name, log in self.logs.items():
                try:
                    log.committed(restore.pieces_of(name, snapshot.leaves))
                except SimckptError as problem:
                    snapshot.notes.append(f"the next save of {name!r} writes all its rows: {problem}")
            # other leaves than before: the next save has the texts for them
            self._explanations.ask(snapshot.paths)
        elif error is not None and is_latest:
            self._decisions.memory = snapshot.memory
        for note in snapshot.notes:
            warnings.warn(note, UpkeepWarning, stacklevel=5)
        if isinstance(error, ConflictError):
            raise error
        if error is not None and not save.told:
            self.warn_of_failure(error, snapshot.draft.step, stacklevel=5)

    def warn_of_failure(self, error: BaseException, step: int, *, stacklevel: int = 4) -> None:
        """Tells that a save failed, by a `SaveFailedWarning`."""
        self.last_error = error
        told = str(error) if isinstance(error, SimckptError) else f"{type(error).__name__}: {error}"
        message = f"the save of run {self._run.name!r} at step {step} failed, training goes on: {told}"
        warnings.warn(message, SaveFailedWarning, stacklevel=stacklevel)
