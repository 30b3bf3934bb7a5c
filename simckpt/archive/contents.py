"""Where things lie in an archive: the names of a store, so that a copy of an archive is a store; and what is there."""

from __future__ import annotations

import contextlib
import functools
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from simckpt.archive.objects import Objects, lost
from simckpt.errors import ArchiveDamagedError, ConflictError, DamagedError, FormatError, UnsupportedFormatError
from simckpt.storage import archived, names, sealed, segments, sessions
from simckpt.storage.archived import ArchivedRecord, Copied
from simckpt.storage.archived_sessions import ArchivedSession, parse_archived_session
from simckpt.storage.records import FILE_NAME, CommitRecord, StoreRecord, TombstoneRecord, parse_commit, parse_store
from simckpt.storage.session_records import SessionRecord, parse_session
from simckpt.storage.store_reader import COMMIT_FILE, STORE_FILE

Record = CommitRecord | TombstoneRecord
_Record = TypeVar("_Record")
_RUN = re.compile(r"runs/([^/]+)/run\.json")
_CHECKPOINT = re.compile(r"runs/([^/]+)/checkpoints/([0-9]{8})/commit\.json")
_MANIFEST = re.compile(r"runs/([^/]+)/archived/([0-9]{8})\.json")
_SEGMENT = re.compile(r"segments/([0-9a-f]{32})\.h5")
_SESSION = re.compile(r"sessions/([^/]+)/(closed|archived)\.json")


def file_object(run: str, seq: int, file: str) -> str:
    """Returns the name of the object of a checkpoint's file."""
    return f"runs/{run}/checkpoints/{names.sequence_name(seq)}/{file}"


def manifest_object(run: str, seq: int) -> str:
    """Returns the name of the object that says what belongs to a checkpoint: the first that is written of it."""
    return f"runs/{run}/{archived.FOLDER}/{archived.file_name(seq)}"


def segment_object(identity: str) -> str:
    """Returns the name of the object of a segment."""
    return f"{segments.FOLDER}/{segments.file_name(identity)}"


def session_object(name: str, file: str) -> str:
    """Returns the name of the object of a session's file; of `archived.json` it is the manifest, written first."""
    return f"{sessions.SESSIONS}/{name}/{file}"


@dataclass(frozen=True)
class Deed:
    """`store.json` of an archive: its identity, and whose it is.

    Attributes:
        id: of the archive.
        owner: id of the store that moves its checkpoints there and alone removes any; None for a place to push to.
    """

    id: str
    owner: str | None


def read_deed(objects: Objects) -> Deed | None:
    """Returns whose an archive is, or None if there is none yet; raises as `objects` and `records.parse_store` do."""
    data = objects.read(STORE_FILE)
    if data is None:
        return None
    path = f"{objects.place}/{STORE_FILE}"
    try:
        fields = sealed.unseal(data, "store", path=path)
    except DamagedError:
        raise lost(objects.place, STORE_FILE, "is damaged") from None
    # a store that is somebody's folder of runs must not be taken for an archive and changed
    if "archive_of" not in fields.content:
        raise ConflictError(f"{objects.place} is a store and no archive: give another place")
    return Deed(parse_store(data, path).id, fields.optional("archive_of", fields.id))


def write_deed(objects: Objects, *, owner: str | None) -> Deed:
    """Returns whose an archive is, once it is somebody's; whoever comes first has it.

    Where the record of a place that runs are pushed to is damaged or gone, it is written again.

    Raises:
        ArchiveDamagedError: it is damaged, and what is there does not say what its id was.
        ConflictError: there are other things at that place.
        ConfigurationError: the object store cannot tell who comes first.
    """
    damaged = None
    try:
        deed = read_deed(objects)
    except ArchiveDamagedError as error:
        deed, damaged = None, error
    if deed is not None:
        return deed
    ids = ids_by_manifests(objects) if owner is None else set()
    if len(ids) == 1:
        return rewrite_deed(objects, Deed(ids.pop(), owner))
    if damaged is not None:
        raise damaged
    foreign = [name for name in objects.list() if not name.startswith("tmp/")]
    if foreign and STORE_FILE not in foreign:
        raise ConflictError(f"{objects.place} is not empty ({foreign[0]}) and no archive: give a place of its own")
    objects.check_exclusive()
    data = _deed_bytes(Deed(names.random_id(), owner))
    if objects.create(STORE_FILE, data) and objects.read(STORE_FILE) != data:
        objects.put(STORE_FILE, data)
    return _read_again(objects)


