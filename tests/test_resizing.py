"""Which sizes follow from a changed hyperparameter, and which only differ."""

from typing import Any

import numpy as np
import pytest
import torch

from simckpt.resizing import Changed, advice, find_resized

ENVS: Changed = {"num_envs": (2, 5)}
BOTH: Changed = {"gamma": (0.9, 0.5), "num_steps": (128, 192), "num_envs": (2, 4)}
ENV: Changed = {"env": ("Ant-v5", "Hopper-v5")}


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
        pytest.param(np.zeros((2, 105)), np.zeros((2, 11)), ENV, ["x"], id="name"),
        pytest.param([0.0] * 5, [0.0], ENV, [], id="a-list-grows-whatever-the-name-is"),
        pytest.param((0.0,) * 5, (0.0,), ENV, [], id="a-tuple-too"),
        pytest.param([np.zeros(105)], [np.zeros(11)], ENV, ["x/0"], id="arrays-in-a-list-follow-from-a-name"),
        pytest.param(np.zeros(6), np.zeros(3), {"a": (0, 1), "b": (1, 0)}, [], id="nothing-scales-from-or-to-0"),
    ],
)
def test_what_follows_from_a_change_is_found(saved: Any, live: Any, changed: Changed, found: list[str]) -> None:
    assert [path for path, _, _ in find_resized(saved, live, changed, path="x")] == found


@pytest.mark.parametrize(
    ("saved", "live", "changed", "keys"),
    [
        pytest.param((2, 3), (4, 3), BOTH, {"num_envs"}, id="one-of-several"),
        pytest.param((128,), (192,), BOTH, {"num_steps"}, id="another"),
        pytest.param((128, 2, 3), (192, 4, 3), BOTH, {"num_envs", "num_steps"}, id="an-axis-each"),
        pytest.param((256, 3), (768, 3), BOTH, {"num_envs", "num_steps"}, id="both-in-one-axis"),
        pytest.param((128, 2, 3), (192, 5, 3), BOTH, None, id="one-axis-follows-from-neither"),
        pytest.param((2, 105), (5, 11), {**ENVS, **ENV}, {"num_envs", "env"}, id="a-number-and-a-name"),
        pytest.param((4,), (8,), {"batches": (1, 2), "hidden": (4, 8)}, {"hidden"}, id="the-size-itself-is-likelier"),
    ],
)
def test_the_keys_from_which_a_size_follows_are_told(saved: Any, live: Any, changed: Changed, keys: Any) -> None:
    found = [each for _, _, each in find_resized(np.zeros(saved), np.zeros(live), changed, path="x")]
    assert found == ([] if keys is None else [keys])


def test_the_problem_tells_both_shapes() -> None:
    ((_, problem, _),) = find_resized(np.zeros((2, 3)), np.zeros((5, 3)), ENVS, path="loop/observations")
    assert problem == "loop/observations: saved with shape (2, 3), live has (5, 3)"


def test_the_advice_names_what_was_changed_and_by_key_what_would_have_to_begin_anew() -> None:
    told = advice(
        BOTH, {"envs": {"num_envs"}, "loop/dones": {"num_envs"}, "loop/buffer": {"num_steps", "num_envs"}, "extra": ()}
    )
    assert "'gamma' (0.9 -> 0.5), 'num_steps' (128 -> 192), 'num_envs' (2 -> 4)" in told
    # what is not there at all may come of any key that is no coefficient
    expected = "{'num_envs': {'envs', 'loop/buffer', 'loop/dones'}, 'num_steps': {'extra', 'loop/buffer'}}"
    assert f"fresh={expected}: " in told
    assert advice({}, {"envs": ()}) == ""
    assert advice(ENVS, {}) == ""
