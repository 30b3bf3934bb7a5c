"""The HDF5 metadata of a file, laid out in memory: libhdf5 never opens a file of a store for writing.

h5py creates groups, attributes and contiguous datasets (allocated early, never filled) in a file-like object that keeps
the few KB which libhdf5 writes. What lies between the datasets' payloads, the rest, is then written together with them
by `durable.py`. The rest is a pure function of the leaves' paths, dtypes, shapes and attributes: the layouts of the
last few signatures are kept, and saving the same tree again makes no h5py call.
"""

from __future__ import annotations

import io
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import h5py
import numpy as np

from simckpt.errors import FormatError
from simckpt.storage import digests

Attributes = tuple[tuple[str, str], ...]

_PAGE = 4096  # [bytes]
_ATTRIBUTE_LIMIT = 4000  # [bytes] of one text; HDF5's limit for all attributes of an object header is 64 KB
_KEPT = 8  # layouts: one for each shape of state that one process alternates between


@dataclass(frozen=True)
class Slot:
    """A dataset to be: its path, its stored dtype and shape, and texts that explain it."""

    path: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    attributes: Attributes = ()


@dataclass(frozen=True)
class Layout:
    """Where everything in a file goes.

    Attributes:
        size: of the file [bytes].
        offsets: {path: offset} of the payloads; None for an empty dataset.
        rest: (offset, bytes) of all that is not payload; together with the payloads it covers the file exactly once.
        rest_digest: of the rest's bytes, in order.
    """

    size: int
    offsets: Mapping[str, int | None]
    rest: tuple[tuple[int, bytes], ...]
    rest_digest: str


_cache: OrderedDict[Any, Layout] = OrderedDict()
_cache_lock = threading.Lock()


def lay_out(slots: Sequence[Slot], *, groups: Mapping[str, Attributes]) -> Layout:
    """Returns the layout of a file with these datasets.

    Args:
        slots: the datasets, in the order in which their payloads shall lie.
        groups: {path: attributes} of groups that get attributes; "" is the root.

    Raises:
        FormatError: paths that cannot be in one file together, such as `a` and `a/b`, or a dtype that HDF5 lacks.
    """
    key = (
        tuple((slot.path, slot.dtype.str, slot.shape, slot.attributes) for slot in slots),
        tuple(sorted(groups.items())),
    )
    with _cache_lock:
        if key in _cache:
            _cache.move_to_end(key)
            return _cache[key]
    layout = _lay_out(slots, groups)
    with _cache_lock:
        _cache[key] = layout
        while len(_cache) > _KEPT:
            _cache.popitem(last=False)
    return layout


def _lay_out(slots: Sequence[Slot], groups: Mapping[str, Attributes]) -> Layout:
    image = _Image()
    try:
        offsets = _Writer(image, groups).write(slots)
    except (ValueError, TypeError, RuntimeError, OSError, KeyError) as error:
        raise FormatError(f"HDF5 cannot lay out these leaves: {error}") from error
    rest = image.without([(offsets[slot.path], slot.dtype.itemsize * int(np.prod(slot.shape))) for slot in slots])
    hasher = digests.Hasher()
    for _, data in rest:
        hasher.update(data)
    return Layout(image.size, offsets, rest, hasher.digest())


