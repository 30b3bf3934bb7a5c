"""When to save: small values, joined with `|` (either) and `&` (both)."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import ClassVar

from simckpt.errors import ConfigurationError
from simckpt.policies.arguments import check_count, check_duration, check_metric, ranks_above, written
from simckpt.policies.records import Decision, Moment

_NOT_DUE = Decision(False)


class SavePolicy(ABC):
    """A pure function from a moment of the run to a decision.

    Attributes:
        ends_the_loop: whether a save of this policy is the last one before the loop ends.
    """

    ends_the_loop: ClassVar[bool] = False

    @abstractmethod
    def decide(self, moment: Moment) -> Decision:
        """Returns whether a save is due at this moment, and why."""

    def remember(self, moment: Moment) -> Mapping[str, float]:
        """Returns what the policy wants to find in `Moment.memory` after a save at this moment, by names of its own."""
        return {}

    def parts(self) -> tuple[SavePolicy, ...]:
        """Returns the policies that this one is joined from; itself, if it is not joined."""
        return (self,)

    def __or__(self, other: SavePolicy) -> SavePolicy:
        if not isinstance(other, SavePolicy):
            return NotImplemented
        return AnyOf(_flattened(AnyOf, (self, other)))

    def __and__(self, other: SavePolicy) -> SavePolicy:
        if not isinstance(other, SavePolicy):
            return NotImplemented
        return AllOf(_flattened(AllOf, (self, other)))


class _InTheLoop(SavePolicy):
    """A policy for a loop that goes on: never due when an exception ends it, for the state may be half a step."""

    def decide(self, moment: Moment) -> Decision:
        """Returns whether a save is due, and why; never when an exception ends the loop."""
        reason = None if moment.exception is not None else self._reason(moment)
        return _NOT_DUE if reason is None else Decision(True, reason)

    @abstractmethod
    def _reason(self, moment: Moment) -> str | None:
        """Returns why a save is due, or None if it is not."""


@dataclass(frozen=True, repr=False)
class EverySteps(_InTheLoop):
    """Due when the loop has passed a multiple of `steps` [env steps] since the last save.

    A loop that advances by 2,048 steps at a time saves at the first call at or after each multiple.
    """

    steps: int

    def __post_init__(self) -> None:
        check_count(self.steps, policy="EverySteps", key="steps")

    def __repr__(self) -> str:
        return written("EverySteps", self.steps)

    def _reason(self, moment: Moment) -> str | None:
        if moment.step // self.steps > moment.previous_step // self.steps:
            return f"passed a multiple of {self.steps} steps"
        return None


@dataclass(frozen=True, init=False, repr=False)
class AtSteps(_InTheLoop):
    """Due when the loop has passed one of the steps [env steps]: `AtSteps(total_steps)` saves the end of a run."""

    steps: tuple[int, ...]

    def __init__(self, *steps: int) -> None:
        if not steps:
            raise ConfigurationError("AtSteps needs at least one step, as in AtSteps(1_000_000)", keys=["steps"])
        for step in steps:
            check_count(step, policy="AtSteps", key="steps")
        object.__setattr__(self, "steps", steps)

    def __repr__(self) -> str:
        return written("AtSteps", *self.steps)

    def _reason(self, moment: Moment) -> str | None:
        passed = [step for step in self.steps if moment.previous_step < step <= moment.step]
        return f"passed step {max(passed)}" if passed else None


@dataclass(frozen=True, repr=False)
class EveryMinutes(_InTheLoop):
    """Due when `minutes` have gone by since the last save that was tried, or since this process began with the run.

    Time differs between two executions of the same run, so where it saves does too; what it saves does not.
    """

    minutes: float

    def __post_init__(self) -> None:
        check_duration(self.minutes, policy="EveryMinutes", key="minutes", unit="minutes")

    def __repr__(self) -> str:
        return written("EveryMinutes", self.minutes)

    def _reason(self, moment: Moment) -> str | None:
        if moment.elapsed >= 60 * self.minutes:
            return f"{moment.elapsed / 60:.1f} minutes since the last save"
        return None


@dataclass(frozen=True, repr=False)
class OnBest(_InTheLoop):
    """Due when a metric of this call is strictly better than in every save before; NaN and a missing metric never are.

    The best so far is that of the run's saves, whichever policy asked for them, and is part of each checkpoint: a
    resumed run compares with what it had saved, never with an evaluation of its own lost future.

    Args:
        metric: such as "eval/return".
        mode: "max" or "min".
    """

    metric: str
    mode: str = "max"

    def __post_init__(self) -> None:
        check_metric(self.metric, self.mode, policy="OnBest")

    def __repr__(self) -> str:
        return written("OnBest", self.metric, mode=None if self.mode == "max" else self.mode)

    def remember(self, moment: Moment) -> Mapping[str, float]:
        """Returns the best value among the saves, this one included; nothing as long as none had the metric."""
        value, best = moment.metrics.get(self.metric, math.nan), moment.memory.get(self._key, math.nan)
        if math.isnan(best) or ranks_above(value, best, self.mode):
            best = value
        return {} if math.isnan(best) else {self._key: best}

    @property
    def _key(self) -> str:
        return f"{self.mode} {self.metric}"

    def _reason(self, moment: Moment) -> str | None:
        value, best = moment.metrics.get(self.metric, math.nan), moment.memory.get(self._key, math.nan)
        if math.isnan(value):
            return None
        if math.isnan(best):
            return f"the first {self.metric}, {value:g}"
        if ranks_above(value, best, self.mode):
            return f"{self.metric} of {value:g} is better than {best:g}"
        return None


@dataclass(frozen=True, repr=False)
class OverheadBudget(_InTheLoop):
    """Due as soon as saving costs at most `fraction` of the time: `OverheadBudget(0.01)` gives it a hundredth.

    Chooses the interval from what the last save cost training, as measured in this process, so it follows a state that
    grows and a machine that gets slower. The first save of a process is due at once, for its cost is the measurement.
    `OverheadBudget(0.01) & EveryMinutes(5)` saves every five minutes, or less often where that would cost too much.

    The bound holds for the time that training waits (for a copy in memory, where saves go to the background), as long
    as a save costs what the one before it did. The idea is that of J. Mohan, A. Phanishayee and V. Chidambaram,
    "CheckFreq: Frequent, Fine-Grained DNN Checkpointing", USENIX FAST 2021: an interval from profiling, tuned while the
    job runs, that keeps the overhead below a bound (3.5 % in their experiments). They count iterations between saves;
    here it is time, for the iterations of reinforcement learning are uneven: rollouts, updates, evaluations.

    Args:
        fraction: of the time between two saves, above 0 and below 1.
    """

    fraction: float

    def __post_init__(self) -> None:
        number = self.fraction if isinstance(self.fraction, float) else math.nan
        if not 0 < number < 1:
            raise ConfigurationError(
                f"OverheadBudget needs a fraction above 0 and below 1, such as 0.01, got {self.fraction!r}",
                keys=["fraction"],
            )

    def __repr__(self) -> str:
        return written("OverheadBudget", self.fraction)

    def _reason(self, moment: Moment) -> str | None:
        if moment.save_cost is None:
            return "the first save of this process, which measures what one costs"
        if moment.save_cost > self.fraction * moment.elapsed:
            return None
        cost, elapsed = f"{moment.save_cost:.3g} s", f"{moment.elapsed:.3g} s"
        return f"the last save cost {cost}, at most {self.fraction:.2%} of the {elapsed} since"


@dataclass(frozen=True, repr=False)
class AnyOf(SavePolicy):
    """Due when any of its policies is: what `|` makes."""

    policies: tuple[SavePolicy, ...]

    def decide(self, moment: Moment) -> Decision:
        """Returns the reasons of those that are due."""
        reasons = [decision.reason for policy in self.policies if (decision := policy.decide(moment)).due]
        return Decision(bool(reasons), "; ".join(dict.fromkeys(reasons)))

    def remember(self, moment: Moment) -> Mapping[str, float]:
        """Returns what its policies want to remember."""
        return _merged(self.policies, moment)

    def parts(self) -> tuple[SavePolicy, ...]:
        """Returns the parts of each."""
        return tuple(part for policy in self.policies for part in policy.parts())

    def __repr__(self) -> str:
        return " | ".join(map(repr, self.policies))


@dataclass(frozen=True, repr=False)
class AllOf(SavePolicy):
    """Due when all of its policies are: what `&` makes.

    Raises:
        ConfigurationError: one of them answers the end of the loop, which waits for no other condition.
    """

    policies: tuple[SavePolicy, ...]

    def __post_init__(self) -> None:
        for part in self.parts():
            if part.ends_the_loop:
                raise ConfigurationError(f"{part!r} waits for no other condition: join it with | instead of &")

    def decide(self, moment: Moment) -> Decision:
        """Returns the reasons of all, if all are due."""
        decisions = [policy.decide(moment) for policy in self.policies]
        if all(decision.due for decision in decisions):
            return Decision(True, " and ".join(dict.fromkeys(decision.reason for decision in decisions)))
        return _NOT_DUE

    def remember(self, moment: Moment) -> Mapping[str, float]:
        """Returns what its policies want to remember."""
        return _merged(self.policies, moment)

    def parts(self) -> tuple[SavePolicy, ...]:
        """Returns the parts of each."""
        return tuple(part for policy in self.policies for part in policy.parts())

    def __repr__(self) -> str:
        return " & ".join(f"({policy!r})" if isinstance(policy, AnyOf) else repr(policy) for policy in self.policies)


def _flattened(kind: type[AnyOf] | type[AllOf], policies: Iterable[SavePolicy]) -> tuple[SavePolicy, ...]:
    # (a | b) | c and a | (b | c) are the same value
    return tuple(part for policy in policies for part in (policy.policies if isinstance(policy, kind) else (policy,)))


def _merged(policies: Iterable[SavePolicy], moment: Moment) -> dict[str, float]:
    return {name: value for policy in policies for name, value in policy.remember(moment).items()}
