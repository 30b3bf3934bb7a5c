"""The memory that a recorder fills and the recording process maps: one buffer for each part, handed over when full.

A step copies its values into the columns of a buffer. About twice a second a full buffer is handed over by a message of
a few bytes, and another one is taken. The number of rows in a buffer is set last, so that a recorder that is killed
leaves whole rows.
"""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from simckpt.errors import ConfigurationError
from simckpt.hardware import columns
from simckpt.hardware.columns import (
    BOOL,
    COMMON,
    FIRST_ROW,
    FLOAT,
    INT,
    SERIAL,
    STARTED,
    STOPPED,
    Buffer,
    Form,
    Layout,
    Table,
)
from simckpt.hardware.recording_messages import RecordingProcess, warn

if TYPE_CHECKING:
    from simckpt.hardware.link_tables import LinkTables

BUFFERS = 8  # parts that may be on their way; the recording process copies them at once
CHANGES = 16  # of dtypes in one recording; then values are kept in the widest one
PART_BYTES = 8 << 20  # that the rows of a part may have, at least 16 of them
MOST_ROWS = 4096  # of a part


class PartBuffers:
    """Takes rows, resets and what links do into the buffer of the present part.

    One thread at a time works on them, see `LoopThread`.

    Attributes:
        row: the number of the next row.
        order: how many things were recorded so far.
        rows: how many rows the present part has.
        resets: how many resets it has.
        in_step: whether a row has begun.
        place: of it in the present part.
        spoilt: why the row in progress cannot be recorded, or None.
        links: the tables of each link.
        head, counts: of the present buffer; see `Layout`.
        tables: its columns.

    Args:
        process: that writes.
        forms: of "action", "observation", "reset observation" and "signals".
        part_seconds: how long a part lasts [s].
        lost: is told when something was lost that no gap in the rows tells.
    """

    def __init__(
        self, process: RecordingProcess, forms: Mapping[str, Form], part_seconds: float, lost: Callable[[], None]
    ) -> None:
        self.row = self.order = 0
        self.rows = self.resets = self.place = 0
        self.in_step = False
        self.spoilt: str | None = None
        self.links: dict[str, LinkTables] = {}
        self.tables: Mapping[str, Any] = {}
        self._process = process
        self._lost = lost
        self._forms = dict(forms)
        self._settled: set[str] = set()  # forms that are those of a value
        self._skipped = 0
        self._changes = 0
        self._part_ns = round(part_seconds * 1e9)
        self._part_end = 0
        self._serial = self._generation = 0
        self._firsts: dict[str, int] = {}
        self._free: list[int] = []
        self._buffers: list[Buffer] = []
        self._sent: list[int] = []  # how often each buffer was handed over and has not come back
        self._is_handed = False  # whether the present buffer may have been handed over, or is in use by half
        # the last observation lies in a column of this buffer, at a place; or else here
        self._newest: tuple[Any, int] | None = None
        self._observation: Any = None

    def begin(self) -> None:
        """Makes the first buffers; the links are known by now."""
        self._allocate(*self._made())
        self._next_buffer()

    # rows and resets; values whose form is another one than before are made room for

    def put(self, name: str, value: Any) -> None:
        """Copies a value of the row in progress, or of a reset, into its column.

        Args:
            name: of its form.
            value: what the env was given, or gave.

        Raises:
            ConfigurationError: it cannot be recorded; the message begins with what it is.
        """
        column, place = self._column(name)
        if columns.put(column, place, value):
            return
        form = columns.form_of(value, name)
        known = self._forms[name]
        if name in self._settled or self._has_values(name):
            columns.check_shapes(known, form, name)
            self._changes += 1
            if self._changes > CHANGES:
                if columns.put_converted(column, place, value):
                    return
                form = columns.widest(known, form)
        if form == known:
            raise ConfigurationError(f"{name} cannot be recorded: its column of another dtype does not hold it exactly")
        self._forms[name] = form
        self._settled.add(name)
        self.turn(change=True)
        column, place = self._column(name)
        if not columns.put_converted(column, place, value):
            raise ConfigurationError(f"{name} cannot be recorded: no dtype holds it and those before exactly")
        if self._changes == CHANGES:
            text = f"the dtype of the {name} changes again and again: from now on all values have the widest one"
            self.event("note", text)
            warn(f"row {self.row}: {text}; give it one dtype, so that a replay is exact")

    def row_is_whole(self, finished: int) -> None:
        """Counts the row in progress, all of whose values are there."""
        place = self.rows
        self.row_finished[place] = finished
        self.row_row[place] = self.row
        self.head[STOPPED] = finished
        self._newest = self.observation, place
        # from here on it is there, whatever interrupts what follows: see `settle`
        self.rows = place + 1
        self.row += 1
        self.in_step = False
        self.counts[0] = place + 1
        if finished >= self._part_end or self.rows == self._capacity:
            self.turn()

    def skip_row(self, observation: Any) -> None:
        """Passes over the number of a row that cannot be recorded.

        Args:
            observation: a copy of what it gave.
        """
        self.in_step, self.spoilt = False, None
        self.row += 1
        self._newest, self._observation = None, observation
        # a part has no gaps
        if self.rows:
            self.turn()
        # and an entry of the table is passed over as well
        self._skipped += 1
        self.head[FIRST_ROW] = self.row
        self._buffer.firsts[0] += 1

    def settle(self) -> None:
        """Finds out whether the row in progress was taken before it was interrupted."""
        if self.in_step and self.rows > self.place:
            self.row = int(self.head[FIRST_ROW]) + self.rows
            self.in_step = False

    def take_reset(self, begun: tuple[int, int, int], seed: int | None, text: str, observation: Any) -> None:
        """Takes a whole reset.

        Args:
            begun: its order, and when it began by the monotonic and the wall clock.
            seed: that was given.
            text: what else was, see `reset_arguments`.
            observation: that it gave.

        Raises:
            ConfigurationError: the observation cannot be recorded.
        """
        self.put("reset observation", observation)
        table, place = self.tables["resets"], self.resets
        table["order"][place], table["started"][place], table["wall"][place] = begun
        table["row"][place] = self.row
        table["finished"][place] = finished = time.monotonic_ns()
        table["seeded"][place] = seed is not None
        table["seed"][place] = seed if seed is not None and 0 <= seed < 2**63 else -1
        if text:
            self._process.send({"options": [self._firsts["resets"] + place, text]})
        self._newest = table["observation"], place
        self.resets = place + 1
        self.head[STOPPED] = finished
        self.counts[1] = place + 1
        if finished >= self._part_end or self.resets == self._reset_capacity:
            self.turn()

    def newest_observation(self) -> Any:
        """Returns a copy of the last observation, as it was recorded."""
        if self._newest is not None:
            self._observation, self._newest = columns.at(*self._newest), None
        return self._observation

    def event(self, kind: str, text: str, *, row: int | None = None) -> None:
        """Notes an event of this moment, by default before the next row."""
        self.order += 1
        self._process.event(self.order, self.row if row is None else row, kind, text)

    def spoil(self, why: str) -> None:
        """Notes that something was lost of the row in progress, or of what came before the next one."""
        if self.in_step:
            self.spoilt = why
        else:
            self.event("unrecorded", f"before row {self.row}: {why}")
            self._lost()

    # parts

    def turn(self, *, change: bool = False) -> None:
        """Hands over the buffer and takes another one; a row that has begun moves along.

        Args:
            change: whether forms have changed, so that the buffers must be made anew.
        """
        self.newest_observation()
        begun = columns.at(self.tables["rows"], self.rows) if self.in_step else None
        made = self._made() if change else None
        try:
            self._hand_over()
            if made is not None:
                self._allocate(*made)
            if self._free:
                self._next_buffer()
            else:
                self._use(self._buffer)
        except BaseException:
            # an interrupt: what may have been handed over is not written into any longer
            if self._is_handed or made is not None:
                self._allocate(*self._made())
                self._next_buffer()
            raise
        if begun is not None:
            for name, value in begun.items():
                # the column whose form has changed is filled by who has changed it
                columns.put(self.tables["rows"].get(name), 0, value)

    def hand_over_last(self) -> None:
        """Hands over what there is; nothing is taken any longer."""
        self._hand_over(last=True)

    def _hand_over(self, *, last: bool = False) -> None:
        """Gives the buffer to the recording process; if all others are on their way, what it holds is lost."""
        self.counts[0] = self.rows
        counts = self.counts.tolist()
        number = self._buffer.number
        if not any(counts):
            # it is as good as new
            self._free.append(number)
            return
        self._process.listen()
        while self._process.freed:
            generation, back = self._process.freed.pop()
            # buffers of an earlier layout are gone
            if generation == self._generation:
                self._sent[back] -= 1
                if self._sent[back] == 0:
                    self._free.append(back)
        firsts = (self._buffer.firsts + self.counts).tolist()
        self._firsts = dict(zip(self._firsts, firsts, strict=True))
        if self._free or last:
            self._sent[number] += 1
            self._is_handed = True
            self._process.send({"part": number})
            return
        first, why = int(self.head[FIRST_ROW]), "the recording process is too slow"
        if first < self.row:
            self._process.send({"lost": [first, self.row, why]})
            self._lost()
        counts, self.counts[:] = counts[1:], 0
        # a replay passes over lost rows; of what lies beside them it would not know
        if any(counts):
            self.spoil(f"resets or calls of links were lost: {why}")

    def _made(self) -> tuple[Layout, int, mmap.mmap]:
        """Returns buffers for the forms that values have now: their layout, a descriptor, and the memory."""
        layout = Layout(recorded_tables(self._forms, self.links))
        descriptor = os.memfd_create("simckpt recording")
        try:
            os.ftruncate(descriptor, layout.size * BUFFERS)
            return layout, descriptor, mmap.mmap(descriptor, layout.size * BUFFERS)
        except BaseException:
            os.close(descriptor)
            raise

    def _allocate(self, layout: Layout, descriptor: int, memory: mmap.mmap) -> None:
        """Takes new buffers into use, and tells the recording process of them."""
        try:
            self._generation += 1
            message = {"tables": layout.to_json(), "buffers": BUFFERS, "generation": self._generation}
            self._process.send({"layout": message}, descriptors=[descriptor])
        finally:
            os.close(descriptor)
        self._buffers = [layout.buffer(memory, number) for number in range(BUFFERS)]
        self._free = list(range(BUFFERS))[::-1]
        self._sent = [0] * BUFFERS
        self._firsts = {name: self._firsts.get(name, 0) for name in layout.tables}

    def _next_buffer(self) -> None:
        # the one that was in use last: no more memory is touched than is needed
        self._use(self._buffers[self._free.pop()])

    def _use(self, buffer: Buffer) -> None:
        """Goes on in a buffer; the loop writes into its columns directly."""
        now = time.monotonic_ns()
        # until all are in it: links would go on in the one before
        self._is_handed = True
        self._buffer = buffer
        self.head, self.counts, self.tables = buffer.head, buffer.counts, buffer.tables
        self._serial += 1
        buffer.counts[:] = 0
        buffer.firsts[:] = list(self._firsts.values())
        buffer.head[STARTED], buffer.head[STOPPED], buffer.head[FIRST_ROW] = now, now, self.row
        buffer.head[SERIAL] = self._serial
        rows = buffer.tables["rows"]
        self.row_order, self.row_row, self.row_wall = rows["order"], rows["row"], rows["wall"]
        self.row_started, self.row_finished = rows["started"], rows["finished"]
        self.row_reward, self.row_terminated, self.row_truncated = rows["reward"], rows["terminated"], rows["truncated"]
        self.action, self.observation = rows["action"], rows["observation"]
        self._capacity, self._reset_capacity = len(self.row_order), len(buffer.tables["resets"]["order"])
        self.rows = self.resets = self.place = 0
        self._part_end = now + self._part_ns
        for place, link in enumerate(self.links.values()):
            link.use(buffer, 2 + place, 2 + len(self.links) + place)
        self._is_handed = False

    def _has_values(self, name: str) -> bool:
        if name == "reset observation":
            return self._firsts["resets"] + self.resets > 0
        return self._firsts["rows"] + self.rows > self._skipped

    def _column(self, name: str) -> tuple[Any, int]:
        if name == "reset observation":
            return self.tables["resets"]["observation"], self.resets
        return self.tables["rows"].get(name), self.rows


