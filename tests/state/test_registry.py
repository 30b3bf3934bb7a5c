"""Kinds of leaves and containers that a user adds."""

import numpy as np
import pytest
from state_helpers import assert_same, round_trip

from simckpt.errors import ConfigurationError, FormatError, UnsupportedStateError
from simckpt.state import Leaf, copy_tree, decode, encode, register_container, register_leaf, registry


class Celsius:
    def __init__(self, values):
        self.values = np.asarray(values, float)


class Ring:
    def __init__(self, items, start):
        self.items, self.start = items, start


@pytest.fixture
def registered():
    register_leaf(
        "celsius",
        lambda obj: isinstance(obj, Celsius),
        lambda obj: Leaf(obj.values, "celsius", obj.values.shape, "celsius"),
        lambda leaf: Celsius(leaf.data),
    )
    register_container(
        "ring",
        Ring,
        lambda ring: ([("", ring.items), ("extra/x", [ring.start])], {"start": ring.start}),
        lambda meta, children: Ring(list(dict(children)[""]), meta["start"]),
    )
    yield
    registry.handlers.pop(Ring)
    registry.container_kinds.pop("ring")
    registry._registered_containers.pop("ring")
    registry._registered_leaves.remove(registry.leaf_kinds.pop("celsius"))


@pytest.mark.usefixtures("registered")
def test_registered_kinds_go_through_files_and_copies():
    temperature = Celsius([1.5, 2])
    tree = {"t": temperature, "again": temperature, "r": Ring([np.zeros(2), [1]], 7)}
    encoded = encode(tree)
    assert list(encoded.leaves) == ["t", "r/0"]
    for back in (decode(encoded.leaves, encoded.structure), copy_tree(tree)):
        assert back["t"] is back["again"]
        assert_same(back["t"].values, temperature.values)
        assert type(back["r"]) is Ring
        assert back["r"].start == 7
        assert_same(back["r"].items, tree["r"].items)
    copied = copy_tree(tree)
    assert not np.shares_memory(copied["t"].values, temperature.values)
    assert copied["r"].items[1] is not tree["r"].items[1]


@pytest.mark.usefixtures("registered")
def test_unflatten_gets_complete_children_even_if_they_were_met_before():
    items = [1, [2]]
    for back in (round_trip([items, Ring(items, 1)]), round_trip([Ring(items, 1), items])):
        ring = next(item for item in back if type(item) is Ring)
        assert ring.items == [1, [2]]


@pytest.mark.usefixtures("registered")
def test_cycle_through_a_registered_container_is_refused():
    ring = Ring([], 0)
    ring.items.append(ring)
    encoded = encode(ring)
    with pytest.raises(FormatError, match="contains itself"):
        decode(encoded.leaves, encoded.structure)


@pytest.mark.usefixtures("registered")
def test_meta_that_json_does_not_bring_back_is_refused():
    for start in ((1, 2), {1: 2}, object(), float("nan")):
        with pytest.raises(UnsupportedStateError):
            encode({"r": Ring([], start)})


@pytest.mark.usefixtures("registered")
def test_unflatten_that_raises_is_a_format_error():
    encoded = encode({"r": Ring([], 1)})
    with pytest.raises(FormatError, match="ring"):
        decode(encoded.leaves, encoded.structure.replace(b'"start"', b'"other"'))


@pytest.mark.usefixtures("registered")
def test_registering_again_replaces_and_foreign_names_are_refused():
    register_container("ring", Ring, lambda ring: ([], 1), lambda meta, children: "replaced")
    assert round_trip(Ring([], 0)) == "replaced"
    with pytest.raises(ConfigurationError):
        register_container("list", Ring, lambda ring: ([], 1), lambda meta, children: None)
    with pytest.raises(ConfigurationError):
        register_container("my dict", dict, lambda obj: ([], 1), lambda meta, children: None)
    with pytest.raises(ConfigurationError):
        register_container("other ring", Ring, lambda ring: ([], 1), lambda meta, children: None)
    with pytest.raises(ConfigurationError):
        register_leaf("numpy", lambda obj: False, lambda obj: None, lambda leaf: None)


def test_leaf_of_an_unregistered_kind_says_what_to_do():
    with pytest.raises(FormatError, match="register_leaf"):
        decode({"x": Leaf(np.zeros(1), "celsius", (1,), "celsius")}, b'{"tree":1,"root":{"leaf":"x"},"nodes":[]}')
