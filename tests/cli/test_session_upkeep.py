"""The commands that keep sessions in order, and where other commands lead to sessions."""

import json
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

import simckpt
from simckpt.cli import app

pytest.importorskip("obstore")
sys.path.insert(0, str(Path(__file__).parent.parent / "archive"))
from session_archives import add_session, filled, kept, of, states


def run(*arguments: object, code: int = 0) -> str:
    result = CliRunner().invoke(app, list(map(str, arguments)))
    assert result.exit_code == code, result.output + result.stderr
    return result.output if code == 0 else result.stderr


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return filled(tmp_path / "store", "a", "b", "c").path


def test_prune_says_what_it_would_do_and_does_it(store: Path) -> None:
    assert "would remove" in run("session", "prune", store, "--keep-last", 1, "--dry-run")
    run("session", "pin", store, "a")
    verdicts = json.loads(run("session", "prune", store, "--keep-last", 1, "--json"))
    assert [(each["name"], each["keep"]) for each in verdicts] == [("a", True), ("b", False), ("c", True)]
    assert verdicts[0]["reason"] == "pinned"
    (line,) = [line for line in run("session", "list", store).splitlines() if line.startswith("a ")]
    assert line.endswith("pinned")
    run("session", "unpin", store, "a")
    assert "removed" in run("session", "prune", store, "--max-bytes", 1)
    assert [each.name for each in simckpt.Store(store).sessions()] == ["c"]
    assert "say what to keep" in run("session", "prune", store, code=2)


def test_archive_evict_and_fetch(store: Path, tmp_path: Path) -> None:
    before = kept(store)
    told = run("archive", store, tmp_path / "archive", "--keep-last-sessions", 1)
    assert "sessions: 3 archived, 2 evicted from the disk, 0 removed" in told
    facts = json.loads(run("session", "list", store, "--json"))
    assert [each["tier"] for each in facts] == ["archive", "archive", "local"]
    assert states(store, "a") == []
    assert run("session", "list", store).count("in the archive") == 2
    assert "2 sessions in the archive alone" in run("check", store)
    assert "4 files brought back" in run("session", "fetch", store, "a")
    assert "is here" in run("session", "fetch", store, "a")
    assert of(kept(store), "a") == of(before, "a")
    run("session", "remove", store, "b")
    moved = json.loads(run("archive", store, "--json", "--verify"))
    assert moved["removed_sessions"] == ["b"]
    assert moved["verified"]["damaged"] == []


def test_push_and_pull(store: Path, tmp_path: Path) -> None:
    run("session", "push", store, "a", tmp_path / "place")
    other = tmp_path / "other"
    done = json.loads(run("session", "pull", tmp_path / "place", other, "a", "--json"))
    assert done == {"session": "a", "nbytes": sum(map(len, of(kept(store), "a").values())), "repaired": False}
    assert "all was there" in run("session", "pull", tmp_path / "place", other, "a")
    assert kept(other) == of(kept(store), "a")
    run("session", "push", store, "b", tmp_path / "place")
    assert "without a run" in run("pull", tmp_path / "place", other)
    assert "it has a, b" in run("session", "pull", tmp_path / "place", other, "z", code=2)


def test_listings_lead_to_sessions(store: Path) -> None:
    for command in ("ls", "log"):
        assert f"3 sessions of hardware in the loop: `simckpt session list {store}`" in run(command, store)
    assert json.loads(run("ls", store, "--json")) == []
    assert "3 sessions" in simckpt.Store(store)._repr_html_()


def test_a_check_names_what_nobody_has_closed(store: Path) -> None:
    add_session(simckpt.Store(store).files, "left", 9).release()
    told = run("check", store)
    assert "unfinished: sessions/left" in told
    assert "simckpt session close" in told
    assert "leftovers" not in told
    assert "is closed" in run("check", store, "--repair")
    assert "unfinished" not in run("check", store)
