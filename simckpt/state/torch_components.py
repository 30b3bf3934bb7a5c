"""Handles of torch's modules, optimizers, schedulers, GradScaler and tensors. Imported only when torch is loaded."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch

from simckpt.errors import RestoreError, StateMismatchError
from simckpt.state.compare import differences
from simckpt.state.components import Handle, ProtocolHandle, capture_copy, mismatch
from simckpt.state.explanations import Attributes, explain_module, explain_optimizer
from simckpt.state.nodes import ObjectState
from simckpt.state.tree import copy_tree
from simckpt.state.walk import qualified_name


def torch_handle(name: str, obj: Any) -> Handle | None:
    """Returns the handle of an object of torch, or None if it is none."""
    if isinstance(obj, torch.nn.parallel.DistributedDataParallel):
        # the wrapper has no state: what it holds is how this process talks to the others
        return ModuleHandle(name, obj.module, broadcasts_buffers=obj.broadcast_buffers)
    if isinstance(obj, torch.nn.Module):
        return ModuleHandle(name, obj)
    if isinstance(obj, torch.optim.Optimizer):
        return OptimizerHandle(name, obj)
    if isinstance(obj, (torch.optim.lr_scheduler.LRScheduler, torch.amp.GradScaler)):
        return CheckedHandle(name, obj)
    if isinstance(obj, torch.Tensor):
        return TensorHandle(name, obj)
    return None


def _check_bits(name: str, live: Any, saved: Any) -> None:
    """Compares what an object has taken with what it was given.

    Raises:
        RestoreError: it changed the values on the way.
    """
    # whether two entries are one object is torch's business: moving them between devices may part them
    found = [difference for difference in differences(live, saved) if not difference.aliasing]
    if found:
        shown = "; ".join(map(str, found[:5]))
        raise RestoreError(f"component {name!r} took the state but changed it ({len(found)} differences): {shown}")


def _is_object(state: Any, *attributes: str) -> bool:
    return isinstance(state, ObjectState) and set(attributes) <= set(state.attributes)


# the last three say how the program spreads a module over ranks (fully_shard, parallelize_module): it may be restored
# into one that is spread in another way
_OF_TORCH = frozenset(vars(torch.nn.Module())) | {
    "_is_fsdp_managed_module",
    "_fsdp_use_orig_params",
    "_distribute_module_applied",
}
_NUMBERS = (bool, int, float, complex, np.generic)


def _own_attributes(module: torch.nn.Module) -> dict[str, Any]:
    """Returns the attributes of one module that hold numbers, tensors, arrays, or plain containers of these."""
    return {name: value for name, value in vars(module).items() if name not in _OF_TORCH and _is_plain(value)}


def _is_plain(value: Any) -> bool:
    if isinstance(value, torch.nn.Parameter):
        return False
    if isinstance(value, (*_NUMBERS, torch.Tensor)):
        return True
    if type(value) is np.ndarray:
        return not value.dtype.hasobject
    if type(value) in (list, tuple):
        return bool(value) and all(map(_is_plain, value))
    return type(value) is dict and bool(value) and all(map(_is_plain, value.values()))


def _set_attributes(module: torch.nn.Module, saved: dict[str, Any]) -> None:
    for name, value in saved.items():
        live = vars(module).get(name)
        if isinstance(live, torch.Tensor) and isinstance(value, torch.Tensor):
            if (live.shape, live.dtype) == (value.shape, value.dtype):
                live.detach().copy_(value)
                continue
            value = value.to(live.device)
        vars(module)[name] = copy_tree(value)


class _ComparedHandle:
    """Compares a state with the live object before anything changes, for torch's own loading raises halfway."""

    name: str
    what: str

    def validate(self, state: Any) -> None:
        """Compares keys, classes, groups, shapes and dtypes, as far as the object has them."""
        try:
            problems = self._problems(state)
        except (KeyError, TypeError, AttributeError) as error:
            problems = [f"the state is not one of {self.what}: {type(error).__name__}: {error}"]
        if problems:
            raise mismatch(self.name, problems)

    def _problems(self, state: Any) -> list[str]:
        """Returns what does not fit; a state that is none at all may raise KeyError, TypeError or AttributeError."""
        raise NotImplementedError


