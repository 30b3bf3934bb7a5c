"""A session is played again without the device: bit for bit, or it is said where not, and nothing is ever sent."""

import contextlib
import os
import select
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import replay_helpers
from recorder_helpers import Counting
from replay_helpers import SNAPSHOTS, STEPS, Altered, ant, cart_pole, device, dict_space, drive, record, without

import simckpt
from envs.cart_pole_in_the_loop import CartPoleInTheLoopEnv
from envs.motor import Motor
from simckpt.errors import ConfigurationError, LinkDisarmedError, RecordingWarning, StateMismatchError
from simckpt.hardware import UDP, Link, Recorder, Replay, ReplayReport, contact_force, series
from simckpt.hardware.differences import Differences, compare
from simckpt.hardware.session import NOTHING, READING, Session
from simckpt.hardware.tape import Tape
from simckpt.state.compare import differences


@pytest.fixture(scope="module")
def pole(tmp_path_factory: pytest.TempPathFactory) -> Session:
    """Episodes of a cart-pole with a model of its motor."""
    return record(tmp_path_factory.mktemp("pole") / "s", cart_pole())


@pytest.fixture(scope="module")
def walk(tmp_path_factory: pytest.TempPathFactory) -> tuple[Session, str]:
    """Episodes of an ant whose joints are a device, which answers late, twice and not at all; and its address."""
    with device(8) as address:
        return record(tmp_path_factory.mktemp("walk") / "s", ant(address)), address


@pytest.fixture
def listening(walk: tuple[Session, str]) -> Iterator[socket.socket]:
    """A socket where the device of `walk` was: it hears whatever is sent there."""
    host, _, port = walk[1].partition(":")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as own:
        own.bind((host, int(port)))
        yield own


def is_silent(own: socket.socket) -> bool:
    return not select.select([own], [], [], 0)[0]


PLAY = """
import sys
import replay_helpers
import simckpt
from simckpt.hardware import Replay

session = simckpt.Store(sys.argv[1]).session("played")
env = getattr(replay_helpers, sys.argv[2])(*sys.argv[3:])
with Replay(session, env) as replay:
    print(replay.run())
    print(replay.row)
"""


def play_apart(session: Session, *maker: str) -> str:
    """Returns what a fresh process says after it has played a session."""
    path = os.pathsep.join(map(str, (Path(replay_helpers.__file__).parent, Path(__file__).parents[2])))
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", PLAY, str(session.files.root), *maker],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_session_with_a_device_is_played_in_a_fresh_process_and_nothing_is_sent(
    walk: tuple[Session, str], listening: socket.socket
) -> None:
    session, address = walk
    kinds = session.read(["readings"])["readings"]["legs"]
    assert (kinds["kind"] == NOTHING).any()
    assert kinds["late"].any()
    snapshots = len(session.snapshots)
    assert play_apart(session, "ant", address) == (
        f"exact: {STEPS} rows and {snapshots - 1} later snapshots of session 'played'\n{STEPS}\n"
    )
    assert is_silent(listening)


def test_a_model_in_place_of_a_device_is_played_again_itself(pole: Session) -> None:
    env = cart_pole()
    with Replay(pole, env) as replay:
        report = replay.run()
    assert report.exact
    with pytest.raises(LinkDisarmedError):
        env.step(np.zeros(1))
    assert report.rows == (range(STEPS),)
    assert report.snapshots == len(pole.snapshots) - 1
    assert report.first is None
    assert play_apart(pole, "cart_pole").startswith(f"exact: {STEPS} rows")


def test_what_a_device_said_is_played_in_an_env_that_has_a_model_of_it(tmp_path: Path) -> None:
    def bench(address: str) -> gym.Env:
        return CartPoleInTheLoopEnv(Link(UDP(address), command=Motor.command, reading=Motor.reading, name="motor"))

    def loop(recorder: Recorder) -> None:
        recorder.reset(seed=1)
        for step in range(20):
            if step == 15:
                recorder.snapshot()
            recorder.step(np.array([0.2]))

    with device(2) as address:
        session = record(tmp_path / "s", bench(address), loop=loop)
    report = Replay(session, CartPoleInTheLoopEnv()).run()
    assert report.exact, str(report)
    assert report.snapshots == 1


def test_dict_observations_and_generators_of_their_own_repeat(tmp_path: Path) -> None:
    session = record(tmp_path / "s", dict_space(), loop=lambda env: drive(env, 60))
    replay = Replay(session, dict_space())
    assert replay.run().exact
    assert isinstance(replay.observation, dict)
    wrong = Altered(session, tables=lambda tables: _flip(tables["rows"]["observation"]["goal"], 50))
    found = Replay(wrong, dict_space()).run().differences
    assert [(each.leaf, each.row, each.rows) for each in found] == [("observation/goal", 50, 1)]


def _flip(array: np.ndarray, place: int | slice) -> None:
    """Flips the last bit of the first number of a row."""
    rows = array if isinstance(place, slice) else array[place : place + 1]
    rows.reshape(-1)[:1].view(np.uint8)[0] ^= 1


def ulp(array: np.ndarray, place: int | slice) -> float:
    """How far the last bit of that number is."""
    number = array[place].reshape(-1)[0]
    flipped = np.array([number])
    flipped.view(np.uint8)[0] ^= 1
    return float(abs(np.longdouble(flipped[0]) - np.longdouble(number)))


