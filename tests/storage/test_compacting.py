"""What compacting finds and frees: what nobody refers to, and nothing else."""

import contextlib
import errno
import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from log_helpers import RUN, Log, assert_holds, save_log, segment_files, state
from storage_helpers import checkpoint_folder, new_store, run_record, snapshot

from simckpt import Store
from simckpt.errors import NotAStoreError, SegmentsKeptError, StorageError
from simckpt.maintenance.check import Scope, check
from simckpt.storage import CommitDraft, Leftovers, StoreFiles, preparing, processes, reader
from simckpt.storage.durable import Disk

STRANGER, TRASHED = "5" * 32, "6" * 32
NOTHING = Leftovers((), (), (), 0)


@pytest.fixture
def log() -> Log:
    return Log()


@pytest.fixture
def store(tmp_path, log) -> StoreFiles:
    """Three checkpoints of a log, of which the second was pruned."""
    store = new_store(tmp_path / "store")
    with store.claim(RUN):
        for _ in range(3):
            log.add(3)
            save_log(store, log)
        store.prune(RUN, 2, "test")
    return store


class RefusingDisk(Disk):
    """As on a mount that is read-only."""

    def rename(self, source: Path, target: Path) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    def unlink(self, path: Path) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))


def dead() -> processes.Process:
    return replace(processes.this_process(), pid=2**22 + 5, started=1)


def leave_everything(store: StoreFiles, log: Log) -> dict[str, int]:
    """Leaves one of each kind; returns their sizes [bytes]."""
    used = store.path / "segments" / f"{min(segment_files(store))}.h5"
    (store.path / "segments" / f"{STRANGER}.h5").write_bytes(used.read_bytes())
    (store.path / "trash" / f"{TRASHED}.0123abcd.h5").write_bytes(b"1234567")
    (checkpoint_folder(store, 2) / "state.h5").write_bytes(b"12345")
    work = store.path / "tmp" / dead().token("89abcdef")
    (work / "folder").mkdir(parents=True)
    (work / "folder" / "state.h5").write_bytes(b"123")
    folders = [work, work / "folder"]
    return {"segment": used.stat().st_size, "trash": 7, "pruned": 5, "work": 3, "folders": len(folders)}


def test_a_store_after_saves_and_prunes_has_nothing_left_over(store, log):
    before = snapshot(store.path)
    assert store.leftovers() == store.compact() == NOTHING
    assert not NOTHING
    assert snapshot(store.path) == before
    assert_holds(store, 3, log)


def test_what_nobody_refers_to_is_found_and_freed_and_the_rest_stays(store, log):
    before = snapshot(store.path)
    sizes = leave_everything(store, log)
    sizes.pop("folders")
    stranger = sizes.pop("segment")
    dirty = snapshot(store.path)
    work = (dead().token("89abcdef"),)
    found = store.leftovers()
    everything = store.leftovers(unknown=True)
    assert snapshot(store.path) == dirty
    assert found == Leftovers(work, (TRASHED,), ((RUN, 2),), sum(sizes.values()), (STRANGER,), stranger)
    assert everything == Leftovers(work, (STRANGER, TRASHED), ((RUN, 2),), sum(sizes.values()) + stranger)
    assert store.compact() == found
    assert snapshot(store.path).keys() - before.keys() == {f"segments/{STRANGER}.h5"}
    assert store.compact() == replace(NOTHING, unknown=(STRANGER,), unknown_nbytes=stranger)
    assert store.compact(unknown=True) == Leftovers((), (STRANGER,), (), stranger)
    assert snapshot(store.path) == before
    assert store.compact(unknown=True) == NOTHING
    assert_holds(store, 3, log)


def test_the_public_store_compacts_and_only_says_so_in_a_dry_run(store, log):
    leave_everything(store, log)
    dirty = snapshot(store.path)
    public = Store(store.path)
    for unknown in (False, True):
        found = public.compact(dry_run=True, unknown=unknown)
        assert found
        assert snapshot(store.path) == dirty
        assert public.compact(unknown=unknown) == found
        assert not public.compact(dry_run=True, unknown=unknown)
        dirty = snapshot(store.path)


def test_a_missing_store_is_not_made(tmp_path):
    with pytest.raises(NotAStoreError):
        Store(tmp_path / "none").compact()
    assert not (tmp_path / "none").exists()


def test_what_a_save_in_progress_has_announced_stays(store, log):
    store.write_run("other", run_record("other", id="e" * 32))
    log.add(2)
    prepared = store.prepare("other", state(log))
    before = snapshot(store.path)
    assert store.compact() == NOTHING
    assert snapshot(store.path) == before
    log.committed(store.publish("other", CommitDraft(None, 1), prepared))
    assert_holds(store, 1, log, run="other")


def test_what_a_dead_save_has_announced_and_made_goes_with_it(store, log):
    log.add(2)
    before = snapshot(store.path)
    job = replace(store.prepare_job(RUN), owner=dead())
    prepared = preparing.write_prepared(Disk(), job, state(log))
    (made,) = segment_files(store) - {path.removesuffix(".h5").rpartition("/")[2] for path in before}
    found = store.compact()
    assert (found.work, found.segments) == ((prepared.folder.name,), (made,))
    assert snapshot(store.path) == before


