"""Checkpoints of several ranks: `shards.json`, which names their files, and how their indexes become one.

FORMAT.md states the rules. A thousand indexes have a million lines, most of which differ from those of other ranks in
places and digests alone: these are read without JSON, which they must match to the letter.
"""

from __future__ import annotations

import functools
import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from simckpt.errors import DamagedError, FormatError
from simckpt.storage import digests, index, names, records, sealed
from simckpt.storage.index import LeafRecord, Part, SegmentRecord
from simckpt.storage.records import FileRecord, Shard, shards_of

SHARDS_LIMIT = 1 << 25  # [bytes] of shards.json: 16,384 shards, and the segments of a checkpoint
INDEXES_LIMIT = 1 << 30  # [bytes] of all indexes of a checkpoint: three million leaves and parts
SEGMENTS_LIMIT = 200_000  # of all shards of a checkpoint
_CUT_AXES = 8  # along which the parts of one leaf may be cut: each doubles the corners that are counted

Box = tuple[Any, ...]  # what numpy takes of an array: a slice for each axis

_HEAD = re.compile(rb'\A\{\n "format": "simckpt index",\n "version": "[0-9.]{3,9}",\n "leaves": \[\n')
_LINE = (
    r'  \{"path": "([ !#-\[\]-~]{1,4096})", ("kind": "[ !#-\[\]-~]*", "dtype": "[ !#-\[\]-~]*", "shape": \[[0-9, ]*\], '
    r'"stored": "[ !#-\[\]-~]*"), "file": "([!#-\[\]-~]*)", "offset": (null|0|[1-9][0-9]{0,17}), '
    r'"size": (0|[1-9][0-9]{0,17}), "digest": "(xxh3-128:[0-9a-f]{32})"'
)
_WHOLE_ROW = re.compile(_LINE + r"\}")
_PART_ROW = re.compile(_LINE + r', "stored_shape": \[[0-9, ]*\], "part": \[[0-9, ]*\]\}')
# columns of lines that were separated by what stands at the end of each here, so that none of them can hold it
_OFFSETS = re.compile(r'(?:offset": (?:null|0|[1-9][0-9]{0,17}),\n)*')
_DIGESTS = re.compile(r'(?:digest": "xxh3-128:[0-9a-f]{32}",\n)*')
_NO_OFFSET = 'offset": null'
_INTEGERS = re.compile(r"\[((0|[1-9][0-9]{0,17})(, (0|[1-9][0-9]{0,17}))*)?\]")
_part = functools.partial(tuple.__new__, Part)


@dataclass(frozen=True)
class Listing:
    """`shards.json`: the files of all ranks, by which `commit.json` vouches for each.

    Attributes:
        states: the state file of each rank.
        indexes: its index.
        segments: ids of the segments that the checkpoint uses.
    """

    states: tuple[FileRecord, ...]
    indexes: tuple[FileRecord, ...]
    segments: tuple[str, ...] = ()

    @property
    def files(self) -> tuple[FileRecord, ...]:
        """All of them."""
        return (*self.states, *self.indexes)

    def to_bytes(self) -> bytes:
        """Returns the record as written to disk; the names of the files follow from its lines."""
        rows = [
            {
                "state": {"size": state.size, "metadata": state.digest},
                "leaves": {"size": leaves.size, "digest": leaves.digest},
            }
            for state, leaves in zip(self.states, self.indexes, strict=True)
        ]
        return sealed.seal("shards", {"segments": list(self.segments)}, rows=("shards", rows))


def parse_listing(data: bytes, path: object, *, count: int | None = None) -> Listing:
    """Returns the record of a `shards.json`.

    Args:
        data: the whole file.
        path: where it was, for messages.
        count: of the shards, as the commit record has it; None if that is not known.

    Raises:
        DamagedError, UnsupportedFormatError, FormatError: as in `sealed.unseal`; also another count, or indexes
            that are too large together.
    """
    fields = sealed.unseal(data, "shards", path=path)
    rows = fields.objects("shards")
    if not 1 <= len(rows) <= records.MAX_SHARDS or count not in (None, len(rows)):
        raise fields.wrong("shards", f"a list of {count or f'1 to {records.MAX_SHARDS}'} shards")
    states, indexes = [], []
    for shard, row in zip(shards_of(len(rows)), rows, strict=True):
        state, leaves = row.object("state"), row.object("leaves")
        states.append(FileRecord(shard.state_file, state.integer("size"), state.digest("metadata"), "metadata"))
        indexes.append(FileRecord(shard.index_file, leaves.integer("size"), leaves.digest("digest"), "file"))
    total = sum(file.size for file in indexes)
    if total > INDEXES_LIMIT:
        raise FormatError(f"{path}: the indexes have {total} bytes together and may have {INDEXES_LIMIT}")
    segments = fields.texts("segments", limit=SEGMENTS_LIMIT)
    if not all(map(names.ID.fullmatch, segments)) or len(set(segments)) != len(segments):
        raise fields.wrong("segments", "different ids of segments")
    return Listing(tuple(states), tuple(indexes), segments)


