"""Learning rates under the schedulers of torch: in force after a restore, and seen when they are lost."""

import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler as schedulers
from torch.optim import swa_utils

from simckpt import restore, state
from simckpt.branching.hyperparameters import Hyperparameters
from simckpt.errors import ConfigurationError, OverrideNotAppliedError
from simckpt.restore import Adjustment

OLD, NEW = 1e-3, 2.5e-4
# where a schedule multiplies what is there, going on from a changed rate is rounded in another order
ROUNDING = 1e-12
Made = tuple[torch.optim.Optimizer, list[Any]]


def half(epoch: int) -> float:
    return 1 / (1 + epoch)


class Warmup:
    """A function with a state of its own, as LambdaLR takes it."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, epoch: int) -> float:
        self.calls += 1
        return min(1.0, (epoch + 1) / 10)


class FromBase(schedulers.LRScheduler):
    """A scheduler of somebody's own."""

    def get_lr(self) -> list[Any]:
        return [base / math.sqrt(1 + self.last_epoch) for base in self.base_lrs]


def sequential(optimizer: torch.optim.Optimizer) -> Any:
    warmup = schedulers.LinearLR(optimizer, start_factor=0.1, total_iters=5)
    cosine = schedulers.CosineAnnealingLR(optimizer, T_max=20, eta_min=1e-5)
    return schedulers.SequentialLR(optimizer, [warmup, cosine], milestones=[5])


def nested(optimizer: torch.optim.Optimizer) -> Any:
    first = schedulers.SequentialLR(
        optimizer, [schedulers.LambdaLR(optimizer, half), schedulers.ExponentialLR(optimizer, 0.9)], milestones=[3]
    )
    with warnings.catch_warnings():
        # torch steps the inner one at once, and then warns of that
        warnings.simplefilter("ignore")
        return schedulers.SequentialLR(optimizer, [first, schedulers.StepLR(optimizer, 4, 0.5)], milestones=[8])


def chained(optimizer: torch.optim.Optimizer) -> Any:
    return schedulers.ChainedScheduler(
        [schedulers.ConstantLR(optimizer, factor=0.1, total_iters=8), schedulers.ExponentialLR(optimizer, 0.9)],
        optimizer,
    )


KINDS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "LambdaLR": lambda o: schedulers.LambdaLR(o, half),
    "LambdaLR-callable": lambda o: schedulers.LambdaLR(o, Warmup()),
    "MultiplicativeLR": lambda o: schedulers.MultiplicativeLR(o, lambda epoch: 0.95),
    "StepLR": lambda o: schedulers.StepLR(o, step_size=3, gamma=0.5),
    "MultiStepLR": lambda o: schedulers.MultiStepLR(o, milestones=[2, 9, 9], gamma=0.5),
    "ConstantLR": lambda o: schedulers.ConstantLR(o, factor=0.5, total_iters=9),
    "LinearLR": lambda o: schedulers.LinearLR(o, start_factor=0.1, total_iters=12),
    "ExponentialLR": lambda o: schedulers.ExponentialLR(o, gamma=0.9),
    "PolynomialLR": lambda o: schedulers.PolynomialLR(o, total_iters=15, power=2.0),
    "CosineAnnealingLR": lambda o: schedulers.CosineAnnealingLR(o, T_max=5),
    "CosineAnnealingLR-floor": lambda o: schedulers.CosineAnnealingLR(o, T_max=5, eta_min=1e-5),
    "WarmRestarts": lambda o: schedulers.CosineAnnealingWarmRestarts(o, T_0=4, T_mult=2, eta_min=1e-5),
    "OneCycleLR": lambda o: schedulers.OneCycleLR(o, max_lr=o.defaults["lr"], total_steps=30),
    "OneCycleLR-linear": lambda o: schedulers.OneCycleLR(
        o, max_lr=o.defaults["lr"], total_steps=30, anneal_strategy="linear", three_phase=True, pct_start=0.4
    ),
    "SequentialLR": sequential,
    "SequentialLR-nested": nested,
    "ChainedScheduler": chained,
    "of-our-own": FromBase,
}


