"""Processes that this one has started as leaders of a group: whether they have ended, and how they are ended."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from multiprocessing.process import BaseProcess

POLL = 0.01  # between two looks while waiting for an end [s]


def has_ended(process: BaseProcess) -> bool:
    """Returns whether a process has ended.

    Its pipes do not tell: what it forked holds them open, too. It is left a zombie, so that the number of its group
    stays taken until `end_group`; unless multiprocessing is quicker, which collects all children at each start.
    """
    assert process.pid is not None
    with contextlib.suppress(ChildProcessError):
        return os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    return True


def wait_for_end(process: BaseProcess, seconds: float) -> None:
    """Waits until a process has ended, at most so long [s]."""
    deadline = time.monotonic() + seconds
    while not has_ended(process) and time.monotonic() < deadline:
        time.sleep(POLL)


def end_group(process: BaseProcess) -> None:
    """Kills what is left of a process and of its group."""
    assert process.pid is not None
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.kill()
    process.join()
