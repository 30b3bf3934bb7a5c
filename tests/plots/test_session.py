"""What the figures of a session show; how they look was looked at."""

import json
import sys
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from replay_helpers import cart_pole, dict_space, record

from envs.motor import Motor
from simckpt import plots
from simckpt.errors import ConfigurationError, LeafNotFoundError, StateMismatchError
from simckpt.hardware import Recorder, Replay, Simulated, contact_force, model_readings, series, timing
from simckpt.hardware.session import READING, Session
from simckpt.plots import figures
from simckpt.plots import session as drawing


@pytest.fixture(scope="module")
def pole(tmp_path_factory: pytest.TempPathFactory) -> Session:
    def loop(env: Recorder) -> None:
        env.reset(seed=1)
        rng = np.random.default_rng(2)
        for step in range(60):
            env.step(rng.uniform(-1, 1, 1))
            if step == 30:
                env.snapshot()
                env.note("the <b>door</b> was opened")
            if env.unwrapped.data.qpos[1] > 1 or step == 43:
                env.reset()

    return record(
        tmp_path_factory.mktemp("pole") / "s", cart_pole(), loop=loop, signals={"contact_force": contact_force}
    )


def texts(figure: Any) -> str:
    """Everything a figure says, and proof that it is one that browsers can be given."""
    return json.dumps(json.loads(figure.to_json()), ensure_ascii=False)


def named(figure: Any, name: str) -> list[Any]:
    return [trace for trace in figure.data if trace.name == name]


def test_commands_and_readings_are_those_of_the_record_by_their_names(pole: Session) -> None:
    figure = plots.commands_and_readings(pole)
    assert [figure.layout[f"yaxis{place}"].title.text for place in ("", 2)] == ["force", "position"]
    sent, looks = pole.read()["commands"]["motor"], pole.read()["readings"]["motor"]
    force, position = named(figure, "command")
    assert list(force.y) == sent["values"][:, 0].tolist()
    assert list(position.y) == sent["values"][:, 1].tolist()
    assert list(force.x) == ((sent["monotonic"] - pole.started) / 1e9).tolist()
    assert list(force.customdata) == sent["row"].tolist()
    came = looks["values"][looks["kind"] == READING]
    shown = np.array(named(figure, "reading")[0].y)
    assert shown[~np.isnan(shown)].tolist() == came[:, 0].tolist()
    assert "note: the &lt;b&gt;door&lt;/b&gt; was opened" in texts(figure)


def test_some_rows_alone_are_drawn(pole: Session) -> None:
    figure = plots.commands_and_readings(pole, start=10, stop=20)
    assert set(named(figure, "command")[0].customdata) == set(range(10, 20))
    assert "rows 10 to 19" in figure.layout.title.text


def test_step_times_and_intervals_are_those_of_the_record(pole: Session) -> None:
    rows = pole.read(["rows"])["rows"]
    took, apart = plots.step_times(pole).data
    assert np.allclose(took.y, (rows["finished"] - rows["started"]) / 1e6, rtol=1e-15)
    assert np.allclose(apart.y, np.diff(rows["started"]) / 1e6, rtol=1e-15)
    moments = [line.x0 for line in plots.step_times(pole).layout.shapes if line.line.dash == "dot"]
    assert moments == [(each.monotonic - pole.started) / 1e9 for each in pole.snapshots]


def test_delays_are_what_readings_took_beyond_the_quickest_whatever_the_clocks() -> None:
    rng = np.random.default_rng(1)
    sent = 10**15 + 2_000_000 * np.arange(5_000)
    extra = rng.exponential(300_000, 5_000).astype(np.int64)
    # the device's clock starts elsewhere, and is fast by 80 millionths
    device_time = 77 + sent - sent[0] + (sent - sent[0]) * 80 // 10**6
    found = timing.delays(sent + 1_000_000 + extra, device_time)
    assert (found >= 0).all()
    # the quickest of the first and of the last readings were 0.2 microseconds late or less
    assert np.abs(found - extra / 1e9).max() < 1e-6


def test_a_device_that_was_started_anew_has_a_clock_of_its_own() -> None:
    one = np.arange(100) * 2_000_000
    device_time = np.concatenate([5 * 10**9 + one, one])
    received = np.concatenate([one, 10**9 + one])
    assert timing.delays(received, device_time).max() < 1e-9
    assert len(timing.delays(received[:0], device_time[:0])) == 0
    assert timing.delays(received[:1], device_time[:1]).tolist() == [0.0]


def test_thinning_keeps_the_extremes_and_the_gaps() -> None:
    x = np.arange(100_000.0)
    y = np.sin(x / 1000)
    y[12_345], y[50_000], y[77_777] = 9.0, np.nan, -9.0
    kept, shown = figures.thinned(x, y)
    assert len(kept) < 6_000
    assert (np.diff(kept) > 0).all()
    assert {9.0, -9.0} <= set(shown)
    assert np.isnan(shown).sum() == 1
    assert kept[0] == 0
    assert kept[-1] == 99_999


def test_contact_forces_are_the_recorded_signal(pole: Session) -> None:
    figure = plots.contact_forces(pole)
    recorded = pole.read(["rows/signals"])["rows"]["signals"]["contact_force"]
    assert sum(len(trace.y) for trace in figure.data) == recorded.size
    assert {float(np.max(trace.y)) for trace in figure.data} == set(recorded.max(axis=0).tolist())


