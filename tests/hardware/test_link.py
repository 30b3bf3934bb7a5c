"""The link: commands out, readings in, disarmed by every restore."""

import copy
import os
import pickle
import signal
import threading
import time
import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hardware_helpers import PATIENCE, Log, Loopback, link_to, reading, udp_device

from simckpt.errors import (
    ConfigurationError,
    LinkBusyError,
    LinkDisarmedError,
    LinkUnavailableError,
    StateMismatchError,
    UnsupportedStateError,
)
from simckpt.hardware import UDP, Link, Reading, Simulated, Statistics
from simckpt.hardware.held_links import links_of


def test_a_command_reaches_the_device_with_number_and_times() -> None:
    with udp_device() as device, link_to(UDP(device.address)) as link:
        before = time.monotonic_ns(), time.time_ns()
        assert [link.send([1.5]), link.send(np.array([-2], np.int8))] == [0, 1]
        after = time.monotonic_ns(), time.time_ns()
        first, second = device.take(), device.take()
        assert (first.sequence, second.sequence) == (0, 1)
        assert first.stream == second.stream
        assert (first.values.tolist(), second.values.tolist()) == ([1.5], [-2.0])
        assert before[0] <= first.monotonic <= second.monotonic <= after[0]
        assert before[1] <= first.wall <= after[1]
        assert link.statistics == Statistics(sent=2)


def test_readings_come_in_the_order_of_their_arrival_and_with_two_clocks() -> None:
    with udp_device() as device, link_to(UDP(device.address)) as link:
        link.send([0])
        device.take()
        before = time.monotonic_ns(), time.time_ns()
        # the device's clock has nothing to do with this one's
        for sequence in (3, 5, 4, 5):
            device.give(reading(sequence, values=(sequence, -1.0), time=-(10**17) + sequence))
        device.give(b"not a message")
        device.give(reading(6))
        found = [link.receive(PATIENCE) for _ in range(4)]
        assert [(item.sequence, item.late) for item in found if item] == [(3, False), (5, False), (4, True), (6, False)]
        assert found[0] is not None
        assert found[0].values.tolist() == [3.0, -1.0]
        assert found[0].device_time == -(10**17) + 3
        assert before[0] <= found[0].received <= time.monotonic_ns()
        assert before[1] <= found[0].wall <= time.time_ns()
        assert link.last is found[3]
        assert link.statistics == Statistics(sent=1, received=4, late=1, repeated=1, damaged=1)


def test_the_newest_reading_is_the_one_with_the_highest_number() -> None:
    transport = Loopback()
    link = link_to(transport)
    assert link.receive_newest() is None
    transport.arriving += [reading(sequence) for sequence in (0, 2, 1)]
    newest = link.receive_newest()
    assert newest is not None
    assert newest.sequence == 2
    # all that has come since is older than what was there
    transport.arriving += [reading(5), reading(8)]
    link.receive_newest()
    transport.arriving += [reading(6), reading(7)]
    assert link.receive_newest() is None
    assert link.last is not None
    assert link.last.sequence == 8


def test_nothing_within_the_timeout_is_none() -> None:
    with udp_device() as device, link_to(UDP(device.address)) as link:
        link.send([0])
        started = time.monotonic()
        assert link.receive(0.05) is None
        assert time.monotonic() - started >= 0.05
        assert link.receive() is None
        assert link.receive_newest(0.01) is None


def test_a_flood_does_not_hold_the_loop() -> None:
    class Endless(Loopback):
        data = b"noise"

        def receive(self, timeout: float) -> bytes | None:
            return self.data

    transport = Endless()
    link = link_to(transport)
    assert link.receive() is None
    assert link.receive(0.01) is None
    transport.data = reading(3)
    # one that repeats itself for ever is no reading, either
    assert link.receive() is not None
    assert link.receive() is None

    class Counting(Loopback):
        count = 0

        def receive(self, timeout: float) -> bytes | None:
            self.count += 1
            return reading(self.count)

    newest = link_to(Counting()).receive_newest()
    assert newest is not None


