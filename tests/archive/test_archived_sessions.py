"""Sessions in the archive: what moves and when, what comes back, what is removed there, what damage does."""

import json
import os
import shutil
import time

import pytest
from archive_helpers import sha256
from session_archives import ROWS, add_session, archive, assert_reads, filled, kept, of, states

import simckpt
from simckpt.errors import (
    ArchiveUnavailableError,
    ConfigurationError,
    ConflictError,
    DamagedError,
    SessionNotFoundError,
)
from simckpt.policies import KeepBest, KeepEvery, KeepLast
from simckpt.storage import StoreFiles, sealed
from simckpt.storage.session_records import OriginRecord
from simckpt.storage.session_writing import SessionWriter

FILES = [
    "session.json",
    "closed.json",
    "parts/00000001-00000003/part.json",
    "parts/00000001-00000003/leaves.json",
    "parts/00000001-00000003/state.h5",
    "snapshots/00000002/snapshot.json",
    "snapshots/00000002/state.h5",
    "models/30303030303030303030303030303030/state.h5",
]


def flip(path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)


def test_old_sessions_leave_the_disk_and_come_back_bit_for_bit(tmp_path, url):
    files = filled(tmp_path / "store", "a", "b")
    before = kept(files.path)
    moved = archive(files, url, 1).move()
    assert (moved.sessions, moved.evicted_sessions, moved.problems) == (["a", "b"], ["a"], [])
    assert states(files.path, "a") == []
    assert len(states(files.path, "b")) == 4
    store = simckpt.Store(files.path)
    assert [each.tier for each in store.sessions()] == ["archive", "local"]
    assert_reads(files.path, "a")
    assert kept(files.path) == before
    assert store.session("a").tier == "local"


def test_listing_and_checking_bring_nothing_back(tmp_path):
    files = filled(tmp_path / "store", "a", "b")
    nbytes = sum(len(data) for name, data in of(kept(files.path), "a").items() if name.endswith(("h5", "leaves.json")))
    archive(files, tmp_path / "archive", 1).move()
    session = simckpt.Store(files.path).session("a")
    assert (list(session.rows), session.duration, len(session.snapshots)) == (ROWS, 12.0, 2)
    assert session.nbytes == nbytes
    assert "12 rows" in repr(session)
    report = simckpt.Store(files.path).check()
    assert report
    assert report.counts.archived_sessions == 1
    assert states(files.path, "a") == []


def test_a_copy_of_an_archive_is_a_store(tmp_path):
    files = filled(tmp_path / "store", "a")
    archive(files, tmp_path / "archive").move()
    assert_reads(tmp_path / "archive", "a")
    assert simckpt.Store(tmp_path / "archive").check()


def test_an_archive_holds_what_its_records_say(tmp_path):
    files = filled(tmp_path / "store", "a")
    archive(files, tmp_path / "archive").move()
    assert kept(tmp_path / "archive") == kept(files.path)
    noted = json.loads((files.path / "sessions/a/archived.json").read_text())
    before = of(kept(files.path), "a")
    assert {f"sessions/a/{name}" for name in noted["files"]} == set(before)
    for name, entry in noted["files"].items():
        data = before[f"sessions/a/{name}"]
        assert entry == {"size": len(data), "digest": sha256(data)}
    there = (tmp_path / "archive/sessions/a/archived.json").read_bytes()
    assert there == (files.path / "sessions/a/archived.json").read_bytes()


def test_the_end_is_the_last_object_of_a_session_and_comes_after_reading_back(tmp_path, fake):
    files = filled(tmp_path / "store", "a")
    archive(files, "s3://bucket/place").move()
    order = [request for request in fake.requests if request[1].startswith("place/sessions")]
    puts = [name for method, name in order if method == "PUT"]
    assert puts[0] == "place/sessions/a/archived.json"
    assert puts[-2:] == ["place/sessions/a/session.json", "place/sessions/a/closed.json"]
    end = order.index(("PUT", "place/sessions/a/closed.json"))
    for name in puts[1:-1]:
        assert order.index(("PUT", name)) < order.index(("GET", name)) < end


