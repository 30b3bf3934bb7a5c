"""A checkpoint of several ranks is like any other: listed, compared, checked, repaired, pruned, archived, exported."""

import json
import shutil

import numpy as np
import pytest
from log_helpers import Log
from shard_helpers import RUN, arrays, rank_state, ranks, replay_states, whole_state
from storage_helpers import checkpoint_folder, save, snapshot
from typer.testing import CliRunner

import simckpt
from simckpt.archive.archive import bring_back
from simckpt.archive.transfer import pull, push
from simckpt.cli import app
from simckpt.errors import CheckpointNotFoundError, DamagedError
from simckpt.maintenance.check import Scope, check
from simckpt.maintenance.fallback import newest_intact
from simckpt.maintenance.repair import repair
from simckpt.storage import CommitRecord, Shard, StoreFiles, TombstoneRecord
from simckpt.storage.durable import Disk

BIG = np.arange(4 << 18, dtype=np.float32).reshape(-1, 8)  # 4 MB: a large leaf for each of up to four ranks


def filled(path, count, *, saves=3):
    """A run of several checkpoints, with a log for each rank and a large array that does not change."""
    world, logs = ranks(path, count), [Log() for _ in range(count)]
    parent = None
    with world.stores[0].claim(RUN):
        for step in range(1, saves + 1):
            for rank, log in enumerate(logs):
                log.add(rank + 2)
            commit, prepared = world.save(replay_states(count, logs, step, big=BIG), step=step, parent=parent)
            parent = commit.record.id
            for rank, (log, each) in enumerate(zip(logs, prepared, strict=True)):
                log.committed(each, f"replay%40{rank}")
    return world, logs


@pytest.fixture(
    scope="module",
    params=[2, *(pytest.param(count, marks=pytest.mark.slow) for count in (1, 3, 4))],
)
def template(request, tmp_path_factory):
    world, logs = filled(tmp_path_factory.mktemp("template") / "store", request.param)
    return world.stores[0].path, request.param, logs


@pytest.fixture
def store(template, tmp_path):
    shutil.copytree(template[0], tmp_path / "store")
    return StoreFiles.open(tmp_path / "store")


def assert_holds(store, seq, template, *, run=RUN, step=None):
    _, count, logs = template
    found = store.read(run, seq)
    for name, encoded in whole_state(count, step or seq).items():
        for key, wanted in encoded.leaves.items():
            got = found[name].leaves[key]
            assert (got.dtype, got.shape, got.kind) == (wanted.dtype, wanted.shape, wanted.kind)
            assert got.data.tobytes() == wanted.data.tobytes(), (name, key)
    assert found["agent"].leaves["big"].data.tobytes() == BIG.tobytes()
    for rank, log in enumerate(logs):
        for name, wanted in log.expected().items():
            rows = found[f"replay@{rank}"].leaves[name].data
            assert rows.tobytes() == wanted[: len(rows)].tobytes()


def test_large_unchanged_parts_lie_in_segments_from_the_second_time_on(store, template):
    index = store.index(RUN, 3)
    assert all(part.pieces for part in index.leaves["agent/big"].parts)
    assert not any(part.pieces for part in store.index(RUN, 1).leaves["agent/big"].parts)
    assert_holds(store, 3, template)
    assert index.commit.segments == len(index.segments) == len(store.segment_ids(RUN, 3))


def test_a_check_finds_nothing_in_a_good_store(store, template):
    report = check(store.path, Scope())
    assert report.findings == ()
    assert report.counts.checkpoints == 3
    assert report.counts.leaves == sum(
        len([line for line in store.index(RUN, seq).lines if not line.pieces]) for seq in (1, 2, 3)
    ) + len(
        {
            (piece.segment, piece.offset)
            for seq in (1, 2, 3)
            for line in store.index(RUN, seq).lines
            for piece in line.pieces
        }
    )
    assert check(store.path, Scope(quick=True)).findings == ()
    parts = [check(store.path, Scope(part=(number, 2), structure=False)) for number in (1, 2)]
    assert [part.findings for part in parts] == [(), ()]


def flip(path, offset):
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)


