"""Decisions as pure functions of values: when to save, which checkpoints to keep."""

from simckpt.policies.keeping import KeepAll, KeepLast, KeepPolicy
from simckpt.policies.records import CheckpointFacts, Decision, Moment
from simckpt.policies.saving import AtSteps, EverySteps, SavePolicy

__all__ = [
    "AtSteps",
    "CheckpointFacts",
    "Decision",
    "EverySteps",
    "KeepAll",
    "KeepLast",
    "KeepPolicy",
    "Moment",
    "SavePolicy",
]
