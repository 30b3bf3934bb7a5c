"""A disk without room, a file-size limit, and a mount that cannot be written."""

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
