"""Runs of several ranks through the public API: what one process is promised holds for all of them together."""

import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from ranks import Ranks
from run_helpers import LIMIT, leftovers, steps, trained
from torch.distributed.fsdp import fully_shard
from training_runs import Training

import simckpt
from simckpt.storage import StoreFiles


@pytest.mark.parametrize(
    ("size", "layout"),
    [(2, "fsdp"), pytest.param(4, "ddp", marks=pytest.mark.slow), pytest.param(4, "fsdp", marks=pytest.mark.slow)],
)
def test_a_resumed_run_equals_the_one_that_never_stopped(ranks: Ranks, tmp_path: Path, size: int, layout: str) -> None:
    whole = trained(ranks, size, tmp_path / "whole", 13, layout)
    trained(ranks, size, tmp_path / "parts", 8, layout)
    assert trained(ranks, size, tmp_path / "parts", 13, layout) == whole
    assert steps(tmp_path / "parts") == [5, 10]
    assert not leftovers(tmp_path / "parts")
    own = {f"{name}@{rank}" for name in ("envs", "replay", "rng", "loop") for rank in range(size)}
    assert set(simckpt.Store(tmp_path / "parts").run("cart").latest().components()) == {
        "agent",
        "optimizer",
        "checkpointer",
        *own,
    }


def test_upkeep_and_listings_take_it_for_any_other_checkpoint(ranks: Ranks, tmp_path: Path) -> None:
    trained(ranks, 2, tmp_path, 17, keep=simckpt.KeepLast(2))
    store = simckpt.Store(tmp_path)
    assert steps(tmp_path) == [10, 15]
    report = store.check()
    assert report, report.findings
    older, newer = store.run("cart").checkpoints()
    # the weights of the first layer, whole, from whichever rank has written them
    assert newer["agent/module/0.weight" if "agent/module/0.weight" in newer.leaves() else "agent/0.weight"].shape == (
        16,
        4,
    )
    assert newer.metrics.keys() == {"loss"}
    older_id, newer_id = older.id[:12], newer.id[:12]
    for code, *command in ((0, "ls"), (0, "show", newer_id), (1, "diff", older_id, newer_id)):
        name, *addresses = command
        done = subprocess.run(
            [sys.executable, "-m", "simckpt", name, str(tmp_path), *addresses], capture_output=True, text=True
        )
        assert done.returncode == code, done.stderr
        shown = {"ls": newer_id[:8], "show": "envs@1", "diff": "envs@1/"}[name]
        assert shown in done.stdout.replace("%40", "@"), done.stdout


def disagreeing(rank: int, size: int, store: str) -> Any:
    run = simckpt.Store(store).start("cart")
    with run:
        with pytest.raises(simckpt.SimckptError) as caught:
            run.configure({"lr": 1e-2 if rank else 3e-4, "seed": rank, "device": "cpu"}, free={"seed"})
        args = run.configure({"lr": 1e-2, "seed": rank, "device": "cpu"}, free={"seed"})
    return type(caught.value).__name__, caught.value.keys, str(caught.value), args


def test_hyperparameters_that_differ_between_ranks_are_refused_by_name(ranks: Ranks, tmp_path: Path) -> None:
    found = ranks.run(2, disagreeing, str(tmp_path), limit=LIMIT)
    for rank, (kind, keys, text, args) in enumerate(found):
        assert (kind, keys) == ("ConfigurationError", ("lr",))
        assert "0.0003 on rank 0" in text
        assert "0.01 on rank 1" in text
        # a rank's own value of a free key is its own
        assert args == {"lr": 1e-2, "seed": rank, "device": "cpu"}


def half_given(rank: int, size: int, store: str, having: int) -> Any:
    with simckpt.Store(store).start("cart") as run:
        return run.configure({"lr": 1e-2, **({"note": rank} if rank == having else {})}, free={"note"})


@pytest.mark.parametrize("having", [0, 1])
def test_a_free_key_that_one_rank_alone_has_is_given_to_that_rank(ranks: Ranks, tmp_path: Path, having: int) -> None:
    found = ranks.run(2, half_given, str(tmp_path), having, limit=LIMIT)
    assert found[having] == {"lr": 1e-2, "note": having}
    assert all(args["lr"] == 1e-2 for args in found)


