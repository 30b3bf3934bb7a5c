"""State in contact multipliers: a cloth under MuJoCo 4.0's experimental `ipc` flag."""

import numpy as np

from envs.base import SmallEnv


class IpcFlexEnv(SmallEnv):
    """A driven box slides over a cloth on a plane.

    What the contacts carry from step to step (`flexvert_lambda`, `flexvert_conage`) is in no `mjtState`.
    """

    xml = """
    <mujoco>
      <option timestep="0.005" integrator="discrete"><flag ipc="enable"/></option>
      <worldbody>
        <geom type="plane" size="2 2 0.1"/>
        <body pos="0 0 0.1">
          <joint name="x" type="slide" axis="1 0 0" damping="2"/>
          <joint name="z" type="slide" axis="0 0 1"/>
          <geom type="box" size="0.1 0.1 0.02" mass="1"/>
        </body>
        <flexcomp name="cloth" type="grid" count="5 5 1" spacing="0.08 0.08 0.08" pos="0 0 0.05" radius="0.01"
                  mass="0.2" dim="2">
          <contact selfcollide="none"/>
          <elasticity young="3e4" poisson="0" thickness="0.01" elastic2d="both"/>
        </flexcomp>
      </worldbody>
      <actuator><motor joint="x" gear="5"/></actuator>
    </mujoco>
    """

    def reward(self) -> float:
        return float(np.abs(self.data.flexvert_lambda).sum())
