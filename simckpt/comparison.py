"""How two checkpoints differ, leaf by leaf: by digest where equal, by value where not."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from simckpt import state
from simckpt.checkpoint import Checkpoint
from simckpt.state.summary import structure_values

if TYPE_CHECKING:
    from simckpt.storage import LeafRecord

STRUCTURE = "_tree"  # the leaf of each component that holds its containers and scalars (FORMAT.md)
WALL_CLOCK = "wall_clock"  # the kind of leaves that hold elapsed real time, which no two runs share


@dataclass(frozen=True)
class LeafDifference:
    """One leaf or scalar that differs.

    Attributes:
        path: where, such as `envs/physics/qpos`.
        description: how, for people.
        max_abs: the largest absolute difference, None where that has no meaning.
    """

    path: str
    description: str
    max_abs: float | None = None


@dataclass(frozen=True)
class Comparison:
    """The result of `compare`.

    Attributes:
        a: one checkpoint.
        b: the other.
        compared: the number of leaves compared.
        differences: what differs, empty if the two are identical bit for bit.
        exempt: leaves that hold wall-clock time, which differs between any two runs; they are not compared.
    """

    a: Checkpoint
    b: Checkpoint
    compared: int
    differences: tuple[LeafDifference, ...]
    exempt: tuple[str, ...]

    @property
    def identical(self) -> bool:
        """Whether every compared leaf has equal bits, dtype, shape and place."""
        return not self.differences

    def as_json(self) -> dict[str, Any]:
        """Returns the result as plain values."""
        return {
            "identical": self.identical,
            "a": {"run": self.a.run, "id": self.a.id, "step": self.a.step},
            "b": {"run": self.b.run, "id": self.b.id, "step": self.b.step},
            "compared": self.compared,
            "differences": [
                {"path": each.path, "description": each.description, "max_abs": each.max_abs}
                for each in self.differences
            ],
            "exempt": list(self.exempt),
        }


def compare(a: Checkpoint, b: Checkpoint) -> Comparison:
    """Returns how the leaves of two checkpoints differ; bits decide, so 0.0 and -0.0 differ and equal NaNs do not.

    Leaves with equal digests are not read. Wall-clock leaves are exempt and listed.

    Raises:
        DamagedError: a leaf that has to be read does not match its digest.
    """
    left, right = a.leaves(), b.leaves()
    paths = list(dict.fromkeys([*left, *right]))
    exempt = tuple(path for path in paths if any(WALL_CLOCK in side[path].kind for side in (left, right) if path in side))
    compared = [path for path in paths if path not in exempt]
    differences: list[LeafDifference] = []
    for path in compared:
        differences += _compare_leaf(a, b, path, left.get(path), right.get(path))
    return Comparison(a, b, len(compared), tuple(differences), exempt)


def fingerprint(checkpoint: Checkpoint) -> str:
    """Returns one digest, 32 hex digits, over all leaves but wall-clock ones: equal for identical checkpoints."""
    total = hashlib.blake2b(digest_size=16)
    for leaf in sorted(checkpoint.leaves().values(), key=lambda leaf: leaf.path):
        if WALL_CLOCK not in leaf.kind:
            total.update(f"{leaf.path} {leaf.kind} {leaf.dtype} {leaf.shape} {leaf.digest}\n".encode())
    return total.hexdigest()


def _compare_leaf(
    a: Checkpoint, b: Checkpoint, path: str, left: LeafRecord | None, right: LeafRecord | None
) -> list[LeafDifference]:
    if left is None or right is None:
        return [LeafDifference(path, "only in B" if left is None else "only in A")]
    types = [f"{leaf.kind} {leaf.dtype} {leaf.shape}" for leaf in (left, right)]
    is_structure = path.endswith("/" + STRUCTURE)
    if types[0] != types[1] and not is_structure:
        return [LeafDifference(path, f"{types[0]} in A, {types[1]} in B")]
    if left.digest == right.digest:
        return []
    if is_structure:
        component = path.split("/", 1)[0]
        return _compare_structure(component, a.read([component]), b.read([component]))
    return _compare_values(path, a.leaf(path), b.leaf(path))


def _compare_structure(
    component: str, left: dict[str, state.Encoded], right: dict[str, state.Encoded]
) -> list[LeafDifference]:
    values = [structure_values(side[component].structure) for side in (left, right)]
    found = []
    for path in dict.fromkeys([*values[0], *values[1]]):
        before, after = (side.get(path, "(absent)") for side in values)
        if before != after:
            distance = _scalar_distance(before, after)
            found.append(LeafDifference(f"{component}/{path}", f"{before} in A, {after} in B", distance))
    return found


def _scalar_distance(before: object, after: object) -> float | None:
    numbers = [value for value in (before, after) if isinstance(value, int | float) and not isinstance(value, bool)]
    return abs(float(numbers[0]) - float(numbers[1])) if len(numbers) == 2 else None


def _compare_values(path: str, left: state.Leaf, right: state.Leaf) -> list[LeafDifference]:
    a, b = left.data, right.data
    differing = a.reshape(-1).view(np.uint8).reshape(a.size, -1) != b.reshape(-1).view(np.uint8).reshape(a.size, -1)
    count = int(differing.any(axis=1).sum())
    if count == 0:
        return []
    description = f"{count:,} of {a.size:,} values differ"
    if a.dtype.kind not in "iufb" or left.dtype != a.dtype.name:
        return [LeafDifference(path, description)]
    with np.errstate(all="ignore"):
        distance = float(np.nanmax(np.abs(a.astype(np.float64) - b.astype(np.float64))))
    return [LeafDifference(path, f"{description}, by at most {distance:.6g}", distance)]
