"""What is added to a run beside its commits: records of its starts, and marks. Neither needs the run's claim."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from simckpt.errors import CheckpointNotFoundError
from simckpt.storage import durable, marks, starts, work
from simckpt.storage.records import StoreRecord, TombstoneRecord
from simckpt.storage.store_reader import StoreReader


class StoreMarks(StoreReader):
    """A store whose starts and marks can be written; another process may be training the run meanwhile."""

    def __init__(self, path: Path, record: StoreRecord, *, disk: durable.Disk) -> None:
        super().__init__(path, record)
        self._disk = disk
        self._works = work.WorkFolders(disk, path)

    def write_start(self, run: str, record: starts.StartRecord) -> str:
        """Returns the id of a start's record, which is written unless the run has one of this content.

        Raises:
            RunNotFoundError: no run of that name.
            ConfigurationError: values that a record cannot hold.
            StorageError: the disk refused.
        """
        self._run_folder(run)
        return starts.write_start(self._disk, self._works, self.path, run, record)

    def tag(self, run: str, seq: int, tag: str) -> None:
        """Tags a checkpoint.

        Raises:
            InvalidNameError: a text that cannot be a tag.
            CheckpointNotFoundError: no such number, or it was pruned, perhaps at this moment.
            DamagedError, FormatError: the checkpoint's record cannot be trusted.
            StorageError: the disk refused.
        """
        self._mark(run, seq, marks.tag_file(tag))

    def untag(self, run: str, seq: int, tag: str) -> None:
        """Removes a tag, if the checkpoint has it; raises as `tag`."""
        marks.unmark(self._disk, self.path, run, self._living(run, seq), marks.tag_file(tag))

    def pin(self, run: str, seq: int) -> None:
        """Protects a checkpoint from pruning by policy; raises as `tag`.

        A pruner that has just decided to drop the checkpoint and has not done it yet goes on; everyone later sees it.
        """
        self._mark(run, seq, marks.PIN)

    def unpin(self, run: str, seq: int) -> None:
        """Ends the protection, if there is one; raises as `tag`."""
        marks.unmark(self._disk, self.path, run, self._living(run, seq), marks.PIN)

    def add_metrics(self, run: str, seq: int, metrics: Mapping[str, float]) -> None:
        """Adds metrics that came after the save, at most 4 KB at a time; of two of one name the later one counts.

        Raises:
            ConfigurationError: they do not fit.
            CheckpointNotFoundError, DamagedError, FormatError, StorageError: as `tag`.
        """
        marks.add_metrics(self._disk, self._works, self.path, run, self._living(run, seq), metrics)

    def _mark(self, run: str, seq: int, name: str) -> None:
        marks.mark(self._disk, self._works, self.path, run, self._living(run, seq), name)
        self._living(run, seq)  # again: a pruner may have been quicker

    def _living(self, run: str, seq: int) -> str:
        """Returns the id of a checkpoint that has not been pruned."""
        record = self._record_of(run, seq)
        if isinstance(record, TombstoneRecord):
            raise CheckpointNotFoundError(f"checkpoint {record.id} of run {run!r} was pruned: {record.reason}")
        return record.id
