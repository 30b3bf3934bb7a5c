"""Who may work on a recording: the thread that steps, alone. Others, and signal handlers, leave word.

A signal handler can interrupt anything, the recorder's own work as well, and another thread may come at any moment:
what they have to say waits until the thread of the loop is at a place where no row is in progress.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from threading import get_ident
from types import FrameType
from typing import Any

from simckpt.errors import RecorderBusyError

MOST_ASKED = 100_000  # calls that may wait for the loop
_AT_ONCE = 2000  # of them that are made at one time
_CLOSING = 5.0  # [s] that a closing waits for a step of another thread
_HANDOVER = 1.0  # [s] that a thread waits for a call of a link by the one before


# that work on a recording; an interrupt at a bad moment ends such work, and leaves `busy` as it was
_AT_WORK = tuple(f"simckpt.hardware.{name}" for name in ("link_tables", "loop_thread", "part_buffers", "recording"))


class LoopThread:
    """The thread that steps, whichever it is at the time.

    Attributes:
        ident: of the thread.
        busy: whether it is at work on the recording at this moment.
        asked: what others have asked for, calls that wait.
        acquire, release: of a lock that is held from the beginning of a step or reset to its end.

    Args:
        lost: is told, in that thread, of what was lost, and why.
    """

    def __init__(self, lost: Callable[[str], None]) -> None:
        self.ident = get_ident()
        self.busy = False
        self._lost = lost
        # nobody waits for it but who closes
        alone = threading.Lock()
        self.acquire, self.release = alone.acquire, alone.release
        self.asked: deque[tuple[Callable[..., None], tuple[Any, ...]]] = deque()
        self._too_many = 0

    def ask(self, function: Callable[..., None], *arguments: Any) -> bool:
        """Has a function called as soon as no row is in progress; any thread may ask at any time.

        Returns:
            Whether it will be: so many may wait, and no more.
        """
        if len(self.asked) < MOST_ASKED:
            self.asked.append((function, arguments))
            return True
        self._too_many += 1
        return False

    def serve(self, most: int = _AT_ONCE) -> None:
        """Makes the calls that were asked for so far; no row is in progress."""
        for _ in range(min(len(self.asked), most)):
            function, arguments = self.asked.popleft()
            try:
                function(*arguments)
            except Exception as error:
                self._lost(f"{type(error).__name__}: {error}")
        if self._too_many:
            number, self._too_many = self._too_many, 0
            self._lost(f"{number:,} notes, triggers or calls of links by other threads came while the loop stood")

    def enter(self) -> bool:
        """Begins a step or a reset in this thread; returns False if one before was interrupted and never ended.

        Raises:
            RecorderBusyError: another thread is in one.
        """
        is_new, ident = self.acquire(False), get_ident()
        if not is_new and ident != self.ident:
            raise RecorderBusyError(
                "the recorder is in a step or reset of another thread: one thread at a time steps an env"
            )
        if ident != self.ident:
            self._take_over(ident)
        self.busy = True
        if self.asked:
            self.serve()
        return is_new

    def _take_over(self, ident: int) -> None:
        """Makes this the thread of the loop; the one before may be in a call of a link, which takes microseconds."""
        # first this: from then on that thread leaves word
        self.ident = ident
        deadline = time.monotonic() + _HANDOVER
        while self.busy and time.monotonic() < deadline:
            time.sleep(0)

    def may_act(self) -> bool:
        """Begins something between two steps, if this is the thread that steps and it is not at work already."""
        if get_ident() != self.ident or self.busy or not self.acquire(False):
            return False
        self.busy = True
        return True

    def leave(self) -> None:
        """Ends what `enter` or `may_act` has begun, after what others have asked for meanwhile."""
        try:
            if self.asked:
                self.serve()
        finally:
            self.busy = False
            # a step within a step of the same thread has ended it already
            with contextlib.suppress(RuntimeError):
                self.release()

    def close(self, function: Callable[..., None], *arguments: Any) -> None:
        """Calls a function, after all that was asked for, when no other call is at work.

        In a signal handler that has interrupted such work, it is called when that is done; after a step of another
        thread, but one that hangs is not waited for.
        """
        own = get_ident() == self.ident
        if own and self.busy and _is_at_work():
            self.ask(function, *arguments)
            return
        alone = self.acquire(timeout=0 if own else _CLOSING)
        try:
            if not own:
                # between two steps a call of a link is at work without the lock
                self._take_over(get_ident())
            self.busy = True
            self.serve(MOST_ASKED)
            function(*arguments)
        finally:
            self.busy = False
            if alone:
                self.release()


def _is_at_work() -> bool:
    """Returns whether this thread has interrupted work on a recording to close it."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__") in _AT_WORK:
        frame = frame.f_back
    while frame is not None:
        if frame.f_globals.get("__name__") in _AT_WORK:
            return True
        frame = frame.f_back
    return False
