"""`LogStore`: a store in memory for one log, which keeps rows in segments as a store on disk does."""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from simckpt import state

Segment = dict[str, np.ndarray[Any, Any]]


@dataclass(frozen=True, eq=False)
class LogCheckpoint:
    """What `LogStore.save` keeps.

    Attributes:
        leaves: of the state, without rows of logs.
        logs: {path: a leaf whose data is empty}, the columns.
        pieces: {path: where the rows lie}, of the columns.
        structure: of the state.
        written: {path: how many rows of it this save wrote}.
    """

    leaves: Mapping[str, state.Leaf]
    logs: Mapping[str, state.Leaf]
    pieces: Mapping[str, tuple[state.Piece, ...]]
    structure: bytes
    written: Mapping[str, int]


class LogStore:
    """Saves and restores one log through its handle, as a checkpointer and a store do, without files.

    Attributes:
        segments: {id: {path: rows}}.
        checkpoints: those that were not pruned, oldest first.
    """

    def __init__(self, *, most_pieces: int = 128) -> None:
        self.segments: dict[str, Segment] = {}
        self.checkpoints: list[LogCheckpoint] = []
        self._most_pieces = most_pieces
        self._ids = itertools.count(1)

    def save(self, handle: state.LogHandle, *, fail: bool = False) -> LogCheckpoint | None:
        """Returns the new checkpoint, or None if the save is to fail after the capture.

        Raises:
            AssertionError: the handle broke the contract of `LogColumn`: rows that are nowhere, or twice.
        """
        handle.forget({segment for segment in handle.segments() if segment not in self.segments})
        encoded = state.encode(handle.capture())
        if fail:
            return None
        segment = f"{next(self._ids):032x}"
        rows: Segment = {}
        pieces: dict[str, tuple[state.Piece, ...]] = {}
        logs: dict[str, state.Leaf] = {}
        plain: dict[str, state.Leaf] = {}
        for path, leaf in encoded.leaves.items():
            data = np.array(leaf.data, copy=True)
            if not isinstance(leaf, state.LogLeaf):
                plain[path] = state.Leaf(data, leaf.dtype, leaf.shape, leaf.kind)
                continue
            self._check(path, leaf)
            rows[path] = data
            logs[path] = state.Leaf(data[:0], leaf.dtype, leaf.shape, leaf.kind)
            pieces[path] = self._merged(path, (*leaf.pieces, *_new_piece(segment, data)), data, segment)
        self.segments[segment] = rows
        written = {path: len(data) for path, data in rows.items()}
        checkpoint = LogCheckpoint(plain, logs, pieces, encoded.structure, written)
        self.checkpoints.append(checkpoint)
        handle.committed(pieces)
        return checkpoint

    def read(self, checkpoint: LogCheckpoint) -> Any:
        """Returns the state of a checkpoint, all rows in place."""
        leaves = dict(checkpoint.leaves)
        for path, leaf in checkpoint.logs.items():
            parts = [self.segments[piece.segment][path][piece.start : piece.stop] for piece in checkpoint.pieces[path]]
            data = np.concatenate([leaf.data, *parts])
            leaves[path] = state.Leaf(data, leaf.dtype, leaf.shape, leaf.kind)
        return state.decode(leaves, checkpoint.structure)

    def restore(self, handle: state.LogHandle, checkpoint: LogCheckpoint) -> None:
        """Puts a checkpoint into the handle's object."""
        saved = self.read(checkpoint)
        handle.validate(saved)
        handle.apply(saved)
        handle.restored(checkpoint.pieces)

    def prune(self, checkpoint: LogCheckpoint) -> None:
        """Drops a checkpoint, and the segments that no other one uses."""
        self.checkpoints.remove(checkpoint)
        used = {piece.segment for kept in self.checkpoints for pieces in kept.pieces.values() for piece in pieces}
        self.segments = {segment: rows for segment, rows in self.segments.items() if segment in used}

    def _check(self, path: str, leaf: state.LogLeaf) -> None:
        for piece in leaf.pieces:
            there = self.segments[piece.segment][path]
            assert 0 <= piece.start < piece.stop <= piece.rows == len(there), f"{path}: {piece} is not in its segment"
            assert piece.digest == _digest(there), f"{path}: {piece} has another digest than its segment"
        counted = sum(piece.stop - piece.start for piece in leaf.pieces) + len(leaf.data)
        assert counted == leaf.shape[0], (
            f"{path}: pieces and new rows are {counted} rows, the column has {leaf.shape[0]}"
        )

    def _merged(
        self, path: str, pieces: tuple[state.Piece, ...], new: np.ndarray[Any, Any], segment: str
    ) -> tuple[state.Piece, ...]:
        if len(pieces) <= self._most_pieces:
            return pieces
        parts = [
            (new if piece.segment == segment else self.segments[piece.segment][path])[piece.start : piece.stop]
            for piece in pieces
        ]
        rows = np.concatenate(parts)
        merged = f"{next(self._ids):032x}"
        self.segments[merged] = {path: rows}
        return _new_piece(merged, rows)


def _new_piece(segment: str, rows: np.ndarray[Any, Any]) -> tuple[state.Piece, ...]:
    return (state.Piece(segment, 2048, len(rows), _digest(rows), 0, len(rows)),) if len(rows) else ()


def _digest(rows: np.ndarray[Any, Any]) -> str:
    return f"crc32:{zlib.crc32(np.ascontiguousarray(rows).reshape(-1).view(np.uint8).data):08x}"
