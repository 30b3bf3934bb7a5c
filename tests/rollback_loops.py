"""A small training loop that goes wrong as long as its learning rate is high, for tests of branches and rollbacks."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

import simckpt
from simckpt.branching.hyperparameters import Hyperparameters
from simckpt.policies import Reseed, RollbackPolicy, Scale

HOT = 0.1  # with this learning rate the returns fall after COLLAPSE
COLLAPSE = 120
EVALUATE = 10  # [steps]
ARGS = {"learning_rate": HOT, "gamma": 0.99, "num_envs": 2, "seed": 1}
POLICY = RollbackPolicy("eval/return", changes=Reseed() & Scale(learning_rate=0.5))


class Objects:
    """What a program makes anew at each start; `trace` notes what every step of training drew and had.

    Attributes:
        args: the hyperparameters in force.
        components: to register.
    """

    def __init__(self, args: dict[str, Any]) -> None:
        self.args = args
        random.seed(args["seed"])
        torch.manual_seed(args["seed"])
        np.random.seed(args["seed"])
        self.model = torch.nn.Linear(3, 2)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=args["learning_rate"])
        self.sampler = np.random.default_rng(args["seed"])
        self.loop = simckpt.LoopState(step=0, observations=np.zeros((args["num_envs"], 3)), clip=0.2)
        self.components = {
            "model": self.model,
            "optimizer": self.optimizer,
            "sampler": self.sampler,
            "rng": simckpt.RNGStreams(),
            "loop": self.loop,
        }
        self.hyperparameters = Hyperparameters(
            {"learning_rate": self.optimizer},
            from_args={"gamma", "seed"},
            fresh={"num_envs": {"loop/observations"}},
        )

    def advance(self) -> None:
        self.loop.observations += self.sampler.normal(size=self.loop.observations.shape)
        inputs = torch.as_tensor(self.loop.observations, dtype=torch.float32) + torch.randn(1)
        loss = (self.model(inputs) * self.args["gamma"]).square().mean() + float(np.random.random())
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.loop.step += 1

    def metrics(self) -> dict[str, Any]:
        """Returns what an evaluation at this step gives, or nothing between evaluations."""
        step = self.loop.step
        return {"eval/return": returns_at(step, self.optimizer.param_groups[0]["lr"])} if step % EVALUATE == 0 else {}

    def bits(self) -> dict[str, Any]:
        """Returns everything that training goes on from."""
        momenta = [entry["exp_avg"].numpy().tobytes() for entry in self.optimizer.state_dict()["state"].values()]
        return {
            "model": [each.numpy().tobytes() for each in self.model.state_dict().values()],
            "momenta": momenta,
            "learning rate": self.optimizer.param_groups[0]["lr"],
            "sampler": self.sampler.bit_generator.state["state"]["state"],
            "torch": torch.get_rng_state().numpy().tobytes(),
            "numpy": np.random.get_state()[1].tobytes(),
            "loop": (self.loop.step, self.loop.observations.tobytes()),
        }


def returns_at(step: int, learning_rate: float) -> np.ndarray:
    """Returns the returns of 20 episodes: they rise, and fall after COLLAPSE if the learning rate is high."""
    level = min(step, 100) if step <= COLLAPSE or learning_rate < HOT else 0
    return level + np.random.default_rng(step).normal(size=20)


def train(
    store: simckpt.Store,
    run: str = "a",
    *,
    until: int = 200,
    policy: RollbackPolicy | None = POLICY,
    seen: Callable[[simckpt.Checkpointer, Objects], None] = lambda checkpointer, objects: None,
    args: dict[str, Any] = ARGS,
    **options: Any,
) -> Objects:
    """Runs the training and returns its objects; `seen` is called before every `step`."""
    with store.start(run) as started:
        objects = Objects(started.configure(args, defaults=ARGS))
        options.setdefault("save_when", simckpt.EverySteps(20))
        checkpointer = started.checkpointer(
            objects.components, hyperparameters=objects.hyperparameters, rollback=policy, **options
        )
        with checkpointer:
            checkpointer.restore_latest()
            while objects.loop.step < until:
                objects.advance()
                seen(checkpointer, objects)
                checkpointer.step(objects.loop.step, objects.metrics())
    return objects
