"""The watcher of signals: what it notices, and that it leaves everything as it was."""

import ctypes
import os
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest

from simckpt.errors import ConfigurationError
from simckpt.signals import EXIT_REQUEUE, SignalWatcher

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)


@pytest.fixture(autouse=True)
def everything_is_as_it_was_afterwards():
    handlers = [signal.getsignal(number) for number in SIGNALS]
    yield
    assert [signal.getsignal(number) for number in SIGNALS] == handlers
    assert signal.set_wakeup_fd(-1) == -1
    assert [thread.name for thread in threading.enumerate()].count("simckpt-signals") == 0


WATCHING = """
import os, signal, subprocess, sys, threading
from simckpt.signals import SignalWatcher
watcher = SignalWatcher(["SIGTERM"])
watcher.start()
"""


def run_program(program: str) -> str:
    """Returns what a program prints."""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=30)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture
def watcher():
    made = SignalWatcher(["SIGTERM", "SIGUSR1"])
    made.start()
    yield made
    made.stop()


def test_nothing_is_received_before_a_signal_comes(watcher) -> None:
    assert watcher.received is None
    assert watcher.since is None


@pytest.mark.parametrize("name", ["SIGTERM", "SIGUSR1"])
def test_a_signal_is_remembered_by_name_and_time(watcher, name: str) -> None:
    before = time.monotonic()
    os.kill(os.getpid(), signal.Signals[name])
    assert watcher.received == name
    assert before <= watcher.since <= time.monotonic()


def test_a_second_signal_changes_nothing(watcher) -> None:
    os.kill(os.getpid(), signal.SIGUSR1)
    first = watcher.received, watcher.since
    os.kill(os.getpid(), signal.SIGUSR1)
    os.kill(os.getpid(), signal.SIGTERM)
    assert (watcher.received, watcher.since) == first


def test_a_signal_is_noticed_while_the_main_thread_is_in_c_code_which_is_not_interrupted(watcher) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    reader, writer = os.pipe()
    noticed = []

    def helper() -> None:
        # when the main thread has come to its system call cannot be known: signals for a while
        deadline = time.monotonic() + 0.2
        while time.monotonic() < deadline:
            # to the main thread itself, so that the call would be interrupted if it could be
            signal.pthread_kill(threading.main_thread().ident, signal.SIGTERM)
        deadline = time.monotonic() + 20
        while watcher.received is None and time.monotonic() < deadline:
            pass
        noticed.append(watcher.received)
        os.write(writer, b"x")

    thread = threading.Thread(target=helper)
    thread.start()
    # returns when the helper writes: no Python code of this thread runs before, so no Python handler does
    assert libc.read(reader, ctypes.create_string_buffer(1), 1) == 1
    thread.join()
    os.close(reader)
    os.close(writer)
    assert noticed == ["SIGTERM"]


def test_stopping_puts_handlers_and_wakeup_descriptor_back() -> None:
    own, other = socket.socketpair()
    own.setblocking(False)
    received = []
    previous = signal.signal(signal.SIGTERM, lambda *_: received.append("before"))
    signal.set_wakeup_fd(own.fileno())
    try:
        watcher = SignalWatcher(["SIGTERM"])
        watcher.start()
        os.kill(os.getpid(), signal.SIGTERM)
        assert received == []
        # the owner of the descriptor sees signals as ever
        assert other.recv(1) == bytes([signal.SIGTERM])
        watcher.stop()
        assert watcher.received == "SIGTERM"
        os.kill(os.getpid(), signal.SIGTERM)
        assert received == ["before"]
    finally:
        found = signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGTERM, previous)
        expected = own.fileno()
        own.close()
        other.close()
    assert found == expected


def test_a_signal_that_was_not_asked_for_is_forwarded_and_not_noticed() -> None:
    own, other = socket.socketpair()
    own.setblocking(False)
    previous = signal.signal(signal.SIGUSR2, lambda *_: None)
    signal.set_wakeup_fd(own.fileno())
    watcher = SignalWatcher(["SIGTERM"])
    watcher.start()
    try:
        os.kill(os.getpid(), signal.SIGUSR2)
        assert other.recv(1) == bytes([signal.SIGUSR2])
        assert watcher.received is None
    finally:
        watcher.stop()
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGUSR2, previous)
        own.close()
        other.close()


def test_sigint_stays_as_it_is_unless_asked_for(watcher) -> None:
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)
    asked = SignalWatcher(["SIGINT"])
    asked.start()
    os.kill(os.getpid(), signal.SIGINT)
    assert asked.received == "SIGINT"
    asked.stop()


def test_handler_and_descriptor_that_others_installed_meanwhile_stay() -> None:
    own, other = socket.socketpair()
    own.setblocking(False)
    watcher = SignalWatcher(["SIGTERM"])
    watcher.start()
    previous = signal.getsignal(signal.SIGUSR1)
    mine = lambda *_: None  # noqa: E731
    signal.signal(signal.SIGTERM, mine)
    signal.set_wakeup_fd(own.fileno())
    watcher.stop()
    try:
        assert signal.getsignal(signal.SIGTERM) is mine
        assert signal.set_wakeup_fd(-1) == own.fileno()
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        own.close()
        other.close()
    assert signal.getsignal(signal.SIGUSR1) == previous


def test_a_signal_is_noticed_although_someone_replaced_the_descriptor(watcher) -> None:
    ours = signal.set_wakeup_fd(-1)
    try:
        os.kill(os.getpid(), signal.SIGTERM)
        assert watcher.received == "SIGTERM"
    finally:
        signal.set_wakeup_fd(ours)


