"""Rows of live columns by their numbers: copied for a save, or digested for a comparison."""

from __future__ import annotations

import sys
import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from simckpt.replay.adapter import Path, Ring
from simckpt.state import staging


class LiveRows:
    """The rows of some columns at one moment.

    A row keeps its number as long as it is in the ring, and no other row of the lineage gets it.

    Attributes:
        arrays: the live arrays `(capacity, ...)`.
        ring: where their rows lie.
        first: number of the oldest row.
        end: one more than the number of the newest.
    """

    def __init__(self, arrays: Mapping[Path, Any], ring: Ring, end: int) -> None:
        self.arrays = {path: plain(array) for path, array in arrays.items()}
        self.ring = ring
        self.first = end - ring.filled
        self.end = end

    def copy(self, path: Path, first: int, last: int) -> Any:
        """Returns a copy of rows of one column, `(last - first, ...)`, on the CPU, in the staging memory of a save."""
        array = self.arrays[path]
        parts = [array[part] for part in self.ring.slots(first - self.first, last - self.first)] or [array[:0]]
        if isinstance(array, np.ndarray):
            return _copy_arrays(parts)
        torch = sys.modules["torch"]
        if array.device.type == "cpu" and _has_numpy_dtype(array):
            return torch.from_numpy(_copy_arrays([part.numpy() for part in parts]))
        copy = staging.copy_tensor(parts[0] if len(parts) == 1 else torch.cat(parts))
        # a copy in pinned memory may still be on its way; one outside of the arena is on the device yet
        return copy.cpu()

    def digests(self, first: int, last: int) -> tuple[int, ...]:
        """Returns a digest of the same rows of each column, in their order.

        CRC-32 by zlib: it is to notice a program that rewrites rows, not damage or malice, and runs at 3.5 GB/s here.
        """
        parts = self.ring.slots(first - self.first, last - self.first)
        digests = []
        for array in self.arrays.values():
            digest = 0
            for part in parts:
                digest = zlib.crc32(_bytes_of(array[part]), digest)
            digests.append(digest)
        return tuple(digests)

    @property
    def row_bytes(self) -> int:
        """Returns the size of one row, all columns together [bytes]."""
        return sum(_nbytes(array) // max(1, array.shape[0]) for array in self.arrays.values())


def plain(array: Any) -> Any:
    """Returns the same memory as an object of the base class: memory-mapped arrays and tensors are subclasses."""
    if isinstance(array, np.ndarray):
        return array.view(np.ndarray)
    return array.detach().as_subclass(sys.modules["torch"].Tensor)


def _copy_arrays(parts: list[np.ndarray[Any, Any]]) -> np.ndarray[Any, Any]:
    rows = sum(len(part) for part in parts)
    copy = staging.empty_array((rows, *parts[0].shape[1:]), parts[0].dtype)
    start = 0
    for part in parts:
        copy[start : start + len(part)] = part
        start += len(part)
    return copy


def _has_numpy_dtype(tensor: Any) -> bool:
    try:
        tensor[:0].numpy()
    except TypeError:
        return False
    return True


def _bytes_of(rows: Any) -> memoryview:
    if not isinstance(rows, np.ndarray):
        torch = sys.modules["torch"]
        rows = rows.cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    flat: np.ndarray[Any, Any] = np.ascontiguousarray(rows).reshape(-1).view(np.uint8)
    return flat.data


def _nbytes(array: Any) -> int:
    return int(array.nbytes)
