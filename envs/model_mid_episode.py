"""State in the model, changed in mid-episode: friction, gravity and the time step itself."""

import mujoco
import numpy as np

from envs.base import SmallEnv


class ModelMidEpisodeEnv(SmallEnv):
    """A pushed block on a plane; about every fourth step the world's constants take a step of a random walk.

    Nothing puts them back, so an episode inherits the constants that the last one ended with.
    """

    xml = """
    <mujoco>
      <option timestep="0.005"/>
      <worldbody>
        <geom name="floor" type="plane" size="5 5 0.1" friction="0.6 0.005 0.0001"/>
        <body pos="0 0 0.1">
          <joint name="x" type="slide" axis="1 0 0"/>
          <joint name="z" type="slide" axis="0 0 1"/>
          <joint name="tilt" axis="0 1 0"/>
          <geom name="block" type="box" size="0.1 0.1 0.1" mass="1"/>
        </body>
      </worldbody>
      <actuator><motor joint="x" gear="15"/></actuator>
    </mujoco>
    """

    def before_step(self) -> None:
        if self.np_random.random() < 0.25:
            option = self.model.opt
            self.model.geom_friction[:, 0] = np.clip(
                self.model.geom_friction[:, 0] + self.np_random.normal(0.0, 0.05), 0.1, 1.5
            )
            option.gravity[:] = np.clip(option.gravity + self.np_random.normal(0.0, 0.2, 3), [-2, 0, -12], [2, 0, -8])
            option.timestep = float(np.clip(option.timestep + self.np_random.normal(0.0, 2e-4), 0.003, 0.007))
            option.disableflags ^= int(mujoco.mjtDisableBit.mjDSBL_WARMSTART)
