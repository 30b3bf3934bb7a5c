"""Going back: a run whose training went wrong returns to a good checkpoint, with something changed, and goes on."""

from __future__ import annotations

import gc
import json
import math
import traceback
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from simckpt import policies, restore, state
from simckpt.background import Save
from simckpt.decisions import DECISIONS
from simckpt.errors import (
    ConfigurationError,
    RolledBack,
    SimckptError,
    StoreError,
    UnsupportedStateError,
)
from simckpt.finiteness import non_finite_parameter
from simckpt.policies import CheckpointFacts, Moment, RollbackDecision, RollbackMoment, RollbackPolicy
from simckpt.restore import Adjustment
from simckpt.resuming import Beginning, beginning_of, require_declared, seed_of
from simckpt.rollback_notices import Notices

if TYPE_CHECKING:
    from simckpt.branching.hyperparameters import Hyperparameters
    from simckpt.checkpoint import Checkpoint
    from simckpt.decisions import Decisions
    from simckpt.run import Run
    from simckpt.saver import Saver

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")

TEXT_LIMIT = 500  # [bytes] as JSON, of a text in a commit record, which has 4 KB for everything
CHANGES_LIMIT = 1792  # [bytes] as JSON, of what the same record says of the changes, without their seed
LOOK_EVERY = 64  # [env steps]; a look at 400,000 numbers takes 0.1 ms, and a step of SAC 3 ms
SEEN = 10  # how many of the evaluations that the policy saw are kept with the decision


