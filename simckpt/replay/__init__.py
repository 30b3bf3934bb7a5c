"""Replay buffers: simckpt's own ring, adapters for others, and which rows are new since which save."""

from simckpt.replay.adapter import Column, ReplayAdapter, Ring, place_rows, register_replay_adapter
from simckpt.replay.dispatch import handle_for
from simckpt.replay.handle import ReplayHandle
from simckpt.replay.ring import Batch, ReplayBuffer

__all__ = [
    "Batch",
    "Column",
    "ReplayAdapter",
    "ReplayBuffer",
    "ReplayHandle",
    "Ring",
    "handle_for",
    "place_rows",
    "register_replay_adapter",
]