class ModuleHandle(_ComparedHandle):
    """The handle of a module.

    Its state is `state_dict()` (extra state included), buffers that are not persistent, `training` of each submodule,
    `requires_grad` of each parameter, and ordinary attributes that hold numbers, tensors, arrays, or lists, tuples and
    dicts of these. Not gradients: save between `optimizer.step()` and the next `backward()`, not while accumulating.
    Nor attributes of other types: state in those belongs into `get_extra_state`, as torch has it.

    Attributes:
        broadcasts_buffers: whether each forward pass begins by taking the buffers of rank 0 over.
    """

    what = "a module"

    def __init__(self, name: str, module: torch.nn.Module, *, broadcasts_buffers: bool = False) -> None:
        self.name = name
        self.module = module
        self.broadcasts_buffers = broadcasts_buffers

    def capture(self) -> Any:
        """Returns a node whose items are a copy of `state_dict()`."""
        return capture_copy(self.name, self._live())

    def _live(self) -> ObjectState:
        module = self.module
        state = module.state_dict()
        buffers = {name: buffer for name, buffer in module.named_buffers(remove_duplicate=False) if name not in state}
        flags = {
            "training": {name: child.training for name, child in module.named_modules()},
            "requires_grad": {name: parameter.requires_grad for name, parameter in module.named_parameters()},
            "not_persistent": buffers,
            "attributes": {name: found for name, child in module.named_modules() if (found := _own_attributes(child))},
        }
        return ObjectState("torch.nn.Module", flags, items=state)

    def attributes(self, paths: Iterable[str]) -> Attributes:
        """Returns texts that explain the state in a file."""
        return explain_module(self.module, paths)

    def _problems(self, state: Any) -> list[str]:
        if not _is_object(state, "training", "requires_grad", "not_persistent", "attributes") or not isinstance(
            state.items, dict
        ):
            return [f"the state is not one of {self.what}"]
        live = self._live()
        problems = _key_problems(live.items, state.items)
        for flag in ("training", "requires_grad"):
            problems += _key_problems(live.attributes[flag], state.attributes[flag], f"{flag} of ")
        modules = {name for name, _ in self.module.named_modules()}
        for name, buffer in state.attributes["not_persistent"].items():
            if name.rpartition(".")[0] not in modules or not isinstance(buffer, torch.Tensor):
                problems.append(f"{name}: a buffer that is not persistent, saved from a submodule that live lacks")
        for name, found in state.attributes["attributes"].items():
            if name not in modules or not isinstance(found, dict):
                problems.append(f"{name}: attributes saved from a submodule that live lacks")
        for key, here in live.items.items():
            saved = state.items.get(key)
            if isinstance(here, torch.Tensor) and key in state.items:
                if not isinstance(saved, torch.Tensor):
                    problems.append(f"{key}: saved as {type(saved).__name__}, live is a tensor")
                elif here.shape != saved.shape:
                    problems.append(f"{key}: saved with shape {tuple(saved.shape)}, live has {tuple(here.shape)}")
                elif here.dtype != saved.dtype:
                    problems.append(f"{key}: saved as {saved.dtype}, live is {here.dtype}")
        return problems

    def apply(self, state: Any) -> None:
        """Copies parameters and buffers in place, then sets the flags."""
        module = self.module
        # tensors are copied by torch; extra state may be kept as it is
        items = OrderedDict(
            (key, value if isinstance(value, torch.Tensor) else copy_tree(value)) for key, value in state.items.items()
        )
        if hasattr(state.items, "_metadata"):
            items._metadata = state.items._metadata  # type: ignore[attr-defined]
        try:
            with torch.no_grad():
                module.load_state_dict(items, strict=True)
                self._set_buffers(state.attributes["not_persistent"])
        except (RuntimeError, KeyError, ValueError, TypeError, AttributeError) as error:
            raise StateMismatchError(
                f"component {self.name!r}: the module did not take the state: {error}", problems=[str(error)]
            ) from error
        for name, child in module.named_modules():
            child.training = state.attributes["training"][name]
            _set_attributes(child, state.attributes["attributes"].get(name, {}))
        for name, parameter in module.named_parameters():
            parameter.requires_grad_(state.attributes["requires_grad"][name])
        _check_bits(self.name, self._live(), state)

    def _set_buffers(self, saved: dict[str, torch.Tensor]) -> None:
        """Sets the buffers that are not persistent: caches, which a module may have made, resized or dropped."""
        known = self.module.state_dict()
        live = {name: buffer for name, buffer in self.module.named_buffers(remove_duplicate=False) if name not in known}
        for name in live.keys() | saved.keys():
            owner_name, _, buffer_name = name.rpartition(".")
            here, value = live.get(name), saved.get(name)
            if here is not None and value is not None and (here.shape, here.dtype) == (value.shape, value.dtype):
                here.copy_(value)
                continue
            owner = self.module.get_submodule(owner_name)
            device = next(
                (
                    tensor.device
                    for tensor in (here, *owner.parameters(), *self.module.parameters())
                    if tensor is not None
                ),
                None,
            )
            owner.register_buffer(
                buffer_name, None if value is None else value.detach().clone().to(device), persistent=False
            )


