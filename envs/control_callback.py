"""State behind `mjcb_control`: one callback for the whole process, with memory of its own."""

from collections.abc import Callable
from typing import Any

import mujoco
import numpy as np

from envs.base import SmallEnv

Callback = Callable[[mujoco.MjModel, mujoco.MjData], None]


class Reflex:
    """Pulls on every third call and tires: its memory lies in the attributes of a bound object."""

    def __init__(self, data: mujoco.MjData) -> None:
        self._data = data
        self.calls = 0
        self.fatigue = np.zeros(1)

    def control(self, model: mujoco.MjModel, data: mujoco.MjData) -> None:
        """Adds to the motor's command; models of other envs pass here too and are left alone."""
        if data is not self._data:
            return
        self.calls += 1
        self.fatigue += 0.01 * abs(data.qvel[0])
        data.qfrc_applied[0] = (self.calls % 3 == 0) * np.exp(-self.fatigue[0])


def make_reflex(data: mujoco.MjData) -> Callback:
    """Returns the same reflex as a function whose memory lies in its closure, a noise generator included."""
    calls = 0
    fatigue = np.zeros(1)
    noise = np.random.default_rng(7)

    def control(model: mujoco.MjModel, current: mujoco.MjData) -> None:
        nonlocal calls
        if current is not data:
            return
        calls += 1
        fatigue[0] += 0.01 * abs(current.qvel[0])
        current.qfrc_applied[0] = (calls % 3 == 0) * np.exp(-fatigue[0]) + 0.1 * noise.standard_normal()

    return control


class ControlCallbackEnv(SmallEnv):
    """A pendulum under a stateful control callback.

    MuJoCo runs the callback in `mj_forward` as well, so a restore that forwards the physics has moved the callback's
    memory: that memory has to be put back last. It is never reset, not even with the episode.
    """

    xml = """
    <mujoco>
      <worldbody>
        <body pos="0 0 1">
          <joint name="hinge" axis="0 1 0" damping="0.1"/>
          <geom type="capsule" size="0.05" fromto="0 0 0 0 0 -0.5"/>
        </body>
      </worldbody>
      <actuator><motor joint="hinge" gear="1"/></actuator>
    </mujoco>
    """

    def __init__(self, *, closure: bool = False) -> None:
        """Builds the pendulum with its reflex in a closure, or in a bound object."""
        super().__init__()
        self._callback: Callback = make_reflex(self.data) if closure else Reflex(self.data).control

    def _install(self) -> None:
        if mujoco.get_mjcb_control() is not self._callback:
            mujoco.set_mjcb_control(self._callback)

    def start_episode(self) -> None:
        self._install()

    def before_step(self) -> None:
        self._install()

    def close(self) -> None:
        if mujoco.get_mjcb_control() is self._callback:
            mujoco.set_mjcb_control(None)
        super().close()

    def info(self) -> dict[str, Any]:
        return {"applied": self.data.qfrc_applied.copy()}
