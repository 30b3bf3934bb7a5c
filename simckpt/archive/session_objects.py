"""Brings sessions into an archive and back, in the order of FORMAT.md: manifest, content, read back, the end last."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection
from pathlib import Path

from simckpt.archive import contents
from simckpt.archive.fetching import download, is_here
from simckpt.archive.objects import Objects, lost
from simckpt.archive.uploading import Uploads, describe
from simckpt.errors import (
    ArchiveDamagedError,
    ConflictError,
    DamagedError,
    FormatError,
    SessionNotFoundError,
    UnsupportedFormatError,
)
from simckpt.storage import StoreFiles, archived_sessions, quarantine
from simckpt.storage.archived_sessions import PIN, ArchivedSession
from simckpt.storage.session_records import parse_closed
from simckpt.storage.sessions import ARCHIVED_FILE, CLOSED_FILE, SESSIONS, SessionFiles

_BOTH_WHOLE = (
    "nothing was changed; both are whole. Push the one that is here to a place of its own, or `simckpt session remove` "
    "it: that leaves the other one where it is"
)
_TRIES = 3  # to bring a session back that others are evicting at the same time


class SessionUploads:
    """Uploads closed sessions of a store.

    Args:
        files: of the store.
        uploads: which write, and count, and know what is there.
    """

    def __init__(self, files: StoreFiles, uploads: Uploads) -> None:
        self._files = files
        self._uploads = uploads
        self._objects = uploads.objects
        self._listing = uploads.listing

    def upload(self, name: str) -> ArchivedSession:
        """Returns what the archive holds of a session, now that all of it is there and was read back.

        Raises:
            SessionNotFoundError: it was removed.
            DamagedError, FormatError: it is damaged here, and so was not moved.
            ArchiveDamagedError: the archive does not give back what was written.
            ConflictError: the archive has another session of that name.
            ArchiveUnavailableError: the archive cannot be reached; the next try goes on from here.
        """
        try:
            files = self._files.session(name)
            record = self._described(files)
            with contextlib.suppress(ArchiveDamagedError):  # what is damaged there gives way
                check_same_end(record, contents.read_session_manifest(self._objects, name), self._objects)
            if files.record.origin is not None:
                contents.require_sessions(self._objects)
            self._settle(record, ARCHIVED_FILE, record.to_bytes())
            for file, copied in record.files.items():
                if file != CLOSED_FILE:
                    self._uploads.bring(contents.session_object(name, file), files.path / file, copied)
            last = (files.path / CLOSED_FILE).read_bytes()
        except FileNotFoundError as error:
            self._files.session(name)  # removed meanwhile, or evicted by somebody else
            where = Path(error.filename) if error.filename else self._files.session_folder(name)
            raise DamagedError(f"files of session {name!r} are gone", path=where) from error
        if self._objects.read(contents.session_object(name, ARCHIVED_FILE)) != record.to_bytes():
            raise lost(self._objects.place, contents.session_object(name, ARCHIVED_FILE), "is not what was written")
        if describe(last) != record.files[CLOSED_FILE]:
            raise DamagedError(f"{files.path / CLOSED_FILE} has changed", path=files.path / CLOSED_FILE)
        self._settle(record, CLOSED_FILE, last)
        return record

    def _described(self, files: SessionFiles) -> ArchivedSession:
        """Returns what is to be uploaded, every byte of it verified."""
        names = archived_sessions.verify(files)
        found = {name: describe(files.path / name) for name in names}
        return ArchivedSession(files.record.id, files.record.name, self._uploads.archive, found)

    def _settle(self, record: ArchivedSession, file: str, data: bytes) -> None:
        def check_ours() -> None:
            check_same(self._objects, record.name, record.session)

        self._uploads.settle(contents.session_object(record.name, file), data, check_ours)

    def bring_pin(self, files: SessionFiles, *, mirror: bool) -> None:
        """Pins a session there if it is pinned here.

        Args:
            files: of the session.
            mirror: whether a pin there goes that is not here.
        """
        name = contents.session_object(files.record.name, PIN)
        with contextlib.suppress(DamagedError, FormatError):  # what is damaged here does not go there
            data = archived_sessions.read_pin(files)
            if data is not None and self._listing.sizes.get(name) != len(data):
                self._objects.put(name, data)
                self._listing.sizes[name] = len(data)
            if data is None and mirror and name in self._listing.sizes:
                self._objects.delete(name)
                del self._listing.sizes[name]


def check_same(objects: Objects, name: str, session: str) -> None:
    """Raises ConflictError if an archive has another session of that name, as far as what is there can be read."""
    there = contents.session_there(objects, name)
    if there not in (None, session):
        raise ConflictError(
            f"session {name!r} is another one at {objects.place} (id {there}) than here (id {session}): nothing was "
            f"changed; give a place, or a store, of its own"
        )


def check_same_end(here: ArchivedSession, there: ArchivedSession | None, objects: Objects) -> None:
    """Raises ConflictError if a session was ended on both sides, in copies of one that was not: they do not mix."""
    if there is not None and there.session == here.session and dict(there.files) != dict(here.files):
        raise ConflictError(
            f"session {here.name!r} was ended once here and once in a copy of this store, which is at {objects.place}: "
            f"{_BOTH_WHOLE}"
        )


def check_same_end_there(objects: Objects, files: StoreFiles, name: str) -> None:
    """Raises ConflictError if a session that is closed here has another end at a place, as far as both can be read."""
    here, path = archived_sessions.read_end(files.path, name), contents.session_object(name, CLOSED_FILE)
    there = None if here is None else objects.read(path)
    if here is None or there is None:
        return
    with contextlib.suppress(DamagedError, FormatError):  # what is damaged there gives way to what is good
        session = parse_closed(here, files.session_folder(name) / CLOSED_FILE).session
        if parse_closed(there, f"{objects.place}/{path}").session != session or there == here:
            return
        raise ConflictError(
            f"session {name!r} was ended once here and once in a copy of this store, which is at {objects.place}: "
            f"{_BOTH_WHOLE}"
        )


def read_whole(objects: Objects, name: str) -> ArchivedSession:
    """Returns what a place has of a session, which is whole there, as its last record says.

    Raises:
        SessionNotFoundError: there is no such session.
        ArchiveDamagedError: what says so is damaged.
    """
    record = contents.read_session_manifest(objects, name)
    if record is None or objects.read(contents.session_object(name, CLOSED_FILE)) is None:
        raise SessionNotFoundError(f"session {name!r} is not at {objects.place}")
    return record


def fetch(objects: Objects, files: StoreFiles, name: str) -> list[str]:
    """Returns the names of the files that were brought back: what of a session is missing here, or damaged.

    Raises:
        SessionNotFoundError: the archive does not have it, or it was removed meanwhile.
        ArchiveDamagedError: the archive's copy is damaged or gone; what is here stays as it is.
        ArchiveUnavailableError: the archive cannot be reached; what is here stays as it is.
        RunLockedError: somebody else has been at work with it for long.
        StorageError: the disk refused.
    """
    is_new = identity_here(files, name) is None
    record, brought = known(objects, files, name), list[str]()
    for again in range(_TRIES):
        brought += bring(objects, files, record, note=True, is_new=is_new and not again)
        # an eviction by another process may have gone on meanwhile
        if all(os.path.lexists(files.session_folder(name) / file) for file in record.files):
            break
    return list(dict.fromkeys(brought))


def offered(objects: Objects, files: StoreFiles, name: str) -> list[str]:
    """Returns what `fetch` would, and raises as it does, after it has read these objects; changes nothing here."""
    record = known(objects, files, name)
    wanted = missing(files, record)
    for file in wanted:
        there = contents.session_object(name, file)
        # twice, as a download is tried
        if all(objects.digest(there, record.files[file].size) != record.files[file] for _ in range(2)):
            raise lost(objects.place, there, "is gone, or not what was written there")
    return wanted


def known(objects: Objects, files: StoreFiles, name: str) -> ArchivedSession:
    """Returns what the archive has of a session, by what is noted here or else there; raises as `fetch`."""
    identity, record = identity_here(files, name), None
    with contextlib.suppress(DamagedError, FormatError):
        record = archived_sessions.read_archived_session(files.path, name)
    if record is None or identity not in (None, record.session):
        record = read_whole(objects, name)
    if identity not in (None, record.session):
        raise SessionNotFoundError(f"session {name!r} is another one in the archive {objects.place}")
    return record


def identity_here(files: StoreFiles, name: str) -> str | None:
    """Returns the id of a session here, None if there is none.

    Raises:
        DamagedError: its folder is here, and no record in it says which session it is: nothing is replaced there.
    """
    identity, folder = archived_sessions.identity(files.path, name), files.session_folder(name)
    if identity is None and os.path.lexists(folder):
        message = f"no record in {folder} says which session it is: move that folder away, and bring the session then"
        raise DamagedError(message, path=folder)
    return identity


def missing(files: StoreFiles, record: ArchivedSession) -> list[str]:
    """Returns the files that a session lacks here or has damaged; raises StorageError if a folder of it is a link."""
    folder = files.session_folder(record.name)
    for inner in {file.rpartition("/")[0] for file in record.files}:
        quarantine.check_inside(files.path, SESSIONS, record.name, *filter(None, inner.split("/")))
    return [file for file, copied in record.files.items() if not is_here(folder / file, copied)]


def bring(
    objects: Objects,
    files: StoreFiles,
    record: ArchivedSession,
    *,
    note: bool,
    is_new: bool,
    wanted: Collection[str] | None = None,
) -> list[str]:
    """Returns the files that were brought of a session: those that are wanted, or all of one that is not here.

    One that is removed meanwhile stays so, and another one that has its name by then is not touched.

    Args:
        objects: of the place.
        files: of the store.
        record: what the place has.
        note: whether the place is this store's archive, which is noted then with a session that comes whole.
        is_new: whether it was not here when that was asked for.
        wanted: what is missing here; it is looked for if None.

    Raises:
        SessionNotFoundError: it was removed meanwhile.
        ConflictError: it is new, and there is one of its name by now.
        ArchiveDamagedError, ArchiveUnavailableError, RunLockedError, StorageError: nothing good was replaced.
    """
    if is_new:
        wanted = list(record.files)
    elif wanted is None:
        wanted = missing(files, record)
    if not wanted:
        return []
    folders = sorted({file.rpartition("/")[0] for file in wanted} - {""})
    data = record.to_bytes() if note and is_new else None
    with files.incoming_session(record.name, folders, note=data) as incoming:
        for file in wanted:
            there = contents.session_object(record.name, file)
            download(objects, files, there, incoming, file, record.files[file])
        if is_new:
            session = _checked(objects, incoming.folder, record)
            pin = _pin_there(objects, record.name, session)
            files.adopt_session(incoming, record.name, pin=pin)
        else:
            files.replace_in_session(incoming, record.name, wanted, session=record.session)
    return list(wanted)


def _checked(objects: Objects, folder: Path, record: ArchivedSession) -> str:
    """Returns the id of a session that has come, every byte of which was verified as a reader would."""
    try:
        found = SessionFiles(folder.parent.parent, record.name)
        archived_sessions.verify(found)
    except UnsupportedFormatError:
        raise
    except (DamagedError, FormatError) as error:
        reason = f"is not whole: {str(error).replace(f'{folder}/', '')}"
        raise lost(objects.place, contents.session_object(record.name, ""), reason) from None
    if found.record.id != record.session:
        raise lost(objects.place, contents.session_object(record.name, ARCHIVED_FILE), "is of another session")
    return found.record.id


def _pin_there(objects: Objects, name: str, session: str) -> bytes | None:
    data = objects.read(contents.session_object(name, PIN))
    with contextlib.suppress(DamagedError, FormatError):
        archived_sessions.parse_pin(data or b"", PIN, session=session)
        return data
    return None