def make(kind: str, base: float, *, tensor: bool = False, optimizer: Any = torch.optim.Adam) -> Made:
    options = {"foreach": False} if tensor else {}
    parameters = [torch.nn.Parameter(torch.zeros(2))]
    made = optimizer(parameters, lr=torch.tensor(base, dtype=torch.float64) if tensor else base, **options)
    if kind == "two":
        return made, [schedulers.StepLR(made, step_size=3, gamma=0.5), schedulers.ExponentialLR(made, gamma=0.9)]
    return made, [KINDS[kind](made)]


def advance(made: Made) -> float:
    """Steps the optimizer, then its schedulers; returns the rate that was used."""
    optimizer, stepped = made
    rate = float(optimizer.param_groups[0]["lr"])
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    for scheduler in stepped:
        scheduler.step()
    return rate


def restored(origin: Made, branch: Made, *bound: Any) -> Hyperparameters:
    """Puts the state of one program into another that has the new base, and applies that as a branch does."""
    optimizer, stepped = branch
    hyperparameters = Hyperparameters({"learning_rate": [*bound] or [optimizer, *stepped]})
    what = {}
    live: dict[str, Any] = {}
    for name, source, target in zip("oab", [origin[0], *origin[1]], [optimizer, *stepped], strict=False):
        what[name] = state.encode(restore.capture(restore.bind({name: source}))[name])
        live[name] = target
    adjustment = Adjustment(then=lambda: hyperparameters.apply({"learning_rate": NEW}))
    restore.apply(restore.bind(live), what, source="the checkpoint", adjustment=adjustment)
    return hyperparameters


@pytest.mark.parametrize("steps", [0, 1, 4, 7, 10])
@pytest.mark.parametrize("kind", [*KINDS, "two"])
def test_the_schedule_goes_on_as_if_it_had_begun_at_the_new_base(kind: str, steps: int) -> None:
    origin, branch, expected = make(kind, OLD), make(kind, NEW), make(kind, NEW)
    for _ in range(steps):
        advance(origin)
        advance(expected)
    hyperparameters = restored(origin, branch)
    for _ in range(12):
        hyperparameters.verify()
        assert advance(branch) == pytest.approx(advance(expected), rel=ROUNDING, abs=0)
    hyperparameters.verify()
    # proven: nobody looks any more
    branch[0].param_groups[0]["lr"] = OLD
    advance(branch)
    hyperparameters.verify()


@pytest.mark.parametrize("kind", ["LambdaLR", "StepLR", "OneCycleLR", "SequentialLR"])
@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW], ids=["SGD", "AdamW-tensor"])
def test_other_optimizers_and_rates_that_are_tensors(kind: str, optimizer: Any) -> None:
    options: Any = {"optimizer": optimizer, "tensor": optimizer is torch.optim.AdamW}
    if optimizer is torch.optim.SGD:
        optimizer = options["optimizer"] = lambda parameters, **more: torch.optim.SGD(parameters, momentum=0.9, **more)
    if options["tensor"] and kind == "OneCycleLR":
        options["tensor"] = False
    origin, branch, expected = make(kind, OLD, **options), make(kind, NEW, **options), make(kind, NEW, **options)
    for _ in range(7):
        advance(origin)
        advance(expected)
    live = branch[0].param_groups[0]["lr"]
    hyperparameters = restored(origin, branch)
    for _ in range(12):
        hyperparameters.verify()
        assert advance(branch) == pytest.approx(advance(expected), rel=ROUNDING, abs=0)
    assert isinstance(branch[0].param_groups[0]["lr"], type(live))


def test_the_scheduler_alone_can_be_bound() -> None:
    origin, branch = make("LambdaLR", OLD), make("LambdaLR", NEW)
    advance(origin)
    hyperparameters = restored(origin, branch, branch[1][0])
    assert advance(branch) == NEW * half(1)
    hyperparameters.verify()
    assert advance(branch) == NEW * half(2)


