"""Push and pull: whole runs between machines."""

import contextlib
import json

import pytest
import training
from archive_helpers import RUN, add, archive, assert_restores, filled, kept_aside
from fake_s3 import FAULTS
from storage_helpers import new_store, snapshot
from typer.testing import CliRunner

import simckpt
from simckpt.archive import Patience
from simckpt.archive.transfer import pull, push
from simckpt.cli import app
from simckpt.errors import (
    ArchiveDamagedError,
    ArchiveUnavailableError,
    ConflictError,
    RunLockedError,
    RunNotFoundError,
)
from simckpt.storage import StoreFiles

HASTY = Patience(timeout=0.5, retries=2, limit=5.0)


def beside(path, run: str = RUN) -> dict[str, bytes]:
    """The records and marks of a run."""
    folder = path / "runs" / run
    found = [folder / "run.json", *folder.glob("starts/*"), *folder.glob("marks/*/*"), *folder.glob("checkpoints/*/*")]
    return {str(each.relative_to(path)): each.read_bytes() for each in found if each.name != "job.json"}


def test_a_pulled_run_goes_on_bit_for_bit_and_can_be_pushed_back(tmp_path, url):
    undisturbed = training.train(simckpt.Store(tmp_path / "undisturbed"), 60)
    here, there = simckpt.Store(tmp_path / "here"), simckpt.Store(tmp_path / "there")
    training.train(here, 33)
    assert [(each.run, each.commits) for each in here.push("a", url)] == [("a", 3)]
    assert [(each.run, each.commits) for each in there.pull(url)] == [("a", 3)]
    assert beside(here.path, "a") == beside(there.path, "a")
    assert training.bits(training.train(there, 60)) == training.bits(undisturbed)
    assert [each.commits for each in there.push("a", url)] == [3]
    assert [each.commits for each in here.pull(url, "a")] == [3]
    assert training.bits(training.train(here, 60)) == training.bits(undisturbed)
    assert here.run("a").id == there.run("a").id
    assert [each.id for each in here.run("a").checkpoints()] == [each.id for each in there.run("a").checkpoints()]


def test_only_what_is_new_is_brought(tmp_path, fake):
    files, log = filled(tmp_path / "store", 2)
    push(files, RUN, "s3://bucket/place")
    fake.reset()
    assert push(files, RUN, "s3://bucket/place")[0].commits == 0
    assert [method for method, _ in fake.requests if method != "GET"] == []
    with files.claim(RUN):
        add(files, log, 3)
    fake.reset()
    (done,) = push(files, RUN, "s3://bucket/place")
    assert done.commits == 1
    assert len([key for method, key in fake.requests if method == "PUT" and "/segments/" in key]) == 1
    assert done.nbytes == sum(len(data) for key, data in fake.objects.items() if "/00000003/" in key) + len(
        next(data for key, data in fake.objects.items() if key.endswith(f"{_newest(files)}.h5"))
    )


def _newest(files: StoreFiles) -> str:
    (own,) = files.segment_ids(RUN, 3) - files.segment_ids(RUN, 2)
    return own


def test_tombstones_marks_and_post_mortems_go_along(tmp_path):
    files, _ = filled(tmp_path / "here", 3)
    with files.claim(RUN):
        files.prune(RUN, 2, "test")
    files.tag(RUN, 1, "good")
    files.pin(RUN, 3)
    files.add_metrics(RUN, 3, {"eval/return": 1.0})
    push(files, RUN, tmp_path / "place")
    store = simckpt.Store(tmp_path / "there")
    store.pull(tmp_path / "place", RUN)
    assert beside(files.path) == beside(store.path)
    assert store.files.marks(RUN) == files.marks(RUN)
    assert store.files.claim(RUN).release() is None
    assert_restores(store.files, 3)


def test_later_metrics_of_both_sides_are_kept(tmp_path):
    here, _ = filled(tmp_path / "here", 1)
    push(here, RUN, tmp_path / "place")
    there = simckpt.Store(tmp_path / "there").made()
    pull(tmp_path / "place", there)
    here.add_metrics(RUN, 1, {"mine": 1.0})
    there.add_metrics(RUN, 1, {"yours": 2.0})
    for files in (here, there):
        push(files, RUN, tmp_path / "place")
    for files in (here, there, here):
        pull(tmp_path / "place", files)
        (marks,) = files.marks(RUN).values()
    assert marks.metrics == {"mine": 1.0, "yours": 2.0}
    (marks,) = there.marks(RUN).values()
    assert marks.metrics == {"mine": 1.0, "yours": 2.0}
    assert len(list(there.path.glob("runs/*/marks/*/*"))) == 2, "nothing is doubled"


def test_a_branch_brings_the_run_that_it_came_from(tmp_path):
    here = simckpt.Store(tmp_path / "here")
    training.train(here, 20)
    here.run("a").at(step=10).branch("b")
    expected = training.train(here, 30, run="b")
    assert [each.run for each in here.push("b", tmp_path / "place")] == ["a", "b"]
    there = simckpt.Store(tmp_path / "there")
    assert [each.run for each in there.pull(tmp_path / "place", "b")] == ["a", "b"]
    assert there.run("b").origin().id == here.run("b").origin().id
    assert training.bits(training.train(there, 30, run="b")) == training.bits(expected)


