"""Push and pull: whole runs between stores of different machines, by way of an object store or a folder."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass

from simckpt.archive import contents, fetching
from simckpt.archive.archive import Archive
from simckpt.archive.contents import Listing
from simckpt.archive.objects import Objects, Patience, lost
from simckpt.archive.places import parse_place
from simckpt.archive.run_objects import (
    check_run_there,
    check_same_run,
    download_run,
    merge_metrics,
    read_run,
    upload_run,
)
from simckpt.archive.uploading import Uploads
from simckpt.errors import ArchiveDamagedError, ConflictError, DamagedError, RunNotFoundError
from simckpt.storage import CommitRecord, RunRecord, StoreFiles, digests, segments
from simckpt.storage.index import INDEX_FILE
from simckpt.storage.store_reader import COMMIT_FILE
from simckpt.storage.store_tiers import Incoming


@dataclass(frozen=True)
class Transfer:
    """What was brought of one run.

    Attributes:
        run: its name.
        commits: how many commits were new on the other side, tombstones of pruned ones included.
        nbytes: what their files weigh [bytes].
    """

    run: str
    commits: int
    nbytes: int


def push(
    files: StoreFiles, run: str, url: str | os.PathLike[str], *, patience: Patience | None = None
) -> list[Transfer]:
    """Brings a run, and those that it was branched from, to another place, as far as that lacks them.

    Nothing there is ever removed or replaced. A kill at any point leaves whole commits; pushing again goes on.

    Args:
        files: of the store.
        run: the run's name.
        url: the place, see `places.parse_place`.
        patience: how long to wait for the object store.

    Returns:
        What was brought, origins first.

    Raises:
        RunNotFoundError: there is no such run.
        ConflictError: both sides have written since they parted, or another run has that name there, or the place is
            the archive of another store; nothing was changed.
        DamagedError: a checkpoint is damaged here; what comes before it was brought.
        ArchiveUnavailableError, ArchiveDamagedError: the place cannot be reached, or does not give back what it was
            given.
    """
    order = [record.name for record in _line(files, run)]
    objects = Objects(parse_place(url), patience)
    deed = contents.write_deed(objects, owner=None)
    with contextlib.ExitStack() as stack:
        if deed.owner == files.id:
            stack.enter_context(files.claim_archive())
        elif deed.owner is not None:
            raise ConflictError(f"{objects.place} is the archive of store {deed.owner}: push to a place of its own")
        listing = Listing(objects.list())
        for name in order:
            check_run_there(objects, files, name)
            _check_parted(objects, files, name, listing)
        uploads = Uploads(objects, files, deed.id, listing)
        return [_push_run(objects, files, name, listing, uploads) for name in order]


def _push_run(objects: Objects, files: StoreFiles, run: str, listing: Listing, uploads: Uploads) -> Transfer:
    upload_run(objects, files, run, listing)
    merge_metrics(objects, files, run, listing)
    there = set(listing.commits(run))
    new = [record for record in files.records(run) if record.seq not in there]
    before = uploads.nbytes
    for record in new:
        if isinstance(record, CommitRecord):
            if record.seq in files.evicted(run):
                Archive(files).bring_back(run, record.seq)
            uploads.upload(run, record.seq)
        else:
            uploads.commit(run, record.seq)
    return Transfer(run, len(new), uploads.nbytes - before)


def pull(
    url: str | os.PathLike[str], files: StoreFiles, run: str | None = None, *, patience: Patience | None = None
) -> list[Transfer]:
    """Brings a run, and those that it was branched from, or all runs of a place, into a store, as far as it lacks them.

    Runs and checkpoints keep their ids, so that training goes on where it was. Nothing here is replaced. A kill at any
    point leaves whole commits; pulling again goes on.

    Args:
        url: the place: one that was pushed to, or the archive of a store.
        files: of the store.
        run: the run's name; all of them if None.
        patience: how long to wait for the object store.

    Returns:
        What was brought, origins first.

    Raises:
        RunNotFoundError: there is no such run.
        RunLockedError: a process is writing it here.
        ConflictError: both sides have written since they parted, or another run has that name here; nothing was
            changed.
        ArchiveUnavailableError, ArchiveDamagedError: the place cannot be reached, or what is there is damaged; what
            comes before it was brought.
        StorageError: the disk refused.
    """
    objects = Objects(parse_place(url), patience, make=False)
    if contents.read_deed(objects) is None:
        raise RunNotFoundError(f"nothing was pushed or archived to {objects.place}")
    listing = Listing(objects.list())
    order = _order(objects, listing, listing.runs() if run is None else [run])
    here = set(files.runs())
    for name, there in order.items():
        if name in here:
            check_same_run(files.read_run(name), there)
            _check_parted(objects, files, name, listing)
    return [_pull_run(objects, files, there, listing) for there in order.values()]


def _order(objects: Objects, listing: Listing, wanted: list[str]) -> dict[str, RunRecord]:
    """Returns the runs with those that they were branched from, these first."""
    known = listing.runs()
    found: dict[str, RunRecord] = {}

    def visit(name: str) -> None:
        if name in found:
            return
        there = read_run(objects, name) if name in known else None
        if there is None:
            shown = ", ".join(known[:5]) or "none"
            raise RunNotFoundError(f"{objects.place} has no run {name!r}; it has {shown}")
        if there.branch is not None and there.branch.run != name:
            visit(there.branch.run)
        found[name] = there

    for name in wanted:
        visit(name)
    return found


def _pull_run(objects: Objects, files: StoreFiles, there: RunRecord, listing: Listing) -> Transfer:
    run = there.name
    if run not in files.runs():
        files.write_run(run, there)
    with files.claim(run):
        download_run(objects, files, run, listing)
        here = set(files.sequence(run))
        new = [seq for seq in listing.commits(run) if seq not in here]
        nbytes = sum(_pull_commit(objects, files, there, seq) for seq in new)
    return Transfer(run, len(new), nbytes)


def _pull_commit(objects: Objects, files: StoreFiles, run: RunRecord, seq: int) -> int:
    found = contents.read_commit(objects, run.name, seq, run_id=run.id)
    name = contents.file_object(run.name, seq, COMMIT_FILE)
    if found is None:
        raise lost(objects.place, name, "is gone")
    record, data = found
    manifest = contents.read_manifest(objects, run.name, seq) if isinstance(record, CommitRecord) else None
    if isinstance(record, CommitRecord) and (manifest is None or manifest.checkpoint != record.id):
        raise lost(objects.place, contents.manifest_object(run.name, seq), "is gone")
    shared = {} if manifest is None else manifest.segments
    with files.incoming(run.name, uses=shared, made=shared) as incoming:
        gone = [each for each, copied in shared.items() if not fetching.is_here(files.segment_file(each), copied)]
        for identity in gone:
            file = segments.file_name(identity)
            fetching.download(objects, files, contents.segment_object(identity), incoming, file, shared[identity])
        brought = [shared[identity] for identity in gone]
        for file, copied in ({} if manifest is None else manifest.files).items():
            if file != COMMIT_FILE:
                there = contents.file_object(run.name, seq, file)
                fetching.download(objects, files, there, incoming, file, copied)
                brought.append(copied)
        if isinstance(record, CommitRecord):
            _check_vouched(record, incoming)
        files.write_incoming(incoming, COMMIT_FILE, iter([(0, data)]), len(data))
        files.adopt(run.name, seq, Incoming(incoming.folder, tuple(gone)), record)
    return len(data) + sum(copied.size for copied in brought)


def _check_vouched(record: CommitRecord, incoming: Incoming) -> None:
    """Raises ArchiveDamagedError if the files that came are not those that the commit record vouches for."""
    for file in record.files:
        path = incoming.folder / file.name
        if not path.exists() or path.stat().st_size != file.size:
            raise ArchiveDamagedError(f"{file.name} of checkpoint {record.id} is another one in the archive", path=path)
    if not digests.matches((incoming.folder / INDEX_FILE).read_bytes(), record.file(INDEX_FILE).digest):
        raise ArchiveDamagedError(f"the index of checkpoint {record.id} is another one in the archive", path=INDEX_FILE)


def _line(files: StoreFiles, run: str) -> Iterator[RunRecord]:
    """Returns a run and those that it was branched from, as far as they are in the store, the first ancestor first."""
    line = [files.read_run(run)]
    names = set(files.runs())
    while (branch := line[-1].branch) is not None and branch.run in names - {each.name for each in line}:
        line.append(files.read_run(branch.run))
    return reversed(line)


def _check_parted(objects: Objects, files: StoreFiles, run: str, listing: Listing) -> None:
    """Raises ConflictError if both sides have written to a run: the newest commit that both have is another one."""
    common = set(files.sequence(run)) & set(listing.commits(run))
    if not common:
        return
    seq = max(common)
    try:
        here, there = files.commit_record(run, seq), contents.read_commit(objects, run, seq)
    except DamagedError:
        return  # told where it is needed
    if there is not None and there[0].id != here.id:
        raise ConflictError(
            f"commit {seq} of run {run!r} is checkpoint {here.id} here and {there[0].id} at {objects.place}: both "
            f"sides have written since they parted. Nothing was changed; branch from one of the two under another "
            f"name to keep both"
        )
