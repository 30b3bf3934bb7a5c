"""Texts that explain the state of modules, optimizers and the like to people who open a checkpoint's file."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from simckpt.state.loop import LoopState
from simckpt.state.paths import path_part
from simckpt.state.streams import RNGStreams
from simckpt.state.walk import qualified_name

Attributes = dict[str, dict[str, str]]
"""{path of a leaf or group inside a component, "" for the component itself: {name: text}}."""

# entries of an optimizer's state by the names that torch's optimizers give them
_OPTIMIZER_ENTRIES = {
    "step": "number of updates so far",
    "exp_avg": "first moment: running mean of the gradient",
    "exp_avg_sq": "second moment: running mean of the squared gradient",
    "max_exp_avg_sq": "largest second moment so far",
    "exp_inf": "running maximum of the gradient's size",
    "momentum_buffer": "momentum: running sum of the gradient",
    "square_avg": "second moment: running mean of the squared gradient",
    "grad_avg": "first moment: running mean of the gradient",
    "acc_delta": "running mean of the squared updates",
    "sum": "sum of the squared gradients",
    "prev": "previous gradient",
    "step_size": "step size of each element",
    "mu_product": "product of the momentum factors",
    "ax": "running average of the parameter",
}
_STREAMS = {
    "python": "Stream of Python's random.",
    "numpy": "Stream of numpy.random's global functions.",
    "torch": "Default streams of torch, of the CPU and of each CUDA device.",
}


def explain_module(module: Any, paths: Iterable[str]) -> Attributes:
    """Returns the texts for the leaves of a torch module: parameter or buffer, and the class that it belongs to."""
    found: Attributes = {
        "": {
            "class": qualified_name(type(module)),
            "description": "Parameters and buffers of a torch module, by the names of its state_dict().",
        }
    }
    classes = {name: type(child).__name__ for name, child in module.named_modules()}
    wanted = set(paths)
    for what, tensors in (
        ("parameter", module.named_parameters(remove_duplicate=False)),
        ("buffer", module.named_buffers(remove_duplicate=False)),
    ):
        for name, _ in tensors:
            owner = classes.get(name.rpartition(".")[0], "")
            for path in (path_part(name), f"not_persistent/{path_part(name)}"):
                if path in wanted:
                    found[path] = {"description": f"{what} of a {owner}" if owner else what}
    return found


def explain_optimizer(optimizer: Any, paths: Iterable[str]) -> Attributes:
    """Returns the texts for the leaves of a torch optimizer: what each is, and of which parameter."""
    name = type(optimizer).__name__
    found: Attributes = {
        "": {
            "class": qualified_name(type(optimizer)),
            "description": "State of a torch optimizer, by the number of the parameter. Hyperparameters are in _tree.",
        }
    }
    parameters: dict[str, str] = {}
    for number, group in enumerate(optimizer.param_groups):
        names = group.get("param_names") or [""] * len(group["params"])
        for parameter, shape in zip(names, (tuple(each.shape) for each in group["params"]), strict=False):
            label = f" {parameter!r}" if parameter else ""
            parameters[str(len(parameters))] = f"parameter{label} of shape {shape} in group {number}"
    for path in paths:
        parts = path.split("/")
        if len(parts) < 3 or parts[0] != "state":
            continue
        if parts[1] in parameters:
            found.setdefault("/".join(parts[:2]), {"description": f"{name}'s entries for {parameters[parts[1]]}"})
        if parts[2] in _OPTIMIZER_ENTRIES:
            found[path] = {"description": f"{_OPTIMIZER_ENTRIES[parts[2]]} ({name})"}
    return found


def explain_object(obj: Any, paths: Iterable[str]) -> Attributes:
    """Returns the texts for an object that has a `state_dict()`: of what class it is."""
    if isinstance(obj, LoopState):
        return {"": {"description": "The training loop's own variables; those that are no arrays are in _tree."}}
    if not isinstance(obj, RNGStreams):
        return {"": {"class": qualified_name(type(obj)), "description": "What the object's state_dict() returned."}}
    found = {"": {"description": "Random streams: the next draws follow from them. Some lie in _tree alone."}}
    heads = {path.partition("/")[0] for path in paths}
    return found | {head: {"description": text} for head, text in _STREAMS.items() if head in heads}
