"""Ranks that save at their own time and do not wait for each other."""

import itertools
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from ranks import Ranks
from run_helpers import LIMIT, leftovers, steps

import simckpt


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
