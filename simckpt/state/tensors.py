"""torch tensors as leaves. Loaded with the package, but torch itself only once an object of it is met."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from simckpt.errors import FormatError, StateMismatchError, UnsupportedFormatError
from simckpt.state import arrays, atoms, staging
from simckpt.state.leaf import Leaf, PartLeaf
from simckpt.state.registry import Handler, LeafKind, add_leaf, handlers, leaf_handler, leaf_kinds, resolvers
from simckpt.state.walk import Walker, refusal

# torch's dtypes that numpy has under the same name; their bits are stored as they are
_SHARED = frozenset(
    {"bool", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64"}
    | {"float16", "float32", "float64", "complex64", "complex128"}
)
_STORED_AS = {1: "uint8", 2: "uint16"}

# {class of live tensors that several ranks hold in parts: what puts a leaf into its layout}; see distributed/tensors.py
in_parts: dict[type, Callable[[Leaf, Any], Any]] = {}


@functools.cache
def _dtype_name(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


def check_tensor(tensor: Any) -> None:
    """Checks that the values of a tensor are all there is to it.

    Raises:
        TypeError: it is sparse, quantized, on the meta device, or part of an autograd graph.
    """
    torch = sys.modules["torch"]
    if tensor.layout != torch.strided:
        raise TypeError(f"it is a tensor of layout {tensor.layout}; store its parts, or tensor.to_dense()")
    if tensor.is_quantized:
        raise TypeError("it is a quantized tensor; store tensor.int_repr(), its scale and its zero point")
    if tensor.is_meta:
        raise TypeError("it is a tensor on the meta device, which has no values")
    if tensor.is_nested:
        raise TypeError("it is a nested tensor; store the list of its parts")
    if tensor.grad_fn is not None:
        raise TypeError("it is part of an autograd graph, which no file can hold; store tensor.detach()")


def tensor_to_leaf(tensor: Any) -> Leaf:
    """Returns the leaf of a tensor; shares its memory if it is contiguous and on the CPU.

    Raises:
        TypeError: see `check_tensor`.
    """
    check_tensor(tensor)
    name = _dtype_name(tensor.dtype)
    shape = tuple(tensor.shape)
    if name in _SHARED:
        # force: detached, on the CPU, conjugate and negative bits worked in
        stored = arrays.array_to_leaf(tensor.numpy(force=True), "torch")
        return stored if stored.dtype == name else Leaf(stored.data, name, shape, "torch")
    width = tensor.element_size()
    if width not in _STORED_AS or tensor.dtype.is_complex:
        raise TypeError(f"tensors of {tensor.dtype} are not supported yet")
    torch = sys.modules["torch"]
    bits = tensor.detach().contiguous().view(torch.uint8 if width == 1 else torch.int16)
    return Leaf(bits.numpy(force=True).view(_STORED_AS[width]), name, shape, "torch")


def tensor_from_leaf(leaf: Leaf, template: Any) -> Any:
    """Returns the tensor of a leaf, on the device of the live tensor at the same place, or on the CPU.

    Raises:
        FormatError: bytes, dtype and shape contradict each other.
        StateMismatchError: the leaf is a part, and the live tensor is whole, or is another part.
        UnsupportedFormatError: torch is missing, or too old for the dtype.
    """
    if (place := in_parts.get(type(template))) is not None:
        return place(leaf, template)
    if isinstance(leaf, PartLeaf):
        problem = f"a part of a tensor of shape {leaf.shape} was read, and the live one is not held in parts"
        raise StateMismatchError(problem, problems=[problem])
    try:
        import torch
    except ImportError as error:
        raise UnsupportedFormatError("this checkpoint holds torch tensors: install torch to restore it") from error
    if leaf.dtype in _SHARED:
        tensor = torch.from_numpy(arrays.leaf_to_array(Leaf(leaf.data, leaf.dtype, leaf.shape, "numpy")))
    else:
        # not getattr, which would import what torch loads lazily
        dtype = vars(torch).get(leaf.dtype)
        if not isinstance(dtype, torch.dtype) or dtype.is_complex or dtype.itemsize not in _STORED_AS:
            raise UnsupportedFormatError(f"torch {torch.__version__} has no dtype {leaf.dtype[:80]!r}")
        stored = _STORED_AS[dtype.itemsize]
        bits = arrays.leaf_to_array(Leaf(leaf.data, stored, leaf.shape, "numpy"))
        tensor = torch.from_numpy(bits.view(np.uint8 if stored == "uint8" else np.int16)).view(dtype)
    if isinstance(template, torch.Tensor) and not template.is_meta:
        return tensor.to(template.device)
    return tensor


def copy_tensor(tensor: Any) -> Any:
    """Returns a copy that shares no memory, without its graph; see `staging` for large ones during a save.

    Raises:
        TypeError: see `check_tensor`.
    """
    check_tensor(tensor)
    return staging.copy_tensor(tensor)


def alias(tensor: Any) -> Any:
    """Returns what two tensors have in common that are the same memory seen in the same way; None if that cannot be."""
    if tensor.layout != sys.modules["torch"].strided or tensor.is_meta or tensor.numel() == 0:
        return None
    flags = (tensor.is_conj(), tensor.is_neg())
    return ("torch", tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device, flags)


def _marks(tensor: Any) -> Any:
    """Returns whether it is a Parameter and whether it requires a gradient, or None for a plain tensor."""
    parameter = isinstance(tensor, sys.modules["torch"].nn.Parameter)
    return (
        {"parameter": parameter, "requires_grad": tensor.requires_grad} if parameter or tensor.requires_grad else None
    )


def _marked(base: Any, marks: Any) -> Any:
    torch = sys.modules["torch"]
    if type(marks) is not dict or set(marks) != {"parameter", "requires_grad"}:
        raise FormatError("the marks of a tensor are not `parameter` and `requires_grad`")
    requires_grad = bool(marks["requires_grad"])
    if marks["parameter"]:
        return torch.nn.Parameter(base.detach(), requires_grad=requires_grad)
    return base.detach().requires_grad_(requires_grad)


def _atom(tag: str, to_json: Any) -> Handler:
    def handle(walker: Walker, obj: Any, path: str) -> Any:
        return walker.atom(obj, lambda value: {tag: to_json(value)})

    return handle


def _find(obj: Any) -> Handler | None:
    """Returns the handler of a tensor or of one of torch's small values, and remembers it for the type."""
    torch = sys.modules.get("torch")
    if torch is None:
        return None
    cls = type(obj)
    handler: Handler | None = None
    if cls is torch.Tensor or cls is torch.nn.Parameter:
        handler = leaf_handler(leaf_kinds["torch"])
    elif cls is torch.dtype or cls is torch.layout or cls is torch.memory_format:
        handler = _atom(f"torch.{cls.__name__}", _dtype_name)
    elif cls is torch.device:
        handler = _atom("torch.device", str)
    elif cls is torch.Size:
        handler = _atom("torch.Size", lambda size: [atoms.int_to_json(part) for part in size])
    if handler is not None:
        handlers[cls] = handler
    return handler


def _is_tensor(obj: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(obj, torch.Tensor)


def _refuse_subclass(obj: Any) -> Handler | None:
    """Stops the search at a subclass of Tensor, which speaks DLPack but may be more than its values."""
    if not _is_tensor(obj):
        return None

    def handle(walker: Walker, obj: Any, path: str) -> Any:
        raise refusal(obj, path, "is a tensor subclass (store obj.as_subclass(torch.Tensor), or register a leaf kind)")

    return handle


add_leaf(LeafKind("torch", _is_tensor, tensor_to_leaf, tensor_from_leaf, copy_tensor, alias, _marks, _marked))
resolvers.insert(0, _find)
resolvers.insert(1, _refuse_subclass)
