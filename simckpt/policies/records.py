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
        memory: what `SavePolicy.remember` returned at the last save; part of every checkpoint.
        elapsed: since the last save that was tried, or since this process began with the run [s].
        save_cost: what the last save of this process cost training [s]; None before the first.
        signal: name of the signal that asks the process to end, such as "SIGTERM".
        exception: what ends the loop, such as "ValueError: ..."; then nothing but `OnException` is due.
    """

    step: int
    previous_step: int
    metrics: Mapping[str, float] = field(default_factory=dict)
    memory: Mapping[str, float] = field(default_factory=dict)
    elapsed: float = 0.0
    save_cost: float | None = None
    signal: str | None = None
    exception: str | None = None


@dataclass(frozen=True)
class Decision:
    """A yes or no, and the reason that goes into the log."""

    due: bool
    reason: str = ""


@dataclass(frozen=True)
class CheckpointFacts:
    """The facts of one checkpoint that a keep policy may look at.

    Attributes:
        id: of the checkpoint.
        step: [env steps].
        metrics: of the save and those that came later; the later ones win.
        created: [s since 1970, UTC].
        size: what it added to the store [bytes].
        tags: its tags.
    """

    id: str
    step: int
    metrics: Mapping[str, float] = field(default_factory=dict)
    created: float = 0.0
    size: int = 0
    tags: frozenset[str] = frozenset()
