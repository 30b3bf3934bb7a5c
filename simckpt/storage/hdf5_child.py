"""The program of the disposable processes that look through HDF5 files of strangers; `hdf5_reader` starts it.

It loads h5py once, which takes a third of a second, and then makes a fork of itself for each file that it is given
through its standard input, a socket. The fork has the file as its standard input and writes JSON to its standard
output; the program itself looks at no file, and so stays what it was. It imports nothing of simckpt, so that it starts
quickly and has nothing to lose. A fork can open no file at all, whatever libhdf5 is talked into.

Low-level calls alone: no link is followed, and no dataset asked for its extent, before it was looked at.
"""

from __future__ import annotations

import io
import json
import math
import os
import re
import resource
import socket
import sys
from collections.abc import Iterator
from typing import Any

MEMORY_LIMIT = 2 << 30  # [bytes] of address space, of which Python, numpy and h5py need a quarter
CPU_LIMIT = 60  # [s]
MAX_OBJECTS = 1_000_000
MAX_DEPTH = 512  # of groups in each other; simckpt's own paths have at most 1,000 characters
MAX_NAME = 1000  # [bytes] of a link's name
MAX_TEXT = 4096  # [bytes] of an attribute that is read
MAX_ATTRIBUTES = 64  # of one object
MAX_SOURCES = 1000  # of one virtual dataset
TEXTS = (
    "kind",
    "dtype",
    "part",
    "virtual",
    "format",
    "version",
    "name",
)  # the attributes that say something; others stay unread
_SEGMENT = re.compile(r"\.\./\.\./\.\./\.\./segments/([0-9a-f]{32})\.h5")


class Refused(Exception):
    """The file has something that no file of simckpt has."""


def main() -> None:
    """Has each file that comes looked at by a process of its own; answers with its exit code, a line for each."""
    # the parent's search path, for -I leaves out what PYTHONPATH may have given it
    sys.path[:] = json.loads(sys.argv[1])
    import h5py

    door = socket.socket(fileno=0)
    while True:
        message, given, _, _ = socket.recv_fds(door, 1, 2)
        if not message:
            return
        child = os.fork()
        if child == 0:
            try:
                look(h5py, *given)
            finally:
                # no destructors of a library that may be in any state
                os._exit(1)
        for each in given:
            os.close(each)
        _, status = os.waitpid(child, 0)
        door.sendall(b"%d\n" % os.waitstatus_to_exitcode(status))


def look(h5py: Any, file: int, answer_to: int) -> None:
    """Writes {"datasets": [...], "groups": {...}} or {"refused": text} about an open file, and ends the process."""
    os.dup2(file, 0)
    os.dup2(answer_to, 1)
    os.close(file)
    os.close(answer_to)
    size = os.fstat(0).st_size
    for what, limit in (
        (resource.RLIMIT_AS, MEMORY_LIMIT),
        (resource.RLIMIT_CPU, CPU_LIMIT),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_FSIZE, 0),
        # what is open stays open; nothing more can be opened, be it by libhdf5
        (resource.RLIMIT_NOFILE, 0),
    ):
        # what the parent may have no more of, this process gets no more of
        hard = resource.getrlimit(what)[1]
        lower = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
        resource.setrlimit(what, (lower, lower))
    try:
        answer: dict[str, Any] = Walker(h5py, size).walk()
    except Refused as error:
        answer = {"refused": str(error)}
    except (OSError, ValueError, TypeError, RuntimeError, KeyError, MemoryError, RecursionError) as error:
        answer = {"refused": f"HDF5 cannot read it: {type(error).__name__}: {str(error)[:200]}"}
    sys.stdout.write(json.dumps(answer))
    sys.stdout.flush()
    os._exit(0)


