"""Buffers that another process can read in place, handed over as descriptors: nothing here has a name in a folder."""

from __future__ import annotations

import mmap
import os
import weakref
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import numpy as np

from simckpt.errors import ConfigurationError
from simckpt.state.staging import Bytes

_SLAB = 64 << 20  # [bytes] at least in one descriptor; its pages exist once they are touched


@dataclass(frozen=True)
class Placed:
    """An array that lies in a slab.

    Attributes:
        slab: number of the slab.
        offset: of its first byte in the slab [bytes].
        dtype: of the array.
        shape: of the array, which is in C order.
    """

    slab: int
    offset: int
    dtype: np.dtype[Any]
    shape: tuple[int, ...]


class Slabs:
    """Memory for an `Arena` whose buffers another process maps as well: few descriptors, many buffers in each.

    Raises:
        ConfigurationError: this system has no anonymous shared files (Linux has).
    """

    def __init__(self) -> None:
        if not hasattr(os, "memfd_create"):
            raise ConfigurationError("background='process' needs Linux; use background='thread' here")
        # a slab lives as long as a buffer in it
        self._slabs: weakref.WeakValueDictionary[int, mmap.mmap] = weakref.WeakValueDictionary()
        self._descriptors: dict[int, int] = {}
        self._starts: dict[int, int] = {}
        self._made = 0
        self._open: mmap.mmap | None = None
        self._filled = 0

    def allocate(self, size: int) -> Bytes:
        """Returns a new buffer of so many bytes, a multiple of the page size."""
        assert size % mmap.PAGESIZE == 0
        if self._open is None or self._filled + size > len(self._open):
            # twice as large each time, so that a state of any size needs few descriptors
            self._add(max(_SLAB, size, sum(len(slab) for slab in self._slabs.values())))
        assert self._open is not None
        buffer = np.frombuffer(self._open, np.uint8, size, self._filled)
        self._filled += size
        return buffer

    def _add(self, size: int) -> None:
        self._made += 1
        descriptor = os.memfd_create("simckpt staging")
        os.ftruncate(descriptor, size)
        self._open, self._filled = mmap.mmap(descriptor, size), 0
        self._slabs[self._made] = self._open
        self._descriptors[self._made] = descriptor
        self._starts[self._made] = _address(np.frombuffer(self._open, np.uint8, 1))
        # not a method, which would keep this object and with it the slab
        weakref.finalize(self._open, _close, self._made, self._descriptors, self._starts)

    def discard(self, buffer: Bytes) -> None:
        """Gives the pages of a buffer back to the system at once; its slab lives on while other buffers do."""
        placed = self.find(buffer)
        assert placed is not None
        self._slabs[placed.slab].madvise(mmap.MADV_REMOVE, placed.offset, buffer.nbytes)

    def find(self, array: np.ndarray[Any, Any]) -> Placed | None:
        """Returns where an array lies, or None if it lies elsewhere or is not in C order."""
        if not array.flags.c_contiguous or array.nbytes == 0:
            return None
        address = _address(array)
        for number, start in self._starts.items():
            if start <= address < start + len(self._slabs[number]):
                return Placed(number, address - start, array.dtype, array.shape)
        return None

    def descriptors(self) -> dict[int, int]:
        """Returns {number: descriptor} of the slabs that are in use."""
        return dict(self._descriptors)


class AttachedSlabs:
    """The slabs of another process, mapped read-only."""

    def __init__(self) -> None:
        self._slabs: dict[int, mmap.mmap] = {}

    def attach(self, number: int, descriptor: int) -> None:
        """Maps a slab; takes the descriptor over."""
        try:
            self._slabs[number] = mmap.mmap(descriptor, 0, prot=mmap.PROT_READ)
        finally:
            os.close(descriptor)

    def keep(self, numbers: Collection[int]) -> None:
        """Forgets all slabs but these."""
        self._slabs = {number: slab for number, slab in self._slabs.items() if number in numbers}

    def array(self, placed: Placed) -> np.ndarray[Any, Any]:
        """Returns the array at a place, without copying it."""
        return np.ndarray(placed.shape, placed.dtype, self._slabs[placed.slab], placed.offset)


def _close(number: int, descriptors: dict[int, int], starts: dict[int, int]) -> None:
    os.close(descriptors.pop(number))
    del starts[number]


def _address(array: np.ndarray[Any, Any]) -> int:
    address: int = array.__array_interface__["data"][0]
    return address
