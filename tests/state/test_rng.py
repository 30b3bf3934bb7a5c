"""Generators draw on as if nothing had happened, and stay the same objects."""

import random
import subprocess
import sys

import numpy as np
import pytest
import torch
from state_helpers import assert_same, round_trip

from simckpt.errors import StateMismatchError, UnsupportedStateError
from simckpt.state import (
    RNGStreams,
    copy_tree,
    generator_state,
    global_streams_state,
    load_global_streams,
    new_generator,
    set_generator_state,
)

BIT_GENERATORS = [np.random.PCG64, np.random.PCG64DXSM, np.random.MT19937, np.random.Philox, np.random.SFC64]


def numpy_generator(cls):
    generator = np.random.Generator(cls(np.random.SeedSequence(7, spawn_key=(1, 2))))
    generator.spawn(2)
    generator.standard_normal(3)
    # an odd number of 32-bit draws leaves half of a 64-bit one waiting
    generator.integers(0, 100, 3, dtype=np.uint32)
    return generator


def draw_numpy(generator):
    draws = [generator.integers(0, 2**32, 3, dtype=np.uint32), generator.random(700), generator.standard_normal(5)]
    return b"".join(array.tobytes() for array in [*draws, *(child.random(2) for child in generator.spawn(2))])


def random_state():
    generator = np.random.RandomState(3)
    # one Gaussian of a pair is left waiting
    generator.standard_normal()
    return generator


def draw_random_state(generator):
    return generator.standard_normal(3).tobytes() + generator.bytes(9) + generator.permutation(50).tobytes()


def python_generator():
    generator = random.Random(3)
    generator.gauss(0, 1)
    return generator


def draw_python(generator):
    return [generator.gauss(0, 1), generator.random(), generator.getrandbits(99), generator.sample(range(99), 5)]


def torch_generator():
    generator = torch.Generator().manual_seed(3)
    torch.randn(3, generator=generator)
    return generator


def draw_torch(generator):
    return torch.cat([torch.randn(7, generator=generator), torch.rand(700, generator=generator)]).tolist()


CASES = [pytest.param(lambda cls=cls: numpy_generator(cls), draw_numpy, id=cls.__name__) for cls in BIT_GENERATORS]
CASES += [pytest.param(random_state, draw_random_state, id="RandomState")]
CASES += [pytest.param(python_generator, draw_python, id="random.Random")]
CASES += [pytest.param(torch_generator, draw_torch, id="torch.Generator")]


@pytest.mark.parametrize(("make", "draw"), CASES)
def test_state_put_back_repeats_the_draws(make, draw):
    generator = make()
    state = generator_state(generator)
    kept = copy_tree(state)
    expected = draw(make())
    assert draw(generator) == expected
    # the state is no view of the generator
    assert_same(state, kept)
    set_generator_state(generator, state)
    assert draw(generator) == expected
    draw(generator)
    set_generator_state(generator, state)
    assert_same(generator_state(generator), kept)


@pytest.mark.parametrize(("make", "draw"), CASES)
def test_state_survives_a_file_and_makes_a_new_generator(make, draw):
    expected = draw(make())
    state = round_trip(generator_state(make()))
    assert_same(state, generator_state(make()))
    assert draw(new_generator(state)) == expected
    live = make()
    draw(live)
    set_generator_state(live, state)
    assert draw(live) == expected


@pytest.mark.parametrize(("make", "draw"), CASES)
def test_generators_may_stand_in_a_tree(make, draw):
    generator = make()
    tree = {"a": generator, "b": [generator]}
    expected = draw(make())
    for back in (round_trip(tree), copy_tree(tree)):
        assert back["a"] is back["b"][0]
        assert back["a"] is not generator
        assert draw(back["a"]) == expected
    assert draw(generator) == expected


def test_two_generators_on_one_stream_stay_on_one_stream():
    bits = np.random.PCG64(0)
    tree = [np.random.Generator(bits), np.random.Generator(bits), bits]
    for back in (round_trip(tree), copy_tree(tree)):
        assert back[0].bit_generator is back[1].bit_generator is back[2]


