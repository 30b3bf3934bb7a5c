"""Immutable values: members of enums, and classes of the standard library that a few parts tell completely."""

# what the methods of a kind do is said once, in `Kind`
# ruff: noqa: D102

from __future__ import annotations

import datetime
import decimal
import enum
import fractions
import pathlib
import re
import sys
import types
import uuid
import zoneinfo
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from simckpt.sim.objects.containers import same
from simckpt.sim.objects.kind import MISSING, PLAIN, Capture, Child, Kind, Matching, Rebuild, Unsupported
from simckpt.state.nodes import ObjectState
from simckpt.state.walk import qualified_name

ENUM = "simckpt.enum"
IMMUTABLE = "simckpt.immutable"


def is_enum(cls: type) -> bool:
    """Returns whether a class is an enum of Python or of mujoco's bindings."""
    return issubclass(cls, enum.Enum) or (cls.__module__.startswith("mujoco") and hasattr(cls, "__members__"))


class EnumKind(Kind):
    """Members of enums, Python's and mujoco's."""

    mutable = False

    def capture(self, run: Capture, value: Any) -> Any:
        name = value.name if value.name is not None else ""
        number = value.value if isinstance(value.value, int | str) else None
        return ObjectState(ENUM, {"class": qualified_name(type(value)), "name": name, "value": number})

    def problem(self, matching: Matching, node: Any, live: Any) -> str | None:
        if self._find(matching, node, live) is None:
            return f"is {node.attributes['class']}.{node.attributes['name']}, which the live program does not have"
        return None

    def make(self, rebuild: Rebuild, node: Any, live: Any) -> Any:
        return self._find(rebuild.matching, node, live)

    def _find(self, matching: Matching, node: Any, live: Any) -> Any:
        wanted = node.attributes["class"]
        cls: Any = type(live)
        if qualified_name(cls) != wanted:
            cls = matching.find_class(wanted) or _loaded_enum(wanted)
        members = getattr(cls, "__members__", {})
        if node.attributes["name"] in members:
            return members[node.attributes["name"]]
        if cls is not None and issubclass(cls, enum.Flag) and isinstance(node.attributes["value"], int):
            return cls(node.attributes["value"])
        return None


def _loaded_enum(name: str) -> type | None:
    """Returns an enum of a module that is loaded; an env that was never reset need not have a member of it yet."""
    parts = name.split(".")
    for end in range(len(parts) - 1, 0, -1):
        found: Any = sys.modules.get(".".join(parts[:end]))
        for part in parts[end:]:
            found = vars(found).get(part) if isinstance(found, type | types.ModuleType) else None
        # a file must not be able to pick any other class of the interpreter
        if isinstance(found, type) and is_enum(found) and qualified_name(found) == name:
            return found
    return None


@dataclass(frozen=True)
class _Form:
    """How values of one class are taken apart and built.

    Attributes:
        cls: the class itself, for subclasses may hold more.
        parts: value -> its parts by name, other values among them.
        build: parts -> value.
    """

    cls: type
    parts: Callable[[Any], dict[str, Any]]
    build: Callable[..., Any]


def _text_form(cls: type, read: Callable[[str], Any] | None = None) -> _Form:
    return _Form(cls, lambda value: {"text": str(value)}, lambda text: (read or cls)(text))


def _moment_parts(value: Any) -> dict[str, Any]:
    return {"text": value.replace(tzinfo=None, fold=0).isoformat(), "fold": value.fold, "tzinfo": value.tzinfo}


def _timezone_parts(value: Any) -> dict[str, Any]:
    return dict(zip(("offset", "name"), value.__getinitargs__(), strict=False))


def _zone_parts(value: Any) -> dict[str, Any]:
    if value.key is None:
        raise Unsupported("zoneinfo.ZoneInfo", "it was read from a file and has no key")
    return {"key": value.key}


