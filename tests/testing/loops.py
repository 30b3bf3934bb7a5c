"""Training loops that a fresh process can import: a sound one, and one for each thing that a loop can forget."""

import os
import random
import subprocess
import sys
import time
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from torch import nn

import simckpt

STEPS = 6  # vector steps, each of them followed by a call of `Checkpointer.step`
SEEDED = "seeded"


class Loop:
    """A policy gradient of a few steps on two envs, which draws its actions from torch's default generator.

    Args:
        store: where to train.
        env_id: an env with discrete actions, or Pendulum.
        forget: components not to register.
        seed: of everything, or None.
        others: more components.
    """

    def __init__(
        self,
        store: simckpt.Store,
        *,
        env_id: str = "CartPole-v1",
        forget: str = "",
        seed: int | None = 3,
        **others: Any,
    ) -> None:
        torch.set_num_threads(1)
        if seed is not None:
            torch.manual_seed(seed)
        else:
            torch.seed()
        # short episodes: some end, and are followed by a reset, within the loop
        self.envs = gym.make_vec(env_id, num_envs=2, vectorization_mode="sync", max_episode_steps=3)
        self.loop = simckpt.LoopState(step=0, observations=self.envs.reset(seed=seed)[0])
        self.discrete = isinstance(self.envs.single_action_space, gym.spaces.Discrete)
        inputs = self.envs.single_observation_space.shape[0]
        self.agent = nn.Sequential(nn.Linear(inputs, 4), nn.Tanh(), nn.Linear(4, 2 if self.discrete else 1))
        self.optimizer = torch.optim.Adam(self.agent.parameters(), lr=0.05)
        components = {
            "envs": self.envs,
            "agent": self.agent,
            "optimizer": self.optimizer,
            "rng": simckpt.RNGStreams(),
            "loop": self.loop,
            **others,
        }
        components = {name: component for name, component in components.items() if name != forget}
        run = store.start("run")
        self.checkpointer = run.checkpointer(components, save_when=simckpt.EverySteps(1000), keep=simckpt.KeepLast(1))
        self.checkpointer.restore_latest()

    def running(self) -> bool:
        return self.loop.step < 10 * STEPS

    def act(self, factor: float = 1.0) -> None:
        """Steps the envs and improves the agent by what came of it."""
        outputs = self.agent(torch.as_tensor(self.loop.observations))
        if self.discrete:
            actions = torch.multinomial(outputs.softmax(-1).detach(), 1).squeeze(-1)
            scores = outputs.log_softmax(-1).gather(-1, actions[:, None]).squeeze(-1)
        else:
            actions = outputs.detach() + torch.randn(outputs.shape)
            scores = -(actions - outputs).square().sum(-1)
        self.loop.observations, rewards, *_ = self.envs.step(actions.numpy())
        self.optimizer.zero_grad()
        weights = torch.as_tensor(rewards, dtype=torch.float32) + torch.as_tensor(self.loop.observations[:, 0])
        (-factor * scores * weights).mean().backward()
        self.optimizer.step()

    def save(self) -> None:
        self.loop.step += 10
        self.checkpointer.step(self.loop.step, {"return": float(self.loop.step)})

    def train(self) -> None:
        while self.running():
            self.act()
            self.save()


def sound(store: simckpt.Store) -> None:
    Loop(store).train()


def sound_continuous(store: simckpt.Store) -> None:
    Loop(store, env_id="Pendulum-v1").train()


def sound_script(store: simckpt.Store) -> None:
    Loop(store).train()
    sys.exit()


def forgets_optimizer(store: simckpt.Store) -> None:
    Loop(store, forget="optimizer").train()


def forgets_rng(store: simckpt.Store) -> None:
    Loop(store, forget="rng").train()


def forgets_envs(store: simckpt.Store) -> None:
    Loop(store, forget="envs").train()


def forgets_counter(store: simckpt.Store) -> None:
    training = Loop(store)
    updates = 0
    while training.running():
        updates += 1
        training.act(factor=1.0 / updates)
        training.save()


def forgets_step(store: simckpt.Store) -> None:
    training = Loop(store, forget="loop")
    training.train()


