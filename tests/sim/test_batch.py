from collections import OrderedDict, deque

import numpy as np
import pytest
from vector_helpers import assert_same

from simckpt.sim.batch import Batched, PerEnv, Row, stack, stack_arrays, unstack
from simckpt.state.nodes import ObjectState


def _round_trip(trees):
    return unstack(stack(trees), len(trees))


def test_arrays_get_a_leading_axis_and_come_back():
    trees = [{"a": np.full((2, 3), i, np.float32), "b": {"c": np.array(i)}} for i in range(4)]
    joined = stack(trees)
    assert joined["a"].shape == (4, 2, 3)
    assert joined["a"].dtype == np.float32
    assert joined["b"]["c"].shape == (4,)
    assert joined["a"][3, 0, 0] == 3
    back = unstack(joined, 4)
    assert_same(back, trees)
    assert back[2]["b"]["c"].shape == ()


def test_joined_arrays_share_no_memory_with_the_trees():
    trees = [[np.zeros(3)], [np.ones(3)]]
    joined = stack(trees)
    trees[0][0][:] = 7
    assert joined[0].tolist() == [[0, 0, 0], [1, 1, 1]]


def test_foreign_byte_order_and_nan_payloads_are_kept():
    payload = np.array([0x7FF8DEADBEEF0001], np.uint64)
    swapped = payload.view(np.float64).astype(">f8")
    swapped.view(np.uint64)[:] = payload.byteswap()
    joined = stack_arrays([swapped, swapped])
    assert joined.dtype == np.dtype(">f8")
    assert joined[1].tobytes() == swapped.tobytes()


def test_equal_scalars_are_stored_once_and_others_per_env():
    trees = [{"same": 3, "differs": i, "zero": -0.0 if i else 0.0, "nan": float("nan")} for i in range(3)]
    joined = stack(trees)
    assert joined["same"] == 3
    assert isinstance(joined["differs"], PerEnv)
    assert isinstance(joined["zero"], PerEnv)
    assert np.isnan(joined["nan"])
    assert [tree["differs"] for tree in unstack(joined, 3)] == [0, 1, 2]
    assert np.signbit([tree["zero"] for tree in unstack(joined, 3)]).tolist() == [False, True, True]


def test_values_of_different_types_are_not_taken_for_equal():
    values = [1, True, 1.0, np.int64(1)]
    back = _round_trip([{"x": value} for value in values])
    assert [type(tree["x"]) for tree in back] == [int, bool, float, np.int64]


@pytest.mark.parametrize(
    "other",
    [
        {"a": np.zeros(3)},
        {"a": np.zeros(2, np.float32)},
        {"b": np.zeros(2)},
        {"a": np.zeros(2), "more": 1},
        {"a": None},
        {"a": [np.zeros(2)]},
        [np.zeros(2)],
        None,
        ObjectState("x.Y", {"a": np.zeros(2)}),
    ],
)
def test_trees_that_differ_lie_side_by_side(other):
    trees = [{"a": np.zeros(2)}, other]
    back = _round_trip(trees)
    assert_same(back[0], trees[0])
    if isinstance(other, ObjectState):
        assert back[1].type_name == "x.Y"
        assert_same(back[1].attributes, other.attributes)
    else:
        assert_same(back[1], other)


def test_containers_keep_their_types():
    trees = [
        {
            "deque": deque([np.zeros(1), np.ones(1)], maxlen=5),
            "ordered": OrderedDict(b=1, a=2),
            "tuple": (1, (np.zeros(2),)),
            (1, "key"): [1, 2],
        }
        for _ in range(2)
    ]
    joined = stack(trees)
    for back in unstack(joined, 2):
        assert type(back["deque"]) is deque
        assert back["deque"].maxlen == 5
        assert type(back["ordered"]) is OrderedDict
        assert list(back["ordered"]) == ["b", "a"]
        assert back["tuple"][1][0].tolist() == [0, 0]
        assert back[(1, "key")] == [1, 2]


def _twice(value):
    return {"one": value, "other": value}


@pytest.mark.parametrize("make", [lambda i: np.full(2, i), lambda i: [i], lambda i: {"k": np.full(1, i)}])
def test_aliases_within_an_env_stay_aliases(make):
    back = _round_trip([_twice(make(i)) for i in range(3)])
    assert all(tree["one"] is tree["other"] for tree in back)
    assert back[0]["one"] is not back[1]["one"]


def test_aliases_that_only_some_envs_have_are_kept():
    shared = np.zeros(2)
    trees = [_twice(shared), {"one": np.ones(2), "other": np.ones(2)}]
    first, second = _round_trip(trees)
    assert first["one"] is first["other"]
    assert second["one"] is not second["other"]


def test_aliases_between_joined_and_separate_parts_are_kept():
    trees = []
    for i in range(3):
        buffer = np.full(2, i)
        box = {"buffer": buffer}
        trees.append({"extra": [buffer, box] * (i + 1), "box": box})
    joined = stack(trees)
    assert isinstance(joined["extra"], PerEnv)
    assert isinstance(joined["extra"].children[0][0], Row)
    for i, tree in enumerate(unstack(joined, 3)):
        assert len(tree["extra"]) == 2 * (i + 1)
        assert tree["extra"][0] is tree["box"]["buffer"]
        assert tree["extra"][1] is tree["box"]
        assert tree["extra"][0].tolist() == [i, i]


def test_cycles_are_kept():
    trees = []
    for i in range(2):
        outer = ObjectState("m.Outer", {"n": i})
        inner = ObjectState("m.Inner" if i else "m.Other", {"outer": outer, "parts": (outer,)})
        outer.attributes["inner"] = inner
        trees.append(outer)
    for i, outer in enumerate(_round_trip(trees)):
        assert outer.attributes["n"] == i
        assert outer.attributes["inner"].attributes["outer"] is outer
        assert outer.attributes["inner"].attributes["parts"][0] is outer


def test_objects_nothing_is_known_about_are_kept_as_they_are():
    values = [frozenset({1}), frozenset({2})]
    assert _round_trip(values) == values


def test_batched_trees_are_joined_on_demand():
    trees = [{"a": np.full(2, i)} for i in range(3)]
    batched = Batched(trees)
    assert len(batched) == 3
    assert batched.joined is batched.joined
    back = Batched(joined=batched.joined, num_envs=3)
    assert_same(list(back), trees)
    assert_same(back[1], trees[1])


def test_tensors_are_joined_with_their_dtype():
    torch = pytest.importorskip("torch")
    trees = [{"w": torch.full((2,), float(i), dtype=torch.bfloat16)} for i in range(3)]
    joined = stack(trees)
    assert joined["w"].shape == (3, 2)
    assert joined["w"].dtype == torch.bfloat16
    assert [tree["w"].tolist() for tree in unstack(joined, 3)] == [[0.0, 0.0], [1.0, 1.0], [2.0, 2.0]]
