"""The loop's variables."""

import numpy as np
import pytest
from state_helpers import assert_same, round_trip

from simckpt.errors import ConfigurationError, StateMismatchError
from simckpt.state import LoopState, handle_for


def test_attributes_are_the_state():
    loop = LoopState(step=0, observations=None)
    loop.step += 3
    loop.observations = np.ones(2)
    loop.extra = {"a": [1]}
    state = loop.state_dict()
    assert list(state) == ["step", "observations", "extra"]
    fresh = LoopState(step=0, observations=None)
    fresh.load_state_dict(round_trip(state))
    assert_same(fresh.state_dict(), state)
    assert fresh.extra == {"a": [1]}
    assert repr(LoopState(step=1, x="a")) == "LoopState(step=1, x='a')"


def test_load_copies():
    loop, other = LoopState(a=None), LoopState(a=None)
    state = {"a": np.zeros(2)}
    loop.load_state_dict(state)
    other.load_state_dict(state)
    loop.a[0] = 1
    assert other.a[0] == state["a"][0] == 0


def test_generators_stay_the_same_objects():
    loop = LoopState(rng=np.random.default_rng(0))
    generator = loop.rng
    handle = handle_for("loop", loop)
    state = round_trip(handle.capture())
    expected = generator.random()
    handle.validate(state)
    handle.apply(state)
    assert loop.rng is generator
    assert generator.random() == expected


def test_missing_variable_is_a_mismatch_and_nothing_changes():
    loop = LoopState(step=1, best=2.0, rng=np.random.default_rng(0))
    with pytest.raises(StateMismatchError) as caught:
        loop.validate_state_dict({"step": 5, "rng": np.random.Generator(np.random.MT19937(0)), "load_state_dict": 1})
    assert len(caught.value.problems) == 3
    assert loop.step == 1
    with pytest.raises(StateMismatchError):
        loop.load_state_dict([1])


def test_names_that_the_class_needs_are_refused():
    with pytest.raises(ConfigurationError, match="state_dict"):
        LoopState(state_dict=1)
    loop = LoopState(step=0)
    with pytest.raises(ConfigurationError):
        loop.load_state_dict = 3
    with pytest.raises(AttributeError, match="it has step"):
        _ = loop.steps
