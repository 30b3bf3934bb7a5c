"""Columns in memory-mapped files. They hold live rows, not checkpoints: never synced, and a restart begins anew."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from simckpt.errors import ConfigurationError, StorageError, StorageFullError

_PREFIX = "simckpt-replay."
_SUFFIX = ".npy"
_LONGEST_NAME = 100
_NO_ALLOCATION = {errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS}
_CHUNK = 1 << 20  # [bytes] of zeros that are written at once

Shapes = Mapping[tuple[str, ...], tuple[tuple[int, ...], np.dtype[Any]]]


def map_columns(folder: str | os.PathLike[str], shapes: Shapes) -> dict[tuple[str, ...], np.ndarray[Any, Any]]:
    """Returns writable arrays of zeros, each mapped from an `.npy` file of its own in `folder`.

    Files of an earlier buffer are removed, not overwritten: a buffer of this or another process that still has them
    mapped keeps its rows. Room is reserved at once, since a write to a mapped page that the disk has no room for kills
    the process.

    Raises:
        ConfigurationError: the folder holds files that no replay buffer has made; nothing was touched.
        StorageError: the disk refused.
    """
    root = Path(folder)
    try:
        root.mkdir(parents=True, exist_ok=True)
        present = sorted(root.iterdir())
        foreign = [path.name for path in present if not (path.name.startswith(_PREFIX) and path.suffix == _SUFFIX)]
        if foreign:
            raise ConfigurationError(
                f"memory_map={str(root)!r} holds {foreign[0]!r}, which is no replay buffer's: name a new folder, for "
                "a replay buffer discards what its folder holds",
                keys=["memory_map"],
            )
        for path in present:
            path.unlink()
        return _create_all(root, shapes)
    except OSError as error:
        raise _translate(error, root, shapes) from error


def _create_all(root: Path, shapes: Shapes) -> dict[tuple[str, ...], np.ndarray[Any, Any]]:
    """Returns the arrays of all columns; a failure at one of them leaves no file of the others."""
    with contextlib.ExitStack() as undo:
        columns = {
            column: _create(root / _file_name(number, column), shape, dtype, undo)
            for number, (column, (shape, dtype)) in enumerate(shapes.items())
        }
        undo.pop_all()
        return columns


def _file_name(number: int, column: tuple[str, ...]) -> str:
    readable = "".join(letter if letter.isalnum() and letter.isascii() else "_" for letter in ".".join(column))
    return f"{_PREFIX}{number:02d}.{readable[:_LONGEST_NAME]}{_SUFFIX}"


def _create(
    path: Path, shape: tuple[int, ...], dtype: np.dtype[Any], undo: contextlib.ExitStack
) -> np.ndarray[Any, Any]:
    # exclusive: two buffers that take the same folder at the same moment must not share a file
    with path.open("xb+") as file:
        undo.callback(path.unlink, missing_ok=True)
        header = {"shape": shape, "fortran_order": False, "descr": np.lib.format.dtype_to_descr(dtype)}
        np.lib.format.write_array_header_1_0(file, header)
        file.flush()
        start = file.tell()
        size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        _reserve(file, start + max(size, 1))
        if not size:
            return np.zeros(shape, dtype)
        mapped: np.ndarray[Any, Any] = np.memmap(file, dtype, "r+", start, shape)
        return mapped


def _reserve(file: BinaryIO, size: int) -> None:
    """Makes the file `size` bytes long, with room for all of them; it is open behind its first bytes."""
    try:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(file.fileno(), 0, size)
            return
    except OSError as error:
        if error.errno not in _NO_ALLOCATION:
            raise
    # this system or file system cannot reserve: only what is written has room for certain
    missing = size - file.tell()
    zeros = bytes(min(missing, _CHUNK))
    while missing:
        missing -= file.write(zeros[:missing])
    file.flush()


def _translate(error: OSError, root: Path, shapes: Shapes) -> StorageError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        needed = sum(int(np.prod(shape, dtype=np.int64)) * dtype.itemsize for shape, dtype in shapes.values())
        full = StorageFullError(f"no room for a replay buffer of {needed} bytes in {root}", needed=needed)
        full.errno = error.errno
        return full
    refused = StorageError(f"{root}: {error.strerror or error}: the replay buffer cannot be memory-mapped there")
    refused.errno = error.errno
    return refused
