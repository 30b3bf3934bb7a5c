"""What the tests of vector envs share."""

import collections
import json
import random
from pathlib import Path

import gymnasium as gym
import numpy as np

from simckpt.sim.worker import async_worker
from simckpt.state.tree import Leaf, decode, encode


def assert_same(one, other, path="$"):
    """Asserts that two nested results are equal in type, shape, dtype and bits."""
    if isinstance(one, dict):
        assert isinstance(other, dict), path
        assert list(one) == list(other), path
        for key in one:
            assert_same(one[key], other[key], f"{path}[{key!r}]")
    elif isinstance(one, list | tuple):
        assert isinstance(other, list | tuple), path
        assert len(one) == len(other), path
        for index, (a, b) in enumerate(zip(one, other, strict=True)):
            assert_same(a, b, f"{path}[{index}]")
    elif isinstance(one, np.ndarray) and one.dtype == object:
        assert one.shape == other.shape, path
        assert_same(one.ravel().tolist(), other.ravel().tolist(), path)
    elif isinstance(one, np.ndarray | np.generic | float):
        a, b = np.asarray(one), np.asarray(other)
        assert (a.dtype, a.shape) == (b.dtype, b.shape), path
        assert a.tobytes() == b.tobytes(), f"{path}: {a} != {b}"
    else:
        assert type(one) is type(other), path
        assert one == other, path


class Walk(gym.Env):
    """A cheap env with hidden state of many kinds; its spaces, its process and its own generator are all drawn from."""

    observation_space = None
    action_space = None

    def __init__(self, length=9, keys=False):
        self.length = length
        self.keys = keys
        box = gym.spaces.Box(-np.inf, np.inf, (3,), np.float64)
        self.observation_space = gym.spaces.Dict(place=box, done=gym.spaces.Discrete(2)) if keys else box
        self.action_space = gym.spaces.Discrete(3)
        self.history = collections.deque(maxlen=4)
        self.place = np.zeros(3)
        self.alias = self.place
        self.count = 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        if seed is not None:
            self.action_space.seed(seed)
            # Python seeds `random` anew in every forked process
            random.seed(seed)
            np.random.seed(seed)
        self.place[:] = self.np_random.normal(size=3)
        self.count = 0
        self.history.clear()
        return self._observe(), {"start": self.place[0]}

    def step(self, action):
        self.count += 1
        # the process-global streams, the env's and its space's
        self.place += [random.random(), np.random.random(), self.np_random.random()]
        self.place[0] += action + self.action_space.sample()
        self.history.append(self.place.copy())
        ended = bool(self.count >= self.length + self.np_random.integers(3))
        return self._observe(), float(self.place.sum()), ended, False, {"mean": np.mean(self.history, axis=0)}

    def _observe(self):
        return {"place": self.alias, "done": np.int64(self.count % 2)} if self.keys else self.alias


class Turn(Walk):
    """A sub-class with attributes of its own."""

    def __init__(self, length=9, keys=False):
        super().__init__(length, keys)
        self.turns = [np.zeros(2), {"left": 0}]

    def step(self, action):
        self.turns[0] += action
        self.turns[1]["left"] += 1
        observation, reward, *rest = super().step(action)
        return observation, reward + self.turns[0].sum() + self.turns[1]["left"], *rest


def build(kind, env_fns, **kwargs):
    """Returns a vector env of kind "sync", "shared" or "piped"."""
    if kind == "sync":
        return gym.vector.SyncVectorEnv(env_fns, **kwargs)
    return gym.vector.AsyncVectorEnv(env_fns, shared_memory=kind == "shared", worker=async_worker, **kwargs)


def through_file_form(state):
    """Returns the state as it comes back from a checkpoint."""
    encoded = encode(state)
    return decode(encoded.leaves, encoded.structure)


def actions_for(envs, steps, seed=0):
    """Returns actions that do not depend on the spaces' generators."""
    rng = np.random.default_rng(seed)
    space = envs.action_space
    if isinstance(space, gym.spaces.Box):
        return [rng.uniform(-0.4, 0.4, space.shape).astype(space.dtype) for _ in range(steps)]
    return [rng.integers(0, space.nvec) for _ in range(steps)]


def without_clock(result):
    """Returns a step result without the one field that is read from the clock."""
    *rest, infos = result
    if isinstance(infos, dict) and "episode" in infos:
        infos = {**infos, "episode": {k: v for k, v in infos["episode"].items() if k != "t"}}
    return [*rest, infos]


def save_encoded(path, encoded):
    """Writes a state in file form to a folder."""
    path.mkdir()
    meta = {}
    for index, (place, leaf) in enumerate(encoded.leaves.items()):
        np.save(path / f"{index}.npy", leaf.data, allow_pickle=False)
        meta[place] = [index, leaf.dtype, list(leaf.shape), leaf.kind]
    (path / "meta.json").write_text(json.dumps(meta))
    (path / "structure").write_bytes(encoded.structure)


def load_encoded(path):
    """Returns the state that `save_encoded` wrote."""
    path = Path(path)
    leaves = {}
    for place, (index, dtype, shape, kind) in json.loads((path / "meta.json").read_text()).items():
        leaves[place] = Leaf(np.load(path / f"{index}.npy"), dtype, tuple(shape), kind)
    return decode(leaves, (path / "structure").read_bytes())


def save_results(path, results):
    """Writes step results to a folder."""
    save_encoded(Path(path), encode(results))


def load_results(path):
    """Returns the step results of a folder."""
    return load_encoded(path)
