"""One checkpoint as one file outside of a store, in one of three forms; FORMAT.md describes them.

The forms: HDF5 for viewers, `.pt` for torch, safetensors for whatever reads that.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Callable, Iterator
from pathlib import Path

from simckpt.errors import ConfigurationError, ConflictError, ExportNotFoundError, FormatError, StorageError
from simckpt.storage import durable, hdf5_export, processes, reader, safetensors_export, torch_export
from simckpt.storage.copying import Source

_WRITERS: dict[str, Callable[[durable.Disk, Path, Source], None]] = {
    "h5": hdf5_export.write,
    "pt": torch_export.write,
    "safetensors": safetensors_export.write,
}
FORMS = tuple(_WRITERS)
_SUFFIXES = {".pt": "pt", ".pth": "pt", ".safetensors": "safetensors"}


def form_of(path: Path, to: str | None) -> str:
    """Returns the form of a file that is to be written: the one asked for, else that of the name's ending, else "h5".

    Raises:
        ConfigurationError: another form.
    """
    if to is None:
        return _SUFFIXES.get(path.suffix.lower(), "h5")
    if to not in _WRITERS:
        known = ", ".join(map(repr, FORMS))
        raise ConfigurationError(f"a checkpoint is exported to one of {known}, got {to!r}", keys=["to"])
    return to


def write_export(disk: durable.Disk, path: Path, source: Source, *, to: str) -> None:
    """Writes a checkpoint into a new file, durably: under a name beside it first, then renamed.

    A kill leaves a hidden file beside it, which says who wrote it: the next export into this folder removes those of
    dead processes of this machine. Those of other machines and containers stay.

    Args:
        disk: the system calls.
        path: of the file; nothing is replaced.
        source: the checkpoint; its bytes go through memory in portions.
        to: one of `FORMS`.

    Raises:
        ConflictError: the path exists.
        DamagedError, SegmentMissingError: the source is not what was saved; there is no file then.
        FormatError: leaves that the form cannot hold.
        UnsupportedFormatError: torch is needed and missing.
        StorageFullError, StorageError: the disk refused; there is no file then.
    """
    with new_file(disk, path) as made:
        _WRITERS[to](disk, made, source)


@contextlib.contextmanager
def new_file(disk: durable.Disk, path: Path) -> Iterator[Path]:
    """Yields a hidden path beside `path` to write a file or a folder at, which is given its own name at the end.

    The content has been synced by then. What is left of an attempt that fails is removed; see `write_export`.

    Raises:
        ConflictError: the path exists: nothing is replaced.
        StorageError: there is no folder for it, or the disk refused.
    """
    if os.path.lexists(path):
        raise ConflictError(f"{path} exists already: nothing is replaced")
    if not path.parent.is_dir():
        raise StorageError(f"{path} cannot be written: there is no folder {path.parent}; make it first")
    _remove_left_over(disk, path.parent)
    made = path.with_name(f".{processes.this_process().token(secrets.token_hex(4))}.tmp")
    try:
        yield made
        if made.is_dir():
            durable.publish_folder(disk, made, path)
        elif not durable.publish_file(disk, made, path):
            raise ConflictError(f"{path} exists already: nothing is replaced")
    finally:
        with contextlib.suppress(OSError, StorageError):
            _remove(disk, made)


def _remove(disk: durable.Disk, path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        durable.remove_tree(disk, path)
    else:
        disk.unlink(path)


def _remove_left_over(disk: durable.Disk, folder: Path) -> None:
    with contextlib.suppress(OSError):
        for path in folder.glob(".*.tmp"):
            maker = processes.Process.from_token(path.stem[1:])
            if maker is not None and maker.is_alive() is False:
                with contextlib.suppress(OSError, StorageError):
                    _remove(disk, path)


def open_export(path: Path) -> Source:
    """Returns what an exported file holds, whatever it is called; its leaves are verified as they are read.

    Raises:
        ExportNotFoundError: there is no such file.
        FormatError: it is no exported checkpoint.
        DamagedError, UnsupportedFormatError, StorageError: it cannot be trusted, understood or read.
    """
    path = path.expanduser().resolve()
    try:
        return _opened(path)
    except FileNotFoundError as error:  # by the names alone: whatever the file holds, it is not asked for another one
        raise ExportNotFoundError(f"there is no file {path}; give that of a checkpoint that was exported") from error


def _opened(path: Path) -> Source:
    with reader.opened_file(path.parent, path.name) as descriptor, durable.translated(path):
        size = os.fstat(descriptor).st_size
        head, end = bytearray(min(size, 16)), bytearray(min(size, hdf5_export.END_SIZE))
        reader.read_into(descriptor, memoryview(head), 0)
        reader.read_into(descriptor, memoryview(end), size - len(end))
    if hdf5_export.is_hdf5_export(bytes(end)):
        return hdf5_export.open_file(path)
    if torch_export.is_torch_file(bytes(head)):
        return torch_export.open_file(path)
    if safetensors_export.is_safetensors(bytes(head), size):
        return safetensors_export.open_file(path)
    raise FormatError(f"{path} is no checkpoint that Checkpoint.export wrote, or its end is missing")
