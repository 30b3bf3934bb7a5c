"""When to save: small values, joined with `|` (either) and `&` (both)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass

from simckpt.errors import ConfigurationError
from simckpt.policies.records import Decision, Moment


class SavePolicy(ABC):
    """A pure function from a moment of the run to a decision."""

    @abstractmethod
    def decide(self, moment: Moment) -> Decision:
        """Returns whether a save is due at this moment, and why."""

    def remember(self, moment: Moment) -> Mapping[str, float]:
        """Returns what the policy wants to find in `Moment.memory` after a save at this moment, by names of its own."""
        return {}

    def __or__(self, other: SavePolicy) -> SavePolicy:
        return AnyOf((self, other))

    def __and__(self, other: SavePolicy) -> SavePolicy:
        return AllOf((self, other))


@dataclass(frozen=True)
class EverySteps(SavePolicy):
    """Due when the loop has passed a multiple of `steps` [env steps] since the last save.

    A loop that advances by 2,048 steps at a time saves at the first call at or after each multiple.
    """

    steps: int

    def __post_init__(self) -> None:
        if not isinstance(self.steps, int) or isinstance(self.steps, bool) or self.steps < 1:
            raise ConfigurationError(
                f"EverySteps needs a whole number of at least 1, got {self.steps!r}", keys=["steps"]
            )

    def decide(self, moment: Moment) -> Decision:
        """Returns whether a multiple of `steps` lies in (previous_step, step]."""
        if moment.step // self.steps > moment.previous_step // self.steps:
            return Decision(True, f"passed a multiple of {self.steps} steps")
        return Decision(False)


@dataclass(frozen=True, init=False)
class AtSteps(SavePolicy):
    """Due when the loop has passed one of the steps [env steps]: `AtSteps(total_steps)` saves the end of a run."""

    steps: tuple[int, ...]

    def __init__(self, *steps: int) -> None:
        for step in steps:
            if not isinstance(step, int) or isinstance(step, bool) or step < 1:
                raise ConfigurationError(f"AtSteps needs whole numbers of at least 1, got {step!r}", keys=["steps"])
        object.__setattr__(self, "steps", steps)

    def decide(self, moment: Moment) -> Decision:
        """Returns whether one of the steps lies in (previous_step, step]."""
        passed = [step for step in self.steps if moment.previous_step < step <= moment.step]
        return Decision(True, f"passed step {passed[-1]}") if passed else Decision(False)


@dataclass(frozen=True)
class AnyOf(SavePolicy):
    """Due when any of its policies is: what `|` makes."""

    policies: tuple[SavePolicy, ...]

    def decide(self, moment: Moment) -> Decision:
        """Returns the reasons of those that are due."""
        reasons = [decision.reason for policy in self.policies if (decision := policy.decide(moment)).due]
        return Decision(bool(reasons), "; ".join(reasons))


@dataclass(frozen=True)
class AllOf(SavePolicy):
    """Due when all of its policies are: what `&` makes."""

    policies: tuple[SavePolicy, ...]

    def decide(self, moment: Moment) -> Decision:
        """Returns the reasons of all, if all are due."""
        decisions = [policy.decide(moment) for policy in self.policies]
        if all(decision.due for decision in decisions):
            return Decision(True, " and ".join(decision.reason for decision in decisions))
        return Decision(False)
