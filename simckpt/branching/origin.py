"""Where a branch comes from, and which hyperparameters it and its ancestors had."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

from simckpt.checkpoint import Checkpoint
from simckpt.errors import CheckpointNotFoundError, StoreError
from simckpt.run import ancestry
from simckpt.storage import CommitRecord, RunRecord, StoreFiles


def origin_of(files: StoreFiles, run: RunRecord) -> Checkpoint | None:
    """Returns the checkpoint that a run was branched from, or None if it is no branch.

    Looked for where the record says, and else, for a run may have been moved by hand, in the whole store.

    Raises:
        CheckpointNotFoundError: the origin has been pruned or removed.
        DamagedError, FormatError: its record cannot be trusted.
    """
    if run.origin is None:
        return None
    if run.branch is not None:
        with contextlib.suppress(StoreError):
            record = files.commit_record(run.branch.run, run.branch.seq)
            if isinstance(record, CommitRecord) and record.id == run.origin:
                return Checkpoint(files, run.branch.run, record)
    damaged: dict[int, StoreError] = {}
    for name in files.runs():
        for record in files.records(name, damaged=damaged):
            if record.id != run.origin:
                continue
            if isinstance(record, CommitRecord):
                return Checkpoint(files, name, record)
            raise CheckpointNotFoundError(
                f"checkpoint {record.id} (run {name!r}, step {record.step}), from which run {run.name!r} was branched, "
                f"has been pruned: {record.reason}"
            )
    if damaged:
        raise next(iter(damaged.values()))
    raise CheckpointNotFoundError(
        f"checkpoint {run.origin}, from which run {run.name!r} was branched, is no longer in the store"
    )


def changed_by_rollbacks(files: StoreFiles, run: str) -> dict[str, Any]:
    """Returns {key: value in force} of the hyperparameters that rollbacks on the head's line have changed."""
    changed: dict[str, Any] = {}
    line = ancestry(files.records(run, damaged={}))
    for record in line:
        changes = (record.rollback or {}).get("changes") or {}
        changed |= changes.get("hyperparameters") or {}
    if changed and isinstance(line[-1], CommitRecord):
        # a free key may have been given another value since
        values = files.read_start(run, line[-1].start).hyperparameters
        changed = {key: values.get(key, value) for key, value in changed.items()}
    return changed


def formerly(files: StoreFiles, run: RunRecord) -> list[Mapping[str, Any]]:
    """Returns the hyperparameters that a run was first started with, and those of the checkpoints it descends from.

    What cannot be read any longer is left out: then a value that only it has counts as a wish.
    """
    found, seen = [run.hyperparameters], {run.name}
    with contextlib.suppress(StoreError):
        while run.branch is not None and run.branch.run not in seen:
            branch = run.branch
            seen.add(branch.run)
            record = files.commit_record(branch.run, branch.seq)
            if isinstance(record, CommitRecord) and record.id == run.origin:
                found.append(files.read_start(branch.run, record.start).hyperparameters)
            run = files.read_run(branch.run)
            found.append(run.hyperparameters)
    return found
