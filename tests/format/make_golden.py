"""Writes the golden store of the current format version: run once for each version, then committed and never changed.

    python tests/format/make_golden.py tests/format/golden/v0.3

The store is the same, byte for byte, on every machine: ids, times and values are fixed here.
"""

import sys
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from simckpt.state import LogColumn, Piece
from simckpt.state.tree import Encoded, encode
from simckpt.storage import BranchRecord, CommitDraft, ImportRecord, RunRecord, StartRecord, StoreFiles

RUN, BRANCH, IMPORT = "golden-ppo", "golden-branch", "golden-import"
STEPS = (137, 274, 411)
CAPACITY, NEW = 10, 6  # rows of the log, and new ones for each save


def trees(step: int, version: str = "v0.3") -> dict[str, dict[Any, Any]]:
    """Returns {component: state tree} at `step`, with one of each kind of value that a file treats differently."""
    later = {} if version == "v0.1" else {"frozen": frozen(), "replay": replay(step)}
    return {**first_trees(step), **later}


def frozen() -> dict[str, Any]:
    """Returns an array of 1 MB that does not change: the second save writes it into a segment."""
    return {"table": np.arange(1 << 20, dtype=np.uint32).astype(np.uint8).reshape(1024, 1024)}


def replay(step: int) -> dict[str, Any]:
    """Returns the newest rows of a log, oldest first."""
    added = NEW * (1 + STEPS.index(step))
    numbers = np.arange(max(0, added - CAPACITY), added)
    observations = (numbers[:, None, None] + np.linspace(0, 1, 6).reshape(2, 3)).astype(np.float32)
    return {"observations": observations, "rewards": numbers / 8, "valid": numbers % 3 > 0, "rows_added": added}


def first_trees(step: int) -> dict[str, dict[Any, Any]]:
    """Returns what version 0.1 had already."""
    count = np.arange(12, dtype=np.float64).reshape(3, 4)
    special = np.array([0x7FF8000000000001, 0x8000000000000000, 0xFFF0000000000000], np.uint64).view(np.float64)
    weight = torch.from_numpy((np.arange(16, dtype=np.int16) * 257).reshape(4, 4)).view(torch.bfloat16)
    return {
        "envs": {
            "physics": {"qpos": count + step / 8, "qvel": (count - step).astype(">f4")},
            "special": special,
            "empty": np.empty((0, 5), np.int32),
            "done": np.array([True, False, True]),
            "names": np.array(["left", "rechts"]),
            "scalar": np.array(-step, np.int64),
            "eval/return": np.arange(3, dtype=np.uint8),
        },
        "agent/policy": {0: {"weight": weight, "half": torch.linspace(-1, 1, 5, dtype=torch.float16)}, "tied": weight},
        "loop": {
            "step": step,
            "big": 2**100 + step,
            "order": OrderedDict(b=None, a=True),
            (1, "two"): [b"bytes", -0.0, float("inf"), {"x"}, range(3)],
        },
    }


def components(step: int, pieces: dict[str, tuple[Piece, ...]]) -> dict[str, Encoded]:
    """Returns the encoded components of the checkpoint at `step`; `pieces` say where the rows of the last one lie."""
    state = trees(step)
    for name, column in state["replay"].items():
        if name != "rows_added":
            older = kept(pieces.get(name, ()), len(column) - NEW)
            state["replay"][name] = LogColumn(column[-NEW:], len(column), older)
    return {name: encode(tree) for name, tree in state.items()}


def shared(step: int, pieces: dict[str, tuple[Piece, ...]]) -> Encoded:
    """Returns the encoded log as it was at `step`, all of whose rows lie in segments."""
    tree = replay(step)
    return encode(
        {
            name: column if name == "rows_added" else LogColumn(column[:0], len(column), pieces[name])
            for name, column in tree.items()
        }
    )


def kept(pieces: tuple[Piece, ...], rows: int) -> tuple[Piece, ...]:
    """Returns the newest rows of a log with one piece or none; a ring has overwritten the others."""
    return tuple(replace(piece, start=piece.stop - rows) for piece in pieces[-1:])


def ids() -> Iterator[str]:
    """Yields 0000...1, 0000...2 and so on."""
    number = 0
    while True:
        number += 1
        yield f"{number:032x}"


