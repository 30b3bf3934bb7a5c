"""A job of several ranks in a real Slurm, of one node, in namespaces of its own."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import simckpt
from simckpt.comparison import compare

HERE = Path(__file__).parent
LAB = HERE.parent / "branching" / "slurm_lab.sh"
SCRIPT = HERE.parents[1] / "scripts" / "train_ppo_ddp.py"
PROGRAMS = ("slurmctld", "slurmd", "munged", "sbatch", "scontrol", "unshare", "ip")
FLAGS = (
    "--env-id InvertedPendulum-v5 --num-envs 4 --rollout-steps 16 --total-steps 2048 --save-every 128 --eval-every 128 "
    "--eval-episodes 1 --epochs 2 --minibatches 2 --timeout 60"
)


def reason_to_skip() -> str:
    missing = [name for name in PROGRAMS if shutil.which(name) is None]
    if missing:
        return f"needs {', '.join(missing)}: apt-get install slurmd slurmctld slurm-client munge iproute2"
    if subprocess.run(["unshare", "-n", "-m", "-p", "-f", "--mount-proc", "true"], capture_output=True).returncode:
        return "needs the right to make namespaces"
    return ""


def command(store: Path, run: str) -> list[str]:
    # torchrun kills ranks that have not ended after so long; a loaded machine may need more than its 30 s
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    start += ["--shutdown-timeout", "200"]
    return [*start, "--", str(SCRIPT), *FLAGS.split(), "--store", str(store), "--run", run]


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_job_that_is_preempted_and_requeued_ends_where_the_undisturbed_one_does(tmp_path: Path) -> None:
    if reason := reason_to_skip():
        pytest.skip(reason)
    store = tmp_path / "store"
    lab = ["bash", str(LAB), str(tmp_path / "lab"), sys.executable, str(HERE / "slurm_case.py"), str(tmp_path)]
    done = subprocess.run(
        [*lab, *command(store, "requeued")], env={**os.environ, "KILL_WAIT": "240"}, capture_output=True, text=True
    )
    output = tmp_path / "output"
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}\n{output.read_text() if output.exists() else ''}"
    opened = simckpt.Store(store)
    events = opened.files.events("requeued")
    stopped = [event for event in events if event["event"] == "stopped"]
    # all ranks of the job were asked at once, and there is one checkpoint of it
    assert [(event["signal"], event["problem"], event["exit_code"]) for event in stopped] == [("SIGTERM", "", 75)]
    assert [event["step"] for event in events if event["event"] == "restored"] == [stopped[0]["step"]]
    twin = subprocess.run(command(store, "undisturbed"), env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert twin.returncode == 0
    expected = {each.step: each for each in opened.run("undisturbed").checkpoints()}
    found = {each.step: each for each in opened.run("requeued").checkpoints()}
    assert found.keys() == expected.keys() | {stopped[0]["step"]}
    assert [step for step in expected if not compare(found[step], expected[step]).identical] == []
