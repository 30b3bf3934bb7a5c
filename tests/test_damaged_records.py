"""What stays in reach when single records of a run are damaged."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from examples import Counter
from typer.testing import CliRunner

import simckpt
from simckpt.cli import app
from simckpt.errors import CheckpointNotFoundError, DamagedError, DamageWarning
from simckpt.storage import CommitDraft

STEPS = (5, 10, 15, 20, 25, 30)


@pytest.fixture
def store(tmp_path: Path) -> simckpt.Store:
    made = simckpt.Store(tmp_path / "s")
    counter = Counter()
    with made.start("a") as run, run.checkpointer({"counter": counter}, save_when=simckpt.EverySteps(1)) as keeper:
        run.configure({"lr": 0.5})
        for step in STEPS:
            counter.count = step
            keeper.save(step, {"return": -step})
    return made


def cut(store: simckpt.Store, path: str) -> None:
    with (store.path / "runs/a" / path).open("r+b") as file:
        file.truncate(50)


def commit_file(seq: int) -> str:
    return f"checkpoints/{seq:08d}/commit.json"


def counted(checkpoint: simckpt.Checkpoint) -> int:
    counter = Counter()
    checkpoint.restore({"counter": counter})
    return counter.count


@pytest.mark.parametrize("seq", [1, 2, 6])
def test_a_damaged_commit_hides_no_other_from_its_step(store: simckpt.Store, seq: int) -> None:
    cut(store, commit_file(seq))
    run = store.run("a")
    for number, step in enumerate(STEPS, start=1):
        if number == seq:
            with pytest.raises(CheckpointNotFoundError, match=f"number {seq} .*is damaged"):
                run.at(step=step)
            with pytest.raises(CheckpointNotFoundError, match=f"number {seq} .*is damaged"):
                store.checkpoint(f"a@{step}")
            continue
        with pytest.warns(DamageWarning, match=f"number {seq} of run 'a'") as told:
            assert counted(run.at(step=step)) == step
        assert len(told) == 1
        with pytest.warns(DamageWarning, match=f"number {seq} of run 'a'"):
            assert store.checkpoint(f"a@{step}").step == step


@pytest.mark.parametrize("seq", [1, 2, 6])
def test_a_damaged_commit_hides_no_other_from_lists_and_from_the_best(store: simckpt.Store, seq: int) -> None:
    cut(store, commit_file(seq))
    whole = [step for number, step in enumerate(STEPS, start=1) if number != seq]
    with pytest.warns(DamageWarning, match=f"number {seq} of run 'a'"):
        assert [checkpoint.step for checkpoint in store.checkpoints()] == whole
    with pytest.warns(DamageWarning, match=f"number {seq} of run 'a'"):
        assert [checkpoint.step for checkpoint in store.run("a").checkpoints()] == whole
    with pytest.warns(DamageWarning, match=f"number {seq} of run 'a'"):
        assert store.run("a").best("return").step == whole[0]
    # those who ask what is damaged are told there
    damaged: dict = {}
    assert [checkpoint.step for checkpoint in store.checkpoints("step > 0", damaged=damaged)] == whole
    assert list(damaged) == [("a", seq)]


def test_a_damaged_head_is_not_passed_over_by_latest_and_nothing_is_pruned_beside_damage(store: simckpt.Store) -> None:
    cut(store, commit_file(6))
    with pytest.raises(DamagedError):
        store.run("a").latest()
    with pytest.raises(DamagedError):
        store.checkpoint("a")
    with pytest.raises(DamagedError):
        store.run("a").prune(simckpt.KeepLast(1))
    assert len(list((store.path / "runs/a/checkpoints").glob("*/state.h5"))) == 6


def test_what_a_rollback_left_behind_stays_left_behind_where_another_record_is_damaged(tmp_path: Path) -> None:
    store = simckpt.Store(tmp_path / "s")
    counter = Counter()
    with store.start("a") as run, run.checkpointer({"counter": counter}, save_when=simckpt.EverySteps(1)) as keeper:
        for step in (1, 2, 3, 4):
            keeper.save(step)
    store = simckpt.Store(tmp_path / "s")
    files = store.files
    records = files.records("a")
    # 5 goes back to 2: 3 and 4 are abandoned
    state = store.checkpoint(records[1].id).read()
    files.commit("a", CommitDraft(records[1].id, 2, start=records[1].start), state)
    cut(store, commit_file(1))
    with pytest.warns(DamageWarning):
        assert [checkpoint.seq for checkpoint in store.checkpoints()] == [2, 5]
    with pytest.raises(CheckpointNotFoundError):
        store.run("a").at(step=3)


@pytest.mark.parametrize("form", ["h5", "pt", "safetensors"])
def test_a_damaged_run_record_does_not_take_its_checkpoints_with_it(
    store: simckpt.Store, tmp_path: Path, form: str
) -> None:
    expected = {checkpoint.step: checkpoint.id for checkpoint in store.run("a").checkpoints()}
    cut(store, "run.json")
    for step, identity in expected.items():
        for address in (identity, identity[:12], f"a@{step}"):
            with pytest.warns(DamageWarning, match=r"record of run 'a'.*run\.json is damaged"):
                found = store.checkpoint(address)
            assert (found.id, found.hyperparameters, counted(found)) == (identity, {"lr": 0.5}, step)
    with pytest.warns(DamageWarning):
        assert store.checkpoint("a").id == expected[30]
    with pytest.warns(DamageWarning, match="record of run 'a'"):
        assert [checkpoint.id for checkpoint in store.checkpoints()] == list(expected.values())
    copy = simckpt.Store(tmp_path / "t").import_checkpoint(found.export(tmp_path / "one", to=form))
    assert (counted(copy), copy.step, copy.hyperparameters, copy.run) == (30, 30, {"lr": 0.5}, "a")


def test_starting_a_run_whose_record_is_damaged_says_how_it_is_repaired(store: simckpt.Store) -> None:
    cut(store, "run.json")
    with pytest.raises(DamagedError, match=r"simckpt check .*--repair"):
        store.start("a")
    store.repair()
    with store.start("a") as run:
        assert run.latest().step == 30


def test_a_run_whose_checkpoints_are_missing_is_not_trained_from_the_beginning(store: simckpt.Store) -> None:
    folder = store.path / "runs/a/checkpoints"
    folder.rename(folder.with_name("away"))
    with pytest.raises(DamagedError, match="put it back"):
        simckpt.Store(store.path).start("a")
    folder.with_name("away").rename(folder)
    with simckpt.Store(store.path).start("a") as run:
        assert run.latest().step == 30


def test_a_store_whose_runs_are_missing_does_not_begin_anew(tmp_path: Path) -> None:
    large = np.arange(200_000.0)  # which goes into a segment once it has not changed
    with simckpt.Store(tmp_path / "store").start("a") as run:
        keeper = run.checkpointer({"loop": simckpt.LoopState(large=large)}, save_when=simckpt.EverySteps(1))
        for step in (1, 2, 3):
            keeper.save(step)
    runs = tmp_path / "store" / "runs"
    assert list((runs.parent / "segments").iterdir())
    runs.rename(tmp_path / "away")
    for name in ("a", "b"):
        with pytest.raises(DamagedError, match="put it back"):
            simckpt.Store(tmp_path / "store").start(name)
    assert not runs.exists()
    (tmp_path / "away").rename(runs)
    with simckpt.Store(tmp_path / "store").start("a") as run:
        assert run.latest().step == 3
    shutil.rmtree(runs)
    simckpt.Store(tmp_path / "store").compact(unknown=True)
    with simckpt.Store(tmp_path / "store").start("a") as run:
        assert run.checkpoints() == []


def test_the_commands_show_and_export_what_is_whole(store: simckpt.Store, tmp_path: Path) -> None:
    cut(store, commit_file(2))
    with pytest.warns(DamageWarning, match="number 2 of run 'a'"):
        shown = CliRunner().invoke(app, ["show", str(store.path), "a@30"])
    assert shown.exit_code == 0
    with pytest.warns(DamageWarning, match="number 2 of run 'a'"):
        exported = CliRunner().invoke(app, ["export", str(store.path), "a@5", str(tmp_path / "x.h5")])
    assert exported.exit_code == 0
    assert (tmp_path / "x.h5").exists()


def test_every_leaf_can_be_looked_at_by_its_path(store: simckpt.Store) -> None:
    checkpoint = store.run("a").latest()
    shown = {path: checkpoint[path] for path in checkpoint.leaves()}
    assert json.loads(shown["counter/_tree"])["tree"] == 1
    assert shown["counter/values"].shape == checkpoint.leaves()["counter/values"].shape
