"""Components that each rank has of its own, on another number of ranks; all ranks live in this one process."""

import random
from typing import Any

import gymnasium as gym
import numpy as np
import pytest

import simckpt
from simckpt import restore, state
from simckpt.distributed.resharding import Change, Deal, Move, fixed_streams, num_envs, reshard
from simckpt.errors import StateMismatchError
from simckpt.sim.worker import async_worker
from simckpt.state.leaf import Leaf
from simckpt.state.tree import Encoded

ENV = "Pendulum-v1"
STEPS = 7


def make_envs(count: int, *, is_async: bool = False, limit: int = 5) -> gym.vector.VectorEnv:
    """Returns envs with a wrapper that has a place for each of them, and episodes that end within a test."""
    makers = [lambda: gym.make(ENV, max_episode_steps=limit)] * count
    envs: Any = gym.vector.AsyncVectorEnv(makers, worker=async_worker) if is_async else gym.vector.SyncVectorEnv(makers)
    return gym.wrappers.vector.RecordEpisodeStatistics(envs)


def played(count: int, rank: int, **options: Any) -> gym.vector.VectorEnv:
    envs = make_envs(count, **options)
    envs.reset(seed=100 * rank)
    envs.action_space.seed(rank)
    for _ in range(STEPS):
        envs.step(envs.action_space.sample())
    return envs


def captured(name: str, obj: Any) -> Any:
    """Returns the state of an object as a file gives it back."""
    handle = restore.bind({name: obj})[name].handle
    encoded = state.encode(handle.capture())
    return state.decode(encoded.leaves, encoded.structure)


def change(rank: int, before: int, after: int, deals: dict[str, Deal] | None = None, *, origin: str = "c0") -> Change:
    return Change(origin, rank, before, after, deals or {})


def resharded(name: str, saved: list[Any], live: Any, what: Change, *, apply: bool = True) -> Any:
    """Puts the states of all old ranks into a live object of a new one; returns the report."""
    handle = restore.bind({name: live})[name].handle
    found = reshard(name, handle, dict(enumerate(saved)), handle.capture(), what)
    if apply:
        encoded = state.encode(found.tree)
        tree = state.decode(encoded.leaves, encoded.structure, template=handle.capture())
        handle.validate(tree)
        handle.apply(tree)
    return found


def test_envs_are_dealt_out_in_the_order_of_the_ranks() -> None:
    assert Deal((4, 4), (2, 2, 2, 2)).moves(2) == [Move(1, 0, 2)]
    assert Deal((2, 2, 2, 2), (4, 4)).moves(1) == [Move(2, 0, 2), Move(3, 0, 2)]
    assert Deal((3, 3), (1, 4, 1)).moves(1) == [Move(0, 1, 3), Move(1, 0, 2)]
    assert Deal((6,), (2, 2, 2)).moves(0) == [Move(0, 0, 2)]
    assert not Deal((4, 4), (4,)).fits


@pytest.mark.parametrize(
    "shapes", [((2, 2, 2, 2), (4, 4)), ((4, 4), (2, 2, 2, 2)), ((3, 3), (1, 4, 1)), ((6,), (3, 3))]
)
def test_envs_go_on_on_other_ranks_as_they_would_have_on_their_own(shapes: tuple) -> None:
    before, after = shapes
    old = [played(count, rank) for rank, count in enumerate(before)]
    saved = [captured("envs", envs) for envs in old]
    assert [num_envs(tree) for tree in saved] == list(before)
    deal = Deal(before, after)
    new = [make_envs(count) for count in after]
    for rank, envs in enumerate(new):
        found = resharded("envs", saved, envs, change(rank, len(before), len(after), {"envs": deal}))
        assert any("with their generators" in line for line in found.lines)
    # twice the length of an episode: pending autoresets, and resets by each env's own generator
    generator = np.random.default_rng(0)
    for _ in range(10):
        actions = generator.uniform(-2, 2, (sum(before), 1)).astype(np.float32)
        results = [step_all(envs_list, actions) for envs_list in (old, new)]
        for one, other in zip(*results, strict=True):
            assert one.tobytes() == other.tobytes()


