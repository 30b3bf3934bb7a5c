"""Where two state trees differ, to the last bit."""

from __future__ import annotations

import hashlib
import json
import math
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from simckpt.errors import FormatError
from simckpt.state import arrays, atoms, paths
from simckpt.state.leaf import Leaf, PartLeaf
from simckpt.state.nodes import INCOMPARABLE
from simckpt.state.tree import Encoded, encode

_LONGEST_KEY = 1000  # [characters] of the text of a key
_MAPPINGS = frozenset({"dict", "OrderedDict", "Counter", "defaultdict", "dataclass", "object"})


@dataclass(frozen=True, slots=True)
class Difference:
    """One place where two state trees differ.

    Attributes:
        path: the place, spelled as the paths of leaves are.
        what: what differs there.
        max_abs: the largest absolute difference, where both are numbers of one shape; NaN if only one of two is NaN.
        aliasing: the values may be equal, but what is one object in one tree is two in the other.
    """

    path: str
    what: str
    max_abs: float | None = None
    aliasing: bool = False

    def __str__(self) -> str:
        far = "" if self.max_abs is None else f" (at most {self.max_abs:.6g} apart)"
        return f"{self.path or 'the root'}: {self.what}{far}"


def differences(a: Any, b: Any) -> list[Difference]:
    """Returns where two state trees differ: types, keys and their order, dtypes, shapes, bits, aliases.

    NaNs with equal payloads are equal, 0.0 and -0.0 are not. Sets are compared by content, whatever their order.
    Devices, memory order and whether an array is writable do not count.

    Raises:
        UnsupportedStateError: one of them is no state tree.
    """
    return encoded_differences(encode(a), encode(b))


def encoded_differences(a: Encoded, b: Encoded) -> list[Difference]:
    """Returns where two encoded trees differ; needs no library that their arrays came from.

    Nodes whose content no two runs share (`nodes.INCOMPARABLE`) are left out where both trees have them.

    Raises:
        FormatError: a structure is not what `encode` writes.
    """
    try:
        return _Comparison(a, b).run()
    except (ValueError, KeyError, IndexError, TypeError, AttributeError, RecursionError) as error:
        raise FormatError(f"the structure of a component is not one: {error!r}") from error


def outline(structure: bytes, identity: Callable[[str], str]) -> tuple[list[str], list[str]]:
    """Returns a line for everything in a structure, and the paths of the incomparable nodes, which it leaves out.

    A line has a path and a container's type, a scalar, or the identity of a leaf. Trees with equal outlines are equal
    but for the incomparable nodes.

    Args:
        structure: from `encode`.
        identity: returns a text for a leaf's place, equal for equal leaves: its digest.

    Raises:
        FormatError: the structure is not what `encode` writes.
    """
    lines: list[str] = []
    left_out: list[str] = []
    seen: dict[Any, str] = {}
    try:
        document = json.loads(structure)
        pending: list[tuple[str, Any]] = [("", document["root"])]
        while pending:
            path, value = pending.pop()
            kind = _reference(value)
            if kind is None:
                lines.append(f"{path} {json.dumps(value)}")
                continue
            key = _identity(value)
            marks = value.get("marked", ["", ""])[1]
            if key in seen:
                lines.append(f"{path} is {seen[key]} {marks}")
                continue
            seen[key] = path
            if kind != "node":
                lines.append(f"{path} {identity(key[1])} {marks}")
                continue
            record = document["nodes"][key[1]]
            if _incomparable(record):
                left_out.append(path)
                continue
            lines.append(f"{path} {record[0]} {len(record[1])} {json.dumps(record[2:])}")
            pending += reversed([(paths.join(path, part) if part else path, child) for part, child in _parts(record)])
    except (ValueError, KeyError, IndexError, TypeError, AttributeError, RecursionError) as error:
        raise FormatError(f"the structure of a component is not one: {error!r}") from error
    return lines, left_out


def _parts(record: list[Any]) -> Iterator[tuple[str, Any]]:
    """Returns the (name, value) pairs of a container; keys of mappings are values as well, named "%~key"."""
    values = record[1]
    if record[0] not in _MAPPINGS:
        yield from ((str(place), value) for place, value in enumerate(values))
        return
    for key, value in zip(values[::2], values[1::2], strict=False):
        yield "%~key", key
        yield paths.path_part(key if type(key) is str else json.dumps(key)), value
    if len(values) % 2:
        yield "", values[-1]


