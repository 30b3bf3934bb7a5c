"""Ordinary attributes of torch modules are state where they are numbers, tensors or arrays."""

import numpy as np
import pytest

from simckpt import state
from simckpt.errors import UnsupportedStateError

torch = pytest.importorskip("torch")


class Tracker(torch.nn.Module):
    """Keeps what its buffers do not."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Dropout(0.5)
        self.count = 0
        self.average = torch.zeros(2)
        self.history = [0.0]
        self.array = np.zeros(2)
        self.device = "cpu"

    def advance(self) -> None:
        self.count += 1
        self.average += 0.5
        self.history.append(0.25)
        self.array += 1
        self.inner.p *= 0.5


def values(module: Tracker) -> tuple:
    return module.count, module.average.tolist(), list(module.history), module.array.tolist(), module.inner.p


def test_attributes_of_modules_come_back_and_tensors_stay_the_same_objects() -> None:
    source, target = Tracker(), Tracker()
    source.advance()
    source.advance()
    saved = state.handle_for("m", source).capture()
    source.advance()
    average = target.average
    target.device = "elsewhere"
    encoded = state.encode(saved)
    handle = state.handle_for("m", target)
    decoded = state.decode(encoded.leaves, encoded.structure, template=handle.capture())
    handle.validate(decoded)
    handle.apply(decoded)
    assert values(target) == (2, [1.0, 1.0], [0.0, 0.25, 0.25], [2.0, 2.0], 0.125)
    assert target.average is average
    assert target.device == "elsewhere"


def test_an_undo_brings_attributes_back() -> None:
    module = Tracker()
    undo = state.handle_for("m", module).capture()
    before = values(module)
    module.advance()
    state.handle_for("m", module).apply(undo)
    assert values(module) == before


def test_recurrent_layers_with_their_lists_of_parameters_are_captured() -> None:
    handle = state.handle_for("m", torch.nn.LSTM(2, 3))
    handle.apply(handle.capture())


def test_a_masked_array_is_refused_because_its_mask_would_be_lost() -> None:
    with pytest.raises(UnsupportedStateError):
        state.handle_for("m", np.ma.masked_array([1.0, 2.0], [True, False]))


def test_an_object_that_has_the_methods_of_a_handle_is_still_asked_for_its_state_dict() -> None:
    class Lookalike:
        def __init__(self) -> None:
            self.n = 2

        def capture(self) -> dict:
            return {"n": 1}

        def validate(self, state: object) -> None: ...

        def apply(self, state: object) -> None: ...

        def state_dict(self) -> dict:
            return {"n": self.n}

        def load_state_dict(self, state: dict) -> None:
            self.n = state["n"]

    assert state.handle_for("m", Lookalike()).capture() == {"n": 2}
