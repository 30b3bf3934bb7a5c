"""A small training loop of several ranks through the public API: envs, DDP or FSDP2, Adam, a replay ring, streams."""

from __future__ import annotations

import hashlib
import warnings
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import simckpt
import simckpt.checkpointer
import simckpt.distributed.planning
import simckpt.distributed.several
import simckpt.distributed.tensors
import simckpt.replay
import simckpt.sim
import simckpt.storage.gathering
import simckpt.store

# imported before the ranks are forked, which then need not do so; envs have modules of their own
gym.make("CartPole-v1").close()

NUM_ENVS = 2
CAPACITY = 40


class Training:
    """Everything that a loop has, made anew for each start.

    Args:
        rank: of this process.
        size: how many ranks there are.
        layout: "ddp" or "fsdp".
    """

    def __init__(self, rank: int, size: int, layout: str = "ddp", *, num_envs: int = NUM_ENVS) -> None:
        self.rank = rank
        self.envs = gym.vector.SyncVectorEnv([lambda: gym.make("CartPole-v1") for _ in range(num_envs)])
        torch.manual_seed(7)
        module: Any = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 2))
        if layout == "fsdp" and size > 1:
            for layer in (module[0], module[2]):
                fully_shard(layer)
            fully_shard(module)
        elif layout == "ddp" and size > 1:
            module = nn.parallel.DistributedDataParallel(module)
        if isinstance(module, nn.parallel.DistributedDataParallel):
            # DDP deals its gradients out anew after the first backward pass, which changes the order of sums: with
            # three ranks and more a resumed run would differ in the last bits from one that has had its first pass
            module(torch.zeros(1, 4)).sum().backward()
            module.zero_grad()
        self.agent = module
        self.optimizer = torch.optim.Adam(module.parameters(), lr=1e-2)
        self.buffer = simckpt.ReplayBuffer(
            CAPACITY, self.envs.single_observation_space, self.envs.single_action_space, num_envs=num_envs, seed=rank
        )
        self.loop = simckpt.LoopState(step=0, observations=None, previous_done=np.zeros(num_envs, bool))
        self.rng = simckpt.RNGStreams()
        torch.manual_seed(1000 + rank)
        np.random.seed(2000 + rank)

    @property
    def components(self) -> dict[str, Any]:
        return {
            "envs": self.envs,
            "agent": self.agent,
            "optimizer": self.optimizer,
            "replay": self.buffer,
            "rng": self.rng,
            "loop": self.loop,
        }

    def begin(self) -> None:
        if self.loop.observations is None:
            self.loop.observations = self.envs.reset(seed=10 + self.rank)[0]

    def advance(self) -> float:
        """Takes one step in the envs and one with the optimizer; returns the loss."""
        loop = self.loop
        noise = torch.rand(len(loop.observations))
        actions = ((torch.as_tensor(loop.observations)[:, 2] + noise - 0.5) > 0).long().numpy()
        observations, rewards, terminated, truncated, _ = self.envs.step(actions)
        self.buffer.add(
            loop.observations, actions, rewards, terminated, truncated, observations, valid=~loop.previous_done
        )
        loop.observations, loop.previous_done = observations, terminated | truncated
        batch = self.buffer.sample(8)
        logits = self.agent(torch.as_tensor(np.asarray(batch.observations), dtype=torch.float32))
        target = torch.as_tensor(batch.actions)
        loss = nn.functional.cross_entropy(logits, target) * (np.random.rand() + 0.5)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        loop.step += 1
        return float(loss.detach())

    def fingerprint(self) -> dict[str, str]:
        """Returns {what: digest} of all that this rank has, by other means than simckpt's."""
        buffer = self.buffer.state_dict() if hasattr(self.buffer, "state_dict") else {}
        return {
            "loop": _digest([self.loop.step, self.loop.observations, self.loop.previous_done]),
            "torch": _digest([torch.get_rng_state().numpy()]),
            "numpy": _digest(list(np.random.get_state()[1:3])),
            "agent": _digest([_local(each) for each in self.agent.parameters()]),
            "optimizer": _digest([_local(each[key]) for each in self.optimizer.state.values() for key in sorted(each)]),
            "envs": _digest(
                [[env.unwrapped.state, env.unwrapped.np_random.bit_generator.state] for env in self.envs.envs]
            ),
            "sample": _digest([np.asarray(part) for part in self.buffer.sample(16)] + [len(self.buffer), len(buffer)]),
        }


def _local(tensor: Any) -> np.ndarray:
    with torch.no_grad():
        return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach().clone().numpy()


def _digest(values: list[Any]) -> str:
    whole = hashlib.sha256()
    for value in values:
        whole.update(value.tobytes() if isinstance(value, np.ndarray) else repr(value).encode())
    return whole.hexdigest()[:16]


def train(
    rank: int,
    size: int,
    store: str,
    until: int,
    *,
    layout: str = "ddp",
    save_when: Any = None,
    keep: Any = None,
    num_envs: int = NUM_ENVS,
    ignore: tuple[str, ...] = (),
    **options: Any,
) -> dict[str, str]:
    """Trains up to a step and returns the fingerprint; the run goes on from what it has."""
    for message in ignore:
        warnings.filterwarnings("ignore", message)
    run = simckpt.Store(store).start("cart")
    args = run.configure({"lr": 1e-2, "seed": rank}, free={"seed"})
    assert args["seed"] == rank
    training = Training(rank, size, layout, num_envs=num_envs)
    checkpointer = run.checkpointer(
        training.components, save_when=save_when or simckpt.EverySteps(5), keep=keep, timeout=10.0, **options
    )
    with run, checkpointer:
        checkpointer.restore_latest()
        training.begin()
        while training.loop.step < until:
            loss = training.advance()
            checkpointer.step(training.loop.step, {"loss": loss} if rank == 0 else None)
        checkpointer.wait()
    return training.fingerprint()