def test_both_sides_having_written_is_an_error_that_loses_nothing(tmp_path):
    here, log = filled(tmp_path / "here", 2)
    push(here, RUN, tmp_path / "place")
    there = simckpt.Store(tmp_path / "there").made()
    pull(tmp_path / "place", there)
    with here.claim(RUN):
        add(here, log, 3)
    other = filled(tmp_path / "unused", 2)[1]
    other.forget({piece.segment for table in other.pieces.values() for piece, _ in table})
    with there.claim(RUN):
        add(there, other, 3)
    push(there, RUN, tmp_path / "place")
    before = kept_aside(here), snapshot(tmp_path / "place")
    with pytest.raises(ConflictError, match="both sides"):
        push(here, RUN, tmp_path / "place")
    with pytest.raises(ConflictError, match="both sides"):
        pull(tmp_path / "place", here)
    assert (kept_aside(here), snapshot(tmp_path / "place")) == before


def test_another_run_of_the_same_name_is_an_error_that_loses_nothing(tmp_path):
    here = filled(tmp_path / "here", 1)[0]
    push(here, RUN, tmp_path / "place")
    theirs = simckpt.Store(tmp_path / "theirs")
    with theirs.start(RUN):
        pass
    before = snapshot(tmp_path / "place")
    for act in (lambda: theirs.push(RUN, tmp_path / "place"), lambda: theirs.pull(tmp_path / "place")):
        with pytest.raises(ConflictError, match="another one"):
            act()
    assert snapshot(tmp_path / "place") == before


def test_the_archive_of_a_store_that_was_lost_gives_everything_back(tmp_path):
    files, _ = filled(tmp_path / "store", 4)
    archive(files, tmp_path / "archive", 1).move()
    saved = simckpt.Store(tmp_path / "again")
    saved.pull(tmp_path / "archive")
    for seq in (1, 2, 3, 4):
        saved.files.verify(RUN, seq)
        assert_restores(saved.files, seq)


def test_pushing_an_evicted_checkpoint_fetches_it_first(tmp_path):
    files, _ = filled(tmp_path / "store", 3)
    archive(files, tmp_path / "archive", 1).move()
    push(simckpt.Store(files.path).files, RUN, tmp_path / "place")
    there = simckpt.Store(tmp_path / "there").made()
    pull(tmp_path / "place", there)
    for seq in (1, 2, 3):
        assert_restores(there, seq)


def test_a_run_in_training_is_not_pulled_into_and_the_archive_of_another_is_not_pushed_to(tmp_path):
    files, _ = filled(tmp_path / "store", 1)
    push(files, RUN, tmp_path / "place")
    there = simckpt.Store(tmp_path / "there").made()
    pull(tmp_path / "place", there)
    with there.claim(RUN), pytest.raises(RunLockedError):
        pull(tmp_path / "place", there)
    archive(files, tmp_path / "archive").move()
    with pytest.raises(ConflictError, match="archive of store"):
        push(there, RUN, tmp_path / "archive")


def test_what_is_not_there_is_told(tmp_path):
    store = simckpt.Store(tmp_path / "store")
    with pytest.raises(ArchiveUnavailableError, match="not there"):
        store.pull(tmp_path / "place")
    assert not (tmp_path / "place").exists()
    (tmp_path / "place").mkdir()
    with pytest.raises(RunNotFoundError, match="nothing was pushed"):
        store.pull(tmp_path / "place")
    files = filled(tmp_path / "here", 1)[0]
    push(files, RUN, tmp_path / "place")
    with pytest.raises(RunNotFoundError, match=RUN):
        store.pull(tmp_path / "place", "other")
    with pytest.raises(RunNotFoundError):
        push(files, "other", tmp_path / "place")


@pytest.mark.parametrize("name", ["state.h5", "leaves.json", "commit.json", "segment", "manifest", "run.json"])
def test_a_damaged_object_is_told_by_a_pull_that_leaves_nothing_half(tmp_path, name):
    files, _ = filled(tmp_path / "here", 2)
    push(files, RUN, tmp_path / "place")
    places = {"segment": next(iter((tmp_path / "place/segments").iterdir())), "run.json": f"runs/{RUN}/run.json"}
    places["manifest"] = f"runs/{RUN}/archived/00000002.json"
    path = tmp_path / "place" / places.get(name, f"runs/{RUN}/checkpoints/00000002/{name}")
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    there = simckpt.Store(tmp_path / "there").made()
    with pytest.raises(ArchiveDamagedError):
        pull(tmp_path / "place", there)
    for seq in there.sequence(RUN) if RUN in there.runs() else []:
        there.verify(RUN, seq)
        assert_restores(there, seq)
    assert not list((there.path / "tmp").iterdir())


