"""`sweep.py` on a run of `train_ppo.py`."""

import subprocess
import sys
from pathlib import Path

import simckpt
from simckpt.comparison import compare

SCRIPTS = Path(__file__).parents[2] / "scripts"
FLAGS = "--num-envs 2 --rollout-steps 16 --total-steps 96 --minibatches 2 --epochs 1 --eval-every 0 --save-every 32"


def run_script(name: str, *flags: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(SCRIPTS / name), *flags], capture_output=True, text=True)


def test_learning_rates_branch_from_one_checkpoint_and_are_trained_once(tmp_path: Path) -> None:
    store = tmp_path / "store"
    trained = run_script("train_ppo.py", *FLAGS.split(), "--store", str(store))
    assert trained.returncode == 0, trained.stderr
    flags = ["ppo@32", "--store", str(store), "--logs", str(tmp_path / "logs"), *FLAGS.split()]
    # two that agree in six digits are two
    flags += ["--learning-rates", "3e-4", "3.000001e-4"]

    first = run_script("sweep.py", *flags)
    assert first.returncode == 0, first.stderr
    opened = simckpt.Store(store)
    for rate in ("0.0003", "0.0003000001"):
        run = opened.run(f"ppo-{rate}")
        assert run.latest().step == 96
        assert run.latest().hyperparameters["learning_rate"] == float(rate)
        assert "complete step=96" in (tmp_path / "logs" / f"ppo-{rate}.log").read_text()
    same, other, origin = (opened.run(name).latest() for name in ("ppo-0.0003", "ppo-0.0003000001", "ppo"))
    # the learning rate of the origin itself changes nothing
    assert compare(same, origin).identical
    assert not compare(other, origin).identical

    sizes = {name: (tmp_path / "logs" / f"{name}.log").stat().st_size for name in ("ppo-0.0003", "ppo-0.0003000001")}
    again = run_script("sweep.py", *flags)
    assert again.returncode == 0, again.stderr
    assert {name: (tmp_path / "logs" / f"{name}.log").stat().st_size for name in sizes} == sizes

    # another checkpoint needs other names; and what cannot be is told in a line
    clash = run_script("sweep.py", "ppo@64", *flags[1:])
    assert clash.returncode == 1
    assert clash.stderr.startswith("sweep.py: run 'ppo-0.0003' exists and does not come from checkpoint")
    named = run_script("sweep.py", "ppo@64", *flags[1:-2], "3e-4", "--name", "later")
    assert named.returncode == 0, named.stderr
    assert opened.run("later-0.0003").origin().step == 64
