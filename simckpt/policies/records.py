"""What policies decide from, and what they return."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from simckpt.policies.changes import Change


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


@dataclass(frozen=True)
class Evaluation:
    """The returns of the episodes of one evaluation.

    Attributes:
        step: where it was made [env steps].
        returns: one for each episode; at least one. A loop that knows nothing but their mean has one.
    """

    step: int
    returns: tuple[float, ...]

    @cached_property
    def mean(self) -> float:
        """The mean return."""
        return math.fsum(self.returns) / len(self.returns)


@dataclass(frozen=True)
class Rollback:
    """A rollback that was done; a run remembers all of them, also those before the one that it goes back to now.

    Attributes:
        step: where it was decided [env steps].
        target_step: where the run went on from [env steps].
        level: of escalation, from 1 on.
        evaluations: how many evaluations the history had when it was decided.
    """

    step: int
    target_step: int
    level: int
    evaluations: int


@dataclass(frozen=True)
class RollbackMoment:
    """The facts of one call of `Checkpointer.step` that a rollback is decided from.

    Attributes:
        step: the step the loop has reached [env steps].
        evaluations: those on the way to here, oldest first: after a rollback, the target's and those since.
        is_new: whether the newest of them is of this call.
        non_finite: what is not finite, such as "loss/value is nan"; empty if all is.
        checkpoints: those on the way to here, oldest first: the possible targets.
        rollbacks: all that the run did, oldest first.
    """

    step: int
    evaluations: Sequence[Evaluation] = ()
    is_new: bool = False
    non_finite: str = ""
    checkpoints: Sequence[CheckpointFacts] = ()
    rollbacks: Sequence[Rollback] = ()


@dataclass(frozen=True)
class RollbackDecision:
    """Whether to go on, to roll back or to stop, and the reason that goes into the log.

    Attributes:
        action: "go on", "roll back" or "stop".
        reason: why; empty where nothing was to be decided.
        target: the id of the checkpoint to go back to; None unless the action is "roll back".
        level: of escalation, from 1 on; 0 unless the action is "roll back".
        changes: what is to be different; None unless the action is "roll back".
    """

    action: Literal["go on", "roll back", "stop"]
    reason: str = ""
    target: str | None = None
    level: int = 0
    changes: Change | None = None