@pytest.mark.parametrize("column", ["observation", "reward", "terminated", "truncated"])
def test_a_single_bit_of_a_row_that_is_not_repeated_is_named(pole: Session, column: str) -> None:
    expected = None if column.endswith("ated") else ulp(pole.read()["rows"][column], 61)
    wrong = Altered(pole, tables=lambda tables: _flip(tables["rows"][column], 61))
    (found,) = Replay(wrong, cart_pole()).run().differences
    assert (found.leaf, found.row, found.rows, found.largest) == (column, 61, 1, expected)


def test_a_command_that_was_another_is_named(walk: tuple[Session, str]) -> None:
    def change(tables: dict[str, Any]) -> None:
        sent = tables["commands"]["legs"]
        sent["values"][np.flatnonzero(sent["row"] == 90)[0], 3] += 0.25

    (found,) = Replay(Altered(walk[0], tables=change), ant(walk[1])).run().differences
    # what is added to a number comes back from it rounded
    assert (found.leaf, found.row, found.rows) == ("command/legs", 90, 1)
    assert found.largest == pytest.approx(0.25, rel=1e-15)


def test_a_reading_that_was_another_changes_all_that_follows(walk: tuple[Session, str]) -> None:
    session, address = walk
    readings = session.read(["readings"])["readings"]["legs"]
    taken = (readings["kind"] == READING) & ~readings["late"] & (readings["row"] >= 80)
    # of several in a row the env takes the last
    place = np.flatnonzero(taken)[0]
    row = int(readings["row"][place])
    place = np.flatnonzero(taken & (readings["row"] == row))[-1]

    def change(tables: dict[str, Any]) -> None:
        tables["readings"]["legs"]["values"][place, 0] += 1e-3

    report = Replay(Altered(session, tables=change), ant(address)).run()
    assert not report.exact
    assert report.first is not None
    assert (report.first.leaf, report.first.row) == ("observation", row)
    assert str(report).startswith(f"NOT exact: {STEPS} rows")
    # the running means of observations have not forgotten it at the next snapshot
    assert any(each.leaf.startswith("env/python/") and each.row > row for each in report.differences)


def test_a_reading_that_did_not_come_is_missed(walk: tuple[Session, str]) -> None:
    session, address = walk

    def change(tables: dict[str, Any]) -> None:
        table = tables["readings"]["legs"]
        place = np.flatnonzero((table["kind"] == READING) & (table["row"] == 120) & ~table["late"])[-1:]
        table["kind"][place] = NOTHING

    readings = session.read(["readings"], start=120, stop=121)["readings"]["legs"]
    assert ((readings["kind"] == READING) & ~readings["late"]).any(), "choose a row with a reading"
    report = Replay(Altered(session, tables=change), ant(address)).run()
    assert report.first is not None
    assert report.first.row == 120
    # what was looked for once less is passed over, and the rows after it have their own readings again
    assert {each.row for each in report.differences if each.leaf == "reading/legs"} <= {120}


def test_another_action_is_another_command(walk: tuple[Session, str]) -> None:
    wrong = Altered(walk[0], tables=lambda tables: _flip(tables["rows"]["action"], 33))
    report = Replay(wrong, ant(walk[1])).run()
    assert report.first is not None
    assert (report.first.leaf, report.first.row, report.first.rows) == ("command/legs", 33, 1)


