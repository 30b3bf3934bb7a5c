"""Naming a function, as values that JSON can hold, so that another process finds it; nothing is pickled."""

from __future__ import annotations

import ast
import functools
import importlib
import importlib.util
import inspect
import itertools
import math
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from importlib.machinery import ModuleSpec, SourceFileLoader
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import numpy as np

from simckpt.errors import ConfigurationError

_SPAWNED = "__mp_main__"  # what multiprocessing calls the main module of the parent
_MAIN = ("__main__", _SPAWNED)
_ADVICE = "give a function at the top level of a module or script, or a functools.partial of one"


def described(function: Callable[..., Any]) -> dict[str, Any]:
    """Returns what another process needs to find a function, as values that JSON can hold.

    Args:
        function: of a module or a script, at its top level; or a `functools.partial` of one.

    Raises:
        ConfigurationError: another process cannot find it, or arguments of the partial that JSON cannot hold.
    """
    inner: Any = function
    arguments: tuple[Any, ...] = ()
    keywords: dict[str, Any] = {}
    if isinstance(function, functools.partial):
        inner, arguments, keywords = function.func, function.args, function.keywords
    shown = getattr(inner, "__qualname__", repr(inner))
    if not inspect.isfunction(inner) or not shown.isidentifier():
        raise _not_found(shown, _ADVICE)
    module, file = inner.__module__, None
    main = module in _MAIN
    if main:
        script = sys.modules[module]
        spec = getattr(script, "__spec__", None)
        path = Path(getattr(script, "__file__", None) or "")
        if not path.is_file():
            raise _not_found(shown, "it was defined in a notebook or at a prompt: put it into a module, and import it")
        _check_script(inner, path)
        check_main_part()
        if spec is not None and spec.name not in _MAIN:
            module = spec.name  # python -m
        else:
            file = str(path.absolute())
    else:
        _check_module(inner)
    try:
        held = _held([*arguments]), _held(keywords)
    except TypeError as error:
        raise ConfigurationError(
            f"the arguments of {shown} are more than JSON can hold: {error}", keys=["train"]
        ) from error
    return {"module": module, "file": file, "main": main, "name": shown, "arguments": held[0], "keywords": held[1]}


def check_main_part() -> None:
    """Checks that processes which run the script of this one, as spawned ones do, do not come to this call again.

    Raises:
        ConfigurationError: the script makes it at its top level, outside of its main part.
    """
    main = sys.modules["__main__"]
    script = Path(getattr(main, "__file__", None) or "")
    frame = inspect.currentframe()
    while frame is not None and not (frame.f_code.co_name == "<module>" and frame.f_globals is vars(main)):
        frame = frame.f_back
    if frame is None or not script.is_file() or not _same_file(frame.f_code.co_filename, str(script)):
        return
    try:
        nodes = ast.walk(ast.parse(script.read_bytes()))
    except (SyntaxError, ValueError):
        return  # compiled, and not to be looked into
    parts = [node.body for node in nodes if isinstance(node, ast.If) and _asks_for_main(node.test)]
    if not any(part[0].lineno <= frame.f_lineno <= (part[-1].end_lineno or 0) for part in parts):
        raise ConfigurationError(
            f"other processes run {script}, too, and would come to line {frame.f_lineno} again: put "
            "`if __name__ == '__main__':` around what it calls"
        )


def check_call(function: Callable[..., Any], *arguments: Any, **keywords: Any) -> None:
    """Checks that a function can be called so, and does its work when it is called; raises ConfigurationError."""
    called = function.func if isinstance(function, functools.partial) else function
    if inspect.iscoroutinefunction(called) or inspect.isgeneratorfunction(called) or inspect.isasyncgenfunction(called):
        raise ConfigurationError(
            f"{called.__qualname__} does nothing when it is called: give a plain function, neither async nor one that "
            "yields",
            keys=["train"],
        )
    try:
        inspect.signature(function).bind(*arguments, **keywords)
    except (TypeError, ValueError) as error:
        given = ", ".join([*map(repr, arguments), *(f"{key}={value!r}" for key, value in keywords.items())])
        name = getattr(called, "__qualname__", repr(called))
        raise ConfigurationError(f"{name} cannot be called with ({given}): {error}", keys=["train"]) from error


def _not_found(name: str, why: str) -> ConfigurationError:
    return ConfigurationError(f"another process cannot find {name}: {why}", keys=["train"])


def _held(value: Any) -> Any:
    """Returns a value as JSON gives it back, a number of numpy as a plain one; raises TypeError if JSON cannot."""
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, list | tuple):
        return [_held(each) for each in value]
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return {key: _held(each) for key, each in value.items()}
    if value is None or isinstance(value, str | int) or (isinstance(value, float) and math.isfinite(value)):
        return value
    raise TypeError(f"{value!r} of type {type(value).__name__}")


