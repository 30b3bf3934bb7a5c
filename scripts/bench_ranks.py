"""How bench_distributed.py measures saves and restores of 1, 2, 4 ranks: simckpt beside DCP's own files.

All contenders save the same live objects of the same processes in turn, in an order that rotates: a module and its
Adam, and an array that each rank has of its own. Between two saves every number changes, so that each save is whole.
A save lasts from a barrier until its last rank has returned, and all files are synced then: by simckpt with the folders
that name them, by DCP's writer, left at its default, without. Within it the save before is removed, but for DCP with
simckpt's files, which keeps all. DCP is given state dicts that were made before. A restore
begins with files that were dropped from the page cache, and with spoiled objects; it is compared bit by bit. simckpt
verifies digests of what it reads, DCP's reader does not.
"""

import functools
import multiprocessing
import os
import shutil
import socket
import statistics
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import xxhash
from bench_harness import drop_from_cache
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import simckpt
import simckpt.checkpointer  # before the ranks are forked, which then need not
import simckpt.storage.store_files
from simckpt.distributed.dcp import HDF5StorageReader, HDF5StorageWriter, JSONLoadPlanner, JSONSavePlanner
from simckpt.distributed.voting import Ballot

LAYERS = 12  # of the module, each of the same width
TIMEOUT = 600.0  # [s] of the ranks for each other
LAYOUTS = ("ddp", "fsdp")


@dataclass(frozen=True)
class SavePlan:
    """What is measured.

    Attributes:
        counts: of ranks.
        layout: "ddp", all ranks have the module whole, or "fsdp", each has a part.
        size: of the module and its moments together [bytes].
        own: of the array that each rank has for itself [bytes].
        rounds: saves of each contender that are counted; one more warms up.
        restores: of each.
        folder: where to write.
    """

    counts: tuple[int, ...]
    layout: str
    size: int
    own: int
    rounds: int
    restores: int
    folder: Path


@dataclass
class Shown:
    """What one contender showed; of all ranks, as rank 0 knows it.

    Attributes:
        saves: until the last rank had returned [s].
        commits: of each save, what was left once the last rank had written its files [s].
        restores: until the last rank had returned [s].
        bytes: of the last save, by rank, files that belong to no rank under -1 [bytes].
    """

    saves: list[float] = field(default_factory=list)
    commits: list[float] = field(default_factory=list)
    restores: list[float] = field(default_factory=list)
    bytes: dict[int, int] = field(default_factory=dict)

    @property
    def imbalance(self) -> float:
        """The largest share of a rank over the mean."""
        shares = [size for rank, size in self.bytes.items() if rank >= 0]
        return max(shares) / statistics.mean(shares)


