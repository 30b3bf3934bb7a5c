"""Makes lost records anew from others, where these leave no doubt."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from simckpt.errors import FormatError, StoreError
from simckpt.state.leaf import Piece
from simckpt.storage import (
    CommitRecord,
    LeafRecord,
    RunRecord,
    StartRecord,
    StoreFiles,
    copying,
    digests,
    hdf5_reader,
    index,
    names,
    reader,
    segments,
)
from simckpt.storage.hdf5_reader import Dataset, Description
from simckpt.storage.index import SegmentRecord
from simckpt.storage.records import LOST, SHARDS_FILE, FileRecord, shards_of
from simckpt.storage.shards import Listing
from simckpt.storage.starts import STARTS, read_start

_LIMIT = 1 << 28  # [bytes] of a structure that is read to know the order of leaves


def rebuilt_run(store: StoreFiles, run: str) -> tuple[RunRecord | None, str]:
    """Returns the record of a run whose `run.json` is lost, or None and why it cannot be known.

    The id is that in its commits; hyperparameters, git, versions and host are those of the start that made the first of
    them. Of a branch or an import, not all is said elsewhere.
    """
    copy = f"put a copy of runs/{run}/run.json back, from a backup or another machine"
    try:
        records = store.records(run, damaged={})
    except StoreError as error:
        return None, str(error)
    if not records or records[0].seq != 1 or records[0].kind == LOST:
        return None, f"its first commit cannot be read, so that it is not known where it comes from: {copy}"
    first = records[0]
    if len({record.run for record in records}) != 1:
        return None, f"its commits are of several runs: {copy}"
    if first.parent is not None or first.kind == "import":
        return None, f"it is a branch or an import, of which the lost record alone says all: {copy}"
    start = _first_start(store, run, first.start if isinstance(first, CommitRecord) else None)
    if start is None:
        return None, f"it is not known which of its starts came before its first commit: {copy}"
    git = None if start.git is None else {key: start.git[key] for key in ("commit", "dirty") if key in start.git}
    return (
        RunRecord(
            id=first.run,
            name=run,
            created=min(start.created, first.created),
            hyperparameters=start.hyperparameters,
            experiment=start.experiment,
            git=git,
            versions=start.versions,
            host=start.host,
        ),
        "",
    )


def _first_start(store: StoreFiles, run: str, identity: str | None) -> StartRecord | None:
    if identity is None:
        with contextlib.suppress(OSError):
            found = [path.stem for path in (store.path / "runs" / run / STARTS).iterdir()]
            identity = found[0] if len(found) == 1 else None
    if identity is None:
        return None
    try:
        return read_start(store.path, run, identity)
    except StoreError:
        return None


def rebuilt_index(store: StoreFiles, run: str, seq: int, name: str = index.INDEX_FILE) -> bytes | None:
    """Returns the bytes of a lost index, or None. A digest of another record proves that they are the lost ones.

    Paths, shapes and places come from HDF5's own metadata, digests from the arrays themselves. What names the files of
    several ranks is made of these.

    Args:
        store: the files.
        run: the run's name.
        seq: commit number.
        name: of the index.
    """
    try:
        wanted = store.index_record(run, seq, name)
        folder = store.path / "runs" / run / "checkpoints" / names.sequence_name(seq)
        if name == SHARDS_FILE:
            data = _listing(store, run, seq, folder)
            return data if _is(data, wanted) else None
        state = store.state_file_of(run, seq, name)
        with hdf5_reader.Reader() as files, reader.opened_file(folder, state) as descriptor:
            found = files.describe_opened(descriptor, path=folder / state)
            record = store.commit_record(run, seq)
            count = record.shards if isinstance(record, CommitRecord) else 0
            others = [shard.state_file for shard in shards_of(count) if shard.state_file != state]
            trees = _Trees(files, folder, others)
            for leaves, known in _candidates(store, files, descriptor, found, state, trees):
                data = index.seal_index(leaves, known)
                if _is(data, wanted):
                    return data
    except (StoreError, OSError, ValueError, TypeError, LookupError, RecursionError):
        return None
    return None


def _is(data: bytes, wanted: FileRecord) -> bool:
    return len(data) == wanted.size and digests.matches(data, wanted.digest)


def _listing(store: StoreFiles, run: str, seq: int, folder: Path) -> bytes:
    """Returns the bytes of a `shards.json` that names the files which are there."""
    record = store.commit_record(run, seq)
    assert isinstance(record, CommitRecord)
    states, indexes, used = [], [], dict[str, None]()
    for shard in shards_of(record.shards):
        path = folder / shard.index_file
        data = reader.read_small(folder, shard.index_file, limit=index.INDEX_LIMIT, path=path)
        indexes.append(FileRecord(shard.index_file, len(data), digests.digest(data), "file"))
        leaves, segments = index.parse_index(data, path, file=shard.state_file)
        used.update(dict.fromkeys(segments))
        with reader.opened_file(folder, shard.state_file) as descriptor:
            size = os.fstat(descriptor).st_size
            rest = copying.digest_outside(
                descriptor, [leaf for leaf in leaves.values() if not leaf.pieces], size, algorithm=digests.ALGORITHM
            )
        states.append(FileRecord(shard.state_file, size, rest, "metadata"))
    return Listing(tuple(states), tuple(indexes), tuple(used)).to_bytes()


class _Trees:
    """The structures of components that several ranks share, which one of them has written."""

    def __init__(self, files: hdf5_reader.Reader, folder: Path, states: list[str]) -> None:
        self._files = files
        self._folder = folder
        self._states = states

    def of(self, components: set[str]) -> dict[str, bytes]:
        """Returns {component: its structure} of those that can be found."""
        found: dict[str, bytes] = {}
        for state in self._states:
            if components <= found.keys():
                break
            with contextlib.suppress(StoreError, OSError), reader.opened_file(self._folder, state) as descriptor:
                there = self._files.describe_opened(descriptor, path=self._folder / state).datasets
                for component in components - found.keys():
                    tree = there.get(f"{names.encode_part(component)}/{names.STRUCTURE}")
                    if tree is not None:
                        found[component] = _bytes(descriptor, tree.offset, tree.size)
        return found


def _candidates(
    store: StoreFiles,
    files: hdf5_reader.Reader,
    descriptor: int,
    found: Description,
    state: str,
    elsewhere: _Trees,
) -> Iterator[tuple[list[LeafRecord], dict[str, SegmentRecord]]]:
    """Yields the leaves of a file in the orders that their index may have had, and the segments they lie in."""
    known: dict[str, SegmentRecord] = {}
    described: dict[str, Description] = {}
    leaves = [_leaf(store, files, descriptor, each, state, known, described) for each in found.datasets.values()]
    in_file = sorted((leaf for leaf in leaves if leaf.offset is not None), key=lambda leaf: leaf.offset or 0)
    trees = {
        leaf.component: _bytes(descriptor, leaf.offset, leaf.size) for leaf in in_file if leaf.key == names.STRUCTURE
    }
    trees |= elsewhere.of({leaf.component for leaf in leaves} - trees.keys())
    order = list(dict.fromkeys(leaf.component for leaf in [*in_file, *leaves]))
    # the structure names the leaves in the order in which they were collected
    if all(leaf.component in trees for leaf in leaves):
        yield (
            sorted(
                leaves,
                key=lambda leaf: (
                    order.index(leaf.component),
                    leaf.key == names.STRUCTURE,
                    trees[leaf.component].find(b'"' + leaf.key.encode("ascii") + b'"'),
                ),
            ),
            known,
        )
    if len(in_file) == len(leaves):
        yield in_file, known


def _leaf(
    store: StoreFiles,
    files: hdf5_reader.Reader,
    descriptor: int,
    dataset: Dataset,
    state: str,
    known: dict[str, SegmentRecord],
    described: dict[str, Description],
) -> LeafRecord:
    dtype = dataset.attributes.get("dtype") or index.dtype_from_json(dataset.dtype).name
    # texts and complex numbers have an axis more in the file
    apart = dtype[:1] in "<>|" or dtype.startswith("complex")
    shape = dataset.shape[:-1] if "dtype" in dataset.attributes and apart else dataset.shape
    leaf = LeafRecord(
        path=dataset.path,
        kind=dataset.attributes.get("kind", ""),
        dtype=dtype,
        shape=shape,
        stored=dataset.dtype,
        stored_shape=dataset.shape,
        file=state,
        offset=dataset.offset,
        size=dataset.size,
        digest="",
    )
    if "part" in dataset.attributes:
        start, whole = json.loads(dataset.attributes["part"])
        leaf = replace(leaf, part=tuple(start), shape=tuple(whole))
    if not dataset.sources:
        offset = dataset.offset or 0
        return replace(leaf, digest=_digest(descriptor, [(offset, offset + dataset.size)]))
    pieces = []
    for source in dataset.sources:
        _describe_segment(store, files, source.segment, known, described)
        there = described[source.segment].datasets.get(source.path.lstrip("/"))
        if there is None or there.offset is None or not there.shape:
            raise FormatError(f"segment {source.segment} has no rows {source.path}: it is another one")
        with segments.opened(store.path, source.segment) as segment:
            digest = _digest(segment, [(there.offset, there.offset + there.size)])
        pieces.append(Piece(source.segment, there.offset, there.shape[0], digest, source.start, source.stop))
    return index.in_pieces(leaf, tuple(pieces))


def _describe_segment(
    store: StoreFiles,
    files: hdf5_reader.Reader,
    identity: str,
    known: dict[str, SegmentRecord],
    described: dict[str, Description],
) -> None:
    if identity in known:
        return
    with segments.opened(store.path, identity) as descriptor:
        found = described[identity] = files.describe_opened(descriptor, path=identity)
        size, position, spans = os.fstat(descriptor).st_size, 0, []
        places = sorted((each.offset, each.offset + each.size) for each in found.datasets.values() if each.offset)
        for start, stop in [*places, (size, size)]:
            if start > position:
                spans.append((position, start))
            position = stop
        digest = _digest(descriptor, spans)
    paths = {each.offset: each.path for each in found.datasets.values() if each.offset}
    known[identity] = SegmentRecord(identity, size, tuple(spans), digest, paths)


def _digest(descriptor: int, spans: list[tuple[int, int]]) -> str:
    hasher = digests.Hasher()
    for start, stop in spans:
        reader.digest_span(descriptor, hasher, start, stop)
    return hasher.digest()


def _bytes(descriptor: int, offset: int | None, size: int) -> bytes:
    data = bytearray(min(size, _LIMIT))
    reader.read_into(descriptor, memoryview(data), offset or 0)
    return bytes(data)
