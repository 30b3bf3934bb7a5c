"""One tree for many envs: `stack` joins the trees of the sub-environments, `unstack` takes them apart again.

Where all envs agree the joined tree looks like each of them: the same containers, arrays and tensors with one more
leading axis, scalars that are equal everywhere once. Where they differ in structure, dtype, shape or in a scalar,
`PerEnv` holds one child for each env, stored under `env_0`, `env_1`, ... Inside a `PerEnv`, `Row` stands for the env's
own part of something joined elsewhere, so that two names of one object stay two names of one object.
"""

from __future__ import annotations

import sys
from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from simckpt.state.nodes import ObjectState
from simckpt.state.registry import ContainerKind, add_container, register_container
from simckpt.state.reseeding import openers

_SCALARS = (type(None), bool, int, float, complex, str, bytes)
_MISSING = object()


class PerEnv:
    """One child for each env, where the envs do not agree.

    Attributes:
        children: the trees, `num_envs` of them.
    """

    __slots__ = ("children",)

    def __init__(self, children: Sequence[Any]) -> None:
        self.children = list(children)


class Row:
    """Inside a child of `PerEnv`: that env's part of `node`, which is joined elsewhere in the tree."""

    __slots__ = ("node",)

    def __init__(self, node: Any) -> None:
        self.node = node


class Batched:
    """The trees of `num_envs` envs, joined only when somebody asks for the joined form.

    Joining 64 envs takes longer than capturing them; so a snapshot in memory keeps the trees as they are, and they are
    joined when the checkpoint is encoded, after the training loop has gone on.
    """

    __slots__ = ("_joined", "_num_envs", "_trees")

    def __init__(self, trees: Sequence[Any] | None = None, *, joined: Any = _MISSING, num_envs: int = 0) -> None:
        self._trees = None if trees is None else list(trees)
        self._joined = joined
        self._num_envs = num_envs if self._trees is None else len(self._trees)

    def __len__(self) -> int:
        return self._num_envs

    def __getitem__(self, index: int) -> Any:
        return self.trees[index]

    def __iter__(self) -> Iterator[Any]:
        return iter(self.trees)

    def __repr__(self) -> str:
        return f"Batched(num_envs={self._num_envs})"

    @property
    def trees(self) -> list[Any]:
        """The tree of each env."""
        if self._trees is None:
            self._trees = unstack(self._joined, self._num_envs)
        return self._trees

    @property
    def joined(self) -> Any:
        """The joined tree; kept, for encoding tells objects apart by their identity."""
        if self._joined is _MISSING:
            self._joined = stack(self.trees)
        return self._joined

    def open(self) -> list[Any]:
        """Returns the tree of each env, to be changed in place; the joined tree is made anew afterwards."""
        trees = self.trees
        self._joined = _MISSING
        return trees


def stack(trees: Sequence[Any]) -> Any:
    """Returns one tree for all envs. Aliases and cycles inside each env's tree are kept.

    Args:
        trees: one tree for each env, at least one; not changed. Arrays are copied where they are joined and shared
            where they are not.
    """
    return _Stacking(len(trees)).run(list(trees))


def unstack(tree: Any, num_envs: int) -> list[Any]:
    """Returns the trees that `stack` joined; their arrays are views of the joined ones."""
    return [_Taking(index).take(tree) for index in range(num_envs)]


def stack_arrays(arrays: Sequence[npt.NDArray[Any]]) -> npt.NDArray[Any]:
    """Returns `(len(arrays), ...)`; unlike `np.stack` it keeps a foreign byte order, and NaN payloads with it."""
    first = arrays[0]
    out = np.empty((len(arrays), *first.shape), dtype=first.dtype)
    for index, array in enumerate(arrays):
        out[index, ...] = array
    return out


