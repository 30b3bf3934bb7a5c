"""A repair puts damage aside, removes nothing, can be killed anywhere, and lets prunes and compact work again."""

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import crash_helpers
import numpy as np
import pytest
from crash_helpers import FaultyDisk, in_child, kill
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
    place_of,
    segment_of,
    twin_of,
)
from storage_helpers import run_record

import simckpt
from simckpt.ancestry import ancestry
from simckpt.errors import CheckpointNotFoundError, SegmentsKeptError
from simckpt.maintenance.check import check
from simckpt.maintenance.repair import Repair
from simckpt.maintenance.repair import repair as repair_all
from simckpt.storage import CommitRecord, StoreFiles, TombstoneRecord

FOLDER = f"runs/{RUN}/checkpoints"


def repair(root: Path, *, dry_run: bool = False) -> Repair:
    return repair_all(root, scope=PLAIN, dry_run=dry_run)


def contents(root: Path) -> list[bytes]:
    return [data for data, _ in everything(root).values()]


def damage_arrays(store: StoreFiles, seq: int) -> Path:
    path = store.path / FOLDER / f"{seq:08d}" / "state.h5"
    flip(path, place_of(path, "agent/weights")[0] * 8)
    return path


def test_a_damaged_checkpoint_leaves_its_number_its_id_and_its_place_in_the_lineage(store):
    record = store.index(RUN, 3).commit
    damage_arrays(store, 3)
    before = {path.name: path.read_bytes() for path in (store.path / FOLDER / "00000003").iterdir()}
    done = repair(store.path)
    assert done
    assert check(store.path, PLAIN)
    found = store.commit_record(RUN, 3)
    assert isinstance(found, TombstoneRecord)
    assert (found.id, found.parent, found.seq) == (record.id, record.parent, 3)
    assert "agent/weights" in found.reason
    quarantined = store.path / "quarantine" / FOLDER / "00000003"
    assert {path.name: path.read_bytes() for path in quarantined.iterdir()} == before
    assert [path.name for path in (store.path / FOLDER / "00000003").iterdir()] == ["commit.json"]
    with pytest.raises(CheckpointNotFoundError, match="quarantine"):
        store.read(RUN, 3)


def test_what_is_in_quarantine_can_be_put_back_by_hand(store):
    damage_arrays(store, 3)
    repair(store.path)
    store.prune(RUN, 2, "its rows are those of 3, too")
    place, aside = store.path / FOLDER / "00000003", store.path / "quarantine" / FOLDER / "00000003"
    shutil.rmtree(place)
    aside.rename(place)
    assert damaged(check(store.path, PLAIN)) == {f"{FOLDER}/00000003/state.h5"}
    # nothing that it needs was freed meanwhile: all but the damaged leaf comes back
    assert set(store.read_leaves(RUN, 3, ["replay/rewards"])) == {"replay/rewards"}
    # and it can go there once more
    assert repair(store.path)
    assert check(store.path, PLAIN)


def test_prunes_and_compact_work_again(store):
    (store.path / FOLDER / "00000003" / "commit.json").write_bytes(b"")
    with pytest.raises(SegmentsKeptError):
        store.prune(RUN, 2, "r")
    with pytest.raises(SegmentsKeptError):
        store.compact()
    repair(store.path)
    # those that the lost one used stay, for it may be put back
    store = StoreFiles.open(store.path)
    store.compact()
    shutil.rmtree(store.path / "quarantine")
    # what was taken out may be put back, unless the user says that it will not
    store.compact(unknown=True)
    left = {path.stem for path in (store.path / "segments").iterdir()}
    used = store.segment_ids(RUN, 4) | store.segment_ids(BRANCH, 1)
    assert left == used


def test_a_lost_record_keeps_its_number_and_nothing_is_made_up(store):
    third = store.index(RUN, 3).commit
    (store.path / FOLDER / "00000003" / "commit.json").write_bytes(b"")
    repair(store.path)
    found = store.commit_record(RUN, 3)
    assert isinstance(found, TombstoneRecord)
    # the branch says what its id was; its parent nobody says
    assert (found.kind, found.id, found.parent, found.metrics) == ("lost", third.id, None, {})
    assert commit(store, Log()).seq == 5
    run = simckpt.Store(store.path).run(RUN)
    assert [checkpoint.seq for checkpoint in run.checkpoints(abandoned=True)] == [2, 4, 5]
    assert check(store.path, PLAIN)


