"""Instances of classes in a state tree; the classes come from the live objects, never from a file."""

from __future__ import annotations

import dataclasses
import enum
import types
from collections import deque
from collections.abc import Sequence
from typing import Any

from simckpt.errors import StateMismatchError
from simckpt.state.mappings import PLAIN, fill, items, key_templates, set_attribute
from simckpt.state.nodes import ObjectState
from simckpt.state.registry import ContainerKind, Handler, add_container, container_handler, container_kinds, resolvers
from simckpt.state.sequences import index_templates
from simckpt.state.walk import Walker, qualified_name, refusal

# a dataclass or an Enum that is also one of these would be two things at once
_BUILT_IN = (dict, list, tuple, set, frozenset, deque, str, int, float, complex, bytes, bytearray, BaseException)


def _live_class(meta: Any, template: Any) -> type | None:
    """Returns the class that a table means: its own while copying, or that of a live object if the name is the same."""
    cls = meta["class"]
    if isinstance(cls, type):
        return cls
    return type(template) if template is not None and qualified_name(type(template)) == cls else None


def _flatten_namedtuple(walker: Walker, obj: Any, path: str) -> list[Any]:
    if getattr(obj, "__dict__", None):
        raise refusal(obj, path, "is a namedtuple with attributes of its own")
    values = [walker.child(child, path, name) for name, child in zip(obj._fields, obj, strict=True)]
    return ["namedtuple", values, {"class": walker.class_meta(type(obj)), "fields": list(obj._fields)}]


def _finish_namedtuple(shell: Any, values: list[Any], meta: Any, template: Any) -> Any:
    cls: Any = _live_class(meta, template)
    if cls is None or list(getattr(cls, "_fields", ())) != meta["fields"] or len(values) != len(meta["fields"]):
        return tuple(values)
    return tuple.__new__(cls, values)


def _instance_attributes(obj: Any) -> dict[str, Any]:
    """Returns every attribute of a dataclass instance: its fields, slots too, and whatever was set beside them."""
    names = [field.name for field in dataclasses.fields(obj)]
    found = {name: getattr(obj, name) for name in names if name in getattr(obj, "__dict__", {}) or _has_slot(obj, name)}
    return found | {name: value for name, value in getattr(obj, "__dict__", {}).items() if name not in found}


def _has_slot(obj: Any, name: str) -> bool:
    return isinstance(getattr(type(obj), name, None), types.MemberDescriptorType) and hasattr(obj, name)


def _flatten_dataclass(walker: Walker, obj: Any, path: str) -> list[Any]:
    return ["dataclass", items(walker, _instance_attributes(obj), path), {"class": walker.class_meta(type(obj))}]


def _dataclass_shell(meta: Any, template: Any) -> Any:
    cls = _live_class(meta, template)
    return {} if cls is None or not dataclasses.is_dataclass(cls) else object.__new__(cls)


def _finish_dataclass(shell: Any, values: list[Any], meta: Any, template: Any) -> Any:
    if type(shell) is dict:
        fill(shell, values)
        return shell
    for name, value in zip(values[::2], values[1::2], strict=True):
        set_attribute(shell, name, value)
    return shell


def _attribute_templates(template: Any, values: list[Any], meta: Any) -> Sequence[Any] | None:
    if _live_class(meta, template) is None or not dataclasses.is_dataclass(template):
        return None
    # not getattr: a file must not choose which property of a live object runs
    return key_templates(_instance_attributes(template).get, values)


def _flatten_enum(walker: Walker, obj: Any, path: str) -> list[Any]:
    value = obj.value if type(obj.value) in PLAIN else obj.name
    return ["enum", [walker.value(value, path)], {"class": walker.class_meta(type(obj)), "name": obj.name}]


def _finish_enum(shell: Any, values: list[Any], meta: Any, template: Any) -> Any:
    cls: Any = _live_class(meta, template)
    if cls is None or not issubclass(cls, enum.Enum):
        return values[0]
    if meta["name"] in cls.__members__:
        return cls[meta["name"]]
    try:
        # a composite flag has no member of its own
        return cls(values[0])
    except ValueError as error:
        problem = f"{meta['class']} has no member {str(meta['name'])[:80]!r} any more"
        raise StateMismatchError(problem, problems=[problem]) from error


def _handle_enum(walker: Walker, obj: Any, path: str) -> Any:
    return walker.atom(obj, lambda member: walker.container(container_kinds["enum"], member, path))


def _flatten_object(walker: Walker, obj: ObjectState, path: str) -> list[Any]:
    if not all(type(name) is str for name in obj.attributes):
        raise refusal(obj, path, "has attributes whose names are no strings")
    values = items(walker, obj.attributes, path)
    if obj.items is None:
        return ["object", values, {"type": obj.type_name}]
    values.append(walker.value(obj.items, path))
    return ["object", values, {"type": obj.type_name, "items": True}]


def _object_shell(meta: Any, template: Any) -> ObjectState:
    if type(meta["type"]) is not str:
        raise ValueError("the name of a class is no string")
    return ObjectState(meta["type"])


def _finish_object(shell: ObjectState, values: list[Any], meta: Any, template: Any) -> ObjectState:
    if meta.get("items"):
        shell.items = values.pop()
    fill(shell.attributes, values)
    if not all(type(name) is str for name in shell.attributes):
        raise ValueError("the name of an attribute is no string")
    return shell


def _object_templates(template: Any, values: list[Any], meta: Any) -> Sequence[Any] | None:
    if not isinstance(template, ObjectState):
        return None
    live = key_templates(template.attributes.get, values)
    if meta.get("items"):
        live[-1] = template.items
    return live


def _find(obj: Any) -> Handler | None:
    """Returns the handler of an Enum member, a namedtuple or a dataclass."""
    cls = type(obj)
    if isinstance(obj, enum.Enum):
        return _handle_enum
    if (
        isinstance(obj, tuple)
        and hasattr(cls, "_fields")
        and all(base is tuple or hasattr(base, "_fields") for base in cls.__bases__)
    ):
        return container_handler(container_kinds["namedtuple"])
    if dataclasses.is_dataclass(cls) and not isinstance(obj, _BUILT_IN):
        return container_handler(container_kinds["dataclass"])
    return None


add_container(ContainerKind("namedtuple", _flatten_namedtuple, _finish_namedtuple, None, index_templates))
add_container(ContainerKind("dataclass", _flatten_dataclass, _finish_dataclass, _dataclass_shell, _attribute_templates))
add_container(ContainerKind("enum", _flatten_enum, _finish_enum))
add_container(ContainerKind("object", _flatten_object, _finish_object, _object_shell, _object_templates), ObjectState)
resolvers.append(_find)
