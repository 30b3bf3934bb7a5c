"""A recorder beside other threads and signal handlers: nothing is torn, nothing raises, all rows are exact."""

import contextlib
import os
import resource
import signal
import socket
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from hardware_helpers import PATIENCE
from interrupt_helpers import interrupted_at
from recorder_helpers import Counting, Seen, counting

import simckpt
from simckpt.errors import RecorderBusyError, RecordingWarning
from simckpt.hardware import (
    Link,
    OnError,
    Recorder,
    Replay,
    Simulated,
    link_tables,
    loop_thread,
    part_buffers,
    recording,
    recording_messages,
)

ACTION = np.zeros(2, np.float32)
OURS = (recording, loop_thread, part_buffers, recording_messages)


@contextmanager
def beside(work: Callable[[], None]) -> Iterator[list[BaseException]]:
    """Does something over and over in another thread; gives what that has raised, which ends it."""
    raised: list[BaseException] = []
    stop = threading.Event()

    def loop() -> None:
        try:
            while not stop.is_set():
                work()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=loop)
    thread.start()
    try:
        yield raised
    finally:
        stop.set()
        thread.join()


@contextmanager
def interrupted(handler: Callable[[], None], seconds: float) -> Iterator[None]:
    """Has a signal handler run again and again, between any two instructions but its own."""

    is_over = False

    def handle(number: int, frame: Any) -> None:
        if not is_over:
            handler()
            signal.setitimer(signal.ITIMER_REAL, seconds)

    before = signal.signal(signal.SIGALRM, handle)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        # one that is on its way comes to nothing
        is_over = True
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def assert_each_thing_once(session: simckpt.hardware.Session) -> None:
    """One counter over all tables and snapshots: nothing twice, nothing left out."""
    tables = session.read()
    links = [table for kind in ("commands", "readings") for table in tables.get(kind, {}).values()]
    orders = np.concatenate([table["order"] for table in (tables["rows"], tables["resets"], tables["events"], *links)])
    found = sorted([*orders[orders >= 0].tolist(), *(each.order for each in session.snapshots)])
    assert found == list(range(1, len(found) + 1))
    for table in links:
        assert (np.diff(table["order"]) > 0).all()


