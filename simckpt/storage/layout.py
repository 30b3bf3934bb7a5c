"""The HDF5 metadata of a file, laid out in memory: libhdf5 never opens a file of a store for writing.

h5py creates groups, attributes and contiguous datasets (allocated early, never filled) in a file-like object that keeps
the few KB which libhdf5 writes. What lies between the datasets' payloads, the rest, is then written together with them
by `durable.py`. The rest is a pure function of the leaves' paths, dtypes, shapes and attributes: the layouts of the
last few signatures are kept, and saving the same tree again makes no h5py call. Virtual datasets, whose sources change
with every save, are added to a copy of what is kept; the payloads stay where they are.
"""

from __future__ import annotations

import contextlib
import threading
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import h5py
import numpy as np

from simckpt.errors import FormatError
from simckpt.storage import digests
from simckpt.storage.image import Image

Attributes = tuple[tuple[str, str | int], ...]

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
class Source:
    """Rows of a dataset of another file.

    Attributes:
        file: its path, relative to the folder of the file that refers to it.
        path: of the dataset in it.
        rows: how many rows the dataset has.
        start: the first row that is meant.
        stop: one behind the last.
    """

    file: str
    path: str
    rows: int
    start: int
    stop: int


@dataclass(frozen=True)
class Virtual:
    """A dataset whose rows lie in other files, one source after the other; a view for people.

    HDF5 shows `fill_value` for the rows of a source that is missing, or that it could not open, and reports no error.
    """

    path: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    sources: tuple[Source, ...]
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


_cache: OrderedDict[Any, tuple[Layout, Image]] = OrderedDict()
_cache_lock = threading.Lock()


def lay_out(slots: Sequence[Slot], *, groups: Mapping[str, Attributes], virtuals: Sequence[Virtual] = ()) -> Layout:
    """Returns the layout of a file with these datasets.

    Args:
        slots: the datasets, in the order in which their payloads shall lie.
        groups: {path: attributes} of groups that get attributes; "" is the root. The groups of virtual datasets must be
            among them.
        virtuals: datasets that have no payload in this file.

    Raises:
        FormatError: paths that cannot be in one file together, such as `a` and `a/b`, or a dtype that HDF5 lacks.
    """
    key = (
        tuple((slot.path, slot.dtype.str, slot.shape, slot.attributes) for slot in slots),
        tuple(sorted(groups.items())),
    )
    with _cache_lock:
        found = _cache.get(key)
        if found is not None:
            _cache.move_to_end(key)
    if found is None:
        found = _lay_out(slots, groups)
        with _cache_lock:
            _cache[key] = found
            while len(_cache) > _KEPT:
                _cache.popitem(last=False)
    return _with_virtuals(*found, slots, virtuals) if virtuals else found[0]


def _lay_out(slots: Sequence[Slot], groups: Mapping[str, Attributes]) -> tuple[Layout, Image]:
    image = Image()
    with _refused():
        offsets = _Writer(image, groups).write(slots)
    return _layout(image, offsets, slots), image


def _with_virtuals(layout: Layout, image: Image, slots: Sequence[Slot], virtuals: Sequence[Virtual]) -> Layout:
    image = image.copy()
    with _refused():
        _add_virtuals(image, virtuals)
    return _layout(image, layout.offsets, slots)


def _layout(image: Image, offsets: Mapping[str, int | None], slots: Sequence[Slot]) -> Layout:
    rest = image.without([(offsets[slot.path], slot.dtype.itemsize * int(np.prod(slot.shape))) for slot in slots])
    hasher = digests.Hasher()
    for _, data in rest:
        hasher.update(data)
    return Layout(image.size, offsets, rest, hasher.digest())


@contextlib.contextmanager
def _refused() -> Iterator[None]:
    try:
        yield
    except (ValueError, TypeError, RuntimeError, OSError, KeyError) as error:
        raise FormatError(f"HDF5 cannot lay out these leaves: {error}") from error


