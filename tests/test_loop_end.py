"""Loops that end early: by a scheduler's signal, or by an exception."""

# ruff: noqa: PT012, PT031, SIM117 - what is tested is the body of a context

import errno
import os
import signal
import subprocess
import sys
import textwrap
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from background_helpers import GatedDisk, Weights, saved_values
from examples import Counter

import simckpt
from simckpt.errors import ConfigurationError, SimckptError
from simckpt.policies import OnException, OnSignal
from simckpt.signals import EXIT_REQUEUE
from simckpt.storage import durable

ON_SIGNAL = simckpt.EverySteps(10) | OnSignal("SIGUSR1", grace=20.0)


@pytest.fixture
def disk(monkeypatch) -> Iterator[GatedDisk]:
    disk = GatedDisk()
    monkeypatch.setattr(durable, "Disk", lambda: disk)
    yield disk
    disk.gate.set()


@pytest.fixture
def store(tmp_path, disk) -> simckpt.Store:
    return simckpt.Store(tmp_path / "s")


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    """Puts the handlers back that an exit by a signal leaves ignored."""
    numbers = (signal.SIGUSR1, signal.SIGTERM)
    before = [signal.getsignal(number) for number in numbers]
    yield
    for number, handler in zip(numbers, before, strict=True):
        signal.signal(number, handler)


def begin(store: simckpt.Store, save_when: simckpt.policies.SavePolicy, **options):
    run, weights = store.start("a"), Weights()
    return run, run.checkpointer({"weights": weights}, save_when=save_when, **options), weights


def ask_to_end(checkpointer: simckpt.Checkpointer) -> None:
    os.kill(os.getpid(), signal.SIGUSR1)
    while checkpointer.stop_requested is None:
        os.sched_yield()


def test_a_signal_saves_at_the_next_step_and_exits_with_the_documented_code(store) -> None:
    _, checkpointer, weights = begin(store, ON_SIGNAL)
    with pytest.raises(SystemExit) as exit_, checkpointer:
        assert checkpointer.stop_requested is None
        assert checkpointer.step(3) is None
        weights.train(4)
        ask_to_end(checkpointer)
        assert checkpointer.stop_requested == "SIGUSR1"
        checkpointer.step(4, {"score": 1.0})
    assert exit_.value.code == EXIT_REQUEUE == 75
    # a second signal must not give the exit another code
    assert signal.getsignal(signal.SIGUSR1) == signal.SIG_IGN
    with store.start("a") as again:
        latest = again.latest()
        assert (latest.step, saved_values(latest), latest.metrics) == (4, {4.0}, {"score": 1.0})
    log = (store.path / "runs/a/events.jsonl").read_text()
    assert "SIGUSR1 asks the process to end" in log
    assert '"stopped"' in log


def test_a_signal_waits_for_the_save_in_flight_and_then_saves(store, disk) -> None:
    _, checkpointer, weights = begin(store, ON_SIGNAL)
    with pytest.raises(SystemExit), checkpointer:
        disk.hold()
        weights.train(10)
        checkpointer.step(10)
        disk.wait_until_writing()
        ask_to_end(checkpointer)
        threading.Timer(0.1, disk.gate.set).start()
        weights.train(11)
        checkpointer.step(11)
    found = store.run("a").checkpoints()
    assert [(each.step, saved_values(each)) for each in found] == [(10, {10.0}), (11, {11.0})]


def test_a_grace_period_that_is_too_short_keeps_the_last_checkpoint_and_says_so(store, disk) -> None:
    _, checkpointer, _ = begin(store, simckpt.EverySteps(10) | OnSignal("SIGUSR1", grace=0.05))
    with pytest.warns(
        simckpt.SaveFailedWarning, match=r"SIGUSR1: nothing was saved at step 11: .*the last checkpoint is"
    ):
        with pytest.raises(SystemExit) as exit_, checkpointer:
            disk.hold()
            threading.Timer(0.3, disk.gate.set).start()
            checkpointer.step(10).wait()
            ask_to_end(checkpointer)
            checkpointer.step(11)
    assert exit_.value.code == EXIT_REQUEUE
    assert [each.step for each in store.run("a").checkpoints()] == [10]


def test_a_save_that_fails_at_the_end_still_exits_with_the_code(store, disk) -> None:
    _, checkpointer, _ = begin(store, ON_SIGNAL)
    with pytest.warns(simckpt.SaveFailedWarning, match="nothing was saved at step 11: StorageError"):
        with pytest.raises(SystemExit) as exit_, checkpointer:
            checkpointer.step(10).wait()
            disk.failure = OSError(5, "broken")
            ask_to_end(checkpointer)
            checkpointer.step(11)
    disk.failure = None
    assert exit_.value.code == EXIT_REQUEUE
    assert [each.step for each in store.run("a").checkpoints()] == [10]


