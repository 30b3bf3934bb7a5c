"""`ReplayBuffer` by itself: what goes in, what comes out, what is refused."""

from __future__ import annotations

import contextlib
import copy
import pickle
import subprocess
import sys
from collections import Counter

import gymnasium as gym
import numpy as np
import pytest

from simckpt.errors import ConfigurationError
from simckpt.replay import ReplayBuffer

BOX = gym.spaces.Box(-np.inf, np.inf, (3,), np.float64)
ACTIONS = gym.spaces.Box(-1, 1, (2,), np.float32)
COLUMNS = ("observations", "actions", "rewards", "terminated", "truncated", "next_observations", "valid")


def make(capacity=5, num_envs=2, observation_space=BOX, action_space=ACTIONS, seed=0):
    return ReplayBuffer(capacity, observation_space, action_space, num_envs=num_envs, seed=seed)


def add(buffer, number, valid=None):
    """Adds a row whose every value is known: transition `env` of row `number` is the number 10 * number + env."""
    values = 10.0 * number + np.arange(buffer.num_envs)
    terminated = np.arange(buffer.num_envs) == number % 3
    buffer.add(
        np.repeat(values[:, None], 3, axis=1),
        np.repeat(values[:, None], 2, axis=1) + 0.25,
        values + 0.5,
        terminated,
        ~terminated,
        np.repeat(values[:, None], 3, axis=1) + 0.75,
        valid=valid,
    )


def test_rows_fill_the_slots_in_order_and_then_replace_the_oldest() -> None:
    buffer = make(capacity=5)
    for number in range(7):
        assert len(buffer) == min(number, 5)
        add(buffer, number)
    assert (len(buffer), buffer.added) == (5, 7)
    first_values = buffer.observations[:, 0, 0].tolist()
    assert first_values == [50.0, 60.0, 20.0, 30.0, 40.0]
    assert buffer.rewards[1].tolist() == [60.5, 61.5]
    assert buffer.rewards.dtype == np.float32
    assert buffer.terminated[3].tolist() == [True, False]
    assert buffer.truncated[3].tolist() == [False, True]
    assert buffer.actions.dtype == np.float32
    assert buffer.next_observations.shape == (5, 2, 3)


