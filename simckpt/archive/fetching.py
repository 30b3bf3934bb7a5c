"""Brings a checkpoint back from an archive: every byte verified under a temporary name before it gets its own."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator
from pathlib import Path

from simckpt.archive import contents
from simckpt.archive.objects import Objects, lost
from simckpt.archive.uploading import describe
from simckpt.errors import CheckpointNotFoundError, DamagedError, StoreError
from simckpt.storage import StoreFiles, archived, segments
from simckpt.storage.archived import ArchivedRecord, Copied
from simckpt.storage.store_tiers import Incoming


def fetch(objects: Objects, files: StoreFiles, run: str, seq: int) -> list[str]:
    """Returns the names of the files that were brought back: those that are missing here, or damaged.

    Args:
        objects: of the archive.
        files: of the store.
        run: the run's name.
        seq: commit number.

    Raises:
        CheckpointNotFoundError: the archive does not have it.
        ArchiveDamagedError: the archive's copy is damaged or gone; what is here stays as it is.
        ArchiveUnavailableError: the archive cannot be reached; what is here stays as it is.
        StorageError: the disk refused.
    """
    record = _record(objects, files, run, seq)
    if record is None:
        raise CheckpointNotFoundError(f"checkpoint {seq} of run {run!r} is not in the archive {objects.place}")
    # announced before the look, so that no pruner frees what is here
    with files.incoming(run, uses=record.segments, made=record.segments) as incoming:
        paths = files.files_of(run, seq)
        wanted = [name for name, copied in record.files.items() if not is_here(paths[name], copied)]
        gone = [each for each, copied in record.segments.items() if not is_here(files.segment_file(each), copied)]
        for identity in gone:
            name = segments.file_name(identity)
            download(objects, files, contents.segment_object(identity), incoming, name, record.segments[identity])
        for name in wanted:
            download(objects, files, contents.file_object(run, seq, name), incoming, name, record.files[name])
        files.replace(run, seq, Incoming(incoming.folder, tuple(gone)), wanted)
    return [*map(segments.file_name, gone), *wanted]


def offered(objects: Objects, files: StoreFiles, run: str, seq: int) -> list[str]:
    """Returns the names of the objects that an archive has of a checkpoint, in their sizes; none if one is missing."""
    record, there = _record(objects, files, run, seq), contents.Listing(objects.list())
    return list(contents.expected(record, run)) if record is not None and there.holds(run, record) else []


def _record(objects: Objects, files: StoreFiles, run: str, seq: int) -> ArchivedRecord | None:
    with contextlib.suppress(DamagedError):
        record = archived.read_archived(files.path, run, seq)
        if record is not None:
            return record
    # of a copy that this store has not noted, or whose note is damaged: only if it is whole, which the commit says
    run_id = None
    with contextlib.suppress(StoreError):
        run_id = files.read_run(run).id
    found, commit = contents.read_manifest(objects, run, seq), contents.read_commit(objects, run, seq, run_id=run_id)
    return found if found is not None and commit is not None and commit[0].id == found.checkpoint else None


def is_here(path: Path, copied: Copied) -> bool:
    """Returns whether a file is there, with the bytes that the archive has."""
    try:
        return path.stat().st_size == copied.size and describe(path) == copied
    except OSError:
        return False


def download(objects: Objects, files: StoreFiles, name: str, incoming: Incoming, file: str, copied: Copied) -> None:
    """Writes an object into a file of a work folder, durably and verified.

    Raises:
        ArchiveDamagedError: it is gone, or not what was written there; tried twice, for the way may be at fault.
        ArchiveUnavailableError, StorageError: the archive or the disk refused.
    """
    for _ in range(2):
        hasher = hashlib.sha256()
        files.write_incoming(incoming, file, _digested(objects, name, copied.size, hasher), copied.size)
        if f"sha256:{hasher.hexdigest()}" == copied.digest:
            return
    raise lost(objects.place, name, "is not what was written there")


def _digested(objects: Objects, name: str, size: int, hasher: hashlib._Hash) -> Iterator[tuple[int, bytes]]:
    try:
        for offset, data in objects.portions(name, size):
            hasher.update(data)
            yield offset, data
    except FileNotFoundError:
        # not the disk's, which would take it for its own
        raise lost(objects.place, name, "is gone") from None
