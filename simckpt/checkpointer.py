"""Inside the training loop: when to save, what to keep, what to restore."""

from __future__ import annotations

import json
import platform
import warnings
from collections.abc import Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any

from simckpt import provenance, restore, state
from simckpt.checkpoint import Checkpoint
from simckpt.errors import (
    CheckpointNotFoundError,
    ConfigurationError,
    ConflictError,
    SaveFailedWarning,
    SimckptError,
    StateMismatchError,
    StoreError,
    UpkeepWarning,
)
from simckpt.policies import CheckpointFacts, KeepAll, KeepPolicy, Moment, SavePolicy
from simckpt.run import ancestry
from simckpt.storage import CommitDraft, CommitRecord
from simckpt.storage.names import encode_part

if TYPE_CHECKING:
    from simckpt.run import Run
    from simckpt.storage import Claim, StoreFiles

DECISIONS = "checkpointer"  # the component that holds what the policies remember; part of every checkpoint


LARGEST_STEP = 2**63
METRICS_LIMIT = 2048  # [bytes] as JSON: a commit record, which listings read, has 4 KB for everything


class Checkpointer:
    """Saves a training loop's components when a policy says so, and restores them; made by `Run.checkpointer`.

    ```python
    with run.checkpointer({"envs": envs, "agent": agent, "rng": simckpt.RNGStreams(), "loop": loop},
                          save_when=simckpt.EverySteps(50_000)) as checkpointer:
        checkpointer.restore_latest()               # nothing to restore on the first start
        while loop.step < total_steps:
            ...
            checkpointer.step(loop.step, metrics)   # saves when due
    ```

    Attributes:
        components: {name: live object}, as registered.
        last_error: what the last failed save raised, or None since the last one that succeeded.
    """

    def __init__(
        self,
        run: Run,
        files: StoreFiles,
        claim: Claim,
        components: Mapping[str, Any],
        *,
        save_when: SavePolicy,
        keep: KeepPolicy | None = None,
    ) -> None:
        if DECISIONS in components:
            raise ConfigurationError(f"the name {DECISIONS!r} is taken by simckpt; call the component something else")
        if not isinstance(save_when, SavePolicy):
            raise ConfigurationError(f"save_when is a policy such as EverySteps(50_000), got {save_when!r}")
        if keep is not None and not isinstance(keep, KeepPolicy):
            raise ConfigurationError(f"keep is a policy such as KeepLast(3), got {keep!r}")
        self.components = dict(components)
        self._run = run
        self._files = files
        self._claim = claim
        self._save_when = save_when
        self._keep = keep or KeepAll()
        self._decisions = state.LoopState(previous_step=0)
        self._bound = restore.bind({**components, DECISIONS: self._decisions})
        # component -> paths of its leaves, and the texts that explain them
        self._explained: dict[str, tuple[tuple[str, ...], dict[str, dict[str, str]]]] = {}
        restore.rehearse(self._bound)
        self._head: str | None = None
        self._line: list[Checkpoint] = []
        damaged = self._read_line()
        self._must_restore = bool(self._head or damaged)
        self._last_step = 0
        self.last_error: Exception | None = None
        for seq, error in sorted(damaged.items()):
            warnings.warn(
                f"checkpoint number {seq} of run {run.name!r} is damaged: {error}", UpkeepWarning, stacklevel=3
            )

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Leaves the run claimed: `Run.close` or the end of the process gives the claim back."""

    def restore_latest(self) -> Checkpoint | None:
        """Returns the checkpoint that was put into the live objects, or None if the run has none yet.

        Raises:
            StateMismatchError: names, keys or shapes differ from the checkpoint's; nothing was touched.
            RestoreError: a component failed halfway; everything was put back.
            DamagedError: the checkpoint's files are damaged.
            HalfRestoredError: a component failed halfway and could not be put back.
        """
        try:
            checkpoint = self._run.latest()
        except CheckpointNotFoundError:
            return None
        extra = [name for name in checkpoint.components() if name not in self._bound]
        if extra:
            problems = [f"component {name!r} is in the checkpoint but not registered" for name in extra]
            message = f"checkpoint {checkpoint.id} does not fit the live objects, which are untouched:\n  "
            raise StateMismatchError(message + "\n  ".join(problems), problems=problems)
        checkpoint.restore_bound(self._bound)
        self._must_restore = False
        self._last_step = checkpoint.step
        self._run.log("restored", checkpoint=checkpoint.id, step=checkpoint.step)
        return checkpoint

    def step(self, step: int, metrics: Mapping[str, float] | None = None) -> Checkpoint | None:
        """Returns the checkpoint if one was due and was saved, else None. Call it where the loop's state is whole.

        A save that fails, because the disk refuses or because something in the state cannot be captured, is reported by
        a `SaveFailedWarning` and in `last_error`: training goes on, and the next due step tries again.

        Args:
            step: the step the loop has reached; must not go back [env steps].
            metrics: {name: number}, kept with the checkpoint; at most 2 KB as JSON in all. None is no value yet.

        Raises:
            ConfigurationError: the arguments make no sense, the run was closed or has another checkpointer by now, or
                it has checkpoints and `restore_latest` was not called: going on would bury them under a new start.
            ConflictError: another writer has committed to this run.
        """
        moment = self._moment(step, metrics)
        decision = self._save_when.decide(moment)
        if not decision.due:
            return None
        try:
            return self._save(moment, reason=decision.reason)
        except ConflictError:
            raise
        except SimckptError as error:
            self.last_error = error
            message = f"the save of run {self._run.name!r} at step {step} failed, training goes on: {error}"
            warnings.warn(message, SaveFailedWarning, stacklevel=2)
            self._run.log("save failed", step=moment.step, error=str(error))
            return None

    def save(self, step: int, metrics: Mapping[str, float] | None = None) -> Checkpoint:
        """Returns a checkpoint saved now, whatever the policy says.

        Raises:
            UnsupportedStateError: something in the state cannot be captured.
            StorageError: the disk refused; the checkpoints before this one are untouched.
            ConfigurationError, ConflictError: as `step`.
        """
        return self._save(self._moment(step, metrics), reason="asked for")

    def _moment(self, step: int, metrics: Mapping[str, float] | None) -> Moment:
        moment = Moment(_checked_step(step), self._decisions.previous_step, _checked_metrics(metrics))
        if not self._claim.held:
            raise ConfigurationError(f"run {self._run.name!r} was closed: start it again to go on writing")
        if self._run.writer is not self:
            raise ConfigurationError(
                f"another checkpointer of run {self._run.name!r} has been made since: use that one"
            )
        if self._must_restore:
            raise ConfigurationError(
                f"run {self._run.name!r} has checkpoints, and this checkpointer has restored none: call "
                "restore_latest() before the loop, or start a run of another name"
            )
        if moment.step < self._last_step:
            raise ConfigurationError(f"steps must not go back: {moment.step} after {self._last_step}", keys=["step"])
        self._last_step = moment.step
        try:
            self._claim.beat()
        except ConflictError:
            raise
        except SimckptError as error:
            warnings.warn(f"the heartbeat of run {self._run.name!r} failed: {error}", UpkeepWarning, stacklevel=4)
        return moment

    def _save(self, moment: Moment, *, reason: str) -> Checkpoint:
        self._decisions.previous_step = moment.step
        encoded = {name: state.encode(tree) for name, tree in restore.capture(self._bound).items()}
        draft = CommitDraft(
            parent=self._head,
            step=moment.step,
            metrics=dict(moment.metrics),
            versions=provenance.versions(),
            host=platform.node(),
        )
        try:
            record = self._files.commit(self._run.name, draft, encoded, attributes=self._explain(encoded))
        except BaseException as error:
            if not isinstance(error, Exception):
                # Ctrl-C may have come after the commit was in place: then that is the head
                self._read_line()
            raise
        checkpoint = Checkpoint(self._files, self._run.name, record)
        self._head = record.id
        self._line.append(checkpoint)
        self.last_error = None
        self._run.log("saved", checkpoint=record.id, step=record.step, reason=reason)
        self._prune()
        return checkpoint

    def _read_line(self) -> dict[int, StoreError]:
        """Reads which commit is the head and which checkpoints are on its line; returns the damaged records."""
        damaged: dict[int, StoreError] = {}
        records = self._files.records(self._run.name, damaged=damaged)
        self._head = records[-1].id if records else None
        # kept, for reading them anew takes longer with each save
        self._line = [
            Checkpoint(self._files, self._run.name, record)
            for record in ancestry(records)
            if isinstance(record, CommitRecord)
        ]
        return damaged

    def _explain(self, encoded: Mapping[str, state.Encoded]) -> dict[str, dict[str, str]]:
        """Returns {path in the file: texts for people}, made anew only for components whose leaves have changed."""
        for name, component in encoded.items():
            paths = tuple(component.leaves)
            if name in self._explained and self._explained[name][0] == paths:
                continue
            texts = state.attributes_of(self._bound[name].handle, paths)
            if name == DECISIONS:
                texts[""] = {"description": "What the policies that decide when to save and what to keep remember."}
            prefix = encode_part(name)
            self._explained[name] = paths, {f"{prefix}/{path}".rstrip("/"): text for path, text in texts.items()}
        return {path: text for name in encoded for path, text in self._explained[name][1].items()}

    def _prune(self) -> None:
        kept = self._keep.keep([CheckpointFacts(each.id, each.step, each.metrics) for each in self._line])
        for checkpoint in list(self._line):
            # the head is what a crash goes back to: no policy may drop it
            if checkpoint.id in kept or checkpoint.id == self._head:
                continue
            try:
                self._files.prune(self._run.name, checkpoint.seq, f"not kept by {self._keep}")
            except StoreError as error:
                message = f"{checkpoint!r} could not be pruned, which is tried again after the next save: {error}"
                warnings.warn(message, UpkeepWarning, stacklevel=4)
                continue
            self._line.remove(checkpoint)
            self._run.log("pruned", checkpoint=checkpoint.id, step=checkpoint.step, reason=f"not kept by {self._keep}")


def _checked_step(step: Any) -> int:
    try:
        whole = int(step)
    except (TypeError, ValueError):
        whole = -1
    if isinstance(step, bool) or whole != step or not 0 <= whole < LARGEST_STEP:
        raise ConfigurationError(f"a step is a whole number of at least 0 and below 2**63, got {step!r}", keys=["step"])
    return whole


def _checked_metrics(metrics: Mapping[str, Any] | None) -> dict[str, float]:
    if metrics is not None and not isinstance(metrics, Mapping):
        raise ConfigurationError(f"metrics are a dict of numbers, got a {type(metrics).__name__}", keys=["metrics"])
    checked = {}
    for name, value in (metrics or {}).items():
        if value is None:
            continue
        try:
            checked[str(name)] = float(value)
        except (TypeError, ValueError, OverflowError) as error:
            raise ConfigurationError(f"metric {name!r} is no number: {value!r}", keys=[str(name)]) from error
    size = len(json.dumps(checked))
    if size > METRICS_LIMIT:
        message = f"{len(checked)} metrics take {size} bytes as JSON and may take {METRICS_LIMIT}: give fewer"
        raise ConfigurationError(message, keys=list(checked))
    return checked
