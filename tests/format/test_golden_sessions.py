"""Sessions that an earlier simckpt has written are read as they were recorded, and can be gone on with."""

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from make_golden_sessions import HOME, MODEL, tables

import simckpt
from simckpt.storage import sealed
from simckpt.storage.session_writing import SessionWriter


def same(found, expected) -> bool:
    if isinstance(expected, dict):
        return list(found) == list(expected) and all(same(found[key], expected[key]) for key in expected)
    if isinstance(expected, tuple):
        return len(found) == len(expected) and all(map(same, found, expected))
    if expected.dtype.kind == "U":
        return found.tolist() == expected.tolist()
    return (found.dtype, found.shape, found.tobytes()) == (expected.dtype, expected.shape, expected.tobytes())


@pytest.mark.parametrize("name", ["closed", "killed"])
def test_every_bit_comes_back(name: str) -> None:
    session = simckpt.Store(HOME).session(name)
    for part, chunk in zip(session.parts, session.chunks(), strict=True):
        whole = tables(*part.rows)
        del whole["events"], chunk["events"]
        assert same(chunk, whole)
    assert [event.text for event in session.events] == [
        f"bei Zeile {row}: \N{GREEK SMALL LETTER OMEGA}" for row in (0, 4, 8)
    ]
    assert [each.row for each in session.snapshots] == [0, 4, 8]
    found = session.snapshot(4)
    assert found["env"]["python"] == {"row": 4}
    assert found["env"]["models"][MODEL]["mass"].tolist() == [0.0, 1.0, 2.0, 3.0]
    assert found["observation"]["arm"].tolist() == [1.0, -0.5]
    assert session.env == {"id": "Arm-v0", "kwargs": {"gravity": (0.0, 9.81)}}
    assert session.options(session.read(["resets"])["resets"]["options"][0]) == {"height": 0.5}


def test_how_they_ended() -> None:
    store = simckpt.Store(HOME)
    assert [session.name for session in store.sessions()] == ["closed", "killed"]
    closed = store.session("closed").closed
    assert closed is not None
    assert (closed.how, closed.text, closed.rows, closed.parts) == ("error", "the arm fell off", (0, 12), 3)
    assert [part.numbers for part in store.session("closed").parts] == [(1, 3)]
    assert store.session("killed").status == "unfinished"
    assert store.check()


def test_one_that_was_killed_is_closed(tmp_path: Path) -> None:
    shutil.copytree(HOME, tmp_path / "store")
    with SessionWriter(tmp_path / "store", "killed") as writer:
        writer.close("killed")
    session = simckpt.Store(tmp_path / "store").session("killed")
    assert session.rows == range(12)
    assert len(session.parts) == 1
    assert np.array_equal(session.read(["rows/reward"])["rows"]["reward"], np.arange(12) / 16)


def test_the_format_tells_the_columns() -> None:
    document = (Path(sealed.__file__).parent / "FORMAT.md").read_text()
    (section,) = re.findall(r"^## Sessions$(.*?)(?=^## |\Z)", document, re.DOTALL | re.MULTILINE)
    told = set(re.findall(r"`([a-z_]+)`", section))
    index = json.loads(next(HOME.rglob("parts/*/leaves.json")).read_text())
    paths = [each["path"].removeprefix("record/").split("/") for each in index["leaves"]]
    columns = {path[2] if path[0] in ("commands", "readings") else path[1] for path in paths if len(path) > 1}
    assert columns - {"signals"} <= told
