"""Figures of a session: how regular its steps were, and what became of commands and readings."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from simckpt.hardware.session import NOTHING, READING, needed

if TYPE_CHECKING:
    from simckpt.hardware.session import Session

Array = np.ndarray[Any, Any]


def summary(session: Session) -> dict[str, Any]:
    """Returns figures of a whole session.

    Returns:
        `rows`; `seconds`; `rate` [rows/s]; `step` and `period`, how long steps took and how far their beginnings lie
        apart, each `{"median", "p99", "p999", "longest"}` [s]; and `links`: for each `commands`, `readings`, `nothing`
        (looks that gave none), `lost` and `late` (by the readings' numbers), and `delay`, how much longer than the
        quickest a reading took, the same quantiles [s]: the clocks of device and recorder are not compared.
    """
    tables = session.read(["rows/started", "rows/finished", "commands", "readings"])
    started, finished = needed(tables.get("rows", {}), "started", "finished")
    periods = np.diff(started)
    names = dict.fromkeys([*tables.get("commands", {}), *tables.get("readings", {})])
    return {
        "rows": len(started),
        "seconds": session.duration,
        "rate": 1e9 / float(np.median(periods)) if len(periods) and np.median(periods) > 0 else 0.0,
        "step": _quantiles(finished - started),
        "period": _quantiles(periods),
        "links": {
            name: _link(tables.get("commands", {}).get(name, {}), tables.get("readings", {}).get(name, {}))
            for name in names
        },
    }


def _link(commands: dict[str, Array], readings: dict[str, Array]) -> dict[str, Any]:
    (sent,) = needed(commands, "row")
    kind, sequence, received, device_time, late = needed(
        readings, "kind", "sequence", "received", "device_time", "late"
    )
    came = kind == READING
    delays = received[came] - device_time[came]
    return {
        "commands": len(sent),
        "readings": int(came.sum()),
        "nothing": int((kind == NOTHING).sum()),
        "lost": _lost(sequence[came]),
        "late": int(late[came].sum()),
        "delay": _quantiles(delays - delays.min() if len(delays) else delays),
    }


def _lost(sequence: Array) -> int:
    """Returns how many numbers are missing between the first and the last; a device that starts anew loses none."""
    steps = np.diff(sequence.astype(np.int64))
    parts = np.split(sequence, np.flatnonzero(steps < -64) + 1)
    return int(sum(int(part.max()) - int(part.min()) + 1 - len(np.unique(part)) for part in parts if len(part)))


def _quantiles(durations: Array) -> dict[str, float]:
    """Returns quantiles of durations [ns], in seconds; zeros if there are none."""
    if not len(durations):
        return {"median": 0.0, "p99": 0.0, "p999": 0.0, "longest": 0.0}
    median, p99, p999, longest = np.quantile(durations, (0.5, 0.99, 0.999, 1.0)) / 1e9
    return {"median": float(median), "p99": float(p99), "p999": float(p999), "longest": float(longest)}