def test_sampled_parts_belong_to_one_transition() -> None:
    buffer = make(capacity=5)
    for number in range(8):
        add(buffer, number)
    batch = buffer.sample(200)
    values = batch.observations[:, 0]
    assert batch.observations.shape == (200, 3)
    assert np.array_equal(batch.rewards, (values + 0.5).astype(np.float32))
    assert np.array_equal(batch.actions[:, 1], (values + 0.25).astype(np.float32))
    assert np.array_equal(batch.next_observations[:, 2], values + 0.75)
    assert np.array_equal(batch.terminated, values % 10 == (values // 10) % 3)
    assert np.array_equal(batch.truncated, ~batch.terminated)


def test_sampling_is_uniform_over_the_valid_transitions() -> None:
    buffer = make(capacity=6, num_envs=2)
    for number in range(8):
        add(buffer, number, valid=[number != 4, True])
    counts = Counter(buffer.sample(22_000).observations[:, 0].tolist())
    expected = {10.0 * number + env for number in range(2, 8) for env in range(2)} - {40.0}
    assert set(counts) == expected
    # 11 transitions, 2000 draws each on average, standard deviation 43: five of them
    assert all(abs(count - 2000) < 215 for count in counts.values())


def test_sampling_is_uniform_where_few_transitions_are_valid() -> None:
    buffer = make(capacity=20, num_envs=2)
    for number in range(25):
        add(buffer, number, valid=[number % 10 == 0, False])
    counts = Counter(buffer.sample(4000).observations[:, 0].tolist())
    assert set(counts) == {100.0, 200.0}
    # standard deviation 32
    assert abs(counts[100.0] - 2000) < 160


def test_equal_seeds_sample_alike_and_others_do_not() -> None:
    buffers = [make(capacity=50, seed=seed) for seed in (7, 7, 8)]
    for number in range(60):
        for buffer in buffers:
            add(buffer, number)
    drawn = [buffer.sample(64).observations.tobytes() for buffer in buffers]
    assert drawn[0] == drawn[1] != drawn[2]


def test_samples_and_given_arrays_share_no_memory_with_the_buffer() -> None:
    buffer = make(capacity=1, num_envs=1)
    observations = np.zeros((1, 3))
    buffer.add(observations, np.zeros((1, 2)), [0], [False], [False], observations)
    observations[:] = 9
    batch = buffer.sample(1)
    batch.observations[:] = 8
    assert buffer.observations.tolist() == [[[0.0, 0.0, 0.0]]]


def test_columns_cannot_be_written_to() -> None:
    buffer = make()
    add(buffer, 0)
    with pytest.raises(ValueError, match="read-only"):
        buffer.rewards[0] = 1
    with pytest.raises(AttributeError):
        buffer.rewards = np.zeros((5, 2))


def test_dict_and_discrete_spaces_are_nested_alike() -> None:
    space = gym.spaces.Dict(
        {"camera": gym.spaces.Box(0, 255, (2, 2), np.uint8), "arm": gym.spaces.Dict({"angles": BOX})}
    )
    buffer = ReplayBuffer(4, space, gym.spaces.Discrete(6), num_envs=1, seed=0)
    observation = {"camera": np.full((1, 2, 2), 200, np.uint8), "arm": {"angles": np.ones((1, 3))}}
    buffer.add(observation, np.array([5]), [1.0], [False], [False], observation)
    batch = buffer.sample(3)
    assert set(batch.observations) == {"camera", "arm"}
    assert batch.observations["camera"].dtype == np.uint8
    assert batch.observations["arm"]["angles"].tolist() == [[1.0, 1.0, 1.0]] * 3
    assert batch.actions.tolist() == [5, 5, 5]
    assert buffer.next_observations["camera"].shape == (4, 1, 2, 2)


def test_a_wrong_row_is_refused_and_leaves_the_buffer_as_it_was() -> None:
    buffer = make(capacity=1)
    add(buffer, 1)
    right = [np.zeros((2, 3)), np.zeros((2, 2)), np.zeros(2), [False] * 2, [False] * 2, np.zeros((2, 3))]
    for place, wrong, name in (
        (0, np.zeros(3), "observations"),
        (1, np.zeros((2, 3)), "actions"),
        (2, np.zeros((2, 1)), "rewards"),
        (3, [0.5, 1.0], "terminated"),
        (5, {"a": np.zeros((2, 3))}, "next_observations"),
    ):
        arguments = [*right[:place], wrong, *right[place + 1 :]]
        with pytest.raises(ConfigurationError, match=name):
            buffer.add(*arguments)
        assert (len(buffer), buffer.added) == (1, 1)
        assert buffer.observations[0, 0, 0] == 10.0


@pytest.mark.parametrize("name", COLUMNS)
@pytest.mark.parametrize(
    "wrong",
    [
        *(True, False, 0.0, np.True_, np.float32(0), np.zeros(()), [], [0.0], np.zeros(1), np.zeros((1, 1))),
        *(np.zeros((1, 2)), np.zeros((2, 1)), np.zeros((1, 3)), np.zeros((2, 1, 3)), np.zeros((0, 2)), np.zeros(3)),
        *([[0.0], [0.0, 0.0]], "text", object(), {}, [None, None]),
    ],
)
def test_what_has_not_the_shape_of_a_column_is_refused_for_every_column(name: str, wrong: object) -> None:
    buffer = make(capacity=1)
    add(buffer, 1)
    before = {column: getattr(buffer, column).copy() for column in COLUMNS}
    right = {
        "observations": np.zeros((2, 3)),
        "actions": np.zeros((2, 2)),
        "rewards": np.zeros(2),
        "terminated": [False] * 2,
        "truncated": [False] * 2,
        "next_observations": np.zeros((2, 3)),
        "valid": [True] * 2,
    }
    shape = np.shape(right[name])
    with pytest.raises(ConfigurationError) as caught:
        buffer.add(**right | {name: wrong})
    message = str(caught.value)
    assert message.startswith(f"{name} of a row is")
    assert str(shape) in message
    with contextlib.suppress(ValueError):
        assert f" {np.shape(wrong)}" in message
    assert (len(buffer), buffer.added) == (1, 1)
    for column, rows in before.items():
        assert np.array_equal(getattr(buffer, column), rows)


def test_valid_is_all_of_them_by_default_alone() -> None:
    buffer = make(capacity=2)
    row = [np.zeros((2, 3)), np.zeros((2, 2)), np.zeros(2), [False] * 2, [False] * 2, np.zeros((2, 3))]
    buffer.add(*row)
    buffer.add(*row, valid=[False, True])
    assert buffer.valid.tolist() == [[True, True], [False, True]]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"capacity": 0}, "capacity"),
        ({"capacity": 1.5}, "capacity"),
        ({"num_envs": 0}, "num_envs"),
        ({"observation_space": gym.spaces.Text(5)}, "observations"),
        ({"observation_space": gym.spaces.Tuple([BOX])}, "observations"),
        ({"action_space": gym.spaces.Dict({})}, "actions"),
    ],
)
def test_arguments_that_make_no_buffer_are_refused(arguments, message) -> None:
    with pytest.raises(ConfigurationError, match=message):
        make(**arguments)


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, lambda buffer: pickle.loads(pickle.dumps(buffer))])
def test_a_copy_goes_on_by_itself_and_samples_what_it_holds(duplicate) -> None:
    buffer, undisturbed = make(capacity=3), make(capacity=3)
    for number in range(2):
        add(buffer, number)
        add(undisturbed, number)
    twin = duplicate(buffer)
    for number in range(2, 5):
        add(twin, number)
    assert set(twin.sample(60).rewards.tolist()) == {20.5, 21.5, 30.5, 31.5, 40.5, 41.5}
    assert buffer.rewards.tobytes() == undisturbed.rewards.tobytes()
    assert buffer.sample(20).observations.tobytes() == undisturbed.sample(20).observations.tobytes()