def test_a_program_with_another_constant_is_noticed_at_the_first_row(
    pole: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("envs.cart_pole_in_the_loop.FORCE", 10.000001)
    report = Replay(pole, cart_pole()).run()
    assert report.first is not None
    assert (report.first.leaf, report.first.row) == ("command/motor", 0)
    assert report.first.rows > 50
    assert any(each.leaf == "observation" for each in report.differences)


def test_a_snapshot_with_another_bit_is_noticed_when_it_is_compared(pole: Session) -> None:
    number = next(each.number for each in pole.snapshots if each.row == 97)
    expected: list[float] = []

    def change(of: int, saved: dict[str, Any]) -> None:
        if of == number:
            expected.append(ulp(saved["env"]["physics"]["qpos"], slice(None)))
            _flip(saved["env"]["physics"]["qpos"], slice(None))

    (found,) = Replay(Altered(pole, snapshot=change), cart_pole()).run().differences
    assert (found.leaf, found.row, found.largest) == ("env/physics/qpos", 97, expected[0])


def test_a_snapshot_with_another_bit_is_noticed_in_the_rows_after_it_too(pole: Session) -> None:
    def change(of: int, saved: dict[str, Any]) -> None:
        saved["env"]["physics"]["qvel"][1] *= 1 + 1e-12

    report = Replay(Altered(pole, snapshot=change), cart_pole()).go_to(110)
    assert report.rows == (range(97, 110),)
    assert report.first is not None
    assert (report.first.leaf, report.first.row) == ("observation", 97)


def test_a_seed_that_was_another_is_noticed_at_its_reset(pole: Session) -> None:
    resets = pole.read(["resets"])["resets"]
    place = int(np.flatnonzero(resets["seeded"] & (resets["row"] > 0))[0])

    def change(tables: dict[str, Any]) -> None:
        tables["resets"]["seed"][place] += 1

    report = Replay(Altered(pole, tables=change), cart_pole()).run()
    assert report.first is not None
    assert (report.first.leaf, report.first.row) == ("reset/observation", int(resets["row"][place]))


def test_options_that_could_not_be_recorded_are_told(pole: Session) -> None:
    def change(tables: dict[str, Any]) -> None:
        tables["resets"]["options"] = np.array(["?"] * len(tables["resets"]["options"]))

    (found,) = Replay(Altered(pole, tables=change), cart_pole()).run().differences
    assert found.leaf == "reset/options"


def test_going_to_a_row_restores_what_was_there(pole: Session) -> None:
    replay = Replay(pole, cart_pole())
    for row in (130, 3, 97):
        report = replay.go_to(row)
        assert report.exact
        assert replay.row == row
    # the state before row 97 is the one that a snapshot has kept
    kept = next(each for each in pole.snapshots if each.row == 97)
    assert not differences(pole.snapshot(kept)["env"], replay.capture())
    seen = pole.read(["rows/observation"], start=96, stop=97)["rows"]["observation"][0]
    assert seen.tobytes() == replay.observation.tobytes()


def test_going_to_the_end_of_an_episode_ends_after_the_reset(pole: Session) -> None:
    resets = pole.read(["resets"])["resets"]
    row, seen = int(resets["row"][1]), resets["observation"][1]
    replay = Replay(pole, cart_pole())
    replay.go_to(row)
    assert replay.observation.tobytes() == seen.tobytes()


def test_a_moment_is_the_row_that_was_in_progress(pole: Session) -> None:
    begun = pole.read(["rows/started"])["rows"]["started"]
    replay = Replay(pole, cart_pole())
    replay.go_to(seconds=(int(begun[77]) + 1000 - pole.started) / 1e9)
    assert replay.row == 77


def test_where_no_snapshot_leads_to_is_refused_with_those_that_there_are(pole: Session) -> None:
    replay = Replay(pole, cart_pole())
    for row in (-1, STEPS + 1):
        with pytest.raises(ConfigurationError, match=rf"leads to row {row}: .*snapshots lie before rows 0, 37"):
            replay.go_to(row)
    for wrong in ({}, {"row": 3, "seconds": 1.0}):
        with pytest.raises(ConfigurationError, match="one of them"):
            replay.go_to(**wrong)


def test_steps_show_the_env_after_each_row(pole: Session) -> None:
    replay = Replay(pole, cart_pole())
    recorded = pole.read(["rows/observation"])["rows"]["observation"]
    rows = []
    for row in replay.steps(130, 145):
        rows.append(row)
        assert replay.observation.tobytes() == recorded[row].tobytes()
        assert replay.simulation.qpos.tobytes() == recorded[row, :2].tobytes()
    assert rows == list(range(130, 145))


def test_what_was_not_recorded_is_measured_in_a_replay(pole: Session) -> None:
    found = Replay(pole, cart_pole()).measure({"force": contact_force, "held": lambda env, info: info["held"]}, 10, 60)
    signals = found.tables["rows"]["signals"]
    assert found.tables["rows"]["row"].tolist() == list(range(10, 60))
    assert signals["force"].shape[0] == 50
    readings = pole.read(["readings"], start=10, stop=60)["readings"]["motor"]
    came = set(readings["row"][(readings["kind"] == READING)].tolist())
    # resets take readings as well, before the row that follows them
    resets = set(pole.read(["resets"])["resets"]["row"].tolist())
    assert [
        row for row, held in zip(range(10, 60), signals["held"], strict=True) if held and row in came - resets
    ] == []


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        (lambda env, info: None, "the signal 'x' is None after row 10"),
        (lambda env, info: "much", "the signal 'x' is much after row 10"),
        (
            lambda env, info: np.zeros(1 + (env.unwrapped.link.last.sequence > 12)),
            r"the signal 'x' is \[0. 0.\] after row",
        ),
    ],
)
def test_a_signal_that_is_no_number_or_of_another_shape_is_refused(pole: Session, wrong: Any, told: str) -> None:
    with pytest.raises(ConfigurationError, match=told):
        Replay(pole, cart_pole()).measure({"x": wrong}, 10, 40)


def test_contact_forces_carry_what_lies_on_the_floor() -> None:
    import mujoco

    model = mujoco.MjModel.from_xml_string(
        "<mujoco><worldbody><geom type='plane' size='5 5 .1'/>"
        "<body pos='0 0 .1'><freejoint/><geom type='box' size='.1 .1 .1' mass='2'/></body>"
        "<body pos='1 0 .1'><freejoint/><geom type='sphere' size='.1' mass='3'/></body></worldbody></mujoco>"
    )
    data = mujoco.MjData(model)
    mujoco.mj_step(model, data, 2000)
    bench = type("Bench", (), {"model": model, "data": data})()
    before = data.cfrc_ext.tobytes()
    # at rest, a force is the weight; 9.81 m/s2 is MuJoCo's gravity, and the solver is soft
    assert contact_force(bench) == pytest.approx([5 * 9.81, 2 * 9.81, 3 * 9.81], rel=1e-6)
    assert data.cfrc_ext.tobytes() == before
    with pytest.raises(ConfigurationError, match="no MuJoCo"):
        contact_force(object())


def test_rows_that_were_lost_are_passed_over_to_the_next_snapshot(pole: Session, tmp_path: Path) -> None:
    order = pole.read(["rows/order"])["rows"]["order"].tolist()
    wrong = without(pole, tmp_path / "s", (order[50], order[60]))
    assert wrong.missing == [range(50, 60)]
    replay = Replay(wrong, cart_pole())
    report = replay.run()
    next_one = min(each.row for each in pole.snapshots if each.row >= 60)
    assert report.exact
    assert report.rows == (range(50), range(next_one, STEPS))
    assert report.skipped == (range(50, 60), range(60, next_one))
    for row in (50, 61):
        with pytest.raises(ConfigurationError, match="lost of them 50 to 59"):
            replay.go_to(row)
    assert replay.go_to(next_one + 1).exact


