"""Reads rows out of segments, verified: into an array for a restore, or in portions for a merge."""

from __future__ import annotations

import os
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from simckpt.errors import DamagedError, FormatError, SegmentMissingError, StoreError
from simckpt.state.leaf import Piece
from simckpt.storage import digests, durable, reader, segments
from simckpt.storage.index import LeafRecord, SegmentRecord


def read_lines(
    root: Path,
    lines: Sequence[LeafRecord],
    *,
    path: Path,
    memory: Callable[[LeafRecord], np.ndarray[Any, Any]],
    take: Callable[[LeafRecord, np.ndarray[Any, Any]], None],
) -> None:
    """Reads what lies in segments, every byte verified; all before damage is reported.

    Args:
        root: the store's folder.
        lines: of indexes; `check_overlaps` has found nothing.
        path: the checkpoint's folder, for messages.
        memory: gives the contiguous array that a line is to be read into.
        take: given each line that is whole, with its array.

    Raises:
        SegmentMissingError: with the ids of all that are gone.
        DamagedError: naming every damaged leaf.
        StorageError: not enough memory, or the permissions refuse.
    """
    damaged: dict[str, list[LeafRecord]] = {}
    gone: dict[str, list[str]] = {}
    for leaf in lines:
        array = memory(leaf)
        view, place, whole = array.reshape(-1).view(np.uint8).data, 0, True
        for piece in leaf.pieces:
            length = (piece.stop - piece.start) * leaf.row_size
            try:
                with segments.opened(root, piece.segment) as descriptor:
                    good = _read_piece(descriptor, piece, leaf.row_size, view[place : place + length])
            except FileNotFoundError:
                gone.setdefault(piece.segment, []).append(leaf.path)
                good = False
            else:
                if not good:
                    damaged.setdefault(piece.segment, []).append(leaf)
            whole, place = whole and good, place + length
        if whole:
            take(leaf, array)
    if gone:
        raise _missing(root, path, gone)
    if damaged:
        first = next(iter(damaged))
        found = [leaf for leaves in damaged.values() for leaf in leaves]
        titles = list(dict.fromkeys(leaf.title for leaf in found))
        paths = list(dict.fromkeys(leaf.path for leaf in found))
        raise reader.damage(root / segments.FOLDER / segments.file_name(first), titles, leaves=paths)


def _missing(root: Path, path: Path, gone: dict[str, list[str]]) -> SegmentMissingError:
    leaves = list(dict.fromkeys(name for names in gone.values() for name in names))
    return SegmentMissingError(
        f"{path} needs {len(gone)} segments that are gone from {root / segments.FOLDER}, such as {next(iter(gone))}: "
        f"{reader.enumerate_paths(leaves)} cannot be read; restore another checkpoint",
        ids=list(gone),
        path=root / segments.FOLDER,
        leaves=leaves,
    )


def check_overlaps(leaves: Iterable[LeafRecord], path: Path) -> None:
    """Raises FormatError if bytes of a segment are named twice: a small file must not unfold into a large state."""
    position: dict[str, int] = {}
    spans = sorted(
        (piece.segment, piece.offset, piece.offset + piece.rows * leaf.row_size, leaf.path)
        for leaf in leaves
        for piece in leaf.pieces
    )
    for segment, start, stop, name in spans:
        if start < position.get(segment, 0):
            raise FormatError(f"{path}: {name!r} overlaps with another piece in segment {segment}")
        position[segment] = stop


def _read_piece(descriptor: int, piece: Piece, row_size: int, target: memoryview) -> bool:
    """Fills `target` with the rows that are meant; returns whether all rows of the piece are what was saved."""
    hasher = digests.Hasher(piece.digest.partition(":")[0])
    first, last = piece.offset + piece.start * row_size, piece.offset + piece.stop * row_size
    try:
        if not reader.digest_span(descriptor, hasher, piece.offset, first):
            return False
        for start in range(0, target.nbytes, durable.CHUNK):
            part = target[start : start + durable.CHUNK]
            if reader.read_into(descriptor, part, first + start) < part.nbytes:
                return False
            hasher.update(part)
        if not reader.digest_span(descriptor, hasher, last, piece.offset + piece.rows * row_size):
            return False
    except OSError:
        return False
    return hasher.digest() == piece.digest


