"""A device for `envs/cart_pole_in_the_loop.py`: a motor in a process of its own, behind a connection with faults.

    python scripts/hardware_device.py --udp 127.0.0.1:9000 --loss 0.05 --latency-ms 1 --jitter-ms 0.5

It sends a reading once a period of its own clock, which is not the computer's, and heeds the newest command. The first
line that it prints is the address to connect to; with port 0 the system chooses one, and `--serial` makes a
pseudo-terminal. It ends at SIGTERM, and says what it has counted.
"""

import argparse
import contextlib
import heapq
import os
import pty
import select
import signal
import socket
import sys
import time
import tty
from pathlib import Path

import numpy as np

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from envs.motor import Motor  # noqa: E402
from simckpt.hardware.arrivals import Arrivals, Place, Statistics  # noqa: E402
from simckpt.hardware.transports import split_address  # noqa: E402
from simckpt.hardware.wire import COMMAND, READING, Codec, Message, StreamReader  # noqa: E402

COMMANDS = Codec(COMMAND, len(Motor.command))
READINGS = Codec(READING, len(Motor.reading))
OFFSET = 7_000_000_000_000  # of the device's clock [ns]
DRIFT = 40e-6  # of its rate


class Datagrams:
    """A UDP socket; readings go to where the latest command came from."""

    def __init__(self, address: str) -> None:
        host, port = split_address(address)
        self.socket = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_DGRAM)
        self.socket.bind((host, port))
        self.socket.setblocking(False)
        self.peer = None
        shown = f"[{host}]" if ":" in host else host
        self.address = f"udp://{shown}:{self.socket.getsockname()[1]}"

    def files(self) -> list[int]:
        """Returns what to wait for."""
        return [self.socket.fileno()]

    def read(self) -> list[Message]:
        """Returns the commands that are there."""
        messages = []
        while True:
            try:
                data, peer = self.socket.recvfrom(65536)
            except BlockingIOError:
                return messages
            except OSError:
                continue  # an earlier reading was refused: nobody listens any more
            message = COMMANDS.decode(data)
            if message is not None:
                self.peer = peer
                messages.append(message)

    def write(self, data: bytes) -> None:
        """Sends a reading, if that is possible."""
        if self.peer is not None:
            with contextlib.suppress(OSError):
                self.socket.sendto(data, self.peer)


class Stream:
    """A file without borders between messages."""

    def __init__(self, descriptor: int | None, address: str) -> None:
        self.descriptor = descriptor
        self.address = address
        self.reader = StreamReader(COMMANDS)

    def files(self) -> list[int]:
        """Returns what to wait for."""
        return [] if self.descriptor is None else [self.descriptor]

    def read(self) -> list[Message]:
        """Returns the commands that are there."""
        try:
            data = b"" if self.descriptor is None else os.read(self.descriptor, 65536)
        except BlockingIOError:
            return []
        except OSError:
            data = b""
        if not data:
            self.gone()
        return self.reader.feed(data)

    def write(self, data: bytes) -> None:
        """Sends a reading, if that is possible."""
        try:
            if self.descriptor is not None:
                os.write(self.descriptor, data)
        except BlockingIOError:
            pass
        except OSError:
            self.gone()

    def gone(self) -> None:
        """Nobody is at the other end any more."""
        self.descriptor = None


class Connections(Stream):
    """A TCP socket that listens; a new connection takes the place of the one before."""

    def __init__(self, address: str) -> None:
        host, port = split_address(address)
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self.listening = socket.create_server((host, port), family=family)
        self.listening.setblocking(False)
        self.connection: socket.socket | None = None
        shown = f"[{host}]" if ":" in host else host
        super().__init__(None, f"tcp://{shown}:{self.listening.getsockname()[1]}")

    def files(self) -> list[int]:
        """Returns what to wait for."""
        return [self.listening.fileno(), *super().files()]

    def read(self) -> list[Message]:
        """Returns the commands that are there, or takes a new connection."""
        try:
            connection, _ = self.listening.accept()
        except BlockingIOError:
            return super().read() if self.descriptor is not None else []
        self.gone()
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.connection, self.descriptor, self.reader = connection, connection.fileno(), StreamReader(COMMANDS)
        return []

    def gone(self) -> None:
        """Closes a connection at whose other end nobody is any more."""
        super().gone()
        if self.connection is not None:
            self.connection.close()
            self.connection = None


