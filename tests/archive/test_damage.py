"""Damage on one side is put right from the other; damage on both is told."""

import shutil

import pytest
import training
from archive_helpers import RUN, a_segment, archive, assert_restores, filled, kept_aside
from maintenance_helpers import PLAIN
from storage_helpers import snapshot
from typer.testing import CliRunner

import simckpt
from simckpt.archive import naming
from simckpt.cli import app
from simckpt.errors import ArchiveDamagedError, ArchiveUnavailableError, DamagedError, DamageWarning
from simckpt.maintenance.repair import repair

CHECKPOINT = f"runs/{RUN}/checkpoints/00000002"


def flip(path, at: int = -7) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


@pytest.fixture
def files(tmp_path):
    files, _ = filled(tmp_path / "store", 3)
    archive(files, tmp_path / "archive", 3).move()
    return files


@pytest.mark.parametrize("what", ["state.h5", "leaves.json", "segment"])
@pytest.mark.parametrize("how", ["flipped", "gone", "empty"])
def test_what_is_damaged_here_is_replaced_by_the_good_copy(files, what, how):
    before = kept_aside(files)
    path = files.path / (a_segment(files) if what == "segment" else f"{CHECKPOINT}/{what}")
    if how == "flipped":
        # a byte of a leaf: others are not read by a restore
        leaves = [leaf for leaf in files.index(RUN, 2) if leaf.path == "agent/weights"]
        places = {"state.h5": leaves[0].offset, "leaves.json": -7}
        flip(path, places.get(what, next(iter(files.index(RUN, 2).leaves["replay/rewards"].pieces)).offset))
    elif how == "gone":
        path.unlink()
    else:
        path.write_bytes(b"")
    store = simckpt.Store(files.path)
    assert_restores(store.files, 2)
    assert kept_aside(files) == before
    assert [event["event"] for event in files.events(RUN)][-1] == "fetched"


def test_a_damaged_commit_record_is_fetched_too(files):
    before = kept_aside(files)
    flip(files.path / f"{CHECKPOINT}/commit.json")
    assert_restores(simckpt.Store(files.path).files, 2)
    assert kept_aside(files) == before


@pytest.mark.parametrize("what", ["state.h5", "segment"])
def test_damage_on_both_sides_is_told_and_changes_nothing(files, tmp_path, what):
    name = a_segment(files) if what == "segment" else f"{CHECKPOINT}/{what}"
    for side in (files.path, tmp_path / "archive"):
        (side / name).write_bytes(b"not what it was")
    before = kept_aside(files)
    with pytest.raises(ArchiveDamagedError):
        simckpt.Store(files.path).files.read(RUN, 2)
    assert kept_aside(files) == before
    assert list((files.path / "tmp").iterdir()) == []


def test_damage_where_there_is_no_copy_is_told_as_before(tmp_path):
    files, _ = filled(tmp_path / "store", 1)
    archive(files, tmp_path / "archive")  # known, but nothing was moved yet
    (files.path / f"runs/{RUN}/checkpoints/00000001/state.h5").write_bytes(b"")
    with pytest.raises(DamagedError) as caught:
        simckpt.Store(files.path).files.read(RUN, 1)
    assert not isinstance(caught.value, ArchiveDamagedError)


@pytest.mark.parametrize("name", ["state.h5", "commit.json", "segment", "manifest"])
@pytest.mark.parametrize("how", ["flipped", "gone"])
def test_a_damaged_copy_with_a_good_file_here_is_written_again(files, tmp_path, name, how):
    place = {
        "segment": a_segment(files),
        "manifest": f"runs/{RUN}/archived/00000002.json",
    }.get(name, f"{CHECKPOINT}/{name}")
    there = tmp_path / "archive" / place
    good = there.read_bytes()
    if how == "flipped":
        flip(there)
    else:
        there.unlink()
    verified = archive(files, tmp_path / "archive", 3).verify()
    assert verified.damaged == []
    assert len(verified.repaired) == 1
    assert there.read_bytes() == good
    assert archive(files, tmp_path / "archive", 3).verify().repaired == []


