"""Writing a session: its record, parts, snapshots and models, each a folder with one name for good; merging, the end.

A part, a snapshot or a model is made as a checkpoint is: a state file and its index, which a record vouches for, under
a temporary name, synced, then one rename. So a kill leaves what was published, whole. Merging publishes a folder that
covers others, by its name, before these go: at every instant a reader finds each entry once.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from simckpt import state
from simckpt.errors import ConflictError, DamagedError, FormatError, RunLockedError, SimckptError
from simckpt.state.tree import Encoded
from simckpt.storage import claims, durable, names, processes, reader, records, sealed, session_records, work
from simckpt.storage.origins import Origins
from simckpt.storage.preparing import PrepareJob, discard, write_prepared
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
    mapped,
    part_folders,
)
from simckpt.storage.store_reader import STORE_FILE, StoreReader

MERGED = 64 << 20  # [bytes] that a merged part may have

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
        StorageError: the disk refused; there is no session.
    """
    disk = disk or durable.Disk()
    root = store.path
    names.check_run_name(record.name)
    data = record.to_bytes()
    folder = durable.make_folders(disk, root, SESSIONS) / record.name
    works = work.WorkFolders(disk, root)
    if record.origin is not None:
        _require_feature(disk, works, root)
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
            raise ConflictError(f"session {record.name!r} exists already: choose another name") from error


def _require_feature(disk: durable.Disk, works: work.WorkFolders, root: Path) -> None:
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
        self._claim = self._claimed()
        try:
            if self.files.closed() is not None:
                raise ConflictError(f"session {name!r} is closed: it stays as it is")
            found, _ = covering(part_folders(self.files.path))
            self._last = found[-1][1] if found else 0
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

    def merge(self, *, limit: int = MERGED, fewest: int = 2) -> None:
        """Merges neighbouring parts into few; what cannot be read, or has other columns, stays as it is.

        Args:
            limit: how large a merged part may be [bytes].
            fewest: how many parts are worth the while.

        Raises:
            ConflictError: the claim is somebody else's by now.
            StorageFullError, StorageError: the disk refused; what was not merged is as it was.
        """
        self._remove_covered()
        for group in merges(self.files.parts(), limit=limit, fewest=fewest):
            self._merge(group)
        self._remove_covered()

    def close(self, how: str = "closed", text: str = "") -> ClosedRecord:
        """Returns how the session ended, which is on the disk from now on; its parts are merged, if that is possible.

        Args:
            how: one of `session_records.ENDINGS`.
            text: for people.

        Raises:
            DamagedError, FormatError: parts that cannot be read; it stays open.
            ConflictError, StorageError: as `write_part`.
        """
        with contextlib.suppress(DamagedError, OSError):  # many small parts are as good
            self.merge()
        parts = self.files.parts()
        record = ClosedRecord(
            session=self.files.record.id,
            how=how,
            text=text[: session_records.TEXT_LIMIT],
            closed=self._clock(),
            rows=(parts[0].rows[0], parts[-1].rows[1]) if parts else (0, 0),
            parts=self._last,
            snapshots=self._snapshots,
            seconds=max(0.0, (parts[-1].stopped - parts[0].started) / 1e9) if parts else 0.0,
        )
        self._claim.verify()
        with self._works.made() as made:
            durable.write_record(self._disk, made / CLOSED_FILE, record.to_bytes())
            if not durable.publish_file(self._disk, made / CLOSED_FILE, self.files.path / CLOSED_FILE):
                raise ConflictError(f"session {self.files.record.name!r} was closed by another process")
        self.release()
        return record

    def _claimed(self) -> claims.Claim:
        try:
            return claims.take(self._disk, self.files.path, self._works.make, clock=self._clock, reserve=False)
        except RunLockedError as error:
            name = self.files.record.name
            where = f"process {error.pid} on {error.host}" if error.pid else "several processes"
            raise RunLockedError(
                f"session {name!r} is being recorded by {where}", host=error.host, pid=error.pid
            ) from error

    def _publish(self, record: T, file: str, folder: str, components: Mapping[str, Encoded], description: str) -> T:
        job = PrepareJob(self.files.root, self.files.record.name, processes.this_process())
        texts = {path: {"description": text} for path, text in {**_DESCRIPTIONS, "": description}.items()}
        prepared = write_prepared(self._disk, job, components, texts)
        try:
            record = replace(record, files=prepared.files)
            durable.write_record(self._disk, prepared.folder / file, record.to_bytes())
            durable.sync_folder(self._disk, prepared.folder)
            self._claim.verify()
            durable.publish_folder(self._disk, prepared.folder, self.files.path / folder)
        except BaseException:
            discard(self._disk, self.files.root, prepared.folder, ())
            raise
        self._claim.beat()
        return record

    def _merge(self, group: Sequence[PartRecord]) -> None:
        """Merges neighbours that have the same columns."""
        run: list[tuple[PartRecord, dict[str, Any]]] = []
        for part in group:
            try:
                tables = self.files.read_part(part)
            except DamagedError:
                self._merge_run(run)
                run = []
                continue
            if run and _form(run[0][1]) != _form(tables):
                self._merge_run(run)
                run = []
            run.append((part, tables))
        self._merge_run(run)

    def _merge_run(self, run: Sequence[tuple[PartRecord, dict[str, Any]]]) -> None:
        if len(run) < 2:
            return
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
        self._publish(record, PART_FILE, f"{PARTS}/{record.folder}", {RECORD: state.encode(tables)}, _PART)

    def _remove_covered(self) -> None:
        """Removes the parts that merged ones cover, each of which is read once more before."""
        kept, covered = covering(part_folders(self.files.path))
        if not covered:
            return
        for first, last in kept:
            inside = [each for each in covered if first <= each[0] and each[1] <= last]
            if not inside:
                continue
            record = self.files.part((first, last))
            self.files.verify(f"{PARTS}/{record.folder}", record)
            for low, high in inside:
                durable.remove_tree(self._disk, self.files.path / PARTS / f"{low:08d}-{high:08d}")
        durable.sync_folder(self._disk, self.files.path / PARTS)


