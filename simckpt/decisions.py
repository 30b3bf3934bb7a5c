"""What a checkpointer decides from: the arguments of its calls, checked, and what its policies remember."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from simckpt.errors import ConfigurationError, StateMismatchError
from simckpt.policies import KeepPolicy, SavePolicy

DECISIONS = "checkpointer"  # the name of the component

LARGEST_STEP = 2**63
METRICS_LIMIT = 2048  # [bytes] as JSON: a commit record, which listings read, has 4 KB for everything


class Decisions:
    """What the policies remember, as a component: part of every checkpoint, so that a run never sees its lost future.

    Attributes:
        previous_step: of the last save that was tried [env steps].
        memory: see `policies.Moment`; replaced as a whole, never changed.
    """

    def __init__(self) -> None:
        self.previous_step = 0
        self.memory: dict[str, float] = {}

    def state_dict(self) -> dict[str, Any]:
        """Returns both."""
        return {"previous_step": self.previous_step, "memory": self.memory}

    def validate_state_dict(self, state: Any) -> None:
        """Checks that a state is one; raises StateMismatchError."""
        # stores of 0.1 knew no memory
        memory = state.get("memory", {}) if isinstance(state, dict) else None
        if not isinstance(memory, dict) or type(state.get("previous_step")) is not int:
            problem = "it is not what the policies remember"
            raise StateMismatchError(problem, problems=[problem])

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Sets both."""
        self.previous_step = state["previous_step"]
        self.memory = dict(state.get("memory", {}))


def check_arguments(
    components: Mapping[str, Any], save_when: Any, keep: Any, background: str | None, when_busy: str
) -> None:
    """Checks the arguments of `Run.checkpointer`; raises ConfigurationError."""
    if DECISIONS in components:
        raise ConfigurationError(f"the name {DECISIONS!r} is taken by simckpt; call the component something else")
    if not isinstance(save_when, SavePolicy):
        raise ConfigurationError(f"save_when is a policy such as EverySteps(50_000), got {save_when!r}")
    if keep is not None and not isinstance(keep, KeepPolicy):
        raise ConfigurationError(f"keep is a policy such as KeepLast(3), got {keep!r}")
    if background not in ("thread", "process", None):
        message = f"background is 'thread', 'process' or None, got {background!r}"
        raise ConfigurationError(message, keys=["background"])
    if when_busy not in ("wait", "skip", "coalesce"):
        message = f"when_busy is 'wait', 'skip' or 'coalesce', got {when_busy!r}"
        raise ConfigurationError(message, keys=["when_busy"])


def checked_step(step: Any) -> int:
    """Returns a step as an int; raises ConfigurationError if it is none."""
    try:
        whole = int(step)
    except (TypeError, ValueError):
        whole = -1
    if isinstance(step, bool) or whole != step or not 0 <= whole < LARGEST_STEP:
        raise ConfigurationError(f"a step is a whole number of at least 0 and below 2**63, got {step!r}", keys=["step"])
    return whole


def checked_metrics(metrics: Mapping[str, Any] | None) -> dict[str, float]:
    """Returns metrics as floats, without those that have no value yet; raises ConfigurationError."""
    if metrics is not None and not isinstance(metrics, Mapping):
        raise ConfigurationError(f"metrics are a dict of numbers, got a {type(metrics).__name__}", keys=["metrics"])
    checked = {}
    for name, value in (metrics or {}).items():
        if value is None:
            continue
        try:
            checked[str(name)] = float(value)
        except (TypeError, ValueError, OverflowError) as error:
            raise ConfigurationError(f"metric {name!r} is no number: {value!r}", keys=[str(name)]) from error
    size = len(json.dumps(checked))
    if size > METRICS_LIMIT:
        message = f"{len(checked)} metrics take {size} bytes as JSON and may take {METRICS_LIMIT}: give fewer"
        raise ConfigurationError(message, keys=list(checked))
    return checked
