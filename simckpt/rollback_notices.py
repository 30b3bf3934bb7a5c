"""What is told of a rollback policy: what it did, and what it will not do; one that waits looks like one at work."""

from __future__ import annotations

import difflib
import itertools
import logging
import warnings
from collections import Counter
from collections.abc import Collection, Mapping, Sequence

from simckpt.errors import HalfRestoredError, RolledBack, UpkeepWarning
from simckpt.policies import Evaluation, KeepRows, Reseed, RollbackDecision, RollbackPolicy, Scale
from simckpt.presentation import printable
from simckpt.suggest import nearest

FEW = 4  # [episodes] of an evaluation; with fewer the first test is late
CALLS = 3  # how often a name that is nearly the policy's is given before it is called a slip
NEAR = 0.8  # of difflib: 'eval/retrun' is 0.91 of 'eval/return', and 'train/return' 0.70


_log = logging.getLogger("simckpt")


class Notices:
    """Tells what a policy does to a run, and what it will not do, each such thing once in a process.

    Args:
        policy: that decides.
        run: the name of the run.
    """

    def __init__(self, policy: RollbackPolicy, run: str) -> None:
        self._policy = policy
        self._run = run
        self._names: Counter[str] = Counter()  # of the metrics given while that of the policy was not
        self._given = False
        self._told: set[str] = set()

    def replays(self) -> None:
        """Warns of changes that differ in nothing when they are made once more."""
        levels = self._policy.levels
        # the last one serves all rollbacks from then on
        made = [*levels, levels[-1]][: self._policy.max_rollbacks]
        for change, after in itertools.pairwise(made):
            if change == after and not any(isinstance(part, Reseed | Scale | KeepRows) for part in change.parts()):
                self._tell(
                    "replays",
                    f"two rollbacks of run {self._run!r} to the same target replay one another, for {change!r} draws "
                    "no other numbers, and may change nothing the second time: add Reseed()",
                    stacklevel=6,
                )

    def seen(self, metrics: Mapping[str, float], history: Sequence[Evaluation]) -> None:
        """Looks at the metrics of a step: at their names, and at how many episodes an evaluation has.

        Args:
            metrics: of the step.
            history: the evaluations of the policy's metric so far, oldest first.
        """
        metric = self._policy.metric
        if not self._given:
            self._given = bool(history) or metric in metrics
            self._names.update(metrics)
            often = [name for name in metrics if self._names[name] >= CALLS]
            if not self._given and difflib.get_close_matches(metric, often, cutoff=NEAR):
                self._tell_of_metric(often)
        if metric not in metrics or not history:
            return
        episodes, first = len(history[-1].returns), self._policy.first_test(len(history[-1].returns))
        if episodes < FEW and len(history) < first:
            self._tell(
                "few",
                f"evaluations of {metric!r} in run {self._run!r} have fewer than {FEW} episodes: no test before "
                f"evaluation {first}, and what falls before it may never be found; give the return of each of ten "
                "episodes or more",
            )

    def ended(self, evaluated: Collection[str]) -> None:
        """Looks at the end of a loop whether the metric was ever given.

        Args:
            evaluated: the metrics that were given by episodes.
        """
        near = difflib.get_close_matches(self._policy.metric, self._names, cutoff=0.5)
        if not self._given and (near or any(name in evaluated for name in self._names)):
            self._tell_of_metric(self._names)

    def without_consequence(self, step: int, reason: str, rollbacks: int) -> bool:
        """Warns of a fall that no rollback answers; returns False if that was told since the last rollback.

        Args:
            step: [env steps].
            reason: why not.
            rollbacks: how many there were.
        """
        message = f"run {self._run!r} does not roll back at step {step}: {reason}"
        return self._tell(f"no rollback after {rollbacks}", message)

    def rolled_back(self, decision: RollbackDecision, *, step: int, target_step: int) -> RolledBack:
        """Tells the logger "simckpt" that the run has gone back; returns the error that leaves the loop after it.

        Args:
            decision: to go back.
            step: where it was decided [env steps].
            target_step: of what the run went back to [env steps].
        """
        message = (
            f"run {self._run!r} went back from step {step} to step {target_step} (level {decision.level}, "
            f"{decision.changes!r}): {decision.reason}"
        )
        _log.warning("%s", printable(message))
        return RolledBack(
            message, run=self._run, step=step, target_step=target_step, level=decision.level, reason=decision.reason
        )

    def _tell_of_metric(self, names: Collection[str]) -> None:
        metric = self._policy.metric
        message = f"the rollback policy of run {self._run!r} waits for {metric!r}, which was never given"
        self._tell("metric", message + nearest(metric, names), stacklevel=6)

    def _tell(self, what: str, message: str, *, stacklevel: int = 5) -> bool:
        if what in self._told:
            return False
        self._told.add(what)
        warnings.warn(message, UpkeepWarning, stacklevel=stacklevel)
        return True


def with_remedy(error: HalfRestoredError) -> HalfRestoredError:
    """Returns the error of a rollback that failed halfway, which says how the run goes on."""
    remedy = (
        "The run itself is whole: remove the cause, as by freeing space, and start the same command again, which goes "
        "back then; or call restore_latest() before the next step."
    )
    return HalfRestoredError(f"{error} {remedy}", components=error.components)
