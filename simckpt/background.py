"""What happens to a snapshot once it was taken: written, committed, older checkpoints pruned, all beside training.

A save runs in a thread of its own, which ends with it, and which is not a daemon: the interpreter waits for it before
it exits. Nothing here touches a live object of the program, the pipe of an env, git, or code of the user.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from simckpt import state
from simckpt.ancestry import ancestry, may_be_head
from simckpt.checkpoint import Checkpoint
from simckpt.errors import ConflictError, SegmentsKeptError, StoreError, SupersededError
from simckpt.policies import CheckpointFacts, KeepAll, KeepPolicy, retain
from simckpt.storage import Commit, CommitDraft, CommitRecord, LeafRecord, Shard, StoreFiles
from simckpt.storage.preparing import Prepared
from simckpt.storage.writer_process import WriterProcess

Texts = Mapping[str, Mapping[str, str]]


@dataclass(eq=False)
class Snapshot:
    """A state in memory, on its way to the store.

    Attributes:
        trees: {component: state tree}, sharing no memory with anything alive.
        draft: what the commit record will say.
        due: when the save was due, on the clock of `time.monotonic` [s].
        reason: why it was made.
        texts: {path: texts for people} of the leaves.
        encoded: {component: encoded state}, once it is known and until it is written.
        paths: {component: paths of its leaves}, once they are known.
        leaves: {path: leaf} of the checkpoint, once it is in the store.
        notes: what went wrong beside the save itself, one line each.
        memory: what the policies remembered before, should it fail.
        protected: {checkpoint id: reason} of what must not be pruned after it, beside what the store protects.
        when_written: called once nothing of the state is needed any more.
    """

    trees: Mapping[str, Any]
    draft: CommitDraft
    due: float
    reason: str
    texts: Texts = field(default_factory=dict)
    encoded: Mapping[str, state.Encoded] | None = None
    paths: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    leaves: Mapping[str, LeafRecord] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    memory: dict[str, float] = field(default_factory=dict)
    protected: Mapping[str, str] = field(default_factory=dict)
    when_written: Callable[[], None] = lambda: None

    def encode(self) -> Mapping[str, state.Encoded]:
        """Returns the encoded state, which shares the memory of the trees."""
        if self.encoded is None:
            self.encoded = {name: state.encode(tree) for name, tree in self.trees.items()}
            self.paths = {name: tuple(encoded.leaves) for name, encoded in self.encoded.items()}
        return self.encoded

    def drop_arrays(self) -> None:
        """Lets go of the state, so that who keeps the rest does not keep its memory."""
        self.trees, self.encoded, self.texts = {}, None, {}

    def release(self) -> None:
        """Lets go of the state, for it is on the disk, although it is no checkpoint yet."""
        self.drop_arrays()
        self.when_written()


class Save:
    """A save that has been begun; made by `Checkpointer.step`.

    Attributes:
        step: of the state that it saves [env steps].
        reason: why it was made.
        kind: of the commit: "save", "rollback" or "exception".
        snapshot: the rest of it; its arrays are gone once it is done.
        error: what it raised, once it has failed.
        told: whether its error was raised, so that nobody need be told again.
        written: set once it is on the disk, or has failed; its memory serves the next save then.
    """

    def __init__(self, snapshot: Snapshot, write: Callable[[Snapshot], Checkpoint]) -> None:
        self.step = snapshot.draft.step
        self.reason = snapshot.reason
        self.kind = snapshot.draft.kind
        self.snapshot = snapshot
        self._write = write
        self._checkpoint: Checkpoint | None = None
        self.error: BaseException | None = None
        self.told = False
        self.written = threading.Event()
        snapshot.when_written = self.written.set
        self._finished = threading.Event()
        self._turn = threading.Lock()
        self._started = threading.Event()
        self._thread: threading.Thread | None = None

    def __repr__(self) -> str:
        outcome = "failed" if self.error else "done" if self.done else "in flight"
        return f"<Save of step {self.step:,}, {outcome}>"

    @property
    def done(self) -> bool:
        """Whether it has ended, well or not."""
        return self._finished.is_set()

    def wait(self, timeout: float | None = None) -> Checkpoint:
        """Returns the checkpoint, once it survives a power failure.

        Args:
            timeout: how long to wait at most [s].

        Raises:
            TimeoutError: it is still in flight.
            StorageError, ConflictError, ...: why it failed; the checkpoints before it are untouched.
        """
        if not self.join(timeout):
            raise TimeoutError(f"the save of step {self.step} is still in flight after {timeout:g} s")
        if self.error is not None:
            self.told = True
            raise self.error
        assert self._checkpoint is not None
        return self._checkpoint

    def join(self, timeout: float | None = None) -> bool:
        """Waits for the end, whatever it is, and returns whether it has come."""
        if not self._finished.wait(timeout):
            return False
        if self._thread is not None:
            self._thread.join()
        return True

    def start(self) -> None:
        """Begins to write, in a thread of its own."""
        self._thread = threading.Thread(target=self._run, name=f"simckpt save of step {self.step}", daemon=False)
        try:
            self._thread.start()
            self._started.set()
        except BaseException as error:
            self._started.set()
            # the thread may have been made all the same, when this was Ctrl-C: one of the two has the turn
            if self._turn.acquire(blocking=False):
                self._thread = None
                self._end(error)
            if not isinstance(error, Exception):
                raise

    def run(self) -> None:
        """Writes at once, in the calling thread; Ctrl-C passes through."""
        try:
            self._checkpoint = self._write(self.snapshot)
        except BaseException as error:
            self.told = not isinstance(error, Exception)
            self._end(error)
            if self.told:
                raise
        else:
            self._end(None)

    def _run(self) -> None:
        # lets the caller go on at once: a thread that has just begun keeps the interpreter for up to 5 ms otherwise
        self._started.wait()
        if not self._turn.acquire(blocking=False):
            return
        with contextlib.suppress(BaseException):  # it is kept, for whoever asks
            self.run()

    def _end(self, error: BaseException | None) -> None:
        self.error = error
        self.snapshot.drop_arrays()
        self._finished.set()
        self.written.set()


class Preparer(Protocol):
    """Does the heavy part of a save: from encoded components to files under a temporary name."""

    def __call__(self, components: Mapping[str, state.Encoded], texts: Texts) -> Prepared:
        """Returns what `StoreFiles.publish` takes."""
        ...


def preparer(
    files: StoreFiles, run: str, process: WriterProcess | None, shard: Shard | None = None, *, lent: bool = False
) -> Preparer:
    """Returns the preparer that works in the calling thread, or the one that hands over to a process.

    Args:
        files: of the store.
        run: the run's name.
        process: that writes, or None.
        shard: which of several ranks this is.
        lent: see `StoreFiles.prepare`.
    """
    elsewhere = None if process is None else process.prepare

    def prepare(components: Mapping[str, state.Encoded], texts: Texts) -> Prepared:
        return files.prepare(run, components, attributes=texts, elsewhere=elsewhere, shard=shard, lent=lent)

    return prepare


class Publisher(Protocol):
    """Makes a checkpoint of a snapshot; called by the thread that saves, the rest by the one that trains."""

    def __call__(self, snapshot: Snapshot) -> Commit:
        """Returns what was committed; raises what `StoreFiles.commit` raises."""
        ...

    def announce(self) -> None:
        """Takes note that a save is begun, whose snapshot is not taken yet."""
        ...

    def withdraw(self, error: BaseException) -> None:
        """Takes note that the save that was announced could not be begun."""
        ...

    def give_up(self) -> None:
        """Ends the saves that are written and wait for other ranks."""
        ...


class OwnPublisher:
    """Makes the checkpoints of a process that trains alone.

    Args:
        files: of the store.
        run: the run's name.
        prepare: does the heavy part of a save.
    """

    def __init__(self, files: StoreFiles, run: str, prepare: Preparer) -> None:
        self._files = files
        self._run = run
        self._prepare = prepare

    def __call__(self, snapshot: Snapshot) -> Commit:
        """Prepares and publishes."""
        # a tensor that is sharded over a mesh of this process alone is all here
        components = {name: state.without_parts(encoded) for name, encoded in snapshot.encode().items()}
        prepared = self._prepare(components, snapshot.texts)
        draft = replace(snapshot.draft, duration=time.monotonic() - snapshot.due)
        return self._files.publish(self._run, draft, prepared)

    def announce(self) -> None:
        """Nobody waits for it."""

    def withdraw(self, error: BaseException) -> None:
        """Nobody waits for it."""

    def give_up(self) -> None:
        """No save waits for others."""


class Writer:
    """Writes one snapshot at a time; knows the run's head and the checkpoints on its line.

    Attributes:
        head: id of the newest commit that training goes on from, or None.
        line: the records of the checkpoints that the head descends from, oldest first, as far as they are not pruned.
        post_mortems: the records of what exceptions left behind.
        duration: of the last save, from the moment it was due until its commit [s]; None before the first.

    Args:
        files: of the store.
        run: the run's name.
        keep: which checkpoints stay.
        publish: makes the checkpoints.
        protections: returns {id of a checkpoint: why no policy may drop it}, as it is now.
        run_id: id of the run.
    """

    def __init__(
        self,
        files: StoreFiles,
        run: str,
        keep: KeepPolicy,
        publish: Publisher,
        protections: Callable[[], Mapping[str, str]],
        *,
        run_id: str,
    ) -> None:
        self.head: str | None = None
        self.line: list[CommitRecord] = []
        self.post_mortems: list[CommitRecord] = []
        self.duration: float | None = None
        self._files = files
        self._run = run
        self._keep = keep
        self._publish = publish
        self._protections = protections
        self._run_id = run_id
        self._passed: set[int] = set()

    def read_line(self) -> dict[int, StoreError]:
        """Reads which commit is the head and which checkpoints are on its line; returns the damaged records."""
        damaged: dict[int, StoreError] = {}
        records = self._files.records(self._run, damaged=damaged)
        line = ancestry([record for record in records if record.seq not in self._passed])
        self.head = line[-1].id if line else None
        # kept, for reading them anew takes longer with each save
        self.line = [record for record in line if isinstance(record, CommitRecord)]
        self.post_mortems = [
            record for record in records if isinstance(record, CommitRecord) and not may_be_head(record)
        ]
        return damaged

    def go_on_from(self, id: str | None) -> None:
        """Takes a commit, or the run's origin if None, for the head: whatever else there is now is left behind."""
        records = self._files.records(self._run, damaged={})
        line = [] if id is None else ancestry(records, to=id)
        self._passed = set(self._files.sequence(self._run)) - {record.seq for record in line}
        self.read_line()

    def note_restored(self, checkpoint: Checkpoint) -> None:
        """Takes note that a checkpoint was put into the live objects: the line is known from the store."""

    def write(self, snapshot: Snapshot) -> Checkpoint:
        """Returns the checkpoint of a snapshot; raises what `StoreFiles.commit` raises."""
        try:
            return self._commit(snapshot)
        except BaseException as error:
            if not isinstance(error, Exception):
                # Ctrl-C may have come after the commit was in place: then that is the head
                with contextlib.suppress(StoreError):
                    self.read_line()
            event = "save superseded" if isinstance(error, SupersededError) else "save failed"
            self._log(snapshot, event, step=snapshot.draft.step, error=str(error) or repr(error))
            raise

    def _commit(self, snapshot: Snapshot) -> Checkpoint:
        # a store that was moved away may have made room for another one, with a run of the same name
        if self._files.read_run(self._run).id != self._run_id:
            raise ConflictError(f"another run of the name {self._run!r} lies where this one was: was its store moved?")
        commit = self._publish(snapshot)
        self._finish(snapshot, commit)
        return Checkpoint(self._files, self._run, commit.record)

    def _finish(self, snapshot: Snapshot, commit: Commit) -> None:
        """Does what comes after a commit."""
        snapshot.leaves, record = commit.leaves, commit.record
        self.duration = record.duration
        self.note(record)
        try:
            self._log(snapshot, "saved", checkpoint=record.id, step=record.step, reason=snapshot.reason)
            self._prune(snapshot)
        except Exception as error:  # the checkpoint is in the store: whatever comes after it is no failure of the save
            told = str(error) if isinstance(error, StoreError) else f"{type(error).__name__}: {error}"
            snapshot.notes.append(f"no checkpoint was pruned, which is tried again after the next save: {told}")

    def note(self, record: CommitRecord) -> None:
        """Takes a commit for the head, unless it is a post-mortem."""
        if may_be_head(record):
            self.head = record.id
            self.line.append(record)
        else:
            self.post_mortems.append(record)

    def _prune(self, snapshot: Snapshot) -> None:
        self._prune_post_mortems(snapshot)
        if isinstance(self._keep, KeepAll):
            return
        facts = self._facts()
        if all(verdict.keep for verdict in retain(facts, self._keep, {})):
            return
        # who branched from here is asked only if something is to go: that takes a look at every run of the store
        protected = {**self._protections(), **snapshot.protected}
        verdicts = {each.id: each for each in retain(facts, self._keep, protected)}
        for record in list(self.line):
            if not verdicts[record.id].keep:
                self._drop(self.line, record, verdicts[record.id].reason, snapshot)

    def _prune_post_mortems(self, snapshot: Snapshot) -> None:
        """Keeps the newest one: a job that fails at every restart must not fill the disk with what it left behind."""
        if len(self.post_mortems) < 2:
            return
        protected = self._protections()
        for record in self.post_mortems[:-1]:
            if record.id not in protected:
                self._drop(self.post_mortems, record, "a newer exception was saved", snapshot)

    def _drop(self, records: list[CommitRecord], record: CommitRecord, reason: str, snapshot: Snapshot) -> None:
        try:
            self._files.prune(self._run, record.seq, reason)
        except SegmentsKeptError as error:
            snapshot.notes.append(str(error))
        except StoreError as error:
            snapshot.notes.append(
                f"checkpoint {record.id} of run {self._run!r} at step {record.step} could not be pruned, which is "
                f"tried again after the next save: {error}"
            )
            return
        records.remove(record)
        self._log(snapshot, "pruned", checkpoint=record.id, step=record.step, reason=reason)

    def _facts(self) -> list[CheckpointFacts]:
        # damaged later metrics are as good as none; tags and pins are known all the same
        marks = self._files.marks(self._run, damaged={})
        return [
            CheckpointFacts(
                id=record.id,
                step=record.step,
                metrics={**record.metrics, **(marks[record.id].metrics if record.id in marks else {})},
                created=record.created,
                size=record.size,
                tags=marks[record.id].tags if record.id in marks else frozenset(),
            )
            for record in self.line
        ]

    def _log(self, snapshot: Snapshot, event: str, **facts: Any) -> None:
        try:
            self._files.log_event(self._run, {"event": event, **facts})
        except StoreError as error:
            snapshot.notes.append(f"the log of run {self._run!r} could not be written: {error}")
