"""The tree of runs as a figure: a lane for each run, steps from left to right."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from simckpt import presentation
from simckpt.branching import drawing
from simckpt.branching.lineage import Commit, Graph, RolledBackPart, RunLineage
from simckpt.plots import figures
from simckpt.run import Run
from simckpt.store import Store

SUBLANE = 0.42  # what a rollback abandoned lies so far below its run's lane
LANE = 58  # height of a lane [pixels]


@dataclass(frozen=True)
class Kind:
    """How one kind of commit is drawn, and what the legend calls it."""

    name: str
    symbol: str
    size: int


SAVED, ROLLBACK = Kind("checkpoint", "circle", 9), Kind("rollback: went on from here", "diamond", 12)
POST_MORTEM, IMPORT = Kind("post-mortem", "star", 12), Kind("import", "square", 10)
ABANDONED, PRUNED = Kind("abandoned checkpoint", "circle", 7), Kind("pruned", "circle", 7)
DECIDED = Kind("rollback: decided here", "x", 10)
LEGEND = (SAVED, IMPORT, PRUNED, POST_MORTEM, ABANDONED, DECIDED, ROLLBACK)


def lineage(of: Store | Run | Graph, *, metric: str | None = None) -> Any:
    """Returns a figure of the tree of runs: where each left its origin, its checkpoints, its rollbacks.

    Args:
        of: a store, to see all of its runs; a run, to see those that lead to it; or a `Graph`.
        metric: whose newest value stands at the end of each run, such as "eval/return".

    Raises:
        ConfigurationError: plotly is not installed.
    """
    graph = of if isinstance(of, Graph) else of.graph() if isinstance(of, Store) else of.lineage()
    lanes = _lanes(graph.runs)
    heights: dict[str, float] = {}  # checkpoint -> its height in the figure
    parts = [(run, part, place) for run in graph.runs for place, part in enumerate(run.rollbacks, 1)]
    for run in graph.runs:
        heights |= {commit.id: lanes[run.name] for commit in run.commits}
    for run, part, place in reversed(parts):
        # a second rollback may abandon what a first one abandoned: that stays where it is
        heights |= dict.fromkeys(part.abandoned, lanes[run.name] + SUBLANE * place)
    depth = max(heights.values(), default=0.0)
    made = figures.figure(
        _title(graph), x="step [env steps]", height=round(170 + LANE * (max(depth, *lanes.values(), 0.0) + 1))
    )
    for place, run in enumerate(graph.runs):
        _draw_run(made, run, lanes[run.name], heights, figures.color(place))
    for run, part, place in parts:
        _draw_part(made, run, part, lanes[run.name], lanes[run.name] + SUBLANE * place)
    colors = {run.name: figures.color(place) for place, run in enumerate(graph.runs)}
    for kind, found in _by_kind(graph.runs).items():
        _mark(made, kind, [(commit, heights[commit.id], colors[run.name], run) for run, commit in found])
    for run in graph.runs:
        _label_end(made, run, lanes[run.name], metric)
    made.update_yaxes(
        tickvals=[lanes[run.name] for run in graph.runs],
        ticktext=[_name(run) for run in graph.runs],
        range=[depth + 0.6, -0.6],
        showgrid=False,
        zeroline=False,
    )
    made.update_xaxes(tickformat="~s", zeroline=False)
    made.update_layout(legend={"y": -90 / made.layout.height, "font_size": 12, "itemclick": False})
    return made


def _title(graph: Graph) -> str:
    folder, _, counts = graph.title().rpartition(": ")
    return f"{folder.rpartition('/')[2].removeprefix('store ')}: {counts}"


def _lanes(runs: Iterable[RunLineage]) -> dict[str, float]:
    """Returns the height of each run's lane; below it there is room for what it abandoned."""
    lanes: dict[str, float] = {}
    free = 0.0
    for run in runs:
        lanes[run.name] = free
        free += 1 + SUBLANE * len(run.rollbacks)
    return lanes


def _draw_run(made: Any, run: RunLineage, lane: float, heights: dict[str, float], color: str) -> None:
    """Adds the line of a run's head, and the one from its origin down to it."""
    line, start = run.line, run.origin_step
    steps = [commit.step for commit in line]
    if run.origin_run is not None and start is not None:
        _line(made, [start, start], [heights.get(run.origin or "", lane), lane], figures.MUTED, width=1.4)
        steps.insert(0, start)
        if not line:
            # nothing committed yet: a short stub would claim steps, so a dot says where it will start
            _line(made, [start], [lane], color, width=3, mode="markers")
    if len(steps) > 1:
        _line(made, [min(steps), max(steps)], [lane, lane], color, width=3)


