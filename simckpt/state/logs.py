"""Logs: components whose rows are only added, so that a save writes the new ones alone."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from simckpt.state import registry
from simckpt.state.components import Handle
from simckpt.state.leaf import Leaf, LogLeaf, Piece


@dataclass(frozen=True, eq=False, slots=True)
class LogColumn:
    """A column of a log in a captured state; from a file it comes back as one array with all rows.

    Attributes:
        new: `(new rows, ...)`, an array or tensor on the CPU.
        rows: of the whole column.
        pieces: where the rows before `new` lie, oldest first.
    """

    new: Any
    rows: int
    pieces: tuple[Piece, ...]


@runtime_checkable
class LogHandle(Handle, Protocol):
    """The handle of a log. It knows which rows lie in which segments, and captures the others.

    `capture` gives a tree with `LogColumn`s in it; `validate` and `apply` get whole arrays in their places. Keys of the
    mappings below are paths of leaves within the component.
    """

    def segments(self) -> Collection[str]:
        """Returns the ids of the segments that the next capture would refer to."""
        ...

    def forget(self, segments: Collection[str]) -> None:
        """Makes the next capture hold the rows of these segments, which are lost, as new ones."""
        ...

    def committed(self, pieces: Mapping[str, tuple[Piece, ...]]) -> None:
        """Takes note of where all rows of the last capture lie, now that it is a checkpoint."""
        ...

    def restored(self, pieces: Mapping[str, tuple[Piece, ...]]) -> None:
        """Takes note of where all rows of the state lie that was applied last."""
        ...


def _to_leaf(column: LogColumn) -> Leaf:
    kind = registry.leaf_kinds["numpy" if type(column.new).__module__.startswith("numpy") else "torch"]
    new = kind.to_leaf(column.new)
    return LogLeaf(new.data, new.dtype, (column.rows, *new.shape[1:]), new.kind, column.pieces)


def _refuse(*_: Any) -> Any:
    raise TypeError("a column of a log is captured once and not copied")


registry.add_leaf(
    registry.LeafKind("log", lambda obj: isinstance(obj, LogColumn), _to_leaf, _refuse, _refuse), LogColumn
)
