"""Dicts of all kinds in a state tree: their values alternate keys and children, so keys may be anything too."""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Sequence
from typing import Any

from simckpt.state import paths
from simckpt.state.registry import ContainerKind, add_container
from simckpt.state.walk import Walker, refusal

# what JSON can say as it is
PLAIN = (str, int, float, bool, type(None))
# all that a default_factory may be: anything else is code
_FACTORIES: dict[str, Any] = {
    cls.__name__: cls
    for cls in (bool, bytes, bytearray, dict, float, int, list, set, str, tuple, deque, OrderedDict, Counter)
}


def items(walker: Walker, obj: dict[Any, Any], path: str) -> list[Any]:
    """Returns the values of a mapping's record: key, child, key, child, ..."""
    values: list[Any] = []
    # only keys of other types than str can get equal parts
    taken: set[str] | None = None if all(type(key) is str for key in obj) else set()
    for index, (key, child) in enumerate(obj.items()):
        # plain values are never refused, so their paths need not be spelled
        values.append(walker.value(key, path if type(key) in PLAIN else paths.join(path, f"%~key {index}")))
        if type(child) in PLAIN:
            values.append(walker.value(child, path))
            continue
        if taken is None:
            part = paths.path_part(key)
        else:
            part = paths.key_part(key, index, taken)
            taken.add(part)
        values.append(walker.value(child, paths.join(path, part)))
    return values


def fill(obj: dict[Any, Any], values: list[Any]) -> None:
    """Puts keys and children into an empty mapping.

    Raises:
        ValueError: a key twice, or without a child.
    """
    if len(values) % 2:
        raise ValueError("a mapping has a key without a value")
    # one by one: a Counter's update would count, and dict.update leaves an OrderedDict without its order
    for key, value in zip(values[::2], values[1::2], strict=True):
        obj[key] = value
    if 2 * len(obj) != len(values):
        raise ValueError("a mapping has the same key twice")


def key_templates(get: Callable[[Any], Any], values: list[Any]) -> list[Any]:
    """Returns the live objects of a mapping's values; keys have none, and only plain keys can be looked up."""
    return [get(values[i - 1]) if i % 2 and type(values[i - 1]) in PLAIN else None for i in range(len(values))]


def _mapping_templates(template: Any, values: list[Any], meta: Any) -> Sequence[Any] | None:
    if not isinstance(template, dict):
        return None
    # dict.get, for a defaultdict must not grow
    return key_templates(lambda key: dict.get(template, key), values)


def _flatten_dict(walker: Walker, obj: Any, path: str) -> list[Any]:
    return ["dict", items(walker, obj, path)]


def _flatten_attributed(name: str) -> Callable[[Walker, Any, str], list[Any]]:
    """Returns the flatten function of a dict subclass whose instances may have attributes (torch's state dicts do)."""

    def flatten(walker: Walker, obj: Any, path: str) -> list[Any]:
        values = items(walker, obj, path)
        attributes = vars(obj)
        if not attributes:
            return [name, values]
        values.append(walker.value(attributes, paths.join(path, "%~attributes")))
        return [name, values, "attributes"]

    return flatten


def _finish_attributed(shell: Any, values: list[Any], meta: Any, template: Any) -> Any:
    attributes = values.pop() if meta == "attributes" else {}
    fill(shell, values)
    for name, value in attributes.items():
        set_attribute(shell, name, value)
    return shell


def _flatten_defaultdict(walker: Walker, obj: Any, path: str) -> list[Any]:
    factory = obj.default_factory
    if factory is None:
        return ["defaultdict", items(walker, obj, path)]
    name = getattr(factory, "__name__", "")
    if _FACTORIES.get(name) is not factory:
        raise refusal(obj, path, f"has a default_factory that is code ({factory!r})")
    return ["defaultdict", items(walker, obj, path), name]


def _finish_dict(shell: Any, values: list[Any], meta: Any, template: Any) -> Any:
    fill(shell, values)
    return shell


def _attributed_templates(template: Any, values: list[Any], meta: Any) -> Sequence[Any] | None:
    if not isinstance(template, dict):
        return None
    live = list(_mapping_templates(template, values, meta) or [])
    if meta == "attributes":
        live[-1] = getattr(template, "__dict__", None)
    return live


def set_attribute(obj: Any, name: Any, value: Any) -> None:
    """Sets an attribute that a file names: on frozen instances too, without running a setter of the class.

    Raises:
        ValueError: no text, or a name that Python itself uses.
    """
    if type(name) is not str or (name.startswith("__") and name.endswith("__")):
        raise ValueError(f"{str(name)[:80]!r} is not the name of an attribute")
    object.__setattr__(obj, name, value)


def _new(cls: type) -> Callable[[Any, Any], Any]:
    return lambda meta, template: cls()


def _new_defaultdict(meta: Any, template: Any) -> Any:
    return defaultdict(None if meta is None else _FACTORIES[meta])


add_container(ContainerKind("dict", _flatten_dict, _finish_dict, lambda meta, live: {}, _mapping_templates), dict)
add_container(
    ContainerKind("defaultdict", _flatten_defaultdict, _finish_dict, _new_defaultdict, _mapping_templates), defaultdict
)
for _cls in (OrderedDict, Counter):
    _kind = ContainerKind(
        _cls.__name__, _flatten_attributed(_cls.__name__), _finish_attributed, _new(_cls), _attributed_templates
    )
    add_container(_kind, _cls)
