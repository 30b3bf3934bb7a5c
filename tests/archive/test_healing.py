"""Damaged places are told and can be healed; a pass, a push or a pull never makes damage worse; lost identities."""

import contextlib
import dataclasses
import json
import shutil

import pytest
import training
from archive_helpers import RUN, a_segment, add, archive, assert_restores, filled, kept_aside
from storage_helpers import snapshot
from typer.testing import CliRunner

import simckpt
from simckpt.archive import Archive
from simckpt.archive.transfer import pull, push
from simckpt.cli import app
from simckpt.errors import (
    ArchiveDamagedError,
    ArchiveNotNamedError,
    ArchiveUnavailableError,
    ConflictError,
    DamagedError,
)
from simckpt.maintenance.repair import repair
from simckpt.storage import StoreFiles, TombstoneRecord, archived

SECOND = f"runs/{RUN}/checkpoints/00000002"
OBJECTS = ["state.h5", "leaves.json", "commit.json", "manifest", "segment", "run.json", "mark", "metrics"]
HOWS = ["flipped", "gone", "cut"]


def place_of(files: StoreFiles, name: str) -> str:
    """The name of an object, as seen from its place."""
    if name in ("mark", "metrics"):
        kind = "tag-good" if name == "mark" else "metrics-1"
        return f"runs/{RUN}/marks/{files.commit_record(RUN, 2).id}/{kind}"
    others = {"segment": a_segment(files), "manifest": f"runs/{RUN}/archived/00000002.json"}
    return {**others, "run.json": f"runs/{RUN}/run.json"}.get(name, f"{SECOND}/{name}")


