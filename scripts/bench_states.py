"""What bench_save.py saves: live objects, the same as flat tensors that share their memory, and a step of training."""

import abc
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from torch import nn
from train_ppo import Agent

import simckpt
from simckpt import state

Rows = Mapping[str, np.ndarray]


class Arrays:
    """A component that holds plain arrays."""

    def __init__(self, arrays: dict[str, np.ndarray]) -> None:
        self.arrays = arrays

    def state_dict(self) -> dict[str, np.ndarray]:
        """Returns the live arrays."""
        return dict(self.arrays)

    def load_state_dict(self, saved: Mapping[str, np.ndarray]) -> None:
        """Copies the saved ones into them."""
        for name, array in self.arrays.items():
            np.copyto(array, saved[name])


class Subject(abc.ABC):
    """Live objects that a training run saves.

    Attributes:
        title: what it is, for the heading of its table.
        networks: {name: module}.
        optimizers: {name: optimizer}.
    """

    title: str
    networks: Mapping[str, nn.Module]
    optimizers: Mapping[str, torch.optim.Optimizer]

    @abc.abstractmethod
    def components(self) -> dict[str, Any]:
        """Returns everything as components: {name: live object with `state_dict` and `load_state_dict`}."""

    @abc.abstractmethod
    def tensors(self) -> dict[str, torch.Tensor]:
        """Returns everything as {name: live tensor}."""

    @abc.abstractmethod
    def advance(self) -> Rows:
        """Changes what training changes between two saves; returns the rows that were added, if any."""

    def fresh(self) -> list[np.ndarray]:
        """Returns live views of what the last `advance` has changed: what a save cannot leave out."""
        return [tensor.numpy() for tensor in self.tensors().values()]

    def settled(self) -> set[str]:
        """Returns the names of tensors that may only be written through the object that owns them: rows of a log."""
        return set()


def network_tensors(
    networks: Mapping[str, nn.Module], optimizers: Mapping[str, torch.optim.Optimizer]
) -> dict[str, torch.Tensor]:
    """Returns the live tensors of modules and of the states of optimizers."""
    found = {
        f"{name}/{key}": tensor for name, module in networks.items() for key, tensor in module.state_dict().items()
    }
    for name, optimizer in optimizers.items():
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        for number, parameter in enumerate(parameters):
            found |= {f"{name}/{number}/{key}": tensor for key, tensor in optimizer.state[parameter].items()}
    return {name: tensor.detach() for name, tensor in found.items()}


class Networks(Subject):
    """A module, its Adam and some arrays, all of which change between two saves."""

    def __init__(self, title: str, agent: nn.Module, arrays: dict[str, np.ndarray]) -> None:
        self.title = title
        optimizer = torch.optim.Adam(agent.parameters())
        for parameter in agent.parameters():
            # as after many steps: no number is 0, for zeros are what compressing peers would be flattered by
            moments = torch.empty_like(parameter).normal_(), torch.empty_like(parameter).uniform_()
            optimizer.state[parameter] = {"step": torch.tensor(1.0), "exp_avg": moments[0], "exp_avg_sq": moments[1]}
        self.networks = {"agent": agent}
        self.optimizers = {"optimizer": optimizer}
        self.arrays = Arrays(arrays)
        self._shared = {f"envs/{name}": torch.from_numpy(array) for name, array in arrays.items()}

    def components(self) -> dict[str, Any]:
        """Returns the agent, the optimizer and the arrays."""
        return {**self.networks, **self.optimizers, **({"envs": self.arrays} if self._shared else {})}

    def tensors(self) -> dict[str, torch.Tensor]:
        """Returns all of them."""
        return network_tensors(self.networks, self.optimizers) | self._shared

    def advance(self) -> Rows:
        """Changes every number."""
        with torch.no_grad():
            for tensor in self.tensors().values():
                tensor.mul_(0.999) if tensor.is_floating_point() else tensor.add_(1)
        return {}


def ppo_state(num_envs: int) -> Networks:
    """Returns the networks of scripts/train_ppo.py for Ant-v5, with the arrays of that many envs."""
    envs = simckpt.make_vec("Ant-v5", num_envs, vectorization_mode="sync")
    envs.reset(seed=1)
    leaves = state.encode(envs.state_dict()).leaves
    envs.close()
    arrays = {
        path.replace("/", "."): leaf.data.copy() for path, leaf in leaves.items() if leaf.data.dtype == np.float64
    }
    title = f"PPO: the agent of train_ppo.py for Ant-v5, Adam, the arrays of {num_envs} envs"
    return Networks(title, Agent(105, 8, initial_std=1.0), arrays)


