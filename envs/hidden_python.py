"""State in plain Python: queues, records, closures, generators half read, names that share one object."""

import collections
import enum
import functools
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from envs.base import CART, SmallEnv


class Phase(enum.Enum):
    """What the env is doing; moves on at odd moments."""

    WAIT = "wait"
    PUSH = "push"
    REST = "rest"


class Wind(NamedTuple):
    """A gust: immutable, so that it can only be replaced."""

    strength: float
    steps: int


@dataclass
class Obstacle:
    """One of a changing number of obstacles."""

    position: np.ndarray
    age: int = 0


@dataclass
class Course:
    """Nested records: a list of obstacles that grows and shrinks, and the one nearest (an alias into the list)."""

    obstacles: list[Obstacle] = field(default_factory=list)
    nearest: Obstacle | None = None
    seen: set[int] = field(default_factory=set)


class Meter:
    """A running mean in slots, with a way back to its env (a cycle)."""

    __slots__ = ("count", "mean", "owner")

    def __init__(self, owner: SmallEnv) -> None:
        self.owner = owner
        self.count = 0
        self.mean = np.zeros(2)

    def update(self, value: np.ndarray) -> None:
        """Moves the mean in place."""
        self.count += 1
        self.mean += (value - self.mean) / self.count


def make_filter() -> Callable[[float], float]:
    """Returns a smoothing filter whose memory is a closure's."""
    level = 0.0

    def smooth(value: float) -> float:
        nonlocal level
        level = 0.9 * level + 0.1 * value
        return level

    return smooth


def leak(weights: np.ndarray, rate: float) -> float:
    """Returns the sum of `weights` after letting some of it leak away, in place."""
    weights *= 1.0 - rate
    return float(weights.sum())


class HiddenPythonEnv(SmallEnv):
    """A cart whose rewards depend on Python objects of most kinds that envs are seen to keep."""

    xml = CART

    def __init__(self) -> None:
        super().__init__()
        self.recent: collections.deque[float] = collections.deque(maxlen=5)
        self.course = Course()
        self.phase = Phase.WAIT
        self.wind = Wind(0.0, 3)
        self.meter = Meter(self)
        self.smooth = make_filter()
        self.weights = np.ones(3)
        self.same_weights = self.weights
        self.first_weight = self.weights[:1]
        self.leak = functools.partial(leak, self.weights, rate=0.01)
        self.counts: collections.Counter[str] = collections.Counter()
        self.by_number: collections.defaultdict[int, list[float]] = collections.defaultdict(list)
        self.order: collections.OrderedDict[tuple[int, int], float] = collections.OrderedDict()
        self.big = 1 << 70
        self.legacy_rng = np.random.RandomState(3)
        self.half_read_rng = np.random.default_rng(4)
        self.python_rng = random.Random(5)
        self.goal_rng = self.half_read_rng
        self._lazy_rng: np.random.Generator | None = None

    @property
    def lazy_rng(self) -> np.random.Generator:
        """A generator that does not exist before the first use; its seed comes from the env's own stream."""
        if self._lazy_rng is None:
            self._lazy_rng = np.random.default_rng(int(self.np_random.integers(1 << 31)))
        return self._lazy_rng

    def start_episode(self) -> None:
        self.recent.clear()
        self.course = Course()
        self.order.clear()

    def before_step(self) -> None:
        # an odd number of draws: the second Gaussian and the second 32-bit half stay in the generators
        self.recent.append(float(self.legacy_rng.standard_normal()))
        draw = int(self.half_read_rng.integers(0, 1000, dtype=np.uint32))
        self.phase = list(Phase)[draw % 3]
        self.counts[self.phase.value] += 1
        self.by_number[draw % 4].append(self.python_rng.gauss(0.0, 1.0))
        self.order[(draw % 5, draw % 2)] = self.order.pop((draw % 5, draw % 2), 0.0) + 1.0
        self.big = (self.big * 3 + draw) % (1 << 80)
        if self.wind.steps == 0:
            self.wind = Wind(float(self.lazy_rng.normal()), int(self.lazy_rng.integers(2, 6)))
        self.wind = self.wind._replace(steps=self.wind.steps - 1)
        self._move_obstacles(draw)
        self.meter.update(np.array([self.data.qpos[0], draw / 1000]))
        self.weights[draw % 3] += 0.1
        self.data.qfrc_applied[0] = self.wind.strength

    def _move_obstacles(self, draw: int) -> None:
        course = self.course
        if draw % 3 == 0:
            course.obstacles.append(Obstacle(self.goal_rng.normal(size=2)))
        if len(course.obstacles) > 4 or (draw % 7 == 0 and course.obstacles):
            course.seen.add(course.obstacles.pop(0).age)
        for obstacle in course.obstacles:
            obstacle.age += 1
        course.nearest = min(course.obstacles, key=lambda obstacle: abs(obstacle.position[0]), default=None)
        if course.nearest is not None:
            course.nearest.position *= 0.9

    def reward(self) -> float:
        nearest = 0.0 if self.course.nearest is None else float(self.course.nearest.position.sum())
        crowd = sum(float(obstacle.position[0]) * obstacle.age for obstacle in self.course.obstacles)
        parts = sum(self.recent) + nearest + crowd + sum(self.course.seen) + self.smooth(self.data.qpos[0])
        parts += self.leak() + float(self.same_weights[0]) + float(self.first_weight[0]) + float(self.meter.mean.sum())
        return parts + (self.big % 1000) / 1000

    def info(self) -> dict[str, Any]:
        return {
            "phase": self.phase.value,
            "counts": dict(self.counts),
            "by_number": {str(key): sum(values) for key, values in self.by_number.items()},
            "order": list(self.order),
        }
