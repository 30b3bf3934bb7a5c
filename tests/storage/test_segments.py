"""Logs and large unchanged leaves: written once, shared by checkpoints, seen whole by viewers, verified when read."""

import json
import os
import random
from dataclasses import replace

import h5py
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from log_helpers import COLUMNS, RUN, Log, assert_holds, rows, save_log, segment_files, state
from storage_helpers import checkpoint_folder, new_store, snapshot

from simckpt.errors import DamagedError, FormatError, SegmentMissingError, StoreError
from simckpt.state.leaf import LogLeaf
from simckpt.state.tree import Encoded
from simckpt.storage import CommitDraft, CommitRecord, StoreFiles, digests, layout, sealed


@pytest.fixture
def store(tmp_path):
    store = new_store(tmp_path / "store")
    with store.claim(RUN):
        yield store


def two_saves(store, log):
    log.add(5)
    first = save_log(store, log)
    log.add(3)
    return first, save_log(store, log)


def test_a_save_writes_the_new_rows_and_refers_to_the_others(store):
    log = Log()
    first, second = two_saves(store, log)
    assert first.record.segments == 1
    assert second.record.segments == 2
    (one,), (again, two) = first.leaves["replay/rewards"].pieces, second.leaves["replay/rewards"].pieces
    assert again == one
    assert (one.rows, two.rows, two.start, two.stop) == (5, 3, 0, 3)
    row_size = sum(np.dtype(dtype).itemsize * int(np.prod(shape)) for dtype, shape in COLUMNS.values())
    with h5py.File(store.path / "segments" / f"{two.segment}.h5") as file:
        assert sum(file["replay"][name].nbytes for name in COLUMNS) == 3 * row_size
        assert file["replay/rewards"][...].tobytes() == rows("rewards", 5, 8).tobytes()
        assert file["replay/half"].attrs["dtype"] == b"bfloat16"
        assert file.attrs["format"] == b"simckpt segment"
    assert_holds(store, 2, log)
    store.verify(RUN, 1)
    store.verify(RUN, 2)


def test_a_read_gives_plain_whole_leaves_in_the_order_of_the_index(store):
    log = Log()
    two_saves(store, log)
    found = store.read(RUN, 2)
    assert list(found) == ["replay", "agent"]
    assert list(found["replay"].leaves) == list(COLUMNS)
    half = found["replay"].leaves["half"]
    assert (type(half) is LogLeaf, half.dtype, half.kind, half.shape) == (False, "bfloat16", "torch", (8, 5))
    one = store.read_leaves(RUN, 2, ["replay/done"])["replay/done"]
    assert one.data.tobytes() == rows("done", 0, 8).tobytes()


def test_the_size_of_a_record_is_what_the_save_added(store):
    log = Log()
    for count in (5, 3, 0):
        before = snapshot(store.path)
        log.add(count)
        commit = save_log(store, log)
        added = {name: data for name, data in snapshot(store.path).items() if name not in before}
        small = ("commit.json", "job.json")
        assert commit.record.size == sum(len(data) for name, data in added.items() if not name.endswith(small))
    assert commit.record.segments == 2
    assert len(segment_files(store)) == 2  # without new rows there is no new file


def test_an_overwritten_ring_drops_its_oldest_rows_from_the_start_of_a_piece(store):
    log = Log(capacity=7)
    for count in (5, 4, 3):
        log.add(count)
        commit = save_log(store, log)
    pieces = commit.leaves["replay/rewards"].pieces
    assert [(piece.start, piece.stop, piece.rows) for piece in pieces] == [(0, 4, 4), (0, 3, 3)]
    log.add(2)
    pieces = save_log(store, log).leaves["replay/rewards"].pieces
    assert [(piece.start, piece.stop, piece.rows) for piece in pieces] == [(2, 4, 4), (0, 3, 3), (0, 2, 2)]
    assert_holds(store, 4, log)
    store.verify(RUN, 4)


def test_more_new_rows_than_capacity_are_one_piece(store):
    log = Log(capacity=4)
    log.add(3)
    save_log(store, log)
    log.add(100)
    commit = save_log(store, log)
    assert commit.record.segments == 1
    assert_holds(store, 2, log)


