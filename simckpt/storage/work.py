"""Folders for unfinished work: `tmp/<who makes it>`, and sweeping those whose makers are dead."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
from collections.abc import Callable, Iterator
from pathlib import Path

from simckpt.errors import SimckptError, StorageError
from simckpt.storage import durable, processes, reader, sealed

JOB_LIMIT = 1 << 24  # [bytes] of job.json: that of many ranks names the segments of all
SEGMENTS_LIMIT = 200_000  # that it may name
JOB_FILE = "job.json"  # in a work folder: what its maker has begun, for the sweep to undo or to end
UNKNOWN_AGE = 86_400.0  # [s] after which work of a process that cannot be looked at from here counts as left over


class WorkFolders:
    """Makes and sweeps folders in a store's `tmp/`; their names say which process made them."""

    def __init__(self, disk: durable.Disk, root: Path) -> None:
        self._disk = disk
        self._root = root

    def make(self, owner: processes.Process | None = None) -> Path:
        """Returns a new empty folder, on the store's file system, so that what is in it can be renamed into place.

        Args:
            owner: once it is dead the folder counts as left over; this process if None.
        """
        parent = durable.make_folders(self._disk, self._root, "tmp")
        path = parent / (owner or processes.this_process()).token(secrets.token_hex(4))
        with durable.translated(path):
            self._disk.make_folder(path)
        return path

    @contextlib.contextmanager
    def made(self) -> Iterator[Path]:
        """Gives a new folder, and removes what is left of it after the block; if that fails, it is swept later."""
        path = self.make()
        try:
            yield path
        finally:
            self.remove(path)

    def remove(self, path: Path) -> None:
        """Removes a folder that this process made, or as much of it as it can."""
        with contextlib.suppress(SimckptError):
            durable.remove_tree(self._disk, path)

    def sweep(self, finish: Callable[[Path], None]) -> list[str]:
        """Removes left-over folders, and returns their names.

        What a living process made stays, as does for a day what a process made that cannot be looked at from here.
        What cannot be finished or removed, in a store of several users perhaps, stays for a later sweep, and so does
        everything if `tmp/` cannot be looked at for the moment.

        Args:
            finish: called with each folder before it is removed, to end what its maker had begun; may raise
                StorageError.
        """
        found: list[Path] = []
        with contextlib.suppress(StorageError):
            found = self.left_over()
        swept = []
        for path in found:
            with contextlib.suppress(StorageError):
                self.take_away(path, finish)
                swept.append(path.name)
        return swept

    def left_over(self) -> list[Path]:
        """Returns the folders that nobody goes on with.

        Raises:
            StorageError: `tmp/` cannot be looked at for the moment.
        """
        return [path for path in folders(self._root / "tmp") if self._is_left_over(path)]

    def take_away(self, path: Path, finish: Callable[[Path], None]) -> None:
        """Removes one folder that nobody goes on with, as `sweep` does; raises StorageError if it has to stay."""
        # under another name at first: a child of the dead process may still be at work in it, and fails from now on
        taken = path.with_name(processes.this_process().token(secrets.token_hex(4)))
        with durable.translated(path):
            self._disk.rename(path, taken)
        try:
            finish(taken)
            durable.remove_tree(self._disk, taken)
        except BaseException:
            with contextlib.suppress(OSError):
                self._disk.rename(taken, path)
            raise

    def _is_left_over(self, path: Path) -> bool:
        maker = processes.Process.from_token(path.name)
        alive = maker.is_alive() if maker else None
        if alive is not None:
            return not alive
        with contextlib.suppress(OSError), self.made() as probe:
            # both times come from the file system, so the machines' clocks need not agree
            return probe.lstat().st_mtime - path.lstat().st_mtime >= UNKNOWN_AGE
        return False


def folders(path: Path) -> list[Path]:
    """Returns the folders in a folder; none if it is missing.

    Raises:
        StorageError: it cannot be looked at for the moment, which does not mean that there are none.
    """
    try:
        if path.is_symlink():
            raise OSError(errno.ELOOP, "is a symbolic link")
        with os.scandir(path) as entries:
            return [Path(entry.path) for entry in entries if entry.is_dir(follow_symlinks=False)]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise StorageError(f"{path} cannot be listed: {error.strerror}") from error


def read_job(folder: Path) -> sealed.Fields:
    """Returns what the maker of a work folder has begun.

    Raises:
        FileNotFoundError: it has not said, or the folder is gone.
        DamagedError: the record is not whole, perhaps not yet.
        FormatError: nor can it be understood.
        StorageError: it cannot be read for the moment, which is not to be taken for any of these.
    """
    path = folder / JOB_FILE
    with reader.opened_file(folder, JOB_FILE) as descriptor, durable.translated(path):
        data = reader.read_whole(descriptor, limit=JOB_LIMIT, path=path)
    return sealed.unseal(data, "job", path=path)


def segments_in(job: sealed.Fields, key: str) -> tuple[str, ...]:
    """Returns the ids that a job has under a key; raises FormatError."""
    return job.texts(key, limit=SEGMENTS_LIMIT)
