"""`Recorder`: what it saw is in the session, every bit once; what goes wrong with disks and processes stops no loop."""

import os
import resource
import signal
import time
import warnings
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from recorder_helpers import Counting, Seen, counting, device

import simckpt
from simckpt.errors import (
    ConfigurationError,
    ConflictError,
    RecordingWarning,
    StoreError,
    UnsupportedStateError,
)
from simckpt.hardware import Link, OnError, OutOfRange, Recorder, Simulated
from simckpt.hardware.part_buffers import BUFFERS, MOST_ROWS
from simckpt.sim import SnapshotEnv


def child_of(recorder: Recorder) -> int:
    return recorder._recording.process.pid


def test_what_was_seen_is_recorded_bit_for_bit(tmp_path) -> None:
    with Recorder(counting(), tmp_path, "pole", part_seconds=0.02) as env:
        seen = Seen(env)
        env.reset(seed=3)
        seen.run(150)
        env.reset(seed=5, options={"height": 0.5})
        seen.run(100)
    session = simckpt.Store(tmp_path).session("pole")
    tables = session.read()
    seen.assert_recorded(tables["rows"])
    assert session.status == "closed"
    assert session.rows == range(250)
    assert session.missing == []
    resets = tables["resets"]
    assert resets["row"].tolist() == [0, 150]
    assert resets["seed"].tolist() == [3, 5]
    assert [session.options(text) for text in resets["options"]] == [None, {"height": 0.5}]
    # the step of the env has set its action to 0 by then
    assert resets["observation"][0].tobytes() == np.random.Generator(np.random.PCG64(3)).standard_normal(3).tobytes()


def test_a_link_that_the_recorder_does_not_find_is_warned_of_once_and_noted(tmp_path) -> None:
    class Hidden(Counting):
        """Has its link in a closure, and another one from its fifth step on."""

        def __init__(self) -> None:
            super().__init__()
            link = counting().link
            self.send = lambda values: link.send(values)

        def step(self, action: Any) -> Any:
            self.send((0.5,))
            if self.steps == 4:
                self.link = Link(Simulated(device), command=("force",), reading=("force", "place"), name="late")
            return super().step(action)

    with Recorder(Hidden(), tmp_path, "pole") as env:
        env.reset(seed=3)
        seen = Seen(env)
        with pytest.warns(RecordingWarning, match=r"link 'motor'.*not recorded.*links=") as warned:
            seen.run(4)
        assert len(warned) == 1
        with pytest.warns(RecordingWarning, match="link 'late'") as warned:
            seen.run(6)
        assert len(warned) == 1
    session = simckpt.Store(tmp_path).session("pole")
    seen.assert_recorded(session.read()["rows"])
    assert [(event.kind, event.text.split("'")[1]) for event in session.events] == [("note", "motor"), ("note", "late")]
    # named by hand, it is recorded
    env = Hidden()
    (link,) = (cell.cell_contents for cell in env.send.__closure__)
    with Recorder(env, tmp_path, "named", links={"motor": link}) as named:
        named.reset(seed=3)
        named.step(np.zeros(2, np.float32))
    assert len(simckpt.Store(tmp_path).session("named").read()["commands"]["motor"]["row"]) == 1


def test_each_command_and_each_look_for_a_reading_is_recorded_in_its_order(tmp_path) -> None:
    with Recorder(counting(), tmp_path, "pole") as env:
        seen = Seen(env)
        env.reset(seed=3)
        seen.run(30)
    tables = simckpt.Store(tmp_path).session("pole").read()
    commands, readings = tables["commands"]["motor"], tables["readings"]["motor"]
    forces = np.array([float(action[0]) for action in seen.actions])
    assert commands["values"][:, 0].tobytes() == forces.tobytes()
    assert commands["row"].tolist() == list(range(30))
    assert commands["sequence"].tolist() == list(range(30))
    came = readings["kind"] == 0
    assert readings["values"][came, 1].tobytes() == (forces / 7).tobytes()
    assert np.isnan(readings["values"][~came]).all()
    # one counter over all tables: nothing twice, nothing left out, a step before what happens in it
    parts = [tables["rows"], tables["resets"], commands, readings, tables["events"]]
    orders = np.concatenate([each["order"] for each in parts])
    snapshots = [each.order for each in simckpt.Store(tmp_path).session("pole").snapshots]
    assert sorted([*orders.tolist(), *snapshots]) == list(range(1, len(orders) + len(snapshots) + 1))
    for row in range(30):
        order = tables["rows"]["order"][row]
        assert order < commands["order"][row] < readings["order"][came][row]


