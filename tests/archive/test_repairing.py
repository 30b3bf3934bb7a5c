"""A repair asks the archive before it gives anything up, and its dry run says what it then does."""

import shutil
from pathlib import Path

import pytest
from archive_helpers import RUN, add, archive, assert_restores, filled, kept_aside
from log_helpers import state
from storage_helpers import run_record, snapshot

import simckpt
from simckpt.archive.transfer import push
from simckpt.errors import CheckpointNotFoundError, DamagedError, StorageError
from simckpt.maintenance.check import Scope, check
from simckpt.maintenance.repair import repair
from simckpt.storage import BranchRecord, CommitDraft, StartRecord, StoreFiles, TombstoneRecord

PLAIN = Scope(structure=False)
STATES = 3


def folder(files: StoreFiles, seq: int) -> Path:
    return files.path / f"runs/{RUN}/checkpoints/{seq:08d}"


@pytest.fixture
def files(tmp_path):
    files, _ = filled(tmp_path / "store", STATES)
    archive(files, tmp_path / "archive", STATES).move()
    return files


def repaired(files: StoreFiles) -> list[tuple[str, str]]:
    """What a repair did, which is what its dry run said before, and nothing is written by that."""
    before = snapshot(files.path)
    planned = repair(files.path, scope=PLAIN, dry_run=True)
    assert snapshot(files.path) == before
    done = repair(files.path, scope=PLAIN)
    told = [[(action.path, action.text, bool(action.problem)) for action in each.actions] for each in (planned, done)]
    assert told[0] == told[1]
    assert all(action.done for action in done.actions if not action.problem)
    return [(action.path, action.text) for action in done.actions]


@pytest.mark.parametrize("lost", ["one note", "all notes", "all notes of what is there alone"])
def test_what_the_archive_has_comes_back_although_this_store_has_not_noted_it(files, tmp_path, lost):
    originals = kept_aside(files)
    if lost == "all notes of what is there alone":
        archive(files, tmp_path / "archive", 1).move()
        assert not (folder(files, 1) / "state.h5").exists()
    notes = files.path / f"runs/{RUN}/archived"
    (notes / "00000002.json").unlink() if lost == "one note" else shutil.rmtree(notes)
    (folder(files, 2) / "state.h5").write_bytes(b"") if "alone" not in lost else None
    assert {text for _, text in repaired(files)} == {"comes back from the archive"}
    assert kept_aside(files) == originals
    assert not (files.path / "quarantine").exists()


# that there was a newer one a note alone says
@pytest.mark.parametrize(("seqs", "notes"), [((1,), True), ((2,), False), ((1, 2), False), ((STATES,), True)])
def test_a_folder_that_was_removed_comes_back(files, tmp_path, seqs, notes):
    if not notes:
        shutil.rmtree(files.path / f"runs/{RUN}/archived")
    originals = kept_aside(files)
    for seq in seqs:
        shutil.rmtree(folder(files, seq))
    done = repaired(files)
    assert done == [(f"runs/{RUN}/checkpoints/{seq:08d}", "comes back from the archive") for seq in seqs]
    assert kept_aside(files) == originals
    assert archive(files, tmp_path / "archive", STATES).move().removed == []
    for seq in range(1, STATES + 1):
        assert_restores(files, seq)


def test_a_folder_of_checkpoints_that_was_removed_is_filled_again_once_it_is_there(files):
    originals = kept_aside(files)
    shutil.rmtree(folder(files, 1).parent)
    assert [text for _, text in repaired(files)] == ["is left alone"]
    folder(files, 1).parent.mkdir()
    assert {text for _, text in repaired(files)} == {"comes back from the archive"}
    assert kept_aside(files) == originals


def test_rows_that_several_checkpoints_lack_come_back_for_each_of_them(files):
    originals = kept_aside(files)
    (shared,) = files.segment_ids(RUN, 1)
    files.segment_file(shared).write_bytes(b"")
    assert repaired(files) == [
        (f"runs/{RUN}/checkpoints/{seq:08d}", "comes back from the archive") for seq in range(1, STATES + 1)
    ]
    assert kept_aside(files) == originals


