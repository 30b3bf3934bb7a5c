"""A disk that fails, writes short, tears, loses or kills at its n-th operation, to see what a store is worth then.

All changes that simckpt makes to files go through `storage.durable.Disk`, one method for each system call. A
`FaultyDisk` counts these operations and, once armed, does something else at one of them:

    disk = FaultyDisk()
    with disk.installed():
        run = simckpt.Store(path).start("ant-ppo")
        disk.arm(fail(errno.ENOSPC), at=7)
        ...

What it cannot do: reach a writer process (`background="process"`), which has a disk of its own.
"""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

from simckpt.storage import durable
from simckpt.storage.durable import Disk

OPERATIONS = tuple(sorted(name for name in vars(Disk) if not name.startswith("_")))
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # what a disk, a quota or a limit without room says


@dataclass(frozen=True)
class Operation:
    """An operation of a disk that is about to happen.

    Attributes:
        disk: that was asked.
        name: of the method of `Disk`.
        arguments: its arguments.
    """

    disk: FaultyDisk
    name: str
    arguments: tuple[Any, ...]

    def perform(self, *arguments: Any) -> Any:
        """Does it, with its own arguments or with others, and returns what it returned."""
        return self.disk.perform(self.name, *(arguments or self.arguments))


Fault = Callable[[Operation], Any]
"""Takes the place of an operation: returns what it should seem to return, raises OSError, or does not come back."""


class FaultyDisk(Disk):
    """Counts its operations and, once armed, has a fault at one of them or from it on.

    Attributes:
        calls: names of the operations since it was armed.
        hit: name of the operation that a fault took the place of first, or None.
    """

    def __init__(self, *, syncs: bool = False) -> None:
        """Makes a disk without a fault.

        Args:
            syncs: whether a sync really is one. Otherwise it is counted and not done: only a power failure could tell
                the difference, and most of the time would go there.
        """
        self.calls: list[str] = []
        self.hit: str | None = None
        self._syncs = syncs
        self._fault: Fault | None = None
        self._at, self._sticky = 0, False

    def arm(self, fault: Fault | None = None, *, at: int = 0, sticky: bool = False) -> None:
        """Counts from 1 again, and has `fault` in the place of operation number `at`, or of all from it on.

        Args:
            fault: None to disarm it.
            at: number of the operation.
            sticky: whether all later operations fail as well.
        """
        self.calls, self.hit, self._fault, self._at, self._sticky = [], None, fault, at, sticky

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Puts the disk under every store that this process opens within the block."""
        with mock.patch.object(durable, "Disk", return_value=self):
            yield

    def perform(self, name: str, *arguments: Any) -> Any:
        """Does an operation, uncounted."""
        if name == "fsync" and not self._syncs:
            return None
        return getattr(Disk, name)(self, *arguments)

    def _counted(self, name: str, arguments: tuple[Any, ...]) -> Any:
        self.calls.append(name)
        number, fault = len(self.calls), self._fault
        if fault is None or not (number == self._at or (self._sticky and number > self._at)):
            return self.perform(name, *arguments)
        self.hit = self.hit or name
        return fault(Operation(self, name, arguments))


def _counting(name: str) -> Callable[..., Any]:
    def method(self: FaultyDisk, *arguments: Any) -> Any:
        return self._counted(name, arguments)

    method.__name__, method.__doc__ = name, getattr(Disk, name).__doc__
    return method


for _name in OPERATIONS:
    setattr(FaultyDisk, _name, _counting(_name))


def fail(number: int) -> Fault:
    """Returns a fault that does nothing and reports an error: `errno.EIO`, `errno.ENOSPC`, `errno.EDQUOT`."""

    def fault(operation: Operation) -> Any:
        if operation.name == "close":  # what the kernel closes it closes, whatever it reports
            operation.perform()
        raise OSError(number, os.strerror(number))

    return fault


def fail_and_drop(operation: Operation) -> Any:
    """Fails with an I/O error and, where that is the sync of a file, drops what was written to it.

    That is what Linux does: pages that could not be written count as clean from then on, so that a second sync reports
    success, and they are gone once memory is short.
    """
    if operation.name == "fsync":
        (descriptor,) = operation.arguments
        if stat.S_ISREG(os.fstat(descriptor).st_mode):
            size = os.fstat(descriptor).st_size
            os.ftruncate(descriptor, 0)
            os.ftruncate(descriptor, size)
    return fail(errno.EIO)(operation)


def write_short(operation: Operation) -> Any:
    """Writes half of the bytes, at least one, and says so, which is no error."""
    if operation.name != "pwrite":
        return operation.perform()
    descriptor, data, offset = operation.arguments
    return operation.perform(descriptor, memoryview(data)[: max(1, len(data) // 2)], offset)


def lose(operation: Operation) -> Any:
    """Does nothing and reports success, as a lying disk does; descriptors are opened and closed all the same."""
    if operation.name in ("create", "open_log", "open_lock", "close"):
        return operation.perform()
    if operation.name in ("pwrite", "append"):
        return len(operation.arguments[1])
    return None


def kill(operation: Operation) -> Any:
    """Kills this process before the operation, as SIGKILL, the out-of-memory killer and a power switch do."""
    os.kill(os.getpid(), signal.SIGKILL)


def tear(operation: Operation) -> Any:
    """Writes half of the bytes, and kills this process."""
    if operation.name == "pwrite":
        write_short(operation)
    kill(operation)


def interrupt(operation: Operation) -> Any:
    """Raises KeyboardInterrupt in the place of the operation."""
    if operation.name == "close":
        operation.perform()
    raise KeyboardInterrupt
