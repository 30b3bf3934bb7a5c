"""What simckpt asks of a replay buffer: its rows as columns in a ring, and everything else as a small tree.

An adapter is a stateless object with the methods of `ReplayAdapter`, registered for one class:

```python
class MyAdapter:
    def columns(self, buffer):
        return {"observations": Column(buffer.obs), "rewards": Column(buffer.rewards, mutable=True)}

    def ring(self, buffer):
        return Ring(capacity=buffer.size, filled=len(buffer), cursor=buffer.next)

    def extra(self, buffer):
        return {"rng": simckpt.state.generator_state(buffer.rng)}

    def find_problems(self, buffer, columns, ring, extra):
        return []

    def load(self, buffer, columns, ring, extra):
        place_rows(self.columns(buffer), columns, ring)
        buffer.next = ring.cursor
        ...

register_replay_adapter(MyBuffer, MyAdapter())
```

`simckpt.testing.replay_conformance` tests one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias, runtime_checkable

from simckpt.errors import ConfigurationError

Path: TypeAlias = tuple[str, ...]


@dataclass(frozen=True, eq=False, slots=True)
class Column:
    """One array of a buffer, live.

    Attributes:
        array: `(capacity, ...)`, a numpy array or a torch tensor; the first axis counts slots.
        mutable: whether rows that were added earlier may still change. Such a column is written whole by each save.
            Declare it wherever the buffer's own methods do so: priorities, episode lengths, relabelled rewards.
        sealed: whether nothing but the buffer's own methods can reach the array. Rows of other columns that are not
            mutable are looked at again by each save, part by part, lest somebody has rewritten them.
    """

    array: Any
    mutable: bool = False
    sealed: bool = False


# nested for observations of dict spaces; the leaves are Columns, or the rows of columns
ColumnTree: TypeAlias = Mapping[str, "Column | ColumnTree"]
RowTree: TypeAlias = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Ring:
    """Where the rows lie: the i-th oldest is in slot `(cursor - filled + i) % capacity`.

    Attributes:
        capacity: how many rows there may be at most [rows].
        filled: how many there are [rows].
        cursor: the slot that the next row will have, below `capacity`.
        added: how many rows were ever added, those that are gone included; None if the buffer does not count them. A
            buffer that counts may be given any number of rows between two saves; of one that does not, a ring that
            went round exactly once is told from one that stood still by the rows alone.
    """

    capacity: int
    filled: int
    cursor: int
    added: int | None = None

    def slots(self, first: int, last: int) -> list[slice]:
        """Returns the slots of the rows from the `first`-th oldest up to the `last`-th, as one or two slices."""
        if first >= last:
            return []
        start = (self.cursor - self.filled + first) % self.capacity
        stop = start + last - first
        if stop <= self.capacity:
            return [slice(start, stop)]
        return [slice(start, self.capacity), slice(0, stop - self.capacity)]


@runtime_checkable
class ReplayAdapter(Protocol):
    """How simckpt reads and sets the replay buffers of one class.

    An adapter of buffers that do not know their capacity before they have arrays may also have
    `capacity_for(buffer, extra)`: the capacity [rows] that the buffer would have with that state.
    """

    def columns(self, buffer: Any) -> ColumnTree:
        """Returns the live arrays by name, nested where the buffer's own are; empty while they do not exist yet.

        The names are what a file shows under the component: `observations`, `actions`. "ring" and "extra" are taken.
        A buffer has the same columns, of the same dtypes and shapes, all its life.
        """
        ...

    def ring(self, buffer: Any) -> Ring:
        """Returns where the rows lie now."""
        ...

    def extra(self, buffer: Any) -> Any:
        """Returns all else that the next adds and samples depend on, as a small state tree: generators, counters.

        It is copied at once, so it may refer to live objects. Rows outside of the filled ones that matter belong here.

        Raises:
            UnsupportedStateError: the buffer has a part that cannot be captured exactly.
        """
        ...

    def find_problems(self, buffer: Any, columns: RowTree, ring: Ring, extra: Any) -> list[str]:
        """Returns why the buffer cannot take this state, one line each; touches nothing.

        The columns are known to fit those of the buffer, if it has any yet, in names, dtypes and the shapes of rows.
        """
        ...

    def load(self, buffer: Any, columns: RowTree, ring: Ring, extra: Any) -> None:
        """Sets the buffer to this state, in place; `place_rows` does the columns.

        Args:
            buffer: what is there is replaced.
            columns: `(ring.filled, ...)` of each column, oldest row first, nested as `columns` nests them; arrays and
                tensors on the CPU that are not to be kept.
            ring: where the rows belong. Its capacity is the buffer's own; in the capacity that was saved the slots are
                those that were saved, in another the rows begin at slot 0.
            extra: as `extra` returned it when the state was saved.
        """
        ...


_adapters: dict[type, ReplayAdapter] = {}


def register_replay_adapter(cls: type, adapter: ReplayAdapter) -> None:
    """Makes a class of replay buffers known. Subclasses are not covered: they may have more state, or rewrite rows.

    Args:
        cls: the class; a second registration replaces the first.
        adapter: see `ReplayAdapter`; one object serves all buffers of the class.

    Raises:
        ConfigurationError: not a class, or not an adapter.
    """
    if not isinstance(cls, type):
        raise ConfigurationError(f"a replay adapter is registered for a class, got {cls!r}", keys=["cls"])
    if isinstance(adapter, type) or not isinstance(adapter, ReplayAdapter):
        raise ConfigurationError(f"{adapter!r} lacks methods of simckpt.replay.ReplayAdapter", keys=["adapter"])
    _adapters[cls] = adapter


def registered_adapter(cls: type) -> ReplayAdapter | None:
    """Returns the adapter of exactly this class."""
    return _adapters.get(cls)


def place_rows(columns: ColumnTree, rows: RowTree, ring: Ring) -> None:
    """Writes rows into the live arrays, in the slots that `ring` gives them.

    Args:
        columns: as `ReplayAdapter.columns` returns them.
        rows: nested alike, `(ring.filled, ...)` each, oldest first.
        ring: where they belong.
    """
    live, new = flatten_columns(columns), flatten_columns(rows)
    for path, column in live.items():
        start = 0
        for part in ring.slots(0, ring.filled):
            stop = start + part.stop - part.start
            column.array[part] = new[path][start:stop]
            start = stop


def flatten_columns(tree: Mapping[str, Any]) -> dict[Path, Any]:
    """Returns {path: leaf} of a nested mapping, in its order."""
    found: dict[Path, Any] = {}
    for name, value in tree.items():
        if isinstance(value, Mapping):
            found.update({(name, *path): leaf for path, leaf in flatten_columns(value).items()})
        else:
            found[(name,)] = value
    return found


def nest_columns(flat: Mapping[Path, Any]) -> dict[str, Any]:
    """Returns the nested mapping of a flat one."""
    tree: dict[str, Any] = {}
    for path, leaf in flat.items():
        node = tree
        for name in path[:-1]:
            node = node.setdefault(name, {})
        node[path[-1]] = leaf
    return tree
