"""The recorder's end of a recording: what the loop's thread does at each step, and nothing that could keep it waiting.

A step copies its values into memory that the recording process maps. About once a second a full buffer is handed over
by a message of a few bytes, and another one is taken. The number of rows in a buffer is set last, so that a recorder
that is killed leaves whole rows.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import select
import time
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from simckpt import state
from simckpt.errors import ConfigurationError, RecordingWarning, SimckptError, StorageError
from simckpt.hardware import columns
from simckpt.hardware.channel import pack
from simckpt.hardware.columns import FIRST_ROW, SERIAL, STARTED, STOPPED, Buffer, Form, Layout
from simckpt.hardware.link_tables import LinkTables, recorded_tables
from simckpt.hardware.recording_child import Child
from simckpt.hardware.session import UNKNOWN_OPTIONS
from simckpt.hardware.triggers import Trigger, trigger_to_json
from simckpt.sim import EnvHandle
from simckpt.storage.session_records import SessionRecord

if TYPE_CHECKING:
    from simckpt.hardware.link import Link

BUFFERS = 4  # parts that may be on their way; the recording process copies them at once
OUTBOX = 64 << 20  # [bytes] that may wait for the recording process
_STARTING = 60.0  # [s] for the recording process to begin
_TEXT = 2000  # [characters] of an event

Signals = Mapping[str, Callable[[Any, Mapping[str, Any]], Any]]


@dataclass(frozen=True)
class Settings:
    """How a recorder records; see `Recorder`."""

    snapshot_every: float | None = 10.0
    part_seconds: float = 1.0
    ring: float | None = None
    after: float = 0.0
    triggers: tuple[Trigger, ...] = ()


class Recording:
    """One recording; a resource for those who capture the env that it belongs to.

    Attributes:
        row: the number of the next row.
        order: how many things were recorded so far.
        active: whether it still records.
        root: the store's folder.
        name: of the session.
        at_exit: closes it when the program ends.

    Args:
        env: what is recorded, the env inside the recorder.
        root: the store's folder.
        record: of the session.
        settings: see there.
        signals: {name: what returns it, given the env and the step's info}.
        links: of the env.

    Raises:
        UnsupportedStateError: the env cannot be captured.
        ConfigurationError: its observations or actions have no fixed size.
        StoreError: the session cannot be written.
    """

    def __init__(
        self,
        env: Any,
        root: Path,
        record: SessionRecord,
        settings: Settings,
        *,
        signals: Signals,
        links: Mapping[str, Link],
    ) -> None:
        self.root, self.name = root, record.name
        self.row = 0
        self.active = True
        self.at_exit: weakref.finalize[Any, Any] | None = None
        self._env = env
        self._settings = settings
        self._signals = dict(signals)
        self._handle = None if settings.snapshot_every is None else EnvHandle(env)
        self._part_ns = round(settings.part_seconds * 1e9)
        self._snapshot_ns = 0 if settings.snapshot_every is None else round(settings.snapshot_every * 1e9)
        self._snapshot_due = 0 if self._handle is not None else 2**63 - 1
        self._snapshot_reason = "start"
        self._sent_models: set[str] = set()
        self._observation: Any = None
        self.order = 0
        self._serial = 0
        self._generation = 0
        self._in_step = False
        self._rows = self._resets = 0
        self._part_end = 0
        self._columns: dict[str, Form] = {
            "action": columns.form_of_space(env.action_space, "the action"),
            "observation": columns.form_of_space(env.observation_space, "the observation"),
            "signals": {},
        }
        self._links = {name: LinkTables(self, name, link) for name, link in links.items()}
        self._firsts: dict[str, int] = {}
        self._free: list[int] = []
        self._memory: mmap.mmap | None = None
        self._child = Child()
        self._channel = self._child.channel
        try:
            self._begin(root, record)
            self._allocate()
            self._next_buffer()
        except BaseException:
            self.active = False
            self._child.end()
            raise
        for link_tables in self._links.values():
            link_tables.attach()
        _recordings.add(self)

    # what the loop's thread does at each step

    def begin(self, action: Any) -> None:
        """Notes that a step begins."""
        now = time.monotonic_ns()
        if now >= self._snapshot_due:
            self.snapshot(self._snapshot_reason)
        if self._channel.waiting:
            self._flush()
        if not columns.put(self._action, self._rows, action):
            self._change({"action": columns.form_of(action, "the action")})
            columns.put(self._action, self._rows, action)
        self.order += 1
        place = self._rows
        self._row_order[place] = self.order
        self._row_wall[place] = time.time_ns()
        self._in_step = True
        self._row_started[place] = time.monotonic_ns()

    def end(self, result: tuple[Any, Any, bool, bool, dict[str, Any]]) -> None:
        """Takes the row that is complete now."""
        finished = time.monotonic_ns()
        observation, reward, terminated, truncated, info = result
        if not columns.put(self._observations, self._rows, observation):
            self._change({"observation": columns.form_of(observation, "the observation")})
            columns.put(self._observations, self._rows, observation)
        if self._signals:
            self._put_signals(info)
        place = self._rows
        self._row_finished[place] = finished
        self._row_reward[place] = reward
        self._row_terminated[place] = terminated
        self._row_truncated[place] = truncated
        self._row_row[place] = self.row
        self._observation = observation
        self._in_step = False
        self.row += 1
        self._rows = place + 1
        self._head[STOPPED] = finished
        self._counts[0] = place + 1
        if finished >= self._part_end or self._rows == self._capacity:
            self.turn()

    def failed(self, error: BaseException, where: str) -> None:
        """Notes that `step` or `reset` has raised, and hands over what there is."""
        self._in_step = False
        reason = f"{where} raised {type(error).__name__}: {error}"
        self._event("error", reason)
        self.turn()
        self.want_snapshot("error")  # what has become of the env is not known: a replay goes on from there
        self._trigger(reason, error=isinstance(error, Exception))

    def begin_reset(self, seed: int | None, options: dict[str, Any] | None) -> tuple[int, int, int]:
        """Returns what `end_reset` needs."""
        if options is not None:
            self._send({"options": [self._firsts["resets"] + self._resets, _options_text(options)]})
        self.order += 1
        return self.order, time.monotonic_ns(), time.time_ns()

    def end_reset(self, begun: tuple[int, int, int], seed: int | None, observation: Any) -> None:
        """Takes a reset that is complete now."""
        if not columns.put(self._reset_observations, self._resets, observation):
            self._change({"observation": columns.form_of(observation, "the observation")})
            columns.put(self._reset_observations, self._resets, observation)
        table, place = self._reset_columns, self._resets
        table["order"][place], table["started"][place], table["wall"][place] = begun
        table["row"][place] = self.row
        table["finished"][place] = finished = time.monotonic_ns()
        table["seeded"][place] = seed is not None
        table["seed"][place] = -1 if seed is None or seed >= 2**63 else seed
        self._observation = observation
        self._resets = place + 1
        self._head[STOPPED] = finished
        self._counts[1] = place + 1
        if finished >= self._part_end or self._resets == self._reset_capacity:
            self.turn()

    def snapshot(self, reason: str) -> None:
        """Captures the env and sends that on its way; what cannot be captured is warned of, and noted."""
        if self._handle is None:
            raise ConfigurationError(
                "this recorder takes no snapshots: snapshot_every is None", keys=["snapshot_every"]
            )
        if not self.active:
            return
        now, wall = time.monotonic_ns(), time.time_ns()
        self._snapshot_due, self._snapshot_reason = now + self._snapshot_ns, "interval"
        self.order += 1
        try:
            captured = self._handle.capture()
            models = self._handle.models
            encoded = pack(state.encode({"env": captured, "observation": self._observation}))
        except SimckptError as error:
            self._warn(f"no snapshot before row {self.row}: {error}")
            self._event("lost", f"no snapshot: {error}")
            return
        if self._channel.waiting > OUTBOX:
            self._warn(f"no snapshot before row {self.row}: the recording process is too slow")
            self._event("lost", "no snapshot: the recording process is too slow")
            return
        for digest in models.keys() - self._sent_models:
            fields = pack(state.encode(models[digest]))
            self._send({"model": {"digest": digest, "form": fields.form}}, fields.parts)
            self._sent_models.add(digest)
        message = {
            "row": self.row,
            "order": self.order,
            "monotonic": now,
            "wall": wall,
            "reason": reason,
            "models": sorted(models),
            "form": encoded.form,
        }
        self._send({"snapshot": message}, encoded.parts)

    def want_snapshot(self, reason: str) -> None:
        """Has the next step begin with a snapshot."""
        if self._handle is not None:
            self._snapshot_due, self._snapshot_reason = 0, reason

    def note(self, kind: str, text: str) -> None:
        """Notes an event."""
        if self.active:
            self._event(kind, text)

    def trigger(self, reason: str) -> None:
        """Hands over what there is, and has a ring keep it."""
        if self.active:
            self.turn()
            self._trigger(reason, error=False)

    def close(self, how: str, text: str) -> None:
        """Ends the recording, and waits until all of it is on the disk."""
        if self.at_exit is not None:
            self.at_exit.detach()
        self._detach()
        try:
            if self.active:
                self._hand_over(last=True)
                self._channel.send({"close": {"how": how, "text": text[:_TEXT]}})
                self._wait_for("closed", None)
        except OSError as error:
            self._warn(f"the recording process ended before the session was closed: {error}")
        finally:
            self.active = False
            self._child.end()

    def abandon(self) -> None:
        """Leaves the recording to the process that this one was forked from."""
        self.active = False
        self._detach()
        self._channel.close()

    # buffers

    def _begin(self, root: Path, record: SessionRecord) -> None:
        begin = {
            "root": str(root),
            "ring": self._settings.ring,
            "after": self._settings.after,
            "triggers": [trigger_to_json(each) for each in self._settings.triggers],
        }
        try:
            self._channel.send({"begin": begin}, [record.to_bytes()])
            answer = self._wait_for("ready", _STARTING)
        except OSError as error:
            raise StorageError(f"the recording process could not be started: {error}") from error
        if "refused" in answer:
            raise StorageError(f"session {record.name!r} cannot be recorded: {answer['refused']}")

    def _wait_for(self, wanted: str, seconds: float | None) -> dict[str, Any]:
        """Returns the message of this kind, or one that refuses; what comes before it is dealt with."""
        deadline = None if seconds is None else time.monotonic() + seconds
        while True:
            while (found := self._channel.next()) is not None:
                message, _ = found
                if wanted in message or "refused" in message:
                    return message
                self._received(message)
            left = 1.0 if deadline is None else deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError(f"no answer within {seconds:g} s")
            self._channel.flush()
            select.select([self._channel], [], [], min(left, 1.0) if not self._channel.waiting else 0.01)
            if not self._channel.take():
                if (found := self._channel.next()) is not None and wanted in found[0]:
                    return found[0]
                raise ConnectionResetError(f"it ended (exit code {self._child.process.poll()})")

    def _allocate(self) -> None:
        """Makes buffers for the forms that values have now, and tells the recording process of them."""
        layout = Layout(recorded_tables(self._columns, self._links))
        descriptor = os.memfd_create("simckpt recording")
        try:
            os.ftruncate(descriptor, layout.size * BUFFERS)
            self._memory = mmap.mmap(descriptor, layout.size * BUFFERS)
            self._generation += 1
            message = {"tables": layout.to_json(), "buffers": BUFFERS, "generation": self._generation}
            # a copy of the descriptor stays open until the message has left
            self._send({"layout": message}, descriptors=[self._child.kept(descriptor)])
        finally:
            os.close(descriptor)
        self._buffers = [layout.buffer(self._memory, number) for number in range(BUFFERS)]
        self._free = list(range(BUFFERS))
        self._firsts = {name: self._firsts.get(name, 0) for name in layout.tables}

    def _next_buffer(self) -> None:
        """Takes a free buffer; the loop writes into its columns directly."""
        self._use(self._buffers[self._free.pop(0)])

    def _use(self, buffer: Buffer) -> None:
        now = time.monotonic_ns()
        self._buffer = buffer
        self._head, self._counts = buffer.head, buffer.counts
        self._serial += 1
        buffer.counts[:] = 0
        buffer.firsts[:] = list(self._firsts.values())
        buffer.head[STARTED], buffer.head[STOPPED], buffer.head[FIRST_ROW] = now, now, self.row
        buffer.head[SERIAL] = self._serial
        rows = buffer.tables["rows"]
        self._row_order, self._row_row = rows["order"], rows["row"]
        self._row_started, self._row_finished, self._row_wall = rows["started"], rows["finished"], rows["wall"]
        self._row_reward, self._row_terminated, self._row_truncated = (
            rows["reward"],
            rows["terminated"],
            rows["truncated"],
        )
        self._action, self._observations = rows["action"], rows["observation"]
        self._signal_columns = rows.get("signals", {})
        self._reset_columns = buffer.tables["resets"]
        self._reset_observations = self._reset_columns["observation"]
        self._capacity, self._reset_capacity = len(self._row_order), len(self._reset_columns["order"])
        self._rows = self._resets = 0
        self._part_end = now + self._part_ns
        for place, link in enumerate(self._links.values()):
            link.use(buffer, 2 + place, 2 + len(self._links) + place)

    def turn(self, *, change: bool = False) -> None:
        """Hands over the buffer and takes another one; a row that has begun moves along."""
        begun = None
        if self._in_step:
            place = self._rows
            begun = (
                columns.at(self._action, place),
                self._row_order[place],
                self._row_started[place],
                self._row_wall[place],
            )
        self._hand_over()
        if change:
            self._allocate()
        if self._free:
            self._next_buffer()
        else:
            self._use(self._buffer)
        if begun is not None:
            columns.put(self._action, 0, begun[0])
            self._row_order[0], self._row_started[0], self._row_wall[0] = begun[1:]

    def _hand_over(self, *, last: bool = False) -> None:
        """Gives the buffer to the recording process; if all others are on their way, its rows are lost.

        Args:
            last: whether the loop needs no other buffer.
        """
        counts = self._counts.tolist()
        if not any(counts):
            # it is as good as new
            self._free.insert(0, self._buffer.number)
            return
        self._listen()
        for name, count in zip(self._firsts, counts, strict=True):
            self._firsts[name] += count
        if not self._free and not last:
            first = int(self._head[FIRST_ROW])
            self._send({"lost": [first, self.row, "the recording process is too slow"]})
            return
        self._send({"part": self._buffer.number})

    def _change(self, forms: Mapping[str, Form]) -> None:
        """Goes on with other forms of values."""
        self._columns.update(forms)
        self.turn(change=True)

    def _put_signals(self, info: Mapping[str, Any]) -> None:
        values = {name: read(self._env, info) for name, read in self._signals.items()}
        if not columns.put(self._signal_columns, self._rows, values):
            observation = columns.at(self._observations, self._rows)
            self._change({"signals": columns.form_of(values, "a signal")})
            columns.put(self._signal_columns, self._rows, values)
            columns.put(self._observations, self._rows, observation)

    # messages

    def _event(self, kind: str, text: str) -> None:
        self.order += 1
        content = [self.order, self.row, time.monotonic_ns(), time.time_ns(), kind, text[:_TEXT]]
        self._send({"event": content})

    def _trigger(self, reason: str, *, error: bool) -> None:
        found = {"row": self.row, "monotonic": time.monotonic_ns(), "reason": reason[:_TEXT]}
        self._send({"trigger": {"found": found, "error": error}})

    def _send(self, message: dict[str, Any], parts: Sequence[Any] = (), *, descriptors: Sequence[int] = ()) -> None:
        if self.active:
            try:
                self._channel.send(message, parts, descriptors=descriptors)
            except OSError as error:
                self._writer_gone(error)

    def _flush(self) -> None:
        try:
            self._channel.flush()
        except OSError as error:
            self._writer_gone(error)

    def _listen(self) -> None:
        """Hears what the recording process has to say, without waiting."""
        if not self._channel.take():
            self._writer_gone(ConnectionResetError(f"exit code {self._child.process.poll()}"))
        while (found := self._channel.next()) is not None:
            self._received(found[0])

    def _received(self, message: dict[str, Any]) -> None:
        if "free" in message:
            generation, number = message["free"]
            # buffers of an earlier layout are gone
            if generation == self._generation:
                self._free.append(number)
        elif "warning" in message:
            self._warn(message["warning"])

    def _writer_gone(self, error: BaseException) -> None:
        if self.active:
            self.active = False
            self._detach()
            self._warn(f"the recording process is gone, and nothing more is recorded from row {self.row} on: {error}")

    def _warn(self, text: str) -> None:
        warnings.warn(text, RecordingWarning, stacklevel=5)

    def _detach(self) -> None:
        for link in self._links.values():
            link.detach()


_recordings: weakref.WeakSet[Recording] = weakref.WeakSet()


def _abandon_after_fork() -> None:
    for recording in list(_recordings):
        with contextlib.suppress(Exception):
            recording.abandon()
    _recordings.clear()


os.register_at_fork(after_in_child=_abandon_after_fork)


def _options_text(options: Any) -> str:
    """Returns the options of a reset as JSON, if they come back from it as they were."""
    with contextlib.suppress(TypeError, ValueError):
        text = json.dumps(options)
        if json.loads(text) == options:
            return text
    return UNKNOWN_OPTIONS