def _key_problems(live: dict[str, Any], saved: dict[str, Any], what: str = "") -> list[str]:
    problems = [f"{what}{key}: not in the checkpoint" for key in live if key not in saved]
    return problems + [f"{what}{key}: only in the checkpoint" for key in saved if key not in live]


class OptimizerHandle(_ComparedHandle):
    """The handle of an optimizer. Parameters belong to the module; their shapes and dtypes are kept for the check."""

    what = "an optimizer"

    def __init__(self, name: str, optimizer: torch.optim.Optimizer) -> None:
        self.name = name
        self.optimizer = optimizer

    def capture(self) -> Any:
        """Returns a node whose items are a copy of `state_dict()`."""
        return capture_copy(self.name, self._live())

    def _live(self) -> ObjectState:
        parameters = [
            [{"shape": list(parameter.shape), "dtype": str(parameter.dtype)} for parameter in group["params"]]
            for group in self.optimizer.param_groups
        ]
        return ObjectState(
            qualified_name(type(self.optimizer)), {"parameters": parameters}, items=self.optimizer.state_dict()
        )

    def attributes(self, paths: Iterable[str]) -> Attributes:
        """Returns texts that explain the state in a file."""
        return explain_optimizer(self.optimizer, paths)

    def _problems(self, state: Any) -> list[str]:
        if (
            not _is_object(state, "parameters")
            or not isinstance(state.items, dict)
            or not {"state", "param_groups"} <= set(state.items)
        ):
            return [f"the state is not one of {self.what}"]
        live = self._live()
        problems = []
        if live.type_name != state.type_name:
            problems.append(f"saved from {state.type_name}, live is {live.type_name}")
        here, saved = live.attributes["parameters"], state.attributes["parameters"]
        if len(here) != len(saved):
            problems.append(f"saved with {len(saved)} parameter groups, live has {len(here)}")
        for index, (group_here, group_saved) in enumerate(zip(here, saved, strict=False)):
            if len(group_here) != len(group_saved):
                problems.append(
                    f"group {index} was saved with {len(group_saved)} parameters, live has {len(group_here)}"
                )
            problems += [
                f"parameter {position} of group {index}: "
                f"saved as {b['dtype']} {b['shape']}, live is {a['dtype']} {a['shape']}"
                for position, (a, b) in enumerate(zip(group_here, group_saved, strict=False))
                if a != b
            ]
        return problems

    def apply(self, state: Any) -> None:
        """Loads a copy, for torch keeps the moments that it is given."""
        self._load(state, copy_tree(state.items))

    def take(self, state: Any) -> None:
        """Loads the state itself."""
        self._load(state, state.items)

    def _load(self, state: Any, saved: Any) -> None:
        # torch changes moments to the parameter's dtype: they get their own back
        try:
            self.optimizer.load_state_dict(saved)
        except (RuntimeError, KeyError, ValueError, TypeError, AttributeError) as error:
            raise StateMismatchError(
                f"component {self.name!r}: the optimizer did not take the state: {error}", problems=[str(error)]
            ) from error
        parameters = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
        for key, entries in saved["state"].items():
            owner = parameters[key] if type(key) is int and key < len(parameters) else key
            self.optimizer.state[owner] = _uncast(self.optimizer.state[owner], entries)
        _check_bits(self.name, self.optimizer.state_dict(), state.items)


