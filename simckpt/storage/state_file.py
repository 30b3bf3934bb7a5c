"""Writes the state of a checkpoint: `state.h5` and the index of its leaves.

A component is a group; its leaves are datasets under it, and its structure, everything that is not an array, is the
dataset `_tree` in it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from simckpt.errors import FormatError, InvalidNameError
from simckpt.state.leaf import Leaf, LogLeaf, PartLeaf, Piece
from simckpt.state.tree import Encoded
from simckpt.storage import blocks, durable, index, layout, names, records, sealed
from simckpt.storage import segments as segment_files

STATE_FILE = "state.h5"

_ROOT = (
    ("format", "simckpt state"),
    ("version", f"{sealed.VERSION[0]}.{sealed.VERSION[1]}"),
    (
        "description",
        "One checkpoint of a training run, written by simckpt. Each group is a component of the run and each dataset "
        "one of its arrays, whole and typed. The dataset '_tree' of a group holds what is not an array, as JSON: "
        "containers, scalars, strings. Step, metrics and parent are in commit.json beside this file, offsets and "
        "digests in leaves.json.",
    ),
)
_STRUCTURE = (
    ("kind", names.STRUCTURE_KIND),
    ("description", "UTF-8 JSON padded with spaces: all of the component but its arrays"),
)


_VIRTUAL = (
    "The rows lie in files of the store's folder segments. If one of them is missing, or more are needed than a "
    "process may have open, HDF5 shows the fill value (NaN, or the largest value of the type) and reports no error."
)


@dataclass(frozen=True)
class Item:
    """A leaf on its way into a file.

    Attributes:
        path: component and path in it.
        leaf: may be a `LogLeaf`.
        data: its bytes, flat; of a log the new rows alone.
        stream: gives the bytes in portions where they are not in memory; `leaf` and `data` have their shapes alone.
        lent: whether they lie in memory of the program, of which another thread may change them: what is digested is
            what is written all the same.
    """

    path: str
    leaf: Leaf
    data: blocks.Bytes
    stream: Callable[[], Iterable[durable.Bytes]] | None = None
    lent: bool = False

    def chunks(self) -> Iterable[durable.Bytes]:
        """Returns its bytes in the portions in which they are written."""
        if self.stream is not None:
            return self.stream()
        return blocks.copies_of(self.data) if self.lent else blocks.chunks_of(self.data)

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """The shape in the file, all rows of a log counted."""
        shape = self.leaf.data.shape
        return (self.leaf.shape[0], *shape[1:]) if isinstance(self.leaf, LogLeaf) else shape

    @property
    def row_size(self) -> int:
        """The size of a row [bytes]."""
        data = self.leaf.data
        return int(math.prod(data.shape[1:]) * data.dtype.itemsize)


def collect(components: Mapping[str, Encoded], *, shared: bool = False, lent: bool = False) -> list[Item]:
    """Returns all leaves of a state, each component's structure as its last.

    Args:
        components: {name: encoded state}.
        shared: whether they are written by several ranks: leaves may be parts, and a component whose structure is empty
            leaves that to another rank.
        lent: whether their arrays are no copies; see `Item`.

    Raises:
        InvalidNameError: a component without a name.
        FormatError: leaves that no file can hold under these paths and dtypes.
    """
    if "" in components:
        raise InvalidNameError("a component needs a name: '' cannot be a group of a file")
    items = [
        item
        for name, encoded in components.items()
        for item in _items(names.encode_part(name), encoded, shared=shared, lent=lent)
    ]
    check_paths(items)
    return items


def write_state(
    disk: durable.Disk,
    folder: Path,
    components: Iterable[str],
    items: Sequence[Item],
    *,
    file: str = STATE_FILE,
    placed: Mapping[str, tuple[Piece, ...]],
    segments: Mapping[str, index.SegmentRecord],
    attributes: Mapping[str, Mapping[str, str]] | None = None,
) -> tuple[records.FileRecord, list[index.LeafRecord]]:
    """Writes `folder/state.h5`, durably, and returns what the commit record and the index say about it.

    One of several ranks gives another name.

    Args:
        disk: the system calls.
        folder: of the checkpoint, under its temporary name; it is not synced here.
        components: their names.
        items: of `collect`; nobody may change their arrays meanwhile.
        file: its name.
        placed: {path: where its rows lie} of leaves that lie in segments; viewers see virtual datasets in their places.
        segments: {id: segment} of these.
        attributes: {path of a group or leaf: {name: text}}, to explain it to people who open the file.

    Raises:
        FormatError: leaves that HDF5 cannot hold under these paths, shapes and dtypes.
        StorageFullError, StorageError: the disk refused; the caller removes the folder.
    """
    attributes = attributes or {}
    groups = groups_of(components, items, placed=placed, attributes=attributes)
    here = [block_of(item, attributes) for item in items if item.path not in placed]
    shared = {item.path: index.in_pieces(record_of(item), placed[item.path]) for item in items if item.path in placed}
    virtuals = [_virtual(item, shared[item.path], segments, attributes) for item in items if item.path in placed]
    plan, found = blocks.write_blocks(disk, folder / file, here, groups=groups, virtuals=virtuals)
    leaves = [
        shared[item.path]
        if item.path in shared
        else replace(record_of(item), file=file, offset=plan.offsets[item.path], digest=found[item.path])
        for item in items
    ]
    return records.FileRecord(file, plan.size, plan.rest_digest, "metadata"), leaves


def groups_of(
    components: Iterable[str],
    items: Sequence[Item],
    *,
    placed: Collection[str] = (),
    attributes: Mapping[str, Mapping[str, str]],
) -> dict[str, layout.Attributes]:
    """Returns {path: texts} of the groups of a file that have some, or hold virtual datasets; see `write_state`."""
    above = {item.path.rpartition("/")[0] for item in items if item.path in placed}
    groups = {path: _explain(attributes, path, ()) for path in _parents(items) if path in attributes or path in above}
    for name in components:
        path = names.encode_part(name)
        groups[path] = _explain(attributes, path, (("kind", "component"), ("name", name)))
    groups[""] = _explain(attributes, "", _ROOT)
    return groups


def _items(component: str, encoded: Encoded, *, shared: bool, lent: bool) -> Iterator[Item]:
    for key, leaf in encoded.leaves.items():
        if isinstance(leaf, PartLeaf):
            _check_part(f"{component}/{key}", leaf, shared)
        if key == names.STRUCTURE or key.startswith(names.STRUCTURE + "/"):
            raise FormatError(f"the leaf {component}/{key} has the name of a component's structure")
        yield Item(f"{component}/{key}", leaf, blocks.flat(leaf.data), lent=lent)
    if shared and not encoded.structure:
        return
    data = np.frombuffer(pad(encoded.structure), np.uint8)
    yield Item(f"{component}/{names.STRUCTURE}", Leaf(data, "uint8", data.shape, names.STRUCTURE_KIND), data)


def _check_part(path: str, leaf: PartLeaf, shared: bool) -> None:
    if not shared:
        raise FormatError(f"{path!r} is a part of an array, which only a checkpoint of several ranks can hold")
    axes, own = len(leaf.shape), leaf.part_shape
    fits = len(leaf.offset) == axes and leaf.data.ndim in (axes, axes + 1)
    if not fits or not all(
        start >= 0 and start + size <= whole for start, size, whole in zip(leaf.offset, own, leaf.shape, strict=True)
    ):
        raise FormatError(
            f"{path!r} is said to be the part of shape {list(own)} at {list(leaf.offset)} of an array of shape "
            f"{list(leaf.shape)}, and does not lie within it"
        )


def pad(structure: bytes) -> bytes:
    """Returns a component's structure with spaces up to the next of a few sizes, at most an eighth or 256 bytes more.

    A scalar that gains a digit then rarely changes the size, and the file keeps its layout.
    """
    step = max(256, 1 << max(0, len(structure).bit_length() - 4))
    return structure.ljust(math.ceil(max(1, len(structure)) / step) * step)


def check_paths(items: Sequence[Item]) -> None:
    """Raises FormatError for leaves that no file can hold together under their paths."""
    paths = {item.path for item in items}
    for path in paths:
        parts = path.split("/")
        if not all(part not in ("", ".", "..") and "\0" not in part for part in parts):
            raise FormatError(f"{path!r} is no path of a leaf: each part must be percent-encoded and non-empty")
        for depth in range(1, len(parts)):
            if "/".join(parts[:depth]) in paths:
                raise FormatError(f"{path!r} cannot lie below {'/'.join(parts[:depth])!r}, which is a leaf itself")


def _parents(items: Sequence[Item]) -> set[str]:
    found: set[str] = set()
    for item in items:
        parent = item.path.rpartition("/")[0]
        while parent and parent not in found:
            found.add(parent)
            parent = parent.rpartition("/")[0]
    return found


def _explain(given: Mapping[str, Mapping[str, str]], path: str, own: layout.Attributes) -> layout.Attributes:
    return tuple({**dict(own), **given.get(path, {})}.items())


def explanation(item: Item, attributes: Mapping[str, Mapping[str, str]]) -> layout.Attributes:
    """Returns the texts that explain a leaf's dataset."""
    leaf = item.leaf
    if leaf.kind == names.STRUCTURE_KIND:
        own: layout.Attributes = _STRUCTURE
    else:
        own = (("kind", leaf.kind),)
        if not _is_name_of(leaf.dtype, leaf.data.dtype):
            own += (("dtype", leaf.dtype),)
        if isinstance(leaf, PartLeaf) and (text := part_text(leaf.offset, leaf.shape)):
            own += (("part", text),)
    return _explain(attributes, item.path, own)


