"""Moving in the background, beside a training that never waits for it."""

import signal
import subprocess
import sys
import threading
import time

import pytest
import training
from archive_helpers import RUN, add, assert_restores, filled, local_seqs

import simckpt
from simckpt.archive import Archive, Patience
from simckpt.errors import UpkeepWarning
from simckpt.storage import StoreFiles

SHORT = Patience(timeout=0.3, retries=0, limit=1.0)


def wait_for(condition, seconds: float = 30.0) -> None:
    """Until something that another thread does is done; fails if it takes too long."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it does not come"
        threading.Event().wait(0.02)


def test_checkpoints_move_while_a_run_is_training_and_it_equals_an_undisturbed_one(tmp_path):
    undisturbed = training.train(simckpt.Store(tmp_path / "undisturbed"), 60)
    store = simckpt.Store(tmp_path / "store")
    with store.archive(tmp_path / "archive", policy=simckpt.KeepLast(1)):
        made = training.train(store, 60)
    assert training.bits(made) == training.bits(undisturbed)
    assert store.files.evicted("a") == {1, 2, 3, 4, 5}, "the end of the block moves what is left"
    assert [each.tier for each in store.run("a").checkpoints()] == ["archive"] * 5 + ["local"]
    # and an evicted one is gone on from like any other
    branch = store.run("a").at(step=30).branch("b")
    assert training.bits(training.train(store, 60, run=branch.name)) == training.bits(undisturbed)


def test_an_archive_that_cannot_be_reached_is_told_once_and_loses_nothing(tmp_path, fake):
    files, log = filled(tmp_path / "store", 2)
    fake.fault = lambda number, name: "drop before"
    mover = Archive(files, "s3://bucket/place", policy=simckpt.KeepLast(1), patience=SHORT)

    def train() -> None:
        mover.start(every=0.01)
        background = mover._mover
        wait_for(lambda: background.last_error is not None)
        with files.claim(RUN):
            add(files, log, 3)
        mover.stop()

    with pytest.warns(UpkeepWarning, match="cannot be read") as caught:
        train()
    assert len(caught) == 1
    assert [event["event"] for event in files.events(RUN)].count("archive failed") == 1
    assert local_seqs(files) == {1, 2, 3}
    for seq in (1, 2, 3):
        assert_restores(files, seq)
    fake.reset()
    mover.start(every=0.01)
    mover.stop()
    assert local_seqs(files) == {3}


def test_an_archive_that_hangs_ends_within_the_time_given(tmp_path, fake):
    files, _ = filled(tmp_path / "store", 1)
    fake.hang = 20.0
    fake.fault = lambda number, name: "hang before"
    mover = Archive(files, "s3://bucket/place", patience=Patience(timeout=1.0, retries=0, limit=2.0))
    mover.start(every=0.01)
    wait_for(lambda: fake.requests)
    begun = time.monotonic()
    with pytest.warns(UpkeepWarning):
        mover.stop(timeout=15.0)
    assert time.monotonic() - begun < 15.0
    assert local_seqs(files) == {1}


def test_a_large_upload_is_given_up_when_the_time_is_over(tmp_path, fake, monkeypatch):
    from simckpt.archive import objects

    monkeypatch.setattr(objects, "PORTION", 1 << 10)
    fake.delay = 0.1
    files, _ = filled(tmp_path / "store", 2)
    mover = Archive(files, "s3://bucket/place", patience=Patience(timeout=5.0, retries=0, limit=5.0))
    mover.start(every=0.01)
    wait_for(lambda: any("uploads" in key or key.endswith("state.h5") for _, key in fake.requests))
    background = mover._mover
    with pytest.warns(UpkeepWarning, match="next pass goes on"):
        mover.stop(timeout=0.1)
    background._thread.join(20)
    assert not background._thread.is_alive(), "it ends with its next request"
    assert local_seqs(files) == {1, 2}
    fake.delay = 0.0
    assert mover.move().problems == []


def test_a_program_that_ends_without_stopping_it_ends(tmp_path):
    filled(tmp_path / "store", 1)
    code = "import simckpt, sys\narchive = simckpt.Store(sys.argv[1]).archive(sys.argv[2])\narchive.start()\n"
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "store"), str(tmp_path / "archive")], timeout=60, check=True
    )
    assert done.returncode == 0


def test_a_slow_archive_does_not_keep_a_save_waiting(tmp_path, fake):
    fake.delay = 0.5
    files, log = filled(tmp_path / "store", 1)
    mover = Archive(files, "s3://bucket/place", patience=Patience(timeout=5.0, retries=0, limit=5.0))
    mover.start(every=0.01)
    wait_for(lambda: len(fake.requests) > 2)
    begun = len(fake.requests)
    with files.claim(RUN):
        add(files, log, 2)
    during = len(fake.requests) - begun
    fake.delay = 0.0
    mover.stop()
    assert during < 6, "the save did not wait for the pass under way"
    assert {1, 2} <= files.archived(RUN).keys()
    for seq in (1, 2):
        assert_restores(StoreFiles.open(files.path), seq)


@pytest.mark.parametrize("how", ["stopped", "left running"])
def test_a_program_ends_soon_with_its_exit_code_though_the_server_never_answers(tmp_path, fake, how):
    filled(tmp_path / "store", 1)
    fake.hang, fake.fault = 200.0, lambda number, name: "hang before"
    code = (
        (
            "import simckpt, sys, time\narchive = simckpt.Store(sys.argv[1]).archive('s3://bucket/place')\narchive.start()\n"
            "time.sleep(0.5)\n"
        )
        + ("archive.stop(timeout=0.5)\n" if how == "stopped" else "")
        + "sys.exit(75)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path / "store")], timeout=50)  # retries take 180 s
    assert fake.requests
    assert done.returncode == 75


def test_ctrl_c_ends_a_command_though_the_server_never_answers(tmp_path, fake):
    fake.hang, fake.fault = 200.0, lambda number, name: "hang before"
    command = [sys.executable, "-m", "simckpt", "pull", "s3://bucket/place", str(tmp_path / "store")]
    # a shell's background jobs ignore the signal
    reset = "import signal, runpy, sys; signal.signal(2, signal.default_int_handler); sys.argv = sys.argv[1:]; "
    code = reset + "runpy.run_module('simckpt', run_name='__main__', alter_sys=True)"
    process = subprocess.Popen([sys.executable, "-c", code, *command[2:]], stderr=subprocess.DEVNULL)
    try:
        wait_for(lambda: fake.requests)
        process.send_signal(signal.SIGINT)
        assert process.wait(40) != 0
    finally:
        process.kill()
        process.wait()
