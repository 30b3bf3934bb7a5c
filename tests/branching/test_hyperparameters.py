import argparse
import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import simckpt
from simckpt import restore, state
from simckpt.branching.hyperparameters import Hyperparameters
from simckpt.errors import ConfigurationError, OverrideNotAppliedError
from simckpt.restore import Adjustment

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "Adam": torch.optim.Adam,
    "Adam-fused": lambda parameters, **options: torch.optim.Adam(parameters, fused=True, **options),
    "AdamW-tensor-lr": lambda parameters, lr, **options: torch.optim.AdamW(
        parameters, lr=torch.tensor(lr), foreach=False, **options
    ),
    "SGD": torch.optim.SGD,
    "RMSprop": torch.optim.RMSprop,
}


def step(optimizer: torch.optim.Optimizer) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.ones_like(parameter)
    optimizer.step()


def make(name: str = "Adam", **options: Any) -> torch.optim.Optimizer:
    return OPTIMIZERS[name]([torch.nn.Parameter(torch.zeros(3))], **{"lr": 1e-3, **options})


def two_groups(*rates: float) -> torch.optim.Optimizer:
    return torch.optim.Adam([{"params": [torch.nn.Parameter(torch.zeros(2))], "lr": rate} for rate in rates])


def rates(optimizer: torch.optim.Optimizer) -> list[float]:
    return [float(group["lr"]) for group in optimizer.param_groups]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_rate_is_in_force_after_the_state_was_restored(name: str) -> None:
    def trained(rate: float, *, then: float | None = None) -> torch.Tensor:
        """Returns the parameters after five steps at one rate and five at another."""
        optimizer = make(name, lr=rate)
        for _ in range(5):
            step(optimizer)
        if then is not None:
            # the state of the origin, in a program that was started with the branch's value
            what = {"o": state.encode(restore.capture(restore.bind({"o": optimizer}))["o"])}
            parameters = optimizer.param_groups[0]["params"]
            optimizer = OPTIMIZERS[name](parameters, lr=then)
            hyperparameters = Hyperparameters({"learning_rate": optimizer})
            adjustment = Adjustment(then=lambda: hyperparameters.apply({"learning_rate": then}))
            restore.apply(restore.bind({"o": optimizer}), what, source="the checkpoint", adjustment=adjustment)
            hyperparameters.verify()
        for _ in range(5):
            step(optimizer)
        if then is not None:
            hyperparameters.verify()
        (parameter,) = optimizer.param_groups[0]["params"]
        return parameter.detach()

    def by_hand() -> torch.Tensor:
        optimizer = make(name, lr=1e-3)
        for _ in range(5):
            step(optimizer)
        rate = optimizer.param_groups[0]["lr"]
        optimizer.param_groups[0]["lr"] = torch.tensor(1e-2) if isinstance(rate, torch.Tensor) else 1e-2
        for _ in range(5):
            step(optimizer)
        (parameter,) = optimizer.param_groups[0]["params"]
        return parameter.detach()

    assert torch.equal(trained(1e-3, then=1e-2), by_hand())
    assert not torch.equal(trained(1e-3), by_hand())


@pytest.mark.parametrize("key", ["lr", "learning_rate", "critic_lr", "critic_learning_rate"])
def test_keys_that_mean_the_rate(key: str) -> None:
    optimizer = make()
    Hyperparameters({key: optimizer}).apply({key: 0.5})
    assert rates(optimizer) == [0.5]


def test_other_options_go_by_their_own_name_and_keep_their_type() -> None:
    optimizer = make(weight_decay=0.1)
    hyperparameters = Hyperparameters({"weight_decay": optimizer, "betas": optimizer, "e": (optimizer, "eps")})
    hyperparameters.apply({"weight_decay": 0, "betas": [0.8, 0.9], "e": 1e-5})
    (group,) = optimizer.param_groups
    assert (group["weight_decay"], group["betas"], group["eps"], group["lr"]) == (0, (0.8, 0.9), 1e-5, 1e-3)
    step(optimizer)
    hyperparameters.verify()


