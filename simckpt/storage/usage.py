"""Which segments are in use: by checkpoints, of whichever run of the store, and by saves in progress."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Collection, Iterable
from pathlib import Path

from simckpt.errors import CheckpointNotFoundError, DamagedError, StorageError, StoreError
from simckpt.storage import archived, index, names, quarantine, reader, segments, work
from simckpt.storage.records import TombstoneRecord
from simckpt.storage.store_reader import COMMIT_FILE, RUN_FILE, Stamp, StoreReader, stamp

_Identity = tuple[Stamp, int]


class SegmentUse:
    """Looks through the indexes of a store; what it found is kept, for checkpoints do not change."""

    def __init__(self, store: StoreReader) -> None:
        self._store = store
        self._found: dict[str, dict[int, tuple[Stamp, frozenset[str] | None]]] = {}
        # folders with a tombstone, which stays one: a run has far more of them than checkpoints, one more for each save
        self._pruned: dict[str, tuple[_Identity, set[str]]] = {}

    def by_checkpoints(self) -> set[str] | None:
        """Returns the ids of the segments that checkpoints use here; None if that cannot be known for all of them.

        Raises:
            StorageError: a folder cannot be looked at for the moment.
        """
        used: set[str] = set()
        runs = run_folders(self._store.path)
        for gone in self._found.keys() - runs:
            del self._found[gone]
            self._pruned.pop(gone, None)
        for run in runs:
            for found in self._look_at(run).values():
                if found is None:
                    return None
                used |= found
        # so that it can be put back by hand
        return used | quarantine.segments_used(self._store.path) | _out_of_place(self._store.path)

    def _look_at(self, run: str) -> dict[int, frozenset[str] | None]:
        pruned = self._pruned_in(run)
        stamps, before = self._store.stamps(run, besides=pruned), self._found.get(run, {})
        gap = self._gap(run, [*map(names.sequence_name, stamps), *pruned])
        fresh = [seq for seq, now in stamps.items() if seq not in before or before[seq][0] != now]
        found = {seq: entry for seq, entry in before.items() if seq in stamps}
        damaged: dict[int, StoreError] = {}
        for record in self._store.records(run, only=fresh, damaged=damaged) if fresh else []:
            if isinstance(record, TombstoneRecord):
                found.pop(record.seq, None)
                pruned.add(names.sequence_name(record.seq))
            else:
                found[record.seq] = stamps[record.seq], self._uses(run, record.seq) if record.segments else frozenset()
        result: dict[int, frozenset[str] | None] = {seq: uses for seq, (_, uses) in found.items()}
        if gap is not None:
            result[gap] = None  # its folder may be put back
        # what may be readable again later is not kept
        self._found[run] = {seq: entry for seq, entry in found.items() if entry[1] is not None}
        # what those need whose state is in the archive alone is there, too
        evicted = archived.evicted(self._store.path, run)
        return {**result, **dict.fromkeys(damaged, None), **dict.fromkeys(evicted & stamps.keys(), frozenset())}

    def _gap(self, run: str, there: Collection[str]) -> int | None:
        """Returns a commit number of a run whose folder is missing, or None; the numbers before the last are taken."""
        folder = self._store.path / "runs" / run
        if not there and os.path.lexists(folder / RUN_FILE) and not os.path.lexists(folder / "checkpoints"):
            return 1
        if not there or int(max(there)) == len(there):
            return None
        known = set(there)
        for seq in range(1, int(max(there))):
            name = names.sequence_name(seq)
            # a list made beside a save may have the newer of two folders alone
            if name not in known and not os.path.lexists(folder / "checkpoints" / name):
                return seq
        return None

    def _pruned_in(self, run: str) -> set[str]:
        """Returns the names of the folders that hold a tombstone; none of a run that has taken another's place."""
        identity: _Identity = (0, 0), 0
        with contextlib.suppress(FileNotFoundError), reader.opened_folder(self._store.path, "runs", run) as folder:
            identity = stamp(folder, RUN_FILE), stamp(folder, "checkpoints")[1]
        if run not in self._pruned or self._pruned[run][0] != identity:
            self._pruned[run] = identity, set()
        return self._pruned[run][1]

    def note(self, run: str, seq: int, segments: Iterable[str]) -> None:
        """Takes note of what a checkpoint uses that was just committed, so that its index need not be read."""
        with (
            contextlib.suppress(FileNotFoundError, StoreError),
            reader.opened_folder(self._store.path, "runs", run, "checkpoints") as folder,
        ):
            found = stamp(folder, f"{names.sequence_name(seq)}/{COMMIT_FILE}")
            self._found.setdefault(run, {})[seq] = found, frozenset(segments)

    def _uses(self, run: str, seq: int) -> frozenset[str] | None:
        try:
            return self._store.segment_ids(run, seq)
        except CheckpointNotFoundError:
            return frozenset()  # pruned meanwhile
        except StoreError:
            # or between the looks at its record and at its index, which a pruner removes once the tombstone is there
            with contextlib.suppress(StoreError):
                if isinstance(self._store.commit_record(run, seq), TombstoneRecord):
                    return frozenset()
            return None

    def find(self, wanted: set[str]) -> dict[str, index.SegmentRecord]:
        """Returns {id: segment} of those that a checkpoint vouches for; reads indexes until all are found.

        Raises:
            StorageError: a folder cannot be looked at for the moment.
        """
        found: dict[str, index.SegmentRecord] = {}
        for run in sorted(run_folders(self._store.path)):
            for seq in reversed(self._store.stamps(run, besides=self._pruned_in(run))):
                if wanted <= found.keys():
                    return found
                with contextlib.suppress(StoreError):
                    if (wanted - found.keys()) & self._store.segment_ids(run, seq):
                        known = self._store.index(run, seq).segments
                        found |= {identity: known[identity] for identity in wanted & known.keys()}
        return found


