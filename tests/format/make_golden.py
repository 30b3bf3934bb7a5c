"""Writes the golden store of the current format version: run once for each version, then committed and never changed.

    python tests/format/make_golden.py tests/format/golden/v0.1

The store is the same, byte for byte, on every machine: ids, times and values are fixed here.
"""

import sys
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from simckpt.state.tree import Encoded, encode
from simckpt.storage import CommitDraft, RunRecord, StoreFiles

RUN = "golden-ppo"


def trees(step: int) -> dict[str, dict[Any, Any]]:
    """Returns {component: state tree} at `step`, with one of each kind of value that a file treats differently."""
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


def components(step: int) -> dict[str, Encoded]:
    """Returns the encoded components of the checkpoint at `step`."""
    return {name: encode(tree) for name, tree in trees(step).items()}


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
    parent = None
    with store.claim(RUN):
        for step in (137, 274, 411):
            metrics = {"eval/return": step / 3, "loss": float("nan")}
            draft = CommitDraft(parent, step, metrics, versions={"python": "3.11.7"}, host="golden")
            parent = store.commit(RUN, draft, components(step)).id
        store.prune(RUN, 2, "pruned to show a tombstone")
    (path / "tmp").rmdir()
    return store


if __name__ == "__main__":
    make(Path(sys.argv[1]))
