"""What saves cost a training loop, and what a thousand of them in a row write and leave behind."""

import statistics
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import torch
import train_sac
from bench_harness import Bar, resident
from bench_sim import median, ratios

import simckpt

IN_FLIGHT_SHARE = 0.1  # of the time in flight may be lost on top of the stall
FOREGROUND_BAR = 1.5  # times a foreground save
NEW_BYTES_BAR, LEAF_BYTES = 1.1, 2048  # times what is new, plus [bytes per leaf]
ROWS_EACH = 20  # new rows of each of the many saves
SAMPLED_EVERY = 5  # saves
MEMORY_NOISE = 1_000_000  # [bytes] that malloc and the interpreter may have more or less at the end


@dataclass(frozen=True)
class LoopPlan:
    """How the training loop is measured.

    Attributes:
        capacity: of the full replay buffer [rows].
        new_rows: since the last save [rows].
        pairs: of a stretch with a save at its start and one without.
        steps: at least as many training steps in a stretch; it lasts at least twice as long as a save.
    """

    capacity: int = 200_000
    new_rows: int = 10_000
    pairs: int = 24
    steps: int = 20


class Training:
    """The loop of train_sac.py, one step at a time: one step of Ant-v5, one update."""

    def __init__(self, plan: LoopPlan) -> None:
        torch.set_num_threads(1)
        torch.manual_seed(1)
        self.args = train_sac.Args(env_id="Ant-v5", learning_starts=0, buffer_size=plan.capacity)
        self.envs = train_sac.make_envs(self.args, 1, "sync")
        spaces = self.envs.single_observation_space, self.envs.single_action_space
        self.agent = train_sac.Agent(spaces[0].shape[0], spaces[1], self.args.hidden)
        self.optimizers = {
            "critics": torch.optim.Adam(self.agent.critics.parameters(), lr=1e-3, fused=True),
            "policy": torch.optim.Adam([*self.agent.policy.parameters(), self.agent.log_alpha], lr=3e-4, fused=True),
        }
        self.replay = simckpt.ReplayBuffer(plan.capacity, *spaces, seed=1)
        observations, _ = self.envs.reset(seed=1)
        self.loop = simckpt.LoopState(step=0, observations=observations, dones=np.zeros(1, dtype=bool))
        self.rng = np.random.default_rng(1)
        self.fill(plan.capacity)

    def components(self) -> dict[str, Any]:
        """Returns what train_sac.py saves."""
        named = {f"optimizer_{name}": optimizer for name, optimizer in self.optimizers.items()}
        mine = {"envs": self.envs, "agent": self.agent, "replay": self.replay, "loop": self.loop}
        return {**mine, **named, "rng": simckpt.RNGStreams()}

    def fill(self, rows: int) -> None:
        """Adds random rows."""
        add_random_rows(self.replay, self.rng, rows)

    def step(self) -> None:
        """Makes one step of the env and one update."""
        actions = train_sac.choose_actions(self.agent, self.loop, self.args)
        following, rewards, terminated, truncated, _ = self.envs.step(actions)
        self.replay.add(
            self.loop.observations, actions, rewards, terminated, truncated, following, valid=~self.loop.dones
        )
        self.loop.observations, self.loop.dones = following, terminated | truncated
        self.loop.step += 1
        batch = train_sac.to_tensors(self.replay.sample(self.args.batch_size), "cpu")
        noise = torch.randn(2, *batch["actions"].shape)
        train_sac.update(self.agent, self.optimizers, batch, noise, self.args)


def add_random_rows(replay: "simckpt.ReplayBuffer", rng: np.random.Generator, rows: int) -> None:
    """Adds rows one by one, as a training loop does."""
    shapes = replay.observations.shape[1:], replay.actions.shape[1:]
    for _ in range(rows):
        observations, actions = rng.random(shapes[0]), rng.random(shapes[1], dtype=np.float32)
        ends = np.zeros((2, len(actions)), dtype=bool)
        replay.add(observations, actions, actions.sum(-1), *ends, observations)


@contextmanager
def opened(home: Path, components: dict[str, Any], background: str | None) -> Iterator[Any]:
    """Opens a checkpointer in a store of its own."""
    with simckpt.Store(home).start("bench") as run:
        keep = simckpt.KeepLast(2)
        with run.checkpointer(
            components, save_when=simckpt.EverySteps(1), keep=keep, background=background
        ) as checkpointer:
            yield checkpointer


