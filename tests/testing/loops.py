"""Training loops that a fresh process can import: a sound one, and one for each thing that a loop can forget.

torch and gymnasium are imported by those that need them alone: a test starts up to six processes.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

import simckpt
from simckpt.policies import KeepRows, RollbackPolicy


def run_loop(
    store: simckpt.Store,
    body: Callable[[simckpt.LoopState], None],
    *,
    until: int = 40,
    loop: simckpt.LoopState | None = None,
    name: str = "run",
    **components: Any,
) -> None:
    """Calls `body` and then `Checkpointer.step`, each ten steps; policies would save seldom and keep little."""
    loop = loop or simckpt.LoopState(step=0)
    save_when, keep = simckpt.EverySteps(1000), simckpt.KeepLast(1)
    with store.start(name) as run:
        checkpointer = run.checkpointer({**components, "loop": loop}, save_when=save_when, keep=keep)
        checkpointer.restore_latest()
        while loop.step < until:
            body(loop)
            loop.step += 10
            checkpointer.step(loop.step, {"return": float(loop.step)})


def nothing(loop: simckpt.LoopState) -> None:
    pass


def sound(store: simckpt.Store) -> None:
    """A policy gradient on CartPole, which draws its actions from torch's default generator."""
    import gymnasium as gym
    import torch

    torch.set_num_threads(1)
    torch.manual_seed(3)
    # short episodes: some end, and are followed by a reset, within the loop
    envs = gym.make_vec("CartPole-v1", num_envs=2, vectorization_mode="sync", max_episode_steps=3)
    loop = simckpt.LoopState(step=0, observations=envs.reset(seed=3)[0])
    agent = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2))
    optimizer = torch.optim.Adam(agent.parameters(), lr=0.05)

    def improve(loop: simckpt.LoopState) -> None:
        outputs = agent(torch.as_tensor(loop.observations))
        actions = torch.multinomial(outputs.softmax(-1).detach(), 1)
        loop.observations, *_ = envs.step(actions.squeeze(-1).numpy())
        weights = torch.as_tensor(loop.observations[:, 0])
        optimizer.zero_grad()
        (-outputs.log_softmax(-1).gather(-1, actions).squeeze(-1) * weights).mean().backward()
        optimizer.step()

    streams = simckpt.RNGStreams()
    run_loop(store, improve, until=60, loop=loop, envs=envs, agent=agent, optimizer=optimizer, rng=streams)


def sound_script(store: simckpt.Store) -> None:
    run_loop(store, nothing)
    sys.exit()


def forgets_optimizer(store: simckpt.Store) -> None:
    import torch

    torch.manual_seed(3)
    agent = torch.nn.Linear(3, 1)
    optimizer = torch.optim.Adam(agent.parameters(), lr=0.05)

    def improve(loop: simckpt.LoopState) -> None:
        optimizer.zero_grad()
        (agent(torch.ones(3)) - loop.step).square().sum().backward()
        optimizer.step()

    run_loop(store, improve, agent=agent)


def forgets_rng(store: simckpt.Store) -> None:
    np.random.seed(3)

    def draw(loop: simckpt.LoopState) -> None:
        loop.noise = np.random.standard_normal(3)

    run_loop(store, draw, loop=simckpt.LoopState(step=0, noise=np.zeros(3)))


def forgets_envs(store: simckpt.Store) -> None:
    import gymnasium as gym

    envs = gym.make_vec("Pendulum-v1", num_envs=2, vectorization_mode="sync")

    def observe(loop: simckpt.LoopState) -> None:
        loop.observations, *_ = envs.step(np.zeros((2, 1), np.float32))

    run_loop(store, observe, loop=simckpt.LoopState(step=0, observations=envs.reset(seed=3)[0]))


def forgets_counter(store: simckpt.Store) -> None:
    updates = 0

    def update(loop: simckpt.LoopState) -> None:
        nonlocal updates
        updates += 1
        loop.weights += 1.0 / updates

    run_loop(store, update, loop=simckpt.LoopState(step=0, weights=np.zeros(3)))


def forgets_stride(store: simckpt.Store) -> None:
    """Saves at 10, 30 and 60, from how many updates it has done."""
    updates = 0

    def stride(loop: simckpt.LoopState) -> None:
        nonlocal updates
        loop.step += 10 * updates
        updates += 1

    run_loop(store, stride)


def renames_itself(store: simckpt.Store) -> None:
    name = f"run-{len(store.runs()) if store.path.exists() else 0}"
    run_loop(store, nothing, name=name)


def unseeded(store: simckpt.Store) -> None:
    rng = np.random.default_rng()

    def draw(loop: simckpt.LoopState) -> None:
        loop.weights += rng.random(3)

    streams = simckpt.RNGStreams(actions=rng)
    run_loop(store, draw, loop=simckpt.LoopState(step=0, weights=np.zeros(3)), rng=streams)


def draws_from_unseeded_streams(store: simckpt.Store) -> None:
    def draw(loop: simckpt.LoopState) -> None:
        # not used: nothing but the streams themselves can differ
        random.random()
        np.random.random()

    run_loop(store, draw, rng=simckpt.RNGStreams())


def differs_before_the_kill(store: simckpt.Store) -> None:
    """The twins are equal; what comes third is another."""

    def update(loop: simckpt.LoopState) -> None:
        loop.weights += 1.0 + store.path.name.startswith("killed")

    run_loop(store, update, loop=simckpt.LoopState(step=0, weights=np.zeros(3)))


