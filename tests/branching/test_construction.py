"""Keys of `from_args` that a component took when it was made: its saved state would bring the old value back."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch

import simckpt
from simckpt.branching.construction import refuse_taken
from simckpt.errors import BranchWarning, ConfigurationError, OverrideNotAppliedError

Components = dict[str, Any]


def normalized(args: dict[str, Any]) -> Components:
    envs = simckpt.make_vec("InvertedPendulum-v5", num_envs=2, vectorization_mode="sync")
    return {"envs": gym.wrappers.vector.NormalizeReward(envs, gamma=args["key"])}


def wrapped_within(args: dict[str, Any]) -> Components:
    wrappers = [lambda env: gym.wrappers.NormalizeReward(env, gamma=args["key"])]
    return {"envs": simckpt.make_vec("InvertedPendulum-v5", num_envs=2, vectorization_mode="sync", wrappers=wrappers)}


def reward_weight(args: dict[str, Any]) -> Components:
    options = {"num_envs": 2, "vectorization_mode": "sync", "ctrl_cost_weight": args["key"]}
    return {"envs": simckpt.make_vec("Hopper-v5", **options)}


def single_env(args: dict[str, Any]) -> Components:
    return {"env": gym.make("InvertedPendulum-v5", max_episode_steps=args["key"])}


def dropout(args: dict[str, Any]) -> Components:
    return {"net": torch.nn.Sequential(torch.nn.Linear(4, 1), torch.nn.Dropout(args["key"]))}


def cosine(args: dict[str, Any]) -> Components:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(2))], lr=0.1)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=args["key"])
    return {"optimizer": optimizer, "schedule": schedule}


def weight_decay(args: dict[str, Any]) -> Components:
    return {"optimizer": torch.optim.AdamW([torch.nn.Parameter(torch.zeros(2))], weight_decay=args["key"])}


def variable(args: dict[str, Any]) -> Components:
    return {"own": simckpt.LoopState(limit=args["key"], config={"other": 3})}


def nested(args: dict[str, Any]) -> Components:
    return {"own": simckpt.LoopState(config=[{"limit": args["key"]}, 3])}


def single_precision(args: dict[str, Any]) -> Components:
    return {"own": simckpt.LoopState(limit=np.float32(args["key"]), scale=torch.tensor([args["key"]]))}


def text(args: dict[str, Any]) -> Components:
    return {"own": simckpt.LoopState(mode=args["key"])}


def rate(args: dict[str, Any]) -> Components:
    return {"optimizer": torch.optim.SGD([torch.nn.Parameter(torch.zeros(2))], lr=args["key"])}


def scheduled_rate(args: dict[str, Any]) -> Components:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(2))], lr=args["key"])
    return {"optimizer": optimizer, "schedule": torch.optim.lr_scheduler.StepLR(optimizer, 5)}


def nothing(args: dict[str, Any]) -> Components:
    return {"own": simckpt.LoopState(count=7)}


def train(
    store: simckpt.Store,
    name: str,
    make: Callable[[dict[str, Any]], Components],
    key: Any,
    declares: Callable[[Components], simckpt.Hyperparameters],
    until: int = 2,
) -> Components:
    """Runs a loop that trains nothing, and returns its components."""
    with store.start(name) as run:
        args = run.configure({"key": key}, defaults={"key": key})
        made = make(args)
        for env in (made[each] for each in ("envs", "env") if each in made):
            env.reset(seed=3)
        components = {**made, "loop": simckpt.LoopState(step=0)}
        with run.checkpointer(
            components, save_when=simckpt.EverySteps(1), hyperparameters=declares(components), background=None
        ) as checkpointer:
            checkpointer.restore_latest()
            while components["loop"].step < until:
                components["loop"].step += 1
                checkpointer.step(components["loop"].step)
    return components


def from_args(components: Components) -> simckpt.Hyperparameters:
    return simckpt.Hyperparameters(from_args={"key"})


@pytest.fixture
def store(tmp_path) -> simckpt.Store:
    return simckpt.Store(tmp_path / "s")


@pytest.mark.parametrize(
    ("make", "old", "new", "place"),
    [
        (normalized, 0.99, 0.9, "envs/vector/around/wrappers/gamma"),
        (wrapped_within, 0.99, 0.9, "gamma"),
        (reward_weight, 1e-3, 0.5, "_ctrl_cost_weight"),
        (single_env, 50, 70, "_max_episode_steps"),
        (dropout, 0.1, 0.5, "net/attributes/1/p"),
        (cosine, 40, 80, "schedule/T_max"),
        (weight_decay, 0.0, 0.1, "optimizer/param_groups/0/weight_decay"),
        (scheduled_rate, 0.1, 0.2, "optimizer/param_groups/0/initial_lr"),
        (variable, 0.25, 0.5, "own/limit"),
        (nested, 5, 7, "own/config/0/limit"),
        (single_precision, 0.3, 0.7, "own/limit"),
        (text, "sum", "mean", "own/mode"),
    ],
)
def test_a_key_that_a_component_took_is_refused_with_its_place(store, make, old, new, place):
    train(store, "a", make, old, from_args)
    store.run("a").latest().branch("b", {"key": new})
    with pytest.raises(OverrideNotAppliedError) as caught:
        train(store, "b", make, old, from_args, until=4)
    message = str(caught.value)
    assert "'key'" in message
    assert place in message
    assert f"as built {new!r}, restored {old!r}" in message
    assert "fresh={'key': {" in message
    assert (caught.value.key, caught.value.wanted, caught.value.found) == ("key", new, old)
    assert not list(store.run("b").checkpoints())


def test_what_the_message_says_to_bind_is_what_helps(store):
    train(store, "a", variable, 0.25, from_args)
    store.run("a").latest().branch("b", {"key": 0.5})
    with pytest.raises(OverrideNotAppliedError) as caught:
        train(store, "b", variable, 0.25, from_args)
    assert """as in {'key': (own, "limit")}""" in str(caught.value)
    assert "fresh={'key': {'own/limit'}}" in str(caught.value)
    bound = train(
        store, "b", variable, 0.25, lambda made: simckpt.Hyperparameters({"key": (made["own"], "limit")}), until=4
    )
    assert bound["own"].limit == 0.5
    store.run("a").latest().branch("c", {"key": 0.5})
    with pytest.warns(BranchWarning, match="'own/limit' begin as the program made them"):
        begun = train(
            store, "c", variable, 0.25, lambda made: simckpt.Hyperparameters(fresh={"key": {"own/limit"}}), until=4
        )
    assert begun["own"].limit == 0.5


def test_a_key_of_fresh_that_another_component_took_is_refused(store):
    def fresh(components: Components) -> simckpt.Hyperparameters:
        return simckpt.Hyperparameters(fresh={"key": {"schedule"}})

    def both(args: dict[str, Any]) -> Components:
        return {**cosine(args), **variable(args)}

    train(store, "a", both, 40, fresh)
    store.run("a").latest().branch("b", {"key": 80})
    with pytest.raises(OverrideNotAppliedError, match="component 'own' took it"):
        train(store, "b", both, 40, fresh)


@pytest.mark.parametrize(
    ("make", "old", "new"),
    [
        (variable, 0, 5),  # a counter has any of these
        (variable, 5, 1),
        (variable, False, True),
        (rate, 0.1, 0.2),  # a loop sets it by a schedule of its own
        (nothing, 0.1, 0.2),
        (nothing, 7, 9),  # saved with the old value, but live it is not the new one
    ],
)
def test_what_may_be_a_coincidence_is_believed(store, make, old, new):
    train(store, "a", make, old, from_args)
    store.run("a").latest().branch("b", {"key": new})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(store, "b", make, old, from_args, until=4)
    assert store.run("b").latest().step == 4


def test_an_override_that_equals_the_origin_is_no_change(store):
    train(store, "a", variable, 0.25, from_args)
    store.run("a").latest().branch("b", {"key": 0.25})
    train(store, "b", variable, 0.25, from_args, until=4)
    assert store.run("b").latest().step == 4


def test_a_value_that_a_rollback_changed_is_refused_at_the_next_start(store):
    losses = {3: float("nan")}

    def start() -> None:
        with store.start("a") as run:
            args = run.configure({"key": 0.4})
            made = {**dropout(args), "loop": simckpt.LoopState(step=0)}
            with run.checkpointer(
                made,
                save_when=simckpt.EverySteps(1),
                hyperparameters=from_args(made),
                rollback=simckpt.RollbackPolicy("return", changes=simckpt.policies.Scale(key=0.5)),
                background=None,
            ) as checkpointer:
                checkpointer.restore_latest()
                while made["loop"].step < 5:
                    made["loop"].step += 1
                    checkpointer.step(made["loop"].step, {"loss": losses.pop(made["loop"].step, 0.0)})

    with pytest.raises(OverrideNotAppliedError, match=r"net/attributes/1/p: as built 0\.2, restored 0\.4"):
        simckpt.supervise(start)


def test_a_seed_that_an_env_took_is_told_of_reseeding(store):
    def seeded(name: str) -> None:
        with store.start(name) as run:
            args = run.configure({"seed": 17})
            env = gym.make("InvertedPendulum-v5")
            env.reset(seed=args["seed"])
            loop = simckpt.LoopState(step=0)
            hyperparameters = simckpt.Hyperparameters(from_args={"seed"})
            with run.checkpointer(
                {"env": env, "loop": loop}, save_when=simckpt.EverySteps(1), hyperparameters=hyperparameters
            ) as checkpointer:
                checkpointer.restore_latest()
                loop.step += 1
                checkpointer.step(loop.step)

    seeded("a")
    store.run("a").latest().branch("b", {"seed": 23})
    with pytest.raises(OverrideNotAppliedError, match='rng="reseed"'):
        seeded("b")
    store.run("a").latest().branch("c", {"seed": 23}, rng="reseed")
    seeded("c")
    assert store.run("c").latest().step == 2


def test_arrays_and_long_lists_are_not_looked_into():
    saved = {"c": {"array": np.full(3, 0.1), "log": [0.1] * 5000, "same": [0.3] * 3}}
    live = {"c": {"array": np.full(3, 0.2), "log": [0.2] * 5000, "same": [0.3] * 3}}
    refuse_taken(saved, live, {"key": (0.1, 0.2)}, fresh={}, loops=(), reseeded=False)
    saved["c"]["short"], live["c"]["short"] = [0.1], [0.2]
    with pytest.raises(OverrideNotAppliedError, match="c/short/0"):
        refuse_taken(saved, live, {"key": (0.1, 0.2)}, fresh={}, loops=(), reseeded=False)


def test_trees_that_lead_back_to_themselves_end():
    saved: dict[str, Any] = {"n": 0.1}
    live: dict[str, Any] = {"n": 0.3}
    saved["self"], live["self"] = saved, live
    refuse_taken({"c": saved}, {"c": live}, {"key": (0.1, 0.2)}, fresh={}, loops=(), reseeded=False)


def test_numbers_are_compared_whatever_their_type():
    saved, live = {"c": {"n": 10}}, {"c": {"n": np.float32(12.5)}}
    with pytest.raises(OverrideNotAppliedError, match="c/n"):
        refuse_taken(saved, live, {"key": (10.0, 12.5)}, fresh={}, loops=(), reseeded=False)


def test_a_whole_number_array_holds_no_fraction():
    saved, live = {"c": {"n": np.array(1)}}, {"c": {"n": np.array(2)}}
    refuse_taken(saved, live, {"key": (1.5, 2.5)}, fresh={}, loops=(), reseeded=False)


@pytest.mark.parametrize("declared", [None, simckpt.Hyperparameters()])
@pytest.mark.parametrize(
    ("key", "old", "new", "hint"),
    [("num_envs", 2, 3, "fresh={'num_envs': {"), ("hidden", 64, 32, "fresh={'hidden': {"), ("seed", 2, 3, "reseed")],
)
def test_a_key_that_nothing_declares_is_told_all_ways(store, declared, key, old, new, hint):
    def start(name: str) -> None:
        with store.start(name) as run:
            run.configure({key: old})
            loop = simckpt.LoopState(step=0)
            with run.checkpointer(
                {"loop": loop}, save_when=simckpt.EverySteps(1), hyperparameters=declared
            ) as checkpointer:
                checkpointer.restore_latest()
                loop.step += 1
                checkpointer.step(loop.step)

    start("a")
    store.run("a").latest().branch("b", {key: new})
    with pytest.raises(OverrideNotAppliedError) as caught:
        start("b")
    assert hint in str(caught.value)
    assert "from_args" in str(caught.value)


def test_what_is_dropped_is_told_only_once_it_is(store):
    def typo(components: Components) -> simckpt.Hyperparameters:
        return simckpt.Hyperparameters(fresh={"key": {"own/limitt"}})

    train(store, "a", variable, 0.25, typo)
    store.run("a").latest().branch("b", {"key": 0.5})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(ConfigurationError, match="no such variable"):
            train(store, "b", variable, 0.25, typo)


@pytest.mark.parametrize("optimizer_class", [torch.optim.Adam, torch.optim.SGD])
@pytest.mark.parametrize("sets", ["nothing", "its own schedule", "the value"])
def test_a_rate_that_nothing_sets_is_told_once_the_optimizer_has_stepped_with_it(
    store, sets: str, optimizer_class: type[torch.optim.Optimizer]
) -> None:
    def run(name: str, rate: float, until: int) -> list[float]:
        with store.start(name) as run:
            args = run.configure({"learning_rate": rate}, defaults={"learning_rate": rate})
            net = torch.nn.Linear(2, 1)
            optimizer = optimizer_class(net.parameters(), lr=args["learning_rate"])
            loop, used = simckpt.LoopState(step=0), []
            declared = simckpt.Hyperparameters(from_args={"learning_rate"})
            with run.checkpointer(
                {"net": net, "optimizer": optimizer, "loop": loop},
                save_when=simckpt.EverySteps(1),
                hyperparameters=declared,
                background=None,
            ) as checkpointer:
                checkpointer.restore_latest()
                while loop.step < until:
                    loop.step += 1
                    # collects experience for two steps before it learns
                    if loop.step > 4:
                        share = 1 - loop.step / 10 if sets == "its own schedule" else 1.0
                        if sets != "nothing":
                            optimizer.param_groups[0]["lr"] = share * args["learning_rate"]
                        net(torch.ones(1, 2)).sum().backward()
                        optimizer.step()
                        used.append(optimizer.param_groups[0]["lr"])
                    checkpointer.step(loop.step)
        return used

    run("origin", 0.125, 2)
    store.run("origin").latest().branch("branch", overrides={"learning_rate": 0.5})
    if sets == "nothing":
        # started again it goes on from what was saved since, where the rate is lost already
        for last in (4, 4):
            with pytest.raises(OverrideNotAppliedError, match="'optimizer' took it when it was made, and has stepped"):
                run("branch", 0.125, 6)
            assert store.run("branch").latest().step == last
    else:
        assert run("branch", 0.125, 6) == ([0.25, 0.2] if sets == "its own schedule" else [0.5, 0.5])
