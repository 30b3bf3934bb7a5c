"""What HDF5's own metadata says of a file, which may come from a stranger. A restore never asks for it.

libhdf5 trusts what it reads: files made for it crash it, hang it, and lead it to other files. So it looks at each file
in a process of its own, which has little memory and time, can open nothing, and may die; what it answers is checked
like a record from disk.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from simckpt.errors import FormatError, StorageError
from simckpt.storage import index, names, reader, sealed

DEADLINE = 120.0  # [s] until the answer is there
ANSWER_LIMIT = 1 << 28  # [bytes], as of an index
_CHILD = Path(__file__).with_name("hdf5_child.py")


@dataclass(frozen=True)
class Source:
    """Rows of a virtual dataset.

    Attributes:
        segment: id of the segment they lie in.
        path: of the dataset there.
        start: the first of its rows that is meant.
        stop: one behind the last.
    """

    segment: str
    path: str
    start: int
    stop: int


@dataclass(frozen=True)
class Dataset:
    """One dataset of a file, by HDF5's metadata.

    Attributes:
        path: parts joined by "/", without one in front, as in an index.
        dtype: numpy's name with the byte order, such as "<f8": what an index calls `stored`.
        shape: as stored.
        offset: [bytes] from the file's start; None for an empty or virtual dataset.
        size: shape times item size [bytes].
        attributes: its texts `kind`, `dtype` and `virtual`, where it has them.
        sources: where the rows of a virtual dataset lie, in order; () for one in this file.
    """

    path: str
    dtype: str
    shape: tuple[int, ...]
    offset: int | None
    size: int
    attributes: Mapping[str, str]
    sources: tuple[Source, ...] = ()


@dataclass(frozen=True)
class Description:
    """All that HDF5's metadata says of a file.

    Attributes:
        datasets: {path: dataset}.
        groups: {path: texts `format`, `version`, `kind`, `name`}; "" is the root.
    """

    datasets: Mapping[str, Dataset]
    groups: Mapping[str, Mapping[str, str]]


def describe(path: str | os.PathLike[str], *, deadline: float = DEADLINE) -> Description:
    """Returns what HDF5's metadata says of one file; see `Reader.describe`, which is quicker for many."""
    with Reader() as files:
        return files.describe(path, deadline=deadline)