def test_what_the_system_does_not_take_is_dropped_and_counted() -> None:
    transport = Loopback()
    link = link_to(transport)
    transport.full = True
    assert [link.send([0]), link.send([1])] == [0, 1]
    transport.full = False
    assert link.send([2]) == 2
    assert [message.sequence for message in transport.commands] == [2]
    assert link.statistics == Statistics(sent=1, dropped=2)


@pytest.mark.parametrize(
    "values", [[], [1, 2], 1.0, [[1.0]], ["x"], [None], [np.nan], [np.inf], [[1], [2, 3]], "1", None, [1j]], ids=repr
)
def test_a_command_that_is_none_is_refused_and_not_sent(values: Any) -> None:
    transport = Loopback()
    link = link_to(transport)
    with pytest.raises(ConfigurationError, match="nothing was sent"):
        link.send(values)
    assert transport.sent == []
    assert link.send([1]) == 0


@pytest.mark.parametrize("timeout", [-1, float("nan"), float("inf"), None, "1"])
def test_a_timeout_is_a_number_of_seconds(timeout: Any) -> None:
    for receive in (link_to(Loopback()).receive, link_to(Loopback()).receive_newest):
        with pytest.raises(ConfigurationError, match="timeout"):
            receive(timeout)


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"command": ("a", "a")}, "different"),
        ({"command": "force"}, "list of names"),
        ({"command": ("",)}, "different"),
        ({"command": (1,)}, "different"),
        ({}, "does nothing"),
        ({"reading": tuple(map(str, range(5000)))}, "at most 4096"),
    ],
)
def test_names_are_checked(arguments: Any, match: str) -> None:
    with pytest.raises(ConfigurationError, match=match):
        Link(Loopback(), **arguments)
    with pytest.raises(ConfigurationError, match="transport"):
        Link("127.0.0.1:9000", command=("a",))  # type: ignore[arg-type]


def test_a_restore_disarms_and_nothing_reaches_the_device_before_arm() -> None:
    with udp_device() as device, link_to(UDP(device.address)) as link:
        for _ in range(3):
            link.send([1])
        assert [device.take().sequence for _ in range(3)] == [0, 1, 2]
        device.give(reading(4, values=(5.0, 6.0), time=9))
        link.receive(PATIENCE)
        state = link.state_dict()
        link.send([1])
        stream = device.take().stream

        link.load_state_dict(state)
        assert not link.armed
        assert not link.connected
        for call in (lambda: link.send([1]), link.receive, link.receive_newest):
            with pytest.raises(LinkDisarmedError, match=r"link\.arm\(\)"):
                call()
        assert device.untouched()
        assert link.last is not None
        assert (link.last.values.tolist(), link.last.sequence, link.last.device_time) == ([5.0, 6.0], 4, 9)

        link.arm()
        assert device.untouched()
        # the count goes on where the state was; to the device it is a stream of its own
        assert link.send([7]) == 3
        command = device.take()
        assert (command.sequence, command.values.tolist()) == (3, [7.0])
        assert command.stream != stream


def test_a_state_holds_no_times_of_this_process_and_nothing_that_was_counted() -> None:
    transport = Loopback()
    link = link_to(transport)
    transport.arriving.append(reading(4, time=9))
    link.send([1])
    link.receive()
    state = link.state_dict()
    assert {key: value for key, value in state.items() if key != "last"} == {
        "command": ["force"],
        "reading": ["force", "position"],
        "sequence": 1,
    }
    assert sorted(state["last"]) == ["device_time", "sequence", "values"]
    other = link_to(Loopback())
    other.load_state_dict(state)
    assert other.last is not None
    assert (other.last.received, other.last.wall) == (0, 0)
    assert other.statistics == Statistics()
    other.load_state_dict({**state, "last": None})
    assert other.last is None


