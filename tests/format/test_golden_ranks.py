"""What version 0.3 has besides, of several ranks, archived, evicted, lost and in quarantine, stays good."""

import json
import shutil
from pathlib import Path

import h5py
import make_golden_ranks as golden
import numpy as np
import pytest
import torch
from test_golden_stores import assert_same_state, files

import simckpt
from simckpt.errors import ArchiveNotNamedError
from simckpt.maintenance.check import check
from simckpt.maintenance.repair import repair
from simckpt.storage import StoreFiles, TombstoneRecord
from simckpt.storage.records import LOST

pytest.importorskip("obstore")
GOLDEN = Path(__file__).parent / "golden_ranks"
EVICTED, HERE, GONE = (1, 2, 7), (6, 8), (3, 4, 5)
QUARANTINED = [f"quarantine/runs/{golden.RUN}/checkpoints/0000000{seq}" for seq in (4, 5)]


@pytest.fixture
def copy(tmp_path):
    """A copy of the store, and beside it one of its archive."""
    shutil.copytree(GOLDEN, tmp_path / "golden")
    return tmp_path / "golden"


def folder_of(root: Path, seq: int) -> Path:
    return root / "runs" / golden.RUN / "checkpoints" / f"{seq:08d}"


def assert_restores(store: StoreFiles, seq: int) -> None:
    wanted = golden.trees(seq)
    found = store.read(golden.RUN, seq)
    # components come in the order of the ranks that have them first
    assert_same_state({name: found[name] for name in wanted}, wanted)
    assert list(found) == ["agent", "envs@0", "replay@0", "envs@1", "replay@1"]


@pytest.mark.parametrize("seq", HERE)
def test_what_is_here_restores_bit_for_bit(seq):
    store = StoreFiles.open(GOLDEN / "store")
    assert_restores(store, seq)
    store.verify(golden.RUN, seq)


def test_what_every_rank_wrote_says_so_in_any_viewer():
    """Values that are stated here, without the formulas of the state: those of commit 8, the third save of its line."""
    with h5py.File(folder_of(GOLDEN / "store", 8) / "shard-00001-of-00002.h5") as file:
        weight = file["agent/weight"]
        assert weight.attrs["part"] == b"[[3, 0], [5, 3]]"
        assert weight[...].tobytes() == np.array([[5.25, 5.5, 5.75], [6.0, 6.25, 6.5]], np.float32).tobytes()
        assert file["agent/table"][...].tolist() == [[6], [18]]
        assert file["agent/few"].shape == (0, 2)
        assert file["replay%401/rewards"][...].tolist() == [1001 + number / 8 for number in range(10)]
        assert "replay%400" not in file
        assert sorted(file["agent"]) == ["bias", "decay", "few", "half", "table", "waves", "weight"]
    found = StoreFiles.open(GOLDEN / "store").read(golden.RUN, 8)
    half = torch.from_numpy(found["agent"].leaves["half"].data.view(np.int16))
    assert half.tolist() == [[3, 4372], [8741, 13110], [17479, 21848]]


def test_what_is_in_the_archive_alone_is_listed_and_does_not_lead_anywhere_by_itself():
    store = simckpt.Store(GOLDEN / "store")
    assert store.files.evicted(golden.RUN) == set(EVICTED)
    assert [each.seq for each in store.run(golden.RUN).checkpoints()] == [1, 2, 7, 8]
    with pytest.raises(ArchiveNotNamedError, match="s3://golden/archive"):
        store.run(golden.RUN).at(step=100).read()


def test_what_is_in_the_archive_alone_comes_back_bit_for_bit(copy):
    store = simckpt.Store(copy / "store")
    # the place that the store knows is nobody's: its archive was moved here, and is known by its id
    archive = store.archive(copy / "archive")
    for seq in EVICTED:
        archive.bring_back(golden.RUN, seq)
        assert_restores(store.files, seq)
    assert store.files.evicted(golden.RUN) == set()
    assert check(copy / "store").of("damage") == ()


def test_a_copy_of_the_archive_is_a_store(copy):
    store = StoreFiles.open(copy / "archive")
    for seq in (*EVICTED, *HERE):
        assert_restores(store, seq)
    assert_same_state(store.read(golden.TRIAL, 1), golden.trial())
    assert check(copy / "archive")


def test_a_run_is_pulled_from_the_archive_bit_for_bit(copy):
    other = simckpt.Store(copy / "other")
    done = other.pull(copy / "archive")
    assert {each.run: each.commits for each in done} == {golden.RUN: 8, golden.TRIAL: 1}
    for seq in (*EVICTED, *HERE):
        assert_restores(other.files, seq)
    assert_same_state(other.files.read(golden.TRIAL, 1), golden.trial())
    assert check(copy / "other")


def test_a_check_has_nothing_to_say_but_of_the_quarantine(copy):
    report = check(copy / "store")
    assert report
    assert [(each.severity, each.path) for each in report.findings] == [("quarantined", path) for path in QUARANTINED]
    counts = report.counts
    assert (counts.runs, counts.checkpoints, counts.archived, counts.pruned) == (2, 3, 3, 3)
    assert (repair(copy / "store").actions, check(copy / "store").damage) == ((), ())


