"""DTensors as leaves: each rank captures its own part, and a restore puts a part back into the live DTensor's layout.

Importing this module makes them known to `simckpt.state`; whoever binds components does so where the program has
imported `torch.distributed.tensor`. No function here communicates.

A part is a box of the whole tensor. That holds for `Replicate`, for `Shard` in any number of mesh dimensions, and for
the `_StridedShard` of FSDP2 over tensor parallel; where a local part is no box, it is refused.
"""

from __future__ import annotations

import copy
import functools
import itertools
import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Shard

from simckpt.errors import StateMismatchError
from simckpt.state import staging, tensors
from simckpt.state.components import Handle
from simckpt.state.leaf import Leaf, PartLeaf, Slab
from simckpt.state.nodes import ObjectState
from simckpt.state.paths import path_part
from simckpt.state.registry import LeafKind, add_leaf, leaf_kinds
from simckpt.state.torch_components import ModuleHandle, OptimizerHandle
from simckpt.state.walk import Encoder
from simckpt.storage.names import encode_part


def layout(tensor: DTensor) -> Slab:
    """Returns which part of the whole this rank has; an empty one if it is not in the tensor's mesh.

    Raises:
        TypeError: the part is no box of the whole, or not known to be all of it.
    """
    return _layout(tensor._spec, tuple(tensor.shape))


@functools.lru_cache(maxsize=10_000)
def _layout(spec: Any, shape: tuple[int, ...]) -> Slab:
    coordinate = spec.mesh.get_coordinate()
    if coordinate is None:
        return Slab((0,) * len(shape), (0,) * len(shape))
    offset, size = [0] * len(shape), list(shape)
    for axis in {placement.dim for placement in spec.placements if _is_shard(placement)}:
        places = np.arange(shape[axis])
        for mesh_dim in _order(spec, axis):
            runs = getattr(spec.placements[mesh_dim], "split_factor", 1)
            places = _chunk(places, runs, coordinate[mesh_dim], spec.mesh.shape[mesh_dim])
        if places.size and places[-1] - places[0] + 1 != places.size:
            raise TypeError(f"its part on this rank is not contiguous in the whole: {spec.placements} of {shape}")
        offset[axis], size[axis] = int(places[0]) if places.size else shape[axis], places.size
    for placement in spec.placements:
        if not (placement.is_replicate() or _is_shard(placement)):
            hint = ": reduce it first, by redistribute()" if placement.is_partial() else ""
            raise TypeError(f"it is a DTensor with the placement {placement!r}, which is no part of its values{hint}")
    return Slab(tuple(offset), tuple(size))


def _order(spec: Any, axis: int) -> list[int]:
    """Returns the mesh dimensions that shard an axis, in the order in which they do so."""
    sharding = [dim for dim, placement in enumerate(spec.placements) if _is_shard(placement) and placement.dim == axis]
    if not any(type(spec.placements[dim]).__name__ == "_StridedShard" for dim in sharding):
        for entry in getattr(spec, "shard_order", None) or ():
            if entry.tensor_dim == axis and sorted(entry.mesh_dims) == sharding:
                return list(entry.mesh_dims)
    return sharding


def _is_shard(placement: Any) -> bool:
    # a _StridedShard is no subclass of Shard, and not public
    return isinstance(placement, Shard) or type(placement).__name__ == "_StridedShard"


def _chunk(places: np.ndarray[Any, Any], split_factor: int, part: int, parts: int) -> np.ndarray[Any, Any]:
    """Returns the places that one of `parts` ranks gets, as torch.chunk deals out each of `split_factor` runs."""
    runs = _chunks(places, split_factor)
    dealt = [pieces[part] for run in runs if part < len(pieces := _chunks(run, parts))]
    return np.concatenate(dealt) if dealt else places[:0]