def step_all(envs_list: list[Any], actions: np.ndarray) -> list[np.ndarray]:
    """Returns observations, rewards, ends and the wrapper's running returns of all envs, rank after rank."""
    found, passed = [], 0
    for envs in envs_list:
        results = envs.step(actions[passed : passed + envs.num_envs])
        passed += envs.num_envs
        found.append([*results[:4], envs.episode_returns, envs.episode_lengths])
    return [np.concatenate(parts) for parts in zip(*found, strict=True)]


def test_envs_of_workers_go_to_a_vector_env_without_any() -> None:
    old = [played(2, rank, is_async=True) for rank in range(2)]
    try:
        saved = [captured("envs", envs) for envs in old]
        (new,) = [make_envs(4)]
        resharded("envs", saved, new, change(0, 2, 1, {"envs": Deal((2, 2), (4,))}))
        actions = np.linspace(-2, 2, 4, dtype=np.float32)[:, None]
        for _ in range(6):
            for one, other in zip(step_all(old, actions), step_all([new], actions), strict=True):
                assert one.tobytes() == other.tobytes()
    finally:
        for envs in old:
            envs.close()


def test_samplers_of_the_vector_envs_spaces_are_never_the_same_twice() -> None:
    saved = [captured("envs", played(2, rank)) for rank in range(2)]
    samples = [captured_sample(saved, rank, 4) for rank in range(4)]
    assert len(set(samples)) == 4
    assert samples == [captured_sample(saved, rank, 4) for rank in range(4)]
    assert not set(samples) & {captured_sample(saved, rank, 4, origin="c1") for rank in range(4)}


def captured_sample(saved: list[Any], rank: int, size: int, *, origin: str = "c0") -> bytes:
    envs = make_envs(1)
    resharded("envs", saved, envs, change(rank, 2, size, {"envs": Deal((2, 2), (1,) * size)}, origin=origin))
    return envs.action_space.sample().tobytes()


def test_what_a_wrapper_keeps_for_all_its_envs_is_told() -> None:
    def normalised(count: int) -> Any:
        return gym.wrappers.vector.NormalizeObservation(make_envs(count))

    old = [normalised(2) for _ in range(2)]
    for rank, envs in enumerate(old):
        envs.reset(seed=rank)
        for _ in range(3):
            envs.step(np.full((2, 1), rank, np.float32))
    new = normalised(4)
    found = resharded("envs", [captured("envs", e) for e in old], new, change(0, 2, 1, {"envs": Deal((2, 2), (4,))}))
    assert new.obs_rms.mean.tobytes() == old[0].obs_rms.mean.tobytes()
    (line,) = [line for line in found.lines if "what wrappers keep" in line]
    assert "that of rank 0 here" in line
    assert "obs_rms" in line


def test_other_numbers_of_envs_are_refused_with_both_numbers() -> None:
    saved = [captured("envs", played(2, rank)) for rank in range(2)]
    with pytest.raises(StateMismatchError, match="has 4 envs on 2 ranks, the 1 ranks here have 2"):
        resharded("envs", saved, make_envs(2), change(0, 2, 1, {"envs": Deal((2, 2), (2,))}))


def test_streams_are_derived_anew_for_each_rank_and_never_twice() -> None:
    def streams(seed: int) -> tuple[Any, Any, Any]:
        numpy, python = np.random.default_rng(seed), random.Random(seed)
        return simckpt.RNGStreams(numpy=numpy, other=python), numpy, python

    kept = state.global_streams_state()
    try:
        saved = [captured("rng", streams(rank)[0]) for rank in range(2)]
        drawn: list[tuple] = []
        for size in (1, 3, 4):
            for rank in range(size):
                component, numpy, python = streams(99)
                found = resharded("rng", saved, component, change(rank, 2, size))
                assert "derived anew" in found.lines[0]
                drawn.append((numpy.random(), python.random(), random.random(), float(np.random.random())))
        # also across numbers of ranks, and none is a stream that was saved
        drawn += [
            (np.random.default_rng(seed).random(), random.Random(seed).random(), -seed, -seed) for seed in range(2)
        ]
        for column in zip(*drawn, strict=True):
            assert len(set(column)) == len(column)
    finally:
        state.load_global_streams(kept)


