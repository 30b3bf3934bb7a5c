"""The PPO script of several ranks: resumed it equals the undisturbed run, and all ranks have the same moments."""

import copy
import importlib.util
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium.wrappers.utils import RunningMeanStd
from ranks import Ranks

import simckpt
import simckpt.checkpointer  # before the ranks are forked, which then need not
from simckpt.comparison import compare

SCRIPTS = Path(__file__).parents[2] / "scripts"
LIMIT = 200.0  # [s] a loaded machine may take
# six iterations of 64 env steps, each followed by a checkpoint, every other one by an evaluation
FLAGS = {
    "env-id": "InvertedPendulum-v5",
    "num-envs": "4",
    "rollout-steps": "16",
    "total-steps": "384",
    "save-every": "64",
    "eval-every": "128",
    "eval-episodes": "1",
    "epochs": "2",
    "minibatches": "2",
    "timeout": "60",
}
STEPS = list(range(64, 385, 64))


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, SCRIPTS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up by name
    spec.loader.exec_module(module)
    return module


script = load("train_ppo_ddp")


def arguments(store: Path, run: str, **flags: str) -> list[str]:
    flags = {**FLAGS, "store": str(store), "run": run, **{name.replace("_", "-"): flags[name] for name in flags}}
    return [part for name, value in flags.items() for part in (f"--{name}", value)]


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    started = Ranks()
    yield started
    started.close()


def trained(rank: int, size: int, arguments: list[str]) -> bytes:
    """Returns the parameters in the end."""
    agent = script.train(script.parse_args(arguments))
    return b"".join(parameter.detach().numpy().tobytes() for parameter in agent.parameters())


def stopped_early(rank: int, size: int, arguments: list[str], victim: int, save: int) -> None:
    """One rank is killed in the save of that number, once its shard is written."""
    from simckpt import shard_writing

    vote, count = shard_writing.ShardPublisher._vote, []

    def counted(*args: Any) -> Any:
        count.append(1)
        if len(count) == save and rank == victim:
            os.kill(os.getpid(), signal.SIGKILL)
        return vote(*args)

    shard_writing.ShardPublisher._vote = counted
    script.train(script.parse_args(arguments))


def steps_of(store: Path, run: str) -> list[int]:
    return [checkpoint.step for checkpoint in simckpt.Store(store).run(run).checkpoints()]


# from three ranks on it matters in which order gradients are summed
@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 4])
def test_a_killed_run_resumed_by_the_same_command_equals_the_undisturbed_one(
    ranks: Ranks, tmp_path: Path, size: int
) -> None:
    whole = ranks.run(size, trained, arguments(tmp_path, "whole"), limit=LIMIT)
    assert len(set(whole)) == 1
    outcomes = ranks.outcomes(
        size, stopped_early, arguments(tmp_path, "killed"), size - 1, 3, limit=LIMIT, destroy=False
    )
    assert outcomes[-1].kind == "killed", outcomes
    assert steps_of(tmp_path, "killed") == STEPS[:2]
    assert ranks.run(size, trained, arguments(tmp_path, "killed"), limit=LIMIT) == whole
    assert steps_of(tmp_path, "killed") == steps_of(tmp_path, "whole") == STEPS
    pairs = zip(*(simckpt.Store(tmp_path).run(run).checkpoints() for run in ("killed", "whole")), strict=True)
    assert [one.step for one, two in pairs if not compare(one, two).identical] == []
    assert not list((tmp_path / "tmp").iterdir())


def first_gradients(rank: int, size: int) -> list[bytes]:
    """Returns what three backward passes over the same rows give."""
    torch.manual_seed(1)
    parallel = script.data_parallel(script.Agent(11, 3, 1.0), "cpu")
    torch.manual_seed(100 + rank)
    observations, actions = torch.randn(64, 11), torch.randn(64, 3)
    found = []
    for _ in range(3):
        parallel.zero_grad()
        log_probs, values, entropy = parallel(observations, actions)
        (log_probs.mean() + values.square().mean() + entropy).backward()
        found.append(b"".join(parameter.grad.numpy().tobytes() for parameter in parallel.parameters()))
    return found


def test_the_first_gradients_of_a_process_are_summed_as_later_ones_are(ranks: Ranks) -> None:
    # with DDP as it comes, thousands of the ten thousand elements differ with four ranks
    found = ranks.run(4, first_gradients, limit=LIMIT)
    assert len({each for gradients in found for each in gradients}) == 1