@dataclass(frozen=True)
class _Form:
    """What all parts of one leaf have in common.

    Attributes:
        leaf: the line of the first of them.
        itemsize: of its stored dtype [bytes].
        characters: how many elements of the file are one of the leaf.
        parts: as far as they are known.
        fits: identities of what the lines of the parts say of places and shapes, of those that were read quickly.
    """

    leaf: LeafRecord
    itemsize: int
    characters: tuple[int, ...]
    parts: list[Part] = field(default_factory=list)
    fits: list[int] = field(default_factory=list)

    def check(self, other: LeafRecord, path: object) -> None:
        """Raises FormatError if another line is not of the same leaf."""
        one = self.leaf
        same = (one.kind, one.dtype, one.shape, one.stored) == (other.kind, other.dtype, other.shape, other.stored)
        if not same or other.stored_shape[len(other.shape) :] != self.characters:
            raise FormatError(f"{path}: the part of {other.path!r} differs in kind, dtype or shape from another one")


@dataclass(frozen=True, slots=True)
class _Fit:
    """What the texts of many lines say.

    Attributes:
        stored_shape: of the part.
        start: where it starts in the whole.
        characters: see `_Form`.
        nbytes: its size.
        size: the same, as a line must have it.
    """

    stored_shape: tuple[int, ...]
    start: tuple[int, ...]
    characters: tuple[int, ...]
    nbytes: int
    size: str


_Fits = dict[tuple[str, str], _Fit]  # by the texts of a shape and a start


@dataclass(frozen=True, slots=True)
class _Known:
    """Lines of parts of leaves that earlier lines told of, which the next rank most often has as well.

    Attributes:
        heads: the lines up to the name of their file.
        forms: of their leaves.
        fits: what is known of leaves of the same dtype and shape.
        paths: of these leaves.
    """

    heads: list[str]
    forms: list[_Form]
    fits: list[_Fits]
    paths: frozenset[str]


