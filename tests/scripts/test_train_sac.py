import contextlib
import dataclasses
import importlib.util
import itertools
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import gymnasium as gym
import numpy as np
import pytest
import torch

import simckpt
from simckpt.comparison import compare
from simckpt.errors import ConfigurationError
from simckpt.storage.claims import held_claim
from simckpt.testing import assert_exact_resume

SCRIPT = Path(__file__).parents[2] / "scripts" / "train_sac.py"


def load_script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("train_sac", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up by name
    spec.loader.exec_module(module)
    return module


sac = load_script()
# the pole falls early, so that there are resets in between; the ring of 25 rows goes round several times
SMALL = sac.Args(
    env_id="InvertedPendulum-v5",
    num_envs=2,
    total_steps=240,
    save_every=20,
    eval_every=60,
    eval_episodes=1,
    buffer_size=50,
    learning_starts=30,
    batch_size=8,
    update_ratio=0.5,
    hidden=8,
)
STEPS = list(range(20, 241, 20))
OBSERVATIONS, ACTIONS, ROWS = 3, 2, 6
SPACE = gym.spaces.Box(np.array([-1, 0], dtype=np.float32), np.array([1, 4], dtype=np.float32))


@pytest.fixture(autouse=True)
def threads_as_before():
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def bits(module: torch.nn.Module) -> dict[str, bytes]:
    return {name: tensor.numpy().tobytes() for name, tensor in module.state_dict().items()}


def give_back(folder: Path) -> None:
    """Gives the claim back that a training left, which failed before its loop, as the end of a process would."""
    claim = held_claim(folder)
    if claim is not None:
        claim.release()


def train_here(args, store: Path, run: str = "run"):
    """Trains in this process, and gives the claim back as the end of a process would."""
    try:
        return sac.train(dataclasses.replace(args, store=str(store), run=run))
    finally:
        give_back(store / "runs" / run)


def random_batch(seed: int) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    batch = {
        "observations": torch.randn(ROWS, OBSERVATIONS, generator=generator),
        "actions": torch.rand(ROWS, ACTIONS, generator=generator),
        "rewards": torch.randn(ROWS, generator=generator),
        "terminated": torch.zeros(ROWS),
        "next_observations": torch.randn(ROWS, OBSERVATIONS, generator=generator),
    }
    return batch, torch.randn(2, ROWS, ACTIONS, generator=generator)


def new_agent(seed: int = 3):
    torch.manual_seed(seed)
    return sac.Agent(OBSERVATIONS, SPACE, 16)


def updated_agent(batch, noise, *, agent=None, rate: float = 1e-2, **changes):
    """Returns the agent after one step of plain gradient descent, so that a step is `rate` times the gradient."""
    agent = agent or new_agent()
    optimizers = {
        "critics": torch.optim.SGD(agent.critics.parameters(), lr=rate),
        "policy": torch.optim.SGD([*agent.policy.parameters(), agent.log_alpha], lr=rate),
    }
    sac.update(agent, optimizers, batch, noise, dataclasses.replace(SMALL, **changes))
    return agent


def test_the_log_density_is_the_one_of_a_squashed_gaussian_in_the_bounds_of_the_space() -> None:
    policy = new_agent().policy.double()
    observations = torch.randn(50, OBSERVATIONS, dtype=torch.float64)
    noise = torch.randn(50, ACTIONS, dtype=torch.float64)
    actions, log_probs = policy(observations, noise)

    mean, raw_std = policy.layers(observations).chunk(2, dim=-1)
    std = torch.exp(-5 + 3.5 * (torch.tanh(raw_std) + 1))
    middle, scale = torch.tensor([[0.0, 2.0], [1.0, 2.0]], dtype=torch.float64)
    transforms = [
        torch.distributions.TanhTransform(cache_size=1),
        torch.distributions.AffineTransform(middle, scale, cache_size=1),
    ]
    expected = torch.distributions.TransformedDistribution(torch.distributions.Normal(mean, std), transforms)
    # float64, some ten operations on numbers up to 10: in two orders of them 1e-12 is generous
    sample = transforms[1](transforms[0](mean + std * noise))
    torch.testing.assert_close(actions, sample, rtol=0, atol=1e-12)
    torch.testing.assert_close(log_probs, expected.log_prob(sample).sum(-1), rtol=0, atol=1e-12)
    assert (actions >= torch.tensor(SPACE.low)).all()
    assert (actions <= torch.tensor(SPACE.high)).all()


def test_the_critics_are_two_networks_that_know_nothing_of_each_other() -> None:
    torch.manual_seed(0)
    critics = sac.Critics(OBSERVATIONS, ACTIONS, 4)
    for parameter in critics.parameters():  # small whole numbers, so that no order of sums rounds
        parameter.data = torch.randint(-3, 4, parameter.shape).float()
    observations, actions = torch.randint(-3, 4, (5, OBSERVATIONS)).float(), torch.randint(-3, 4, (5, ACTIONS)).float()
    values = critics(observations, actions)
    assert values.shape == (2, 5)
    for which in range(2):
        hidden = torch.cat([observations, actions], dim=1)
        for layer in (critics.layers[0], critics.layers[2]):
            hidden = (hidden @ layer.weight[which] + layer.bias[which]).clamp(min=0)
        expected = hidden @ critics.layers[4].weight[which] + critics.layers[4].bias[which]
        assert torch.equal(values[which], expected.squeeze(1))


def test_nothing_after_a_terminal_state_counts_and_after_one_that_was_cut_off_it_does() -> None:
    batch, noise = random_batch(5)
    other = batch | {"next_observations": batch["next_observations"] + 1}
    assert bits(updated_agent(other, noise).critics) != bits(updated_agent(batch, noise).critics)
    ended = {"terminated": torch.ones(ROWS)}
    assert bits(updated_agent(other | ended, noise)) == bits(updated_agent(batch | ended, noise))


def test_the_critics_step_towards_reward_plus_discounted_soft_value() -> None:
    batch, noise = random_batch(6)
    batch["terminated"][:2] = 1
    agent = new_agent()
    agent.log_alpha.data = torch.tensor(-1.0)
    agent.targets.load_state_dict(sac.Critics(OBSERVATIONS, ACTIONS, 16).state_dict())  # not the critics' own
    with torch.no_grad():
        actions, log_probs = agent.policy(batch["next_observations"], noise[0])
        first, second = agent.targets(batch["next_observations"], actions)
        wanted = batch["rewards"] + 0.9 * (1 - batch["terminated"]) * (torch.min(first, second) - log_probs / np.e)
    error = agent.critics(batch["observations"], batch["actions"]) - wanted
    gradients = torch.autograd.grad((error**2).mean(1).sum(), list(agent.critics.parameters()))
    expected = [
        parameter.detach() - 1e-2 * g for parameter, g in zip(agent.critics.parameters(), gradients, strict=True)
    ]
    updated_agent(batch, noise, agent=agent, gamma=0.9)
    # e is rounded differently in the two, in float32
    for parameter, value in zip(agent.critics.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.detach(), value, rtol=1e-5, atol=1e-6)


def test_the_policy_climbs_the_lesser_value_and_its_own_entropy() -> None:
    batch, noise = random_batch(7)
    agent = new_agent()
    updated_agent(batch, noise, agent=agent, rate=0.0)  # the critics stay, and the policy's gradient is kept
    actions, log_probs = agent.policy(batch["observations"], noise[1])
    first, second = agent.critics(batch["observations"], actions)
    parameters = list(agent.policy.parameters())
    gradients = torch.autograd.grad((log_probs - torch.min(first, second)).mean(), parameters)
    for parameter, gradient in zip(parameters, gradients, strict=True):
        # the same sums, in an order that the minimum and the mean may choose
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(("raw_std", "rises"), [(-10.0, True), (10.0, False)])
def test_the_temperature_rises_while_the_policy_is_too_certain(raw_std, rises) -> None:
    agent = new_agent()
    with torch.no_grad():
        # in bounds of width 2 and 4, a deviation of e^-5 is far below the target of -2 nats, and one of e^2 squashed is
        # far from it, too: nearly all actions are at a bound. One of e^-1 is above
        agent.policy.layers[-1].weight.zero_()
        agent.policy.layers[-1].bias[ACTIONS:] = raw_std if rises else float(np.arctanh(4 / 3.5 - 1))
    updated_agent(*random_batch(8), agent=agent)
    assert (agent.log_alpha > 0) == rises


def test_the_targets_follow_the_updated_critics_by_tau() -> None:
    agent, before = new_agent(), new_agent()
    updated_agent(*random_batch(9), agent=agent, tau=0.25)
    assert bits(agent.critics) != bits(before.critics)
    for target, old, new in zip(*(x.parameters() for x in (agent.targets, before.targets, agent.critics)), strict=True):
        assert torch.equal(target, torch.lerp(old, new, 0.25))
        assert not target.requires_grad


def test_updates_are_as_many_as_the_ratio_says_however_the_steps_are_cut() -> None:
    args = dataclasses.replace(SMALL, learning_starts=10, update_ratio=0.3)
    assert [sac.updates_due(step, args) for step in (0, 10, 13, 14, 20, 110)] == [0, 0, 0, 1, 3, 30]


def test_evaluations_are_due_at_the_first_step_at_or_after_each_multiple() -> None:
    args = dataclasses.replace(SMALL, num_envs=4, eval_every=10)
    assert [step for step in range(0, 61, 4) if sac.evaluation_due(step, args)] == [12, 20, 32, 40, 52, 60]
    assert not sac.evaluation_due(20, dataclasses.replace(args, eval_every=0))


def test_reset_rows_are_marked_in_the_buffer(tmp_path) -> None:
    train_here(dataclasses.replace(SMALL, buffer_size=1000), tmp_path)
    checkpoint = simckpt.Store(tmp_path).run("run").latest()
    ended = checkpoint["replay/terminated"] | checkpoint["replay/truncated"]
    # a reset row earns nothing, every other one of this env earns 1 unless the pole fell
    assert checkpoint["replay/valid"].shape == (120, 2)
    expected = np.concatenate([np.ones((1, 2), dtype=bool), ~ended[:-1]])
    np.testing.assert_array_equal(checkpoint["replay/valid"], expected)
    assert 0 < (~expected).sum() < 60
    # the observation after a row is the one before the next, across the end of an episode too
    np.testing.assert_array_equal(checkpoint["replay/observations"][1:], checkpoint["replay/next_observations"][:-1])


def test_two_runs_are_bit_identical_and_async_equals_sync(tmp_path) -> None:
    first = bits(train_here(SMALL, tmp_path, "first"))
    assert bits(train_here(dataclasses.replace(SMALL, vectorization="async"), tmp_path, "second")) == first
    assert bits(train_here(dataclasses.replace(SMALL, seed=2), tmp_path, "third")) != first


def test_evaluation_changes_nothing(tmp_path, capsys) -> None:
    evaluated = bits(train_here(SMALL, tmp_path, "evaluated"))
    said = [line.split()[1] for line in capsys.readouterr().out.splitlines() if line.startswith("eval step=")]
    assert said == ["step=60", "step=120", "step=180", "step=240"]
    assert bits(train_here(dataclasses.replace(SMALL, eval_every=0), tmp_path, "not")) == evaluated
    saved = {
        checkpoint.step: checkpoint.metrics for checkpoint in simckpt.Store(tmp_path).run("evaluated").checkpoints()
    }
    assert [step for step in STEPS if "eval/return" in saved[step]] == [60, 120, 180, 240]


def test_evaluation_equals_an_episode_stepped_by_hand_and_can_be_cut_off() -> None:
    args = dataclasses.replace(SMALL, env_id="Hopper-v5", eval_episodes=1, seed=7)
    torch.manual_seed(0)
    env = gym.make("Hopper-v5")
    agent = sac.Agent(11, env.action_space, 8)
    returns = sac.evaluate(agent, args, 4096, cut_off=lambda: None)
    observation, _ = env.reset(seed=int(np.random.SeedSequence([7, 4096]).generate_state(1)[0]))
    expected, length, ended = 0.0, 0, False
    while not ended:
        with torch.no_grad():
            layers = agent.policy.layers(torch.as_tensor(observation[None], dtype=torch.float32))
        observation, reward, terminated, truncated, _ = env.step(torch.tanh(layers[0, :3]).numpy())
        expected, length, ended = expected + reward, length + 1, terminated or truncated
    env.close()
    np.testing.assert_array_equal(returns, [expected])

    calls = itertools.count(1)
    assert sac.evaluate(agent, args, 4096, cut_off=lambda: next(calls) == length) is None
    assert next(calls) == length + 1


# episodes of 1,000 steps each, so that an evaluation takes longer than a signal; the first one is in the warm-up
SLOW = dataclasses.replace(SMALL, env_id="HalfCheetah-v5", learning_starts=90, eval_episodes=6, eval_every=80)


@pytest.fixture
def start():
    """Starts the script; what a failed test leaves running is killed, so that it disturbs no other test."""
    with contextlib.ExitStack() as started:

        def start(store: Path, run: str) -> subprocess.Popen[str]:
            values = {**dataclasses.asdict(SLOW), "store": store, "run": run}
            assert values.pop("rollback") is False, "a flag without a value, off by default"
            flags = [part for name, value in values.items() for part in (f"--{name.replace('_', '-')}", str(value))]
            # a thread pool's size decides the order of sums: the same as in this process
            environment = {**os.environ, "OMP_NUM_THREADS": "1"}
            command = [sys.executable, str(SCRIPT), *flags]
            process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
            started.enter_context(process)
            started.callback(process.kill)
            return process

        yield start


def end_at_evaluation(process: subprocess.Popen[str], step: int, number: signal.Signals) -> int:
    """Returns the exit status of a process that got a signal when it announced an evaluation."""
    for line in process.stdout:
        if line.startswith(f"evaluating at step={step}"):
            process.send_signal(number)
    return process.wait()


@pytest.mark.slow  # 80 s; that a resume at any step is exact is shown below
def test_a_run_that_was_killed_and_asked_to_end_in_evaluations_equals_the_undisturbed_one(
    tmp_path, start, capsys
) -> None:
    assert end_at_evaluation(start(tmp_path, "run"), 80, signal.SIGKILL) == -signal.SIGKILL
    run = simckpt.Store(tmp_path).run("run")
    # the save of step 60 goes on in the background
    assert [checkpoint.step for checkpoint in run.checkpoints()] in ([20, 40], [20, 40, 60])

    # cut off and saved, without a result
    assert end_at_evaluation(start(tmp_path, "run"), 160, signal.SIGTERM) == simckpt.EXIT_REQUEUE
    assert (run.latest().step, "eval/return" in run.latest().metrics) == (160, False)

    output, _ = start(tmp_path, "run").communicate()
    assert output.splitlines()[-1] == "complete step=240"
    assert [line for line in output.splitlines() if line.startswith("evaluating")] == [
        "evaluating at step=160",
        "evaluating at step=240",
    ]
    results = [line for line in output.splitlines() if line.startswith("eval ")]
    train_here(SLOW, tmp_path, "undisturbed")
    undisturbed = capsys.readouterr().out.splitlines()
    assert results == [line for line in undisturbed if line.startswith("eval ")][1:]
    pairs = list(
        zip(*(simckpt.Store(tmp_path).run(name).checkpoints() for name in ("run", "undisturbed")), strict=True)
    )
    assert [one.step for one, _ in pairs] == [two.step for _, two in pairs] == STEPS
    differing = {
        one.step: {each.path.partition("/")[0] for each in compare(one, two).differences} for one, two in pairs
    }
    # in the history of the checkpoint that the signal asked for, the evaluation that it cut off is missing
    assert {step: names for step, names in differing.items() if names} == {160: {"checkpointer"}}
    assert [dict(one.metrics) for one, _ in pairs] == [dict(two.metrics) for _, two in pairs]


def train_in(store: simckpt.Store) -> None:
    # an evaluation, an end of an episode and the wrap-around of the ring are on both sides of the kill
    changes = {"total_steps": 28, "learning_starts": 8, "eval_every": 10, "buffer_size": 10}
    sac.train(dataclasses.replace(SMALL, store=str(store.path), **changes))


@pytest.mark.slow
def test_a_resume_at_any_step_is_exact_with_the_buffer_wrapped_around() -> None:
    report = assert_exact_resume(train_in, at_steps=[16])
    assert report.steps == tuple(range(0, 29, 2))
    assert report.uncovered == ()


def test_the_same_command_line_runs_a_branch_with_the_learning_rates_that_it_overrides(tmp_path) -> None:
    args = dataclasses.replace(SMALL, total_steps=100)
    train_here(args, tmp_path, "origin")
    origin = simckpt.Store(tmp_path).run("origin")
    origin.at(step=60).branch("twin")
    origin.at(step=60).branch("slow", {"critic_learning_rate": 1e-5})
    train_here(args, tmp_path, "twin")
    train_here(args, tmp_path, "slow")
    twin, slow = (simckpt.Store(tmp_path).run(run) for run in ("twin", "slow"))
    for step in (80, 100):
        assert compare(origin.at(step=step), twin.at(step=step)).identical
    optimizers = [slow.latest()[f"optimizer_{name}"].items for name in ("critics", "policy")]
    rates = [optimizer["param_groups"][0]["lr"] for optimizer in optimizers]
    assert rates == [1e-5, args.learning_rate]


class Fading(gym.Env):
    """Pays more from evaluation to evaluation, and nothing in the eleventh and the twelfth.

    There are one env to train in and ten for each evaluation, in the order in which they are made.
    """

    made = 0
    observation_space = gym.spaces.Box(-1, 1, (2,), np.float32)
    action_space = gym.spaces.Box(-1, 1, (1,), np.float32)

    def __init__(self) -> None:
        Fading.made += 1
        evaluation = (Fading.made + 8) // 10
        self.level = 0.0 if evaluation in (11, 12) else 15.0 * min(evaluation, 6)
        self.left = 3

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.left = 3
        return self.np_random.uniform(-1, 1, 2).astype(np.float32), {}

    def step(self, action):
        self.left -= 1
        observation = self.np_random.uniform(-1, 1, 2).astype(np.float32)
        return observation, self.level + self.np_random.normal(), self.left == 0, False, {}


def test_a_run_whose_evaluations_collapse_goes_back_and_ends_well(tmp_path) -> None:
    Fading.made = 0
    gym.register("Fading-v0", entry_point=Fading)
    try:
        args = dataclasses.replace(
            SMALL,
            env_id="Fading-v0",
            num_envs=1,
            eval_every=20,
            total_steps=320,
            eval_episodes=10,
            rollback=True,
            store=str(tmp_path),
            run="run",
        )
        simckpt.supervise(sac.train, args)
    finally:
        give_back(tmp_path / "runs/run")
        del gym.registry["Fading-v0"]
    run = simckpt.Store(tmp_path).run("run")
    (back,) = [each for each in run.checkpoints(abandoned=True) if each.kind == "rollback"]
    # decided at the second bad evaluation, at step 240, before that was saved
    assert simckpt.Store(tmp_path).checkpoint(back.rollback["abandoned"]).step == 220
    assert 120 <= back.step <= 200
    assert run.latest().step == 320
    assert run.latest().metrics["eval/return"] > 250


def test_a_complete_run_is_left_as_it_is_and_a_contradicting_flag_is_refused_by_name(tmp_path, capsys) -> None:
    train_here(SMALL, tmp_path)
    assert capsys.readouterr().out.splitlines()[-1] == "complete step=240"
    train_here(SMALL, tmp_path)
    assert capsys.readouterr().out == "complete step=240\n"
    for flags in ({"seed": 2}, {"buffer_size": 60}, {"tau": 0.1, "batch_size": 4}):
        with pytest.raises(ConfigurationError) as caught:
            train_here(dataclasses.replace(SMALL, **flags), tmp_path)
        assert set(caught.value.keys) == set(flags)

    # what may differ between two starts: a longer run, which goes on, and what stays of it
    train_here(dataclasses.replace(SMALL, total_steps=250, vectorization="async", keep_last=2), tmp_path)
    assert [checkpoint.step for checkpoint in simckpt.Store(tmp_path).run("run").checkpoints()] == [240, 250]


def test_flags_are_the_fields_of_args() -> None:
    args = sac.parse_args(
        ["--env-id", "Ant-v5", "--buffer-size", "300", "--batch-size", "64", "--learning-starts", "9"]
    )
    assert args == sac.Args(env_id="Ant-v5", buffer_size=300, batch_size=64, learning_starts=9)
    assert sac.parse_args([]) == sac.Args()
    with pytest.raises(SystemExit):
        sac.parse_args(["--vectorization", "threads"])
