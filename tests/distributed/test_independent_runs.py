"""Ranks that save at their own time and do not wait for each other."""

import itertools
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from ranks import Ranks
from run_helpers import LIMIT, leftovers, steps

import simckpt
from simckpt import independent_writing


def ahead(rank: int, size: int, store: str, last: int) -> Any:
    """Rank 1 goes on ahead of rank 0: no rank waits for another one, in the loop and in a save."""

    run = simckpt.Store(store).start("cart")
    loop, stream = simckpt.LoopState(step=0, drawn=[]), np.random.default_rng(rank)
    checkpointer = run.checkpointer(
        {"loop": loop, "stream": stream}, save_when=simckpt.EverySteps(2), coordination="independent", timeout=30.0
    )
    reached = Path(store) / "rank 1 has come to step 7"
    with run, checkpointer:
        restored = checkpointer.restore_latest()
        while loop.step < last:
            loop.drawn = [*loop.drawn[-5:], float(stream.random())]
            loop.step += 1
            if rank == 0 and loop.step == 3 and restored is None:
                until = time.monotonic() + 60
                while not reached.exists() and time.monotonic() < until:
                    time.sleep(0.01)
                assert reached.exists()
            checkpointer.step(loop.step)
            if rank == 1 and loop.step == 7 and restored is None:
                reached.touch()
        checkpointer.wait()
    return None if restored is None else restored.step, loop.step, loop.drawn


def test_ranks_that_do_not_wait_for_each_other_restart_where_all_have_been(ranks: Ranks, tmp_path: Path) -> None:
    whole = ranks.run(2, ahead, str(tmp_path / "whole"), 12, limit=LIMIT)
    ranks.run(2, ahead, str(tmp_path / "parts"), 9, limit=LIMIT)
    found = simckpt.Store(tmp_path / "parts").run("cart").checkpoints()
    assert found[-1].step == 8
    assert [each.step for each in found] == sorted({each.step for each in found})
    assert all(each.parent == before.id for before, each in itertools.pairwise(found))
    resumed = ranks.run(2, ahead, str(tmp_path / "parts"), 12, limit=LIMIT)
    assert [each[0] for each in resumed] == [8, 8]
    assert [each[1:] for each in resumed] == [each[1:] for each in whole]
    assert not leftovers(tmp_path / "parts")


def actors(rank: int, size: int, store: str, last: dict[int, int]) -> Any:
    """Rank 0 learns, rank 1 collects: they have other components, and save at other steps."""
    # where rank 0 is much quicker; and none of its last step has all ranks
    warnings.filterwarnings("ignore", ".*steps in a row", simckpt.UpkeepWarning)
    warnings.filterwarnings("ignore", ".*the last save of this rank", simckpt.SaveFailedWarning)
    run = simckpt.Store(store).start("cart")
    loop = simckpt.LoopState(step=0)
    components: dict[str, Any] = {"loop": loop}
    if rank == 0:
        components["agent"] = torch.nn.Linear(2, 2)
    else:
        components["stream"] = np.random.default_rng(3)
    checkpointer = run.checkpointer(
        components, save_when=simckpt.EverySteps(2 + rank), coordination="independent", timeout=30.0
    )
    with run, checkpointer:
        restored = checkpointer.restore_latest()
        while loop.step < last[rank]:
            loop.step += 1
            checkpointer.step(loop.step)
    return None if restored is None else restored.step


def test_the_newest_step_that_all_ranks_have_is_the_checkpoint(ranks: Ranks, tmp_path: Path) -> None:
    ranks.run(2, actors, str(tmp_path), {0: 20, 1: 13}, limit=LIMIT)
    # rank 0 saves 2, 4, 6, ..., rank 1 saves 3, 6, 9, 12: both have 6 and 12
    assert steps(tmp_path)[-1] in (6, 12)
    assert set(steps(tmp_path)) <= {6, 12}
    assert ranks.run(2, actors, str(tmp_path), {0: 0, 1: 0}, limit=LIMIT) == [steps(tmp_path)[-1]] * 2
    assert not leftovers(tmp_path)


def lagging(rank: int, size: int, store: str, last: int) -> Any:
    """Rank 0 has long gone through all its steps while rank 1 is still at its first."""
    run = simckpt.Store(store).start("cart")
    loop = simckpt.LoopState(step=0)
    checkpointer = run.checkpointer(
        {"loop": loop}, save_when=simckpt.EverySteps(1), coordination="independent", timeout=30.0
    )
    through = Path(store) / "rank 0 is through"
    with run, checkpointer, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", simckpt.UpkeepWarning)
        while loop.step < last:
            if rank == 1 and loop.step == 0:
                limit = time.monotonic() + 60
                while not through.exists():
                    assert time.monotonic() < limit
                    time.sleep(0.01)
            loop.step += 1
            checkpointer.step(loop.step)
        if rank == 0:
            through.touch()
        checkpointer.wait()
        return [str(each.message) for each in caught]


