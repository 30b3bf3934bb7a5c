"""A server that fails at each request in turn, before or after it has done what was asked: nothing is lost, ever."""

import shutil

import pytest
from archive_helpers import RUN, add, archive, assert_restores, filled, is_whole, kept_aside, local_seqs
from fake_s3 import FAULTS

import simckpt
from simckpt.archive import Archive, Patience
from simckpt.errors import ArchiveUnavailableError, SimckptError
from simckpt.policies import KeepLast
from simckpt.storage import StoreFiles

URL = "s3://bucket/place"
ONCE = [each for each in FAULTS if each != "403"]


def mover(files: StoreFiles, **patience) -> Archive:
    # a second request is the client's own second try
    wait = Patience(**{"timeout": 0.4, "retries": 2, "limit": 5.0, **patience})
    return Archive(files, URL, policy=KeepLast(1), patience=wait)


def folders(originals):
    return [name.rpartition("/")[0] for name in originals if name.endswith("/commit.json")]


def assert_nothing_lost(files, fake, originals) -> None:
    there = {key.removeprefix("place/"): data for key, data in fake.objects.items()}
    here = kept_aside(files)
    for folder in folders(originals):
        name = f"{folder}/commit.json"
        assert is_whole(here, folder, originals) or (
            is_whole(there, folder, originals) and here[name] == originals[name]
        ), f"{folder} is lost"
        if name in there:
            assert is_whole(there, folder, originals), f"{folder} is half in the archive"


def one_pass(path, fake) -> int:
    """How many requests a pass over a fresh copy of the store makes."""
    files = StoreFiles.open(path)
    fake.objects.clear()
    fake.reset()
    mover(files).move()
    return len(fake.requests)


@pytest.mark.parametrize("fault", ["500 after", "drop before", "drop after", "flip"])
def test_a_fault_at_some_requests_is_survived(tmp_path, fake, fault):
    _at_each_request(tmp_path, fake, fault, every=11)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_at_any_request_is_survived(tmp_path, fake, fault):
    assert _at_each_request(tmp_path, fake, fault, every=1) > 30


def _at_each_request(tmp_path, fake, fault, *, every) -> int:
    fake.hang = 1.0
    original, _ = filled(tmp_path / "original", 2)
    originals = kept_aside(original)
    shutil.copytree(tmp_path / "original", tmp_path / "count")
    count = one_pass(tmp_path / "count", fake)
    for at in range(1, count + 1, every):
        shutil.copytree(tmp_path / "original", tmp_path / f"store-{at}")
        files = StoreFiles.open(tmp_path / f"store-{at}")
        fake.objects.clear()
        fake.reset()
        fake.fault = lambda number, name, at=at: fault if number == at else None
        try:
            problems = mover(files).move().problems
        except ArchiveUnavailableError as error:
            problems = [str(error)]
        if fault not in ("403", "flip"):
            assert problems == [], "one fault is overcome by trying again"
        assert_nothing_lost(files, fake, originals)
        fake.reset()
        assert mover(files).move().problems == []
        assert local_seqs(files) == {2}
        assert_nothing_lost(files, fake, originals)
        for seq in (1, 2):
            assert_restores(simckpt.Store(files.path).files, seq)
    return count


@pytest.mark.parametrize("fault", ["500", "403", "drop before", "hang before"])
def test_an_archive_that_stays_unreachable_is_one_clear_error(tmp_path, fake, fault):
    files, log = filled(tmp_path / "store", 2)
    mover(files).move()
    with files.claim(RUN):
        add(files, log, 3)
    before = kept_aside(files)
    fake.hang = 0.6
    fake.fault = lambda number, name: fault
    with pytest.raises(ArchiveUnavailableError, match="place"):
        mover(files, retries=1).move()
    assert kept_aside(files) == before
    store = simckpt.Store(files.path)
    with pytest.raises(ArchiveUnavailableError, match="cannot be brought back"):
        store.run(RUN).checkpoints()[0].read()
    assert kept_aside(files) == before, "nothing is half restored"
    fake.reset()
    assert_restores(store.files, 1)


def test_an_upload_that_arrives_damaged_is_written_again(tmp_path, fake):
    files, _ = filled(tmp_path / "store", 2)
    seen = []
    fake.fault = lambda number, name: (
        "flip"
        if name.startswith("PUT") and name.endswith("state.h5") and (seen.append(name) or len(seen) == 1)
        else None
    )
    assert mover(files).move().problems == []
    assert seen[0] == seen[1]
    assert_restores(simckpt.Store(files.path).files, 1)


def test_a_server_that_keeps_damaging_what_it_gets_never_makes_anything_leave_the_disk(tmp_path, fake):
    files, _ = filled(tmp_path / "store", 3)
    fake.fault = lambda number, name: "flip" if name.startswith("PUT") and name.endswith("state.h5") else None
    moved = mover(files).move()
    assert moved.evicted == []
    assert len(moved.problems) == 3
    assert local_seqs(files) == {1, 2, 3}
    assert not [key for key in fake.objects if key.endswith("commit.json")]
    fake.reset()
    assert mover(files).move().problems == []


def test_a_lost_acknowledgement_of_our_own_commit_is_success(tmp_path, fake):
    files, _ = filled(tmp_path / "store", 1)
    fake.fault = lambda number, name: (
        "drop after"
        if name.endswith("commit.json")
        and name.startswith("PUT")
        and [r[1] for r in fake.requests].count(name[4:]) == 1
        else None
    )
    moved = mover(files).move()
    assert moved.problems == []
    puts = [key for method, key in fake.requests if method == "PUT" and key.endswith("commit.json")]
    assert len(puts) == 2, "the first answer was lost, the second says that it exists"
    assert len(moved.archived) == 1


def test_a_fetch_from_a_server_that_fails_at_any_request_leaves_all_or_nothing(tmp_path, fake):
    files, _ = filled(tmp_path / "store", 2)
    mover(files).move()
    fake.reset()
    shutil.copytree(files.path, tmp_path / "count")
    mover(StoreFiles.open(tmp_path / "count")).bring_back(RUN, 1)
    count = len(fake.requests)
    assert count > 1
    for fault in ("403", "flip", "drop after"):
        for at in range(1, count + 1):
            path = tmp_path / f"{fault}-{at}"
            shutil.copytree(files.path, path)
            mine = StoreFiles.open(path)
            before = kept_aside(mine)
            fake.reset()
            fake.fault = lambda number, name, at=at, fault=fault: fault if number == at else None
            try:
                mover(mine).bring_back(RUN, 1)
            except SimckptError:
                assert kept_aside(mine) == before
            assert list((path / "tmp").iterdir()) == []
            fake.reset()
            assert_restores(simckpt.Store(path).files, 1)


def test_large_objects_go_in_parts_and_come_back(tmp_path, fake, monkeypatch):
    from simckpt.archive import objects

    monkeypatch.setattr(objects, "PORTION", 1 << 10)
    files, _ = filled(tmp_path / "store", 2)
    monkeypatch.setattr(objects, "_PARTS", 4)
    assert archive(files, URL).move().problems == []
    assert_restores(simckpt.Store(files.path).files, 1)
