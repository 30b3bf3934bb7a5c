"""The real ways to a device: UDP, TCP and serial lines, with the faults that these have."""

import fcntl
import os
import pty
import resource
import select
import socket
import threading
import time
import tty
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import pytest
from hardware_helpers import COMMANDS, PATIENCE, link_to, reading, udp_device

from simckpt.errors import ConfigurationError, LinkDisarmedError, LinkUnavailableError
from simckpt.hardware import TCP, UDP, Link, Serial
from simckpt.hardware.transports import wait_readable
from simckpt.hardware.wire import LARGEST_COUNT, READING, Codec, StreamReader


def until(condition: Callable[[], object]) -> None:
    """Waits for what another part of the machine has to do."""
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_datagrams_go_and_come_in_both_families(host: str) -> None:
    with udp_device(host) as device, link_to(UDP(device.address)) as link:
        assert link.address == f"udp://{device.address}"
        link.send([3])
        assert device.take().values.tolist() == [3.0]
        device.give(reading(0))
        assert link.receive(PATIENCE) is not None


def test_the_largest_message_fits_into_a_datagram_and_through_a_stream() -> None:
    names = tuple(map(str, range(LARGEST_COUNT)))
    codec = Codec(READING, LARGEST_COUNT)
    values = np.arange(LARGEST_COUNT) / 3
    data = codec.encode(1, 0, 0, 0, values)
    with udp_device() as device, Link(UDP(device.address), reading=names, command=("force",)) as link:
        link.send([0])
        device.take()
        device.give(data)
        found = link.receive(PATIENCE)
        assert found is not None
        assert found.values.tobytes() == values.tobytes()
    with tcp_device() as listening, Link(TCP(f"127.0.0.1:{listening.getsockname()[1]}"), reading=names) as link:
        link.arm()
        with accept(listening) as connection:
            stream = b"".join(codec.encode(1, sequence, 0, 0, values) for sequence in range(8))
            thread = threading.Thread(target=connection.sendall, args=(stream,))
            thread.start()
            for sequence in range(8):
                found = link.receive(PATIENCE)
                assert found is not None
                assert found.sequence == sequence
                assert found.values.tobytes() == values.tobytes()
            thread.join(PATIENCE)


def test_a_device_that_is_not_there_is_silence_and_may_come_later() -> None:
    with udp_device() as device:
        port = device.port
    with link_to(UDP(f"127.0.0.1:{port}")) as link:
        link.send([1])
        # the machine says that nobody listens; that is no reading, and shortens no wait
        started = time.monotonic()
        assert link.receive(0.05) is None
        assert time.monotonic() - started >= 0.05
        link.send([2])
        until(lambda: link.receive(0.01) or link.trouble)
        assert "refused" in str(link.trouble)
        with udp_device(port=port) as device:
            until(lambda: link.send([3]) and select.select([device.socket], [], [], 0.01)[0])
            device.take()
            device.give(reading(0))
            assert link.receive(PATIENCE) is not None
            assert link.trouble is None
            assert link.connected


def test_other_senders_are_not_heard() -> None:
    with udp_device() as device, udp_device() as stranger, link_to(UDP(device.address)) as link:
        link.send([1])
        device.take()
        stranger.peer = device.peer
        stranger.give(reading(99))
        device.give(reading(0))
        found = link.receive(PATIENCE)
        assert found is not None
        assert found.sequence == 0


def test_a_local_port_can_be_given_and_may_be_taken() -> None:
    with udp_device() as device, udp_device() as other:
        link = link_to(UDP(device.address, local=other.address))
        with pytest.raises(LinkUnavailableError, match="in use"):
            link.arm()
        other.socket.close()
        with link:
            link.arm()
            link.send([1])
            device.take()
            assert device.peer == ("127.0.0.1", other.port)


@pytest.mark.parametrize(
    "address",
    [
        "",
        "host",
        "host:",
        ":9000",
        "host:x",
        "host:70000",
        "::1:9000",
        "[::1]",
        "[h]:-1",
        "h:²",
        "a..b:1",
        f"{'h' * 70}:1",
        "h\0:1",
    ],
)
def test_addresses_are_checked(address: str) -> None:
    for make in (UDP, TCP, lambda text: UDP("h:1", local=text)):
        with pytest.raises(ConfigurationError, match="address"):
            make(address)


