"""An exported checkpoint as a safetensors file: every leaf a tensor under its path, the records in the metadata.

Written here, as the safetensors library holds all tensors in memory and does not sync; a file is a length, a JSON
header and the bytes of the tensors. Read by that library's header, which is checked there; the bytes by the index.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from simckpt.errors import FormatError, UnsupportedFormatError
from simckpt.storage import copying, digests, durable, exported, reader
from simckpt.storage.copying import Portions, Source
from simckpt.storage.index import LeafRecord

# {name of an element type: (safetensors' name, size [bytes])}; complex numbers are (real, imaginary), one axis more
_TYPES = {
    "bool": ("BOOL", 1),
    "uint8": ("U8", 1),
    "uint16": ("U16", 2),
    "uint32": ("U32", 4),
    "uint64": ("U64", 8),
    "int8": ("I8", 1),
    "int16": ("I16", 2),
    "int32": ("I32", 4),
    "int64": ("I64", 8),
    "float16": ("F16", 2),
    "bfloat16": ("BF16", 2),
    "float32": ("F32", 4),
    "float64": ("F64", 8),
    "float8_e4m3fn": ("F8_E4M3", 1),
    "float8_e5m2": ("F8_E5M2", 1),
}
_KNOWN = {name: size for name, (_, size) in _TYPES.items()}
_HEADER_LIMIT = 100_000_000  # [bytes], of the safetensors library
_DIRECTORY = "simckpt"


def is_safetensors(head: bytes, size: int) -> bool:
    """Returns whether a file of a size [bytes] that begins like this may be of this form."""
    length = int.from_bytes(head[:8], "little")
    return len(head) > 8 and head[8:9] == b"{" and 8 + length <= size


def write(disk: durable.Disk, path: Path, source: Source) -> None:
    """Writes a new file and syncs it; raises as `exports.write_export`."""
    source.check()
    leaves = exported.one_after_another(list(source.leaves.values()), _KNOWN)
    # the header comes before what it vouches for; it is as long with any other digests
    unknown = digests.digest(b"")
    size = len(_header(source, [replace(leaf, digest=leaf.digest or unknown) for leaf in leaves]))
    if size - 8 > _HEADER_LIMIT:
        raise FormatError(f"{source.path} needs a header of {size} bytes, and safetensors have {_HEADER_LIMIT} at most")
    total = size + sum(leaf.size for leaf in leaves)
    durable.write_file(disk, path, _parts(source, leaves, size), size=total)


def _parts(source: Source, leaves: list[LeafRecord], size: int) -> Iterator[tuple[int, durable.Bytes]]:
    done = []
    for leaf in leaves:
        hasher, swap = digests.Hasher(), exported.twin_of(leaf, _KNOWN).swap
        position = size + (leaf.offset or 0)
        for chunk in source.chunks(source.leaves[leaf.path]):
            hasher.update(chunk)
            yield position, copying.swapped(memoryview(chunk), swap)
            position += memoryview(chunk).nbytes
        done.append(replace(leaf, digest=leaf.digest or hasher.digest()))
    yield 0, _header(source, done)


def _header(source: Source, leaves: list[LeafRecord]) -> bytes:
    """Returns the first bytes of the file: the header and its length."""
    texts = exported.seal_texts(source, leaves)
    metadata = {"format": "pt", **{_key(name): text for name, text in texts.items()}}
    header: dict[str, Any] = {"__metadata__": metadata}
    for leaf in leaves:
        twin, start = exported.twin_of(leaf, _KNOWN), leaf.offset
        # an empty tensor lies before all others
        place = [0, 0] if start is None else [start, start + leaf.size]
        header[leaf.path] = {"dtype": _TYPES[twin.dtype][0], "shape": list(twin.shape), "data_offsets": place}
    data = json.dumps(header, separators=(",", ":")).encode("ascii")
    data = data.ljust(-(-len(data) // 8) * 8)
    return len(data).to_bytes(8, "little") + data


def open_file(path: Path) -> Source:
    """Returns what an exported file holds; all of it but the leaves is verified. Raises as `exports.open_export`."""
    try:
        import safetensors
    except ImportError as error:
        raise UnsupportedFormatError(
            f"{path} is a safetensors file: install the safetensors package to read it, as with "
            '`pip install "simckpt[safetensors]"`'
        ) from error
    try:
        with safetensors.safe_open(path, framework="numpy") as file:
            metadata = file.metadata() or {}
            views = {name: file.get_slice(name) for name in file.offset_keys()}
            found = {name: (view.get_dtype(), tuple(view.get_shape())) for name, view in views.items()}
    except (safetensors.SafetensorError, OSError, ValueError, OverflowError) as error:
        raise FormatError(f"{path} is no whole safetensors file: {error}") from error
    if _DIRECTORY not in metadata:
        raise FormatError(f"{path} is no checkpoint that Checkpoint.export wrote: it has no metadata of simckpt")
    texts = {name: metadata.get(_key(name)) for name in ("directory", *exported.LIMITS)}
    places: dict[str, tuple[int, int]] = {}

    def chunks(leaf: LeafRecord) -> Portions:
        offset, swap = places[leaf.path]
        return copying.file_chunks(path.parent, (path.name,), replace(leaf, offset=offset), swap=swap)

    source = exported.parse_texts(path, texts, chunks)
    exported.check_tensors(source, found.keys())
    position = _data_start(path)
    for name, (dtype, shape) in found.items():
        leaf = source.leaves[name]
        twin = exported.twin_of(leaf, _KNOWN)
        if (dtype, shape) != (_TYPES[twin.dtype][0], twin.shape):
            raise FormatError(f"{path}: the tensor {name!r} is {dtype} {shape}, by its index {twin.dtype} {twin.shape}")
        places[name] = (position, twin.swap)
        position += leaf.size
    return source


def _data_start(path: Path) -> int:
    head = bytearray(8)
    with reader.opened_file(path.parent, path.name) as descriptor, durable.translated(path):
        reader.read_into(descriptor, memoryview(head), 0)
    return 8 + int.from_bytes(head, "little")


def _key(name: str) -> str:
    """Returns what a record is called in the metadata."""
    return _DIRECTORY if name == "directory" else f"{_DIRECTORY}.{name}"
