"""What a keeper is given is in the session, late at worst, whatever the disk refuses; what is lost is told."""

import contextlib
import errno
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from keeping_helpers import (
    SECOND,
    WAYS,
    assert_late_and_not_lost,
    assert_told_what_is_lost,
    keeper,
    operations,
    part,
    rows_of,
    session_of,
    snapshot,
)

from simckpt import state
from simckpt.errors import SimckptError
from simckpt.hardware.losses import AGAIN, Losses
from simckpt.hardware.triggers import Found, OutOfRange
from simckpt.storage import StoreFiles, claims
from simckpt.storage.session_records import SessionRecord
from simckpt.storage.session_writing import SessionWriter, create_session
from simckpt.storage.sessions import session_names
from simckpt.testing.faults import FaultyDisk, Operation, fail


def test_parts_are_merged_while_the_recording_goes_on(tmp_path) -> None:
    keeping = keeper(tmp_path, FaultyDisk(), told := [])
    for start in range(0, 3 * 70, 3):
        keeping.add(part(start, start + 3))
    session = session_of(tmp_path)
    assert [each.numbers for each in session.parts] == [(1, 60), *((number, number) for number in range(61, 71))]
    assert session.read()["rows"]["row"].tolist() == list(range(3 * 70))
    keeping.close("closed", "")
    assert len(session.parts) == 1
    assert told == []


# a disk that refuses at one operation, or for a while from one on, whichever that is


EVERY = [
    pytest.param(37, id="some"),
    pytest.param(1, id="all", marks=pytest.mark.slow),
]


