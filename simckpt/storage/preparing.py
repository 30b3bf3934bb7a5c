"""The heavy part of a save: segments, the state file and its index, durable under a temporary name.

It needs neither a claim nor a `StoreFiles`, so that a process of its own can do it: what it takes and gives can be
pickled. What it leaves behind when it is killed is found by the next sweep: a folder in `tmp/` whose `job.json` names
the segments that were made. The same record tells a pruner which segments are about to be used.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from simckpt.errors import SimckptError
from simckpt.state.leaf import Piece
from simckpt.state.tree import Encoded
from simckpt.storage import (
    blocks,
    digests,
    durable,
    index,
    layout,
    names,
    pieces,
    placing,
    processes,
    records,
    sealed,
    segments,
    shards,
    state_file,
    unchanged,
    work,
)
from simckpt.storage.index import LeafRecord, SegmentRecord
from simckpt.storage.records import Shard
from simckpt.storage.state_file import Item

Attributes = Mapping[str, Mapping[str, str]]

MAX_SEGMENTS = 128  # of one checkpoint: a viewer needs a file descriptor for each, and a process often has 1,024

_readable: Sequence[tuple[object, ...]] = ()  # all but places and digests of the last index that was found readable


@dataclass(frozen=True)
class PrepareJob:
    """What `write_prepared` must know of a store and a run.

    Attributes:
        root: the store's folder.
        run: the run's name.
        owner: the process that will publish; the work counts as left over once it is dead.
        new_id: gives random ids; a function of a module where the job is pickled.
        segments: {id: segment} of all that are known; a leaf in pieces may refer to these alone.
        large: {path: leaf} of the large leaves of the run's previous checkpoint.
        limit: how many segments the checkpoint may refer to.
        folder: a new one in `tmp/` to work in, for whoever wants to know where what a killed writer left is; by default
            one is made.
        shard: which of several ranks writes; None for a checkpoint that one process writes alone.
        lent: whether the arrays lie in memory of the program, of which another of its threads may change them.
    """

    root: Path
    run: str
    owner: processes.Process
    new_id: Callable[[], str] = names.random_id
    segments: Mapping[str, SegmentRecord] = field(default_factory=dict)
    large: Mapping[str, unchanged.Large] = field(default_factory=dict)
    limit: int = MAX_SEGMENTS
    folder: Path | None = None
    shard: Shard | None = None
    lent: bool = False


@dataclass(frozen=True)
class Prepared:
    """A checkpoint that lacks nothing but its commit record and its name.

    Attributes:
        folder: in `tmp/`.
        files: of this folder.
        leaves: {path: leaf}, its index.
        segments: {id: segment} of those that the leaves lie in.
        made: ids of the segments that this save has written.
        large: {path: leaf} of its large leaves, for the next save.
        size: of the files and of the segments made [bytes].
        shard: which of several ranks has written it, or None.
        form: of the index of such a rank: a digest of all but its places and digests.
    """

    folder: Path
    files: tuple[records.FileRecord, ...]
    leaves: Mapping[str, LeafRecord]
    segments: Mapping[str, SegmentRecord]
    made: tuple[str, ...]
    large: Mapping[str, unchanged.Large]
    size: int
    shard: Shard | None = None
    form: str = ""

    def to_json(self) -> dict[str, Any]:
        """Returns what a rank reports to the one that commits; of its leaves nothing but the digest of their form."""
        assert self.shard is not None
        return {
            "folder": self.folder.name,
            "shard": [self.shard.number, self.shard.count],
            "files": [[file.size, file.digest] for file in self.files],
            "segments": {identity: segment.size for identity, segment in self.segments.items()},
            "made": list(self.made),
            "size": self.size,
            "form": self.form,
        }

    @classmethod
    def from_json(cls, root: Path, report: Mapping[str, Any]) -> Prepared:
        """Returns what another rank has reported; it knows no leaves, and of segments their sizes alone.

        Args:
            root: the store's folder.
            report: from `to_json`.

        Raises:
            FormatError: it is no such report.
        """
        fields = sealed.Fields(report, "the report of a rank")
        (number, count), folder = _pair(fields.integers("shard", limit=2), fields), fields.text("folder", limit=255)
        if folder != Path(folder).name or processes.Process.from_token(folder) is None:
            raise fields.wrong("folder", "the name of a folder in tmp/")
        shard, files = records.Shard(number, count), fields.content.get("files")
        if not isinstance(files, list) or [len(each) for each in files if isinstance(each, list)] != [2, 2]:
            raise fields.wrong("files", "size and digest of two files")
        found = [sealed.Fields({"size": size, "digest": digest}, fields.path) for size, digest in files]
        kinds = ((shard.state_file, "metadata"), (shard.index_file, "file"))
        sizes = fields.object("segments")
        return cls(
            folder=root / "tmp" / folder,
            files=tuple(
                records.FileRecord(name, each.integer("size"), each.digest("digest"), covers)
                for (name, covers), each in zip(kinds, found, strict=True)
            ),
            leaves={},
            segments={each: SegmentRecord(_id(each, fields), sizes.integer(each), (), "") for each in sizes.content},
            made=tuple(_id(each, fields) for each in fields.texts("made")),
            large={},
            size=fields.integer("size"),
            shard=shard,
            form=fields.digest("form"),
        )


def _pair(values: tuple[int, ...], fields: sealed.Fields) -> tuple[int, int]:
    if len(values) != 2 or not values[0] < values[1] <= records.MAX_SHARDS:
        raise fields.wrong("shard", "a number and how many there are")
    return values[0], values[1]


def _id(identity: str, fields: sealed.Fields) -> str:
    if not names.ID.fullmatch(identity):
        raise fields.wrong("segments", "ids of segments and their sizes")
    return identity


def write_prepared(
    disk: durable.Disk, job: PrepareJob, components: Mapping[str, Encoded], attributes: Attributes | None = None
) -> Prepared:
    """Returns a checkpoint that is durable under a temporary name; on an error nothing of it stays.

    Args:
        disk: the system calls.
        job: from `StoreFiles.prepare_job`.
        components: {name: encoded state}; nobody may change its arrays meanwhile.
        attributes: {path of a group or leaf: {name: text}}, for people who open `state.h5`.

    Raises:
        StorageFullError, StorageError: the disk refused.
        SegmentMissingError: a leaf refers to a segment that is gone.
        DamagedError: a segment that was to be merged is damaged.
        InvalidNameError, FormatError: components or leaves that no file can hold.
    """
    items = state_file.collect(components, shared=job.shard is not None, lent=job.lent)
    return write_items(disk, job, list(components), items, attributes)


def write_items(
    disk: durable.Disk,
    job: PrepareJob,
    components: Sequence[str],
    items: Sequence[Item],
    attributes: Attributes | None = None,
) -> Prepared:
    """Does what `write_prepared` does, for leaves whose bytes need not be in memory.

    Args:
        disk: the system calls.
        job: as there.
        components: their names.
        items: the leaves; what their streams raise ends the work, and nothing of it stays.
        attributes: as there.
    """
    probes = unchanged.probes(items)
    placement = _place(job, items, probes)
    planned = _planned(job, items, placement, attributes or {})
    identities = {purpose: job.new_id() for purpose in planned}
    made = tuple(identities.values())
    folder = job.folder or work.WorkFolders(disk, job.root).make(job.owner)
    try:
        # from here on a pruner sees what is needed, and a sweep what was made
        if made or placement.segments:
            announce(disk, folder, job.run, uses=placement.segments, made=made)
            segments.check_present(job.root, placement.segments, job.segments)
        written = {
            purpose: segments.write(disk, folder, identities[purpose], found) for purpose, found in planned.items()
        }
        if made:
            segments.publish(disk, job.root, folder, made)
        known = {**job.segments, **{each.record.id: each.record for each in written.values()}}
        placed = _placed(items, placement, written)
        name = state_file.STATE_FILE if job.shard is None else job.shard.state_file
        state, leaves = state_file.write_state(
            disk, folder, components, items, file=name, placed=placed, segments=known, attributes=attributes
        )
        used = {identity: known[identity] for identity in index.segments_of(leaves)}
        data = _sealed_index(leaves, used, None if job.shard is None else name)
        index_name = index.INDEX_FILE if job.shard is None else job.shard.index_file
        durable.write_record(disk, folder / index_name, data)
    except BaseException:
        discard(disk, job.root, folder, made)
        raise
    files = (state, records.FileRecord(index_name, len(data), digests.digest(data), "file"))
    return Prepared(
        folder=folder,
        files=files,
        leaves={leaf.path: leaf for leaf in leaves},
        segments=used,
        made=made,
        large={leaf.path: unchanged.Large(leaf, probes[leaf.path]) for leaf in leaves if leaf.path in probes},
        size=sum(file.size for file in files) + sum(each.record.size for each in written.values()),
        shard=job.shard,
        form="" if job.shard is None else shards.form_of(leaves),
    )


def discard(disk: durable.Disk, root: Path, folder: Path, made: Iterable[str]) -> None:
    """Removes what was prepared and never got a name; raises nothing, for what cannot be removed is swept later."""
    with contextlib.suppress(SimckptError, OSError):
        # a folder that has left `tmp/` is a checkpoint, although an error was raised
        folder.lstat()
        segments.remove(disk, root, made)
        durable.remove_tree(disk, folder)


def _place(job: PrepareJob, items: Sequence[Item], probes: Mapping[str, str]) -> placing.Placement:
    same = unchanged.unchanged(items, probes, job.large)
    earlier = {path: job.large[path].record.pieces for path in same if job.large[path].record.pieces}
    shared = {piece.segment for found in earlier.values() for piece in found}
    gone = segments.missing(job.root, shared, job.segments) | (shared - job.segments.keys())
    earlier = {path: found for path, found in earlier.items() if found[0].segment not in gone}
    return placing.place(items, unchanged=same, earlier=earlier, limit=job.limit)


def announce(disk: durable.Disk, folder: Path, run: str, *, uses: Iterable[str], made: Iterable[str]) -> None:
    """Tells pruners, durably, which segments the save in a work folder needs, and the sweep which ones it makes."""
    fields = {"job": "save", "run": run, "uses": list(uses), "made": list(made)}
    durable.write_record(disk, folder / work.JOB_FILE, sealed.seal("job", fields))
    durable.sync_folder(disk, folder)
    durable.sync_folder(disk, folder.parent)


def _planned(
    job: PrepareJob, items: Sequence[Item], placement: placing.Placement, attributes: Attributes
) -> dict[str, list[blocks.Block]]:
    """Returns {purpose: datasets} of the segments to be written; they live for different times, so each has its own."""
    planned: dict[str, list[blocks.Block]] = {"merged": [], "rows": [], "leaves": []}
    for item in items:
        texts, array = state_file.explanation(item, attributes), item.leaf.data
        is_log = item.path in placement.logs
        if (is_log and len(item.data)) or item.path in placement.new:
            slot = layout.Slot(item.path, array.dtype, array.shape, texts)
            block = blocks.Block(slot, item.chunks)
            planned["rows" if is_log else "leaves"].append(block)
        for name, run in _runs(item.path, placement).items():
            if isinstance(run, list):
                rows = sum(piece.stop - piece.start for piece in run)
                slot = layout.Slot(name, array.dtype, (rows, *array.shape[1:]), texts)
                copy = functools.partial(pieces.copy_rows, job.root, run, item.row_size)
                planned["merged"].append(blocks.Block(slot, copy))
    return {purpose: found for purpose, found in planned.items() if found}


def _placed(
    items: Sequence[Item], placement: placing.Placement, written: Mapping[str, segments.Written]
) -> dict[str, tuple[Piece, ...]]:
    """Returns {path: where its rows lie} of all leaves in segments, now that the new ones are written."""
    placed = dict(placement.kept)
    for item in items:
        if item.path in placement.logs:
            older = [
                run if isinstance(run, Piece) else written["merged"].pieces[name]
                for name, run in _runs(item.path, placement).items()
            ]
            newer = [written["rows"].pieces[item.path]] if len(item.data) else []
            placed[item.path] = (*older, *newer)
        elif item.path in placement.new:
            placed[item.path] = (written["leaves"].pieces[item.path],)
    return placed


def _runs(path: str, placement: placing.Placement) -> dict[str, Piece | list[Piece]]:
    """Returns the older pieces of a column in order, each under any name, runs to be merged under their dataset's."""
    runs: dict[str, Piece | list[Piece]] = {}
    run: list[Piece] | None = None
    for number, piece in enumerate(placement.logs.get(path, ())):
        if piece.segment not in placement.merged:
            run = None
            runs[f"{number}"] = piece
        elif run is None:
            # "@" is in no leaf's path, for there it is percent-encoded
            run = [piece]
            runs[f"{path}@{number}" if path in runs else path] = run
        else:
            run.append(piece)
    return runs


def _sealed_index(leaves: list[LeafRecord], used: Mapping[str, SegmentRecord], shard_file: str | None) -> bytes:
    """Returns the bytes of an index that a reader will take; raises FormatError if it would not."""
    global _readable
    data = index.seal_index(leaves, used)
    form = [
        (leaf.path, leaf.kind, leaf.dtype, leaf.shape, leaf.stored, leaf.stored_shape, leaf.part, shard_file)
        for leaf in leaves
    ]
    # reading takes twice as long as writing, and most saves differ in values alone
    if form != _readable or used:
        index.parse_index(data, index.INDEX_FILE, file=shard_file)
        _readable = form
    return data