def test_what_is_recorded_or_was_not_closed_stays_here_alone(tmp_path):
    files = filled(tmp_path / "store")
    with add_session(files, "a", 1) as writer:
        assert archive(files, tmp_path / "archive", 1).move().sessions == []
        writer.release()
        assert archive(files, tmp_path / "archive", 1).move().sessions == []
    assert not (tmp_path / "archive/sessions").exists()


def test_what_came_back_stays_for_a_while(tmp_path):
    files = filled(tmp_path / "store", "a", "b")
    mover = archive(files, tmp_path / "archive", 1)
    mover.move()
    assert len(mover.fetch_session("a")) == 4
    assert mover.fetch_session("a") == []
    assert mover.move().evicted_sessions == []
    then = time.time() - 2 * 86_400
    for path in states(files.path, "a"):
        os.utime(path, (then, then))
    os.utime(files.path / "sessions/a/archived.json", (then - 60, then - 60))
    assert mover.move().evicted_sessions == ["a"]


def flip_leaf(path) -> None:
    """Damages an array, not what viewers alone need."""
    leaves = json.loads((path.parent / "leaves.json").read_text())["leaves"]
    place = max(leaves, key=lambda leaf: leaf["size"])["offset"]
    data = bytearray(path.read_bytes())
    data[place] ^= 4
    path.write_bytes(data)


@pytest.mark.parametrize("how", ["flip", "gone"])
@pytest.mark.parametrize("file", FILES)
def test_damage_here_comes_back_when_it_is_read(tmp_path, file, how):
    files = filled(tmp_path / "store", "a")
    archive(files, tmp_path / "archive").move()
    before, path = kept(files.path), files.path / "sessions/a" / file
    if how == "gone":
        path.unlink()
    elif file.endswith(".h5"):
        flip_leaf(path)
    else:
        flip(path)
    session = simckpt.Store(files.path).session("a")
    assert session.closed is not None
    session.read()
    for snapshot in session.snapshots:
        session.snapshot(snapshot)
    assert_reads(files.path, "a")
    assert kept(files.path) == before


def test_a_repair_heals_sessions_from_the_archive(tmp_path):
    files = filled(tmp_path / "store", "a", "b")
    archive(files, tmp_path / "archive").move()
    before, store = kept(files.path), simckpt.Store(files.path)
    for file in FILES[2:]:
        flip(files.path / "sessions/b" / file)
    shutil.rmtree(files.path / "sessions/a/parts")
    assert {each.path.split("/")[1] for each in store.check().damage} == {"a", "b"}
    told = store.repair(dry_run=True)
    assert [(each.path, each.done, each.problem) for each in told.actions] == [
        ("sessions/a", False, ""),
        ("sessions/b", False, ""),
    ]
    assert told.remaining == ()
    done = store.repair()
    assert [(each.path, each.done) for each in done.actions] == [("sessions/a", True), ("sessions/b", True)]
    assert done.remaining == ()
    assert kept(files.path) == before
    assert store.check()


def test_a_repair_leaves_what_no_archive_has_and_says_so(tmp_path):
    files = filled(tmp_path / "store", "a")
    flip(files.path / "sessions/a" / FILES[4])
    before = kept(files.path)
    done = simckpt.Store(files.path).repair()
    assert done
    assert [each.path for each in done.remaining] == ["sessions/a/parts/00000001-00000003"]
    assert kept(files.path) == before


