"""The records of a store and its checkpoints as frozen values; FORMAT.md describes each with an example.

Every record has `to_bytes()`; `parse_*` reads one back strictly: digest, types, bounds and the rules that tie fields.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from simckpt.errors import ConfigurationError, FormatError
from simckpt.storage import sealed

COMMIT_LIMIT = 4096  # [bytes]; listing thousands of checkpoints reads one such record each
RECORD_LIMIT = 1 << 20  # [bytes] of store.json, run.json and a writer's owner.json
REASON_LIMIT = 500  # [characters] of why a checkpoint was pruned

KINDS = ("save", "rollback", "import", "exception")
LOST = "lost"  # the kind of a tombstone whose checkpoint's record could not be read: a repair has put that aside
SHARDS_FILE = "shards.json"
FILE_NAME = re.compile(r"state\.h5|leaves\.json|shards\.json|shard-[0-9]{5}-of-[0-9]{5}\.h5|leaves-[0-9]{5}\.json")
MAX_SHARDS = 16_384  # of one checkpoint; names have five digits, and a folder two files for each
SHARDS = "shards"  # the feature that the commit record of a checkpoint of several ranks requires


@dataclass(frozen=True)
class StoreRecord:
    """`store.json`: what makes a folder a store.

    Attributes:
        id: random identity.
        created: [s since 1970, UTC].
        requires: features without which a reader must refuse the store.
    """

    id: str
    created: float
    requires: tuple[str, ...] = ()

    def to_bytes(self) -> bytes:
        """Returns the record as written to disk."""
        fields = {"requires": list(self.requires), "id": self.id, "created": sealed.time_to_json(self.created)}
        return sealed.seal("store", fields)


def parse_store(data: bytes, path: object) -> StoreRecord:
    """Returns the record of a `store.json`; raises DamagedError, FormatError or UnsupportedFormatError."""
    fields = sealed.unseal(data, "store", path=path)
    return StoreRecord(fields.id("id"), fields.time("created"), fields.texts("requires"))


@dataclass(frozen=True)
class Shard:
    """Which of several ranks writes a part of a checkpoint.

    Attributes:
        number: of the rank, from 0 on.
        count: how many ranks there are.
    """

    number: int
    count: int

    def __post_init__(self) -> None:
        if not 0 <= self.number < self.count <= MAX_SHARDS:
            raise ConfigurationError(
                f"there is no shard {self.number} of {self.count}: a checkpoint has 1 to {MAX_SHARDS}, from 0 on",
                keys=["shard"],
            )

    @property
    def state_file(self) -> str:
        """The name of the file with its arrays."""
        return f"shard-{self.number:05d}-of-{self.count:05d}.h5"

    @property
    def index_file(self) -> str:
        """The name of the index of that file."""
        return f"leaves-{self.number:05d}.json"


def shards_of(count: int) -> tuple[Shard, ...]:
    """Returns all shards of a checkpoint of so many ranks."""
    return tuple(Shard(number, count) for number in range(count))


@dataclass(frozen=True)
class FileRecord:
    """A file of a checkpoint, as its commit record vouches for it.

    Attributes:
        name: within the checkpoint's folder.
        size: [bytes].
        digest: of the whole file if `covers` is "file"; of the bytes outside of all leaves, in order, if "metadata":
            a leaf's own digest is in the index, so that every byte of a file is covered exactly once.
        covers: "file" or "metadata".
    """

    name: str
    size: int
    digest: str
    covers: str


@dataclass(frozen=True)
class CommitDraft:
    """What the caller knows of a checkpoint before it is written.

    Attributes:
        parent: id of the checkpoint it continues, or None for a run's first.
        step: [env steps] or whatever the training loop counts.
        metrics: {name: float}; NaN and infinities are kept.
        kind: "save", "rollback", "import", or "exception" for a post-mortem, which is never the head.
        versions: {package: version} of the process that saves.
        host: the machine that saves.
        rollback: for the kind "rollback" alone: {"abandoned": id, "level": int, "changes": {...},
            "reason": text}; `changes["hyperparameters"]` holds {key: new value}.
        start: id of the record of the start that saves, `starts/<id>.json`.
        duration: from the moment at which the save was due until just before its commit [s].
    """

    parent: str | None
    step: int
    metrics: Mapping[str, float] = field(default_factory=dict)
    kind: str = "save"
    versions: Mapping[str, str] = field(default_factory=dict)
    host: str = ""
    rollback: Mapping[str, Any] | None = None
    start: str | None = None
    duration: float = 0.0


@dataclass(frozen=True)
class CommitRecord:
    """`commit.json` of a checkpoint.

    Attributes:
        id: random identity.
        run: id of its run.
        seq: commit number in the run, consecutive from 1; also the folder's name.
        parent, kind, step, metrics, versions, host, rollback, start, duration: see `CommitDraft`.
        created: [s since 1970, UTC].
        files: of its folder, with sizes and digests.
        segments: how many segments it refers to; its index names them.
        size: what it added to the store when it was saved, without this record [bytes].
        shards: how many ranks wrote it, whose files `shards.json` names; 0 if it has one state file and one index.
        shards_size: of the files that `shards.json` names [bytes].
    """

    id: str
    run: str
    seq: int
    parent: str | None
    kind: str
    step: int
    created: float
    metrics: Mapping[str, float] = field(default_factory=dict)
    files: tuple[FileRecord, ...] = ()
    segments: int = 0
    versions: Mapping[str, str] = field(default_factory=dict)
    host: str = ""
    rollback: Mapping[str, Any] | None = None
    start: str | None = None
    duration: float = 0.0
    size: int = 0
    shards: int = 0
    shards_size: int = 0

    @property
    def nbytes(self) -> int:
        """The size of all files in its folder but this record [bytes]."""
        return sum(file.size for file in self.files) + self.shards_size

    @property
    def state_files(self) -> tuple[str, ...]:
        """The names of the files with its arrays."""
        if self.shards:
            return tuple(shard.state_file for shard in shards_of(self.shards))
        return tuple(file.name for file in self.files if file.covers == "metadata")

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all its files but this record: indexes, then what names those of several ranks, then arrays.

        The first of the files with arrays is the last of all: a checkpoint without it is not here.
        """
        own = tuple(file.name for file in self.files if file.covers == "file")
        indexes = tuple(shard.index_file for shard in shards_of(self.shards)) if self.shards else ()
        return (*indexes, *own, *reversed(self.state_files))

    def file(self, name: str) -> FileRecord:
        """Returns the record of one of the checkpoint's files; raises FormatError if there is none."""
        for record in self.files:
            if record.name == name:
                return record
        raise FormatError(f"checkpoint {self.id} has no file {name!r}")

    def to_bytes(self) -> bytes:
        """Returns the record as written to disk, at most 4 KB.

        Raises:
            ConfigurationError: the metrics, versions or changes do not fit; or a record that `parse_commit` would
                refuse, such as a step beyond 2**63.
        """
        feature = {"requires": [SHARDS]} if self.shards else {}
        shards = {"shards": {"count": self.shards, "size": self.shards_size}} if self.shards else {}
        fields = {
            **feature,
            **_lineage_to_json(self),
            **shards,
            "files": {file.name: file_to_json(file) for file in self.files},
            "segments": self.segments,
            "size": self.size,
            "duration": float(self.duration),
            "start": self.start,
            "versions": dict(self.versions),
            "host": self.host,
        }
        data = sealed_record("commit", fields)
        if len(data) > COMMIT_LIMIT:
            raise ConfigurationError(
                f"the commit record of step {self.step} needs {len(data)} bytes and may have {COMMIT_LIMIT}: "
                f"give it fewer metrics than {len(self.metrics)}",
                keys=list(self.metrics),
            )
        check_readable(functools.partial(parse_commit, seq=self.seq), data, f"the commit record of step {self.step}")
        return data