def _uncast(live: Any, saved: Any) -> Any:
    """Returns the live value, with the saved tensor on the live device wherever loading has changed a dtype."""
    if isinstance(saved, torch.Tensor):
        if not isinstance(live, torch.Tensor):
            return saved
        return live if live.dtype == saved.dtype else saved.to(live.device)
    if isinstance(saved, dict) and isinstance(live, dict):
        for key in saved:
            if key in live:
                live[key] = _uncast(live[key], saved[key])
    elif isinstance(saved, list) and isinstance(live, list) and len(saved) == len(live):
        live[:] = [_uncast(here, there) for here, there in zip(live, saved, strict=True)]
    return live


class CheckedHandle(ProtocolHandle):
    """The handle of a learning rate scheduler or a GradScaler, whose keys are known beforehand and checked afterwards.

    A scheduler loads before or after its optimizer alike, for it leaves the parameter groups alone. Lambdas of LambdaLR
    are code: they are not saved, and the program makes them again.
    """

    def capture(self) -> Any:
        """Returns a node whose items are a copy of `state_dict()`."""
        return ObjectState(qualified_name(type(self.obj)), {}, items=super().capture())

    def validate(self, state: Any) -> None:
        """Compares the class and the names of the entries."""
        if not _is_object(state) or not isinstance(state.items, dict):
            raise mismatch(self.name, [f"the state is not one of a {qualified_name(type(self.obj))}"])
        problems = (
            []
            if state.type_name == qualified_name(type(self.obj))
            else [f"saved from {state.type_name}, live is {qualified_name(type(self.obj))}"]
        )
        problems += _key_problems(self.state(), state.items)
        if problems:
            raise mismatch(self.name, problems)

    def apply(self, state: Any) -> None:
        """Loads a copy and compares."""
        super().apply(state.items)
        _check_bits(self.name, self.state(), state.items)


class TensorHandle:
    """The handle of a tensor, which is overwritten in place."""

    def __init__(self, name: str, tensor: torch.Tensor) -> None:
        self.name = name
        self.tensor = tensor

    def capture(self) -> Any:
        """Returns a copy."""
        return capture_copy(self.name, self.tensor.detach())

    def validate(self, state: Any) -> None:
        """Checks dtype and shape."""
        here = f"{self.tensor.dtype} {tuple(self.tensor.shape)}"
        saved = f"{state.dtype} {tuple(state.shape)}" if isinstance(state, torch.Tensor) else type(state).__name__
        if here != saved:
            raise mismatch(self.name, [f"saved as {saved}, live is {here}"])

    def apply(self, state: Any) -> None:
        """Overwrites the tensor."""
        self.validate(state)
        with torch.no_grad():
            self.tensor.copy_(state)
