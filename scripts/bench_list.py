"""Measures how long it takes to list, and to search, a store of many checkpoints.

The store is made of runs with many valid commit folders: one real commit, copied, each copy with a record of its own.
Printed are the cold listing (no catalog yet), the warm one (that of `simckpt ls` from the second time on), the warm one
after one more commit, a search, and beside them a plain loop that reads and verifies every commit record.

    python scripts/bench_list.py --checkpoints 10000 --runs 10
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from simckpt import Store
from simckpt.state import encode
from simckpt.storage import CommitDraft, CommitRecord, StoreFiles
from simckpt.storage.names import random_id

USAGES = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)


@dataclasses.dataclass(frozen=True)
class Measured:
    """One call: on the clock and of the processor [s], and how many checkpoints it found."""

    seconds: float
    processor: float
    found: int


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoints", type=int, default=10_000)
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--marked", type=float, default=0.01, help="share of the checkpoints that get a later metric")
    parser.add_argument("--repeats", type=int, default=7)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        os.environ["XDG_CACHE_HOME"] = str(Path(folder) / "cache")
        store = make_store(Path(folder) / "store", args.runs, args.checkpoints // args.runs, args.marked)
        count = len(store.checkpoints())
        print(f"{count:,} checkpoints in {args.runs} runs, medians of {args.repeats}")
        print(f"{'':<38}{'clock [s]':>9} {'from, to':<16}{'processor':>9}   found  of the plain loop")
        measure_all(store, Path(folder), args.repeats)


def make_store(path: Path, runs: int, per_run: int, marked: float) -> Store:
    """Returns a store in which each checkpoint has a folder, a record and an index of its own."""
    store = Store(path)
    for number in range(runs):
        with store.start(f"run-{number:04d}", experiment="bench") as run:
            run.configure({"learning_rate": 3e-4 * (number + 1), "hidden": [256, 256], "env_id": "Ant-v5"})
            start = run.start_id()
            first = commit(store.files, run.name, 0, start)
            copy_commits(store.files.path / "runs" / run.name / "checkpoints", first, per_run)
        for checkpoint in store.run(run.name).checkpoints()[: round(marked * per_run)]:
            checkpoint.add_metrics({"eval/long": 1.0})
    return store


def commit(files: StoreFiles, run: str, number: int, start: str | None, parent: str | None = None) -> CommitRecord:
    """Returns the record of a real commit of a tiny state."""
    metrics = {"train/return": float(number), "eval/return": float(number % 4000), "loss": 0.5}
    versions = {"python": "3.11.7", "simckpt": "0.1.0", "torch": "2.13.0", "mujoco": "4.0.0", "gymnasium": "1.4.0"}
    draft = CommitDraft(parent, number * 1000, metrics, versions=versions, host="bench", start=start, duration=0.5)
    return files.commit(run, draft, {"loop": encode({"step": np.int64(number)})}).record


def copy_commits(folder: Path, first: CommitRecord, count: int) -> None:
    """Copies the folder of commit 1, hard-linked but for the record, which names its predecessor as its parent."""
    source, parent = folder / "00000001", first
    for seq in range(2, count + 1):
        metrics = {**first.metrics, "train/return": float(seq), "eval/return": float(7 * seq % 4000)}
        record = dataclasses.replace(
            first,
            id=random_id(),
            seq=seq,
            parent=parent.id,
            step=seq * 1000,
            created=first.created + seq,
            metrics=metrics,
        )
        target = folder / f"{seq:08d}"
        target.mkdir()
        for name in ("state.h5", "leaves.json"):
            os.link(source / name, target / name)
        (target / "commit.json").write_bytes(record.to_bytes())
        parent = record


def measure_all(store: Store, folder: Path, repeats: int) -> None:
    def plain() -> int:
        return sum(len(store.files.records(name)) for name in store.files.runs())

    def cold() -> int:
        for path in (folder / "cache" / "simckpt").glob("*.sqlite"):
            path.unlink()
        return warm()

    def warm() -> int:
        return sum(len(contents.checkpoints) for contents in Store(store.path).contents())

    def search() -> int:
        where = "eval/return > 3000 and learning_rate < 0.002 and not pinned"
        return len(Store(store.path).checkpoints(where))

    def one_more() -> Callable[[], int]:
        name = store.files.runs()[0]
        newest = store.files.records(name)[-1]
        commit(store.files, name, newest.seq + 1, None, newest.id)
        return warm

    def command() -> int:
        done = subprocess.run(
            [sys.executable, "-m", "simckpt", "ls", str(store.path)], capture_output=True, text=True, check=True
        )
        return len(done.stdout.splitlines()) - 1

    baseline = report("plain loop over all records", [timed(plain) for _ in range(repeats)])
    report("listing, cold: no catalog yet", [timed(cold) for _ in range(repeats)], baseline)
    warm()
    report("listing, warm", [timed(warm) for _ in range(repeats)], baseline)
    report("listing after one more commit", [timed(one_more()) for _ in range(repeats)], baseline)
    report("search by metric and hyperparameter", [timed(search) for _ in range(repeats)], baseline)
    report("`simckpt ls`, start to end", [timed(command) for _ in range(3)], baseline)


def timed(function: Callable[[], int]) -> Measured:
    """Returns how long a call took, on the clock and of the processor, that of child processes included."""
    processor, start = processor_time(), time.perf_counter()
    found = function()
    return Measured(time.perf_counter() - start, processor_time() - processor, found)


def processor_time() -> float:
    return sum(sum((usage.ru_utime, usage.ru_stime)) for usage in map(resource.getrusage, USAGES))


def report(what: str, measured: list[Measured], baseline: float | None = None) -> float:
    seconds = [each.seconds for each in measured]
    middle = statistics.median(seconds)
    ratio = "" if baseline is None else f"{middle / baseline:6.2f}"
    processor = statistics.median(each.processor for each in measured)
    spread = f"({min(seconds):.2f} to {max(seconds):.2f})"
    print(f"{what:<38}{middle:8.3f}  {spread:<16}{processor:9.3f}  {measured[-1].found:6,}  {ratio}")
    return middle


if __name__ == "__main__":
    main()
