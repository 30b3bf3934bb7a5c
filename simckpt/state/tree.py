"""State trees: nested containers of arrays, tensors and scalars, turned into leaves and a structure and back.

The structure is one JSON object, `{"tree": 1, "root": value, "nodes": [record, ...]}`, in UTF-8. It is nested no deeper
than its records, whatever the tree. A value is one of

- `null`, `true`, `false`, a string, an integer of at most 64 bits, a finite float: themselves;
- `{"node": n}`: the n-th container; `{"leaf": path}`: an array. The same reference twice is the same object twice;
- `{"marked": [path, {"parameter": p, "requires_grad": r}]}`: a torch Parameter or a tensor with a gradient;
- `{type: text}` for other immutable values: `int` (hexadecimal), `float` and `complex` (the bits of 64-bit floats, in
  hexadecimal, most significant first), `str` (UTF-32), `bytes` (base64), `numpy` (dtype and bytes), `range`,
  `torch.dtype`, ...: see `atoms`.

A record is `[type, values]` or `[type, values, meta]`. Values of a dict alternate keys and children, in order. Long
lists of floats or of integers have `{"packed": true}` in their meta and one value, an array. Of classes only the name
is kept.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from simckpt.errors import FormatError, StorageError, UnsupportedFormatError
from simckpt.state import classes, kinds, mappings, rng, scalars, sequences, tensors
from simckpt.state.build import Builder
from simckpt.state.leaf import Leaf, PartLeaf
from simckpt.state.quick_copy import quick_copy
from simckpt.state.walk import Copier, Encoder

__all__ = ["Encoded", "Leaf", "copy_tree", "decode", "encode", "leaf_value", "without_parts"]

# importing them registers what they know
_BUILT_IN = (scalars, mappings, sequences, classes, kinds, tensors, rng)

_VERSION = 1
_to_json = json.JSONEncoder(ensure_ascii=False, check_circular=False, allow_nan=False, separators=(",", ":")).encode


@dataclass(frozen=True, eq=False, slots=True)
class Encoded:
    """A state tree as a file keeps it.

    Attributes:
        leaves: path inside the component -> array. Paths are percent-encoded, joined by "/", never "_tree" or below it.
        structure: typed JSON in UTF-8: containers, keys and their order, scalars, aliases.
    """

    leaves: dict[str, Leaf]
    structure: bytes


def without_parts(encoded: Encoded) -> Encoded:
    """Returns a state in which a part that is all of its array is an array like any other."""
    leaves = {
        path: Leaf(leaf.data, leaf.dtype, leaf.shape, leaf.kind)
        if isinstance(leaf, PartLeaf) and leaf.part_shape == tuple(leaf.shape)
        else leaf
        for path, leaf in encoded.leaves.items()
    }
    return Encoded(leaves, encoded.structure)


def encode(tree: Any) -> Encoded:
    """Returns the leaves and the structure of a state tree.

    Arrays are not copied if they are contiguous and on the CPU: take a `copy_tree` first if the program goes on.
    Views that overlap without being the same view come back as separate arrays, and a set may iterate in another order.

    Raises:
        UnsupportedStateError: an object that no file can bring back; it names its path.
    """
    encoder = Encoder()
    root = encoder.walk(tree)
    structure = _to_json({"tree": _VERSION, "root": root, "nodes": encoder.nodes}).encode()
    return Encoded(encoder.leaves, structure)


def decode(leaves: Mapping[str, Leaf], structure: bytes, *, template: Any = None) -> Any:
    """Returns the state tree of some leaves and a structure.

    Classes are never imported. A namedtuple, dataclass or Enum member comes back as such if `template` has one of the
    same name at the same place, otherwise as a tuple, a dict and the member's value. Tensors come back on the CPU.

    Args:
        leaves: path -> leaf. The tree shares their memory where that is writable.
        structure: the bytes from `encode`; padding with spaces or newlines does no harm.
        template: a live state tree, such as a capture of the objects to be restored.

    Raises:
        FormatError: the structure is not what `encode` writes, or the leaves do not fit it.
        UnsupportedFormatError: it needs a newer simckpt, or a package that is not installed.
        StorageError: not enough memory.
    """
    try:
        document = json.loads(structure, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise FormatError(f"the structure of a component is not JSON: {error}") from error
    except MemoryError as error:
        raise StorageError(f"a structure of {len(structure)} bytes does not fit into memory") from error
    if type(document) is not dict or type(document.get("nodes")) is not list or "root" not in document:
        raise FormatError("the structure of a component lacks its root or its nodes")
    version = document.get("tree")
    if version != _VERSION:
        known = UnsupportedFormatError if type(version) is int and version > _VERSION else FormatError
        raise known(
            f"the structure of a component has version {str(version)[:20]}; this simckpt reads version {_VERSION}"
        )
    try:
        return Builder(document["nodes"], leaves).build(document["root"], template)
    except RecursionError as error:
        raise FormatError("the structure of a component has values that are nested too deeply") from error
    except MemoryError as error:
        raise StorageError("the state of a component does not fit into memory") from error


def leaf_value(leaf: Leaf) -> Any:
    """Returns the array, tensor or registered object of one leaf; it shares the leaf's memory where that is writable.

    Raises:
        FormatError: the leaf contradicts itself, or nobody registered its kind.
        UnsupportedFormatError: it needs a package that is not installed.
    """
    return Builder([], {"": leaf}).build({"leaf": ""})


def copy_tree(tree: Any) -> Any:
    """Returns a deep copy that shares no memory with the live objects; aliases, cycles, classes and devices are kept.

    Raises:
        UnsupportedStateError: as `encode`.
    """
    with contextlib.suppress(TypeError):  # told below, with the place
        copied = quick_copy(tree)
        if copied is not NotImplemented:
            return copied
    copier = Copier()
    root = copier.walk(tree)
    return Builder(copier.nodes, None).build(root)


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")
