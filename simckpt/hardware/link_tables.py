"""The tables of a recording; what a recorder hears of a link, commands and looks for readings, as entries of two."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from simckpt.hardware.columns import BOOL, COMMON, FLOAT, INT, Buffer, Form, Table, size_of
from simckpt.hardware.session import NOTHING, READING, TIME

if TYPE_CHECKING:
    from simckpt.hardware.link import Link, Reading
    from simckpt.hardware.recording import Recording


PART_BYTES = 8 << 20  # that the rows of a part may have, at least 16 of them
MOST_ROWS = 4096  # of a part


def recorded_tables(forms: Mapping[str, Form], links: Mapping[str, LinkTables]) -> dict[str, Table]:
    """Returns the tables of a buffer: of rows and resets, then of the commands and of the readings of all links.

    Args:
        forms: of "action", "observation" and "signals".
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
    capacity = max(16, min(MOST_ROWS, PART_BYTES // size_of(rows)))
    resets = {
        **COMMON,
        **dict.fromkeys(("started", "finished", "wall", "seed"), (INT, ())),
        "seeded": (BOOL, ()),
        "observation": forms["observation"],
    }
    commands = {f"commands/{name}": Table(link.command_columns, 2 * capacity) for name, link in links.items()}
    readings = {f"readings/{name}": Table(link.reading_columns, 4 * capacity) for name, link in links.items()}
    return {"rows": Table(rows, capacity), "resets": Table(resets, max(4, capacity // 4)), **commands, **readings}


class LinkTables:
    """Writes what a link does into its two tables; the link's observer."""

    def __init__(self, recording: Recording, name: str, link: Link) -> None:
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
        self._recording = recording
        self._link = link
        self._name = name
        self._before: Any = None

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
        recording = self._recording
        if self._command_count == self._command_capacity:
            recording.turn()
        recording.order += 1
        table, place = self._commands, self._command_count
        table["order"][place], table["row"][place], table["sequence"][place] = recording.order, recording.row, sequence
        table["monotonic"][place], table["wall"][place], table["values"][place] = monotonic, wall, values
        self._command_count = place + 1
        self._counts[self._command_place] = place + 1
        if self._before is not None:
            self._before.sent(link, sequence, values, monotonic, wall)

    def received(self, link: Link, reading: Reading | None, monotonic: int, wall: int) -> None:
        """Takes a look for a reading, whatever it gave."""
        self._take(READING if reading is not None else NOTHING, reading, monotonic, wall)
        if self._before is not None:
            self._before.received(link, reading, monotonic, wall)

    def timed(self, link: Link, monotonic: int, wall: int) -> None:
        """Takes a look at the clock."""
        self._take(TIME, None, monotonic, wall)
        if self._before is not None:
            self._before.timed(link, monotonic, wall)

    def _take(self, kind: int, reading: Reading | None, monotonic: int, wall: int) -> None:
        recording = self._recording
        if self._reading_count == self._reading_capacity:
            recording.turn()
        recording.order += 1
        table, place = self._readings, self._reading_count
        table["order"][place], table["row"][place], table["kind"][place] = recording.order, recording.row, kind
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