def test_a_signal_after_the_last_step_ends_the_process_too(store) -> None:
    _, checkpointer, _ = begin(store, ON_SIGNAL)
    with pytest.raises(SystemExit) as exit_, checkpointer:
        checkpointer.step(10)
        ask_to_end(checkpointer)
    assert exit_.value.code == EXIT_REQUEUE
    with store.start("a") as again:
        assert again.latest().step == 10


def test_an_exception_is_not_hidden_by_a_signal_that_came_as_well(store) -> None:
    before = signal.getsignal(signal.SIGUSR1)
    _, checkpointer, _ = begin(store, ON_SIGNAL)
    with pytest.raises(ZeroDivisionError), checkpointer:
        ask_to_end(checkpointer)
        raise ZeroDivisionError
    assert signal.getsignal(signal.SIGUSR1) == before


def test_contexts_of_one_checkpointer_do_not_nest(store) -> None:
    _, checkpointer, _ = begin(store, ON_SIGNAL)
    with checkpointer:
        with pytest.raises(ConfigurationError, match="do not nest"), checkpointer:
            pass
        assert checkpointer.step(10) is not None


def test_a_fork_inside_the_context_leaves_it_at_once(store, disk) -> None:
    _, checkpointer, weights = begin(store, ON_SIGNAL)
    with checkpointer:
        disk.hold()
        weights.train(10)
        checkpointer.step(10)
        disk.wait_until_writing()
        child = os.fork()
        if child == 0:
            checkpointer.__exit__(None, None, None)
            os._exit(7)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        disk.gate.set()
    assert store.run("a").latest().step == 10


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EIO])
@pytest.mark.parametrize("warned", ["error", "ignore"])
def test_the_scheduler_gets_the_code_whatever_the_disk_and_the_filters_say(store, disk, number: int, warned) -> None:
    _, checkpointer, _ = begin(store, ON_SIGNAL)
    with warnings.catch_warnings(), pytest.raises(SystemExit) as exit_, checkpointer:
        checkpointer.step(10).wait()
        warnings.simplefilter(warned)
        disk.broken = OSError(number, os.strerror(number))
        ask_to_end(checkpointer)
        checkpointer.step(11)
    disk.broken = None
    assert exit_.value.code == EXIT_REQUEUE
    with store.start("a") as again:
        assert [each.step for each in again.checkpoints()] == [10]


def test_the_newest_post_mortem_alone_is_kept_unless_an_older_one_is_pinned(store) -> None:
    for turn in range(4):
        with store.start("a") as run:
            checkpointer = run.checkpointer({"weights": Weights()}, save_when=simckpt.EverySteps(10) | OnException())
            with pytest.raises(ZeroDivisionError), checkpointer:
                checkpointer.restore_latest()
                checkpointer.step(10 * turn + 10)
                raise ZeroDivisionError
        if turn == 1:
            (pinned,) = [each for each in run.checkpoints(abandoned=True) if each.kind == "exception"]
            pinned.pin()
    left = [each for each in store.run("a").checkpoints(abandoned=True) if each.kind == "exception"]
    assert [each.step for each in left] == [20, 40]
    assert [each.step for each in store.run("a").checkpoints()] == [10, 20, 30, 40]


@pytest.mark.parametrize("policy", [OnSignal(), OnException()], ids=repr)
def test_a_policy_for_the_end_needs_the_context(store, policy) -> None:
    _, checkpointer, _ = begin(store, simckpt.EverySteps(1) | policy)
    with pytest.raises(ConfigurationError, match=r"with run\.checkpointer"):
        checkpointer.step(1)


def test_no_handler_is_installed_unless_a_policy_asks(store) -> None:
    _, checkpointer, _ = begin(store, simckpt.EverySteps(1) | OnException())
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)]
    with checkpointer:
        assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)] == before
        assert checkpointer.stop_requested is None