def check_doors(session: Session, lossy: Session, env: gym.Env, rows: Sequence[int]) -> set[int]:
    """Every door that plays rows gives what was, or says that it cannot; returns the rows that were played.

    Args:
        session: the whole one.
        lossy: the same, of which something was lost.
        env: that they are of.
        rows: which are gone to.
    """
    recorded = session.read(["rows/observation"])["rows"]["observation"]
    before = {}
    with Replay(session, env) as replay:
        for row in rows:
            assert replay.go_to(row).exact
            before[row] = replay.capture()
    with Replay(lossy, env) as replay:
        report = replay.run()
        assert report.exact, str(report)
        played = {row for rows in report.rows for row in rows}
        there = set(lossy.read(["rows/row"])["rows"]["row"].tolist())
        assert played <= there
        assert {row for rows in report.skipped for row in rows} == set(range(session.rows.stop)) - played
        yielded = []
        for row in replay.steps():
            yielded.append(row)
            assert replay.observation.tobytes() == recorded[row].tobytes()
        assert yielded == sorted(played)
        found = replay.measure({"seen": lambda env, info: replay.observation})
        assert found.tables["rows"]["row"].tolist() == yielded
        assert found.tables["rows"]["signals"]["seen"].tobytes() == recorded[yielded].tobytes()
        assert series(found, "signals/seen[0]").values.tobytes() == recorded[yielded, 0].astype(np.float64).tobytes()
        some = series(found, "signals/seen[0]", start=20, stop=90)
        assert some.rows.tolist() == [row for row in yielded if 20 <= row < 90]
        assert some.values.tobytes() == recorded[some.rows, 0].astype(np.float64).tobytes()
        for row, kept in before.items():
            try:
                way = replay.go_to(row)
            except ConfigurationError:
                assert row not in played
                continue
            assert way.exact
            assert not differences(kept, replay.capture())
    return played


@pytest.mark.parametrize("seed", range(4))
def test_whatever_was_lost_no_door_goes_on_from_a_wrong_state(pole: Session, tmp_path: Path, seed: int) -> None:
    """Losses lie anywhere: in the middle of a step, between two, of a reset alone, before the first snapshot."""
    rng = np.random.default_rng(seed)
    last = int(pole.read(["rows/order"])["rows"]["order"][-1])
    edges = np.sort(rng.choice(last, 8, replace=False)).tolist()
    # no more than a dozen rows each
    lost = [(first, min(stop, first + 50)) for first, stop in zip(edges[::2], edges[1::2], strict=True)]
    lossy = without(pole, tmp_path / "s", *lost)
    near = [row for each in lossy.missing for row in (max(0, each.start - 1), each.start, each.stop)]
    check_doors(pole, lossy, cart_pole(), sorted({0, *near, *rng.choice(STEPS, 3).tolist()}))


def test_a_reset_that_alone_was_lost_is_no_part_of_any_replay(pole: Session, tmp_path: Path) -> None:
    """What was recorded goes on as if nothing had been: the numbers of rows have no gap."""
    resets = pole.read(["resets"])["resets"]
    place = 2
    row, order = int(resets["row"][place]), int(resets["order"][place])
    # one was taken right before that reset
    assert any((each.row, each.order) == (row, order - 1) for each in pole.snapshots)
    following = int(pole.read(["rows/order"], start=row, stop=row + 1)["rows"]["order"][0])
    lossy = without(pole, tmp_path / "s", (order, following))
    assert lossy.missing == []
    played = check_doors(pole, lossy, cart_pole(), [row - 1, row, row + 1])
    after = min(each.row for each in pole.snapshots if each.order > order)
    assert played == {*range(row), *range(after, STEPS)}
    report = Replay(lossy, cart_pole()).run()
    assert f"gone on from a snapshot after row {row}: lost: what was recorded between two rows" in str(report)


def test_what_a_device_said_that_was_lost_ends_a_stretch(walk: tuple[Session, str], tmp_path: Path) -> None:
    """It was lost in the middle of a step: the row itself is there, but what its env had read is not."""
    session, address = walk
    row = 60
    readings = session.read(["readings"], start=row, stop=row + 1)["readings"]["legs"]
    first = int(readings["order"][0])
    lossy = without(session, tmp_path / "s", (first, first + 1))
    assert lossy.missing == []
    played = check_doors(session, lossy, ant(address), [row - 1, row])
    after = min(each.row for each in session.snapshots if each.row > row)
    assert played == {*range(row), *range(after, STEPS)}


def test_a_state_that_was_restored_under_the_recorder_is_gone_on_from(tmp_path: Path) -> None:
    def loop(recorder: Recorder) -> None:
        env = simckpt.SnapshotEnv(recorder)
        rng = np.random.default_rng(0)
        env.reset(seed=3)
        for step in range(60):
            if step == 20:
                saved = env.state_dict()
            if step == 40:
                env.load_state_dict(saved)
                env.unwrapped.arm()
            env.step(rng.uniform(-1, 1, 1))

    session = record(tmp_path / "s", cart_pole(), loop=loop)
    report = Replay(session, cart_pole()).run()
    assert report.exact, str(report)
    assert report.rows == (range(60),)
    assert [each.row for each in session.snapshots] == [0, 40]
    replay = Replay(session, cart_pole())
    for row in (39, 40, 41):
        assert replay.go_to(row).exact

    # where the snapshot is missing that was taken then, what follows has nothing to go on from
    class Without(Altered):
        @property
        def snapshots(self) -> Any:
            return super().snapshots[:1]

    replay = Replay(Without(session), cart_pole())
    assert replay.go_to(39).exact
    with pytest.raises(ConfigurationError, match="no snapshot of session 'played' leads to row 40"):
        replay.go_to(40)
    report = replay.run()
    assert report.exact
    assert report.rows == (range(40),)
    assert sum(map(len, report.skipped)) == 20