def _incomparable(record: list[Any]) -> bool:
    return record[0] == "object" and record[2]["type"] in INCOMPARABLE


def compare_leaves(a: Leaf, b: Leaf) -> tuple[str, float | None] | None:
    """Returns what differs between two leaves, and by how much at most where that is a number; None if nothing does."""
    if a.kind != b.kind:
        return f"{a.kind} and {b.kind}", None
    if a.dtype != b.dtype:
        return f"dtype {a.dtype} and {b.dtype}", None
    if tuple(a.shape) != tuple(b.shape):
        return f"shape {tuple(a.shape)} and {tuple(b.shape)}", None
    if isinstance(a, PartLeaf) or isinstance(b, PartLeaf):
        places = [_place(leaf) for leaf in (a, b)]
        if places[0] != places[1]:
            return f"the part {places[0]} and {places[1]} of {tuple(a.shape)}", None
        a, b = (Leaf(leaf.data, leaf.dtype, place[1], leaf.kind) for leaf, place in zip((a, b), places, strict=True))
    if np.array_equal(_bits(a), _bits(b)):
        return None
    what = f"{_count(a, b)} of {math.prod(a.shape)} elements differ"
    # signalling NaNs and infinities are values like others here
    with np.errstate(all="ignore"):
        numbers_a, numbers_b = _numbers(a), _numbers(b)
        if numbers_a is None or numbers_b is None:
            return what, None
        # equal infinities are no distance apart
        apart = np.where(numbers_a == numbers_b, 0, np.abs(numbers_a - numbers_b))
    return what, _largest(apart, numbers_a, numbers_b)


def leaf_distance(a: Leaf, b: Leaf) -> tuple[float, float] | None:
    """Returns how far apart two leaves are: relative to the first, in Euclidean norms, and at most, absolutely.

    Elements that are NaN in both or equal infinities are no distance apart; None is for what has no distance: other
    shapes or dtypes, or no numbers.
    """
    if (a.kind, a.dtype, tuple(a.shape)) != (b.kind, b.dtype, tuple(b.shape)):
        return None
    with np.errstate(all="ignore"):
        numbers_a, numbers_b = _numbers(a), _numbers(b)
        if numbers_a is None or numbers_b is None:
            return None
        same = (numbers_a == numbers_b) | (np.isnan(numbers_a) & np.isnan(numbers_b))
        apart = np.where(same, 0, np.abs(numbers_a - numbers_b))
        norm, scale = (float(np.sqrt(np.sum(np.square(np.abs(each))))) for each in (apart, numbers_a))
    relative = 0.0 if norm == 0 else norm / scale if scale else math.inf
    return relative, float(np.max(apart)) if apart.size else 0.0


def _largest(apart: Any, a: Any, b: Any) -> float:
    both_nan = np.isnan(a) & np.isnan(b)
    return float(np.max(np.where(both_nan, 0, apart))) if apart.size else 0.0


