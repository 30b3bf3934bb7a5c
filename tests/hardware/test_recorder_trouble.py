"""What cannot be recorded: the loop goes on with what the env gave, and the session tells which row it was."""

import os
import signal
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from recorder_helpers import Counting, Seen

import simckpt
from simckpt.errors import ConfigurationError, RecordingWarning
from simckpt.hardware import Recorder, Replay

ACTION = np.array([0.5, -0.25], np.float32)


def told(caught: list[warnings.WarningMessage]) -> list[str]:
    """Returns the texts of what was warned of, all of it by recorders."""
    assert {each.category for each in caught} <= {RecordingWarning}
    return [str(each.message) for each in caught]


@contextmanager
def warned(match: str) -> Iterator[None]:
    """Expects to be told of something."""
    with pytest.warns(RecordingWarning, match=match):
        yield


def odd_env(odd: dict[int, Callable[[tuple[Any, ...]], Any]]) -> type[Counting]:
    """Returns a class of envs that give something else in some of their steps, and keep it."""

    class Odd(Counting):
        calls = 0
        given: Any = None

        def step(self, action: Any) -> Any:
            result = super().step(action.copy() if isinstance(action, np.ndarray) else np.zeros(2))
            result = odd.get(self.calls, lambda same: same)(result)
            self.calls += 1
            type(self).given = result
            return result

    return Odd


def with_reward(value: Any) -> Callable[[Any], Any]:
    return lambda result: (result[0], value, *result[2:])


def with_observation(value: Any) -> Callable[[Any], Any]:
    return lambda result: (value, *result[1:])


