"""What the figures show; how they look was looked at."""

import json
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from lineage_helpers import METRIC, make_store
from scipy import stats

import simckpt
from simckpt import plots
from simckpt.errors import CheckpointNotFoundError, ConfigurationError
from simckpt.plots import curves


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> simckpt.Store:
    return make_store(tmp_path_factory.mktemp("plots") / "s")


def texts(figure: object) -> str:
    """Everything a figure says, and proof that it is one that browsers can be given."""
    return json.dumps(json.loads(figure.to_json()), ensure_ascii=False)


def named(figure: object, name: str) -> object:
    (found,) = [trace for trace in figure.data if trace.name == name and trace.x[0] is not None]
    return found


@pytest.mark.parametrize("freedom", [1, 2, 3, 4, 9, 19, 1_000])
def test_students_t_is_that_of_scipy(freedom: int) -> None:
    # the expansion ends after four terms: 0.12 % too small at three degrees of freedom
    assert curves.student_t(freedom) == pytest.approx(stats.t.ppf(0.975, freedom), rel=2e-3)


def test_the_band_of_an_evaluation_is_the_confidence_interval_of_its_mean() -> None:
    values = [1.0, 4.0, 2.5, 9.0, -3.0, 0.5, 7.0, 2.0, 1.5, 3.0]
    found = curves.point(7, values)
    low, high = stats.t.interval(0.95, 9, np.mean(values), stats.sem(values))
    assert (found.step, found.count) == (7, 10)
    assert found.mean - found.half == pytest.approx(low, rel=1e-4)
    assert found.mean + found.half == pytest.approx(high, rel=1e-4)


@pytest.mark.parametrize("values", [[1.0], [math.nan, 1.0], [math.inf, -math.inf]], ids=["one", "nan", "inf"])
def test_what_has_no_interval_has_no_band(values: list[float]) -> None:
    assert math.isnan(curves.point(1, values).half)


def test_a_curve_has_every_evaluation_on_the_line_with_its_episodes(store: simckpt.Store) -> None:
    found = curves.curve(store.run("ant-ppo"), METRIC)
    assert [point.step for point in found.line] == list(range(10_000, 400_001, 10_000))
    assert {point.count for point in found.line} == {10}
    at = {each.step: each.metrics[METRIC] for each in store.run("ant-ppo").checkpoints() if METRIC in each.metrics}
    assert all(point.mean == pytest.approx(at[point.step]) for point in found.line if point.step in at)


def test_a_curve_has_what_each_rollback_abandoned_up_to_the_decision(store: simckpt.Store) -> None:
    first, second = curves.curve(store.run("ant-ppo"), METRIC).parts
    # from where the run went on, to the evaluation that was seen last and that no checkpoint holds
    assert [point.step for point in first.points] == list(range(200_000, 250_001, 10_000))
    assert [point.count for point in first.points] == [10] * 5 + [1]
    assert [point.step for point in second.points] == list(range(240_000, 270_001, 10_000))


def test_a_branch_starts_at_its_origin(store: simckpt.Store) -> None:
    found = curves.curve(store.run("low"), METRIC)
    assert [point.step for point in found.line] == list(range(100_000, 300_001, 10_000))


def test_a_run_without_a_history_is_drawn_from_its_metrics(tmp_path: Path) -> None:
    with simckpt.Store(tmp_path / "s").start("a") as run:
        checkpointer = run.checkpointer({"loop": simckpt.LoopState(x=1)}, save_when=simckpt.EverySteps(1))
        for step, value in ((1, 3.0), (2, math.nan), (3, 5.0)):
            checkpointer.save(step, {METRIC: value, "loss": 1.0})
    found = curves.curve(simckpt.Store(tmp_path / "s").run("a"), METRIC)
    assert [(point.step, point.mean) for point in found.line] == [(1, 3.0), (3, 5.0)]
    assert all(math.isnan(point.half) for point in found.line)


def test_a_metric_that_no_checkpoint_has_names_those_that_there_are(store: simckpt.Store) -> None:
    with pytest.raises(CheckpointNotFoundError, match="it has eval/return, train/loss"):
        plots.returns(store.run("low"), "evl/return")


