"""The kinds of leaves that simckpt knows: numpy arrays, torch tensors, long bytes, DLPack objects, JAX's PRNG keys.

Nothing here imports torch or JAX: an object of theirs shows that they are loaded.
"""

from __future__ import annotations

import math
import sys
from typing import Any

import numpy as np

from simckpt.errors import FormatError, StateMismatchError, UnsupportedFormatError
from simckpt.state import arrays, atoms, paths
from simckpt.state.leaf import Leaf
from simckpt.state.registry import (
    ContainerKind,
    Handler,
    LeafKind,
    add_container,
    add_leaf,
    container_kinds,
    handlers,
    leaf_handler,
    leaf_kinds,
    resolvers,
)
from simckpt.state.walk import Walker, refusal

# longer byte strings are arrays in the file
_SHORT_BYTES = 256


def array_alias(array: np.ndarray[Any, Any]) -> Any:
    """Returns what two arrays have in common that are the same memory seen in the same way; None if that cannot be."""
    if array.size == 0:
        return None
    return ("numpy", array.__array_interface__["data"][0], array.shape, array.strides, array.dtype.str)


def _flatten_object_array(walker: Walker, array: Any, path: str) -> list[Any]:
    values = [walker.value(item, paths.join(path, str(i))) for i, item in enumerate(array.reshape(-1).tolist())]
    return ["object array", values, list(array.shape)]


def _finish_object_array(shell: Any, values: list[Any], meta: Any, template: Any) -> Any:
    if not all(type(size) is int and size >= 0 for size in meta) or math.prod(meta) != len(values):
        raise ValueError(f"an object array of shape {meta} has {len(values)} elements")
    array = np.empty(len(values), object)
    for index, value in enumerate(values):
        array[index] = value
    return array.reshape(meta)


def _handle_array(walker: Walker, array: Any, path: str) -> Any:
    if array.dtype.kind == "O":
        return walker.container(container_kinds["object array"], array, path)
    return walker.leaf(leaf_kinds["numpy"], array, path)


def _handle_bytes(walker: Walker, obj: Any, path: str) -> Any:
    if len(obj) <= _SHORT_BYTES:
        return walker.atom(obj, atoms.bytes_to_json)
    return walker.atom(obj, lambda content: walker.leaf(leaf_kinds["bytes"], content, path))


def _bytes_from_leaf(leaf: Leaf, template: Any) -> bytes:
    if leaf.data.dtype != np.uint8 or leaf.data.ndim != 1:
        raise FormatError("a byte string is not stored as bytes")
    return leaf.data.tobytes()


def _handle_dtype(walker: Walker, dtype: Any, path: str) -> Any:
    try:
        return walker.atom(dtype, lambda dtype: {"numpy.dtype": arrays.dtype_name(dtype)})
    except TypeError as error:
        raise refusal(dtype, path, f"cannot be captured: {error}") from error


def _dlpack_to_leaf(obj: Any) -> Leaf:
    try:
        return arrays.array_to_leaf(_dlpack_to_array(obj), "dlpack")
    except (BufferError, RuntimeError, ValueError) as error:
        raise TypeError(f"numpy cannot read it: {error}") from error


def _dlpack_to_array(obj: Any) -> np.ndarray[Any, Any]:
    # numpy has no bfloat16: where the object can make an array itself (JAX with ml_dtypes), it knows better
    if hasattr(obj, "__array__"):
        return np.asarray(obj)
    if obj.__dlpack_device__()[0] == 1:
        return np.from_dlpack(obj)
    return np.from_dlpack(obj, device="cpu", copy=True)


def _dlpack_from_leaf(leaf: Leaf, template: Any) -> Any:
    array = arrays.leaf_to_array(leaf)
    if template is None or not hasattr(template, "__array_namespace__"):
        return array
    made = template.__array_namespace__().asarray(array)
    if str(made.dtype) not in (str(array.dtype), f"{type(made).__module__.partition('.')[0]}.{array.dtype}"):
        # JAX does so with 64 bits, unless told otherwise
        problem = f"{type(made).__module__.partition('.')[0]} makes {made.dtype} of a saved {array.dtype}"
        raise StateMismatchError(problem, problems=[problem])
    return made


def _dlpack_copy(obj: Any) -> Any:
    if hasattr(obj, "__array_namespace__"):
        return obj.__array_namespace__().asarray(obj, copy=True)
    return arrays.copy_array(_dlpack_to_array(obj))


def _is_jax_key(obj: Any) -> bool:
    return type(obj).__module__.partition(".")[0] in ("jax", "jaxlib") and str(getattr(obj, "dtype", "")).startswith(
        "key<"
    )


def _jax_random() -> Any:
    jax = sys.modules.get("jax")
    if jax is None:
        raise UnsupportedFormatError("this checkpoint holds a PRNG key of JAX: import jax before restoring it")
    return jax.random


def _jax_key_to_leaf(obj: Any) -> Leaf:
    data = np.asarray(_jax_random().key_data(obj))
    name = f"key<{_jax_random().key_impl(obj)}>"
    return Leaf(arrays.array_to_leaf(data).data, name, data.shape, "jax.key")


def _jax_key_from_leaf(leaf: Leaf, template: Any) -> Any:
    if not (leaf.dtype.startswith("key<") and leaf.dtype.endswith(">")):
        raise FormatError(f"{leaf.dtype[:80]!r} is not a type of PRNG key")
    return _jax_random().wrap_key_data(leaf.data, impl=leaf.dtype[4:-1])


def _find(obj: Any) -> Handler | None:
    """Returns the handler of a memory map, a numpy dtype, a JAX key, or anything else that speaks DLPack."""
    if type(obj) is np.memmap:
        return _handle_array
    if isinstance(obj, np.dtype):
        return _handle_dtype
    if isinstance(obj, np.ndarray):
        # masks, record accessors and the like would be lost
        return None
    if _is_jax_key(obj):
        return leaf_handler(leaf_kinds["jax.key"])
    if hasattr(obj, "__dlpack__") and hasattr(obj, "__dlpack_device__"):
        return leaf_handler(leaf_kinds["dlpack"])
    return None


def _register() -> None:
    add_leaf(
        LeafKind(
            "numpy",
            lambda obj: type(obj) is np.ndarray,
            arrays.array_to_leaf,
            lambda leaf, template: arrays.leaf_to_array(leaf),
            arrays.copy_array,
            array_alias,
        )
    )
    add_container(ContainerKind("object array", _flatten_object_array, _finish_object_array))
    add_leaf(
        LeafKind(
            "bytes",
            lambda obj: type(obj) is bytes,
            lambda obj: Leaf(np.frombuffer(obj, np.uint8), "uint8", (len(obj),), "bytes"),
            _bytes_from_leaf,
            lambda obj: obj,
        )
    )
    add_leaf(
        LeafKind("dlpack", lambda obj: hasattr(obj, "__dlpack__"), _dlpack_to_leaf, _dlpack_from_leaf, _dlpack_copy)
    )
    add_leaf(LeafKind("jax.key", _is_jax_key, _jax_key_to_leaf, _jax_key_from_leaf, lambda obj: obj))
    handlers[np.ndarray] = _handle_array
    handlers[bytes] = _handle_bytes
    resolvers.append(_find)


_register()
