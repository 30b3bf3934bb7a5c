"""Where runs come from: the tree of the runs of a store, with the rollbacks and the abandoned parts of each.

Read from the records alone, through the catalog, so that ten thousand checkpoints take less than a second.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from simckpt import presentation
from simckpt.ancestry import abandoned_ids
from simckpt.branching import drawing
from simckpt.catalog import Catalog, Contents
from simckpt.errors import StoreError
from simckpt.storage import CommitRecord, ImportRecord, RunRecord, StoreFiles, TombstoneRecord

Record = CommitRecord | TombstoneRecord


@dataclass(frozen=True, slots=True)
class Commit:
    """One commit of a run.

    Attributes:
        id: of the checkpoint.
        seq: its number in the run.
        step: [env steps].
        parent: id of the checkpoint it goes on from, or None.
        kind: "save", "rollback", "import" or "exception".
        created: UTC time [s since 1970].
        metrics: those of the save, and those added later.
        size: what it added to the store [bytes]; 0 once it is pruned.
        abandoned: whether the head of its run does not descend from it, because of a rollback.
        pruned: whether only this record of it is left.
        evicted: whether its state is in the archive alone.
    """

    id: str
    seq: int
    step: int
    parent: str | None
    kind: str
    created: float
    metrics: Mapping[str, float]
    size: int
    abandoned: bool
    pruned: bool
    evicted: bool = False


@dataclass(frozen=True)
class RolledBackPart:
    """One rollback of a run, and what it left behind.

    Attributes:
        checkpoint: id of the rollback's own commit.
        left: id of the head it left.
        left_step: the step at which training stood [env steps]; that of `left`, if nothing newer is known.
        target: id of the checkpoint it went back to.
        target_step: of that one [env steps].
        level: of escalation.
        reason: why, for people.
        changes: what was changed, as the commit says.
        abandoned: ids of the checkpoints it left behind, oldest first.
    """

    checkpoint: str
    left: str
    left_step: int
    target: str
    target_step: int
    level: int
    reason: str
    changes: Mapping[str, Any]
    abandoned: tuple[str, ...]


@dataclass(frozen=True)
class RunLineage:
    """What one run adds to the tree.

    Attributes:
        name: of the run.
        id: its random id; "" if its record is damaged.
        created: UTC time of its first start [s since 1970].
        experiment: the id that groups runs, or None.
        hyperparameters: that it was first started with.
        origin: id of the checkpoint it started from, or None.
        origin_run: name of that one's run; None if it is in no run that was looked at.
        origin_step: step of that one [env steps], or None.
        overrides: {hyperparameter: value} of a branch that are not its origin's.
        rng: "continue" or "reseed" of a branch; "" for other runs.
        imported: what its first checkpoint is a copy of; None for other runs.
        commits: all of them in the order of commits, pruned and abandoned ones too.
        rollbacks: in the order of commits.
        damaged: messages on what cannot be read.
    """

    name: str
    id: str = ""
    created: float = math.inf
    experiment: str | None = None
    hyperparameters: Mapping[str, Any] = field(default_factory=dict)
    origin: str | None = None
    origin_run: str | None = None
    origin_step: int | None = None
    overrides: Mapping[str, Any] = field(default_factory=dict)
    rng: str = ""
    imported: ImportRecord | None = None
    commits: tuple[Commit, ...] = ()
    rollbacks: tuple[RolledBackPart, ...] = ()
    damaged: tuple[str, ...] = ()

    @property
    def checkpoints(self) -> tuple[Commit, ...]:
        """The commits that have not been pruned."""
        return tuple(commit for commit in self.commits if not commit.pruned)

    @property
    def line(self) -> tuple[Commit, ...]:
        """The commits that the head descends from, pruned ones too, oldest first; the head is the last."""
        return tuple(commit for commit in self.commits if not commit.abandoned and commit.kind != "exception")

    @property
    def steps(self) -> tuple[int, int] | None:
        """The first and the last step of that line [env steps]; None without a commit."""
        line = self.line
        return (line[0].step, line[-1].step) if line else None

    @property
    def metrics(self) -> dict[str, float]:
        """The newest value of each metric on that line."""
        return {name: value for commit in self.line for name, value in commit.metrics.items()}

    @property
    def bytes_added(self) -> int:
        """What its checkpoints added to the store, pruned ones left out [bytes]."""
        return sum(commit.size for commit in self.commits)

    def as_json(self) -> dict[str, Any]:
        """Returns it as plain values; commits by their numbers alone."""
        steps, line = self.steps, self.line
        origin = {"checkpoint": self.origin, "run": self.origin_run, "step": self.origin_step}
        return {
            "run": self.name,
            "id": self.id or None,
            "created": None if math.isinf(self.created) else self.created,
            "experiment": self.experiment,
            "origin": None if self.origin is None else origin,
            "overrides": dict(self.overrides),
            "rng": self.rng or None,
            "imported": None if self.imported is None else dataclasses.asdict(self.imported),
            "steps": None if steps is None else list(steps),
            "head": line[-1].id if line else None,
            "checkpoints": len(self.checkpoints),
            "pruned": len(self.commits) - len(self.checkpoints),
            "abandoned": sum(commit.abandoned for commit in self.commits),
            "bytes_added": self.bytes_added,
            "metrics": self.metrics,
            "rollbacks": [
                {
                    "checkpoint": each.checkpoint,
                    "from": {"checkpoint": each.left, "step": each.left_step},
                    "to": {"checkpoint": each.target, "step": each.target_step},
                    "level": each.level,
                    "reason": each.reason,
                    "changes": dict(each.changes),
                    "abandoned": list(each.abandoned),
                }
                for each in self.rollbacks
            ],
            "damaged": list(self.damaged),
        }


@dataclass(frozen=True)
class Graph:
    """The tree of the runs of a store, or the part of it that leads to one run.

    Shown as text by `print`, as a table in a notebook, as a figure by `simckpt.plots.lineage`.

    Attributes:
        store: path of the store.
        runs: each before its branches; branches by where they leave their origin.
    """

    store: str
    runs: tuple[RunLineage, ...]

    def run(self, name: str) -> RunLineage:
        """Returns one run of the tree; raises KeyError for a name that it does not hold."""
        for run in self.runs:
            if run.name == name:
                return run
        raise KeyError(name)

    def branches(self, name: str | None) -> tuple[RunLineage, ...]:
        """Returns the runs that start from a checkpoint of a run; for None those that start from no run of the tree."""
        return tuple(run for run in self.runs if run.origin_run == name)

    def as_json(self) -> dict[str, Any]:
        """Returns the tree as plain values."""
        return {"store": self.store, "runs": [run.as_json() for run in self.runs]}

    def title(self) -> str:
        """Returns "store experiments: 3 runs, 27 checkpoints, 31.2 MB added"."""
        checkpoints = sum(len(run.checkpoints) for run in self.runs)
        added = presentation.size(sum(run.bytes_added for run in self.runs))
        counts = f"{presentation.count(len(self.runs), 'run')}, {presentation.count(checkpoints, 'checkpoint')}"
        return f"store {presentation.printable(self.store)}: {counts}, {added} added"

    def __str__(self) -> str:
        return "\n".join([self.title(), *drawing.lines(self)])

    def __repr__(self) -> str:
        return str(self)

    def _repr_html_(self) -> str:
        return drawing.html(self)


def graph(files: StoreFiles) -> Graph:
    """Returns the tree of all runs of a store; what is damaged is told in it and hides nothing else."""
    with Catalog(files) as catalog:
        runs = [_looked_at(files, catalog, name) for name in files.runs()]
    return Graph(str(files.path), _in_order(_with_origins(runs)))


def lineage(files: StoreFiles, name: str) -> Graph:
    """Returns the chain of runs that leads to one, from the first ancestor on.

    Raises:
        RunNotFoundError: there is no such run.
    """
    files.read_run(name)
    chain: list[RunLineage] = []
    with Catalog(files) as catalog:
        current: str | None = name
        while current is not None and current not in [run.name for run in chain]:
            run = _looked_at(files, catalog, current)
            chain.append(run)
            current = None if run.origin is None else _holder(files, catalog, run)
    return Graph(str(files.path), _in_order(_with_origins(chain)))


def _holder(files: StoreFiles, catalog: Catalog, run: RunLineage) -> str | None:
    """Returns the name of the run that holds a run's origin; first looked for where the record of the branch says."""
    names = files.runs()
    likely = [run.origin_run] if run.origin_run in names else []
    for name in dict.fromkeys([*likely, *names]):
        if any(commit.id == run.origin for commit in _looked_at(files, catalog, name).commits):
            return name
    return None