def large_state(scale: float) -> Networks:
    """Returns 1 GB of parameters, times `scale`, in 60 layers, with Adam's moments."""
    width = max(int(2048 * scale**0.5), 8)
    agent = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(60)))
    size = sum(parameter.nbytes for parameter in agent.parameters()) / 1e9
    return Networks(f"{size:.3g} GB of parameters in 60 layers, with Adam's two moments", agent, {})


class SAC(Subject):
    """Stable-Baselines3's SAC on Ant-v5 with a full replay buffer, to which rows are added between two saves."""

    COLUMNS = ("observations", "next_observations", "actions", "rewards", "dones", "timeouts")

    def __init__(self, capacity: int, new_rows: int) -> None:
        from stable_baselines3 import SAC as Algorithm
        from stable_baselines3.common.logger import Logger

        self.title = f"SAC: SB3's on Ant-v5, its full buffer of {capacity:,} rows, {new_rows:,} new rows each save"
        self.new_rows = new_rows
        self.model = Algorithm("MlpPolicy", gym.make("Ant-v5"), buffer_size=capacity, device="cpu", seed=1)
        self.model.set_logger(Logger(None, []))
        self.rng = np.random.default_rng(1)
        self.buffer = self.model.replay_buffer
        for name in self.COLUMNS[:4]:
            self.rng.random(out=(column := getattr(self.buffer, name)), dtype=column.dtype)
        # the oldest row is somewhere in the middle
        self.buffer.full, self.buffer.pos = True, capacity // 3
        self.model.train(1, 256)

    networks = property(lambda self: {"policy": self.model.policy})  # type: ignore[assignment]
    optimizers = property(lambda self: optimizers_of(self.model))  # type: ignore[assignment]

    def components(self) -> dict[str, Any]:
        """Returns the networks, the optimizers, the temperature and the buffer."""
        temperature = Arrays({"log_ent_coef": self.model.log_ent_coef.detach().numpy()})
        return {**self.networks, **self.optimizers, "temperature": temperature, "replay": self.buffer}

    def tensors(self) -> dict[str, torch.Tensor]:
        """Returns all of them, the buffer's columns included."""
        return sac_tensors(self.model)

    def rows(self) -> Iterator[Rows]:
        """Returns the rows of the buffer, oldest first, in two blocks."""
        for slots in (slice(self.buffer.pos, None), slice(0, self.buffer.pos)):
            yield {name: getattr(self.buffer, name)[slots] for name in self.COLUMNS}

    def advance(self) -> Rows:
        """Updates the networks once and adds the new rows."""
        self.model.train(1, 256)
        rows = {name: self._random(getattr(self.buffer, name)) for name in self.COLUMNS}
        for number in range(self.new_rows):
            row = [rows[name][number] for name in self.COLUMNS[:5]]
            self.buffer.add(*row[:2], *row[2:], [{"TimeLimit.truncated": bool(rows["timeouts"][number])}])
        return rows

    def _random(self, column: np.ndarray) -> np.ndarray:
        shape = (self.new_rows, *column.shape[1:])
        return (
            (self.rng.random(shape) < 0.01).astype(column.dtype)
            if column.ndim == 2
            else self.rng.random(shape, dtype=column.dtype)
        )

    def fresh(self) -> list[np.ndarray]:
        """Returns the networks' numbers and the new rows."""
        found = [tensor.numpy() for name, tensor in self.tensors().items() if name not in self.settled()]
        last, first = self.buffer.pos, self.buffer.pos - self.new_rows
        blocks = [slice(max(first, 0), last)] + ([slice(first, None)] if first < 0 else [])
        return found + [getattr(self.buffer, name)[slots] for name in self.COLUMNS for slots in blocks]

    def settled(self) -> set[str]:
        """Returns the names of the buffer's columns."""
        return {f"replay/{name}" for name in self.COLUMNS}


def optimizers_of(model: Any) -> dict[str, torch.optim.Optimizer]:
    """Returns the optimizers of SB3's SAC."""
    return {
        "actor_optimizer": model.actor.optimizer,
        "critic_optimizer": model.critic.optimizer,
        "temperature_optimizer": model.ent_coef_optimizer,
    }


def sac_tensors(model: Any, columns: Sequence[str] = SAC.COLUMNS) -> dict[str, torch.Tensor]:
    """Returns the live tensors of SB3's SAC and of its buffer."""
    found = network_tensors({"policy": model.policy}, optimizers_of(model))
    found["temperature/log_ent_coef"] = model.log_ent_coef.detach()
    return found | {f"replay/{name}": torch.from_numpy(getattr(model.replay_buffer, name)) for name in columns}
