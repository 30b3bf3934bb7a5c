import inspect

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv

from simckpt.errors import UnsupportedStateError
from simckpt.sim import SnapshotVectorEnv, async_worker, handle_for, make_vec


def test_signature_is_gymnasiums():
    ours, theirs = inspect.signature(make_vec), inspect.signature(gym.make_vec)
    assert [(p.name, p.kind, p.default) for p in ours.parameters.values()] == [
        (p.name, p.kind, p.default) for p in theirs.parameters.values()
    ]


@pytest.mark.parametrize(("mode", "cls"), [(None, SyncVectorEnv), ("sync", SyncVectorEnv), ("async", AsyncVectorEnv)])
def test_vectorization_modes(mode, cls):
    with make_vec("Pendulum-v1", num_envs=2, vectorization_mode=mode) as envs:
        assert isinstance(envs, SnapshotVectorEnv)
        assert isinstance(envs.unwrapped, cls)
        assert envs.num_envs == 2
        envs.reset(seed=0)
        envs.load_state_dict(envs.state_dict())


def test_arguments_reach_the_vector_env_and_the_envs():
    kwargs = {"shared_memory": False, "autoreset_mode": AutoresetMode.SAME_STEP}
    wrappers = [gym.wrappers.TimeAwareObservation]
    with make_vec("Pendulum-v1", 2, gym.VectorizeMode.ASYNC, kwargs, wrappers, g=2.5) as envs:
        assert envs.unwrapped.shared_memory is False
        assert envs.metadata["autoreset_mode"] == AutoresetMode.SAME_STEP
        # forwarded, which gymnasium's own vector wrappers do not do
        assert envs.get_attr("g") == (2.5, 2.5)
        assert envs.single_observation_space.shape == (4,)
    # the caller's dict is the caller's
    assert "worker" not in kwargs


def test_vector_entry_point_is_used_where_the_id_has_one():
    with make_vec("CartPole-v1", num_envs=2) as envs:
        assert type(envs.unwrapped) is type(gym.make_vec("CartPole-v1", num_envs=2).unwrapped)
        envs.reset(seed=0)
        state = envs.state_dict()
        expected = envs.step(np.array([0, 1]))
        envs.load_state_dict(state)
        assert envs.step(np.array([0, 1]))[0].tobytes() == expected[0].tobytes()


def test_a_spec_that_names_the_mode_gets_the_worker_too():
    with make_vec("Pendulum-v1", num_envs=2, vectorization_mode="async", vector_kwargs={"copy": False}) as envs:
        spec = envs.spec
    with make_vec(spec) as again:
        assert again.num_envs == 2
        assert again.unwrapped.worker is async_worker
        assert again.unwrapped.copy is False


def test_another_worker_is_refused_and_nothing_stays_behind():
    def worker(*args):
        gym.vector.async_vector_env._async_worker(*args)

    with pytest.raises(UnsupportedStateError, match="async_worker"):
        make_vec("Pendulum-v1", num_envs=1, vectorization_mode="async", vector_kwargs={"worker": worker})


def test_unknown_id_and_mode_give_gymnasiums_errors():
    with pytest.raises(gym.error.NameNotFound):
        make_vec("NoSuchEnv-v0")
    with pytest.raises(ValueError, match="vectorization mode"):
        make_vec("Pendulum-v1", vectorization_mode="parallel")


def test_handles_are_found_for_envs_and_vector_envs_only():
    with make_vec("Pendulum-v1", num_envs=1) as envs:
        assert handle_for(envs).path == "envs"
        assert handle_for(envs.env, "train").path == "train"
        assert handle_for(gym.make("Pendulum-v1"), "eval").path == "eval"
    assert handle_for(np.zeros(3)) is None
    assert handle_for({"envs": envs}) is None
