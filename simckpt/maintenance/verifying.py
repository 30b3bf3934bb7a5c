"""Verifies one checkpoint's files, and one segment; nothing here writes, nor holds more than a megabyte of an array."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from simckpt.errors import DamagedError, FormatError, StorageError, StoreError, UnsupportedFormatError
from simckpt.maintenance.findings import DAMAGE, FOREIGN, UNCHECKED, Affected, Notes, problem
from simckpt.storage import (
    CommitRecord,
    Index,
    LeafRecord,
    StoreFiles,
    digests,
    names,
    pieces,
    reader,
    sealed,
    segments,
)
from simckpt.storage.index import INDEX_FILE, SegmentRecord
from simckpt.storage.records import SHARDS_FILE, FileRecord
from simckpt.storage.store_reader import COMMIT_FILE
from simckpt.storage.work import JOB_FILE, JOB_LIMIT

Advance = Callable[[int], None]  # told how many bytes were read

PieceKey = tuple[int, int, str]  # where a piece lies in its segment, its size [bytes], its digest
RestKey = tuple[int, tuple[tuple[int, int], ...], str]  # size of a segment, spans outside of its datasets, their digest


@dataclass
class Needs:
    """What the indexes of a store say of one segment.

    Attributes:
        pieces: of it that checkpoints use.
        rests: what they say of its size and of the bytes outside of its datasets; all say the same unless one is wrong.
    """

    pieces: set[PieceKey] = field(default_factory=set)
    rests: set[RestKey] = field(default_factory=set)

    def mark(self) -> str:
        """Returns a digest of all of it."""
        return digests.digest(repr((sorted(self.pieces), sorted(self.rests))).encode())

    def size(self) -> int:
        """Returns how many bytes are to be read."""
        return max((size for size, _, _ in self.rests), default=0)


@dataclass(frozen=True)
class SegmentTrouble:
    """What is wrong with a segment.

    Attributes:
        problem: in words.
        missing: whether there is no such file, or none that can be read.
        pieces: those that are not what was saved.
        rests: those that do not hold.
        unchecked: whether it could not be looked at.
    """

    problem: str
    missing: bool = False
    pieces: frozenset[PieceKey] = frozenset()
    rests: frozenset[RestKey] = frozenset()
    unchecked: bool = False


def folder_of(run: str, seq: int) -> str:
    """Returns the folder of a checkpoint as seen from the store."""
    return f"runs/{run}/checkpoints/{names.sequence_name(seq)}"


def affected(run: str, record: CommitRecord, *, leaves: Iterable[str] = (), restorable: bool = False) -> Affected:
    """Returns what a finding says of a checkpoint."""
    return Affected(run, record.seq, record.id, record.step, tuple(leaves), restorable)


def piece_key(leaf: LeafRecord, place: int) -> PieceKey:
    """Returns what identifies the bytes of a piece of a leaf in its segment."""
    piece = leaf.pieces[place]
    return piece.offset, piece.rows * leaf.row_size, piece.digest


def rest_key(segment: SegmentRecord) -> RestKey:
    """Returns what an index says of a segment besides its pieces."""
    return segment.size, segment.spans, segment.digest


def examine_references(store: StoreFiles, run: str, record: CommitRecord, notes: Notes) -> Index | None:
    """Verifies a checkpoint's index, the sizes of its files and what lies beside them; returns the index if it is good.

    Args:
        store: the files.
        run: the run's name.
        record: the checkpoint's own.
        notes: receive what is found.
    """
    where = folder_of(run, record.seq)
    lost = affected(run, record)
    index: Index | None = None
    naming = f"{where}/{SHARDS_FILE if record.shards else INDEX_FILE}"
    by_file: dict[str, list[LeafRecord]] = {}
    try:
        index = store.index(run, record.seq)
        pieces.check_overlaps(index.lines_in_segments, store.path / where)
        by_file, sizes = index.lines_by_file(), index.sizes
        if strangers := by_file.keys() - sizes.keys():
            raise FormatError(f"{naming} refers to {min(strangers)}, which the records of the checkpoint do not name")
        for name, lines in by_file.items():
            reader.check_bounds(lines, sizes[name], store.path / where)
        if len(index.segments) != record.segments:
            raise FormatError(f"{naming} names {len(index.segments)} segments, the commit record {record.segments}")
        indexes = [file for file in index.files if file.covers == "file"]
        notes.count(records=len(indexes), nbytes=sum(file.size for file in indexes))
    except (UnsupportedFormatError, StorageError) as error:
        text = problem(error, store.path)
        notes.add(UNCHECKED, "index", naming, text, run=run, affected=(lost,))
        return None
    except StoreError as error:
        text = problem(error, store.path)
        notes.add(DAMAGE, "index", _blamed(store, where, naming, error), text, run=run, affected=(lost,))
        index = None
    files = record.files if index is None else index.files
    for file in files:
        if file.covers == "metadata":
            _examine_size(store, run, record, file, by_file.get(file.name, []) if index else None, notes)
    _examine_neighbours(store, run, record, notes)
    return index


def _blamed(store: StoreFiles, where: str, naming: str, error: StoreError) -> str:
    """Returns which record of a checkpoint an error of its index is about, as seen from the store."""
    if isinstance(error, DamagedError):
        blamed = os.path.relpath(error.path, store.path)
        if os.path.dirname(blamed) == where:  # noqa: PTH120 a text, as findings have it
            return blamed
    return naming


def _examine_size(
    store: StoreFiles, run: str, record: CommitRecord, file: FileRecord, lines: list[LeafRecord] | None, notes: Notes
) -> None:
    where = f"{folder_of(run, record.seq)}/{file.name}"
    try:
        size = os.lstat(store.path / where).st_size
    except OSError as error:
        leaves = tuple(line.path for line in lines or ())
        text = "is missing" if isinstance(error, FileNotFoundError) else f"cannot be looked at: {error.strerror}"
        told = affected(run, record, leaves=leaves)
        severity = DAMAGE if isinstance(error, FileNotFoundError) else UNCHECKED
        notes.add(severity, "leaves", where, text, run=run, affected=(told,))
        return
    if size == file.size:
        return
    text = f"has {size} of {file.size} bytes"
    cut = [line.path for line in lines or () if _end(line) > size]
    if cut or (lines is None and size < file.size):
        notes.add(DAMAGE, "leaves", where, text, run=run, affected=(affected(run, record, leaves=cut),))
    else:
        notes.add(DAMAGE, "rest", where, text, run=run, affected=(affected(run, record, restorable=True),))


def _end(leaf: LeafRecord) -> int:
    return 0 if leaf.offset is None else leaf.offset + leaf.size


def _examine_neighbours(store: StoreFiles, run: str, record: CommitRecord, notes: Notes) -> None:
    """Looks at what else lies in a checkpoint's folder."""
    where = folder_of(run, record.seq)
    try:
        found = {path.name for path in (store.path / where).iterdir()}
    except OSError:
        return  # what the record names is missing: that is told already
    for name in sorted(found - {COMMIT_FILE, JOB_FILE, *record.names}):
        notes.add(FOREIGN, "foreign", f"{where}/{name}", "is no file of the checkpoint", run=run)
    if JOB_FILE in found:
        path = store.path / where / JOB_FILE
        told = affected(run, record, restorable=True)
        try:
            data = reader.read_small(store.path, *where.split("/"), JOB_FILE, limit=JOB_LIMIT, path=path)
            sealed.unseal(data, "job", path=path)
            notes.count(records=1, nbytes=len(data))
        except FileNotFoundError:
            pass
        except (UnsupportedFormatError, StorageError) as error:
            notes.add(UNCHECKED, "job", f"{where}/{JOB_FILE}", problem(error, store.path), run=run)
        except StoreError as error:
            notes.add(DAMAGE, "job", f"{where}/{JOB_FILE}", problem(error, store.path), run=run, affected=(told,))


