"""Folders for unfinished work: `tmp/<who makes it>`, and sweeping those whose makers are dead."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Callable, Iterator
from pathlib import Path

from simckpt.errors import SimckptError, StorageError
from simckpt.storage import durable, processes

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
        What cannot be finished or removed, in a store of several users perhaps, stays for a later sweep.

        Args:
            finish: called with each folder before it is removed, to end what its maker had begun; may raise
                StorageError.
        """
        swept = []
        for path in filter(self._is_left_over, folders(self._root / "tmp")):
            with contextlib.suppress(StorageError):
                self._take_away(path, finish)
                swept.append(path.name)
        return swept

    def _take_away(self, path: Path, finish: Callable[[Path], None]) -> None:
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
    """Returns the folders in a folder; none if it cannot be looked at."""
    try:
        with os.scandir(path) as entries:
            return [Path(entry.path) for entry in entries if entry.is_dir(follow_symlinks=False)]
    except OSError:
        return []
