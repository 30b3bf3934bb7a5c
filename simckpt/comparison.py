"""How two checkpoints differ, leaf by leaf: by digest where equal, by value where not."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from simckpt import state
from simckpt.checkpoint import Checkpoint
from simckpt.storage import blocks, digests

if TYPE_CHECKING:
    from simckpt.storage import LeafRecord

STRUCTURE = "_tree"  # the leaf that holds everything of a component which is no array (FORMAT.md)


@dataclass(frozen=True)
class Comparison:
    """The result of `compare`.

    Attributes:
        a: one checkpoint.
        b: the other.
        compared: the number of leaves compared, each component's structure counted as one.
        differences: what differs, empty if the two are identical bit for bit.
        exempt: paths that were not compared, because no two runs share them: time that has passed, and random streams
            that the operating system seeded and nobody has drawn from.
    """

    a: Checkpoint
    b: Checkpoint
    compared: int
    differences: tuple[state.Difference, ...]
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
                {"path": each.path, "what": each.what, "max_abs": each.max_abs} for each in self.differences
            ],
            "exempt": list(self.exempt),
        }


def compare(a: Checkpoint, b: Checkpoint) -> Comparison:
    """Returns how two checkpoints differ; bits decide, so 0.0 and -0.0 differ and NaNs of equal payload do not.

    Of components whose leaves all have equal digests only the structure is read.

    Raises:
        DamagedError: something that has to be read does not match its digest.
    """
    left, right = _by_component(a), _by_component(b)
    differences: list[state.Difference] = []
    exempt: dict[str, None] = {}
    for component in dict.fromkeys([*left, *right]):
        if component not in left or component not in right:
            differences.append(state.Difference(component, "only in B" if component not in left else "only in A"))
            continue
        outlines = [_outline(a, left[component]), _outline(b, right[component])]
        exempt |= dict.fromkeys(f"{component}/{path}" for outline in outlines for path in outline[1])
        if outlines[0][0] != outlines[1][0]:
            encoded = [checkpoint.read([component])[component] for checkpoint in (a, b)]
            differences += [
                replace(each, path=f"{component}/{each.path}".rstrip("/"))
                for each in state.encoded_differences(*encoded)
            ]
    compared = len({path for side in (left, right) for leaves in side.values() for path in leaves})
    return Comparison(a, b, compared, tuple(differences), tuple(exempt))


def fingerprint(checkpoint: Checkpoint) -> str:
    """Returns one digest, 32 hex digits, over all that `compare` compares: equal for identical checkpoints."""
    total = hashlib.blake2b(digest_size=16)
    for component, leaves in sorted(_by_component(checkpoint).items()):
        total.update(f"{component}\n".encode())
        for line in _outline(checkpoint, leaves)[0]:
            total.update(f"{line}\n".encode())
    return total.hexdigest()


def _by_component(checkpoint: Checkpoint) -> dict[str, dict[str, LeafRecord]]:
    found: dict[str, dict[str, LeafRecord]] = {}
    for path, leaf in checkpoint.leaves().items():
        found.setdefault(leaf.component, {})[path] = leaf
    return found


def _outline(checkpoint: Checkpoint, leaves: Mapping[str, LeafRecord]) -> tuple[list[str], list[str]]:
    by_key = {leaf.key: leaf for leaf in leaves.values()}

    def identity(key: str) -> str:
        leaf = by_key[key]
        # equal rows may lie in other pieces: then only their bytes tell
        digest = leaf.digest or digests.digest(blocks.flat(checkpoint.leaf(leaf.path).data))
        return f"{leaf.kind} {leaf.dtype} {leaf.shape} {digest}"

    structure = checkpoint.leaf(by_key[STRUCTURE].path).data.tobytes()
    return state.outline(structure, identity)
