"""Reading a store: runs, records, indexes, leaves, the log. Nothing here writes, so a read-only mount is enough."""

from __future__ import annotations

import contextlib
import difflib
import json
import os
import stat
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import Any, TypeVar

from simckpt.errors import (
    CheckpointNotFoundError,
    DamagedError,
    FormatError,
    LeafNotFoundError,
    RunNotFoundError,
    StorageError,
    StoreError,
)
from simckpt.state.leaf import Leaf, Slab
from simckpt.state.tree import Encoded
from simckpt.storage import archived, indexes, names, parts, pieces, reader
from simckpt.storage import records as record_types
from simckpt.storage.index import LeafRecord, SegmentRecord
from simckpt.storage.indexes import Index
from simckpt.storage.marks import MARKS, Marks, read_marks, read_marks_of
from simckpt.storage.records import CommitRecord, Shard, StoreRecord, TombstoneRecord
from simckpt.storage.run_records import RunRecord, parse_run
from simckpt.storage.starts import StartRecord, read_start

STORE_FILE = "store.json"
RUN_FILE = "run.json"
COMMIT_FILE = "commit.json"
EVENTS_FILE = "events.jsonl"
EVENTS_LIMIT = 1 << 28  # [bytes] of a log that are read
_NEAR = 10_000  # paths that are looked at for a near one
_SEGMENTS_KEPT = 1024  # in memory; what is known of others is read from an index again

Stamp = tuple[int, int]  # modification time [ns since 1970], inode
T = TypeVar("T")


