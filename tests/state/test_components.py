"""Handles: capture shares nothing, validate touches nothing, apply brings back every bit, undo too."""

import copy
from collections import namedtuple

import numpy as np
import pytest
import torch
from state_helpers import assert_same, round_trip

from simckpt.errors import CaptureError, RestoreError, SimckptError, StateMismatchError, UnsupportedStateError
from simckpt.state import LoopState, RNGStreams, differences, handle_for


def network(seed=0):
    torch.manual_seed(seed)
    return torch.nn.Sequential(
        torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.ReLU(), torch.nn.Dropout(0.5), torch.nn.Linear(8, 2)
    )


def train_step(model, optimizer, scheduler=None):
    def closure():
        optimizer.zero_grad()
        loss = model(torch.randn(16, 4)).square().mean()
        loss.backward()
        return loss

    optimizer.step(closure)
    if scheduler is not None:
        scheduler.step()


def parameters(model):
    return [parameter.detach().clone() for parameter in model.parameters()]


OPTIMIZERS = {
    "SGD": lambda p: torch.optim.SGD(p, 0.1),
    "momentum": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, nesterov=True),
    "Adam": lambda p: torch.optim.Adam(p, 1e-2),
    "AMSGrad": lambda p: torch.optim.Adam(p, 1e-2, amsgrad=True),
    "capturable": lambda p: torch.optim.Adam(p, torch.tensor(1e-2), foreach=False),
    "AdamW": lambda p: torch.optim.AdamW(p, 1e-2),
    "RMSprop": lambda p: torch.optim.RMSprop(p, 1e-2, momentum=0.9, centered=True),
    "Adagrad": lambda p: torch.optim.Adagrad(p, 1e-2),
    "Adadelta": lambda p: torch.optim.Adadelta(p, 1e-2),
    "Adamax": lambda p: torch.optim.Adamax(p, 1e-2),
    "NAdam": lambda p: torch.optim.NAdam(p, 1e-2),
    "RAdam": lambda p: torch.optim.RAdam(p, 1e-2),
    "ASGD": lambda p: torch.optim.ASGD(p, 1e-2),
    "Rprop": lambda p: torch.optim.Rprop(p, 1e-2),
    "Adafactor": lambda p: torch.optim.Adafactor(p, 1e-2),
    "LBFGS": lambda p: torch.optim.LBFGS(p, 0.1, history_size=3),
}


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_training_goes_on_bit_for_bit(make):
    model = network()
    optimizer = make(model.parameters())
    for _ in range(3):
        train_step(model, optimizer)
    handles = {
        "agent": handle_for("agent", model),
        "optimizer": handle_for("optimizer", optimizer),
        "rng": handle_for("rng", RNGStreams()),
    }
    state = round_trip({name: handle.capture() for name, handle in handles.items()})
    for _ in range(5):
        train_step(model, optimizer)
    expected = handles["agent"].capture(), handles["optimizer"].capture()

    fresh = network(seed=9)
    fresh_optimizer = make(fresh.parameters())
    fresh_handles = {
        "agent": handle_for("agent", fresh),
        "optimizer": handle_for("optimizer", fresh_optimizer),
        "rng": handles["rng"],
    }
    for name, handle in fresh_handles.items():
        handle.validate(state[name])
        handle.apply(state[name])
    for _ in range(5):
        train_step(fresh, fresh_optimizer)
    assert differences(fresh_handles["agent"].capture(), expected[0]) == []
    assert [d for d in differences(fresh_handles["optimizer"].capture(), expected[1]) if not d.aliasing] == []


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_undo_empties_an_optimizer_that_had_no_state(make):
    model, other = network(), network(1)
    optimizer, donor = make(model.parameters()), make(other.parameters())
    train_step(other, donor)
    handle = handle_for("optimizer", optimizer)
    undo = handle.capture()
    handle.apply(handle_for("optimizer", donor).capture())
    handle.apply(undo)
    assert_same(handle.capture().items, undo.items)
    assert dict(optimizer.state) == {} or make is OPTIMIZERS["Adagrad"]


def test_two_optimizers_restored_from_one_state_share_nothing():
    donor_model = network()
    donor = torch.optim.Adam(donor_model.parameters())
    train_step(donor_model, donor)
    state = handle_for("optimizer", donor).capture()
    kept = copy.deepcopy(state.items)
    models = [network(), network()]
    optimizers = [torch.optim.Adam(model.parameters()) for model in models]
    for optimizer in optimizers:
        handle_for("optimizer", optimizer).apply(state)
    train_step(models[0], optimizers[0])
    assert_same(optimizers[1].state_dict(), kept)
    assert_same(state.items, kept)


