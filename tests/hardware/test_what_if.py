"""Another policy from a moment on: against a model it is exact, repeatable, and nothing reaches a device."""

import select
import socket
from pathlib import Path

import numpy as np
import pytest
from replay_helpers import OverLink, cart_pole, device, joints, record

from envs.cart_pole_in_the_loop import CartPoleInTheLoopEnv
from envs.motor import Motor
from simckpt.errors import ConfigurationError
from simckpt.hardware import UDP, Link, Recorder, Replay, Simulated, model_readings, series
from simckpt.hardware.session import READING, Session

START = 15
ROWS = 20  # less than what is left of the episode


@pytest.fixture(scope="module")
def pole(tmp_path_factory: pytest.TempPathFactory) -> Session:
    """One long episode of a cart-pole with a model of its motor, by a policy that is a function of what it sees."""

    def loop(env: Recorder) -> None:
        observation, _ = env.reset(seed=3)
        for _ in range(START + ROWS + 5):
            observation, *_ = env.step(policy(observation))

    return record(tmp_path_factory.mktemp("pole") / "s", cart_pole(), loop=loop)


def policy(observation: np.ndarray) -> np.ndarray:
    return np.array([np.tanh(3 * observation[1] + observation[3])])


def held(observation: np.ndarray) -> np.ndarray:
    return np.array([0.3])


def same(a: object, b: object) -> bool:
    if isinstance(a, dict):
        assert isinstance(b, dict)
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    assert isinstance(a, np.ndarray)
    assert isinstance(b, np.ndarray)
    return a.dtype == b.dtype and a.tobytes() == b.tobytes()


def test_the_same_policy_and_the_same_model_do_what_was_recorded(pole: Session) -> None:
    replay = Replay(pole, cart_pole())
    found = replay.what_if(policy, start=START, steps=ROWS)
    assert found.way.exact
    assert found.rows == range(START, START + ROWS)
    recorded = pole.read(start=START, stop=START + ROWS)
    for column in ("row", "action", "observation", "reward", "terminated", "truncated"):
        assert same(found.tables["rows"][column], recorded["rows"][column]), column
    for table, columns in (("commands", ("row", "values")), ("readings", ("row", "kind", "device_time", "values"))):
        for column in columns:
            now, then = (each[table]["motor"][column] for each in (found.tables, recorded))
            assert np.array_equal(now, then, equal_nan=now.dtype.kind == "f"), (table, column)


def test_another_policy_leaves_the_record_and_is_repeatable(pole: Session) -> None:
    replay = Replay(pole, cart_pole())
    first, second = (replay.what_if(held, start=START, steps=ROWS) for _ in range(2))
    assert same(first.tables, second.tables)
    then = first.recorded.tables["rows"]
    assert first.tables["rows"]["row"].tolist() == then["row"].tolist()
    assert (first.tables["rows"]["observation"] != then["observation"]).any()
    assert f"recorded {float(then['reward'].sum()):.6g} in {ROWS} rows" in str(first)
    # and the record can be played as before
    assert replay.run().exact


def test_a_model_that_is_given_takes_the_place_of_the_one_in_the_env(pole: Session) -> None:
    replay = Replay(pole, cart_pole())
    quiet = replay.what_if(held, model=lambda command, time: (5.0, 0.0), start=START, steps=ROWS)
    assert (
        quiet.tables["readings"]["motor"]["values"][quiet.tables["readings"]["motor"]["kind"] == READING, 0] == 5
    ).all()
    # force and position by the device are the last two that are seen
    assert (quiet.tables["rows"]["observation"][:, -2:] == (5.0, 0.0)).all()
    assert replay.run().exact


def test_a_seed_draws_other_noise_in_the_env(pole: Session) -> None:
    replay = Replay(pole, cart_pole())
    none, one, again, two = (replay.what_if(held, start=START, steps=ROWS, seed=seed) for seed in (None, 1, 1, 2))
    assert same(one.tables, again.tables)
    forces = [each.tables["rows"]["observation"][:, -2] for each in (none, one, two)]
    assert len({each.tobytes() for each in forces}) == 3


