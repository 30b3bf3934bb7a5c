"""Changes to the disk: the only module that creates, writes, syncs, renames or removes anything.

`Disk` has one small method for each system call. Everything else is built from these, so that a test can replace the
disk by one that fails at its n-th operation, writes short, or kills the process. The functions below turn the operating
system's errors into `StorageError` and `StorageFullError` and never retry a failed fsync: Linux marks the pages clean,
and a second fsync would report success for bytes that are lost.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path

from simckpt.errors import ConflictError, SimckptError, StorageError, StorageFullError

Bytes = bytes | bytearray | memoryview

CHUNK = 8 << 20  # [bytes] in one pwrite: large enough for the disk, small enough to hear of a full one early
WRITEBACK = 1 << 20  # [bytes]; smaller parts are left to the fsync
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_TAKEN = {errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR}
_NO_ALLOCATION = {errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS}
_NO_LINKS = {errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK}


class Disk:
    """The system calls that change a disk, one method each; nothing here translates errors or retries."""

    def create(self, path: Path) -> int:
        """Returns a descriptor of a new file; fails if there is one of that name."""
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)

    def open_log(self, path: Path) -> int:
        """Returns a descriptor that appends to a file, which is created if it is missing."""
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)

    def open_lock(self, path: Path) -> int:
        """Returns a descriptor for `lockf`, to be opened once per process: closing any other one frees the lock."""
        return os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)

    def allocate(self, descriptor: int, size: int) -> None:
        """Reserves `size` bytes, so that a full disk says so before anything is written."""
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(descriptor, 0, size)

    def pwrite(self, descriptor: int, data: Bytes, offset: int) -> int:
        """Returns how many of the bytes were written; fewer than given is no error."""
        return os.pwrite(descriptor, data, offset)

    def start_writeback(self, descriptor: int, offset: int, size: int) -> None:
        """Asks the kernel to begin writing these bytes to the disk, while others are still being prepared."""
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(descriptor, offset, size, os.POSIX_FADV_DONTNEED)

    def append(self, descriptor: int, data: bytes) -> int:
        """Returns how many of the bytes were appended, by one write."""
        return os.write(descriptor, data)

    def fsync(self, descriptor: int) -> None:
        """Waits until the file's or folder's content would survive a power failure."""
        os.fsync(descriptor)

    def close(self, descriptor: int) -> None:
        """Closes a descriptor; on NFS the error of an earlier write may appear here."""
        os.close(descriptor)

    def make_folder(self, path: Path) -> None:
        """Creates one folder, of which no file or folder of that name may exist."""
        path.mkdir()

    def rename(self, source: Path, target: Path) -> None:
        """Renames; a file replaces a file, a folder replaces nothing but an empty folder."""
        source.rename(target)

    def link(self, source: Path, target: Path) -> None:
        """Gives a file a second name, which must be free."""
        os.link(source, target, follow_symlinks=False)

    def unlink(self, path: Path) -> None:
        """Removes one file or symbolic link."""
        path.unlink()

    def remove_folder(self, path: Path) -> None:
        """Removes one empty folder."""
        path.rmdir()

    def touch(self, path: Path) -> None:
        """Sets a file's times to the file system's present."""
        os.utime(path, follow_symlinks=False)


@contextlib.contextmanager
def translated(path: Path, *, needed: int | None = None) -> Iterator[None]:
    """Turns an OSError of the block into a StorageError that names `path`.

    Args:
        path: what was being written, for the message and for the free space around it.
        needed: how many bytes were to be written, if known.

    Raises:
        StorageFullError: the disk, the quota or the file-size limit is exhausted.
        StorageError: any other refusal.
    """
    try:
        yield
    except SimckptError:
        raise
    except OSError as error:
        raise _translate(error, path, needed) from error


def _translate(error: OSError, path: Path, needed: int | None) -> StorageError:
    result: StorageError
    if error.errno in _FULL:
        free = _free_bytes(path)
        numbers = f"{'?' if needed is None else needed} bytes were needed, {'?' if free is None else free} are free"
        result = StorageFullError(
            f"no room to write {path} ({error.strerror}): {numbers}; free some space, prune checkpoints or raise the "
            f"limit. Earlier checkpoints are untouched",
            needed=needed,
            free=free,
        )
    else:
        result = StorageError(f"{path}: {error.strerror or error}; earlier checkpoints are untouched")
    result.errno, result.strerror, result.filename = error.errno, error.strerror, str(path)
    return result


def _free_bytes(path: Path) -> int | None:
    for folder in path.parents:
        with contextlib.suppress(OSError):
            status = os.statvfs(folder)
            return status.f_bavail * status.f_frsize
    return None


def write_file(disk: Disk, path: Path, parts: Iterable[tuple[int, Bytes]], *, size: int) -> None:
    """Writes a new file of `size` bytes and syncs it; does not sync its folder. Bytes that no part covers are zero.

    Args:
        disk: the system calls.
        path: must not exist.
        parts: (offset, bytes); taken one by one, so that a generator may digest each just before it is written.
        size: the file's size [bytes], reserved at once.

    Raises:
        StorageFullError: no room; the caller throws the folder away.
        StorageError: the disk refused.
    """
    with translated(path, needed=size):
        descriptor = disk.create(path)
        try:
            if size:
                _allocate(disk, descriptor, size)
            for offset, data in parts:
                _write_all(disk, descriptor, data, offset)
                if len(data) >= WRITEBACK:
                    # else the disk would idle until the fsync, for the kernel gathers gigabytes before it begins. The
                    # pages stay in its cache: they are dirty
                    with contextlib.suppress(OSError):
                        disk.start_writeback(descriptor, offset, len(data))
            disk.fsync(descriptor)
        except BaseException:
            with contextlib.suppress(OSError):
                disk.close(descriptor)
            raise
        disk.close(descriptor)


def _allocate(disk: Disk, descriptor: int, size: int) -> None:
    try:
        disk.allocate(descriptor, size)
    except OSError as error:
        if error.errno not in _NO_ALLOCATION:
            raise
        # this file system cannot reserve: the size is set by writing the last byte, a full disk is noticed later
        _write_all(disk, descriptor, b"\0", size - 1)


def _write_all(disk: Disk, descriptor: int, data: Bytes, offset: int) -> None:
    view = memoryview(data).cast("B")
    while view.nbytes:
        written = disk.pwrite(descriptor, view[:CHUNK], offset)
        if written <= 0:
            raise OSError(errno.EIO, "the disk takes no more bytes and gives no reason")
        view, offset = view[written:], offset + written


def write_record(disk: Disk, path: Path, data: bytes) -> None:
    """Writes a small new file and syncs it; does not sync its folder."""
    write_file(disk, path, [(0, data)], size=len(data))


def sync_folder(disk: Disk, path: Path) -> None:
    """Makes the names in a folder durable: files created in it, renamed into it or removed from it."""
    with translated(path):
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            disk.fsync(descriptor)
        finally:
            disk.close(descriptor)


def sync_path(disk: Disk, root: Path, *parts: str) -> None:
    """Makes a file that something else has written or removed durable, with the folders that lead to it from `root`.

    Raises:
        StorageError: the disk refused.
    """
    path = root.joinpath(*parts)
    with translated(path):
        with contextlib.suppress(FileNotFoundError):
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            try:
                disk.fsync(descriptor)
            finally:
                disk.close(descriptor)
        for folder in path.parents:
            with contextlib.suppress(FileNotFoundError):
                sync_folder(disk, folder)
            if folder == root:
                break


def make_folders(disk: Disk, root: Path, *parts: str) -> Path:
    """Returns `root/parts...` after creating and syncing what is missing of it below `root`.

    Raises:
        StorageError: also if a part is a symbolic link or a file: a store does not write outside of itself.
    """
    path = root
    for part in parts:
        parent, path = path, path / part
        with translated(path):
            try:
                mode = path.lstat().st_mode
            except FileNotFoundError:
                with contextlib.suppress(FileExistsError):  # another process was quicker
                    disk.make_folder(path)
                sync_folder(disk, parent)
                mode = path.lstat().st_mode
            if not stat.S_ISDIR(mode):
                raise NotADirectoryError(errno.ENOTDIR, "is a file or a symbolic link where a folder belongs")
    return path


def made_folder(disk: Disk, path: Path) -> Path:
    """Returns the absolute path of a folder after making what is missing of it, its parents as well.

    Raises:
        StorageError: as `make_folders`.
    """
    folder = path.absolute()
    existing = next(each for each in (folder, *folder.parents) if each.exists())
    return make_folders(disk, existing, *folder.relative_to(existing).parts)


def publish_folder(disk: Disk, source: Path, target: Path) -> None:
    """Gives a finished folder its final name by one rename, and makes that durable: the commit.

    Nothing is replaced. If the rename cannot be made durable, it is taken back; only if that fails as well does the
    folder keep its final name, whole, although an error is raised.

    Raises:
        ConflictError: something of that name exists.
        StorageError: the disk refused.
    """
    with translated(target):
        # rename would replace an empty folder
        if os.path.lexists(target):
            raise ConflictError(f"{target} exists already: another writer was first")
        identity = file_identity(source)
        try:
            disk.rename(source, target)
        except OSError as error:
            # over NFS a repeated request may report failure after success: what counts is what is there
            if file_identity(target) != identity:
                if error.errno in _TAKEN:
                    raise ConflictError(f"{target} exists already: another writer was first") from error
                raise
        try:
            sync_folder(disk, target.parent)
        except StorageError:
            with contextlib.suppress(OSError):
                disk.rename(target, source)
            raise


def file_identity(path: Path) -> tuple[int, int] | None:
    """Returns device and inode of what a path names, which no rename changes; None if nothing can be looked at."""
    try:
        status = path.lstat()
    except OSError:
        return None
    return status.st_dev, status.st_ino


def replace_file(disk: Disk, source: Path, target: Path) -> None:
    """Puts a synced file in the place of another by one rename, and makes that durable."""
    with translated(target):
        disk.rename(source, target)
        sync_folder(disk, target.parent)


def publish_file(disk: Disk, source: Path, target: Path) -> bool:
    """Gives a synced file its final name if that is free; returns whether it was. `source` may stay or go.

    On a file system without hard links two processes at the same instant may both succeed; the later one wins.
    """
    with translated(target):
        try:
            disk.link(source, target)
        except FileExistsError:
            return False
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            if os.path.lexists(target):
                return False
            disk.rename(source, target)
        sync_folder(disk, target.parent)
    return True


def append_line(disk: Disk, path: Path, line: bytes) -> None:
    """Appends one line to a log by one write, not synced: the exception to "nothing is appended", for people only.

    A line torn by an earlier crash is closed first, so that it spoils no other.
    """
    with translated(path, needed=len(line)):
        descriptor = disk.open_log(path)
        try:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise OSError(errno.EINVAL, "is not a regular file")
            torn = status.st_size > 0 and os.pread(descriptor, 1, status.st_size - 1) != b"\n"
            disk.append(descriptor, (b"\n" if torn else b"") + line + b"\n")
        finally:
            disk.close(descriptor)


def remove_tree(disk: Disk, path: Path) -> None:
    """Removes a folder with all it holds, following no symbolic link; nothing is synced. A missing one is fine."""
    with translated(path):
        try:
            entries = list(os.scandir(path))
        except FileNotFoundError:
            return
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                remove_tree(disk, Path(entry.path))
            else:
                with contextlib.suppress(FileNotFoundError):
                    disk.unlink(Path(entry.path))
        with contextlib.suppress(FileNotFoundError):
            disk.remove_folder(path)


def lock(descriptor: int) -> bool | None:
    """Takes the exclusive lock of an open lock file; returns False if another process has it, None without locks.

    `lockf`, because the kernel frees it with the process that took it: forked children neither keep nor free it.
    """
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EAGAIN):
            return False
        if error.errno in (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL):
            return None
        raise
    return True
