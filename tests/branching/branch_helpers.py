"""Runs with a few small checkpoints, made without a training loop."""

from pathlib import Path
from typing import Any

import numpy as np

import simckpt
from simckpt import state
from simckpt.checkpoint import Checkpoint
from simckpt.state import LogColumn
from simckpt.storage import CommitDraft

VALUES = {"learning_rate": 3e-4, "epochs": 10, "anneal": True, "layers": [64, 64], "target_kl": None, "env": "Ant-v5"}


def tree(step: int) -> dict[str, Any]:
    return {"weights": np.linspace(0, step, 7), "count": step, "names": ["a", "b"]}


def save(
    run: simckpt.Run,
    step: int,
    *,
    parent: Checkpoint | str | None = None,
    kind: str = "save",
    rollback: dict[str, Any] | None = None,
    metrics: dict[str, float] | None = None,
    components: dict[str, Any] | None = None,
) -> Checkpoint:
    """Commits a checkpoint; nothing of a training loop is needed."""
    draft = CommitDraft(
        parent=parent.id if isinstance(parent, Checkpoint) else parent,
        step=step,
        metrics=metrics or {},
        kind=kind,
        versions={"python": "3.11.7"},
        host="there",
        rollback=rollback,
        start=run.start_id(),
    )
    trees = {"agent": tree(step)} if components is None else components
    commit = run._files.commit(run.name, draft, {name: state.encode(each) for name, each in trees.items()})
    return Checkpoint(run._files, run.name, commit.record)


def rows(count: int, *, width: int = 4) -> dict[str, Any]:
    """A replay buffer's column, all of whose rows are new."""
    column = np.arange(count * width, dtype=np.float32).reshape(count, width)
    return {"observations": LogColumn(column, count, ()), "added": count}


def origin_run(
    path: Path, *, name: str = "a", values: dict[str, Any] | None = None
) -> tuple[simckpt.Store, Checkpoint]:
    """A store with one run of three checkpoints, at steps 10, 20 and 30; returns the one at 20."""
    store = simckpt.Store(path)
    with store.start(name) as run:
        run.configure(dict(VALUES if values is None else values))
        first = save(run, 10)
        second = save(run, 20, parent=first)
        save(run, 30, parent=second)
    return store, second
