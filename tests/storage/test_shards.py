"""Checkpoints of several ranks: written by each, one commit, read as one."""

import json
import re
from pathlib import Path

import h5py
import numpy as np
import pytest
from shard_helpers import RUN, arrays, part_of, rank_state, ranks, whole_state
from storage_helpers import assert_same, checkpoint_folder, leaf, save, snapshot

import simckpt
from simckpt.errors import ConfigurationError, DamagedError, FormatError, LeafNotFoundError, StorageError
from simckpt.maintenance.check import Scope, check
from simckpt.state.leaf import PartLeaf, Slab
from simckpt.state.tree import Encoded
from simckpt.storage import CommitDraft, Shard, StoreFiles, records, shards
from simckpt.storage.preparing import Prepared


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_what_ranks_have_written_is_read_as_one_checkpoint(tmp_path, count):
    world = ranks(tmp_path / "store", count)
    commit, _ = world.save_seed(7)
    store = StoreFiles.open(tmp_path / "store")
    names = {path.name for path in checkpoint_folder(store).iterdir()}
    pairs = {f"shard-{rank:05d}-of-{count:05d}.h5" for rank in range(count)}
    pairs |= {f"leaves-{rank:05d}.json" for rank in range(count)}
    assert names == {"commit.json", "shards.json", *pairs}
    found = store.read(RUN, 1)
    expected = whole_state(count, 7)
    assert_same(
        {name: found[name] for name in expected}, {name: sorted_as(found[name], expected[name]) for name in expected}
    )
    index = store.index(RUN, 1)
    assert (index.shards, index.components) == (count, tuple(expected))
    assert commit.record.nbytes == sum(len(data) for name, data in snapshot(checkpoint_folder(store)).items()) - len(
        (checkpoint_folder(store) / "commit.json").read_bytes()
    )
    assert (checkpoint_folder(store) / "commit.json").stat().st_size <= 4096
    store.verify(RUN, 1)
    assert not list((store.path / "tmp").iterdir())


def sorted_as(found, expected):
    """The order of leaves within a component is that of the ranks; bits, names and types are compared."""
    assert found.leaves.keys() == expected.leaves.keys()
    return Encoded({key: expected.leaves[key] for key in found.leaves}, expected.structure)


@pytest.mark.parametrize("count", [2, 3, 4])
def test_a_box_of_a_leaf_comes_alone_and_whatever_the_cut(tmp_path, count):
    ranks(tmp_path / "store", count).save_seed(3)
    store = StoreFiles.open(tmp_path / "store")
    for key, whole in arrays(3).items():
        for start, shape in boxes(whole.shape):
            path = f"agent/{key}"
            found = store.read_leaves(RUN, 1, [path], slabs={path: Slab(start, shape)})[path]
            wanted = part_of(whole, (start, shape))
            assert isinstance(found, PartLeaf)
            assert (found.dtype, found.shape, found.kind, found.offset) == (whole.dtype, whole.shape, whole.kind, start)
            assert (found.part_shape, found.data.dtype.str) == (shape, wanted.data.dtype.str)
            assert found.data.tobytes() == wanted.data.tobytes(), (key, start, shape)
            assert found.data.flags.c_contiguous


def boxes(shape):
    yield (0,) * len(shape), shape
    yield (0,) * len(shape), (0,) * len(shape)
    if 0 not in shape:
        yield tuple(size // 3 for size in shape), tuple(size - size // 3 for size in shape)
        yield tuple(size - 1 for size in shape), (1,) * len(shape)


def test_of_a_plain_leaf_a_box_can_be_read_as_well(tmp_path):
    ranks(tmp_path / "store", 2).save_seed(3)
    store = StoreFiles.open(tmp_path / "store")
    found = store.read(RUN, 1, ["agent"], slabs={"agent/bias": Slab((1,), (2,))})["agent"].leaves["bias"]
    assert found.data.tobytes() == whole_state(2, 3)["agent"].leaves["bias"].data[1:].tobytes()
    assert (found.offset, found.shape) == ((1,), (3,))


@pytest.mark.parametrize("slab", [Slab((0,), (7,)), Slab((6, 0), (2, 5)), Slab((-1, 0), (1, 1)), Slab((0, 0), (7, 6))])
def test_a_box_outside_of_its_leaf_is_refused(tmp_path, slab):
    ranks(tmp_path / "store", 2).save_seed(0)
    with pytest.raises(ConfigurationError, match="agent/rows"):
        StoreFiles.open(tmp_path / "store").read(RUN, 1, slabs={"agent/rows": slab})


def test_a_box_of_no_leaf_is_refused(tmp_path):
    ranks(tmp_path / "store", 2).save_seed(0)
    with pytest.raises(LeafNotFoundError, match="agent/rows"):
        StoreFiles.open(tmp_path / "store").read(RUN, 1, slabs={"agent/row": Slab((0,), (1,))})


def test_of_a_box_only_the_parts_that_meet_it_are_read(tmp_path):
    ranks(tmp_path / "store", 4).save_seed(0)
    store = StoreFiles.open(tmp_path / "store")
    for rank in (0, 2, 3):
        (checkpoint_folder(store) / f"shard-{rank:05d}-of-00004.h5").unlink()
    # the second of four ranks has the rows 2 and 3 of seven
    path = "agent/rows"
    found = store.read_leaves(RUN, 1, [path], slabs={path: Slab((2, 1), (2, 3))})[path]
    assert found.data.tobytes() == arrays(0)["rows"].data[2:4, 1:4].tobytes()
    with pytest.raises(DamagedError, match=r"shard-00002-of-00004\.h5 is missing, which rank 2") as caught:
        store.read_leaves(RUN, 1, [path], slabs={path: Slab((2, 1), (3, 3))})
    assert caught.value.leaves == (path,)


def test_damaged_parts_are_named_by_path_file_and_rank(tmp_path):
    ranks(tmp_path / "store", 3).save_seed(0)
    store = StoreFiles.open(tmp_path / "store")
    leaf = store.index(RUN, 1).leaves["agent/grid"]
    for rank in (1, 2):
        flip(checkpoint_folder(store) / f"shard-{rank:05d}-of-00003.h5", leaf.parts[rank].offset)
    for read in (store.read, store.verify):
        with pytest.raises(
            DamagedError, match=r"agent/grid \(the part of rank 1\).*agent/grid \(the part of rank 2\)"
        ) as caught:
            read(RUN, 1)
        assert caught.value.leaves == ("agent/grid",)


def flip(path, offset):
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)


