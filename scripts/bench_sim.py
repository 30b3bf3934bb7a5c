"""What the snapshots of simulators weigh: the two simulator bars, each side by side with what it is measured against.

python scripts/bench_sim.py

What is compared runs in turn, in an order that rotates. Medians have 95 % intervals by order statistics, which assume
no distribution. The bars are held against the time on the processor (of the workers as well), for on a shared machine
others stretch the time on the clock; both are printed. Others slow the processor down, too, for cores and caches are
shared: under load, which is printed, times in microseconds tell little, and ratios much.
"""

import argparse
import math
import os
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gymnasium as gym
import mujoco
import numpy as np

import simckpt
from simckpt import state
from simckpt.sim import EnvHandle
from simckpt.sim.physics import Physics
from simckpt.sim.physics_batch import PhysicsBatch

ENV_ID = "Ant-v5"
PHYSICS_BAR = 2.0  # times a bare field-wise copy
SNAPSHOT_BAR = 150.0  # [us per env]
STEPPING_BAR = 1.02  # times the bare vector env
CONFIDENCE = 0.95
BLOCK = 5  # steps of one side before it is the other's turn


@dataclass
class Times:
    """Durations of one kind of work: on the clock and on the processor [s]."""

    wall: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)

    def measure(self, work: Callable[[], Any], workers: Sequence[int] = ()) -> None:
        """Runs `work` once; what it returns is freed outside the measured time.

        Args:
            work: what is measured.
            workers: ids of the processes whose time on the processor counts as well.
        """
        wall, cpu = time.perf_counter(), time.process_time() + workers_time(workers)
        result = work()
        self.wall.append(time.perf_counter() - wall)
        self.cpu.append(time.process_time() + workers_time(workers) - cpu)
        del result


def workers_time(workers: Sequence[int]) -> float:
    """Returns how long processes have run on a processor so far [s]."""
    return sum(int(Path(f"/proc/{pid}/schedstat").read_text().split()[0]) for pid in workers) * 1e-9


