"""What is told of a rollback policy that does, or will not do, what it seems to."""

import logging
import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from rollback_loops import POLICY, Objects, train

import simckpt
from simckpt.errors import ConfigurationError, RolledBack, UpkeepWarning
from simckpt.policies import Call, Change, KeepRows, Reseed, RollbackPolicy, Scale, SetTo

RESEED = replace(POLICY, changes=Reseed())


@pytest.fixture
def store(tmp_path) -> simckpt.Store:
    return simckpt.Store(tmp_path / "s")


def run_through(store: simckpt.Store, policy: RollbackPolicy, given: list[dict[str, Any]]) -> None:
    with store.start("a") as run:
        loop = simckpt.LoopState(step=0)
        with run.checkpointer({"loop": loop}, save_when=simckpt.EverySteps(1000), rollback=policy) as checkpointer:
            for step, metrics in enumerate(given, 1):
                loop.step = step
                checkpointer.step(step, metrics)


@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize("supervised", [True, False])
def test_every_rollback_is_told_once_wherever_the_loop_goes_on(store, caplog, in_place, supervised) -> None:
    with caplog.at_level(logging.WARNING, "simckpt"):
        if supervised:
            simckpt.supervise(train, store, in_place=in_place)
        elif in_place:
            train(store, in_place=True)
        else:
            with pytest.raises(RolledBack):
                train(store)
    (record,) = caplog.records
    assert (record.name, record.levelname) == ("simckpt", "WARNING")
    assert re.match(r"run 'a' went back from step 1\d0 to step 1\d0 \(level 1.*eval/return fell", record.message)


def test_a_loop_that_swallows_the_rollback_is_told_why_the_run_is_closed(store) -> None:
    swallowed: list[RolledBack] = []
    with store.start("a") as run:
        objects = Objects(run.configure({"learning_rate": 0.1, "gamma": 0.99, "num_envs": 2, "seed": 1}))
        with run.checkpointer(objects.components, save_when=simckpt.EverySteps(20), rollback=RESEED) as checkpointer:
            for objects.loop.step in range(1, 31):
                try:
                    checkpointer.step(objects.loop.step, {"loss": np.nan if objects.loop.step == 30 else 0.0})
                except RolledBack as error:
                    swallowed.append(error)
            with pytest.raises(ConfigurationError, match="was closed when it went back from step 30 to step 20: start"):
                checkpointer.step(31)
    assert len(swallowed) == 1


@pytest.mark.parametrize(
    ("changes", "rollbacks", "told"),
    [
        (SetTo(clip=0.1), 2, True),
        (Call(lambda components, level: None), 3, True),
        ([Reseed(), SetTo(clip=0.1)], 3, True),
        ([SetTo(clip=0.1), SetTo(clip=0.1), Reseed()], 2, True),
        (SetTo(clip=0.1), 1, False),
        ([Reseed(), SetTo(clip=0.1)], 2, False),
        ([SetTo(clip=0.1), SetTo(clip=0.2)], 2, False),
        (SetTo(clip=0.1) & Reseed(), 3, False),
        (Scale(clip=0.5), 3, False),
        (KeepRows("replay"), 3, False),
    ],
    ids=str,
)
@pytest.mark.filterwarnings("always::simckpt.UpkeepWarning")
def test_changes_that_replay_the_collapse_are_told_at_the_start(
    store, recwarn, changes: Change | list[Change], rollbacks: int, told: bool
) -> None:
    with store.start("a") as run:
        run.configure({"clip": 0.3})
        loop = simckpt.LoopState(step=0, clip=0.3)
        run.checkpointer(
            {"loop": loop, "replay": simckpt.LoopState(rows=0)},
            save_when=simckpt.EverySteps(1),
            hyperparameters=simckpt.Hyperparameters({"clip": (loop, "clip")}),
            rollback=RollbackPolicy("eval/return", changes=changes, max_rollbacks=rollbacks),
        )
    messages = [str(each.message) for each in recwarn if issubclass(each.category, UpkeepWarning)]
    assert len(messages) == told
    assert all("replay one another" in each and each.endswith("add Reseed()") for each in messages)
    assert all(each.filename == __file__ for each in recwarn)


@pytest.mark.parametrize("values", [1.0, [1.0] * 10], ids=["mean", "episodes"])
def test_a_slip_in_the_metrics_name_is_told_with_the_near_one(store, values) -> None:
    policy = RollbackPolicy("eval/retrun")
    with pytest.warns(UpkeepWarning, match="waits for 'eval/retrun'.*did you mean 'eval/return'") as told:
        run_through(store, policy, [{"eval/return": values, "loss": 0.1}] * 6)
    assert len(told) == 1
    assert told[0].filename == __file__


def test_another_metric_of_the_same_kind_is_told_at_the_end_alone(store) -> None:
    policy = RollbackPolicy("eval/return")
    with pytest.warns(UpkeepWarning, match=r"waits for 'eval/return', which was never given.*'train/return'"):
        run_through(store, policy, [{"train/return": 1.0}] * 9)


@pytest.mark.parametrize(
    "given",
    [
        [{"loss": 0.1}] * 9,
        [{}] * 3,
        [{"train/return": 1.0}] * 9 + [{"eval/return": [1.0] * 10}],
        [{"eval/return_std": 0.1, "eval/return": [1.0] * 10}] * 9,
    ],
)
def test_a_metric_that_comes_late_or_is_not_wanted_is_no_slip(store, given: list[dict[str, Any]]) -> None:
    run_through(store, RollbackPolicy("eval/return"), given)


@pytest.mark.parametrize(("values", "first"), [(1.0, 34), ([1.0], 34), ([1.0, 2.0], 18), ([1.0, 2.0, 3.0], 18)])
def test_too_few_episodes_are_told_once_with_the_first_test(store, values, first: int) -> None:
    with pytest.warns(UpkeepWarning, match=f"fewer than 4 episodes: no test before evaluation {first},") as told:
        run_through(store, RollbackPolicy("eval/return"), [{"eval/return": values}] * 5)
    assert len(told) == 1


def test_episodes_enough_are_not_told(store) -> None:
    run_through(store, RollbackPolicy("eval/return"), [{"eval/return": [1.0, 2.0, 3.0, 4.0]}] * 5)


def test_branches_that_go_back_to_one_origin_draw_numbers_of_their_own_and_again_the_same(store, tmp_path) -> None:
    def seed(name: str, where: simckpt.Store) -> str:
        with where.start(name) as run:
            sampler, loop = np.random.default_rng(1), simckpt.LoopState(step=0)
            checkpointer = run.checkpointer(
                {"sampler": sampler, "loop": loop}, save_when=simckpt.EverySteps(1000), rollback=RESEED, in_place=True
            )
            checkpointer.restore_latest()
            return checkpointer.step(12, {"loss": np.nan}).wait().rollback["changes"]["seed"]

    seeds = []
    for where in (store, simckpt.Store(tmp_path / "again")):
        with where.start("a") as run:
            sampler, loop = np.random.default_rng(1), simckpt.LoopState(step=10)
            origin = run.checkpointer({"sampler": sampler, "loop": loop}, save_when=simckpt.EverySteps(1)).save(10)
        for name in ("b", "c"):
            origin.branch(name, rng="continue")
            seeds.append(seed(name, where))
    assert seeds[:2] == seeds[2:]
    assert seeds[0] != seeds[1]