class Nested(gym.Env):
    """Dicts and tuples, whole numbers, and an observation that is not of the dtype that its space has."""

    observation_space = gym.spaces.Dict(
        {
            "arm": gym.spaces.Tuple((gym.spaces.Box(-1, 1, (2,), np.float32), gym.spaces.MultiBinary(3))),
            "image": gym.spaces.Box(0, 255, (2, 2, 3), np.uint8),
        }
    )
    action_space = gym.spaces.Discrete(4, start=-1)

    def _observation(self, number: int) -> Any:
        arm = (np.full(2, number / 3), np.array([number % 2, 1, 0], np.int8))
        return {"arm": arm, "image": np.full((2, 2, 3), number, np.uint8)}

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.number = 0
        return self._observation(0), {}

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        self.number += 1
        return self._observation(self.number), np.float32(self.number), False, False, {}


def test_nested_observations_keep_their_shape_and_dtype(tmp_path) -> None:
    with Recorder(Nested(), tmp_path, "nested") as env:
        env.reset()
        for number in range(9):
            env.step(number % 4 - 1)
    session = simckpt.Store(tmp_path).session("nested")
    rows = session.read(["rows"])["rows"]
    first, second = rows["observation"]["arm"]
    assert (first.dtype, first.shape, first[4].tolist()) == (np.float64, (9, 2), [5 / 3, 5 / 3])
    assert (second.dtype, second[:2].tolist()) == (np.int8, [[1, 1, 0], [0, 1, 0]])
    assert (rows["observation"]["image"].dtype, rows["observation"]["image"][8].min()) == (np.uint8, 9)
    assert rows["action"].tolist() == [number % 4 - 1 for number in range(9)]
    assert rows["reward"].tolist() == list(range(1, 10))
    assert session.spaces["action"] == {"type": "Discrete", "dtype": "int64", "n": 4, "start": -1}
    assert session.spaces["observation"]["subspaces"]["image"]["high"] == 255


def test_values_may_change_their_dtype_within_a_session(tmp_path) -> None:
    with Recorder(Counting(), tmp_path, "pole") as env:
        env.reset(seed=1)
        seen = Seen(env)
        seen.run(5)
        env.step(np.array([0.1, 1 / 3]))
        seen.run(5)
    rows = simckpt.Store(tmp_path).session("pole").read(["rows"])["rows"]
    assert rows["row"].tolist() == list(range(11))
    assert rows["action"].dtype == np.float64
    assert rows["action"][5].tolist() == [0.1, 1 / 3]
    assert rows["action"][[*range(5), *range(6, 11)]].astype(np.float32).tobytes() == np.array(seen.actions).tobytes()


def test_signals_are_recorded_beside_the_rows(tmp_path) -> None:
    signals = {"height": lambda env, info: env.unwrapped.place[1] ** 2, "steps": lambda env, info: info["steps"]}
    with Recorder(Counting(), tmp_path, "pole", signals=signals) as env:
        env.reset(seed=1)
        seen = Seen(env)
        seen.run(20)
    session = simckpt.Store(tmp_path).session("pole")
    rows = session.read(["rows"])["rows"]
    assert session.signals == ("height", "steps")
    assert rows["signals"]["steps"].tolist() == list(range(1, 21))
    assert rows["signals"]["height"].tolist() == [observation[1] ** 2 for observation in seen.observations]
    seen.assert_recorded(rows)


def test_a_snapshot_goes_on_as_the_env_did(tmp_path) -> None:
    from envs.cart_pole_in_the_loop import CartPoleInTheLoopEnv

    actions = np.random.default_rng(0).uniform(-1, 1, (60, 1))
    with Recorder(CartPoleInTheLoopEnv(), tmp_path, "pole", snapshot_every=1e5) as env:
        env.reset(seed=4)
        for number, action in enumerate(actions):
            if number == 25:
                env.snapshot("here")
            env.step(action)
    session = simckpt.Store(tmp_path).session("pole")
    assert [(each.row, each.reason) for each in session.snapshots] == [(0, "start"), (25, "here")]
    rows = session.read(["rows/observation"])["rows"]
    twin = CartPoleInTheLoopEnv()
    twin.reset(seed=99)
    found = session.snapshot(25)
    SnapshotEnv(twin).load_state_dict(found["env"])
    twin.link.arm()
    assert found["observation"].tobytes() == rows["observation"][24].tobytes()
    for number in range(25, 60):
        observation, *_ = twin.step(actions[number])
        assert observation.tobytes() == rows["observation"][number].tobytes()


