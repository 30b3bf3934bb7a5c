"""What differs between two trees, named by its place."""

import json
import math

import numpy as np
import pytest
import torch
from state_helpers import nan_with_payload

from simckpt.state import Encoded, ObjectState, differences, encode, encoded_differences


def found(a, b):
    return [(difference.path, difference.max_abs) for difference in differences(a, b)]


def test_equal_trees_have_no_differences():
    tree = {"a": np.array([np.nan, -0.0]), "b": [1, None, float("nan")], "t": torch.ones(2), "s": {3, 1}}
    assert (
        differences(
            tree, {"a": np.array([np.nan, -0.0]), "b": [1, None, float("nan")], "t": torch.ones(2), "s": {1, 3}}
        )
        == []
    )


ARRAYS = [
    (np.array([1.0, 2, 3]), np.array([1.0, 2.5, 3]), 0.5, "1 of 3"),
    (np.array([0.0]), np.array([-0.0]), 0.0, "1 of 1"),
    (np.array([np.nan, 1]), np.array([nan_with_payload(3), 1]), 0.0, "1 of 2"),
    (np.array([np.inf, 1.0]), np.array([np.inf, 4.0]), 3.0, "1 of 2"),
    (np.array([np.inf]), np.array([1.0]), math.inf, "1 of 1"),
    (np.array([2**63], np.uint64), np.array([2**63 + 1], np.uint64), 1.0, "1 of 1"),
    (np.array([-5], np.int8), np.array([127], np.int8), 132.0, "1 of 1"),
    (np.array([1 + 1j]), np.array([4 + 5j]), 5.0, "1 of 1"),
    (np.array(["a", "b"]), np.array(["a", "c"]), None, "1 of 2"),
    (np.array([True, True]), np.array([True, False]), None, "1 of 2"),
    (torch.tensor([1.0], dtype=torch.bfloat16), torch.tensor([1.5], dtype=torch.bfloat16), 0.5, "1 of 1"),
    (np.zeros(2), np.zeros(3), None, "shape (2,) and (3,)"),
    (np.zeros(2), np.zeros(2, np.float32), None, "dtype float64 and float32"),
    (np.zeros(2), torch.zeros(2, dtype=torch.float64), None, "numpy and torch"),
    (np.float64(1), np.array(1.0), None, "an array"),
    (torch.nn.Parameter(torch.ones(1)), torch.ones(1), None, "marked"),
]


@pytest.mark.parametrize(("a", "b", "apart", "what"), ARRAYS, ids=lambda value: str(value)[:30].replace("\n", " "))
def test_arrays_say_how_many_elements_and_how_far(a, b, apart, what):
    (difference,) = differences({"x": [a]}, {"x": [b]})
    assert difference.path == "x/0"
    assert difference.max_abs == apart
    assert what in difference.what or what == "marked"
    assert "x/0" in str(difference)


def test_one_nan_is_nan_apart():
    (difference,) = differences(np.array([np.nan, 1]), np.array([1.0, 1]))
    assert math.isnan(difference.max_abs)


def test_scalars_differ_by_type_and_bits():
    for a, b in [
        (1, True),
        (1, 1.0),
        (0.0, -0.0),
        ("1", 1),
        (None, 0),
        (float("nan"), nan_with_payload(9)),
        (2**70, 2**70 + 1),
    ]:
        assert [path for path, _ in found({"x": a}, {"x": b})] == ["x"]
    assert found(1, 3.5) == [("", 2.5)]
    assert found(b"a", b"b") == [("", None)]
    assert found(float("inf"), 1.0) == [("", math.inf)]


def test_containers_differ_by_type_length_keys_and_order():
    assert found({"a": [1]}, {"a": (1,)}) == [("a", None)]
    assert [path for path, _ in found([1, 2], [1])] == [""]
    assert {path for path, _ in found({"a": 1, "b": 2}, {"a": 1, "c/d": 2})} == {"b", "c%2Fd"}
    assert "order" in differences({"a": 1, "b": 2}, {"b": 2, "a": 1})[0].what
    assert {path for path, _ in found({1: 0, (1, "x"): 0}, {1: 5, (1, "x"): 0})} == {"1"}
    assert len(found({"x": {1, "a"}}, {"x": {2, "a"}})) == 2
    assert found({"o": ObjectState("A", {"x": 1})}, {"o": ObjectState("A", {"x": 2})}) == [("o/x", 1.0)]
    assert len(found(ObjectState("A"), ObjectState("B"))) == 1
    assert found([1.0] * 100, [1.0] * 99 + [2.0]) == [("", 1.0)]
    assert found([1.0] * 63 + [2.0], [1.0] * 63 + [None]) == [("63", None)]


def test_aliases_that_differ_are_told_apart():
    x, y = [1], [1]
    (difference,) = differences([x, x], [x, y])
    assert difference.aliasing
    assert difference.path == "1"
    (difference,) = differences([x, y], [x, x])
    assert difference.aliasing
    array = np.zeros(2)
    assert [d.aliasing for d in differences([array, array], [array, array.copy()])] == [True]
    a, b = [], []
    a.append(a)
    b.append([b])
    assert [d.aliasing for d in differences(a, b)] == [True]


def test_encoded_trees_compare_without_the_objects():
    a, b = encode({"t": torch.ones(3), "n": 1}), encode({"t": torch.zeros(3), "n": 1})
    (difference,) = encoded_differences(a, b)
    assert (difference.path, difference.max_abs) == ("t", 1.0)


def test_keys_that_share_parts_are_compared_in_no_time():
    """Sixty tuples of which each holds the next ten times: written out, the key would have 10**60 parts."""
    nodes = [["dict", [{"node": 1}, 5]]]
    nodes += [["tuple", [{"node": number + 2}] * 10] for number in range(60)] + [["tuple", []]]
    text = json.dumps({"tree": 1, "root": {"node": 0}, "nodes": nodes})
    one, other = (Encoded({}, each.encode()) for each in (text, text.replace(", 5]", ", 6]")))
    assert encoded_differences(one, one) == []
    assert [each.what for each in encoded_differences(one, other)] == ["5 and 6"]