@dataclass
class Merger:
    """Joins the indexes of all ranks, one after the other; what is kept of each is little."""

    _whole: dict[str, LeafRecord] = field(default_factory=dict)
    _forms: dict[str, _Form] = field(default_factory=dict)
    _segments: dict[str, SegmentRecord] = field(default_factory=dict)
    _plain: dict[str, LeafRecord] = field(default_factory=dict)  # by what lines say of kind, dtype and shape
    _fits: dict[str, _Fits] = field(default_factory=dict)  # likewise
    _quick: dict[str, tuple[_Form, _Fits]] = field(default_factory=dict)  # by the head of a line
    _last: _Known = field(default_factory=lambda: _Known([], [], [], frozenset()))
    _components: set[str] = field(default_factory=set)

    def add(self, data: bytes, path: object, shard: Shard) -> None:
        """Takes the index of one rank.

        Args:
            data: the whole file.
            path: where it was, for messages.
            shard: which rank's.

        Raises:
            DamagedError, UnsupportedFormatError, FormatError: as in `index.parse_index`; also a leaf that another rank
                has, or a part that does not fit the others.
        """
        rows = _rows(data, path)
        if rows is None:
            leaves, segments = index.parse_index(data, path, file=shard.state_file)
            for leaf in leaves.values():
                self._add(leaf, path, shard)
            self._add_segments(segments, path)
            return
        rows, known = self._add_parts(rows, path, shard)
        seen: set[str] = set()
        for row in rows:
            leaf = self._plain_leaf(row, shard) or self._parsed(row, path, shard)
            if leaf.path in seen or leaf.path in known:
                raise FormatError(f"{path} lists {leaf.path!r} twice")
            seen.add(leaf.path)
            self._add(leaf, path, shard)
            self._learn(row, leaf)

    def _add_parts(self, rows: list[str], path: object, shard: Shard) -> tuple[list[str], frozenset[str]]:
        """Takes the lines of parts of leaves that are known; returns the others, and the paths of those leaves.

        There are a million for a thousand ranks: it goes by columns, and what is the same for many is looked at once.
        """
        split = [row.partition(', "file": "') for row in rows]
        found = [each for each in split if each[0] in self._quick]
        columns = [tail.split(', "') for _, _, tail in found]
        if not found or {*map(len, columns)} != {6}:
            return rows, frozenset()
        files, offsets, sizes, told, shapes, starts = zip(*columns, strict=True)
        in_order = all(
            pattern.fullmatch(",\n".join((*column, ""))) for pattern, column in ((_OFFSETS, offsets), (_DIGESTS, told))
        )
        if {*files} != {f'{shard.state_file}"'} or not in_order:
            return rows, frozenset()
        last = self._know([head for head, _, _ in found], path)
        keys = zip(shapes, starts, strict=True)
        fits = [
            known.get(key) or self._fit(form, known, key, path)
            for form, known, key in zip(last.forms, last.fits, keys, strict=True)
        ]
        empty = [offset == _NO_OFFSET for offset in offsets]
        for form, fit, size, nothing in zip(last.forms, fits, sizes, empty, strict=True):
            if fit.size != size or nothing != (not fit.nbytes) or fit.characters != form.characters:
                raise FormatError(
                    f"{path}: the size or shape of the part of {form.leaf.path!r} does not follow from its dtype"
                )
        rank, name = shard.number, shard.state_file
        places = [None if offset == _NO_OFFSET else int(offset[9:]) for offset in offsets]
        for form, fit, place, digest in zip(last.forms, fits, places, told, strict=True):
            form.parts.append(_part((rank, name, place, fit.nbytes, digest[10:-1], fit.start, fit.stored_shape, ())))
            form.fits.append(id(fit))
        others = [row for row, each in zip(rows, split, strict=True) if each[0] not in self._quick]
        return others, last.paths

    def _know(self, heads: list[str], path: object) -> _Known:
        if heads != self._last.heads:
            known = [self._quick[head] for head in heads]
            paths = frozenset(form.leaf.path for form, _ in known)
            if len(paths) != len(heads):
                (twice, _), *_ = Counter(form.leaf.path for form, _ in known).most_common(1)
                raise FormatError(f"{path} lists {twice!r} twice")
            self._last = _Known(heads, [form for form, _ in known], [fits for _, fits in known], paths)
        return self._last

    def _plain_leaf(self, row: str, shard: Shard) -> LeafRecord | None:
        """Returns the leaf of a line like one that was read before but for path, place and digest, or None."""
        match = _WHOLE_ROW.fullmatch(row)
        like = None if match is None else self._plain.get(match[2])
        if match is None or like is None:
            return None
        path, _, file, offset, size, digest = match.groups()
        fits = file == shard.state_file and size == str(like.size) and (offset == "null") == (like.size == 0)
        component, _, key = path.partition("/")
        alike = fits and (key == names.STRUCTURE) == (like.key == names.STRUCTURE)
        if not alike or component not in self._components or not index.is_path(path):
            return None  # whoever parses it says why
        place = None if offset == "null" else int(offset)
        return LeafRecord(
            path, like.kind, like.dtype, like.shape, like.stored, like.stored_shape, file, place, like.size, digest
        )

    def _parsed(self, row: str, path: object, shard: Shard) -> LeafRecord:
        return index.parse_leaf(sealed.parse(row.encode(), path), [], file=shard.state_file)

    def _learn(self, row: str, leaf: LeafRecord) -> None:
        """Takes note of a line that was found to be right, so that those like it need less."""
        self._components.add(leaf.path.partition("/")[0])
        if leaf.part is None and (match := _WHOLE_ROW.fullmatch(row)):
            self._plain.setdefault(match[2], leaf)
        elif leaf.part is not None and (match := _PART_ROW.fullmatch(row)):
            known = self._fits.setdefault(match[2], {})
            self._quick[row.partition(', "file": "')[0]] = (self._forms[leaf.path], known)

    def _fit(self, form: _Form, known: _Fits, key: tuple[str, str], path: object) -> _Fit:
        """Returns what follows from the texts of a line, now that it was found to lie within the whole."""
        shape, start = key[0].removeprefix('stored_shape": '), key[1].removeprefix('part": ').removesuffix("}")
        if f'stored_shape": {shape}' != key[0] or f'part": {start}}}' != key[1]:
            raise FormatError(
                f"{path} has a line with {key[0][:80]!r} or {key[1][:80]!r} in place of lists of integers"
            )
        if not _INTEGERS.fullmatch(shape) or not _INTEGERS.fullmatch(start):
            raise FormatError(f"{path} has a line with {shape[:80]!r} or {start[:80]!r} in place of lists of integers")
        stored_shape, place = tuple(json.loads(shape)), tuple(json.loads(start))
        whole, axes = form.leaf.shape, len(form.leaf.shape)
        nbytes = math.prod(stored_shape) * form.itemsize
        line = replace(form.leaf, stored_shape=stored_shape, part=place, size=nbytes)
        index.check_part(line, path)
        index.check_shape(line.path, line.own_shape, stored_shape, nbytes, path)
        assert len(place) == axes == len(whole)
        fit = _Fit(stored_shape, place, stored_shape[axes:], nbytes, f'size": {nbytes}')
        known[key] = fit
        return fit

    def _add(self, leaf: LeafRecord, path: object, shard: Shard) -> None:
        if leaf.path in self._whole or (leaf.part is None and leaf.path in self._forms):
            raise FormatError(f"{path} lists {leaf.path!r}, which another rank has already")
        if leaf.part is None:
            self._whole[leaf.path] = replace(leaf, rank=shard.number)
            return
        form = self._forms.get(leaf.path)
        if form is None:
            form = _Form(leaf, leaf.stored_dtype().itemsize, leaf.stored_shape[len(leaf.shape) :])
            self._forms[leaf.path] = form
        form.check(leaf, path)
        form.parts.append(
            Part(
                shard.number, leaf.file, leaf.offset, leaf.size, leaf.digest, leaf.part, leaf.stored_shape, leaf.pieces
            )
        )

    def _add_segments(self, segments: Mapping[str, SegmentRecord], path: object) -> None:
        for identity, segment in segments.items():
            known = self._segments.get(identity)
            if known is not None:
                if (known.size, known.spans, known.digest) != (segment.size, segment.spans, segment.digest):
                    raise FormatError(
                        f"{path}: the segment {identity} is another one than by the index of another rank"
                    )
                segment = replace(known, names={**known.names, **segment.names})
            self._segments[identity] = segment

    def merged(self, path: object) -> tuple[dict[str, LeafRecord], dict[str, SegmentRecord]]:
        """Returns {path: leaf} and {id: segment} of the whole checkpoint, components one after the other.

        Args:
            path: of the checkpoint, for messages.

        Raises:
            FormatError: the parts of a leaf do not tile it exactly, or leaves lie below another leaf.
        """
        found = dict(self._whole)
        # most leaves are cut like others, and then one look at the tiling will do
        tiled: dict[tuple[Any, ...], bool] = {}
        for name, form in self._forms.items():
            first = form.parts[0]
            key = (form.leaf.shape, first.start, first.stored_shape, *form.fits)
            # says where all parts lie only if all but the first were read quickly
            is_whole = len(form.fits) == len(form.parts) - 1
            fits = tiled.get(key) if is_whole else None
            if fits is None:
                fits = tiles(form.leaf.shape, [(part.start, part.shape) for part in form.parts])
                if is_whole:
                    tiled[key] = fits
            if not fits:
                whole = list(form.leaf.shape)
                raise FormatError(
                    f"{path}: the {len(form.parts)} parts of {name!r} do not make up the whole of {whole}"
                )
            found[name] = _joined(form, path)
        _check_nesting(found, path)
        components: dict[str, list[LeafRecord]] = {}
        for leaf in found.values():
            components.setdefault(leaf.path.partition("/")[0], []).append(leaf)
        ordered = (
            leaf
            for leaves in components.values()
            for leaf in sorted(leaves, key=lambda leaf: leaf.key == names.STRUCTURE)
        )
        return {leaf.path: leaf for leaf in ordered}, self._segments


