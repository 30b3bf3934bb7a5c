"""Checks of what users give to calls: steps and metrics."""

from __future__ import annotations

import json
import operator
from collections import deque
from collections.abc import Mapping
from typing import Any

import numpy as np

from simckpt.errors import ConfigurationError

LARGEST_STEP = 2**63


def checked_step(step: Any) -> int:
    """Returns a step as an int; raises ConfigurationError if it is none."""
    try:
        whole = int(step)
        fits = bool(whole == step) and not isinstance(step, bool | np.bool_) and 0 <= whole < LARGEST_STEP
    # RuntimeError: a tensor of several elements
    except (TypeError, ValueError, OverflowError, RuntimeError):
        fits = False
    if not fits:
        message = f"a step is a whole number of at least 0 and below 2**63, got {_shown(step)}"
        raise ConfigurationError(message, keys=["step"])
    return whole


def checked_whole(name: str, value: Any, *, least: int | None = 0) -> int:
    """Returns a whole number as an int; raises ConfigurationError, by its name, for anything else or for less."""
    try:
        whole = operator.index(value)
    except TypeError:
        whole = None
    if whole is None or isinstance(value, bool | np.bool_) or (least is not None and whole < least):
        from_on = "" if least is None else f" of at least {least}"
        raise ConfigurationError(f"{name} is a whole number{from_on}, got {_shown(value)}", keys=[name])
    return whole


def checked_metrics(metrics: Any, *, limit: int | None = None) -> dict[str, float]:
    """Returns metrics as floats, without those that have no value yet.

    Args:
        metrics: {name: number or None}.
        limit: of their size as JSON [bytes].

    Raises:
        ConfigurationError: they are no such mapping, or too many.
    """
    if not isinstance(metrics, Mapping):
        raise ConfigurationError(f"metrics are a dict of numbers, got a {type(metrics).__name__}", keys=["metrics"])
    checked = {}
    for name, value in metrics.items():
        if value is None:
            continue
        try:
            checked[str(name)] = _number(value)
        except (TypeError, ValueError, OverflowError, RuntimeError) as error:
            raise ConfigurationError(f"metric {name!r} is no number: {_shown(value)}", keys=[str(name)]) from error
    if limit is not None and (size := len(json.dumps(checked))) > limit:
        message = f"{len(checked)} metrics take {size} bytes as JSON and may take {limit}: give fewer"
        raise ConfigurationError(message, keys=list(checked))
    return checked


def per_episode(metrics: Any) -> dict[str, tuple[float, ...]]:
    """Returns the values of those metrics that hold one for each episode: 1-D sequences, arrays or tensors.

    Raises:
        ConfigurationError: an array of more dimensions, or a sequence of something else than numbers.
    """
    found = {}
    for name, value in metrics.items() if isinstance(metrics, Mapping) else ():
        try:
            if not isinstance(value, list | tuple | deque) and not getattr(value, "ndim", None):
                continue
            _refuse_other_kinds(value)
            # a tensor on a GPU, in a graph or of a dtype that numpy lacks does not become an array by itself
            plain = value.detach().cpu().double() if hasattr(value, "detach") else value
            if isinstance(plain, np.ndarray) and plain.dtype.kind == "O":
                plain = plain.tolist()
            # one by one, for numpy takes None for NaN
            values = np.asarray(
                [_number(each) for each in plain] if isinstance(plain, list | tuple | deque) else plain, "float64"
            )
        except (TypeError, ValueError, OverflowError, RuntimeError) as error:
            message = f"metric {name!r} is no sequence of numbers: {_shown(value)}"
            raise ConfigurationError(message, keys=[str(name)]) from error
        if values.ndim != 1:
            message = f"metric {name!r} has the shape {values.shape}: give a number, or one for each episode"
            raise ConfigurationError(message, keys=[str(name)])
        found[str(name)] = tuple(values.tolist())
    return found


def _number(value: Any) -> float:
    """Returns a number, or a text that is one, as a float; raises TypeError for complex numbers and times, too."""
    _refuse_other_kinds(value)
    return float(value)


def _refuse_other_kinds(value: Any) -> None:
    """Raises TypeError for complex numbers and times, of which numpy and torch make real numbers in silence."""
    dtype = getattr(value, "dtype", None)
    # numpy's letters for complex numbers and times; torch's dtypes have none
    if getattr(dtype, "kind", "") in tuple("cmM") or getattr(dtype, "is_complex", False):
        raise TypeError(f"a {type(value).__name__} is no real number")


def _shown(value: Any) -> str:
    try:
        return repr(value)
    except ValueError:
        return "a number of too many digits"  # Python writes none of more than 4,300
