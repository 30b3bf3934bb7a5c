"""Folders that are links, missing, renamed or copied: one finding each; no repair touches them, or what is outside."""

import contextlib
import json
import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import xxhash
from log_helpers import RUN
from maintenance_helpers import (
    BRANCH,
    PLAIN,
    damaged,
    everything,
    file_of,
    flip,
    lost,
    place_of,
    resealed,
    sources,
)
from typer.testing import CliRunner

from simckpt.cli import app
from simckpt.errors import DamagedError, SegmentsKeptError, StorageError, StoreError
from simckpt.maintenance.check import Scope, check
from simckpt.maintenance.repair import repair as repair_all
from simckpt.storage import StoreFiles, processes

CHECKPOINTS = f"runs/{RUN}/checkpoints"
FOLDERS = (
    "segments",
    "trash",
    "tmp",
    "quarantine",
    "archive",
    "runs",
    f"runs/{RUN}",
    CHECKPOINTS,
    f"{CHECKPOINTS}/00000003",
    f"runs/{RUN}/starts",
    f"runs/{RUN}/marks",
    f"runs/{RUN}/archived",
    f"runs/{RUN}/writer",
)


def repair(root: Path):
    return repair_all(root, scope=PLAIN)


def linked(store: StoreFiles, folder: str) -> Path:
    """Puts a link in the place of a folder; returns where the folder is now, which is none of the store's business."""
    path, outside = store.path / folder, store.path.with_name("outside")
    if path.exists():
        path.rename(outside)
    else:
        outside.mkdir()
        (outside / "mine.json").write_text("mine")
    path.symlink_to(outside)
    return outside


def state_of(root: Path) -> list[tuple[str, int, int]]:
    """Every name below a folder with its inode and time, to see that nothing was moved, removed or written."""
    found = ((str(path), path.lstat()) for path in [root, *sorted(root.rglob("*"))])
    return [(path, status.st_ino, status.st_mtime_ns) for path, status in found]


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_link_is_one_finding_and_the_rest_is_verified(store, folder):
    whole = check(store.path, PLAIN).counts
    linked(store, folder)
    report = check(store.path, PLAIN)
    assert [(each.kind, each.path) for each in report.damage] == [("folder", folder)]
    assert "symbolic link" in report.damage[0].problem
    assert "put the folder itself back" in report.damage[0].advice
    assert report.unchecked == ()
    counts = report.counts
    # the branch's is verified whatever is wrong with the other run
    assert counts.checkpoints == {"runs": 0, f"runs/{RUN}": 1, CHECKPOINTS: 1, f"{CHECKPOINTS}/00000003": 3}.get(
        folder, whole.checkpoints
    )
    assert json.loads(CliRunner().invoke(app, ["check", str(store.path), "--json", "--quick"]).stdout)["ok"] is False


@pytest.mark.parametrize("folder", FOLDERS)
def test_no_repair_prune_or_compact_changes_what_is_behind_a_link(store, folder):
    # one damage of each kind that a repair moves or writes again, in front of the link or behind it
    state = store.path / f"runs/{BRANCH}/checkpoints/00000001/state.h5"
    flip(state, place_of(state, "agent/weights")[0] * 8)
    for path in [file_of(store, kind) for kind in ("state", "start", "metrics", "tag", "job", "segment")]:
        flip(path, 8 * 40)
    # what a dead process of this machine and a pruner left
    dead = store._works.make(replace(processes.this_process(), started=1))
    (dead / "job.json").write_text("x")
    (store.path / "trash" / f"{'a' * 32}.12345678.h5").write_bytes(bytes(50))
    outside = linked(store, folder)
    before = state_of(outside)
    done = repair(store.path)
    assert not done
    assert any(action.path == folder and action.problem for action in done.actions)
    assert state_of(outside) == before
    for act in (
        lambda files: files.quarantine(RUN, 3, "by hand"),
        lambda files: files.prune(RUN, 2, "r"),
        lambda files: files.compact(),
        lambda files: files.untag(RUN, 2, "good"),
        lambda files: files.rewrite_mark(RUN, "a" * 32, "pinned"),
        lambda files: files.put_aside(f"{folder}/mine.json"),
        lambda files: files.sweep(),
    ):
        with contextlib.suppress(StoreError, OSError):
            act(StoreFiles.open(store.path))
        assert state_of(outside) == before


