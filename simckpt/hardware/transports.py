"""How bytes reach a device: over UDP, TCP or a serial line. A send never waits, a receive no longer than it is told."""

from __future__ import annotations

import abc
import contextlib
import fcntl
import math
import os
import select
import socket
import termios
import time
from typing import Any, ClassVar

from simckpt.errors import ConfigurationError

_DATAGRAM = 65536  # more than any datagram holds [bytes]
_CHUNK = 65536  # of a stream [bytes]
_WAITING = 16384  # at each end of a TCP connection [bytes]
_CONNECTION = {"_socket", "_line", "_descriptor"}  # attributes that stand for an open one
_SELECT_LIMIT = 1024  # select() knows no descriptors from here on


class Transport(abc.ABC):
    """What a link sends its bytes through; derive from it for a device that is reached in another way.

    Objects of this class are connections, not state: the walk through an env leaves them alone.

    Attributes:
        stream: whether bytes arrive without the borders of the messages, as on a serial line.
        trouble: what is wrong, None if nothing is known to be.
    """

    stream: ClassVar[bool] = False
    trouble: str | None = None

    @property
    @abc.abstractmethod
    def address(self) -> str:
        """Where the device is, for people; it holds no secret."""

    @property
    def connected(self) -> bool:
        """Whether the connection is open, as far as this side can know."""
        return self.trouble is None

    def __getstate__(self) -> dict[str, Any]:
        # a copy is closed
        return {**vars(self), **dict.fromkeys(_CONNECTION & vars(self).keys())}

    @abc.abstractmethod
    def open(self) -> None:
        """Opens the connection. May wait, raises OSError."""

    @abc.abstractmethod
    def send(self, data: bytes) -> bool:
        """Sends one message if that is possible at once, and returns whether it was; never waits, never raises."""

    @abc.abstractmethod
    def receive(self, timeout: float) -> bytes | None:
        """Returns a datagram, or bytes of the stream, or None after `timeout` [s] without any. Never raises."""

    @abc.abstractmethod
    def close(self) -> None:
        """Closes the connection; does nothing if it is closed."""


