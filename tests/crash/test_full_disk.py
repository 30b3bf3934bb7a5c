"""A disk without room, a file-size limit, and a mount that cannot be written."""

import contextlib
import errno
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from crash_helpers import RUN, check, new_store, save

from simckpt.errors import StorageError, StorageFullError
from simckpt.state.leaf import LogLeaf
from simckpt.state.tree import Encoded
from simckpt.storage import Commit, CommitDraft, StoreFiles
from simckpt.storage.durable import Disk

LIMITED = """
import resource, sys
sys.path.insert(0, sys.argv[1])
from crash_helpers import check, new_store, save
from simckpt.errors import StorageFullError
store = new_store(sys.argv[2])
with store.claim("run"):
    save(store, 1)
    hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    resource.setrlimit(resource.RLIMIT_FSIZE, (2048, hard))
    try:
        save(store, 2)
        print("saved")
    except StorageFullError as error:
        print(error.needed > 2048, error.free > 0)
    resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    save(store, 3)
print(check(store))
"""


def test_a_file_size_limit_is_a_full_disk(tmp_path):
    here = str(Path(__file__).parent)
    done = subprocess.run(
        [sys.executable, "-c", LIMITED, here, str(tmp_path / "store")], capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines() == ["True True", "[1, 3]"]


@pytest.fixture
def tiny_disk(tmp_path):
    folder = tmp_path / "disk"
    folder.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=512k", "tmpfs", str(folder)], capture_output=True, text=True, check=False
    )
    if done.returncode:
        pytest.skip(f"no tmpfs can be mounted here: {done.stderr.strip()}")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


def test_a_full_disk_costs_the_save_and_nothing_else(tiny_disk):
    store = new_store(tiny_disk / "store")
    with store.claim(RUN):
        error = save_until_it_fails(store)
        assert isinstance(error, StorageFullError)
        assert error.free < 512 << 10
        step = len(check(store)) + 1
        assert step > 3
        assert check(store) == list(range(1, step))
        assert list((store.path / "tmp").iterdir()) == []
        fill(tiny_disk / "ballast")
        with pytest.raises(StorageError):
            save(store, step)
        # pruning makes room where there is none at all
        store.prune(RUN, 1, "full")
        store.prune(RUN, 2, "full")
        assert check(store) == [-1, -2, *range(3, step)]
        save(store, step)


def save_until_it_fails(store) -> StorageError | None:
    for step in range(1, 1000):
        try:
            save(store, step)
        except StorageError as error:
            return error
    return None


