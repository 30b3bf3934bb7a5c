"""Verifies that what records refer to is there: parents, origins, what rollbacks left; no number or id is lost."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from simckpt.maintenance.findings import DAMAGE, Notes
from simckpt.maintenance.recording import Run
from simckpt.maintenance.verifying import affected, folder_of
from simckpt.storage import CommitRecord, TombstoneRecord
from simckpt.storage.records import LOST
from simckpt.storage.store_reader import COMMIT_FILE, RUN_FILE

Record = CommitRecord | TombstoneRecord
_GAPS = 1000  # of a run that are told; in a stranger's store a number may be anything
MISSING = "its folder was removed"
COPIED = "has the id"


def examine_lineage(runs: Sequence[Run], notes: Notes) -> None:
    """Adds what is wrong between the records of a store; damage that is told already explains what it leaves open."""
    runs = [run for run in runs if not run.is_copy]  # that is told of them
    places: dict[str, list[tuple[str, int]]] = {}
    for run in runs:
        for record in run.records:
            places.setdefault(record.id, []).append((run.name, record.seq))
    for identity, found in places.items():
        if len(found) > 1:
            for name, seq in found:
                others = ", ".join(folder_of(*each) for each in found if each != (name, seq))
                _add(notes, name, seq, f"{COPIED} {identity}, as {others} has: a folder was copied")
    lost = any(run.damaged or run.record is None or not run.is_open for run in runs)
    for run in runs:
        for seq in _gaps(run):
            run.damaged.add(seq)
            _add(notes, run.name, seq, f"{MISSING}, by other means than pruning")
        origin = None if run.record is None else run.record.origin
        if origin is not None and origin not in places and not _explained(origin, run, runs, lost):
            where = f"runs/{run.name}/{RUN_FILE}"
            text = f"the run was branched from checkpoint {origin}, which is not in the store"
            advice = "the run can be started only once it has a checkpoint of its own"
            notes.add(DAMAGE, "lineage", where, text, run=run.name, advice=advice)
        for record, reference, what in _references(run, origin):
            if reference not in places and not _may_be_lost(run, record.seq):
                _add(notes, run.name, record.seq, f"{what} {reference} is not in the store", record)
            elif what == "its parent" and not _is_before(places.get(reference, ()), run, record, origin):
                _add(notes, run.name, record.seq, f"{what} {reference} is not an earlier commit of its run", record)


def _add(notes: Notes, run: str, seq: int, text: str, record: Record | None = None) -> None:
    told = (affected(run, record, restorable=True),) if isinstance(record, CommitRecord) else ()
    where = folder_of(run, seq) if record is None else f"{folder_of(run, seq)}/{COMMIT_FILE}"
    advice = ""
    if text.startswith(MISSING):
        advice = "`simckpt check --repair` puts the record of a lost checkpoint there"
    elif text.startswith(COPIED):
        advice = "remove one of the two folders; `simckpt check --repair` leaves both alone"
    notes.add(DAMAGE, "lineage", where, text, run=run, affected=told, advice=advice)


def _gaps(run: Run) -> list[int]:
    if not run.is_open:
        return []  # that is told
    there = {record.seq for record in run.records} | run.damaged
    # a folder of another name may be the one that is missing; the newest may be, of which the archive has a copy
    top = max(there - run.misplaced.keys() | set(run.misplaced.values()), default=0)
    top = max(top, *(seq + 1 for seq in run.archived), 0)
    missing = (seq for seq in range(1, top) if seq not in there)
    return list(itertools.islice(missing, _GAPS))


def _references(run: Run, origin: str | None) -> Iterator[tuple[Record, str, str]]:
    for record in run.records:
        if record.parent is not None and record.parent != origin:
            yield record, record.parent, "its parent"
        abandoned = (record.rollback or {}).get("abandoned")
        if isinstance(abandoned, str):
            yield record, abandoned, "what it went back from,"


def _may_be_lost(run: Run, seq: int) -> bool:
    """Returns whether a record before this one cannot be read, so that it may be the one that is referred to."""
    lost = run.damaged | set(run.misplaced) | {record.seq for record in run.records if record.kind == LOST}
    # of a branch whose record is damaged the origin is not known
    return run.record is None or any(each < seq for each in lost)


def _explained(origin: str, run: Run, runs: Sequence[Run], lost: bool) -> bool:
    branch = None if run.record is None else run.record.branch
    if branch is None:
        return lost
    (*_, there) = [None, *(each for each in runs if each.name == branch.run)]
    if there is None:
        return False
    return (
        not there.is_open
        or branch.seq in there.damaged
        or any(record.seq == branch.seq and record.kind == LOST for record in there.records)
    )


def _is_before(found: Sequence[tuple[str, int]], run: Run, record: Record, origin: str | None) -> bool:
    if not found or run.record is None:
        return True
    return any(name == run.name and seq < record.seq for name, seq in found)