def covers_nothing(store: simckpt.Store) -> None:
    """Exact where it is looked at, for nothing that it forgets is used."""
    import torch

    own_rng = np.random.default_rng(5)
    baseline = torch.nn.Sequential(torch.nn.Linear(7, 3))
    momentum = torch.optim.SGD(baseline.parameters(), lr=0.1)

    def draw(loop: simckpt.LoopState) -> None:
        torch.rand(1)
        random.random()
        np.random.random()
        own_rng.random()
        momentum.step()

    run_loop(store, draw)


def seeds_before_the_loop(store: simckpt.Store) -> None:
    """Needs no `RNGStreams`: nothing is drawn after the checkpointer was made."""
    np.random.seed(1)
    run_loop(store, nothing, loop=simckpt.LoopState(step=0, weights=np.random.random(3)))


def raises(store: simckpt.Store) -> None:
    run_loop(store, nothing)
    raise ZeroDivisionError("the reward was nothing")


def raises_when_resumed(store: simckpt.Store) -> None:
    if store.path.exists():
        raise ZeroDivisionError("the store was something")
    run_loop(store, nothing)


def exits_with_an_error(store: simckpt.Store) -> None:
    sys.exit("no such environment")


def dies(store: simckpt.Store) -> None:
    os._exit(7)


def dies_beside_a_child(store: simckpt.Store) -> None:
    """The forked child holds the ends of all pipes open, so that none of them tells of this process's end."""
    if not os.fork():
        time.sleep(600)
    os._exit(7)


def saves_nothing(store: simckpt.Store) -> None:
    pass


def never_ends(store: simckpt.Store) -> None:
    """Leaves two children behind, one of another program and one that was forked."""
    store.start("run")
    sleeper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    forked = os.fork()
    if forked:
        (store.path / "children").write_text(f"{os.getpid()} {sleeper.pid} {forked}")
    time.sleep(600)


def keeps_a_large_state(store: simckpt.Store) -> None:
    def update(loop: simckpt.LoopState) -> None:
        loop.rows[loop.step :] += 1.0

    run_loop(store, update, loop=simckpt.LoopState(step=0, rows=np.zeros(1 << 20)))


def goes_back(
    store: simckpt.Store,
    *,
    until: int,
    policy: RollbackPolicy | None,
    learning_rate: float = 0.05,
    in_place: bool = False,
) -> None:
    """Has a policy for rollbacks; its returns rise, and fall after step 120 if the learning rate is 0.1 or more."""
    with store.start("a") as run:
        defaults = {"learning_rate": learning_rate, "gamma": 0.99}
        args = run.configure(defaults, defaults=defaults)
        weights, sampler, loop = np.ones(3), np.random.default_rng(1), simckpt.LoopState(step=0)
        checkpointer = run.checkpointer(
            {"weights": weights, "sampler": sampler, "loop": loop},
            save_when=simckpt.EverySteps(20),
            hyperparameters=simckpt.Hyperparameters(from_args={"learning_rate", "gamma"}),
            rollback=policy,
            in_place=in_place,
        )
        with checkpointer:
            checkpointer.restore_latest()
            while loop.step < until:
                weights[...] = args["gamma"] * weights + args["learning_rate"] * sampler.normal(size=3)
                loop.step += 1
                level = 0 if loop.step > 120 and args["learning_rate"] >= 0.1 else min(loop.step, 100)
                returns = level + np.random.default_rng(loop.step).normal(size=20)
                checkpointer.step(loop.step, {"eval/return": returns} if loop.step % 10 == 0 else {})


def counts_in_a_variable(store: simckpt.Store) -> None:
    """Rolls back in place, and forgets that a variable of its own is state."""
    bias, loop = np.zeros(1), simckpt.LoopState(step=0)
    with store.start("run") as run:
        checkpointer = run.checkpointer(
            {"bias": bias, "loop": loop},
            save_when=simckpt.EverySteps(9),
            rollback=RollbackPolicy("eval/return"),
            in_place=True,
        )
        with checkpointer:
            checkpointer.restore_latest()
            seen = loop.step
            while loop.step < 12:
                loop.step += 1
                seen += 1
                bias += seen
                checkpointer.step(loop.step, {"eval/return": 0.0})


def draws_unseeded(store: simckpt.Store) -> None:
    loop = simckpt.LoopState(step=0, noise=0.0)
    rng = np.random.default_rng()
    with store.start("run") as run:
        checkpointer = run.checkpointer(
            {"loop": loop}, save_when=simckpt.EverySteps(9), rollback=RollbackPolicy("eval/return")
        )
        with checkpointer:
            checkpointer.restore_latest()
            while loop.step < 8:
                loop.step += 1
                loop.noise = float(rng.random())
                checkpointer.step(loop.step)


class Space:
    shape, dtype = (3,), np.dtype("float32")


def keeps_rows(store: simckpt.Store, *, in_place: bool = False, forgets: bool = False) -> None:
    """Fills a replay buffer, from which it learns, and keeps its rows when it goes back."""
    buffer = simckpt.ReplayBuffer(20, Space(), Space(), num_envs=1, seed=1)
    loop, counted = simckpt.LoopState(step=0, total=0.0), 0
    with store.start("run") as run:
        checkpointer = run.checkpointer(
            {"replay": buffer, "loop": loop},
            save_when=simckpt.EverySteps(9),
            rollback=RollbackPolicy("eval/return", changes=KeepRows("replay")),
            in_place=in_place,
        )
        with checkpointer:
            checkpointer.restore_latest()
            while loop.step < 12:
                loop.step += 1
                counted += 1
                row = np.full((1, 3), counted if forgets else loop.step, "float32")
                buffer.add(row, row, row[:, 0], np.array([False]), np.array([False]), row)
                loop.total += float(buffer.sample(8)[0].sum())
                checkpointer.step(loop.step)