def test_what_viewers_see_of_a_rank_says_which_part_it_is(tmp_path):
    ranks(tmp_path / "store", 3).save_seed(0)
    path = checkpoint_folder(StoreFiles.open(tmp_path / "store")) / "shard-00001-of-00003.h5"
    with h5py.File(path) as file:
        assert file["agent/rows"].attrs["part"] == b"[[3, 0], [7, 5]]"
        assert file["agent/rows"][...].tobytes() == arrays(0)["rows"].data[3:6].tobytes()
        assert file["envs%401"].attrs["name"] == b"envs@1"


def test_the_commit_record_alone_requires_the_feature(tmp_path):
    world = ranks(tmp_path / "store", 2)
    store = world.stores[0]
    with store.claim(RUN):
        save(store, 1)
        world.save_seed(2)
    commit = json.loads((checkpoint_folder(store, 2) / "commit.json").read_text())
    assert (commit["requires"], commit["shards"]["count"]) == (["shards"], 2)
    assert list(commit["files"]) == ["shards.json"]
    assert json.loads((tmp_path / "store" / "store.json").read_text())["requires"] == []
    assert "requires" not in json.loads((checkpoint_folder(store, 1) / "commit.json").read_text())
    store.prune(RUN, 2, "not needed")
    assert {path.name for path in checkpoint_folder(store, 2).iterdir()} == {"commit.json"}
    assert b"shards" not in (checkpoint_folder(store, 2) / "commit.json").read_bytes()


def test_equal_states_give_equal_files(tmp_path):
    for name in ("a", "b"):
        ranks(tmp_path / name, 3).save_seed(5)
    one, other = (snapshot(checkpoint_folder(StoreFiles.open(tmp_path / name))) for name in ("a", "b"))
    del one["commit.json"], other["commit.json"]
    assert one == other


def test_ranks_whose_parts_do_not_make_up_the_whole_commit_nothing(tmp_path):
    world = ranks(tmp_path / "store", 3)
    states = [rank_state(3, rank) for rank in range(3)]
    del states[1]["agent"].leaves["rows"]
    with pytest.raises(FormatError, match=r"2 parts of 'agent/rows'"):
        world.save(states)
    assert_nothing_left(world.stores[0])
    world.save_seed(1)


def assert_nothing_left(store):
    assert store.sequence(RUN) == []
    assert not list((store.path / "tmp").iterdir())
    assert not (store.path / "segments").exists() or not list((store.path / "segments").iterdir())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda states: states[1]["agent"].leaves.update(bias=leaf(np.zeros(3))), "another rank has already"),
        (lambda states: states[2]["agent"].leaves.update({"rows/x": leaf(np.zeros(3))}), "cannot lie below"),
        (lambda states: states[0].update(agent=Encoded(states[0]["agent"].leaves, b"")), "structure of the components"),
        (
            lambda states: states[1]["agent"].leaves.update(
                rows=part_of(leaf(np.zeros((7, 5), np.float64)), ((3, 0), (3, 5)))
            ),
            "differs in kind, dtype or shape",
        ),
    ],
)
def test_states_that_do_not_fit_together_are_refused(tmp_path, change, message):
    world = ranks(tmp_path / "store", 3)
    states = [rank_state(3, rank) for rank in range(3)]
    change(states)
    with pytest.raises(FormatError, match=message):
        world.save(states)
    assert_nothing_left(world.stores[0])


