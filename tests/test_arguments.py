"""Checks of steps and metrics, for every kind of value that is none."""

import math
from collections import deque

import numpy as np
import pytest
import torch

from simckpt.arguments import checked_metrics, checked_step, per_episode
from simckpt.errors import ConfigurationError

NO_NUMBERS = ["x", [1], {}, object(), 1j, np.zeros(2), torch.zeros(2), np.zeros(0), 10**5000, -(10**5000)]


@pytest.mark.parametrize("step", [0, 5, 5.0, np.int64(5), np.float32(5), np.array(5), torch.tensor(5), 2**63 - 1])
def test_whole_numbers_are_steps(step: object) -> None:
    assert checked_step(step) == step
    assert type(checked_step(step)) is int


@pytest.mark.parametrize(
    "step",
    [
        *NO_NUMBERS,
        "3",
        b"3",
        None,
        True,
        False,
        np.True_,
        -1,
        1.5,
        2**63,
        math.inf,
        -math.inf,
        math.nan,
        np.float32(np.inf),
    ],
    ids=lambda value: type(value).__name__,
)
def test_everything_else_is_no_step(step: object) -> None:
    with pytest.raises(ConfigurationError, match="a step is a whole number") as caught:
        checked_step(step)
    assert list(caught.value.keys) == ["step"]


@pytest.mark.parametrize("value", [1, 1.5, True, np.float32(2), torch.tensor(3.0), math.inf, "2"])
def test_numbers_are_metrics(value: object) -> None:
    assert checked_metrics({"a": value, "not yet": None}) == {"a": float(value)}


@pytest.mark.parametrize("value", NO_NUMBERS, ids=lambda value: type(value).__name__)
def test_what_is_no_number_is_no_metric(value: object) -> None:
    with pytest.raises(ConfigurationError, match="metric 'a' is no number") as caught:
        checked_metrics({"b": 1, "a": value})
    assert list(caught.value.keys) == ["a"]


@pytest.mark.parametrize("metrics", [None, [], [1], "a", 3, {("a", 1)}])
def test_metrics_are_a_mapping(metrics: object) -> None:
    with pytest.raises(ConfigurationError, match="a dict of numbers"):
        checked_metrics(metrics)


def test_metrics_may_be_limited_in_size() -> None:
    metrics = {f"metric {number}": 0.5 for number in range(20)}
    assert checked_metrics(metrics, limit=1000) == metrics
    with pytest.raises(ConfigurationError, match="20 metrics take 350 bytes as JSON and may take 100"):
        checked_metrics(metrics, limit=100)


@pytest.mark.parametrize(
    "values",
    [[1, 2.5], (1, 2.5), deque([1, 2.5]), np.array([1, 2.5], "float32"), torch.tensor([1, 2.5], dtype=torch.bfloat16)],
    ids=["list", "tuple", "deque", "array", "bfloat16"],
)
def test_a_metric_may_hold_a_number_for_each_episode(values: object) -> None:
    assert per_episode({"eval/return": values, "loss": 0.5}) == {"eval/return": (1.0, 2.5)}
