"""Moves checkpoints and sessions to the archive beside a training, in a thread that keeps nobody waiting for long."""

from __future__ import annotations

import contextlib
import threading
import time
import warnings
from collections.abc import Callable

from simckpt.archive.passes import Moved
from simckpt.errors import RunLockedError, SimckptError, SimckptWarning, UpkeepWarning
from simckpt.storage import StoreFiles

FIRST_PAUSE, LONGEST_PAUSE = 5.0, 600.0  # [s] after a failed pass
_LOOK = 0.2  # [s] between looks whether the program ends
_LAST = 1.0  # [s] for giving up


class Mover:
    """Passes whenever there is something new, until it is stopped or the program ends.

    Attributes:
        last_error: why the last pass failed, or None.

    Args:
        files: of the store, for this thread alone.
        move: makes a pass; asks what it is given whether to go on.
        every: how often to look whether there is something new [s].
    """

    def __init__(self, files: StoreFiles, move: Callable[[Callable[[], bool]], Moved], *, every: float) -> None:
        self.last_error: Exception | None = None
        self._files = files
        self._move = move
        self._every = every
        self._stopping, self._abandoned = threading.Event(), threading.Event()
        self._told: set[str] = set()
        # no daemon: one that is inside of a library when the interpreter ends can bring it down
        self._thread = threading.Thread(target=self._work, name="simckpt archive", daemon=False)

    def start(self) -> None:
        """Begins."""
        self._thread.start()

    def stop(self, timeout: float) -> None:
        """Ends it; what was new until now is moved first, as far as that takes less than `timeout` [s]."""
        self._stopping.set()
        self._thread.join(timeout)
        if self._thread.is_alive():
            # the request under way is given up, which is as safe as a kill
            self._abandoned.set()
            self._thread.join(_LAST)
            message = f"the archive did not get ready within {timeout:g} s: what was under way is given up, and the "
            warnings.warn(message + "next pass goes on from there", UpkeepWarning, stacklevel=3)

    def _ends(self) -> bool:
        return self._stopping.is_set() or not threading.main_thread().is_alive()

    def _may_go_on(self) -> bool:
        return not self._abandoned.is_set() and threading.main_thread().is_alive()

    def _work(self) -> None:
        moved: object = None  # the state of the store that was moved last
        pause = FIRST_PAUSE
        ends = False
        while not ends:
            # one more look after the end was asked for: what the program has saved until then goes along
            ends = self._ends()
            now = self._state()
            if now is None or now != moved:
                moved = now if self._try() else None
            if moved is not None:
                pause = FIRST_PAUSE
                self._wait(self._every)
            else:
                self._wait(pause)
                pause = min(2 * pause, LONGEST_PAUSE)

    def _wait(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while not self._ends() and (left := end - time.monotonic()) > 0:
            self._stopping.wait(min(left, _LOOK))

    def _state(self) -> object:
        """Returns what differs once a run or a session was added, pruned or marked; None if that cannot be known."""
        try:
            runs = {run: (self._files.stamps(run), self._files.mark_stamps(run)) for run in self._files.runs()}
            return runs, self._files.session_stamps()
        except SimckptError:
            return None

    def _try(self) -> bool:
        """Makes a pass; returns whether all of it was done."""
        try:
            moved = self._move(self._may_go_on)
        except RunLockedError:
            return False  # somebody else is at it
        except Exception as error:
            # whatever it is: without this thread nothing would be copied any longer, and nobody would know
            self.last_error = error
            if self._may_go_on():
                told = str(error) if isinstance(error, SimckptError) else f"{type(error).__name__}: {error}"
                self._tell(type(error).__name__, told)
            return False
        self.last_error = None
        self._told.intersection_update(moved.problems)
        for problem in moved.problems:
            self._tell(problem, problem)
        return not moved.problems

    def _tell(self, kind: str, problem: str) -> None:
        """Tells of trouble, once until a pass ends without it."""
        if kind in self._told:
            return
        self._told.add(kind)
        with contextlib.suppress(SimckptError):
            for run in self._files.runs():
                self._files.log_event(run, {"event": "archive failed", "reason": problem})
        # a program that turns warnings into errors must not lose the thread by it
        with contextlib.suppress(SimckptWarning):
            warnings.warn(f"the archive: {problem}; training goes on, tried again later", UpkeepWarning, stacklevel=2)
