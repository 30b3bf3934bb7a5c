"""Checks of what users give to policies."""

from __future__ import annotations

import math
from typing import Any

from simckpt.errors import ConfigurationError

MODES = ("max", "min")


def check_count(value: Any, *, policy: str, key: str) -> None:
    """Checks for a whole number of at least 1; `True` and `2.0` are none."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigurationError(f"{policy} needs a whole number of at least 1, got {value!r}", keys=[key])


def check_duration(value: Any, *, policy: str, key: str, unit: str) -> None:
    """Checks for a finite number above 0."""
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < math.inf:
        raise ConfigurationError(f"{policy} needs a number of {unit} above 0, got {value!r}", keys=[key])


def check_metric(metric: Any, mode: Any, *, policy: str) -> None:
    """Checks for a metric's name, and for "max" or "min"."""
    if not isinstance(metric, str) or not metric:
        raise ConfigurationError(
            f'{policy} needs the name of a metric such as "eval/return", got {metric!r}', keys=["metric"]
        )
    check_mode(mode, of=policy)


def check_mode(mode: Any, *, of: str) -> None:
    """Checks for "max" or "min"."""
    if mode not in MODES:
        raise ConfigurationError(f"the mode of {of} is 'max' or 'min', got {mode!r}", keys=["mode"])


def ranks_above(value: float, other: float, mode: str) -> bool:
    """Returns whether a value is strictly better than another; NaN never is, and nothing is better than NaN."""
    return value > other if mode == "max" else value < other


def written(name: str, *arguments: object, **options: object) -> str:
    """Returns the call that makes a policy: `KeepBest(2, 'eval/return')`. Options that are None are left out."""
    texts = [repr(argument) for argument in arguments]
    texts += [f"{key}={value!r}" for key, value in options.items() if value is not None]
    return f"{name}({', '.join(texts)})"
