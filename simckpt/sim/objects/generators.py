"""Random generators, restored in place; and those that Gymnasium creates lazily, which are made when captured."""

# what the methods of a kind do is said once, in `Kind`
# ruff: noqa: D102

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.utils import seeding

from simckpt.errors import StateMismatchError, UnsupportedStateError
from simckpt.sim.objects.kind import Capture, Kind, Matching, Rebuild, Unsupported
from simckpt.state.nodes import UNSEEDED, ObjectState
from simckpt.state.rng import check_generator_state, generator_state, is_unseeded, new_generator, set_generator_state
from simckpt.state.walk import qualified_name

GENERATOR = "simckpt.generator"


class GeneratorKind(Kind):
    """numpy's Generator, BitGenerator and RandomState, `random.Random`, `torch.Generator`."""

    def capture(self, run: Capture, value: Any) -> Any:
        node = run.memo.get(id(value))
        if node is None:
            try:
                state = generator_state(value)
            except UnsupportedStateError as error:
                raise Unsupported(qualified_name(type(value)), str(error)) from None
            name = UNSEEDED if is_unseeded(state) else GENERATOR
            node = run.memo[id(value)] = ObjectState(name, {"state": state})
        return node

    def fits(self, matching: Matching, node: Any, live: Any) -> bool:
        try:
            check_generator_state(live, node.attributes["state"])
        except (StateMismatchError, UnsupportedStateError):
            return False
        return True

    def problem(self, matching: Matching, node: Any, live: Any) -> str | None:
        try:
            new_generator(node.attributes["state"])
        except (StateMismatchError, KeyError, ImportError) as error:
            return f"is a random generator that cannot be built: {error}"
        return None

    def create(self, rebuild: Rebuild, node: Any) -> Any:
        return new_generator(node.attributes["state"])

    def fill(self, rebuild: Rebuild, node: Any, target: Any) -> None:
        set_generator_state(target, node.attributes["state"])


def lazy_generator(cls: type) -> Callable[[dict[str, Any]], None] | None:
    """Returns what makes the generator that objects of a class create on first use, or None if they have none.

    A generator that does not exist yet would be seeded from the operating system after a restore, in every process
    differently. It is stored as Gymnasium itself does, not through the `np_random` setter, which forgets the seed.
    """
    if issubclass(cls, gym.Space):
        return _create_for_space
    if issubclass(cls, gym.Wrapper | gym.vector.VectorWrapper) or not issubclass(cls, gym.Env | gym.vector.VectorEnv):
        return None
    # an env whose np_random is its own (shimmy) never uses Gymnasium's
    owner = next(base for base in cls.__mro__ if "np_random" in base.__dict__)
    return _create_for_env if owner in (gym.Env, gym.vector.VectorEnv) else None


def _create_for_space(attributes: dict[str, Any]) -> None:
    if "_np_random" in attributes and attributes["_np_random"] is None:
        attributes["_np_random"], _ = seeding.np_random()


def _create_for_env(attributes: dict[str, Any]) -> None:
    if attributes.get("_np_random") is None:
        # -1 is Gymnasium's word for a seed that is not known
        attributes["_np_random"], _ = seeding.np_random()
        attributes["_np_random_seed"] = -1


GENERATORS = GeneratorKind()
CLASSES: tuple[type, ...] = (np.random.Generator, np.random.BitGenerator, np.random.RandomState, random.Random)
BY_NAME: dict[str, Kind] = {GENERATOR: GENERATORS, UNSEEDED: GENERATORS}
