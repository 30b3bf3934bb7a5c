"""How a training loop ends early: by a scheduler's signal, which is answered by a save, or by an exception."""

from __future__ import annotations

import contextlib
import time
import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, NoReturn

from simckpt import policies
from simckpt.errors import ConflictError, SaveFailedWarning
from simckpt.ranks import ALONE
from simckpt.signals import EXIT_REQUEUE, SignalWatcher

if TYPE_CHECKING:
    from simckpt.policies import Moment, SavePolicy
    from simckpt.ranks import Ranks
    from simckpt.run import Run
    from simckpt.saver import Saver


class LoopEnd:
    """Watches for the signals that a policy answers, and makes the last save of a loop.

    Attributes:
        watching: whether the signals are taken over.
        signals: the names of those that are answered.

    Args:
        run: closed before the process exits.
        saver: of its checkpointer.
        save_when: says which signals are answered, and whether exceptions are.
        ranks: that end the loop together.
    """

    def __init__(self, run: Run, saver: Saver, save_when: SavePolicy, ranks: Ranks = ALONE) -> None:
        self._run = run
        self._saver = saver
        self._save_when = save_when
        self._ranks = ranks
        self.signals = tuple(policies.signals_of(save_when))
        self._watcher = SignalWatcher(self.signals) if self.signals else None
        self.watching = False
        self._told: float | None = None
        self._agreed: str | None = None  # the signal that all ranks end by

    def start(self) -> None:
        """Takes over the signals; raises ConfigurationError outside of the main thread."""
        self._told = self._agreed = None
        if self._watcher is not None:
            self._watcher.start()
        self.watching = True

    def stop(self, *, ignore: bool) -> None:
        """Gives the signals back, or ignores them from now on: a process that exits must not get another code."""
        self.watching = False
        if self._watcher is not None:
            self._watcher.stop(ignore=ignore)

    @property
    def requested(self) -> str | None:
        """The name of the signal that asks the process to end, or None."""
        return self._agreed or (None if self._watcher is None or not self.watching else self._watcher.received)

    def agree(self, signal: str) -> str:
        """Takes note that all ranks end by a signal, which may have come to another one; returns it."""
        self._agreed = signal
        return signal

    def time_left(self, asked: str) -> float:
        """Returns what is left of the grace period of the signal that has come [s]; below 0 once it is over."""
        assert self._watcher is not None
        if self._told is None:
            # of several ranks it may have come to another one: then it counts from when this one heard of it
            self._told = time.monotonic() if self._watcher.since is None else self._watcher.since
        return self._told + policies.grace_of(self._save_when, asked) - time.monotonic()

    def save_and_exit(self, moment: Moment, remembered: Mapping[str, float]) -> NoReturn:
        """Saves in the foreground, if the grace period allows it, and exits; told by warnings, never by errors.

        Raises:
            ConflictError: another writer has committed to this run.
            CoordinationError: a rank is lost.
            SystemExit: always, else.
        """
        asked, problem = moment.signal, ""
        assert asked is not None
        # warnings may be errors: the scheduler must get its code all the same
        with contextlib.suppress(Warning):
            flight = self._saver.flight
            if flight is not None and not flight.join(max(0.0, self.time_left(asked))):
                problem = "the save in flight has not ended within the grace period"
            else:
                with contextlib.suppress(Warning):
                    self._saver.collect(wait=True)
                problem = self.too_late_for(asked)
            problem = next(filter(None, self._ranks.gather(problem)), "")
            problem = problem or self._save_now(moment, remembered)
            if problem:
                kept = f"the last checkpoint is {self._saver.writer.head or 'none yet'}"
                message = f"{asked}: nothing was saved at step {moment.step}: {problem}; {kept}"
                warnings.warn(message, SaveFailedWarning, stacklevel=4)
        self._ranks.part(asked)
        self.exit(asked, moment.step, problem)

    def exit(self, asked: str, step: int, problem: str) -> NoReturn:
        """Closes the run and raises SystemExit with the code that asks for a requeue."""
        with contextlib.suppress(Warning):
            self._run.log("stopped", step=step, signal=asked, problem=problem, exit_code=EXIT_REQUEUE)
        with contextlib.suppress(Warning):
            self._run.close()
        raise SystemExit(EXIT_REQUEUE)

    def too_late_for(self, asked: str) -> str:
        """Returns why no save is to be begun in what is left of the grace period of a signal, or nothing."""
        left = self.time_left(asked)
        needed = self._saver.writer.duration
        if needed is None or needed <= left:
            return ""
        return f"a save took {needed:.1f} s last time, and {max(0.0, left):.1f} s of the grace period are left"

    def _save_now(self, moment: Moment, remembered: Mapping[str, float]) -> str:
        """Saves in the foreground; returns why that failed, or nothing."""
        begun = time.monotonic()
        try:
            reason = self._save_when.decide(moment).reason
            save = self._saver.begin(moment, reason, begun=begun, remembered=remembered)
            # ranks that do not wait for each other have no other bound
            alone = self._ranks is not self._run.ranks
            save.wait(max(0.0, self.time_left(moment.signal)) if alone and moment.signal else None)
        except ConflictError:
            raise
        except TimeoutError as error:
            self._saver.publisher.give_up()
            return str(error)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        finally:
            self._saver.collect(wait=False)
        return ""

    def save_post_mortem(self, moment: Moment) -> None:
        """Saves what an exception left behind, if a policy wants that; never raises anything of its own."""
        begun = time.monotonic()
        decision = self._save_when.decide(moment)
        if not decision.due:
            return
        try:
            self._saver.begin(moment, decision.reason, begun=begun, explain=True, kind="exception").wait()
        except Exception as error:
            self._saver.warn_of_failure(error, moment.step)