@pytest.mark.parametrize("first_out", ["inner", "outer"])
def test_nested_watchers_both_notice_and_are_undone_in_any_order(first_out: str) -> None:
    outer, inner = SignalWatcher(["SIGTERM"]), SignalWatcher(["SIGTERM", "SIGUSR1"])
    outer.start()
    inner.start()
    os.kill(os.getpid(), signal.SIGUSR1)
    os.kill(os.getpid(), signal.SIGTERM)
    assert inner.received == "SIGUSR1"
    for each in [inner, outer] if first_out == "inner" else [outer, inner]:
        each.stop()
    # stopping waits for the watching thread, which forwards what came in order
    assert outer.received == "SIGTERM"


def test_a_watcher_that_is_stopped_first_does_not_take_a_later_one_along() -> None:
    outer, inner = SignalWatcher(["SIGTERM"]), SignalWatcher(["SIGUSR1"])
    outer.start()
    inner.start()
    held = signal.getsignal(signal.SIGUSR1), signal.set_wakeup_fd(-1)
    signal.set_wakeup_fd(held[1])
    outer.stop()
    assert (signal.getsignal(signal.SIGUSR1), signal.set_wakeup_fd(-1)) == held
    signal.set_wakeup_fd(held[1])
    os.kill(os.getpid(), signal.SIGUSR1)
    inner.stop()
    assert inner.received == "SIGUSR1"


def test_starting_anew_forgets_and_starting_twice_does_nothing(watcher) -> None:
    os.kill(os.getpid(), signal.SIGTERM)
    watcher.start()
    assert watcher.received == "SIGTERM"
    watcher.stop()
    watcher.stop()
    watcher.start()
    assert watcher.received is None


def test_many_starts_leave_no_descriptors_behind() -> None:
    def descriptors() -> int:
        return len(os.listdir("/proc/self/fd"))  # noqa: PTH208

    watcher = SignalWatcher(["SIGTERM"])
    before = descriptors()
    for _ in range(100):
        watcher.start()
        watcher.stop()
    assert descriptors() == before


def test_outside_the_main_thread_it_says_what_to_do() -> None:
    errors = []

    def enter() -> None:
        try:
            SignalWatcher(["SIGTERM"]).start()
        except ConfigurationError as error:
            errors.append(str(error))

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    (message,) = errors
    assert "main thread" in message
    assert "OnSignal" in message


def test_an_unknown_signal_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="SIGNONSENSE"):
        SignalWatcher(["SIGNONSENSE"])


@pytest.mark.parametrize("thread", [False, True], ids=["main thread", "other thread"])
def test_a_forked_child_dies_by_the_signal_and_the_parent_notices_nothing(thread: bool) -> None:
    body = """
ended = []
def fork():
    ready, tell = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(tell, b"x")
        signal.pause()
        os._exit(0)
    os.read(ready, 1)
    os.kill(child, signal.SIGTERM)
    ended.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    body += "t = threading.Thread(target=fork); t.start(); t.join()" if thread else "fork()"
    body += "\nwatcher.stop(); print(ended, watcher.received)"
    assert run_program(WATCHING + body) == f"[{-signal.SIGTERM}] None\n"


def test_a_signal_right_after_the_fork_reaches_the_child_and_not_the_parent() -> None:
    # registered before simckpt's hooks, so that it runs while the child still has the parent's handlers
    program = """
import os, signal
os.register_at_fork(after_in_child=lambda: os.kill(os.getpid(), signal.SIGTERM))
from simckpt.signals import SignalWatcher
watcher = SignalWatcher(["SIGTERM"])
watcher.start()
mask = signal.pthread_sigmask(signal.SIG_BLOCK, ())
child = os.fork()
if child == 0:
    os._exit(0)
ended = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
watcher.stop()
print(ended, watcher.received, signal.pthread_sigmask(signal.SIG_BLOCK, ()) == mask)
"""
    assert run_program(program) == f"{-signal.SIGTERM} None True\n"


def test_a_forked_child_gets_the_handler_of_before_and_may_watch_itself() -> None:
    program = """
import os, signal
from simckpt.signals import SignalWatcher
before = lambda *_: None
signal.signal(signal.SIGTERM, before)
watcher = SignalWatcher(["SIGTERM"])
watcher.start()
child = os.fork()
if child == 0:
    assert signal.getsignal(signal.SIGTERM) is before
    assert signal.set_wakeup_fd(-1) == -1
    watcher.stop()
    own = SignalWatcher(["SIGTERM"])
    own.start()
    os.kill(os.getpid(), signal.SIGTERM)
    own.stop()
    os._exit(7 if own.received == "SIGTERM" and watcher.received is None else 1)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), watcher.received)
watcher.stop()
"""
    assert run_program(program) == "7 None\n"


def test_a_program_that_is_started_meanwhile_dies_by_the_signal() -> None:
    body = """
program = "import signal; print('ready', flush=True); signal.pause()"
child = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE)
child.stdout.readline()
child.terminate()
print(child.wait(), watcher.received)
"""
    assert run_program(WATCHING + body) == f"{-signal.SIGTERM} None\n"


def test_a_signal_to_the_whole_process_group_is_noticed_once_and_ends_the_children() -> None:
    body = """
os.setpgid(0, 0)
ready, tell = os.pipe()
child = os.fork()
if child == 0:
    os.write(tell, b"x")
    signal.pause()
    os._exit(0)
os.read(ready, 1)
os.killpg(0, signal.SIGTERM)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), watcher.received)
"""
    assert run_program(WATCHING + body) == f"{-signal.SIGTERM} SIGTERM\n"


def test_a_program_that_never_stops_its_watcher_ends() -> None:
    assert run_program(WATCHING + "print('done')") == "done\n"


def test_the_code_for_requeueing_is_the_systems_temporary_failure() -> None:
    assert EXIT_REQUEUE == os.EX_TEMPFAIL == 75
