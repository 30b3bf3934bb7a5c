"""A check finds every kind of damage in every kind of file, and names exactly what it harms."""

import os
import shutil
from dataclasses import replace
from pathlib import Path

import h5py
import pytest
import xxhash
from log_helpers import RUN, Log
from maintenance_helpers import (
    BRANCH,
    DAMAGES,
    KINDS,
    PLAIN,
    commit,
    damaged,
    everything,
    file_of,
    flip,
    lost,
    place_of,
    resealed,
    sources,
    twin_of,
)

import simckpt
from simckpt.errors import ConfigurationError, NotAStoreError, UnsupportedFormatError
from simckpt.maintenance.check import Scope, check
from simckpt.storage import RunRecord, StoreFiles, sealed
from simckpt.storage.index import seal_index

CHECKPOINTS = [(RUN, 2), (RUN, 3), (RUN, 4), (BRANCH, 1)]
# kinds of files that nothing refers to: one that is gone was never there
FREE = ("metrics", "tag", "job")


def datasets(path: Path) -> dict[str, tuple[int, int]]:
    """Returns {path: (offset, size)} of what has bytes in a file, as HDF5 tells it."""
    found = {}
    with h5py.File(path) as file:

        def visit(name, each):
            if isinstance(each, h5py.Dataset) and not each.is_virtual and each.id.get_offset() is not None:
                found[name] = each.id.get_offset(), each.id.get_storage_size()

        file.visititems(visit)
    return found


def changed(before: bytes, after: bytes | None) -> set[int]:
    """Returns the places of the bytes that are not what they were."""
    after = b"" if after is None else after
    return {place for place in range(len(before)) if after[place : place + 1] != before[place : place + 1]}


def expected(store: StoreFiles, kind: str, paths: list[Path], places: dict, before: dict, uses: dict) -> dict:
    """Returns {(run, seq): leaves} of what the damage to some files of a kind harms, derived from HDF5 alone."""
    found: dict[tuple[str, int], set[str]] = {}
    for path in paths:
        after = path.read_bytes() if path.exists() else None
        wrong = changed(before[path], after)
        hit = {name for name, (start, size) in places.get(path, {}).items() if wrong & set(range(start, start + size))}
        if kind == "state" and hit:
            found[RUN, int(path.parent.name)] = hit
        if kind == "segment":
            for place in CHECKPOINTS:
                leaves = {leaf for leaf in hit if path.stem in uses[place].get(leaf, ())}
                if leaves:
                    found.setdefault(place, set()).update(leaves)
        if kind in ("commit", "index", "tombstone"):
            found[RUN, int(path.parent.name)] = set()
    return found


def test_a_store_that_is_whole_is_told_to_be(store):
    before = everything(store.path)
    report = check(store.path)
    assert report
    assert report.findings == ()
    assert everything(store.path) == before
    counts = report.counts
    # 3 of 4 in the run are left, and 1 in the branch; store, 2 runs, 5 commits, 4 indexes, 4 jobs, a start, 2 marks
    assert (counts.runs, counts.checkpoints, counts.pruned, counts.records) == (2, 4, 1, 19)
    assert counts.segments == len(list((store.path / "segments").iterdir()))
    assert counts.nbytes == sum(
        path.stat().st_size
        for path in store.path.rglob("*")
        if path.is_file() and path.name not in ("commit.json", "events.jsonl") and "writer" not in path.parts
    )


@pytest.mark.parametrize("kind", KINDS)
def test_every_damage_to_every_kind_of_file_is_found_with_what_it_harms(store, kind):
    path, twin = file_of(store, kind), twin_of(store, kind)
    paths = [path] if twin is None else [path, twin]
    before = {each: each.read_bytes() for each in paths}
    places = {each: datasets(each) for each in paths if each.suffix == ".h5"}
    uses = {(run, seq): sources(store, seq, run) for run, seq in CHECKPOINTS}
    for damage, do in DAMAGES.items():
        if damage == "swap" and twin is None:
            continue
        do(path, twin)
        harmed = paths if damage == "swap" else [path]
        report = check(store.path, PLAIN)
        if damage == "missing" and kind in FREE:
            assert report, damage
        else:
            assert not report, damage
            assert damaged(report) == {str(each.relative_to(store.path)) for each in harmed}, damage
            assert lost(report) == expected(store, kind, harmed, places, before, uses), damage
            assert all(finding.meaning and finding.advice for finding in report.damage)
        for each, data in before.items():
            each.write_bytes(data)
    assert check(store.path, PLAIN)


