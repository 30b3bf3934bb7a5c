"""Whole environments: exact in another process, transparent, transactional."""

import os
import sys
import time
from pathlib import Path

import gymnasium as gym
import mujoco
import numpy as np
import pytest

sys.path.insert(0, os.fspath(Path(__file__).parent))

from environment_helpers import (
    Recompiling,
    Simulated,
    canonical,
    drive,
    in_other_process,
    make,
    make_chain,
    record,
    resume,
)

from simckpt.errors import CaptureError, HalfRestoredError, RestoreError, StateMismatchError, UnsupportedStateError
from simckpt.sim.environment import EnvHandle, SnapshotEnv, StandaloneEnvHandle
from simckpt.state.tree import decode, encode

pytestmark = pytest.mark.filterwarnings("ignore:.*out of date")


def through_file(tree):
    encoded = encode(tree)
    return decode(encoded.leaves, encoded.structure)


@pytest.mark.parametrize(
    "name",
    [
        "Ant-v5",
        "Reacher-v4",
        "Walker2d-v5",
        "Humanoid-v5",
        "HalfCheetah-v5",
        "CartPole-v1",
        "Pendulum-v1",
        "chain",
        "simulated",
        "shared",
        "AdroitHandDoor-v1",
        "AntMaze_UMaze-v5",
    ],
)
def test_continues_bit_for_bit_in_another_process(name):
    pytest.importorskip("gymnasium_robotics" if name.startswith(("Adroit", "AntMaze")) else "gymnasium")
    encoded, expected = in_other_process(record, name)
    assert in_other_process(resume, name, encoded) == expected


def test_capturing_at_every_step_changes_nothing():
    plain, watched = make_chain("Ant-v5"), make_chain("Ant-v5")
    handle = EnvHandle(watched)
    rows = []
    for env in (plain, watched):
        env.reset(seed=1)
        env.action_space.seed(1)
        env.observation_space.seed(1)
        found = []
        for step in range(100):
            found += drive(env, 1, seed=step)
            if env is watched:
                handle.capture()
        rows.append(found)
    assert rows[0] == rows[1]


def test_snapshot_env_is_transparent():
    plain, wrapped = make("Ant-v5"), SnapshotEnv(make("Ant-v5"))
    for env in (plain, wrapped):
        env.action_space.seed(1)
        env.observation_space.seed(1)
    assert canonical(wrapped.reset(seed=5)) == canonical(plain.reset(seed=5))
    assert drive(wrapped, 50, seed=1) == drive(plain, 50, seed=1)
    assert wrapped.observation_space is wrapped.env.observation_space


@pytest.mark.parametrize("when", ["before the first reset", "after a reset", "in an episode", "at its end"])
def test_snapshots_of_any_moment(when):
    def prepare(seed):
        env = SnapshotEnv(Simulated())
        env.action_space.seed(seed)
        if when != "before the first reset":
            env.reset(seed=seed)
        if when == "in an episode":
            drive(env, 21, seed=seed)
        if when == "at its end":
            while not env.step(env.action_space.sample())[3]:
                pass
        return env

    source, target = prepare(1), prepare(2)
    state = through_file(source.state_dict())
    target.load_state_dict(state)
    expected = canonical(source.reset()), drive(source, 70, seed=4)
    assert (canonical(target.reset()), drive(target, 70, seed=4)) == expected
    target.load_state_dict(state)
    assert (canonical(target.reset()), drive(target, 70, seed=4)) == expected


def test_two_branches_of_one_snapshot_do_not_disturb_each_other():
    env = SnapshotEnv(make_chain("Ant-v5"))
    env.reset(seed=1)
    drive(env, 33, seed=1)
    state = env.state_dict()
    first = drive(env, 40, seed=2)
    env.load_state_dict(state)
    second = drive(env, 40, seed=3)
    env.load_state_dict(state)
    assert drive(env, 40, seed=2) == first
    env.load_state_dict(state)
    assert drive(env, 40, seed=3) == second
    assert first != second


def test_observations_already_returned_do_not_change():
    for env in (SnapshotEnv(make_chain("Ant-v5")), SnapshotEnv(Simulated())):
        env.reset(seed=1)
        state = env.state_dict()
        results = [env.step(env.action_space.sample()) for _ in range(10)]
        before = canonical(results)
        env.load_state_dict(state)
        assert canonical(results) == before


def test_views_of_the_simulation_stay_views_of_the_live_one():
    source, target = Simulated(), Simulated()
    source.reset(seed=1)
    target.reset(seed=2)
    target.velocity = np.zeros(3)
    state = StandaloneEnvHandle(source).capture()
    assert "velocity" in state["python"]["env"].attributes
    StandaloneEnvHandle(target).apply(through_file(state))
    target.velocity[0] = 123
    assert target.data.qvel[0] == 123


