"""How far apart two checkpoints are, leaf by leaf."""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection
from typing import Any

from simckpt import comparison, state
from simckpt.checkpoint import Checkpoint
from simckpt.comparison import LeafDistance
from simckpt.decisions import DECISIONS
from simckpt.plots import figures

LONGEST = 60  # characters of a path on the axis
SYMBOLS = {"circle-open": "zero in the first: absolute distance", "x": "NaN or infinite in one of them"}


def distances(a: Checkpoint, b: Checkpoint, *, components: Collection[str] | None = None, most: int = 40) -> Any:
    """Returns a figure of the leaves in which two checkpoints differ: relative distance, on a logarithmic scale.

    The distance is the Euclidean norm of the difference over that of the leaf in `a`. An open dot is the largest
    absolute difference, of a leaf that is zero in `a`; a cross stands for NaNs or infinities in one of the two. What
    comparisons exempt, such as time that has passed, is left out.

    Args:
        a: a checkpoint.
        b: another one, of any run or store.
        components: the names of those to look at; by default all but "checkpointer", what policies remember. Of a large
            replay buffer every row is read.
        most: so many leaves at most, those farthest apart.

    Raises:
        DamagedError: a leaf cannot be trusted.
        ConfigurationError: plotly is not installed.
    """
    figures.graph_objects()
    looked_at = {*a.components(), *b.components()} - {DECISIONS} if components is None else components
    exempt = _exempt(a, looked_at) | _exempt(b, looked_at)
    found = [each for each in comparison.distances(a, b, looked_at) if exempt.isdisjoint(_above(each.path))]
    apart = [each for each in found if each.relative not in (None, 0.0)]
    order = {name: place for place, name in enumerate(dict.fromkeys(each.component for each in found))}
    shown = sorted(apart, key=_distance, reverse=True)[:most]
    largest = max((each for each in map(_distance, shown) if math.isfinite(each)), default=1.0)
    shown.sort(key=lambda each: (order[each.component], -_distance(each)))
    made = figures.figure(
        f"{_named(a)} (the first) and {_named(b)}",
        x="distance relative to the first",
        height=165 + 20 * max(3, len(shown)),
        note=_note(found, apart, shown),
    )
    for name, place in order.items():
        bars = [each for each in shown if each.component == name]
        if bars:
            _dots(made, bars, figures.color(place), largest)
            figures.explain(made, figures.text(name), "circle", figures.color(place))
    for symbol in ("circle-open", "x"):
        if symbol in map(_symbol, shown):
            figures.explain(made, SYMBOLS[symbol], symbol, figures.MUTED)
    places = [min(_distance(each), largest) for each in shown]
    low, high = (math.log10(edge(places, default=1.0)) for edge in (min, max))
    decades = [math.floor(low - 0.1), math.ceil(high + 0.1)]
    made.update_xaxes(type="log", exponentformat="power", side="top", title_standoff=4, range=decades, dtick=1)
    # dots, for the length of a bar has no meaning on a logarithmic scale
    made.update_yaxes(autorange="reversed", showgrid=True, type="category", tickfont_size=11)
    made.update_layout(legend={"y": -0.02}, margin_t=110, showlegend=True)
    return made


def _exempt(checkpoint: Checkpoint, components: Collection[str]) -> set[str]:
    """Returns the paths of what no two runs share, as in `comparison.Comparison.exempt`."""
    return {
        f"{leaf.component}/{exempt}"
        for path, leaf in checkpoint.leaves().items()
        if leaf.kind == "structure" and leaf.component in components
        for exempt in state.outline(checkpoint.leaf(path).data.tobytes(), lambda key: "")[1]
    }


def _above(path: str) -> list[str]:
    """Returns a path and those of everything that it lies in."""
    return list(itertools.accumulate(path.split("/"), "{}/{}".format))


def _dots(made: Any, leaves: list[LeafDistance], color: str, largest: float) -> None:
    made.add_trace(
        figures.graph_objects().Scatter(
            y=[_label(each.path) for each in leaves],
            x=[min(_distance(each), largest) for each in leaves],
            mode="markers",
            showlegend=False,
            marker={"color": color, "size": 9, "opacity": 1, "symbol": [_symbol(each) for each in leaves]},
            hovertemplate="%{customdata}<extra></extra>",
            customdata=[
                f"<b>{figures.text(each.path)}</b><br>relative {each.relative:.4g}<br>at most {each.max_abs:.4g} apart"
                for each in leaves
            ],
        )
    )


def _distance(each: LeafDistance) -> float:
    """Returns the relative distance; the absolute one where the leaf is zero in A; infinity for what is no number."""
    distance = each.max_abs if each.relative is None or math.isinf(each.relative) else each.relative
    return distance if distance is not None and math.isfinite(distance) else math.inf


def _symbol(each: LeafDistance) -> str:
    if math.isinf(_distance(each)):
        return "x"
    return "circle-open" if each.relative is not None and math.isinf(each.relative) else "circle"


def _label(path: str) -> str:
    short = path if len(path) <= LONGEST else f"…{path[1 - LONGEST :]}"
    return figures.text(short)


def _named(checkpoint: Checkpoint) -> str:
    return f"{checkpoint.run} at {checkpoint.step:,}"


def _note(found: list[LeafDistance], apart: list[LeafDistance], shown: list[LeafDistance]) -> str:
    equal = sum(each.relative == 0 for each in found)
    unknown = sum(each.relative is None for each in found)
    counts = [f"different: {len(apart):,}", f"equal: {equal:,}"]
    counts += [f"without a distance: {unknown:,}"] if unknown else []
    counts += [f"shown: the {len(shown)} farthest apart"] if len(shown) < len(apart) else []
    return ", ".join(counts)