def test_unfinished_work_of_another_machine_stays_for_a_day(store):
    elsewhere = replace(dead(), host="elsewhere", boot_id="0" * 32)
    work = store.path / "tmp" / elsewhere.token("89abcdef")
    work.mkdir()
    assert store.compact() == NOTHING
    os.utime(work, (0, 0))
    assert store.compact().work == (work.name,)
    assert not work.exists()


def test_a_used_segment_in_the_trash_is_read_and_comes_back(store, log):
    used = min(segment_files(store))
    shutil.move(store.path / "segments" / f"{used}.h5", store.path / "trash" / f"{used}.0123abcd.h5")
    leave_everything(store, log)
    store.compact()
    assert used in segment_files(store)
    assert_holds(store, 3, log)


def _run_away(root: Path) -> tuple[Path, Path]:
    return root / "runs" / RUN, root.parent / RUN


def _runs_away(root: Path) -> tuple[Path, Path]:
    return root / "runs", root.parent / "runs"


def _run_one_level_up(root: Path) -> tuple[Path, Path]:
    return root / "runs" / RUN, root / RUN


def _run_under_no_name_of_one(root: Path) -> tuple[Path, Path]:
    return root / "runs" / RUN, root / "runs" / f"{RUN} (old)"


def _run_of_another_name(root: Path) -> tuple[Path, Path]:
    return root / "runs" / RUN, root / "runs" / "another"


def _runs_renamed(root: Path) -> tuple[Path, Path]:
    return root / "runs", root / "runs.bak"


def _head_of_another_name(root: Path) -> tuple[Path, Path]:
    return (path := root / "runs" / RUN / "checkpoints/00000003"), path.with_name("00000003.bak")


def _first_away(root: Path) -> tuple[Path, Path]:
    return root / "runs" / RUN / "checkpoints/00000001", root.parent / "00000001"


@pytest.mark.parametrize(
    "moved",
    [
        _run_away,
        _runs_away,
        _run_one_level_up,
        _run_under_no_name_of_one,
        _run_of_another_name,
        _runs_renamed,
        _head_of_another_name,
        _first_away,
    ],
)
def test_what_is_moved_away_and_put_back_comes_back_whole_whatever_was_compacted_meanwhile(store, log, moved):
    log.forget(segment_files(store))  # the head shares no rows with the first
    log.add(3)
    save_log(store, log)
    before = snapshot(store.path)
    original, elsewhere = moved(store.path)
    original.rename(elsewhere)
    with contextlib.suppress(SegmentsKeptError):
        StoreFiles.open(store.path).compact()
    if not original.exists():
        elsewhere.rename(original)
    assert snapshot(store.path) == before
    assert_holds(store, 4, log)


def test_a_prune_frees_nothing_while_a_folder_that_is_missing_may_use_it(store, log):
    first = checkpoint_folder(store, 1)
    log.forget(segment_files(store))  # the rows of the first are those of the third as well, but not of the head
    log.add(3)
    save_log(store, log)
    before = segment_files(store)
    first.rename(store.path.parent / "aside")
    with pytest.raises(SegmentsKeptError, match="missing"):
        StoreFiles.open(store.path).prune(RUN, 3, "r")
    assert segment_files(store) == before
    (store.path.parent / "aside").rename(first)
    again = StoreFiles.open(store.path)
    again.verify(RUN, 1)
    again.prune(RUN, 3, "r")
    again.verify(RUN, 1)
    again.verify(RUN, 4)


@pytest.mark.parametrize("name", ["commit.json", "leaves.json"])
def test_nothing_is_freed_while_it_is_not_known_what_is_used(store, log, name):
    path = checkpoint_folder(store, 3) / name
    path.write_bytes(path.read_bytes()[:-9])
    leave_everything(store, log)
    before = snapshot(store.path)
    store = StoreFiles.open(store.path)
    for action in (store.leftovers, store.compact):
        with pytest.raises(SegmentsKeptError, match="damaged"):
            action()
    assert snapshot(store.path) == before


def test_a_disk_that_refuses_says_so_and_what_is_used_stays(store, log):
    leave_everything(store, log)
    with pytest.raises(StorageError) as caught:
        StoreFiles.open(store.path, disk=RefusingDisk()).compact()
    assert caught.value.errno == errno.EROFS
    assert_holds(store, 3, log)
    assert store.compact(unknown=True)
    assert store.compact() == NOTHING


def test_a_check_weighs_what_is_left_over_as_compact_does(store, log):
    sizes = leave_everything(store, log)
    found = check(store.path, Scope(quick=True)).of("leftover")
    assert sum(finding.size for finding in found) == store.leftovers(unknown=True).nbytes
    assert sum(finding.size for finding in found) == sum(sizes.values()) - sizes["folders"]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may look at everything")
def test_a_folder_of_another_user_weighs_nothing_and_stops_nothing(store, log):
    leave_everything(store, log)
    (folder,) = store.path.glob("tmp/*/folder")
    folder.chmod(0)
    try:
        assert store.leftovers().work
    finally:
        folder.chmod(0o700)


def test_what_vanishes_while_it_is_weighed_weighs_nothing(tmp_path):
    (tmp_path / "a").write_bytes(b"123")
    (tmp_path / "link").symlink_to(tmp_path)
    assert reader.size_of(tmp_path / "gone") == 0
    # a link is weighed, not followed
    assert reader.size_of(tmp_path) == 3 + len(str(tmp_path))
