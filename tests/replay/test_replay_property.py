"""Any order of adds, saves, failed saves, restores, prunes and lost segments, against a plain list of rows."""

from __future__ import annotations

import functools
import tempfile
import warnings

import numpy as np
import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from replay.buffers import Uncounted, handle_of, make_own, row_of
from replay.disk_log import DiskLog

from simckpt.errors import ReplayWarning
from simckpt.testing.log_store import LogStore


class ReplayMachine(RuleBasedStateMachine):
    """The model: the numbers of all rows that were added, in order, of which a ring holds the last `capacity`."""

    def make_store(self, most_pieces: int):
        return LogStore(most_pieces=most_pieces)

    def make(self, capacity: int):
        raise NotImplementedError

    def add_to(self, buffer, numbers) -> None:
        raise NotImplementedError

    def contents(self, buffer) -> list[bytes]:
        """Returns the rows of a buffer, oldest first."""
        raise NotImplementedError

    def expected(self, number: int) -> bytes:
        raise NotImplementedError

    @initialize(capacity=st.integers(1, 70), most_pieces=st.sampled_from([1, 3, 128]))
    def begin(self, capacity, most_pieces) -> None:
        self.store = self.make_store(most_pieces)
        self.numbers = iter(range(10**9))
        self.kept: list[tuple[object, list[int]]] = []
        self.open(capacity)
        self.model: list[int] = []

    def open(self, capacity) -> None:
        self.capacity = capacity
        self.buffer = self.make(capacity)
        self.handle = handle_of(self.buffer)
        # rows that the next save needs not write, or None where that is not known
        self.durable: int | None = 0

    @rule(count=st.integers(0, 12))
    def add_a_few(self, count) -> None:
        self.add(count)

    @rule(count=st.integers(0, 100))
    def add_many(self, count) -> None:
        self.add(count)

    @rule(rounds=st.integers(1, 2))
    def go_round(self, rounds) -> None:
        self.add(rounds * self.capacity)

    def add(self, count) -> None:
        added = [next(self.numbers) for _ in range(count)]
        self.add_to(self.buffer, added)
        dropped = max(0, len(self.model) + count - self.capacity)
        self.model = (self.model + added)[-self.capacity :]
        if self.durable is not None:
            self.durable = max(0, self.durable - dropped)

    @rule(fail=st.sampled_from([False, False, True]))
    def save(self, fail) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ReplayWarning)
            checkpoint = self.store.save(self.handle, fail=fail)
        if checkpoint is None:
            return
        if self.durable is not None and self.counted:
            assert set(checkpoint.written.values()) == {len(self.model) - self.durable}
        self.durable = len(self.model)
        self.kept.append((checkpoint, list(self.model)))

    @precondition(lambda self: self.kept)
    @rule(data=st.data())
    def restore(self, data) -> None:
        checkpoint, model = data.draw(st.sampled_from(self.kept))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ReplayWarning)
            self.store.restore(self.handle, checkpoint)
        self.model = model[-self.capacity :]
        self.durable = len(self.model)

    @precondition(lambda self: self.kept)
    @rule(data=st.data(), capacity=st.integers(1, 80))
    def restore_into_a_new_buffer(self, data, capacity) -> None:
        checkpoint, model = data.draw(st.sampled_from(self.kept))
        self.open(capacity)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            self.store.restore(self.handle, checkpoint)
        assert bool(caught) == (len(model) > capacity)
        self.model = model[-capacity:]
        self.durable = len(self.model)

    @precondition(lambda self: len(self.kept) > 1)
    @rule(data=st.data())
    def prune(self, data) -> None:
        index = data.draw(st.integers(0, len(self.kept) - 2))
        checkpoint, _ = self.kept.pop(index)
        self.store.prune(checkpoint)
        # a buffer that was restored from it may have lost rows
        self.durable = None

    @precondition(lambda self: self.kept)
    @rule()
    def look_at_every_checkpoint(self) -> None:
        for checkpoint, model in self.kept:
            twin = self.make(checkpoint_capacity(self.store, checkpoint))
            self.store.restore(handle_of(twin), checkpoint)
            assert self.contents(twin) == [self.expected(number) for number in model]

    @invariant()
    def the_live_buffer_holds_the_model(self) -> None:
        if hasattr(self, "model"):
            assert self.contents(self.buffer) == [self.expected(number) for number in self.model]


def checkpoint_capacity(store, checkpoint) -> int:
    return store.read(checkpoint)["ring"]["capacity"]


class OwnMachine(ReplayMachine):
    counted = True

    def make(self, capacity):
        return make_own(capacity, num_envs=2)

    def add_to(self, buffer, numbers) -> None:
        for number in numbers:
            buffer.add(**two_env_row(number))

    def contents(self, buffer):
        slots = [(buffer._cursor - len(buffer) + place) % buffer.capacity for place in range(len(buffer))]
        columns = [getattr(buffer, name) for name in COLUMNS]
        return [b"".join(column[slot].tobytes() for column in columns) for slot in slots]

    def expected(self, number):
        return row_bytes(number)


COLUMNS = ("observations", "actions", "rewards", "terminated", "truncated", "next_observations", "valid")


@functools.cache
def two_env_row(number):
    return row_of(number, num_envs=2)


@functools.cache
def row_bytes(number) -> bytes:
    row = two_env_row(number)
    return b"".join(np.ascontiguousarray(row[name]).tobytes() for name in COLUMNS)


class UncountedMachine(ReplayMachine):
    counted = False

    def make(self, capacity):
        return Uncounted(capacity)

    def add_to(self, buffer, numbers) -> None:
        buffer.add(numbers)

    def contents(self, buffer):
        return [number.to_bytes(8, "little") for number in buffer.contents()]

    def expected(self, number):
        return number.to_bytes(8, "little")


class DiskMachine(OwnMachine):
    """The same in a store on disk, with few examples: what differs is tested on its own."""

    def make_store(self, most_pieces):
        self.folder = tempfile.TemporaryDirectory()
        return DiskLog(self.folder.name)

    def teardown(self) -> None:
        if hasattr(self, "folder"):
            self.store.close()
            self.folder.cleanup()


def test_every_order_of_events_brings_the_rows_back_from_disk() -> None:
    run_state_machine_as_test(
        DiskMachine, settings=settings(max_examples=6, stateful_step_count=25, deadline=None, phases=[Phase.generate])
    )


@pytest.mark.parametrize("machine", [OwnMachine, UncountedMachine])
def test_every_order_of_events_brings_the_rows_back(machine) -> None:
    run_state_machine_as_test(machine, settings=settings(max_examples=80, stateful_step_count=30, deadline=None))
