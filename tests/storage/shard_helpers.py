"""States of several ranks, cut in one process, for the tests of their checkpoints; expected values are numpy's own."""

from __future__ import annotations

import json
from dataclasses import dataclass, field

import numpy as np
from log_helpers import Log
from storage_helpers import leaf, new_store

from simckpt.state.leaf import Leaf, PartLeaf
from simckpt.state.tree import Encoded
from simckpt.storage import CommitDraft, Shard, StoreFiles
from simckpt.storage.durable import Disk
from simckpt.storage.preparing import Prepared

RUN = "ant-ppo"


def tree(keys) -> bytes:
    """The structure of a dict of arrays."""
    values = [each for key in keys for each in (key, {"leaf": key})]
    return json.dumps(
        {"tree": 1, "root": {"node": 0}, "nodes": [["dict", values]]}, separators=(",", ":"), ensure_ascii=False
    ).encode()


def rows_cut(shape: tuple[int, ...], count: int) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """As torch.chunk cuts the first axis: uneven, the last ones perhaps empty."""
    step = -(-shape[0] // count)
    starts = [min(rank * step, shape[0]) for rank in range(count)]
    stops = [min(start + step, shape[0]) for start in starts]
    rest = (0,) * (len(shape) - 1)
    return [((start, *rest), (stop - start, *shape[1:])) for start, stop in zip(starts, stops, strict=True)]


def columns_cut(shape: tuple[int, ...], count: int) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    return [
        ((start[1], start[0], *start[2:]), (own[1], own[0], *own[2:]))
        for start, own in rows_cut((shape[1], shape[0], *shape[2:]), count)
    ]


def grid_cut(shape: tuple[int, ...], count: int) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Along two axes where the count allows that, as FSDP over tensor parallelism does."""
    if count % 2:
        return columns_cut(shape, count)
    boxes = []
    for (row, _), (height, _) in rows_cut(shape[:2], count // 2):
        for (_, column), (_, width) in columns_cut(shape[:2], 2):
            boxes.append(((row, column, *(0 for _ in shape[2:])), (height, width, *shape[2:])))
    return boxes


def arrays(seed: int = 0) -> dict[str, Leaf]:
    """The leaves that ranks hold in parts, whole, as a file stores them."""
    rng = np.random.default_rng(seed)
    words = np.array(["", "a", "été", "straw"] * 3, "<U5")
    complex_ = rng.standard_normal((6, 3)) + 1j * rng.standard_normal((6, 3))
    return {
        "rows": leaf(rng.standard_normal((7, 5)).astype(np.float32)),
        "columns": leaf(rng.integers(-9, 9, (4, 10), np.int64)),
        "grid": leaf(rng.standard_normal((6, 8, 2))),
        "half": leaf(rng.integers(0, 2**16, (9, 3), np.uint16), dtype="bfloat16", kind="torch"),
        "words": Leaf(words.view("<u4").reshape(12, 5), "<U5", (12,), "numpy"),
        "waves": Leaf(np.stack([complex_.real, complex_.imag], -1), "complex128", (6, 3), "numpy"),
        "few": leaf(rng.standard_normal((2, 3))),
        "none": leaf(np.empty((0, 4), np.float32)),
    }


CUTS = {"columns": columns_cut, "waves": columns_cut, "grid": grid_cut}


def part_of(whole: Leaf, box: tuple[tuple[int, ...], tuple[int, ...]]) -> PartLeaf:
    start, shape = box
    place = tuple(slice(first, first + size) for first, size in zip(start, shape, strict=True))
    return PartLeaf(np.ascontiguousarray(whole.data[place]), whole.dtype, whole.shape, whole.kind, start)


def whole_state(count: int, seed: int = 0) -> dict[str, Encoded]:
    """What a reader sees, without logs: the components in the order of the ranks that have them first."""
    rng = np.random.default_rng(seed + 1)
    agent = {**arrays(seed), "bias": leaf(rng.standard_normal(3)), "step": leaf(np.array(seed, np.int64))}
    found = {"agent": Encoded(agent, tree(agent))}
    for rank in range(count):
        envs = {"qpos": leaf(rng.standard_normal((2, rank + 1))), "names": leaf(np.array([rank], np.uint8))}
        found[f"envs@{rank}"] = Encoded(envs, tree(envs))
    return found


def rank_state(count: int, rank: int, seed: int = 0) -> dict[str, Encoded]:
    """What one rank writes: its parts, the plain leaves that fall to it, its own envs; rank 0 writes the structure."""
    whole = whole_state(count, seed)
    agent: dict[str, Leaf] = {}
    for number, (key, found) in enumerate(whole["agent"].leaves.items()):
        if key in arrays():
            agent[key] = part_of(found, CUTS.get(key, rows_cut)(found.shape, count)[rank])
        elif number % count == rank:
            agent[key] = found
    return {
        "agent": Encoded(agent, tree(whole["agent"].leaves) if rank == 0 else b""),
        f"envs@{rank}": whole[f"envs@{rank}"],
    }


@dataclass
class Ranks:
    """Several ranks in one process, each with the store opened on its own; rank 0 holds the run's claim."""

    stores: list[StoreFiles]
    disks: list[Disk] = field(default_factory=list)

    @property
    def count(self) -> int:
        return len(self.stores)

    def prepare(self, states: list[dict[str, Encoded]]) -> list[Prepared]:
        return [
            store.prepare(RUN, state, shard=Shard(rank, self.count))
            for rank, (store, state) in enumerate(zip(self.stores, states, strict=True))
        ]

    def save(self, states: list[dict[str, Encoded]], *, step: int = 0, parent: str | None = None):
        """As the protocol does it: all prepare, report by JSON, rank 0 publishes, all conclude or discard."""
        prepared = []
        try:
            for rank, (store, state) in enumerate(zip(self.stores, states, strict=True)):
                prepared.append(store.prepare(RUN, state, shard=Shard(rank, self.count)))
            root = self.stores[0].path
            reports = [prepared[0], *(Prepared.from_json(root, each.to_json()) for each in prepared[1:])]
            commit = self.stores[0].publish_shards(RUN, CommitDraft(parent, step), reports)
        except BaseException:
            for store, each in zip(self.stores, prepared, strict=False):
                store.discard(each)
            raise
        for store, each in zip(self.stores, prepared, strict=True):
            store.conclude(RUN, each)
        return commit, prepared

    def save_seed(self, seed: int, **arguments):
        return self.save([rank_state(self.count, rank, seed) for rank in range(self.count)], step=seed, **arguments)


def ranks(path, count: int, *, disks: list[Disk] | None = None) -> Ranks:
    first = new_store(path, disk=disks[0] if disks else None)
    others = [StoreFiles.open(path, disk=disks[rank] if disks else None) for rank in range(1, count)]
    return Ranks([first, *others], disks or [])


def replay_states(count: int, logs: list[Log], seed: int = 0, **large: np.ndarray) -> list[dict[str, Encoded]]:
    """Each rank has a replay buffer of its own besides, and perhaps a large array that is cut by rows."""
    states = [rank_state(count, rank, seed) for rank in range(count)]
    for rank, state in enumerate(states):
        state[f"replay@{rank}"] = Encoded(logs[rank].capture(), tree(logs[rank].columns))
        for key, array in large.items():
            state["agent"].leaves[key] = part_of(leaf(array), rows_cut(array.shape, count)[rank])
    if large:
        keys = [*whole_state(count, seed)["agent"].leaves, *large]
        states[0]["agent"] = Encoded(states[0]["agent"].leaves, tree(keys))
    return states
