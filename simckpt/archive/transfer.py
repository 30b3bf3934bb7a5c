"""Push and pull: whole runs between stores of different machines, by way of an object store or a folder."""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from simckpt.archive import contents, fetching, session_transfer
from simckpt.archive.archive import Archive
from simckpt.archive.contents import Listing
from simckpt.archive.mending import is_run_here, mend_commit, mend_run
from simckpt.archive.objects import Objects, Patience, lost
from simckpt.archive.places import parse_place
from simckpt.archive.run_objects import (
    Troubles,
    check_run_there,
    check_same_here,
    download_run,
    merge_metrics,
    read_run,
    upload_run,
    verify_run,
)
from simckpt.archive.session_transfer import SessionTransfer
from simckpt.archive.uploading import Uploads
from simckpt.errors import (
    ArchiveDamagedError,
    CheckpointNotFoundError,
    ConflictError,
    DamagedError,
    FormatError,
    RunNotFoundError,
    StorageError,
    StoreError,
    UnsupportedFormatError,
)
from simckpt.storage import CommitRecord, RunRecord, StoreFiles, TombstoneRecord, indexes, segments
from simckpt.storage.session_records import SessionRecord
from simckpt.storage.starts import STARTS
from simckpt.storage.store_reader import COMMIT_FILE, RUN_FILE, STORE_FILE
from simckpt.storage.store_tiers import Incoming

_GONE = 100  # commits that are missing at a place: more of a run are not asked for one by one


@dataclass(frozen=True)
class Transfer:
    """What was brought of one run.

    Attributes:
        run: its name; empty for a session that came without its run.
        commits: how many commits were new on the other side, tombstones of pruned ones included.
        nbytes: what was written there weighs [bytes].
        repaired: how many commits were there already, but not whole, and were put right.
        sessions: names of the sessions that its checkpoints were driving of which something was brought.
    """

    run: str
    commits: int
    nbytes: int
    repaired: int = 0
    sessions: tuple[str, ...] = ()


def push(
    files: StoreFiles,
    run: str,
    url: str | os.PathLike[str],
    *,
    verify: bool = False,
    patience: Patience | None = None,
) -> list[Transfer]:
    """Brings a run, and those that it was branched from, to another place, as far as that lacks them.

    The sessions that their checkpoints were driving go along, if they are closed.

    Nothing good there is ever removed or replaced; what is gone there, or has another size than it should, is written
    again. A kill at any point leaves whole commits; pushing again goes on.

    Args:
        files: of the store.
        run: the run's name.
        url: the place, see `places.parse_place`.
        verify: whether to read back what is there already, and to write again what is damaged.
        patience: how long to wait for the object store.

    Returns:
        What was brought, origins first.

    Raises:
        RunNotFoundError: there is no such run.
        ConflictError: both sides have written since they parted, or another run has that name there, or the place is
            the archive of another store; nothing was changed.
        DamagedError, FormatError: a checkpoint or a session is damaged here; all others were brought.
        ArchiveUnavailableError, ArchiveDamagedError: the place cannot be reached, or does not give back what it was
            given.
    """
    order = [record.name for record in _line(files, run)]
    with session_transfer.opened_to_push(files, url, patience) as uploads:
        objects, listing = uploads.objects, uploads.listing
        for name in order:
            check_run_there(objects, files, name)
            _check_parted(objects, files, name, listing)
        session_transfer.check_sessions(files, order, objects, listing)
        damaged: list[StoreError] = []
        done = [_push_run(objects, files, name, listing, uploads, verify=verify, damaged=damaged) for name in order]
    if damaged:
        first, more = damaged[0], f" ({len(damaged)} commits or sessions are)" if len(damaged) > 1 else ""
        first.args = (f"{first}; it is damaged here{more}, and all others were brought", *first.args[1:])
        raise first
    return done


