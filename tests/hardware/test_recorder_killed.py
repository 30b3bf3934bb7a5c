"""A recorder that is killed: what remains is readable, each row once, none but the one in progress lost, and exact."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hardware_helpers import PATIENCE

import simckpt
from envs.cart_pole_in_the_loop import CartPoleInTheLoopEnv
from envs.motor import Motor
from simckpt.hardware import UDP, Link, Replay
from simckpt.hardware.session import Session
from simckpt.storage.session_writing import SessionWriter

DEVICE = Path(__file__).parents[2] / "scripts" / "hardware_device.py"

# tells of each row once it is back in the loop, which is what a policy has seen
LOOP = """
import sys, time
import numpy as np
from envs.cart_pole_in_the_loop import CartPoleInTheLoopEnv
from envs.motor import Motor
from simckpt.hardware import Link, Recorder, UDP

store, address, rate, ring = sys.argv[1], sys.argv[2], float(sys.argv[3]), float(sys.argv[4])
link = Link(UDP(address), command=Motor.command, reading=Motor.reading, name="motor")
env = CartPoleInTheLoopEnv(link, rate=rate or None)
env = Recorder(env, store, "pole", part_seconds=1.0 if rate else 0.1, snapshot_every=5.0 if rate else 0.2,
               ring=ring or None)
print(env._recording.process.pid, flush=True)
rng = np.random.default_rng(0)
env.reset(seed=1)
row = 0
while True:
    observation, reward, fallen, _, _ = env.step(rng.uniform(-1, 1, 1))
    print(row, time.monotonic_ns(), observation.tobytes().hex(), flush=True)
    row += 1
    if fallen:
        env.reset()
"""


@contextmanager
def device(*flags: str) -> Iterator[str]:
    """Starts a device with losses; gives its address."""
    command = [sys.executable, str(DEVICE), "--udp", "127.0.0.1:0", "--loss", "0.05", *flags, "--seconds", "600"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield process.stdout.readline().strip().partition("://")[2]
        finally:
            process.terminate()
            process.communicate()


def recorded(
    path: Path,
    address: str,
    *,
    rows: int,
    rate: float = 0.0,
    ring: float = 0.0,
    both: bool = False,
    on_disk: int = 0,
) -> list[tuple[int, str]]:
    """Returns [(when [ns], observation)] of the rows that a loop has seen before it was killed.

    Args:
        path: of the store.
        address: of the device.
        rows: after so many it is killed,
        rate: at which it goes; as fast as it can if 0.
        ring: of the recorder.
        both: whether the recording process is killed at the same moment.
        on_disk: how many rows must be on the disk before.
    """
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", LOOP, str(path), address, str(rate), str(ring)]
    seen = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        writer = int(process.stdout.readline())
        for line in process.stdout:
            number, when, observation = line.split()
            assert int(number) == len(seen)
            seen.append((int(when), observation))
            if len(seen) >= rows and len(seen) % 50 == 0:
                if len(simckpt.Store(path).session("pole").rows if on_disk else ()) < on_disk:
                    continue
                if both:
                    os.kill(writer, signal.SIGKILL)
                process.kill()
        # a line that was torn is none
        if seen and len(seen[-1][1]) != len(seen[0][1]):
            seen.pop()
    return seen


def wait_for(path: Path, name: str = "pole") -> Session:
    """Returns the session once nobody writes it any longer."""
    deadline = time.monotonic() + PATIENCE
    while True:
        found = [session for session in simckpt.Store(path).sessions() if session.name == name]
        if found and found[0].status != "recording":
            return found[0]
        assert time.monotonic() < deadline, "the recording process goes on"
        time.sleep(0.05)


def assert_same_rows(session: Session, seen: list[tuple[int, str]], rows: int) -> None:
    table = session.read(["rows"])["rows"]
    assert table["row"].tolist() == list(range(rows))
    found = [observation.tobytes().hex() for observation in table["observation"]]
    assert found[: len(seen)] == [observation for _, observation in seen[:rows]]


def assert_exact(session: Session, address: str) -> None:
    link = Link(UDP(address), command=Motor.command, reading=Motor.reading, name="motor")
    with Replay(session, CartPoleInTheLoopEnv(link)) as replay:
        report = replay.run()
    assert report.exact, str(report)


def test_a_killed_recorder_leaves_every_row_that_was_whole(tmp_path) -> None:
    with device("--latency-ms", "0.2", "--jitter-ms", "0.5") as address:
        seen = recorded(tmp_path, address, rows=150)
    session = wait_for(tmp_path)
    assert session.status == "killed"
    # the last row may be in the session and not yet told
    rows = len(session.rows)
    assert rows in (len(seen), len(seen) + 1)
    assert_same_rows(session, seen, rows)
    assert session.missing == []
    with Replay(
        session, CartPoleInTheLoopEnv(Link(UDP(address), command=Motor.command, reading=Motor.reading, name="motor"))
    ) as replay:
        report = replay.run()
    assert report.exact, str(report)


def test_with_all_processes_killed_the_parts_that_were_written_are_left(tmp_path) -> None:
    with device("--latency-ms", "0.2") as address:
        seen = recorded(tmp_path, address, rows=200, both=True, on_disk=120)
    session = simckpt.Store(tmp_path).session("pole")
    assert session.status == "unfinished"
    rows = len(session.rows)
    assert 120 <= rows <= len(seen) + 1
    assert_same_rows(session, seen, rows)
    with SessionWriter(tmp_path, "pole") as writer:
        writer.close("killed")
    assert_same_rows(session, seen, rows)
    assert session.status == "killed"
    assert len(session.parts) <= 2


def test_a_ring_is_kept_when_its_process_is_killed(tmp_path) -> None:
    with device() as address:
        seen = recorded(tmp_path, address, rows=100, ring=3600.0)
    session = wait_for(tmp_path, "pole-1")
    assert session.mode == "ring"
    assert session.status == "killed"
    assert_same_rows(session, seen, len(session.rows))
    assert len(session.rows) in (len(seen), len(seen) + 1)


@pytest.mark.slow
@pytest.mark.parametrize("both", [False, True], ids=["recorder", "all-processes"])
def test_a_minute_at_500_hz_survives_a_kill_to_within_a_second(tmp_path, both) -> None:
    with device("--latency-ms", "1", "--jitter-ms", "0.5") as address:
        seen = recorded(tmp_path, address, rows=30_000, rate=500.0, both=both)
    session = wait_for(tmp_path)
    rows = len(session.rows)
    assert_same_rows(session, seen, rows)
    assert session.missing == []
    lost = (seen[-1][0] - seen[min(rows, len(seen)) - 1][0]) / 1e9
    # a part takes its time to be written, on a busy disk
    assert lost < (2.5 if both else 0.01)
    with Replay(
        session, CartPoleInTheLoopEnv(Link(UDP(address), command=Motor.command, reading=Motor.reading, name="motor"))
    ) as replay:
        report = replay.run()
    assert report.exact, str(report)
