"""Whether what is trained is still made of numbers."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Mapping
from types import FunctionType, ModuleType
from typing import Any

DEPTH = 4  # of attributes, entries and items in each other that are looked through for modules and optimizers
WIDTH = 1000  # entries of one container; longer ones are data
OBJECTS = 10_000  # that are looked at in one component


def non_finite_parameter(components: Mapping[str, Any]) -> str:
    """Returns which parameter, buffer or moment of the components is not finite; or nothing.

    Looks at modules, optimizers and parameters, and for those in attributes, dicts, lists and variables of a loop;
    calls nothing of the program. Of a buffer only NaN counts: masks are full of infinities.

    Args:
        components: {name: live object}.
    """
    torch = sys.modules.get("torch")
    if torch is None:
        return ""
    seen: set[int] = set()
    with torch.no_grad():
        for name, component in components.items():
            for what, tensor in _tensors(component, torch):
                if id(tensor) in seen or not tensor.is_floating_point():
                    continue
                seen.add(id(tensor))
                # of a tensor in parts this rank's: to look at the whole is a collective, and not all ranks look
                each = tensor.to_local() if hasattr(tensor, "to_local") else tensor
                # a sum is finite only if its terms are; one that overflows is looked at closely
                if math.isfinite(float(each.sum(dtype=torch.float32))):
                    continue
                is_buffer = what.startswith("buffer")
                if bool(torch.isnan(each).any() if is_buffer else not torch.isfinite(each).all()):
                    return f"{what} of {name!r} is not {'a number' if is_buffer else 'finite'}"
    return ""


def _tensors(component: Any, torch: Any) -> Iterator[tuple[str, Any]]:
    """Yields (what it is, tensor) of what is trained."""
    for path, found in _trained(component, torch, "", set(), DEPTH):
        inside = f" in {path!r}" if path else ""
        if isinstance(found, torch.nn.Module):
            for key, each in found.named_parameters():
                yield f"parameter {key!r}{inside}", each
            for key, each in found.named_buffers():
                yield f"buffer {key!r}{inside}", each
        elif isinstance(found, torch.optim.Optimizer):
            trained = (each for group in found.param_groups for each in group["params"])
            for place, each in enumerate(trained):
                yield f"parameter {place}{inside}", each
                for key, moment in found.state.get(each, {}).items():
                    if isinstance(moment, torch.Tensor):
                        yield f"{key!r} of parameter {place}{inside}", moment
        else:
            yield f"the parameter{inside}", found


def _trained(obj: Any, torch: Any, path: str, seen: set[int], depth: int) -> Iterator[tuple[str, Any]]:
    """Yields (path, object) of the modules, optimizers and parameters in an object; itself, if it is one."""
    if id(obj) in seen or len(seen) > OBJECTS or isinstance(obj, type | ModuleType | FunctionType):
        return
    seen.add(id(obj))
    if isinstance(obj, torch.nn.Module | torch.optim.Optimizer | torch.nn.Parameter):
        yield path, obj
        return
    if depth == 0:
        return
    if isinstance(obj, Mapping):
        parts = obj
    elif isinstance(obj, list | tuple):
        parts = dict(enumerate(obj))
    else:
        parts = getattr(obj, "__dict__", {})
    if len(parts) <= WIDTH:
        for key, value in list(parts.items()):
            yield from _trained(value, torch, f"{path}/{key}" if path else f"{key}", seen, depth - 1)