def test_an_exception_is_told_by_the_session_and_passes(tmp_path) -> None:
    class Broken(Counting):
        def step(self, action: Any) -> Any:
            if self.steps == 3:
                raise RuntimeError("the arm fell off")
            return super().step(action)

    def loop() -> None:
        with Recorder(Broken(), tmp_path, "pole") as env:
            env.reset()
            Seen(env).run(9)

    with pytest.raises(RuntimeError, match="fell off"):
        loop()
    session = simckpt.Store(tmp_path).session("pole")
    assert session.status == "error"
    assert session.closed.text == "RuntimeError: the arm fell off"
    assert session.rows == range(3)
    (event,) = session.events
    assert (event.kind, event.row, event.text) == ("error", 3, "step raised RuntimeError: the arm fell off")


def test_a_closed_recorder_lets_everything_pass(tmp_path) -> None:
    env = Recorder(counting(), tmp_path, "pole")
    env.reset()
    env.end_session()
    env.end_session()
    Seen(env).run(3)
    env.snapshot()
    env.note("nobody hears it")
    env.trigger("nobody minds")
    env.close()
    session = simckpt.Store(tmp_path).session("pole")
    assert (session.rows, session.events, session.snapshots) == (range(0), [], ())
    assert env.unwrapped.link.observer is None


def test_a_step_with_more_link_calls_than_a_part_has_room_for_is_one_row(tmp_path) -> None:
    class Flooding(Counting):
        def step(self, action: Any) -> Any:
            for number in range(5000):
                self.link.send((float(number),))
                self.link.receive()
                self.link.receive()
            return super().step(action)

    with Recorder(Flooding(counting().link), tmp_path, "pole") as env:
        env.reset()
        seen = Seen(env)
        seen.run(4)
    session = simckpt.Store(tmp_path).session("pole")
    tables = session.read()
    seen.assert_recorded(tables["rows"])
    commands = tables["commands"]["motor"]
    assert commands["sequence"].tolist() == list(range(4 * 5001))
    assert commands["row"].tolist() == [row for row in range(4) for _ in range(5001)]
    assert len(tables["readings"]["motor"]["row"]) == 4 * 10_001 + 1
    orders = [
        tables["rows"]["order"],
        commands["order"],
        tables["readings"]["motor"]["order"],
        tables["resets"]["order"],
    ]
    assert len(np.unique(np.concatenate(orders))) == sum(map(len, orders))


def test_sessions_without_a_name_get_one(tmp_path) -> None:
    names = []
    for _ in range(2):
        with Recorder(Counting(), tmp_path) as env:
            env.reset()
        names.append(env.session_name)
    assert len(set(names)) == 2
    assert sorted(session.name for session in simckpt.Store(tmp_path).sessions()) == sorted(names)


@pytest.mark.parametrize(
    "arguments",
    [
        {"snapshot_every": 0.0},
        {"part_seconds": 0.0},
        {"ring": -1.0},
        {"after": 5.0},
        {"ring": 5.0, "after": -1.0},
        {"part_seconds": "1"},
        {"triggers": ["on fire"]},
        {"triggers": OnError()},
        {"triggers": "OnError"},
        {"triggers": 5},
        {"signals": {"heat": 5}},
        {"signals": ["heat"]},
        {"signals": {3: len}},
        {"links": {"motor": 5}},
        {"links": [counting().link]},
        {"links": {"arm/left": counting().link}},
        {"origin": "ant-ppo"},
    ],
    ids=str,
)
def test_arguments_without_sense_are_refused(tmp_path, arguments) -> None:
    with pytest.raises(ConfigurationError):
        Recorder(Counting(), tmp_path, "pole", **arguments)
    assert list(tmp_path.glob("sessions/*")) == []


@pytest.mark.parametrize(
    ("trigger", "hint"),
    [
        (OutOfRange("observaton", high=1.0), "did you mean 'observation'?"),
        (OutOfRange("observation/0", high=1.0), "did you mean 'observation'?"),
        (OutOfRange("terminated", high=0.5), "nothing of the name 'terminated' is recorded"),
        (OutOfRange("het", high=1.0), "did you mean 'heat'?"),
        (OutOfRange("observation", index=3, high=1.0), "observation has 3 values, and no index 3"),
        (OutOfRange("observation", index=-4, high=1.0), "no index -4"),
        (OutOfRange("action", index=2, high=1.0), "action has 2 values"),
        (OutOfRange("reward", index=1, high=1.0), "reward has 1 values"),
        (OutOfRange("observation", index="force", high=1.0), "no value of a reading has the name 'force'"),
        (OutOfRange("observation", index=1.5, high=1.0), "index= is a whole number"),
        (OutOfRange("reading", index="plac", high=1.0), "did you mean 'place'?"),
        (OutOfRange("reading", index=2, high=1.0), "reading has 2 values"),
    ],
    ids=str,
)
def test_a_trigger_that_can_never_fire_is_refused(tmp_path, trigger, hint) -> None:
    with pytest.raises(ConfigurationError, match="can never fire") as raised:
        Recorder(counting(), tmp_path, "pole", triggers=[trigger], signals={"heat": lambda env, info: 1.0})
    assert hint in str(raised.value)


