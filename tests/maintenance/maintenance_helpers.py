"""Stores with one of everything that a check looks at, and ways to damage their files."""

import os
from collections.abc import Callable
from pathlib import Path

import h5py
import numpy as np
import xxhash
from log_helpers import RUN, Log, state
from storage_helpers import run_record

from simckpt.maintenance.check import Scope
from simckpt.maintenance.findings import Report
from simckpt.storage import BranchRecord, CommitDraft, CommitRecord, StartRecord, StoreFiles

BRANCH = "low-lr"
# every file of a store that has a digest, or is covered by one
KINDS = ("store", "run", "branch", "commit", "tombstone", "index", "state", "segment", "start", "metrics", "tag", "job")
PLAIN = Scope(structure=False)


def weights(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(700)  # more than a page


def commit(store: StoreFiles, log: Log, run: str = RUN, **draft: object) -> CommitRecord:
    log.forget(store.missing_segments({piece.segment for table in log.pieces.values() for piece, _ in table}))
    values = {"parent": None, "step": log.added, **draft}
    done = store.commit(run, CommitDraft(**values), state(log, weights=weights(log.added)))
    log.committed(done)
    return done.record


def rich_store(path: Path) -> StoreFiles:
    """Run `ant-ppo`: 1 pruned, 2 tagged and with later metrics, 3, 4 rolled back from 3 to 2; `low-lr`, from 3, has 1.

    Rows are shared: those of segment k, made by commit k, are in commits k, k + 1 of a ring of 40 rows, 20 a save.
    """
    store = StoreFiles.create(path)
    store.write_run(RUN, run_record(RUN))
    start = store.write_start(RUN, StartRecord(1.8e9, {"learning_rate": 3e-4}, "e", None, {"simckpt": "0"}, "here"))
    log, parent, made = Log(capacity=40), None, []
    for number in range(1, 5):
        log.add(20)
        draft = {"parent": parent, "start": start, "metrics": {"loss": float(number)}}
        if number == 4:
            facts = {"abandoned": made[-1].id, "level": 1, "changes": {}, "reason": "r"}
            draft |= {"kind": "rollback", "rollback": facts, "parent": made[1].id}
        made.append(commit(store, log, **draft))
        parent = made[-1].id
    store.tag(RUN, 2, "good")
    store.add_metrics(RUN, 2, {"eval/return": 5.0})
    branch = BranchRecord(RUN, 3, 60, {"learning_rate": 1e-4})
    store.write_run(BRANCH, run_record(BRANCH, id="e" * 32, origin=made[2].id, branch=branch))
    twin = Log(capacity=40)
    twin.added = 60
    twin.captured = 60
    leaves = store.index(RUN, 3).leaves
    twin.committed(type("Commit", (), {"leaves": leaves})())
    twin.add(20)
    commit(store, twin, BRANCH, parent=made[2].id)
    store.prune(RUN, 1, "to show a tombstone")
    return store


def file_of(store: StoreFiles, kind: str) -> Path:
    """Returns the file of a kind that the tests damage."""
    run, branch = store.path / "runs" / RUN, store.path / "runs" / BRANCH
    second = store.index(RUN, 2).commit.id
    return {
        "store": store.path / "store.json",
        "run": run / "run.json",
        "branch": branch / "run.json",
        "commit": run / "checkpoints/00000003/commit.json",
        "tombstone": run / "checkpoints/00000001/commit.json",
        "index": run / "checkpoints/00000003/leaves.json",
        "state": run / "checkpoints/00000003/state.h5",
        "segment": segment_of(store, 3),
        "start": next((run / "starts").iterdir()),
        "metrics": run / "marks" / second / "metrics-1",
        "tag": run / "marks" / second / "tag-good",
        "job": run / "checkpoints/00000003/job.json",
    }[kind]


def twin_of(store: StoreFiles, kind: str) -> Path | None:
    """Returns another file of the same kind, or None if the store has none."""
    run, branch = store.path / "runs" / RUN, store.path / "runs" / BRANCH
    return {
        "run": branch / "run.json",
        "branch": run / "run.json",
        "commit": run / "checkpoints/00000002/commit.json",
        "tombstone": run / "checkpoints/00000002/commit.json",
        "index": run / "checkpoints/00000002/leaves.json",
        "state": run / "checkpoints/00000002/state.h5",
        "segment": segment_of(store, 4),
    }.get(kind)


def sources(store: StoreFiles, seq: int, run: str = RUN) -> dict[str, set[str]]:
    """Returns {leaf: segments that its rows lie in} as HDF5 tells it, not the index."""
    found: dict[str, set[str]] = {}
    path = store.path / "runs" / run / f"checkpoints/{seq:08d}/state.h5"
    with h5py.File(path) as file:
        for name, dataset in file["replay"].items():
            if dataset.is_virtual:
                found[f"replay/{name}"] = {Path(each.file_name).stem for each in dataset.virtual_sources()}
    return found


def segment_of(store: StoreFiles, seq: int) -> Path:
    """Returns the segment that the save of a commit made: the one that its predecessor does not use."""
    new = set.union(*sources(store, seq).values())
    if seq > 2:
        new -= set.union(*sources(store, seq - 1).values())
    (identity,) = new
    return store.path / "segments" / f"{identity}.h5"


def place_of(path: Path, dataset: str) -> tuple[int, int]:
    """Returns offset and size of a dataset as HDF5 tells it [bytes]."""
    with h5py.File(path) as file:
        found = file[dataset]
        return found.id.get_offset(), found.id.get_storage_size()


def flip(path: Path, bit: int) -> None:
    data = bytearray(path.read_bytes())
    data[bit // 8] ^= 1 << bit % 8
    path.write_bytes(bytes(data))


def _zero_page(path: Path, twin: Path | None) -> None:
    data = bytearray(path.read_bytes())
    start = min(4096, max(0, len(data) - 64)) if len(data) > 4096 else 0
    data[start : start + 4096] = bytes(len(data[start : start + 4096]))
    path.write_bytes(bytes(data))


def _swap(path: Path, twin: Path | None) -> None:
    assert twin is not None
    ours, theirs = path.read_bytes(), twin.read_bytes()
    path.write_bytes(theirs)
    twin.write_bytes(ours)


def _append(path: Path, twin: Path | None) -> None:
    with path.open("ab") as file:
        file.write(b"garbage")


DAMAGES: dict[str, Callable[[Path, Path | None], None]] = {
    "flip": lambda path, twin: flip(path, path.stat().st_size * 4),
    "truncate": lambda path, twin: os.truncate(path, path.stat().st_size // 2),
    "empty": lambda path, twin: os.truncate(path, 0),
    "missing": lambda path, twin: path.unlink(),
    "swap": _swap,
    "zeroed page": _zero_page,
    "append": _append,
}


def lost(report: Report) -> dict[tuple[str, int], set[str]]:
    """Returns {(run, seq): leaves} of what a report says does not come back."""
    return {(each.run, each.seq): set(each.leaves) for each in report.lost}


def damaged(report: Report) -> set[str]:
    """Returns the paths of what a report calls damaged."""
    return {finding.path for finding in report.damage}


def everything(root: Path) -> dict[str, tuple[bytes, int]]:
    """Every file below a folder with content and time, to see that nothing was written."""
    return {
        str(path.relative_to(root)): (path.read_bytes(), path.stat().st_mtime_ns)
        for path in sorted(root.rglob("*"))
        if path.is_file()
    }


def resealed(body: bytes) -> bytes:
    """Returns a record after its digest was made anew, from all that is before it."""
    return body + f',\n "digest": "xxh3-128:{xxhash.xxh3_128_hexdigest(body)}"\n}}\n'.encode()
