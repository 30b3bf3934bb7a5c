"""The commands on sessions: thin, with JSON for programs, and nothing that starts what is slow."""

import json
import select
import shutil
import socket
from pathlib import Path

import numpy as np
import pytest
from replay_helpers import cart_pole, record
from typer.testing import CliRunner

import simckpt
from simckpt.cli import app
from simckpt.errors import DamagedError, DamageWarning
from simckpt.hardware import Recorder, Replay
from simckpt.hardware.session import Session


@pytest.fixture(scope="module")
def pole(tmp_path_factory: pytest.TempPathFactory) -> Session:
    def loop(env: Recorder) -> None:
        env.reset(seed=1)
        for step in range(20):
            env.step(np.array([0.5]))
            if step == 10:
                env.snapshot()
                env.note("\x1b[31mred\x1b[0m")

    return record(tmp_path_factory.mktemp("pole") / "s", cart_pole(), loop=loop)


def run(*arguments: object, code: int = 0) -> str:
    result = CliRunner().invoke(app, ["session", *map(str, arguments)])
    assert result.exit_code == code, result.output + result.stderr
    return result.output if code == 0 else result.stderr


def test_list_has_a_line_for_each_session(pole: Session) -> None:
    (line,) = [line.split() for line in run("list", pole.files.root).splitlines() if line.startswith("played")]
    assert line[3:6] == ["20", f"{pole.duration:.1f}", "2"]
    assert "closed" in line
    (facts,) = json.loads(run("list", pole.files.root, "--json"))
    assert (facts["name"], facts["id"], facts["rows"], facts["status"]) == ("played", pole.id, 20, "closed")
    assert facts["links"][0] == {
        "name": "motor",
        "command": ["force", "position"],
        "reading": ["force", "position"],
        "transport": "simulated",
    }


DAMAGED = ["session.json", "closed.json", "parts/*/part.json", "snapshots/00000001/snapshot.json"]


@pytest.mark.parametrize("file", [*DAMAGED, "parts"])
def test_list_shows_a_damaged_session_as_such_and_all_others(pole: Session, tmp_path: Path, file: str) -> None:
    root = tmp_path / "s"
    shutil.copytree(pole.files.root, root)
    with Recorder(cart_pole(), root, "other") as env:
        env.reset(seed=0)
    (path,) = (root / "sessions/played").glob(file)
    if file == "parts":
        shutil.rmtree(path)
    else:
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
    said = run("list", root)
    lines = [line.split() for line in said.splitlines()]
    assert [line[3:5] for line in lines if line and line[0] == "other"] == [["0", "0.0"]]
    (told,) = [line for line in lines if line and line[0] == "played"]
    assert told[1] == "damaged:"
    # the path may not fit into the table, but the line is whole
    assert str(path if file != "parts" else path.parent) in " ".join(told)
    facts = json.loads(run("list", root, "--json"))
    assert [each["name"] for each in facts] == ["other", "played"]
    assert str(path if file != "parts" else path.parent) in facts[1]["damaged"]


def test_show_and_a_replay_tell_of_missing_snapshots_and_models(tmp_path: Path, pole: Session) -> None:
    root = tmp_path / "s"
    shutil.copytree(pole.files.root, root)
    folder = root / "sessions/played"
    assert "missing" not in run("show", root, "played")
    shutil.rmtree(folder / "snapshots/00000001")
    said = run("show", root, "played")
    assert "missing          snapshot 1 is missing" in said
    assert "snapshots at     11" in said
    session = simckpt.Store(root).session("played")
    with pytest.warns(DamageWarning, match="session 'played': snapshot 1 is missing"):
        report = Replay(session, cart_pole()).run()
    assert report.exact
    assert report.rows == (range(11, 20),)
    (model,) = (folder / "models").iterdir()
    shutil.rmtree(model)
    facts = json.loads(run("show", root, "played", "--json"))
    assert facts["absent"][1] == f"models/{model.name}: a model that snapshots refer to is missing"
    with pytest.warns(DamageWarning, match=f"models/{model.name}"):
        replay = Replay(session, cart_pole())
    with pytest.raises(DamagedError, match=model.name):
        replay.run()


def test_list_of_a_store_without_sessions(tmp_path: Path) -> None:
    simckpt.Store(tmp_path / "s").start("a").close()
    assert json.loads(run("list", tmp_path / "s", "--json")) == []
    run("list", tmp_path / "s")
    assert "is not a store yet" in run("list", tmp_path / "x", code=2)


def test_show_tells_figures_events_and_series(pole: Session) -> None:
    said = run("show", pole.files.root, "played")
    for part in (pole.id, "rows             0 to 19", "snapshots at     0, 11", "21 commands", "observation[5]"):
        assert part in said
    # an event may come from anywhere
    assert "\x1b" not in said
    assert r"note: \x1b[31mred" in said
    facts = json.loads(run("show", pole.files.root, "played", "--json"))
    assert facts["statistics"]["rows"] == 20
    assert facts["events"][-1]["kind"] == "note"
    assert "reading/motor/force" in facts["series"]