def pseudo_terminal() -> Stream:
    """Returns one end of a serial line; its address is the other."""
    mine, other = pty.openpty()
    tty.setraw(other)  # kept open: without it every read would fail while no link is there
    os.set_blocking(mine, False)
    return Stream(mine, f"serial://{os.ttyname(other)}")


class Way:
    """One direction of the connection: loses and delays what is put into it.

    Args:
        ordered: whether nothing overtakes, as in a stream.
    """

    def __init__(self, args: argparse.Namespace, rng: np.random.Generator, *, ordered: bool) -> None:
        self.loss = args.loss
        self.latency, self.jitter = args.latency_ms * 1e6, args.jitter_ms * 1e6  # [ns]
        self.rng = rng
        self.ordered = ordered
        self.under_way: list[tuple[int, int, object]] = []
        self.count = 0
        self.last = 0

    def put(self, item: object, now: int) -> None:
        """Sends something off at `now` [ns]."""
        lost, delay = self.rng.random() < self.loss, self.latency + self.rng.uniform(0.0, self.jitter)
        if lost:
            return
        due = now + int(delay)
        if self.ordered:
            due = self.last = max(due, self.last)
        self.count += 1
        heapq.heappush(self.under_way, (due, self.count, item))

    def take(self, now: int) -> list:
        """Returns what has arrived by `now` [ns]."""
        arrived = []
        while self.under_way and self.under_way[0][0] <= now:
            arrived.append(heapq.heappop(self.under_way)[2])
        return arrived

    def due(self) -> list[int]:
        """Returns when the next arrives [ns], or nothing."""
        return [entry[0] for entry in self.under_way[:1]]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0], allow_abbrev=False)
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--udp", default="127.0.0.1:0", metavar="HOST:PORT")
    where.add_argument("--tcp", metavar="HOST:PORT")
    where.add_argument("--serial", action="store_true", help="at a pseudo-terminal")
    parser.add_argument("--rate", type=float, default=500.0, help="of the readings [1/s]")
    parser.add_argument("--loss", type=float, default=0.0, help="share of the messages that get lost, each way")
    parser.add_argument("--latency-ms", type=float, default=0.0, help="of the connection, each way")
    parser.add_argument("--jitter-ms", type=float, default=0.0, help="the most that comes on top of it")
    parser.add_argument("--seed", type=int, default=0, help="of the motor's noise and the connection's faults")
    parser.add_argument("--cut-after", type=float, metavar="S", help="the cable is cut so long after the first command")
    parser.add_argument("--seconds", type=float, help="the program ends by itself after so long")
    args = parser.parse_args()

    if args.serial:
        line = pseudo_terminal()
    else:
        line = Connections(args.tcp) if args.tcp is not None else Datagrams(args.udp)
    ordered = not isinstance(line, Datagrams)
    inward = Way(args, np.random.default_rng([args.seed, 1]), ordered=ordered)
    outward = Way(args, np.random.default_rng([args.seed, 2]), ordered=ordered)
    motor = Motor(args.seed)
    counted = Statistics()
    arrivals = Arrivals(counted)
    stream = int.from_bytes(os.urandom(8), "little")

    stopped = []
    signal.signal(signal.SIGTERM, lambda *_: stopped.append(True))
    print(line.address, flush=True)

    period = round(1e9 / args.rate)
    started = tick = time.monotonic_ns()
    first_command = command = None
    sequence = 0
    while not stopped:
        wake = min([tick, *inward.due(), *outward.due()])
        ready = select.select(line.files(), [], [], max(wake - time.monotonic_ns(), 0) / 1e9)[0]
        now = time.monotonic_ns()
        cut = args.cut_after is not None and first_command is not None and now - first_command > args.cut_after * 1e9
        for message in line.read() if ready else []:
            first_command = now if first_command is None else first_command
            if not cut:
                inward.put(message, now)
        for message in inward.take(now):
            if arrivals.place(message.stream, message.sequence) is Place.NEXT:
                command = message.values
        if now >= tick:
            device_now = OFFSET + round((now - started) * (1.0 + DRIFT))
            values = np.array(motor(command, device_now))
            outward.put(READINGS.encode(stream, sequence, device_now, time.time_ns(), values), now)
            sequence += 1
            command = None
            # periods that the machine was too busy for are left out, as a real device would not do
            tick += period * max((now - tick) // period, 1)
        for data in outward.take(now):
            if not cut:
                line.write(data)
        if args.seconds is not None and now - started > args.seconds * 1e9:
            break
    print(f"readings {sequence}, commands {counted.received}, lost {counted.lost}, late {counted.late}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