def test_logs_without_rows_or_without_bytes_come_back(store):
    for seq, count in ((1, 0), (2, 3)):
        new = np.empty((count, 0), np.float32)
        column = LogLeaf(new, "float32", (count, 0), "numpy", ())
        ring = Log(columns=("rewards",))
        ring.add(count)
        components = {"replay": Encoded({"none": column, **ring.capture()}, b"{}")}
        commit = store.commit(RUN, CommitDraft(None, seq), components)
        assert commit.leaves["replay/none"].pieces == ()
        found = store.read(RUN, seq)["replay"].leaves
        assert (found["none"].data.shape, found["rewards"].data.shape) == ((count, 0), (count,))
    assert commit.record.segments == 1


def test_columns_of_any_stored_shape_are_logs(store):
    """Strings have one axis more in the file than in truth."""
    text = np.array([[1, 2, 3], [4, 5, 6]], np.uint32)
    column = LogLeaf(text, "<U3", (2,), "numpy", ())
    first = store.commit(RUN, CommitDraft(None, 1), {"replay": Encoded({"text": column}, b"{}")})
    longer = LogLeaf(text, "<U3", (4,), "numpy", first.leaves["replay/text"].pieces)
    store.commit(RUN, CommitDraft(None, 2), {"replay": Encoded({"text": longer}, b"{}")})
    found = store.read(RUN, 2)["replay"].leaves["text"]
    assert (found.shape, found.data.tolist()) == ((4,), [*text.tolist(), *text.tolist()])


@pytest.mark.parametrize(
    ("count", "piece"), [(3, {}), (9, {}), (8, {"start": 5}), (8, {"start": -1}), (8, {"stop": 6})], ids=str
)
def test_a_log_whose_rows_do_not_add_up_is_refused_and_leaves_nothing(store, count, piece):
    log = Log(columns=("rewards",))
    two_saves(store, log)
    before = snapshot(store.path)
    one, *others = log.capture()["rewards"].pieces
    broken = LogLeaf(rows("rewards", 0, 0), "float64", (count,), "numpy", (replace(one, **piece), *others))
    with pytest.raises(FormatError, match="replay/rewards"):
        store.commit(RUN, CommitDraft(None, 1), {"replay": Encoded({"rewards": broken}, b"{}")})
    assert snapshot(store.path) == before


def test_viewers_see_whole_typed_arrays_also_after_the_store_was_moved(store, tmp_path):
    log = Log(capacity=7)
    two_saves(store, log)
    store.path.rename(tmp_path / "moved")
    with h5py.File(tmp_path / "moved" / "runs" / RUN / "checkpoints" / "00000002" / "state.h5") as file:
        for name, wanted in log.expected().items():
            found = file["replay"][name]
            assert found.is_virtual
            assert (found.dtype, found[...].tobytes()) == (wanted.dtype, wanted.tobytes())
        assert file["replay/half"].attrs["dtype"] == b"bfloat16"
        assert bytes(file["replay/_tree"][...]).rstrip() == b'{"ring":1}'


def test_a_viewer_is_told_that_missing_rows_look_like_nan_or_the_largest_value(store):
    log = Log()
    first, _ = two_saves(store, log)
    (piece,) = first.leaves["replay/rewards"].pieces
    (store.path / "segments" / f"{piece.segment}.h5").unlink()
    with h5py.File(checkpoint_folder(store, 2) / "state.h5") as file:
        replay = file["replay"]
        assert np.isnan(replay["rewards"][:5]).all()
        assert np.isnan(replay["observations"][:5]).all()
        assert (replay["half"][:5] == 65535).all()
        assert replay["rewards"][5:].tobytes() == rows("rewards", 5, 8).tobytes()
        assert b"missing" in replay["rewards"].attrs["virtual"]


