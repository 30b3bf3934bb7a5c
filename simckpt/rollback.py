"""Going back: a run whose training went wrong returns to a good checkpoint, with something changed, and goes on."""

from __future__ import annotations

import gc
import logging
import math
import sys
import traceback
import warnings
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from simckpt import policies
from simckpt.background import Save
from simckpt.comparison import fingerprint
from simckpt.decisions import DECISIONS
from simckpt.errors import ConfigurationError, OverrideNotAppliedError, RolledBack, UpkeepWarning
from simckpt.policies import CheckpointFacts, Moment, RollbackDecision, RollbackMoment, RollbackPolicy
from simckpt.restore import Adjustment

if TYPE_CHECKING:
    from simckpt.branching.hyperparameters import Hyperparameters
    from simckpt.checkpoint import Checkpoint
    from simckpt.decisions import Decisions
    from simckpt.run import Run
    from simckpt.saver import Saver

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")

REASON_LIMIT = 500  # [characters] of a text in a commit record, which has 4 KB for everything
LOOK_EVERY = 64  # [env steps]; a look at 400,000 numbers takes 0.1 ms, and a step of SAC 3 ms
SEEN = 10  # how many of the evaluations that the policy saw are kept with the decision

_log = logging.getLogger("simckpt")


def supervise(train: Callable[Parameters, Result], *args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
    """Returns what `train(*args, **kwargs)` returns, and calls it again whenever the run has rolled back.

    `train` starts the run, makes its objects and calls `restore_latest`: after a rollback it goes the way that it goes
    after a crash. The frames of the call before are let go of first, so that replay buffers are not held twice. Every
    rollback is told to the logger "simckpt", as a warning, which Python prints unless logging is set up otherwise.

    Raises:
        RollbackLimitError: training has gone wrong once more than the policy allows.
        ...: whatever else `train` raises.
    """
    while True:
        try:
            return train(*args, **kwargs)
        except RolledBack as error:
            _log.warning("%s", error)
            traceback.clear_frames(error.__traceback__)
            error.__traceback__ = error.__context__ = None
        # envs and agents are full of cycles
        gc.collect()


@dataclass(frozen=True)
class Plan:
    """A rollback that was decided.

    Attributes:
        decision: of the policy; its action is "roll back".
        target: what the run goes back to.
        step: where it was decided [env steps].
        abandoned: id of the head that is left behind; None in a branch that has committed nothing yet.
        values: {hyperparameter: new value}.
        in_force: the hyperparameters that return to the target's values, and the new ones.
        seed: from which all random streams are derived, or None.
        kept: the components that stay as they are.
    """

    decision: RollbackDecision
    target: Checkpoint
    step: int
    abandoned: str | None
    values: Mapping[str, Any]
    in_force: Mapping[str, Any]
    seed: str | None
    kept: frozenset[str]

    def changes(self) -> dict[str, Any]:
        """Returns what the commit record says of the changes."""
        return {
            "description": repr(self.decision.changes)[:REASON_LIMIT],
            "hyperparameters": dict(self.values),
            "seed": self.seed,
            "kept": sorted(self.kept),
        }


class Rollbacks:
    """Asks a policy whether to go back, and does it.

    Args:
        policy: decides.
        run: to write.
        saver: of its checkpointer.
        decisions: where the history is.
        components: {name: live object}.
        hyperparameters: what holds them, if the program says so.
        in_place: whether the loop goes on without being entered again.

    Raises:
        ConfigurationError: the policy changes hyperparameters or keeps components that there are not, or changes in
            place what the loop reads from its arguments alone.
        OverrideNotAppliedError: nothing declares what holds a hyperparameter that the policy changes.
    """

    def __init__(
        self,
        policy: RollbackPolicy,
        run: Run,
        saver: Saver,
        decisions: Decisions,
        components: Mapping[str, Any],
        hyperparameters: Hyperparameters | None,
        *,
        in_place: bool,
    ) -> None:
        self.policy = policy
        self._run = run
        self._saver = saver
        self._decisions = decisions
        self._components = components
        self._hyperparameters = hyperparameters
        self._warned = False  # of a fall without consequence
        self._check(in_place=in_place)

    def _check(self, *, in_place: bool) -> None:
        """Finds out at the start what would fail at night."""
        keys = policies.keys(self.policy.levels)
        for change in self.policy.levels:
            policies.new_values(change, self._run.hyperparameters_in_force)
            unknown = sorted(policies.kept_components(change) - self._components.keys())
            if unknown:
                message = (
                    f"{change!r} keeps {unknown[0]!r}, which is no component: there are {sorted(self._components)}"
                )
                raise ConfigurationError(message, keys=unknown)
        require_declared(self._hyperparameters, keys)
        lost = sorted(keys & self._hyperparameters.from_args) if self._hyperparameters is not None else []
        if in_place and lost:
            raise ConfigurationError(
                f"a rollback in place cannot change {lost[0]!r}, which the loop reads from its arguments alone: say in "
                "Hyperparameters what holds it, or leave in_place out and let `simckpt.supervise` enter train again",
                keys=lost,
            )

    def judge(self, moment: Moment, *, is_new: bool, thorough: bool, previous: int) -> RollbackDecision:
        """Returns what the policy decides at a step.

        Args:
            moment: its step and metrics.
            is_new: whether there is a new evaluation.
            thorough: look at the parameters, which happens every `LOOK_EVERY` steps anyway.
            previous: the step of the call before [env steps].
        """
        step = moment.step
        non_finite = self._non_finite_metric(moment.metrics)
        if not non_finite and (thorough or is_new or step // LOOK_EVERY > previous // LOOK_EVERY):
            found = map(_non_finite_parameter, self._components, self._components.values())
            non_finite = next(filter(None, found), "")
        if not is_new and not non_finite:
            return RollbackDecision("go on")
        # the possible targets must not depend on how quick the disk is
        self._saver.collect(wait=True)
        decision = self.policy.decide(self._moment(step, is_new=is_new, non_finite=non_finite))
        if decision.action == "go on" and decision.reason:
            self._run.log("no rollback", step=step, reason=decision.reason)
            if not self._warned:
                self._warned = True
                message = f"run {self._run.name!r} does not roll back at step {step}: {decision.reason}"
                warnings.warn(message, UpkeepWarning, stacklevel=3)
        return decision

    def protects(self) -> dict[str, str]:
        """Returns {checkpoint id: reason} of what must not be pruned, for the run may go back to it."""
        return self.policy.protects(self._moment(0, is_new=False, non_finite=""))

    def _moment(self, step: int, *, is_new: bool, non_finite: str) -> RollbackMoment:
        return RollbackMoment(
            step=step,
            evaluations=self._decisions.history(self.policy.metric),
            is_new=is_new,
            non_finite=non_finite,
            checkpoints=self._targets(),
            rollbacks=self._decisions.past_rollbacks(),
        )

    def _targets(self) -> list[CheckpointFacts]:
        """Returns the facts of the possible targets, oldest first; a branch may go back to its origin."""
        facts = [
            CheckpointFacts(record.id, record.step, record.metrics, record.created, record.size)
            for record in self._saver.writer.line
        ]
        branch, origin = self._run.branch, self._run.record.origin
        return [CheckpointFacts(origin, branch.step), *facts] if branch is not None and origin is not None else facts

    def _non_finite_metric(self, metrics: Mapping[str, float]) -> str:
        for name, value in metrics.items():
            if not math.isfinite(value) and (name == self.policy.metric or self.policy.is_loss(name)):
                return f"{name} is {value}"
        return ""

    def plan(self, decision: RollbackDecision, step: int) -> Plan:
        """Returns what is to be done to go back; changes nothing.

        Raises:
            ConfigurationError: the changes do not fit the hyperparameters of the target.
            StoreError: the target cannot be read.
        """
        assert decision.target is not None
        assert decision.changes is not None
        target, overrides = self._target(decision.target)
        there = {**target.hyperparameters, **overrides}
        values = policies.new_values(decision.changes, there)
        # what earlier rollbacks have changed since returns to what it was at the target
        alterable = policies.keys(self.policy.levels).union(*(each["changes"] for each in self._decisions.rollbacks))
        number, apart = len(self._decisions.rollbacks) + 1, {DECISIONS, *self._saver.logs}
        return Plan(
            decision=decision,
            target=target,
            step=step,
            abandoned=self._saver.writer.head,
            values=values,
            in_force={**{key: there[key] for key in alterable if key in there}, **values},
            seed=seed_of(target, number, without=apart) if policies.reseeds(decision.changes) else None,
            kept=policies.kept_components(decision.changes),
        )

    def _target(self, id: str) -> tuple[Checkpoint, Mapping[str, Any]]:
        """Returns the checkpoint of an id, and the overrides that its hyperparameters lack."""
        if id == self._run.record.origin:
            origin = self._run.origin()
            assert origin is not None
            return origin, self._run.overrides
        return self._saver.checkpoint(id), {}

    def restore(self, plan: Plan) -> None:
        """Puts the target into the live objects, with the changes; all of it, or nothing.

        Raises:
            RestoreError: the live objects are as they were.
            OverrideNotAppliedError, ...: as `Checkpoint.restore`.
        """
        history, rollbacks = self._decisions.history(self.policy.metric), list(self._decisions.rollbacks)
        now = self._run.hyperparameters_in_force
        rollbacks.append(
            {
                "step": plan.step,
                "target_step": plan.target.step,
                "level": plan.decision.level,
                "evaluations": len(history),
                "reason": plan.decision.reason,
                "changes": dict(plan.values),
                "saw": [[each.step, each.mean, len(each.returns)] for each in history[-SEEN:]],
            }
        )
        to_set = {key: value for key, value in plan.in_force.items() if key in plan.values or now.get(key) != value}
        if plan.target.id == self._run.record.origin:
            to_set = {**self._run.overrides, **to_set}

        def then() -> None:
            if to_set and self._hyperparameters is not None:
                self._hyperparameters.apply(to_set)
            assert plan.decision.changes is not None
            try:
                for function in policies.calls(plan.decision.changes):
                    function(self._components, plan.decision.level)
            except BaseException:
                self._take_back()
                raise
            self._decisions.rollbacks = rollbacks

        plan.target.restore_bound(self._saver.bound, Adjustment(plan.seed, plan.kept, then))
        self._saver.restored(plan.target, untouched=plan.kept)

    def commit(self, plan: Plan, *, begun: float) -> Save:
        """Returns the save of the rollback's commit, once it survives a power failure: the head from then on.

        Raises:
            StorageError, ConflictError, ...: there is no commit, and the head is what it was.
        """
        before = dict(self._run.hyperparameters_in_force)
        self._run.change_hyperparameters(plan.in_force)
        moment = Moment(step=plan.target.step, previous_step=self._decisions.previous_step)
        record = {
            "abandoned": plan.abandoned,
            "step": plan.step,
            "level": plan.decision.level,
            "changes": plan.changes(),
            "reason": plan.decision.reason[:REASON_LIMIT],
        }
        try:
            save = self._saver.begin(
                moment, plan.decision.reason, begun=begun, kind="rollback", parent=plan.target.id, rollback=record
            )
            save.wait()
        except BaseException:
            self._run.change_hyperparameters(before)
            self._take_back()
            raise
        finally:
            # not after Ctrl-C: the save goes on, and the next call collects it
            self._saver.collect(wait=False)
        return save

    def _take_back(self) -> None:
        if self._hyperparameters is not None:
            self._hyperparameters.take_back()

    def error(self, plan: Plan) -> RolledBack:
        """Returns the error that leaves the loop after a rollback."""
        decision, target = plan.decision, plan.target
        message = (
            f"run {self._run.name!r} went back from step {plan.step} to step {target.step} (level {decision.level}, "
            f"{decision.changes!r}): {decision.reason}"
        )
        return RolledBack(
            message,
            run=self._run.name,
            step=plan.step,
            target_step=target.step,
            level=decision.level,
            reason=decision.reason,
        )


def require_declared(hyperparameters: Hyperparameters | None, keys: Collection[str]) -> None:
    """Checks that the program says what holds these hyperparameters; raises OverrideNotAppliedError."""
    if not keys:
        return
    if hyperparameters is None:
        key = min(keys)
        raise OverrideNotAppliedError(
            f"nothing says what holds the hyperparameter {key!r}, which is to be changed: give run.checkpointer "
            f"hyperparameters=simckpt.Hyperparameters({{{key!r}: ...}}), or from_args={{{key!r}}} for what the loop "
            "reads from its arguments alone",
            key=key,
        )
    hyperparameters.check(keys)


def seed_of(target: Checkpoint, number: int, *, without: Collection[str] = ()) -> str:
    """Returns the text from which the random streams after a rollback are derived.

    Depends on what the target holds, and not on its id: a run that was killed and goes back once more draws the same
    numbers as the one that was not killed, and runs of different seeds draw different ones.

    Args:
        target: what the run goes back to.
        number: of the rollback in the run, from 1 on: another try is another one.
        without: components that do not count, for they are large or no part of training.
    """
    return f"rollback {number} to step {target.step}, {fingerprint(target, without=without)}"


def _non_finite_parameter(name: str, component: Any) -> str:
    """Returns which parameter of a torch module, or which moment of an optimizer, is not finite; or nothing."""
    torch = sys.modules.get("torch")
    if torch is None:
        return ""
    if isinstance(component, torch.nn.Module):
        named = {f"parameter {path!r}": each for path, each in component.named_parameters()}
    elif isinstance(component, torch.optim.Optimizer):
        named = {
            f"{key!r} of parameter {place}": each
            for place, moments in enumerate(component.state.values())
            for key, each in moments.items()
            if isinstance(each, torch.Tensor)
        }
    else:
        return ""
    with torch.no_grad():
        floating = {what: each for what, each in named.items() if each.is_floating_point()}
        # one look at all of them: a sum is finite only if its terms are; where it overflows they are looked at singly
        if all(map(math.isfinite, [float(each.sum(dtype=torch.float32)) for each in floating.values()])):
            return ""
        for what, each in floating.items():
            if not bool(torch.isfinite(each).all()):
                return f"{what} of {name!r} is not finite"
    return ""
