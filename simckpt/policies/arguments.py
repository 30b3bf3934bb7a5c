"""Checks of what users give to policies."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, TypeGuard

import numpy as np

from simckpt.errors import ConfigurationError

MODES = ("max", "min")


def check_count(value: Any, *, policy: str, key: str) -> None:
    """Checks for a whole number of at least 1; `True` and `2.0` are none."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigurationError(f"{policy} needs a whole number of at least 1, got {value!r}", keys=[key])


def is_number(value: Any) -> TypeGuard[int | float]:
    """Returns whether a value is an int or a float of Python's; `True` is none."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def check_duration(value: Any, *, policy: str, key: str, unit: str, least: float | None = None) -> None:
    """Checks for a finite number above 0, or of at least `least` if that is given."""
    if not is_number(value) or not value < math.inf or not (value > 0 if least is None else value >= least):
        bound = "above 0" if least is None else f"of at least {least:g}"
        raise ConfigurationError(f"{policy} needs a number of {unit} {bound}, got {value!r}", keys=[key])


def check_metric(metric: Any, mode: Any, *, policy: str) -> None:
    """Checks for a metric's name, and for "max" or "min"."""
    if not isinstance(metric, str) or not metric:
        raise ConfigurationError(
            f'{policy} needs the name of a metric such as "eval/return", got {metric!r}', keys=["metric"]
        )
    check_mode(mode, of=policy)


def check_mode(mode: Any, *, of: str) -> None:
    """Checks for "max" or "min"."""
    if not isinstance(mode, str) or mode not in MODES:
        raise ConfigurationError(f"the mode of {of} is 'max' or 'min', got {mode!r}", keys=["mode"])


def unboxed(value: Any) -> Any:
    """Returns a value with Python's own numbers and texts in the place of numpy's scalars, inside of containers too.

    What Python has no number for, such as a `numpy.longdouble`, stays what it is.
    """
    if isinstance(value, np.generic) or (isinstance(value, np.ndarray) and value.ndim == 0):
        plain = value.item()
        return plain if type(plain) in (bool, int, float, str) else value
    if type(value) in (list, tuple):
        return type(value)(unboxed(item) for item in value)
    if type(value) is dict:
        return {key: unboxed(item) for key, item in value.items()}
    return value


def in_kind_of(old: Any, new: Any) -> Any:
    """Returns the new value in the type of the old one; raises TypeError if it has another type, or is not finite."""
    if old is None:
        return new  # nobody knows what else it may be
    if type(old) is float and type(new) is int:
        return float(new)
    if type(old) is type(new) is float and math.isfinite(old) and not math.isfinite(new):
        raise TypeError(f"it is {old!r} and would be {new!r}, which is not finite")
    if isinstance(old, list | tuple) and isinstance(new, list):
        items = [in_kind_of(old[0], item) for item in new] if _is_uniform(old) else new
        # a run's record may hold tuples, as the first versions wrote them
        return tuple(items) if isinstance(old, tuple) else items
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        if old.keys() != new.keys():
            differing = ", ".join(repr(key) for key in sorted(old.keys() ^ new.keys()))
            raise TypeError(f"a dict is given whole, with the keys that it has; these differ: {differing}")
        return {key: in_kind_of(old[key], item) for key, item in new.items()}
    if type(old) is not type(new):
        raise TypeError(f"it is {_named(old)}, given {_named(new)}")
    return new


def _is_uniform(values: list[Any] | tuple[Any, ...]) -> bool:
    return bool(values) and len({type(value) for value in values}) == 1


def _named(value: Any) -> str:
    return f"{value!r} of type {type(value).__name__}"


def ranks_above(value: float, other: float, mode: str) -> bool:
    """Returns whether a value is strictly better than another; NaN never is, and nothing is better than NaN."""
    return value > other if mode == "max" else value < other


def written(name: str, *arguments: object, **options: object) -> str:
    """Returns the call that makes a policy: `KeepBest(2, 'eval/return')`. Options that are None are left out."""
    texts = [repr(argument) for argument in arguments]
    texts += [f"{key}={value!r}" for key, value in options.items() if value is not None]
    return f"{name}({', '.join(texts)})"
