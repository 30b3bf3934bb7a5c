"""Signals, kills, disks that refuse, damage: what becomes of a run of several ranks."""

import os
import signal
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
from ranks import Ranks
from run_helpers import LIMIT, leftovers, steps, trained
from training_runs import Training, train

import simckpt
from simckpt.errors import StorageError


def interrupted(rank: int, size: int, store: str, who: list[int]) -> Any:
    """Some of the ranks get a signal after step 6; all of them must end with the same code and one checkpoint."""
    run = simckpt.Store(store).start("cart")
    training = Training(rank, size)
    checkpointer = run.checkpointer(
        training.components, save_when=simckpt.EverySteps(100) | simckpt.OnSignal(grace=60.0), timeout=20.0
    )
    try:
        with run, checkpointer:
            checkpointer.restore_latest()
            training.begin()
            while training.loop.step < 13:
                training.advance()
                if training.loop.step == 6 and rank in who:
                    os.kill(os.getpid(), signal.SIGTERM)
                checkpointer.step(training.loop.step)
    except SystemExit as error:
        return error.code, training.loop.step
    return training.fingerprint()


@pytest.mark.parametrize("who", [[0, 1], [1]])
def test_a_signal_ends_all_ranks_with_one_common_checkpoint(ranks: Ranks, tmp_path: Path, who: list[int]) -> None:
    (code, step), other = ranks.run(2, interrupted, str(tmp_path), who, limit=LIMIT)
    assert (code, step) == other
    assert code == simckpt.EXIT_REQUEUE
    assert steps(tmp_path) == [step]
    whole = trained(ranks, 2, tmp_path / "whole", 13, save_when=simckpt.EverySteps(100))
    assert ranks.run(2, interrupted, str(tmp_path), [], limit=LIMIT) == whole


def killed(rank: int, size: int, store: str, victim: int, when: str) -> Any:
    """A rank dies in its second save, at a point of it."""
    from simckpt import shard_writing

    if rank == victim:
        made = shard_writing.ShardPublisher._vote
        prepare = shard_writing.ShardPublisher._share
        count = []

        def share(self: Any, snapshot: Any) -> Any:
            count.append(1)
            if len(count) == 2 and when == "before it writes":
                os.kill(os.getpid(), signal.SIGKILL)
            return prepare(self, snapshot)

        def vote(self: Any, *args: Any) -> Any:
            if len(count) == 2 and when == "before its report":
                os.kill(os.getpid(), signal.SIGKILL)
            return made(self, *args)

        shard_writing.ShardPublisher._share, shard_writing.ShardPublisher._vote = share, vote
    return train(rank, size, store, 13, ignore=("the save of run",))


@pytest.mark.parametrize(
    ("victim", "when"), [(1, "before its report"), pytest.param(0, "before it writes", marks=pytest.mark.slow)]
)
def test_the_start_after_a_kill_goes_on_from_the_last_whole_one(
    ranks: Ranks, tmp_path: Path, victim: int, when: str
) -> None:
    outcomes = ranks.outcomes(
        2, killed, str(tmp_path / "killed"), victim, when, limit=LIMIT, timeout=15.0, destroy=False
    )
    assert outcomes[victim].kind == "killed"
    # training's own group is of no use without the victim, so the other rank ends as well, unless it was at the end
    assert outcomes[1 - victim].kind in ("raised", "returned"), outcomes
    assert steps(tmp_path / "killed") == [5]
    whole = trained(ranks, 2, tmp_path / "whole", 13)
    assert trained(ranks, 2, tmp_path / "killed", 13) == whole
    assert steps(tmp_path / "killed") == [5, 10]
    assert not leftovers(tmp_path / "killed")