def test_quick_finds_what_sizes_and_records_tell_and_reads_no_array(store):
    state, segment = file_of(store, "state"), file_of(store, "segment")
    offset, size = place_of(state, "agent/weights")
    behind = {name for name, (start, length) in datasets(state).items() if start + length > offset + size - 1}
    rows = set(sources(store, 4))
    flip(state, offset * 8)
    flip(segment, place_of(segment, "replay/rewards")[0] * 8)
    report = check(store.path, Scope(quick=True))
    assert report
    assert report.counts.leaves == 0
    os.truncate(state, offset + size - 1)
    os.truncate(segment, 100)
    report = check(store.path, Scope(quick=True))
    assert lost(report) == {(RUN, 3): behind | rows, (RUN, 4): rows, (BRANCH, 1): rows}


def test_parts_cover_everything_once(store):
    state, segment = file_of(store, "state"), file_of(store, "segment")
    flip(state, place_of(state, "agent/weights")[0] * 8)
    flip(segment, place_of(segment, "replay/rewards")[0] * 8)
    whole = check(store.path, PLAIN)
    parts = [check(store.path, Scope(part=(part, 3), structure=False)) for part in (1, 2, 3)]
    assert sorted(path for part in parts for path in damaged(part)) == sorted(damaged(whole))
    assert sum(part.counts.segments for part in parts) == whole.counts.segments
    assert sum(part.counts.leaves for part in parts) == whole.counts.leaves


@pytest.mark.parametrize("changes", [{"part": (0, 3)}, {"part": (4, 3)}, {"seconds": 0}])
def test_a_scope_that_makes_no_sense_is_refused(changes):
    with pytest.raises(ConfigurationError):
        Scope(**changes)


def test_a_check_that_stops_goes_on_where_it_was_and_writes_nothing_into_the_store(store):
    before = everything(store.path)
    files = 4 + len(list((store.path / "segments").iterdir()))
    left = files
    for _ in range(50):
        # the time is up at once, but for what the first look takes
        report = check(store.path, Scope(resume=True, seconds=0.005, structure=False))
        assert not report.damage
        assert bool(report) == (report.left == 0)
        assert report.left <= left
        left = report.left
        if not left:
            break
    else:
        report = check(store.path, Scope(resume=True, structure=False))
    assert check(store.path, Scope(resume=True, seconds=1e-9, structure=False)).left == files
    assert everything(store.path) == before
    state = file_of(store, "state")
    flip(state, place_of(state, "agent/weights")[0] * 8)
    assert not check(store.path, Scope(resume=True, structure=False))
    # what is damaged is never taken for done
    assert not check(store.path, Scope(resume=True, structure=False))


