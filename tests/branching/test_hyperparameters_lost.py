"""Scripts that lose an override, in each way that is known: it is told by name, and no checkpoint claims it unsaid."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch

import simckpt
from simckpt.errors import OverrideNotAppliedError

OLD, NEW = 0.1, 0.01
ARGS = {"learning_rate": OLD, "clip": 1.0}


@dataclasses.dataclass
class Script:
    """A training script with a fault; each start is made by `run`.

    Attributes:
        binds: what the script says holds the rate, given its optimizer and scheduler.
        scheduler: makes one, or None.
        registers: whether the scheduler is a component.
        after_restore: is given the optimizer and what was restored; returns the optimizer that the loop steps.
        starts: the step from which on the loop learns.
        saves: `step` or `save`: what the loop calls at every step; or "" for nothing.
        free: keys that may differ between starts.
    """

    binds: Callable[[torch.optim.Optimizer, Any], Any] = lambda optimizer, scheduler: optimizer
    scheduler: Callable[[torch.optim.Optimizer], Any] | None = None
    registers: bool = True
    after_restore: Callable[[torch.optim.Optimizer, simckpt.Checkpoint | None], torch.optim.Optimizer] = (
        lambda optimizer, restored: optimizer
    )
    starts: int = 0
    saves: str = "step"
    free: frozenset[str] = frozenset()

    def run(self, store: simckpt.Store, name: str, until: int, **given: Any) -> list[float]:
        """Returns the rates that training used, by step."""
        with store.start(name) as run:
            args = run.configure({**ARGS, **given}, defaults=ARGS, free=self.free)
            torch.manual_seed(0)
            model = torch.nn.Linear(3, 1)
            optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=args["learning_rate"])
            scheduler = None if self.scheduler is None else self.scheduler(optimizer)
            loop = simckpt.LoopState(step=0, clip=args["clip"])
            components: dict[str, Any] = {"model": model, "optimizer": optimizer, "loop": loop}
            if scheduler is not None and self.registers:
                components["scheduler"] = scheduler
            hyperparameters = simckpt.Hyperparameters(
                {"learning_rate": self.binds(optimizer, scheduler), "clip": (loop, "clip")}
            )
            rates = []
            with run.checkpointer(
                components, save_when=simckpt.EverySteps(2), hyperparameters=hyperparameters, background=None
            ) as checkpointer:
                trained = self.after_restore(optimizer, checkpointer.restore_latest())
                while loop.step < until:
                    if loop.step >= self.starts:
                        rates.append(trained.param_groups[0]["lr"])
                        trained.zero_grad()
                        for parameter in trained.param_groups[0]["params"]:
                            parameter.grad = torch.ones_like(parameter)
                        trained.step()
                        if scheduler is not None:
                            scheduler.step()
                    loop.step += 1
                    if self.saves:
                        getattr(checkpointer, self.saves)(loop.step)
        return rates


def anew(optimizer: torch.optim.Optimizer, restored: simckpt.Checkpoint | None) -> torch.optim.Optimizer:
    return torch.optim.SGD(optimizer.param_groups[0]["params"], lr=OLD)


def all_anew(optimizer: torch.optim.Optimizer, restored: simckpt.Checkpoint | None) -> torch.optim.Optimizer:
    return torch.optim.SGD(torch.nn.Linear(3, 1).parameters(), lr=OLD)


def set_to_old(optimizer: torch.optim.Optimizer, restored: simckpt.Checkpoint | None) -> torch.optim.Optimizer:
    optimizer.param_groups[0]["lr"] = OLD
    return optimizer


def set_to_old_later(optimizer: torch.optim.Optimizer, restored: simckpt.Checkpoint | None) -> torch.optim.Optimizer:
    if restored is not None and restored.run == "b":
        optimizer.param_groups[0]["lr"] = OLD
    return optimizer


def left_over(optimizer: torch.optim.Optimizer, scheduler: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(optimizer.param_groups[0]["params"], lr=OLD)


def exponential(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)


def both(optimizer: torch.optim.Optimizer, scheduler: Any) -> list[Any]:
    return [optimizer, scheduler]


@pytest.fixture
def store(tmp_path) -> simckpt.Store:
    """A store with a run "a" of 4 steps, from which "b" was branched."""
    store = simckpt.Store(tmp_path / "s")
    Script().run(store, "a", 4)
    store.run("a").latest().branch("b", {"learning_rate": NEW})
    return store


@pytest.mark.parametrize(
    ("script", "message"),
    [
        pytest.param(Script(binds=left_over), "another one, of class SGD, steps its parameters", id="another-is-bound"),
        pytest.param(Script(after_restore=anew), "another one, of class SGD, steps its parameters", id="made-anew"),
        pytest.param(Script(after_restore=set_to_old), r"after training went on group 0 of SGD has 0\.1", id="set"),
        pytest.param(Script(after_restore=set_to_old, saves="save"), r"group 0 of SGD has 0\.1", id="set-and-saved"),
        pytest.param(Script(after_restore=set_to_old, saves=""), r"group 0 of SGD has 0\.1", id="set-and-never-saved"),
        pytest.param(Script(after_restore=anew, saves=""), "another one, of class SGD", id="made-anew-and-never-saved"),
    ],
)
def test_a_lost_override_stops_the_branch_before_a_checkpoint_claims_it(
    script: Script, message: str, store: simckpt.Store
) -> None:
    with pytest.raises(OverrideNotAppliedError, match=f"'learning_rate' was set to 0.01.*{message}") as caught:
        script.run(store, "b", 10)
    assert caught.value.key == "learning_rate"
    assert store.run("b").checkpoints() == []
    assert Script().run(store, "b", 6) == [NEW, NEW]


def test_a_scheduler_that_is_no_component_is_told_before_training_goes_on(tmp_path) -> None:
    store, script = simckpt.Store(tmp_path / "s"), Script(binds=both, scheduler=exponential, registers=False)
    script.run(store, "a", 4)
    store.run("a").latest().branch("b", {"learning_rate": NEW})
    with pytest.raises(
        OverrideNotAppliedError, match="SGD has been restored, and ExponentialLR is as the program made"
    ):
        script.run(store, "b", 10)
    assert store.run("b").checkpoints() == []


def test_an_optimizer_of_another_model_is_told_at_the_first_save_and_at_the_end(store: simckpt.Store) -> None:
    # the parameters are others, so that nobody can know whether it trains instead
    with pytest.warns(simckpt.BranchWarning) as caught:
        assert Script(after_restore=all_anew).run(store, "b", 10) == [OLD] * 6
    told = [str(each.message) for each in caught]
    assert [text.split(",")[0] for text in told] == ["run 'b' saves step 6", "run 'b' has ended at step 10"]
    assert all("'learning_rate' in 'lr' of SGD" in text for text in told)


def test_a_loop_that_learns_later_is_told_that_its_override_waits_and_goes_on(store: simckpt.Store) -> None:
    with pytest.warns(simckpt.BranchWarning, match="run 'b' saves step 6.* have not been seen in force yet") as caught:
        rates = Script(starts=9).run(store, "b", 12)
    assert rates == [NEW] * 3
    assert len(caught) == 1


def test_an_override_that_waits_is_watched_by_the_next_start(store: simckpt.Store) -> None:
    with pytest.warns(simckpt.BranchWarning):
        Script(starts=9).run(store, "b", 8)
    with pytest.raises(OverrideNotAppliedError, match=r"'learning_rate' was restored as 0\.01, but .* has 0\.1"):
        Script(starts=9, after_restore=set_to_old).run(store, "b", 12)
    assert Script(starts=9).run(store, "b", 10) == [NEW]


@pytest.mark.parametrize(
    ("after_restore", "message"),
    [
        pytest.param(
            set_to_old_later, r"'learning_rate' was restored as 0\.01.* but .* group 0 of SGD has 0\.1", id="set"
        ),
        pytest.param(anew, r"'learning_rate' was restored as 0\.01 in 'lr' of SGD.* steps its", id="made-anew"),
    ],
)
@pytest.mark.parametrize("scheduled", [False, True], ids=["constant", "scheduled"])
def test_an_override_that_a_later_start_loses_is_told_by_name(
    after_restore: Any, message: str, scheduled: bool, tmp_path
) -> None:
    store, script = simckpt.Store(tmp_path / "s"), Script()
    if scheduled:
        script = Script(binds=both, scheduler=exponential)
    script.run(store, "a", 4)
    store.run("a").latest().branch("b", {"learning_rate": NEW})
    script.run(store, "b", 8)
    with pytest.raises(OverrideNotAppliedError, match=message):
        dataclasses.replace(script, after_restore=after_restore).run(store, "b", 12)
    assert store.run("b").latest().step == 8
    rate = NEW * 0.9**8 if scheduled else NEW
    assert script.run(store, "b", 9) == [pytest.approx(rate, rel=1e-12)]


def test_an_override_of_an_ancestor_is_watched_in_its_descendants(store: simckpt.Store) -> None:
    Script().run(store, "b", 6)
    store.run("b").latest().branch("c", {"clip": 0.5})
    with pytest.raises(OverrideNotAppliedError, match=r"'learning_rate' was restored as 0\.01"):
        Script(after_restore=set_to_old).run(store, "c", 10)
    assert Script().run(store, "c", 8) == [NEW, NEW]


def test_a_state_that_lacks_an_override_is_told_by_name_and_goes_on_as_it_is(store: simckpt.Store) -> None:
    def lost_later(optimizer: torch.optim.Optimizer, restored: Any) -> torch.optim.Optimizer:
        def lose(*_: Any) -> None:
            steps.append(1)
            if len(steps) == 3:  # proven by then
                optimizer.param_groups[0]["lr"] = OLD

        steps: list[int] = []
        optimizer.register_step_post_hook(lose)
        return optimizer

    assert Script(after_restore=lost_later).run(store, "b", 8) == [NEW, NEW, NEW, OLD]
    with pytest.warns(
        simckpt.BranchWarning, match=r"'learning_rate' is 0\.01 since .* group 0 of SGD has 0\.1"
    ) as told:
        assert Script().run(store, "b", 10) == [OLD, OLD]
    assert told[0].filename == __file__


def test_a_warning_that_is_an_error_leaves_everything_as_it_was(store: simckpt.Store) -> None:
    def lost(optimizer: torch.optim.Optimizer, restored: Any) -> torch.optim.Optimizer:
        optimizer.register_step_post_hook(
            lambda *_: optimizer.param_groups[0].update(lr=OLD) if len(seen) > 1 else None
        )
        optimizer.register_step_post_hook(lambda *_: seen.append(1))
        return optimizer

    seen: list[int] = []
    Script(after_restore=lost).run(store, "b", 8)
    with store.start("b") as run:
        run.configure(ARGS, defaults=ARGS)
        model = torch.nn.Linear(3, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=7.0)
        loop = simckpt.LoopState(step=0, clip=3.0)
        checkpointer = run.checkpointer(
            {"model": model, "optimizer": optimizer, "loop": loop},
            save_when=simckpt.EverySteps(2),
            hyperparameters=simckpt.Hyperparameters({"learning_rate": optimizer}),
        )
        with pytest.raises(simckpt.BranchWarning):
            checkpointer.restore_latest()
        assert (loop.step, loop.clip, optimizer.param_groups[0]["lr"]) == (0, 3.0, 7.0)


def test_a_loop_that_saves_before_it_has_trained_says_nothing(store: simckpt.Store) -> None:
    with store.start("b") as run:
        args = run.configure(ARGS, defaults=ARGS)
        model = torch.nn.Linear(3, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=args["learning_rate"])
        loop = simckpt.LoopState(step=0, clip=1.0)
        hyperparameters = simckpt.Hyperparameters({"learning_rate": optimizer})
        with run.checkpointer(
            {"model": model, "optimizer": optimizer, "loop": loop},
            save_when=simckpt.OverheadBudget(0.01),
            hyperparameters=hyperparameters,
        ) as checkpointer:
            checkpointer.restore_latest()
            # at the top of a loop that has nothing left to do
            assert checkpointer.step(loop.step) is not None


def test_a_branch_that_is_at_its_end_already_says_nothing(store: simckpt.Store) -> None:
    assert Script().run(store, "b", 4) == []
    Script().run(store, "b", 6)
    assert Script().run(store, "b", 6) == []


@pytest.mark.parametrize("scheduled", [False, True], ids=["constant", "scheduled"])
def test_a_free_key_that_is_given_at_a_later_start_is_set_in_what_holds_it(scheduled: bool, tmp_path) -> None:
    store, script = simckpt.Store(tmp_path / "s"), Script(free=frozenset({"learning_rate", "clip"}))
    if scheduled:
        script = dataclasses.replace(script, binds=both, scheduler=exponential)
    script.run(store, "a", 4)
    store.run("a").latest().branch("b", {"learning_rate": NEW})
    script.run(store, "b", 6)
    factor = 0.9**6 if scheduled else 1.0
    assert script.run(store, "b", 7, learning_rate=0.5) == [pytest.approx(0.5 * factor, rel=1e-12)]
    # a run that is no branch too
    factor = 0.9**4 if scheduled else 1.0
    assert script.run(store, "a", 5, learning_rate=0.5, clip=0.25) == [pytest.approx(0.5 * factor, rel=1e-12)]
    assert store.run("a").checkpoints()[-1]["loop"]["clip"] == 1.0
    script.run(store, "a", 6, learning_rate=0.5, clip=0.25)
    assert store.run("a").latest()["loop"]["clip"] == 0.25


def test_what_holds_an_override_and_is_no_state_has_it_at_every_start(tmp_path) -> None:
    def start(name: str, until: int) -> list[tuple[float, float]]:
        """A script that makes its optimizer and settings of constants, and saves neither."""
        with store.start(name) as run:
            run.configure(ARGS, defaults=ARGS)
            loop, settings = simckpt.LoopState(step=0), {"clip": 1.0}
            optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=OLD)
            hyperparameters = simckpt.Hyperparameters({"learning_rate": optimizer, "clip": (settings, "clip")})
            seen = []
            with run.checkpointer(
                {"loop": loop}, save_when=simckpt.EverySteps(2), hyperparameters=hyperparameters
            ) as checkpointer:
                checkpointer.restore_latest()
                while loop.step < until:
                    seen.append((optimizer.param_groups[0]["lr"], settings["clip"]))
                    optimizer.step()
                    loop.step += 1
                    checkpointer.step(loop.step)
        return seen

    store = simckpt.Store(tmp_path / "s")
    start("a", 2)
    store.run("a").latest().branch("b", {"learning_rate": NEW, "clip": 0.5})
    for until in (4, 6, 8):
        assert start("b", until) == [(NEW, 0.5)] * 2
    store.run("b").latest().branch("c", {"clip": 0.25})
    for until in (10, 12):
        assert start("c", until) == [(NEW, 0.25)] * 2
