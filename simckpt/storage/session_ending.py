"""What is done with a session that nobody records any more: it is closed, or removed."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import time
from collections.abc import Callable
from pathlib import Path

from simckpt.errors import (
    ConflictError,
    DamagedError,
    FormatError,
    RunLockedError,
    SessionNotFoundError,
    StorageError,
    StorageFullError,
)
from simckpt.storage import archived_sessions, durable, names, quarantine, work
from simckpt.storage.session_records import ClosedRecord
from simckpt.storage.session_writing import SessionWriter, claimed
from simckpt.storage.sessions import MODELS, PARTS, SESSION_FILE, SESSIONS, SNAPSHOTS, SessionFiles

_STARTING = 60.0  # [s] that a recording process has to claim the session that it is to write


def is_being_begun(files: SessionFiles, *, now: float) -> bool:
    """Returns whether the process that is to record a session may still be starting: nobody has written to it.

    Args:
        files: of the session.
        now: the time [s since 1970].
    """
    if not 0 <= now - files.record.created < _STARTING or os.path.lexists(files.path / "writer"):
        return False
    return not any(_holds(files.path / folder) for folder in (PARTS, SNAPSHOTS, MODELS))


def _holds(folder: Path) -> bool:
    return any(folder.glob("*"))


def close_session(
    root: Path, name: str, *, disk: durable.Disk | None = None, clock: Callable[[], float] = time.time
) -> ClosedRecord:
    """Returns how a session ended that nobody records any more; one that nobody has closed is closed for that.

    What came after its last part is not known then: it was lost with the memory of the processes that were killed, or
    on a disk that refused it and the end as well.

    Raises:
        SessionNotFoundError, DamagedError, FormatError: there is no session that can be closed.
        RunLockedError: a process is recording it, or is about to.
        StorageError: the disk refused.
    """
    files = SessionFiles(root, name)
    closed = files.closed()
    if closed is not None:
        return closed
    if is_being_begun(files, now=clock()):
        raise RunLockedError(
            f"session {name!r} was made less than {_STARTING:.0f} s ago, and the process that records it may be "
            f"starting: if none is, close it in a minute",
            host=files.record.host,
            pid=0,
        )
    # who ends it in order gives the claim back
    killed = os.path.lexists(files.path / "writer")
    with SessionWriter(root, name, disk=disk) as writer:
        return writer.close(
            "killed" if killed else "refused", "closed later: what came after its last row is not known"
        )


def remove_session(
    root: Path,
    name: str,
    *,
    disk: durable.Disk | None = None,
    id: str | None = None,
    unless_pinned: bool = False,
) -> None:
    """Removes a session, whatever state it is in; its origin is free to be pruned from then on.

    An archive removes its copy at its next pass.

    Of a symbolic link in its place the link goes, and what it leads to stays as it is. On a full disk a session that
    holds nothing yet can be removed all the same.

    Args:
        root: the store's folder.
        name: of the session.
        disk: the system calls, for tests.
        id: of the session that is meant: another one of that name stays.
        unless_pinned: whether one that is pinned stays.

    Raises:
        SessionNotFoundError: there is none of that name, or it is another one.
        ConflictError: it is pinned, and stays for that.
        RunLockedError: a process is recording it.
        StorageError: the disk refused; it is there as before, or gone.
    """
    disk = disk or durable.Disk()
    works = work.WorkFolders(disk, root)
    folder = root / SESSIONS / names.check_run_name(name)
    with contextlib.suppress(DamagedError, FormatError):
        SessionFiles(root, name)
    with durable.translated(folder):
        if not stat.S_ISDIR((root / SESSIONS).lstat().st_mode):
            raise NotADirectoryError(errno.ENOTDIR, "is a file or a symbolic link where a folder belongs")
        if not stat.S_ISDIR(folder.lstat().st_mode):
            disk.unlink(folder)
            return
    try:
        claim = claimed(disk, folder, works, time.time, reserve=False)
    except StorageFullError:
        _check_removable(root, name, id, unless_pinned)
        _remove_unused(disk, folder)
        return
    with claim, works.made() as made:
        _check_removable(root, name, id, unless_pinned)
        noted = archived_sessions.note_removed(disk, works, root, name)
        try:
            with durable.translated(folder):
                disk.rename(folder, made / name)
            if unless_pinned and archived_sessions.is_pinned(made / name):
                # by somebody who has seen it there, a moment ago
                _put_back(disk, root, made / name, folder)
                raise ConflictError(f"session {name!r} is pinned")
        except (ConflictError, StorageError):
            if noted is not None and os.path.lexists(folder):
                with contextlib.suppress(StorageError):  # else the next pass does it, which finds the session here
                    archived_sessions.forget_removed(disk, root, noted)
            raise
        durable.sync_folder(disk, folder.parent)


def _check_removable(root: Path, name: str, id: str | None, unless_pinned: bool) -> None:
    if id is not None and archived_sessions.identity(root, name) != id:
        raise SessionNotFoundError(f"session {name!r} of id {id} is gone; another one has its name, and stays")
    if unless_pinned and archived_sessions.is_pinned(root / SESSIONS / name):
        raise ConflictError(f"session {name!r} is pinned")


def _put_back(disk: durable.Disk, root: Path, source: Path, folder: Path) -> None:
    try:
        durable.publish_folder(disk, source, folder)
    except ConflictError:
        # another one has the name by now
        quarantine.put_aside(disk, root, str(source.relative_to(root)))


def _remove_unused(disk: durable.Disk, folder: Path) -> None:
    """Removes a session that nobody has written to, for which no claim is needed; raises StorageError of another."""
    inner = (PARTS, SNAPSHOTS, MODELS)
    with durable.translated(folder):
        left = [name for name in inner if any((folder / name).glob("*"))]
        left += sorted({entry.name for entry in folder.iterdir()} - {SESSION_FILE, *inner})
        if left:
            raise OSError(errno.ENOSPC, f"there is no room to claim it, and it holds {', '.join(left)}")
        for name in inner:
            with contextlib.suppress(FileNotFoundError):
                disk.remove_folder(folder / name)
        disk.unlink(folder / SESSION_FILE)
        disk.remove_folder(folder)
    durable.sync_folder(disk, folder.parent)
