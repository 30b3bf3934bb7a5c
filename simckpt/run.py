"""One training run: its hyperparameters and its checkpoints."""

from __future__ import annotations

import functools
import math
import platform
import time
import warnings
import weakref
from collections.abc import Iterable, Mapping
from dataclasses import replace
from types import MappingProxyType, TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

from simckpt import configuration, damage, provenance
from simckpt.ancestry import on_line
from simckpt.checkpoint import Checkpoint
from simckpt.errors import CheckpointNotFoundError, ConfigurationError, SegmentsKeptError, StoreError, UpkeepWarning
from simckpt.policies import KeepPolicy, RollbackPolicy, SavePolicy, Verdict, retain
from simckpt.policies.arguments import check_mode
from simckpt.ranks import ALONE
from simckpt.storage import BranchRecord, CommitRecord, RunRecord, StartRecord, StoreFiles

if TYPE_CHECKING:
    from simckpt.branching.hyperparameters import Hyperparameters
    from simckpt.branching.lineage import Graph
    from simckpt.checkpointer import Checkpointer
    from simckpt.ranks import Held, Ranks

Arguments = TypeVar("Arguments")


class Run:
    """One training run of a store; made by `Store.start` (to write) and `Store.run` (to read)."""

    def __init__(
        self,
        files: StoreFiles,
        name: str,
        *,
        record: RunRecord | None = None,
        claim: Held | None = None,
        ranks: Ranks = ALONE,
        git: Mapping[str, Any] | None = None,
        experiment: str | None = None,
    ) -> None:
        self.name = name
        self.record: RunRecord = record or files.read_run(name)
        self.writer: Checkpointer | None = None
        self.ranks = ranks
        self._files = files
        self._claim = claim
        self._entered = False
        self._git = git
        self._experiment = experiment or self.record.experiment
        self._in_force: Mapping[str, Any] | None = None
        self._start: str | None = None
        self._lineage: dict[int, str | None] = {}  # commit number -> target, if that commit was a rollback
        if claim is not None:
            # what failed between the start and the checkpointer, in a notebook, must not lock the run for good
            myself = weakref.ref(self)
            claim.is_idle = lambda: (run := myself()) is None or not (run._entered or run.writer)

    def __repr__(self) -> str:
        access = "to write" if self._claim is not None else "to read"
        return f"<Run {self.name!r}, {access}>"

    def __enter__(self) -> Run:
        self._entered = True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Gives back the writer's claim; the run can be read, and be started by another process.

        Waits for a save that is in flight; if it fails, that is a `SaveFailedWarning` here.
        """
        if self._claim is not None:
            if self.writer is not None:
                self.writer.close()
            try:
                self._claim.release()
            except StoreError as error:
                message = f"the claim on run {self.name!r} could not be given back and ends with this process: {error}"
                warnings.warn(message, UpkeepWarning, stacklevel=2)
            finally:
                self._claim = None
                self.ranks.leave()

    def log(self, event: str, **facts: Any) -> None:
        """Adds a line to the run's log for people. A log that cannot be written ends in an `UpkeepWarning` alone.

        Of several ranks rank 0 does so, the others do nothing.
        """
        if not self.ranks.leads:
            return
        try:
            self._files.log_event(self.name, {"event": event, **facts})
        except StoreError as error:
            warnings.warn(f"the log of run {self.name!r} could not be written: {error}", UpkeepWarning, stacklevel=3)

    @property
    def id(self) -> str:
        """The run's random id, 32 hex digits."""
        return self.record.id

    @property
    def created(self) -> float:
        """UTC time of its first start [s since 1970]."""
        return self.record.created

    @property
    def hyperparameters(self) -> Mapping[str, Any]:
        """The hyperparameters it was first started with; of a branch, its origin's with the overrides."""
        return MappingProxyType(dict(self.record.hyperparameters))

    @property
    def branch(self) -> BranchRecord | None:
        """Where it left its origin, and what was changed there; None for a run that is no branch."""
        return self.record.branch

    @property
    def overrides(self) -> Mapping[str, Any]:
        """The hyperparameters that its branching changed; empty for a run that is no branch."""
        return MappingProxyType(dict(self.record.branch.overrides if self.record.branch else {}))

    def origin(self) -> Checkpoint | None:
        """Returns the checkpoint that it was branched from, or None if it is no branch.

        Raises:
            CheckpointNotFoundError: the origin has been pruned or removed.
            DamagedError, FormatError: its record cannot be trusted.
        """
        from simckpt.branching.origin import origin_of

        return origin_of(self._files, self.record)

    def configure(
        self, args: Arguments, *, free: Iterable[str] = (), defaults: Mapping[str, Any] | None = None
    ) -> Arguments:
        """Returns the hyperparameters in force, as a copy of `args` and of its type.

        The first start keeps `args` with the run. Later starts get the run's own values back: they win over defaults,
        while an explicit value that contradicts them is an error, once there is a checkpoint. A value counts as
        explicit when it differs from its default; defaults are a dataclass's own, or given. A default typed out on
        the command line is not told apart. What a branch or a rollback has changed wins over the value that an
        unchanged command line gives, of a key in `free` too. A key that holds the run's name may differ in a branch
        and a renamed import. numpy's scalars become plain numbers. Several ranks give the same values, but for `free`
        keys, of which rank 0's are recorded: derive a seed from the rank.

        Args:
            args: a dataclass instance, an `argparse.Namespace` or a dict, with values that JSON can hold.
            free: keys that may differ between starts, such as `total_steps` or `device`; the given value is used. A
                free key that feeds a schedule changes the run from the next start on.
            defaults: {key: default} for a Namespace or a dict: `vars(parser.parse_args([]))`.

        Raises:
            ConfigurationError: values that contradict the run or other ranks, all of them; or that JSON cannot hold.
        """
        claim = self._require_claim()
        self.ranks.at("Run.configure")
        given, known = self.ranks.each(lambda: configuration.given_values(args, free, defaults))
        allowed = set(free)
        of_ranks = self.ranks.gather(given)
        configuration.check_ranks(of_ranks, free=allowed)
        merged, is_first = self.ranks.first(lambda: self._configure(claim, given, known, allowed))
        self._in_force, self._start = merged, None
        if is_first:
            self.record = replace(self.record, hyperparameters=merged)
        own = {k: given[k] for k in allowed & given.keys() if not configuration.same_given(k, given, of_ranks[0])}
        return configuration.with_values(args, {**merged, **own})  # what a rank has of its own is for the loop alone

    def _configure(
        self, claim: Held, given: Mapping[str, Any], known: Mapping[str, Any], free: set[str]
    ) -> tuple[dict[str, Any], bool]:
        """Returns the hyperparameters in force, and whether they were made the run's own."""
        from simckpt.branching.origin import past_of

        # before the first commit nothing depends on the hyperparameters yet, so that a wish cannot contradict anything
        committed = bool(self._files.sequence(self.name)) or self.record.origin is not None
        past = past_of(self._files, self.record)
        allowed = free if committed else free | _wished(given, known)
        merged = configuration.in_force(
            past.values,
            given,
            defaults=known,
            free=allowed | past.named(given, self.name),
            run=self.name,
            changed=past.changed,
            formerly=past.formerly,
        )
        self.log("configured", hyperparameters=merged)
        if not committed:
            claim.verify()
            self._files.write_run(self.name, replace(self.record, hyperparameters=merged))
        return merged, not committed

    def lineage(self) -> Graph:
        """Returns the runs that lead to this one, from the first ancestor on; `print` it to see them as a tree.

        Raises:
            DamagedError, FormatError: this run's record cannot be trusted.
        """
        from simckpt.branching.lineage import lineage

        return lineage(self._files, self.name)

    def _repr_html_(self) -> str:
        return self.lineage()._repr_html_()

    def start_id(self) -> str:
        """Returns the id of the record of this start: the hyperparameters in force, git, versions, host and device.

        The record is written at the first call, and anew after `configure` has changed the hyperparameters; a start of
        the same content shares it. Every checkpoint refers to the start that made it.

        Raises:
            ConfigurationError: the run was opened to read, or this is not rank 0 of several.
            StorageError: the disk refused.
        """
        self._require_claim()
        if not self.ranks.leads:
            raise ConfigurationError(f"rank {self.ranks.rank} of run {self.name!r} records no start: rank 0 does")
        if self._start is None:
            record = StartRecord(
                created=time.time(),
                hyperparameters=dict(self.hyperparameters_in_force),
                experiment=self._experiment,
                git=self._git,
                versions=provenance.versions(),
                host=platform.node(),
                device=provenance.device(),
            )
            self._start = self._files.write_start(self.name, record)
        return self._start

    @property
    def hyperparameters_in_force(self) -> Mapping[str, Any]:
        """Those that `configure` returned; before that, those at the head, or the run's own if it has none."""
        from simckpt.branching.origin import past_of

        if self._in_force is None:
            self._in_force = past_of(self._files, self.record).values
        return MappingProxyType(dict(self._in_force))

    def change_hyperparameters(self, values: Mapping[str, Any]) -> None:
        """Takes over values that a rollback changes: they are in force from now on, and `start_id` is another one.

        What makes them last is a commit of kind "rollback" that names them and this start.

        Raises:
            ConfigurationError: the run was opened to read, or values that JSON cannot hold.
        """
        self._require_claim()
        changed = {key: configuration.plain(key, value) for key, value in values.items()}
        self._in_force, self._start = {**self.hyperparameters_in_force, **changed}, None

    def _require_claim(self) -> Held:
        if self._claim is None:
            raise ConfigurationError(
                f"run {self.name!r} was opened to read; open it with Store.start({self.name!r}) to write"
            )
        if not self._claim.held:
            self._claim.verify()  # says whose it is now
        return self._claim

    def checkpoints(self, *, abandoned: bool = False, damaged: dict[int, StoreError] | None = None) -> list[Checkpoint]:
        """Returns the checkpoints that the head descends from, oldest first.

        Args:
            abandoned: also those that a rollback left behind, and those that `OnException` kept for a post-mortem.
            damaged: receives {commit number: error} of the records that cannot be read, which hide no others. Where
                one leaves open from what the head descends, all that is not known to be abandoned counts.

        Warns:
            DamageWarning: of those records, if there is no `damaged` to receive them.
        """
        passed: dict[int, StoreError] = {} if damaged is None else damaged
        records = self._files.records(self.name, damaged=passed)
        if damaged is None:
            damage.warn_of_damage(damage.of_commits(self.name, passed))
        if not abandoned:
            records = on_line(records, origin=self.record.origin, damaged=bool(passed))
        # read once for all of them, when the first is asked for
        marks = functools.cache(lambda: self._files.marks(self.name))
        return [
            Checkpoint(self._files, self.name, record, marks=marks)
            for record in records
            if isinstance(record, CommitRecord)
        ]

    def latest(self) -> Checkpoint:
        """Returns the head, or its nearest ancestor that has not been pruned.

        Raises:
            CheckpointNotFoundError: the run has no checkpoint yet.
            DamagedError, FormatError: the newest record cannot be trusted.
        """
        damaged: dict[int, StoreError] = {}
        found = self.checkpoints(damaged=damaged)
        # an older damaged record is no reason to refuse the head; a damaged head is not passed over in silence
        newest = found[-1].seq if found else 0
        if damaged and max(damaged) > newest:
            raise damaged[max(damaged)]
        if not found:
            raise CheckpointNotFoundError(f"run {self.name!r} has no checkpoint yet")
        return found[-1]

    def at(self, *, step: int) -> Checkpoint:
        """Returns the newest checkpoint of exactly this step among those that the head descends from.

        Raises:
            CheckpointNotFoundError: there is none; the message lists the steps around it, and the damaged records.

        Warns:
            DamageWarning: damaged records were passed over.
        """
        damaged: dict[int, StoreError] = {}
        found = self.checkpoints(damaged=damaged)
        for checkpoint in reversed(found):
            if checkpoint.step == step:
                damage.warn_of_damage(damage.of_commits(self.name, damaged))
                return checkpoint
        near = sorted({checkpoint.step for checkpoint in found}, key=lambda other: abs(other - step))[:5]
        around = f"; near it are {', '.join(f'{other}' for other in sorted(near))}" if near else "; it has none yet"
        around += damage.unread(damage.of_commits(self.name, damaged))
        raise CheckpointNotFoundError(f"run {self.name!r} has no checkpoint at step {step}{around}")

    def best(self, metric: str, *, mode: str = "max") -> Checkpoint:
        """Returns the checkpoint with the best value of a metric; NaN never ranks, the oldest wins a tie.

        Args:
            metric: such as "eval/return".
            mode: "max" or "min".

        Raises:
            CheckpointNotFoundError: no checkpoint has that metric.

        Warns:
            DamageWarning: damaged records were passed over, see `at`.
        """
        check_mode(mode, of="Run.best")
        sign = 1.0 if mode == "max" else -1.0
        damaged: dict[int, StoreError] = {}
        found = self.checkpoints(damaged=damaged)
        ranked = [
            (sign * value, -place, checkpoint)
            for place, checkpoint in enumerate(found)
            if not math.isnan(value := checkpoint.metrics.get(metric, math.nan))
        ]
        if not ranked:
            unread = damage.unread(damage.of_commits(self.name, damaged))
            raise CheckpointNotFoundError(f"no checkpoint of run {self.name!r} has a metric {metric!r}{unread}")
        damage.warn_of_damage(damage.of_commits(self.name, damaged))
        return max(ranked, key=lambda entry: entry[:2])[2]

    def protected(self) -> dict[str, str]:
        """Returns {checkpoint id: reason} of what no policy may drop: pins, origins of runs and targets of rollbacks.

        The newest is protected by `policies.retain` itself; what a program restored from is known to that program
        alone. Further calls read what is new: what was once an origin or a target remains one. A damaged
        commit record protects nothing.

        Raises:
            DamagedError, FormatError, StorageError: another run's record cannot be read; what that run needs is not
                known, so that nothing may be dropped.
        """
        new = set(self._files.sequence(self.name)) - self._lineage.keys()
        for record in self._files.records(self.name, damaged={}, only=new):
            self._lineage[record.seq] = record.parent if record.kind == "rollback" else None
        reasons: dict[str, list[str]] = {}
        if self.writer is not None and self.writer.restored_from is not None:
            reasons[self.writer.restored_from] = ["restored from"]
        for target in filter(None, self._lineage.values()):
            reasons.setdefault(target, ["the target of a rollback"])
        for name, origin in self._files.origins().items():
            reasons.setdefault(origin, []).append(f"the origin of {name}")
        # a pin is there whatever has happened to the metrics beside it
        for checkpoint, marks in self._files.marks(self.name, damaged={}).items():
            if marks.pinned:
                reasons.setdefault(checkpoint, []).append("pinned")
        return {checkpoint: "; ".join(each) for checkpoint, each in reasons.items()}

    def prune(self, keep: KeepPolicy, *, dry_run: bool = False) -> list[Verdict]:
        """Drops the checkpoints that a policy does not keep, and returns a verdict with reasons on each, oldest first.

        Looks at the checkpoints that the head descends from. Protected ones stay, see `protected`. A run that was
        opened to read is claimed for the time it takes.

        Args:
            keep: such as `simckpt.KeepLast(3) | simckpt.KeepBest(2, "eval/return")`.
            dry_run: only say what would be dropped.

        Raises:
            RunLockedError: another process is writing the run.
            DamagedError, FormatError, StorageError: something cannot be read or removed; what was dropped until then
                stays dropped.
        """
        if self.writer is not None:
            self.writer.wait()
        damaged: dict[int, StoreError] = {}
        checkpoints = self.checkpoints(damaged=damaged)
        # what a policy would keep is not known without them
        for error in damaged.values():
            raise error
        verdicts = retain([each.as_facts() for each in checkpoints], keep, self.protected())
        if dry_run:
            return verdicts
        try:
            for checkpoint, verdict in zip(checkpoints, verdicts, strict=True):
                if not verdict.keep:
                    try:
                        self._files.prune(self.name, checkpoint.seq, verdict.reason)
                    except SegmentsKeptError as error:
                        warnings.warn(str(error), UpkeepWarning, stacklevel=2)
                    self.log("pruned", checkpoint=checkpoint.id, step=checkpoint.step, reason=verdict.reason)
        finally:
            if self.writer is not None:
                self.writer.read_line()
        return verdicts

    def checkpointer(
        self,
        components: Mapping[str, Any],
        *,
        save_when: SavePolicy,
        keep: KeepPolicy | None = None,
        background: str | None = "thread",
        when_busy: str = "wait",
        hyperparameters: Hyperparameters | None = None,
        rollback: RollbackPolicy | None = None,
        in_place: bool = False,
        per_rank: Mapping[str, bool] | None = None,
        coordination: str = "barrier",
        timeout: float = 120.0,
    ) -> Checkpointer:
        """Returns the checkpointer for the training loop. One made earlier refuses to write from now on.

        Training waits for a copy of the state in memory, and that is what it takes: one copy of its large arrays, at
        most a quarter more, kept for the next save; of a replay buffer, the new rows alone.

        Args:
            components: {name: live object}, everything the run's future depends on: envs, agent, optimizer,
                `simckpt.RNGStreams()`, a `simckpt.LoopState`. An env is registered as the object that is stepped.
            save_when: when `Checkpointer.step` saves, such as `simckpt.EverySteps(50_000)`.
            keep: which checkpoints stay, such as `simckpt.KeepLast(3)`; all by default.
            background: who writes the copy: a "thread" for each save; a "process", which shares memory with this one,
                where Python code in a thread would slow training down (Linux); None writes before `step` returns.
            when_busy: what becomes of a save that is due while one is in flight: "wait" for that one; "skip" it; or
                "coalesce", so that it is made at the first `step` after that one.
            hyperparameters: a `simckpt.Hyperparameters`: what holds those that branches and rollbacks may change.
            rollback: when to go back to an earlier checkpoint, such as `simckpt.RollbackPolicy("eval/return")`.
            in_place: whether the loop goes on after a rollback, instead of being left by `RolledBack`. For loops that
                keep everything in components, the step they are at included.
            per_rank: {component: whether each of several ranks has its own}. By default all share what torch trains
                (modules, optimizers, schedulers, a GradScaler), and anything else is each rank's own.
            coordination: of several ranks: "barrier", they all save at the same call of `step`; or "independent", each
                saves when its policy says so, and a step is a checkpoint once all have saved it.
            timeout: how much longer one of several ranks may take than the others for its part of a save [s]; to come
                to a step or a restore at least as long as training's own process group waits.

        Raises:
            UnsupportedStateError: a component cannot be captured exactly, by name.
            ConfigurationError: the run was opened to read, or arguments make no sense, or differ between ranks.
            OverrideNotAppliedError: nothing says what holds a hyperparameter that `rollback` changes.
        """
        from simckpt.checkpointer import Checkpointer

        claim = self._require_claim()
        self.ranks.at("Run.checkpointer")
        if self.writer is not None:
            self.writer.close()
        made = Checkpointer(
            self,
            self._files,
            claim,
            components,
            save_when=save_when,
            keep=keep,
            background=background,
            when_busy=when_busy,
            hyperparameters=hyperparameters,
            rollback=rollback,
            in_place=in_place,
            per_rank=per_rank or {},
            coordination=coordination,
            timeout=timeout,
        )
        self.writer = made  # the one made last writes: two would each go on from where the other was not
        return made


def _wished(given: Mapping[str, Any], defaults: Mapping[str, Any]) -> set[str]:
    """Returns the keys whose given values are not their defaults."""
    return {key for key, value in given.items() if key not in defaults or defaults[key] != value}
