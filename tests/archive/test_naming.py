"""Whether an archive is reached for that a store names: only if its user has named it, once."""

import shutil
import stat

import pytest
from archive_helpers import RUN, archive, assert_restores, filled, local_seqs
from typer.testing import CliRunner

import simckpt
from simckpt.archive import naming
from simckpt.cli import app
from simckpt.errors import ArchiveNotNamedError, DamagedError


@pytest.fixture
def given(tmp_path, monkeypatch):
    """A store with two checkpoints in its archive alone, as another user finds it, who has named nothing."""
    files, _ = filled(tmp_path / "store", 3)
    archive(files, tmp_path / "archive", 1).move()
    assert local_seqs(files) == {3}
    as_another_user(monkeypatch, tmp_path)
    return files


def as_another_user(monkeypatch, tmp_path):
    monkeypatch.setattr(naming, "_named", set())
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config of another"))


def test_an_archive_that_a_stranger_names_is_not_reached_for(given, tmp_path):
    (tmp_path / "archive").rename(tmp_path / "away")
    (tmp_path / "archive").touch()  # would be another error if it were looked at
    store = simckpt.Store(given.path)
    for action in (
        lambda: store.run(RUN).checkpoints()[0].read(),
        lambda: store.archive(),
        lambda: store.archive().move(),
    ):
        with pytest.raises(ArchiveNotNamedError, match=r"have never named.*--archive"):
            action()
    # what is here is read, and what is damaged here is told as such
    assert store.run(RUN).latest().read()
    path = given.path / f"runs/{RUN}/checkpoints/00000003/state.h5"
    path.write_bytes(bytes(path.stat().st_size))
    with pytest.raises(DamagedError):
        store.run(RUN).latest().read()


def test_once_named_it_is_reached_for_by_later_processes_too(given, tmp_path, monkeypatch):
    simckpt.Store(given.path).archive(tmp_path / "archive")
    monkeypatch.setattr(naming, "_named", set())  # as in another process
    assert simckpt.Store(given.path).run(RUN).checkpoints()[0].read()
    assert_restores(given, 1)


def test_fetch_names_it_on_the_command_line(given, tmp_path):
    address = [str(given.path), f"{RUN}@10"]
    refused = CliRunner().invoke(app, ["fetch", *address])
    assert refused.exit_code == 2
    assert "never named" in refused.stderr
    assert CliRunner().invoke(app, ["fetch", *address, "--archive", str(tmp_path / "archive")]).exit_code == 0
    assert_restores(given, 1)


def test_named_for_one_store_is_not_named_for_another(given, tmp_path):
    simckpt.Store(given.path).archive(tmp_path / "archive")
    other, _ = filled(tmp_path / "other", 1)
    shutil.copytree(given.path / "archive", other.path / "archive")
    with pytest.raises(ArchiveNotNamedError):
        simckpt.Store(other.path).archive()


@pytest.mark.parametrize("home", ["a file", "missing"])
def test_without_a_folder_to_keep_it_in_it_holds_for_the_process(given, tmp_path, monkeypatch, home):
    if home == "a file":
        (tmp_path / "config of another").touch(stat.S_IRUSR)
    else:
        monkeypatch.delenv("XDG_CONFIG_HOME")
        monkeypatch.delenv("HOME")
        monkeypatch.setattr("pathlib.Path.home", lambda: (_ for _ in ()).throw(RuntimeError("no home")))
    simckpt.Store(given.path).archive(tmp_path / "archive")
    assert simckpt.Store(given.path).run(RUN).checkpoints()[0].read()
