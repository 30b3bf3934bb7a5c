"""Names that are used anew, pins, and others at work on a session, at each change that an act makes to the disk."""

import contextlib
import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from archive_helpers import QuickDisk
from crash_helpers import FaultyDisk, fail_with
from session_archives import archive, assert_reads, filled, kept, of, states
from session_helpers import record, write_part

import simckpt
from simckpt.archive import session_objects
from simckpt.archive.objects import Objects
from simckpt.archive.places import parse_place
from simckpt.archive.session_transfer import pull_session
from simckpt.errors import RunLockedError, SessionNotFoundError, StorageError, StoreError
from simckpt.policies import KeepLast
from simckpt.session_pruning import prune_sessions
from simckpt.storage import StoreFiles, archived_sessions
from simckpt.storage.session_ending import remove_session
from simckpt.storage.session_writing import SessionWriter, create_session

PART = "sessions/a/parts/00000001-00000003/state.h5"
Act = Callable[[StoreFiles, Path], object]


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)


def evict(files: StoreFiles, folder: Path) -> object:
    return archive(files, folder / "archive", 1).move()


def fetch(files: StoreFiles, folder: Path) -> object:
    for path in states(files.path, "a"):
        path.unlink()
    return session_objects.fetch(Objects(parse_place(folder / "archive")), files, "a")


def verify(files: StoreFiles, folder: Path) -> object:
    flip(files.path / PART)
    return archive(files, folder / "archive").verify()


def pull(files: StoreFiles, folder: Path) -> object:
    flip(files.path / PART)
    return pull_session(folder / "archive", files, "a", verify=True)


def prune(files: StoreFiles, folder: Path) -> object:
    return prune_sessions(files, KeepLast(1))


def at_each_change(tmp_path: Path, act: Act, change: Callable[[Path], object], *, every: int = 1):
    """Yields (store's path, what `change` returned) for each moment of an act at which it changes something here.

    What another process would do meanwhile is done at that moment; None if that was refused.
    """
    filled(tmp_path / "original/store", "a", "b")
    archive(StoreFiles.open(tmp_path / "original/store", disk=QuickDisk()), tmp_path / "original/archive").move()
    at = 0
    while True:
        at += every
        folder = tmp_path / f"at-{at}"
        shutil.copytree(tmp_path / "original", folder, symlinks=True)
        disk, found = FaultyDisk(), []

        def meanwhile(operation, found=found, folder=folder):
            with contextlib.suppress(RunLockedError, SessionNotFoundError):
                found.append(change(folder / "store"))
            return operation.perform()

        disk.arm(meanwhile, at=at)
        with contextlib.suppress(StoreError):
            act(StoreFiles.open(folder / "store", disk=disk), folder)
        if disk.hit is None:
            assert at > every
            return
        yield folder / "store", found[0] if found else None
        shutil.rmtree(folder)


def another_one(path: Path) -> dict[str, bytes]:
    """Removes "a", records another session of that name, and returns its files."""
    remove_session(path, "a", disk=QuickDisk())
    files = StoreFiles.open(path, disk=QuickDisk())
    create_session(files, record("a", id="99" * 16, created=1.8e9 + 9), disk=QuickDisk())
    with SessionWriter(path, "a", disk=QuickDisk()) as writer:
        # files of the same names with other bytes
        for start in (100, 104, 108):
            write_part(writer, start, start + 4)
        writer.close()
    assert (path / PART).exists()
    return of(kept(path), "a")


@pytest.mark.parametrize(("act", "every"), [(evict, 7), (fetch, 7), (verify, 11), (pull, 5)])
def test_a_session_that_has_the_name_of_a_removed_one_is_never_touched(tmp_path, act, every):
    done = 0
    for path, mine in at_each_change(tmp_path, act, another_one, every=every):
        if mine is not None:
            assert of(kept(path), "a") == mine
            done += 1
    assert done


@pytest.mark.parametrize("act", [fetch, pull])
def test_what_is_removed_while_it_comes_back_stays_removed(tmp_path, act):
    def removed(path: Path) -> bool:
        remove_session(path, "a", disk=QuickDisk())
        return True

    for path, done in at_each_change(tmp_path, act, removed, every=5):
        assert ("a" in StoreFiles.open(path).sessions()) == (done is None)