def harm(path, how: str) -> None:
    data = path.read_bytes()
    path.unlink()
    if how == "flipped":
        path.write_bytes(data[: len(data) // 2] + bytes([data[len(data) // 2] ^ 4]) + data[len(data) // 2 + 1 :])
    elif how == "cut":
        path.write_bytes(data[: len(data) // 2])


def content(place) -> dict[str, bytes]:
    """All objects but the logs, which grow."""
    return {name: data for name, data in snapshot(place).items() if not name.endswith("events.jsonl")}


@pytest.fixture
def files(tmp_path):
    files, _ = filled(tmp_path / "store", 3)
    files.tag(RUN, 2, "good")
    files.add_metrics(RUN, 2, {"eval/return": 1.0})
    return files


@pytest.fixture
def place(files, tmp_path):
    push(files, RUN, tmp_path / "place")
    return tmp_path / "place"


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("name", OBJECTS)
def test_a_damaged_place_gives_all_else_and_a_push_from_a_good_store_heals_it(files, place, tmp_path, name, how):
    there, before = simckpt.Store(tmp_path / "there"), snapshot(place)
    harm(place / place_of(files, name), how)
    # nothing refers to a mark, so that one that is gone is as if it had never been
    is_told = (name, how) not in (("mark", "gone"), ("metrics", "gone"))
    with pytest.raises(ArchiveDamagedError, match="push --verify") if is_told else contextlib.nullcontext():
        there.pull(place)
    # what needs the damaged object is missing, the rest is whole
    lost = {"segment": {2, 3}, "run.json": {1, 2, 3}}.get(name, {2} if name in OBJECTS[:4] else set())
    for seq in {1, 2, 3} - lost:
        assert_restores(there.files, seq)
    assert {int(path.name) for path in there.path.glob("runs/*/checkpoints/*")} == {1, 2, 3} - lost
    (done,) = push(files, RUN, place, verify=how == "flipped" or name == "manifest")
    is_new = (name, how) == ("commit.json", "gone")
    assert (done.commits, done.repaired) == (int(is_new), int(name in OBJECTS[:5] and not is_new))
    assert snapshot(place) == before
    there.pull(place)
    assert kept_aside(there.files) == kept_aside(files)
    assert there.files.marks(RUN) == files.marks(RUN)


def test_a_push_replaces_nothing_that_is_good_or_was_pruned_on_one_side(files, place, tmp_path):
    there = simckpt.Store(tmp_path / "there").made()
    pull(place, there)
    for side, seq in ((files, 1), (there, 2)):
        with side.claim(RUN):
            side.prune(RUN, seq, "test")
    before = snapshot(place)
    push(files, RUN, place, verify=True)
    assert snapshot(place) == before, "a commit there stays one although it was pruned here"
    # a place that has the tombstone of the second alone
    push(there, RUN, tmp_path / "other")
    before = snapshot(tmp_path / "other")
    for verify in (False, True):
        push(files, RUN, tmp_path / "other", verify=verify)
    assert snapshot(tmp_path / "other") == before
    harm(tmp_path / "other" / f"{SECOND}/commit.json", "flipped")
    push(there, RUN, tmp_path / "other", verify=True)
    assert snapshot(tmp_path / "other") == before
    # the commit of a checkpoint is not made a tombstone by whom has pruned it, although it is damaged
    harm(place / f"{SECOND}/commit.json", "flipped")
    before = snapshot(place)
    push(there, RUN, place, verify=True)
    assert snapshot(place) == before


def test_a_push_that_verifies_brings_back_only_what_it_needs_of_what_is_evicted(files, place, tmp_path):
    archive(files, tmp_path / "archive", 1).move()
    before = content(place)
    push(files, RUN, place, verify=True)
    assert (files.evicted(RUN), content(place)) == ({1, 2}, before)
    harm(place / f"{SECOND}/state.h5", "flipped")
    push(files, RUN, place, verify=True)
    assert (files.evicted(RUN), content(place)) == ({1}, before)


def test_the_commands_heal_and_tell(files, place, tmp_path):
    harm(place / f"{SECOND}/state.h5", "flipped")
    there, run = str(tmp_path / "there"), CliRunner()
    told = run.invoke(app, ["pull", str(place), there])
    assert told.exit_code == 2
    assert "push --verify" in told.stderr
    assert "1 that were damaged put right" not in run.invoke(app, ["push", str(files.path), RUN, str(place)]).stdout
    done = run.invoke(app, ["push", str(files.path), RUN, str(place), "--verify"])
    assert (done.exit_code, "1 that were damaged put right" in done.stdout) == (0, True)
    assert run.invoke(app, ["pull", str(place), there]).stdout.startswith(f"{RUN}: 1 commit")
    assert_restores(StoreFiles.open(there), 2)


def test_another_checkpoint_of_the_same_number_is_no_damage_to_heal(files, place, tmp_path):
    other = filled(tmp_path / "unused", 2)[0]
    record = json.loads((place / f"{SECOND}/commit.json").read_text())
    theirs = json.loads((other.path / f"{SECOND}/commit.json").read_text())
    assert record["id"] != theirs["id"]
    shutil.copy(other.path / f"{SECOND}/commit.json", place / f"{SECOND}/commit.json")
    (place / f"{SECOND}/state.h5").unlink()
    before = snapshot(place)
    with pytest.raises(ConflictError, match="both sides"):
        push(files, RUN, place)
    assert snapshot(place) == before


@pytest.mark.parametrize("verify", [False, True])
@pytest.mark.parametrize("name", ["state.h5", "leaves.json"])
def test_what_is_damaged_here_does_not_reach_a_good_place_and_new_ones_do(tmp_path, name, verify):
    files, log = filled(tmp_path / "store", 2)
    push(files, RUN, tmp_path / "place")
    before = snapshot(tmp_path / "place")
    with files.claim(RUN):
        add(files, log, 3)
    harm(files.path / f"{SECOND}/{name}", "cut")
    if verify:
        with pytest.raises(DamagedError):
            push(files, RUN, tmp_path / "place", verify=True)
    else:
        assert push(files, RUN, tmp_path / "place")[0].commits == 1
    after = snapshot(tmp_path / "place")
    assert {name: data for name, data in after.items() if name in before} == before
    there = simckpt.Store(tmp_path / "there").made()
    pull(tmp_path / "place", there)
    for seq in (1, 2, 3):
        assert_restores(there, seq)


@pytest.mark.parametrize("how", ["damaged", "folder gone"])
def test_a_repaired_store_gives_an_archive_without_gaps(files, tmp_path, how):
    if how == "damaged":
        (files.path / SECOND / "state.h5").write_bytes(b"")
    else:
        shutil.rmtree(files.path / SECOND)
    assert repair(files.path)
    assert archive(files, tmp_path / "archive", 3).move().problems == []
    new = simckpt.Store(tmp_path / "new")
    new.pull(tmp_path / "archive")
    assert new.check()
    assert isinstance(new.files.commit_record(RUN, 2), TombstoneRecord)
    for seq in (1, 3):
        assert_restores(new.files, seq)


@pytest.mark.parametrize("how", ["damaged", "folder gone"])
def test_a_pass_removes_no_copy_of_what_nobody_has_pruned(files, tmp_path, how):
    archive(files, tmp_path / "archive", 3).move()
    before = content(tmp_path / "archive")
    # by hand, as if the archive had been out of reach and its record lost
    files.quarantine(RUN, 2, "damaged, in quarantine: test") if how == "damaged" else None
    if how == "folder gone":
        shutil.rmtree(files.path / SECOND)
        files.quarantine(RUN, 2, "test")
    shutil.rmtree(files.path / "quarantine", ignore_errors=True)
    moved = archive(files, tmp_path / "archive", 3).move()
    assert (moved.removed, moved.problems) == ([], [])
    archive(files, tmp_path / "archive", 3).verify()
    assert content(tmp_path / "archive") == before


@pytest.mark.parametrize("note", ["there", "gone"])
@pytest.mark.parametrize("how", ["gone", "cut"])
def test_a_manifest_that_is_lost_costs_no_segment(files, tmp_path, note, how):
    mover = archive(files, tmp_path / "archive", 1)
    mover.move()
    before = content(tmp_path / "archive")
    notes = files.path / f"runs/{RUN}/archived"
    harm(tmp_path / "archive" / f"runs/{RUN}/archived/00000001.json", how)
    if note == "gone":
        (notes / "00000001.json").unlink()
    moved = mover.move()
    after = content(tmp_path / "archive")
    if note == "there":
        assert (moved.problems, after) == ([], before)
        assert_restores(simckpt.Store(files.path).files, 1)
    else:
        assert moved.problems
        assert {name: after.get(name) for name in before if "archived" not in name} == {
            name: data for name, data in before.items() if "archived" not in name
        }


def test_notes_that_are_lost_are_written_again_by_the_next_pass(files, tmp_path):
    mover = archive(files, tmp_path / "archive", 1)
    mover.move()
    notes = files.path / f"runs/{RUN}/archived"
    before = snapshot(notes)
    shutil.rmtree(notes)
    moved = mover.move()
    assert (moved.problems, moved.removed) == ([], [])
    assert snapshot(notes) == before
    assert files.evicted(RUN) == {1, 2}


@pytest.mark.parametrize("kind", ["another kind", "another checkpoint"])
def test_a_note_that_is_not_of_this_checkpoint_does_not_keep_it_away(files, tmp_path, kind):
    archive(files, tmp_path / "archive", 1).move()
    note = files.path / f"runs/{RUN}/archived/00000002.json"
    if kind == "another kind":
        shutil.copy(files.path / "store.json", note)
    else:
        other = filled(tmp_path / "other", 2)[0]
        archive(other, tmp_path / "their archive", 1).move()
        shutil.copy(other.path / f"runs/{RUN}/archived/00000002.json", note)
    assert_restores(simckpt.Store(files.path).files, 2)


@pytest.mark.parametrize("how", ["flipped", "cut"])
@pytest.mark.parametrize("name", ["run.json", "mark", "metrics"])
@pytest.mark.parametrize("act", ["move", "verify"])
def test_what_is_damaged_here_takes_no_good_record_from_the_archive(files, tmp_path, name, how, act):
    mover = archive(files, tmp_path / "archive", 3)
    mover.move()
    before = content(tmp_path / "archive")
    harm(files.path / place_of(files, name), how)
    mover.move() if act == "move" else mover.verify()
    assert content(tmp_path / "archive") == before


def test_marks_go_from_the_archive_when_they_are_taken_away_and_not_when_their_folder_is_lost(files, tmp_path):
    mover = archive(files, tmp_path / "archive", 3)
    mover.move()
    there = tmp_path / "archive" / place_of(files, "mark")
    (files.path / "runs" / RUN / "marks").rename(tmp_path / "away")
    mover.move()
    assert there.exists()
    (tmp_path / "away").rename(files.path / "runs" / RUN / "marks")
    files.untag(RUN, 2, "good")
    mover.move()
    assert not there.exists()


@pytest.mark.parametrize("how", HOWS)
def test_a_repair_of_the_store_record_keeps_the_id_that_the_archive_asks_for(files, tmp_path, how):
    archive(files, tmp_path / "archive", 1).move()
    identity = json.loads((files.path / "store.json").read_text())["id"]
    harm(files.path / "store.json", how)
    done = CliRunner().invoke(app, ["check", str(files.path), "--repair"])
    assert done.exit_code == 0, done.output
    assert json.loads((files.path / "store.json").read_text())["id"] == identity
    for seq in (1, 2, 3):
        assert_restores(simckpt.Store(files.path).files, seq)
    assert archive(StoreFiles.open(files.path), tmp_path / "archive", 1).move().problems == []


@pytest.mark.parametrize("archive_record", ["of an earlier version", "gone"])
def test_a_store_whose_id_is_lost_takes_it_back_when_its_archive_is_named(files, tmp_path, archive_record):
    archive(files, tmp_path / "archive", 1).move()
    identity = json.loads((files.path / "store.json").read_text())["id"]
    path = files.path / "archive/archive.json"
    if archive_record == "gone":
        path.unlink()
    else:
        path.write_bytes(dataclasses.replace(files.archive(), store=None).to_bytes())
    harm(files.path / "store.json", "flipped")
    done = repair(files.path)
    assert not done
    assert any("name it once" in action.problem for action in done.actions)
    store = simckpt.Store(files.path)
    assert store.id != identity
    with pytest.raises((ArchiveNotNamedError, DamagedError)):
        store.files.read(RUN, 1)
    assert store.archive(tmp_path / "archive").fetch(store.run(RUN).at(step=10))
    assert json.loads((files.path / "store.json").read_text())["id"] == identity
    for seq in (1, 2, 3):
        assert_restores(simckpt.Store(files.path).files, seq)
    assert archived.store_of(files.path) == identity


def test_a_run_that_was_copied_from_another_store_does_not_bring_that_store_s_id(files, tmp_path):
    archive(files, tmp_path / "archive", 1).move()
    other = simckpt.Store(tmp_path / "other").made()
    shutil.copytree(files.path / "runs", other.path / "runs")
    before = (other.path / "store.json").read_bytes()
    with pytest.raises(ConflictError, match="archive of store"):
        archive(other, tmp_path / "archive", 1).move()
    assert (other.path / "store.json").read_bytes() == before


def test_a_disk_that_is_not_mounted_becomes_no_archive_although_the_record_of_it_is_lost(files, tmp_path):
    archive(files, tmp_path / "archive", 1).move()
    (files.path / "archive/archive.json").write_bytes(b"")
    (tmp_path / "archive").rename(tmp_path / "away")
    for make in (False, True):
        (tmp_path / "archive").mkdir() if make else None
        with pytest.raises(ArchiveUnavailableError):
            archive(files, tmp_path / "archive", 1).move()
        assert not (tmp_path / "archive/store.json").exists()
    (tmp_path / "archive").rmdir()
    (tmp_path / "away").rename(tmp_path / "archive")
    assert archive(files, tmp_path / "archive", 1).move().problems == []
    assert_restores(simckpt.Store(files.path).files, 1)


def test_another_archive_may_be_begun_once_what_was_in_the_old_one_alone_is_pruned(files, tmp_path):
    archive(files, tmp_path / "archive", 1).move()
    shutil.rmtree(tmp_path / "archive")
    new = Archive(files, tmp_path / "new", new=True)
    with pytest.raises(ConflictError, match="2 checkpoints"):
        new.move()
    with files.claim(RUN):
        for seq in (1, 2):
            files.prune(RUN, seq, "its state is lost")
    assert len(Archive(files, tmp_path / "new", new=True).move().archived) == 1


@pytest.mark.parametrize("how", HOWS)
def test_a_place_whose_own_record_is_lost_gives_all_and_gets_it_again(files, place, tmp_path, how):
    identity = json.loads((place / "store.json").read_text())["id"]
    harm(place / "store.json", how)
    there = simckpt.Store(tmp_path / "there")
    with pytest.raises(ArchiveDamagedError, match=r"store\.json"):
        there.pull(place)
    assert kept_aside(there.files) == kept_aside(files)
    push(files, RUN, place)
    record = json.loads((place / "store.json").read_text())
    assert (record["id"], record["archive_of"]) == (identity, None)
    assert [each.commits for each in there.pull(place)] == [0]


@pytest.mark.parametrize("pushed", [False, True])
@pytest.mark.parametrize("how", HOWS)
def test_an_archive_whose_own_record_is_lost_gets_it_again_from_its_store_alone(files, tmp_path, how, pushed):
    archive(files, tmp_path / "archive", 1).move()
    good = json.loads((tmp_path / "archive/store.json").read_text())
    harm(tmp_path / "archive/store.json", how)
    other = filled(tmp_path / "other", 1)[0]
    with pytest.raises((ArchiveDamagedError, ConflictError)):
        archive(other, tmp_path / "archive", 1).move()
    if pushed:
        # by somebody who cannot know whose it was; his checkpoints are others
        with pytest.raises(ConflictError, match="both sides"):
            push(other, RUN, tmp_path / "archive")
    for seq in (1, 2, 3):
        assert_restores(simckpt.Store(files.path).files, seq)
    record = json.loads((tmp_path / "archive/store.json").read_text())
    assert (record["id"], record["archive_of"]) == (good["id"], files.id)


def test_a_store_that_has_lost_its_record_is_not_made_a_place(files, tmp_path):
    archive(files, tmp_path / "archive", 3).move()
    (files.path / "store.json").unlink()
    other = filled(tmp_path / "other", 1)[0]
    before = snapshot(files.path)
    with pytest.raises(ConflictError, match="not empty"):
        push(other, RUN, files.path)
    assert snapshot(files.path) == before


@pytest.mark.parametrize("how", ["state of the origin", "record of its run", "quarantined", "never pushed"])
def test_a_branch_is_pulled_although_what_it_was_branched_from_is_lost(tmp_path, how):
    here = simckpt.Store(tmp_path / "here")
    training.train(here, 20)
    here.run("a").at(step=10).branch("b")
    training.train(here, 30, run="b")
    if how == "quarantined":
        (here.path / "runs/a/checkpoints/00000001/state.h5").write_bytes(b"")
        here.files.quarantine("a", 1, "test")
    if how == "never pushed":
        shutil.rmtree(here.path / "runs/a")
    here.push("b", tmp_path / "place")
    if how == "state of the origin":
        (tmp_path / "place/runs/a/checkpoints/00000001/state.h5").unlink()
    elif how == "record of its run":
        (tmp_path / "place/runs/a/run.json").unlink()
    there = simckpt.Store(tmp_path / "there")
    is_told = how in ("state of the origin", "record of its run")
    with pytest.raises(ArchiveDamagedError) if is_told else contextlib.nullcontext():
        there.pull(tmp_path / "place")
    expected = training.bits(training.train(here, 40, run="b"))
    assert training.bits(training.train(there, 40, run="b")) == expected


def test_a_start_that_is_gone_is_told_and_healed(tmp_path):
    here = simckpt.Store(tmp_path / "here")
    training.train(here, 20)
    here.push("a", tmp_path / "place")
    (start,) = (tmp_path / "place/runs/a/starts").iterdir()
    start.unlink()
    there = simckpt.Store(tmp_path / "there")
    with pytest.raises(ArchiveDamagedError, match=start.stem):
        there.pull(tmp_path / "place")
    assert [each.step for each in there.run("a").checkpoints()] == [10, 20]
    here.push("a", tmp_path / "place")
    there.pull(tmp_path / "place")
    assert there.check()