def test_contact_forces_that_nobody_recorded_come_from_a_replay(tmp_path: Path) -> None:
    felt: list[np.ndarray] = []

    def loop(env: Recorder) -> None:
        env.reset(seed=1)
        rng = np.random.default_rng(0)
        for _ in range(60):
            env.step(rng.uniform(-0.4, 0.4, 8).astype(np.float32))
            felt.append(contact_force(env))

    session = record(tmp_path / "s", gym.make("Ant-v5"), loop=loop)
    expected = np.array(felt)
    assert expected.max() > 1  # it stands on its feet
    with pytest.raises(LeafNotFoundError, match="with env= a replay has the forces"):
        plots.contact_forces(session)
    measured = Replay(session, gym.make("Ant-v5")).measure({"contact_force": contact_force})
    assert measured.tables["rows"]["signals"]["contact_force"].tobytes() == expected.tobytes()
    shown = sorted(np.array(trace.y).tobytes() for trace in plots.contact_forces(session, gym.make("Ant-v5")).data)
    largest = sorted(range(expected.shape[1]), key=lambda place: -expected[:, place].max())[: drawing.MOST]
    assert shown == sorted(expected[:, place].tobytes() for place in largest)
    assert "contact forces" not in drawing.page(session)
    assert "contact forces" in drawing.page(session, env=gym.make("Ant-v5"))
    other = record(tmp_path / "o", dict_space(), loop=lambda env: (env.reset(), env.step(env.action_space.sample()))[0])
    assert texts(plots.contact_forces(session, gym.make("Ant-v5"), start=20, stop=30))
    with pytest.raises(StateMismatchError):
        plots.contact_forces(other, gym.make("Ant-v5"))


def test_the_gap_is_the_difference_where_something_was_measured(pole: Session) -> None:
    figure = plots.gap(pole, "observation[0]", "reading/motor/position")
    simulated, measured = series(pole, "observation[0]"), series(pole, "reading/motor/position")
    inside = (measured.seconds >= simulated.seconds[0]) & (measured.seconds <= simulated.seconds[-1])
    expected = measured.values[inside] - np.interp(measured.seconds[inside], simulated.seconds, simulated.values)
    (difference,) = named(figure, "difference")
    shown = np.array(difference.y)
    assert shown[~np.isnan(shown)].tolist() == expected.tolist()
    assert f"root mean square {np.sqrt(np.mean(expected**2)):.4g}" in figure.layout.title.text
    # of a model that is the device itself
    motor = Simulated(Motor(4, loss=0.1), period=0.002)
    assert texts(plots.gap(pole, model_readings(pole, motor, "force"), "reading/motor/force"))


def test_what_if_is_drawn_over_what_was(pole: Session) -> None:
    found = Replay(pole, cart_pole()).what_if(lambda observation: np.array([0.5]), start=10, steps=20)
    figure = plots.what_if(found)
    panels = [figure.layout[f"yaxis{place}"].title.text for place in ("", *range(2, 8))]
    assert panels == [
        "command/motor/force",
        "command/motor/position",
        *(f"observation[{place}]" for place in range(4)),
        "reward",
    ]
    assert len(named(figure, "recorded")) == len(named(figure, "what if")) == 7
    assert list(named(figure, "what if")[2].y) == found.tables["rows"]["observation"][:, 0].tolist()
    assert list(named(figure, "recorded")[2].y) == pole.read()["rows"]["observation"][10:30, 0].tolist()
    assert sum(trace.showlegend is not False for trace in figure.data) == 2


def test_a_page_has_all_figures_or_some_series(pole: Session) -> None:
    whole = drawing.page(pole)
    assert whole.count('class="plotly-graph-div"') == 4
    assert whole.startswith("<!DOCTYPE html>")
    some = drawing.page(pole, ["observation[1]", "reading/motor/force"], start=5, stop=9)
    assert some.count('class="plotly-graph-div"') == 1
    assert "http" not in some.partition("<body>")[0]


def test_a_name_of_no_series_lists_those_that_there_are(pole: Session) -> None:
    wrong = ["observation", "observation[9]", "observation[0][0]", "reading/motor/torque", "rows", "rows/order", "x/y"]
    for name in [*wrong, "reading/arm/force", "signals/contact_force", "", "reading/motor/force[0]"]:
        with pytest.raises(LeafNotFoundError, match=r"it has action\[0\], observation\[0\], .*reading/motor/position"):
            series(pole, name)


def test_a_link_has_to_be_named_where_there_are_several_or_none(pole: Session, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="has the links 'motor', none called 'arm'"):
        plots.delays(pole, "arm")
    session = record(tmp_path / "s", dict_space(), loop=lambda env: env.reset(seed=1) and None)
    with pytest.raises(ConfigurationError, match="has no link"):
        plots.commands_and_readings(session)
    assert texts(plots.step_times(session))
    assert drawing.page(session)


def test_without_plotly_the_error_names_the_extra(pole: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "plotly", None)
    monkeypatch.setitem(sys.modules, "plotly.graph_objects", None)
    for draw in (plots.commands_and_readings, plots.delays, plots.step_times, plots.contact_forces):
        with pytest.raises(ConfigurationError, match=r"simckpt\[plots\]"):
            draw(pole)
