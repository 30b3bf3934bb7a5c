"""Stores written by every released version restore bit for bit, and the current version still writes its own."""

import shutil
from pathlib import Path

import h5py
import make_golden
import numpy as np
import pytest
import torch
from source_helpers import read_source

import simckpt
from simckpt.state.tree import decode
from simckpt.storage import StoreFiles, TombstoneRecord, exports, sealed

GOLDEN = Path(__file__).parent / "golden"
VERSIONS = sorted(path.name for path in GOLDEN.iterdir())
WITH_SEGMENTS, WITH_BRANCHES = VERSIONS[1:], VERSIONS[2:]


def files(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in sorted(root.rglob("*")) if path.is_file()}


def assert_same(found: object, expected: object, path: str) -> None:
    """Equality of types and bits."""
    assert type(found) is type(expected), path
    if isinstance(expected, dict):
        assert list(found) == list(expected), path
        for key in expected:
            assert_same(found[key], expected[key], f"{path}/{key}")
    elif isinstance(expected, list):
        assert len(found) == len(expected), path
        for number, item in enumerate(expected):
            assert_same(found[number], item, f"{path}/{number}")
    elif isinstance(expected, torch.Tensor):
        assert (found.dtype, found.shape) == (expected.dtype, expected.shape), path
        assert torch.equal(found.view(torch.int16), expected.view(torch.int16)), path
    elif isinstance(expected, np.ndarray):
        assert (found.dtype, found.shape) == (expected.dtype, expected.shape), path
        assert found.tobytes() == expected.tobytes(), path
    else:
        assert repr(found) == repr(expected), path


@pytest.mark.parametrize("version", VERSIONS)
def test_golden_stores_restore_bit_for_bit(version):
    store = StoreFiles.open(GOLDEN / version)
    first, second, third = store.records(make_golden.RUN)[:3]
    assert isinstance(second, TombstoneRecord)
    assert (first.parent, second.parent, third.parent) == (None, first.id, second.id)
    for record, step in ((first, 137), (third, 411)):
        assert (record.step, record.metrics["eval/return"]) == (step, step / 3)
        store.verify(make_golden.RUN, record.seq)
        encoded = store.read(make_golden.RUN, record.seq)
        assert_same_state(encoded, make_golden.trees(step, version))
        found = {"agent/policy": decode(encoded["agent/policy"].leaves, encoded["agent/policy"].structure)}
        # one tensor under two names stays one tensor
        assert found["agent/policy"]["tied"] is found["agent/policy"][0]["weight"]


@pytest.mark.parametrize("version", VERSIONS)
def test_golden_runs_keep_their_records(version):
    record = StoreFiles.open(GOLDEN / version).read_run(make_golden.RUN)
    assert (record.id, record.experiment, record.host) == ("f" * 32, "golden", "golden")
    assert repr(dict(record.hyperparameters)) == (
        "{'learning_rate': 0.0003, 'layers': (64, 64), 'seed': 1, 'anneal': True, 'env_id': 'Ant-v5', 'clip': None, "
        "'target_kl': inf}"
    )


def test_the_current_version_has_a_golden_store_and_still_writes_the_same(tmp_path):
    """All but HDF5's own metadata, which a later libhdf5 may lay out differently."""
    version = f"v{sealed.VERSION[0]}.{sealed.VERSION[1]}"
    assert version in VERSIONS
    made, golden = files(make_golden.make(tmp_path / "store").path), files(GOLDEN / version)
    assert made.keys() == golden.keys()
    by_layout = (".h5", "leaves.json", "commit.json")
    same_layout = all(made[name] == golden[name] for name in made if name.endswith(".h5"))
    for name in made:
        if same_layout or not name.endswith(by_layout):
            assert made[name] == golden[name], name


@pytest.mark.parametrize("version", VERSIONS)
def test_golden_state_opens_in_any_hdf5_viewer(version):
    envs = make_golden.trees(411)["envs"]
    with h5py.File(GOLDEN / version / "runs" / make_golden.RUN / "checkpoints" / "00000003" / "state.h5") as file:
        for path in ("physics/qpos", "physics/qvel", "special", "empty", "done", "scalar", "eval%2Freturn"):
            found = file["envs"][path][...]
            array = envs["physics"][path[8:]] if path.startswith("physics/") else envs[path.replace("%2F", "/")]
            assert (found.dtype, found.shape, found.tobytes()) == (array.dtype, array.shape, array.tobytes())


