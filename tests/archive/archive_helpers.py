"""Stores with archives for the tests; what must hold afterwards is compared with bytes that were kept aside."""

import hashlib
import json
from pathlib import Path

import numpy as np
from log_helpers import RUN, Log, state
from storage_helpers import new_store

from simckpt.archive import Archive, Patience
from simckpt.policies import KeepLast
from simckpt.storage import CommitDraft, StoreFiles
from simckpt.storage.durable import Disk
from simckpt.storage.preparing import write_prepared


class QuickDisk(Disk):
    """Syncs nothing: no test here pulls the plug, and most of their time would go into it."""

    def fsync(self, descriptor: int) -> None:
        pass


HASTY = Patience(timeout=5.0, retries=2, limit=10.0)
STATES = 4


def weights(number: int) -> np.ndarray:
    return np.arange(300.0) * number


def filled(path: Path, states: int = STATES) -> tuple[StoreFiles, Log]:
    """A store with a run of some checkpoints on one line, each with ten new rows in a segment."""
    files, log = new_store(path, disk=QuickDisk()), Log(columns=("rewards", "half"))
    with files.claim(RUN):
        for number in range(1, states + 1):
            add(files, log, number)
    return files, log


def add(files: StoreFiles, log: Log, number: int) -> str:
    """Saves one more checkpoint, of ten more rows, on the line of the head; returns its id."""
    records = files.records(RUN)
    log.add(10)
    log.forget(files.missing_segments({piece.segment for table in log.pieces.values() for piece, _ in table}))
    prepared = write_prepared(files._disk, files.prepare_job(RUN), state(log, weights=weights(number)))
    commit = files.publish(RUN, CommitDraft(records[-1].id if records else None, 10 * number), prepared)
    log.committed(commit)
    return commit.record.id


def kept_aside(files: StoreFiles) -> dict[str, bytes]:
    """{name: bytes} of every file that checkpoints consist of."""
    found = [*files.path.glob("runs/*/checkpoints/*/*"), *files.path.glob("segments/*")]
    return {str(path.relative_to(files.path)): path.read_bytes() for path in found if path.name != "job.json"}


def archive(files: StoreFiles, url: str | Path, count: int = 1) -> Archive:
    return Archive(files, str(url), policy=KeepLast(count), patience=HASTY)


def assert_restores(files: StoreFiles, seq: int) -> None:
    """A checkpoint of `filled` gives back every bit, wherever it is."""
    found = files.read(RUN, seq)
    assert found["agent"].leaves["weights"].data.tobytes() == weights(seq).tobytes()
    log = Log(columns=("rewards", "half"))
    log.add(10 * seq)
    for name, wanted in log.expected().items():
        assert found["replay"].leaves[name].data.tobytes() == wanted.tobytes(), name


def local_seqs(files: StoreFiles) -> set[int]:
    """The numbers of the checkpoints whose state is on the disk."""
    return {int(path.parent.name) for path in files.path.glob(f"runs/{RUN}/checkpoints/*/state.h5")}


def needs(index: bytes) -> set[str]:
    """The segments that an index names, read without the code under test."""
    return {f"segments/{each['id']}.h5" for each in json.loads(index).get("segments", ())}


def a_segment(files: StoreFiles, seq: int = 2) -> str:
    """A segment that this checkpoint uses and those before it do not."""
    before = files.segment_ids(RUN, seq - 1)
    (own,) = files.segment_ids(RUN, seq) - before
    return f"segments/{own}.h5"


def is_whole(there: dict[str, bytes], folder: str, originals: dict[str, bytes]) -> bool:
    """Whether all that a checkpoint needs lies somewhere, with the bytes that it had; `folder` ends with its number."""
    names = {f"{folder}/{file}" for file in ("commit.json", "leaves.json", "state.h5")}
    names |= needs(originals[f"{folder}/leaves.json"])
    return all(there.get(name) == originals[name] for name in names)


def sha256(data: bytes) -> str:
    return "sha256:" + hashlib.sha256(data).hexdigest()
