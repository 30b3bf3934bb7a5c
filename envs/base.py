"""The frame that the envs here share: one small MuJoCo model, stepped by Gymnasium's interface."""

from typing import Any, ClassVar

import gymnasium as gym
import mujoco
import numpy as np
from gymnasium.spaces import Box, Space

FRAME_SKIP = 5  # [physics steps per env step]

# for envs whose hidden state lies outside the physics
CART = """
<mujoco>
  <worldbody>
    <body><joint name="x" type="slide" axis="1 0 0" damping="1"/><geom type="box" size="0.1 0.1 0.1" mass="1"/></body>
  </worldbody>
  <actuator><motor joint="x" gear="5"/></actuator>
</mujoco>
"""


class SmallEnv(gym.Env[Any, np.ndarray]):
    """An env over the MJCF text in `xml`; subclasses override the hooks below and nothing else.

    The state that a subclass adds is the point of the subclass, so the frame itself keeps none: no step counter, no
    cached observation. The model and its data live as long as the env and are never replaced.
    """

    xml: ClassVar[str]
    metadata: dict[str, Any] = {"render_modes": []}  # noqa: RUF012 (Gymnasium declares it so)

    def __init__(self) -> None:
        self.model = mujoco.MjModel.from_xml_string(self.xml)
        self.data = mujoco.MjData(self.model)
        self.action_space: Space[np.ndarray] = Box(-1.0, 1.0, (self.model.nu,), np.float64)
        self.observation_space: Space[Any] = Box(-np.inf, np.inf, self._get_obs().shape, np.float64)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        mujoco.mj_resetData(self.model, self.data)
        self.data.qvel[:] = self.np_random.normal(0.0, 0.1, self.model.nv)
        self.start_episode()
        mujoco.mj_forward(self.model, self.data)
        return self._get_obs(), self.info()

    def step(self, action: np.ndarray) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.data.ctrl[:] = action
        self.before_step()
        mujoco.mj_step(self.model, self.data, FRAME_SKIP)
        return self._get_obs(), self.reward(), False, False, self.info()

    def start_episode(self) -> None:
        """Changes the freshly reset data (and whatever else the env hides) before the first observation."""

    def before_step(self) -> None:
        """Acts between the action and the physics."""

    def _get_obs(self) -> Any:
        """Returns positions and velocities, `(nq + nv,)` float64."""
        return np.concatenate([self.data.qpos, self.data.qvel])

    def reward(self) -> float:
        """Returns the reward of the step just taken."""
        return float(self.data.qvel[0])

    def info(self) -> dict[str, Any]:
        """Returns the info dict of the step or reset just taken."""
        return {}
