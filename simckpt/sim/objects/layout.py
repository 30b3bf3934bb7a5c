"""Where Python keeps the attributes of an object, and whether a class hides memory that Python does not show."""

from __future__ import annotations

import types
from collections.abc import Iterator
from typing import Any

from simckpt.state.walk import qualified_name

_POINTER = tuple.__itemsize__


def hidden_layout(cls: type, known: frozenset[type]) -> str | None:
    """Returns the name of the first base that keeps memory of its own in C, or None if all state is visible.

    A class in Python grows by one pointer for each slot, its `__dict__` and its `__weakref__`; a class written in C
    grows by whatever it hides.

    Args:
        cls: the class.
        known: bases whose content is captured otherwise (dict, list, ndarray, ...); the check stops there.
    """
    current: type | None = cls
    while current is not None and current not in known:
        base = current.__base__
        if base is None:
            return None if current is object else qualified_name(current)
        explained = _POINTER * sum(1 for _ in _own_slots(current))
        if "__dict__" in current.__dict__ and current.__dictoffset__ > 0:
            explained += _POINTER
        if "__weakref__" in current.__dict__ and current.__weakrefoffset__ > 0:
            explained += _POINTER
        if current.__basicsize__ - base.__basicsize__ != explained or current.__itemsize__ != base.__itemsize__:
            return qualified_name(current)
        if not _made_in_python(current):
            return qualified_name(current)
        current = base
    return None


def _made_in_python(cls: type) -> bool:
    # static C types without extra fields may still keep state elsewhere; a class statement makes heap types alone
    heap_type = 1 << 9
    return bool(cls.__flags__ & heap_type)


def _own_slots(cls: type) -> Iterator[tuple[str, types.MemberDescriptorType]]:
    names = cls.__dict__.get("__slots__", ())
    for name in (names,) if isinstance(names, str) else tuple(names):
        if name in ("__dict__", "__weakref__"):
            continue
        if name.startswith("__") and not name.endswith("__"):
            name = f"_{cls.__name__.lstrip('_')}{name}"
        member = cls.__dict__.get(name)
        if isinstance(member, types.MemberDescriptorType):
            yield name, member


def slots_of(cls: type) -> list[tuple[str, types.MemberDescriptorType]]:
    """Returns name and descriptor of every slot along the MRO, base classes first."""
    return [slot for base in reversed(cls.__mro__) for slot in _own_slots(base)]


def own_attributes(value: Any) -> dict[str, Any] | None:
    """Returns the live `__dict__` of an object, without running code of its class, or None if it has none."""
    try:
        found = object.__getattribute__(value, "__dict__")
    except AttributeError:
        return None
    return found if type(found) is dict else None


def read_slot(descriptor: types.MemberDescriptorType, value: Any, default: Any) -> Any:
    """Returns the content of a slot, or `default` if it is empty."""
    try:
        return descriptor.__get__(value)
    except AttributeError:
        return default


def static_lookup(cls: type, name: str) -> Any:
    """Returns a class attribute as it stands in the MRO, running no descriptor, or None."""
    for base in cls.__mro__:
        if name in base.__dict__:
            return base.__dict__[name]
    return None
