"""An exported checkpoint as a `.pt` file, which `torch.load(path, weights_only=True)` reads without simckpt.

`{"state": {component: {path: tensor}}, "simckpt": {record: text, "structures": {component: text}}}`. Written here piece
by piece, as `torch.save` needs all tensors in memory; the archive is Python's `zipfile`'s. Of a file from a stranger
the archive and the pickle are looked at before torch sees them: nothing is called but what puts tensors together.
"""

from __future__ import annotations

import functools
import io
import math
import pickle
import struct
import zipfile
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from simckpt.errors import FormatError, UnsupportedFormatError
from simckpt.storage import copying, digests, durable, exported, names, reader
from simckpt.storage.copying import Portions, Source
from simckpt.storage.index import LeafRecord

_TYPES = {
    "bool": 1,
    "uint8": 1,
    "uint16": 2,
    "uint32": 4,
    "uint64": 8,
    "int8": 1,
    "int16": 2,
    "int32": 4,
    "int64": 8,
    "float16": 2,
    "bfloat16": 2,
    "float32": 4,
    "float64": 8,
    "complex64": 8,
    "complex128": 16,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "float8_e4m3fnuz": 1,
    "float8_e5m2fnuz": 1,
    "float8_e8m0fnu": 1,
}
_FOLDER = "checkpoint"  # in the archive
_ALIGNMENT = 64  # [bytes] of tensors, as torch writes them
_PICKLE_LIMIT = 1 << 29  # [bytes]; the index is in it
_OPCODES = frozenset(
    [
        *("PROTO", "MARK", "STOP", "EMPTY_DICT", "EMPTY_LIST", "EMPTY_TUPLE", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3"),
        *("SETITEM", "SETITEMS", "APPEND", "APPENDS", "BINUNICODE", "BININT", "BININT1", "BININT2", "LONG1", "NONE"),
        *("NEWTRUE", "NEWFALSE", "BINPUT", "LONG_BINPUT", "BINGET", "LONG_BINGET", "GLOBAL", "REDUCE", "BINPERSID"),
    ]
)
_GLOBALS = (
    "torch._utils _rebuild_tensor_v2",
    "torch._utils _rebuild_tensor_v3",
    "torch.storage UntypedStorage",
    "collections OrderedDict",
)


def is_torch_file(head: bytes) -> bool:
    """Returns whether a file that begins like this may be of this form."""
    return head[:4] == b"PK\x03\x04"


def _torch(path: Path) -> Any:
    try:
        import torch
    except ImportError as error:
        raise UnsupportedFormatError(f"{path} is a file of torch: install torch") from error
    return torch


@dataclass(frozen=True)
class _Storage:
    """What a tensor's bytes are called in the pickle."""

    persistent: tuple[str, Any, str, str, int]


@dataclass(frozen=True)
class _Tensor:
    """A tensor whose bytes are not in memory."""

    key: str
    dtype: Any
    shape: tuple[int, ...]
    nbytes: int

    def rebuild(self, torch: Any) -> tuple[Any, ...]:
        """Returns what a pickle holds of a tensor: as `torch.Tensor.__reduce_ex__`, see torch/_tensor.py."""
        sizes = [max(1, size) for size in self.shape]
        strides = tuple(math.prod(sizes[axis + 1 :]) for axis in range(len(sizes)))
        classes = torch.storage._dtype_to_storage_type_map()
        if self.dtype in classes:
            elements = self.nbytes // self.dtype.itemsize
            storage = _Storage(("storage", getattr(torch, classes[self.dtype]), self.key, "cpu", elements))
            return torch._utils._rebuild_tensor_v2, (storage, 0, self.shape, strides, False, OrderedDict())
        storage = _Storage(("storage", torch.UntypedStorage, self.key, "cpu", self.nbytes))
        return (
            torch._utils._rebuild_tensor_v3,
            (storage, 0, self.shape, strides, False, OrderedDict(), self.dtype, {}),
        )


class _Pickler(pickle.Pickler):
    """Writes tensors whose bytes are elsewhere. Nothing here is ever unpickled but by torch, weights alone."""

    def __init__(self, file: io.BytesIO, torch: Any) -> None:
        super().__init__(file, protocol=2)  # what weights_only takes
        self._torch = torch

    def persistent_id(self, obj: Any) -> Any:
        return obj.persistent if isinstance(obj, _Storage) else None

    def reducer_override(self, obj: Any) -> Any:
        return obj.rebuild(self._torch) if isinstance(obj, _Tensor) else NotImplemented


class _Sink(io.RawIOBase):
    """A file that keeps what was written, with its place, until it is drained."""

    def __init__(self) -> None:
        self._parts: list[tuple[int, bytes]] = []
        self._position = self._size = 0

    def writable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._position = offset + (0, self._position, self._size)[whence]
        return self._position

    def write(self, data: Any) -> int:
        kept = bytes(data)
        self._parts.append((self._position, kept))
        self._position += len(kept)
        self._size = max(self._size, self._position)
        return len(kept)

    def drain(self) -> Iterator[tuple[int, durable.Bytes]]:
        """Yields what was written since the last call."""
        parts, self._parts = self._parts, []
        yield from parts


def write(disk: durable.Disk, path: Path, source: Source) -> None:
    """Writes a new file and syncs it; raises as `exports.write_export`."""
    torch = _torch(path)
    source.check()
    size = sum(leaf.size for leaf in source.leaves.values() if leaf.kind != names.STRUCTURE_KIND)
    durable.write_file(disk, path, _parts(torch, source), size=size)


def _parts(torch: Any, source: Source) -> Iterator[tuple[int, durable.Bytes]]:
    sink, done = _Sink(), dict[str, str]()
    state: dict[str, dict[str, _Tensor]] = {name: {} for name in source.components}
    structures: dict[str, str] = {}
    with zipfile.ZipFile(sink, "w", zipfile.ZIP_STORED) as archive:
        for leaf in source.leaves.values():
            hasher = digests.Hasher()
            if leaf.kind == names.STRUCTURE_KIND:
                data = b"".join(bytes(chunk) for chunk in source.chunks(leaf))
                hasher.update(data)
                structures[leaf.component] = _text(data, leaf)
            else:
                twin = exported.twin_of(leaf, _TYPES)
                key = str(len(done))
                with archive.open(_entry(sink, f"data/{key}"), "w", force_zip64=True) as entry:
                    for chunk in source.chunks(leaf):
                        hasher.update(chunk)
                        entry.write(copying.swapped(memoryview(chunk), twin.swap))
                        yield from sink.drain()
                dtype = getattr(torch, twin.dtype)
                state[leaf.component][leaf.key] = _Tensor(key, dtype, twin.shape, leaf.size)
            done[leaf.path] = leaf.digest or hasher.digest()
        leaves = exported.one_after_another(list(source.leaves.values()), _TYPES)
        leaves = [replace(leaf, digest=done[leaf.path]) for leaf in leaves]
        own = {**exported.seal_texts(source, leaves), "structures": structures}
        pickled = io.BytesIO()
        _Pickler(pickled, torch).dump({"state": state, "simckpt": own})
        # as torch writes them: the version of the archive, and the byte order of the numbers
        for name, data in (("data.pkl", pickled.getvalue()), ("byteorder", b"little"), ("version", b"3\n")):
            with archive.open(_entry(sink, name), "w", force_zip64=True) as entry:
                entry.write(data)
    yield from sink.drain()


def _entry(sink: _Sink, name: str) -> zipfile.ZipInfo:
    """Returns an entry of the archive whose bytes will be aligned."""
    entry = zipfile.ZipInfo(f"{_FOLDER}/{name}")
    # the local header: 30 bytes, the name, 20 for sizes beyond 4 GB, and a field that is padding
    begin = sink.tell() + 30 + len(entry.filename) + 20 + 4
    padding = -begin % _ALIGNMENT
    entry.extra = struct.pack("<2sH", b"FB", padding) + b"Z" * padding
    return entry


def _text(data: bytes, leaf: LeafRecord) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise FormatError(f"the structure {leaf.path!r} is not UTF-8: {error}") from error


def open_file(path: Path) -> Source:
    """Returns what an exported file holds; all of it but the leaves is verified. Raises as `exports.open_export`."""
    _check_archive(path)
    torch = _torch(path)
    try:
        document = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # whatever a strange file makes of it
        raise FormatError(f"{path} cannot be loaded by torch: {type(error).__name__}: {error}") from error
    state, own = _checked(document, path, torch)
    source = exported.parse_texts(path, own, functools.partial(_chunks, path, state, own["structures"]))
    in_file = {f"{names.encode_part(name)}/{key}" for name, found in state.items() for key in found}
    in_file |= {f"{names.encode_part(name)}/{names.STRUCTURE}" for name in own["structures"]}
    exported.check_tensors(source, in_file)
    for leaf in source.leaves.values():
        if leaf.kind != names.STRUCTURE_KIND:
            tensor, twin = state[leaf.component][leaf.key], exported.twin_of(leaf, _TYPES)
            if str(tensor.dtype) != f"torch.{twin.dtype}" or tuple(tensor.shape) != twin.shape:
                raise FormatError(
                    f"{path}: the tensor {leaf.path!r} is {tensor.dtype} {tuple(tensor.shape)}, by its index "
                    f"{twin.dtype} {twin.shape}"
                )
            if not tensor.is_contiguous() or tensor.nbytes != leaf.size:
                raise FormatError(f"{path}: the tensor {leaf.path!r} is not whole in memory")
    return source


def _check_archive(path: Path) -> None:
    """Raises FormatError for an archive or a pickle that `write` and `torch.save` do not make."""
    try:
        with zipfile.ZipFile(path) as archive:
            entries = archive.infolist()
            if any(entry.compress_type != zipfile.ZIP_STORED or entry.flag_bits & 1 for entry in entries):
                raise FormatError(f"{path} holds what is compressed or encrypted, which files of torch do not")
            claimed = sum(entry.file_size for entry in entries)
            if claimed > path.stat().st_size or len({entry.filename for entry in entries}) < len(entries):
                raise FormatError(f"{path} says that it holds more than it does, or something twice")
            pickles = [entry for entry in entries if entry.filename.endswith("data.pkl")]
            if len(pickles) != 1 or pickles[0].file_size > _PICKLE_LIMIT:
                raise FormatError(f"{path} is no file of torch: it has no data.pkl of at most {_PICKLE_LIMIT} bytes")
            _check_pickle(archive.read(pickles[0]), path)
    except FormatError:
        raise
    except (zipfile.BadZipFile, ValueError, OSError, NotImplementedError, struct.error, EOFError) as error:
        raise FormatError(f"{path} is no whole file of torch: {error}") from error


def _check_pickle(data: bytes, path: Path) -> None:
    """Raises FormatError for a pickle that does more than put tensors and texts together."""
    import pickletools  # takes a while, and is needed for this alone

    for code, argument, _ in pickletools.genops(data):
        if code.name not in _OPCODES or (code.name == "GLOBAL" and not _is_allowed(str(argument))):
            what = f"{code.name} {argument!r}"[:100]
            raise FormatError(f"{path} is no checkpoint that Checkpoint.export wrote: its pickle has {what}")


def _is_allowed(name: str) -> bool:
    module, _, attribute = name.partition(" ")
    if module == "torch":
        return attribute.endswith("Storage") or attribute in _TYPES
    return name in _GLOBALS


def _checked(document: Any, path: Path, torch: Any) -> tuple[Mapping[str, Mapping[str, Any]], Mapping[str, Any]]:
    """Returns the two parts of a document whose types are right."""
    state, own = (document.get("state"), document.get("simckpt")) if type(document) is dict else (None, None)
    if not isinstance(state, dict) or not isinstance(own, dict) or not isinstance(own.get("structures"), dict):
        raise FormatError(f"{path} is no checkpoint that Checkpoint.export wrote: it has no state and no records")
    texts = (*own["structures"], *own["structures"].values(), *state)
    fits = all(isinstance(text, str) for text in texts) and all(isinstance(found, dict) for found in state.values())
    tensors = [each for found in state.values() for each in found.items()] if fits else []
    if not fits or not all(isinstance(key, str) for key, _ in tensors):
        raise FormatError(f"{path} is no checkpoint that Checkpoint.export wrote: its state is no dict of tensors")
    for key, tensor in tensors:
        if not _is_plain(tensor, torch):
            raise FormatError(f"{path} is no checkpoint that Checkpoint.export wrote: {key[:200]!r} is no plain tensor")
    return state, own


def _is_plain(tensor: Any, torch: Any) -> bool:
    """Returns whether the bytes of a tensor's memory are its values; those of a negative or conjugate view are not."""
    if type(tensor) is not torch.Tensor or tensor.layout != torch.strided or tensor.device.type != "cpu":
        return False
    special = tensor.is_neg() or tensor.is_conj() or tensor.is_quantized or tensor.is_nested or tensor.requires_grad
    return not special


def _chunks(
    path: Path, state: Mapping[str, Mapping[str, Any]], structures: Mapping[str, str], leaf: LeafRecord
) -> Portions:
    hasher = digests.Hasher(leaf.digest.partition(":")[0])
    if leaf.kind == names.STRUCTURE_KIND:
        whole, swap = np.frombuffer(structures[leaf.component].encode("utf-8", "surrogatepass"), np.uint8), 0
    else:
        whole, swap = _bytes_of(state[leaf.component][leaf.key]), exported.twin_of(leaf, _TYPES).swap
    for start in range(0, len(whole), durable.CHUNK):
        # a copy, for the file may change under the mapping between the digest and the use
        data = copying.swapped(memoryview(whole[start : start + durable.CHUNK].tobytes()), swap)
        hasher.update(data)
        yield data
    if hasher.digest() != leaf.digest:
        raise reader.damage(path, [leaf.path])


def _bytes_of(tensor: Any) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Returns the bytes of a contiguous tensor, without a copy."""
    import torch

    if tensor.numel() == 0:
        return np.empty(0, np.uint8)
    flat = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    found: np.ndarray[Any, np.dtype[np.uint8]] = flat.reshape(-1).view(torch.uint8).numpy()
    return found
