"""State on the other side of a link: a cart-pole whose motor and encoder are a device."""

from typing import Any

import mujoco
import numpy as np
from gymnasium.spaces import Box

from envs.base import SmallEnv
from envs.motor import Motor
from simckpt.hardware import Link, Pace, Simulated

FORCE = 10.0  # at an action of 1 [N]
STEP = 0.002  # [s]
FALLEN = 0.8  # [rad]
PATIENCE = 0.02  # for a reading, without a rate [s]


class CartPoleInTheLoopEnv(SmallEnv):
    """A cart-pole in MuJoCo, pushed by a motor that is not: the wanted force goes out, the delivered one comes back.

    A step sends the wanted force and the cart's position, and applies the newest force that came back. If none did, the
    last one holds, and `info["held"]` says so. The observation holds positions and velocities of the simulation, and
    the force and the position that the device measured.

    Args:
        link: to a `Motor`; without it, one to a model of it in this process.
        rate: [steps/s], for a real device; 500 is real time. Without it a step waits for its reading alone.
    """

    xml = f"""
    <mujoco>
      <option timestep="{STEP / 2}"/>
      <worldbody>
        <geom name="left" type="box" pos="-1.2 0 0" size="0.1 0.1 0.1"/>
        <geom name="right" type="box" pos="1.2 0 0" size="0.1 0.1 0.1"/>
        <body name="cart">
          <joint name="slider" type="slide" axis="1 0 0" damping="0.1"/>
          <geom name="cart" type="box" size="0.1 0.08 0.05" mass="1"/>
          <body name="pole" pos="0 0 0.05">
            <joint name="hinge" axis="0 1 0" damping="0.002"/>
            <geom name="pole" type="capsule" fromto="0 0 0 0 0 0.6" size="0.02" mass="0.1" contype="0" conaffinity="0"/>
          </body>
        </body>
      </worldbody>
      <actuator><motor joint="slider"/></actuator>
    </mujoco>
    """

    def __init__(self, link: Link | None = None, rate: float | None = None) -> None:
        if link is None:
            link = Link(Simulated(Motor(), period=STEP), command=Motor.command, reading=Motor.reading, name="motor")
        self.link = link
        self.pace = Pace(rate)
        self.force = 0.0
        self.position = 0.0
        self.held = False
        super().__init__()
        self.action_space = Box(-1.0, 1.0, (1,), np.float64)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        observation, info = super().reset(seed=seed, options=options)
        self.pace.start()
        return observation, info

    def start_episode(self) -> None:
        self.data.qvel[:] *= 0.1
        # what has come since the last step of the episode before is old
        self.link.receive_newest()
        self.force, self.position = 0.0, float(self.data.qpos[0])
        self._exchange(0.0)

    def step(self, action: np.ndarray) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        # a replay goes as fast as it can
        if self.link.source is None:
            self.pace.wait()
        self._exchange(FORCE * float(np.clip(action[0], -1.0, 1.0)))
        self.data.ctrl[:] = self.force
        mujoco.mj_step(self.model, self.data, 2)
        fallen = bool(abs(self.data.qpos[1]) > FALLEN)
        return self._get_obs(), 0.0 if fallen else 1.0, fallen, False, self.info()

    def _exchange(self, wanted: float) -> None:
        self.link.send((wanted, self.data.qpos[0]))
        reading = self.link.receive_newest(PATIENCE if self.pace.rate is None else 0.0)
        self.held = reading is None
        if reading is not None:
            self.force, self.position = (float(value) for value in reading.values)

    def _get_obs(self) -> np.ndarray:
        return np.concatenate([super()._get_obs(), [self.force, self.position]])

    def info(self) -> dict[str, Any]:
        return {"held": self.held}

    @property
    def dt(self) -> float:
        """The time of a step [s]."""
        return STEP

    def arm(self) -> None:
        """Lets the device move again, after a restore."""
        self.link.arm()

    def close(self) -> None:
        self.link.close()
        super().close()
