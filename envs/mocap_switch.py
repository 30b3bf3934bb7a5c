"""State in the data's user inputs: a mocap target and equality switches, set once per episode."""

import numpy as np

from envs.base import SmallEnv


class MocapSwitchEnv(SmallEnv):
    """Two balls, each welded to a mocap body or free, as the start of the episode decided; a wind blows on one.

    A restore that leaves the mocap pose, `eq_active` or `xfrc_applied` to the next `step` is wrong for the rest of the
    episode: no later call writes them.
    """

    xml = """
    <mujoco>
      <worldbody>
        <geom type="plane" size="5 5 0.1"/>
        <body name="hand" mocap="true" pos="0 0 1"/>
        <body name="held" pos="0 0 1"><freejoint/><geom type="sphere" size="0.1" mass="0.5"/></body>
        <body name="other" pos="0.5 0 1"><freejoint/><geom type="sphere" size="0.1" mass="0.5"/></body>
        <body name="cart" pos="0 0.5 0.1">
          <joint name="cart" type="slide" axis="1 0 0" damping="1"/><geom type="box" size="0.1 0.1 0.1" mass="1"/>
        </body>
      </worldbody>
      <equality>
        <weld body1="hand" body2="held" solref="0.05 1"/>
        <weld body1="hand" body2="other" solref="0.05 1" active="false"/>
      </equality>
      <actuator><motor joint="cart" gear="5"/></actuator>
    </mujoco>
    """

    def start_episode(self) -> None:
        data = self.data
        data.mocap_pos[0] = self.np_random.uniform([-0.5, -0.5, 0.5], [0.5, 0.5, 1.5])
        turn = self.np_random.normal(size=4)
        data.mocap_quat[0] = turn / np.linalg.norm(turn)
        data.eq_active[:] = self.np_random.permutation([1, 0])
        data.body("other").xfrc_applied[:3] = self.np_random.normal(0.0, 1.0, 3)
