import dataclasses
import importlib.util
import sys
from fractions import Fraction
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
import torch

SCRIPT = Path(__file__).parents[2] / "scripts" / "plain_ppo.py"


def load_script():
    spec = importlib.util.spec_from_file_location("plain_ppo", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up by name
    spec.loader.exec_module(module)
    return module


ppo = load_script()
SMALL = ppo.Args(num_envs=2, rollout_steps=40, total_steps=240, minibatches=2, epochs=2, eval_every=0, eval_episodes=2)


@pytest.fixture(autouse=True)
def threads_as_before():
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def bits(agent):
    return {name: tensor.numpy().tobytes() for name, tensor in agent.state_dict().items()}


def episodes_of_one_env(dones, previous_done):
    """Returns (first row, last row, whether it ended) of the episodes of one column, by walking it as the env does."""
    episodes, first, resetting = [], None, previous_done
    for row, done in enumerate(dones):
        if resetting:
            resetting = False
            continue
        first = row if first is None else first
        if done:
            episodes.append((first, row, True))
            first, resetting = None, True
    if first is not None:
        episodes.append((first, len(dones) - 1, False))
    return episodes


def slow_advantages(rewards, values, terminated, dones, previous_dones, gamma, gae_lambda):
    """Sums the definition over each episode for itself, in exact fractions; reset rows belong to no episode."""
    estimates = [[Fraction(0)] * rewards.shape[1] for _ in rewards]
    for env in range(rewards.shape[1]):
        for first, last, _ in episodes_of_one_env(dones[:, env], previous_dones[env]):
            for row in range(first, last + 1):
                for later in range(row, last + 1):
                    following = 0 if terminated[later, env] else Fraction(values[later + 1, env])
                    error = Fraction(rewards[later, env]) + gamma * following - Fraction(values[later, env])
                    estimates[row][env] += (gamma * gae_lambda) ** (later - row) * error
    return np.array([[float(number) for number in row] for row in estimates])


def random_rollout(rng, steps, num_envs):
    """Draws episodes as NEXT_STEP mode delivers them: a reset row is never done. Numbers are multiples of 1/8."""
    dones, terminated = np.zeros((2, steps, num_envs), dtype=bool)
    previous_dones = before = rng.random(num_envs) < 0.5
    for row in range(steps):
        dones[row] = (rng.random(num_envs) < 0.3) & ~before
        terminated[row] = dones[row] & (rng.random(num_envs) < 0.5)
        before = dones[row]
    rewards = rng.integers(-64, 64, (steps, num_envs)) / 8
    values = rng.integers(-64, 64, (steps + 1, num_envs)) / 8
    return rewards, values, terminated, dones, previous_dones


def test_reset_rows_are_the_rows_after_an_end_also_across_rollouts():
    dones = np.array([[False, True], [True, False], [False, False], [False, True]])
    expected = np.array([[True, False], [False, True], [True, False], [False, False]])
    np.testing.assert_array_equal(ppo.reset_rows(dones, np.array([True, False])), expected)


@pytest.mark.parametrize("seed", range(20))
def test_advantages_equal_the_definition_summed_over_each_episode(seed):
    # gamma, lambda, rewards and values are binary fractions, so that float64 holds every sum exactly
    rewards, values, terminated, dones, previous_dones = random_rollout(np.random.default_rng(seed), 12, 4)
    resets = ppo.reset_rows(dones, previous_dones)
    expected = slow_advantages(rewards, values, terminated, dones, previous_dones, Fraction(1, 2), Fraction(1, 2))
    assert resets.any()
    rewards[resets] = np.nan
    rollout = {"rewards": rewards, "terminated": terminated, "dones": dones}
    estimates = ppo.advantages(rollout, values, resets, gamma=0.5, gae_lambda=0.5)
    np.testing.assert_array_equal(estimates, expected)


def test_truncation_is_worth_the_final_observation_and_termination_nothing():
    # one row each, gamma 1/2: 1 + 8/2 - 2 = 3 when cut off, 1 - 2 = -1 when terminal
    rewards, values = np.array([[1.0, 1.0], [0.0, 0.0]]), np.array([[2.0, 2.0], [8.0, 8.0], [5.0, 5.0]])
    dones = np.array([[True, True], [False, False]])
    terminated = np.array([[False, True], [False, False]])
    resets = ppo.reset_rows(dones, np.zeros(2, dtype=bool))
    rollout = {"rewards": rewards, "terminated": terminated, "dones": dones}
    estimates = ppo.advantages(rollout, values, resets, gamma=0.5, gae_lambda=1.0)
    np.testing.assert_array_equal(estimates, [[3.0, -1.0], [0.0, 0.0]])


def updated_agent(rollout):
    torch.manual_seed(3)
    agent = ppo.Agent(3, 2, initial_std=0.5)
    optimizer = torch.optim.Adam(agent.parameters(), lr=1e-2)
    ppo.update(agent, optimizer, rollout, SMALL)
    return agent


def test_an_update_does_not_depend_on_what_reset_rows_hold():
    rng = np.random.default_rng(5)
    rewards, _, terminated, dones, previous_dones = random_rollout(rng, 12, 4)
    rollout = {
        "observations": rng.standard_normal((13, 4, 3), dtype=np.float32),
        "actions": rng.standard_normal((12, 4, 2), dtype=np.float32),
        "rewards": rewards.astype(np.float32),
        "terminated": terminated,
        "dones": dones,
        "previous_dones": previous_dones,
    }
    resets = ppo.reset_rows(dones, previous_dones)
    spoiled = {name: column.copy() for name, column in rollout.items()}
    spoiled["rewards"][resets] = np.nan
    spoiled["actions"][resets] = np.nan
    # the observation of the row after a truncation is the final one of its episode and counts; after a terminal
    # state it is worth nothing
    after_terminal = np.concatenate([np.zeros_like(dones[:1]), terminated])
    spoiled["observations"][after_terminal] = np.nan
    assert (resets & ~after_terminal[:-1]).any()
    assert after_terminal.any()
    assert bits(updated_agent(spoiled)) == bits(updated_agent(rollout))
    spoiled["rewards"][~resets] += 1.0
    assert bits(updated_agent(spoiled)) != bits(updated_agent(rollout))


def test_reset_rows_of_a_real_vector_env_are_the_marked_ones_and_stay_out_of_the_reward_moments():
    # Pendulum's reward is negative always, so that 0 means: no transition
    envs = gym.wrappers.vector.NormalizeReward(gym.make_vec("Pendulum-v1", 3, "sync", max_episode_steps=5))
    rng = np.random.default_rng(0)
    envs.reset(seed=0)
    rewards, dones = [], []
    for _ in range(20):
        _, reward, terminated, truncated, _ = envs.step(rng.uniform(-2, 2, (3, 1)).astype(np.float32))
        rewards.append(reward)
        dones.append(terminated | truncated)
    envs.close()
    resets = ppo.reset_rows(np.array(dones), np.zeros(3, dtype=bool))
    np.testing.assert_array_equal(np.array(rewards) == 0, resets)
    assert resets.sum() == 9
    assert round(envs.return_rms.count) == 20 * 3 - 9


@pytest.mark.parametrize("normalize", [True, False])
def test_two_runs_are_bit_identical_and_async_equals_sync(normalize):
    args = dataclasses.replace(SMALL, normalize=normalize)
    first = bits(ppo.train(args))
    assert bits(ppo.train(args)) == first
    assert bits(ppo.train(dataclasses.replace(args, vectorization="async"))) == first
    assert bits(ppo.train(dataclasses.replace(args, seed=2))) != first


def test_evaluation_changes_nothing_and_says_the_same_again(capsys):
    undisturbed = bits(ppo.train(SMALL))
    capsys.readouterr()
    evaluated = dataclasses.replace(SMALL, eval_every=80)
    assert bits(ppo.train(evaluated)) == undisturbed
    said = [line for line in capsys.readouterr().out.splitlines() if line.startswith("eval step=")]
    assert [line.split()[1] for line in said] == ["step=80", "step=160", "step=240"]
    ppo.train(evaluated)
    assert [line for line in capsys.readouterr().out.splitlines() if line.startswith("eval step=")] == said


def test_evaluation_equals_an_episode_stepped_by_hand():
    args = dataclasses.replace(SMALL, eval_episodes=1, seed=7)
    torch.manual_seed(0)
    envs, normalizer = ppo.make_envs(args, 2, "sync")
    agent = ppo.Agent(11, 3, initial_std=0.5)
    envs.reset(seed=1)
    for _ in range(10):
        envs.step(envs.action_space.sample())
    statistics = normalizer.obs_rms
    mean, var, count = statistics.mean.copy(), statistics.var.copy(), statistics.count
    returns = ppo.evaluate(agent, normalizer, args, 4096)
    envs.close()

    env = gym.make("Hopper-v5")
    seed = np.random.SeedSequence([7, 4096]).generate_state(1)[0]
    observation, _ = env.reset(seed=int(seed))
    expected, ended = 0.0, False
    while not ended:
        observation = np.clip(((observation - mean) / np.sqrt(var + 1e-8)).astype(np.float32), -10, 10)
        with torch.no_grad():
            action = agent.policy(torch.as_tensor(observation[None])).numpy()[0]
        observation, reward, terminated, truncated, _ = env.step(np.clip(action, -1, 1))
        expected += reward
        ended = terminated or truncated
    env.close()
    np.testing.assert_array_equal(returns, [expected])
    assert normalizer.obs_rms is statistics
    assert (statistics.mean.tobytes(), statistics.var.tobytes(), statistics.count) == (
        mean.tobytes(),
        var.tobytes(),
        count,
    )


def test_flags_are_the_fields_of_args():
    args = ppo.parse_args(
        [
            "--env-id",
            "Ant-v5",
            "--num-envs",
            "4",
            "--vectorization",
            "async",
            "--no-normalize",
            "--learning-rate",
            "1e-4",
        ]
    )
    assert args == ppo.Args(env_id="Ant-v5", num_envs=4, vectorization="async", normalize=False, learning_rate=1e-4)
    assert ppo.parse_args([]) == ppo.Args()
    with pytest.raises(SystemExit):
        ppo.parse_args(["--vectorization", "threads"])
