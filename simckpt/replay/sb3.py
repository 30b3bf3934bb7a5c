"""Adapters for the replay buffers of Stable-Baselines3; nothing here imports it.

What its buffers are (2.9): arrays of `buffer_size` rows and `pos`, `full`; no count of rows. They sample from numpy's
global generator, which belongs to `RNGStreams`, not to the buffer. Methods that touch rows added earlier: the
memory-optimised `add` writes the next observation one slot ahead, HER's `add` and the end of an episode write
`ep_length` of the whole episode, HER's `truncate_last_trajectory` (called by SB3's own `load_replay_buffer`) writes
`dones` and `timeouts` of the newest row. `NStepReplayBuffer` changes `timeouts` while it samples, and back.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import numpy as np

from simckpt.errors import UnsupportedStateError
from simckpt.replay import infos
from simckpt.replay.adapter import (
    Column,
    ColumnTree,
    ReplayAdapter,
    Ring,
    RowTree,
    flatten_columns,
    place_rows,
)
from simckpt.state.walk import qualified_name

_COLUMNS = ("observations", "next_observations", "actions", "rewards", "dones", "timeouts")
_ARGUMENTS = ("buffer_size", "observation_space", "action_space", "obs_shape", "action_dim", "device", "n_envs")
_FLAGS = ("pos", "full", "optimize_memory_usage", "handle_timeout_termination")
_PLAIN = frozenset((*_COLUMNS, *_ARGUMENTS, *_FLAGS))
_HER = _PLAIN | {"env", "copy_info_dict", "goal_selection_strategy", "n_sampled_goal", "her_ratio", "infos"}
# what the instances of each class have, all of it captured or given to the constructor
_ATTRIBUTES: dict[str, frozenset[str]] = {
    "stable_baselines3.common.buffers.ReplayBuffer": _PLAIN,
    "stable_baselines3.common.buffers.DictReplayBuffer": _PLAIN,
    "stable_baselines3.common.buffers.NStepReplayBuffer": _PLAIN | {"n_steps", "gamma"},
    "stable_baselines3.her.her_replay_buffer.HerReplayBuffer": _HER | {"ep_start", "ep_length", "_current_ep_start"},
}


def find_adapter(buffer: Any, name: str) -> ReplayAdapter | None:
    """Returns the adapter of one of SB3's own replay buffers; None for anything else, subclasses of them included."""
    cls = qualified_name(type(buffer))
    if cls not in _ATTRIBUTES:
        return None
    return HerAdapter() if cls.endswith(".HerReplayBuffer") else SB3Adapter()


class SB3Adapter:
    """The adapter of SB3's `ReplayBuffer`, `DictReplayBuffer` and `NStepReplayBuffer`, memory-optimised ones included.

    A memory-optimised buffer keeps each row's next observation in the slot of the next row. The slot at the cursor
    therefore belongs to no row: its observation is the newest row's next one, the rest is what is left of the oldest
    row, which SB3 never samples. It is no row of the columns, but `cursor_row` of the extra state.

    Args:
        mutable: names of columns whose old rows change, in a subclass that relabels rewards, say.
    """

    def __init__(self, *, mutable: Collection[str] = ()) -> None:
        self._mutable = frozenset(mutable)

    def columns(self, buffer: Any) -> ColumnTree:
        """Returns SB3's own arrays, `(buffer_size, n_envs, ...)`."""
        # a memory-optimised buffer has no next_observations
        return {name: self._column(name, getattr(buffer, name)) for name in _COLUMNS if hasattr(buffer, name)}

    def _column(self, name: str, array: Any) -> Any:
        if isinstance(array, Mapping):
            return {key: Column(part, mutable=name in self._mutable) for key, part in array.items()}
        return Column(array, mutable=name in self._mutable)

    def ring(self, buffer: Any) -> Ring:
        """Returns where the rows lie; SB3 does not count them."""
        size = int(buffer.buffer_size)
        filled = size if buffer.full else int(buffer.pos)
        return Ring(size, min(filled, size - 1) if buffer.optimize_memory_usage else filled, int(buffer.pos))

    def extra(self, buffer: Any) -> Any:
        """Returns whether the ring is full, and the slot at the cursor of a memory-optimised buffer.

        Raises:
            UnsupportedStateError: the buffer has attributes that SB3 did not give it.
        """
        type_name = qualified_name(type(buffer))
        unknown = sorted(set(vars(buffer)) - _ATTRIBUTES.get(type_name, frozenset(vars(buffer))))
        if unknown:
            raise UnsupportedStateError(
                f"a {type_name} has attributes that simckpt does not know: {', '.join(unknown)}; if they are no state, "
                "keep them elsewhere",
                path=unknown[0],
                type_name=type_name,
            )
        extra: dict[str, Any] = {"full": bool(buffer.full)}
        if buffer.optimize_memory_usage:
            live = flatten_columns(self.columns(buffer))
            extra["cursor_row"] = {path[0]: column.array[buffer.pos] for path, column in live.items()}
        return extra

    def find_problems(self, buffer: Any, columns: RowTree, ring: Ring, extra: Any) -> list[str]:
        """Returns why the buffer cannot take this state."""
        if ("cursor_row" in extra) != bool(buffer.optimize_memory_usage):
            saved = "cursor_row" in extra
            return [f"saved with optimize_memory_usage={saved}, live with {not saved}"]
        return []

    def load(self, buffer: Any, columns: RowTree, ring: Ring, extra: Any) -> None:
        """Sets rows, cursor and flag."""
        live = self.columns(buffer)
        place_rows(live, columns, ring)
        buffer.pos = ring.cursor
        buffer.full = ring.filled == ring.capacity
        if buffer.optimize_memory_usage:
            # in a larger ring there are fewer rows than that, in a smaller one the first case holds
            buffer.full = buffer.full or (bool(extra["full"]) and ring.filled == ring.capacity - 1)
            for path, column in flatten_columns(live).items():
                column.array[ring.cursor] = extra["cursor_row"][path[0]]


