"""Records of a run's starts."""

import dataclasses
import json
from pathlib import Path

import pytest
from storage_helpers import new_store, run_record

from simckpt.errors import ConfigurationError, DamagedError, FormatError, RunNotFoundError
from simckpt.storage import StartRecord, StoreFiles

RECORD = StartRecord(
    created=1.8e9,
    hyperparameters={"learning_rate": 3e-4, "hidden": [64, 64], "shape": (1, 2), "kl": float("inf"), "none": None},
    experiment="sweep-7",
    git={"commit": "c" * 40, "dirty": True, "diff": "+a\n-b \N{SNOWMAN}\n", "left_out": [".env"], "untracked": []},
    versions={"python": "3.11.7"},
    host="here",
    device={"cpu": "some", "gpus": ["one", "one"]},
)


@pytest.fixture
def store(tmp_path: Path) -> StoreFiles:
    return new_store(tmp_path / "s")


def starts_folder(store: StoreFiles) -> Path:
    return store.path / "runs" / "ant-ppo" / "starts"


def test_a_start_comes_back_as_it_was(store: StoreFiles) -> None:
    id = store.write_start("ant-ppo", RECORD)
    assert StoreFiles.open(store.path).read_start("ant-ppo", id) == RECORD
    assert [path.name for path in starts_folder(store).iterdir()] == [f"{id}.json"]
    assert list((store.path / "tmp").iterdir()) == []


def test_the_same_content_is_written_once(store: StoreFiles) -> None:
    id = store.write_start("ant-ppo", RECORD)
    before = (starts_folder(store) / f"{id}.json").read_bytes()
    assert store.write_start("ant-ppo", dataclasses.replace(RECORD, created=1.9e9)) == id
    assert {path.name: path.read_bytes() for path in starts_folder(store).iterdir()} == {f"{id}.json": before}


@pytest.mark.parametrize(
    "change",
    [
        {"hyperparameters": {"learning_rate": 1e-4}},
        {"experiment": None},
        {"git": None},
        {"versions": {"python": "3.12.0"}},
        {"host": "there"},
        {"device": {}},
    ],
    ids=lambda change: next(iter(change)),
)
def test_another_content_has_another_id(store: StoreFiles, change: dict) -> None:
    id = store.write_start("ant-ppo", RECORD)
    other = store.write_start("ant-ppo", dataclasses.replace(RECORD, **change))
    assert other != id
    assert store.read_start("ant-ppo", id) == RECORD
    assert store.read_start("ant-ppo", other) == dataclasses.replace(RECORD, **change)


def test_the_order_of_hyperparameters_makes_no_other_start(store: StoreFiles) -> None:
    turned = dict(reversed(RECORD.hyperparameters.items()))
    assert dataclasses.replace(RECORD, hyperparameters=turned).id == RECORD.id


def test_a_missing_or_damaged_start_is_damage(store: StoreFiles) -> None:
    id = store.write_start("ant-ppo", RECORD)
    path = starts_folder(store) / f"{id}.json"
    path.write_bytes(path.read_bytes().replace(b"sweep-7", b"sweep-8"))
    with pytest.raises(DamagedError, match="is damaged"):
        store.read_start("ant-ppo", id)
    path.unlink()
    with pytest.raises(DamagedError, match="is missing"):
        store.read_start("ant-ppo", id)


def test_a_start_under_another_name_is_refused(store: StoreFiles) -> None:
    id = store.write_start("ant-ppo", RECORD)
    (starts_folder(store) / f"{id}.json").rename(starts_folder(store) / f"{'0' * 32}.json")
    with pytest.raises(FormatError, match="renamed or copied"):
        store.read_start("ant-ppo", "0" * 32)


@pytest.mark.parametrize("id", ["../../store", "", "x" * 32])
def test_only_ids_are_looked_for(store: StoreFiles, id: str) -> None:
    with pytest.raises(FormatError, match="no id of a start"):
        store.read_start("ant-ppo", id)


def test_a_value_that_no_record_can_hold_is_refused(store: StoreFiles) -> None:
    with pytest.raises(ConfigurationError):
        store.write_start("ant-ppo", dataclasses.replace(RECORD, hyperparameters={"a": object()}))
    assert not starts_folder(store).exists()


def test_an_unknown_run_has_no_starts(store: StoreFiles) -> None:
    with pytest.raises(RunNotFoundError):
        store.write_start("bee", RECORD)


def test_the_run_itself_stands_in_for_the_start_of_old_checkpoints(store: StoreFiles) -> None:
    run = run_record(experiment="old", git={"commit": "c" * 40, "dirty": False})
    with store.claim("ant-ppo"):
        store.write_run("ant-ppo", run)
    found = store.read_start("ant-ppo", None)
    assert (found.hyperparameters, found.experiment, found.git) == (run.hyperparameters, "old", run.git)
    assert (found.versions, found.host, found.device) == (run.versions, run.host, {})


def test_the_largest_record_fits(store: StoreFiles) -> None:
    # a diff of 64 KB whose every character takes six in ASCII, and hyperparameters of 900 KB
    record = dataclasses.replace(
        RECORD, hyperparameters={"text": "a" * 900_000}, git={**RECORD.git, "diff": "\x01" * (64 << 10)}
    )
    id = store.write_start("ant-ppo", record)
    assert StoreFiles.open(store.path).read_start("ant-ppo", id) == record
    assert json.loads((starts_folder(store) / f"{id}.json").read_text())["format"] == "simckpt start"
