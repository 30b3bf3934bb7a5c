"""Measures what recording costs a loop at 500 Hz with a device, and whether the loop keeps its rate meanwhile.

The loop and `scripts/hardware_device.py` speak over UDP with loss and jitter. Three loops take turns in one process, in
the order ABC CBA, each with an env of its own: without a recorder, with one that takes no snapshots, and with one that
takes a snapshot every second. A step is timed from its tick to its end, without the wait for the tick; a tick is missed
if the loop is still busy when it comes.

    python scripts/bench_hardware.py
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from envs.cart_pole_in_the_loop import CartPoleInTheLoopEnv  # noqa: E402
from envs.motor import Motor  # noqa: E402
from simckpt.hardware import UDP, Link, Pace, Recorder  # noqa: E402

WARM_UP = 0.2  # of a block that is not counted: the one before is still being written


class NoPace(Pace):
    """In place of the env's own pace: the bench waits before it starts the clock."""

    def wait(self) -> None:
        """Returns at once."""


@dataclass
class Loop:
    """One of the loops, and what it has shown.

    Attributes:
        times: of the steps, on the clock [ns].
        processor: the same of the loop's thread alone, on the processor [ns]; a busy machine changes it less.
        ticks: that came, whether they were met or missed.
        missed: ticks that were not met.
        held: steps without a reading.
    """

    name: str
    env: Any
    observation: Any = None
    times: list[int] = field(default_factory=list)
    processor: list[int] = field(default_factory=list)
    ticks: int = 0
    missed: int = 0
    held: int = 0

    def run(self, rate: float, seconds: float) -> None:
        """Steps for one block."""
        pace = Pace(rate)
        begun = time.monotonic()
        counted = missed_before = 0
        while counted == 0 or time.monotonic() < begun + seconds:
            pace.wait()
            if time.monotonic() < begun + WARM_UP * seconds:
                missed_before = pace.missed
            used, started = time.thread_time_ns(), time.monotonic_ns()
            observation, _, fallen, _, info = self.env.step(balance(self.observation))
            finished, used = time.monotonic_ns(), time.thread_time_ns() - used
            self.observation = observation if not fallen else self.env.reset()[0]
            if started / 1e9 >= begun + WARM_UP * seconds:
                counted += 1
                self.times.append(finished - started)
                self.processor.append(used)
                self.held += info["held"]
        self.missed += pace.missed - missed_before
        self.ticks += counted + pace.missed - missed_before


def balance(observation: np.ndarray) -> np.ndarray:
    """Returns the action that keeps the pole up."""
    position, angle, velocity, turning = observation[:4]
    return np.array([0.3 * position + 5.0 * angle + 0.6 * velocity + 0.9 * turning])


@contextlib.contextmanager
def device(args: argparse.Namespace) -> Iterator[str]:
    """Starts the device, and gives its address."""
    flags = ["--loss", str(args.loss), "--latency-ms", "0.3", "--jitter-ms", "0.5", "--rate", str(args.rate)]
    command = [sys.executable, str(ROOT / "scripts" / "hardware_device.py"), *flags]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield process.stdout.readline().strip().removeprefix("udp://")
        finally:
            process.terminate()
            process.communicate()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", type=float, default=500.0, help="[steps/s]")
    parser.add_argument("--block", type=float, default=5.0, help="[s]")
    parser.add_argument("--rounds", type=int, default=4, help="of ABC CBA")
    parser.add_argument("--loss", type=float, default=0.05)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, device(args) as address, contextlib.ExitStack() as stack:
        loops = []
        for name, settings in (
            ("without a recorder", None),
            ("recorded", {"snapshot_every": None}),
            ("recorded, a snapshot every second", {"snapshot_every": 1.0}),
        ):
            link = Link(UDP(address), command=Motor.command, reading=Motor.reading, name="motor")
            env: Any = CartPoleInTheLoopEnv(link, rate=args.rate)
            env.pace = NoPace(args.rate)
            if settings is not None:
                env = Recorder(env, Path(folder) / "store", name=f"loop-{len(loops)}", **settings)
            stack.callback(env.close)
            loops.append(Loop(name, env, env.reset(seed=0)[0]))
        gc.collect()
        gc.freeze()
        for _ in range(args.rounds):
            for loop in (*loops, *reversed(loops)):
                loop.run(args.rate, args.block)
        stack.close()
        report(args, loops, Path(folder) / "store" / "sessions")


def report(args: argparse.Namespace, loops: list[Loop], sessions: Path) -> None:
    """Prints the table."""
    print(f"{args.rate:g} steps/s, {len(loops[0].times):,} steps each, blocks of {args.block:g} s")
    columns = ("processor", "median", "99 %", "99.9 %", "longest", "missed ticks", "held", "on disk")
    print(f"{'time of a step [us]':<36}" + "".join(f"{column:>16}" for column in columns))
    for number, loop in enumerate(loops):
        times = np.array(loop.times) / 1e3
        shown = [f"{np.median(loop.processor) / 1e3:.0f}"]
        shown += [f"{value:.0f}" for value in (*np.quantile(times, (0.5, 0.99, 0.999)), times.max())]
        shown += [f"{loop.missed} ({loop.missed / loop.ticks:.2%})", f"{loop.held / len(times):.1%}"]
        folder = sessions / f"loop-{number}"
        seconds = 2 * args.rounds * args.block
        size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) if folder.exists() else 0
        shown.append(f"{size / seconds / 1e3:.0f} kB/s" if size else "")
        print(f"{loop.name:<36}" + "".join(f"{value:>16}" for value in shown))
    plain = np.array(loops[0].times) / 1e3
    for loop in loops[1:]:
        more = np.quantile(np.array(loop.times) / 1e3, (0.5, 0.99, 0.999)) - np.quantile(plain, (0.5, 0.99, 0.999))
        shown = ", ".join(f"{value:+.0f}" for value in more)
        print(f"{loop.name}: {shown} us at the median, 99 % and 99.9 %, of {1e6 / args.rate:.0f} us between ticks")


if __name__ == "__main__":
    main()