def test_a_mapped_buffer_refuses_to_be_copied(tmp_path) -> None:
    buffer = ReplayBuffer(3, BOX, ACTIONS, seed=0, memory_map=tmp_path)
    for duplicate in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="memory-mapped"):
            duplicate(buffer)


def test_empty_parts_of_a_space_are_columns_like_others() -> None:
    space = gym.spaces.Dict(a=BOX, extra=gym.spaces.Box(-1, 1, (0,)), wide=gym.spaces.Box(-1, 1, (2, 0, 3)))
    buffer = make(capacity=3, observation_space=space)
    row = {"a": np.ones((2, 3)), "extra": np.zeros((2, 0)), "wide": np.zeros((2, 2, 0, 3))}
    buffer.add(row, np.zeros((2, 2)), np.zeros(2), np.zeros(2, bool), np.zeros(2, bool), row)
    sample = buffer.sample(4).observations
    assert {name: part.shape for name, part in sample.items()} == {"a": (4, 3), "extra": (4, 0), "wide": (4, 2, 0, 3)}


@pytest.mark.parametrize("seed", [-1, 1.5, None, "7", [1, 2]])
def test_a_seed_that_is_none_is_refused(seed) -> None:
    with pytest.raises(ConfigurationError, match="seed is a whole number"):
        make(seed=seed)


def test_more_rows_than_any_memory_has_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="need too much memory"):
        make(capacity=10**17)


def test_sampling_nothing_is_refused() -> None:
    buffer = make()
    with pytest.raises(ConfigurationError, match="no valid transition"):
        buffer.sample(1)
    add(buffer, 0, valid=[False, False])
    with pytest.raises(ConfigurationError, match="no valid transition"):
        buffer.sample(1)
    add(buffer, 1)
    with pytest.raises(ConfigurationError, match="batch_size"):
        buffer.sample(0)


def test_overwritten_rows_are_no_longer_counted_as_valid() -> None:
    buffer = make(capacity=2)
    add(buffer, 0)
    for number in (1, 2):
        add(buffer, number, valid=[False, False])
    with pytest.raises(ConfigurationError, match="no valid transition"):
        buffer.sample(1)


def test_no_heavy_library_is_imported() -> None:
    code = (
        "import sys, simckpt.replay; "
        "print([n for n in ('torch', 'gymnasium', 'stable_baselines3', 'torchrl', 'h5py') if n in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
