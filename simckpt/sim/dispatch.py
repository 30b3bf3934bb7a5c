"""`handle_for`: which handle captures and restores an object of Gymnasium's."""

from __future__ import annotations

from typing import Any

import gymnasium as gym

from simckpt.sim.environment import SnapshotEnv, StandaloneEnvHandle
from simckpt.sim.vector import SnapshotVectorEnv, VectorEnvHandle


def handle_for(obj: Any, path: str = "envs") -> StandaloneEnvHandle | VectorEnvHandle | None:
    """Returns the handle of an env or vector env, and None for anything else.

    Args:
        obj: any object; wrapped as you like, the outermost wrapper that is stepped.
        path: its name in messages.

    Raises:
        UnsupportedStateError: an env that cannot be captured.
    """
    if isinstance(obj, SnapshotVectorEnv | gym.vector.VectorEnv):
        return VectorEnvHandle(obj, path)
    if isinstance(obj, SnapshotEnv):
        # transparent: its own state_dict is that of the env inside
        return StandaloneEnvHandle(obj.env, path)
    return StandaloneEnvHandle(obj, path) if isinstance(obj, gym.Env) else None
