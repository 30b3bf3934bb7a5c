"""Restores into the wrong thing, or from damaged files: the right error, and live objects to the bit as they were."""

import itertools
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
import xxhash
from examples import Counter, Fragile
from torch import nn

import simckpt
from simckpt import restore
from simckpt.errors import (
    DamagedError,
    HalfRestoredError,
    RestoreError,
    SimckptError,
    StateMismatchError,
    UnsupportedFormatError,
)
from simckpt.state import differences


def network(*sizes: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for inputs, outputs in itertools.pairwise(sizes):
        layers += [nn.Linear(inputs, outputs), nn.Tanh()]
    return nn.Sequential(*layers)


def make_envs(
    env_id: str = "InvertedPendulum-v5", num_envs: int = 2, *, inside: Any = None, outside: Any = None, **options: Any
) -> gym.vector.VectorEnv:
    envs = gym.vector.SyncVectorEnv(
        [lambda: gym.make(env_id) if inside is None else inside(gym.make(env_id)) for _ in range(num_envs)], **options
    )
    return envs if outside is None else outside(envs)


def make(
    *, seed: int = 0, steps: int = 5, envs: Any = None, agent: Any = None, optimizer: Any = None, **others: Any
) -> dict[str, Any]:
    """Returns live objects after a few steps of something like training: no state in them is a fresh one's."""
    torch.manual_seed(seed)
    envs = envs or make_envs()
    # only what fits the observations can be called; the agents of the tests need not
    driver = network(envs.single_observation_space.shape[0], 3, envs.single_action_space.shape[0])
    agent = agent or driver
    optimizer = (optimizer or (lambda parameters: torch.optim.Adam(parameters, lr=0.01)))(agent.parameters())
    loop = simckpt.LoopState(step=0, observations=envs.reset(seed=seed)[0])
    for _ in range(steps):
        actions = driver(torch.as_tensor(loop.observations, dtype=torch.float32)).detach().numpy()
        loop.observations, *_ = envs.step(np.clip(actions, envs.single_action_space.low, envs.single_action_space.high))
        optimizer.zero_grad()
        sum(parameter.square().sum() for parameter in agent.parameters()).backward()
        optimizer.step()
        loop.step += 1
    components = {"envs": envs, "agent": agent, "optimizer": optimizer, "loop": loop, "rng": simckpt.RNGStreams()}
    return {**components, **others}


def captured(components: dict[str, Any]) -> dict[str, Any]:
    """Returns the whole state of live objects."""
    return restore.capture(restore.bind(components))


def save(store: simckpt.Store, components: dict[str, Any]) -> None:
    with store.start("a") as run:
        run.checkpointer(components, save_when=simckpt.EverySteps(1)).save(5)


def refuse(
    store: simckpt.Store, components: dict[str, Any], error: type[SimckptError], match: str | None = None
) -> SimckptError:
    """Restores the newest checkpoint into live objects, which must fail; returns the error."""
    before = captured(components)
    identities = {name: id(component) for name, component in components.items()}
    with store.start("a") as run, pytest.raises(error, match=match) as caught:
        run.checkpointer(components, save_when=simckpt.EverySteps(1)).restore_latest()
    assert differences(before, captured(components)) == []
    assert {name: id(component) for name, component in components.items()} == identities
    return caught.value


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("saved") / "s"
    save(simckpt.Store(path), make())
    return path


@pytest.fixture
def store(tmp_path) -> simckpt.Store:
    return simckpt.Store(tmp_path / "s")


def test_the_same_objects_take_the_checkpoint(saved) -> None:
    # what the other tests change is the only thing that is wrong with them
    expected = captured(make())
    components = make(seed=1, steps=3)
    assert differences(expected, captured(components)) != []
    with simckpt.Store(saved).start("a") as run:
        run.checkpointer(components, save_when=simckpt.EverySteps(1)).restore_latest()
    assert differences(expected, captured(components)) == []


class Tilted(gym.Wrapper):
    """Does nothing, and is one more class in the chain."""


ENVS: dict[str, tuple[Callable[[], Any], str]] = {
    "another MuJoCo env": (lambda: make_envs("InvertedDoublePendulum-v5"), "envs"),
    "an env without MuJoCo": (lambda: make_envs("Pendulum-v1"), "physics"),
    "more envs": (lambda: make_envs(num_envs=3), "2 envs.*3"),
    "fewer envs": (lambda: make_envs(num_envs=1), "2 envs.*1"),
    "another autoreset mode": (
        lambda: make_envs(autoreset_mode=gym.vector.AutoresetMode.SAME_STEP),
        "autoreset mode is NextStep in the state, SameStep",
    ),
    "one more wrapper inside": (lambda: make_envs(inside=Tilted), "Tilted"),
    "one more wrapper outside": (
        lambda: make_envs(outside=gym.wrappers.vector.NormalizeObservation),
        "NormalizeObservation",
    ),
}


@pytest.mark.parametrize("case", ENVS)
def test_other_envs_are_refused(saved, case: str) -> None:
    build, match = ENVS[case]
    error = refuse(
        simckpt.Store(saved), make(seed=1, steps=3, envs=build(), agent=network(4, 3, 1)), StateMismatchError
    )
    assert any(problem.startswith("envs") for problem in error.problems), error.problems
    # nothing is said against what fits
    assert not any(problem.startswith(("agent", "optimizer", "rng")) for problem in error.problems), error.problems
    assert re.search(rf"(?s)untouched:.*{match}", str(error)), str(error)


def test_an_env_of_equal_sizes_is_refused_by_its_model(store) -> None:
    # both have 17 observations, 6 actions, 9 positions and 9 velocities
    save(store, make(envs=make_envs("HalfCheetah-v5")))
    live = make(seed=1, steps=3, envs=make_envs("Walker2d-v5"))
    error = refuse(store, live, StateMismatchError)
    assert all(problem.startswith("envs") for problem in error.problems), error.problems


@pytest.mark.parametrize(
    ("saved_with", "live_with"),
    [
        (gym.wrappers.RescaleAction, None),
        (lambda env: gym.wrappers.ClipAction(Tilted(env)), lambda env: Tilted(gym.wrappers.ClipAction(env))),
    ],
    ids=["a wrapper is missing", "two wrappers in another order"],
)
def test_another_chain_of_wrappers_is_refused(store, saved_with, live_with) -> None:
    if saved_with is gym.wrappers.RescaleAction:

        def saved_with(env: gym.Env) -> gym.Env:
            return gym.wrappers.RescaleAction(env, np.float32(-1), np.float32(1))

    save(store, make(envs=make_envs(inside=saved_with)))
    refuse(store, make(seed=1, envs=make_envs(inside=live_with)), StateMismatchError, "envs")


AGENTS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "a wider layer": (lambda: network(4, 5, 1), r"0\.weight: saved with shape \(3, 4\), live has \(5, 4\)"),
    "one more layer": (lambda: network(4, 3, 1, 1), r"4\.weight: not in the checkpoint"),
    "one layer less": (lambda: network(4, 3), r"2\.weight: only in the checkpoint"),
    "another dtype": (lambda: network(4, 3, 1).double(), r"0\.weight: saved as torch\.float32, live is torch\.float64"),
}


