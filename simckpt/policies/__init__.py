"""Decisions as pure functions of values: when to save, which checkpoints to keep."""

from simckpt.policies.ending import OnException, OnSignal, grace_of, signals_of
from simckpt.policies.keeping import KeepAll, KeepBest, KeepEvery, KeepLast, KeepPolicy, KeepTagged, MaxBytes
from simckpt.policies.records import CheckpointFacts, Decision, Moment
from simckpt.policies.retention import Verdict, retain
from simckpt.policies.saving import AtSteps, EveryMinutes, EverySteps, OnBest, OverheadBudget, SavePolicy

__all__ = [
    "AtSteps",
    "CheckpointFacts",
    "Decision",
    "EveryMinutes",
    "EverySteps",
    "KeepAll",
    "KeepBest",
    "KeepEvery",
    "KeepLast",
    "KeepPolicy",
    "KeepTagged",
    "MaxBytes",
    "Moment",
    "OnBest",
    "OnException",
    "OnSignal",
    "OverheadBudget",
    "SavePolicy",
    "Verdict",
    "grace_of",
    "retain",
    "signals_of",
]