class _Writer:
    """Creates groups and datasets by h5py's low-level calls, in a file that is an image in memory."""

    def __init__(self, image: _Image, groups: Mapping[str, Attributes]) -> None:
        self._image = image
        self._attributes = groups
        access = h5py.h5p.create(h5py.h5p.FILE_ACCESS)
        access.set_fileobj_driver(h5py.h5fd.fileobj_driver, image)
        # every HDF5 since 1.8 of 2008 reads it; its metadata carries checksums
        access.set_libver_bounds(h5py.h5f.LIBVER_V18, h5py.h5f.LIBVER_V110)
        creation = h5py.h5p.create(h5py.h5p.FILE_CREATE)
        creation.set_obj_track_times(False)
        self._file = h5py.h5f.create(b"simckpt", h5py.h5f.ACC_TRUNC, creation, access)
        self._group_creation = h5py.h5p.create(h5py.h5p.GROUP_CREATE)
        self._group_creation.set_obj_track_times(False)
        self._dataset_creation = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        self._dataset_creation.set_layout(h5py.h5d.CONTIGUOUS)
        self._dataset_creation.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
        self._dataset_creation.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
        self._dataset_creation.set_obj_track_times(False)
        self._scalar = h5py.h5s.create(h5py.h5s.SCALAR)
        self._groups: dict[str, Any] = {}

    def write(self, slots: Sequence[Slot]) -> dict[str, int | None]:
        """Returns {path: offset} and closes the file."""
        try:
            for path in self._attributes:
                self._group(path)
            return {slot.path: self._dataset(slot) for slot in slots}
        finally:
            self._groups.clear()
            self._file.close()

    def _group(self, path: str) -> Any:
        if path not in self._groups:
            if path:
                parent, _, name = path.rpartition("/")
                group = h5py.h5g.create(self._group(parent), name.encode(), gcpl=self._group_creation)
            else:
                group = h5py.h5g.open(self._file, b"/")
            self._groups[path] = group
            self._explain(group, self._attributes.get(path, ()))
        return self._groups[path]

    def _dataset(self, slot: Slot) -> int | None:
        parent, _, name = slot.path.rpartition("/")
        group = self._group(parent)
        space = h5py.h5s.create_simple(slot.shape) if slot.shape else self._scalar
        kind = h5py.h5t.py_create(slot.dtype)
        dataset = h5py.h5d.create(group, name.encode(), kind, space, self._dataset_creation)
        self._explain(dataset, slot.attributes)
        offset: int | None = dataset.get_offset()
        return offset

    def _explain(self, target: Any, attributes: Attributes) -> None:
        # fixed-length texts: those of variable length would need a global heap
        for name, text in attributes:
            data = text.encode("utf-8")[:_ATTRIBUTE_LIMIT] or b"\0"
            kind = h5py.h5t.C_S1.copy()
            kind.set_size(len(data))
            kind.set_strpad(h5py.h5t.STR_NULLPAD)
            kind.set_cset(h5py.h5t.CSET_UTF8)
            attribute = h5py.h5a.create(target, name.encode("utf-8"), kind, self._scalar)
            attribute.write(np.frombuffer(data, f"S{len(data)}").reshape(()), mtype=kind)


class _Image(io.RawIOBase):
    """A file in memory that holds the pages which were written, and none of the payload's."""

    def __init__(self) -> None:
        self.size = 0
        self._position = 0
        self._pages: dict[int, bytearray] = {}

    def readable(self) -> bool:
        return True

    def writable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._position = offset + (0, self._position, self.size)[whence]
        return self._position

    def tell(self) -> int:
        return self._position

    def truncate(self, size: int | None = None) -> int:
        self.size = self._position if size is None else size
        return self.size

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        done = 0
        while done < len(view):
            number, start = divmod(self._position + done, _PAGE)
            step = min(_PAGE - start, len(view) - done)
            page = self._pages.setdefault(number, bytearray(_PAGE))
            page[start : start + step] = view[done : done + step]
            done += step
        self._position += done
        self.size = max(self.size, self._position)
        return done

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        view[:] = self._bytes(self._position, self._position + len(view))
        self._position += len(view)
        return len(view)

    def _bytes(self, start: int, stop: int) -> bytes:
        pieces = []
        while start < stop:
            number, first = divmod(start, _PAGE)
            step = min(_PAGE - first, stop - start)
            page = self._pages.get(number)
            pieces.append(bytes(step) if page is None else bytes(page[first : first + step]))
            start += step
        return b"".join(pieces)

    def without(self, payloads: Sequence[tuple[int | None, int]]) -> tuple[tuple[int, bytes], ...]:
        """Returns (offset, bytes) of everything outside of the payloads, which must not overlap."""
        rest, position = [], 0
        for offset, size in sorted((offset, size) for offset, size in payloads if offset is not None):
            assert offset >= position, "libhdf5 gave two datasets the same bytes"
            if offset > position:
                rest.append((position, self._bytes(position, offset)))
            position = offset + size
        if self.size > position:
            rest.append((position, self._bytes(position, self.size)))
        return tuple(rest)
