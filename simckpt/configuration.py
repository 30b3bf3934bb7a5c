"""Hyperparameters in and out of a run: the run's own values win over defaults, never over an explicit wish."""

from __future__ import annotations

import argparse
import copy
import dataclasses
import json
from collections.abc import Collection, Iterable, Mapping, MutableMapping, Sequence
from typing import Any, TypeVar, cast

import numpy as np

from simckpt.errors import ConfigurationError
from simckpt.policies.arguments import unboxed

Arguments = TypeVar("Arguments")


def values_of(args: Any) -> dict[str, Any]:
    """Returns {key: value} of a dataclass instance, an `argparse.Namespace` or a mapping.

    Raises:
        ConfigurationError: another type, a key that is not a string, or a value that JSON cannot hold exactly.
    """
    if dataclasses.is_dataclass(args) and not isinstance(args, type):
        values = {field.name: getattr(args, field.name) for field in dataclasses.fields(args)}
    elif isinstance(args, argparse.Namespace):
        values = dict(vars(args))
    elif isinstance(args, Mapping):
        values = dict(args)
    else:
        raise ConfigurationError(
            f"hyperparameters come as a dataclass instance, an argparse.Namespace or a dict, got {type(args).__name__}"
        )
    return {_checked_key(key): plain(key, value) for key, value in values.items()}


def given_values(args: Any, free: Any, defaults: Mapping[str, Any] | None) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the values and the defaults that `Run.configure` is given; raises ConfigurationError."""
    given, known = values_of(args), defaults_of(args)
    known |= {key: plain(key, value) for key, value in (defaults or {}).items()}
    if isinstance(free, str):
        raise ConfigurationError(f"free is a set of keys such as {{{free!r}}}, got a string", keys=["free"])
    return given, known


def plain(key: str, value: Any) -> Any:
    """Returns the value as JSON gives it back: tuples become lists, numpy's scalars plain numbers, the rest stays.

    Raises:
        ConfigurationError: JSON cannot hold it exactly.
    """
    try:
        value = unboxed(value)
        written = json.dumps(value)
    except (TypeError, ValueError, RecursionError) as error:
        message = f"hyperparameter {key!r} is a {type(value).__name__}, which JSON cannot hold; use numbers, strings, "
        raise ConfigurationError(message + "lists or dicts with string keys, or leave it out", keys=[key]) from error
    read = json.loads(written)
    if not same_values(read, value):
        message = (
            f"hyperparameter {key!r} = {value!r} does not survive JSON; use plain numbers, strings, lists or dicts"
        )
        raise ConfigurationError(message, keys=[key])
    return read


def defaults_of(args: Any) -> dict[str, Any]:
    """Returns the defaults of a dataclass instance's fields; {} for anything else, where they are unknown."""
    if not dataclasses.is_dataclass(args) or isinstance(args, type):
        return {}
    found = {}
    for field in dataclasses.fields(args):
        if field.default is not dataclasses.MISSING:
            found[field.name] = plain(field.name, field.default)
        elif field.default_factory is not dataclasses.MISSING:
            found[field.name] = plain(field.name, field.default_factory())
    return found


def in_force(
    saved: Mapping[str, Any],
    given: Mapping[str, Any],
    *,
    defaults: Mapping[str, Any],
    free: Iterable[str],
    run: str,
    changed: Collection[str] = (),
    formerly: Sequence[Mapping[str, Any]] = (),
) -> dict[str, Any]:
    """Returns the hyperparameters in force when a run is started again.

    A key of `free` takes the given value. Any other key keeps the run's value, unless the given value is a wish: such a
    wish cannot be granted inside the run. A value is no wish if it is the run's own, the default, or one that an
    unchanged command line gives: what the key was before a branch or a rollback changed it. A key of `free` that was
    changed takes the given value if that is a wish. A key the run has never seen takes the given value.

    Args:
        saved: the run's values.
        given: by the program.
        defaults: as far as they are known.
        free: keys that may differ between starts.
        run: its name, for messages.
        changed: keys that a branch or a rollback has set.
        formerly: the values of the run before that, and of those that it descends from.

    Raises:
        ConfigurationError: the wishes that contradict the run, all of them.
    """
    allowed = set(free)
    merged, conflicts = dict(saved), []
    for key, value in given.items():
        former = [values[key] for values in (defaults, *formerly) if key in values]
        is_wish = not any(same_values(other, value) for other in former)
        if key not in saved or same_values(saved[key], value) or (key in allowed and (is_wish or key not in changed)):
            merged[key] = value
        elif is_wish:
            conflicts.append(key)
    if conflicts:
        wishes = "\n  ".join(
            f"{key}: the run has {saved[key]!r}{' by its branch or a rollback' if key in changed else ''}, "
            f"given {given[key]!r}"
            for key in conflicts
        )
        raise ConfigurationError(
            f"run {run!r} was started with other hyperparameters:\n  {wishes}\n"
            "A run keeps its hyperparameters. Leave these out to go on with the run's own, choose another run name "
            "for a new run, or branch from one of its checkpoints; name keys that may differ in `free`.",
            keys=conflicts,
        )
    return merged


