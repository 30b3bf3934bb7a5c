"""Segments: `segments/<id>.h5`, immutable files of rows and of large unchanged leaves, shared by all runs of a store.

A segment is written under a temporary name and renamed, like everything else. Whoever prunes moves it to `trash/`
before it looks once more whether anybody needs it, so that readers look there as well.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from simckpt.errors import FormatError, SegmentMissingError, StorageError
from simckpt.state.leaf import Piece
from simckpt.storage import blocks, durable, index, layout, names, reader, sealed
from simckpt.storage.index import SegmentRecord

FOLDER, TRASH = "segments", "trash"
FROM_STATE = "../../../../segments"  # from the folder of a checkpoint, for viewers

_ROOT: layout.Attributes = (
    ("format", "simckpt segment"),
    ("version", f"{sealed.VERSION[0]}.{sealed.VERSION[1]}"),
    (
        "description",
        "Rows and large unchanged arrays that several checkpoints of a simckpt store share. The state.h5 of each shows "
        "them whole, as virtual datasets.",
    ),
)


@dataclass(frozen=True)
class Written:
    """A segment that was just written, under its temporary name.

    Attributes:
        record: what the index says of it.
        pieces: {path of the dataset: all of its rows}.
    """

    record: SegmentRecord
    pieces: Mapping[str, Piece]


def file_name(identity: str) -> str:
    """Returns the name of a segment's file."""
    return f"{identity}.h5"


def write(disk: durable.Disk, folder: Path, identity: str, datasets: Sequence[blocks.Block]) -> Written:
    """Writes a segment into a work folder, durably, its name not included.

    Raises:
        FormatError: datasets that HDF5 cannot hold.
        DamagedError: rows of another segment that are copied into this one are not what was saved.
        StorageFullError, StorageError: the disk refused.
    """
    plan, digests = blocks.write_blocks(disk, folder / file_name(identity), datasets, groups={"": _ROOT})
    offsets = {path: offset for path, offset in plan.offsets.items() if offset is not None}
    spans = tuple((offset, offset + len(data)) for offset, data in plan.rest)
    record = SegmentRecord(
        identity, plan.size, spans, plan.rest_digest, {offset: path for path, offset in offsets.items()}
    )
    rows = {block.slot.path: block.slot.shape[0] for block in datasets}
    pieces = {
        path: Piece(identity, offset, rows[path], digests[path], 0, rows[path]) for path, offset in offsets.items()
    }
    return Written(record, pieces)


def publish(disk: durable.Disk, root: Path, folder: Path, identities: Iterable[str]) -> None:
    """Gives segments in a work folder their final names, durably; raises StorageError if the disk refuses."""
    target = durable.make_folders(disk, root, FOLDER)
    durable.make_folders(disk, root, TRASH)  # already now: on a full disk a pruner could not
    with durable.translated(target):
        for identity in identities:
            disk.rename(folder / file_name(identity), target / file_name(identity))
    durable.sync_folder(disk, target)


def remove(disk: durable.Disk, root: Path, identities: Iterable[str]) -> None:
    """Removes segments that no checkpoint refers to; those that are gone already do no harm.

    Raises:
        StorageError: the disk refused.
    """
    folder, removed = root / FOLDER, False
    for identity in identities:
        path = folder / file_name(identity)
        with durable.translated(path), contextlib.suppress(FileNotFoundError):
            disk.unlink(path)
            removed = True
    if removed:
        durable.sync_folder(disk, folder)


@contextlib.contextmanager
def opened(root: Path, identity: str) -> Iterator[int]:
    """Gives a descriptor of a segment; raises FileNotFoundError if it is gone, otherwise as `reader.opened_file`."""
    with contextlib.ExitStack() as stack:
        try:
            descriptor = stack.enter_context(reader.opened_file(root, FOLDER, file_name(identity)))
        except FileNotFoundError:
            descriptor = stack.enter_context(_opened_in_trash(root, identity))
        yield descriptor


