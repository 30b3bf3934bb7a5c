"""Functions and what they carry: closures, defaults, bound objects, partials; and things that a name points to."""

# what the methods of a kind do is said once, in `Kind`
# ruff: noqa: D102

from __future__ import annotations

import ast
import collections
import functools
import gc
import hashlib
import itertools
import types
import weakref
from collections.abc import Collection, Iterator
from typing import Any

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
from simckpt.state.nodes import ObjectState
from simckpt.state.walk import qualified_name

REFERENCE = "simckpt.reference"
FUNCTION = "simckpt.function"
CELL = "simckpt.cell"
METHOD = "simckpt.method"
PARTIAL = "functools.partial"
COUNT = "itertools.count"
WEAK = "weakref"
PROXY = "mappingproxy"


class ReferenceKind(Kind):
    """Classes, modules, functions without state: told by their name, found in the live program."""

    mutable = False

    def capture(self, run: Capture, value: Any) -> Any:
        node = run.memo.get(id(value))
        if node is None:
            node = run.memo[id(value)] = ObjectState(
                REFERENCE, {"name": reference_name(value), "code": code_digest(value)}
            )
        return node

    def problem(self, matching: Matching, node: Any, live: Any) -> str | None:
        if self._find(matching, node, live) is MISSING:
            return f"is {node.attributes['name']}, which is not to be found in the live env"
        return None

    def make(self, rebuild: Rebuild, node: Any, live: Any) -> Any:
        found = self._find(rebuild.matching, node, live)
        if isinstance(found, types.FunctionType):
            # a function is a reference only while it carries nothing
            _drop_attributes(found, ())
        return found

    def _find(self, matching: Matching, node: Any, live: Any) -> Any:
        return matching.find_reference(node.attributes["name"], node.attributes["code"], live)


class FunctionKind(Kind):
    """Python functions. Those without closure, defaults or attributes are references."""

    def __init__(self, reference: ReferenceKind) -> None:
        self.reference = reference

    def capture(self, run: Capture, value: types.FunctionType) -> Any:
        node = run.memo.get(id(value))
        if node is not None:
            return node
        if not _carries_state(value):
            return self.reference.capture(run, value)
        node = ObjectState(FUNCTION, {"name": reference_name(value), "code": code_digest(value)})
        run.memo[id(value)] = node
        if value.__closure__:
            names = value.__code__.co_freevars
            node.attributes["closure"] = {
                name: run.child(cell, name) for name, cell in zip(names, value.__closure__, strict=True)
            }
        if value.__defaults__:
            node.attributes["defaults"] = run.child(value.__defaults__, "__defaults__")
        if value.__kwdefaults__:
            node.attributes["kwdefaults"] = run.child(value.__kwdefaults__, "__kwdefaults__")
        if value.__dict__:
            node.attributes["attributes"] = {
                name: run.child(item, name) for name, item in value.__dict__.items() if name != "__wrapped__"
            }
        return node

    def fits(self, matching: Matching, node: Any, live: Any) -> bool:
        return (
            isinstance(live, types.FunctionType)
            and reference_name(live) == node.attributes["name"]
            and set(live.__code__.co_freevars) >= set(node.attributes.get("closure", {}))
        )

    def children(self, node: Any, live: Any) -> Iterator[Child]:
        cells = {} if live is MISSING else dict(zip(live.__code__.co_freevars, live.__closure__ or (), strict=True))
        for name, child in node.attributes.get("closure", {}).items():
            yield f"{name}", child, cells.get(name, MISSING)
        for part, attribute in (("defaults", "__defaults__"), ("kwdefaults", "__kwdefaults__")):
            if part in node.attributes:
                yield attribute, node.attributes[part], MISSING if live is MISSING else getattr(live, attribute)
        for name, child in node.attributes.get("attributes", {}).items():
            yield name, child, MISSING if live is MISSING else live.__dict__.get(name, MISSING)

    def problem(self, matching: Matching, node: Any, live: Any) -> str | None:
        return (
            f"is the function {node.attributes['name']}, which the live env does not have at this place; if a reset "
            "or a step makes it, let that happen before the restore"
        )

    def fill(self, rebuild: Rebuild, node: Any, target: types.FunctionType) -> None:
        cells = dict(zip(target.__code__.co_freevars, target.__closure__ or (), strict=True))
        for name, child in node.attributes.get("closure", {}).items():
            rebuild.value(child, cells[name])
        if "defaults" in node.attributes:
            new = rebuild.value(node.attributes["defaults"], target.__defaults__)
            if new is not target.__defaults__:
                target.__defaults__ = new
        elif target.__defaults__:
            target.__defaults__ = None
        if "kwdefaults" in node.attributes:
            target.__kwdefaults__ = rebuild.value(node.attributes["kwdefaults"], target.__kwdefaults__)
        elif target.__kwdefaults__:
            target.__kwdefaults__ = None
        _drop_attributes(target, node.attributes.get("attributes", {}))
        for name, child in node.attributes.get("attributes", {}).items():
            target.__dict__[name] = rebuild.value(child, target.__dict__.get(name, MISSING))


