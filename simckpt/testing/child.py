"""A training in a process of its own: recorded at every step, killed at one of them, and never left behind."""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
import os
import signal
import time
import traceback
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from simckpt import checkpointer
from simckpt.background import Save
from simckpt.branching.children import end_group, has_ended, wait_for_end
from simckpt.checkpoint import Checkpoint
from simckpt.errors import ConfigurationError
from simckpt.maintenance.fallback import FALL_BACK
from simckpt.rollback import supervise
from simckpt.state import RNGStreams
from simckpt.store import Store
from simckpt.testing.coverage import StreamWatch, uncovered_objects

GRACE = 10.0  # for a process that is done to close its envs and end [s]
POLL = 0.1  # between two looks at whether the process still lives [s]
TIMEOUT = ("timeout", None)

Train = Callable[[Store], object]
# called in the fresh process; changes what its checkpointers do, and returns what gives the finding in the end
Recorder = Callable[[Connection], Callable[[], Any]]


@dataclass(frozen=True)
class Finding:
    """What a training process saw of itself.

    Attributes:
        uncovered: what looks like state and is covered by no component, one line each.
        streams: the names of the `RNGStreams` among the components.
    """

    uncovered: tuple[str, ...] = ()
    streams: tuple[str, ...] = ()


def train_apart(
    train: Train, store: Path, *, timeout: float, kill_at: int | None = None, look_around: bool = False
) -> Finding:
    """Trains in a fresh process, and returns what it found; a killed one finds nothing.

    Args:
        train: called with the store.
        store: its folder.
        timeout: of the process [s].
        kill_at: kills it by SIGKILL right after the first save at or after this step [env steps].
        look_around: whether to search the process for what no component covers; takes about a second a search.

    Raises:
        ConfigurationError: as `run_apart`, or it never reached `kill_at`.
    """
    found = run_apart(train, store, functools.partial(_record_all, kill_at, look_around), timeout=timeout)
    if isinstance(found, Finding):
        if kill_at is not None:
            what = f"the training in {store}"
            raise ConfigurationError(f"{what} ended before step {kill_at}; choose at_steps inside of it")
        return found
    return Finding()


def run_apart(train: Train, store: Path, recorder: Recorder, *, timeout: float) -> Any:
    """Trains in a fresh process, and returns what its recorder found; None if it killed the process.

    After a rollback the training is entered again. All processes that it started are gone afterwards, unless one of
    them made itself a group of its own.

    Args:
        train: called with the store.
        store: its folder.
        recorder: installed in the process before the training begins; must be importable there.
        timeout: of the process [s].

    Raises:
        ConfigurationError: it could not be started, raised, died or took too long.
    """
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_child, args=(train, store, recorder, sender))
    name = f"{getattr(train, '__module__', '?')}.{getattr(train, '__qualname__', repr(train))}"
    try:
        process.start()
    except Exception as error:  # whatever the training is made of may refuse to be sent
        receiver.close()
        message = f"a fresh process cannot import {name}: give a function of a module, not a lambda or closure"
        raise ConfigurationError(f"{message} ({error})", keys=["train"]) from error
    finally:
        sender.close()
    try:
        messages = _listen(process, receiver, timeout=timeout)
        if messages[-1:] != [TIMEOUT]:
            wait_for_end(process, GRACE)
    finally:
        end_group(process)
        receiver.close()
    return _outcome(messages, process.exitcode, f"the training in {store}", name=name, timeout=timeout)


def _listen(process: BaseProcess, receiver: Connection, *, timeout: float) -> list[tuple[str, Any]]:
    """Returns what the process said until its last word, its end, or the timeout."""
    deadline = time.monotonic() + timeout
    messages: list[tuple[str, Any]] = []
    with contextlib.suppress(EOFError, OSError):
        while not messages or messages[-1][0] == "started":
            # the end of the pipe is not enough: worker processes hold it open, too
            if receiver.poll(POLL):
                messages.append(receiver.recv())
            elif has_ended(process) and not receiver.poll(0):
                break
            elif time.monotonic() > deadline:
                messages.append(TIMEOUT)
    return messages


def _outcome(messages: list[tuple[str, Any]], exit_code: int | None, what: str, *, name: str, timeout: float) -> Any:
    word, value = messages[-1] if messages else ("unborn", None)
    problems = {
        "failed": f"{what} failed:\n{value}",
        "timeout": f"{what} took more than {timeout:g} s; give a shorter one, or a longer timeout",
        "started": f"{what} died by itself (exit code {exit_code}); its output may tell why",
        "unborn": f"{what} did not begin (exit code {exit_code}): a fresh process could not import {name}. The output "
        "may tell why; a script needs `if __name__ == '__main__':` around its call",
    }
    if word in problems:
        raise ConfigurationError(problems[word])
    return None if word == "killed" else value


def _child(train: Train, store: Path, recorder: Recorder, sender: Connection) -> None:
    # the parent kills the whole group in the end
    os.setpgid(0, 0)
    sender.send(("started", None))
    message: tuple[str, Any]
    try:
        finding = recorder(sender)
        _call(train, Store(store))
        message = ("done", finding())
    except BaseException:
        message = ("failed", traceback.format_exc())
    sender.send(message)


def _record_all(kill_at: int | None, look_around: bool, sender: Connection) -> Callable[[], Finding]:
    """Makes every `Checkpointer.step` of this process save, and returns what gives the finding."""
    uncovered: dict[str, None] = {}
    streams: dict[str, None] = {}

    class Recording(checkpointer.Checkpointer):
        """Saves at every call, keeps all, and kills its process at the wanted one."""

        def __init__(self, run: Any, files: Any, claim: Any, components: Mapping[str, Any], **policies: Any) -> None:
            super().__init__(run, files, claim, components, **{**policies, "keep": None})
            streams.update(dict.fromkeys(name for name, each in components.items() if isinstance(each, RNGStreams)))
            self._restored_step: int | None = None
            self._calls = 0
            self._watch = StreamWatch()

        def restore_latest(
            self, *, damaged: str = FALL_BACK, untouched: Collection[str] = frozenset()
        ) -> Checkpoint | None:
            restored = super().restore_latest(damaged=damaged, untouched=untouched)
            self._restored_step = restored.step if restored else None
            return restored

        def step(self, step: int, metrics: Mapping[str, float] | None = None) -> Save | None:
            # a loop that saves before its body comes once more to the step that it was restored to
            if step == self._restored_step:
                return None
            self.save(step, metrics)
            if kill_at is not None and step >= kill_at:
                sender.send(("killed", step))
                os.kill(os.getpid(), signal.SIGKILL)
            self._calls += 1
            if look_around:
                self._look_around()
            return self._saver.latest

        def _look_around(self) -> None:
            uncovered.update(dict.fromkeys(self._watch.uncovered(self.components)))
            # sweeping the heap is slow: at the calls 1, 2, 4, 8, ...
            if self._calls & (self._calls - 1) == 0:
                uncovered.update(dict.fromkeys(uncovered_objects(self.components)))

    checkpointer.Checkpointer = Recording  # type: ignore[misc]
    return lambda: Finding(tuple(uncovered), tuple(streams))


def _call(train: Train, store: Store) -> None:
    try:
        supervise(train, store)
    except SystemExit as error:
        # a script's main() may end that way, and well
        if error.code not in (None, 0):
            raise
