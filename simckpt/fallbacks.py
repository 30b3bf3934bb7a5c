"""What is damaged or evicted comes back from the archive when it is read: what readers of a store call for that."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

from simckpt.errors import DamagedError, StoreError
from simckpt.storage import StoreFiles


def of_checkpoints(files: StoreFiles) -> Callable[[str, int, DamagedError], bool]:
    """Returns what brings a checkpoint back: told run, commit number and damage, returns whether anything came."""

    def fallback(run: str, seq: int, error: DamagedError) -> bool:
        if not has_archive(files):
            return False
        from simckpt.archive import bring_back

        return bring_back(files, run, seq, error)

    return fallback


def of_sessions(files: StoreFiles) -> Callable[[str, DamagedError], bool]:
    """Returns what brings a session back: told its name and the damage, returns whether anything came."""

    def fallback(name: str, error: DamagedError) -> bool:
        if not has_archive(files):
            return False
        from simckpt.archive import bring_session_back

        return bring_session_back(files, name, error)

    return fallback


def has_archive(files: StoreFiles) -> bool:
    """Returns whether a store has an archive, as far as that can be read."""
    with contextlib.suppress(StoreError):
        return files.archive() is not None
    return True  # whose record is damaged
