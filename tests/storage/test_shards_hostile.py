"""Records of several ranks as a stranger may have made them: digests are right, and what they say is not."""

import contextlib
import itertools
import json
import random
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from shard_helpers import RUN, ranks, rows_cut, whole_state
from storage_helpers import checkpoint_folder

from simckpt.errors import DamagedError, FormatError, StoreError, UnsupportedFormatError
from simckpt.state.leaf import Slab
from simckpt.storage import StoreFiles, sealed, shards
from simckpt.storage.digests import digest
from simckpt.storage.records import Shard

COUNT = 3


class Forge:
    """The records of one checkpoint, to be changed; `write` gives them right digests and sizes."""

    def __init__(self, store: StoreFiles, *, as_written: bool) -> None:
        self.folder = checkpoint_folder(store)
        self.as_written = as_written  # as simckpt writes them, one leaf a line, or as other JSON of the same content
        self.commit, self.shards = self.load("commit.json"), self.load("shards.json")
        self.leaves = [self.load(f"leaves-{rank:05d}.json") for rank in range(COUNT)]

    def load(self, name: str) -> dict:
        return json.loads((self.folder / name).read_bytes())

    def line(self, rank: int, path: str) -> dict:
        return next(line for line in self.leaves[rank]["leaves"] if line["path"] == path)

    def sealed(self, content: dict, rows: str) -> bytes:
        content = {key: value for key, value in content.items() if key != "digest"}
        if self.as_written and rows:
            found = content.pop(rows)
            name = content.pop("format").removeprefix("simckpt ")
            content.pop("version")
            return sealed.seal(name, content, rows=(rows, found))
        body = json.dumps(content).encode()[:-1]
        return body + b',\n "digest": "%s"\n}\n' % digest(body).encode()

    def write(self) -> None:
        listed = self.shards["shards"]
        for rank, leaves in enumerate(self.leaves):
            data = self.sealed(leaves, "leaves")
            (self.folder / f"leaves-{rank:05d}.json").write_bytes(data)
            if rank < len(listed) and isinstance(listed[rank], dict) and "leaves" in listed[rank]:
                listed[rank]["leaves"] = {"size": len(data), "digest": digest(data), **self.kept(rank)}
        data = self.sealed(self.shards, "shards")
        (self.folder / "shards.json").write_bytes(data)
        if "shards.json" in self.commit["files"]:
            self.commit["files"]["shards.json"] = {"size": len(data), "digest": digest(data)}
        if "size" in self.commit.get("shards", {}) and self.commit["shards"]["size"] != "kept":
            self.commit["shards"]["size"] = sum(
                file["size"] for line in listed for file in line.values() if isinstance(file.get("size"), int)
            )
        (self.folder / "commit.json").write_bytes(self.sealed(self.commit, ""))

    def kept(self, rank: int) -> dict:
        found = self.shards["shards"][rank]["leaves"]
        return {key: value for key, value in found.items() if key == "size" and value > 1 << 28}


def rename(content: dict, old: str, new: str) -> None:
    content[new] = content.pop(old)


