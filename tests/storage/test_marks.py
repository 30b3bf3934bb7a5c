"""Tags, pins and later metrics: files beside the commits."""

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
from storage_helpers import ReadOnlyDisk, checkpoint_folder, new_store, save, snapshot

from simckpt.errors import (
    CheckpointNotFoundError,
    ConfigurationError,
    DamagedError,
    FormatError,
    InvalidNameError,
    StorageError,
)
from simckpt.storage import Marks, StoreFiles


@pytest.fixture
def store(tmp_path: Path) -> StoreFiles:
    """A store whose run has two checkpoints."""
    files = new_store(tmp_path / "s")
    parent = save(files).id
    save(files, 1, parent=parent)
    return files


def marks_folder(store: StoreFiles, seq: int = 1) -> Path:
    id = store.records("ant-ppo")[seq - 1].id
    return store.path / "runs" / "ant-ppo" / "marks" / id


def test_a_run_without_marks_has_none(store: StoreFiles) -> None:
    assert store.marks("ant-ppo") == {}
    assert store.marks_of("ant-ppo", store.records("ant-ppo")[0].id) == Marks()


def test_marks_come_back_in_another_process(store: StoreFiles) -> None:
    store.tag("ant-ppo", 1, "good")
    store.tag("ant-ppo", 1, "paper-3")
    store.pin("ant-ppo", 1)
    store.add_metrics("ant-ppo", 2, {"eval/long": 5.0})
    code = (
        "import sys; from simckpt.storage import StoreFiles; marks = StoreFiles.open(sys.argv[1]).marks('ant-ppo');"
        "print([(sorted(each.tags), each.pinned, dict(each.metrics)) for each in marks.values()])"
    )
    done = subprocess.run([sys.executable, "-c", code, store.path], capture_output=True, text=True, check=True)
    expected = [(["good", "paper-3"], True, {}), ([], False, {"eval/long": 5.0})]
    assert sorted(eval(done.stdout)) == sorted(expected)


def test_tags_and_pins_can_be_removed_and_made_again(store: StoreFiles) -> None:
    store.tag("ant-ppo", 1, "good")
    store.pin("ant-ppo", 1)
    store.untag("ant-ppo", 1, "good")
    store.unpin("ant-ppo", 1)
    assert store.marks("ant-ppo") == {}
    store.untag("ant-ppo", 1, "good")  # a missing one is fine
    store.unpin("ant-ppo", 2)
    store.pin("ant-ppo", 1)
    store.pin("ant-ppo", 1)
    assert [each.pinned for each in store.marks("ant-ppo").values()] == [True]


def test_of_later_metrics_of_one_name_the_latest_counts(store: StoreFiles) -> None:
    for number in range(12):  # more than nine, so that the order is not that of the names
        store.add_metrics("ant-ppo", 1, {"eval/long": float(number), f"only/{number}": math.nan})
    found = store.marks_of("ant-ppo", store.records("ant-ppo")[0].id).metrics
    assert found["eval/long"] == 11.0
    assert len(found) == 13
    assert math.isnan(found["only/3"])
    assert {path.name for path in marks_folder(store).iterdir()} == {f"metrics-{number}" for number in range(1, 13)}


def test_marks_need_no_claim(store: StoreFiles) -> None:
    code = "import sys; from simckpt.storage import StoreFiles; StoreFiles.open(sys.argv[1]).tag('ant-ppo', 1, 'good')"
    with store.claim("ant-ppo"):
        subprocess.run([sys.executable, "-c", code, store.path], check=True)
        save(store, 2)
    assert [each.tags for each in store.marks("ant-ppo").values()] == [{"good"}]


def test_a_commit_is_not_changed_by_marks(store: StoreFiles) -> None:
    before = snapshot(checkpoint_folder(store))
    store.pin("ant-ppo", 1)
    store.add_metrics("ant-ppo", 1, {"a": 1.0})
    assert snapshot(checkpoint_folder(store)) == before
    assert list((store.path / "tmp").iterdir()) == []


@pytest.mark.parametrize("tag", ["", "a/b", "..", ".hidden", "a..b", "with space", "a" * 101, "ü", "-x", 5])
def test_a_text_that_cannot_be_a_file_name_everywhere_is_no_tag(store: StoreFiles, tag: object) -> None:
    with pytest.raises(InvalidNameError, match="cannot be a tag"):
        store.tag("ant-ppo", 1, tag)
    assert not marks_folder(store).exists()


