"""What a save and a restore cost, side by side with what else there is, and against the machine's own limits.

    python scripts/bench_save.py
    python scripts/bench_save.py --parts b --scale 0.25
    python scripts/bench_save.py --parts loop saves

All contenders save the same live objects in turn, in an order that rotates, as do the machine's limits: a copy of what
is new into memory that was touched before, and a plain write of everything with fsync, in blocks of 1 MiB as
`dd bs=1M conv=fsync` does. A save's stall lasts until training may go on. It is durable when its files and the folders
that name them are synced: simckpt does so itself; for peers it is done after them and counted. Cold restores read files
that were dropped from the page cache (`posix_fadvise`, DONTNEED; a host below may still hold them), warm ones what was
read just before. Each contender's last save is restored once into spoiled objects and compared bit by bit, and in that
save the networks change as soon as it has returned. Medians have 95 % intervals by order statistics; of fewer than six
runs they are the smallest and the largest.
"""

import argparse
import contextlib
import importlib.metadata
import os
import platform
import shutil
import statistics
import tempfile
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import bench_contenders as contenders
import torch
from bench_contenders import Simckpt, SimckptForeground, SimckptProcess, available
from bench_harness import Bar, Limits, Measured, compare
from bench_loop import LoopPlan, run_loop, run_saves
from bench_sim import median, ratios
from bench_states import SAC, Subject, large_state, ppo_state

import simckpt

PARTS = ("a", "b", "c", "loop", "saves")
THREAD, PROCESS, FOREGROUND = "simckpt, thread", "simckpt, process", "simckpt, foreground"
STALL_BAR, STALL_EXTRA = 1.5, 0.005  # times the copy, plus [s]
FULL_SPEED_BAR = 0.9  # of what the plain write reaches
WARM_BAR = 3.5  # times the fastest of the peers
SB3_STALL_BAR, SB3_BYTES_BAR = 100.0, 60.0  # times less
RESTORE_PEERS = ("torch.save", "safetensors", "DCP save")
SAVE_PEERS = ("torch.save", "safetensors", "DCP save", "torchrl.checkpoint")


@dataclass(frozen=True)
class Plan:
    """How much is measured.

    Attributes:
        scale: of the 1 GB of parameters.
        rounds, large_rounds: saves of the PPO state, and of the two large ones.
        restores: restores of each.
        capacity, new_rows: of the replay buffer [rows].
        loop: of the training loop.
        saves: how many in a row.
        few_peers: of the replay buffer's, only the one with a bar.
    """

    scale: float
    rounds: int = 15
    large_rounds: int = 3
    restores: int = 3
    capacity: int = 1_000_000
    new_rows: int = 10_000
    loop: LoopPlan = field(default_factory=LoopPlan)
    saves: int = 1000
    few_peers: bool = False


def quick(scale: float) -> Plan:
    """Returns a plan that shows that everything works, and no figures to be quoted."""
    return Plan(
        scale=scale / 1000,
        rounds=2,
        large_rounds=2,
        restores=2,
        capacity=2000,
        new_rows=50,
        loop=LoopPlan(capacity=2000, new_rows=50, pairs=2, steps=5),
        saves=30,
    )


def show(limits: Limits, shown: dict[str, Measured]) -> None:
    """Prints two tables, of saves and of restores."""
    print(
        f"  {'saves':26}{'stall [ms]':>26}{'x copy':>8}{'durable [ms]':>26}{'x write':>8}{'MB':>10}{'memory [MB]':>16}"
    )
    print(f"  {'memory copy of what is new':26}{milliseconds(limits.copies):>26}")
    print(f"  {'write and fsync of all':26}{'':34}{milliseconds(limits.writes):>26}")
    for name, found in shown.items():
        memory = f"{found.peaks[0] / 1e6:.0f}, then {statistics.median(found.peaks[1:]) / 1e6:.0f}"
        print(
            f"  {name:26}{milliseconds(found.stall):>26}{ratios(found.stall, limits.copies).value:8.2f}"
            f"{milliseconds(found.durable):>26}{ratios(found.durable, limits.writes).value:8.2f}"
            f"{statistics.median(found.written) / 1e6:10.2f}{memory:>16}"
        )
    print(f"  {'restores, bits compared':26}{'cold [ms]':>26}{'x':>8}{'warm [ms]':>26}{'x':>8}{'memory [MB]':>26}")
    fastest = [min(statistics.median(getattr(each, kind)) for each in shown.values()) for kind in ("cold", "warm")]
    for name, found in shown.items():
        print(
            f"  {name:26}{milliseconds(found.cold):>26}{statistics.median(found.cold) / fastest[0]:8.2f}"
            f"{milliseconds(found.warm):>26}{statistics.median(found.warm) / fastest[1]:8.2f}"
            f"{found.restore_peak / 1e6:26.0f}"
        )


