"""Passes between a store and its archive: what moves, what stays, what is removed."""

import json
import os
import shutil
import time

import pytest
from archive_helpers import (
    HASTY,
    RUN,
    add,
    archive,
    assert_restores,
    filled,
    is_whole,
    kept_aside,
    local_seqs,
    sha256,
)
from log_helpers import Log, segment_files
from storage_helpers import new_store, snapshot

import simckpt
from simckpt.archive import Archive, Patience
from simckpt.errors import ArchiveUnavailableError, ConfigurationError, ConflictError, RunLockedError
from simckpt.policies import KeepAll, KeepLast
from simckpt.storage import StoreFiles

EVERY = {1, 2, 3, 4}


def test_old_checkpoints_leave_the_disk_and_come_back_bit_for_bit(tmp_path, url):
    files, _ = filled(tmp_path / "store")
    before = kept_aside(files)
    moved = archive(files, url, 2).move()
    assert len(moved.archived) == 4
    assert len(moved.evicted) == 2
    assert moved.problems == []
    assert local_seqs(files) == {3, 4}
    assert files.evicted(RUN) == {1, 2}
    store = simckpt.Store(tmp_path / "store")
    for seq in EVERY:
        assert_restores(store.files, seq)
    assert kept_aside(files) == before
    assert files.evicted(RUN) == set()


def test_a_copy_of_an_archive_is_a_store(tmp_path):
    files, _ = filled(tmp_path / "store")
    archive(files, tmp_path / "archive").move()
    copy = StoreFiles.open(tmp_path / "archive")
    for seq in EVERY:
        copy.verify(RUN, seq)
        assert_restores(copy, seq)


def test_an_archive_holds_what_its_records_say(tmp_path, fake):
    files, _ = filled(tmp_path / "store")
    before = kept_aside(files)
    archive(files, "s3://bucket/place").move()
    there = {key.removeprefix("place/"): data for key, data in fake.objects.items()}
    for seq in EVERY:
        folder = f"runs/{RUN}/checkpoints/{seq:08d}"
        assert is_whole(there, folder, before)
        noted = json.loads((files.path / f"runs/{RUN}/archived/{seq:08d}.json").read_text())
        for name, entry in noted["files"].items():
            data = before[f"{folder}/{name}"]
            assert entry == {"size": len(data), "digest": sha256(data)}
        for identity, entry in noted["segments"].items():
            assert entry["digest"] == sha256(before[f"segments/{identity}.h5"])
        assert (
            there[f"runs/{RUN}/archived/{seq:08d}.json"]
            == (files.path / f"runs/{RUN}/archived/{seq:08d}.json").read_bytes()
        )


def test_the_commit_is_the_last_object_of_a_checkpoint_and_comes_after_reading_back(tmp_path, fake):
    files, _ = filled(tmp_path / "store", 1)
    archive(files, "s3://bucket/place").move()
    folder = f"place/runs/{RUN}/checkpoints/00000001"
    order = [request for request in fake.requests if request[1].startswith(("place/runs", "place/segments"))]
    commit = order.index(("PUT", f"{folder}/commit.json"))
    for name in [key for key in fake.objects if key.startswith(("place/segments", folder)) and "commit" not in key]:
        assert order.index(("PUT", name)) < order.index(("GET", name)) < commit
    assert order.index(("PUT", f"place/runs/{RUN}/archived/00000001.json")) == min(
        place for place, request in enumerate(order) if request[0] == "PUT" and "run.json" not in request[1]
    )


def test_segments_are_uploaded_once(tmp_path, fake):
    files, log = filled(tmp_path / "store")
    mover = archive(files, "s3://bucket/place")
    mover.move()
    with files.claim(RUN):
        add(files, log, 5)
    mover.move()
    uploads = [key for method, key in fake.requests if method == "PUT" and "/segments/" in key]
    assert len(uploads) == len(set(uploads)) == 5


