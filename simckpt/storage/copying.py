"""Checkpoints on their way between a store and files or other stores, piece by piece: none is held in memory whole.

A source gives its records, and the bytes of each leaf in portions, verified. What is wrong with a leaf is known at its
end, so whoever writes portions throws away what was written when one of them raises.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import numpy as np

from simckpt.errors import DamagedError, FormatError, SegmentMissingError, SimckptError, UnsupportedFormatError
from simckpt.state.leaf import Leaf, LogLeaf, Slab
from simckpt.storage import blocks, digests, durable, names, parts, pieces, reader, state_file
from simckpt.storage.index import LeafRecord
from simckpt.storage.indexes import Index
from simckpt.storage.records import CommitRecord
from simckpt.storage.run_records import RunRecord
from simckpt.storage.starts import StartRecord
from simckpt.storage.store_reader import StoreReader

Portions = Iterable[durable.Bytes]
T = TypeVar("T")


@dataclass(frozen=True)
class Source:
    """A checkpoint that can be copied.

    Attributes:
        path: of its folder or file, for messages.
        store: id of the store it comes from.
        run: the record of its run.
        start: the record of the start that saved it.
        commit: its own record.
        leaves: {path: leaf}, its index.
        shared: paths of the leaves that lie in segments, and shall do so again.
        chunks: gives the bytes of a leaf in portions, each of them to be done with before the next is asked for. Raises
            DamagedError or SegmentMissingError, at the latest at the end.
        mend: returns whether what is damaged was brought back from an archive.
    """

    path: Path
    store: str
    run: RunRecord
    start: StartRecord
    commit: CommitRecord
    leaves: Mapping[str, LeafRecord]
    shared: Collection[str]
    chunks: Callable[[LeafRecord], Portions]
    mend: Callable[[DamagedError], bool] = lambda error: False

    @property
    def components(self) -> list[str]:
        """The names of the components."""
        return list(dict.fromkeys(leaf.component for leaf in self.leaves.values()))

    def items(self) -> list[state_file.Item]:
        """Returns the leaves on their way into a file; of the shared ones all rows are new.

        Raises:
            FormatError: leaves that no file can hold together, or a component without its structure.
        """
        items = [self._item(leaf) for leaf in self.leaves.values()]
        state_file.check_paths(items)
        for name in self.components:
            if f"{names.encode_part(name)}/{names.STRUCTURE}" not in self.leaves:
                raise FormatError(f"{self.path}: the component {name!r} has no structure")
        return items

    def check(self) -> None:
        """Raises what `items` raises, for those who write the leaves in another way."""
        self.items()

    def _item(self, leaf: LeafRecord) -> state_file.Item:
        # arrays of the right shapes that take no memory
        shaped = np.broadcast_to(np.zeros((), leaf.stored_dtype()), leaf.stored_shape)
        kind = LogLeaf if leaf.path in self.shared and leaf.shape and leaf.size else Leaf
        flat = np.broadcast_to(np.uint8(0), (leaf.size,))
        made = kind(shaped, leaf.dtype, leaf.shape, leaf.kind)
        return state_file.Item(leaf.path, made, flat, functools.partial(self.chunks, leaf))

    def verify(self) -> None:
        """Compares every byte of every leaf with its digest; needs little memory.

        Raises:
            DamagedError: naming every damaged leaf.
            SegmentMissingError: segments are gone.
            StorageError: the permissions refuse.
        """
        damaged = []
        for leaf in self.leaves.values():
            try:
                for _ in self.chunks(leaf):
                    pass
            except SegmentMissingError:
                raise
            except DamagedError:
                damaged.append(leaf.path)
        if damaged:
            raise reader.damage(self.path, damaged)

    def attempt(self, work: Callable[[], T]) -> T:
        """Returns what `work` returns that reads the leaves; does it once more if damage could be mended meanwhile.

        Raises:
            DamagedError: naming every damaged leaf, and not only the first that was met.
            ...: what else `work` raises.
        """
        try:
            return work()
        except DamagedError as error:
            if not self.mend(error):
                if not isinstance(error, SegmentMissingError):
                    self.verify()
                raise
        return work()


def source_of(files: StoreReader, run: str, seq: int, *, metrics: Mapping[str, float]) -> Source:
    """Returns a checkpoint of a store as something to be copied.

    Args:
        files: the store.
        run: the run's name.
        seq: commit number.
        metrics: in place of those that the commit has, to take later ones along.

    Raises:
        CheckpointNotFoundError: no such number, or it was pruned.
        DamagedError, FormatError: records that cannot be trusted, or leaves that overlap or lie outside of their files.
    """
    index = files.index(run, seq)
    place = ("runs", run, "checkpoints", names.sequence_name(seq))
    path = files.path.joinpath(*place)
    for name, lines in index.lines_by_file().items():
        reader.check_bounds(lines, index.sizes.get(name), path / name)
    pieces.check_overlaps(index.lines_in_segments, path)

    def mend(error: DamagedError) -> bool:
        return files.fallback is not None and files.fallback(run, seq, error)

    def chunks(leaf: LeafRecord) -> Portions:
        if leaf.parts:
            return _whole_chunks(files, index, place, leaf, chunks)
        if leaf.pieces:
            return pieces.copy_rows(files.path, leaf.pieces, leaf.row_size)
        return file_chunks(files.path, (*place, leaf.file), leaf)

    start = files.read_start(run, index.commit.start)
    return Source(
        path=path,
        store=files.id,
        run=_run_of(files, run, index.commit, start),
        start=start,
        commit=replace(index.commit, metrics=dict(metrics)),
        leaves=index.leaves,
        shared=frozenset(leaf.path for leaf in index if leaf.pieces),
        chunks=chunks,
        mend=mend,
    )


def _whole_chunks(
    files: StoreReader, index: Index, place: tuple[str, ...], leaf: LeafRecord, chunks: Callable[[LeafRecord], Portions]
) -> Portions:
    """Yields the bytes of a leaf that several ranks have written, verified.

    Parts of whole rows follow one another and are given as they lie. Others are put together for so many rows as end in
    none of them, which needs the memory of these rows.
    """
    found = sorted((part for part in leaf.parts if part.size), key=lambda part: part.start)
    if all(part.shape[1:] == leaf.shape[1:] for part in found):
        for part in found:
            yield from chunks(leaf.line(part))
        return
    cuts = sorted({row for part in found for row in (part.start[0], part.start[0] + part.shape[0])})
    for start, stop in itertools.pairwise(cuts):
        slab = Slab((start, *(0 for _ in leaf.shape[1:])), (stop - start, *leaf.shape[1:]))
        path = files.path.joinpath(*place)
        try:
            with reader.opened_folder(files.path, *place) as folder:
                leaves = parts.read_leaves(
                    files.path, folder, [leaf], slabs={leaf.path: slab}, sizes=index.sizes, path=path
                )
        except FileNotFoundError as error:
            raise DamagedError(f"{path} is missing", path=path, leaves=[leaf.path]) from error
        yield from blocks.chunks_of(blocks.flat(leaves[leaf.path].data))


def _run_of(files: StoreReader, run: str, commit: CommitRecord, start: StartRecord) -> RunRecord:
    """Returns the record of a run; if that is damaged, what a checkpoint of it and its start know of it."""
    try:
        return files.read_run(run)
    except UnsupportedFormatError:
        raise
    except (DamagedError, FormatError):
        if commit.kind == "import":
            raise  # it alone knew which checkpoint this is a copy of
    return RunRecord(
        id=commit.run,
        name=run,
        created=min(start.created, commit.created),
        hyperparameters=start.hyperparameters,
        experiment=start.experiment,
        versions=start.versions,
        host=start.host,
    )


def file_chunks(root: Path, parts: tuple[str, ...], leaf: LeafRecord, *, swap: int = 0) -> Iterator[memoryview]:
    """Yields the bytes of a leaf that lie in one file, verified.

    Args:
        root: a folder.
        parts: of the file's path below it.
        leaf: its offset counts in the file.
        swap: the size of the units whose byte order the file has the other way round [bytes]; 0 for none.

    Raises:
        DamagedError: the bytes are not those that were saved, or cannot be read; known at the end.
        StorageError: the permissions refuse.
    """
    path = root.joinpath(*parts)
    hasher = digests.Hasher(leaf.digest.partition(":")[0])
    buffer = memoryview(bytearray(min(durable.CHUNK, leaf.size)))
    try:
        with reader.opened_file(root, *parts) as descriptor:
            for start in range(0, leaf.size, durable.CHUNK):
                part = buffer[: min(durable.CHUNK, leaf.size - start)]
                if leaf.offset is None or reader.read_into(descriptor, part, leaf.offset + start) < part.nbytes:
                    raise reader.damage(path, [leaf.path])
                data = swapped(part, swap)
                hasher.update(data)
                yield data
    except FileNotFoundError as error:
        raise DamagedError(f"{path} is missing", path=path, leaves=[leaf.path]) from error
    except SimckptError:
        raise
    except OSError as error:
        raise reader.damage(path, [leaf.path]) from error
    if hasher.digest() != leaf.digest:
        raise reader.damage(path, [leaf.path])


def swapped(data: memoryview, size: int) -> memoryview:
    """Returns bytes with the byte order of their units of `size` bytes turned round; those given, if it is 0."""
    return np.frombuffer(data, f"u{size}").byteswap().view(np.uint8).data if size else data


def digest_outside(descriptor: int, leaves: Iterable[LeafRecord], size: int, *, algorithm: str) -> str:
    """Returns the digest of those of the first `size` bytes of a file that lie outside of all leaves."""
    hasher, position = digests.Hasher(algorithm), 0
    spans = sorted((leaf.offset, leaf.offset + leaf.size) for leaf in leaves if leaf.offset is not None)
    for start, stop in [*spans, (size, size)]:
        if not reader.digest_span(descriptor, hasher, position, start):
            break
        position = stop
    return hasher.digest()
