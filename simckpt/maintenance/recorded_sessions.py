"""Verifies recordings of hardware in the loop: records, every byte of parts, snapshots and models, what is missing."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TypeVar

from simckpt.errors import SessionNotFoundError, StorageError, StoreError, UnsupportedFormatError
from simckpt.maintenance.findings import DAMAGE, LEFTOVER, UNCHECKED, Notes, problem
from simckpt.storage import StoreFiles, sessions
from simckpt.storage.sessions import Bundle, SessionFiles

T = TypeVar("T")
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
        if found.findings and (store.path / sessions.SESSIONS / name / "writer").exists():
            # parts are merged while it is written: what is wrong is so on a second look as well
            again = _examined(store, name, quick, lambda nbytes: None)
            known = {(each.path, each.problem) for each in found.findings}
            again.findings = [each for each in again.findings if (each.path, each.problem) in known]
            found = again
        notes.findings += found.findings
        notes.count(records=found.counts.records, nbytes=found.counts.nbytes)


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
    notes.count(records=closed is not None)
    for numbers in _read(store, notes, f"{where}/{sessions.PARTS}", files.part_numbers) or ():
        folder = f"{sessions.PARTS}/{numbers[0]:08d}-{numbers[1]:08d}"
        read = functools.partial(files.part, numbers)
        part = _read(store, notes, f"{where}/{folder}/{sessions.PART_FILE}", read)
        if part is not None:
            bundles.append((folder, part))
    for snapshot in _read(store, notes, f"{where}/{sessions.SNAPSHOTS}", files.snapshots) or ():
        bundles.append((f"{sessions.SNAPSHOTS}/{snapshot.number:08d}", snapshot))
    for model in _read(store, notes, f"{where}/{sessions.MODELS}", files.models) or ():
        bundles.append((f"{sessions.MODELS}/{model.digest}", model))
    for folder, record in bundles:
        notes.count(records=1)
        if quick:
            continue
        _read(store, notes, f"{where}/{folder}", functools.partial(files.verify, folder, record))
        size = sum(file.size for file in record.files)
        notes.count(nbytes=size)
        advance(size)
    _examine_covered(files, notes, where)
    return notes


def _examine_covered(files: SessionFiles, notes: Notes, where: str) -> None:
    """Tells of parts that merged ones cover, where nobody is about to remove them."""
    try:
        _, covered = sessions.covering(sessions.part_folders(files.path))
        if covered and files.closed() is not None:
            folder = f"{where}/{sessions.PARTS}/{covered[0][0]:08d}-{covered[0][1]:08d}"
            text = f"{len(covered)} parts that were merged into others, and could not be removed then"
            notes.add(LEFTOVER, "session", folder, text, advice="remove them by hand; no reader looks at them")
    except StoreError:
        return  # told already


def _read(store: StoreFiles, notes: Notes, where: str, read: Callable[[], T]) -> T | None:
    """Returns what is read, or None once it was told why it cannot be."""
    try:
        return read()
    except StoreError as error:
        _tell(store, notes, where, error)
        return None


def _tell(store: StoreFiles, notes: Notes, where: str, error: StoreError) -> None:
    severity = UNCHECKED if isinstance(error, StorageError | UnsupportedFormatError) else DAMAGE
    notes.add(severity, "session", where, problem(error, store.path))
