"""The adapter for torchrl's replay buffers over TensorDicts; nothing here imports it.

What its buffers are (0.14): a storage of tensors `(capacity, ...)` made at the first write, a writer with a cursor and
a count of rows, a sampler, a generator that storage, sampler and writer share (none: torch's global one, and numpy's
for prioritized sampling, both of `RNGStreams`). Methods that rewrite rows added earlier: `buffer[...] =`, `set_`,
`set_at_`, `update_`, `write_all`, `update_if_present`, and `write_at` of writers. Each of them, and each ordinary
write, counts up the storage's revision; ordinary writes alone call `mark_update` of what is attached to the storage.
A `_Watch` there counts them, so that the others are noticed. What is written into the tensors directly, or by other
processes, is left to the audit.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Collection, Mapping
from typing import Any

from simckpt.errors import UnsupportedStateError
from simckpt.replay.adapter import Column, ColumnTree, ReplayAdapter, Ring, RowTree, place_rows
from simckpt.replay.rows import plain
from simckpt.replay.torchrl_parts import check_parts, find_sampler_problems, load_sampler, sampler_state, samplers
from simckpt.state import generator_state, set_generator_state
from simckpt.state.rng import find_generator_problem
from simckpt.state.walk import qualified_name

_BUFFERS = ("ReplayBuffer", "PrioritizedReplayBuffer", "TensorDictReplayBuffer", "TensorDictPrioritizedReplayBuffer")
_GENERATIONS = "_slot_generations"


def find_adapter(buffer: Any, name: str) -> ReplayAdapter | None:
    """Returns the adapter of one of torchrl's own replay buffers; None for anything else, subclasses of them included.

    Args:
        buffer: any object.
        name: of the component, for messages.

    Raises:
        UnsupportedStateError: the buffer has a part that cannot be captured exactly.
    """
    data = sys.modules.get("torchrl.data")
    if data is None or all(type(buffer) is not getattr(data, cls, None) for cls in _BUFFERS):
        return None
    try:
        check_parts(buffer)
    except UnsupportedStateError as error:
        message = f"component {name!r}: {error}"
        raise UnsupportedStateError(message, path=f"{name}/{error.path}", type_name=error.type_name) from error
    return TorchRLAdapter()


class TorchRLAdapter:
    """The adapter of torchrl's `ReplayBuffer`, `TensorDictReplayBuffer` and their prioritized kinds.

    Storages: `LazyMemmapStorage`, `LazyTensorStorage` and `TensorStorage` of TensorDicts, nested or not, of any `ndim`;
    samplers: `RandomSampler` and `PrioritizedSampler`, whose priorities are part of the extra state.

    Args:
        mutable: top-level keys of entries whose old rows change. Without it a save that finds rewritten rows writes the
            whole buffer; with it, these entries alone, but always.
    """

    def __init__(self, *, mutable: Collection[str] = ()) -> None:
        self._mutable = frozenset(mutable)

    def columns(self, buffer: Any) -> ColumnTree:
        """Returns the storage's tensors, `(capacity, ...)`; none before the first write.

        Waits for conditional updates that were submitted.

        Raises:
            UnsupportedStateError: a part of the buffer cannot be captured exactly, or an entry is no tensor.
        """
        check_parts(buffer)
        # conditional updates that were submitted are rows' values as soon as anybody samples
        buffer.synchronize()
        storage = buffer.storage
        if not storage.initialized:
            return {}
        return {key: self._column(value, key, key) for key, value in _entries(storage._storage, "")}

    def _column(self, value: Any, top: str, path: str) -> Any:
        if _is_tensordict(value):
            return {key: self._column(child, top, f"{path}/{key}") for key, child in _entries(value, path)}
        if not isinstance(value, sys.modules["torch"].Tensor):
            raise _refusal(value, path, "an entry of the storage that is no tensor")
        return Column(plain(value), mutable=top in self._mutable)

    def ring(self, buffer: Any) -> Ring:
        """Returns where the rows lie. Rows that were rewritten count as if all had been added anew."""
        storage, writer = buffer.storage, buffer.writer
        capacity = _capacity(storage)
        filled = storage._len_along_dim0 if storage.initialized else 0
        added = int(writer._write_count)
        watch = _watch(storage, uncounted=capacity if added < filled else 0)
        return Ring(capacity, filled, int(writer._cursor), added + watch.count(storage, capacity))

    def capacity_for(self, buffer: Any, extra: Any) -> int:
        """Returns the rows that there is room for; `max_size` counts transitions if a storage has more dimensions."""
        storage, layout = buffer.storage, extra["layout"]
        if storage.initialized or layout is None:
            return _capacity(storage)
        return int(-(storage.max_size // -math.prod(layout["batch"][: storage.ndim - 1])))

    def extra(self, buffer: Any) -> Any:
        """Returns the writer's count, the sampler's priorities, the generators, and how the storage is nested.

        Raises:
            UnsupportedStateError: a part cannot be captured exactly.
        """
        storage, writer = buffer.storage, buffer.writer
        ring = self.ring(buffer)
        if ring.filled < ring.capacity and ring.filled != ring.cursor:
            raise _refusal(writer, "writer", "rows were written at places of the program's own choice (write_at)")
        generators, shared = _generators(buffer)
        return {
            "capacity": ring.capacity,
            "ndim": int(storage.ndim),
            "write_count": int(writer._write_count),
            "last_cursor": getattr(storage, "_last_cursor_index", None),
            "layout": _layout(storage._storage) if storage.initialized else None,
            "generations": getattr(storage, _GENERATIONS, None),
            "generators": {"states": [generator_state(generator) for generator in generators], "shared": shared},
            "samplers": [sampler_state(sampler) for sampler in samplers(buffer)],
            "prioritized_writes": getattr(buffer, "_prioritized_sampler_write_count", 0),
        }

    def find_problems(self, buffer: Any, columns: RowTree, ring: Ring, extra: Any) -> list[str]:
        """Returns why the buffer cannot take this state."""
        storage, problems = buffer.storage, []
        live, shared = _generators(buffer)
        if extra["generators"]["shared"] != shared:
            problems.append("saved with generators at other places: pass generator= to the buffer as it was then")
        else:
            pairs = zip(live, extra["generators"]["states"], strict=True)
            problems += [problem for generator, state in pairs if (problem := find_generator_problem(generator, state))]
        problems += find_sampler_problems(samplers(buffer), extra["samplers"])
        moved = [state for state in (*extra["samplers"], extra["generations"]) if state is not None]
        if ring.capacity != extra["capacity"] and moved:
            capacities = f"saved with {extra['capacity']} rows of capacity, live {ring.capacity}"
            problems.append(f"{capacities}: priorities and generations need the same")
        layout = extra["layout"]
        if extra["ndim"] != storage.ndim:
            problems.append(f"saved with a storage of ndim={extra['ndim']}, live ndim={storage.ndim}")
        elif storage.initialized and layout is not None and layout != _layout(storage._storage):
            problems.append("saved with other batch sizes of TensorDicts")
        return problems

    def load(self, buffer: Any, columns: RowTree, ring: Ring, extra: Any) -> None:
        """Sets rows, cursor, count, priorities and generators; makes the storage's tensors if there are none yet."""
        storage, writer = buffer.storage, buffer.writer
        same = ring.capacity == extra["capacity"]
        if not storage.initialized and extra["layout"] is not None:
            storage._init(_example(columns, extra["layout"]))
        if storage.initialized:
            place_rows(self.columns(buffer), columns, ring)
            storage._len = ring.filled * math.prod(storage._total_shape[1:])
        last = extra["last_cursor"] if same or not ring.filled else (ring.cursor - 1) % ring.capacity
        storage._set_last_cursor(last)
        generations = extra["generations"]
        setattr(storage, _GENERATIONS, None if generations is None else generations.clone())
        writer._cursor = ring.cursor
        writer._write_count = extra["write_count"]
        for sampler, state in zip(samplers(buffer), extra["samplers"], strict=True):
            load_sampler(sampler, state)
        if hasattr(buffer, "_prioritized_sampler_write_count"):
            buffer._prioritized_sampler_write_count = extra["prioritized_writes"]
        for generator, state in zip(_generators(buffer)[0], extra["generators"]["states"], strict=True):
            set_generator_state(generator, state)
        # whatever was derived from the old rows is void
        storage._bump_mutation_revision()
        _watch(storage).restart(storage, (ring.added or extra["write_count"]) - extra["write_count"])