class HerAdapter(SB3Adapter):
    """The adapter of SB3's `HerReplayBuffer`.

    `ep_start` is written when a row is added, `ep_length` when its episode ends or is overwritten. With
    `copy_info_dict=True` the infos of all rows are captured anew by each save, which takes time in Python.
    """

    def columns(self, buffer: Any) -> ColumnTree:
        """Returns the arrays of a `DictReplayBuffer`, and the episodes'."""
        episodes = {
            "ep_start": Column(buffer.ep_start, mutable="ep_start" in self._mutable),
            "ep_length": Column(buffer.ep_length, mutable=True),
        }
        return {**super().columns(buffer), **episodes}

    def extra(self, buffer: Any) -> Any:
        """Returns where the running episodes began, and the infos if the buffer keeps them.

        Raises:
            UnsupportedStateError: there are attributes that SB3 did not give it, or episodes in slots without rows.
        """
        ring = self.ring(buffer)
        if not buffer.full and np.any(buffer.ep_length[ring.filled :]):
            raise UnsupportedStateError(
                "HerReplayBuffer.reset() leaves the old episodes to be sampled, in slots that have no rows any more: "
                "set ep_length to 0 after a reset",
                path="ep_length",
                type_name=qualified_name(type(buffer)),
            )
        extra = {**super().extra(buffer), "capacity": ring.capacity, "current_ep_start": buffer._current_ep_start}
        if buffer.copy_info_dict:
            rows = [info for part in ring.slots(0, ring.filled) for info in buffer.infos[part].reshape(-1).tolist()]
            extra["infos"] = infos.pack(rows)
        return extra

    def find_problems(self, buffer: Any, columns: RowTree, ring: Ring, extra: Any) -> list[str]:
        """Returns why the buffer cannot take this state."""
        problems = super().find_problems(buffer, columns, ring, extra)
        if ring.capacity != extra["capacity"]:
            # the episodes are known by their slots
            problems.append(
                f"saved with {extra['capacity']} rows of capacity, live {ring.capacity}: HER needs the same"
            )
        if ("infos" in extra) != bool(buffer.copy_info_dict):
            problems.append(f"saved with copy_info_dict={'infos' in extra}, live with {buffer.copy_info_dict}")
        if np.shape(extra["current_ep_start"]) != buffer._current_ep_start.shape:
            problems.append(f"saved with {np.size(extra['current_ep_start'])} envs, live with {buffer.n_envs}")
        return problems

    def load(self, buffer: Any, columns: RowTree, ring: Ring, extra: Any) -> None:
        """Sets rows, episodes and infos; slots without rows belong to no episode."""
        buffer.ep_length[...] = 0
        buffer.ep_start[...] = 0
        super().load(buffer, columns, ring, extra)
        buffer._current_ep_start[...] = extra["current_ep_start"]
        if buffer.copy_info_dict:
            rows = infos.unpack(extra["infos"])
            for slot, env in np.ndindex(buffer.infos.shape):
                buffer.infos[slot, env] = {}
            slots = [slot for part in ring.slots(0, ring.filled) for slot in range(part.start, part.stop)]
            for index, info in enumerate(rows):
                buffer.infos[slots[index // buffer.n_envs], index % buffer.n_envs] = info
