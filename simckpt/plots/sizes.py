"""What checkpoints weigh."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from simckpt import presentation
from simckpt.checkpoint import Checkpoint
from simckpt.plots import figures
from simckpt.run import Run
from simckpt.store import Store

PARTS = ("its own files", "segments: replay rows, large unchanged leaves")
TICKS = 12  # labels on the horizontal axis


def checkpoint_sizes(of: Run | Store) -> Any:
    """Returns a figure of the bytes that checkpoints added to the store when they were saved.

    Args:
        of: a run, to see each of its checkpoints; a store, to see each of its runs.

    Raises:
        DamagedError, FormatError: a record of the run cannot be trusted; those of a store are left out.
        ConfigurationError: plotly is not installed.
    """
    return _of_run(of) if isinstance(of, Run) else _of_store(of)


def _parts(checkpoints: Sequence[Checkpoint]) -> tuple[int, int]:
    """Returns the bytes of own files, and of the segments that came with them."""
    own = sum(min(checkpoint.nbytes, checkpoint.size) for checkpoint in checkpoints)
    return own, sum(checkpoint.size for checkpoint in checkpoints) - own


def _of_run(run: Run) -> Any:
    checkpoints = run.checkpoints(abandoned=True)
    on_line = {checkpoint.id for checkpoint in run.checkpoints()}
    total = sum(checkpoint.size for checkpoint in checkpoints)
    title = f"{run.name}: {presentation.count(len(checkpoints), 'checkpoint')}, {presentation.size(total)} added"
    off = len(checkpoints) - len(on_line)
    note = f"pale: {off} off the line of the head" if off else ""
    made = figures.figure(title, x="step [env steps], in the order of commits", y="bytes added", note=note, height=380)
    places = list(range(len(checkpoints)))
    for part, name in enumerate(PARTS):
        values = [_parts([checkpoint])[part] for checkpoint in checkpoints]
        if any(values) or part == 0:
            made.add_trace(
                figures.graph_objects().Bar(
                    x=places,
                    y=values,
                    name=name,
                    marker_color=figures.COLORS[part],
                    marker_opacity=[1.0 if each.id in on_line else 0.35 for each in checkpoints],
                    hovertemplate="%{customdata}<extra></extra>",
                    customdata=[
                        f"<b>step {each.step:,}</b> {each.id[: presentation.SHORT_ID]}<br>{presentation.size(value)} "
                        f"{name}<br>{presentation.size(each.size)} in all, kind {each.kind}"
                        for each, value in zip(checkpoints, values, strict=True)
                    ],
                )
            )
    shown = places[:: max(1, -(-len(places) // TICKS))]
    made.update_layout(barmode="stack", bargap=0.25, showlegend=True)
    made.update_xaxes(
        tickvals=shown, ticktext=[f"{checkpoints[place].step:,}" for place in shown], showgrid=False, zeroline=False
    )
    made.update_yaxes(tickformat="~s", ticksuffix="B")
    return made


def _of_store(store: Store) -> Any:
    contents = [each for each in store.contents() if each.checkpoints]
    weights = [_parts(each.checkpoints) for each in contents]
    total = presentation.size(sum(map(sum, weights)))
    title = f"{store.path.name}: {presentation.count(len(contents), 'run')}, {total} added"
    made = figures.figure(title, x="bytes added", height=150 + 34 * max(1, len(contents)))
    names = [figures.text(each.name) for each in contents]
    for part, name in enumerate(PARTS):
        values = [weight[part] for weight in weights]
        if any(values) or part == 0:
            made.add_trace(
                figures.graph_objects().Bar(
                    y=names,
                    x=values,
                    orientation="h",
                    name=name,
                    marker_color=figures.COLORS[part],
                    hovertemplate="%{customdata}<extra></extra>",
                    customdata=[
                        f"<b>{label}</b><br>{presentation.size(value)} {name}<br>"
                        f"{presentation.count(len(each.checkpoints), 'checkpoint')}"
                        for label, each, value in zip(names, contents, values, strict=True)
                    ],
                )
            )
    for label, weight in zip(names, weights, strict=True):
        made.add_annotation(
            x=sum(weight), y=label, text=f" {presentation.size(sum(weight))}", xanchor="left", showarrow=False
        )
    # the legend stands 70 pixels below what is drawn, whatever the height
    legend = -70 / (34 * max(1, len(contents)) + 30)
    made.update_layout(barmode="stack", bargap=0.35, showlegend=True, legend_y=legend)
    # room for the labels at the ends
    made.update_xaxes(tickformat="~s", ticksuffix="B", range=[0, 1.14 * max(map(sum, weights), default=1)])
    made.update_yaxes(autorange="reversed", showgrid=False, type="category")
    return made