class _Watch:
    """Counts the writes of new rows to a storage, as one of the entities that are attached to it.

    Args:
        storage: to be watched.
        uncounted: how many rows there are that no writer has counted; a storage may be made of data.
    """

    def __init__(self, storage: Any, uncounted: int) -> None:
        self._writes = 0
        self.restart(storage, uncounted)

    def restart(self, storage: Any, rows: int) -> None:
        """Takes the rows as they are, with `rows` to be added to the count of the writer."""
        self._rows = rows
        self._others = int(storage._mutation_revision) - self._writes
        self._keys = _keys(storage)

    def mark_update(self, index: Any, **_: Any) -> None:
        """Called by a writer after each write."""
        self._writes += 1

    def count(self, storage: Any, capacity: int) -> int:
        """Returns the rows to be added to the count of the writer.

        They are a whole ring more each time that others wrote, or that a write brought entries which the rows before it
        lack.
        """
        others, keys = int(storage._mutation_revision) - self._writes, _keys(storage)
        if others != self._others or (self._keys and keys != self._keys):
            self._rows += capacity
        self._others, self._keys = others, keys
        return self._rows


def _keys(storage: Any) -> tuple[Any, ...]:
    return tuple(storage._storage.keys(True, True)) if storage.initialized and _is_tensordict(storage._storage) else ()


