"""Figures of a session: how regular its steps were, and what became of commands and readings."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from simckpt.hardware import timing
from simckpt.hardware.arrivals import Arrivals, Statistics
from simckpt.hardware.session import NOTHING, READING
from simckpt.hardware.session_tables import Array, needed
from simckpt.storage import names

if TYPE_CHECKING:
    from simckpt.hardware.session import Session


def summary(session: Session) -> dict[str, Any]:
    """Returns figures of a whole session.

    Returns:
        `rows`; `seconds`; `rate` [rows/s]; `step` and `period`, how long steps took and how far their beginnings lie
        apart, each `{"median", "p99", "p999", "longest"}` [s]; and `links`: for each `commands`, `readings`, `nothing`
        (looks that gave none), `lost`, `late`, and `delay`, how much longer than the quickest a reading took, as
        `timing.delays` has it, the same quantiles [s]. `lost` are the numbers that are missing among those of the
        readings, counted as a link counts them, but for one thing: which start of the device a reading is of is not
        recorded, so that one that starts anew with a number much higher than its last lost all between.
    """
    started, finished = needed(session.read(["rows/started", "rows/finished"]).get("rows"), "started", "finished")
    periods = np.diff(started)
    return {
        "rows": len(started),
        "seconds": session.duration,
        "rate": 1e9 / float(np.median(periods)) if len(periods) and np.median(periods) > 0 else 0.0,
        "step": _quantiles((finished - started) / 1e9),
        "period": _quantiles(periods / 1e9),
        "links": {link.name: _link(session, link.name) for link in session.links},
    }


def _link(session: Session, name: str) -> dict[str, Any]:
    (sent,) = _columns(session, "commands", name, "row")
    kind, sequence, received, device_time, late = _columns(
        session, "readings", name, "kind", "sequence", "received", "device_time", "late"
    )
    came = kind == READING
    return {
        "commands": len(sent),
        "readings": int(came.sum()),
        "nothing": int((kind == NOTHING).sum()),
        "lost": _lost(sequence[came]),
        "late": int(late[came].sum()),
        "delay": _quantiles(timing.delays(received[came], device_time[came])),
    }


def _columns(session: Session, group: str, link: str, *columns: str) -> list[Array]:
    """Returns some columns of a link's table, which not every part has."""
    wanted = [f"{group}/{names.encode_part(link)}/{column}" for column in columns]
    found = [
        needed(tables[group][link], *columns) for tables in session.chunks(wanted) if link in tables.get(group, {})
    ]
    return [np.concatenate(each) for each in zip(*found, strict=True)] if found else needed(None, *columns)


def _lost(sequence: Array) -> int:
    counted = Statistics()
    arrivals = Arrivals(counted)
    for each in sequence.tolist():
        arrivals.place(0, each)
    return counted.lost


def _quantiles(durations: Array) -> dict[str, float]:
    """Returns quantiles of durations [s]; zeros if there are none."""
    if not len(durations):
        return {"median": 0.0, "p99": 0.0, "p999": 0.0, "longest": 0.0}
    median, p99, p999, longest = np.quantile(durations, (0.5, 0.99, 0.999, 1.0))
    return {"median": float(median), "p99": float(p99), "p999": float(p999), "longest": float(longest)}