class CellKind(Kind):
    """The variable of a closure, which several functions may share."""

    def capture(self, run: Capture, value: types.CellType) -> Any:
        node = run.memo.get(id(value))
        if node is None:
            node = run.memo[id(value)] = ObjectState(CELL)
            try:
                content = value.cell_contents
            except ValueError:
                return node
            node.attributes["content"] = run.node(content)
        return node

    def fits(self, matching: Matching, node: Any, live: Any) -> bool:
        return isinstance(live, types.CellType)

    def children(self, node: Any, live: Any) -> Iterator[Child]:
        if "content" in node.attributes:
            yield "cell_contents", node.attributes["content"], _content(live)

    def problem(self, matching: Matching, node: Any, live: Any) -> str | None:
        return None

    def create(self, rebuild: Rebuild, node: Any) -> Any:
        return types.CellType()

    def fill(self, rebuild: Rebuild, node: Any, target: types.CellType) -> None:
        if "content" in node.attributes:
            old = _content(target)
            new = rebuild.value(node.attributes["content"], old)
            if new is not old:
                target.cell_contents = new
        elif _content(target) is not MISSING:
            del target.cell_contents


class MethodKind(Kind):
    """Bound methods: the object and the name of the method."""

    mutable = False

    def capture(self, run: Capture, value: Any) -> Any:
        # a bound method is made anew at every access, so it is nobody's identity
        function = getattr(value, "__func__", None)
        node = ObjectState(METHOD, {"name": value.__name__})
        if function is not None and static_function(type(value.__self__), value.__name__) is not function:
            node.attributes["function"] = run.child(function, "__func__")
        node.attributes["self"] = run.child(value.__self__, "__self__")
        return node

    def children(self, node: Any, live: Any) -> Iterator[Child]:
        yield "__self__", node.attributes["self"], getattr(live, "__self__", MISSING)
        if "function" in node.attributes:
            yield "__func__", node.attributes["function"], getattr(live, "__func__", MISSING)

    def problem(self, matching: Matching, node: Any, live: Any) -> str | None:
        if getattr(live, "__name__", None) == node.attributes["name"] or "function" in node.attributes:
            return None
        owner = matching.partner(node.attributes["self"])
        if owner is not MISSING and static_function(type(owner), node.attributes["name"]) is not None:
            return None
        return f"is a method {node.attributes['name']!r}, which the live object does not have"

    def make(self, rebuild: Rebuild, node: Any, live: Any) -> Any:
        owner = rebuild.value(node.attributes["self"], getattr(live, "__self__", MISSING))
        name = node.attributes["name"]
        if "function" in node.attributes:
            function = rebuild.value(node.attributes["function"], getattr(live, "__func__", MISSING))
        else:
            function = static_function(type(owner), name)
        same = getattr(live, "__self__", MISSING) is owner and getattr(live, "__name__", None) == name
        if same and (function is None or getattr(live, "__func__", function) is function):
            return live
        if isinstance(function, types.FunctionType):
            return types.MethodType(function, owner)
        return function.__get__(owner)


