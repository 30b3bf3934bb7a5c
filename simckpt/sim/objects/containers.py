"""Python's own containers: changed in place, so that whoever else holds them sees the restored content."""

# what the methods of a kind do is said once, in `Kind`
# ruff: noqa: D102

from __future__ import annotations

import array
import warnings
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterator
from typing import Any

import numpy as np

from simckpt.sim.objects.kind import MISSING, PLAIN, Capture, Child, Kind, Matching, Rebuild, Unsupported
from simckpt.state.nodes import ObjectState

DICT_ITEMS = "simckpt.dict"
SET = "simckpt.set"
SLICE = "slice"
FROZENSET = "simckpt.frozenset"
BYTEARRAY = "bytearray"
DEFAULTDICT = "collections.defaultdict"
TYPED_ARRAY = "array.array"

# keys that a tree can hold as they are
_TREE_KEYS = frozenset({str, int, bool, type(None)})


class DictKind(Kind):
    """dict and OrderedDict. Keys that a tree cannot hold (enums, objects) make it a list of pairs, `simckpt.dict`."""

    def __init__(self, cls: type = dict) -> None:
        self.cls = cls

    def capture(self, run: Capture, value: Any) -> Any:
        found = run.memo.get(id(value))
        if found is not None:
            return found
        for key in value:
            if type(key) is not str and not _is_tree_key(key):
                return self._capture_items(run, value)
        node = run.memo[id(value)] = self.cls()
        for key, item in value.items():
            if type(item) in PLAIN:
                node[key] = item
            else:
                node[key] = run.child(item, f"[{key!r}]")
        return node

    def _capture_items(self, run: Capture, value: Any) -> Any:
        pairs: list[Any] = []
        node = run.memo[id(value)] = ObjectState(DICT_ITEMS, {"ordered": self.cls is OrderedDict}, items=pairs)
        for key, item in value.items():
            pairs.append((run.child(key, f"[key {key!r}]"), run.child(item, f"[{key!r}]")))
        return node

    def fits(self, matching: Matching, node: Any, live: Any) -> bool:
        return type(live) is (type(node) if isinstance(node, dict) else _pairs_class(node))

    def children(self, node: Any, live: Any) -> Iterator[Child]:
        if isinstance(node, dict):
            for key, child in node.items():
                yield f"[{key!r}]", child, MISSING if live is MISSING else live.get(key, MISSING)
            return
        current = [] if live is MISSING else list(live.items())
        for index, pair in enumerate(node.items):
            live_pair = current[index] if index < len(current) else (MISSING, MISSING)
            yield f"[key {index}]", pair[0], live_pair[0]
            yield f"[{index}]", pair[1], live_pair[1]

    def create(self, rebuild: Rebuild, node: Any) -> Any:
        return type(node)() if isinstance(node, dict) else _pairs_class(node)()

    def fill(self, rebuild: Rebuild, node: Any, target: Any) -> None:
        if isinstance(node, dict):
            fill_dict(target, [(key, rebuild.value(child, target.get(key, MISSING))) for key, child in node.items()])
            return
        current = list(target.items())
        wanted = []
        for index, (key, child) in enumerate(node.items):
            live = current[index] if index < len(current) else (MISSING, MISSING)
            wanted.append((rebuild.value(key, live[0]), rebuild.value(child, live[1])))
        # keys are filled in place: their hashes may have changed under the dict
        _refill_dict(target, wanted)


def fill_dict(target: Any, wanted: list[tuple[Any, Any]]) -> None:
    """Makes a dict hold these pairs in this order, leaving it untouched where it already does."""
    current = list(dict.items(target))
    if len(current) == len(wanted) and all(
        type(a) is type(b) and a == b and same(x, y) for (a, x), (b, y) in zip(current, wanted, strict=True)
    ):
        return
    if [key for key, _ in current] == [key for key, _ in wanted]:
        for (key, old), (_, new) in zip(current, wanted, strict=True):
            if not same(old, new):
                dict.__setitem__(target, key, new)
        return
    _refill_dict(target, wanted)