def test_several_optimizers_and_single_groups() -> None:
    first, second, third = make(), two_groups(1.0, 2.0), two_groups(3.0, 3.0)
    hyperparameters = Hyperparameters({"lr": [first, (second, "lr", 1), third], "other": (second, "lr", 0)})
    hyperparameters.apply({"lr": 0.5})
    assert (rates(first), rates(second), rates(third)) == ([0.5], [1.0, 0.5], [0.5, 0.5])
    hyperparameters.apply({"lr": 0.25, "other": 0.125})
    assert (rates(first), rates(second), rates(third)) == ([0.25], [0.125, 0.25], [0.25, 0.25])


def test_attributes_entries_tensors_and_arrays() -> None:
    @dataclasses.dataclass
    class Settings:
        layers: tuple[int, ...] = (64, 64)

    loop, settings, table = simckpt.LoopState(clip=0.2), Settings(), {"gamma": 0.99, 7: "a"}
    module = torch.nn.Module()
    module.temperature = torch.nn.Parameter(torch.tensor(1.0))
    bounds = argparse.Namespace(low=np.zeros(2, np.float32))
    tensor, array = module.temperature, bounds.low
    hyperparameters = Hyperparameters(
        {
            "clip": [(loop, "clip")],
            "layers": (settings, "layers"),
            "gamma": (table, "gamma"),
            "seven": (table, 7),
            "temperature": (module, "temperature"),
            "low": (bounds, "low"),
        }
    )
    values = {"clip": 0.1, "layers": [32], "gamma": 0.9, "seven": "b", "temperature": 0.3, "low": [0.1, 0.2]}
    hyperparameters.apply(values)
    assert (loop.clip, settings.layers, table) == (0.1, (32,), {"gamma": 0.9, 7: "b"})
    # in place: the program may hold them under other names
    assert tensor.item() == np.float32(0.3)
    assert array.tolist() == np.float32([0.1, 0.2]).tolist()
    hyperparameters.take_back()
    assert (loop.clip, settings.layers, table) == (0.2, (64, 64), {"gamma": 0.99, 7: "a"})
    assert (tensor.item(), array.tolist()) == (1.0, [0.0, 0.0])


FROZEN = dataclasses.make_dataclass("Frozen", [("clip", float, 0.2)], frozen=True)()


