"""Servers that fail, disks that refuse, kills at each step of moving sessions: nothing is lost, the next pass ends."""

import contextlib
import errno
import multiprocessing
import shutil
import signal

import pytest
from crash_helpers import FaultyDisk, fail_with, kill
from fake_s3 import FAULTS
from session_archives import archive, assert_reads, filled, kept
from session_kills import NAMES, REMOVED, URL, act, kill_at_every_request, losses, objects, unfinished

import simckpt
from simckpt.archive import Archive, Patience
from simckpt.archive.session_transfer import pull_session
from simckpt.errors import ArchiveUnavailableError, StorageError
from simckpt.policies import KeepLast
from simckpt.storage import StoreFiles

LOST = "parts/00000001-00000003/state.h5"


# what the slow tests claim of every request and change; of these few it shows no more than that they can be run


def test_a_mover_killed_at_some_requests_loses_nothing(tmp_path):
    tried, found = kill_at_every_request(tmp_path, every=61)
    assert found == []
    assert tried >= 2


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_mover_killed_at_any_request_loses_nothing(tmp_path):
    tried, found = kill_at_every_request(tmp_path)
    assert found == []
    assert tried > 100


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_mover_in_the_wrong_order_is_caught_by_kills(tmp_path):
    _, found = kill_at_every_request(tmp_path, end_first=True, every=2)
    assert any("half in the archive" in each for each in found)


def mover(files: StoreFiles) -> Archive:
    return Archive(files, URL, keep_sessions=KeepLast(1), patience=Patience(timeout=0.4, retries=2, limit=5.0))


@pytest.mark.parametrize("fault", ["500 after", "drop after", "flip"])
def test_a_fault_at_some_requests_is_survived(tmp_path, fake, fault):
    _fail_at_each_request(tmp_path, fake, fault, every=31)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_at_any_request_is_survived(tmp_path, fake, fault):
    assert _fail_at_each_request(tmp_path, fake, fault, every=1) > 60


def _fail_at_each_request(tmp_path, fake, fault, *, every) -> int:
    fake.hang = 1.0
    originals = kept(filled(tmp_path / "original", *NAMES).path)
    shutil.copytree(tmp_path / "original", tmp_path / "count")
    mover(StoreFiles.open(tmp_path / "count")).move()
    count = len(fake.requests)
    for at in range(1, count + 1, every):
        shutil.copytree(tmp_path / "original", tmp_path / f"store-{at}")
        files = StoreFiles.open(tmp_path / f"store-{at}")
        fake.objects.clear()
        fake.reset()
        fake.fault = lambda number, name, at=at: fault if number == at else None
        try:
            problems = mover(files).move().problems
        except ArchiveUnavailableError as error:
            problems = [str(error)]
        if fault not in ("403", "flip"):
            assert problems == [], "one fault is overcome by trying again"
        assert losses(kept(files.path), objects(fake), originals) == []
        fake.reset()
        assert mover(files).move().problems == []
        here, there = kept(files.path), objects(fake)
        assert losses(here, there, originals) + unfinished(files, here, there, originals) == []
        shutil.rmtree(files.path)
    return count


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC])
def test_a_disk_that_refuses_at_some_change_loses_nothing(tmp_path, number):
    _refuse_at_each(tmp_path, number, every=61)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC])
def test_a_disk_that_refuses_at_any_change_loses_nothing(tmp_path, number):
    _refuse_at_each(tmp_path, number, every=1)


def _fresh(tmp_path, name):
    shutil.copytree(tmp_path / "original", tmp_path / name / "store", symlinks=True)
    return tmp_path / name


def _assert_nothing_lost_and_the_next_one_ends(path, originals) -> None:
    there = kept(path / "archive") if (path / "archive").exists() else {}
    assert losses(kept(path / "store"), there, originals) == []
    files = StoreFiles.open(path / "store")
    assert archive(files, path / "archive", 1).move().problems == []
    here, there = kept(path / "store"), kept(path / "archive")
    assert losses(here, there, originals) + unfinished(files, here, there, originals) == []
    for name in files.sessions():
        assert_reads(path / "store", name)


def _refuse_at_each(tmp_path, number: int, *, every: int) -> None:
    originals = kept(filled(tmp_path / "original", *NAMES).path)
    disk = FaultyDisk()
    disk.arm()
    path = _fresh(tmp_path, "count")
    act(path / "store", path / "archive", disk)
    changes = len(disk.calls)
    assert changes > 50
    for at in range(1, changes + 1, every):
        path = _fresh(tmp_path, f"at-{at}")
        disk = FaultyDisk()
        disk.arm(fail_with(number), at=at)
        with contextlib.suppress(StorageError):
            act(path / "store", path / "archive", disk)
        disk.arm()
        _assert_nothing_lost_and_the_next_one_ends(path, originals)
        shutil.rmtree(path)


def killed(path, at: int) -> None:
    disk = FaultyDisk()
    disk.arm(kill, at=at)
    act(path / "store", path / "archive", disk)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_mover_killed_at_any_change_loses_nothing(tmp_path):
    originals = kept(filled(tmp_path / "original", *NAMES).path)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["test_session_faults", "obstore"])
    at, tried = 0, 0
    while True:
        at += 1
        path = _fresh(tmp_path, f"at-{at}")
        process = context.Process(target=killed, args=(path, at))
        process.start()
        process.join(60)
        _assert_nothing_lost_and_the_next_one_ends(path, originals)
        if process.exitcode != -signal.SIGKILL:
            assert process.exitcode == 0
            assert REMOVED not in StoreFiles.open(path / "store").sessions()
            break
        tried += 1
        shutil.rmtree(path)
    assert tried > 50


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC])
def test_a_pull_onto_a_disk_that_refuses_leaves_all_of_a_session_or_nothing(tmp_path, number):
    store = simckpt.Store(filled(tmp_path / "original", "a").path)
    store.push_session("a", tmp_path / "place")
    originals = kept(store.path)

    def pull(name: str, at: int | None) -> int:
        """Pulls, and again after a file was lost; returns how many changes that made to the disk."""
        disk = FaultyDisk()
        files = StoreFiles.create(tmp_path / name, disk=disk)
        disk.arm(None if at is None else fail_with(number), at=at or 1)
        for _ in range(2):
            try:
                pull_session(tmp_path / "place", files, "a")
            except StorageError:
                refused.append(at)
            here = kept(files.path)
            assert here in ({}, originals) or set(here.items()) == set(originals.items()) - lost
            if here:
                (files.path / "sessions/a" / LOST).unlink(missing_ok=True)
                lost.add((f"sessions/a/{LOST}", originals[f"sessions/a/{LOST}"]))
        count = len(disk.calls)
        disk.arm()
        pull_session(tmp_path / "place", files, "a")
        assert kept(files.path) == originals
        shutil.rmtree(files.path)
        return count

    lost: set[tuple[str, bytes]] = set()
    refused: list[int | None] = []
    changes = pull("count", None)
    assert changes > 40
    for at in range(1, changes + 1, 7):
        lost.clear()
        pull(f"at-{at}", at)
    assert len(set(refused)) > 5