def _refill_dict(target: Any, wanted: list[tuple[Any, Any]]) -> None:
    # OrderedDict keeps an order of its own, which only its own methods change
    owner = OrderedDict if isinstance(target, OrderedDict) else dict
    owner.clear(target)
    for key, new in wanted:
        owner.__setitem__(target, key, new)


class DefaultDictKind(Kind):
    """collections.defaultdict: its factory is a function or class of the program."""

    def __init__(self) -> None:
        self.inner = DictKind()

    def capture(self, run: Capture, value: Any) -> Any:
        found = run.memo.get(id(value))
        if found is not None:
            return found
        node = run.memo[id(value)] = ObjectState(DEFAULTDICT)
        node.attributes["default_factory"] = run.child(value.default_factory, "default_factory")
        node.items = capture_plain_copy(run, value, self.inner)
        return node

    def fits(self, matching: Matching, node: Any, live: Any) -> bool:
        return type(live) is defaultdict

    def children(self, node: Any, live: Any) -> Iterator[Child]:
        factory = MISSING if live is MISSING else live.default_factory
        yield "default_factory", node.attributes["default_factory"], factory
        yield from self.inner.children(node.items, live)

    def create(self, rebuild: Rebuild, node: Any) -> Any:
        return defaultdict()

    def fill(self, rebuild: Rebuild, node: Any, target: Any) -> None:
        target.default_factory = rebuild.value(node.attributes["default_factory"], target.default_factory)
        self.inner.fill(rebuild, node.items, target)


def capture_plain_copy(run: Capture, value: Any, kind: Kind) -> Any:
    """Returns the content of a container that is already in the memo under a node of its own."""
    own = run.memo.pop(id(value))
    items = kind.capture(run, value)
    run.memo[id(value)] = own
    return items


class ListKind(Kind):
    """list."""

    def capture(self, run: Capture, value: Any) -> Any:
        found = run.memo.get(id(value))
        if found is not None:
            return found
        node: list[Any] = []
        run.memo[id(value)] = node
        for index, item in enumerate(list.__iter__(value)):
            node.append(item if type(item) in PLAIN else run.child(item, f"[{index}]"))
        return node

    def fits(self, matching: Matching, node: Any, live: Any) -> bool:
        return type(live) is list

    def children(self, node: Any, live: Any) -> Iterator[Child]:
        size = 0 if live is MISSING else len(live)
        for index, child in enumerate(node):
            yield f"[{index}]", child, live[index] if index < size else MISSING

    def create(self, rebuild: Rebuild, node: Any) -> Any:
        return []

    def fill(self, rebuild: Rebuild, node: Any, target: Any) -> None:
        current = list(list.__iter__(target))
        list.__setitem__(target, slice(None), _values(rebuild, node, current))


class DequeKind(Kind):
    """collections.deque; `maxlen` cannot be changed, so another one means another deque."""

    def capture(self, run: Capture, value: Any) -> Any:
        found = run.memo.get(id(value))
        if found is not None:
            return found
        node: deque[Any] = deque(maxlen=value.maxlen)
        run.memo[id(value)] = node
        for index, item in enumerate(deque.__iter__(value)):
            node.append(item if type(item) in PLAIN else run.child(item, f"[{index}]"))
        return node

    def fits(self, matching: Matching, node: Any, live: Any) -> bool:
        return type(live) is deque and live.maxlen == node.maxlen

    def children(self, node: Any, live: Any) -> Iterator[Child]:
        size = 0 if live is MISSING else len(live)
        for index, child in enumerate(node):
            yield f"[{index}]", child, live[index] if index < size else MISSING

    def create(self, rebuild: Rebuild, node: Any) -> Any:
        return deque(maxlen=node.maxlen)

    def fill(self, rebuild: Rebuild, node: Any, target: Any) -> None:
        wanted = _values(rebuild, node, list(deque.__iter__(target)))
        deque.clear(target)
        deque.extend(target, wanted)


def _values(rebuild: Rebuild, nodes: Any, current: list[Any]) -> list[Any]:
    return [
        rebuild.value(child, current[index] if index < len(current) else MISSING) for index, child in enumerate(nodes)
    ]


