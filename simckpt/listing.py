"""What the runs of a store hold, and which of their checkpoints meet a condition."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from simckpt import query
from simckpt.ancestry import abandoned_ids, on_line
from simckpt.catalog import Contents
from simckpt.checkpoint import Checkpoint
from simckpt.errors import StoreError
from simckpt.run import Run
from simckpt.storage import CommitRecord, StoreFiles


@dataclass(frozen=True)
class RunContents:
    """What one run holds.

    Attributes:
        name: of the run.
        run: the run, to read, or None if its record is damaged; its checkpoints are there all the same.
        checkpoints: in the order of commits.
        damaged: (commit number, error) of what cannot be read of its checkpoints; None for the number stands for the
            run's own record.
        abandoned: ids of those of the checkpoints that a rollback left behind.
    """

    name: str
    run: Run | None
    checkpoints: list[Checkpoint]
    damaged: tuple[tuple[int | None, StoreError], ...]
    abandoned: frozenset[str] = frozenset()


def listed(files: StoreFiles, name: str, contents: Contents, *, abandoned: bool) -> RunContents:
    """Returns what a run holds; those that were abandoned are listed only if asked for."""
    damaged: list[tuple[int | None, StoreError]] = []
    run: Run | None = None
    try:
        run = Run(files, name)
    except StoreError as error:
        damaged.append((None, error))
    origin = None if run is None else run.record.origin
    records = contents.records
    if not abandoned:
        records = on_line(records, origin=origin, damaged=bool(contents.damaged))
    evicted = functools.cache(lambda: files.evicted(name))
    checkpoints = [
        Checkpoint(files, name, record, marks=lambda: contents.marks, evicted=evicted)
        for record in records
        if isinstance(record, CommitRecord)
    ]
    damaged += contents.damaged.items()
    damaged += [
        (checkpoint.seq, contents.damaged_marks[checkpoint.id])
        for checkpoint in checkpoints
        if checkpoint.id in contents.damaged_marks
    ]
    left = abandoned_ids(contents.records, origin=origin)
    return RunContents(name, run, checkpoints, tuple(damaged), left)


def matching(
    where: str,
    wanted: query.Query,
    checkpoints: list[Checkpoint],
    damaged: dict[tuple[str, int | None], StoreError] | None,
) -> list[Checkpoint]:
    """Returns the checkpoints that meet a condition; a short name is a metric's if any of them has that metric."""
    names = {condition.name for condition in query.conditions(wanted)} - query.FIELDS.keys()
    metrics = {name for checkpoint in checkpoints for name in checkpoint.metrics}
    meaning = {name: f"metrics.{name}" if name in metrics else query.full_name(name) for name in names}
    asked = {meaning.get(condition.name, condition.name) for condition in query.conditions(wanted)}
    needs_starts = any(map(query.is_of_start, asked)) or not names <= metrics
    starts = {(each.run, each.start): each for each in reversed(checkpoints)} if needs_starts else {}
    unreadable = _unreadable(starts.values(), damaged)
    if checkpoints and not names <= metrics:
        readable = [each for key, each in starts.items() if key not in unreadable]
        hyperparameters = {name for each in readable for name in query.dotted(each.hyperparameters)}
        if unreadable:
            # nobody knows what they call theirs
            hyperparameters |= {name for name in names if query.is_of_start(meaning[name])}
            hyperparameters |= {name.removeprefix("hyperparameters.") for name in hyperparameters}
        packages = {name for checkpoint in checkpoints for name in checkpoint.versions}
        query.check_names(where, wanted, metrics, hyperparameters, packages)

    def fact(checkpoint: Checkpoint, name: str) -> Any:
        full = meaning.get(name, name)
        lost = (checkpoint.run, checkpoint.start) in unreadable and query.is_of_start(full)
        return None if lost else checkpoint.fact(full)

    return [each for each in checkpoints if wanted.matches(functools.partial(fact, each))]


def _unreadable(
    checkpoints: Iterable[Checkpoint], damaged: dict[tuple[str, int | None], StoreError] | None
) -> set[tuple[str, str | None]]:
    """Returns (run, start) of those whose start cannot be read; without `damaged` the first error is raised."""
    found = set()
    for checkpoint in checkpoints:
        try:
            _ = checkpoint.hyperparameters
        except StoreError as error:
            if damaged is None:
                raise
            damaged.setdefault((checkpoint.run, checkpoint.seq), error)
            found.add((checkpoint.run, checkpoint.start))
    return found