def examine_arrays(store: StoreFiles, run: str, index: Index, notes: Notes, advance: Advance) -> None:
    """Compares every byte of a checkpoint's own files with its digest.

    Args:
        store: the files.
        run: the run's name.
        index: of the checkpoint, which `examine_references` has found to be good.
        notes: receive what is found.
        advance: told of bytes.
    """
    by_file = index.lines_by_file()
    for file in index.files:
        if file.covers != "metadata":
            continue
        where = f"{folder_of(run, index.commit.seq)}/{file.name}"
        leaves = by_file[file.name]
        try:
            with reader.opened_file(store.path, *where.split("/")) as descriptor:
                _examine_file(descriptor, file, leaves, (run, index.commit, where), notes, advance)
        except FileNotFoundError:
            told = affected(run, index.commit, leaves=[leaf.path for leaf in leaves])
            notes.add(DAMAGE, "leaves", where, "is missing", run=run, affected=(told,))
        except (UnsupportedFormatError, StorageError) as error:
            told = affected(run, index.commit, leaves=[leaf.path for leaf in leaves])
            notes.add(UNCHECKED, "leaves", where, problem(error, store.path), run=run, affected=(told,))
        except StoreError as error:
            told = affected(run, index.commit, leaves=[leaf.path for leaf in leaves])
            notes.add(DAMAGE, "leaves", where, problem(error, store.path), run=run, affected=(told,))


