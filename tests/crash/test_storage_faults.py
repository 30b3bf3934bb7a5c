"""An error at every single operation of a save and of a prune, once and for good."""

import errno

import pytest
from crash_helpers import (
    ERRORS,
    RUN,
    FaultyDisk,
    check,
    check_after_death,
    components,
    fail_with,
    in_child,
    interrupt,
    new_store,
    save,
)

from simckpt.errors import StorageError, StorageFullError
from simckpt.storage import StoreFiles

SAVE, PRUNE = (lambda store: save(store, 3)), (lambda store: store.prune(RUN, 1, "test"))


def attempt(action) -> StorageError | None:
    """Returns how the disk refused, or None if it did not; any other error fails the test."""
    try:
        action()
    except StorageError as error:
        return error
    return None


def count(path, action) -> list[str]:
    disk = FaultyDisk()
    store = new_store(path, disk=disk)
    with store.claim(RUN):
        save(store, 1)
        save(store, 2)
        disk.arm()
        action(store)
        return list(disk.calls)


@pytest.mark.parametrize(("number", "sticky"), [(errno.EIO, False), (errno.ENOSPC, True)], ids=["once", "for good"])
def test_a_save_that_fails_anywhere_leaves_the_store_as_it_was(tmp_path, number, sticky):
    calls = count(tmp_path / "count", SAVE)
    assert {"pwrite", "allocate", "fsync", "close", "rename", "create"} <= set(calls)
    failures = 0
    for at in range(1, len(calls) + 1):
        disk = FaultyDisk()
        store = new_store(tmp_path / f"store-{at}", disk=disk)
        with store.claim(RUN):
            save(store, 1)
            save(store, 2)
            disk.arm(fail_with(number), at=at, sticky=sticky)
            error = attempt(lambda store=store: save(store, 3))
            failed = error is not None
            assert not failed or isinstance(error, StorageFullError) == (number == errno.ENOSPC)
            disk.arm()
            found = check(store)
            if sticky:
                # where even the way back fails, a whole checkpoint may stand that nobody was promised
                assert found in ([1, 2], [1, 2, 3])
                assert failed or found == [1, 2, 3]
            else:
                assert found == ([1, 2] if failed else [1, 2, 3])
                assert not failed or list((store.path / "tmp").iterdir()) == []
            failures += failed
            save(store, 4)
            assert check(store) == [*found, 4]
    assert failures > len(calls) // 2


@pytest.mark.parametrize(("number", "sticky"), [(errno.EIO, False), (errno.ENOSPC, True)], ids=["once", "for good"])
def test_a_prune_that_fails_anywhere_leaves_a_checkpoint_or_a_tombstone(tmp_path, number, sticky):
    for at in range(1, len(count(tmp_path / "count", PRUNE)) + 1):
        disk = FaultyDisk()
        store = new_store(tmp_path / f"store-{at}", disk=disk)
        with store.claim(RUN):
            save(store, 1)
            save(store, 2)
            disk.arm(fail_with(number), at=at, sticky=sticky)
            failed = attempt(lambda store=store: store.prune(RUN, 1, "test"))
            assert check(store) in ([[1, 2], [-1, 2]] if failed else [[-1, 2]])
            disk.arm()
            store.prune(RUN, 1, "test")
            assert check(store) == [-1, 2]
            folder = store.path / "runs" / RUN / "checkpoints" / "00000001"
            assert [entry.name for entry in folder.iterdir()] == ["commit.json"]
            assert save(store, 3).seq == 3


def test_what_a_failed_prune_left_is_freed_by_the_next_start(tmp_path):
    calls = count(tmp_path / "count", PRUNE)
    assert calls.count("unlink") > 2
    for at in range(1, len(calls) + 1):
        path = tmp_path / f"store-{at}"

        def prune(path=path, at=at):
            disk = FaultyDisk()
            store = new_store(path, disk=disk)
            with store.claim(RUN):
                save(store, 1)
                save(store, 2)
                disk.arm(fail_with(errno.EIO), at=at)
                attempt(lambda: PRUNE(store))
                disk.arm()
                save(store, 3)

        assert in_child(prune) == 0
        assert check_after_death(path) in ([1, 2, 3], [-1, 2, 3])


@pytest.mark.parametrize(("action", "after"), [(SAVE, [1, 2, 3]), (PRUNE, [-1, 2])], ids=["save", "prune"])
def test_ctrl_c_anywhere_blocks_nothing_in_the_same_process(tmp_path, action, after):
    seen = set()
    for at in range(1, len(count(tmp_path / "count", action)) + 1):
        disk = FaultyDisk()
        store = new_store(tmp_path / f"store-{at}", disk=disk)
        with store.claim(RUN):
            save(store, 1)
            save(store, 2)
            disk.arm(interrupt, at=at)
            with pytest.raises(KeyboardInterrupt):
                action(store)
            disk.arm()
            found = check(store)
            assert found in ([1, 2], after)
            seen.add(tuple(found))
            save(store, 4)
            save(store, 5)
            assert check(store) == [*found, 4, 5]
            store.prune(RUN, 1, "again")
    assert seen == {(1, 2), tuple(after)}, "the rename is passed once before and once after"


def test_creating_claiming_and_recording_fail_cleanly(tmp_path):
    def start(path, disk) -> StoreFiles:
        store = new_store(path, disk=disk)
        with store.claim(RUN):
            pass
        return store

    disk = FaultyDisk()
    start(tmp_path / "count", disk)
    for at in range(1, len(disk.calls) + 1):
        disk = FaultyDisk()
        disk.arm(fail_with(ERRORS[at % 2]), at=at)
        attempt(lambda at=at, disk=disk: start(tmp_path / f"store-{at}", disk))
        store = StoreFiles.create(tmp_path / f"store-{at}")
        if store.runs() == []:
            store = new_store(store.path)
        with store.claim(RUN):
            assert save(store, 1).seq == 1
        assert store.read(RUN, 1).keys() == components(1).keys()


def test_a_save_syncs_every_file_and_folder_before_its_name_is_given(tmp_path):
    """Three files, their folder, one rename, the folder above: in this order, and nothing is written afterwards."""
    calls = count(tmp_path / "store", SAVE)
    steps = [name for name in calls if name in ("create", "fsync", "rename")]
    assert steps == ["create", "fsync"] * 3 + ["fsync", "rename", "fsync"]
    assert "pwrite" not in calls[calls.index("rename") :]
