"""How two checkpoints differ, leaf by leaf: by digest where equal, by value where not."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from simckpt import presentation, state
from simckpt.checkpoint import Checkpoint
from simckpt.errors import FormatError, StoreError
from simckpt.storage import blocks, digests

if TYPE_CHECKING:
    from simckpt.storage import LeafRecord

SHOWN = 200  # differences in a notebook; `differences` has all of them
STRUCTURE = "_tree"  # the leaf that holds everything of a component which is no array (FORMAT.md)


@dataclass(frozen=True)
class HyperparameterDifference:
    """A hyperparameter that two checkpoints do not share.

    Attributes:
        name: of the hyperparameter; of one in nested dicts `optimizer.lr`.
        values: {"a": its value there, "b": its value there}, without the side that has no such hyperparameter.
    """

    name: str
    values: Mapping[str, Any]

    def text(self, side: str) -> str:
        """Returns the value of side "a" or "b" as a text."""
        return repr(self.values[side]) if side in self.values else "none of that name"


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

    @property
    def hyperparameters(self) -> tuple[HyperparameterDifference, ...]:
        """The hyperparameters in which the two differ, in value or type; read when asked for.

        Raises:
            DamagedError, FormatError: the record of a start cannot be trusted.
        """
        return tuple(_hyperparameter_differences(self.a.hyperparameters, self.b.hyperparameters))

    def as_json(self) -> dict[str, Any]:
        """Returns the result as plain values; "hyperparameters" is None where a record of a start is damaged."""
        try:
            changed = [{"name": each.name, **each.values} for each in self.hyperparameters]
        except StoreError:
            changed = None
        return {
            "identical": self.identical,
            "a": {"run": self.a.run, "id": self.a.id, "step": self.a.step},
            "b": {"run": self.b.run, "id": self.b.id, "step": self.b.step},
            "hyperparameters": changed,
            "compared": self.compared,
            "differences": [
                {"path": each.path, "what": each.what, "max_abs": each.max_abs} for each in self.differences
            ],
            "exempt": list(self.exempt),
        }

    def _repr_html_(self) -> str:
        return _html(self)


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


def _hyperparameter_differences(
    a: Mapping[str, Any], b: Mapping[str, Any], prefix: str = ""
) -> Iterator[HyperparameterDifference]:
    for name in dict.fromkeys([*a, *b]):
        values = {side: held[name] for side, held in (("a", a), ("b", b)) if name in held}
        if len(values) == 2 and all(isinstance(value, Mapping) for value in values.values()):
            yield from _hyperparameter_differences(a[name], b[name], f"{prefix}{name}.")
        # the text tells 1 from 1.0 and from True, and takes a NaN for another NaN
        elif len({repr(value) for value in values.values()}) != 1 or len(values) != 2:
            yield HyperparameterDifference(prefix + name, values)


@dataclass(frozen=True)
class LeafDistance:
    """How far apart one leaf is in two checkpoints.

    Attributes:
        path: of the leaf.
        component: that it belongs to.
        relative: the Euclidean norm of the difference over that of the leaf in A; 0 if they are equal, infinite if only
            that of A is 0; None where there is no distance: one of the two lacks the leaf, or has it in another shape
            or dtype, or it holds no numbers.
        max_abs: the largest absolute difference; None likewise.
    """

    path: str
    component: str
    relative: float | None
    max_abs: float | None


def distances(a: Checkpoint, b: Checkpoint, components: Collection[str] | None = None) -> list[LeafDistance]:
    """Returns the distance of every leaf, in the order of A; one leaf at a time is in memory.

    Args:
        a: the one that distances are relative to.
        b: the other.
        components: the names of those to look at; by default all.

    Raises:
        DamagedError: something that has to be read does not match its digest.
    """
    left, right = a.leaves(), b.leaves()
    found = []
    for path in dict.fromkeys([*left, *right]):
        one, other = left.get(path), right.get(path)
        leaf = one or other
        assert leaf is not None
        if leaf.kind == "structure" or (components is not None and leaf.component not in components):
            continue
        apart: tuple[float, float] | None = None
        if one is not None and other is not None:
            same = bool(one.digest) and (one.digest, one.dtype, one.shape) == (other.digest, other.dtype, other.shape)
            apart = (0.0, 0.0) if same else state.leaf_distance(a.leaf(path), b.leaf(path))
        found.append(LeafDistance(path, leaf.component, *(apart or (None, None))))
    return found


def fingerprint(checkpoint: Checkpoint, *, without: Collection[str] = ()) -> str:
    """Returns one digest, 32 hex digits, over all that `compare` compares: equal for identical checkpoints.

    Args:
        checkpoint: its structure is read, and those leaves that lie in several pieces, as replay buffers do.
        without: components that do not count.
    """
    total = hashlib.blake2b(digest_size=16)
    for component, leaves in sorted(_by_component(checkpoint).items()):
        if component in without:
            continue
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

    if STRUCTURE not in by_key:
        raise FormatError(f"checkpoint {checkpoint.id} has a component without structure: {next(iter(leaves))!r}")
    structure = checkpoint.leaf(by_key[STRUCTURE].path).data.tobytes()
    return state.outline(structure, identity)


def _html(result: Comparison) -> str:
    number = len(result.differences)
    differ = presentation.count(number, "place") + (" differs" if number == 1 else " differ")
    verdict = "identical" if result.identical else differ
    title = f"{verdict}: A {result.a!r}, B {result.b!r}, {result.compared:,} leaves compared"
    try:
        changed = [[each.name, each.text("a"), each.text("b")] for each in result.hyperparameters]
    except StoreError as error:
        changed = [["not compared", str(error), ""]]
    shown = [
        [each.path, each.what, "" if each.max_abs is None else f"{each.max_abs:.6g}"]
        for each in result.differences[:SHOWN]
    ]
    if len(result.differences) > SHOWN:
        shown.append([f"and {len(result.differences) - SHOWN:,} more places"])
    parts = [presentation.html_table(("hyperparameter", "A", "B"), changed)] if changed else []
    header = ("leaf", "how it differs", "at most apart") if shown else ()
    return presentation.html_table(header, shown, caption=title, numbers=(2,)) + "".join(parts)
