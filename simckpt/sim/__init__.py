"""Simulators: exact snapshots of MuJoCo and Gymnasium envs, wrapper chains and vector envs, in place.

The names below load gymnasium and mujoco when they are first used, not when `simckpt` is imported.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from simckpt.sim.dispatch import handle_for
    from simckpt.sim.environment import EnvHandle, SnapshotEnv
    from simckpt.sim.make import make_vec
    from simckpt.sim.resources import register_adapter, register_stateless
    from simckpt.sim.vector import SnapshotVectorEnv, VectorEnvHandle
    from simckpt.sim.worker import async_worker

_HOMES = {
    "EnvHandle": "environment",
    "SnapshotEnv": "environment",
    "SnapshotVectorEnv": "vector",
    "VectorEnvHandle": "vector",
    "async_worker": "worker",
    "handle_for": "dispatch",
    "make_vec": "make",
    "register_adapter": "resources",
    "register_stateless": "resources",
}

__all__ = [
    "EnvHandle",
    "SnapshotEnv",
    "SnapshotVectorEnv",
    "VectorEnvHandle",
    "async_worker",
    "handle_for",
    "make_vec",
    "register_adapter",
    "register_stateless",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"simckpt.sim.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
