"""Small components that tests save and restore."""

from typing import Any

import numpy as np


class Counter:
    """A component in the manner of a user's own: an array that is changed in place, and a number."""

    def __init__(self, size: int = 4) -> None:
        self.values = np.zeros(size)
        self.count = 0

    def advance(self) -> None:
        self.count += 1
        self.values += np.sqrt(self.count)

    def state_dict(self) -> dict[str, Any]:
        return {"values": self.values, "count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.values[...] = state["values"]
        self.count = state["count"]


class Fragile(Counter):
    """Fails halfway through the next restore once `broken` is set."""

    broken = False

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.values[...] = state["values"]
        if self.broken:
            self.broken = False
            raise RuntimeError("the light went out")
        self.count = state["count"]