def _joined(form: _Form, path: object) -> LeafRecord:
    leaf, shape, parts = form.leaf, form.leaf.shape, form.parts
    stored_shape = (*shape, *form.characters)
    size = math.prod(stored_shape) * form.itemsize
    # an array of no elements has any number of rows, and one of a dtype without bytes as well
    index.check_shape(leaf.path, shape, stored_shape, size, path)
    return replace(
        leaf,
        file="",
        offset=None,
        size=size,
        digest="",
        stored_shape=stored_shape,
        pieces=(),
        part=None,
        parts=tuple(parts),
    )


def _check_nesting(leaves: Mapping[str, LeafRecord], path: object) -> None:
    """Raises FormatError for a leaf below another one: what one file refuses, several files could hold."""
    for name in leaves:
        above = name.rpartition("/")[0]
        while above:
            if above in leaves:
                raise FormatError(f"{path}: {name!r} cannot lie below {above!r}, which is a leaf itself")
            above = above.rpartition("/")[0]


def _rows(data: bytes, path: object) -> list[str] | None:
    """Returns the lines of an index if it is written as simckpt does and has no segments, else None.

    Raises:
        DamagedError, FormatError: it is not whole, or another one.
    """
    head = _HEAD.match(data)
    if head is None or not data.endswith(b"}\n") or not data.isascii():
        return None
    stop = data.rfind(b'\n ],\n "digest": "')
    if stop < head.end():
        return None
    # its version, digest and the like, as of any record; the lines are looked at one by one
    sealed.check_digest(data, path=path)
    fields = sealed.unseal(sealed.resealed(data[: head.end()] + b" ]"), "index", path=path)
    assert fields.content["leaves"] == []
    # a rank that has nothing of its own, and nothing to write of what all share, has no lines
    lines = str(memoryview(data)[head.end() : stop], "ascii")
    return lines.split(",\n") if lines else []