@pytest.mark.parametrize("every", EVERY)
@pytest.mark.parametrize("sticky", [False, True], ids=["once", "for-a-while"])
@pytest.mark.parametrize("way", WAYS)
def test_what_a_disk_refuses_at_any_operation_is_late_and_not_lost(tmp_path, way, sticky, every) -> None:
    count = operations(tmp_path / "count", way, whole=not sticky)
    for number, code in enumerate((errno.EIO, errno.ENOSPC)):
        for at in range(1 + number * (every // 2), count + 1, every):
            assert_late_and_not_lost(tmp_path / f"{code}-{at}", way, fail(code), at, sticky=sticky)
            shutil.rmtree(tmp_path / f"{code}-{at}")


@pytest.mark.parametrize("every", EVERY)
@pytest.mark.parametrize("way", WAYS)
def test_a_disk_that_refuses_from_any_operation_on_leaves_what_was_written_and_that_is_told(
    tmp_path, way, every
) -> None:
    for at in range(1, operations(tmp_path / "count", way, whole=True) + 1, every):
        assert_told_what_is_lost(tmp_path / str(at), way, fail(errno.EIO), at)
        shutil.rmtree(tmp_path / str(at))


# what is lost


class Full(FaultyDisk):
    """A disk that has, once full, no room but for what is given back."""

    def __init__(self) -> None:
        super().__init__()
        self.room = 1 << 40

    def allocate(self, descriptor: int, size: int) -> None:
        if size > self.room:
            raise OSError(errno.ENOSPC, "no room")
        self.room -= size
        super().allocate(descriptor, size)

    def unlink(self, path: Path) -> None:
        size = path.lstat().st_size
        super().unlink(path)
        self.room += size


def test_on_a_full_disk_the_session_is_closed_and_names_what_is_missing(tmp_path) -> None:
    keeping = keeper(tmp_path, disk := Full(), told := [])
    keeping.add(part(0, 3))
    disk.room = 0
    for row in range(3, 99, 3):
        keeping.add(part(row, row + 3))
    keeping.close("closed", "the program ended")
    session = session_of(tmp_path)
    assert (session.status, session.missing) == ("closed", [range(3, 99)])
    assert rows_of(session) == [0, 1, 2]
    # the reserve has room for the event as well, or else how it ended says so
    texts = [session.closed.text, *(event.text for event in session.events)]
    assert any("rows 3 to 98 were lost: the disk refused until the end" in text for text in texts)
    assert [text.partition(":")[0] for text in told] == [
        "session 'pole' cannot be written for the moment",
        "rows from 3 on are being lost",
        "rows 3 to 98 were lost",
    ]


def test_rows_that_are_lost_before_the_first_part_are_missing(tmp_path) -> None:
    keeping = keeper(tmp_path, FaultyDisk(), told := [])
    keeping.lost((0, 40), "too slow")
    keeping.lost((40, 50), "too slow")
    keeping.add(part(50, 53))
    keeping.lost((53, 60), "too slow")
    keeping.close("closed", "", 70)
    session = session_of(tmp_path)
    assert session.missing == [range(50), range(53, 70)]
    lost = [event.text for event in session.events if event.kind == "lost"]
    assert lost[:2] == ["rows 0 to 49 were lost: too slow", "rows 53 to 59 were lost: too slow"]
    assert lost[2].startswith("rows 60 to 69 were lost")
    assert "rows 0 to 49, 53 to 59 were lost: too slow" in told


def test_a_session_without_a_part_tells_how_it_ended_what_was_lost(tmp_path) -> None:
    keeping = keeper(tmp_path, FaultyDisk(), told := [])
    keeping.lost((0, 40), "too slow")
    keeping.close("closed", "the program ended", 40)
    session = session_of(tmp_path)
    assert session.closed.text == "the program ended; rows 0 to 39 were lost: too slow"
    assert (session.rows, session.missing) == (range(0), [range(40)])
    assert told[-1] == "rows 0 to 39 were lost: too slow"


def test_what_was_noted_after_the_last_part_is_an_event(tmp_path) -> None:
    keeping = keeper(tmp_path, FaultyDisk(), told := [])
    keeping.add(part(0, 3))
    keeping.note("note", "the motor smells")
    keeping.close("closed", "")
    session = session_of(tmp_path)
    assert [(event.kind, event.row, event.text) for event in session.events] == [("note", 3, "the motor smells")]
    assert (rows_of(session), session.missing, told) == ([0, 1, 2], [], [])


@pytest.mark.parametrize("snapshots", [False, True])
def test_what_a_disk_refuses_for_too_long_is_told_by_the_session(tmp_path, snapshots) -> None:
    keeping = keeper(tmp_path, disk := FaultyDisk(), told := [], waiting=300)
    keeping.add(part(0, 3))
    disk.arm(fail(errno.ENOSPC), at=1, sticky=True)
    for start in range(3, 300, 3):
        keeping.add(part(start, start + 3))
        if snapshots:
            keeping.add(snapshot(start + 3))
        # the first may be on the disk by half, and the newest has just come
        assert sum(each.nbytes for each in keeping._waiting) <= 300 + 2 * part(0, 3).nbytes
    disk.arm()
    keeping.add(part(300, 303))
    keeping.close("closed", "")
    session = session_of(tmp_path)
    rows = rows_of(session)
    assert rows[:3] == [0, 1, 2]
    assert rows[-3:] == [300, 301, 302]
    lost = [row for each in session.missing for row in each]
    assert lost
    assert sorted([*rows, *lost]) == list(range(303))
    events = [event.text for event in session.events if event.text.startswith("rows ")]
    assert events == [
        f"rows {each.start} to {each.stop - 1} were lost: the disk has refused for too long" for each in session.missing
    ]
    assert any("the snapshot before" in event.text for event in session.events) == snapshots
    assert len(told) == (5 if snapshots else 3)


def test_a_ring_that_cannot_be_kept_for_too_long_has_a_bound_and_says_so(tmp_path) -> None:
    keeping = keeper(tmp_path, disk := FaultyDisk(), told := [], ring=5.0, waiting=3000)
    for row in range(0, 30, 3):
        keeping.add(part(row, row + 3))
    disk.arm(fail(errno.ENOSPC), at=1, sticky=True)
    keeping.trigger(Found(30, 30 * SECOND, "odd"))
    for row in range(30, 300, 3):
        keeping.add(part(row, row + 3))
        assert sum(each.nbytes for each in keeping._ring) <= 3000
    disk.arm()
    keeping.add(part(300, 303))
    keeping.close("closed", "")
    session = session_of(tmp_path, "pole-1")
    rows = rows_of(session)
    (missing,) = session.missing
    # 5 s before the end of the last part that had come by then
    assert missing.start == 24
    assert rows == list(range(missing.stop, 303))
    assert [text.partition(":")[0] for text in told] == [
        "the ring cannot be kept for the moment (odd)",
        f"rows from {missing.start} on are being lost",
        f"rows {missing.start} to {missing.stop - 1} were lost",
    ]


def test_a_ring_that_could_never_be_kept_is_told(tmp_path) -> None:
    keeping = keeper(tmp_path, disk := FaultyDisk(), told := [], ring=5.0)
    keeping.add(part(0, 3))
    disk.arm(fail(errno.ENOSPC), at=1, sticky=True)
    keeping.trigger(Found(3, 3 * SECOND, "odd"))
    keeping.close("closed", "")
    assert "the ring was not kept (odd): the disk refused until the end" in told
    disk.arm()
    assert session_names(tmp_path) == []


def test_a_cause_that_lasts_is_kept_once_although_the_disk_refused_it_first(tmp_path) -> None:
    keeping = keeper(tmp_path, disk := FaultyDisk(), [], ring=5.0, triggers=(OutOfRange("reward", high=1.0),))
    keeping.add(part(0, 3))
    disk.arm(fail(errno.EIO), at=1, sticky=True)
    keeping.add(part(3, 6, reward=7.0))
    keeping.add(part(6, 9, reward=7.0))
    disk.arm()
    keeping.add(part(9, 12, reward=7.0))
    keeping.add(part(12, 15, reward=7.0))
    keeping.close("closed", "")
    assert session_names(tmp_path) == ["pole-1"]
    assert rows_of(session_of(tmp_path, "pole-1")) == list(range(12))


def test_losses_are_warned_of_when_they_begin_and_as_a_whole() -> None:
    told: list[str] = []
    now = 0.0
    losses = Losses(told.append, clock=lambda: now)
    for row in range(0, 100, 10):
        losses.add((row, row + 10), "slow")
    losses.add((200, 210), "slow")
    assert [each.rows for each in losses.fresh] == [(0, 100), (200, 210)]
    losses.fresh.clear()
    assert told == ["rows from 0 on are being lost: slow"]
    now += 2 * AGAIN
    losses.add((500, 510), "slow")
    losses.add((600, 600), "full")
    assert told[1:] == ["rows from 500 on are being lost: slow", "rows from 600 on are being lost: full"]
    assert [each.text for each in losses.fresh] == [
        "rows 500 to 509 were lost: slow",
        "what was recorded before row 600 was lost: full",
    ]
    assert losses.summary() == ["rows 0 to 99, 200 to 209, 500 to 509 were lost: slow"]
    assert losses.summary() == []


def test_models_go_with_the_snapshots_that_need_them(tmp_path) -> None:
    keeping = keeper(tmp_path, FaultyDisk(), [], ring=4.0)
    for row in range(0, 60, 3):
        digest = f"{row:032x}"
        keeping.add_model(digest, state.encode({"mass": np.full(1000, row)}))
        keeping.add(snapshot(row, digest))
        keeping.add(part(row, row + 3))
        assert len(keeping._models) <= 4
    keeping.trigger(Found(60, 60 * SECOND, "odd"))
    keeping.close("closed", "")
    session = session_of(tmp_path, "pole-1")
    assert [each.row for each in session.snapshots] == [54, 57]
    for each in session.snapshots:
        (model,) = session.snapshot(each)["env"]["models"].values()
        assert set(model["mass"].tolist()) == {each.row}


def test_a_claim_that_was_taken_over_ends_the_recording_and_is_always_told(tmp_path) -> None:
    keeping = keeper(tmp_path, disk := FaultyDisk(), told := [])
    keeping.add(part(0, 3))
    disk.arm(fail(errno.ENOSPC), at=1, sticky=True)
    keeping.add(part(3, 6))
    disk.arm()
    owner = tmp_path / "sessions/pole/writer/owner.json"
    owner.rename(tmp_path / "owner.json")
    keeping.add(part(6, 9))
    assert "goes on elsewhere" in told[-1]
    keeping.add(part(9, 12))
    keeping.close("closed", "")
    assert rows_of(session_of(tmp_path)) == [0, 1, 2]


def refusing(name: str, count: int) -> Callable[[Operation], Any]:
    """Returns a fault that refuses the next so many operations of a name, and everything behind the first of them."""
    left = count

    def fault(operation: Operation) -> Any:
        nonlocal left
        if operation.name == name and left:
            left -= 1
            raise OSError(errno.EIO, "refused")
        return operation.perform()

    return fault


@pytest.mark.parametrize("count", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_merge_that_is_refused_is_tried_again_much_later(tmp_path, count) -> None:
    keeping = keeper(tmp_path, disk := FaultyDisk(), told := [])
    for row in range(59):
        keeping.add(part(row, row + 1))
    disk.arm()
    keeping.add(part(59, 60))
    merging = disk.calls.count("rename")
    assert merging >= 2
    for row in range(60, 119):
        keeping.add(part(row, row + 1))
    disk.arm(refusing("remove_folder", count), at=1, sticky=True)
    keeping.add(part(119, 120))
    disk.arm()
    for row in range(120, 185):
        keeping.add(part(row, row + 1))
    with contextlib.suppress(SimckptError):
        keeping.close("closed", "")
    assert rows_of(session_of(tmp_path)) == list(range(185))
    assert told == []


def test_a_ring_is_kept_again_after_one_that_went_on_elsewhere(tmp_path) -> None:
    keeping = keeper(tmp_path, FaultyDisk(), told := [], ring=100.0, after=3.0)
    keeping.add(part(0, 3))
    keeping.trigger(Found(3, 3 * SECOND, "odd"))
    owner = tmp_path / "sessions/pole-1/writer/owner.json"
    owner.rename(tmp_path / "owner.json")
    keeping.add(part(3, 6))
    assert "goes on elsewhere" in told[-1]
    keeping.trigger(Found(6, 6 * SECOND, "odd again"))
    keeping.add(part(6, 8))
    keeping.add(part(8, 9))
    assert session_of(tmp_path, "pole-2").status == "trigger"
    assert rows_of(session_of(tmp_path, "pole-2")) == list(range(9))


def test_a_session_that_is_open_is_heard_of_although_nothing_comes(tmp_path) -> None:
    keeping = keeper(tmp_path, disk := FaultyDisk(), [])
    keeping.add(part(0, 3))
    disk.arm()
    with claims.beating_every(0.0):
        keeping.write()
    assert disk.calls == ["touch"]
    keeping.close("closed", "")


def test_what_cannot_be_written_for_want_of_memory_is_late_and_not_lost(tmp_path) -> None:
    def out_of_memory(operation: Operation) -> Any:
        raise MemoryError

    keeping = keeper(tmp_path, disk := FaultyDisk(), told := [])
    disk.arm(out_of_memory, at=1, sticky=True)
    keeping.add(part(0, 3))
    keeping.add(part(3, 6))
    disk.arm()
    keeping.add(part(6, 9))
    keeping.close("closed", "")
    assert rows_of(session_of(tmp_path)) == list(range(9))
    assert told == ["session 'pole' cannot be written for the moment: out of memory"]


# another recorder of the same name


def others(path: Path) -> bytes:
    """Records a session that a ring is about to begin, and returns its record."""
    store = StoreFiles.open(path)
    create_session(store, SessionRecord("07" * 16, "pole-1", 1.8e9, 0))
    with SessionWriter(path, "pole-1") as writer:
        table = {"rows": {"order": np.arange(2), "row": np.arange(2)}}
        writer.write_part(state.encode(table), rows=(0, 2), spans={"rows": (0, 2)}, started=0, stopped=1)
        writer.close("closed", "", rows=(0, 2))
    return (path / "sessions/pole-1/session.json").read_bytes()


def test_a_ring_takes_the_next_number_if_another_one_was_quicker(tmp_path) -> None:
    made: list[bytes] = []

    def quicker(operation: Operation) -> Any:
        if operation.name == "rename" and Path(operation.arguments[1]).name == "pole-1" and not made:
            made.append(others(tmp_path))
            raise FileExistsError(errno.EEXIST, "exists")
        return operation.perform()

    keeping = keeper(tmp_path, disk := FaultyDisk(), told := [], ring=100.0, after=6.0)
    keeping.add(part(0, 3))
    disk.arm(quicker, at=1, sticky=True)
    keeping.trigger(Found(3, 3 * SECOND, "odd"))
    keeping.add(part(3, 12))
    assert made == [(tmp_path / "sessions/pole-1/session.json").read_bytes()]
    assert session_of(tmp_path, "pole-1").status == "closed"
    assert rows_of(session_of(tmp_path, "pole-2")) == list(range(12))
    assert len(told) <= 1


def test_a_ring_that_could_not_be_kept_removes_no_session_of_others(tmp_path) -> None:
    def no_new_one(operation: Operation) -> Any:
        if operation.name == "rename" and Path(operation.arguments[1]).parent.name == "sessions":
            raise OSError(errno.EIO, "refused")
        return operation.perform()

    keeping = keeper(tmp_path, disk := FaultyDisk(), told := [], ring=100.0)
    keeping.add(part(0, 3))
    disk.arm(no_new_one, at=1, sticky=True)
    keeping.trigger(Found(3, 3 * SECOND, "odd"))
    record = others(tmp_path)
    keeping.close("closed", "")
    assert (tmp_path / "sessions/pole-1/session.json").read_bytes() == record
    assert rows_of(session_of(tmp_path, "pole-1")) == [0, 1]
    assert "the ring was not kept (odd): the disk refused until the end" in told


def test_each_session_of_a_ring_tells_that_another_thread_uses_a_link(tmp_path) -> None:
    keeping = keeper(tmp_path, FaultyDisk(), [], ring=4.0)
    first = part(0, 3)
    first.events.append((7, 1, SECOND, 0, "thread", "link 'motor' was used by another thread"))
    keeping.add(first)
    for start in range(3, 30, 3):
        if start in (3, 15, 24):
            keeping.trigger(Found(start, start * SECOND, "odd"))
        keeping.add(part(start, start + 3))
    keeping.close("closed", "")
    sessions = [session_of(tmp_path, name) for name in session_names(tmp_path)]
    told = [[each.row for each in session.events if each.kind == "thread"] for session in sessions]
    # where it began, or else at the first row
    assert told == [[1], *([session.rows.start] for session in sessions[1:])]
    assert len(sessions) == 3