class UDP(Transport):
    """Datagrams to and from one address. A device that is not there is no error: nothing comes back.

    Args:
        address: of the device, `"host:port"`, or `"[::1]:port"` for IPv6. Datagrams of other senders are not seen.
        local: the address to send from and receive at, for a device that wants a fixed one.
    """

    def __init__(self, address: str, *, local: str | None = None) -> None:
        self._host, self._port = split_address(address)
        self._local = None if local is None else split_address(local)
        self._socket: socket.socket | None = None

    @property
    def address(self) -> str:
        """Where the device is, such as `udp://127.0.0.1:9000`."""
        return f"udp://{_joined(self._host, self._port)}"

    def open(self) -> None:
        """Makes the socket; that reaches nobody. Raises OSError for an unknown host or a local port that is taken."""
        self.close()
        self.trouble = None
        family, kind, protocol, _, target = socket.getaddrinfo(self._host, self._port, type=socket.SOCK_DGRAM)[0]
        opened = socket.socket(family, kind, protocol)
        try:
            opened.setblocking(False)
            if self._local is not None:
                opened.bind(self._local)
            opened.connect(target)
        except BaseException:
            opened.close()
            raise
        self._socket = opened

    def send(self, data: bytes) -> bool:
        """Sends a datagram; False if the system does not take it: buffers are full, or no way leads to the device."""
        assert self._socket is not None
        try:
            self._socket.send(data)
        except BlockingIOError:
            return False
        except OSError as error:
            self._note(error)
            return False
        return True

    def receive(self, timeout: float) -> bytes | None:
        """Returns the next datagram, or None."""
        assert self._socket is not None
        deadline = time.monotonic() + timeout
        while True:
            try:
                data = self._socket.recv(_DATAGRAM)
                self.trouble = None
                return data
            except BlockingIOError:
                pass
            except OSError as error:
                # an earlier send was refused by the device's machine, which says so to the next call
                self._note(error)
            remaining = deadline - time.monotonic()
            if remaining <= 0 or not wait_readable(self._socket.fileno(), remaining):
                return None

    def close(self) -> None:
        """Closes the socket."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _note(self, error: OSError) -> None:
        self.trouble = f"{type(error).__name__}: {error}"


class _Stream(Transport):
    """What connections without borders between messages share: an open file that never blocks.

    A connection that breaks is closed and stays so until it is opened again: sends are dropped, and receives wait for
    their timeout and bring nothing.
    """

    stream = True

    def __init__(self) -> None:
        self._descriptor: int | None = None
        # the end of a message that the system has taken in part: it goes first, or the device would lose its place
        self._rest = b""

    @property
    def connected(self) -> bool:
        """Whether the connection is open, as far as this side can know."""
        return self._descriptor is not None

    def send(self, data: bytes) -> bool:
        """Sends a message; False if the system does not take it, because its buffer is full or nobody is there."""
        if self._descriptor is None:
            return False
        try:
            if self._rest:
                self._rest = self._rest[os.write(self._descriptor, self._rest) :]
            if self._rest:
                return False
            taken = os.write(self._descriptor, data)
        except BlockingIOError:
            return False
        except OSError as error:
            self._lose(f"{type(error).__name__}: {error}")
            return False
        self._rest = data[taken:]
        return True

    def receive(self, timeout: float) -> bytes | None:
        """Returns what has arrived, or None."""
        if self._descriptor is None:
            time.sleep(max(timeout, 0.0))
            return None
        started = time.monotonic()
        try:
            if not wait_readable(self._descriptor, timeout):
                return None
            data = os.read(self._descriptor, _CHUNK)
        except BlockingIOError:
            return None
        except OSError as error:
            self._lose(f"{type(error).__name__}: {error}")
        else:
            if data:
                return data
            self._lose("the device has closed the connection")
        time.sleep(max(timeout - (time.monotonic() - started), 0.0))
        return None

    def _lose(self, why: str) -> None:
        self.close()
        self.trouble = why


class TCP(_Stream):
    """A TCP connection to a device that listens. If it goes away, `link.trouble` says so; `link.arm()` connects again.

    What was sent while the network was down arrives late, if it was not too long: prefer `UDP` for commands, or let
    the device heed the newest.

    Args:
        address: of the device, `"host:port"`, or `"[::1]:port"` for IPv6.
        timeout: for connecting [s]; a device that takes nothing for as long is taken to be gone.
    """

    def __init__(self, address: str, *, timeout: float = 5.0) -> None:
        super().__init__()
        self._host, self._port = split_address(address)
        if not 0 < timeout < 1e6:
            raise ConfigurationError(f"a timeout is a positive time in seconds, got {timeout!r}", keys=["timeout"])
        self._timeout = float(timeout)
        self._socket: socket.socket | None = None

    @property
    def address(self) -> str:
        """Where the device is, such as `tcp://127.0.0.1:9000`."""
        return f"tcp://{_joined(self._host, self._port)}"

    def open(self) -> None:
        """Connects; raises OSError if nobody answers within the timeout."""
        self.close()
        opened = socket.create_connection((self._host, self._port), timeout=self._timeout)
        try:
            opened.setblocking(False)
            opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            # what waits for an end that has stopped is old when that goes on
            opened.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _WAITING)
            opened.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _WAITING)
            opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(self._timeout * 1000))
        except BaseException:
            opened.close()
            raise
        self._socket, self._descriptor = opened, opened.fileno()
        self.trouble = None

    def close(self) -> None:
        """Closes the connection."""
        self._descriptor, self._rest = None, b""
        if self._socket is not None:
            self._socket.close()
            self._socket = None


class Serial(_Stream):
    """A serial line, through pyserial: `pip install "simckpt[hardware]"`. It is locked against other programs.

    Opening a port raises its DTR line, on which many boards start anew and say nothing for a while.

    Args:
        port: such as `"/dev/ttyUSB0"`.
        baudrate: [bits/s]. A byte takes ten: at 115200 a message of three values takes 6 ms.
    """

    def __init__(self, port: str, *, baudrate: int = 115200) -> None:
        super().__init__()
        if not isinstance(baudrate, int) or isinstance(baudrate, bool) or not 0 < baudrate < 2**31:
            raise ConfigurationError(f"a baudrate is a positive whole number, got {baudrate!r}", keys=["baudrate"])
        self._name = str(port)
        self._baudrate = baudrate
        self._line: Any = None
        self._locked_by = 0

    @property
    def address(self) -> str:
        """Where the device is, such as `serial:///dev/ttyUSB0`."""
        return f"serial://{self._name}"

    def open(self) -> None:
        """Opens the port; raises OSError if it is not there, or taken."""
        try:
            import serial
        except ImportError as error:
            message = 'serial lines need pyserial, which is not installed: pip install "simckpt[hardware]"'
            raise ConfigurationError(message) from error
        self.close()
        # pyserial sets the line up. Its write spins while the line is busy, even with a timeout of 0: it is not used
        try:
            self._line = serial.Serial(self._name, self._baudrate, timeout=0, exclusive=True)
        except (termios.error, ValueError) as error:
            raise OSError(f"{self._baudrate} bits/s: {error}") from error
        self._descriptor, self._locked_by = self._line.fileno(), os.getpid()
        self.trouble = None

    def close(self) -> None:
        """Closes the port."""
        descriptor, self._descriptor, self._rest = self._descriptor, None, b""
        if self._line is None:
            return
        if descriptor is not None and self._locked_by == os.getpid():
            # forks of this process may still hold the file, and the lock with it
            with contextlib.suppress(OSError):
                fcntl.flock(descriptor, fcntl.LOCK_UN)
        line, self._line = self._line, None
        with contextlib.suppress(OSError):
            line.close()


def split_address(address: str) -> tuple[str, int]:
    """Returns host and port of `"host:port"` or `"[host]:port"`."""
    host, colon, port = address.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    if bracketed:
        host = host[1:-1]
    known = colon and _is_host(host) and port.isdecimal() and port.isascii() and int(port) < 65536
    if not known or (":" in host) != bracketed:
        raise ConfigurationError(
            f"the address of a device is 'host:port', or '[::1]:port' for IPv6, got {address!r}", keys=["address"]
        )
    return host, int(port)


def _is_host(text: str) -> bool:
    try:
        return text.isprintable() and bool(text.encode("idna"))
    except UnicodeError:
        # a part of the name is too long, or empty
        return False


def _joined(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def wait_readable(descriptor: int, seconds: float) -> bool:
    """Returns whether there is something to read within `seconds`; at once if they are not positive."""
    seconds = max(seconds, 0.0)
    if descriptor < _SELECT_LIMIT:
        return bool(select.select([descriptor], [], [], seconds)[0])
    # whole milliseconds are all that poll knows, and select has no room for this descriptor
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(math.ceil(seconds * 1000)))
