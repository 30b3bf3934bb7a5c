"""Objects of classes: their attributes, whatever the class; and the objects that are left alone."""

# what the methods of a kind do is said once, in `Kind`
# ruff: noqa: D102

from __future__ import annotations

import time
import types
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from simckpt.errors import UnsupportedStateError
from simckpt.sim.objects import containers
from simckpt.sim.objects.arrays import ARRAYS
from simckpt.sim.objects.kind import (
    MISSING,
    PLAIN,
    Capture,
    Child,
    Kind,
    Matching,
    Rebuild,
    Unsupported,
)
from simckpt.sim.objects.layout import own_attributes, read_slot, slots_of
from simckpt.sim.resources import Adapter, clock_attributes, is_moved_path, skipped_attributes
from simckpt.state.nodes import ELAPSED, ObjectState
from simckpt.state.tree import copy_tree
from simckpt.state.walk import qualified_name

RESOURCE = "simckpt.resource"
PROTOCOL = "simckpt.protocol"
CLOCK = ELAPSED
# prefix of attributes that lie on the class and not on the object
CLASS = "class."

_CONTENT: dict[type, Kind] = {**containers.CONTENT, np.ndarray: ARRAYS}
_IMMUTABLE_CONTENT = (int, float, complex, str, bytes)


class ResourceKind(Kind):
    """Models, windows, locks: the live one stays, whatever the state says."""

    mutable = False

    def __init__(self, type_name: str) -> None:
        self._node = ObjectState(RESOURCE, {"class": type_name})

    def capture(self, run: Capture, value: Any) -> Any:
        # one node for all objects of the class: there is nothing to tell them apart by
        return self._node

    def make(self, rebuild: Rebuild, node: Any, live: Any) -> Any:
        return None if live is MISSING else live


