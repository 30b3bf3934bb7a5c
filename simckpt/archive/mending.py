"""Puts right what is damaged in a store from a place that has it whole; what is good here is never replaced."""

from __future__ import annotations

import contextlib

from simckpt.archive import contents, fetching
from simckpt.archive.objects import Objects
from simckpt.errors import (
    CheckpointNotFoundError,
    DamagedError,
    FormatError,
    RunNotFoundError,
    StoreError,
    UnsupportedFormatError,
)
from simckpt.storage import CommitRecord, RunRecord, StoreFiles
from simckpt.storage.archived import ArchivedRecord
from simckpt.storage.store_reader import COMMIT_FILE


def is_run_here(files: StoreFiles, run: str) -> bool:
    """Returns whether a store has a run, be its record damaged or gone; raises FormatError if its folder was moved."""
    try:
        files.read_run(run)
    except RunNotFoundError:
        return False
    except DamagedError:
        pass
    return True


def mend_run(files: StoreFiles, there: RunRecord) -> None:
    """Puts the record of a run in the place of one that is damaged or gone here, if the commits here are of that run.

    Raises:
        RunLockedError: another process is writing the run.
        StorageError: the disk refused.
    """
    try:
        files.read_run(there.name)
    except DamagedError:
        if belongs(files, there):
            files.rewrite_run(there)


def belongs(files: StoreFiles, record: RunRecord) -> bool:
    """Returns whether all commits of a run, as far as they can be read, are of the run that a record is of."""
    return {commit.run for commit in files.records(record.name, damaged={})} <= {record.id}


def mend_commit(objects: Objects, files: StoreFiles, run: RunRecord, seq: int, *, verify: bool) -> bool:
    """Returns whether a checkpoint lacked something here that has come now.

    What is evicted from here, what was pruned on either side and what is another checkpoint there is left alone.

    Args:
        objects: of the place.
        files: of the store.
        run: the run's record there.
        seq: commit number, which both sides have.
        verify: whether to read all of it, and not its records and sizes alone.

    Raises:
        ArchiveDamagedError: what is there is damaged, too.
        ArchiveUnavailableError, StorageError: the place or the disk refused.
    """
    if seq in files.evicted(run.name) or _is_good(files, run.name, seq, verify=verify):
        return False
    found = contents.read_commit(objects, run.name, seq, run_id=run.id)
    manifest = contents.read_manifest(objects, run.name, seq)
    if found is None or manifest is None or manifest.checkpoint != found[0].id:
        return False  # nobody has it whole: a check tells
    commit = found[0]
    if not isinstance(commit, CommitRecord) or not _is_same(files, run.name, commit, manifest):
        return False
    with contextlib.suppress(CheckpointNotFoundError):  # pruned meanwhile
        return bool(fetching.fetch_record(objects, files, run.name, manifest))
    return False


def _is_good(files: StoreFiles, run: str, seq: int, *, verify: bool) -> bool:
    """Returns whether nothing is to be brought of a commit, as far as one looks."""
    try:
        if not isinstance(files.commit_record(run, seq), CommitRecord):
            return True
        if verify:
            files.verify(run, seq)
            return True
        index = files.index(run, seq)
        folder = files.folder_of(run, seq)
        sizes = {folder / name: size for name, size in index.sizes.items()}
        sizes |= {files.segment_file(each): segment.size for each, segment in index.segments.items()}
        return all(path.lstat().st_size == size for path, size in sizes.items())
    except (CheckpointNotFoundError, UnsupportedFormatError):
        return True
    except (DamagedError, FormatError, FileNotFoundError):
        return False


def _is_same(files: StoreFiles, run: str, commit: CommitRecord, manifest: ArchivedRecord) -> bool:
    """Returns whether a checkpoint there is the one that is damaged here, as its record or what is left of it says."""
    with contextlib.suppress(StoreError):
        here = files.commit_record(run, commit.seq)
        return (here.id, here.run) == (commit.id, commit.run)
    folder = files.folder_of(run, commit.seq)
    if any(fetching.is_here(folder / name, each) for name, each in manifest.files.items() if name != COMMIT_FILE):
        return True
    # nothing of it is left: a commit that follows upon one here, or is followed by one here, is on the same line
    records = files.records(run, damaged={})
    return commit.parent in {record.id for record in records} or commit.id in {record.parent for record in records}
