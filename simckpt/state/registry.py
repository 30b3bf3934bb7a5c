"""What may stand in a state tree: kinds of leaves, kinds of containers, and the way from a type to one of them."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from simckpt.errors import ConfigurationError
from simckpt.state.leaf import Leaf

if TYPE_CHECKING:
    from simckpt.state.walk import Walker

# what a walker does with one object; returns the object's value in the node table
Handler = Callable[["Walker", Any, str], Any]


def _nothing(_: Any) -> None:
    return None


def _no_marks(base: Any, marks: Any) -> Any:
    raise TypeError("leaves of this kind have no marks")


@dataclass(frozen=True, eq=False, slots=True)
class LeafKind:
    """How one kind of array goes into a file and comes back.

    Attributes:
        name: what a file calls it.
        matches: whether an object is of this kind.
        to_leaf: raises TypeError for an object that cannot be written exactly.
        from_leaf: gets the leaf and the live object at the same place, or None.
        copy: returns a copy that shares no memory.
        alias: equal for two objects that are the same memory seen in the same way; None if that cannot be.
        marks: what a second object on the same memory may have of its own (JSON-able), None for nothing.
        marked: returns an object on the same memory with the marks.
    """

    name: str
    matches: Callable[[Any], bool]
    to_leaf: Callable[[Any], Leaf]
    from_leaf: Callable[[Leaf, Any], Any]
    copy: Callable[[Any], Any]
    alias: Callable[[Any], Hashable] = _nothing
    marks: Callable[[Any], Any] = _nothing
    marked: Callable[[Any, Any], Any] = _no_marks


@dataclass(frozen=True, eq=False, slots=True)
class ContainerKind:
    """How one kind of container is taken apart and put together.

    Attributes:
        name: its tag in the structure.
        flatten: returns the record `[tag, values]` or `[tag, values, meta]`.
        shell: returns the empty container that children may already refer to; None if it needs its children first.
        finish: gets the shell (or None), the children, the meta and the live object at the same place (or None);
            returns the container.
        templates: from the live object, the values and the meta: the live objects of the children.
    """

    name: str
    flatten: Callable[[Walker, Any, str], list[Any]]
    finish: Callable[[Any, list[Any], Any, Any], Any]
    shell: Callable[[Any, Any], Any] | None = None
    templates: Callable[[Any, list[Any], Any], Sequence[Any] | None] = lambda template, values, meta: None


leaf_kinds: dict[str, LeafKind] = {}
container_kinds: dict[str, ContainerKind] = {}
handlers: dict[type, Handler] = {}
# asked in turn for an object whose type is not in `handlers`; the first answer counts
resolvers: list[Callable[[Any], Handler | None]] = []
_registered_leaves: list[LeafKind] = []


def register_leaf(
    kind: str,
    matches: Callable[[Any], bool],
    to_leaf: Callable[[Any], Leaf],
    from_leaf: Callable[[Leaf], Any],
) -> None:
    """Makes a kind of array known, under a name that files keep.

    Args:
        kind: the name; a second registration under it replaces the first, but built-in names are taken.
        matches: whether an object is of this kind. Asked for objects of types that simckpt does not know itself.
        to_leaf: returns the leaf; its `kind` must be `kind`.
        from_leaf: returns the object for a leaf; must not keep the leaf's memory if it is read-only.

    Raises:
        ConfigurationError: the name belongs to a built-in kind.
    """
    known = leaf_kinds.get(kind)
    if known is not None and known not in _registered_leaves:
        raise ConfigurationError(f"{kind!r} is a built-in kind of leaf: choose another name", keys=("kind",))

    def copy(obj: Any) -> Any:
        leaf = to_leaf(obj)
        return from_leaf(Leaf(np.array(leaf.data, copy=True), leaf.dtype, leaf.shape, leaf.kind))

    added = LeafKind(kind, matches, to_leaf, lambda leaf, template: from_leaf(leaf), copy)
    if known is not None:
        _registered_leaves.remove(known)
    leaf_kinds[kind] = added
    _registered_leaves.append(added)


def register_container(
    name: str,
    cls: type,
    flatten: Callable[[Any], tuple[list[tuple[str, Any]], Any]],
    unflatten: Callable[[Any, list[tuple[str, Any]]], Any],
) -> None:
    """Makes a container class known, under a name that files keep.

    Subclasses of `cls` are not covered: they might carry more than `flatten` returns.

    Args:
        name: its name in files.
        cls: the class.
        flatten: returns the children by key, and anything that JSON can hold. The child of key "" lies at the path of
            the container itself.
        unflatten: gets the meta and the children back, complete; it must not import what the meta names.

    Raises:
        ConfigurationError: the name or the class is taken by another one.
    """
    known = container_kinds.get(name)
    if known is not None and name not in _registered_containers:
        raise ConfigurationError(f"{name!r} is a built-in container: choose another name", keys=("name",))
    if cls in handlers and _registered_containers.get(name) is not cls:
        raise ConfigurationError(f"{cls.__qualname__} is already a known container or leaf", keys=("cls",))

    def flatten_record(walker: Walker, obj: Any, path: str) -> list[Any]:
        children, meta = flatten(obj)
        values = [walker.child(child, path, key) for key, child in children]
        return [name, values, {"keys": [key for key, _ in children], "meta": walker.json_meta(meta, obj, path)}]

    def finish(_: Any, values: list[Any], meta: Any, template: Any) -> Any:
        keys = meta["keys"]
        if len(keys) != len(values) or not all(type(key) is str for key in keys):
            raise ValueError(f"container {name!r} has {len(values)} children and {len(keys)} keys")
        return unflatten(meta["meta"], list(zip(keys, values, strict=True)))

    def templates(template: Any, values: list[Any], meta: Any) -> Sequence[Any] | None:
        if type(template) is not cls:
            return None
        by_key = dict(flatten(template)[0])
        return [by_key.get(key) for key in meta["keys"]]

    old = _registered_containers.get(name)
    if old is not None:
        handlers.pop(old, None)
    _registered_containers[name] = cls
    add_container(ContainerKind(name, flatten_record, finish, None, templates), cls)


_registered_containers: dict[str, type] = {}


def add_container(kind: ContainerKind, *classes: type) -> None:
    """Adds a container kind, and makes it the one for objects of exactly these classes."""
    container_kinds[kind.name] = kind
    for cls in classes:
        handlers[cls] = container_handler(kind)


def container_handler(kind: ContainerKind) -> Handler:
    """Returns the handler that walks objects as this kind of container."""

    def handle(walker: Walker, obj: Any, path: str) -> Any:
        return walker.container(kind, obj, path)

    return handle


def add_leaf(kind: LeafKind, *classes: type) -> None:
    """Adds a leaf kind, and makes it the one for objects of exactly these classes."""
    leaf_kinds[kind.name] = kind
    for cls in classes:
        handlers[cls] = leaf_handler(kind)


def leaf_handler(kind: LeafKind) -> Handler:
    """Returns the handler that walks objects as this kind of leaf."""

    def handle(walker: Walker, obj: Any, path: str) -> Any:
        return walker.leaf(kind, obj, path)

    return handle


def resolve(obj: Any) -> Handler | None:
    """Returns the handler for an object whose exact type has none, or None if nothing knows it."""
    for kind in _registered_leaves:
        if kind.matches(obj):
            return leaf_handler(kind)
    for ask in resolvers:
        handler = ask(obj)
        if handler is not None:
            return handler
    return None