def recorded_tables(forms: Mapping[str, Form], links: Mapping[str, LinkTables]) -> dict[str, Table]:
    """Returns the tables of a buffer: of rows and resets, then of the commands and of the readings of all links.

    Args:
        forms: of "action", "observation", "reset observation" and "signals".
        links: by their names.
    """
    rows = {
        **COMMON,
        **dict.fromkeys(("started", "finished", "wall"), (INT, ())),
        "action": forms["action"],
        "observation": forms["observation"],
        "reward": (FLOAT, ()),
        "terminated": (BOOL, ()),
        "truncated": (BOOL, ()),
    }
    if forms["signals"]:
        rows["signals"] = forms["signals"]
    capacity = max(16, min(MOST_ROWS, PART_BYTES // columns.size_of(rows)))
    resets = {
        **COMMON,
        **dict.fromkeys(("started", "finished", "wall", "seed"), (INT, ())),
        "seeded": (BOOL, ()),
        "observation": forms["reset observation"],
    }
    commands = {f"commands/{name}": Table(link.command_columns, 2 * capacity) for name, link in links.items()}
    readings = {f"readings/{name}": Table(link.reading_columns, 4 * capacity) for name, link in links.items()}
    return {"rows": Table(rows, capacity), "resets": Table(resets, max(4, capacity // 4)), **commands, **readings}
