"""Notices within milliseconds that a scheduler asks the process to end, whatever the main thread is doing.

A Python signal handler runs between two bytecodes of the main thread: seconds late while that one is in C code (5.3 s
were measured in a compressed HDF5 write). The C handler below it writes the signal's number into a file descriptor at
once (`signal.set_wakeup_fd`), where a thread waits for it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
import time
from collections.abc import Iterable
from types import FrameType
from typing import Any

from simckpt.errors import ConfigurationError

EXIT_REQUEUE = 75  # EX_TEMPFAIL of sysexits.h: nothing is wrong, start the same command again

_STOP = b"\0"  # no signal has the number 0

# the watchers that hold handlers, in the order in which they were started
_active: list[SignalWatcher] = []
_masks = threading.local()


class SignalWatcher:
    """Remembers the first of some signals that comes, and does nothing else about it.

    While it is started, the signals do not end the process, and handlers installed before are not called. A process
    that is forked meanwhile gets these handlers back, so that it dies of the signals as it would have; the watcher is
    stopped in it. A wakeup descriptor installed before gets its signals as ever.

    Whoever installs another handler or wakeup descriptor meanwhile keeps it when the watcher stops. With the descriptor
    replaced, as asyncio does, signals are noticed when the main thread gets to run Python code. What a C library
    installed behind Python's back, as `faulthandler.register` does, is not put back.

    Attributes:
        names: the signals, such as ("SIGTERM", "SIGUSR1").

    Args:
        names: of the signals.

    Raises:
        ConfigurationError: a name that this system does not have.
    """

    def __init__(self, names: Iterable[str]) -> None:
        self.names = tuple(names)
        unknown = [name for name in self.names if name not in signal.Signals.__members__]
        if unknown:
            raise ConfigurationError(
                f"this system has no signals named {', '.join(map(repr, unknown))}", keys=["names"]
            )
        self._numbers = {int(signal.Signals[name]): name for name in self.names}
        # `setdefault` is atomic: the handler and the thread may both be first, and a lock in a handler can deadlock
        self._first: dict[str, tuple[str, float]] = {}
        self._wanted = False
        self._previous_handlers: dict[int, Any] = {}
        self._previous_wakeup = -1
        self._ends: tuple[socket.socket, socket.socket] | None = None
        self._thread: threading.Thread | None = None

    @property
    def received(self) -> str | None:
        """The name of the first signal that came since `start`; a second one, of whatever name, changes nothing."""
        first = self._first.get("signal")
        return None if first is None else first[0]

    @property
    def since(self) -> float | None:
        """When that signal was noticed, on the clock of `time.monotonic` [s]."""
        first = self._first.get("signal")
        return None if first is None else first[1]

    def start(self) -> None:
        """Takes over the signals; forgets what was received before. Does nothing if it is started already.

        Raises:
            ConfigurationError: called outside the main thread, where Python installs no handlers.
        """
        _require_main_thread("watched")
        if self in _active:
            self._wanted = True
            return
        self._first = {}
        reader, writer = self._ends = socket.socketpair()
        writer.setblocking(False)
        # daemon: nothing it does must be finished, and a program that ends without `stop` is not held up
        self._thread = threading.Thread(target=self._watch, args=(reader,), name="simckpt-signals", daemon=True)
        self._wanted = True
        _active.append(self)
        # a full buffer holds signals enough; what comes before the thread runs waits in it
        self._previous_wakeup = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
        self._thread.start()
        for number in self._numbers:
            self._previous_handlers[number] = signal.signal(number, self._handle)
            # the handler does not interrupt anything: let system calls inside C libraries go on
            signal.siginterrupt(number, False)

    def stop(self, *, ignore: bool = False) -> None:
        """Puts the handlers and the wakeup descriptor of before back; what was received stays readable.

        Watchers nest. One that is stopped before another that was started later lets go together with that one.

        Args:
            ignore: from now on the process ignores these signals instead, for it is about to exit.

        Raises:
            ConfigurationError: called outside the main thread.
        """
        if self not in _active:
            return
        _require_main_thread("given back")
        self._wanted = False
        if ignore:
            self._previous_handlers = dict.fromkeys(self._previous_handlers, signal.SIG_IGN)
        while _active and not _active[-1]._wanted:
            _active[-1]._restore()
            _active.pop()._end_thread()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        # the thread has noted it already, unless someone has replaced the wakeup descriptor
        self._note(number)

    def _note(self, number: int) -> None:
        if number in self._numbers:
            self._first.setdefault("signal", (self._numbers[number], time.monotonic()))

    def _watch(self, reader: socket.socket) -> None:
        while True:
            numbers = reader.recv(4096)
            for number in numbers:
                self._note(number)
            if self._previous_wakeup != -1:
                # it is non-blocking, as Python demands; a full or closed one misses no more than it would have
                with contextlib.suppress(OSError):
                    os.write(self._previous_wakeup, numbers.replace(_STOP, b""))
            if _STOP in numbers or not numbers:
                return

    def _restore(self) -> None:
        for number, previous in self._previous_handlers.items():
            if signal.getsignal(number) == self._handle:
                # None: installed by a C library before Python began, out of reach
                signal.signal(number, signal.SIG_DFL if previous is None else previous)
        self._previous_handlers = {}
        assert self._ends is not None
        current = signal.set_wakeup_fd(-1)
        wanted = self._previous_wakeup if current == self._ends[1].fileno() else current
        # whoever owned it may have closed it
        with contextlib.suppress(ValueError, OSError):
            signal.set_wakeup_fd(wanted)

    def _end_thread(self) -> None:
        assert self._ends is not None
        assert self._thread is not None
        writer = self._ends[1]
        writer.setblocking(True)
        writer.sendall(_STOP)
        self._thread.join()
        self._close()

    def _close(self) -> None:
        for end in self._ends or ():
            end.close()
        self._ends, self._thread, self._previous_wakeup = None, None, -1


def _require_main_thread(verb: str) -> None:
    if threading.current_thread() is not threading.main_thread():
        raise ConfigurationError(
            f"signals can be {verb} in the main thread alone: enter and leave the checkpointer there, or take "
            "OnSignal out of save_when and look for signals in the main thread of your program"
        )


def _block() -> None:
    # a signal to the child before it has its own handlers back would be taken for one to this process
    numbers = {number for watcher in _active for number in watcher._numbers}
    _masks.before = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)


def _unblock() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _masks.before)


def _release_in_child() -> None:
    try:
        while _active:
            _active[-1]._restore()
            _active.pop()._close()
    finally:
        _unblock()


os.register_at_fork(before=_block, after_in_parent=_unblock, after_in_child=_release_in_child)
