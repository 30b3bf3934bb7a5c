"""State that cannot be copied: it is refused by name, unless the env says itself how to save it."""

import socket
from collections.abc import Iterator
from typing import Any

import numpy as np

from envs.base import CART, SmallEnv


class OpenSocketEnv(SmallEnv):
    """A cart whose pushes come through a socket: what is under way in it belongs to the kernel."""

    xml = CART

    def __init__(self) -> None:
        super().__init__()
        self.near, self.far = socket.socketpair()

    def before_step(self) -> None:
        self.far.send(self.np_random.integers(0, 256, 2, dtype=np.uint8).tobytes())
        self.data.qfrc_applied[0] = self.near.recv(1)[0] / 128 - 1

    def close(self) -> None:
        self.near.close()
        self.far.close()
        super().close()


class PythonGeneratorEnv(SmallEnv):
    """A cart whose pushes come from a Python generator: its frame can be neither copied nor restored."""

    xml = CART

    def __init__(self) -> None:
        super().__init__()
        self.pushes = self._make_pushes()

    def _make_pushes(self) -> Iterator[float]:
        level = 0.0
        while True:
            level = 0.9 * level + self.np_random.normal(0.0, 0.2)
            yield level

    def before_step(self) -> None:
        self.data.qfrc_applied[0] = next(self.pushes)


class OwnStateDictEnv(PythonGeneratorEnv):
    """The same cart with a way out: its own `state_dict` and `load_state_dict`, as torch writes them.

    It counts the pushes and seeds each generator it makes, so that a fresh one can be wound forward to the same place.
    """

    def __init__(self) -> None:
        super().__init__()
        self.taken = 0

    def _make_pushes(self) -> Iterator[float]:
        rng = np.random.default_rng(5)
        level = 0.0
        while True:
            level = 0.9 * level + rng.normal(0.0, 0.2)
            yield level

    def before_step(self) -> None:
        super().before_step()
        self.taken += 1

    def state_dict(self) -> dict[str, Any]:
        """Returns all that the next step depends on."""
        return {
            "physics": {"qpos": self.data.qpos.copy(), "qvel": self.data.qvel.copy(), "time": self.data.time},
            "taken": self.taken,
            "rng": self.np_random.bit_generator.state,
            "spaces": [space.np_random.bit_generator.state for space in (self.action_space, self.observation_space)],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Puts the env where `state` was taken."""
        self.data.qpos[:] = state["physics"]["qpos"]
        self.data.qvel[:] = state["physics"]["qvel"]
        self.data.time = state["physics"]["time"]
        self.pushes = self._make_pushes()
        self.taken = state["taken"]
        for _ in range(self.taken):
            next(self.pushes)
        self.np_random.bit_generator.state = state["rng"]
        for space, rng in zip((self.action_space, self.observation_space), state["spaces"], strict=True):
            space.np_random.bit_generator.state = rng
