"""`sweep.py` on a run of `train_ppo.py`."""

import importlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

import simckpt
from simckpt.comparison import compare

SCRIPTS = Path(__file__).parents[2] / "scripts"
FLAGS = "--num-envs 2 --rollout-steps 16 --total-steps 96 --minibatches 2 --epochs 1 --eval-every 0 --save-every 32"


def run_script(name: str, *flags: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(SCRIPTS / name), *flags], capture_output=True, text=True)


@pytest.fixture
def train_ppo(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    threads = torch.get_num_threads()
    monkeypatch.syspath_prepend(SCRIPTS)  # the script imports its neighbour by its plain name
    yield importlib.import_module("train_ppo")
    torch.set_num_threads(threads)


def test_learning_rates_branch_from_one_checkpoint_and_are_trained_once(tmp_path: Path, train_ppo: ModuleType) -> None:
    store = tmp_path / "store"
    train_ppo.train(train_ppo.parse_args([*FLAGS.split(), "--store", str(store)]))
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
