"""What a store knows of its archive: where it is, and of which checkpoints it holds a verified copy; see FORMAT.md.

A checkpoint that is archived has a record `runs/<run>/archived/<seq>.json`. It is evicted if it has that record and no
`state.h5`, nor, of several ranks, that file of the first: its state, and the segments that no other checkpoint needs
here, are in the archive alone.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from simckpt.errors import DamagedError, FormatError, StorageError, StoreError
from simckpt.storage import names, reader, records, sealed, state_file, work

FOLDER = "archived"  # of a run
ARCHIVE, ARCHIVE_FILE = "archive", "archive.json"  # of the store
URL_LIMIT = 2000  # [characters]
ARCHIVED_LIMIT = 1 << 25  # [bytes] of the record of one checkpoint: that of many ranks names all their files
_FIRST = re.compile(r"shard-00000-of-[0-9]{5}\.h5")
_FILE = re.compile(r"([0-9]{8})\.json")
_SECRET = re.compile(r"://[^/]*@|[?#]")


@dataclass(frozen=True)
class ArchiveRecord:
    """`archive/archive.json`: where a store has its archive. It never holds credentials.

    Attributes:
        id: of the archive, random; the archive has it, too, so that one that was moved is known again. None until it
            was reached for the first time.
        url: such as "s3://bucket/prefix".
        created: [s since 1970, UTC].
        store: id of the store, which the archive asks for: a repair has it from here if `store.json` is damaged. None
            in records of earlier versions.
    """

    id: str | None
    url: str
    created: float
    store: str | None = None

    def to_bytes(self) -> bytes:
        """Returns the record as written to disk."""
        if _SECRET.search(self.url):
            raise FormatError("the address of an archive has a user or a query, which may be a secret: it is not kept")
        created = sealed.time_to_json(self.created)
        return sealed.seal("archive", {"id": self.id, "url": self.url, "created": created, "store": self.store})


def parse_archive(data: bytes, path: object) -> ArchiveRecord:
    """Returns the record of an `archive.json`; raises DamagedError, FormatError or UnsupportedFormatError."""
    fields = sealed.unseal(data, "archive", path=path)
    url = fields.text("url", limit=URL_LIMIT)
    if _SECRET.search(url):
        raise FormatError(f"{path}: the address of the archive has a user or a query")
    identity, store = fields.optional("id", fields.id), fields.optional("store", fields.id)
    return ArchiveRecord(identity, url, fields.time("created"), store)


@dataclass(frozen=True)
class Copied:
    """A file as it lies in an archive.

    Attributes:
        size: [bytes].
        digest: of the whole file, `sha256:<hex>`.
    """

    size: int
    digest: str


@dataclass(frozen=True)
class ArchivedRecord:
    """`archived/<seq>.json`: what of one checkpoint lies in the archive.

    Attributes:
        checkpoint: its id.
        run: id of its run.
        seq: its commit number.
        archive: id of the archive.
        files: {name: file} of those of its folder, `commit.json` among them.
        segments: {id: file} of those that it uses.
    """

    checkpoint: str
    run: str
    seq: int
    archive: str
    files: Mapping[str, Copied]
    segments: Mapping[str, Copied]

    def to_bytes(self) -> bytes:
        """Returns the record as written to disk and to the archive."""
        fields = {
            "checkpoint": self.checkpoint,
            "run": self.run,
            "seq": self.seq,
            "archive": self.archive,
            "files": _to_json(self.files),
            "segments": _to_json(self.segments),
        }
        return sealed.seal("archived", fields)


def parse_archived(data: bytes, path: object, *, seq: int) -> ArchivedRecord:
    """Returns the record of an archived checkpoint; raises DamagedError, FormatError or UnsupportedFormatError.

    Args:
        data: the whole file.
        path: where it was, for messages.
        seq: the number that its name gives.
    """
    fields = sealed.unseal(data, "archived", path=path)
    if fields.integer("seq", minimum=1) != seq:
        raise FormatError(f"{path} is the record of commit {fields.integer('seq')}: a file was renamed or copied")
    files, segments = _from_json(fields, "files"), _from_json(fields, "segments")
    if not all(records.FILE_NAME.fullmatch(name) or name == "commit.json" for name in files):
        raise fields.wrong("files", "the files of a checkpoint")
    if len(segments) > work.SEGMENTS_LIMIT or not all(map(names.ID.fullmatch, segments)):
        raise fields.wrong("segments", "ids of segments")
    return ArchivedRecord(fields.id("checkpoint"), fields.id("run"), seq, fields.id("archive"), files, segments)


def _to_json(files: Mapping[str, Copied]) -> dict[str, dict[str, int | str]]:
    return {name: {"size": file.size, "digest": file.digest} for name, file in files.items()}


def _from_json(fields: sealed.Fields, key: str) -> dict[str, Copied]:
    entries = fields.object(key)
    found = {name: entries.object(name) for name in entries.content}
    return {name: Copied(entry.integer("size"), entry.digest("digest")) for name, entry in found.items()}


def file_name(seq: int) -> str:
    """Returns the name of the record of an archived checkpoint."""
    return f"{names.sequence_name(seq)}.json"


def numbers(root: Path, run: str) -> set[int]:
    """Returns the commit numbers of a run that have a record here, damaged or not.

    Raises:
        StorageError: the folder cannot be looked at for the moment.
    """
    try:
        with reader.opened_folder(root, "runs", run, FOLDER) as folder:
            found = [_FILE.fullmatch(name) for name in os.listdir(folder)]  # noqa: PTH208 a descriptor
    except FileNotFoundError:
        return set()
    except StorageError:
        raise
    except OSError as error:
        raise StorageError(f"the archived checkpoints of run {run!r} cannot be listed: {error.strerror}") from error
    return {int(match[1]) for match in found if match and int(match[1])}


def read_archived(root: Path, run: str, seq: int) -> ArchivedRecord | None:
    """Returns the record of an archived checkpoint, or None if it has none.

    Raises:
        DamagedError, FormatError: it cannot be trusted.
    """
    path = root / "runs" / run / FOLDER / file_name(seq)
    try:
        data = reader.read_small(root, "runs", run, FOLDER, path.name, limit=ARCHIVED_LIMIT, path=path)
    except FileNotFoundError:
        return None
    return parse_archived(data, path, seq=seq)


def evicted(root: Path, run: str) -> set[int]:
    """Returns the commit numbers of a run whose state is in the archive alone.

    Raises:
        StorageError: the folders cannot be looked at for the moment.
    """
    found = set()
    archived = numbers(root, run)
    if archived:
        with (
            contextlib.suppress(FileNotFoundError),
            reader.opened_folder(root, "runs", run, "checkpoints") as checkpoints,
        ):
            for seq in archived:
                if not _has_state(checkpoints, names.sequence_name(seq)):
                    found.add(seq)
    return found


def _has_state(checkpoints: int, name: str) -> bool:
    try:
        os.stat(f"{name}/{state_file.STATE_FILE}", dir_fd=checkpoints, follow_symlinks=False)
    except FileNotFoundError:
        pass
    except NotADirectoryError:
        return False
    except OSError as error:
        raise StorageError(f"{name}/{state_file.STATE_FILE} cannot be looked at: {error.strerror}") from error
    else:
        return True
    try:
        with reader.opened_folder(checkpoints, name) as folder, os.scandir(folder) as entries:
            return any(is_first_state(entry.name) for entry in entries)
    except (FileNotFoundError, FormatError):
        return False
    except StorageError:
        raise
    except OSError as error:
        raise StorageError(f"{name} cannot be looked at: {error.strerror}") from error


def is_first_state(name: str) -> bool:
    """Returns whether a file of a checkpoint is the first of those with arrays, without which it is evicted."""
    return name == state_file.STATE_FILE or _FIRST.fullmatch(name) is not None


def store_of(root: Path) -> str | None:
    """Returns the id of a store as the record of its archive has it, or None: for where `store.json` is damaged."""
    with contextlib.suppress(StoreError):
        record = read_archive(root)
        return None if record is None else record.store
    return None


def read_archive(root: Path) -> ArchiveRecord | None:
    """Returns where a store has its archive, or None if it has none.

    Raises:
        DamagedError, FormatError: the record cannot be trusted.
    """
    path = root / ARCHIVE / ARCHIVE_FILE
    try:
        data = reader.read_small(root, ARCHIVE, ARCHIVE_FILE, limit=records.RECORD_LIMIT, path=path)
    except FileNotFoundError:
        return None
    except DamagedError as error:
        raise DamagedError(f"{error}; name the archive anew by Store.archive(url)", path=path) from error
    return parse_archive(data, path)
