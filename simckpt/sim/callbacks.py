"""MuJoCo's process-global `mjcb_*` callbacks: what the Python functions behind them carry is state of the process."""

from __future__ import annotations

import dis
import types
from collections.abc import Iterator
from typing import Any

import mujoco

from simckpt.errors import UnsupportedStateError
from simckpt.sim.objects.layout import static_lookup

_GETTERS = tuple(
    (name.removeprefix("get_mjcb_"), getattr(mujoco, name)) for name in dir(mujoco) if name.startswith("get_mjcb_")
)


def installed_callbacks(path: str) -> dict[str, Any]:
    """Returns the callbacks that are set: `{"control": {"callback": function, "globals": {name: value}}}`.

    `globals` holds the variables of the function's module that its own code reads or rebinds, other than functions,
    classes and modules. What the functions it calls use is not seen.

    Args:
        path: of the env, for messages.

    Raises:
        UnsupportedStateError: a callback written in C.
    """
    found: dict[str, Any] = {}
    for name, getter in _GETTERS:
        callback = getter()
        if callback is None:
            continue
        if not callable(callback) or type(callback).__module__ == "ctypes":
            raise UnsupportedStateError(
                f"{path}: mjcb_{name} is a callback in C, whose state cannot be captured; set a Python function, or "
                "set it to None while the env is saved",
                path=f"{path}/mjcb_{name}",
                type_name=type(callback).__name__,
            )
        found[name] = {"callback": callback, "globals": global_variables(callback)}
    return found


def global_variables(callback: Any) -> dict[str, Any]:
    """Returns the module variables that the code of a callable names, by name."""
    function = _function_of(callback)
    if function is None:
        return {}
    return {
        name: function.__globals__[name]
        for name in sorted(set(_global_names(function.__code__)))
        if name in function.__globals__ and not _is_program(function.__globals__[name])
    }


def put_global_variables(callback: Any, variables: dict[str, Any]) -> None:
    """Rebinds module variables of a callable where they are other objects now."""
    function = _function_of(callback)
    if function is None:
        return
    for name, value in variables.items():
        if function.__globals__.get(name) is not value:
            function.__globals__[name] = value


def _function_of(callback: Any) -> types.FunctionType | None:
    while hasattr(callback, "func") and hasattr(callback, "keywords"):
        callback = callback.func
    callback = getattr(callback, "__func__", callback)
    if not isinstance(callback, types.FunctionType):
        callback = static_lookup(type(callback), "__call__")
    return callback if isinstance(callback, types.FunctionType) else None


def _global_names(code: types.CodeType) -> Iterator[str]:
    for instruction in dis.get_instructions(code):
        if instruction.opname in ("LOAD_GLOBAL", "STORE_GLOBAL", "LOAD_NAME") and isinstance(instruction.argval, str):
            yield instruction.argval
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _global_names(constant)


def _is_program(value: Any) -> bool:
    return isinstance(value, types.ModuleType | types.FunctionType | types.BuiltinFunctionType | type)
