import copy
import hashlib
import random
from typing import Any

import numpy as np
import pytest
import torch

from simckpt import state
from simckpt.errors import UnsupportedStateError
from simckpt.state.nodes import UNSEEDED, ObjectState

MAKERS: dict[str, Any] = {
    "PCG64": lambda seed: np.random.Generator(np.random.PCG64(seed)),
    "PCG64DXSM": lambda seed: np.random.Generator(np.random.PCG64DXSM(seed)),
    "MT19937": lambda seed: np.random.Generator(np.random.MT19937(seed)),
    "Philox": lambda seed: np.random.Generator(np.random.Philox(seed)),
    "SFC64": lambda seed: np.random.Generator(np.random.SFC64(seed)),
    "BitGenerator": np.random.PCG64,
    "RandomState": np.random.RandomState,
    "Random": random.Random,
    "torch": lambda seed: torch.Generator().manual_seed(seed),
}


def draw(generator: Any) -> list[float]:
    """Returns some draws that use half-used words and pending Gaussians."""
    if isinstance(generator, np.random.Generator):
        return [*generator.integers(0, 1000, 3, np.uint32).tolist(), *generator.random(3).tolist()]
    if isinstance(generator, np.random.BitGenerator):
        return generator.random_raw(3).tolist()
    if isinstance(generator, np.random.RandomState):
        return [generator.randn(), generator.rand()]
    if isinstance(generator, random.Random):
        return [generator.gauss(0, 1), generator.random()]
    return torch.rand(3, generator=generator).tolist()


@pytest.fixture(params=MAKERS)
def make(request: pytest.FixtureRequest) -> Any:
    return MAKERS[request.param]


def reseeded(generator: Any, seed: str, name: str = "a") -> Any:
    """Returns a generator in the state that `reseed` gives to a tree of states."""
    tree = {name: state.generator_state(generator)}
    state.reseed(tree, seed)
    return state.new_generator(tree[name])


def test_a_stream_depends_on_the_seed_and_the_path_and_on_nothing_that_was_saved(make: Any) -> None:
    first, drawn = make(1), make(2)
    draw(drawn)
    assert draw(reseeded(first, "s")) == draw(reseeded(drawn, "s"))
    assert draw(reseeded(first, "s")) != draw(reseeded(first, "t"))
    assert draw(reseeded(first, "s")) != draw(reseeded(first, "s", name="b"))
    assert draw(reseeded(first, "s")) != draw(make(1))


def test_the_kind_of_generator_stays(make: Any) -> None:
    generator = make(1)
    found = reseeded(generator, "s")
    assert type(found) is type(generator)
    assert state.generator_state(found).keys() == state.generator_state(generator).keys()
    # and the live one takes it
    tree = [state.generator_state(generator)]
    state.reseed(tree, "s")
    state.set_generator_state(generator, tree[0])


def test_a_generator_among_the_values_stays_the_same_object(make: Any) -> None:
    generator = make(1)
    tree = {"a": generator, "again": [generator]}
    state.reseed(tree, "s")
    assert tree["a"] is generator is tree["again"][0]
    assert draw(generator) == draw(reseeded(make(3), "s"))


def test_children_that_are_spawned_later_differ_as_well() -> None:
    parent = np.random.default_rng(1)
    parent.spawn(2)
    (child,) = reseeded(parent, "s").spawn(1)
    (other,) = np.random.default_rng(1).spawn(3)[2:]
    assert child.random() != other.random()
    assert child.random() != reseeded(parent, "t").spawn(1)[0].random()


def test_two_generators_on_one_bit_generator_stay_on_one() -> None:
    bits = np.random.PCG64(1)
    tree = {"a": np.random.Generator(bits), "b": np.random.Generator(bits)}
    state.reseed(tree, "s")
    alone = {"a": np.random.default_rng(1)}
    state.reseed(alone, "s")
    assert [tree["a"].random(), tree["b"].random()] == alone["a"].random(2).tolist()


def test_streams_are_found_at_any_depth_and_through_cycles() -> None:
    node = ObjectState("an.Env", {"rng": state.generator_state(np.random.default_rng(1))})
    node.attributes["self"] = node
    tree = ({"x": [node]}, np.random.default_rng(1).bit_generator.state)
    before = copy.deepcopy((node.attributes["rng"], tree[1]))
    state.reseed(tree, "s")
    assert node.attributes["rng"]["state"] != before[0]["state"]
    assert tree[1]["state"] != before[1]["state"]
    assert tree[1]["state"] != node.attributes["rng"]["state"]


def test_numbers_that_are_no_streams_stay() -> None:
    tree = {"type": "dog", "state": {"state": 1}, "key": np.arange(3), "nested": {"bit_generator": "none", "state": 2}}
    before = copy.deepcopy(tree)
    state.reseed(tree, "s")
    assert not state.differences(before, tree)


def test_global_streams_lose_the_mark_of_being_seeded_by_chance() -> None:
    streams = state.RNGStreams(np.random.default_rng(1), mine=torch.Generator())
    tree = state.copy_tree(streams.state_dict())
    tree["python"] = ObjectState(UNSEEDED, items=state.generator_state(random.Random(1)))
    tree["numpy"] = ObjectState(UNSEEDED, items=state.generator_state(np.random.RandomState(1)))
    before = streams.state_dict()
    try:
        state.reseed(tree, "s")
        streams.validate_state_dict(tree)
        streams.load_state_dict(tree)
        after = streams.state_dict()
        assert not state.differences(after, tree)
        assert not any(isinstance(value, ObjectState) for value in after.values())
        drawn = [random.random(), np.random.rand(), torch.rand(1).item()]
        streams.load_state_dict(tree)
        assert [random.random(), np.random.rand(), torch.rand(1).item()] == drawn
    finally:
        streams.load_state_dict(before)


def test_a_cuda_stream_is_its_seed_and_no_offset() -> None:
    def saved() -> dict[str, Any]:
        return {"type": "torch.Generator", "device": "cuda:0", "state": np.full(16, 255, np.uint8)}

    tree = [saved(), saved()]
    state.reseed(tree, "s")
    words = [stream["state"].view("<u8").tolist() for stream in tree]
    assert [offset for _, offset in words] == [0, 0]
    # torch takes seeds as signed numbers of 64 bits
    assert all(0 <= seed < 2**63 for seed, _ in words)
    assert words[0] != words[1]


def test_a_stream_that_cannot_be_seeded_is_named() -> None:
    tree = {"a": {"type": "torch.Generator", "device": "mps", "state": np.zeros(8, np.uint8)}}
    with pytest.raises(UnsupportedStateError, match="a: a random stream of this kind") as caught:
        state.reseed(tree, "s")
    assert caught.value.path == "a"


def test_streams_do_not_change_between_versions_of_simckpt() -> None:
    tree = {"a": np.random.default_rng(0)}
    state.reseed(tree, "seed")
    words = np.frombuffer(hashlib.sha256(b"seed\0a").digest(), "<u4")
    seeds = np.random.SeedSequence([int(word) for word in words])
    assert tree["a"].random(3).tolist() == np.random.default_rng(seeds).random(3).tolist()