def test_a_segment_stays_while_a_checkpoint_here_uses_it_and_goes_with_the_last(tmp_path):
    files, log = new_store(tmp_path / "store"), Log(columns=("rewards", "half"), capacity=10)
    with files.claim(RUN):
        for number in range(1, 4):
            add(files, log, number)  # ten rows each, of which ten are kept: none is shared
    assert len(segment_files(files)) == 3
    archive(files, tmp_path / "archive", 1).move()
    assert len(segment_files(files)) == 1
    with files.claim(RUN):
        files.prune(RUN, 2, "test")
    archive(files, tmp_path / "archive", 1).move()
    assert len(list((tmp_path / "archive/segments").iterdir())) == 2


def test_pruning_removes_the_copy_and_leaves_a_tombstone_there_too(tmp_path, fake):
    files, _ = filled(tmp_path / "store")
    mover = archive(files, "s3://bucket/place", 1)
    mover.move()
    with files.claim(RUN):
        files.prune(RUN, 2, "test")
    moved = mover.move()
    assert len(moved.removed) == 1
    here = (files.path / f"runs/{RUN}/checkpoints/00000002/commit.json").read_bytes()
    assert b"tombstone" in here
    assert fake.objects[f"place/runs/{RUN}/checkpoints/00000002/commit.json"] == here
    assert not [key for key in fake.objects if "00000002" in key and not key.endswith("commit.json")]
    order = [(method, key.rpartition("/")[2]) for method, key in fake.requests if "00000002" in key]
    order = [each for each in order if each[0] in ("PUT", "DELETE")]
    assert order[-4:-1] == [("PUT", "commit.json"), ("DELETE", "state.h5"), ("DELETE", "leaves.json")]
    assert order[-1] == ("DELETE", "00000002.json"), "as long as it is there, a pass has something to do"
    for seq in (1, 3, 4):
        assert_restores(simckpt.Store(files.path).files, seq)


def test_the_pruner_leaves_a_segment_in_the_archive_that_an_archived_checkpoint_uses(tmp_path):
    files, _ = filled(tmp_path / "store")  # each uses the segments of all before it
    mover = archive(files, tmp_path / "archive", 1)
    mover.move()
    with files.claim(RUN):
        files.prune(RUN, 4, "test")
        files.prune(RUN, 1, "test")
    mover.move()
    assert len(list((tmp_path / "archive/segments").iterdir())) == 3
    assert_restores(simckpt.Store(files.path).files, 3)


def test_listings_show_archived_checkpoints_like_all_others(tmp_path):
    files, _ = filled(tmp_path / "store")
    archive(files, tmp_path / "archive", 1).move()
    store = simckpt.Store(tmp_path / "store")
    assert [each.tier for each in store.run(RUN).checkpoints()] == ["archive"] * 3 + ["local"]
    assert [each.step for each in store.checkpoints("tier = 'archive'")] == [10, 20, 30]
    assert len(store.contents()[0].checkpoints) == 4
    assert "3 in the archive" in str(store.graph())
    first = store.run(RUN).checkpoints()[0]
    assert list(first.leaves()) == list(store.run(RUN).latest().leaves())
    assert files.evicted(RUN) == {1, 2, 3}, "looking does not fetch"


def test_what_came_back_stays_for_a_while(tmp_path):
    files, _ = filled(tmp_path / "store")
    mover = archive(files, tmp_path / "archive", 1)
    mover.move()
    first = simckpt.Store(tmp_path / "store").run(RUN).checkpoints()[0]
    assert mover.fetch(first) != []
    assert mover.fetch(first) == []
    mover.move()
    assert local_seqs(files) == {1, 4}
    # as if it had come back two days ago
    state = files.path / f"runs/{RUN}/checkpoints/00000001/state.h5"
    noted = files.path / f"runs/{RUN}/archived/00000001.json"
    then = time.time() - 2 * 86_400
    os.utime(state, (then, then))
    os.utime(noted, (then - 60, then - 60))
    mover.move()
    assert local_seqs(files) == {4}


def test_the_store_remembers_its_archive_without_secrets(tmp_path, fake):
    files, _ = filled(tmp_path / "store")
    store = simckpt.Store(tmp_path / "store")
    store.archive("s3://bucket/place", policy=KeepLast(1)).move()
    again = simckpt.Store(tmp_path / "store").archive()
    assert again.url == "s3://bucket/place"
    secrets = [value.encode() for name, value in fake.environment().items() if "KEY" in name]
    for name, data in snapshot(files.path).items():
        assert not any(secret in data for secret in secrets), name
    for name, data in fake.objects.items():
        assert not any(secret in data for secret in secrets), name


