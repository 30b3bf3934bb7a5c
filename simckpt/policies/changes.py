"""What is to be different after a rollback, for a plain restore replays the collapse: small values, joined with `&`."""

from __future__ import annotations

import inspect
import math
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from simckpt.errors import ConfigurationError
from simckpt.policies.arguments import in_kind_of, is_number, unboxed, written


class Change(ABC):
    """One thing that a rollback changes, or several joined with `&`."""

    def parts(self) -> tuple[Change, ...]:
        """Returns the changes that this one is joined from; itself, if it is not joined."""
        return (self,)

    def __and__(self, other: Change) -> Change:
        if not isinstance(other, Change):
            return NotImplemented
        return Together((*self.parts(), *other.parts()))

    @abstractmethod
    def __repr__(self) -> str:
        """Returns the change as it is written in a program."""


@dataclass(frozen=True, repr=False)
class Reseed(Change):
    """Continues all random streams from new seeds: those of the envs, of the process, of samplers and replay buffers.

    The seeds are derived from all that the target holds, streams that nobody seeded included, the number of rollbacks
    so far and, in a branch, the run's name: another try is another try, and the same rollback done again draws the same
    numbers.
    """

    def __repr__(self) -> str:
        return "Reseed()"


@dataclass(frozen=True, init=False, repr=False)
class Scale(Change):
    """Multiplies hyperparameters, as in `Scale(learning_rate=0.5, clip=0.8)`.

    What is multiplied is the value in force at the target. After a rollback that is the changed one, so that going back
    to the same place again halves again. A whole number stays whole: it is rounded down by a factor below 1, but never
    to 0, and up by one above. Where it need not be whole, write `1.0` among the hyperparameters instead of `1`. Of a
    rate under `ReduceLROnPlateau`, which keeps no base, what that has left of it at the target is multiplied.

    Args:
        **factors: finite and above 0, by key; numpy's scalars count as plain numbers.
    """

    factors: tuple[tuple[str, float], ...]

    def __init__(self, **factors: float) -> None:
        if not factors:
            raise ConfigurationError("Scale needs a factor by key, as in Scale(learning_rate=0.5)", keys=["changes"])
        factors = {key: unboxed(factor) for key, factor in factors.items()}
        for key, factor in factors.items():
            # an int may be larger than any float
            if type(factor) not in (int, float) or not 0 < factor <= sys.float_info.max:
                message = f"Scale needs a finite factor above 0 for {key!r}, got {factor!r}"
                raise ConfigurationError(message, keys=[key])
        object.__setattr__(self, "factors", tuple(factors.items()))

    def __repr__(self) -> str:
        return _with_keys("Scale", dict(self.factors))


@dataclass(frozen=True, init=False, repr=False)
class SetTo(Change):
    """Sets hyperparameters, as in `SetTo(learning_rate=1e-4)`.

    Done once more to the same target it changes nothing further, and training replays: join it with `Reseed()`.

    Args:
        **values: by key; numbers, texts, booleans, None, or lists or dicts of these; NaN nowhere among them. numpy's
            scalars count as plain numbers.
    """

    values: tuple[tuple[str, Any], ...]

    def __init__(self, **values: Any) -> None:
        if not values:
            raise ConfigurationError("SetTo needs a value by key, as in SetTo(learning_rate=1e-4)", keys=["changes"])
        plain = {key: _settable(key, unboxed(value)) for key, value in values.items()}
        object.__setattr__(self, "values", tuple(plain.items()))

    def __hash__(self) -> int:
        # a value may be a list
        return hash(repr(self))

    def __repr__(self) -> str:
        return _with_keys("SetTo", dict(self.values))


@dataclass(frozen=True, init=False, repr=False)
class KeepRows(Change):
    """Leaves components as they are, as in `KeepRows("replay")`: the rows collected since the target stay.

    Without it a replay buffer returns to the target with all the rest, and the rows collected since are dropped.

    Args:
        *components: names of components.
    """

    components: tuple[str, ...]

    def __init__(self, *components: str) -> None:
        if not components or not all(isinstance(name, str) and name for name in components):
            message = f'KeepRows needs names of components, as in KeepRows("replay"), got {components!r}'
            raise ConfigurationError(message, keys=["changes"])
        object.__setattr__(self, "components", components)

    def __repr__(self) -> str:
        return written("KeepRows", *self.components)


@dataclass(frozen=True, repr=False)
class Call(Change):
    """Calls a function once the target is restored and the hyperparameters are set.

    One that does the same each time is to be joined with `Reseed()`, as `SetTo` is.

    Args:
        function: called with the components, {name: live object}, and the level of escalation, from 1 on. What it
            changes in components is part of the rollback's commit; if it raises, there is no rollback.
    """

    function: Callable[[Mapping[str, Any], int], object]

    def __post_init__(self) -> None:
        if not callable(self.function):
            raise ConfigurationError(f"Call needs a function, got {self.function!r}", keys=["changes"])
        try:
            inspect.signature(self.function).bind({}, 1)
        except TypeError as error:
            message = f"Call needs a function of two arguments, the components and the level: {self!r}: {error}"
            raise ConfigurationError(message, keys=["changes"]) from error
        except ValueError:
            pass  # some builtins do not tell

    def __repr__(self) -> str:
        return f"Call({getattr(self.function, '__qualname__', repr(self.function))})"


