"""What a recorder hears of a link, commands and looks for readings, as entries of two tables."""

from __future__ import annotations

from collections.abc import Callable
from threading import get_ident
from typing import TYPE_CHECKING, Any

import numpy as np

from simckpt.hardware import all_links
from simckpt.hardware.columns import BOOL, COMMON, FLOAT, INT, Buffer, Form
from simckpt.hardware.recording_messages import warn
from simckpt.hardware.session import NOTHING, READING, TIME

if TYPE_CHECKING:
    from simckpt.hardware.link import Link, Reading
    from simckpt.hardware.loop_thread import LoopThread
    from simckpt.hardware.part_buffers import PartBuffers


class LinkTables:
    """Writes what a link does into its two tables; the link's observer.

    What another thread than the loop's does with the link, or a signal handler while the recorder is at work, is
    written as soon as no row is in progress, with its own times. The session says so, for a replay cannot repeat when
    that thread had its readings.

    Args:
        buffers: of the recording.
        loop: the thread that may write into them.
        name: of the link.
        link: that it hears of.
    """

    def __init__(self, buffers: PartBuffers, loop: LoopThread, name: str, link: Link) -> None:
        self.command_columns: dict[str, Form] = {
            **COMMON,
            "sequence": (np.dtype(np.uint64), ()),
            "monotonic": (INT, ()),
            "wall": (INT, ()),
            "values": (FLOAT, (len(link.command),)),
        }
        self.reading_columns: dict[str, Form] = {
            **COMMON,
            "kind": (np.dtype(np.uint8), ()),
            "sequence": (np.dtype(np.uint64), ()),
            "device_time": (INT, ()),
            "received": (INT, ()),
            "wall": (INT, ()),
            "late": (BOOL, ()),
            "values": (FLOAT, (len(link.reading),)),
        }
        self._buffers = buffers
        self._loop = loop
        self._link = link
        self._name = name
        self._before: Any = None
        self._told = False
        self._asked = self._answered = 0  # calls that wait for the loop, each counted by one side alone

    def attach(self) -> None:
        """Has the link tell of everything; another observer is told as well."""
        self._before = self._link.observer
        self._link.observer = self

    def detach(self) -> None:
        """Leaves the link as it was."""
        if self._link.observer is self:
            self._link.observer = self._before

    def use(self, buffer: Buffer, commands: int, readings: int) -> None:
        """Goes on in another buffer."""
        self._commands, self._readings = (
            buffer.tables[f"commands/{self._name}"],
            buffer.tables[f"readings/{self._name}"],
        )
        self._counts, self._command_place, self._reading_place = buffer.counts, commands, readings
        self._command_count = self._reading_count = 0
        self._command_capacity, self._reading_capacity = len(self._commands["row"]), len(self._readings["row"])

    def sent(self, link: Link, sequence: int, values: Any, monotonic: int, wall: int) -> None:
        """Takes a command."""
        loop = self._loop
        # behind those that wait, so that the order of a link's calls is kept
        if not loop.busy and self._asked == self._answered and get_ident() == loop.ident:
            loop.busy = True
            try:
                self._take_command(self._buffers.row, sequence, values, monotonic, wall)
            except BaseException as error:
                self._buffers.spoil(f"a command of link {self._name!r} was lost: {type(error).__name__}: {error}")
                if not isinstance(error, Exception):
                    raise
            finally:
                loop.busy = False
                # by a handler that has interrupted this between two steps; no step may follow
                if loop.asked and loop.may_act():
                    loop.leave()
        else:
            self._ask(self._take_command, sequence, values, monotonic, wall)
        if self._before is not None:
            self._before.sent(link, sequence, values, monotonic, wall)

    def received(self, link: Link, reading: Reading | None, monotonic: int, wall: int) -> None:
        """Takes a look for a reading, whatever it gave."""
        self._look(READING if reading is not None else NOTHING, reading, monotonic, wall)
        if self._before is not None:
            self._before.received(link, reading, monotonic, wall)

    def timed(self, link: Link, monotonic: int, wall: int) -> None:
        """Takes a look at the clock."""
        self._look(TIME, None, monotonic, wall)
        if self._before is not None:
            self._before.timed(link, monotonic, wall)

    def _look(self, kind: int, reading: Reading | None, monotonic: int, wall: int) -> None:
        loop = self._loop
        # behind those that wait, so that the order of a link's calls is kept
        if not loop.busy and self._asked == self._answered and get_ident() == loop.ident:
            loop.busy = True
            try:
                self._take_look(self._buffers.row, kind, reading, monotonic, wall)
            except BaseException as error:
                self._buffers.spoil(f"a reading of link {self._name!r} was lost: {type(error).__name__}: {error}")
                if not isinstance(error, Exception):
                    raise
            finally:
                loop.busy = False
                # by a handler that has interrupted this between two steps; no step may follow
                if loop.asked and loop.may_act():
                    loop.leave()
        else:
            self._ask(self._take_look, kind, reading, monotonic, wall)

    def _ask(self, take: Callable[..., None], *what: Any) -> None:
        self._asked += self._loop.ask(self._take_elsewhere, take, self._buffers.row, *what)

    def _take_elsewhere(self, take: Callable[..., None], row: int, *what: Any) -> None:
        self._answered += 1
        if not self._told:
            self._told = True
            text = f"link {self._name!r} was used by another thread than the one that steps, or by a signal handler"
            self._buffers.event("thread", text)
            warn(f"{text}: what it does is recorded, but a replay cannot repeat when that thread had its readings")
        take(row, *what)

    def _take_command(self, row: int, sequence: int, values: Any, monotonic: int, wall: int) -> None:
        buffers = self._buffers
        if self._command_count == self._command_capacity:
            buffers.turn()
        buffers.order += 1
        table, place = self._commands, self._command_count
        table["order"][place], table["row"][place], table["sequence"][place] = buffers.order, row, sequence
        table["monotonic"][place], table["wall"][place], table["values"][place] = monotonic, wall, values
        self._command_count = place + 1
        self._counts[self._command_place] = place + 1

    def _take_look(self, row: int, kind: int, reading: Reading | None, monotonic: int, wall: int) -> None:
        buffers = self._buffers
        if self._reading_count == self._reading_capacity:
            buffers.turn()
        buffers.order += 1
        table, place = self._readings, self._reading_count
        table["order"][place], table["row"][place], table["kind"][place] = buffers.order, row, kind
        table["received"][place], table["wall"][place] = monotonic, wall
        if reading is None:
            table["sequence"][place], table["device_time"][place] = 0, -1
            table["late"][place], table["values"][place] = False, np.nan
        else:
            table["sequence"][place], table["device_time"][place] = reading.sequence, reading.device_time
            table["late"][place], table["values"][place] = reading.late, reading.values
            table["received"][place], table["wall"][place] = reading.received, reading.wall
        self._reading_count = place + 1
        self._counts[self._reading_place] = place + 1


class UnknownLinks:
    """Notices links that an env uses in its steps and that its recorder does not have, so that nothing of them is kept.

    Args:
        buffers: where that is noted.
        loop: the thread that steps.
    """

    def __init__(self, buffers: PartBuffers, loop: LoopThread) -> None:
        self._buffers = buffers
        self._loop = loop
        self._told: set[int] = set()

    def attach(self) -> None:
        """Has all links without an observer tell of their use."""
        all_links.watch(self._used)

    def detach(self) -> None:
        """Ends that."""
        all_links.unwatch(self._used)

    def _used(self, link: Link) -> None:
        if self._buffers.in_step and get_ident() == self._loop.ident and id(link) not in self._told:
            self._told.add(id(link))
            self._loop.ask(self._tell, link.name)

    def _tell(self, name: str) -> None:
        text = f"the env uses a link {name!r} that the recorder did not find in it when it was made"
        self._buffers.event("note", f"{text}: what it sends and receives is not recorded")
        warn(
            f"{text}: what it sends and receives is not recorded, and no replay can give it back. Let the env hold the "
            f"link as an attribute by then, or name it: Recorder(..., links={{{name!r}: link}})"
        )
