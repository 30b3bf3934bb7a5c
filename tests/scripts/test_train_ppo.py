import contextlib
import dataclasses
import difflib
import importlib.util
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from typer.testing import CliRunner

import simckpt
from simckpt.cli import app
from simckpt.comparison import compare
from simckpt.errors import ConfigurationError, RollbackLimitError
from simckpt.storage.claims import held_claim

SCRIPTS = Path(__file__).parents[2] / "scripts"
# twelve iterations of 64 env steps, each followed by an evaluation and a checkpoint; the pole falls early, so that
# there are resets in between
FLAGS = {
    "env-id": "InvertedPendulum-v5",
    "num-envs": "2",
    "rollout-steps": "32",
    "total-steps": "768",
    "save-every": "64",
    "eval-every": "64",
    "eval-episodes": "1",
    "epochs": "2",
    "minibatches": "2",
}
STEPS = list(range(64, 769, 64))


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, SCRIPTS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up by name
    spec.loader.exec_module(module)
    return module


def arguments(store: Path, run: str, **flags: str) -> list[str]:
    flags = {**FLAGS, "store": str(store), "run": run, **{name.replace("_", "-"): flags[name] for name in flags}}
    return [part for name, value in flags.items() for part in (f"--{name}", value) if part]


@pytest.fixture
def start():
    """Starts the script; what a failed test leaves running is killed, so that it disturbs no other test."""
    with contextlib.ExitStack() as started:

        def start(store: Path, run: str) -> subprocess.Popen[str]:
            command = [sys.executable, str(SCRIPTS / "train_ppo.py"), *arguments(store, run)]
            # a thread pool's size decides the order of sums: the same as in this process
            environment = {**os.environ, "OMP_NUM_THREADS": "1"}
            process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
            started.enter_context(process)
            started.callback(process.kill)
            return process

        yield start


def steps_of(store: Path, run: str) -> list[int]:
    return [checkpoint.step for checkpoint in simckpt.Store(store).run(run).checkpoints()]


@pytest.fixture(autouse=True)
def threads_as_before():
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def test_the_script_is_the_plain_one_with_at_most_twenty_lines_that_are_new_or_other() -> None:
    plain, resumable = ((SCRIPTS / f"{name}.py").read_text().splitlines() for name in ("plain_ppo", "train_ppo"))
    changed = [line for line in difflib.ndiff(plain, resumable) if line.startswith("+ ") and line[2:].strip()]
    assert 0 < len(changed) <= 20, "\n".join(changed)
    assert not any("simckpt" in line for line in plain)


def test_a_killed_run_resumed_by_the_same_command_equals_the_undisturbed_one(tmp_path, start) -> None:
    store = tmp_path / "store"
    killed, undisturbed = start(store, "killed"), start(store, "undisturbed")
    # at the third evaluation the save of step 128 may still be in flight, and that of step 64 is not
    for line in killed.stdout:
        if line.startswith("evaluating at step=192"):
            killed.send_signal(signal.SIGKILL)
    assert killed.wait() == -signal.SIGKILL
    saved = steps_of(store, "killed")
    assert 0 < len(saved) < len(STEPS)
    assert saved == STEPS[: len(saved)]

    output, _ = start(store, "killed").communicate()
    assert output.splitlines()[-1] == "complete step=768"
    # it went on, and did not start again
    assert f"evaluating at step={saved[-1]}\n" not in output
    events = simckpt.Store(store).files.events("killed")
    assert [event["event"] for event in events].count("restored") == 1

    assert undisturbed.communicate()[0].splitlines()[-1] == "complete step=768"
    assert steps_of(store, "killed") == steps_of(store, "undisturbed") == STEPS
    pairs = zip(*(simckpt.Store(store).run(run).checkpoints() for run in ("killed", "undisturbed")), strict=True)
    assert [one.step for one, two in pairs if not compare(one, two).identical] == []
    assert CliRunner().invoke(app, ["diff", str(store), "killed", "undisturbed"]).exit_code == 0
    assert CliRunner().invoke(app, ["diff", str(store), "killed", "undisturbed@320"]).exit_code == 1

    # and saving has disturbed nothing
    train_ppo, plain_ppo = load("train_ppo"), load("plain_ppo")
    args = vars(train_ppo.parse_args(arguments(store, "undisturbed")))
    agent = plain_ppo.train(
        plain_ppo.Args(**{field.name: args[field.name] for field in dataclasses.fields(plain_ppo.Args)})
    )
    saved = simckpt.Store(store).run("killed").latest()
    for name, tensor in agent.state_dict().items():
        assert saved[f"agent/{name}"].numpy().tobytes() == tensor.numpy().tobytes(), name


