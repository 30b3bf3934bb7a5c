"""How all figures look: colours, fonts, layout; and the door to plotly."""

from __future__ import annotations

import html
import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

from simckpt import presentation
from simckpt.errors import ConfigurationError

Array = np.ndarray[Any, Any]

# Okabe and Ito's colours, which people with colour blindness tell apart; without black and yellow
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
INK, MUTED, GRID, ALARM = "#222222", "#8A8F98", "#E6E8EB", "#B3261E"
FONT = "system-ui, -apple-system, Segoe UI, Roboto, Helvetica, Arial, sans-serif"


def graph_objects() -> Any:
    """Returns plotly's module of figures.

    Raises:
        ConfigurationError: plotly is not installed.
    """
    try:
        import plotly.graph_objects
    except ImportError as error:
        message = 'figures are drawn with plotly, which is not installed: pip install "simckpt[plots]"'
        raise ConfigurationError(message) from error
    return plotly.graph_objects


def figure(title: str, *, x: str = "", y: str = "", height: int = 420, note: str = "") -> Any:
    """Returns an empty figure.

    Args:
        title: at the top.
        x: title of the horizontal axis.
        y: title of the vertical one.
        height: [pixels].
        note: small print under the title.
    """
    axis = {"gridcolor": GRID, "zerolinecolor": GRID, "linecolor": MUTED, "automargin": True, "title_standoff": 12}
    made = graph_objects().Figure()
    made.update_layout(
        title={"text": text(title), "x": 0, "xref": "paper", "font_size": 17, "y": 1, "yref": "container"},
        # a title of two lines is set higher
        title_pad={"t": 32 if note else 18},
        font={"family": FONT, "color": INK, "size": 13},
        plot_bgcolor="white",
        paper_bgcolor="white",
        height=height,
        margin={"l": 20, "r": 24, "t": 80 if note else 54, "b": 44},
        hoverlabel={"bgcolor": "white", "font": {"family": FONT, "size": 12}, "align": "left"},
        legend={"orientation": "h", "x": 0, "y": -0.22, "yanchor": "top", "traceorder": "normal"},
        xaxis={**axis, "title": x},
        yaxis={**axis, "title": y},
    )
    if note:
        set_note(made, note)
    return made


def set_note(made: Any, note: str) -> None:
    """Sets the small print under the title of a figure that was made with some."""
    title = made.layout.title.text.partition("<br>")[0]
    made.layout.title.text = f'{title}<br><span style="font-size:12px;color:{MUTED}">{text(note)}</span>'


def explain(made: Any, name: str, symbol: str, color: str) -> None:
    """Adds an entry to the legend alone: that of a trace would show the symbol of its first point."""
    marker = {"color": color, "size": 9, "symbol": symbol}
    made.add_trace(graph_objects().Scatter(x=[None], y=[None], mode="markers", name=name, marker=marker))


def text(value: object) -> str:
    """Returns a text as plotly shows it literally: without its small HTML, and without control characters."""
    return html.escape(presentation.printable(str(value)), quote=False)


def color(place: int) -> str:
    """Returns the colour of the curve at a place; after six they come again."""
    return COLORS[place % len(COLORS)]


def faded(value: str, opacity: float) -> str:
    """Returns a colour such as "#0072B2" as one that lets through what lies below."""
    red, green, blue = (int(value[start : start + 2], 16) for start in (1, 3, 5))
    return f"rgba({red},{green},{blue},{opacity})"


def page(title: str, made: Sequence[Any]) -> str:
    """Returns figures, one below the other, as an HTML page that needs nothing else."""
    parts = [each.to_html(full_html=False, include_plotlyjs=place == 0) for place, each in enumerate(made)]
    style = f"body {{ font-family: {FONT}; margin: 24px auto; max-width: 1100px; color: {INK} }}"
    head = f'<meta charset="utf-8"><title>{text(title)}</title><style>{style}</style>'
    return f"<!DOCTYPE html><html><head>{head}</head><body>{''.join(parts)}</body></html>"


def thinned(x: Array, y: Array, most: int = 4000) -> tuple[Array, Array]:
    """Returns at most about `most` points of a curve, which looks as the whole one does: smallest and largest stay.

    Args:
        x: `(n,)`, in order.
        y: `(n,)`; NaN is a gap, and a gap stays.
        most: so many points, or a few more.
    """
    if len(x) <= most:
        return x, y
    parts = max(most // 4, 1)
    edges = np.linspace(0, len(x), parts + 1).astype(np.int64)
    kept = []
    for start, stop in itertools.pairwise(edges):
        part = y[start:stop]
        gaps = np.isnan(part)
        places = {0, stop - start - 1}
        if not gaps.all():
            places |= {int(np.nanargmin(part)), int(np.nanargmax(part))}
        if gaps.any():
            places.add(int(np.argmax(gaps)))
        kept += [start + place for place in sorted(places)]
    return x[kept], y[kept]
