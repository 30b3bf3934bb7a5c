"""The disk refuses, or the mover is killed, at each change that it makes here: nothing is lost, the next pass ends."""

import contextlib
import errno
import multiprocessing
import os
import shutil
import signal

import pytest
from archive_helpers import RUN, archive, assert_restores, filled, is_whole, kept_aside
from crash_helpers import FaultyDisk, fail_with, kill

import simckpt
from simckpt.errors import StorageError
from simckpt.storage import StoreFiles


def act(path, disk: FaultyDisk | None = None) -> None:
    """Everything in a row that changes a store beside its archive."""
    files = StoreFiles.open(path / "store", disk=disk)
    mover = archive(files, path / "archive", 1)
    mover.move()
    mover.bring_back(RUN, 1)
    with files.claim(RUN):
        files.prune(RUN, 2, "test")
    mover.move()


def prepared(path):
    filled(path / "store", 3)
    return kept_aside(StoreFiles.open(path / "store"))


def fresh(path, target):
    shutil.copytree(path, target, symlinks=True)
    return target


def assert_nothing_lost(path, originals) -> None:
    here = kept_aside(StoreFiles.open(path / "store"))
    there = {}
    if (path / "archive").exists():
        found = [each for each in (path / "archive").rglob("*") if each.is_file()]
        there = {str(each.relative_to(path / "archive")): each.read_bytes() for each in found}
    trash = {f"segments/{each.name.partition('.')[0]}.h5": each.read_bytes() for each in path.glob("store/trash/*")}
    for name in originals:
        if name.endswith("/commit.json") and b"simckpt tombstone" not in here[name]:
            folder = name.rpartition("/")[0]
            assert is_whole(trash | here, folder, originals) or is_whole(there, folder, originals), f"{folder} is lost"
            assert here[name] == originals[name]


def assert_the_next_one_ends(path) -> None:
    assert archive(StoreFiles.open(path / "store"), path / "archive", 1).move().problems == []
    store = simckpt.Store(path / "store")
    for checkpoint in store.run(RUN).checkpoints():
        assert_restores(store.files, checkpoint.seq)


def count(path) -> int:
    disk = FaultyDisk()
    disk.arm()
    act(path, disk)
    return len(disk.calls)


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC])
def test_a_disk_that_refuses_at_some_change_loses_nothing(tmp_path, number):
    _refuse_at_each(tmp_path, number, every=29)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC])
def test_a_disk_that_refuses_at_any_change_loses_nothing(tmp_path, number):
    _refuse_at_each(tmp_path, number, every=1)


def _refuse_at_each(tmp_path, number: int, *, every: int) -> None:
    originals = prepared(tmp_path / "original")
    changes = count(fresh(tmp_path / "original", tmp_path / "count"))
    assert changes > 50
    for at in range(1, changes + 1, every):
        path = fresh(tmp_path / "original", tmp_path / f"at-{at}")
        disk = FaultyDisk()
        disk.arm(fail_with(number), at=at)
        with contextlib.suppress(StorageError):
            act(path, disk)
        disk.arm()
        assert_nothing_lost(path, originals)
        assert_the_next_one_ends(path)
        shutil.rmtree(path)


def killed(path, at: int) -> None:
    disk = FaultyDisk()
    disk.arm(kill, at=at)
    act(path, disk)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_mover_killed_at_any_change_loses_nothing(tmp_path):
    originals = prepared(tmp_path / "original")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["test_disk_faults", "obstore"])
    at, tried = 0, 0
    while True:
        at += 1
        path = fresh(tmp_path / "original", tmp_path / f"at-{at}")
        process = context.Process(target=killed, args=(path, at))
        process.start()
        process.join(60)
        assert_nothing_lost(path, originals)
        assert_the_next_one_ends(path)
        with StoreFiles.open(path / "store").claim(RUN):
            assert list((path / "store/tmp").iterdir()) == [], "what the dead process left is swept"
        if process.exitcode != -signal.SIGKILL:
            assert process.exitcode == 0
            break
        tried += 1
        shutil.rmtree(path)
    assert tried > 50
    assert os.path.lexists(path)