def test_the_state_of_another_device_is_refused_and_the_link_stays_armed() -> None:
    state = Link(Loopback(), command=("torque",), reading=("force", "position")).state_dict()
    link = link_to(Loopback())
    last = {"values": np.zeros(3), "sequence": 0, "device_time": 0}
    for wrong, match in ((state, "torque"), ({**link.state_dict(), "last": last}, r"shape \(3,\)"), ({}, "here")):
        with pytest.raises(StateMismatchError, match=match):
            link.load_state_dict(wrong)
    assert link.armed
    # numbers go on from the end of their range at its beginning
    link.load_state_dict({**link.state_dict(), "sequence": 2**64 - 1})
    link.arm()
    assert [link.send([1]), link.send([1])] == [2**64 - 1, 0]


def test_a_link_with_a_model_has_no_state_of_its_own() -> None:
    with pytest.raises(UnsupportedStateError, match="env that holds"):
        link_to(Simulated(lambda command, time: None)).state_dict()


def test_a_link_is_opened_by_its_first_use_or_by_arm() -> None:
    transport = Loopback()
    link = link_to(transport)
    assert link.armed
    assert transport.opened == 0
    assert not link.connected
    link.send([1])
    link.send([1])
    assert transport.opened == 1
    assert link.connected
    link.disarm()
    assert not link.connected
    link.arm()
    assert transport.opened == 2
    closed = link_to(Loopback(), armed=False)
    with pytest.raises(LinkDisarmedError):
        closed.receive()
    with link_to(transport) as inner:
        inner.send([1])
    assert not inner.armed


def test_a_link_that_cannot_be_opened_is_disarmed_until_it_can() -> None:
    class Missing(Loopback):
        missing = True

        def open(self) -> None:
            if self.missing:
                raise FileNotFoundError("no such device")
            super().open()

    transport = Missing()
    link = link_to(transport, name="motor")
    with pytest.raises(LinkUnavailableError, match="no such device") as refused:
        link.send([1])
    assert refused.value.link == "motor"
    assert isinstance(refused.value, ConnectionError)
    # a loop does not try again at every step
    with pytest.raises(LinkDisarmedError):
        link.send([1])
    with pytest.raises(LinkUnavailableError):
        link.arm()
    transport.missing = False
    link.arm()
    assert link.send([1]) == 0


def test_a_second_thread_is_told_that_the_link_is_in_use() -> None:
    inside, leave = threading.Event(), threading.Event()

    class Waiting(Loopback):
        def receive(self, timeout: float) -> bytes | None:
            inside.set()
            assert leave.wait(PATIENCE)
            return None

    link = link_to(Waiting())
    thread = threading.Thread(target=link.receive)
    thread.start()
    assert inside.wait(PATIENCE)
    calls: list[Callable[[], Any]] = [lambda: link.send([1]), link.receive, link.receive_newest, link.time]
    for call in [*calls, link.arm]:
        with pytest.raises(LinkBusyError, match="another thread"):
            call()
    leave.set()
    thread.join(PATIENCE)
    assert link.send([1]) == 0


def test_any_thread_may_disarm_at_any_time() -> None:
    inside, leave = threading.Event(), threading.Event()

    class Waiting(Loopback):
        def receive(self, timeout: float) -> bytes | None:
            inside.set()
            assert leave.wait(PATIENCE)
            return None

    transport = Waiting()
    link = link_to(transport)
    refused = threading.Event()

    def loop() -> None:
        link.receive()
        try:
            link.send([1])
        except LinkDisarmedError:
            refused.set()

    thread = threading.Thread(target=loop)
    thread.start()
    assert inside.wait(PATIENCE)
    link.disarm()
    assert not link.armed
    leave.set()
    thread.join(PATIENCE)
    assert refused.is_set()
    assert transport.sent == []
    assert transport.closed == 1


def test_who_disarms_a_link_is_not_disturbed_by_who_uses_it() -> None:
    inside, leave = threading.Event(), threading.Event()

    class Slow(Loopback):
        def close(self) -> None:
            super().close()
            inside.set()
            assert leave.wait(PATIENCE)

    link = link_to(transport := Slow())
    link.send([1])
    raised: list[BaseException] = []

    def stop() -> None:
        try:
            link.disarm()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=stop)
    thread.start()
    assert inside.wait(PATIENCE)
    with pytest.raises(LinkBusyError):
        link.send([2])
    leave.set()
    thread.join(PATIENCE)
    assert raised == []
    assert len(transport.sent) == 1
    with pytest.raises(LinkDisarmedError):
        link.send([3])


