"""Stores on faulty disks, and what must hold afterwards."""

import errno
import os
from pathlib import Path

import numpy as np

from simckpt.state.leaf import Leaf
from simckpt.state.tree import Encoded
from simckpt.storage import CommitDraft, CommitRecord, RunRecord, StoreFiles
from simckpt.storage.durable import Disk
from simckpt.testing.faults import FaultyDisk, interrupt, kill
from simckpt.testing.faults import fail as fail_with
from simckpt.testing.faults import tear as tear_and_kill

__all__ = ["ERRORS", "RUN", "FaultyDisk", "fail_with", "interrupt", "kill", "tear_and_kill"]

RUN = "run"


def components(seed: int) -> dict[str, Encoded]:
    rng = np.random.default_rng(seed)
    arrays = {"qpos": rng.standard_normal((4, 9)), "qvel": rng.standard_normal((4, 8)), "empty": np.empty((0, 2))}
    leaves = {name: Leaf(array, "float64", array.shape, "numpy") for name, array in arrays.items()}
    return {"envs": Encoded(leaves, b'{"seed":%d}' % seed), "loop": Encoded({}, b'{"step":%d}' % seed)}


def new_store(path: Path, *, disk: Disk | None = None) -> StoreFiles:
    store = StoreFiles.create(path, disk=disk)
    store.write_run(RUN, RunRecord("ab" * 16, RUN, 0.0))
    return store


def save(store: StoreFiles, step: int) -> CommitRecord:
    return store.commit(RUN, CommitDraft(None, step), components(step)).record


def check(store: StoreFiles) -> list[int]:
    """Returns the steps on offer, after every one of them was read and compared, pruned ones negative."""
    steps = []
    for place, record in enumerate(store.records(RUN), start=1):
        assert record.seq == place, "the numbers of commits are consecutive"
        if not isinstance(record, CommitRecord):
            steps.append(-record.step)
            continue
        steps.append(record.step)
        store.verify(RUN, record.seq)
        found, expected = store.read(RUN, record.seq), components(record.step)
        assert found.keys() == expected.keys()
        for name, encoded in expected.items():
            assert found[name].structure == encoded.structure
            for key, leaf in encoded.leaves.items():
                assert found[name].leaves[key].data.tobytes() == leaf.data.tobytes()
    return steps


def check_after_death(path: Path) -> list[int]:
    """Returns `check`, after the next process has claimed the run: nothing is left of the dead one, and it can save."""
    store = StoreFiles.open(path)
    before = check(store)
    with store.claim(RUN):
        assert list((path / "tmp").iterdir()) == []
        assert check(store) == before
        for place, step in enumerate(before, start=1):
            folder = path / "runs" / RUN / "checkpoints" / f"{place:08d}"
            state = {"leaves.json", "state.h5"} if step >= 0 else set()
            assert {entry.name for entry in folder.iterdir()} == {"commit.json"} | state
    return before


def in_child(action) -> int:
    """Runs `action` in a forked child and returns its exit code, or minus the signal that killed it."""
    child = os.fork()
    if child == 0:
        code = 99
        try:
            action()
            code = 0
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


ERRORS = [errno.EIO, errno.ENOSPC]