def refusing(rank: int, size: int, store: str, victim: int) -> Any:
    """The disk of one rank refuses its second shard; training goes on, and the third save is whole."""
    from simckpt.storage.store_files import StoreFiles

    if rank == victim:
        prepare, count = StoreFiles.prepare, []

        def refuse(self: Any, *args: Any, **kwargs: Any) -> Any:
            count.append(1)
            if len(count) == 2:
                raise StorageError("the disk refused")
            return prepare(self, *args, **kwargs)

        StoreFiles.prepare = refuse

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", simckpt.SaveFailedWarning)
        found = train(rank, size, store, 17)
    return found, [str(each.message) for each in caught if issubclass(each.category, simckpt.SaveFailedWarning)]


@pytest.mark.parametrize("victim", [0, 1])
def test_a_save_that_fails_on_one_rank_fails_on_all_and_training_goes_on(
    ranks: Ranks, tmp_path: Path, victim: int
) -> None:
    found = ranks.run(2, refusing, str(tmp_path), victim, limit=LIMIT)
    assert steps(tmp_path) == [5, 15]
    assert not leftovers(tmp_path)
    for _, told in found:
        (message,) = told
        assert "at step 10 failed, training goes on" in message
        assert "the disk refused" in message
    assert f"rank {victim}" in found[1 - victim][1][0]


def damage(store: Path, whose: int) -> None:
    """Flips a bit in what one rank has written of the newest checkpoint."""
    newest = simckpt.Store(store).run("cart").latest()
    leaf = next(leaf for path, leaf in newest.leaves().items() if path.startswith(f"rng%40{whose}/") and leaf.size)
    (file,) = (store / "runs" / "cart" / "checkpoints").glob(f"*{newest.seq}/{leaf.file}")
    assert f"-{whose:05d}-of-" in file.name
    data = bytearray(file.read_bytes())
    data[leaf.offset] ^= 1
    file.chmod(0o644)
    file.write_bytes(data)


def falling_back(rank: int, size: int, store: str) -> Any:

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", simckpt.DamageWarning)
        run = simckpt.Store(store).start("cart")
        training = Training(rank, size)
        checkpointer = run.checkpointer(training.components, save_when=simckpt.EverySteps(5))
        with run, checkpointer:
            found = checkpointer.restore_latest()
            training.begin()
            while training.loop.step < 13:
                training.advance()
                checkpointer.step(training.loop.step)
            checkpointer.wait()
    return found.step, [str(each.message) for each in caught], training.fingerprint()


@pytest.mark.parametrize("whose", [0, 1])
def test_a_damaged_shard_of_one_rank_makes_all_go_back(ranks: Ranks, tmp_path: Path, whose: int) -> None:
    whole = trained(ranks, 2, tmp_path / "whole", 13)
    trained(ranks, 2, tmp_path / "parts", 12)
    damage(tmp_path / "parts", whose)
    found = ranks.run(2, falling_back, str(tmp_path / "parts"), limit=LIMIT)
    assert [each[0] for each in found] == [5, 5]
    assert [each[2] for each in found] == whole
    told = [message for each in found for message in each[1] if "goes on from checkpoint" in message]
    assert len(told) == 1


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("victim", [0, 1])
def test_torchrun_restarts_a_run_after_a_kill(ranks: Ranks, tmp_path: Path, victim: int) -> None:
    program = Path(__file__).with_name("torchrun_program.py")
    paths = [
        program.parents[2],
        *(program.parent.parent / name for name in ("distributed", "sim", "state")),
        program.parent.parent,
    ]
    environment = {
        **os.environ,
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "PYTHONPATH": os.pathsep.join(map(str, paths)),
    }
    command = ["torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--max-restarts", "2"]
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            *command,
            "--local-addr",
            "127.0.0.1",
            str(program),
            str(tmp_path / "killed"),
            str(victim),
            str(tmp_path / "out"),
        ],
        env=environment,
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    whole = trained(ranks, 2, tmp_path / "whole", 13)
    assert [(tmp_path / f"out-{rank}").read_text() for rank in range(2)] == [repr(each) for each in whole]
    assert steps(tmp_path / "killed") == [5, 10]
