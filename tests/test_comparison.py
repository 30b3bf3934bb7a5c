import random
import subprocess
import sys

import gymnasium as gym
import numpy as np
import pytest

import simckpt
from simckpt.comparison import compare, fingerprint


@pytest.fixture
def store(tmp_path) -> simckpt.Store:
    return simckpt.Store(tmp_path / "s")


def saved(store: simckpt.Store, name: str, **components: object) -> simckpt.Checkpoint:
    with store.start(name) as run:
        return run.checkpointer(components, save_when=simckpt.EverySteps(1)).save(1)


def looped(store: simckpt.Store, name: str, **values: object) -> simckpt.Checkpoint:
    return saved(store, name, loop=simckpt.LoopState(**values))


def test_equal_states_are_identical_and_have_equal_fingerprints(store) -> None:
    values = {"x": np.arange(3.0), "n": 5, "nan": float("nan"), "text": "é"}
    a, b = looped(store, "a", **values), looped(store, "b", **values)
    assert compare(a, b).identical
    assert fingerprint(a) == fingerprint(b)


@pytest.mark.parametrize(
    ("one", "other"),
    [(0.0, -0.0), (1, 1.0), (1, True), (np.zeros(2), -np.zeros(2)), ([1], (1,)), ("a", "b"), (None, 0)],
    ids=repr,
)
def test_what_differs_in_one_bit_or_type_differs(store, one: object, other: object) -> None:
    a, b = looped(store, "a", x=one), looped(store, "b", x=other)
    result = compare(a, b)
    assert [difference.path for difference in result.differences] == ["loop/x"]
    assert fingerprint(a) != fingerprint(b)


def test_the_distance_of_arrays_is_told(store) -> None:
    one, other = np.zeros((2, 3)), np.zeros((2, 3))
    other[1, 2] = -0.25
    (difference,) = compare(looped(store, "a", x=one), looped(store, "b", x=other)).differences
    assert difference.max_abs == 0.25
    assert "1 of 6" in difference.what


def test_a_component_in_one_alone_is_told(store) -> None:
    a = saved(store, "a", loop=simckpt.LoopState(x=1), extra=simckpt.LoopState())
    b = looped(store, "b", x=1)
    assert [(each.path, each.what) for each in compare(a, b).differences] == [("extra", "only in A")]


def test_elapsed_time_and_unused_unseeded_streams_are_exempt(store) -> None:
    def env() -> gym.Env:
        env = gym.wrappers.RecordEpisodeStatistics(gym.make("CartPole-v1"))
        env.reset(seed=1)
        for _ in range(30):
            if any(env.step(1)[2:4]):
                env.reset()
        return env

    a, b = (saved(store, name, env=env()) for name in "ab")
    result = compare(a, b)
    assert result.identical
    assert any("time_queue" in path for path in result.exempt)
    assert any("action_space" in path for path in result.exempt)
    assert fingerprint(a) == fingerprint(b)


def test_an_unseeded_stream_that_was_drawn_from_is_compared(store) -> None:
    def env() -> gym.Env:
        env = gym.make("CartPole-v1")
        env.reset(seed=1)
        env.action_space.sample()
        return env

    result = compare(saved(store, "a", env=env()), saved(store, "b", env=env()))
    assert any("action_space" in difference.path for difference in result.differences)


@pytest.mark.parametrize("seed", [random.seed, np.random.seed], ids=["python", "numpy"])
def test_runs_that_were_seeded_differently_differ(tmp_path, seed) -> None:
    code = """
import random, sys
import numpy as np
import simckpt
{}.seed(int(sys.argv[2]))
with simckpt.Store(sys.argv[1]).start("seed" + sys.argv[2]) as run:
    run.checkpointer({{"rng": simckpt.RNGStreams()}}, save_when=simckpt.EverySteps(1)).save(1)
"""
    module = "random" if seed is random.seed else "np.random"
    for number in "12":
        subprocess.run([sys.executable, "-c", code.format(module), str(tmp_path / "s"), number], check=True)
    runs = simckpt.Store(tmp_path / "s").runs()
    result = compare(runs[0].latest(), runs[1].latest())
    stream, other = ("python", "numpy") if seed is random.seed else ("numpy", "python")
    assert {difference.path.split("/")[1] for difference in result.differences} == {stream}
    assert f"rng/{other}" in result.exempt


def test_the_mark_of_an_unused_stream_survives_a_restore(tmp_path) -> None:
    code = """
import sys
import numpy as np
import simckpt
with simckpt.Store(sys.argv[1]).start("a") as run:
    checkpointer = run.checkpointer({"rng": simckpt.RNGStreams()}, save_when=simckpt.EverySteps(1))
    checkpointer.restore_latest()
    checkpointer.save(int(sys.argv[2]))
    if sys.argv[2] == "2":
        np.random.random()
        checkpointer.save(3)
"""
    for step in "12":
        subprocess.run([sys.executable, "-c", code, str(tmp_path / "s"), step], check=True)
    first, second, third = simckpt.Store(tmp_path / "s").run("a").checkpoints()
    unchanged = compare(first, second)
    assert {"rng/python", "rng/numpy"} <= set(unchanged.exempt)
    assert {difference.path.split("/")[0] for difference in unchanged.differences} == {"checkpointer"}
    assert any(difference.path.startswith("rng/numpy") for difference in compare(second, third).differences)
