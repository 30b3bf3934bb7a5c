"""Return curves with confidence bands, rollbacks and what they abandoned."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from simckpt.branching import drawing
from simckpt.plots import figures
from simckpt.plots.curves import Curve, Point, curve, mean_of
from simckpt.plots.lineage import DECIDED, ROLLBACK
from simckpt.run import Run

NOTE_EPISODES = "bands: 95 % confidence of the mean over the episodes of an evaluation"
NOTE_RUNS = "mean of the runs as far as all of them reach; thin: each run; bands: 95 % confidence"
NOTE_ROLLBACKS = "dashed: abandoned by a rollback"
NAMED = 3  # so many runs are named in the title


def returns(
    runs: Run | Iterable[Run] | Mapping[str, Run | Iterable[Run]], metric: str = "eval/return", *, title: str = ""
) -> Any:
    """Returns a figure with a curve for each run: evaluations over steps, with confidence bands.

    Dashed is what a rollback abandoned; a cross marks where it was decided, a diamond where the run went on. Bands need
    the values of single episodes, which checkpoints hold when the loop hands them to `step`; or three runs of a label.

    Args:
        runs: a run; several, with a curve each; or {label: runs}, with a curve for each label, the mean of its runs.
        metric: such as "eval/return".
        title: of the figure; the metric and the runs by default.

    Raises:
        CheckpointNotFoundError: a run has checkpoints and none of them such a metric. A run without any is left out.
        ConfigurationError: plotly is not installed.
    """
    found = [
        (label, [curve(run, metric) for run in members if run.lineage().run(run.name).commits])
        for label, members in _groups(runs)
    ]
    groups = [(label, curves) for label, curves in found if curves]
    shown = ", ".join(label for label, _ in groups) if len(groups) <= NAMED else f"{len(groups)} curves"
    made = figures.figure(title or f"{metric} of {shown or 'no run'}", x="step [env steps]", y=metric, note=" ")
    many = any(len(curves) > 1 for _, curves in groups)
    notes: dict[str, None] = {NOTE_RUNS: None} if many else {}
    symbols: set[str] = set()
    for place, (label, curves) in enumerate(groups):
        color = figures.color(place)
        if len(curves) == 1:
            _draw(made, label, curves[0].line, color)
            _draw_parts(made, label, curves[0], color)
            if not many and any(not math.isnan(point.half) for point in curves[0].line):
                notes[NOTE_EPISODES] = None
            if curves[0].parts:
                notes[NOTE_ROLLBACKS] = None
                symbols |= {DECIDED.symbol, ROLLBACK.symbol}
            continue
        for each in curves:
            _thin(made, label, each, color)
        _draw(made, label, mean_of(curves), color)
        if any(part.points for each in curves for part in each.parts):
            _mark_rollbacks(made, label, curves, color)
            symbols.add(DECIDED.symbol)
    for kind in (DECIDED, ROLLBACK):
        if kind.symbol in symbols:
            figures.explain(made, kind.name, kind.symbol, figures.MUTED)
    figures.set_note(made, "; ".join(notes))
    made.update_xaxes(tickformat="~s")
    made.update_layout(showlegend=True)
    return made


def _groups(runs: Any) -> list[tuple[str, list[Run]]]:
    if isinstance(runs, Mapping):
        return [(str(label), [each] if isinstance(each, Run) else list(each)) for label, each in runs.items()]
    return [(run.name, [run]) for run in ([runs] if isinstance(runs, Run) else runs)]


def _draw(made: Any, label: str, points: Sequence[Point], color: str) -> None:
    """Adds a curve with its band; the legend's entry hides both."""
    go = figures.graph_objects()
    name = figures.text(label)
    banded = [point for point in points if not math.isnan(point.half)]
    if banded:
        steps = [point.step for point in banded]
        made.add_trace(
            go.Scatter(
                x=[*steps, *reversed(steps)],
                y=[*(each.mean + each.half for each in banded), *(each.mean - each.half for each in reversed(banded))],
                fill="toself",
                mode="lines",
                fillcolor=figures.faded(color, 0.16),
                line={"width": 0},
                hoverinfo="skip",
                legendgroup=name,
                showlegend=False,
            )
        )
    made.add_trace(
        go.Scatter(
            x=[point.step for point in points],
            y=[point.mean for point in points],
            mode="lines+markers",
            name=name,
            legendgroup=name,
            line={"color": color, "width": 2.2},
            marker={"size": 5},
            hovertemplate="%{customdata}<extra></extra>",
            customdata=[_hover(label, point) for point in points],
        )
    )


def _draw_parts(made: Any, label: str, of_run: Curve, color: str) -> None:
    go = figures.graph_objects()
    name = figures.text(label)
    for part in of_run.parts:
        if not part.points:
            continue
        reason = f"<br>{figures.text(drawing.rollback(part.rollback)).replace('; ', '<br>')}"
        last, first = part.points[-1], part.points[0]
        made.add_trace(
            go.Scatter(
                x=[point.step for point in part.points],
                y=[point.mean for point in part.points],
                mode="lines",
                line={"color": color, "width": 1.6, "dash": "4px,3px"},
                opacity=0.75,
                legendgroup=name,
                showlegend=False,
                hovertemplate="%{customdata}<extra></extra>",
                customdata=[f"{_hover(label, point)}<br>abandoned" for point in part.points],
            )
        )
        made.add_trace(
            go.Scatter(
                x=[last.step, first.step],
                y=[last.mean, first.mean],
                mode="markers",
                marker={
                    "symbol": [DECIDED.symbol, ROLLBACK.symbol],
                    "opacity": 1,
                    "size": [10, 11],
                    "color": [figures.ALARM, color],
                    "line": {"color": "white", "width": 1},
                },
                legendgroup=name,
                showlegend=False,
                hovertemplate="%{customdata}<extra></extra>",
                customdata=[f"{_hover(label, last)}{reason}", f"{_hover(label, first)}<br>went on from here{reason}"],
            )
        )


def _thin(made: Any, label: str, of_run: Curve, color: str) -> None:
    made.add_trace(
        figures.graph_objects().Scatter(
            x=[point.step for point in of_run.line],
            y=[point.mean for point in of_run.line],
            mode="lines",
            line={"color": figures.faded(color, 0.35), "width": 1},
            legendgroup=figures.text(label),
            showlegend=False,
            hoverinfo="skip",
        )
    )


def _mark_rollbacks(made: Any, label: str, curves: Iterable[Curve], color: str) -> None:
    """Adds a cross where each run of a group was rolled back, on that run's own abandoned part."""
    ends = [(part.points[-1], part) for each in curves for part in each.parts if part.points]
    made.add_trace(
        figures.graph_objects().Scatter(
            x=[point.step for point, _ in ends],
            y=[point.mean for point, _ in ends],
            mode="markers",
            marker={
                "symbol": DECIDED.symbol,
                "size": 8,
                "opacity": 1,
                "color": color,
                "line": {"color": "white", "width": 1},
            },
            legendgroup=figures.text(label),
            showlegend=False,
            hovertemplate="%{customdata}<extra></extra>",
            customdata=[figures.text(drawing.rollback(part.rollback)).replace("; ", "<br>") for _, part in ends],
        )
    )


def _hover(label: str, point: Point) -> str:
    interval = "" if math.isnan(point.half) else f" ± {point.half:.4g}"
    return f"<b>{figures.text(label)}</b><br>step {point.step:,}<br>{point.mean:.6g}{interval} ({point.count})"