def test_a_session_whose_folder_is_gone_is_told_and_comes_back_whole(tmp_path):
    files = filled(tmp_path / "store", "a", "b")
    simckpt.Store(files.path).session("a").pin()
    archive(files, tmp_path / "archive").move()
    before = kept(files.path)
    shutil.rmtree(files.path / "sessions/a")
    (problem,) = archive(files, tmp_path / "archive").move().problems
    assert "session fetch" in problem
    assert len(of(kept(tmp_path / "archive"), "a")) == len(of(before, "a"))
    archive(files, tmp_path / "archive").fetch_session("a")
    assert kept(files.path) == before
    assert simckpt.Store(files.path).session("a").pinned
    moved = archive(files, tmp_path / "archive", 1).move()
    assert (moved.problems, moved.sessions) == ([], [])
    assert moved.evicted_sessions == [], "it stays for a day, like all that came back"


def test_what_is_removed_here_goes_there_its_end_first_and_its_manifest_last(tmp_path, fake):
    files = filled(tmp_path / "store", "a", "b")
    mover = archive(files, "s3://bucket/place", 1)
    mover.move()
    files.remove_session("a")
    fake.reset()
    assert mover.move().removed_sessions == ["a"]
    order = [name for method, name in fake.requests if method == "DELETE"]
    assert order[0] == "place/sessions/a/closed.json"
    assert order[-1] == "place/sessions/a/archived.json"
    assert not [name for name in fake.objects if "/a/" in name]
    assert files.removed_sessions() == []
    assert mover.move().removed_sessions == []
    with pytest.raises(SessionNotFoundError):
        mover.fetch_session("a")
    assert_reads(files.path, "b")


def test_another_session_may_have_the_name_of_a_removed_one_at_once(tmp_path):
    files = filled(tmp_path / "store", "a")
    mover = archive(files, tmp_path / "archive")
    mover.move()
    files.remove_session("a")
    with add_session(files, "a", 7) as writer:
        writer.close()
    moved = mover.move()
    assert (moved.removed_sessions, moved.sessions, moved.problems) == (["a"], ["a"], [])
    assert kept(tmp_path / "archive") == kept(files.path)
    noted = json.loads((tmp_path / "archive/sessions/a/archived.json").read_text())
    assert noted["session"] == f"{7:032x}"


def test_a_removal_that_was_killed_after_its_note_removes_nothing_there(tmp_path):
    from simckpt.storage.archived_sessions import note_removed

    files = filled(tmp_path / "store", "a")
    mover = archive(files, tmp_path / "archive")
    mover.move()
    before = kept(tmp_path / "archive")
    note_removed(files._disk, files._works, files.path, "a")
    assert mover.move().removed_sessions == []
    (files.path / "sessions/a/session.json").rename(tmp_path / "aside")
    assert mover.move().removed_sessions == [], "a folder without its record may be the one"
    (tmp_path / "aside").rename(files.path / "sessions/a/session.json")
    assert kept(tmp_path / "archive") == before
    assert_kept_there_when_it_is_lost_here(files, mover, tmp_path / "archive")


def assert_kept_there_when_it_is_lost_here(files, mover, place) -> None:
    """What is lost without a removal is told by each pass, and stays in the archive."""
    mover.move()
    before = of(kept(place), "a")
    shutil.rmtree(files.path / "sessions/a")
    for _ in range(2):
        moved = mover.move()
        assert moved.removed_sessions == []
        assert "session fetch" in moved.problems[0]
    assert of(kept(place), "a") == before != {}
    mover.fetch_session("a")
    assert_reads(files.path, "a")


def test_a_removed_session_can_be_fetched_until_the_next_pass(tmp_path):
    files = filled(tmp_path / "store", "a")
    mover = archive(files, tmp_path / "archive")
    mover.move()
    before = kept(files.path)
    files.remove_session("a")
    mover.fetch_session("a")
    assert kept(files.path) == before
    assert mover.move().removed_sessions == []
    assert kept(tmp_path / "archive") == before
    assert_kept_there_when_it_is_lost_here(files, mover, tmp_path / "archive")


