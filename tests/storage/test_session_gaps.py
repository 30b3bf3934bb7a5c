"""Rows before and behind what is lost of a session are read; those that may be lost are an error, never left out."""

import shutil
from pathlib import Path

import pytest
from session_helpers import new_session, write_part

import simckpt
from simckpt.errors import DamagedError

PARTS = ((0, 4), (6, 10), (12, 16))  # rows; some were lost between them, so that they are not merged


@pytest.fixture
def store(tmp_path: Path) -> Path:
    with new_session(tmp_path) as writer:
        for start, stop in PARTS:
            write_part(writer, start, stop)
        writer.close()
    return tmp_path


def damage(store: Path, part: int, how: str) -> None:
    folder = store / f"sessions/pole/parts/{part:08d}-{part:08d}"
    if how == "gone":
        shutil.rmtree(folder)
    else:
        path = folder / how
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 4
        path.write_bytes(data[: len(data) // 2])


@pytest.mark.parametrize("how", ["gone", "part.json", "leaves.json", "state.h5"])
@pytest.mark.parametrize("part", [1, 2, 3])
def test_a_range_is_read_whole_or_is_an_error(store: Path, part: int, how: str) -> None:
    damage(store, part, how)
    session = simckpt.Store(store).session("pole")
    lost = set(range(*PARTS[part - 1]))
    written = {row for rows in PARTS for row in range(*rows)}
    told = 0
    for start in range(17):
        for stop in range(start + 1, 18):
            wanted = [row for row in range(start, stop) if row in written]
            try:
                found = session.read(["rows/row"], start=start, stop=stop).get("rows", {}).get("row", [])
            except DamagedError:
                told += 1
                continue
            assert list(found) == wanted, (start, stop)
            assert not lost & set(wanted)
    # every range that is an error has what is lost, or lies in the gaps around it, or begins with the row behind it
    low = PARTS[part - 2][1] if part > 1 else 0
    high = PARTS[part][0] if part < 3 else 17
    assert told <= sum(start <= high and stop > low for start in range(17) for stop in range(start + 1, 18))
    with pytest.raises(DamagedError):
        session.read()
    before: list[int] = []
    with pytest.raises(DamagedError):
        before.extend(row for chunk in session.chunks(["rows/row"]) for row in chunk["rows"]["row"].tolist())
    assert before == [row for rows in PARTS[: part - 1] for row in range(*rows)]


def test_without_the_last_record_the_end_is_not_known(store: Path) -> None:
    damage(store, 3, "gone")
    damage(store, 2, "part.json")
    path = store / "sessions/pole/closed.json"
    path.write_bytes(path.read_bytes()[:-5])
    session = simckpt.Store(store).session("pole")
    assert session.read(["rows/row"], start=0, stop=4)["rows"]["row"].tolist() == [0, 1, 2, 3]
    with pytest.raises(DamagedError):
        session.read(["rows/row"], start=2)
    with pytest.raises(DamagedError, match="missing from"):
        session.read(["rows/row"], start=13)


def test_a_session_that_is_recorded_is_read_as_strictly_as_before(tmp_path: Path) -> None:
    with new_session(tmp_path) as writer:
        for start, stop in PARTS:
            write_part(writer, start, stop)
        damage(tmp_path, 2, "gone")
        with pytest.raises(DamagedError, match="parts 2"):
            simckpt.Store(tmp_path).session("pole").read(start=0, stop=4)
