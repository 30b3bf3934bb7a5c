"""Sessions for reading: what was recorded, when, and from which states it can be played again."""

from __future__ import annotations

import itertools
import json
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from simckpt import presentation
from simckpt.errors import (
    ConfigurationError,
    DamageWarning,
    FormatError,
    LeafNotFoundError,
    SessionNotFoundError,
    StoreError,
)
from simckpt.storage.session_records import ClosedRecord, LinkRecord, OriginRecord, PartRecord, SnapshotRecord
from simckpt.storage.sessions import SessionFiles, mapped, session_names

READING, NOTHING, TIME = 0, 1, 2  # the kinds of entries in `readings`
GROUPS = ("commands", "readings")  # of tables, one for each link
UNKNOWN_OPTIONS = "?"  # of a reset: they are none that JSON has

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Event:
    """Something that was noted beside the rows.

    Attributes:
        order: its place among all that was recorded; -1 of what the recording process noted by itself.
        row: that came next.
        monotonic: when [ns, the recorder's clock].
        wall: when [ns since 1970, UTC].
        kind: "trigger", "error", "restored", "lost", "note", ...
        text: for people.
    """

    order: int
    row: int
    monotonic: int
    wall: int
    kind: str
    text: str


class Session:
    """One recording in a store; opening and reading it writes nothing. `store.session(name)` makes one.

    It may be recorded by another process meanwhile: each call sees what is on the disk by then.

    Attributes:
        files: on disk.
        record: what holds for all of it.

    Args:
        files: of the session.
    """

    def __init__(self, files: SessionFiles) -> None:
        self.files = files
        self.record = files.record

    def __repr__(self) -> str:
        try:
            rows, status = self.rows, self.status
            what = f"{presentation.count(len(rows), 'row')}, {self.duration:.1f} s, {status}"
        except StoreError as error:
            what = f"damaged: {error}"
        return f"<Session {self.name!r}: {what}>"

    def _repr_html_(self) -> str:
        origin = self.origin
        facts = [
            ("rows", f"{len(self.rows):,} ({self.rows.start:,} to {self.rows.stop:,})"),
            ("duration", f"{self.duration:.1f} s"),
            ("status", self.status if self.closed is None else f"{self.status} {self.closed.text}".strip()),
            ("started", presentation.moment(self.created)),
            ("origin", "none" if origin is None else f"{origin.run} at step {origin.step:,}"),
            ("snapshots", f"{len(self.snapshots):,}"),
            ("links", ", ".join(f"{link.name} {link.transport}".strip() for link in self.links) or "none"),
            ("host", self.host),
        ]
        return presentation.html_table(("", self.name), facts)

    @property
    def name(self) -> str:
        """Its name."""
        return self.record.name

    @property
    def id(self) -> str:
        """Its random id, 32 hex digits."""
        return self.record.id

    @property
    def path(self) -> Path:
        """Its folder."""
        return self.files.path

    @property
    def created(self) -> float:
        """When it was begun [s since 1970, UTC]."""
        return self.record.created

    @property
    def origin(self) -> OriginRecord | None:
        """The checkpoint that was driving: `.checkpoint` (id), `.run`, `.seq`, `.step`; or None."""
        return self.record.origin

    @property
    def mode(self) -> str:
        """Either "continuous", or "ring" for one that a trigger has kept."""
        return self.record.mode

    @property
    def links(self) -> tuple[LinkRecord, ...]:
        """The links to devices: `.name`, `.command` and `.reading` (names of the values), `.transport`."""
        return self.record.links

    @property
    def signals(self) -> tuple[str, ...]:
        """Names of what was recorded besides; their columns are `rows/signals/<name>`."""
        return self.record.signals

    @property
    def spaces(self) -> Mapping[str, Any]:
        """The env's spaces, "observation" and "action", as JSON: {"type": "Box", "dtype", "shape", "low", "high"}."""
        return self.record.spaces

    @property
    def env(self) -> Mapping[str, Any]:
        """What is known of the env: "id", "kwargs", "dt" [s], as far as they are."""
        return self.record.env

    @property
    def versions(self) -> Mapping[str, str]:
        """{package: version} of the process that recorded."""
        return self.record.versions

    @property
    def host(self) -> str:
        """The machine that it was recorded on."""
        return self.record.host

    @property
    def closed(self) -> ClosedRecord | None:
        """How it ended: `.how`, `.text`, `.closed`; None if it goes on, or was killed with all its processes."""
        return self.files.closed()

    @property
    def status(self) -> str:
        """Whether it is "recording", "closed", "trigger", "error" or "killed"; "unfinished" if nobody has ended it."""
        closed = self.closed
        if closed is not None:
            return closed.how
        return "recording" if self.files.is_written() else "unfinished"

    @property
    def parts(self) -> list[PartRecord]:
        """The records of its parts; raises DamagedError or FormatError."""
        return self.files.parts()

    @property
    def rows(self) -> range:
        """The numbers of its rows; one from a ring does not begin at 0. Some may be `missing`."""
        parts = self.parts
        return range(parts[0].rows[0], parts[-1].rows[1]) if parts else range(0)

    @property
    def missing(self) -> list[range]:
        """The rows that were lost, because the disk or the machine was too slow or full."""
        parts = self.parts
        spans = [(before.rows[1], after.rows[0]) for before, after in itertools.pairwise(parts)]
        return [range(start, stop) for start, stop in spans if start < stop]

    @property
    def duration(self) -> float:
        """From its first moment to its last [s]."""
        parts = self.parts
        return (parts[-1].stopped - parts[0].started) / 1e9 if parts else 0.0

    @property
    def started(self) -> int:
        """Its first moment [ns, the recorder's monotonic clock], from which `times` and `row_at` count."""
        parts = self.parts
        return parts[0].started if parts else self.record.monotonic

    @property
    def snapshots(self) -> tuple[SnapshotRecord, ...]:
        """Its snapshots: `.number`, `.row` (that came next), `.order`, `.monotonic`, `.wall`, `.reason`."""
        return tuple(self.files.snapshots())

    def snapshot_before(self, row: int, *, order: int | None = None) -> SnapshotRecord | None:
        """Returns the last snapshot from which `row` can be played again, or None.

        Args:
            row: is executed after it.
            order: it must not lie behind this place among all that was recorded.
        """
        found = [each for each in self.snapshots if each.row <= row and (order is None or each.order <= order)]
        return max(found, key=lambda each: each.order, default=None)

    def snapshot(self, which: SnapshotRecord | int) -> dict[str, Any]:
        """Returns {"env": state of the env inside the recorder, "observation": the last one, or None}.

        Args:
            which: one of `snapshots`, or the row that came next after it; of several the last one.

        Raises:
            ConfigurationError: there is no snapshot at that row; the message lists those that are there.
            DamagedError, FormatError: it cannot be trusted.
        """
        if not isinstance(which, SnapshotRecord):
            found = [each for each in self.snapshots if each.row == which]
            if not found:
                there = ", ".join(str(each.row) for each in self.snapshots[:20]) or "none"
                raise ConfigurationError(
                    f"session {self.name!r} has no snapshot at row {which}; it has some at {there}", keys=["which"]
                )
            which = found[-1]
        return self.files.read_snapshot(which)

    def chunks(
        self, columns: Sequence[str] | None = None, *, start: int | None = None, stop: int | None = None
    ) -> Iterator[dict[str, Any]]:
        """Yields what `read` returns, part by part, so that memory stays bounded."""
        for part in self.parts:
            # what comes before a row, such as a reset, may lie in the part before that row's own
            if (start is None or part.rows[1] >= start) and (stop is None or part.rows[0] < stop):
                yield self._cut(part, columns, start, stop)

    def read(
        self, columns: Sequence[str] | None = None, *, start: int | None = None, stop: int | None = None
    ) -> dict[str, Any]:
        """Returns the tables: "rows", "resets", "commands" and "readings" (of each link), "events".

        A table is a nested dict of arrays whose first axis are its entries; observations that are dicts or tuples are
        dicts or tuples of arrays. All tables have `order`, one counter of all that was recorded, and `row`, the number
        of the call of `step` that was in progress, or came next.

        Args:
            columns: paths or beginnings of paths, such as `["rows/reward", "readings/motor"]`; all if None.
            start: the first row.
            stop: one behind the last; entries of all tables are those with `start <= row < stop`.

        Raises:
            LeafNotFoundError: no part has such a column.
            DamagedError: a part is missing or damaged, by name; `chunks` yields those before it.
            FormatError: parts that break a rule, or do not fit together.
        """
        found = list(self.chunks(columns, start=start, stop=stop))
        joined = _joined(found) if found else {}
        if columns is not None and found:
            for column in columns:
                if column not in GROUPS and not _has(joined, column.split("/")):
                    raise LeafNotFoundError(
                        f"session {self.name!r} has no column {column!r}; it has {', '.join(self._columns())}"
                    )
        return joined

    def _columns(self) -> list[str]:
        parts = self.parts
        return _paths(self.files.read_part(parts[0])) if parts else []

    @property
    def times(self) -> Array:
        """When each row began, `(rows,)` float64 [s since `started`]."""
        started = self.started
        return (
            _column(self.read(["rows/started"]), "rows", "started", np.int64).astype(np.float64) / 1e9 - started / 1e9
        )

    def row_at(self, seconds: float) -> int:
        """Returns the row that was in progress `seconds` after `started`: the last one that had begun.

        Raises:
            ConfigurationError: that is before the first row.
        """
        tables = self.read(["rows/started", "rows/row"])
        begun = _column(tables, "rows", "started", np.int64)
        place = int(np.searchsorted(begun, self.started + round(seconds * 1e9), side="right")) - 1
        if place < 0:
            raise ConfigurationError(
                f"session {self.name!r} had no row {seconds:g} s after its start; it has {len(begun)}", keys=["seconds"]
            )
        return int(tables["rows"]["row"][place])

    @property
    def events(self) -> list[Event]:
        """What was noted beside the rows, in the order of time."""
        table = needed(self.read(["events"]).get("events", {}), "order", "row", "monotonic", "wall", "kind", "text")
        found = [Event(*values) for values in zip(*(column.tolist() for column in table), strict=True)]
        return sorted(found, key=lambda event: event.monotonic)

    def options(self, text: str) -> Any:
        """Returns the options of a reset from the column `resets/options`.

        Raises:
            ConfigurationError: they were none that JSON has.
        """
        if text == UNKNOWN_OPTIONS:
            raise ConfigurationError("the options of this reset could not be recorded", keys=["options"])
        return json.loads(text) if text else None

    @cached_property
    def _summary(self) -> dict[str, Any]:
        from simckpt.hardware.statistics import summary

        return summary(self)

    def statistics(self) -> dict[str, Any]:
        """Returns rate, step times, jitter, and of each link latency and loss; see `simckpt.hardware.statistics`."""
        return self._summary

    def _cut(
        self, part: PartRecord, columns: Sequence[str] | None, start: int | None, stop: int | None
    ) -> dict[str, Any]:
        cut = start is not None or stop is not None
        wanted = None if columns is None else _wanted(columns, rows=cut)
        tables = self.files.read_part(part, wanted)
        _check_columns(tables, f"{self.path}: part {part.folder}")
        if not cut:
            return tables
        low, high = -1 if start is None else start, np.iinfo(np.int64).max if stop is None else stop
        return _within(tables, low, high, () if columns is None else columns)