def misdirected(rank: int, size: int, store: str) -> Any:
    with pytest.raises(simckpt.SimckptError) as caught:
        simckpt.Store(store).start(f"cart-{rank}")
    # and the same start works afterwards
    with simckpt.Store(store).start("cart"):
        pass
    # training's own is the only one that is left
    assert len(torch.distributed.distributed_c10d._world.pg_map) == 1
    return type(caught.value).__name__, str(caught.value)


def test_ranks_that_start_runs_of_different_names_are_told_so(ranks: Ranks, tmp_path: Path) -> None:
    for kind, message in ranks.run(2, misdirected, str(tmp_path), limit=LIMIT):
        assert kind == "ConfigurationError"
        assert "rank 0 starts 'cart-0', rank 1 'cart-1'" in message
    assert simckpt.Store(tmp_path).files.runs() == ["cart"]


def locked(rank: int, size: int, store: str) -> str:
    if rank == 0:
        other = subprocess.Popen(
            [
                sys.executable,
                "-c",
                f"import simckpt, sys; run = simckpt.Store({store!r}).start('cart'); print(1, flush=True); input()",
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        other.stdout.readline()
    try:
        with pytest.raises(simckpt.SimckptError) as caught:
            simckpt.Store(store).start("cart")
        return f"{type(caught.value).__name__}: {caught.value} {caught.value.pid}"
    finally:
        if rank == 0:
            other.communicate(b"\n")


def test_an_error_of_the_start_is_raised_by_all_ranks(ranks: Ranks, tmp_path: Path) -> None:
    first, second = ranks.run(2, locked, str(tmp_path), limit=LIMIT)
    assert first == second
    assert first.startswith("RunLockedError: run 'cart' is being written by process")


def on_others(rank: int, size: int, store: str, num_envs: int, step: int) -> Any:
    run = simckpt.Store(store).start("cart")
    training = Training(rank, size, num_envs=num_envs)
    del training.loop.previous_done
    training.loop.previous_done = np.zeros(num_envs, bool)
    checkpointer = run.checkpointer(training.components, save_when=simckpt.EverySteps(5), timeout=20.0)
    read, reads = StoreFiles.read, []
    StoreFiles.read = lambda self, *args, **options: reads.append(args) or read(self, *args, **options)
    with run, checkpointer:
        found = checkpointer.restore_latest()
        # each component that is dealt out anew, and all the others at once: whatever the number of ranks
        assert len(reads) <= 4 + 1, reads
        start = training.loop.step, training.fingerprint(), training.loop.observations.tolist()
        while training.loop.step < step:
            training.advance()
            checkpointer.step(training.loop.step)
        checkpointer.wait()
    return found.step, start, checkpointer.restore_report, training.fingerprint()


@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2), (2, 4)])
def test_another_number_of_ranks_gets_the_same_envs_and_parameters(
    ranks: Ranks, tmp_path: Path, before: int, after: int
) -> None:
    envs = 4
    saved = ranks.run(before, on_step_five, str(tmp_path), envs // before, limit=LIMIT)
    found = ranks.run(after, on_others, str(tmp_path), envs // after, 8, limit=LIMIT)
    for step, (at, start, _), report, _ in found:
        assert (step, at) == (5, 5)
        assert start["agent"] == saved[0][0]["agent"]
        assert start["optimizer"] == saved[0][0]["optimizer"]
        assert any("all random streams are derived anew" in line for line in report)
    observations = [each for one in found for each in one[1][2]]
    assert observations == [each for one in saved for each in one[1]]
    # no two ranks draw the same numbers
    assert len({one[1][1]["torch"] for one in found} | {one[0]["torch"] for one in saved}) == before + after


def counted(rank: int, size: int, store: str, untouched: list[str] | None) -> Any:
    """Each rank counts its own episodes, which go to no other number of ranks."""
    with simckpt.Store(store).start("cart") as run:
        loop = simckpt.LoopState(step=0, episodes=100 + rank, best=0.0)
        checkpointer = run.checkpointer({"loop": loop}, save_when=simckpt.EverySteps(1), timeout=20.0)
        with checkpointer:
            try:
                checkpointer.restore_latest(**({} if untouched is None else {"untouched": untouched}))
            except simckpt.SimckptError as error:
                return type(error).__name__, str(error)
            if untouched is None:
                loop.step, loop.best = 1, 7.0
                checkpointer.step(1)
                checkpointer.wait()
        return loop.step, loop.best, loop.episodes


def test_what_goes_to_no_other_number_of_ranks_can_be_left_as_it_is(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks.run(2, counted, str(tmp_path), None, limit=LIMIT) == [(1, 7.0, 100), (1, 7.0, 101)]
    ((kind, message),) = ranks.run(1, counted, str(tmp_path), None, limit=LIMIT)
    assert kind == "StateMismatchError"
    assert "restore_latest(untouched={'loop/episodes'})" in message
    # as the message says
    assert ranks.run(1, counted, str(tmp_path), ["loop/episodes"], limit=LIMIT) == [(1, 7.0, 100)]
    assert ranks.run(1, counted, str(tmp_path), ["loop"], limit=LIMIT) == [(0, 0.0, 100)]
    ((kind, message),) = ranks.run(1, counted, str(tmp_path), ["loop/episodes", "loop/typo"], limit=LIMIT)
    assert (kind, "'loop/typo' cannot be left as it is" in message) == ("ConfigurationError", True)
    # on as many ranks it can be left as well
    assert ranks.run(2, counted, str(tmp_path), ["loop/best"], limit=LIMIT)[1] == (1, 0.0, 101)


def on_step_five(rank: int, size: int, store: str, num_envs: int) -> Any:
    run = simckpt.Store(store).start("cart")
    training = Training(rank, size, num_envs=num_envs)
    checkpointer = run.checkpointer(training.components, save_when=simckpt.EverySteps(5), timeout=20.0)
    with run, checkpointer:
        training.begin()
        while training.loop.step < 5:
            training.advance()
            checkpointer.step(training.loop.step)
        checkpointer.wait()
    return training.fingerprint(), training.loop.observations.tolist()


def differing(rank: int, size: int, store: str) -> Any:

    run = simckpt.Store(store).start("cart")
    module = torch.nn.Linear(3, 2)
    with torch.no_grad():
        module.weight.fill_(rank)
    found = []
    for per_rank in (None, {"agent": True}):
        checkpointer = run.checkpointer(
            {"agent": module}, save_when=simckpt.EverySteps(1), per_rank=per_rank, timeout=10.0
        )
        with checkpointer, warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", simckpt.SaveFailedWarning)
            checkpointer.step(1 + len(found))
            checkpointer.wait()
        found.append([str(each.message) for each in caught])
    run.close()
    return found


def test_what_ranks_should_share_and_do_not_is_refused_by_name(ranks: Ranks, tmp_path: Path) -> None:
    for refused, own in ranks.run(2, differing, str(tmp_path), limit=LIMIT):
        assert any("agent/weight" in message for message in refused), refused
        assert not own
    assert simckpt.Store(tmp_path).run("cart").latest().components() == ["agent@0", "checkpointer", "agent@1"]


def misnamed(rank: int, size: int, store: str) -> list[str]:
    run = simckpt.Store(store).start("cart")
    found = []
    for components, options in (
        ({"a@1": simckpt.LoopState(x=1)}, {}),
        ({"a": simckpt.LoopState(x=1)}, {"per_rank": {"b": True}}),
        ({"a": simckpt.LoopState(x=1)}, {"coordination": "loose"}),
    ):
        with pytest.raises(simckpt.SimckptError) as caught:
            run.checkpointer(components, save_when=simckpt.EverySteps(1), **options)
        found.append(str(caught.value))
    run.close()
    return found


def test_arguments_that_make_no_sense_are_refused(ranks: Ranks, tmp_path: Path) -> None:
    for name, per_rank, coordination in ranks.run(2, misnamed, str(tmp_path), limit=LIMIT):
        assert "'@' and a number say whose it is" in name
        assert "no component" in per_rank
        assert "coordination is" in coordination


def apart(rank: int, size: int, store: str) -> str:
    run = simckpt.Store(store).start("cart")
    loop = simckpt.LoopState(step=0)
    checkpointer = run.checkpointer({"loop": loop}, save_when=simckpt.EverySteps(10))
    with pytest.raises(simckpt.SimckptError) as caught, run, checkpointer:
        checkpointer.step(3 + rank)
    return str(caught.value)


def test_ranks_at_different_steps_are_told(ranks: Ranks, tmp_path: Path) -> None:
    for text in ranks.run(2, apart, str(tmp_path), limit=LIMIT):
        assert "the ranks are at different steps, from 3 to 4" in text


def returning(rank: int, size: int, store: str, last: int) -> Any:
    """Evaluations fall after step 24, which rank 0 alone measures."""
    policy = simckpt.RollbackPolicy("eval/return", changes=simckpt.Reseed(), max_rollbacks=1, then="continue")

    def once() -> Any:
        run = simckpt.Store(store).start("cart")
        torch.manual_seed(5)
        module = torch.nn.Linear(2, 2)
        optimizer = torch.optim.Adam(module.parameters(), lr=1e-3)
        loop, stream = simckpt.LoopState(step=0, drawn=0.0), np.random.default_rng(rank)
        checkpointer = run.checkpointer(
            {"agent": module, "optimizer": optimizer, "loop": loop, "stream": stream},
            save_when=simckpt.EverySteps(4),
            rollback=policy,
            timeout=20.0,
        )
        with run, checkpointer:
            checkpointer.restore_latest()
            while loop.step < last:
                optimizer.zero_grad()
                module(torch.ones(1, 2)).sum().backward()
                optimizer.step()
                loop.drawn = float(stream.random())
                loop.step += 1
                metrics = {}
                if rank == 0 and loop.step % 2 == 0:
                    rolled_back = bool(checkpointer._decisions.rollbacks)
                    level = loop.step if loop.step <= 24 or rolled_back else 0.0
                    metrics = {"eval/return": [level + 0.1 * episode for episode in range(10)]}
                checkpointer.step(loop.step, metrics)
        return loop.step, loop.drawn, module.weight.tolist()

    return simckpt.supervise(once)


def test_all_ranks_go_back_together(ranks: Ranks, tmp_path: Path) -> None:
    found = ranks.run(2, returning, str(tmp_path), 40, limit=LIMIT)
    run = simckpt.Store(tmp_path).run("cart")
    (rollback,) = [each for each in run.checkpoints(abandoned=True) if each.kind == "rollback"]
    assert rollback.step <= 24
    assert [each[0] for each in found] == [40, 40]
    assert found[0][2] == found[1][2]
    # each rank's stream was derived anew, and not to the same one
    assert found[0][1] != found[1][1]


def test_saves_that_are_due_while_one_is_in_flight_are_put_off_alike_on_all_ranks(ranks: Ranks, tmp_path: Path) -> None:
    options = {"save_when": simckpt.EverySteps(1), "when_busy": "coalesce", "ignore": ("a save of run",)}
    whole = trained(ranks, 2, tmp_path / "whole", 13, **options)
    trained(ranks, 2, tmp_path / "parts", 8, **options)
    assert trained(ranks, 2, tmp_path / "parts", 13, **options) == whole


def branched(rank: int, size: int, store: str, name: str, last: int) -> Any:
    run = simckpt.Store(store).start(name)
    args = run.configure({"lr": 1e-2})
    torch.manual_seed(3)
    module = torch.nn.Linear(4, 4)
    optimizer = torch.optim.Adam(module.parameters(), lr=args["lr"])
    loop, stream = simckpt.LoopState(step=0, drawn=[], note=name), np.random.default_rng(rank)
    checkpointer = run.checkpointer(
        {"agent": module, "optimizer": optimizer, "loop": loop, "stream": stream},
        save_when=simckpt.EverySteps(2),
        hyperparameters=simckpt.Hyperparameters({"lr": optimizer}),
        timeout=20.0,
    )
    with run, checkpointer:
        restored = checkpointer.restore_latest()
        begun = loop.step
        while loop.step < last:
            optimizer.zero_grad()
            module(torch.ones(1, 4)).square().sum().backward()
            optimizer.step()
            loop.drawn = [*loop.drawn, float(stream.random())]
            loop.step += 1
            checkpointer.step(loop.step)
        checkpointer.wait()
    rate = optimizer.param_groups[0]["lr"]
    return None if restored is None else restored.id, begun, rate, loop.drawn, module.weight.tolist()


def test_a_branch_begins_at_its_origin_on_all_ranks(ranks: Ranks, tmp_path: Path) -> None:
    first = ranks.run(2, branched, str(tmp_path), "cart", 4, limit=LIMIT)
    origin = simckpt.Store(tmp_path).run("cart").at(step=4)
    origin.branch("slow", {"lr": 1e-3}, rng="reseed")
    found = ranks.run(2, branched, str(tmp_path), "slow", 7, limit=LIMIT)
    for rank, (restored, begun, rate, drawn, weights) in enumerate(found):
        assert (restored, begun, rate) == (origin.id, 4, 1e-3)
        assert drawn[:4] == first[rank][3]
        assert weights == found[0][4]
    # derived anew, and not to the same stream on both
    continued = [np.random.default_rng(rank).random(7)[4:].tolist() for rank in range(2)]
    assert len({tuple(each) for each in [*continued, *(one[3][4:] for one in found)]}) == 4


def broken(rank: int, size: int, store: str, last: int) -> Any:
    """One shard of a weight becomes NaN on rank 1 alone, once."""
    lives: list[int] = []

    def once() -> Any:
        lives.append(1)
        run = simckpt.Store(store).start("cart")
        torch.manual_seed(5)
        module = torch.nn.Linear(8, 8)
        fully_shard(module)
        optimizer = torch.optim.Adam(module.parameters(), lr=1e-3)
        loop = simckpt.LoopState(step=0)
        run.configure({"lr": 1e-3})
        checkpointer = run.checkpointer(
            {"agent": module, "optimizer": optimizer, "loop": loop},
            save_when=simckpt.EverySteps(64),
            rollback=simckpt.RollbackPolicy("eval/return", changes=simckpt.Scale(lr=0.5)),
            hyperparameters=simckpt.Hyperparameters({"lr": optimizer}),
            timeout=20.0,
        )
        with run, checkpointer:
            checkpointer.restore_latest()
            while loop.step < last:
                optimizer.zero_grad()
                module(torch.ones(2, 8)).square().sum().backward()
                optimizer.step()
                loop.step += 64
                if loop.step == 192 and len(lives) == 1 and rank == 1:
                    with torch.no_grad():
                        module.weight.to_local()[0, 0] = float("nan")
                checkpointer.step(loop.step)
        finite = bool(torch.isfinite(module.weight.to_local()).all())
        return loop.step, len(lives), finite, optimizer.param_groups[0]["lr"]

    return simckpt.supervise(once)


def test_a_shard_that_is_not_finite_makes_all_ranks_go_back(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks.run(2, broken, str(tmp_path), 320, limit=LIMIT) == [(320, 2, True, 5e-4)] * 2
    (rollback,) = [each for each in simckpt.Store(tmp_path).run("cart").checkpoints() if each.kind == "rollback"]
    assert rollback.step == 128
    assert "is not finite" in rollback.rollback["reason"]


def torn(rank: int, size: int, store: str) -> list[str]:
    run = simckpt.Store(store).start("cart")
    loop, found = simckpt.LoopState(step=0), []
    checkpointer = run.checkpointer({"loop": loop}, save_when=simckpt.EverySteps(10), timeout=10.0)
    with pytest.raises(simckpt.SimckptError) as caught:
        checkpointer.save(10 + rank)
    found.append(str(caught.value))
    with pytest.raises(simckpt.SimckptError) as caught:
        checkpointer.save(12) if rank == 0 else checkpointer.step(12)
    found.append(str(caught.value))
    assert checkpointer.save(13).step == 13
    buffer = simckpt.ReplayBuffer(4, gym.spaces.Discrete(2), gym.spaces.Discrete(2), num_envs=1, seed=1)
    for components, options in (
        ({"replay": buffer}, {"per_rank": {"replay": False}}),
        ({"loop": loop}, {"coordination": "independent", "background": None}),
    ):
        with pytest.raises(simckpt.SimckptError) as caught:
            run.checkpointer(components, save_when=simckpt.EverySteps(1), **options)
        found.append(str(caught.value))
    run.close()
    return found


def test_ranks_that_save_different_things_commit_nothing(ranks: Ranks, tmp_path: Path) -> None:
    for steps_differ, calls_differ, shared_log, foreground in ranks.run(2, torn, str(tmp_path), limit=LIMIT):
        assert "the ranks are at different steps, from 10 to 11" in steps_differ
        assert "some ranks call Checkpointer.save" in calls_differ
        assert "a replay buffer is each rank's own" in shared_log
        assert "in the background" in foreground
    assert steps(tmp_path) == [13]


def normalised(rank: int, size: int, store: str, last: int, coordination: str) -> Any:
    """Trains through DDP, and acts with the module within it, whose running means are of the rank's own batch then."""
    with simckpt.Store(store).start("cart") as run:
        torch.manual_seed(3)
        module = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 2))
        parallel = torch.nn.parallel.DistributedDataParallel(module) if size > 1 else module
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        loop = simckpt.LoopState(step=0, acted=[])
        checkpointer = run.checkpointer(
            {"agent": parallel, "optimizer": optimizer, "loop": loop},
            save_when=simckpt.EverySteps(1),
            coordination=coordination,
            timeout=20.0,
        )
        with checkpointer:
            untouched = {"loop"} if size == 1 else ()
            restored = checkpointer.restore_latest(untouched=untouched)
            begun = module[1].running_mean.tolist()
            while loop.step < last:
                x = torch.randn(8, 3, generator=torch.Generator().manual_seed(100 * loop.step + rank))
                optimizer.zero_grad()
                parallel(x).square().sum().backward()
                optimizer.step()
                module.eval()
                loop.acted = [*loop.acted, float(module(torch.ones(1, 3)).sum().detach())]
                module.train()
                loop.step += 1
                checkpointer.step(loop.step)
                checkpointer.wait()
        return begun, module[1].running_mean.tolist(), loop.acted, None if restored is None else restored.components()


@pytest.mark.parametrize("coordination", ["barrier", "independent"])
def test_running_means_that_ranks_have_of_their_own_between_two_passes_come_back(
    ranks: Ranks, tmp_path: Path, coordination: str
) -> None:
    whole = ranks.run(2, normalised, str(tmp_path / "whole"), 4, coordination, limit=LIMIT)
    first = ranks.run(2, normalised, str(tmp_path / "parts"), 2, coordination, limit=LIMIT)
    assert first[0][1] != first[1][1]
    found = ranks.run(2, normalised, str(tmp_path / "parts"), 4, coordination, limit=LIMIT)
    assert [each[:3] for each in found] == [(begun[1], end[1], end[2]) for begun, end in zip(first, whole, strict=True)]
    assert "agent@1" in found[0][3]
    # one process goes on with rank 0's
    (alone,) = ranks.run(1, normalised, str(tmp_path / "parts"), 0, coordination, limit=LIMIT)
    assert alone[0] == whole[0][1]


def unsupported(rank: int, size: int, store: str) -> list[Any]:
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.optim import ZeroRedundancyOptimizer

    module, found = torch.nn.Linear(2, 2), []
    zero = ZeroRedundancyOptimizer(module.parameters(), optimizer_class=torch.optim.Adam)
    with simckpt.Store(store).start("cart") as run:
        for name, component in (
            ("optimizer", zero),
            ("agent", FullyShardedDataParallel(torch.nn.Linear(2, 2), device_id=torch.device("cpu"))),
        ):
            with pytest.raises(simckpt.SimckptError) as caught:
                run.checkpointer({name: component}, save_when=simckpt.EverySteps(1))
            found.append((type(caught.value).__name__, str(caught.value)))
    return found


def test_wrappers_that_shard_in_their_own_way_are_refused_with_what_to_take_instead(
    ranks: Ranks, tmp_path: Path
) -> None:
    for zero, fsdp in ranks.run(2, unsupported, str(tmp_path), limit=LIMIT):
        assert zero[0] == fsdp[0] == "UnsupportedStateError"
        assert "component 'optimizer', a ZeroRedundancyOptimizer" in zero[1]
        assert "component 'agent', a FullyShardedDataParallel" in fsdp[1]
        assert all("fully_shard" in message for _, message in (zero, fsdp))


def failing_once(rank: int, size: int, store: str, victim: int, when_busy: str) -> Any:
    """The third save cannot be begun on one rank; on the others it is in flight, and fails."""
    run = simckpt.Store(store).start("cart")
    loop, extra = simckpt.LoopState(step=0), simckpt.LoopState(held=None)
    checkpointer = run.checkpointer(
        {"loop": loop, "extra": extra}, save_when=simckpt.EverySteps(1), when_busy=when_busy, timeout=10.0
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", simckpt.SaveFailedWarning)
        with run, checkpointer:
            checkpointer.wait()
            while loop.step < 12:
                loop.step += 1
                with Path(__file__).open() as file:
                    extra.held = file if rank == victim and loop.step == 3 else None
                    checkpointer.step(loop.step)
                    extra.held = None
                if loop.step in (1, 2):
                    checkpointer.wait()
            checkpointer.wait()
        return [str(each.message) for each in caught if "failed, training goes on" in str(each.message)]


@pytest.mark.parametrize(("victim", "when_busy"), [(0, "skip"), (1, "skip"), (0, "coalesce"), (1, "coalesce")])
def test_a_save_that_cannot_be_begun_on_one_rank_leaves_all_at_the_same_one(
    ranks: Ranks, tmp_path: Path, victim: int, when_busy: str
) -> None:
    found = ranks.run(2, failing_once, str(tmp_path), victim, when_busy, limit=LIMIT)
    for failures in found:
        (message,) = failures
        assert "at step 3 failed" in message
    assert f"rank {victim}: UnsupportedStateError" in found[1 - victim][0]
    saved = simckpt.Store(tmp_path).run("cart").checkpoints()
    assert {1, 2} <= {each.step for each in saved}
    assert 3 not in {each.step for each in saved}
    assert saved[-1].step > 3
    for checkpoint in saved:
        assert [checkpoint[f"loop@{rank}"]["step"] for rank in range(2)] == [checkpoint.step] * 2


def counting(rank: int, size: int, store: str, coordination: str) -> Any:
    """Returns how many keys the store of keys has after some saves, and after many more."""
    import torch.distributed as dist

    # of ranks that do not wait the disk decides which steps they have in common
    warnings.filterwarnings("ignore", ".*steps in a row", simckpt.UpkeepWarning)
    run = simckpt.Store(store).start("cart")
    loop, found = simckpt.LoopState(step=0), []
    checkpointer = run.checkpointer(
        {"loop": loop}, save_when=simckpt.EverySteps(1 + rank), coordination=coordination, timeout=20.0
    )
    with run, checkpointer:
        while loop.step < 40:
            dist.barrier()
            loop.step += 1
            checkpointer.step(loop.step)
            if loop.step in (8, 40):
                checkpointer.wait()
                dist.barrier()
                found.append(dist.group.WORLD.get_group_store().num_keys())
                dist.barrier()
    return found


@pytest.mark.parametrize("coordination", ["barrier", "independent"])
def test_keys_of_votes_do_not_pile_up(ranks: Ranks, tmp_path: Path, coordination: str) -> None:
    for few, many in ranks.run(2, counting, str(tmp_path), coordination, limit=LIMIT):
        # some of the last votes are left, whose number does not depend on how many there were
        assert many <= few + 12
    assert steps(tmp_path)[-1] >= 30
