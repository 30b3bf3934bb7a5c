"""How ranks are found, and what one process pays for it."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from ranks import Ranks

import simckpt
from simckpt.distributed import several, world
from simckpt.distributed.world import find_world
from simckpt.errors import CoordinationError, RunLockedError


def test_one_process_has_no_ranks_and_does_not_import_torch() -> None:
    code = "import sys; from simckpt.distributed.world import find_world; print(find_world(), 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["None", "False"]


def test_ranks_that_were_not_set_up_are_told_so_where_they_meet(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    monkeypatch.setenv("WORLD_SIZE", "4")
    code = f"import simckpt; run = simckpt.Store({str(tmp_path)!r}).start('cart'); print(1, flush=True); input()"
    other = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    other.stdout.readline()
    with pytest.raises(RunLockedError, match=r"started 4 ranks, .*init_process_group\(\) before") as caught:
        simckpt.Store(tmp_path).start("cart")
    assert caught.value.pid == other.pid
    # each may train a run of its own
    simckpt.Store(tmp_path).start("cart-1").close()
    other.communicate(b"\n")


def worlds(rank: int, size: int) -> object:
    first, second = find_world(), find_world()
    return {
        "alone": first is None,
        "ids": None if first is None else (first.id, second.id),
        "exchanged": None if first is None else [first.exchange({"rank": rank, "n": n}) for n in range(3)],
        "largest": None if first is None else first.largest(rank, -rank, 2**40 * rank),
        "own group": None if first is None else first.group is not dist.group.WORLD,
    }


def test_ranks_find_each_other_and_exchange_values(ranks: Ranks) -> None:
    found = ranks.run(3, worlds)
    assert found[0] == found[1] == found[2]
    assert len(set(found[0]["ids"])) == 2
    assert found[0]["exchanged"] == [[{"rank": rank, "n": n} for rank in range(3)] for n in range(3)]
    assert found[0]["largest"] == (2, 0, 2**41)
    assert found[0]["own group"]


def test_a_process_group_of_one_is_one_process(ranks: Ranks) -> None:
    assert ranks.run(1, worlds)[0]["alone"]


def closing(rank: int, size: int) -> object:
    """Worlds come and go; training's group stays what it was."""
    groups, found = dist.distributed_c10d._world.pg_map, []
    for seconds in (5.0, 77.0):
        made = find_world()
        before = made.timeout, _timeout(made.group)
        made.allow(seconds)
        assert made.exchange(rank) == list(range(size))
        found.append((before, (made.timeout, _timeout(made.group)), made.largest(rank), len(groups)))
        made.close()
        made.close()
    total = torch.ones(2)
    dist.all_reduce(total)
    return found, len(groups), total.tolist()


def _timeout(group: object) -> float:
    return group._get_backend(torch.device("cpu")).options._timeout.total_seconds()


def test_a_world_waits_no_less_than_training_does_and_leaves_nothing(ranks: Ranks) -> None:
    for found, groups, total in ranks.run(2, closing, timeout=25.0):
        # with training's own group there are two
        assert found == [((25, 25), (25, 25), (1,), 2), ((25, 25), (77, 77), (1,), 2)]
        assert groups == 1
        assert total == [2, 2]


def left_alone(rank: int, size: int, store: str) -> object:
    """Rank 1 takes part in the beginning of a start, and then ends; rank 0 soon loses its patience then."""
    exchange = world.World.exchange

    def impatient(self: object, value: object, **_: object) -> object:
        return exchange(self, value, patience=60.0 if self.exchanges == 0 else 0.5)

    world.World.exchange = impatient
    if rank == 1:
        find_world().exchange("cart")
        return None
    with pytest.raises(CoordinationError) as caught:
        simckpt.Store(store).start("cart")
    code = f"import simckpt; simckpt.Store({store!r}).start('cart').close()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    return caught.value.ranks, done.returncode, done.stderr


def test_a_start_that_others_leave_gives_the_run_back(ranks: Ranks, tmp_path: Path) -> None:
    alone, _ = ranks.run(2, left_alone, str(tmp_path), destroy=False)
    assert alone == ((1,), 0, "")


