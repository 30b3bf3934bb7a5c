"""State in the history buffers: an actuator and a sensor that answer late."""

import numpy as np

from envs.base import SmallEnv


class ActuatorDelayEnv(SmallEnv):
    """A pendulum whose motor obeys, and whose sensor tells, several physics steps late (`mjData.history`)."""

    xml = """
    <mujoco>
      <option timestep="0.005"/>
      <worldbody>
        <body pos="0 0 1">
          <joint name="hinge" axis="0 1 0" damping="0.1"/>
          <geom type="capsule" size="0.05" fromto="0 0 0 0 0 -0.5"/>
        </body>
      </worldbody>
      <actuator><motor joint="hinge" gear="3" delay="0.06" nsample="14"/></actuator>
      <sensor><jointpos joint="hinge" delay="0.04" nsample="10"/></sensor>
    </mujoco>
    """

    def _get_obs(self) -> np.ndarray:
        return np.concatenate([super()._get_obs(), self.data.sensordata])