class Subject:
    """The live objects of one rank, and what DCP calls their state."""

    def __init__(self, plan: SavePlan, rank: int) -> None:
        torch.manual_seed(0)
        width = max(round((plan.size / 12 / LAYERS) ** 0.5), 4)  # a weight and two moments of 4 bytes each
        self.module = nn.Sequential(*(nn.Linear(width, width) for _ in range(LAYERS)))
        if plan.layout == "fsdp" and dist.get_world_size() > 1:
            for layer in self.module:
                fully_shard(layer)
            fully_shard(self.module)
        self.optimizer = torch.optim.Adam(self.module.parameters(), lr=1e-3)
        for parameter in self.module.parameters():
            parameter.grad = torch.ones_like(parameter)
        self.optimizer.step()
        self.own = np.random.default_rng(rank).random(max(plan.own // 8, 1))
        self.rank = rank

    def tensors(self) -> list[torch.Tensor]:
        """Returns what this rank has, as views."""
        live = [*self.module.parameters()]
        live += [state[key] for state in self.optimizer.state.values() for key in ("exp_avg", "exp_avg_sq")]
        local = [tensor.detach() for tensor in live]
        local = [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in local]
        return [*local, torch.from_numpy(self.own)]

    def change(self) -> None:
        """Changes every number, equally on all ranks that have it."""
        for tensor in self.tensors():
            tensor.mul_(0.999).add_(0.001)

    def spoil(self) -> None:
        """Overwrites every number."""
        for tensor in self.tensors():
            tensor.zero_()

    def digest(self) -> str:
        """Returns a digest of every bit."""
        whole = xxhash.xxh3_128()
        for tensor in self.tensors():
            whole.update(tensor.contiguous().numpy())
        return whole.hexdigest()

    def state_dict(self) -> dict[str, Any]:
        """Returns what DCP saves; arrays of each rank under a name of its own, for DCP keeps one of each name."""
        module, optimizer = get_state_dict(self.module, self.optimizer)
        return {"module": module, "optimizer": optimizer, f"own{self.rank}": torch.from_numpy(self.own)}

    def load(self, state: dict[str, Any]) -> None:
        """Puts into the live objects what DCP has loaded."""
        set_state_dict(
            self.module, self.optimizer, model_state_dict=state["module"], optim_state_dict=state["optimizer"]
        )


class Simckpt:
    """A run as any other, saved in the foreground."""

    name = "simckpt"

    def __init__(self, subject: Subject, folder: Path) -> None:
        self.subject, self.folder = subject, folder
        components = {"module": subject.module, "optimizer": subject.optimizer, "own": subject.own}
        self.run = simckpt.Store(folder).start("bench")
        self.checkpointer = self.run.checkpointer(
            components, save_when=simckpt.EverySteps(1), keep=simckpt.KeepLast(1), background=None, timeout=TIMEOUT
        )
        self.checkpointer.restore_latest()

    def prepare(self) -> None:
        """Has nothing to prepare."""

    def save(self, number: int) -> None:
        """Saves."""
        self.checkpointer.save(number)

    def restore(self) -> None:
        """Restores the newest."""
        self.checkpointer.restore_latest()

    def files(self) -> dict[int, list[Path]]:
        """Returns {rank: its files of the last save}; -1 for those of all."""
        return files_of_newest(self.folder)

    def close(self) -> None:
        """Gives the run back."""
        self.checkpointer.close()
        self.run.close()


class Dcp:
    """DCP with its own files, a folder for each save."""

    name = "DCP, its own files"

    def __init__(self, subject: Subject, folder: Path) -> None:
        self.subject, self.folder, self.last = subject, folder, folder
        self.state: dict[str, Any] = {}

    def prepare(self) -> None:
        """Makes the state dict, which is not counted."""
        self.state = self.subject.state_dict()

    def save(self, number: int) -> None:
        """Saves, and removes the save before."""
        before, self.last = self.last, self.folder / str(number)
        dcp.save(self.state, storage_writer=dcp.FileSystemWriter(self.last))
        if self.subject.rank == 0 and before != self.folder:
            shutil.rmtree(before)

    def restore(self) -> None:
        """Loads the last save into the live objects."""
        dcp.load(self.state, storage_reader=dcp.FileSystemReader(self.last))
        self.subject.load(self.state)

    def files(self) -> dict[int, list[Path]]:
        """Returns {rank: its files of the last save}; -1 for those of all."""
        found: dict[int, list[Path]] = {}
        for path in self.last.iterdir():
            rank = path.name.removeprefix("__").partition("_")[0]
            found.setdefault(int(rank) if rank.isdigit() else -1, []).append(path)
        return found

    def close(self) -> None:
        """Has nothing to give back."""


class SimckptDcp(Dcp):
    """DCP that plans, with simckpt's files."""

    name = "DCP, simckpt's files"

    def save(self, number: int) -> None:
        """Saves."""
        writer = HDF5StorageWriter(self.folder / "store", "bench", step=number, patience=TIMEOUT)
        dcp.save(self.state, storage_writer=writer, planner=JSONSavePlanner())

    def restore(self) -> None:
        """Loads the last save into the live objects."""
        reader = HDF5StorageReader(self.folder / "store", "bench")
        dcp.load(self.state, storage_reader=reader, planner=JSONLoadPlanner())
        self.subject.load(self.state)

    def prepare(self) -> None:
        """Makes the state dict, which is not counted."""
        self.state = self.subject.state_dict()

    def files(self) -> dict[int, list[Path]]:
        """Returns {rank: its files of the last save}; -1 for those of all."""
        return files_of_newest(self.folder / "store")


CONTENDERS: tuple[type[Any], ...] = (Simckpt, SimckptDcp, Dcp)


def files_of_newest(store: Path) -> dict[int, list[Path]]:
    """Returns {rank: its files} of the newest checkpoint; -1 for those of all."""
    newest = max((store / "runs/bench/checkpoints").glob("*/commit.json"))
    found: dict[int, list[Path]] = {}
    for path in newest.parent.iterdir():
        alone = path.name in ("state.h5", "leaves.json")
        rank = path.name.removeprefix("shard-").removeprefix("leaves-")[:5]
        found.setdefault(0 if alone else int(rank) if rank.isdigit() else -1, []).append(path)
    return found


class CommitClock:
    """Measures how long the commit takes in this process: the last vote, or what DCP's coordinator does in the end.

    A vote lasts until all have voted; so the shortest of all ranks', that of whoever came last, is the commit.
    """

    def __init__(self) -> None:
        self.took = float("inf")
        for cls, name in ((Ballot, "hold"), (dcp.FileSystemWriter, "finish")):
            setattr(cls, name, self._timed(getattr(cls, name)))

    def _timed(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            begun = time.perf_counter()
            try:
                return original(*args, **kwargs)
            finally:
                self.took = time.perf_counter() - begun

        return timed


def measure(plan: SavePlan, rank: int, size: int) -> dict[str, Shown]:
    """Returns what the contenders showed; all ranks call it, rank 0's answer is meant."""
    subject, clock = Subject(plan, rank), CommitClock()
    home = plan.folder / f"{plan.layout}-{size}"
    if rank == 0:
        for number in range(len(CONTENDERS)):
            (home / str(number)).mkdir(parents=True)
    dist.barrier()
    made = [kind(subject, home / str(number)) for number, kind in enumerate(CONTENDERS)]
    shown = {each.name: Shown() for each in made}
    for number in range(plan.rounds + 1):
        subject.change()
        for turn in range(len(made)):
            each = made[(turn + number) % len(made)]
            each.prepare()
            clock.took = float("inf")
            took = _together(functools.partial(each.save, number + 1))
            commit = _over_ranks(clock.took, dist.ReduceOp.MIN)
            if number:  # the first one warms up
                shown[each.name].saves.append(took)
                shown[each.name].commits.append(commit)
    wanted = subject.digest()
    for number in range(plan.restores):
        for turn in range(len(made)):
            each = made[(turn + number) % len(made)]
            files = each.files()
            shown[each.name].bytes = {rank: sum(path.stat().st_size for path in files[rank]) for rank in sorted(files)}
            drop_from_cache([path for paths in files.values() for path in paths])
            subject.spoil()
            shown[each.name].restores.append(_together(each.restore))
            if subject.digest() != wanted:
                raise SystemExit(f"{each.name} did not restore on rank {rank} of {size} what was saved")
    for each in made:
        each.close()
    return shown


def _together(work: Callable[[], object]) -> float:
    """Returns how long work took until the last rank had done it [s]."""
    dist.barrier()
    begun = time.perf_counter()
    work()
    return _over_ranks(time.perf_counter() - begun, dist.ReduceOp.MAX)


def _over_ranks(value: float, operation: Any) -> float:
    found = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(found, operation)
    return float(found)


def measure_ranks(plan: SavePlan) -> Iterator[tuple[int, dict[str, Shown]]]:
    """Yields each number of ranks with what the contenders showed.

    The ranks are forked, for each would import torch otherwise; so this process must have no thread but this one.
    """
    for size in plan.counts:
        context = multiprocessing.get_context("fork")
        receiver, sender = context.Pipe(duplex=False)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        started = [context.Process(target=_rank, args=(plan, rank, size, port, sender)) for rank in range(size)]
        for process in started:
            process.start()
        sender.close()
        try:
            found = receiver.recv()
        except EOFError:
            raise SystemExit(f"measuring {size} ranks failed, see above") from None
        finally:
            for process in started:
                process.join(TIMEOUT)
                process.kill()
        yield size, found


def _rank(plan: SavePlan, rank: int, size: int, port: int, sender: Any) -> None:
    address, timeout = f"tcp://127.0.0.1:{port}", timedelta(seconds=TIMEOUT)
    try:
        dist.init_process_group("gloo", init_method=address, rank=rank, world_size=size, timeout=timeout)
        shown = measure(plan, rank, size)
        if rank == 0:
            sender.send(shown)
        dist.destroy_process_group()
    except BaseException:
        traceback.print_exc()
        os._exit(1)
