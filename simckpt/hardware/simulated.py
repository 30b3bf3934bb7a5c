"""A device that is a model in this process, in place of a transport."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np

from simckpt.errors import ConfigurationError
from simckpt.hardware.wire import Message

Model = Callable[[Any, int], Any]

_WAITING = 256  # readings


class Simulated:
    """A model in place of a device. Its time is its own and passes with the calls, not with the clock.

    One period passes at every send, and at every receive that may wait with nothing sent since the last one that
    might: so a loop that sends and then receives moves the device by one period a step, and a loop that only receives
    does so, too. The model is called once for each period. A loop with a simulated device is exactly repeatable; the
    model, whatever Python it consists of, is part of the state of the env that holds the link.

    Args:
        model: `model(command, time)` gets the command's values, `(n,)` float64, or None in a period without one, and
            the device's time [ns]; it returns the values of a reading, or None for no reading.
        period: of the device [s].
    """

    def __init__(self, model: Model, *, period: float = 0.002) -> None:
        if not callable(model):
            raise ConfigurationError(f"a model is called as model(command, time), got {model!r}", keys=["model"])
        if not 0 < period < 1e6:
            raise ConfigurationError(
                f"the period of a device is a positive time in seconds, got {period!r}", keys=["period"]
            )
        self.model = model
        self.period = round(period * 1e9)  # [ns]
        self.time = 0  # [ns]
        self._sequence = 0
        # of a loop that never receives the oldest are lost, as they would be in a socket
        self._readings: deque[tuple[int, int, np.ndarray[Any, Any]]] = deque(maxlen=_WAITING)
        self._sent = False

    @property
    def address(self) -> str:
        """What stands in place of an address."""
        return "simulated"

    def send(self, values: np.ndarray[Any, Any]) -> None:
        """Lets the model act on a command, for one period."""
        self._pass_period(values.copy())
        self._sent = True

    def receive(self, timeout: float) -> Message | None:
        """Returns the model's next reading, or None; a positive `timeout` lets a period pass, as the class says."""
        if timeout > 0:
            if not self._readings and not self._sent:
                self._pass_period(None)
            self._sent = False
        if not self._readings:
            return None
        sequence, when, values = self._readings.popleft()
        return Message(0, sequence, when, 0, values)

    def _pass_period(self, command: np.ndarray[Any, Any] | None) -> None:
        self.time += self.period
        reading = self.model(command, self.time)
        if reading is not None:
            self._readings.append((self._sequence, self.time, _numbers(reading)))
            self._sequence += 1


def _numbers(reading: Any) -> np.ndarray[Any, Any]:
    try:
        return np.array(reading, np.float64)
    except (TypeError, ValueError) as error:
        raise ConfigurationError(
            f"a model returns the numbers of a reading, or None, got {str(reading)[:80]!r}", keys=["model"]
        ) from error