def copy_rows(root: Path, pieces: Sequence[Piece], row_size: int) -> Iterator[memoryview]:
    """Yields the bytes of some rows in portions, each of them to be done with before the next is asked for.

    Raises:
        SegmentMissingError: a segment is gone.
        DamagedError: a segment is not what was saved, which is known only after its rows were given.
        StorageError: the permissions refuse.
    """
    longest = max((piece.rows * row_size for piece in pieces), default=0)
    buffer = memoryview(bytearray(min(durable.CHUNK, longest)))  # megabytes that nobody needs take a millisecond
    for piece in pieces:
        try:
            with segments.opened(root, piece.segment) as descriptor:
                yield from _copy_piece(descriptor, piece, row_size, buffer, root)
        except FileNotFoundError as error:
            raise SegmentMissingError(f"the segment {piece.segment} of {root} is gone", ids=[piece.segment]) from error


def _copy_piece(descriptor: int, piece: Piece, row_size: int, buffer: memoryview, root: Path) -> Iterator[memoryview]:
    path = root / segments.FOLDER / segments.file_name(piece.segment)
    hasher = digests.Hasher(piece.digest.partition(":")[0])
    first, last = piece.offset + piece.start * row_size, piece.offset + piece.stop * row_size
    end = piece.offset + piece.rows * row_size
    damaged = DamagedError(f"{path} is damaged: its rows cannot be merged with others", path=path)
    position = piece.offset
    while position < end:
        stop = min(position + len(buffer), first if position < first else last if position < last else end)
        part = buffer[: stop - position]
        try:
            done = reader.read_into(descriptor, part, position)
        except OSError as error:
            raise damaged from error
        if done < part.nbytes:
            raise damaged
        hasher.update(part)
        if first <= position < last:
            yield part
        position = stop
    if hasher.digest() != piece.digest:
        raise damaged


def verify(
    root: Path,
    leaves: Iterable[LeafRecord],
    known: Mapping[str, SegmentRecord],
    *,
    path: Path,
    besides: Container[str] = (),
) -> None:
    """Compares every byte of the segments that a checkpoint uses with its digest; needs little memory.

    Args:
        root: the store's folder.
        leaves: of the checkpoint's index.
        known: {id: segment} by the index.
        path: the checkpoint's folder, for messages.
        besides: ids of segments that are left out.

    Raises:
        SegmentMissingError: with the ids of all that are gone.
        DamagedError: naming every damaged leaf, or a segment that is damaged outside of them.
        FormatError: pieces that overlap.
    """
    leaves = [leaf for leaf in leaves if leaf.pieces]
    check_overlaps(leaves, path)
    gone: dict[str, list[str]] = {}
    damaged: dict[str, None] = {}
    for leaf in leaves:
        for piece in leaf.pieces:
            if piece.segment in besides:
                continue
            try:
                for _ in copy_rows(root, [piece], leaf.row_size):
                    pass
            except SegmentMissingError:
                gone.setdefault(piece.segment, []).append(leaf.path)
            except DamagedError:
                damaged[leaf.path] = None
    if gone:
        raise _missing(root, path, gone)
    if damaged:
        raise reader.damage(root / segments.FOLDER, list(damaged))
    for segment in known.values():
        if segment.id not in besides:
            _check_rest(root, segment)


def _check_rest(root: Path, segment: SegmentRecord) -> None:
    path = root / segments.FOLDER / segments.file_name(segment.id)
    hasher = digests.Hasher(segment.digest.partition(":")[0])
    try:
        with segments.opened(root, segment.id) as descriptor:
            whole = os.fstat(descriptor).st_size == segment.size
            for start, stop in segment.spans:
                reader.digest_span(descriptor, hasher, start, stop)
    except StoreError:
        raise
    except OSError as error:
        raise DamagedError(f"{path} is missing or unreadable", path=path) from error
    if not whole or hasher.digest() != segment.digest:
        raise DamagedError(
            f"{path} is damaged outside of its rows: viewers may fail, a restore needs none of it", path=path
        )