def _looked_at(files: StoreFiles, catalog: Catalog, name: str) -> RunLineage:
    """Returns what a run's own record and commits say; its origin's run is that of the record, not yet verified."""
    try:
        record, contents, evicted = files.read_run(name), catalog.contents(name), files.evicted(name)
    except StoreError as error:
        return RunLineage(name, damaged=(str(error),))
    return of_run(record, contents, evicted=evicted)


def of_run(record: RunRecord, contents: Contents, *, evicted: Collection[int] = ()) -> RunLineage:
    """Returns what one run adds to the tree, from its record, its commits and the numbers of the evicted ones."""
    abandoned = abandoned_ids(contents.records, origin=record.origin)
    commits = tuple(
        _commit(each, contents, abandoned=each.id in abandoned, evicted=each.seq in evicted)
        for each in contents.records
    )
    branch = record.branch
    return RunLineage(
        name=record.name,
        id=record.id,
        created=record.created,
        experiment=record.experiment,
        hyperparameters=record.hyperparameters,
        origin=record.origin,
        origin_run=None if branch is None else branch.run,
        origin_step=None if branch is None else branch.step,
        overrides={} if branch is None else branch.overrides,
        rng="" if branch is None else branch.rng,
        imported=record.imported,
        commits=commits,
        rollbacks=tuple(_rollbacks(contents.records)),
        damaged=tuple(map(str, [*contents.damaged.values(), *contents.damaged_marks.values()])),
    )