def test_a_wait_is_possible_for_descriptors_that_select_does_not_know() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 1200:
        pytest.skip("this machine allows no descriptors above 1024")
    resource.setrlimit(resource.RLIMIT_NOFILE, (1200, hard))
    one, other = socket.socketpair()
    high = fcntl.fcntl(one.fileno(), fcntl.F_DUPFD, 1100)
    try:
        started = time.monotonic()
        assert not wait_readable(high, 0.01)
        assert time.monotonic() - started >= 0.01
        other.send(b"x")
        assert wait_readable(high, PATIENCE)
        assert wait_readable(high, -1.0)
    finally:
        os.close(high)
        one.close()
        other.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@contextmanager
def tcp_device(host: str = "127.0.0.1", port: int = 0) -> Iterator[socket.socket]:
    listening = socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    listening.settimeout(PATIENCE)
    try:
        yield listening
    finally:
        listening.close()


def accept(listening: socket.socket) -> socket.socket:
    connection, _ = listening.accept()
    connection.settimeout(PATIENCE)
    return connection


def take_all(connection: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        data += connection.recv(count - len(data))
    return data


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_a_stream_is_taken_apart_however_it_comes(host: str) -> None:
    with tcp_device(host) as listening:
        shown = f"[{host}]" if ":" in host else host
        with link_to(TCP(f"{shown}:{listening.getsockname()[1]}")) as link:
            link.send([5])
            with accept(listening) as device:
                command = COMMANDS.decode(take_all(device, COMMANDS.size))
                assert command is not None
                assert command.values.tolist() == [5.0]
                device.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                # one byte at a time, then several messages at once with garbage between
                for byte in reading(0):
                    device.send(bytes([byte]))
                first = link.receive(PATIENCE)
                device.send(reading(1) + b"garbage" + reading(2))
                found = [first, link.receive(PATIENCE), link.receive(PATIENCE)]
                assert [item and item.sequence for item in found] == [0, 1, 2]
                assert link.statistics.damaged == 7


def test_a_tcp_device_that_goes_away_leaves_a_clear_state_and_arm_connects_again() -> None:
    with tcp_device() as listening:
        port = listening.getsockname()[1]
        link = link_to(TCP(f"127.0.0.1:{port}"))
        link.arm()
        assert link.connected
        device = accept(listening)
        device.send(reading(0)[:-5])
        device.close()
        until(lambda: link.receive(0.01) or not link.connected)
        assert link.trouble == "the device has closed the connection"
        started = time.monotonic()
        assert link.receive(0.05) is None
        assert time.monotonic() - started >= 0.05
        assert link.send([1]) == 0
        assert link.statistics.dropped == 1
        assert link.armed
        link.arm()
        assert link.trouble is None
        with accept(listening) as device:
            # the half of a message from before is forgotten
            device.send(reading(5))
            found = link.receive(PATIENCE)
            assert found is not None
            assert found.sequence == 5
            # by force
            device.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        until(lambda: link.send([1]) < 0 or not link.connected)
        assert "Error" in str(link.trouble)
        link.close()
    with pytest.raises(LinkUnavailableError, match="refused"):
        link.arm()
    with pytest.raises(LinkDisarmedError):
        link.send([1])


def fill(link: Link) -> int:
    """Sends until the system takes no more; returns how many it took. No send may wait."""
    sent = 0
    while link.statistics.dropped < 3:
        sent = link.send([sent]) + 1
    return link.statistics.sent


def test_a_full_connection_drops_whole_commands_and_never_waits() -> None:
    with tcp_device() as listening, link_to(TCP(f"127.0.0.1:{listening.getsockname()[1]}", timeout=300)) as link:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        link.arm()
        with accept(listening) as device:
            taken = fill(link)
            # once there is room again the command that was cut goes on first
            reader, found = StreamReader(COMMANDS), []
            device.setblocking(False)

            def take() -> None:
                try:
                    found.extend(reader.feed(device.recv(1 << 20)))
                except BlockingIOError:
                    link.send([-1])

            until(lambda: take() or (found and found[-1].values[0] == -1))
            numbers = [message.sequence for message in found]
            assert reader.skipped == 0
            assert numbers == sorted(set(numbers))
            assert numbers[:taken] == list(range(taken))


@contextmanager
def serial_device() -> Iterator[tuple[int, str]]:
    """A pseudo-terminal: the device's end, and the path of the link's."""
    mine, other = pty.openpty()
    tty.setraw(other)
    path = os.ttyname(other)
    try:
        yield mine, path
    finally:
        for descriptor in (mine, other):
            try:
                os.close(descriptor)
            except OSError:
                # a test has hung up
                continue


def take_serial(descriptor: int, count: int) -> bytes:
    data = b""
    while len(data) < count:
        assert wait_readable(descriptor, PATIENCE)
        data += os.read(descriptor, count - len(data))
    return data


def test_a_serial_line_carries_messages_among_garbage() -> None:
    with serial_device() as (device, path), link_to(Serial(path)) as link:
        assert link.address == f"serial://{path}"
        link.send([5])
        command = COMMANDS.decode(take_serial(device, COMMANDS.size))
        assert command is not None
        assert command.values.tolist() == [5.0]
        # every byte value comes through as it is
        os.write(device, bytes(range(256)) + reading(0)[:20])
        os.write(device, reading(0)[20:] + b"sLnk\x01\x02")
        os.write(device, reading(1)[:-1])
        found = link.receive(PATIENCE)
        assert found is not None
        assert found.sequence == 0
        assert link.receive(0.02) is None
        os.write(device, reading(1)[-1:])
        found = link.receive(PATIENCE)
        assert found is not None
        assert found.sequence == 1
        assert link.statistics.damaged == 256 + 6


def test_a_full_serial_line_drops_whole_commands_and_never_waits() -> None:
    with serial_device() as (device, path), link_to(Serial(path)) as link:
        taken = fill(link)
        reader, found = StreamReader(COMMANDS), []
        os.set_blocking(device, False)

        def take() -> None:
            try:
                found.extend(reader.feed(os.read(device, 1 << 20)))
            except BlockingIOError:
                link.send([-1])

        until(lambda: take() or (found and found[-1].values[0] == -1))
        numbers = [message.sequence for message in found]
        assert reader.skipped == 0
        assert numbers == sorted(set(numbers))
        assert numbers[:taken] == list(range(taken))


def test_a_serial_line_that_is_unplugged_leaves_a_clear_state() -> None:
    with serial_device() as (device, path), link_to(Serial(path)) as link:
        link.arm()
        os.close(device)
        until(lambda: link.receive(0.01) or not link.connected)
        assert link.trouble
        assert link.receive(0.01) is None
        assert link.send([1]) == 0
        assert link.statistics.dropped == 1


def test_a_serial_port_that_is_missing_or_taken_is_said_to_be() -> None:
    with serial_device() as (_, path):
        first, second = link_to(Serial(path)), link_to(Serial(path))
        first.arm()
        with pytest.raises(LinkUnavailableError, match="lock"):
            second.arm()
        # a fork of this process holds the file; that must not keep the lock
        reading_end, writing_end = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(writing_end)
            os.read(reading_end, 1)
            os._exit(0)
        os.close(reading_end)
        try:
            first.close()
            second.arm()
            second.close()
        finally:
            os.close(writing_end)
            os.waitpid(child, 0)
    with pytest.raises(LinkUnavailableError, match="could not open"):
        link_to(Serial("/dev/there-is-no-such-port")).arm()
    with pytest.raises(LinkUnavailableError, match="cannot be opened"):
        link_to(Serial("/dev/null")).arm()
    for baudrate in (0, -1, 9600.0, True, "9600", 10**12):
        with pytest.raises(ConfigurationError, match="baudrate"):
            Serial(path, baudrate=baudrate)  # type: ignore[arg-type]
    for timeout in (0.0, -1.0, float("nan")):
        with pytest.raises(ConfigurationError, match="timeout"):
            TCP("127.0.0.1:1", timeout=timeout)
