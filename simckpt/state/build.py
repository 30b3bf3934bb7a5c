"""Puts a state tree together from the table that `walk` describes; without recursion, whatever a file may claim."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from simckpt.errors import FormatError, SimckptError
from simckpt.state import atoms, registry
from simckpt.state.leaf import Leaf

_NEW, _OPEN, _DONE = 0, 1, 2
_MAPPINGS = frozenset({"dict", "OrderedDict", "Counter", "defaultdict", "dataclass", "object"})
_HASHING = _MAPPINGS | {"set", "frozenset", "enum"}
# a tuple's hash goes through all that is in it, as often as it is in it: nodes shared by 60 levels of 10 are 10**60
_HASHED = 10_000_000  # parts of one key
_COLLISIONS = 1000  # keys of one hash in one container, each of which is compared with all before it


class Builder:
    """Builds the containers of one table, children first, so that each is finished with complete children.

    Mutable containers exist before their children, which may refer to them: that is how cycles come back.
    """

    def __init__(self, nodes: list[Any], leaves: Mapping[str, Leaf] | None) -> None:
        self._nodes = nodes
        # none: the values come from a Copier, which a file cannot imitate
        self._leaves = leaves
        self._objects: list[Any] = [None] * len(nodes)
        self._states = bytearray(len(nodes))
        self._ready = bytearray(len(nodes))
        self._templates: dict[int, Any] = {}
        self._weights: dict[int, int] = {}
        self._hashed = 0
        self._arrays: dict[str, Any] = {}
        self._marked: dict[tuple[str, str], Any] = {}

    def build(self, root: Any, template: Any = None) -> Any:
        """Returns the object of a value of the table.

        Args:
            root: the value.
            template: the live object at the same place; the only source of classes.

        Raises:
            FormatError: the table contradicts itself.
        """
        stack = [self._index(root)] if _is_node(root) else []
        if stack:
            self._templates[stack[0]] = template
        while stack:
            index = stack[-1]
            if self._states[index] == _NEW:
                self._open(index, stack)
            else:
                # the same node may wait twice on the stack; then it is done by now
                if self._states[index] == _OPEN:
                    self._finish(index)
                stack.pop()
        return self._resolve(root, template)

    def _open(self, index: int, stack: list[int]) -> None:
        kind, values, meta = self._record(index)
        template = self._templates.get(index)
        self._states[index] = _OPEN
        if kind.shell is not None:
            self._objects[index] = self._call(kind, kind.shell, meta, template)
            self._ready[index] = True
        templates = self._call(kind, kind.templates, template, values, meta) if template is not None else None
        for position in range(len(values) - 1, -1, -1):
            value = values[position]
            if _is_node(value):
                child = self._index(value)
                if self._states[child] == _NEW:
                    stack.append(child)
                    if templates is not None and templates[position] is not None:
                        self._templates[child] = templates[position]

    def _finish(self, index: int) -> None:
        kind, values, meta = self._record(index)
        template = self._templates.pop(index, None)
        templates = self._call(kind, kind.templates, template, values, meta) if template is not None else None
        if templates is None:
            children = [self._resolve(value, None) for value in values]
        else:
            children = [self._resolve(value, live) for value, live in zip(values, templates, strict=True)]
        if self._leaves is not None:
            self._weigh(index, kind, values, children)
        self._objects[index] = self._call(kind, kind.finish, self._objects[index], children, meta, template)
        self._ready[index] = True
        self._states[index] = _DONE

    def _weigh(self, index: int, kind: registry.ContainerKind, values: list[Any], children: list[Any]) -> None:
        """Refuses keys that take longer to hash or to compare than anybody could have waited for."""
        nodes = [self._weights.get(value["node"], 1) for value in values if _is_node(value)]
        if kind.shell is None:
            self._weights[index] = min(1 + len(values) + sum(nodes), 1 << 60)
        if kind.name not in _HASHING:
            return
        step = 2 if kind.name in _MAPPINGS else 1
        if nodes:
            # over all containers, for a heavy one may be part of many keys
            self._hashed += sum(self._weights.get(value["node"], 1) for value in values[::step] if _is_node(value))
            if self._hashed > _HASHED + 100 * len(self._nodes):
                raise FormatError(f"the keys of container {index} are too large to be hashed")
        if len(values) > _COLLISIONS:
            # what cannot be hashed is refused when the container is made
            with contextlib.suppress(TypeError):
                most = Counter(map(hash, children[::step])).most_common(1)
                if most[0][1] > _COLLISIONS:
                    raise FormatError(f"{most[0][1]} keys of container {index} have the same hash")

    def _resolve(self, value: Any, template: Any) -> Any:
        """Returns the object of a value whose node, if it is one, is finished or may be referred to already."""
        if type(value) is not dict:
            if type(value) is list:
                raise FormatError("a bare list stands where a value should")
            return value
        if _is_node(value):
            index = self._index(value)
            if not self._ready[index]:
                raise FormatError(
                    f"container {index} of the structure contains itself, which a container of its type cannot"
                )
            return self._objects[index]
        if "same" in value and self._leaves is None:
            return value["same"]
        if "leaf" in value:
            return self._array(value["leaf"], template)
        if "marked" in value:
            return self._marked_array(value["marked"], template)
        return atoms.from_json(value)

    def _leaf(self, place: Any) -> Leaf:
        leaf = self._leaves.get(place) if self._leaves is not None and type(place) is str else None
        if leaf is None:
            raise FormatError(f"the structure refers to a leaf {str(place)[:200]!r} that is not there")
        return leaf

    def _array(self, place: Any, template: Any) -> Any:
        leaf = self._leaf(place)
        if place not in self._arrays:
            kind = registry.leaf_kinds.get(leaf.kind)
            if kind is None:
                raise FormatError(
                    f"leaf {place!r} is of kind {leaf.kind!r}, which nobody registered: "
                    "call register_leaf before restoring"
                )
            try:
                self._arrays[place] = kind.from_leaf(leaf, template)
            except SimckptError:
                raise
            except Exception as error:
                raise FormatError(f"leaf {place!r} of kind {leaf.kind!r} cannot be read back: {error}") from error
        return self._arrays[place]

    def _marked_array(self, content: Any, template: Any) -> Any:
        if type(content) is not list or len(content) != 2:
            raise FormatError("a marked leaf is not [place, marks]")
        place, marks = content
        base = self._array(place, template)
        key = (place, repr(marks))
        if key not in self._marked:
            try:
                self._marked[key] = registry.leaf_kinds[self._leaf(place).kind].marked(base, marks)
            except Exception as error:
                raise FormatError(f"leaf {place!r} cannot have the marks {str(marks)[:80]!r}: {error}") from error
        return self._marked[key]

    def _index(self, value: dict[str, Any]) -> int:
        index = value["node"]
        if type(index) is not int or not 0 <= index < len(self._nodes):
            raise FormatError(f"the structure refers to a container {str(index)[:80]} of {len(self._nodes)}")
        return index

    def _record(self, index: int) -> tuple[registry.ContainerKind, list[Any], Any]:
        record = self._nodes[index]
        if (
            type(record) is not list
            or len(record) not in (2, 3)
            or type(record[0]) is not str
            or type(record[1]) is not list
        ):
            raise FormatError(f"container {index} of the structure is not [type, values] or [type, values, meta]")
        kind = registry.container_kinds.get(record[0])
        if kind is None:
            raise FormatError(
                f"the structure has a container of type {record[0][:80]!r}, which nobody registered: "
                "call register_container before restoring"
            )
        return kind, record[1], record[2] if len(record) == 3 else None

    def _call(self, kind: registry.ContainerKind, function: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return function(*arguments)
        except SimckptError:
            raise
        except Exception as error:
            # only a file can hold a record that does not fit its container; for a live copy it is a bug to be seen
            if self._leaves is None:
                raise
            raise FormatError(
                f"a container of type {kind.name!r} cannot be put together: {type(error).__name__}: {error}"
            ) from error


def _is_node(value: Any) -> bool:
    return type(value) is dict and "node" in value
