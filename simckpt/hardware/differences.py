"""Where a replay differs from what was recorded: in which row first, in which leaf, by how much."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from simckpt import presentation
from simckpt.hardware.simulated import Simulated
from simckpt.sim.objects.instances import RESOURCE
from simckpt.state import paths
from simckpt.state.nodes import ObjectState

Array = np.ndarray[Any, Any]

SHOWN = 20  # lines of a report
# how the state of an env tells a link's model from its connection
_MODEL = f"{Simulated.__module__}.{Simulated.__qualname__}"


@dataclass(frozen=True)
class ReplayDifference:
    """One leaf that a replay did not repeat.

    Attributes:
        leaf: such as "observation", "reward", "command/motor", or "env/physics/qpos" of a snapshot.
        row: the first row in which it differs; of a snapshot, the row that came next.
        rows: how many times it differs.
        largest: the largest absolute difference of them all; None where nothing that differs is a number.
        at: the row of the largest one.
    """

    leaf: str
    row: int
    rows: int = 1
    largest: float | None = None
    at: int = -1

    def __str__(self) -> str:
        text = f"row {self.row:,}: {presentation.printable(self.leaf)}"
        if self.largest is not None:
            text += f" is {self.largest:.6g} apart" if self.rows == 1 else f" is up to {self.largest:.6g} apart"
        else:
            text += " is another"
        if self.rows == 1:
            return text
        text += f", in {self.rows:,} places"
        return text if self.largest is None or self.at == self.row else f"{text}, the most at row {self.at:,}"


@dataclass(frozen=True)
class ReplayReport:
    """What a replay has repeated, and where it has not.

    Attributes:
        session: its name.
        rows: the rows that were played, without gaps in each range.
        snapshots: how many later snapshots were compared with the full state, bit for bit.
        differences: in the order in which they appeared.
        skipped: rows that could not be played, because they, or the rows that lead to them, were not recorded.
        breaks: where the replay has left the record, and gone on from the next snapshot, and why: a text for each.
        unrepeatable: what no replay can repeat, such as when another thread had its readings: a text for each.
    """

    session: str
    rows: tuple[range, ...]
    snapshots: int
    differences: tuple[ReplayDifference, ...]
    skipped: tuple[range, ...] = ()
    breaks: tuple[str, ...] = ()
    unrepeatable: tuple[str, ...] = ()

    @property
    def exact(self) -> bool:
        """Whether everything that was played repeats bit for bit."""
        return not self.differences and not self.unrepeatable

    @property
    def first(self) -> ReplayDifference | None:
        """The first difference, or None."""
        return self.differences[0] if self.differences else None

    def __str__(self) -> str:
        count = presentation.count(sum(map(len, self.rows)), "row")
        compared = presentation.count(self.snapshots, "later snapshot")
        lines = [f"{'exact' if self.exact else 'NOT exact'}: {count} and {compared} of session {self.session!r}"]
        lines += [f"  {difference}" for difference in self.differences[:SHOWN]]
        if len(self.differences) > SHOWN:
            lines.append(f"  and {len(self.differences) - SHOWN} more leaves")
        lines += [f"  no replay repeats {presentation.printable(each)}" for each in self.unrepeatable[:SHOWN]]
        lines += [f"  rows {each.start:,} to {each.stop - 1:,} could not be played" for each in self.skipped]
        lines += [f"  gone on from a snapshot after {presentation.printable(each)}" for each in self.breaks[:SHOWN]]
        if len(self.breaks) > SHOWN:
            lines.append(f"  and after {len(self.breaks) - SHOWN} more such events")
        return "\n".join(lines)


class Differences:
    """Collects differences, one for each leaf: memory stays bounded however many rows differ."""

    def __init__(self) -> None:
        self._found: dict[str, ReplayDifference] = {}

    def note(self, row: int, leaf: str, far: float | None) -> None:
        """Adds a difference of a leaf; `far` is how far apart at most, None where that is no number."""
        known = self._found.get(leaf)
        if known is None:
            self._found[leaf] = ReplayDifference(leaf, row, 1, far, row)
            return
        known = replace(known, rows=known.rows + 1)
        if far is not None and (known.largest is None or math.isnan(far) or far > known.largest):
            known = replace(known, largest=far, at=row)
        self._found[leaf] = known

    def all(self) -> tuple[ReplayDifference, ...]:
        """Returns the differences in the order in which they appeared."""
        return tuple(self._found.values())


def compare(recorded: Any, now: Any, leaf: str, note: Callable[[str, float | None], None]) -> None:
    """Compares nested dicts and tuples of arrays bit for bit, and notes the leaves that differ.

    Args:
        recorded: a tree; its arrays say which dtypes numbers of Python have.
        now: another one.
        leaf: the path of the root.
        note: is told of each difference.
    """
    if isinstance(recorded, Mapping):
        if not isinstance(now, Mapping) or set(recorded) != set(now):
            note(leaf, None)
            return
        for key, part in recorded.items():
            compare(part, now[key], paths.join(leaf, paths.path_part(str(key))), note)
        return
    if isinstance(recorded, tuple):
        if not isinstance(now, tuple | list) or len(recorded) != len(now):
            note(leaf, None)
            return
        for place, part in enumerate(recorded):
            compare(part, now[place], f"{leaf}/{place}", note)
        return
    recorded, now = np.asarray(recorded), np.asarray(now)
    if not same_bits(recorded, now):
        note(leaf, distance(recorded, now))


def same_bits(a: Array, b: Array) -> bool:
    """Returns whether two arrays have the same dtype, shape and bits."""
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


def distance(a: Array, b: Array) -> float | None:
    """Returns the largest absolute difference of two arrays; None if they have no such, NaN if one of two is NaN."""
    if a.shape != b.shape or a.dtype.kind not in "iuf" or b.dtype.kind not in "iuf":
        return None
    with np.errstate(all="ignore"):
        first, second = a.astype(np.longdouble), b.astype(np.longdouble)
        same = (first == second) | (np.isnan(first) & np.isnan(second))
        return float(np.max(np.where(same, 0, np.abs(first - second)), initial=0))


def without_models(now: Any, recorded: Any) -> Any:
    """Returns the state of an env with each model in place of a device as the connection that was recorded there.

    Args:
        now: the state, which is changed in place.
        recorded: one of the same env, with or without its device.
    """
    waiting, seen = [(now, recorded)], set()
    while waiting:
        one, other = waiting.pop()
        if id(one) in seen or type(one) is not type(other):
            continue
        seen.add(id(one))
        if isinstance(one, ObjectState):
            waiting += [(one.attributes, other.attributes), (one.items, other.items)]
        elif isinstance(one, dict):
            for key in one.keys() & other.keys():
                if _is_of(one[key], _MODEL) and _is_of(other[key], RESOURCE):
                    one[key] = other[key]
                else:
                    waiting.append((one[key], other[key]))
        elif isinstance(one, list | tuple):
            waiting += zip(one, other, strict=False)
    return now


def _is_of(node: Any, type_name: str) -> bool:
    return isinstance(node, ObjectState) and node.type_name == type_name