def test_without_an_address_or_with_a_wrong_policy_it_says_so(tmp_path):
    files, _ = filled(tmp_path / "store", 1)
    store = simckpt.Store(files.path)
    with pytest.raises(ConfigurationError, match="no archive yet"):
        store.archive()
    with pytest.raises(ConfigurationError, match="policy"):
        store.archive(tmp_path / "archive", policy=3)


def test_an_archive_belongs_to_one_store(tmp_path):
    mine, _ = filled(tmp_path / "mine", 1)
    theirs, _ = filled(tmp_path / "theirs", 1)
    archive(mine, tmp_path / "archive").move()
    before = snapshot(tmp_path / "archive")
    with pytest.raises(ConflictError, match="archive of store"):
        archive(theirs, tmp_path / "archive").move()
    assert snapshot(tmp_path / "archive") == before


@pytest.mark.parametrize("what", ["store", "other"])
def test_a_place_with_other_things_in_it_is_left_alone(tmp_path, what):
    files, _ = filled(tmp_path / "store", 1)
    place = tmp_path / "place"
    if what == "store":
        filled(place, 1)
    else:
        place.mkdir()
        (place / "thesis.tex").write_text("all my work")
    before = snapshot(place)
    with pytest.raises(ConflictError):
        archive(files, place).move()
    assert snapshot(place) == before


def test_an_archive_that_was_moved_is_known_again_and_another_one_is_not(tmp_path):
    files, _ = filled(tmp_path / "store")
    archive(files, tmp_path / "archive", 1).move()
    (tmp_path / "archive").rename(tmp_path / "elsewhere")
    assert archive(files, tmp_path / "elsewhere", 1).move().problems == []
    assert_restores(simckpt.Store(files.path).files, 1)
    for make in (False, True):
        if make:
            (tmp_path / "third").mkdir()
        with pytest.raises(ArchiveUnavailableError, match="is it mounted"):
            archive(files, tmp_path / "third", 1).move()
    assert simckpt.Store(files.path).archive().url == (tmp_path / "elsewhere").as_uri(), "a wrong one is not kept"


def test_an_archive_on_a_disk_that_is_not_mounted_is_unreachable_and_not_made_anew(tmp_path):
    files, _ = filled(tmp_path / "store")
    mover = archive(files, tmp_path / "archive", 1)
    mover.move()
    (tmp_path / "archive").rename(tmp_path / "away")
    for act in (
        lambda: archive(files, tmp_path / "archive", 1).move(),
        lambda: simckpt.Store(files.path).run(RUN).checkpoints()[0].read(),
    ):
        with pytest.raises(ArchiveUnavailableError):
            act()
    assert not (tmp_path / "archive").exists()
    (tmp_path / "away").rename(tmp_path / "archive")
    assert_restores(simckpt.Store(files.path).files, 1)


def test_one_mover_at_a_time(tmp_path):
    files, _ = filled(tmp_path / "store", 1)
    mover = archive(files, tmp_path / "archive")
    with files.claim_archive(), pytest.raises(RunLockedError, match="moving checkpoints"):
        mover.move()
    mover.move()


def test_a_store_that_ignores_conditional_writes_is_refused(tmp_path, fake):
    files, _ = filled(tmp_path / "store", 1)
    fake.exclusive = False
    with pytest.raises(ConfigurationError, match="conditional writes"):
        archive(files, "s3://bucket/place").move()
    assert fake.objects == {}
    assert local_seqs(files) == {1}