def milliseconds(durations: Sequence[float]) -> str:
    """Returns the median and its interval [ms]."""
    found = median([duration * 1e3 for duration in durations])
    digits = 2 if found.value < 100 else 0
    return f"{found.value:.{digits}f} [{found.low:.{digits}f}, {found.high:.{digits}f}]"


def stall_bars(part: str, limits: Limits, shown: dict[str, Measured]) -> list[Bar]:
    """Returns the bars of the stall of background saves."""
    allowed = [STALL_BAR * copy + STALL_EXTRA for copy in limits.copies]
    text = f"({part}) {{}}: stall over {STALL_BAR:g} x copy + {STALL_EXTRA * 1e3:g} ms"
    return [
        Bar(text.format(name), ratios(shown[name].stall, allowed).value, 1.0)
        for name in (THREAD, PROCESS)
        if name in shown
    ]


def whole_bars(part: str, limits: Limits, shown: dict[str, Measured]) -> list[Bar]:
    """Returns the bars of writing and restoring a whole state."""
    saves, restores = shown[FOREGROUND], shown[THREAD]
    speed = ratios(limits.writes, saves.durable).value
    bars = [Bar(f"({part}) full state: speed over that of a plain write", speed, FULL_SPEED_BAR, at_least=True)]
    for name in SAVE_PEERS:
        ratio = ratios(saves.durable, shown[name].durable).value
        bars.append(Bar(f"({part}) full state: time to durable over that of {name}", ratio, 1.0))
    for name in RESTORE_PEERS:
        ratio = ratios(restores.cold, shown[name].cold).value
        bars.append(Bar(f"({part}) cold restore over that of {name}", ratio, 1.0))
    fastest = min(RESTORE_PEERS, key=lambda name: statistics.median(shown[name].warm))
    ratio = ratios(restores.warm, shown[fastest].warm).value
    return [*bars, Bar(f"({part}) warm restore over the fastest, {fastest}", ratio, WARM_BAR)]


def run_a(plan: Plan, home: Path) -> list[Bar]:
    """Shows a PPO-sized state."""
    subject = ppo_state(num_envs=16)
    describe("a", subject)
    kinds = [Simckpt, SimckptProcess, SimckptForeground, *contenders.GENERAL, contenders.DCPProcess]
    shown = compare(subject, available(kinds), home, warmup=True, rounds=plan.rounds, restores=plan.rounds)
    show(*shown)
    return stall_bars("a", *shown) + whole_bars("a", *shown)


def run_b(plan: Plan, home: Path) -> list[Bar]:
    """Shows the large state, in two heats: buffers for staging are as large as the state, and not all would fit."""
    subject = large_state(plan.scale)
    bars: list[Bar] = []
    heats = [
        [Simckpt, SimckptForeground, *(kind for kind in contenders.GENERAL if kind is not contenders.DCPAsync)],
        [SimckptProcess, contenders.DCPAsync, contenders.DCPProcess],
    ]
    for number, kinds in enumerate(heats):
        describe("b", subject)
        shown = compare(
            subject,
            available(kinds),
            home / f"heat-{number}",
            warmup=False,
            rounds=plan.large_rounds,
            restores=plan.restores,
        )
        show(*shown)
        bars += stall_bars("b", *shown)
        bars += [] if number else whole_bars("b", *shown)
        shutil.rmtree(home / f"heat-{number}")
    return bars


