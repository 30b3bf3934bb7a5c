"""Errors, Ctrl-C and kills at every operation of a save that writes and merges segments, and of a prune of some."""

import copy
import errno
import os
import shutil
import signal
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from crash_helpers import RUN, FaultyDisk, fail_with, in_child, interrupt, kill, new_store, tear_and_kill

from simckpt.errors import StorageError, StorageFullError
from simckpt.state.leaf import Leaf, LogLeaf
from simckpt.state.tree import Encoded
from simckpt.storage import CommitDraft, CommitRecord, StoreFiles
from simckpt.storage.preparing import write_prepared

LIMIT = 3  # segments; the fourth save merges
TABLE = np.arange(1 << 18, dtype=np.float32)  # 1 MB: unchanged since the third save, so that the fourth shares it
ROWS = 4


def observations(step: int) -> np.ndarray:
    """All rows at a step: `ROWS` for each."""
    return np.arange(ROWS * step * 6, dtype=np.float32).reshape(-1, 2, 3)


def table(step: int) -> np.ndarray:
    return TABLE if step >= 3 else TABLE + step + 1


class Saver:
    """Saves a log and a table; what it takes note of is what a commit returned."""

    def __init__(self) -> None:
        self.pieces, self.rows = (), 0

    def save(self, store: StoreFiles, step: int) -> None:
        missing = store.missing_segments({piece.segment for piece in self.pieces})
        if missing:
            self.pieces, self.rows = (), 0
        everything = observations(step)
        column = LogLeaf(everything[self.rows :], "float32", everything.shape, "numpy", self.pieces)
        weights = Leaf(table(step), "float32", TABLE.shape, "numpy")
        components = {"replay": Encoded({"observations": column}, b"{}"), "agent": Encoded({"table": weights}, b"{}")}
        job = replace(store.prepare_job(RUN), limit=LIMIT)
        prepared = write_prepared(store._disk, job, components)
        commit = store.publish(RUN, CommitDraft(None, step), prepared)
        self.pieces, self.rows = commit.leaves["replay/observations"].pieces, ROWS * step


@pytest.fixture(scope="module")
def template(tmp_path_factory) -> tuple[Path, Saver]:
    store, saver = new_store(tmp_path_factory.mktemp("template") / "store"), Saver()
    with store.claim(RUN):
        for step in (1, 2, 3):
            saver.save(store, step)
    return store.path, saver


def fresh(template, path: Path) -> tuple[StoreFiles, Saver, FaultyDisk]:
    source, saver = template
    shutil.copytree(source, path, copy_function=os.link)  # no file of a store is ever changed in place
    disk = FaultyDisk()
    return StoreFiles.open(path, disk=disk), copy.copy(saver), disk


def check(store: StoreFiles) -> list[int]:
    """Returns the steps on offer, each read and compared, pruned ones negative."""
    steps = []
    for record in store.records(RUN):
        if not isinstance(record, CommitRecord):
            steps.append(-record.step)
            continue
        steps.append(record.step)
        store.verify(RUN, record.seq)
        found = store.read(RUN, record.seq)
        assert found["replay"].leaves["observations"].data.tobytes() == observations(record.step).tobytes()
        assert found["agent"].leaves["table"].data.tobytes() == table(record.step).tobytes()
    return steps


def check_files(store: StoreFiles) -> None:
    """Nothing lies in the store's shared folders but what its checkpoints refer to."""
    used = set()
    for record in store.records(RUN):
        if isinstance(record, CommitRecord):
            used |= store.index(RUN, record.seq).segments.keys()
    assert {path.stem for path in (store.path / "segments").iterdir()} == used
    assert list((store.path / "trash").iterdir()) == []
    assert list((store.path / "tmp").iterdir()) == []


def fourth(store: StoreFiles, saver: Saver) -> None:
    saver.save(store, 4)


def pruned(store: StoreFiles, saver: Saver) -> None:
    store.prune(RUN, 3, "test")


ACTIONS = {"save": (fourth, [1, 2, 3, 4]), "prune": (pruned, [1, 2, -3])}


def operations(template, path: Path, action) -> list[str]:
    store, saver, disk = fresh(template, path)
    with store.claim(RUN):
        disk.arm()
        action(store, saver)
        return list(disk.calls)


