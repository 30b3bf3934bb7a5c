"""State in the spaces: a Dict space has one generator per key, and this env draws its goals from them."""

from typing import Any

import numpy as np
from gymnasium.spaces import Box, Dict, Discrete, Tuple

from envs.base import CART, SmallEnv


class DictSpaceEnv(SmallEnv):
    """A cart with dictionary observations whose goals come from `goal_space.sample()`, never seeded by `reset`."""

    xml = CART

    def __init__(self) -> None:
        super().__init__()
        self.goal_space = Dict(
            {"place": Box(-1.0, 1.0, (2,), np.float64), "kind": Discrete(5), "pair": Tuple((Discrete(3), Discrete(9)))},
            seed=0,
        )
        self.goal = self.goal_space.sample()
        self.observation_space = Dict(
            {
                "observation": Box(-np.inf, np.inf, (2,), np.float64),
                "goal": Box(-np.inf, np.inf, (2,), np.float64),
                "kind": Discrete(5),
            }
        )

    def before_step(self) -> None:
        if abs(self.data.qpos[0] - self.goal["place"][0]) < 0.2:
            self.goal = self.goal_space.sample()

    def start_episode(self) -> None:
        self.goal = self.goal_space.sample()

    def _get_obs(self) -> Any:
        observation = super()._get_obs()
        if not hasattr(self, "goal"):
            return observation
        return {"observation": observation, "goal": self.goal["place"].copy(), "kind": self.goal["kind"]}

    def reward(self) -> float:
        return float(-abs(self.data.qpos[0] - self.goal["place"][0]) + self.goal["pair"][0] + self.goal["pair"][1])