def _push_run(
    objects: Objects,
    files: StoreFiles,
    run: str,
    listing: Listing,
    uploads: Uploads,
    *,
    verify: bool,
    damaged: list[StoreError],
) -> Transfer:
    """Returns what was brought of a run and its sessions; what of them is damaged here is added to `damaged`."""
    before = uploads.nbytes
    upload_run(objects, files, run, listing)
    merge_metrics(objects, files, run, listing)
    if verify:
        verify_run(objects, files, run, besides_metrics=True)
    there = set(listing.commits(run))
    unreadable: dict[int, StoreError] = {}
    records = files.records(run, damaged=unreadable)
    if newer := [each for each in unreadable.values() if isinstance(each, UnsupportedFormatError | StorageError)]:
        raise newer[0]
    evicted = files.evicted(run)
    noted = {seq: known for seq, known in files.archived(run).items() if seq in evicted}
    damaged += unreadable.values()
    repaired = 0
    for record in records:
        is_new = record.seq not in there
        if not is_new:
            if not (verify or not _looks_whole(files, run, record, listing)) or not _is_to_be(objects, run, record):
                continue
            if record.seq in noted and uploads.is_there(run, noted[record.seq]):
                continue  # it need not come back here to be compared
        written = uploads.written
        try:
            _push_commit(files, run, record, uploads)
        except ArchiveDamagedError:
            raise
        except DamagedError as error:
            damaged.append(error)  # what is there may be good, and what is new is brought all the same
        repaired += not is_new and uploads.written > written
    sessions = session_transfer.push_sessions(files, run, uploads, verify=verify, damaged=damaged)
    new = len(records) - len(there & {each.seq for each in records})
    return Transfer(run, new, uploads.nbytes - before, repaired, tuple(sessions))


def _push_commit(files: StoreFiles, run: str, record: CommitRecord | TombstoneRecord, uploads: Uploads) -> None:
    if isinstance(record, TombstoneRecord):
        uploads.commit(run, record.seq)
        return
    if record.seq in files.evicted(run):
        Archive(files).bring_back(run, record.seq)
    uploads.upload(run, record.seq)


def _looks_whole(files: StoreFiles, run: str, record: CommitRecord | TombstoneRecord, listing: Listing) -> bool:
    """Returns whether all of a commit is there, by one listing, in the sizes that it has here; or was pruned there.

    So it does if what is here is damaged, or was pruned at this moment: then it is no pattern for what is there.
    """
    if isinstance(record, TombstoneRecord):
        return True
    commit, manifest = contents.file_object(run, record.seq, COMMIT_FILE), contents.manifest_object(run, record.seq)
    sizes = {contents.file_object(run, record.seq, file.name): file.size for file in record.files}
    try:
        length = len(files.record_bytes(run, record.seq)[1])
        if listing.sizes.get(commit) != length and not listing.sizes.keys() & {manifest, *sizes}:
            return True  # a tombstone, which has nothing beside it
        shared = {each: contents.segment_object(each) for each in files.segment_ids(run, record.seq)}
        sizes[commit] = length
        for identity, name in shared.items():
            with contextlib.suppress(FileNotFoundError):
                sizes[name] = files.segment_file(identity).stat().st_size
    except (DamagedError, FormatError, CheckpointNotFoundError, FileNotFoundError):
        return True
    return {manifest, *shared.values()} <= listing.sizes.keys() and all(
        listing.sizes.get(name) == size for name, size in sizes.items()
    )


def _is_to_be(objects: Objects, run: str, record: CommitRecord | TombstoneRecord) -> bool:
    """Returns whether a commit that is not whole there is to be written again, as its record there is the same or bad.

    Raises:
        ConflictError: it is another one.
    """
    try:
        found = contents.read_commit(objects, run, record.seq)
    except ArchiveDamagedError:
        found = None
    if found is None:
        # a tombstone for a tombstone alone: another store may have the commit whole
        return isinstance(record, CommitRecord) or objects.read(contents.manifest_object(run, record.seq)) is None
    there = found[0]
    if isinstance(there, TombstoneRecord) or isinstance(record, TombstoneRecord):
        return False  # pruned on one side: that is left as it is
    if (there.id, there.files) != (record.id, record.files):
        raise _parted(objects, run, record, there)
    return True


