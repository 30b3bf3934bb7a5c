"""Hardware in the loop: links to devices, sessions that record them, and replays without the device.

The names below load what they need when they are first used, not when `simckpt` is imported.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from simckpt.hardware.arrivals import Statistics
    from simckpt.hardware.contacts import contact_force
    from simckpt.hardware.differences import ReplayDifference, ReplayReport
    from simckpt.hardware.link import Link, Reading
    from simckpt.hardware.mcap_export import export_mcap
    from simckpt.hardware.minari_export import export_minari
    from simckpt.hardware.pace import Pace
    from simckpt.hardware.recorder import Recorder
    from simckpt.hardware.replay import Replay
    from simckpt.hardware.session import Event, Session
    from simckpt.hardware.simulated import Simulated
    from simckpt.hardware.time_series import Series, series
    from simckpt.hardware.transports import TCP, UDP, Serial, Transport
    from simckpt.hardware.triggers import OnError, OutOfRange, Watchdog
    from simckpt.hardware.video import export_video
    from simckpt.hardware.what_if import WhatIf, model_readings

_HOMES = {
    "Event": "session",
    "Link": "link",
    "OnError": "triggers",
    "OutOfRange": "triggers",
    "Pace": "pace",
    "Reading": "link",
    "Recorder": "recorder",
    "Replay": "replay",
    "ReplayDifference": "differences",
    "ReplayReport": "differences",
    "Serial": "transports",
    "Series": "time_series",
    "Session": "session",
    "Simulated": "simulated",
    "Statistics": "arrivals",
    "TCP": "transports",
    "Transport": "transports",
    "UDP": "transports",
    "Watchdog": "triggers",
    "WhatIf": "what_if",
    "contact_force": "contacts",
    "export_mcap": "mcap_export",
    "export_minari": "minari_export",
    "export_video": "video",
    "model_readings": "what_if",
    "series": "time_series",
}

__all__ = [
    "Event",
    "Link",
    "OnError",
    "OutOfRange",
    "Pace",
    "Reading",
    "Recorder",
    "Replay",
    "ReplayDifference",
    "ReplayReport",
    "Serial",
    "Series",
    "Session",
    "Simulated",
    "Statistics",
    "TCP",
    "Transport",
    "UDP",
    "Watchdog",
    "WhatIf",
    "contact_force",
    "export_mcap",
    "export_minari",
    "export_video",
    "model_readings",
    "series",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"simckpt.hardware.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
