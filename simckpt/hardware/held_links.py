"""The links that an env holds."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from types import ModuleType
from typing import Any

from simckpt.errors import ConfigurationError
from simckpt.hardware.link import Link

_NO_LINKS = frozenset({"builtins", "mujoco", "numpy", "torch", "weakref"})  # packages whose objects are not looked into


def links_of(env: Any) -> dict[str, Link]:
    """Returns the links that an env, its wrappers and the objects that they hold have as attributes, by their names.

    Outermost first. Dicts, lists and tuples are looked through, and objects that have a `__dict__`.

    Raises:
        ConfigurationError: two links have the same name.
    """
    found: dict[str, Link] = {}
    waiting, seen = deque([env]), {id(env)}
    while waiting:
        each = waiting.popleft()
        if isinstance(each, Link):
            if each.name in found:
                raise ConfigurationError(
                    f"two links of the env have the name {each.name!r}: give each its own, Link(..., name=...)",
                    keys=["name"],
                )
            found[each.name] = each
            continue
        for held in _held_by(each):
            if id(held) not in seen:
                seen.add(id(held))
                waiting.append(held)
    return found


def _held_by(each: Any) -> list[Any]:
    if isinstance(each, Mapping):
        return list(each.values())
    if isinstance(each, list | tuple):
        return list(each)
    if isinstance(each, type | ModuleType) or type(each).__module__.partition(".")[0] in _NO_LINKS:
        return []
    return list(getattr(each, "__dict__", {}).values())
