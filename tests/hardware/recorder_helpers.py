"""Envs whose every value follows from what was done to them, and what they were seen to return."""

from typing import Any

import gymnasium as gym
import numpy as np

from simckpt.hardware import Link, Simulated


class Counting(gym.Env):
    """A small env without a simulator; its observation is one array that it changes in place, as drivers do."""

    observation_space = gym.spaces.Box(-np.inf, np.inf, (3,), np.float64)
    action_space = gym.spaces.Box(-1, 1, (2,), np.float32)

    def __init__(self, link: Link | None = None) -> None:
        self.link = link
        self.steps = 0
        self.place = np.zeros(3)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.place[:] = self.np_random.standard_normal(3)
        self.steps = 0
        if self.link is not None:
            self.link.receive_newest()
        return self.place, {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.steps += 1
        if self.link is not None:
            self.link.send((float(action[0]),))
            reading = self.link.receive()
            self.place[2] = 0.0 if reading is None else reading.values[1]
        self.place[:2] += 0.1 * action
        action *= 0  # an env may do so
        return self.place, float(self.place.sum()), self.steps == 40, self.steps % 7 == 6, {"steps": self.steps}


def device(command: Any, time: int) -> tuple[float, float] | None:
    """Answers to a command, and is silent without one."""
    return None if command is None else (float(command[0]) / 3, float(command[0]) / 7)


def counting() -> Counting:
    """Returns an env with a device in this process."""
    return Counting(Link(Simulated(device, period=0.001), command=("force",), reading=("force", "place"), name="motor"))


class Seen:
    """Steps an env as a policy would, and keeps what that saw."""

    def __init__(self, env: Any, seed: int = 0) -> None:
        self.env = env
        self.rng = np.random.default_rng(seed)
        self.actions: list[np.ndarray] = []
        self.observations: list[np.ndarray] = []
        self.rewards: list[float] = []
        self.ends: list[tuple[bool, bool]] = []

    def run(self, steps: int) -> None:
        for _ in range(steps):
            action = self.rng.uniform(-1, 1, 2).astype(np.float32)
            self.actions.append(action.copy())
            observation, reward, terminated, truncated, _ = self.env.step(action)
            self.observations.append(observation.copy())
            self.rewards.append(reward)
            self.ends.append((terminated, truncated))

    def assert_recorded(self, rows: dict[str, Any], *, start: int = 0) -> None:
        """Every bit of what was seen is in the table of rows."""
        stop = start + len(rows["row"])
        assert rows["row"].tolist() == list(range(start, stop))
        assert rows["action"].tobytes() == np.array(self.actions[start:stop]).tobytes()
        assert rows["observation"].tobytes() == np.array(self.observations[start:stop]).tobytes()
        assert rows["reward"].tobytes() == np.array(self.rewards[start:stop]).tobytes()
        assert list(zip(rows["terminated"].tolist(), rows["truncated"].tolist(), strict=True)) == self.ends[start:stop]