def test_readings_of_an_env_without_links_can_trigger_nothing(tmp_path) -> None:
    with pytest.raises(ConfigurationError, match="no link whose readings"):
        Recorder(Counting(), tmp_path, "pole", triggers=[OutOfRange("reading", high=1.0)])


def test_an_index_that_a_signal_lacks_is_told_with_the_first_row(tmp_path) -> None:
    triggers = [OutOfRange("heat", index=2, high=1.0), OutOfRange("heat", index=1, high=1.0)]

    def loop() -> None:
        with Recorder(Counting(), tmp_path, "pole", triggers=triggers, signals={"heat": lambda *_: [0.0, 9.0]}) as env:
            env.reset()
            Seen(env).run(5)

    with pytest.warns(RecordingWarning, match="can never fire: heat has 2 values, and no index 2"):
        loop()
    (event,) = simckpt.Store(tmp_path).session("pole").events
    assert event.text == "signals/heat was 9, out of -inf to 1" or event.text.startswith("heat was 9")


def test_an_env_is_recorded_by_one_recorder(tmp_path) -> None:
    with (
        Recorder(Counting(), tmp_path, "pole") as env,
        pytest.raises(ConfigurationError, match="has a recorder already, that of session 'pole'"),
    ):
        Recorder(gym.wrappers.TimeLimit(env, 5), tmp_path, "pole-2")


def test_a_name_that_is_taken_is_refused_and_its_session_stays(tmp_path) -> None:
    with Recorder(Counting(), tmp_path, "pole") as env:
        env.reset()
        Seen(env).run(3)
    with pytest.raises(ConflictError):
        Recorder(Counting(), tmp_path, "pole")
    assert simckpt.Store(tmp_path).session("pole").rows == range(3)


def test_a_recorder_that_cannot_be_made_has_not_used_up_its_name(tmp_path) -> None:
    simckpt.Store(tmp_path).made()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, hard))
    try:
        with pytest.raises(StoreError):
            Recorder(Counting(), tmp_path, "pole")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    with Recorder(Counting(), tmp_path, "pole") as env:
        env.reset()


def test_what_has_no_fixed_size_is_refused(tmp_path) -> None:
    class Talking(Counting):
        observation_space = gym.spaces.Text(10)

    with pytest.raises(ConfigurationError, match="size is not fixed"):
        Recorder(Talking(), tmp_path, "pole")
    assert list(tmp_path.iterdir()) == []


def test_an_env_that_cannot_be_captured_is_refused_or_recorded_without_snapshots(tmp_path) -> None:
    class Open(Counting):
        def __init__(self) -> None:
            super().__init__()
            self.file = file

    with Path(os.devnull).open() as file:
        with pytest.raises(UnsupportedStateError):
            Recorder(Open(), tmp_path, "pole")
        assert simckpt.Store(tmp_path).sessions() == []
        with Recorder(Open(), tmp_path, "plain", snapshot_every=None) as env:
            env.reset()
            Seen(env).run(3)
            with pytest.raises(ConfigurationError, match="no snapshots"):
                env.snapshot()
    session = simckpt.Store(tmp_path).session("plain")
    assert session.rows == range(3)
    assert session.snapshots == ()


# part of a store and of runs


def test_the_newest_checkpoint_of_a_run_is_the_origin_and_stays(tmp_path) -> None:
    store = simckpt.Store(tmp_path)
    env = counting()
    with store.start("ppo") as run:
        checkpointer = run.checkpointer({"envs": env}, save_when=simckpt.EverySteps(1))
        env.reset(seed=0)
        first, second = checkpointer.save(1), checkpointer.save(2)
        checkpointer.close()
        with Recorder(env, store, "pole", origin=run) as recorder:
            recorder.reset()
    session = store.session("pole")
    assert (session.origin.checkpoint, session.origin.run, session.origin.step) == (second.id, "ppo", 2)
    with pytest.raises(ConflictError, match="driving in session 'pole'"):
        store.files.prune("ppo", second.seq, "test")
    assert "the origin of session 'pole'" in store.run("ppo").protected()[second.id]
    store.files.prune("ppo", first.seq, "test")


