"""An exported checkpoint as HDF5 for viewers, with the store's records behind it for a reader that trusts neither.

FORMAT.md describes it. The file is read like a checkpoint of a store, by index and digests; libhdf5 is never asked.
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from simckpt.errors import DamagedError, FormatError
from simckpt.storage import blocks, copying, durable, exported, layout, reader, sealed, state_file
from simckpt.storage.copying import Source
from simckpt.storage.index import LeafRecord
from simckpt.storage.records import FileRecord

_END = re.compile(rb"simckpt export ([0-9a-f]{16})\n")
END_SIZE = 32  # [bytes]


def is_hdf5_export(end: bytes) -> bool:
    """Returns whether a file with these last bytes is one that `write` made."""
    return _END.fullmatch(end) is not None


def write(disk: durable.Disk, path: Path, source: Source) -> None:
    """Writes a new file and syncs it; raises as `exports.write_export`."""
    items = source.items()

    def tail(plan: layout.Layout, found: Mapping[str, str]) -> bytes:
        leaves = [
            replace(
                state_file.record_of(item),
                file=state_file.STATE_FILE,
                offset=plan.offsets[item.path],
                digest=found[item.path],
            )
            for item in items
        ]
        state = FileRecord(state_file.STATE_FILE, plan.size, plan.rest_digest, "metadata")
        return _tail(source, exported.seal_records(source, leaves, state), plan.size)

    groups = state_file.groups_of(source.components, items, attributes={})
    here = [state_file.block_of(item, {}) for item in items]
    blocks.write_blocks(disk, path, here, groups=groups, tail=tail)


def _tail(source: Source, parts: Mapping[str, bytes], position: int) -> bytes:
    """Returns the records one after the other, the record that says where each lies, and its length."""
    places = {}
    for name, data in parts.items():
        places[name] = {"offset": position, "size": len(data)}
        position += len(data)
    record = exported.seal_directory(source, places)
    return b"".join(parts.values()) + record + b"simckpt export %016x\n" % len(record)


def open_file(path: Path) -> Source:
    """Returns what an exported file holds; all of it but the leaves is verified. Raises as `exports.open_export`."""
    with reader.opened_file(path.parent, path.name) as descriptor, durable.translated(path):
        size = os.fstat(descriptor).st_size
        end = _END.fullmatch(_read(descriptor, max(0, size - END_SIZE), min(size, END_SIZE), path))
        if end is None:
            raise FormatError(f"{path} has no end of an exported checkpoint")
        length = int(end[1], 16)
        if length > min(exported.DIRECTORY_LIMIT, size - END_SIZE):
            raise FormatError(f"{path}: its directory cannot have {length} bytes")
        fields = sealed.unseal(_read(descriptor, size - END_SIZE - length, length, path), "export", path=path)
        places = {name: fields.object(name) for name in exported.LIMITS}
        parts, position = {}, None
        for name, limit in exported.LIMITS.items():
            offset, part = places[name].integer("offset"), places[name].integer("size", maximum=limit)
            if offset + part > size or position not in (None, offset):
                raise FormatError(f"{path}: its record {name!r} is not where the directory says")
            parts[name], position = _read(descriptor, offset, part, path), offset + part
        source = exported.parse_records(path, fields, parts, functools.partial(_chunks, path))
        state = source.commit.file(state_file.STATE_FILE)
        if position != size - END_SIZE - length or state.size != places["run"].integer("offset"):
            raise FormatError(f"{path} has bytes that belong to nothing")
        algorithm = state.digest.partition(":")[0]
        outside = copying.digest_outside(descriptor, source.leaves.values(), state.size, algorithm=algorithm)
        if outside != state.digest:
            raise DamagedError(f"{path} is damaged outside of its leaves", path=path)
    return source


def _chunks(path: Path, leaf: LeafRecord) -> copying.Portions:
    return copying.file_chunks(path.parent, (path.name,), leaf)


def _read(descriptor: int, offset: int, length: int, path: Path) -> bytes:
    data = bytearray(length)
    if reader.read_into(descriptor, memoryview(data), offset) < length:
        raise DamagedError(f"{path} is damaged: it ends too early", path=path)
    return bytes(data)
