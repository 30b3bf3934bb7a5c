"""The index of a checkpoint, `leaves.json`: one line for each leaf, which says where it lies and what it is."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from simckpt.errors import FormatError
from simckpt.state.leaf import Piece
from simckpt.storage import digests, names, records, sealed

INDEX_FILE = "leaves.json"
INDEX_LIMIT = 1 << 28  # [bytes] of leaves.json: a million leaves
PIECES_LIMIT = 1000  # of one leaf, and of segments of one checkpoint; a writer keeps to MAX_SEGMENTS
_PART = re.compile(r"[ -.0-~]+")  # percent-encoded: printable, and nothing that a terminal or HDF5 would stumble over
_MAX_PARTS = 600  # of a path; a writer starts over at 1,000 characters
_FREE_ELEMENTS = 1 << 20  # that a leaf may have without a byte behind each: those of a dtype that has none
_EMPTY_AXES = 1 << 40  # product of the other axes of an empty leaf
# numpy's own names with the byte order; everything else is stored as one of these (see simckpt/state/arrays.py)
_STORED = re.compile(r"[<>|](b1|[iu][1248]|f(2|4|8|12|16)|c(8|16|24|32)|S[1-9][0-9]{0,5})")
_OFFSET = re.compile(r"0|[1-9][0-9]{0,18}")
_MAX_DIMENSIONS = 32  # HDF5's limit


@dataclass(frozen=True)
class SegmentRecord:
    """A segment, as the indexes of the checkpoints that refer to it vouch for it.

    Attributes:
        id: random; the file is `segments/<id>.h5`.
        size: of the file [bytes].
        spans: (start, stop) of the file's bytes outside of its datasets [bytes].
        digest: of these bytes, in order.
        names: {offset: path} of its datasets, as far as they are known; viewers' files refer to them by path.
    """

    id: str
    size: int
    spans: tuple[tuple[int, int], ...]
    digest: str
    names: Mapping[int, str] = field(default_factory=dict)


class Part(NamedTuple):
    """Where a part of a leaf lies that several ranks have written; a million of them may be in memory.

    Attributes:
        rank: which wrote it.
        file: which file of the checkpoint's folder; "" for a part that lies in segments.
        offset, size, digest, pieces: as of a `LeafRecord`.
        start: where the part starts in the whole, a place for each axis.
        stored_shape: its shape in the file.
    """

    rank: int
    file: str
    offset: int | None
    size: int
    digest: str
    start: tuple[int, ...]
    stored_shape: tuple[int, ...]
    pieces: tuple[Piece, ...] = ()

    @property
    def shape(self) -> tuple[int, ...]:
        """Its true shape."""
        return self.stored_shape[: len(self.start)]


@dataclass(frozen=True, slots=True)
class LeafRecord:
    """One line of the index: where a leaf lies and what it is.

    Attributes:
        path: component and path, "envs/physics/qpos", percent-encoded parts.
        kind: how it comes back: "numpy", "torch", another registered kind, or "structure" for `<component>/_tree`.
        dtype: the true dtype's name, such as "bfloat16".
        shape: the true shape.
        stored: numpy's name of the dtype in the file, with byte order, such as "<u2".
        stored_shape: the shape in the file; for all but strings it is `shape`.
        file: which file of the checkpoint's folder; "" for a leaf that lies in segments.
        offset: [bytes] from the file's start; None for an empty leaf and for one in segments.
        size: [bytes].
        digest: of these bytes; "" for a leaf that is not the whole of one piece.
        pieces: where its rows lie in segments, in order; () for a leaf in a file of the folder.
        part: where this part starts in the whole, whose shape is `shape`, while all else is the part's; None for a
            whole leaf.
        rank: which of several wrote it; None where one process did, and before indexes are merged.
        parts: which tile it, of a leaf that several ranks have written; it then has no place of its own, and `size` and
            `stored_shape` are those of the whole.
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
    pieces: tuple[Piece, ...] = ()
    part: tuple[int, ...] | None = None
    rank: int | None = None
    parts: tuple[Part, ...] = ()

    @property
    def title(self) -> str:
        """Its path, and of a part whose that is, for messages."""
        return self.path if self.part is None else f"{self.path} (the part of rank {self.rank})"

    @property
    def lines(self) -> Iterator[LeafRecord]:
        """The lines of the indexes that tell of it: itself, or one for each of its parts."""
        return map(self.line, self.parts) if self.parts else iter((self,))

    def line(self, part: Part) -> LeafRecord:
        """Returns the line of one of its parts."""
        return LeafRecord(
            self.path,
            self.kind,
            self.dtype,
            self.shape,
            self.stored,
            part.stored_shape,
            part.file,
            part.offset,
            part.size,
            part.digest,
            part.pieces,
            part.start,
            part.rank,
        )

    @property
    def own_shape(self) -> tuple[int, ...]:
        """The true shape of what the line tells of: of the leaf, or of the part."""
        return self.shape if self.part is None else self.stored_shape[: len(self.shape)]

    @property
    def component(self) -> str:
        """The component's name, decoded."""
        return names.decode_part(self.path.partition("/")[0])

    @property
    def key(self) -> str:
        """The path within the component."""
        return self.path.partition("/")[2]

    @property
    def row_size(self) -> int:
        """The size of one row of a leaf in segments [bytes]."""
        return math.prod(self.stored_shape[1:]) * self.stored_dtype().itemsize

    def stored_dtype(self) -> np.dtype[Any]:
        """Returns the dtype of the bytes in the file."""
        return dtype_from_json(self.stored)

    def to_json(self, places: Mapping[str, int]) -> dict[str, Any]:
        """Returns the line of the index; `places` are those of the segments in the index's list of them."""
        line: dict[str, Any] = {
            "path": self.path,
            "kind": self.kind,
            "dtype": self.dtype,
            "shape": list(self.shape),
            "stored": self.stored,
        }
        if self.pieces:
            line |= {"size": self.size, "pieces": [_piece_to_json(piece, places) for piece in self.pieces]}
        else:
            line |= {"file": self.file, "offset": self.offset, "size": self.size, "digest": self.digest}
        if self.stored_shape != self.shape:
            line["stored_shape"] = list(self.stored_shape)
        if self.part is not None:
            line["part"] = list(self.part)
        return line


