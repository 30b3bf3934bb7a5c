"""`scripts/hardware_device.py`: a device in a process of its own, over each transport."""

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from hardware_helpers import PATIENCE

from envs.cart_pole_in_the_loop import CartPoleInTheLoopEnv
from envs.motor import Motor
from simckpt.hardware import TCP, UDP, Link, Serial, Transport

PROGRAM = Path(__file__).parents[2] / "scripts" / "hardware_device.py"


@contextmanager
def device(*flags: str) -> Iterator[tuple[subprocess.Popen[str], Link]]:
    """Starts the program; it ends with the block, or by itself should that fail."""
    command = [sys.executable, str(PROGRAM), *flags, "--seconds", "240"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            kind, _, where = process.stdout.readline().strip().partition("://")
            transports: dict[str, type[Transport]] = {"udp": UDP, "tcp": TCP, "serial": Serial}
            transport = transports[kind](where)  # type: ignore[call-arg]
            with Link(transport, command=Motor.command, reading=Motor.reading) as link:
                yield process, link
        finally:
            if process.poll() is None:
                process.terminate()
                process.communicate()


@pytest.mark.parametrize(
    "flags", [["--udp", "127.0.0.1:0"], ["--udp", "[::1]:0"], ["--tcp", "127.0.0.1:0"], ["--serial"]]
)
def test_an_env_runs_against_the_device(flags: list[str]) -> None:
    with device(*flags, "--latency-ms", "0.2", "--jitter-ms", "0.2") as (process, link):
        env = CartPoleInTheLoopEnv(link)
        env.reset(seed=0)
        deadline = time.monotonic() + PATIENCE
        forces = []
        # the motor is asked for 5 N, and comes close to it whatever the machine is doing
        while not forces or abs(forces[-1] - 5.0) > 0.2:
            observation, _, fallen, _, info = env.step(np.array([0.5]))
            forces.append(observation[4])
            if fallen:
                env.reset()
            assert time.monotonic() < deadline
        assert not info["held"]
        assert link.last is not None
        # a clock of its own
        assert abs(link.last.device_time - link.last.received) > 10**9
        process.terminate()
        output, _ = process.communicate()
        assert process.returncode == 0
        assert output.startswith("readings ")


def test_the_connection_loses_and_swaps_messages_as_it_is_told() -> None:
    with device("--loss", "0.2", "--latency-ms", "1", "--jitter-ms", "20", "--seed", "3") as (process, link):
        count = 500
        for step in range(count):
            link.send((0.0, step))
            link.receive_newest(0.002)
        deadline = time.monotonic() + PATIENCE
        while link.statistics.received < 500:
            link.receive(0.1)
            assert time.monotonic() < deadline
        counted = link.statistics
        # of 600 and more with a probability of 0.2 each, to five standard deviations
        share = counted.lost / (counted.lost + counted.received)
        assert abs(share - 0.2) < 5 * (0.2 * 0.8 / 600) ** 0.5
        assert counted.late > 0
        process.terminate()
        output, _ = process.communicate()
        received = int(output.split("commands ")[1].split(",")[0])
        assert abs(received - 0.8 * count) < 5 * (0.2 * 0.8 * count) ** 0.5


def test_after_the_cable_is_cut_nothing_comes_and_nothing_arrives() -> None:
    with device("--cut-after", "0.1") as (process, link):
        deadline = time.monotonic() + PATIENCE
        while link.statistics.received < 1:
            link.send((0.0, 0.0))
            link.receive(0.05)
            assert time.monotonic() < deadline
        while link.receive(0.5) is not None:
            assert time.monotonic() < deadline
        before = link.statistics
        for _ in range(20):
            link.send((0.0, 0.0))
        assert link.receive(0.1) is None
        assert link.statistics.sent == before.sent + 20
        # the program lives: this is the cable, not the device
        assert process.poll() is None
        process.terminate()
        output, _ = process.communicate()
        assert int(output.split("commands ")[1].split(",")[0]) <= before.sent
