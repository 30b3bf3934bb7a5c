"""Verifies recordings of hardware in the loop: records, every byte of parts, snapshots and models, what is missing."""

from __future__ import annotations

import contextlib
import functools
import os
import time
from collections.abc import Callable
from typing import TypeVar

from simckpt.errors import (
    CheckpointNotFoundError,
    DamagedError,
    RunNotFoundError,
    SessionNotFoundError,
    StorageError,
    StoreError,
    UnsupportedFormatError,
)
from simckpt.maintenance.findings import DAMAGE, FOREIGN, LEFTOVER, UNCHECKED, Notes, problem
from simckpt.storage import StoreFiles, TombstoneRecord, archived, archived_sessions, sessions, state_file
from simckpt.storage.session_ending import is_being_begun
from simckpt.storage.sessions import Bundle, SessionFiles

T = TypeVar("T")
_REST = "all rows and states are read as they were written; viewers of HDF5 may fail"
_ABSENT = "the rows are as they were; those that only this leads to can be read, and not be played again"
_UNFINISHED = "`simckpt check --repair`, or `simckpt session close STORE NAME`, closes it"
_PIN = "the session stays pinned all the same; `simckpt session unpin` and `pin` write it again"
_NOTE = "the copy of a removed session may stay in the archive, of which the next `simckpt archive` tells"
Advance = Callable[[int], None]  # told how many bytes were read


def examine_sessions(store: StoreFiles, notes: Notes, *, quick: bool, advance: Advance) -> None:
    """Verifies all sessions of a store, beside those who record and merge.

    Args:
        store: the files.
        notes: receive what is found.
        quick: leave out arrays.
        advance: see `Advance`.
    """
    try:
        names = sessions.session_names(store.path)
    except StoreError as error:
        _tell(store, notes, sessions.SESSIONS, error)
        return
    for name in names:
        found = _examined(store, name, quick, advance)
        home = store.path / sessions.SESSIONS / name
        if found.findings and ((home / "writer").exists() or (home / sessions.ARCHIVED_FILE).exists()):
            # parts are merged while it is written, and arrays leave for the archive: what is wrong is so on a second
            # look as well
            again = _examined(store, name, quick, lambda nbytes: None)
            known = {(each.path, each.problem) for each in found.findings}
            again.findings = [each for each in again.findings if (each.path, each.problem) in known]
            found = again
        notes.findings += found.findings
        counts = found.counts
        notes.count(records=counts.records, nbytes=counts.nbytes, archived_sessions=counts.archived_sessions)
    folder = f"{archived.ARCHIVE}/{archived_sessions.REMOVED}"
    if (store.path / archived.ARCHIVE).is_symlink():
        return  # told already
    there = _read(store, notes, folder, lambda: list(archived_sessions.notes(store.path)), kind="archive")
    for session, path in there or ():
        read = functools.partial(archived_sessions.read_removed, store.path, session)
        found_note = _read(store, notes, f"{folder}/{path.name}", read, kind="archive", advice=_NOTE)
        notes.count(records=found_note is not None)


def _examined(store: StoreFiles, name: str, quick: bool, advance: Advance) -> Notes:
    notes = Notes()
    where = f"{sessions.SESSIONS}/{name}"
    try:
        files = SessionFiles(store.path, name)
    except SessionNotFoundError:
        return notes  # removed meanwhile
    except StoreError as error:
        _tell(store, notes, f"{where}/{sessions.SESSION_FILE}", error)
        return notes
    notes.count(records=1)
    bundles: list[tuple[str, Bundle]] = []
    closed = _read(store, notes, f"{where}/{sessions.CLOSED_FILE}", files.closed)
    is_ended = closed is not None or bool(notes.findings)
    notes.count(records=closed is not None)
    for numbers in _read(store, notes, f"{where}/{sessions.PARTS}", files.part_numbers) or ():
        folder = f"{sessions.PARTS}/{numbers[0]:08d}-{numbers[1]:08d}"
        read = functools.partial(files.part, numbers)
        part = _read(store, notes, f"{where}/{folder}/{sessions.PART_FILE}", read)
        if part is not None:
            bundles.append((folder, part))
    snapshots = []
    for number in _read(store, notes, f"{where}/{sessions.SNAPSHOTS}", files.snapshot_numbers) or ():
        folder = f"{sessions.SNAPSHOTS}/{number:08d}"
        read_one = functools.partial(files.snapshot, number)
        snapshot = _read(store, notes, f"{where}/{folder}/{sessions.SNAPSHOT_FILE}", read_one)
        if snapshot is not None:
            snapshots.append(snapshot)
            bundles.append((folder, snapshot))
    with contextlib.suppress(StoreError):  # of the last record, which is told
        for place, text in files.absent(snapshots):
            notes.add(DAMAGE, "session", f"{where}/{place}", text, meaning=_ABSENT)
    for model in _read(store, notes, f"{where}/{sessions.MODELS}", files.models) or ():
        bundles.append((f"{sessions.MODELS}/{model.digest}", model))
    _examine_small(store, files, notes, where)
    is_evicted = archived_sessions.is_evicted(files)
    notes.count(archived_sessions=is_evicted)
    for folder, record in bundles:
        notes.count(records=1)
        if quick or (is_evicted and not os.path.lexists(files.path / folder / state_file.STATE_FILE)):
            continue
        told = len(notes.findings)
        _read(store, notes, f"{where}/{folder}", functools.partial(files.verify_leaves, folder, record))
        if len(notes.findings) == told:
            try:
                files.verify_rest(folder, record)
            except DamagedError as error:
                notes.add(DAMAGE, "session", f"{where}/{folder}", problem(error, store.path), meaning=_REST)
            except StoreError as error:
                _tell(store, notes, f"{where}/{folder}", error)
        size = sum(file.size for file in record.files)
        notes.count(nbytes=size)
        advance(size)
    is_left = not (is_ended or files.is_written() or is_being_begun(files, now=time.time()))
    # by now somebody may have closed it
    if is_left and not os.path.lexists(files.path / sessions.CLOSED_FILE):
        text = "nobody records it any more, and nobody has closed it"
        notes.add(LEFTOVER, "unfinished session", where, text, advice=_UNFINISHED)
    _examine_covered(files, notes, where)
    _examine_origin(store, files, notes, where)
    return notes