@pytest.mark.parametrize("case", AGENTS)
def test_another_network_is_refused_layer_by_layer(saved, case: str) -> None:
    build, match = AGENTS[case]
    error = refuse(simckpt.Store(saved), make(seed=1, agent=build()), StateMismatchError, match)
    # all problems at once: the optimizer's parameters are others, too
    assert {problem.partition(":")[0].partition("/")[0] for problem in error.problems} == {"agent", "optimizer"}


def in_two_groups(parameters: Any) -> torch.optim.Optimizer:
    first, *rest = parameters
    return torch.optim.Adam([{"params": [first], "lr": 0.1}, {"params": rest}], lr=0.01)


OPTIMIZERS: dict[str, tuple[Callable[[Any], torch.optim.Optimizer], str]] = {
    "another class": (lambda parameters: torch.optim.SGD(parameters, lr=0.01, momentum=0.9), "Adam, live is .*SGD"),
    "a class with the same state": (lambda parameters: torch.optim.AdamW(parameters, lr=0.01), "Adam, live is .*AdamW"),
    "more groups": (in_two_groups, "1 parameter groups, live has 2"),
    "fewer parameters": (lambda parameters: torch.optim.Adam(list(parameters)[:2]), "4 parameters, live has 2"),
}


@pytest.mark.parametrize("case", OPTIMIZERS)
def test_another_optimizer_is_refused(saved, case: str) -> None:
    build, match = OPTIMIZERS[case]
    error = refuse(simckpt.Store(saved), make(seed=1, optimizer=build), StateMismatchError, match)
    assert all(problem.startswith("optimizer") for problem in error.problems)


