import inspect
import os
import select
import signal
import subprocess
import sys

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv
from vector_helpers import assert_same

from simckpt.sim.worker import HELLO, async_worker

_PARENT = """
import signal, sys
import gymnasium as gym
from gymnasium.vector import AsyncVectorEnv
from simckpt.sim.worker import async_worker

def make():
    return gym.make("CartPole-v1")

if __name__ == "__main__":
    envs = AsyncVectorEnv([make] * 4, worker=async_worker, context=sys.argv[1])
    envs.reset(seed=0)
    # forked later, so these hold copies of the parent's ends of the pipes above
    later = AsyncVectorEnv([make] * 2, worker=async_worker, context="fork")
    print(*[p.pid for p in envs.processes + later.processes], flush=True)
    if sys.argv[2] == "idle":
        signal.pause()
    while True:
        envs.step(envs.action_space.sample())
"""


def _wait_for_end(pids, seconds):
    """Returns the processes still running after that time."""
    descriptors = {}
    for pid in pids:
        try:
            descriptors[os.pidfd_open(pid)] = pid
        except ProcessLookupError:
            continue
    poller = select.poll()
    for descriptor in descriptors:
        poller.register(descriptor, select.POLLIN)
    running = dict(descriptors)
    while running:
        ready = poller.poll(seconds * 1000)
        if not ready:
            break
        for descriptor, _ in ready:
            poller.unregister(descriptor)
            running.pop(descriptor)
    for descriptor in descriptors:
        os.close(descriptor)
    return list(running.values())


def _cartpole():
    return gym.make("CartPole-v1")


@pytest.mark.parametrize("activity", ["idle", "stepping"])
@pytest.mark.parametrize("context", ["fork", "spawn", "forkserver"])
def test_all_workers_leave_when_the_parent_is_killed(tmp_path, context, activity):
    script = tmp_path / "parent.py"
    script.write_text(_PARENT)
    parent = subprocess.Popen([sys.executable, script, context, activity], stdout=subprocess.PIPE, text=True)
    with parent:
        pids = [int(pid) for pid in parent.stdout.readline().split()]
        assert len(pids) == 6
        parent.kill()
        parent.wait()
    assert _wait_for_end(pids, 10) == []


def test_worker_ignores_the_signals_that_schedulers_send():
    envs = AsyncVectorEnv([_cartpole] * 2, worker=async_worker)
    try:
        envs.reset(seed=1)
        for process in envs.processes:
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2):
                os.kill(process.pid, number)
        envs.step(np.array([0, 1]))
        for process in envs.processes:
            os.kill(process.pid, signal.SIGTERM)
        observations, *_ = envs.step(np.array([0, 1]))
        assert observations.shape == (2, 4)
        assert all(process.is_alive() for process in envs.processes)
    finally:
        envs.close()


def test_programs_started_by_an_env_do_not_inherit_ignored_signals():
    class Launcher(gym.Env):
        observation_space = gym.spaces.Box(0, 1, (1,))
        action_space = gym.spaces.Discrete(2)

        def launch(self):
            code = "import signal; print(signal.getsignal(signal.SIGTERM) == signal.SIG_DFL)"
            return subprocess.run(
                [sys.executable, "-c", code], capture_output=True, text=True, check=True
            ).stdout.strip()

    envs = AsyncVectorEnv([Launcher], worker=async_worker)
    try:
        assert envs.call("launch") == ("True",)
    finally:
        envs.close()


def test_terminate_ends_workers_although_later_workers_hold_their_pipes():
    envs = AsyncVectorEnv([_cartpole] * 2, worker=async_worker, context="fork")
    later = AsyncVectorEnv([_cartpole] * 2, worker=async_worker, context="fork")
    try:
        pids = [process.pid for process in envs.processes]
        envs.close(terminate=True)
        assert _wait_for_end(pids, 10) == []
        later.reset(seed=0)
    finally:
        later.close()