def tiles(shape: Sequence[int], boxes: Iterable[tuple[tuple[int, ...], tuple[int, ...]]]) -> bool:
    """Returns whether boxes make up a whole array, each element in exactly one of them.

    Each box adds its corners, those with an odd number of ends with the other sign. What remains after they have
    cancelled each other is the mixed difference of how often each element is covered, so the boxes cover the whole once
    if and only if what remains are the corners of the whole. That takes a number of steps in proportion to the boxes.

    Args:
        shape: of the whole.
        boxes: (start, shape) of each; one without elements covers nothing.
    """
    found = [(start, own) for start, own in boxes]
    if 0 in shape or not found:
        return bool(found) and all(0 in own for _, own in found)
    found = [(start, own) for start, own in found if 0 not in own]
    whole = tuple(shape)
    cut = [axis for axis in range(len(whole)) if any(own[axis] != whole[axis] for _, own in found)]
    if any(start[axis] for start, _ in found for axis in range(len(whole)) if axis not in cut):
        return False
    if not cut:
        return len(found) == 1
    if len(cut) == 1:
        (axis,) = cut
        position = 0
        for begin, length in sorted((start[axis], own[axis]) for start, own in found):
            if begin != position:
                return False
            position += length
        return position == whole[axis]
    if len(cut) > _CUT_AXES:
        return False
    remaining: dict[tuple[int, ...], int] = {}
    for start, own in found:
        _add_corners(remaining, [(start[axis], start[axis] + own[axis]) for axis in cut], 1)
    _add_corners(remaining, [(0, whole[axis]) for axis in cut], -1)
    return not any(remaining.values())


def _add_corners(corners: dict[tuple[int, ...], int], spans: list[tuple[int, int]], sign: int) -> None:
    found: list[tuple[tuple[int, ...], int]] = [((), sign)]
    for begin, end in spans:
        found = [each for corner, one in found for each in (((*corner, begin), one), ((*corner, end), -one))]
    for corner, one in found:
        corners[corner] = corners.get(corner, 0) + one


def meets(part: Part, offset: Sequence[int], shape: Sequence[int]) -> tuple[Box, Box] | None:
    """Returns where a part and a box of the same leaf have elements in common, as seen from each; None if nowhere."""
    inside, there = [], []
    for begin, length, first, size in zip(part.start, part.shape, offset, shape, strict=True):
        low, high = max(begin, first), min(begin + length, first + size)
        if low >= high:
            return None
        inside.append(slice(low - begin, high - begin))
        there.append(slice(low - first, high - first))
    return (*inside, ...), (*there, ...)


def check_index(data: bytes, file: FileRecord, path: object) -> bytes:
    """Returns the bytes of a file that another record vouches for; raises DamagedError if they are others."""
    if len(data) != file.size or not digests.matches(data, file.digest):
        raise DamagedError(f"{path} is damaged: its bytes differ from the digest of its record", path=str(path))
    return data


def form_of(leaves: Iterable[LeafRecord]) -> str:
    """Returns a digest of what of an index decides whether it can be merged with others: all but places and digests."""
    lines: list[Any] = [
        (leaf.path, leaf.kind, leaf.dtype, leaf.shape, leaf.stored, leaf.stored_shape, leaf.part) for leaf in leaves
    ]
    return digests.digest(repr(lines).encode())
