"""Stores, exported files and HDF5 files of strangers: refused, or read harmlessly, through every door.

Nothing outside is opened, no door takes more than 512 MB besides what the libraries do, or 30 s of processor time for
all doors of one thing together. The fast suite takes a share of the kinds, the slow one all of them, under strace.
"""

import shutil
import subprocess

import corpus
import hostile_suite
import pytest

FAST = {
    f"link runs/{corpus.RUN}/checkpoints",
    "link trash",
    "odd names of marks",
    "parents in a circle",
    "path with controls",
    "nested values in a start",
    "run id",
    "structure of floats",
    "moment beyond calendars",
    "surrogates in texts",
    "controls in hyperparameters",
    "huge empty shape",
    "elements without bytes",
    "same rows a thousand times",
    "shared tuples as a key",
    "keys of one hash",
    "class named",
    "directory larger than the file",
    "record beyond the end",
    "shared: a leaf without rows",
    "structure of shared parts",
    "external link to a FIFO",
    "external storage",
    "virtual, itself",
    "virtual, growing",
    "chunks without bytes",
    "deep groups",
}


def check(outcome: hostile_suite.Outcome) -> None:
    assert outcome.faults == []
    assert outcome.foreign == []
    assert outcome.taken == []


def test_a_share_of_all_kinds_is_refused_or_harmless(tmp_path):
    outcome = hostile_suite.run_corpus(tmp_path, FAST.__contains__)
    assert outcome.tried == len(FAST)
    check(outcome)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_all_kinds_are_refused_or_harmless(tmp_path):
    outcome = hostile_suite.run_corpus(tmp_path)
    assert outcome.tried > 200
    check(outcome)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_no_kind_makes_the_process_open_anything_outside(tmp_path):
    """By what the kernel saw, every thread and child process included."""
    strace = shutil.which("strace")
    if strace is None or subprocess.run([strace, "-f", "true"], capture_output=True, check=False).returncode:
        pytest.skip("strace does not work here")
    root = tmp_path / "corpus"
    root.mkdir()
    outcome, opened = hostile_suite.traced(root, strace, lambda name: name not in SLOW_UNDER_STRACE)
    check(outcome)
    assert any(path.endswith("state.h5") for path in opened)
    assert [path for path in opened if path.startswith(str(root / "outside"))] == []
    assert [path for path in opened if not path.startswith((str(root), *hostile_suite.OWN_FILES))] == []


SLOW_UNDER_STRACE = {"a file for each leaf"}


@pytest.mark.parametrize("resealed", [False, True])
def test_some_mutants_are_refused_or_restored_as_saved(tmp_path, resealed):
    outcome = hostile_suite.run_mutants(tmp_path, 40, seed=7, resealed=resealed)
    assert (outcome.faults, outcome.foreign) == ([], [])
    assert outcome.tried == 40
    assert outcome.refused > 15
    assert resealed or outcome.different == 0


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize(("resealed", "count"), [(False, 6000), (True, 4000)])
def test_ten_thousand_mutants_are_refused_or_restored_as_saved(tmp_path, resealed, count):
    outcome = hostile_suite.run_mutants(tmp_path, count, seed=0, resealed=resealed)
    assert (outcome.faults, outcome.foreign) == ([], [])
    assert outcome.tried == count
    assert outcome.refused > count // 3
    assert resealed or outcome.different == 0


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_check_that_is_left_out_is_noticed(tmp_path):
    assert hostile_suite.broken_variants(tmp_path) == {"digests": True, "links": True, "bound": True}