def test_plot_writes_a_page_and_replaces_none(pole: Session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert run("plot", pole.files.root, "played").startswith("played.html: ")
    assert (tmp_path / "played.html").read_text().count('class="plotly-graph-div"') == 3
    assert "nothing is replaced" in run("plot", pole.files.root, "played", code=2)
    run("plot", pole.files.root, "played", "observation[0]", "-o", tmp_path / "b.html", "--start", 3, "--stop", 9)
    assert (tmp_path / "b.html").read_text().count('class="plotly-graph-div"') == 1
    assert "it has action[0]" in run("plot", pole.files.root, "played", "x", "-o", tmp_path / "c.html", code=2)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["b.html", "played.html"]


def test_export_writes_what_the_ending_or_the_form_says(
    pole: Session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    root = pole.files.root
    assert run("export", root, "played").startswith("played.mcap: <Session 'played'")
    assert (tmp_path / "played.mcap").read_bytes()[1:5] == b"MCAP"
    run("export", root, "played", "--to", "minari", "--dataset", "bench/pole-v1")
    assert json.loads((tmp_path / "played-minari/data/metadata.json").read_text())["dataset_id"] == "bench/pole-v1"
    assert "whole episodes" in run("export", root, "played", "d", "--to", "minari", "--start", 3, code=2)
    assert "say what makes the env" in run("export", root, "played", "a.gif", code=2)
    assert "no such function" in run("export", root, "played", "a.gif", "--env", "replay_helpers:nothing", code=2)
    assert "one of mcap, minari, video" in run("export", root, "played", "--to", "csv", code=2)
    assert "did you mean played?" in run("export", root, "plaid", code=2)
    for target in ("no/a.mcap", "no/a.gif", "no/minari"):
        arguments = ["--to", "minari"] if target.endswith("minari") else ["--env", "replay_helpers:cart_pole"]
        said = run("export", root, "played", target, *arguments, code=2)
        assert f"{target} cannot be written: there is no folder no; make it first" in said
    assert "there is no folder no" in run("plot", root, "played", "-o", "no/a.html", code=2)


HOMING = """
import replay_helpers
from simckpt.hardware import UDP, Link

def make_env():
    env = replay_helpers.cart_pole()
    env.unwrapped.arm_link = Link(UDP("127.0.0.1:{port}"), command=("force",), name="arm")
    env.unwrapped.arm_link.{use}
    return env
"""


@pytest.mark.parametrize("use", ["send([0.5])", "arm()"])
def test_an_env_that_homes_while_it_is_made_reaches_no_device(
    pole: Session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, use: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as own:
        own.bind(("127.0.0.1", 0))
        module = f"homing_{use.partition('(')[0]}"
        (tmp_path / f"{module}.py").write_text(HOMING.format(port=own.getsockname()[1], use=use))
        for command in (["plot"], ["export", "--to", "video"]):
            said = run(command[0], pole.files.root, "played", *command[1:], "--env", f"{module}:make_env", code=2)
            assert (
                f"{module}:make_env: the env uses link 'arm' while it is made, and a replay reaches no device" in said
            )
        assert not select.select([own], [], [], 0)[0]
    assert [each.name for each in tmp_path.iterdir() if each.suffix in (".html", ".mp4")] == []


def test_close_ends_a_session_that_nobody_writes(tmp_path: Path, pole: Session) -> None:
    from simckpt.storage import StoreFiles
    from simckpt.storage.session_records import SessionRecord
    from simckpt.storage.session_writing import create_session

    simckpt.Store(tmp_path / "s").start("a").close()
    files = StoreFiles.open(tmp_path / "s")
    create_session(files, SessionRecord(id="ab" * 16, name="killed", created=1.8e9, monotonic=5))
    session = simckpt.Store(tmp_path / "s").session("killed")
    assert session.status == "unfinished"
    # nobody has a claim on it: its writer has not been killed with it
    assert "0 rows, 0.0 s, refused" in run("close", tmp_path / "s", "killed")
    assert simckpt.Store(tmp_path / "s").session("killed").closed.how == "refused"
    # one that is closed stays as it is
    assert "20 rows" in run("close", pole.files.root, "played")
    assert pole.status == "closed"


def test_remove_takes_a_session_away_and_leaves_the_others(tmp_path: Path) -> None:
    for name in ("one", "two"):
        with Recorder(cart_pole(), tmp_path, name) as env:
            env.reset(seed=0)
    assert run("remove", tmp_path, "one") == "one: removed\n"
    assert [session.name for session in simckpt.Store(tmp_path).sessions()] == ["two"]
    assert "no session 'one'" in run("remove", tmp_path, "one", code=2)
    with Recorder(cart_pole(), tmp_path, "three") as env:
        env.reset(seed=0)
        assert "is being" in run("remove", tmp_path, "three", code=2)
