"""Which rows of a session can be played, and from where: its rows, its snapshots, and where the record is not whole."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from simckpt.arguments import checked_whole
from simckpt.errors import ConfigurationError
from simckpt.hardware.gaps import gaps
from simckpt.hardware.session import BREAKS, THREAD, Event

if TYPE_CHECKING:
    from simckpt.hardware.session import Session
    from simckpt.storage.session_records import SnapshotRecord

_SHOWN = 20  # of a list in a message


class Break(NamedTuple):
    """Where the record goes on from another state than it had, which is known from the next snapshot alone.

    Attributes:
        row: that would have come next.
        first: the place among all that was recorded from which on calls are behind it.
        last: a snapshot with a higher place is behind it.
        text: for people; empty of rows that were lost, which are told as such.
    """

    row: int
    first: int
    last: int
    text: str


class PlayableRows:
    """What there is to play of a session, as far as it is on the disk by now.

    Attributes:
        name: of the session.
        rows: the numbers of its rows.
        missing: those that were lost.
        snapshots: in the order in which they were taken.
        breaks: in the order of their `first`.
        threads: events that another thread than the one that steps has begun to use a link.

    Args:
        session: what was recorded.
    """

    def __init__(self, session: Session) -> None:
        self.name = session.name
        extent = session.extent
        self.rows, self.missing, self.snapshots = extent.rows, list(extent.missing), session.snapshots
        events = session.events
        known = {each.order for each in self.snapshots} | {each.order for each in events}
        left = [Break(each.row, each.order, each.order, _told(each)) for each in events if each.kind in BREAKS]
        for gap in gaps(session, known):
            start = gap.rows.start
            text = "" if len(gap.rows) else f"row {start:,}: lost: what was recorded between two rows"
            left.append(Break(start, gap.first, gap.last, text))
        self.breaks = sorted(left, key=lambda each: each.first)
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
        if found is None or any(each.last > found.order and each.row <= row for each in self.breaks):
            return None
        return found

    def first_in(self, rows: range) -> SnapshotRecord | None:
        """Returns the first snapshot that lies before one of these rows, or None."""
        return next((each for each in self.snapshots if rows.start <= each.row < rows.stop), None)

    def first_row(self) -> int | None:
        """Returns the first row that a snapshot leads to without a row before it, or None."""
        there = (each.row for each in self.snapshots if each.row in self.rows)
        return next((row for row in there if self.leading_to(row) is not None), None)

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

    def there_in(self, rows: range) -> list[range]:
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
        """Returns the text of each break behind a place among all that was recorded, and before a row."""
        return tuple(each.text for each in self.breaks if each.text and each.last > order and each.row < row)

    def threads_before(self, row: int) -> tuple[str, ...]:
        """Returns a text for each event before a row that another thread has begun to use a link."""
        return tuple(_told(event) for event in self.threads if event.row < row)


def _told(event: Event) -> str:
    return f"row {event.row:,}: {event.kind}: {event.text}"


def _span(rows: range) -> str:
    return f"{rows.start} to {rows.stop - 1}" if len(rows) else "none"
