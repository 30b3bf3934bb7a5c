"""Inside the training loop: when to save, what to keep, what to restore."""

from __future__ import annotations

import platform
import warnings
from collections.abc import Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any

from simckpt import provenance, restore, state
from simckpt.checkpoint import Checkpoint
from simckpt.errors import (
    CaptureError,
    CheckpointNotFoundError,
    ConfigurationError,
    StateMismatchError,
    StorageError,
)
from simckpt.policies import CheckpointFacts, KeepAll, KeepPolicy, Moment, SavePolicy
from simckpt.storage import CommitDraft

if TYPE_CHECKING:
    from simckpt.run import Run
    from simckpt.storage import Claim, StoreFiles

DECISIONS = "checkpointer"  # the component that holds what the policies remember; part of every checkpoint


class SaveFailedWarning(UserWarning):
    """A due save failed; the newest checkpoint before it is whole, and training goes on."""


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
        records = files.records(run.name)
        self._head: str | None = records[-1].id if records else None
        self.last_error: Exception | None = None

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
        self._files.log_event(
            self._run.name, {"event": "restored", "checkpoint": checkpoint.id, "step": checkpoint.step}
        )
        return checkpoint

    def step(self, step: int, metrics: Mapping[str, float] | None = None) -> Checkpoint | None:
        """Returns the checkpoint if one was due and was saved, else None. Call it where the loop's state is whole.

        A save that fails because the disk refuses, or because something in the state cannot be captured, is reported by
        a `SaveFailedWarning` and in `last_error`: training goes on, and the next due step tries again.

        Args:
            step: the step the loop has reached; must not go back [env steps].
            metrics: {name: number}, kept with the checkpoint.

        Raises:
            ConflictError: another writer has committed to this run.
        """
        moment = Moment(_checked_step(step), self._decisions.previous_step, _checked_metrics(metrics))
        self._claim.beat()
        decision = self._save_when.decide(moment)
        if not decision.due:
            return None
        try:
            return self._save(moment, reason=decision.reason)
        except (CaptureError, StorageError) as error:
            self.last_error = error
            self._report(step, error)
            return None

    def save(self, step: int, metrics: Mapping[str, float] | None = None) -> Checkpoint:
        """Returns a checkpoint saved now, whatever the policy says.

        Raises:
            UnsupportedStateError: something in the state cannot be captured.
            StorageError: the disk refused; the checkpoints before this one are untouched.
            ConflictError: another writer has committed to this run.
        """
        self._claim.beat()
        return self._save(
            Moment(_checked_step(step), self._decisions.previous_step, _checked_metrics(metrics)), reason="asked for"
        )

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
        record = self._files.commit(self._run.name, draft, encoded)
        self._head = record.id
        self.last_error = None
        self._files.log_event(
            self._run.name, {"event": "saved", "checkpoint": record.id, "step": record.step, "reason": reason}
        )
        self._prune()
        return Checkpoint(self._files, self._run.name, record)

    def _prune(self) -> None:
        checkpoints = self._run.checkpoints()
        kept = self._keep.keep([CheckpointFacts(each.id, each.step, each.metrics) for each in checkpoints])
        for checkpoint in checkpoints:
            # the head is what a crash goes back to: no policy may drop it
            if checkpoint.id in kept or checkpoint.id == self._head:
                continue
            self._files.prune(self._run.name, checkpoint.seq, "no keep policy wants it")
            self._files.log_event(
                self._run.name, {"event": "pruned", "checkpoint": checkpoint.id, "reason": f"not kept by {self._keep}"}
            )

    def _report(self, step: int, error: Exception) -> None:
        message = f"the save of run {self._run.name!r} at step {step} failed, training goes on: {error}"
        try:
            self._files.log_event(self._run.name, {"event": "save failed", "step": step, "error": str(error)})
        except OSError:
            message += " (nor could it be logged)"
        warnings.warn(message, SaveFailedWarning, stacklevel=3)


def _checked_step(step: Any) -> int:
    try:
        whole = int(step)
    except (TypeError, ValueError):
        whole = -1
    if isinstance(step, bool) or whole != step or whole < 0:
        raise ConfigurationError(f"a step is a whole number of at least 0, got {step!r}", keys=["step"])
    return whole


def _checked_metrics(metrics: Mapping[str, Any] | None) -> dict[str, float]:
    checked = {}
    for name, value in (metrics or {}).items():
        try:
            checked[str(name)] = float(value)
        except (TypeError, ValueError) as error:
            raise ConfigurationError(f"metric {name!r} is no number: {value!r}", keys=[str(name)]) from error
    return checked