def test_an_exception_leaves_a_post_mortem_that_is_never_the_head(store) -> None:
    run, checkpointer, weights = begin(store, simckpt.EverySteps(10) | OnException(), keep=simckpt.KeepLast(1))
    with pytest.raises(ZeroDivisionError), checkpointer:
        weights.train(10)
        checkpointer.step(10, {"score": 1.0})
        weights.train(13)
        checkpointer.step(13)
        weights.train(14)
        raise ZeroDivisionError("by what?")
    run.close()
    run = store.start("a")
    healthy, dead = run.checkpoints(abandoned=True)
    assert (dead.kind, dead.step, dead.parent) == ("exception", 13, healthy.id)
    assert saved_values(dead) == {14.0}
    assert store.checkpoint(dead.id).kind == "exception"
    assert [run.latest(), run.best("score"), *run.checkpoints()] == [healthy] * 3
    assert "the loop ended with ZeroDivisionError: by what?" in (store.path / "runs/a/events.jsonl").read_text()
    # the next start goes on from the last whole step
    again = run.checkpointer({"weights": weights}, save_when=simckpt.EverySteps(10))
    assert again.restore_latest() == healthy
    assert set(weights.arrays["layer_0"]) == {10.0}
    assert again.step(20).wait().parent == healthy.id
    run.close()
    assert [each.step for each in store.run("a").checkpoints(abandoned=True)] == [10, 13, 20]


@pytest.mark.parametrize(
    "ending", [KeyboardInterrupt, SystemExit(0), GeneratorExit], ids=["ctrl-c", "exit", "generator"]
)
def test_what_is_no_error_leaves_no_post_mortem(store, ending) -> None:
    run, checkpointer, _ = begin(store, simckpt.EverySteps(10) | OnException())
    with pytest.raises((KeyboardInterrupt, SystemExit, GeneratorExit)), checkpointer:
        checkpointer.step(1)
        raise ending
    assert run.checkpoints(abandoned=True) == []


def test_a_post_mortem_that_cannot_be_taken_hides_nothing(store) -> None:
    run = store.start("a")
    loop = simckpt.LoopState(step=0)
    checkpointer = run.checkpointer({"loop": loop}, save_when=simckpt.EverySteps(10) | OnException())
    with pytest.warns(simckpt.SaveFailedWarning, match="visitor"), pytest.raises(ZeroDivisionError), checkpointer:
        loop.visitor = (number for number in range(3))
        raise ZeroDivisionError
    assert run.checkpoints(abandoned=True) == []


def test_an_exception_before_the_restore_leaves_no_post_mortem(store) -> None:
    run, checkpointer, _ = begin(store, simckpt.EverySteps(10))
    checkpointer.save(1)
    run.close()
    run, checkpointer, _ = begin(store, simckpt.EverySteps(10) | OnException())
    with pytest.raises(SimckptError), checkpointer:
        checkpointer.step(2)
    assert len(run.checkpoints(abandoned=True)) == 1


TRAINING = """
    import os, sys, time
    sys.path.insert(0, sys.argv[1])
    import gymnasium as gym, numpy as np
    import simckpt
    from simckpt.policies import OnSignal

    if __name__ == "__main__":
        envs = simckpt.make_vec("CartPole-v1", 2, vectorization_mode="async")
        loop = simckpt.LoopState(step=0, observations=envs.reset(seed=1)[0])
        run = simckpt.Store(sys.argv[2]).start("a")
        checkpointer = run.checkpointer(
            {"envs": envs, "loop": loop, "weights": np.zeros(100_000)},
            save_when=simckpt.EverySteps(10_000_000) | OnSignal(), background=sys.argv[3],
        )
        with checkpointer:
            checkpointer.restore_latest()
            print("ready", loop.step, flush=True)
            while True:
                loop.observations = envs.step(np.zeros(2, int))[0]
                loop.step += 1
                checkpointer.step(loop.step)
    """


@pytest.mark.parametrize("background", ["thread", "process"])
def test_a_signal_to_the_whole_process_group_saves_envs_and_all(tmp_path, background: str) -> None:
    command = [
        sys.executable,
        "-c",
        textwrap.dedent(TRAINING),
        str(Path(__file__).parent),
        str(tmp_path / "s"),
        background,
    ]
    steps = [0]
    for _ in range(2):
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
        ) as process:
            try:
                line = process.stdout.readline()
                assert line.split() == ["ready", str(steps[-1])], process.stderr.read()
                os.killpg(process.pid, signal.SIGTERM)
                _, errors = process.communicate(timeout=60)
            finally:
                process.kill()
        assert process.returncode == EXIT_REQUEUE, errors
        steps.append(simckpt.Store(tmp_path / "s").run("a").latest().step)
    assert 0 < steps[1] < steps[2]


def test_a_signal_is_seen_inside_an_evaluation(store) -> None:
    run = store.start("a")
    checkpointer = run.checkpointer({"counter": Counter()}, save_when=ON_SIGNAL)
    evaluated = []
    with pytest.raises(SystemExit), checkpointer:
        for episode in range(1000):
            if checkpointer.stop_requested:
                break
            evaluated.append(np.float64(episode))
            if episode == 2:
                ask_to_end(checkpointer)
        checkpointer.step(1)
    assert len(evaluated) == 3
    assert store.run("a").latest().step == 1
