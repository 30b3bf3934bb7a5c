"""Sessions that an earlier simckpt has archived, evicted, pinned and removed are what they were, here and there."""

import json
import re
import shutil
from pathlib import Path

import pytest
from make_golden_session_archive import HOME, NAMES
from make_golden_sessions import MODEL, tables
from test_golden_sessions import same

import simckpt
from simckpt.errors import ArchiveNotNamedError
from simckpt.storage import sealed

pytest.importorskip("obstore")


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    shutil.copytree(HOME, tmp_path / "copy")
    return tmp_path / "copy"


def assert_every_bit(session) -> None:
    for part, chunk in zip(session.parts, session.chunks(), strict=True):
        whole = tables(*part.rows)
        del whole["events"], chunk["events"]
        assert same(chunk, whole)
    found = [session.snapshot(each)["env"]["python"] for each in session.snapshots]
    assert found == [{"row": 0}, {"row": 4}, {"row": 8}]
    assert session.snapshot(4)["env"]["models"][MODEL]["mass"].tolist() == [0.0, 1.0, 2.0, 3.0]


def test_all_are_listed_and_nothing_leads_anywhere_by_itself() -> None:
    store = simckpt.Store(HOME / "store")
    found = [(each.name, each.tier, each.pinned, each.rows) for each in store.sessions()]
    assert found == [("evicted", "archive", False, range(12)), ("pinned", "local", True, range(12))]
    assert_every_bit(store.session("pinned"))
    with pytest.raises(ArchiveNotNamedError, match="s3://golden/sessions"):
        store.session("evicted").read()
    report = store.check()
    assert report
    assert report.counts.archived_sessions == 1


def test_one_comes_back_and_the_removed_one_goes(copy: Path) -> None:
    store = simckpt.Store(copy / "store")
    archive = store.archive(copy / "archive")
    assert len(archive.fetch_session("evicted")) == 5
    assert_every_bit(store.session("evicted"))
    moved = archive.move()
    assert (moved.removed_sessions, moved.problems) == (["removed"], [])
    assert sorted(path.name for path in (copy / "archive/sessions").iterdir() if any(path.rglob("*.json"))) == [
        "evicted",
        "pinned",
    ]
    assert not list((copy / "store/archive/removed").iterdir())


def test_the_archive_is_a_store_and_can_be_pulled_from(copy: Path) -> None:
    for name in NAMES:
        assert_every_bit(simckpt.Store(copy / "archive").session(name))
    other = simckpt.Store(copy / "other")
    other.pull(copy / "archive")
    assert [(each.name, each.pinned) for each in other.sessions()] == [
        ("evicted", False),
        ("removed", False),
        ("pinned", True),
    ]
    for name in NAMES:
        assert_every_bit(other.session(name))


def test_the_format_tells_the_keys(copy) -> None:
    document = (Path(sealed.__file__).parent / "FORMAT.md").read_text()
    blocks = re.findall(r"^```\w*\n(.*?)^```$", document, re.DOTALL | re.MULTILINE)
    (lines,) = [each for each in blocks if "simckpt removed" in each]
    told = {line.split()[0]: re.findall(r'"([a-z_]+)"(?=[,:}])', line) for line in lines.splitlines()}
    store = copy / "store"
    note = "archive/removed/<id>.json"
    (earlier,) = (store / "archive/removed").iterdir()
    real = {
        "sessions/<name>/archived.json": store / "sessions/evicted/archived.json",
        "sessions/<name>/pin": store / "sessions/pinned/pin",
    }
    for name, path in real.items():
        assert told[name] == list(json.loads(path.read_text()))
    simckpt.Store(store).files.remove_session("pinned")
    (written,) = set((store / "archive/removed").iterdir()) - {earlier}
    assert told[note] == list(json.loads(written.read_text()))
    # the end came later
    assert [key for key in told[note] if key != "end"] == list(json.loads(earlier.read_text()))
