"""Pruning, which frees files and segments that nobody else needs, and sweeping what dead processes left."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Iterable
from pathlib import Path

from simckpt.errors import (
    CheckpointNotFoundError,
    DamagedError,
    FormatError,
    InvalidNameError,
    RunNotFoundError,
    StoreError,
)
from simckpt.storage import durable, index, names, reader, sealed, segments, usage, work
from simckpt.storage import records as record_types
from simckpt.storage.records import StoreRecord, TombstoneRecord
from simckpt.storage.store_marks import StoreMarks
from simckpt.storage.store_reader import COMMIT_FILE

_WORTHLESS = (
    FileNotFoundError, InvalidNameError, CheckpointNotFoundError, RunNotFoundError, FormatError, DamagedError
)  # fmt: skip


class StorePruning(StoreMarks):
    """A store whose checkpoints can be pruned and whose left-over work can be swept."""

    def __init__(self, path: Path, record: StoreRecord, *, disk: durable.Disk) -> None:
        super().__init__(path, record, disk=disk)
        self._usage = usage.SegmentUse(self)

    def _bury(self, run: str, tombstone: TombstoneRecord) -> None:
        path = self._checkpoint_path(run, tombstone.seq)
        freed = self._segments_in(path)
        job = sealed.seal("job", {"job": "prune", "run": run, "seq": tombstone.seq, "segments": freed})
        made, begun = self._works.make(), False
        try:
            durable.write_record(self._disk, made / work.JOB_FILE, job)
            durable.write_record(self._disk, made / COMMIT_FILE, tombstone.to_bytes())
            durable.sync_folder(self._disk, made)
            begun = True
            durable.replace_file(self._disk, made / COMMIT_FILE, path / COMMIT_FILE)
            self._free(path, freed)
        except BaseException:
            # from the rename on the job stays, so that the sweep of a later process frees what this one could not
            if not begun:
                self._works.remove(made)
            raise
        self._works.remove(made)

    def _segments_in(self, checkpoint: Path) -> list[str]:
        """Returns the ids of the segments that an index names; none if it is gone or damaged: then they stay."""
        path = checkpoint / index.INDEX_FILE
        try:
            data = reader.read_small(checkpoint, index.INDEX_FILE, limit=index.INDEX_LIMIT, path=path)
            return list(index.parse_index(data, path)[1])
        except (FileNotFoundError, StoreError):
            return []

    def _free(self, checkpoint: Path, freed: Iterable[str]) -> None:
        """Removes what belongs to a checkpoint whose record is a tombstone; its index last, for it names the rest."""
        self._free_segments(set(freed))
        with durable.translated(checkpoint):
            with os.scandir(checkpoint) as entries:
                paths = [Path(entry.path) for entry in entries if entry.name != COMMIT_FILE]
            for path in sorted(paths, key=lambda path: path.name == index.INDEX_FILE):
                with contextlib.suppress(FileNotFoundError):  # a sweep of another process was quicker
                    self._disk.unlink(path)
        durable.sync_folder(self._disk, checkpoint)

    def _free_segments(self, candidates: Collection[str]) -> None:
        """Removes those of some segments that no checkpoint of the store uses and no save is about to use.

        They are moved to `trash/`, then announcements are read, **then** commits; in this order a save that is
        published meanwhile is seen in one or the other. One that has not announced itself yet will not find them, and
        fails.
        """
        used = self._usage.by_checkpoints() if candidates else None
        if used is None or not set(candidates) - used:
            return
        trash = durable.make_folders(self._disk, self.path, segments.TRASH)
        home = self.path / segments.FOLDER
        files = [segments.file_name(identity) for identity in candidates if identity not in used]
        with durable.translated(trash):
            for file in files:
                with contextlib.suppress(FileNotFoundError):  # a pruner that died may have moved it already
                    self._disk.rename(home / file, trash / file)
            announced, committed = usage.by_saves(self.path), self._usage.by_checkpoints()
            unknown = announced is None or committed is None
            needed = {segments.file_name(identity) for identity in (announced or set()) | (committed or set())}
            for file in files:
                with contextlib.suppress(FileNotFoundError):
                    if unknown or file in needed:
                        self._disk.rename(trash / file, home / file)
                    else:
                        self._disk.unlink(trash / file)
        durable.sync_folder(self._disk, home)
        durable.sync_folder(self._disk, trash)

    def sweep(self) -> list[str]:
        """Removes what dead processes left in `tmp/`, as far as it can, and returns the names of these folders."""
        return self._works.sweep(self._finish)

    def _finish(self, made: Path) -> None:
        """Ends what a dead process had begun: frees what it was pruning, removes the segments of its failed save."""
        path = made / work.JOB_FILE
        with contextlib.suppress(*_WORTHLESS):
            data = reader.read_small(made, work.JOB_FILE, limit=record_types.RECORD_LIMIT, path=path)
            job = sealed.unseal(data, "job", path=path)
            if job.text("job") == "save":
                segments.remove(self._disk, self.path, _ids(job, "made"))
                return
            run, seq = job.text("run", names.RUN_NAME), job.integer("seq", minimum=1)
            if isinstance(self._record_of(run, seq), TombstoneRecord):
                self._free(self._checkpoint_path(run, seq), _ids(job, "segments"))


def _ids(job: sealed.Fields, key: str) -> list[str]:
    # a record of version 0.1 has none
    return [identity for identity in job.optional(key, job.texts) or () if names.ID.fullmatch(identity)]