def run_until(seen: Seen, enough: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not enough():
        seen.run(50)
        assert time.monotonic() < deadline


@pytest.mark.parametrize("how", ["thread", "handler"])
def test_operators_may_call_at_any_time(tmp_path, how) -> None:
    noted: list[str] = []
    with Recorder(counting(), tmp_path, "pole", snapshot_every=1e5) as env:

        def operate() -> None:
            noted.append(str(len(noted)))
            env.note(noted[-1])
            if len(noted) % 16 == 0:
                env.trigger("odd")
                env.snapshot("operator")
            if how == "thread":
                time.sleep(0.0005)

        env.reset(seed=0)
        seen = Seen(env)
        if how == "thread":
            with beside(operate) as raised:
                run_until(seen, lambda: len(noted) > 200)
            assert raised == []
        else:
            with interrupted(operate, 0.001):
                run_until(seen, lambda: len(noted) > 200)
    session = simckpt.Store(tmp_path).session("pole")
    seen.assert_recorded(session.read(["rows"])["rows"])
    assert len(session.rows) == len(seen.rewards)
    assert session.missing == []
    assert [event.text for event in session.events if event.kind == "note"] == noted
    assert len([event for event in session.events if event.kind == "trigger"]) == len(noted) // 16
    assert {each.reason for each in session.snapshots} == {"start", "operator"}
    assert_each_thing_once(session)
    with Replay(session, counting()) as replay:
        assert replay.run().exact


def test_a_call_between_two_steps_acts_at_once(tmp_path) -> None:
    with Recorder(counting(), tmp_path, "pole", snapshot_every=1e5) as env:
        env.reset(seed=0)
        Seen(env).run(3)
        env.note("first")
        env.snapshot("second")
        env.note("third")
        Seen(env).run(3)
    session = simckpt.Store(tmp_path).session("pole")
    (snapshot,) = [each for each in session.snapshots if each.reason == "second"]
    first, third = session.events
    assert first.order + 1 == snapshot.order == third.order - 1


def test_an_env_and_a_signal_may_call_within_a_step(tmp_path) -> None:
    class Noting(Counting):
        recorder: Any = None

        def step(self, action: Any) -> Any:
            if self.steps == 2:
                type(self).recorder.note("within")
                type(self).recorder.trigger("within")
                type(self).recorder.snapshot("within")
            return super().step(action)

    with Recorder(Noting(), tmp_path, "pole", snapshot_every=1e5, part_seconds=1e5) as env:
        Noting.recorder = env
        env.reset(seed=0)
        seen = Seen(env)
        seen.run(6)
        Noting.recorder = None
    session = simckpt.Store(tmp_path).session("pole")
    seen.assert_recorded(session.read(["rows"])["rows"])
    assert [(event.kind, event.row) for event in session.events] == [("note", 2), ("trigger", 2)]
    assert [(each.row, each.reason) for each in session.snapshots] == [(0, "start"), (3, "within")]


def test_another_thread_cannot_step_meanwhile(tmp_path) -> None:
    raised: list[BaseException] = []

    class Crossing(Counting):
        recorder: Any = None

        def step(self, action: Any) -> Any:
            if self.steps == 1:
                for call in (lambda: self.recorder.step(ACTION), self.recorder.reset):
                    thread = threading.Thread(target=attempt, args=(call,))
                    thread.start()
                    thread.join()
            return super().step(action)

    def attempt(call: Callable[[], Any]) -> None:
        try:
            call()
        except BaseException as error:
            raised.append(error)

    with Recorder(Crossing(), tmp_path, "pole", snapshot_every=None) as env:
        Crossing.recorder = env
        env.reset(seed=0)
        seen = Seen(env)
        seen.run(4)
        # one after the other is no matter
        thread = threading.Thread(target=seen.run, args=(4,))
        thread.start()
        thread.join()
        seen.run(4)
        Crossing.recorder = None
    assert [type(error) for error in raised] == [RecorderBusyError] * 2
    session = simckpt.Store(tmp_path).session("pole")
    seen.assert_recorded(session.read(["rows"])["rows"])
    assert len(session.rows) == 12


def test_a_thread_that_receives_all_the_time_is_recorded_and_told(tmp_path) -> None:
    period = [0]

    def device(command: Any, time: int) -> tuple[float] | None:
        period[0] += 1
        return None if period[0] % 3 == 0 else (float(period[0]),)

    arm = Link(Simulated(device, period=0.001), command=("force",), reading=("place",), name="arm")
    received: list[float] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        own = counting()
        links = {"arm": arm, "motor": own.link}
        with Recorder(own, tmp_path, "two", snapshot_every=None, links=links) as env:

            def read() -> None:
                reading = arm.receive()
                if reading is not None:
                    received.append(float(reading.values[0]))
                arm.send((1.0,))
                time.sleep(0.0002)

            env.reset(seed=0)
            seen = Seen(env)
            with beside(read) as raised:
                run_until(seen, lambda: len(received) > 60)
            assert raised == []
    (text,) = [str(each.message) for each in caught if each.category is RecordingWarning]
    assert "link 'arm' was used by another thread" in text
    session = simckpt.Store(tmp_path).session("two")
    seen.assert_recorded(session.read(["rows"])["rows"])
    assert session.missing == []
    table = session.read(["readings", "commands"])
    readings = table["readings"]["arm"]
    assert readings["values"][readings["kind"] == 0, 0].tolist() == received
    assert (np.diff(readings["received"]) >= 0).all()
    assert (np.diff(readings["row"]) >= 0).all()
    sequences = table["commands"]["arm"]["sequence"].tolist()
    assert sequences == list(range(len(sequences)))
    assert [event.kind for event in session.events] == ["thread"]
    assert_each_thing_once(session)


def test_a_handler_may_send_to_the_device(tmp_path) -> None:
    stop = Link(Simulated(lambda command, time: None, period=0.001), command=("stop",), name="stop")
    sent = [0]

    def halt() -> None:
        stop.send((1.0,))
        sent[0] += 1

    with warnings.catch_warnings():
        # told if it has interrupted the recorder itself
        warnings.simplefilter("ignore", RecordingWarning)
        base = counting()
        with Recorder(base, tmp_path, "pole", snapshot_every=None, links={"stop": stop, "motor": base.link}) as env:
            env.reset(seed=0)
            seen = Seen(env)
            with interrupted(halt, 0.0007):
                run_until(seen, lambda: sent[0] > 300)
    session = simckpt.Store(tmp_path).session("pole")
    seen.assert_recorded(session.read(["rows"])["rows"])
    commands = session.read(["commands"])["commands"]
    assert commands["stop"]["sequence"].tolist() == list(range(sent[0]))
    assert commands["motor"]["sequence"].tolist() == list(range(len(seen.rewards)))
    assert_each_thing_once(session)


# the end


@pytest.mark.parametrize("where", ["handler", "within a step", "another thread"])
def test_a_recorder_may_be_closed_from_anywhere(tmp_path, where) -> None:
    closing: list[bool] = []

    class Closing(Counting):
        recorder: Any = None

        def step(self, action: Any) -> Any:
            if where == "within a step" and self.steps == 30:
                self.recorder.end_session()
                closing.append(True)
            return super().step(action)

    env = Recorder(Closing(), tmp_path, "pole", snapshot_every=None)
    Closing.recorder = env
    env.reset(seed=0)
    seen = Seen(env)
    seen.run(20)

    def close() -> None:
        env.end_session()
        closing.append(True)

    if where == "handler":
        with interrupted(close, 0.003):
            run_until(seen, lambda: bool(closing) and not env._recording.active)
    elif where == "another thread":
        thread = threading.Thread(target=close)
        thread.start()
        run_until(seen, lambda: bool(closing))
        thread.join()
    else:
        seen.run(20)
    seen.run(10)
    Closing.recorder = None
    env.close()
    session = simckpt.Store(tmp_path).session("pole")
    assert session.status == "closed"
    assert session.missing == []
    seen.assert_recorded(session.read(["rows"])["rows"])
    assert 20 <= len(session.rows) <= len(seen.rewards) - 10
    if where == "within a step":
        assert len(session.rows) == 30


def test_an_interrupt_anywhere_ends_nothing_and_leaves_rows_that_are_whole(tmp_path) -> None:
    interrupts = [0]

    def interrupt() -> None:
        raise KeyboardInterrupt

    with warnings.catch_warnings():
        # it tells of rows that were interrupted
        warnings.simplefilter("ignore", RecordingWarning)
        with Recorder(counting(), tmp_path, "pole", snapshot_every=0.02, part_seconds=0.02) as env:
            env.reset(seed=0)
            stepped = {}
            deadline = time.monotonic() + PATIENCE
            before = signal.signal(signal.SIGALRM, lambda number, frame: interrupt())
            while interrupts[0] < 100:
                assert time.monotonic() < deadline
                try:
                    signal.setitimer(signal.ITIMER_REAL, 0.0005 + interrupts[0] * 1e-5)
                    while True:
                        row = env.row
                        observation = env.step(ACTION.copy())[0].tobytes()
                        if env.row == row + 1:
                            stepped[row] = observation
                except KeyboardInterrupt:
                    interrupts[0] += 1
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
            for _ in range(20):
                row = env.row
                stepped[row] = env.step(ACTION.copy())[0].tobytes()
    session = simckpt.Store(tmp_path).session("pole")
    rows = session.read(["rows"])["rows"]
    found = dict(zip(rows["row"].tolist(), (each.tobytes() for each in rows["observation"]), strict=True))
    assert len(found) == len(rows["row"])
    # only those that were interrupted are not there, and the session tells which
    assert {row: found.get(row) for row in stepped} == stepped
    assert (session.status, session.closed.rows) == ("closed", (0, env.row))
    assert {row for each in session.missing for row in each} == set(range(env.row)) - found.keys()
    with Replay(session, counting()) as replay:
        assert replay.run().differences == ()


def test_a_trouble_whose_telling_is_interrupted_anywhere_is_told(tmp_path) -> None:
    class Failing(Counting):
        fails = False

        def step(self, action: Any) -> Any:
            if self.fails:
                failed.add(env.row)
                raise ZeroDivisionError
            return super().step(action)

    failed: set[int] = set()
    number, is_there = 0, True
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RecordingWarning)
        with Recorder(base := Failing(), tmp_path, "pole", snapshot_every=1e5) as env:
            env.reset(seed=0)
            env.step(ACTION.copy())

            def fail() -> None:
                with contextlib.suppress(ZeroDivisionError):
                    env.step(ACTION.copy())

            while is_there:
                number += 1
                base.fails = True
                is_there = interrupted_at(number, fail, *OURS)
                base.fails = False
                env.step(ACTION.copy())
    session = simckpt.Store(tmp_path).session("pole")
    assert len(failed) > 200
    assert session.status == "closed"
    assert failed <= {event.row for event in session.events if event.kind in ("error", "unrecorded")}