def in_pieces(leaf: LeafRecord, pieces: tuple[Piece, ...]) -> LeafRecord:
    """Returns the record of a leaf that lies in these pieces, wherever `leaf` said that it was."""
    return replace(leaf, file="", offset=None, digest=_digest_of(pieces), pieces=pieces)


def _digest_of(pieces: tuple[Piece, ...]) -> str:
    whole = len(pieces) == 1 and (pieces[0].start, pieces[0].stop) == (0, pieces[0].rows)
    return pieces[0].digest if whole else ""


def segments_of(leaves: Iterable[LeafRecord]) -> tuple[str, ...]:
    """Returns the ids of the segments that these leaves lie in, in the order of their first mention."""
    return tuple(dict.fromkeys(piece.segment for leaf in leaves for piece in leaf.pieces))


def seal_index(leaves: Iterable[LeafRecord], segments: Mapping[str, SegmentRecord] | None = None) -> bytes:
    """Returns the bytes of a `leaves.json`.

    Args:
        leaves: its lines.
        segments: {id: segment} for at least those that the leaves lie in.

    Raises:
        FormatError: an index that `parse_index` would refuse, or one beyond its limit.
    """
    leaves = list(leaves)
    used = segments_of(leaves)
    places = {identity: place for place, identity in enumerate(used)}
    entries = [_segment_to_json((segments or {})[identity]) for identity in used]
    apart = _names_apart(leaves, segments or {})
    for identity, found in apart.items():
        entries[places[identity]]["names"] = {str(offset): path for offset, path in found.items()}
    fields = {"segments": entries} if entries else {}
    data = sealed.seal("index", fields, rows=("leaves", [leaf.to_json(places) for leaf in leaves]))
    if len(data) > INDEX_LIMIT:
        raise FormatError(f"the index of {len(leaves)} leaves needs {len(data)} bytes and may have {INDEX_LIMIT}")
    return data


def _names_apart(leaves: Iterable[LeafRecord], segments: Mapping[str, SegmentRecord]) -> dict[str, dict[int, str]]:
    """Returns {segment: {offset: path}} of the datasets that are named otherwise than the leaf they belong to."""
    apart: dict[str, dict[int, str]] = {}
    for leaf in leaves:
        for piece in leaf.pieces:
            name = segments[piece.segment].names.get(piece.offset, leaf.path)
            if name != leaf.path:
                apart.setdefault(piece.segment, {})[piece.offset] = name
    return apart


def _segment_to_json(segment: SegmentRecord) -> dict[str, Any]:
    spans = [list(span) for span in segment.spans]
    return {"id": segment.id, "size": segment.size, "metadata": segment.digest, "spans": spans}


def _piece_to_json(piece: Piece, places: Mapping[str, int]) -> list[Any]:
    line = [places[piece.segment], piece.offset, piece.rows, piece.digest]
    return line if (piece.start, piece.stop) == (0, piece.rows) else [*line, piece.start, piece.stop]