def test_a_part_that_does_not_lie_within_the_whole_is_refused_by_its_rank(tmp_path):
    store = ranks(tmp_path / "store", 2).stores[0]
    part = PartLeaf(np.zeros((3, 5)), "float64", (7, 5), "numpy", (5, 0))
    for shard in (None, Shard(0, 2)):
        with pytest.raises(FormatError, match="agent/x"):
            store.prepare(RUN, {"agent": Encoded({"x": part}, b"{}")}, shard=shard)
    assert_nothing_left(store)


@pytest.mark.parametrize("numbers", [[0], [0, 1], [0, 1, 1], [0, 1, 2, 2]])
def test_a_rank_that_is_missing_or_reports_twice_is_an_error(tmp_path, numbers):
    world = ranks(tmp_path / "store", 3)
    prepared = world.prepare([rank_state(3, rank) for rank in range(3)])
    with pytest.raises(ConfigurationError, match="ranks have reported"):
        world.stores[0].publish_shards(RUN, CommitDraft(None, 1), [prepared[number] for number in numbers])
    for store, each in zip(world.stores, prepared, strict=True):
        store.discard(each)
    assert_nothing_left(world.stores[0])


def test_what_was_swept_before_the_commit_is_named_by_its_rank(tmp_path):
    world = ranks(tmp_path / "store", 3)
    prepared = world.prepare([rank_state(3, rank) for rank in range(3)])
    world.stores[1].discard(prepared[1])
    with pytest.raises(StorageError, match="rank 1"):
        world.stores[0].publish_shards(RUN, CommitDraft(None, 1), prepared)
    for store, each in zip(world.stores, prepared, strict=True):
        store.discard(each)
    assert_nothing_left(world.stores[0])


def test_a_report_comes_back_as_it_was_and_a_strange_one_is_refused(tmp_path):
    world = ranks(tmp_path / "store", 2)
    _, prepared = world.prepare([rank_state(2, rank) for rank in range(2)])
    report = json.loads(json.dumps(prepared.to_json()))
    again = Prepared.from_json(world.stores[0].path, report)
    assert (again.folder, again.files, again.made, again.size) == (
        prepared.folder,
        prepared.files,
        prepared.made,
        prepared.size,
    )
    assert (again.shard, again.form, again.leaves) == (prepared.shard, prepared.form, {})
    for key, value in {
        "folder": "../runs",
        "shard": [2, 2],
        "files": [],
        "segments": {"x": 1},
        "made": ["../x"],
        "form": 3,
        "size": -1,
    }.items():
        with pytest.raises(FormatError):
            Prepared.from_json(world.stores[0].path, {**report, key: value})


def test_other_saves_with_the_same_form_are_not_merged_again(tmp_path):
    """The rank that commits reads the indexes once; what it then takes over has the same form."""
    world = ranks(tmp_path / "store", 3)
    with world.stores[0].claim(RUN):
        for seed in range(3):
            world.save_seed(seed)
    assert len(world.stores[0]._forms) == 1
    found = StoreFiles.open(tmp_path / "store")
    for seed in range(3):
        read = found.read(RUN, seed + 1)["agent"].leaves["rows"]
        assert read.data.tobytes() == arrays(seed)["rows"].data.tobytes()


def test_the_example_in_the_document_has_the_keys_of_a_real_record(tmp_path):
    document = (Path(simckpt.storage.__file__).parent / "FORMAT.md").read_text()
    (example,) = re.findall(r'```\n(\{\n "format": "simckpt shards".*?)```', document, re.DOTALL)
    ranks(tmp_path / "store", 2).save_seed(1)
    folder = checkpoint_folder(StoreFiles.open(tmp_path / "store"))
    told, real = json.loads(example), json.loads((folder / "shards.json").read_text())
    assert list(told) == list(real)
    for one, other in zip(told["shards"], real["shards"], strict=True):
        assert {key: list(one[key]) for key in one} == {key: list(other[key]) for key in other}
    commit = list(json.loads((folder / "commit.json").read_text()))
    assert commit[commit.index("version") + 1] == "requires"
    assert commit[commit.index("metrics") + 1] == "shards"
    assert f"from 1 to {records.MAX_SHARDS:,}" in document
    assert f"at most {shards._CUT_AXES} axes" in document
    assert f"more than {shards.INDEXES_LIMIT >> 30} GB together" in document


@pytest.mark.parametrize("having", [[0], [2], [0, 1], []])
def test_a_rank_that_has_nothing_to_write_takes_part(tmp_path, having):
    world = ranks(tmp_path / "store", 3)
    states = [{f"envs@{rank}": whole_state(3)[f"envs@{rank}"]} if rank in having else {} for rank in range(3)]
    with world.stores[0].claim(RUN):
        world.save(states, step=1)
    world.stores[0].verify(RUN, 1)
    found = StoreFiles.open(tmp_path / "store").read(RUN, 1)
    assert list(found) == [f"envs@{rank}" for rank in having]
    for name, encoded in found.items():
        assert_same({name: encoded}, {name: whole_state(3)[name]})
    assert not check(tmp_path / "store", Scope()).findings
