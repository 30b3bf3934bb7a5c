"""The process that writes what a recorder records: it maps the recorder's buffers; the loop never waits for it.

`main` is its end, `python -m simckpt.hardware.recording_process <fd>`; `recording.py` is the other one. One thread
takes messages and copies buffers, so that they are free again at once; another one writes. When the recorder's process
is gone, however it ended, what its buffers hold is written as well, up to the last row that was whole.
"""

from __future__ import annotations

import functools
import mmap
import os
import queue
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from simckpt.errors import StoreError
from simckpt.hardware.channel import Channel, unpack
from simckpt.hardware.columns import FIRST_ROW, SERIAL, STARTED, STOPPED, Buffer, Layout
from simckpt.hardware.keeping import Keeper, catches_errors
from simckpt.hardware.ring import Part, Snapshot
from simckpt.hardware.triggers import Found, Watchdog, trigger_from_json
from simckpt.storage.durable import Disk
from simckpt.storage.session_records import parse_session

_POLL = 0.1  # [s] between two looks at the watchdog, and at whether the recorder's process lives
_RETRY = 0.5  # [s] between two attempts at a disk that refuses
KILLED = "the process ended without closing the recorder"


class Service:
    """Serves one recorder until it closes, or is gone.

    Args:
        channel: to the recorder.
        is_alive: whether the recorder's process is there.
        disk: the system calls, for tests.
    """

    def __init__(self, channel: Channel, is_alive: Callable[[], bool], *, disk: Disk | None = None) -> None:
        self._channel = channel
        self._is_alive = is_alive
        self._disk = disk
        self._buffers: list[Buffer] = []
        self._generation = 0  # of layouts
        self._handled = 0  # the highest number of a part that was taken
        self._events: list[Any] = []
        self._options: dict[int, str] = {}
        self._work: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._sending = threading.Lock()
        self._keeper: Keeper | None = None
        self._is_ring = False
        self._on_error = False
        self._watchdog: Watchdog | None = None
        self._seen: tuple[int, float] = (0, 0.0)
        self._hung = False

    def run(self) -> None:
        """Answers until the end."""
        worker = threading.Thread(target=self._write, name="simckpt recording", daemon=True)
        ended = False
        while not ended:
            select.select([self._channel], [], [], _POLL)
            is_alive = self._is_alive()
            connected = self._channel.take()
            while (received := self._channel.next()) is not None:
                message, payload = received
                if "begin" in message:
                    if not self._begin(message["begin"], payload):
                        return
                    worker.start()
                elif "close" in message:
                    self._end(message["close"]["how"], message["close"]["text"])
                    ended = True
                else:
                    self._take(message, payload)
            if not ended and not (connected and is_alive):
                self._end("killed", KILLED)
                ended = True
            self._watch()
        if worker.ident is not None:
            self._work.put(None)
            worker.join()
        self._send({"closed": True})

    def _begin(self, begin: dict[str, Any], payload: memoryview) -> bool:
        triggers = tuple(trigger_from_json(each) for each in begin["triggers"])
        self._watchdog = next((each for each in triggers if isinstance(each, Watchdog)), None)
        self._is_ring, self._on_error = begin["ring"] is not None, catches_errors(triggers)
        try:
            self._keeper = Keeper(
                Path(begin["root"]),
                parse_session(bytes(payload), "the record of the session"),
                self._warn,
                ring=begin["ring"],
                after=begin["after"],
                triggers=triggers,
                disk=self._disk,
            )
        except StoreError as error:
            self._send({"refused": str(error)})
            return False
        self._send({"ready": True})
        return True

    def _take(self, message: dict[str, Any], payload: memoryview) -> None:
        keeper = self._keeper
        assert keeper is not None
        ((kind, content),) = message.items()
        if kind == "part":
            part = self._copied(self._buffers[content])
            self._send({"free": [self._generation, content]})
            self._put(lambda: keeper.add(part))
        elif kind == "layout":
            layout, self._generation = Layout.from_json(content["tables"]), content["generation"]
            descriptor = self._channel.descriptor()
            try:
                memory = mmap.mmap(descriptor, layout.size * content["buffers"])
            finally:
                os.close(descriptor)
            self._buffers = [layout.buffer(memory, number) for number in range(content["buffers"])]
        elif kind == "event":
            self._events.append(tuple(content))
        elif kind == "options":
            self._options[content[0]] = content[1]
        elif kind == "model":
            fields = unpack(content["form"], payload)
            self._put(lambda: keeper.add_model(content["digest"], fields))
        elif kind == "snapshot":
            facts = {key: content[key] for key in ("row", "order", "monotonic", "wall", "reason")}
            snapshot = Snapshot(unpack(content["form"], payload), models=tuple(content["models"]), **facts)
            self._put(lambda: keeper.add(snapshot))
        elif kind == "lost":
            rows, why = tuple(content[:2]), content[2]
            self._put(lambda: keeper.lost(rows, why))
        else:
            assert kind == "trigger"
            found = Found(**content["found"])
            if not content["error"] or self._on_error:
                self._put(lambda: keeper.trigger(found))

    def _copied(self, buffer: Buffer) -> Part:
        head = buffer.head.tolist()
        counts, firsts = buffer.counts.tolist(), buffer.firsts.tolist()
        spans = {name: (first, first + count) for name, first, count in zip(buffer.tables, firsts, counts, strict=True)}
        tables: dict[str, Any] = {}
        for name, columns in buffer.copied().items():
            # those of links lie in groups
            group, _, inner = name.partition("/")
            if inner:
                tables.setdefault(group, {})[inner] = columns
            else:
                tables[group] = columns
        rows = (head[FIRST_ROW], head[FIRST_ROW] + counts[0])
        part = Part(tables, rows, spans, head[STARTED], max(head[STARTED], head[STOPPED]), self._events, self._options)
        self._handled = max(self._handled, head[SERIAL])
        self._events, self._options = [], {}
        return part

    def _end(self, how: str, text: str) -> None:
        keeper = self._keeper
        if keeper is None:
            return
        left = sorted((int(each.head[SERIAL]), each.number) for each in self._buffers)
        for serial, number in left:
            if serial > self._handled and (self._buffers[number].counts.any() or self._events):
                self._put(functools.partial(keeper.add, self._copied(self._buffers[number])))
        if how == "killed" and self._is_ring:
            now = time.monotonic_ns()
            row = max((int(each.head[FIRST_ROW] + each.counts[0]) for each in self._buffers), default=0)
            self._put(lambda: keeper.trigger(Found(row, now, KILLED)))
        self._put(lambda: keeper.close(how, text))

    def _watch(self) -> None:
        """Triggers once when the loop has not made a step for too long."""
        if self._watchdog is None or not self._buffers:
            return
        done = sum(int(each.head[FIRST_ROW] + each.counts[0]) for each in self._buffers) + self._handled
        now = time.monotonic()
        if done != self._seen[0]:
            self._seen, self._hung = (done, now), False
        elif done and not self._hung and now - self._seen[1] >= self._watchdog.seconds:
            self._hung = True
            row = max(int(each.head[FIRST_ROW] + each.counts[0]) for each in self._buffers)
            found = Found(row, time.monotonic_ns(), f"there was no step for {self._watchdog.seconds:g} s")
            keeper = self._keeper
            assert keeper is not None
            self._put(lambda: keeper.trigger(found))

    def _put(self, work: Callable[[], object]) -> None:
        self._work.put(work)

    def _write(self) -> None:
        keeper = self._keeper
        assert keeper is not None
        while True:
            try:
                work = self._work.get(timeout=_RETRY)
            except queue.Empty:
                keeper.write()
                continue
            if work is None:
                return
            try:
                work()
            except Exception as error:  # the next part may go well; nobody else would tell
                self._warn(f"the recording process failed: {type(error).__name__}: {error}")

    def _warn(self, text: str) -> None:
        self._send({"warning": text})

    def _send(self, message: dict[str, Any]) -> None:
        with self._sending:
            try:
                self._channel.send(message)
            except OSError:  # nobody is there to be told
                return


def main(descriptor: int) -> None:
    """Serves the recorder at the other end of a socket."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    parent = os.getppid()
    channel = Channel(socket.socket(fileno=descriptor))
    Service(channel, lambda: os.getppid() == parent).run()


if __name__ == "__main__":
    main(int(sys.argv[1]))
