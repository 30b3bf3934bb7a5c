"""Keepers with disks that fail, and what of it was given to them."""

import time
from pathlib import Path
from typing import Any

import numpy as np

from simckpt import state
from simckpt.hardware.keeping import Keeper
from simckpt.hardware.ring import Part, Snapshot
from simckpt.hardware.session import Session
from simckpt.hardware.triggers import Found
from simckpt.storage import StoreFiles
from simckpt.storage.session_ending import close_session
from simckpt.storage.session_records import SessionRecord
from simckpt.storage.session_writing import create_session
from simckpt.storage.sessions import SessionFiles, session_names
from simckpt.testing.faults import Fault, FaultyDisk

MODEL = "30" * 16
SECOND = 1_000_000_000  # [ns]


def part(start: int, stop: int, *, reward: float = 0.0) -> Part:
    """Rows, of which each takes a second."""
    rows = np.arange(start, stop)
    finished = (rows + 1) * SECOND
    tables = {
        "rows": {"order": rows, "row": rows, "finished": finished, "reward": np.full(len(rows), reward)},
        "resets": {"order": rows[:0], "row": rows[:0]},
    }
    spans = {"rows": (start, stop), "resets": (0, 0)}
    return Part(tables, (start, stop), spans, start * SECOND, stop * SECOND)


def snapshot(row: int, *models: str) -> Snapshot:
    encoded = state.encode({"env": {"row": row}, "observation": None})
    return Snapshot(encoded, row, row, row * SECOND, row, "test", models)


def keeper(path: Path, disk: FaultyDisk, told: list[str], **settings: Any) -> Keeper:
    store = StoreFiles.create(path, disk=disk)
    ring = settings.get("ring") is not None
    record = SessionRecord("5e" * 16, "pole", 1.8e9, 0, mode="ring" if ring else "continuous")
    if not ring:
        create_session(store, record, disk=disk)
    return Keeper(path, record, told.append, disk=disk, **settings)


def session_of(path: Path, name: str = "pole") -> Session:
    return Session(SessionFiles(path, name))


def rows_of(session: Session) -> list[int]:
    """Returns the numbers of all rows that are there, every byte verified."""
    for each in session.parts:
        session.files.verify(f"parts/{each.folder}", each)
    return [int(row) for chunk in session.chunks(["rows/row"]) for row in chunk["rows"]["row"]]


def continuous(path: Path, disk: FaultyDisk, told: list[str]) -> Keeper:
    keeping = keeper(path, disk, told)
    keeping.add(part(0, 3))
    return keeping


def go_on(keeping: Keeper) -> None:
    keeping.add(part(3, 6))
    keeping.add_model(MODEL, state.encode({"mass": np.arange(4.0)}))
    keeping.add(snapshot(6, MODEL))
    keeping.add(part(6, 9))


def kept(path: Path, disk: FaultyDisk, told: list[str]) -> Keeper:
    keeping = keeper(path, disk, told, ring=100.0, after=6.0)
    keeping.add_model(MODEL, state.encode({"mass": np.arange(4.0)}))
    keeping.add(part(0, 3))
    keeping.add(snapshot(6, MODEL))
    keeping.add(part(3, 6))
    return keeping


def trigger(keeping: Keeper) -> None:
    keeping.trigger(Found(6, 6 * SECOND, "that was odd"))
    keeping.add(part(6, 9))


def finish(keeping: Keeper) -> None:
    keeping.add(part(9, 12))
    keeping.close("closed", "")


WAYS = {"continuous": (continuous, go_on, "pole"), "ring": (kept, trigger, "pole-1")}


def operations(path: Path, way: str, *, whole: bool) -> int:
    """Returns how many operations there are to fail at, the end included if `whole`."""
    make, middle, _ = WAYS[way]
    keeping = make(path, disk := FaultyDisk(), told := [])
    disk.arm()
    middle(keeping)
    count = len(disk.calls)
    finish(keeping)
    assert told == []
    return len(disk.calls) if whole else count


def assert_late_and_not_lost(path: Path, way: str, fault: Fault, at: int, *, sticky: bool) -> None:
    """Has one operation fail, or all from it on until the end begins: nothing is missing then.

    One refusal may come at the end as well, where there is time for another attempt.
    """
    make, middle, name = WAYS[way]
    keeping = make(path, disk := FaultyDisk(), told := [])
    disk.arm(fault, at=at, sticky=sticky)
    middle(keeping)
    if sticky:
        disk.arm()
    finish(keeping)
    disk.arm()
    assert session_names(path) == [name], told
    session = session_of(path, name)
    assert rows_of(session) == list(range(12)), told
    assert [each.row for each in session.snapshots] == [6], told
    assert session.snapshot(6)["env"]["models"][MODEL]["mass"].tolist() == [0, 1, 2, 3]
    assert session.closed is not None, told
    assert (session.missing, session.closed.rows) == ([], (0, 12)), told
    assert len(told) <= 1, told


def assert_told_what_is_lost(path: Path, way: str, fault: Fault, at: int) -> None:
    """Has all operations fail from one on: what was written before is there, and that there was more is told."""
    make, middle, name = WAYS[way]
    keeping = make(path, disk := FaultyDisk(), told := [])
    disk.arm(fault, at=at, sticky=True)
    middle(keeping)
    finish(keeping)
    disk.arm()
    if name not in session_names(path):
        assert any("the ring was not kept" in text for text in told), told
        return
    session = session_of(path, name)
    rows = rows_of(session)
    assert rows == list(range(len(rows)))
    if session.closed is None:
        assert told
        assert session.status in ("unfinished", "recording")
        # not one that may just be begun
        closed = close_session(path, name, clock=lambda: time.time() + 3600)
        # a claim that could not be given back is as that of a process that was killed
        assert closed.how in ("killed", "refused")
        assert closed.rows is None
    assert rows_of(session) == rows
    assert rows == list(range(12)) or session.missing or session.closed.rows is None
