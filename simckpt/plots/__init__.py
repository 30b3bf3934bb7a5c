"""Figures for notebooks and reports, drawn with plotly; each function returns a `plotly.graph_objects.Figure`.

Needs `pip install "simckpt[plots]"`.
"""

from simckpt.plots.distances import distances
from simckpt.plots.lineage import lineage
from simckpt.plots.returns import returns
from simckpt.plots.sizes import checkpoint_sizes

__all__ = ["checkpoint_sizes", "distances", "lineage", "returns"]
