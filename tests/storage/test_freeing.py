"""What a pruner or a sweep does when it cannot know who uses a segment, or when somebody was interrupted at it."""

import errno
import os
import pickle
import shutil
import signal
import sys
from dataclasses import replace

import numpy as np
import pytest
from log_helpers import RUN, Log, assert_holds, save_log, segment_files, state
from storage_helpers import checkpoint_folder, new_store, run_record, save, snapshot

from simckpt.errors import DamagedError, SegmentsKeptError, SimckptError, StorageError
from simckpt.state.shared_memory import Slabs
from simckpt.storage import CommitDraft, StoreFiles, preparing, processes, work, writer_process
from simckpt.storage.durable import Disk
from simckpt.storage.writer_process import WriterProcess


@pytest.fixture
def store(tmp_path):
    store = new_store(tmp_path / "store")
    with store.claim(RUN):
        yield store


def saved(store, log, count=3, run=RUN):
    log.add(count)
    return save_log(store, log, run=run)


def dead() -> processes.Process:
    return replace(processes.this_process(), pid=2**22 + 5, started=1)


def left_in(store) -> list[str]:
    return [path.name for folder in ("tmp", "trash") for path in (store.path / folder).iterdir()]


def branch_prepared(store, log):
    """A save of another run has announced that it uses the first segment, and stops there."""
    store.write_run("branch", run_record("branch", id="e" * 32))
    log.add(2)
    return store.prepare("branch", state(log))


# looks that fail


@pytest.mark.parametrize("number", [errno.EIO, errno.EMFILE, errno.EACCES], ids=errno.errorcode.get)
@pytest.mark.parametrize("call", ["scandir", "open"])
def test_who_saves_is_not_guessed_when_it_cannot_be_looked_at(store, monkeypatch, number, call):
    log = Log()
    saved(store, log)
    prepared = branch_prepared(store, log)
    before, real = segment_files(store), getattr(os, call)

    def failing(path, *arguments, **options):
        wanted = store.path / "tmp" if call == "scandir" else "job.json"
        if str(path) == str(wanted):
            raise OSError(number, os.strerror(number))
        return real(path, *arguments, **options)

    monkeypatch.setattr(os, call, failing)
    with pytest.raises(StorageError):
        store.prune(RUN, 1, "test")
    assert store.sweep() == []
    monkeypatch.setattr(os, call, real)
    assert segment_files(store) == before
    log.committed(store.publish("branch", CommitDraft(None, 1), prepared))
    store.prune(RUN, 1, "again")
    assert_holds(store, 1, log, run="branch")
    assert left_in(store) == []


class OvertakenDisk(Disk):
    """Beside a pruner that looked at the commits before the prune, and takes what it finds in the trash for used."""

    overtakes = True

    def unlink(self, path):
        if self.overtakes and path.parent.name == "trash":
            self.overtakes = False
            path.rename(path.parent.parent / "segments" / f"{path.name[:32]}.h5")
        super().unlink(path)


def test_what_another_pruner_moves_back_with_an_older_look_is_freed_by_the_next(tmp_path):
    store, log = new_store(tmp_path / "store", disk=OvertakenDisk()), Log()
    with store.claim(RUN):
        saved(store, log)
        saved(store, Log())
        (stays,) = store.index(RUN, 2).segments
        assert len(segment_files(store)) == 2
        store.prune(RUN, 1, "test")
        assert len(segment_files(store)) == 2
        assert len(left_in(store)) == 1  # the job, which another process would find
        store.sweep()
    assert segment_files(store) == {stays}
    assert left_in(store) == []


# the store that was copied while it was written


def test_the_job_of_a_save_that_was_committed_after_all_takes_no_rows(store, tmp_path):
    log = Log()
    log.add(3)
    job = replace(store.prepare_job(RUN), owner=dead())
    prepared = preparing.write_prepared(Disk(), job, state(log))
    copied = tmp_path / "folder"
    shutil.copytree(prepared.folder, copied)
    log.committed(store.publish(RUN, CommitDraft(None, 1), prepared))
    shutil.copytree(copied, prepared.folder)
    before = segment_files(store)
    assert store.sweep() == [prepared.folder.name]
    assert segment_files(store) == before
    assert_holds(store, 1, log)
    assert left_in(store) == []


# a writer process that dies

