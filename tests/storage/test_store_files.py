"""A store from creation to pruning, as its callers see it."""

import errno
import math
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from storage_helpers import (
    RUN_ID,
    ReadOnlyDisk,
    assert_same,
    checkpoint_folder,
    components,
    leaf,
    new_store,
    run_record,
    save,
    snapshot,
)

from simckpt.errors import (
    CheckpointNotFoundError,
    ConfigurationError,
    ConflictError,
    FormatError,
    InvalidNameError,
    LeafNotFoundError,
    NotAStoreError,
    RunNotFoundError,
)
from simckpt.state.tree import Encoded
from simckpt.storage import CommitDraft, CommitRecord, StoreFiles, TombstoneRecord, processes, records
from simckpt.storage.durable import Disk


@pytest.fixture
def store(tmp_path):
    return new_store(tmp_path / "store")


def test_a_store_is_created_once_and_keeps_its_id(tmp_path):
    first = StoreFiles.create(tmp_path / "new" / "deep" / "store")
    assert StoreFiles.create(first.path).id == first.id
    assert StoreFiles.open(first.path).id == first.id
    assert first.runs() == []
    assert snapshot(first.path).keys() == {"store.json"}


def test_processes_that_create_a_store_at_once_agree_on_its_id(tmp_path):
    code = (
        "import sys; from simckpt.storage import StoreFiles; sys.stdin.readline();"
        f"print(StoreFiles.create({str(tmp_path / 'store')!r}).id)"
    )
    creators = [
        subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    for creator in creators:
        creator.stdin.write("go\n")
        creator.stdin.flush()
    assert len({creator.communicate()[0] for creator in creators}) == 1


def test_what_is_no_store_is_said_so(tmp_path):
    for path in (tmp_path, tmp_path / "missing"):
        with pytest.raises(NotAStoreError, match="not a store"):
            StoreFiles.open(path)
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(NotAStoreError, match="file"):
        StoreFiles.open(tmp_path / "thesis.tex")
    with pytest.raises(NotAStoreError, match=r"thesis\.tex"):
        StoreFiles.create(tmp_path)
    with pytest.raises(NotAStoreError):
        StoreFiles.create(tmp_path / "thesis.tex")


def test_a_run_keeps_its_record(store):
    values = {
        "a": 1,
        "b": 1.0,
        "c": True,
        "d": None,
        "e": [1, 2.5, "x"],
        "f": (1, 2),
        "g": {"h": -math.inf},
        "i": nested(99),
    }
    record = run_record(
        "sac",
        hyperparameters=values,
        origin="a" * 32,
        experiment="baseline",
        git={"commit": "c" * 40, "dirty": True},
        versions={"python": "3.11.7"},
    )
    store.write_run("sac", record)
    found = store.read_run("sac")
    assert found == record
    assert [type(value) for value in found.hyperparameters.values()] == [type(value) for value in values.values()]
    assert store.runs() == ["ant-ppo", "sac"]


def test_hyperparameters_that_no_record_can_hold_are_named(store):
    with pytest.raises(ConfigurationError, match="schedule") as caught:
        store.write_run("x", run_record("x", hyperparameters={"lr": 1.0, "schedule": object()}))
    assert caught.value.keys == ("schedule",)
    assert store.runs() == ["ant-ppo"]


def test_a_run_is_created_by_one_process_and_changed_by_its_holder(store):
    with pytest.raises(ConflictError):
        store.write_run("ant-ppo", run_record(hyperparameters={"learning_rate": 1.0}))
    with store.claim("ant-ppo"):
        store.write_run("ant-ppo", run_record(hyperparameters={"learning_rate": 1.0}))
        with pytest.raises(ConflictError, match="identity"):
            store.write_run("ant-ppo", run_record(id="f" * 32))
    assert store.read_run("ant-ppo").hyperparameters == {"learning_rate": 1.0}


def test_a_run_is_recorded_before_it_is_claimed(store):
    (store.path / "runs" / "empty").mkdir()
    for name in ("new", "empty"):
        with pytest.raises(RunNotFoundError):
            store.claim(name)
    assert store.runs() == ["ant-ppo"]
    assert not (store.path / "runs" / "new").exists()


def nested(depth: int) -> list:
    value: list = []
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize(
    "changes",
    [
        {"hyperparameters": {"layers": [0.5] * 400_000}},
        {"hyperparameters": {"note": "x" * 2**20}},
        {"hyperparameters": {"deep": nested(50_000)}},
        {"hyperparameters": {"deep": nested(101)}},
        {"hyperparameters": {"long": 10**5000}},
        {"hyperparameters": {1: 2}},
        {"experiment": "x" * 4097},
        {"experiment": 5},
        {"origin": "ant-ppo@latest"},
        {"host": "x" * 4097},
        {"host": None},
        {"versions": {"python": 3.11}},
        {"git": {"commit": object()}},
        {"id": "1"},
    ],
    ids="-".join,
)
def test_a_run_that_no_reader_would_take_is_refused_and_leaves_nothing(store, changes):
    before = snapshot(store.path)
    with pytest.raises(ConfigurationError):
        store.write_run("new", run_record("new", **changes))
    with store.claim("ant-ppo"), pytest.raises(ConfigurationError):
        store.write_run("ant-ppo", run_record(**changes))
    assert snapshot(store.path) == before


@pytest.mark.parametrize(
    "changes",
    [
        {"step": 2**63},
        {"step": -1},
        {"step": True},
        {"step": 1.0},
        {"parent": "ant-ppo@latest"},
        {"kind": "rescue"},
        {"metrics": {1: 2.0}},
        {"versions": {"python": 3.11}},
        {"versions": {"python": "x" * 5000}},
        {"host": None},
        {"kind": "rollback", "rollback": {"changes": nested(50_000)}},
        {"kind": "rollback", "rollback": {"level": object()}},
    ],
    ids="-".join,
)
def test_a_commit_that_no_reader_would_take_is_refused_and_leaves_nothing(store, changes):
    save(store, 1)
    before = snapshot(store.path)
    with pytest.raises(ConfigurationError):
        store.commit("ant-ppo", replace(CommitDraft(None, 2), **changes), components())
    assert snapshot(store.path) == before
    assert save(store, 3).seq == 2


@settings(max_examples=200, deadline=None)
@given(
    step=st.integers(),
    host=st.text(),
    metrics=st.dictionaries(st.text(), st.floats(), max_size=30),
    versions=st.dictionaries(st.text(), st.text(), max_size=5),
    reason=st.text(max_size=600),
)
def test_every_record_is_refused_or_read_back(step, host, metrics, versions, reason):
    record = CommitRecord("a" * 32, "b" * 32, 1, None, "save", step, 1.5e9, metrics, versions=versions, host=host)
    try:
        data = record.to_bytes()
    except ConfigurationError:
        assert not 0 <= step < 2**63 or len(repr((metrics, versions, host))) > 500
        return
    assert len(data) <= 4096
    assert repr(records.parse_commit(data, "p", seq=1)) == repr(record)  # NaN differs from itself, its text does not
    tombstone = records.tombstone_of(record, pruned=1.6e9, reason=reason)
    assert repr(records.parse_commit(tombstone.to_bytes(), "p", seq=1)) == repr(tombstone)


@pytest.mark.parametrize(
    ("name", "key", "kind"), [("x" * 4097, "a", "numpy"), ("a", "x" * 4097, "numpy"), ("a", "x", "k" * 201)]
)
def test_an_index_that_no_reader_would_take_is_refused_and_leaves_nothing(store, name, key, kind):
    with store.claim("ant-ppo"):
        save(store, 1)
        before = snapshot(store.path / "runs" / "ant-ppo" / "checkpoints")
        with pytest.raises(FormatError):
            store.commit("ant-ppo", CommitDraft(None, 2), {name: Encoded({key: leaf(np.zeros(2), kind=kind)}, b"{}")})
        assert snapshot(store.path / "runs" / "ant-ppo" / "checkpoints") == before
        assert list((store.path / "tmp").iterdir()) == []
        assert save(store, 3).seq == 2


def test_an_unknown_run_is_an_error_with_the_near_names(store):
    for call in (store.read_run, store.records, store.events, lambda run: store.read(run, 1)):
        with pytest.raises(RunNotFoundError, match="did you mean ant-ppo"):
            call("ant-pp0")
    with pytest.raises(KeyError):
        store.prune("ant-pp0", 1, "x")
    for call in (store.read_run, store.records, store.claim):
        with pytest.raises(InvalidNameError):
            call("../ant-ppo")


def test_checkpoints_are_numbered_in_the_order_of_commits(store):
    with store.claim("ant-ppo"):
        ids = [save(store, step, parent=None).id for step in (5, 3, 3)]
    found = store.records("ant-ppo")
    assert [(record.seq, record.step, record.id) for record in found] == [
        (1, 5, ids[0]),
        (2, 3, ids[1]),
        (3, 3, ids[2]),
    ]
    for seq, seed in ((1, 5), (2, 3), (3, 3)):
        assert_same(store.read("ant-ppo", seq), components(seed))


def test_a_commit_record_says_all_that_was_given(tmp_path):
    store = StoreFiles.create(tmp_path / "store", new_id=lambda: "c" * 32)
    store.write_run("ant-ppo", run_record())
    metrics = {"eval/return": math.nan, "best": math.inf, "loss": -0.0, "x": 0.1}
    draft = CommitDraft(
        "b" * 32, 7, metrics, versions={"torch": "2.13.0"}, host="node-3", kind="rollback",
        rollback={"abandoned": "d" * 32, "level": 2, "changes": {"learning_rate": 1e-4}},
    )  # fmt: skip
    given = store.commit("ant-ppo", draft, components()).record
    (found,) = store.records("ant-ppo")
    assert isinstance(found, CommitRecord)
    assert repr(found) == repr(given)  # NaN differs from itself, its text does not
    assert (found.id, found.run, found.parent, found.step, found.host) == ("c" * 32, RUN_ID, "b" * 32, 7, "node-3")
    assert math.copysign(1, found.metrics["loss"]) == -1
    sizes = {file.name: file.size for file in found.files}
    assert sizes == {name: (checkpoint_folder(store) / name).stat().st_size for name in ("state.h5", "leaves.json")}
    assert (checkpoint_folder(store) / "commit.json").stat().st_size <= 4096


def test_too_many_metrics_are_refused_before_anything_is_written(store):
    draft = CommitDraft(None, 0, {f"a rather long name {number}": 0.1 for number in range(200)})
    with pytest.raises(ConfigurationError, match="4096"):
        store.commit("ant-ppo", draft, components())
    assert store.records("ant-ppo") == []
    assert save(store).seq == 1


def test_single_components_and_leaves_are_read_alone(store):
    save(store, 4)
    (checkpoint_folder(store) / "state.h5").rename(checkpoint_folder(store) / "hidden")
    index = store.index("ant-ppo", 1)
    assert index.components == ("envs", "agent")
    assert [leaf.path for leaf in index][:2] == ["envs/physics/qpos", "envs/physics/qvel"]
    (checkpoint_folder(store) / "hidden").rename(checkpoint_folder(store) / "state.h5")
    assert_same(store.read("ant-ppo", 1, ["agent"]), {"agent": components(4)["agent"]})
    found = store.read_leaves("ant-ppo", 1, ["agent/0/weight"])["agent/0/weight"]
    assert (found.dtype, found.kind, found.data.dtype.str) == ("bfloat16", "torch", "<u2")
    with pytest.raises(LeafNotFoundError, match="physics/qpos"):
        store.read_leaves("ant-ppo", 1, ["envs/physics/qpo"])
    with pytest.raises(LeafNotFoundError, match="envs, agent"):
        store.read("ant-ppo", 1, ["replay"])


@pytest.mark.parametrize("seq", [0, 2, -1, 10**9])
def test_a_checkpoint_that_does_not_exist_is_said_so(store, seq):
    save(store)
    for call in (store.read, store.index, store.verify):
        with pytest.raises(CheckpointNotFoundError):
            call("ant-ppo", seq)


def test_reading_changes_nothing_on_disk(store):
    save(store, 1)
    store.prune("ant-ppo", 1, "test")
    save(store, 2)
    store.log_event("ant-ppo", {"event": "test"})
    before = {path: (path.lstat().st_mtime_ns, path.lstat().st_ino) for path in store.path.rglob("*")}
    reader = StoreFiles.open(store.path, disk=ReadOnlyDisk())
    assert reader.runs() == ["ant-ppo"]
    reader.read_run("ant-ppo")
    reader.records("ant-ppo")
    reader.events("ant-ppo")
    reader.verify("ant-ppo", 2)
    assert_same(reader.read("ant-ppo", 2), components(2))
    assert {path: (path.lstat().st_mtime_ns, path.lstat().st_ino) for path in store.path.rglob("*")} == before


def test_a_foreign_commit_under_a_claim_is_a_conflict_and_replaces_nothing(store):
    with store.claim("ant-ppo"):
        save(store, 1)
        foreign = checkpoint_folder(store, 2)
        foreign.mkdir()
        (foreign / "file").write_bytes(b"another writer's")
        for _ in range(2):
            with pytest.raises(ConflictError):
                save(store, 2)
    assert snapshot(foreign) == {"file": b"another writer's"}
    assert list((store.path / "tmp").iterdir()) == []


def test_an_empty_folder_in_the_way_is_a_conflict_too(store):
    with store.claim("ant-ppo"):
        save(store, 1)
        checkpoint_folder(store, 2).mkdir()
        with pytest.raises(ConflictError):
            save(store, 2)


def test_pruning_leaves_a_tombstone_with_the_lineage(store):
    first = save(store, 1)
    second = store.commit("ant-ppo", CommitDraft(first.id, 2, {"eval/return": 3.5}), components(2)).record
    third = save(store, 3, parent=second.id)
    tombstone = store.prune("ant-ppo", 2, "not among the last")
    found = store.records("ant-ppo")
    assert found == [first, tombstone, third]
    assert isinstance(tombstone, TombstoneRecord)
    assert (tombstone.id, tombstone.parent, tombstone.step, tombstone.seq) == (second.id, first.id, 2, 2)
    assert (tombstone.metrics, tombstone.reason) == ({"eval/return": 3.5}, "not among the last")
    assert snapshot(checkpoint_folder(store, 2)).keys() == {"commit.json"}
    with pytest.raises(CheckpointNotFoundError, match="not among the last"):
        store.read("ant-ppo", 2)
    assert store.prune("ant-ppo", 2, "again") == tombstone
    assert save(store, 4).seq == 4
    assert_same(store.read("ant-ppo", 3), components(3))


def test_the_newest_number_is_not_used_again_after_it_was_pruned(store):
    save(store, 1)
    store.prune("ant-ppo", 1, "test")
    assert save(store, 2).seq == 2


def test_a_long_reason_is_cut_so_that_the_tombstone_fits(store):
    save(store, 1)
    store.prune("ant-ppo", 1, "x" * 100_000)
    (found,) = store.records("ant-ppo")
    assert 100 < len(found.reason) < 1000


def test_a_reason_is_cut_where_the_metrics_leave_no_room(store):
    metrics = {f"eval/return of level {number}": number / 3 for number in range(75)}
    store.commit("ant-ppo", CommitDraft(None, 1, metrics), components())
    assert (checkpoint_folder(store) / "commit.json").stat().st_size > 3200
    tombstone = store.prune("ant-ppo", 1, "ä" * 500)
    assert (checkpoint_folder(store) / "commit.json").stat().st_size <= 4096
    assert store.records("ant-ppo") == [tombstone]
    assert tombstone.metrics == metrics
    assert set(tombstone.reason) == {"ä"}


def test_leftovers_that_cannot_be_removed_block_nobody(tmp_path):
    class GuardedDisk(Disk):
        """One folder belongs to somebody else."""

        def unlink(self, path):
            if path.parent.stat().st_ino == theirs:
                raise PermissionError(errno.EACCES, "Permission denied")
            super().unlink(path)

    theirs = None
    store = new_store(tmp_path / "store", disk=GuardedDisk())
    here = processes.this_process()
    dead = [processes.Process(here.host, here.boot_id, here.namespace, 2**22 + 5, start) for start in (1, 2, 3)]
    folders = [store.path / "tmp" / process.token("00000000") for process in dead]
    for folder in folders:
        folder.mkdir(parents=True)
        (folder / "state.h5").write_bytes(b"half a state")
    theirs = folders[1].stat().st_ino
    with store.claim("ant-ppo"):
        assert save(store).seq == 1
        assert [folder for folder in folders if folder.exists()] == [folders[1]]
        assert store.sweep() == []
    assert StoreFiles.open(store.path).sweep() == [folders[1].name]


def test_leftovers_of_the_dead_are_swept_and_those_of_the_living_stay(store):
    here = processes.this_process()
    left = {
        "dead": processes.Process(here.host, here.boot_id, here.namespace, 2**22 + 5, 1),
        "rebooted": processes.Process(here.host, "0" * 32, 0, 1, 1),
        "living": processes.Process(here.host, here.boot_id, here.namespace, here.pid, here.started),
        "elsewhere": processes.Process("elsewhere", "0" * 32, 0, 1, 1),
    }
    paths = {}
    for number, (name, process) in enumerate(left.items()):
        paths[name] = store.path / "tmp" / process.token(f"{number:08x}")
        (paths[name] / "inner").mkdir(parents=True)
        (paths[name] / "inner" / "state.h5").write_bytes(b"half a state")
    with store.claim("ant-ppo"):
        assert [name for name, path in paths.items() if path.exists()] == ["living", "elsewhere"]
    day = 86_400
    moment = paths["elsewhere"].stat().st_mtime - day - 1
    os.utime(paths["elsewhere"], (moment, moment))
    store.sweep()
    assert [name for name, path in paths.items() if path.exists()] == ["living"]


def test_the_log_keeps_whole_lines_and_forgives_torn_ones(store):
    store.log_event("ant-ppo", {"event": "saved", "step": 1})
    log = store.path / "runs" / "ant-ppo" / "events.jsonl"
    with log.open("ab") as file:
        file.write(b'{"event": "sav')
    assert [event["event"] for event in store.events("ant-ppo")] == ["saved"]
    store.log_event("ant-ppo", {"event": "pruned", "path": Path("x")})
    assert [event["event"] for event in store.events("ant-ppo")] == ["saved", "pruned"]
    assert store.events("ant-ppo")[0]["time"].endswith("+00:00")


def test_times_and_ids_are_those_that_were_passed_in(tmp_path):
    ids = iter(["1" * 32, "2" * 32])
    store = StoreFiles.create(tmp_path / "store", clock=lambda: 1.5e9, new_id=lambda: next(ids))
    store.write_run("ant-ppo", run_record())
    assert (store.id, store.record.created) == ("1" * 32, 1.5e9)
    record = save(store)
    assert (record.id, record.created) == ("2" * 32, 1.5e9)
    assert '"utc": "2017-07-14T02:40:00.000+00:00"' in (checkpoint_folder(store) / "commit.json").read_text()


def test_a_store_may_be_moved(store, tmp_path):
    save(store, 1)
    moved = store.path.rename(tmp_path / "moved")
    assert_same(StoreFiles.open(moved).read("ant-ppo", 1), components(1))


def test_two_runs_of_a_store_are_written_at_once(store):
    store.write_run("other", run_record("other", id="e" * 32))
    with store.claim("ant-ppo"), store.claim("other"):
        save(store, 1)
        save(store, 2, run="other")
    assert_same(store.read("other", 1), components(2))
