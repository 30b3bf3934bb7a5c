"""The catalog in the user's cache folder: quick, and never to be seen in what is listed."""

import dataclasses
import math
import os
import shutil
import sqlite3
import stat
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from simckpt import Store, catalog
from simckpt.catalog import Catalog, Contents
from simckpt.errors import DamagedError
from simckpt.state import encode
from simckpt.storage import CommitDraft, Marks, RunRecord, StoreFiles

ROLLBACK = {"abandoned": "0" * 32, "level": 1, "changes": {"betas": (0.9, 0.99), "learning_rate": 1e-4}}


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "simckpt"


@pytest.fixture
def files(tmp_path: Path) -> StoreFiles:
    """A store with two runs: three commits, one of them pruned and one a rollback, and one commit."""
    store = StoreFiles.create(tmp_path / "s")
    for name, id in (("ant", "a" * 32), ("bee", "b" * 32)):
        store.write_run(name, RunRecord(id, name, 1.8e9))
    first = commit(store, "ant", 1)
    second = commit(store, "ant", 2, first)
    commit(store, "ant", 3, second, kind="rollback", rollback=ROLLBACK)
    store.prune("ant", 2, "a test")
    commit(store, "bee", 1)
    return store


def commit(files: StoreFiles, run: str, step: int, parent: str | None = None, **others: object) -> str:
    metrics = {"eval/return": step / 3, "loss": math.inf}
    draft = CommitDraft(parent, step, metrics, versions={"python": "3"}, host="here", start="c" * 32, **others)
    return files.commit(run, dataclasses.replace(draft, duration=0.1), {"a": encode({"x": np.float64(step)})}).record.id


def listed(files: StoreFiles) -> dict[str, Contents]:
    with Catalog(files) as opened:
        return {run: opened.contents(run) for run in files.runs()}


def plain(files: StoreFiles) -> dict[str, Contents]:
    """What the store's own files say."""
    found = {}
    for run in files.runs():
        damaged: dict = {}
        found[run] = Contents(files.records(run, damaged=damaged), files.marks(run, damaged={}), damaged, {})
    return found


