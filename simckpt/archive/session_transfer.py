"""Push and pull of sessions: those that the checkpoints of a run were driving, or one by its name."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace

from simckpt.archive import contents, session_objects
from simckpt.archive.archive import Archive
from simckpt.archive.contents import Listing
from simckpt.archive.fetching import is_here
from simckpt.archive.objects import Objects, Patience, lost
from simckpt.archive.places import parse_place
from simckpt.archive.run_objects import Troubles
from simckpt.archive.session_objects import SessionUploads
from simckpt.archive.uploading import Uploads
from simckpt.errors import (
    ArchiveDamagedError,
    ConflictError,
    DamagedError,
    FormatError,
    SessionNotFoundError,
    StoreError,
)
from simckpt.session_pruning import sessions_of
from simckpt.storage import StoreFiles, archived_sessions
from simckpt.storage.archived_sessions import PIN, ArchivedSession
from simckpt.storage.sessions import ARCHIVED_FILE, CLOSED_FILE, PARTS, SessionFiles, covering, part_folders


@dataclass(frozen=True)
class SessionTransfer:
    """What was brought of one session.

    Attributes:
        session: its name.
        nbytes: what was written on the other side weighs [bytes]; 0 if all was there.
        repaired: whether it was there already, but not whole, and was put right.
    """

    session: str
    nbytes: int
    repaired: bool = False


@contextlib.contextmanager
def opened_to_push(files: StoreFiles, url: str | os.PathLike[str], patience: Patience | None) -> Iterator[Uploads]:
    """Gives what uploads to a place that belongs to nobody, or to this store's archive, which is claimed for that.

    Raises:
        ConflictError: the place is the archive of another store, or no archive.
        ArchiveUnavailableError, ArchiveDamagedError: it cannot be reached, or does not keep what it is given.
    """
    objects = Objects(parse_place(url), patience)
    deed = contents.write_deed(objects, owner=None)
    with contextlib.ExitStack() as stack:
        if deed.owner == files.id:
            stack.enter_context(files.claim_archive())
        elif deed.owner is not None:
            raise ConflictError(f"{objects.place} is the archive of store {deed.owner}: push to a place of its own")
        yield Uploads(objects, files, deed.id, Listing(objects.list()))


def push_session(
    files: StoreFiles,
    name: str,
    url: str | os.PathLike[str],
    *,
    verify: bool = False,
    patience: Patience | None = None,
) -> SessionTransfer:
    """Brings a closed session to another place, as far as that lacks it; raises as `Store.push_session`."""
    session = files.session(name)
    if session.closed() is None:
        raise ConflictError(
            f"session {name!r} is being recorded, or was not closed: end it, or `simckpt session close` it, and push "
            f"it then"
        )
    with opened_to_push(files, url, patience) as uploads:
        session_objects.check_same(uploads.objects, name, session.record.id)
        session_objects.check_same_end_there(uploads.objects, files, name)
        return _push(files, session, uploads, verify=verify)


def push_sessions(
    files: StoreFiles, run: str, uploads: Uploads, *, verify: bool, damaged: list[StoreError]
) -> list[str]:
    """Returns the names of the sessions of a run of which something was brought; notes which are damaged here."""
    done = []
    for name in sessions_of(files, run, closed=True):
        try:
            if _push(files, files.session(name), uploads, verify=verify).nbytes:
                done.append(name)
        except (ArchiveDamagedError, SessionNotFoundError):
            raise
        except (DamagedError, FormatError) as error:
            damaged.append(error)
    return done


def check_sessions(files: StoreFiles, runs: Collection[str], objects: Objects, listing: Listing) -> None:
    """Raises ConflictError if a place has another session, or end, of the name of one that would go with these runs."""
    there = set(listing.sessions())
    for run in runs:
        for name in there.intersection(sessions_of(files, run, closed=True)):
            session_objects.check_same(objects, name, files.session(name).record.id)
            session_objects.check_same_end_there(objects, files, name)


def _push(files: StoreFiles, session: SessionFiles, uploads: Uploads, *, verify: bool) -> SessionTransfer:
    name, before = session.record.name, uploads.nbytes
    there = _there(uploads.objects, name)
    if there is None or not _is_whole(uploads, there, verify=verify):
        if archived_sessions.is_evicted(session):
            Archive(files).fetch_session(name)
        sender = SessionUploads(files, uploads)
        sender.upload(name)
        sender.bring_pin(session, mirror=False)
    nbytes = uploads.nbytes - before
    return SessionTransfer(name, nbytes, repaired=there is not None and nbytes > 0)


def _there(objects: Objects, name: str) -> ArchivedSession | None:
    with contextlib.suppress(SessionNotFoundError, ArchiveDamagedError):
        return session_objects.read_whole(objects, name)
    return None


def _is_whole(uploads: Uploads, record: ArchivedSession, *, verify: bool) -> bool:
    if not uploads.listing.has_session(record):
        return False
    found = ((contents.session_object(record.name, file), copied) for file, copied in record.files.items())
    return not verify or all(uploads.objects.digest(name, copied.size) == copied for name, copied in found)


def pull_session(
    url: str | os.PathLike[str],
    files: StoreFiles,
    name: str,
    *,
    verify: bool = False,
    patience: Patience | None = None,
) -> SessionTransfer:
    """Brings a session that was pushed or archived into a store, as far as it lacks it; see `Store.pull_session`."""
    objects = Objects(parse_place(url), patience, make=False)
    listing = Listing(objects.list())
    if name not in listing.sessions():
        shown = ", ".join(listing.sessions()[:5]) or "none"
        raise SessionNotFoundError(f"{objects.place} has no session {name!r}; it has {shown}")
    check_here(files, objects, name)
    return pull(objects, files, name, verify=verify, evicted=True)


def check_here(files: StoreFiles, objects: Objects, name: str) -> None:
    """Raises ConflictError if a session that is to come cannot: another one is here, or the same with no or other end.

    Raises:
        DamagedError: nothing that is here says which one it is.
    """
    here = session_objects.identity_here(files, name)
    if here is None:
        return
    there = contents.session_there(objects, name)
    if there not in (None, here):
        raise ConflictError(
            f"session {name!r} is another one here (id {here}) than at {objects.place} (id {there}): nothing was "
            f"changed; pull into another store"
        )
    if not os.path.lexists(files.session_folder(name) / CLOSED_FILE):
        raise ConflictError(
            f"session {name!r} was not closed here, and is whole at {objects.place}: `simckpt session remove` the one "
            f"that is here first; nothing was changed"
        )
    session_objects.check_same_end_there(objects, files, name)


def sessions_to_pull(objects: Objects, listing: Listing, runs: Collection[str] | None, troubles: Troubles) -> list[str]:
    """Returns the names of the sessions at a place that checkpoints of some runs were driving; all of them if None.

    Of those whose records are damaged there nobody knows who was driving, of which `troubles` is told.
    """
    if runs is None:
        return listing.sessions()
    found = []
    for name in listing.sessions():
        with troubles.noted():
            there = contents.read_session_there(objects, name)
            if there is not None and there.origin is not None and there.origin.run in runs:
                found.append(name)
    return found


def pull(objects: Objects, files: StoreFiles, name: str, *, verify: bool, evicted: bool = False) -> SessionTransfer:
    """Returns what was brought of a session that can come; raises as `session_objects.bring`.

    Args:
        objects: of the place.
        files: of the store.
        name: of the session.
        verify: whether to read all that is here.
        evicted: whether to bring what is in the archive of this store alone, which may be lost.
    """
    folder = files.session_folder(name)
    is_new = not os.path.lexists(folder)
    if not is_new and _is_good(files, name, verify=verify, evicted=evicted):
        return SessionTransfer(name, 0)
    try:
        record = session_objects.read_whole(objects, name)
    except SessionNotFoundError:
        raise lost(objects.place, contents.session_object(name, ARCHIVED_FILE), "or its last record is gone") from None
    if not is_new:
        _check_same_end(objects, files, record)
    wanted = None
    if not is_new and not verify:
        wanted = [file for file, copied in record.files.items() if _differs(files, record, file, copied.size)]
    brought = session_objects.bring(objects, files, record, note=False, is_new=is_new, wanted=wanted)
    if not is_new and not archived_sessions.is_pinned(folder):
        data = objects.read(contents.session_object(name, PIN))
        with contextlib.suppress(DamagedError, FormatError):
            if data is not None:
                files.take_pin(name, data)
    return SessionTransfer(name, sum(record.files[file].size for file in brought), bool(brought) and not is_new)


def _check_same_end(objects: Objects, files: StoreFiles, record: ArchivedSession) -> None:
    """Raises ConflictError if what is damaged here is not what the place has: it was ended on both sides."""
    end = archived_sessions.read_end(files.path, record.name)
    if end is not None:
        is_other = archived_sessions.end_digest(end) != record.files[CLOSED_FILE].digest
    else:
        # its end is damaged; what was merged tells as well, but for what a kill has left of a merge
        kept, _ = covering(part_folders(files.session_folder(record.name)))
        is_other = not {f"{PARTS}/{first:08d}-{last:08d}/state.h5" for first, last in kept} <= record.files.keys()
    if is_other:
        session_objects.check_same_end(replace(record, files={}), record, objects)


def _differs(files: StoreFiles, record: ArchivedSession, file: str, size: int) -> bool:
    """Returns whether a file is gone here or cut; a small record is read."""
    path = files.session_folder(record.name) / file
    if not file.endswith("/state.h5"):
        return not is_here(path, record.files[file])
    return not path.is_file() or path.is_symlink() or path.stat().st_size != size


def _is_good(files: StoreFiles, name: str, *, verify: bool, evicted: bool) -> bool:
    """Returns whether nothing is to be brought of a session, as far as one looks; raises nothing of its damage."""
    try:
        session = files.session(name)
        if archived_sessions.is_evicted(session):
            return not evicted
        if verify:
            archived_sessions.verify(session)
        else:
            for each in archived_sessions.folders_of(session):
                for file in each.record.files:
                    path = session.path / each.folder / file.name
                    if path.lstat().st_size != file.size:
                        return False
    except (DamagedError, FormatError, FileNotFoundError):
        return False
    return session.closed() is not None