def test_a_lost_head_gives_its_place_to_the_one_before_it(store):
    (store.path / FOLDER / "00000004" / "commit.json").unlink()
    repair(store.path)
    assert simckpt.Store(store.path).run(RUN).latest().seq == 3
    assert ancestry(store.records(RUN))[-1].seq == 3


def test_a_removed_folder_gets_the_record_of_a_lost_checkpoint(store):
    shutil.rmtree(store.path / FOLDER / "00000003")
    assert not check(store.path, PLAIN)
    assert repair(store.path)
    assert check(store.path, PLAIN)
    assert store.commit_record(RUN, 3).kind == "lost"


def test_a_dry_run_changes_nothing_and_says_what_the_repair_does(store):
    damage_arrays(store, 3)
    (store.path / FOLDER / "00000002" / "leaves.json").write_bytes(b"x")
    before = everything(store.path)
    dry = repair(store.path, dry_run=True)
    assert everything(store.path) == before
    assert {action.path for action in dry.actions} == {f"{FOLDER}/00000002", f"{FOLDER}/00000003"}
    assert not any(action.done for action in dry.actions)
    done = repair(store.path)
    assert [action.path for action in done.actions] == [action.path for action in dry.actions]
    assert all(action.done for action in done.actions)


def test_a_damaged_segment_makes_room_for_good_rows_once_nobody_needs_it(store):
    path = segment_of(store, 4)
    flip(path, place_of(path, "replay/rewards")[0] * 8)
    assert repair(store.path)
    assert not path.exists()
    assert (store.path / "quarantine" / "segments" / path.name).exists()
    shared = segment_of(store, 3)
    flip(shared, place_of(shared, "replay/done")[0] * 8)
    done = repair(store.path)
    assert done
    assert check(store.path, PLAIN)
    assert [record.seq for record in store.records(RUN) if isinstance(record, CommitRecord)] == [2]


def test_a_damaged_segment_stays_while_a_whole_checkpoint_uses_other_bytes_of_it(store):
    # the branch was saved without the column that gets damaged
    path = segment_of(store, 3)
    log = Log(capacity=40, columns=("observations", "done", "half"))
    leaves = {key: leaf for key, leaf in store.index(RUN, 3).leaves.items() if key != "replay/rewards"}
    log.added = log.captured = 60
    log.committed(type("Commit", (), {"leaves": leaves})())
    log.add(10)
    kept = commit(store, log, BRANCH)
    flip(path, place_of(path, "replay/rewards")[0] * 8)
    assert repair(store.path)
    assert path.exists()
    assert check(store.path, PLAIN)
    assert isinstance(store.commit_record(BRANCH, kept.seq), CommitRecord)


def test_a_lost_run_record_is_made_anew_from_what_others_say(store):
    before = store.read_run(RUN)
    (store.path / "runs" / RUN / "run.json").write_bytes(b"")
    done = repair(store.path)
    # the first commit was pruned, but there is one start alone
    assert done
    after = StoreFiles.open(store.path).read_run(RUN)
    assert (after.id, after.name, after.origin) == (before.id, before.name, None)
    assert after.hyperparameters == {"learning_rate": 3e-4}
    assert check(store.path, PLAIN)


def test_the_record_of_a_branch_is_not_guessed(store):
    path = store.path / "runs" / BRANCH / "run.json"
    path.write_bytes(b"")
    done = repair(store.path)
    assert not done
    assert ["branch" in action.problem for action in done.actions] == [True]
    assert path.read_bytes() == b""


