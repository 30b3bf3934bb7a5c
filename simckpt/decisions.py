"""What a checkpointer decides from: the arguments it is made with, checked, and what its policies remember."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from simckpt import arguments
from simckpt.errors import ConfigurationError, StateMismatchError
from simckpt.policies import Evaluation, KeepPolicy, Rollback, RollbackPolicy, SavePolicy
from simckpt.policies.arguments import check_duration

TEXTS = {"description": "What the policies remember that decide when to save, what to keep and when to go back."}
DECISIONS = "checkpointer"  # the name of the component

# how several ranks save: all of them at the same call of `step`, or each at its own time
BARRIER, INDEPENDENT = "barrier", "independent"

METRICS_LIMIT = 2048  # [bytes] as JSON: a commit record, which listings read, has 4 KB for everything

# the arrays of the history grow in powers of two, for a file whose shapes are those of the last one is laid out quickly
_EVALUATIONS, _RETURNS = 16, 128


class Decisions:
    """What the policies remember, as a component: part of every checkpoint, so that a run never sees its lost future.

    Attributes:
        previous_step: of the last save that was tried [env steps].
        memory: see `policies.Moment`; replaced as a whole, never changed.
        evaluations: {metric: the evaluations with per-episode returns, oldest first}.
        rollbacks: one record for each rollback of the run, oldest first, those of its lost futures among them. Keys:
            `step`, `target_step`, `level`, `evaluations` as in `policies.Rollback`; `reason`; `changes`, the changed
            hyperparameters; and `saw`, the last evaluations that the policy saw, as [step, mean, episodes].
    """

    def __init__(self) -> None:
        self.previous_step = 0
        self.memory: dict[str, float] = {}
        self.evaluations: dict[str, list[Evaluation]] = {}
        self.rollbacks: list[dict[str, Any]] = []
        self._given: dict[str, tuple[Any, tuple[float, ...]]] = {}  # no state: what this process handed in last

    def new_ones(self, metrics: Any, returns: Mapping[str, tuple[float, ...]]) -> dict[str, tuple[float, ...]]:
        """Returns those evaluations that were not handed in before, as by a loop that keeps its dict of metrics.

        Equal returns alone tell nothing: a policy that has collapsed may get the same ones each time. So what counts is
        whether it is the same list or array, with the same values in it.
        """
        given = {name: (metrics[name], values) for name, values in returns.items()}
        before, self._given = self._given, {**self._given, **given}
        return {
            name: values
            for name, (held, values) in given.items()
            if not (name in before and before[name][0] is held and before[name][1] == values)
        }

    def note(self, step: int, returns: Mapping[str, Sequence[float]]) -> None:
        """Adds evaluations of this step; one that is there already is replaced.

        Args:
            step: [env steps].
            returns: {metric: one value for each episode}.
        """
        for metric, values in returns.items():
            history = self.evaluations.setdefault(metric, [])
            if history and history[-1].step == step:
                history.pop()
            history.append(Evaluation(step, tuple(values)))

    def history(self, metric: str) -> tuple[Evaluation, ...]:
        """Returns the evaluations of a metric, oldest first."""
        return tuple(self.evaluations.get(metric, ()))

    def past_rollbacks(self) -> tuple[Rollback, ...]:
        """Returns the rollbacks of the run, oldest first, as a policy looks at them."""
        return tuple(
            Rollback(each["step"], each["target_step"], each["level"], each["evaluations"]) for each in self.rollbacks
        )

    def state_dict(self) -> dict[str, Any]:
        """Returns all of it; see `evaluations_of` for the arrays."""
        return {
            "previous_step": self.previous_step,
            "memory": self.memory,
            "evaluations": {metric: _packed(history) for metric, history in self.evaluations.items()},
            "rollbacks": self.rollbacks,
        }

    def validate_state_dict(self, state: Any) -> None:
        """Checks that a state is one; raises StateMismatchError."""
        # stores of 0.1 knew no memory, those of 0.2 neither evaluations nor rollbacks
        memory = state.get("memory", {}) if isinstance(state, dict) else None
        try:
            fits = isinstance(memory, dict) and type(state.get("previous_step")) is int
            if fits:
                evaluations_of(state)
                _checked_rollbacks(state.get("rollbacks", []))
        except (TypeError, ValueError, KeyError, AttributeError, IndexError):
            fits = False
        if not fits:
            problem = "it is not what the policies remember"
            raise StateMismatchError(problem, problems=[problem])

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Sets all of it."""
        self.previous_step = state["previous_step"]
        self.memory = dict(state.get("memory", {}))
        self.evaluations = {metric: list(history) for metric, history in evaluations_of(state).items()}
        self.rollbacks = [dict(each) for each in state.get("rollbacks", [])]


def evaluations_of(state: Mapping[str, Any]) -> dict[str, tuple[Evaluation, ...]]:
    """Returns {metric: evaluations} from the state of the component `checkpointer`, as `checkpoint["checkpointer"]` is.

    In it, `evaluations/<metric>` holds `length`, the number of evaluations; `steps` and `counts`, int64, of which so
    many entries count; and `returns`, float64, in which the episodes of all evaluations lie one after the other.
    What follows in the arrays is padding.
    """
    return {metric: _unpacked(tree) for metric, tree in state.get("evaluations", {}).items()}


