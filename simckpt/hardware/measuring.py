"""What nobody recorded, measured in a replay: signals of the env after each row that is played."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import gymnasium as gym
import numpy as np

from simckpt.errors import ConfigurationError
from simckpt.hardware.link import devices_out_of_reach
from simckpt.hardware.session_tables import NUMBERS, Array, needed
from simckpt.hardware.time_series import Excerpt
from simckpt.state.tables import mapped

if TYPE_CHECKING:
    from simckpt.hardware.replay import Replay

Signals = Mapping[str, Callable[[gym.Env[Any, Any], Mapping[str, Any]], Any]]


def measured(replay: Replay, signals: Signals, start: int | None, stop: int | None) -> Excerpt:
    """Returns the tables of the rows that were played, with signals; see `Replay.measure`."""
    rows: list[int] = []
    found: dict[str, list[Array]] = {name: [] for name in signals}
    for row in replay.steps(start, stop):
        rows.append(row)
        for name, function in signals.items():
            with devices_out_of_reach():
                value = np.array(function(replay.env, replay.info))
            if value.dtype.kind not in NUMBERS or (found[name] and value.shape != found[name][0].shape):
                raise ConfigurationError(
                    f"the signal {name!r} is {str(value)[:80]} after row {row}: it must be numbers, of the same shape "
                    "each time",
                    keys=[name],
                )
            found[name].append(value)
    session = replay.session
    first, last = (rows[0], rows[-1] + 1) if rows else (0, 0)
    tables = session.read(start=first, stop=last)
    if rows:
        (numbers,) = needed(tables["rows"], "row")
        played = np.isin(numbers, rows)
        tables["rows"] = mapped(lambda column: column[played], tables["rows"])
        tables["rows"]["signals"] = {name: np.stack(values) for name, values in found.items()}
    return Excerpt(session.name, session.started, session.links, tables)