def without(components: dict[str, Any], name: str) -> dict[str, Any]:
    return {each: component for each, component in components.items() if each != name}


@pytest.mark.parametrize("name", ["envs", "agent", "optimizer", "loop", "rng"])
def test_a_component_that_is_not_registered_is_refused_by_name(saved, name: str) -> None:
    components = without(make(seed=1), name)
    error = refuse(
        simckpt.Store(saved), components, StateMismatchError, f"'{name}' is in the checkpoint but not registered"
    )
    assert len(error.problems) == 1


def test_a_component_that_was_not_saved_is_refused_by_name(saved) -> None:
    refuse(
        simckpt.Store(saved),
        make(seed=1, critic=network(4, 1)),
        StateMismatchError,
        "'critic' is not in the checkpoint",
    )


def test_components_under_each_others_names_are_refused(saved) -> None:
    components = make(seed=1)
    components["agent"], components["optimizer"] = components["optimizer"], components["agent"]
    components["envs"], components["loop"] = components["loop"], components["envs"]
    error = refuse(simckpt.Store(saved), components, StateMismatchError)
    assert {problem.partition(":")[0].partition("/")[0] for problem in error.problems} == {
        "agent",
        "optimizer",
        "envs",
        "loop",
    }


def test_other_random_streams_are_refused(store) -> None:
    save(store, make(rng=simckpt.RNGStreams(actions=np.random.default_rng(0))))
    for streams, match in (
        (simckpt.RNGStreams(), "generators/actions: it was saved"),
        (simckpt.RNGStreams(noise=np.random.default_rng(1)), "generators/noise: it was not saved"),
        (simckpt.RNGStreams(actions=np.random.Generator(np.random.MT19937(1))), "generators/actions"),
    ):
        refuse(store, make(seed=1, rng=streams), StateMismatchError, match)


def test_a_loop_variable_that_was_not_saved_is_refused(saved) -> None:
    components = make(seed=1)
    components["loop"].best = 0.0
    refuse(simckpt.Store(saved), components, StateMismatchError, "best")


def checkpoint_folder(store: simckpt.Store) -> Path:
    return store.path / "runs/a/checkpoints/00000001"


