"""Reads files of a store by their index: opens, checks bounds, `preadv`, digest. libhdf5 is never asked.

Nothing here writes, so a store on a read-only mount can be read; and nothing trusts what a record says: a symbolic
link, a FIFO, a size that the file does not have or two leaves that overlap are refused before memory is allocated.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import math
import os
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from simckpt.errors import DamagedError, FormatError, StorageError, StoreError
from simckpt.state.leaf import Leaf
from simckpt.state.tree import Encoded
from simckpt.storage import digests, index, names, records

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
# without O_NONBLOCK opening a FIFO would wait for a writer
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_CHUNK = 8 << 20  # [bytes] of one preadv
_LARGE = 64 << 20  # [bytes]; below, one thread reads as fast
_READERS = 4
_ALIGNMENT = 64  # [bytes]


@contextlib.contextmanager
def opened_folder(root: Path | int, *parts: str) -> Iterator[int]:
    """Gives a descriptor of a folder below `root`, following no symbolic link below it.

    Args:
        root: a store's path, which may be a symbolic link itself, or a descriptor of a folder of the store.
        parts: names, each a direct entry of the one before.

    Raises:
        FileNotFoundError: a part is missing.
        FormatError: a part is a symbolic link, or not what belongs there.
        StorageError: the disk or the permissions refuse.
    """
    current = root
    try:
        if isinstance(current, Path):
            with _translated_opening(str(current)):
                current = os.open(current, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        for place, part in enumerate(parts):
            with _translated_opening("/".join(parts[: place + 1])):
                inner = os.open(part, _FOLDER, dir_fd=current)
            if current != root:
                os.close(current)
            current = inner
        yield current
    finally:
        if isinstance(current, int) and current != root:
            os.close(current)


@contextlib.contextmanager
def opened_file(root: Path | int, *parts: str) -> Iterator[int]:
    """Gives a descriptor of a regular file below `root`; see `opened_folder`."""
    with opened_folder(root, *parts[:-1]) as folder:
        with _translated_opening("/".join(parts)):
            descriptor = os.open(parts[-1], _FILE, dir_fd=folder)
        try:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise FormatError(f"{'/'.join(parts)} is not a regular file")
            yield descriptor
        finally:
            os.close(descriptor)


@contextlib.contextmanager
def _translated_opening(name: str) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError:
        raise
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENOTDIR, errno.ENXIO):
            raise FormatError(f"{name} is a symbolic link or of another kind than what belongs there") from error
        raise StorageError(f"{name} cannot be opened: {error.strerror}") from error


def read_small(root: Path | int, *parts: str, limit: int, path: str | os.PathLike[str]) -> bytes:
    """Returns a whole file of at most `limit` bytes.

    Args:
        root: see `opened_folder`.
        *parts: see there.
        limit: [bytes].
        path: of the file, for messages.

    Raises:
        FileNotFoundError, FormatError, StorageError: as in `opened_folder`; also a file larger than `limit`.
        DamagedError: its bytes cannot be read, twice.
    """
    with opened_file(root, *parts) as descriptor:
        try:
            return read_whole(descriptor, limit=limit, path=path)
        except OSError as error:
            raise DamagedError(f"{path} cannot be read: {error.strerror}", path=path) from error


def read_whole(descriptor: int, *, limit: int, path: object) -> bytes:
    """Returns the bytes of an open file; raises FormatError if they are more than `limit`, OSError if unreadable."""
    size = os.fstat(descriptor).st_size
    if size > limit:
        raise FormatError(f"{path} has {size} bytes; a record of its kind has at most {limit}")
    data = bytearray(size)
    done = read_into(descriptor, memoryview(data), 0)
    return bytes(data[:done])


def size_of(path: str | os.PathLike[str]) -> int:
    """Returns what a file, or a folder with all that it holds, weighs [bytes].

    What vanishes meanwhile, or cannot be looked at, weighs nothing: a size is told, and nothing is decided from it.
    """
    with contextlib.suppress(OSError):
        status = os.lstat(path)
        if not stat.S_ISDIR(status.st_mode):
            return status.st_size
        with os.scandir(path) as entries:
            return sum(size_of(entry) for entry in entries)
    return 0


def by_file(leaves: Iterable[index.LeafRecord]) -> dict[str, list[index.LeafRecord]]:
    """Returns {file: lines of an index} of what lies in files of the checkpoint's folder."""
    files: dict[str, list[index.LeafRecord]] = {}
    for leaf in leaves:
        files.setdefault(leaf.file, []).append(leaf)
    return files


