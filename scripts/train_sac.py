"""Train SAC with continuous actions on a Gymnasium vector env: one file, top to bottom.

    python scripts/train_sac.py --env-id HalfCheetah-v5 --seed 1

In the manner of CleanRL's `sac_continuous_action.py` (Huang et al. 2022, JMLR 23:274). Sources of the tricks:

    [H18a] Haarnoja et al. 2018, "Soft Actor-Critic: Off-Policy Maximum Entropy Deep Reinforcement Learning with a
           Stochastic Actor", arXiv:1801.01290
    [H18b] Haarnoja et al. 2018, "Soft Actor-Critic Algorithms and Applications", arXiv:1812.05905
    [F18]  Fujimoto et al. 2018, "Addressing Function Approximation Error in Actor-Critic Methods", arXiv:1802.09477
    [P18]  Pardo et al. 2018, "Time Limits in Reinforcement Learning", arXiv:1712.00378
    [Y21]  Yarats and Kostrikov, "Soft Actor-Critic (SAC) implementation in PyTorch",
           github.com/denisyarats/pytorch_sac
    [C22]  CleanRL, docs.cleanrl.dev/rl-algorithms/sac
"""

import argparse
import contextlib
import copy
import dataclasses
import random
import time
from collections.abc import Callable
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from gymnasium.wrappers.vector import RecordEpisodeStatistics
from torch import nn
from torch.nn import functional

import simckpt

LOG_STD_RANGE = (-5.0, 2.0)  # [Y21] [C22]
REPORT_EVERY = 5_000  # distance of the lines on the screen [env steps]


def flag(default: Any, text: str, **options: Any) -> Any:
    return dataclasses.field(default=default, metadata={"help": text, **options})


@dataclasses.dataclass(frozen=True)
class Args:
    """Every field is a flag, `--like-this`."""

    env_id: str = flag("HalfCheetah-v5", "Gymnasium id of the environment; its actions are a Box")
    num_envs: int = flag(1, "parallel environments")
    vectorization: str = flag("sync", "where they run: this process or one each", choices=["sync", "async"])
    total_steps: int = flag(1_000_000, "length of the run [env steps]")
    seed: int = flag(1, "seed of the whole run")
    learning_rate: float = flag(3e-4, "Adam's step size for the policy and the temperature [H18b]")
    critic_learning_rate: float = flag(1e-3, "Adam's step size for the critics [C22]")
    eval_every: int = flag(50_000, "distance of the evaluations [env steps]; 0: none")
    eval_episodes: int = flag(10, "episodes in one evaluation")
    device: str = flag("cpu", "torch device of the networks")
    store: str = flag("experiments", "folder of the checkpoint store")
    run: str = flag("sac", "name of the run; the same command line starts it and resumes it")
    save_every: int = flag(50_000, "distance of the checkpoints [env steps]")
    background: str = flag("thread", "what writes them meanwhile", choices=["thread", "process"])
    rollback: bool = flag(False, "go back to a good checkpoint when the evaluations collapse, and change something")
    keep_last: int = flag(0, "newest checkpoints that stay; 0: all")
    buffer_size: int = flag(1_000_000, "transitions in the replay buffer, reset rows included")
    learning_starts: int = flag(5_000, "steps with random actions before the first update [env steps]")
    batch_size: int = flag(256, "transitions in one update")
    update_ratio: float = flag(1.0, "updates for each env step")
    gamma: float = flag(0.99, "discount factor")
    tau: float = flag(0.005, "how far the target networks move in one update")
    hidden: int = flag(256, "units in each of the two hidden layers")


def parse_args(argv: list[str] | None = None) -> Args:
    parser = argparse.ArgumentParser(description="SAC with continuous actions.", allow_abbrev=False)
    for field in dataclasses.fields(Args):
        how: dict[str, Any] = {"action": argparse.BooleanOptionalAction} if field.type is bool else {"type": field.type}
        parser.add_argument("--" + field.name.replace("_", "-"), default=field.default, **how, **field.metadata)
    return Args(**vars(parser.parse_args(argv)))


def make_envs(args: Args, num_envs: int, vectorization: str) -> gym.vector.VectorEnv:
    envs = simckpt.make_vec(args.env_id, num_envs=num_envs, vectorization_mode=vectorization)
    return RecordEpisodeStatistics(envs, buffer_length=20)


