"""What becomes of parts and snapshots on their way to the disk: written at once, or kept in a ring until a trigger.

A disk that refuses is asked again with the next part, and so what is waiting is late and not lost, as long as there is
memory for it; a ring that could not be kept, too. What is lost the session says in an event.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from simckpt import state
from simckpt.errors import CheckpointNotFoundError, ConflictError, StoreError
from simckpt.hardware.losses import Losses
from simckpt.hardware.ring import Part, Ring, Snapshot
from simckpt.hardware.triggers import Found, OnError, OutOfRange, Trigger, Watchdog
from simckpt.state.tree import Encoded
from simckpt.storage import StoreFiles, names
from simckpt.storage.durable import Disk
from simckpt.storage.session_ending import remove_session
from simckpt.storage.session_records import SessionRecord
from simckpt.storage.session_writing import SessionWriter, create_session
from simckpt.storage.sessions import read_session, session_names

WAITING = 256 << 20  # [bytes] of parts that wait for a disk that refuses
_NOTES = 10_000  # events of parts that were given up, which are kept
_CLOSING = 3  # attempts at writing what is left, when the session ends
_PAUSE = 60  # parts until a merge that the disk has refused is tried again

_THREAD = "thread"  # kind of the event that another thread uses a link, which `session.THREAD` is

Event = tuple[int, int, int, int, str, str]  # order, row, monotonic [ns], wall [ns], kind, text
Warn = Callable[[str], None]


class Keeper:
    """Writes one session after the other, what it is given in the order of coming; raises nothing that a disk says.

    Args:
        root: the store's folder.
        record: of the session; those that a ring keeps get a number behind the name.
        warn: is told, once for each trouble, what went wrong.
        ring: how much to keep in memory [s]; None to write all of it.
        after: how long to go on after a trigger [s].
        triggers: what to look for.
        disk: the system calls, for tests.
        waiting: how much may wait for the disk [bytes].

    Raises:
        StoreError: the session of a recording without a ring cannot be written.
    """

    def __init__(
        self,
        root: Path,
        record: SessionRecord,
        warn: Warn,
        *,
        ring: float | None = None,
        after: float = 0.0,
        triggers: tuple[Trigger, ...] = (),
        disk: Disk | None = None,
        waiting: int = WAITING,
    ) -> None:
        self._root = root
        self._record = record
        self._warn = warn
        self._disk = disk
        self._ring = None if ring is None else Ring(ring)
        self._after = round(after * 1e9)
        self._triggers = triggers
        self._outside: set[int] = set()
        self._names = {link.name: link.reading for link in record.links}
        self._limit = waiting
        self._waiting: deque[Part | Snapshot] = deque()
        self._models: dict[str, Encoded] = {}
        self._notes: list[Event] = []
        self._threads: list[Event] = []  # of the recording, one for each link
        self._losses = Losses(warn)
        self._troubled = False
        self._pause = 0
        self._due: Found | None = None  # a cause for which the ring is to be kept, as soon as the disk lets it
        self._until = 0
        self._is_over = False  # what was to be kept has come
        self._cause = ""
        self._flushes = 0
        self._next: SessionRecord | None = None  # that is to be begun
        self._newest: Part | None = None
        self._first = self._row = 0  # of the rows that the session is about, and the next one
        self._events = 0
        self._writer: SessionWriter | None = None
        if self._ring is None:
            self._writer = SessionWriter(root, record.name, disk=disk)

    @property
    def session(self) -> str | None:
        """The name of the session that is being written, or None."""
        return None if self._writer is None else self._writer.files.record.name

    def add_model(self, digest: str, fields: Encoded) -> None:
        """Takes a model, before the snapshots that refer to it."""
        self._models[digest] = fields

    def add(self, item: Part | Snapshot) -> None:
        """Takes what comes next."""
        found = self._found(item) if isinstance(item, Part) else []
        idle = self._ring is not None and self._writer is None and self._due is None
        cause = found.pop(0) if found and idle else None
        if isinstance(item, Part):
            self._row = max(self._row, item.rows[1])
            self._newest = item
            self._threads += [each for each in item.events if each[4] == _THREAD]
            item.events.extend(_event(each, "trigger") for each in found)
        if self._ring is not None and self._due is None:
            self._ring.add(item)
        elif self._ring is not None:
            for gone in self._ring.hold(item, self._limit):
                self._give_up(gone, "the ring could not be kept for too long")
        if self._writer is not None:
            self._waiting.append(item)
        elif cause is not None:
            self.trigger(cause)
        if isinstance(item, Snapshot):
            self._forget_models(item.models)
        self.write()
        if self._ring is not None and self._writer is not None and isinstance(item, Part):
            self._is_over = self._is_over or item.stopped >= self._until
            self._end_if_over()

    def trigger(self, found: Found) -> None:
        """Has the ring keep what it holds, and what comes for a while; without a ring, or once more, it is noted."""
        if self._ring is None or self._writer is not None or self._due is not None:
            self._notes.append(_event(found, "trigger"))
            return
        self._due, self._until, self._cause = found, found.monotonic + self._after, found.reason
        self._first = min((item.rows[0] for item in self._ring if isinstance(item, Part)), default=self._row)
        self.write()

    def note(self, kind: str, text: str, *, row: int | None = None) -> None:
        """Notes an event of the process that records."""
        monotonic, wall = time.monotonic_ns(), time.time_ns()
        self._notes.append((-1, self._row if row is None else row, monotonic, wall, kind, text))

    def lost(self, rows: tuple[int, int], why: str) -> None:
        """Takes note of rows that were never given to this."""
        first = max(rows[0], self._row)
        self._row = max(self._row, rows[1])
        if first < rows[1]:
            self._losses.add((first, rows[1]), why)

    def lost_snapshot(self, row: int, models: Sequence[str], why: str) -> None:
        """Takes note of a snapshot that was never given to this."""
        self._forget_models(models)
        self._lose_snapshot(row, why)

    def write(self) -> bool:
        """Writes what waits, as much of it as the disk takes; returns whether it took all."""
        if self._due is not None:
            self._keep(self._due)
        if self._writer is not None:
            self._writer.beat()
        while self._waiting and self._writer is not None:
            item = self._waiting[0]
            try:
                self._write_item(self._writer, item)
            except ConflictError as error:
                self._warn(f"session {self.session!r} goes on elsewhere, and nothing more is recorded here: {error}")
                self._waiting.clear()
                self._writer.release()
                self._writer = None
                return False
            except (StoreError, OSError, MemoryError) as error:
                self._trouble(f"session {self.session!r} cannot be written for the moment: {_why(error)}")
                self._make_room()
                return False
            except Exception as error:  # what cannot be written now cannot be later, and others must not wait for it
                self._waiting.popleft()
                self._give_up(item, f"{type(error).__name__}: {error}")
                continue
            self._waiting.popleft()
            self._troubled = False
            self._merge()
        self._end_if_over()
        return self._due is None

    def close(self, how: str, text: str, row: int | None = None) -> None:
        """Ends the session, if one is open, after another attempt at what the disk has not taken.

        Args:
            how: it ended.
            text: for people.
            row: one behind the last row that was stepped; by default behind the last one that was given to this.
        """
        if row is not None and (self._ring is None or self._writer is not None or self._due is not None):
            self.lost((self._row, row), "they never reached the recording process")
        self._end(how, text)
        for lost in self._losses.summary():
            self._warn(lost)

    def _keep(self, found: Found) -> None:
        """Begins to write what the ring holds."""
        assert self._ring is not None
        try:
            self._writer = self._begun()
        except (StoreError, OSError) as error:
            self._trouble(f"the ring cannot be kept for the moment ({found.reason}): {error}")
            return
        self._due, self._next, self._events = None, None, 0
        self._troubled = self._is_over = False
        # what happened before the ring's first row is no part of it
        self._notes = [each for each in self._notes if each[1] >= self._first]
        self._losses.fresh = [each for each in self._losses.fresh if each.rows[1] > self._first]
        self._notes.append(_event(found, "kept"))
        # but for what goes on: no replay of this session repeats it either
        there = [each for item in self._ring if isinstance(item, Part) for each in item.events] + self._notes
        self._notes += [
            (-1, self._first, found.monotonic, time.time_ns(), kind, text)
            for *when, kind, text in self._threads
            if (*when, kind, text) not in there
        ]
        self._waiting.extend(self._ring)

    def _end_if_over(self) -> None:
        if self._is_over and self._writer is not None and not self._waiting:
            try:
                self._close(self._writer, "trigger", self._cause)
            except (StoreError, OSError) as error:
                self._trouble(f"session {self.session!r} cannot be closed for the moment: {error}")

    def _end(self, how: str, text: str) -> None:
        """Writes and closes what there is, or tells what the disk has refused until now."""
        for _ in range(_CLOSING):
            if self.write():
                break
        if self._due is not None:
            self._warn(f"the ring was not kept ({self._due.reason}): the disk refused until the end")
            if self._next is not None:
                with contextlib.suppress(StoreError, OSError):
                    # an attempt may have made it; one of that name may be another recorder's as well
                    if read_session(self._root, self._next.name).id == self._next.id:
                        remove_session(self._root, self._next.name, disk=self._disk)
            self._due = self._next = None
        for item in self._waiting:
            self._give_up(item, "the disk refused until the end")
        self._waiting.clear()
        if self._is_over:
            how, text = "trigger", self._cause
        for left in reversed(range(_CLOSING)):
            writer = self._writer
            if writer is None:
                return
            try:
                self._close(writer, how, text)
            except (StoreError, OSError) as error:
                if left:
                    continue
                told = f"session {self.session!r} could not be closed, which `simckpt session close` does: {error}"
                self._warn(told)
                writer.release()
                self._writer = None

    def _close(self, writer: SessionWriter, how: str, text: str) -> None:
        untold = self._write_notes(writer)
        text = "; ".join([text, *untold] if text else untold)
        writer.close(how, text, rows=(min(self._first, self._row), self._row))
        writer.release()
        self._writer, self._is_over = None, False

    def _write_notes(self, writer: SessionWriter) -> list[str]:
        """Writes what was noted after the last part, in a part without rows; returns what it could not write."""
        told = [text for _, _, _, _, _, text in [*self._lost(), *self._notes]]
        if not told:
            return []
        newest = self._newest
        if newest is None:
            return told
        spans = {name: (stop, stop) for name, (_, stop) in newest.spans.items()}
        part = Part(_emptied(newest.tables), (self._row, self._row), spans, newest.stopped, newest.stopped)
        try:
            self._write_part(writer, part)
        except (StoreError, OSError):
            return told
        return []

    def _lost(self) -> list[Event]:
        return [(-1, each.rows[0], each.monotonic, each.wall, "lost", each.text) for each in self._losses.fresh]

    def _write_item(self, writer: SessionWriter, item: Part | Snapshot) -> None:
        if isinstance(item, Part):
            self._write_part(writer, item)
            return
        for digest in item.models:
            if digest not in writer.models:
                writer.write_model(digest, self._models[digest])
        writer.write_snapshot(
            item.state,
            row=item.row,
            order=item.order,
            monotonic=item.monotonic,
            wall=item.wall,
            reason=item.reason,
            models=item.models,
        )

    def _write_part(self, writer: SessionWriter, part: Part) -> None:
        events = [*part.events, *self._notes, *self._lost()]
        tables = {**part.tables, "events": _events_table(events)}
        if "resets" in tables:
            first, stop = part.spans["resets"]
            options = [part.options.get(number, "") for number in range(first, stop)]
            tables["resets"] = {**tables["resets"], "options": np.array(options, dtype=str if options else "U1")}
        spans = {**part.spans, "events": (self._events, self._events + len(events))}
        encoded = state.encode(tables)
        writer.write_part(encoded, rows=part.rows, spans=spans, started=part.started, stopped=part.stopped)
        self._events += len(events)
        self._notes.clear()
        self._losses.fresh.clear()

    def _merge(self) -> None:
        if self._writer is None or self._waiting:
            return
        if self._pause:
            self._pause -= 1
            return
        try:
            self._writer.merge()
        except (StoreError, OSError):  # many small parts are as good
            self._pause = _PAUSE

    def _make_room(self) -> None:
        """Lets go of what came first, if more waits than there is memory for."""
        size = sum(item.nbytes for item in self._waiting)
        # the very first may be on the disk by half, and is tried again
        while size > self._limit and len(self._waiting) > 1:
            item = self._waiting[1]
            del self._waiting[1]
            size -= item.nbytes
            self._give_up(item, "the disk has refused for too long")

    def _give_up(self, item: Part | Snapshot, why: str) -> None:
        if isinstance(item, Part):
            self._notes = [*self._notes, *item.events][-_NOTES:]
            self._losses.add(item.rows, why)
        else:
            self._lose_snapshot(item.row, why)

    def _lose_snapshot(self, row: int, why: str) -> None:
        self.note("lost", f"the snapshot before row {row} was lost: {why}", row=row)
        self._losses.add_snapshot(row, why)

    def _forget_models(self, needed: Sequence[str]) -> None:
        """Lets go of models that no snapshot needs any more which may be written."""
        held = {*needed}
        for item in [*self._waiting, *(self._ring or ())]:
            if isinstance(item, Snapshot):
                held.update(item.models)
        self._models = {digest: fields for digest, fields in self._models.items() if digest in held}

    def _trouble(self, text: str) -> None:
        """Warns, but not again while the same trouble lasts."""
        if not self._troubled:
            self._warn(text)
        self._troubled = True

    def _found(self, part: Part) -> list[Found]:
        """Returns which triggers have found a cause, each once for as long as the cause lasts."""
        found = []
        for number, trigger in enumerate(self._triggers):
            if isinstance(trigger, Watchdog):
                continue
            one = (
                trigger.find(part.tables, self._names) if isinstance(trigger, OutOfRange) else trigger.find(part.tables)
            )
            if one is None:
                self._outside.discard(number)
            elif number not in self._outside:
                self._outside.add(number)
                found.append(one)
        return sorted(found, key=lambda each: each.monotonic)

    def _begun(self) -> SessionWriter:
        """Makes the next session of a ring, unless an earlier attempt has, and returns its writer."""
        while True:
            record = self._next = self._next or self._next_record()
            try:
                self._create(record)
                return SessionWriter(self._root, record.name, disk=self._disk)
            except ConflictError:
                # another recorder of that base name was quicker, and so the next number is tried; or else the
                # checkpoint that was driving is just being pruned
                self._next = None
                if record.name not in session_names(self._root):
                    raise

    def _next_record(self) -> SessionRecord:
        taken = set(session_names(self._root))
        self._flushes += 1
        while (name := f"{self._record.name}-{self._flushes}") in taken:
            self._flushes += 1
        now, monotonic = time.time(), time.monotonic_ns()
        return replace(self._record, name=name, id=names.random_id(), created=now, monotonic=monotonic)

    def _create(self, record: SessionRecord) -> None:
        store = StoreFiles.open(self._root)
        try:
            create_session(store, record, disk=self._disk)
        except CheckpointNotFoundError as error:
            self.note("note", f"the checkpoint that was driving is gone: {error}")
            self._next = replace(record, origin=None)
            create_session(store, self._next, disk=self._disk)


def catches_errors(triggers: tuple[Trigger, ...]) -> bool:
    """Returns whether an exception is a cause."""
    return any(isinstance(each, OnError) for each in triggers)


def _why(error: BaseException) -> str:
    return f"out of memory {error}".strip() if isinstance(error, MemoryError) else str(error)


def _event(found: Found, kind: str) -> Event:
    return -1, found.row, found.monotonic, time.time_ns(), kind, found.reason


def _events_table(events: list[Event]) -> dict[str, Any]:
    columns = list(zip(*sorted(events, key=lambda each: each[2]), strict=True)) or [()] * 6
    keys = ("order", "row", "monotonic", "wall", "kind", "text")
    texts = {"kind": columns[4], "text": tuple(text[:2000] for text in columns[5])}
    numbers = {key: np.array(columns[place], np.int64) for place, key in enumerate(keys[:4])}
    return {**numbers, **{key: np.array(value, dtype=str if value else "U1") for key, value in texts.items()}}


def _emptied(tree: Mapping[str, Any]) -> dict[str, Any]:
    def cut(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: cut(each) for key, each in value.items()}
        return tuple(cut(each) for each in value) if isinstance(value, tuple) else value[:0].copy()

    return {key: cut(value) for key, value in tree.items()}