def shared(rank: int, size: int, rows: list[list[np.ndarray]]) -> list[np.ndarray]:
    """Returns the moments after each rank has added its rows, in two turns."""
    moments = [RunningMeanStd(shape=(3,)), RunningMeanStd(shape=())]
    for turn in range(2):
        before = copy.deepcopy(moments)
        for batch in np.array_split(rows[rank][turn], 4):
            moments[0].update(batch)
            moments[1].update(batch[:, 0])
        script.share_moments(moments, before, "cpu")
    return [part for each in moments for part in (each.mean, each.var, np.asarray(each.count))]


def test_moments_are_those_of_the_rows_of_all_ranks(ranks: Ranks) -> None:
    generator = np.random.default_rng(0)
    # more rows on one rank; a column that hardly varies around a mean far from 0
    rows = [[generator.normal([0, 5, 100], [1, 2, 1e-3], (40 + 20 * rank, 3)) for _ in range(2)] for rank in range(2)]
    found = ranks.run(2, shared, rows, limit=LIMIT)
    assert all(one.tobytes() == two.tobytes() for one, two in zip(*found, strict=True))
    whole = np.concatenate([each for of_rank in rows for each in of_rank])
    mean, variance, count, first_mean, first_variance, _ = found[0]
    # gymnasium's moments begin with a count of 1e-4, a mean of 0 and a variance of 1
    start = RunningMeanStd(shape=(3,))
    start.update(whole)
    assert count == pytest.approx(len(whole) + 1e-4, rel=1e-12)
    np.testing.assert_allclose(mean, start.mean, rtol=1e-12)
    # differences of sums of squares: a part in 1e16 of the largest of these, over the rows
    np.testing.assert_allclose(variance, start.var, rtol=1e-9)
    assert (first_mean, first_variance) == (pytest.approx(mean[0]), pytest.approx(variance[0]))


def with_moments(rank: int, size: int, arguments: list[str]) -> tuple[bytes, list[bytes], list[bytes]]:
    """Returns the parameters in the end, and the running moments after the restore and in the end."""
    seen: list[list[bytes]] = []
    restore = simckpt.checkpointer.Checkpointer.restore_latest
    envs: list[Any] = []

    def note() -> None:
        moments = script.moments_of([envs[0].env.env.env, envs[0].env])
        seen.append([np.asarray(part).tobytes() for each in moments for part in (each.mean, each.var, each.count)])

    def watched(checkpointer: Any) -> Any:
        found = restore(checkpointer)
        envs.append(checkpointer.components["envs"])
        note()
        return found

    simckpt.checkpointer.Checkpointer.restore_latest = watched
    parameters = trained(rank, size, arguments)
    note()
    return parameters, *seen


@pytest.mark.parametrize(("before", "after"), [(2, 1), pytest.param(2, 4, marks=pytest.mark.slow)])
def test_the_same_command_goes_on_with_another_number_of_ranks(
    ranks: Ranks, tmp_path: Path, before: int, after: int
) -> None:
    first = ranks.run(before, with_moments, arguments(tmp_path, "run", total_steps="128"), limit=LIMIT)
    then = ranks.run(after, with_moments, arguments(tmp_path, "run", total_steps="256"), limit=LIMIT, group=True)
    assert len({parameters for parameters, _, _ in then}) == 1
    # all ranks normalise alike, before and after
    assert len({b"".join(ended) for _, _, ended in first} | {b"".join(begun) for _, begun, _ in then}) == 1
    assert len({b"".join(ended) for _, _, ended in then}) == 1
    assert steps_of(tmp_path, "run") == [64, 128, 192, 256]


def refused(rank: int, size: int, arguments: list[str]) -> str:
    with pytest.raises(SystemExit) as caught:
        script.train(script.parse_args(arguments))
    return str(caught.value)


def test_envs_that_cannot_be_divided_among_the_ranks_are_refused(ranks: Ranks, tmp_path: Path) -> None:
    for text in ranks.run(2, refused, arguments(tmp_path, "run", num_envs="3"), limit=LIMIT):
        assert text == "--num-envs 3 cannot be divided among 2 ranks"


kill_and_resume = load("kill_and_resume")
# long enough that a signal comes before the end
LONGER = {"total_steps": "2048", "save_every": "128", "eval_every": "256"}