def supervise(train: Callable[Parameters, Result], *args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
    """Returns what `train(*args, **kwargs)` returns, and calls it again whenever the run has rolled back.

    `train` starts the run, makes its objects and calls `restore_latest`: after a rollback it goes the way that it goes
    after a crash. The frames of the call before are let go of first, so that replay buffers are not held twice. The
    checkpointer has told every rollback to the logger "simckpt".

    Raises:
        RollbackLimitError: training has gone wrong once more than the policy allows.
        ...: whatever else `train` raises.
    """
    while True:
        try:
            return train(*args, **kwargs)
        except RolledBack as error:
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
        overrides: what the branch changes of a target that is its origin; empty for any other target.
        in_force: the hyperparameters that return to the target's values, and the new ones.
        seed: from which all random streams are derived, or None.
        own_seed: the rollback's own part of it: what returns to the beginning of a branch has the branch's already.
        kept: the components that stay as they are, here and below by their names in a checkpoint.
        fresh: components, and variables of loops, that return to what they were when the branch began, for its origin
            has others.
    """

    decision: RollbackDecision
    target: Checkpoint
    step: int
    abandoned: str | None
    values: Mapping[str, Any]
    overrides: Mapping[str, Any]
    in_force: Mapping[str, Any]
    seed: str | None
    own_seed: str | None
    kept: frozenset[str]
    fresh: frozenset[str]

    def changes(self) -> dict[str, Any]:
        """Returns what the commit record says of the changes."""
        assert self.decision.changes is not None
        return {**_described(self.decision.changes, self.values), "seed": self.seed}


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
            place what the loop reads from its arguments alone, or what makes components begin afresh; or scipy is not
            installed.
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
        self._begun: dict[str, Any] | None = None  # what a branch has of its own at its start
        self.notices = Notices(policy, run.name)
        self._check(in_place=in_place)
        self.notices.replays()

    def _check(self, *, in_place: bool) -> None:
        """Finds out at the start what would fail at night."""
        policies.check_scipy()
        keys = policies.keys(self.policy.levels)
        for change in self.policy.levels:
            values = policies.new_values(change, self._run.hyperparameters_in_force)
            if (size := len(json.dumps(_described(change, values)))) > CHANGES_LIMIT:
                named = sorted({*values, *policies.kept_components(change)})
                message = (
                    f"what a rollback changes takes {size} bytes as JSON, and its record has room for "
                    f"{CHANGES_LIMIT}: {', '.join(named)}; give a name of what is so long instead"
                )
                raise ConfigurationError(message, keys=named)
            unknown = sorted(policies.kept_components(change) - self._components.keys())
            if unknown:
                message = (
                    f"{change!r} keeps {unknown[0]!r}, which is no component: there are {sorted(self._components)}"
                )
                raise ConfigurationError(message, keys=unknown)
        require_declared(self._hyperparameters, keys)
        afresh = sorted(key for key in keys if self._hyperparameters and self._hyperparameters.untouched({key}))
        if afresh:
            raise ConfigurationError(
                f"a rollback cannot change {afresh[0]!r}, with which components begin afresh "
                "(Hyperparameters(fresh=...)): what the target has of them would not fit; branch from a checkpoint "
                "with another value instead",
                keys=afresh,
            )
        lost = sorted(keys & self._hyperparameters.from_args) if self._hyperparameters is not None else []
        if in_place and lost:
            raise ConfigurationError(
                f"a rollback in place cannot change {lost[0]!r}, which the loop reads from its arguments alone: say in "
                "Hyperparameters what holds it, or leave in_place out and let `simckpt.supervise` enter train again",
                keys=lost,
            )

    def look(self, moment: Moment, *, thorough: bool, previous: int) -> str:
        """Returns which number is not finite, of the metrics or of the parameters that this process has, or nothing.

        Args:
            moment: step and metrics.
            thorough: look at the parameters, which happens every `LOOK_EVERY` steps anyway.
            previous: the step of the call before [env steps].
        """
        self.notices.seen(moment.metrics, self._decisions.history(self.policy.metric))
        non_finite = self._non_finite_metric(moment.metrics)
        if not non_finite and (thorough or moment.step // LOOK_EVERY > previous // LOOK_EVERY):
            bound, place = self._saver.bound, self._saver.place
            # simulators and replay buffers are not trained
            trained = {
                name: each for name, each in self._components.items() if bound[place(name)].order == restore.PLAIN
            }
            non_finite = non_finite_parameter(trained)
        return non_finite

    def judge(self, moment: Moment, *, is_new: bool, non_finite: str) -> RollbackDecision:
        """Returns what the policy decides at a step.

        Args:
            moment: its step and metrics.
            is_new: whether there is a new evaluation.
            non_finite: what `look` found.
        """
        # the possible targets must not depend on how quick the disk is
        self._saver.collect(wait=True)
        ranks = self._run.ranks
        non_finite = next(filter(None, ranks.gather(non_finite)), "")

        def decide() -> list[Any]:
            found = self.policy.decide(self._moment(moment.step, is_new=is_new, non_finite=non_finite))
            return [found.action, found.reason, found.target, found.level]

        action, reason, target, level = ranks.first(decide)
        levels = self.policy.levels
        changes = levels[min(level, len(levels)) - 1] if action == "roll back" else None
        decision = RollbackDecision(action, reason, target, level, changes)
        idle = decision.reason if decision.action == "go on" else ""
        if idle and self.notices.without_consequence(moment.step, idle, len(self._decisions.rollbacks)):
            self._run.log("no rollback", step=moment.step, reason=idle)
        return decision

    def ended(self) -> None:
        """Warns at the end of a loop that never gave the policy's metric, and nearly did."""
        self.notices.ended(self._decisions.evaluations)

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

    def note_beginning(self) -> None:
        """Keeps a copy of what a branch has at its start and its origin has not, for it may go back to its origin.

        Call it once the program has built its objects, before anything is restored. Of logs, such as replay buffers,
        no copy is kept: of these the rows stay.
        """
        beginning = self._beginning()
        if beginning is None or self._begun is not None:
            return
        bound, self._begun = self._saver.bound, {}
        for place in map(self._saver.place, beginning.untouched):
            name, _, variable = (place, "", "") if place in bound else place.rpartition("/")
            if name in bound and name not in self._saver.logs:
                tree = bound[name].handle.capture()
                if not variable:
                    self._begun[place] = tree
                elif variable in tree:
                    self._begun[place] = tree[variable]

    def _beginning(self) -> Beginning | None:
        """Returns how the run began from its origin, or None if it is no branch, or its origin is gone."""
        try:
            origin = self._run.origin()
        except StoreError:
            return None
        if origin is None:
            return None
        changed = {key for each in self._decisions.rollbacks for key in each["changes"]}
        return beginning_of(self._run, origin, self._hyperparameters, changed=changed)

    def plan(self, decision: RollbackDecision, step: int) -> Plan:
        """Returns what is to be done to go back; changes nothing.

        Raises:
            ConfigurationError: the changes do not fit the hyperparameters of the target.
            StoreError: the target cannot be read.
        """
        assert decision.target is not None
        assert decision.changes is not None
        ranks = self._run.ranks
        target, beginning, in_force, values = ranks.each(lambda: self._values_of(decision))
        number = len(self._decisions.rollbacks) + 1
        branch = self._run.name if self._run.branch is not None else ""
        own_seed = None
        if policies.reseeds(decision.changes):
            # of all ranks one reads the whole target for that
            own_seed = ranks.first(lambda: seed_of(target, number, branch, without={DECISIONS, *self._logs_of(target)}))
        return Plan(
            decision=decision,
            target=target,
            step=step,
            abandoned=self._saver.writer.head,
            values=values,
            overrides=beginning.overrides,
            in_force=in_force,
            seed=", ".join(filter(None, (beginning.seed, own_seed))) or None,
            own_seed=own_seed,
            kept=frozenset(map(self._saver.place, policies.kept_components(decision.changes))),
            fresh=frozenset(map(self._saver.place, beginning.untouched)),
        )

    def _values_of(self, decision: RollbackDecision) -> tuple[Checkpoint, Beginning, dict[str, Any], Mapping[str, Any]]:
        """Returns the target, what the run adds to it, what is in force then, and what of that is changed."""
        assert decision.target is not None
        assert decision.changes is not None
        target, beginning = self._target(decision.target)
        # what earlier rollbacks have changed since returns to what it was at the target
        alterable = policies.keys(self.policy.levels).union(*(each["changes"] for each in self._decisions.rollbacks))
        there = {**target.hyperparameters, **beginning.overrides, **self._rates_at(target, alterable)}
        values = policies.new_values(decision.changes, there)
        return target, beginning, {**{key: there[key] for key in alterable if key in there}, **values}, values

    def _logs_of(self, target: Checkpoint) -> list[str]:
        """Returns the logs of a checkpoint, those of other ranks included."""
        ranks = self._run.ranks
        logs = {ranks.component_of(name) for name in self._saver.logs}
        return [name for name in target.components() if ranks.component_of(name) in logs]

    def _rates_at(self, target: Checkpoint, keys: Collection[str]) -> dict[str, float]:
        """Returns the learning rates at a checkpoint that a ReduceLROnPlateau may have lowered until then."""
        places = {} if self._hyperparameters is None else self._hyperparameters.rates_themselves(keys)
        names = {id(component): name for name, component in self._components.items()}
        found = {}
        for key, (optimizer, group) in places.items():
            if (name := names.get(id(optimizer))) in target.components():
                found[key] = float(target[name].items["param_groups"][group]["lr"])
        return found

    def _target(self, id: str) -> tuple[Checkpoint, Beginning]:
        """Returns the checkpoint of an id, and what the run adds to it; nothing, unless it is a branch's origin."""
        if id == self._run.record.origin:
            origin, beginning = self._run.origin(), self._beginning()
            assert origin is not None
            assert beginning is not None
            return origin, beginning
        return self._saver.checkpoint(id), Beginning({}, None, frozenset(), {})

    def go_back(self, plan: Plan, *, begun: float) -> Save:
        """Puts the target into the live objects, with the changes, and commits that: all of it, or nothing.

        Returns:
            The save of the commit, which survives a power failure: the head from now on.

        Raises:
            RestoreError: a component did not take its state.
            OverrideNotAppliedError: a hyperparameter did not take its value, or a `Call` has taken it away again.
            UnsupportedStateError: a `Call` made of a component what could not be restored.
            StorageError, ConflictError, ...: there is no commit. The head, and here as above the live objects, are what
                they were.
            HalfRestoredError: any of these, and something could not be put back; such as a log, of which there is no
                copy.
        """
        in_force = dict(self._run.hyperparameters_in_force)
        to_set = {
            key: value for key, value in plan.in_force.items() if key in plan.values or in_force.get(key) != value
        }
        remembered, saves = self._remembered(plan), list[Save]()
        untouched = plan.kept | plan.fresh

        values = {**plan.overrides, **to_set}
        hyperparameters = self._hyperparameters.locate(self._components) if values and self._hyperparameters else None

        def then() -> None:
            if hyperparameters is not None:
                hyperparameters.apply(values)
            try:
                self._call(plan)
                self._decisions.rollbacks = remembered
                self._saver.restored(plan.target, untouched=untouched)
                # the commit comes about on all ranks or on none
                phases.done()
                saves.append(self._commit(plan, begun=begun))
            except BaseException:
                self._run.change_hyperparameters(in_force)
                if hyperparameters is not None:
                    hyperparameters.take_back()
                raise

        begun_with = {} if self._begun is None else self._begun
        beginnings = {
            place: state.copy_tree(begun_with[place]) for place in plan.fresh - plan.kept if place in begun_with
        }
        if plan.own_seed is not None:
            for place, tree in beginnings.items():
                state.reseed(tree, f"{plan.own_seed} {place}")
        with self._run.ranks.phases() as phases:
            inspect = lambda *_: phases.ready()  # noqa: E731
            adjustment = Adjustment(plan.seed, untouched, then, beginnings, inspect=inspect)
            plan.target.restore_bound(self._saver.bound, adjustment)
        return saves[0]

    def _remembered(self, plan: Plan) -> list[dict[str, Any]]:
        """Returns what the decisions say of all rollbacks, this one included."""
        history = self._decisions.history(self.policy.metric)
        return [
            *self._decisions.rollbacks,
            {
                "step": plan.step,
                "target_step": plan.target.step,
                "level": plan.decision.level,
                "evaluations": len(history),
                "reason": plan.decision.reason,
                "changes": dict(plan.values),
                "saw": [[each.step, each.mean, len(each.returns)] for each in history[-SEEN:]],
            },
        ]

    def _call(self, plan: Plan) -> None:
        """Calls the functions of the changes, once the live objects hold the target and the hyperparameters are set."""
        assert plan.decision.changes is not None
        functions = policies.calls(plan.decision.changes)
        if not functions:
            return
        bound = {name: each for name, each in self._saver.bound.items() if name not in self._saver.logs}
        before = restore.capture(bound)
        for function in functions:
            function(MappingProxyType(self._components), plan.decision.level)
        after = restore.capture(bound)
        # a later start builds the objects as they were before the functions, and restores what was made of them
        name = ""
        try:
            for name, each in bound.items():
                each.handle.apply(before[name])
            restore.rehearse(bound, after)
            for name, each in bound.items():
                each.handle.apply(after[name])
        except SimckptError as error:
            raise UnsupportedStateError(
                f"no later start of run {self._run.name!r} could restore what {plan.decision.changes!r} makes of its "
                f"components: {error}. A function may change values, but no names, shapes or kinds",
                path=getattr(error, "path", name),
                type_name=type(self._saver.bound[name].handle).__name__,
            ) from error
        if self._hyperparameters is not None:
            self._hyperparameters.look(f"after {plan.decision.changes!r} had called its functions")

    def _commit(self, plan: Plan, *, begun: float) -> Save:
        """Returns the save of the rollback's commit, once it survives a power failure."""
        moment = Moment(step=plan.target.step, previous_step=self._decisions.previous_step)
        record = {
            "abandoned": plan.abandoned,
            "step": plan.step,
            "level": plan.decision.level,
            "changes": plan.changes(),
            "reason": _cut(plan.decision.reason),
            # this start may have saved nothing yet; it says which values were given
            "start": self._run.ranks.first(self._run.start_id),
        }
        self._run.change_hyperparameters(plan.in_force)
        try:
            save = self._saver.begin(
                moment, plan.decision.reason, begun=begun, kind="rollback", parent=plan.target.id, rollback=record
            )
            save.wait()
        finally:
            # not after Ctrl-C: the save goes on, and the next call collects it
            self._saver.collect(wait=False)
        return save


def _described(change: policies.Change, values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what a commit record says of a change, but for its seed."""
    return {
        "description": _cut(repr(change)),
        "hyperparameters": dict(values),
        "kept": sorted(policies.kept_components(change)),
    }


def _cut(text: str) -> str:
    """Returns as much of a text as JSON holds in `TEXT_LIMIT` bytes."""
    text = text[:TEXT_LIMIT]
    while len(json.dumps(text)) > TEXT_LIMIT:
        text = text[:-1]
    return text