def test_moments_of_another_dtype_than_the_parameter_keep_it():
    def make(dtype):
        parameter = torch.nn.Parameter(torch.ones(3))
        optimizer = torch.optim.Adam([parameter])
        optimizer.state[parameter] = {
            "step": torch.tensor(3.0),
            "exp_avg": torch.tensor([1, 2, 3]).to(dtype),
            "nested": [torch.tensor([5, 6]).to(dtype)],
            "scale": 2,
        }
        return optimizer

    for dtype in (torch.bfloat16, torch.int8, torch.float64, torch.bool):
        saved, live = make(dtype), make(torch.float32)
        handle = handle_for("optimizer", live)
        handle.apply(round_trip(handle_for("optimizer", saved).capture()))
        assert_same(live.state_dict(), saved.state_dict())


def test_optimizer_of_another_kind_or_shape_is_refused_before_anything_changes():
    model = network()
    optimizer = torch.optim.Adam(model.parameters())
    train_step(model, optimizer)
    state = handle_for("optimizer", optimizer).capture()
    others = [
        torch.optim.SGD(model.parameters(), 0.1),
        torch.optim.Adam(torch.nn.Linear(4, 8).parameters()),
        torch.optim.Adam([{"params": [p]} for p in model.parameters()]),
        torch.optim.Adam(model.double().parameters()),
    ]
    for other in others:
        before = copy.deepcopy(other.state_dict())
        with pytest.raises(StateMismatchError) as caught:
            handle_for("optimizer", other).validate(state)
        assert all(problem.startswith("optimizer: ") for problem in caught.value.problems)
        assert_same(other.state_dict(), before)
    for bad in (None, {}, {"state": {}, "param_groups": []}):
        with pytest.raises(StateMismatchError):
            handle_for("optimizer", optimizer).validate(bad)


def schedulers():
    lr = torch.optim.lr_scheduler
    return {
        "LambdaLR": lambda o: lr.LambdaLR(o, lambda step: 0.9**step),
        "StepLR": lambda o: lr.StepLR(o, 2),
        "MultiStepLR": lambda o: lr.MultiStepLR(o, [1, 2, 7]),
        "ExponentialLR": lambda o: lr.ExponentialLR(o, 0.9),
        "CosineAnnealingLR": lambda o: lr.CosineAnnealingLR(o, 10),
        "CosineAnnealingWarmRestarts": lambda o: lr.CosineAnnealingWarmRestarts(o, 3),
        "LinearLR": lambda o: lr.LinearLR(o),
        "OneCycleLR": lambda o: lr.OneCycleLR(o, 0.1, total_steps=50),
        "CyclicLR": lambda o: lr.CyclicLR(o, 0.01, 0.1, mode="exp_range"),
        "CyclicLR with a function": lambda o: lr.CyclicLR(o, 0.01, 0.1, scale_fn=lambda x: 0.5**x),
        "SequentialLR": lambda o: lr.SequentialLR(o, [lr.ConstantLR(o), lr.ExponentialLR(o, 0.9)], [4]),
        "ChainedScheduler": lambda o: lr.ChainedScheduler([lr.ConstantLR(o), lr.ExponentialLR(o, 0.9)], optimizer=o),
        "PolynomialLR": lambda o: lr.PolynomialLR(o, 30),
    }


@pytest.mark.parametrize("make", schedulers().values(), ids=schedulers())
@pytest.mark.parametrize("order", [("optimizer", "scheduler"), ("scheduler", "optimizer")])
def test_learning_rates_go_on(make, order):
    def build():
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
        return model, {"optimizer": optimizer, "scheduler": make(optimizer)}

    model, live = build()
    for _ in range(3):
        train_step(model, live["optimizer"], live["scheduler"])
    state = round_trip({name: handle_for(name, live[name]).capture() for name in live})
    expected = []
    for _ in range(8):
        train_step(model, live["optimizer"], live["scheduler"])
        expected.append(live["optimizer"].param_groups[0]["lr"])
    model, fresh = build()
    for name in order:
        handle = handle_for(name, fresh[name])
        handle.validate(state[name])
        handle.apply(state[name])
    for rate in expected:
        train_step(model, fresh["optimizer"], fresh["scheduler"])
        assert fresh["optimizer"].param_groups[0]["lr"] == rate


def test_plateau_scheduler_goes_on_and_its_undo_is_exact():
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=2)
    handle = handle_for("scheduler", scheduler)
    undo = handle.capture()
    for value in (3, 4, 5):
        scheduler.step(value)
    state = round_trip(handle.capture())
    handle.apply(undo)
    assert_same(handle.capture().items, undo.items)
    handle.apply(state)
    assert (scheduler.best, scheduler.num_bad_epochs) == (3, 2)


