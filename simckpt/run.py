"""One training run: its hyperparameters and its checkpoints."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import replace
from types import MappingProxyType, TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

from simckpt import configuration
from simckpt.checkpoint import Checkpoint
from simckpt.errors import CheckpointNotFoundError, ConfigurationError, StoreError, UpkeepWarning
from simckpt.policies import KeepPolicy, SavePolicy
from simckpt.storage import CommitRecord, RunRecord, StoreFiles, TombstoneRecord

if TYPE_CHECKING:
    from simckpt.checkpointer import Checkpointer
    from simckpt.storage import Claim

Arguments = TypeVar("Arguments")


class Run:
    """One training run of a store; made by `Store.start` (to write) and `Store.run` (to read)."""

    def __init__(self, files: StoreFiles, name: str, *, claim: Claim | None = None) -> None:
        self.name = name
        self.record: RunRecord = files.read_run(name)
        self.writer: Checkpointer | None = None
        self._files = files
        self._claim = claim

    def __repr__(self) -> str:
        access = "to write" if self._claim is not None else "to read"
        return f"<Run {self.name!r}, {access}>"

    def __enter__(self) -> Run:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Gives back the writer's claim; the run can be read, and be started by another process."""
        if self._claim is not None:
            self._claim.release()
            self._claim = None

    def log(self, event: str, **facts: Any) -> None:
        """Adds a line to the run's log for people. A log that cannot be written ends in an `UpkeepWarning` alone."""
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
        """The hyperparameters it was first started with."""
        return MappingProxyType(dict(self.record.hyperparameters))

    def configure(
        self, args: Arguments, *, free: Iterable[str] = (), defaults: Mapping[str, Any] | None = None
    ) -> Arguments:
        """Returns the hyperparameters in force, as a copy of `args` and of its type.

        The first start keeps `args` with the run. Later starts get the run's own values back: they win over defaults,
        while an explicit value that contradicts them is an error, once there is a checkpoint. A value counts as
        explicit when it differs from its default; defaults are a dataclass's own, or given. A default typed out on
        the command line is not told apart.

        Args:
            args: a dataclass instance, an `argparse.Namespace` or a dict, with values that JSON can hold.
            free: keys that may differ between starts, such as `total_steps` or `device`; the given value is used. A
                free key that feeds a schedule changes the run from the next start on.
            defaults: {key: default} for a Namespace or a dict: `vars(parser.parse_args([]))`.

        Raises:
            ConfigurationError: values that contradict the run, all of them; or values that JSON cannot hold.
        """
        claim = self._require_claim()
        given = configuration.values_of(args)
        known = configuration.defaults_of(args)
        known |= {key: configuration.plain(key, value) for key, value in (defaults or {}).items()}
        if isinstance(free, str):
            raise ConfigurationError(f"free is a set of keys such as {{{free!r}}}, got a string", keys=["free"])
        # before the first commit nothing depends on the hyperparameters yet, so that a wish cannot contradict anything
        committed = bool(self._files.sequence(self.name))
        allowed = set(free) if committed else set(free) | _wished(given, known)
        merged = configuration.in_force(self.record.hyperparameters, given, defaults=known, free=allowed, run=self.name)
        self.log("configured", hyperparameters=merged)
        if not committed:
            claim.verify()
            self.record = replace(self.record, hyperparameters=merged)
            self._files.write_run(self.name, self.record)
        return configuration.with_values(args, merged)

    def _require_claim(self) -> Claim:
        if self._claim is None:
            raise ConfigurationError(
                f"run {self.name!r} was opened to read; open it with Store.start({self.name!r}) to write"
            )
        return self._claim

    def checkpoints(self, *, abandoned: bool = False, damaged: dict[int, StoreError] | None = None) -> list[Checkpoint]:
        """Returns the checkpoints that the head descends from, oldest first.

        Args:
            abandoned: also those that a rollback left behind.
            damaged: receives {commit number: error} of the records that cannot be read, so that they hide no others;
                the line of ancestors ends at such a record. Without it the first of them is raised.

        Raises:
            DamagedError, FormatError: a record cannot be trusted.
        """
        records = self._files.records(self.name, damaged=damaged)
        if not abandoned:
            records = ancestry(records)
        return [Checkpoint(self._files, self.name, record) for record in records if isinstance(record, CommitRecord)]

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
            CheckpointNotFoundError: there is none; the message lists the steps around it.
        """
        found = self.checkpoints()
        for checkpoint in reversed(found):
            if checkpoint.step == step:
                return checkpoint
        near = sorted({checkpoint.step for checkpoint in found}, key=lambda other: abs(other - step))[:5]
        around = f"; near it are {', '.join(f'{other}' for other in sorted(near))}" if near else "; it has none yet"
        raise CheckpointNotFoundError(f"run {self.name!r} has no checkpoint at step {step}{around}")

    def best(self, metric: str, *, mode: str = "max") -> Checkpoint:
        """Returns the checkpoint with the best value of a metric; NaN never ranks, the oldest wins a tie.

        Args:
            metric: such as "eval/return".
            mode: "max" or "min".

        Raises:
            CheckpointNotFoundError: no checkpoint has that metric.
        """
        if mode not in ("max", "min"):
            raise ConfigurationError(f"mode is 'max' or 'min', got {mode!r}", keys=["mode"])
        sign = 1.0 if mode == "max" else -1.0
        ranked = [
            (sign * value, -place, checkpoint)
            for place, checkpoint in enumerate(self.checkpoints())
            if not math.isnan(value := checkpoint.metrics.get(metric, math.nan))
        ]
        if not ranked:
            raise CheckpointNotFoundError(f"no checkpoint of run {self.name!r} has a metric {metric!r}")
        return max(ranked, key=lambda entry: entry[:2])[2]

    def checkpointer(
        self, components: Mapping[str, Any], *, save_when: SavePolicy, keep: KeepPolicy | None = None
    ) -> Checkpointer:
        """Returns the checkpointer for the training loop. One made earlier refuses to write from now on.

        Args:
            components: {name: live object}, everything the run's future depends on: envs, agent, optimizer,
                `simckpt.RNGStreams()`, a `simckpt.LoopState`. An env is registered as the object that is stepped.
            save_when: when `Checkpointer.step` saves, such as `simckpt.EverySteps(50_000)`.
            keep: which checkpoints stay, such as `simckpt.KeepLast(3)`; all by default.

        Raises:
            UnsupportedStateError: a component cannot be captured exactly, by name.
            ConfigurationError: the run was opened to read.
        """
        from simckpt.checkpointer import Checkpointer

        claim = self._require_claim()
        made = Checkpointer(self, self._files, claim, components, save_when=save_when, keep=keep)
        # the one made last writes: two would each go on from where the other was not
        self.writer = made
        return made


def _wished(given: Mapping[str, Any], defaults: Mapping[str, Any]) -> set[str]:
    """Returns the keys whose given values are not their defaults."""
    return {key for key, value in given.items() if key not in defaults or defaults[key] != value}


def ancestry(records: list[CommitRecord | TombstoneRecord]) -> list[CommitRecord | TombstoneRecord]:
    """Returns the newest record and all it descends from, oldest first; pruned ones still carry the line."""
    by_id = {record.id: record for record in records}
    line: list[CommitRecord | TombstoneRecord] = []
    current = records[-1] if records else None
    while current is not None:
        line.append(current)
        current = by_id.get(current.parent) if current.parent is not None else None
    return line[::-1]
