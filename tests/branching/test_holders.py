"""Overrides of what the restore itself replaces: variables of loops, groups of optimizers, dicts of users' classes."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

import simckpt
from simckpt import restore
from simckpt.branching import holders
from simckpt.errors import OverrideNotAppliedError
from simckpt.policies import RollbackPolicy, Scale

OLD, NEW, LATER = 0.2, 0.5, 0.25


@dataclasses.dataclass
class Config:
    beta: float


@dataclasses.dataclass(slots=True)
class Slotted:
    beta: float


class Replaces:
    """A component whose `load_state_dict` makes a new dict."""

    def __init__(self, beta: float) -> None:
        self.values = {"beta": beta}

    def state_dict(self) -> dict[str, Any]:
        return dict(self.values)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.values = dict(state)


class Drops(Replaces):
    """A component that has something else in that place after a restore."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.values = {"gamma": state["beta"]}


class Keeps:
    """A component that holds a settings object and saves nothing of it."""

    def __init__(self, settings: Any) -> None:
        self.settings = settings

    def state_dict(self) -> dict[str, Any]:
        return {"count": 3}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


class Pair:
    """A component of two: one that replaces what it holds, and one that goes on to hold the same."""

    def __init__(self, keeps: Keeps, loop: simckpt.LoopState) -> None:
        self.keeps = keeps
        self.loop = loop

    def state_dict(self) -> dict[str, Any]:
        return self.loop.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.loop.load_state_dict(state)


@dataclasses.dataclass
class Case:
    """What a program makes.

    Attributes:
        component: holds the value somewhere.
        bound: what the program binds.
        read: returns the value that the program would use.
    """

    component: Any
    bound: tuple[Any, str]
    read: Callable[[], Any]


def optimizer_group(beta: float) -> Case:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(2))], lr=beta)
    return Case(optimizer, (optimizer.param_groups[0], "lr"), lambda: optimizer.param_groups[0]["lr"])


def loop_dict(beta: float) -> Case:
    loop = simckpt.LoopState(config={"beta": beta})
    return Case(loop, (loop.config, "beta"), lambda: loop.config["beta"])


def loop_nested(beta: float) -> Case:
    loop = simckpt.LoopState(phases=[{"name": "a"}, {"inner": ({"beta": beta},)}])
    return Case(loop, (loop.phases[1]["inner"][0], "beta"), lambda: loop.phases[1]["inner"][0]["beta"])


def loop_dataclass(beta: float) -> Case:
    loop = simckpt.LoopState(config=Config(beta))
    return Case(loop, (loop.config, "beta"), lambda: loop.config.beta)


def loop_slots(beta: float) -> Case:
    loop = simckpt.LoopState(config=Slotted(beta))
    return Case(loop, (loop.config, "beta"), lambda: loop.config.beta)


def loop_tensor(beta: float) -> Case:
    loop = simckpt.LoopState(config={"beta": torch.tensor(beta, dtype=torch.float64)})
    return Case(loop, (loop.config, "beta"), lambda: loop.config["beta"].item())


def user_class(beta: float) -> Case:
    component = Replaces(beta)
    return Case(component, (component.values, "beta"), lambda: component.values["beta"])


def module_dict(beta: float) -> Case:
    module = torch.nn.Linear(2, 1)
    module.config = {"beta": beta}  # type: ignore[assignment]
    return Case(module, (module.config, "beta"), lambda: module.config["beta"])


def own_name(beta: float) -> Case:
    """The program goes on to read the dict that the loop's variable was made of."""
    config = {"beta": beta}
    return Case(simckpt.LoopState(config=config), (config, "beta"), lambda: config["beta"])


def settings_apart(beta: float) -> Case:
    settings = Config(beta)
    return Case(Keeps(None), (settings, "beta"), lambda: settings.beta)


def settings_within(beta: float) -> Case:
    settings = Config(beta)
    return Case(Keeps(settings), (settings, "beta"), lambda: settings.beta)


CASES = [
    optimizer_group,
    loop_dict,
    loop_nested,
    loop_dataclass,
    loop_slots,
    loop_tensor,
    user_class,
    module_dict,
    own_name,
    settings_apart,
    settings_within,
]
every_case = pytest.mark.parametrize("make", CASES, ids=lambda make: make.__name__)


POLICY = RollbackPolicy("return", changes=Scale(beta=LATER / NEW))


