"""A check beside saves, prunes and compact raises no false alarm, and needs no right to write."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from log_helpers import RUN, Log
from maintenance_helpers import PLAIN, commit, everything
from storage_helpers import ReadOnlyDisk, run_record

from simckpt.maintenance import check as check_module
from simckpt.maintenance.check import Scope, check
from simckpt.storage import StoreFiles, hdf5_reader

WRITER = """
import sys
sys.path[:0] = {paths!r}
from log_helpers import RUN, Log
from maintenance_helpers import commit
from simckpt.storage import StoreFiles
store, log, parent = StoreFiles.open({root!r}), Log(capacity=60), None
with store.claim(RUN):
    while True:
        log.add(10)
        parent = commit(store, log, parent=parent).id
        for seq in store.sequence(RUN)[-6:-2]:
            store.prune(RUN, seq, "old")
        store.compact()
        print("x", flush=True)
"""


def test_what_others_do_meanwhile_is_no_damage(tmp_path):
    store = StoreFiles.create(tmp_path / "store")
    store.write_run(RUN, run_record(RUN))
    commit(store, Log())
    here = Path(__file__).parent
    paths = [str(here), str(here.parent / "storage"), str(here.parent.parent)]
    code = WRITER.format(paths=paths, root=str(store.path))
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        process.stdout.readline()
        until, checks = time.monotonic() + 2.0, 0
        while checks < 5 or time.monotonic() < until:
            report = check(store.path, PLAIN if checks % 2 else Scope(quick=True))
            assert not report.damage, report.damage
            assert not report.unchecked
            checks += 1
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
    assert len(store.sequence(RUN)) > 3
    assert check(store.path, PLAIN)


def test_a_checkpoint_that_is_pruned_between_two_looks_is_no_damage(store, monkeypatch):
    real, pruned = check_module.examine_arrays, []

    def prune_first(files, run, index, notes, advance):
        if not pruned and (run, index.commit.seq) == (RUN, 2):
            # its files go while they are read
            pruned.append(store.prune(RUN, 2, "now"))
        real(files, run, index, notes, advance)

    monkeypatch.setattr(check_module, "examine_arrays", prune_first)
    assert check(store.path, PLAIN)
    assert pruned


def test_segments_that_go_with_their_last_checkpoint_are_no_damage(store, monkeypatch):
    real, pruned = check_module.examine_segment, []

    def prune_first(files, identity, needs, **how):
        if not pruned:
            pruned.append(store.prune(RUN, 2, "now"))
        return real(files, identity, needs, **how)

    monkeypatch.setattr(check_module, "examine_segment", prune_first)
    assert check(store.path, PLAIN)


def test_a_check_changes_nothing_and_needs_no_permission_to(store):
    before = everything(store.path)
    for path in (store.path, *store.path.rglob("*")):
        path.chmod(0o555 if path.is_dir() else 0o444)
    try:
        with hdf5_reader.Reader() as files:
            report = check_module._Check(StoreFiles.open(store.path, disk=ReadOnlyDisk()), PLAIN, None, files).run()
    finally:
        for path in (store.path, *store.path.rglob("*")):
            path.chmod(0o755 if path.is_dir() else 0o644)
    assert report
    assert everything(store.path) == before


def test_a_file_that_may_not_be_read_was_not_checked(store, monkeypatch):
    real = os.open

    def refuse(path, *arguments, **options):
        if path == "state.h5":
            raise PermissionError(13, "Permission denied")
        return real(path, *arguments, **options)

    monkeypatch.setattr(os, "open", refuse)
    report = check(store.path, PLAIN)
    assert not report.damage
    assert len(report.unchecked) == 4
