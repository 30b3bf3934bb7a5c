"""Writing a store: creating it, its runs, commits, pruning. FORMAT.md says why in this order.

Nothing here knows environments, modules or policies: it takes and gives encoded components and records.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from simckpt.errors import (
    CheckpointNotFoundError,
    ConflictError,
    DamagedError,
    FormatError,
    InvalidNameError,
    NotAStoreError,
    RunNotFoundError,
)
from simckpt.state.tree import Encoded
from simckpt.storage import claims, digests, durable, names, reader, sealed, state_file, work
from simckpt.storage import index as leaf_index
from simckpt.storage import records as record_types
from simckpt.storage.index import LeafRecord
from simckpt.storage.records import CommitDraft, CommitRecord, FileRecord, RunRecord, StoreRecord, TombstoneRecord
from simckpt.storage.store_reader import COMMIT_FILE, EVENTS_FILE, INDEX_FILE, RUN_FILE, STORE_FILE, StoreReader

JOB_FILE = "job.json"

# as long as what the record will say of its files
_UNKNOWN_FILES = (
    FileRecord(state_file.STATE_FILE, 2**62, f"{digests.ALGORITHM}:{'0' * 32}", "metadata"),
    FileRecord(INDEX_FILE, 2**62, f"{digests.ALGORITHM}:{'0' * 32}", "file"),
)


class StoreFiles(StoreReader):
    """A store on disk, for reading and writing.

    Attributes:
        path: the store's folder, symbolic links resolved.
        record: of `store.json`.
    """

    def __init__(
        self,
        path: Path,
        record: StoreRecord,
        *,
        disk: durable.Disk,
        clock: Callable[[], float],
        new_id: Callable[[], str],
    ) -> None:
        super().__init__(path, record)
        self._disk = disk
        self._clock = clock
        self._new_id = new_id
        self._works = work.WorkFolders(disk, path)
        self._readable: list[tuple[Any, ...]] = []  # all but places and digests of an index that was found readable

    @classmethod
    def create(
        cls,
        path: str | os.PathLike[str],
        *,
        disk: durable.Disk | None = None,
        clock: Callable[[], float] = time.time,
        new_id: Callable[[], str] = names.random_id,
    ) -> StoreFiles:
        """Returns the store at `path`, which is created there if there is none.

        Args:
            path: missing, empty, or a store.
            disk: the system calls, for tests.
            clock: the time [s since 1970], for tests.
            new_id: gives random ids, for tests.

        Raises:
            NotAStoreError: a folder with other files in it, or no folder at all.
            UnsupportedFormatError, DamagedError: a store that this simckpt cannot read.
            StorageError: the disk refused.
        """
        disk = disk or durable.Disk()
        root = Path(path).expanduser().resolve()
        if not os.path.lexists(root / STORE_FILE):
            _create(disk, root, StoreRecord(new_id(), clock()))
        return cls.open(root, disk=disk, clock=clock, new_id=new_id)

    @classmethod
    def open(
        cls,
        path: str | os.PathLike[str],
        *,
        disk: durable.Disk | None = None,
        clock: Callable[[], float] = time.time,
        new_id: Callable[[], str] = names.random_id,
    ) -> StoreFiles:
        """Returns the store at `path`, writing nothing; see `create` for the arguments.

        Raises:
            NotAStoreError: there is none.
            UnsupportedFormatError: written by a newer simckpt, or with a feature that this one lacks.
            DamagedError: `store.json` differs from its digest.
        """
        root = Path(path).expanduser().resolve()
        file = root / STORE_FILE
        if root.is_file():
            raise NotAStoreError(f"{root} is not a store but a file")
        try:
            data = reader.read_small(root, STORE_FILE, limit=record_types.RECORD_LIMIT, path=file)
        except FileNotFoundError as error:
            raise NotAStoreError(f"{root} is not a store: it has no {STORE_FILE}") from error
        record = record_types.parse_store(data, file)
        return cls(root, record, disk=disk or durable.Disk(), clock=clock, new_id=new_id)

    def claim(self, run: str) -> claims.Claim:
        """Claims a run for this process, and sweeps what dead processes left in the store.

        Raises:
            InvalidNameError, RunNotFoundError: no run can have, or none has, that name.
            DamagedError, FormatError: the run's record cannot be trusted.
            RunLockedError: another process is writing it.
            StorageError: the disk refused.
        """
        self.read_run(run)
        claim = claims.take(self._disk, self._run_folder(run), self._works.make, clock=self._clock)
        try:
            self.sweep()
        except BaseException:
            claim.release()
            raise
        return claim

    def write_run(self, run: str, record: RunRecord) -> None:
        """Creates a run, or replaces the record of one that this process has claimed.

        Raises:
            InvalidNameError: a name that cannot be a folder's.
            ConflictError: the run exists and this process does not hold its claim, or its id is another one.
            ConfigurationError: hyperparameters or other fields that a record cannot hold.
            StorageError: the disk refused; the record is as before.
        """
        names.check_run_name(run)
        if record.name != run:
            raise InvalidNameError(f"the record is of run {record.name!r}, the folder of run {run!r}")
        data = record.to_bytes()
        folder = durable.make_folders(self._disk, self.path, "runs") / run
        with self._works.made() as made:
            durable.write_record(self._disk, made / RUN_FILE, data)
            if not os.path.lexists(folder):
                durable.make_folders(self._disk, made, "checkpoints")
                durable.sync_folder(self._disk, made)
                durable.publish_folder(self._disk, made, folder)
                return
            claim = claims.held_claim(self._run_folder(run))
            if claim is None:
                raise ConflictError(f"run {run!r} exists already; claim it to change its record")
            claim.verify()
            if self.read_run(run).id != record.id:
                raise ConflictError(f"run {run!r} has another id: a run keeps its identity")
            durable.replace_file(self._disk, made / RUN_FILE, folder / RUN_FILE)

    def commit(
        self,
        run: str,
        draft: CommitDraft,
        components: Mapping[str, Encoded],
        *,
        attributes: Mapping[str, Mapping[str, str]] | None = None,
    ) -> CommitRecord:
        """Returns the record of a new checkpoint, which survives a power failure from now on.

        The run's claim is taken for the duration, if this process does not hold it yet.

        Args:
            run: the run's name.
            draft: parent, step, metrics and so on.
            components: {name: encoded state}; nobody may change its arrays meanwhile.
            attributes: {path of a group or leaf: {name: text}}, for people who open `state.h5`.

        Raises:
            RunNotFoundError: no run of that name was written.
            ConflictError: another writer committed first, or took over the claim; this save is not in the store.
            RunLockedError: another process is writing the run.
            StorageFullError, StorageError: the disk refused; this save is not in the store and left nothing behind.
            ConfigurationError: metrics beyond the 4 KB of a commit record, or other fields that it cannot hold.
            FormatError: leaves that no file can hold.
        """
        run_id = self.read_run(run).id
        with self._claimed(run) as claim:
            claim.verify()
            record = CommitRecord(
                id=self._new_id(),
                run=run_id,
                seq=self._next_seq(claim, run),
                parent=draft.parent,
                kind=draft.kind,
                step=draft.step,
                created=self._clock(),
                metrics=dict(draft.metrics),
                versions=dict(draft.versions),
                host=draft.host,
                rollback=draft.rollback,
            )
            replace(record, files=_UNKNOWN_FILES).to_bytes()  # what cannot fit is refused before the state is written
            record = self._write_checkpoint(claim, record, components, attributes)
            claim.beat(now=True)
            return record

    def _next_seq(self, claim: claims.Claim, run: str) -> int:
        # listed once for each claim: a commit by somebody else must be a conflict, not a gap that is filled
        if claim.next_seq is None:
            durable.make_folders(self._disk, self.path / "runs" / run, "checkpoints")
            claim.next_seq = 1 + max(self.sequence(run), default=0)
        return claim.next_seq

    def _write_checkpoint(
        self,
        claim: claims.Claim,
        record: CommitRecord,
        components: Mapping[str, Encoded],
        attributes: Mapping[str, Mapping[str, str]] | None,
    ) -> CommitRecord:
        # unless it is known whether the commit is in place, which after Ctrl-C just behind the rename it is not, the
        # folder is listed again and the next commit goes after it
        claim.next_seq = None
        try:
            with self._works.made() as made:
                state, leaves = state_file.write_state(self._disk, made, components, attributes=attributes)
                index = self._sealed_index(leaves)
                durable.write_record(self._disk, made / INDEX_FILE, index)
                files = (state, FileRecord(INDEX_FILE, len(index), digests.digest(index), "file"))
                record = replace(record, files=files)
                durable.write_record(self._disk, made / COMMIT_FILE, record.to_bytes())
                durable.sync_folder(self._disk, made)
                claim.verify()  # again: a large state takes a while
                durable.publish_folder(self._disk, made, self._checkpoint_path(claim.run, record.seq))
        except ConflictError:
            claim.next_seq = record.seq
            raise
        claim.next_seq = record.seq + 1
        return record

    def _sealed_index(self, leaves: list[LeafRecord]) -> bytes:
        """Returns the bytes of an index that a reader will take; raises FormatError if it would not."""
        data = leaf_index.seal_index(leaves)
        form = [(leaf.path, leaf.kind, leaf.dtype, leaf.shape, leaf.stored, leaf.stored_shape) for leaf in leaves]
        if form != self._readable:  # reading takes twice as long as writing, and most saves differ in values alone
            leaf_index.parse_index(data, INDEX_FILE)
            self._readable = form
        return data

    def prune(self, run: str, seq: int, reason: str) -> TombstoneRecord:
        """Returns the tombstone that replaces a checkpoint; its state is gone, its id and place in the lineage stay.

        Interrupted at any point, the checkpoint is whole or has a tombstone. Pruning a tombstone frees what an
        interruption left. The run's claim is taken for the duration, if this process does not hold it yet.

        Raises:
            CheckpointNotFoundError: no such number.
            DamagedError, FormatError: the commit record cannot be trusted.
            RunLockedError: another process is writing the run.
            StorageError: the disk refused.
        """
        self._run_folder(run)
        with self._claimed(run) as claim:
            claim.verify()
            record = self._record_of(run, seq)
            if isinstance(record, TombstoneRecord):
                self._free(self._checkpoint_path(run, seq))
                return record
            tombstone = record_types.tombstone_of(record, pruned=self._clock(), reason=reason)
            with claim.spending_reserve():
                self._bury(run, tombstone)
            return tombstone

    def _bury(self, run: str, tombstone: TombstoneRecord) -> None:
        path = self._checkpoint_path(run, tombstone.seq)
        job = sealed.seal("job", {"job": "prune", "run": run, "seq": tombstone.seq})
        made, begun = self._works.make(), False
        try:
            durable.write_record(self._disk, made / JOB_FILE, job)
            durable.write_record(self._disk, made / COMMIT_FILE, tombstone.to_bytes())
            durable.sync_folder(self._disk, made)
            begun = True
            durable.replace_file(self._disk, made / COMMIT_FILE, path / COMMIT_FILE)
            self._free(path)
        except BaseException:
            # from the rename on the job stays, so that the sweep of a later process frees what this one could not
            if not begun:
                self._works.remove(made)
            raise
        self._works.remove(made)

    def _free(self, checkpoint: Path) -> None:
        """Removes the files of a checkpoint whose record is a tombstone."""
        with durable.translated(checkpoint):
            with os.scandir(checkpoint) as entries:
                paths = [Path(entry.path) for entry in entries if entry.name != COMMIT_FILE]
            for path in paths:
                with contextlib.suppress(FileNotFoundError):  # a sweep of another process was quicker
                    self._disk.unlink(path)
        durable.sync_folder(self._disk, checkpoint)

    def sweep(self) -> list[str]:
        """Removes what dead processes left in `tmp/`, as far as it can, and returns the names of these folders."""
        return self._works.sweep(self._finish_prune)

    def _finish_prune(self, made: Path) -> None:
        """Frees the files of a checkpoint whose pruner died after it had put the tombstone in place."""
        path = made / JOB_FILE
        with contextlib.suppress(
            FileNotFoundError, InvalidNameError, CheckpointNotFoundError, RunNotFoundError, FormatError, DamagedError
        ):
            data = reader.read_small(made, JOB_FILE, limit=record_types.RECORD_LIMIT, path=path)
            job = sealed.unseal(data, "job", path=path)
            run, seq = job.text("run", names.RUN_NAME), job.integer("seq", minimum=1)
            if isinstance(self._record_of(run, seq), TombstoneRecord):
                self._free(self._checkpoint_path(run, seq))

    def log_event(self, run: str, event: Mapping[str, Any]) -> None:
        """Appends a line to the run's log for people; nothing is ever decided from it.

        Raises:
            StorageError: the disk refused.
        """
        content = {"time": sealed.time_to_json(self._clock())["utc"], **event}
        line = json.dumps(content, default=str, ensure_ascii=True).encode("ascii")
        durable.append_line(self._disk, self._run_folder(run) / EVENTS_FILE, line)

    @contextlib.contextmanager
    def _claimed(self, run: str) -> Iterator[claims.Claim]:
        held = claims.held_claim(self._run_folder(run))
        if held is not None:
            yield held
        else:
            with self.claim(run) as claim:
                yield claim


def _create(disk: durable.Disk, root: Path, record: StoreRecord) -> None:
    """Creates the folder and, first of all in it, `store.json`; if two processes do so at once, one record stays."""
    try:
        foreign = sorted({path.name for path in root.iterdir()} - {"tmp"})
    except FileNotFoundError:
        foreign = []
    except OSError as error:
        raise NotAStoreError(f"{root} cannot become a store: {error.strerror}") from error
    if STORE_FILE in foreign:
        return
    if foreign:
        shown = ", ".join(foreign[:3])
        raise NotAStoreError(f"{root} is no store and not empty ({shown}): give the path of a new folder")
    existing = next(folder for folder in (root, *root.parents) if folder.exists())
    durable.make_folders(disk, existing, *root.relative_to(existing).parts)
    with work.WorkFolders(disk, root).made() as made:
        durable.write_record(disk, made / STORE_FILE, record.to_bytes())
        durable.publish_file(disk, made / STORE_FILE, root / STORE_FILE)
