"""The process that writes, in a thread of this one: what it takes from the buffers and when, and how much may wait."""

import mmap
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hardware_helpers import PATIENCE

from simckpt import state
from simckpt.hardware.channel import Channel, pack
from simckpt.hardware.columns import COMMON, FIRST_ROW, FLOAT, INT, SERIAL, STARTED, STOPPED, Layout, Table
from simckpt.hardware.recording_process import Service
from simckpt.hardware.session import Session
from simckpt.hardware.triggers import Watchdog, trigger_to_json
from simckpt.storage import StoreFiles
from simckpt.storage.session_records import SessionRecord
from simckpt.storage.session_writing import create_session
from simckpt.storage.sessions import SessionFiles, session_names
from simckpt.testing.faults import FaultyDisk

CAPACITY = 100
SIZE = 1000  # numbers in an observation


class Loop:
    """Does what a recorder does, without an env: fills buffers, hands them over, hears what is said."""

    def __init__(self, path: Path, disk: FaultyDisk | None = None, **begin: Any) -> None:
        store = StoreFiles.create(path)
        ring = begin.get("ring")
        record = SessionRecord("5e" * 16, "pole", 1.8e9, 0, mode="continuous" if ring is None else "ring")
        if ring is None:
            create_session(store, record)
        queued = begin.pop("queued", 1 << 30)
        ours, theirs = socket.socketpair()
        self.channel = Channel(ours)
        self.is_alive = True
        self._theirs = Channel(theirs)
        service = Service(self._theirs, lambda: self.is_alive, disk=disk or FaultyDisk(), queued=queued)
        self._thread = threading.Thread(target=service.run)
        self._thread.start()
        self.heard: list[dict[str, Any]] = []
        self.row = self.serial = self.resets = 0
        settings = {"root": str(path), "ring": None, "after": 0.0, "triggers": [], "part_seconds": 1000.0, **begin}
        self.channel.send({"begin": settings}, [record.to_bytes()])
        self.wait(lambda: {"ready": True} in self.heard)
        columns = {**COMMON, "started": (INT, ()), "finished": (INT, ()), "observation": (FLOAT, (SIZE,))}
        self.layout = Layout({"rows": Table(columns, CAPACITY), "resets": Table(dict(COMMON), 4)})
        descriptor = os.memfd_create("test")
        os.ftruncate(descriptor, 4 * self.layout.size)
        memory = mmap.mmap(descriptor, 4 * self.layout.size)
        message = {"tables": self.layout.to_json(), "buffers": 4, "generation": 1}
        self.channel.send({"layout": message}, descriptors=[descriptor])
        os.close(descriptor)
        self.buffers = [self.layout.buffer(memory, number) for number in range(4)]
        self.free = [0, 1, 2, 3]
        self.use()

    def hear(self) -> None:
        self.channel.take()
        while (found := self.channel.next()) is not None:
            self.heard.append(found[0])

    def wait(self, until: Callable[[], bool]) -> None:
        deadline = time.monotonic() + PATIENCE
        while not until():
            assert time.monotonic() < deadline, self.heard
            time.sleep(0.002)
            self.hear()

    def use(self, number: int | None = None) -> None:
        self.number = self.free.pop(0) if number is None else number
        self.buffer = self.buffers[self.number]
        self.serial += 1
        self.buffer.counts[:] = 0
        self.buffer.firsts[:] = [self.row, self.resets]
        now = time.monotonic_ns()
        self.buffer.head[STARTED], self.buffer.head[STOPPED], self.buffer.head[FIRST_ROW] = now, now, self.row
        self.buffer.head[SERIAL] = self.serial

    def step(self, count: int = 1) -> None:
        for _ in range(count):
            rows, place = self.buffer.tables["rows"], int(self.buffer.counts[0])
            rows["order"][place] = rows["row"][place] = self.row
            rows["observation"][place] = observation(self.row)
            self.row += 1
            self.buffer.head[STOPPED] = time.monotonic_ns()
            self.buffer.counts[0] = place + 1

    def reset(self, options: str = "") -> None:
        place = int(self.buffer.counts[1])
        self.buffer.tables["resets"]["row"][place] = self.row
        if options:
            self.channel.send({"options": [self.resets, options]})
        self.resets += 1
        self.buffer.counts[1] = place + 1

    def hand_over(self) -> None:
        self.channel.send({"part": self.number})

        def is_one_free() -> bool:
            self.free += self.freed()
            return bool(self.free)

        self.wait(is_one_free)
        self.use()

    def freed(self) -> list[int]:
        """Returns the buffers that were given back and not yet taken."""
        self.hear()
        found = [each for each in self.heard if "free" in each]
        self.heard = [each for each in self.heard if "free" not in each]
        return [number for _, number in (each["free"] for each in found)]

    def close(self) -> None:
        self.channel.send({"close": {"how": "closed", "text": "", "row": self.row}})
        self.wait(lambda: {"closed": True} in self.heard)

    def end(self) -> None:
        self.is_alive = False
        self.channel.close()
        self._thread.join(PATIENCE)
        assert not self._thread.is_alive()
        self._theirs.close()