PATCH = """
import os, signal, sys
from simckpt.storage import durable
import simckpt.storage.writer_process
name, number = os.environ["TEST_KILL"].split()
real, count = getattr(durable.Disk, name), 0
def dying(self, *arguments):
    global count
    count += 1
    if count == int(number):
        os.kill(os.getpid(), signal.SIGKILL)
    return real(self, *arguments)
setattr(durable.Disk, name, dying)
"""


@pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="needs anonymous shared files (Linux)")
def test_a_writer_process_that_is_killed_leaves_nothing(store, tmp_path, monkeypatch):
    log = Log()
    saved(store, log)
    before = snapshot(store.path)
    folder = tmp_path / "patch"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(PATCH)
    log.add(3)
    process = WriterProcess(Slabs())
    with monkeypatch.context() as patch:
        patch.setattr(sys, "path", [str(folder), *sys.path])
        # the announcement, the segment, its name, the state, the index
        for moment in ("create 1", "fsync 4", "rename 1", "create 3", "fsync 7"):
            patch.setenv("TEST_KILL", moment)
            with pytest.raises(StorageError, match=f"exit code -{signal.SIGKILL.value}"):
                store.prepare(RUN, state(log), elsewhere=process.prepare)
            assert snapshot(store.path) == before, moment
            assert left_in(store) == []
    prepared = store.prepare(RUN, state(log), elsewhere=process.prepare)
    process.close()
    log.committed(store.publish(RUN, CommitDraft(None, 1), prepared))
    assert_holds(store, 2, log)


@pytest.mark.parametrize("error", [KeyboardInterrupt(), StorageError("no"), DamagedError("bad", path="x")], ids=repr)
def test_what_another_process_has_prepared_and_nobody_takes_is_removed(store, error):
    log = Log()
    saved(store, log)
    before = snapshot(store.path)
    log.add(3)

    def answered_and_dropped(job, components, attributes):
        preparing.write_prepared(Disk(), job, components, attributes)
        raise error

    with pytest.raises(type(error)):
        store.prepare(RUN, state(log, big=np.ones(1 << 18)), elsewhere=answered_and_dropped)
    assert snapshot(store.path) == before
    assert left_in(store) == []


class Picky(Exception):
    """Goes into a pipe, and does not come out."""

    def __init__(self, first, second):
        super().__init__(first)


class Secret(Exception):
    def __reduce__(self):
        raise pickle.PicklingError("not me")


@pytest.mark.parametrize("error", [Picky("what", 1), Secret("what"), type("Local", (Exception,), {})("what")])
def test_an_error_that_crosses_no_pipe_is_told_in_words(error):
    told = writer_process._portable(error)
    assert type(told) is SimckptError
    assert str(told) == f"{type(error).__name__}: what"
    good = StorageError("x")
    assert writer_process._portable(good) is good


# what could not be decided is tried again


def damaged(store, name="commit.json", run="other"):
    """A damaged checkpoint of another run; returns what repairs it."""
    store.write_run(run, run_record(run, id="d" * 32))
    store.commit(run, CommitDraft(None, 1), {})
    path = checkpoint_folder(store, 1, run) / name
    good = path.read_bytes()
    path.write_bytes(good[:-5])
    return lambda: path.write_bytes(good)


@pytest.mark.parametrize("later", ["prune", "again", "sweep", "start"])
def test_segments_kept_because_of_damage_are_freed_after_the_repair(store, later):
    log = Log(capacity=3)
    for _ in range(4):
        saved(store, log)  # each has a segment of its own
    repair = damaged(store)
    with pytest.raises(SegmentsKeptError, match="damaged"):
        store.prune(RUN, 1, "test")
    store.prune(RUN, 2, "test")  # said once
    assert len(segment_files(store)) == 4
    for seq in (1, 2):
        left = {path.name for path in checkpoint_folder(store, seq).iterdir()}
        assert left == {"commit.json", "leaves.json"}, "the index alone names the segments"
    repair()
    if later == "prune":
        store.prune(RUN, 3, "test")
    elif later == "again":
        store.prune(RUN, 1, "test")
    elif later == "sweep":
        assert store.sweep() == []
    else:
        for path in (store.path / "tmp").iterdir():
            path.rename(path.with_name(dead().token(path.name[-8:])))
        assert len(StoreFiles.open(store.path).sweep()) == 2
    assert len(segment_files(store)) == (1 if later == "prune" else 2)
    assert [path.name for path in checkpoint_folder(store, 1).iterdir()] == ["commit.json"]
    assert left_in(store) == []


