"""Overrides of branches through a store, with the script of the origin."""

import argparse
from pathlib import Path
from typing import Any

import pytest
import torch

import simckpt
from simckpt.branching.hyperparameters import Hyperparameters
from simckpt.errors import OverrideNotAppliedError

SCHEDULERS: dict[str, Any] = {
    "LambdaLR": lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda epoch: 1 / (1 + epoch)),
    "OneCycleLR": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, max_lr=o.defaults["lr"], total_steps=30),
    "CosineAnnealingLR": lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, T_max=20, eta_min=1e-5),
    "WarmRestarts": lambda o: torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(o, T_0=4),
}
OPTIMIZERS = {"Adam": torch.optim.Adam, "SGD": torch.optim.SGD}


def train(
    path: Path, name: str, *, optimizer: str, scheduler: str | None, until: int, unbound: bool = False
) -> tuple[list[float], torch.Tensor]:
    """The script of every run here; returns the rates that it used by step, and the parameters."""
    with simckpt.Store(path).start(name) as run:
        args = run.configure(argparse.Namespace(learning_rate=1e-2, optimizer=optimizer))
        torch.manual_seed(3)
        model = torch.nn.Linear(4, 1)
        made = OPTIMIZERS[args.optimizer](model.parameters(), lr=args.learning_rate)
        loop = simckpt.LoopState(step=0)
        components: dict[str, Any] = {"model": model, "optimizer": made, "rng": simckpt.RNGStreams(), "loop": loop}
        if scheduler is not None:
            components["scheduler"] = SCHEDULERS[scheduler](made)
        held = (
            [] if unbound else [component for key, component in components.items() if key in ("optimizer", "scheduler")]
        )
        hyperparameters = Hyperparameters({"learning_rate": held} if held else {}, from_args={"optimizer"})
        rates = []
        with run.checkpointer(
            components, save_when=simckpt.EverySteps(5), hyperparameters=hyperparameters, background=None
        ) as checkpointer:
            checkpointer.restore_latest()
            while loop.step < until:
                rates.append(made.param_groups[0]["lr"])
                made.zero_grad()
                model(torch.randn(8, 4)).square().mean().backward()
                made.step()
                if scheduler is not None:
                    components["scheduler"].step()
                loop.step += 1
                checkpointer.step(loop.step)
        return rates, torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


@pytest.mark.parametrize("scheduler", [None, *SCHEDULERS])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_an_overridden_rate_is_in_force_in_the_branch(optimizer: str, scheduler: str | None, tmp_path: Path) -> None:
    script: dict[str, Any] = {"optimizer": optimizer, "scheduler": scheduler}
    rates, _ = train(tmp_path, "origin", **script, until=10)
    origin = simckpt.Store(tmp_path).run("origin").latest()
    origin.branch("low", {"learning_rate": 1e-3})
    origin.branch("same")
    found, low = train(tmp_path, "low", **script, until=20)
    going_on, ended = train(tmp_path, "origin", **script, until=20)
    # the rates of a schedule from the new base, as torch gives them
    parameter = torch.nn.Parameter(torch.zeros(1))
    alone = OPTIMIZERS[optimizer]([parameter], lr=1e-3)
    stepped = None if scheduler is None else SCHEDULERS[scheduler](alone)
    expected = []
    for _ in range(20):
        expected.append(alone.param_groups[0]["lr"])
        alone.step()
        if stepped is not None:
            stepped.step()
    # rounding: cosine annealing goes on from the rate that it finds
    assert found == pytest.approx(expected[10:], rel=1e-12)
    assert not torch.equal(low, ended)
    again, same = train(tmp_path, "same", **script, until=20)
    assert again == going_on
    assert torch.equal(same, ended)
    assert len(rates) == 10


def test_a_branch_that_was_killed_goes_on_under_its_override(tmp_path: Path) -> None:
    script: dict[str, Any] = {"optimizer": "Adam", "scheduler": "CosineAnnealingLR"}
    train(tmp_path, "origin", **script, until=10)
    origin = simckpt.Store(tmp_path).run("origin").latest()
    for name in ("whole", "parts"):
        origin.branch(name, {"learning_rate": 1e-3})
    rates, whole = train(tmp_path, "whole", **script, until=30)
    first, _ = train(tmp_path, "parts", **script, until=15)
    second, parts = train(tmp_path, "parts", **script, until=30)
    assert first + second == rates
    assert torch.equal(whole, parts)


def test_a_branch_of_a_branch_goes_on_from_the_base_before_it(tmp_path: Path) -> None:
    script: dict[str, Any] = {"optimizer": "SGD", "scheduler": "LambdaLR"}
    train(tmp_path, "origin", **script, until=5)
    simckpt.Store(tmp_path).run("origin").latest().branch("b", {"learning_rate": 1e-3})
    train(tmp_path, "b", **script, until=10)
    simckpt.Store(tmp_path).run("b").latest().branch("c", {"learning_rate": 1e-4})
    rates, _ = train(tmp_path, "c", **script, until=13)
    assert rates == [1e-4 * (1 / (1 + step)) for step in (10, 11, 12)]


def test_an_override_that_nothing_holds_stops_the_branch_before_it_begins(tmp_path: Path) -> None:
    script: dict[str, Any] = {"optimizer": "Adam", "scheduler": None}
    train(tmp_path, "origin", **script, until=5)
    simckpt.Store(tmp_path).run("origin").latest().branch("b", {"learning_rate": 1e-3})
    with pytest.raises(OverrideNotAppliedError, match="nothing says what holds it") as caught:
        train(tmp_path, "b", **script, until=10, unbound=True)
    assert caught.value.key == "learning_rate"
    assert not simckpt.Store(tmp_path).run("b").checkpoints()
    rates, _ = train(tmp_path, "b", **script, until=10)
    assert rates == [1e-3] * 5
