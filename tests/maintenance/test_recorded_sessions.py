"""What a check says of sessions: nothing of whole ones, and exactly what is damaged of others."""

import shutil
import sys
import time
from pathlib import Path

import pytest

import simckpt
from simckpt.errors import DamagedError, RunLockedError, SessionNotFoundError
from simckpt.maintenance.check import check
from simckpt.maintenance.repair import repair
from simckpt.storage import StoreFiles
from simckpt.storage.origins import Origins
from simckpt.storage.session_ending import close_session, remove_session
from simckpt.storage.session_records import OriginRecord
from simckpt.storage.session_writing import SessionWriter, create_session

sys.path.insert(0, str(Path(__file__).parent.parent / "storage"))
from session_helpers import MODEL, new_session, record, write_part, write_snapshot
from storage_helpers import new_store, save


@pytest.fixture
def store(tmp_path: Path) -> Path:
    with new_session(tmp_path) as writer:
        write_part(writer, 0, 4)
        write_snapshot(writer, 4)
        write_part(writer, 6, 8)
        writer.close()
    return tmp_path


def damaged(store: Path) -> list[str]:
    report = check(store)
    assert {finding.kind for finding in report.damage} <= {"session"}
    assert bool(report) == (not report.damage)
    return [finding.path for finding in report.damage]


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)


def test_a_whole_session_is_read_byte_by_byte(store) -> None:
    report = check(store)
    assert report
    assert report.findings == ()
    # its own record, the last one, two parts, a snapshot, a model, and the record of the store
    assert report.counts.records == 7
    bundles = [path for path in store.rglob("*") if path.name in ("state.h5", "leaves.json")]
    assert report.counts.nbytes >= sum(path.stat().st_size for path in bundles)


@pytest.mark.parametrize(
    ("file", "told"),
    [
        ("session.json", "session.json"),
        ("closed.json", "closed.json"),
        ("parts/00000002-00000002/part.json", "parts/00000002-00000002/part.json"),
        ("parts/00000002-00000002/leaves.json", "parts/00000002-00000002"),
        ("parts/00000001-00000001/state.h5", "parts/00000001-00000001"),
        ("snapshots/00000001/snapshot.json", "snapshots/00000001/snapshot.json"),
        ("snapshots/00000001/state.h5", "snapshots/00000001"),
        (f"models/{MODEL}/state.h5", f"models/{MODEL}"),
    ],
)
def test_damage_is_told_where_it_is(store, file, told) -> None:
    flip(store / "sessions/pole" / file)
    # without the last record it is not known whether parts are missing
    assert f"sessions/pole/{told}" in damaged(store)
    assert set(damaged(store)) <= {f"sessions/pole/{told}", "sessions/pole/parts"}
    mended = repair(store)
    assert mended
    assert [finding.path for finding in mended.remaining] == damaged(store)


def test_a_missing_part_is_damage(store) -> None:
    shutil.rmtree(store / "sessions/pole/parts/00000002-00000002")
    assert damaged(store) == ["sessions/pole/parts"]


@pytest.mark.parametrize("quick", [False, True])
@pytest.mark.parametrize("closed", [False, True])
@pytest.mark.parametrize("gone", [(1,), (2,), (3,), (1, 2), (1, 3), (1, 2, 3), ()])
def test_missing_snapshots_and_models_are_damage(tmp_path, gone, closed, quick) -> None:
    with new_session(tmp_path) as writer:
        for row in (0, 4, 8):
            write_snapshot(writer, row)
            write_part(writer, row, row + 4)
        if closed:
            writer.close()
    folder = tmp_path / "sessions/pole"
    for number in gone:
        shutil.rmtree(folder / f"snapshots/{number:08d}")
    # while a session is not closed, nobody knows of those behind the last that is there
    known = set(gone) if closed else {each for each in gone if each < max({1, 2, 3} - set(gone), default=0)}
    report = simckpt.Store(tmp_path).check(quick=quick)
    assert bool(report) == (not known)
    told = " ".join(each.problem for each in report.damage)
    texts = {
        (): "",
        (1,): "snapshot 1 is missing",
        (2,): "snapshot 2 is missing",
        (3,): "snapshot 3 is missing",
        (1, 2): "snapshots 1 to 2 are missing",
        (1, 3): "snapshot 1 is missing snapshot 3 is missing",
        (1, 2, 3): "snapshots 1 to 3 are missing",
    }
    assert told == texts[tuple(sorted(known))]
    shutil.rmtree(folder / "models" / MODEL)
    found = simckpt.Store(tmp_path).check(quick=quick)
    # without a snapshot nothing speaks of it
    expected = [f"sessions/pole/models/{MODEL}"] if len(gone) < 3 else []
    assert [each.path for each in found.damage if each.path not in {d.path for d in report.damage}] == expected