def test_a_copy_that_is_gone_is_written_again_by_the_next_pass(files, tmp_path):
    there = tmp_path / "archive" / CHECKPOINT / "state.h5"
    good = there.read_bytes()
    there.unlink()
    moved = archive(files, tmp_path / "archive", 3).move()
    assert len(moved.archived) == 1
    assert there.read_bytes() == good


def test_a_damaged_copy_without_a_file_here_is_told(files, tmp_path):
    archive(files, tmp_path / "archive", 1).move()
    flip(tmp_path / "archive" / CHECKPOINT / "state.h5")
    verified = archive(files, tmp_path / "archive", 1).verify()
    assert verified.damaged == [f"{CHECKPOINT}/state.h5 in the archive"]
    with pytest.raises(ArchiveDamagedError, match=r"state\.h5"):
        simckpt.Store(files.path).files.read(RUN, 2)


def test_an_evicted_checkpoint_whose_copy_is_gone_is_told(files, tmp_path):
    archive(files, tmp_path / "archive", 1).move()
    (tmp_path / "archive" / CHECKPOINT / "state.h5").unlink()
    (problem,) = archive(files, tmp_path / "archive", 1).move().problems
    assert "neither here nor whole" in problem
    with pytest.raises(ArchiveDamagedError):
        simckpt.Store(files.path).files.read(RUN, 2)


def test_verify_also_puts_right_what_is_damaged_here(files, tmp_path):
    before = kept_aside(files)
    flip(files.path / f"{CHECKPOINT}/state.h5")
    verified = archive(files, tmp_path / "archive", 3).verify()
    assert verified.damaged == []
    assert kept_aside(files) == before


def test_a_damaged_note_of_an_archived_checkpoint_is_written_anew(files, tmp_path):
    noted = files.path / f"runs/{RUN}/archived/00000002.json"
    good = noted.read_bytes()
    flip(noted)
    archive(files, tmp_path / "archive", 3).move()
    assert noted.read_bytes() == good


def test_a_damaged_note_of_an_evicted_checkpoint_does_not_lose_it(files, tmp_path):
    archive(files, tmp_path / "archive", 1).move()
    noted = files.path / f"runs/{RUN}/archived/00000002.json"
    good = noted.read_bytes()
    flip(noted)
    assert_restores(simckpt.Store(files.path).files, 2)
    (files.path / CHECKPOINT / "state.h5").unlink()
    moved = archive(files, tmp_path / "archive", 1).move()
    assert (moved.evicted, moved.problems) == ([], [])
    assert noted.read_bytes() == good
    assert_restores(simckpt.Store(files.path).files, 2)


def test_a_repair_takes_the_copy_and_puts_nothing_into_quarantine(files):
    before = kept_aside(files)
    flip(files.path / f"{CHECKPOINT}/state.h5")
    rows = next(iter(files.index(RUN, 3).leaves["replay/rewards"].pieces))
    flip(files.path / "segments" / f"{rows.segment}.h5", rows.offset)
    store = simckpt.Store(files.path)
    repaired = store.repair()
    assert kept_aside(files) == before
    assert {action.text for action in repaired.actions} == {"comes back from the archive"}
    assert not (files.path / "quarantine").exists()
    assert not store.check().damage


def test_a_check_does_not_take_an_evicted_checkpoint_for_damaged(files, tmp_path):
    archive(files, tmp_path / "archive", 1).move()
    report = simckpt.Store(files.path).check()
    assert files.evicted(RUN) == {1, 2}
    assert not report.damage


def test_what_a_repair_puts_into_quarantine_stays_in_the_archive(files, tmp_path):
    (files.path / f"{CHECKPOINT}/state.h5").write_bytes(b"")
    flip(tmp_path / "archive" / CHECKPOINT / "state.h5")  # no good copy there, and perhaps somebody can make use of it
    there = {name: data for name, data in snapshot(tmp_path / "archive").items() if "00000002" in name}
    simckpt.Store(files.path).repair()
    assert b"tombstone" in (files.path / f"{CHECKPOINT}/commit.json").read_bytes()
    archive(files, tmp_path / "archive", 3).move()
    assert {name: data for name, data in snapshot(tmp_path / "archive").items() if "00000002" in name} == there


