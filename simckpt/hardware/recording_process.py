"""The process that writes what a recorder records: it maps the recorder's buffers; the loop never waits for it.

`main` is its end, `python -m simckpt.hardware.recording_process <fd>`; `recording.py` is the other one. One thread
takes messages and copies buffers, so that they are free again at once; another one writes. While more waits for it than
`QUEUED`, buffers are not given back: the recorder then loses what it cannot hand over, and says so. A step that takes
long, or hangs, keeps nothing from the disk: what was whole before it is taken out of the buffer in use. When the
recorder's process is gone, however it ended, what its buffers hold is written as well, up to the last whole row.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import queue
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from simckpt.errors import StoreError
from simckpt.hardware.channel import Channel, unpack
from simckpt.hardware.columns import FIRST_ROW, SERIAL, STARTED, STOPPED, Buffer, Layout, copied_entries
from simckpt.hardware.keeping import Keeper, catches_errors
from simckpt.hardware.ring import Part, Snapshot
from simckpt.hardware.transports import wait_readable
from simckpt.hardware.triggers import Found, Watchdog, trigger_from_json
from simckpt.storage.durable import Disk
from simckpt.storage.session_records import parse_session

QUEUED = 128 << 20  # [bytes] that may wait to be written
_POLL = 0.1  # [s] between two looks at the watchdog, at the recorder's process, and at a part that is late
_LATE = 0.1  # [s] after which a part that the recorder has not handed over is taken
_PROGRESS = 1.0  # [s] between two words to a recorder that waits for the end
_SETTLING = 0.001  # [s] for an entry to arrive whose count has: processors may show the two in either order
_RETRY = 0.5  # [s] between two attempts at a disk that refuses
KILLED = "the process ended without closing the recorder"


class Service:
    """Serves one recorder until it closes, or is gone.

    Args:
        channel: to the recorder.
        is_alive: whether the recorder's process is there.
        disk: the system calls, for tests.
        queued: how much may wait to be written [bytes].
    """

    def __init__(
        self, channel: Channel, is_alive: Callable[[], bool], *, disk: Disk | None = None, queued: int = QUEUED
    ) -> None:
        self._channel = channel
        self._is_alive = is_alive
        self._disk = _Progress(disk or Disk())
        self._buffers: list[Buffer] = []
        self._generation = 0  # of layouts
        self._handled = 0  # the highest serial number of a buffer that was taken
        self._taken = _Taken(0, [], 0, 0)
        self._part_ns = 2**62
        self._events: list[Any] = []
        self._options: dict[int, str] = {}
        self._work: queue.SimpleQueue[tuple[Callable[[], object], int] | None] = queue.SimpleQueue()
        self._limit = queued
        self._queued = 0  # [bytes]
        self._held: list[list[int]] = []  # buffers that are given back later
        self._counting = threading.Lock()
        self._sending = threading.Lock()
        self._keeper: Keeper | None = None
        self._is_ring = False
        self._on_error = False
        self._watchdog: Watchdog | None = None
        self._seen: tuple[int, float] = (0, 0.0)  # rows, and since when there have been so many
        self._hung = False

    def run(self) -> None:
        """Answers until the end."""
        worker = threading.Thread(target=self._write, name="simckpt recording", daemon=True)
        try:
            self._serve(worker)
        finally:
            # a thread that is within h5py when the interpreter ends keeps it from ending
            if worker.ident is not None:
                self._work.put(None)
                self._wait_for(worker)
        self._send({"closed": True})
        # what the recorder has not taken yet goes with this process
        while self._flush() and self._is_alive():
            time.sleep(_POLL / 10)

    def _serve(self, worker: threading.Thread) -> None:
        ended = False
        while not ended:
            wait_readable(self._channel.fileno(), _POLL)
            self._flush()
            is_alive = self._is_alive()
            # looked at first: what belongs to these entries, such as their snapshots, is among the messages then
            there = self._in_use()
            connected = self._channel.take()
            while (received := self._channel.next()) is not None:
                message, payload = received
                if "begin" in message:
                    if not self._begin(message["begin"], payload):
                        return
                    worker.start()
                elif "close" in message:
                    self._end(**message["close"])
                    ended = True
                else:
                    self._take(message, payload)
            if not ended and not (connected and is_alive):
                self._end("killed", KILLED, self._rows())
                ended = True
            if not ended:
                self._watch(there)

    def _begin(self, begin: dict[str, Any], payload: memoryview) -> bool:
        triggers = tuple(trigger_from_json(each) for each in begin["triggers"])
        self._watchdog = next((each for each in triggers if isinstance(each, Watchdog)), None)
        self._is_ring, self._on_error = begin["ring"] is not None, catches_errors(triggers)
        self._part_ns = round(begin["part_seconds"] * 1e9)
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
            buffer = self._buffers[content]
            # one that was interrupted may be sent twice
            if buffer.head[SERIAL] > self._handled:
                self._take_part(buffer, buffer.counts.tolist())
                self._handled = int(buffer.head[SERIAL])
            self._give_back([self._generation, content])
        elif kind == "layout":
            # a handing over that was interrupted has not told of the buffer that was in use
            self._take_left()
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
            if self._queued > self._limit:
                self._put(lambda: keeper.lost_snapshot(snapshot.row, snapshot.models, "the disk is too slow"))
            else:
                self._put(lambda: keeper.add(snapshot), snapshot.nbytes)
        elif kind == "lost":
            rows, why = tuple(content[:2]), content[2]
            self._put(lambda: keeper.lost(rows, why))
        else:
            assert kind == "trigger"
            found = Found(**content["found"])
            if not content["error"] or self._on_error:
                self._put(lambda: keeper.trigger(found))

    def _take_part(self, buffer: Buffer, counts: list[int]) -> None:
        """Takes what is in a buffer, but for what was taken from it before."""
        keeper = self._keeper
        assert keeper is not None
        serial, stopped = int(buffer.head[SERIAL]), int(buffer.head[STOPPED])
        before = self._taken if self._taken.serial == serial else _Taken(serial, [0] * len(counts), 0, 0)
        if counts == before.counts and not self._events:
            return
        tables: dict[str, Any] = {}
        for (name, columns), start, count in zip(buffer.tables.items(), before.counts, counts, strict=True):
            # those of links lie in groups
            group, _, inner = name.partition("/")
            copied = copied_entries(columns, start, count)
            if inner:
                tables.setdefault(group, {})[inner] = copied
            else:
                tables[group] = copied
        spans = {
            name: (first + start, first + count)
            for name, first, start, count in zip(
                buffer.tables, buffer.firsts.tolist(), before.counts, counts, strict=True
            )
        }
        first = int(buffer.head[FIRST_ROW])
        rows = first + before.counts[0], first + counts[0]
        started = before.moment or int(buffer.head[STARTED])
        resets = spans["resets"][1]
        options = {number: text for number, text in self._options.items() if number < resets}
        part = Part(tables, rows, spans, started, max(started, stopped), self._events, options)
        if not _is_whole(buffer, serial, counts):
            return  # the recorder has given it up meanwhile, and tells of that
        self._taken = _Taken(serial, counts, part.stopped, time.monotonic_ns())
        self._events = []
        self._options = {number: text for number, text in self._options.items() if number >= resets}
        self._put(lambda: keeper.add(part), part.nbytes)

    def _give_back(self, buffer: list[int]) -> None:
        """Gives a buffer back, at once or when less waits to be written."""
        with self._counting:
            if self._queued > self._limit:
                self._held.append(buffer)
                return
        self._send({"free": buffer})

    def _in_use(self) -> _InUse | None:
        """Returns what there is in the buffer that the recorder writes into, if no other one is on its way."""
        found = [each for each in self._buffers if each.head[SERIAL] > self._handled]
        if len(found) != 1:
            return None
        return _InUse(found[0], int(found[0].head[SERIAL]), self._generation, found[0].counts.tolist())

    def _take_in_use(self, there: _InUse | None) -> None:
        """Takes what was whole in the buffer in use as a part of its own; what comes there later is the next one."""
        if there is None or there.serial <= self._handled or there.generation != self._generation:
            return
        time.sleep(_SETTLING)
        if _is_whole(there.buffer, there.serial, there.counts):
            self._take_part(there.buffer, there.counts)

    def _wait_for(self, worker: threading.Thread) -> None:
        """Waits until all is written, and tells the recorder meanwhile that it gets on."""
        done = self._disk.done
        while worker.is_alive():
            worker.join(_PROGRESS)
            self._flush()
            if self._disk.done != done:
                done = self._disk.done
                self._send({"progress": True})

    def _end(self, how: str, text: str, row: int) -> None:
        keeper = self._keeper
        if keeper is None:
            return
        self._take_left()
        if how == "killed" and self._is_ring:
            now = time.monotonic_ns()
            self._put(lambda: keeper.trigger(Found(row, now, KILLED)))
        self._put(lambda: keeper.close(how, text, row))

    def _take_left(self) -> None:
        """Takes what is in buffers that were not handed over."""
        for buffer in sorted(self._buffers, key=lambda each: int(each.head[SERIAL])):
            if buffer.head[SERIAL] > self._handled and (buffer.counts.any() or self._events):
                self._take_part(buffer, buffer.counts.tolist())

    def _rows(self) -> int:
        """Returns how many rows there are so far."""
        return max((int(each.head[FIRST_ROW] + each.counts[0]) for each in self._buffers), default=0)

    def _watch(self, there: _InUse | None) -> None:
        """Takes a part that is late, and triggers once when the loop has not made a step for too long."""
        if there is not None:
            # not by what it has: a step that only talks to links, or notes without a step, move no row's end
            since = self._taken.when if self._taken.serial == there.serial else int(there.buffer.head[STARTED])
            if time.monotonic_ns() - since >= self._part_ns + _LATE * 1e9:
                self._take_in_use(there)
        if self._watchdog is None:
            return
        rows, now = self._rows(), time.monotonic()
        if rows != self._seen[0]:
            self._seen, self._hung = (rows, now), False
        elif rows and not self._hung and now - self._seen[1] >= self._watchdog.seconds:
            self._hung = True
            self._take_in_use(there)
            found = Found(rows, time.monotonic_ns(), f"there was no step for {self._watchdog.seconds:g} s")
            keeper = self._keeper
            assert keeper is not None
            self._put(lambda: keeper.trigger(found))

    def _put(self, work: Callable[[], object], nbytes: int = 0) -> None:
        with self._counting:
            self._queued += nbytes
        self._work.put((work, nbytes))

    def _done(self, nbytes: int) -> None:
        """Gives back what was held until so much was written."""
        with self._counting:
            self._queued -= nbytes
            free = self._held if self._queued <= self._limit else []
            if free:
                self._held = []
        for buffer in free:
            self._send({"free": buffer})

    def _write(self) -> None:
        keeper = self._keeper
        assert keeper is not None
        while True:
            found: tuple[Callable[[], object], int] | None = (keeper.write, 0)
            with contextlib.suppress(queue.Empty):
                found = self._work.get(timeout=_RETRY)
            if found is None:
                return
            work, nbytes = found
            try:
                work()
            except Exception as error:  # the next part may go well; nobody else would tell
                self._warn(f"the recording process failed: {type(error).__name__}: {error}")
            del work, found  # and with it what it held
            self._done(nbytes)

    def _warn(self, text: str) -> None:
        self._send({"warning": text})

    def _send(self, message: dict[str, Any]) -> None:
        with self._sending:
            try:
                self._channel.send(message)
            except OSError:  # nobody is there to be told
                return

    def _flush(self) -> bool:
        """Offers what the recorder has not taken yet; returns whether something is left, and somebody there."""
        if self._channel.waiting:
            with self._sending, contextlib.suppress(OSError):
                self._channel.flush()
                return self._channel.waiting > 0
        return False


class _Progress(Disk):
    """A disk that counts what it has done of that which takes long.

    Attributes:
        done: how often.
    """

    def __init__(self, disk: Disk) -> None:
        self._disk = disk
        self.done = 0

    def __getattribute__(self, name: str) -> Any:
        if name in ("_disk", "done"):
            return object.__getattribute__(self, name)
        self.done += 1
        return getattr(self._disk, name)


@dataclass(frozen=True)
class _Taken:
    """What was taken of the buffer in use.

    Attributes:
        serial: of the buffer.
        counts: entries of each table.
        moment: up to which [ns], 0 if nothing was.
        when: it was taken [ns].
    """

    serial: int
    counts: list[int]
    moment: int
    when: int


@dataclass(frozen=True)
class _InUse:
    """The buffer in use, and how many entries it had at a moment."""

    buffer: Buffer
    serial: int
    generation: int
    counts: list[int]


def _is_whole(buffer: Buffer, serial: int, counts: list[int]) -> bool:
    """Returns whether a buffer still holds these entries."""
    there = buffer.counts.tolist()
    return int(buffer.head[SERIAL]) == serial and all(now >= then for now, then in zip(there, counts, strict=True))


def main(descriptor: int) -> None:
    """Serves the recorder at the other end of a socket."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    parent = os.getppid()
    channel = Channel(socket.socket(fileno=descriptor))
    Service(channel, lambda: os.getppid() == parent).run()


if __name__ == "__main__":
    main(int(sys.argv[1]))
