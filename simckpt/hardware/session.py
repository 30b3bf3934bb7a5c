"""Sessions for reading: what was recorded, when, and from which states it can be played again."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from simckpt import presentation
from simckpt.arguments import checked_whole
from simckpt.errors import (
    ConfigurationError,
    DamageWarning,
    FormatError,
    LeafNotFoundError,
    SessionNotFoundError,
    StoreError,
)
from simckpt.hardware.reset_arguments import options_of
from simckpt.hardware.session_tables import GROUPS, TABLES, Array, check_tables, cut, joined, needed, selected
from simckpt.storage import archived_sessions, names
from simckpt.storage.session_gaps import parts_between
from simckpt.storage.session_records import (
    ClosedRecord,
    LinkRecord,
    OriginRecord,
    PartRecord,
    SnapshotRecord,
    missing_rows,
)
from simckpt.storage.sessions import SNAPSHOTS, Fallback, SessionFiles, session_names

READING, NOTHING, TIME = 0, 1, 2  # the kinds of entries in `readings`
# kinds of events behind which a record goes on from another state than it had: what follows can be played from the
# next snapshot alone
BREAKS = ("restored", "error", "unrecorded")
THREAD = "thread"  # kind of the event that another thread than the one that steps has begun to use a link


@dataclass(frozen=True)
class Event:
    """Something that was noted beside the rows.

    Attributes:
        order: its place among all that was recorded; -1 of what the recording process noted by itself.
        row: that came next.
        monotonic: when [ns, the recorder's clock].
        wall: when [ns since 1970, UTC].
        kind: "trigger", "kept" (a ring, by a trigger), "note" or what else `Recorder.note` was given; "restored",
            "error", "unrecorded", behind which a replay goes on from the next snapshot; "lost", "no snapshot",
            "thread" (another one than that which steps has used a link).
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
            extent = self.extent
            what = f"{presentation.count(extent.count, 'row')}, {extent.seconds:.1f} s, {self.status}"
        except StoreError as error:
            what = f"damaged: {error}"
        return f"<Session {self.name!r}: {what}>"

    def _repr_html_(self) -> str:
        origin, extent, closed = self.origin, self.extent, self.closed
        rows = extent.rows
        facts = [
            ("rows", f"{len(rows):,} ({rows.start:,} to {rows.stop - 1:,})" if rows else "none"),
            ("duration", f"{extent.seconds:.1f} s"),
            ("status", self.status if closed is None else f"{self.status} {closed.text}".strip()),
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
    def nbytes(self) -> int:
        """What it weighs [bytes], be it here or in the archive alone; raises DamagedError or FormatError."""
        return archived_sessions.size_of(self.files)

    @property
    def tier(self) -> str:
        """Where its arrays are: "local", or "archive" where some are there alone, and come back when they are read."""
        return "archive" if archived_sessions.is_evicted(self.files) else "local"

    @property
    def pinned(self) -> bool:
        """Whether no prune takes it."""
        return archived_sessions.is_pinned(self.path)

    def pin(self) -> None:
        """Protects it from `Store.prune_sessions`, also while it is recorded; raises StorageError."""
        archived_sessions.pin_session(self.files.root, self.name)

    def unpin(self) -> None:
        """Ends that protection; raises StorageError."""
        archived_sessions.unpin_session(self.files.root, self.name)

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
        """How it ended: "closed", "trigger", "error", "killed" or "refused"; else "recording", or "unfinished".

        "refused" is one whose disk did not take its end; "unfinished" one that nobody writes, and nobody has ended.
        """
        closed = self.closed
        if closed is not None:
            return closed.how
        return "recording" if self.files.is_written() else "unfinished"

    @property
    def parts(self) -> list[PartRecord]:
        """The records of its parts; raises DamagedError or FormatError."""
        return self.files.parts()

    @property
    def extent(self) -> Extent:
        """Its rows and times, `.rows`, `.missing`, `.count`, `.started`, `.seconds`, from one look at the disk."""
        parts = self.parts
        missing = tuple(missing_rows(self.record, parts, self.closed))
        if not parts:
            return Extent(range(0), missing, 0, self.record.monotonic, 0.0)
        rows, count = range(parts[0].rows[0], parts[-1].rows[1]), sum(part.rows[1] - part.rows[0] for part in parts)
        return Extent(rows, missing, count, parts[0].started, (parts[-1].stopped - parts[0].started) / 1e9)

    @property
    def rows(self) -> range:
        """The numbers of its rows; one from a ring does not begin at 0. Some may be `missing`."""
        return self.extent.rows

    @property
    def missing(self) -> list[range]:
        """The rows that were lost: the disk or the machine was too slow or full, or a value could not be recorded."""
        return list(self.extent.missing)

    @property
    def duration(self) -> float:
        """From its first moment to its last [s]."""
        return self.extent.seconds

    @property
    def started(self) -> int:
        """Its first moment [ns, the recorder's monotonic clock], from which `times` and `row_at` count."""
        return self.extent.started

    @property
    def absent(self) -> list[str]:
        """What its records speak of, and what is not there: snapshots, models; empty of a whole session."""
        found = self.files.absent(self.snapshots)
        return [text if place == SNAPSHOTS else f"{place}: {text}" for place, text in found]

    @property
    def snapshots(self) -> tuple[SnapshotRecord, ...]:
        """Its snapshots: `.number`, `.row` (that came next), `.order`, `.monotonic`, `.wall`, `.reason`."""
        return tuple(self.files.snapshots())

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
        yield from (tables for _, tables in self._chunks(columns, start, stop))

    def _chunks(
        self, columns: Sequence[str] | None, start: int | None, stop: int | None
    ) -> Iterator[tuple[range, dict[str, Any]]]:
        start = None if start is None else checked_whole("start", start, least=None)
        stop = None if stop is None else checked_whole("stop", stop, least=None)
        for part in parts_between(self.files, start, stop):
            # what comes before a row, such as a reset, may lie in the part before that row's own
            if (start is None or part.rows[1] >= start) and (stop is None or part.rows[0] < stop):
                yield range(*part.rows), self._cut(part, columns, start, stop)

    def read(
        self, columns: Sequence[str] | None = None, *, start: int | None = None, stop: int | None = None
    ) -> dict[str, Any]:
        """Returns the tables: "rows", "resets", "commands" and "readings" (of each link), "events".

        A table is a nested dict of arrays whose first axis are its entries; observations that are dicts or tuples are
        dicts or tuples of arrays. All tables have `order`, one counter of all that was recorded, and `row`, the number
        of the call of `step` that was in progress, or came next. A session that has no part yet has no tables either.

        Args:
            columns: paths or beginnings of paths, such as `["rows/reward", "readings/motor"]`; all if None.
            start: the first row.
            stop: one behind the last; entries of all tables are those with `start <= row < stop`.

        Raises:
            LeafNotFoundError: no part has such a column.
            ConfigurationError: a column has another size in some rows than in others, or a dtype of which none holds
                the values of both; the message says in which rows, and `chunks` reads them.
            DamagedError: a part is missing or damaged, by name; `chunks` yields those before it.
            FormatError: parts that break a rule, or do not fit together.
        """
        found = list(self._chunks(columns, start, stop))
        tables = joined(found, f"session {self.name!r}")
        known = {(table,) for table in TABLES} | {(group, link.name) for group in GROUPS for link in self.links}
        for column in columns or ():
            keys = _keys(column)
            # where there is nothing to write, there may be no table
            if found and tuple(keys) not in known and not _has(tables, keys):
                raise LeafNotFoundError(
                    f"session {self.name!r} has no column {column!r}; it has {', '.join(self._columns())}"
                )
        return tables

    def _columns(self) -> list[str]:
        parts = self.parts
        return _paths(self.files.read_part(parts[0])) if parts else []

    @property
    def times(self) -> Array:
        """When each row began, `(rows,)` float64 [s since `started`]."""
        (begun,) = needed(self.read(["rows/started"]).get("rows"), "started")
        # the difference first: a float64 holds no nanoseconds of a clock that has run for months
        times: Array = (begun - self.started) / 1e9
        return times

    def row_at(self, seconds: float) -> int:
        """Returns the row that was in progress `seconds` after `started`: the last one that had begun.

        Raises:
            ConfigurationError: that is before the first row, or no number.
        """
        if not isinstance(seconds, int | float | np.number) or not math.isfinite(seconds):
            raise ConfigurationError(f"a moment is a finite number of seconds, got {seconds!r}", keys=["seconds"])
        begun, numbers = needed(self.read(["rows/started", "rows/row"]).get("rows"), "started", "row")
        place = int(np.searchsorted(begun, self.started + round(seconds * 1e9), side="right")) - 1
        if place < 0:
            raise ConfigurationError(
                f"session {self.name!r} had no row {seconds:g} s after its start; it has {len(begun)}", keys=["seconds"]
            )
        return int(numbers[place])

    @property
    def events(self) -> list[Event]:
        """What was noted beside the rows, in the order of time."""
        table = needed(self.read(["events"]).get("events"), "order", "row", "monotonic", "wall", "kind", "text")
        found = [Event(*values) for values in zip(*(column.tolist() for column in table), strict=True)]
        return sorted(found, key=lambda event: event.monotonic)

    def options(self, text: str) -> Any:
        """Returns the options of a reset from the column `resets/options`.

        Raises:
            ConfigurationError: they could not be recorded.
            FormatError: that is no text that a recorder writes.
        """
        return options_of(text)

    def statistics(self) -> dict[str, Any]:
        """Returns rate, step times, jitter, and of each link latency and loss; see `simckpt.hardware.statistics`."""
        from simckpt.hardware.statistics import summary

        return summary(self)

    def _cut(
        self, part: PartRecord, columns: Sequence[str] | None, start: int | None, stop: int | None
    ) -> dict[str, Any]:
        whole = start is None and stop is None
        wanted = None if columns is None else _wanted(columns, rows=not whole)
        tables = self.files.read_part(part, wanted)
        check_tables(tables, self.links, f"{self.path}: part {part.folder}")
        if whole:
            return tables
        tables = cut(tables, start, stop)
        # the column was read to choose by
        return tables if columns is None else selected(tables, _wanted(columns, rows=False))


@dataclass(frozen=True)
class Extent:
    """How far a session goes.

    Attributes:
        rows: the numbers of its rows.
        missing: those of them, and before and behind, that were lost.
        count: how many rows are there.
        started: its first moment [ns, the recorder's monotonic clock].
        seconds: from there to its last moment.
    """

    rows: range
    missing: tuple[range, ...]
    count: int
    started: int
    seconds: float


def session(root: Path, name: str, *, fallback: Fallback | None = None) -> Session:
    """Returns a session of a store; raises SessionNotFoundError, DamagedError or FormatError.

    Args:
        root: the store's folder.
        name: of the session.
        fallback: brings back what is damaged or evicted, see `SessionFiles`.
    """
    return Session(SessionFiles(root, name, fallback=fallback))


def sessions(root: Path, *, fallback: Fallback | None = None) -> list[Session]:
    """Returns all sessions of a store, in the order in which they were begun.

    Warns:
        DamageWarning: of those whose record cannot be trusted, which hide no others.
    """
    found: list[Session] = []
    damaged: list[str] = []
    for name in session_names(root):
        try:
            found.append(session(root, name, fallback=fallback))
        except SessionNotFoundError:
            continue  # removed since it was listed
        except StoreError as error:
            damaged.append(f"session {name!r} was passed over: {error}")
    if damaged:
        warnings.warn(f"{'; '.join(damaged)}. `simckpt check STORE` shows what is damaged", DamageWarning, stacklevel=3)
    return sorted(found, key=lambda session: (session.created, session.name))


def _wanted(columns: Sequence[str], *, rows: bool) -> Callable[[str], bool]:
    """Returns whether the column of a path is one of these or lies below one; `rows`: what says their rows, too."""
    keys = [[names.encode_part(key) for key in _keys(column)] for column in columns]
    paths = ["/".join(each) for each in keys]
    if rows:
        paths += ["/".join([*each[: 2 if each[0] in GROUPS else 1], "row"]) for each in keys]

    def wanted(path: str) -> bool:
        return any(path == each or path.startswith(f"{each}/") for each in paths)

    return wanted


def _keys(column: str) -> list[str]:
    """Returns the names in the path of a column; they may be spelled as they are, or encoded as in files."""
    found = []
    for part in column.split("/"):
        try:
            found.append(names.decode_part(part))
        except FormatError:
            found.append(part)
    return found


def _has(tree: Any, path: Sequence[str]) -> bool:
    return not path or (isinstance(tree, dict) and path[0] in tree and _has(tree[path[0]], path[1:]))


def _paths(tree: Any, path: str = "") -> list[str]:
    if not isinstance(tree, dict):
        return [path]
    return [
        each
        for key, value in tree.items()
        for each in _paths(value, f"{path}/{names.encode_part(str(key))}" if path else str(key))
    ]