class _Stacking:
    """One call of `stack`: what was joined already, by the identities of its parts."""

    def __init__(self, num_envs: int) -> None:
        self._num_envs = num_envs
        self._joined: dict[tuple[int, ...], Any] = {}
        self._homes: dict[tuple[int, int], Any] = {}
        self._own: dict[tuple[int, int], Any] = {}
        self._unfilled: list[tuple[PerEnv, Sequence[Any]]] = []

    def run(self, trees: Sequence[Any]) -> Any:
        joined = self._join(trees)
        # only now is it known which objects have a home in the joined tree
        while self._unfilled:
            node, values = self._unfilled.pop()
            node.children = [self._keep(index, value) for index, value in enumerate(values)]
        return joined

    def _join(self, values: Sequence[Any]) -> Any:
        kind = type(values[0])
        alike = all(type(value) is kind for value in values)
        if alike and (kind in _SCALARS or issubclass(kind, np.generic)):
            return self._join_scalars(values)
        if alike and kind is tuple:
            if len({len(value) for value in values}) == 1:
                return tuple(self._join(parts) for parts in zip(*values, strict=True))
            return self._differ(values)
        key = tuple(map(id, values))
        if key in self._joined:
            return self._joined[key]
        if any((index, part) in self._homes for index, part in enumerate(key)):
            # aliased in some envs and not in others: joining again would part the aliases
            return self._differ(values)
        if not alike:
            return self._differ(values)
        return self._join_objects(kind, key, values)

    def _join_scalars(self, values: Sequence[Any]) -> Any:
        first = values[0]
        if isinstance(first, float | complex | np.generic):
            # by bits, for -0.0 equals 0.0 and a NaN equals nothing
            bits = _bits(first)
            same = all(_bits(value) == bits for value in values)
        else:
            same = all(value == first for value in values)
        return first if same else self._differ(values)

    def _join_objects(self, kind: type, key: tuple[int, ...], values: Sequence[Any]) -> Any:
        first = values[0]
        if kind is np.ndarray:
            if first.dtype.hasobject or any(v.dtype != first.dtype or v.shape != first.shape for v in values):
                return self._differ(values)
            return self._place(key, stack_arrays(values))
        if kind is ObjectState:
            return self._join_states(key, values)
        if kind is dict or kind is OrderedDict:
            keys = [*first]
            if any([*value] != keys for value in values) or not _same_types(values):
                return self._differ(values)
            merged = self._place(key, kind())
            for name in keys:
                merged[name] = self._join([value[name] for value in values])
            return merged
        if kind is list or kind is deque:
            shape = (len(first), getattr(first, "maxlen", None))
            if any((len(value), getattr(value, "maxlen", None)) != shape for value in values):
                return self._differ(values)
            sequence = self._place(key, [] if kind is list else deque(maxlen=first.maxlen))
            for parts in zip(*values, strict=True):
                sequence.append(self._join(parts))
            return sequence
        torch = sys.modules.get("torch")
        if torch is not None and kind is torch.Tensor and _stackable(torch, values):
            return self._place(key, torch.stack(list(values)))
        return self._differ(values)

    def _join_states(self, key: tuple[int, ...], values: Sequence[ObjectState]) -> Any:
        first = values[0]
        names = [*first.attributes]
        if any(v.type_name != first.type_name or [*v.attributes] != names for v in values):
            return self._differ(values)
        merged: ObjectState = self._place(key, ObjectState(first.type_name, {}))
        for name in names:
            merged.attributes[name] = self._join([value.attributes[name] for value in values])
        merged.items = self._join([value.items for value in values])
        return merged

    def _place(self, key: tuple[int, ...], node: Any) -> Any:
        self._joined[key] = node
        for home in enumerate(key):
            self._homes[home] = node
        return node

    def _differ(self, values: Sequence[Any]) -> PerEnv:
        node = PerEnv([])
        self._joined[tuple(map(id, values))] = node
        self._unfilled.append((node, values))
        return node

    def _keep(self, index: int, value: Any) -> Any:
        """Returns env `index`'s tree as it is, but with `Row` for what has a home in the joined tree."""
        kind = type(value)
        if kind in _SCALARS or issubclass(kind, np.generic):
            return value
        if kind is tuple:
            return tuple(self._keep(index, child) for child in value)
        key = (index, id(value))
        if key in self._homes:
            return Row(self._homes[key])
        if key in self._own:
            return self._own[key]
        if kind is ObjectState:
            state = self._own[key] = ObjectState(value.type_name, {})
            for name, child in value.attributes.items():
                state.attributes[name] = self._keep(index, child)
            state.items = self._keep(index, value.items)
            return state
        if kind is dict or kind is OrderedDict:
            mapping = self._own[key] = kind()
            for name, child in value.items():
                mapping[name] = self._keep(index, child)
            return mapping
        if kind is list or kind is deque:
            sequence = self._own[key] = [] if kind is list else deque(maxlen=value.maxlen)
            for child in value:
                sequence.append(self._keep(index, child))
            return sequence
        return value