class TupleKind(Kind):
    """tuple; the live one is kept where all its items are."""

    mutable = False

    def capture(self, run: Capture, value: Any) -> Any:
        for item in value:
            if type(item) not in PLAIN:
                break
        else:
            return value
        return tuple([run.child(item, f"[{index}]") for index, item in enumerate(value)])

    def children(self, node: Any, live: Any) -> Iterator[Child]:
        size = len(live) if isinstance(live, tuple) else 0
        for index, child in enumerate(node):
            yield f"[{index}]", child, live[index] if index < size else MISSING

    def make(self, rebuild: Rebuild, node: Any, live: Any) -> Any:
        current = list(live) if isinstance(live, tuple) else []
        wanted = _values(rebuild, node, current)
        if type(live) is tuple and len(current) == len(wanted) and all(map(same, current, wanted)):
            return live
        return tuple(wanted)


class SliceKind(Kind):
    """slice."""

    mutable = False

    def capture(self, run: Capture, value: slice) -> Any:
        return ObjectState(SLICE, {name: run.child(getattr(value, name), name) for name in ("start", "stop", "step")})

    def children(self, node: Any, live: Any) -> Iterator[Child]:
        for name, child in node.attributes.items():
            yield name, child, getattr(live, name) if isinstance(live, slice) else MISSING

    def make(self, rebuild: Rebuild, node: Any, live: Any) -> Any:
        wanted = [rebuild.value(child, current) for _, child, current in self.children(node, live)]
        if isinstance(live, slice) and all(map(same, (live.start, live.stop, live.step), wanted)):
            return live
        return slice(*wanted)


class SetKind(Kind):
    """set: kept as a list in its order of iteration, which the order of insertion decides for many elements."""

    def capture(self, run: Capture, value: Any) -> Any:
        found = run.memo.get(id(value))
        if found is not None:
            return found
        items: list[Any] = []
        node = run.memo[id(value)] = ObjectState(SET, items=items)
        items.extend(run.child(item, "{...}") for item in set.__iter__(value))
        return node

    def fits(self, matching: Matching, node: Any, live: Any) -> bool:
        return type(live) is set

    def children(self, node: Any, live: Any) -> Iterator[Child]:
        yield from _set_children(node, live)

    def create(self, rebuild: Rebuild, node: Any) -> Any:
        return set()

    def fill(self, rebuild: Rebuild, node: Any, target: Any) -> None:
        current = list(set.__iter__(target))
        wanted = _set_values(rebuild, node, current)
        plain = all(type(item) in PLAIN for item in wanted)
        # objects are filled in place: their hashes may have changed under the set
        if plain and len(current) == len(wanted) and all(map(same, current, wanted)):
            return
        for order in (wanted, wanted[::-1]):
            set.clear(target)
            for item in order:
                set.add(target, item)
            if all(map(same, set.__iter__(target), wanted)):
                return
        if plain and not any(isinstance(item, str | bytes) for item in wanted):
            warnings.warn(
                f"a restored set of {len(wanted)} elements iterates in another order than the saved one, whose order "
                "came from its history; an env that depends on it should keep a list or a dict",
                stacklevel=2,
            )


class FrozensetKind(Kind):
    """frozenset."""

    mutable = False

    def capture(self, run: Capture, value: Any) -> Any:
        return ObjectState(FROZENSET, items=[run.child(item, "{...}") for item in frozenset.__iter__(value)])

    def children(self, node: Any, live: Any) -> Iterator[Child]:
        yield from _set_children(node, live)

    def make(self, rebuild: Rebuild, node: Any, live: Any) -> Any:
        current = list(live) if isinstance(live, frozenset) else []
        wanted = _set_values(rebuild, node, current)
        if type(live) is frozenset and len(current) == len(wanted) and all(map(same, current, wanted)):
            return live
        return frozenset(wanted)


