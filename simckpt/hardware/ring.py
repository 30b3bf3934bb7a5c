"""The last seconds of a recording, in memory: the parts, and a snapshot from which all of them can be played again."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from simckpt.state.tree import Encoded

Span = tuple[int, int]


@dataclass(eq=False)
class Part:
    """What was recorded in about a second.

    Attributes:
        tables: nested dicts of arrays, all but the events.
        rows: (first, stop) of the calls of `step` in it.
        spans: {table: (first, stop)} of the entries of each, but for events.
        started: of its first moment [ns].
        stopped: of its last.
        events: (order, row, monotonic, wall, kind, text) each.
        options: {entry of `resets`: the options, as JSON}.
    """

    tables: dict[str, Any]
    rows: Span
    spans: dict[str, Span]
    started: int
    stopped: int
    events: list[tuple[int, int, int, int, str, str]] = field(default_factory=list)
    options: dict[int, str] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """Its size in memory, but for texts [bytes]."""
        return _nbytes(self.tables)


@dataclass(eq=False)
class Snapshot:
    """A state of the env, on its way.

    Attributes:
        state: {"env": state without its models, "observation": the last one}.
        row, order, monotonic, wall, reason: see `SnapshotRecord`.
        models: digests of the models that it refers to.
    """

    state: Encoded
    row: int
    order: int
    monotonic: int
    wall: int
    reason: str
    models: tuple[str, ...]

    @property
    def nbytes(self) -> int:
        """Its size [bytes]."""
        return sum(leaf.data.nbytes for leaf in self.state.leaves.values())


class Ring:
    """Keeps the last seconds of what it is given.

    Args:
        seconds: how much to keep at least; up to the time between two snapshots more is kept.
    """

    def __init__(self, seconds: float) -> None:
        self._nanoseconds = round(seconds * 1e9)
        self._items: list[Part | Snapshot] = []

    def __iter__(self) -> Iterator[Part | Snapshot]:
        return iter(list(self._items))

    def add(self, item: Part | Snapshot) -> None:
        """Takes what comes next, and lets go of what is older than it must be."""
        self._items.append(item)
        newest = item.stopped if isinstance(item, Part) else item.monotonic
        horizon = newest - self._nanoseconds
        # a part can be played again from a snapshot before it; where there is none it can be read all the same
        begins = [each.monotonic for each in self._items if isinstance(each, Snapshot) and each.monotonic <= horizon]
        limit = max(begins, default=horizon)
        self._items = [
            each
            for each in self._items
            if _end(each) > limit or (isinstance(each, Snapshot) and each.monotonic == limit and begins)
        ]

    def hold(self, item: Part | Snapshot, most: int) -> list[Part | Snapshot]:
        """Takes what comes next while all of it is to be kept; returns what had to go for want of memory.

        Args:
            item: comes next.
            most: how much there may be [bytes].
        """
        self._items.append(item)
        size = sum(each.nbytes for each in self._items)
        gone = []
        while size > most and len(self._items) > 1:
            gone.append(self._items.pop(0))
            size -= gone[-1].nbytes
        return gone


def _end(item: Part | Snapshot) -> int:
    return item.stopped if isinstance(item, Part) else item.monotonic


def _nbytes(tree: Any) -> int:
    if isinstance(tree, Mapping):
        return sum(_nbytes(each) for each in tree.values())
    if isinstance(tree, tuple):
        return sum(_nbytes(each) for each in tree)
    return int(tree.nbytes)