def read_lines(
    folder: int,
    files: Mapping[str, Sequence[index.LeafRecord]],
    *,
    sizes: Mapping[str, int],
    path: Path,
    memory: Callable[[index.LeafRecord], np.ndarray[Any, Any]] | None = None,
    take: Callable[[index.LeafRecord, np.ndarray[Any, Any]], None],
) -> None:
    """Reads what lies in files of a checkpoint's folder, every byte verified; all before damage is reported.

    Args:
        folder: descriptor of the checkpoint's folder.
        files: {file: lines of its index}, which `check_bounds` has found to lie within it.
        sizes: {file: bytes} by the records.
        path: the folder's path, for messages.
        memory: gives the contiguous array that a line is to be read into; by default a new one.
        take: given each line with its array, as soon as that is verified.

    Raises:
        DamagedError: naming all damaged leaves: bytes differ, are missing or unreadable.
        StorageError: not enough memory, or the permissions refuse.
    """
    problems: list[DamagedError] = []
    for name, lines in files.items():
        try:
            _read_file(folder, name, lines, sizes[name], path / name, memory or new_array, take)
        except DamagedError as error:
            problems.append(error)
    if problems:
        raise joined(problems)


def joined(problems: Sequence[DamagedError]) -> DamagedError:
    """Returns the error that tells of the damage of several files, of one as it is."""
    if len(problems) == 1:
        return problems[0]
    told = "; ".join(error.args[0] for error in problems[:5])
    more = f"; and {len(problems) - 5} more files" if len(problems) > 5 else ""
    paths = dict.fromkeys(leaf for error in problems for leaf in error.leaves)
    return DamagedError(f"{told}{more}", path=problems[0].path, leaves=list(paths))


def _read_file(
    folder: int,
    file: str,
    leaves: Sequence[index.LeafRecord],
    size: int,
    path: Path,
    memory: Callable[[index.LeafRecord], np.ndarray[Any, Any]],
    take: Callable[[index.LeafRecord, np.ndarray[Any, Any]], None],
) -> None:
    try:
        with opened_file(folder, file) as descriptor:
            found, damaged = os.fstat(descriptor).st_size, []
            for leaf, array in zip(leaves, _read_arrays(descriptor, leaves, found, memory), strict=True):
                if array is None:
                    damaged.append(leaf)
                else:
                    take(leaf, array)
    except FileNotFoundError as error:
        ranks = [leaf.rank for leaf in leaves if leaf.rank is not None]
        whose = f", which rank {ranks[0]} has written" if ranks else ""
        every = [leaf.path for leaf in leaves]
        raise DamagedError(f"{path} is missing{whose}", path=path, leaves=every) from error
    if damaged:
        length = "" if found == size else f" (it has {found} of {size} bytes)"
        raise damage(path, [leaf.title for leaf in damaged], length, leaves=[leaf.path for leaf in damaged])


def damage(path: Path, titles: Sequence[str], length: str = "", *, leaves: Sequence[str] | None = None) -> DamagedError:
    """Returns the error that names the damaged leaves of a file.

    Args:
        path: of the file.
        titles: of the leaves, for people.
        length: what is wrong with the file's.
        leaves: their paths, if these are others.
    """
    return DamagedError(
        f"{path} is damaged{length}: the bytes of {enumerate_paths(titles)} are not those that were saved; "
        f"restore another checkpoint",
        path=path,
        leaves=titles if leaves is None else leaves,
    )


def enumerate_paths(paths: Sequence[str]) -> str:
    """Returns some paths as text, cut after a few."""
    shown = ", ".join(paths[:5])
    return shown if len(paths) <= 5 else f"{shown} and {len(paths) - 5} more leaves"


def _read_arrays(
    descriptor: int,
    leaves: Sequence[index.LeafRecord],
    size: int,
    memory: Callable[[index.LeafRecord], np.ndarray[Any, Any]],
) -> Iterable[np.ndarray[Any, Any] | None]:
    """Returns the leaves' arrays, each None if its bytes are missing, unreadable or wrong."""
    read = functools.partial(_read_leaf, descriptor, file_size=size, memory=memory)
    if sum(leaf.size for leaf in leaves) < _LARGE:
        return map(read, leaves)
    # the disk, the kernel that clears new memory and the digest keep each other waiting; none of them holds the GIL
    with ThreadPoolExecutor(_READERS, thread_name_prefix="simckpt read") as readers:
        return list(readers.map(read, leaves))


def _read_leaf(
    descriptor: int,
    leaf: index.LeafRecord,
    *,
    file_size: int,
    memory: Callable[[index.LeafRecord], np.ndarray[Any, Any]],
) -> np.ndarray[Any, Any] | None:
    if leaf.offset is not None and leaf.offset + leaf.size > file_size:
        return None
    array = memory(leaf)
    if leaf.offset is None:
        return array if digests.matches(b"", leaf.digest) else None
    view = array.reshape(-1).view(np.uint8).data
    hasher = digests.Hasher(leaf.digest.partition(":")[0])
    try:
        for start in range(0, leaf.size, _CHUNK):
            # digested while it is in the processor's cache
            part = view[start : start + _CHUNK]
            if read_into(descriptor, part, leaf.offset + start) < part.nbytes:
                return None
            hasher.update(part)
    except OSError:
        return None
    return array if hasher.digest() == leaf.digest else None


