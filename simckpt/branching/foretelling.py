"""Which learning rates schedulers will give: copies of them step along on copies of the groups. Needs torch loaded."""

from __future__ import annotations

import copy
import functools
import types
from collections.abc import Sequence
from typing import Any

from torch.optim import lr_scheduler

from simckpt.branching.targets import copied, plainly

ABSOLUTE = (lr_scheduler.LambdaLR, lr_scheduler.CosineAnnealingWarmRestarts, lr_scheduler.OneCycleLR)
"""The schedulers that compute each rate from a base, whatever rate is in the group."""

# farther ahead than a loop steps a scheduler between two steps of its optimizer
_MOST_STEPS = 100_000


class Foretold:
    """The rates of some groups from now on.

    Args:
        optimizer: the live one.
        schedulers: that drive it, in no particular order.
    """

    def __init__(self, optimizer: Any, schedulers: Sequence[Any]) -> None:
        self._groups = _Groups(optimizer)
        self._schedulers = schedulers
        self._copies = [_twin(scheduler, self._groups) for scheduler in schedulers]

    def follow(self) -> bool:
        """Steps the copies until they are where the live ones are; returns whether that worked."""
        for twin, live in zip(self._copies, self._schedulers, strict=True):
            steps = 0
            while position(twin) != position(live):
                if steps == _MOST_STEPS or _epoch(twin) >= _epoch(live) or not _step(twin):
                    return False
                steps += 1
        return True

    def rates_ahead(self) -> list[float] | None:
        """Steps all copies once; returns the rates of all groups, or None if the schedulers need more than that."""
        return self.rates() if all(map(_step, self._copies)) else None

    def rates(self) -> list[float]:
        """Returns the rates of all groups."""
        return [float(plainly(group["lr"])) for group in self._groups.param_groups]


def computed_rates(optimizer: Any, scheduler: Any) -> list[float] | None:
    """Returns the rates that follow from a scheduler's base and position alone; None if they depend on what was before.

    Args:
        optimizer: the live one.
        scheduler: one without others inside.
    """
    twin = _twin(scheduler, _Groups(optimizer))
    twin._get_lr_called_within_step = True
    if isinstance(scheduler, ABSOLUTE):
        rates = twin.get_lr()
    elif hasattr(twin, "_get_closed_form_lr"):
        rates = twin._get_closed_form_lr()
    else:
        return None
    return [float(plainly(rate)) for rate in rates]


def position(scheduler: Any) -> Any:
    """Returns how far a scheduler is."""
    inner = [position(each) for each in getattr(scheduler, "_schedulers", ())]
    return getattr(scheduler, "last_epoch", None), getattr(scheduler, "T_cur", None), inner


def _epoch(scheduler: Any) -> float:
    # a ChainedScheduler has none of its own, and steps all of its schedulers
    return float(scheduler.last_epoch if hasattr(scheduler, "last_epoch") else _epoch(scheduler._schedulers[0]))


def _step(scheduler: Any) -> bool:
    try:
        scheduler.step()
    except Exception:
        # a scheduler of somebody's own, which needs arguments or an attribute that the copy of the groups lacks
        return False
    return True


class _Groups:
    """Stands for an optimizer, for a scheduler that wants to set rates."""

    # both are asked for by the first step of a scheduler, which warns if nobody stepped the optimizer before
    _opt_called = True

    def __init__(self, optimizer: Any) -> None:
        self.param_groups = [
            {name: [] if name == "params" else copied(value) for name, value in group.items()}
            for group in optimizer.param_groups
        ]
        self.defaults = optimizer.defaults

    def step(self) -> None:
        """Does nothing."""

    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]


def _twin(scheduler: Any, groups: _Groups) -> Any:
    twin = object.__new__(type(scheduler))
    for name, value in vars(scheduler).items():
        if name == "optimizer":
            value = groups
        elif name == "_schedulers":
            value = [_twin(each, groups) for each in value]
        elif name == "lr_lambdas":
            value = [_function(each) for each in value]
        elif _is_plain(value):
            value = copy.deepcopy(copied(value))
        vars(twin)[name] = value
    return twin


def _function(function: Any) -> Any:
    # torch counts the attributes of a callable object as the scheduler's state; functions and methods have none
    if isinstance(function, types.FunctionType | types.MethodType | types.BuiltinFunctionType | functools.partial):
        return function
    try:
        return copy.deepcopy(function)
    except Exception:
        # whatever a stranger's object does when it is copied
        return function


def _is_plain(value: Any) -> bool:
    if isinstance(value, dict):
        return all(map(_is_plain, value.values()))
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    return value is None or isinstance(plainly(value), bool | int | float | str | list)