def test_a_lost_index_is_made_anew_if_its_digest_proves_it(tmp_path):
    with simckpt.Store(tmp_path / "store").start("run") as run:
        loop = simckpt.LoopState(step=0, values=np.arange(5.0), names=np.array(["a", "bc"]), nothing=np.empty((0, 3)))
        checkpointer = run.checkpointer({"loop": loop}, save_when=simckpt.EverySteps(1))
        loop.step = 3
        checkpointer.save(3)
    path = tmp_path / "store" / "runs" / "run" / "checkpoints" / "00000001" / "leaves.json"
    good = path.read_bytes()
    for bad in (b"", None, good[:-5], good.replace(b"loop", b"lopo", 1)):
        if bad is None:
            path.unlink()
        else:
            path.write_bytes(bad)
        done = repair(tmp_path / "store")
        assert done
        assert path.read_bytes() == good
        assert check(tmp_path / "store", PLAIN)
    # where the arrays are damaged as well nothing is proven
    path.unlink()
    state = path.with_name("state.h5")
    flip(state, place_of(state, "loop/values")[0] * 8)
    repair(tmp_path / "store")
    assert not path.exists()
    assert isinstance(StoreFiles.open(tmp_path / "store").commit_record("run", 1), TombstoneRecord)


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_lost_whatever_is_damaged_and_a_second_repair_has_nothing_to_do(store, kind):
    path, twin = file_of(store, kind), twin_of(store, kind)
    good = {each: each.read_bytes() for each in (path, twin) if each}
    # looking for a lost index takes a process for each file that it may come from
    for damage in ("flip", "missing", "swap") if kind != "index" else ("flip",):
        if damage == "swap" and twin is None:
            continue
        root = store.path.with_name(f"{kind}-{damage}")
        shutil.copytree(store.path, root)
        DAMAGES[damage](root / path.relative_to(store.path), twin and root / twin.relative_to(store.path))
        before = contents(root)
        first = repair(root)
        after = contents(root)
        # a pin or a tag says all by its name
        assert all(data in after for data in before if kind != "tag"), damage
        second = repair(root)
        assert not second.actions or not first, damage
        remaining = {finding.path for finding in check(root, PLAIN).damage}
        assert remaining == {finding.path for finding in first.remaining} | {
            action.path for action in first.actions if action.problem
        }, damage
    assert {each: each.read_bytes() for each in good} == good


@pytest.mark.parametrize("what", ["commit.json", pytest.param("leaves.json", marks=pytest.mark.slow)])
def test_a_repair_that_is_killed_anywhere_is_done_again(what, tmp_path):
    made = crash_helpers.new_store(tmp_path / "store")
    for step in (1, 2):
        crash_helpers.save(made, step)
    place = Path("runs", crash_helpers.RUN, "checkpoints", "00000001")
    (made.path / place / what).write_bytes(b"x")
    before = set(contents(made.path))
    killed = 0
    while True:
        root = tmp_path / f"killed-{killed}"
        shutil.copytree(made.path, root)

        def act(root=root, at=killed + 1):
            disk = FaultyDisk()
            files = StoreFiles.open(root, disk=disk)
            disk.arm(kill, at=at)
            files.quarantine(crash_helpers.RUN, 1, "damaged")

        if in_child(act) == 0:
            break
        killed += 1
        files = StoreFiles.open(root)
        assert before <= set(contents(root)), killed
        assert files.sequence(crash_helpers.RUN) == [1, 2]
        if not _is_buried(files):
            files.quarantine(crash_helpers.RUN, 1, "damaged")
        assert _is_buried(files), killed
        assert before <= set(contents(root)), killed
        quarantined = root / "quarantine" / place
        assert [path.name for path in quarantined.parent.iterdir()] == ["00000001"], killed
        assert {path.name for path in quarantined.iterdir()} == {"commit.json", "leaves.json", "state.h5"}, killed
        files.sweep()
        assert check(root, PLAIN).damage == (), killed
        assert list((root / "tmp").iterdir()) == []
    assert killed > 15


def _is_buried(files: StoreFiles) -> bool:
    try:
        return isinstance(files.commit_record(crash_helpers.RUN, 1), TombstoneRecord)
    except ValueError:
        return False


@contextlib.contextmanager
def in_training(store: StoreFiles) -> Iterator[int]:
    """Has another process hold the claim of the run, for this one may use its own; gives its number."""
    ready, go = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        with StoreFiles.open(store.path).claim(RUN):
            os.write(ready[1], b"x")
            os.read(go[0], 1)
        os._exit(0)
    os.read(ready[0], 1)
    try:
        yield child
    finally:
        os.write(go[1], b"x")
        os.waitpid(child, 0)
        for each in (*ready, *go):
            os.close(each)


def test_a_run_in_training_is_not_repaired_and_the_rest_is(store):
    damage_arrays(store, 3)
    path = store.path / "runs" / BRANCH / "checkpoints" / "00000001" / "state.h5"
    flip(path, place_of(path, "agent/weights")[0] * 8)
    with in_training(store):
        done = repair(store.path)
    assert {action.path: action.done for action in done.actions} == {
        f"{FOLDER}/00000003": False,
        f"runs/{BRANCH}/checkpoints/00000001": True,
    }
    assert repair(store.path)
    assert check(store.path, PLAIN)


def told(done: Repair) -> list[tuple[str, str, bool]]:
    return [(action.path, action.text, bool(action.problem)) for action in done.actions]


