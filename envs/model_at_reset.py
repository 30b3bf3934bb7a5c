"""State in the model, drawn at reset: where the target is, what the arm weighs, how stiff its joint is."""

import mujoco
import numpy as np

from envs.base import SmallEnv


class ModelAtResetEnv(SmallEnv):
    """An arm reaches for a body whose position is a constant of the model, another one in every episode.

    The masses wander from episode to episode, so that the model's past is state and not only its last draw.
    """

    xml = """
    <mujoco>
      <option timestep="0.01"/>
      <worldbody>
        <body name="upper" pos="0 0 1">
          <joint name="shoulder" axis="0 1 0" damping="0.2" stiffness="1"/>
          <geom type="capsule" size="0.04" fromto="0 0 0 0 0 -0.4"/>
          <body name="lower" pos="0 0 -0.4">
            <joint name="elbow" axis="0 1 0" damping="0.2"/>
            <geom type="capsule" size="0.03" fromto="0 0 0 0 0 -0.4"/>
            <site name="tip" pos="0 0 -0.4"/>
          </body>
        </body>
        <body name="target" pos="0.3 0 0.6"><site name="target"/></body>
      </worldbody>
      <actuator><motor joint="shoulder" gear="2"/><motor joint="elbow" gear="1"/></actuator>
    </mujoco>
    """

    def start_episode(self) -> None:
        model = self.model
        model.body("target").pos[:] = self.np_random.uniform([-0.6, 0.0, 0.3], [0.6, 0.0, 1.6])
        model.body_mass[1:3] *= np.exp(self.np_random.normal(0.0, 0.1, 2))
        model.jnt_stiffness[0] = self.np_random.uniform(0.0, 3.0)
        model.site_rgba[1, :3] = self.np_random.uniform(0.0, 1.0, 3)
        mujoco.mj_setConst(model, self.data)

    def reward(self) -> float:
        return -float(np.linalg.norm(self.data.site("tip").xpos - self.data.site("target").xpos))
