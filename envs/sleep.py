"""State in the sleep machinery: which trees are asleep, and all that MuJoCo leaves untouched while they are."""

import numpy as np

from envs.base import SmallEnv

BOXES = 6


class SleepEnv(SmallEnv):
    """A driven ball wakes boxes that have gone to sleep; `mjSTATE_INTEGRATION` does not know who sleeps."""

    xml = f"""
    <mujoco>
      <option timestep="0.005" sleep_tolerance="0.01"><flag sleep="enable"/></option>
      <worldbody>
        <geom type="plane" size="5 5 0.1"/>
        <body pos="0 0 0.15">
          <joint name="x" type="slide" axis="1 0 0" damping="2"/>
          <joint name="y" type="slide" axis="0 1 0" damping="2"/>
          <geom type="sphere" size="0.15" mass="2"/>
        </body>
        {
        "".join(
            f'<body pos="{0.6 * np.cos(angle):.4f} {0.6 * np.sin(angle):.4f} 0.1"><freejoint/>'
            '<geom type="box" size="0.1 0.1 0.1" mass="0.3"/></body>'
            for angle in np.linspace(0.0, 2 * np.pi, BOXES, endpoint=False)
        )
    }
      </worldbody>
      <actuator><motor joint="x" gear="60"/><motor joint="y" gear="60"/></actuator>
    </mujoco>
    """

    def start_episode(self) -> None:
        # the boxes start at rest, so that they fall asleep; only the ball is given a push
        self.data.qvel[2:] = 0.0

    def reward(self) -> float:
        return float(self.data.ntree_awake)

    def info(self) -> dict[str, np.ndarray]:
        return {"asleep": self.data.tree_asleep.copy()}