def test_a_tag_may_be_called_like_another_kind_of_mark(store: StoreFiles) -> None:
    store.tag("ant-ppo", 1, "pin")
    store.tag("ant-ppo", 1, "metrics-1")
    store.tag("ant-ppo", 1, "tag-a")
    assert list(store.marks("ant-ppo").values()) == [Marks(frozenset({"pin", "metrics-1", "tag-a"}))]


def test_a_pruned_or_missing_checkpoint_takes_no_marks(store: StoreFiles) -> None:
    store.prune("ant-ppo", 1, "a test")
    for change in (store.pin, store.unpin):
        with pytest.raises(CheckpointNotFoundError, match="was pruned: a test"):
            change("ant-ppo", 1)
    with pytest.raises(CheckpointNotFoundError, match="no checkpoint number 7"):
        store.tag("ant-ppo", 7, "good")
    with pytest.raises(CheckpointNotFoundError):
        store.add_metrics("ant-ppo", 1, {"a": 1.0})


def test_metrics_that_do_not_fit_are_refused_and_nothing_is_written(store: StoreFiles) -> None:
    with pytest.raises(ConfigurationError, match="several calls"):
        store.add_metrics("ant-ppo", 1, {f"eval/{number}": 1.0 for number in range(500)})
    assert not marks_folder(store).exists()


def test_damaged_later_metrics_are_told_and_take_neither_pin_nor_other_metrics_with_them(store: StoreFiles) -> None:
    store.pin("ant-ppo", 1)
    store.add_metrics("ant-ppo", 1, {"a": 1.0})
    store.add_metrics("ant-ppo", 1, {"b": 2.0})
    path = marks_folder(store) / "metrics-1"
    path.write_bytes(path.read_bytes().replace(b"1.0", b"7.0"))
    with pytest.raises(DamagedError, match="metrics-1 is damaged"):
        store.marks("ant-ppo")
    damaged: dict = {}
    (found,) = store.marks("ant-ppo", damaged=damaged).values()
    assert found == Marks(pinned=True, metrics={"b": 2.0})
    assert list(damaged) == [store.records("ant-ppo")[0].id]


def test_damage_to_the_content_of_a_pin_does_not_unpin(store: StoreFiles) -> None:
    store.pin("ant-ppo", 1)
    (marks_folder(store) / "pin").write_bytes(b"")
    assert [each.pinned for each in store.marks("ant-ppo").values()] == [True]


def test_metrics_copied_from_another_checkpoint_are_refused(store: StoreFiles) -> None:
    store.add_metrics("ant-ppo", 1, {"a": 1.0})
    marks_folder(store, 2).mkdir()
    (marks_folder(store, 2) / "metrics-1").write_bytes((marks_folder(store) / "metrics-1").read_bytes())
    with pytest.raises(FormatError, match="renamed or copied"):
        store.marks("ant-ppo")


def test_marks_are_read_through_no_symbolic_link(store: StoreFiles, tmp_path: Path) -> None:
    store.pin("ant-ppo", 1)
    folder = marks_folder(store)
    folder.rename(tmp_path / "elsewhere")
    folder.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(FormatError, match="symbolic link"):
        store.marks("ant-ppo")
    with pytest.raises(StorageError):
        store.tag("ant-ppo", 1, "good")


def test_foreign_files_among_the_marks_are_passed_over(store: StoreFiles) -> None:
    store.pin("ant-ppo", 1)
    for name in ("notes.txt", "metrics-0", "metrics-x", "tag-", "tag-..", "Pin"):
        (marks_folder(store) / name).touch()
    (marks_folder(store).parent / "README").touch()
    assert list(store.marks("ant-ppo").values()) == [Marks(pinned=True)]


def test_reading_marks_changes_nothing(store: StoreFiles) -> None:
    store.pin("ant-ppo", 1)
    reader = StoreFiles.open(store.path, disk=ReadOnlyDisk())
    before = snapshot(store.path)
    assert len(reader.marks("ant-ppo")) == 1
    assert snapshot(store.path) == before


def test_a_mark_is_a_record(store: StoreFiles) -> None:
    store.add_metrics("ant-ppo", 1, {"a": math.inf})
    record = json.loads((marks_folder(store) / "metrics-1").read_text())
    assert record["format"] == "simckpt mark"
    assert record["checkpoint"] == store.records("ant-ppo")[0].id
    assert record["metrics"] == {"a": {"float": "inf"}}
    assert list(record)[-1] == "digest"