def test_the_tree_has_the_fields_by_name_and_baselines_once():
    handle = StandaloneEnvHandle(make("Ant-v5"))
    state = handle.capture()
    assert set(state) == {"physics", "model", "python", "models"}
    assert state["physics"]["qpos"].shape == (15,)
    assert state["model"]["difference"] == {}
    [(digest, fields)] = handle.models.items()
    assert state["model"]["baseline"] == digest
    assert state["models"][digest].keys() == fields.keys()
    assert {"body_mass", "opt.timestep", "tex_data", "nq"} <= fields.keys()
    assert set(EnvHandle(make("CartPole-v1")).capture()) == {"python"}
    two = StandaloneEnvHandle(Simulated()).capture()
    assert {"physics", "model", "physics_2", "model_2"} <= set(two)
    assert len(two["models"]) == 2


def test_another_env_is_refused_and_the_live_one_untouched():
    state = SnapshotEnv(make("Ant-v5")).state_dict()
    for other in (make("Hopper-v5"), make("CartPole-v1"), make_chain("Ant-v5")):
        env = SnapshotEnv(other)
        env.reset(seed=1)
        before = encode(env.state_dict())
        with pytest.raises(StateMismatchError) as caught:
            env.load_state_dict(state)
        assert caught.value.problems
        after = encode(env.state_dict())
        assert after.leaves.keys() == before.leaves.keys()
        assert all(after.leaves[path].data.tobytes() == before.leaves[path].data.tobytes() for path in before.leaves)


class Fragile(gym.Env):
    """Its own load_state_dict raises halfway."""

    action_space = observation_space = gym.spaces.Discrete(2)

    class Part:
        broken = False
        value = 0

        def state_dict(self):
            return {"value": self.value}

        def load_state_dict(self, state):
            self.value = state["value"]
            if self.broken and state["value"] == 1:
                raise OSError("halfway")

    def __init__(self):
        self.before = [1]
        self.part = self.Part()
        self.after = [1]


def test_a_failed_restore_leaves_the_env_as_it_was():
    env = SnapshotEnv(Fragile())
    inner = env.unwrapped
    inner.part.value = 1
    state = env.state_dict()
    inner.before[0] = inner.after[0] = inner.part.value = 2
    inner.part.broken = True
    with pytest.raises(RestoreError, match="OSError: halfway"):
        env.load_state_dict(state)
    assert (inner.before, inner.after, inner.part.value) == ([2], [2], 2)


def test_an_env_that_cannot_be_put_back_either_is_said_to_be_undefined():
    class Lost(Fragile):
        class Part(Fragile.Part):
            def load_state_dict(self, state):
                if self.broken:
                    raise OSError("halfway")

    env = SnapshotEnv(Lost())
    state = env.state_dict()
    env.unwrapped.part.broken = True
    with pytest.raises(HalfRestoredError, match="build it anew") as caught:
        env.load_state_dict(state)
    assert caught.value.components == ("env",)


def test_a_state_of_another_version_of_mujoco_is_warned_of_before_anything_changes():
    source, target = SnapshotEnv(Simulated()), SnapshotEnv(Simulated())
    source.reset(seed=1)
    target.reset(seed=2)
    state = source.state_dict()
    for name in ("model", "model_2"):
        state[name]["mujoco"] = "3.0.0"
    before = encode(target.state_dict())
    # warnings are errors here
    with pytest.raises(UserWarning, match=r"3\.0\.0"):
        target.load_state_dict(state)
    after = encode(target.state_dict())
    assert after.structure == before.structure
    assert all(after.leaves[path].data.tobytes() == before.leaves[path].data.tobytes() for path in before.leaves)
    with pytest.warns(UserWarning, match=r"3\.0\.0"):
        target.load_state_dict(state)
    assert target.unwrapped.data.qpos.tobytes() == source.unwrapped.data.qpos.tobytes()


def test_what_cannot_be_captured_is_refused_at_registration_with_its_path():
    env = make("CartPole-v1")
    env.unwrapped._socket = iter([1])
    with pytest.raises(UnsupportedStateError) as caught:
        EnvHandle(env, path="envs/env_0")
    assert caught.value.path == "envs/env_0/unwrapped._socket"


def test_what_appears_later_fails_the_capture_and_the_env_goes_on():
    env = SnapshotEnv(make("CartPole-v1"))
    env.reset(seed=1)
    env.unwrapped.late = iter([1])
    with pytest.raises(CaptureError, match=r"unwrapped\.late"):
        env.state_dict()
    env.step(0)
    del env.unwrapped.late
    env.state_dict()


def test_a_replaced_simulation_of_the_same_sizes_is_found_again():
    source, target = SnapshotEnv(Recompiling()), SnapshotEnv(Recompiling())
    source.reset(seed=3)
    drive(source, 20, seed=1)
    source.reset(seed=4)
    state = through_file(source.state_dict())
    target.reset(seed=9)
    live = target.unwrapped.data
    target.load_state_dict(state)
    assert target.unwrapped.data is live
    assert drive(target, 30, seed=2) == drive(source, 30, seed=2)


def test_a_replaced_simulation_of_other_sizes_is_refused():
    env = SnapshotEnv(Recompiling())
    env.reset(seed=1)
    env.state_dict()
    env.reset(options={"more": "<geom size='.1'/>"})
    with pytest.raises(UnsupportedStateError, match="ngeom"):
        env.state_dict()