def _commit(record: Record, contents: Contents, *, abandoned: bool, evicted: bool) -> Commit:
    marks = contents.marks.get(record.id)
    return Commit(
        id=record.id,
        seq=record.seq,
        step=record.step,
        parent=record.parent,
        kind=record.kind,
        created=record.created,
        metrics=record.metrics if marks is None else {**record.metrics, **marks.metrics},
        size=record.size if isinstance(record, CommitRecord) else 0,
        abandoned=abandoned,
        pruned=isinstance(record, TombstoneRecord),
        evicted=evicted and isinstance(record, CommitRecord),
    )


def _rollbacks(records: Sequence[Record]) -> Iterable[RolledBackPart]:
    by_id = {record.id: record for record in records}
    for record in records:
        if record.kind != "rollback" or record.parent is None:
            continue
        facts = record.rollback or {}
        left = by_id.get(str(facts.get("abandoned")))
        target = by_id.get(record.parent)
        part: list[str] = []
        current = left
        while current is not None and current.id != record.parent:
            part.append(current.id)
            above = by_id.get(current.parent) if current.parent is not None else None
            # a parent was committed before its children, whatever a record says
            current = above if above is not None and above.seq < current.seq else None
        level, changes, step = facts.get("level"), facts.get("changes"), facts.get("step")
        yield RolledBackPart(
            checkpoint=record.id,
            left=str(facts.get("abandoned", "")),
            left_step=step if isinstance(step, int) else record.step if left is None else left.step,
            target=record.parent,
            target_step=record.step if target is None else target.step,
            level=level if isinstance(level, int) else 0,
            reason=str(facts.get("reason", "")),
            changes=changes if isinstance(changes, Mapping) else {},
            abandoned=tuple(part[::-1]),
        )


def _with_origins(runs: Sequence[RunLineage]) -> list[RunLineage]:
    """Returns the runs with their origin's run and step as these runs' commits say, for a record alone may be wrong."""
    wanted = {run.origin for run in runs if run.origin is not None}
    holders = {commit.id: (run.name, commit.step) for run in runs for commit in run.commits if commit.id in wanted}
    found = []
    for run in runs:
        name, step = holders.get(run.origin or "", (None, run.origin_step))
        found.append(replace(run, origin_run=None if name == run.name else name, origin_step=step))
    return found


def _in_order(runs: Sequence[RunLineage]) -> tuple[RunLineage, ...]:
    """Returns each run before its branches: first runs by age, branches by the step at which they leave."""
    below: dict[str | None, list[RunLineage]] = {}
    for run in sorted(runs, key=lambda run: (run.origin_step or 0, run.created, run.name)):
        below.setdefault(run.origin_run, []).append(run)
    ordered: list[RunLineage] = []
    pending = sorted(below.get(None, []), key=lambda run: (run.created, run.name), reverse=True)
    while pending:
        run = pending.pop()
        ordered.append(run)
        pending += reversed(below.get(run.name, []))
    # records that were tampered with may name each other as origins: they are shown as first runs
    reached = {run.name for run in ordered}
    return (*ordered, *(replace(run, origin_run=None) for run in runs if run.name not in reached))