def loops(count: int, ranks: int, **more: Any) -> list[Any]:
    """Returns the loops of ranks: what is equal on all, and arrays with a place for each env."""
    found = []
    for rank in range(ranks):
        observations = np.arange(count * 3, dtype=np.float32).reshape(count, 3) + 100 * rank
        values = {
            "step": 40,
            "observations": observations,
            "episode": {"returns": np.full(count, float(rank)), "lengths": np.zeros(count, int)},
            "names": ("a", "b"),
            "rng": np.random.default_rng(rank),
            **{name: make(rank) for name, make in more.items()},
        }
        found.append(simckpt.LoopState(**values))
    return found


def test_variables_of_a_loop_are_kept_or_go_with_the_envs() -> None:
    saved = [captured("loop", loop) for loop in loops(2, 2)]
    draws = []
    for rank, expected in enumerate(([0.0], [0.0], [1.0], [1.0])):
        live = simckpt.LoopState(step=0, observations=None, episode=None, names=(), rng=np.random.default_rng(7))
        found = resharded("loop", saved, live, change(rank, 2, 4, {"envs": Deal((2, 2), (1,) * 4)}))
        assert live.step == 40
        assert live.names == ("a", "b")
        assert live.observations.tolist() == [[100 * (rank // 2) + 3 * (rank % 2) + i for i in range(3)]]
        assert live.episode["returns"].tolist() == expected
        assert live.episode["lengths"].tolist() == [0]
        draws.append(live.rng.random())
        assert any("observations, episode went along with the envs" in line for line in found.lines)
    assert len(set(draws)) == 4


def test_a_constant_that_is_as_long_as_there_were_envs_is_kept() -> None:
    saved = [captured("loop", loop) for loop in loops(2, 2, bounds=lambda rank: np.array([-1.0, 1.0]))]
    live = simckpt.LoopState(
        step=0, observations=None, episode=None, names=(), rng=np.random.default_rng(7), bounds=np.zeros(2)
    )
    resharded("loop", saved, live, change(0, 2, 1, {"envs": Deal((2, 2), (4,))}))
    assert live.bounds.tolist() == [-1.0, 1.0]
    assert len(live.observations) == 4


def test_variables_that_belong_to_one_rank_are_refused_by_name() -> None:
    saved = [captured("loop", loop) for loop in loops(2, 2, best=lambda rank: 0.5 + rank, seen=lambda rank: [rank])]
    live = simckpt.LoopState(step=0)
    with pytest.raises(
        StateMismatchError, match=r"loop/best: .*; loop/seen: .*leave it as the program has it"
    ) as caught:
        resharded("loop", saved, live, change(0, 2, 1, {"envs": Deal((2, 2), (4,))}))
    assert len(caught.value.problems) == 2


def buffers(count: int, ranks: int, *, rows: int, capacity: int = 8) -> list[simckpt.ReplayBuffer]:
    """Returns replay buffers whose rewards say `1000 * row + 10 * rank + env`."""
    found = []
    for rank in range(ranks):
        buffer = make_buffer(count, capacity, seed=rank)
        for row in range(rows):
            rewards = 1000.0 * row + 10 * rank + np.arange(count)
            ones = np.ones((count, 3), np.float32)
            zeros = np.zeros(count, bool)
            buffer.add(ones * row, np.zeros((count, 1), np.float32), rewards, zeros, zeros, ones * (row + 1))
        found.append(buffer)
    return found


def make_buffer(count: int, capacity: int = 8, *, seed: int = 50) -> simckpt.ReplayBuffer:
    space = gym.make(ENV)
    return simckpt.ReplayBuffer(capacity, space.observation_space, space.action_space, num_envs=count, seed=seed)


def test_rows_keep_their_slots_where_their_envs_are_dealt_out() -> None:
    saved = [captured("replay", buffer) for buffer in buffers(2, 2, rows=11)]
    new = make_buffer(4)
    resharded("replay", saved, new, change(0, 2, 1, {"envs": Deal((2, 2), (4,))}))
    # 11 rows in 8 slots: rows 8 to 10 have overwritten the first three
    rows = np.array([8, 9, 10, 3, 4, 5, 6, 7])
    assert new.rewards.tolist() == (1000 * rows[:, None] + np.array([0, 1, 10, 11])).tolist()
    assert (len(new), new.added) == (8, 11)
    new.sample(4)


@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2), (2, 3), (4, 2)])
def test_rows_are_dealt_out_once_each_where_ranks_have_as_many_envs_as_before(before: int, after: int) -> None:
    old = buffers(2, before, rows=6)
    saved = [captured("replay", buffer) for buffer in old]
    deal = Deal((2,) * before, (2,) * after)
    rewards, samples = [], set()
    for rank in range(after):
        new = make_buffer(2, capacity=40)
        found = resharded("replay", saved, new, change(rank, before, after, {"envs": deal}))
        assert f"of {6 * before} rows dealt out" in found.lines[0]
        assert abs(len(new) - 6 * before / after) < 1
        rows = new.rewards[: len(new), 0] // 1000
        assert (np.diff(rows) >= 0).all()
        rewards += new.rewards[: len(new)].tolist()
        samples.add(new.sample(5).rewards.tobytes())
    assert sorted(rewards) == sorted(row for buffer in old for row in buffer.rewards[:6].tolist())
    assert len(samples) == after