def test_the_same_value_changes_nothing_to_the_last_bit() -> None:
    for kind in KINDS:
        made, twin = make(kind, NEW), make(kind, NEW)
        for _ in range(7):
            advance(made)
            advance(twin)
        Hyperparameters({"lr": made[1]}).apply({"lr": NEW})
        assert [advance(made) for _ in range(9)] == [advance(twin) for _ in range(9)], kind
    # 0.03 / (0.03 / b) is not b
    optimizer = torch.optim.Adam([torch.nn.Parameter(torch.zeros(2))])
    cycle = schedulers.OneCycleLR(optimizer, max_lr=0.03, total_steps=30, div_factor=7.0, final_div_factor=33.0)
    before = optimizer.state_dict()["param_groups"]
    Hyperparameters({"lr": cycle}).apply({"lr": 0.03})
    assert optimizer.state_dict()["param_groups"] == before


def test_plateaus_have_no_base_and_go_on_from_the_value_itself() -> None:
    optimizer = torch.optim.Adam([torch.nn.Parameter(torch.zeros(2))], lr=OLD)
    plateau = schedulers.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, min_lr=1e-5)
    for _ in range(3):
        plateau.step(1.0)
    assert optimizer.param_groups[0]["lr"] == OLD / 4
    hyperparameters = Hyperparameters({"lr": [optimizer, plateau]})
    hyperparameters.apply({"lr": NEW})
    for expected in (NEW, NEW / 2, NEW / 4):
        hyperparameters.verify()
        assert advance((optimizer, [])) == expected
        plateau.step(1.0)
    hyperparameters.verify()
    hyperparameters.apply({"lr": NEW})
    plateau.step(1.0)
    optimizer.param_groups[0]["lr"] = OLD
    advance((optimizer, []))
    with pytest.raises(OverrideNotAppliedError, match=r"has 0\.001"):
        hyperparameters.verify()


@pytest.mark.parametrize("kind", ["LambdaLR", "CosineAnnealingLR", "WarmRestarts", "OneCycleLR", "ExponentialLR"])
def test_an_optimizer_without_its_scheduler_is_refused(kind: str) -> None:
    optimizer, _ = make(kind, OLD)
    with pytest.raises(ConfigurationError, match="bind the scheduler too"):
        Hyperparameters({"learning_rate": optimizer})
    Hyperparameters({"weight_decay": optimizer})


def test_a_scheduler_that_was_made_later_is_refused_when_a_rate_is_changed() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(2))], lr=OLD)
    hyperparameters = Hyperparameters({"learning_rate": optimizer})
    schedulers.LambdaLR(optimizer, half)
    with pytest.raises(OverrideNotAppliedError, match=r"'learning_rate': .*bind the scheduler too") as caught:
        hyperparameters.apply({"learning_rate": NEW})
    assert (caught.value.key, optimizer.param_groups[0]["lr"]) == ("learning_rate", OLD)


def test_a_scheduler_that_was_made_after_the_change_is_found_out() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(2))], lr=OLD)
    hyperparameters = Hyperparameters({"learning_rate": optimizer})
    hyperparameters.apply({"learning_rate": NEW})
    scheduler = schedulers.ExponentialLR(optimizer, gamma=0.5)
    advance((optimizer, [scheduler]))
    with pytest.raises(OverrideNotAppliedError, match="bind the scheduler too"):
        hyperparameters.verify()


def taken_by_constant(made: Made) -> None:
    made[0].param_groups[0]["lr"] = OLD


def taken_by_loading(made: Made) -> None:
    made[1][0].load_state_dict(make("LambdaLR", OLD)[1][0].state_dict())


def taken_by_another_schedule(made: Made) -> None:
    made[0].param_groups[0]["lr"] *= 0.5


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("take", [taken_by_constant, taken_by_another_schedule, taken_by_loading])
def test_a_rate_that_is_lost_is_found_out(take: Callable[[Made], None], when: str) -> None:
    origin, branch = make("LambdaLR", OLD), make("LambdaLR", NEW)
    for _ in range(3):
        advance(origin)
    hyperparameters = restored(origin, branch)
    hyperparameters.verify()
    if when == "before":
        take(branch)
    advance(branch)
    if when == "after":
        take(branch)
    with pytest.raises(OverrideNotAppliedError, match=r"'learning_rate' was set to 0\.00025") as caught:
        hyperparameters.verify()
    assert caught.value.key == "learning_rate"