def test_a_segment_in_the_place_of_another_does_not_keep_the_rest_from_being_repaired(tmp_path):
    paths = []
    for name in ("store", "other"):
        files, log = crash_helpers.new_store(tmp_path / name), Log()
        files.write_run(RUN, run_record(RUN, id="d" * 32))
        for _ in range(2):
            log.add(20)
            commit(files, log)
        log.forget({path.stem for path in (files.path / "segments").iterdir()})
        log.columns = ("rewards",)  # of which the segments so far have the name, and that of the last lacks all others
        commit(files, log)
        paths.append(files.path)
    store = StoreFiles.open(paths[0])
    (last,) = store.segment_ids(RUN, 3)
    first = store.segment_ids(RUN, 1)
    for identity in first:
        shutil.copyfile(store.path / "segments" / f"{last}.h5", store.path / "segments" / f"{identity}.h5")
    (store.path / FOLDER / "00000001" / "leaves.json").unlink()
    dry = repair(store.path, dry_run=True)
    done = repair(store.path)
    assert told(done) == told(dry)
    assert done
    assert {seq for seq in (1, 2, 3) if isinstance(store.commit_record(RUN, seq), CommitRecord)} == {3}
    assert check(store.path, PLAIN)


def _run_record(store: StoreFiles) -> None:
    # that of a run alone can be made anew
    for run in (RUN, BRANCH):
        (store.path / "runs" / run / "run.json").write_bytes(b"")
        (
            store.path / "runs" / run / "checkpoints" / ("00000001" if run == BRANCH else "00000003") / "state.h5"
        ).unlink()


def _renamed_run(store: StoreFiles) -> None:
    (store.path / "runs" / BRANCH / "checkpoints" / "00000001" / "state.h5").unlink()
    (store.path / "runs" / BRANCH).rename(store.path / "runs" / "another")


def _segment_that_others_use(store: StoreFiles) -> None:
    # the branch was saved without the column that gets damaged
    log = Log(capacity=40, columns=("observations", "done", "half"))
    leaves = {key: leaf for key, leaf in store.index(RUN, 3).leaves.items() if key != "replay/rewards"}
    log.added = log.captured = 60
    log.committed(type("Commit", (), {"leaves": leaves})())
    log.add(10)
    commit(store, log, BRANCH)
    path = segment_of(store, 3)
    flip(path, place_of(path, "replay/rewards")[0] * 8)


def _folder_in_place_of_a_file(store: StoreFiles) -> None:
    for name in ("state.h5", "leaves.json", "commit.json"):
        path = store.path / FOLDER / {"state.h5": "00000002", "leaves.json": "00000003"}.get(name, "00000004") / name
        path.unlink()
        path.mkdir()


def _link_in_place_of_a_file(store: StoreFiles) -> None:
    for name in ("state.h5", "leaves.json", "commit.json"):
        path = store.path / FOLDER / {"state.h5": "00000002", "leaves.json": "00000003"}.get(name, "00000004") / name
        path.rename(store.path.parent / name)
        path.symlink_to(store.path.parent / name)


def _lost_index_of_a_damaged_segment(store: StoreFiles) -> None:
    path = segment_of(store, 3)
    flip(path, place_of(path, "replay/rewards")[0] * 8)
    (store.path / FOLDER / "00000003" / "leaves.json").unlink()


@pytest.mark.parametrize(
    "damage",
    [
        _run_record,
        _renamed_run,
        _segment_that_others_use,
        _folder_in_place_of_a_file,
        _link_in_place_of_a_file,
        _lost_index_of_a_damaged_segment,
    ],
)
def test_a_repair_does_what_its_dry_run_has_said_and_cannot_do_what_that_has_said(store, damage):
    damage(store)
    before = everything(store.path)
    dry = repair(store.path, dry_run=True)
    assert everything(store.path) == before
    done = repair(store.path)
    assert told(done) == told(dry)
    assert dry.actions
    assert all(action.done != bool(action.problem) for action in done.actions)


def test_a_dry_run_says_that_a_run_in_training_is_left_alone(store):
    damage_arrays(store, 3)
    with in_training(store) as child:
        dry, done = repair(store.path, dry_run=True), repair(store.path)
    assert told(dry) == told(done)
    assert [bool(action.problem) for action in dry.actions] == [True]
    assert str(child) in dry.actions[0].problem


def test_a_number_beyond_all_others_is_told_within_bounds(store):
    # made up in a stranger's store: each number before it is missing
    (store.path / FOLDER / "99999999").mkdir()
    report = check(store.path, PLAIN)
    assert not report
    assert len(report.damage) < 2000
    with pytest.raises(SegmentsKeptError):
        StoreFiles.open(store.path).compact()
