"""Carries population-based training out: trains the members, and makes the branches that were decided on.

Nothing is kept but the runs themselves: which member copied which is in the records of the branches, and its score in
those of the checkpoints, pruned ones included. An interrupted population finds its place by reading them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from simckpt.ancestry import ancestry
from simckpt.branching import fan_out
from simckpt.branching.branch import checked_overrides
from simckpt.branching.engines import Engine
from simckpt.branching.jobs import COMPLETE, branch_job, is_complete, train_branch
from simckpt.branching.population import Decision, Member, PopulationBasedTraining
from simckpt.branching.progress import Bars
from simckpt.branching.tracking import BranchResult, Tracked
from simckpt.checkpoint import Checkpoint
from simckpt.errors import CheckpointNotFoundError, ConflictError
from simckpt.run import Run
from simckpt.storage import CommitRecord, StoreFiles

ATTEMPTS = 2  # to train a member whose process was killed or interrupted; it goes on where it was


@dataclass(frozen=True)
class Standing:
    """Where one member stood at the end of one generation.

    Attributes:
        generation: from 1 on.
        member: from 0 on.
        run: the run that stood for it.
        step: of the checkpoint that it was ranked by [env steps]; None if it failed.
        score: the metric there.
        hyperparameters: the explored ones, in force then.
        copies: the run that it copies in the next generation, or None if it goes on as it is.
        reason: why; empty in the last generation.
        error: of a member that failed.
    """

    generation: int
    member: int
    run: str
    step: int | None
    score: float | None
    hyperparameters: Mapping[str, Any]
    copies: str | None = None
    reason: str = ""
    error: str = ""


class Population:
    """What became of a population; made by `PopulationBasedTraining.train`.

    Attributes:
        standings: every member at the end of every generation, in that order.
        runs: the names of the runs that stand for the members in the end.
    """

    def __init__(
        self, files: StoreFiles, name: str, settings: PopulationBasedTraining, standings: Sequence[Standing]
    ) -> None:
        self.standings = tuple(standings)
        self.runs = tuple(standing.run for standing in standings[-settings.size :])
        self._files = files
        self._name = name
        self._settings = settings

    def __repr__(self) -> str:
        generations = len(self.standings) // self._settings.size
        best = self._best()
        return (
            f"<Population {self._name!r} of {self._settings.size} after {generations} generations, the best is "
            f"{best.run!r} with {self._settings.metric} {best.score:.6g}>"
        )

    def _best(self) -> Standing:
        sign = 1.0 if self._settings.mode == "max" else -1.0
        last = self.standings[-self._settings.size :]
        ranking = [each for each in last if Member(each.score, {}).ranks]
        return max(ranking, key=lambda each: sign * (each.score or 0.0))

    def best(self) -> Checkpoint:
        """Returns the checkpoint of the best member at the end of the last generation.

        Raises:
            CheckpointNotFoundError: it has been pruned since.
        """
        standing = self._best()
        run = Run(self._files, standing.run)
        result = result_at(run, standing.step or 0, self._settings.metric)
        if result is None or result.checkpoint is None:
            raise CheckpointNotFoundError(f"the checkpoint of run {standing.run!r} at step {standing.step} was pruned")
        return result.checkpoint

    def table(self) -> list[dict[str, Any]]:
        """Returns a row for each member and generation, as `pandas.DataFrame` takes them."""
        return [
            {
                "generation": each.generation,
                "member": each.member,
                "run": each.run,
                "step": each.step,
                self._settings.metric: each.score,
                **each.hyperparameters,
                "copies": each.copies,
                "reason": each.reason,
                "error": fan_out.last_line(each.error),
            }
            for each in self.standings
        ]


class PopulationTraining:
    """One population while it is trained; the work of `PopulationBasedTraining.train`, which tells the arguments.

    Raises:
        ConfigurationError: another process cannot find `train`; or hyperparameters that the checkpoint lacks.
        ConflictError: there is a run of a member's name that does not come from the checkpoint.
    """

    def __init__(
        self,
        settings: PopulationBasedTraining,
        checkpoint: Checkpoint,
        train: Callable[..., object],
        *,
        name: str,
        engine: Engine,
        deadline: float | None,
        heartbeat: float | None,
        progress: bool,
    ) -> None:
        self._settings = settings
        self._origin = checkpoint
        self._files = checkpoint.files
        self._train = train
        self._name = name
        self._engine = engine
        self._track = functools.partial(Tracked, deadline=deadline, heartbeat=heartbeat)
        self._heartbeat = heartbeat
        self._progress = progress
        self._job(name, step=0)  # refused before anything is made, if no other process can find the function
        self._runs = self._first({f"{name}-{member:02d}": settings.first(member) for member in range(settings.size)})

    def _first(self, members: Mapping[str, Mapping[str, Any]]) -> list[Run]:
        """Returns the runs that members begin as, {name: overrides}; none is made if any of them cannot be."""
        existing = set(self._files.runs())
        values = self._origin.hyperparameters
        for name, overrides in members.items():
            if name not in existing:
                checked_overrides(values, overrides, source=f"{self._origin!r} (member {name!r})")
            elif Run(self._files, name).record.origin != self._origin.id:
                raise ConflictError(f"run {name!r} exists and does not come from {self._origin!r}: choose another name")
        return [
            Run(self._files, name) if name in existing else self._origin.branch(name, overrides, rng=self._settings.rng)
            for name, overrides in members.items()
        ]

    def run(self, generations: int) -> Population:
        """Returns the population after so many generations.

        Raises:
            CheckpointNotFoundError: no member came through a generation.
        """
        standings: list[Standing] = []
        for generation in range(1, generations + 1):
            standings += self._generation(generation, last=generation == generations)
        return Population(self._files, self._name, self._settings, standings)

    def _generation(self, generation: int, *, last: bool) -> list[Standing]:
        """Trains the members to the end of a generation and replaces those that are to copy others."""
        step = self._origin.step + generation * self._settings.interval
        existing = set(self._files.runs())
        copies = [f"{self._name}-{member:02d}-g{generation}" for member in range(self._settings.size)]
        # a member that was replaced is not trained again: if it has no result, it had failed
        errors = self._train_to(
            step,
            [
                run
                for run, copy in zip(self._runs, copies, strict=True)
                if copy not in existing and self._result(run, step) is None
            ],
        )
        results = [self._result(run, step) for run in self._runs]
        members = [
            Member(None if result is None else result.score, self._explored(run, result))
            for run, result in zip(self._runs, results, strict=True)
        ]
        alive = any(member.ranks for member in members)
        decisions = self._settings.decide(generation, members) if alive else self._give_up(generation, errors)
        before = self._runs
        if not last:
            self._runs = [
                self._next(number, decision, results, copies[number], existing, step + self._settings.interval)
                for number, decision in enumerate(decisions)
            ]
        return [
            Standing(
                generation,
                number,
                old.name,
                None if result is None else result.step,
                members[number].score,
                members[number].hyperparameters,
                copies=None if new is old or new.branch is None else new.branch.run,
                reason="" if last else decisions[number].reason,
                error=errors.get(old.name, ""),
            )
            for number, (old, new, result) in enumerate(zip(before, self._runs, results, strict=True))
        ]

    def _next(
        self,
        member: int,
        decision: Decision,
        results: Sequence[_Result | None],
        name: str,
        existing: set[str],
        following: int,
    ) -> Run:
        """Returns the run that stands for a member from now on: its old one, or the branch that it is to be."""
        old = self._runs[member]
        if name in existing:
            # what was carried out stays, whatever the settings are now
            run = Run(self._files, name)
            if run.branch is None or run.branch.run not in {other.name for other in self._runs}:
                raise ConflictError(f"run {name!r} exists and is no member of population {self._name!r}")
            return run
        if decision.source == member or self._result(old, following) is not None:
            return old
        source = results[decision.source]
        assert source is not None
        if source.checkpoint is None:
            raise CheckpointNotFoundError(
                f"run {self._runs[decision.source].name!r} pruned its checkpoint at step {source.step:,}, which member "
                f"{member} of population {self._name!r} is to copy: keep at least the last one, `KeepLast(1)`"
            )
        run = source.checkpoint.branch(name, decision.overrides, rng=self._settings.rng)
        run.log("copied", replaces=old.name, reason=decision.reason)
        return run

    def _give_up(self, generation: int, errors: Mapping[str, str]) -> NoReturn:
        text = next(iter(errors.values()), f"none has a number for {self._settings.metric!r}")
        raise CheckpointNotFoundError(
            f"no member of population {self._name!r} came through generation {generation}: {text}"
        )

    def _explored(self, run: Run, result: _Result | None) -> dict[str, Any]:
        """Returns the hyperparameters in force at a member's result; of one that is gone, those it was started with."""
        values = run.hyperparameters
        if result is not None and result.checkpoint is not None:
            values = result.checkpoint.hyperparameters
        return {key: values[key] for key in self._settings.explore}

    def _train_to(self, step: int, runs: Sequence[Run]) -> dict[str, str]:
        """Trains the runs up to a step, and returns {run: error} of those that have no result there."""
        errors: dict[str, str] = {}
        for _ in range(ATTEMPTS):
            results = self._attempt(step, runs)
            runs = [run for run in runs if self._result(run, step) is None]
            for run in runs:
                ended = results[run.name]
                lack = f"its training returned without a checkpoint at step {step:,} that has {self._settings.metric!r}"
                errors[run.name] = ended.error or lack
            runs = [run for run in runs if results[run.name].status in ("died", "interrupted")]
            if not runs:
                break
        return {name: error for name, error in errors.items() if self._result(Run(self._files, name), step) is None}

    def _attempt(self, step: int, runs: Sequence[Run]) -> dict[str, BranchResult]:
        tracked = {run.name: self._track(run) for run in runs}
        with Bars(list(tracked), shown=self._progress and bool(runs)) as bars:
            try:
                for run in runs:
                    if is_complete(run):
                        run.latest().untag(COMPLETE)  # of the generation before
                    tracked[run.name].future = self._engine.submit(train_branch, self._job(run.name, step=step))
                return fan_out.wait_for(tracked, bars)
            except BaseException:
                for each in tracked.values():
                    each.end()
                raise

    def _job(self, run: str, *, step: int) -> dict[str, Any]:
        train = functools.partial(self._train, until_step=step)
        return branch_job(self._files.path, run, train, log=None, heartbeat=self._heartbeat)

    def _result(self, run: Run, step: int) -> _Result | None:
        """Returns what a member is ranked by at the end of a generation; None if it has not got there."""
        return result_at(run, step, self._settings.metric)


@dataclass(frozen=True)
class _Result:
    """The checkpoint that a member is ranked by: the first of its line that has the metric from a step on."""

    step: int
    score: float
    checkpoint: Checkpoint | None  # None once it has been pruned


def result_at(run: Run, step: int, metric: str) -> _Result | None:
    """Returns the first result of a run from a step on, in the line of its head, pruned checkpoints included."""
    for record in ancestry(run._files.records(run.name, damaged={})):
        if record.step < step:
            continue
        checkpoint = Checkpoint(run._files, run.name, record) if isinstance(record, CommitRecord) else None
        metrics = record.metrics if checkpoint is None else checkpoint.metrics
        if metric in metrics:
            return _Result(record.step, metrics[metric], checkpoint)
    return None