def test_a_run_captures_an_env_with_its_recorder_and_a_restore_is_noted(tmp_path) -> None:
    store = simckpt.Store(tmp_path)
    env = Recorder(Counting(), store, "pole", snapshot_every=1e5)
    with store.start("ppo") as run:
        checkpointer = run.checkpointer({"envs": env}, save_when=simckpt.EverySteps(1))
        env.reset(seed=0)
        seen = Seen(env)
        seen.run(5)
        saved = checkpointer.save(5)
        seen.run(5)
        saved.restore({"envs": env})
        assert env.session_name == "pole"
        replayed = Seen(env)
        replayed.rng = np.random.default_rng(0)
        replayed.rng.uniform(-1, 1, (5, 2))
        replayed.run(5)
        checkpointer.close()
    env.close()
    assert [each.tobytes() for each in replayed.observations] == [each.tobytes() for each in seen.observations[5:]]
    session = store.session("pole")
    assert [(event.kind, event.row) for event in session.events] == [("restored", 10)]
    assert [(each.row, each.reason) for each in session.snapshots] == [(0, "start"), (10, "restored")]
    assert session.rows == range(15)


# what goes wrong


def test_a_recording_process_that_is_killed_stops_no_loop(tmp_path) -> None:
    env = Recorder(counting(), tmp_path, "pole", part_seconds=0.02)
    env.reset()
    seen = Seen(env)
    seen.run(10)
    os.kill(child_of(env), signal.SIGKILL)
    os.waitid(os.P_PID, child_of(env), os.WEXITED | os.WNOWAIT)

    def go_on() -> None:
        deadline = time.monotonic() + 60
        while env._recording.active and time.monotonic() < deadline:
            seen.run(10)

    with pytest.warns(RecordingWarning, match="the recording process is gone"):
        go_on()
    seen.run(10)
    env.close()
    assert simckpt.Store(tmp_path).session("pole").status == "unfinished"


def test_a_recording_process_that_is_too_slow_loses_whole_parts_and_says_so(tmp_path) -> None:
    env = Recorder(Counting(), tmp_path, "pole", part_seconds=0.01, snapshot_every=1e5)
    env.reset(seed=0)
    seen = Seen(env)
    seen.run(1)
    os.kill(child_of(env), signal.SIGSTOP)
    try:
        # more rows than all buffers hold
        seen.run((BUFFERS + 1) * MOST_ROWS)
    finally:
        os.kill(child_of(env), signal.SIGCONT)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        env.close()
    assert any("were lost" in str(each.message) for each in caught)
    session = simckpt.Store(tmp_path).session("pole")
    rows = session.read(["rows"])["rows"]
    lost = [row for each in session.missing for row in each]
    assert lost
    assert sorted([*rows["row"].tolist(), *lost]) == list(range((BUFFERS + 1) * MOST_ROWS + 1))
    assert {event.kind for event in session.events} == {"lost"}
    assert rows["observation"].tobytes() == np.array(seen.observations)[rows["row"]].tobytes()


def test_a_full_disk_is_warned_of_once_and_what_it_refused_is_written_later(tmp_path) -> None:
    env = Recorder(Counting(), tmp_path, "pole", part_seconds=0.02)
    env.reset(seed=0)
    seen = Seen(env)
    seen.run(1)
    child = child_of(env)
    _, hard = resource.prlimit(child, resource.RLIMIT_FSIZE)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        resource.prlimit(child, resource.RLIMIT_FSIZE, (1000, hard))
        deadline = time.monotonic() + 60
        while not caught and time.monotonic() < deadline:
            seen.run(10)
        for _ in range(20):
            seen.run(10)
            time.sleep(0.02)
        resource.prlimit(child, resource.RLIMIT_FSIZE, (hard, hard))
        env.close()
    (warning,) = caught
    assert warning.category is RecordingWarning
    assert "cannot be written for the moment: no room to write" in str(warning.message)
    session = simckpt.Store(tmp_path).session("pole")
    seen.assert_recorded(session.read(["rows"])["rows"])
    assert len(session.rows) == len(seen.rewards)


def test_a_forked_child_does_not_record(tmp_path) -> None:
    with Recorder(Counting(), tmp_path, "pole") as env:
        env.reset(seed=0)
        seen = Seen(env)
        seen.run(5)
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                Seen(env).run(5)
                status = 0
            finally:
                os._exit(status)
        assert os.waitpid(pid, 0)[1] == 0
        seen.run(5)
    session = simckpt.Store(tmp_path).session("pole")
    seen.assert_recorded(session.read(["rows"])["rows"])
    assert session.status == "closed"