@contextmanager
def loop(path: Path, disk: FaultyDisk | None = None, **begin: Any) -> Iterator[Loop]:
    made = Loop(path, disk, **begin)
    try:
        yield made
    finally:
        made.end()


def observation(row: int) -> np.ndarray:
    return np.full(SIZE, np.sin(row))


def rows_of(path: Path, name: str = "pole") -> list[int]:
    """Returns the rows of a session, each compared with what was written; [] if there is none yet."""
    if name not in session_names(path):
        return []
    found: list[int] = []
    for chunk in Session(SessionFiles(path, name)).chunks(["rows"]):
        rows = chunk["rows"]["row"].tolist()
        assert [each.tobytes() for each in chunk["rows"]["observation"]] == [observation(row).tobytes() for row in rows]
        found += rows
    return found


class Slow(FaultyDisk):
    """A disk that refuses nothing, and is not done before it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.goes_on = threading.Event()
        self.goes_on.set()

    def fsync(self, descriptor: int) -> None:
        self.goes_on.wait()
        super().fsync(descriptor)


def test_what_waits_for_a_slow_disk_has_a_bound_and_buffers_come_back_when_it_is_done(tmp_path) -> None:
    part = 10 * (8 * SIZE + 32)  # [bytes]
    with loop(tmp_path, disk := Slow(), queued=2 * part) as recorder:
        disk.goes_on.clear()
        for _ in range(3):
            recorder.step(10)
            recorder.hand_over()
        # the third one was over the limit
        recorder.step(10)
        recorder.channel.send({"part": recorder.number})
        recorder.channel.send({"snapshot": snapshot(recorder.row)}, packed(recorder.row).parts)
        recorder.wait(lambda: len([each for each in recorder.heard if "free" in each]) >= 2)
        kept = recorder.freed()
        assert kept == [0, 1]
        disk.goes_on.set()
        recorder.wait(lambda: len([each for each in recorder.heard if "free" in each]) == 2)
        assert recorder.freed() == [2, 3]
        recorder.close()
    assert rows_of(tmp_path) == list(range(40))
    session = Session(SessionFiles(tmp_path, "pole"))
    assert (session.snapshots, session.missing) == ((), [])
    (event,) = session.events
    assert event.text == "the snapshot before row 40 was lost: the disk is too slow"


def packed(row: int) -> Any:
    return pack(state.encode({"env": {"row": row}, "observation": None}))


def snapshot(row: int) -> dict[str, Any]:
    facts = dict.fromkeys(("row", "order", "monotonic", "wall"), row)
    return {**facts, "reason": "test", "models": [], "form": packed(row).form}


def test_rows_that_were_whole_before_a_step_hangs_are_on_the_disk(tmp_path) -> None:
    with loop(tmp_path, part_seconds=0.05) as recorder:
        recorder.step(7)
        recorder.wait(lambda: rows_of(tmp_path) == list(range(7)))
        # the rest of the same buffer is the next part
        recorder.step(2)
        recorder.wait(lambda: rows_of(tmp_path) == list(range(9)))
        recorder.step(5)
        recorder.hand_over()
        recorder.step(1)
        recorder.hand_over()
        recorder.close()
    session = Session(SessionFiles(tmp_path, "pole"))
    assert rows_of(tmp_path) == list(range(15))
    assert (session.missing, session.closed.rows, session.events) == ([], (0, 15), [])


def test_each_reset_has_its_options_whichever_part_it_comes_with(tmp_path) -> None:
    with loop(tmp_path, part_seconds=0.02) as recorder:
        for number in range(4):
            recorder.reset(options='{"goal":2}' if number == 2 else "")
            recorder.step(3)
            if number == 0:
                # it comes ahead of its reset, and so of the part that has it
                recorder.channel.send({"options": [1, '{"goal":1}']})
            recorder.wait(lambda number=number: len(rows_of(tmp_path)) == 3 * number + 3)
        recorder.close()
    table = Session(SessionFiles(tmp_path, "pole")).read(["resets"])["resets"]
    assert table["options"].tolist() == ["", '{"goal":1}', '{"goal":2}', ""]
    assert table["row"].tolist() == [0, 3, 6, 9]


def test_a_buffer_that_the_recorder_gives_up_is_no_part(tmp_path) -> None:
    with loop(tmp_path, part_seconds=0.05) as recorder:
        recorder.step(5)
        recorder.wait(lambda: rows_of(tmp_path) == list(range(5)))
        # what was taken of it is there, the rest is lost, and the buffer is used again
        recorder.step(3)
        recorder.channel.send({"lost": [0, recorder.row, "too slow"]})
        recorder.use(recorder.number)
        recorder.step(4)
        recorder.hand_over()
        recorder.close()
    session = Session(SessionFiles(tmp_path, "pole"))
    rows = rows_of(tmp_path)
    lost = [row for each in session.missing for row in each]
    assert sorted(rows + lost) == list(range(12))
    assert rows[:5] + rows[-4:] == [0, 1, 2, 3, 4, 8, 9, 10, 11]


def test_a_part_that_is_sent_twice_is_there_once(tmp_path) -> None:
    with loop(tmp_path) as recorder:
        recorder.step(5)
        recorder.channel.send({"part": recorder.number})
        recorder.hand_over()
        recorder.step(5)
        recorder.close()
    assert rows_of(tmp_path) == list(range(10))


def test_a_loop_that_hangs_has_its_ring_kept_with_all_its_rows_while_it_hangs(tmp_path) -> None:
    triggers = [trigger_to_json(Watchdog(0.2))]
    with loop(tmp_path, ring=1000.0, after=1000.0, triggers=triggers) as recorder:
        recorder.step(3)
        recorder.hand_over()
        recorder.step(4)
        recorder.wait(lambda: rows_of(tmp_path, "pole-1") == list(range(7)))
        assert [event.text for event in Session(SessionFiles(tmp_path, "pole-1")).events] in (
            [],
            ["there was no step for 0.2 s"],
        )
        # it goes on
        recorder.step(2)
        recorder.close()
    assert rows_of(tmp_path, "pole-1") == list(range(9))
    assert "there was no step for 0.2 s" in [each.text for each in Session(SessionFiles(tmp_path, "pole-1")).events]


def test_a_loop_that_has_made_no_step_does_not_hang(tmp_path) -> None:
    triggers = [trigger_to_json(Watchdog(0.05))]
    with loop(tmp_path, triggers=triggers) as recorder:
        recorder.reset()
        recorder.hand_over()
        began = time.monotonic()
        # it has been looked at a few times by then
        recorder.wait(lambda: time.monotonic() > began + 0.5)
        recorder.close()
    assert Session(SessionFiles(tmp_path, "pole")).events == []


def test_a_recorder_that_waits_for_the_end_hears_that_it_gets_on(tmp_path) -> None:
    class Steady(Slow):
        """Lets one sync through, and waits for a while."""

        def fsync(self, descriptor: int) -> None:
            super().fsync(descriptor)
            if self.armed:
                time.sleep(0.3)

        armed = False

    with loop(tmp_path, disk := Steady()) as recorder:
        recorder.step(3)
        disk.armed = True
        recorder.close()
    assert {"progress": True} in recorder.heard
    assert rows_of(tmp_path) == [0, 1, 2]


@pytest.mark.parametrize("way", ["gone", "closed"])
def test_what_the_buffers_hold_is_written_when_the_recorder_is_gone(tmp_path, way) -> None:
    recorder = Loop(tmp_path, part_seconds=1000.0)
    recorder.step(3)
    recorder.hand_over()
    recorder.step(4)
    if way == "gone":
        recorder.end()
    else:
        recorder.close()
        recorder.end()
    session = Session(SessionFiles(tmp_path, "pole"))
    assert rows_of(tmp_path) == list(range(7))
    assert session.status == ("killed" if way == "gone" else "closed")
    assert (session.missing, session.closed.rows) == ([], (0, 7))


def test_parts_come_at_their_pace_while_no_row_is_whole_for_long(tmp_path) -> None:
    began = time.monotonic()
    with loop(tmp_path, part_seconds=0.3) as recorder:
        recorder.step(3)

        def is_over() -> bool:
            # as a step that only talks to links: there is always something new
            recorder.channel.send({"event": [1, recorder.row, 1, 1, "note", "it goes on"]})
            return time.monotonic() > began + 1.5

        recorder.wait(is_over)
        count = len(list((tmp_path / "sessions/pole/parts").iterdir()))
        # one is taken when it is late by 0.1 s
        assert 1 <= count <= (time.monotonic() - began) / 0.4 + 1
        recorder.close()


def test_what_the_recorder_did_not_hear_at_once_it_hears_later(tmp_path) -> None:
    with loop(tmp_path) as recorder:
        recorder.step(2)
        for _ in range(5000):
            # each is answered, and nobody takes the answers
            recorder.channel.send({"part": recorder.number})
        deadline = time.monotonic() + PATIENCE
        while recorder.channel.waiting:
            assert time.monotonic() < deadline
            recorder.channel.flush()
        freed: list[int] = []

        def all_are_there() -> bool:
            freed.extend(recorder.freed())
            return len(freed) == 5000

        recorder.wait(all_are_there)
        recorder.use()
        recorder.close()


def test_rows_of_a_handing_over_that_was_interrupted_are_there(tmp_path) -> None:
    with loop(tmp_path) as recorder:
        recorder.step(5)
        # the recorder goes on in new memory, and has not told of the part
        descriptor = os.memfd_create("test")
        os.ftruncate(descriptor, recorder.layout.size)
        memory = mmap.mmap(descriptor, recorder.layout.size)
        message = {"tables": recorder.layout.to_json(), "buffers": 1, "generation": 2}
        recorder.channel.send({"layout": message}, descriptors=[descriptor])
        os.close(descriptor)
        recorder.buffers = [recorder.layout.buffer(memory, 0)]
        recorder.use(0)
        recorder.step(4)
        recorder.close()
    assert rows_of(tmp_path) == list(range(9))
    assert Session(SessionFiles(tmp_path, "pole")).missing == []


def test_a_slow_disk_ends_nothing(tmp_path) -> None:
    class Busy(FaultyDisk):
        """A disk whose thread is always sending that a buffer is free while the other one takes messages."""

        def fsync(self, descriptor: int) -> None:
            time.sleep(0.001)
            super().fsync(descriptor)

    with loop(tmp_path, Busy(), queued=10 * (8 * SIZE + 32)) as recorder:
        for number in range(60):
            recorder.step(10)
            recorder.channel.send({"event": [number, recorder.row, 1, 1, "note", "it goes on"]})
            recorder.hand_over()
        recorder.close()
    assert rows_of(tmp_path) == list(range(600))
