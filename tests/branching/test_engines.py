"""Processes of this machine as an engine: they fail, die and end each for itself."""

import math
import multiprocessing
import os
import signal
import subprocess
import sys
from concurrent.futures import CancelledError
from pathlib import Path
from typing import Any

import fan_out_loops as loops
import pytest
from fan_out_loops import alive, until

from simckpt.branching.engines import LocalEngine
from simckpt.branching.ray_engine import RayEngine
from simckpt.branching.slurm import SlurmEngine
from simckpt.errors import ConfigurationError, WorkerDiedError, WorkerFailedError


def test_results_come_back_in_any_order() -> None:
    with LocalEngine(2) as engine:
        futures = [engine.submit(loops.double, value) for value in range(3)]
        assert [future.result(60) for future in reversed(futures)] == [4, 2, 0]
        assert all(future.done() and not future.running() for future in futures)


def test_a_call_that_dies_or_fails_takes_no_other_with_it() -> None:
    with LocalEngine(1) as engine:
        calls = (loops.die, loops.fail, loops.interrupted, loops.double)
        died, failed, stopped, good = (engine.submit(fn, 3) for fn in calls)
        with pytest.raises(WorkerDiedError, match="killed by SIGKILL") as caught:
            died.result(60)
        assert caught.value.exit_code == -signal.SIGKILL
        with pytest.raises(WorkerFailedError, match="ValueError: no 3"):
            failed.result(60)
        with pytest.raises(WorkerFailedError, match="KeyboardInterrupt: enough of 3"):
            stopped.result(60)
        assert good.result(60) == 6


def test_a_death_is_told_though_others_collect_this_programs_dead_children() -> None:
    with LocalEngine(2) as engine:
        futures = [engine.submit(fn, 3) for fn in (loops.die, loops.double, loops.die)]
        while not all(future.done() for future in futures):
            multiprocessing.active_children()  # as the start of any other process does
        assert futures[1].result(0) == 6
        for future in (futures[0], futures[2]):
            with pytest.raises(WorkerDiedError, match="ended without a result"):
                future.result(0)


def test_calls_that_wait_for_their_turn_hold_no_files_open() -> None:
    with LocalEngine(1) as engine:
        before = len(list(Path("/proc/self/fd").iterdir()))
        for _ in range(100):
            engine.submit(loops.double, 1)
        assert len(list(Path("/proc/self/fd").iterdir())) < before + 20


def test_a_call_that_is_deaf_to_sigterm_is_killed_with_its_children(tmp_path: Path) -> None:
    noted = tmp_path / "pids"
    with LocalEngine(1, grace=0.2) as engine:
        future, waiting = engine.submit(loops.leave_children, str(noted)), engine.submit(loops.double, 1)
        until(noted.exists)
        assert future.running()
        assert not waiting.running()
        assert waiting.cancel()
        assert future.cancel()
        with pytest.raises(WorkerDiedError, match="SIGKILL"):
            future.result(60)
        with pytest.raises(CancelledError):
            waiting.result(60)
    pids = [int(pid) for pid in noted.read_text().split()]
    until(lambda: not any(map(alive, pids)))


def test_calls_end_when_the_program_that_made_them_is_killed(tmp_path: Path) -> None:
    noted = tmp_path / "pids"
    code = "import sys; sys.path[:0] = sys.argv[2:]\nimport fan_out_loops as loops\n"
    code += (
        "from simckpt.branching.engines import LocalEngine\nLocalEngine(1).submit(loops.leave_children, sys.argv[1])"
    )
    program = subprocess.Popen([sys.executable, "-c", code, str(noted), *sys.path])
    until(noted.exists)
    pids = [int(pid) for pid in noted.read_text().split()]
    assert all(map(alive, pids))
    program.kill()
    program.wait()
    until(lambda: not any(map(alive, pids)))


def test_leaving_the_block_ends_what_is_left(tmp_path: Path) -> None:
    noted = tmp_path / "pids"
    with LocalEngine(1, grace=0.2) as engine:
        engine.submit(loops.leave_children, str(noted))
        until(noted.exists)
    pids = [int(pid) for pid in noted.read_text().split()]
    assert not alive(pids[0])
    # its child was killed, too; the kernel takes a moment
    until(lambda: not alive(pids[1]))


def test_what_cannot_be_sent_is_told() -> None:
    with LocalEngine(1) as engine, pytest.raises(ConfigurationError, match="a function of a module"):
        engine.submit(lambda: 1).result(60)


@pytest.mark.parametrize("max_workers", [0, -1, 1.5, "2", True, math.nan, [2]], ids=repr)
def test_workers_are_a_whole_number_of_at_least_one(max_workers: Any) -> None:
    with pytest.raises(ConfigurationError, match="max_workers") as caught:
        LocalEngine(max_workers)
    assert caught.value.keys == ("max_workers",)


@pytest.mark.parametrize("grace", [-1.0, math.nan, math.inf, "1", None, True], ids=repr)
def test_the_grace_period_is_a_time(grace: Any) -> None:
    for engine in (LocalEngine, RayEngine):
        with pytest.raises(ConfigurationError, match="grace"):
            engine(grace=grace)


@pytest.mark.parametrize("share", [-1, math.nan, math.inf, "1", None, True], ids=repr)
@pytest.mark.parametrize("option", ["cpus", "gpus"])
def test_what_a_call_takes_of_ray_is_a_number(option: str, share: Any) -> None:
    with pytest.raises(ConfigurationError, match=option):
        RayEngine(**{option: share})


def test_the_address_of_a_ray_is_a_text() -> None:
    with pytest.raises(ConfigurationError, match="address"):
        RayEngine(address=6379)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("folder", 5),
        ("folder", None),
        ("python", 3),
        ("python", ""),
        ("warning", "120"),
        ("warning", 0),
        ("warning", 1.5),
    ],
)
def test_arguments_of_a_slurm_engine_are_checked_first(option: str, value: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=option):
        SlurmEngine(**{"folder": tmp_path / "jobs", option: value})


def test_a_script_without_a_main_guard_is_told_so(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "from simckpt.branching.engines import LocalEngine\n"
        "def one(): return 1\n"
        "with LocalEngine(1) as engine:\n"
        "    engine.submit(one).result(60)\n"
    )
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, cwd=tmp_path)
    assert "put `if __name__ == '__main__':` around" in done.stderr
    assert done.returncode == 1


def test_a_standard_executor_follows_the_protocol() -> None:
    from concurrent.futures import ThreadPoolExecutor

    from simckpt.branching.engines import Engine

    def submitted(engine: Engine) -> object:
        return engine.submit(os.path.basename, "a/b").result(60)

    with ThreadPoolExecutor(1) as executor:
        assert submitted(executor) == "b"
