"""State in torch tensors: a recurrent disturbance and the generator that drives it."""

import gymnasium as gym
import numpy as np

from envs.base import CART, SmallEnv

try:
    import torch
except ImportError as error:
    raise gym.error.DependencyNotInstalled("simckpt/TorchState-v0 needs torch: pip install torch") from error


class TorchStateEnv(SmallEnv):
    """A cart pushed by a small recurrent cell; memory in bfloat16, a view of it, and a generator of torch's own."""

    xml = CART

    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(11)
        self.mixing = torch.randn(4, 4, generator=self.generator) / 4
        self.memory = torch.zeros(4)
        self.first = self.memory[:1]
        self.coarse = torch.zeros(4, dtype=torch.bfloat16)

    def start_episode(self) -> None:
        self.memory.zero_()

    def before_step(self) -> None:
        noise = torch.randn(4, generator=self.generator)
        self.memory.copy_(torch.tanh(self.mixing @ self.memory + 0.3 * noise))
        self.coarse += self.memory.to(torch.bfloat16) / 8
        self.data.qfrc_applied[0] = float(self.first)

    def _get_obs(self) -> np.ndarray:
        memory = getattr(self, "memory", torch.zeros(4))
        return np.concatenate([super()._get_obs(), memory.to(torch.float64).numpy()])

    def reward(self) -> float:
        return float(self.coarse.float().sum())
