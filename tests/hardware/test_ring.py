"""Rings and triggers: what is kept, from when on, and by whose call."""

import time
from typing import Any

import numpy as np
import pytest
from hardware_helpers import PATIENCE
from recorder_helpers import Counting, Seen, counting

import simckpt
from simckpt import state
from simckpt.errors import ConfigurationError, SessionNotFoundError
from simckpt.hardware import OnError, OutOfRange, Recorder, Watchdog
from simckpt.hardware.keeping import Keeper
from simckpt.hardware.ring import Part, Ring, Snapshot
from simckpt.hardware.session import Session
from simckpt.hardware.triggers import Found, trigger_from_json, trigger_to_json
from simckpt.storage import StoreFiles
from simckpt.storage.session_records import LinkRecord, SessionRecord
from simckpt.storage.sessions import SessionFiles, session_names

SECOND = 1_000_000_000  # [ns]


def part(second: int, *, reward: float = 0.0, place: int = 5) -> Part:
    """A second with ten rows, of which one has this reward."""
    rows = np.arange(10 * second, 10 * second + 10)
    rewards = np.zeros(10)
    rewards[place] = reward
    table = {"order": rows, "row": rows, "finished": rows * SECOND // 10, "reward": rewards}
    span = (10 * second, 10 * second + 10)
    return Part({"rows": table}, span, {"rows": span}, second * SECOND, (second + 1) * SECOND)


def snapshot(second: int) -> Snapshot:
    encoded = state.encode({"env": {"second": second}, "observation": None})
    return Snapshot(encoded, 10 * second, 10 * second, second * SECOND, 0, "interval", ())


def seconds_in(ring: Ring) -> list[int]:
    return [each.started // SECOND for each in ring if isinstance(each, Part)]


def test_a_ring_keeps_the_snapshot_from_which_all_it_keeps_can_be_played() -> None:
    ring = Ring(10.0)
    for second in range(60):
        if second % 4 == 0:
            ring.add(snapshot(second))
        ring.add(part(second))
        newest = second + 1
        begin = max(0, (newest - 10) // 4 * 4)
        assert seconds_in(ring) == list(range(begin, newest))
        assert [each.row // 10 for each in ring if isinstance(each, Snapshot)] == list(range(begin, newest, 4))


def test_a_ring_without_snapshots_keeps_its_seconds() -> None:
    ring = Ring(10.0)
    for second in range(60):
        ring.add(part(second))
    assert seconds_in(ring) == list(range(50, 60))


def tables(**columns: Any) -> dict[str, Any]:
    rows = np.arange(4)
    return {"rows": {"row": rows, "finished": rows * 100, **columns}}


@pytest.mark.parametrize(
    ("trigger", "columns", "row"),
    [
        (OutOfRange("reward", low=0.0), {"reward": np.array([0, 1, -0.1, -1])}, 2),
        (OutOfRange("reward", high=1.0), {"reward": np.array([0, 1, 1, 1.0])}, None),
        (
            OutOfRange("observation", index=1, high=2.0),
            {"observation": np.array([[9, 0], [9, 0], [9, 0], [0, 3.0]])},
            3,
        ),
        (OutOfRange("observation", high=2.0), {"observation": {"a": np.zeros((4, 2)), "b": np.array([0, 3, 0, 0])}}, 1),
        (OutOfRange("heat", high=80.0), {"reward": np.zeros(4), "signals": {"heat": np.array([20, 81.0, 90, 20])}}, 1),
        (OutOfRange("heat", high=80.0), {"reward": np.zeros(4)}, None),
        (OutOfRange("reward", low=0.0), {"reward": np.full(4, np.nan)}, None),
        (OnError(), {"reward": np.array([0, np.nan, 0, np.inf])}, 1),
        (OnError(), {"reward": np.zeros(4), "observation": (np.zeros(4), np.array([0, 0, np.inf, 0]))}, 2),
        (OnError(), {"reward": np.zeros(4), "action": np.arange(4)}, None),
        (OnError(finite=False), {"reward": np.full(4, np.nan)}, None),
    ],
    ids=str,
)
def test_a_trigger_finds_the_first_row(trigger, columns, row) -> None:
    found = trigger_from_json(trigger_to_json(trigger)).find(tables(**columns))
    assert (None if found is None else found.row) == row
    assert found is None or found.monotonic == row * 100


def test_a_trigger_finds_readings_by_the_names_of_their_values() -> None:
    values = np.array([[0, 0], [np.nan, np.nan], [0, 5], [9, 9.0]])
    motor = {"row": np.array([3, 3, 4, 5]), "received": np.arange(4) * 100, "values": values}
    found = {"rows": {}, "readings": {"motor": motor, "other": {**motor, "values": np.zeros((4, 1))}}}
    names = {"motor": ("force", "position"), "other": ("force",)}
    assert OutOfRange("reading", index="position", high=4.0).find(found, names).row == 4
    assert OutOfRange("reading", index="force", high=4.0).find(found, names).row == 5
    assert OutOfRange("reading", high=10.0).find(found, names) is None


@pytest.mark.parametrize(
    "make", [lambda: OutOfRange("reward"), lambda: OutOfRange("reward", low=2.0, high=1.0), lambda: Watchdog(0.0)]
)
def test_a_trigger_without_sense_is_refused(make) -> None:
    with pytest.raises(ConfigurationError):
        make()


# what is kept


def keeper(path: Any, **settings: Any) -> Keeper:
    StoreFiles.create(path)
    record = SessionRecord("5e" * 16, "pole", 1.8e9, 0, links=(LinkRecord("motor"),), mode="ring")
    return Keeper(path, record, print, **{"ring": 5.0, **settings})


def kept(path: Any, name: str) -> tuple[list[int], str]:
    """Returns which seconds a session has, and how it ended."""
    session = Session(SessionFiles(path, name))
    assert session.read()["rows"]["row"].tolist() == list(session.rows)
    assert session.missing == []
    return sorted({row // 10 for row in session.rows}), session.status


def test_nothing_is_written_until_a_trigger_fires(tmp_path) -> None:
    keeping = keeper(tmp_path)
    for second in range(20):
        keeping.add(part(second))
    keeping.close("closed", "")
    assert session_names(tmp_path) == []


def test_a_trigger_keeps_the_past_and_what_comes_for_a_while(tmp_path) -> None:
    keeping = keeper(tmp_path, after=2.0, triggers=(OutOfRange("reward", high=1.0),))
    for second in range(20):
        keeping.add(snapshot(second))
        keeping.add(part(second, reward=7.0 if second == 12 else 0.0))
    # 5 s before the end of second 12, in which it was found at 12.5 s, and up to 14.5 s
    assert kept(tmp_path, "pole-1") == ([8, 9, 10, 11, 12, 13, 14], "trigger")
    session = Session(SessionFiles(tmp_path, "pole-1"))
    assert session.closed.text == "reward was 7, out of -inf to 1"
    assert [each.row for each in session.snapshots] == [80, 90, 100, 110, 120, 130, 140]
    (event,) = session.events
    assert (event.kind, event.row) == ("kept", 125)
    keeping.close("closed", "")
    assert session_names(tmp_path) == ["pole-1"]


def test_a_ring_is_kept_more_than_once_and_one_cause_counts_once_while_it_lasts(tmp_path) -> None:
    keeping = keeper(tmp_path, after=0.0, triggers=(OutOfRange("reward", high=1.0),))
    for second in range(40):
        keeping.add(part(second, reward=7.0 if 10 <= second < 20 or second == 30 else 0.0))
    keeping.close("closed", "")
    assert session_names(tmp_path) == ["pole-1", "pole-2"]
    assert kept(tmp_path, "pole-1") == ([6, 7, 8, 9, 10], "trigger")
    assert kept(tmp_path, "pole-2") == ([26, 27, 28, 29, 30], "trigger")


def test_triggers_meanwhile_are_noted(tmp_path) -> None:
    keeping = keeper(tmp_path, after=3.0)
    for second in range(6):
        keeping.add(part(second))
    keeping.trigger(Found(60, 6 * SECOND, "first"))
    keeping.add(part(6))
    keeping.trigger(Found(70, 7 * SECOND, "second"))
    for second in range(7, 12):
        keeping.add(part(second))
    assert session_names(tmp_path) == ["pole-1"]
    events = Session(SessionFiles(tmp_path, "pole-1")).events
    assert [(event.kind, event.text) for event in events] == [("kept", "first"), ("trigger", "second")]
    assert kept(tmp_path, "pole-1")[0] == [1, 2, 3, 4, 5, 6, 7, 8]


def test_names_that_are_taken_are_passed_over(tmp_path) -> None:
    first = keeper(tmp_path)
    first.add(part(0))
    first.trigger(Found(10, SECOND, "one"))
    first.close("closed", "")
    second = keeper(tmp_path)
    second.add(part(0))
    second.trigger(Found(10, SECOND, "two"))
    second.close("closed", "")
    assert session_names(tmp_path) == ["pole-1", "pole-2"]


# with a recorder


def sessions_of(path: Any, count: int) -> list[Session]:
    """Returns the sessions, once there are so many and none is being written."""
    deadline = time.monotonic() + PATIENCE
    while True:
        found = simckpt.Store(path).sessions()
        if len(found) == count and all(session.closed is not None for session in found):
            return found
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_call_keeps_the_ring(tmp_path) -> None:
    with Recorder(counting(), tmp_path, "pole", ring=3600.0) as env:
        with pytest.raises(SessionNotFoundError):
            _ = env.session
        seen = Seen(env)
        env.reset(seed=1)
        seen.run(30)
        env.trigger("that was odd")
        seen.run(30)
    (session,) = sessions_of(tmp_path, 1)
    assert (session.name, session.mode, session.status) == ("pole-1", "ring", "trigger")
    assert ("kept", "that was odd") in [(event.kind, event.text) for event in session.events]
    table = session.read(["rows"])["rows"]
    assert len(table["row"]) >= 30
    seen.assert_recorded(table)
    assert session.snapshots[0].row == 0


def test_an_exception_keeps_the_ring(tmp_path) -> None:
    class Broken(Counting):
        def step(self, action: Any) -> Any:
            if self.steps == 13:
                raise RuntimeError("the arm fell off")
            return super().step(action)

    def loop() -> None:
        with Recorder(Broken(), tmp_path, "pole", ring=60.0, triggers=[OnError()]) as env:
            env.reset()
            Seen(env).run(20)

    with pytest.raises(RuntimeError, match="fell off"):
        loop()
    (session,) = sessions_of(tmp_path, 1)
    assert session.rows == range(13)
    assert session.status == "error"
    assert "step raised RuntimeError: the arm fell off" in [event.text for event in session.events]


def test_an_exception_is_no_trigger_unless_asked_for(tmp_path) -> None:
    def loop() -> None:
        with Recorder(Counting(), tmp_path, "pole", ring=60.0) as env:
            env.reset()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        loop()
    assert simckpt.Store(tmp_path).sessions() == []


def test_a_loop_that_hangs_is_noticed(tmp_path) -> None:
    with Recorder(counting(), tmp_path, "pole", ring=3600.0, part_seconds=0.01, triggers=[Watchdog(0.3)]) as env:
        seen = Seen(env)
        env.reset(seed=1)
        seen.run(200)
        deadline = time.monotonic() + PATIENCE
        while not session_names(tmp_path):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        # all of it is there while the loop still hangs
        session = Session(SessionFiles(tmp_path, "pole-1"))
        while session.rows != range(200):
            assert time.monotonic() < deadline
            time.sleep(0.05)
    (session,) = sessions_of(tmp_path, 1)
    assert session.rows == range(200)
    assert "there was no step for 0.3 s" in [event.text for event in session.events]
    seen.assert_recorded(session.read(["rows"])["rows"])
