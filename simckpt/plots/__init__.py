"""Figures for notebooks and reports, drawn with plotly; each function returns a `plotly.graph_objects.Figure`.

Needs `pip install "simckpt[plots]"`.
"""

from simckpt.plots.distances import distances
from simckpt.plots.lineage import lineage
from simckpt.plots.returns import returns
from simckpt.plots.session import (
    commands_and_readings,
    contact_forces,
    delays,
    gap,
    step_times,
    time_series,
    what_if,
)
from simckpt.plots.sizes import checkpoint_sizes

__all__ = [
    "checkpoint_sizes",
    "commands_and_readings",
    "contact_forces",
    "delays",
    "distances",
    "gap",
    "lineage",
    "returns",
    "step_times",
    "time_series",
    "what_if",
]