class _File(io.RawIOBase):
    """Standard input, by position; h5py's driver for file-like objects reads through it."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._position = offset + (0, self._position, self._size)[whence]
        return self._position

    def readinto(self, buffer: Any) -> int:
        done = os.preadv(0, [buffer], self._position)
        self._position += done
        return done


class Walker:
    """Looks through one file.

    Args:
        h5py: the library.
        size: of the file [bytes].
    """

    def __init__(self, h5py: Any, size: int) -> None:
        self._h5 = h5py
        self._size = size
        self._seen: set[tuple[int, int]] = set()
        self._datasets: list[dict[str, Any]] = []
        self._groups: dict[str, dict[str, str]] = {}

    def walk(self) -> dict[str, Any]:
        """Returns all datasets with what is known of them, and the texts of all groups; raises Refused."""
        h5 = self._h5
        access = h5.h5p.create(h5.h5p.FILE_ACCESS)
        access.set_fileobj_driver(h5.h5fd.fileobj_driver, _File(self._size))
        file = h5.h5f.open(b"stranger", h5.h5f.ACC_RDONLY, access)
        if file.get_create_plist().get_userblock():
            raise Refused("a block of something else lies before it")
        root = h5.h5g.open(file, b"/")
        self._see(h5.h5o.get_info(root), "/")
        pending = [("", root, 0)]
        while pending:
            path, group, depth = pending.pop()
            self._groups[path] = self._texts(group, path)
            for name in self._names(group, path):
                place = f"{path}/{name}" if path else name
                info = h5.h5o.get_info(group, name.encode())
                self._see(info, place)
                if info.type == h5.h5o.TYPE_DATASET:
                    self._datasets.append(self._dataset(h5.h5d.open(group, name.encode()), place))
                elif info.type != h5.h5o.TYPE_GROUP:
                    raise Refused(f"{place!r} is a named type")
                elif depth == MAX_DEPTH:
                    raise Refused(f"its groups lie more than {MAX_DEPTH} deep in each other")
                else:
                    pending.append((place, h5.h5g.open(group, name.encode()), depth + 1))
        self._check_overlaps()
        return {"datasets": self._datasets, "groups": self._groups}

    def _see(self, info: Any, place: str) -> None:
        identity = (info.fileno, info.addr)
        if identity in self._seen:
            raise Refused(f"{place!r} is an object that has another name as well")
        if len(self._seen) == MAX_OBJECTS:
            raise Refused(f"it has more than {MAX_OBJECTS} objects")
        self._seen.add(identity)

    def _names(self, group: Any, path: str) -> Iterator[str]:
        if len(group) + len(self._seen) > MAX_OBJECTS:
            raise Refused(f"it has more than {MAX_OBJECTS} objects")
        found: list[bytes] = []
        group.links.iterate(found.append)
        for name in found:
            shown = f"{path}/{name[:80].decode(errors='replace')}"
            if group.links.get_info(name).type != self._h5.h5l.TYPE_HARD:
                raise Refused(f"{shown!r} is a link to somewhere else")
            try:
                text = name.decode()
            except UnicodeDecodeError:
                raise Refused(f"{shown!r} is not named in UTF-8") from None
            if len(name) > MAX_NAME or "/" in text or "\0" in text or text in (".", ".."):
                raise Refused(f"{shown!r} is no name of a dataset or group")
            yield text

    def _texts(self, target: Any, place: str) -> dict[str, str]:
        h5, found = self._h5, {}
        if h5.h5a.get_num_attrs(target) > MAX_ATTRIBUTES:
            raise Refused(f"{place!r} has more than {MAX_ATTRIBUTES} attributes")
        for name in TEXTS:
            if not h5.h5a.exists(target, name.encode()):
                continue
            attribute = h5.h5a.open(target, name.encode())
            kind, space = attribute.get_type(), attribute.get_space()
            plain = kind.get_class() == h5.h5t.STRING and not kind.is_variable_str() and kind.get_size() <= MAX_TEXT
            if not plain or space.get_simple_extent_type() != h5.h5s.SCALAR:
                raise Refused(f"the attribute {name!r} of {place!r} is not a text of fixed length")
            # the library's own array type of this size: no conversion, nothing of variable length
            value = bytearray(kind.get_size())
            attribute.read(_scalar(value), mtype=kind)
            found[name] = bytes(value).rstrip(b"\0").decode(errors="replace")
        return found

    def _dataset(self, dataset: Any, place: str) -> dict[str, Any]:
        h5, creation = self._h5, dataset.get_create_plist()
        kind = self._kind(dataset.get_type(), place)
        layout = creation.get_layout()
        if layout not in (h5.h5d.CONTIGUOUS, h5.h5d.VIRTUAL):
            raise Refused(f"{place!r} is neither contiguous nor virtual")
        if creation.get_external_count():
            raise Refused(f"{place!r} lies in another file")
        if creation.get_nfilters():
            raise Refused(f"{place!r} has filters")
        # before the extent is asked for: that of a virtual dataset may depend on its sources, which HDF5 would open
        sources = self._sources(creation, place) if layout == h5.h5d.VIRTUAL else []
        space = dataset.get_space()
        if space.get_simple_extent_type() not in (h5.h5s.SIMPLE, h5.h5s.SCALAR):
            raise Refused(f"{place!r} has no shape")
        shape = list(space.get_simple_extent_dims())
        if shape and list(space.get_simple_extent_dims(True)) != shape:
            raise Refused(f"{place!r} has a shape that can grow")
        size = math.prod(shape) * kind.itemsize
        offset = None if sources else dataset.get_offset()
        if layout == h5.h5d.VIRTUAL:
            if any(len(source["shape"]) != len(shape) for source in sources) or not shape:
                raise Refused(f"{place!r} is put together of other shapes")
        elif size and (offset is None or dataset.get_storage_size() != size or offset + size > self._size):
            raise Refused(f"{place!r} declares {size} bytes that the file of {self._size} does not have")
        return {
            "path": place,
            "dtype": kind.str,
            "shape": shape,
            "offset": offset if size else None,
            "size": size,
            "texts": self._texts(dataset, place),
            "sources": sources,
        }

    def _kind(self, kind: Any, place: str) -> Any:
        """Returns numpy's dtype of a type that simckpt writes."""
        h5 = self._h5
        if kind.committed():
            raise Refused(f"{place!r} is of a named type")
        if kind.get_class() not in (h5.h5t.INTEGER, h5.h5t.FLOAT, h5.h5t.ENUM, h5.h5t.STRING):
            raise Refused(f"{place!r} is of a type that simckpt does not write")
        if kind.get_class() == h5.h5t.STRING and kind.is_variable_str():
            raise Refused(f"{place!r} holds texts of variable length")
        if kind.get_class() == h5.h5t.ENUM and kind.get_nmembers() != 2:
            raise Refused(f"{place!r} is an enumeration of something else than FALSE and TRUE")
        dtype = kind.dtype
        if dtype.kind not in "biufS" or not h5.h5t.py_create(dtype).equal(kind):
            raise Refused(f"{place!r} is of a type that simckpt does not write")
        return dtype

    def _sources(self, creation: Any, place: str) -> list[dict[str, Any]]:
        """Returns which rows of a virtual dataset lie where, if all of them lie in segments of the same store."""
        count, position = creation.get_virtual_count(), 0
        found: list[dict[str, Any]] = []
        if not 0 < count <= MAX_SOURCES:
            raise Refused(f"{place!r} has {count} sources")
        for number in range(count):
            file = _SEGMENT.fullmatch(_text(creation.get_virtual_filename(number)))
            if file is None:
                raise Refused(f"{place!r} leads out of the store")
            path = _text(creation.get_virtual_dsetname(number))
            if "%" in path.replace("%%", ""):
                raise Refused(f"{place!r} has sources without number")
            start, stop, shape = self._rows(creation.get_virtual_vspace(number), place)
            first, last, there = self._rows(creation.get_virtual_srcspace(number), place)
            if start != position or stop - start != last - first or shape[1:] != there[1:]:
                raise Refused(f"the sources of {place!r} are not rows one after the other")
            position = stop
            found.append(
                {
                    "segment": file[1],
                    "path": path.removeprefix("/").replace("%%", "%"),
                    "start": first,
                    "stop": last,
                    "shape": shape,
                }
            )
        if position != found[0]["shape"][0] or any(source["shape"] != found[0]["shape"] for source in found):
            raise Refused(f"{place!r} has rows without a source")
        return found

    def _rows(self, space: Any, place: str) -> tuple[int, int, list[int]]:
        """Returns (first row, one behind the last, shape) of a selection of whole rows; all of them if it is all."""
        h5 = self._h5
        shape = list(space.get_simple_extent_dims())
        if not shape or list(space.get_simple_extent_dims(True)) != shape:
            raise Refused(f"{place!r} has a source that can grow")
        if space.get_select_type() == h5.h5s.SEL_ALL:
            return 0, shape[0], shape
        if space.get_select_type() != h5.h5s.SEL_HYPERSLABS or not space.is_regular_hyperslab():
            raise Refused(f"{place!r} is put together of other things than rows")
        start, _, count, block = (list(map(int, part)) for part in space.get_regular_hyperslab())
        extent = [each * size for each, size in zip(count, block, strict=True)]
        dense = all(each == 1 for each in count) or all(size == 1 for size in block)
        if not dense or any(start[1:]) or extent[1:] != shape[1:] or start[0] + extent[0] > shape[0]:
            raise Refused(f"{place!r} is put together of other things than whole rows")
        return start[0], start[0] + extent[0], shape

    def _check_overlaps(self) -> None:
        position = 0
        for dataset in sorted((each for each in self._datasets if each["offset"] is not None), key=_offset):
            if dataset["offset"] < position:
                raise Refused(f"{dataset['path']!r} overlaps another dataset")
            position = dataset["offset"] + dataset["size"]


def _offset(dataset: dict[str, Any]) -> int:
    offset: int = dataset["offset"]
    return offset


def _text(name: Any) -> str:
    return name if isinstance(name, str) else bytes(name).decode(errors="replace")


def _scalar(value: bytearray) -> Any:
    import numpy as np

    return np.frombuffer(value, f"S{len(value)}").reshape(())


if __name__ == "__main__":
    main()