def test_scheduler_of_another_kind_is_refused():
    optimizer = torch.optim.SGD(network().parameters(), 0.1)
    step = handle_for("s", torch.optim.lr_scheduler.StepLR(optimizer, 2))
    cosine = handle_for("s", torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 2))
    with pytest.raises(StateMismatchError, match="StepLR"):
        cosine.validate(step.capture())
    with pytest.raises(StateMismatchError):
        cosine.validate(None)


def test_grad_scaler_comes_back():
    def make():
        return torch.amp.GradScaler("cpu", init_scale=1024.0)

    scaler = make()
    scaler.scale(torch.ones(1))
    scaler.update(512.0)
    state = round_trip(handle_for("scaler", scaler).capture())
    fresh = make()
    handle = handle_for("scaler", fresh)
    undo = handle.capture()
    handle.validate(state)
    handle.apply(state)
    assert fresh.get_scale() == 512.0
    handle.apply(undo)
    assert fresh.get_scale() == 1024.0
    disabled = handle_for("scaler", torch.amp.GradScaler("cpu", enabled=False))
    with pytest.raises(StateMismatchError):
        disabled.validate(state)


class WithEverything(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(2, 2)
        self.tied = self.layer
        self.register_buffer("count", torch.tensor(0))
        self.register_buffer("cache", torch.zeros(2), persistent=False)
        self.register_buffer("lazy", None, persistent=False)
        self.extra = {"list": [1]}

    def get_extra_state(self):
        return self.extra

    def set_extra_state(self, state):
        self.extra = state


def test_module_state_is_whole():
    module = WithEverything()
    module.count += 3
    module.cache += 1
    module.lazy = torch.ones(5)
    module.extra = {"list": [1, 2], "tensor": torch.ones(1)}
    module.layer.eval()
    module.layer.bias.requires_grad_(False)
    state = round_trip(handle_for("m", module).capture())
    fresh = WithEverything()
    handle = handle_for("m", fresh)
    undo = handle.capture()
    weight, cache = fresh.layer.weight, fresh.cache
    handle.validate(state)
    handle.apply(state)
    assert fresh.count == 3
    assert fresh.cache.tolist() == [1, 1]
    assert fresh.lazy.tolist() == [1] * 5
    assert fresh.extra["list"] == [1, 2]
    assert fresh.extra is not state.items["_extra_state"]
    assert not fresh.layer.training
    assert fresh.training
    assert not fresh.layer.bias.requires_grad
    assert fresh.layer.weight is weight
    assert fresh.cache is cache
    assert fresh.tied is fresh.layer
    assert differences(handle.capture(), state) == []
    handle.apply(undo)
    assert differences(handle.capture(), undo) == []
    assert fresh.lazy is None
    assert fresh.layer.bias.requires_grad


def test_module_keeps_nan_payloads_and_low_precision():
    module = torch.nn.Linear(2, 2).to(torch.bfloat16)
    with torch.no_grad():
        module.weight.view(torch.int16)[:] = torch.tensor([[0x7F81, -1], [-32768, 1]], dtype=torch.int16)
    state = round_trip(handle_for("m", module).capture())
    fresh = torch.nn.Linear(2, 2).to(torch.bfloat16)
    handle_for("m", fresh).apply(state)
    assert fresh.weight.view(torch.int16).tolist() == [[0x7F81, -1], [-32768, 1]]


def test_module_lists_all_problems_and_changes_nothing():
    state = handle_for("agent", network()).capture()
    live = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(9).double(), torch.nn.Conv1d(1, 1, 1))
    handle = handle_for("agent", live)
    before = handle.capture()
    with pytest.raises(StateMismatchError) as caught:
        handle.validate(state)
    problems = caught.value.problems
    assert "agent: 1.weight: saved with shape (8,), live has (9,)" in problems
    assert "agent: 2.weight: not in the checkpoint" in problems
    assert "agent: 4.weight: only in the checkpoint" in problems
    double = handle_for("agent", network().double())
    with pytest.raises(StateMismatchError, match=r"torch.float32, live is torch.float64"):
        double.validate(state)
    assert differences(handle.capture(), before) == []
    for bad in (None, {}, {"0.weight": 1}):
        with pytest.raises(StateMismatchError):
            handle.validate(bad)


def test_damaged_state_of_a_module_or_an_optimizer_is_a_mismatch():
    model = network()
    optimizer = torch.optim.Adam(model.parameters())
    for live in (model, optimizer):
        handle = handle_for("x", live)
        for name in handle.capture().attributes:
            for damage in (None, [1], {"a": 1}, [[{"shape": [1]}] * 8]):
                state = handle.capture()
                state.attributes[name] = damage
                with pytest.raises(StateMismatchError):
                    handle.validate(state)


def test_capture_of_a_module_shares_no_memory():
    module = network()
    handle = handle_for("agent", module)
    state = handle.capture()
    kept = copy.deepcopy(dict(state.items))
    train_step(module, torch.optim.SGD(module.parameters(), 0.1))
    assert_same(dict(state.items), kept)


