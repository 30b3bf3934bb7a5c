"""Decides where the leaves of a save go: into the state file, into a new segment, or where they lie already.

Pure functions of values. A checkpoint refers to a limited number of segments; a save that would exceed it merges
neighbours. With one small segment for each save, this rewrites each row about once (`tests/storage/test_merging.py`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from simckpt.errors import FormatError
from simckpt.state.leaf import LogLeaf, Piece
from simckpt.storage.state_file import Item

_UNCHANGED_SHARE = 4  # unchanged leaves get at most a quarter of the segments, for they are never merged


@dataclass(frozen=True)
class Placement:
    """Where the leaves of a save go that do not go into its state file.

    Attributes:
        logs: {path: where its older rows lie} of all columns of logs.
        kept: {path: where it lies} of unchanged leaves.
        new: paths of unchanged leaves that go into a new segment.
        merged: ids of the segments whose rows go into a new one.
    """

    logs: Mapping[str, tuple[Piece, ...]]
    kept: Mapping[str, tuple[Piece, ...]]
    new: frozenset[str]
    merged: frozenset[str]

    @property
    def segments(self) -> tuple[str, ...]:
        """The ids of the segments that exist and are needed for this save."""
        return _segments([*self.logs.values(), *self.kept.values()])


def place(
    items: Sequence[Item],
    *,
    unchanged: Collection[str],
    earlier: Mapping[str, tuple[Piece, ...]],
    limit: int,
) -> Placement:
    """Returns where the leaves of a save go.

    Args:
        items: the leaves.
        unchanged: paths of large leaves that are as in the previous checkpoint.
        earlier: {path: pieces} of those of them that lie in a segment.
        limit: how many segments a checkpoint may refer to.

    Raises:
        FormatError: a column of a log whose pieces and new rows are not all of its rows.
    """
    logs = {item.path: _older(item) for item in items if is_log(item)}
    kept = {path: pieces for path, pieces in earlier.items() if path in unchanged}
    held = len(_segments(kept.values()))
    room = held < max(1, limit // _UNCHANGED_SHARE)
    new = frozenset(unchanged) - kept.keys() if room else frozenset()
    more = bool(new) + any(is_log(item) and len(item.data) for item in items)
    order = _segments(sorted(logs.values(), key=len, reverse=True))
    excess = len(order) + held + more - limit
    merged: frozenset[str] = frozenset()
    if excess > 0 and len(order) > 1:
        start, stop = choose(_sizes(items, order), min(excess, len(order) - 1))
        merged = frozenset(order[start:stop])
    return Placement(logs, kept, new, merged)


def is_log(item: Item) -> bool:
    """Returns whether a leaf is a column of a log that has bytes; others have none to keep in segments."""
    return isinstance(item.leaf, LogLeaf) and item.leaf.shape[0] > 0 and item.row_size > 0


def _older(item: Item) -> tuple[Piece, ...]:
    assert isinstance(item.leaf, LogLeaf)
    pieces = item.leaf.pieces
    older = sum(piece.stop - piece.start for piece in pieces)
    if older + item.leaf.data.shape[0] != item.leaf.shape[0] or not all(
        0 <= piece.start < piece.stop <= piece.rows for piece in pieces
    ):
        raise FormatError(
            f"the log {item.path!r} has {item.leaf.shape[0]} rows, of which {older} are said to lie in segments and "
            f"{item.leaf.data.shape[0]} are new"
        )
    return pieces


def _segments(columns: Iterable[tuple[Piece, ...]]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(piece.segment for pieces in columns for piece in pieces))


def _sizes(items: Iterable[Item], order: Sequence[str]) -> list[int]:
    """Returns how many bytes of rows would be copied out of each segment."""
    sizes = dict.fromkeys(order, 0)
    for item in items:
        if is_log(item) and isinstance(item.leaf, LogLeaf):
            for piece in item.leaf.pieces:
                sizes[piece.segment] += (piece.stop - piece.start) * item.row_size
    return list(sizes.values())


def choose(sizes: Sequence[int], excess: int) -> tuple[int, int]:
    """Returns (start, stop) of the neighbours to merge: the fewest bytes for each file that goes.

    A batch of many small ones costs one copy of each of their rows; merging two at a time would copy each row again and
    again, about four times in all.

    Args:
        sizes: of the segments, in the order of their rows [bytes].
        excess: how many files must go, at least 1 and fewer than there are.
    """
    before = [0]
    for size in sizes:
        before.append(before[-1] + size)
    candidates = (
        ((before[stop] - before[start]) / (stop - start - 1), start - stop, start, stop)
        for start in range(len(sizes))
        for stop in range(start + excess + 1, len(sizes) + 1)
    )
    _, _, start, stop = min(candidates)
    return start, stop
