"""One checkpoint as one file: HDF5 for viewers, with the store's records behind it for a reader that trusts neither.

FORMAT.md describes it. The file is read like a checkpoint of a store, by index and digests; libhdf5 is never asked.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from simckpt.errors import ConflictError, DamagedError, FormatError
from simckpt.state.tree import Encoded
from simckpt.storage import blocks, digests, durable, index, layout, reader, sealed, state_file
from simckpt.storage import records as record_types
from simckpt.storage.index import LeafRecord
from simckpt.storage.records import CommitRecord, FileRecord
from simckpt.storage.run_records import RunRecord, parse_run
from simckpt.storage.starts import START_LIMIT, StartRecord, parse_start

_END = re.compile(rb"simckpt export ([0-9a-f]{16})\n")
_END_SIZE = 32  # [bytes]
_LIMITS = {
    "run": record_types.RECORD_LIMIT,
    "start": START_LIMIT,
    "commit": record_types.COMMIT_LIMIT,
    "leaves": index.INDEX_LIMIT,
}


@dataclass(frozen=True)
class Exported:
    """A checkpoint in a file of its own.

    Attributes:
        path: of the file.
        store: id of the store it comes from.
        run: the record of its run.
        start: the record of the start that saved it.
        commit: its own record; its files are this one and the index in it.
        leaves: {path: leaf}, its index.
        shared: paths of the leaves that lay in segments.
    """

    path: Path
    store: str
    run: RunRecord
    start: StartRecord
    commit: CommitRecord
    leaves: Mapping[str, LeafRecord]
    shared: frozenset[str]

    def read(self) -> dict[str, Encoded]:
        """Returns {component: encoded state}, every byte verified.

        Raises:
            DamagedError: naming every damaged leaf.
            FormatError: records that break a rule.
            StorageError: not enough memory, or the permissions refuse.
        """
        size = self.commit.file(state_file.STATE_FILE).size
        leaves = [replace(leaf, file=self.path.name) for leaf in self.leaves.values()]
        with reader.opened_folder(self.path.parent) as folder:
            return reader.assemble(
                reader.read_leaves(folder, leaves, sizes={self.path.name: size}, path=self.path.parent)
            )


def write_export(
    disk: durable.Disk,
    path: Path,
    components: Mapping[str, Encoded],
    *,
    store: str,
    run: RunRecord,
    start: StartRecord,
    commit: CommitRecord,
    shared: Collection[str],
) -> None:
    """Writes a checkpoint into a new file, durably: under a name beside it first, then renamed.

    Args:
        disk: the system calls.
        path: of the file; nothing is replaced.
        components: {name: encoded state}, all of the checkpoint.
        store: id of its store.
        run: the record of its run.
        start: the record of the start that saved it.
        commit: its own record.
        shared: paths of the leaves that lie in segments.

    Raises:
        ConflictError: the path exists.
        StorageFullError, StorageError: the disk refused; there is no file then.
    """
    if os.path.lexists(path):
        raise ConflictError(f"{path} exists already: nothing is replaced")
    items = state_file.collect(components)

    def tail(plan: layout.Layout, found: Mapping[str, str]) -> bytes:
        leaves = index.seal_index(
            replace(
                state_file.record_of(item),
                file=state_file.STATE_FILE,
                offset=plan.offsets[item.path],
                digest=found[item.path],
            )
            for item in items
        )
        files = (
            FileRecord(state_file.STATE_FILE, plan.size, plan.rest_digest, "metadata"),
            FileRecord(index.INDEX_FILE, len(leaves), digests.digest(leaves), "file"),
        )
        own = replace(commit, files=files, segments=0, size=plan.size + len(leaves), start=start.id)
        parts = {"run": run.to_bytes(), "start": start.to_bytes(), "commit": own.to_bytes(), "leaves": leaves}
        return _tail(plan.size, parts, store=store, seq=commit.seq, start_id=start.id, shared=shared)

    made = path.with_name(f".{path.name[:100]}.{secrets.token_hex(4)}.tmp")
    try:
        groups = state_file.groups_of(components, items, attributes={})
        here = [state_file.block_of(item, {}) for item in items]
        blocks.write_blocks(disk, made, here, groups=groups, tail=tail)
        if not durable.publish_file(disk, made, path):
            raise ConflictError(f"{path} exists already: nothing is replaced")
    finally:
        with contextlib.suppress(OSError):
            disk.unlink(made)


def _tail(
    start: int, parts: Mapping[str, bytes], *, store: str, seq: int, start_id: str, shared: Collection[str]
) -> bytes:
    """Returns the records one after the other, the record that says where each lies, and its length."""
    places, position = {}, start
    for name, data in parts.items():
        places[name] = {"offset": position, "size": len(data)}
        position += len(data)
    fields = {"store": store, "seq": seq, "start_id": start_id, **places}
    record = sealed.seal("export", fields, rows=("shared", sorted(shared)))
    return b"".join(parts.values()) + record + b"simckpt export %016x\n" % len(record)


def open_export(path: Path) -> Exported:
    """Returns what an exported file holds; its leaves are read by `Exported.read`.

    Raises:
        FileNotFoundError: there is no such file.
        FormatError: it is no exported checkpoint.
        DamagedError, UnsupportedFormatError, StorageError: it cannot be trusted, understood or read.
    """
    path = path.expanduser().resolve()
    with reader.opened_file(path.parent, path.name) as descriptor, durable.translated(path):
        size = os.fstat(descriptor).st_size
        end = _END.fullmatch(_read(descriptor, max(0, size - _END_SIZE), min(size, _END_SIZE), path))
        if end is None:
            raise FormatError(f"{path} is no checkpoint that Checkpoint.export wrote, or its end is missing")
        length = int(end[1], 16)
        if length > min(index.INDEX_LIMIT, size - _END_SIZE):
            raise FormatError(f"{path}: its directory cannot have {length} bytes")
        fields = sealed.unseal(_read(descriptor, size - _END_SIZE - length, length, path), "export", path=path)
        data = {name: _part(descriptor, fields.object(name), limit, size, path) for name, limit in _LIMITS.items()}
    commit = record_types.parse_commit(data["commit"], path, seq=fields.integer("seq", minimum=1))
    if not isinstance(commit, CommitRecord):
        raise FormatError(f"{path} holds a tombstone")
    vouched = commit.file(index.INDEX_FILE)
    if len(data["leaves"]) != vouched.size or not digests.matches(data["leaves"], vouched.digest):
        raise DamagedError(f"{path} is damaged: its index differs from the digest in its commit record", path=path)
    leaves, _ = index.parse_index(data["leaves"], path)
    if any(leaf.pieces or leaf.file != state_file.STATE_FILE for leaf in leaves.values()):
        raise FormatError(f"{path}: its index names other files")
    return Exported(
        path=path,
        store=fields.id("store"),
        run=parse_run(data["run"], path),
        start=parse_start(data["start"], path, id=fields.id("start_id")),
        commit=commit,
        leaves=leaves,
        shared=frozenset(fields.texts("shared", limit=len(leaves))),
    )


def _part(descriptor: int, place: sealed.Fields, limit: int, size: int, path: Path) -> bytes:
    offset, length = place.integer("offset"), place.integer("size", maximum=limit)
    if offset + length > size:
        raise FormatError(f"{path}: a record ends at byte {offset + length} of a file of {size}")
    return _read(descriptor, offset, length, path)


def _read(descriptor: int, offset: int, length: int, path: Path) -> bytes:
    data = bytearray(length)
    if reader.read_into(descriptor, memoryview(data), offset) < length:
        raise DamagedError(f"{path} is damaged: it ends too early", path=path)
    return bytes(data)