@pytest.mark.parametrize("name", ["state.h5", "leaves.json", "segment", "manifest"])
def test_a_missing_object_is_told_by_a_pull_that_leaves_nothing_half(tmp_path, name):
    files, _ = filled(tmp_path / "here", 2)
    push(files, RUN, tmp_path / "place")
    places = {"segment": next(iter((tmp_path / "place/segments").iterdir()))}
    places["manifest"] = f"runs/{RUN}/archived/00000002.json"
    (tmp_path / "place" / places.get(name, f"runs/{RUN}/checkpoints/00000002/{name}")).unlink()
    there = simckpt.Store(tmp_path / "there").made()
    with pytest.raises(ArchiveDamagedError):
        pull(tmp_path / "place", there)
    for seq in there.sequence(RUN):
        assert_restores(there, seq)
    assert not list((there.path / "tmp").iterdir())


@pytest.mark.parametrize("fault", ["drop after", "403", "flip"])
@pytest.mark.parametrize("act", ["push", "pull"])
def test_a_fault_at_some_requests_leaves_whole_commits_and_the_next_try_ends(tmp_path, fake, fault, act):
    files, _ = filled(tmp_path / "here", 2)
    if act == "pull":
        push(files, RUN, "s3://bucket/place", patience=HASTY)
    assert fault in FAULTS
    for at in range(1, 40, 9):
        if act == "push":
            fake.objects.clear()
        there = StoreFiles.create(tmp_path / f"there-{at}")

        def transfer(there=there):
            if act == "push":
                push(files, RUN, "s3://bucket/place", patience=HASTY)
            else:
                pull("s3://bucket/place", there, patience=HASTY)

        fake.reset()
        fake.fault = lambda number, name, at=at: fault if number == at else None
        with contextlib.suppress(ArchiveUnavailableError, ArchiveDamagedError):
            transfer()
        fake.reset()
        transfer()
        pull("s3://bucket/place", there)
        for seq in (1, 2):
            there.verify(RUN, seq)
            assert_restores(there, seq)


def test_the_commands(tmp_path):
    files, _ = filled(tmp_path / "store", 3)
    place, run = str(tmp_path / "place"), CliRunner()
    done = run.invoke(app, ["push", str(files.path), RUN, place, "--json"])
    assert done.exit_code == 0, done.output
    assert json.loads(done.output)[0]["commits"] == 3
    done = run.invoke(app, ["pull", place, str(tmp_path / "there"), RUN])
    assert done.exit_code == 0, done.output
    assert done.output.startswith(f"{RUN}: 3 commits")
    done = run.invoke(app, ["archive", str(files.path), str(tmp_path / "archive"), "--keep-last", "1", "--verify"])
    assert done.exit_code == 0, done.output
    assert "3 archived, 2 evicted" in done.output
    done = run.invoke(app, ["ls", str(files.path)])
    assert done.output.count("in the archive") == 2
    done = run.invoke(app, ["show", str(files.path), f"{RUN}@10"])
    assert "in the archive" in done.output
    done = run.invoke(app, ["log", str(files.path)])
    assert "2 in the archive" in done.output
    done = run.invoke(app, ["fetch", str(files.path), f"{RUN}@10"])
    assert done.exit_code == 0, done.output
    assert "brought back" in done.output
    done = run.invoke(app, ["archive", str(tmp_path / "there")])
    assert done.exit_code == 2
    assert "no archive yet" in done.output + done.stderr


def test_an_empty_run_is_moved_too(tmp_path):
    files = new_store(tmp_path / "here")
    push(files, RUN, tmp_path / "place")
    there = simckpt.Store(tmp_path / "there")
    there.pull(tmp_path / "place")
    assert there.run(RUN).id == files.read_run(RUN).id


def test_a_push_that_was_cut_off_keeps_its_numbers(tmp_path, fake):
    here, log = filled(tmp_path / "here", 2)
    url = "s3://bucket/place"
    push(here, RUN, url)
    there = simckpt.Store(tmp_path / "there").made()
    pull(url, there)
    other = filled(tmp_path / "unused", 2)[1]
    with here.claim(RUN):
        add(here, log, 3)
    with there.claim(RUN):
        add(there, other, 3)
    fake.reset()
    fake.fault = lambda number, name: "403" if name.startswith("PUT") and name.endswith("state.h5") else None
    with pytest.raises(ArchiveUnavailableError):
        push(here, RUN, url, patience=HASTY)
    fake.reset()
    with pytest.raises(ConflictError, match="both sides"):
        push(there, RUN, url, patience=HASTY)
    push(here, RUN, url)
    new = simckpt.Store(tmp_path / "new").made()
    pull(url, new)
    assert [record.id for record in new.records(RUN)] == [record.id for record in here.records(RUN)]
    assert_restores(new, 3)
    assert_restores(there, 3)


def test_a_store_may_push_to_its_own_archive(tmp_path):
    files, _ = filled(tmp_path / "store", 2)
    mover = archive(files, tmp_path / "archive")
    mover.move()
    assert push(files, RUN, tmp_path / "archive")[0].commits == 0
    assert mover.move().problems == []
