"""Where to roll back to: which checkpoints are known to be good, and which may turn out to be."""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from simckpt.policies.degradation import least_fall, usual_fall
from simckpt.policies.records import CheckpointFacts, Evaluation, Rollback


@dataclass(frozen=True)
class Standing:
    """A checkpoint and what the evaluations say of it.

    Attributes:
        checkpoint: the newest one at or before the evaluation, and after the evaluation before.
        evaluation: its place in the history.
        score: the lower of the means of this evaluation and of the next, whose episodes are fresh; higher is better.
    """

    checkpoint: CheckpointFacts
    evaluation: int
    score: float


def best(standings: Sequence[Standing]) -> Standing | None:
    """Returns the one with the highest score, the newest among equals."""
    return max(standings, key=lambda each: (each.score, each.evaluation), default=None)


def last(standings: Sequence[Standing], means: Sequence[float], min_effect: float) -> Standing | None:
    """Returns the newest one that is not lower than the best one by what would count as a fall."""
    top = best(standings)
    if top is None:
        return None
    floor = top.score - least_fall(top.score, means[0], usual_fall(np.array(means)), min_effect)
    return [each for each in standings if each.score >= floor][-1]


def standings(
    checkpoints: Sequence[CheckpointFacts],
    evaluations: Sequence[Evaluation],
    means: Sequence[float],
    rollbacks: Sequence[Rollback],
) -> list[Standing]:
    """Returns the checkpoints that an evaluation stands for and a fresh one confirms, oldest first.

    What an earlier rollback went back to counts as confirmed: it was, by evaluations that are abandoned now.

    Args:
        checkpoints: oldest first.
        evaluations: oldest first.
        means: one for each evaluation; higher is better.
        rollbacks: of the run.
    """
    steps = [each.step for each in evaluations]
    returned_to = {bisect.bisect_left(steps, each.target_step) for each in rollbacks}
    found = []
    for place, checkpoint in covering(checkpoints, steps).items():
        if place in returned_to:
            found.append(Standing(checkpoint, place, means[place]))
        elif place + 1 < len(means):
            found.append(Standing(checkpoint, place, min(means[place], means[place + 1])))
    return found


def covering(checkpoints: Sequence[CheckpointFacts], steps: Sequence[int]) -> dict[int, CheckpointFacts]:
    """Returns {place of an evaluation: the newest checkpoint at or before it, and after the evaluation before}."""
    newest = {bisect.bisect_left(steps, each.step): each for each in checkpoints}
    return {place: each for place, each in newest.items() if place < len(steps)}


def newest_until(checkpoints: Sequence[CheckpointFacts], step: float) -> CheckpointFacts | None:
    """Returns the newest checkpoint at or before a step, None if there is none."""
    return next((each for each in reversed(checkpoints) if each.step <= step), None)
