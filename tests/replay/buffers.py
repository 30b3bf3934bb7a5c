"""Buffers for the tests: rows whose content follows from their number, and a ring that does not count them."""

from __future__ import annotations

import gymnasium as gym
import numpy as np

from simckpt.replay import Column, ReplayBuffer, ReplayHandle, Ring, handle_for, place_rows, register_replay_adapter

BOX = gym.spaces.Box(-np.inf, np.inf, (3,), np.float64)
ACTIONS = gym.spaces.Box(-1, 1, (2,), np.float32)
NESTED = gym.spaces.Dict({"camera": gym.spaces.Box(0, 255, (2, 2), np.uint8), "arm": gym.spaces.Dict({"angles": BOX})})


def make_own(capacity=10, *, num_envs=1, space=BOX, seed=0, memory_map=None) -> ReplayBuffer:
    return ReplayBuffer(capacity, space, ACTIONS, num_envs=num_envs, seed=seed, memory_map=memory_map)


def values_of(space, rng, num_envs):
    if isinstance(space, gym.spaces.Dict):
        return {name: values_of(part, rng, num_envs) for name, part in space.items()}
    return rng.integers(0, 256, (num_envs, *space.shape)).astype(space.dtype)


def row_of(number, *, num_envs=1, space=BOX):
    """Returns the arguments of `ReplayBuffer.add` for the row of this number."""
    rng = np.random.default_rng(number)
    return {
        "observations": values_of(space, rng, num_envs),
        "actions": values_of(ACTIONS, rng, num_envs),
        "rewards": rng.normal(size=num_envs).astype(np.float32),
        "terminated": rng.random(num_envs) < 0.2,
        "truncated": rng.random(num_envs) < 0.2,
        "next_observations": values_of(space, rng, num_envs),
        "valid": rng.random(num_envs) < 0.9,
    }


def add_own(buffer: ReplayBuffer, numbers, *, space=BOX) -> None:
    for number in numbers:
        buffer.add(**row_of(number, num_envs=buffer.num_envs, space=space))


class Uncounted:
    """A ring with a position and a flag, as SB3's, of one column; nobody counts its rows."""

    def __init__(self, capacity: int, width: int = 1) -> None:
        self.values = np.zeros((capacity, width), np.int64)
        self.position = 0
        self.full = False

    def add(self, numbers) -> None:
        for number in numbers:
            self.values[self.position] = number
            self.position += 1
            if self.position == len(self.values):
                self.position, self.full = 0, True

    def contents(self) -> list[int]:
        """Returns the numbers of the rows, oldest first."""
        slots = self.values[:, 0].tolist()
        return slots[self.position :] + slots[: self.position] if self.full else slots[: self.position]

    def clear(self) -> None:
        self.position, self.full = 0, False


class UncountedAdapter:
    def columns(self, buffer):
        return {"values": Column(buffer.values)}

    def ring(self, buffer):
        capacity = len(buffer.values)
        return Ring(capacity, capacity if buffer.full else buffer.position, buffer.position)

    def extra(self, buffer):
        return {}

    def find_problems(self, buffer, columns, ring, extra):
        return []

    def load(self, buffer, columns, ring, extra):
        place_rows(self.columns(buffer), columns, ring)
        buffer.position, buffer.full = ring.cursor, ring.filled == ring.capacity


register_replay_adapter(Uncounted, UncountedAdapter())


def handle_of(buffer) -> ReplayHandle:
    handle = handle_for(buffer, "replay")
    assert handle is not None
    return handle
