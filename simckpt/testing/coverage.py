"""What in this process looks like training state and is reached by no component."""

from __future__ import annotations

import gc
import random
import sys
from collections.abc import Callable, Mapping
from types import BuiltinFunctionType, FrameType, ModuleType
from typing import Any

import numpy as np

from simckpt.state import RNGStreams

_BARRIERS = (ModuleType, type, FrameType, BuiltinFunctionType)  # what is reached through these is the whole program


def uncovered_objects(components: Mapping[str, Any]) -> list[str]:
    """Returns one line for each optimizer, root module and numpy generator that no component reaches."""
    kinds = _kinds()
    reached = _reachable(list(components.values()))
    candidates = [each for each in gc.get_objects() if isinstance_safely(each, kinds) and id(each) not in reached]
    global_generator = np.random.mtrand._rand
    inner = _reachable_modules(candidates)
    names = _names(sys._getframe(1))
    lines = {
        f"{_describe(each)}{names.get(id(each), '')} is alive, and no component reaches it"
        for each in candidates
        if id(each) not in inner and each is not global_generator
    }
    return sorted(lines)


class StreamWatch:
    """Notices whether the process's global random streams were drawn from since it was made."""

    def __init__(self) -> None:
        self._before = {name: read() for name, read in _streams().items()}

    def uncovered(self, components: Mapping[str, Any]) -> list[str]:
        """Returns one line for each global stream that moved, unless an `RNGStreams` is among the components."""
        if any(isinstance(component, RNGStreams) for component in components.values()):
            return []
        return [
            f"{name} was drawn from or seeded, and no component is a simckpt.RNGStreams()"
            for name, read in _streams().items()
            if name in self._before and read() != self._before[name]
        ]


def _streams() -> dict[str, Callable[[], Any]]:
    streams: dict[str, Callable[[], Any]] = {
        "Python's `random`": random.getstate,
        "numpy's global `numpy.random`": lambda: repr(np.random.get_state(legacy=False)),
    }
    torch = sys.modules.get("torch")
    if torch is not None:
        default = [torch.default_generator, *(torch.cuda.default_generators if torch.cuda.is_initialized() else ())]
        for generator in default:
            name = "torch's default generator" + (f" of {generator.device}" if generator.device.type != "cpu" else "")
            streams[name] = _reader(generator)
    return streams


def _reader(generator: Any) -> Callable[[], bytes]:
    return lambda: bytes(generator.get_state().numpy())


def _names(frame: FrameType | None) -> dict[int, str]:
    """Returns {id: where it is} of the variables on the stack, and of the attributes of local ones."""
    names: dict[int, str] = {}
    while frame is not None:
        variables = [*frame.f_locals.items(), *frame.f_globals.items()]
        for name, value in frame.f_locals.items():
            variables += [(f"{name}.{key}", each) for key, each in getattr(value, "__dict__", {}).items()]
        for name, value in variables:
            names.setdefault(id(value), f" (`{name}` in {frame.f_code.co_name})")
        frame = frame.f_back
    return names


def _kinds() -> tuple[type, ...]:
    kinds: list[type] = [np.random.Generator, np.random.RandomState]
    torch = sys.modules.get("torch")
    if torch is not None:
        kinds += [torch.nn.Module, torch.optim.Optimizer]
    return tuple(kinds)


def isinstance_safely(value: object, kinds: tuple[type, ...]) -> bool:
    """Returns whether the object's own type is one of the kinds; asks no proxy for its class."""
    return issubclass(type(value), kinds)


def _reachable(roots: list[Any]) -> set[int]:
    """Returns the ids of all that is referred to from the roots, not through modules and classes."""
    seen: set[int] = set()
    pending = list(roots)
    while pending:
        value = pending.pop()
        if id(value) in seen or isinstance_safely(value, _BARRIERS):
            continue
        seen.add(id(value))
        if isinstance(value, dict) and value.get("__builtins__") is not None:
            continue  # a module's globals
        pending += gc.get_referents(value)
    return seen


def _reachable_modules(candidates: list[Any]) -> set[int]:
    torch = sys.modules.get("torch")
    if torch is None:
        return set()
    return {
        id(inner)
        for module in candidates
        if isinstance_safely(module, (torch.nn.Module,))
        for inner in module.modules()
        if inner is not module
    }


def _describe(value: Any) -> str:
    kind = type(value)
    if hasattr(value, "parameters"):
        count = sum(parameter.numel() for parameter in value.parameters())
        return f"a {kind.__module__}.{kind.__qualname__} with {count:,} parameters"
    if hasattr(value, "bit_generator"):
        return f"a numpy Generator ({type(value.bit_generator).__name__})"
    return f"a {kind.__module__}.{kind.__qualname__}"
