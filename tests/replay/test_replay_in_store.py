"""Replay buffers in a store on disk: the same promises as in memory, every byte through segments."""

from __future__ import annotations

import h5py
import numpy as np
import pytest
from replay.buffers import NESTED, Uncounted, add_own, handle_of, make_own
from replay.disk_log import DiskLog
from replay.test_handle import assert_holds

from simckpt.errors import ReplayWarning, SegmentMissingError


@pytest.fixture
def store(tmp_path):
    log = DiskLog(tmp_path / "store")
    yield log
    log.close()


def test_rows_come_back_from_segments(store) -> None:
    buffer = make_own(12, num_envs=3, space=NESTED)
    handle = handle_of(buffer)
    held = []
    count = 0
    for more in (5, 4, 0, 6, 12, 1, 30, 3):
        add_own(buffer, range(count, count + more), space=NESTED)
        count += more
        held.append((store.save(handle), range(max(0, count - 12), count)))
        store.save(handle, fail=True)
    for checkpoint, numbers in held:
        twin = make_own(12, num_envs=3, space=NESTED, seed=3)
        store.restore(handle_of(twin), checkpoint)
        assert_holds(twin, numbers, space=NESTED)
    assert twin.sample(9).rewards.tobytes() == buffer.sample(9).rewards.tobytes()


def test_a_restored_buffer_goes_on_where_its_checkpoint_ended(store, tmp_path) -> None:
    buffer = make_own(10)
    add_own(buffer, range(14))
    checkpoint = store.save(handle_of(buffer))
    twin = make_own(10)
    handle = handle_of(twin)
    store.restore(handle, checkpoint)
    segments = set(handle.segments())
    assert len(segments) == 1
    add_own(twin, range(14, 17))
    second = store.save(handle)
    assert segments < set(handle.segments())
    third = make_own(10)
    store.restore(handle_of(third), second)
    assert_holds(third, range(7, 17))


def test_any_hdf5_viewer_sees_whole_columns(store) -> None:
    buffer = make_own(10, num_envs=2)
    handle = handle_of(buffer)
    for first in (0, 5, 10):
        add_own(buffer, range(first, first + 5))
        checkpoint = store.save(handle)
    path = store.files.path / "runs" / "run" / "checkpoints" / f"{checkpoint.seq:08d}" / "state.h5"
    with h5py.File(path) as file:
        group = file["replay"]
        oldest_first = np.concatenate([buffer.rewards[5:], buffer.rewards[:5]])
        assert group["rewards"][:].tobytes() == oldest_first.tobytes()
        assert group["rewards"].is_virtual
        assert group["observations"].shape == (10, 2, 3)
        assert group["valid"].dtype == bool
        assert b"oldest" in group.attrs["description"]


def test_pruned_parents_and_lost_segments(store) -> None:
    buffer = make_own(10)
    handle = handle_of(buffer)
    add_own(buffer, range(4))
    first = store.save(handle)
    add_own(buffer, range(4, 8))
    second = store.save(handle)
    store.prune(first)
    twin = make_own(10)
    store.restore(handle_of(twin), second)
    assert_holds(twin, range(8))
    lost = store.files.index("run", second.seq).leaves["replay/rewards"].pieces[1].segment
    (store.files.path / "segments" / f"{lost}.h5").unlink()
    with pytest.raises(SegmentMissingError):
        store.restore(handle_of(twin), second)
    # the live rows are still there, and the next save holds them all
    add_own(buffer, [8])
    third = store.save(handle)
    store.restore(handle_of(twin), third)
    assert_holds(twin, range(9))


def test_an_uncounted_ring_that_went_round(store) -> None:
    buffer = Uncounted(7)
    handle = handle_of(buffer)
    buffer.add(range(9))
    store.save(handle)
    buffer.add(range(9, 16))
    with pytest.warns(ReplayWarning):
        checkpoint = store.save(handle)
    twin = Uncounted(7)
    store.restore(handle_of(twin), checkpoint)
    assert twin.contents() == buffer.contents()


def test_more_saves_than_a_checkpoint_may_have_segments(store) -> None:
    buffer = Uncounted(300)
    handle = handle_of(buffer)
    for number in range(0, 270, 2):
        buffer.add(range(number, number + 2))
        checkpoint = store.save(handle)
    assert len(handle.segments()) <= 128
    twin = Uncounted(300)
    store.restore(handle_of(twin), checkpoint)
    assert twin.contents() == list(range(270))