def merges(parts: Sequence[PartRecord], *, limit: int, fewest: int = 2) -> list[list[PartRecord]]:
    """Returns which neighbours become one part: as many as the limit allows, where rows are not missing between them.

    Args:
        parts: in order.
        limit: of the size of a merged part [bytes].
        fewest: how many parts are worth the while.
    """
    groups: list[list[PartRecord]] = []
    for part in parts:
        group = groups[-1] if groups else []
        joins = bool(group) and sum(each.size for each in group) + part.size <= limit and _follows(group[-1], part)
        if joins:
            group.append(part)
        else:
            groups.append([part])
    return [group for group in groups if len(group) >= max(fewest, 2)]


def _follows(before: PartRecord, after: PartRecord) -> bool:
    """Returns whether nothing was lost between two parts, and both have the same tables."""
    return before.tables.keys() == after.tables.keys() and all(
        before.tables[name][1] == after.tables[name][0] for name in before.tables
    )


def _form(tree: Any) -> Any:
    """Returns what must be equal in parts that are merged: columns, dtypes, shapes of entries."""
    if isinstance(tree, dict):
        return {key: _form(value) for key, value in tree.items()}
    if isinstance(tree, tuple):
        return tuple(_form(value) for value in tree)
    return tree.dtype.str if tree.dtype.kind != "U" else "U", tree.shape[1:]


def remove_session(root: Path, name: str, *, disk: durable.Disk | None = None) -> None:
    """Removes a session, whatever state it is in; its origin is free to be pruned from then on.

    Raises:
        SessionNotFoundError: there is none of that name.
        RunLockedError: a process is recording it.
        StorageError: the disk refused; it is there as before, or gone.
    """
    disk = disk or durable.Disk()
    works = work.WorkFolders(disk, root)
    folder = root / SESSIONS / names.check_run_name(name)
    with contextlib.suppress(DamagedError, FormatError):
        SessionFiles(root, name)
    with claims.take(disk, folder, works.make, clock=time.time, reserve=False), works.made() as made:
        with durable.translated(folder):
            disk.rename(folder, made / name)
        durable.sync_folder(disk, folder.parent)
