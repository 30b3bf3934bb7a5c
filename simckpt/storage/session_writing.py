"""Writing a session: its record, parts, snapshots and models, each a folder with one name for good; merging, the end.

A part, a snapshot or a model is made as a checkpoint is: a state file and its index, which a record vouches for, under
a temporary name, synced, then one rename. So a kill leaves what was published, whole. Merging publishes a folder that
covers others, by its name, before these go: at every instant a reader finds each entry once.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from simckpt import state
from simckpt.errors import (
    ConflictError,
    DamagedError,
    RunLockedError,
    SimckptError,
    StorageError,
    StorageFullError,
    StoreError,
)
from simckpt.state.tables import mapped
from simckpt.state.tree import Encoded
from simckpt.storage import (
    claims,
    durable,
    names,
    processes,
    reader,
    records,
    sealed,
    session_records,
    work,
)
from simckpt.storage.origins import Origins
from simckpt.storage.preparing import PrepareJob, discard, write_prepared
from simckpt.storage.session_merging import MERGED, Tiers, merges, waiting_numbers
from simckpt.storage.session_records import ClosedRecord, ModelRecord, PartRecord, SessionRecord, SnapshotRecord
from simckpt.storage.sessions import (
    CLOSED_FILE,
    FEATURE,
    MODEL_FILE,
    MODELS,
    PART_FILE,
    PARTS,
    RECORD,
    SESSION_FILE,
    SESSIONS,
    SNAPSHOT_FILE,
    SNAPSHOTS,
    SessionFiles,
    covering,
    part_folders,
)
from simckpt.storage.store_reader import STORE_FILE, StoreReader

_DESCRIPTIONS = {
    RECORD: "What was recorded. Each group below is a table, each dataset a column of it. In all of them `order` "
    "counts everything that was recorded, as it happened, and `row` is the call of step in progress, or next.",
    f"{RECORD}/rows": "Calls of step: when they started and finished [ns, monotonic clock; wall: since 1970], what "
    "went in and what came out.",
    f"{RECORD}/resets": "Calls of reset; `options` are JSON.",
    f"{RECORD}/commands": "What was sent over each link.",
    f"{RECORD}/readings": "What each look for a reading gave: kind 0 a reading, 1 nothing, 2 the time, asked for.",
    f"{RECORD}/events": "What was noted beside the rows.",
}
_PART = "Rows of a recorded session, written by simckpt; part.json beside this file says which."
_SNAPSHOT = "The state of an env in a recorded session, written by simckpt; snapshot.json beside this file says when."
_MODEL = "The fields of a model that snapshots of a recorded session refer to, written by simckpt."

T = TypeVar("T", PartRecord, SnapshotRecord, ModelRecord)


def create_session(store: StoreReader, record: SessionRecord, *, disk: durable.Disk | None = None) -> None:
    """Makes a session, which nobody writes yet.

    From then on its origin is kept: the store says to older versions of simckpt, which would not, that they must refuse
    it, and looks whether the origin is still there when a pruner cannot miss the session's record any more.

    Args:
        store: that it is part of.
        record: its own.
        disk: the system calls, for tests.

    Raises:
        InvalidNameError: a name that cannot be a folder's.
        ConfigurationError: facts about the env that a record cannot hold.
        ConflictError: there is a session of that name; or the origin is being pruned.
        CheckpointNotFoundError: the origin has been pruned.
        StorageError: the disk refused; there is no session, unless its name could neither be made durable nor be taken
            back. With the same record it may be tried again.
    """
    disk = disk or durable.Disk()
    root = store.path
    names.check_run_name(record.name)
    data = record.to_bytes()
    folder = durable.make_folders(disk, root, SESSIONS) / record.name
    works = work.WorkFolders(disk, root)
    if record.origin is not None:
        require_feature(disk, works, root)
    with works.made() as made:
        durable.write_record(disk, made / SESSION_FILE, data)
        for inner in (PARTS, SNAPSHOTS, MODELS):
            durable.make_folders(disk, made, inner)
        durable.sync_folder(disk, made)
        if record.origin is not None:
            origin = record.origin
            Origins(store).check_checkpoint(origin.checkpoint, origin.run, origin.seq)
        try:
            durable.publish_folder(disk, made, folder)
        except ConflictError as error:
            if not _is_there(root, record.name, data):
                raise ConflictError(f"session {record.name!r} exists already: choose another name") from error
            durable.sync_folder(disk, folder.parent)


def _is_there(root: Path, name: str, data: bytes) -> bool:
    """Returns whether a session has this record: an earlier attempt has made it, and could not make that durable."""
    with contextlib.suppress(FileNotFoundError, StoreError):
        path = root / SESSIONS / name / SESSION_FILE
        return reader.read_small(root, SESSIONS, name, SESSION_FILE, limit=records.RECORD_LIMIT, path=path) == data
    return False


def require_feature(disk: durable.Disk, works: work.WorkFolders, root: Path) -> None:
    """Has the store say that its readers must know sessions; done once in its life, all else in its record stays."""
    path = root / STORE_FILE
    data = reader.read_small(root, STORE_FILE, limit=records.RECORD_LIMIT, path=path)
    fields = sealed.unseal(data, "store", path=path)
    known = fields.texts("requires")
    if FEATURE in known:
        return
    content = {key: value for key, value in fields.content.items() if key not in ("format", "version", "digest")}
    with works.made() as made:
        changed = sealed.seal("store", {**content, "requires": [*known, FEATURE]})
        durable.write_record(disk, made / STORE_FILE, changed)
        durable.replace_file(disk, made / STORE_FILE, path)


class SessionWriter:
    """Writes a session that this process has claimed, until `close`; a context manager, which gives the claim back.

    Args:
        root: the store's folder.
        name: of the session.
        disk: the system calls, for tests.
        clock: the time [s since 1970], for tests.

    Raises:
        SessionNotFoundError, DamagedError, FormatError: there is no session that can be gone on with.
        RunLockedError: another process writes it.
        ConflictError: it is closed.
        StorageError: the disk refused.
    """

    def __init__(
        self, root: Path, name: str, *, disk: durable.Disk | None = None, clock: Callable[[], float] = time.time
    ) -> None:
        self._disk = disk or durable.Disk()
        self._clock = clock
        self._works = work.WorkFolders(self._disk, root)
        self.files = SessionFiles(root, name)
        self._unsure: tuple[Path, tuple[int, int]] | None = None  # has its name, which may not survive
        self._bytes = 0  # of all parts
        # what it keeps is for its end, on a disk that is full by then
        self._claim = claimed(self._disk, self.files.path, self._works, clock, reserve=True)
        try:
            if self.files.closed() is not None:
                raise ConflictError(f"session {name!r} is closed: it stays as it is")
            found, _ = covering(part_folders(self.files.path))
            self._last = found[-1][1] if found else 0
            self._tiers = self._tiers_of(found)
            snapshots = self.files.snapshots()
            self._snapshots = snapshots[-1].number if snapshots else 0
            self._models = {model.digest for model in self.files.models()}
        except BaseException:
            self._claim.release()
            raise

    def __enter__(self) -> SessionWriter:
        return self

    def __exit__(self, *exception: object) -> None:
        self.release()

    def release(self) -> None:
        """Gives the claim back; the session stays open, for another process to go on with or to close."""
        with contextlib.suppress(SimckptError):
            self._claim.release()

    def beat(self) -> None:
        """Tells other machines that this process lives, when nothing is written for long; raises nothing."""
        self._claim.beat()

    @property
    def models(self) -> frozenset[str]:
        """The digests of the models that it has."""
        return frozenset(self._models)

    def write_part(
        self,
        tables: Encoded,
        *,
        rows: tuple[int, int],
        spans: Mapping[str, tuple[int, int]],
        started: int,
        stopped: int,
    ) -> PartRecord:
        """Returns the record of the next part, which survives a power failure from now on.

        Args:
            tables: nested dicts of arrays.
            rows: (first, stop) of the calls of `step` in it.
            spans: {table: (first, stop)} of the entries of each.
            started: of its first moment [ns].
            stopped: of its last.

        Raises:
            ConflictError: the claim is somebody else's by now.
            StorageFullError, StorageError: the disk refused; there is no such part.
        """
        number = self._last + 1
        record = PartRecord(self.files.record.id, (number, number), rows, dict(spans), started, stopped)
        written = self._publish(record, PART_FILE, f"{PARTS}/{record.folder}", {RECORD: tables}, _PART)
        self._last = number
        self._tiers.add(written)
        self._bytes += written.size
        return written

    def write_model(self, digest: str, fields: Encoded) -> None:
        """Writes a model that snapshots refer to, unless it is there; raises as `write_part`."""
        if digest not in self._models:
            record = ModelRecord(self.files.record.id, digest)
            self._publish(record, MODEL_FILE, f"{MODELS}/{digest}", {"model": fields}, _MODEL)
            self._models.add(digest)

    def write_snapshot(
        self, snapshot: Encoded, *, row: int, order: int, monotonic: int, wall: int, reason: str, models: Sequence[str]
    ) -> SnapshotRecord:
        """Returns the record of a snapshot, whose models are written; raises as `write_part`.

        Args:
            snapshot: {"env": state without its models, "observation": the last one, or None}.
            row: that comes next.
            order: its place among all that was recorded.
            monotonic: when [ns].
            wall: when [ns since 1970].
            reason: for people.
            models: digests of the models that it refers to.
        """
        number = self._snapshots + 1
        record = SnapshotRecord(
            session=self.files.record.id,
            number=number,
            row=row,
            order=order,
            monotonic=monotonic,
            wall=wall,
            reason=reason[: session_records.TEXT_LIMIT],
            models=tuple(models),
        )
        folder = f"{SNAPSHOTS}/{number:08d}"
        written = self._publish(record, SNAPSHOT_FILE, folder, {"snapshot": snapshot}, _SNAPSHOT)
        self._snapshots = number
        return written

    def merge(self) -> None:
        """Merges neighbouring parts of which there are enough by now; what cannot be read stays as it is.

        Raises:
            ConflictError: the claim is somebody else's by now.
            StorageFullError, StorageError: the disk refused; what was not merged is as it was.
        """
        while (group := self._tiers.due()) is not None:
            self._tiers.merged(group, self._merge(group))

    def merge_rest(self) -> None:
        """Merges what `merge` has left, all parts if that is one part's worth; raises as `merge`."""
        self._remove_covered()
        rest = self.files.parts() if self._bytes <= MERGED else self._tiers.rest
        for group in merges(rest):
            self._merge(group)
        self._tiers = Tiers()

    def close(self, how: str = "closed", text: str = "", *, rows: tuple[int, int] | None = None) -> ClosedRecord:
        """Returns how the session ended, which is on the disk from now on; its parts are merged, if that is possible.

        Args:
            how: one of `session_records.ENDINGS`.
            text: for people.
            rows: (first, stop) of the calls of `step` while it was recorded, those that are in no part as well; None
                if that is not known.

        Raises:
            DamagedError, FormatError: parts that cannot be read; it stays open.
            ConflictError, StorageError: as `write_part`. It may be tried again.
        """
        with contextlib.suppress(DamagedError, OSError):  # many small parts are as good
            self.merge_rest()
        numbers = self.files.part_numbers()
        ends = [self.files.part(numbers[place]) for place in (0, -1)] if numbers else []
        record = ClosedRecord(
            session=self.files.record.id,
            how=how,
            text=text[: session_records.TEXT_LIMIT],
            closed=self._clock(),
            rows=rows,
            # of one that was written and is gone a reader is told
            parts=max(self._last, numbers[-1][1] if numbers else 0),
            snapshots=self._snapshots,
            seconds=max(0.0, (ends[1].stopped - ends[0].started) / 1e9) if ends else 0.0,
        )
        self._claim.verify()
        try:
            self._end(record)
        except StorageFullError:
            with self._claim.spending_reserve():
                self._end(record)
        self.release()
        return record

    def _end(self, record: ClosedRecord) -> None:
        path = self.files.path / CLOSED_FILE
        with self._works.made() as made:
            durable.write_record(self._disk, made / CLOSED_FILE, record.to_bytes())
            if durable.publish_file(self._disk, made / CLOSED_FILE, path):
                return
        found = self.files.closed()
        if found is None or replace(found, closed=record.closed) != record:
            raise ConflictError(f"session {self.files.record.name!r} was closed by another process")
        # an earlier attempt, which was not known to be durable
        durable.sync_folder(self._disk, path.parent)

    def _tiers_of(self, folders: Sequence[tuple[int, int]]) -> Tiers:
        """Returns what waits to be merged, of a session that is gone on with; notes how large it is."""
        if not folders:
            return Tiers()
        known = waiting_numbers(folders)
        found = [self.files.part(numbers) for numbers in known]
        # at least one part's worth, where there is more than what waits
        self._bytes = sum(part.size for part in found) if len(known) == len(folders) else MERGED + 1
        return Tiers(found)

    def _publish(self, record: T, file: str, folder: str, components: Mapping[str, Encoded], description: str) -> T:
        self._take_back()
        target = self.files.path / folder
        job = PrepareJob(self.files.root, self.files.record.name, processes.this_process())
        texts = {path: {"description": text} for path, text in {**_DESCRIPTIONS, "": description}.items()}
        prepared = write_prepared(self._disk, job, components, texts)
        try:
            record = replace(record, files=prepared.files)
            durable.write_record(self._disk, prepared.folder / file, record.to_bytes())
            durable.sync_folder(self._disk, prepared.folder)
            self._claim.verify()
            identity = durable.file_identity(prepared.folder)
            try:
                durable.publish_folder(self._disk, prepared.folder, target)
            except StorageError:
                if identity is not None and durable.file_identity(target) == identity:
                    self._unsure = target, identity
                raise
        except BaseException:
            discard(self._disk, self.files.root, prepared.folder, ())
            raise
        self._claim.beat()
        return record

    def _take_back(self) -> None:
        """Takes a folder's name away again, that is not known to be durable: what it holds is written once more."""
        if self._unsure is None:
            return
        target, identity = self._unsure
        if durable.file_identity(target) == identity:
            with self._works.made() as away, durable.translated(target):
                self._disk.rename(target, away / target.name)
        self._unsure = None

    def _merge(self, group: Sequence[PartRecord]) -> list[PartRecord]:
        """Merges neighbours as far as they can be read and have the same columns; returns what there is then."""
        found: list[PartRecord] = []
        run: list[tuple[PartRecord, dict[str, Any]]] = []
        for part in group:
            tables = None
            with contextlib.suppress(DamagedError):
                tables = self.files.read_part(part)
            if run and (tables is None or _form(run[0][1]) != _form(tables)):
                found += self._merge_run(run)
                run = []
            if tables is None:
                found.append(part)
            else:
                run.append((part, tables))
        return found + self._merge_run(run)

    def _merge_run(self, run: Sequence[tuple[PartRecord, dict[str, Any]]]) -> list[PartRecord]:
        if len(run) < 2:
            return [part for part, _ in run]
        first, last = run[0][0], run[-1][0]
        record = PartRecord(
            session=first.session,
            numbers=(first.numbers[0], last.numbers[1]),
            rows=(first.rows[0], last.rows[1]),
            tables={name: (span[0], last.tables[name][1]) for name, span in first.tables.items()},
            started=first.started,
            stopped=last.stopped,
        )
        tables = mapped(lambda *arrays: np.concatenate(arrays), *(tables for _, tables in run))
        made = self._publish(record, PART_FILE, f"{PARTS}/{record.folder}", {RECORD: state.encode(tables)}, _PART)
        self._remove(made, [part.folder for part, _ in run])
        return [made]

    def _remove(self, merged: PartRecord, folders: Sequence[str]) -> None:
        """Removes parts that a merged one covers, which is read once more before."""
        self.files.verify(f"{PARTS}/{merged.folder}", merged)
        for folder in folders:
            durable.remove_tree(self._disk, self.files.path / PARTS / folder)
        durable.sync_folder(self._disk, self.files.path / PARTS)

    def _remove_covered(self) -> None:
        """Removes what an interrupted merge has left, also that of an earlier process."""
        kept, covered = covering(part_folders(self.files.path))
        for first, last in kept:
            inside = [f"{low:08d}-{high:08d}" for low, high in covered if first <= low and high <= last]
            if inside:
                self._remove(self.files.part((first, last)), inside)


def claimed(
    disk: durable.Disk, folder: Path, works: work.WorkFolders, clock: Callable[[], float], *, reserve: bool
) -> claims.Claim:
    """Returns the claim on a session's folder; raises RunLockedError, which names the session, or StorageError."""
    try:
        return claims.take(disk, folder, works.make, clock=clock, reserve=reserve)
    except RunLockedError as error:
        where = f"process {error.pid} on {error.host}" if error.pid else "several processes"
        is_closed = os.path.lexists(folder / CLOSED_FILE)
        what = "being recorded" if not is_closed else "brought back, evicted, compacted or removed at this moment"
        message = f"session {folder.name!r} is {what} by {where}"
        raise RunLockedError(message, host=error.host, pid=error.pid) from error


def _form(tree: Any) -> Any:
    """Returns what must be equal in parts that are merged: columns, dtypes, shapes of entries."""
    if isinstance(tree, dict):
        return {key: _form(value) for key, value in tree.items()}
    if isinstance(tree, tuple):
        return tuple(_form(value) for value in tree)
    return tree.dtype.str if tree.dtype.kind != "U" else "U", tree.shape[1:]
