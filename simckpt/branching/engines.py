"""Where the calls of a fan-out run: the protocol that every engine follows, and processes of this machine.

An engine has one method, `submit(fn, *args)`, and its futures four. `concurrent.futures` executors follow the protocol
as they are; other engines are `RayEngine` and `SlurmEngine`. What a fan-out submits is made for all of them:
`fn` is a function of a module, its arguments and its result are what JSON can hold.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import math
import multiprocessing
import multiprocessing.connection
import os
import signal
import threading
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from types import TracebackType
from typing import Any, Protocol

from simckpt.branching.children import end_group, has_ended, wait_for_end
from simckpt.branching.functions import check_main_part
from simckpt.errors import ConfigurationError, WorkerDiedError, WorkerFailedError
from simckpt.policies.arguments import check_count, check_duration

GRACE = 60.0  # for a process that was asked to end: it may have to write its last checkpoint [s]
POLL = 0.1  # between two looks at whether a process still lives [s]


class Future(Protocol):
    """A call that an engine has taken."""

    def result(self, timeout: float | None = None) -> Any:
        """Returns what the call returned; waits for it, at most `timeout` [s], then raises TimeoutError.

        Raises:
            WorkerDiedError: the process ended without a result.
            Exception: the call failed, or was cancelled; which class is up to the engine.
        """

    def running(self) -> bool:
        """Returns whether the call has begun and not ended; a call that waits for its turn is not running."""

    def done(self) -> bool:
        """Returns whether `result` would answer at once. Engines that must look do so here: it is called often."""

    def cancel(self) -> bool:
        """Takes the call back, or ends it if it runs and the engine can; does not wait. Returns False if it cannot."""


class Engine(Protocol):
    """Runs calls somewhere else, several at a time."""

    def submit(self, fn: Callable[..., Any], /, *args: Any) -> Future:
        """Returns a future of `fn(*args)`, at once; the call begins when the engine has room for it."""


class LocalEngine:
    """Runs each call in a fresh process of this machine; a process that dies takes no other with it.

    Processes are spawned, so that a call starts as a program does, whatever this process has loaded. Each leads a
    group of its own: Ctrl-C reaches this process alone, and a call is ended together with the env workers it started.
    Should this process die, the calls end at once.

    Args:
        max_workers: how many calls run at a time, at least 1; the cores of this machine by default.
        grace: between asking a call to end (SIGTERM, which `simckpt.OnSignal` answers by a save) and killing it [s].

    Raises:
        ConfigurationError: an argument makes no sense.
    """

    def __init__(self, max_workers: int | None = None, *, grace: float = GRACE) -> None:
        workers = len(os.sched_getaffinity(0)) if max_workers is None else max_workers
        check_count(workers, policy="LocalEngine, max_workers:", key="max_workers")
        check_duration(grace, policy="LocalEngine, grace:", key="grace", unit="seconds", least=0)
        self._grace = grace
        self._threads = concurrent.futures.ThreadPoolExecutor(workers, thread_name_prefix="simckpt-engine")
        self._futures: list[LocalFuture] = []

    def __enter__(self) -> LocalEngine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def submit(self, fn: Callable[..., Any], /, *args: Any) -> LocalFuture:
        """Returns a future of `fn(*args)`; both, and the result, must be picklable: `fn` is a function of a module.

        Raises:
            ConfigurationError: called by a script at its top level, which the spawned process runs, too.
        """
        check_main_part()
        if getattr(multiprocessing.current_process(), "_inheriting", False):
            raise ConfigurationError(
                "a process that a script spawns runs the script: put `if __name__ == '__main__':` around its calls"
            )
        ending = threading.Event()
        future = LocalFuture(self._threads.submit(_call_apart, fn, args, ending, self._grace), ending)
        self._futures = [each for each in self._futures if not each.done()] + [future]
        return future

    def close(self) -> None:
        """Ends the calls that are left and waits until their processes are gone."""
        for future in self._futures:
            future.cancel()
        self._threads.shutdown(wait=True, cancel_futures=True)


class LocalFuture:
    """A call of a `LocalEngine`; see `Future`."""

    def __init__(self, call: concurrent.futures.Future[Any], ending: threading.Event) -> None:
        self._call = call
        self._ending = ending

    def result(self, timeout: float | None = None) -> Any:
        """Returns what the call returned.

        Raises:
            TimeoutError: it has not ended within `timeout` [s].
            WorkerFailedError: it raised.
            WorkerDiedError: its process ended without a result: it was killed, by the kernel for memory perhaps.
            concurrent.futures.CancelledError: it was taken back before it began.
        """
        return self._call.result(timeout)

    def running(self) -> bool:
        """Returns whether its process runs."""
        return self._call.running()

    def done(self) -> bool:
        """Returns whether it has ended."""
        return self._call.done()

    def cancel(self) -> bool:
        """Takes the call back or asks its process to end, which is killed after the grace period; does not wait."""
        if not self._call.cancel():
            self._ending.set()
        return True


def _call_apart(fn: Callable[..., Any], args: tuple[Any, ...], ending: threading.Event, grace: float) -> Any:
    """Returns `fn(*args)` of a fresh process; runs in a thread of the engine."""
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_child, args=(fn, args, sender))
    try:
        process.start()
    except OSError as error:
        receiver.close()
        raise WorkerDiedError(f"no process could be started: {error}", exit_code=None) from error
    except Exception as error:  # whatever cannot be sent refuses in its own way
        receiver.close()
        name = getattr(fn, "__qualname__", repr(fn))
        message = f"{name} cannot be sent to another process: give a function of a module, not a lambda or closure"
        raise ConfigurationError(f"{message} ({error})", keys=["fn"]) from error
    finally:
        sender.close()
    try:
        answer = _listen(process, receiver, ending, grace)
        if answer is not None:
            # env workers and the like are left to end by themselves
            wait_for_end(process, grace)
    finally:
        end_group(process)
        receiver.close()
    if answer is None:
        code = process.exitcode
        raise WorkerDiedError(f"the process ended without a result, {_manner(code)}", exit_code=code)
    succeeded, value = answer
    if not succeeded:
        raise WorkerFailedError(str(value))
    return value


def _listen(
    process: BaseProcess, receiver: Connection, ending: threading.Event, grace: float
) -> tuple[bool, Any] | None:
    """Returns (succeeded, value), or None once the process has ended without a word, or outlasted the grace period."""
    waiting = [receiver]
    deadline = math.inf
    while time.monotonic() < deadline:
        if multiprocessing.connection.wait(waiting, POLL):
            # closed without a word: the process is about to be gone
            with contextlib.suppress(EOFError, OSError):
                answer: tuple[bool, Any] = receiver.recv()
                return answer
            waiting.remove(receiver)
        elif has_ended(process) and not (waiting and receiver.poll(0)):
            return None
        elif ending.is_set() and deadline == math.inf:
            # asked politely first; env workers leave when their parent does
            deadline = time.monotonic() + grace
            process.terminate()
    return None


def _manner(exit_code: int | None) -> str:
    if exit_code is None:
        return "exit code unknown"
    return f"killed by {signal.Signals(-exit_code).name}" if exit_code < 0 else f"exit code {exit_code}"


def _child(fn: Callable[..., Any], args: tuple[Any, ...], sender: Connection) -> None:
    # the parent kills the whole group in the end
    os.setpgid(0, 0)
    threading.Thread(target=_die_with_parent, daemon=True).start()
    try:
        answer = (True, fn(*args))
    except (Exception, KeyboardInterrupt):
        answer = (False, traceback.format_exc())
    sender.send(answer)


def _die_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os.killpg(0, signal.SIGKILL)
