"""The conformance suite: simckpt's own buffer passes it, and adapters with a fault of each kind do not."""

from __future__ import annotations

import gymnasium as gym
import numpy as np
import pytest

from simckpt.errors import UnsupportedStateError
from simckpt.replay import Column, ReplayBuffer, Ring, place_rows, register_replay_adapter
from simckpt.state import generator_state, set_generator_state
from simckpt.testing.replay_conformance import (
    NonconformingAdapterError,
    ReplayAdapterSuite,
    check_adapter,
)

BOX = gym.spaces.Box(-1, 1, (3,), np.float64)
ACTIONS = gym.spaces.Box(-1, 1, (2,), np.float32)
DICT = gym.spaces.Dict({"camera": gym.spaces.Box(0, 255, (2, 2, 3), np.uint8), "state": gym.spaces.Dict({"arm": BOX})})


def sample_space(space, rng, num_envs):
    if isinstance(space, gym.spaces.Dict):
        return {name: sample_space(part, rng, num_envs) for name, part in space.items()}
    return rng.integers(0, 256, (num_envs, *space.shape)).astype(space.dtype)


class OwnBufferSuite(ReplayAdapterSuite):
    observation_space: gym.Space = BOX
    num_envs = 1

    def make_buffer(self, capacity):
        return ReplayBuffer(capacity, self.observation_space, ACTIONS, num_envs=self.num_envs, seed=5)

    def add_rows(self, buffer, first, count):
        for number in range(first, first + count):
            rng = np.random.default_rng(number)
            num_envs = self.num_envs
            buffer.add(
                sample_space(self.observation_space, rng, num_envs),
                sample_space(ACTIONS, rng, num_envs),
                rng.normal(size=num_envs),
                rng.random(num_envs) < 0.1,
                rng.random(num_envs) < 0.1,
                sample_space(self.observation_space, rng, num_envs),
                valid=rng.random(num_envs) < 0.8,
            )

    def sample(self, buffer):
        return buffer.sample(7)


class TestOneEnv(OwnBufferSuite):
    pass


class TestFourEnvsWithDictObservations(OwnBufferSuite):
    observation_space = DICT
    num_envs = 4


class TestMemoryMapped(OwnBufferSuite):
    num_envs = 2

    @pytest.fixture(autouse=True)
    def _folder(self, tmp_path):
        self.folder = tmp_path / "rows"

    def make_buffer(self, capacity):
        return ReplayBuffer(capacity, BOX, ACTIONS, num_envs=2, seed=5, memory_map=self.folder)


class Simple:
    """A buffer as people write them: arrays, a position, a flag; it can relabel its rewards."""

    def __init__(self, capacity: int) -> None:
        self.observations = np.zeros((capacity, 2))
        self.rewards = np.zeros(capacity)
        self.position = 0
        self.full = False
        self.rng = np.random.default_rng(3)

    def add(self, observation: np.ndarray, reward: float) -> None:
        self.observations[self.position] = observation
        self.rewards[self.position] = reward
        self.position += 1
        if self.position == len(self.rewards):
            self.position, self.full = 0, True

    def relabel(self) -> None:
        self.rewards[:4] *= 2

    def sample(self):
        index = self.rng.integers(0, len(self.rewards) if self.full else self.position, 4)
        return self.observations[index], self.rewards[index]


class SimpleAdapter:
    mutable = False

    def columns(self, buffer):
        return {
            "observations": Column(buffer.observations),
            "rewards": Column(buffer.rewards, mutable=self.mutable),
        }

    def ring(self, buffer):
        capacity = len(buffer.rewards)
        return Ring(capacity, capacity if buffer.full else buffer.position, buffer.position)

    def extra(self, buffer):
        return {"rng": generator_state(buffer.rng)}

    def find_problems(self, buffer, columns, ring, extra):
        return []

    def load(self, buffer, columns, ring, extra):
        place_rows(self.columns(buffer), columns, ring)
        buffer.position = ring.cursor
        buffer.full = ring.filled == ring.capacity
        set_generator_state(buffer.rng, extra["rng"])


def add_simple(buffer, first, count):
    for number in range(first, first + count):
        rng = np.random.default_rng(number)
        buffer.add(rng.normal(size=2), float(rng.normal()))


def check_simple(cls: type, adapter) -> None:
    register_replay_adapter(cls, adapter)
    check_adapter(cls, add_simple, lambda buffer: buffer.sample(), rewrites={"relabel": cls.relabel})


@pytest.mark.parametrize("mutable", [False, True])
def test_check_adapter_accepts_a_sound_one(mutable: bool) -> None:
    class Buffer(Simple):
        pass

    class Adapter(SimpleAdapter):
        pass

    Adapter.mutable = mutable
    check_simple(Buffer, Adapter())


def test_check_adapter_sees_a_column_that_is_missing() -> None:
    class Buffer(Simple):
        pass

    class Adapter(SimpleAdapter):
        def columns(self, buffer):
            return {"observations": Column(buffer.observations)}

    with pytest.raises(NonconformingAdapterError, match="samples something else"):
        check_simple(Buffer, Adapter())


def test_check_adapter_sees_a_generator_that_is_missing() -> None:
    class Buffer(Simple):
        pass

    class Adapter(SimpleAdapter):
        def extra(self, buffer):
            return {}

        def load(self, buffer, columns, ring, extra):
            super().load(buffer, columns, ring, {"rng": generator_state(buffer.rng)})

    with pytest.raises(NonconformingAdapterError, match="samples something else"):
        check_simple(Buffer, Adapter())


def test_check_adapter_sees_a_load_that_forgets_the_cursor() -> None:
    class Buffer(Simple):
        pass

    class Adapter(SimpleAdapter):
        def load(self, buffer, columns, ring, extra):
            super().load(buffer, columns, ring, extra)
            buffer.position = 0

    with pytest.raises(NonconformingAdapterError, match="the ring was"):
        check_simple(Buffer, Adapter())


def test_check_adapter_sees_a_column_that_is_wrongly_called_sealed() -> None:
    class Buffer(Simple):
        pass

    class Adapter(SimpleAdapter):
        def columns(self, buffer):
            return {
                "observations": Column(buffer.observations),
                "rewards": Column(buffer.rewards, sealed=True),
            }

    with pytest.raises(NonconformingAdapterError, match=r"relabel|sealed"):
        check_simple(Buffer, Adapter())


def test_check_adapter_sees_rows_in_another_order() -> None:
    class Buffer(Simple):
        pass

    class Adapter(SimpleAdapter):
        def load(self, buffer, columns, ring, extra):
            super().load(buffer, columns, ring, extra)
            buffer.rewards[: ring.filled] = buffer.rewards[: ring.filled][::-1]

    with pytest.raises(NonconformingAdapterError, match="other rows of rewards"):
        check_simple(Buffer, Adapter())


def test_check_adapter_names_a_class_without_adapter() -> None:
    class Unknown(ReplayBuffer):
        pass

    with pytest.raises(UnsupportedStateError, match="no adapter"):
        check_adapter(
            lambda capacity: Unknown(capacity, BOX, ACTIONS, seed=1), lambda *_: None, lambda buffer: buffer.sample(1)
        )
