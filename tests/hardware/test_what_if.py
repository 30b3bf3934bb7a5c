"""Another policy from a moment on: against a model it is exact, repeatable, and nothing reaches a device."""

import select
import socket
from pathlib import Path

import numpy as np
import pytest
from replay_helpers import OverLink, cart_pole, device, joints, record

from envs.motor import Motor
from simckpt.errors import ConfigurationError
from simckpt.hardware import Link, Recorder, Replay, Simulated, model_readings, series
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
        from simckpt.hardware import UDP

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


def test_arguments_that_make_no_sense_are_refused(pole: Session) -> None:
    replay = Replay(pole, cart_pole())
    for wrong in ({"steps": 0}, {"lead": -1}):
        with pytest.raises(ConfigurationError, match="steps is 1 or more"):
            replay.what_if(held, start=START, **wrong)
    with pytest.raises(ConfigurationError, match="one of them"):
        replay.what_if(held, start=3, seconds=1.0)


def test_the_true_model_answers_as_the_device_did(pole: Session) -> None:
    """Every command of the session was answered by such a motor, or by none where a reading got lost."""
    found = model_readings(pole, Simulated(Motor(4), period=0.002), "force", start=0, stop=START)
    truth = series(pole, "reading/motor/force", start=0, stop=START)
    # without losses the noise is drawn alike only up to the first loss, which draws from the same stream in both
    assert len(found.values) == len(pole.read(["commands"], start=0, stop=START)["commands"]["motor"]["row"])
    came = np.isin(found.values, truth.values)
    assert came.sum() == len(truth.values)
    assert truth.values[0] == found.values[0] or not came[0]


def test_a_reading_that_there_is_none_of_is_refused(pole: Session) -> None:
    for wrong in ({"value": "torque"}, {"value": "force", "link": "arm"}):
        with pytest.raises(ConfigurationError, match=r"has the links motor \(force, position\)"):
            model_readings(pole, Motor(), **wrong)