class TwinLinear(nn.Module):
    """Two linear layers side by side, which begin as torch's `Linear` does."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        bound = inputs**-0.5
        self.weight = nn.Parameter(torch.empty(2, inputs, outputs).uniform_(-bound, bound))
        self.bias = nn.Parameter(torch.empty(2, 1, outputs).uniform_(-bound, bound))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Returns `(2, rows, outputs)` from `(2, rows, inputs)`."""
        return torch.baddbmm(self.bias, inputs, self.weight)


class Critics(nn.Module):
    """Two independent action values in one pass; their minimum overestimates less [F18]."""

    def __init__(self, num_observations: int, num_actions: int, hidden: int) -> None:
        super().__init__()
        layers = TwinLinear(num_observations + num_actions, hidden), TwinLinear(hidden, hidden), TwinLinear(hidden, 1)
        self.layers = nn.Sequential(layers[0], nn.ReLU(), layers[1], nn.ReLU(), layers[2])

    def forward(self, observations: torch.Tensor, actions: torch.Tensor) -> torch.Tensor:
        """Returns both values of each row, `(2, rows)`."""
        return self.layers(torch.cat([observations, actions], dim=-1).expand(2, -1, -1)).squeeze(-1)


class Policy(nn.Module):
    """A Gaussian squashed by tanh into the bounds of the action space [H18a]."""

    def __init__(self, num_observations: int, space: gym.spaces.Box, hidden: int) -> None:
        super().__init__()
        layers = nn.Linear(num_observations, hidden), nn.Linear(hidden, hidden), nn.Linear(hidden, 2 * space.shape[0])
        self.layers = nn.Sequential(layers[0], nn.ReLU(), layers[1], nn.ReLU(), layers[2])
        self.register_buffer("scale", torch.as_tensor((space.high - space.low) / 2, dtype=torch.float32))
        self.register_buffer("middle", torch.as_tensor((space.high + space.low) / 2, dtype=torch.float32))

    def scaled(self, squashed: torch.Tensor) -> torch.Tensor:
        """Returns actions in the bounds of the space from numbers in [-1, 1]."""
        return squashed * self.scale + self.middle

    def mean_actions(self, observations: torch.Tensor) -> torch.Tensor:
        """Returns the actions at the Gaussian's mean, which evaluations use."""
        return self.scaled(torch.tanh(self.layers(observations).chunk(2, dim=-1)[0]))

    def forward(self, observations: torch.Tensor, noise: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns actions and their log densities, `(rows, actions)` and `(rows,)`, from standard normal noise."""
        mean, log_std = self.layers(observations).chunk(2, dim=-1)
        low, high = LOG_STD_RANGE
        log_std = low + (high - low) / 2 * (torch.tanh(log_std) + 1)  # bounded smoothly, not cut off [Y21]
        raw = mean + log_std.exp() * noise
        # the log of tanh's derivative, in a form that does not lose its digits far from 0 [Y21]
        log_slopes = 2 * (np.log(2) - raw - functional.softplus(-2 * raw)) + self.scale.log()
        log_densities = -0.5 * noise**2 - 0.5 * np.log(2 * np.pi) - log_std
        return self.scaled(torch.tanh(raw)), (log_densities - log_slopes).sum(-1)


class Agent(nn.Module):
    """The policy, its critics, their slow copies and the temperature."""

    def __init__(self, num_observations: int, space: gym.spaces.Box, hidden: int) -> None:
        super().__init__()
        self.policy = Policy(num_observations, space, hidden)
        self.critics = Critics(num_observations, space.shape[0], hidden)
        self.targets = copy.deepcopy(self.critics).requires_grad_(False)  # [H18a]
        self.log_alpha = nn.Parameter(torch.zeros(()))


def update(
    agent: Agent,
    optimizers: dict[str, torch.optim.Optimizer],
    batch: dict[str, torch.Tensor],
    noise: torch.Tensor,
    args: Args,
) -> None:
    """Improves the agent by one batch.

    Args:
        agent: everything in it changes.
        optimizers: "critics", and "policy" for the policy and the temperature.
        batch: float32; `observations`, `actions`, `next_observations` `(rows, ...)`; `rewards`, `terminated` `(rows,)`.
        noise: `(2, rows, actions)`, standard normal: for the actions after the next observations and after these.
        args: `gamma` and `tau` are used.
    """
    observations, alpha = batch["observations"], agent.log_alpha.detach().exp()
    with torch.no_grad():
        actions, log_probs = agent.policy(batch["next_observations"], noise[0])
        following = agent.targets(batch["next_observations"], actions).amin(0) - alpha * log_probs  # [H18a] [F18]
        # an episode that was cut off goes on as far as its value is concerned, one that terminated does not [P18]
        wanted = batch["rewards"] + args.gamma * (1 - batch["terminated"]) * following
    loss = (agent.critics(observations, batch["actions"]) - wanted).square().mean(1).sum()
    optimizers["critics"].zero_grad()
    loss.backward()
    optimizers["critics"].step()

    actions, log_probs = agent.policy(observations, noise[1])
    loss = (alpha * log_probs - agent.critics(observations, actions).amin(0)).mean()
    # the temperature rises while the entropy is below its target, minus one nat for each action [H18b]
    loss = loss - agent.log_alpha.exp() * (log_probs.detach().mean() - actions.shape[1])
    optimizers["policy"].zero_grad()
    loss.backward(inputs=[*agent.policy.parameters(), agent.log_alpha])  # the critics' gradients are not needed
    optimizers["policy"].step()
    with torch.no_grad():
        torch._foreach_lerp_(list(agent.targets.parameters()), list(agent.critics.parameters()), args.tau)


def to_tensors(batch: Any, device: str) -> dict[str, torch.Tensor]:
    """Returns the columns of what `ReplayBuffer.sample` returned, float32; those that are so already are not copied."""
    return {name: torch.from_numpy(column).to(device, torch.float32) for name, column in batch._asdict().items()}


def updates_due(step: int, args: Args) -> int:
    """Returns how many updates a run has made when it reaches a step: a function of the step alone."""
    return int(max(0, step - args.learning_starts) * args.update_ratio)


def evaluation_due(step: int, args: Args) -> bool:
    """Returns whether a step is the first at or after a multiple of `eval_every`."""
    return bool(step and args.eval_every) and step % args.eval_every < args.num_envs


@torch.no_grad()
def choose_actions(agent: Agent, loop: simckpt.LoopState, args: Args) -> np.ndarray:
    """Returns the actions of one vector step, `(num_envs, actions)`: random ones until the updates start [C22]."""
    shape = len(loop.observations), len(agent.policy.scale)
    if loop.step < args.learning_starts:
        return agent.policy.scaled((2 * torch.rand(shape) - 1).to(args.device)).cpu().numpy()
    observations = torch.as_tensor(loop.observations, dtype=torch.float32, device=args.device)
    return agent.policy(observations, torch.randn(shape).to(args.device))[0].cpu().numpy()


@torch.no_grad()
def evaluate(agent: Agent, args: Args, step: int, *, cut_off: Callable[[], Any]) -> np.ndarray | None:
    """Returns the true returns of `args.eval_episodes` episodes under the policy's mean actions, None if cut off.

    A pure function of the policy and (seed, step), on envs of its own. It draws from no stream that training draws
    from: cut off and redone, it changes nothing.
    """
    envs, seed = make_envs(args, args.eval_episodes, "sync"), np.random.SeedSequence([args.seed, step])
    returns, running = np.zeros(args.eval_episodes), np.ones(args.eval_episodes, dtype=bool)
    with contextlib.closing(envs):
        observations, _ = envs.reset(seed=int(seed.generate_state(1)[0]))
        while running.any():  # one episode of each env: the first ones to end would be the short ones
            if cut_off():
                return None
            inputs = torch.as_tensor(observations, dtype=torch.float32, device=args.device)
            observations, _, terminated, truncated, infos = envs.step(agent.policy.mean_actions(inputs).cpu().numpy())
            ended = running & (terminated | truncated)
            if ended.any():
                returns[ended] = infos["episode"]["r"][ended]
                running &= ~ended
    return returns


def train(args: Args) -> Agent:
    """Runs the whole training and returns the agent."""
    run = simckpt.Store(args.store).start(args.run)
    where = {"device", "vectorization", "store", "run", "background"}
    args = run.configure(args, free={"total_steps", "eval_every", "save_every", "keep_last", "rollback", *where})
    torch.set_num_threads(1)  # fastest for networks this small; and the order of sums, so the bits, depend on it
    random.seed(args.seed)
    np.random.seed(args.seed)
    torch.manual_seed(args.seed)
    envs = make_envs(args, args.num_envs, args.vectorization)
    spaces = envs.single_observation_space, envs.single_action_space
    agent = Agent(spaces[0].shape[0], spaces[1], args.hidden).to(args.device)
    optimizers = {
        "critics": torch.optim.Adam(agent.critics.parameters(), lr=args.critic_learning_rate, fused=True),
        "policy": torch.optim.Adam([*agent.policy.parameters(), agent.log_alpha], lr=args.learning_rate, fused=True),
    }
    capacity = args.buffer_size // args.num_envs
    replay = simckpt.ReplayBuffer(capacity, *spaces, num_envs=args.num_envs, seed=args.seed)
    observations, _ = envs.reset(seed=args.seed)
    dones = np.zeros(args.num_envs, dtype=bool)
    loop = simckpt.LoopState(step=0, observations=observations, dones=dones)
    state = {"envs": envs, "agent": agent, "replay": replay, "rng": simckpt.RNGStreams(), "loop": loop}
    state |= {f"optimizer_{name}": optimizer for name, optimizer in optimizers.items()}
    save_when = simckpt.EverySteps(args.save_every) | simckpt.AtSteps(args.total_steps) | simckpt.OnSignal()
    keep = simckpt.KeepLast(args.keep_last) if args.keep_last else None
    hyperparameters = simckpt.Hyperparameters(
        {"learning_rate": optimizers["policy"], "critic_learning_rate": optimizers["critics"]},
        from_args={"gamma", "tau", "batch_size", "update_ratio", "total_steps"},  # the loop below reads these
    )
    slower = simckpt.Scale(learning_rate=0.5, critic_learning_rate=0.5)
    policy = simckpt.RollbackPolicy("eval/return", changes=[simckpt.Reseed(), simckpt.Reseed() & slower])
    checkpointer = run.checkpointer(
        state,
        save_when=save_when,
        keep=keep,
        background=args.background,
        hyperparameters=hyperparameters,
        rollback=policy if args.rollback else None,
    )
    with contextlib.closing(envs), run, checkpointer:
        restored = checkpointer.restore_latest()
        evaluated = restored.step if restored and "eval/return" in restored.metrics else None
        first_step, started = loop.step, time.perf_counter()
        while True:
            metrics = {"train/return": float(np.mean(envs.return_queue))} if envs.return_queue else {}
            # before the step, by a function of its number alone: what a kill or a signal cuts off is redone
            if evaluation_due(loop.step, args) and loop.step != evaluated:
                print(f"evaluating at step={loop.step}", flush=True)
                returns = evaluate(agent, args, loop.step, cut_off=lambda: checkpointer.stop_requested)
                if returns is not None:
                    metrics["eval/return"] = returns
                    print(f"eval step={loop.step} return={returns.mean():.1f} std={returns.std():.1f}", flush=True)
                    # saved when a signal cut the evaluation off
                    if restored and restored.step == loop.step and restored.run == run.name:
                        restored.add_metrics({"eval/return": float(returns.mean())})
            checkpointer.step(loop.step, metrics)
            if loop.step >= args.total_steps:
                break

            actions = choose_actions(agent, loop, args)
            following, rewards, terminated, truncated, _ = envs.step(actions)
            # the row after an end is no transition: in gymnasium's NEXT_STEP autoreset mode it ignores its action
            replay.add(loop.observations, actions, rewards, terminated, truncated, following, valid=~loop.dones)
            loop.observations, loop.dones = following, terminated | truncated
            loop.step += args.num_envs
            for _ in range(updates_due(loop.step, args) - updates_due(loop.step - args.num_envs, args)):
                batch = to_tensors(replay.sample(args.batch_size), args.device)
                noise = torch.randn(2, *batch["actions"].shape).to(args.device)
                update(agent, optimizers, batch, noise, args)

            if loop.step // REPORT_EVERY > (loop.step - args.num_envs) // REPORT_EVERY:
                speed = (loop.step - first_step) / (time.perf_counter() - started)
                training, alpha = metrics.get("train/return", float("nan")), agent.log_alpha.exp().item()
                print(f"step={loop.step} train/return={training:.1f} alpha={alpha:.4f} steps/s={speed:.0f}", flush=True)
    print(f"complete step={loop.step}")
    return agent


if __name__ == "__main__":
    simckpt.supervise(train, parse_args())