@pytest.mark.parametrize("version", WITH_SEGMENTS)
def test_golden_segments_are_shared_wrapped_and_seen_whole_in_any_viewer(version):
    store = StoreFiles.open(GOLDEN / version)
    leaves = store.index(make_golden.RUN, 3).leaves
    assert [(piece.start, piece.stop, piece.rows) for piece in leaves["replay/rewards"].pieces] == [
        (2, 6, 6),
        (0, 6, 6),
    ]
    (table,) = leaves["frozen/table"].pieces
    assert (table.start, table.stop) == (0, 1024)
    assert store.index(make_golden.RUN, 1).leaves["frozen/table"].pieces == ()
    segments = {piece.segment for seq in (1, 3) for leaf in store.index(make_golden.RUN, seq) for piece in leaf.pieces}
    assert {path.stem for path in (GOLDEN / version / "segments").iterdir()} == segments
    with h5py.File(GOLDEN / version / "runs" / make_golden.RUN / "checkpoints" / "00000003" / "state.h5") as file:
        for name, expected in {**make_golden.replay(411), **make_golden.frozen()}.items():
            if name != "rows_added":
                found = (file["replay"] if name in file["replay"] else file["frozen"])[name][...]
                assert (found.dtype, found.shape, found.tobytes()) == (
                    expected.dtype, expected.shape, expected.tobytes()
                )  # fmt: skip


@pytest.mark.parametrize("version", WITH_SEGMENTS)
def test_golden_starts_and_marks_are_read(version):
    store = StoreFiles.open(GOLDEN / version)
    record = store.records(make_golden.RUN)[2]
    start = store.read_start(make_golden.RUN, record.start)
    assert (start.git["diff"], start.device, start.host) == ("-1\n+2\n", {"cpu": "golden"}, "golden")
    marks = store.marks_of(make_golden.RUN, record.id)
    assert (marks.tags, marks.pinned, dict(marks.metrics)) == ({"good"}, True, {"eval/late": 2.5})


@pytest.mark.parametrize("version", VERSIONS)
def test_golden_runs_say_where_they_come_from(version):
    store = StoreFiles.open(GOLDEN / version)
    record = store.read_run(make_golden.RUN)
    assert (record.origin, record.branch, record.imported) == (None, None, None)
    if version not in WITH_BRANCHES:
        assert store.runs() == [make_golden.RUN]
        return
    assert store.runs() == [make_golden.BRANCH, make_golden.IMPORT, make_golden.RUN]
    abandoned = store.commit_record(make_golden.RUN, 3)
    branch = store.read_run(make_golden.BRANCH)
    assert branch.origin == abandoned.id
    assert repr(branch.branch) == (
        "BranchRecord(run='golden-ppo', seq=3, step=411, overrides={'learning_rate': 0.0001, 'layers': (32,)}, "
        "rng='reseed')"
    )
    assert repr(store.read_run(make_golden.IMPORT).imported) == (
        f"ImportRecord(store='{'e' * 32}', run='elsewhere', checkpoint='{'d' * 32}')"
    )
    assert store.commit_record(make_golden.IMPORT, 1).kind == "import"
    assert store.commit_record(make_golden.BRANCH, 1).parent == abandoned.id


@pytest.mark.parametrize("version", WITH_BRANCHES)
def test_golden_rollbacks_and_branches_restore_bit_for_bit(version):
    store = StoreFiles.open(GOLDEN / version)
    target, _, abandoned, back = store.records(make_golden.RUN)
    assert (back.kind, back.parent, back.step) == ("rollback", target.id, 137)
    assert back.rollback == {
        "abandoned": abandoned.id,
        "level": 1,
        "changes": {
            "description": "Reseed() & Scale(learning_rate=0.5)",
            "hyperparameters": {"learning_rate": 1.5e-4},
        },
        "reason": "eval/return fell",
    }
    assert store.read_start(make_golden.RUN, back.start).hyperparameters["learning_rate"] == 1.5e-4
    assert_same_state(store.read(make_golden.RUN, 4), make_golden.trees(137, version))
    later = make_golden.trees(411, version)
    wanted = {"loop": later["loop"], "replay": later["replay"]}
    assert_same_state(store.read(make_golden.BRANCH, 1), wanted)
    exported = exports.open_export(GOLDEN / version / "exported.h5")
    assert_same_state(read_source(exported), wanted)
    assert (exported.run, exported.store) == (store.read_run(make_golden.BRANCH), store.id)
    assert exported.commit.metrics == {"eval/return": 0.5}


def assert_same_state(found, expected) -> None:
    assert list(found) == list(expected)
    for name, encoded in found.items():
        assert_same(decode(encoded.leaves, encoded.structure), expected[name], name)


@pytest.mark.parametrize("version", VERSIONS)
def test_golden_checkpoints_can_be_branched_from_and_imported(version, tmp_path):
    shutil.copytree(GOLDEN / version, tmp_path / "old")
    store = simckpt.Store(tmp_path / "old")
    origin = store.checkpoint(make_golden.RUN)
    wanted = make_golden.trees(origin.step, version)
    trial = origin.branch("trial", {"learning_rate": 1e-5, "layers": [8, 8, 8]})
    assert (trial.hyperparameters["layers"], trial.hyperparameters["learning_rate"]) == ((8, 8, 8), 1e-5)
    assert_same_state(trial.origin().read(), wanted)
    other = simckpt.Store(tmp_path / "new")
    copies = [other.import_checkpoint(origin), other.import_checkpoint(origin.export(tmp_path / "one.h5"))]
    assert copies[0] == copies[1]
    assert_same_state(copies[0].read(), wanted)
    assert copies[0].hyperparameters == origin.hyperparameters
