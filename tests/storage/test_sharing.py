"""Who frees a segment, and who must not: checkpoints of several runs, saves in progress, the dead."""

import contextlib
import pickle
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from log_helpers import RUN, Log, assert_holds, save_log, segment_files, state
from storage_helpers import checkpoint_folder, new_store, run_record, snapshot

from simckpt.errors import ConfigurationError, ConflictError, SegmentMissingError, SegmentsKeptError, StorageError
from simckpt.storage import CommitDraft, StoreFiles, names, preparing, processes, sealed
from simckpt.storage.durable import Disk


@pytest.fixture
def store(tmp_path):
    store = new_store(tmp_path / "store")
    with store.claim(RUN):
        yield store


def saved(store, log, count=3):
    log.add(count)
    return save_log(store, log)


def segments_of(commit) -> list[str]:
    return [piece.segment for piece in commit.leaves["replay/rewards"].pieces]


def test_pruning_frees_the_segments_that_no_other_checkpoint_uses(store):
    log = Log(capacity=6)
    commits = [saved(store, log) for _ in range(5)]  # each refers to its own segment and to that of the one before
    own = [segments_of(commit)[-1] for commit in commits]
    store.prune(RUN, 3, "test")
    assert segment_files(store) == set(own)
    store.prune(RUN, 2, "test")
    assert segment_files(store) == set(own) - {own[1]}
    store.prune(RUN, 1, "test")
    assert segment_files(store) == {own[2], own[3], own[4]}
    store.prune(RUN, 5, "test")
    assert segment_files(store) == {own[2], own[3]}
    assert store.read(RUN, 4)
    assert list((store.path / "trash").iterdir()) == []
    assert list((store.path / "tmp").iterdir()) == []


def branched(store, log, name="branch"):
    """Another run that continues the log: its first save refers to the segments of the run it came from."""
    store.write_run(name, run_record(name, id="e" * 32))
    log.add(2)
    return save_log(store, log, run=name)


def test_a_segment_that_another_run_uses_stays_until_both_let_go(store):
    log = Log()
    first = saved(store, log)
    branched(store, log)
    store.prune(RUN, 1, "test")
    assert segments_of(first)[0] in segment_files(store)
    assert_holds(store, 1, log, run="branch")
    store.prune("branch", 1, "test")
    assert segment_files(store) == set()


def test_what_another_process_pruned_counts_no_more(store):
    log = Log()
    saved(store, log)
    branched(store, log)
    other = StoreFiles.open(store.path)
    store._usage.by_checkpoints()  # it knows both checkpoints
    code = "import sys; from simckpt.storage import StoreFiles; StoreFiles.open(sys.argv[1]).prune('branch', 1, 'test')"
    subprocess.run([sys.executable, "-c", code, str(other.path)], check=True)
    assert len(segment_files(store)) == 1
    store.prune(RUN, 1, "test")
    assert segment_files(store) == set()


@pytest.mark.parametrize("name", ["leaves.json", "commit.json"])
def test_while_a_checkpoint_is_damaged_no_segment_is_freed(store, name):
    """What it uses cannot be known: its rows may be all that is left of it."""
    log = Log()
    saved(store, log)
    log.pieces = dict.fromkeys(log.columns, ())
    saved(store, log)
    path = checkpoint_folder(store, 1) / name
    good = path.read_bytes()
    path.write_bytes(good[:-5])
    before = segment_files(store)
    restarted = StoreFiles.open(store.path)  # the process that made it knows it by heart
    with pytest.raises(SegmentsKeptError, match="damaged"):
        restarted.prune(RUN, 2, "test")
    assert segment_files(store) == before
    path.write_bytes(good)
    store.verify(RUN, 1)


def test_checkpoints_of_a_run_whose_record_is_lost_keep_their_segments(store):
    log = Log()
    saved(store, log)
    branched(store, log)
    (store.path / "runs" / "branch" / "run.json").unlink()
    store.prune(RUN, 1, "test")
    assert len(segment_files(store)) == 2


class WatchedDisk(Disk):
    """Calls something at one operation."""

    def __init__(self) -> None:
        self.when, self.action = None, None

    def rename(self, source, target):
        super().rename(source, target)
        if self.action is not None and self.when(source, target):
            action, self.action = self.action, None
            action()