def part_text(start: Sequence[int] | None, shape: Sequence[int]) -> str | None:
    """Returns the attribute `part` of a dataset: as JSON, where it starts, and the shape of the whole."""
    return None if start is None else f"[{list(start)}, {list(shape)}]"


def block_of(item: Item, attributes: Mapping[str, Mapping[str, str]]) -> blocks.Block:
    """Returns the dataset of a leaf whose bytes go into the file."""
    slot = layout.Slot(item.path, item.leaf.data.dtype, item.stored_shape, explanation(item, attributes))
    return blocks.Block(slot, item.chunks)


def _virtual(
    item: Item,
    leaf: index.LeafRecord,
    segments: Mapping[str, index.SegmentRecord],
    attributes: Mapping[str, Mapping[str, str]],
) -> layout.Virtual:
    texts = (*explanation(item, attributes), ("virtual", _VIRTUAL))
    sources = segment_files.sources(leaf, segments)
    return layout.Virtual(item.path, item.leaf.data.dtype, item.stored_shape, sources, texts)


def _is_name_of(name: str, dtype: np.dtype[Any]) -> bool:
    return name in (dtype.name, dtype.str)


def record_of(item: Item) -> index.LeafRecord:
    """Returns the line of the index without the leaf's place."""
    leaf, stored_shape = item.leaf, item.stored_shape
    dtype = leaf.data.dtype
    return index.LeafRecord(
        path=item.path,
        kind=leaf.kind,
        dtype=leaf.dtype,
        shape=tuple(leaf.shape),
        stored=index.dtype_to_json(dtype),
        stored_shape=tuple(stored_shape),
        file="",
        offset=None,
        size=math.prod(stored_shape) * dtype.itemsize,
        digest="",
        part=leaf.offset if isinstance(leaf, PartLeaf) else None,
    )