def test_a_removed_folder_whose_copy_is_damaged_is_lost_and_the_copy_stays(files, tmp_path):
    shutil.rmtree(folder(files, 2))
    copy = tmp_path / "archive" / f"runs/{RUN}/checkpoints/00000002/state.h5"
    copy.write_bytes(copy.read_bytes()[:-1] + b"x")  # of its size
    there = {name: data for name, data in snapshot(tmp_path / "archive").items() if "00000002" in name}
    ((_, text),) = repaired(files)
    assert "lost" in text
    assert "quarantine" not in text
    assert files.commit_record(RUN, 2).kind == "lost"
    archive(files, tmp_path / "archive", STATES).move()
    assert {name: data for name, data in snapshot(tmp_path / "archive").items() if "00000002" in name} == there


def test_an_archive_out_of_reach_is_waited_for_even_if_nothing_is_noted_of_it(files, tmp_path):
    originals = kept_aside(files)
    shutil.rmtree(files.path / f"runs/{RUN}/archived")
    shutil.rmtree(folder(files, 1))
    (folder(files, 2) / "state.h5").unlink()
    (tmp_path / "archive").rename(tmp_path / "away")
    before = kept_aside(files)
    assert [text for _, text in repaired(files)] == ["is left alone"] * 2
    assert kept_aside(files) == before
    (tmp_path / "away").rename(tmp_path / "archive")
    repaired(files)
    assert kept_aside(files) == originals


@pytest.mark.parametrize("what", ["state.h5", "leaves.json", "commit.json", "segment"])
@pytest.mark.parametrize("how", ["link", "dangling link", "folder"])
def test_what_lies_in_the_place_of_a_file_gives_way_to_the_copy(files, tmp_path, what, how):
    originals = kept_aside(files)
    (own,) = files.segment_ids(RUN, STATES) - files.segment_ids(RUN, STATES - 1)
    place = files.segment_file(own) if what == "segment" else folder(files, STATES) / what
    outside = tmp_path / "outside"
    place.rename(outside)
    if how == "folder":
        place.mkdir()
        (place / "somebody's").write_bytes(b"own")
    else:
        place.symlink_to(outside if how == "link" else tmp_path / "nowhere")
    data = outside.read_bytes()
    assert [text for _, text in repaired(files)] == ["comes back from the archive"]
    assert {name: each for name, each in kept_aside(files).items() if not (files.path / name).is_symlink()} == originals
    assert outside.read_bytes() == data
    if how == "folder":
        aside = files.path / "quarantine" / place.relative_to(files.path)
        assert (aside / "somebody's").read_bytes() == b"own"


def test_nothing_is_brought_behind_a_folder_that_is_a_link(files, tmp_path):
    folder(files, 2).rename(tmp_path / "outside")
    folder(files, 2).symlink_to(tmp_path / "outside")
    (tmp_path / "outside/state.h5").unlink()
    before = snapshot(tmp_path / "outside")
    ((_, text),) = repaired(files)
    assert text == "is left alone"
    with pytest.raises(StorageError, match="symbolic link"):
        archive(files, tmp_path / "archive").bring_back(RUN, 2)
    assert snapshot(tmp_path / "outside") == before


def test_the_copy_of_another_checkpoint_of_that_number_is_not_taken(files, tmp_path):
    # the same run in two places, which have both gone on
    shutil.rmtree(files.path / f"runs/{RUN}/archived")
    other, _ = filled(tmp_path / "other", STATES)
    for name in ("leaves.json", "commit.json", "state.h5"):
        (folder(files, STATES) / name).write_bytes((folder(other, STATES) / name).read_bytes())
    run_id, theirs = files.read_run(RUN).id, other.read_run(RUN).id
    assert run_id == theirs  # of the helpers' making
    mine = (folder(files, STATES) / "commit.json").read_bytes()
    with pytest.raises(CheckpointNotFoundError):
        archive(files, tmp_path / "archive").bring_back(RUN, STATES)
    assert (folder(files, STATES) / "commit.json").read_bytes() == mine


def test_only_what_is_damaged_is_asked_for(files):
    (folder(files, 2) / "job.json").write_bytes(b"x")  # which nobody needs, and no archive has
    ((path, text),) = repaired(files)
    assert path.endswith("job.json")
    assert "quarantine" in text
    assert simckpt.Store(files.path).check()
    assert not isinstance(files.commit_record(RUN, 2), TombstoneRecord)