def run_loop(plan: LoopPlan, home: Path, background: str = "thread") -> list[Bar]:
    """Prints what a background save costs the loop; returns its bars."""
    training = Training(plan)
    for _ in range(plan.steps):
        training.step()
    extra, allowed, stalls, flights, durable, foreground = [], [], [], [], [], []
    with opened(home, training.components(), background) as checkpointer:
        checkpointer.save(training.loop.step)
        number = plan.steps
        for pair in range(plan.pairs + 1):
            training.fill(plan.new_rows)
            training.loop.step += 1  # later than the save before
            # what is measured here sets the length of the stretches as well
            start = time.perf_counter()
            checkpointer.save(training.loop.step)
            foreground.append(time.perf_counter() - start)
            took = {}
            for saving in (True, False) if pair % 2 else (False, True):
                training.fill(plan.new_rows)
                training.loop.step += 1
                start = time.perf_counter()
                if saving:
                    save = checkpointer.step(training.loop.step)
                    stall = time.perf_counter() - start
                for _ in range(number):
                    training.step()
                took[saving] = time.perf_counter() - start
                if saving:
                    checkpoint = save.wait()
            number = max(plan.steps, int(2 * statistics.median(foreground) / (took[False] / number)))
            if not pair:
                # the first pair has warmed up everything and found the length
                foreground.clear()
                continue
            extra.append(took[True] - took[False])
            stalls.append(stall)
            durable.append(checkpoint.duration)
            flights.append(max(checkpoint.duration - stall, 0.0))
            allowed.append(stall + IN_FLIGHT_SHARE * flights[-1])
    mode = f"loop, {background}"
    print(
        f"\n({mode}) train_sac.py's loop on Ant-v5, {plan.new_rows:,} new rows each save, {plan.pairs} pairs of "
        f"{number} training steps with and without a save [ms]"
    )
    named = {
        "extra wall time for one save": extra,
        "stall": stalls,
        "in flight after it": flights,
        "durable": durable,
        "durable, foreground": foreground,
    }
    for text, values in named.items():
        print(f"  {text:30}{median([value * 1e3 for value in values])!s}")
    return [
        Bar(
            f"({mode}) extra wall time over the stall + {IN_FLIGHT_SHARE:.0%} of the time in flight",
            statistics.median(extra) / statistics.median(allowed),
            1.0,
        ),
        Bar(f"({mode}) durable over a foreground save", ratios(durable, foreground).value, FOREGROUND_BAR),
    ]


def run_saves(count: int, home: Path) -> list[Bar]:
    """Prints what many small saves write and leave behind; returns the bars."""
    rng = np.random.default_rng(1)
    box = gym.spaces.Box(-1, 1, (8,), np.float32)
    replay = simckpt.ReplayBuffer(ROWS_EACH * count * 2, box, box, seed=1)
    agent = torch.nn.Linear(8, 8)
    optimizer = torch.optim.Adam(agent.parameters())
    agent(torch.ones(8)).sum().backward()
    written: list[int] = []
    held: tuple[list[tuple[int, int, int]], ...] = ([], [])
    rows_written = 0
    seen: set[str] = set()
    with opened(home, {"agent": agent, "optimizer": optimizer, "replay": replay}, "thread") as checkpointer:
        for number in range(1, count + 1):
            add_random_rows(replay, rng, ROWS_EACH)
            optimizer.step()
            before = _written()
            checkpoint = checkpointer.step(number).wait()
            checkpointer.wait()
            written.append(_written() - before)
            rows_written += new_rows(checkpoint, seen)
            if number > count // 5 and number % SAMPLED_EVERY == 0:
                files = len(list(Path("/proc/self/fd").iterdir()))
                held[number > count * 3 // 5].append((resident(), threading.active_count(), files))
    leaves = checkpoint.leaves().values()
    row = sum(leaf.row_size for leaf in leaves if leaf.pieces)
    whole = sum(leaf.size for leaf in leaves if not leaf.pieces)
    new = whole + ROWS_EACH * row
    print(f"\n(saves) {count} saves in a row, {ROWS_EACH} new rows of {row} bytes each, merged beyond 128 segments")
    print(
        f"  {statistics.fmean(written):,.0f} bytes for a save (passed to write calls, /proc/self/io), of which are new "
        f"{new:,}: {whole:,} in leaves that are saved whole and {ROWS_EACH * row:,} in rows; {len(leaves)} leaves"
    )
    print(f"  each row was written {rows_written / (ROWS_EACH * count):.2f} times")
    # the largest of many samples, for what is held rises until a merge and then falls
    first, last = ([max(values) for values in zip(*samples, strict=True)] for samples in held)
    fifth = count // 5
    texts = ("resident memory [bytes]", "threads", "open files")
    print(f"  at most, in saves {fifth} to {3 * fifth} and after them: ", end="")
    print(", ".join(f"{text} {a:,} and {b:,}" for text, a, b in zip(texts, first, last, strict=True)))
    growth = [b - a for a, b in zip(first, last, strict=True)]
    last_half = f"in the last {count - 3 * fifth} saves"
    return [
        Bar(
            f"(saves) bytes over {NEW_BYTES_BAR:g} x new + {LEAF_BYTES} for each leaf",
            statistics.fmean(written) / (NEW_BYTES_BAR * new + LEAF_BYTES * len(leaves)),
            1.0,
        ),
        Bar(f"(saves) growth of resident memory {last_half} [MB]", growth[0] / 1e6, MEMORY_NOISE / 1e6),
        Bar(f"(saves) growth of the number of threads {last_half}", growth[1], 0),
        Bar(f"(saves) growth of the number of open files {last_half}", growth[2], 0),
    ]


def new_rows(checkpoint: "simckpt.Checkpoint", seen: set[str]) -> int:
    """Returns how many rows a checkpoint has in segments that are not in `seen` yet, where it adds them."""
    pieces = checkpoint.leaves()["replay/observations"].pieces
    found = {piece.segment: piece.rows for piece in pieces if piece.segment not in seen}
    seen |= set(found)
    return sum(found.values())


def _written() -> int:
    """Returns how many bytes this process has passed to write calls."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("wchar:"))
