"""Reads a whole archive back, and puts right what one side has good and the other does not."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from pathlib import Path

from simckpt.archive import contents, fetching, session_objects
from simckpt.archive.objects import Objects
from simckpt.archive.run_objects import verify_run
from simckpt.errors import ArchiveDamagedError, DamagedError, FormatError, RunLockedError, SessionNotFoundError
from simckpt.storage import CommitRecord, StoreFiles, TombstoneRecord, archived_sessions
from simckpt.storage.archived import ArchivedRecord, Copied
from simckpt.storage.sessions import ARCHIVED_FILE
from simckpt.storage.store_reader import COMMIT_FILE


@dataclass
class Verified:
    """What was found when a whole archive was read back.

    Attributes:
        objects: how many were read, of the content of checkpoints and sessions.
        repaired: what was damaged on one side, and was put right from the other.
        damaged: what is damaged in the archive, and not here to put it right.
    """

    objects: int = 0
    repaired: list[str] = field(default_factory=list)
    damaged: list[str] = field(default_factory=list)


def verify(objects: Objects, files: StoreFiles, archive: str) -> Verified:
    """Returns what was found in the archive of a store; whoever calls holds the claim on it.

    Raises:
        ArchiveUnavailableError: the archive cannot be reached.
        StorageError: the disk refused.
    """
    found, seen = Verified(), dict[str, bool]()
    for run in files.runs():
        found.repaired.extend(f"{name} in the archive" for name in verify_run(objects, files, run))
        records = {record.seq: record for record in files.records(run, damaged={})}
        for record in records.values():
            if isinstance(record, TombstoneRecord):
                _verify_tombstone(objects, files, run, record.seq, found)
        for seq, noted in files.archived(run).items():
            if noted.archive != archive or not isinstance(records.get(seq), CommitRecord | None):
                continue
            _verify_there(objects, files, run, noted, found, seen)
            if seq not in files.evicted(run):
                _verify_here(objects, files, run, seq, found)
    for name in files.sessions():
        with contextlib.suppress(SessionNotFoundError):
            _verify_session(objects, files, name, archive, found, seen)
    found.objects = len(seen)
    return found


def _verify_session(
    objects: Objects, files: StoreFiles, name: str, archive: str, found: Verified, seen: dict[str, bool]
) -> None:
    try:
        noted = archived_sessions.read_archived_session(files.path, name)
    except (DamagedError, FormatError):
        return  # a pass writes it again
    if noted is None or noted.archive != archive:
        return
    manifest = contents.session_object(name, ARCHIVED_FILE)
    if objects.read(manifest) != noted.to_bytes():
        objects.put(manifest, noted.to_bytes())
        found.repaired.append(f"{manifest} in the archive")
    folder = files.session_folder(name)
    for file, copied in noted.files.items():
        there = contents.session_object(name, file)
        seen[there] = objects.digest(there, copied.size) == copied
        if not seen[there]:
            seen[there] = _write_again(objects, there, folder / file, copied)
            (found.repaired if seen[there] else found.damaged).append(f"{there} in the archive")
    is_away = {file for file in noted.states if not (folder / file).exists()}
    if damaged := [file for file in session_objects.missing(files, noted) if file not in is_away]:
        try:
            brought = session_objects.bring(objects, files, noted, note=True, is_new=False, wanted=damaged)
        except (ArchiveDamagedError, RunLockedError) as error:
            found.damaged.append(str(error))
        else:
            found.repaired.extend(f"{file} of session {name!r} here" for file in brought)


def _verify_tombstone(objects: Objects, files: StoreFiles, run: str, seq: int, found: Verified) -> None:
    name, (_, data) = contents.file_object(run, seq, COMMIT_FILE), files.record_bytes(run, seq)
    there = objects.read(name)
    # one that is missing the next pass brings; one that can be read, or has a manifest, is more than a tombstone
    if there in (None, data) or objects.read(contents.manifest_object(run, seq)) is not None:
        return
    try:
        contents.read_commit(objects, run, seq)
    except ArchiveDamagedError:
        objects.put(name, data)
        found.repaired.append(f"{name} in the archive")


def _verify_there(
    objects: Objects, files: StoreFiles, run: str, record: ArchivedRecord, found: Verified, seen: dict[str, bool]
) -> None:
    manifest = contents.manifest_object(run, record.seq)
    if objects.read(manifest) != record.to_bytes():
        objects.put(manifest, record.to_bytes())
        found.repaired.append(f"{manifest} in the archive")
    folder = files.folder_of(run, record.seq)
    places = {contents.file_object(run, record.seq, name): folder / name for name in record.files}
    places |= {contents.segment_object(each): files.segment_file(each) for each in record.segments}
    for name, copied in contents.expected(record, run).items():
        if name in seen:
            continue
        seen[name] = objects.digest(name, copied.size) == copied
        if not seen[name]:
            seen[name] = _write_again(objects, name, places[name], copied)
            (found.repaired if seen[name] else found.damaged).append(f"{name} in the archive")


def _write_again(objects: Objects, name: str, path: Path, copied: Copied) -> bool:
    if not fetching.is_here(path, copied):
        return False
    try:
        objects.put(name, path)
    except FileNotFoundError:
        return False
    return objects.digest(name, copied.size) == copied


def _verify_here(objects: Objects, files: StoreFiles, run: str, seq: int, found: Verified) -> None:
    try:
        files.verify(run, seq)
    except DamagedError:
        try:
            brought = fetching.fetch(objects, files, run, seq)
            files.verify(run, seq)
        except (DamagedError, ArchiveDamagedError) as error:
            found.damaged.append(str(error))
        else:
            found.repaired.extend(f"{name} of commit {seq} of run {run!r} here" for name in brought)