@pytest.mark.parametrize("moment", ["announced", "prepared", "published"])
def test_a_save_that_has_announced_what_it_needs_keeps_it(tmp_path, moment):
    """A pruner of another run comes in between: it has the segment in its trash when the save goes on."""
    store = new_store(tmp_path / "store")
    log = Log()
    with store.claim(RUN):
        saved(store, log)
    store.write_run("branch", run_record("branch", id="e" * 32))
    log.add(2)
    components = state(log)
    if moment == "announced":
        # the save stops before its own segment has its name
        class Saver(Disk):
            def rename(self, source, target):
                if target.parent.name == "segments":
                    store.prune(RUN, 1, "meanwhile")
                super().rename(source, target)

        saver = StoreFiles.open(store.path, disk=Saver())
        commit = saver.commit("branch", CommitDraft(None, 1), components)
    else:
        prepared = store.prepare("branch", components)
        disk = WatchedDisk()
        pruner = StoreFiles.open(store.path, disk=disk)
        if moment == "published":
            disk.when = lambda source, target: target.parent.name == "trash"
            disk.action = lambda: commits.append(store.publish("branch", CommitDraft(None, 1), prepared))
        commits = []
        pruner.prune(RUN, 1, "meanwhile")
        commit = commits[0] if commits else store.publish("branch", CommitDraft(None, 1), prepared)
    log.committed(commit)
    assert_holds(store, 1, log, run="branch")
    store.verify("branch", 1)
    assert segment_files(store) == set(segments_of(commit))


def test_a_save_that_finds_a_segment_in_the_trash_fails_and_the_next_writes_its_rows(tmp_path):
    store = new_store(tmp_path / "store")
    log, disk, failed = Log(), WatchedDisk(), []
    saved(store, log)
    store.write_run("branch", run_record("branch", id="e" * 32))
    log.add(2)

    def save_meanwhile():
        with pytest.raises(SegmentMissingError):
            store.commit("branch", CommitDraft(None, 1), state(log))
        failed.append(True)

    disk.when, disk.action = (lambda source, target: target.parent.name == "trash"), save_meanwhile
    StoreFiles.open(store.path, disk=disk).prune(RUN, 1, "meanwhile")
    assert failed
    assert segment_files(store) == set()
    save_log(store, log, run="branch")
    assert_holds(store, 1, log, run="branch")


def test_readers_find_what_is_in_the_trash_for_a_moment(store):
    log = Log()
    commit = saved(store, log)
    (segment,) = segments_of(commit)
    (store.path / "segments" / f"{segment}.h5").rename(store.path / "trash" / f"{segment}.h5")
    assert_holds(store, 1, log)
    store.verify(RUN, 1)
    assert store.missing_segments({segment}) == {segment}


# the two halves of a save


def test_what_was_prepared_is_no_checkpoint_until_it_is_published(store):
    log = Log()
    first = saved(store, log)
    log.add(3)
    prepared = store.prepare(RUN, state(log))
    assert store.records(RUN) == [first.record]
    assert len(prepared.made) == 1
    assert set(prepared.made) < segment_files(store)
    job = sealed.unseal((prepared.folder / "job.json").read_bytes(), "job", path="job")
    assert (job.texts("made"), job.texts("uses")) == (prepared.made, tuple(segments_of(first)))
    commit = store.publish(RUN, CommitDraft(first.record.id, 6), prepared)
    assert store.records(RUN) == [first.record, commit.record]
    assert commit.leaves == store.index(RUN, 2).leaves
    assert list((store.path / "tmp").iterdir()) == []


def test_what_is_discarded_leaves_nothing(store):
    log = Log()
    saved(store, log)
    before = snapshot(store.path)
    log.add(3)
    prepared = store.prepare(RUN, state(log, big=np.ones(1 << 18)))
    for _ in range(2):
        store.discard(prepared)
        assert snapshot(store.path) == before
    with pytest.raises(StorageError, match=prepared.folder.name):
        store.publish(RUN, CommitDraft(None, 1), prepared)
    assert save_log(store, log).record.seq == 2
    assert_holds(store, 2, log)