def test_an_interrupt_anywhere_leaves_a_link_that_can_be_used() -> None:
    def interrupt(number: int, frame: Any) -> None:
        raise KeyboardInterrupt

    link = link_to(Loopback())
    interrupts = 0
    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        while interrupts < 400:
            try:
                signal.setitimer(signal.ITIMER_REAL, 0.0002 + interrupts * 1e-6)
                while True:
                    link.send([1])
                    link.receive_newest()
            except KeyboardInterrupt:
                interrupts += 1
            assert link.send([1]) >= 0
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_a_link_that_is_disarmed_while_it_opens_sends_nothing() -> None:
    class Slow(Loopback):
        def open(self) -> None:
            super().open()
            link.disarm()

    transport = Slow()
    link = link_to(transport)
    with pytest.raises(LinkDisarmedError):
        link.send([1])
    assert (transport.sent, transport.closed) == ([], 1)


def test_an_observer_that_calls_the_link_is_told_so_and_does_not_hang() -> None:
    class Meddling(Log):
        def sent(self, link: Link, sequence: int, values: np.ndarray, monotonic: int, wall: int) -> None:
            link.send(values)

    link = link_to(Loopback())
    link.observer = Meddling()
    with pytest.raises(LinkBusyError):
        link.send([1])
    link.observer = None
    assert link.send([1]) == 1


def test_a_fork_does_not_speak_to_the_device_of_its_parent() -> None:
    with udp_device() as device, link_to(UDP(device.address)) as link:
        link.send([1])
        device.take()
        child = os.fork()
        if child == 0:
            code = 1
            try:
                link.send([2])
            except LinkDisarmedError:
                link.arm()
                link.send([3])
                link.close()
                code = 0
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        # the child's own, after it was armed there
        assert device.take().values.tolist() == [3.0]
        link.send([4])
        assert device.take().values.tolist() == [4.0]
        device.give(reading(0))
        assert link.receive(PATIENCE) is not None


def test_an_observer_is_told_of_everything_in_order() -> None:
    transport = Loopback()
    link = link_to(transport)
    link.observer = log = Log()
    link.send([2.5])
    transport.full = True
    link.send([3])
    transport.arriving += [reading(0), reading(0), reading(2)]
    newest = link.receive_newest()
    now = link.time()
    link.receive()
    assert [entry[0] for entry in log.entries] == ["sent"] * 2 + ["received"] * 3 + ["timed", "received"]
    assert {entry[1] for entry in log.entries} == {link}
    assert [(entry[2], entry[3].tolist()) for entry in log.entries[:2]] == [(0, [2.5]), (1, [3.0])]
    found = [entry[2] for entry in log.entries if entry[0] == "received"]
    assert [None if item is None else item.sequence for item in found] == [0, 2, None, None]
    assert found[1] is newest
    assert all(entry[3:] == (entry[2].received, entry[2].wall) for entry in log.entries[2:4])
    assert log.entries[5][2] == now
    times = [entry[-2] for entry in log.entries]
    assert times == sorted(times)