def fill(path: Path) -> None:
    with path.open("wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(4096))
        except OSError:
            return


def test_a_read_only_mount_is_read(tiny_disk):
    store = new_store(tiny_disk / "store")
    save(store, 1)
    subprocess.run(["mount", "-o", "remount,ro", str(tiny_disk)], check=True)
    found = StoreFiles.open(store.path)
    assert found.runs() == [RUN]
    assert check(found) == [1]
    with pytest.raises(StorageError):
        save(found, 2)
    with pytest.raises(StorageError):
        found.claim(RUN)


def save_log(store, step: int, older=()) -> Commit:
    """Saves 100 more rows of 64 bytes; the rows of the saves before lie in segments."""
    rows = np.full((100, 64), step, np.uint8)
    column = LogLeaf(rows, "uint8", (100 * (len(older) + 1), 64), "numpy", older)
    missing = store.missing_segments({piece.segment for piece in older})
    assert not missing
    return store.commit(RUN, CommitDraft(None, step), {"replay": Encoded({"rows": column}, b"{}")})


def test_pruning_frees_the_segments_of_logs_on_a_full_disk(tiny_disk):
    store = new_store(tiny_disk / "store")
    with store.claim(RUN):
        older, step = (), 0
        while True:
            step += 1
            # a ring: no more than the last two pieces are meant
            try:
                older = save_log(store, step, older[-2:]).leaves["replay/rows"].pieces
            except StorageFullError:
                break
        assert step > 5
        fill(tiny_disk / "ballast")
        before = len(list((store.path / "segments").iterdir()))
        for seq in range(1, step - 1):
            store.prune(RUN, seq, "full")
        assert len(list((store.path / "segments").iterdir())) == 3 < before
        assert list((store.path / "trash").iterdir()) == []
        commit = save_log(store, step, older[-2:])
        found = store.read(RUN, commit.record.seq)["replay"].leaves["rows"].data
        assert found[:, 0].tolist() == [step - 2] * 100 + [step - 1] * 100 + [step] * 100
        store.verify(RUN, commit.record.seq)


def segments_of(store: StoreFiles) -> int:
    return len(list((store.path / "segments").iterdir()))


@pytest.mark.parametrize("kept", ["reserve", "announcements", "leftovers"])
def test_a_full_disk_is_pruned_once_the_trainer_is_gone(tiny_disk, kept: str):
    store = new_store(tiny_disk / "store")
    with store.claim(RUN):
        older = ()
        for step in range(1, 6):
            older = save_log(store, step, older[-2:]).leaves["replay/rows"].pieces
    if kept == "reserve":
        store.keep_reserve()
        assert (store.path / "reserve").stat().st_size == 128 << 10
    if kept != "announcements":
        # as where no replay buffer is saved
        for job in store.path.glob("runs/*/checkpoints/*/job.json"):
            job.unlink()
    if kept == "leftovers":
        dead = subprocess.run([sys.executable, "-c", LEFT_OVER, str(store.path)], check=True)
        assert dead.returncode == 0
        assert len(list((store.path / "tmp").iterdir())) == 1
    fill(tiny_disk / "ballast")
    status = os.statvfs(tiny_disk)
    assert status.f_bavail == 0
    before = segments_of(store)
    # a store object that has claimed nothing, as another process has
    other = StoreFiles.open(store.path)
    for seq in (1, 2, 3):
        other.prune(RUN, seq, "full")
    assert [record.step for record in other.records(RUN)] == [1, 2, 3, 4, 5]
    assert sorted(path.name for path in (store.path / "runs" / RUN / "checkpoints" / "00000001").iterdir()) == [
        "commit.json"
    ]
    assert segments_of(store) < before
    assert list((store.path / "tmp").iterdir()) == []
    for seq in (4, 5):
        other.verify(RUN, seq)


LEFT_OVER = """
import sys
from simckpt.storage import StoreFiles
made = StoreFiles.open(sys.argv[1])._works.make()
(made / "state.h5").write_bytes(bytes(32768))
"""


def test_a_full_disk_with_nothing_to_spare_says_so_and_loses_nothing(tiny_disk):
    store = new_store(tiny_disk / "store")
    for step in (1, 2):
        save(store, step)
    fill(tiny_disk / "ballast")
    with pytest.raises(StorageFullError):
        StoreFiles.open(store.path).prune(RUN, 1, "full")
    assert check(store) == [1, 2]
    (tiny_disk / "ballast").unlink()
    store.prune(RUN, 1, "full")
    assert check(store) == [-1, 2]


class FullWhile(Disk):
    """A disk that takes no file while another one is there."""

    def __init__(self, ballast: Path) -> None:
        self.ballast = ballast

    def create(self, path: Path) -> int:
        if self.ballast.exists():
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return super().create(path)

    def make_folder(self, path: Path) -> None:
        if self.ballast.exists():
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        super().make_folder(path)


@pytest.mark.parametrize("held", [False, True])
def test_what_a_prune_spends_is_the_reserve_and_it_is_made_again(tmp_path, held: bool):
    ordinary = new_store(tmp_path / "store")
    for step in (1, 2, 3):
        save(ordinary, step)
    ordinary.keep_reserve()
    store = StoreFiles.open(tmp_path / "store", disk=FullWhile(tmp_path / "store/reserve"))
    with ordinary.claim(RUN) if held else contextlib.nullcontext():
        store.prune(RUN, 1, "full")
    assert check(ordinary) == [-1, 2, 3]
    assert (tmp_path / "store/reserve").stat().st_size == 128 << 10
    # a save has no right to it
    with pytest.raises(StorageFullError):
        save(store, 4)
    assert check(ordinary) == [-1, 2, 3]
    assert (tmp_path / "store/reserve").exists()