def test_pcg64_state_keeps_128_bit_integers():
    state = generator_state(np.random.default_rng(0))
    assert state["state"] == {
        "state": 35399562948360463058890781895381311971,
        "inc": 87136372517582989555478159403783844777,
    }
    assert state["type"] == "numpy.Generator"
    assert state["seed_sequence"] == {"entropy": 0, "spawn_key": (), "pool_size": 4, "n_children_spawned": 0}


def test_spawning_goes_on_after_a_restore_in_either_direction():
    for spawned_before, spawned_live in [(0, 5), (5, 0), (3, 3), (5000, 0), (0, 5000)]:
        saved, live = np.random.default_rng(1), np.random.default_rng(1)
        saved.bit_generator.seed_seq.spawn(spawned_before)
        live.bit_generator.seed_seq.spawn(spawned_live)
        bits = live.bit_generator
        set_generator_state(live, generator_state(saved))
        assert live.bit_generator is bits
        assert live.spawn(1)[0].random() == saved.spawn(1)[0].random()


def test_restore_within_one_lineage_keeps_the_seed_sequence_object():
    generator = np.random.default_rng(1)
    seeds = generator.bit_generator.seed_seq
    state = generator_state(generator)
    state["seed_sequence"]["n_children_spawned"] = 3
    set_generator_state(generator, state)
    assert generator.bit_generator.seed_seq is seeds
    assert seeds.n_children_spawned == 3


def test_entropy_of_several_words_comes_back():
    for entropy in ([1, 2, 2**90], np.array([5, 6], np.uint32), None):
        generator = np.random.default_rng(np.random.SeedSequence(entropy))
        state = round_trip(generator_state(generator))
        assert draw_numpy(new_generator(state)) == draw_numpy(generator)


MISFITS = [
    (lambda: np.random.default_rng(0), lambda: np.random.Generator(np.random.MT19937(0))),
    (lambda: np.random.default_rng(0), lambda: np.random.RandomState(0)),
    (lambda: random.Random(0), lambda: torch.Generator()),
    (lambda: np.random.RandomState(0), lambda: np.random.RandomState(np.random.PCG64(0))),
]


@pytest.mark.parametrize(("first", "second"), MISFITS)
def test_state_of_another_kind_is_refused_and_nothing_changes(first, second):
    for live, other in ((first(), second()), (second(), first())):
        before = generator_state(live)
        with pytest.raises(StateMismatchError):
            set_generator_state(live, generator_state(other))
        assert_same(generator_state(live), before)


@pytest.mark.parametrize("bad", [None, 3, {}, {"type": "numpy.Generator"}, {"type": ["x"]}])
def test_what_is_no_state_is_refused(bad):
    with pytest.raises(StateMismatchError):
        set_generator_state(np.random.default_rng(0), bad)
    with pytest.raises(StateMismatchError):
        new_generator(bad)


def test_positions_that_numpy_would_read_out_of_bounds_are_refused():
    cases = [(np.random.RandomState(0), ("state", "pos"), 625), (np.random.RandomState(0), ("state", "pos"), -1)]
    cases += [(np.random.Generator(np.random.MT19937(0)), ("state", "pos"), 10**6)]
    cases += [(np.random.Generator(np.random.Philox(0)), ("buffer_pos",), 99)]
    cases += [(np.random.Generator(np.random.MT19937(0)), ("state", "key"), np.zeros(3, np.uint32))]
    cases += [(np.random.Generator(np.random.Philox(0)), ("buffer",), np.zeros(1, np.uint64))]
    cases += [(np.random.default_rng(0), ("seed_sequence", "pool_size"), 2**40)]
    cases += [(np.random.default_rng(0), ("seed_sequence", "n_children_spawned"), -1)]
    cases += [(np.random.default_rng(0), ("seed_sequence", "entropy"), "x")]
    cases += [(random.Random(0), ("key",), np.zeros(5, np.uint32))]
    cases += [(random.Random(0), ("gauss_next",), "x")]
    cases += [(torch.Generator(), ("state",), np.zeros(8, np.uint8))]
    for generator, keys, value in cases:
        state = generator_state(generator)
        place = state
        for key in keys[:-1]:
            place = place[key]
        place[keys[-1]] = value
        before = generator_state(generator)
        with pytest.raises(StateMismatchError):
            set_generator_state(generator, state)
        assert_same(generator_state(generator), before)