def pull(
    url: str | os.PathLike[str],
    files: StoreFiles,
    run: str | None = None,
    *,
    verify: bool = False,
    patience: Patience | None = None,
) -> list[Transfer]:
    """Brings a run, and those that it was branched from, or all runs of a place, into a store, as far as it lacks them.

    Runs and checkpoints keep their ids, so that training goes on where it was. Nothing good here is replaced: what is
    gone here, cut or damaged in its records is put right. What is damaged there keeps nothing else from coming. A kill
    at any point leaves whole commits; pulling again goes on. The sessions that checkpoints of these runs were driving
    come along, with all runs all sessions.

    Args:
        url: the place: one that was pushed to, or the archive of a store.
        files: of the store.
        run: the run's name; all of them if None.
        verify: whether to read all that is here already, and to put right what is damaged.
        patience: how long to wait for the object store.

    Returns:
        What was brought, origins first.

    Raises:
        RunNotFoundError: there is no such run.
        RunLockedError: a process is writing it here.
        ConflictError: both sides have written since they parted, or another run has that name here; nothing was
            changed.
        ArchiveUnavailableError: the place cannot be reached; what comes before was brought.
        ArchiveDamagedError: some of what is there is damaged or gone; all else was brought.
        DamagedError: the record of a run is damaged here, and that which is there is of another run.
        UnsupportedFormatError: a newer simckpt has written there.
        StorageError: the disk refused.
    """
    objects = Objects(parse_place(url), patience, make=False)
    listing, troubles = Listing(objects.list()), Troubles()
    with troubles.noted():
        if contents.read_deed(objects) is None:
            if not listing.runs() and not listing.sessions():
                raise RunNotFoundError(f"nothing was pushed or archived to {objects.place}")
            raise lost(objects.place, STORE_FILE, "is gone")
    order = _order(objects, files, listing, listing.runs() if run is None else [run], troubles)
    for name, there in order.items():
        if is_run_here(files, name):
            check_same_here(files, there)
            _check_parted(objects, files, name, listing)
    sessions = []
    for name in session_transfer.sessions_to_pull(objects, listing, None if run is None else order, troubles):
        with troubles.noted():
            session_transfer.check_here(files, objects, name)
            sessions.append(name)
    done = [_pull_run(objects, files, there, listing, troubles, verify=verify) for there in order.values()]
    for name in sessions:
        with troubles.noted():
            brought = session_transfer.pull(objects, files, name, verify=verify)
            done = _with(done, brought, contents.read_session_there(objects, name))
    if troubles.told:
        raise _not_all(objects, troubles.told)
    return done


def _with(done: list[Transfer], brought: SessionTransfer, record: SessionRecord | None) -> list[Transfer]:
    """Returns what was brought, with a session noted at the run whose checkpoint was driving."""
    origin = None if record is None else record.origin
    if not brought.nbytes:
        return done
    own = next((each for each in done if origin is not None and each.run == origin.run), None)
    if own is None:
        return [*done, Transfer("", 0, brought.nbytes, sessions=(brought.session,))]
    added = replace(own, nbytes=own.nbytes + brought.nbytes, sessions=(*own.sessions, brought.session))
    return [added if each is own else each for each in done]


def _not_all(objects: Objects, told: list[str]) -> ArchiveDamagedError:
    more = f" and {len(told) - 5} more" if len(told) > 5 else ""
    return ArchiveDamagedError(
        f"not all that {objects.place} should have is there and whole; everything else was brought: "
        f"{'; '.join(told[:5])}{more}. Where a store has it, `simckpt push --verify` (for an archive, `simckpt archive "
        f"--verify`) writes it there again, and the next pull brings it; if none has, `simckpt check --repair` notes "
        f"here what is lost",
        path=str(objects.place),
    )