CHANGES = {
    "one shard fewer": lambda forge: forge.shards["shards"].pop(),
    "one shard more": lambda forge: forge.shards["shards"].append(dict(forge.shards["shards"][0])),
    "no shards": lambda forge: forge.shards["shards"].clear(),
    "another count": lambda forge: forge.commit["shards"].update(count=2),
    "no count": lambda forge: forge.commit["shards"].pop("count"),
    "count of none": lambda forge: forge.commit["shards"].update(count=0),
    "a huge count": lambda forge: forge.commit["shards"].update(count=2**40),
    "count true": lambda forge: forge.commit["shards"].update(count=True),
    "a feature that is not required": lambda forge: forge.commit.pop("requires"),
    "a feature of another name": lambda forge: forge.commit.update(requires=["shards", "more"]),
    "state.h5 beside it": lambda forge: forge.commit["files"].update(
        {"state.h5": {"size": 1, "metadata": "xxh3-128:" + "0" * 32}}
    ),
    "no shards in the commit": lambda forge: forge.commit.pop("shards"),
    "shards.json elsewhere": lambda forge: rename(forge.commit["files"], "shards.json", "../shards.json"),
    "an index that is huge": lambda forge: forge.shards["shards"][0]["leaves"].update(size=2**62),
    "a state that is negative": lambda forge: forge.shards["shards"][0]["state"].update(size=-1),
    "a state without digest": lambda forge: forge.shards["shards"][0]["state"].pop("metadata"),
    "a segment of nobody": lambda forge: forge.shards.update(segments=["0" * 32]),
    "segments that are no ids": lambda forge: forge.shards.update(segments=["../../x"]),
    "a leaf of two ranks": lambda forge: forge.leaves[1]["leaves"].append(
        {**forge.line(0, "agent/step"), "file": "shard-00001-of-00003.h5"}
    ),
    "a leaf whole and in parts": lambda forge: forge.line(1, "agent/rows").pop("part"),
    "a part twice in one index": lambda forge: forge.leaves[1]["leaves"].append(dict(forge.line(1, "agent/rows"))),
    "an empty part twice in one index": lambda forge: forge.leaves[2]["leaves"].append(
        dict(forge.line(2, "agent/few"))
    ),
    "a part that is missing": lambda forge: forge.leaves[1]["leaves"].remove(forge.line(1, "agent/rows")),
    "a part that overlaps": lambda forge: forge.line(1, "agent/rows").update(part=[2, 0]),
    "a part that leaves a hole": lambda forge: forge.line(0, "agent/columns").update(part=[0, 1]),
    "a part twice, none of another": lambda forge: forge.line(1, "agent/grid").update(
        part=forge.line(0, "agent/grid")["part"]
    ),
    "a part beyond the whole": lambda forge: forge.line(2, "agent/rows").update(part=[7, 0]),
    "a part far beyond": lambda forge: forge.line(2, "agent/rows").update(part=[2**61, 0]),
    "a part with fewer axes": lambda forge: forge.line(1, "agent/rows").update(part=[3]),
    "a part with more axes": lambda forge: forge.line(1, "agent/rows").update(part=[3, 0, 0]),
    "a part that starts at true": lambda forge: forge.line(1, "agent/rows").update(part=[3, False]),
    "a part that is negative": lambda forge: forge.line(1, "agent/rows").update(part=[3, -1]),
    "a part that is no list": lambda forge: forge.line(1, "agent/rows").update(part="all"),
    "another whole": lambda forge: forge.line(1, "agent/rows").update(shape=[8, 5]),
    "another kind": lambda forge: forge.line(1, "agent/rows").update(kind="torch"),
    "another dtype": lambda forge: forge.line(1, "agent/half").update(dtype="float16"),
    "another stored dtype": lambda forge: forge.line(1, "agent/rows").update(stored="<i4"),
    "another axis of characters": lambda forge: forge.line(1, "agent/words").update(stored_shape=[5, 4]),
    "a huge whole": lambda forge: [
        forge.line(rank, "agent/rows").update(shape=[2**60, 2**60]) for rank in range(COUNT)
    ],
    "a huge part": lambda forge: forge.line(1, "agent/rows").update(stored_shape=[2**61, 5]),
    "a huge part of nothing": lambda forge: forge.line(2, "agent/few").update(
        stored_shape=[0, 2**61], shape=[2, 2**61], part=[2, 0]
    ),
    "another size": lambda forge: forge.line(1, "agent/rows").update(size=61),
    "an offset of nothing": lambda forge: forge.line(2, "agent/few").update(offset=100),
    "no offset": lambda forge: forge.line(1, "agent/rows").update(offset=None),
    "an offset beyond the file": lambda forge: forge.line(1, "agent/rows").update(offset=2**40),
    "parts at one place": lambda forge: forge.line(1, "agent/rows").update(
        offset=forge.line(1, "agent/columns")["offset"]
    ),
    "the file of another rank": lambda forge: forge.line(1, "agent/rows").update(file="shard-00000-of-00003.h5"),
    "a file elsewhere": lambda forge: forge.line(1, "agent/rows").update(file="../shard-00001-of-00003.h5"),
    "a digest of another kind": lambda forge: forge.line(1, "agent/rows").update(digest="md5:00"),
    "a leaf below another": lambda forge: forge.leaves[1]["leaves"].append(
        {**forge.line(1, "envs%401/qpos"), "path": "agent/rows/qpos"}
    ),
    "a path that leads away": lambda forge: forge.line(1, "agent/rows").update(path="agent/../rows"),
    "a component in another spelling": lambda forge: forge.line(1, "agent/rows").update(path="%61gent/rows"),
    # a leaf that is read like the same one of the rank before
    "a whole leaf of another size": lambda forge: forge.line(2, "envs%402/names").update(size=2),
    "a whole leaf without offset": lambda forge: forge.line(2, "envs%402/names").update(offset=None),
    "a whole leaf in the file of another rank": lambda forge: forge.line(2, "envs%402/names").update(
        file="shard-00001-of-00003.h5"
    ),
    "a whole leaf with a digest of another kind": lambda forge: forge.line(2, "envs%402/names").update(digest="md5:00"),
    "a whole leaf whose path leads away": lambda forge: forge.line(2, "envs%402/names").update(path="envs%402/../x"),
    "a whole leaf in another spelling": lambda forge: forge.line(2, "envs%402/names").update(path="%65nvs%402/names"),
    "a whole leaf twice in one index": lambda forge: forge.leaves[2]["leaves"].append(
        dict(forge.line(2, "envs%402/names"))
    ),
    "a whole leaf of the rank before": lambda forge: forge.line(2, "envs%402/names").update(path="envs%401/names"),
    "a whole leaf below another": lambda forge: forge.line(2, "envs%402/names").update(path="envs%402/qpos/names"),
    "no structure": lambda forge: forge.leaves[0]["leaves"].remove(forge.line(0, "agent/_tree")),
}


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    world = ranks(tmp_path_factory.mktemp("hostile") / "store", COUNT)
    world.save_seed(1)
    store = StoreFiles.open(world.stores[0].path)
    return store, {path: path.read_bytes() for path in checkpoint_folder(store).iterdir()}


