"""What was recorded of a link, played back in place of the device."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from simckpt.errors import StateMismatchError
from simckpt.hardware.differences import distance, same_bits
from simckpt.hardware.reading import Reading
from simckpt.hardware.session import NOTHING, READING, TIME
from simckpt.hardware.session_tables import needed

if TYPE_CHECKING:
    from simckpt.hardware.link import Link

Array = np.ndarray[Any, Any]

SENT = -1  # a command, among the kinds of entries of a table of readings
_NEVER = -1
_MOMENT = 1_000_000  # between two looks at the clock that nobody recorded [ns]
_PATIENCE = 10_000  # questions in one row that nothing was recorded for
_LOOKS = (READING, NOTHING)

# told of a difference: of which leaf, and how far apart at most, None where that is no number
Note = Callable[[str, float | None], None]


class Entry(NamedTuple):
    """One thing that a link has done.

    Attributes:
        order: its place among all that was recorded.
        row: the call of `step` that it was part of, or that came next.
        kind: `SENT`, or one of the kinds of `session`.
        sequence: of a command or a reading.
        device_time: of a reading [ns].
        monotonic: when it happened here [ns].
        wall: when it happened [ns since 1970].
        late: of a reading: one with a higher number came before it.
        values: `(n,)` float64, read-only.
    """

    order: int
    row: int
    kind: int
    sequence: int
    device_time: int
    monotonic: int
    wall: int
    late: bool
    values: Array


def entries_of(commands: Mapping[str, Any] | None, readings: Mapping[str, Any] | None) -> list[Entry]:
    """Returns the entries of the two tables of a link, in order."""
    found = []
    if commands is not None:
        *columns, sent = needed(commands, "order", "row", "sequence", "monotonic", "wall", "values")
        lines = zip(*(column.tolist() for column in columns), _rows_of(sent), strict=True)
        for order, row, sequence, monotonic, wall, values in lines:
            found.append(Entry(order, row, SENT, sequence, 0, monotonic, wall, False, values))
    if readings is not None:
        looks = ("order", "row", "kind", "sequence", "device_time", "received", "wall", "late", "values")
        *columns, came = needed(readings, *looks)
        found += map(Entry._make, zip(*(column.tolist() for column in columns), _rows_of(came), strict=True))
    return sorted(found, key=lambda entry: entry.order)


def _rows_of(values: Array) -> list[Array]:
    kept = values.astype(np.float64)
    kept.flags.writeable = False
    return list(kept)


class Tape:
    """Answers a link as the device did, and notes where the env asks for something else than it did then.

    It is the link's `source`. Of a link with a model in place of a device it is the `observer`: the model is part of
    the env, is played again itself, and has to answer as it did.

    Outside of what was recorded, as in an env's first reset, every other look finds the last reading once more, and the
    clock goes on: an env that waits for a reading, for none, or for a time does not wait for ever.

    Args:
        name: of the link.
        width: how many values a reading has.
        note: is told of each difference.
    """

    def __init__(self, name: str, width: int, note: Note) -> None:
        self._name = name
        self._command, self._reading = f"command/{name}", f"reading/{name}"
        self._note = note
        self._last = Reading(np.zeros(width), 0, 0, 0, 0)
        self._last.values.flags.writeable = False
        self._unanswered = 0
        self._entries: list[Entry] = []
        self._place = 0
        self._row, self._until = -1, _NEVER
        self._sequence = self._time = 0

    def load(self, entries: list[Entry]) -> None:
        """Adds entries behind those that have not been played yet."""
        self._entries = self._entries[self._place :] + entries
        self._place = 0

    def clear(self) -> None:
        """Forgets all entries."""
        self._entries, self._place = [], 0

    def begin(self, row: int, until: int) -> None:
        """Lets the entries of a row be played that happened until a time [ns]."""
        self._row, self._until, self._unanswered = row, until, 0

    def end(self) -> None:
        """Passes over what the env has not asked for, and notes it."""
        while (entry := self._peek()) is not None:
            self._place += 1
            self._note(self._command if entry.kind == SENT else self._reading, None)
        self._until = _NEVER

    def skip(self, order: int) -> None:
        """Passes over the entries up to a place among all that was recorded, without a word."""
        while self.before(order + 1) is not None:
            self._place += 1

    def before(self, order: int) -> Entry | None:
        """Returns the next entry if it lies before a place among all that was recorded."""
        entry = self._entries[self._place] if self._place < len(self._entries) else None
        return entry if entry is not None and entry.order < order else None

    def _peek(self) -> Entry | None:
        entry = self._entries[self._place] if self._place < len(self._entries) else None
        return entry if entry is not None and entry.row == self._row and entry.monotonic <= self._until else None

    def _next(self, *kinds: int) -> Entry | None:
        """Returns the next entry and passes over it, if it is of one of these kinds; else notes that it is not."""
        entry = self._peek()
        if entry is not None and entry.kind in kinds:
            self._place += 1
            return entry
        self._unanswered += 1
        if self._until != _NEVER:
            self._note(self._command if SENT in kinds else self._reading, None)
            if self._unanswered > _PATIENCE:
                raise StateMismatchError(
                    f"row {self._row}: the env goes on asking link {self._name!r} for more than was recorded of this "
                    "row; it is not the env of the session, or waits for something else than the link"
                )
        return None

    # what a link asks of its source

    def send(self, values: Array) -> int:
        """Compares a command with the one that was sent, and returns its sequence number."""
        entry = self._next(SENT)
        if entry is None:
            self._sequence += 1
            return self._sequence - 1
        self._compare(self._command, entry.values, values)
        self._sequence = entry.sequence + 1
        return entry.sequence

    def receive(self, timeout: float) -> Reading | None:
        """Returns the reading that came, or None where none did."""
        entry = self._next(*_LOOKS)
        if entry is None:
            return self._last if self._until == _NEVER and self._unanswered % 2 else None
        if entry.kind == NOTHING:
            return None
        self._last = Reading(
            entry.values, entry.sequence, entry.device_time, entry.monotonic, entry.wall, late=entry.late
        )
        return self._last

    def time(self) -> int:
        """Returns what the time was."""
        entry = self._next(TIME)
        self._time = entry.monotonic if entry is not None else self._time + _MOMENT
        return self._time

    # what a link tells its observer

    def sent(self, link: Link, sequence: int, values: Array, monotonic: int, wall: int) -> None:
        """Compares a command with the one that was sent."""
        entry = self._next(SENT)
        if entry is not None:
            self._compare(self._command, entry.values, values)

    def received(self, link: Link, reading: Reading | None, monotonic: int, wall: int) -> None:
        """Compares what a model gave with what it gave then."""
        entry = self._next(*_LOOKS)
        if entry is None:
            return
        if (reading is None) != (entry.kind == NOTHING):
            self._note(self._reading, None)
        elif reading is not None:
            self._compare(self._reading, entry.values, reading.values)
            if (reading.sequence, reading.device_time) != (entry.sequence, entry.device_time):
                self._note(f"{self._reading}/sequence", None)

    def timed(self, link: Link, monotonic: int, wall: int) -> None:
        """Passes over a look at the clock."""
        self._next(TIME)

    def _compare(self, leaf: str, recorded: Array, now: Array) -> None:
        if not same_bits(recorded, now):
            self._note(leaf, distance(recorded, now))