_FORMS: dict[str, _Form] = {
    "datetime.datetime": _Form(
        datetime.datetime,
        _moment_parts,
        lambda text, fold, tzinfo: datetime.datetime.fromisoformat(text).replace(fold=fold, tzinfo=tzinfo),
    ),
    "datetime.time": _Form(
        datetime.time,
        _moment_parts,
        lambda text, fold, tzinfo: datetime.time.fromisoformat(text).replace(fold=fold, tzinfo=tzinfo),
    ),
    "datetime.date": _text_form(datetime.date, datetime.date.fromisoformat),
    "datetime.timedelta": _Form(
        datetime.timedelta,
        lambda value: {"days": value.days, "seconds": value.seconds, "microseconds": value.microseconds},
        datetime.timedelta,
    ),
    "datetime.timezone": _Form(datetime.timezone, _timezone_parts, lambda **parts: datetime.timezone(*parts.values())),
    "zoneinfo.ZoneInfo": _Form(zoneinfo.ZoneInfo, _zone_parts, zoneinfo.ZoneInfo),
    "decimal.Decimal": _text_form(decimal.Decimal),
    "fractions.Fraction": _Form(
        fractions.Fraction,
        lambda value: {"numerator": value.numerator, "denominator": value.denominator},
        fractions.Fraction,
    ),
    "uuid.UUID": _text_form(uuid.UUID),
    "re.Pattern": _Form(re.Pattern, lambda value: {"pattern": value.pattern, "flags": value.flags}, re.compile),
    **{f"pathlib.{cls.__name__}": _text_form(cls) for cls in (pathlib.PurePosixPath, pathlib.PureWindowsPath)},
    f"pathlib.{type(pathlib.Path()).__name__}": _text_form(type(pathlib.Path())),
    "range": _Form(
        range,
        lambda value: {"start": value.start, "stop": value.stop, "step": value.step},
        lambda start, stop, step: range(start, stop, step),
    ),
    "ellipsis": _Form(type(...), lambda value: {}, lambda: ...),
    "NotImplementedType": _Form(type(NotImplemented), lambda value: {}, lambda: NotImplemented),
}
_NAMES = {form.cls: name for name, form in _FORMS.items()}
IMMUTABLES = frozenset(_NAMES)


class ImmutableKind(Kind):
    """Values of the standard library, kept as their parts: a time zone is a part of a moment."""

    mutable = False

    def capture(self, run: Capture, value: Any) -> Any:
        name = _NAMES[type(value)]
        parts = {part: run.child(item, part) for part, item in _FORMS[name].parts(value).items()}
        return ObjectState(IMMUTABLE, {"class": name, **parts})

    def children(self, node: Any, live: Any) -> Iterator[Child]:
        current = self._live_parts(node, live)
        for part, child in node.attributes.items():
            if part != "class":
                yield part, child, current.get(part, MISSING)

    def problem(self, matching: Matching, node: Any, live: Any) -> str | None:
        parts = {part: child for part, child in node.attributes.items() if part != "class"}
        form = _FORMS.get(node.attributes["class"])
        if form is None:
            return f"is a {node.attributes['class']}, which this version does not know"
        if all(type(child) in PLAIN for child in parts.values()):
            try:
                form.build(**parts)
            except (TypeError, ValueError, ArithmeticError, KeyError, re.error) as error:
                return f"is a {node.attributes['class']} that cannot be built: {error}"
        return None

    def make(self, rebuild: Rebuild, node: Any, live: Any) -> Any:
        current = self._live_parts(node, live)
        wanted = {part: rebuild.value(child, now) for part, child, now in self.children(node, live)}
        same_class = _NAMES.get(type(live)) == node.attributes["class"]
        if same_class and current.keys() == wanted.keys() and all(same(current[part], wanted[part]) for part in wanted):
            return live
        return _FORMS[node.attributes["class"]].build(**wanted)

    def _live_parts(self, node: Any, live: Any) -> dict[str, Any]:
        name = _NAMES.get(type(live))
        return _FORMS[name].parts(live) if name is not None and name == node.attributes["class"] else {}


BY_NAME: dict[str, Kind] = {ENUM: EnumKind(), IMMUTABLE: ImmutableKind()}
