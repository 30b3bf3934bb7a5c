"""`make_vec`: `gymnasium.make_vec` whose result can be saved."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import gymnasium as gym
from gymnasium.envs.registration import EnvSpec, VectorizeMode

from simckpt.sim.vector import SnapshotVectorEnv
from simckpt.sim.worker import async_worker


def make_vec(
    id: str | EnvSpec,
    num_envs: int = 1,
    vectorization_mode: VectorizeMode | str | None = None,
    vector_kwargs: dict[str, Any] | None = None,
    wrappers: Sequence[Callable[[gym.Env[Any, Any]], gym.Wrapper[Any, Any, Any, Any]]] | None = None,
    **kwargs: Any,
) -> SnapshotVectorEnv:
    """Returns `gymnasium.make_vec(...)` as a `SnapshotVectorEnv`, its workers (if any) able to hand out their state.

    Args:
        id: as in gymnasium, and so are the others.
        num_envs: number of sub-environments.
        vectorization_mode: "sync", "async", "vector_entry_point", or None for what the id prefers.
        vector_kwargs: arguments of the vector env; a `worker` given here is left alone (and then has to speak simckpt's
            protocol, for the result is refused otherwise).
        wrappers: applied to each sub-environment.
        **kwargs: arguments of the sub-environments.

    Raises:
        UnsupportedStateError: the env holds something that can be neither saved nor ignored.
    """
    spec_kwargs = id.kwargs if isinstance(id, EnvSpec) else {}
    # a spec may carry these arguments itself, and then gymnasium lets them win
    mode = spec_kwargs.get("vectorization_mode", vectorization_mode)
    if mode is not None and mode in (VectorizeMode.ASYNC, VectorizeMode.ASYNC.value):
        vector_kwargs = {"worker": async_worker, **(vector_kwargs or {})}
        if "vector_kwargs" in spec_kwargs:
            id = copy.deepcopy(id)
            assert isinstance(id, EnvSpec)
            id.kwargs["vector_kwargs"] = {"worker": async_worker, **id.kwargs["vector_kwargs"]}
    envs = gym.make_vec(id, num_envs, vectorization_mode, vector_kwargs, wrappers, **kwargs)
    try:
        return SnapshotVectorEnv(envs)
    except BaseException:
        envs.close()
        raise