def test_a_constant_under_a_schedule_that_multiplies_is_found_out() -> None:
    # the scheduler goes on from the constant, as if nothing had happened
    made = make("ExponentialLR", OLD)
    hyperparameters = Hyperparameters({"lr": made[1]})
    hyperparameters.apply({"lr": NEW})
    advance((made[0], []))
    made[0].param_groups[0]["lr"] = OLD
    made[1][0].step()
    with pytest.raises(OverrideNotAppliedError, match="lr"):
        hyperparameters.verify()


class Constant(schedulers.LRScheduler):
    """Has a rate of its own, whatever the base is."""

    def get_lr(self) -> list[float]:
        return [3e-3 / (1 + self.last_epoch) for _ in self.base_lrs]


def test_a_scheduler_that_ignores_its_base_is_found_out_before_training_goes_on() -> None:
    optimizer = torch.optim.Adam([torch.nn.Parameter(torch.zeros(2))], lr=OLD)
    scheduler = Constant(optimizer)
    advance((optimizer, [scheduler]))
    rate, bases = optimizer.param_groups[0]["lr"], list(scheduler.base_lrs)
    with pytest.raises(OverrideNotAppliedError, match="does not compute its rates from base_lrs"):
        Hyperparameters({"lr": scheduler}).apply({"lr": NEW})
    assert (optimizer.param_groups[0]["lr"], scheduler.base_lrs) == (rate, bases)


class WithLoss(FromBase):
    """Needs an argument, so that nobody else can step it."""

    def step(self, loss: float | None = None) -> None:
        if self._step_count and loss is None:
            raise ValueError("the loss is missing")
        super().step()


def test_a_scheduler_that_cannot_be_foretold_is_held_to_its_base() -> None:
    optimizer = torch.optim.Adam([torch.nn.Parameter(torch.zeros(2))], lr=OLD)
    scheduler = WithLoss(optimizer)
    hyperparameters = Hyperparameters({"lr": scheduler})
    hyperparameters.apply({"lr": NEW})
    for _ in range(3):
        hyperparameters.verify()
        advance((optimizer, []))
        scheduler.step(1.0)
    hyperparameters.verify()
    hyperparameters.apply({"lr": NEW})
    scheduler.step(1.0)
    scheduler.base_lrs[0] = OLD
    with pytest.raises(OverrideNotAppliedError, match=r"the base rate of WithLoss for group 0 has 0\.001"):
        hyperparameters.verify()


def test_epochs_in_fractions_are_no_loss() -> None:
    made = make("WarmRestarts", OLD)
    hyperparameters = Hyperparameters({"lr": made[1]})
    made[1][0].step(1.25)
    hyperparameters.apply({"lr": NEW})
    for epoch in (1.5, 1.75, 5.25):
        hyperparameters.verify()
        advance((made[0], []))
        made[1][0].step(epoch)
        # the formula of SGDR (Loshchilov and Hutter 2017, eq. 5); the second cycle begins at 4 and lasts 8
        position = epoch / 4 if epoch < 4 else (epoch - 4) / 8
        expected = 1e-5 + (NEW - 1e-5) * (1 + math.cos(math.pi * position)) / 2
        assert made[0].param_groups[0]["lr"] == pytest.approx(expected, rel=ROUNDING)
    hyperparameters.verify()


def test_many_steps_of_a_scheduler_between_two_of_the_checkpointer() -> None:
    made = make("LambdaLR", OLD)
    hyperparameters = Hyperparameters({"lr": made[1]})
    hyperparameters.apply({"lr": NEW})
    for _ in range(500):
        advance(made)
    hyperparameters.verify()


