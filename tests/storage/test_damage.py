"""Whatever is done to the files of a store: the right error, or the right bytes."""

import json
import os
import random
import shutil
from dataclasses import replace

import numpy as np
import pytest
import xxhash
from storage_helpers import assert_same, checkpoint_folder, components, new_store, run_record, save

from simckpt.errors import DamagedError, FormatError, StorageError, StoreError, UnsupportedFormatError
from simckpt.storage import StoreFiles, index

FILES = ["state.h5", "leaves.json", "commit.json"]


@pytest.fixture
def store(tmp_path):
    store = new_store(tmp_path / "store")
    save(store, 1)
    save(store, 2)
    return store


def flip(path, bit):
    data = bytearray(path.read_bytes())
    data[bit // 8] ^= 1 << bit % 8
    path.write_bytes(bytes(data))


def digest(data: bytes) -> str:
    return f"xxh3-128:{xxhash.xxh3_128_hexdigest(data)}"


def open_and_read(path):
    store = StoreFiles.open(path)
    store.read_run("ant-ppo")
    return store.read("ant-ppo", 1)


def rewrite_index(store, change) -> None:
    """Forges the index of checkpoint 1, with right digests in the index and in the commit record."""
    folder = checkpoint_folder(store)
    leaves = [change(leaf) or leaf for leaf in store.index("ant-ppo", 1)]
    forged = index.seal_index([leaf for leaf in leaves if leaf is not None])
    (folder / "leaves.json").write_bytes(forged)
    (commit,) = [record for record in store.records("ant-ppo") if record.seq == 1]
    files = tuple(
        replace(file, size=len(forged), digest=digest(forged)) if file.name == "leaves.json" else file
        for file in commit.files
    )
    (folder / "commit.json").write_bytes(replace(commit, files=files).to_bytes())


@pytest.mark.parametrize("name", FILES)
def test_a_flipped_bit_anywhere_in_a_checkpoint_is_noticed(store, name):
    path = checkpoint_folder(store) / name
    good = path.read_bytes()
    for bit in random.Random(0).sample(range(len(good) * 8), 250):
        flip(path, bit)
        with pytest.raises(StoreError):
            store.verify("ant-ppo", 1)
        path.write_bytes(good)
    store.verify("ant-ppo", 1)


def test_a_restore_gives_the_saved_bytes_or_an_error(store):
    path = checkpoint_folder(store) / "state.h5"
    good, expected = path.read_bytes(), components(1)
    refused = 0
    for bit in range(0, len(good) * 8, 61):
        flip(path, bit)
        try:
            assert_same(store.read("ant-ppo", 1), expected)
        except DamagedError:
            refused += 1
        path.write_bytes(good)
    assert refused > 0


def test_all_damaged_leaves_are_named_and_no_others(store):
    path = checkpoint_folder(store) / "state.h5"
    leaves = store.index("ant-ppo", 1).leaves
    for name in ("envs/physics/qvel", "agent/0/bias"):
        flip(path, leaves[name].offset * 8 + 5)
    for read in (store.read, store.verify):
        with pytest.raises(DamagedError) as caught:
            read("ant-ppo", 1)
        assert set(caught.value.leaves) == {"envs/physics/qvel", "agent/0/bias"}
    assert caught.value.path.startswith(str(checkpoint_folder(store)))
    wanted = components(1)["envs"].leaves["physics/qpos"]
    assert (
        store.read_leaves("ant-ppo", 1, ["envs/physics/qpos"])["envs/physics/qpos"].data.tobytes()
        == wanted.data.tobytes()
    )


def test_damage_stays_where_it_is(store):
    for name in FILES:
        flip(checkpoint_folder(store) / name, 100)
    assert_same(store.read("ant-ppo", 2), components(2))
    damaged = {}
    assert [record.seq for record in store.records("ant-ppo", damaged=damaged)] == [2]
    assert list(damaged) == [1]
    with pytest.raises(DamagedError):
        store.records("ant-ppo")
    assert save(store, 3).seq == 3


@pytest.mark.parametrize("name", ["leaves.json", "state.h5"])
def test_a_whole_file_of_another_checkpoint_is_damage(store, name):
    (checkpoint_folder(store, 1) / name).write_bytes((checkpoint_folder(store, 2) / name).read_bytes())
    with pytest.raises(DamagedError, match=name):
        store.read("ant-ppo", 1)


@pytest.mark.parametrize("name", FILES)
def test_a_missing_file_is_damage(store, name):
    (checkpoint_folder(store) / name).unlink()
    with pytest.raises(DamagedError, match=name):
        store.read("ant-ppo", 1)


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("length", [0, 1, 300])
def test_a_truncated_file_is_damage(store, name, length):
    os.truncate(checkpoint_folder(store) / name, length)
    with pytest.raises(DamagedError):
        store.read("ant-ppo", 1)


def test_a_state_file_that_lost_its_end_names_the_leaves_there(store):
    last = list(store.index("ant-ppo", 1))[-1]
    os.truncate(checkpoint_folder(store) / "state.h5", last.offset + last.size - 1)
    with pytest.raises(DamagedError) as caught:
        store.read("ant-ppo", 1)
    assert caught.value.leaves == (last.path,)


def test_garbage_behind_the_end_is_found_by_verify(store):
    with (checkpoint_folder(store) / "state.h5").open("ab") as file:
        file.write(b"x")
    assert_same(store.read("ant-ppo", 1), components(1))
    with pytest.raises(DamagedError):
        store.verify("ant-ppo", 1)


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("kind", ["link", "fifo", "folder"])
def test_only_regular_files_are_opened(store, tmp_path, name, kind):
    path = checkpoint_folder(store) / name
    moved = path.rename(tmp_path / name)
    if kind == "link":
        path.symlink_to(moved)
    elif kind == "fifo":
        os.mkfifo(path)
    else:
        path.mkdir()
    with pytest.raises(StoreError):
        store.read("ant-ppo", 1)


@pytest.mark.parametrize(
    "part", ["runs", "runs/ant-ppo", "runs/ant-ppo/checkpoints", "runs/ant-ppo/checkpoints/00000001"]
)
def test_no_folder_of_a_store_may_be_a_symbolic_link(store, tmp_path, part):
    moved = (store.path / part).rename(tmp_path / "moved")
    (store.path / part).symlink_to(moved)
    with pytest.raises(FormatError, match="symbolic link"):
        store.read("ant-ppo", 1)


def test_the_path_of_a_store_may_be_a_symbolic_link(store, tmp_path):
    (tmp_path / "link").symlink_to(store.path)
    assert_same(StoreFiles.open(tmp_path / "link").read("ant-ppo", 1), components(1))


@pytest.mark.parametrize("name", ["store.json", "runs/ant-ppo/run.json"])
def test_a_flipped_bit_in_the_other_records_is_noticed(store, name):
    path = store.path / name
    good = path.read_bytes()
    for bit in random.Random(1).sample(range(len(good) * 8), 200):
        flip(path, bit)
        with pytest.raises(StoreError):
            StoreFiles.open(store.path).read_run("ant-ppo")
        path.write_bytes(good)


@pytest.mark.parametrize("name", ["store.json", "runs/ant-ppo/run.json", "commit.json", "leaves.json"])
def test_a_newer_version_of_any_record_is_refused(store, name):
    path = store.path / name if "run" in name or "store" in name else checkpoint_folder(store) / name
    body, _, _ = path.read_bytes().replace(b'"version": "0.3"', b'"version": "9.0"').rpartition(b',\n "digest"')
    path.write_bytes(body + f',\n "digest": "{digest(body)}"\n}}\n'.encode())
    if name == "leaves.json":
        data = path.read_bytes()
        (commit,) = [record for record in store.records("ant-ppo") if record.seq == 1]
        files = [replace(file, digest=digest(data)) if file.name == name else file for file in commit.files]
        (checkpoint_folder(store) / "commit.json").write_bytes(replace(commit, files=tuple(files)).to_bytes())
    with pytest.raises(UnsupportedFormatError, match=r"9\.0"):
        open_and_read(store.path)


def test_a_store_that_requires_an_unknown_feature_is_refused_by_name(store):
    path = store.path / "store.json"
    body, _, _ = path.read_bytes().replace(b'"requires": []', b'"requires": ["fusion"]').rpartition(b',\n "digest"')
    path.write_bytes(body + f',\n "digest": "{digest(body)}"\n}}\n'.encode())
    with pytest.raises(UnsupportedFormatError, match="fusion"):
        StoreFiles.open(store.path)


@pytest.mark.parametrize(
    "changes",
    [
        {"shape": (1 << 40, 1 << 20), "size": 1 << 63},
        {"shape": (1 << 31, 1 << 31), "size": 1 << 65},
        {"shape": (1 << 40,), "size": 1 << 43},
        {"size": 8},
        {"offset": 1 << 62},
        {"offset": None},
        {"offset": -5},
        {"stored": "object"},
        {"stored": "|O8"},
        {"stored": "<f8; import os"},
        {"stored": "|V8"},
        {"stored": "S999999999"},
        {"file": "../../run.json"},
        {"file": "commit.json"},
        {"file": "shard-00000-of-00001.h5"},
        {"path": "envs"},
        {"path": "envs/../agent/0/weight"},
        {"path": "envs/physics/qvel"},
        {"path": "%ff/qpos"},
        {"path": "%65nvs/physics/qpos"},
        {"digest": "md5"},
        {"shape": (1,) * 65},
    ],
    ids=str,
)
def test_forged_leaves_are_refused_before_memory_is_allocated(store, changes):
    def change(leaf):
        if leaf.path != "envs/physics/qpos":
            return leaf
        forged = replace(leaf, **changes)
        return replace(forged, stored_shape=forged.shape)

    rewrite_index(store, change)
    with pytest.raises(FormatError):
        store.read("ant-ppo", 1)


def test_a_digest_by_an_unknown_algorithm_is_refused_by_name(store):
    rewrite_index(store, lambda leaf: replace(leaf, digest="md6:00"))
    with pytest.raises(UnsupportedFormatError, match="md6"):
        store.read("ant-ppo", 1)


def test_a_sparse_file_larger_than_the_machine_is_refused_not_allocated(store):
    size = 1 << 46

    def change(leaf):
        if leaf.path == "envs/physics/qpos":
            shape = (size // 8,)
            return replace(leaf, shape=shape, stored_shape=shape, size=size, offset=1 << 20)
        return leaf

    rewrite_index(store, change)
    (commit,) = [record for record in store.records("ant-ppo") if record.seq == 1]
    files = [replace(file, size=size + (1 << 20)) if file.name == "state.h5" else file for file in commit.files]
    os.truncate(checkpoint_folder(store) / "state.h5", 1 << 43)
    (checkpoint_folder(store) / "commit.json").write_bytes(replace(commit, files=tuple(files)).to_bytes())
    with pytest.raises((StorageError, DamagedError)):
        store.read("ant-ppo", 1)


def test_a_folder_that_was_copied_or_renamed_is_refused(store):
    checkpoint_folder(store, 2).rename(checkpoint_folder(store, 3))
    with pytest.raises(FormatError, match="renamed"):
        store.read("ant-ppo", 3)
    (store.path / "runs" / "ant-ppo").rename(store.path / "runs" / "other")
    with pytest.raises(FormatError, match="renamed"):
        store.read_run("other")


def test_foreign_names_in_a_store_are_passed_over(store):
    (store.path / "runs" / ".DS_Store").touch()
    (store.path / "runs" / "..a").mkdir()
    (store.path / "runs" / "note.txt").touch()
    (checkpoint_folder(store).parent / "copy of 00000001").mkdir()
    (checkpoint_folder(store).parent / "00000000").mkdir()
    assert store.runs() == ["ant-ppo"]
    assert [record.seq for record in store.records("ant-ppo")] == [1, 2]


def test_an_index_beyond_its_limit_is_refused(store, monkeypatch):
    monkeypatch.setattr(index, "INDEX_LIMIT", 100)
    with pytest.raises(FormatError, match="at most 100"):
        store.read("ant-ppo", 1)


def test_a_commit_record_beyond_4_kb_is_refused(store):
    path = checkpoint_folder(store) / "commit.json"
    path.write_bytes(json.dumps({"a": "x" * 5000}).encode())
    with pytest.raises(FormatError, match="4096"):
        store.records("ant-ppo")


def test_an_unreadable_byte_is_tried_once_more(store, monkeypatch):
    failures = iter([True])
    preadv = os.preadv

    def flaky(*arguments):
        if next(failures, False):
            raise OSError(5, "Input/output error")
        return preadv(*arguments)

    monkeypatch.setattr(os, "preadv", flaky)
    assert_same(store.read("ant-ppo", 1), components(1))


def unreadable(monkeypatch, *names):
    """Makes every read of files of these names fail, as a bad sector does."""
    preadv = os.preadv

    def failing(descriptor, *arguments):
        if os.path.basename(os.readlink(f"/proc/self/fd/{descriptor}")) in names:  # noqa: PTH115, PTH119
            raise OSError(5, "Input/output error")
        return preadv(descriptor, *arguments)

    monkeypatch.setattr(os, "preadv", failing)


@pytest.mark.parametrize(
    ("name", "read"),
    [
        ("store.json", lambda store: StoreFiles.open(store.path)),
        ("run.json", lambda store: store.read_run("ant-ppo")),
        ("commit.json", lambda store: store.records("ant-ppo")),
        ("commit.json", lambda store: store.index("ant-ppo", 1)),
        ("leaves.json", lambda store: store.index("ant-ppo", 1)),
        ("state.h5", lambda store: store.read("ant-ppo", 1)),
        ("state.h5", lambda store: store.verify("ant-ppo", 1)),
        ("events.jsonl", lambda store: store.events("ant-ppo")),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_file_that_stays_unreadable_is_damage(store, monkeypatch, name, read):
    store.log_event("ant-ppo", {"event": "test"})
    read(store)
    unreadable(monkeypatch, name)
    with pytest.raises(DamagedError) as caught:
        read(store)
    assert caught.value.path.endswith((name, "00000001"))


def test_unreadable_records_do_not_hide_the_others(store, monkeypatch):
    real = os.preadv
    unreadable(monkeypatch, "commit.json")
    damaged = {}
    assert store.records("ant-ppo", damaged=damaged) == []
    assert {seq: type(error) for seq, error in damaged.items()} == {1: DamagedError, 2: DamagedError}
    monkeypatch.setattr(os, "preadv", real)
    unreadable(monkeypatch, "run.json")
    assert [record.seq for record in store.records("ant-ppo")] == [1, 2]
    assert_same(store.read("ant-ppo", 2), components(2))


def test_a_checkpoint_of_another_run_is_refused(store):
    store.write_run("other", run_record("other", id="e" * 32))
    save(store, 1, run="other")
    shutil.rmtree(checkpoint_folder(store, 2))
    shutil.copytree(checkpoint_folder(store, 1, run="other"), checkpoint_folder(store, 3))
    shutil.rmtree(checkpoint_folder(store, 1))
    shutil.copytree(checkpoint_folder(store, 1, run="other"), checkpoint_folder(store, 1))
    for call in (store.read, store.index, store.verify):
        with pytest.raises(FormatError, match="copied"):
            call("ant-ppo", 1)
    damaged = {}
    assert store.records("ant-ppo", damaged=damaged) == []
    assert list(damaged) == [1, 3]
    assert [record.seq for record in store.records("other")] == [1]


def test_nan_payloads_and_negative_zeros_survive(tmp_path):
    from storage_helpers import leaf

    from simckpt.state.tree import Encoded
    from simckpt.storage import CommitDraft

    bits = np.array([0x7FF8000000000001, 0xFFF0DEADBEEF0001, 0x8000000000000000], np.uint64)
    expected = {"a": Encoded({"x": leaf(bits.view(np.float64))}, b"{}")}
    store = new_store(tmp_path / "other")
    store.commit("ant-ppo", CommitDraft(None, 0), expected)
    assert store.read("ant-ppo", 1)["a"].leaves["x"].data.view(np.uint64).tolist() == bits.tolist()
