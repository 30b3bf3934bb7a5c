"""Writes the golden store of the current format version: run once for each version, then committed and never changed.

    python tests/format/make_golden.py tests/format/golden/v0.2

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
from simckpt.storage import CommitDraft, RunRecord, StartRecord, StoreFiles

RUN = "golden-ppo"
STEPS = (137, 274, 411)
CAPACITY, NEW = 10, 6  # rows of the log, and new ones for each save


def trees(step: int, version: str = "v0.2") -> dict[str, dict[Any, Any]]:
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
    """Returns a new store with one run: two checkpoints, and one between them that was pruned."""
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
    git = {"commit": "c" * 40, "dirty": True, "diff": "-1\n+2\n"}
    start = store.write_start(
        RUN,
        StartRecord(
            record.created, record.hyperparameters, record.experiment, git, record.versions, "golden", {"cpu": "golden"}
        ),
    )
    parent, pieces = None, {}
    with store.claim(RUN):
        for step in STEPS:
            metrics = {"eval/return": step / 3, "loss": float("nan")}
            draft = CommitDraft(
                parent, step, metrics, versions={"python": "3.11.7"}, host="golden", start=start, duration=0.25
            )
            commit = store.commit(RUN, draft, components(step, pieces))
            parent = commit.record.id
            pieces = {leaf.key: leaf.pieces for leaf in commit.leaves.values() if leaf.component == "replay"}
        store.prune(RUN, 2, "pruned to show a tombstone")
        store.tag(RUN, 3, "good")
        store.pin(RUN, 3)
        store.add_metrics(RUN, 3, {"eval/late": 2.5})
    for folder in ("tmp", "trash"):
        (path / folder).rmdir()
    return store


if __name__ == "__main__":
    make(Path(sys.argv[1]))