def _draw_part(made: Any, run: RunLineage, part: RolledBackPart, lane: float, below: float) -> None:
    """Adds what a rollback abandoned, as a dashed line below the run's."""
    start, end = part.target_step, part.left_step
    _line(made, [start, start, end], [lane, below, below], figures.MUTED, width=1.6, dash="4px,3px")
    made.add_trace(
        figures.graph_objects().Scatter(
            x=[end],
            y=[below],
            mode="markers",
            name=DECIDED.name,
            legendgroup=DECIDED.name,
            legendrank=LEGEND.index(DECIDED),
            showlegend=not any(trace.name == DECIDED.name for trace in made.data),
            marker={"symbol": DECIDED.symbol, "size": DECIDED.size, "color": figures.ALARM},
            hovertemplate="%{customdata}<extra></extra>",
            customdata=[_lines(f"{run.name}; {drawing.rollback(part)}")],
        )
    )


def _line(
    made: Any,
    x: list[int],
    y: list[float],
    color: str,
    *,
    width: float,
    dash: str = "solid",
    mode: str = "lines",
) -> None:
    made.add_trace(
        figures.graph_objects().Scatter(
            x=x,
            y=y,
            mode=mode,
            line={"color": color, "width": width, "dash": dash},
            marker={"color": color, "symbol": "circle-open", "size": 10, "line": {"width": 2}},
            hoverinfo="skip",
            showlegend=False,
        )
    )


def _by_kind(runs: Iterable[RunLineage]) -> dict[Kind, list[tuple[RunLineage, Commit]]]:
    found: dict[Kind, list[tuple[RunLineage, Commit]]] = {
        kind: [] for kind in (PRUNED, ABANDONED, SAVED, IMPORT, POST_MORTEM, ROLLBACK)
    }
    kinds = {"rollback": ROLLBACK, "exception": POST_MORTEM, "import": IMPORT, "save": SAVED}
    for run in runs:
        for commit in run.commits:
            kind = PRUNED if commit.pruned else kinds.get(commit.kind, SAVED)
            if commit.abandoned and kind is not PRUNED and kind is not ROLLBACK:
                kind = ABANDONED
            found[kind].append((run, commit))
    return found


def _mark(made: Any, kind: Kind, marks: list[tuple[Commit, float, str, RunLineage]]) -> None:
    if not marks:
        return
    colors = [figures.MUTED if commit.abandoned or kind is PRUNED else color for commit, _, color, _ in marks]
    made.add_trace(
        figures.graph_objects().Scatter(
            x=[commit.step for commit, *_ in marks],
            y=[height for _, height, *_ in marks],
            mode="markers",
            name=kind.name,
            legendrank=LEGEND.index(kind),
            marker={
                "symbol": kind.symbol,
                "size": kind.size,
                "color": "white" if kind is PRUNED else colors,
                "line": {"color": colors if kind is PRUNED else "white", "width": 1.2},
                "opacity": 1,
            },
            hovertemplate="%{customdata}<extra></extra>",
            customdata=[_hover(run, commit) for commit, _, _, run in marks],
        )
    )


def _label_end(made: Any, run: RunLineage, lane: float, metric: str | None) -> None:
    value = None if metric is None else run.metrics.get(metric)
    if value is not None and run.steps is not None:
        label = f"{figures.text(metric)} {value:,.6g}"
        end = max(commit.step for commit in run.commits if not commit.abandoned)
        made.add_annotation(x=end, y=lane, text=label, xanchor="left", xshift=10, showarrow=False)


def _name(run: RunLineage) -> str:
    changed = drawing.overrides(run).replace("  ", ", ")
    small = f'<br><span style="font-size:11px;color:{figures.MUTED}">{figures.text(changed)}</span>' if changed else ""
    return f"<b>{figures.text(run.name)}</b>{small}"


def _hover(run: RunLineage, commit: Commit) -> str:
    state = "; ".join(filter(None, ["pruned" if commit.pruned else "", "abandoned" if commit.abandoned else ""]))
    kind = "" if commit.kind == "save" else commit.kind
    facts = [
        f"{run.name} at {commit.step:,}",
        commit.id[: presentation.SHORT_ID],
        "; ".join(filter(None, [kind, state])),
        presentation.metrics(commit.metrics),
        "" if commit.pruned else f"{presentation.size(commit.size)} added",
    ]
    return _lines("; ".join(filter(None, facts)))


def _lines(text: str) -> str:
    first, *others = figures.text(text).split("; ")
    return "<br>".join([f"<b>{first}</b>", *others])
