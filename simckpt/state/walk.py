"""Takes a state tree apart into a flat table of containers; without recursion, so that depth and cycles do not matter.

The table is what a file keeps, so there is one walk for encoding, copying and comparing. A value in it is

- a plain scalar that stands for itself;
- `{"node": n}`, the n-th container, or `{"leaf": place}`, an array: both may occur many times (aliases);
- `{type: text}`, another immutable value (see `atoms`), or while copying `{"same": object}`.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from simckpt.errors import UnsupportedStateError
from simckpt.state import paths, registry
from simckpt.state.leaf import Leaf
from simckpt.state.registry import ContainerKind, LeafKind

_ADVICE = (
    "give it state_dict() and load_state_dict(), register it (simckpt.state.register_container or register_leaf), "
    "or leave it out"
)


def qualified_name(cls: type) -> str:
    """Returns `module.Class`, without the module for builtins."""
    return cls.__qualname__ if cls.__module__ == "builtins" else f"{cls.__module__}.{cls.__qualname__}"


def refusal(
    obj: Any, path: str, reason: str = "is neither state nor a container that simckpt knows"
) -> UnsupportedStateError:
    """Returns the error for an object that cannot be captured."""
    name = qualified_name(type(obj))
    where = path or "the root of the state"
    return UnsupportedStateError(f"{where}: an object of type {name} {reason}; {_ADVICE}", path=path, type_name=name)


class Walker:
    """Walks one tree; the two subclasses decide what becomes of leaves, other immutable values and classes."""

    def __init__(self) -> None:
        self.nodes: list[list[Any] | None] = []
        self._memo: dict[int, dict[str, Any]] = {}
        # an id is unique only while its object lives, and flatten functions make new ones
        self._alive: list[Any] = []
        self._pending: list[tuple[int, ContainerKind, Any, str]] = []

    def walk(self, tree: Any) -> Any:
        """Returns the value of the root; `nodes` is complete afterwards."""
        root = self.value(tree, "")
        # the list grows while it is worked off
        for index, kind, obj, path in self._pending:
            self.nodes[index] = kind.flatten(self, obj, path)
        return root

    def value(self, obj: Any, path: str) -> Any:
        """Returns the value of any object; the content of a container follows later.

        Raises:
            UnsupportedStateError: nothing knows the object.
        """
        handler = registry.handlers.get(type(obj))
        if handler is None:
            handler = registry.resolve(obj)
            if handler is None:
                raise refusal(obj, path)
        return handler(self, obj, path)

    def child(self, obj: Any, path: str, key: str) -> Any:
        """Returns the value of the child of that name; the empty name means the path of the container itself."""
        return self.value(obj, paths.join(path, paths.path_part(key)) if key else path)

    def container(self, kind: ContainerKind, obj: Any, path: str) -> Any:
        """Returns the reference to a container, the same one each time."""
        reference = self._memo.get(id(obj))
        if reference is None:
            index = len(self.nodes)
            self.nodes.append(None)
            reference = self._memo[id(obj)] = {"node": index}
            self._alive.append(obj)
            self._pending.append((index, kind, obj, path))
        return reference

    def leaf(self, kind: LeafKind, obj: Any, path: str) -> Any:
        """Returns the value of an array, stored once however often it occurs."""
        raise NotImplementedError

    def atom(self, obj: Any, to_json: Callable[[Any], Any]) -> Any:
        """Returns the value of an immutable object."""
        raise NotImplementedError

    def class_meta(self, cls: type) -> Any:
        """Returns what the table keeps of a class."""
        raise NotImplementedError

    def json_meta(self, meta: Any, obj: Any, path: str) -> Any:
        """Returns the meta of a registered container."""
        raise NotImplementedError


class Encoder(Walker):
    """Walks a tree into leaves and JSON."""

    def __init__(self) -> None:
        super().__init__()
        self.leaves: dict[str, Leaf] = {}
        self._places = paths.Places()
        self._stored: dict[Any, str] = {}

    def leaf(self, kind: LeafKind, obj: Any, path: str) -> Any:
        """Returns `{"leaf": place}`, or `{"marked": [place, marks]}`."""
        reference = self._memo.get(id(obj))
        if reference is not None:
            return reference
        alias = kind.alias(obj)
        place = self._stored.get(alias) if alias is not None else None
        if place is None:
            try:
                leaf = kind.to_leaf(obj)
            except TypeError as error:
                raise refusal(obj, path, f"cannot be captured: {error}") from error
            place = self._places.take(path)
            self.leaves[place] = leaf
            if alias is not None:
                self._stored[alias] = place
        marks = kind.marks(obj)
        reference = {"leaf": place} if marks is None else {"marked": [place, marks]}
        self._memo[id(obj)] = reference
        self._alive.append(obj)
        return reference

    def atom(self, obj: Any, to_json: Callable[[Any], Any]) -> Any:
        """Returns the JSON form."""
        return to_json(obj)

    def class_meta(self, cls: type) -> str:
        """Returns the name, for people and for the comparison with the live class."""
        return qualified_name(cls)

    def json_meta(self, meta: Any, obj: Any, path: str) -> Any:
        """Returns the meta, after making sure that JSON brings it back."""
        try:
            if json.loads(json.dumps(meta, allow_nan=False)) == meta:
                return meta
        except (TypeError, ValueError, RecursionError):
            pass
        raise refusal(obj, path, "was flattened to a meta that JSON does not bring back")


class Copier(Walker):
    """Walks a tree into copied leaves; everything immutable, classes included, is kept as it is."""

    def __init__(self) -> None:
        super().__init__()
        self._bases: dict[Any, Any] = {}

    def leaf(self, kind: LeafKind, obj: Any, path: str) -> Any:
        """Returns `{"same": copy}`."""
        reference = self._memo.get(id(obj))
        if reference is not None:
            return reference
        alias = kind.alias(obj)
        base = self._bases.get(alias) if alias is not None else None
        if base is None:
            try:
                base = kind.copy(obj)
            except TypeError as error:
                raise refusal(obj, path, f"cannot be captured: {error}") from error
            if alias is not None:
                self._bases[alias] = base
        marks = kind.marks(obj)
        reference = {"same": base if marks is None else kind.marked(base, marks)}
        self._memo[id(obj)] = reference
        self._alive.append(obj)
        return reference

    def atom(self, obj: Any, to_json: Callable[[Any], Any]) -> Any:
        """Returns the object itself."""
        return {"same": obj}

    def class_meta(self, cls: type) -> type:
        """Returns the class itself."""
        return cls

    def json_meta(self, meta: Any, obj: Any, path: str) -> Any:
        """Returns the meta as it is."""
        return meta