def session(root: Path, name: str) -> Session:
    """Returns a session of a store; raises SessionNotFoundError, DamagedError or FormatError."""
    return Session(SessionFiles(root, name))


def sessions(root: Path) -> list[Session]:
    """Returns all sessions of a store, in the order in which they were begun.

    Warns:
        DamageWarning: of those whose record cannot be trusted, which hide no others.
    """
    found: list[Session] = []
    damaged: list[str] = []
    for name in session_names(root):
        try:
            found.append(session(root, name))
        except SessionNotFoundError:
            continue  # removed since it was listed
        except StoreError as error:
            damaged.append(f"session {name!r} was passed over: {error}")
    if damaged:
        warnings.warn(f"{'; '.join(damaged)}. `simckpt check STORE` shows what is damaged", DamageWarning, stacklevel=3)
    return sorted(found, key=lambda session: (session.created, session.name))


def _wanted(columns: Sequence[str], *, rows: bool) -> Callable[[str], bool]:
    """Returns whether the column of a path is one of these or lies below one; `rows`: those that say the row, too."""

    def wanted(path: str) -> bool:
        return any(path == each or path.startswith(f"{each}/") for each in columns) or (rows and path.endswith("/row"))

    return wanted


def needed(table: Mapping[str, Any], *columns: str) -> list[Array]:
    """Returns some columns of a table, all empty if there is no such table; raises FormatError if one is missing."""
    if not table:
        return [np.empty(0, np.int64)] * len(columns)
    if missing := [column for column in columns if column not in table]:
        raise FormatError(f"a table of the session has no column {', '.join(missing)}")
    return [table[column] for column in columns]