def by_saves(root: Path, *, besides: Collection[Path] = ()) -> set[str] | None:
    """Returns the ids of the segments that saves in progress, of whatever process, have announced that they need.

    A record that is not whole yet belongs to a save that has not looked yet whether its segments are there. None if a
    record cannot be understood.

    Args:
        root: the store's folder.
        besides: work folders that are not asked, because their saves have failed.

    Raises:
        StorageError: a folder or record cannot be looked at for the moment.
    """
    used: set[str] = set()
    for folder in work.folders(root / "tmp"):
        if folder in besides:
            continue
        try:
            job = work.read_job(folder)
            if job.text("job") == "save":
                used.update(work.segments_in(job, "uses"), work.segments_in(job, "made"))
        except (FileNotFoundError, DamagedError):
            continue
        except StorageError:
            raise
        except StoreError:
            return None
    return used


def homeless(root: Path) -> set[str]:
    """Returns the ids of the segments that runs alone can use: no save has announced them, nor are they in quarantine.

    Raises:
        StorageError: as `by_saves`.
    """
    announced = by_saves(root)
    return set() if announced is None else segments.files(root).keys() - announced - quarantine.segments_used(root)


_OWN = {segments.FOLDER, segments.TRASH, "tmp", quarantine.FOLDER, archived.ARCHIVE}


def _out_of_place(root: Path) -> set[str]:
    """Returns the ids of the segments that runs and checkpoints need whose folders have other names than theirs.

    They may be put back: from `runs/<any name>`, or from any folder of the store, under any name as well.
    """
    used: set[str] = set()
    others = [root / name for name in _folders(root) if name not in _OWN]
    for run in (*others, *(folder / name for folder in others for name in _folders(folder))):
        is_run = run.parent == root / "runs" and names.is_run_name(run.name)
        for name in _folders(run / "checkpoints", besides=names.SEQUENCE if is_run else None):
            used |= quarantine.uses(run / "checkpoints" / name)
    return used


def _folders(path: Path, *, besides: re.Pattern[str] | None = None) -> list[str]:
    """Returns the names of the folders in one; none of what is missing, a symbolic link or another user's."""
    try:
        found = [] if path.is_symlink() else os.listdir(path)  # noqa: PTH208 a run has very many
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return []
    except OSError as error:
        raise StorageError(f"{path} cannot be listed: {error.strerror}") from error
    others = [name for name in found if besides is None or not besides.fullmatch(name)]
    return [name for name in others if (path / name).is_dir() and not (path / name).is_symlink()]


def run_folders(root: Path) -> set[str]:
    """Returns the names of the folders of runs, those included whose record is lost; raises StorageError."""
    # the folders, not the runs: checkpoints beside a lost run.json need their segments, too
    try:
        with os.scandir(root / "runs") as entries:
            return {entry.name for entry in entries if names.is_run_name(entry.name) and entry.is_dir()}
    except FileNotFoundError:
        return set()
    except OSError as error:
        raise StorageError(f"the runs of {root} cannot be listed: {error.strerror}") from error
