"""numpy arrays: copies of their own memory, views of each other, views into a simulation."""

# what the methods of a kind do is said once, in `Kind`
# ruff: noqa: D102

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np

from simckpt.sim.objects.containers import _values
from simckpt.sim.objects.kind import MISSING, Capture, Child, Kind, Matching, Rebuild, Unsupported, same_bits
from simckpt.state.nodes import ObjectState

Array = np.ndarray[Any, Any]

PHYSICS_VIEW = "simckpt.physics_view"
ARRAY_VIEW = "simckpt.array_view"
PERMUTED = "simckpt.permuted_array"
OBJECT_ARRAY = "simckpt.object_array"
DTYPE = "numpy.dtype"


class ArrayKind(Kind):
    """Arrays of numbers, strings and records: copies; views of a simulation or of each other are marked."""

    def capture(self, run: Capture, value: Array) -> Any:
        key = id(value)
        node = run.memo.get(key)
        if node is None:
            if value.base is not None:
                node = self._capture_part(run, value)
            elif value.dtype.hasobject:
                node = self._capture_objects(run, value)
            if node is None:
                node = run.memo[key] = value.copy() if value.ndim < 2 else copy_array(value)
        if key in run.shared_owners:
            # the graph holds the owner itself, and not views of it alone
            run.owners.setdefault(key, []).append(value)
        return node

    def _capture_part(self, run: Capture, value: Array) -> Any:
        """Returns the node of an array in the memory of another object, or None if it is to be copied like others."""
        owner = memory_owner(value)
        if owner.base is not None:
            place = run.memory.locate(value)
            if place is not None:
                node = run.memo[id(value)] = _physics_view(value, place)
                return node
        if value.dtype.hasobject:
            return self._capture_objects(run, value)
        if owner is not value:
            run.owners.setdefault(id(owner), []).append(value)
            if id(owner) in run.shared_owners:
                return self._capture_view(run, value, owner)
        return None

    def _capture_view(self, run: Capture, value: Array, owner: Array) -> Any:
        node = run.memo[id(value)] = ObjectState(ARRAY_VIEW, {**view_geometry(value, owner)})
        base = run.memo.get(id(owner))
        if base is None:
            # not noted among the owner's arrays: the graph itself may not hold it
            base = run.memo[id(owner)] = copy_array(owner)
        node.attributes["base"] = base
        return node

    def _capture_objects(self, run: Capture, value: Array) -> Any:
        if value.dtype != np.dtype(object):
            raise Unsupported("numpy.ndarray", f"its dtype {value.dtype} mixes objects and numbers")
        items: list[Any] = []
        node = run.memo[id(value)] = ObjectState(OBJECT_ARRAY, {"shape": value.shape}, items=items)
        for index, item in enumerate(value.flat):
            items.append(run.child(item, f"[{index}]"))
        return node

    def fits(self, matching: Matching, node: Any, live: Any) -> bool:
        if type(live) is not np.ndarray:
            return False
        as_captured = matching.live_node(live)
        saved = node if isinstance(node, np.ndarray) else node.items
        if type(as_captured) is not type(node) or (
            isinstance(node, ObjectState) and as_captured.type_name != node.type_name
        ):
            return False
        if isinstance(node, ObjectState) and node.type_name == OBJECT_ARRAY:
            return live.shape == tuple(node.attributes["shape"]) and live.flags.writeable
        if isinstance(node, ObjectState):
            if node.attributes != as_captured.attributes:
                return False
            live = live.transpose(node.attributes["axes"])
        if live.shape != saved.shape or live.dtype != saved.dtype:
            return False
        return (live.flags.writeable or same_bits(live, saved)) and matching.array_is_free(live)

    def children(self, node: Any, live: Any) -> Iterator[Child]:
        if isinstance(node, ObjectState) and node.type_name == OBJECT_ARRAY:
            current = list(live.flat) if isinstance(live, np.ndarray) and live.dtype == object else []
            for index, child in enumerate(node.items):
                yield f"[{index}]", child, current[index] if index < len(current) else MISSING

    def create(self, rebuild: Rebuild, node: Any) -> Any:
        if isinstance(node, np.ndarray):
            return np.empty(node.shape, node.dtype)
        if node.type_name == OBJECT_ARRAY:
            return np.empty(tuple(node.attributes["shape"]), object)
        axes = node.attributes["axes"]
        return np.empty(node.items.shape, node.items.dtype).transpose(np.argsort(axes))

    def fill(self, rebuild: Rebuild, node: Any, target: Array) -> None:
        if isinstance(node, np.ndarray):
            saved = node
        elif node.type_name == OBJECT_ARRAY:
            for index, item in enumerate(_values(rebuild, node.items, list(target.flat))):
                target.flat[index] = item
            return
        else:
            saved = node.items.transpose(np.argsort(node.attributes["axes"]))
        if not same_bits(target, saved):
            target[...] = saved