def test_what_the_loop_does_with_a_link_by_itself_is_done_again(tmp_path: Path) -> None:
    def loop(recorder: Recorder) -> None:
        link = recorder.unwrapped.link
        recorder.reset(seed=1)
        for step in range(30):
            recorder.step(np.array([0.1]))
            if step % 7 == 0:
                link.send((0.5, 0.0))
                link.receive()
        recorder.snapshot()

    session = record(tmp_path / "s", cart_pole(), loop=loop)
    report = Replay(session, cart_pole()).run()
    assert report.exact, str(report)
    assert report.snapshots == 1


def test_what_a_ring_has_kept_is_played(tmp_path: Path) -> None:
    def loop(recorder: Recorder) -> None:
        drive(recorder, 120)
        recorder.trigger("enough")

    # the ring begins where it happens to begin
    recorder = Recorder(cart_pole(), tmp_path / "s", "ring", ring=0.1, part_seconds=0.02, snapshot_every=0.02)
    try:
        loop(recorder)
    finally:
        recorder.close()
    (session,) = simckpt.Store(tmp_path / "s").sessions()
    report = Replay(session, cart_pole()).run()
    assert report.exact, str(report)
    assert report.rows[-1].stop == session.rows.stop == 120


class Waiting(gym.Wrapper):
    """Waits in its reset for a reading, for an end of readings, and for a time."""

    def reset(self, **arguments: Any) -> Any:
        link = self.unwrapped.link
        link.send((0.0, 0.0))
        while link.receive(0.01) is None:
            pass
        while link.receive() is not None:
            pass
        until = link.time() + 2_000_000
        while link.time() < until:
            pass
        return super().reset(**arguments)


def test_an_env_that_waits_for_its_device_does_not_wait_for_ever(tmp_path: Path) -> None:
    def bench(address: str) -> gym.Env:
        return Waiting(CartPoleInTheLoopEnv(Link(UDP(address), command=Motor.command, reading=Motor.reading)))

    def loop(recorder: Recorder) -> None:
        recorder.reset(seed=1)
        for _ in range(10):
            recorder.step(np.array([0.2]))

    with device(2, loss=0.0) as address:
        session = record(tmp_path / "s", bench(address), loop=loop)
    env = bench(address)
    assert Replay(session, env).run().exact


def test_an_env_that_asks_for_more_than_there_was_is_stopped() -> None:
    noted: list[str] = []
    tape = Tape("device", 2, lambda leaf, far: noted.append(leaf))
    link = Link(UDP("127.0.0.1:9"), command=("force",), reading=("force", "position"), armed=False)
    link.source = tape
    tape.begin(7, until=10**9)

    def ask_for_ever() -> None:
        while True:
            link.receive()

    with pytest.raises(StateMismatchError, match="row 7: the env goes on asking link 'device' for more than was"):
        ask_for_ever()
    assert set(noted) == {"reading/device"}


def test_no_step_of_ones_own_reaches_the_device(walk: tuple[Session, str], listening: socket.socket) -> None:
    session, address = walk
    env = ant(address)
    with Replay(session, env) as replay:
        replay.go_to(40)
        for _ in range(5):
            env.step(env.action_space.sample())
        env.reset()
        replay.run(30, 45)
        # not even armed
        replay.links["legs"].arm()
        env.step(env.action_space.sample())
    with pytest.raises(LinkDisarmedError):
        env.step(env.action_space.sample())
    assert is_silent(listening)
    link = replay.links["legs"]
    link.arm()
    link.send(np.zeros(8))
    # it would have been heard
    assert select.select([listening], [], [], 60)[0]
    link.close()


def test_an_armed_and_open_link_is_closed_by_a_replay(walk: tuple[Session, str], listening: socket.socket) -> None:
    env = ant(walk[1])
    link = env.get_wrapper_attr("link")
    link.arm()
    Replay(walk[0], env).go_to(20)
    assert not link.armed
    assert is_silent(listening)


def test_an_env_with_other_links_is_refused(pole: Session, walk: tuple[Session, str]) -> None:
    with pytest.raises(ConfigurationError, match=r"recorded with the links 'motor' \(force, position.*'legs'"):
        Replay(pole, ant(walk[1]))
    with pytest.raises(ConfigurationError, match="the env has none"):
        Replay(pole, dict_space())


def test_another_env_is_refused_with_what_differs(pole: Session) -> None:
    other = gym.wrappers.NormalizeObservation(cart_pole())
    replay = Replay(pole, other)
    with pytest.raises(StateMismatchError, match="does not fit env"):
        replay.run()


def test_an_env_with_a_recorder_is_refused(pole: Session, tmp_path: Path) -> None:
    recorder = Recorder(cart_pole(), tmp_path / "s", snapshot_every=None)
    try:
        with pytest.raises(ConfigurationError, match="without the Recorder"):
            Replay(pole, gym.wrappers.TimeLimit(recorder, 10))
    finally:
        recorder.close()


def test_a_session_without_snapshots_cannot_be_played(tmp_path: Path) -> None:
    session = record(
        tmp_path / "s", cart_pole(), loop=lambda env: (env.reset(), env.step(np.zeros(1)))[0], snapshot_every=None
    )
    with pytest.raises(ConfigurationError, match="no snapshot to play rows 0 to 0 from"):
        Replay(session, cart_pole()).run()


NAN = np.array([0x7FF8000000000001], np.uint64).view(np.float64)