def test_a_source_answers_in_place_of_the_device_whether_armed_or_not() -> None:
    class Record:
        def __init__(self) -> None:
            self.commands: list[list[float]] = []
            self.readings = [Reading(np.array([1.0, 2.0]), 40, 5, 6, 7), None, Reading(np.zeros(2), 39, 4, 8, 9, True)]

        def send(self, values: np.ndarray) -> int:
            self.commands.append(values.tolist())
            return 70 + len(self.commands)

        def receive(self, timeout: float) -> Reading | None:
            return self.readings.pop(0)

        def time(self) -> int:
            return 1234

    transport = Loopback()
    link = link_to(transport, armed=False)
    link.source = record = Record()
    link.observer = log = Log()
    assert link.send([4]) == 71
    answers = list(record.readings)
    assert link.receive_newest() is answers[0]
    assert link.receive() is answers[2]
    assert link.last is answers[0]
    assert link.time() == 1234
    assert record.commands == [[4.0]]
    assert [entry[0] for entry in log.entries] == ["sent", "received", "received", "received", "timed"]
    assert (transport.sent, transport.opened, transport.closed) == ([], 0, 0)
    assert link.state_dict()["sequence"] == 72
    assert link.statistics == Statistics()
    link.source = None
    with pytest.raises(LinkDisarmedError):
        link.send([4])


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda link: pickle.loads(pickle.dumps(link))])
def test_a_copy_is_a_link_of_its_own(copied: Callable[[Link], Link]) -> None:
    with udp_device() as device:
        new = link_to(UDP(device.address), name="motor")
        # as in the arguments of an env that is made later, elsewhere
        assert copied(new).armed
        with new, copied(new) as other:
            assert other.send([1]) == 0
            device.take()
            new.send([2])
            new.observer = Log()
            device.take()
            copy_of_open = copied(new)
            assert not copy_of_open.armed
            assert copy_of_open.observer is None
            assert copy_of_open.state_dict() == new.state_dict()
            copy_of_open.arm()
            copy_of_open.close()
            assert new.send([3]) == 1
            assert device.take().values.tolist() == [3.0]


def test_a_simulated_device_moves_one_period_a_step() -> None:
    calls = []

    def model(command: Any, time: int) -> Any:
        calls.append((None if command is None else command.tolist(), time))
        return None if len(calls) == 3 else (len(calls), 0.5)

    link = link_to(Simulated(model, period=0.004))
    found: list[Any] = []
    for step in range(4):
        link.send([step])
        found.append(link.receive_newest(0.002))
    assert calls == [([float(step)], 4_000_000 * (step + 1)) for step in range(4)]
    assert [item and (item.values[0], item.sequence, item.device_time) for item in found] == [
        (1.0, 0, 4_000_000),
        (2.0, 1, 8_000_000),
        None,
        (4.0, 2, 16_000_000),
    ]
    assert link.statistics == Statistics(sent=4, received=3)
    # without commands its time passes with the waits
    assert link.receive() is None
    for _ in range(3):
        assert link.receive(0.1) is not None
    assert calls[4:] == [(None, 4_000_000 * step) for step in (5, 6, 7)]


def test_a_model_with_other_readings_is_refused() -> None:
    link = link_to(Simulated(lambda command, time: (1.0,)))
    link.send([1])
    with pytest.raises(ConfigurationError, match="shape"):
        link.receive()
    for arguments in ({"model": None}, {"model": print, "period": 0.0}, {"model": print, "period": float("nan")}):
        with pytest.raises(ConfigurationError):
            Simulated(**arguments)  # type: ignore[arg-type]


def test_a_session_of_hours_does_not_grow() -> None:
    transport = Loopback()
    link = link_to(transport)

    def steps(first: int, count: int) -> None:
        for sequence in range(first, first + count):
            transport.arriving.append(reading(sequence))
            link.send([1])
            link.receive_newest()
            transport.sent.clear()

    steps(0, 500)
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        steps(500, 3000)
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    # a byte a step would be 3000
    assert after - before < 2500


def test_the_links_of_an_env_are_found_through_its_wrappers() -> None:
    class Node:
        def __init__(self, **attributes: Any) -> None:
            vars(self).update(attributes)

    one, two, three = (link_to(Loopback(), name=name) for name in ("one", "two", "three"))
    env = Node(env=Node(links=[two, one], also=two, env=Node(by_name={"x": three}, n=5)), first=one)
    assert links_of(env) == {"one": one, "two": two, "three": three}
    assert list(links_of(env)) == ["one", "two", "three"]
    with pytest.raises(ConfigurationError, match="'one'"):
        links_of(Node(first=one, second=link_to(Loopback(), name="one")))


@pytest.mark.parametrize("name", ["", "arm/left", "/", "%41"])
def test_a_name_that_is_no_part_of_a_path_is_refused(name):
    with pytest.raises(ConfigurationError, match="name= of a link"):
        Link(Simulated(lambda values, time: None), command=("force",), name=name)
