"""Which archives this user has named. A store that comes from somebody else names one, too: that one is not obeyed.

Otherwise whoever gives away a store could have its reader open any folder, and any bucket with the reader's own
credentials. What was named is kept by store and address in the user's configuration folder, one small file each.
"""

from __future__ import annotations

import contextlib
import hashlib
from pathlib import Path

from simckpt.archive.places import Place
from simckpt.catalog import user_folder
from simckpt.errors import StoreError
from simckpt.storage import durable

_named: set[tuple[str, str]] = set()  # by this process, which may have no folder to keep it in


def default_folder() -> Path | None:
    """Returns where it is kept, `simckpt/archives` in `$XDG_CONFIG_HOME` or `~/.config`; None if there is no home."""
    folder = user_folder("XDG_CONFIG_HOME", ".config")
    return None if folder is None else folder / "archives"


def note_named(store: str, place: Place) -> None:
    """Keeps in mind that the user has named a place as the archive of a store, given by its id."""
    _named.add((store, str(place)))
    file = _file(store, place)
    # in a folder that cannot be written, it holds for this process alone
    if file is not None and not file.exists():
        with contextlib.suppress(OSError, StoreError):
            file.parent.mkdir(parents=True, exist_ok=True)
            durable.write_record(durable.Disk(), file, f"{place}\n".encode())


def was_named(store: str, place: Place) -> bool:
    """Returns whether the user has named a place as the archive of a store; a memory is this process's own."""
    file = _file(store, place)
    return place.scheme == "memory" or (store, str(place)) in _named or (file is not None and file.exists())


def _file(store: str, place: Place) -> Path | None:
    folder = default_folder()
    return None if folder is None else folder / f"{store}-{hashlib.sha256(str(place).encode()).hexdigest()[:32]}"