@dataclass(frozen=True)
class Median:
    """A median and the interval that holds it with 95 % confidence."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        digits = 3 if self.value < 10 else 1
        return f"{self.value:.{digits}f} [{self.low:.{digits}f}, {self.high:.{digits}f}]"


def median(values: Sequence[float]) -> Median:
    """Returns the median and its interval between two order statistics, by the binomial distribution."""
    ordered, count = sorted(values), len(values)
    # the k-th smallest and the k-th largest miss the median with probability 2 P(B(n, 1/2) < k)
    rank, tail = 0, 2 * 0.5**count
    while tail <= 1 - CONFIDENCE:
        rank += 1
        tail += 2 * math.comb(count, rank) * 0.5**count
    rank = max(rank - 1, 0)
    return Median(statistics.median(ordered), ordered[rank], ordered[count - 1 - rank])


def ratios(one: Sequence[float], other: Sequence[float]) -> Median:
    """Returns the median of the ratios of durations that were measured next to each other."""
    return median([a / b for a, b in zip(one, other, strict=True)])


def per_env(durations: Sequence[float], num_envs: int) -> Median:
    """Returns the median [us per env]."""
    return median([duration / num_envs * 1e6 for duration in durations])


def verdict(value: float, bar: float) -> str:
    """Returns whether the bar is kept, and by how much."""
    return f"{'pass' if value <= bar else 'MISS'} by {abs(value / bar - 1):.1%} (bar {bar:g})"


def copy_looked_up(simulations: Sequence[Physics]) -> list[dict[str, Any]]:
    """Returns the fields of each simulation, each looked up by its name, as a plain program copies them."""
    return [
        {
            **{name: _field(physics.data, name).copy() for name in physics.arrays},
            **{name: getattr(physics.data, name) for name in physics.scalars},
        }
        for physics in simulations
    ]


def _field(data: mujoco.MjData, name: str) -> Any:
    owner, _, attribute = name.rpartition(".")
    return getattr(getattr(data, owner), attribute) if owner else getattr(data, attribute)


def copy_cached(simulations: Sequence[Physics]) -> list[dict[str, Any]]:
    """Returns the same, from views that were looked up beforehand: the cheapest that numpy allows field by field."""
    return [
        {
            **{name: array.copy() for name, array in physics.arrays.items()},
            **{name: getattr(physics.data, name) for name in physics.scalars},
        }
        for physics in simulations
    ]


def snapshots(num_envs: int, rounds: int) -> bool:
    """Prints the bars of an in-memory snapshot; returns whether they are kept."""
    envs = simckpt.make_vec(ENV_ID, num_envs, vectorization_mode="sync")
    envs.reset(seed=1)
    rng = np.random.default_rng(1)
    simulations = [EnvHandle(env).simulations["physics"] for env in envs.envs]
    batch = PhysicsBatch(simulations)
    kinds: dict[str, tuple[Times, Callable[[], Any]]] = {
        "looked up": (Times(), lambda: copy_looked_up(simulations)),
        "cached": (Times(), lambda: copy_cached(simulations)),
        "physics": (Times(), batch.capture),
        "model": (Times(), lambda: [physics.capture_model() for physics in simulations]),
        "whole": (Times(), envs.state_dict),
    }
    for round_number in range(rounds + 2):
        for turn in range(len(kinds)):
            name = list(kinds)[(turn + round_number) % len(kinds)]
            times, work = kinds[name]
            # a step before each: all of them then find what the training loop leaves in the caches
            envs.step(rng.uniform(-1, 1, envs.action_space.shape).astype(np.float32))
            (times if round_number >= 2 else Times()).measure(work)
    times = {name: kind[0] for name, kind in kinds.items()}

    print(f"in-memory snapshot of {num_envs} {ENV_ID} envs, sync, {rounds} rounds [us per env]")
    rows = {
        "looked up": "bare copy of the fields, each looked up",
        "cached": "bare copy of the fields, views cached",
        "physics": "physics: the same fields, all envs",
        "model": "model: what differs from the baseline",
        "whole": "whole snapshot, state_dict()",
    }
    _print_header()
    for name, text in rows.items():
        _print_row(text, per_env(times[name].cpu, num_envs), per_env(times[name].wall, num_envs))
    rest = [
        [c - a - b for a, b, c in zip(times["physics"].cpu, times["model"].cpu, times["whole"].cpu, strict=True)],
        [c - a - b for a, b, c in zip(times["physics"].wall, times["model"].wall, times["whole"].wall, strict=True)],
    ]
    _print_row("rest: Python objects, the vector env's own", *(per_env(values, num_envs) for values in rest))
    kept = []
    for name in ("looked up", "cached"):
        found = ratios(times["physics"].cpu, times[name].cpu)
        on_clock = ratios(times["physics"].wall, times[name].wall)
        _print_row(f"physics over {rows[name]}", found, on_clock, verdict(found.value, PHYSICS_BAR))
        kept.append(found.value <= PHYSICS_BAR)
    whole = per_env(times["whole"].cpu, num_envs)
    print(f"  whole snapshot, on the processor: {verdict(whole.value, SNAPSHOT_BAR)}")
    _restores(envs, num_envs)
    envs.close()
    return all(kept) and whole.value <= SNAPSHOT_BAR


def _restores(envs: simckpt.SnapshotVectorEnv, num_envs: int) -> None:
    saved = envs.state_dict()
    restore, encoding = Times(), Times()
    for _ in range(5):
        envs.step(envs.action_space.sample())
        restore.measure(lambda: envs.load_state_dict(saved))
        snapshot = envs.state_dict()
        encoding.measure(lambda snapshot=snapshot: state.encode(snapshot))
    _print_row("restore, load_state_dict()", per_env(restore.cpu, num_envs), per_env(restore.wall, num_envs))
    _print_row("joined and encoded for a file", per_env(encoding.cpu, num_envs), per_env(encoding.wall, num_envs))
    encoded = state.encode(saved)
    sizes = {"models": 0, "physics": 0, "other": 0}
    for path, leaf in encoded.leaves.items():
        part = path.partition("/")[0]
        sizes[part if part in sizes else "other"] += leaf.data.nbytes
    sizes["other"] += len(encoded.structure)
    each = (sizes["physics"] + sizes["other"]) / num_envs
    print(
        f"  {each:,.0f} bytes per env ({sizes['physics'] / num_envs:,.0f} of them physics), and "
        f"{sizes['models']:,} bytes once for the model"
    )


def stepping(mode: str, num_envs: int, pairs: int, steps: int) -> bool:
    """Prints what a step through the wrapper costs against the bare vector env; returns whether the bar is kept."""
    # two of each, made in the order ABBA: two equal vector envs differ by up to a percent by where their memory lies
    bare, wrapped = "bare gymnasium", "through simckpt.make_vec"
    made = [(kind, _make(kind == wrapped, mode, num_envs)) for kind in (bare, wrapped, wrapped, bare)]
    rng = np.random.default_rng(2)
    times = {bare: Times(), wrapped: Times()}
    for pair in range(-2, pairs):
        blocks = {bare: Times(), wrapped: Times()}
        # short blocks, for the load of a shared machine changes within a second
        for block in range(steps // BLOCK):
            actions = rng.uniform(-1, 1, (BLOCK, *made[0][1].action_space.shape)).astype(np.float32)
            couple = made[:2] if block % 2 == 0 else made[2:]
            for kind, envs in couple if block % 4 < 2 else reversed(couple):
                workers = [process.pid for process in getattr(envs.unwrapped, "processes", ())]
                blocks[kind].measure(lambda envs=envs, actions=actions: run(envs, actions), workers)
        for kind, found in blocks.items() if pair >= 0 else ():
            times[kind].wall.append(sum(found.wall))
            times[kind].cpu.append(sum(found.cpu))
    for _, envs in made:
        envs.close()

    print(
        f"\nstepping {ENV_ID} x {num_envs}, {mode}, {pairs} pairs of {steps} steps, ABBA by {BLOCK} [us per env step]"
    )
    _print_header()
    for kind, found in times.items():
        _print_row(kind, per_env(found.cpu, num_envs * steps), per_env(found.wall, num_envs * steps))
    on_processor = ratios(times[wrapped].cpu, times[bare].cpu)
    on_clock = ratios(times[wrapped].wall, times[bare].wall)
    _print_row("ratio", on_processor, on_clock)
    print(f"  upper end, on the processor: {verdict(on_processor.high, STEPPING_BAR)}")
    print(f"  upper end, on the clock:     {verdict(on_clock.high, STEPPING_BAR)}")
    return on_processor.high <= STEPPING_BAR


def _make(wrapped: bool, mode: str, num_envs: int) -> Any:
    envs = (simckpt if wrapped else gym).make_vec(ENV_ID, num_envs, vectorization_mode=mode)
    # equal seeds and actions: all simulate the same contacts, so what differs is the wrapper
    envs.reset(seed=3)
    return envs


def run(envs: Any, actions: Any) -> None:
    """Steps a vector env."""
    for action in actions:
        envs.step(action)


def _print_header() -> None:
    print(f"  {'':56} {'processor':>24} {'clock':>24}")


def _print_row(text: str, cpu: Median, wall: Median, note: str = "") -> None:
    print(f"  {text:56} {cpu!s:>24} {wall!s:>24}  {note}".rstrip())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--num-envs", type=int, default=64, help="of the snapshots")
    parser.add_argument("--rounds", type=int, default=20, help="of the snapshots")
    parser.add_argument("--pairs", type=int, default=30, help="of the stepping")
    parser.add_argument("--steps", type=int, default=40, help="in each half of a pair; a multiple of 20")
    args = parser.parse_args()

    load = ", ".join(f"{value:.1f}" for value in os.getloadavg())
    print(f"{os.cpu_count()} cores, load average {load}, {platform.machine()}, Python {platform.python_version()}")
    print(f"gymnasium {gym.__version__}, mujoco {mujoco.__version__}, numpy {np.__version__}")
    print("medians, with the interval that holds them with 95 % confidence\n")
    kept = [
        snapshots(args.num_envs, args.rounds),
        stepping("sync", 8, args.pairs, args.steps),
        stepping("async", 8, args.pairs, args.steps),
    ]
    print(f"\n{'all bars kept' if all(kept) else 'a bar was missed'}; load average now {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