def test_a_lost_or_damaged_memory_of_a_check_begins_it_anew(store, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    check(store.path, Scope(seconds=1e-9, structure=False))
    (kept,) = (tmp_path / "cache").rglob("*.check.json")
    kept.write_bytes(b"{")
    assert (
        check(store.path, Scope(resume=True, structure=False)).counts.leaves == check(store.path, PLAIN).counts.leaves
    )


def test_leftovers_and_foreign_files_are_listed_and_are_no_damage(store):
    (store.path / "note.txt").write_text("mine")
    (store.path / "runs" / "note.txt").write_text("mine")
    (store.path / "tmp" / "unfinished").mkdir()
    (store.path / "tmp" / "unfinished" / "state.h5").write_bytes(bytes(100))
    (store.path / "trash" / f"{'a' * 32}.12345678.h5").write_bytes(bytes(50))
    (store.path / "segments" / f"{'b' * 32}.h5").write_bytes(bytes(70))
    (store.path / "runs" / RUN / "checkpoints" / "00000001" / "state.h5").write_bytes(bytes(30))
    (store.path / "runs" / RUN / "checkpoints" / "00000003" / "mine").write_text("mine")
    report = check(store.path, PLAIN)
    assert report
    assert {(finding.kind, finding.path, finding.size) for finding in report.of("leftover")} == {
        ("work", "tmp/unfinished", 100),
        ("trash", f"trash/{'a' * 32}.12345678.h5", 50),
        ("unused segment", f"segments/{'b' * 32}.h5", 70),
        ("pruned", f"runs/{RUN}/checkpoints/00000001/state.h5", 30),
    }
    assert {finding.path for finding in report.of("foreign")} == {
        "note.txt",
        "runs/note.txt",
        f"runs/{RUN}/checkpoints/00000003/mine",
    }


def test_segments_that_a_save_has_announced_are_no_leftovers(store):
    job = sealed.seal("job", {"job": "save", "run": RUN, "uses": [], "made": ["b" * 32]})
    made = store._works.make()
    (made / "job.json").write_bytes(job)
    (store.path / "segments" / f"{'b' * 32}.h5").write_bytes(bytes(70))
    assert check(store.path, PLAIN).findings == ()


def test_what_is_removed_by_hand_is_told_as_a_gap(store):
    shutil.rmtree(store.path / "runs" / RUN / "checkpoints" / "00000003")
    report = check(store.path, PLAIN)
    assert damaged(report) == {f"runs/{RUN}/checkpoints/00000003"}
    # 4 goes back from it and the branch begins at it: the gap explains both
    assert [finding.kind for finding in report.damage] == ["lineage"]


def test_a_missing_origin_and_a_missing_parent_are_told(store):
    store.write_run("orphan", RunRecord("c" * 32, "orphan", 1.8e9, origin="d" * 32))
    commit(store, Log(), BRANCH, parent="9" * 32)
    report = check(store.path, PLAIN)
    assert damaged(report) == {"runs/orphan/run.json", f"runs/{BRANCH}/checkpoints/00000002/commit.json"}
    assert not report.lost


def test_a_copied_run_has_the_ids_of_another(store):
    shutil.copytree(store.path / "runs" / BRANCH, store.path / "runs" / "copy")
    record = store.read_run(BRANCH)
    renamed = RunRecord(**{**vars(record), "name": "copy"})
    (store.path / "runs" / "copy" / "run.json").write_bytes(renamed.to_bytes())
    report = check(store.path, PLAIN)
    assert damaged(report) == {f"runs/{name}/checkpoints/00000001" for name in (BRANCH, "copy")}


def test_what_is_newer_or_cannot_be_opened_was_not_checked_and_is_no_damage(store):
    path = file_of(store, "commit")
    body, _, _ = path.read_bytes().replace(b'"version": "0.3"', b'"version": "9.0"').rpartition(b',\n "digest"')
    path.write_bytes(resealed(body))
    report = check(store.path, PLAIN)
    assert not report
    assert not report.damage
    assert [finding.path for finding in report.unchecked] == [str(path.relative_to(store.path))]


def test_the_structure_of_hdf5_must_be_that_of_the_index(store):
    # another file of the same leaves, with right digests everywhere and other places than the index says
    index = store.index(RUN, 3)
    swapped = {leaf.path: leaf for leaf in index}
    first, second = (leaf for leaf in index if leaf.key == "_tree")
    swapped[first.path] = replace(second, path=first.path)
    swapped[second.path] = replace(first, path=second.path)
    data = seal_index(swapped.values(), index.segments)
    folder = store.path / "runs" / RUN / "checkpoints" / "00000003"
    (folder / "leaves.json").write_bytes(data)
    files = tuple(
        replace(file, size=len(data), digest=f"xxh3-128:{xxhash.xxh3_128_hexdigest(data)}")
        if file.name == "leaves.json"
        else file
        for file in index.commit.files
    )
    (folder / "commit.json").write_bytes(replace(index.commit, files=files).to_bytes())
    report = check(store.path)
    assert [finding.kind for finding in report.damage] == ["structure"]
    assert "begins at byte" in report.damage[0].problem


def test_a_store_without_its_record_is_checked_and_no_store_is_not(store, tmp_path):
    (store.path / "store.json").unlink()
    assert damaged(check(store.path, PLAIN)) == {"store.json"}
    with pytest.raises(NotAStoreError):
        check(tmp_path / "nothing")
    body, _, _ = sealed.seal("store", {"requires": [], "id": "a" * 32}).rpartition(b',\n "digest"')
    (store.path / "store.json").write_bytes(resealed(body.replace(b'"0.3"', b'"9.9"')))
    with pytest.raises(UnsupportedFormatError):
        check(store.path)


def test_the_door_of_a_store(store):
    told = []
    assert check(store.path, PLAIN, tell=lambda done, total: told.append((done, total)))
    assert told[-1][0] == told[-1][1] > 0
    report = simckpt.Store(store.path).check(quick=True, part=(1, 1))
    assert report
    assert report.as_json()["ok"] is True


def test_an_announcement_that_is_gone_is_no_damage(store):
    """A prune on a full disk removes it where the index can be read: then it says nothing that is not said there."""
    before = check(store.path, PLAIN)
    path = file_of(store, "job")
    path.unlink()
    after = check(store.path, PLAIN)
    assert after
    assert after.findings == before.findings
    assert after.counts.records == before.counts.records - 1
