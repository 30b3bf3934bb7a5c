"""The handle of a replay buffer: which rows lie in which segments, and which ones a save has to write.

Rows have numbers of their own here, counted up and never given twice; what the ring says between two looks makes the
next numbers. A table holds, for each column, where the rows lie that are durable. So whatever happened since the last
save (others that failed, rows that were overwritten, segments that are gone), a capture holds what the table lacks.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from simckpt.errors import CaptureError, ReplayWarning, RestoreError, SimckptError, UnsupportedStateError
from simckpt.replay.adapter import Column, Path, ReplayAdapter, Ring, flatten_columns, nest_columns
from simckpt.replay.audit import Audit
from simckpt.replay.fitting import fitted_ring, newest_rows, saved_state, state_problems
from simckpt.replay.rows import LiveRows
from simckpt.state import LogColumn, Piece, copy_tree
from simckpt.state.components import mismatch
from simckpt.state.paths import path_part
from simckpt.state.walk import qualified_name

_RESERVED = ("ring", "extra")


@dataclass(frozen=True, slots=True)
class _Block:
    """Rows from number `first` on, and where they lie."""

    first: int
    piece: Piece

    @property
    def end(self) -> int:
        return self.first + self.piece.stop - self.piece.start


@dataclass(frozen=True, slots=True)
class _Span:
    """The rows of the capture or of the applied state whose pieces are yet to be told."""

    first: int
    end: int
    restored: bool


class ReplayHandle:
    """Captures and restores a replay buffer through its adapter; a `LogHandle`.

    A restore has no undo for the rows: they are checked as far as they can be before the first is written.

    Attributes:
        name: of the component.
        buffer: the live one.
        adapter: how it is read and set.
    """

    def __init__(self, name: str, buffer: Any, adapter: ReplayAdapter) -> None:
        self.name = name
        self.buffer = buffer
        self.adapter = adapter
        self._table: dict[Path, list[_Block]] = {}
        self._audit = Audit()
        self._span: _Span | None = None
        self._seen: Ring | None = None
        self._end = 0
        self._lineage = lineage_of(buffer)
        self._columns()

    def capture(self) -> dict[str, Any]:
        """Returns the state: `LogColumn`s with the rows that the table lacks, mutable columns whole, the rest.

        Raises:
            CaptureError: the adapter contradicts itself, or a part of the buffer cannot be captured.
        """
        columns = self._columns()
        ring = self._look(columns)
        rows = LiveRows({path: column.array for path, column in columns.items()}, ring, self._end)
        self._trim(rows.first, columns)
        changed = self._look_back(rows, columns)
        captured: dict[Path, Any] = {}
        for path, column in columns.items():
            if column.mutable:
                captured[path] = rows.copy(path, rows.first, rows.end)
                continue
            blocks = self._table.get(path, [])
            new = rows.copy(path, blocks[-1].end if blocks else rows.first, rows.end)
            captured[path] = LogColumn(new, ring.filled, tuple(block.piece for block in blocks))
        try:
            extra = copy_tree(self.adapter.extra(self.buffer))
        except UnsupportedStateError as error:
            where = f"{self.name}/extra/{error.path}" if error.path else self.name
            raise UnsupportedStateError(
                f"component {self.name!r}: {error}", path=where, type_name=error.type_name
            ) from error
        self._note(rows, columns)
        self._span = _Span(rows.first, rows.end, restored=False)
        if changed:
            self._warn(changed, counted=ring.added is not None)
        return saved_state(nest_columns(captured), ring, extra)

    def segments(self) -> Collection[str]:
        """Returns the ids of the segments that the next capture would refer to."""
        return {block.piece.segment for blocks in self._table.values() for block in blocks}

    def forget(self, segments: Collection[str]) -> None:
        """Makes the next capture hold the rows of these segments, and all newer ones, as new."""
        for blocks in self._table.values():
            lost = next((place for place, block in enumerate(blocks) if block.piece.segment in segments), len(blocks))
            del blocks[lost:]

    def committed(self, pieces: Mapping[str, tuple[Piece, ...]]) -> None:
        """Takes note of where all rows of the last capture lie."""
        if self._span is not None and not self._span.restored and self._lineage is lineage_of(self.buffer):
            self._take(self._span, pieces)

    def restored(self, pieces: Mapping[str, tuple[Piece, ...]]) -> None:
        """Takes note of where all rows of the state lie that was applied last."""
        if self._span is not None and self._span.restored and self._lineage is lineage_of(self.buffer):
            self._take(self._span, pieces)

    def validate(self, state: Any) -> None:
        """Checks that a state fits the buffer; another capacity does.

        Raises:
            StateMismatchError: with every problem found.
        """
        problems = self._problems(state)
        if problems:
            raise mismatch(self.name, problems)

    def apply(self, state: Any) -> None:
        """Puts a state into the buffer. If it has less capacity, the oldest rows are dropped, with a `ReplayWarning`.

        Raises:
            RestoreError: the buffer did not take it, and may be half changed.
        """
        self.validate(state)
        saved = Ring(**state["ring"])
        ring = fitted_ring(saved, self._capacity(state["extra"]))
        dropped = saved.filled - ring.filled
        if dropped:
            # before anything is changed, for a program may turn warnings into errors
            warnings.warn(
                f"component {self.name!r}: the checkpoint has {saved.filled} rows, the replay buffer takes "
                f"{ring.capacity}: the {dropped} oldest are dropped",
                ReplayWarning,
                stacklevel=2,
            )
        columns = {name: value for name, value in state.items() if name not in _RESERVED}
        self._lineage = new_lineage(self.buffer)
        self._void()
        try:
            self.adapter.load(self.buffer, newest_rows(columns, ring.filled), ring, copy_tree(state["extra"]))
        except SimckptError:
            raise
        except Exception as error:
            raise RestoreError(
                f"component {self.name!r}: its replay adapter's load() raised {type(error).__name__}: {error}"
            ) from error
        live = self._columns()
        self._seen = self._checked_ring(live)
        self._end = saved.filled
        self._span = _Span(0, saved.filled, restored=True)
        self._note(LiveRows({path: column.array for path, column in live.items()}, self._seen, self._end), live)

    def attributes(self, paths: Iterable[str]) -> dict[str, dict[str, str]]:
        """Returns texts that explain the columns in a file."""
        found = {
            "": {
                "class": qualified_name(type(self.buffer)),
                "description": "Replay buffer: the rows of each column from the oldest to the newest.",
            }
        }
        for path in paths:
            part = path.partition("/")[0]
            if part == "extra":
                found["extra"] = {"description": "What the buffer's next adds and samples depend on besides its rows."}
            elif part != "ring":
                found[path] = {"axes": "row, oldest first; then as in the buffer"}
        return found

    def _columns(self) -> dict[Path, Column]:
        """Returns the live columns, checked."""
        columns = flatten_columns(self.adapter.columns(self.buffer))
        adapter = type(self.adapter).__name__
        for path, column in columns.items():
            where = "/".join((self.name, *path))
            if path[0] in _RESERVED or not isinstance(column, Column):
                raise CaptureError(
                    f"{where}: {adapter}.columns() must give Columns, under other names than {_RESERVED}"
                )
            if getattr(getattr(column.array, "dtype", None), "hasobject", False):
                raise UnsupportedStateError(
                    f"{where} is a column of Python objects, which no file can hold: use a numeric dtype",
                    path=where,
                    type_name="numpy.ndarray",
                )
        return columns

    def _checked_ring(self, columns: Mapping[Path, Column]) -> Ring:
        ring = self.adapter.ring(self.buffer)
        whole = 0 <= ring.filled <= ring.capacity and 0 <= ring.cursor < ring.capacity
        if not whole or (ring.added is not None and ring.added < ring.filled):
            raise CaptureError(f"component {self.name!r}: its replay adapter says {ring}, which cannot be")
        for path, column in columns.items():
            if len(column.array) != ring.capacity:
                where = "/".join((self.name, *path))
                raise CaptureError(f"{where} has {len(column.array)} rows, but the capacity is {ring.capacity}")
        return ring

    def _look(self, columns: Mapping[Path, Column]) -> Ring:
        """Returns the ring, after counting the rows that were added since the last look."""
        ring = self._checked_ring(columns)
        lineage = lineage_of(self.buffer)
        if self._seen is None or lineage is not self._lineage or set(self._table) - set(columns):
            self._void()
            self._end += ring.filled
        else:
            added = rows_added(self._seen, ring)
            if added is None:
                self._void()
            # numbers of a ring that was emptied or loaded start behind all that were ever given
            self._end += ring.filled if added is None else added
        self._lineage, self._seen = lineage, ring
        return ring

    def _trim(self, first: int, columns: Mapping[Path, Column]) -> None:
        """Drops from the table what the ring has overwritten, for those rows do not come back."""
        for path, blocks in list(self._table.items()):
            kept = [block for block in blocks if block.end > first]
            if columns[path].mutable or not kept or kept[0].first > first:
                del self._table[path]
                continue
            ahead = first - kept[0].first
            kept[0] = _Block(first, replace(kept[0].piece, start=kept[0].piece.start + ahead))
            self._table[path] = kept

    def _look_back(self, rows: LiveRows, columns: Mapping[Path, Column]) -> list[Path]:
        """Returns the columns whose saved rows have changed, after giving the table up if there are any."""
        covered = max((blocks[-1].end for blocks in self._table.values()), default=rows.first)
        audited = _audited(rows, columns)
        if not audited.arrays:
            return []
        changed = self._audit.find_changed(audited, covered)
        # with no saved row left to look at, nothing tells whether a ring without a counter went round
        if changed or (rows.ring.added is None and not self._audit.has_rows):
            self._void()
        return changed

    def _note(self, rows: LiveRows, columns: Mapping[Path, Column]) -> None:
        audited = _audited(rows, columns)
        if audited.arrays:
            ends = [blocks[-1].end for blocks in self._table.values()]
            self._audit.note(audited, max(min(ends, default=rows.first), rows.first))

    def _void(self) -> None:
        self._table.clear()
        self._audit.clear()
        self._span = None

    def _take(self, span: _Span, pieces: Mapping[str, tuple[Piece, ...]]) -> None:
        self._span = None
        self._table.clear()
        for path, column in self._columns().items():
            found = pieces.get("/".join(path_part(name) for name in path), ())
            blocks: list[_Block] = []
            for piece in found:
                blocks.append(_Block(blocks[-1].end if blocks else span.first, piece))
            # anything else was not captured as a log, or lies in no segment: the next capture holds it whole
            if blocks and blocks[-1].end == span.end and not column.mutable:
                self._table[path] = blocks

    def _problems(self, state: Any) -> list[str]:
        live = flatten_columns(self.adapter.columns(self.buffer))
        problems = state_problems(state, live)
        if problems:
            return problems
        columns = {name: value for name, value in state.items() if name not in _RESERVED}
        try:
            ring = fitted_ring(Ring(**state["ring"]), self._capacity(state["extra"]))
            return self.adapter.find_problems(self.buffer, newest_rows(columns, ring.filled), ring, state["extra"])
        except SimckptError as error:
            return [str(error)]
        except Exception as error:
            return [f"its replay adapter's find_problems() raised {type(error).__name__}: {error}"]

    def _capacity(self, extra: Any) -> int:
        """Returns the rows that the buffer has room for; one without arrays may have to see what comes."""
        ask = getattr(self.adapter, "capacity_for", None)
        return int(self.adapter.ring(self.buffer).capacity if ask is None else ask(self.buffer, extra))

    def _warn(self, changed: list[Path], *, counted: bool) -> None:
        names = ", ".join("/".join(path) for path in changed)
        another = "" if counted else " (or more rows than its capacity were added since the last save)"
        warnings.warn(
            f"component {self.name!r}: rows of {names} have changed since they were saved{another}, so all rows are "
            "written again. If the program rewrites them, checkpoints saved in between may hold the older values: "
            "declare it mutable in the buffer's replay adapter",
            ReplayWarning,
            stacklevel=3,
        )


def rows_added(before: Ring, now: Ring) -> int | None:
    """Returns how many rows were added between two looks at a ring; None if it was emptied, loaded or resized.

    Of a ring that does not count its rows, it is the smallest number that would explain what is seen.
    """
    moved = (now.cursor - before.cursor) % now.capacity
    if before.capacity != now.capacity or (before.added is None) != (now.added is None):
        return None
    added = moved if now.added is None or before.added is None else now.added - before.added
    expected = min(before.filled + added, now.capacity)
    # a full ring may keep one slot free, as memory-optimised ones do
    fits = now.filled == expected or (expected == now.capacity and now.filled == now.capacity - 1)
    return added if added >= 0 and added % now.capacity == moved and fits else None


def _audited(rows: LiveRows, columns: Mapping[Path, Column]) -> LiveRows:
    watched = {path for path, column in columns.items() if not (column.mutable or column.sealed)}
    arrays = {path: array for path, array in rows.arrays.items() if path in watched}
    return LiveRows(arrays, rows.ring, rows.end)


# by id, for a buffer may define equality: what its rows descend from. Every restore through any handle makes it another
_lineages: dict[int, tuple[weakref.ref[Any], object]] = {}


def lineage_of(buffer: Any) -> object:
    """Returns what is the same object as long as a live buffer was not restored."""
    known = _lineages.get(id(buffer))
    return new_lineage(buffer) if known is None or known[0]() is not buffer else known[1]


def new_lineage(buffer: Any) -> object:
    """Returns the lineage of a buffer that was restored just now."""
    token = object()
    key = id(buffer)

    def forget(dead: weakref.ref[Any]) -> None:
        if key in _lineages and _lineages[key][0] is dead:
            del _lineages[key]

    _lineages[key] = (weakref.ref(buffer, forget), token)
    return token