@pytest.mark.parametrize(
    ("change", "cause"),
    [
        (with_reward(None), "the reward cannot be recorded"),
        (with_reward("much"), "the reward cannot be recorded"),
        (with_reward(np.zeros(2)), "the reward cannot be recorded"),
        (with_observation(None), "observation cannot be recorded"),
        (with_observation(np.zeros(4)), "observation cannot be recorded: its shape is (4,), and was (3,)"),
        (with_observation([[1.0], [1.0, 2.0]]), "observation cannot be recorded"),
        (with_observation({"arm": np.zeros(3)}), "observation cannot be recorded: it has the parts arm"),
        (lambda result: (*result[:2], None, *result[3:]), "a flag of the step cannot be recorded"),
        (lambda result: result[:4], "ValueError: not enough values to unpack"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_row_that_cannot_be_recorded_is_passed_over(tmp_path, change, cause) -> None:
    bad = (1, 4, 7, 8, 9, 20)
    env_class = odd_env(dict.fromkeys(bad, change))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with Recorder(env_class(), tmp_path, "pole", snapshot_every=1e5) as env:
            env.reset(seed=1)
            seen = []
            for _ in range(25):
                result = env.step(ACTION)
                assert result is env_class.given
                seen.append(result[0].tobytes() if isinstance(result[0], np.ndarray) else b"")
    (text,) = told(caught)
    assert text.startswith("row 1 was not recorded: ")
    assert cause in text
    session = simckpt.Store(tmp_path).session("pole")
    rows = session.read(["rows"])["rows"]
    good = [row for row in range(25) if row not in bad]
    assert rows["row"].tolist() == good
    assert [observation.tobytes() for observation in rows["observation"]] == [seen[row] for row in good]
    assert [row for gap in session.missing for row in gap] == list(bad)
    assert [(event.kind, event.row) for event in session.events] == [("unrecorded", row) for row in bad]
    assert [each.row for each in session.snapshots] == [0, *(row + 1 for row in bad)]
    with Replay(session, env_class()) as replay:
        report = replay.run()
    assert report.exact, str(report)
    assert [row for stretch in report.rows for row in stretch] == good


def test_a_signal_that_fails_or_changes_its_size_is_named(tmp_path) -> None:
    calls = {"heat": 0, "forces": 0}

    def heat(env: Any, info: Any) -> float:
        calls["heat"] += 1
        return {3: info}[calls["heat"]]["no such thing"] if calls["heat"] == 3 else calls["heat"] / 3

    def forces(env: Any, info: Any) -> Any:
        calls["forces"] += 1
        return np.zeros(5 if calls["forces"] == 6 else 2)

    signals = {"heat": heat, "forces": forces}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with Recorder(Counting(), tmp_path, "pole", snapshot_every=1e5, signals=signals) as env:
            env.reset(seed=1)
            seen = Seen(env)
            seen.run(10)
    first, second = told(caught)
    assert "row 2 was not recorded: signal 'heat' raised KeyError" in first
    assert "signals/forces cannot be recorded: its shape is (5,), and was (2,) before" in second
    session = simckpt.Store(tmp_path).session("pole")
    rows = session.read(["rows"])["rows"]
    # the second one is not asked where the first one fails
    assert session.missing == [range(2, 3), range(6, 7)]
    assert rows["signals"]["heat"].tolist() == [(row + 1) / 3 for row in rows["row"].tolist()]
    with Replay(session, Counting()) as replay:
        assert replay.run().exact


def test_a_signal_that_always_fails_costs_few_events_and_parts(tmp_path) -> None:
    def broken(env: Any, info: Any) -> float:
        raise ZeroDivisionError

    with (
        warned("row 0 was not recorded: signal 'broken' raised ZeroDivisionError"),
        Recorder(Counting(), tmp_path, "pole", signals={"broken": broken}) as env,
    ):
        env.reset(seed=1)
        Seen(env).run(3000)
    session = simckpt.Store(tmp_path).session("pole")
    assert [row for gap in session.missing for row in gap] == list(range(3000))
    assert len(session.parts) < 10
    # an event and a snapshot for each of a hundred rows; then one in a second
    assert 100 <= len(session.events) < 300
    assert 100 <= len(session.snapshots) < 200


def test_an_action_that_cannot_be_recorded_reaches_the_env(tmp_path) -> None:
    env_class = odd_env({})
    with (
        warned("row 2 was not recorded: action cannot be recorded: it is str 'left'"),
        Recorder(env_class(), tmp_path, "pole", snapshot_every=1e5) as env,
    ):
        env.reset(seed=1)
        for row in range(6):
            env.step("left" if row == 2 else ACTION)
    session = simckpt.Store(tmp_path).session("pole")
    assert session.missing == [range(2, 3)]
    with Replay(session, env_class()) as replay:
        assert replay.run().exact


def test_rewards_and_flags_are_recorded_as_the_numbers_that_they_are(tmp_path) -> None:
    rewards = [np.array([1.5]), np.float32(1 / 3), 2, np.array(0.25), True, np.array([[7]])]
    flags = [np.bool_(True), False, np.array([True]), 1, np.array(False), 0]
    odd = {row: lambda result, row=row: (result[0], rewards[row], flags[row], *result[3:]) for row in range(6)}
    env_class = odd_env(odd)
    with Recorder(env_class(), tmp_path, "pole") as env:
        env.reset(seed=1)
        for _ in range(6):
            env.step(ACTION)
    session = simckpt.Store(tmp_path).session("pole")
    rows = session.read(["rows"])["rows"]
    assert rows["reward"].tolist() == [1.5, float(np.float32(1 / 3)), 2.0, 0.25, 1.0, 7.0]
    assert rows["terminated"].tolist() == [True, False, True, True, False, False]
    with Replay(session, env_class()) as replay:
        assert replay.run().exact


def test_a_reset_that_cannot_be_recorded_is_told(tmp_path) -> None:
    class Odd(Counting):
        resets = 0

        def reset(self, **arguments: Any) -> Any:
            observation, info = super().reset(**arguments)
            self.resets += 1
            return (None if self.resets == 2 else observation), info

    with (
        warned("the reset before row 4 was not recorded: reset observation cannot be"),
        Recorder(Odd(), tmp_path, "pole", snapshot_every=1e5) as env,
    ):
        for seed in range(3):
            env.reset(seed=seed)
            Seen(env).run(4)
    session = simckpt.Store(tmp_path).session("pole")
    assert [(event.kind, event.row) for event in session.events] == [("unrecorded", 4)]
    assert session.read(["resets"])["resets"]["seed"].tolist() == [0, 2]
    assert len(session.rows) == 12
    assert session.missing == []
    with Replay(session, Odd()) as replay:
        report = replay.run()
    assert report.exact, str(report)
    assert [row for stretch in report.rows for row in stretch] == list(range(12))


class Sensor:
    """Something of an env with a state of its own, which cannot always be had."""

    def __init__(self) -> None:
        self.fails = False

    def state_dict(self) -> dict[str, Any]:
        if self.fails:
            raise OSError("the sensor does not answer")
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes nothing."""


def test_a_snapshot_that_cannot_be_taken_is_told(tmp_path) -> None:
    env = Counting()
    env.sensor = Sensor()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with Recorder(env, tmp_path, "pole", snapshot_every=1e5) as recorder:
            recorder.reset(seed=1)
            seen = Seen(recorder)
            seen.run(3)
            env.sensor.fails = True
            recorder.snapshot()
            seen.run(3)
            recorder.snapshot()
            env.sensor.fails = False
            recorder.snapshot()
            seen.run(3)
    session = simckpt.Store(tmp_path).session("pole")
    seen.assert_recorded(session.read(["rows"])["rows"])
    if len(session.snapshots) == 4:
        pytest.skip("the walk through an env takes no heed of state_dict")
    assert told(caught) == ["no snapshot before row 3: OSError: the sensor does not answer"]
    assert [(event.kind, event.row) for event in session.events] == [("no snapshot", 3), ("no snapshot", 6)]
    assert [each.row for each in session.snapshots] == [0, 6]


def test_the_observation_of_a_snapshot_is_the_recorded_one(tmp_path) -> None:
    with Recorder(Counting(), tmp_path, "pole", snapshot_every=1e5, part_seconds=1e5) as env:
        observation, _ = env.reset(seed=1)
        after_reset = observation.tobytes()
        observation *= 0
        env.snapshot()
        seen = Seen(env)
        for _ in range(3):
            seen.run(4)
            # a policy may work on it in place
            env.unwrapped.place *= 0.5
            env.snapshot()
        # and a part may have been handed over meanwhile
        env.trigger("one more part")
        env.snapshot()
    session = simckpt.Store(tmp_path).session("pole")
    found = [session.snapshot(each)["observation"].tobytes() for each in session.snapshots]
    rows = [seen.observations[row].tobytes() for row in (3, 7, 11, 11)]
    assert found[0] == after_reset or session.snapshots[0].reason == "start"
    assert found[-5:] == [after_reset, *rows] or found[-4:] == rows


def test_values_whose_dtype_alternates_end_up_in_the_widest_one(tmp_path) -> None:
    actions = [np.full(2, 1 / 3, np.float64 if row % 2 else np.float32) for row in range(60)]
    signals = {"state": lambda env, info: env.unwrapped.steps if env.unwrapped.steps % 2 else 0.5}
    with (
        warned("the dtype of the (action|signals) changes again and again"),
        Recorder(Counting(), tmp_path, "pole", signals=signals) as env,
    ):
        env.reset(seed=1)
        for action in actions:
            env.step(action.copy())
    session = simckpt.Store(tmp_path).session("pole")
    rows = [table["rows"] for table in session.chunks(["rows"]) if len(table["rows"]["row"])]
    recorded = [value for table in rows for value in table["action"]]
    assert [value.tolist() for value in recorded] == [value.tolist() for value in actions]
    # the first ones are of the dtype that they had
    assert [value.dtype for value in recorded[:4]] == [value.dtype for value in actions[:4]]
    assert [value for table in rows for value in table["signals"]["state"].tolist()] == [
        row + 1 if (row + 1) % 2 else 0.5 for row in range(60)
    ]
    assert len(session.parts) < 20


def test_resets_may_have_another_dtype_than_steps(tmp_path) -> None:
    class Mixed(Counting):
        def step(self, action: Any) -> Any:
            observation, *rest = super().step(action)
            return observation.astype(np.float32), *rest

    with Recorder(Mixed(), tmp_path, "pole") as env:
        for seed in range(40):
            env.reset(seed=seed)
            env.step(ACTION.copy())
    session = simckpt.Store(tmp_path).session("pole")
    tables = session.read(["rows", "resets"])
    assert (tables["rows"]["observation"].dtype, tables["resets"]["observation"].dtype) == (np.float32, np.float64)
    assert len(session.parts) <= 2
    with Replay(session, Mixed()) as replay:
        assert replay.run().exact


# options and seeds of resets


class Choosing(Counting):
    """Goes to a place that the options tell."""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        observation, info = super().reset(seed=seed)
        if options is not None:
            goal = options.pop("goal")
            self.place += np.asarray(goal)
            observation[0] += np.float64(isinstance(goal, tuple)) + getattr(goal, "dtype", np.dtype(int)).itemsize
        return observation, info


def test_options_of_resets_come_back_as_they_were(tmp_path) -> None:
    goals = [
        np.array([0.1, 1 / 3, float("nan")], np.float32),
        np.float32(1 / 3),
        (1.0, 2.0, 3.0),
        [1.0, 2.0, 3.0],
        float("inf"),
        2**60,
        np.arange(3, dtype=np.int16),
    ]
    seeds = [0, 2**63, 2**80, 5, None, 2**63 - 1, 7]
    with Recorder(Choosing(), tmp_path, "pole", snapshot_every=1e5) as env:
        env.reset(seed=1)
        seen = Seen(env)
        seen.run(1)
        for seed, goal in zip(seeds, goals, strict=True):
            env.reset(seed=seed, options={"goal": goal})
            seen.run(3)
    session = simckpt.Store(tmp_path).session("pole")
    texts = session.read(["resets"])["resets"]["options"].tolist()
    assert session.options(texts[0]) is None
    for text, goal in zip(texts[1:], goals, strict=True):
        found = session.options(text)["goal"]
        assert type(found) is type(goal)
        assert np.asarray(found).dtype == np.asarray(goal).dtype
        assert np.asarray(found).tobytes() == np.asarray(goal).tobytes()
    assert session.events == []
    with Replay(session, Choosing()) as replay:
        report = replay.run()
    assert report.exact, str(report)


def test_options_that_cannot_be_recorded_are_warned_of_and_a_replay_goes_on_behind_them(tmp_path) -> None:
    class Calling(Counting):
        def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
            observation, info = super().reset(seed=seed)
            if options is not None:
                observation += options["how"]()
            return observation, info

    with (
        warned("the options of the reset before row 3 cannot be recorded"),
        Recorder(Calling(), tmp_path, "pole", snapshot_every=1e5) as env,
    ):
        env.reset(seed=1)
        Seen(env).run(3)
        env.reset(seed=2, options={"how": lambda: 0.5})
        Seen(env).run(3)
    session = simckpt.Store(tmp_path).session("pole")
    assert [(event.kind, event.row) for event in session.events] == [("unrecorded", 3)]
    assert [(each.row, each.reason) for each in session.snapshots] == [(0, "start"), (3, "unrecorded")]
    with pytest.raises(ConfigurationError, match="could not be recorded"):
        session.options(session.read(["resets"])["resets"]["options"].tolist()[1])
    with Replay(session, Calling()) as replay:
        report = replay.run()
    assert report.exact, str(report)
    assert [row for stretch in report.rows for row in stretch] == list(range(6))


def test_options_belong_to_the_reset_that_they_were_given_to(tmp_path) -> None:
    class Refusing(Counting):
        def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
            if options == {"x": 1}:
                raise ValueError("no such option")
            return super().reset(seed=seed)

    # a part for each reset, as many as there are buffers
    with Recorder(Refusing(), tmp_path, "pole", part_seconds=1e-6) as env:
        env.reset(seed=1, options={"x": 0})
        with pytest.raises(ValueError, match="no such option"):
            env.reset(options={"x": 1})
        env.reset(seed=2)
        env.reset(seed=3, options={"x": 3})
    session = simckpt.Store(tmp_path).session("pole")
    resets = session.read(["resets"])["resets"]
    assert resets["seed"].tolist() == [1, 2, 3]
    assert [session.options(text) for text in resets["options"].tolist()] == [{"x": 0}, None, {"x": 3}]


# the recording process


def test_buffers_that_are_made_anew_while_the_recording_process_stands_reach_it_later(tmp_path) -> None:
    env = Recorder(Counting(), tmp_path, "pole", snapshot_every=1e5)
    env.reset(seed=1)
    seen = Seen(env)
    os.kill(env._recording.process.pid, signal.SIGSTOP)
    try:
        for number in range(12):
            env.step(np.full(2, 1 / 3, np.float64 if number % 2 else np.float32))
            # the socket takes no more at some time
            env.note("x" * 1500)
            for _ in range(30):
                env.note("y" * 1500)
        assert env._recording.process.channel.waiting > 0
    finally:
        os.kill(env._recording.process.pid, signal.SIGCONT)
    seen.run(5)
    env.close()
    session = simckpt.Store(tmp_path).session("pole")
    assert session.rows == range(17)
    assert session.missing == []
    assert len(session.events) == 12 * 31