class ViewKind(Kind):
    """An array in the memory of another array of the graph, or of a simulation: never copied, only pointed to."""

    mutable = False

    def children(self, node: Any, live: Any) -> Iterator[Child]:
        if node.type_name == ARRAY_VIEW:
            owner = memory_owner(live) if isinstance(live, np.ndarray) else MISSING
            yield "base", node.attributes["base"], MISSING if owner is live else owner

    def problem(self, matching: Matching, node: Any, live: Any) -> str | None:
        if node.type_name == ARRAY_VIEW:
            return None
        attributes = node.attributes
        field = matching.memory.field(attributes["physics"], attributes["field"])
        if field is None:
            return f"is a view of {attributes['physics']}.{attributes['field']}, which the live env does not have"
        end = attributes["offset"] + np.dtype(attributes["dtype"]).itemsize
        end += sum(
            step * (size - 1) for step, size in zip(attributes["strides"], attributes["shape"], strict=True) if size
        )
        low, high = np.lib.array_utils.byte_bounds(field)
        if attributes["offset"] < 0 or end > high - low or min(attributes["strides"], default=0) < 0:
            return f"is a view beyond the end of {attributes['physics']}.{attributes['field']}"
        return None

    def make(self, rebuild: Rebuild, node: Any, live: Any) -> Any:
        attributes = node.attributes
        if node.type_name == ARRAY_VIEW:
            base = rebuild.value(node.attributes["base"])
            if isinstance(live, np.ndarray) and memory_owner(live) is base and _same_view(live, base, attributes):
                return live
        else:
            field = rebuild.matching.memory.field(attributes["physics"], attributes["field"])
            assert field is not None
            if isinstance(live, np.ndarray) and _same_view(live, field, attributes):
                return live
            base = field
        return _view_of(base, attributes)


class DtypeKind(Kind):
    """numpy dtypes, which spaces hold."""

    mutable = False

    def __init__(self) -> None:
        self._nodes: dict[np.dtype[Any], ObjectState] = {}

    def capture(self, run: Capture, value: np.dtype[Any]) -> Any:
        node = self._nodes.get(value)
        if node is None:
            node = self._nodes[value] = ObjectState(DTYPE, {"descr": repr_dtype(value)})
        return node

    def problem(self, matching: Matching, node: Any, live: Any) -> str | None:
        if isinstance(live, np.dtype) and repr_dtype(live) == node.attributes["descr"]:
            return None
        try:
            np.dtype(node.attributes["descr"])
        except TypeError:
            return f"has a dtype {node.attributes['descr']!r} that cannot be built"
        return None

    def make(self, rebuild: Rebuild, node: Any, live: Any) -> Any:
        if isinstance(live, np.dtype) and repr_dtype(live) == node.attributes["descr"]:
            return live
        return np.dtype(node.attributes["descr"])


def repr_dtype(dtype: np.dtype[Any]) -> str:
    """Returns a text that tells dtypes apart and, for the simple ones, makes them."""
    return dtype.str if dtype.fields is None else repr(dtype)


def copy_array(value: Array) -> Any:
    """Returns the node of an array's content: a copy, marked if its axes do not lie in C order."""
    if value.ndim < 2 or value.flags.c_contiguous:
        return value.copy()
    # the memory order decides the order of sums, and with it the last bits
    axes = tuple(int(axis) for axis in np.argsort([-abs(step) for step in value.strides], kind="stable"))
    if axes == tuple(range(value.ndim)):
        return value.copy()
    return ObjectState(PERMUTED, {"axes": axes}, items=value.transpose(axes).copy())


def memory_owner(value: Array) -> Array:
    """Returns the last array along the chain of bases: the one that owns the memory, or stands for foreign memory."""
    while isinstance(value.base, np.ndarray):
        value = value.base
    return value


def address(value: Array) -> int:
    """Returns where the first element lies."""
    found: int = value.__array_interface__["data"][0]
    return found


def overlapping(arrays: list[Array]) -> bool:
    """Returns whether any two of the arrays share memory."""
    spans = sorted(np.lib.array_utils.byte_bounds(array) for array in arrays if array.size)
    return any(high > low for (_, high), (low, _) in itertools.pairwise(spans))


def shared_owners(run: Capture) -> set[int]:
    """Returns the owners of memory in which several arrays of the graph overlap, by id."""
    shared = set()
    for key, found in run.owners.items():
        distinct = {id(array): array for array in found}
        if key in run.memo and key not in run.shared_owners:
            distinct[key] = memory_owner(found[0])
        if len(distinct) > 1 and overlapping(list(distinct.values())):
            shared.add(key)
    return shared


def view_geometry(value: Array, base: Array) -> dict[str, Any]:
    """Returns where a view lies in its base: offset and strides [bytes], shape and dtype."""
    return {
        "offset": address(value) - address(base),
        "strides": value.strides,
        "shape": value.shape,
        "dtype": value.dtype.str,
    }


def _physics_view(value: Array, place: tuple[str, str, int]) -> ObjectState:
    physics, field, offset = place
    geometry = {"offset": offset, "strides": value.strides, "shape": value.shape, "dtype": value.dtype.str}
    return ObjectState(PHYSICS_VIEW, {"physics": physics, "field": field, **geometry})


def _same_view(live: Array, base: Array, attributes: dict[str, Any]) -> bool:
    geometry = view_geometry(live, base)
    return all(attributes[name] == geometry[name] for name in geometry)


def _view_of(base: Array, attributes: dict[str, Any]) -> Array:
    if all(attributes[name] == value for name, value in view_geometry(base, base).items()):
        # fields of MuJoCo's statistics lie in memory with gaps
        return base
    # whoever owns memory fills it without gaps, in some order of its axes
    in_memory = base.transpose(np.argsort([-abs(step) for step in base.strides], kind="stable"))
    return np.ndarray(
        tuple(attributes["shape"]),
        np.dtype(attributes["dtype"]),
        buffer=in_memory.reshape(-1).view(np.uint8),
        offset=attributes["offset"],
        strides=tuple(attributes["strides"]),
    )


ARRAYS = ArrayKind()
VIEWS = ViewKind()
BY_NAME: dict[str, Kind] = {
    PHYSICS_VIEW: VIEWS,
    ARRAY_VIEW: VIEWS,
    PERMUTED: ARRAYS,
    OBJECT_ARRAY: ARRAYS,
    DTYPE: DtypeKind(),
}
