"""Push and pull of sessions: with the run whose checkpoints were driving, and alone."""

import json
import shutil

import pytest
from archive_helpers import RUN
from archive_helpers import filled as runs
from session_archives import add_session, archive, assert_reads, filled, kept, of, states
from session_helpers import write_part
from test_archived_sessions import FILES, flip

import simckpt
from simckpt.archive.contents import require_sessions
from simckpt.archive.objects import Objects
from simckpt.archive.places import parse_place
from simckpt.archive.session_transfer import SessionTransfer
from simckpt.errors import (
    ArchiveDamagedError,
    ConflictError,
    DamagedError,
    SessionNotFoundError,
    UnsupportedFormatError,
)
from simckpt.storage import StoreFiles, sealed
from simckpt.storage.session_ending import close_session
from simckpt.storage.session_records import OriginRecord
from simckpt.storage.session_writing import SessionWriter


def with_run(path) -> simckpt.Store:
    """A store with a run of two checkpoints, a session that the first of them drove, and one that none did."""
    files, _ = runs(path, 2)
    first = files.records(RUN)[0]
    for number, (name, origin) in enumerate(
        {
            "driven": OriginRecord(first.id, RUN, 1, 10),
            "plain": None,
            "open": OriginRecord(first.id, RUN, 1, 10),
        }.items()
    ):
        with add_session(files, name, number + 1, origin=origin) as writer:
            if name != "open":
                writer.close()
    return simckpt.Store(path)


def test_a_session_goes_alone_and_stands_alone(tmp_path, url):
    store = with_run(tmp_path / "a")
    done = store.push_session("driven", url)
    size = sum(len(data) for data in of(kept(store.path), "driven").values())
    assert (done.session, done.repaired) == ("driven", False)
    assert done.nbytes >= size
    assert store.push_session("driven", url) == SessionTransfer("driven", 0)
    other = simckpt.Store(tmp_path / "b")
    assert other.pull_session(url, "driven") == SessionTransfer("driven", size)
    assert other.pull_session(url, "driven") == SessionTransfer("driven", 0)
    assert kept(other.path) == of(kept(store.path), "driven")
    assert not (other.path / "sessions/driven/archived.json").exists()
    assert_reads(other.path, "driven")
    assert other.runs() == []
    assert other.check(), "an origin that has not come is no damage"
    assert json.loads((other.path / "store.json").read_text())["requires"] == ["sessions"]


def test_a_run_takes_its_closed_sessions_along(tmp_path):
    store = with_run(tmp_path / "a")
    (done,) = store.push(RUN, tmp_path / "place")
    assert done.sessions == ("driven",)
    assert store.push(RUN, tmp_path / "place")[0].sessions == ()
    other = simckpt.Store(tmp_path / "b")
    (done,) = other.pull(tmp_path / "place", RUN)
    assert done.sessions == ("driven",)
    assert kept(other.path) == of(kept(store.path), "driven")
    assert other.check()
    assert other.session("driven").origin == store.session("driven").origin
    assert other.pull(tmp_path / "place")[0].sessions == ()


def test_a_lost_store_comes_back_from_its_archive_with_all_sessions_and_pins(tmp_path):
    store = with_run(tmp_path / "a")
    store.session("plain").pin()
    archive(store.files, tmp_path / "archive", 1).move()
    other = simckpt.Store(tmp_path / "b")
    done = other.pull(tmp_path / "archive")
    assert [(each.run, each.sessions) for each in done] == [(RUN, ("driven",)), ("", ("plain",))]
    assert [each.name for each in other.sessions()] == ["driven", "plain"]
    assert [each.pinned for each in other.sessions()] == [False, True]
    for name in ("driven", "plain"):
        assert_reads(other.path, name)


