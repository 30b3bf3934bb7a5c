"""Buffers of Stable-Baselines3: each goes on after a restore as if nothing had happened, and saves new rows alone."""

import numpy as np
import pytest
from gymnasium import spaces

import simckpt
from simckpt import replay, state
from simckpt.errors import ReplayWarning, StateMismatchError, UnsupportedStateError
from simckpt.testing.log_store import LogStore
from simckpt.testing.replay_conformance import CAPACITY, ReplayAdapterSuite

pytest.importorskip("stable_baselines3")
from stable_baselines3.common.buffers import DictReplayBuffer, NStepReplayBuffer, ReplayBuffer, RolloutBuffer
from stable_baselines3.her import HerReplayBuffer

ENVS = 3
EPISODE = 4  # [rows]; in env 1 one more
ACTIONS = spaces.Box(-1, 1, (2,), np.float32)
VECTORS = spaces.Box(-np.inf, np.inf, (3,), np.float64)
GOALS = spaces.Dict(
    {
        "observation": spaces.Box(-np.inf, np.inf, (3,), np.float32),
        "achieved_goal": spaces.Box(-np.inf, np.inf, (2,), np.float32),
        "desired_goal": spaces.Box(-np.inf, np.inf, (2,), np.float32),
    }
)


class GoalEnvs:
    """What HER asks of its envs: rewards of other goals, here with a part that only the infos know."""

    def env_method(self, name, achieved, desired, infos, indices):
        assert name == "compute_reward"
        bonus = np.array([info.get("bonus", 0.0) for info in infos])
        return [np.linalg.norm(achieved - desired, axis=-1) + bonus]


def plain_buffer(rows, **arguments):
    return ReplayBuffer(rows * ENVS, VECTORS, ACTIONS, "cpu", n_envs=ENVS, **arguments)


def optimised_buffer(rows):
    return plain_buffer(rows, optimize_memory_usage=True, handle_timeout_termination=False)


def n_step_buffer(rows):
    return NStepReplayBuffer(rows * ENVS, VECTORS, ACTIONS, "cpu", n_envs=ENVS, n_steps=3, gamma=0.9)


def dict_buffer(rows):
    return DictReplayBuffer(rows * ENVS, GOALS, ACTIONS, "cpu", n_envs=ENVS)


def her_buffer(rows, **arguments):
    return HerReplayBuffer(rows * ENVS, GOALS, ACTIONS, GoalEnvs(), "cpu", n_envs=ENVS, **arguments)


def her_buffer_with_infos(rows):
    return her_buffer(rows, copy_info_dict=True, goal_selection_strategy="episode")


def observations(space, rng):
    if isinstance(space, spaces.Dict):
        return {key: rng.standard_normal((ENVS, *part.shape)).astype(part.dtype) for key, part in space.items()}
    return rng.standard_normal((ENVS, *space.shape)).astype(space.dtype)


def add_rows(buffer, first, count):
    for number in range(first, first + count):
        rng = np.random.default_rng(number)
        done = np.array([number % EPISODE == EPISODE - 1, number % (EPISODE + 1) == EPISODE, False])
        infos = [{"bonus": number + env / 8, "TimeLimit.truncated": bool(number % 3)} for env in range(ENVS)]
        if done[0]:
            infos[0]["terminal_observation"] = rng.standard_normal(3)
        before, after = observations(buffer.observation_space, rng), observations(buffer.observation_space, rng)
        buffer.add(before, after, rng.uniform(-1, 1, (ENVS, 2)), rng.standard_normal(ENVS), done, infos)


def draw(buffer, seed=0):
    np.random.seed(seed)
    return [part for part in buffer.sample(16) if part is not None]


def flat(value):
    """The bytes of everything in it."""
    if isinstance(value, dict):
        return [(key, *flat(part)) for key, part in value.items()]
    if isinstance(value, (list, tuple)):
        return [part for item in value for part in flat(item)]
    array = np.asarray(value)
    if array.dtype.hasobject:
        return flat(array.tolist())
    return [(array.dtype.str, array.shape, array.tobytes())]


def arrays(buffer):
    """Every array of a buffer, whole, with slots that no row has."""
    return {name: flat(value) for name, value in vars(buffer).items() if isinstance(value, (np.ndarray, dict))}


def restored(make, rows, store, checkpoint):
    buffer = make(rows)
    store.restore(replay.handle_for(buffer, "replay"), checkpoint)
    return buffer


class BufferSuite(ReplayAdapterSuite):
    make = None

    def make_buffer(self, capacity):
        return type(self).make(capacity)

    def add_rows(self, buffer, first, count):
        add_rows(buffer, first, count)

    def sample(self, buffer):
        return [draw(buffer, seed) for seed in range(3)] if buffer.size() > EPISODE + 1 else []


class TestReplayBuffer(BufferSuite):
    make = plain_buffer


class TestMemoryOptimisedBuffer(BufferSuite):
    make = optimised_buffer


class TestNStepReplayBuffer(BufferSuite):
    make = n_step_buffer


class TestDictReplayBuffer(BufferSuite):
    make = dict_buffer