def fill_value(dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
    """Returns what a viewer shows for missing rows, as an array `()`: NaN, or the largest value where there is none."""
    if dtype.kind in "fc":
        return np.array(np.nan, dtype)
    if dtype.kind in "iu":
        return np.array(np.iinfo(dtype).max, dtype)
    return np.array(True, dtype) if dtype.kind == "b" else np.array(b"\xff" * dtype.itemsize, dtype)


def _access(image: Image) -> Any:
    access = h5py.h5p.create(h5py.h5p.FILE_ACCESS)
    access.set_fileobj_driver(h5py.h5fd.fileobj_driver, image)
    # every HDF5 since 1.8 of 2008 reads it, since 1.10 of 2016 with virtual datasets; its metadata carries checksums
    access.set_libver_bounds(h5py.h5f.LIBVER_V18, h5py.h5f.LIBVER_V110)
    return access


def _add_virtuals(image: Image, virtuals: Sequence[Virtual]) -> None:
    file = h5py.h5f.open(b"simckpt", h5py.h5f.ACC_RDWR, _access(image))
    try:
        for virtual in virtuals:
            creation = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
            creation.set_obj_track_times(False)
            creation.set_fill_value(fill_value(virtual.dtype))
            space, row = h5py.h5s.create_simple(virtual.shape), virtual.shape[1:]
            place, first, once = 0, (0,) * len(row), (1,) * len(virtual.shape)
            for source in virtual.sources:
                rows = source.stop - source.start
                space.select_hyperslab((place, *first), once, block=(rows, *row))
                there = h5py.h5s.create_simple((source.rows, *row))
                there.select_hyperslab((source.start, *first), once, block=(rows, *row))
                # HDF5 takes a % in a source's name for the beginning of a pattern
                source_path = source.path.replace("%", "%%").encode()
                creation.set_virtual(space, source.file.encode(), source_path, there)
                place += rows
            space.select_all()
            parent, _, name = virtual.path.rpartition("/")
            kind = h5py.h5t.py_create(virtual.dtype)
            group = h5py.h5g.open(file, parent.encode() or b"/")
            _explain(h5py.h5d.create(group, name.encode(), kind, space, creation), virtual.attributes)
            del group
    finally:
        file.close()


class _Writer:
    """Creates groups and datasets by h5py's low-level calls, in a file that is an image in memory."""

    def __init__(self, image: Image, groups: Mapping[str, Attributes]) -> None:
        self._image = image
        self._attributes = groups
        creation = h5py.h5p.create(h5py.h5p.FILE_CREATE)
        creation.set_obj_track_times(False)
        self._file = h5py.h5f.create(b"simckpt", h5py.h5f.ACC_TRUNC, creation, _access(image))
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
            _explain(group, self._attributes.get(path, ()))
        return self._groups[path]

    def _dataset(self, slot: Slot) -> int | None:
        parent, _, name = slot.path.rpartition("/")
        group = self._group(parent)
        space = h5py.h5s.create_simple(slot.shape) if slot.shape else self._scalar
        kind = h5py.h5t.py_create(slot.dtype)
        dataset = h5py.h5d.create(group, name.encode(), kind, space, self._dataset_creation)
        _explain(dataset, slot.attributes)
        offset: int | None = dataset.get_offset()
        return offset


def _explain(target: Any, attributes: Attributes) -> None:
    # fixed-length texts: those of variable length would need a global heap
    scalar = h5py.h5s.create(h5py.h5s.SCALAR)
    for name, value in attributes:
        if isinstance(value, int):
            h5py.h5a.create(target, name.encode("utf-8"), h5py.h5t.STD_I64LE, scalar).write(np.array(value, "<i8"))
            continue
        data = value.encode("utf-8")[:_ATTRIBUTE_LIMIT] or b"\0"
        kind = h5py.h5t.C_S1.copy()
        kind.set_size(len(data))
        kind.set_strpad(h5py.h5t.STR_NULLPAD)
        kind.set_cset(h5py.h5t.CSET_UTF8)
        attribute = h5py.h5a.create(target, name.encode("utf-8"), kind, scalar)
        attribute.write(np.frombuffer(data, f"S{len(data)}").reshape(()), mtype=kind)