def check_ranks(given: Sequence[Mapping[str, Any]], *, free: Collection[str]) -> None:
    """Checks that several ranks were given the same hyperparameters.

    Args:
        given: the values of each rank.
        free: keys of which each rank may have its own.

    Raises:
        ConfigurationError: the keys that differ, with the ranks that differ from rank 0.
    """
    first, differing = given[0], {}
    for key in dict.fromkeys(key for values in given for key in values):
        ranks = [rank for rank, values in enumerate(given) if not same_given(key, values, first)]
        if ranks and key not in free:
            differing[key] = ranks
    if differing:
        listing = "\n  ".join(
            f"{key}: {first.get(key)!r} on rank 0, {given[ranks[0]].get(key)!r} on rank {ranks[0]}"
            + (f", and {len(ranks) - 1} more ranks differ" if len(ranks) > 1 else "")
            for key, ranks in differing.items()
        )
        raise ConfigurationError(
            f"the ranks were given different hyperparameters:\n  {listing}\n"
            "Give all ranks the same, and derive what differs, such as a seed, from the rank; or name these keys in "
            "`free`.",
            keys=list(differing),
        )


def same_given(key: str, left: Mapping[str, Any], right: Mapping[str, Any]) -> bool:
    """Returns whether two ranks were given the same value of a key, or both none."""
    return (key in left) == (key in right) and (key not in left or same_values(left[key], right[key]))


def with_values(args: Arguments, values: Mapping[str, Any]) -> Arguments:
    """Returns a copy of the arguments with the given values; keys that a dataclass lacks are left out.

    A dataclass and a Namespace keep their type, another mapping becomes a dict.
    """
    if dataclasses.is_dataclass(args) and not isinstance(args, type):
        current = {field.name: getattr(args, field.name) for field in dataclasses.fields(args)}
        changed = copy.copy(args)
        for key, value in values.items():
            if key in current and _differs(key, current[key], value):
                object.__setattr__(changed, key, _like(current[key], value))
        return changed
    fresh: Any = copy.copy(args) if isinstance(args, argparse.Namespace) else dict(cast(Mapping[str, Any], args))
    target: MutableMapping[str, Any] = vars(fresh) if isinstance(fresh, argparse.Namespace) else fresh
    for key, value in values.items():
        if key not in target or _differs(key, target[key], value):
            target[key] = _like(target.get(key), value)
    return cast(Arguments, fresh)


def _differs(key: str, current: Any, value: Any) -> bool:
    # a numpy scalar gives way to the plain number that the run keeps
    return isinstance(current, np.generic | np.ndarray) or not same_values(plain(key, current), value)


def _like(current: Any, value: Any) -> Any:
    return tuple(value) if isinstance(current, tuple) and isinstance(value, list) else value


def _checked_key(key: Any) -> str:
    if not isinstance(key, str):
        raise ConfigurationError(f"hyperparameters are named by strings, got {key!r}", keys=[str(key)])
    return key


def same_values(left: Any, right: Any) -> bool:
    """Returns whether two JSON values are equal; 1 equals 1.0 but not True, NaN equals itself, a tuple its list."""
    if isinstance(left, list | tuple) and isinstance(right, list | tuple):
        return len(left) == len(right) and all(map(same_values, left, right))
    if isinstance(left, Mapping) and isinstance(right, Mapping):
        return left.keys() == right.keys() and all(same_values(left[key], right[key]) for key in left)
    if type(left) is not type(right) and {type(left), type(right)} != {int, float}:
        return False
    return bool(left == right) or (left != left and right != right)
