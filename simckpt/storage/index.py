"""The index of a checkpoint, `leaves.json`: one line for each leaf, which says where it lies and what it is."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any

import numpy as np

from simckpt.errors import FormatError
from simckpt.storage import names, records, sealed

INDEX_LIMIT = 1 << 28  # [bytes] of leaves.json: a million leaves
_PART = re.compile(r"[^/\0]+")
# numpy's own names with the byte order; everything else is stored as one of these (see simckpt/state/arrays.py)
_STORED = re.compile(r"[<>|](b1|[iu][1248]|f(2|4|8|12|16)|c(8|16|24|32)|S[1-9][0-9]{0,5})")
_MAX_DIMENSIONS = 32  # HDF5's limit


@dataclass(frozen=True)
class LeafRecord:
    """One line of the index: where a leaf lies and what it is.

    Attributes:
        path: component and path, "envs/physics/qpos", percent-encoded parts.
        kind: how it comes back: "numpy", "torch", another registered kind, or "structure" for `<component>/_tree`.
        dtype: the true dtype's name, such as "bfloat16".
        shape: the true shape.
        stored: numpy's name of the dtype in the file, with byte order, such as "<u2".
        stored_shape: the shape in the file; for all but strings it is `shape`.
        file: which file of the checkpoint's folder.
        offset: [bytes] from the file's start; None for an empty leaf.
        size: [bytes].
        digest: of these bytes.
    """

    path: str
    kind: str
    dtype: str
    shape: tuple[int, ...]
    stored: str
    stored_shape: tuple[int, ...]
    file: str
    offset: int | None
    size: int
    digest: str

    @property
    def component(self) -> str:
        """The component's name, decoded."""
        return names.decode_part(self.path.partition("/")[0])

    @property
    def key(self) -> str:
        """The path within the component."""
        return self.path.partition("/")[2]

    def stored_dtype(self) -> np.dtype[Any]:
        """Returns the dtype of the bytes in the file."""
        return dtype_from_json(self.stored)

    def to_json(self) -> dict[str, Any]:
        """Returns the line of the index."""
        line: dict[str, Any] = {
            "path": self.path,
            "kind": self.kind,
            "dtype": self.dtype,
            "shape": list(self.shape),
            "stored": self.stored,
            "file": self.file,
            "offset": self.offset,
            "size": self.size,
            "digest": self.digest,
        }
        if self.stored_shape != self.shape:
            line["stored_shape"] = list(self.stored_shape)
        return line


def seal_index(leaves: list[LeafRecord]) -> bytes:
    """Returns the bytes of a `leaves.json`.

    Raises:
        FormatError: an index that `parse_index` would refuse, or one beyond its limit.
    """
    data = sealed.seal("index", {}, rows=("leaves", [leaf.to_json() for leaf in leaves]))
    if len(data) > INDEX_LIMIT:
        raise FormatError(f"the index of {len(leaves)} leaves needs {len(data)} bytes and may have {INDEX_LIMIT}")
    return data


def parse_index(data: bytes, path: object) -> dict[str, LeafRecord]:
    """Returns {path: leaf} of a `leaves.json`, in the order of the file.

    A leaf's size equals its stored shape times its item size; whether it lies within its file is the reader's to check.

    Raises:
        DamagedError, UnsupportedFormatError, FormatError: as in `sealed.unseal`; also two leaves of one path.
    """
    leaves: dict[str, LeafRecord] = {}
    for fields in sealed.unseal(data, "index", path=path).objects("leaves"):
        leaf = _parse_leaf(fields)
        if leaf.path in leaves:
            raise FormatError(f"{path} lists {leaf.path!r} twice")
        leaves[leaf.path] = leaf
    return leaves


def _parse_leaf(fields: sealed.Fields) -> LeafRecord:
    path = fields.text("path")
    parts = path.split("/")
    if len(parts) < 2 or not all(_PART.fullmatch(part) and part not in (".", "..") for part in parts):
        raise fields.wrong("path", "a component and a path in it")
    names.decode_part(parts[0])
    shape = fields.integers("shape")
    stored_shape = fields.integers("stored_shape", limit=_MAX_DIMENSIONS) if "stored_shape" in fields.content else shape
    leaf = LeafRecord(
        path=path,
        kind=fields.text("kind", limit=200),
        dtype=fields.text("dtype"),
        shape=shape,
        stored=fields.text("stored", limit=20),
        stored_shape=stored_shape,
        file=fields.text("file", records.FILE_NAME),
        offset=fields.optional("offset", fields.integer),
        size=fields.integer("size"),
        digest=fields.digest("digest"),
    )
    if leaf.size != math.prod(stored_shape) * leaf.stored_dtype().itemsize:
        raise FormatError(f"{fields.path}: the size of {path!r} does not follow from its shape and dtype")
    if (leaf.offset is None) != (leaf.size == 0):
        raise fields.wrong("offset", "null for an empty leaf, and for no other")
    return leaf


def dtype_to_json(dtype: np.dtype[Any]) -> str:
    """Returns the name of a stored dtype, byte order included.

    Raises:
        FormatError: a dtype that cannot lie in a file, such as one of Python objects.
    """
    return dtype_from_json(dtype.str).str


def dtype_from_json(stored: str) -> np.dtype[Any]:
    """Returns the dtype that `dtype_to_json` named; raises FormatError for any other text. Evaluates nothing."""
    if _STORED.fullmatch(stored):
        try:
            return np.dtype(stored)
        except (TypeError, ValueError) as error:
            raise FormatError(f"{stored!r} is not a stored dtype: {error}") from error
    raise FormatError(f"{stored[:80]!r} is not the dtype of a leaf in a file")
