"""Records a run in this process, and goes on from its snapshot in another one."""

import copy
import inspect
import json
import pickle
import random
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import gymnasium as gym
import mujoco
import numpy as np
from gymnasium.vector import VectorEnv

import simckpt
from simckpt.sim import handle_for
from simckpt.state.streams import global_streams_state, load_global_streams
from simckpt.state.tree import Encoded, Leaf, decode, encode
from tests.exactness import damage
from tests.exactness.bits import Flat, flatten
from tests.exactness.cases import Case, build

DIRTY_STEPS = 7
STEPS_AFTER_RESET = 5
LONGEST_EPISODE = 1500

# some of Gymnasium's models are deprecated in details; MuJoCo would write that to a log file in the working directory
mujoco.set_mju_user_warning(lambda message: None)


class Driver:
    """Steps one env or vector env as a training loop does, and writes down by bits all that comes back.

    `over` is the loop's own state: whether the episode has ended; for a vector env, which ones have.
    """

    def __init__(self, env: Any, case: Case, *, action_seed: int = 123) -> None:
        self.env = env
        self.case = case
        self.over: Any = False
        self.log: list[Flat] = []
        space = copy.deepcopy(env.action_space)
        space.seed(action_seed)
        self._actions = space

    def skip_actions(self, count: int) -> None:
        """Throws away the actions that another process has played."""
        for _ in range(count):
            self._actions.sample()

    def reset(self, seed: int | None = None) -> None:
        """Resets all and logs what it returns."""
        observations, info = self.env.reset(seed=seed)
        self.over = np.zeros(self.case.num_envs, bool) if self.case.vectorization else False
        self.log.append(flatten({"reset": observations, "info": info}))

    def step(self) -> None:
        """Steps once, or resets what is over if the env does not do so itself."""
        action = self._actions.sample()
        if self.case.vectorization is None and self.over:
            self.reset()
            return
        if self.case.vectorization and self.case.autoreset == "DISABLED" and self.over.any():
            observations, info = self.env.reset(options={"reset_mask": self.over.copy()})
            self.over = np.zeros_like(self.over)
            self.log.append(flatten({"reset": observations, "info": info}))
            return
        observations, rewards, terminated, truncated, info = self.env.step(action)
        self.over = np.logical_or(terminated, truncated) if self.case.vectorization else bool(terminated or truncated)
        outcome = {"observations": observations, "rewards": rewards, "terminated": terminated, "truncated": truncated}
        self.log.append(flatten({**outcome, "info": info}))

    def look(self) -> None:
        """Logs what can be read without a step: an env computes it from derived fields."""
        if self.case.vectorization is not None:
            return
        unwrapped = self.env.unwrapped
        seen: dict[str, Any] = {}
        # an env that saves itself decides itself what it leaves out
        saves_itself = hasattr(unwrapped, "state_dict")
        if not saves_itself and isinstance(data := getattr(unwrapped, "data", None), mujoco.MjData):
            names = ("time", "qpos", "qvel", "act", "qacc_warmstart", "mocap_pos", "xpos", "cfrc_ext", "sensordata")
            seen.update({name: np.array(getattr(data, name)) for name in names})
        if hasattr(unwrapped, "_get_obs") and not inspect.signature(unwrapped._get_obs).parameters:
            seen["_get_obs"] = unwrapped._get_obs()
        self.log.append(flatten(seen))

    def sample_spaces(self, count: int = 2) -> None:
        """Logs samples of every space that a user can reach."""
        names = ["action_space", "observation_space"]
        names += ["single_action_space", "single_observation_space"] if self.case.vectorization else []
        self.log.append(flatten({name: [getattr(self.env, name).sample() for _ in range(count)] for name in names}))

    def finish(self, steps: int) -> None:
        """Goes on after the snapshot: `steps` steps, samples of the spaces, a reset and a few steps more."""
        for _ in range(steps):
            self.step()
        self.look()
        self.sample_spaces()
        self.reset()
        for _ in range(STEPS_AFTER_RESET):
            self.step()


@dataclass
class Recording:
    """What a run was at its snapshot, and what came after; the state lies in `state`, or in a store."""

    state: dict[str, Encoded]
    over: Any
    actions_played: int
    expected: list[Flat] = field(repr=False)
    store: Path | None = None


def seed_process(seed: int) -> None:
    """Seeds the streams that any code of this process may draw from."""
    random.seed(seed)
    np.random.seed(seed)


def record(case: Case, *, capture_always: bool = False, store: Path | None = None) -> Recording:
    """Runs `case` up to its snapshot and beyond.

    Args:
        case: what to run.
        capture_always: takes a snapshot at every step, and throws all but one away: none may disturb the run.
        store: saves by a run's checkpointer into this new store.
    """
    seed_process(7)
    env = build(case)
    try:
        driver = Driver(env, case)
        handle = _handle_for(env)
        run = None if store is None else simckpt.Store(store).start("run")
        checkpointer = None if run is None else _checkpointer(run, env)
        played = _play_to_the_moment(driver, handle if capture_always else None)
        snapshot = {}
        if run is not None and checkpointer is not None:
            checkpointer.save(played)
            run.close()
        else:
            snapshot["envs"] = handle.capture()
            if case.uses_global_streams:
                snapshot["rng"] = global_streams_state()
        over, driver.log = copy.deepcopy(driver.over), []
        go_on(driver, case, handle if capture_always else None)
        # encoded only now: a snapshot that shared memory with the env would have changed by now
        state = {name: encode(tree) for name, tree in snapshot.items()}
        return Recording(state, over, played, driver.log, store)
    finally:
        env.close()