def test_a_reset_that_is_interrupted_anywhere_is_recorded_or_told(tmp_path) -> None:
    number, is_there = 0, True
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RecordingWarning)
        with Recorder(counting(), tmp_path, "pole", snapshot_every=1e5) as env:
            env.reset(seed=0)
            while is_there:
                number += 3
                env.step(ACTION.copy())

                def reset(number: int = number) -> None:
                    env.reset(seed=number)

                is_there = interrupted_at(number, reset, *OURS)
                env.step(ACTION.copy())
    session = simckpt.Store(tmp_path).session("pole")
    assert number > 200
    assert (session.status, session.missing) == ("closed", [])
    with Replay(session, counting()) as replay:
        assert replay.run().differences == ()


def test_a_part_whose_end_is_interrupted_anywhere_loses_nothing_of_links(tmp_path) -> None:
    number, is_there = 0, True
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RecordingWarning)
        with Recorder(counting(), tmp_path, "pole", snapshot_every=1e5, part_seconds=1e-9) as env:
            env.reset(seed=0)

            def step() -> None:
                env.step(ACTION.copy())

            while is_there:
                number += 23
                is_there = interrupted_at(number, step, part_buffers, link_tables)
                for _ in range(2):
                    env.step(ACTION.copy())
    session = simckpt.Store(tmp_path).session("pole")
    assert number > 200
    assert session.status == "closed"
    with Replay(session, counting()) as replay:
        assert replay.run().differences == ()


