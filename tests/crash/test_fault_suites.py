"""A small share of the suites of `make reliability`, the faults that they must notice included."""

import errno
import os
from collections import Counter

import pytest
import suite_faults
import suite_interleaving
import suite_limits
import suite_machine
import suite_stress
from reliability import folder
from store_operations import CASES, case
from store_states import BrokenError, States, small_leaves_count
from suite_faults import MODES, Trial, mode, tries
from suite_power_loss import HARMLESS, NECESSARY, cut_power, noticed, recorded, syncs

from simckpt.storage import StoreFiles
from simckpt.testing.faults import FaultyDisk, fail
from simckpt.testing.power_loss import RecordingDisk


@pytest.fixture(autouse=True)
def _small() -> None:
    with small_leaves_count():
        yield


@pytest.mark.parametrize("each", CASES, ids=lambda each: each.name)
def test_a_fault_at_an_operation_of_anything_keeps_the_promises(each, tmp_path) -> None:
    number = CASES.index(each)
    trial = Trial(each, tmp_path / "trial", States(number))
    # a kill and three other kinds of fault, other ones in each case; `make reliability` tries all everywhere
    for place, kind in enumerate([mode("kill"), *(MODES[(3 * number + turn) % len(MODES)] for turn in range(3))]):
        for at in tries(trial, kind, 1, number * 7 + place * 5)[:1]:
            trial.attempt(kind, at)


@pytest.mark.parametrize("name", ["files of a pruned checkpoint removed before the tombstone", "digests not compared"])
def test_the_suite_of_faults_notices(name) -> None:
    assert suite_faults.caught(name)


def test_an_error_without_a_type_is_noticed(tmp_path) -> None:
    def broken(operation):
        raise ValueError(f"no refusal of the operating system at {operation.name}")

    trial = Trial(case("tag"), tmp_path / "trial", States())
    with pytest.raises(BrokenError, match="no refusal"):
        trial.attempt(suite_faults.Mode("ValueError", broken), 3)


@pytest.mark.parametrize(
    ("name", "relaxed"),
    [
        ("prune, freeing none", False),
        ("branch", True),
        ("tag", True),
        ("later metrics", False),
        pytest.param("prune of ranks", False, marks=pytest.mark.slow),
        pytest.param("save of ranks", False, marks=pytest.mark.slow),
        pytest.param("save of ranks", True, marks=pytest.mark.slow),
    ],
)
def test_after_a_power_failure_what_returned_is_there(name, relaxed, tmp_path) -> None:
    found = recorded(case(name), tmp_path / "case", States())
    count = cut_power(found, tmp_path, relaxed=relaxed, samples=1, every=4)
    assert (count.lost, count.damaged) == (0, 0), count.examples
    assert count.states >= count.distinct > 5


def test_the_suite_of_power_failures_notices_a_missing_sync() -> None:
    pairs = [("save", "checkpoints/"), ("branch", "run.json"), ("save of ranks", "shard-00001-of-00002.h5")]
    assert set(pairs) <= set(NECESSARY)
    assert all(noticed(pairs).values())


@pytest.mark.parametrize("name", ["save", "save of ranks"])
def test_every_sync_of_a_save_is_needed_or_known_not_to_be(name, tmp_path) -> None:
    found = set(syncs(recorded(case(name), tmp_path / "case", States())))
    assert found == {sync for other, sync in NECESSARY if other == name} | (found & HARMLESS)


def test_a_recording_knows_what_is_durable(tmp_path) -> None:
    """Of a file that was created, written and synced, the name may be lost until its folder is synced."""
    disk = RecordingDisk(tmp_path)
    descriptor = disk.create(tmp_path / "file")
    disk.pwrite(descriptor, b"content", 0)
    named = [dict(state.files) for state in disk.recording.states(relaxed=False, samples=0)][-6:]
    assert {} in named
    assert {"file": b""} in named
    assert {"file": bytes(7)} in named
    assert {"file": b"content"} in named
    disk.fsync(descriptor)
    disk.close(descriptor)
    moment = len(disk.recording.events)
    last = [dict(state.files) for state in disk.recording.states(relaxed=False, samples=9) if state.moment == moment]
    assert {} in last
    assert all(files in ({}, {"file": b"content"}) for files in last)
    folder_descriptor = os.open(tmp_path, os.O_RDONLY)
    disk.fsync(folder_descriptor)
    os.close(folder_descriptor)
    moment = len(disk.recording.events)
    last = [dict(state.files) for state in disk.recording.states(relaxed=True, samples=9) if state.moment == moment]
    assert last == [{"file": b"content"}] * len(last)


@pytest.mark.parametrize("name", ["save, prune", "branch, prune"])
def test_interleavings_break_nothing(name) -> None:
    found = suite_interleaving.explore(name, States(), depth=1, kills=True, wanted=8, drawn=2)
    assert found.tried == 10
    assert found.failures == 0, found.examples


@pytest.mark.parametrize("name", ["prune without reading announcements", "prune that does not look for branches"])
def test_interleavings_notice(name) -> None:
    assert suite_interleaving.caught(name)


def test_a_store_driven_at_random_equals_its_model() -> None:
    with suite_machine.counted() as counts:
        suite_machine.drive(3, 25)
    assert counts["checkpoints compared"] > 20


@pytest.mark.slow
def test_the_state_machine_notices() -> None:
    assert suite_machine.caught("pruned without a parent")


def test_processes_that_are_killed_in_one_store_break_nothing() -> None:
    with folder() as base:
        done = suite_stress.stress(base, 2.0, processes=3, seed=0, states=States())
    assert done["kills"] >= 3


def test_a_limit_on_the_size_of_files_costs_the_save_alone(tmp_path) -> None:
    limits = suite_limits._limiting(suite_limits.resource.RLIMIT_FSIZE, 3000)
    assert suite_limits.limited(tmp_path / "limited", States(), *limits) == suite_limits.REFUSED


def test_no_system_call_passes_the_disk_by(tmp_path) -> None:
    found = suite_limits.unseen(tmp_path)
    if found is None:
        pytest.skip("no strace, or it may not trace")
    counted, seen = found
    assert seen == Counter({name: count for name, count in counted.items() if count})


def test_an_installed_disk_is_under_every_store(tmp_path) -> None:
    disk = FaultyDisk()
    with disk.installed():
        trial = case("save").made(tmp_path / "world", States())
        store = StoreFiles.open(trial.base / "store")
        disk.arm(fail(errno.ENOSPC), at=2)
        with pytest.raises(OSError, match="No space left"):
            store.tag("run", 1, "good")
        assert disk.hit == disk.calls[1]
