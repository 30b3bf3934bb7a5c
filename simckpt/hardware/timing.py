"""Times of a session as figures want them: how long readings took, although the device's clock is another one."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]

_SECOND = 1_000_000_000  # [ns]
_RESTART = _SECOND  # a device's clock that falls by more than this was started anew [ns]


def seconds(times: Array, origin: int) -> Array:
    """Returns monotonic times [ns] as seconds after `origin`, float64."""
    # the difference first: a float64 holds no nanoseconds of a clock that has run for months
    return (times - origin) / _SECOND


def delays(received: Array, device_time: Array) -> Array:
    """Returns how much longer each reading was under way than the quickest ones, `(n,)` float64 [s], 0 or more.

    The clocks of the two sides start anywhere and drift apart. No reading arrives before it was sent, so the straight
    line that lies below all differences and closest to them is taken for the offset of the clocks (Moon, Skelly and
    Towsley, "Estimation and removal of clock skew from network delay measurements", 1999). What all readings have in
    common, the shortest way itself, cannot be seen from one side. A device whose clock falls back by more than a second
    was started anew, and has an offset of its own from there on.

    Args:
        received: when each reading arrived, this machine's clock [ns], `(n,)` int64.
        device_time: when it was sent, the device's clock [ns], `(n,)` int64.
    """
    found = np.zeros(len(received))
    starts = [0, *(np.flatnonzero(np.diff(device_time) < -_RESTART) + 1), len(received)]
    for start, stop in itertools.pairwise(starts):
        if stop > start:
            found[start:stop] = _above_line(received[start:stop], device_time[start:stop])
    return found


def _above_line(received: Array, device_time: Array) -> Array:
    """Returns how far the differences of two clocks lie above the closest line below them [s]."""
    x = seconds(device_time, int(device_time[0]))
    difference = received - device_time
    y = seconds(difference, int(difference[0]))
    order = np.lexsort((y, x))
    hull: list[tuple[float, float]] = []
    for point in zip(x[order].tolist(), y[order].tolist(), strict=True):
        # the lower hull, by Andrew's monotone chain; of equal times the smallest difference came first
        if hull and point[0] == hull[-1][0]:
            continue
        while len(hull) > 1 and _turns_right(hull[-2], hull[-1], point):
            hull.pop()
        hull.append(point)
    slope, place = 0.0, hull[0]
    if len(hull) > 1:
        # the sum of the distances to a line below all points is least for the edge below their mean
        corners = np.array([corner[0] for corner in hull])
        edge = min(max(int(np.searchsorted(corners, x.mean(), side="right")) - 1, 0), len(hull) - 2)
        (left, low), (right, high) = hull[edge : edge + 2]
        slope, place = (high - low) / (right - left), hull[edge]
    # rounding may leave the points of the edge itself a little below it
    return np.maximum(y - (place[1] + slope * (x - place[0])), 0.0)


def _turns_right(a: tuple[float, float], b: tuple[float, float], c: tuple[float, float]) -> bool:
    return (b[0] - a[0]) * (c[1] - a[1]) <= (b[1] - a[1]) * (c[0] - a[0])
