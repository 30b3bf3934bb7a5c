"""Time series of a session by their names: "observation[0]", "command/motor/force", "reading/motor/position"."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np

from simckpt.errors import LeafNotFoundError
from simckpt.hardware import timing
from simckpt.hardware.session import READING
from simckpt.hardware.session_tables import cut, needed
from simckpt.storage import names
from simckpt.storage.session_records import LinkRecord

Array = np.ndarray[Any, Any]

_INDEXED = re.compile(r"(.*?)((?:\[\d+\])*)", re.DOTALL)
_REAL = "biuf"  # kinds of dtypes that are numbers over time
_ROW_COLUMNS = ("action", "observation", "reward", "terminated", "truncated", "signals")


class Recorded(Protocol):
    """What series are taken from: a session, or what was made of one."""

    @property
    def name(self) -> str:
        """Of the session."""
        ...

    @property
    def started(self) -> int:
        """From when seconds are counted [ns]."""
        ...

    @property
    def links(self) -> Sequence[LinkRecord]:
        """The links to devices."""
        ...

    def read(
        self, columns: Sequence[str] | None = None, *, start: int | None = None, stop: int | None = None
    ) -> dict[str, Any]:
        """Returns tables as `Session.read` does."""
        ...


class Series(NamedTuple):
    """One number over time.

    Attributes:
        name: of it.
        seconds: since the session's start, `(n,)` float64 [s].
        rows: the row that each value belongs to, `(n,)` int64.
        values: `(n,)` float64.
    """

    name: str
    seconds: Array
    rows: Array
    values: Array


def series(source: Recorded, name: str, *, start: int | None = None, stop: int | None = None) -> Series:
    """Returns one time series of a session.

    Args:
        source: a session, or a `WhatIf`.
        name: "reward", "terminated", "truncated"; "action", "observation" or "signals/<name>", with the place in an
            array in brackets, "observation[0]" or "observation/<key>[1]"; "command/<link>/<value>",
            "reading/<link>/<value>". A value counts from when it was there: an action from the beginning of its step,
            an observation from the end, a reading from its arrival.
        start: the first row.
        stop: one behind the last row.

    Raises:
        LeafNotFoundError: there is no such series; the message lists those that there are.
        DamagedError: what was recorded cannot be trusted.
    """
    match = _INDEXED.fullmatch(name)
    assert match is not None
    index = tuple(int(place) for place in re.findall(r"\d+", match[2]))
    parts = match[1].split("/")
    found: Series | None = None
    if parts[0] in ("command", "reading") and not index:
        found = _of_link(source, name, start, stop)
    elif parts[0] in _ROW_COLUMNS:
        found = _of_rows(source, name, parts, index, start, stop)
    if found is None:
        there = ", ".join(names_of(source)) or "none"
        raise LeafNotFoundError(f"session {source.name!r} has no time series {name!r}; it has {there}")
    return found


def names_of(source: Recorded) -> list[str]:
    """Returns the names of all time series of a session; nested ones and the places in arrays as well."""
    found = []
    for part in source.read(stop=_first_row(source) + 1).get("rows", {}).items():
        if part[0] in _ROW_COLUMNS:
            found += list(_spelled(*part))
    for link in source.links:
        found += [f"command/{link.name}/{value}" for value in link.command]
        found += [f"reading/{link.name}/{value}" for value in link.reading]
    return found


def _first_row(source: Recorded) -> int:
    rows = source.read(["rows/row"]).get("rows", {}).get("row", ())
    return int(rows[0]) if len(rows) else 0


def _spelled(name: str, column: Any) -> Iterator[str]:
    if isinstance(column, Mapping | tuple):
        pairs = column.items() if isinstance(column, Mapping) else enumerate(column)
        for key, part in pairs:
            yield from _spelled(f"{name}/{key}", part)
        return
    for place in np.ndindex(column.shape[1:] if column.dtype.kind in _REAL else (0,)):
        yield name + "".join(f"[{number}]" for number in place)


def _of_rows(
    source: Recorded, name: str, parts: list[str], index: tuple[int, ...], start: int | None, stop: int | None
) -> Series | None:
    when = "started" if parts[0] == "action" else "finished"
    path = "/".join(map(names.encode_part, parts[:2] if parts[0] == "signals" else parts[:1]))
    try:
        rows = source.read([f"rows/{each}" for each in ("row", when, path)], start=start, stop=stop).get("rows", {})
    except LeafNotFoundError:  # the caller says it in its own words
        return None
    column = rows.get(parts[0])
    for part in parts[1:]:
        if isinstance(column, tuple) and part.isdecimal() and int(part) < len(column):
            column = column[int(part)]
        else:
            column = column.get(part) if isinstance(column, Mapping) else None
    if not isinstance(column, np.ndarray) or len(index) != column.ndim - 1 or column.dtype.kind not in _REAL:
        return None
    if any(place >= size for place, size in zip(index, column.shape[1:], strict=True)):
        return None
    place: Any = (slice(None), *index)
    values = column[place].astype(np.float64)
    times, numbers = needed(rows, when, "row")
    return Series(name, timing.seconds(times, source.started), numbers, values)


def _of_link(source: Recorded, name: str, start: int | None, stop: int | None) -> Series | None:
    kind = name.partition("/")[0]
    for link in source.links:
        columns = link.command if kind == "command" else link.reading
        place = next((place for place, each in enumerate(columns) if name == f"{kind}/{link.name}/{each}"), None)
        if place is not None:
            break
    else:
        return None
    return series_of(source, kind, link, columns[place], link_table(source, kind, link.name, start=start, stop=stop))


def series_of(source: Recorded, kind: str, link: LinkRecord, value: str, table: Mapping[str, Array]) -> Series:
    """Returns the time series of one value of a link, from a table of `link_table`: one look at the disk for many."""
    place = (link.command if kind == "command" else link.reading).index(value)
    times, rows, values = needed(table, "monotonic" if kind == "command" else "received", "row", "values")
    return Series(f"{kind}/{link.name}/{value}", timing.seconds(times, source.started), rows, values[:, place])


def link_table(
    source: Recorded, kind: str, link: str, *, start: int | None = None, stop: int | None = None
) -> dict[str, Array]:
    """Returns the table of a link's commands, or of its readings without the looks that found none.

    Args:
        source: a session, or a `WhatIf`.
        kind: "command" or "reading".
        link: its name.
        start: the first row.
        stop: one behind the last row.
    """
    wanted = f"{kind}s/{names.encode_part(link)}"
    table = source.read([wanted], start=start, stop=stop).get(f"{kind}s", {}).get(link)
    if table is None:
        empty = {each: np.empty(0, np.int64) for each in ("row", "sequence", "monotonic", "received", "device_time")}
        columns = next((getattr(each, kind) for each in source.links if each.name == link), ())
        return {**empty, "values": np.empty((0, len(columns)))}
    if kind == "command":
        return dict(table)
    (kinds,) = needed(table, "kind")
    return {key: column[kinds == READING] for key, column in table.items()}


@dataclass(frozen=True)
class Excerpt:
    """Tables as those of a session that lie in memory: a stretch of one, or what was made of it.

    Attributes:
        name: of the session.
        started: from when seconds are counted [ns].
        links: the links to devices.
        tables: as `Session.read` returns them.
    """

    name: str
    started: int
    links: tuple[LinkRecord, ...]
    tables: dict[str, Any]

    def read(
        self, columns: Sequence[str] | None = None, *, start: int | None = None, stop: int | None = None
    ) -> dict[str, Any]:
        """Returns the tables with the entries of the rows from `start` on and below `stop`; all columns of them."""
        return self.tables if start is None and stop is None else cut(self.tables, start, stop)