def train(
    store: simckpt.Store,
    name: str,
    make: Callable[[float], Case],
    until: int,
    *,
    built: Callable[[float], float] = lambda beta: beta,
    losses: dict[int, float] | None = None,
    **options: Any,
) -> list[float]:
    """Returns the values that were read, by step."""
    with store.start(name) as run:
        args = run.configure({"beta": OLD})
        case = make(built(args["beta"]))
        loop = simckpt.LoopState(step=0)
        read = []
        with run.checkpointer(
            {"case": case.component, "loop": loop},
            save_when=simckpt.EverySteps(2),
            hyperparameters=simckpt.Hyperparameters({"beta": case.bound}),
            background=None,
            **options,
        ) as checkpointer:
            checkpointer.restore_latest()
            while loop.step < until:
                read.append(case.read())
                loop.step += 1
                checkpointer.step(loop.step, {"loss": (losses or {}).pop(loop.step, 0.0)})
    return read


@pytest.fixture
def store(tmp_path) -> simckpt.Store:
    return simckpt.Store(tmp_path / "s")


@every_case
def test_an_override_reaches_what_the_restore_has_put_there(store, make):
    train(store, "a", make, 4)
    store.run("a").latest().branch("b", {"beta": NEW})
    assert train(store, "b", make, 8) == [NEW] * 4
    # a later start, whose state has it
    assert train(store, "b", make, 10) == [NEW] * 2


@every_case
def test_an_override_reaches_it_where_the_program_builds_with_a_constant(store, make):
    train(store, "a", make, 4)
    store.run("a").latest().branch("b", {"beta": NEW})
    for until in (8, 10):
        assert set(train(store, "b", make, until, built=lambda beta: OLD)) == {NEW}


@pytest.mark.parametrize(
    ("make", "in_place"),
    [
        (optimizer_group, True),
        (optimizer_group, False),
        (loop_dataclass, True),
        (user_class, True),
        (user_class, False),
        (own_name, True),
        (settings_within, True),
    ],
)
def test_a_rollback_changes_what_its_restore_has_put_there(store, make, in_place):
    train(store, "a", make, 4)
    store.run("a").latest().branch("b", {"beta": NEW})

    def go(until: int, losses: dict[int, float]) -> list[float]:
        given = {"rollback": POLICY, "in_place": in_place, "losses": losses}
        return simckpt.supervise(train, store, "b", make, until, **given)

    read = go(10, {7: math.nan})
    assert read[-2:] == [LATER, LATER]
    assert NEW in read or not in_place
    assert go(12, {}) == [LATER, LATER]


@every_case
def test_what_a_refused_restore_has_set_is_taken_back(store, make):
    train(store, "a", make, 4)
    checkpoint = store.run("a").latest()
    case = make(OLD)
    hyperparameters = simckpt.Hyperparameters({"beta": case.bound, "limit": (Refuses(), "limit")})
    components = {"case": case.component, "loop": simckpt.LoopState(step=0)}
    hyperparameters.locate(components)
    adjustment = restore.Adjustment(then=lambda: hyperparameters.apply({"beta": NEW, "limit": 2.0}))
    with pytest.raises(OverrideNotAppliedError, match="'limit' could not be set"):
        checkpoint.restore_bound(restore.bind(components), adjustment)
    assert case.read() == OLD


class Refuses:
    """A limit that nobody may set."""

    @property
    def limit(self) -> float:
        return 1.0


def test_what_does_not_have_the_value_any_more_is_refused_by_name(store):
    def drops(beta: float) -> Case:
        component = Drops(beta)
        return Case(component, (component.values, "beta"), lambda: component.values.get("beta"))

    train(store, "a", drops, 4)
    store.run("a").latest().branch("b", {"beta": NEW})
    with pytest.raises(OverrideNotAppliedError, match=r"'beta' is bound to .*, which was case\.values; but") as caught:
        train(store, "b", drops, 8)
    assert caught.value.key == "beta"
    assert not list(store.run("b").checkpoints())


def test_all_names_of_a_shared_object_are_set(store):
    def shared(beta: float) -> Case:
        config = {"beta": beta}
        keeps = Keeps(config)
        both = Pair(keeps, simckpt.LoopState(config=config))
        return Case(both, (config, "beta"), lambda: min(keeps.settings["beta"], both.loop.config["beta"]))

    train(store, "a", shared, 4)
    store.run("a").latest().branch("b", {"beta": NEW})
    assert train(store, "b", shared, 8) == [NEW] * 4


def test_the_search_is_bounded_and_ends_in_cycles():
    loop = simckpt.LoopState(rows=[[{"n": n}] for n in range(3 * holders.WIDTH)])
    loop.itself = loop.rows
    loop.rows[0].append(loop)
    near, far = loop.rows[5][0], loop.rows[2 * holders.WIDTH][0]
    found = [holders.Holder("n", each, "n", "there") for each in (near, far)]
    holders.locate(found, {"loop": loop})
    loop.rows[5][0] = {"n": -1}
    loop.rows[2 * holders.WIDTH][0] = {"n": -1}
    assert [[each["n"] for each in holder.objects()] for holder in found] == [[-1, 5], [2 * holders.WIDTH]]