def test_the_mean_of_runs_goes_as_far_as_all_of_them_with_a_band_from_three_on() -> None:
    def line(*points: tuple[int, float]) -> curves.Curve:
        return curves.Curve(tuple(curves.point(step, [value]) for step, value in points), ())

    three = [line((0, 0.0), (10, 10.0)), line((0, 2.0), (5, 4.0), (10, 2.0)), line((0, 4.0), (10, 4.0), (20, 9.0))]
    found = curves.mean_of(three)
    assert [(point.step, point.mean) for point in found] == [(0, 2.0), (5, 13 / 3), (10, 16 / 3)]
    assert found[0].half == pytest.approx(stats.t.ppf(0.975, 2) * stats.sem([0.0, 2.0, 4.0]))
    assert all(math.isnan(point.half) for point in curves.mean_of(three[:2]))


def test_the_figure_of_returns_has_curves_bands_and_rollbacks(store: simckpt.Store) -> None:
    figure = plots.returns(store.runs())
    assert [trace.name for trace in figure.data if trace.showlegend is not False] == [
        "ant-ppo",
        "low",
        "high",
        "reseeded",
        "rollback: decided here",
        "rollback: went on from here",
    ]
    assert sum(trace.fill == "toself" for trace in figure.data) == 4
    assert sum(trace.line.dash is not None for trace in figure.data) == 2
    said = texts(figure)
    assert "rolled back at 250,000 to 200,000" in said
    # the markers of the curves are those that the legend explains
    explained = {trace.name: trace.marker.symbol for trace in figure.data if str(trace.name).startswith("rollback")}
    drawn = {
        symbol for trace in figure.data if isinstance(trace.marker.symbol, tuple) for symbol in trace.marker.symbol
    }
    assert set(explained.values()) == drawn
    assert figure.layout.xaxis.title.text == "step [env steps]"
    assert figure.layout.yaxis.title.text == METRIC
    # "lower" has no checkpoint of its own
    assert figure.layout.title.text.startswith(f"{METRIC} of 4 curves")
    assert "level 2" in said


def test_the_figure_of_returns_joins_runs_under_a_label(store: simckpt.Store) -> None:
    groups = {"branches": [store.run("low"), store.run("high"), store.run("reseeded")], "origin": store.run("ant-ppo")}
    figure = plots.returns(groups, title="two <b>kinds</b>")
    legend = [trace.name for trace in figure.data if trace.showlegend is not False]
    assert legend == ["branches", "origin", "rollback: decided here", "rollback: went on from here"]
    assert max(named(figure, "branches").x) == 220_000
    assert "two &lt;b&gt;kinds&lt;/b&gt;" in figure.layout.title.text


def test_the_figure_of_the_lineage_has_a_lane_for_each_run(store: simckpt.Store) -> None:
    figure = plots.lineage(store, metric=METRIC)
    lanes = figure.layout.yaxis.ticktext
    assert [lane.partition("</b>")[0] for lane in lanes] == [
        "<b>ant-ppo",
        "<b>low",
        "<b>lower",
        "<b>high",
        "<b>reseeded",
    ]
    assert "learning_rate=0.0003" in lanes[1]
    assert [trace.x[0] for trace in figure.data if trace.name == "rollback: decided here"] == [250_000, 270_000]
    assert list(named(figure, "rollback: went on from here").x) == [200_000, 240_000]
    assert len(named(figure, "abandoned checkpoint").x) == 3
    assert list(named(figure, "pruned").x) == [60_000]
    assert list(named(figure, "post-mortem").x) == [403_000]
    assert len(figure.layout.annotations) == 4
    assert "eval/return fell from 1,790 to 210" in texts(figure)


def test_the_figure_of_the_lineage_takes_a_run_and_a_graph(store: simckpt.Store) -> None:
    for of in (store.run("lower"), store.run("lower").lineage()):
        assert len(plots.lineage(of).layout.yaxis.ticktext) == 3


def test_the_figure_of_an_empty_store_is_empty(tmp_path: Path) -> None:
    simckpt.Store(tmp_path / "s").start("a").close()
    for figure in (plots.lineage(simckpt.Store(tmp_path / "s")), plots.checkpoint_sizes(simckpt.Store(tmp_path / "s"))):
        texts(figure)


def test_the_sizes_of_a_run_are_those_of_its_checkpoints(store: simckpt.Store) -> None:
    checkpoints = store.run("ant-ppo").checkpoints(abandoned=True)
    figure = plots.checkpoint_sizes(store.run("ant-ppo"))
    assert list(named(figure, "its own files").y) == [each.size for each in checkpoints]
    assert sorted(set(figure.data[0].marker.opacity)) == [0.35, 1.0]