def test_a_note_is_forgotten_by_the_pass_that_finds_its_session_here(tmp_path):
    """Whichever way it came here: the note of a damaged session as well, and one of a pinned session."""
    from simckpt.storage.archived_sessions import note_removed

    files = filled(tmp_path / "store", "a", "b")
    mover = archive(files, tmp_path / "archive")
    mover.move()
    note_removed(files._disk, files._works, files.path, "a")
    note = files.path / f"archive/removed/{1:032x}.json"
    flip(files.path / "sessions/a/session.json")
    flip(note)
    mover.move()
    assert not note.exists()
    assert_kept_there_when_it_is_lost_here(files, mover, tmp_path / "archive")


def two_ends(tmp_path) -> list[StoreFiles]:
    """Copies of a store in which one session was ended twice, once in each."""
    files = filled(tmp_path / "a")
    add_session(files, "x", 1).release()
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    for number, name in enumerate("ab"):
        with SessionWriter(tmp_path / name, "x", clock=lambda number=number: 1.8e9 + number) as writer:
            writer.close()
    return [StoreFiles.open(tmp_path / name, disk=files._disk) for name in "ab"]


@pytest.mark.parametrize("damage", [None, "archived.json", "closed.json"])
def test_removing_one_of_two_ends_leaves_the_other_one_in_the_archive(tmp_path, damage):
    one, other = two_ends(tmp_path)
    add_session(one, "y", 2).close()
    archive(one, tmp_path / "archive", 1).move()
    assert states(one.path, "x") == []
    before = of(kept(tmp_path / "archive"), "x")
    (problem,) = archive(other, tmp_path / "archive").move().problems[:1]
    assert "`simckpt session remove` it" in problem
    if damage == "archived.json":
        flip(tmp_path / "archive/sessions/x/archived.json")
    elif damage:
        flip(other.path / "sessions/x/closed.json")
    other.remove_session("x")
    moved = archive(other, tmp_path / "archive").move()
    assert moved.removed_sessions == []
    assert any("another end" in each for each in moved.problems)
    assert of(kept(tmp_path / "archive"), "x") == before
    assert_reads(one.path, "x")
    # the one that is there is removed by whoever removes that one
    one.remove_session("x")
    assert archive(one, tmp_path / "archive").move().removed_sessions == ["x"]
    assert of(kept(tmp_path / "archive"), "x") == {}


def test_what_nothing_says_whose_it_is_stays_in_the_archive(tmp_path):
    files = filled(tmp_path / "store", "a")
    mover = archive(files, tmp_path / "archive")
    mover.move()
    for file in ("archived.json", "session.json"):
        flip(tmp_path / "archive/sessions/a" / file)
    before = kept(tmp_path / "archive")
    files.remove_session("a")
    for _ in range(2):
        moved = mover.move()
        assert moved.removed_sessions == []
        assert any("says whose" in each for each in moved.problems)
    assert kept(tmp_path / "archive") == before


@pytest.mark.parametrize("file", ["session.json", "closed.json"])
def test_records_that_are_gone_here_are_told_and_come_back(tmp_path, file):
    files = filled(tmp_path / "store", "a", "b")
    archive(files, tmp_path / "archive").move()
    before, store = kept(files.path), simckpt.Store(files.path)
    (files.path / "sessions/a" / file).unlink()
    report = store.check()
    assert [each.path for each in report.damage if each.path.endswith(".json")] == [f"sessions/a/{file}"]
    assert not report.of("leftover")
    assert [each.text for each in store.repair(dry_run=True).actions] == ["comes back from the archive"]
    done = store.repair()
    assert [(each.path, each.done) for each in done.actions] == [("sessions/a", True)]
    assert kept(files.path) == before
    assert store.check()


def test_pins_are_mirrored(tmp_path):
    files = filled(tmp_path / "store", "a")
    mover, store = archive(files, tmp_path / "archive"), simckpt.Store(files.path)
    store.session("a").pin()
    mover.move()
    assert (tmp_path / "archive/sessions/a/pin").read_bytes() == (files.path / "sessions/a/pin").read_bytes()
    store.session("a").unpin()
    mover.move()
    assert not (tmp_path / "archive/sessions/a/pin").exists()


