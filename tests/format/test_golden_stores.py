"""Stores written by every released version restore bit for bit, and the current version still writes its own."""

from pathlib import Path

import h5py
import make_golden
import numpy as np
import pytest
import torch

from simckpt.state.tree import decode
from simckpt.storage import StoreFiles, TombstoneRecord, sealed

GOLDEN = Path(__file__).parent / "golden"
VERSIONS = sorted(path.name for path in GOLDEN.iterdir())


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
    assert store.runs() == [make_golden.RUN]
    first, second, third = store.records(make_golden.RUN)
    assert isinstance(second, TombstoneRecord)
    assert (first.parent, second.parent, third.parent) == (None, first.id, second.id)
    for record, step in ((first, 137), (third, 411)):
        assert (record.step, record.metrics["eval/return"]) == (step, step / 3)
        store.verify(make_golden.RUN, record.seq)
        found = {
            name: decode(encoded.leaves, encoded.structure)
            for name, encoded in store.read(make_golden.RUN, record.seq).items()
        }
        expected = make_golden.trees(step, version)
        assert list(found) == list(expected)
        for name, tree in expected.items():
            assert_same(found[name], tree, name)
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


def test_golden_segments_are_shared_wrapped_and_seen_whole_in_any_viewer():
    store = StoreFiles.open(GOLDEN / "v0.2")
    leaves = store.index(make_golden.RUN, 3).leaves
    assert [(piece.start, piece.stop, piece.rows) for piece in leaves["replay/rewards"].pieces] == [
        (2, 6, 6),
        (0, 6, 6),
    ]
    (table,) = leaves["frozen/table"].pieces
    assert (table.start, table.stop) == (0, 1024)
    assert store.index(make_golden.RUN, 1).leaves["frozen/table"].pieces == ()
    segments = {piece.segment for seq in (1, 3) for leaf in store.index(make_golden.RUN, seq) for piece in leaf.pieces}
    assert {path.stem for path in (GOLDEN / "v0.2" / "segments").iterdir()} == segments
    with h5py.File(GOLDEN / "v0.2" / "runs" / make_golden.RUN / "checkpoints" / "00000003" / "state.h5") as file:
        for name, expected in {**make_golden.replay(411), **make_golden.frozen()}.items():
            if name != "rows_added":
                found = (file["replay"] if name in file["replay"] else file["frozen"])[name][...]
                assert (found.dtype, found.shape, found.tobytes()) == (
                    expected.dtype, expected.shape, expected.tobytes()
                )  # fmt: skip


def test_golden_starts_and_marks_are_read():
    store = StoreFiles.open(GOLDEN / "v0.2")
    record = store.records(make_golden.RUN)[2]
    start = store.read_start(make_golden.RUN, record.start)
    assert (start.git["diff"], start.device, start.host) == ("-1\n+2\n", {"cpu": "golden"}, "golden")
    marks = store.marks_of(make_golden.RUN, record.id)
    assert (marks.tags, marks.pinned, dict(marks.metrics)) == ({"good"}, True, {"eval/late": 2.5})
