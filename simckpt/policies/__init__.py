"""Decisions as pure functions of values: when to save, which checkpoints to keep, when to roll back."""

from simckpt.policies.changes import (
    Call,
    Change,
    KeepRows,
    Reseed,
    Scale,
    SetTo,
    calls,
    kept_components,
    keys,
    new_values,
    reseeds,
)
from simckpt.policies.degradation import check_scipy
from simckpt.policies.ending import OnException, OnSignal, grace_of, signals_of
from simckpt.policies.keeping import KeepAll, KeepBest, KeepEvery, KeepLast, KeepPolicy, KeepTagged, MaxBytes
from simckpt.policies.records import (
    CheckpointFacts,
    Decision,
    Evaluation,
    Moment,
    Rollback,
    RollbackDecision,
    RollbackMoment,
)
from simckpt.policies.retention import Verdict, retain
from simckpt.policies.rollback import RollbackPolicy
from simckpt.policies.saving import AtSteps, EveryMinutes, EverySteps, OnBest, OverheadBudget, SavePolicy

__all__ = [
    "AtSteps",
    "Call",
    "Change",
    "CheckpointFacts",
    "Decision",
    "Evaluation",
    "EveryMinutes",
    "EverySteps",
    "KeepAll",
    "KeepBest",
    "KeepEvery",
    "KeepLast",
    "KeepPolicy",
    "KeepRows",
    "KeepTagged",
    "MaxBytes",
    "Moment",
    "OnBest",
    "OnException",
    "OnSignal",
    "OverheadBudget",
    "Reseed",
    "Rollback",
    "RollbackDecision",
    "RollbackMoment",
    "RollbackPolicy",
    "SavePolicy",
    "Scale",
    "SetTo",
    "Verdict",
    "calls",
    "check_scipy",
    "grace_of",
    "kept_components",
    "keys",
    "new_values",
    "reseeds",
    "retain",
    "signals_of",
]
