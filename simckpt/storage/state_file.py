"""Writes the state of a checkpoint: `state.h5` and the index of its leaves.

A component is a group; its leaves are datasets under it, and its structure, everything that is not an array, is the
dataset `_tree` in it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from simckpt.errors import FormatError, InvalidNameError
from simckpt.state.leaf import Leaf
from simckpt.state.tree import Encoded
from simckpt.storage import digests, durable, index, layout, names, records, sealed

STATE_FILE = "state.h5"
STRUCTURE_KIND = "structure"

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
    ("kind", STRUCTURE_KIND),
    ("description", "UTF-8 JSON padded with spaces: all of the component but its arrays"),
)


@dataclass(frozen=True)
class Item:
    """A leaf on its way into the file."""

    path: str
    leaf: Leaf
    data: np.ndarray[Any, np.dtype[np.uint8]]  # the same bytes, flat


def write_state(
    disk: durable.Disk,
    folder: Path,
    components: Mapping[str, Encoded],
    *,
    attributes: Mapping[str, Mapping[str, str]] | None = None,
) -> tuple[records.FileRecord, list[index.LeafRecord]]:
    """Writes `folder/state.h5`, durably, and returns what the commit record and the index say about it.

    Args:
        disk: the system calls.
        folder: of the checkpoint, under its temporary name; it is not synced here.
        components: {name: encoded state}; nobody may change its arrays meanwhile.
        attributes: {path of a group or leaf: {name: text}}, to explain it to people who open the file.

    Raises:
        InvalidNameError: a component without a name.
        FormatError: leaves that HDF5 cannot hold under these paths, shapes and dtypes.
        StorageFullError, StorageError: the disk refused; the caller removes the folder.
    """
    attributes = attributes or {}
    if "" in components:
        raise InvalidNameError("a component needs a name: '' cannot be a group of a file")
    items = [item for name, encoded in components.items() for item in _items(names.encode_part(name), encoded)]
    _check_paths(items)
    parents = _parents(items)
    groups = {path: _explain(attributes, path, ()) for path in attributes if path in parents}
    groups |= {
        names.encode_part(name): _explain(attributes, names.encode_part(name), (("kind", "component"), ("name", name)))
        for name in components
    }
    groups[""] = _explain(attributes, "", _ROOT)
    slots = [_slot(item, attributes) for item in items]
    plan = layout.lay_out(slots, groups=groups)

    found: dict[str, str] = {}
    durable.write_file(disk, folder / STATE_FILE, _parts(plan, items, found), size=plan.size)
    leaves = [_record(item, plan.offsets[item.path], found[item.path]) for item in items]
    return records.FileRecord(STATE_FILE, plan.size, plan.rest_digest, "metadata"), leaves


def _parts(plan: layout.Layout, items: list[Item], found: dict[str, str]) -> Iterator[tuple[int, memoryview | bytes]]:
    yield from plan.rest
    for item in items:
        # digest and write alternate, so that the second finds the bytes in the processor's cache
        hasher, offset = digests.Hasher(), plan.offsets[item.path]
        for start in range(0, len(item.data), durable.CHUNK):
            chunk = item.data.data[start : start + durable.CHUNK]
            hasher.update(chunk)
            assert offset is not None
            yield offset + start, chunk
        found[item.path] = hasher.digest()


def _items(component: str, encoded: Encoded) -> Iterator[Item]:
    for key, leaf in encoded.leaves.items():
        if key == names.STRUCTURE or key.startswith(names.STRUCTURE + "/"):
            raise FormatError(f"the leaf {component}/{key} has the name of a component's structure")
        yield Item(f"{component}/{key}", leaf, _flat(leaf.data))
    data = np.frombuffer(pad(encoded.structure), np.uint8)
    yield Item(f"{component}/{names.STRUCTURE}", Leaf(data, "uint8", data.shape, STRUCTURE_KIND), data)


def _flat(array: np.ndarray[Any, Any]) -> np.ndarray[Any, np.dtype[np.uint8]]:
    if array.dtype.hasobject:
        raise FormatError(f"an array of {array.dtype} holds Python objects, which no file of a store does")
    if array.size == 0:
        return np.empty(0, np.uint8)
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def pad(structure: bytes) -> bytes:
    """Returns a component's structure with spaces up to the next of a few sizes, at most an eighth or 256 bytes more.

    A scalar that gains a digit then rarely changes the size, and the file keeps its layout.
    """
    step = max(256, 1 << max(0, len(structure).bit_length() - 4))
    return structure.ljust(math.ceil(max(1, len(structure)) / step) * step)


def _check_paths(items: list[Item]) -> None:
    paths = {item.path for item in items}
    for path in paths:
        parts = path.split("/")
        if not all(part not in ("", ".", "..") and "\0" not in part for part in parts):
            raise FormatError(f"{path!r} is no path of a leaf: each part must be percent-encoded and non-empty")
        for depth in range(1, len(parts)):
            if "/".join(parts[:depth]) in paths:
                raise FormatError(f"{path!r} cannot lie below {'/'.join(parts[:depth])!r}, which is a leaf itself")


def _parents(items: list[Item]) -> set[str]:
    found: set[str] = set()
    for item in items:
        parent = item.path.rpartition("/")[0]
        while parent and parent not in found:
            found.add(parent)
            parent = parent.rpartition("/")[0]
    return found


def _explain(given: Mapping[str, Mapping[str, str]], path: str, own: layout.Attributes) -> layout.Attributes:
    return tuple({**dict(own), **given.get(path, {})}.items())


def _slot(item: Item, attributes: Mapping[str, Mapping[str, str]]) -> layout.Slot:
    leaf = item.leaf
    if leaf.kind == STRUCTURE_KIND:
        own: layout.Attributes = _STRUCTURE
    else:
        own = (("kind", leaf.kind),)
        if not _is_name_of(leaf.dtype, leaf.data.dtype):
            own += (("dtype", leaf.dtype),)
    return layout.Slot(item.path, leaf.data.dtype, leaf.data.shape, _explain(attributes, item.path, own))


def _is_name_of(name: str, dtype: np.dtype[Any]) -> bool:
    return name in (dtype.name, dtype.str)


def _record(item: Item, offset: int | None, digest: str) -> index.LeafRecord:
    leaf = item.leaf
    return index.LeafRecord(
        path=item.path,
        kind=leaf.kind,
        dtype=leaf.dtype,
        shape=tuple(leaf.shape),
        stored=index.dtype_to_json(leaf.data.dtype),
        stored_shape=tuple(leaf.data.shape),
        file=STATE_FILE,
        offset=offset,
        size=len(item.data),
        digest=digest,
    )