def test_an_origin_that_was_pruned_is_damage_and_one_that_never_came_is_told(tmp_path) -> None:
    files = new_store(tmp_path)
    saved = save(files, 1)
    origin = OriginRecord(saved.id, "ant-ppo", saved.seq, saved.step)
    create_session(files, record("driven", origin=origin))
    create_session(files, record("free"))
    assert check(tmp_path)
    # as a simckpt that knows no sessions would
    (tmp_path / "sessions").rename(tmp_path / "aside")
    with files.claim("ant-ppo"):
        files.prune("ant-ppo", 1, "test")
    (tmp_path / "aside").rename(tmp_path / "sessions")
    (found,) = check(tmp_path).damage
    assert (found.kind, found.path) == ("lineage", "sessions/driven/session.json")
    assert f"checkpoint {saved.id} of run 'ant-ppo'" in found.problem
    # a session can be in a store without the run, or beside another run of that name
    shutil.rmtree(tmp_path / "runs/ant-ppo")
    for there in (False, True):
        if there:
            new_store(tmp_path)
            save(files, 1)
        report = check(tmp_path)
        assert report
        (found,) = report.of("foreign")
        assert found.path == "sessions/driven/session.json"
        assert f"checkpoint {saved.id} of run 'ant-ppo'" in found.problem


def test_what_nobody_has_closed_is_told_and_closed_by_a_repair(tmp_path) -> None:
    with new_session(tmp_path) as writer:
        write_part(writer, 0, 4)
        assert [each.kind for each in check(tmp_path).findings] == []
    (found,) = check(tmp_path).findings
    assert (found.kind, found.path) == ("unfinished session", "sessions/pole")
    assert check(tmp_path), "it is no damage"
    assert [each.done for each in repair(tmp_path, dry_run=True).actions] == [False]
    assert simckpt.Store(tmp_path).session("pole").closed is None
    done = repair(tmp_path)
    assert done
    assert [(each.path, each.done) for each in done.actions] == [("sessions/pole", True)]
    assert simckpt.Store(tmp_path).session("pole").closed is not None
    assert check(tmp_path).findings == ()


def test_what_is_being_begun_is_not_closed_by_a_repair(tmp_path) -> None:
    """Between a session and the claim of the process that records it lie seconds."""
    files = new_store(tmp_path)
    now = time.time()
    create_session(files, record("pole", created=now))
    create_session(files, record("left", id="7a" * 16, created=now - 61.0))
    assert [each.path for each in check(tmp_path).findings] == ["sessions/left"]
    with pytest.raises(RunLockedError, match="starting"):
        close_session(tmp_path, "pole")
    assert [each.path for each in repair(tmp_path).actions] == ["sessions/left"]
    with SessionWriter(tmp_path, "pole") as writer:
        write_part(writer, 0, 4)
    # once something was written to it, it has been begun
    assert [each.path for each in check(tmp_path).findings] == ["sessions/pole"]
    assert close_session(tmp_path, "pole").how == "refused"


@pytest.mark.parametrize("closed", [False, True])
@pytest.mark.parametrize("left", ["all", "parts", "closed.json"])
def test_a_session_that_has_lost_its_record_is_told(tmp_path, left, closed) -> None:
    with new_session(tmp_path) as writer:
        write_part(writer, 0, 4)
        if closed:
            writer.close()
    folder = tmp_path / "sessions/pole"
    (folder / "session.json").unlink()
    for inner in list(folder.iterdir()) if left != "all" else ():
        if inner.name != left:
            shutil.rmtree(inner) if inner.is_dir() else inner.unlink()
    if not list(folder.iterdir()):
        return
    assert damaged(tmp_path) == ["sessions/pole/session.json"]
    assert simckpt.Store(tmp_path).files.sessions() == ["pole"]
    with pytest.raises(DamagedError, match="is gone"):
        simckpt.Store(tmp_path).session("pole")
    with pytest.warns(simckpt.errors.DamageWarning, match="pole"):
        assert simckpt.Store(tmp_path).sessions() == []
    assert [each.path for each in repair(tmp_path).remaining] == ["sessions/pole/session.json"]
    # its origin is not known: no prune takes what it may be
    with pytest.raises(DamagedError):
        Origins(StoreFiles.open(tmp_path)).check_unused("c" * 32)
    # what nobody can use is removed by its name
    remove_session(tmp_path, "pole")
    assert check(tmp_path).findings == ()


