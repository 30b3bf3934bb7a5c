"""When to roll back, where to, and what is to be different then."""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from simckpt.errors import ConfigurationError
from simckpt.policies import targets
from simckpt.policies.arguments import check_count, check_metric, is_number, unboxed, written
from simckpt.policies.changes import Change, Reseed, checked_changes
from simckpt.policies.degradation import TESTS, degradation, spans_of
from simckpt.policies.records import CheckpointFacts, Evaluation, RollbackDecision, RollbackMoment
from simckpt.policies.targets import Standing

_GO_ON = RollbackDecision("go on")
_RESEED = Reseed()
_CHOICES = {"target": ("best", "last"), "test": TESTS, "then": ("stop", "continue")}


@dataclass(frozen=True, kw_only=True, repr=False)
class RollbackPolicy:
    """Goes back to a good checkpoint when training has gone wrong: a pure function of the evaluations so far.

    Gone wrong is a loss or a parameter that is not finite, at once; and an evaluation return that has fallen below the
    level reached before. That is decided by a statistical test on the returns of single episodes, so pass them all:
    `checkpointer.step(step, {"eval/return": returns})`, ten or more of them. With fewer only a deeper fall can be told
    from noise, and late: a level takes 32 evaluations of a mean alone, 16 of two or three episodes, 8 of four to seven.
    What falls before so many have been good is never noticed by the returns. What it notices and how often it is wrong
    is printed by `scripts/bench_rollback.py`.

    A level counts as reached, and a checkpoint as good, only once evaluations after it, whose episodes did not choose
    it, confirm it. A checkpoint stands for the first evaluation at or after it: save where you evaluate.

    Args:
        metric: such as "eval/return".
        mode: "max", or "min" where lower is better.
        target: where to go back to: the "best" confirmed checkpoint, or the "last" confirmed one before the fall that
            is not lower than the best one by what would count as a fall. On a plateau the best of many equal ones may
            be far back, and what came after it is lost; where training went wrong slowly, the last one may be sick
            already. `scripts/bench_rollback.py` prints how far back and how good both are.
        test: "welch" (means, with unequal variances) or "mann-whitney" (ranks, for returns with wild outliers).
        min_effect: the least fall, as a fraction of what was gained: the level reached minus the first evaluation.
            Raise it where returns dip and recover by themselves. A run that begins at its best has gained nothing;
            there only noise and the usual swing of the evaluations are the measure.
        significance: chance of a false alarm at one evaluation. Evaluations overlap and the other conditions must hold
            too, so that a run of 200 evaluations has less than 200 times of it.
        patience: how many evaluations in a row must lie below, the first of them included: each by itself as far as
            its own episodes tell, which is to 2 % where all together are to be certain to 0.005 %.
        warm_up: the first evaluations of a run that are never under test, only compared with.
        cool_down: the first evaluations after a rollback that are neither under test nor compared with.
        changes: what is to be different; a list has one for each level of escalation, the last one from then on. The
            level is 1 again as soon as a return better than any before the last rollback is confirmed.
        max_rollbacks: of a run in all.
        then: what happens where one more would be needed: "stop", or "continue", which a warning tells once.
        losses: which metrics must be finite: a pattern such as "*loss*", or a list of patterns, at least one. Capital
            letters count as small ones: this is "train/Loss", too.

    Raises:
        ConfigurationError: an argument that has no meaning.
    """

    metric: str = field(kw_only=False)
    mode: str = "max"
    target: str = "best"
    test: str = "welch"
    min_effect: float = 0.25
    significance: float = 5e-5
    patience: int = 2
    warm_up: int = 5
    cool_down: int = 2
    changes: Change | Sequence[Change] = _RESEED
    max_rollbacks: int = 3
    then: str = "stop"
    losses: str | Sequence[str] = "*loss*"

    def __post_init__(self) -> None:
        for each in fields(self):
            # numpy's scalars count as plain numbers
            object.__setattr__(self, each.name, unboxed(getattr(self, each.name)))
        check_metric(self.metric, self.mode, policy="RollbackPolicy")
        for key, known in _CHOICES.items():
            if not isinstance(getattr(self, key), str) or getattr(self, key) not in known:
                message = f"{key} of a RollbackPolicy is {known[0]!r} or {known[1]!r}, got {getattr(self, key)!r}"
                raise ConfigurationError(message, keys=[key])
        for key in ("patience", "max_rollbacks"):
            check_count(getattr(self, key), policy=f"{key} of a RollbackPolicy", key=key)
        for key in ("warm_up", "cool_down"):
            # none at all is fine
            if type(getattr(self, key)) is not int or getattr(self, key) != 0:
                check_count(getattr(self, key), policy=f"{key} of a RollbackPolicy, unless it is 0,", key=key)
        self._check_fraction("min_effect", zero=True)
        self._check_fraction("significance", zero=False)
        patterns = [self.losses] if isinstance(self.losses, str) else self.losses
        if (
            not isinstance(patterns, list | tuple)
            or not patterns
            or not all(isinstance(each, str) and each for each in patterns)
        ):
            message = f"losses are patterns such as '*loss*', at least one, got {self.losses!r}"
            raise ConfigurationError(message, keys=["losses"])
        # lists would make two equal policies hash apart
        object.__setattr__(self, "losses", tuple(patterns))
        object.__setattr__(self, "changes", checked_changes(self.changes))

    def _check_fraction(self, key: str, *, zero: bool) -> None:
        value = getattr(self, key)
        number = value if is_number(value) else math.nan
        if not (0 < number < 1 or (zero and number == 0)):
            message = f"{key} of a RollbackPolicy is a fraction between 0 and 1, got {value!r}"
            raise ConfigurationError(message, keys=[key])

    @property
    def levels(self) -> tuple[Change, ...]:
        """The changes of each level of escalation; the last one goes for all levels above."""
        return checked_changes(self.changes)

    def is_loss(self, name: str) -> bool:
        """Returns whether a metric of this name must be finite."""
        return any(fnmatch.fnmatchcase(name.lower(), pattern.lower()) for pattern in self.losses)

    def first_test(self, episodes: int) -> int:
        """Returns with which evaluation the first test can be, of evaluations of so many episodes; from 1 on."""
        before = max(self.warm_up, 1)
        while not spans_of(before, episodes):
            before += 1
        return before + self.patience

    def decide(self, moment: RollbackMoment) -> RollbackDecision:
        """Returns whether to go on, to roll back or to stop, and why.

        A reason beside "go on" says why a fall has no consequence.
        """
        spent = len(moment.rollbacks) >= self.max_rollbacks
        trouble = moment.non_finite or self._fall(moment)
        if not trouble:
            return _GO_ON
        if spent and self.then == "continue":
            reached = f"max_rollbacks={self.max_rollbacks} is reached, and training goes on"
            return RollbackDecision("go on", f"it would once more: {trouble}; {reached}")
        if spent:
            before = _counted(len(moment.rollbacks), "time")
            return RollbackDecision("stop", f"{trouble}; the run rolled back {before} before")
        fallen = 0 if moment.non_finite else self.patience
        target = self._target(moment, fallen=fallen)
        if target is None:
            reason = f"{trouble}; there is no checkpoint to go back to"
            if moment.non_finite and self.then == "stop":
                return RollbackDecision("stop", reason)
            return RollbackDecision("go on", reason)
        level = self._level(moment, fallen=fallen)
        return RollbackDecision("roll back", trouble, target.id, level, self.levels[min(level, len(self.levels)) - 1])

    def protects(self, moment: RollbackMoment) -> dict[str, str]:
        """Returns {checkpoint id: reason} of what must not be pruned, for it is, or may become, the target."""
        reasons: dict[str, str] = {}
        if moment.checkpoints:
            reasons[moment.checkpoints[-1].id] = "no evaluation has come after it yet"
        steps = [each.step for each in moment.evaluations]
        unconfirmed = targets.covering(moment.checkpoints, steps).get(len(steps) - 1)
        if unconfirmed is not None:
            reasons[unconfirmed.id] = f"the next {self.metric} may confirm it"
        # the newest evaluations may belong to a fall that is not decided yet, and will not count then
        for fallen in range(self.patience - 1, -1, -1):
            target = self._target(moment, fallen=fallen)
            if target is not None:
                reasons[target.id] = f"the {self.target} confirmed by {self.metric}, to roll back to"
        return reasons

    def _fall(self, moment: RollbackMoment) -> str:
        """Returns how the return has fallen; empty if it has not, or is not under test."""
        since = moment.rollbacks[-1].target_step if moment.rollbacks else -math.inf
        before = [each for each in moment.evaluations if each.step <= since]
        # what has not recovered yet, if it ever does, is no level either
        after = moment.evaluations[len(before) + (self.cool_down if moment.rollbacks else 0) :]
        known = [*before, *after]
        if not moment.is_new or len(known) < self.warm_up + self.patience or len(after) < self.patience:
            return ""
        sign = self._sign
        found = degradation(
            [[sign * value for value in each.returns] for each in known],
            patience=self.patience,
            min_effect=self.min_effect,
            significance=self.significance,
            test=self.test,
        )
        if found is None:
            return ""
        verb = "fell" if self.mode == "max" else "rose"
        recent = ", ".join(f"{sign * mean:.6g}" for mean in found.recent)
        count = _counted(self.patience, "evaluation")
        return (
            f"{self.metric} {verb} from {sign * found.level:.6g} to {recent} in {count} "
            f"({self.test}: p = {found.p_value:.2g})"
        )

    def _target(self, moment: RollbackMoment, *, fallen: int) -> CheckpointFacts | None:
        """Returns where to go back to; `fallen` evaluations are known to be bad, and what is saved with them too."""
        standings = self._standings(moment, fallen=fallen)
        if standings:
            means = self._means(moment.evaluations)
            chosen = (
                targets.best(standings)
                if self.target == "best"
                else targets.last(standings, means[: len(means) - fallen], self.min_effect)
            )
            assert chosen is not None
            return chosen.checkpoint
        # nothing is known to be good: the newest that is not known to be bad
        good = moment.evaluations[: len(moment.evaluations) - fallen]
        return targets.newest_until(moment.checkpoints, good[-1].step if fallen and good else math.inf)

    def _standings(self, moment: RollbackMoment, *, fallen: int) -> list[Standing]:
        means = self._means(moment.evaluations)
        found = targets.standings(moment.checkpoints, moment.evaluations, means, moment.rollbacks)
        return [each for each in found if each.evaluation < len(means) - fallen]

    def _level(self, moment: RollbackMoment, *, fallen: int) -> int:
        """Returns the level of escalation: one more than last time, or 1 where a new best was confirmed since."""
        if not moment.rollbacks:
            return 1
        newest = moment.rollbacks[-1]
        means = self._means(moment.evaluations)
        scores: dict[bool, list[float]] = {False: [], True: []}
        for place in range(len(means) - fallen):
            if place + 1 < len(means):
                score = min(means[place], means[place + 1])
                scores[moment.evaluations[place].step > newest.target_step].append(score)
        recovered = scores[True] and max(scores[True]) > max(scores[False], default=-math.inf)
        return 1 if recovered else newest.level + 1

    def _means(self, evaluations: Sequence[Evaluation]) -> list[float]:
        return [self._sign * each.mean for each in evaluations]

    @property
    def _sign(self) -> float:
        return 1.0 if self.mode == "max" else -1.0

    def __repr__(self) -> str:
        options: dict[str, Any] = {}
        for each in fields(self)[1:]:
            value = getattr(self, each.name)
            if each.name in ("changes", "losses"):
                value = value[0] if len(value) == 1 else list(value)
            if value != each.default:
                options[each.name] = value
        return written("RollbackPolicy", self.metric, **options)


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
