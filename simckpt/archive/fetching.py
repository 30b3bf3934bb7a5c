"""Brings a checkpoint back from an archive: every byte verified under a temporary name before it gets its own."""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from simckpt.archive import contents
from simckpt.archive.objects import Objects, lost
from simckpt.archive.uploading import describe
from simckpt.errors import CheckpointNotFoundError, DamagedError, FormatError, StoreError
from simckpt.storage import StoreFiles, archived, quarantine, segments
from simckpt.storage.archived import ArchivedRecord, Copied
from simckpt.storage.store_tiers import Incoming

_TRIES = 3  # to bring a checkpoint back that others are evicting at the same time


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
    return fetch_record(objects, files, run, _record(objects, files, run, seq))


def fetch_record(objects: Objects, files: StoreFiles, run: str, record: ArchivedRecord) -> list[str]:
    """Does what `fetch` does, with what is known of the copy; raises as `fetch`."""
    folder, brought = files.folder_of(run, record.seq), list[str]()
    for _ in range(_TRIES):
        brought += _fetch(objects, files, run, record)
        # an eviction by another process may have gone on with the others until the first state was back
        if all(os.path.lexists(folder / name) for name in record.files):
            break
    return list(dict.fromkeys(brought))


def _fetch(objects: Objects, files: StoreFiles, run: str, record: ArchivedRecord) -> list[str]:
    seq = record.seq
    # announced before the look, so that no pruner frees what is here
    with files.incoming(run, uses=record.segments, made=record.segments) as incoming:
        wanted, gone = _missing(files, run, record)
        for identity in gone:
            name = segments.file_name(identity)
            download(objects, files, contents.segment_object(identity), incoming, name, record.segments[identity])
        for name in wanted:
            download(objects, files, contents.file_object(run, seq, name), incoming, name, record.files[name])
        files.replace(run, seq, Incoming(incoming.folder, tuple(gone)), wanted)
    return [*map(segments.file_name, gone), *wanted]


def offered(objects: Objects, files: StoreFiles, run: str, seq: int) -> list[str]:
    """Returns what `fetch` would, and raises as it does, after it has read these objects; changes nothing here."""
    record = _record(objects, files, run, seq)
    wanted, gone = _missing(files, run, record)
    expected = {contents.segment_object(each): record.segments[each] for each in gone}
    expected |= {contents.file_object(run, seq, name): record.files[name] for name in wanted}
    for name, copied in expected.items():
        # twice, as a download is tried
        if all(objects.digest(name, copied.size) != copied for _ in range(2)):
            raise lost(objects.place, name, "is gone, or not what was written there")
    return [*map(segments.file_name, gone), *wanted]


def _missing(files: StoreFiles, run: str, record: ArchivedRecord) -> tuple[list[str], list[str]]:
    """Returns the names of the files, and the ids of the segments, that a checkpoint lacks here or has damaged.

    Raises:
        StorageError: a folder that they belong into is a symbolic link: nothing is written behind it.
    """
    checkpoint = files.folder_of(run, record.seq)
    for folder in (checkpoint, files.path / segments.FOLDER):
        quarantine.check_inside(files.path, *folder.relative_to(files.path).parts)
    wanted = [name for name, copied in record.files.items() if not is_here(checkpoint / name, copied)]
    return wanted, [each for each, copied in record.segments.items() if not is_here(files.segment_file(each), copied)]


def _record(objects: Objects, files: StoreFiles, run: str, seq: int) -> ArchivedRecord:
    identity = None
    with contextlib.suppress(StoreError):
        identity = files.commit_record(run, seq).id
    found = _found(objects, files, run, seq, identity)
    if found is None or identity not in (None, found.checkpoint):  # another one, of before both sides parted
        raise CheckpointNotFoundError(f"checkpoint {seq} of run {run!r} is not in the archive {objects.place}")
    return found


def _found(objects: Objects, files: StoreFiles, run: str, seq: int, identity: str | None) -> ArchivedRecord | None:
    with contextlib.suppress(DamagedError, FormatError):
        record = archived.read_archived(files.path, run, seq)
        if record is not None and identity in (None, record.checkpoint):
            return record
    # of a copy without a good note here: only if it is whole, which the commit says
    run_id = None
    with contextlib.suppress(StoreError):
        run_id = files.read_run(run).id
    found, commit = contents.read_manifest(objects, run, seq), contents.read_commit(objects, run, seq, run_id=run_id)
    return found if found is not None and commit is not None and commit[0].id == found.checkpoint else None


def is_here(path: Path, copied: Copied) -> bool:
    """Returns whether a file is there, and no link to one, with the bytes that the archive has."""
    try:
        status = path.lstat()
        return stat.S_ISREG(status.st_mode) and status.st_size == copied.size and describe(path) == copied
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
