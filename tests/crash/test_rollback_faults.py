"""A rollback whose disk fails, or whose process is killed, at any of its operations is done again by the next start."""

import contextlib
import errno
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from signal import SIGKILL

import pytest
from background_helpers import GatedDisk
from crash_helpers import FaultyDisk, fail_with, in_child, kill, tear_and_kill
from rollback_loops import POLICY, Objects, train
from scipy import stats

import simckpt
from simckpt.comparison import fingerprint
from simckpt.errors import RolledBack, SimckptError, StorageError
from simckpt.policies import Reseed, RollbackPolicy
from simckpt.storage import durable

START, UNTIL = 120, 150  # a checkpoint shortly before the rollback, and a step after it


@pytest.fixture(scope="module")
def before(tmp_path_factory) -> Path:
    """A store whose run is shortly before its rollback."""
    path = tmp_path_factory.mktemp("before") / "s"
    train(simckpt.Store(path), until=START, background=None)
    return path


@pytest.fixture(scope="module")
def undisturbed(before, tmp_path_factory) -> tuple[dict, list]:
    """What the objects and the checkpoints are after a rollback that nothing disturbed."""
    path = tmp_path_factory.mktemp("undisturbed") / "s"
    shutil.copytree(before, path)
    objects = simckpt.supervise(train, simckpt.Store(path), until=UNTIL)
    return objects.bits(), line(path)


def line(path: Path) -> list[tuple[str, int, str]]:
    run = simckpt.Store(path).run("a")
    return [(each.kind, each.step, fingerprint(each)) for each in run.checkpoints()]


def roll_back(path: Path, disk: FaultyDisk, fault=None, at: int = 0) -> None:
    """Goes on until the rollback; the disk is armed once the policy has decided.

    Where the rollback fails, the live objects must be as they were.
    """
    live: list[tuple[Objects, dict]] = []

    def arm(components: object, level: int) -> None:
        disk.arm(fault, at=at)

    policy = replace(POLICY, changes=POLICY.levels[0] & simckpt.Call(arm))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(durable, "Disk", lambda: disk)
        try:
            train(
                simckpt.Store(path),
                policy=policy,
                background=None,
                seen=lambda _, objects: live.append((objects, objects.bits())),
            )
        except RolledBack:
            raise
        except SimckptError:
            assert live[-1][0].bits() == live[-1][1]
            raise


@pytest.fixture(scope="module")
def places(before, tmp_path_factory) -> dict[int, str]:
    """Returns {number: name} of the operations of a rollback; of many in a row of one kind, the first and the last."""
    path, disk = tmp_path_factory.mktemp("counted") / "s", FaultyDisk()
    shutil.copytree(before, path)
    with pytest.raises(RolledBack):
        roll_back(path, disk)
    calls = [None, *disk.calls, None]
    assert calls.count("rename") >= 1
    return {at: calls[at] for at in range(1, len(calls) - 1) if not calls[at - 1] == calls[at] == calls[at + 1]}


def check_goes_on(path: Path, undisturbed: tuple[dict, list]) -> str:
    """Starts the run again, compares with the undisturbed one and returns what kind of commit it went on from."""
    head = simckpt.Store(path).run("a").latest().kind
    objects: Objects = simckpt.supervise(train, simckpt.Store(path), until=UNTIL)
    assert objects.bits() == undisturbed[0]
    assert line(path) == undisturbed[1]
    return head


def test_an_error_at_any_operation_leaves_the_head_or_the_rollback(before, undisturbed, places, tmp_path) -> None:
    heads = []
    # the kills below hit the others
    for at in list(places)[::2]:
        path = tmp_path / str(at)
        shutil.copytree(before, path)
        # where the log cannot be written there is a warning, and the rollback is done
        with contextlib.suppress(RolledBack, SimckptError, simckpt.SimckptWarning):
            roll_back(path, FaultyDisk(), fail_with(5), at)
        heads.append(check_goes_on(path, undisturbed))
        shutil.rmtree(path)
    assert set(heads) == {"save", "rollback"}


def test_a_kill_at_any_operation_leaves_the_head_or_the_rollback(before, undisturbed, places, tmp_path) -> None:
    heads = []
    for at, name in list(places.items())[1::2]:
        path = tmp_path / str(at)
        shutil.copytree(before, path)
        fault = tear_and_kill if name == "pwrite" else kill
        assert in_child(lambda path=path, at=at, fault=fault: roll_back(path, FaultyDisk(), fault, at)) == -SIGKILL
        heads.append(check_goes_on(path, undisturbed))
        shutil.rmtree(path)
    assert set(heads) == {"save", "rollback"}
    assert heads == sorted(heads, reverse=True), "once it is committed it stays so"


def go_back_without(path: Path, take_away: Callable[[], None], policy: RollbackPolicy) -> None:
    """Rolls back in a store that is taken away before; checks the error, and that the live objects are as they were."""
    live: list[tuple[Objects, dict]] = []

    def seen(checkpointer: simckpt.Checkpointer, objects: Objects) -> None:
        if objects.loop.step == 130:
            checkpointer.wait()
            take_away()
        live.append((objects, objects.bits()))

    with pytest.raises(StorageError) as caught:
        train(simckpt.Store(path), policy=policy, seen=seen)
    objects, bits = live[-1]
    assert objects.loop.step == 140
    assert objects.bits() == bits
    assert "denied" in str(caught.value) or "Read-only" in str(caught.value)
    assert "was going back from step 140: eval/return fell" in caught.value.__notes__[0]


@pytest.mark.filterwarnings("ignore::simckpt.UpkeepWarning", "ignore::simckpt.SaveFailedWarning")
@pytest.mark.parametrize(("number", "changes"), [(errno.EROFS, Reseed()), (errno.EACCES, POLICY.levels[0])])
def test_a_store_that_has_become_read_only_is_told_and_nothing_is_lost(
    before, undisturbed, tmp_path, monkeypatch, number: int, changes
) -> None:
    shutil.copytree(before, tmp_path / "s")
    disk = GatedDisk()
    with monkeypatch.context() as patch:
        patch.setattr(durable, "Disk", lambda: disk)

        def take_away() -> None:
            disk.broken = OSError(number, os.strerror(number))

        go_back_without(tmp_path / "s", take_away, replace(POLICY, changes=changes))
    check_goes_on(tmp_path / "s", undisturbed)


@pytest.mark.skipif(os.geteuid() != 0, reason="nobody but root can become another user")
@pytest.mark.filterwarnings("ignore::simckpt.UpkeepWarning", "ignore::simckpt.SaveFailedWarning")
def test_a_folder_without_permissions_is_told_and_nothing_is_lost(before, undisturbed, tmp_path) -> None:
    shutil.copytree(before, tmp_path / "s")
    # another user may not import what is root's
    stats.ttest_ind([1.0, 2.0], [3.0, 4.0])

    def as_nobody() -> None:
        go_back_without(tmp_path / "s", lambda: os.seteuid(65534), POLICY)

    assert in_child(as_nobody) == 0
    check_goes_on(tmp_path / "s", undisturbed)