@pytest.mark.parametrize(
    ("recorded", "now", "expected"),
    [
        (np.array([0.0, 1.0]), np.array([0.0, 1.0]), {}),
        (np.array([np.nan, np.inf]), np.array([np.nan, np.inf]), {}),
        (np.array([0.0]), np.array([-0.0]), {"x": 0.0}),
        (np.array([np.nan]), NAN, {"x": 0.0}),
        (np.array([np.nan]), np.array([1.0]), {"x": np.nan}),
        (np.array([np.inf]), np.array([1.0]), {"x": np.inf}),
        (np.array([1.0, 2.0]), np.array([1.5, 2.25]), {"x": 0.5}),
        (np.array([1.0]), np.array([1.0], np.float32), {"x": 0.0}),
        (np.array([0.0]), np.array([0]), {"x": 0.0}),
        (np.array([1, 2**62]), np.array([1, 2**62 + 1]), {"x": 1.0}),
        (np.array([True]), np.array([False]), {"x": None}),
        (np.array([1.0]), np.array([1.0, 2.0]), {"x": None}),
        (np.int64(3), 3, {}),
        ({"a": np.zeros(2), "b/c": np.ones(1)}, {"b/c": np.zeros(1), "a": np.zeros(2)}, {"x/b%2Fc": 1.0}),
        ({"a": np.zeros(2)}, {"b": np.zeros(2)}, {"x": None}),
        ((np.zeros(2), np.ones(1)), (np.zeros(2), np.zeros(1)), {"x/1": 1.0}),
        ((np.zeros(2),), (np.zeros(2), np.zeros(1)), {"x": None}),
    ],
)
def test_equal_is_equal_to_the_last_bit(recorded: Any, now: Any, expected: dict[str, float | None]) -> None:
    found: dict[str, float | None] = {}
    compare(recorded, now, "x", found.__setitem__)
    assert str(found) == str(expected)


def test_a_report_of_many_leaves_is_short() -> None:
    found = Differences()
    for number in range(50):
        for row in range(number, 1000):
            found.note(row, f"leaf_{number:02d}", float(row) if row != 500 else np.nan)
    report = ReplayReport("s", (range(1000),), 3, found.all())
    assert report.first is not None
    assert (report.first.leaf, report.first.rows, report.first.at) == ("leaf_00", 1000, 500)
    lines = str(report).splitlines()
    assert len(lines) == 22
    assert lines[-1] == "  and 30 more leaves"


def test_snapshots_of_the_fixture_lie_where_the_tests_need_them(pole: Session) -> None:
    assert {0, *SNAPSHOTS} <= {each.row for each in pole.snapshots}
    assert len(pole.read(["resets"])["resets"]["row"]) > 3


class Arm:
    """A driver: the env knows this, and this knows the link."""

    def __init__(self, address: str) -> None:
        self.link = Link(UDP(address), command=("force",), reading=("place",), name="arm")


class WithDriver(Counting):
    """Talks to a device by a driver, which it has from the beginning, or makes in its first reset."""

    def __init__(self, address: str, *, late: bool) -> None:
        super().__init__()
        self.address = address
        self.drivers = [] if late else [Arm(address)]

    def reset(self, **options: object) -> tuple[np.ndarray, dict]:
        self.drivers = self.drivers or [Arm(self.address)]
        self.drivers[0].link.send([0.5])
        return super().reset(**options)

    def step(self, action: np.ndarray) -> tuple:
        self.drivers[0].link.send(action[:1])
        self.drivers[0].link.receive()
        return super().step(action)


def heard(own: socket.socket) -> int:
    count = 0
    while select.select([own], [], [], 0)[0]:
        own.recv(1000)
        count += 1
    return count


@pytest.mark.parametrize("late", [False, True])
def test_a_link_that_a_driver_holds_sends_nothing_in_a_replay(tmp_path: Path, late: bool) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as own:
        own.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{own.getsockname()[1]}"
        with Recorder(WithDriver(address, late=late), tmp_path / "s", "s") as env:
            env.reset(seed=1)
            with pytest.warns(RecordingWarning, match="did not find") if late else contextlib.nullcontext():
                for _ in range(5):
                    env.step(env.action_space.sample())
            env.unwrapped.drivers[0].link.close()
        assert heard(own) == 6
        session = simckpt.Store(tmp_path / "s").session("s")
        # one that the env makes later is not known to the recorder
        assert [link.name for link in session.links] == ([] if late else ["arm"])
        replay = Replay(session, WithDriver(address, late=late))
        if late:
            with pytest.raises(LinkDisarmedError, match=r"'arm' to udp://.* a replay reaches no device"):
                replay.run()
        else:
            report = replay.run()
            assert report.exact
        assert heard(own) == 0


class Arming(WithDriver):
    """Arms its link in each reset, as an env does whose device may move by then."""

    def reset(self, **options: object) -> tuple[np.ndarray, dict]:
        self.drivers[0].link.arm()
        return super().reset(**options)


def test_an_env_that_arms_its_link_in_a_reset_is_played_and_opens_nothing(tmp_path: Path) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as own:
        own.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{own.getsockname()[1]}"
        with Recorder(Arming(address, late=False), tmp_path / "s", "s") as env:
            for _ in range(2):
                env.reset(seed=1)
                for _ in range(5):
                    env.step(env.action_space.sample())
            env.unwrapped.drivers[0].link.close()
        assert heard(own) == 12
        env = Arming(address, late=False)
        link = env.drivers[0].link
        with Replay(simckpt.Store(tmp_path / "s").session("s"), env) as replay:
            assert replay.run().exact
            link.arm()
            assert link.armed
            assert not link.connected
        assert not link.armed
        assert heard(own) == 0


