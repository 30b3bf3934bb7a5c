"""The state tree of a replay buffer, and how it fits a buffer of the same or another capacity. Pure functions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from simckpt.replay.adapter import Column, Path, Ring, RowTree, flatten_columns, nest_columns

_FIELDS = {"capacity", "filled", "cursor", "added"}


def saved_state(columns: RowTree, ring: Ring, extra: Any) -> dict[str, Any]:
    """Returns the state tree: the columns by their names, `ring` and `extra` beside them."""
    return {**columns, "ring": asdict(ring), "extra": extra}


def fitted_ring(saved: Ring, capacity: int) -> Ring:
    """Returns where the saved rows belong in a buffer of this capacity.

    In the same capacity every row keeps its slot, for sampling depends on it. In another, the newest rows that there is
    room for begin at slot 0, as if they had been added to an empty buffer.
    """
    if saved.capacity == capacity:
        return saved
    filled = min(saved.filled, capacity)
    return Ring(capacity, filled, filled % capacity, saved.added)


def newest_rows(columns: RowTree, rows: int) -> dict[str, Any]:
    """Returns the last `rows` rows of each column."""
    return nest_columns({path: array[len(array) - rows :] for path, array in flatten_columns(columns).items()})


def state_problems(state: Any, live: Mapping[Path, Column]) -> list[str]:
    """Returns why a state does not fit a buffer with these columns, one line each.

    Args:
        state: from a file: anything.
        live: empty if the buffer has no arrays yet.
    """
    if not isinstance(state, dict) or not {"ring", "extra"} <= set(state):
        return ["it is not the state of a replay buffer"]
    ring = state["ring"]
    if not isinstance(ring, dict) or set(ring) != _FIELDS:
        return ["its ring has other parts"]
    capacity, filled, cursor, added = (ring[name] for name in ("capacity", "filled", "cursor", "added"))
    if not all(type(number) is int for number in (capacity, filled, cursor)):
        return ["its ring is not described by numbers"]
    if not (0 <= filled <= capacity and 0 <= cursor < capacity):
        return [f"its ring cannot be: {filled} of {capacity} rows, the next in slot {cursor}"]
    if added is not None and not (type(added) is int and added >= filled):
        return [f"its ring cannot be: {filled} rows of {added} that were added"]
    saved = flatten_columns({name: value for name, value in state.items() if name not in ("ring", "extra")})
    if filled and not saved:
        return [f"it has {filled} rows and no columns"]
    problems = []
    # a buffer that makes its arrays with its first row has no columns before
    if live and saved:
        problems += [f"{'/'.join(path)}: not in the checkpoint" for path in live if path not in saved]
        problems += [f"{_name(path)}: only in the checkpoint" for path in saved if path not in live]
    for path, rows in saved.items():
        problems += _column_problems(_name(path), rows, filled, live.get(path))
    return problems


def _column_problems(name: str, rows: Any, filled: int, column: Column | None) -> list[str]:
    shape, dtype = getattr(rows, "shape", None), getattr(rows, "dtype", None)
    if shape is None or dtype is None:
        return [f"{name}: saved as {type(rows).__name__}, not as an array"]
    if not shape or shape[0] != filled:
        return [f"{name}: saved with shape {tuple(shape)}, but there are {filled} rows"]
    if column is None:
        return []
    here = column.array
    problems = []
    if str(dtype) != str(here.dtype):
        problems.append(f"{name}: saved as {dtype}, live is {here.dtype}")
    if tuple(shape[1:]) != tuple(here.shape[1:]):
        problems.append(f"{name}: a row was saved as {tuple(shape[1:])}, live is {tuple(here.shape[1:])}")
    return problems


def _name(path: Path) -> str:
    return "/".join(str(part) for part in path)