def ids_by_manifests(objects: Objects) -> set[str]:
    """Returns the ids of an archive by its manifests, for where its record is damaged; none of a store's folder."""
    there = Listing(objects.list())
    found = set()
    if not any(name.startswith(f"{archived.ARCHIVE}/") for name in there.sizes):
        for run, seq in there.manifests():
            with contextlib.suppress(ArchiveDamagedError):
                record = read_manifest(objects, run, seq)
                found |= set() if record is None else {record.archive}
        for name in there.sessions(begun=True):
            with contextlib.suppress(ArchiveDamagedError):
                noted = read_session_manifest(objects, name)
                found |= set() if noted is None else {noted.archive}
    return found


def require_sessions(objects: Objects) -> None:
    """Has a place say that its readers must know sessions, as a store does from its first one with an origin on.

    Raises:
        ArchiveDamagedError: the record of the place is damaged.
    """
    data = objects.read(STORE_FILE)
    if data is not None:
        try:
            fields = sealed.unseal(data, "store", path=f"{objects.place}/{STORE_FILE}")
        except DamagedError:
            raise lost(objects.place, STORE_FILE, "is damaged") from None
        requires = fields.texts("requires")
        if sessions.FEATURE not in requires:
            content = {
                key: value for key, value in fields.content.items() if key not in ("format", "version", "digest")
            }
            objects.put(STORE_FILE, sealed.seal("store", {**content, "requires": [*requires, sessions.FEATURE]}))


def rewrite_deed(objects: Objects, deed: Deed) -> Deed:
    """Returns whose an archive is, after its record was written again."""
    # whether one of them has an origin is not asked: its record may be damaged as well
    requires = (sessions.FEATURE,) if Listing(objects.list()).sessions(begun=True) else ()
    objects.put(STORE_FILE, _deed_bytes(deed, requires))
    return _read_again(objects)


def _deed_bytes(deed: Deed, requires: tuple[str, ...] = ()) -> bytes:
    record = StoreRecord(deed.id, time.time(), requires)
    fields = {"id": record.id, "created": sealed.time_to_json(record.created), "archive_of": deed.owner}
    return sealed.seal("store", {"requires": list(record.requires), **fields})


def _read_again(objects: Objects) -> Deed:
    found = read_deed(objects)
    if found is None:
        raise lost(objects.place, STORE_FILE, "is gone again right after it was written")
    return found


