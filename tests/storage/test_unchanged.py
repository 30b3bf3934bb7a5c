"""Large leaves that stay as they are: written with the first save, into a segment with the second, then no more."""

import h5py
import numpy as np
import pytest
from log_helpers import RUN, segment_files
from storage_helpers import checkpoint_folder, leaf, new_store

from simckpt.state.tree import Encoded
from simckpt.storage import CommitDraft, StoreFiles, digests, state_file, unchanged


@pytest.fixture
def store(tmp_path):
    store = new_store(tmp_path / "store")
    with store.claim(RUN):
        yield store


def save(store, step=0, **arrays):
    leaves = {name: leaf(array) for name, array in arrays.items()}
    return store.commit(RUN, CommitDraft(None, step), {"agent": Encoded(leaves, b"{}")})


def large(seed=0):
    return np.random.default_rng(seed).standard_normal((2, 1 << 17))  # 2 MB


def test_a_large_leaf_is_shared_from_its_second_unchanged_save_on(store):
    frozen, live = large(), large(1)
    sizes, pieces = [], []
    for step in range(5):
        live += 1
        commit = save(store, step, frozen=frozen, live=live)
        sizes.append(commit.record.size)
        pieces.append(commit.leaves["agent/frozen"].pieces)
        assert commit.leaves["agent/live"].pieces == ()
    assert pieces[0] == ()
    assert len({piece.segment for each in pieces[1:] for piece in each}) == 1
    assert sizes[0] > 4 << 20
    assert sizes[1] > 4 << 20
    assert max(sizes[2:]) < (2 << 20) + 20_000
    assert len(segment_files(store)) == 1
    for seq in range(1, 6):
        store.verify(RUN, seq)
        found = store.read(RUN, seq)["agent"].leaves["frozen"]
        assert (found.data.tobytes(), found.data.shape) == (frozen.tobytes(), frozen.shape)
    with h5py.File(checkpoint_folder(store, 5) / "state.h5") as file:
        assert file["agent/frozen"][...].tobytes() == frozen.tobytes()
        assert file["agent/live"][...].tobytes() == live.tobytes()


def test_the_digest_of_a_shared_leaf_is_that_of_its_bytes(store):
    frozen = large()
    first, second = save(store, frozen=frozen), save(store, frozen=frozen)
    assert first.leaves["agent/frozen"].digest == second.leaves["agent/frozen"].digest == digests.digest(frozen.data)


def test_any_changed_byte_is_seen_although_the_probe_may_miss_it(store):
    array = large()
    save(store, 0, x=array)
    for step in range(1, 40):
        array.reshape(-1).view(np.uint8)[step * 52_301] ^= 1
        save(store, step, x=array)
        assert store.read(RUN, step + 1)["agent"].leaves["x"].data.tobytes() == array.tobytes()
    assert segment_files(store) == set()


def test_a_leaf_that_changes_returns_to_the_state_file_and_its_segment_goes(store):
    array = large()
    for step in range(3):
        save(store, step, x=array)
    assert len(segment_files(store)) == 1
    array += 1
    commit = save(store, 3, x=array)
    assert commit.leaves["agent/x"].pieces == ()
    for seq in (1, 2, 3):
        store.prune(RUN, seq, "test")
    assert segment_files(store) == set()
    assert save(store, 4, x=array).leaves["agent/x"].pieces != ()


@pytest.mark.parametrize(
    "other",
    [
        lambda array: array.reshape(1 << 17, 2),
        lambda array: array.view(np.int64),
        lambda array: array.reshape(-1)[: 1 << 17].copy(),
    ],
    ids=["shape", "dtype", "length"],
)
def test_another_form_of_the_same_bytes_is_another_leaf(store, other):
    array = large()
    save(store, 0, x=array)
    commit = save(store, 1, x=other(array))
    assert commit.leaves["agent/x"].pieces == ()
    assert store.read(RUN, 2)["agent"].leaves["x"].data.tobytes() == other(array).tobytes()


def test_small_leaves_and_structures_are_always_written(store):
    small = np.arange((1 << 17) - 1, dtype=np.float64)
    structure = b'{"text":"' + b"x" * (2 << 20) + b'"}'
    for step in range(3):
        components = {"agent": Encoded({"x": leaf(small)}, structure)}
        commit = store.commit(RUN, CommitDraft(None, step), components)
        assert [each.pieces for each in commit.leaves.values()] == [(), ()]
    assert segment_files(store) == set()


def test_a_restart_compares_with_the_newest_checkpoint(store):
    frozen = large()
    save(store, 0, x=frozen)
    second = save(StoreFiles.open(store.path), 1, x=frozen)
    assert second.leaves["agent/x"].pieces != ()
    third = save(StoreFiles.open(store.path), 2, x=frozen)
    assert third.leaves["agent/x"].pieces == second.leaves["agent/x"].pieces
    store.prune(RUN, 3, "test")
    fourth = save(StoreFiles.open(store.path), 3, x=frozen)
    assert fourth.leaves["agent/x"].pieces == second.leaves["agent/x"].pieces
    (checkpoint_folder(store, 4) / "leaves.json").write_bytes(b"damaged")
    assert save(StoreFiles.open(store.path), 4, x=frozen).leaves["agent/x"].pieces == ()


def test_a_lost_segment_is_written_again(store):
    frozen = large()
    for step in range(2):
        commit = save(store, step, x=frozen)
    (piece,) = commit.leaves["agent/x"].pieces
    (store.path / "segments" / f"{piece.segment}.h5").unlink()
    (again,) = save(store, 2, x=frozen).leaves["agent/x"].pieces
    assert again.segment != piece.segment
    store.verify(RUN, 3)


def test_a_failed_save_is_compared_with_by_nobody(store):
    array = large()
    save(store, 0, x=array)
    changed = array + 1
    store.discard(store.prepare(RUN, {"agent": Encoded({"x": leaf(changed)}, b"{}")}))
    assert save(store, 1, x=changed).leaves["agent/x"].pieces == ()


def test_leaves_that_stop_changing_one_by_one_keep_within_their_share(store):
    """Each such save would make a file of its own; unchanged ones are never merged, so logs keep most of the limit."""
    arrays = {f"x{number}": np.full((1 << 20,), number, np.uint8) for number in range(36)}
    for step in range(37):
        live = {
            name: array if number < step else array + 100 + step for number, (name, array) in enumerate(arrays.items())
        }
        commit = save(store, step, **live)
    assert commit.record.segments <= 32
    assert store.read(RUN, 37)["agent"].leaves["x35"].data.tobytes() == arrays["x35"].tobytes()


def test_ever_changing_leaves_are_not_digested_twice(store, monkeypatch):
    array = large()
    save(store, 0, x=array)
    job = store.prepare_job(RUN)
    array += 1e-3
    items = state_file.collect({"agent": Encoded({"x": leaf(array)}, b"{}")})
    with monkeypatch.context() as patch:
        patch.setattr(digests, "matches", lambda *_: pytest.fail("the whole leaf was digested"))
        assert unchanged.unchanged(items, unchanged.probes(items), job.large) == set()
