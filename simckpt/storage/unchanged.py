"""Large leaves that do not change from save to save: found out without reading those that always change twice."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from simckpt.state.leaf import LogLeaf, PartLeaf
from simckpt.storage import blocks, digests
from simckpt.storage.index import LeafRecord
from simckpt.storage.names import STRUCTURE_KIND
from simckpt.storage.state_file import Item

LARGE = 1 << 20  # [bytes]; smaller leaves are not worth a file of their own
_PROBES, _PROBE = 16, 1024  # [bytes] each: 20 us, where the whole digest takes 0.2 s per GB


@dataclass(frozen=True)
class Large:
    """A large leaf as it was in the run's previous checkpoint.

    Attributes:
        record: its line in that index.
        probe: digest of a few short spans of its bytes; None if it was saved by another process.
    """

    record: LeafRecord
    probe: str | None


def probes(items: Iterable[Item]) -> dict[str, str]:
    """Returns {path: digest of a few short spans} of the large leaves among some, those of logs left out."""
    return {
        item.path: _probe(item.data)
        for item in items
        if len(item.data) >= LARGE and item.leaf.data.ndim and not isinstance(item.leaf, LogLeaf)
        if item.leaf.kind != STRUCTURE_KIND and item.stream is None
    }


def _probe(data: blocks.Bytes) -> str:
    hasher, step = digests.Hasher(), (len(data) - _PROBE) // (_PROBES - 1)
    for number in range(_PROBES):
        hasher.update(data[number * step : number * step + _PROBE])
    return hasher.digest()


def unchanged(items: Iterable[Item], found: Mapping[str, str], previous: Mapping[str, Large]) -> set[str]:
    """Returns the paths of the leaves whose bytes, dtype and shape are those of the previous checkpoint.

    Args:
        items: the leaves.
        found: {path: probe} of those that are looked at.
        previous: {path: large leaf} of the run's previous checkpoint.
    """
    return {
        item.path
        for item in items
        if item.path in found and item.path in previous and _equals(item, found[item.path], previous[item.path])
    }


def _equals(item: Item, probe: str, before: Large) -> bool:
    leaf, record = item.leaf, before.record
    start = tuple(leaf.offset) if isinstance(leaf, PartLeaf) else None
    form = (leaf.kind, leaf.dtype, tuple(leaf.shape), leaf.data.dtype.str, leaf.data.shape, start)
    if form != (record.kind, record.dtype, record.shape, record.stored_dtype().str, record.stored_shape, record.part):
        return False
    # a probe that differs spares the digest of a leaf that changes all the time
    if before.probe not in (None, probe) or not record.digest:
        return False
    return digests.matches(item.data, record.digest)


def large_leaves(leaves: Iterable[LeafRecord]) -> dict[str, Large]:
    """Returns {path: large leaf} of a checkpoint that another process saved."""
    return {
        leaf.path: Large(leaf, None)
        for leaf in leaves
        if leaf.size >= LARGE and leaf.digest and leaf.kind != STRUCTURE_KIND
    }