def test_another_session_of_the_name_is_a_conflict_and_changes_nothing(tmp_path):
    one, other = filled(tmp_path / "a", "x"), filled(tmp_path / "b", "y", "x")
    simckpt.Store(one.path).push_session("x", tmp_path / "place")
    here, there = kept(other.path), kept(tmp_path / "place")
    with pytest.raises(ConflictError, match="another one"):
        simckpt.Store(other.path).push_session("x", tmp_path / "place")
    with pytest.raises(ConflictError, match="another one"):
        simckpt.Store(other.path).pull(tmp_path / "place")
    with pytest.raises(ConflictError, match="another one"):
        simckpt.Store(other.path).pull_session(tmp_path / "place", "x")
    assert (kept(other.path), kept(tmp_path / "place")) == (here, there)
    # not even if its own record is damaged here, while another one says which it is
    flip(other.path / "sessions/x/session.json")
    with pytest.raises(ConflictError, match="another one"):
        simckpt.Store(other.path).pull_session(tmp_path / "place", "x")
    flip(other.path / "sessions/x/closed.json")
    with pytest.raises(DamagedError, match="move that folder away"):
        simckpt.Store(other.path).pull_session(tmp_path / "place", "x")


def test_what_was_not_closed_does_not_go(tmp_path):
    files = StoreFiles.create(tmp_path / "a")
    with add_session(files, "x", 1), pytest.raises(ConflictError, match="not closed"):
        simckpt.Store(files.path).push_session("x", tmp_path / "place")
    with pytest.raises(SessionNotFoundError):
        simckpt.Store(files.path).push_session("y", tmp_path / "place")


@pytest.mark.parametrize("verify", [False, True])
@pytest.mark.parametrize("file", FILES[2:])
def test_what_is_gone_there_is_written_again_and_what_is_damaged_if_asked(tmp_path, file, verify):
    store = simckpt.Store(filled(tmp_path / "a", "x").path)
    store.push_session("x", tmp_path / "place")
    there = kept(tmp_path / "place")
    path = tmp_path / "place/sessions/x" / file
    flip(path) if verify else path.unlink()
    assert store.push_session("x", tmp_path / "place", verify=verify).repaired
    assert kept(tmp_path / "place") == there


@pytest.mark.parametrize("how", ["gone", "flip"])
@pytest.mark.parametrize("file", FILES[2:])
def test_a_pull_puts_right_what_is_gone_here_and_what_is_damaged_if_asked(tmp_path, file, how):
    store = simckpt.Store(filled(tmp_path / "a", "x").path)
    store.push_session("x", tmp_path / "place")
    here, path = kept(store.path), store.path / "sessions/x" / file
    flip(path) if how == "flip" else path.unlink()
    assert store.pull_session(tmp_path / "place", "x", verify=how == "flip").repaired
    assert kept(store.path) == here


def test_damage_there_is_told_and_all_else_comes(tmp_path):
    files = filled(tmp_path / "a", "x", "y")
    for name in ("x", "y"):
        simckpt.Store(files.path).push_session(name, tmp_path / "place")
    flip(tmp_path / "place/sessions/x" / FILES[4])
    other = simckpt.Store(tmp_path / "b")
    with pytest.raises(ArchiveDamagedError, match="everything else was brought"):
        other.pull(tmp_path / "place")
    assert [each.name for each in other.sessions()] == ["y"]
    assert_reads(other.path, "y")
    with pytest.raises(ArchiveDamagedError):
        other.pull_session(tmp_path / "place", "x")
    with pytest.raises(SessionNotFoundError, match="it has x, y"):
        other.pull_session(tmp_path / "place", "z")


