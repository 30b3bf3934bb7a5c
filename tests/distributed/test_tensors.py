"""DTensors as leaves: the right part on every rank, copies, aliases, restores in place, and what is refused."""

import itertools
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from ranks import Ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from simckpt import state
from simckpt.distributed import tensors
from simckpt.errors import StateMismatchError, UnsupportedStateError
from simckpt.state.components import handle_for
from simckpt.state.leaf import Leaf, PartLeaf, Slab
from simckpt.state.staging import Arena

# {dimensions of the mesh: (shapes, placements)}: sizes that divide and that do not, fewer rows than ranks, none at all
CASES = {
    1: [((8, 6), (5, 3), (3, 1), (0, 4), (2, 0)), [(Replicate(),), (Shard(0),), (Shard(1),)]],
    2: [((5, 3), (1, 7)), [(Shard(0), Shard(0)), (Shard(0), Shard(1)), (Shard(1), Shard(0)), (Replicate(), Shard(0))]],
}


def whole_of(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return (torch.arange(int(np.prod(shape))) + 1).reshape(shape).to(dtype)


def parts(rank: int, size: int) -> list[str]:
    """Returns what is wrong with the parts of tensors of all shapes, placements and some dtypes."""
    problems = []
    meshes = [init_device_mesh("cpu", (size,)), init_device_mesh("cpu", (2, size // 2))]
    for mesh in meshes:
        for shape, placements in itertools.product(*CASES[mesh.ndim]):
            whole = whole_of(shape)
            tensor = distribute_tensor(whole, mesh, placements, src_data_rank=None)
            (leaf,) = state.encode({"w": tensor}).leaves.values()
            sizes, offsets = compute_local_shape_and_global_offset(tensor.shape, mesh, placements)
            box = tuple(slice(o, o + s) for o, s in zip(leaf.offset, leaf.part_shape, strict=True))
            same = (
                isinstance(leaf, PartLeaf)
                and leaf.kind == "torch"
                and leaf.shape == shape
                and leaf.data.tobytes() == whole[box].numpy().tobytes()
                and leaf.part_shape == tuple(sizes)
                # where a part is empty its place means nothing
                and (0 in leaf.part_shape or leaf.offset == tuple(offsets))
                and tensors.slabs({"a/b": {"w": tensor}}) == {"a%2Fb/w": Slab(leaf.offset, leaf.part_shape)}
            )
            back = state.decode({"w": leaf}, state.encode({"w": tensor}).structure, template={"w": tensor})["w"]
            again = state.decode(
                {"w": Leaf(whole.numpy(), "float32", shape, "torch")},
                state.encode({"w": whole}).structure,
                template={"w": tensor},
            )["w"]
            for one in (back, again):
                same = same and type(one) is DTensor and one.placements == tensor.placements
                same = same and torch.equal(one.to_local(), tensor.to_local())
            if not same:
                problems.append(f"{shape} {placements}: {leaf.offset} {leaf.part_shape}, torch says {offsets} {sizes}")
    return problems


def test_each_rank_captures_its_part_and_takes_it_back(ranks: Ranks) -> None:
    assert ranks.run(4, parts) == [[]] * 4


def other_dtypes(rank: int, size: int) -> object:
    mesh = init_device_mesh("cpu", (size,))
    found = []
    for dtype in (torch.bfloat16, torch.float8_e4m3fn, torch.complex64, torch.bool, torch.int64, torch.float64):
        tensor = distribute_tensor(whole_of((5, 2), dtype), mesh, [Shard(0)], src_data_rank=None)
        encoded = state.encode({"w": tensor})
        (leaf,) = encoded.leaves.values()
        back = state.decode(encoded.leaves, encoded.structure, template={"w": tensor})["w"]
        bits = [each.to_local().contiguous().view(torch.uint8).tolist() for each in (tensor, back)]
        found.append((leaf.dtype, leaf.part_shape, bits[0] == bits[1], back.dtype == dtype))
    # a moment that was saved in another dtype than the live tensor has keeps its own
    live = distribute_tensor(whole_of((5, 2)), mesh, [Shard(0)], src_data_rank=None)
    saved = state.encode({"w": live.to(torch.bfloat16)})
    found.append(state.decode(saved.leaves, saved.structure, template={"w": live})["w"].dtype == torch.bfloat16)
    return found


def test_parts_keep_their_dtype_and_bits(ranks: Ranks) -> None:
    for rank, (*found, kept) in enumerate(ranks.run(2, other_dtypes)):
        names = ["bfloat16", "float8_e4m3fn", "complex64", "bool", "int64", "float64"]
        assert found == [(name, (3 - rank, 2), True, True) for name in names]
        assert kept


class Tied(nn.Module):
    """Two names for one weight, of which some ranks have nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(4, 3, bias=False)
        self.other = nn.Linear(4, 3, bias=False)
        self.other.weight = self.one.weight
        self.register_buffer("scale", torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.one(x) * self.scale + self.other(x)


def copies(rank: int, size: int) -> object:
    mesh = init_device_mesh("cpu", (size,))
    module = fully_shard(Tied(), mesh=mesh)
    handle = handle_for("agent", module)
    captured = handle.capture()
    encoded = state.encode(captured)
    before = [leaf.data.copy() for leaf in encoded.leaves.values()]
    identities = [id(parameter) for parameter in module.parameters()]
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.to_local().mul_(5)
    apart = all(one.tobytes() == leaf.data.tobytes() for one, leaf in zip(before, encoded.leaves.values(), strict=True))
    handle.validate(captured)
    handle.apply(captured)
    again = state.encode(handle.capture())
    return {
        "leaves": list(encoded.leaves),
        "structure": encoded.structure,
        "apart": apart,
        "restored": [leaf.data.tobytes() for leaf in again.leaves.values()] == [one.tobytes() for one in before],
        "in place": identities == [id(parameter) for parameter in module.parameters()],
        "tied": module.one.weight is module.other.weight,
    }


def test_captures_are_copies_with_their_aliases_and_restores_are_in_place(ranks: Ranks) -> None:
    found = ranks.run(4, copies)
    assert len({each.pop("structure") for each in found}) == 1
    assert (
        found
        == [{"leaves": ["scale", "one.weight"], "apart": True, "restored": True, "in place": True, "tied": True}] * 4
    )


def staged(rank: int, size: int) -> object:
    mesh = init_device_mesh("cpu", (size,))
    tensor = distribute_tensor(torch.arange(100_000.0), mesh, [Shard(0)], src_data_rank=None)
    arena, places = Arena(), []
    for number in range(2):
        tensor.to_local().fill_(number)
        with arena.recording():
            copy = state.copy_tree({"w": tensor})["w"]
        tensor.to_local().fill_(-1)
        places.append((copy.to_local().data_ptr(), float(copy.to_local().sum())))
        arena.release()
    return places, arena.nbytes


def test_copies_of_parts_lie_in_the_arena(ranks: Ranks) -> None:
    for (first, second), size in ranks.run(2, staged):
        assert first[0] == second[0]
        assert (first[1], second[1]) == (0.0, 50_000.0)
        assert 200_000 <= size <= 250_000


def refused(rank: int, size: int) -> list[str]:
    mesh = init_device_mesh("cpu", (size,))
    with torch.no_grad():
        partial = DTensor.from_local(torch.ones(3), mesh, [Partial()], run_check=False)
    whole = torch.ones(4, 2)
    live = distribute_tensor(whole, mesh, [Shard(0)], src_data_rank=None)
    grown = distribute_tensor(whole.clone(), mesh, [Shard(0)], src_data_rank=None).requires_grad_() * 2
    told = []
    for tree in ({"w": partial}, {"w": grown}):
        try:
            state.encode(tree)
        except UnsupportedStateError as error:
            told.append(str(error))
    saved = state.encode({"w": live})
    across = distribute_tensor(whole, mesh, [Shard(1)], src_data_rank=None)
    larger = distribute_tensor(torch.ones(5, 2), mesh, [Shard(0)], src_data_rank=None)
    for template in (whole, across, larger, None):
        try:
            state.decode(saved.leaves, saved.structure, template={"w": template})
        except StateMismatchError as error:
            told.append(str(error))
    return told


def test_what_is_no_part_is_refused_with_the_reason(ranks: Ranks) -> None:
    for partial, graph, whole, across, larger, alone in ranks.run(2, refused):
        assert "w: an object of type torch.distributed.tensor.DTensor cannot be captured" in partial
        assert "Partial(sum), which is no part of its values: reduce it first" in partial
        assert "autograd graph" in graph
        assert "the live one is not held in parts" in whole
        assert "live has (4, 1)" in across
        assert "saved with shape (4, 2), live has (5, 2)" in larger
        assert "the live one is not held in parts" in alone


def strided(rank: int, size: int) -> list[Any]:
    """Returns parts of FSDP over tensor parallel, against what torch itself gathers; uneven ones as well."""
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    found = []
    for rows in (8, 12, 16):
        torch.manual_seed(1)
        module = nn.Sequential(nn.Linear(3, rows))
        parallelize_module(module, mesh["tp"], {"0": ColwiseParallel()})
        fully_shard(module, mesh=mesh["dp"])
        weight = module[0].weight
        (leaf,) = state.encode({"w": weight.detach()}).leaves.values()
        box = tuple(slice(o, o + s) for o, s in zip(leaf.offset, leaf.part_shape, strict=True))
        with torch.no_grad():
            whole = weight.full_tensor()
        found.append((str(weight.placements[0])[:2], whole[box].numpy().tobytes() == leaf.data.tobytes()))
    return found


def test_strided_shards_are_the_parts_that_torch_gathers(ranks: Ranks) -> None:
    assert ranks.run(4, strided) == [[("_S", True)] * 3] * 4


def outside(rank: int, size: int) -> object:
    """A tensor over some of the ranks."""
    mesh = dist.device_mesh.DeviceMesh("cpu", [0, 1])
    tensor = distribute_tensor(torch.ones(4, 3), mesh, [Shard(0)], src_data_rank=None)
    (leaf,) = state.encode({"w": tensor}).leaves.values()
    copied = state.copy_tree({"w": tensor})["w"]
    return leaf.offset, leaf.part_shape, tuple(leaf.shape), tuple(copied.shape)


def test_a_rank_outside_of_the_mesh_has_an_empty_part(ranks: Ranks) -> None:
    found = ranks.run(3, outside)
    assert [each[1] for each in found] == [(2, 3), (2, 3), (0, 0)]
    assert {each[2:] for each in found} == {((4, 3), (4, 3))}


def broadcast_buffers(rank: int, size: int) -> object:
    module = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)))
    handle = handle_for("agent", module)
    keys = list(state.encode(handle.capture()).leaves)
    return keys, sorted(tensors.led_by_rank_0("agent", handle))


def test_a_ddp_module_is_captured_without_its_wrapper_and_rank_0_leads_its_buffers(ranks: Ranks) -> None:
    keys, led = ranks.run(2, broadcast_buffers)[0]
    assert keys[:2] == ["0.weight", "0.bias"]
    buffers = ("num_batches_tracked", "running_mean", "running_var")
    assert led == sorted([f"agent/{kind}1.{name}" for name in buffers for kind in ("", "not_persistent/")])
