"""Which checkpoints are the origins of runs and sessions, and how these and a pruner that meet do not miss each other.

A branch, or a session, writes its record in `tmp/` and then looks whether its origin is there and nobody is about to
prune it. A pruner announces what it prunes in `tmp/` and then looks who has branched from it, `tmp/` first, for what is
written there gets its name by one rename. Whichever comes second sees the other, and gives way.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from simckpt.errors import (
    CheckpointNotFoundError,
    ConflictError,
    DamagedError,
    RunNotFoundError,
    SessionNotFoundError,
    StoreError,
)
from simckpt.storage import processes, reader, records, sessions, work
from simckpt.storage.records import CommitRecord
from simckpt.storage.run_records import RunRecord, parse_run
from simckpt.storage.session_records import parse_session
from simckpt.storage.store_reader import RUN_FILE, Stamp, StoreReader, stamp


class Origins:
    """Knows the origin of each run of a store; a record is read again only when it was replaced."""

    def __init__(self, store: StoreReader) -> None:
        self._store = store
        self._known: dict[str, tuple[Stamp, str | None]] = {}
        self._recorded: dict[str, tuple[Stamp, str | None]] = {}

    def by_runs(self) -> dict[str, str]:
        """Returns {run: id of the checkpoint that it started from} of those that have one.

        Raises:
            DamagedError, FormatError, StorageError: a run's record cannot be read; what it needs is not known.
        """
        found: dict[str, tuple[Stamp, str | None]] = {}
        for name in self._store.runs():
            with contextlib.suppress(FileNotFoundError, RunNotFoundError):  # removed since it was listed
                with reader.opened_folder(self._store.path, "runs", name) as folder:
                    now = stamp(folder, RUN_FILE)
                before = self._known.get(name)
                found[name] = before if before and before[0] == now else (now, self._store.read_run(name).origin)
        self._known = found
        return {name: origin for name, (_, origin) in found.items() if origin is not None}

    def by_sessions(self) -> dict[str, str]:
        """Returns {session: id of the checkpoint that was driving} of those that have one; raises as `by_runs`."""
        found: dict[str, tuple[Stamp, str | None]] = {}
        for name in sessions.session_names(self._store.path):
            with contextlib.suppress(FileNotFoundError, SessionNotFoundError):  # removed since it was listed
                with reader.opened_folder(self._store.path, sessions.SESSIONS, name) as folder:
                    now = stamp(folder, sessions.SESSION_FILE)
                before = self._recorded.get(name)
                if before and before[0] == now:
                    found[name] = before
                else:
                    origin = sessions.read_session(self._store.path, name).origin
                    found[name] = (now, None if origin is None else origin.checkpoint)
        self._recorded = found
        return {name: origin for name, (_, origin) in found.items() if origin is not None}

    def check_unused(self, checkpoint: str) -> None:
        """Raises ConflictError if a run or a session has the checkpoint of this id for its origin, or is about to.

        Raises:
            DamagedError, FormatError, StorageError: as `by_runs`.
        """
        for folder in _work_of_the_living(self._store.path):
            with contextlib.suppress(FileNotFoundError, DamagedError):
                path = folder / sessions.SESSION_FILE
                data = reader.read_small(folder, sessions.SESSION_FILE, limit=records.RECORD_LIMIT, path=path)
                session = parse_session(data, path)
                if session.origin is not None and session.origin.checkpoint == checkpoint:
                    raise ConflictError(f"checkpoint {checkpoint} stays: session {session.name!r} begins from it")
            # a record that is not whole yet belongs to a branch that has not looked at its origin yet
            with contextlib.suppress(FileNotFoundError, DamagedError):
                path = folder / RUN_FILE
                data = reader.read_small(folder, RUN_FILE, limit=records.RECORD_LIMIT, path=path)
                record = parse_run(data, path)
                if record.origin == checkpoint:
                    raise ConflictError(f"checkpoint {checkpoint} stays: run {record.name!r} is being branched from it")
        for name, origin in self.by_runs().items():
            if origin == checkpoint:
                raise ConflictError(f"checkpoint {checkpoint} stays: run {name!r} was branched from it")
        for name, origin in self.by_sessions().items():
            if origin == checkpoint:
                raise ConflictError(f"checkpoint {checkpoint} stays: it was driving in session {name!r}")

    def check_present(self, record: RunRecord) -> None:
        """Raises an error if the origin of a branch is gone, or about to go; its record lies in `tmp/` already.

        Raises:
            CheckpointNotFoundError: it has been pruned, or there is no such checkpoint.
            ConflictError: a pruner is at work on it.
            DamagedError, FormatError, StorageError: its record cannot be read.
        """
        assert record.branch is not None
        assert record.origin is not None
        self.check_checkpoint(record.origin, record.branch.run, record.branch.seq)

    def check_checkpoint(self, id: str, run: str, seq: int) -> None:
        """Does what `check_present` does, for any record in `tmp/` that names a checkpoint as its origin."""
        # in this order: an announcement that is gone has become a tombstone, or the pruner has given way
        busy = _is_being_pruned(self._store.path, run, seq)
        origin = self._store.commit_record(run, seq)
        name = f"checkpoint {id} of run {run!r}"
        if origin.id != id:
            raise CheckpointNotFoundError(f"{name} is not in the store any longer: commit {seq} is another one")
        if not isinstance(origin, CommitRecord):
            raise CheckpointNotFoundError(f"{name} has been pruned and cannot be an origin: {origin.reason}")
        if busy:
            raise ConflictError(f"{name} is being pruned at this moment and cannot be an origin")


def _work_of_the_living(root: Path) -> Iterator[Path]:
    """Yields the work folders but those of dead processes, which give nothing in them its name any more."""
    for folder in work.folders(root / "tmp"):
        maker = processes.Process.from_token(folder.name)
        if maker is None or maker.is_alive() is not False:
            yield folder


def _is_being_pruned(root: Path, run: str, seq: int) -> bool:
    for folder in _work_of_the_living(root):
        with contextlib.suppress(FileNotFoundError, StoreError):
            job = work.read_job(folder)
            if job.text("job") == "prune" and (job.text("run"), job.integer("seq")) == (run, seq):
                return True
    return False