def test_groups_with_rates_of_their_own() -> None:
    def two() -> tuple[torch.optim.Optimizer, Any]:
        groups = [{"params": [torch.nn.Parameter(torch.zeros(2))], "lr": rate} for rate in (1e-3, 1e-2)]
        optimizer = torch.optim.Adam(groups)
        return optimizer, schedulers.LambdaLR(optimizer, [half, lambda epoch: 0.9**epoch])

    optimizer, scheduler = two()
    with pytest.raises(ConfigurationError, match=r"different values of 'lr' \(0.001, 0.01\)"):
        Hyperparameters({"lr": scheduler})
    hyperparameters = Hyperparameters({"actor_lr": (scheduler, 0), "critic_lr": [(optimizer, "lr", 1), scheduler]})
    advance((optimizer, [scheduler]))
    hyperparameters.apply({"critic_lr": 1e-4})
    assert scheduler.base_lrs == [1e-3, 1e-4]
    hyperparameters.apply({"actor_lr": 1e-5, "critic_lr": 1e-6})
    for epoch in range(1, 4):
        hyperparameters.verify()
        assert [group["lr"] for group in optimizer.param_groups] == [1e-5 * half(epoch), 1e-6 * 0.9**epoch]
        advance((optimizer, [scheduler]))
    with pytest.raises(ConfigurationError, match="of 2"):
        Hyperparameters({"lr": (scheduler, 2)})


def test_an_apply_can_be_taken_back() -> None:
    for kind in KINDS:
        made, twin = make(kind, OLD), make(kind, OLD)
        for _ in range(7):
            advance(made)
            advance(twin)
        hyperparameters = Hyperparameters({"lr": made[1]})
        hyperparameters.apply({"lr": NEW})
        hyperparameters.take_back()
        assert not state.differences(made[1][0].state_dict(), twin[1][0].state_dict()), kind
        assert not state.differences(made[0].state_dict(), twin[0].state_dict()), kind
        assert [advance(made) for _ in range(9)] == [advance(twin) for _ in range(9)], kind


def test_foretelling_leaves_functions_with_a_state_alone() -> None:
    made, twin = make("LambdaLR-callable", OLD), make("LambdaLR-callable", OLD)
    hyperparameters = Hyperparameters({"lr": made[1]})
    hyperparameters.apply({"lr": NEW})
    for _ in range(3):
        hyperparameters.verify()
        advance(made)
        advance(twin)
    assert made[1][0].lr_lambdas[0].calls == twin[1][0].lr_lambdas[0].calls


def cyclic(optimizer: torch.optim.Optimizer) -> Any:
    return schedulers.CyclicLR(optimizer, base_lr=1e-4, max_lr=1e-3, cycle_momentum=False)


def averaging(optimizer: torch.optim.Optimizer) -> Any:
    return swa_utils.SWALR(optimizer, swa_lr=0.05)


def averaging_at_last(optimizer: torch.optim.Optimizer) -> Any:
    return schedulers.SequentialLR(optimizer, [schedulers.LinearLR(optimizer), averaging(optimizer)], milestones=[5])


def one_cycle_inside(optimizer: torch.optim.Optimizer) -> Any:
    first = schedulers.LinearLR(optimizer)
    return schedulers.SequentialLR(optimizer, [first, schedulers.OneCycleLR(optimizer, 1e-3, 10)], milestones=[5])


def floor_in_a_chain(optimizer: torch.optim.Optimizer) -> Any:
    cosine = schedulers.CosineAnnealingLR(optimizer, T_max=5, eta_min=1e-5)
    return schedulers.ChainedScheduler([cosine, schedulers.ExponentialLR(optimizer, 0.9)], optimizer)


@pytest.mark.parametrize(
    ("maker", "message"),
    [
        pytest.param(cyclic, "CyclicLR goes between two rates", id="CyclicLR"),
        pytest.param(averaging, r"SWALR goes to .*\(optimizer, \"swa_lr\"\)", id="SWALR"),
        pytest.param(averaging_at_last, "SWALR goes to a rate of its own", id="SWALR-inside"),
        pytest.param(one_cycle_inside, "OneCycleLR inside another scheduler", id="OneCycleLR-inside"),
        pytest.param(floor_in_a_chain, "CosineAnnealingLR, ExponentialLR together", id="floor-in-a-chain"),
    ],
)
def test_schedulers_without_one_base_rate_are_refused_by_name(maker: Callable[[Any], Any], message: str) -> None:
    optimizer = torch.optim.Adam([torch.nn.Parameter(torch.zeros(2))], lr=OLD)
    with pytest.raises(ConfigurationError, match=message):
        Hyperparameters({"lr": [optimizer, maker(optimizer)]})


