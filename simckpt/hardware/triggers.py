"""What makes a ring keep what it holds. All but `recorder.trigger()` is looked for by the process that records.

So a trigger costs the loop nothing, and comes up to a part (a second) after its cause; what it keeps is the same.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from simckpt.errors import ConfigurationError
from simckpt.hardware.columns import Form, leaves_of

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
    """An exception or a number in a row that is not finite.

    It may leave `step` or `reset`, or else the block `with recorder:`, or end the program.

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


def checked_triggers(
    triggers: Any, *, forms: Mapping[str, Form], signals: Iterable[str], links: Mapping[str, tuple[str, ...]]
) -> tuple[Trigger, ...]:
    """Returns triggers, each of which can fire.

    Args:
        triggers: a sequence of them.
        forms: of "observation" and "action".
        signals: names of those that are recorded.
        links: {name: names of the values of its readings}.

    Raises:
        ConfigurationError: something else; or a value that is looked for is not recorded, as far as that is known.
    """
    if isinstance(triggers, OnError | OutOfRange | Watchdog | str) or not isinstance(triggers, Iterable):
        raise ConfigurationError(f"triggers= is a list of triggers, got {triggers!r}", keys=["triggers"])
    found = tuple(triggers)
    for trigger in found:
        trigger_to_json(trigger)
        if isinstance(trigger, OutOfRange):
            _check_range(trigger, forms, tuple(signals), links)
    return found


def _check_range(
    trigger: OutOfRange, forms: Mapping[str, Form], signals: tuple[str, ...], links: Mapping[str, tuple[str, ...]]
) -> None:
    known = ("observation", "action", "reward", "reading", *signals)
    if trigger.what not in known:
        near = difflib.get_close_matches(trigger.what, known, 1)
        hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(known)}"
        raise _never(trigger, f"nothing of the name {trigger.what!r} is recorded; {hint}")
    if trigger.what == "reading" and not links:
        raise _never(trigger, "the env has no link whose readings there are")
    if isinstance(trigger.index, str):
        values = [name for names in links.values() for name in names]
        if trigger.what != "reading" or trigger.index not in values:
            near = difflib.get_close_matches(trigger.index, values, 1)
            hint = f"did you mean {near[0]!r}?" if near else f"those of the readings are {', '.join(values) or 'none'}"
            raise _never(trigger, f"no value of a reading has the name {trigger.index!r}; {hint}")
    elif trigger.index is not None and trigger.what not in signals:
        if trigger.what == "reading":
            sizes = [len(names) for names in links.values()]
        elif trigger.what == "reward":
            sizes = [1]
        else:
            sizes = [math.prod(shape) for _, shape in leaves_of(forms[trigger.what])]
        _check_index(trigger, sizes)


def _check_index(trigger: OutOfRange, sizes: list[int]) -> None:
    largest = max(sizes, default=0)
    if not isinstance(trigger.index, int) or isinstance(trigger.index, bool):
        raise _never(trigger, f"index= is a whole number, got {trigger.index!r}")
    if not -largest <= trigger.index < largest:
        raise _never(trigger, f"{trigger.what} has {largest} values, and no index {trigger.index}")


def check_sizes(triggers: Iterable[Trigger], signals: Mapping[str, Any]) -> list[str]:
    """Returns a text about each trigger that looks for a value that a signal, of which there is one now, lacks."""
    found = []
    for trigger in triggers:
        if isinstance(trigger, OutOfRange) and trigger.what in signals and trigger.index is not None:
            try:
                _check_index(trigger, [np.asarray(signals[trigger.what]).size])
            except ConfigurationError as error:
                found.append(str(error))
    return found


def _never(trigger: OutOfRange, why: str) -> ConfigurationError:
    return ConfigurationError(f"OutOfRange({trigger.what!r}) can never fire: {why}", keys=["triggers"])


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
