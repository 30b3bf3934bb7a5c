"""Tools that test a training loop of your own, or an adapter for a replay buffer of your own, for exactness."""

from simckpt.testing.exact_resume import (
    ExactResumeReport,
    InexactResumeError,
    UncoveredStateWarning,
    assert_exact_resume,
)
from simckpt.testing.exact_rollback import ExactRollbackReport, InexactRollbackError, assert_exact_rollback
from simckpt.testing.replay_conformance import NonconformingAdapterError, ReplayAdapterSuite, check_adapter

__all__ = [
    "ExactResumeReport",
    "ExactRollbackReport",
    "InexactResumeError",
    "InexactRollbackError",
    "NonconformingAdapterError",
    "ReplayAdapterSuite",
    "UncoveredStateWarning",
    "assert_exact_resume",
    "assert_exact_rollback",
    "check_adapter",
]