def flip_bit_of_leaf(store: simckpt.Store, leaf: str) -> None:
    record = store.run("a").latest().leaves()[leaf]
    path = checkpoint_folder(store) / "state.h5"
    data = bytearray(path.read_bytes())
    data[record.offset + record.size // 2] ^= 0b100
    path.write_bytes(bytes(data))


@pytest.mark.parametrize("leaf", ["envs/physics/qpos", "agent/0.weight", "loop/_tree"])
def test_a_flipped_bit_is_found_before_anything_is_touched(store, leaf: str) -> None:
    save(store, make())
    flip_bit_of_leaf(store, leaf)
    error = refuse(store, make(seed=1), DamagedError)
    assert error.leaves == (leaf,)


# when the checkpointer is made; the restore is what has to fail
@pytest.mark.filterwarnings("ignore:checkpoint number 1 of run 'a' is damaged:simckpt.UpkeepWarning")
@pytest.mark.parametrize("name", ["state.h5", "leaves.json", "commit.json"])
@pytest.mark.parametrize("how", ["truncated", "missing", "flipped"])
def test_a_damaged_file_is_named(store, name: str, how: str) -> None:
    save(store, make())
    path = checkpoint_folder(store) / name
    if how == "truncated":
        os.truncate(path, path.stat().st_size // 2)
    elif how == "missing":
        path.unlink()
    else:
        data = bytearray(path.read_bytes())
        # in the last leaf of the state, or in the middle of a record
        place = len(data) // 2
        if name == "state.h5":
            place = list(store.run("a").latest().leaves().values())[-1].offset
        data[place] ^= 1
        path.write_bytes(bytes(data))
    error = refuse(store, make(seed=1), DamagedError)
    assert str(checkpoint_folder(store)) in str(error)


def change_record(path: Path, old: bytes, new: bytes) -> None:
    """Changes a record and seals it again, as a newer simckpt would have written it."""
    body = path.read_bytes().partition(b',\n "digest": ')[0]
    assert body.count(old) == 1
    body = body.replace(old, new)
    digest = xxhash.xxh3_128_hexdigest(body)
    path.write_bytes(body + f',\n "digest": "xxh3-128:{digest}"\n}}\n'.encode())


# when the checkpointer is made; the restore is what has to fail
@pytest.mark.filterwarnings("ignore:checkpoint number 1 of run 'a' is damaged:simckpt.UpkeepWarning")
def test_a_checkpoint_of_a_newer_format_is_refused(store) -> None:
    save(store, make())
    change_record(checkpoint_folder(store) / "commit.json", b'"version": "0.3"', b'"version": "1.0"')
    refuse(
        store, make(seed=1), UnsupportedFormatError, r"version 1\.0, this simckpt reads up to 0\.3: use a newer simckpt"
    )


def test_a_store_with_an_unknown_feature_is_refused_when_it_is_opened(store) -> None:
    save(store, make())
    change_record(store.path / "store.json", b'"requires": []', b'"requires": ["teleport"]')
    with pytest.raises(UnsupportedFormatError, match="requires teleport"):
        simckpt.Store(store.path)


class FragileExtra(nn.Module):
    """A module whose extra state is refused after its parameters were loaded."""

    broken = False

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)
        self.updates = 0

    def get_extra_state(self) -> dict[str, int]:
        return {"updates": self.updates}

    def set_extra_state(self, state: dict[str, int]) -> None:
        if self.broken:
            self.broken = False
            raise OSError("no such device")
        self.updates = state["updates"]


class FragileEnv(gym.Wrapper):
    """A wrapper with a state of its own making, which fails after the physics was restored."""

    broken = False

    def __init__(self, env: gym.Env) -> None:
        super().__init__(env)
        self.count = 0

    def step(self, action: Any) -> Any:
        self.count += 1
        return super().step(action)

    def state_dict(self) -> dict[str, int]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.count = state["count"]
        if FragileEnv.broken:
            FragileEnv.broken = False
            raise ValueError("the gripper is stuck")


def test_a_component_that_fails_halfway_leaves_all_others_as_they_were(store) -> None:
    counter = Fragile()
    save(store, make(counter=counter, last=Counter()))
    counter.advance()
    live = make(seed=1, steps=3, counter=counter, last=Counter())
    counter.broken = True
    error = refuse(store, live, RestoreError, r"component 'counter'.*RuntimeError: the light went out")
    assert not isinstance(error, StateMismatchError)
    assert "All live objects are as they were before the restore" in str(error)


def test_a_module_that_fails_halfway_leaves_all_as_it_was(store) -> None:
    save(store, make(critic=FragileExtra()))
    critic = FragileExtra()
    critic.updates = 7
    critic.broken = True
    refuse(store, make(seed=1, steps=3, critic=critic), RestoreError, "component 'critic' failed.*no such device")


def test_an_env_that_fails_halfway_leaves_all_as_it_was(store) -> None:
    save(store, make(envs=make_envs(inside=FragileEnv)))
    live = make(seed=1, steps=3, envs=make_envs(inside=FragileEnv))
    FragileEnv.broken = True
    refuse(store, live, RestoreError, "component 'envs' failed.*the gripper is stuck")
    assert not FragileEnv.broken


def test_a_component_that_cannot_be_put_back_either_is_named(store) -> None:
    class Lost(Counter):
        broken = False

        def load_state_dict(self, state: dict[str, Any]) -> None:
            if self.broken:
                raise RuntimeError("the line is dead")
            super().load_state_dict(state)

    lost = Lost()
    save(store, make(lost=lost))
    live = make(seed=1, steps=3, lost=lost)
    before = captured(live)
    lost.broken = True
    message = r"so did putting back lost: .*the line is dead.*undefined state"
    with store.start("a") as run, pytest.raises(HalfRestoredError, match=message) as caught:
        run.checkpointer(live, save_when=simckpt.EverySteps(1)).restore_latest()
    assert tuple(caught.value.components) == ("lost",)
    # and still all others are as they were
    assert differences(before, captured(live)) == []


def test_training_goes_on_after_a_refusal_as_if_nothing_had_been_tried(saved) -> None:
    undisturbed, refused = make(seed=1), make(seed=1)
    refused["agent"], kept = network(4, 9, 1), refused["agent"]
    refuse(simckpt.Store(saved), refused, StateMismatchError)
    refused["agent"] = kept
    for components in (undisturbed, refused):
        for _ in range(10):
            components["envs"].step(np.full((2, 1), 0.25, np.float32))
            sum(parameter.square().sum() for parameter in components["agent"].parameters()).backward()
            components["optimizer"].step()
    names = ("envs", "agent", "optimizer")
    states = [captured({name: components[name] for name in names}) for components in (undisturbed, refused)]
    assert differences(*states) == []