def test_a_snapshot_that_is_interrupted_anywhere_is_taken_later(tmp_path) -> None:
    number, is_there = 0, True
    wanted: list[range] = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RecordingWarning)
        with Recorder(counting(), tmp_path, "pole", snapshot_every=1e5) as env:
            env.reset(seed=0)
            env.step(ACTION.copy())

            def step() -> None:
                env.step(ACTION.copy())

            while is_there:
                number += 11
                before = env.row
                env._recording.want_snapshot("asked for")
                is_there = interrupted_at(number, step, *OURS)
                env.step(ACTION.copy())
                wanted.append(range(before, env.row))
    session = simckpt.Store(tmp_path).session("pole")
    assert number > 200
    there = {each.row for each in session.snapshots}
    assert [each for each in wanted if not there.intersection(each)] == []


def test_a_handler_that_interrupts_a_call_of_a_link_between_two_steps_may_close(tmp_path) -> None:
    base = counting()
    env = Recorder(base, tmp_path, "pole", snapshot_every=None)
    env.reset(seed=0)
    Seen(env).run(5)
    within = interrupted_at(40, lambda: base.link.send((1.0,)), link_tables, work_then=env.end_session)
    assert within
    # no step follows
    session = simckpt.Store(tmp_path).session("pole")
    assert (session.status, session.rows) == ("closed", range(5))
    env.close()


