"""What a recording loses: an event for each range of rows, and two warnings, when it begins and, of all, at the end."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

AGAIN = 60.0  # [s] without a loss, after which the next one is warned of as well
_SHOWN = 5  # ranges in a warning


@dataclass
class Loss:
    """Neighbouring rows that were lost for one reason.

    Attributes:
        rows: (first, stop).
        why: for people.
        monotonic: when it was noticed first [ns].
        wall: the same [ns since 1970].
    """

    rows: tuple[int, int]
    why: str
    monotonic: int
    wall: int

    @property
    def text(self) -> str:
        """For people."""
        first, stop = self.rows
        what = f"rows {first} to {stop - 1} were" if first < stop else f"what was recorded before row {first} was"
        return f"{what} lost: {self.why}"


class Losses:
    """Gathers what is lost in one recording.

    Attributes:
        fresh: rows that were lost and of which the session does not tell yet, neighbours as one.

    Args:
        warn: is told.
        clock: the time [s], for tests.
    """

    def __init__(self, warn: Callable[[str], None], *, clock: Callable[[], float] = time.monotonic) -> None:
        self._warn = warn
        self._clock = clock
        self.fresh: list[Loss] = []
        self._told: dict[str, list[tuple[int, int]]] = {}
        self._snapshots: dict[str, int] = {}
        self._last: dict[tuple[str, str], float] = {}

    def add(self, rows: tuple[int, int], why: str) -> None:
        """Takes note of rows (first, stop) that are lost; of none if what was recorded between two rows is."""
        self._begin(f"rows from {rows[0]} on are being lost: {why}", ("rows", why))
        newest = self.fresh[-1] if self.fresh else None
        if newest is not None and newest.why == why and newest.rows[0] <= rows[0] <= newest.rows[1]:
            newest.rows = newest.rows[0], max(newest.rows[1], rows[1])
        else:
            self.fresh.append(Loss(rows, why, time.monotonic_ns(), time.time_ns()))
        ranges = self._told.setdefault(why, [])
        if ranges and rows[0] <= ranges[-1][1]:
            ranges[-1] = ranges[-1][0], max(ranges[-1][1], rows[1])
        else:
            ranges.append(rows)

    def add_snapshot(self, row: int, why: str) -> None:
        """Takes note of the snapshot before a row, which is lost."""
        self._begin(f"the snapshot before row {row} was lost: {why}", ("snapshot", why))
        self._snapshots[why] = self._snapshots.get(why, 0) + 1

    def summary(self) -> list[str]:
        """Returns what was lost since the last call of this, one text for each reason."""
        texts = []
        for why, ranges in self._told.items():
            count = sum(stop - first for first, stop in ranges)
            if not count:
                continue
            shown = ", ".join(f"{first} to {stop - 1}" for first, stop in ranges[:_SHOWN])
            more = f" and others, {count} in all," if len(ranges) > _SHOWN else ""
            texts.append(f"rows {shown}{more} were lost: {why}")
        # one was told of as it happened
        texts += [f"{count} snapshots were lost: {why}" for why, count in self._snapshots.items() if count > 1]
        self._told.clear()
        self._snapshots.clear()
        self._last.clear()
        return texts

    def _begin(self, text: str, what: tuple[str, str]) -> None:
        """Warns, unless it did so a short time ago."""
        now = self._clock()
        if what not in self._last or now - self._last[what] >= AGAIN:
            self._warn(text)
        self._last[what] = now
