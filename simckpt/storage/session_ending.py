"""What is done with a session that nobody records any more: it is closed, or removed."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import time
from pathlib import Path

from simckpt.errors import DamagedError, FormatError, StorageFullError
from simckpt.storage import archived_sessions, durable, names, work
from simckpt.storage.session_records import ClosedRecord
from simckpt.storage.session_writing import SessionWriter, claimed
from simckpt.storage.sessions import MODELS, PARTS, SESSION_FILE, SESSIONS, SNAPSHOTS, SessionFiles


def close_session(root: Path, name: str, *, disk: durable.Disk | None = None) -> ClosedRecord:
    """Returns how a session ended that nobody records any more; one that nobody has closed is closed for that.

    What came after its last part is not known then: it was lost with the memory of the processes that were killed, or
    on a disk that refused it and the end as well.

    Raises:
        SessionNotFoundError, DamagedError, FormatError: there is no session that can be closed.
        RunLockedError: a process is recording it.
        StorageError: the disk refused.
    """
    files = SessionFiles(root, name)
    closed = files.closed()
    if closed is not None:
        return closed
    # who ends it in order gives the claim back
    killed = os.path.lexists(files.path / "writer")
    with SessionWriter(root, name, disk=disk) as writer:
        return writer.close(
            "killed" if killed else "refused", "closed later: what came after its last row is not known"
        )


def remove_session(root: Path, name: str, *, disk: durable.Disk | None = None) -> None:
    """Removes a session, whatever state it is in; its origin is free to be pruned from then on.

    An archive removes its copy at its next pass.

    Of a symbolic link in its place the link goes, and what it leads to stays as it is. On a full disk a session that
    holds nothing yet can be removed all the same.

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
    with durable.translated(folder):
        if not stat.S_ISDIR((root / SESSIONS).lstat().st_mode):
            raise NotADirectoryError(errno.ENOTDIR, "is a file or a symbolic link where a folder belongs")
        if not stat.S_ISDIR(folder.lstat().st_mode):
            disk.unlink(folder)
            return
    try:
        claim = claimed(disk, folder, works, time.time, reserve=False)
    except StorageFullError:
        _remove_unused(disk, folder)
        return
    with claim, works.made() as made:
        archived_sessions.note_removed(disk, works, root, name)
        with durable.translated(folder):
            disk.rename(folder, made / name)
        durable.sync_folder(disk, folder.parent)


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