def _packed(history: Sequence[Evaluation]) -> dict[str, Any]:
    total = sum(len(evaluation.returns) for evaluation in history)
    steps = np.full(_room(len(history), _EVALUATIONS), -1, "int64")
    counts = np.zeros(len(steps), "int64")
    returns = np.full(_room(total, _RETURNS), np.nan)
    steps[: len(history)] = [evaluation.step for evaluation in history]
    counts[: len(history)] = [len(evaluation.returns) for evaluation in history]
    returns[:total] = [value for evaluation in history for value in evaluation.returns]
    return {"length": len(history), "steps": steps, "counts": counts, "returns": returns}


def _unpacked(tree: Mapping[str, Any]) -> tuple[Evaluation, ...]:
    length, returns = int(tree["length"]), np.asarray(tree["returns"], "float64")
    steps, counts = (np.asarray(tree[name], "int64").tolist() for name in ("steps", "counts"))
    ends = np.cumsum([0, *counts[:length]]).tolist()
    if not 0 <= length <= min(len(steps), len(counts)) or ends[-1] > len(returns) or min(counts, default=0) < 0:
        raise ValueError(f"{length} evaluations do not fit {len(steps)} steps and {len(returns)} returns")
    values = returns.tolist()
    return tuple(Evaluation(steps[i], tuple(values[ends[i] : ends[i + 1]])) for i in range(length))


def _room(needed: int, least: int) -> int:
    return max(least, 1 << (needed - 1).bit_length() if needed else 0)


def _checked_rollbacks(rollbacks: Any) -> None:
    for each in rollbacks:
        if not all(type(each[key]) is int for key in ("step", "target_step", "level", "evaluations")):
            raise TypeError("a rollback without its numbers")


def check_arguments(
    components: Mapping[str, Any],
    save_when: Any,
    keep: Any,
    background: str | None,
    when_busy: str,
    hyperparameters: Any,
    rollback: Any,
    in_place: bool,
    coordination: str,
    timeout: float | None,
) -> None:
    """Checks the arguments of `Run.checkpointer`; raises ConfigurationError."""
    if not isinstance(components, Mapping):
        message = f"components are a dict {{name: live object}}, got a {type(components).__name__}"
        raise ConfigurationError(message, keys=["components"])
    if DECISIONS in components:
        raise ConfigurationError(f"the name {DECISIONS!r} is taken by simckpt; call the component something else")
    if not isinstance(save_when, SavePolicy):
        raise ConfigurationError(f"save_when is a policy such as EverySteps(50_000), got {save_when!r}")
    if keep is not None and not isinstance(keep, KeepPolicy):
        raise ConfigurationError(f"keep is a policy such as KeepLast(3), got {keep!r}")
    if hyperparameters is not None and not hasattr(hyperparameters, "from_args"):
        message = f"hyperparameters say what holds them: simckpt.Hyperparameters(...), got {hyperparameters!r}"
        raise ConfigurationError(message, keys=["hyperparameters"])
    if rollback is not None and not isinstance(rollback, RollbackPolicy):
        message = f"rollback is a policy such as RollbackPolicy('eval/return'), got {rollback!r}"
        raise ConfigurationError(message, keys=["rollback"])
    if in_place and rollback is None:
        raise ConfigurationError("in_place says how to roll back: it needs rollback=...", keys=["in_place"])
    _check_choice("background", background, ("thread", "process", None))
    _check_choice("when_busy", when_busy, ("wait", "skip", "coalesce"))
    _check_coordination(coordination, timeout, rollback, background)


def _check_coordination(coordination: str, timeout: float | None, rollback: Any, background: str | None) -> None:
    _check_choice("coordination", coordination, (BARRIER, INDEPENDENT))
    if coordination == INDEPENDENT and background is None:
        message = "ranks that do not wait for each other save in the background: background='thread' or 'process'"
        raise ConfigurationError(message, keys=["coordination", "background"])
    if coordination == INDEPENDENT and rollback is not None:
        message = "a rollback needs all ranks at the same step: coordination='barrier'"
        raise ConfigurationError(message, keys=["coordination", "rollback"])
    if timeout is not None:
        check_duration(timeout, policy="Run.checkpointer", key="timeout", unit="seconds")


def _check_choice(name: str, value: Any, choices: Iterable[str | None]) -> None:
    if value not in choices:
        *first, last = map(repr, choices)
        raise ConfigurationError(f"{name} is {', '.join(first)} or {last}, got {value!r}", keys=[name])


def checked_metrics(metrics: Any) -> tuple[dict[str, float], dict[str, tuple[float, ...]]]:
    """Returns the metrics of a call, means of those that hold a value for each episode, and these values.

    Raises as `arguments.checked_metrics`; None is no metrics.
    """
    given = {} if metrics is None else metrics
    episodes = arguments.per_episode(given)
    if episodes:
        means = {name: float(np.mean(values)) if values else None for name, values in episodes.items()}
        given = {str(name): value for name, value in given.items()} | means
    checked = arguments.checked_metrics(given, limit=METRICS_LIMIT)
    return checked, {name: values for name, values in episodes.items() if values}
