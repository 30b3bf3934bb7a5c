"""A quick way to copy the trees that most states are: dicts and lists of tensors, arrays and plain scalars.

A save of a model with hundreds of small parameters spends its time in the walk, not in copying bytes. What is not
covered here goes the general way of `tree.copy_tree`, and the result is the same.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from typing import Any

import numpy as np

from simckpt.state import arrays, kinds, tensors
from simckpt.state.mappings import PLAIN
from simckpt.state.nodes import ObjectState

_DEPTH = 30  # of nesting; deeper trees go the general way, which does without recursion
_PLAIN = frozenset(PLAIN)


def quick_copy(tree: Any) -> Any:
    """Returns a deep copy as `copy_tree` makes it, or `NotImplemented` if the tree holds anything out of the ordinary.

    Raises:
        TypeError: a tensor that cannot be captured; `copy_tree` says where it is.
    """
    copier = _QuickCopier()
    if not copier.covers(tree, _DEPTH):
        return NotImplemented
    return copier.copy(tree)


class _QuickCopier:
    def __init__(self) -> None:
        torch = sys.modules.get("torch")
        self._tensor = getattr(torch, "Tensor", None)
        self._strided = getattr(torch, "strided", None)
        self._seen: set[int] = set()
        # by kind and address: the arrays that begin there, and their copies
        self._copies: dict[tuple[str, int], list[tuple[Any, Any]]] = {}

    def covers(self, obj: Any, depth: int) -> bool:
        """Returns whether an object and all in it is ordinary, no container occurring twice."""
        cls = type(obj)
        if cls in _PLAIN:
            return True
        if cls is self._tensor:
            return not obj.requires_grad and obj.layout is self._strided
        if cls is np.ndarray:
            return obj.dtype.fields is None and not obj.dtype.hasobject
        if cls is tuple:
            return _PLAIN.issuperset(map(type, obj))
        if depth == 0 or id(obj) in self._seen:
            return False
        self._seen.add(id(obj))
        if cls is dict or cls is OrderedDict:
            if not _PLAIN.issuperset(map(type, obj)):
                return False
            if cls is OrderedDict and not self._covers_all(vars(obj).values(), depth):
                return False
            return self._covers_all(obj.values(), depth)
        if cls is list:
            return self._covers_all(obj, depth)
        if cls is ObjectState:
            return self.covers(obj.attributes, depth - 1) and self.covers(obj.items, depth - 1)
        return False

    def _covers_all(self, children: Any, depth: int) -> bool:
        # most children are tensors or scalars, which are looked at here, without a call
        for child in children:
            cls = type(child)
            if cls in _PLAIN:
                continue
            if cls is self._tensor and not child.requires_grad and child.layout is self._strided:
                continue
            if not self.covers(child, depth - 1):
                return False
        return True

    def copy(self, obj: Any) -> Any:
        """Returns the copy of a covered object."""
        cls = type(obj)
        if cls in _PLAIN or cls is tuple:
            return obj
        if cls is self._tensor:
            return self._once(obj, ("torch", obj.data_ptr()), tensors.alias, tensors.copy_tensor)
        if cls is np.ndarray:
            return self._once(obj, ("numpy", obj.ctypes.data), kinds.array_alias, arrays.copy_array)
        copy = self.copy
        if cls is dict:
            return {key: copy(child) for key, child in obj.items()}
        if cls is list:
            return [copy(child) for child in obj]
        if cls is ObjectState:
            return ObjectState(obj.type_name, copy(obj.attributes), copy(obj.items))
        made = OrderedDict((key, copy(child)) for key, child in obj.items())
        for name, child in vars(obj).items():
            object.__setattr__(made, name, copy(child))
        return made

    def _once(self, obj: Any, place: tuple[str, int], alias: Any, make: Any) -> Any:
        """Returns the copy of an array; two objects that are the same memory seen in the same way share it."""
        others = self._copies.setdefault(place, [])
        for other, made in others:
            # views that begin at one address, or empty arrays: rare enough to look closer
            if other is obj or (alias(obj) is not None and alias(obj) == alias(other)):
                return made
        made = make(obj)
        others.append((obj, made))
        return made