def test_what_has_no_state_is_refused():
    class Own(random.Random):
        def __init__(self):
            super().__init__(0)
            self.extra = 1

    for generator in (random.SystemRandom(), Own(), object(), np.random, None):
        with pytest.raises(UnsupportedStateError):
            generator_state(generator)


def draw_global():
    return [
        random.random(),
        random.gauss(0, 1),
        np.random.random(),
        np.random.standard_normal(),
        torch.rand(3).tolist(),
    ]


def test_global_streams_draw_on():
    draw_global()
    state = global_streams_state()
    expected = [draw_global(), draw_global()]
    load_global_streams(round_trip(state))
    assert [draw_global(), draw_global()] == expected


def test_streams_component_covers_the_generators_handed_in():
    first, named = np.random.default_rng(0), torch.Generator()
    streams = RNGStreams(first, sampler=named)
    state = round_trip(streams.state_dict())
    expected = [draw_global(), first.random(), torch.rand(2, generator=named).tolist()]
    streams.load_state_dict(state)
    assert [draw_global(), first.random(), torch.rand(2, generator=named).tolist()] == expected
    assert set(state["generators"]) == {"0", "sampler"}


def test_streams_list_every_problem_and_touch_nothing():
    state = RNGStreams(np.random.default_rng(0), a=random.Random(0)).state_dict()
    state["python"] = {"type": "wrong"}
    streams = RNGStreams(np.random.RandomState(0), b=random.Random(0))
    before = streams.state_dict()
    with pytest.raises(StateMismatchError) as caught:
        streams.load_state_dict(state)
    assert len(caught.value.problems) == 4
    assert_same(streams.state_dict(), before)
    for bad in (
        None,
        {},
        {"python": 1, "numpy": 2},
        {**before, "torch": {}},
        {**before, "torch": {"cpu": 1, "cuda": 2}},
    ):
        with pytest.raises(StateMismatchError):
            streams.load_state_dict(bad)
    assert_same(streams.state_dict(), before)


def test_streams_refuse_what_is_no_generator():
    with pytest.raises(UnsupportedStateError) as caught:
        RNGStreams(np.random.default_rng(0), env=object())
    assert caught.value.path == "generators/env"


def test_streams_of_missing_gpus_are_left_out_with_a_warning():
    state = global_streams_state()
    if torch.cuda.is_available():
        pytest.skip("needs a machine without a GPU")
    state["torch"]["cuda"] = [{"type": "torch.Generator", "device": "cuda:0", "state": np.zeros(16, np.uint8)}]
    with pytest.warns(UserWarning, match="1 CUDA devices and this machine has 0"):
        load_global_streams(state)


def test_streams_work_without_torch():
    program = """
import sys
sys.modules["torch"] = None
import random, numpy as np
from simckpt.errors import StateMismatchError
from simckpt.state import RNGStreams, decode, encode
streams = RNGStreams()
state = streams.state_dict()
assert set(state) == {"python", "numpy", "generators"}
expected = random.random(), np.random.random()
encoded = encode(state)
streams.load_state_dict(decode(encoded.leaves, encoded.structure))
assert (random.random(), np.random.random()) == expected
try:
    streams.load_state_dict({**state, "torch": {"cpu": {}, "cuda": []}})
except StateMismatchError as error:
    assert "not installed" in str(error)
else:
    raise AssertionError
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