def test_the_segments_of_a_failed_save_wait_for_the_repair(store):
    log = Log()
    log.add(3)
    before = segment_files(store)
    repair = damaged(store)
    preparing.write_prepared(Disk(), replace(store.prepare_job(RUN), owner=dead()), state(log))
    assert store.sweep() == []
    (folder,) = (store.path / "tmp").iterdir()
    assert [path.name for path in folder.iterdir()] == ["job.json"]
    assert len(segment_files(store)) == 1
    repair()
    assert store.sweep() == [folder.name]
    assert segment_files(store) == before
    assert left_in(store) == []


@pytest.mark.parametrize("later", ["prune", "sweep"])
def test_a_segment_that_a_failed_save_had_announced_is_freed_later(store, later):
    log = Log()
    saved(store, log)
    prepared = branch_prepared(store, log)
    store.prune(RUN, 1, "test")
    assert len(segment_files(store)) == 2
    store.discard(prepared)
    if later == "prune":
        save(store, 1)
        store.prune(RUN, 2, "test")
    else:
        store.sweep()
    assert segment_files(store) == set()
    assert left_in(store) == []


def test_one_sweep_ends_all_that_the_dead_left_whatever_its_order(store):
    log = Log()
    saved(store, log)
    store.write_run("branch", run_record("branch", id="e" * 32))
    log.add(2)
    preparing.write_prepared(Disk(), replace(store.prepare_job("branch"), owner=dead()), state(log))
    store.prune(RUN, 1, "test")
    for path in (store.path / "tmp").iterdir():
        path.rename(path.with_name(dead().token(path.name[-8:])))
    assert len(StoreFiles.open(store.path).sweep()) == 2
    assert segment_files(store) == set()
    assert left_in(store) == []


# pruners that died, and several at once


def test_what_a_dead_pruner_left_in_the_trash_comes_back_if_it_is_used(store):
    log = Log()
    saved(store, log)
    (segment,) = segment_files(store)
    home = store.path / "segments" / f"{segment}.h5"
    home.rename(store.path / "trash" / f"{segment}.0123abcd.h5")
    assert_holds(store, 1, log)
    other = Log()
    saved(store, other)
    store.prune(RUN, 2, "test")
    assert home.exists()
    assert left_in(store) == []
    home.rename(store.path / "trash" / f"{segment}.0123abcd.h5")
    store.prune(RUN, 1, "test")
    assert segment_files(store) == set()
    assert left_in(store) == []


def test_a_pruner_removes_nothing_but_what_it_has_put_into_the_trash(store):
    """Another pruner takes the segment over: it may have to move it back, for a save that has begun meanwhile."""
    log = Log()
    saved(store, log)
    found = []

    class Meanwhile(Disk):
        def unlink(self, path):
            if path.parent.name == "trash" and not found:
                found.append(path.rename(path.with_name(f"{path.name.partition('.')[0]}.0123abcd.h5")))
            super().unlink(path)

    StoreFiles.open(store.path, disk=Meanwhile()).prune(RUN, 1, "test")
    assert list((store.path / "trash").iterdir()) == found


# what a save costs does not depend on how many were before


def test_tombstones_are_looked_at_once(store, monkeypatch):
    log = Log(capacity=3)
    for seq in range(1, 9):
        saved(store, log)
        if seq > 1:
            store.prune(RUN, seq - 1, "test")
    store._usage.by_checkpoints()
    looked, real = [], os.stat
    monkeypatch.setattr(os, "stat", lambda path, *a, **o: (looked.append(str(path)), real(path, *a, **o))[1])
    store._usage.by_checkpoints()
    assert [path for path in looked if path.endswith("commit.json")] == ["00000008/commit.json"]


def test_tombstones_of_a_run_that_was_replaced_are_forgotten(store):
    store.write_run("branch", run_record("branch", id="e" * 32))
    store.commit("branch", CommitDraft(None, 1), {})
    store.prune("branch", 1, "test")
    assert store._usage.by_checkpoints() == set()
    shutil.rmtree(store.path / "runs" / "branch")
    store.write_run("branch", run_record("branch", id="f" * 32))
    commit = saved(StoreFiles.open(store.path), Log(), run="branch")
    assert store._usage.by_checkpoints() == {piece.segment for leaf in commit.leaves.values() for piece in leaf.pieces}


def test_discarding_raises_nothing(tmp_path):
    (tmp_path / "file").touch()
    preparing.discard(Disk(), tmp_path, tmp_path / "file" / "folder", ["0" * 32])
    preparing.discard(Disk(), tmp_path, tmp_path / ("x" * 300), ["0" * 32])
    assert work.folders(tmp_path / "missing") == []