@dataclass(frozen=True, repr=False)
class Together(Change):
    """Several changes at once: what `&` makes.

    Raises:
        ConfigurationError: two of them want the same hyperparameter.
    """

    changes: tuple[Change, ...]

    def __post_init__(self) -> None:
        seen: set[str] = set()
        for part in self.changes:
            again = sorted(seen & keys([part]))
            if again:
                raise ConfigurationError(f"{self!r} changes {again[0]!r} twice", keys=again)
            seen |= keys([part])

    def parts(self) -> tuple[Change, ...]:
        """Returns the changes that this one is joined from."""
        return self.changes

    def __repr__(self) -> str:
        return " & ".join(map(repr, self.changes))


def keys(changes: Iterable[Change]) -> frozenset[str]:
    """Returns the hyperparameters that any of the changes wants to change."""
    found: set[str] = set()
    for part in _parts(changes):
        if isinstance(part, Scale):
            found.update(key for key, _ in part.factors)
        elif isinstance(part, SetTo):
            found.update(key for key, _ in part.values)
    return frozenset(found)


def new_values(change: Change, hyperparameters: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the hyperparameters that a change sets, with their new values.

    Args:
        change: one, or several joined.
        hyperparameters: those in force at the target.

    Raises:
        ConfigurationError: a key that the run does not have, one to scale that is no number, or one to set whose value
            is of another type.
    """
    values: dict[str, Any] = {}
    for part in change.parts():
        if isinstance(part, Scale):
            values.update((key, _scaled(part, key, factor, hyperparameters)) for key, factor in part.factors)
        elif isinstance(part, SetTo):
            for key, value in part.values:
                try:
                    values[key] = in_kind_of(_value(part, key, hyperparameters), value)
                except (TypeError, OverflowError) as error:
                    raise ConfigurationError(f"{part!r} does not fit: {key!r}: {error}", keys=[key]) from error
    return values


def reseeds(change: Change) -> bool:
    """Returns whether random streams are to continue from new seeds."""
    return any(isinstance(part, Reseed) for part in change.parts())


def kept_components(change: Change) -> frozenset[str]:
    """Returns the names of the components that stay as they are."""
    return frozenset(name for part in change.parts() if isinstance(part, KeepRows) for name in part.components)


def calls(change: Change) -> tuple[Callable[[Mapping[str, Any], int], object], ...]:
    """Returns the functions to call with (components, level), in the order written."""
    return tuple(part.function for part in change.parts() if isinstance(part, Call))


def checked_changes(changes: Any) -> tuple[Change, ...]:
    """Returns the changes of each level from one change or a sequence of them; raises ConfigurationError."""
    levels = (changes,) if isinstance(changes, Change) else changes
    if isinstance(levels, list | tuple) and levels and all(isinstance(each, Change) for each in levels):
        return tuple(levels)
    raise ConfigurationError(
        f"changes are one, such as Reseed() & Scale(learning_rate=0.5), or a list with one for each level of "
        f"escalation, got {changes!r}",
        keys=["changes"],
    )


def _parts(changes: Iterable[Change]) -> list[Change]:
    return [part for change in changes for part in change.parts()]


def _settable(key: str, value: Any) -> Any:
    """Returns a value as JSON gives it back; raises ConfigurationError if it is none that a run can have."""
    if type(value) in (list, tuple):
        return [_settable(key, item) for item in value]
    if type(value) is dict and all(type(name) is str for name in value):
        return {name: _settable(key, item) for name, item in value.items()}
    if value is None or (type(value) in (bool, int, float, str) and value == value):
        return value
    what = "numbers other than NaN, texts, booleans, None, or lists or dicts of these"
    raise ConfigurationError(f"SetTo sets {key!r} to {what}, got {value!r}", keys=[key])


def _value(part: Change, key: str, hyperparameters: Mapping[str, Any]) -> Any:
    if key not in hyperparameters:
        known = ", ".join(map(repr, hyperparameters)) or "none"
        message = f"{part!r} changes {key!r}, which the run does not have; its hyperparameters: {known}"
        raise ConfigurationError(message, keys=[key])
    return hyperparameters[key]


def _scaled(part: Scale, key: str, factor: float, hyperparameters: Mapping[str, Any]) -> float:
    value = _value(part, key, hyperparameters)
    if not is_number(value):
        raise ConfigurationError(f"{part!r} scales {key!r}, which is no number but {value!r}", keys=[key])
    try:
        size = abs(value) * factor
        fits = math.isfinite(size)
    except OverflowError:
        fits = False
    if not fits:
        raise ConfigurationError(f"{part!r} makes {key!r}, which is {value!r}, infinite or no number", keys=[key])
    if isinstance(value, float):
        return value * factor
    # at least by 1, so that 3 becomes 2 by a factor of 0.9, and never to 0
    rounded = max(min(abs(value), 1), math.floor(size) if factor < 1 else math.ceil(size))
    return rounded if value > 0 else -rounded


def _with_keys(name: str, options: Mapping[str, Any]) -> str:
    if all(key.isidentifier() for key in options):
        return f"{name}({', '.join(f'{key}={value!r}' for key, value in options.items())})"
    return f"{name}(**{dict(options)!r})"