class _Taking:
    """One env's tree being taken out of a joined tree."""

    def __init__(self, index: int) -> None:
        self._index = index
        self._taken: dict[int, Any] = {}

    def take(self, node: Any, *, own: bool = False) -> Any:
        """Returns this env's part of `node`, or, with `own`, of a tree that is this env's already."""
        kind = type(node)
        if kind in _SCALARS or issubclass(kind, np.generic):
            return node
        if kind is tuple:
            return tuple(self.take(child, own=own) for child in node)
        if id(node) in self._taken:
            return self._taken[id(node)]
        if kind is Row:
            return self.take(node.node)
        if kind is PerEnv:
            return self._keep(node, self.take(node.children[self._index], own=True))
        if kind is ObjectState:
            state = self._keep(node, ObjectState(node.type_name, {}))
            for name, child in node.attributes.items():
                state.attributes[name] = self.take(child, own=own)
            state.items = self.take(node.items, own=own)
            return state
        if kind is dict or kind is OrderedDict:
            mapping = self._keep(node, kind())
            for name, child in node.items():
                mapping[name] = self.take(child, own=own)
            return mapping
        if kind is list or kind is deque:
            sequence = self._keep(node, [] if kind is list else deque(maxlen=node.maxlen))
            for child in node:
                sequence.append(self.take(child, own=own))
            return sequence
        return node if own else self._keep(node, self._row(node))

    def _row(self, node: Any) -> Any:
        return node[self._index, ...] if type(node) is np.ndarray else node[self._index]

    def _keep(self, node: Any, own: Any) -> Any:
        self._taken[id(node)] = own
        return own


def _bits(scalar: Any) -> tuple[Any, bytes]:
    array = np.asarray(scalar)
    return array.dtype, array.tobytes()


def _same_types(mappings: Sequence[Any]) -> bool:
    """Whether equal keys are also of equal types, for 1 == True == 1.0."""
    types = [type(key) for key in mappings[0]]
    return all([type(key) for key in mapping] == types for mapping in mappings)


def _stackable(torch: Any, tensors: Sequence[Any]) -> bool:
    first = tensors[0]
    return first.layout is torch.strided and all(
        t.layout is torch.strided
        and not t.requires_grad
        and (t.dtype, t.shape, t.device) == (first.dtype, first.shape, first.device)
        for t in tensors
    )


def _fill_per_env(node: PerEnv, values: list[Any], _meta: Any, _template: Any) -> PerEnv:
    node.children = values
    return node


def _fill_row(node: Row, values: list[Any], _meta: Any, _template: Any) -> Row:
    (node.node,) = values
    return node


# both exist before their children, for either may lie in a cycle
add_container(
    ContainerKind(
        "per_env",
        lambda walker, node, path: [
            "per_env",
            [walker.child(child, path, f"env_{index}") for index, child in enumerate(node.children)],
        ],
        _fill_per_env,
        lambda meta, template: PerEnv([]),
    ),
    PerEnv,
)
add_container(
    ContainerKind(
        "row",
        lambda walker, node, path: ["row", [walker.value(node.node, path)]],
        _fill_row,
        lambda meta, template: Row(None),
    ),
    Row,
)
register_container(
    "batched",
    Batched,
    lambda node: ([("", node.joined)], {"num_envs": len(node)}),
    lambda meta, children: Batched(joined=children[0][1], num_envs=meta["num_envs"]),
)
openers[Batched] = Batched.open