@pytest.mark.parametrize(
    ("controls", "message"),
    [
        pytest.param(lambda: {"clip": 3}, "'clip' is bound to 3: bind it to an optimizer", id="a-number"),
        pytest.param(lambda: {"clip": []}, "an empty list holds nothing", id="empty"),
        pytest.param(lambda: {"": make()}, "named by strings", id="no-name"),
        pytest.param(lambda: {"weight_decy": make()}, "Adam has no option .*'weight_decay'", id="unknown-option"),
        pytest.param(lambda: {"a": (make(), "params")}, "no option 'params'", id="params"),
        pytest.param(lambda: {"lr": (make(), "lr", 1)}, "has 1 groups, no 1", id="unknown-group"),
        pytest.param(lambda: {"lr": (make(), "lr", 0, 0)}, "an optimizer is bound as itself", id="four-parts"),
        pytest.param(lambda: {"lr": (make(), 0)}, "an optimizer is bound as itself", id="group-alone"),
        pytest.param(
            lambda: {"lr": two_groups(1.0, 2.0)}, r"different values of 'lr' \(1.0, 2.0\)", id="groups-differ"
        ),
        pytest.param(
            lambda: {"clip": (simckpt.LoopState(clip=1), "clp")},
            "no attribute 'clp'; did you mean 'clip'",
            id="attribute",
        ),
        pytest.param(lambda: {"clip": ({"clip": 1}, "clp")}, "no entry 'clp'; did you mean 'clip'", id="entry"),
        pytest.param(
            lambda: {"clip": (FROZEN, "clip")}, "frozen .* cannot be set; name the key in from_args", id="frozen"
        ),
    ],
)
def test_what_does_not_exist_is_refused_at_once(controls: Callable[[], Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=rf"(?s){message}"):
        Hyperparameters(controls())


def test_keys_are_declared_once_and_as_sets() -> None:
    with pytest.raises(ConfigurationError, match="'lr': named both"):
        Hyperparameters({"lr": make()}, from_args={"lr"})
    with pytest.raises(ConfigurationError, match=r"from_args is a set of names such as \{'gamma'\}"):
        Hyperparameters(from_args="gamma")
    with pytest.raises(ConfigurationError, match=r"fresh\['num_envs'\] is a set of names"):
        Hyperparameters(fresh={"num_envs": "envs"})
    with pytest.raises(ConfigurationError, match="got 3 among them"):
        Hyperparameters(from_args=[3])  # type: ignore[list-item]


def test_a_key_that_nothing_declares_is_an_error_that_says_how_to() -> None:
    hyperparameters = Hyperparameters({"learning_rate": make()}, from_args={"gamma"}, fresh={"num_envs": {"envs"}})
    hyperparameters.check(["gamma", "num_envs", "learning_rate"])
    for use in (hyperparameters.check, lambda keys: hyperparameters.apply(dict.fromkeys(keys, 1))):
        with pytest.raises(
            OverrideNotAppliedError, match=r"(?s)'learning_rat'.*from_args=.*'learning_rate'\?"
        ) as caught:
            use(["gamma", "learning_rat"])
        assert caught.value.key == "learning_rat"
    assert hyperparameters.keys == {"gamma", "num_envs", "learning_rate"}
    assert (hyperparameters.controls, hyperparameters.from_args) == ({"learning_rate"}, {"gamma"})


def test_what_stays_untouched_follows_from_the_keys_that_change() -> None:
    hyperparameters = Hyperparameters(
        from_args={"gamma"}, fresh={"num_envs": {"envs", "loop/observations"}, "width": ["agent", "envs"]}
    )
    assert hyperparameters.untouched(["gamma"]) == frozenset()
    assert hyperparameters.untouched(["num_envs", "gamma"]) == {"envs", "loop/observations"}
    assert hyperparameters.untouched(["num_envs", "width"]) == {"envs", "loop/observations", "agent"}
    assert hyperparameters.fresh["width"] == {"agent", "envs"}


class Stubborn:
    """Holds a value that cannot be set, or that stays what it was."""

    deaf = 1.0

    @property
    def fixed(self) -> float:
        return 1.0

    def __setattr__(self, name: str, value: Any) -> None:
        if name != "deaf":
            object.__setattr__(self, name, value)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        pytest.param("fixed", "could not be set to 2 in .*Stubborn.fixed: AttributeError", id="raises"),
        pytest.param("deaf", "was set to 2, but right after it was set .*Stubborn.deaf has 1.0", id="ignores"),
    ],
)
def test_a_target_that_does_not_take_its_value_is_named_and_the_others_are_put_back(name: str, message: str) -> None:
    optimizer, loop = make("AdamW-tensor-lr"), simckpt.LoopState(clip=0.2)
    rate = optimizer.param_groups[0]["lr"]
    before = rate.item()
    hyperparameters = Hyperparameters({"lr": optimizer, "clip": (loop, "clip"), "stubborn": (Stubborn(), name)})
    with pytest.raises(OverrideNotAppliedError, match=message) as caught:
        hyperparameters.apply({"lr": 0.5, "clip": 0.1, "stubborn": 2})
    assert caught.value.key == "stubborn"
    assert (rate.item(), loop.clip) == (before, 0.2)
    hyperparameters.verify()


def test_a_rate_is_a_number() -> None:
    for value in ("fast", True, None, [1e-3]):
        with pytest.raises(OverrideNotAppliedError, match="a learning rate is a number"):
            Hyperparameters({"lr": make()}).apply({"lr": value})


