"""Near matches for names that were not found."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

LOOKED_AT = 10_000  # names; comparing takes up to a millisecond each


def nearest(name: str, known: Iterable[str]) -> str:
    """Returns the end of a message: `; did you mean ...?`, or the known names, or that there are none."""
    names = list(dict.fromkeys(known))
    if not names:
        return "; there are none"
    close = difflib.get_close_matches(name, names[:LOOKED_AT], n=3, cutoff=0.5)
    if close:
        return "; did you mean " + " or ".join(repr(match) for match in close) + "?"
    shown = ", ".join(repr(match) for match in names[:10])
    return f"; there are {shown}" + (f" and {len(names) - 10} more" if len(names) > 10 else "")