class StoreReader:
    """A store on disk, for reading.

    Attributes:
        path: the store's folder, symbolic links resolved.
        record: of `store.json`.
    """

    def __init__(self, path: Path, record: StoreRecord) -> None:
        self.path = path
        self.record = record
        self._segments: dict[str, SegmentRecord] = {}  # the last that an index named
        self._starts: dict[tuple[str, str | None], StartRecord] = {}
        # (run, commit number, error) -> whether an archive had what is damaged or evicted, and brought it back
        self.fallback: Callable[[str, int, DamagedError], bool] | None = None

    @property
    def id(self) -> str:
        """The store's random identity."""
        return self.record.id

    def runs(self) -> list[str]:
        """Returns the names of the runs, sorted. A folder in which no run was recorded yet is none."""
        try:
            with reader.opened_folder(self.path, "runs") as folder:
                found = _listed(folder, "the runs")
                return sorted(name for name in found if names.is_run_name(name) and _is_run(folder, name))
        except FileNotFoundError:
            return []

    def read_run(self, run: str) -> RunRecord:
        """Returns the record of a run.

        Raises:
            InvalidNameError: a name that no run can have.
            RunNotFoundError: with the names that are near.
            DamagedError, FormatError: the record cannot be trusted, or is missing from a run with checkpoints.
        """
        names.check_run_name(run)
        path = self.path / "runs" / run / RUN_FILE
        try:
            data = reader.read_small(self.path, "runs", run, RUN_FILE, limit=record_types.RECORD_LIMIT, path=path)
        except FileNotFoundError as error:
            with contextlib.suppress(FileNotFoundError), self._opened(run) as folder:
                if _sequence(folder):
                    raise DamagedError(f"{path} is missing", path=path) from error
            raise self._no_run(run) from error
        record = parse_run(data, path)
        if record.name != run:
            raise FormatError(f"{path} is the record of run {record.name!r}: a folder was renamed or copied")
        return record

    def read_start(self, run: str, id: str | None) -> StartRecord:
        """Returns the record of one start of a run, kept for the next call.

        Args:
            run: the run's name.
            id: as a commit record names it; None in one of format 0.1, for which the run's own record stands in.

        Raises:
            DamagedError, FormatError: the record is missing or cannot be trusted.
        """
        if (run, id) not in self._starts:
            self._starts[run, id] = _first_start(self.read_run(run)) if id is None else read_start(self.path, run, id)
        return self._starts[run, id]

    def marks(self, run: str, *, damaged: dict[str, StoreError] | None = None) -> dict[str, Marks]:
        """Returns {checkpoint id: its tags, pin and later metrics} of the checkpoints of a run that have any.

        Args:
            run: the run's name.
            damaged: receives {checkpoint id: error} of later metrics that cannot be read; without it the first is
                raised.
        """
        return read_marks(self.path, run, damaged=damaged)

    def marks_of(self, run: str, checkpoint: str, *, damaged: dict[str, StoreError] | None = None) -> Marks:
        """Returns the marks of the checkpoint of this id; see `marks`."""
        return read_marks_of(self.path, run, checkpoint, damaged=damaged)

    def records(
        self, run: str, *, damaged: dict[int, StoreError] | None = None, only: Collection[int] | None = None
    ) -> list[CommitRecord | TombstoneRecord]:
        """Returns the records of a run's checkpoints and of those that were pruned, in the order of commits.

        Args:
            run: the run's name.
            damaged: receives {seq: error} of records that cannot be read, so that one of them does not hide the
                others; without it the first is raised.
            only: the commit numbers to read; all of them if None.
        """
        names.check_run_name(run)
        found: list[CommitRecord | TombstoneRecord] = []
        try:
            with self._opened(run) as folder:
                run_id = self._run_id(run)
                for seq in _sequence(folder) if only is None else sorted(only):
                    try:
                        found.append(self._commit_record(folder, run, seq, run_id))
                    except StoreError as error:
                        if damaged is None:
                            raise
                        damaged[seq] = error
        except FileNotFoundError:
            self._run_folder(run)
        return found

    def commit_record(self, run: str, seq: int) -> CommitRecord | TombstoneRecord:
        """Returns the record of one checkpoint, or of what was one.

        Raises:
            RunNotFoundError, CheckpointNotFoundError: no run of that name, or no such number in it.
            DamagedError, FormatError: the record cannot be trusted.
        """
        return self._record_of(run, seq)

    def sequence(self, run: str) -> list[int]:
        """Returns the commit numbers of a run, in order, those of damaged and pruned checkpoints included."""
        names.check_run_name(run)
        try:
            with self._opened(run) as folder:
                return _sequence(folder)
        except FileNotFoundError:
            self._run_folder(run)
            return []

    def stamps(self, run: str, *, besides: AbstractSet[str] = frozenset()) -> dict[int, Stamp]:
        """Returns {commit number: stamp of its record}, (0, 0) for a missing record; one that was replaced has another.

        A record is replaced by a rename, so that old and new exist at the same time and have different inodes.

        Args:
            run: the run's name.
            besides: names of folders that are left out, without a look at each.
        """
        names.check_run_name(run)
        found: dict[int, Stamp] = {}
        with contextlib.suppress(FileNotFoundError), self._opened(run) as folder:
            found = {
                seq: stamp(folder, f"{names.sequence_name(seq)}/{COMMIT_FILE}") for seq in _sequence(folder, besides)
            }
        return found

    def mark_stamps(self, run: str) -> dict[str, Stamp]:
        """Returns {checkpoint id: stamp of the folder of its marks}, which adding and removing a mark changes."""
        names.check_run_name(run)
        with contextlib.suppress(FileNotFoundError), reader.opened_folder(self.path, "runs", run, MARKS) as folder:
            return {name: stamp(folder, name) for name in _listed(folder, "a run's marks") if names.ID.fullmatch(name)}
        return {}

    def index(self, run: str, seq: int) -> Index:
        """Returns what a checkpoint holds, without reading its arrays.

        Raises:
            CheckpointNotFoundError: no such number, or it was pruned.
            DamagedError, FormatError: the record or the index cannot be trusted.
        """
        return self._brought_back(run, seq, lambda: self._index_of(run, seq))

    def _index_of(self, run: str, seq: int) -> Index:
        with self._checkpoint(run, seq) as (_, index):
            return index

    def _brought_back(self, run: str, seq: int, read: Callable[[], T]) -> T:
        """Returns what `read` does, if need be after an archive has brought back what is damaged or evicted."""
        try:
            return read()
        except DamagedError as error:
            if self.fallback is None or not self.fallback(run, seq, error):
                raise
        return read()

    def evicted(self, run: str) -> set[int]:
        """Returns the numbers of the checkpoints whose state is in the archive alone."""
        names.check_run_name(run)
        return archived.evicted(self.path, run)

    def shard_index(self, run: str, seq: int, shard: Shard) -> Index | None:
        """Returns what one rank has written of a checkpoint of as many ranks, parts as they are; None of another one.

        Raises:
            CheckpointNotFoundError, DamagedError, FormatError: as `index`.
        """
        with self._checkpoint_folder(run, seq) as (folder, record):
            if record.shards != shard.count:
                return None
            found = indexes.read_shard(folder, record, self._checkpoint_path(run, seq), shard)
            self._note_segments(found.segments)
            return found

    def read(
        self,
        run: str,
        seq: int,
        components: Iterable[str] | None = None,
        *,
        slabs: Mapping[str, Slab] | None = None,
    ) -> dict[str, Encoded]:
        """Returns {component: encoded state} of a checkpoint, every byte verified.

        Args:
            run: the run's name.
            seq: commit number.
            components: which; all of them if None.
            slabs: {path: box} of leaves of which no more than that is wanted; they come as `PartLeaf`, and of those
                that several ranks have written no other part is read.

        Raises:
            CheckpointNotFoundError: no such number, or it was pruned.
            LeafNotFoundError: a component or a leaf that the checkpoint lacks.
            ConfigurationError: a box that does not lie within its leaf.
            DamagedError: naming every damaged leaf.
            SegmentMissingError: with the ids of the segments that are gone.
            FormatError: records that break a rule.
            StorageError: not enough memory, or the permissions refuse.
        """
        wanted = None if components is None else set(components)
        return self._brought_back(run, seq, lambda: self._read(run, seq, wanted, slabs or {}))

    def _read(
        self, run: str, seq: int, components: Collection[str] | None, slabs: Mapping[str, Slab]
    ) -> dict[str, Encoded]:
        with self._checkpoint(run, seq) as (folder, index):
            chosen = set(index.components if components is None else components)
            if missing := sorted(chosen - set(index.components)):
                raise LeafNotFoundError(
                    f"checkpoint {seq} of run {run!r} has no component {', '.join(map(repr, missing))}; "
                    f"it has {', '.join(index.components)}"
                )
            leaves = [leaf for leaf in index if leaf.component in chosen]
            _check_known(index, run, slabs)
            return reader.assemble(self._leaves(run, folder, index, leaves, slabs))

    def read_leaves(
        self, run: str, seq: int, paths: Iterable[str], *, slabs: Mapping[str, Slab] | None = None
    ) -> dict[str, Leaf]:
        """Returns {path: leaf}, every byte verified; nothing else of the checkpoint's state is read.

        Args:
            run: the run's name.
            seq: commit number.
            paths: of the leaves.
            slabs: see `read`.

        Raises:
            LeafNotFoundError: with the paths that are near.
            CheckpointNotFoundError, DamagedError, FormatError, StorageError: as in `read`.
        """
        wanted = list(paths)
        return self._brought_back(run, seq, lambda: self._read_leaves(run, seq, wanted, slabs or {}))

    def _read_leaves(self, run: str, seq: int, paths: Collection[str], slabs: Mapping[str, Slab]) -> dict[str, Leaf]:
        with self._checkpoint(run, seq) as (folder, index):
            _check_known(index, run, [*paths, *slabs])
            return self._leaves(run, folder, index, [index.leaves[path] for path in paths], slabs)

    def verify(self, run: str, seq: int, *, besides: Container[str] = ()) -> Index:
        """Returns the index after every byte of every file that the checkpoint uses was compared with its digest.

        Args:
            run: the run's name.
            seq: commit number.
            besides: ids of segments that are left out.

        Raises:
            DamagedError: naming every damaged leaf; none if the damage is outside of leaves.
            SegmentMissingError: with the ids of the segments that are gone.
            CheckpointNotFoundError, FormatError, StorageError: as in `read`.
        """
        with self._checkpoint(run, seq) as (folder, index):
            path = self._checkpoint_path(run, seq)
            parts.verify(folder, index, path=path)
            pieces.verify(self.path, list(index.lines_in_segments), index.segments, path=path, besides=besides)
            return index

    def events(self, run: str) -> list[dict[str, Any]]:
        """Returns the run's log; lines torn by a crash are left out."""
        self._run_folder(run)
        try:
            path = self.path / "runs" / run / EVENTS_FILE
            data = reader.read_small(self.path, "runs", run, EVENTS_FILE, limit=EVENTS_LIMIT, path=path)
        except FileNotFoundError:
            return []
        events = []
        for line in data.splitlines():
            with contextlib.suppress(ValueError, RecursionError):
                event = json.loads(line)
                if isinstance(event, dict):
                    events.append(event)
        return events

    def _run_folder(self, run: str) -> Path:
        names.check_run_name(run)
        try:
            with reader.opened_folder(self.path, "runs", run):
                return self.path / "runs" / run
        except FileNotFoundError as error:
            raise self._no_run(run) from error

    def _no_run(self, run: str) -> RunNotFoundError:
        known = self.runs()
        near = difflib.get_close_matches(run, known, 3) or known[:3]
        hint = f"did you mean {', '.join(near)}?" if near else "it has no runs yet"
        return RunNotFoundError(f"the store {self.path} has no run {run!r}; {hint}")

    def _checkpoint_path(self, run: str, seq: int) -> Path:
        return self.path / "runs" / run / "checkpoints" / names.sequence_name(seq)

    def _opened(self, run: str) -> contextlib.AbstractContextManager[int]:
        return reader.opened_folder(self.path, "runs", run, "checkpoints")

    @contextlib.contextmanager
    def _checkpoint(self, run: str, seq: int) -> Iterator[tuple[int, Index]]:
        """Gives a descriptor of a checkpoint's folder, and its index."""
        with self._checkpoint_folder(run, seq) as (folder, record):
            index = indexes.read_index(folder, record, self._checkpoint_path(run, seq))
            self._note_segments(index.segments)
            yield folder, index

    def segment_ids(self, run: str, seq: int) -> frozenset[str]:
        """Returns the ids of the segments that a checkpoint uses; raises as `index`."""
        with self._checkpoint_folder(run, seq) as (folder, record):
            return indexes.read_segment_ids(folder, record, self._checkpoint_path(run, seq))

    @contextlib.contextmanager
    def _checkpoint_folder(self, run: str, seq: int) -> Iterator[tuple[int, CommitRecord]]:
        record = self._record_of(run, seq)
        if isinstance(record, TombstoneRecord):
            raise CheckpointNotFoundError(
                f"checkpoint {seq} of run {run!r} (step {record.step}) was pruned: {record.reason}"
            )
        path = self._checkpoint_path(run, seq)
        try:
            with self._opened(run) as checkpoints, reader.opened_folder(checkpoints, path.name) as folder:
                yield folder, record
        except FileNotFoundError as error:
            raise DamagedError(f"{path} is missing: it was removed while it was read", path=path) from error

    def _note_segments(self, segments: Mapping[str, SegmentRecord]) -> None:
        for identity, segment in segments.items():
            self._segments.pop(identity, None)
            self._segments[identity] = segment
        while len(self._segments) > _SEGMENTS_KEPT:
            del self._segments[next(iter(self._segments))]

    def _record_of(self, run: str, seq: int) -> CommitRecord | TombstoneRecord:
        names.check_run_name(run)
        try:
            # a folder without a record is damaged, and one that is missing is no checkpoint; no list of them is needed
            if names.is_sequence_number(seq):
                with self._opened(run) as checkpoints, reader.opened_folder(checkpoints, names.sequence_name(seq)):
                    return self._commit_record(checkpoints, run, seq, self._run_id(run))
        except FileNotFoundError:
            self._run_folder(run)
        raise CheckpointNotFoundError(f"run {run!r} has no checkpoint number {seq}")

    def _run_id(self, run: str) -> str | None:
        """Returns the run's id, or None if its record is damaged: that must not take the checkpoints with it."""
        try:
            return self.read_run(run).id
        except (DamagedError, FormatError, RunNotFoundError):
            return None

    def _commit_record(
        self, checkpoints: int, run: str, seq: int, run_id: str | None
    ) -> CommitRecord | TombstoneRecord:
        # text, not Path: listing ten thousand checkpoints comes through here
        name = names.sequence_name(seq)
        path = f"{self.path}/runs/{run}/checkpoints/{name}/{COMMIT_FILE}"
        try:
            data = reader.read_small(checkpoints, name, COMMIT_FILE, limit=record_types.COMMIT_LIMIT, path=path)
        except FileNotFoundError as error:
            raise DamagedError(f"{path} is missing", path=path) from error
        return record_types.parse_commit(data, path, seq=seq, run_id=run_id)

    def _leaves(
        self, run: str, folder: int, index: Index, leaves: list[LeafRecord], slabs: Mapping[str, Slab]
    ) -> dict[str, Leaf]:
        path = self._checkpoint_path(run, index.commit.seq)
        return parts.read_leaves(self.path, folder, leaves, slabs=slabs, sizes=index.sizes, path=path)