def test_a_stranger_s_session_that_is_not_what_it_says_is_not_taken(tmp_path):
    """Right digests in the manifest prove nothing of what the session's own records say."""
    files = filled(tmp_path / "a", "x")
    simckpt.Store(files.path).push_session("x", tmp_path / "place")
    shutil.rmtree(files.path / "sessions/x")
    path = tmp_path / "place/sessions/x"
    flip(path / FILES[4])
    from archive_helpers import sha256

    from simckpt.storage import sealed

    noted = json.loads((path / "archived.json").read_text())
    noted["files"][FILES[4]]["digest"] = sha256((path / FILES[4]).read_bytes())
    fields = {key: value for key, value in noted.items() if key not in ("format", "version", "digest")}
    (path / "archived.json").write_bytes(sealed.seal("archived session", fields))
    with pytest.raises(ArchiveDamagedError, match="is not whole"):
        simckpt.Store(files.path).pull_session(tmp_path / "place", "x")
    fields["files"]["../../escaped"] = fields["files"][FILES[4]]
    (path / "archived.json").write_bytes(sealed.seal("archived session", fields))
    with pytest.raises(ArchiveDamagedError):
        simckpt.Store(files.path).pull_session(tmp_path / "place", "x")
    assert simckpt.Store(files.path).sessions() == []
    assert not list((files.path / "tmp").iterdir())


def test_an_evicted_session_comes_back_to_be_pushed(tmp_path):
    files = filled(tmp_path / "a", "x", "y")
    archive(files, tmp_path / "archive", 1).move()
    assert states(files.path, "x") == []
    simckpt.Store(files.path).push_session("x", tmp_path / "place")
    assert of(kept(tmp_path / "place"), "x") == of(kept(tmp_path / "archive"), "x")


def test_a_session_that_was_ended_on_both_sides_is_not_mixed(tmp_path):
    files = StoreFiles.create(tmp_path / "a")
    add_session(files, "x", 1).release()
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    for number, name in enumerate("ab"):
        with SessionWriter(tmp_path / name, "x", clock=lambda number=number: 1.8e9 + number) as writer:
            writer.close()
    one, other = simckpt.Store(tmp_path / "a"), simckpt.Store(tmp_path / "b")
    one.push_session("x", tmp_path / "place")
    here, there = kept(other.path), kept(tmp_path / "place")
    assert here != kept(one.path)
    (tmp_path / "place/sessions/x" / FILES[4]).unlink()
    with pytest.raises(ConflictError, match="ended once here"):
        other.push_session("x", tmp_path / "place")
    one.push_session("x", tmp_path / "place")
    path = other.path / "sessions/x" / FILES[4]
    data = path.read_bytes()
    path.unlink()
    with pytest.raises(ConflictError, match="ended once here"):
        other.pull_session(tmp_path / "place", "x")
    path.write_bytes(data)
    assert (kept(other.path), kept(tmp_path / "place")) == (here, there)


@pytest.mark.parametrize("verify", [False, True])
def test_a_session_of_another_end_is_not_all_there(tmp_path, verify):
    """A copy of the store, taken while it was recorded, has closed it early: neither end passes for the other."""
    files = StoreFiles.create(tmp_path / "a")
    with add_session(files, "x", 1) as writer:
        shutil.copytree(tmp_path / "a", tmp_path / "b")
        shutil.rmtree(tmp_path / "b/sessions/x/writer")
        write_part(writer, 12, 16)
        writer.close()
    one, other = simckpt.Store(tmp_path / "a"), simckpt.Store(tmp_path / "b")
    close_session(other.path, "x")
    other.push_session("x", tmp_path / "place")
    there = kept(tmp_path / "place")
    with pytest.raises(ConflictError, match="ended once here"):
        one.push_session("x", tmp_path / "place", verify=verify)
    here = kept(one.path)
    with pytest.raises(ConflictError, match="ended once here"):
        one.pull_session(tmp_path / "place", "x", verify=verify)
    with pytest.raises(ConflictError, match="ended once here"):
        one.pull(tmp_path / "place", verify=verify)
    assert (kept(one.path), kept(tmp_path / "place")) == (here, there)


def test_what_a_kill_has_left_of_a_merge_is_no_other_end(tmp_path):
    store = simckpt.Store(filled(tmp_path / "a", "x").path)
    store.push_session("x", tmp_path / "place")
    parts = store.path / "sessions/x/parts"
    shutil.copytree(parts / "00000001-00000003", parts / "00000001-00000001")
    flip(store.path / "sessions/x/closed.json")
    assert store.pull_session(tmp_path / "place", "x").repaired
    assert store.session("x").closed is not None


