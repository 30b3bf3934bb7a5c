"""The audit: whether rows that were saved before are still what they were, looked at part by part.

A save writes the rows that are new by the ring's own account. Two things would make that wrong: a program that rewrites
older rows, and a ring without a counter that went round exactly once between two saves. So digests of saved rows are
kept, and each save looks at the newest of them and at some of the others in turn: all of a small buffer, about 2 MB of
a large one.
"""

from __future__ import annotations

from dataclasses import dataclass

from simckpt.replay.adapter import Path
from simckpt.replay.rows import LiveRows

BUDGET = 2 << 20  # [bytes] of saved rows that one save looks at, and of new rows that it digests; 0.6 ms each
_UNIT = 256 << 10  # [bytes] that have a digest of their own, at most
_FEWEST_UNITS = 64  # in a full ring: the unit that is partly overwritten cannot be looked at


@dataclass(slots=True)
class _Unit:
    """Some rows.

    Attributes:
        first: number of the first.
        last: one more than that of the last.
        digests: of each column's rows; None where they were too many to be digested at once.
    """

    first: int
    last: int
    digests: tuple[int, ...] | None


class Audit:
    """Digests of the rows that were captured last."""

    def __init__(self) -> None:
        self._units: list[_Unit] = []
        # number of the row at which the next look at older rows begins
        self._turn = 0

    @property
    def has_rows(self) -> bool:
        """Returns whether there are rows that it looks at."""
        return bool(self._units)

    def clear(self) -> None:
        """Forgets everything."""
        self._units = []

    def find_changed(self, rows: LiveRows, covered: int) -> list[Path]:
        """Returns the columns of which rows below number `covered` were seen to have changed."""
        self._units = [unit for unit in self._units if unit.first >= rows.first and unit.last <= covered]
        changed: set[int] = set()
        for unit in self._due(BUDGET // max(1, rows.row_bytes)):
            digests = rows.digests(unit.first, unit.last)
            if unit.digests is not None:
                changed |= {number for number, digest in enumerate(digests) if digest != unit.digests[number]}
            unit.digests = digests
        self._join(rows)
        return [path for number, path in enumerate(rows.arrays) if number in changed]

    def note(self, rows: LiveRows, first: int) -> None:
        """Remembers the rows from number `first` on, as they are now."""
        self._units = [unit for unit in self._units if unit.last <= first]
        step = _unit_rows(rows)
        left = BUDGET // max(1, rows.row_bytes)
        added = []
        # the newest are those that tell whether the ring went round
        for last in range(rows.end, first, -step):
            start = max(first, last - step)
            left -= last - start
            digests = rows.digests(start, last) if left >= 0 or last == rows.end else None
            added.append(_Unit(start, last, digests))
        self._units += reversed(added)

    def _due(self, budget: int) -> list[_Unit]:
        """Returns the two newest units, then others from where the last look ended: `budget` [rows] or more."""
        due, older = self._units[-2:], self._units[:-2]
        start = next((place for place, unit in enumerate(older) if unit.first >= self._turn), 0)
        left = budget - sum(unit.last - unit.first for unit in due)
        for unit in older[start:] + older[:start]:
            if left <= 0:
                self._turn = unit.first
                break
            due.append(unit)
            left -= unit.last - unit.first
        return due

    def _join(self, rows: LiveRows) -> None:
        """Makes the two newest units one if they are small: many small saves must not make many units.

        Both were looked at just now.
        """
        if len(self._units) < 2:
            return
        left, right = self._units[-2:]
        if left.last == right.first and right.last - left.first <= _unit_rows(rows):
            self._units[-2:] = [_Unit(left.first, right.last, rows.digests(left.first, right.last))]


def _unit_rows(rows: LiveRows) -> int:
    return max(1, min(_UNIT // max(1, rows.row_bytes), rows.ring.capacity // _FEWEST_UNITS))
