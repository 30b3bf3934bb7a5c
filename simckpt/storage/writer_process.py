"""A process that does the heavy part of saves: it maps the staged arrays of the training process, and writes them.

`WriterProcess` is the training process's end; `main` is the other one, `python -m simckpt.storage.writer_process <fd>`:
a fresh interpreter, so that nothing of the program is imported again, torch neither. They talk over a pair of sockets.
The child ignores SIGTERM, SIGINT, SIGUSR1 and SIGUSR2, for a signal to the process group must not end the last save,
and leaves when the other end is closed or gone.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from typing import Any

from simckpt.errors import SimckptError, StorageError
from simckpt.state.leaf import Leaf
from simckpt.state.shared_memory import AttachedSlabs, Placed, Slabs
from simckpt.state.tree import Encoded
from simckpt.storage import durable, processes
from simckpt.storage.preparing import Prepared, PrepareJob, write_prepared

_POLL = 2.0  # [s] between two looks at whether the parent lives: forked env workers may hold its socket open
_GRACE = 10.0  # [s] for the child to end by itself once its socket is closed


@dataclass(frozen=True)
class _Request:
    """One save, as it crosses the socket.

    Attributes:
        job: from `StoreFiles.prepare_job`.
        components: {name: (structure, {path: leaf})}; a leaf's data is an array or its place in shared memory.
        attributes: {path: texts}.
        new: numbers of slabs whose descriptors follow.
        slabs: numbers of all slabs that are in use.
    """

    job: PrepareJob
    components: Mapping[str, tuple[bytes, Mapping[str, Any]]]
    attributes: Mapping[str, Mapping[str, str]] | None
    new: tuple[int, ...]
    slabs: frozenset[int]


class WriterProcess:
    """Prepares checkpoints in a process of its own, which is started by the first one.

    Args:
        slabs: the shared memory in which large arrays lie.
    """

    def __init__(self, slabs: Slabs) -> None:
        self._slabs = slabs
        self._child: _Child | None = None

    @property
    def pid(self) -> int | None:
        """The process id while it runs."""
        return None if self._child is None else self._child.process.pid

    def prepare(
        self,
        job: PrepareJob,
        components: Mapping[str, Encoded],
        attributes: Mapping[str, Mapping[str, str]] | None = None,
    ) -> Prepared:
        """Does what `write_prepared` does, and raises what it raises.

        What it raises it raises once nobody writes any longer, so that the caller may remove `job.folder`.

        Raises:
            StorageError: the process could not be started, or died; the next call starts another one.
        """
        try:
            if self._child is None:
                self._child = _Child()
            outcome = self._child.ask(self._request(job, components, attributes), self._slabs)
        except (EOFError, OSError) as error:
            code = None if self._child is None else self._child.end()
            self._child = None
            raise StorageError(
                f"the process that writes saves ended (exit code {code}): {type(error).__name__}: {error}; earlier "
                "checkpoints are untouched, and the next save starts another one"
            ) from error
        except BaseException:
            # the answer would be taken for that of the next request
            self.close()
            raise
        if isinstance(outcome, BaseException):
            raise outcome
        assert isinstance(outcome, Prepared)
        return outcome

    def close(self) -> None:
        """Ends the process, if there is one."""
        child, self._child = self._child, None
        if child is not None:
            child.end()

    def _request(
        self,
        job: PrepareJob,
        components: Mapping[str, Encoded],
        attributes: Mapping[str, Mapping[str, str]] | None,
    ) -> _Request:
        assert self._child is not None
        sent = {
            name: (encoded.structure, {path: self._shared(leaf) for path, leaf in encoded.leaves.items()})
            for name, encoded in components.items()
        }
        slabs = frozenset(self._slabs.descriptors())
        return _Request(job, sent, attributes, tuple(slabs - self._child.known), slabs)

    def _shared(self, leaf: Leaf) -> Any:
        placed = self._slabs.find(leaf.data)
        return leaf if placed is None else replace(leaf, data=placed)  # type: ignore[arg-type]


class _Child:
    """One process and the socket to it."""

    def __init__(self) -> None:
        ours, self.process = processes.start_module("simckpt.storage.writer_process")
        self.known: frozenset[int] = frozenset()
        self._socket = ours
        self._connection = Connection(os.dup(ours.fileno()))
        self.end = weakref.finalize(self, _end, os.getpid(), self.process, self._socket, self._connection)

    def ask(self, request: _Request, slabs: Slabs) -> Any:
        """Returns the answer to a request: a Prepared, or an exception."""
        descriptors = slabs.descriptors()
        self._connection.send(request)
        for number in request.new:
            socket.send_fds(self._socket, [b"."], [descriptors[number]])
        self.known = request.slabs
        return self._connection.recv()


def _end(owner: int, process: subprocess.Popen[bytes], channel: socket.socket, connection: Connection) -> int | None:
    """Closes the sockets, waits for the process and returns its exit code."""
    if os.getpid() != owner:
        return None  # the end of a forked child, which has nothing to say to its parent's writer
    with contextlib.suppress(OSError):
        channel.shutdown(socket.SHUT_RDWR)
    channel.close()
    connection.close()
    try:
        return process.wait(_GRACE)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait()


def main(descriptor: int) -> None:
    """Answers requests on a socket until the other end is closed or its process is gone."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    parent = os.getppid()
    channel = socket.socket(fileno=descriptor)
    connection = Connection(os.dup(descriptor))
    slabs, disk = AttachedSlabs(), durable.Disk()
    with contextlib.suppress(EOFError, ConnectionError):
        while True:
            while not connection.poll(_POLL):
                if os.getppid() != parent:
                    return
            _answer(connection, _received(connection, channel, slabs), slabs, disk)


def _received(connection: Connection, channel: socket.socket, slabs: AttachedSlabs) -> _Request:
    request = connection.recv()
    assert isinstance(request, _Request)
    for number in request.new:
        _, descriptors, _, _ = socket.recv_fds(channel, 1, 1)
        if not descriptors:
            raise EOFError
        slabs.attach(number, descriptors[0])
    slabs.keep(request.slabs)
    return request


def _answer(connection: Connection, request: _Request, slabs: AttachedSlabs, disk: durable.Disk) -> None:
    outcome: Prepared | Exception
    try:
        components = {
            name: Encoded({path: _local(leaf, slabs) for path, leaf in leaves.items()}, structure)
            for name, (structure, leaves) in request.components.items()
        }
        outcome = write_prepared(disk, request.job, components, request.attributes)
    except Exception as error:
        outcome = error
    connection.send(_portable(outcome) if isinstance(outcome, Exception) else outcome)


def _portable(error: Exception) -> Exception:
    """Returns an error as it is, if it comes out of a pipe again, or what it says: those of libraries may not."""
    try:
        ForkingPickler.loads(ForkingPickler.dumps(error))
    except Exception:
        return SimckptError(f"{type(error).__name__}: {error}")
    return error


def _local(leaf: Any, slabs: AttachedSlabs) -> Leaf:
    local: Leaf = replace(leaf, data=slabs.array(leaf.data)) if isinstance(leaf.data, Placed) else leaf
    return local


if __name__ == "__main__":
    # the classes of a request are those of the module under its own name
    from simckpt.storage import writer_process

    writer_process.main(int(sys.argv[1]))