def test_virtual_datasets_leave_the_payloads_where_the_kept_layout_put_them(store, monkeypatch):
    slots = [layout.Slot(f"a/b{number}", np.dtype("f8"), (number, 3)) for number in range(40)]
    groups = {"": (), "replay": (("kind", "component"),)}
    plain = layout.lay_out(slots, groups=groups)
    monkeypatch.setattr(layout, "_lay_out", lambda *_: pytest.fail("nothing was kept"))
    source = layout.Source("../x.h5", "/replay/rewards", 9, 2, 7)
    virtual = layout.Virtual("replay/rewards", np.dtype("f8"), (10,), (source, source))
    found = layout.lay_out(slots, groups=groups, virtuals=[virtual])
    assert found.offsets == plain.offsets
    assert found.size > plain.size
    assert layout.lay_out(slots, groups=groups) == plain
    sizes = {slot.path: 8 * int(np.prod(slot.shape)) for slot in slots}
    spans = [(offset, offset + len(data)) for offset, data in found.rest]
    spans += [(offset, offset + sizes[path]) for path, offset in found.offsets.items() if offset is not None]
    position = 0
    for start, stop in sorted(spans):
        assert start == position
        position = stop
    assert position == found.size


def test_equal_saves_give_equal_files(tmp_path):
    found = []
    for name in ("one", "two"):
        numbers = iter(range(1, 100))
        store = StoreFiles.create(
            tmp_path / name, clock=lambda: 1.5e9, new_id=lambda numbers=numbers: f"{next(numbers):032x}"
        )
        store.write_run(RUN, new_store(tmp_path / f"{name} model").read_run(RUN))
        with store.claim(RUN):
            two_saves(store, Log())
        layout._cache.clear()
        found.append(snapshot(store.path))
    assert found[0] == found[1]


# what is gone, and what is damaged


def test_missing_segments_are_named_by_whatever_reads_them(store):
    log = Log()
    first, second = two_saves(store, log)
    (gone,) = {piece.segment for piece in first.leaves["replay/rewards"].pieces}
    (store.path / "segments" / f"{gone}.h5").unlink()
    for read in (store.read, store.verify, lambda run, seq: store.read_leaves(run, seq, ["replay/done"])):
        with pytest.raises(SegmentMissingError, match=gone) as caught:
            read(RUN, 2)
        assert caught.value.ids == (gone,)
        assert "replay/done" in caught.value.leaves
    assert store.read(RUN, 2, ["agent"]).keys() == {"agent"}
    assert store.index(RUN, 2).commit == second.record
    known = {piece.segment for piece in second.leaves["replay/rewards"].pieces}
    assert store.missing_segments(known | {"f" * 32}) == {gone, "f" * 32}


def test_rows_of_a_lost_segment_are_written_anew_by_the_next_save(store):
    log = Log()
    first, _ = two_saves(store, log)
    (gone,) = {piece.segment for piece in first.leaves["replay/rewards"].pieces}
    (store.path / "segments" / f"{gone}.h5").unlink()
    with pytest.raises(SegmentMissingError) as caught:
        store.commit(RUN, CommitDraft(None, 9), state(log))
    assert caught.value.ids == (gone,)
    assert list((store.path / "tmp").iterdir()) == []
    save_log(store, log)
    assert_holds(store, 3, log)
    store.verify(RUN, 3)


@pytest.mark.parametrize("change", ["truncated", "longer"])
def test_a_segment_of_another_length_counts_as_missing(store, change):
    log = Log()
    first, _ = two_saves(store, log)
    (segment,) = {piece.segment for piece in first.leaves["replay/rewards"].pieces}
    path = store.path / "segments" / f"{segment}.h5"
    os.truncate(path, path.stat().st_size + (1 if change == "longer" else -1))
    for files in (store, StoreFiles.open(store.path)):
        assert files.missing_segments({segment}) == {segment}
    with pytest.raises(DamagedError):
        store.verify(RUN, 1)


def test_a_restart_knows_the_segments_of_the_checkpoints_it_finds(store):
    log = Log()
    two_saves(store, log)
    again = StoreFiles.open(store.path)
    log.add(2)
    commit = save_log(again, log)
    assert [piece.rows for piece in commit.leaves["replay/rewards"].pieces] == [5, 3, 2]
    assert_holds(again, 3, log)


