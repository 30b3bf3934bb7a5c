"""A program that ends without closing its vector envs ends all the same."""

import contextlib
import os
import signal
import subprocess
import sys
import time

import pytest

PROGRAM = """
import os, signal, threading
import simckpt

if __name__ == "__main__":
    vector_envs = [simckpt.make_vec("CartPole-v1", num_envs=2, vectorization_mode="async") for _ in range(2)]
    for envs in vector_envs:
        envs.reset(seed=1)
    print(*[process.pid for envs in vector_envs for process in envs.unwrapped.processes], flush=True)
    {ending}
"""
ENDINGS = {
    "exception": "raise SystemExit(3)",
    "interrupt": "os.kill(os.getpid(), signal.SIGINT)\n    while True: vector_envs[0].step([0, 1])",
    "interrupted group": "os.killpg(0, signal.SIGINT)\n    while True: vector_envs[0].step([0, 1])",
    "the end": "pass",
}


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    # a dead child of a dead parent waits for init
    return " Z " not in subprocess.run(["ps", "-o", " stat ", "-p", str(pid)], capture_output=True, text=True).stdout


@pytest.mark.parametrize("ending", ENDINGS)
def test_a_program_that_leaves_its_vector_envs_open_ends_and_takes_the_workers_along(tmp_path, ending: str) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM.format(ending=ENDINGS[ending]))
    process = subprocess.Popen(
        [sys.executable, str(program)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=60)
        workers = [int(word) for word in output.split()]
        assert len(workers) == 4
        deadline = time.monotonic() + 20
        while any(map(alive, workers)):
            assert time.monotonic() < deadline, "workers are left behind"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode in (0, 3, 130, -signal.SIGINT)
