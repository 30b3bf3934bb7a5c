"""One branch of a fan-out while it runs: is it alive, has it run too long, how did it end."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from simckpt.branching.engines import Future
from simckpt.branching.jobs import is_complete
from simckpt.errors import StoreError
from simckpt.run import Run
from simckpt.storage import claims

LISTEN = 1.0  # between two looks at what a branch has written; at a third of a short heartbeat's time [s]
START = 120.0  # of silence that any branch is granted until its loop runs: imports, envs, a restore [s]
WAIT = START + claims.STALE_AFTER  # likewise where a claim lies: maybe that of a machine which is gone [s]
GIVE_UP = 120.0  # for a branch that was told to end, before it is left to itself [s]


@dataclass(frozen=True)
class BranchResult:
    """How one branch of a fan-out ended.

    Attributes:
        run: its name.
        overrides: {hyperparameter: value}.
        status: "complete"; "failed": the training raised, or returned without a checkpoint; "died": its process was
            killed; "stopped": it passed the deadline or was silent for too long; "interrupted": a signal ended it,
            after a save if `OnSignal` answers it, or a KeyboardInterrupt did. All but the first go on where they were
            at the next `fan_out`.
        error: what went wrong, a traceback if there is one; empty if nothing did.
        step: of its head [env steps]; None without a checkpoint of its own.
        metrics: of its head.
        seconds: that its training took in this fan-out [s]; None for a branch that was complete before.
    """

    run: str
    overrides: Mapping[str, Any]
    status: str
    error: str = ""
    step: int | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    seconds: float | None = None


class Tracked:
    """One branch of a fan-out while it runs.

    Its engine says whether it runs, its folder in the store whether it lives: the heartbeat of the claim and the
    commits. No engine is asked for more, for some wait for ever for a job that was killed.

    Attributes:
        run: the branch, to read.
        future: of its training; None for a branch that was complete before.
        running: whether it ran at the last look.
        step: of its newest checkpoint at the last look [env steps]; None before the first.

    Args:
        run: the branch, to read.
        deadline: how long it may run [s]; None: for ever.
        heartbeat: how long it may be silent [s], from its first heartbeat or commit on; until then at least `START`,
            and `WAIT` while a claim lies there. None: for ever.
        clock: the time [s].
    """

    def __init__(
        self,
        run: Run,
        *,
        deadline: float | None,
        heartbeat: float | None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.run = run
        self.future: Future | None = None
        self.step: int | None = None
        self.running = False
        self._files = run._files
        self._clock = clock
        self._deadline = deadline
        self._heartbeat = heartbeat
        self._signs: tuple[float | None, list[int]] | None = None
        self._began: float | None = None
        self._loops = False  # whether it was heard of from within its loop, since it began
        self._heard = self._listened = -math.inf
        self._reason = ""  # why it was told to end
        self._told = 0.0
        self._seconds: float | None = None

    def look(self) -> bool:
        """Returns whether it has ended; ends it where it has passed the deadline or was silent for too long."""
        if self.future is None or self.future.done():
            return True
        now = self._clock()
        if self._reason:
            return now - self._told > GIVE_UP
        self.running = self.future.running()
        if not self.running:
            # it waits for its turn, or was put back into the queue
            self._began, self._loops = None, False
            return False
        if self._began is None:
            self._began = self._heard = now
        self._listen(now)
        if self._deadline is not None and now - self._began > self._deadline:
            self._stop(f"not at its end after the deadline of {self._deadline:g} s", now)
        elif (silence := self._longest_silence()) is not None and now - self._heard > silence:
            self._stop(f"no sign of life for {silence:g} s", now)
        self._seconds = now - self._began
        return False

    def _longest_silence(self) -> float | None:
        if self._heartbeat is None or self._loops:
            return self._heartbeat
        # `jobs.train_branch` waits until the claim that another machine has left is stale
        claimed = self._signs is not None and self._signs[0] is not None
        return max(self._heartbeat, WAIT if claimed else START)

    def _listen(self, now: float) -> None:
        """Notes the signs of life."""
        if now - self._listened < min(LISTEN, (self._heartbeat or math.inf) / 3):
            return
        self._listened = now
        # what cannot be read for the moment is no sign
        with contextlib.suppress(StoreError):
            signs = claims.heard_of(self._files.path / "runs" / self.run.name), self._files.sequence(self.run.name)
            if signs != self._signs:
                # a claim that came or went is none of the loop's
                before = self._signs or (None, signs[1])
                self._loops |= before[1] != signs[1] or None not in (before[0], signs[0])
                self._signs, self._heard = signs, now
                self.step = _head(self.run)[0]

    def _stop(self, reason: str, now: float) -> None:
        self._reason, self._told = reason, now
        self.end()

    def end(self) -> None:
        """Takes the call back, or ends it."""
        if self.future is not None and not self.future.done():
            self.future.cancel()

    def result(self) -> BranchResult:
        """Returns how it ended."""
        status, error, seconds = self._outcome()
        if status != "complete" and is_complete(self.run):
            status, error = "complete", ""  # it had just reached its end
        step, metrics = _head(self.run)
        return BranchResult(self.run.name, self.run.overrides, status, error, step, metrics, seconds)

    def _outcome(self) -> tuple[str, str, float | None]:
        if self.future is None:
            return "complete", "", None
        try:
            # it is done, or was left to itself
            ended = self.future.result(0)
        except Exception as failure:  # each engine has its own
            return ("stopped", self._reason, self._seconds) if self._reason else ("died", str(failure), self._seconds)
        if self._reason and ended["status"] != "complete":
            return "stopped", self._reason, ended["seconds"]
        return ended["status"], ended["error"], ended["seconds"]


def _head(run: Run) -> tuple[int | None, Mapping[str, float]]:
    """Returns the step and the metrics of the head, where there is one that can be read."""
    with contextlib.suppress(StoreError):
        head = run.latest()
        return head.step, head.metrics
    return None, {}