def test_a_check_names_the_damaged_part_and_a_repair_puts_the_checkpoint_aside(store, template):
    count = template[1]
    part = store.index(RUN, 3).leaves["agent/rows"].parts[count // 2]
    flip(checkpoint_folder(store, 3) / part.file, part.offset)
    report = check(store.path, Scope(structure=False))
    (finding,) = report.findings
    assert finding.path == f"runs/{RUN}/checkpoints/00000003/{part.file}"
    assert f"agent/rows (the part of rank {part.rank})" in finding.problem
    assert finding.affected[0].leaves == ("agent/rows",)
    opened = simckpt.Store(store.path)
    head = opened.run(RUN).checkpoints()[-1]
    assert newest_intact(head).seq == 2
    before = set(store.segment_ids(RUN, 3))
    assert repair(store.path, scope=Scope(structure=False))
    assert isinstance(store.commit_record(RUN, 3), TombstoneRecord)
    aside = {path.name for path in (store.path / "quarantine/runs" / RUN / "checkpoints/00000003").iterdir()}
    assert {"commit.json", "shards.json", *(shard_files(count))} <= aside
    store.compact()
    assert before <= {path.stem for path in (store.path / "segments").iterdir()}, "it can be put back"
    assert not check(store.path, Scope(structure=False)).damage
    assert_holds(store, 2, template)


def shard_files(count):
    return [name for rank in range(count) for name in (Shard(rank, count).state_file, Shard(rank, count).index_file)]


@pytest.mark.parametrize("name", ["leaves-00000.json", "shards.json"])
def test_a_lost_record_is_made_anew_from_the_files(store, template, name):
    path = checkpoint_folder(store, 2) / name
    data = path.read_bytes()
    path.unlink() if name == "shards.json" else path.write_bytes(data[:-50])
    report = check(store.path, Scope(quick=True))
    assert [finding.path for finding in report.damage] == [f"runs/{RUN}/checkpoints/00000002/{name}"]
    done = repair(store.path, scope=Scope(quick=True))
    assert [(action.path.rpartition("/")[2], action.done) for action in done.actions] == [(name, True)]
    assert path.read_bytes() == data
    assert_holds(store, 2, template)
    assert not check(store.path, Scope(quick=True)).damage


def test_a_missing_file_of_a_rank_is_named(store, template):
    name = Shard(0, template[1]).state_file
    (checkpoint_folder(store, 1) / name).unlink()
    (finding,) = check(store.path, Scope(quick=True)).damage
    assert (finding.path, finding.problem) == (f"runs/{RUN}/checkpoints/00000001/{name}", "is missing")
    with pytest.raises(DamagedError, match=name):
        store.verify(RUN, 1)


def test_what_lies_beside_the_files_of_the_ranks_is_told(store):
    (checkpoint_folder(store, 1) / "shard-00007-of-00009.h5").write_bytes(b"x")
    (finding,) = check(store.path, Scope(quick=True)).findings
    assert finding.kind == "foreign"


def test_pruning_frees_the_segments_of_all_ranks_that_nobody_else_uses(store, template):
    for seq in (1, 2):
        store.prune(RUN, seq, "test")
        assert {path.name for path in checkpoint_folder(store, seq).iterdir()} == {"commit.json"}
    assert_holds(store, 3, template)
    assert {path.stem for path in (store.path / "segments").iterdir()} == set(store.segment_ids(RUN, 3))
    store.prune(RUN, 3, "test")
    assert not list((store.path / "segments").iterdir())
    assert not check(store.path, Scope()).findings


def test_compacting_frees_what_nobody_names(store, template):
    (store.path / "segments" / f"{'ab' * 16}.h5").write_bytes(b"left over")
    before = snapshot(store.path / "runs")
    assert store.compact(unknown=True).segments == ("ab" * 16,)
    assert not (store.path / "segments" / f"{'ab' * 16}.h5").exists()
    assert snapshot(store.path / "runs") == before
    assert_holds(store, 3, template)


@pytest.mark.parametrize("to", ["h5", "safetensors", "pt"])
def test_an_export_is_whole_and_comes_back_as_a_checkpoint_of_one_process(store, template, tmp_path, to):
    path = tmp_path / f"exported.{to}"
    store.export(RUN, 3, path, metrics={}, to=to)
    other = simckpt.Store(tmp_path / "other")
    copy = other.import_checkpoint(path)
    index = other.files.index(copy.run, copy.seq)
    assert (index.shards, {file.name for file in index.files}) == (0, {"state.h5", "leaves.json"})
    assert not any(leaf.parts for leaf in index)
    assert_holds(other.files, 1, template, run=copy.run, step=3)
    assert not check(other.path, Scope()).findings


def test_an_import_from_another_store_folds_the_parts(store, template, tmp_path):
    source = simckpt.Store(store.path).run(RUN).checkpoints()[-1]
    other = simckpt.Store(tmp_path / "other")
    copy = other.import_checkpoint(source)
    assert simckpt.comparison.compare(source, copy).identical
    assert_holds(other.files, 1, template, run=copy.run, step=3)


def test_a_damaged_part_ends_an_export_and_is_named(store, template, tmp_path):
    part = store.index(RUN, 3).leaves["agent/waves"].parts[-1]
    if part.size == 0:
        part = store.index(RUN, 3).leaves["agent/waves"].parts[0]
    flip(checkpoint_folder(store, 3) / part.file, part.offset)
    with pytest.raises(DamagedError) as caught:
        store.export(RUN, 3, tmp_path / "x.h5", metrics={})
    assert caught.value.leaves == ("agent/waves",)
    assert not (tmp_path / "x.h5").exists()


def test_people_see_the_whole(store, template):
    opened = simckpt.Store(store.path)
    checkpoint = opened.run(RUN).checkpoints()[-1]
    assert checkpoint["agent/rows"].tobytes() == arrays(3)["rows"].data.tobytes()
    assert checkpoint["agent/words"].tolist() == ["", "a", "été", "straw"] * 3
    assert checkpoint.leaves()["agent/grid"].shape == (6, 8, 2)
    assert checkpoint.nbytes == sum(
        path.stat().st_size
        for path in checkpoint_folder(store, 3).iterdir()
        if path.name not in ("commit.json", "job.json")
    )
    result = CliRunner().invoke(app, ["show", str(store.path), checkpoint.id[:12], "--json"])
    assert result.exit_code == 0, result.output
    assert CliRunner().invoke(app, ["ls", str(store.path)]).exit_code == 0
    assert json.loads(result.output)


def test_checkpoints_of_different_counts_are_compared_by_their_bits(store, template, tmp_path):
    count = template[1]
    other = ranks(tmp_path / "other", count + 1)
    states = [rank_state(count + 1, rank, 3) for rank in range(count + 1)]
    other.save(states, step=3)
    alone = StoreFiles.open(tmp_path / "other")
    one = simckpt.Store(store.path).run(RUN).checkpoints()[-1]
    two = simckpt.Store(alone.path).run(RUN).checkpoints()[-1]
    found = {difference.path for difference in simckpt.comparison.compare(one, two).differences}
    assert not any(path.startswith(("agent/rows", "agent/grid", "agent/words", "envs@0")) for path in found)
    assert any("big" in path for path in found)


def test_a_branch_refers_to_it_and_keeps_it(store):
    opened = simckpt.Store(store.path)
    origin = opened.run(RUN).checkpoints()[1]
    branch = origin.branch("other")
    assert branch.record.origin == origin.id
    with pytest.raises(simckpt.errors.ConflictError):
        store.prune(RUN, 2, "test")


def test_it_goes_to_an_archive_and_comes_back(store, template, tmp_path):
    from archive_helpers import archive

    count = template[1]
    before = {
        name: data
        for name, data in snapshot(store.path).items()
        if name.startswith(("runs", "segments")) and name.rpartition("/")[2] != "job.json" and "/writer/" not in name
    }
    mover = archive(store, tmp_path / "archive")
    moved = mover.move()
    assert (len(moved.archived), len(moved.evicted), moved.problems) == (3, 2, [])
    assert store.evicted(RUN) == {1, 2}
    gone = {Shard(rank, count).state_file for rank in range(count)}
    assert not gone & {path.name for path in checkpoint_folder(store, 1).iterdir()}
    assert not [each for each in check(store.path, Scope()).findings if each.severity != "foreign"]
    # what a kill in the middle of an eviction leaves is removed by the next pass
    (checkpoint_folder(store, 1) / Shard(count - 1, count).state_file).write_bytes(b"left over") if count > 1 else None
    mover.move()
    assert not gone & {path.name for path in checkpoint_folder(store, 1).iterdir()}
    copy = StoreFiles.open(tmp_path / "archive")
    for seq in (1, 2, 3):
        copy.verify(RUN, seq)
    bring_back(store, RUN, 1)
    assert store.evicted(RUN) == {2}
    assert_holds(store, 1, template)
    (checkpoint_folder(store, 3) / Shard(0, count).index_file).write_bytes(b"damaged")
    bring_back(store, RUN, 3)
    after = snapshot(store.path)
    for name, data in before.items():
        if "00000002" not in name and name in after and "/archived/" not in name:
            assert after[name] == data, name
    store.prune(RUN, 1, "test")
    mover.move()
    there = {path.name for path in (tmp_path / "archive/runs" / RUN / "checkpoints/00000001").iterdir()}
    assert there == {"commit.json"}


class Meeting(Disk):
    """Another process acts once, in the moment of a rename of some file."""

    def __init__(self, name: str, when: str, act) -> None:
        self.name, self.when, self.act = name, when, act

    def rename(self, source, target) -> None:
        meets = self.name in (source.name, target.name) and self.act is not None
        act, self.act = self.act, None if meets else self.act
        if meets and self.when == "before":
            act()
        super().rename(source, target)
        if meets and self.when == "after":
            act()


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("late", ["fetch", "eviction", "freeing"])
def test_a_fetch_and_an_eviction_at_the_same_time_leave_all_files_or_no_first(tmp_path, when, late):
    from archive_helpers import archive

    count = 3
    world = ranks(tmp_path / "store", count)
    with world.stores[0].claim(RUN):
        for step in (1, 2):
            world.save_seed(step)
    archive(world.stores[0], tmp_path / "archive").move()
    world.stores[0].evict(RUN, 1)
    assert world.stores[0].evicted(RUN) == {1}
    folder, states = checkpoint_folder(world.stores[0], 1), [Shard(rank, count).state_file for rank in range(count)]
    other = StoreFiles.open(tmp_path / "store")

    def fetch() -> None:
        bring_back(other, RUN, 1)

    if late == "fetch":
        # what a kill has left of an eviction is here, is found, and is freed before the first state is back
        shutil.copy(tmp_path / "archive" / folder.relative_to(other.path) / states[1], folder / states[1])
        bring_back(StoreFiles.open(tmp_path / "store", disk=Meeting(states[0], when, other.free_evicted)), RUN, 1)
    elif late == "freeing":
        shutil.copy(tmp_path / "archive" / folder.relative_to(other.path) / states[1], folder / states[1])
        StoreFiles.open(tmp_path / "store", disk=Meeting(states[1], when, fetch)).free_evicted()
    else:
        fetch()
        StoreFiles.open(tmp_path / "store", disk=Meeting(states[1], when, fetch)).evict(RUN, 1)
    assert {path.name for path in folder.iterdir()} >= set(states)
    other.verify(RUN, 1)
    assert not list((tmp_path / "store" / "tmp").iterdir())


def test_a_run_is_pushed_and_pulled(store, template, tmp_path):
    url = str(tmp_path / "place")
    (tmp_path / "place").mkdir()
    assert [each.commits for each in push(store, RUN, url)] == [3]
    other = StoreFiles.create(tmp_path / "other")
    assert [each.commits for each in pull(url, other)] == [3]
    for seq in (1, 2, 3):
        other.verify(RUN, seq)
    assert_holds(other, 3, template)
    assert [each.commits for each in push(store, RUN, url)] == [0]


def test_ranks_save_after_a_process_alone_and_the_other_way_round(tmp_path):
    world = ranks(tmp_path / "store", 2)
    store = world.stores[0]
    with store.claim(RUN):
        save(store, 1)
        world.save_seed(2)
        save(store, 3)
    assert [type(record) for record in store.records(RUN)] == [CommitRecord] * 3
    assert [store.index(RUN, seq).shards for seq in (1, 2, 3)] == [0, 2, 0]
    with pytest.raises(CheckpointNotFoundError):
        store.index(RUN, 4)