def test_a_folder_that_holds_nothing_of_a_session_is_none(tmp_path) -> None:
    with new_session(tmp_path) as writer:
        write_part(writer, 0, 4)
        writer.close()
    (tmp_path / "sessions/empty").mkdir()
    (tmp_path / "sessions/other").mkdir()
    (tmp_path / "sessions/other/notes.txt").write_text("mine")
    assert simckpt.Store(tmp_path).files.sessions() == ["pole"]
    assert damaged(tmp_path) == []
    with pytest.raises(SessionNotFoundError):
        simckpt.Store(tmp_path).session("other")


def test_a_compact_frees_what_a_merge_has_left_and_nothing_that_is_needed(tmp_path) -> None:
    with new_session(tmp_path) as writer:
        write_part(writer, 0, 4)
        write_part(writer, 4, 8)
        for number in (1, 2):
            shutil.copytree(writer.files.path / f"parts/{number:08d}-{number:08d}", tmp_path / f"copy-{number}")
        writer.close()
    parts = tmp_path / "sessions/pole/parts"
    for number in (1, 2):
        (tmp_path / f"copy-{number}").rename(parts / f"{number:08d}-{number:08d}")
    merged = parts / "00000001-00000002/state.h5"
    data = merged.read_bytes()
    flip(merged)
    store = simckpt.Store(tmp_path)
    assert len(store.compact(dry_run=True).parts) == 2
    assert store.compact().parts == ()
    assert len(list(parts.iterdir())) == 3, "what covers them is damaged"
    merged.write_bytes(data)
    nbytes = sum(path.stat().st_size for path in parts.glob("0000000[12]-0000000[12]/*")) - len(data)
    freed = store.compact()
    assert freed.parts == tuple(f"sessions/pole/parts/{number:08d}-{number:08d}" for number in (1, 2))
    assert 0 < freed.nbytes <= nbytes
    assert [path.name for path in parts.iterdir()] == ["00000001-00000002"]
    assert check(tmp_path).findings == ()


def test_damage_beside_a_recording_is_told(store) -> None:
    session = simckpt.Store(store).session("pole")
    session.pin()
    assert check(store).counts.records == 8
    flip(session.path / "pin")
    assert damaged(store) == ["sessions/pole/pin"]
    assert session.pinned


def test_bytes_that_only_viewers_need_do_not_make_rows_unreadable(store) -> None:
    path = store / "sessions/pole/parts/00000001-00000001/state.h5"
    data = bytearray(path.read_bytes())
    data[9] ^= 1  # in the superblock of HDF5
    path.write_bytes(data)
    (found,) = check(store).damage
    assert found.meaning == "all rows and states are read as they were written; viewers of HDF5 may fail"
    assert simckpt.Store(store).session("pole").read()["rows"]["row"].tolist() == [0, 1, 2, 3, 6, 7]


def test_a_quick_check_reads_records_alone(store) -> None:
    flip(store / "sessions/pole/parts/00000001-00000001/state.h5")
    assert simckpt.Store(store).check(quick=True)
    flip(store / "sessions/pole/parts/00000001-00000001/part.json")
    assert not simckpt.Store(store).check(quick=True)


def test_a_session_that_is_being_written_is_no_damage(tmp_path) -> None:
    with new_session(tmp_path) as writer:
        write_part(writer, 0, 4)
        write_part(writer, 4, 8)
        assert damaged(tmp_path) == []
        writer.merge_rest()
        assert damaged(tmp_path) == []


def test_what_a_kill_left_of_a_merge_is_told_once_the_session_is_closed(tmp_path) -> None:
    with new_session(tmp_path) as writer:
        write_part(writer, 0, 4)
        write_part(writer, 4, 8)
        copy = tmp_path / "copy"
        shutil.copytree(writer.files.path / "parts/00000001-00000001", copy)
        writer.close()
    copy.rename(tmp_path / "sessions/pole/parts/00000001-00000001")
    report = check(tmp_path)
    assert report
    assert [(each.severity, each.kind) for each in report.findings] == [("leftover", "session")]


def test_what_cannot_be_read_is_not_called_damage(store) -> None:
    with pytest.raises(simckpt.SimckptError, match="closed"):
        SessionWriter(store, "pole")
    path = store / "sessions/pole/session.json"
    data = path.read_bytes().replace(b'"version": "0.3"', b'"version": "9.9"')
    from simckpt.storage import sealed

    path.write_bytes(sealed.resealed(data[: data.index(b',\n "digest"')]))
    report = check(store)
    assert not report
    assert [(each.severity, each.path) for each in report.findings] == [("not checked", "sessions/pole/session.json")]
