"""Tools that test a training loop of your own for exactness."""

from simckpt.testing.exact_resume import (
    ExactResumeReport,
    InexactResumeError,
    UncoveredStateWarning,
    assert_exact_resume,
)

__all__ = ["ExactResumeReport", "InexactResumeError", "UncoveredStateWarning", "assert_exact_resume"]
