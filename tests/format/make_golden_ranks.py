"""Writes the golden store of what version 0.3 has besides: made once, then committed and never changed.

    python tests/format/make_golden_ranks.py tests/format/golden_ranks

A run of two ranks, `golden-ranks`, with tensors in parts and a replay log for each rank; its archive lies beside the
store. By their numbers its commits are:

    1, 2  saves, in the archive alone; 2 is tagged, pinned, has later metrics and is the origin of `golden-trial`
    3     pruned
    4     was damaged: in quarantine, with a tombstone
    5     its record was damaged: in quarantine, with a tombstone of kind `lost`
    6     a save that was left behind, here and in the archive
    7     the rollback from 6 to 2, in the archive alone
    8     a save, here and in the archive

`golden-trial`, a branch of 2, has one checkpoint, of a single process, here and in the archive.
The store is the same, byte for byte, on every machine: ids, times and values are fixed here.
"""

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import h5py
import make_golden
import numpy as np
import torch

from simckpt.archive.objects import Objects
from simckpt.archive.passes import Moved, Pass
from simckpt.archive.places import parse_place
from simckpt.policies import KeepLast
from simckpt.state import LogColumn, Piece
from simckpt.state.leaf import Leaf, PartLeaf
from simckpt.state.tree import Encoded, encode
from simckpt.storage import BranchRecord, CommitDraft, RunRecord, Shard, StartRecord, StoreFiles, sealed
from simckpt.storage.archived import ArchiveRecord
from simckpt.storage.preparing import Prepared

RUN, TRIAL = "golden-ranks", "golden-trial"
RANKS, CAPACITY, NEW = 2, 10, 6  # rows of each log, and new ones for each save
# {commit number: how often the loop had saved on the way there}: rows and values follow from it
SAVES = {1: 1, 2: 2, 3: 3, 4: 4, 5: 5, 6: 6, 7: 2, 8: 3}
ARCHIVE, URL = "a" * 32, "s3://golden/archive"  # an address that is nobody's: a test names the folder in its place
# {leaf of the component that all ranks share: where its parts begin, by rank}; others are written by one rank alone
PARTS = {
    "weight": ((0, 0), (3, 0)),
    "table": ((0, 0), (0, 3)),
    "half": ((0, 0), (2, 0)),
    "few": ((0, 0), (1, 0)),
    "waves": ((0, 0), (0, 1)),
}
LED_BY_1 = ("bias", "decay")


def step(saves: int) -> int:
    """Returns the step of the state after so many saves."""
    return 100 * saves


def agent(saves: int) -> dict[str, Any]:
    """Returns what both ranks hold together, whole."""
    return {
        "weight": (np.arange(15) / 4 + saves).astype(np.float32).reshape(5, 3),
        "table": np.arange(8).reshape(2, 4) * 3 - saves,
        "half": torch.from_numpy((np.arange(6, dtype=np.int16) * 4369 + saves).reshape(3, 2)).view(torch.bfloat16),
        "few": np.full((1, 2), -0.0),
        "waves": np.arange(4).reshape(2, 2) + 1j * saves,
        "bias": np.array([saves, np.nan, np.inf]),
        "decay": {"rate": 0.125 * saves, "names": np.array(["left", "rechts"])},
        "step": step(saves),
    }


def envs(saves: int, rank: int) -> dict[str, Any]:
    """Returns what one rank has of its own; a rank has as many envs as its number says, and one more."""
    return {"qpos": np.arange(3 * (rank + 1)).reshape(rank + 1, 3) / 8 + saves, "elapsed": saves * 60 + rank}


def replay(saves: int, rank: int) -> dict[str, np.ndarray[Any, Any]]:
    """Returns the newest rows of the log of one rank, oldest first."""
    numbers = np.arange(max(0, NEW * saves - CAPACITY), NEW * saves)
    return {
        "rewards": numbers / 8 + 1000 * rank,
        "actions": (numbers[:, None] * 2 + np.arange(2) + 100 * rank).astype(np.int32),
        "done": numbers % 3 == rank,
    }