def test_damage_here_keeps_no_session_and_no_run_from_being_pushed(tmp_path):
    store = with_run(tmp_path / "a")
    store.run(RUN).checkpoints()[0].branch("child")
    flip(store.path / f"runs/{RUN}/checkpoints/00000002/state.h5")
    with pytest.raises(DamagedError, match="all others were brought"):
        store.push("child", tmp_path / "place")
    assert (tmp_path / "place/sessions/driven/closed.json").exists()
    assert (tmp_path / "place/runs/child/run.json").exists()


@pytest.mark.parametrize("file", ["parts/00000001-00000003/part.json", "session.json"])
def test_sessions_that_cannot_be_read_keep_no_others_from_being_pushed(tmp_path, file):
    store = with_run(tmp_path / "a")
    first = store.files.records(RUN)[0]
    with add_session(store.files, "also", 8, origin=OriginRecord(first.id, RUN, 1, 10)) as writer:
        writer.close()
    path = store.path / "sessions/also" / file
    path.write_bytes(path.read_bytes().replace(b'"version": "0.3"', b'"version": "9.9"'))
    data = path.read_bytes()
    path.write_bytes(sealed.resealed(data[: data.index(b',\n "digest"')]))
    if file == "session.json":  # nobody knows whose it is
        assert store.push(RUN, tmp_path / "place")[0].sessions == ("driven",)
    else:
        with pytest.raises(UnsupportedFormatError, match="all others were brought"):
            store.push(RUN, tmp_path / "place")
    assert (tmp_path / "place/sessions/driven/closed.json").exists()


def test_a_record_that_is_damaged_there_is_told_by_the_pull_of_a_run(tmp_path):
    store = with_run(tmp_path / "a")
    store.push(RUN, tmp_path / "place")
    flip(tmp_path / "place/sessions/driven/session.json")
    other = simckpt.Store(tmp_path / "b")
    with pytest.raises(ArchiveDamagedError, match="everything else was brought"):
        other.pull(tmp_path / "place", RUN)
    assert len(other.run(RUN).checkpoints()) == 2


def test_an_evicted_session_whose_archive_is_lost_is_pulled_from_elsewhere(tmp_path):
    files = filled(tmp_path / "a", "x", "y")
    store = simckpt.Store(files.path)
    store.push_session("x", tmp_path / "place")
    archive(files, tmp_path / "archive", 1).move()
    store.pull(tmp_path / "place")
    assert states(files.path, "x") == [], "a pull of everything leaves it in the archive"
    shutil.rmtree(tmp_path / "archive")
    assert store.pull_session(tmp_path / "place", "x").nbytes > 0
    assert_reads(files.path, "x")


def test_damage_of_a_place_is_not_called_damage_here(tmp_path):
    files = filled(tmp_path / "a", "x")
    simckpt.Store(files.path).push_session("x", tmp_path / "place")
    flip(tmp_path / "place/store.json")
    with pytest.raises(ArchiveDamagedError, match=r"store\.json"):
        require_sessions(Objects(parse_place(tmp_path / "place")))


def test_a_push_that_was_killed_before_its_end_is_not_there_yet(tmp_path):
    store = simckpt.Store(filled(tmp_path / "a", "x", "y").path)
    for name in ("x", "y"):
        store.push_session(name, tmp_path / "place")
    (tmp_path / "place/sessions/x/closed.json").unlink()
    other = simckpt.Store(tmp_path / "b")
    assert [each.sessions for each in other.pull(tmp_path / "place")] == [("y",)]
    with pytest.raises(SessionNotFoundError, match="it has y"):
        other.pull_session(tmp_path / "place", "x")
    assert store.push_session("x", tmp_path / "place").nbytes > 0
    other.pull_session(tmp_path / "place", "x")
    assert_reads(other.path, "x")
