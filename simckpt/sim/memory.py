"""Which memory belongs to the simulations of an env, so that views into it are recognised."""

from __future__ import annotations

import bisect
from collections.abc import Mapping
from typing import Any

import numpy as np

from simckpt.sim.objects.arrays import address
from simckpt.sim.physics import Physics

Array = np.ndarray[Any, Any]


class SimulationMemory:
    """The address ranges of every array of some simulations and their models.

    Args:
        simulations: by name, "physics", "physics_2", ...
    """

    def __init__(self, simulations: Mapping[str, Physics]) -> None:
        self._fields: dict[tuple[str, str], Array] = {}
        spans = []
        for name, physics in simulations.items():
            for field, array in physics.memory():
                self._fields[name, field] = array
                spans.append((*np.lib.array_utils.byte_bounds(array), name, field))
        spans.sort()
        self._spans = spans
        self._starts = [span[0] for span in spans]

    def locate(self, array: Array) -> tuple[str, str, int] | None:
        """Returns `(physics name, field, offset [bytes])` if the array lies in a simulation's memory, else None."""
        start = address(array)
        index = bisect.bisect_right(self._starts, start) - 1
        if index < 0 or start >= self._spans[index][1]:
            return None
        low, _, name, field = self._spans[index]
        return name, field, start - low

    def field(self, physics: str, field: str) -> Array | None:
        """Returns the live array of a field, or None."""
        return self._fields.get((physics, field))
