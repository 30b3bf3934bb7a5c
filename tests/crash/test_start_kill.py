"""A program killed at every operation of its first minute, from an empty folder to its first save, starts again."""

import contextlib
import signal
import warnings

import numpy as np
import pytest
from crash_helpers import ERRORS, FaultyDisk, fail_with, in_child, kill, tear_and_kill

import simckpt
from simckpt.errors import StorageError
from simckpt.storage import durable

HYPERPARAMETERS = {"learning_rate": 3e-4, "seed": 1}


def train(path, steps: int) -> list[int]:
    """Returns the steps it was restored at and has saved, as a training script with simckpt's own front door would."""
    loop, weights = simckpt.LoopState(step=0), np.zeros(3)
    seen = []
    with simckpt.Store(path).start("ant-ppo", experiment="crash") as run:
        assert run.configure(HYPERPARAMETERS) == HYPERPARAMETERS
        checkpointer = run.checkpointer(
            {"loop": loop, "weights": weights}, save_when=simckpt.EverySteps(1), keep=simckpt.KeepLast(2)
        )
        checkpointer.restore_latest()
        seen.append(loop.step)
        assert weights.tolist() == [loop.step] * 3
        for _ in range(steps):
            loop.step += 1
            weights += 1
            checkpointer.save(loop.step)
            seen.append(loop.step)
    return seen


def on(disk: FaultyDisk) -> None:
    """Puts a disk under everything that this process, a child that is about to die, does from now on."""
    durable.Disk = lambda: disk


def operations(path) -> list[str]:
    """Returns what `train` does to the disk, counted in a child so that this process keeps its own."""
    log = path.with_suffix(".calls")

    def count():
        disk = FaultyDisk()
        on(disk)
        train(path, 1)
        log.write_text(" ".join(disk.calls))

    assert in_child(count) == 0
    return log.read_text().split()


@pytest.mark.parametrize(
    "fault", [pytest.param(kill, id="before", marks=pytest.mark.slow), pytest.param(tear_and_kill, id="torn")]
)
def test_a_program_killed_at_any_operation_of_its_first_start_can_be_started_again(tmp_path, fault):
    calls = operations(tmp_path / "count")
    assert {"link", "rename", "pwrite", "append"} <= set(calls)
    assert calls.count("rename") >= 4  # the run, the claim, its hyperparameters, the checkpoint
    restored = []
    for at in range(1, len(calls) + 1):
        if fault is tear_and_kill and calls[at - 1] != "pwrite":
            continue
        path = tmp_path / f"store-{at}"

        def die(path=path, at=at):
            disk = FaultyDisk()
            disk.arm(fault, at=at)
            on(disk)
            train(path, 1)

        assert in_child(die) == -signal.SIGKILL
        first, *saved = train(path, 2)
        assert saved == [first + 1, first + 2]
        restored.append(first)
        store = simckpt.Store(path)
        assert dict(store.run("ant-ppo").hyperparameters) == HYPERPARAMETERS
        assert store.run("ant-ppo").latest().step == first + 2
        assert list((path / "tmp").iterdir()) == []
    assert restored == sorted(restored), "later kills never leave less"
    assert set(restored) == ({0, 1} if fault is kill else {0})


def test_a_program_whose_first_start_failed_anywhere_starts_again_in_the_same_process(tmp_path):
    """What a notebook does: the cell is run again."""
    calls = operations(tmp_path / "count")
    for at in range(1, len(calls) + 1):
        path = tmp_path / f"store-{at}"

        def fail_and_retry(path=path, at=at):
            disk = FaultyDisk()
            disk.arm(fail_with(ERRORS[at % 2]), at=at)
            on(disk)
            with contextlib.suppress(StorageError), warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of logs and prunes that failed
                train(path, 1)
            disk.arm()
            assert train(path, 1)[-1] in (1, 2)

        assert in_child(fail_and_retry) == 0, calls[at - 1]