def trees(seq: int) -> dict[str, Any]:
    """Returns {component: state tree} of a checkpoint of several ranks, as its reader sees it."""
    saves = SAVES[seq]
    found: dict[str, Any] = {"agent": agent(saves)}
    for rank in range(RANKS):
        found |= {f"envs@{rank}": envs(saves, rank), f"replay@{rank}": replay(saves, rank)}
    return found


def trial() -> dict[str, Any]:
    """Returns the state of the only checkpoint of the branch."""
    return {"agent": agent(SAVES[2] + 10)}


def rank_state(seq: int, rank: int, pieces: dict[tuple[str, str], tuple[Piece, ...]]) -> dict[str, Encoded]:
    """Returns what one rank writes of a checkpoint; `pieces` say where the older rows of its log lie."""
    whole, saves = encode(agent(SAVES[seq])), SAVES[seq]
    leaves: dict[str, Leaf] = {}
    for key, leaf in whole.leaves.items():
        if key in PARTS:
            leaves[key] = part_of(leaf, PARTS[key], rank)
        elif (key.partition("/")[0] in LED_BY_1) == (rank == 1):
            leaves[key] = leaf
    log = {}
    for name, column in replay(saves, rank).items():
        older = pieces.get((f"replay@{rank}", name), ())
        known = sum(piece.stop - piece.start for piece in older)
        log[name] = LogColumn(column[known:], len(column), older)
    return {
        "agent": Encoded(leaves, whole.structure if rank == 0 else b""),
        f"envs@{rank}": encode(envs(saves, rank)),
        f"replay@{rank}": encode(log),
    }


def part_of(leaf: Leaf, starts: tuple[tuple[int, int], ...], rank: int) -> PartLeaf:
    """Returns the part of a leaf that begins where its rank's does, and ends where that of the next rank begins."""
    begin = starts[rank]
    end = list(leaf.shape)
    if rank + 1 < RANKS:
        end = [there or size for there, size in zip(starts[rank + 1], leaf.shape, strict=True)]
    box = tuple(slice(*each) for each in zip(begin, end, strict=True))
    return PartLeaf(np.ascontiguousarray(leaf.data[box]), leaf.dtype, leaf.shape, leaf.kind, begin)


def make(path: Path) -> StoreFiles:
    """Returns a new store in `path/store`, whose archive is `path/archive`."""
    numbers, times = make_golden.ids(), iter(range(1_800_000_000, 1_900_000_000))
    options: dict[str, Callable[[], Any]] = {
        "clock": lambda: float(next(times)),
        "new_id": lambda: next(numbers),
    }
    first = StoreFiles.create(path / "store", **options)
    stores = [first, StoreFiles.open(path / "store", **options)]
    values = {"learning_rate": 3e-4, "ranks": RANKS}
    record = RunRecord("f" * 32, RUN, 1.8e9, values, experiment="golden", host="golden")
    first.write_run(RUN, record)
    first.keep_reserve()
    save_all(stores, first.write_start(RUN, start_of(record)))
    make_trial(first, record)
    archive(first, path / "archive")
    for folder in ("tmp", "trash"):
        (first.path / folder).rmdir()
    return first


def start_of(record: RunRecord) -> StartRecord:
    """Returns the record of a start of a run."""
    return StartRecord(1.8e9, record.hyperparameters, "golden", None, {"python": "3.11.7"}, "golden", {"cpu": "golden"})


def save_all(stores: list[StoreFiles], start: str) -> None:
    """Makes the commits of the run of several ranks, and what happened to some of them."""
    first, made = stores[0], dict[int, str]()
    common = {"versions": {"python": "3.11.7"}, "host": "golden", "start": start, "duration": 0.25}
    with first.claim(RUN):
        for seq, saves in SAVES.items():
            # a rollback writes the rows of its target, which lie in segments
            before = {1: 0, 7: 2}.get(seq, seq - 1)
            draft = CommitDraft(made.get(before), step(saves), {"eval/return": saves / 3}, **common)
            if seq == 7:
                facts = {"abandoned": made[6], "level": 1, "changes": {"description": "KeepRows()"}, "reason": "fell"}
                draft = replace(draft, kind="rollback", rollback=facts)
            made[seq] = save(stores, seq, draft, before)
        first.prune(RUN, 3, "pruned to show a tombstone")
        first.tag(RUN, 2, "good")
        first.pin(RUN, 2)
        first.add_metrics(RUN, 2, {"eval/late": 2.5})
        damage(first, 4, "shard-00001-of-00002.h5", "agent/weight")
        first.quarantine(RUN, 4, "damaged, in quarantine: agent/weight differs from its digest")
        damage(first, 5, "commit.json")
        first.quarantine(RUN, 5, "damaged, in quarantine: its record is damaged")


