"""The rows of replay buffers on another number of ranks; pure functions."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from simckpt.distributed.resharding import (
    Change,
    Deal,
    Merging,
    Move,
    Resharded,
    fixed_streams,
    leave,
    refuse_fixed_streams,
)
from simckpt.errors import StateMismatchError
from simckpt.replay.adapter import Ring, flatten_columns, nest_columns
from simckpt.state.reseeding import reseed
from simckpt.state.tree import copy_tree, encode
from simckpt.state.walk import qualified_name

_RESERVED = ("ring", "extra")
# buffers whose rows mean the same wherever they lie: each has its own next observation, and none is part of an episode
_ROWS_ALONE = frozenset(
    {
        "simckpt.replay.ring.ReplayBuffer",
        "stable_baselines3.common.buffers.ReplayBuffer",
        "stable_baselines3.common.buffers.DictReplayBuffer",
    }
)


def reshard_replay(component: str, handle: Any, saved: Mapping[int, Any], change: Change) -> Resharded:
    """Returns the replay buffer of this rank.

    Raises:
        StateMismatchError: the buffers' envs are not those that are dealt out, or the order of their rows matters.
    """
    wanted = _live_envs(handle)
    for deal in change.deals.values():
        moves = deal.moves(change.rank)
        if deal.fits and wanted in (None, deal.after[change.rank]) and _have_envs(saved, moves, deal):
            return _by_envs(component, saved, moves, deal, change)
    problem = _why_no_rows(handle, saved, wanted, change)
    if problem:
        problem = f"{component}: {problem}: make as many envs together as before, or {leave(component)}"
        raise StateMismatchError(problem, problems=[problem])
    return _by_rows(component, handle, saved, change)


def _columns(tree: Mapping[str, Any]) -> dict[tuple[str, ...], Any]:
    return flatten_columns({name: value for name, value in tree.items() if name not in _RESERVED})


def _envs_of(columns: Mapping[tuple[str, ...], Any]) -> int | None:
    """Returns the length of the axis behind the rows, if all columns agree on it."""
    lengths = {array.shape[1] if len(array.shape) > 1 else -1 for array in columns.values()}
    (found,) = lengths if len(lengths) == 1 else (-1,)
    return found if found > 0 else None


def _live_envs(handle: Any) -> int | None:
    live = flatten_columns(handle.adapter.columns(handle.buffer))
    return _envs_of({path: column.array for path, column in live.items()})


def _have_envs(saved: Mapping[int, Any], moves: Sequence[Move], deal: Deal) -> bool:
    return bool(moves) and all(_envs_of(_columns(saved[m.source])) == deal.before[m.source] for m in moves)


def _by_envs(component: str, saved: Mapping[int, Any], moves: Sequence[Move], deal: Deal, change: Change) -> Resharded:
    """Puts the transitions of this rank's envs side by side: row by row as they were added, in their slots."""
    trees = [saved[move.source] for move in moves]
    rings = [Ring(**tree["ring"]) for tree in trees]
    kept = min(ring.filled for ring in rings)
    columns = [_columns(tree) for tree in trees]
    if any(each.keys() != columns[0].keys() for each in columns):
        problem = f"{component}: the buffers of the ranks have different columns"
        raise StateMismatchError(problem, problems=[problem])
    rows = {
        path: _concatenate(
            # the newest rows, where one rank has added more than another
            [c[path][len(c[path]) - kept :, move.start : move.stop] for c, move in zip(columns, moves, strict=True)],
            axis=1,
        )
        for path in columns[0]
    }
    ring, lines = rings[0], []
    if any(other != ring for other in rings):
        capacity = min(each.capacity for each in rings)
        ring = Ring(capacity, kept, kept % capacity, None if ring.added is None else max(e.added or 0 for e in rings))
        dropped = sum(each.filled - kept for each in rings)
        what = (
            f"its ranks had added different numbers of rows: the newest {kept} are kept, {dropped} older ones dropped"
        )
        lines.append(change.told(component, what))
    extra = _merged_extra(component, [tree["extra"] for tree in trees], moves, deal, change)
    lines.insert(0, change.told(component, f"{kept} rows, of the envs of this rank, generators derived anew"))
    return Resharded({**nest_columns(rows), "ring": asdict(ring), "extra": extra}, tuple(lines))


