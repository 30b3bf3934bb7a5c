"""Notices folders of runs and checkpoints that lie where nobody looks for them, by what is in them."""

from __future__ import annotations

import os

from simckpt.errors import StoreError
from simckpt.maintenance.findings import DAMAGE, Notes
from simckpt.storage import CommitRecord, StoreFiles, TombstoneRecord, names, reader, sealed
from simckpt.storage.records import COMMIT_LIMIT, RECORD_LIMIT, parse_commit
from simckpt.storage.run_records import parse_run
from simckpt.storage.store_reader import COMMIT_FILE, RUN_FILE

_LEFT = "`simckpt check --repair` leaves it alone"


def record_in(store: StoreFiles, where: str, *, run_id: str | None) -> CommitRecord | TombstoneRecord | None:
    """Returns the record of a commit in a folder of whatever name, or None if it cannot be read.

    Args:
        store: the files.
        where: the folder, relative to the store.
        run_id: of the run that it must be of, if that is known.
    """
    path = store.path / where / COMMIT_FILE
    try:
        data = reader.read_small(store.path, *where.split("/"), COMMIT_FILE, limit=COMMIT_LIMIT, path=path)
        kind = "tombstone" if b'"format": "simckpt tombstone"' in data[:64] else "commit"
        number = sealed.unseal(data, kind, path=path).integer("seq", minimum=1)
        return parse_commit(data, path, seq=number, run_id=run_id)
    except (StoreError, FileNotFoundError):
        return None


def is_run_elsewhere(store: StoreFiles, where: str, notes: Notes) -> bool:
    """Returns whether a folder that has no place and name of a run holds one, and says so."""
    path = store.path / where
    if path.is_symlink() or not (path / "checkpoints").is_dir():
        return False
    try:
        data = reader.read_small(store.path, *where.split("/"), RUN_FILE, limit=RECORD_LIMIT, path=path / RUN_FILE)
        name = parse_run(data, path / RUN_FILE).name
    except (StoreError, FileNotFoundError):
        text, advice = "is the folder of a run", "move it back to its name in runs/"
    else:
        if os.path.lexists(store.path / "runs" / name):
            text, advice = (
                f"is the folder of run {name!r}, or a copy",
                f"move it out of the store: runs/{name} is there",
            )
        else:
            text, advice = f"is the folder of run {name!r}", f"move it back to runs/{name}"
    notes.add(DAMAGE, "place", where, text, advice=f"{advice}; {_LEFT}")
    return True


def checkpoint_elsewhere(store: StoreFiles, run: str, name: str, notes: Notes) -> int | None:
    """Returns the number of the checkpoint in a folder that has no name of one, and says so; None if it holds none."""
    where = f"runs/{run}/checkpoints/{name}"
    record = record_in(store, where, run_id=None)
    if record is None:
        return None
    place = names.sequence_name(record.seq)
    if os.path.lexists(store.path / "runs" / run / "checkpoints" / place):
        text, advice = f"is number {record.seq}, or a copy", f"move it out of the store: {place} is there"
    else:
        text, advice = f"is number {record.seq}", f"rename it back to {place}"
    notes.add(DAMAGE, "place", where, text, run=run, advice=f"{advice}; {_LEFT}")
    return record.seq


def has_folder(store: StoreFiles, run: str, notes: Notes) -> bool:
    """Returns whether a run has its folder of checkpoints, made with its record, or tells that it has none."""
    where = f"runs/{run}/checkpoints"
    if os.path.lexists(store.path / where) or not os.path.lexists(store.path / "runs" / run):
        return True
    notes.add(
        DAMAGE,
        "folder",
        where,
        "is missing",
        run=run,
        meaning="no checkpoint of the run is found, and it cannot be started",
        advice="put the folder itself back in its place, or make an empty one: `simckpt check --repair` then brings "
        "back what an archive has, and without one the run begins anew",
    )
    return False
