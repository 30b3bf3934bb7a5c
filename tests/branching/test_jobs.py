"""Jobs as JSON: how a branch ended in one, and the command that runs a file."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import fan_out_loops as loops
import pytest

import simckpt
from simckpt.branching.jobs import branch_job, call_file, is_complete, train_branch
from simckpt.errors import ConfigurationError


def run_file(file: Path, result: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "simckpt.branching.jobs", str(file), str(result)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.run(command, env=environment, capture_output=True, text=True)


def test_arguments_of_a_call_are_what_json_can_hold() -> None:
    with pytest.raises(ConfigurationError, match="JSON"):
        call_file(loops.double, (object(),))


def test_a_file_is_run_by_a_command(tmp_path: Path) -> None:
    (tmp_path / "job.json").write_bytes(call_file(loops.double, (21,)))
    done = run_file(tmp_path / "job.json", tmp_path / "result.json")
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "result.json").read_text()) == 42


def test_a_script_is_found_by_its_file(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import sys\n"
        "from pathlib import Path\n"
        "from simckpt.branching.jobs import call_file\n"
        "def triple(value): return 3 * value\n"
        "if __name__ == '__main__':\n"
        "    Path(sys.argv[1]).write_bytes(call_file(triple, (2,)))\n"
    )
    subprocess.run([sys.executable, "script.py", str(tmp_path / "job.json")], check=True, cwd=tmp_path)
    done = run_file(tmp_path / "job.json", tmp_path / "result.json")
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "result.json").read_text()) == 6


@pytest.fixture
def store(tmp_path: Path) -> Path:
    loops.make_origin(tmp_path / "store").branch("branch")
    return tmp_path / "store"


def test_a_branch_that_a_signal_ended_asks_to_be_started_again(store: Path, tmp_path: Path) -> None:
    job = branch_job(store, "branch", loops.train_until_signalled, log=None)
    (tmp_path / "job.json").write_bytes(call_file(train_branch, (job,)))
    done = run_file(tmp_path / "job.json", tmp_path / "result.json")
    assert done.returncode == simckpt.EXIT_REQUEUE
    assert not (tmp_path / "result.json").exists()
    run = simckpt.Store(store).run("branch")
    assert run.latest().step == 12
    assert not is_complete(run)
    again = branch_job(store, "branch", loops.train, log=None)
    assert train_branch(again)["status"] == "complete"
    assert is_complete(run)


def test_a_branch_that_rolls_back_is_trained_on(store: Path) -> None:
    # as `simckpt.supervise` does
    answer = train_branch(branch_job(store, "branch", loops.train_after_a_rollback, log=None))
    assert answer["status"] == "complete"
    assert simckpt.Store(store).run("branch").latest().step == 40


def test_a_branch_that_another_job_has_just_completed_is_not_trained_again(store: Path) -> None:
    with ThreadPoolExecutor(1) as thread:
        with simckpt.Store(store).start("branch") as run:
            second = thread.submit(train_branch, branch_job(store, "branch", loops.train, log=None))
            loops.train_run(run, until=40)
            run.latest().tag("complete")
        assert second.result(60)["status"] == "complete"
    assert loops.trained(store) == [("branch", 10)]


def test_a_script_that_exits_well_is_complete(store: Path) -> None:
    answer = train_branch(branch_job(store, "branch", loops.train_and_exit, log=None))
    assert answer["status"] == "complete"
    assert is_complete(simckpt.Store(store).run("branch"))


def test_a_training_that_saves_nothing_has_failed(store: Path) -> None:
    for _ in range(2):
        answer = train_branch(branch_job(store, "branch", loops.train_without_checkpoints, log=None))
        assert answer["status"] == "failed"
        assert answer["error"].startswith("returned without a checkpoint")
        assert "step 10, where it begins" in answer["error"]
    # one that has saved before has nothing to do, and that is well
    loops.train(str(store), "branch")
    answer = train_branch(branch_job(store, "branch", loops.train_without_checkpoints, log=None))
    assert answer["status"] == "complete"
    assert is_complete(simckpt.Store(store).run("branch"))


@pytest.mark.parametrize(
    ("train", "status", "error"),
    [
        (loops.interrupt, "interrupted", "KeyboardInterrupt: enough"),
        (loops.cancel, "failed", "CancelledError: by a coroutine"),
        (loops.train_until_signalled, "interrupted", "ended by a signal after a save"),
    ],
    ids=["KeyboardInterrupt", "another BaseException", "a signal"],
)
def test_what_ends_a_training_without_being_an_error_is_told(
    store: Path, train: Callable[[str, str], None], status: str, error: str
) -> None:
    answer = train_branch(branch_job(store, "branch", train, log=None))
    assert answer["status"] == status
    assert answer["error"].strip().endswith(error)


def test_a_branch_is_told_to_give_three_heartbeats_in_the_time_that_it_may_be_silent(store: Path) -> None:
    def beat(heartbeat: float | None) -> float:
        return branch_job(store, "branch", loops.train, log=None, heartbeat=heartbeat)["beat"]

    assert [beat(3.0), beat(60.0), beat(1800.0), beat(None)] == [1.0, 20.0, 30.0, 30.0]


def test_a_branch_beats_as_often_as_it_is_told(store: Path) -> None:
    # at the usual rate, every 30 s, it would end without having been heard of
    answer = train_branch(branch_job(store, "branch", loops.train_until_heard_of, log=None, heartbeat=1.0))
    assert answer["status"] == "complete", answer["error"]