def _run_both(make, steps, *, seed, **kwargs):
    """Yields what gymnasium's worker and simckpt's answer to the same calls."""
    ours = AsyncVectorEnv([make] * 3, worker=async_worker, **kwargs)
    theirs = AsyncVectorEnv([make] * 3, **kwargs)
    try:
        yield ours.reset(seed=seed), theirs.reset(seed=seed)
        ours.action_space.seed(seed)
        for _ in range(steps):
            actions = ours.action_space.sample()
            yield ours.step(actions), theirs.step(actions)
    finally:
        ours.close()
        theirs.close()


@pytest.mark.parametrize("shared_memory", [True, False])
@pytest.mark.parametrize("mode", [AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP])
def test_worker_behaves_as_gymnasiums(mode, shared_memory):
    for ours, theirs in _run_both(_cartpole, 80, seed=5, autoreset_mode=mode, shared_memory=shared_memory):
        assert_same(ours, theirs)


@pytest.mark.parametrize("shared_memory", [True, False])
def test_partial_reset_re_emits_the_other_observations(shared_memory):
    kwargs = {"worker": async_worker, "autoreset_mode": AutoresetMode.DISABLED, "shared_memory": shared_memory}
    envs = AsyncVectorEnv([_cartpole] * 2, **kwargs)
    twin = SyncVectorEnv([_cartpole] * 2, autoreset_mode=AutoresetMode.DISABLED)
    try:
        envs.reset(seed=2)
        twin.reset(seed=2)
        for _ in range(3):
            assert_same(envs.step(np.array([1, 0])), twin.step(np.array([1, 0])))
        mask = np.array([False, True])
        assert_same(envs.reset(options={"reset_mask": mask}), twin.reset(options={"reset_mask": mask}))
    finally:
        envs.close()
        twin.close()


@pytest.mark.parametrize("shared_memory", [True, False])
def test_explicit_reset_clears_the_pending_autoreset(shared_memory):
    envs = AsyncVectorEnv([_cartpole], worker=async_worker, shared_memory=shared_memory)
    try:
        envs.reset(seed=0)
        done = False
        while not done:
            *_, terminated, _, _ = envs.step(np.array([1]))
            done = terminated[0]
        envs.reset(seed=0)
        _, rewards, *_ = envs.step(np.array([1]))
        # a spurious autoreset would give 0
        assert rewards.tolist() == [1.0]
    finally:
        envs.close()


def test_worker_reports_the_envs_error_as_gymnasiums_does(monkeypatch):
    # gymnasium also logs the error, as a warning
    monkeypatch.setattr(gym.logger, "min_level", 60)

    class Broken(gym.Env):
        observation_space = gym.spaces.Box(0, 1, (1,))
        action_space = gym.spaces.Discrete(2)

        def reset(self, *, seed=None, options=None):
            raise ConnectionError("the robot is off")

    envs = AsyncVectorEnv([Broken], worker=async_worker)
    try:
        with pytest.raises(ConnectionError, match="the robot is off"):
            envs.reset()
    finally:
        envs.close(terminate=True)


@pytest.mark.skipif(
    "max_concurrency" not in inspect.signature(AsyncVectorEnv).parameters, reason="new in gymnasium 1.4"
)
def test_worker_runs_behind_a_semaphore():
    for ours, theirs in _run_both(_cartpole, 5, seed=5, max_concurrency=1):
        assert_same(ours, theirs)


def test_worker_answers_attributes_and_the_hello():
    envs = AsyncVectorEnv([_cartpole] * 2, worker=async_worker)
    try:
        envs.set_attr("gravity", [1.0, 2.0])
        assert envs.get_attr("gravity") == (1.0, 2.0)
        pipe = envs.parent_pipes[0]
        pipe.send(("_check_spaces", ("simckpt", envs.single_observation_space, envs.single_action_space)))
        assert pipe.recv() == (HELLO, True)
    finally:
        envs.close()