def make(path: Path) -> StoreFiles:
    """Returns a new store with three runs: one that was rolled back, a branch of what it left, and an import.

    The first has two checkpoints, one between them that was pruned, and the rollback to the first. Beside the runs lies
    the branch's checkpoint as an exported file.
    """
    numbers, times = ids(), iter(range(1_800_000_000, 1_900_000_000))
    store = StoreFiles.create(path, clock=lambda: float(next(times)), new_id=lambda: next(numbers))
    record = RunRecord(
        id="f" * 32,
        name=RUN,
        created=1.8e9,
        hyperparameters={
            "learning_rate": 3e-4,
            "layers": (64, 64),
            "seed": 1,
            "anneal": True,
            "env_id": "Ant-v5",
            "clip": None,
            "target_kl": float("inf"),
        },
        experiment="golden",
        git={"commit": "c" * 40, "dirty": False},
        versions={"python": "3.11.7", "simckpt": "0.1.0"},
        host="golden",
    )
    store.write_run(RUN, record)
    start = store.write_start(RUN, start_of(record))
    parent, pieces = None, [{}]
    with store.claim(RUN):
        for step in STEPS:
            metrics = {"eval/return": step / 3, "loss": float("nan")}
            draft = CommitDraft(
                parent, step, metrics, versions={"python": "3.11.7"}, host="golden", start=start, duration=0.25
            )
            commit = store.commit(RUN, draft, components(step, pieces[-1]))
            parent = commit.record.id
            pieces.append({leaf.key: leaf.pieces for leaf in commit.leaves.values() if leaf.component == "replay"})
        store.prune(RUN, 2, "pruned to show a tombstone")
        store.tag(RUN, 3, "good")
        store.pin(RUN, 3)
        store.add_metrics(RUN, 3, {"eval/late": 2.5})
        roll_back(store, record, pieces[1])
    make_branch(store, record, pieces[3])
    make_import(store, record)
    store.export(BRANCH, 1, path / "exported.h5", metrics={"eval/return": 0.5})
    for folder in ("tmp", "trash"):
        (path / folder).rmdir()
    return store


def start_of(record: RunRecord, **changed: Any) -> StartRecord:
    """Returns the record of a start with the hyperparameters of a run, some of them changed."""
    git = {"commit": "c" * 40, "dirty": True, "diff": "-1\n+2\n"}
    values = {**record.hyperparameters, **changed}
    return StartRecord(record.created, values, record.experiment, git, record.versions, "golden", {"cpu": "golden"})


def roll_back(store: StoreFiles, record: RunRecord, pieces: dict[str, tuple[Piece, ...]]) -> None:
    """Commits the return to the first checkpoint, which abandons the third."""
    target, _, head = store.records(RUN)
    changes = {"description": "Reseed() & Scale(learning_rate=0.5)", "hyperparameters": {"learning_rate": 1.5e-4}}
    draft = CommitDraft(
        target.id,
        target.step,
        target.metrics,
        kind="rollback",
        versions={"python": "3.11.7"},
        host="golden",
        rollback={"abandoned": head.id, "level": 1, "changes": changes, "reason": "eval/return fell"},
        start=store.write_start(RUN, start_of(record, learning_rate=1.5e-4)),
        duration=0.25,
    )
    state = {name: encode(tree) for name, tree in trees(target.step).items() if name != "replay"}
    store.commit(RUN, draft, {**state, "replay": shared(target.step, pieces)})


def make_branch(store: StoreFiles, record: RunRecord, pieces: dict[str, tuple[Piece, ...]]) -> None:
    """Makes a branch of the abandoned checkpoint, with a checkpoint of its own that shares the rows."""
    origin = store.commit_record(RUN, 3)
    overrides = {"learning_rate": 1e-4, "layers": (32,)}
    own = replace(
        record,
        id="b" * 32,
        name=BRANCH,
        hyperparameters={**record.hyperparameters, **overrides},
        origin=origin.id,
        branch=BranchRecord(RUN, origin.seq, origin.step, overrides, "reseed"),
    )
    store.write_run(BRANCH, own)
    start = store.write_start(BRANCH, start_of(own))
    state = {"loop": encode(trees(origin.step)["loop"]), "replay": shared(origin.step, pieces)}
    store.commit(BRANCH, CommitDraft(origin.id, origin.step, start=start, host="golden"), state)


def make_import(store: StoreFiles, record: RunRecord) -> None:
    """Makes a run that holds a copy from another store."""
    source = ImportRecord(store="e" * 32, run="elsewhere", checkpoint="d" * 32)
    store.write_run(IMPORT, replace(record, id="a" * 32, name=IMPORT, imported=source))
    start = store.write_start(IMPORT, start_of(record))
    draft = CommitDraft(None, STEPS[0], {"loss": 1.0}, kind="import", start=start, host="golden")
    store.commit(IMPORT, draft, {"loop": encode(trees(STEPS[0])["loop"])})


if __name__ == "__main__":
    make(Path(sys.argv[1]))
