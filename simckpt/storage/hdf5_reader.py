"""What HDF5's own metadata says of a file, which may come from a stranger. A restore never asks for it.

libhdf5 trusts what it reads: files made for it crash it, hang it, and lead it to other files. So it looks at a file in
a process of its own, which has little memory and time, can open nothing, and may die; what it answers is checked like
a record from disk.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
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
    """Returns what HDF5's metadata says of a file; none of its values is read.

    Plain and in-store virtual datasets alone, of bool, integers, floats and fixed-length bytes, with bytes of their own
    behind every shape: a file with anything else is refused. Takes a third of a second for the process.

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
        return describe_opened(descriptor, path=path, deadline=deadline)


def describe_opened(descriptor: int, *, path: object, deadline: float = DEADLINE) -> Description:
    """Returns the same of an open regular file; `path` is for messages."""
    data = _ask(descriptor, path, deadline)
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


def _ask(descriptor: int, path: object, deadline: float) -> bytes:
    """Returns what the process wrote; raises FormatError if it died, took too long or wrote too much."""
    command = [sys.executable, "-I", "-B", str(_CHILD), json.dumps([part for part in sys.path if part])]
    try:
        process = subprocess.Popen(
            command, stdin=descriptor, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=_environment(), cwd="/"
        )
    except OSError as error:
        raise StorageError(f"no process can be started to look at {path}: {error.strerror}") from error
    assert process.stdout is not None
    late = threading.Event()

    def end() -> None:
        late.set()
        process.kill()

    timer = threading.Timer(deadline, end)
    timer.start()
    try:
        data = process.stdout.read(ANSWER_LIMIT + 1)
    finally:
        timer.cancel()
        process.stdout.close()
        if late.is_set() or sys.exc_info()[0] is not None:
            process.kill()
        code = _code(process)
    if late.is_set():
        raise FormatError(f"{path}: HDF5's reader did not come to an end within {deadline:g} s")
    if len(data) > ANSWER_LIMIT:
        raise FormatError(f"{path} describes more than a file of simckpt can hold")
    if code != 0:
        raise FormatError(f"{path}: HDF5's reader died of it (exit code {code})")
    return data


def _code(process: subprocess.Popen[bytes]) -> int:
    # it has closed its output: it is at its end, or is ended
    with contextlib.suppress(subprocess.TimeoutExpired):
        return process.wait(5)
    process.kill()
    return process.wait()


def _environment() -> dict[str, Any]:
    """Returns the environment without what would lead libhdf5 elsewhere; one thread, for stacks count as memory."""
    kept = {name: value for name, value in os.environ.items() if not re.match("HDF5_|PYTHON", name)}
    return {**kept, "HDF5_PLUGIN_PRELOAD": "::", "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