@dataclass
class Listing:
    """What is in an archive, by one listing; kept up to date by those who write.

    Attributes:
        sizes: {name: size} [bytes].
    """

    sizes: dict[str, int] = field(default_factory=dict)

    def commits(self, run: str) -> list[int]:
        """Returns the numbers of the commits of a run."""
        return self._numbers(_CHECKPOINT, run)

    def manifests(self, run: str | None = None) -> list[tuple[str, int]]:
        """Returns (run, number) of what was begun to be written, of one run or of all."""
        found = [match for name in self.sizes if (match := _MANIFEST.fullmatch(name))]
        return sorted((match[1], int(match[2])) for match in found if run in (None, match[1]))

    def checkpoints(self) -> list[tuple[str, int]]:
        """Returns (run, number) of the commits that have a state there; what was pruned has none."""
        found = [match for name in self.sizes if (match := _CHECKPOINT.fullmatch(name))]
        there = [(match[1], int(match[2])) for match in found]
        parts = (name.rpartition("/") for name in self.sizes)
        with_state = {folder for folder, _, name in parts if archived.is_first_state(name)}
        return [each for each in there if file_object(*each, COMMIT_FILE).rpartition("/")[0] in with_state]

    def runs(self) -> list[str]:
        """Returns the names of the runs, also of those whose record is gone."""
        found = {match[1] for name in self.sizes if (match := _RUN.fullmatch(name) or _CHECKPOINT.fullmatch(name))}
        return sorted(filter(names.is_run_name, found))

    def sessions(self, *, begun: bool = False) -> list[str]:
        """Returns the names of the sessions that are there, their ends; or also of those that were begun."""
        found = {
            match[1] for name in self.sizes if (match := _SESSION.fullmatch(name)) and (begun or match[2] == "closed")
        }
        return sorted(filter(names.is_run_name, found))

    def of_session(self, name: str) -> list[str]:
        """Returns the objects of a session: its last record first, its manifest last, in which order they go."""
        first, last = session_object(name, sessions.CLOSED_FILE), session_object(name, sessions.ARCHIVED_FILE)
        found = [each for each in self.sizes if each.startswith(session_object(name, ""))]
        return sorted(found, key=lambda each: (each == last, each != first, each))

    def has_session(self, record: ArchivedSession) -> bool:
        """Returns whether all that a record names is there, in its size."""
        return all(self.has(session_object(record.name, file), copied) for file, copied in record.files.items())

    def segments(self) -> set[str]:
        """Returns the ids of the segments."""
        return {match[1] for name in self.sizes if (match := _SEGMENT.fullmatch(name))}

    def files(self, run: str, seq: int) -> list[str]:
        """Returns the objects of a checkpoint's files but its record: arrays first, then indexes."""
        prefix = file_object(run, seq, "")
        found = [name.removeprefix(prefix) for name in self.sizes if name.startswith(prefix)]
        ours = sorted((name for name in found if FILE_NAME.fullmatch(name)), key=lambda name: not name.endswith(".h5"))
        return [prefix + name for name in ours]

    def has(self, name: str, copied: Copied) -> bool:
        """Returns whether there is an object of that name and size."""
        return self.sizes.get(name) == copied.size

    def holds(self, run: str, record: ArchivedRecord) -> bool:
        """Returns whether all that a record names is there, in its size."""
        return all(self.has(name, copied) for name, copied in expected(record, run).items())

    def _numbers(self, pattern: re.Pattern[str], run: str) -> list[int]:
        found = [match for name in self.sizes if (match := pattern.fullmatch(name))]
        return sorted(int(match[2]) for match in found if match[1] == run)


def read_commit(objects: Objects, run: str, seq: int, *, run_id: str | None = None) -> tuple[Record, bytes] | None:
    """Returns the record of a commit in an archive and its bytes, or None; raises ArchiveDamagedError if damaged."""

    def parse(data: bytes, where: str) -> tuple[Record, bytes]:
        return parse_commit(data, where, seq=seq, run_id=run_id), data

    return _read(objects, file_object(run, seq, COMMIT_FILE), parse)


def read_manifest(objects: Objects, run: str, seq: int) -> ArchivedRecord | None:
    """Returns what belongs to a checkpoint in an archive, or None; raises ArchiveDamagedError if that is damaged."""
    return _read(objects, manifest_object(run, seq), functools.partial(archived.parse_archived, seq=seq))


def read_session_manifest(objects: Objects, name: str) -> ArchivedSession | None:
    """Returns what belongs to a session in an archive, or None; raises ArchiveDamagedError if that is damaged."""
    file = session_object(name, sessions.ARCHIVED_FILE)
    return _read(objects, file, functools.partial(parse_archived_session, name=name))


def read_session_there(objects: Objects, name: str) -> SessionRecord | None:
    """Returns the record of a session in an archive, or None; raises ArchiveDamagedError if it is damaged."""
    return _read(objects, session_object(name, sessions.SESSION_FILE), parse_session)


def _read(objects: Objects, name: str, parse: Callable[[bytes, str], _Record]) -> _Record | None:
    data = objects.read(name)
    if data is None:
        return None
    try:
        return parse(data, f"{objects.place}/{name}")
    except UnsupportedFormatError:
        raise
    except (DamagedError, FormatError):
        raise lost(objects.place, name, "is damaged") from None


def session_there(objects: Objects, name: str) -> str | None:
    """Returns the id of what is in an archive under a session's name, or None if nothing readable there says so."""
    for read in (read_session_manifest, read_session_there):
        with contextlib.suppress(ArchiveDamagedError):
            found = read(objects, name)
            if found is not None:
                return found.session if isinstance(found, ArchivedSession) else found.id
    return None


def expected(record: ArchivedRecord, run: str) -> Mapping[str, Copied]:
    """Returns {name: object} of all that belongs to an archived checkpoint but its manifest."""
    files = {file_object(run, record.seq, name): copied for name, copied in record.files.items()}
    return {segment_object(identity): copied for identity, copied in record.segments.items()} | files
