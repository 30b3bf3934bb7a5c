"""What of the components must be made of numbers."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import simckpt
from simckpt.finiteness import non_finite_parameter


class Agent:
    """Keeps its net in an attribute, as a class with `state_dict` of its own does."""

    def __init__(self) -> None:
        self.net = torch.nn.Linear(2, 1)
        self.numbers = np
        self.itself = weakref.proxy(self)
        self.cycle: Any = [self]


class Masked(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)
        self.register_buffer("mask", torch.tensor([0.0, -torch.inf]))


def agent() -> tuple[Any, torch.Tensor]:
    made = Agent()
    return made, made.net.weight


def module() -> tuple[Any, torch.Tensor]:
    made = torch.nn.Linear(2, 1)
    return made, made.bias


def buffer() -> tuple[Any, torch.Tensor]:
    made = torch.nn.BatchNorm1d(3)
    assert made.running_mean is not None
    return made, made.running_mean


def masked() -> tuple[Any, torch.Tensor]:
    made = Masked()
    return made, made.layer.weight


def parameter() -> tuple[Any, torch.Tensor]:
    made = torch.nn.Parameter(torch.zeros(2))
    return made, made


def in_a_dict() -> tuple[Any, torch.Tensor]:
    made = torch.nn.Linear(2, 1)
    return {"actors": [made]}, made.weight


def in_a_loop() -> tuple[Any, torch.Tensor]:
    made = torch.nn.Linear(2, 1)
    return simckpt.LoopState(step=3, best=made), made.weight


def of_an_optimizer() -> tuple[Any, torch.Tensor]:
    trained = torch.nn.Parameter(torch.zeros(3))
    return torch.optim.SGD([trained], lr=0.1), trained


def moment() -> tuple[Any, torch.Tensor]:
    trained = torch.nn.Parameter(torch.zeros(3))
    made = torch.optim.Adam([trained])
    trained.grad = torch.ones(3)
    made.step()
    return made, made.state[trained]["exp_avg_sq"]


KINDS = [agent, module, buffer, masked, parameter, in_a_dict, in_a_loop, of_an_optimizer, moment]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("make", KINDS)
def test_nan_is_found_wherever_something_is_trained(make: Callable[[], tuple[Any, torch.Tensor]], dtype) -> None:
    component, tensor = make()
    assert non_finite_parameter({"other": torch.nn.Linear(1, 1), "it": component}) == ""
    tensor.data = tensor.data.to(dtype)
    with torch.no_grad():
        tensor.view(-1)[-1] = torch.nan
    assert "of 'it' is not" in non_finite_parameter({"other": torch.nn.Linear(1, 1), "it": component})


@pytest.mark.parametrize("make", [each for each in KINDS if each is not buffer])
def test_so_is_infinity(make: Callable[[], tuple[Any, torch.Tensor]]) -> None:
    component, tensor = make()
    with torch.no_grad():
        tensor.view(-1)[0] = -torch.inf
    assert "of 'it' is not finite" in non_finite_parameter({"it": component})


@pytest.mark.parametrize(
    "component",
    [
        torch.nn.Parameter(torch.full((4,), 3e38)),  # whose sum overflows
        Masked(),
        torch.arange(3),
        {"data": np.array([np.nan])},
        simckpt.LoopState(last_return=float("nan")),
        None,
    ],
)
def test_what_is_not_trained_or_only_large_is_passed_over(component: Any) -> None:
    assert non_finite_parameter({"it": component}) == ""