class Reader:
    """Looks at files, each in a process of its own; a context manager.

    These processes are forks of one that has loaded h5py, which takes a third of a second, and looks at no file itself:
    it is started when it is needed, and anew where it had to be ended. Not for several threads at once.
    """

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._door: socket.socket | None = None

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the process, and one that still looks at a file; the next call starts another."""
        if self._door is not None:
            self._door.close()
        if self._process is not None:
            _end(self._process)
            self._process.wait()
        self._process = self._door = None

    def describe(self, path: str | os.PathLike[str], *, deadline: float = DEADLINE) -> Description:
        """Returns what HDF5's metadata says of a file; none of its values is read.

        Plain and in-store virtual datasets alone, of bool, integers, floats and fixed-length bytes, with bytes of their
        own behind every shape: a file with anything else is refused.

        Args:
            path: of a regular file; folders on the way to it may be symbolic links, the file itself may not.
            deadline: after which the file counts as one that cannot be read [s].

        Raises:
            FileNotFoundError: there is no such file.
            FormatError: it is none that simckpt could have written, or libhdf5 died of it.
            StorageError: the permissions refuse, or no process can be started.
        """
        path = Path(path)
        with reader.opened_file(path.parent, path.name) as descriptor:
            return self.describe_opened(descriptor, path=path, deadline=deadline)

    def describe_opened(self, descriptor: int, *, path: object, deadline: float = DEADLINE) -> Description:
        """Returns the same of an open regular file; `path` is for messages."""
        data = self._ask(descriptor, path, deadline)
        try:
            content = json.loads(data)
        except (ValueError, RecursionError) as error:
            raise FormatError(f"{path}: HDF5's reader gave no answer that can be read") from error
        if not isinstance(content, dict):
            raise FormatError(f"{path}: HDF5's reader gave no answer that can be read")
        answer = sealed.Fields(content, path)
        if "refused" in content:
            raise FormatError(f"{path} is no file that simckpt has written: {answer.text('refused')}")
        groups = answer.object("groups")
        found = [_dataset(each) for each in answer.objects("datasets")]
        return Description(
            {dataset.path: dataset for dataset in found}, {name: groups.string_map(name) for name in groups.content}
        )

    def _ask(self, descriptor: int, path: object, deadline: float) -> bytes:
        """Returns what the process wrote; raises FormatError if it died, took too long or wrote too much."""
        process, door = self._started(path)
        late = threading.Event()

        def end() -> None:
            late.set()
            _end(process)

        timer = threading.Timer(deadline, end)
        timer.start()
        is_ready = False  # for another file
        try:
            data, code = _exchange(door, descriptor)
            is_ready = code is not None and len(data) <= ANSWER_LIMIT
        except OSError as error:
            raise StorageError(f"no process can look at {path}: {error.strerror}") from error
        finally:
            timer.cancel()
            if late.is_set() or not is_ready:
                self.close()
        if late.is_set():
            raise FormatError(f"{path}: HDF5's reader did not come to an end within {deadline:g} s")
        if len(data) > ANSWER_LIMIT:
            raise FormatError(f"{path} describes more than a file of simckpt can hold")
        if code is None:
            raise StorageError(f"no process can look at {path}: the one that makes a fork for each file has ended")
        if code != 0:
            raise FormatError(f"{path}: HDF5's reader died of it (exit code {code})")
        return data

    def _started(self, path: object) -> tuple[subprocess.Popen[bytes], socket.socket]:
        if self._process is None or self._door is None:
            command = [sys.executable, "-I", "-B", str(_CHILD), json.dumps([part for part in sys.path if part])]
            try:
                self._door, there = socket.socketpair()
                with there:
                    self._process = subprocess.Popen(
                        command,
                        stdin=there.fileno(),
                        stdout=subprocess.DEVNULL,
                        stderr=subprocess.DEVNULL,
                        env=_environment(),
                        cwd="/",
                        start_new_session=True,  # so that it is ended with the fork that looks at a file
                    )
            except OSError as error:
                self.close()
                raise StorageError(f"no process can be started to look at {path}: {error.strerror}") from error
        return self._process, self._door


def _exchange(door: socket.socket, descriptor: int) -> tuple[bytes, int | None]:
    """Has a file looked at; returns what was answered, as far as that may be, and the exit code, None if none came."""
    read_end, write_end = os.pipe()
    with open(read_end, "rb") as answer:  # noqa: PTH123 a descriptor
        try:
            with contextlib.suppress(BrokenPipeError):  # it is gone: the answer ends at once
                socket.send_fds(door, [b"?"], [descriptor, write_end])
        finally:
            os.close(write_end)
        data = answer.read(ANSWER_LIMIT + 1)
    if len(data) > ANSWER_LIMIT:
        return data, None
    line = b""
    with contextlib.suppress(ConnectionError):
        while not line.endswith(b"\n") and (more := door.recv(16)):
            line += more
    return data, int(line) if re.fullmatch(rb"-?[0-9]{1,4}\n", line) else None


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kills a process and its forks."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)


def _dataset(fields: sealed.Fields) -> Dataset:
    return Dataset(
        path=fields.text("path", limit=1 << 20),
        dtype=index.dtype_from_json(fields.text("dtype", limit=20)).str,
        shape=fields.integers("shape"),
        offset=fields.optional("offset", fields.integer),
        size=fields.integer("size"),
        attributes=fields.string_map("texts"),
        sources=tuple(
            Source(
                source.text("segment", names.ID), source.text("path"), source.integer("start"), source.integer("stop")
            )
            for source in fields.objects("sources")
        ),
    )


def _environment() -> dict[str, Any]:
    """Returns the environment without what would lead libhdf5 elsewhere; one thread, for stacks count as memory."""
    kept = {name: value for name, value in os.environ.items() if not re.match("HDF5_|PYTHON", name)}
    return {**kept, "HDF5_PLUGIN_PRELOAD": "::", "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