def deserted(rank: int, size: int, victim: int) -> object:
    """One rank ends before a step at which the others meet."""
    world.ROLL_CALL = 4.0
    ranks, same = several.Several(find_world()), {"due": False, "signal": None, "judge": False, "busy": False}
    ranks.agree(6, **same, signals=())
    if rank == victim:
        os._exit(3)
    with pytest.raises(CoordinationError) as caught:
        ranks.agree(7, **same, signals=())
    return caught.value.ranks, str(caught.value)


@pytest.mark.parametrize("victim", [0, 2])
def test_a_rank_that_does_not_come_to_a_step_is_named(ranks: Ranks, victim: int) -> None:
    outcomes = ranks.outcomes(3, deserted, victim, destroy=False)
    for rank, outcome in enumerate(outcomes):
        if rank != victim:
            assert outcome.kind == "returned", outcome
            missing, message = outcome.value
            assert missing == (victim,)
            assert f"rank {victim} did not come to step 7" in message


def elsewhere(rank: int, size: int, store: str, where: str) -> object:
    """Rank 0 makes a call that rank 1 does not make."""
    from simckpt.errors import SimckptError

    begun = time.monotonic()
    found = None
    try:
        with simckpt.Store(store).start("cart") as run:
            if rank == 0 and where == "Run.configure":
                run.configure({"lr": 1.0})
            checkpointer = run.checkpointer({"loop": simckpt.LoopState(step=0)}, save_when=simckpt.EverySteps(1))
            with checkpointer:
                if rank == 0 and where == "Checkpointer.restore_latest":
                    checkpointer.restore_latest()
                if rank == 0 and where == "Checkpointer.save":
                    checkpointer.save(1)
                checkpointer.step(2)
    except SimckptError as error:
        found = type(error).__name__, str(error)
    return found, time.monotonic() - begun


@pytest.mark.parametrize(
    ("where", "other"),
    [
        ("Run.configure", "Run.checkpointer"),
        ("Checkpointer.restore_latest", "Checkpointer.step"),
        ("Checkpointer.save", "Checkpointer.step"),
    ],
)
def test_ranks_that_make_different_calls_are_told_which(ranks: Ranks, tmp_path: Path, where: str, other: str) -> None:
    for (kind, message), seconds in ranks.run(2, elsewhere, str(tmp_path), where):
        assert kind == "ConfigurationError"
        assert f"rank 0 is at {where}, rank 1 at {other}: all ranks of a program make the same calls" in message
        # nobody has waited for anybody, for 120 s
        assert seconds < 60


def unlike(rank: int, size: int, store: str, options: list) -> object:
    from simckpt.errors import SimckptError

    with simckpt.Store(store).start("cart") as run:
        components = {"loop": simckpt.LoopState(step=0), "extra": simckpt.LoopState(x=1)}
        try:
            run.checkpointer(components, **{"save_when": simckpt.EverySteps(1), **options[rank]})
        except SimckptError as error:
            return type(error).__name__, error.keys, str(error)
    return None


@pytest.mark.parametrize(
    ("first", "second", "keys"),
    [
        ({"coordination": "independent"}, {}, ("coordination",)),
        ({}, {"when_busy": "skip"}, ("when_busy",)),
        ({"timeout": 5.0}, {"timeout": 7.0}, ("timeout",)),
        ({"save_when": simckpt.EverySteps(1) | simckpt.OnSignal()}, {}, ("signals",)),
        ({"rollback": simckpt.RollbackPolicy("eval/return", changes=simckpt.Reseed())}, {}, ("rollback",)),
        ({"per_rank": {"extra": False}}, {}, ("per_rank", "extra")),
    ],
    ids=["coordination", "when_busy", "timeout", "signals", "rollback", "per_rank"],
)
def test_arguments_that_ranks_give_differently_are_refused_by_name(
    ranks: Ranks, tmp_path: Path, first: dict, second: dict, keys: tuple
) -> None:
    for kind, named, message in ranks.run(2, unlike, str(tmp_path), [first, second]):
        assert (kind, named) == ("ConfigurationError", keys)
        assert keys[-1] in message