class ObjectKind(Kind):
    """Instances of ordinary classes: `__dict__`, slots, and the content of a container or array they derive from."""

    def __init__(
        self,
        cls: type,
        *,
        generator: Callable[[dict[str, Any]], None] | None = None,
        class_attributes: dict[str, type] | None = None,
    ) -> None:
        self.cls = cls
        # attribute of the class -> the class that holds it
        self.class_attributes = class_attributes or {}
        self.type_name = qualified_name(cls)
        self.skip = skipped_attributes(cls)
        self.clocks = clock_attributes(cls)
        self.slots = slots_of(cls)
        self.generator = generator
        self.base = next((base for base in cls.__mro__ if base in _CONTENT or base in _IMMUTABLE_CONTENT), None)
        self.content = _CONTENT.get(self.base) if self.base else None
        self.constant = self.base in _IMMUTABLE_CONTENT or self.base in (tuple, frozenset)

    def capture(self, run: Capture, value: Any) -> Any:
        key = id(value)
        node = run.memo.get(key)
        if node is not None:
            return node
        live = own_attributes(value)
        if live is not None and self.generator is not None:
            self.generator(live)
        # most attributes are plain and stay as the copy has them
        attributes = {} if live is None else live.copy()
        node = run.memo[key] = ObjectState(self.type_name, attributes)
        skip = self.skip
        if live is not None:
            for name in skip:
                attributes.pop(name, None)
            self._capture_dict(run, attributes)
        for name, holder in self.class_attributes.items():
            if live is None or name not in live:
                attributes[f"{CLASS}{name}"] = run.child(holder.__dict__[name], f"{CLASS}{name}")
        for name, descriptor in self.slots:
            item = read_slot(descriptor, value, MISSING)
            if item is not MISSING and name not in skip:
                attributes[name] = run.child(item, name)
        if self.base is not None:
            node.items = self._capture_content(run, value)
        return node

    def _capture_dict(self, run: Capture, attributes: dict[str, Any]) -> None:
        """Replaces each attribute by its node, in place."""
        for name in self.clocks:
            if name in attributes:
                attributes[name] = elapsed_since(attributes[name])
        kinds = run.kinds
        objects = run.objects
        plain = PLAIN
        for name, item in attributes.items():
            cls = type(item)
            if cls in plain:
                continue
            if cls is ObjectState:
                continue
            try:
                kind = kinds.get(cls) or run.classify(cls)
                if objects is not None:
                    objects.append(item)
                attributes[name] = kind.capture(run, item)
            except Unsupported as error:
                raise error.at(str(name)) from None

    def _capture_content(self, run: Capture, value: Any) -> Any:
        if self.content is None:
            assert self.base is not None
            return self.base(value) if self.base is not str else str.__str__(value)
        if self.base is np.ndarray:
            return np.array(value, order="C", copy=True, subok=False)
        return containers.capture_plain_copy(run, value, self.content)

    def fits(self, matching: Matching, node: Any, live: Any) -> bool:
        if type(live) is not self.cls:
            return False
        return self._content_fits(matching, node, live)

    def _content_fits(self, matching: Matching, node: Any, live: Any) -> bool:
        if self.constant:
            # an immutable content cannot be changed; an equal one may stay
            as_captured = matching.live_node(live)
            return as_captured is not MISSING and _equal_constants(as_captured.items, node.items)
        if self.base is np.ndarray:
            return (live.shape, live.dtype) == (node.items.shape, node.items.dtype) and bool(live.flags.writeable)
        if self.base is deque:
            return bool(live.maxlen == node.items.maxlen)
        return True

    def children(self, node: Any, live: Any) -> Iterator[Child]:
        if live is not MISSING and type(live) is not self.cls:
            live = MISSING
        for name, child in node.attributes.items():
            yield name, child, MISSING if live is MISSING else self.read(live, name)
        if self.content is not None and self.base is not np.ndarray:
            yield from self.content.children(node.items, live)

    def read(self, live: Any, name: str) -> Any:
        """Returns an attribute of a live object, or of its class, as it is stored, or MISSING."""
        if name.startswith(CLASS):
            holder = self.class_attributes.get(name.removeprefix(CLASS))
            return MISSING if holder is None else holder.__dict__[name.removeprefix(CLASS)]
        stored = own_attributes(live)
        if stored is not None and name in stored:
            return stored[name]
        return next((read_slot(slot, live, MISSING) for known, slot in self.slots if known == name), MISSING)

    def create(self, rebuild: Rebuild, node: Any) -> Any:
        constant: Any = self.base
        if constant is None:
            return types.SimpleNamespace() if self.cls is types.SimpleNamespace else object.__new__(self.cls)
        if self.base is np.ndarray:
            return node.items.copy().view(self.cls)
        if self.content is None:
            return constant.__new__(self.cls, node.items)
        if self.constant:
            return constant.__new__(self.cls, [rebuild.value(child) for child in _content_nodes(node.items)])
        return constant.__new__(self.cls)

    def fill(self, rebuild: Rebuild, node: Any, target: Any) -> None:
        stored = own_attributes(target)
        slots = dict(self.slots)
        skip = self.skip
        for name, descriptor in self.slots:
            if name not in node.attributes and name not in skip:
                old = read_slot(descriptor, target, MISSING)
                if old is not MISSING and not _stays(rebuild, old):
                    descriptor.__delete__(target)
        if stored is not None:
            for name in [name for name in stored if name not in node.attributes and name not in skip]:
                if not _stays(rebuild, stored[name]):
                    del stored[name]
        names = []
        for name, child in node.attributes.items():
            if name in skip:
                continue
            old = self.read(target, name)
            new = rebuild.value(child, old)
            if new is MISSING or is_moved_path(new, old):
                new = old
            if new is MISSING:
                continue
            if name.startswith(CLASS):
                if new is not old and name.removeprefix(CLASS) in self.class_attributes:
                    setattr(self.class_attributes[name.removeprefix(CLASS)], name.removeprefix(CLASS), new)
            elif name in slots:
                if new is not old:
                    slots[name].__set__(target, new)
            elif stored is not None:
                names.append(name)
                if new is not old:
                    stored[name] = new
        if stored is not None:
            _order(stored, names)
        if self.base is np.ndarray:
            ARRAYS.fill(rebuild, node.items, target.view(np.ndarray))
        elif self.content is not None and not self.constant:
            self.content.fill(rebuild, node.items, target)


