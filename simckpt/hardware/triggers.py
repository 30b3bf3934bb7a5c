"""What makes a ring keep what it holds. All but `recorder.trigger()` is looked for by the process that records.

So a trigger costs the loop nothing, and comes up to a part (a second) after its cause; what it keeps is the same.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from simckpt.errors import ConfigurationError

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Found:
    """A cause.

    Attributes:
        row: in which it was found.
        monotonic: when [ns, the recorder's clock].
        reason: for people.
    """

    row: int
    monotonic: int
    reason: str


@dataclass(frozen=True)
class OnError:
    """An exception that leaves `step` or `reset`, or a number in a row that is not finite.

    Args:
        finite: whether numbers that are not finite count.
    """

    finite: bool = True

    def find(self, tables: Mapping[str, Any]) -> Found | None:
        """Returns the first row with a number that is not finite."""
        if not self.finite:
            return None
        rows = tables["rows"]
        first: tuple[int, str] | None = None
        for path, column in _arrays(rows):
            if column.dtype.kind == "f" and len(column):
                wrong = ~np.isfinite(column.reshape(len(column), -1)).all(axis=1)
                if wrong.any() and (first is None or int(wrong.argmax()) < first[0]):
                    first = int(wrong.argmax()), path
        if first is None:
            return None
        place, path = first
        return Found(int(rows["row"][place]), int(rows["finished"][place]), f"{path} is not finite")


@dataclass(frozen=True)
class OutOfRange:
    """A value that leaves a range.

    Args:
        what: "observation", "action", "reward", the name of a signal, or "reading" for those of all links.
        index: which of its values, in the order of the flattened array; of readings also the name of one; all if None.
        low: smaller ones are out of range.
        high: larger ones are.

    Raises:
        ConfigurationError: there is nothing between the limits.
    """

    what: str
    index: int | str | None = None
    low: float = -math.inf
    high: float = math.inf

    def __post_init__(self) -> None:
        if not self.low <= self.high or (self.low, self.high) == (-math.inf, math.inf):
            raise ConfigurationError(
                f"OutOfRange({self.what!r}) needs low= or high=, the smaller one first: got {self.low} to {self.high}",
                keys=["low", "high"],
            )

    def find(self, tables: Mapping[str, Any], names: Mapping[str, tuple[str, ...]] | None = None) -> Found | None:
        """Returns the first entry that is out of range.

        Args:
            tables: of one part.
            names: {link: names of the values of its readings}.
        """
        found: list[Found] = []
        for path, column, table, when in self._columns(tables, names or {}):
            flat = column.reshape(len(column), -1) if len(column) else np.empty((0, 1))
            if isinstance(self.index, int):
                flat = flat[:, self.index : self.index + 1 or None]
            wrong = ((flat < self.low) | (flat > self.high)).any(axis=1)
            if wrong.any():
                place = int(wrong.argmax())
                values = flat[place]
                value = values[(values < self.low) | (values > self.high)][0]
                limits = f"{self.low:g} to {self.high:g}"
                reason = f"{path} was {float(value):g}, out of {limits}"
                found.append(Found(int(table["row"][place]), int(table[when][place]), reason))
        return min(found, key=lambda each: each.monotonic, default=None)

    def _columns(
        self, tables: Mapping[str, Any], names: Mapping[str, tuple[str, ...]]
    ) -> Iterator[tuple[str, Array, Mapping[str, Any], str]]:
        if self.what == "reading":
            for link, table in tables.get("readings", {}).items():
                values = table["values"]
                if isinstance(self.index, str):
                    if self.index not in names.get(link, ()):
                        continue
                    values = values[:, names[link].index(self.index)]
                yield f"the reading {self.index if isinstance(self.index, str) else link}", values, table, "received"
            return
        rows = tables["rows"]
        columns = rows.get(self.what, rows.get("signals", {}).get(self.what))
        for path, column in _arrays(columns, self.what) if columns is not None else ():
            yield path, column, rows, "finished"


@dataclass(frozen=True)
class Watchdog:
    """No step for so long, once there was one: a loop that hangs, or was stopped.

    The process that records watches, so that a loop that hangs in a library is noticed as well.

    Args:
        seconds: how long [s].

    Raises:
        ConfigurationError: that is no positive number.
    """

    seconds: float

    def __post_init__(self) -> None:
        if not 0 < self.seconds < math.inf:
            raise ConfigurationError(f"Watchdog needs a number of seconds, got {self.seconds}", keys=["seconds"])


Trigger = OnError | OutOfRange | Watchdog
_KINDS = {"OnError": OnError, "OutOfRange": OutOfRange, "Watchdog": Watchdog}


def trigger_to_json(trigger: Trigger) -> dict[str, Any]:
    """Returns a trigger as JSON; raises ConfigurationError for anything else."""
    if not isinstance(trigger, OnError | OutOfRange | Watchdog):
        raise ConfigurationError(
            f"a trigger is one of {', '.join(_KINDS)}, got {trigger!r}; for causes of your own call recorder.trigger()",
            keys=["triggers"],
        )
    return {"kind": type(trigger).__name__, **vars(trigger)}


def trigger_from_json(content: Mapping[str, Any]) -> Trigger:
    """Returns what `trigger_to_json` was given."""
    found: Trigger = _KINDS[content["kind"]](**{key: value for key, value in content.items() if key != "kind"})
    return found


def _arrays(columns: Any, path: str = "") -> Iterator[tuple[str, Array]]:
    if isinstance(columns, Mapping):
        for key, value in columns.items():
            yield from _arrays(value, f"{path}/{key}" if path else str(key))
    elif isinstance(columns, tuple):
        for number, value in enumerate(columns):
            yield from _arrays(value, f"{path}/{number}")
    else:
        yield path, columns