@pytest.fixture
def branched(tmp_path):
    """A run with later metrics and a start, and a branch of it, of whose record nothing else says all; archived."""
    files, log = filled(tmp_path / "store", 2)
    record = files.commit_record(RUN, 1)
    origin = BranchRecord(RUN, 1, record.step, {"learning_rate": 1e-4})
    files.write_run("trial", run_record("trial", id="b" * 32, origin=record.id, branch=origin))
    start = files.write_start("trial", StartRecord(1.8e9, {"learning_rate": 1e-4}, "e", None, {"simckpt": "0"}, "here"))
    log.add(10)
    files.commit("trial", CommitDraft(record.id, 15, start=start), state(log))
    files.add_metrics("trial", 1, {"eval/return": 5.0})
    archive(files, tmp_path / "archive", STATES).move()
    return files


SMALL = [f"runs/{RUN}/run.json", "runs/trial/run.json", "runs/trial/starts/*.json", "runs/trial/marks/*/metrics-1"]


@pytest.mark.parametrize("damage", ["flipped", "gone", "empty"])
@pytest.mark.parametrize("pattern", SMALL)
def test_records_beside_the_checkpoints_come_back_from_the_archive(branched, pattern, damage):
    root = branched.path
    (path,) = root.glob(pattern)
    if damage == "gone" and "marks" in pattern:
        pytest.skip("a mark that is gone was removed")
    originals = snapshot(root)
    if damage == "gone":
        path.unlink()
    else:
        path.write_bytes(b"" if damage == "empty" else bytes([data ^ 1 for data in path.read_bytes()]))
    assert repaired(branched) == [(str(path.relative_to(root)), "comes back from the archive")]
    assert {name: data for name, data in snapshot(root).items() if not name.startswith("quarantine/")} == originals
    assert len([path for path in root.glob("quarantine/**/*") if path.is_file()]) == (damage != "gone")
    assert check(root, PLAIN)


def test_the_record_of_another_run_in_the_archive_is_not_taken(branched, tmp_path):
    path = branched.path / "runs/trial/run.json"
    path.unlink()
    there = tmp_path / "archive/runs/trial/run.json"
    there.write_bytes(run_record("trial", id="c" * 32).to_bytes())
    ((_, text),) = [each for each in repaired(branched) if each[0] == "runs/trial/run.json"]
    assert text == "is made anew from the run's checkpoints and starts"
    assert not path.exists()


def test_a_lost_record_says_that_an_archive_out_of_reach_may_have_it(branched, tmp_path):
    (branched.path / "runs/trial/run.json").unlink()
    (tmp_path / "archive").rename(tmp_path / "moved")
    (action,) = repair(branched.path, scope=PLAIN).actions
    assert "the archive cannot be asked" in action.problem
    assert "is it mounted" in action.problem
    (tmp_path / "moved").rename(tmp_path / "archive")
    assert repair(branched.path, scope=PLAIN)
    assert check(branched.path, PLAIN)


def test_a_checkpoint_damaged_outside_of_its_arrays_is_told_to_have_no_copy(tmp_path):
    files, log = filled(tmp_path / "store", 1)
    path = folder(files, 1) / "state.h5"
    data = bytearray(path.read_bytes())
    data[24] ^= 1  # in HDF5's own head
    path.write_bytes(data)
    assert_restores(files, 1)
    with files.claim(RUN):
        add(files, log, 2)
    record = files.commit_record(RUN, 1)
    moved = archive(files, tmp_path / "archive", STATES).move()
    (problem,) = moved.problems
    assert f"checkpoint {record.id}" in problem
    assert "no copy of it in the archive, nor will be" in problem
    assert moved.archived == [files.commit_record(RUN, 2).id]
    (finding,) = check(files.path, PLAIN).damage
    assert (finding.kind, "no archive takes a copy of it" in finding.meaning) == ("rest", True)
    with pytest.raises(DamagedError, match="state"):
        push(files, RUN, tmp_path / "place")
    # all others were brought
    assert (tmp_path / f"place/runs/{RUN}/checkpoints/00000002/commit.json").exists()
    assert not (tmp_path / f"place/runs/{RUN}/checkpoints/00000001/commit.json").exists()