@pytest.mark.parametrize("file", [*FILES, "archived.json"])
def test_verify_puts_right_what_is_damaged_in_the_archive(tmp_path, file):
    files = filled(tmp_path / "store", "a")
    mover = archive(files, tmp_path / "archive")
    mover.move()
    before = kept(tmp_path / "archive")
    flip(tmp_path / "archive/sessions/a" / file)
    verified = mover.verify()
    assert verified.repaired == [f"sessions/a/{file} in the archive"]
    assert verified.damaged == []
    assert kept(tmp_path / "archive") == before
    assert verified.objects == len(before)


def test_verify_puts_right_what_is_damaged_here_and_tells_what_is_lost(tmp_path):
    files = filled(tmp_path / "store", "a", "b")
    mover = archive(files, tmp_path / "archive", 1)
    mover.move()
    before = kept(files.path)
    flip(files.path / "sessions/b" / FILES[2])
    flip(tmp_path / "archive/sessions/a" / FILES[4])
    verified = mover.verify()
    assert verified.repaired == [f"{FILES[2]} of session 'b' here"]
    assert verified.damaged == [f"sessions/a/{FILES[4]} in the archive"]
    assert kept(files.path) == before
    with pytest.raises(DamagedError, match="is not what was written there"):
        simckpt.Store(files.path).session("a").read()


def test_a_note_that_is_lost_is_written_again_from_the_archive(tmp_path):
    files = filled(tmp_path / "store", "a", "b")
    mover = archive(files, tmp_path / "archive", 1)
    mover.move()
    note = files.path / "sessions/a/archived.json"
    data = note.read_bytes()
    for damage in (note.unlink, lambda: flip(note)):
        damage()
        assert mover.move().problems == []
        assert note.read_bytes() == data
    assert_reads(files.path, "a")


def test_objects_that_are_gone_there_are_written_again(tmp_path):
    files = filled(tmp_path / "store", "a")
    mover = archive(files, tmp_path / "archive")
    mover.move()
    before = kept(tmp_path / "archive")
    for file in FILES:
        (tmp_path / "archive/sessions/a" / file).unlink()
    assert mover.move().problems == []
    assert kept(tmp_path / "archive") == before


def test_a_damaged_session_takes_no_good_ones_place(tmp_path):
    files = filled(tmp_path / "store", "a", "b")
    flip(files.path / "sessions/a" / FILES[4])
    moved = archive(files, tmp_path / "archive", 1).move()
    assert moved.sessions == ["b"]
    assert "damaged here" in moved.problems[0]
    assert of(kept(tmp_path / "archive"), "a") == {}
    assert len(states(files.path, "a")) == 4


def test_another_archive_takes_its_place_only_if_nothing_is_there_alone(tmp_path):
    files = filled(tmp_path / "store", "a", "b")
    archive(files, tmp_path / "archive", 1).move()
    with pytest.raises(ConflictError, match="session a"):
        archive(files, tmp_path / "other", new=True).move()
    archive(files, tmp_path / "archive").fetch_session("a")
    assert archive(files, tmp_path / "other", new=True).move().sessions == ["a", "b"]


def test_an_archive_out_of_reach_is_one_clear_error(tmp_path, fake):
    files = filled(tmp_path / "store", "a", "b")
    archive(files, "s3://bucket/place", 1).move()
    fake.fault = lambda number, name: "403"
    with pytest.raises(ArchiveUnavailableError, match="cannot be brought back"):
        simckpt.Store(files.path).session("a").read()
    assert states(files.path, "a") == []
    fake.reset()
    assert_reads(files.path, "a")