class PartialKind(Kind):
    """functools.partial."""

    def capture(self, run: Capture, value: functools.partial[Any]) -> Any:
        node = run.memo.get(id(value))
        if node is None:
            node = run.memo[id(value)] = ObjectState(PARTIAL)
            for name in ("func", "args", "keywords", "__dict__"):
                node.attributes[name] = run.child(getattr(value, name), name)
        return node

    def fits(self, matching: Matching, node: Any, live: Any) -> bool:
        return type(live) is functools.partial

    def children(self, node: Any, live: Any) -> Iterator[Child]:
        for name, child in node.attributes.items():
            yield name, child, MISSING if live is MISSING else getattr(live, name)

    def create(self, rebuild: Rebuild, node: Any) -> Any:
        return functools.partial(_placeholder)

    def fill(self, rebuild: Rebuild, node: Any, target: functools.partial[Any]) -> None:
        parts = {name: rebuild.value(child, getattr(target, name)) for name, child in node.attributes.items()}
        if any(parts[name] is not getattr(target, name) for name in parts):
            target.__setstate__((parts["func"], parts["args"], parts["keywords"], parts["__dict__"]))  # type: ignore[attr-defined]


class CountKind(Kind):
    """itertools.count, which shows its place in its repr and cannot be moved: another place means another counter."""

    def capture(self, run: Capture, value: Any) -> Any:
        node = run.memo.get(id(value))
        if node is None:
            node = run.memo[id(value)] = ObjectState(COUNT, {"arguments": _count_arguments(value)})
        return node

    def fits(self, matching: Matching, node: Any, live: Any) -> bool:
        return type(live) is itertools.count and _count_arguments(live) == node.attributes["arguments"]

    def create(self, rebuild: Rebuild, node: Any) -> Any:
        return itertools.count(*node.attributes["arguments"])

    def fill(self, rebuild: Rebuild, node: Any, target: Any) -> None:
        return


class WeakKind(Kind):
    """weakref.ref to an object of the graph."""

    mutable = False

    def capture(self, run: Capture, value: Any) -> Any:
        referent = value()
        return ObjectState(WEAK, {"referent": None if referent is None else run.child(referent, "()")})

    def children(self, node: Any, live: Any) -> Iterator[Child]:
        yield "()", node.attributes["referent"], live() if isinstance(live, weakref.ref) else MISSING

    def make(self, rebuild: Rebuild, node: Any, live: Any) -> Any:
        current = live() if isinstance(live, weakref.ref) else MISSING
        wanted = rebuild.value(node.attributes["referent"], current)
        if isinstance(live, weakref.ref) and current is wanted:
            return live
        return _dead_reference() if wanted is None else weakref.ref(wanted)


class ProxyKind(Kind):
    """types.MappingProxyType and the views of a dict: views again of the mapping that they show."""

    mutable = False

    def capture(self, run: Capture, value: Any) -> Any:
        content = _viewed(value)
        if isinstance(content, dict) and "__module__" in content and "__doc__" in content:
            raise Unsupported(qualified_name(type(value)), "it shows the attributes of a class; hold the class instead")
        return ObjectState(PROXY, {"class": type(value).__name__, "content": run.child(content, "mapping")})

    def children(self, node: Any, live: Any) -> Iterator[Child]:
        yield "mapping", node.attributes["content"], _viewed(live) if type(live) in _VIEWS else MISSING

    def make(self, rebuild: Rebuild, node: Any, live: Any) -> Any:
        current = _viewed(live) if type(live) in _VIEWS else MISSING
        wanted = rebuild.value(node.attributes["content"], current)
        if current is wanted and type(live).__name__ == node.attributes["class"]:
            return live
        for kind in ("values", "keys", "items"):
            if node.attributes["class"].endswith(f"_{kind}"):
                return getattr(wanted, kind)()
        return types.MappingProxyType(wanted)


_VIEWS: tuple[type, ...] = (
    types.MappingProxyType,
    *(type(getattr(cls(), kind)()) for cls in (dict, collections.OrderedDict) for kind in ("keys", "values", "items")),
)


def _viewed(value: Any) -> Any:
    """Returns the live mapping behind a view: a dict that others may hold as well stays the one that is seen."""
    # nothing in Python hands it out, but it is the one object that the view refers to
    return gc.get_referents(value)[0]