def test_what_is_pinned_during_a_prune_stays(tmp_path):
    def pinned(path: Path) -> bool:
        archived_sessions.pin_session(path, "a", disk=QuickDisk())
        return True

    seen = set()
    for path, done in at_each_change(tmp_path, prune, pinned):
        seen.add(done)
        assert done is None or simckpt.Store(path).session("a").pinned
    assert seen == {True, None}


def test_a_prune_says_what_it_has_left(tmp_path):
    files = filled(tmp_path / "store", "a", "b", "c")
    before = files.remove_session
    files.remove_session = lambda name, **more: (name == "a" and files.pin_session("b")) or before(name, **more)
    verdicts = prune_sessions(files, KeepLast(1))
    assert [(each.name, each.keep, each.reason) for each in verdicts[:2]] == [
        ("a", False, "not kept by KeepLast(1)"),
        ("b", True, "pinned"),
    ]
    assert files.sessions() == ["b", "c"]


def test_a_prune_leaves_another_one_of_the_name(tmp_path):
    files = filled(tmp_path / "store", "a", "b")
    before, mine = files.remove_session, {}

    def remove(name, **more):
        mine.update(another_one(files.path))
        before(name, **more)

    files.remove_session = remove
    prune_sessions(files, KeepLast(1))
    assert of(kept(files.path), "a") == mine != {}


def test_a_removal_that_did_not_happen_leaves_no_note_behind(tmp_path):
    """Whatever the disk refuses: what is here afterwards, and is lost later, was not removed."""
    filled(tmp_path / "original/store", "a", "b")
    archive(StoreFiles.open(tmp_path / "original/store", disk=QuickDisk()), tmp_path / "original/archive").move()
    at, kinds = 0, set()
    while True:
        at += 2
        folder = tmp_path / f"at-{at}"
        shutil.copytree(tmp_path / "original", folder, symlinks=True)
        disk = FaultyDisk()
        disk.arm(fail_with(5), at=at)
        with contextlib.suppress(StorageError):
            remove_session(folder / "store", "a", disk=disk)
        if disk.hit is None:
            break
        files = StoreFiles.open(folder / "store", disk=QuickDisk())
        mover, is_here = archive(files, folder / "archive"), "a" in files.sessions()
        assert mover.move().removed_sessions == ([] if is_here else ["a"])
        assert not list((files.path / "archive").glob("removed/*"))
        shutil.rmtree(files.path / "sessions/a", ignore_errors=True)
        assert mover.move().removed_sessions == []
        assert bool(of(kept(folder / "archive"), "a")) == is_here
        kinds.add(is_here)
        shutil.rmtree(folder)
    assert kinds == {True, False}


def test_a_pass_leaves_the_note_of_a_removal_in_progress(tmp_path):
    files = filled(tmp_path / "store", "a", "b")
    mover = archive(files, tmp_path / "archive")
    mover.move()
    disk = FaultyDisk()

    def after_the_note(operation):
        if operation.name == "rename" and operation.arguments[0].name == "a":
            assert mover.move().removed_sessions == []
        return operation.perform()

    disk.arm(after_the_note, at=1, sticky=True)
    remove_session(files.path, "a", disk=disk)
    assert mover.move().removed_sessions == ["a"]


def test_readers_that_bring_back_the_same_session_at_once_all_have_it(tmp_path):
    files = filled(tmp_path / "store", "a", "b")
    archive(files, tmp_path / "archive", 1).move()
    assert states(files.path, "a") == []
    barrier, failed = threading.Barrier(3), []

    def read() -> None:
        barrier.wait()
        try:
            assert_reads(files.path, "a")
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=read) for _ in range(3)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert failed == []
    assert not os.path.lexists(files.path / "sessions/a/writer")


def test_a_full_disk_can_be_made_room_on(tmp_path):
    files = filled(tmp_path / "store", "a", "b")
    archive(files, tmp_path / "archive").move()
    disk = FaultyDisk()

    def full(operation):
        return fail_with(28)(operation) if operation.name in ("allocate", "pwrite") else operation.perform()

    disk.arm(full, at=1, sticky=True)
    StoreFiles.open(files.path, disk=disk).evict_session("a")
    assert states(files.path, "a") == []
    disk.arm()
    assert_reads(files.path, "a")