def test_tombstones_say_what_became_of_their_checkpoints():
    store = StoreFiles.open(GOLDEN / "store")
    records = store.records(golden.RUN)
    assert [isinstance(record, TombstoneRecord) for record in records] == [each.seq in GONE for each in records]
    pruned, aside, lost = (records[seq - 1] for seq in GONE)
    assert (pruned.step, pruned.kind, pruned.reason) == (300, "save", "pruned to show a tombstone")
    assert (aside.step, aside.kind, aside.parent) == (400, "save", pruned.id)
    assert json.loads((GOLDEN / "store" / QUARANTINED[0] / "commit.json").read_bytes())["id"] == aside.id
    # its id is that which its child names
    assert (lost.step, lost.kind, lost.parent, lost.id) == (0, LOST, None, records[5].parent)


def test_marks_rollbacks_and_branches_are_read():
    store = StoreFiles.open(GOLDEN / "store")
    target, abandoned, back = (store.commit_record(golden.RUN, seq) for seq in (2, 6, 7))
    marks = store.marks_of(golden.RUN, target.id)
    assert (marks.tags, marks.pinned, dict(marks.metrics)) == ({"good"}, True, {"eval/late": 2.5})
    assert (back.kind, back.parent, back.step, back.shards) == ("rollback", target.id, 200, 2)
    assert back.rollback["abandoned"] == abandoned.id
    assert store.read_run(golden.TRIAL).origin == target.id
    assert_same_state(store.read(golden.TRIAL, 1), golden.trial())


def test_a_checkpoint_is_taken_out_of_quarantine_by_hand(copy):
    root = copy / "store"
    shutil.rmtree(folder_of(root, 4))
    (root / QUARANTINED[0]).rename(folder_of(root, 4))
    report = check(root)
    # what was damaged is still damaged, and what it shares is still there
    assert {each.path for each in report.damage} == {f"runs/{golden.RUN}/checkpoints/00000004/shard-00001-of-00002.h5"}
    assert [(each.seq, each.leaves) for each in report.lost] == [(4, ("agent/weight",))]
    intact = StoreFiles.open(root).read(golden.RUN, 4, components=["envs@0", "replay@0"])
    wanted = golden.trees(4)
    assert_same_state(intact, {name: wanted[name] for name in intact})


@pytest.mark.parametrize("name", ["leaves-00001.json", "shards.json"])
def test_a_lost_index_of_several_ranks_is_made_anew(copy, name):
    root = copy / "store"
    shutil.rmtree(copy / "archive")
    shutil.rmtree(root / "archive")
    for record in root.glob("runs/*/archived/*"):
        if record.name in ("00000006.json", "00000008.json"):
            record.unlink()
    path = folder_of(root, 8) / name
    before = path.read_bytes()
    path.unlink()
    done = repair(root)
    assert [action.path for action in done.actions if action.done] == [str(path.relative_to(root))]
    assert path.read_bytes() == before
    assert check(root)


def test_a_damaged_checkpoint_comes_back_from_the_archive(copy):
    root = copy / "store"
    simckpt.Store(root).archive(copy / "archive").move()
    golden.damage(StoreFiles.open(root), 8, "shard-00000-of-00002.h5", "agent/weight")
    before = {name: data for name, data in files(GOLDEN / "store").items() if not name.startswith("archive/")}
    done = repair(root)
    assert [(action.text, action.done) for action in done.actions] == [("comes back from the archive", True)]
    after = files(root)
    assert {name: after[name] for name in before if not name.endswith("events.jsonl")} == {
        name: data for name, data in before.items() if not name.endswith("events.jsonl")
    }


def test_a_damaged_checkpoint_goes_into_quarantine_where_there_is_no_archive(copy):
    root = copy / "store"
    shutil.rmtree(root / "archive")
    (root / f"runs/{golden.RUN}/archived/00000008.json").unlink()
    golden.damage(StoreFiles.open(root), 8, "shard-00000-of-00002.h5", "agent/weight")
    (action,) = repair(root).actions
    assert (action.path, action.done) == (f"runs/{golden.RUN}/checkpoints/00000008", True)
    assert isinstance(StoreFiles.open(root).records(golden.RUN)[7], TombstoneRecord)
    assert check(root)
    assert_restores(StoreFiles.open(root), 6)


def test_prunes_and_compact_leave_what_the_quarantine_needs(copy):
    root = copy / "store"
    store = StoreFiles.open(root)
    needed = {
        identity
        for place in QUARANTINED
        for rank in range(golden.RANKS)
        for identity in [
            each["id"] for each in json.loads((root / place / f"leaves-0000{rank}.json").read_bytes())["segments"]
        ]
    }
    for seq in (6, 8):
        store.prune(golden.RUN, seq, "test")
    store.compact()
    there = {path.stem for path in (root / "segments").iterdir()}
    assert there == needed
    assert check(root).damage == ()


def test_the_current_version_still_writes_the_same(tmp_path):
    """All but HDF5's own metadata, which a later libhdf5 may lay out differently, and what vouches for it."""
    golden.make(tmp_path)
    made, kept = files(tmp_path), files(GOLDEN)
    assert made.keys() == kept.keys()
    same_layout = all(made[name] == kept[name] for name in made if name.endswith(".h5"))
    by_layout = (".h5", "leaves.json", "shards.json", "commit.json")
    for name in made:
        is_by_layout = name.endswith(by_layout) or "/leaves-" in name or "/archived/" in name
        if same_layout or not is_by_layout:
            assert made[name] == kept[name], name