def reference_name(value: Any) -> str:
    """Returns the name that tells a function, class or module apart from others in a program."""
    if isinstance(value, types.ModuleType):
        return f"module {value.__name__}"
    name = getattr(value, "__qualname__", None) or getattr(value, "__name__", None)
    if name is None:
        return repr(value)
    return f"{getattr(value, '__module__', None) or getattr(type(value), '__module__', '')}.{name}"


def code_digest(value: Any) -> str | None:
    """Returns a digest of the code of a function that its name alone does not tell apart (lambdas, local functions)."""
    code = getattr(value, "__code__", None)
    if code is None or "<" not in getattr(value, "__qualname__", ""):
        return None
    constants = [constant for constant in code.co_consts if type(constant) in PLAIN]
    text = repr((code.co_names, code.co_varnames, constants)).encode()
    return hashlib.blake2b(code.co_code + text, digest_size=8).hexdigest()


def static_function(cls: type, name: str) -> Any:
    """Returns the function or built-in method that a class defines under a name, or None."""
    for base in cls.__mro__:
        if name in base.__dict__:
            found = base.__dict__[name]
            is_method = callable(found) and hasattr(type(found), "__get__") and not isinstance(found, type)
            return found if is_method else None
    return None


def _carries_state(function: types.FunctionType) -> bool:
    defaults = (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())
    return bool(function.__closure__ or function.__dict__ or any(type(item) not in PLAIN for item in defaults))


def _drop_attributes(function: types.FunctionType, wanted: Collection[str]) -> None:
    """Removes the attributes that a function got after it was captured."""
    for name in [name for name in function.__dict__ if name not in wanted and name != "__wrapped__"]:
        del function.__dict__[name]


def _content(cell: Any) -> Any:
    try:
        return MISSING if cell is MISSING else cell.cell_contents
    except ValueError:
        return MISSING


def _count_arguments(value: Any) -> tuple[Any, ...]:
    try:
        found = ast.literal_eval(repr(value).removeprefix("count"))
    except (ValueError, SyntaxError):
        raise Unsupported(qualified_name(type(value)), "it counts something that is not a plain number") from None
    return found if isinstance(found, tuple) else (found,)


def _identical(one: Any, other: Any) -> bool:
    return one is other or (type(one) is type(other) and type(one) in PLAIN and repr(one) == repr(other))


def _placeholder() -> None:
    """Stands in a partial until its function is known."""


class _Gone:
    """An object that is dropped at once."""


def _dead_reference() -> weakref.ref[Any]:
    return weakref.ref(_Gone())


REFERENCES = ReferenceKind()
FUNCTIONS = FunctionKind(REFERENCES)
METHODS = MethodKind()
BY_NAME: dict[str, Kind] = {
    REFERENCE: REFERENCES,
    FUNCTION: FUNCTIONS,
    CELL: CellKind(),
    METHOD: METHODS,
    PARTIAL: PartialKind(),
    COUNT: CountKind(),
    WEAK: WeakKind(),
    PROXY: ProxyKind(),
}
BY_CLASS: dict[type, Kind] = {
    types.FunctionType: FUNCTIONS,
    types.MethodType: METHODS,
    types.CellType: BY_NAME[CELL],
    types.ModuleType: REFERENCES,
    types.GenericAlias: REFERENCES,
    types.UnionType: REFERENCES,
    types.WrapperDescriptorType: REFERENCES,
    types.MethodDescriptorType: REFERENCES,
    types.GetSetDescriptorType: REFERENCES,
    types.MemberDescriptorType: REFERENCES,
    property: REFERENCES,
    functools.partial: BY_NAME[PARTIAL],
    itertools.count: BY_NAME[COUNT],
    weakref.ref: BY_NAME[WEAK],
    **dict.fromkeys(_VIEWS, BY_NAME[PROXY]),
}


class BuiltinKind(Kind):
    """Built-in functions are references; bound to an object (`list.append`, `rng.normal`) they are methods."""

    def capture(self, run: Capture, value: Any) -> Any:
        owner = getattr(value, "__self__", None)
        if owner is None or isinstance(owner, types.ModuleType | type):
            return REFERENCES.capture(run, value)
        return METHODS.capture(run, value)


BY_CLASS[types.BuiltinFunctionType] = BuiltinKind()
BY_CLASS[types.MethodWrapperType] = BuiltinKind()