def test_an_apply_can_be_taken_back() -> None:
    optimizer, loop = make(), simckpt.LoopState(clip=0.2)
    hyperparameters = Hyperparameters({"lr": optimizer, "clip": (loop, "clip")})
    hyperparameters.apply({"lr": 0.5, "clip": 0.1})
    hyperparameters.take_back()
    assert (rates(optimizer), loop.clip) == ([1e-3], 0.2)
    step(optimizer)
    hyperparameters.verify()


def test_a_loop_that_sets_the_rate_from_a_constant_is_found_out() -> None:
    optimizer = make(lr=3e-4)
    hyperparameters = Hyperparameters({"learning_rate": optimizer})
    hyperparameters.apply({"learning_rate": 1e-4})
    hyperparameters.verify()
    optimizer.param_groups[0]["lr"] = 3e-4
    step(optimizer)
    # what counts is what the step used
    optimizer.param_groups[0]["lr"] = 1e-4
    for _ in range(2):
        with pytest.raises(OverrideNotAppliedError, match=r"'learning_rate' was set to 0.0001.*has 0.0003") as caught:
            hyperparameters.verify()
        assert (caught.value.key, caught.value.wanted, caught.value.found) == ("learning_rate", 1e-4, 3e-4)


def test_a_loop_that_sets_the_rate_after_the_step_is_found_out() -> None:
    optimizer = make(lr=3e-4)
    hyperparameters = Hyperparameters({"learning_rate": optimizer})
    hyperparameters.apply({"learning_rate": 1e-4})
    step(optimizer)
    optimizer.param_groups[0]["lr"] = 3e-4
    with pytest.raises(OverrideNotAppliedError, match="learning_rate"):
        hyperparameters.verify()


def test_a_loop_that_sets_an_attribute_is_found_out() -> None:
    loop, optimizer = simckpt.LoopState(clip=0.2), make()
    hyperparameters = Hyperparameters({"clip": (loop, "clip"), "lr": optimizer})
    hyperparameters.apply({"clip": 0.1, "lr": 1.0})
    hyperparameters.verify()
    loop.clip = 0.2
    with pytest.raises(OverrideNotAppliedError, match=r"'clip' was set to 0.1, but .*LoopState.clip has 0.2"):
        hyperparameters.verify()


def test_the_watch_ends_once_everything_is_proven() -> None:
    loop, optimizer = simckpt.LoopState(clip=0.2), make()
    hyperparameters = Hyperparameters({"clip": (loop, "clip"), "lr": optimizer})
    hyperparameters.apply({"clip": 0.1, "lr": 1.0})
    for _ in range(3):
        # until the optimizer has stepped nothing is proven
        hyperparameters.verify()
    step(optimizer)
    hyperparameters.verify()
    # from here on the program may change what it likes
    loop.clip, optimizer.param_groups[0]["lr"] = 0.3, 0.3
    step(optimizer)
    hyperparameters.verify()


def test_a_new_apply_replaces_the_old_watch() -> None:
    optimizer = make()
    hyperparameters = Hyperparameters({"lr": optimizer, "weight_decay": optimizer})
    hyperparameters.apply({"lr": 0.5})
    hyperparameters.apply({"weight_decay": 0.5})
    optimizer.param_groups[0]["lr"] = 0.25
    step(optimizer)
    hyperparameters.verify()


def test_works_with_a_state_loaded_between_construction_and_apply() -> None:
    optimizer = make()
    hyperparameters = Hyperparameters({"lr": optimizer})
    # torch makes new groups
    optimizer.load_state_dict(make(lr=0.7).state_dict())
    hyperparameters.apply({"lr": 0.5})
    assert rates(optimizer) == [0.5]
    step(optimizer)
    hyperparameters.verify()


def test_programs_without_torch_need_no_optimizers() -> None:
    loop = simckpt.LoopState(clip=0.2)
    assert repr(Hyperparameters({"clip": (loop, "clip")}, from_args={"gamma"})) == "Hyperparameters(clip, gamma)"
    assert repr(Hyperparameters()) == "Hyperparameters(none)"