def _merged_extra(
    component: str, extras: Sequence[Any], moves: Sequence[Move], deal: Deal, change: Change
) -> dict[str, Any]:
    merged = Merging(list(extras), None, deal, change.rank, moves=moves)
    if merged.left:
        problem = f"{component}/extra: it differs between ranks, and belongs to no envs: {merged.left[0]}"
        raise StateMismatchError(problem, problems=[problem])
    refuse_fixed_streams(component, merged.fixed, change)
    reseed(merged.tree, change.seed(component))
    found: dict[str, Any] = merged.tree
    return found


def _why_no_rows(handle: Any, saved: Mapping[int, Any], wanted: int | None, change: Change) -> str:
    """Returns why rows cannot be dealt out one by one; "" if they can."""
    cls = qualified_name(type(handle.buffer))
    if cls not in _ROWS_ALONE or getattr(handle.buffer, "optimize_memory_usage", False):
        return f"rows of a {cls} belong together, so that they cannot be dealt out to other ranks one by one"
    envs = {_envs_of(_columns(saved[rank])) for rank in range(change.before)}
    if len(envs | {wanted}) != 1:
        shown = sorted(str(each) for each in envs)
        return f"its rows are of {' or '.join(shown)} envs, those of the live buffer of {wanted}"
    return ""


def _by_rows(component: str, handle: Any, saved: Mapping[int, Any], change: Change) -> Resharded:
    """Deals rows out in turn, oldest first; the newest rows of all ranks count as equally old."""
    rings = [Ring(**saved[rank]["ring"]) for rank in range(change.before)]
    ordered = sorted(
        (position - ring.filled, rank, position) for rank, ring in enumerate(rings) for position in range(ring.filled)
    )
    mine = ordered[change.rank :: change.after]
    capacity = int(handle.adapter.ring(handle.buffer).capacity)
    dropped = max(len(mine) - capacity, 0)
    mine = mine[dropped:]
    columns = [_columns(saved[rank]) for rank in range(change.before)]
    places = [[position for _, rank, position in mine if rank == source] for source in range(change.before)]
    order = np.argsort(np.array([rank for _, rank, _ in mine], int), kind="stable")
    back = np.empty_like(order)
    back[order] = np.arange(len(order))
    rows = {
        path: _take(_concatenate([_take(c[path], p) for c, p in zip(columns, places, strict=True)], axis=0), back)
        for path in columns[0]
    }
    count = len(mine)
    added = None if rings[0].added is None else count
    ring = Ring(capacity, count, count % capacity, added)
    extra = copy_tree(saved[0]["extra"])
    if "full" in extra:
        extra["full"] = count == capacity
    refuse_fixed_streams(component, fixed_streams(encode(extra)), change)
    reseed(extra, change.seed(component))
    total = sum(ring.filled for ring in rings)
    lines = [change.told(component, f"{count} of {total} rows dealt out to this rank, generators derived anew")]
    if dropped:
        lines.append(change.told(component, f"{dropped} rows dropped, the oldest: the buffer takes {capacity}"))
    return Resharded({**nest_columns(rows), "ring": asdict(ring), "extra": extra}, tuple(lines))


def _take(array: Any, places: Any) -> Any:
    return array[np.asarray(places, int)] if isinstance(array, np.ndarray) else array[list(map(int, places))]


def _concatenate(arrays: Sequence[Any], *, axis: int) -> Any:
    if isinstance(arrays[0], np.ndarray):
        return np.concatenate(arrays, axis=axis)
    return sys.modules["torch"].cat(list(arrays), dim=axis)
