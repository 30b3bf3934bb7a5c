"""What a session has to be played from: its rows, its snapshots, and where the record is not whole."""

from __future__ import annotations

from typing import TYPE_CHECKING

from simckpt.arguments import checked_whole
from simckpt.errors import ConfigurationError
from simckpt.hardware.session import BREAKS, THREAD, Event

if TYPE_CHECKING:
    from simckpt.hardware.session import Session
    from simckpt.storage.session_records import SnapshotRecord

_SHOWN = 20  # of a list in a message


class Course:
    """The course of a session, as far as it is on the disk by now.

    Attributes:
        name: of the session.
        rows: the numbers of its rows.
        missing: those that were lost.
        snapshots: in the order in which they were taken.
        breaks: events behind which the record goes on from another state.
        threads: events that another thread than the one that steps has begun to use a link.

    Args:
        session: what was recorded.
    """

    def __init__(self, session: Session) -> None:
        self.name = session.name
        self.rows, self.missing, self.snapshots = session.rows, session.missing, session.snapshots
        events = session.events
        self.breaks = [event for event in events if event.kind in BREAKS]
        self.threads = [event for event in events if event.kind == THREAD]

    def wanted(self, start: int | None, stop: int | None) -> range:
        """Returns which rows of the session are meant; raises ConfigurationError if it has none of them."""
        rows = self.rows
        first = rows.start if start is None else checked_whole("start", start, least=None)
        last = rows.stop if stop is None else checked_whole("stop", stop, least=None)
        wanted = range(max(first, rows.start), min(last, rows.stop))
        if not len(rows):
            raise ConfigurationError(f"session {self.name!r} has no rows to play", keys=["session"])
        if not len(wanted):
            raise ConfigurationError(
                f"session {self.name!r} has the rows {_span(rows)}, none from {first} on and below {last}",
                keys=["start", "stop"],
            )
        return wanted

    def leading_to(self, row: int) -> SnapshotRecord | None:
        """Returns the last snapshot from which everything up to a row was recorded, or None."""
        if not (self.rows.start <= row <= self.rows.stop):
            return None
        before = [each for each in self.snapshots if self.rows.start <= each.row <= row]
        found = max(before, key=lambda each: each.order, default=None)
        if found is None:
            return None
        lost = any(each.start < row and each.stop > found.row for each in self.missing)
        # where the record is not whole, the state is known from a snapshot alone
        lost = lost or any(event.order > found.order and event.row <= row for event in self.breaks)
        return None if lost else found

    def first_in(self, rows: range) -> SnapshotRecord | None:
        """Returns the first snapshot that lies before one of these rows, or None."""
        return next((each for each in self.snapshots if rows.start <= each.row < rows.stop), None)

    def snapshot_for(self, row: int) -> SnapshotRecord:
        """Returns what `leading_to` does; raises ConfigurationError, with what there is, if that is None."""
        snapshot = self.leading_to(row)
        if snapshot is None:
            lost = ", ".join(_span(each) for each in self.missing[:_SHOWN]) or "none"
            there = ", ".join(str(each.row) for each in self.snapshots[:_SHOWN]) or "none"
            raise ConfigurationError(
                f"no snapshot of session {self.name!r} leads to row {row}: recorded are rows {_span(self.rows)}, lost "
                f"of them {lost}; snapshots lie before rows {there}",
                keys=["row"],
            )
        return snapshot

    def stretches(self, rows: range) -> list[range]:
        """Returns what is left of some rows without those that were lost."""
        found, start = [], rows.start
        for gap in self.missing:
            found.append(range(start, min(gap.start, rows.stop)))
            start = max(start, gap.stop)
        return [each for each in (*found, range(start, rows.stop)) if len(each)]

    def missing_in(self, rows: range) -> list[range]:
        """Returns those of some rows that were lost."""
        cut = [range(max(each.start, rows.start), min(each.stop, rows.stop)) for each in self.missing]
        return [each for each in cut if len(each)]

    def breaks_between(self, order: int, row: int) -> tuple[str, ...]:
        """Returns a text for each break behind a place among all that was recorded, and before a row."""
        return tuple(_told(event) for event in self.breaks if event.order > order and event.row < row)

    def threads_before(self, row: int) -> tuple[str, ...]:
        """Returns a text for each event before a row that another thread has begun to use a link."""
        return tuple(_told(event) for event in self.threads if event.row < row)


def _told(event: Event) -> str:
    return f"row {event.row:,}: {event.kind}: {event.text}"


def _span(rows: range) -> str:
    return f"{rows.start} to {rows.stop - 1}" if len(rows) else "none"
