"""Reads the index of a checkpoint, which is one file, or one for each of its ranks."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from simckpt.errors import DamagedError, FormatError
from simckpt.storage import index as leaf_index
from simckpt.storage import reader, shards
from simckpt.storage.index import INDEX_FILE, LeafRecord, SegmentRecord
from simckpt.storage.records import SHARDS_FILE, CommitRecord, FileRecord, Shard, shards_of


@dataclass(frozen=True)
class Index:
    """What a checkpoint holds, without its arrays; iterates over the records of its leaves.

    Attributes:
        commit: its record.
        leaves: {path: leaf}, in the order of the file; each component's structure is the leaf `<component>/_tree`. Of a
            checkpoint of several ranks the leaves of all, of which some are in parts.
        segments: {id: segment} of those that the leaves lie in.
        files: all files of its folder but `commit.json` and `job.json`.
    """

    commit: CommitRecord
    leaves: Mapping[str, LeafRecord]
    segments: Mapping[str, SegmentRecord] = field(default_factory=dict)
    files: tuple[FileRecord, ...] = ()

    def __iter__(self) -> Iterator[LeafRecord]:
        return iter(self.leaves.values())

    @property
    def shards(self) -> int:
        """Of how many ranks it is; 0 if one process has written it alone."""
        return self.commit.shards

    @property
    def lines(self) -> Iterator[LeafRecord]:
        """What lies in files and segments: the leaves, and in place of those that are in parts each of these."""
        for leaf in self:
            yield from leaf.lines

    @property
    def lines_in_segments(self) -> Iterator[LeafRecord]:
        """Those of the lines that lie in segments."""
        for leaf in self:
            if leaf.pieces:
                yield leaf
            for part in leaf.parts:
                if part.pieces:
                    yield leaf.line(part)

    def lines_by_file(self) -> dict[str, list[LeafRecord]]:
        """Returns {file: what lies in it} of all files with arrays, those that have none included."""
        found: dict[str, list[LeafRecord]] = {file.name: [] for file in self.files if file.covers == "metadata"}
        for line in self.lines:
            if not line.pieces:
                found.setdefault(line.file, []).append(line)
        return found

    @property
    def sizes(self) -> dict[str, int]:
        """{file: size} of the files with arrays [bytes]."""
        return {file.name: file.size for file in self.files if file.covers == "metadata"}

    @property
    def components(self) -> tuple[str, ...]:
        """The names of the components."""
        return tuple(dict.fromkeys(leaf.component for leaf in self))


def read_index(folder: int, record: CommitRecord, path: Path) -> Index:
    """Returns the index of a checkpoint.

    Args:
        folder: descriptor of its folder.
        record: its own.
        path: of its folder, for messages.

    Raises:
        DamagedError, UnsupportedFormatError, FormatError: an index cannot be trusted, or those of several ranks do not
            fit together.
    """
    if not record.shards:
        file = record.file(INDEX_FILE)
        data = read_file(folder, file, path, limit=leaf_index.INDEX_LIMIT)
        return Index(record, *leaf_index.parse_index(data, path / INDEX_FILE), record.files)
    listing = read_listing(folder, record, path)
    return Index(record, *merged(folder, listing, path), (*record.files, *listing.files))


def merged(folder: int, listing: shards.Listing, path: Path) -> tuple[dict[str, LeafRecord], dict[str, SegmentRecord]]:
    """Returns {path: leaf} and {id: segment} of a checkpoint of several ranks, by the indexes of all."""
    merger = shards.Merger()
    with _uncollected():
        for shard, file in zip(shards_of(len(listing.indexes)), listing.indexes, strict=True):
            merger.add(read_file(folder, file, path, limit=leaf_index.INDEX_LIMIT), path / file.name, shard)
        leaves, segments = merger.merged(path)
    if segments.keys() != set(listing.segments):
        raise FormatError(f"{path / SHARDS_FILE} names other segments than the indexes of the ranks")
    return leaves, segments


@contextlib.contextmanager
def _uncollected() -> Iterator[None]:
    """Keeps Python's collector from looking again and again through a million new records, none of them garbage."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def read_listing(folder: int, record: CommitRecord, path: Path) -> shards.Listing:
    """Returns what names the files of a checkpoint of several ranks; raises as `read_index`."""
    data = read_file(folder, record.file(SHARDS_FILE), path, limit=shards.SHARDS_LIMIT)
    listing = shards.parse_listing(data, path / SHARDS_FILE, count=record.shards)
    if sum(file.size for file in listing.files) != record.shards_size:
        raise FormatError(f"{path / SHARDS_FILE}: its files are not of the size that the commit record gives")
    return listing


def read_shard(folder: int, record: CommitRecord, path: Path, shard: Shard) -> Index:
    """Returns what one rank has written of a checkpoint of several, parts as they are; raises as `read_index`."""
    file = read_listing(folder, record, path).indexes[shard.number]
    data = read_file(folder, file, path, limit=leaf_index.INDEX_LIMIT)
    return Index(record, *leaf_index.parse_index(data, path / file.name, file=shard.state_file))


def read_segment_ids(folder: int, record: CommitRecord, path: Path) -> frozenset[str]:
    """Returns the ids of the segments that a checkpoint uses, in a fraction of the time; raises as `read_index`."""
    if record.shards:
        return frozenset(read_listing(folder, record, path).segments)
    data = read_file(folder, record.file(INDEX_FILE), path, limit=leaf_index.INDEX_LIMIT)
    return leaf_index.parse_segment_ids(data, path / INDEX_FILE)


def segment_ids_in(folder: Path) -> frozenset[str] | None:
    """Returns the ids of the segments that a folder's index names, whatever its record says; None if it has no index.

    Raises:
        DamagedError, UnsupportedFormatError, FormatError, StorageError: it cannot be trusted or read.
    """
    for name, limit in ((INDEX_FILE, leaf_index.INDEX_LIMIT), (SHARDS_FILE, shards.SHARDS_LIMIT)):
        try:
            data = reader.read_small(folder, name, limit=limit, path=folder / name)
        except FileNotFoundError:
            continue
        if name == INDEX_FILE:
            return leaf_index.parse_segment_ids(data, folder / name)
        return frozenset(shards.parse_listing(data, folder / name).segments)
    return None


def check_files(path: Path, record: CommitRecord) -> None:
    """Raises an error if the files of a folder are not those that a commit record vouches for; reads no arrays.

    Raises:
        DamagedError: one is missing, has another size, or is an index of other bytes.
        FormatError: what names the files of several ranks breaks a rule.
    """
    with reader.opened_folder(path) as folder:
        files = record.files
        if record.shards:
            files = (*files, *read_listing(folder, record, path).files)
        for file in files:
            where = path / file.name
            if not where.exists() or where.stat().st_size != file.size:
                raise DamagedError(f"{where} is missing, or of another size", path=where)
            if file.covers == "file":
                read_file(folder, file, path, limit=leaf_index.INDEX_LIMIT)


def read_file(folder: int, file: FileRecord, path: Path, *, limit: int) -> bytes:
    """Returns a whole file of a checkpoint's folder that a record vouches for; raises DamagedError or FormatError."""
    try:
        data = reader.read_small(folder, file.name, limit=limit, path=path / file.name)
    except FileNotFoundError as error:
        raise DamagedError(f"{path / file.name} is missing", path=path / file.name) from error
    return shards.check_index(data, file, path / file.name)