def test_a_link_that_appears_after_the_check_is_refused(store):
    linked(store, f"runs/{RUN}/starts")
    (start,) = (store.path / "runs" / RUN / "starts").iterdir()
    with pytest.raises(StorageError, match="symbolic link"):
        store.put_aside(f"runs/{RUN}/starts/{start.name}")
    assert start.exists()


@pytest.mark.parametrize("how", ["gone", "empty"])
def test_segments_that_are_all_gone_are_told_once_and_left_alone(store, how):
    uses = {(run, seq): set(sources(store, seq, run)) for run, seq in [(RUN, 2), (RUN, 3), (RUN, 4), (BRANCH, 1)]}
    away = store.path.with_name("away")
    (store.path / "segments").rename(away)
    if how == "empty":
        (store.path / "segments").mkdir()
    report = check(store.path, PLAIN)
    assert damaged(report) == {"segments"}
    assert lost(report) == uses
    assert (report.counts.segments, report.counts.checkpoints) == (0, 4)
    before = everything(store.path)
    done = repair(store.path)
    assert [(action.path, bool(action.problem)) for action in done.actions] == [("segments", True)]
    assert everything(store.path) == before
    shutil.rmtree(store.path / "segments", ignore_errors=True)
    away.rename(store.path / "segments")
    assert check(store.path, PLAIN)


def test_a_renamed_run_is_to_be_renamed_back(store):
    for run in (RUN, BRANCH):
        (store.path / "runs" / run).rename(store.path / "runs" / "other")
        report = check(store.path, PLAIN)
        assert [(each.kind, each.path) for each in report.damage] == [("place", "runs/other")]
        assert f"rename it back to {run!r}" in report.damage[0].advice
        assert report.counts.checkpoints == 4
        before = everything(store.path)
        assert not repair(store.path)
        assert everything(store.path) == before
        (store.path / "runs" / "other").rename(store.path / "runs" / run)
    assert check(store.path, PLAIN)


def test_a_copied_run_is_told_once_and_neither_is_changed(store):
    shutil.copytree(store.path / "runs" / RUN, store.path / "runs" / "copy")
    report = check(store.path, PLAIN)
    assert [(each.kind, each.path) for each in report.damage] == [("place", "runs/copy")]
    assert "remove one of the two folders" in report.damage[0].advice
    before = everything(store.path)
    assert not repair(store.path)
    assert everything(store.path) == before


@pytest.mark.parametrize("how", ["swap", "rename", "copy"])
def test_a_checkpoint_under_another_number_is_told_by_its_own(store, how):
    folder = store.path / CHECKPOINTS
    if how == "swap":
        (folder / "00000003").rename(folder / "x")
        (folder / "00000002").rename(folder / "00000003")
        (folder / "x").rename(folder / "00000002")
        expected = {"00000002": "number 3", "00000003": "number 2"}
    elif how == "rename":
        (folder / "00000003").rename(folder / "00000009")
        expected = {"00000009": "number 3"}
    else:
        shutil.copytree(folder / "00000003", folder / "00000009")
        expected = {"00000009": "number 3"}
    report = check(store.path, PLAIN)
    assert {each.path: each.kind for each in report.damage} == {f"{CHECKPOINTS}/{name}": "place" for name in expected}
    for each in report.damage:
        number = expected[each.path[-8:]]
        assert number in each.problem
        assert ("remove it" if how == "copy" else f"rename it back to 0000000{number[-1]}") in each.advice
    assert bool(report.lost) == (how != "copy")
    before = everything(store.path)
    assert not repair(store.path)
    assert everything(store.path) == before


@pytest.mark.parametrize("name", [f"{RUN} (old)", ".hidden", f"../{RUN}"])
def test_a_run_under_no_name_of_one_is_told_and_left_alone(store, name):
    place, run = (store.path / "runs" / name).resolve(), store.path / "runs" / RUN
    run.rename(place)
    report = check(store.path, PLAIN)
    # the branch's origin is not where it is looked for
    assert damaged(report) == {str(place.relative_to(store.path)), f"runs/{BRANCH}/run.json"}
    (told,) = (each for each in report.damage if each.kind == "place")
    assert RUN in told.problem
    assert f"move it back to runs/{RUN}" in told.advice
    before = everything(store.path)
    repair(store.path)
    assert everything(store.path) == before
    place.rename(run)
    assert check(store.path, PLAIN)


