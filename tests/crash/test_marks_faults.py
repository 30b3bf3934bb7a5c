"""An error, or a kill, at every single operation that makes or removes a mark or writes a start."""

import errno
from pathlib import Path

import pytest
from crash_helpers import ERRORS, RUN, FaultyDisk, check_after_death, fail_with, in_child, kill, new_store, save

from simckpt.errors import StorageError
from simckpt.storage import Marks, StartRecord, StoreFiles

START = StartRecord(1.8e9, {"learning_rate": 3e-4}, host="here")
ACTIONS = {
    "tag": lambda store: store.tag(RUN, 1, "good"),
    "pin": lambda store: store.pin(RUN, 1),
    "unpin": lambda store: store.unpin(RUN, 2),
    "metrics": lambda store: store.add_metrics(RUN, 1, {"a": 1.0}),
    "start": lambda store: store.write_start(RUN, START),
}
BEFORE = [Marks(), Marks(pinned=True)]
AFTER = {
    "tag": [Marks(frozenset({"good"})), Marks(pinned=True)],
    "pin": [Marks(pinned=True), Marks(pinned=True)],
    "unpin": [Marks(), Marks()],
    "metrics": [Marks(metrics={"a": 1.0}), Marks(pinned=True)],
    "start": BEFORE,
}


def prepared(path: Path) -> tuple[StoreFiles, FaultyDisk]:
    disk = FaultyDisk()
    store = new_store(path, disk=disk)
    save(store, 1)
    save(store, 2)
    store.pin(RUN, 2)
    disk.arm()
    return store, disk


def state(path: Path) -> list[Marks]:
    """Returns the marks of both checkpoints as another process sees them; a start is there whole or not at all."""
    store = StoreFiles.open(path)
    for start in path.glob(f"runs/{RUN}/starts/*"):
        assert store.read_start(RUN, start.stem) == START
    return [store.marks_of(RUN, record.id) for record in store.records(RUN)]


def count(path: Path, action: str) -> int:
    store, disk = prepared(path)
    ACTIONS[action](store)
    return len(disk.calls)


@pytest.mark.parametrize("action", ACTIONS)
@pytest.mark.parametrize("number", ERRORS, ids=errno.errorcode.get)
def test_what_fails_anywhere_is_whole_or_not_there_and_can_be_tried_again(tmp_path, action, number) -> None:
    for at in range(1, count(tmp_path / "count", action) + 1):
        path = tmp_path / f"store-{at}"
        store, disk = prepared(path)
        disk.arm(fail_with(number), at=at)
        try:
            ACTIONS[action](store)
            allowed = [AFTER[action]]
        except StorageError:
            # after the rename or the removal only its durability failed
            allowed = [BEFORE, AFTER[action]]
        disk.arm()
        assert state(path) in allowed
        ACTIONS[action](store)
        assert state(path) == AFTER[action]


@pytest.mark.parametrize("action", ACTIONS)
def test_what_is_killed_anywhere_is_whole_or_not_there_and_leaves_nothing(tmp_path, action) -> None:
    for at in range(1, count(tmp_path / "count", action) + 1):
        path = tmp_path / f"store-{at}"
        store, disk = prepared(path)
        disk.arm(kill, at=at)
        assert in_child(lambda store=store: ACTIONS[action](store)) < 0
        assert state(path) in (BEFORE, AFTER[action])
        assert check_after_death(path) == [1, 2]
