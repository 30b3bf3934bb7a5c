"""A suite that tests a replay adapter of your own: `check_adapter`, or `ReplayAdapterSuite` as a base for pytest.

```python
class TestMyAdapter(ReplayAdapterSuite):
    def make_buffer(self, capacity):
        return MyBuffer(capacity, seed=1)

    def add_rows(self, buffer, first, count):
        for number in range(first, first + count):
            buffer.add(*transition(np.random.default_rng(number)))

    def sample(self, buffer):
        return buffer.sample(4)

    def rewrites(self):
        return {"relabel": lambda buffer: buffer.relabel(0, reward=1.0)}
```
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from simckpt import replay, state
from simckpt.errors import ReplayWarning, SimckptError, StateMismatchError
from simckpt.replay.adapter import Path, flatten_columns
from simckpt.replay.rows import LiveRows
from simckpt.testing.log_store import LogCheckpoint, LogStore

CAPACITY = 23  # [rows], of the buffers that the suite makes: small, odd, and no power of two


class NonconformingAdapterError(AssertionError):
    """A replay adapter does not bring a buffer back exactly."""


class ReplayAdapterSuite:
    """Tests of a replay adapter. Override the first three methods, and `rewrites` where the buffer has such methods."""

    def make_buffer(self, capacity: int) -> Any:
        """Returns a new, empty buffer of this capacity [rows], each time in the same state."""
        raise NotImplementedError

    def add_rows(self, buffer: Any, first: int, count: int) -> None:
        """Adds rows number `first` and up; the content of each depends on its number alone, and on it indeed."""
        raise NotImplementedError

    def sample(self, buffer: Any) -> Any:
        """Returns what training draws from the buffer: arrays, tensors, containers of them."""
        raise NotImplementedError

    def rewrites(self) -> Mapping[str, Callable[[Any], None]]:
        """Returns {name: a method of the buffer that changes rows added before}; each is called on a full buffer."""
        return {}

    def test_every_fill_comes_back_and_goes_on_alike(self) -> None:
        """Saves and restores at every fill of the ring, from empty to wrapped around, and goes on from there."""
        buffer = self.make_buffer(CAPACITY)
        handle, store = _handle(buffer), LogStore()
        added = 0
        for count in (0, 1, 5, 0, 11, 6, 1, 9, 30, CAPACITY, 2 * CAPACITY + 3, 4):
            self.add_rows(buffer, added, count)
            added += count
            with warnings.catch_warnings():
                # a ring that does not count its rows is saved whole when it went round, and says so
                warnings.simplefilter("ignore", ReplayWarning)
                checkpoint = _save(store, handle)
            self._compare(buffer, self._restored(store, checkpoint), f"after {added} rows")

    def test_restored_buffer_samples_the_same(self) -> None:
        """The same adds and samples after a restore give the same bits."""
        for count in (3, CAPACITY, CAPACITY + 7):
            buffer = self.make_buffer(CAPACITY)
            handle, store = _handle(buffer), LogStore()
            self.add_rows(buffer, 0, count)
            self.sample(buffer)
            checkpoint = _save(store, handle)
            expected = self._go_on(buffer, count)
            got = self._go_on(self._restored(store, checkpoint), count)
            _require(_bits(expected) == _bits(got), f"after {count} rows, the restored buffer samples something else")

    def test_saves_write_new_rows_alone(self) -> None:
        """A save writes the rows that were added since the last, whatever happened in between."""
        buffer = self.make_buffer(CAPACITY)
        handle, store = _handle(buffer), LogStore()
        self.add_rows(buffer, 0, 9)
        _save(store, handle)
        for first, count in ((9, 4), (13, 0), (13, 12), (25, 3)):
            self.add_rows(buffer, first, count)
            checkpoint = _save(store, handle)
            wrong = {path: rows for path, rows in checkpoint.written.items() if rows != count}
            _require(not wrong, f"{count} rows were added, the save wrote {wrong}")
        twin = self._restored(store, checkpoint)
        self._compare(buffer, twin, "after several saves")

    def test_failed_saves_lose_nothing(self) -> None:
        """Rows that a failed save has captured are written by the next."""
        buffer = self.make_buffer(CAPACITY)
        handle, store = _handle(buffer), LogStore()
        added = 0
        for count, fail in ((6, True), (5, False), (4, True), (8, True), (7, False), (0, True), (2, False)):
            self.add_rows(buffer, added, count)
            added += count
            checkpoint = store.save(handle, fail=fail)
            if checkpoint is not None:
                self._compare(buffer, self._restored(store, checkpoint), f"after {added} rows and failed saves")

    def test_saves_go_on_after_a_restore(self) -> None:
        """A restored buffer saves its new rows alone, and a later restore has all of them."""
        buffer = self.make_buffer(CAPACITY)
        handle, store = _handle(buffer), LogStore()
        self.add_rows(buffer, 0, CAPACITY + 5)
        checkpoint = _save(store, handle)
        twin = self.make_buffer(CAPACITY)
        twin_handle = _handle(twin)
        store.restore(twin_handle, checkpoint)
        self.add_rows(twin, CAPACITY + 5, 3)
        second = _save(store, twin_handle)
        wrong = {path: rows for path, rows in second.written.items() if rows != 3}
        _require(not wrong, f"3 rows were added after a restore, the save wrote {wrong}")
        self._compare(twin, self._restored(store, second), "after a restore and 3 rows")

    def test_restore_into_a_used_buffer(self) -> None:
        """A restore replaces whatever the buffer held, and what is saved next is what it then holds."""
        buffer = self.make_buffer(CAPACITY)
        handle, store = _handle(buffer), LogStore()
        self.add_rows(buffer, 0, 8)
        early = _save(store, handle)
        self.add_rows(buffer, 8, CAPACITY)
        _save(store, handle)
        store.restore(handle, early)
        self._compare(buffer, self._restored(store, early), "after going back to an earlier checkpoint")
        self.add_rows(buffer, 1000, 2)
        self._compare(buffer, self._restored(store, _save(store, handle)), "saved after going back")

    def test_other_capacities_keep_the_newest_rows_or_are_refused(self) -> None:
        """A restore into another capacity keeps the newest rows in their order, or is refused before it touches any."""
        for count in (7, CAPACITY + 9):
            buffer = self.make_buffer(CAPACITY)
            handle, store = _handle(buffer), LogStore()
            self.add_rows(buffer, 0, count)
            checkpoint = _save(store, handle)
            for capacity in (5, CAPACITY - 1, CAPACITY + 1, 3 * CAPACITY):
                other = self.make_buffer(capacity)
                self.add_rows(other, 500, 3)
                before = _rows(other)
                with warnings.catch_warnings(record=True) as caught:
                    warnings.simplefilter("always", ReplayWarning)
                    try:
                        store.restore(_handle(other), checkpoint)
                    except StateMismatchError:
                        _require(_bits(before) == _bits(_rows(other)), "a refused restore has changed the buffer")
                        continue
                self._check_newest(buffer, other, capacity)
                told = any(issubclass(warning.category, ReplayWarning) for warning in caught)
                _require(told == (len(_rows(buffer)[0]) > capacity), "dropped rows and the warning about them disagree")

    def test_rewritten_rows_are_saved_or_refused(self) -> None:
        """Rows that the buffer's own methods have changed are in the next checkpoint, unless it is refused."""
        for name, rewrite in self.rewrites().items():
            self._check_rewrite(name, rewrite)

    def test_rows_written_directly_are_saved_or_refused(self) -> None:
        """The same for every row of every column that the program can reach and write to."""
        probe = self.make_buffer(CAPACITY)
        self.add_rows(probe, 0, CAPACITY + 4)
        for path, column in _columns(probe).items():
            if column.sealed:
                _check_sealed(probe, path, column.array)
                continue
            for age in (0, CAPACITY // 2, _ring(probe).filled - 1):
                self._check_rewrite(f"a change of {'/'.join(path)} in the row of age {age}", _direct_change(path, age))

    def _check_rewrite(self, name: str, rewrite: Callable[[Any], None]) -> None:
        buffer = self.make_buffer(CAPACITY)
        handle, store = _handle(buffer), LogStore()
        self.add_rows(buffer, 0, CAPACITY + 4)
        _save(store, handle)
        try:
            rewrite(buffer)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", ReplayWarning)
                checkpoint = _save(store, handle)
        except (SimckptError, ValueError):
            return
        self._compare(buffer, self._restored(store, checkpoint), f"after {name}")

    def _restored(self, store: LogStore, checkpoint: LogCheckpoint) -> Any:
        twin = self.make_buffer(CAPACITY)
        store.restore(_handle(twin), checkpoint)
        return twin

    def _go_on(self, buffer: Any, added: int) -> list[Any]:
        drawn = []
        for number in range(3):
            drawn.append(copy.deepcopy(self.sample(buffer)))
            self.add_rows(buffer, added + 5 * number, 5)
        return [*drawn, self.sample(buffer), _rows(buffer)]

    def _compare(self, buffer: Any, twin: Any, when: str) -> None:
        _require(_ring(buffer) == _ring(twin), f"{when}: the ring was {_ring(buffer)}, restored {_ring(twin)}")
        live, restored = _named_rows(buffer), _named_rows(twin)
        differing = [path for path in live if _bits(live[path]) != _bits(restored.get(path))]
        _require(not differing, f"{when}: restored with other rows of {', '.join('/'.join(p) for p in differing)}")

    def _check_newest(self, buffer: Any, other: Any, capacity: int) -> None:
        live, restored = _named_rows(buffer), _named_rows(other)
        rows = _ring(other).filled
        wanted = min(_ring(buffer).filled, capacity)
        # a full ring may keep one slot free
        _require(
            rows in (wanted, capacity - 1) and rows <= wanted, f"capacity {capacity} holds {rows} rows, not {wanted}"
        )
        for path, array in live.items():
            same = _bits(array[len(array) - rows :]) == _bits(restored[path])
            _require(same, f"in capacity {capacity}, {'/'.join(path)} does not hold the {rows} newest rows")


def check_adapter(
    make_buffer: Callable[[int], Any],
    add_rows: Callable[[Any, int, int], None],
    sample: Callable[[Any], Any],
    *,
    rewrites: Mapping[str, Callable[[Any], None]] | None = None,
) -> None:
    """Runs `ReplayAdapterSuite` with these functions in place of its methods.

    Raises:
        NonconformingAdapterError: the first thing that does not come back exactly.
        UnsupportedStateError: the class of the buffers has no adapter.
    """

    class Suite(ReplayAdapterSuite):
        def make_buffer(self, capacity: int) -> Any:
            return make_buffer(capacity)

        def add_rows(self, buffer: Any, first: int, count: int) -> None:
            add_rows(buffer, first, count)

        def sample(self, buffer: Any) -> Any:
            return sample(buffer)

        def rewrites(self) -> Mapping[str, Callable[[Any], None]]:
            return rewrites or {}

    suite = Suite()
    for name in dir(suite):
        if name.startswith("test_"):
            getattr(suite, name)()


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise NonconformingAdapterError(message)


def _handle(buffer: Any) -> replay.ReplayHandle:
    handle = replay.handle_for(buffer, "replay")
    if handle is None:
        raise NonconformingAdapterError(f"no adapter is registered for {type(buffer).__qualname__}")
    return handle


def _save(store: LogStore, handle: replay.ReplayHandle) -> LogCheckpoint:
    checkpoint = store.save(handle)
    assert checkpoint is not None
    return checkpoint


def _columns(buffer: Any) -> dict[Path, replay.Column]:
    return flatten_columns(_handle(buffer).adapter.columns(buffer))


def _ring(buffer: Any) -> replay.Ring:
    return _handle(buffer).adapter.ring(buffer)


def _named_rows(buffer: Any) -> dict[Path, Any]:
    """Returns copies of all rows by column, oldest first."""
    ring = _ring(buffer)
    arrays = {path: column.array for path, column in _columns(buffer).items()}
    rows = LiveRows(arrays, ring, ring.filled)
    return {path: rows.copy(path, 0, ring.filled) for path in arrays}


def _rows(buffer: Any) -> list[Any]:
    return list(_named_rows(buffer).values())


def _bits(tree: Any) -> Any:
    """Returns what is equal for two trees of the same bits."""
    encoded = state.encode(state.copy_tree(tree))
    leaves = {path: (leaf.kind, leaf.dtype, leaf.shape, leaf.data.tobytes()) for path, leaf in encoded.leaves.items()}
    return leaves, encoded.structure


def _direct_change(path: Path, age: int) -> Callable[[Any], None]:
    """Returns a function that writes other values into a row of the live array, `age` rows before the newest."""

    def change(buffer: Any) -> None:
        ring = _ring(buffer)
        (slot,) = ring.slots(ring.filled - 1 - age, ring.filled - age)
        array = _columns(buffer)[path].array
        if str(array.dtype) in ("bool", "torch.bool"):
            array[slot] = ~array[slot]
        else:
            array[slot] = array[slot] + 1

    return change


def _check_sealed(buffer: Any, path: Path, array: Any) -> None:
    """Checks that no public attribute of the buffer gives write access to the memory of a sealed column."""
    for name in dir(buffer):
        if name.startswith("_"):
            continue
        value = getattr(buffer, name)
        found = flatten_columns(value) if isinstance(value, Mapping) else {(): value}
        for part in found.values():
            if isinstance(part, np.ndarray) and part.flags.writeable and np.shares_memory(part, array):
                raise NonconformingAdapterError(f"{'/'.join(path)} is declared sealed, but {name} can be written to")
