"""The local side of an archive: which checkpoints have a copy there, evicting them, taking in what comes back.

Nothing here talks to an archive: `simckpt/archive` does, and hands over files that it has verified.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from simckpt.errors import (
    ConflictError,
    DamagedError,
    FormatError,
    RunLockedError,
    StoreError,
)
from simckpt.storage import (
    archived,
    claims,
    durable,
    names,
    quarantine,
    reader,
    sealed,
    segments,
    small_files,
    work,
)
from simckpt.storage import records as record_types
from simckpt.storage.archived import ArchivedRecord, ArchiveRecord
from simckpt.storage.records import CommitRecord, TombstoneRecord
from simckpt.storage.store_pruning import StorePruning
from simckpt.storage.store_reader import COMMIT_FILE, RUN_FILE


def _order(name: str) -> tuple[int, str]:
    """Returns what sorts the files of a checkpoint; with the last of them, the first with arrays, it is here."""
    return (
        0 if name == COMMIT_FILE else 3 if archived.is_first_state(name) else 2 if name.endswith(".h5") else 1
    ), name


def _states(record: ArchivedRecord) -> list[str]:
    """Returns the names of the files with arrays, the first one first."""
    return sorted((name for name in record.files if name.endswith(".h5")), key=_order, reverse=True)


@dataclass(frozen=True)
class Incoming:
    """A work folder for files that come from an archive, announced to pruners.

    Attributes:
        folder: where they are written, under their own names, segments as `<id>.h5`.
        segments: the ids of those segments that are to come.
    """

    folder: Path
    segments: tuple[str, ...]


class StoreTiers(StorePruning):
    """A store that may have an archive behind it."""

    def archive(self) -> ArchiveRecord | None:
        """Returns where the archive is; raises DamagedError or FormatError if its record cannot be trusted."""
        return archived.read_archive(self.path)

    def write_archive(self, record: ArchiveRecord) -> None:
        """Keeps in mind where the archive is, and whose; raises StorageError if the disk refuses."""
        folder = durable.make_folders(self._disk, self.path, archived.ARCHIVE)
        with self._works.made() as made:
            data = replace(record, store=self.id).to_bytes()
            durable.write_record(self._disk, made / archived.ARCHIVE_FILE, data)
            durable.replace_file(self._disk, made / archived.ARCHIVE_FILE, folder / archived.ARCHIVE_FILE)

    def claim_archive(self) -> claims.Claim:
        """Claims the right to change the archive for this process, as a run is claimed.

        Raises:
            RunLockedError: another process is moving checkpoints.
            StorageError: the disk refused.
        """
        folder = durable.make_folders(self._disk, self.path, archived.ARCHIVE)
        try:
            return claims.take(self._disk, folder, self._works.make, clock=self._clock)
        except RunLockedError as error:
            where = f"process {error.pid} on {error.host}" if error.pid else "another process"
            raise RunLockedError(
                f"{where} is moving checkpoints of {self.path} to or from the archive: wait for it or stop it",
                host=error.host,
                pid=error.pid,
            ) from error

    def archived(self, run: str) -> dict[int, ArchivedRecord]:
        """Returns {commit number: record} of the checkpoints that the archive has; damaged records are left out."""
        found = {}
        for seq in sorted(archived.numbers(self.path, run)):
            with contextlib.suppress(DamagedError, FormatError):
                record = archived.read_archived(self.path, run, seq)
                if record is not None:
                    found[seq] = record
        return found

    def write_archived(self, run: str, record: ArchivedRecord) -> None:
        """Notes that a verified copy of a checkpoint is in the archive; raises StorageError if the disk refuses."""
        self._run_folder(run)
        folder = durable.make_folders(self._disk, self.path, "runs", run, archived.FOLDER)
        name = archived.file_name(record.seq)
        with self._works.made() as made:
            durable.write_record(self._disk, made / name, record.to_bytes())
            durable.replace_file(self._disk, made / name, folder / name)

    def forget_archived(self, run: str, seq: int) -> None:
        """Notes that a checkpoint is not in the archive any longer; raises StorageError if the disk refuses."""
        path = self.archived_file(run, seq)
        with durable.translated(path):
            try:
                # a store removes nothing behind a symbolic link
                with reader.opened_folder(self.path, "runs", run, archived.FOLDER):
                    self._disk.unlink(path)
            except FileNotFoundError:
                return
        durable.sync_folder(self._disk, path.parent)

    def evict(self, run: str, seq: int) -> None:
        """Removes the state of a checkpoint that the archive has; its record and index stay.

        Its segments stay, too, until `free_evicted`.

        Raises:
            CheckpointNotFoundError: no such number, or it was pruned.
            DamagedError, FormatError: what says that it is archived cannot be trusted; nothing was removed.
            StorageError: the disk refused.
        """
        checkpoint = self._living(run, seq)
        record = archived.read_archived(self.path, run, seq)
        if record is None or record.checkpoint != checkpoint:
            raise FormatError(f"checkpoint {checkpoint} of run {run!r} is not in the archive: it is not evicted")
        folder, states = self._checkpoint_path(run, seq), _states(record)
        # the first one first: without it the checkpoint is not here, whatever a kill leaves of the others
        with durable.translated(folder / states[0]), contextlib.suppress(FileNotFoundError):
            self._disk.unlink(folder / states[0])
        self._remove_others(folder, states)

    def _remove_others(self, folder: Path, states: list[str]) -> None:
        """Removes the states of an evicted checkpoint but the first, unless that comes back meanwhile."""
        first, *others = states
        if others:
            with self._works.made() as made:
                taken = [name for name in others if self._take_out(folder / name, made / name)]
                # a fetch by another process brings the first back last, and looks for the others after that: of the
                # two whoever looks later sees what the other one did
                if os.path.lexists(folder / first):
                    for name in taken:
                        durable.replace_file(self._disk, made / name, folder / name)
        durable.sync_folder(self._disk, folder)

    def _take_out(self, path: Path, target: Path) -> bool:
        with durable.translated(path), contextlib.suppress(FileNotFoundError):
            self._disk.rename(path, target)
            return True
        return False

    def free_evicted(self) -> None:
        """Frees what nobody needs but checkpoints whose state is in the archive alone.

        Raises:
            StorageError: the disk refused; tried again at the next call.
        """
        candidates: set[str] = set()
        for run in self.runs():
            known = self.archived(run)
            for seq in archived.evicted(self.path, run) & known.keys():
                candidates |= known[seq].segments.keys()
                folder, states = self._checkpoint_path(run, seq), _states(known[seq])
                if any(os.path.lexists(folder / name) for name in states[1:]):
                    self._remove_others(folder, states)
        home = self.path / segments.FOLDER
        here = {identity for identity in candidates if os.path.lexists(home / segments.file_name(identity))}
        self._free_segments(here)

    @contextlib.contextmanager
    def incoming(self, run: str, uses: Collection[str], made: Collection[str]) -> Iterator[Incoming]:
        """Gives a work folder for what comes from an archive; what is left in it after the block is removed.

        Args:
            run: the run's name.
            uses: ids of all segments that the checkpoint uses: from now on no pruner frees them.
            made: ids of those that come.
        """
        folder = self._works.make()
        fields = {"job": "save", "run": run, "uses": sorted(uses), "made": sorted(made)}
        try:
            durable.write_record(self._disk, folder / work.JOB_FILE, sealed.seal("job", fields))
            durable.sync_folder(self._disk, folder)
            durable.sync_folder(self._disk, folder.parent)
            yield Incoming(folder, tuple(made))
        finally:
            self._works.remove(folder)

    def write_incoming(self, incoming: Incoming, name: str, parts: Iterator[tuple[int, bytes]], size: int) -> None:
        """Writes a file into a work folder, durably, anew if it is there; raises StorageError if the disk refuses."""
        path = incoming.folder / name
        with durable.translated(path), contextlib.suppress(FileNotFoundError):
            self._disk.unlink(path)
        durable.write_file(self._disk, path, parts, size=size)

    def replace(self, run: str, seq: int, incoming: Incoming, files: Collection[str]) -> None:
        """Puts files that came from the archive in their places; with the last of them the checkpoint is here.

        A checkpoint whose folder is gone gets that with all that is in it, under the run's claim. A folder that lies in
        the place of a file goes into quarantine.

        Args:
            run: the run's name.
            seq: commit number.
            incoming: with the segments and files, verified.
            files: names of those that belong into the checkpoint's folder.

        Raises:
            CheckpointNotFoundError: it was pruned meanwhile.
            RunLockedError: its folder is gone, and another process is writing the run.
            StorageError: the disk refused.
        """
        path = self._checkpoint_path(run, seq)
        is_whole = COMMIT_FILE in files and any(map(archived.is_first_state, files))
        if is_whole and not os.path.lexists(path):
            with self._claimed(run):
                self._take_in(run, seq, incoming)
            return
        for place in (*map(self.segment_file, incoming.segments), *(path / name for name in files)):
            if place.is_dir() and not place.is_symlink():
                quarantine.put_aside(self._disk, self.path, str(place.relative_to(self.path)))
        segments.publish(self._disk, self.path, incoming.folder, incoming.segments)
        for name in sorted(files, key=_order):
            if not (name == COMMIT_FILE and self._is_readable(run, seq)):
                durable.replace_file(self._disk, incoming.folder / name, path / name)
        if isinstance(self._record_of(run, seq), TombstoneRecord):
            self._clear(path, besides=(COMMIT_FILE,))
            self._living(run, seq)

    def _is_readable(self, run: str, seq: int) -> bool:
        # a record that can be read is never replaced: it may be a tombstone by now
        try:
            self._record_of(run, seq)
        except StoreError:
            return False
        return True

    def adopt(self, run: str, seq: int, incoming: Incoming, record: CommitRecord | TombstoneRecord) -> None:
        """Makes a commit of the same run, which comes from elsewhere, one of this store; the run must be claimed.

        Args:
            run: the run's name.
            seq: commit number, which must be free.
            incoming: with the segments and the files of the checkpoint, `commit.json` among them, verified.
            record: what `commit.json` says.

        Raises:
            ConflictError: the number is taken, or the claim is not this process's.
            StorageError: the disk refused.
        """
        if claims.held_claim(self._run_folder(run)) is None or record.run != self.read_run(run).id:
            raise ConflictError(f"run {run!r} is not claimed, or is another one: nothing was taken in")
        self._take_in(run, seq, incoming)

    def _take_in(self, run: str, seq: int, incoming: Incoming) -> None:
        claim = claims.held_claim(self._run_folder(run))
        assert claim is not None
        claim.verify()
        durable.make_folders(self._disk, self.path / "runs" / run, "checkpoints")
        claim.next_seq = None
        segments.publish(self._disk, self.path, incoming.folder, incoming.segments)
        durable.sync_folder(self._disk, incoming.folder)
        durable.publish_folder(self._disk, incoming.folder, self._checkpoint_path(run, seq))
        claim.beat(now=True)

    def was_put_aside(self, run: str, record: TombstoneRecord) -> bool:
        """Returns whether a repair has left a tombstone, for what it found damaged or gone: nobody has pruned that."""
        folder = self.path / quarantine.FOLDER / "runs" / run / "checkpoints"
        is_told = record.kind == record_types.LOST or record.reason.startswith(quarantine.REASON)
        return is_told or any(folder.glob(f"{names.sequence_name(record.seq)}*"))

    def record_bytes(self, run: str, seq: int) -> tuple[CommitRecord | TombstoneRecord, bytes]:
        """Returns a checkpoint's record, verified, and its bytes; FileNotFoundError if it is gone, else as `index`."""
        names.check_run_name(run)
        path = self._checkpoint_path(run, seq) / COMMIT_FILE
        parts = ("runs", run, "checkpoints", path.parent.name, COMMIT_FILE)
        data = reader.read_small(self.path, *parts, limit=record_types.COMMIT_LIMIT, path=path)
        return record_types.parse_commit(data, path, seq=seq, run_id=self._run_id(run)), data

    def folder_of(self, run: str, seq: int) -> Path:
        """Returns the path of a checkpoint's folder, whether it is there or not."""
        return self._checkpoint_path(run, seq)

    def archived_file(self, run: str, seq: int) -> Path:
        """Returns the path of the record that says that a checkpoint is archived."""
        return self.path / "runs" / run / archived.FOLDER / archived.file_name(seq)

    def small_files(self, run: str) -> dict[str, int]:
        """Returns {name below the run's folder: bytes} of its starts, marks and log; raises StorageError."""
        return small_files.listed(self._run_folder(run))

    def is_small(self, file: str) -> bool:
        """Returns whether a name below a run's folder is that of a start, a mark or the log."""
        return small_files.is_small(file)

    def small_file(self, run: str, file: str) -> bytes:
        """Returns the bytes of one of these files, or of the run's record; raises as reading them does."""
        return small_files.read(self.path, run, file)

    def good_small(self, run: str, file: str) -> bytes | None:
        """Returns the bytes of one of these files, or of the run's record, or None if it is gone or damaged."""
        try:
            data = self.small_file(run, file)
            if file == RUN_FILE:
                self.read_run(run)
            self.check_small(run, file, data)
        except (DamagedError, FormatError, FileNotFoundError):
            return None
        return data

    def check_small(self, run: str, file: str, data: bytes) -> None:
        """Raises DamagedError or FormatError if these bytes are not what the name of one of these files says."""
        small_files.check(file, data, self.path / "runs" / run / file)

    def take_small(self, run: str, file: str, data: bytes) -> None:
        """Gives a run one of these files unless it has it; raises DamagedError, FormatError or StorageError."""
        self._run_folder(run)
        small_files.take(self._disk, self._works, self.path, run, file, data)

    def segment_file(self, identity: str) -> Path:
        """Returns the path of a segment."""
        if not names.ID.fullmatch(identity):
            raise FormatError(f"{identity[:80]!r} is no id of a segment")
        return self.path / segments.FOLDER / segments.file_name(identity)
