"""Save, branch and roll back whole reinforcement-learning training runs, simulators included, bit for bit."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

# notes how the process's random streams look before the program seeds them
import simckpt.state.streams  # noqa: F401

if TYPE_CHECKING:
    from simckpt.archive import Archive
    from simckpt.branching.engines import LocalEngine
    from simckpt.branching.fan_out import fan_out
    from simckpt.branching.hyperparameters import Hyperparameters
    from simckpt.branching.population import PopulationBasedTraining, Range
    from simckpt.branching.ray_engine import RayEngine
    from simckpt.branching.slurm import SlurmEngine
    from simckpt.checkpoint import Checkpoint
    from simckpt.checkpointer import Checkpointer
    from simckpt.comparison import compare
    from simckpt.decisions import evaluations_of
    from simckpt.errors import (
        BranchWarning,
        CoordinationError,
        DamageWarning,
        ReplayWarning,
        RollbackLimitError,
        RolledBack,
        SaveFailedWarning,
        SimckptError,
        SimckptWarning,
        UpkeepWarning,
        VersionWarning,
    )
    from simckpt.policies import (
        AtSteps,
        Call,
        EveryMinutes,
        EverySteps,
        KeepAll,
        KeepBest,
        KeepEvery,
        KeepLast,
        KeepRows,
        KeepTagged,
        MaxBytes,
        OnBest,
        OnException,
        OnSignal,
        OverheadBudget,
        Reseed,
        RollbackPolicy,
        Scale,
        SetTo,
    )
    from simckpt.replay import ReplayBuffer, register_replay_adapter
    from simckpt.rollback import supervise
    from simckpt.run import Run
    from simckpt.signals import EXIT_REQUEUE
    from simckpt.sim import SnapshotEnv, SnapshotVectorEnv, async_worker, make_vec, register_adapter, register_stateless
    from simckpt.state import LoopState, RNGStreams
    from simckpt.store import Store

# the names live in modules that are imported when first used, so that `import simckpt` needs neither torch nor mujoco
_MODULES = {
    "Archive": "archive",
    "AtSteps": "policies",
    "BranchWarning": "errors",
    "Call": "policies",
    "Checkpoint": "checkpoint",
    "Checkpointer": "checkpointer",
    "CoordinationError": "errors",
    "DamageWarning": "errors",
    "EXIT_REQUEUE": "signals",
    "EveryMinutes": "policies",
    "EverySteps": "policies",
    "Hyperparameters": "branching.hyperparameters",
    "KeepAll": "policies",
    "KeepBest": "policies",
    "KeepEvery": "policies",
    "KeepLast": "policies",
    "KeepRows": "policies",
    "KeepTagged": "policies",
    "LocalEngine": "branching.engines",
    "LoopState": "state",
    "MaxBytes": "policies",
    "OnBest": "policies",
    "OnException": "policies",
    "OnSignal": "policies",
    "OverheadBudget": "policies",
    "PopulationBasedTraining": "branching.population",
    "RNGStreams": "state",
    "Range": "branching.population",
    "RayEngine": "branching.ray_engine",
    "ReplayBuffer": "replay",
    "ReplayWarning": "errors",
    "Reseed": "policies",
    "RollbackLimitError": "errors",
    "RollbackPolicy": "policies",
    "RolledBack": "errors",
    "Run": "run",
    "SaveFailedWarning": "errors",
    "Scale": "policies",
    "SetTo": "policies",
    "SimckptError": "errors",
    "SimckptWarning": "errors",
    "SlurmEngine": "branching.slurm",
    "SnapshotEnv": "sim",
    "SnapshotVectorEnv": "sim",
    "Store": "store",
    "UpkeepWarning": "errors",
    "VersionWarning": "errors",
    "async_worker": "sim",
    "compare": "comparison",
    "evaluations_of": "decisions",
    "fan_out": "branching.fan_out",
    "make_vec": "sim",
    "register_adapter": "sim",
    "register_replay_adapter": "replay",
    "register_stateless": "sim",
    "supervise": "rollback",
}
_PACKAGES = ("hardware", "plots", "testing")

__version__ = "0.1.0"
__all__ = [
    "Archive",
    "AtSteps",
    "BranchWarning",
    "Call",
    "Checkpoint",
    "Checkpointer",
    "CoordinationError",
    "DamageWarning",
    "EXIT_REQUEUE",
    "EveryMinutes",
    "EverySteps",
    "Hyperparameters",
    "KeepAll",
    "KeepBest",
    "KeepEvery",
    "KeepLast",
    "KeepRows",
    "KeepTagged",
    "LocalEngine",
    "LoopState",
    "MaxBytes",
    "OnBest",
    "OnException",
    "OnSignal",
    "OverheadBudget",
    "PopulationBasedTraining",
    "RNGStreams",
    "Range",
    "RayEngine",
    "ReplayBuffer",
    "ReplayWarning",
    "Reseed",
    "RollbackLimitError",
    "RollbackPolicy",
    "RolledBack",
    "Run",
    "SaveFailedWarning",
    "Scale",
    "SetTo",
    "SimckptError",
    "SimckptWarning",
    "SlurmEngine",
    "SnapshotEnv",
    "SnapshotVectorEnv",
    "Store",
    "UpkeepWarning",
    "VersionWarning",
    "async_worker",
    "compare",
    "evaluations_of",
    "fan_out",
    "make_vec",
    "register_adapter",
    "register_replay_adapter",
    "register_stateless",
    "supervise",
]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        value = getattr(importlib.import_module(f"simckpt.{_MODULES[name]}"), name)
        globals()[name] = value
        return value
    if name in _PACKAGES:
        return importlib.import_module(f"simckpt.{name}")
    raise AttributeError(f"module 'simckpt' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