def forgets_to_restore(store: simckpt.Store) -> None:
    class Deaf:
        def restore_latest(self) -> None:
            pass

    simckpt.Checkpointer.restore_latest = Deaf.restore_latest
    Loop(store).train()


def renames_itself(store: simckpt.Store) -> None:
    with store.start(f"run-{len(store.runs()) if store.path.exists() else 0}") as run:
        checkpointer = run.checkpointer({"loop": simckpt.LoopState(step=0)}, save_when=simckpt.EverySteps(1))
        for step in range(10, 50, 10):
            checkpointer.step(step)


def unseeded(store: simckpt.Store) -> None:
    Loop(store, seed=None).train()


def draws_from_unseeded_streams(store: simckpt.Store) -> None:
    training = Loop(store)
    while training.running():
        # drawn and not used: nothing but the streams themselves differs
        random.random()
        np.random.random()
        training.act()
        training.save()


def differs_before_the_kill(store: simckpt.Store) -> None:
    """The twins are equal; what comes third is another."""
    training = Loop(store)
    while training.running():
        if store.path.name.startswith("killed"):
            training.loop.observations = training.loop.observations + np.float32(0.5)
        training.act()
        training.save()


def draws_without_streams(store: simckpt.Store) -> None:
    """Exact where it is looked at: what it draws is not used, and its generators were forgotten."""
    random.seed(1)
    np.random.seed(1)
    own_rng = np.random.default_rng(5)
    baseline = nn.Linear(7, 3)
    momentum = torch.optim.SGD(baseline.parameters(), lr=0.1)
    loop = simckpt.LoopState(step=0)
    with store.start("run") as run:
        checkpointer = run.checkpointer({"loop": loop}, save_when=simckpt.EverySteps(1))
        checkpointer.restore_latest()
        while loop.step < 30:
            torch.rand(1)
            random.random()
            np.random.random()
            own_rng.random()
            momentum.step()
            loop.step += 10
            checkpointer.step(loop.step)


def seeds_before_the_loop(store: simckpt.Store) -> None:
    """Needs no `RNGStreams`: nothing is drawn after the checkpointer was made."""
    torch.manual_seed(1)
    loop = simckpt.LoopState(step=0, weights=torch.rand(3))
    with store.start("run") as run:
        checkpointer = run.checkpointer({"loop": loop}, save_when=simckpt.EverySteps(1))
        checkpointer.restore_latest()
        while loop.step < 30:
            loop.step += 10
            checkpointer.step(loop.step)


def raises(store: simckpt.Store) -> None:
    training = Loop(store)
    training.act()
    training.save()
    raise ZeroDivisionError("the reward was nothing")


def raises_when_resumed(store: simckpt.Store) -> None:
    training = Loop(store)
    if training.loop.step:
        raise ZeroDivisionError("there was something")
    training.train()


def exits_with_an_error(store: simckpt.Store) -> None:
    sys.exit("no such environment")


def dies(store: simckpt.Store) -> None:
    os._exit(7)


def saves_nothing(store: simckpt.Store) -> None:
    pass


def never_ends(store: simckpt.Store) -> None:
    """Leaves two children behind: one of `subprocess`, which holds no pipe, and one that was forked."""
    store.start("run")
    sleeper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    forked = os.fork()
    if forked:
        (store.path / "children").write_text(f"{os.getpid()} {sleeper.pid} {forked}")
    time.sleep(600)


def dies_beside_a_child(store: simckpt.Store) -> None:
    """The forked child holds the ends of all pipes open, so that none of them tells of this process's end."""
    if not os.fork():
        time.sleep(600)
    os._exit(7)


def keeps_a_large_state(store: simckpt.Store) -> None:
    loop = simckpt.LoopState(step=0, rows=np.zeros(1 << 20))
    with store.start("run") as run:
        checkpointer = run.checkpointer({"loop": loop}, save_when=simckpt.EverySteps(1))
        checkpointer.restore_latest()
        while loop.step < 30:
            loop.rows[loop.step :] += 1.0
            loop.step += 10
            checkpointer.step(loop.step)