def _examine_small(store: StoreFiles, files: SessionFiles, notes: Notes, where: str) -> None:
    """Verifies what lies beside the recording: what is known of a copy in the archive, and a pin."""
    name = files.record.name
    read = functools.partial(archived_sessions.read_archived_session, store.path, name)
    noted = _read(store, notes, f"{where}/{sessions.ARCHIVED_FILE}", read, kind="archive")
    notes.count(records=noted is not None)
    pin = functools.partial(archived_sessions.read_pin, files)
    data = _read(store, notes, f"{where}/{archived_sessions.PIN}", pin, advice=_PIN)
    notes.count(records=data is not None)


def _examine_origin(store: StoreFiles, files: SessionFiles, notes: Notes, where: str) -> None:
    """Tells of an origin that was pruned, which no prune does while the session is there, or is not here.

    The latter is no damage: sessions are pushed and pulled without the run that was driving.
    """
    origin = files.record.origin
    if origin is None:
        return
    driving = f"checkpoint {origin.checkpoint} of run {origin.run!r}, which was driving the env,"
    where = f"{where}/{sessions.SESSION_FILE}"
    advice = "nothing need be done: the session can be read and played as before"
    try:
        found = store.commit_record(origin.run, origin.seq)
    except (RunNotFoundError, CheckpointNotFoundError):
        found = None
    except StoreError:
        return  # told of that record
    if found is None or found.id != origin.checkpoint:
        text = f"{driving} is not in this store: it was removed, or the session came without it"
        notes.add(FOREIGN, "session", where, text, advice=advice)
    elif isinstance(found, TombstoneRecord) and not store.was_put_aside(origin.run, found):
        notes.add(DAMAGE, "lineage", where, f"{driving} was pruned", advice=advice)


def _examine_covered(files: SessionFiles, notes: Notes, where: str) -> None:
    """Tells of parts that merged ones cover, where nobody is about to remove them."""
    try:
        _, covered = sessions.covering(sessions.part_folders(files.path))
        if covered and files.closed() is not None:
            folder = f"{where}/{sessions.PARTS}/{covered[0][0]:08d}-{covered[0][1]:08d}"
            text = f"{len(covered)} parts that were merged into others, and could not be removed then"
            notes.add(LEFTOVER, "session", folder, text, advice="`simckpt compact` frees them")
    except StoreError:
        return  # told already


def _read(
    store: StoreFiles, notes: Notes, where: str, read: Callable[[], T], *, kind: str = "session", advice: str = ""
) -> T | None:
    """Returns what is read, or None once it was told why it cannot be."""
    try:
        return read()
    except StoreError as error:
        _tell(store, notes, where, error, kind=kind, advice=advice)
        return None


def _tell(
    store: StoreFiles, notes: Notes, where: str, error: StoreError, *, kind: str = "session", advice: str = ""
) -> None:
    severity = UNCHECKED if isinstance(error, StorageError | UnsupportedFormatError) else DAMAGE
    notes.add(severity, kind, where, problem(error, store.path), **({"advice": advice} if advice else {}))