def test_nothing_that_a_replay_calls_reaches_a_device(pole: Session) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as own:
        own.bind(("127.0.0.1", 0))
        other = Link(UDP(f"127.0.0.1:{own.getsockname()[1]}"), command=("force",), name="other")

        def send(*arguments: Any) -> Any:
            other.send([1.0])
            return np.zeros(1)

        with Replay(pole, cart_pole()) as replay:
            doors = [
                lambda: replay.measure({"x": send}, 0, 3),
                lambda: replay.what_if(send, start=3, steps=2),
                lambda: replay.what_if(lambda seen: np.zeros(1), model=send, start=3, steps=2),
                lambda: replay.what_if(lambda seen: np.zeros(1), model=send, start=3, steps=2, lead=2),
            ]
            for door in doors:
                with pytest.raises(LinkDisarmedError, match="a replay reaches no device"):
                    door()
            # afterwards, too, until somebody says that the device may move
            with pytest.raises(LinkDisarmedError, match=r"link 'other' .* is disarmed"):
                send()
        assert heard(own) == 0
        other.arm()
        send()
        assert select.select([own], [], [], 60)[0]
        other.close()


class Hidden(Counting):
    """Talks to its device by a link that is in no attribute."""

    def __init__(self, step: Callable[[Any], None]) -> None:
        super().__init__()
        self.talk = step

    def step(self, action: np.ndarray) -> tuple:
        self.talk(action)
        return super().step(action)


def test_a_link_that_nobody_finds_sends_nothing_from_the_beginning_of_a_replay_to_its_end(tmp_path: Path) -> None:
    def still(env: Recorder) -> None:
        env.reset(seed=1)
        for _ in range(5):
            env.step(np.zeros(2, np.float32))

    session = record(tmp_path / "s", Hidden(lambda action: None), loop=still)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as own:
        own.bind(("127.0.0.1", 0))
        hidden = Link(UDP(f"127.0.0.1:{own.getsockname()[1]}"), command=("force",), name="hidden")
        hidden.send([0.1])
        assert select.select([own], [], [], 60)[0]
        assert heard(own) == 1
        env = Hidden(lambda action: hidden.send([0.5]))
        seen: list[BaseException] = []

        def elsewhere() -> None:
            try:
                hidden.send([0.2])
            except LinkDisarmedError as error:
                seen.append(error)

        with Replay(session, env) as replay:
            for play in (lambda: None, lambda: replay.run(), lambda: replay.go_to(3)):
                with contextlib.suppress(LinkDisarmedError):
                    play()
                with pytest.raises(LinkDisarmedError):
                    env.step(np.zeros(2, np.float32))
            thread = threading.Thread(target=elsewhere)
            thread.start()
            thread.join()
        assert len(seen) == 1
        with pytest.raises(LinkDisarmedError):
            env.step(np.zeros(2, np.float32))
        assert heard(own) == 0
        hidden.close()


def test_a_link_of_a_recording_goes_on_beside_a_replay(pole: Session, tmp_path: Path) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as own:
        own.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{own.getsockname()[1]}"
        with Recorder(WithDriver(address, late=False), tmp_path / "s", "s") as env:
            env.reset(seed=1)
            with Replay(pole, cart_pole()) as replay:
                assert replay.run().exact
                env.step(env.action_space.sample())
            env.step(env.action_space.sample())
            env.unwrapped.drivers[0].link.close()
        assert heard(own) == 3