def test_the_save_that_is_tried_merges_and_shares(template, tmp_path):
    store, saver, disk = fresh(template, tmp_path / "store")
    before = {path.stem for path in (store.path / "segments").iterdir()}
    with store.claim(RUN):
        disk.arm()
        saver.save(store, 4)
        calls = list(disk.calls)
    leaves = store.index(RUN, 4).leaves
    assert [piece.rows for piece in leaves["replay/observations"].pieces] == [3 * ROWS, ROWS]
    assert len(leaves["agent/table"].pieces) == 1
    assert len({path.stem for path in (store.path / "segments").iterdir()} - before) == 3
    # announcement; three segments, renamed and their folder synced; state, index; record, folder, commit, its folder
    steps = [name for name in calls if name in ("create", "fsync", "rename")]
    assert steps == [
        *("create", "fsync", "fsync", "fsync"),
        *("create", "fsync") * 3,
        *("rename",) * 3,
        "fsync",
        *("create", "fsync") * 3,
        *("fsync", "rename", "fsync"),
    ]
    check_files(store)


@pytest.mark.parametrize("name", ACTIONS)
@pytest.mark.parametrize(("number", "sticky"), [(errno.EIO, False), (errno.ENOSPC, True)], ids=["once", "for good"])
def test_an_error_anywhere_harms_no_checkpoint_and_the_next_save_works(template, tmp_path, name, number, sticky):
    action, after = ACTIONS[name]
    calls = operations(template, tmp_path / "count", action)
    failures = 0
    for at in range(1, len(calls) + 1):
        store, saver, disk = fresh(template, tmp_path / f"store-{at}")
        with store.claim(RUN):
            disk.arm(fail_with(number), at=at, sticky=sticky)
            error = None
            try:
                action(store, saver)
            except StorageError as caught:
                error = caught
            disk.arm()
            assert error is None or isinstance(error, StorageFullError) == (number == errno.ENOSPC)
            found = check(store)
            assert found in ([1, 2, 3], after)
            assert error is not None or found == after
            if name == "save" and not sticky and error is not None:
                assert found == [1, 2, 3]
                check_files(store)
            failures += error is not None
            if name == "prune":
                store.prune(RUN, 3, "again")
            saver.save(store, 5)
            assert check(store)[-1] == 5
        shutil.rmtree(store.path)
    assert failures > len(calls) // 2


@pytest.mark.parametrize("name", ACTIONS)
def test_ctrl_c_anywhere_blocks_nothing_in_the_same_process(template, tmp_path, name):
    action, after = ACTIONS[name]
    seen = set()
    for at in range(1, len(operations(template, tmp_path / "count", action)) + 1):
        store, saver, disk = fresh(template, tmp_path / f"store-{at}")
        with store.claim(RUN):
            disk.arm(interrupt, at=at)
            with pytest.raises(KeyboardInterrupt):
                action(store, saver)
            disk.arm()
            found = check(store)
            assert found in ([1, 2, 3], after)
            seen.add(tuple(found))
            saver.save(store, 5)
            assert check(store) == [*found, 5]
        shutil.rmtree(store.path)
    assert seen == {(1, 2, 3), tuple(after)}


@pytest.mark.parametrize("name", ACTIONS)
@pytest.mark.parametrize("fault", [kill, tear_and_kill], ids=["before", "torn"])
def test_a_kill_anywhere_leaves_no_segment_behind(template, tmp_path, name, fault):
    action, after = ACTIONS[name]
    calls = operations(template, tmp_path / "count", action)
    seen = []
    for at in range(1, len(calls) + 1):
        if fault is tear_and_kill and calls[at - 1] != "pwrite":
            continue
        path = tmp_path / f"store-{at}"

        def die(path=path, at=at):
            store, saver, disk = fresh(template, path)
            with store.claim(RUN):
                disk.arm(fault, at=at)
                action(store, saver)

        assert in_child(die) == -signal.SIGKILL
        store, saver = StoreFiles.open(path), copy.copy(template[1])
        before = check(store)
        with store.claim(RUN):
            assert check(store) == before
            check_files(store)
            saver.save(store, 5)
            assert check(store) == [*before, 5]
        seen.append(before == after)
        shutil.rmtree(path)
    assert seen == sorted(seen), "later kills never leave less"
    assert fault is tear_and_kill or set(seen) == {False, True}


def test_what_a_failed_prune_left_is_freed_by_the_next_start(template, tmp_path):
    for at in range(1, len(operations(template, tmp_path / "count", pruned)) + 1):
        path = tmp_path / f"store-{at}"

        def prune(path=path, at=at):
            store, saver, disk = fresh(template, path)
            with store.claim(RUN):
                disk.arm(fail_with(errno.EIO), at=at)
                try:
                    pruned(store, saver)
                except StorageError:
                    disk.arm()

        assert in_child(prune) == 0
        store = StoreFiles.open(path)
        with store.claim(RUN):
            assert check(store) in ([1, 2, 3], [1, 2, -3])
            check_files(store)
        shutil.rmtree(path)