def _set_children(node: Any, live: Any) -> Iterator[Child]:
    # elements of sets have no place of their own: equal plain ones pair up, others by order
    current = [] if live is MISSING or not isinstance(live, set | frozenset) else list(live)
    for index, child in enumerate(node.items):
        yield f"{{{index}}}", child, current[index] if index < len(current) else MISSING


def _set_values(rebuild: Rebuild, node: Any, current: list[Any]) -> list[Any]:
    return _values(rebuild, node.items, current)


class BytearrayKind(Kind):
    """bytearray."""

    def capture(self, run: Capture, value: Any) -> Any:
        found = run.memo.get(id(value))
        if found is None:
            found = run.memo[id(value)] = ObjectState(BYTEARRAY, items=bytes(value))
        return found

    def fits(self, matching: Matching, node: Any, live: Any) -> bool:
        return type(live) is bytearray

    def create(self, rebuild: Rebuild, node: Any) -> Any:
        return bytearray()

    def fill(self, rebuild: Rebuild, node: Any, target: Any) -> None:
        if target != node.items:
            target[:] = node.items


class TypedArrayKind(Kind):
    """array.array."""

    def capture(self, run: Capture, value: Any) -> Any:
        found = run.memo.get(id(value))
        if found is None:
            found = ObjectState(TYPED_ARRAY, {"typecode": value.typecode}, items=value.tobytes())
            run.memo[id(value)] = found
        return found

    def fits(self, matching: Matching, node: Any, live: Any) -> bool:
        return type(live) is array.array and live.typecode == node.attributes["typecode"]

    def create(self, rebuild: Rebuild, node: Any) -> Any:
        return array.array(node.attributes["typecode"])

    def fill(self, rebuild: Rebuild, node: Any, target: Any) -> None:
        if target.tobytes() != node.items:
            del target[:]
            target.frombytes(node.items)


class RefusedKind(Kind):
    """Objects that are neither state nor resources."""

    def __init__(self, type_name: str, reason: str) -> None:
        self.type_name = type_name
        self.reason = reason

    def capture(self, run: Capture, value: Any) -> Any:
        found = run.memo.get(id(value))
        if found is not None:
            # somebody else captures it
            return found
        raise Unsupported(self.type_name, self.reason)


def same(one: Any, other: Any) -> bool:
    """Returns whether a value may stay where it is: the same object, or an equal plain one to the bit."""
    if one is other:
        return True
    cls = type(one)
    if cls is not type(other) or cls not in PLAIN:
        return False
    if cls in (int, str, bool, bytes):
        return bool(one == other)
    # floats by their bits: -0.0 is not 0.0, and a NaN has a payload
    return repr_bits(one) == repr_bits(other)


def repr_bits(value: Any) -> bytes:
    """Returns the bytes of a number."""
    return np.asarray(value).tobytes()


def _is_tree_key(key: Any) -> bool:
    cls = type(key)
    return cls in _TREE_KEYS or (cls is tuple and all(_is_tree_key(part) for part in key))


def _pairs_class(node: Any) -> type:
    return OrderedDict if node.attributes.get("ordered") else dict


BY_CLASS: dict[type, Kind] = {
    dict: DictKind(),
    OrderedDict: DictKind(OrderedDict),
    defaultdict: DefaultDictKind(),
    list: ListKind(),
    tuple: TupleKind(),
    slice: SliceKind(),
    deque: DequeKind(),
    set: SetKind(),
    frozenset: FrozensetKind(),
    bytearray: BytearrayKind(),
    array.array: TypedArrayKind(),
}
BY_NAME: dict[str, Kind] = {
    DICT_ITEMS: BY_CLASS[dict],
    DEFAULTDICT: BY_CLASS[defaultdict],
    SET: BY_CLASS[set],
    SLICE: BY_CLASS[slice],
    FROZENSET: BY_CLASS[frozenset],
    BYTEARRAY: BY_CLASS[bytearray],
    TYPED_ARRAY: BY_CLASS[array.array],
}
# content of subclasses that carry attributes of their own
CONTENT: dict[type, Kind] = {cls: BY_CLASS[cls] for cls in (dict, OrderedDict, list, tuple, deque, set, frozenset)}
