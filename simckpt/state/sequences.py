"""Lists, tuples, deques, sets, byte arrays and slices in a state tree."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np

from simckpt.state import paths
from simckpt.state.mappings import PLAIN
from simckpt.state.registry import ContainerKind, add_container, leaf_kinds
from simckpt.state.walk import Encoder, Walker

# from this length on, a sequence of floats or of integers is an array in the file: JSON would be 20 times slower
_PACKED_LENGTH = 64
_NUMBERS = (int, float, bool, complex)
_MOST_INSERTIONS = 8192  # in search of the order in which a set was filled: 1 ms; six elements have 720 orders


def _elements(walker: Walker, obj: Any, path: str, name: str, meta: dict[str, Any]) -> list[Any]:
    if len(obj) >= _PACKED_LENGTH and isinstance(walker, Encoder):
        array = _pack(obj)
        if array is not None:
            values = [walker.leaf(leaf_kinds["numpy"], array, path)]
            return [name, values, {**meta, "packed": True}]
    values = [
        walker.value(child, path if type(child) in PLAIN else paths.join(path, str(i))) for i, child in enumerate(obj)
    ]
    return [name, values, meta] if meta else [name, values]


def _pack(obj: Any) -> np.ndarray[Any, Any] | None:
    """Returns the array of a sequence of nothing but floats, or of nothing but integers of 64 bits, else None."""
    found = set(map(type, obj))
    if found == {float}:
        return np.array(list(obj), np.float64)
    if found == {int}:
        try:
            return np.array(list(obj), np.int64)
        except OverflowError:
            return None
    return None


def _flatten_set(walker: Walker, obj: Any, path: str) -> list[Any]:
    return [type(obj).__name__, [walker.value(element, path) for element in _in_order(obj)]]


def _in_order(elements: Any) -> list[Any]:
    """Returns the elements of a set in an order that two runs of a program agree on.

    Numbers hash alike in every process: a small set of them is filled so that it iterates in this order again.
    Strings do not, so no program can rely on their order, and sorting them makes equal states equal in a file.
    """
    if all(type(element) in _NUMBERS for element in elements):
        return list(elements)
    try:
        return sorted(elements, key=_sorting_key)
    except _UnsortableError:
        return list(elements)


class _UnsortableError(Exception):
    pass


def _sorting_key(element: Any) -> str:
    if type(element) in PLAIN or type(element) is bytes:
        return f"{type(element).__name__} {element!r}"
    if type(element) is tuple:
        return f"tuple {[_sorting_key(item) for item in element]}"
    if type(element) is frozenset:
        return f"frozenset {sorted(_sorting_key(item) for item in element)}"
    raise _UnsortableError


def _unpack(values: list[Any], meta: Any) -> list[Any]:
    if not (type(meta) is dict and meta.get("packed")):
        return values
    (array,) = values
    if not isinstance(array, np.ndarray) or array.ndim != 1 or array.dtype not in (np.float64, np.int64):
        raise ValueError("a packed sequence is not an array of numbers")
    unpacked: list[Any] = array.tolist()
    return unpacked


def index_templates(template: Any, values: list[Any], meta: Any) -> Sequence[Any] | None:
    """Returns the live elements of a sequence, by position."""
    if not isinstance(template, (list, tuple, deque)) or not template:
        return None
    # a live list may be shorter: its last element speaks for those that follow
    live = list(template)[: len(values)]
    return live + [live[-1]] * (len(values) - len(live)) if values else None


def _finish_list(shell: Any, values: list[Any], meta: Any, template: Any) -> Any:
    shell.extend(_unpack(values, meta))
    return shell


def _deque_shell(meta: Any, template: Any) -> Any:
    return deque(maxlen=meta["maxlen"])


def _finish_set(shell: Any, values: list[Any], meta: Any, template: Any) -> Any:
    shell.update(_order_of_insertion(values))
    return shell


def _order_of_insertion(values: list[Any]) -> Sequence[Any]:
    """Returns the elements of a set in an order in which to insert them, so that they are iterated as listed.

    Of numbers whose hashes collide, that depends on who came first; for large sets no such order may be found.
    """
    inserted = set(values)
    if len(inserted) != len(values):
        raise ValueError("a set has the same element twice")
    if list(inserted) != values and all(type(value) in _NUMBERS for value in values):
        for order in itertools.islice(itertools.permutations(values), _MOST_INSERTIONS // len(values)):
            if list(set(order)) == values:
                return order
    return values


def _finish_bytearray(shell: Any, values: list[Any], meta: Any, template: Any) -> Any:
    (content,) = values
    # bytes(n) would make n zeros
    if type(content) is not bytes:
        raise ValueError("a byte array has no bytes")
    shell.extend(content)
    return shell


def _finish_slice(shell: Any, values: list[Any], meta: Any, template: Any) -> Any:
    start, stop, step = values
    return slice(start, stop, step)


def _flatten_slice(walker: Walker, obj: Any, path: str) -> list[Any]:
    return ["slice", [walker.value(part, path) for part in (obj.start, obj.stop, obj.step)]]


def _register() -> None:
    kind = ContainerKind

    def flatten(walker: Walker, obj: Any, path: str) -> list[Any]:
        return _elements(walker, obj, path, type(obj).__name__, {})

    def flatten_deque(walker: Walker, obj: Any, path: str) -> list[Any]:
        return _elements(walker, obj, path, "deque", {"maxlen": obj.maxlen})

    def finish_tuple(shell: Any, values: list[Any], meta: Any, template: Any) -> Any:
        return tuple(_unpack(values, meta))

    def finish_frozenset(shell: Any, values: list[Any], meta: Any, template: Any) -> Any:
        return frozenset(_order_of_insertion(values))

    def flatten_bytearray(walker: Walker, obj: Any, path: str) -> list[Any]:
        return ["bytearray", [walker.value(bytes(obj), path)]]

    add_container(kind("list", flatten, _finish_list, lambda meta, live: [], index_templates), list)
    add_container(kind("deque", flatten_deque, _finish_list, _deque_shell, index_templates), deque)
    add_container(kind("tuple", flatten, finish_tuple, None, index_templates), tuple)
    add_container(kind("set", _flatten_set, _finish_set, lambda meta, live: set()), set)
    add_container(kind("frozenset", _flatten_set, finish_frozenset), frozenset)
    add_container(kind("bytearray", flatten_bytearray, _finish_bytearray, lambda meta, live: bytearray()), bytearray)
    add_container(kind("slice", _flatten_slice, _finish_slice), slice)


_register()
