"""Where the objects that hold hyperparameters lie in the components, for a restore may put others in their places."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from numbers import Number
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np

from simckpt.errors import OverrideNotAppliedError

LIMIT = 50_000  # objects that a search looks at, the near ones first; a vector env of 64 MuJoCo envs has about 20,000
WIDTH = 1000  # items of a list that it looks at: what holds a hyperparameter is no row of a log

Path = tuple[str, tuple[tuple[str, Any], ...]]
"""A component, and the steps from it: ("attribute", name) or ("item", key)."""

_PLAIN = (str, bytes, bytearray, Number, type(None), np.ndarray, np.generic, np.dtype)
_CODE = (ModuleType, type, FunctionType, MethodType, BuiltinFunctionType)


class Holder:
    """An object or a dict that holds a hyperparameter, and whatever a restore has put in its place.

    A restore fills most objects, but gives the variables of a loop, and an optimizer its groups, as new objects. What
    is bound is then what lies where the bound object lay before.

    Args:
        key: the hyperparameter.
        obj: the bound object.
        name: of the attribute, or the key of the entry, that has the value.
        where: for messages.
    """

    def __init__(self, key: str, obj: Any, name: Any, where: str) -> None:
        self._key = key
        self._obj = obj
        self._name = name
        self._where = where
        self._is_dict = isinstance(obj, Mapping)
        self._components: Mapping[str, Any] = {}
        self._paths: list[Path] = []

    def read(self, obj: Any) -> Any:
        """Returns the value in one of `objects`."""
        return obj[self._name] if self._is_dict else getattr(obj, self._name)

    def write(self, obj: Any, value: Any) -> None:
        """Sets the value in one of `objects`."""
        if self._is_dict:
            obj[self._name] = value
        else:
            setattr(obj, self._name, value)

    def objects(self) -> list[Any]:
        """Returns what holds the value now: all that lies where the bound object was found, and last that object.

        The program may read either: the loop's variable, or its own name for what that was made of.

        Raises:
            OverrideNotAppliedError: the bound object was part of a component, and nothing there has such a value now.
        """
        found = {id(obj): obj for obj in map(self._at, self._paths) if self._fits(obj)}
        if self._paths and not found:
            raise OverrideNotAppliedError(
                f"hyperparameter {self._key!r} is bound to {self._where}, which was {_spelled(self._paths[0])}; but "
                "that was replaced, and what is there now does not have it. Bind an object that stays, such as "
                f"component {self._paths[0][0]!r} itself, or name the key in from_args if the program reads it from "
                "its arguments alone",
                key=self._key,
            )
        found.setdefault(id(self._obj), self._obj)
        return list(found.values())

    def locate(self, paths: list[Path], components: Mapping[str, Any]) -> None:
        """Takes note of where the objects lie; of none, what was known before stays."""
        if paths:
            self._paths, self._components = paths, components

    def known(self) -> list[Any]:
        """Returns the objects to search for; raises nothing."""
        return [*(obj for obj in map(self._at, self._paths) if self._fits(obj)), self._obj]

    def _at(self, path: Path) -> Any:
        name, steps = path
        obj: Any = self._components.get(name)
        try:
            for kind, key in steps:
                obj = obj[key] if kind == "item" else object.__getattribute__(obj, key)
        except (LookupError, AttributeError, TypeError):
            return None
        return obj

    def _fits(self, obj: Any) -> bool:
        if self._is_dict:
            return isinstance(obj, Mapping) and self._name in obj
        return obj is not None and not isinstance(obj, Mapping) and hasattr(obj, self._name)


def locate(holders: Iterable[Holder], components: Mapping[str, Any]) -> None:
    """Finds out where the holders lie in the components, so that they are found again after a restore.

    What lies nowhere, such as a settings object of the program's own, stays bound as it is. So does what lies deeper
    than `LIMIT` objects.
    """
    holders = list(holders)
    if not holders:
        return
    sought = {id(obj): obj for holder in holders for obj in holder.known()}
    found = _paths_to(sought, components)
    for holder in holders:
        ids = {id(obj) for obj in holder.known()}
        holder.locate([path for each in sorted(ids & found.keys()) for path in found[each]], components)


def _paths_to(sought: Mapping[int, Any], components: Mapping[str, Any]) -> dict[int, list[Path]]:
    """Returns {id: paths} of the objects that are found: from each object that leads to it, by its shortest path."""
    found: dict[int, list[Path]] = {}
    # keeps what it has seen alive, for ids are used again
    seen: dict[int, Any] = {}
    pending: deque[tuple[Any, Path]] = deque((obj, (name, ())) for name, obj in components.items())
    while pending and len(seen) < LIMIT:
        obj, path = pending.popleft()
        if id(obj) in sought:
            found.setdefault(id(obj), []).append(path)
        if id(obj) in seen:
            continue
        seen[id(obj)] = obj
        name, steps = path
        pending.extend((child, (name, (*steps, step))) for step, child in _children(obj) if not _is_plain(child))
    return found


def _children(obj: Any) -> Iterator[tuple[tuple[str, Any], Any]]:
    """Yields (step, object) for the attributes and items of an object; asks no code of its class."""
    if isinstance(obj, dict):
        yield from ((("item", key), value) for key, value in list(dict.items(obj)))
    elif isinstance(obj, list | tuple | deque):
        yield from ((("item", index), value) for index, value in enumerate(list(islice(obj, WIDTH))))
    attributes = getattr(obj, "__dict__", None)
    if isinstance(attributes, dict):
        yield from ((("attribute", name), value) for name, value in list(attributes.items()))
    for kind in type(obj).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else tuple(slots):
            try:
                yield ("attribute", name), object.__getattribute__(obj, name)
            except (AttributeError, TypeError):
                continue


def _is_plain(obj: Any) -> bool:
    if isinstance(obj, _PLAIN + _CODE):
        return True
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(obj, torch.Tensor)


def _spelled(path: Path) -> str:
    name, steps = path
    return name + "".join(f".{key}" if kind == "attribute" else f"[{key!r}]" for kind, key in steps)
