"""Where a replay differs from what was recorded: in which row first, in which leaf, by how much."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from simckpt import presentation
from simckpt.state import paths

Array = np.ndarray[Any, Any]

SHOWN = 20  # lines of a report


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
    """

    session: str
    rows: tuple[range, ...]
    snapshots: int
    differences: tuple[ReplayDifference, ...]
    skipped: tuple[range, ...] = ()

    @property
    def exact(self) -> bool:
        """Whether everything that was played repeats bit for bit."""
        return not self.differences

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
        lines += [f"  rows {each.start:,} to {each.stop - 1:,} could not be played" for each in self.skipped]
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
