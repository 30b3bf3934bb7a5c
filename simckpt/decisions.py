"""What a checkpointer decides from: the arguments it is made with, checked, and what its policies remember."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from simckpt import arguments
from simckpt.errors import ConfigurationError, StateMismatchError
from simckpt.policies import KeepPolicy, SavePolicy

TEXTS = {"description": "What the policies that decide when to save and what to keep remember."}
DECISIONS = "checkpointer"  # the name of the component

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
    if not isinstance(components, Mapping):
        message = f"components are a dict {{name: live object}}, got a {type(components).__name__}"
        raise ConfigurationError(message, keys=["components"])
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


def checked_metrics(metrics: Any) -> dict[str, float]:
    """Returns the metrics of a save, none for None; raises as `arguments.checked_metrics`."""
    return arguments.checked_metrics({} if metrics is None else metrics, limit=METRICS_LIMIT)
