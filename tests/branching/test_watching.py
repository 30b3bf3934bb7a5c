"""Whether what is bound is what trains: optimizers that never step, and others that step instead."""

from __future__ import annotations

import gc
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim import optimizer as torch_optimizers

import simckpt
from simckpt.branching.hyperparameters import Hyperparameters
from simckpt.errors import OverrideNotAppliedError

OLD, NEW = 0.1, 0.01


def parameters(count: int = 2) -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(torch.zeros(3)) for _ in range(count)]


def step(optimizer: torch.optim.Optimizer) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.ones_like(parameter)
    optimizer.step()


def changed(*held: Any) -> Hyperparameters:
    hyperparameters = Hyperparameters({"learning_rate": list(held)})
    hyperparameters.apply({"learning_rate": NEW})
    return hyperparameters


def equal_class(trained: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(trained, lr=OLD)


def another_class(trained: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Adam(trained, lr=OLD)


def more_parameters(trained: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Adam([*trained, *parameters()], lr=OLD)


def groups_apart(trained: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Adam([{"params": [each]} for each in trained], lr=OLD)


@pytest.mark.parametrize("made", ["before", "after"])
@pytest.mark.parametrize("other", [equal_class, another_class, more_parameters, groups_apart])
def test_an_optimizer_that_trains_instead_of_the_one_that_is_bound_is_found_out(
    other: Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer], made: str
) -> None:
    trained = parameters()
    training = other(trained) if made == "before" else None
    hyperparameters = changed(torch.optim.SGD(trained, lr=OLD))
    training = other(trained) if training is None else training
    hyperparameters.verify()
    step(training)
    name = type(training).__name__
    with pytest.raises(
        OverrideNotAppliedError, match=rf"'learning_rate' .*'lr' of SGD.*{name}, steps its param"
    ) as got:
        hyperparameters.verify()
    assert (got.value.key, got.value.wanted) == ("learning_rate", NEW)


def test_an_option_that_another_optimizer_has_otherwise_is_found_out() -> None:
    trained = parameters()
    hyperparameters = Hyperparameters({"weight_decay": torch.optim.AdamW(trained)})
    hyperparameters.apply({"weight_decay": 0.5})
    step(torch.optim.AdamW(trained))
    with pytest.raises(OverrideNotAppliedError, match=r"'weight_decay' was set to 0\.5 in 'weight_decay' of AdamW"):
        hyperparameters.verify()


def test_optimizers_that_share_parameters_may_step_first() -> None:
    encoder, actor, critic = (parameters(1) for _ in range(3))
    bound, other = torch.optim.Adam(encoder + actor, lr=OLD), torch.optim.Adam(encoder + critic, lr=OLD)
    hyperparameters = changed(bound)
    for _ in range(3):
        # a critic is often trained more often than its actor
        step(other)
        hyperparameters.verify()
    step(bound)
    hyperparameters.verify()


def test_an_optimizer_may_be_followed_by_another_one_once_its_value_was_used() -> None:
    trained = parameters()
    hyperparameters = changed(torch.optim.SGD(trained, lr=OLD))
    bound = hyperparameters._targets["learning_rate"][0].optimizer
    step(torch.optim.Adam(trained))
    step(bound)
    hyperparameters.verify()


def test_two_optimizers_of_one_key_are_no_strangers() -> None:
    trained = parameters()
    first, second = torch.optim.SGD(trained, lr=OLD), torch.optim.Adam(trained, lr=OLD)
    hyperparameters = changed(first, second)
    step(second)
    hyperparameters.verify()


class Wrapper(torch.optim.Optimizer):
    """Has the groups of another optimizer, as those of sharpness-aware minimisation do, and no step of its own."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        super().__init__(inner.param_groups, {})
        self.inner = inner
        self.param_groups = inner.param_groups

    def second_step(self) -> None:
        step(self.inner)


def test_a_wrapper_steps_when_what_it_wraps_does() -> None:
    wrapper = Wrapper(torch.optim.SGD(parameters(), lr=OLD))
    hyperparameters = changed(wrapper)
    wrapper.second_step()
    hyperparameters.verify()
    # proven: nobody looks any more
    wrapper.param_groups[0]["lr"] = OLD
    wrapper.second_step()
    hyperparameters.verify()
    hyperparameters = changed(wrapper)
    wrapper.param_groups[0]["lr"] = OLD
    wrapper.second_step()
    with pytest.raises(OverrideNotAppliedError, match=r"has 0\.1"):
        hyperparameters.verify()


def test_what_no_step_has_used_yet_is_told_once_and_at_the_end() -> None:
    bound = torch.optim.SGD(parameters(), lr=OLD)
    hyperparameters = changed(bound)
    hyperparameters.verify()
    for what, again in (("it saves step 5", False), ("the loop has ended", True)):
        with pytest.warns(simckpt.BranchWarning, match=rf"{what}.*'learning_rate' in 'lr' of SGD"):
            hyperparameters.warn_if_unproven(what, again=again)
        hyperparameters.warn_if_unproven("it saves step 6")
    step(bound)
    hyperparameters.warn_if_unproven("the loop has ended", again=True)


def test_what_needs_no_optimizer_is_never_unproven() -> None:
    hyperparameters = Hyperparameters({"clip": (simckpt.LoopState(clip=1.0), "clip")})
    hyperparameters.apply({"clip": 0.5})
    hyperparameters.verify()
    hyperparameters.warn_if_unproven("it saves")


def test_what_a_restored_state_holds_is_watched_and_not_set() -> None:
    bound = torch.optim.SGD(parameters(), lr=NEW, momentum=0.9)
    hyperparameters = Hyperparameters({"learning_rate": bound, "momentum": bound, "gamma": ({"gamma": 1.0}, "gamma")})
    hyperparameters.apply({})
    hyperparameters.watch({"learning_rate": NEW, "nobody": 3})
    hyperparameters.verify()
    bound.param_groups[0]["lr"] = OLD
    step(bound)
    with pytest.raises(OverrideNotAppliedError, match=r"'learning_rate' was restored as 0.01, but .*has 0.1"):
        hyperparameters.verify()


def test_what_a_restored_state_does_not_hold_is_told_by_name_and_let_be() -> None:
    bound = torch.optim.SGD(parameters(), lr=OLD)
    hyperparameters = Hyperparameters({"learning_rate": bound})
    with pytest.warns(simckpt.BranchWarning, match=r"'learning_rate' is 0.01 since .* group 0 of SGD has 0.1"):
        hyperparameters.watch({"learning_rate": NEW})
    step(bound)
    hyperparameters.verify()
    assert bound.param_groups[0]["lr"] == OLD


def test_a_rate_that_a_schedule_has_moved_is_in_force() -> None:
    bound = torch.optim.SGD(parameters(), lr=NEW)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(bound, T_max=10)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(torch.optim.SGD(parameters(), lr=NEW), patience=0)
    for _ in range(4):
        step(bound)
        scheduler.step()
        plateau.step(1.0)
    assert bound.param_groups[0]["lr"] < NEW
    hyperparameters = Hyperparameters({"learning_rate": [bound, scheduler], "other_lr": plateau})
    hyperparameters.watch({"learning_rate": NEW, "other_lr": NEW})
    step(bound)
    scheduler.step()
    hyperparameters.verify()


def test_a_watch_that_nobody_ends_keeps_nothing_alive() -> None:
    hooks = len(torch_optimizers._global_optimizer_post_hooks)
    hyperparameters = changed(torch.optim.SGD(parameters(), lr=OLD))
    assert len(torch_optimizers._global_optimizer_post_hooks) == hooks + 1
    hyperparameters.take_back()
    assert len(torch_optimizers._global_optimizer_post_hooks) == hooks
    forgotten = changed(torch.optim.SGD(parameters(), lr=OLD))
    seen = weakref.ref(forgotten)
    del forgotten
    gc.collect()
    assert seen() is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step(torch.optim.SGD(parameters(), lr=OLD))


def test_a_group_or_an_attribute_that_is_gone_is_told_by_name_and_not_in_the_optimizers_step() -> None:
    weight, bias = parameters()[0], torch.nn.Parameter(torch.zeros(1))
    for key in ("learning_rate", "momentum"):
        optimizer = torch.optim.SGD([{"params": [weight]}, {"params": [bias]}], lr=OLD, momentum=0.9)
        hyperparameters = Hyperparameters({key: optimizer})
        hyperparameters.apply({key: 0.5})
        optimizer.param_groups.pop()
        step(optimizer)
        with pytest.raises(OverrideNotAppliedError, match=rf"'{key}' was set to 0\.5, but .* is gone"):
            hyperparameters.verify()
    loop = simckpt.LoopState(clip=1.0)
    hyperparameters = Hyperparameters({"clip": (loop, "clip")})
    hyperparameters.apply({"clip": 0.5})
    del loop.clip
    with pytest.raises(OverrideNotAppliedError, match=r"'clip' was set to 0\.5, but .* is gone"):
        hyperparameters.verify()


@pytest.mark.parametrize("scheduled", [False, True])
def test_what_was_watched_before_is_watched_again_when_a_change_is_taken_back(scheduled: bool) -> None:
    bound = torch.optim.SGD(parameters(), lr=OLD)
    scheduler = torch.optim.lr_scheduler.LambdaLR(bound, lambda epoch: 0.5**epoch) if scheduled else None
    held = [bound, scheduler] if scheduled else bound
    settings = {"clip": 1.0}
    hyperparameters = Hyperparameters({"learning_rate": held, "clip": (settings, "clip")})
    hyperparameters.apply({"learning_rate": NEW, "clip": 0.5})
    hyperparameters.verify()
    hyperparameters.apply({"clip": 0.25})
    hyperparameters.take_back()
    assert settings == {"clip": 0.5}
    # in force it is no error, and neither is what a schedule makes of it
    step(bound)
    if scheduler is not None:
        scheduler.step()
    hyperparameters.look("now")
    bound.param_groups[0]["lr"] = OLD
    with pytest.raises(OverrideNotAppliedError, match="'learning_rate'"):
        hyperparameters.verify()
