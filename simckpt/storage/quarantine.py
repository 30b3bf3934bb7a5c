"""The quarantine: `quarantine/<path>`, where a repair puts what is damaged, under the path that it had in the store.

Nothing in it is ever removed by simckpt. The segments that a checkpoint in it needs count as used, as long as its index
or what its save has announced can be read, so that it can be put back by hand.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path

from simckpt.errors import FormatError, StorageError, StoreError
from simckpt.storage import durable, indexes, names, reader, work

FOLDER = "quarantine"
REASON = "damaged, in quarantine"  # what the reason of a tombstone that a repair leaves begins with
_TRIES = 1000


def entries(root: Path) -> list[str]:
    """Returns the paths, as they were in the store, of what lies in quarantine: checkpoints and single files."""
    return sorted(str(path.relative_to(root / FOLDER)) for path in _entries(root / FOLDER))


def _entries(folder: Path) -> Iterator[Path]:
    if folder.is_symlink():
        return
    with contextlib.suppress(FileNotFoundError, NotADirectoryError), os.scandir(folder) as found:
        for entry in list(found):
            path = Path(entry.path)
            is_checkpoint = folder.name == "checkpoints" and names.SEQUENCE.fullmatch(path.name.partition(".")[0])
            if is_checkpoint or not entry.is_dir(follow_symlinks=False):
                yield path
            else:
                yield from _entries(path)


def segments_used(root: Path) -> set[str]:
    """Returns the ids of the segments that checkpoints in quarantine need, as far as their indexes can be read.

    Raises:
        StorageError: a folder cannot be looked at for the moment.
    """
    used: set[str] = set()
    try:
        if (root / FOLDER).is_symlink():
            raise OSError(errno.ELOOP, "is a symbolic link")
        for path in _entries(root / FOLDER):
            if path.parent.name == "checkpoints":
                used |= uses(path)
    except OSError as error:
        raise StorageError(f"{root / FOLDER} cannot be looked at: {error.strerror}") from error
    return used


def uses(checkpoint: Path) -> frozenset[str]:
    """Returns the ids of the segments that the checkpoint in a folder needs, as far as its files tell."""
    with contextlib.suppress(FileNotFoundError, StoreError):
        found = indexes.segment_ids_in(checkpoint)
        if found is not None:
            return found
    # what its save has announced is all that it can use
    with contextlib.suppress(FileNotFoundError, StoreError):
        job = work.read_job(checkpoint)
        return frozenset((*work.segments_in(job, "uses"), *work.segments_in(job, "made")))
    return frozenset()


def check_inside(root: Path, *folders: str) -> None:
    """Raises StorageError if one of these folders, each in the one before, is a link or none: a repair moves nothing.

    What lies behind a symbolic link is not the store's. A missing folder holds nothing that could be moved.
    """
    try:
        with contextlib.suppress(FileNotFoundError), reader.opened_folder(root, *folders):
            pass
    except FormatError as error:
        raise StorageError(f"{error}: nothing is changed there; put the folder itself back in its place") from error


def put_aside(disk: durable.Disk, root: Path, where: str) -> Path | None:
    """Moves a file of the store into quarantine, durably; returns where it is now, or None if it was gone.

    Raises:
        StorageError: the disk refused; it is where it was.
    """
    parts = where.split("/")
    check_inside(root, *parts[:-1])
    folder = durable.make_folders(disk, root, FOLDER, *parts[:-1])
    target = free_name(folder / parts[-1])
    with durable.translated(root / where):
        try:
            disk.rename(root / where, target)
        except FileNotFoundError:
            return None
    durable.sync_folder(disk, folder)
    durable.sync_folder(disk, (root / where).parent)
    return target


def keep_aside(disk: durable.Disk, source: Path, target: Path) -> None:
    """Gives a file that is about to be replaced a name in quarantine; where there are no hard links it loses its own.

    Raises:
        StorageError: the disk refused.
    """
    with durable.translated(source):
        try:
            disk.link(source, target)
        except FileNotFoundError:
            return
        except OSError:
            # no hard links, or no file: a folder of that name may be part of the damage
            disk.rename(source, target)
    durable.sync_folder(disk, target.parent)


def free_name(path: Path) -> Path:
    """Returns a path, with a number behind it if there is something of that name already."""
    for tried in names_for(path):
        if not os.path.lexists(tried):
            return tried
    raise too_many(path)


def names_for(path: Path) -> Iterator[Path]:
    """Yields a path, and then the same with numbers behind it."""
    yield path
    for number in range(2, _TRIES):
        yield path.with_name(f"{path.name}.{number}")


def too_many(path: Path) -> StorageError:
    """Returns the error for a place in quarantine of which all names are taken."""
    return StorageError(f"{path} and {_TRIES} names after it are taken: remove what is not needed")
