"""What policies decide from, and what they return."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Moment:
    """The facts of one call of `Checkpointer.step`.

    Attributes:
        step: the step the loop has reached [env steps].
        previous_step: the step of the last save that was tried, or the step the run started from [env steps].
        metrics: the metrics of this call.
    """

    step: int
    previous_step: int
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Decision:
    """A yes or no, and the reason that goes into the log."""

    due: bool
    reason: str = ""


@dataclass(frozen=True)
class CheckpointFacts:
    """The facts of one checkpoint that a keep policy may look at."""

    id: str
    step: int
    metrics: Mapping[str, float] = field(default_factory=dict)
