"""How torch's learning rate schedulers keep their rates. Imported only when torch is loaded.

As of torch 2.13 (`torch/optim/lr_scheduler.py`):

- LambdaLR, CosineAnnealingWarmRestarts and OneCycleLR compute each rate from a base: `base_lrs`, or for OneCycleLR
  `initial_lr`, `max_lr` and `min_lr` of the groups. A rate that is set in the groups alone is lost at their next step.
- The others multiply the rate that is in the group, and use `base_lrs` at turning points (CosineAnnealingLR) or when
  SequentialLR comes to them. Where there is a floor, `eta_min`, it is the distance from it that is multiplied.
- ReduceLROnPlateau has no base. CyclicLR has two, of which neither follows from the other.
- SequentialLR and ChainedScheduler have no base of their own, but schedulers inside.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import Any

from torch.optim.lr_scheduler import ChainedScheduler, LRScheduler, OneCycleLR, ReduceLROnPlateau, SequentialLR

from simckpt.branching.targets import PutBack, copied, fill, plainly


def is_scheduler(obj: Any) -> bool:
    """Returns whether an object is one of torch's learning rate schedulers."""
    return isinstance(obj, LRScheduler)


def is_driven(optimizer: Any) -> bool:
    """Returns whether a scheduler was made for an optimizer: torch wraps its `step` then, ReduceLROnPlateau apart."""
    return hasattr(optimizer.step, "_wrapped_by_lr_sched")


def leaves(scheduler: Any) -> list[Any]:
    """Returns the scheduler itself, or all that are in it and have none inside."""
    if not hasattr(scheduler, "_schedulers"):
        return [scheduler]
    return [leaf for each in scheduler._schedulers for leaf in leaves(each)]


def acting(scheduler: Any) -> list[Any]:
    """Returns those of its leaves that its next step may use."""
    if isinstance(scheduler, SequentialLR):
        return acting(scheduler._schedulers[bisect_right(scheduler._milestones, scheduler.last_epoch)])
    if not hasattr(scheduler, "_schedulers"):
        return [scheduler]
    return [leaf for each in scheduler._schedulers for leaf in acting(each)]


def has_chain(scheduler: Any) -> bool:
    """Returns whether a scheduler is a ChainedScheduler, or one is in it."""
    return isinstance(scheduler, ChainedScheduler) or any(map(has_chain, getattr(scheduler, "_schedulers", ())))


def rebase(leaf: Any, index: int, value: float) -> None:
    """Makes a value the base rate of a scheduler for one group."""
    if isinstance(leaf, ReduceLROnPlateau):
        return
    group = leaf.optimizer.param_groups[index]
    first = value
    if isinstance(leaf, OneCycleLR):
        if plainly(group["max_lr"]) == value:
            # not even the rounding below may change what is right already
            return
        # the constructor's div_factor and final_div_factor are kept nowhere
        divisor = float(plainly(group["max_lr"])) / float(plainly(group["initial_lr"]))
        final = float(plainly(group["initial_lr"])) / float(plainly(group["min_lr"]))
        first = value / divisor
        put(group, "max_lr", value)
        put(group, "min_lr", first / final)
    put(group, "initial_lr", first)
    leaf.base_lrs = [copied(base) for base in leaf.base_lrs]
    put(leaf.base_lrs, index, first)


def put(holder: Any, key: Any, value: float) -> None:
    """Sets a rate in a group or a list; one that is a tensor stays that tensor."""
    if not fill(holder[key], value):
        holder[key] = value


def keeper(optimizer: Any, schedulers: list[Any]) -> PutBack:
    """Returns what puts the rates of an optimizer and its schedulers back as they are now."""
    names = ("lr", "initial_lr", "max_lr", "min_lr")
    groups = [{name: copied(group[name]) for name in names if name in group} for group in optimizer.param_groups]
    kept = [
        (each, {name: vars(each)[name] for name in ("base_lrs", "_last_lr") if name in vars(each)})
        for each in schedulers
    ]

    def put_back() -> None:
        for group, values in zip(optimizer.param_groups, groups, strict=True):
            for name, value in values.items():
                put(group, name, value)
        for each, values in kept:
            # they were replaced, never changed
            vars(each).update(values)

    return put_back
