import random
import subprocess
import sys

import gymnasium as gym
import numpy as np
import pytest

import simckpt
from simckpt.comparison import compare, distances, fingerprint


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


def test_hyperparameters_that_differ_are_told_beside_the_leaves(store) -> None:
    checkpoints = []
    for name, values in (
        ("a", {"lr": 1e-3, "n": 1, "net": {"size": 64, "act": "tanh"}}),
        ("b", {"lr": 1e-4, "n": 1.0}),
    ):
        with store.start(name) as run:
            run.configure({**values, "net": values.get("net", {"size": 32, "act": "tanh"})})
            checkpointer = run.checkpointer({"loop": simckpt.LoopState(x=1)}, save_when=simckpt.EverySteps(1))
            checkpoints.append(checkpointer.save(1))
    result = compare(*checkpoints)
    assert result.identical
    assert [(each.name, each.values) for each in result.hyperparameters] == [
        ("lr", {"a": 1e-3, "b": 1e-4}),
        ("n", {"a": 1, "b": 1.0}),
        ("net.size", {"a": 64, "b": 32}),
    ]
    assert result.hyperparameters[1].text("b") == "1.0"
    assert compare(checkpoints[0], checkpoints[0]).hyperparameters == ()


def test_a_hyperparameter_of_one_alone_is_told(store) -> None:
    a, b = looped(store, "a", x=1), looped(store, "b", x=1)
    assert compare(a, b).hyperparameters == ()
    with store.start("c") as run:
        run.configure({"clip": 0.2})
        checkpointer = run.checkpointer({"loop": simckpt.LoopState(x=1)}, save_when=simckpt.EverySteps(1))
        c = checkpointer.save(1)
    (found,) = compare(a, c).hyperparameters
    assert (found.name, found.values, found.text("a")) == ("clip", {"b": 0.2}, "none of that name")


def test_distances_are_relative_to_the_first(store) -> None:
    one = {
        "x": np.array([3.0, 4.0]),
        "same": np.ones(3),
        "zero": np.zeros(2),
        "n": np.arange(4),
        "text": np.array(["a"]),
    }
    other = {
        "x": np.array([3.0, 4.5]),
        "same": np.ones(3),
        "zero": np.array([0.0, 2.0]),
        "n": np.arange(5),
        "text": np.array(["b"]),
    }
    found = {each.path: each for each in distances(looped(store, "a", **one), looped(store, "b", **other))}
    assert (found["loop/x"].relative, found["loop/x"].max_abs) == (0.1, 0.5)
    assert (found["loop/same"].relative, found["loop/same"].max_abs) == (0.0, 0.0)
    assert (found["loop/zero"].relative, found["loop/zero"].max_abs) == (np.inf, 2.0)
    assert (found["loop/n"].relative, found["loop/n"].max_abs) == (None, None)
    assert found["loop/text"].relative is None
    assert found["loop/x"].component == "loop"
    assert not any(path.endswith("_tree") for path in found)


def test_distances_look_at_the_components_that_are_named(store) -> None:
    a, b = (
        saved(store, name, one=simckpt.LoopState(x=np.ones(2)), two=simckpt.LoopState(y=np.ones(2))) for name in "ab"
    )
    assert [each.path for each in distances(a, b, {"two"})] == ["two/y"]


def test_a_comparison_shows_itself_in_a_notebook(store) -> None:
    a, b = looped(store, "a", **{"<x>": np.zeros(2)}), looped(store, "b", **{"<x>": np.ones(2)})
    html = compare(a, b)._repr_html_()
    assert "&lt;x&gt;" in html
    assert "2 of 2 elements differ" in html
    assert "1 place differs: A" in html
    both = compare(looped(store, "c", x=1, y=1), looped(store, "d", x=2, y=2))
    assert "2 places differ: A" in both._repr_html_()
    assert "identical" in compare(a, a)._repr_html_()