def test_a_model_can_be_sent_what_went_before(pole: Session) -> None:
    replay = Replay(pole, cart_pole())
    heard: list[list[float]] = [[], []]

    class Counting:
        """A model that tells how much it has heard; a copy of it is used each time."""

        def __init__(self) -> None:
            self.total = 0.0

        def __call__(self, command: np.ndarray, time: int) -> tuple[float, float]:
            self.total += float(command[0])
            return self.total, 0.0

    model = Counting()
    for place, lead in enumerate((0, 10)):
        found = replay.what_if(held, model=model, start=START, steps=3, lead=lead)
        heard[place] = found.tables["readings"]["motor"]["values"][:, 0][
            found.tables["readings"]["motor"]["kind"] == READING
        ].tolist()
    sent = pole.read(["commands"], start=START - 10, stop=START)["commands"]["motor"]["values"][:, 0]
    total = 0.0
    for each in sent.tolist():
        total += each
    assert model.total == 0
    assert heard[0] == [3.0, 6.0, 9.0]
    assert heard[1] == [total + 3.0, total + 3.0 + 3.0, total + 3.0 + 3.0 + 3.0]


def test_a_what_if_against_a_real_device_needs_a_model_and_reaches_nobody(tmp_path: Path) -> None:
    import gymnasium as gym

    def hopper(address: str) -> gym.Env:
        link = Link(UDP(address), command=joints(3), reading=joints(3), name="leg")
        return OverLink(gym.make("Hopper-v5"), link)

    def loop(env: Recorder) -> None:
        env.reset(seed=3)
        for _ in range(20):
            env.step(np.full(3, 0.2, np.float32))

    with device(3) as address:
        session = record(tmp_path / "s", hopper(address), loop=loop)
    host, _, port = address.partition(":")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as listening:
        listening.bind((host, int(port)))
        env = hopper(address)
        with Replay(session, env) as replay:
            still = lambda observation: np.zeros(3, np.float32)  # noqa: E731
            with pytest.raises(ConfigurationError, match="the links of the env are 'leg': give a model"):
                replay.what_if(still, start=10, steps=5)
            with pytest.raises(ConfigurationError, match="give a model"):
                replay.what_if(still, model={"arm": lambda command, time: command}, start=10, steps=5)
            found = replay.what_if(still, model=lambda command, time: command, start=10, steps=5)
            assert found.way.exact
            assert len(found.rows) == 5
            sent = found.tables["commands"]["leg"]
            assert (sent["values"] == 0).all()
            # the count of commands goes on where the record was
            then = session.read(["commands"], start=9, stop=10)["commands"]["leg"]["sequence"][-1]
            assert sent["sequence"].tolist() == [int(then) + 1 + place for place in range(5)]
        assert not select.select([listening], [], [], 0)[0]
        env.close()


def test_a_what_if_ends_with_its_episode(pole: Session) -> None:
    found = Replay(pole, cart_pole()).what_if(held, start=START, steps=500)
    assert found.ended
    rows = found.tables["rows"]
    assert len(rows["row"]) < 500
    assert rows["terminated"][-1] or rows["truncated"][-1]
    assert not (rows["terminated"][:-1] | rows["truncated"][:-1]).any()
    assert "the episode ended" in found.told()


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"steps": 0}, "steps is a whole number of at least 1, got 0"),
        ({"steps": 2.5}, "steps is a whole number of at least 1, got 2.5"),
        ({"lead": -1}, "lead is a whole number of at least 0, got -1"),
        ({"seed": "one"}, "seed is a whole number of at least 0, got 'one'"),
        ({"start": "a"}, "the number of a row is a whole number, got 'a'"),
        ({"start": True}, "the number of a row is a whole number, got True"),
        ({"start": 1.5}, "the number of a row is a whole number, got 1.5"),
        ({"start": None, "seconds": float("nan")}, "a finite number of seconds, got nan"),
        ({"start": None, "seconds": "soon"}, "a finite number of seconds, got 'soon'"),
        ({"seconds": 1.0}, "one of them"),
        ({"model": "motor"}, "a model is called as model.command, time., got 'motor'"),
    ],
)
def test_arguments_that_make_no_sense_are_refused(pole: Session, wrong: dict, told: str) -> None:
    replay = Replay(pole, cart_pole())
    with pytest.raises(ConfigurationError, match=told):
        replay.what_if(held, **{"start": START, **wrong})
    with pytest.raises(ConfigurationError, match=r"policy\(observation\), got 3"):
        replay.what_if(3, start=START)
    # nothing was left behind
    assert replay.run(START, START + 3).exact


@pytest.mark.parametrize("action", [np.zeros(3), np.zeros((1, 1)), 0.5, "left", {"force": 0.5}, (0.5,) * 2, None])
def test_a_policy_whose_actions_are_others_is_named(pole: Session, action: object) -> None:
    replay = Replay(pole, cart_pole())
    with pytest.raises(ConfigurationError, match=r"the policy returned .*is an array of shape \(1,\)"):
        replay.what_if(lambda observation: action, start=START, steps=3)
    assert replay.run(START, START + 3).exact