def new_array(leaf: index.LeafRecord) -> np.ndarray[Any, Any]:
    """Returns memory for a leaf; raises FormatError for a shape beyond numpy, StorageError if there is no memory."""
    try:
        dtype = leaf.stored_dtype()
        size = math.prod(leaf.stored_shape) * dtype.itemsize
        # aligned as torch's own tensors are, for an optimizer may keep it and kernels may look at that
        memory = np.empty(size + _ALIGNMENT, np.uint8)
        start = -memory.ctypes.data % _ALIGNMENT
        return memory[start : start + size].view(dtype).reshape(leaf.stored_shape)
    except ValueError as error:
        raise FormatError(f"the shape of {leaf.path!r} is beyond numpy: {error}") from error
    except MemoryError as error:
        raise StorageError(f"the leaf {leaf.path!r} of {leaf.size} bytes does not fit into memory") from error


def read_into(descriptor: int, view: memoryview, offset: int) -> int:
    """Returns how many bytes were read before the file's end; an I/O error is tried once more."""
    done, failed = 0, False
    while done < view.nbytes:
        try:
            step = os.preadv(descriptor, [view[done : done + _CHUNK]], offset + done)
        except OSError:
            if failed:
                raise
            failed = True
            continue
        if step == 0:
            break
        done += step
    return done


def check_bounds(leaves: Iterable[index.LeafRecord], size: int | None, path: Path) -> None:
    """Raises FormatError for leaves that overlap or lie outside of their file of `size` bytes, None if it has none."""
    if size is None:
        raise FormatError(f"the index refers to {path}, which the records of the checkpoint do not name")
    position = 0
    for offset, length, name in sorted(
        (leaf.offset, leaf.size, leaf.path) for leaf in leaves if leaf.offset is not None
    ):
        if offset < position:
            raise FormatError(f"{path}: the leaf {name!r} overlaps another one")
        position = offset + length
    if position > size:
        raise FormatError(f"{path}: a leaf ends at byte {position} of a file of {size}")


def check_memory(needed: int) -> None:
    """Raises StorageError for more bytes than the machine has memory."""
    # a restore that cannot succeed must not drive the machine into its out-of-memory killer
    available = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if needed > available:
        raise StorageError(f"{needed} bytes are to be read and this machine has {available} bytes of memory")


def check_rest(folder: int, file: records.FileRecord, leaves: Sequence[index.LeafRecord], *, path: Path) -> None:
    """Verifies what lies outside of all leaves: HDF5's own metadata, which a restore does not need.

    Args:
        folder: descriptor of the checkpoint's folder.
        file: of it.
        leaves: what lies in that file.
        path: the folder's path, for messages.

    Raises:
        DamagedError: these bytes or the file's size differ.
        FormatError: leaves that overlap.
    """
    check_bounds(leaves, file.size, path / file.name)
    hasher = digests.Hasher(file.digest.partition(":")[0])
    try:
        with opened_file(folder, file.name) as descriptor:
            whole = os.fstat(descriptor).st_size == file.size
            position = 0
            spans = sorted((leaf.offset, leaf.offset + leaf.size) for leaf in leaves if leaf.offset is not None)
            for start, stop in [*spans, (file.size, file.size)]:
                digest_span(descriptor, hasher, position, start)
                position = stop
    except (FileNotFoundError, OSError) as error:
        if isinstance(error, StoreError):
            raise
        raise DamagedError(f"{path / file.name} is missing or unreadable", path=path / file.name) from error
    if not whole or hasher.digest() != file.digest:
        raise DamagedError(
            f"{path / file.name} is damaged outside of its leaves: viewers may fail, a restore needs none of it",
            path=path / file.name,
        )


def digest_span(descriptor: int, hasher: digests.Hasher, start: int, stop: int) -> bool:
    """Takes bytes of a file into a digest; returns whether the file has them all. Raises OSError if unreadable."""
    while start < stop:
        data = bytearray(min(stop - start, 1 << 20))
        done = read_into(descriptor, memoryview(data), start)
        hasher.update(memoryview(data)[:done])
        if done < len(data):
            return False
        start += done
    return True


def assemble(leaves: dict[str, Leaf]) -> dict[str, Encoded]:
    """Returns {component: encoded} of the leaves of whole components.

    Raises:
        FormatError: a component without its structure.
    """
    structures: dict[str, bytes] = {}
    parts: dict[str, dict[str, Leaf]] = {}
    for path, leaf in leaves.items():
        component, _, key = path.partition("/")
        if key == names.STRUCTURE:
            structures[component] = leaf.data.tobytes().rstrip(b" ")
        else:
            parts.setdefault(component, {})[key] = leaf
    if not parts.keys() <= structures.keys():
        raise FormatError(f"the components {sorted(parts.keys() - structures.keys())} have no structure")
    return {
        names.decode_part(component): Encoded(parts.get(component, {}), structure)
        for component, structure in structures.items()
    }