@pytest.mark.parametrize("how", ["away", "emptied", "never named"])
@pytest.mark.parametrize("what", ["state.h5", "commit.json", "segment"])
def test_a_repair_leaves_alone_what_an_archive_out_of_reach_may_have(files, tmp_path, monkeypatch, how, what):
    originals = kept_aside(files)
    (files.path / (a_segment(files) if what == "segment" else f"{CHECKPOINT}/{what}")).write_bytes(b"")
    damaged, away = kept_aside(files), tmp_path / "away"
    if how == "never named":
        monkeypatch.setattr(naming, "_named", set())
        monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config of another"))
    else:
        (tmp_path / "archive").rename(away)
        if how == "emptied":
            (tmp_path / "archive").mkdir()
    store = simckpt.Store(files.path)
    for dry_run in (True, False):
        done = repair(files.path, scope=PLAIN, dry_run=dry_run)
        assert not done
        assert {action.text for action in done.actions} == {"is left alone"}
        assert all("the archive cannot be reached" in action.problem for action in done.actions)
        assert kept_aside(files) == damaged
    shutil.rmtree(tmp_path / "archive") if how == "emptied" else None
    away.rename(tmp_path / "archive") if how != "never named" else store.archive(tmp_path / "archive")
    assert repair(files.path, scope=PLAIN)
    assert kept_aside(files) == originals


def test_a_dry_run_of_a_repair_says_one_thing_of_each(files):
    (files.path / f"{CHECKPOINT}/state.h5").write_bytes(b"")
    (files.path / a_segment(files)).write_bytes(b"")
    planned = simckpt.Store(files.path).repair(dry_run=True).actions
    assert {action.text for action in planned} == {"comes back from the archive"}
    assert len({action.path for action in planned}) == len(planned) == 2  # a later one uses the rows as well


def test_a_check_says_how_many_it_did_not_look_at(files, tmp_path):
    archive(files, tmp_path / "archive", 1).move()
    (tmp_path / "archive").rename(tmp_path / "away")
    for quick in (False, True):
        report = simckpt.Store(files.path).check(quick=quick)
        assert not report.damage
        assert (report.counts.checkpoints, report.counts.archived) == (1, 2)
    told = CliRunner().invoke(app, ["check", str(files.path)]).stdout
    assert "2 checkpoints in the archive alone, not looked at" in told


@pytest.mark.parametrize("what", ["damaged", "evicted"])
def test_a_run_waits_for_an_archive_out_of_reach_that_has_its_newest_checkpoint_unless_told_otherwise(tmp_path, what):
    store = simckpt.Store(tmp_path / "store")
    training.train(store, 30)
    store.archive(tmp_path / "archive").move()
    if what == "damaged":
        (store.files.path / "runs/a/checkpoints/00000003/state.h5").write_bytes(b"")
    else:
        store.files.evict("a", 3)
    (tmp_path / "archive").rename(tmp_path / "away")
    for damaged in ("fall back", "raise"):
        with pytest.raises(ArchiveUnavailableError, match=r"cannot be brought back.*is it mounted"):
            training.train(store, 40, damaged=damaged)
    assert [each.step for each in store.run("a").checkpoints()] == [10, 20, 30]
    with pytest.warns(DamageWarning, match="cannot be brought back.*is it mounted"):
        training.train(store, 40, damaged="fall back anyway")
    assert [each.seq for each in store.run("a").checkpoints()] == [1, 2, 4, 5]
    # and what was passed over comes back as it was
    (tmp_path / "away").rename(tmp_path / "archive")
    store.archive().fetch(store.run("a").checkpoints(abandoned=True)[2])
    store.files.verify("a", 3)
