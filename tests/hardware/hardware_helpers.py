"""Devices for the tests of links: sockets of the test itself, and transports that a test steers."""

import socket
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from simckpt.hardware import Link, Reading, Transport
from simckpt.hardware.wire import COMMAND, READING, Codec, Message

COMMANDS = Codec(COMMAND, 1)
READINGS = Codec(READING, 2)
# of waiting for what has to come, on a machine that may be busy [s]
PATIENCE = 60.0


def reading(sequence: int, *, stream: int = 7, values: tuple[float, float] = (1.0, 2.0), time: int = 0) -> bytes:
    """Returns the message of a device."""
    return READINGS.encode(stream, sequence, time, 0, np.array(values))


def link_to(transport: Any, **settings: Any) -> Link:
    """Returns a link with one value out and two back."""
    return Link(transport, command=("force",), reading=("force", "position"), **settings)


class Loopback(Transport):
    """Keeps what is sent, and brings what the test puts into `arriving`."""

    def __init__(self) -> None:
        self.sent: list[bytes] = []
        self.arriving: deque[bytes] = deque()
        self.full = False
        self.opened = 0
        self.closed = 0

    @property
    def address(self) -> str:
        return "loopback"

    def open(self) -> None:
        self.opened += 1

    def send(self, data: bytes) -> bool:
        if not self.full:
            self.sent.append(data)
        return not self.full

    def receive(self, timeout: float) -> bytes | None:
        return self.arriving.popleft() if self.arriving else None

    def close(self) -> None:
        self.closed += 1

    @property
    def commands(self) -> list[Message]:
        """What was sent, as the device understands it."""
        found = [COMMANDS.decode(data) for data in self.sent]
        assert None not in found
        return [message for message in found if message is not None]


class Log:
    """An observer that keeps everything, in order."""

    def __init__(self) -> None:
        self.entries: list[tuple[Any, ...]] = []

    def sent(self, link: Link, sequence: int, values: np.ndarray, monotonic: int, wall: int) -> None:
        self.entries.append(("sent", link, sequence, values, monotonic, wall))

    def received(self, link: Link, reading: Reading | None, monotonic: int, wall: int) -> None:
        self.entries.append(("received", link, reading, monotonic, wall))

    def timed(self, link: Link, monotonic: int, wall: int) -> None:
        self.entries.append(("timed", link, monotonic, wall))


class UDPDevice:
    """A device on a UDP socket that does what the test says."""

    def __init__(self, host: str = "127.0.0.1", port: int = 0) -> None:
        self.socket = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_DGRAM)
        self.socket.bind((host, port))
        self.socket.settimeout(PATIENCE)
        self.port = self.socket.getsockname()[1]
        self.address = f"[{host}]:{self.port}" if ":" in host else f"{host}:{self.port}"
        self.peer: Any = None

    def take(self) -> Message:
        """Waits for a command."""
        data, self.peer = self.socket.recvfrom(65536)
        message = COMMANDS.decode(data)
        assert message is not None
        return message

    def untouched(self) -> bool:
        """Whether nothing is there to be taken."""
        self.socket.setblocking(False)
        try:
            self.socket.recv(1)
        except BlockingIOError:
            return True
        finally:
            self.socket.settimeout(PATIENCE)
        return False

    def give(self, data: bytes) -> None:
        """Sends to where the latest command came from."""
        self.socket.sendto(data, self.peer)


@contextmanager
def udp_device(host: str = "127.0.0.1", port: int = 0) -> Iterator[UDPDevice]:
    """A `UDPDevice`, closed in the end."""
    device = UDPDevice(host, port)
    try:
        yield device
    finally:
        device.socket.close()