def subclasses(kind: type) -> set[type]:
    return {kind}.union(*map(subclasses, kind.__subclasses__()))


def test_every_scheduler_of_torch_is_tried_or_refused_by_name() -> None:
    tried: set[type] = {schedulers.ReduceLROnPlateau, schedulers.CyclicLR, swa_utils.SWALR, schedulers.LRScheduler}
    for kind in KINDS:
        tried |= {type(scheduler) for scheduler in make(kind, OLD)[1]}
    found = {each for each in subclasses(schedulers.LRScheduler) if each.__module__.startswith("torch.")}
    # torch's alias for programs of before 2.0
    assert {each.__name__ for each in found - tried} <= {"_LRScheduler"}


def test_the_rate_that_weights_are_averaged_at_is_an_option_and_the_rate_before_is_its_schedulers() -> None:
    def trained(base: float, last: float, *, then: float | None = None) -> list[float]:
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(2))], lr=base)
        scheduler, averaged = schedulers.ExponentialLR(optimizer, 0.9), swa_utils.SWALR(optimizer, last, 3)
        hyperparameters = Hyperparameters({"swa_lr": optimizer, "learning_rate": scheduler})
        if then is not None:
            hyperparameters.apply({"swa_lr": then, "learning_rate": NEW})
        rates = [advance((optimizer, [scheduler])) for _ in range(3)]
        hyperparameters.verify()
        return rates + [advance((optimizer, [averaged])) for _ in range(5)]

    assert trained(OLD, 0.05, then=0.02) == pytest.approx(trained(NEW, 0.02), rel=ROUNDING)


@pytest.mark.parametrize("forgotten", ["scheduler", "optimizer"])
@pytest.mark.parametrize("kind", sorted(KINDS.keys() - {"OneCycleLR", "OneCycleLR-linear"}))
def test_a_scheduler_that_was_not_restored_with_its_optimizer_is_refused_or_in_force(kind: str, forgotten: str) -> None:
    origin, branch, expected = make(kind, OLD), make(kind, NEW), make(kind, NEW)
    for _ in range(7):
        advance(origin)
        advance(expected)
    optimizer, (scheduler,) = branch
    if forgotten == "scheduler":
        optimizer.load_state_dict(origin[0].state_dict())
    else:
        scheduler.load_state_dict(origin[1][0].state_dict())
    rate = optimizer.param_groups[0]["lr"]
    hyperparameters = Hyperparameters({"learning_rate": [optimizer, scheduler]})
    if forgotten == "optimizer" and kind in ("LambdaLR", "LambdaLR-callable", "WarmRestarts"):
        # these compute each rate from the base alone
        hyperparameters.apply({"learning_rate": NEW})
        assert advance(branch) == pytest.approx(advance(expected), rel=ROUNDING)
        return
    restored, anew = type(optimizer).__name__, "[A-Za-z]+ is as the program made it"
    if forgotten == "optimizer":
        restored, anew = "[A-Za-z]+", f"{restored} is as the program made it"
    message = rf"'learning_rate' cannot be set to 0\.00025, for {restored} has been restored, and {anew}"
    with pytest.raises(OverrideNotAppliedError, match=message) as caught:
        hyperparameters.apply({"learning_rate": NEW})
    assert (caught.value.key, caught.value.wanted, caught.value.found) == ("learning_rate", NEW, OLD)
    assert optimizer.param_groups[0]["lr"] == rate


def test_a_scheduler_next_to_another_option_is_refused() -> None:
    optimizer, (scheduler,) = make("LambdaLR", OLD)
    with pytest.raises(ConfigurationError, match="which sets 'lr', and to another option as well"):
        Hyperparameters({"weight_decay": [optimizer, scheduler]})


def test_a_momentum_that_a_cycle_drives_is_found_out() -> None:
    made = make("OneCycleLR", OLD)
    hyperparameters = Hyperparameters({"lr": made[1], "betas": made[0]})
    hyperparameters.apply({"betas": [0.7, 0.99]})
    advance(made)
    with pytest.raises(OverrideNotAppliedError, match="'betas' was set to"):
        hyperparameters.verify()
