"""What a store knows of sessions beside what was recorded: copies in its archive, pins, removals not yet done there.

All of it is small files: `archived.json` and `pin` in a session's folder, `archive/removed/<id>.json`. A session is
evicted if it has an `archived.json` that names a state file which is not here.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from simckpt.errors import DamagedError, FormatError, SessionNotFoundError, StorageError, StoreError
from simckpt.storage import archived, durable, names, reader, sealed, session_records, sessions, state_file, work
from simckpt.storage.archived import ARCHIVED_LIMIT, Copied
from simckpt.storage.index import INDEX_FILE
from simckpt.storage.records import COMMIT_LIMIT
from simckpt.storage.sessions import (
    ARCHIVED_FILE,
    CLOSED_FILE,
    MODEL_FILE,
    MODELS,
    PART_FILE,
    PARTS,
    SESSION_FILE,
    SESSIONS,
    SNAPSHOT_FILE,
    SNAPSHOTS,
    Bundle,
    SessionFiles,
)

PIN = "pin"
REMOVED = "removed"  # in `archive/`
_STATE = state_file.STATE_FILE
_FILE = re.compile(
    r"session\.json|closed\.json|parts/[0-9]{8}-[0-9]{8}/(?:part\.json|leaves\.json|state\.h5)"
    r"|snapshots/[0-9]{8}/(?:snapshot\.json|leaves\.json|state\.h5)"
    r"|models/[0-9a-f]{32}/(?:model\.json|leaves\.json|state\.h5)"
)
_NOTE = re.compile(r"([0-9a-f]{32})\.json")


@dataclass(frozen=True)
class ArchivedSession:
    """`archived.json`: what of one session lies in the archive.

    Attributes:
        session: its id.
        name: its name.
        archive: id of the archive.
        files: {path below the session's folder: file}, in the order in which they are brought; `closed.json` is last.
    """

    session: str
    name: str
    archive: str
    files: Mapping[str, Copied]

    @property
    def states(self) -> list[str]:
        """The paths of its files with arrays."""
        return [name for name in self.files if name.endswith(f"/{_STATE}")]

    def to_bytes(self) -> bytes:
        """Returns the record as written to disk and to the archive."""
        files = {name: {"size": file.size, "digest": file.digest} for name, file in self.files.items()}
        fields = {"session": self.session, "name": self.name, "archive": self.archive, "files": files}
        return sealed.seal("archived session", fields)


def parse_archived_session(data: bytes, path: object, *, name: str) -> ArchivedSession:
    """Returns the record of an archived session; raises DamagedError, FormatError or UnsupportedFormatError.

    Args:
        data: the whole file.
        path: where it was, for messages.
        name: of the session in whose folder it lies.
    """
    fields = sealed.unseal(data, "archived session", path=path)
    if fields.text("name", names.RUN_NAME) != name:
        raise FormatError(f"{path} is the record of session {fields.text('name')!r}: a file was renamed or copied")
    entries = fields.object("files")
    found = {each: entries.object(each) for each in entries.content}
    if not (all(map(_FILE.fullmatch, found)) and {SESSION_FILE, CLOSED_FILE} <= found.keys()):
        raise fields.wrong("files", "the files of a session")
    files = {each: Copied(entry.integer("size"), entry.digest("digest")) for each, entry in found.items()}
    return ArchivedSession(fields.id("session"), name, fields.id("archive"), files)


def read_archived_session(root: Path, name: str) -> ArchivedSession | None:
    """Returns the record of an archived session, or None if it has none; raises DamagedError or FormatError."""
    path = root / SESSIONS / name / ARCHIVED_FILE
    try:
        data = reader.read_small(root, SESSIONS, name, ARCHIVED_FILE, limit=ARCHIVED_LIMIT, path=path)
    except FileNotFoundError:
        return None
    return parse_archived_session(data, path, name=name)


def noted(files: SessionFiles) -> ArchivedSession | None:
    """Returns what is known here of the copy of a session; None without one, or if its record is damaged."""
    with contextlib.suppress(DamagedError, FormatError):
        record = read_archived_session(files.root, files.path.name)
        if record is not None and record.session == files.record.id:
            return record
    return None


def is_evicted(files: SessionFiles) -> bool:
    """Returns whether something of a session is in the archive alone."""
    record = noted(files)
    return record is not None and not all(os.path.lexists(files.path / name) for name in record.states)


class SessionFolder(NamedTuple):
    """A folder of a session with a record, an index and a state file.

    Attributes:
        folder: its path below the session's.
        record: which vouches for the two others.
        file: the name of the record.
    """

    folder: str
    record: Bundle
    file: str

    @property
    def files(self) -> list[str]:
        """The paths of its files, what vouches for the others last."""
        return [f"{self.folder}/{name}" for name in (_STATE, INDEX_FILE, self.file)]


def folders_of(files: SessionFiles) -> list[SessionFolder]:
    """Returns all folders of a session, each behind those that it refers to; raises DamagedError or FormatError."""
    models = [SessionFolder(f"{MODELS}/{each.digest}", each, MODEL_FILE) for each in files.models()]
    snapshots = [SessionFolder(f"{SNAPSHOTS}/{each.number:08d}", each, SNAPSHOT_FILE) for each in files.snapshots()]
    return models + snapshots + [SessionFolder(f"{PARTS}/{each.folder}", each, PART_FILE) for each in files.parts()]


def size_of(files: SessionFiles) -> int:
    """Returns what a session weighs but for its small records [bytes], be it here or not; raises as `folders_of`."""
    return sum(file.size for each in folders_of(files) for file in each.record.files)


def verify(files: SessionFiles) -> list[str]:
    """Returns the paths of all files of a closed session, in the order to copy them, once every byte was verified.

    Raises:
        DamagedError, FormatError: something of it cannot be trusted, or is missing.
    """
    closed, folders = files.closed(), folders_of(files)
    if closed is None:
        raise FormatError(f"{files.path} is no session that was closed")
    for place, text in files.absent(files.snapshots()):
        raise DamagedError(f"{files.path / place}: {text}", path=files.path / place)
    for each in folders:
        files.verify(each.folder, each.record)
    return [name for each in folders for name in each.files] + [SESSION_FILE, CLOSED_FILE]


def is_pinned(session: Path) -> bool:
    """Returns whether the session in a folder is protected from pruning: damage to a pin cannot unpin."""
    return os.path.lexists(session / PIN)


def pin_bytes(session: str) -> bytes:
    """Returns the mark that pins the session of this id."""
    return sealed.seal("mark", {"session": session, "mark": PIN})


def parse_pin(data: bytes, path: object, *, session: str) -> None:
    """Raises DamagedError, FormatError or UnsupportedFormatError if these bytes do not pin the session of this id."""
    fields = sealed.unseal(data, "mark", path=path)
    if (fields.id("session"), fields.text("mark")) != (session, PIN):
        raise FormatError(f"{path} is the mark of something else: a file was renamed or copied")


def pin_session(root: Path, name: str, *, disk: durable.Disk | None = None) -> None:
    """Protects a session from pruning, whoever records it meanwhile; raises SessionNotFoundError or StorageError."""
    disk = disk or durable.Disk()
    files = SessionFiles(root, name)
    if not is_pinned(files.path):
        with work.WorkFolders(disk, root).made() as made:
            durable.write_record(disk, made / PIN, pin_bytes(files.record.id))
            durable.publish_file(disk, made / PIN, files.path / PIN)
    # again: a pruner may have been quicker
    if sessions.read_session(root, name).id != files.record.id:
        raise SessionNotFoundError(f"session {name!r} was removed meanwhile, and another one has its name")


def unpin_session(root: Path, name: str, *, disk: durable.Disk | None = None) -> None:
    """Ends the protection of a session, if there is one; raises SessionNotFoundError or StorageError."""
    disk = disk or durable.Disk()
    path = SessionFiles(root, name).path / PIN
    with durable.translated(path):
        try:
            # a store removes nothing behind a symbolic link
            with reader.opened_folder(root, SESSIONS, name):
                disk.unlink(path)
        except FileNotFoundError:
            return
    durable.sync_folder(disk, path.parent)


def read_pin(files: SessionFiles) -> bytes | None:
    """Returns the mark that pins a session, or None; raises DamagedError or FormatError."""
    path = files.path / PIN
    try:
        data = reader.read_small(files.path, PIN, limit=COMMIT_LIMIT, path=path)
    except FileNotFoundError:
        return None
    parse_pin(data, path, session=files.record.id)
    return data


@dataclass(frozen=True)
class RemovedSession:
    """`archive/removed/<id>.json`: that a session was removed here.

    Attributes:
        session: its id.
        name: its name.
        end: digest of its last record, which says which of several ends it had, that copies of a store may have given
            it; None if it had none, or none that could be read.
        any_end: whether nobody knows, as an earlier version has written the note.
    """

    session: str
    name: str
    end: str | None = None
    any_end: bool = False


def note_removed(disk: durable.Disk, works: work.WorkFolders, root: Path, name: str) -> str | None:
    """Notes that a session is about to be removed, for the archive to remove its copy; without an archive nothing.

    The note counts once there is no session of that id here any more.

    Returns:
        The id of the session, if that was noted.
    """
    if not os.path.lexists(root / archived.ARCHIVE / archived.ARCHIVE_FILE):
        return None
    session = identity(root, name)
    if session is None:
        return None  # nothing says which: the next pass tells of the copy, if there is one
    folder = durable.make_folders(disk, root, archived.ARCHIVE, REMOVED)
    with works.made() as made:
        fields = {"session": session, "name": name, "end": _end(root, name, session)}
        data = sealed.seal("removed", {**fields, "removed": sealed.time_to_json(time.time())})
        durable.write_record(disk, made / f"{session}.json", data)
        durable.replace_file(disk, made / f"{session}.json", folder / f"{session}.json")
    return session


def read_end(root: Path, name: str, *, session: str | None = None) -> bytes | None:
    """Returns the last record of a session, or None if there is none, or it cannot be trusted."""
    path = root / SESSIONS / name / CLOSED_FILE
    with contextlib.suppress(StoreError, FileNotFoundError):
        data = reader.read_small(root, SESSIONS, name, CLOSED_FILE, limit=session_records.RECORD_LIMIT, path=path)
        session_records.parse_closed(data, path, session=session)
        return data
    return None


def end_digest(data: bytes) -> str:
    """Returns the digest of a last record, as manifests have it."""
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


def _end(root: Path, name: str, session: str) -> str | None:
    data = read_end(root, name, session=session)
    if data is not None:
        return end_digest(data)
    with contextlib.suppress(StoreError):
        record = read_archived_session(root, name)
        if record is not None and record.session == session:
            return record.files[CLOSED_FILE].digest
    return None


def identity(root: Path, name: str) -> str | None:
    """Returns the id of the session in a folder, by any record of it that can be read, or None."""
    with contextlib.suppress(StoreError):
        return sessions.read_session(root, name).id
    with contextlib.suppress(StoreError):
        record = read_archived_session(root, name)
        if record is not None:
            return record.session
    data = read_end(root, name)
    return None if data is None else session_records.parse_closed(data, CLOSED_FILE).session


def read_removed(root: Path, session: str) -> RemovedSession | None:
    """Returns the note of the removal of a session, or None; raises DamagedError or FormatError."""
    path = root / archived.ARCHIVE / REMOVED / f"{session}.json"
    try:
        data = reader.read_small(root, archived.ARCHIVE, REMOVED, path.name, limit=COMMIT_LIMIT, path=path)
    except FileNotFoundError:
        return None
    fields = sealed.unseal(data, "removed", path=path)
    if fields.id("session") != session:
        raise FormatError(f"{path} is the note of session {fields.id('session')}: a file was renamed or copied")
    any_end = "end" not in fields.content
    end = None if any_end else fields.optional("end", fields.digest)
    return RemovedSession(session, fields.text("name", names.RUN_NAME), end, any_end)


def noted_here(root: Path) -> dict[str, str]:
    """Returns {id: name} of the sessions whose removal is noted and that are here: it was taken back, or not done."""
    noted_ids = {session for session, _ in notes(root)}
    if not noted_ids:
        return {}
    here = {identity(root, name): name for name in sessions.session_names(root)}
    return {session: name for session, name in here.items() if session is not None and session in noted_ids}


def removed(root: Path) -> list[RemovedSession]:
    """Returns the notes of the sessions that were removed and are not here; damaged notes are left out."""
    listed, here = sessions.session_names(root), set()
    for name in listed:
        session = identity(root, name)
        if session is None:
            return []  # it may be one of them
        here.add(session)
    found = []
    for session, _ in notes(root):
        with contextlib.suppress(DamagedError, FormatError):
            note = read_removed(root, session)
            # a folder that has lost all its records may be the one: a kill comes between a note and the removal
            is_gone = note is not None and (note.name in listed or not os.path.lexists(root / SESSIONS / note.name))
            if note is not None and is_gone and session not in here:
                found.append(note)
    return found


def notes(root: Path) -> Iterator[tuple[str, Path]]:
    """Yields (id, path) of the notes of removed sessions, damaged or not; raises StorageError."""
    try:
        with reader.opened_folder(root, archived.ARCHIVE, REMOVED) as folder:
            listed = os.listdir(folder)  # noqa: PTH208 a descriptor
    except FileNotFoundError:
        return
    except OSError as error:
        raise StorageError(f"{archived.ARCHIVE}/{REMOVED} cannot be listed: {error.strerror}") from error
    for name in sorted(listed):
        if match := _NOTE.fullmatch(name):
            yield match[1], root / archived.ARCHIVE / REMOVED / name


def forget_removed(disk: durable.Disk, root: Path, session: str) -> None:
    """Removes the note of a removal that the archive has followed; raises StorageError."""
    path = root / archived.ARCHIVE / REMOVED / f"{session}.json"
    with durable.translated(path), contextlib.suppress(FileNotFoundError):
        with reader.opened_folder(root, archived.ARCHIVE, REMOVED):
            disk.unlink(path)
        durable.sync_folder(disk, path.parent)
