"""A replay buffer as a component of a run."""

from __future__ import annotations

import pytest
from replay.buffers import Uncounted, add_own, make_own

import simckpt
from simckpt.errors import ReplayWarning, UnsupportedStateError
from simckpt.replay import ReplayBuffer


def start(path, buffer):
    run = simckpt.Store(path).start("sac")
    loop = simckpt.LoopState(step=0)
    components = {"replay": buffer, "loop": loop}
    return run, loop, run.checkpointer(components, save_when=simckpt.EverySteps(10))


def train(buffer, loop, checkpointer, until) -> None:
    while loop.step < until:
        loop.step += 1
        add_own(buffer, [loop.step])
        buffer.sample(4)
        checkpointer.step(loop.step)


def test_a_resumed_run_samples_as_the_undisturbed_one(tmp_path) -> None:
    undisturbed = make_own(25, num_envs=2)
    run, loop, checkpointer = start(tmp_path / "a", undisturbed)
    with run, checkpointer:
        checkpointer.restore_latest()
        train(undisturbed, loop, checkpointer, 77)

    killed = make_own(25, num_envs=2)
    run, loop, checkpointer = start(tmp_path / "b", killed)
    with run, checkpointer:
        checkpointer.restore_latest()
        train(killed, loop, checkpointer, 53)
    resumed = make_own(25, num_envs=2, seed=5)
    run, loop, checkpointer = start(tmp_path / "b", resumed)
    with run, checkpointer:
        checkpointer.restore_latest()
        assert loop.step == 50
        train(resumed, loop, checkpointer, 77)
    for mine, other in zip(resumed.sample(50), undisturbed.sample(50), strict=True):
        assert mine.tobytes() == other.tobytes()
    assert resumed.observations.tobytes() == undisturbed.observations.tobytes()


def test_a_save_adds_the_new_rows_alone(tmp_path) -> None:
    buffer = Uncounted(1000, width=1024)
    run, _, checkpointer = start(tmp_path, buffer)
    with run, checkpointer:
        checkpointer.restore_latest()
        buffer.add(range(800))
        first = checkpointer.save(1)
        buffer.add(range(800, 803))
        second = checkpointer.save(2)
    assert first.size >= 800 * 8192
    # 2 KB a leaf, of which there are few, besides the rows
    assert 3 * 8192 <= second.size <= 3 * 8192 + 20_000


def test_a_run_goes_on_in_a_smaller_buffer(tmp_path) -> None:
    buffer = Uncounted(20)
    run, _, checkpointer = start(tmp_path, buffer)
    with run, checkpointer:
        checkpointer.restore_latest()
        buffer.add(range(30))
        checkpointer.save(1)
    smaller = Uncounted(8)
    run, _, checkpointer = start(tmp_path, smaller)
    with run, checkpointer:
        with pytest.warns(ReplayWarning, match="12 oldest are dropped"):
            checkpointer.restore_latest()
        assert smaller.contents() == list(range(22, 30))
        smaller.add([30])
        checkpointer.save(2)
    again = Uncounted(8)
    run, _, checkpointer = start(tmp_path, again)
    with run, checkpointer:
        checkpointer.restore_latest()
        assert again.contents() == list(range(23, 31))


def test_a_buffer_without_adapter_is_refused_when_the_run_starts(tmp_path) -> None:
    class Own(ReplayBuffer):
        pass

    box = make_own().observations
    with pytest.raises(UnsupportedStateError, match=r"'replay'.*Own"), simckpt.Store(tmp_path).start("sac") as run:
        run.checkpointer({"replay": Own(5, box, box, seed=1)}, save_when=simckpt.EverySteps(10))
