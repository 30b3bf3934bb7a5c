"""A fixed rate for a loop that has to keep up with a device."""

from __future__ import annotations

import time

from simckpt.errors import ConfigurationError


class Pace:
    """Lets a loop go on once a tick. Part of an env, it is left alone by captures and restores: time is no state.

    Ticks stay on their grid: after a step that took too long the next one begins at once, and the ticks after it where
    they would have been; those that passed meanwhile are counted as missed.

    Args:
        rate: [ticks/s]; None for a loop that never waits.

    Attributes:
        missed: ticks that passed while the loop was busy, since `start`.
    """

    def __init__(self, rate: float | None = None) -> None:
        if rate is not None and not (isinstance(rate, int | float) and 0 < rate < 1e6):
            raise ConfigurationError(f"a rate is a positive number of steps per second, got {rate!r}", keys=["rate"])
        self.rate = rate
        self._period = 0 if rate is None else round(1e9 / rate)  # [ns]
        self.start()

    def start(self) -> None:
        """Begins anew: the next `wait` returns at once, and its time is a tick."""
        self._next: int | None = None
        self.missed = 0

    def wait(self) -> None:
        """Sleeps until the next tick; returns at once if it has passed."""
        if self.rate is None:
            return
        now = time.monotonic_ns()
        if self._next is None:
            self._next = now
        passed = (now - self._next) // self._period
        if passed > 0:
            self.missed += passed
            self._next += passed * self._period
        if self._next > now:
            time.sleep((self._next - now) / 1e9)
        self._next += self._period
