"""Where something was lost between two parts of a session: what leads there, and from where on the record is whole."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from simckpt.hardware.session_tables import Array, check_tables, needed

if TYPE_CHECKING:
    from simckpt.hardware.session import Session
    from simckpt.storage.session_records import PartRecord

_EVENTS = "events"  # what is lost of them is no part of what an env did


class Gap(NamedTuple):
    """Something that was lost: rows, or what came between two rows, such as a reset or what a link did.

    Attributes:
        rows: those that were lost; none if the next row was recorded. `rows.start` is the row that would have come.
        first: the place among all that was recorded from which on calls are behind the gap.
        last: the place of the last thing that was lost: a snapshot with a higher one is behind the gap.
    """

    rows: range
    first: int
    last: int


def gaps(session: Session, known: Collection[int]) -> list[Gap]:
    """Returns where something was lost, in order; what was lost behind the last part is none.

    The entries of each table are numbered from the recorder's start, and parts say which of them they have. The
    neighbours of a gap alone are read.

    Args:
        session: what was recorded.
        known: the places among all that was recorded of what is in no table of calls or links: snapshots, events.

    Raises:
        DamagedError, FormatError: a part cannot be trusted.
    """
    found = []
    ends: dict[str, int] = {}
    parts = session.parts
    # before the first part of a ring there was something, of which nothing is known
    gap = session.mode != "continuous"
    row = parts[0].rows[0] if parts and gap else 0
    lost, before = 0, None
    for part in parts:
        spans = {name: span for name, span in part.tables.items() if name != _EVENTS}
        missing = sum(max(0, first - ends.get(name, 0)) for name, (first, _) in spans.items())
        gap, lost = gap or missing > 0 or part.rows[0] > row, lost + missing
        ends.update({name: stop for name, (_, stop) in spans.items()})
        if all(first == stop for first, stop in spans.values()):
            # what follows it tells where the gap ends
            continue
        if gap:
            found.append(_gap(session, before, range(row, part.rows[0]), part, lost, known))
        gap, lost, before, row = False, 0, part, part.rows[1]
    return found


def _gap(
    session: Session, before: PartRecord | None, rows: range, after: PartRecord, lost: int, known: Collection[int]
) -> Gap:
    earlier = 0 if before is None else max(int(each[-1]) for each in _orders(session, before) if len(each))
    calls, links = _orders(session, after)
    # the first call may have begun before the gap, and then ended behind it: what was lost has the higher place
    behind = [int(each[place]) for each, place in ((calls, 1), (links, 0)) if len(each) > place]
    last = min(behind, default=int(calls[0]) + 1 + lost if len(calls) else 0) - 1
    while last in known or last in calls[:1]:
        last -= 1
    first = min(earlier + 1, *(int(each[0]) for each in (calls, links) if len(each)))
    return Gap(rows, first, max(last, earlier))


def _orders(session: Session, part: PartRecord) -> tuple[Array, Array]:
    """Returns the places among all that was recorded of the calls in a part, and of what links did; both sorted."""
    tables = session.files.read_part(part, lambda path: path.endswith("/order") and not path.startswith(_EVENTS))
    check_tables(tables, session.links, f"{session.path}: part {part.folder}")
    calls = [needed(tables.get(name), "order")[0] for name in ("rows", "resets")]
    links = [needed(table, "order")[0] for name in ("commands", "readings") for table in tables.get(name, {}).values()]
    return np.sort(np.concatenate(calls)), np.sort(np.concatenate([np.empty(0, np.int64), *links]))