def test_module_that_changes_what_it_loads_is_reported():
    class Rounding(torch.nn.Linear):
        def _load_from_state_dict(self, state_dict, prefix, *arguments):
            state_dict = {key: value.round() for key, value in state_dict.items()}
            super()._load_from_state_dict(state_dict, prefix, *arguments)

    with pytest.raises(RestoreError, match="changed it"):
        handle_for("m", Rounding(2, 2)).apply(handle_for("m", torch.nn.Linear(2, 2)).capture())


def test_arrays_and_tensors_are_set_in_place():
    array, tensor = np.arange(6.0).reshape(2, 3), torch.arange(3.0, requires_grad=True)
    view = array[0]
    for live in (array, tensor):
        handle = handle_for("x", live)
        state = round_trip(handle.capture())
        expected = live.tolist()
        with torch.no_grad():
            live[...] = 0
        handle.validate(state)
        handle.apply(state)
        assert live.tolist() == expected
        for bad in (None, 1.0, state[:1], state * 1j):
            with pytest.raises(StateMismatchError):
                handle.validate(bad)
    assert view.tolist() == [0, 1, 2]
    with pytest.raises(StateMismatchError, match="read-only"):
        handle_for("x", np.broadcast_to(1.0, (2,))).validate(np.ones(2))


def test_generators_are_components():
    generator = np.random.default_rng(0)
    handle = handle_for("rng", generator)
    state = handle.capture()
    expected = generator.random()
    handle.apply(state)
    assert generator.random() == expected
    with pytest.raises(StateMismatchError):
        handle_for("rng", torch.Generator()).validate(state)


class Counter:
    def __init__(self):
        self.values = {"n": 0, "seen": []}
        self.fail_after = None

    def state_dict(self):
        return self.values

    def load_state_dict(self, state):
        self.values["n"] = state["n"]
        if self.fail_after:
            raise self.fail_after
        self.values = state


def test_anything_with_the_protocol_is_a_component():
    counter = Counter()
    handle = handle_for("counter", counter)
    state = handle.capture()
    counter.values["seen"].append(1)
    counter.values["n"] = 5
    assert state == {"n": 0, "seen": []}
    handle.validate(state)
    handle.apply(state)
    assert counter.values == {"n": 0, "seen": []}
    counter.values["seen"].append(2)
    assert state["seen"] == []


def test_load_that_raises_halfway_is_a_restore_error_and_undo_repairs_it():
    counter = Counter()
    handle = handle_for("counter", counter)
    undo = handle.capture()
    counter.fail_after = KeyError("seen")
    with pytest.raises(RestoreError, match=r"component 'counter'.*KeyError") as caught:
        handle.apply({"n": 7, "seen": [1]})
    assert isinstance(caught.value.__cause__, KeyError)
    counter.fail_after = None
    handle.apply(undo)
    assert counter.values == undo


def test_load_that_reports_missing_keys_is_a_mismatch():
    class Lenient(Counter):
        def load_state_dict(self, state):
            return namedtuple("Result", "missing_keys unexpected_keys")(["a"], ["b"])

    with pytest.raises(StateMismatchError) as caught:
        handle_for("c", Lenient()).apply({})
    assert caught.value.problems == ("c: a: not in the checkpoint", "c: b: only in the checkpoint")


def test_own_validation_is_asked_first():
    loop = LoopState(step=0)
    with pytest.raises(StateMismatchError) as caught:
        handle_for("loop", loop).validate({})
    assert caught.value.problems == ("loop: step: it was not saved",)


def test_own_validation_that_raises_anything_else_is_a_mismatch():
    counter = Counter()
    counter.validate_state_dict = lambda state: state["missing"]
    with pytest.raises(StateMismatchError, match="KeyError"):
        handle_for("counter", counter).validate({})


def test_state_that_cannot_be_captured_names_the_component_and_the_path():
    counter = Counter()
    counter.values["seen"] = [object()]
    with pytest.raises(UnsupportedStateError) as caught:
        handle_for("counter", counter).capture()
    assert caught.value.path == "counter/seen/0"
    counter.state_dict = lambda: 1 / 0
    with pytest.raises(CaptureError, match="ZeroDivisionError"):
        handle_for("counter", counter).capture()


def test_what_is_no_component_is_refused_with_advice():
    for obj, advice in [
        ({"a": 1}, "LoopState"),
        (3, "LoopState"),
        (object(), "state_dict"),
        (np.array([None]), "LoopState"),
    ]:
        with pytest.raises(UnsupportedStateError, match=advice) as caught:
            handle_for("thing", obj)
        assert caught.value.path == "thing"
        assert isinstance(caught.value, SimckptError)