@pytest.mark.parametrize(
    "as_written", [pytest.param(True, id="lines"), pytest.param(False, id="json", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("name", CHANGES)
def test_a_record_that_breaks_a_rule_is_an_error_in_little_memory(good, name, as_written):
    store, files = good
    try:
        forge = Forge(store, as_written=as_written)
        CHANGES[name](forge)
        forge.write()
        tracemalloc.start()
        with pytest.raises((FormatError, DamagedError)):
            store.read(RUN, 1)
        assert tracemalloc.get_traced_memory()[1] < 50 << 20
        tracemalloc.stop()
        for look in (store.index, store.verify):
            with contextlib.suppress(StoreError):
                look(RUN, 1)
    finally:
        for path, data in files.items():
            path.write_bytes(data)
    store.verify(RUN, 1)


@pytest.mark.parametrize("as_written", [True, False], ids=["lines", "json"])
def test_what_is_written_in_another_way_is_read_as_it_says(good, as_written):
    store, files = good
    try:
        forge = Forge(store, as_written=as_written)
        for leaves in forge.leaves:
            random.Random(3).shuffle(leaves["leaves"])
        forge.write()
        found, expected = store.read(RUN, 1), whole_state(COUNT, 1)
        for component, encoded in expected.items():
            for key, wanted in encoded.leaves.items():
                assert found[component].leaves[key].data.tobytes() == wanted.data.tobytes()
    finally:
        for path, data in files.items():
            path.write_bytes(data)


@pytest.mark.parametrize("name", ["shards.json", "leaves-00001.json", "shard-00001-of-00003.h5"])
@pytest.mark.parametrize("damage", ["flip", "cut", "gone", "link", "fifo"])
def test_a_damaged_file_is_an_error_that_names_it(good, name, damage, tmp_path):
    import os

    store, files = good
    path = checkpoint_folder(store) / name
    try:
        data = path.read_bytes()
        if damage == "flip":
            place = store.index(RUN, 1).leaves["agent/rows"].parts[1].offset if name.endswith(".h5") else 100
            path.write_bytes(data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :])
        elif damage == "cut":
            path.write_bytes(data[: len(data) // 4])
        else:
            path.unlink()
        if damage == "link":
            (tmp_path / "elsewhere").write_bytes(data)
            path.symlink_to(tmp_path / "elsewhere")
        elif damage == "fifo":
            os.mkfifo(path)
        with pytest.raises((DamagedError, FormatError), match=name.replace(".", r"\.")):
            store.read(RUN, 1)
    finally:
        path.unlink(missing_ok=True)
        for each, content in files.items():
            each.write_bytes(content)


def covered(shape, boxes) -> bool:
    """Whether each element lies in exactly one box, counted."""
    counts = np.zeros(shape, int)
    for start, own in boxes:
        counts[tuple(slice(first, first + size) for first, size in zip(start, own, strict=True))] += 1
    return bool((counts == 1).all())


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_tilings_are_told_from_what_is_none(data):
    axes = data.draw(st.integers(0, 3))
    shape = tuple(data.draw(st.integers(1, 4)) for _ in range(axes))
    boxes = [((0,) * axes, shape)]
    for _ in range(data.draw(st.integers(0, 6)) if axes else 0):
        start, own = boxes.pop(data.draw(st.integers(0, len(boxes) - 1)))
        axis = data.draw(st.integers(0, axes - 1))
        cut = data.draw(st.integers(0, own[axis]))
        boxes.append((start, (*own[:axis], cut, *own[axis + 1 :])))
        boxes.append(
            ((*start[:axis], start[axis] + cut, *start[axis + 1 :]), (*own[:axis], own[axis] - cut, *own[axis + 1 :]))
        )
    assert covered(shape, boxes)
    assert shards.tiles(shape, boxes)
    # changed somehow, within the whole: the count decides
    place = data.draw(st.integers(0, len(boxes) - 1))
    start = tuple(data.draw(st.integers(0, size)) for size in shape)
    own = tuple(data.draw(st.integers(0, size - first)) for first, size in zip(start, shape, strict=True))
    changed = [*boxes[:place], (start, own), *boxes[place + 1 :]]
    assert shards.tiles(shape, changed) == covered(shape, changed)


def test_a_pinwheel_no_cut_of_which_goes_through_is_a_tiling():
    boxes = [((0, 0), (1, 2)), ((0, 2), (2, 1)), ((2, 1), (1, 2)), ((1, 0), (2, 1)), ((1, 1), (1, 1))]
    assert covered((3, 3), boxes)
    assert shards.tiles((3, 3), boxes)
    assert not shards.tiles((3, 3), boxes[:-1])
    assert not shards.tiles((3, 3), [*boxes, ((1, 1), (1, 1))])


def test_a_tiling_of_many_parts_along_two_axes_takes_no_time_for_each_pair():
    boxes = [((4 * row, 4 * column), (4, 4)) for row, column in itertools.product(range(128), range(128))]
    random.Random(1).shuffle(boxes)
    assert shards.tiles((512, 512), boxes)
    boxes[7] = boxes[8]
    assert not shards.tiles((512, 512), boxes)


@pytest.mark.parametrize("shape", [(0, 4), (4, 0)])
def test_of_a_leaf_without_elements_there_is_a_part_without_elements(shape):
    assert shards.tiles(shape, rows_cut(shape, 3))
    assert not shards.tiles(shape, [])


def test_a_box_is_found_in_a_part():
    part = shards.Part(0, "", None, 0, "", (2, 3), (4, 5))
    assert shards.meets(part, (0, 0), (2, 9)) is None
    inside, there = shards.meets(part, (1, 4), (3, 9))
    assert (inside, there) == ((slice(0, 2), slice(1, 5), ...), (slice(1, 3), slice(0, 4), ...))
    assert Slab((1, 4), (3, 9)).offset == (1, 4)


def test_an_older_simckpt_refuses_this_checkpoint_alone_and_frees_nothing(tmp_path, monkeypatch):
    world = ranks(tmp_path / "store", 2)
    store = world.stores[0]
    with store.claim(RUN):
        from storage_helpers import save

        save(store, 1)
        world.save_seed(2)
    monkeypatch.setattr(sealed, "FEATURES", frozenset())
    older = StoreFiles.open(store.path)
    older.verify(RUN, 1)
    damaged: dict = {}
    assert [record.seq for record in older.records(RUN, damaged=damaged)] == [1]
    assert isinstance(damaged[2], UnsupportedFormatError)
    assert "shards" in str(damaged[2])
    assert older._usage.by_checkpoints() is None


def rows_index(shard: Shard, names: list[str], *, in_lines: bool) -> bytes:
    """The index of a rank that has its third of some leaves of one shape, in the form that is read by lines or not."""
    rows = [
        {
            "path": f"a/{name}", "kind": "torch", "dtype": "float32", "shape": [6, 2], "stored": "<f4",
            "file": shard.state_file, "offset": 100 * place, "size": 16, "digest": digest(b""),
            "stored_shape": [2, 2], "part": [2 * shard.number, 0],
        }
        for place, name in enumerate(names, 1)
    ]  # fmt: skip
    data = sealed.seal("index", {} if in_lines else {"segments": []}, rows=("leaves", rows))
    assert (shards._rows(data, "index") is not None) == in_lines
    return data


@pytest.mark.parametrize("in_lines", list(itertools.product([True, False], repeat=COUNT)))
def test_a_part_that_is_missing_is_missed_whatever_was_found_of_leaves_that_are_cut_alike(in_lines):
    def merged(lost: tuple[str, int] | None) -> set[str]:
        merger = shards.Merger()
        for rank in range(COUNT):
            held = [name for name in "wxyz" if (name, rank) != lost]
            merger.add(rows_index(Shard(rank, COUNT), held, in_lines=in_lines[rank]), rank, Shard(rank, COUNT))
        return set(merger.merged("checkpoint")[0])

    assert merged(None) == {"a/w", "a/x", "a/y", "a/z"}
    for lost in itertools.product("wxyz", range(COUNT)):
        with pytest.raises(FormatError, match=f"the 2 parts of 'a/{lost[0]}' do not make up the whole"):
            merged(lost)
