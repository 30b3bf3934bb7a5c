"""Verifies the records of a store but for the indexes: store, runs, commits, starts, marks, claims; lists the rest."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from simckpt.errors import (
    CheckpointNotFoundError,
    DamagedError,
    FormatError,
    RunNotFoundError,
    StorageError,
    StoreError,
    UnsupportedFormatError,
)
from simckpt.maintenance.findings import DAMAGE, FOREIGN, LEFTOVER, UNCHECKED, Affected, Notes, problem
from simckpt.maintenance.out_of_place import checkpoint_elsewhere, has_folder, is_run_elsewhere, record_in
from simckpt.maintenance.verifying import affected, folder_of
from simckpt.storage import (
    CommitRecord,
    RunRecord,
    StoreFiles,
    TombstoneRecord,
    archived,
    claims,
    digests,
    marks,
    names,
    quarantine,
    reader,
    segments,
)
from simckpt.storage.index import INDEX_FILE, INDEX_LIMIT
from simckpt.storage.records import RECORD_LIMIT, SHARDS_FILE, parse_store
from simckpt.storage.run_records import parse_run
from simckpt.storage.starts import START_LIMIT, STARTS, parse_start
from simckpt.storage.store_reader import COMMIT_FILE, EVENTS_FILE, RUN_FILE, STORE_FILE, Stamp, stamp

KNOWN = {STORE_FILE, "reserve", "runs", "segments", "sessions", "trash", "tmp", quarantine.FOLDER, archived.ARCHIVE}
_FOLDERS = ("runs", segments.FOLDER, segments.TRASH, "tmp", quarantine.FOLDER, archived.ARCHIVE)
_OF_A_RUN = {RUN_FILE, "checkpoints", STARTS, marks.MARKS, EVENTS_FILE, "writer", archived.FOLDER}
_OF_A_WRITER = {"owner.json", "lock", "heartbeat", "reserve"}
_LOOKS = 5  # at what changes while it is looked at


@dataclass
class Run:
    """What the records of a run say.

    Attributes:
        name: of the run.
        record: of `run.json`, or None if it is damaged.
        records: of its checkpoints and of those that were pruned, in the order of commits.
        damaged: the numbers of commits whose records cannot be trusted.
        misplaced: {number that the folder's name gives: number by the record} of those that were renamed or copied.
        is_open: whether its commits could be listed.
        is_copy: whether its folder was copied from another one that is there as well.
        archived: the numbers of commits that the archive has, or had, by what is noted here.
    """

    name: str
    record: RunRecord | None = None
    records: list[CommitRecord | TombstoneRecord] = field(default_factory=list)
    damaged: set[int] = field(default_factory=set)
    misplaced: dict[int, int] = field(default_factory=dict)
    is_open: bool = True
    is_copy: bool = False
    archived: set[int] = field(default_factory=set)


def settled(examine: Callable[[Notes], None], look: Callable[[], object]) -> Notes:
    """Returns the notes of an examination during which nothing changed; `look` returns another value if it did."""
    notes = Notes()
    for _ in range(_LOOKS):
        before, notes = look(), Notes()
        examine(notes)
        if not notes.findings or look() == before:
            break
    return notes


def examine_runs(store: StoreFiles, notes: Notes) -> list[Run]:
    """Verifies all records of the runs; returns what they say."""
    for name in _entries(store, (), notes):
        if name not in KNOWN and not is_run_elsewhere(store, name, notes):
            notes.add(FOREIGN, "foreign", name, "is none of simckpt's")
    where = f"{archived.ARCHIVE}/{archived.ARCHIVE_FILE}"
    _examine_small(store, where, archived.parse_archive, "archive", RECORD_LIMIT, notes, None, (), list)
    runs = []
    for name in _entries(store, ("runs",), notes):
        path = store.path / "runs" / name
        is_other = os.path.lexists(path) and not path.is_symlink() and not path.is_dir()
        if not names.is_run_name(name) or is_other:
            if is_run_elsewhere(store, f"runs/{name}", notes):
                continue
            notes.add(FOREIGN, "foreign", f"runs/{name}", "is no run")
            continue
        run = Run(name)
        if listed(store, ("runs", name), notes) is None:
            run.is_open = False
            notes.count(runs=1)
            runs.append(run)
            continue

        def look(name: str = name) -> object:
            return stamp_of(store, "runs", name, RUN_FILE), (store.path / "runs" / name).exists()

        def examine(found: Notes, run: Run = run) -> None:
            _examine_run_record(store, run, found)

        found = settled(examine, look)
        if not (store.path / "runs" / name).exists():
            continue
        merge(notes, found)
        if run.record is None and not any(each.kind in ("run record", "place") for each in found.findings):
            continue
        notes.count(runs=1)
        examine_names(store, ("runs", name), _OF_A_RUN, notes)
        examine_names(store, ("runs", name, "writer"), _OF_A_WRITER, notes)
        _examine_claim(store, name, notes)
        _examine_commits(store, run, notes)
        _examine_starts(store, run, notes)
        _examine_marks(store, name, notes)
        _examine_archived(store, run, notes)
        runs.append(run)
    return runs


def merge(notes: Notes, more: Notes) -> None:
    """Adds what was found elsewhere."""
    notes.findings += more.findings
    notes.count(**vars(more.counts))


def stamp_of(store: StoreFiles, *parts: str) -> Stamp:
    """Returns the stamp of a file, (0, 0) if it cannot be looked at."""
    try:
        with reader.opened_folder(store.path, *parts[:-1]) as folder:
            return stamp(folder, parts[-1])
    except (StoreError, OSError):
        return 0, 0


def examine_names(store: StoreFiles, parts: tuple[str, ...], known: set[str], notes: Notes) -> None:
    """Lists the entries of a folder that simckpt did not make."""
    for name in _entries(store, parts, notes):
        if name not in known:
            notes.add(FOREIGN, "foreign", "/".join((*parts, name)), "is none of simckpt's")


def _entries(store: StoreFiles, parts: Sequence[str], notes: Notes) -> list[str]:
    return listed(store, parts, notes) or []


def listed(store: StoreFiles, parts: Sequence[str], notes: Notes) -> list[str] | None:
    """Returns the names in a folder, none if it is missing; None, and one finding, if it is a link or cannot be opened.

    Nothing is told of a folder below such a one.
    """
    where = "/".join(parts) or "."
    try:
        with reader.opened_folder(store.path, *parts) as folder:
            return sorted(os.listdir(folder))  # noqa: PTH208 a descriptor
    except FileNotFoundError:
        return []
    except FormatError:
        path = store.path.joinpath(*parts)
        if path.is_symlink():
            notes.add(DAMAGE, "folder", where, f"is a symbolic link to {path.readlink()}")
        elif not path.parent.is_symlink():
            notes.add(DAMAGE, "folder", where, "is no folder")
    except StorageError as error:
        notes.add(UNCHECKED, "folder", where, problem(error, store.path))
    except OSError as error:
        notes.add(UNCHECKED, "folder", where, f"cannot be listed: {error.strerror}")
    return None


def examine_folders(store: StoreFiles, notes: Notes) -> None:
    """Tells of the folders of the store itself that its commands would refuse."""
    for name in _FOLDERS:
        listed(store, (name,), notes)


def _examine_run_record(store: StoreFiles, run: Run, notes: Notes) -> None:
    where = f"runs/{run.name}/{RUN_FILE}"
    try:
        run.record = store.read_run(run.name)
        notes.count(records=1, nbytes=(store.path / where).lstat().st_size)
    except RunNotFoundError:
        if (store.path / "runs" / run.name / "checkpoints").is_dir():
            notes.add(DAMAGE, "run record", where, "is missing", run=run.name)
        else:
            notes.add(FOREIGN, "foreign", f"runs/{run.name}", "is no run: it has no record", run=run.name)
    except (UnsupportedFormatError, StorageError) as error:
        notes.add(UNCHECKED, "run record", where, problem(error, store.path), run=run.name)
    except StoreError as error:
        if not _is_misplaced(store, run, notes):
            notes.add(DAMAGE, "run record", where, problem(error, store.path), run=run.name)
    except OSError:
        pass  # replaced or removed at this moment: the next look tells


def _is_misplaced(store: StoreFiles, run: Run, notes: Notes) -> bool:
    """Returns whether a run's record is whole and of a run of another name, whose folder was renamed or copied."""
    path = store.path / "runs" / run.name / RUN_FILE
    try:
        data = reader.read_small(store.path, "runs", run.name, RUN_FILE, limit=RECORD_LIMIT, path=path)
        record = parse_run(data, path)
        commits = store.records(run.name, damaged={})
    except (StoreError, FileNotFoundError):
        return False
    name = record.name
    if name == run.name or any(each.run != record.id for each in commits):
        return False  # the record alone was damaged, or put there
    run.record = record
    try:
        run.is_copy = store.read_run(name).id == run.record.id
    except StoreError:
        run.is_copy = False
    if run.is_copy:
        text, advice = f"is a copy of runs/{name}", f"remove one of the two folders; it is runs/{name} that is used"
    elif os.path.lexists(store.path / "runs" / name):
        text, advice = f"is the folder of run {name!r}", f"look at runs/{name}, which has taken its place"
    else:
        text, advice = f"is the folder of run {name!r}", f"rename it back to {name!r}"
    advice = f"{advice}; `simckpt check --repair` leaves both alone" if run.is_copy else advice
    notes.add(DAMAGE, "place", f"runs/{run.name}", text, run=run.name, advice=advice)
    return True


def _examine_commits(store: StoreFiles, run: Run, notes: Notes) -> None:
    parts = ("runs", run.name, "checkpoints")
    found = listed(store, parts, notes)
    if found is None:
        run.is_open = False
        return
    if run.record is not None and not run.is_copy and not has_folder(store, run.name, notes):
        run.is_open = False
    elsewhere = set()
    for name in found:
        if not names.SEQUENCE.fullmatch(name) or not int(name):
            number = checkpoint_elsewhere(store, run.name, name, notes)
            if number is not None:
                elsewhere.add(number)
                continue
            notes.add(FOREIGN, "foreign", "/".join((*parts, name)), "is no checkpoint", run=run.name)
    damaged: dict[int, StoreError] = {}
    try:
        run.records = store.records(run.name, damaged=damaged)
    except StoreError as error:
        severity = DAMAGE if isinstance(error, DamagedError | FormatError) else UNCHECKED
        notes.add(severity, "commit record", "/".join(parts), problem(error, store.path), run=run.name)
        run.is_open = False
        return
    again = {seq for seq, error in damaged.items() if not isinstance(error, UnsupportedFormatError)}
    if again:
        # replaced by a tombstone, or removed, while it was read
        damaged = {seq: error for seq, error in damaged.items() if seq not in again}
        with contextlib.suppress(RunNotFoundError):
            there = set(store.sequence(run.name)) & again
            run.records += store.records(run.name, damaged=damaged, only=there)
            run.records.sort(key=lambda record: record.seq)
    for seq, each in damaged.items():
        if listed(store, folder_of(run.name, seq).split("/"), notes) is None:
            continue
        if isinstance(each, FormatError) and _is_misplaced_commit(store, run, seq, notes):
            continue
        severity = UNCHECKED if isinstance(each, UnsupportedFormatError | StorageError) else DAMAGE
        told = Affected(run.name, seq)
        where = f"{folder_of(run.name, seq)}/{COMMIT_FILE}"
        notes.add(severity, "commit record", where, problem(each, store.path), run=run.name, affected=(told,))
    moved = elsewhere | set(run.misplaced.values())
    run.damaged = set(damaged) | moved - {record.seq for record in run.records}
    pruned = [record for record in run.records if isinstance(record, TombstoneRecord)]
    notes.count(records=len(run.records), pruned=len(pruned))
    for tombstone in pruned:
        folder = folder_of(run.name, tombstone.seq)
        left = [name for name in _entries(store, folder.split("/"), notes) if name != COMMIT_FILE]
        for name in left:
            size = reader.size_of(store.path / folder / name)
            notes.add(LEFTOVER, "pruned", f"{folder}/{name}", "lies beside a tombstone", run=run.name, size=size)


def _is_misplaced_commit(store: StoreFiles, run: Run, seq: int, notes: Notes) -> bool:
    """Returns whether the record in a checkpoint's folder is whole and has another number."""
    where = folder_of(run.name, seq)
    record = record_in(store, where, run_id=None if run.record is None else run.record.id)
    if record is None or record.seq == seq or not _belongs(store, where, record):
        return False
    number = record.seq
    run.misplaced[seq] = number
    name = names.sequence_name(number)
    is_copy = any((each.seq, each.id) == (number, record.id) for each in run.records)
    if is_copy:
        text, advice = f"is a copy of number {number}", f"remove it: {name} is there"
    else:
        text, advice = f"is number {number}", f"rename it back to {name}"
    told = Affected(run.name, number, record.id, record.step, restorable=is_copy)
    advice = f"{advice}; `simckpt check --repair` leaves it alone"
    notes.add(DAMAGE, "place", where, text, run=run.name, affected=(told,), advice=advice)
    return True


def _belongs(store: StoreFiles, where: str, record: CommitRecord | TombstoneRecord) -> bool:
    """Returns whether what lies in a folder is that of the record in it, which was not put there alone."""
    name = SHARDS_FILE if isinstance(record, CommitRecord) and record.shards else INDEX_FILE
    path = store.path / where / name
    try:
        data = reader.read_small(store.path, *where.split("/"), name, limit=INDEX_LIMIT, path=path)
    except FileNotFoundError:
        return isinstance(record, TombstoneRecord)
    except StoreError:
        return False
    return isinstance(record, CommitRecord) and digests.matches(data, record.file(name).digest)


def _examine_starts(store: StoreFiles, run: Run, notes: Notes) -> None:
    parts = ("runs", run.name, STARTS)
    users: dict[str, list[CommitRecord]] = {}
    for record in run.records:
        if isinstance(record, CommitRecord) and record.start is not None:
            users.setdefault(record.start, []).append(record)
    found = set()
    there = listed(store, parts, notes)
    if there is None:
        return
    for name in there:
        identity, dot, ending = name.partition(".")
        if names.ID.fullmatch(identity) and dot + ending == ".json":
            found.add(identity)
        else:
            notes.add(FOREIGN, "foreign", "/".join((*parts, name)), "is no record of a start", run=run.name)
    for identity in sorted(found | users.keys()):
        where = "/".join((*parts, f"{identity}.json"))

        def parse(data: bytes, path: object, identity: str = identity) -> object:
            return parse_start(data, path, id=identity)

        def still(identity: str = identity) -> list[CommitRecord]:
            return [record for record in users.get(identity, []) if is_living(store, run.name, record)]

        told = [affected(run.name, record, restorable=True) for record in users.get(identity, ())]
        _examine_small(store, where, parse, "start", START_LIMIT, notes, run.name, tuple(told), still)


def is_living(store: StoreFiles, run: str, record: CommitRecord) -> bool:
    """Returns whether this is still the record of a checkpoint; a damaged one is."""
    try:
        return isinstance(store.commit_record(run, record.seq), CommitRecord)
    except (RunNotFoundError, CheckpointNotFoundError):
        return False
    except StoreError:
        return True


def _examine_marks(store: StoreFiles, run: str, notes: Notes) -> None:
    parts = ("runs", run, marks.MARKS)
    for checkpoint in _entries(store, parts, notes):
        if not names.ID.fullmatch(checkpoint):
            notes.add(FOREIGN, "foreign", "/".join((*parts, checkpoint)), "holds no marks", run=run)
            continue
        for name in _entries(store, (*parts, checkpoint), notes):
            where = "/".join((*parts, checkpoint, name))
            if not marks.is_mark(name):
                notes.add(FOREIGN, "foreign", where, "is no mark", run=run)
                continue

            def parse(data: bytes, path: object, checkpoint: str = checkpoint, name: str = name) -> object:
                return marks.parse_mark(data, path, checkpoint=checkpoint, name=name)

            # nothing refers to a mark: one that is gone was removed
            _examine_small(store, where, parse, "mark", marks.MARK_LIMIT, notes, run, (), list)


def _examine_archived(store: StoreFiles, run: Run, notes: Notes) -> None:
    parts = ("runs", run.name, archived.FOLDER)
    for name in _entries(store, parts, notes):
        seq, where = name.removesuffix(".json"), "/".join((*parts, name))
        if seq == name or not names.SEQUENCE.fullmatch(seq) or not int(seq):
            notes.add(FOREIGN, "foreign", where, "is no record of an archived checkpoint", run=run.name)
            continue
        run.archived.add(int(seq))
        parse = functools.partial(archived.parse_archived, seq=int(seq))
        _examine_small(store, where, parse, "archive", archived.ARCHIVED_LIMIT, notes, run.name, (), list)


def _examine_claim(store: StoreFiles, run: str, notes: Notes) -> None:
    where = f"runs/{run}/writer/owner.json"
    _examine_small(store, where, claims.parse_owner, "claim", RECORD_LIMIT, notes, run, (), list)


def _examine_small(
    store: StoreFiles,
    where: str,
    parse: Callable[[bytes, object], object],
    kind: str,
    limit: int,
    notes: Notes,
    run: str | None,
    told: tuple[Affected, ...],
    still: Callable[[], Sequence[object]],
) -> None:
    """Verifies a small record; one that is missing is damage only if something still refers to it."""
    path, parts = store.path / where, where.split("/")

    def examine(found: Notes) -> None:
        try:
            data = reader.read_small(store.path, *parts, limit=limit, path=path)
            parse(data, path)
            found.count(records=1, nbytes=len(data))
        except FileNotFoundError:
            if still():
                found.add(DAMAGE, kind, where, "is missing", run=run, affected=told)
        except (UnsupportedFormatError, StorageError) as error:
            found.add(UNCHECKED, kind, where, problem(error, store.path), run=run)
        except StoreError as error:
            if any(parent.is_symlink() for parent in path.parents if parent.is_relative_to(store.path / parts[0])):
                return  # that is told of the folder
            found.add(DAMAGE, kind, where, problem(error, store.path), run=run, affected=told)

    merge(notes, settled(examine, lambda: stamp_of(store, *parts)))


def examine_store_record(store: StoreFiles, notes: Notes) -> None:
    """Verifies `store.json`."""
    _examine_small(store, STORE_FILE, parse_store, "store record", RECORD_LIMIT, notes, None, (), lambda: [store])
