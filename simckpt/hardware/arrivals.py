"""What has become of the messages of a device, from their sequence numbers: lost, late, twice."""

from __future__ import annotations

import enum
from dataclasses import dataclass

_WINDOW = 64  # messages: one that is further behind shows that the device has started anew
_MODULUS = 2**64


@dataclass
class Statistics:
    """What a link has counted since it was made. No state: a restore leaves it.

    Attributes:
        sent: commands handed to the system.
        dropped: commands that the system did not take: its buffers were full, or the connection was gone.
        received: readings that arrived whole, each once.
        lost: readings that have not arrived, to judge by their numbers.
        late: readings that arrived after one of a higher number; not in `lost`.
        repeated: readings that arrived once more, and were passed over.
        damaged: datagrams that are no message of this link; of a stream, bytes.
        restarts: how often the device has started to count anew.
    """

    sent: int = 0
    dropped: int = 0
    received: int = 0
    lost: int = 0
    late: int = 0
    repeated: int = 0
    damaged: int = 0
    restarts: int = 0


class Place(enum.Enum):
    """Where a message belongs among those that came before it."""

    NEXT = "next"
    LATE = "late"
    REPEATED = "repeated"


class Arrivals:
    """Follows the sequence numbers of one sender.

    Args:
        statistics: what to count in.
    """

    def __init__(self, statistics: Statistics) -> None:
        self._statistics = statistics
        self._stream: int | None = None
        self._first = 0
        self._highest = 0
        # bit i: whether the message i before the highest has arrived
        self._seen = 1

    def place(self, stream: int, sequence: int) -> Place:
        """Counts a message, and returns where it belongs."""
        counted = self._statistics
        ahead = (sequence - self._highest) % _MODULUS
        behind = _MODULUS - ahead
        if stream != self._stream or _WINDOW <= behind <= _MODULUS // 2:
            # whether a first message had others before it is unknown
            counted.restarts += self._stream is not None
            self._stream, self._first, self._highest, self._seen = stream, sequence, sequence, 1
        elif 0 < ahead < _MODULUS // 2:
            counted.lost += ahead - 1
            self._seen = (self._seen << min(ahead, _WINDOW) | 1) % 2**_WINDOW
            self._highest = sequence
        else:
            bit = 1 << (behind % _MODULUS)
            if self._seen & bit:
                counted.repeated += 1
                return Place.REPEATED
            self._seen |= bit
            counted.received += 1
            counted.late += 1
            # what was overtaken by the very first message was never taken for lost
            counted.lost -= (sequence - self._first) % _MODULUS < _MODULUS // 2
            return Place.LATE
        counted.received += 1
        return Place.NEXT