def give_back(folder: Path) -> None:
    """Gives the claim back that a training left, which failed before its loop, as the end of a process would."""
    claim = held_claim(folder)
    if claim is not None:
        claim.release()


def train_here(store: Path, run: str, **flags: str) -> None:
    """Trains in this process, and gives the claim back as the end of a process would."""
    train_ppo = load("train_ppo")
    try:
        simckpt.supervise(train_ppo.train, train_ppo.parse_args(arguments(store, run, **flags)))
    finally:
        give_back(store / "runs" / run)


def test_the_same_command_line_runs_a_branch(tmp_path) -> None:
    store = tmp_path / "store"
    train_here(store, "origin", total_steps="256")
    origin = simckpt.Store(store).run("origin")
    origin.at(step=128).branch("twin")
    origin.at(step=128).branch("slow", {"learning_rate": 1e-5})
    train_here(store, "twin", total_steps="256")
    train_here(store, "slow", total_steps="256")
    twin, slow = (simckpt.Store(store).run(run) for run in ("twin", "slow"))
    assert steps_of(store, "twin") == steps_of(store, "slow") == [192, 256]
    for step in (192, 256):
        assert compare(origin.at(step=step), twin.at(step=step)).identical
        assert not compare(origin.at(step=step), slow.at(step=step)).identical
    # annealed from the new value on: half of the steps were left at the branch's second iteration
    assert slow.at(step=192)["optimizer"].items["param_groups"][0]["lr"] == 1e-5 * (1 - 128 / 256)


def test_a_step_size_that_breaks_the_networks_is_halved_until_the_policy_gives_up(tmp_path) -> None:
    store = tmp_path / "store"
    train_here(store, "origin", total_steps="128")
    simckpt.Store(store).run("origin").latest().branch("hot", {"learning_rate": 1e30, "total_steps": 256})
    with pytest.raises(RollbackLimitError, match="is not finite") as caught:
        train_here(store, "hot", total_steps="128", eval_every="0", rollback="")
    assert caught.value.rollbacks == 3
    hot = simckpt.Store(store).run("hot")
    rates = [each.hyperparameters["learning_rate"] for each in hot.checkpoints() if each.kind == "rollback"]
    assert rates == [1e30 / 2, 1e30 / 4, 1e30 / 8]
    # nothing that is not finite was saved
    assert all(torch.isfinite(each["agent/log_std"]).all() for each in hot.checkpoints(abandoned=True))


def test_a_complete_run_is_left_as_it_is_and_a_contradicting_flag_is_refused_by_name(tmp_path, capsys) -> None:
    store = tmp_path / "store"
    train_ppo = load("train_ppo")

    def train(**flags: str) -> None:
        # a process of its own for each would take much longer; but the end of one is what gives its claim back
        try:
            train_ppo.train(train_ppo.parse_args(arguments(store, "run", **flags)))
        finally:
            give_back(store / "runs/run")

    def files() -> dict[str, bytes]:
        run = store / "runs/run"
        paths = [run / "run.json", *sorted((run / "checkpoints").rglob("*"))]
        return {str(path): path.read_bytes() for path in paths if path.is_file()}

    train()
    assert capsys.readouterr().out.splitlines()[-1] == "complete step=768"
    before = files()
    assert len(before) == 1 + 3 * len(STEPS)

    train()
    assert capsys.readouterr().out == "complete step=768\n"
    assert files() == before
    for flags in ({"seed": "2"}, {"learning_rate": "0.1"}, {"gamma": "0.9", "num_envs": "3"}):
        with pytest.raises(ConfigurationError) as caught:
            train(**flags)
        assert set(caught.value.keys) == set(flags)
        assert all(name in str(caught.value) for name in flags)
    assert files() == before

    # what may differ between two starts: a longer run, which goes on
    train(total_steps="832", vectorization="async")
    assert "step=832" in capsys.readouterr().out
    assert steps_of(store, "run") == [*STEPS, 832]
