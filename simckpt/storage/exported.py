"""What files of all forms that hold one exported checkpoint have in common: its records, and how arrays are told.

FORMAT.md describes it. Each record carries its own digest; the commit record vouches for the index, and that for the
bytes of every leaf.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from simckpt.errors import DamagedError, FormatError
from simckpt.storage import digests, index, names, reader, sealed, state_file
from simckpt.storage import records as record_types
from simckpt.storage.copying import Portions, Source
from simckpt.storage.index import LeafRecord
from simckpt.storage.records import CommitRecord, FileRecord
from simckpt.storage.run_records import parse_run
from simckpt.storage.starts import START_LIMIT, parse_start

LIMITS = {
    "run": record_types.RECORD_LIMIT,
    "start": START_LIMIT,
    "commit": record_types.COMMIT_LIMIT,
    "leaves": index.INDEX_LIMIT,
}
DIRECTORY_LIMIT = index.INDEX_LIMIT  # [bytes]: it names the shared leaves


def seal_records(source: Source, leaves: Iterable[LeafRecord], state: FileRecord) -> dict[str, bytes]:
    """Returns the records of an exported checkpoint by their names in `LIMITS`.

    Args:
        source: the checkpoint.
        leaves: where its leaves lie in the file, with their digests.
        state: the part of the file that holds them.
    """
    data = index.seal_index(leaves)
    files = (state, FileRecord(index.INDEX_FILE, len(data), digests.digest(data), "file"))
    size = state.size + len(data)
    own = replace(source.commit, files=files, segments=0, size=size, start=source.start.id, shards=0, shards_size=0)
    return {
        "run": source.run.to_bytes(),
        "start": source.start.to_bytes(),
        "commit": own.to_bytes(),
        "leaves": data,
    }


def seal_directory(source: Source, places: Mapping[str, Any] | None = None) -> bytes:
    """Returns the record that ties the others together; `places` are further fields of it."""
    fields = {"store": source.store, "seq": source.commit.seq, "start_id": source.start.id, **(places or {})}
    return sealed.seal("export", fields, rows=("shared", sorted(source.shared)))


def seal_texts(source: Source, leaves: Sequence[LeafRecord]) -> dict[str, str]:
    """Returns the records of a file that keeps them as texts, by their names in `LIMITS`, and its directory.

    Args:
        source: the checkpoint.
        leaves: with their offsets in a block that holds them and nothing else, and with their digests.
    """
    block = FileRecord(state_file.STATE_FILE, sum(leaf.size for leaf in leaves), digests.digest(b""), "metadata")
    records = {"directory": seal_directory(source), **seal_records(source, leaves, block)}
    return {name: data.decode("ascii") for name, data in records.items()}


def parse_texts(path: Path, texts: Mapping[str, Any], chunks: Callable[[LeafRecord], Portions]) -> Source:
    """Returns what a file holds that keeps its records as `seal_texts` gives them; see `parse_records`."""
    parts = {}
    for name, limit in {"directory": DIRECTORY_LIMIT, **LIMITS}.items():
        text = texts.get(name)
        if not isinstance(text, str) or not text.isascii() or len(text) > limit:
            raise FormatError(f"{path} has no record {name!r}, or none of its size")
        parts[name] = text.encode("ascii")
    return parse_records(path, sealed.unseal(parts["directory"], "export", path=path), parts, chunks)


def check_tensors(source: Source, found: Set[str]) -> None:
    """Raises FormatError unless the tensors of a file are, by their paths, those of its index."""
    if found != source.leaves.keys():
        differing = ", ".join(sorted(found ^ source.leaves.keys())[:3])
        raise FormatError(f"{source.path}: its tensors are not those of its index, such as {differing}")


def parse_records(
    path: Path, fields: sealed.Fields, parts: Mapping[str, bytes], chunks: Callable[[LeafRecord], Portions]
) -> Source:
    """Returns what an exported file holds.

    Args:
        path: of the file.
        fields: of its directory.
        parts: the records by their names in `LIMITS`.
        chunks: of the source.

    Raises:
        DamagedError, UnsupportedFormatError, FormatError: records that cannot be trusted, understood, or do not fit.
    """
    run = parse_run(parts["run"], path)
    commit = record_types.parse_commit(parts["commit"], path, seq=fields.integer("seq", minimum=1), run_id=run.id)
    if not isinstance(commit, CommitRecord):
        raise FormatError(f"{path} holds a tombstone")
    vouched = commit.file(index.INDEX_FILE)
    if len(parts["leaves"]) != vouched.size or not digests.matches(parts["leaves"], vouched.digest):
        raise DamagedError(f"{path} is damaged: its index differs from the digest in its commit record", path=path)
    leaves, _ = index.parse_index(parts["leaves"], path)
    if any(leaf.pieces or leaf.file != state_file.STATE_FILE for leaf in leaves.values()):
        raise FormatError(f"{path}: its index names other files")
    reader.check_bounds(leaves.values(), commit.file(state_file.STATE_FILE).size, path)
    shared = frozenset(fields.texts("shared", limit=len(leaves)))
    if not all(each in leaves and leaves[each].shape and leaves[each].kind != names.STRUCTURE_KIND for each in shared):
        raise fields.wrong("shared", "a list of leaves that have rows")
    start = parse_start(parts["start"], path, id=fields.id("start_id"))
    return Source(path, fields.id("store"), run, start, commit, leaves, shared, chunks)


@dataclass(frozen=True)
class Twin:
    """How another library sees a leaf.

    Attributes:
        dtype: name of the element type, as numpy or torch call it.
        shape: in elements of that type.
        swap: see `copying.file_chunks`: these libraries have little-endian numbers alone.
    """

    dtype: str
    shape: tuple[int, ...]
    swap: int = 0


def twin_of(leaf: LeafRecord, known: Mapping[str, int]) -> Twin:
    """Returns the leaf as an array of a type that a library has: its own, what stands for it in a file, or bytes.

    Args:
        leaf: its record.
        known: {name: size [bytes]} of the library's element types.
    """
    own, stored = leaf.dtype.removeprefix("ml_dtypes."), leaf.stored_dtype()
    is_big = stored.str[0] == ">"
    is_own = own in known and leaf.kind in ("numpy", "torch") and not is_big
    if is_own and known[own] * math.prod(leaf.shape) == leaf.size:
        return Twin(own, leaf.shape)
    native = stored.newbyteorder("=").name
    if native in known:
        part = stored.itemsize // 2 if stored.kind == "c" else stored.itemsize
        return Twin(native, leaf.stored_shape, part if is_big else 0)
    return Twin("uint8", (*leaf.stored_shape, stored.itemsize))


def one_after_another(leaves: Sequence[LeafRecord], known: Mapping[str, int]) -> list[LeafRecord]:
    """Returns the leaves, in their order, with offsets in a block of bytes that holds nothing else.

    The widest types come first in it, so that each is aligned to its element's size.
    """
    offsets, position = {}, 0
    for leaf in sorted(leaves, key=lambda leaf: -known[twin_of(leaf, known).dtype]):
        offsets[leaf.path] = position
        position += leaf.size
    return [
        replace(leaf, file=state_file.STATE_FILE, offset=offsets[leaf.path] if leaf.size else None, pieces=(), parts=())
        for leaf in leaves
    ]