_ORDINARY = {
    **dict.fromkeys(
        ("order", "row", "started", "finished", "monotonic", "wall", "received", "device_time", "seed"), "i"
    ),
    **dict.fromkeys(("terminated", "truncated", "seeded", "late"), "b"),
    **dict.fromkeys(("text", "options"), "U"),
    "reward": "f",
    "sequence": "u",
}


def _check_columns(tables: Mapping[str, Any], where: str) -> None:
    """Raises FormatError for a column that has another dtype or shape than recorders write."""
    for name, table in tables.items():
        if name in GROUPS:
            groups = table.values() if isinstance(table, dict) else [table]
        else:
            groups = [table]
        for each in groups:
            if not isinstance(each, dict):
                raise FormatError(f"{where}: {name!r} is no table")
            for column, kind in _ORDINARY.items():
                values = each.get(column)
                if values is not None and not (isinstance(values, np.ndarray) and _is_column(values, kind)):
                    raise FormatError(f"{where}: the column {column!r} of {name!r} is not what recorders write")


def _is_column(values: Array, kind: str) -> bool:
    return values.ndim == 1 and (values.dtype.kind == kind or len(values) == 0)


def _within(tables: Mapping[str, Any], low: int, high: int, columns: Sequence[str], path: str = "") -> dict[str, Any]:
    """Returns the entries of all tables with `low <= row < high`."""
    found: dict[str, Any] = {}
    for name, table in tables.items():
        inner = f"{path}{name}"
        if inner in GROUPS:
            found[name] = _within(table, low, high, columns, f"{inner}/")
            continue
        (row,) = needed(table, "row")
        chosen = (row >= low) & (row < high)
        cut = mapped(lambda array, chosen=chosen: array[chosen], table)
        # the column was read to choose by
        if columns and not _wanted(columns, rows=False)(f"{inner}/row"):
            del cut["row"]
        found[name] = cut
    return {name: table for name, table in found.items() if table or not columns}