@contextmanager
def stopped(env: Recorder) -> Iterator[None]:
    """Has the recording process stand still."""
    pid = env._recording.process.pid
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def closed_by_itself(path: Any) -> simckpt.hardware.Session:
    """Returns the session once the recording process has ended it."""
    deadline = time.monotonic() + PATIENCE
    while (session := simckpt.Store(path).session("pole")).closed is None:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    for process in recording_messages._left:
        process.wait(PATIENCE)
    return session


def test_closing_does_not_wait_for_a_process_that_stands(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(recording_messages, "_SILENT", 0.3)
    env = Recorder(Counting(), tmp_path, "pole", snapshot_every=None)
    env.reset(seed=0)
    seen = Seen(env)
    seen.run(9)
    with stopped(env), pytest.warns(RecordingWarning, match="has said nothing for 0.3 s, and is left alone"):
        env.close()
    session = closed_by_itself(tmp_path)
    assert session.status == "closed"
    seen.assert_recorded(session.read(["rows"])["rows"])


def test_an_interrupt_ends_the_wait_for_the_recording_process(tmp_path) -> None:
    env = Recorder(Counting(), tmp_path, "pole", snapshot_every=None)
    env.reset(seed=0)
    seen = Seen(env)
    seen.run(9)

    def interrupt() -> None:
        raise KeyboardInterrupt

    with stopped(env), pytest.raises(KeyboardInterrupt), interrupted(interrupt, 0.3):
        env.close()
    session = closed_by_itself(tmp_path)
    seen.assert_recorded(session.read(["rows"])["rows"])


def test_a_program_with_many_open_files_can_record(tmp_path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 1200:
        pytest.skip("so many files cannot be opened here")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 1200), hard))
    kept = []
    try:
        with socket.socket() as one:
            while (descriptor := os.dup(one.fileno())) < 1030:
                kept.append(descriptor)
            kept.append(descriptor)
            with Recorder(Counting(), tmp_path, "pole", snapshot_every=None) as env:
                assert env._recording.process.channel.fileno() > 1023
                env.reset(seed=0)
                seen = Seen(env)
                seen.run(9)
    finally:
        for descriptor in kept:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    seen.assert_recorded(simckpt.Store(tmp_path).session("pole").read(["rows"])["rows"])


def test_an_exception_that_ends_the_program_keeps_the_ring(tmp_path) -> None:
    import subprocess
    import sys

    program = """
import sys
from recorder_helpers import Seen, counting
from simckpt.hardware import OnError, Recorder
env = Recorder(counting(), sys.argv[1], "pole", ring=60.0, triggers=[OnError()])
env.reset(seed=0)
Seen(env).run(12)
raise ZeroDivisionError("the policy")
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    ended = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)], env=environment, capture_output=True, text=True, timeout=120
    )
    assert "ZeroDivisionError: the policy" in ended.stderr
    (session,) = simckpt.Store(tmp_path).sessions()
    assert (session.name, session.status, session.rows) == ("pole-1", "error", range(12))
    assert session.closed.text == "ZeroDivisionError: the policy"


@pytest.mark.parametrize("asked", [True, False])
def test_an_exception_of_the_loop_keeps_the_ring_if_asked_for(tmp_path, asked) -> None:
    def loop() -> None:
        with Recorder(counting(), tmp_path, "pole", ring=60.0, triggers=[OnError()] if asked else []) as env:
            env.reset(seed=0)
            Seen(env).run(12)
            raise ZeroDivisionError("the policy")

    with pytest.raises(ZeroDivisionError):
        loop()
    sessions = simckpt.Store(tmp_path).sessions()
    assert len(sessions) == asked
    for session in sessions:
        assert (session.status, session.rows) == ("error", range(12))
        assert "ZeroDivisionError: the policy" in [event.text for event in session.events]
