"""The network between ranks is cut: three machines, each a network namespace with a cable to a router in a fourth."""

import contextlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import partition_program
import pytest
from partition_program import TIMEOUT
from ranks import PATHS, Ranks
from run_helpers import LIMIT, leftovers, steps

import simckpt
from simckpt.distributed.keys import ANSWER
from simckpt.distributed.voting import GRACE

PROGRAM = Path(__file__).with_name("partition_program.py")
PORT = 29500  # in a namespace of its own, nobody else has it
BOUND = 2 * TIMEOUT + GRACE + 2 * ANSWER  # [s] from the cut to the end of the last rank
SLOW = 60.0  # [s] that a loaded machine may add


def reason_to_skip() -> str:
    missing = [name for name in ("ip", "unshare", "nsenter") if shutil.which(name) is None]
    if missing:
        return f"needs {', '.join(missing)}: apt-get install iproute2 util-linux"
    # a pair of virtual network cards, which some kernels have no module for
    pair = subprocess.run(["unshare", "-n", "ip", "link", "add", "v0", "type", "veth", "peer", "name", "v1"])
    return "needs the right to make network namespaces, and veth" if pair.returncode else ""


class Machines:
    """Namespaces whose first processes sleep; the last one is the router's."""

    def __init__(self, count: int) -> None:
        self._sleepers = [
            subprocess.Popen(["unshare", "-n", "sh", "-c", "echo; exec sleep infinity"], stdout=subprocess.PIPE)
            for _ in range(count + 1)
        ]
        for sleeper in self._sleepers:
            assert sleeper.stdout is not None
            sleeper.stdout.readline()  # it is in its namespace
        self._router = count
        self._run(self._router, "echo 1 > /proc/sys/net/ipv4/ip_forward")
        for machine in range(count):
            pid = self._sleepers[machine].pid
            self._run(self._router, f"ip link add cable{machine} type veth peer name eth0 netns {pid}")
            self._run(self._router, f"ip addr add 10.77.{machine}.1/24 dev cable{machine}")
            self._run(machine, f"ip link set lo up; ip addr add 10.77.{machine}.2/24 dev eth0; ip link set eth0 up")
            self.mend(machine)
            self._run(machine, f"ip route add default via 10.77.{machine}.1")

    def _run(self, machine: int, command: str) -> None:
        subprocess.run([*self.inside(machine), "sh", "-e", "-c", command], check=True)

    def inside(self, machine: int) -> list[str]:
        return ["nsenter", "-t", str(self._sleepers[machine].pid), "-n"]

    def cut(self, machine: int) -> None:
        """Pulls the cable: what is sent is lost, and nobody is told."""
        self._run(self._router, f"ip link set cable{machine} down")

    def mend(self, machine: int) -> None:
        self._run(self._router, f"ip link set cable{machine} up")

    def close(self) -> None:
        for sleeper in self._sleepers:
            sleeper.kill()
            sleeper.wait()
            assert sleeper.stdout is not None
            sleeper.stdout.close()


@pytest.fixture
def machines() -> Iterator[Machines]:
    if reason := reason_to_skip():
        pytest.skip(reason)
    with contextlib.closing(Machines(3)) as found:
        yield found


class Started:
    """The ranks on their machines; rank 0's has the store of keys."""

    def __init__(self, machines: Machines, store: Path, how: str) -> None:
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(map(str, PATHS)),
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "eth0",
            "TORCH_CPP_LOG_LEVEL": "ERROR",
            "MASTER_ADDR": "10.77.0.2",
            "MASTER_PORT": str(PORT),
            "WORLD_SIZE": "3",
        }
        self.processes = [
            subprocess.Popen(
                [*machines.inside(rank), sys.executable, str(PROGRAM), str(store), how],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            )
            for rank in range(3)
        ]

    def read_until_voting(self) -> None:
        for process in self.processes:
            assert process.stdout is not None
            assert process.stdout.readline() == "voting\n"

    def ended(self, limit: float) -> list[dict[str, Any]]:
        """Lets them go on, and returns what they say at their end."""
        found = []
        for process in self.processes:
            assert process.stdin is not None
            process.stdin.write("go on\n")
            process.stdin.flush()
        for process in self.processes:
            out, _ = process.communicate(timeout=limit)
            found.append(json.loads(out.splitlines()[-1]))
        return found

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.communicate()


def undisturbed(rank: int, size: int, store: str) -> dict[str, str]:
    return partition_program.train(rank, size, store)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("lost", [2, 0])
def test_ranks_that_cannot_reach_each_other_give_up_and_the_next_start_resumes(
    machines: Machines, ranks: Ranks, tmp_path: Path, lost: int
) -> None:
    store = tmp_path / "cut"
    with contextlib.closing(Started(machines, store, "disturbed")) as started:
        started.read_until_voting()
        machines.cut(lost)
        found = started.ended(BOUND + SLOW)
    for rank, told in enumerate(found):
        assert "error" in told, (rank, told)
        assert told["seconds"] < BOUND + SLOW / 2, (rank, told)
        # whoever still has the store of keys knows who is missing: from the save, and from the step after it
        if lost != 0 and rank != lost:
            assert told["ranks"] == [lost], (rank, told)
            assert f"rank {lost} did not report" in " ".join([*told["saves"], told["message"]]), (rank, told)
    # not even the part of the one that was cut off is taken for a checkpoint
    assert steps(store) == [5]
    assert simckpt.Store(store).check()
    machines.mend(lost)
    with contextlib.closing(Started(machines, store, "undisturbed")) as started:
        again = [told["fingerprint"] for told in started.ended(LIMIT)]
    assert again == ranks.run(3, undisturbed, str(tmp_path / "whole"), limit=LIMIT)
    assert steps(store) == [5, 10]
    assert not leftovers(store)