def save(stores: list[StoreFiles], seq: int, draft: CommitDraft, before: int) -> str:
    """Commits what all ranks have prepared, as the protocol does it; returns the id."""
    prepared = []
    for rank, store in enumerate(stores):
        leaves = [] if before == 0 else [leaf for leaf in store.index(RUN, before) if leaf.pieces]
        kept = {(leaf.component, leaf.key): newest(leaf.pieces, seq) for leaf in leaves}
        prepared.append(store.prepare(RUN, rank_state(seq, rank, kept), shard=Shard(rank, RANKS)))
    told = [prepared[0], *(Prepared.from_json(stores[0].path, each.to_json()) for each in prepared[1:])]
    commit = stores[0].publish_shards(RUN, draft, told)
    for store, each in zip(stores, prepared, strict=True):
        store.conclude(RUN, each)
    return commit.record.id


def newest(pieces: tuple[Piece, ...], seq: int) -> tuple[Piece, ...]:
    """Returns where those older rows lie that a checkpoint still has: all of a rollback's, else what the ring keeps."""
    rows = sum(piece.stop - piece.start for piece in pieces)
    gone = 0 if seq == 7 else max(0, rows + NEW - CAPACITY)
    found = []
    for piece in pieces:
        cut = min(gone, piece.stop - piece.start)
        gone -= cut
        if cut < piece.stop - piece.start:
            found.append(replace(piece, start=piece.start + cut))
    return tuple(found)


def damage(store: StoreFiles, seq: int, name: str, leaf: str | None = None) -> None:
    """Turns the bits of a byte of a file of a checkpoint: the first of a leaf, or one in the middle."""
    path = store.path / "runs" / RUN / "checkpoints" / f"{seq:08d}" / name
    data = bytearray(path.read_bytes())
    place = len(data) // 2
    if leaf is not None:
        with h5py.File(path) as file:
            place = file[leaf].id.get_offset()
    data[place] ^= 0xFF
    path.write_bytes(data)


def make_trial(store: StoreFiles, record: RunRecord) -> None:
    """Makes a branch with a checkpoint of its own, which one process has written."""
    origin = store.commit_record(RUN, 2)
    branch = BranchRecord(RUN, 2, origin.step, {"learning_rate": 1e-4}, "continue")
    values = {**record.hyperparameters, "learning_rate": 1e-4}
    own = replace(record, id="b" * 32, name=TRIAL, hyperparameters=values, origin=origin.id, branch=branch)
    store.write_run(TRIAL, own)
    start = store.write_start(TRIAL, start_of(own))
    draft = CommitDraft(origin.id, 250, {"eval/return": 1.5}, start=start, host="golden", duration=0.25)
    store.commit(TRIAL, draft, {name: encode(tree) for name, tree in trial().items()})


def archive(store: StoreFiles, folder: Path) -> Moved:
    """Makes one pass, after which the newest checkpoint of each line alone is here; returns what was done."""
    created = sealed.time_to_json(1.8e9)
    objects = Objects(parse_place(folder))
    deed = {"requires": [], "id": ARCHIVE, "created": created, "archive_of": store.id}
    objects.put("store.json", sealed.seal("store", deed))
    store.write_archive(ArchiveRecord(ARCHIVE, URL, 1.8e9))
    moved = Pass(objects, store, ARCHIVE, policy=KeepLast(1), keep_fetched=0.0, going_on=lambda: True).run()
    assert not moved.problems, moved.problems
    # the log says where it was copied to, which differs between machines
    for log in [*store.path.glob("runs/*/events.jsonl"), *folder.glob("runs/*/events.jsonl")]:
        log.write_text(log.read_text().replace(str(parse_place(folder)), URL))
    return moved


if __name__ == "__main__":
    make(Path(sys.argv[1]))
