"""Makes one checkpoint of what several ranks have prepared: their files in one folder, and a record that names them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from simckpt.errors import ConfigurationError, FormatError, StorageError
from simckpt.storage import digests, durable, indexes, names, preparing, reader, segments, shards, work
from simckpt.storage.preparing import Prepared
from simckpt.storage.records import SHARDS_FILE, FileRecord
from simckpt.storage.shards import Listing

Forms = tuple[str, ...]  # of the indexes of all ranks


@dataclass(frozen=True)
class Gathered:
    """The files of all ranks in one folder in `tmp/`, which lacks nothing but the commit record and its name.

    Attributes:
        prepared: the folder, its `shards.json`, and the segments of all ranks, none of which it has made itself.
        shards: how many ranks there are.
        shards_size: of the files that `shards.json` names [bytes].
        forms: of their indexes, which were found to fit together.
    """

    prepared: Prepared
    shards: int
    shards_size: int
    forms: Forms


def gather(
    disk: durable.Disk, root: Path, run: str, reports: Sequence[Prepared], *, known: Forms | None = None
) -> Gathered:
    """Returns the checkpoint that ranks have prepared, durable but for its commit; on an error its folder is gone.

    What the ranks have prepared then lacks files and must be discarded by each of them.

    Args:
        disk: the system calls.
        root: the store's folder.
        run: the run's name.
        reports: of all ranks, in any order.
        known: forms of indexes of which it is known that they fit together; others are read and merged.

    Raises:
        ConfigurationError: a rank is missing, reported twice, or counts other ranks.
        SegmentMissingError: a segment that a rank refers to is gone.
        StorageError: the disk refused, or what a rank has prepared is gone, naming it.
        DamagedError, FormatError: the index of a rank is not what it has reported, or does not fit the others.
    """
    ordered = _ordered(reports)
    forms = tuple(report.form for report in ordered)
    used = {identity: segment for report in ordered for identity, segment in report.segments.items()}
    folder = work.WorkFolders(disk, root).make()
    try:
        if used:
            # a rank that dies from here on is swept with its announcement
            preparing.announce(disk, folder, run, uses=used, made=())
            segments.check_present(root, used, used)
        for number, report in enumerate(ordered):
            _move(disk, report, number, folder)
        listing = Listing(
            tuple(report.files[0] for report in ordered), tuple(report.files[1] for report in ordered), tuple(used)
        )
        data = listing.to_bytes()
        shards.parse_listing(data, folder / SHARDS_FILE)
        if forms != known:
            _check(root, folder, listing)
        durable.write_record(disk, folder / SHARDS_FILE, data)
    except BaseException:
        preparing.discard(disk, root, folder, ())
        raise
    size = sum(file.size for file in listing.files)
    prepared = Prepared(
        folder=folder,
        files=(FileRecord(SHARDS_FILE, len(data), digests.digest(data), "file"),),
        leaves={},
        segments=used,
        made=(),
        large={},
        size=len(data) + sum(report.size for report in ordered),
    )
    return Gathered(prepared, len(ordered), size, forms)


def _ordered(reports: Sequence[Prepared]) -> list[Prepared]:
    found = {report.shard.number: report for report in reports if report.shard is not None}
    counts = {report.shard.count for report in reports if report.shard is not None}
    if counts != {len(reports)} or found.keys() != set(range(len(reports))):
        missing = sorted(set(range(max(counts, default=0))) - found.keys())
        raise ConfigurationError(
            f"{len(reports)} ranks have reported, which count {sorted(counts)}; none has reported of {missing[:20]}",
            keys=["prepared"],
        )
    return [found[number] for number in range(len(reports))]


def _move(disk: durable.Disk, report: Prepared, rank: int, folder: Path) -> None:
    for file in report.files:
        source, target = report.folder / file.name, folder / file.name
        with durable.translated(source):
            try:
                disk.rename(source, target)
            except FileNotFoundError as error:
                raise StorageError(
                    f"{source} is gone: what rank {rank} has prepared was discarded or swept, and nothing is saved; "
                    f"save again"
                ) from error
            size = os.lstat(target).st_size
        if size != file.size:
            raise StorageError(f"rank {rank} has written {file.size} bytes of {source}, here are {size}; save again")


def _check(root: Path, folder: Path, listing: Listing) -> None:
    """Reads the indexes as their reader will, before they get a name."""
    with reader.opened_folder(root, "tmp", folder.name) as descriptor:
        leaves, _ = indexes.merged(descriptor, listing, folder)
    components = {leaf.path.partition("/")[0] for leaf in leaves.values()}
    if lacking := sorted(each for each in components if f"{each}/{names.STRUCTURE}" not in leaves):
        raise FormatError(f"no rank has written the structure of the components {', '.join(lacking[:5])}")