def parse_index(
    data: bytes, path: object, *, file: str | None = None
) -> tuple[dict[str, LeafRecord], dict[str, SegmentRecord]]:
    """Returns {path: leaf} and {id: segment} of a `leaves.json`, in the order of the file.

    A leaf's size equals its stored shape times its item size; whether it lies within its file is the reader's to check.

    Args:
        data: the whole file.
        path: where it was, for messages.
        file: of an index of one of several ranks, whose leaves may be parts: the file that all of them lie in.

    Raises:
        DamagedError, UnsupportedFormatError, FormatError: as in `sealed.unseal`; also two leaves of one path.
    """
    leaves: dict[str, LeafRecord] = {}
    fields = sealed.unseal(data, "index", path=path)
    listed = parse_segments(fields)
    for line in fields.objects("leaves"):
        leaf = parse_leaf(line, listed, file=file)
        if leaf.path in leaves:
            raise FormatError(f"{path} lists {leaf.path!r} twice")
        leaves[leaf.path] = leaf
    check_used(fields, listed, leaves.values())
    return leaves, name_datasets({segment.id: segment for segment in listed}, leaves.values())


def parse_segments(fields: sealed.Fields) -> list[SegmentRecord]:
    """Returns the segments that an index names, in its order; raises FormatError."""
    listed = [_parse_segment(each) for each in fields.objects("segments")] if "segments" in fields.content else []
    if len(listed) > PIECES_LIMIT or len({segment.id for segment in listed}) != len(listed):
        raise fields.wrong("segments", f"a list of at most {PIECES_LIMIT} different segments")
    return listed


def check_used(fields: sealed.Fields, listed: Iterable[SegmentRecord], leaves: Iterable[LeafRecord]) -> None:
    """Raises FormatError unless the segments of an index are those that its leaves lie in."""
    if {segment.id for segment in listed} != set(segments_of(leaves)):
        raise fields.wrong("segments", "those that its leaves lie in")


def parse_segment_ids(data: bytes, path: object) -> frozenset[str]:
    """Returns the ids of the segments that a `leaves.json` names, a fraction of the time of `parse_index`.

    Raises:
        DamagedError, UnsupportedFormatError, FormatError: as in `sealed.unseal`.
    """
    fields = sealed.unseal(data, "index", path=path)
    if "segments" not in fields.content:
        return frozenset()
    return frozenset(each.id("id") for each in fields.objects("segments"))


def name_datasets(segments: Mapping[str, SegmentRecord], leaves: Iterable[LeafRecord]) -> dict[str, SegmentRecord]:
    """Returns the segments with the paths of all datasets that these leaves lie in."""
    named: dict[str, dict[int, str]] = {identity: {} for identity in segments}
    for leaf in leaves:
        for piece in leaf.pieces:
            named[piece.segment].setdefault(piece.offset, leaf.path)
    return {
        identity: replace(segment, names=named[identity] | dict(segment.names))
        for identity, segment in segments.items()
    }


def _parse_segment(fields: sealed.Fields) -> SegmentRecord:
    size = fields.integer("size")
    spans = fields.content.get("spans")
    if not isinstance(spans, list) or len(spans) > PIECES_LIMIT:
        raise fields.wrong("spans", f"a list of at most {PIECES_LIMIT} spans")
    position = 0
    for span in spans:
        if not _are_integers(span, 2) or not position <= span[0] < span[1] <= size:
            raise fields.wrong("spans", "a list of (start, stop) in the order of the file and within it")
        position = span[1]
    apart = fields.string_map("names") if "names" in fields.content else {}
    if not all(_OFFSET.fullmatch(offset) and is_path(path) for offset, path in apart.items()):
        raise fields.wrong("names", "an object of offsets and paths")
    return SegmentRecord(
        id=fields.id("id"),
        size=size,
        spans=tuple((start, stop) for start, stop in spans),
        digest=fields.digest("metadata"),
        names={int(offset): path for offset, path in apart.items()},
    )


