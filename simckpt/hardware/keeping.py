"""What becomes of parts and snapshots on their way to the disk: written at once, or kept in a ring until a trigger.

A disk that refuses is asked again with the next part, and so what is waiting is late and not lost, as long as there is
memory for it. What is lost the session says in an event.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from simckpt import state
from simckpt.errors import CheckpointNotFoundError, ConflictError, StorageError, StoreError
from simckpt.hardware.ring import Part, Ring, Snapshot
from simckpt.hardware.triggers import Found, OnError, OutOfRange, Trigger, Watchdog
from simckpt.state.tree import Encoded
from simckpt.storage import StoreFiles, names
from simckpt.storage.durable import Disk
from simckpt.storage.session_records import SessionRecord
from simckpt.storage.session_writing import SessionWriter, create_session
from simckpt.storage.sessions import session_names

WAITING = 256 << 20  # [bytes] of parts that wait for a disk that refuses
MERGE_AT = 60  # parts: about a minute
_CLOSING = 3  # attempts at writing what is left, when the session ends

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
        self._events = 0
        self._small = 0
        self._troubled = False
        self._until = 0
        self._cause = ""
        self._flushes = 0
        self._row = 0
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
        cause = found.pop(0) if found and self._ring is not None and self._writer is None else None
        if isinstance(item, Part):
            self._row = item.rows[1]
            item.events.extend(_event(each, "trigger") for each in found)
        if self._ring is not None:
            self._ring.add(item)
        if self._writer is not None:
            self._waiting.append(item)
        elif cause is not None:
            self.trigger(cause)
        self.write()
        due = self._ring is not None and isinstance(item, Part) and item.stopped >= self._until
        if due and self._writer is not None and not self._waiting:
            self._end("trigger", self._cause)

    def trigger(self, found: Found) -> None:
        """Has the ring keep what it holds, and what comes for a while; without a ring, or once more, it is noted."""
        if self._ring is None or self._writer is not None:
            self._notes.append(_event(found, "trigger"))
            return
        try:
            self._writer = self._begun()
        except (StoreError, OSError) as error:
            self._trouble(f"the ring could not be kept ({found.reason}): {error}")
            self._writer = None
            return
        self._events, self._small = 0, 0
        self._until = found.monotonic + self._after
        self._cause = found.reason
        self._notes.append(_event(found, "kept"))
        self._waiting.extend(self._ring)
        self.write()

    def note(self, kind: str, text: str, *, row: int | None = None) -> None:
        """Notes an event of the process that records."""
        monotonic, wall = time.monotonic_ns(), time.time_ns()
        self._notes.append((-1, self._row if row is None else row, monotonic, wall, kind, text))

    def lost(self, rows: tuple[int, int], why: str) -> None:
        """Notes that rows will not be in the session, and warns."""
        text = f"rows {rows[0]} to {rows[1] - 1} were lost: {why}"
        self.note("lost", text, row=rows[0])
        self._warn(text)

    def write(self) -> bool:
        """Writes what waits, as much of it as the disk takes; returns whether it took all."""
        while self._waiting and self._writer is not None:
            item = self._waiting[0]
            try:
                self._write_item(self._writer, item)
            except ConflictError as error:
                self._trouble(f"session {self.session!r} goes on elsewhere, and nothing more is recorded here: {error}")
                self._waiting.clear()
                self._writer.release()
                self._writer = None
                return False
            except (StorageError, OSError) as error:
                self._trouble(f"session {self.session!r} cannot be written for the moment: {error}")
                self._make_room()
                return False
            except Exception as error:  # what cannot be written now cannot be later, and others must not wait for it
                self._waiting.popleft()
                self._give_up(item, f"{type(error).__name__}: {error}")
                continue
            self._waiting.popleft()
            self._troubled = False
            self._merge()
        return True

    def close(self, how: str, text: str) -> None:
        """Ends the session, if one is open, after another attempt at what the disk has not taken."""
        if self._ring is None or self._writer is not None:
            self._end(how, text)

    def _end(self, how: str, text: str) -> None:
        if self._writer is None:
            return
        for _ in range(_CLOSING):
            if self.write():
                break
        if self._writer is None:
            return
        for item in self._waiting:
            self._give_up(item, "the disk refused until the end")
        self._waiting.clear()
        try:
            if self._notes:
                self._write_notes(self._writer)
            self._writer.close(how, text)
        except (StoreError, OSError) as error:
            self._warn(f"session {self.session!r} could not be closed, which `simckpt session close` does: {error}")
        finally:
            self._writer.release()
            self._writer = None

    def _write_notes(self, writer: SessionWriter) -> None:
        """Writes what was noted after the last part, in a part without rows."""
        parts = writer.files.parts()
        if not parts:
            return
        last = parts[-1]
        spans = {name: (stop, stop) for name, (_, stop) in last.tables.items() if name != "events"}
        tables = writer.files.read_part(last)
        empty = _emptied({key: value for key, value in tables.items() if key != "events"})
        self._write_part(writer, Part(empty, (last.rows[1], last.rows[1]), spans, last.stopped, last.stopped))

    def _write_item(self, writer: SessionWriter, item: Part | Snapshot) -> None:
        if isinstance(item, Part):
            self._write_part(writer, item)
            return
        for digest in item.models:
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
        events = [*part.events, *self._notes]
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
        self._small += 1

    def _merge(self) -> None:
        if self._writer is not None and self._small >= MERGE_AT and not self._waiting:
            self._small = 0
            with contextlib.suppress(StoreError, OSError):  # at the end once more
                self._writer.merge(fewest=MERGE_AT)

    def _make_room(self) -> None:
        """Lets go of the oldest parts, if more wait than there is memory for."""
        size = sum(item.nbytes for item in self._waiting)
        while size > self._limit:
            item = next((each for each in self._waiting if isinstance(each, Part)), None)
            if item is None:
                return
            self._waiting.remove(item)
            size -= item.nbytes
            self._give_up(item, "the disk has refused for too long")

    def _give_up(self, item: Part | Snapshot, why: str) -> None:
        if isinstance(item, Part):
            self.lost(item.rows, why)
        else:
            self.note("lost", f"the snapshot before row {item.row} was lost: {why}", row=item.row)
            self._warn(f"the snapshot before row {item.row} was lost: {why}")

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
        """Makes the next session of a ring, and returns its writer."""
        store = StoreFiles.open(self._root)
        taken = set(session_names(self._root))
        number = self._flushes + 1
        while (name := f"{self._record.name}-{number}") in taken:
            number += 1
        now, monotonic = time.time(), time.monotonic_ns()
        record = replace(self._record, name=name, id=names.random_id(), created=now, monotonic=monotonic, mode="ring")
        try:
            create_session(store, record, disk=self._disk)
        except CheckpointNotFoundError as error:
            self.note("note", f"the checkpoint that was driving is gone: {error}")
            create_session(store, replace(record, origin=None), disk=self._disk)
        self._flushes = number
        return SessionWriter(self._root, name, disk=self._disk)


def catches_errors(triggers: tuple[Trigger, ...]) -> bool:
    """Returns whether an exception is a cause."""
    return any(isinstance(each, OnError) for each in triggers)


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
        return tuple(cut(each) for each in value) if isinstance(value, tuple) else value[:0]

    return {key: cut(value) for key, value in tree.items()}