class Torchrun:
    """The script on two ranks under torchrun, told what to do when it prints a line.

    Attributes:
        status: that torchrun ended with.
        output: all that was printed.
    """

    def __init__(self, store: Path, run: str, restarts: int, line: str, act: Callable[[int, list[int]], None]) -> None:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        # a loaded machine needs more than the 30 s after which torchrun kills ranks that were asked to end
        command += ["--max-restarts", str(restarts), "--shutdown-timeout", "200", "--"]
        command += [str(SCRIPTS / "train_ppo_ddp.py"), *arguments(store, run, **LONGER)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
        )
        started, self.output, acted = [process.pid], "", False
        try:
            for text in process.stdout:
                self.output += text
                if text.startswith(line) and not acted:
                    acted, ranks = True, kill_and_resume.children(process.pid)
                    started += ranks
                    act(process.pid, ranks)
            assert acted, self.output
            self.status = process.wait()
            assert all(kill_and_resume.is_gone(pid, 0) for pid in started)
        finally:
            process.kill()
            process.stdout.close()
            process.wait()


def assert_undisturbed(store: Path, run: str, *, extra: Sequence[int] = ()) -> None:
    """Checks that a run has the checkpoints of an undisturbed one, bit for bit, and besides those at `extra`."""
    assert Torchrun(store, "whole", 0, "complete", lambda agent, pids: None).status == 0
    opened = simckpt.Store(store)
    whole = {each.step: each for each in opened.run("whole").checkpoints()}
    found = {each.step: each for each in opened.run(run).checkpoints()}
    assert found.keys() == {*whole, *extra}
    assert [step for step in whole if not compare(found[step], whole[step]).identical] == []


def events_of(store: Path, kind: str) -> list[dict[str, Any]]:
    return [event for event in simckpt.Store(store).files.events("run") if event["event"] == kind]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("victim", [0, 1])
def test_torchrun_resumes_by_itself_when_a_rank_is_killed(tmp_path: Path, victim: int) -> None:
    done = Torchrun(
        tmp_path, "run", 3, "evaluating at step=512", lambda agent, pids: os.kill(sorted(pids)[victim], signal.SIGKILL)
    )
    assert done.status == 0, done.output
    assert done.output.endswith("complete step=2048\n")
    assert len(events_of(tmp_path, "restored")) == 1
    assert_undisturbed(tmp_path, "run")


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("with_ranks", [False, True], ids=["to torchrun", "to torchrun and the ranks"])
def test_sigterm_ends_all_ranks_with_one_checkpoint_and_torchrun_starts_none_again(
    tmp_path: Path, with_ranks: bool
) -> None:
    def act(agent: int, pids: list[int]) -> None:
        for pid in [agent, *(pids if with_ranks else [])]:
            os.kill(pid, signal.SIGTERM)

    done = Torchrun(tmp_path, "run", 3, "evaluating at step=512", act)
    assert done.status == 1, done.output  # torchrun's own, whatever the code of the ranks is
    assert "forcefully exiting" not in done.output
    (stopped,) = events_of(tmp_path, "stopped")
    assert (stopped["signal"], stopped["problem"], stopped["exit_code"]) == ("SIGTERM", "", simckpt.EXIT_REQUEUE)
    assert steps_of(tmp_path, "run")[-1] == stopped["step"]
    assert not events_of(tmp_path, "restored")
    again = Torchrun(tmp_path, "run", 0, "complete", lambda agent, pids: None)
    assert again.status == 0
    assert_undisturbed(tmp_path, "run", extra=[stopped["step"]])


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_sigterm_to_ranks_alone_ends_them_and_torchrun_starts_them_again_if_it_may(
    tmp_path: Path,
) -> None:
    done = Torchrun(
        tmp_path, "run", 1, "evaluating at step=512", lambda agent, pids: os.kill(max(pids), signal.SIGTERM)
    )
    assert done.status == 0, done.output
    (stopped,) = events_of(tmp_path, "stopped")
    assert [event["step"] for event in events_of(tmp_path, "restored")] == [stopped["step"]]
    assert_undisturbed(tmp_path, "run", extra=[stopped["step"]])


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("size", [2, 4])
def test_ranks_that_are_killed_and_stopped_at_any_moment_end_where_the_undisturbed_ones_do(
    tmp_path: Path, size: int
) -> None:
    command = [sys.executable, str(SCRIPTS / "kill_and_resume.py"), "--script", "train_ppo_ddp.py"]
    command += ["--ranks", str(size), "--kills", "4", "--inside-save", "2", "--before-commit", "1"]
    command += ["--in-evaluation", "0", "--hangs", "1", "--env-id", "InvertedPendulum-v5", "--vectorization", "sync"]
    command += ["--store", str(tmp_path / "store"), "--total-steps", "8000", "--timeout", "20"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    assert ", 0 differ" in done.stdout