def test_a_flipped_bit_anywhere_in_a_segment_is_noticed(store):
    log = Log()
    first, _ = two_saves(store, log)
    (segment,) = {piece.segment for piece in first.leaves["replay/rewards"].pieces}
    path = store.path / "segments" / f"{segment}.h5"
    good, refused = path.read_bytes(), 0
    for bit in random.Random(0).sample(range(len(good) * 8), 250):
        data = bytearray(good)
        data[bit // 8] ^= 1 << bit % 8
        path.write_bytes(bytes(data))
        with pytest.raises(DamagedError):
            store.verify(RUN, 2)
        damaged = set()
        try:
            assert_holds(store, 2, log)
        except DamagedError as error:
            damaged = set(error.leaves)
            refused += 1
        assert damaged < {f"replay/{name}" for name in COLUMNS}, "one column is damaged, not all"
    assert refused > 20
    path.write_bytes(good)
    store.verify(RUN, 2)


def test_rows_before_and_behind_those_that_are_meant_are_verified_too(store):
    log = Log(capacity=4, columns=("rewards",))
    log.add(3)
    save_log(store, log)
    log.add(3)
    commit = save_log(store, log)
    first = commit.leaves["replay/rewards"].pieces[0]
    assert first.start == 2
    path = store.path / "segments" / f"{first.segment}.h5"
    data = bytearray(path.read_bytes())
    data[first.offset] ^= 1  # of a row that nobody needs: the digest covers all rows
    path.write_bytes(bytes(data))
    for read in (store.read, store.verify):
        with pytest.raises(DamagedError) as caught:
            read(RUN, 2)
        assert caught.value.leaves == ("replay/rewards",)


@pytest.mark.parametrize("kind", ["link", "fifo", "folder", "linked folder"])
def test_only_regular_files_in_the_store_are_opened(store, tmp_path, kind):
    log = Log()
    first, _ = two_saves(store, log)
    (segment,) = {piece.segment for piece in first.leaves["replay/rewards"].pieces}
    path = store.path / "segments" / f"{segment}.h5"
    if kind == "linked folder":
        moved = path.parent.rename(tmp_path / "moved")
        path.parent.symlink_to(moved)
    else:
        moved = path.rename(tmp_path / "moved.h5")
        if kind == "link":
            path.symlink_to(moved)
        elif kind == "fifo":
            os.mkfifo(path)
        else:
            path.mkdir()
    for read in (store.read, store.verify):
        with pytest.raises(StoreError):
            read(RUN, 1)


def reseal(store, seq, change) -> None:
    """Forges an index, with right digests in it and in the commit record."""
    path = checkpoint_folder(store, seq) / "leaves.json"
    content = json.loads(path.read_bytes())
    change(content)
    fields = {key: value for key, value in content.items() if key not in ("format", "version", "digest", "leaves")}
    data = sealed.seal("index", fields, rows=("leaves", content["leaves"]))
    path.write_bytes(data)
    (commit,) = [each for each in store.records(RUN) if each.seq == seq]
    assert isinstance(commit, CommitRecord)
    files = tuple(
        replace(file, size=len(data), digest=digests.digest(data)) if file.name == "leaves.json" else file
        for file in commit.files
    )
    (checkpoint_folder(store, seq) / "commit.json").write_bytes(replace(commit, files=files).to_bytes())


def rewards(content: dict) -> dict:
    (line,) = [line for line in content["leaves"] if line["path"] == "replay/rewards"]
    return line


@pytest.mark.parametrize(
    "change",
    [
        lambda content: rewards(content).update(pieces=[]),
        lambda content: rewards(content).update(pieces={}),
        lambda content: rewards(content)["pieces"].pop(),
        lambda content: rewards(content)["pieces"].append([0, 0, 1, "xxh3-128:00"]),
        lambda content: rewards(content)["pieces"][0].__setitem__(0, 2),
        lambda content: rewards(content)["pieces"][0].__setitem__(0, -1),
        lambda content: rewards(content)["pieces"][0].__setitem__(0, True),
        lambda content: rewards(content)["pieces"][0].__setitem__(1, 10**6),
        lambda content: rewards(content)["pieces"][0].__setitem__(1, None),
        lambda content: rewards(content)["pieces"][0].__setitem__(2, 10**9),
        lambda content: rewards(content)["pieces"][0].__setitem__(3, "md5"),
        lambda content: rewards(content)["pieces"][0].__setitem__(3, 5),
        lambda content: rewards(content)["pieces"][0].extend([0, 6]),
        lambda content: rewards(content)["pieces"][0].extend([3, 3]),
        lambda content: rewards(content)["pieces"][0].append(0),
        lambda content: rewards(content)["pieces"].__setitem__(1, [*rewards(content)["pieces"][0][:3], "xxh3-128:00"]),
        lambda content: rewards(content).update(shape=[], size=8),
        lambda content: rewards(content).update(shape=[2**40], size=2**43),
        lambda content: content["segments"].append({**content["segments"][0], "id": "e" * 32}),
        lambda content: content["segments"].append(content["segments"][0]),
        lambda content: content["segments"][0].update(size=10),
        lambda content: content["segments"][0].update(id="../../run"),
        lambda content: content["segments"][0].update(spans=[[5, 2]]),
        lambda content: content["segments"][0].update(spans=[[0, 10**9]]),
        lambda content: content["segments"][0].update(names={"x": "replay/rewards"}),
        lambda content: content["segments"][0].update(names={"0": "../rewards"}),
        lambda content: content.update(segments={}),
    ],
)
def test_forged_pieces_are_refused(store, change):
    two_saves(store, Log())
    reseal(store, 2, lambda content: None)
    store.verify(RUN, 2)
    reseal(store, 2, change)
    for read in (store.read, store.verify):
        with pytest.raises(FormatError):
            read(RUN, 2)


def test_one_span_of_a_segment_cannot_unfold_into_many_rows(store):
    """A piece is counted once: a small file must not become a large state."""
    log = Log(columns=("rewards",))
    log.add(4)
    save_log(store, log)

    def repeat(content):
        line = rewards(content)
        line["pieces"] *= 200
        line.update(shape=[800], size=6400)

    reseal(store, 1, repeat)
    for read in (store.read, store.verify):
        with pytest.raises(FormatError, match="overlaps"):
            read(RUN, 1)


# any history


@settings(max_examples=40, deadline=None)
@given(
    capacity=st.integers(1, 30),
    limit=st.integers(3, 6),
    events=st.lists(
        st.one_of(
            st.tuples(st.just("add"), st.integers(0, 12)),
            st.tuples(st.sampled_from(["fail", "lose", "restart", "prune"]), st.integers(0, 10)),
        ),
        min_size=1,
        max_size=25,
    ),
)
def test_whatever_happens_between_saves_the_rows_are_those_of_the_ring(tmp_path_factory, capacity, limit, events):
    """Wraps, failed saves, lost segments, restarts, pruned parents and merges, against a plain list of numbers."""
    store, log = new_store(tmp_path_factory.mktemp("store")), Log(capacity)
    seq = 0
    for event, value in events:
        if event == "fail":
            log.add(value)
            store.discard(store.prepare(RUN, state(log)))
            continue
        if event == "lose" and (names := sorted(segment_files(store))):
            (store.path / "segments" / f"{names[value % len(names)]}.h5").unlink()
        elif event == "restart":
            store = StoreFiles.open(store.path)
        elif event == "prune" and seq > 1:
            store.prune(RUN, 1 + value % (seq - 1), "test")
        elif event == "add":
            log.add(value)
        commit = save_log(store, log, limit=limit)
        seq = commit.record.seq
        assert commit.record.segments <= limit
        assert_holds(store, seq, log)
        store.verify(RUN, seq)
        with h5py.File(checkpoint_folder(store, seq) / "state.h5") as file:
            for name, wanted in log.expected().items():
                assert file["replay"][name][...].tobytes() == wanted.tobytes()
        assert list((store.path / "tmp").iterdir()) == []
    used = set()
    for record in store.records(RUN):
        if isinstance(record, CommitRecord):
            used |= store.index(RUN, record.seq).segments.keys()
    assert segment_files(store) <= used, "no segment is left that nobody uses"