def _chunks(places: np.ndarray[Any, Any], parts: int) -> list[np.ndarray[Any, Any]]:
    step = max(-(-places.size // parts), 1)
    return [places[start : start + step] for start in range(0, places.size, step)]


def _local(tensor: DTensor) -> Any:
    """Returns this rank's part, of the layout's shape; it shares the memory of the live tensor.

    Raises:
        TypeError: the local tensor is not plain, or has another shape than its layout.
    """
    if tensor.grad_fn is not None:
        raise TypeError("it is part of an autograd graph, which no file can hold; store tensor.detach()")
    with torch.no_grad():
        local: Any = tensor.to_local()
    if hasattr(local, "wait") and type(local).__name__ == "AsyncCollectiveTensor":
        local = local.wait()
    if type(local) is not torch.Tensor and type(local) is not torch.nn.Parameter:
        raise TypeError(f"it is a DTensor whose local part is a {type(local).__name__}, not a plain tensor")
    expected = layout(tensor)
    if tuple(local.shape) != expected.shape:
        if local.numel() or math.prod(expected.shape):
            raise TypeError(
                f"its part on this rank has the shape {tuple(local.shape)}, but its placements {tensor.placements} "
                f"say {expected.shape}"
            )
        # ranks outside of the mesh have no shape at all
        local = local.reshape(expected.shape)
    return local.detach()


def _to_leaf(tensor: DTensor) -> Leaf:
    leaf = tensors.tensor_to_leaf(_local(tensor))
    return PartLeaf(leaf.data, leaf.dtype, tuple(tensor.shape), leaf.kind, layout(tensor).offset)


def _copy(tensor: DTensor) -> DTensor:
    local = _local(tensor)
    tensors.check_tensor(local)
    return _dtensor(staging.copy_tensor(local), tensor._spec)


def _dtensor(local: Any, spec: Any) -> DTensor:
    # not from_local, which would ask the other ranks for the shape of uneven parts, and move it to the mesh's device
    made: DTensor = DTensor(local, spec, requires_grad=False)  # type: ignore[no-untyped-call]
    return made


def _alias(tensor: DTensor) -> Any:
    try:
        local = _local(tensor)
    except TypeError:
        return None  # told by whoever captures it, with its place
    # an empty part has no address, yet tied weights are tied on every rank
    place = tensors.alias(local) or ("empty", local.untyped_storage()._cdata, local.dtype)
    return ("DTensor", place, tuple(tensor.shape), tensor.placements, id(tensor.device_mesh))


def from_part(leaf: Leaf, template: Any) -> Any:
    """Returns the DTensor of a leaf in the layout of the live one; of a whole leaf it takes the rank's own part.

    Raises:
        StateMismatchError: the shape of the whole or the part is another one.
    """
    wanted = layout(template)
    if tuple(leaf.shape) != tuple(template.shape):
        shapes = f"saved with shape {tuple(leaf.shape)}, live has {tuple(template.shape)}"
        raise StateMismatchError(f"a tensor in parts: {shapes}", problems=[shapes])
    if isinstance(leaf, PartLeaf):
        if (leaf.offset, leaf.part_shape) != (wanted.offset, wanted.shape):
            problem = (
                f"the part {leaf.part_shape} at {leaf.offset} was read, live has {wanted.shape} at {wanted.offset}"
            )
            raise StateMismatchError(f"a tensor in parts: {problem}", problems=[problem])
        local = tensors.tensor_from_leaf(Leaf(leaf.data, leaf.dtype, leaf.part_shape, leaf.kind), None)
    else:
        whole = tensors.tensor_from_leaf(Leaf(leaf.data, leaf.dtype, leaf.shape, leaf.kind), None)
        box = tuple(slice(start, start + size) for start, size in zip(wanted.offset, wanted.shape, strict=True))
        # a copy: the whole need not stay in memory for the sake of a part
        local = whole[box].clone(memory_format=torch.contiguous_format)
    spec = template._spec
    if spec.tensor_meta is not None and spec.tensor_meta.dtype != local.dtype:
        spec = copy.copy(spec)
        spec.tensor_meta = spec.tensor_meta._replace(dtype=local.dtype)
    return _dtensor(local.to(_local(template).device), spec)


def may_have_parts(handle: Handle) -> bool:
    """Returns whether there may be DTensors in a component; without a copy only modules and optimizers can tell."""
    if isinstance(handle, ModuleHandle):
        held = itertools.chain(handle.module.parameters(), handle.module.buffers())
    elif isinstance(handle, OptimizerHandle):
        held = itertools.chain.from_iterable(group["params"] for group in handle.optimizer.param_groups)
    else:
        return True
    return any(isinstance(tensor, DTensor) for tensor in held)


def slabs(templates: Mapping[str, Any]) -> dict[str, Slab]:
    """Returns {path in the checkpoint: the part that this rank wants} of the DTensors in some live states.

    Args:
        templates: {component: its live state}, as `with_moments` completes it.
    """
    found: dict[str, Slab] = {}
    for name, tree in templates.items():
        finder = _Finder()
        finder.walk(tree)
        for path, slab in finder.leaves.items():
            if isinstance(slab, Slab):
                found[f"{encode_part(name)}/{path}"] = slab
    return found


class _Finder(Encoder):
    """Gives every leaf its path, as the encoder does, and notes layouts in the place of values."""

    def leaf(self, kind: LeafKind, obj: Any, path: str) -> Any:
        return super().leaf(replace(kind, to_leaf=_layout_or_none), obj, path)


def _layout_or_none(obj: Any) -> Any:
    return layout(obj) if isinstance(obj, DTensor) else None


def with_moments(handle: Handle, live: Any, shapes: Mapping[str, tuple[int, ...]]) -> Any:
    """Returns a live state with stand-ins where an optimizer that was made just now lacks what was saved.

    A fresh optimizer has no moments, and a moment has the layout of its parameter: so the parameters stand in for
    them, wherever the saved leaf has the shape of its parameter and that is a DTensor.

    Args:
        handle: of the component; any but an optimizer's gives back `live`.
        live: what it captured.
        shapes: {path of a leaf within the component: its whole shape} in the checkpoint.
    """
    if not isinstance(handle, OptimizerHandle):
        return live
    parameters = [parameter for group in handle.optimizer.param_groups for parameter in group["params"]]
    state = {key: dict(entries) for key, entries in live.items["state"].items()}
    for path, shape in shapes.items():
        top, _, rest = path.partition("/")
        number, _, name = rest.partition("/")
        # the count of steps is no moment, though it has the shape of a parameter without axes
        if top != "state" or not number.isdecimal() or "/" in name or int(number) >= len(parameters) or name == "step":
            continue
        parameter = parameters[int(number)]
        if isinstance(parameter, DTensor) and tuple(parameter.shape) == tuple(shape):
            state.setdefault(int(number), {}).setdefault(name, parameter)
    return ObjectState(live.type_name, live.attributes, items={**live.items, "state": state})


def led_by_rank_0(name: str, handle: Handle) -> frozenset[str]:
    """Returns the paths of leaves that may differ between ranks, where rank 0's copy is that of all.

    These are the buffers of a `DistributedDataParallel` with `broadcast_buffers` (running means of batch norms): each
    forward pass begins by sending rank 0's to all others.
    """
    if not isinstance(handle, ModuleHandle) or not handle.broadcasts_buffers:
        return frozenset()
    names = [buffer for buffer, _ in handle.module.named_buffers(remove_duplicate=False)]
    prefix = encode_part(name)
    return frozenset(f"{prefix}/{part}{path_part(buffer)}" for buffer in names for part in ("", "not_persistent/"))


def _marks(tensor: DTensor) -> Any:
    return leaf_kinds["torch"].marks(tensor)


def _marked(base: DTensor, marks: Any) -> Any:
    return leaf_kinds["torch"].marked(base, marks)


# in files there are tensors alone: what part of one a rank held says nothing about it
add_leaf(
    LeafKind(
        "torch.DTensor", lambda obj: isinstance(obj, DTensor), _to_leaf, from_part, _copy, _alias, _marks, _marked
    ),
    DTensor,
)
tensors.in_parts[DTensor] = from_part
