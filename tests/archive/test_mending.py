"""A pull puts right what is damaged here from a place that has it whole, and leaves everything else alone."""

import shutil

import pytest
from archive_helpers import RUN, a_segment, archive, assert_restores, filled, kept_aside
from storage_helpers import run_record, snapshot
from typer.testing import CliRunner

from simckpt.archive.transfer import pull, push
from simckpt.cli import app
from simckpt.errors import ArchiveDamagedError, DamagedError
from simckpt.maintenance.check import Scope, check
from simckpt.storage import StoreFiles, TombstoneRecord

PLAIN = Scope(structure=False)
STATES = 3


@pytest.fixture
def files(tmp_path):
    files, _ = filled(tmp_path / "store", STATES)
    files.tag(RUN, 2, "good")
    files.add_metrics(RUN, 2, {"eval/return": 1.0})
    push(files, RUN, tmp_path / "place")
    return files


def file_of(files: StoreFiles, what: str):
    if what == "segment":
        return files.path / a_segment(files)
    if what == "run.json":
        return files.path / "runs" / RUN / what
    if what in ("tag-good", "metrics-1"):
        return next(files.path.glob(f"runs/{RUN}/marks/*/{what}"))
    return files.path / f"runs/{RUN}/checkpoints/00000002/{what}"


RECORDS = ["commit.json", "leaves.json", "run.json", "tag-good", "metrics-1"]


@pytest.mark.parametrize("damage", ["gone", "cut", "flipped"])
@pytest.mark.parametrize("what", ["state.h5", "segment", *RECORDS])
def test_what_is_damaged_here_is_put_right(files, tmp_path, what, damage):
    path, originals = file_of(files, what), snapshot(files.path)
    data = path.read_bytes()
    if damage == "gone":
        path.unlink()
    else:
        middle = len(data) // 2
        path.write_bytes(
            data[:-1] if damage == "cut" else data[:middle] + bytes([data[middle] ^ 8]) + data[middle + 1 :]
        )
    # bytes of arrays are read by `verify` alone
    is_seen = damage != "flipped" or what in RECORDS
    (done,) = pull(tmp_path / "place", StoreFiles.open(files.path))
    assert (path.exists() and path.read_bytes() == data) == is_seen
    (again,) = pull(tmp_path / "place", StoreFiles.open(files.path), verify=True)
    assert path.read_bytes() == data
    is_commit = path.parent.name in ("00000002", "segments")
    assert (done.repaired > 0, again.repaired > 0) == (is_commit and is_seen, is_commit and not is_seen)
    after = snapshot(files.path)
    assert {name: each for name, each in after.items() if not name.startswith("quarantine/")} == originals
    assert check(files.path, PLAIN)
    assert_restores(StoreFiles.open(files.path), 2)


def test_a_pull_without_damage_writes_nothing_and_reads_no_array_there(files, fake):
    push(files, RUN, "s3://bucket/place")
    fake.reset()
    before = snapshot(files.path)
    (done,) = pull("s3://bucket/place", files, verify=True)
    assert (done.commits, done.repaired, done.nbytes) == (0, 0, 0)
    assert snapshot(files.path) == before
    assert not [key for _, key in fake.requests if key.endswith(".h5")]


def test_a_whole_folder_whose_files_are_all_damaged_is_put_right_where_its_line_proves_it(files, tmp_path):
    originals = kept_aside(files)
    for path in (files.path / f"runs/{RUN}/checkpoints/00000002").iterdir():
        path.write_bytes(b"")
    (done,) = pull(tmp_path / "place", files)
    assert done.repaired == 1
    assert kept_aside(files) == originals


def test_what_is_damaged_on_both_sides_is_told_and_stays(files, tmp_path):
    path = file_of(files, "state.h5")
    path.write_bytes(b"here")
    there = tmp_path / "place" / path.relative_to(files.path)
    there.write_bytes(b"there")
    with pytest.raises(ArchiveDamagedError, match="/state"):
        pull(tmp_path / "place", files)
    assert path.read_bytes() == b"here"
    assert_restores(files, 3)


def test_what_was_pruned_or_evicted_here_does_not_come_back(files, tmp_path):
    with files.claim(RUN):
        files.prune(RUN, 1, "test")
    archive(files, tmp_path / "archive", 1).move()
    assert files.evicted(RUN) == {2}
    before = snapshot(files.path)
    (done,) = pull(tmp_path / "place", files, verify=True)
    assert (done.commits, done.repaired) == (0, 0)
    assert snapshot(files.path) == before
    assert isinstance(files.records(RUN)[0], TombstoneRecord)


def test_the_record_of_another_run_is_not_taken(files, tmp_path):
    path = file_of(files, "run.json")
    path.write_bytes(b"damaged")
    (tmp_path / f"place/runs/{RUN}/run.json").write_bytes(run_record(RUN, id="c" * 32).to_bytes())
    with pytest.raises(DamagedError, match="--repair"):
        pull(tmp_path / "place", files, verify=True)
    assert path.read_bytes() == b"damaged"


def test_the_command_says_what_was_put_right(files, tmp_path):
    file_of(files, "state.h5").unlink()
    found = CliRunner().invoke(app, ["pull", str(tmp_path / "place"), str(files.path)])
    assert found.exit_code == 0, found.output
    assert "1 that were damaged put right" in found.output
    path = file_of(files, "segment")
    path.write_bytes(bytes(path.stat().st_size))
    found = CliRunner().invoke(app, ["pull", "--verify", str(tmp_path / "place"), str(files.path)])
    assert found.exit_code == 0, found.output
    assert "that were damaged put right" in found.output
    shutil.rmtree(tmp_path / "place")
    found = CliRunner().invoke(app, ["pull", str(tmp_path / "place"), str(files.path)])
    assert (found.exit_code, "is it mounted" in found.output) == (2, True)


@pytest.mark.parametrize("what", ["commit.json", "leaves.json", "state.h5"])
def test_a_push_goes_on_behind_what_is_damaged_here(files, tmp_path, what):
    originals = kept_aside(files)
    file_of(files, what).write_bytes(b"")
    with pytest.raises(DamagedError, match="all others were brought"):
        push(StoreFiles.open(files.path), RUN, tmp_path / "other")
    there = {name: data for name, data in snapshot(tmp_path / "other").items() if "checkpoints" in name}
    assert there == {name: data for name, data in originals.items() if "checkpoints" in name and "00000002" not in name}
    # what is missing there comes from where it is whole
    (done,) = pull(tmp_path / "place", StoreFiles.open(files.path))
    assert done.repaired == 1
    (again,) = push(StoreFiles.open(files.path), RUN, tmp_path / "other")
    assert again.commits == 1
    other = StoreFiles.open(shutil.copytree(tmp_path / "other", tmp_path / "copy"))
    for seq in range(1, STATES + 1):
        assert_restores(other, seq)


def test_the_commands_say_what_to_do_about_damage(files, tmp_path):
    def told(*words: str) -> str:
        found = CliRunner().invoke(app, [*words])
        assert found.exit_code == 2, found.output
        return found.output

    file_of(files, "commit.json").unlink()
    for words in (["push", str(files.path), RUN, str(tmp_path / "other")], ["compact", str(files.path)]):
        assert "`simckpt check" in told(*words)
    (files.path / "store.json").write_bytes(b"")
    for words in (["ls"], ["compact"], ["push"]):
        assert "`simckpt check STORE --repair`" in told(
            words[0], str(files.path), *([RUN, "x"] if words == ["push"] else [])
        )
    (files.path / "store.json").unlink()
    assert "`simckpt check STORE --repair`" in told("ls", str(files.path))
