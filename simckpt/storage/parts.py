"""Puts leaves together from where they lie: one place, segments, or the files of several ranks, each with a part.

A part whose place in the whole is one run of bytes is read into it; others are read beside it, file by file, copied.
Of a box of a leaf those parts alone are read, and verified, that have elements in common with it.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from simckpt.errors import ConfigurationError, DamagedError
from simckpt.state.leaf import Leaf, PartLeaf, Slab
from simckpt.storage import pieces, reader, shards
from simckpt.storage.index import LeafRecord
from simckpt.storage.indexes import Index

Array = np.ndarray[Any, Any]
_Place = tuple[shards.Box, shards.Box]  # of what is wanted: in the part, in the array


@dataclass
class _Target:
    """An array that is being put together: a whole leaf, or a box of one."""

    leaf: LeafRecord
    slab: Slab | None
    array: Array | None = None

    def places(self) -> Iterator[tuple[LeafRecord, _Place | None]]:
        """Yields the lines that are needed, each with what of it goes where; None for a leaf that is one line."""
        if not self.leaf.parts:
            yield self.leaf, None
            return
        offset = self.slab.offset if self.slab else (0,) * len(self.leaf.shape)
        shape = self.slab.shape if self.slab else self.leaf.shape
        for part in self.leaf.parts:
            place = shards.meets(part, offset, shape)
            if place is not None:
                yield self.leaf.line(part), place

    @property
    def form(self) -> LeafRecord:
        """What of the leaf is to be put together, as a leaf of its own."""
        if self.slab is None or not self.leaf.parts:
            return self.leaf
        shape = (*self.slab.shape, *self.leaf.stored_shape[len(self.leaf.shape) :])
        return replace(self.leaf, stored_shape=shape, size=math.prod(shape) * self.leaf.stored_dtype().itemsize)

    def result(self) -> Leaf:
        """Returns the leaf that was wanted."""
        leaf, slab, array = self.leaf, self.slab, self.array
        assert array is not None
        if slab is None:
            return Leaf(array, leaf.dtype, leaf.shape, leaf.kind)
        if not leaf.parts:
            box = tuple(slice(start, start + size) for start, size in zip(slab.offset, slab.shape, strict=True))
            array = np.array(array[box], order="C", ndmin=array.ndim)
        return PartLeaf(array, leaf.dtype, leaf.shape, leaf.kind, tuple(slab.offset))


def read_leaves(
    root: Path,
    folder: int,
    leaves: Sequence[LeafRecord],
    *,
    slabs: Mapping[str, Slab],
    sizes: Mapping[str, int],
    path: Path,
) -> dict[str, Leaf]:
    """Returns {path: leaf}, every byte that was read verified; of those with a box no more than that.

    Args:
        root: the store's folder.
        folder: descriptor of the checkpoint's folder.
        leaves: of its index.
        slabs: {path: box} of leaves that are not wanted whole.
        sizes: {file: bytes} of the files with arrays.
        path: the checkpoint's folder, for messages.

    Raises:
        ConfigurationError: a box that does not lie within its leaf.
        DamagedError: naming all damaged leaves: bytes differ, are missing or unreadable.
        SegmentMissingError: with the ids of the segments that are gone.
        FormatError: leaves that overlap or lie outside of their file.
        StorageError: not enough memory, or the permissions refuse.
    """
    targets = [
        _Target(leaf, _checked(leaf, slabs.get(leaf.path))) for leaf in {leaf.path: leaf for leaf in leaves}.values()
    ]
    wanted: list[tuple[LeafRecord, _Target, _Place | None]] = [
        (line, target, place) for target in targets for line, place in target.places()
    ]
    lines = [line for line, _, _ in wanted]
    here, shared = [line for line in lines if not line.pieces], [line for line in lines if line.pieces]
    files = dict(sorted(reader.by_file(here).items()))
    for name, found in files.items():
        reader.check_bounds(found, sizes.get(name), path / name)
    pieces.check_overlaps(shared, path)
    beside = max((sum(line.size for line in found if line.part) for found in files.values()), default=0)
    reader.check_memory(sum(target.form.size for target in targets) + beside)
    for target in targets:
        if target.leaf.parts:
            target.array = reader.new_array(target.form)
    places = {id(line): (target, place) for line, target, place in wanted}
    in_place: set[int] = set()  # lines that are read where they belong

    def memory(line: LeafRecord) -> Array:
        target, place = places[id(line)]
        if place is not None and target.array is not None:
            view = target.array[place[1]]
            if view.shape == line.stored_shape and view.flags.c_contiguous:
                in_place.add(id(line))
                return view
        return reader.new_array(line)

    def take(line: LeafRecord, array: Array) -> None:
        target, place = places[id(line)]
        if place is None or target.array is None:
            target.array = array
        elif id(line) not in in_place:
            target.array[place[1]] = array[place[0]]

    pieces.read_lines(root, shared, path=path, memory=memory, take=take)
    reader.read_lines(folder, files, sizes=sizes, path=path, memory=memory, take=take)
    return {target.leaf.path: target.result() for target in targets}


def _checked(leaf: LeafRecord, slab: Slab | None) -> Slab | None:
    if slab is None:
        return None
    fits = len(slab.offset) == len(slab.shape) == len(leaf.shape) and all(
        start >= 0 and size >= 0 and start + size <= whole
        for start, size, whole in zip(slab.offset, slab.shape, leaf.shape, strict=True)
    )
    if not fits:
        raise ConfigurationError(
            f"the leaf {leaf.path!r} of shape {list(leaf.shape)} has no box of shape {list(slab.shape)} at "
            f"{list(slab.offset)}",
            keys=[leaf.path],
        )
    return slab


def verify(folder: int, index: Index, *, path: Path) -> None:
    """Compares every byte of a checkpoint's own files with its digest; needs the memory of the largest line.

    Args:
        folder: descriptor of the checkpoint's folder.
        index: of the checkpoint.
        path: the checkpoint's folder, for messages.

    Raises:
        DamagedError: naming every damaged leaf; none if the damage is outside of leaves.
        FormatError: leaves that overlap or lie outside of their file.
        StorageError: the permissions refuse.
    """
    files, sizes = index.lines_by_file(), index.sizes
    for name, lines in files.items():
        reader.check_bounds(lines, sizes.get(name), path / name)
    problems: list[DamagedError] = []
    for name, lines in files.items():
        damaged: list[LeafRecord] = []
        for line in lines:
            # one by one: the memory needed is that of the largest
            try:
                reader.read_lines(folder, {name: [line]}, sizes=sizes, path=path, take=_forget)
            except DamagedError as error:
                if len(error.leaves) == 1 and not _is_there(folder, name):
                    problems.append(DamagedError(error.args[0], path=error.path, leaves=[each.path for each in lines]))
                    break
                damaged.append(line)
        else:
            if damaged:
                where, titles = path / name if index.shards else path, [line.title for line in damaged]
                problems.append(reader.damage(where, titles, leaves=[line.path for line in damaged]))
    if problems:
        raise reader.joined(problems)
    for file in index.files:
        if file.covers == "metadata":
            reader.check_rest(folder, file, files[file.name], path=path)


def _is_there(folder: int, name: str) -> bool:
    try:
        os.stat(name, dir_fd=folder, follow_symlinks=False)
    except OSError:
        return False
    return True


def _forget(_line: LeafRecord, _array: Array) -> None:
    pass