def test_readers_of_a_place_with_an_origin_must_know_sessions(tmp_path):
    files = StoreFiles.create(tmp_path / "store")
    with simckpt.Store(files.path).start("ant") as run:
        origin = OriginRecord("c" * 32, "ant", 1, 5)
        assert run.name == "ant"
    with add_session(files, "plain", 1) as writer:
        writer.close()
    archive(files, tmp_path / "archive").move()
    assert json.loads((tmp_path / "archive/store.json").read_text())["requires"] == []
    path = files.path / "sessions/plain/session.json"
    fields = sealed.unseal(path.read_bytes(), "session", path=path).content
    kept_fields = {key: value for key, value in fields.items() if key not in ("format", "version", "digest")}
    files.remove_session("plain")
    archive(files, tmp_path / "archive").move()
    with add_session(files, "driven", 2) as writer:
        writer.close()
    path = files.path / "sessions/driven/session.json"
    changed = kept_fields | {"id": f"{2:032x}", "name": "driven", "origin": vars(origin)}
    path.write_bytes(sealed.seal("session", changed))
    archive(files, tmp_path / "archive").move()
    assert json.loads((tmp_path / "archive/store.json").read_text())["requires"] == ["sessions"]


def test_policies_by_steps_or_metrics_are_refused(tmp_path):
    files = filled(tmp_path / "store", "a")
    for policy in (KeepBest(1, "loss"), KeepLast(1) | KeepEvery(steps=5)):
        with pytest.raises(ConfigurationError, match="neither steps"):
            simckpt.Store(files.path).archive(tmp_path / "archive", keep_sessions=policy)


def test_the_mover_sees_a_session_that_was_closed_pinned_or_removed(tmp_path):
    files = filled(tmp_path / "store", "a")
    with archive(files, tmp_path / "archive"), add_session(files, "b", 2) as writer:
        writer.close()
    assert of(kept(tmp_path / "archive"), "b") == of(kept(files.path), "b")
    before = files.session_stamps()
    assert files.session_stamps() == before
    files.pin_session("a")
    pinned = files.session_stamps()
    assert pinned != before
    with archive(files, tmp_path / "archive"):
        files.remove_session("b")
    assert files.session_stamps() != pinned
    assert of(kept(tmp_path / "archive"), "b") == {}
    assert (tmp_path / "archive/sessions/a/pin").exists()


def test_the_record_of_an_archive_that_is_written_again_requires_sessions(tmp_path):
    files = filled(tmp_path / "store", "a", "b")
    mover = archive(files, tmp_path / "archive", 1)
    mover.move()
    (tmp_path / "archive/store.json").unlink()
    assert archive(files, tmp_path / "archive").move().problems == []
    assert json.loads((tmp_path / "archive/store.json").read_text())["requires"] == ["sessions"]
    assert_reads(files.path, "a")


def test_a_damaged_note_of_a_removal_is_told_and_removes_nothing(tmp_path):
    files = filled(tmp_path / "store", "a", "b")
    mover = archive(files, tmp_path / "archive")
    mover.move()
    files.remove_session("a")
    note = files.path / f"archive/removed/{1:032x}.json"
    flip(note)
    report = simckpt.Store(files.path).check()
    assert [(each.kind, each.path) for each in report.damage] == [("archive", f"archive/removed/{note.name}")]
    moved = mover.move()
    assert moved.removed_sessions == []
    assert "session fetch" in moved.problems[0]
    mover.fetch_session("a")
    files.remove_session("a")
    assert mover.move().removed_sessions == ["a"], "the note was written again"
    assert simckpt.Store(files.path).check()


def test_a_damaged_record_of_what_is_archived_is_told_and_read_all_the_same(tmp_path):
    files = filled(tmp_path / "store", "a", "b")
    mover = archive(files, tmp_path / "archive", 1)
    mover.move()
    flip(files.path / "sessions/a/archived.json")
    report = simckpt.Store(files.path).check()
    assert ("archive", "sessions/a/archived.json") in [(each.kind, each.path) for each in report.damage]
    assert_reads(files.path, "a")
    assert mover.move().problems == []
    assert simckpt.Store(files.path).check()