def test_a_published_checkpoint_survives_a_late_discard(store):
    log = Log()
    log.add(3)
    prepared = store.prepare(RUN, state(log))
    log.committed(store.publish(RUN, CommitDraft(None, 1), prepared))
    store.discard(prepared)
    assert_holds(store, 1, log)


@pytest.mark.parametrize("trouble", ["conflict", "metrics"])
def test_a_checkpoint_that_cannot_be_published_is_discarded(store, trouble):
    log = Log()
    saved(store, log)
    log.add(3)
    prepared = store.prepare(RUN, state(log))
    metrics = {}
    if trouble == "conflict":
        checkpoint_folder(store, 2).mkdir()
        (checkpoint_folder(store, 2) / "file").touch()
    else:
        metrics = {f"a rather long name {number}": 0.1 for number in range(200)}
    with pytest.raises(ConflictError if trouble == "conflict" else ConfigurationError):
        store.publish(RUN, CommitDraft(None, 1, metrics), prepared)
    assert len(segment_files(store)) == 1
    assert list((store.path / "tmp").iterdir()) == []


CHILD = """
import pickle, sys
sys.path.insert(0, sys.argv[1])
from log_helpers import Log, state
from simckpt.storage.durable import Disk
from simckpt.storage.preparing import write_prepared
job, log = pickle.load(sys.stdin.buffer)
pickle.dump(write_prepared(Disk(), job, state(log)), sys.stdout.buffer)
assert "torch" not in sys.modules
"""


def prepare_in_child(store, log) -> preparing.Prepared:
    here = str(Path(__file__).parent)
    given = pickle.dumps((store.prepare_job(RUN), log))
    done = subprocess.run([sys.executable, "-c", CHILD, here], input=given, stdout=subprocess.PIPE, check=True)
    return pickle.loads(done.stdout)


def test_another_process_may_do_the_heavy_part(store):
    log = Log()
    saved(store, log)
    log.add(3)
    prepared = prepare_in_child(store, log)
    assert store.sweep() == []  # its maker is dead, its owner is not
    log.captured = log.added
    log.committed(store.publish(RUN, CommitDraft(None, 6), prepared))
    assert_holds(store, 2, log)
    store.verify(RUN, 2)
    saved(store, log)
    assert_holds(store, 3, log)


def test_what_a_dead_process_prepared_is_swept_with_its_segments(store):
    log = Log()
    saved(store, log)
    before = snapshot(store.path)
    here = processes.this_process()
    dead = processes.Process(here.host, here.boot_id, here.namespace, 2**22 + 5, 1)
    log.add(3)
    prepared = preparing.write_prepared(Disk(), replace(store.prepare_job(RUN), owner=dead), state(log))
    assert snapshot(store.path) != before
    assert store.sweep() == [prepared.folder.name]
    assert snapshot(store.path) == before
    log.added -= 3
    assert_holds(store, 1, log)


def test_a_child_of_a_dead_process_that_goes_on_leaves_nothing(tmp_path):
    """The sweep takes the folder away at any operation of the heavy part; what follows fails, and no file stays."""
    here = processes.this_process()
    dead = processes.Process(here.host, here.boot_id, here.namespace, 2**22 + 5, 1)

    class Sweeping(Disk):
        def __init__(self, at):
            self.at, self.count, self.store = at, 0, None

        def __getattribute__(self, name):
            if name in ("create", "allocate", "pwrite", "fsync", "rename", "make_folder"):
                self.count += 1
                if self.count == self.at and self.store is not None:
                    self.store.sweep()
            return super().__getattribute__(name)

    at, total = 0, 1
    while at < total:
        at += 1
        store = new_store(tmp_path / f"store-{at}")
        log = Log()
        saved(store, log)
        before = snapshot(store.path)
        log.add(3)
        job = replace(store.prepare_job(RUN), owner=dead, new_id=names.random_id)
        disk = Sweeping(at)
        disk.store = store
        with contextlib.suppress(StorageError):
            preparing.write_prepared(disk, job, state(log))
        total = max(total, disk.count)
        store.sweep()
        assert snapshot(store.path) == before, at
    assert total > 15