def test_somebody_elses_commit_of_the_same_number_is_a_conflict_and_nothing_is_lost(tmp_path, fake):
    files, log = filled(tmp_path / "store", 2)
    mover = archive(files, "s3://bucket/place")
    mover.move()
    with files.claim(RUN):
        add(files, log, 3)
    # another writer was first in the archive, with its own number 3
    name = f"place/runs/{RUN}/archived/00000003.json"
    other, _ = filled(tmp_path / "other", 3)
    archive(other, "s3://bucket/other").move()
    fake.objects[name] = fake.objects[f"other/runs/{RUN}/archived/00000003.json"]
    theirs = dict(fake.objects)
    moved = mover.move()
    assert len(moved.problems) == 1
    assert "both sides have written" in moved.problems[0]
    assert fake.objects[name] == theirs[name]
    assert 3 in local_seqs(files)
    assert_restores(files, 3)


def test_a_damaged_checkpoint_is_not_moved_and_hides_no_other(tmp_path):
    files, _ = filled(tmp_path / "store")
    state = files.path / f"runs/{RUN}/checkpoints/00000002/state.h5"
    data = bytearray(state.read_bytes())
    data[-5] ^= 1
    state.write_bytes(data)
    moved = archive(files, tmp_path / "archive", 1).move()
    assert len(moved.archived) == 3
    assert len(moved.problems) == 1
    assert local_seqs(files) == {2, 4}


def test_marks_and_starts_go_along_and_removed_marks_go(tmp_path):
    files, _ = filled(tmp_path / "store")
    files.tag(RUN, 1, "good")
    files.add_metrics(RUN, 1, {"eval/return": 3.0})
    mover = archive(files, tmp_path / "archive", 1)
    mover.move()
    copy = StoreFiles.open(tmp_path / "archive")
    assert copy.marks(RUN) == files.marks(RUN) != {}
    files.untag(RUN, 1, "good")
    mover.move()
    assert copy.marks(RUN) == files.marks(RUN)


def test_the_whole_pass_can_be_repeated_and_then_does_nothing(tmp_path, fake):
    files, _ = filled(tmp_path / "store")
    mover = archive(files, "s3://bucket/place", 1)
    mover.move()
    mover.move()
    here, there = kept_aside(files), dict(fake.objects)
    fake.reset()
    moved = mover.move()
    assert (moved.archived, moved.evicted, moved.removed, moved.problems) == ([], [], [], [])
    assert (kept_aside(files), fake.objects) == (here, there)
    assert not [request for request in fake.requests if request[0] != "GET"]


def test_with_no_policy_everything_stays_and_is_copied(tmp_path):
    files, _ = filled(tmp_path / "store")
    assert Archive(files, tmp_path / "archive", patience=HASTY).move().evicted == []
    assert local_seqs(files) == EVERY
    assert repr(KeepAll()) in repr(Archive(files)._policy)


def test_an_archive_that_is_lost_for_good_is_replaced_only_when_that_is_said(tmp_path):
    files, _ = filled(tmp_path / "store", 2)
    archive(files, tmp_path / "archive", 2).move()
    shutil.rmtree(tmp_path / "archive")
    with pytest.raises(ArchiveUnavailableError):
        archive(files, tmp_path / "another", 2).move()
    for _ in range(2):  # a training that says so is started again
        again = Archive(files, str(tmp_path / "another"), policy=KeepLast(1), new=True)
        assert again.move().problems == []
    assert local_seqs(files) == {2}
    # one that checkpoints depend on is not replaced
    known = files.archive()
    with pytest.raises(ConflictError, match=r"1 checkpoints or sessions are in the old archive alone: .* number 1"):
        Archive(files, str(tmp_path / "third"), new=True).move()
    assert files.archive() == known
    assert_restores(simckpt.Store(files.path).files, 1)


def test_what_is_in_a_full_archive_leaves_the_disk_all_the_same(tmp_path, fake):
    files, log = filled(tmp_path / "store", 2)
    archive(files, "s3://bucket/place", 2).move()
    with files.claim(RUN):
        add(files, log, 3)
    fake.fault = lambda number, name: "500" if name.startswith("PUT") else None
    with pytest.raises(ArchiveUnavailableError):
        Archive(files, "s3://bucket/place", policy=KeepLast(1), patience=Patience(1.0, 0, 1.0)).move()
    assert local_seqs(files) == {3}
    fake.reset()
    for seq in (1, 2, 3):
        assert_restores(simckpt.Store(files.path).files, seq)
