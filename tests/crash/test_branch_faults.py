"""Errors, kills and pruners at every single operation of a branch: there is a whole run, or none."""

import errno
import os

import pytest
from crash_helpers import (
    RUN,
    FaultyDisk,
    check,
    fail_with,
    in_child,
    interrupt,
    kill,
    new_store,
    save,
    tear_and_kill,
)

from simckpt.errors import CheckpointNotFoundError, ConflictError, StorageError
from simckpt.storage import BranchRecord, CommitRecord, RunRecord, StoreFiles

ORIGIN = 1


def branch(store: StoreFiles, name: str = "branch") -> None:
    """What `Checkpoint.branch` does to the disk."""
    origin = store.commit_record(RUN, ORIGIN)
    store.write_run(
        name,
        RunRecord("cd" * 16, name, 1.0, origin=origin.id, branch=BranchRecord(RUN, ORIGIN, origin.step, {"lr": 0.5})),
    )


def started(path, disk=None) -> StoreFiles:
    store = new_store(path, disk=disk)
    with store.claim(RUN):
        save(store, 1)
        save(store, 2)
    return store


def count(path, action) -> list[str]:
    disk = FaultyDisk()
    store = started(path, disk)
    with store.claim(RUN):
        disk.arm()
        action(store)
        return list(disk.calls)


def is_whole(path) -> bool:
    """Returns whether the branch is there, after it was read; and that nothing else of the store has changed."""
    store = StoreFiles.open(path)
    assert check(store) in ([1, 2], [-1, 2])
    if store.runs() == [RUN]:
        assert not os.path.lexists(path / "runs" / "branch")
        return False
    record = store.read_run("branch")
    assert record.branch == BranchRecord(RUN, ORIGIN, 1, {"lr": 0.5})
    found = store.commit_record(RUN, ORIGIN)
    assert (found.id, type(found)) == (record.origin, CommitRecord)
    with store.claim("branch"):
        assert store.sequence("branch") == []
    return True


@pytest.mark.parametrize(("number", "sticky"), [(errno.EIO, False), (errno.ENOSPC, True)], ids=["once", "for good"])
def test_a_branch_that_fails_anywhere_is_whole_or_is_not_there(tmp_path, number, sticky):
    calls = count(tmp_path / "count", branch)
    assert calls.count("rename") == 1
    for at in range(1, len(calls) + 1):
        path, disk = tmp_path / f"store-{at}", FaultyDisk()
        store = started(path, disk)
        disk.arm(fail_with(number), at=at, sticky=sticky)
        try:
            branch(store)
            failed = False
        except StorageError:
            failed = True
        disk.arm()
        there = is_whole(path)
        if sticky:
            # where even the way back fails, a whole run may stand that nobody was promised
            assert there or failed
        else:
            assert there != failed
        if not there:
            branch(store)
            assert is_whole(path)


@pytest.mark.parametrize("fault", [kill, tear_and_kill], ids=["kill", "torn write"])
def test_a_branch_that_is_killed_anywhere_is_whole_or_is_not_there(tmp_path, fault):
    seen = set()
    for at in range(1, len(count(tmp_path / "count", branch)) + 1):
        path = tmp_path / f"store-{at}"
        started(path)

        def action(path=path, at=at):
            disk = FaultyDisk()
            store = StoreFiles.open(path, disk=disk)
            disk.arm(fault, at=at)
            branch(store)

        assert in_child(action) == -9
        there = is_whole(path)
        seen.add(there)
        with StoreFiles.open(path).claim(RUN):
            assert list((path / "tmp").iterdir()) == []
        if not there:
            branch(StoreFiles.open(path))
            assert is_whole(path)
    assert seen == {False, True}


def test_a_killed_branch_does_not_keep_a_running_writer_from_pruning(tmp_path):
    store = started(tmp_path / "store")

    def action():
        disk = FaultyDisk()
        dying = StoreFiles.open(store.path, disk=disk)
        disk.arm(kill, at=len(count(tmp_path / "count", branch)) - 2)
        branch(dying)

    with store.claim(RUN):
        assert in_child(action) == -9
        assert list((store.path / "tmp").glob("*/run.json"))
        store.prune(RUN, ORIGIN, "test")


def test_ctrl_c_anywhere_in_a_branch_leaves_it_whole_or_not_there(tmp_path):
    for at in range(1, len(count(tmp_path / "count", branch)) + 1):
        path, disk = tmp_path / f"store-{at}", FaultyDisk()
        store = started(path, disk)
        disk.arm(interrupt, at=at)
        with pytest.raises(KeyboardInterrupt):
            branch(store)
        disk.arm()
        if not is_whole(path):
            branch(store)
            assert is_whole(path)


def attempt(action) -> bool:
    try:
        action()
    except (ConflictError, CheckpointNotFoundError):
        return False
    return True


def prune(store: StoreFiles) -> None:
    store.prune(RUN, ORIGIN, "test")


@pytest.mark.parametrize(("outer", "inner"), [(prune, branch), (branch, prune)], ids=["in a prune", "in a branch"])
def test_a_branch_and_a_pruner_that_meet_anywhere_do_not_both_succeed(tmp_path, outer, inner):
    """One of them happens as a whole before each operation of the other one, in turn."""
    outcomes = set()
    for at in range(1, len(count(tmp_path / "count", outer)) + 1):
        path, disk, results = tmp_path / f"store-{at}", FaultyDisk(), {}
        store = started(path, disk)

        def meet(operation, path=path, results=results):
            results[inner] = attempt(lambda: inner(StoreFiles.open(path)))
            return operation.perform()

        with store.claim(RUN):
            disk.arm(meet, at=at)
            results[outer] = attempt(lambda store=store: outer(store))
        branched, pruned = results[branch], results[prune]
        assert not (branched and pruned)
        assert is_whole(path) == branched
        assert isinstance(store.commit_record(RUN, ORIGIN), CommitRecord) != pruned
        assert list((path / "tmp").iterdir()) == []
        outcomes.add((branched, pruned))
    assert {(True, False), (False, True)} <= outcomes


def test_what_a_dead_pruner_announced_and_did_not_do_hinders_no_branch(tmp_path):
    at_tombstone = count(tmp_path / "count", prune).index("rename") + 1
    path = tmp_path / "store"
    started(path)

    def die() -> None:
        disk = FaultyDisk()
        store = StoreFiles.open(path, disk=disk)
        with store.claim(RUN):
            disk.arm(kill, at=at_tombstone)
            prune(store)

    assert in_child(die) == -9
    (announced,) = (path / "tmp").glob("*/job.json")
    assert b'"prune"' in announced.read_bytes()
    branch(StoreFiles.open(path))
    assert is_whole(path)