def _examine_file(
    descriptor: int,
    file: FileRecord,
    leaves: list[LeafRecord],
    place: tuple[str, CommitRecord, str],
    notes: Notes,
    advance: Advance,
) -> None:
    run, record, where = place
    size, read = os.fstat(descriptor).st_size, 0

    def note(nbytes: int) -> None:
        nonlocal read
        read += nbytes
        advance(nbytes)

    bad = [leaf for leaf in leaves if not _holds(descriptor, [(leaf.offset or 0, _end(leaf))], leaf.digest, note)]
    damaged, titles = [leaf.path for leaf in bad], [leaf.title for leaf in bad]
    gaps = list(_between([(leaf.offset, _end(leaf)) for leaf in leaves if leaf.offset is not None], file.size))
    whole = _holds(descriptor, gaps, file.digest, note)
    length = "" if size == file.size else f" (it has {size} of {file.size} bytes)"
    if damaged or (not leaves and not whole):
        text = f"is damaged{length}: {reader.enumerate_paths(titles) or 'its bytes'} differ from their digests"
        notes.add(DAMAGE, "leaves", where, text, run=run, affected=(affected(run, record, leaves=damaged),))
    elif leaves and (not whole or length):
        text = f"is damaged outside of its arrays{length}"
        notes.add(DAMAGE, "rest", where, text, run=run, affected=(affected(run, record, restorable=True),))
    notes.count(leaves=len(leaves) - len(damaged), nbytes=read)


def _between(spans: list[tuple[int, int]], size: int) -> Iterator[tuple[int, int]]:
    position = 0
    for start, stop in [*sorted(spans), (size, size)]:
        if start > position:
            yield position, start
        position = stop


def _holds(descriptor: int, spans: Iterable[tuple[int, int]], digest: str, advance: Advance) -> bool:
    """Returns whether these spans of a file, one after the other, have a digest."""
    hasher = digests.Hasher(digest.partition(":")[0])
    try:
        for start, stop in spans:
            while start < stop:
                end = min(stop, start + (8 << 20))
                if not reader.digest_span(descriptor, hasher, start, end):
                    return False
                advance(end - start)
                start = end
    except OSError:
        return False
    return hasher.digest() == digest


def examine_segment(
    store: StoreFiles, identity: str, needs: Needs, *, quick: bool, advance: Advance
) -> SegmentTrouble | None:
    """Returns what is wrong with a segment, or None.

    Args:
        store: the files.
        identity: of the segment.
        needs: what the indexes say of it.
        quick: whether sizes alone are compared.
        advance: told of bytes.
    """
    everything = SegmentTrouble("is missing", True, frozenset(needs.pieces), frozenset(needs.rests))
    try:
        with segments.opened(store.path, identity) as descriptor:
            size = os.fstat(descriptor).st_size
            if quick:
                bad = {piece for piece in needs.pieces if piece[0] + piece[1] > size}
                rests = {rest for rest in needs.rests if rest[0] != size}
            else:
                bad = {
                    piece
                    for piece in needs.pieces
                    if not _holds(descriptor, [(piece[0], piece[0] + piece[1])], piece[2], advance)
                }
                rests = {
                    rest for rest in needs.rests if not _holds(descriptor, rest[1], rest[2], advance) or rest[0] != size
                }
    except FileNotFoundError:
        return everything
    except (UnsupportedFormatError, StorageError) as error:
        return SegmentTrouble(problem(error, store.path), unchecked=True)
    except (DamagedError, FormatError) as error:
        return SegmentTrouble(problem(error, store.path), True, everything.pieces, everything.rests)
    if not bad and not rests:
        return None
    sizes = {rest[0] for rest in needs.rests}
    length = "" if size in sizes else f" (it has {size} of {min(sizes)} bytes)"
    text = f"{len(bad)} of the arrays in it are not what was saved" if bad else "is damaged outside of its arrays"
    return SegmentTrouble(f"{text}{length}", pieces=frozenset(bad), rests=frozenset(rests))


def collect_needs(index: Index, needs: dict[str, Needs]) -> None:
    """Adds what a checkpoint uses of segments."""
    for identity, segment in index.segments.items():
        needs.setdefault(identity, Needs()).rests.add(rest_key(segment))
    for leaf in index.lines_in_segments:
        for place, piece in enumerate(leaf.pieces):
            needs[piece.segment].pieces.add(piece_key(leaf, place))
