"""What one array is in a file: bytes of a type that HDF5 knows, and the true type beside them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True, eq=False, slots=True)
class Leaf:
    """One array, ready to be written.

    Attributes:
        data: contiguous, of a dtype that HDF5 has natively. It may share memory with the live array.
        dtype: the true type: "float64", ">f4", "<U5", "datetime64[ns]", or torch's "bfloat16", "float8_e4m3fn".
        shape: the true shape. `data` has one more axis for strings (characters), complex numbers (real, imaginary)
            and raw records (bytes).
        kind: who reads it back: "numpy", "torch", or the name of a registered kind.
    """

    data: np.ndarray[Any, Any]
    dtype: str
    shape: tuple[int, ...]
    kind: str


@dataclass(frozen=True, slots=True)
class Piece:
    """Rows of an array that lie in a segment.

    Attributes:
        segment: id of the segment.
        offset: of the first of its rows in the segment's file [bytes].
        rows: how many rows lie there; the digest covers them all.
        digest: of these bytes.
        start: the first of these rows that is meant.
        stop: one behind the last.
    """

    segment: str
    offset: int
    rows: int
    digest: str
    start: int
    stop: int


@dataclass(frozen=True, eq=False, slots=True)
class LogLeaf(Leaf):
    """A column of a log, of which `data` holds the newest rows alone; those before them lie in segments.

    Attributes:
        data: `(new rows, ...)`.
        shape: the true shape, all rows counted.
        pieces: where the rows before `data` lie, oldest first.
    """

    pieces: tuple[Piece, ...] = ()


@dataclass(frozen=True, eq=False, slots=True)
class PartLeaf(Leaf):
    """A part of an array that several ranks hold together; the parts of all of them tile the whole.

    Attributes:
        data: the part's bytes; its shape is `part_shape`, with one axis more where `Leaf` says so.
        shape: the true shape of the whole array.
        offset: where the part starts in the whole, a place for each axis.
    """

    offset: tuple[int, ...] = ()

    @property
    def part_shape(self) -> tuple[int, ...]:
        """The part's own true shape; it may be empty along an axis."""
        return tuple(self.data.shape[: len(self.shape)])


@dataclass(frozen=True, slots=True)
class Slab:
    """A box of an array: what a rank wants of a whole that others hold in parts.

    Attributes:
        offset: where it starts in the whole, a place for each axis.
        shape: how far it goes along each axis; it may be empty.
    """

    offset: tuple[int, ...]
    shape: tuple[int, ...]
