"""What a device sent, and who is told of it or answers in its place."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

if TYPE_CHECKING:
    from simckpt.hardware.link import Link


@dataclass(frozen=True, slots=True, eq=False)
class Reading:
    """What a device sent.

    Attributes:
        values: `(len(link.reading),)` float64, read-only.
        sequence: the device's number for it.
        device_time: when it was sent, by the device's own clock [ns]. Only differences mean anything.
        received: when it arrived, by `time.monotonic_ns()` of this process [ns]; 0 in a restored one.
        wall: the same by `time.time_ns()` [ns since 1970]; 0 in a restored one.
        late: whether one with a higher number came before it.
    """

    values: np.ndarray[Any, np.dtype[np.float64]]
    sequence: int
    device_time: int
    received: int
    wall: int
    late: bool = False


class Observer(Protocol):
    """Is told of everything that a link does, in the thread that does it. A recorder is one."""

    def sent(
        self, link: Link, sequence: int, values: np.ndarray[Any, np.dtype[np.float64]], monotonic: int, wall: int
    ) -> None:
        """A command was sent, or dropped because the system did not take it; times in ns."""

    def received(self, link: Link, reading: Reading | None, monotonic: int, wall: int) -> None:
        """A look for a reading has ended, with one or without; `receive_newest` consists of several looks."""

    def timed(self, link: Link, monotonic: int, wall: int) -> None:
        """`link.time()` has returned `monotonic`."""


class Source(Protocol):
    """Answers in place of the device. A replay is one."""

    def send(self, values: np.ndarray[Any, np.dtype[np.float64]]) -> int:
        """Takes a command, and returns its sequence number."""

    def receive(self, timeout: float) -> Reading | None:
        """Returns a reading, or None; does not wait for real."""

    def time(self) -> int:
        """Returns what `link.time()` returns [ns]."""