@dataclass(frozen=True)
class TombstoneRecord:
    """`commit.json` of a checkpoint that was pruned: its place in the lineage, without its state.

    Attributes:
        id, run, seq, parent, kind, step, created, metrics, rollback: of the checkpoint that was here.
        pruned: when [s since 1970, UTC].
        reason: why, for people.
    """

    id: str
    run: str
    seq: int
    parent: str | None
    kind: str
    step: int
    created: float
    metrics: Mapping[str, float]
    pruned: float
    reason: str
    rollback: Mapping[str, Any] | None = None

    def to_bytes(self) -> bytes:
        """Returns the record as written to disk; see `tombstone_of` for its size."""
        fields = {
            **_lineage_to_json(self),
            "pruned": sealed.time_to_json(self.pruned),
            "reason": self.reason,
        }
        return sealed.seal("tombstone", fields)


def tombstone_of(record: CommitRecord, *, pruned: float, reason: str) -> TombstoneRecord:
    """Returns what replaces a checkpoint's record, its reason cut so that it fits into 4 KB like the other."""
    tombstone = TombstoneRecord(
        id=record.id,
        run=record.run,
        seq=record.seq,
        parent=record.parent,
        kind=record.kind,
        step=record.step,
        created=record.created,
        metrics=record.metrics,
        pruned=pruned,
        reason=reason[:REASON_LIMIT],
        rollback=record.rollback,
    )
    # many metrics leave less room; without any reason it is shorter than the commit record was
    while len(tombstone.to_bytes()) > COMMIT_LIMIT and tombstone.reason:
        tombstone = replace(tombstone, reason=tombstone.reason[: len(tombstone.reason) // 2])
    return tombstone


def lost_record(id: str, *, run: str, seq: int, now: float, reason: str) -> TombstoneRecord:
    """Returns what takes the place of a record that cannot be read: its number stays taken, its parent is unknown.

    Args:
        id: that of the lost record where it is known, else a new one.
        run: id of the run.
        seq: commit number.
        now: [s since 1970, UTC].
        reason: for people.
    """
    return TombstoneRecord(
        id=id,
        run=run,
        seq=seq,
        parent=None,
        kind=LOST,
        step=0,
        created=now,
        metrics={},
        pruned=now,
        reason=reason[:REASON_LIMIT],
    )


def _lineage_to_json(record: CommitRecord | TombstoneRecord) -> dict[str, Any]:
    rollback = {} if record.rollback is None else {"rollback": values_to_json("change", record.rollback)}
    return {
        "id": record.id,
        "run": record.run,
        "seq": record.seq,
        "parent": record.parent,
        "kind": record.kind,
        "step": record.step,
        "created": sealed.time_to_json(record.created),
        "metrics": _metrics_to_json(record.metrics),
        **rollback,
    }


def sealed_record(record: str, fields: Mapping[str, Any]) -> bytes:
    """Returns the bytes of a record; raises ConfigurationError for values that JSON cannot hold."""
    try:
        return sealed.seal(record, fields)
    except (TypeError, ValueError) as error:
        raise ConfigurationError(f"a {record} record cannot hold these values: {error}") from error


def check_readable(parse: Callable[[bytes, object], object], data: bytes, what: str) -> None:
    """Raises ConfigurationError for a record that its reader would refuse: it must not get a name in the store."""
    try:
        parse(data, what)
    except FormatError as error:
        raise ConfigurationError(f"no reader would take {error}") from error


def parse_commit(data: bytes, path: object, *, seq: int, run_id: str | None = None) -> CommitRecord | TombstoneRecord:
    """Returns the record of a `commit.json`: of a checkpoint, or of what was one.

    Args:
        data: the whole file.
        path: where it was, for messages.
        seq: the number that its folder's name gives.
        run_id: id of the run it lies in; None if that is not known.

    Raises:
        DamagedError, UnsupportedFormatError, FormatError: as in `sealed.unseal`; also a number other than `seq` or a
            run other than `run_id`.
    """
    if b'"format": "simckpt tombstone"' in data[:64]:
        fields = sealed.unseal(data, "tombstone", path=path)
    else:
        fields = sealed.unseal(data, "commit", path=path)
    if fields.integer("seq", minimum=1) != seq:
        raise FormatError(f"{path} is the record of commit {fields.integer('seq')}: a folder was renamed or copied")
    if run_id is not None and fields.id("run") != run_id:
        raise FormatError(f"{path} is the record of a commit of run {fields.id('run')}: a folder was copied from there")
    common: dict[str, Any] = {
        "id": fields.id("id"),
        "run": fields.id("run"),
        "seq": seq,
        "parent": fields.optional("parent", fields.id),
        "kind": fields.text("kind"),
        "step": fields.integer("step"),
        "created": fields.time("created"),
        "metrics": fields.floats("metrics"),
        "rollback": fields.optional("rollback", fields.values),
    }
    is_tombstone = fields.text("format") == "simckpt tombstone"
    if common["kind"] not in ((*KINDS, LOST) if is_tombstone else KINDS):
        raise fields.wrong("kind", f"one of {', '.join(KINDS)}")
    if is_tombstone:
        return TombstoneRecord(**common, pruned=fields.time("pruned"), reason=fields.text("reason"))
    files = parse_files(fields)
    count, shards_size = _parse_shards(fields, files)
    old = fields.text("version") == "0.1"  # it knew no segments, sizes and durations
    return CommitRecord(
        **common,
        files=files,
        segments=0 if old else fields.integer("segments"),
        versions=fields.string_map("versions"),
        host=fields.text("host"),
        start=fields.optional("start", fields.id),
        duration=0.0 if old else fields.number("duration"),
        size=sum(file.size for file in files) if old else fields.integer("size"),
        shards=count,
        shards_size=shards_size,
    )


def _parse_shards(fields: sealed.Fields, files: tuple[FileRecord, ...]) -> tuple[int, int]:
    """Returns of how many ranks a checkpoint is, or 0, and the size of their files [bytes]."""
    named = {(file.name, file.covers) for file in files}
    if "shards" not in fields.content:
        if (SHARDS_FILE, "file") in named or (SHARDS_FILE, "metadata") in named:
            raise fields.wrong("shards", f"there, for {SHARDS_FILE} is")
        return 0, 0
    if SHARDS not in (fields.optional("requires", fields.texts) or ()):
        raise fields.wrong("requires", f"a list with {SHARDS!r}")
    if named != {(SHARDS_FILE, "file")}:
        raise fields.wrong("files", f"{SHARDS_FILE} alone, which names the others")
    entry = fields.object("shards")
    return entry.integer("count", minimum=1, maximum=MAX_SHARDS), entry.integer("size")


def parse_files(fields: sealed.Fields) -> tuple[FileRecord, ...]:
    """Returns the files that a record vouches for; raises FormatError."""
    files = []
    entries = fields.object("files")
    for name in entries.content:
        if not FILE_NAME.fullmatch(name):
            raise FormatError(f"{fields.path}: {name[:80]!r} is not the name of a checkpoint's file")
        entry = entries.object(name)
        covers = "file" if "digest" in entry.content else "metadata"
        digest = entry.digest("digest" if covers == "file" else "metadata")
        files.append(FileRecord(name, entry.integer("size"), digest, covers))
    return tuple(files)


def file_to_json(file: FileRecord) -> dict[str, Any]:
    """Returns what a record says of one of its files."""
    return {"size": file.size, "digest" if file.covers == "file" else "metadata": file.digest}


def _metrics_to_json(metrics: Mapping[str, float]) -> dict[str, Any]:
    return values_to_json("metric", {name: float(value) for name, value in metrics.items()})


def values_to_json(what: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns typed values as JSON; raises ConfigurationError, naming it, for one that a record cannot hold.

    Args:
        what: each of them is, for messages.
        values: {name: value}.
    """
    result = {}
    for name, value in values.items():
        if not isinstance(name, str):
            raise ConfigurationError(f"the name of a {what} is a string, got {name!r}", keys=[str(name)])
        try:
            result[name] = sealed.to_json(value)
        except TypeError as error:
            raise ConfigurationError(f"the {what} {name!r} cannot be kept in a record: {error}", keys=[name]) from error
    return result
