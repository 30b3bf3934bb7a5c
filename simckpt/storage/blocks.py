"""Writes a file of typed datasets: its layout in memory, then metadata and payload, each byte once, digests on the way.

State files and segments are written here; what differs is where the bytes of a dataset come from.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from simckpt.errors import FormatError
from simckpt.storage import digests, durable, layout

Bytes = np.ndarray[Any, np.dtype[np.uint8]]
_COPIED = 1 << 20  # [bytes]


@dataclass(frozen=True)
class Block:
    """A dataset and where its bytes come from.

    Attributes:
        slot: path, dtype, shape and texts.
        chunks: gives the bytes in order; a chunk is done with before the next one is asked for.
    """

    slot: layout.Slot
    chunks: Callable[[], Iterable[durable.Bytes]]


def write_blocks(
    disk: durable.Disk,
    path: Path,
    blocks: Sequence[Block],
    *,
    groups: Mapping[str, layout.Attributes],
    virtuals: Sequence[layout.Virtual] = (),
    tail: Callable[[layout.Layout, Mapping[str, str]], bytes] | None = None,
) -> tuple[layout.Layout, dict[str, str]]:
    """Writes a new file and syncs it; returns its layout and {path: digest} of the datasets.

    Args:
        disk: the system calls.
        path: must not exist.
        blocks: the datasets.
        groups: {path: texts} of groups that have some.
        virtuals: datasets that lie in other files.
        tail: given the layout and the digests, returns bytes that follow behind what is HDF5's.

    Raises:
        FormatError: datasets that HDF5 cannot hold under these paths, shapes and dtypes.
        StorageFullError, StorageError: the disk refused; the caller removes the file.
    """
    plan = layout.lay_out([block.slot for block in blocks], groups=groups, virtuals=virtuals)
    found: dict[str, str] = {}
    durable.write_file(disk, path, _parts(plan, blocks, found, tail), size=plan.size)
    return plan, found


def _parts(
    plan: layout.Layout,
    blocks: Sequence[Block],
    found: dict[str, str],
    tail: Callable[[layout.Layout, Mapping[str, str]], bytes] | None,
) -> Iterator[tuple[int, durable.Bytes]]:
    yield from plan.rest
    for block in blocks:
        # digest and write alternate, so that the second finds the bytes in the processor's cache
        hasher, offset = digests.Hasher(), plan.offsets[block.slot.path]
        for chunk in block.chunks():
            hasher.update(chunk)
            assert offset is not None
            yield offset, chunk
            offset += memoryview(chunk).nbytes
        found[block.slot.path] = hasher.digest()
    if tail is not None:
        yield plan.size, tail(plan, found)


def chunks_of(data: Bytes) -> Iterator[memoryview]:
    """Yields the bytes of an array in the portions in which they are written."""
    for start in range(0, len(data), durable.CHUNK):
        yield data.data[start : start + durable.CHUNK]


def copies_of(data: Bytes) -> Iterator[memoryview]:
    """Yields the bytes of an array that may change meanwhile: copies, each in the memory of the one before.

    They are short enough to stay in the processor's cache until they are digested and written.
    """
    buffer = np.empty(min(len(data), _COPIED), np.uint8)
    for start in range(0, len(data), _COPIED):
        part = data[start : start + _COPIED]
        copy = buffer[: len(part)]
        np.copyto(copy, part)
        yield copy.data


def flat(array: np.ndarray[Any, Any]) -> Bytes:
    """Returns the bytes of an array, without a copy if it is contiguous.

    Raises:
        FormatError: an array of Python objects, which no file of a store holds.
    """
    if array.dtype.hasobject:
        raise FormatError(f"an array of {array.dtype} holds Python objects, which no file of a store does")
    if array.size == 0:
        return np.empty(0, np.uint8)
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)