def parse_leaf(fields: sealed.Fields, segments: list[SegmentRecord], *, file: str | None = None) -> LeafRecord:
    """Returns one line of an index; see `parse_index`."""
    path = fields.text("path")
    if not is_path(path):
        raise fields.wrong("path", "a component and a path in it")
    names.decode_part(path.partition("/")[0])
    shape = fields.integers("shape")
    stored_shape = fields.integers("stored_shape", limit=_MAX_DIMENSIONS) if "stored_shape" in fields.content else shape
    placed = "pieces" not in fields.content
    leaf = LeafRecord(
        path=path,
        kind=fields.text("kind", limit=200),
        dtype=fields.text("dtype"),
        shape=shape,
        stored=fields.text("stored", limit=20),
        stored_shape=stored_shape,
        file=fields.text("file", records.FILE_NAME) if placed else "",
        offset=fields.optional("offset", fields.integer) if placed else None,
        size=fields.integer("size"),
        digest=fields.digest("digest") if placed else "",
        part=fields.integers("part", limit=_MAX_DIMENSIONS) if "part" in fields.content else None,
    )
    if (leaf.kind == names.STRUCTURE_KIND) != (leaf.key == names.STRUCTURE):
        raise fields.wrong("kind", f"{names.STRUCTURE_KIND!r} for {names.STRUCTURE}, and for no other")
    if leaf.part is not None:
        if file is None:
            raise fields.wrong("part", "in an index of one of several ranks alone")
        check_part(leaf, fields.path)
    if placed and file is not None and leaf.file != file:
        raise fields.wrong("file", f"{file}, which this is the index of")
    if leaf.size != math.prod(stored_shape) * leaf.stored_dtype().itemsize:
        raise FormatError(f"{fields.path}: the size of {path!r} does not follow from its shape and dtype")
    check_shape(path, leaf.own_shape, stored_shape, leaf.size, fields.path)
    if not placed:
        return in_pieces(leaf, _parse_pieces(fields, leaf, segments))
    if (leaf.offset is None) != (leaf.size == 0):
        raise fields.wrong("offset", "null for an empty leaf, and for no other")
    return leaf


def check_shape(leaf: str, shape: tuple[int, ...], stored_shape: tuple[int, ...], size: int, path: object) -> None:
    """Raises FormatError for a leaf of `size` bytes that has too few of them for its shape, or a shape beyond numpy."""
    if math.prod(shape) > max(size, _FREE_ELEMENTS):
        raise FormatError(f"{path}: the shape of {leaf!r} has more elements than there are bytes")
    if any(math.prod(each or 1 for each in axes) > max(size, _EMPTY_AXES) for axes in (shape, stored_shape)):
        raise FormatError(f"{path}: the shape of {leaf!r} is beyond numpy")


def check_part(line: LeafRecord, path: object) -> None:
    """Raises FormatError for a part that does not lie within the whole."""
    assert line.part is not None
    axes = len(line.shape)
    if axes != len(line.part) or len(line.stored_shape) not in (axes, axes + 1):
        raise FormatError(f"{path}: the part of {line.path!r} has other axes than the whole")
    if any(start + size > whole for start, size, whole in zip(line.part, line.own_shape, line.shape, strict=True)):
        raise FormatError(f"{path}: the part of {line.path!r} does not lie within the whole")


def _parse_pieces(fields: sealed.Fields, leaf: LeafRecord, segments: list[SegmentRecord]) -> tuple[Piece, ...]:
    lines = fields.content["pieces"]
    if not isinstance(lines, list) or not 0 < len(lines) <= PIECES_LIMIT or leaf.size == 0 or not leaf.shape:
        raise fields.wrong("pieces", f"a list of 1 to {PIECES_LIMIT} pieces of a leaf that is not empty")
    row_size = leaf.row_size
    pieces = tuple(_parse_piece(fields, line, row_size, segments) for line in lines)
    if sum(piece.stop - piece.start for piece in pieces) != leaf.stored_shape[0]:
        raise fields.wrong("pieces", "as many rows as the leaf has")
    return pieces


def _parse_piece(fields: sealed.Fields, line: Any, row_size: int, segments: list[SegmentRecord]) -> Piece:
    # errors are made where they are raised: an index may have a thousand of these lines
    if not isinstance(line, list) or len(line) not in (4, 6) or not isinstance(line[3], str):
        raise fields.wrong("pieces", "lists of segment, offset, rows, digest and perhaps start, stop")
    if not _are_integers([*line[:3], *line[4:]], len(line) - 1) or line[0] >= len(segments):
        raise fields.wrong("pieces", "lists of segment, offset, rows, digest and perhaps start, stop")
    segment, offset, rows = segments[line[0]], line[1], line[2]
    start, stop = line[4:] or (0, rows)
    if not start < stop <= rows or offset + rows * row_size > segment.size:
        raise fields.wrong("pieces", "rows that lie within their segment")
    return Piece(segment.id, offset, rows, digests.check_form(line[3]), start, stop)


def _are_integers(values: Any, count: int) -> bool:
    if not isinstance(values, list) or len(values) != count:
        return False
    return all(type(value) is int and 0 <= value < 2**62 for value in values)


def is_path(path: str) -> bool:
    """Returns whether a text is the path of a leaf: a component and names below it, percent-encoded."""
    parts = path.split("/")
    return 2 <= len(parts) <= _MAX_PARTS and all(_PART.fullmatch(part) and part not in (".", "..") for part in parts)


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