def test_rows_in_segments_are_told_from_own_files(tmp_path: Path) -> None:
    import gymnasium as gym

    store = simckpt.Store(tmp_path / "s")
    box = gym.spaces.Box(-1, 1, (8,))
    buffer = simckpt.ReplayBuffer(capacity=64, observation_space=box, action_space=box, num_envs=1, seed=0)
    for _ in range(32):
        zeros = np.zeros((1, 8))
        buffer.add(zeros, zeros, np.zeros(1), np.zeros(1, bool), np.zeros(1, bool), zeros, valid=np.ones(1, bool))
    with store.start("a") as run:
        found = run.checkpointer({"replay": buffer}, save_when=simckpt.EverySteps(1)).save(1)
    for figure, axis in ((plots.checkpoint_sizes(store.run("a")), "y"), (plots.checkpoint_sizes(store), "x")):
        own, segments = (trace[axis][0] for trace in figure.data)
        assert own == found.nbytes
        assert own + segments == found.size
        assert segments > 0


def test_the_sizes_of_a_store_are_those_of_its_runs(store: simckpt.Store) -> None:
    figure = plots.checkpoint_sizes(store)
    added = {run.name: run.bytes_added for run in store.graph().runs if run.commits}
    assert dict(zip(figure.data[0].y, figure.data[0].x, strict=True)) == added


def saved(store: simckpt.Store, name: str, **values: object) -> simckpt.Checkpoint:
    with store.start(name) as run:
        return run.checkpointer({"loop": simckpt.LoopState(**values)}, save_when=simckpt.EverySteps(1)).save(1)


def test_the_figure_of_distances_has_the_leaves_that_differ(tmp_path: Path) -> None:
    store = simckpt.Store(tmp_path / "s")
    a = saved(store, "a", x=np.array([3.0, 4.0]), same=np.ones(2), zero=np.zeros(2), bad=np.ones(2))
    b = saved(store, "b", x=np.array([3.0, 4.5]), same=np.ones(2), zero=np.full(2, 0.5), bad=np.full(2, np.nan))
    figure = plots.distances(a, b)
    dots = figure.data[0]
    found = dict(zip(dots.y, zip(dots.x, dots.marker.symbol, strict=True), strict=True))
    assert found == {"loop/x": (0.1, "circle"), "loop/zero": (0.5, "circle-open"), "loop/bad": (0.5, "x")}
    assert "different: 3, equal: 1" in figure.layout.title.text
    assert len(plots.distances(a, b, most=1).data[0].y) == 1
    texts(plots.distances(a, a))


def test_the_figure_of_distances_leaves_out_clocks_and_what_policies_remember(tmp_path: Path) -> None:
    import gymnasium as gym

    store = simckpt.Store(tmp_path / "s")
    # its `episode_start_time` is real time, and the history of evaluations is padded with NaNs
    env = gym.wrappers.RecordEpisodeStatistics(gym.make("InvertedPendulum-v5"))
    env.reset(seed=1)
    with store.start("a") as run:
        checkpointer = run.checkpointer({"env": env}, save_when=simckpt.EverySteps(1))
        a = checkpointer.save(1, {METRIC: [1.0, 2.0]})
        env.step(env.action_space.sample())
        b = checkpointer.save(2, {METRIC: [3.0, 4.0]})
    shown = [label for trace in plots.distances(a, b, most=1_000).data for label in trace.y or () if label]
    assert "env/physics/qpos" in shown
    assert not [label for label in shown if "start_time" in label or label.startswith("checkpointer/")]
    asked_for = plots.distances(a, b, components=["checkpointer"]).data[0].y
    assert f"checkpointer/evaluations/{METRIC.replace('/', '%2F')}/returns" in asked_for


def test_texts_of_strangers_are_no_html_in_a_figure(tmp_path: Path) -> None:
    store = simckpt.Store(tmp_path / "s")
    a, b = (saved(store, name, **{"<b>x\x1b": np.full(2, value)}) for name, value in (("a", 1.0), ("b", 2.0)))
    said = texts(plots.distances(a, b))
    assert "<b>x" not in said.replace("<b>loop", "")
    assert "&lt;b&gt;x" in said or "%3Cb%3Ex" in said


def test_without_plotly_the_error_names_the_extra(store: simckpt.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "plotly", None)
    monkeypatch.setitem(sys.modules, "plotly.graph_objects", None)
    for draw in (
        lambda: plots.lineage(store),
        lambda: plots.returns(store.runs()),
        lambda: plots.checkpoint_sizes(store),
    ):
        with pytest.raises(ConfigurationError, match=r"simckpt\[plots\]"):
            draw()


def test_the_figures_module_starts_without_plotly_and_torch() -> None:
    code = "import sys, simckpt.plots; print([name for name in ('plotly', 'torch', 'pandas') if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