def _joined(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Returns the tables of several parts as one; those of links are not in all of them."""
    found: dict[str, Any] = {}
    for name in dict.fromkeys(key for part in parts for key in part):
        trees = [part[name] for part in parts if name in part]
        if name in GROUPS:
            found[name] = _joined(trees)
            continue
        # what a table without entries has for columns is from before the first values were seen
        filled = [tree for tree in trees if _entries(tree)] or trees[-1:]
        found[name] = mapped(_concatenated, *filled)
    return found


def _entries(tree: Any) -> int:
    """Returns how many entries a table or column has."""
    if isinstance(tree, dict | tuple):
        return max(map(_entries, tree.values() if isinstance(tree, dict) else tree), default=0)
    return len(tree)


def _concatenated(*arrays: Array) -> Array:
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)


def _has(tree: Any, path: Sequence[str]) -> bool:
    return not path or (isinstance(tree, dict) and path[0] in tree and _has(tree[path[0]], path[1:]))


def _paths(tree: Any, path: str = "") -> list[str]:
    if not isinstance(tree, dict):
        return [path]
    return [each for key, value in tree.items() for each in _paths(value, f"{path}/{key}" if path else str(key))]


def _column(tables: Mapping[str, Any], table: str, column: str, dtype: Any) -> Array:
    found: Array = tables[table][column] if table in tables else np.empty(0, dtype)
    return found