@pytest.mark.parametrize(
    ("reading", "told"),
    [
        ((1.0,), r"the model of the device returned an array of shape \(1,\); a reading is 2 numbers"),
        (1.0, r"array of shape \(\); a reading is 2 numbers \('force', 'position'\)"),
        (np.zeros((2, 2)), r"array of shape \(2, 2\); a reading is 2 numbers"),
        ("fast", "a model returns the numbers of a reading, or None, got 'fast'"),
        ({"force": 1.0}, "a model returns the numbers of a reading, or None, got"),
        ([[1.0], [1.0, 2.0]], "a model returns the numbers of a reading, or None, got"),
    ],
)
@pytest.mark.parametrize("lead", [0, 5])
def test_a_model_that_returns_no_reading_is_named_and_leaves_the_replay_as_it_was(
    pole: Session, reading: object, told: str, lead: int
) -> None:
    replay = Replay(pole, cart_pole())
    with pytest.raises(ConfigurationError, match=told):
        replay.what_if(held, model=lambda command, time: reading, start=START, steps=3, lead=lead)
    # the record answers again, and not the model
    assert replay.run(START, START + 3).exact
    with pytest.raises(ConfigurationError, match=told):
        model_readings(pole, lambda command, time: reading, "force")


def test_a_model_in_the_env_answers_where_a_device_was_recorded(tmp_path: Path) -> None:
    """Without `model=` the model that the env has is asked, a copy of it each time, and not what was recorded."""

    def loop(env: Recorder) -> None:
        env.reset(seed=1)
        for _ in range(30):
            env.step(np.array([0.2]))

    def bench(transport: object) -> CartPoleInTheLoopEnv:
        return CartPoleInTheLoopEnv(Link(transport, command=Motor.command, reading=Motor.reading, name="motor"))

    with device(2, loss=0.0) as address:
        session = record(tmp_path / "s", bench(UDP(address)), loop=loop)
    asked: list[list[float]] = []

    class Telling:
        """Tells the number of the command, and keeps what it was sent; copies keep it in the same list."""

        def __init__(self) -> None:
            self.commands = 0

        def __call__(self, command: np.ndarray | None, time: int) -> tuple[float, float] | None:
            if command is None:
                return None
            asked.append(command.tolist())
            self.commands += 1
            return 100.0 + self.commands, 0.0

    replay = Replay(session, bench(Simulated(Telling(), period=0.002)))
    found = [replay.what_if(held, start=12, steps=6) for _ in range(2)]
    for each in found:
        readings = each.tables["readings"]["motor"]
        came = readings["kind"] == READING
        assert readings["values"][came, 0].tolist() == [101.0, 102.0, 103.0, 104.0, 105.0, 106.0]
        # the observation ends with the force and the position of the last reading
        assert each.tables["rows"]["observation"][:, -2].tolist() == readings["values"][came, 0].tolist()
    assert asked[:6] == asked[6:] == found[0].tables["commands"]["motor"]["values"].tolist()
    assert same(found[0].tables, found[1].tables)
    assert replay.run().exact


def test_the_true_model_answers_as_the_device_did(pole: Session) -> None:
    """Every command of the session was answered by such a motor, or by none where a reading got lost."""
    truth = series(pole, "reading/motor/force", start=0, stop=START)
    # the same motor leaves out the same readings; without losses its noise is the same up to the first of them
    found = model_readings(pole, Simulated(Motor(4, loss=0.1), period=0.002), "force", start=0, stop=START)
    assert found.values.tobytes() == truth.values.tobytes()
    sent = pole.read(["commands"], start=0, stop=START)["commands"]["motor"]
    whole = model_readings(pole, Simulated(Motor(4), period=0.002), "force", start=0, stop=START)
    assert whole.rows.tolist() == sent["row"].tolist()
    missing = np.flatnonzero(~np.isin(sent["row"], truth.rows))
    before = int(missing[0]) if len(missing) else len(truth.values)
    assert before >= 3
    assert whole.values[:before].tobytes() == truth.values[:before].tobytes()


def test_a_reading_that_there_is_none_of_is_refused(pole: Session) -> None:
    for wrong in ({"value": "torque"}, {"value": "force", "link": "arm"}):
        with pytest.raises(ConfigurationError, match=r"has the links motor \(force, position\)"):
            model_readings(pole, Motor(), **wrong)
