"""What the exactness suite runs: one record per case, and how to build its env."""

import functools
import importlib
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import gymnasium as gym
from gymnasium import wrappers
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv, VectorEnv
from gymnasium.wrappers import vector as vector_wrappers

import envs

# a step number that no usual time limit divides, so that the snapshot does not fall next to a reset
ODD_STEP = 137

VECTORIZATIONS = ("sync", "async", "async_pipes")
AUTORESET_MODES = tuple(mode.name for mode in AutoresetMode)


class CannotConstructError(Exception):
    """An env that this installation cannot build: the reason is the message."""


@dataclass(frozen=True)
class Case:
    """One run that is snapshotted and continued elsewhere; plain values, so that it travels as JSON.

    Args:
        ids: the env id, or one id per sub-env of a mixed vector env.
        vectorization: none (a single env), or how the vector env runs.
        autoreset: name of Gymnasium's autoreset mode.
        chain: wraps each env in the wrappers that keep state.
        outside: wraps the vector env in the vector versions of these wrappers.
        moment: when the snapshot is taken: `fresh` (before the first reset), `reset` (right after it), `odd` (at step
            `at`) or `terminal` (at the first end of an episode after step `at`).
        at: the step meant by `moment`.
        steps: how long the run goes on after the snapshot.
        damage: undoes part of the restore, for controls that must fail: `damage.py`; `python` keeps physics alone.
        context: how workers start; None is the platform's way.
        twins: whether two runs with the same seeds equal each other; not so if the constructor draws from the system.
        kwargs: for `gym.make`.
    """

    ids: tuple[str, ...]
    vectorization: str | None = None
    autoreset: str = "NEXT_STEP"
    chain: bool = False
    outside: bool = False
    moment: str = "odd"
    at: int = ODD_STEP
    steps: int = 60
    num_envs: int = 3
    damage: str | None = None
    context: str | None = None
    twins: bool = True
    kwargs: dict[str, Any] = field(default_factory=dict)

    @property
    def uses_global_streams(self) -> bool:
        """Whether an env of this process draws from its global generators, which a run saves as `RNGStreams`."""
        in_process = self.vectorization in (None, "sync")
        return in_process and "simckpt/GlobalRandom-v0" in self.ids

    def __str__(self) -> str:
        parts = ["+".join(self.ids)]
        if self.vectorization:
            parts += [self.vectorization, self.autoreset.lower()]
        parts += [name for name, on in (("chain", self.chain), ("outside", self.outside)) if on]
        parts += [self.moment] if self.moment != "odd" else []
        parts += [f"damage={self.damage}"] if self.damage else []
        return "-".join(parts)


def case(*ids: str, **settings: Any) -> Case:
    """Returns a `Case` of these ids."""
    return Case(ids=ids, **settings)


def build(case: Case) -> gym.Env[Any, Any] | VectorEnv[Any, Any, Any]:
    """Returns the env or vector env of `case`, never reset.

    Raises:
        CannotConstructError: this installation cannot build it.
    """
    if case.vectorization is None:
        return build_single(case, 0)
    if case.vectorization == "entry_point":
        return gym.make_vec(case.ids[0], num_envs=case.num_envs, vectorization_mode="vector_entry_point")
    build_single(case, 0).close()
    functions = [_env_function(case, index) for index in range(case.num_envs)]
    mode = AutoresetMode[case.autoreset]
    if case.vectorization == "sync":
        vector: VectorEnv[Any, Any, Any] = SyncVectorEnv(functions, autoreset_mode=mode)
    else:
        from simckpt.sim.worker import async_worker

        shared_memory = case.vectorization == "async"
        vector = AsyncVectorEnv(
            functions,
            shared_memory=shared_memory,
            context=case.context,
            worker=async_worker,
            autoreset_mode=mode,
        )
    if case.outside:
        # a key of its own: inside, the chain's wrapper may have used "episode"
        vector = vector_wrappers.RecordEpisodeStatistics(vector, stats_key="outer_episode")
        vector = vector_wrappers.NormalizeReward(vector)
        if mode is AutoresetMode.NEXT_STEP:  # the only mode that it accepts
            vector = vector_wrappers.NormalizeObservation(vector)
    return vector


def _env_function(case: Case, index: int) -> Callable[[], gym.Env[Any, Any]]:
    return functools.partial(build_single, case, index)


def build_single(case: Case, index: int) -> gym.Env[Any, Any]:
    """Returns the env of one place of the vector (a single env is place 0)."""
    env_id = case.ids[index % len(case.ids)]
    settings: dict[str, Any] = dict(case.kwargs)
    limit = None
    if case.vectorization or case.chain:
        # the places of a vector end their episodes at different steps, so that autoresets are pending one by one
        limit = 41 + 6 * index
        settings["max_episode_steps"] = -1
    env = make(env_id, **settings)
    if limit is not None:
        env = wrappers.TimeLimit(env, limit)
    return _wrapped_in_chain(env) if case.chain else env


def make(env_id: str, **settings: Any) -> gym.Env[Any, Any]:
    """Returns `gym.make(env_id)`, deprecated ids included.

    Raises:
        CannotConstructError: with the reason.
    """
    assert envs.ENTRY_POINTS  # importing the package registers its ids
    _import_registrations(env_id)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return gym.make(env_id, **settings)
        except (gym.error.Error, ImportError) as error:
            raise CannotConstructError(f"{env_id}: {type(error).__name__}: {error}") from error
        except ValueError as error:
            if "XML Error" in str(error) or "engine error" in str(error):  # a model for a newer MuJoCo
                raise CannotConstructError(f"{env_id}: {error}") from error
            raise


def _import_registrations(env_id: str) -> None:
    if env_id.startswith("dm_control/"):
        importlib.import_module("shimmy")
    elif env_id not in gym.registry:
        importlib.import_module("gymnasium_robotics")


def _wrapped_in_chain(env: gym.Env[Any, Any]) -> gym.Env[Any, Any]:
    env = wrappers.StickyAction(env, repeat_action_probability=0.3, repeat_action_duration=(1, 3))
    env = wrappers.DelayObservation(env, delay=3)
    env = wrappers.FrameStackObservation(env, stack_size=3)
    env = wrappers.NormalizeObservation(env)
    env = wrappers.NormalizeReward(env)
    return wrappers.RecordEpisodeStatistics(env)


def gymnasium_mujoco_ids() -> list[str]:
    """Returns every v4 and v5 id of Gymnasium's own MuJoCo envs, from the registry."""
    return sorted(
        env_id
        for env_id, spec in gym.registry.items()
        if str(spec.entry_point).startswith("gymnasium.envs.mujoco") and spec.version in (4, 5)
    )