def run_undisturbed(case: Case) -> list[Flat]:
    """Returns the log after the moment of the snapshot, of a run in which none is taken."""
    seed_process(7)
    env = build(case)
    try:
        driver = Driver(env, case)
        _play_to_the_moment(driver, None)
        driver.log = []
        go_on(driver, case)
        return driver.log
    finally:
        env.close()


def _checkpointer(run: simckpt.Run, env: Any) -> simckpt.Checkpointer:
    return run.checkpointer({"envs": env, "rng": simckpt.RNGStreams()}, save_when=simckpt.EverySteps(1))


def _handle_for(env: gym.Env[Any, Any] | VectorEnv[Any, Any, Any]) -> Any:
    handle = handle_for(env)
    assert handle is not None
    return handle


def _play_to_the_moment(driver: Driver, handle: Any) -> int:
    case = driver.case
    if case.moment == "fresh":
        return 0
    for seed, space in enumerate((driver.env.action_space, driver.env.observation_space)):
        space.seed(seed)
    if case.vectorization:
        driver.env.single_action_space.seed(5)
        driver.env.single_observation_space.seed(6)
    driver.sample_spaces(1)
    driver.reset(seed=3)
    if case.moment == "reset":
        return 0
    for step in range(1, LONGEST_EPISODE):
        driver.step()
        if handle is not None:
            handle.capture()
        if step >= case.at and (case.moment == "odd" or np.any(driver.over)):
            return step
    raise AssertionError(f"{case}: no episode ends within {LONGEST_EPISODE} steps")


def go_on(driver: Driver, case: Case, handle: Any = None) -> None:
    """Does what comes after the snapshot, under more snapshots if there is a handle."""
    if case.moment == "fresh":
        # without a seed: what the generators are was decided at the snapshot, at the latest
        driver.reset()
    else:
        driver.look()
    if handle is not None:
        for _ in range(3):
            driver.step()
            handle.capture()
        driver.finish(case.steps - 3)
    else:
        driver.finish(case.steps)


def replay(recording: Recording, case: Case) -> list[Flat]:
    """Applies the snapshot to a new env that has been stepped elsewhere, and returns the log of what follows."""
    seed_process(1000)
    env = build(case)
    # a second one, for the damage that loses all but the physics; built now, while no callback is installed that would
    # disturb MuJoCo's compiler
    other = build(case) if case.damage == "python" else env
    try:
        make_dirty(env, case)
        spared = damage.before(case.damage, env)
        apply(env, case, recording)
        damage.after(case.damage, env, spared)
        if other is not env:
            make_dirty(other, case)
            damage.transplant_physics(env, other)
        driver = Driver(other, case)
        driver.skip_actions(recording.actions_played)
        driver.over = recording.over
        go_on(driver, case)
        return driver.log
    finally:
        env.close()
        if other is not env:
            other.close()


def make_dirty(env: Any, case: Case) -> None:
    """Steps a new env somewhere else, under another seed."""
    driver = Driver(env, case, action_seed=321)
    driver.reset(seed=99)
    driver.sample_spaces(1)
    for _ in range(DIRTY_STEPS):
        driver.step()


def apply(env: Any, case: Case, recording: Recording) -> None:
    """Puts the snapshot into an env, as a restore does: first validated, then applied."""
    if recording.store is not None:
        with simckpt.Store(recording.store).start("run") as run:
            assert _checkpointer(run, env).restore_latest() is not None
        _arm(env, case)
        return
    trees = {name: decode(encoded.leaves, encoded.structure) for name, encoded in recording.state.items()}
    handle = _handle_for(env)
    handle.validate(trees["envs"])
    handle.apply(trees["envs"])
    if case.uses_global_streams:
        load_global_streams(trees["rng"])
    _arm(env, case)


def _arm(env: Any, case: Case) -> None:
    """Lets envs with a device, which a restore has disarmed, go on."""
    if "simckpt/CartPoleInTheLoop-v0" not in case.ids:
        return
    if isinstance(env, VectorEnv):
        env.call("arm")
    else:
        env.unwrapped.arm()


def save(recording: Recording, folder: Path) -> None:
    """Writes a recording: the state as plain arrays and text, the rest (the test's own) as a pickle."""
    arrays: dict[str, np.ndarray] = {}
    index: dict[str, Any] = {}
    for component, encoded in recording.state.items():
        entries = []
        for path, leaf in encoded.leaves.items():
            name = f"leaf{len(arrays)}"
            arrays[name] = leaf.data
            entries.append([path, name, leaf.dtype, list(leaf.shape), leaf.kind])
        index[component] = {"leaves": entries, "structure": encoded.structure.decode()}
    np.savez(folder / "leaves.npz", **arrays)
    (folder / "index.json").write_text(json.dumps(index))
    rest = (recording.over, recording.actions_played, recording.expected, recording.store)
    (folder / "rest.pickle").write_bytes(pickle.dumps(rest))


def load(folder: Path) -> Recording:
    """Reads what `save` wrote."""
    with np.load(folder / "leaves.npz", allow_pickle=False) as arrays:
        state = {
            component: Encoded(
                leaves={
                    path: Leaf(data=arrays[name], dtype=dtype, shape=tuple(shape), kind=kind)
                    for path, name, dtype, shape, kind in entry["leaves"]
                },
                structure=entry["structure"].encode(),
            )
            for component, entry in json.loads((folder / "index.json").read_text()).items()
        }
    over, played, expected, store = pickle.loads((folder / "rest.pickle").read_bytes())
    return Recording(state, over, played, expected, store)


def to_json(case: Case) -> str:
    """Returns `case` as one line."""
    return json.dumps(asdict(case))


def from_json(line: str) -> Case:
    """Returns the case that `to_json` wrote."""
    values = json.loads(line)
    return Case(**{**values, "ids": tuple(values["ids"])})