def _order(
    objects: Objects, files: StoreFiles, listing: Listing, wanted: list[str], troubles: Troubles
) -> dict[str, RunRecord]:
    """Returns the runs with those that they were branched from, these first."""
    known, here = listing.runs(), files.runs()
    found: dict[str, RunRecord | None] = {}

    def visit(name: str) -> None:
        if name in found or name not in known:
            return  # that a run was branched from one that is not there is told by a check
        found[name] = None
        with troubles.noted():
            there = read_run(objects, name)
            if there is None:
                raise lost(objects.place, f"runs/{name}/{RUN_FILE}", "is gone")
            found[name] = there
        record = found[name] or _record_here(files, name, here)
        if record is None:
            return
        if record.branch is not None:
            visit(record.branch.run)
        found[name] = found.pop(name) or record

    for name in wanted:
        if name not in known:
            shown = ", ".join(known[:5]) or "none"
            raise RunNotFoundError(f"{objects.place} has no run {name!r}; it has {shown}")
        visit(name)
    return {name: record for name, record in found.items() if record is not None}


def _record_here(files: StoreFiles, run: str, here: list[str]) -> RunRecord | None:
    with contextlib.suppress(DamagedError):
        return files.read_run(run) if run in here else None
    return None


def _pull_run(
    objects: Objects, files: StoreFiles, there: RunRecord, listing: Listing, troubles: Troubles, *, verify: bool
) -> Transfer:
    run = there.name
    if is_run_here(files, run):
        mend_run(files, there)
    else:
        try:
            files.write_run(run, there)
        except (RunNotFoundError, CheckpointNotFoundError, DamagedError, FormatError):
            # what it was branched from has not come; its own checkpoints are whole without
            files.write_run(run, there, orphan=True)
    commits = nbytes = 0
    with files.claim(run):
        download_run(objects, files, run, listing, troubles)
        here = set(files.sequence(run))
        for seq in _new(here, set(listing.commits(run))):
            with troubles.noted():
                nbytes += _pull_commit(objects, files, there, seq, listing, troubles)
                commits += 1
        repaired = 0
        for seq in sorted(here & set(listing.commits(run))):
            with troubles.noted():
                repaired += mend_commit(objects, files, there, seq, verify=verify)
    return Transfer(run, commits, nbytes, repaired)


def _new(here: set[int], there: set[int]) -> list[int]:
    """Returns the numbers of the commits to bring; also those that neither side has although later ones are there."""
    gone = (seq for seq in range(1, max(there, default=0)) if seq not in here and seq not in there)
    return sorted({*(there - here), *itertools.islice(gone, _GONE)})


def _pull_commit(
    objects: Objects, files: StoreFiles, run: RunRecord, seq: int, listing: Listing, troubles: Troubles
) -> int:
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
    if isinstance(record, CommitRecord) and record.start is not None:
        start = f"runs/{run.name}/{STARTS}/{record.start}.json"
        if start not in listing.sizes and not (files.path / start).exists():
            troubles.tell(lost(objects.place, start, "is gone"))
    return len(data) + sum(copied.size for copied in brought)


def _check_vouched(record: CommitRecord, incoming: Incoming) -> None:
    """Raises ArchiveDamagedError if the files that came are not those that the commit record vouches for."""
    try:
        indexes.check_files(incoming.folder, record)
    except (DamagedError, FormatError) as error:
        name = Path(error.path).name if isinstance(error, DamagedError) else COMMIT_FILE
        message = f"{name} of checkpoint {record.id} is another one in the archive"
        raise ArchiveDamagedError(message, path=name) from error


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
        raise _parted(objects, run, here, there[0])


def _parted(
    objects: Objects, run: str, here: CommitRecord | TombstoneRecord, there: CommitRecord | TombstoneRecord
) -> ConflictError:
    return ConflictError(
        f"commit {here.seq} of run {run!r} is checkpoint {here.id} here and {there.id} at {objects.place}: both sides "
        f"have written since they parted. Nothing was changed; branch from one of the two under another name to keep "
        f"both"
    )