def test_a_rank_that_lags_behind_does_not_keep_the_run_from_checkpoints(ranks: Ranks, tmp_path: Path) -> None:
    ahead, _ = ranks.run(2, lagging, str(tmp_path), 30, limit=LIMIT)
    # rank 0 has kept the steps to which rank 1 comes first, and its last one
    assert steps(tmp_path)[-1] == 30
    assert set(steps(tmp_path)) <= {*range(1, independent_writing.OPEN_STEPS), 30}
    told, *_ = [message for message in ahead if "steps in a row" in message]
    assert "wait for rank 1 to save step 1" in told
    assert not leftovers(tmp_path)


def left_behind(rank: int, size: int, store: str) -> Any:
    """Rank 0 is through and has lost its patience before rank 1 begins."""
    run = simckpt.Store(store).start("cart")
    loop = simckpt.LoopState(step=0)
    checkpointer = run.checkpointer(
        {"loop": loop}, save_when=simckpt.EverySteps(2), coordination="independent", timeout=0.5
    )
    gone = Path(store) / "rank 0 has ended"
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with checkpointer:
            if rank == 1:
                limit = time.monotonic() + 60
                while not gone.exists():
                    assert time.monotonic() < limit
                    time.sleep(0.01)
            while loop.step < 20:
                loop.step += 1
                checkpointer.step(loop.step)
        gone.touch()
    return [(each.category.__name__, str(each.message)) for each in caught]


def test_a_rank_whose_last_save_became_no_checkpoint_says_so_when_it_leaves(ranks: Ranks, tmp_path: Path) -> None:
    for rank, told in enumerate(ranks.run(2, left_behind, str(tmp_path), limit=LIMIT)):
        (message,) = [message for kind, message in told if kind == "SaveFailedWarning"]
        assert "step 20 of run 'cart': the last save of this rank is no checkpoint" in message
        assert f"rank {rank}: the loop of this rank has ended" in message or "rank 0: the loop" in message
        assert "the newest checkpoint is of step None" in message
    assert steps(tmp_path) == []
    assert not leftovers(tmp_path)


def twice(rank: int, size: int, store: str) -> Any:
    """The first checkpointer's step 6 is rank 0's alone; the second one's is that of both."""
    warnings.filterwarnings("ignore", ".*the last save of this rank", simckpt.SaveFailedWarning)
    run = simckpt.Store(store).start("cart")
    loop = simckpt.LoopState(step=0)
    with run:
        for last in ({0: 6, 1: 4}, {0: 6, 1: 6}):
            checkpointer = run.checkpointer(
                {"loop": loop}, save_when=simckpt.EverySteps(2), coordination="independent", timeout=3.0
            )
            with checkpointer:
                checkpointer.restore_latest()
                begun = loop.step
                while loop.step < last[rank]:
                    loop.step += 1
                    checkpointer.step(loop.step)
    return begun


def test_a_second_checkpointer_has_votes_of_its_own(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks.run(2, twice, str(tmp_path), limit=LIMIT) == [4, 4]
    assert steps(tmp_path)[-1] == 6
    assert not leftovers(tmp_path)


def rank_without_state(rank: int, size: int, store: str) -> Any:
    """What the last rank registers is shared, so that it has nothing to write."""
    run = simckpt.Store(store).start("cart")
    agent, loop = torch.nn.Linear(1, 1), simckpt.LoopState(step=0)
    with torch.no_grad():
        agent.weight.fill_(0.5)
        agent.bias.fill_(0.25)
    components = {"agent": agent, **({"loop": loop} if rank < size - 1 else {})}
    checkpointer = run.checkpointer(
        components, save_when=simckpt.EverySteps(2), coordination="independent", timeout=30.0
    )
    with run, checkpointer:
        restored = checkpointer.restore_latest()
        for step in range(1 + (0 if restored is None else restored.step), 5):
            loop.step = step
            checkpointer.step(step)
        checkpointer.wait()
    return None if restored is None else restored.step, checkpointer.restore_report


def test_a_rank_with_nothing_of_its_own_takes_part(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks.run(3, rank_without_state, str(tmp_path), limit=LIMIT) == [(None, ())] * 3
    assert steps(tmp_path)[-1] == 4
    # on as many ranks nothing is dealt out anew
    assert ranks.run(3, rank_without_state, str(tmp_path), limit=LIMIT) == [(4, ())] * 3
