"""A small policy under every kind of parallelism, and a checkpoint of several ranks in memory: a stand-in for files."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from simckpt import state
from simckpt.distributed import tensors
from simckpt.state.components import handle_for
from simckpt.state.leaf import Leaf, PartLeaf
from simckpt.state.tree import Encoded

LAYOUTS = ("ddp", "fsdp", "tp", "2d")
OPTIMIZERS = {
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=1e-2),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=1e-2, momentum=0.9),
}
BATCH = 24


class Policy(nn.Module):
    """Layers whose sizes do not divide by four, and one that has fewer rows than ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 6)
        self.head = nn.Linear(6, 3)
        self.log_std = nn.Parameter(torch.zeros(3))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        return self.head(x + self.down(torch.tanh(self.up(x)))) + self.log_std


class Training:
    """A policy, an optimizer and steps that depend on nothing but their number."""

    def __init__(self, layout: str, optimizer: str, rank: int, size: int, *, seed: int = 0) -> None:
        torch.manual_seed(seed)
        module = Policy()
        self.layout, self.mesh = layout, None
        self.dp_rank, self.dp_size = rank, size
        if layout == "ddp":
            module = nn.parallel.DistributedDataParallel(module)
        elif layout == "fsdp":
            self.mesh = init_device_mesh("cpu", (size,))
            for child in (module.up, module.down, module.head):
                fully_shard(child, mesh=self.mesh)
            fully_shard(module, mesh=self.mesh)
        elif layout == "tp":
            self.mesh = init_device_mesh("cpu", (size,))
            parallelize_module(module, self.mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
            self.dp_rank, self.dp_size = 0, 1
        else:
            dp = max(size // 2, 1)
            self.mesh = init_device_mesh("cpu", (dp, size // dp), mesh_dim_names=("dp", "tp"))
            parallelize_module(module, self.mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
            fully_shard(module, mesh=self.mesh["dp"])
            self.dp_rank, self.dp_size = self.mesh.get_local_rank("dp"), dp
        self.module = module
        self.optimizer = OPTIMIZERS[optimizer](module.parameters())
        self.handles = {
            "agent": handle_for("agent", self.module),
            "optimizer": handle_for("optimizer", self.optimizer),
        }

    def warm_up(self) -> None:
        """Makes DDP deal its gradients into buckets as it does after the first step of a run.

        Their order decides in which order gradients of more than two ranks are summed, so a restart needs it for its
        first step; what else this changes, the restore puts back.
        """
        self.backward(0)

    def step(self, number: int) -> None:
        self.backward(number)
        self.optimizer.step()

    def backward(self, number: int) -> None:
        generator = torch.Generator().manual_seed(1000 + number)
        x = torch.randn(BATCH, 6, generator=generator)
        y = torch.sin(x[:, :3] * 2)
        x, y = x.chunk(self.dp_size)[self.dp_rank], y.chunk(self.dp_size)[self.dp_rank]
        loss = ((self.module(x) - y) ** 2).mean()
        self.optimizer.zero_grad()
        loss.backward()

    def capture(self) -> dict[str, Any]:
        return {name: handle.capture() for name, handle in self.handles.items()}

    def encoded(self) -> dict[str, Encoded]:
        return {name: state.encode(tree) for name, tree in self.capture().items()}

    def restore(self, saved: dict[str, Encoded]) -> None:
        """Puts a whole checkpoint into the live objects, by the parts that this rank wants."""
        shapes = {f"{name}/{path}": leaf.shape for name, each in saved.items() for path, leaf in each.leaves.items()}
        self.restore_from(
            shapes,
            lambda slabs: {
                name: Encoded(
                    {path: cut(leaf, slabs.get(f"{name}/{path}")) for path, leaf in each.leaves.items()}, each.structure
                )
                for name, each in saved.items()
            },
        )

    def restore_from(self, shapes: dict[str, tuple[int, ...]], read: Any) -> None:
        """Puts what `read` returns for the parts that this rank wants into the live objects."""
        templates = {}
        for name, handle in self.handles.items():
            prefix = f"{name}/"
            own = {path.removeprefix(prefix): shape for path, shape in shapes.items() if path.startswith(prefix)}
            templates[name] = tensors.with_moments(handle, handle.capture(), own)
        saved = read(tensors.slabs(templates))
        for name, handle in self.handles.items():
            tree = state.decode(saved[name].leaves, saved[name].structure, template=templates[name])
            handle.validate(tree)
            handle.apply(tree)

    def whole(self) -> dict[str, np.ndarray]:
        """Returns all tensors gathered by torch itself, by their paths."""
        found = {}
        module = getattr(self.module, "module", self.module)
        for key, value in module.state_dict().items():
            found[f"agent/{key}"] = whole_tensor(value)
        for number, entries in self.optimizer.state_dict()["state"].items():
            for key, value in entries.items():
                if value is not None:
                    found[f"optimizer/state/{number}/{key}"] = whole_tensor(value)
        return found


def whole_tensor(tensor: torch.Tensor) -> np.ndarray:
    with torch.no_grad():
        found = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return found.detach().clone().numpy()


def cut(leaf: Leaf, slab: state.leaf.Slab | None) -> Leaf:
    """Returns what a reader gives for a slab of a whole leaf."""
    if slab is None:
        return leaf
    box = tuple(slice(start, start + size) for start, size in zip(slab.offset, slab.shape, strict=True))
    return PartLeaf(np.ascontiguousarray(leaf.data[box]), leaf.dtype, leaf.shape, leaf.kind, slab.offset)


def merged(encoded: list[dict[str, Encoded]]) -> dict[str, Encoded]:
    """Returns the whole of what the ranks hold, after checking that parts tile it and that all else is the same."""
    whole = {}
    for name in encoded[0]:
        each = [one[name] for one in encoded]
        assert len({one.structure for one in each}) == 1
        assert len({tuple(one.leaves) for one in each}) == 1
        leaves = {path: merged_leaf([one.leaves[path] for one in each]) for path in each[0].leaves}
        whole[name] = Encoded(leaves, each[0].structure)
    return whole


def merged_leaf(leaves: list[Leaf]) -> Leaf:
    first = leaves[0]
    if not isinstance(first, PartLeaf):
        assert len({leaf.data.tobytes() for leaf in leaves}) == 1
        return first
    data = np.zeros((*first.shape, *first.data.shape[len(first.shape) :]), first.data.dtype)
    covered = np.zeros(first.shape, int)
    for leaf in leaves:
        box = tuple(slice(o, o + s) for o, s in zip(leaf.offset, leaf.part_shape, strict=True))
        # replicas are the same bits
        assert not covered[box].any() or data[box].tobytes() == leaf.data.tobytes()
        data[box] = leaf.data
        covered[box] += 1
    assert (covered > 0).all()
    return Leaf(data, first.dtype, first.shape, first.kind)


@dataclass
class Saved:
    """What a training run left behind."""

    encoded: dict[str, Encoded]
    whole: dict[str, np.ndarray]
    later: dict[str, np.ndarray]


def trained(layout: str, optimizer: str, rank: int, size: int) -> Saved:
    """Returns the state after three steps, and what two more made of it."""
    training = Training(layout, optimizer, rank, size)
    for number in range(3):
        training.step(number)
    encoded, whole = training.encoded(), training.whole()
    for number in range(3, 5):
        training.step(number)
    return Saved(encoded, whole, training.whole())


def resumed(layout: str, optimizer: str, rank: int, size: int, saved: dict[str, Encoded]) -> Saved:
    """Returns the state after a restore into objects made anew, and what two more steps made of it."""
    training = Training(layout, optimizer, rank, size, seed=1)
    if layout == "ddp":
        training.warm_up()
    training.restore(saved)
    encoded, whole = training.encoded(), training.whole()
    for number in range(3, 5):
        training.step(number)
    return Saved(encoded, whole, training.whole())
