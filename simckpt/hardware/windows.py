"""A session in portions of some rows, so that memory stays bounded however large its parts are."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from simckpt.hardware.session_tables import cut

if TYPE_CHECKING:
    from simckpt.hardware.session import Session

ROWS = 4096  # in a portion
_LAST = np.iinfo(np.int64).max


def windows(session: Session, *, start: int | None = None, stop: int | None = None) -> Iterator[dict[str, Any]]:
    """Yields the tables of a session as `Session.chunks` does, of a few thousand rows each, in order.

    What belongs to a row comes with it or before it.

    Args:
        session: what was recorded.
        start: the first row.
        stop: one behind the last row.
    """
    for tables in session.chunks(start=start, stop=stop):
        rows = tables.get("rows", {}).get("row", ())
        # entries before the first of these rows, and those of a row that is complete in the next part, come along
        edges = [-1, *(int(rows[place]) for place in range(ROWS, len(rows), ROWS)), _LAST]
        for low, high in itertools.pairwise(edges):
            yield tables if len(edges) == 2 else cut(tables, low, high)
