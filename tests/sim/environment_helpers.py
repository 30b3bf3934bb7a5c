"""Environments and drivers that both processes of a test import."""

import multiprocessing
import os
import tempfile
import warnings

import gymnasium as gym
import mujoco
import numpy as np
from gymnasium.wrappers import (
    DelayObservation,
    FrameStackObservation,
    NormalizeObservation,
    NormalizeReward,
    RecordEpisodeStatistics,
    StickyAction,
    TimeLimit,
)

from simckpt.sim.environment import StandaloneEnvHandle
from simckpt.state.tree import decode, encode

XML = """
<mujoco>
  <worldbody>
    <geom type="plane" size="1 1 .1"/>
    <body name="a" pos="0 0 .5"><freejoint/><geom size=".1" mass="{mass}"/></body>{more}
  </worldbody>
</mujoco>
"""


class Simulated(gym.Env):
    """A MuJoCo env with everything that hides: views, a second simulation, a model that changes, nested state."""

    def __init__(self, mass=1.0, more=""):
        self.model = mujoco.MjModel.from_xml_string(XML.format(mass=mass, more=more))
        self.data = mujoco.MjData(self.model)
        self.shadow = mujoco.MjData(mujoco.MjModel.from_xml_string(XML.format(mass=2, more="")))
        self.velocity = self.data.qvel[:3]
        self.history = []
        self.action_space = gym.spaces.Box(-1, 1, (3,))
        self.observation_space = gym.spaces.Dict(x=gym.spaces.Box(-np.inf, np.inf, (3,)), n=gym.spaces.Discrete(5))

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        mujoco.mj_resetData(self.model, self.data)
        self.velocity[:] = self.np_random.normal(size=3)
        self.model.body_mass[1] = self.np_random.uniform(0.5, 2)
        self.history.clear()
        return self._observe(), {}

    def step(self, action):
        self.data.xfrc_applied[1, :3] = action
        self.velocity += 0.01 * self.np_random.normal(size=3)
        mujoco.mj_step(self.model, self.data)
        self.shadow.qfrc_applied[:3] = self.data.xpos[1]
        mujoco.mj_step(self.shadow.model, self.shadow)
        self.last = self._observe()
        self.history.append(self.last)
        return self.last, float(self.shadow.qpos[2]), False, len(self.history) >= 50, {}

    def _observe(self):
        return {"x": self.data.xpos[1].copy(), "n": int(self.np_random.integers(5))}


class SharedSpaces(Simulated):
    """Keeps its spaces, and with them their generators, on the class."""

    action_space = gym.spaces.Box(-1, 1, (3,))

    def __init__(self):
        super().__init__()
        del self.action_space


class Recompiling(Simulated):
    """Replaces its simulation at every reset, as composer environments do; by one of other sizes if told to."""

    def reset(self, *, seed=None, options=None):
        self.model = mujoco.MjModel.from_xml_string(
            XML.format(mass=1 + (seed or 0) / 10, more=(options or {}).get("more", ""))
        )
        self.data = mujoco.MjData(self.model)
        self.velocity = self.data.qvel[:3]
        return super().reset(seed=seed)


def make_chain(env_id="Ant-v5"):
    env = StickyAction(gym.make(env_id), 0.3)
    env = FrameStackObservation(DelayObservation(env, 2), 3, padding_type="reset")
    env = RecordEpisodeStatistics(NormalizeReward(NormalizeObservation(env)))
    return TimeLimit(env, 90)


def make(name):
    warnings.simplefilter("ignore")
    gym.logger.min_level = gym.logger.ERROR
    if name.startswith(("Adroit", "AntMaze")):
        import gymnasium_robotics

        gym.register_envs(gymnasium_robotics)
    makers = {"chain": make_chain, "simulated": Simulated, "shared": SharedSpaces, "recompiling": Recompiling}
    return makers[name]() if name in makers else gym.make(name)


def canonical(value):
    """Bits of nested values; the wall-clock entry of RecordEpisodeStatistics is exempt."""
    if isinstance(value, dict):
        return {key: canonical(item) for key, item in value.items() if key != "t"}
    if isinstance(value, list | tuple):
        return [canonical(item) for item in value]
    array = np.asarray(value)
    return repr(value) if array.dtype.hasobject else (array.dtype.str, array.shape, array.tobytes())


def drive(env, steps, seed):
    """Steps with actions of a stream of their own; ends with samples of the spaces' generators."""
    stream = np.random.default_rng(seed)
    rows = []
    space = env.action_space
    for _ in range(steps):
        if isinstance(space, gym.spaces.Discrete):
            action = int(stream.integers(space.n))
        else:
            action = stream.uniform(np.maximum(space.low, -1), np.minimum(space.high, 1)).astype(space.dtype)
        result = env.step(action)
        rows.append(canonical(result))
        if result[2] or result[3]:
            rows.append(canonical(env.reset()))
    rows.append(canonical((env.action_space.sample(), env.observation_space.sample())))
    return rows


def record(name, steps=137, more=60):
    """Returns the encoded state after `steps` steps and what the undisturbed env does after it."""
    env = make(name)
    env.reset(seed=3)
    env.action_space.seed(1)
    handle = StandaloneEnvHandle(env)
    drive(env, steps, seed=0)
    encoded = encode(handle.capture())
    return encoded, drive(env, more, seed=9)


def resume(name, encoded, more=60):
    """Restores into an env of another seed that has been stepped, and returns what it does then."""
    env = make(name)
    env.reset(seed=77)
    handle = StandaloneEnvHandle(env)
    drive(env, 7, seed=5)
    handle.apply(decode(encoded.leaves, encoded.structure))
    return drive(env, more, seed=9)


def in_other_process(function, *args):
    # mujoco writes its warnings to a file in the current folder
    folder = tempfile.gettempdir()
    with multiprocessing.get_context("spawn").Pool(1, os.chdir, (folder,)) as pool:
        return pool.apply(function, args)
