"""What stands between a link and its device while it is open: messages, their numbers, and what became of them."""

from __future__ import annotations

import secrets
import time
from collections import deque
from typing import Any

import numpy as np

from simckpt.errors import ConfigurationError
from simckpt.hardware.arrivals import Arrivals, Place, Statistics
from simckpt.hardware.simulated import Simulated
from simckpt.hardware.transports import Transport
from simckpt.hardware.wire import COMMAND, READING, Codec, Message, StreamReader

_LARGEST_OVERTIME = 64  # looks at damaged messages after the time is up: a device that floods must not stop the loop

Values = np.ndarray[Any, np.dtype[np.float64]]


class Connection:
    """Messages over an open transport; each connection is a stream of its own to the device.

    Args:
        transport: open.
        command: names of what is sent.
        reading: names of what comes back.
        statistics: what to count in.
    """

    def __init__(
        self, transport: Transport, command: tuple[str, ...], reading: tuple[str, ...], statistics: Statistics
    ) -> None:
        self._transport = transport
        self._commands = Codec(COMMAND, len(command))
        self._readings = Codec(READING, len(reading))
        self._statistics = statistics
        # no random stream of the program is touched
        self._stream = secrets.randbits(64)
        self._arrivals = Arrivals(statistics)
        self._reader = StreamReader(self._readings)
        self._waiting: deque[Message] = deque()

    def send(self, sequence: int, values: Values, monotonic: int, wall: int) -> None:
        """Sends a command, or drops it; times in ns."""
        if self._transport.send(self._commands.encode(self._stream, sequence, monotonic, wall, values)):
            self._statistics.sent += 1
        else:
            self._statistics.dropped += 1

    def receive(self, timeout: float) -> tuple[Message, bool] | None:
        """Returns the next reading, and whether it is late, or None after `timeout` [s]."""
        deadline = time.monotonic() + timeout
        overtime = 0
        while overtime <= _LARGEST_OVERTIME:
            while self._waiting:
                message = self._waiting.popleft()
                place = self._arrivals.place(message.stream, message.sequence)
                if place is not Place.REPEATED:
                    return message, place is Place.LATE
            remaining = deadline - time.monotonic()
            data = self._transport.receive(max(remaining, 0.0))
            if data is None:
                break
            self._take_apart(data)
            overtime += remaining <= 0
        return None

    def _take_apart(self, data: bytes) -> None:
        if self._transport.stream:
            self._waiting.extend(self._reader.feed(data))
            self._statistics.damaged += self._reader.skipped
            self._reader.skipped = 0
            return
        message = self._readings.decode(data)
        if message is None:
            self._statistics.damaged += 1
        else:
            self._waiting.append(message)


class SimulatedConnection:
    """The same to a model.

    Args:
        device: the model.
        reading: names of what it returns.
        statistics: what to count in.
    """

    def __init__(self, device: Simulated, reading: tuple[str, ...], statistics: Statistics) -> None:
        self._device = device
        self._names = reading
        self._statistics = statistics

    def send(self, sequence: int, values: Values, monotonic: int, wall: int) -> None:
        """Lets the model act on a command."""
        self._device.send(values)
        self._statistics.sent += 1

    def receive(self, timeout: float) -> tuple[Message, bool] | None:
        """Returns the model's next reading, which is never late, or None."""
        message = self._device.receive(timeout)
        if message is None:
            return None
        if message.values.shape != (len(self._names),):
            raise ConfigurationError(
                f"the model of the device returned an array of shape {message.values.shape}; a reading is "
                f"{len(self._names)} numbers {self._names}",
                keys=["reading"],
            )
        message.values.flags.writeable = False
        self._statistics.received += 1
        return message, False
