"""Encoded components and stores for the tests of storage; nothing here comes from the code under test but its types."""

import json
from pathlib import Path

import numpy as np

from simckpt.state.leaf import Leaf
from simckpt.state.tree import Encoded
from simckpt.storage import CommitDraft, RunRecord, StoreFiles
from simckpt.storage.durable import Disk

RUN_ID = "0123456789abcdef" * 2


def leaf(array: np.ndarray, *, dtype: str | None = None, kind: str = "numpy") -> Leaf:
    return Leaf(array, dtype or array.dtype.name, array.shape, kind)


def components(seed: int = 0) -> dict[str, Encoded]:
    """Two components whose values depend on the seed and whose layout does not."""
    rng = np.random.default_rng(seed)
    envs = {
        "physics/qpos": leaf(rng.standard_normal((3, 5))),
        "physics/qvel": leaf(rng.standard_normal((3, 4)).astype(np.float32)),
        "python/empty": leaf(np.empty((0, 7), np.int32)),
    }
    agent = {
        "0/weight": leaf(rng.integers(0, 2**16, (4, 4), np.uint16), dtype="bfloat16", kind="torch"),
        "0/bias": leaf(rng.standard_normal(()), kind="torch"),
    }
    return {
        "envs": Encoded(envs, json.dumps({"seed": seed, "names": ["qpos", "qvel"]}).encode()),
        "agent": Encoded(agent, b'{"layers":1}'),
    }


def run_record(name: str = "ant-ppo", **changes: object) -> RunRecord:
    fields = {"id": RUN_ID, "name": name, "created": 1.8e9, "hyperparameters": {"learning_rate": 3e-4}, "host": "here"}
    return RunRecord(**{**fields, **changes})


def new_store(path: Path, *, disk: Disk | None = None, run: str = "ant-ppo") -> StoreFiles:
    store = StoreFiles.create(path, disk=disk)
    store.write_run(run, run_record(run))
    return store


def save(store: StoreFiles, seed: int = 0, *, run: str = "ant-ppo", parent: str | None = None):
    return store.commit(run, CommitDraft(parent, step=seed), components(seed)).record


def assert_same(found: dict[str, Encoded], expected: dict[str, Encoded]) -> None:
    """Equality of every bit, name, dtype and shape."""
    assert list(found) == list(expected)
    for name, encoded in expected.items():
        assert found[name].structure == encoded.structure
        assert list(found[name].leaves) == list(encoded.leaves)
        for key, wanted in encoded.leaves.items():
            got = found[name].leaves[key]
            assert (got.dtype, got.shape, got.kind) == (wanted.dtype, wanted.shape, wanted.kind), key
            assert (got.data.dtype.str, got.data.shape) == (wanted.data.dtype.str, wanted.data.shape), key
            assert got.data.tobytes() == wanted.data.tobytes(), key


def checkpoint_folder(store: StoreFiles, seq: int = 1, run: str = "ant-ppo") -> Path:
    return store.path / "runs" / run / "checkpoints" / f"{seq:08d}"


def snapshot(root: Path) -> dict[str, bytes]:
    """Every file below a folder, with its content."""
    return {str(path.relative_to(root)): path.read_bytes() for path in sorted(root.rglob("*")) if path.is_file()}


class ReadOnlyDisk(Disk):
    """A disk on which any attempt to change something fails the test."""

    def __getattribute__(self, name: str):
        if not name.startswith("_"):
            raise AssertionError(f"a change to the disk: {name}")
        return super().__getattribute__(name)
