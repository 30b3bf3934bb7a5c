"""Which sizes follow from a changed hyperparameter, and which only differ."""

from typing import Any

import numpy as np
import pytest
import torch

from simckpt.shapes import Changed, advice, find_resized

ENVS: Changed = {"num_envs": (2, 5)}


@pytest.mark.parametrize(
    ("saved", "live", "changed", "found"),
    [
        pytest.param(np.zeros((2, 3)), np.zeros((5, 3)), ENVS, ["x"], id="scaled"),
        pytest.param(np.zeros((3, 2)), np.zeros((3, 5)), ENVS, ["x"], id="another-axis"),
        pytest.param(np.zeros(256), np.zeros(640), ENVS, ["x"], id="a-multiple"),
        pytest.param(torch.zeros(2, 2), torch.zeros(5, 5), ENVS, ["x"], id="two-axes"),
        pytest.param([0.0, 0.0], [0.0] * 5, ENVS, ["x"], id="list"),
        pytest.param((1, 2), (1, 2, 3, 4, 5), ENVS, ["x"], id="tuple"),
        pytest.param({"a": [np.zeros(2)], "b": 1}, {"a": [np.zeros(5)], "c": 1}, ENVS, ["x/a/0"], id="nested"),
        pytest.param(np.zeros((2, 3)), np.zeros((5, 4)), ENVS, [], id="one-axis-does-not-follow"),
        pytest.param(np.zeros(5), np.zeros(2), ENVS, [], id="the-other-way-round"),
        pytest.param(np.zeros(2), np.zeros((5, 1)), ENVS, [], id="another-rank"),
        pytest.param(np.zeros(2), np.zeros(0), ENVS, [], id="empty"),
        pytest.param([1] * 100, [], ENVS, [], id="empty-list"),
        pytest.param(np.zeros(2), torch.zeros(5), ENVS, [], id="another-type"),
        pytest.param(None, np.zeros(5), ENVS, [], id="none-before"),
        pytest.param("ab", "abcde", ENVS, [], id="texts"),
        pytest.param(2, 5, ENVS, [], id="numbers"),
        pytest.param(np.zeros(2), np.zeros(5), {}, [], id="nothing-changed"),
        pytest.param(np.zeros(2), np.zeros(5), {"rate": (0.2, 0.5)}, [], id="floats-scale-nothing"),
        pytest.param(np.zeros(1), np.zeros(2), {"flag": (False, True)}, [], id="booleans-scale-nothing"),
        pytest.param(np.zeros((2, 105)), np.zeros((2, 11)), {"env": ("Ant-v5", "Hopper-v5")}, ["x"], id="name"),
    ],
)
def test_what_follows_from_a_change_is_found(saved: Any, live: Any, changed: Changed, found: list[str]) -> None:
    assert [path for path, _ in find_resized(saved, live, changed, path="x")] == found


def test_the_problem_tells_both_shapes() -> None:
    ((_, problem),) = find_resized(np.zeros((2, 3)), np.zeros((5, 3)), ENVS, path="loop/observations")
    assert problem == "loop/observations: saved with shape (2, 3), live has (5, 3)"


def test_the_advice_names_what_was_changed_and_all_that_would_have_to_begin_anew() -> None:
    told = advice(ENVS, ["envs", "loop/dones"], untouched=["loop/observations"])
    assert "'num_envs' (2 -> 5)" in told
    assert "fresh={'num_envs': {'envs', 'loop/dones', 'loop/observations'}}" in told
    assert advice({}, ["envs"], untouched=[]) == ""