def _watch(storage: Any, uncounted: int = 0) -> _Watch:
    for entity in storage._attached_entities:
        if isinstance(entity, _Watch):
            return entity
    watch = _Watch(storage, uncounted)
    storage.attach(watch)
    return watch


def _is_tensordict(value: Any) -> bool:
    return type(value) is sys.modules["tensordict"].TensorDict


def _entries(tensordict: Any, path: str) -> list[tuple[str, Any]]:
    if not _is_tensordict(tensordict):
        raise _refusal(tensordict, path or "storage", "a storage of something else than TensorDicts")
    # items() would hand out the data of NonTensorData rather than the object
    return [(key, tensordict._get_str(key, default=None)) for key in tensordict.keys()]  # noqa: SIM118


def _refusal(value: Any, path: str, what: str) -> UnsupportedStateError:
    type_name = qualified_name(type(value))
    return UnsupportedStateError(
        f"a torchrl replay buffer with {what} at {path!r} ({type_name}) cannot be captured exactly",
        path=path,
        type_name=type_name,
    )


def _capacity(storage: Any) -> int:
    """Returns the rows that there is room for; before the first write of one with more dimensions, transitions."""
    return int(storage.max_size if not storage.initialized else storage._max_size_along_dim0())


def _layout(tensordict: Any) -> dict[str, Any]:
    """Returns the batch size of a row of each TensorDict, nested as they are."""
    nested = {key: _layout(value) for key, value in _entries(tensordict, "") if _is_tensordict(value)}
    return {"batch": list(tensordict.batch_size[1:]), "nested": nested}


def _example(rows: RowTree, layout: Mapping[str, Any]) -> Any:
    """Returns a TensorDict like one row, from which a storage makes its tensors."""
    torch, tensordict = sys.modules["torch"], sys.modules["tensordict"]
    entries = {}
    # those that hold no tensors at all are in the layout alone
    for key in dict.fromkeys((*rows, *layout["nested"])):
        nested = layout["nested"].get(key)
        if nested is None:
            entries[key] = torch.zeros(rows[key].shape[1:], dtype=rows[key].dtype)
        else:
            entries[key] = _example(rows.get(key, {}), nested)
    return tensordict.TensorDict(entries, batch_size=layout["batch"])


def _generators(buffer: Any) -> tuple[list[Any], list[int]]:
    """Returns the different generators, and which of them buffer, storage and samplers have; -1 for none."""
    found: list[Any] = []
    shared = []
    for owner in (buffer, buffer.storage, *samplers(buffer)):
        generator = owner._rng
        if generator is not None and not any(generator is known for known in found):
            found.append(generator)
        shared.append(next((i for i, known in enumerate(found) if known is generator), -1))
    return found, shared
