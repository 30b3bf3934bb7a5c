"""The records of a session, a recording of an env at work with a device; FORMAT.md describes each."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from simckpt.errors import ConfigurationError, FormatError
from simckpt.storage import names, records, sealed
from simckpt.storage.records import FileRecord

PART_NAME = re.compile(r"([0-9]{8})-([0-9]{8})")
RECORD_LIMIT = 64 << 10  # [bytes] of the records of parts, snapshots and models
TEXT_LIMIT = 2000  # [characters] of why a session ended, or a snapshot was taken
MODES = ("continuous", "ring")
ENDINGS = ("closed", "trigger", "error", "killed", "refused")

Span = tuple[int, int]  # first, one behind the last


@dataclass(frozen=True)
class OriginRecord:
    """Which checkpoint was driving.

    Attributes:
        checkpoint: its id.
        run: name of its run.
        seq: its number there.
        step: of it [env steps].
    """

    checkpoint: str
    run: str
    seq: int
    step: int


@dataclass(frozen=True)
class LinkRecord:
    """A link of the env to a device.

    Attributes:
        name: in the tables `commands/<name>` and `readings/<name>`.
        command: names of the values that are sent.
        reading: names of the values that come.
        transport: what it goes over, for people, without secrets.
    """

    name: str
    command: tuple[str, ...] = ()
    reading: tuple[str, ...] = ()
    transport: str = ""


@dataclass(frozen=True)
class SessionRecord:
    """`session.json`: what holds for a whole session.

    Attributes:
        id: random identity.
        name: which is the folder's name as well.
        created: [s since 1970, UTC].
        monotonic: the recorder's clock at that moment [ns].
        mode: "continuous", or "ring" of one that a trigger has kept.
        origin: the checkpoint that was driving, or None.
        env: what is known of the env: "id", "kwargs", "dt" [s].
        spaces: "observation" and "action", as JSON.
        links: of the env.
        signals: names of what was recorded besides.
        versions: {package: version}.
        host: the machine.
    """

    id: str
    name: str
    created: float
    monotonic: int
    mode: str = "continuous"
    origin: OriginRecord | None = None
    env: Mapping[str, Any] = field(default_factory=dict)
    spaces: Mapping[str, Any] = field(default_factory=dict)
    links: tuple[LinkRecord, ...] = ()
    signals: tuple[str, ...] = ()
    versions: Mapping[str, str] = field(default_factory=dict)
    host: str = ""

    def to_bytes(self) -> bytes:
        """Returns the record as written to disk; raises ConfigurationError for what a record cannot hold."""
        fields = {
            "id": self.id,
            "name": self.name,
            "created": sealed.time_to_json(self.created),
            "monotonic": self.monotonic,
            "mode": self.mode,
            "origin": None if self.origin is None else dict(vars(self.origin)),
            "env": records.values_to_json("fact about the env", self.env),
            "spaces": records.values_to_json("space", self.spaces),
            "links": [_link_to_json(link) for link in self.links],
            "signals": list(self.signals),
            "versions": dict(self.versions),
            "host": self.host,
        }
        return _checked("session", fields, parse_session, limit=records.RECORD_LIMIT)


def parse_session(data: bytes, path: object) -> SessionRecord:
    """Returns the record of a `session.json`; raises DamagedError, FormatError or UnsupportedFormatError."""
    fields = sealed.unseal(data, "session", path=path)
    links = tuple(_parse_link(each) for each in fields.objects("links"))
    if len({link.name for link in links}) != len(links):
        raise fields.wrong("links", "a list of links of different names")
    return SessionRecord(
        id=fields.id("id"),
        name=fields.text("name", names.RUN_NAME),
        created=fields.time("created"),
        monotonic=fields.integer("monotonic"),
        mode=_one_of(fields, "mode", MODES),
        origin=fields.optional("origin", functools.partial(_parse_origin, fields)),
        env=fields.values("env"),
        spaces=fields.values("spaces"),
        links=links,
        signals=fields.texts("signals"),
        versions=fields.string_map("versions"),
        host=fields.text("host"),
    )


@dataclass(frozen=True)
class PartRecord:
    """`part.json`: about a second of a session, or the parts that were merged into it.

    Attributes:
        session: id of the session.
        numbers: of the first part that it covers and of the last, from 1 on.
        rows: (first, stop) of the calls of `step` in it.
        tables: {table: (first, stop)} of the entries of each, numbered from the recorder's start.
        started: of its first second [ns, the recorder's monotonic clock].
        stopped: of its last.
        files: of its folder.
    """

    session: str
    numbers: Span
    rows: Span
    tables: Mapping[str, Span]
    started: int
    stopped: int
    files: tuple[FileRecord, ...] = ()

    @property
    def folder(self) -> str:
        """The name of its folder."""
        return f"{self.numbers[0]:08d}-{self.numbers[1]:08d}"

    @property
    def size(self) -> int:
        """Of its files but this record [bytes]."""
        return sum(file.size for file in self.files)

    def to_bytes(self) -> bytes:
        """Returns the record as written to disk."""
        fields = {
            "session": self.session,
            "parts": list(self.numbers),
            "rows": list(self.rows),
            "tables": {name: list(span) for name, span in self.tables.items()},
            "started": self.started,
            "stopped": self.stopped,
            "files": {file.name: records.file_to_json(file) for file in self.files},
        }
        return _checked("part", fields, functools.partial(parse_part, session=self.session))


def parse_part(data: bytes, path: object, *, session: str | None = None) -> PartRecord:
    """Returns the record of a `part.json`; raises DamagedError, FormatError, also of another session than that id."""
    fields = sealed.unseal(data, "part", path=path)
    _check_session(fields, session)
    first, last = _span(fields, "parts")
    if not 1 <= first <= last <= 99_999_999:
        raise fields.wrong("parts", "the numbers of its first and its last part, from 1 on")
    tables = fields.object("tables")
    return PartRecord(
        session=fields.id("session"),
        numbers=(first, last),
        rows=_span(fields, "rows"),
        tables={name: _span(tables, name) for name in tables.content},
        started=fields.integer("started"),
        stopped=fields.integer("stopped"),
        files=records.parse_files(fields),
    )


@dataclass(frozen=True)
class SnapshotRecord:
    """`snapshot.json`: the state of the env before a row is executed.

    Attributes:
        session: id of the session.
        number: from 1 on, which is its folder's name.
        row: that comes next.
        order: its place among all that was recorded.
        monotonic: when [ns, the recorder's clock].
        wall: when [ns since 1970, UTC].
        reason: why it was taken.
        models: digests of the models that the state refers to.
        files: of its folder.
    """

    session: str
    number: int
    row: int
    order: int
    monotonic: int
    wall: int
    reason: str = ""
    models: tuple[str, ...] = ()
    files: tuple[FileRecord, ...] = ()

    def to_bytes(self) -> bytes:
        """Returns the record as written to disk."""
        fields = {
            "session": self.session,
            "number": self.number,
            "row": self.row,
            "order": self.order,
            "monotonic": self.monotonic,
            "wall": self.wall,
            "reason": self.reason,
            "models": list(self.models),
            "files": {file.name: records.file_to_json(file) for file in self.files},
        }
        return _checked("snapshot", fields, functools.partial(parse_snapshot, session=self.session))


def parse_snapshot(data: bytes, path: object, *, session: str | None = None) -> SnapshotRecord:
    """Returns the record of a `snapshot.json`; raises DamagedError, FormatError, also of another session."""
    fields = sealed.unseal(data, "snapshot", path=path)
    _check_session(fields, session)
    models = fields.texts("models")
    if not all(names.ID.fullmatch(each) for each in models):
        raise fields.wrong("models", "a list of digests")
    return SnapshotRecord(
        session=fields.id("session"),
        number=fields.integer("number", minimum=1, maximum=99_999_999),
        row=fields.integer("row"),
        order=fields.integer("order"),
        monotonic=fields.integer("monotonic"),
        wall=fields.integer("wall"),
        reason=fields.text("reason", limit=TEXT_LIMIT),
        models=models,
        files=records.parse_files(fields),
    )


@dataclass(frozen=True)
class ModelRecord:
    """`model.json`: the fields of a model that snapshots refer to.

    Attributes:
        session: id of the session.
        digest: of the model, which is its folder's name.
        files: of its folder.
    """

    session: str
    digest: str
    files: tuple[FileRecord, ...] = ()

    def to_bytes(self) -> bytes:
        """Returns the record as written to disk."""
        files = {file.name: records.file_to_json(file) for file in self.files}
        fields = {"session": self.session, "model": self.digest, "files": files}
        return _checked("model", fields, functools.partial(parse_model, session=self.session))


def parse_model(data: bytes, path: object, *, session: str | None = None) -> ModelRecord:
    """Returns the record of a `model.json`; raises DamagedError, FormatError, also of another session."""
    fields = sealed.unseal(data, "model", path=path)
    _check_session(fields, session)
    return ModelRecord(fields.id("session"), fields.id("model"), records.parse_files(fields))


@dataclass(frozen=True)
class ClosedRecord:
    """`closed.json`: how a session ended.

    Attributes:
        session: id of the session.
        how: "closed", "trigger", "error" (what its env raised ended it), "killed": its process was gone, or "refused":
            the disk refused to note how its recorder ended it.
        text: for people.
        closed: when [s since 1970, UTC].
        rows: (first, stop) of the calls of `step` while it was recorded, in parts or lost; None if nobody knows.
        parts: number of the last one.
        snapshots: number of the last one.
        seconds: from the first part's start to the last one's end.
    """

    session: str
    how: str
    text: str
    closed: float
    rows: Span | None
    parts: int
    snapshots: int
    seconds: float

    def to_bytes(self) -> bytes:
        """Returns the record as written to disk."""
        fields = {
            **vars(self),
            "closed": sealed.time_to_json(self.closed),
            "rows": None if self.rows is None else list(self.rows),
            "seconds": float(self.seconds),
        }
        return _checked("closed", fields, functools.partial(parse_closed, session=self.session))


def parse_closed(data: bytes, path: object, *, session: str | None = None) -> ClosedRecord:
    """Returns the record of a `closed.json`; raises DamagedError, FormatError, also of another session."""
    fields = sealed.unseal(data, "closed", path=path)
    _check_session(fields, session)
    return ClosedRecord(
        session=fields.id("session"),
        how=_one_of(fields, "how", ENDINGS),
        text=fields.text("text", limit=TEXT_LIMIT),
        closed=fields.time("closed"),
        rows=fields.optional("rows", functools.partial(_span, fields)),
        parts=fields.integer("parts", maximum=99_999_999),
        snapshots=fields.integer("snapshots", maximum=99_999_999),
        seconds=fields.number("seconds"),
    )


def missing_rows(record: SessionRecord, parts: Sequence[PartRecord], closed: ClosedRecord | None) -> list[range]:
    """Returns the rows that were lost, as far as they are known: between parts, and before and behind all of them.

    Args:
        record: of the session.
        parts: all of it, in order.
        closed: how it ended, if it has.
    """
    first = 0 if record.mode == "continuous" else parts[0].rows[0] if parts else 0
    first, stop = (first, 0) if closed is None or closed.rows is None else closed.rows
    missing = []
    for start, end in [*(part.rows for part in parts), (stop, stop)]:
        if first < start:
            missing.append(range(first, start))
        first = max(first, end)
    return missing


def _checked(
    record: str, fields: Mapping[str, Any], parse: Callable[[bytes, object], object], *, limit: int = RECORD_LIMIT
) -> bytes:
    data = records.sealed_record(record, fields)
    if len(data) > limit:
        raise ConfigurationError(f"a {record} record needs {len(data)} bytes and may have {limit}")
    records.check_readable(parse, data, f"the {record} record of a session")
    return data


def _check_session(fields: sealed.Fields, session: str | None) -> None:
    if session is not None and fields.id("session") != session:
        raise FormatError(f"{fields.path} belongs to session {fields.id('session')}: a folder was copied from there")


def _span(fields: sealed.Fields, key: str) -> Span:
    values = fields.integers(key, limit=2)
    if len(values) != 2 or values[0] > values[1]:
        raise fields.wrong(key, "where it begins and where it ends")
    return values[0], values[1]


def _one_of(fields: sealed.Fields, key: str, allowed: tuple[str, ...]) -> str:
    value = fields.text(key)
    if value not in allowed:
        raise fields.wrong(key, f"one of {', '.join(allowed)}")
    return value


def _link_to_json(link: LinkRecord) -> dict[str, Any]:
    return {
        "name": link.name,
        "command": list(link.command),
        "reading": list(link.reading),
        "transport": link.transport,
    }


def _parse_link(fields: sealed.Fields) -> LinkRecord:
    return LinkRecord(
        name=fields.text("name", limit=200),
        command=fields.texts("command"),
        reading=fields.texts("reading"),
        transport=fields.text("transport"),
    )


def _parse_origin(fields: sealed.Fields, key: str) -> OriginRecord:
    entry = fields.object(key)
    return OriginRecord(
        checkpoint=entry.id("checkpoint"),
        run=entry.text("run", names.RUN_NAME),
        seq=entry.integer("seq", minimum=1),
        step=entry.integer("step"),
    )
