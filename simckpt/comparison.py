"""How two checkpoints differ, leaf by leaf: by digest where equal, by value where not."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from simckpt import state
from simckpt.checkpoint import Checkpoint

if TYPE_CHECKING:
    from simckpt.storage import LeafRecord


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
        compared: the number of leaves compared, each component's structure counted as one.
        differences: what differs, empty if the two are identical bit for bit.
        exempt: paths that were not compared, because no two runs share them: wall-clock time that has passed, and
            random streams that the operating system seeded and nobody has drawn from.
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
    """Returns how two checkpoints differ; bits decide, so 0.0 and -0.0 differ and NaNs of equal payload do not.

    A component whose leaves all have equal digests is not read further.

    Raises:
        DamagedError: a component that has to be read does not match its digests.
    """
    left, right = a.leaves(), b.leaves()
    differences: list[LeafDifference] = []
    exempt: list[str] = []
    for component in dict.fromkeys([*a.components(), *b.components()]):
        sides = [_identities(leaves, component) for leaves in (left, right)]
        if not sides[0] or not sides[1]:
            differences.append(LeafDifference(component, "only in B" if not sides[0] else "only in A"))
            continue
        one = a.read([component])[component]
        exempt += [f"{component}/{path}" for path in state.outline(one)[1]]
        if sides[0] != sides[1]:
            differences += [
                LeafDifference(f"{component}/{each.path}".rstrip("/"), each.what, each.max_abs)
                for each in state.encoded_differences(one, b.read([component])[component])
            ]
    return Comparison(a, b, len(left.keys() | right.keys()), tuple(differences), tuple(exempt))


def fingerprint(checkpoint: Checkpoint) -> str:
    """Returns one digest, 32 hex digits, over all that `compare` compares: equal for identical checkpoints."""
    total = hashlib.blake2b(digest_size=16)
    for component, encoded in sorted(checkpoint.read().items()):
        total.update(f"{component}\n".encode())
        for line in state.outline(encoded)[0]:
            total.update(f"{line}\n".encode())
    return total.hexdigest()


def _identities(leaves: Mapping[str, LeafRecord], component: str) -> dict[str, tuple[Any, ...]]:
    return {
        path: (leaf.kind, leaf.dtype, leaf.shape, leaf.digest)
        for path, leaf in leaves.items()
        if leaf.component == component
    }
