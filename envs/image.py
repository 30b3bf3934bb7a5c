"""An open renderer: observations are pixels, and part of what they show is state of the model."""

import gymnasium as gym
import mujoco
import numpy as np
from gymnasium.spaces import Box

from envs.base import SmallEnv

SIZE = 32  # [pixels]


class ImageEnv(SmallEnv):
    """A coloured cart seen by a camera; the colour is drawn at reset, the renderer is opened once and kept.

    Needs OpenGL (on a machine without a display: `MUJOCO_GL=egl`) and raises `DependencyNotInstalled` without it.
    """

    xml = """
    <mujoco>
      <visual><quality offsamples="0" shadowsize="0"/></visual>
      <worldbody>
        <light pos="0 0 3" castshadow="false"/>
        <geom type="plane" size="3 3 0.1" rgba="0.8 0.9 0.8 1"/>
        <camera name="side" pos="0 -2 0.5" xyaxes="1 0 0 0 0.2 1"/>
        <body pos="0 0 0.2">
          <joint name="x" type="slide" axis="1 0 0" damping="1"/>
          <geom name="cart" type="box" size="0.2 0.2 0.2" mass="1"/>
        </body>
      </worldbody>
      <actuator><motor joint="x" gear="5"/></actuator>
    </mujoco>
    """

    def __init__(self) -> None:
        super().__init__()
        try:
            self.renderer = mujoco.Renderer(self.model, SIZE, SIZE)
        except Exception as error:  # each GL backend fails with another class
            raise gym.error.DependencyNotInstalled("simckpt/Image-v0 needs OpenGL: try MUJOCO_GL=egl") from error
        self.observation_space = Box(0, 255, (SIZE, SIZE, 3), np.uint8)

    def start_episode(self) -> None:
        self.model.geom("cart").rgba[:3] = self.np_random.uniform(0.0, 1.0, 3)

    def _get_obs(self) -> np.ndarray:
        if not hasattr(self, "renderer"):
            return np.zeros((SIZE, SIZE, 3), np.uint8)
        self.renderer.update_scene(self.data, camera="side")
        return self.renderer.render()

    def close(self) -> None:
        self.renderer.close()
        super().close()