def test_an_env_that_raises_in_a_replay_alone_is_a_difference_and_what_follows_is_played(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def loop(env: Recorder) -> None:
        env.reset(seed=1)
        for step in range(60):
            if step in (20, 40):
                env.snapshot()
            env.step(np.full(2, 0.1, np.float32))
            if step % 30 == 29:
                env.reset()

    session = record(tmp_path / "s", Counting(), loop=loop)
    step, played = Counting.step, []

    def failing(env: Counting, action: np.ndarray) -> tuple:
        played.append(0)
        if len(played) == 11:
            env.place += 1
            raise KeyError("the driver has no such mode")
        return step(env, action)

    monkeypatch.setattr(Counting, "step", failing)
    replay = Replay(session, Counting())
    report = replay.run()
    assert not report.exact
    assert report.rows == (range(10), range(20, 60))
    assert report.skipped == (range(10, 20),)
    assert [(each.leaf, each.row, each.rows) for each in report.differences] == [("error", 10, 1)]
    told = "gone on from a snapshot after row 10: the env's step raised KeyError: 'the driver has no such mode'"
    assert told in str(report)
    # which is what it is for a row that is gone to
    played.clear()
    with pytest.raises(StateMismatchError, match="row 15 is not reached: at row 10 the env's step raised KeyError"):
        replay.go_to(15)
    assert replay.go_to(15).exact


class Failing(Counting):
    """Raises in the middle of some steps and resets, when half of it is done."""

    failing = (10, 11, 25)

    def __init__(self, link: Link | None = None) -> None:
        super().__init__(link)
        self.calls = 0

    def step(self, action: np.ndarray) -> tuple:
        self.calls += 1
        if self.calls in self.failing:
            self.place += self.np_random.random()
            raise TimeoutError("the device does not answer")
        return super().step(action)

    def reset(self, **options: object) -> tuple[np.ndarray, dict]:
        if self.calls == 25:
            self.calls += 1
            self.place += 1
            raise TimeoutError("the device does not answer")
        return super().reset(**options)


def test_what_another_thread_does_with_a_link_makes_a_replay_inexact_and_is_told(tmp_path: Path) -> None:
    def loop(recorder: Recorder) -> None:
        link = recorder.unwrapped.link
        recorder.reset(seed=1)
        for step in range(30):
            recorder.step(np.array([0.1]))
            if step == 20:
                thread = threading.Thread(target=link.receive)
                thread.start()
                thread.join()

    with pytest.warns(RecordingWarning, match="another thread"):
        session = record(tmp_path / "s", cart_pole(), loop=loop)
    report = Replay(session, cart_pole()).run()
    assert not report.exact
    assert report.rows == (range(30),)
    assert "no replay repeats row 21: thread: link 'motor'" in str(report)
    assert Replay(session, cart_pole()).run(stop=20).exact


class Odd(Counting):
    """Gives now and then what cannot be recorded: a reward that is no number, an observation that is none."""

    odd = (5, 20, 40)  # as many as there are buffers on their way, at most

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def step(self, action: np.ndarray) -> tuple:
        observation, reward, *rest = super().step(action)
        self.place += self.np_random.random()
        self.calls += 1
        if self.calls - 1 in self.odd:
            return ("nothing", reward, *rest) if self.calls == 21 else (observation, "much", *rest)
        return observation, reward, *rest


def test_rows_that_could_not_be_recorded_are_passed_over_and_told(tmp_path: Path) -> None:
    def loop(env: Recorder) -> None:
        env.reset(seed=1)
        for _ in range(60):
            env.step(np.zeros(2, np.float32))

    with pytest.warns(RecordingWarning):
        session = record(tmp_path / "s", Odd(), loop=loop)
    odd = list(Odd.odd)
    assert [row for rows in session.missing for row in rows] == odd
    report = Replay(session, Odd()).run()
    assert report.exact, str(report)
    assert [row for rows in report.rows for row in rows] == [row for row in range(60) if row not in odd]
    assert [row for rows in report.skipped for row in rows] == odd
    told = [line for line in str(report).splitlines() if "gone on from" in line]
    for row, line in zip(odd, told, strict=True):
        assert line.startswith(f"  gone on from a snapshot after row {row}: unrecorded: row {row} was not recorded")
    # a row behind such a one can be gone to
    for row in (odd[0] + 1, odd[1] + 1):
        replay = Replay(session, Odd())
        assert replay.go_to(row).exact
        assert replay.run(row).exact


def test_calls_that_raised_and_were_survived_are_passed_over(tmp_path: Path) -> None:
    with Recorder(Failing(), tmp_path / "s", "s") as env:
        env.reset(seed=1)
        for step in range(40):
            try:
                env.step(env.action_space.sample())
            except TimeoutError:
                # once with a reset, once without
                if step > 20:
                    with pytest.raises(TimeoutError):
                        env.reset()
                    env.reset()
    session = simckpt.Store(tmp_path / "s").session("s")
    report = Replay(session, Failing()).run()
    assert report.exact, str(report)
    assert report.rows == (range(37),)
    assert str(report).count("gone on from a snapshot after row") == 4
    assert "gone on from a snapshot after row 9: error: step raised TimeoutError: the device does not" in str(report)
    for row in (9, 20, 36):
        replay = Replay(session, Failing())
        replay.go_to(row)
        assert replay.run(row).exact


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"start": 200}, f"has the rows 0 to {STEPS - 1}, none from 200 on and below {STEPS}"),
        ({"stop": 0}, "none from 0 on and below 0"),
        ({"stop": -3}, "none from 0 on and below -3"),
        ({"start": 9, "stop": 9}, "none from 9 on and below 9"),
        ({"start": 1.5}, "start is a whole number, got 1.5"),
        ({"stop": "end"}, "stop is a whole number, got 'end'"),
        ({"start": True}, "start is a whole number, got True"),
    ],
)
def test_rows_that_there_are_none_of_are_refused(pole: Session, wrong: dict[str, Any], told: str) -> None:
    replay = Replay(pole, cart_pole())
    for play in (replay.run, lambda **rows: list(replay.steps(**rows)), lambda **rows: replay.measure({}, **rows)):
        with pytest.raises(ConfigurationError, match=told):
            play(**wrong)


def test_rows_before_the_first_are_none_that_could_not_be_played(pole: Session) -> None:
    report = Replay(pole, cart_pole()).run(-5, 5)
    assert (report.rows, report.skipped) == ((range(5),), ())
    assert str(report) == "exact: 5 rows and 0 later snapshots of session 'played'"


def test_a_session_without_rows_says_so(tmp_path: Path) -> None:
    session = record(tmp_path / "s", cart_pole(), loop=lambda env: None)
    replay = Replay(session, cart_pole())
    with pytest.raises(ConfigurationError, match="session 'played' has no rows to play"):
        replay.run()
    with pytest.raises(
        ConfigurationError, match="no snapshot of session 'played' leads to row 1: recorded are rows none"
    ):
        replay.go_to(1)


def test_a_replay_that_was_closed_plays_nothing(pole: Session) -> None:
    with Replay(pole, cart_pole()) as replay:
        assert replay.go_to(3).exact
    play = {
        "run": replay.run,
        "go_to": lambda: replay.go_to(3),
        "steps": lambda: next(replay.steps()),
        "measure": lambda: replay.measure({"x": lambda env, info: 1}),
        "what_if": lambda: replay.what_if(lambda observation: np.zeros(1), start=3),
    }
    for each in play.values():
        with pytest.raises(ConfigurationError, match="the replay of session 'played' was closed"):
            each()
    assert not replay.links["motor"].armed
    replay.close()