class TestHerReplayBuffer(BufferSuite):
    make = her_buffer

    def rewrites(self):
        return {"truncate_last_trajectory": truncate}


class TestHerReplayBufferWithInfos(BufferSuite):
    make = her_buffer_with_infos


def truncate(buffer):
    with pytest.warns(UserWarning, match="last trajectory"):
        buffer.truncate_last_trajectory()


@pytest.mark.parametrize("make", [optimised_buffer, plain_buffer, her_buffer, her_buffer_with_infos])
def test_every_cursor_position_comes_back_slot_by_slot(make):
    rows = 11
    buffer, store = make(rows), LogStore()
    handle = replay.handle_for(buffer, "replay")
    for added in range(3 * rows):
        twin = restored(make, rows, store, store.save(handle))
        assert (twin.pos, twin.full) == (buffer.pos, buffer.full)
        assert arrays(twin) == arrays(buffer)
        if added > EPISODE:
            assert flat(draw(twin)) == flat(draw(buffer))
        # the twin is only looked at: the buffer's own saves go on
        add_rows(buffer, added, 1)


@pytest.mark.parametrize(
    "make", [plain_buffer, optimised_buffer, n_step_buffer, dict_buffer, her_buffer, her_buffer_with_infos]
)
@pytest.mark.parametrize("added", [6, CAPACITY, CAPACITY + 9])
def test_a_restored_buffer_goes_on_to_the_last_bit(make, added):
    buffer, store = make(CAPACITY), LogStore()
    handle = replay.handle_for(buffer, "replay")
    add_rows(buffer, 0, added // 2)
    store.save(handle)
    add_rows(buffer, added // 2, added - added // 2)
    twin = restored(make, CAPACITY, store, store.save(handle))
    for number in range(added, added + 2 * CAPACITY, 3):
        for each in (buffer, twin):
            add_rows(each, number, 3)
        assert flat(draw(twin, number)) == flat(draw(buffer, number))
    assert arrays(twin) == arrays(buffer)


@pytest.mark.parametrize("make", [plain_buffer, optimised_buffer, dict_buffer, her_buffer])
def test_a_full_ring_writes_its_new_rows_alone(make):
    rows = 400
    buffer, store = make(rows), LogStore()
    handle = replay.handle_for(buffer, "replay")
    add_rows(buffer, 0, rows + 20)
    store.save(handle)
    add_rows(buffer, rows + 20, 7)
    handle.forget(())
    logs = {
        path: leaf for path, leaf in state.encode(handle.capture()).leaves.items() if isinstance(leaf, state.LogLeaf)
    }
    assert {len(leaf.data) for leaf in logs.values()} == {7}
    # what is not a log is small, but for the episodes' lengths
    whole = [path for path, leaf in state.encode(handle.capture()).leaves.items() if leaf.data.nbytes > 1000]
    assert whole == (["ep_length"] if make is her_buffer else [])
    expected = {"actions", "rewards", "dones", "timeouts"} | ({"ep_start"} if make is her_buffer else set())
    assert {path for path in logs if "observations" not in path} == expected


def test_columns_keep_their_dtypes():
    buffer = ReplayBuffer(12, spaces.Box(0, 255, (2, 2, 1), np.uint8), spaces.Discrete(4), "cpu")
    buffer.add(np.full((1, 2, 2, 1), 7, np.uint8), np.zeros((1, 2, 2, 1), np.uint8), np.array([3]), 1.0, False, [{}])
    encoded = state.encode(replay.handle_for(buffer, "replay").capture())
    assert {path: leaf.dtype for path, leaf in encoded.leaves.items()} == {
        "observations": "uint8",
        "next_observations": "uint8",
        "actions": "int64",
        "rewards": "float32",
        "dones": "float32",
        "timeouts": "float32",
    }


def test_a_truncated_trajectory_is_written_again():
    buffer, store = her_buffer(CAPACITY), LogStore()
    handle = replay.handle_for(buffer, "replay")
    add_rows(buffer, 0, CAPACITY + 2)
    store.save(handle)
    truncate(buffer)
    with pytest.warns(ReplayWarning, match="dones"):
        checkpoint = store.save(handle)
    assert arrays(restored(her_buffer, CAPACITY, store, checkpoint)) == arrays(buffer)


def test_infos_of_every_kind_come_back():
    space, actions = GOALS, ACTIONS
    infos = [
        {"a": 1, "b": True, "c": 0.5, "d": np.float32(0.25), "e": np.arange(3), "f": None, "g": "text", "h": 2**70},
        {"nested": {"deeper": [1, 2]}, "e": np.arange(4, dtype=np.uint8), "nan": float("nan")},
        {},
        {"a": 1.0, "b": 1, "c": np.int64(3), "t": (1, "x"), "shape": np.zeros((0, 2))},
    ]
    buffer = HerReplayBuffer(4, space, actions, GoalEnvs(), "cpu", copy_info_dict=True)
    for info in infos:
        zeros = {key: np.zeros((1, *part.shape), part.dtype) for key, part in space.items()}
        buffer.add(zeros, zeros, np.zeros((1, 2)), np.zeros(1), np.array([True]), [info])
    store = LogStore()
    checkpoint = store.save(replay.handle_for(buffer, "replay"))
    twin = HerReplayBuffer(4, space, actions, GoalEnvs(), "cpu", copy_info_dict=True)
    store.restore(replay.handle_for(twin, "replay"), checkpoint)
    for found, info in zip(twin.infos[:, 0], infos, strict=True):
        assert list(found) == list(info)
        assert [type(value) for value in found.values()] == [type(value) for value in info.values()]
        assert repr(found) == repr(info)
        assert [getattr(value, "dtype", None) for value in found.values()] == [
            getattr(value, "dtype", None) for value in info.values()
        ]


def test_what_does_not_fit_is_refused_untouched():
    store = LogStore()
    buffer = plain_buffer(CAPACITY)
    add_rows(buffer, 0, 5)
    checkpoint = store.save(replay.handle_for(buffer, "replay"))
    with pytest.raises(StateMismatchError, match="next_observations: only in the checkpoint"):
        restored(optimised_buffer, CAPACITY, store, checkpoint)
    her = her_buffer(CAPACITY)
    add_rows(her, 0, 9)
    checkpoint = store.save(replay.handle_for(her, "replay"))
    with pytest.raises(StateMismatchError, match="HER needs the same"):
        restored(her_buffer, CAPACITY + 1, store, checkpoint)
    with pytest.raises(StateMismatchError, match="copy_info_dict=False"):
        restored(her_buffer_with_infos, CAPACITY, store, checkpoint)


def test_subclasses_are_refused_by_name_until_they_are_registered():
    class Relabelled(ReplayBuffer):
        def relabel(self, row, reward):
            self.rewards[row] = reward

    buffer = Relabelled(CAPACITY, VECTORS, ACTIONS, "cpu")
    with pytest.raises(UnsupportedStateError, match=r"'memory'.*Relabelled"):
        replay.handle_for(buffer, "memory")

    from simckpt.replay.sb3 import SB3Adapter

    replay.register_replay_adapter(Relabelled, SB3Adapter(mutable=["rewards"]))
    handle = replay.handle_for(buffer, "memory")
    leaves = state.encode(handle.capture()).leaves
    assert not isinstance(leaves["rewards"], state.LogLeaf)
    assert isinstance(leaves["actions"], state.LogLeaf)


def test_rollout_buffers_are_refused_by_name():
    with pytest.raises(UnsupportedStateError, match="RolloutBuffer"):
        replay.handle_for(RolloutBuffer(8, VECTORS, ACTIONS, "cpu"), "rollout")


def test_attributes_that_sb3_did_not_give_are_refused_by_name():
    buffer = plain_buffer(CAPACITY)
    handle = replay.handle_for(buffer, "replay")
    buffer.curriculum = 3
    with pytest.raises(UnsupportedStateError, match="curriculum"):
        handle.capture()


def test_episodes_that_a_reset_left_are_refused():
    buffer = her_buffer(CAPACITY)
    handle = replay.handle_for(buffer, "replay")
    add_rows(buffer, 0, 9)
    buffer.reset()
    with pytest.raises(UnsupportedStateError, match="ep_length"):
        handle.capture()


def test_a_plain_buffer_that_was_reset_starts_again():
    buffer, store = plain_buffer(CAPACITY), LogStore()
    handle = replay.handle_for(buffer, "replay")
    add_rows(buffer, 0, CAPACITY + 3)
    store.save(handle)
    buffer.reset()
    add_rows(buffer, 100, 4)
    twin = restored(plain_buffer, CAPACITY, store, store.save(handle))
    assert (twin.pos, twin.full) == (4, False)
    assert flat(draw(twin)) == flat(draw(buffer))


@pytest.mark.parametrize("make", [optimised_buffer, her_buffer_with_infos])
def test_a_run_goes_on_from_its_store_to_the_last_bit(tmp_path, make):
    def train(store, steps):
        """Goes on to this step from the newest checkpoint; returns the last batch and the buffer."""
        buffer = make(CAPACITY)
        loop = simckpt.LoopState(step=0)
        components = {"replay": buffer, "rng": simckpt.RNGStreams(), "loop": loop}
        with (
            simckpt.Store(store).start("run") as live,
            live.checkpointer(components, save_when=simckpt.EverySteps(8), keep=simckpt.KeepLast(2)) as checkpointer,
        ):
            if checkpointer.restore_latest() is None:
                np.random.seed(3)
            while loop.step < steps:
                add_rows(buffer, loop.step, 1)
                loop.step += 1
                drawn = buffer.sample(4) if loop.step > EPISODE + 1 else ()
                checkpointer.step(loop.step)
        return flat([part for part in drawn if part is not None]), arrays(buffer)

    undisturbed = train(tmp_path / "whole", 61)
    # what came after the last checkpoint is lost, and done again
    for stop in (21, 45, 61):
        resumed = train(tmp_path / "resumed", stop)
    assert resumed == undisturbed
