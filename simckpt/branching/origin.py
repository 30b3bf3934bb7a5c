"""Where a branch comes from, and which hyperparameters it and its ancestors had."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from simckpt.ancestry import ancestry
from simckpt.checkpoint import Checkpoint
from simckpt.errors import CheckpointNotFoundError, StoreError
from simckpt.storage import CommitRecord, RunRecord, StoreFiles, TombstoneRecord

Records = Sequence[CommitRecord | TombstoneRecord]


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


@dataclass(frozen=True)
class Past:
    """What a run's hyperparameters have come to by its head.

    Attributes:
        values: those in force at the head; before the first commit the run's own.
        changed: keys that branches and rollbacks have set, those of the runs that it descends from included.
        names: of the runs that it descends from, and of those that imports among them were copied from.
        formerly: what the hyperparameters were before such a change, for that is what an unchanged command line gives.
    """

    values: Mapping[str, Any]
    changed: frozenset[str]
    names: frozenset[str]
    formerly: Sequence[Mapping[str, Any]]

    def named(self, given: Mapping[str, Any], run: str) -> set[str]:
        """Returns the keys that are given the run's name where they held that of a run it descends from.

        Scripts tend to have the run's name among their arguments.
        """
        before = {key: value for key, value in self.values.items() if isinstance(value, str)}
        return {key for key, value in given.items() if value == run and before.get(key) in self.names}


def past_of(files: StoreFiles, run: RunRecord) -> Past:
    """Returns what a run's hyperparameters have come to.

    Of the runs that it descends from, what cannot be read any longer is left out: then a value that only they had
    counts as a wish.

    Raises:
        DamagedError, FormatError: the record of the start that saved the head is needed and cannot be trusted.
    """
    damaged: dict[int, StoreError] = {}
    records = files.records(run.name, damaged=damaged)
    # training goes on from the newest that is left: what is in quarantine has changed nothing
    line = living(ancestry(records))
    by_rollbacks = _changes(line)
    values = {**run.hyperparameters, **by_rollbacks}
    # what a rollback did before an import, or in a record that is damaged, is told by the start of the head alone; and
    # a free key may have been given another value since
    if line and isinstance(line[-1], CommitRecord) and (by_rollbacks or damaged or line[0].kind == "import"):
        start = files.read_start(run.name, line[-1].start).hyperparameters
        values = {key: start.get(key, value) for key, value in values.items()}
    changed = {*by_rollbacks}
    formerly = [run.hyperparameters, *_before_rollbacks(files, run.name, records, line)]
    own, seen, imported = run.name, {run.name}, {run.imported.run} if run.imported else set()
    with contextlib.suppress(StoreError):
        while run.branch is not None and run.branch.run not in seen:
            branch = run.branch
            seen.add(branch.run)
            changed |= branch.overrides.keys()
            records = files.records(branch.run, damaged={})
            line = ancestry(records, to=run.origin)
            changed |= _changes(line).keys()
            if line and isinstance(line[-1], CommitRecord):
                formerly.append(files.read_start(branch.run, line[-1].start).hyperparameters)
            formerly += _before_rollbacks(files, branch.run, records, line)
            run = files.read_run(branch.run)
            imported |= {run.imported.run} if run.imported else set()
            formerly.append(run.hyperparameters)
    return Past(values, frozenset(changed), frozenset((seen - {own}) | imported), formerly)


def original_id(checkpoint: Checkpoint) -> str:
    """Returns the id that the random streams of a branch derive from: of the checkpoint that an import is a copy of.

    So a branch draws the same numbers in whichever store it begins.

    Raises:
        DamagedError, FormatError: the record of the checkpoint's run cannot be trusted.
    """
    imported = checkpoint.files.read_run(checkpoint.run).imported if checkpoint.kind == "import" else None
    return checkpoint.id if imported is None else imported.checkpoint


def living(line: Records) -> Records:
    """Returns a line as far as its newest checkpoint that is still there."""
    return line[: max((place for place, record in enumerate(line, 1) if isinstance(record, CommitRecord)), default=0)]


def _changes(line: Records) -> dict[str, Any]:
    """Returns {hyperparameter: value} of what the rollbacks on a line have set, the last one of a key."""
    changed: dict[str, Any] = {}
    for record in line:
        changes = (record.rollback or {}).get("changes") or {}
        changed |= changes.get("hyperparameters") or {}
    return changed


def _before_rollbacks(files: StoreFiles, run: str, records: Records, line: Records) -> list[Mapping[str, Any]]:
    """Returns the hyperparameters before each rollback on a line that has changed some.

    Those of the start that rolled back, where the rollback names it, and those of the last save before it.
    """
    rollbacks = {record.id for record in line if _changes([record])}
    found = []
    for before, record in itertools.pairwise([None, *records]):
        if record is not None and record.id in rollbacks:
            own = (record.rollback or {}).get("start")
            starts = [before.start] if isinstance(before, CommitRecord) else []
            for start in [own, *starts] if isinstance(own, str) else starts:
                with contextlib.suppress(StoreError):
                    found.append(files.read_start(run, start).hyperparameters)
    return found