@pytest.mark.parametrize("where", ["away", "store/runs.bak"])
def test_runs_that_have_gone_are_told_for_their_segments_are_here(store, where):
    away = store.path.parent / where
    (store.path / "runs").rename(away)
    report = check(store.path, PLAIN)
    assert [(each.kind, each.path) for each in report.damage] == [("folder", "runs")]
    assert "put the folder itself back" in report.damage[0].advice
    assert not repair(store.path)
    away.rename(store.path / "runs")
    assert check(store.path, PLAIN)


def test_a_run_without_its_folder_of_checkpoints_is_told_and_does_not_begin_anew(store):
    folder, away = store.path / CHECKPOINTS, store.path / "runs" / RUN / "checkpoints.bak"
    folder.rename(away)
    report = check(store.path, PLAIN)
    assert ("folder", CHECKPOINTS) in {(each.kind, each.path) for each in report.damage}
    with pytest.raises(DamagedError, match="put it back"):
        StoreFiles.open(store.path).claim(RUN)
    with pytest.raises(SegmentsKeptError):
        StoreFiles.open(store.path).compact()
    before = everything(store.path)
    assert not repair(store.path)
    assert everything(store.path) == before
    away.rename(folder)
    assert check(store.path, PLAIN)
    StoreFiles.open(store.path).claim(RUN).release()


@pytest.mark.parametrize("how", ["rename", "copy"])
@pytest.mark.parametrize("seq", [3, 4])
def test_a_checkpoint_under_no_number_is_told_and_nothing_takes_its_place(store, seq, how):
    folder = store.path / CHECKPOINTS
    if how == "copy":
        shutil.copytree(folder / f"{seq:08d}", folder / "aside")
    else:
        (folder / f"{seq:08d}").rename(folder / "aside")
    report = check(store.path, PLAIN)
    assert [(each.kind, each.path) for each in report.damage] == [("place", f"{CHECKPOINTS}/aside")]
    advice = "move it out" if how == "copy" else f"rename it back to {seq:08d}"
    assert advice in report.damage[0].advice
    before = everything(store.path)
    assert not repair(store.path)
    assert everything(store.path) == before


def test_counts_are_of_what_was_read(store):
    whole = check(store.path, PLAIN).counts
    path = file_of(store, "segment")
    leaves = sum(path.stem in ids for ids in sources(store, 3).values())
    size = path.stat().st_size
    path.unlink()
    counts = check(store.path, PLAIN).counts
    assert (counts.segments, counts.nbytes) == (whole.segments - 1, whole.nbytes - size)
    assert counts.leaves == whole.leaves - leaves
    parts = [check(store.path, Scope(part=(part, 3), structure=False)).counts.checkpoints for part in (1, 2, 3)]
    assert sum(parts) == whole.checkpoints


def test_a_file_that_was_cut_is_told_once(store):
    path = file_of(store, "state")
    os.truncate(path, path.stat().st_size // 2)
    report = check(store.path, PLAIN)
    assert [each.kind for each in report.damage] == ["leaves"]
    assert not any(each.restorable for each in report.damage[0].affected)


def test_an_index_of_a_later_version_says_which_checkpoint_is_not_known(store):
    path = store.path / CHECKPOINTS / "00000003"
    body, _, _ = (path / "leaves.json").read_bytes().rpartition(b',\n "digest"')
    commit = store.index(RUN, 3).commit
    data = resealed(body.replace(b'"version": "0.3"', b'"version": "9.0"'))
    (path / "leaves.json").write_bytes(data)
    (path / "commit.json").write_bytes(_naming(commit, data).to_bytes())
    report = check(store.path, PLAIN)
    assert not report.damage
    assert [(each.run, each.seq) for finding in report.unchecked for each in finding.affected] == [(RUN, 3)]
    assert "not known" in CliRunner().invoke(app, ["check", str(store.path), "--quick"]).output


def _naming(commit, data):
    digest = f"xxh3-128:{xxhash.xxh3_128_hexdigest(data)}"
    files = (
        replace(file, size=len(data), digest=digest) if file.name == "leaves.json" else file for file in commit.files
    )
    return replace(commit, files=tuple(files))