def _check_known(index: Index, run: str, paths: Iterable[str]) -> None:
    for path in paths:
        if path not in index.leaves:
            near = difflib.get_close_matches(path, list(index.leaves)[:_NEAR], 3)
            hint = f"; near ones: {', '.join(near)}" if near else ""
            raise LeafNotFoundError(f"checkpoint {index.commit.seq} of run {run!r} has no leaf {path!r}{hint}")


def _first_start(run: RunRecord) -> StartRecord:
    return StartRecord(run.created, run.hyperparameters, run.experiment, run.git, run.versions, run.host)


def _sequence(checkpoints: int, besides: AbstractSet[str] = frozenset()) -> list[int]:
    """Returns the commit numbers in a folder but for some, in order; anything else in it is not simckpt's."""
    found = set(_listed(checkpoints, "a run's checkpoints")) - besides
    return sorted(int(name) for name in found if names.SEQUENCE.fullmatch(name) and int(name))


def _listed(folder: int, what: str) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError as error:
        raise StorageError(f"{what} cannot be listed: {error.strerror}") from error


def stamp(folder: int, name: str) -> Stamp:
    """Returns the stamp of a file or folder, or (0, 0) if it cannot be looked at."""
    try:
        status = os.stat(name, dir_fd=folder, follow_symlinks=False)
    except OSError:
        return 0, 0
    return status.st_mtime_ns, status.st_ino


def _is_run(runs: int, name: str) -> bool:
    """Returns whether a run was recorded there, as far as this user may know; an I/O error is neither yes nor no."""
    try:
        mode = os.stat(name, dir_fd=runs, follow_symlinks=False).st_mode
        os.stat(f"{name}/{RUN_FILE}", dir_fd=runs, follow_symlinks=False)
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return False
    except OSError as error:
        raise StorageError(f"runs/{name} cannot be looked at: {error.strerror}") from error
    return stat.S_ISDIR(mode)
