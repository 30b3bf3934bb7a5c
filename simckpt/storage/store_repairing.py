"""Repairs: what is damaged goes into quarantine, and a record that says so takes its place. Nothing is removed.

Each step is one rename. The number of a commit stays taken, and what was damaged stays damaged until its tombstone is
there: interrupted anywhere, the same repair goes on where it was.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from simckpt.errors import ConflictError, DamagedError, FormatError, StoreError
from simckpt.storage import (
    archived,
    claims,
    digests,
    durable,
    index,
    indexes,
    marks,
    names,
    quarantine,
    reader,
    sealed,
    sessions,
    state_file,
)
from simckpt.storage import records as record_types
from simckpt.storage.records import FileRecord, StoreRecord, TombstoneRecord
from simckpt.storage.run_records import RunRecord
from simckpt.storage.store_pruning import StorePruning
from simckpt.storage.store_reader import COMMIT_FILE, RUN_FILE, STORE_FILE


class StoreRepairing(StorePruning):
    """A store whose damaged parts can be put aside."""

    def quarantine(self, run: str, seq: int, reason: str) -> TombstoneRecord:
        """Returns the tombstone of a checkpoint whose files lie in quarantine from now on, and in no other place.

        Where the checkpoint's record cannot be read the tombstone is of kind "lost". The segments that it uses stay, as
        long as its index can be read. The run's claim is taken for the duration, if this process does not hold it yet.

        Raises:
            DamagedError, FormatError: the run's record cannot be trusted: that comes first.
            ConflictError: what is there is a tombstone.
            RunLockedError: another process is writing the run.
            StorageError: the disk refused; the next call goes on from there.
        """
        place = self._checkpoint_path(run, seq)
        quarantine.check_inside(self.path, *place.relative_to(self.path).parts)
        with self._claimed(run) as claim:
            claim.verify()
            target = self._quarantined(place)
            tombstone = self._tombstone(run, seq, target, reason)
            with self._works.made() as made:
                durable.write_record(self._disk, made / COMMIT_FILE, tombstone.to_bytes())
                durable.sync_folder(self._disk, made)
                if not os.path.lexists(place):
                    # a folder that somebody removed: its number is taken all the same
                    durable.publish_folder(self._disk, made, place)
                    return tombstone
                durable.make_folders(self._disk, self.path, *target.relative_to(self.path).parts)
                with durable.translated(place):
                    for path in sorted(place.iterdir()):
                        if path.name != COMMIT_FILE:
                            self._disk.rename(path, quarantine.free_name(target / path.name))
                durable.sync_folder(self._disk, target)
                if not os.path.lexists(target / COMMIT_FILE):
                    quarantine.keep_aside(self._disk, place / COMMIT_FILE, target / COMMIT_FILE)
                durable.replace_file(self._disk, made / COMMIT_FILE, place / COMMIT_FILE)
            return tombstone

    def _quarantined(self, place: Path) -> Path:
        """Returns where a checkpoint's files go: where an interrupted repair has put some of them, or a new folder."""
        target = self.path / quarantine.FOLDER / place.relative_to(self.path)
        here = place / COMMIT_FILE
        for tried in quarantine.names_for(target):
            there = tried / COMMIT_FILE
            if not os.path.lexists(tried):
                return tried
            with contextlib.suppress(OSError):
                if tried.is_dir() and not (os.path.lexists(here) and os.path.lexists(there)):
                    return tried
                if os.path.samestat(here.lstat(), there.lstat()):
                    return tried
        raise quarantine.too_many(target)

    def _tombstone(self, run: str, seq: int, target: Path, reason: str) -> TombstoneRecord:
        try:
            record = self._record_of(run, seq)
        except StoreError:
            # an interrupted repair may have moved it
            try:
                path = target / COMMIT_FILE
                data = reader.read_small(target, COMMIT_FILE, limit=record_types.COMMIT_LIMIT, path=path)
                record = record_types.parse_commit(data, path, seq=seq, run_id=self._run_id(run))
            except (StoreError, FileNotFoundError):
                identity = self._id_by_others(run, seq) or names.random_id()
                return record_types.lost_record(
                    identity, run=self.read_run(run).id, seq=seq, now=self._clock(), reason=reason
                )
        if isinstance(record, TombstoneRecord):
            raise ConflictError(f"commit {seq} of run {run!r} has a tombstone already: {record.reason}")
        return record_types.tombstone_of(record, pruned=self._clock(), reason=reason)

    def _id_by_others(self, run: str, seq: int) -> str | None:
        """Returns the id of a checkpoint whose record is lost, if those that refer to it leave no doubt."""
        for name in self.runs():
            with contextlib.suppress(StoreError):
                other = self.read_run(name)
                if other.branch is not None and (other.branch.run, other.branch.seq) == (run, seq):
                    return other.origin
        damaged: dict[int, StoreError] = {}
        records = self.records(run, damaged=damaged)
        gaps = set(range(1, max(self.sequence(run), default=0))) - {record.seq for record in records}
        known = {record.id for record in records} | {self.read_run(run).origin, None}
        unknown = {record.parent for record in records if record.seq > seq} - known
        return unknown.pop() if len(unknown) == 1 and gaps | damaged.keys() == {seq} else None

    def put_aside(self, where: str) -> Path | None:
        """Moves a file of the store into quarantine; returns where it is now, or None if it was gone.

        Args:
            where: its path as seen from the store.

        Raises:
            StorageError: the disk refused.
        """
        return quarantine.put_aside(self._disk, self.path, where)

    def rewrite_mark(self, run: str, checkpoint: str, name: str) -> None:
        """Writes a tag or a pin again, which says all by its name; raises StorageError if the disk refuses."""
        quarantine.check_inside(self.path, "runs", run, marks.MARKS, checkpoint)
        with self._works.made() as made:
            fields = {"checkpoint": checkpoint, "mark": name}
            durable.write_record(self._disk, made / name, sealed.seal("mark", fields))
            durable.replace_file(self._disk, made / name, self.path / "runs" / run / marks.MARKS / checkpoint / name)

    def rewrite_run(self, record: RunRecord) -> None:
        """Puts a record in the place of a damaged `run.json`, which goes into quarantine.

        Raises:
            ConflictError: the record is not damaged.
            RunLockedError: a process is writing the run.
            StorageError: the disk refused.
        """
        folder = self._run_folder(record.name)
        quarantine.check_inside(self.path, "runs", record.name)
        if claims.held_claim(folder) is None:
            with claims.take(self._disk, folder, self._works.make, clock=self._clock):
                self._rewrite_run(record)
        else:
            self._rewrite_run(record)

    def _rewrite_run(self, record: RunRecord) -> None:
        with contextlib.suppress(DamagedError, FormatError):
            self.read_run(record.name)
            raise ConflictError(f"the record of run {record.name!r} is not damaged")
        self._rewrite(f"runs/{record.name}/{RUN_FILE}", record.to_bytes())

    def index_record(self, run: str, seq: int, name: str) -> FileRecord:
        """Returns what the records of a checkpoint vouch for of one of its indexes.

        Raises:
            CheckpointNotFoundError, DamagedError, FormatError: as `index`.
        """
        with self._checkpoint_folder(run, seq) as (folder, record):
            if not record.shards or name == record_types.SHARDS_FILE:
                return record.file(name)
            listing = indexes.read_listing(folder, record, self._checkpoint_path(run, seq))
            for file in listing.indexes:
                if file.name == name:
                    return file
        raise FormatError(f"checkpoint {record.id} has no index {name!r}")

    def state_file_of(self, run: str, seq: int, name: str) -> str:
        """Returns the name of the file that one of a checkpoint's indexes is of; raises as `index_record`."""
        with self._checkpoint_folder(run, seq) as (_, record):
            for shard in record_types.shards_of(record.shards):
                if shard.index_file == name:
                    return shard.state_file
        return state_file.STATE_FILE

    def rewrite_index(self, run: str, seq: int, data: bytes, name: str = index.INDEX_FILE) -> None:
        """Puts an index in the place of a damaged or lost one, which goes into quarantine.

        Args:
            run: the run's name.
            seq: commit number.
            data: its bytes.
            name: which of the checkpoint's indexes it is.

        Raises:
            DamagedError: these bytes are not those that the records vouch for.
            RunLockedError: another process is writing the run.
            StorageError: the disk refused.
        """
        path = self._checkpoint_path(run, seq) / name
        quarantine.check_inside(self.path, *path.parent.relative_to(self.path).parts)
        with self._claimed(run) as claim:
            claim.verify()
            if not digests.matches(data, self.index_record(run, seq, name).digest):
                raise DamagedError(f"{path}: these are not the bytes that the records vouch for", path=path)
            self._rewrite(str(path.relative_to(self.path)), data)

    def rewrite_store(self, id: str | None = None) -> None:
        """Puts a record in the place of `store.json`, which goes into quarantine.

        Args:
            id: of the store; if None the one that the record of its archive has, else a new one.

        Raises:
            StorageError: the disk refused.
        """
        # whether one of them has an origin is not asked: its record may be damaged as well
        requires = (sessions.FEATURE,) if sessions.session_names(self.path) else ()
        record = StoreRecord(id or archived.store_of(self.path) or names.random_id(), self._clock(), requires)
        self._rewrite(STORE_FILE, record.to_bytes())
        self.record = record

    def has_other_record(self) -> bool:
        """Returns whether a repair has put a record in the place of `store.json`, perhaps with another id."""
        return any((self.path / quarantine.FOLDER).glob(f"{STORE_FILE}*"))

    def _rewrite(self, where: str, data: bytes) -> None:
        *folders, name = where.split("/")
        quarantine.check_inside(self.path, *folders)
        aside = durable.make_folders(self._disk, self.path, quarantine.FOLDER, *folders)
        with self._works.made() as made:
            durable.write_record(self._disk, made / name, data)
            quarantine.keep_aside(self._disk, self.path / where, quarantine.free_name(aside / name))
            durable.replace_file(self._disk, made / name, self.path / where)
