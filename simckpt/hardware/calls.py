"""The calls of `step` and `reset` that a session holds, in the order in which they were made."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from simckpt.hardware.session import Session
from simckpt.hardware.session_tables import needed
from simckpt.hardware.tape import Tape, entries_of
from simckpt.hardware.windows import windows
from simckpt.state.tables import mapped
from simckpt.storage.session_records import SnapshotRecord

# the columns that a replay needs
_OF_BOTH = ("order", "row", "finished")
_OF_RESET = ("observation", "seed", "seeded", "options")
_OF_STEP = ("action", "observation", "reward", "terminated", "truncated", "started")


class Call(NamedTuple):
    """A call of `step` or `reset` that was recorded.

    Attributes:
        order: its place among all that was recorded.
        row: its number; of a reset, the row that came next.
        finished: when it ended [ns].
        reset: whether it is one of `reset`.
        table: the columns that it stands in.
        place: where in them.
    """

    order: int
    row: int
    finished: int
    reset: bool
    table: Mapping[str, Any]
    place: int


def calls(session: Session, snapshot: SnapshotRecord, stop: int, tapes: Mapping[str, Tape]) -> Iterator[Call]:
    """Yields the calls after a snapshot in order; what links did in them has been loaded on the tapes by then.

    Args:
        session: what was recorded.
        snapshot: what to begin behind.
        stop: one behind the last row; resets before that row come along.
        tapes: of the links, by name.
    """
    for tables in windows(session, start=snapshot.row, stop=stop + 1):
        for name, tape in tapes.items():
            entries = entries_of(tables.get("commands", {}).get(name), tables.get("readings", {}).get(name))
            tape.load([entry for entry in entries if entry.order > snapshot.order])
        found = [
            Call(order, row, finished, table == "resets", tables[table], place)
            for table, last, columns in (("resets", stop, _OF_RESET), ("rows", stop - 1, _OF_STEP))
            for place, (order, row, finished) in enumerate(_lines(tables.get(table), columns))
            if order > snapshot.order and row <= last
        ]
        yield from sorted(found, key=lambda call: call.order)


def entry_of(column: Any, place: int) -> Any:
    """Returns what a column holds at a place; the arrays are its own."""
    return mapped(lambda array: array[place].copy(), column)


def _lines(table: Any, others: Sequence[str]) -> Iterator[tuple[Any, ...]]:
    columns = needed(table, *_OF_BOTH, *others)
    return zip(*(column.tolist() for column in columns[: len(_OF_BOTH)]), strict=True)
