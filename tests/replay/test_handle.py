"""What a save of a replay buffer writes, what a restore brings back, and what is refused."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
from replay.buffers import (
    BOX,
    NESTED,
    Uncounted,
    UncountedAdapter,
    add_own,
    handle_of,
    make_own,
    row_of,
)

from simckpt.errors import (
    CaptureError,
    ReplayWarning,
    RestoreError,
    StateMismatchError,
    UnsupportedStateError,
)
from simckpt.replay import Column, ReplayBuffer, Ring, handle_for, place_rows, register_replay_adapter
from simckpt.replay.handle import rows_added
from simckpt.state import LogHandle, encode
from simckpt.state.staging import THRESHOLD, Arena
from simckpt.testing.log_store import LogStore


def written(checkpoint) -> set[int]:
    """Returns how many rows each column wrote: a set of one number where all wrote as many."""
    return set(checkpoint.written.values())


def assert_holds(buffer: ReplayBuffer, numbers, *, space=BOX) -> None:
    """Asserts that the rows of a buffer are these, oldest first, each in slot (its position in all that were added)."""
    numbers = list(numbers)
    assert len(buffer) == len(numbers)
    for place, number in enumerate(numbers):
        slot = (buffer.added - len(numbers) + place) % buffer.capacity
        row = row_of(number, num_envs=buffer.num_envs, space=space)
        assert encode({name: getattr(buffer, name) for name in row}).leaves.keys() == encode(row).leaves.keys()
        for path, leaf in encode(row).leaves.items():
            live = encode({name: getattr(buffer, name) for name in row}).leaves[path].data[slot]
            assert live.tobytes() == leaf.data.tobytes(), (number, path)


def test_it_is_a_log_handle() -> None:
    assert isinstance(handle_of(make_own()), LogHandle)


def test_other_objects_have_no_replay_handle() -> None:
    for obj in (np.zeros(3), {}, object()):
        assert handle_for(obj, "replay") is None


def test_the_file_shows_the_columns_by_their_names() -> None:
    buffer = make_own(space=NESTED)
    add_own(buffer, range(3), space=NESTED)
    leaves = encode(handle_of(buffer).capture()).leaves
    assert set(leaves) == {
        "observations/camera",
        "observations/arm/angles",
        "next_observations/camera",
        "next_observations/arm/angles",
        "actions",
        "rewards",
        "terminated",
        "truncated",
        "valid",
    }
    assert leaves["observations/camera"].shape == (3, 1, 2, 2)


def test_rows_are_written_once_and_overwritten_ones_drop_out_of_their_segments() -> None:
    buffer, store = make_own(10, num_envs=3), LogStore()
    handle = handle_of(buffer)
    add_own(buffer, range(4))
    assert written(store.save(handle)) == {4}
    add_own(buffer, range(4, 8))
    assert written(store.save(handle)) == {4}
    add_own(buffer, range(8, 13))
    checkpoint = store.save(handle)
    assert written(checkpoint) == {5}
    # rows 0, 1, 2 are gone: of the first segment one row is left
    assert [(piece.start, piece.stop) for piece in checkpoint.pieces["rewards"]] == [(3, 4), (0, 4), (0, 5)]
    twin = make_own(10, num_envs=3, seed=9)
    store.restore(handle_of(twin), checkpoint)
    assert_holds(twin, range(3, 13))
    assert twin.sample(20).observations.tobytes() == buffer.sample(20).observations.tobytes()


def test_a_first_save_with_a_full_ring_holds_every_row() -> None:
    buffer, store = make_own(6), LogStore()
    add_own(buffer, range(15))
    checkpoint = store.save(handle_of(buffer))
    assert written(checkpoint) == {6}
    twin = make_own(6)
    store.restore(handle_of(twin), checkpoint)
    assert_holds(twin, range(9, 15))


def test_a_save_without_new_rows_writes_none() -> None:
    buffer, store = make_own(6), LogStore()
    handle = handle_of(buffer)
    assert written(store.save(handle)) == {0}
    add_own(buffer, range(8))
    store.save(handle)
    buffer.sample(3)
    checkpoint = store.save(handle)
    assert written(checkpoint) == {0}
    twin = make_own(6)
    store.restore(handle_of(twin), checkpoint)
    assert_holds(twin, range(2, 8))
    assert twin.sample(9).rewards.tobytes() == buffer.sample(9).rewards.tobytes()


@pytest.mark.parametrize("count", [6, 7, 12, 13])
def test_more_rows_than_the_capacity_between_two_saves(count) -> None:
    buffer, store = make_own(6), LogStore()
    handle = handle_of(buffer)
    add_own(buffer, range(8))
    store.save(handle)
    add_own(buffer, range(8, 8 + count))
    checkpoint = store.save(handle)
    assert written(checkpoint) == {6}
    twin = make_own(6)
    store.restore(handle_of(twin), checkpoint)
    assert_holds(twin, range(2 + count, 8 + count))


def test_rows_of_failed_saves_are_in_the_next() -> None:
    buffer, store = make_own(10), LogStore()
    handle = handle_of(buffer)
    add_own(buffer, range(3))
    store.save(handle, fail=True)
    add_own(buffer, range(3, 5))
    assert written(store.save(handle)) == {5}
    for first in (5, 8):
        add_own(buffer, range(first, first + 3))
        store.save(handle, fail=True)
    checkpoint = store.save(handle)
    assert written(checkpoint) == {6}
    twin = make_own(10)
    store.restore(handle_of(twin), checkpoint)
    assert_holds(twin, range(1, 11))


def test_pruning_the_parents_costs_no_row() -> None:
    buffer, store = make_own(10), LogStore()
    handle = handle_of(buffer)
    previous = None
    for first in range(0, 24, 3):
        add_own(buffer, range(first, first + 3))
        checkpoint = store.save(handle)
        assert written(checkpoint) == {3}
        if previous is not None:
            store.prune(previous)
        previous = checkpoint
        twin = make_own(10)
        store.restore(handle_of(twin), checkpoint)
        assert_holds(twin, range(max(0, first - 7), first + 3))
    # what nobody refers to is gone
    assert len(store.segments) == 4


def test_lost_segments_are_written_again() -> None:
    buffer, store = make_own(10), LogStore()
    handle = handle_of(buffer)
    for first in (0, 2, 5):
        add_own(buffer, range(first, first + 2 + first // 2))
        checkpoint = store.save(handle)
    second = checkpoint.pieces["rewards"][1].segment
    del store.segments[second]
    add_own(buffer, [9])
    checkpoint = store.save(handle)
    # rows 0 and 1 are durable still; the table is a line, so those behind the gap are written with it
    assert written(checkpoint) == {8}
    twin = make_own(10)
    store.restore(handle_of(twin), checkpoint)
    assert_holds(twin, range(10))


def test_merged_segments_are_referred_to_by_the_next_save() -> None:
    buffer, store = make_own(50), LogStore(most_pieces=4)
    handle = handle_of(buffer)
    for number in range(60):
        add_own(buffer, [number])
        checkpoint = store.save(handle)
        assert written(checkpoint) == {1}
        assert all(len(pieces) <= 4 for pieces in checkpoint.pieces.values())
    twin = make_own(50)
    store.restore(handle_of(twin), checkpoint)
    assert_holds(twin, range(10, 60))


def test_a_restored_buffer_saves_its_new_rows_alone() -> None:
    buffer, store = make_own(10), LogStore()
    add_own(buffer, range(14))
    checkpoint = store.save(handle_of(buffer))
    twin = make_own(10)
    handle = handle_of(twin)
    store.restore(handle, checkpoint)
    add_own(twin, range(14, 17))
    second = store.save(handle)
    assert written(second) == {3}
    third = make_own(10)
    store.restore(handle_of(third), second)
    assert_holds(third, range(7, 17))


def test_a_larger_capacity_takes_all_rows() -> None:
    buffer, store = make_own(6), LogStore()
    add_own(buffer, range(9))
    checkpoint = store.save(handle_of(buffer))
    larger = make_own(20)
    handle = handle_of(larger)
    store.restore(handle, checkpoint)
    assert (len(larger), larger.added) == (6, 9)
    assert larger.rewards[:6, 0].tolist() == [float(row_of(number)["rewards"][0]) for number in range(3, 9)]
    assert set(np.unique(larger.sample(200).rewards)) <= set(larger.rewards[:6, 0].tolist())
    # and goes on from there
    add_own(larger, range(9, 12))
    second = store.save(handle)
    assert written(second) == {3}
    again = make_own(20)
    store.restore(handle_of(again), second)
    assert again.rewards[:9, 0].tolist() == [float(row_of(number)["rewards"][0]) for number in range(3, 12)]


def test_a_smaller_capacity_drops_the_oldest_rows_and_says_so() -> None:
    buffer, store = make_own(10), LogStore()
    add_own(buffer, range(14))
    checkpoint = store.save(handle_of(buffer))
    smaller = make_own(4)
    handle = handle_of(smaller)
    with pytest.warns(ReplayWarning, match="10 rows, the replay buffer takes 4: the 6 oldest are dropped"):
        store.restore(handle, checkpoint)
    assert len(smaller) == 4
    assert smaller.rewards[:, 0].tolist() == [float(row_of(number)["rewards"][0]) for number in range(10, 14)]
    add_own(smaller, [14])
    second = store.save(handle)
    assert written(second) == {1}
    again = make_own(4)
    store.restore(handle_of(again), second)
    assert again.rewards[:, 0].tolist() == [float(row_of(number)["rewards"][0]) for number in (14, 11, 12, 13)]


def test_a_memory_mapped_buffer_is_saved_and_restored_like_any_other(tmp_path) -> None:
    buffer, store = make_own(6, memory_map=tmp_path / "a"), LogStore()
    handle = handle_of(buffer)
    add_own(buffer, range(5))
    store.save(handle)
    add_own(buffer, range(5, 9))
    checkpoint = store.save(handle)
    assert written(checkpoint) == {4}
    twin = make_own(6, memory_map=tmp_path / "b")
    store.restore(handle_of(twin), checkpoint)
    assert_holds(twin, range(3, 9))


def test_another_handle_that_restores_the_buffer_voids_the_table() -> None:
    buffer, store = make_own(10), LogStore()
    first, second = handle_of(buffer), handle_of(buffer)
    add_own(buffer, range(5))
    early = store.save(first)
    add_own(buffer, range(5, 8))
    store.save(first)
    store.restore(second, early)
    add_own(buffer, range(100, 103))
    checkpoint = store.save(first)
    twin = make_own(10)
    store.restore(handle_of(twin), checkpoint)
    assert_holds(twin, [*range(5), *range(100, 103)])


def test_a_save_that_is_committed_after_a_restore_changes_nothing() -> None:
    buffer, store = make_own(10), LogStore()
    handle = handle_of(buffer)
    add_own(buffer, range(5))
    early = store.save(handle)
    add_own(buffer, range(5, 8))
    handle.capture()
    late = {path: pieces * 2 for path, pieces in early.pieces.items()}
    store.restore(handle, early)
    handle.committed(late)
    add_own(buffer, [50])
    checkpoint = store.save(handle)
    assert written(checkpoint) == {1}
    twin = make_own(10)
    store.restore(handle_of(twin), checkpoint)
    assert_holds(twin, [*range(5), 50])


def test_a_ring_without_a_counter_is_followed_by_its_cursor() -> None:
    buffer, store = Uncounted(7), LogStore()
    handle = handle_of(buffer)
    count = 0
    for more in (3, 0, 2, 4, 6, 1, 5):
        buffer.add(range(count, count + more))
        count += more
        checkpoint = store.save(handle)
        assert checkpoint.written == {"values": more}
        twin = Uncounted(7)
        store.restore(handle_of(twin), checkpoint)
        assert twin.contents() == buffer.contents() == list(range(max(0, count - 7), count))
        assert np.array_equal(twin.values[: len(twin.contents())], buffer.values[: len(twin.contents())])


@pytest.mark.parametrize("rounds", [1, 2])
def test_a_ring_without_a_counter_that_went_round_is_written_whole(rounds) -> None:
    buffer, store = Uncounted(7), LogStore()
    handle = handle_of(buffer)
    buffer.add(range(9))
    store.save(handle)
    buffer.add(range(9, 9 + 7 * rounds))
    with pytest.warns(ReplayWarning, match="more rows than its capacity"):
        checkpoint = store.save(handle)
    assert checkpoint.written == {"values": 7}
    twin = Uncounted(7)
    store.restore(handle_of(twin), checkpoint)
    assert twin.contents() == buffer.contents()
    buffer.add([50])
    assert store.save(handle).written == {"values": 1}


def test_a_ring_that_filled_up_and_went_round_is_noticed_without_looking_at_rows() -> None:
    assert rows_added(Ring(10, 5, 5), Ring(10, 10, 7)) is None
    assert rows_added(Ring(10, 5, 5), Ring(10, 10, 2)) == 7
    assert rows_added(Ring(10, 10, 5), Ring(10, 10, 5)) == 0
    assert rows_added(Ring(10, 10, 5), Ring(10, 5, 5)) is None
    assert rows_added(Ring(10, 10, 5, 15), Ring(10, 10, 5, 35)) == 20
    assert rows_added(Ring(10, 10, 5, 35), Ring(10, 10, 5, 15)) is None
    assert rows_added(Ring(10, 10, 5, 15), Ring(10, 10, 6, 35)) is None
    assert rows_added(Ring(10, 5, 5), Ring(20, 6, 6)) is None
    # memory-optimised rings keep one slot free
    assert rows_added(Ring(10, 7, 7), Ring(10, 9, 2)) == 5
    assert rows_added(Ring(10, 9, 2), Ring(10, 9, 3)) == 1


def test_a_cleared_ring_is_written_whole() -> None:
    buffer, store = Uncounted(7), LogStore()
    handle = handle_of(buffer)
    buffer.add(range(9))
    store.save(handle)
    buffer.clear()
    buffer.add(range(100, 104))
    checkpoint = store.save(handle)
    assert checkpoint.written == {"values": 4}
    twin = Uncounted(7)
    store.restore(handle_of(twin), checkpoint)
    assert twin.contents() == [100, 101, 102, 103]


def test_rewritten_rows_are_written_again_and_the_column_is_named() -> None:
    buffer, store = Uncounted(20), LogStore()
    handle = handle_of(buffer)
    buffer.add(range(25))
    store.save(handle)
    buffer.values[12] = -1
    buffer.add([25])
    with pytest.warns(ReplayWarning, match=r"rows of values have changed.*declare it mutable"):
        checkpoint = store.save(handle)
    assert checkpoint.written == {"values": 20}
    twin = Uncounted(20)
    store.restore(handle_of(twin), checkpoint)
    assert twin.contents() == buffer.contents()
    assert -1 in twin.contents()


def test_rewritten_rows_of_a_large_buffer_are_found_within_a_few_saves() -> None:
    # 8 MB, of which each save looks at 2
    buffer, store = Uncounted(2048, width=512), LogStore()
    handle = handle_of(buffer)
    buffer.add(range(2048))
    store.save(handle)
    # all of it has been looked at once
    for _ in range(6):
        store.save(handle)
    buffer.values[1000] = -1
    saves = 0
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        while store.save(handle).written == {"values": 0}:
            saves += 1
            assert saves < 6
    assert [warning.category for warning in caught] == [ReplayWarning]


def test_many_small_saves_keep_the_audit_small() -> None:
    buffer, store = Uncounted(5000), LogStore()
    handle = handle_of(buffer)
    for number in range(2000):
        buffer.add([number])
        handle.committed({})
        store.save(handle)
        store.prune(store.checkpoints[0]) if len(store.checkpoints) > 1 else None
    assert len(handle._audit._units) <= 2 * 64


class Mutable:
    def __init__(self, capacity: int) -> None:
        self.ring = Uncounted(capacity)
        self.weights = np.zeros(capacity)

    def add(self, numbers) -> None:
        for number in numbers:
            self.weights[self.ring.position] = number / 8
            self.ring.add([number])


class MutableAdapter(UncountedAdapter):
    def columns(self, buffer):
        return {"values": Column(buffer.ring.values), "weights": Column(buffer.weights, mutable=True)}

    def ring(self, buffer):
        return super().ring(buffer.ring)

    def load(self, buffer, columns, ring, extra):
        place_rows(self.columns(buffer), columns, ring)
        buffer.ring.position, buffer.ring.full = ring.cursor, ring.filled == ring.capacity


register_replay_adapter(Mutable, MutableAdapter())


def test_mutable_columns_are_captured_whole_and_in_the_order_of_the_rows() -> None:
    buffer, store = Mutable(5), LogStore()
    handle = handle_of(buffer)
    buffer.add(range(7))
    store.save(handle)
    buffer.weights[:] *= 2
    checkpoint = store.save(handle)
    assert checkpoint.written == {"values": 0}
    assert store.read(checkpoint)["weights"].tolist() == [0.5, 0.75, 1.0, 1.25, 1.5]
    twin = Mutable(5)
    store.restore(handle_of(twin), checkpoint)
    assert twin.weights.tolist() == buffer.weights.tolist()


def test_large_copies_lie_in_the_staging_memory_of_a_save() -> None:
    buffer = Uncounted(THRESHOLD // 8)
    buffer.add(range(THRESHOLD // 8))
    # wrapped around: two parts, one copy
    buffer.add(range(5))
    handle, arena = handle_of(buffer), Arena()
    with arena.recording():
        captured = handle.capture()
    assert arena.nbytes >= THRESHOLD
    assert not captured["values"].new.flags.owndata
    arena.release()


def test_captured_rows_share_no_memory_with_the_buffer() -> None:
    buffer = Uncounted(5)
    buffer.add([1, 2])
    captured = handle_of(buffer).capture()
    buffer.values[:] = 9
    assert captured["values"].new[:, 0].tolist() == [1, 2]


def test_a_state_that_does_not_fit_is_refused_with_all_its_problems() -> None:
    buffer, store = make_own(6, num_envs=2), LogStore()
    add_own(buffer, range(4))
    saved = store.read(store.save(handle_of(buffer)))
    other = make_own(6, num_envs=3, space=NESTED)
    with pytest.raises(StateMismatchError) as caught:
        handle_of(other).validate(saved)
    listed = "\n".join(caught.value.problems)
    for part in (
        "observations/camera: not in the checkpoint",
        "observations: only in",
        "rewards: a row was saved as (2,)",
    ):
        assert part in listed


@pytest.mark.parametrize(
    "change",
    [
        lambda state: state.pop("extra"),
        lambda state: state.update(ring=3),
        lambda state: state["ring"].update(filled=5),
        lambda state: state["ring"].update(cursor=6),
        lambda state: state["ring"].update(cursor=3),
        lambda state: state["ring"].update(cursor=-1),
        lambda state: state["ring"].update(filled="4"),
        lambda state: state["ring"].update(added=3),
        lambda state: state["ring"].update(added=None),
        lambda state: state.update(rewards=state["rewards"][:3]),
        lambda state: state.update(rewards=state["rewards"].astype(np.float64)),
        lambda state: state.update(rewards="no rows"),
        lambda state: state.update(extra={"rng": {"type": "random.Random"}}),
        lambda state: state.update(extra=[]),
    ],
)
def test_a_state_that_contradicts_itself_is_refused_and_touches_nothing(change) -> None:
    buffer, store = make_own(6), LogStore()
    add_own(buffer, range(4))
    saved = store.read(store.save(handle_of(buffer)))
    change(saved)
    twin = make_own(6)
    add_own(twin, [77])
    handle = handle_of(twin)
    for method in (handle.validate, handle.apply):
        with pytest.raises(StateMismatchError):
            method(saved)
    assert_holds(twin, [77])


def test_a_load_that_fails_is_a_restore_error() -> None:
    class Broken(Uncounted):
        pass

    class Adapter(UncountedAdapter):
        def load(self, buffer, columns, ring, extra):
            raise OSError("no")

    register_replay_adapter(Broken, Adapter())
    buffer, store = Broken(5), LogStore()
    buffer.add([1, 2])
    handle = handle_of(buffer)
    checkpoint = store.save(handle)
    with pytest.raises(RestoreError, match=r"load\(\) raised OSError: no"):
        store.restore(handle, checkpoint)
    # nobody knows what is in it now: the next save holds it whole
    assert store.save(handle).written == {"values": 2}


def test_a_subclass_is_refused_by_name_until_it_is_registered() -> None:
    class Relabelling(ReplayBuffer):
        pass

    buffer = Relabelling(5, BOX, BOX, seed=0)
    with pytest.raises(UnsupportedStateError, match=r"'replay'.*Relabelling.*no adapter") as caught:
        handle_for(buffer, "replay")
    assert caught.value.path == "replay"


@pytest.mark.parametrize(
    ("columns", "ring", "error", "message"),
    [
        ({"ring": Column(np.zeros((5, 1)))}, Ring(5, 0, 0), CaptureError, "ring"),
        ({"values": np.zeros((5, 1))}, Ring(5, 0, 0), CaptureError, "Columns"),
        ({"values": Column(np.empty(5, object))}, Ring(5, 0, 0), UnsupportedStateError, "replay/values"),
        ({"values": Column(np.zeros((5, 1)))}, Ring(5, 6, 0), CaptureError, "cannot be"),
        ({"values": Column(np.zeros((5, 1)))}, Ring(5, 5, 5), CaptureError, "cannot be"),
        ({"values": Column(np.zeros((5, 1)))}, Ring(5, 5, 0, 3), CaptureError, "cannot be"),
        ({"values": Column(np.zeros((4, 1)))}, Ring(5, 5, 0), CaptureError, "4 rows"),
    ],
)
def test_an_adapter_that_contradicts_itself_is_an_error_of_the_save(columns, ring, error, message) -> None:
    class Odd(Uncounted):
        pass

    class Adapter(UncountedAdapter):
        def columns(self, buffer):
            return columns

        def ring(self, buffer):
            return ring

    register_replay_adapter(Odd, Adapter())
    with pytest.raises(error, match=message):
        handle_of(Odd(5)).capture()


def test_a_buffer_may_get_its_columns_with_its_first_row() -> None:
    class Late(Uncounted):
        values = None

        def __init__(self, capacity):
            super().__init__(capacity)
            self.made = False

        def add(self, numbers):
            self.made = True
            super().add(numbers)

    class Adapter(UncountedAdapter):
        def columns(self, buffer):
            return super().columns(buffer) if buffer.made else {}

        def load(self, buffer, columns, ring, extra):
            buffer.made = bool(columns)
            if columns:
                super().load(buffer, columns, ring, extra)

    register_replay_adapter(Late, Adapter())
    buffer, store = Late(5), LogStore()
    handle = handle_of(buffer)
    empty = store.save(handle)
    buffer.add(range(3))
    checkpoint = store.save(handle)
    assert checkpoint.written == {"values": 3}
    twin = Late(5)
    twin_handle = handle_of(twin)
    store.restore(twin_handle, checkpoint)
    assert twin.contents() == [0, 1, 2]
    twin.add([3])
    assert store.save(twin_handle).written == {"values": 1}
    store.restore(handle_of(twin), empty)
    assert not twin.made
