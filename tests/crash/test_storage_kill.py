"""SIGKILL before every single operation of a save and a prune, in the middle of every write, and at random moments."""

import os
import random
import select
import signal
import subprocess
import sys

import pytest
from crash_helpers import (
    RUN,
    FaultyDisk,
    check_after_death,
    in_child,
    kill,
    new_store,
    save,
    tear_and_kill,
)

from simckpt.storage import StoreFiles


def save_and_prune(path, fault=None, at: int = 0) -> FaultyDisk:
    """What a training process does between two saves: claim, save, drop an old checkpoint."""
    disk = FaultyDisk()
    store = StoreFiles.open(path, disk=disk)
    disk.arm(fault, at=at)
    with store.claim(RUN):
        save(store, 3)
        store.prune(RUN, 1, "test")
    return disk


def store_with_two(path):
    store = new_store(path)
    with store.claim(RUN):
        save(store, 1)
        save(store, 2)
    return path


@pytest.mark.parametrize("fault", [kill, tear_and_kill], ids=["before", "torn"])
def test_a_process_killed_at_any_operation_loses_nothing(tmp_path, fault):
    calls = save_and_prune(store_with_two(tmp_path / "count")).calls
    seen = []
    for at in range(1, len(calls) + 1):
        if fault is tear_and_kill and calls[at - 1] != "pwrite":
            continue
        path = store_with_two(tmp_path / f"store-{at}")
        assert in_child(lambda path=path, at=at: save_and_prune(path, fault, at)) == -signal.SIGKILL
        found = check_after_death(path)
        assert found in ([1, 2], [1, 2, 3], [-1, 2, 3])
        seen.append(tuple(found))
    assert seen == sorted(seen, key=[(1, 2), (1, 2, 3), (-1, 2, 3)].index), "later kills never leave less"


def test_a_new_store_and_run_survive_a_kill_at_any_operation(tmp_path):
    disk = FaultyDisk()
    new_store(tmp_path / "count", disk=disk)
    for at in range(1, len(disk.calls) + 1):
        path = tmp_path / f"store-{at}"

        def start(path=path, at=at):
            disk = FaultyDisk()
            disk.arm(kill, at=at)
            new_store(path, disk=disk)

        assert in_child(start) == -signal.SIGKILL
        store = StoreFiles.create(path)
        if store.runs() == []:
            new_store(path)
        with store.claim(RUN):
            save(store, 1)
        assert check_after_death(path) == [1]


WRITER = """
import sys
sys.path.insert(0, sys.argv[1])
import os
from crash_helpers import RUN, save
from simckpt.storage import StoreFiles

def work(path):
    store = StoreFiles.open(path)
    with store.claim(RUN):
        step = max((record.step for record in store.records(RUN)), default=0)
        while True:
            step += 1
            record = save(store, step)
            os.write(1, b"%d\\n" % step)
            if record.seq > 3 and step % 2:
                store.prune(RUN, record.seq - 3, "old")

# one warm process forks the writers, so that a kill costs milliseconds and not an interpreter's start
for line in sys.stdin:
    child = os.fork()
    if child == 0:
        work(sys.argv[2])
    os.write(1, b"pid %d\\n" % child)
    os.waitpid(child, 0)
    os.write(1, b"dead\\n")
"""


def test_a_writer_killed_at_random_moments_loses_nothing_it_had_reported(tmp_path):
    path = new_store(tmp_path / "store").path
    here = os.path.dirname(__file__)  # noqa: PTH120
    rng = random.Random(0)
    reported: list[int] = []
    with subprocess.Popen(
        [sys.executable, "-c", WRITER, here, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as server:
        for _ in range(25):
            reported += kill_one_writer(server, rng.uniform(0, 0.03), minimum=rng.randrange(3))
            found = check_after_death(path)
            assert [abs(step) for step in found] == list(range(1, len(found) + 1))
            assert len(found) >= max(reported, default=0)
        server.stdin.close()
    assert reported == sorted(set(reported))
    assert len(reported) >= 20


def kill_one_writer(server, delay: float, *, minimum: int) -> list[int]:
    """Returns the steps that the writer reported before it was killed, `delay` seconds after the first `minimum`."""
    server.stdin.write(b"go\n")
    server.stdin.flush()
    pid, reported = None, []
    while pid is None or len(reported) < minimum:
        line = server.stdout.readline().split()
        pid, reported = (int(line[1]), reported) if line[0] == b"pid" else (pid, [*reported, int(line[0])])
    select.select([], [], [], delay)
    os.kill(pid, signal.SIGKILL)
    while (line := server.stdout.readline().strip()) != b"dead":
        reported.append(int(line))
    return reported