def run_c(plan: Plan, home: Path) -> list[Bar]:
    """Shows SAC with a full replay buffer, against what SB3 does."""
    subject = SAC(plan.capacity, plan.new_rows)
    describe("c", subject)
    own = [Simckpt, SimckptProcess, SimckptForeground, contenders.SimckptOwnBuffer]
    peers = [contenders.SB3]
    if not plan.few_peers:
        peers += [contenders.TorchRLBuffer, contenders.TorchSave, contenders.DCPAsync]
    limits, shown = compare(
        subject, available([*own, *peers]), home, warmup=True, rounds=plan.large_rounds, restores=plan.restores
    )
    show(limits, shown)
    thread, sb3 = shown[THREAD], shown["SB3 save"]
    rows = {name: found.new_rows for name, found in shown.items() if found.new_rows}
    print(f"  rows that the last save wrote: {', '.join(f'{name} {count:,}' for name, count in rows.items())}")
    return [
        *stall_bars("c", limits, shown),
        Bar(
            "(c) stall of SB3 over that of simckpt", ratios(sb3.stall, thread.stall).value, SB3_STALL_BAR, at_least=True
        ),
        Bar(
            "(c) bytes of SB3 over those of simckpt",
            ratios(sb3.written, thread.written).value,
            SB3_BYTES_BAR,
            at_least=True,
        ),
        Bar(f"(c) rows written for {plan.new_rows:,} new rows", thread.new_rows, plan.new_rows),
    ]


def describe(part: str, subject: Subject) -> None:
    """Prints what is saved."""
    tensors = subject.tensors().values()
    size, new = sum(tensor.nbytes for tensor in tensors) / 1e6, sum(array.nbytes for array in subject.fresh()) / 1e6
    print(
        f"\n({part}) {subject.title}: {size:,.2f} MB in {len(tensors)} tensors, of which a save finds {new:,.2f} MB new"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="which to run; all by default")
    parser.add_argument("--scale", type=float, default=1.0, help="of the 1 GB of parameters: 1 needs 20 GB of memory")
    parser.add_argument(
        "--folder", type=Path, help="where to write, on the disk to be measured; needs 35 GB at scale 1"
    )
    parser.add_argument("--rounds", type=int, default=3, help="saves of each large state")
    parser.add_argument("--restores", type=int, default=3, help="restores of each large state")
    parser.add_argument("--few-peers", action="store_true", help="(c): beside simckpt's, SB3 alone")
    parser.add_argument("--quick", action="store_true", help="tiny sizes: shows that it works, not what it costs")
    args = parser.parse_args()
    plan = (
        quick(args.scale)
        if args.quick
        else Plan(args.scale, large_rounds=args.rounds, restores=args.restores, few_peers=args.few_peers)
    )

    # a save that fails would only be told by a warning, and be fast
    warnings.simplefilter("error", simckpt.SaveFailedWarning)
    warnings.filterwarnings("ignore", category=UserWarning, module="torch.distributed")
    torch.set_num_threads(1)
    load = ", ".join(f"{value:.1f}" for value in os.getloadavg())
    print(f"{os.cpu_count()} cores, load average {load}, {platform.machine()}, Python {platform.python_version()}")
    print(", ".join(f"{name} {version}" for name, version in versions().items()))
    print("medians with the interval that holds them with 95 % confidence; below six runs smallest and largest")
    if args.quick:
        print("quick: the sizes are too small for the figures and the bars to mean anything")
    bars = []
    with tempfile.TemporaryDirectory(prefix="bench-save-", dir=args.folder) as folder:
        for part in args.parts:
            bars += run(part, plan, Path(folder) / part)
    print()
    for bar in bars:
        print(bar)
    missed = sum(not bar.passed for bar in bars)
    print(f"\n{missed or 'no'} of {len(bars)} bars missed; load average now {os.getloadavg()[0]:.1f}")


def run(part: str, plan: Plan, home: Path) -> list[Bar]:
    """Runs one part; returns its bars."""
    match part:
        case "a":
            return run_a(plan, home)
        case "b":
            return run_b(plan, home)
        case "c":
            return run_c(plan, home)
        case "loop":
            return run_loop(plan.loop, home)
        case _:
            return run_saves(plan.saves, home)


def versions() -> dict[str, str]:
    """Returns the versions of what is compared, as far as it is installed."""
    names = ("torch", "safetensors", "h5py", "stable-baselines3", "torchrl", "orbax-checkpoint")
    found = {}
    for name in names:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


if __name__ == "__main__":
    main()