MORE = {"more": "<geom size='.1'/>"}


def test_the_first_reset_may_compile_a_model_of_other_sizes():
    source, target = SnapshotEnv(Recompiling()), SnapshotEnv(Recompiling())
    # as registering it in a run does
    source.state_dict()
    source.reset(seed=3, options=MORE)
    drive(source, 20, seed=1)
    state = through_file(source.state_dict())
    small = encode(target.state_dict())
    with pytest.raises(StateMismatchError, match="ngeom"):
        target.load_state_dict(state)
    assert encode(target.state_dict()).structure == small.structure
    target.reset(seed=4, options=MORE)
    drive(target, 5, seed=7)
    target.load_state_dict(state)
    expected = drive(source, 20, seed=2)
    assert drive(target, 20, seed=2) == expected
    target.load_state_dict(state)
    assert drive(target, 20, seed=2) == expected
    source.reset(seed=5)
    with pytest.raises(UnsupportedStateError, match="ngeom"):
        source.state_dict()


def test_a_model_of_other_sizes_is_refused_in_an_env_that_was_reset_before():
    inner = gym.wrappers.OrderEnforcing(Recompiling())
    inner.reset(seed=1)
    env = SnapshotEnv(inner)
    env.reset(options=MORE)
    with pytest.raises(UnsupportedStateError, match="ngeom"):
        env.state_dict()


def test_restoring_keeps_the_seed_and_creates_lazy_generators():
    env, other = SnapshotEnv(Simulated()), SnapshotEnv(Simulated())
    handle_state = through_file(env.state_dict())
    assert env.unwrapped._np_random is not None
    other.load_state_dict(handle_state)
    assert other.unwrapped.np_random_seed == env.unwrapped.np_random_seed
    assert other.unwrapped.np_random.random() == env.unwrapped.np_random.random()
    assert other.observation_space.sample()["n"] == env.observation_space.sample()["n"]
    env.reset(seed=5)
    other.load_state_dict(through_file(env.state_dict()))
    assert other.unwrapped.np_random_seed == 5


def test_wall_clock_marks_move_with_the_clock():
    env = SnapshotEnv(gym.wrappers.RecordEpisodeStatistics(make("CartPole-v1")))
    env.reset(seed=1)
    statistics = env.env
    statistics.episode_start_time = time.perf_counter() - 1000
    state = through_file(env.state_dict())
    env.reset(seed=1)
    env.load_state_dict(state)
    passed = time.perf_counter() - statistics.episode_start_time
    # a second of tolerance for a busy machine
    assert 1000 <= passed < 1001


class Controller:
    """A control callback with state of its own, in its attributes, its closure and its module."""

    def __init__(self):
        self.calls = 0

    def __call__(self, model, data):
        global total
        self.calls += 1
        total += 1
        data.qfrc_applied[0] = np.sin(self.calls) + 0.1 * np.cos(total)


total = 0


def test_callbacks_continue_where_they_were():
    global total
    controller = Controller()
    env = SnapshotEnv(Simulated())
    mujoco.set_mjcb_control(controller)
    try:
        env.reset(seed=1)
        drive(env, 10, seed=1)
        state = through_file(env.state_dict())
        calls = controller.calls, total
        expected = drive(env, 10, seed=2)
        controller.calls = total = 1000
        env.load_state_dict(state)
        assert (controller.calls, total) == calls
        assert drive(env, 10, seed=2) == expected
        mujoco.set_mjcb_control(None)
        with pytest.raises(StateMismatchError, match="mjcb_control"):
            env.load_state_dict(state)
    finally:
        mujoco.set_mjcb_control(None)


def test_tensors_are_state_and_stay_in_place():
    torch = pytest.importorskip("torch")

    class Torch(gym.Env):
        def __init__(self, seed):
            self.action_space = self.observation_space = gym.spaces.Discrete(2)
            self.x = torch.zeros(3, dtype=torch.bfloat16)
            self.generator = torch.Generator().manual_seed(seed)
            self.net = torch.nn.Linear(2, 2)
            self.optimizer = torch.optim.Adam(self.net.parameters())
            self.weight = self.net.weight
            self.device, self.dtype = torch.device("cpu"), torch.float32

        def reset(self, *, seed=None, options=None):
            self.x.zero_()
            return 0, {}

        def step(self, action):
            self.x += torch.rand(3, generator=self.generator).bfloat16()
            self.optimizer.zero_grad(set_to_none=True)
            self.net(self.x[:2].float()).sum().backward()
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
            return int(self.x[0] > 1), float(self.net.weight.detach().sum()), False, False, {}

    source, target = SnapshotEnv(Torch(1)), SnapshotEnv(Torch(2))
    drive(source, 5, seed=1)
    drive(target, 2, seed=1)
    x, weight = target.unwrapped.x, target.unwrapped.weight
    target.load_state_dict(through_file(source.state_dict()))
    assert target.unwrapped.x is x
    assert target.unwrapped.weight is weight
    assert target.unwrapped.net.weight is weight
    assert drive(target, 10, seed=3) == drive(source, 10, seed=3)