def _stays(rebuild: Rebuild, value: Any) -> bool:
    """Whether a live attribute that the state does not have is kept: resources are (a window that was opened since)."""
    node = rebuild.matching.live_node(value)
    return isinstance(node, ObjectState) and node.type_name == RESOURCE


def _order(stored: dict[str, Any], names: list[str]) -> None:
    """Makes the attributes stand in the state's order, for programs iterate over `vars(self)`."""
    wanted = set(names)
    if [name for name in stored if name in wanted] != names:
        for name in names:
            stored[name] = stored.pop(name)


def _content_nodes(items: Any) -> Any:
    return items.items if isinstance(items, ObjectState) else items


def _equal_constants(one: Any, other: Any) -> bool:
    if isinstance(one, tuple | list) and isinstance(other, tuple | list):
        return len(one) == len(other) and all(map(_equal_constants, one, other))
    if isinstance(one, ObjectState) and isinstance(other, ObjectState):
        return False
    return containers.same(one, other)


class ProtocolKind(Kind):
    """Objects with `state_dict` and `load_state_dict` of their own, or with an adapter: what these say is the state.

    Args:
        type_name: of the class.
        adapter: reads and writes the state.
        inner: an attribute that is walked besides: the env inside a wrapper, for a wrapper speaks for itself alone; the
            device model inside a link.
    """

    def __init__(self, type_name: str, adapter: Adapter, *, inner: str | None = None) -> None:
        self.type_name = type_name
        self.adapter = adapter
        self.inner = inner

    def capture(self, run: Capture, value: Any) -> Any:
        node = run.memo.get(id(value))
        if node is None:
            node = run.memo[id(value)] = ObjectState(PROTOCOL, {"class": self.type_name})
            try:
                node.attributes["state"] = copy_tree(self.adapter.get(value))
            except UnsupportedStateError as error:
                raise Unsupported(self.type_name, f"in what its state_dict() or adapter returns, {error}") from None
            if self.inner is not None:
                node.attributes["inner"] = run.child(own_attributes(value)[self.inner], self.inner)  # type: ignore[index]
        return node

    def children(self, node: Any, live: Any) -> Iterator[Child]:
        if self.inner is not None and "inner" in node.attributes:
            yield self.inner, node.attributes["inner"], MISSING if live is MISSING else live.__dict__[self.inner]

    def fits(self, matching: Matching, node: Any, live: Any) -> bool:
        return bool(qualified_name(type(live)) == node.attributes["class"])

    def problem(self, matching: Matching, node: Any, live: Any) -> str | None:
        return f"is a {node.attributes['class']} with a state of its own, and the live env has none at this place"

    def fill(self, rebuild: Rebuild, node: Any, target: Any) -> None:
        self.adapter.set(target, copy_tree(node.attributes["state"]))
        if self.inner is not None and "inner" in node.attributes:
            rebuild.value(node.attributes["inner"], target.__dict__[self.inner])


class ClockKind(Kind):
    """Marks of `time.perf_counter()`: the time passed since is kept, for another process has another clock."""

    mutable = False

    def make(self, rebuild: Rebuild, node: Any, live: Any) -> Any:
        now = time.perf_counter()
        passed = node.items
        if isinstance(passed, deque):
            return deque(passed, passed.maxlen)
        if isinstance(passed, np.ndarray):
            # unset marks (0 or -1) were stored as negative times
            return np.where(passed >= 0, now - passed, passed + 1)
        return type(passed)(now - passed if passed >= 0 else passed + 1)


def elapsed_since(mark: Any) -> Any:
    """Returns the node of a clock mark: time since [s], unset marks (not positive) less one; durations as they are."""
    now = time.perf_counter()
    if isinstance(mark, np.ndarray):
        return ObjectState(CLOCK, items=np.where(mark > 0, now - mark, mark - 1.0))
    if isinstance(mark, deque):
        # durations already
        return ObjectState(CLOCK, items=deque(mark, mark.maxlen))
    if isinstance(mark, int | float):
        return ObjectState(CLOCK, items=now - mark if mark > 0 else float(mark) - 1.0)
    return ObjectState(RESOURCE, {"class": "clock"})


BY_NAME: dict[str, Kind] = {
    RESOURCE: ResourceKind(RESOURCE),
    CLOCK: ClockKind(),
}