def test_rows_that_there_is_no_room_for_are_the_oldest_and_told() -> None:
    saved = [captured("replay", buffer) for buffer in buffers(2, 2, rows=6)]
    new = make_buffer(2, capacity=8)
    found = resharded("replay", saved, new, change(0, 2, 1, {"envs": Deal((2, 2), (2,))}))
    assert any("4 rows dropped, the oldest" in line for line in found.lines)
    assert sorted(set((new.rewards // 1000).ravel().tolist())) == [2, 3, 4, 5]


def test_ranks_that_had_added_different_numbers_of_rows_keep_the_newest_of_each() -> None:
    saved = [captured("replay", buffers(2, 2, rows=rows)[rank]) for rank, rows in enumerate((5, 7))]
    new = make_buffer(4)
    found = resharded("replay", saved, new, change(0, 2, 1, {"envs": Deal((2, 2), (4,))}))
    assert any("newest 5 are kept, 2 older ones dropped" in line for line in found.lines)
    assert (new.rewards[:5] // 1000).tolist() == [[r, r, r + 2, r + 2] for r in range(5)]


def test_rows_that_belong_together_are_not_dealt_out() -> None:
    buffers_module = pytest.importorskip("stable_baselines3.common.buffers")
    space = gym.make(ENV)

    def make() -> Any:
        return buffers_module.ReplayBuffer(
            8, space.observation_space, space.action_space, n_envs=2, optimize_memory_usage=True,
            handle_timeout_termination=False,
        )  # fmt: skip

    saved = [captured("replay", make()) for _ in range(2)]
    with pytest.raises(StateMismatchError, match="belong together"):
        resharded("replay", saved, make(), change(0, 2, 1, {"envs": Deal((2, 2), (2,))}))


def test_a_generator_that_is_a_component_is_derived_anew() -> None:
    saved = [captured("sampler", np.random.default_rng(rank)) for rank in range(2)]
    new = [np.random.default_rng(9) for _ in range(3)]
    for rank, generator in enumerate(new):
        resharded("sampler", saved, generator, change(rank, 2, 3))
    assert len({generator.random() for generator in (*new, *map(np.random.default_rng, range(2)))}) == 5


def test_a_variable_that_only_another_rank_has_is_not_dropped() -> None:
    saved: list[Any] = [{"step": 1}, {"step": 1, "extra": 2}]
    with pytest.raises(StateMismatchError, match="loop/extra: not all ranks have it"):
        resharded("loop", saved, simckpt.LoopState(step=0), change(0, 2, 1))


def test_any_other_component_must_have_been_equal_on_all_ranks() -> None:
    class Counter:
        def __init__(self, value: int) -> None:
            self.value = value

        def state_dict(self) -> dict:
            return {"value": self.value}

        def load_state_dict(self, saved: dict) -> None:
            self.value = saved["value"]

    live = Counter(0)
    found = resharded("counter", [{"value": 3}, {"value": 3}], live, change(0, 2, 3))
    assert live.value == 3
    assert "equal on all ranks" in found.lines[0]
    with pytest.raises(StateMismatchError, match="counter: it differed between ranks 0 and 1"):
        resharded("counter", [{"value": 3}, {"value": 4}], live, change(0, 2, 3))


class Noise:
    """A component of a user's own, with a generator in its state."""

    def __init__(self, seed: int) -> None:
        self.generator, self.scale = np.random.default_rng(seed), 0.0

    def state_dict(self) -> dict:
        return {"generator": self.generator.bit_generator.state, "scale": self.scale}

    def load_state_dict(self, saved: dict) -> None:
        self.generator.bit_generator.state, self.scale = saved["generator"], saved["scale"]


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 3), (3, 1)])
def test_streams_in_any_other_component_are_derived_anew_and_never_twice(before: int, after: int) -> None:
    old = [Noise(rank) for rank in range(before)]
    for each in old:
        each.scale = 0.5
    saved = [captured("noise", each) for each in old]
    new = [Noise(99) for _ in range(after)]
    for rank, live in enumerate(new):
        found = resharded("noise", saved, live, change(rank, before, after))
        assert "random streams are derived anew" in found.lines[0]
        assert live.scale == 0.5
    assert len({each.generator.random() for each in (*old, *new)}) == before + after
    # what was saved is as it was, for the next rank that reads it
    assert saved[0]["generator"] == np.random.default_rng(0).bit_generator.state


def test_an_env_that_is_no_vector_env_gets_streams_of_its_own_on_each_rank() -> None:
    old = gym.make(ENV)
    old.reset(seed=1)
    saved, resets = [captured("env", old)], []
    for rank in range(2):
        live = gym.make(ENV)
        live.reset(seed=2)
        resharded("env", saved, live, change(rank, 1, 2))
        resets.append(live.reset()[0].tobytes())
    resets.append(old.reset()[0].tobytes())
    assert len(set(resets)) == 3


def test_streams_that_cannot_be_derived_anew_do_not_go_to_several_ranks() -> None:
    torch = pytest.importorskip("torch")

    class Holder(Noise):
        def state_dict(self) -> dict:
            return {**super().state_dict(), "torch": torch.get_rng_state()}

    for name, make in {
        "loop": lambda: simckpt.LoopState(step=1, torch=torch.get_rng_state()),
        "other": lambda: Holder(1),
    }.items():
        saved = [captured(name, make())]
        with pytest.raises(StateMismatchError, match=f"{name}/torch: .*cannot be derived anew"):
            resharded(name, saved, make(), change(0, 1, 2))
        resharded(name, saved * 2, make(), change(0, 2, 1))


def test_keys_of_jax_are_known_by_their_kind() -> None:
    leaves = {
        "key": Leaf(np.zeros(2, np.uint32), "key<fry>", (2,), "jax.key"),
        "numbers": Leaf(np.zeros(2, np.uint32), "uint32", (2,), "numpy"),
    }
    assert fixed_streams(Encoded(leaves, b"")) == ["key"]
    assert fixed_streams(Encoded(leaves, b""), besides={"key"}) == []
