"""Fan-out over a real Slurm, of one node, in namespaces of its own."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from simckpt.branching.slurm import SlurmEngine
from simckpt.errors import ConfigurationError

HERE = Path(__file__).parent
PROGRAMS = ("slurmctld", "slurmd", "munged", "sbatch", "squeue", "scontrol", "unshare", "ip")


def reason_to_skip() -> str:
    missing = [name for name in PROGRAMS if shutil.which(name) is None]
    if missing:
        return f"needs {', '.join(missing)}: apt-get install slurmd slurmctld slurm-client munge"
    if subprocess.run(["unshare", "-n", "-m", "-p", "-f", "--mount-proc", "true"], capture_output=True).returncode:
        return "needs the right to make namespaces"
    return ""


@pytest.mark.slow
@pytest.mark.parametrize("case", ["calls", "fails_and_dies", "requeues", "killed", "deadline"])
def test_a_real_cluster(case: str, tmp_path: Path) -> None:
    pytest.importorskip("submitit")
    if reason := reason_to_skip():
        pytest.skip(reason)
    command = ["bash", str(HERE / "slurm_lab.sh"), str(tmp_path / "lab"), sys.executable]
    command += [str(HERE / "slurm_cases.py"), case, str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"


def test_a_machine_without_slurm_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("submitit")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigurationError, match="srun"):
        SlurmEngine(tmp_path / "jobs")


@pytest.mark.parametrize("parameter", ["partitoin", "dependency"])
def test_parameters_that_make_no_sense_are_told(
    parameter: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("submitit")
    srun = tmp_path / "srun"
    srun.touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigurationError, match=parameter):
        SlurmEngine(tmp_path / "jobs", **{parameter: "gpu"})
