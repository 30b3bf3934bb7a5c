"""Compacting: freeing what nobody refers to, which kills, full disks and copied stores leave behind."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from simckpt.errors import StorageError, StoreError
from simckpt.storage import quarantine, reader, segments, usage, work
from simckpt.storage.records import TombstoneRecord
from simckpt.storage.store_pruning import job_ids, kept_error
from simckpt.storage.store_reader import COMMIT_FILE
from simckpt.storage.store_sessions import StoreSessions


@dataclass(frozen=True)
class Leftovers:
    """What is in a store that nobody refers to.

    Attributes:
        work: folders in `tmp/` that dead processes left, their names.
        segments: those that no checkpoint names and no save in progress has announced, their ids.
        checkpoints: (run, number) of pruned checkpoints that still have files.
        nbytes: what all of these and of `parts` weigh [bytes].
        unknown: segments that nothing here names at all, their ids, which stay: they may be those of a run that was
            moved away.
        unknown_nbytes: what these weigh [bytes].
        parts: of closed sessions, that merged ones cover: their paths below the store.
    """

    work: tuple[str, ...]
    segments: tuple[str, ...]
    checkpoints: tuple[tuple[str, int], ...]
    nbytes: int
    unknown: tuple[str, ...] = ()
    unknown_nbytes: int = 0
    parts: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.work or self.segments or self.checkpoints or self.parts)

    def __sub__(self, other: Leftovers) -> Leftovers:
        """Returns what is here and no longer there, and what of unknown use is there."""
        return Leftovers(
            tuple(each for each in self.work if each not in other.work),
            tuple(each for each in self.segments if each not in other.segments),
            tuple(each for each in self.checkpoints if each not in other.checkpoints),
            max(self.nbytes - other.nbytes, 0),
            other.unknown,
            other.unknown_nbytes,
            tuple(each for each in self.parts if each not in other.parts),
        )


class StoreCompacting(StoreSessions):
    """A store in which what nobody refers to is found and freed, beside savers, branches and pruners."""

    def leftovers(self, *, unknown: bool = False) -> Leftovers:
        """Returns what `compact` would free by now; frees nothing.

        Args:
            unknown: count segments that nothing names at all as what is freed.

        Raises:
            SegmentsKeptError: a record or an index is damaged or newer than this simckpt, or the folder of a checkpoint
                is missing, so that it is not known which segments are used.
            StorageError: a folder cannot be looked at for the moment.
        """
        works = self._works.left_over()
        used, announced = self._usage.by_checkpoints(), usage.by_saves(self.path, besides=works)
        if used is None or announced is None:
            raise kept_error()
        files = segments.files(self.path)
        unused = [identity for identity in sorted(files) if identity not in used | announced]
        pruned = {(run, seq): self._checkpoint_path(run, seq) for run, seq in self._pruned()}
        dead = {place: path for place, path in pruned.items() if len(_entries(path)) > 1}
        known = set(unused) if unknown else self._let_go(works, dead.values())
        freed, kept = [each for each in unused if each in known], [each for each in unused if each not in known]
        nbytes = sum(reader.size_of(path) for path in (*works, *(path for each in freed for path in files[each])))
        nbytes += sum(reader.size_of(path) - reader.size_of(path / COMMIT_FILE) for path in dead.values())
        parts = tuple(self.covered_parts())
        nbytes += sum(reader.size_of(self.path / each) for each in parts)
        kept_nbytes = sum(reader.size_of(path) for each in kept for path in files[each])
        return Leftovers(
            tuple(path.name for path in works), tuple(freed), tuple(dead), nbytes, tuple(kept), kept_nbytes, parts
        )

    def _let_go(self, works: Iterable[Path], pruned: Iterable[Path]) -> set[str]:
        """Returns the ids of segments that the store itself has let go: by a failed save, a prune, or on its way out.

        Whatever writes a segment or frees it says so in its work folder first, and that stays until it is done.
        """
        found = set(segments.trashed(self.path))
        for folder in works:
            with contextlib.suppress(FileNotFoundError, StoreError):
                job = work.read_job(folder)
                found.update(job_ids(job, "made"), job_ids(job, "segments"))
        return found.union(*(quarantine.uses(path) for path in pruned))

    def compact(self, *, unknown: bool = False) -> Leftovers:
        """Frees what nobody refers to; returns what that was, and what of unknown use stays.

        Needs no claim: a saver, on whatever host, announces what it uses before it looks for it, and what is announced
        stays. Interrupted, it is done again. What another user owns stays.

        Args:
            unknown: free segments that nothing names at all, too.

        Raises:
            SegmentsKeptError: as `leftovers`; nothing was freed.
            StorageError: the disk refused; what was freed until then is gone.
        """
        before = self.leftovers(unknown=unknown)
        if not before:
            return before
        # it ends what dead pruners had begun, too
        self.sweep()
        now = self.leftovers(unknown=unknown)
        if self._free_segments(now.segments) is None:
            raise kept_error()
        for run, seq in now.checkpoints:
            # the index goes as well: what it alone named was freed with all that nobody names
            self._clear(self._checkpoint_path(run, seq), besides=(COMMIT_FILE,))
        self.free_covered()
        return before - self.leftovers(unknown=unknown)

    def _pruned(self) -> Iterator[tuple[str, int]]:
        for run in self.runs():
            for record in self.records(run, damaged={}):
                if isinstance(record, TombstoneRecord):
                    yield run, record.seq


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return list(entries)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise StorageError(f"{folder} cannot be listed: {error.strerror}") from error
