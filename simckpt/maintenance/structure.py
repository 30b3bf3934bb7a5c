"""Compares what HDF5's own metadata says of a file with the index: viewers must see what a restore reads.

The digests prove already that these bytes are those that were written; this proves that what was written says the same
twice. It takes a fork of a process for each file that differs from the others in its metadata.
"""

from __future__ import annotations

from collections.abc import Iterator

from simckpt.errors import FormatError, StoreError
from simckpt.maintenance.findings import DAMAGE, UNCHECKED, Notes, problem
from simckpt.maintenance.verifying import affected, folder_of
from simckpt.storage import CommitRecord, Index, LeafRecord, Shard, StoreFiles, hdf5_reader, names, segments, state_file
from simckpt.storage.hdf5_reader import Dataset, Description


class Structures:
    """Describes the files of a store; files of the same metadata are described once."""

    def __init__(self, store: StoreFiles, files: hdf5_reader.Reader) -> None:
        self._store = store
        self._files = files
        self._known: dict[tuple[int, str], Description] = {}

    def examine(self, run: str, index: Index, notes: Notes) -> None:
        """Adds what differs between a checkpoint's index and its files, of which every byte was verified."""
        by_file = index.lines_by_file()
        by_rank = _in_segments(index)
        for file in index.files:
            if file.covers != "metadata":
                continue
            leaves = by_file[file.name] + by_rank.get(file.name, [])
            where = f"{folder_of(run, index.commit.seq)}/{file.name}"
            try:
                key = file.size, file.digest
                if key not in self._known:
                    if any(leaf.pieces for leaf in leaves):
                        self._known.clear()  # no other one has the same sources
                    self._known[key] = self._files.describe(self._store.path / where)
                found = list(_differences(self._known[key], leaves, index))
            except FileNotFoundError:
                continue
            except FormatError as error:
                found = [problem(error, self._store.path)]
            except StoreError as error:
                notes.add(UNCHECKED, "structure", where, problem(error, self._store.path), run=run)
                continue
            if found:
                self._tell(notes, where, run, index.commit, found)

    def _tell(self, notes: Notes, where: str, run: str, record: CommitRecord, found: list[str]) -> None:
        text = "; ".join(found[:3]) + (f"; and {len(found) - 3} more" if len(found) > 3 else "")
        told = affected(run, record, restorable=True)
        notes.add(DAMAGE, "structure", where, text, run=run, affected=(told,))


def _differences(found: Description, leaves: list[LeafRecord], index: Index) -> Iterator[str]:
    expected = {leaf.path: leaf for leaf in leaves}
    for path in sorted(found.datasets.keys() ^ expected.keys()):
        yield f"{path!r} is in {'the file' if path in found.datasets else 'the index'} alone"
    for path in found.datasets.keys() & expected.keys():
        dataset, leaf = found.datasets[path], expected[path]
        if (dataset.dtype, dataset.shape) != (leaf.stored_dtype().str, leaf.stored_shape):
            there = f"{dataset.dtype}{list(dataset.shape)}"
            yield f"{path!r} is {there}, by the index {leaf.stored}{list(leaf.stored_shape)}"
        elif (dataset.offset, dataset.size) != (leaf.offset, leaf.size):
            yield f"{path!r} begins at byte {dataset.offset}, by the index at {leaf.offset}"
        elif dataset.attributes.get("part") != state_file.part_text(leaf.part, leaf.shape):
            yield f"{path!r} is said to be another part than by the index"
        elif dataset.attributes.get("kind") != leaf.kind:
            yield f"{path!r} is of kind {dataset.attributes.get('kind')!r}, by the index {leaf.kind!r}"
        elif _sources(dataset) != _meant(leaf, index):
            yield f"the rows of {path!r} come from other places than by the index"
    for component in dict.fromkeys(leaf.component for leaf in leaves):
        if found.groups.get(names.encode_part(component), {}).get("kind") != "component":
            yield f"the component {component!r} is no group that says so"


def _in_segments(index: Index) -> dict[str, list[LeafRecord]]:
    """Returns {file: what it shows of segments} of the files of a checkpoint."""
    found: dict[str, list[LeafRecord]] = {}
    for line in index.lines_in_segments:
        name = state_file.STATE_FILE if line.rank is None else Shard(line.rank, index.shards).state_file
        found.setdefault(name, []).append(line)
    return found


def _sources(dataset: Dataset) -> list[tuple[str, str, int, int]]:
    return [(source.segment, source.path.lstrip("/"), source.start, source.stop) for source in dataset.sources]


def _meant(leaf: LeafRecord, index: Index) -> list[tuple[str, str, int, int]]:
    sources = segments.sources(leaf, index.segments)
    return [
        (piece.segment, source.path.lstrip("/"), source.start, source.stop)
        for piece, source in zip(leaf.pieces, sources, strict=True)
    ]
