"""What a check says of sessions: nothing of whole ones, and exactly what is damaged of others."""

import shutil
import sys
from pathlib import Path

import pytest

import simckpt
from simckpt.maintenance.check import check
from simckpt.maintenance.repair import repair
from simckpt.storage.session_writing import SessionWriter

sys.path.insert(0, str(Path(__file__).parent.parent / "storage"))
from session_helpers import MODEL, new_session, write_part, write_snapshot


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
        ("snapshots/00000001/snapshot.json", "snapshots"),
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
        writer.merge()
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
