"""Save, branch and roll back whole reinforcement-learning training runs, simulators included, bit for bit."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

# notes how the process's random streams look before the program seeds them
import simckpt.state.streams  # noqa: F401

if TYPE_CHECKING:
    from simckpt.checkpoint import Checkpoint
    from simckpt.checkpointer import Checkpointer
    from simckpt.errors import (
        ReplayWarning,
        SaveFailedWarning,
        SimckptError,
        SimckptWarning,
        UpkeepWarning,
        VersionWarning,
    )
    from simckpt.policies import (
        AtSteps,
        EveryMinutes,
        EverySteps,
        KeepAll,
        KeepBest,
        KeepEvery,
        KeepLast,
        KeepTagged,
        MaxBytes,
        OnBest,
        OnException,
        OnSignal,
        OverheadBudget,
    )
    from simckpt.replay import ReplayBuffer, register_replay_adapter
    from simckpt.run import Run
    from simckpt.signals import EXIT_REQUEUE
    from simckpt.sim import SnapshotEnv, SnapshotVectorEnv, async_worker, make_vec, register_adapter, register_stateless
    from simckpt.state import LoopState, RNGStreams
    from simckpt.store import Store

# the names live in modules that are imported when first used, so that `import simckpt` needs neither torch nor mujoco
_MODULES = {
    "AtSteps": "policies",
    "Checkpoint": "checkpoint",
    "Checkpointer": "checkpointer",
    "EXIT_REQUEUE": "signals",
    "EveryMinutes": "policies",
    "EverySteps": "policies",
    "KeepAll": "policies",
    "KeepBest": "policies",
    "KeepEvery": "policies",
    "KeepLast": "policies",
    "KeepTagged": "policies",
    "LoopState": "state",
    "MaxBytes": "policies",
    "OnBest": "policies",
    "OnException": "policies",
    "OnSignal": "policies",
    "OverheadBudget": "policies",
    "RNGStreams": "state",
    "ReplayBuffer": "replay",
    "ReplayWarning": "errors",
    "Run": "run",
    "SaveFailedWarning": "errors",
    "SimckptError": "errors",
    "SimckptWarning": "errors",
    "SnapshotEnv": "sim",
    "SnapshotVectorEnv": "sim",
    "Store": "store",
    "UpkeepWarning": "errors",
    "VersionWarning": "errors",
    "async_worker": "sim",
    "make_vec": "sim",
    "register_adapter": "sim",
    "register_replay_adapter": "replay",
    "register_stateless": "sim",
}

__version__ = "0.1.0"
__all__ = [
    "AtSteps",
    "Checkpoint",
    "Checkpointer",
    "EXIT_REQUEUE",
    "EveryMinutes",
    "EverySteps",
    "KeepAll",
    "KeepBest",
    "KeepEvery",
    "KeepLast",
    "KeepTagged",
    "LoopState",
    "MaxBytes",
    "OnBest",
    "OnException",
    "OnSignal",
    "OverheadBudget",
    "RNGStreams",
    "ReplayBuffer",
    "ReplayWarning",
    "Run",
    "SaveFailedWarning",
    "SimckptError",
    "SimckptWarning",
    "SnapshotEnv",
    "SnapshotVectorEnv",
    "Store",
    "UpkeepWarning",
    "VersionWarning",
    "async_worker",
    "make_vec",
    "register_adapter",
    "register_replay_adapter",
    "register_stateless",
]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        value = getattr(importlib.import_module(f"simckpt.{_MODULES[name]}"), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module 'simckpt' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
