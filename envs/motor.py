"""A motor on a test bench: the device of `cart_pole_in_the_loop.py`, as a model or in a process of its own."""

import math
from typing import Any

import numpy as np

LIMIT = 12.0  # [N]
LAG = 0.006  # of the force behind what is asked for [s]
FOLLOWING = 0.004  # of the bench's carriage behind the position that it is told [s]
NOISE = 0.0005  # of the encoder [m]
RIPPLE = 0.02  # of the force [N]
PATIENCE = 0.1  # without a command for so long, the motor lets go [s]


class Motor:
    """Delivers a force late and with ripple, and measures the position of its carriage with noise.

    It is called once a period, with the newest command or None: `motor(command, time) -> reading`. The command is the
    wanted force [N] and the position [m] that the bench is to take; the reading is the force that was delivered and the
    position by the encoder. What it does is a function of its calls alone.

    Args:
        seed: of its noise.
        loss: share of its readings that it leaves out.
    """

    command = ("force", "position")
    reading = ("force", "position")

    def __init__(self, seed: int = 0, *, loss: float = 0.0) -> None:
        self.loss = loss
        self.reset(seed)

    def reset(self, seed: int) -> None:
        """Stops the motor and starts its noise anew."""
        self.rng = np.random.default_rng(seed)
        self.force = 0.0
        self.position = 0.0
        self._wanted = (0.0, 0.0)
        self._time: int | None = None
        self._commanded = 0

    def __call__(self, command: Any, time: int) -> tuple[float, float] | None:
        """Moves on to `time` [ns]; returns the force [N] and the position [m] that are measured, or None."""
        seconds = 0.0 if self._time is None else (time - self._time) / 1e9
        self._time = time
        if command is not None:
            wanted, position = command
            self._wanted = (min(max(float(wanted), -LIMIT), LIMIT), float(position))
            self._commanded = time
        elif time - self._commanded > PATIENCE * 1e9:
            self._wanted = (0.0, self._wanted[1])
        self.force += (1.0 - math.exp(-seconds / LAG)) * (self._wanted[0] - self.force)
        self.position += (1.0 - math.exp(-seconds / FOLLOWING)) * (self._wanted[1] - self.position)
        ripple, noise = self.rng.normal(0.0, (RIPPLE, NOISE))
        if self.rng.random() < self.loss:
            return None
        return self.force + float(ripple), self.position + float(noise)
