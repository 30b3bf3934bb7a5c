"""Flips single bits of the files of a store, and counts what a check of that file does not notice.

`count_flips` is what the test runs with a few thousand flips, and `make reliability` with many.
"""

import os
import random
from collections.abc import Callable
from pathlib import Path

import h5py
from log_helpers import RUN
from maintenance_helpers import KINDS, file_of

from simckpt.errors import StoreError
from simckpt.maintenance.findings import Notes
from simckpt.maintenance.verifying import Needs, collect_needs, examine_arrays, examine_references, examine_segment
from simckpt.storage import StoreFiles, marks, records, starts

# the files of arrays are larger than the records
_TURNS = (*KINDS, *("state", "segment") * 6)


def count_flips(store: StoreFiles, tries: int, *, seed: int = 0) -> dict[str, tuple[int, int]]:
    """Returns {"payload" | "metadata" | "records": (flips tried, flips not noticed)}; the store stays as it was.

    Args:
        store: of `rich_store`.
        tries: flips in all, spread over the kinds of files by turns.
        seed: of their places.
    """
    rng = random.Random(seed)
    looks = {kind: _look(store, kind) for kind in KINDS}
    paths = {kind: file_of(store, kind) for kind in KINDS}
    payloads = {kind: _payload(store, kind) for kind in ("state", "segment")}
    found = {"payload": [0, 0], "metadata": [0, 0], "records": [0, 0]}
    for turn in range(tries):
        kind = _TURNS[turn % len(_TURNS)]
        bit = rng.randrange(paths[kind].stat().st_size * 8)
        if kind in payloads:
            name = "payload" if any(start <= bit // 8 < stop for start, stop in payloads[kind]) else "metadata"
        else:
            name = "records"
        found[name][0] += 1
        found[name][1] += not _noticed(paths[kind], bit, looks[kind])
    return {name: (tried, missed) for name, (tried, missed) in found.items()}


def _noticed(path: Path, bit: int, is_damaged: Callable[[], bool]) -> bool:
    descriptor = os.open(path, os.O_RDWR)
    try:
        (before,) = os.pread(descriptor, 1, bit // 8)
        os.pwrite(descriptor, bytes([before ^ (1 << bit % 8)]), bit // 8)
        try:
            return is_damaged()
        finally:
            os.pwrite(descriptor, bytes([before]), bit // 8)
    finally:
        os.close(descriptor)


def _look(store: StoreFiles, kind: str) -> Callable[[], bool]:
    """Returns the part of a check that looks at the file of a kind; it returns whether that finds anything."""
    path = file_of(store, kind)
    index = store.index(RUN, 3)
    needs: dict[str, Needs] = {}
    for each in (2, 3, 4):
        collect_needs(store.index(RUN, each), needs)

    def arrays() -> bool:
        notes = Notes()
        examine_arrays(store, RUN, index, notes, lambda nbytes: None)
        return bool(notes.findings)

    def references() -> bool:
        notes = Notes()
        examine_references(store, RUN, index.commit, notes)
        return bool(notes.findings)

    def segment() -> bool:
        need = needs[path.stem]
        return examine_segment(store, path.stem, need, quick=False, advance=lambda nbytes: None) is not None

    def refused(read: Callable[[bytes], object]) -> Callable[[], bool]:
        def look() -> bool:
            try:
                read(path.read_bytes())
            except StoreError:
                return True
            return False

        return look

    parse_mark, checkpoint = marks.parse_mark, store.index(RUN, 2).commit.id
    return {
        "state": arrays,
        "segment": segment,
        "index": references,
        "job": references,
        "store": refused(lambda data: records.parse_store(data, path)),
        "run": refused(lambda data: store.read_run(RUN)),
        "branch": refused(lambda data: store.read_run(path.parent.name)),
        "commit": refused(lambda data: store.commit_record(RUN, 3)),
        "tombstone": refused(lambda data: store.commit_record(RUN, 1)),
        "start": refused(lambda data: starts.parse_start(data, path, id=path.stem)),
        "metrics": refused(lambda data: parse_mark(data, path, checkpoint=checkpoint, name=path.name)),
        "tag": refused(lambda data: parse_mark(data, path, checkpoint=checkpoint, name=path.name)),
    }[kind]


def _payload(store: StoreFiles, kind: str) -> list[tuple[int, int]]:
    spans = []
    with h5py.File(file_of(store, kind)) as file:

        def visit(name, each):
            if isinstance(each, h5py.Dataset) and not each.is_virtual and each.id.get_offset() is not None:
                spans.append((each.id.get_offset(), each.id.get_offset() + each.id.get_storage_size()))

        file.visititems(visit)
    return spans