def _check_module(function: FunctionType) -> None:
    """Checks that an import of a function's module, somewhere else, leads to it."""
    name, module = function.__qualname__, function.__module__
    loaded = sys.modules.get(module)
    if getattr(loaded, name, None) is not function:
        raise _not_found(name, f"module {module} has another value of that name, or none; {_ADVICE}")
    file = getattr(loaded, "__file__", None)
    spec = _importable(module)
    if spec is None or file is None or not spec.has_location or not _same_file(spec.origin, file):
        place = "is found nowhere on sys.path" if spec is None else f"is found on sys.path as {spec.origin}"
        raise _not_found(name, f"its module {module}, here from {file}, {place}: make it importable under that name")


def _importable(module: str) -> ModuleSpec | None:
    """Returns where an import finds a module; of one that is loaded, `importlib.util.find_spec` would tell that."""
    path, spec = None, None
    for part in itertools.accumulate(module.split("."), "{}.{}".format):
        finders = (getattr(finder, "find_spec", None) for finder in sys.meta_path)
        spec = next(filter(None, (find(part, path) for find in finders if find is not None)), None)
        if spec is None:
            return None
        path = spec.submodule_search_locations
    return spec


def _check_script(function: FunctionType, script: Path) -> None:
    """Checks that a script defines a function where another process that runs it comes by: not in its main part."""
    name = function.__qualname__
    try:
        bindings = set(_bindings(ast.parse(script.read_bytes()), in_main=False))
    except (SyntaxError, ValueError):
        return  # compiled, and not to be looked into
    if (name, "function", True) in bindings:
        raise _not_found(
            name,
            f"it is defined below `if __name__ == '__main__':` in {script}, which other processes skip: move it above",
        )
    written = inspect.unwrap(function).__code__.co_filename
    if not any(each[0] == name and not each[2] for each in bindings) or not _same_file(written, str(script)):
        raise _not_found(name, f"the top level of {script} does not define it; {_ADVICE}")


def _bindings(node: ast.AST, *, in_main: bool) -> Iterator[tuple[str, str, bool]]:
    """Yields (name, "function" or "value", whether in the main part) for what the top level of a script binds."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        yield node.name, "function", in_main
        return
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        yield node.id, "value", in_main
    main_part = node.body if isinstance(node, ast.If) and _asks_for_main(node.test) else []
    for child in ast.iter_child_nodes(node):
        yield from _bindings(child, in_main=in_main or child in main_part)


def _asks_for_main(test: ast.expr) -> bool:
    """Returns whether a condition is `__name__ == "__main__"`, or has it in it."""
    return any(
        isinstance(each, ast.Compare)
        and isinstance(each.ops[0], ast.Eq)
        and {ast.unparse(each.left), ast.unparse(each.comparators[0])} == {"__name__", "'__main__'"}
        for each in ast.walk(test)
    )


def _same_file(one: str | None, other: str | None) -> bool:
    return os.path.realpath(str(one)) == os.path.realpath(str(other))


def function_of(description: Mapping[str, Any]) -> Callable[..., Any]:
    """Returns the function that `described` described; imports its module, or runs its script but for its main part."""
    if description["main"]:
        module = _main_module(description["module"], description["file"])
    else:
        module = importlib.import_module(description["module"])
    function = getattr(module, description["name"])
    if description["arguments"] or description["keywords"]:
        function = functools.partial(function, *description["arguments"], **description["keywords"])
    found: Callable[..., Any] = function
    return found


def _main_module(name: str, file: str | None) -> ModuleType:
    """Returns what was the main module of the process that described a function, as the main module of this one.

    Checkpoints name the classes and functions of a script `__main__.<name>`. To be found when a branch is restored,
    they have these names here, too.
    """
    own = sys.modules["__main__"]
    if file is not None and own.__name__ == "__main__" and _is_file(own, file):
        return own
    loaded = sys.modules.get(_SPAWNED)
    if file is None:
        module = importlib.import_module(name)
    elif loaded is not None and _is_file(loaded, file):
        module = loaded
    else:
        module = _loaded(file)
    for value in list(vars(module).values()):
        if isinstance(value, FunctionType | type) and value.__module__ == module.__name__:
            value.__module__ = "__main__"
    module.__name__ = "__main__"
    sys.modules["__main__"] = module
    return module


def _is_file(module: ModuleType, file: str) -> bool:
    return _same_file(getattr(module, "__file__", None), file)


def _loaded(file: str) -> ModuleType:
    # a script's name may have any ending
    spec = importlib.util.spec_from_file_location(_SPAWNED, file) or importlib.util.spec_from_file_location(
        _SPAWNED, file, loader=SourceFileLoader(_SPAWNED, file)
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # dataclasses and the like look their module up by its name
    sys.modules[_SPAWNED] = module
    spec.loader.exec_module(module)
    return module