@contextlib.contextmanager
def _opened_in_trash(root: Path, identity: str) -> Iterator[int]:
    for name in trashed(root).get(identity, ()):
        with contextlib.ExitStack() as stack:
            try:
                descriptor = stack.enter_context(reader.opened_file(root, TRASH, name))
            except FileNotFoundError:
                continue
            yield descriptor
            return
    # it may have been moved back just now
    with reader.opened_file(root, FOLDER, file_name(identity)) as descriptor:
        yield descriptor


def trash_name(identity: str) -> str:
    """Returns a name in the trash that is one pruner's alone: what it removes there no other can have put there."""
    return f"{identity}.{secrets.token_hex(4)}.h5"


def trashed(root: Path) -> dict[str, list[str]]:
    """Returns {id: names of its file} of the segments that lie in the trash.

    Raises:
        StorageError: it cannot be looked at for the moment.
    """
    found: dict[str, list[str]] = {}
    try:
        # not by its path: it may be a symbolic link to anywhere
        with reader.opened_folder(root, TRASH) as folder, os.scandir(folder) as entries:
            for entry in entries:
                found.setdefault(entry.name.partition(".")[0], []).append(entry.name)
    except FileNotFoundError:
        return {}
    except StorageError:
        raise
    except (OSError, FormatError) as error:
        raise StorageError(f"{root / TRASH} cannot be listed: {error}") from error
    return {identity: files for identity, files in found.items() if names.ID.fullmatch(identity)}


def files(root: Path) -> dict[str, list[Path]]:
    """Returns {id: its files} of all segments, those in the trash included.

    Raises:
        StorageError: they cannot be listed for the moment.
    """
    found = {identity: [root / TRASH / name for name in listed] for identity, listed in trashed(root).items()}
    try:
        for path in (root / FOLDER).iterdir():
            identity = path.name.removesuffix(".h5")
            if path.name == file_name(identity) and names.ID.fullmatch(identity):
                found.setdefault(identity, []).append(path)
    except FileNotFoundError:
        pass
    except OSError as error:
        raise StorageError(f"{root / FOLDER} cannot be listed: {error.strerror}") from error
    return found


def missing(root: Path, identities: Iterable[str], known: Mapping[str, SegmentRecord]) -> set[str]:
    """Returns those of some segments that are gone, or do not have the size that they should.

    Costs one `stat` each. What lies in `trash/` is on its way out and counts as gone.

    Raises:
        StorageError: the folder cannot be looked at for the moment.
    """
    gone = set()
    for identity in identities:
        path = root / FOLDER / file_name(identity)
        try:
            size = os.lstat(path).st_size
        except (FileNotFoundError, NotADirectoryError):
            gone.add(identity)
            continue
        except OSError as error:
            raise StorageError(f"{path} cannot be looked at: {error.strerror}") from error
        if identity in known and known[identity].size != size:
            gone.add(identity)
    return gone


def check_present(root: Path, identities: Iterable[str], known: Mapping[str, SegmentRecord]) -> None:
    """Raises SegmentMissingError if any of these segments is gone, or nothing is known of it."""
    identities = list(identities)
    lost = missing(root, identities, known) | {identity for identity in identities if identity not in known}
    if lost:
        raise SegmentMissingError(
            f"{len(lost)} segments of {root} that the state refers to are gone or cut short; the next save writes "
            f"their rows anew",
            ids=sorted(lost),
        )


def sources(leaf: index.LeafRecord, known: Mapping[str, SegmentRecord]) -> tuple[layout.Source, ...]:
    """Returns where a viewer finds the rows of a leaf in segments."""
    return tuple(
        layout.Source(
            f"{FROM_STATE}/{file_name(piece.segment)}",
            f"/{known[piece.segment].names.get(piece.offset, leaf.path)}",
            piece.rows,
            piece.start,
            piece.stop,
        )
        for piece in leaf.pieces
    )