def reads_of(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Returns a list that receives the number of each commit record that is read from now on."""
    seen: list[int] = []
    original = StoreFiles._commit_record

    def counted(self, folder, run, seq, run_id):
        seen.append(seq)
        return original(self, folder, run, seq, run_id)

    monkeypatch.setattr(StoreFiles, "_commit_record", counted)
    return seen


def settle(files: StoreFiles) -> None:
    """Makes marks look old, which a catalog trusts; those of the last two seconds it does not."""
    for path in files.path.glob("runs/*/marks/*"):
        os.utime(path, (1.8e9 - 1000, 1.8e9 - 1000))


def test_cold_and_warm_listings_equal_what_the_records_say(files: StoreFiles, cache: Path) -> None:
    files.tag("ant", 1, "good")
    files.pin("ant", 3)
    files.add_metrics("bee", 1, {"eval/long": math.nan, "b": 2.0})
    settle(files)
    expected = repr(plain(files))  # by text, for NaN differs from itself
    assert repr(listed(files)) == expected
    assert repr(listed(files)) == expected
    assert [path.name for path in cache.iterdir()] == [f"{files.id}.sqlite"]


def test_types_survive_the_catalog(files: StoreFiles, cache: Path) -> None:
    listed(files)
    record = listed(files)["ant"].records[-1]
    assert record == files.records("ant")[-1]
    assert record.rollback["changes"]["betas"] == (0.9, 0.99)
    assert isinstance(record.files, tuple)


def test_a_warm_listing_reads_no_record(files: StoreFiles, cache: Path, monkeypatch) -> None:
    listed(files)
    seen = reads_of(monkeypatch)
    listed(files)
    assert seen == []
    commit(files, "ant", 4, files.records("ant")[-1].id)
    seen.clear()
    assert [record.step for record in listed(files)["ant"].records] == [1, 2, 3, 4]
    assert seen == [4]


def test_what_is_pruned_by_another_process_is_seen(files: StoreFiles, cache: Path) -> None:
    listed(files)
    code = (
        "import sys; from simckpt.storage import StoreFiles; StoreFiles.open(sys.argv[1]).prune('ant', 1, 'elsewhere')"
    )
    subprocess.run([sys.executable, "-c", code, files.path], check=True)
    assert listed(files) == plain(files)
    assert listed(files)["ant"].records[0].reason == "elsewhere"


def test_marks_are_seen_at_once_however_quickly_they_change(files: StoreFiles, cache: Path) -> None:
    id = files.records("bee")[0].id
    for number in range(20):
        files.tag("bee", 1, f"tag-{number}")
        assert listed(files)["bee"].marks == {id: Marks(frozenset(f"tag-{each}" for each in range(number + 1)))}
    for number in range(20):
        files.untag("bee", 1, f"tag-{number}")
        assert len(listed(files)["bee"].marks[id].tags) == 19 - number


def test_marks_that_lie_still_come_from_the_catalog(files: StoreFiles, cache: Path, monkeypatch) -> None:
    files.add_metrics("bee", 1, {"a": 1.0})
    settle(files)
    listed(files)
    (path,) = files.path.glob("runs/bee/marks/*/metrics-1")
    stamps = path.parent.stat()
    path.unlink()
    os.utime(path.parent, ns=(stamps.st_atime_ns, stamps.st_mtime_ns))
    assert next(iter(listed(files)["bee"].marks.values())).metrics == {"a": 1.0}


@pytest.mark.parametrize("damage", ["missing", "empty", "text", "torn", "flipped", "other version", "foreign row"])
def test_a_catalog_that_is_damaged_is_built_anew(files: StoreFiles, cache: Path, monkeypatch, damage: str) -> None:
    expected = listed(files)
    path = cache / f"{files.id}.sqlite"
    data = path.read_bytes()
    if damage == "missing":
        shutil.rmtree(cache)
    elif damage == "empty":
        path.write_bytes(b"")
    elif damage == "text":
        path.write_bytes(b"this is no database, " * 300)
    elif damage == "torn":
        path.write_bytes(data[: len(data) // 2])
    elif damage == "flipped":
        path.write_bytes(data[:4096] + bytes(byte ^ 255 for byte in data[4096:]))
    else:
        with sqlite3.connect(path) as connection:
            statement = (
                "UPDATE schema SET fields = '[]'" if damage == "other version" else "UPDATE records SET body = '[1]'"
            )
            connection.execute(statement)
        connection.close()
    assert listed(files) == expected
    seen = reads_of(monkeypatch)
    assert listed(files) == expected
    assert seen == []  # and the new one is used


def test_without_a_folder_to_write_to_listings_work(files: StoreFiles, cache: Path, monkeypatch, tmp_path) -> None:
    expected = plain(files)
    (tmp_path / "cache").touch()  # a file where the folder should be
    assert listed(files) == expected
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", lambda: (_ for _ in ()).throw(RuntimeError("no home")))
    assert catalog.default_folder() is None
    assert listed(files) == expected


def test_a_relative_cache_folder_is_ignored(monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "cache")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert catalog.default_folder() == tmp_path / ".cache" / "simckpt"


def test_the_folder_of_catalogs_is_the_users_own(files: StoreFiles, cache: Path) -> None:
    listed(files)
    assert stat.S_IMODE(cache.stat().st_mode) == 0o700


def test_a_catalog_that_another_process_has_locked_is_done_without(files: StoreFiles, cache: Path, monkeypatch) -> None:
    expected = listed(files)
    commit(files, "bee", 2, files.records("bee")[0].id)
    monkeypatch.setattr(catalog, "WAIT", 0.01)
    connection = sqlite3.connect(cache / f"{files.id}.sqlite", isolation_level=None)
    connection.execute("BEGIN EXCLUSIVE")
    found = listed(files)
    assert len(found["bee"].records) == 2
    assert found["ant"] == expected["ant"]
    connection.close()
    assert listed(files) == found


def test_several_processes_at_once_see_the_same(files: StoreFiles, cache: Path) -> None:
    code = (
        "import sys; from simckpt import Store\n"
        "for _ in range(5): print([each.id for each in Store(sys.argv[1]).checkpoints(abandoned=True)])"
    )
    started = [
        subprocess.Popen([sys.executable, "-c", code, files.path], stdout=subprocess.PIPE, text=True) for _ in range(4)
    ]
    outputs = [process.communicate()[0].splitlines() for process in started]
    assert [process.returncode for process in started] == [0] * 4
    expected = [record.id for run in ("ant", "bee") for record in files.records(run) if hasattr(record, "files")]
    assert outputs == [[str(expected)] * 5] * 4


def test_a_store_that_cannot_be_written_is_listed_and_left_alone(files: StoreFiles, cache: Path) -> None:
    before = sorted((str(path), path.stat().st_mtime_ns) for path in files.path.rglob("*"))
    for path in [files.path, *files.path.rglob("*")]:
        path.chmod(0o555 if path.is_dir() else 0o444)
    try:
        assert listed(files) == plain(files)
        assert len(Store(files.path).checkpoints(abandoned=True)) == 3
    finally:
        for path in [files.path, *files.path.rglob("*")]:
            path.chmod(0o755 if path.is_dir() else 0o644)
    assert sorted((str(path), path.stat().st_mtime_ns) for path in files.path.rglob("*")) == before


def test_damaged_records_are_told_each_time_and_hide_no_others(files: StoreFiles, cache: Path) -> None:
    listed(files)
    path = files.path / "runs/ant/checkpoints/00000001/commit.json"
    data = path.read_bytes()
    path.write_bytes(data.replace(b'"step": 1', b'"step": 7'))
    for _ in range(2):
        found = listed(files)["ant"]
        assert list(found.damaged) == [1]
        assert [record.seq for record in found.records] == [2, 3]
    path.unlink()
    assert isinstance(listed(files)["ant"].damaged[1], DamagedError)
    path.write_bytes(data)
    assert listed(files) == plain(files)


def test_runs_that_are_gone_are_forgotten(files: StoreFiles, cache: Path) -> None:
    Store(files.path).contents()
    shutil.rmtree(files.path / "runs/bee")
    assert [each.name for each in Store(files.path).contents()] == ["ant"]
    with sqlite3.connect(cache / f"{files.id}.sqlite") as connection:
        assert connection.execute("SELECT DISTINCT run FROM records").fetchall() == [("ant",)]
    connection.close()


def test_a_copy_of_a_store_has_what_the_copy_has(files: StoreFiles, cache: Path, tmp_path: Path) -> None:
    listed(files)
    shutil.copytree(files.path, tmp_path / "copy")
    copy = StoreFiles.open(tmp_path / "copy")
    commit(copy, "bee", 2, copy.records("bee")[0].id)
    assert listed(copy) == plain(copy)
    assert listed(files) == plain(files)