def _place(leaf: Leaf) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Returns (offset, shape) of what a leaf holds of its array."""
    if isinstance(leaf, PartLeaf):
        return tuple(leaf.offset), leaf.part_shape
    return (0,) * len(leaf.shape), tuple(leaf.shape)


def _count(a: Leaf, b: Leaf) -> int:
    rows_a, rows_b = (_bits(leaf).reshape(math.prod(a.shape), -1) for leaf in (a, b))
    return int((rows_a != rows_b).any(axis=1).sum())


def _bits(leaf: Leaf) -> Any:
    return np.ascontiguousarray(leaf.data).reshape(-1).view(np.uint8)


def _numbers(leaf: Leaf) -> Any:
    """Returns the values as numbers that subtract well, or None for what has no distance."""
    if leaf.dtype == "bfloat16":
        return (leaf.data.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    try:
        array = arrays.leaf_to_array(Leaf(leaf.data, leaf.dtype, leaf.shape, "numpy"))
    except ValueError:
        return None
    if array.dtype.kind in "iuf":
        return array.astype(np.longdouble)
    return array.astype(np.clongdouble) if array.dtype.kind == "c" else None


class _Comparison:
    def __init__(self, a: Encoded, b: Encoded) -> None:
        self._encoded = (a, b)
        self._documents = (json.loads(a.structure), json.loads(b.structure))
        self._found: list[Difference] = []
        # which object of one tree stands for which of the other: a one-to-one map, or the aliases differ
        self._partners: tuple[dict[Any, Any], dict[Any, Any]] = ({}, {})
        self._pending: list[tuple[Any, Any, str]] = []
        self._spelled: dict[tuple[int, int, int], str] = {}

    def run(self) -> list[Difference]:
        self._pending.append((self._documents[0]["root"], self._documents[1]["root"], ""))
        while self._pending:
            self._compare(*self._pending.pop())
        return self._found

    def _report(self, path: str, what: str, max_abs: float | None = None, *, aliasing: bool = False) -> None:
        self._found.append(Difference(path, what, max_abs, aliasing))

    def _compare(self, a: Any, b: Any, path: str) -> None:
        kinds = _reference(a), _reference(b)
        if kinds[0] is None and kinds[1] is None:
            if not _same_atom(a, b):
                self._report(path, f"{_spell(a)} and {_spell(b)}", _distance(a, b))
            return
        if kinds[0] != kinds[1]:
            self._report(path, f"{self._describe(0, a)} and {self._describe(1, b)}")
            return
        if not self._pair(a, b, path):
            return
        if kinds[0] == "node":
            self._compare_containers(self._record(0, a), self._record(1, b), path)
        else:
            found = compare_leaves(self._leaf(0, a), self._leaf(1, b))
            if found is not None:
                self._report(path, *found)
            if kinds[0] == "marked" and a["marked"][1] != b["marked"][1]:
                self._report(path, f"marks {a['marked'][1]} and {b['marked'][1]}")

    def _pair(self, a: Any, b: Any, path: str) -> bool:
        """Returns whether the content of the two has still to be compared."""
        key_a, key_b = _identity(a), _identity(b)
        partner_a, partner_b = self._partners[0].get(key_a), self._partners[1].get(key_b)
        if partner_a is None and partner_b is None:
            self._partners[0][key_a], self._partners[1][key_b] = key_b, key_a
            return True
        if partner_a != key_b:
            self._report(path, "the same object as elsewhere in one tree, another object in the other", aliasing=True)
            return partner_a is None or partner_b is None
        return False

    def _compare_containers(self, a: list[Any], b: list[Any], path: str) -> None:
        if _incomparable(a) and _incomparable(b):
            return
        meta_a, meta_b = (record[2] if len(record) == 3 else None for record in (a, b))
        if a[0] != b[0]:
            self._report(path, f"{a[0]} and {b[0]}")
            return
        packed = [_is_packed(a), _is_packed(b)]
        values_a, values_b = a[1], b[1]
        if packed[0] != packed[1]:
            values_a = self._unpack(0, values_a) if packed[0] else values_a
            values_b = self._unpack(1, values_b) if packed[1] else values_b
            meta_a, meta_b = ({**(meta or {}), "packed": None} for meta in (meta_a, meta_b))
        if meta_a != meta_b:
            self._report(path, f"{a[0]} {_spell(meta_a)} and {_spell(meta_b)}")
        if a[0] in _MAPPINGS:
            self._compare_mappings(values_a, values_b, path)
            return
        if a[0] in ("set", "frozenset"):
            self._compare_sets(values_a, values_b, path)
            return
        if len(values_a) != len(values_b):
            self._report(path, f"{len(values_a)} and {len(values_b)} elements")
        keys = (meta_a.get("keys") or meta_a.get("fields")) if type(meta_a) is dict else None
        for index in range(min(len(values_a), len(values_b)) - 1, -1, -1):
            part = (
                str(index)
                if keys is None
                else paths.path_part(keys[index])
                if index < len(keys) and keys[index]
                else ""
            )
            child = path if packed == [True, True] or a[0] == "generator" else paths.join(path, part) if part else path
            self._pending.append((values_a[index], values_b[index], child))

    def _compare_mappings(self, a: list[Any], b: list[Any], path: str) -> None:
        keys_a, keys_b = self._keys(0, a[: len(a) // 2 * 2 : 2]), self._keys(1, b[: len(b) // 2 * 2 : 2])
        children_a, children_b = dict(zip(keys_a, a[1::2], strict=True)), dict(zip(keys_b, b[1::2], strict=True))
        for key, text in self._missing(keys_a, children_b):
            self._report(paths.join(path, key), f"only the first has {text}")
        for key, text in self._missing(keys_b, children_a):
            self._report(paths.join(path, key), f"only the second has {text}")
        both = [key for key in keys_a if key in children_b]
        if both != [key for key in keys_b if key in children_a]:
            self._report(path, "the same keys in another order")
        for key in reversed(both):
            self._pending.append((children_a[key], children_b[key], paths.join(path, _part(key))))
        # attributes of an OrderedDict, items of an object
        if len(a) % 2 and len(b) % 2:
            self._pending.append((a[-1], b[-1], path))

    def _compare_sets(self, a: list[Any], b: list[Any], path: str) -> None:
        keys_a, keys_b = set(self._keys(0, a)), set(self._keys(1, b))
        for key in sorted(keys_a - keys_b):
            self._report(path, f"only the first has the element {_shorten(key)}")
        for key in sorted(keys_b - keys_a):
            self._report(path, f"only the second has the element {_shorten(key)}")

    @staticmethod
    def _missing(keys: list[str], others: dict[str, Any]) -> list[tuple[str, str]]:
        return [(_part(key), f"the key {_shorten(key)}") for key in keys if key not in others]

    def _keys(self, side: int, values: list[Any]) -> list[str]:
        return [self._key(side, value, index) for index, value in enumerate(values)]

    def _key(self, side: int, value: Any, index: int) -> str:
        """Returns a text that is equal for equal keys; keys that are equal only to themselves go by their position."""
        if _reference(value) is None:
            return json.dumps(value)
        if _reference(value) == "node":
            record = self._record(side, value)
            if record[0] in ("tuple", "frozenset", "namedtuple", "enum") and not _is_packed(record):
                known = self._spelled.get((side, value["node"], index))
                if known is None:
                    parts = [self._key(side, item, index) for item in record[1]]
                    parts = sorted(parts) if record[0] == "frozenset" else parts
                    known = f"{record[0]}({', '.join(parts)}{record[2] if len(record) == 3 else ''})"
                    # parts that many keys share must not multiply
                    if len(known) > _LONGEST_KEY:
                        known = f"{known[:40]}... {hashlib.blake2b(known.encode(), digest_size=16).hexdigest()}"
                    self._spelled[side, value["node"], index] = known
                return known
        return f"{self._describe(side, value)} at position {index}"

    def _record(self, side: int, value: Any) -> list[Any]:
        record: list[Any] = self._documents[side]["nodes"][value["node"]]
        return record

    def _leaf(self, side: int, value: Any) -> Leaf:
        return self._encoded[side].leaves[_identity(value)[1]]

    def _unpack(self, side: int, values: list[Any]) -> list[Any]:
        numbers = self._leaf(side, values[0]).data.tolist()
        return [atoms.float_to_json(number) if type(number) is float else number for number in numbers]

    def _describe(self, side: int, value: Any) -> str:
        kind = _reference(value)
        if kind is None:
            return _spell(value)
        if kind == "node":
            return f"a {self._record(side, value)[0]}"
        leaf = self._leaf(side, value)
        return f"an array {leaf.dtype} {tuple(leaf.shape)}"


def _is_packed(record: list[Any]) -> bool:
    return len(record) == 3 and type(record[2]) is dict and bool(record[2].get("packed"))


def _shorten(text: str) -> str:
    return text if len(text) <= 60 else f"{text[:57]}..."


def _reference(value: Any) -> str | None:
    if type(value) is dict:
        for kind in ("node", "leaf", "marked"):
            if kind in value:
                return kind
    return None


def _identity(value: Any) -> tuple[str, Any]:
    kind = _reference(value)
    assert kind is not None
    return ("leaf", value["marked"][0]) if kind == "marked" else (kind, value[kind])


def _same_atom(a: Any, b: Any) -> bool:
    # repr tells 0.0 from -0.0, 1 from 1.0 and from True
    return type(a) is type(b) and a == b and repr(a) == repr(b)


def _spell(value: Any) -> str:
    return _shorten(repr(value))


def _distance(a: Any, b: Any) -> float | None:
    numbers = [
        struct.unpack(">d", bytes.fromhex(x["float"]))[0] if type(x) is dict and "float" in x else x for x in (a, b)
    ]
    if all(type(number) in (int, float) for number in numbers):
        try:
            return 0.0 if numbers[0] == numbers[1] else abs(float(numbers[0]) - float(numbers[1]))
        except OverflowError:
            return math.inf
    return None


def _part(key: str) -> str:
    value = json.loads(key) if key.startswith('"') else key
    return paths.path_part(value)
