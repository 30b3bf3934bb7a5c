"""Tensors in parts where a run has one rank, and on their way between one and several."""

from pathlib import Path
from typing import Any

import torch
from ranks import Ranks
from run_helpers import LIMIT
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import simckpt


class Model(torch.nn.Module):
    """A layer that FSDP2 shards, a matrix sharded by columns, and a vector that all ranks have."""

    def __init__(self, size: int) -> None:
        super().__init__()
        torch.manual_seed(3)
        mesh = init_device_mesh("cpu", (size,))
        self.layer = fully_shard(torch.nn.Linear(4, 5), mesh=mesh)
        self.columns = torch.nn.Parameter(distribute_tensor(torch.randn(3, 6), mesh, [Shard(1)]))
        self.vector = torch.nn.Parameter(distribute_tensor(torch.randn(7), mesh, [Replicate()]))

    def loss(self) -> Any:
        whole = self.columns.square().sum().full_tensor() + self.vector.square().sum().full_tensor()
        return self.layer(torch.ones(2, 4)).square().sum() + whole


def whole(tensor: Any) -> list[Any]:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().flatten().tolist()


def everything(model: Model, optimizer: Any) -> list[list[Any]]:
    moments = [value for each in model.parameters() for _, value in sorted(optimizer.state[each].items())]
    return [whole(tensor) for tensor in [*model.parameters(), *moments]]


def going_on(rank: int, size: int, store: str, last: int, background: str | None) -> Any:
    run = simckpt.Store(store).start("cart")
    model = Model(size)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    loop = simckpt.LoopState(step=0)
    checkpointer = run.checkpointer(
        {"agent": model, "optimizer": optimizer, "loop": loop},
        save_when=simckpt.EverySteps(2),
        background=background,
        timeout=30.0,
    )
    with run, checkpointer:
        restored = checkpointer.restore_latest()
        before = None if restored is None else everything(model, optimizer)
        while loop.step < last:
            optimizer.zero_grad()
            model.loss().backward()
            optimizer.step()
            loop.step += 1
            checkpointer.step(loop.step)
        checkpointer.wait()
        return before, everything(model, optimizer), checkpointer.last_error


def test_one_rank_saves_tensors_in_parts_and_they_come_back_on_one_and_on_two(ranks: Ranks, tmp_path: Path) -> None:
    undisturbed = ranks.run(1, going_on, str(tmp_path / "whole"), 4, "thread", limit=LIMIT)[0]
    store, last = str(tmp_path / "parts"), None
    ways = [(1, 2, "thread"), (1, 4, None), (2, 6, "thread"), (1, 8, "process"), (1, 8, "thread")]
    for size, until, background in ways:
        for before, after, error in (found := ranks.run(size, going_on, store, until, background, limit=LIMIT)):
            assert error is None
            assert before == last
            assert after == found[0][1]
        last = found[0][1]
        if until == 4:
            assert last == undisturbed[1]
    run = simckpt.Store(store).run("cart")
    assert [(each.step, each.shards) for each in run.checkpoints()] == [(2, 0), (4, 0), (6, 2), (8, 0)]
    report = simckpt.Store(store).check()
    assert report, report.findings
