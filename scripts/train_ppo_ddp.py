"""Train PPO with continuous actions on several ranks, each with vector envs of its own: one file, top to bottom.

    torchrun --standalone --nproc-per-node 2 -- scripts/train_ppo_ddp.py --env-id Hopper-v5 --seed 1

The same command resumes, also on another number of ranks: `--num-envs` counts those of all ranks together. With
`--max-restarts 3` torchrun resumes by itself when a rank dies; with gloo, set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 for
that. SIGTERM ends all ranks with one checkpoint. Evaluations are rank 0's. This is `train_ppo.py` with what several
ranks need, which `diff` shows, in the manner of CleanRL's `ppo_atari_multigpu.py` (Huang et al. 2022, JMLR 23:274).
Sources of the tricks:

    [S17]  Schulman et al. 2017, "Proximal Policy Optimization Algorithms", arXiv:1707.06347
    [S16]  Schulman et al. 2016, "High-Dimensional Continuous Control Using Generalized Advantage Estimation",
           arXiv:1506.02438
    [E20]  Engstrom et al. 2020, "Implementation Matters in Deep Policy Gradients", arXiv:2005.12729
    [A21]  Andrychowicz et al. 2021, "What Matters In On-Policy Reinforcement Learning?", arXiv:2006.05990
    [P18]  Pardo et al. 2018, "Time Limits in Reinforcement Learning", arXiv:1712.00378
    [H22]  Huang et al. 2022, "The 37 Implementation Details of Proximal Policy Optimization", ICLR blog track
    [D17]  Dhariwal et al. 2017, OpenAI Baselines, `common/mpi_running_mean_std.py`, `common/mpi_adam.py`
    [L20]  Li et al. 2020, "PyTorch Distributed: Experiences on Accelerating Data Parallel Training", arXiv:2006.15704
    [C79]  Chan, Golub and LeVeque 1979, "Updating Formulae and a Pairwise Algorithm for Computing Sample Variances"
"""

import argparse
import contextlib
import copy
import dataclasses
import os
import random
import time
from datetime import timedelta
from typing import Any

import gymnasium as gym
import numpy as np
import torch
import torch.distributed as dist
from gymnasium.wrappers import vector as wrappers
from torch import nn

import simckpt


def flag(default: Any, text: str, **options: Any) -> Any:
    return dataclasses.field(default=default, metadata={"help": text, **options})


@dataclasses.dataclass(frozen=True)
class Args:
    """Every field is a flag, `--like-this`."""

    env_id: str = flag("Hopper-v5", "Gymnasium id of the environment; its actions are a Box")
    num_envs: int = flag(16, "parallel environments, on all ranks together")
    vectorization: str = flag("sync", "where they run: this process or one each", choices=["sync", "async"])
    total_steps: int = flag(1_000_000, "length of the run [env steps of all ranks]")
    rollout_steps: int = flag(128, "vector steps between two updates")
    seed: int = flag(1, "seed of the whole run")
    learning_rate: float = flag(3e-4, "Adam's step size at the start")
    anneal: bool = flag(True, "lower the step size to 0 over the length of the run")
    normalize: bool = flag(True, "normalise observations and rewards by their running moments")
    eval_every: int = flag(50_000, "distance of the evaluations [env steps]; 0: none")
    eval_episodes: int = flag(10, "episodes in one evaluation")
    device: str = flag("cpu", "where the networks are; cuda: a GPU for each rank", choices=["cpu", "cuda"])
    timeout: float = flag(600.0, "how long ranks wait for one, as for rank 0's evaluations, until they give up [s]")
    store: str = flag("experiments", "folder of the checkpoint store")
    run: str = flag("ppo-ddp", "name of the run; the same command line starts it and resumes it")
    save_every: int = flag(50_000, "distance of the checkpoints [env steps]")
    rollback: bool = flag(False, "go back to a good checkpoint, with half the step size, when the evaluations collapse")
    epochs: int = flag(10, "passes over a rollout in one update")
    minibatches: int = flag(16, "minibatches in one pass, of each rank over its own rows")
    gamma: float = flag(0.99, "discount factor")
    gae_lambda: float = flag(0.95, "lambda of the generalised advantage estimate")
    clip: float = flag(0.2, "clipping range of the probability ratio")
    value_weight: float = flag(0.5, "weight of the value loss")
    entropy_weight: float = flag(0.0, "weight of the entropy bonus")
    max_grad_norm: float = flag(0.5, "largest norm of a gradient")
    initial_std: float = flag(1.0, "standard deviation of the first actions [H22]")


def parse_args(argv: list[str] | None = None) -> Args:
    parser = argparse.ArgumentParser(description="PPO on several ranks.", allow_abbrev=False)
    for field in dataclasses.fields(Args):
        how: dict[str, Any] = {"action": argparse.BooleanOptionalAction} if field.type is bool else {"type": field.type}
        parser.add_argument("--" + field.name.replace("_", "-"), default=field.default, **how, **field.metadata)
    return Args(**vars(parser.parse_args(argv)))


def clip_to_ten(values: np.ndarray) -> np.ndarray:
    return np.clip(values, -10.0, 10.0)


def make_envs(args: Args, num_envs: int, vectorization: str) -> tuple[gym.vector.VectorEnv, list[Any]]:
    """Makes the vector env and returns it with its normalisers: of observations and of rewards, or none."""
    envs = simckpt.make_vec(args.env_id, num_envs=num_envs, vectorization_mode=vectorization)
    envs = wrappers.RecordEpisodeStatistics(envs)  # inside the normalisers: it counts the true rewards
    if not args.normalize:
        return envs, []
    envs = of_observations = wrappers.NormalizeObservation(envs)  # [E20] [A21]
    envs = wrappers.TransformObservation(envs, clip_to_ten)  # [E20]
    # leaves reset rows out of its moments
    envs = of_rewards = wrappers.NormalizeReward(envs, gamma=args.gamma)  # [E20]
    return wrappers.TransformReward(envs, clip_to_ten), [of_observations, of_rewards]  # [E20]


def gather(values: np.ndarray, device: str) -> np.ndarray:
    """Returns the values of all ranks, `(ranks, *shape)`, in their order; all ranks call it together."""
    mine = torch.as_tensor(values, device=device)
    found = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(found, mine)
    return torch.stack(found).cpu().numpy()


def moments_of(normalizers: list[Any]) -> list[Any]:
    """Returns the running moments of normalisers, each a `RunningMeanStd` of Gymnasium's."""
    return [each.obs_rms if hasattr(each, "obs_rms") else each.return_rms for each in normalizers]


def share_moments(moments: list[Any], before: list[Any], device: str) -> None:
    """Makes running moments the same on all ranks [D17]: what they were before, and what each rank has added since.

    Args:
        moments: of this rank, changed in place.
        before: copies of them, which were the same on all ranks.
        device: that the ranks exchange on.
    """
    for new, old in zip(moments, before, strict=True):
        # the moments of what was added, by the rule by which it was added [C79]
        count = new.count - old.count
        mean = (new.mean * new.count - old.mean * old.count) / max(count, 1.0)
        squares = new.var * new.count - old.var * old.count - (mean - old.mean) ** 2 * old.count * count / new.count
        variance = np.maximum(squares, 0.0) / max(count, 1.0)
        added = gather(np.stack([mean, variance, np.full_like(mean, count)]), device)
        new.mean, new.var, new.count = old.mean, old.var, old.count
        for its_mean, its_variance, its_count in added:
            new.update_from_moments(its_mean, its_variance, its_count.max())


def network(num_inputs: int, num_outputs: int, last_gain: float) -> nn.Sequential:
    layers: list[nn.Module] = []
    for inputs, outputs, gain in ((num_inputs, 64, 2**0.5), (64, 64, 2**0.5), (64, num_outputs, last_gain)):
        linear = nn.Linear(inputs, outputs)
        nn.init.orthogonal_(linear.weight, gain)  # orthogonal weights and zero biases [E20] [H22]
        nn.init.zeros_(linear.bias)
        layers += [linear, nn.Tanh()]
    return nn.Sequential(*layers[:-1])


class Agent(nn.Module):
    """A Gaussian policy whose deviations are free parameters [S17], and a value network apart from it [A21]."""

    def __init__(self, num_observations: int, num_actions: int, initial_std: float) -> None:
        super().__init__()
        self.policy = network(num_observations, num_actions, last_gain=0.01)  # first actions centred near 0 [A21]
        self.value = network(num_observations, 1, last_gain=1.0)
        self.log_std = nn.Parameter(torch.full((num_actions,), float(np.log(initial_std))))

    def log_prob(self, observations: torch.Tensor, actions: torch.Tensor) -> torch.Tensor:
        """Returns the log density of the actions, `(rows,)`."""
        distances = (actions - self.policy(observations)) / self.log_std.exp()
        return (-0.5 * distances**2 - self.log_std - 0.5 * np.log(2 * np.pi)).sum(-1)

    def entropy(self) -> torch.Tensor:
        """Returns the entropy of the action, a scalar: it is the same for all observations."""
        return (self.log_std + 0.5 * np.log(2 * np.pi * np.e)).sum()

    def forward(self, observations: torch.Tensor, actions: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Returns log densities and values, `(rows,)`, and the entropy: all that a loss needs, in one call for DDP."""
        return self.log_prob(observations, actions), self.value(observations).squeeze(-1), self.entropy()


def data_parallel(agent: Agent, device: str) -> nn.Module:
    """Returns the agent wrapped so that each backward pass averages the gradients of all ranks [L20].

    DDP packs the gradients anew after its first pass, in the order in which they came; and from three ranks on it
    depends on where a number is packed in which order it is summed. A resumed run must do as one that goes on does, so
    it is past that before training begins.
    """
    parallel = nn.parallel.DistributedDataParallel(agent)
    observations = torch.zeros(1, agent.policy[0].in_features, device=device)
    actions = torch.zeros(1, len(agent.log_std), device=device)
    sum(output.sum() for output in parallel(observations, actions)).backward()
    parallel.zero_grad()
    return parallel


def reset_rows(dones: np.ndarray, previous_dones: np.ndarray) -> np.ndarray:
    """Returns which rows of a rollout are no transitions: those that follow the end of an episode.

    In gymnasium's NEXT_STEP autoreset mode the step after a done ignores its action, rewards 0 and returns the first
    observation of the next episode.

    Args:
        dones: `(steps, num_envs)` bool, whether an episode ended in the row.
        previous_dones: `(num_envs,)` bool, the same of the row before the first one.
    """
    return np.concatenate([previous_dones[None], dones[:-1]])


def advantages(
    rollout: dict[str, np.ndarray], values: np.ndarray, resets: np.ndarray, *, gamma: float, gae_lambda: float
) -> np.ndarray:
    """Returns the generalised advantage estimates [S16], `(steps, num_envs)`, with 0 in the reset rows.

    A terminated episode is worth nothing after its end; one that was cut off is worth the value of its final
    observation [P18]. NEXT_STEP mode hands that out as the observation of the reset row, so it is `values` one row on.

    Args:
        rollout: `rewards`, `terminated` and `dones` (terminated or truncated), each `(steps, num_envs)`.
        values: `(steps + 1, num_envs)`, of the observation before each row, and of the one after the last row.
        resets: `(steps, num_envs)` bool, from `reset_rows`. What the rollout holds in these rows is not used.
        gamma: Discount factor.
        gae_lambda: 0 trusts the values, 1 the rewards.
    """
    rewards, terminated, dones = rollout["rewards"], rollout["terminated"], rollout["dones"]
    estimates, following = np.zeros_like(rewards), np.zeros_like(rewards[0])
    for row in reversed(range(len(rewards))):
        after = np.where(terminated[row], 0.0, gamma * values[row + 1])
        later = np.where(dones[row], 0.0, gamma * gae_lambda * following)
        estimates[row] = following = np.where(resets[row], 0.0, rewards[row] + after - values[row] + later)
    return estimates


def update(
    parallel: nn.Module, agent: Agent, optimizer: torch.optim.Optimizer, rollout: dict[str, np.ndarray], args: Args
) -> None:
    """Improves the agent by one rollout; its reset rows take no part. The value loss is not clipped [A21].

    Each rank goes through rows of its own, in as many minibatches as the others. The gradient is the mean of the ranks'
    [D17], to which all have the same weight, also one that leaves out more reset rows.
    """
    resets = reset_rows(rollout["dones"], rollout["previous_dones"])
    kept = torch.as_tensor(~resets, device=args.device)
    observations = torch.as_tensor(rollout["observations"], device=args.device)  # one row more than there are actions
    actions = torch.as_tensor(rollout["actions"], device=args.device)[kept]
    with torch.no_grad():
        values = agent.value(observations).squeeze(-1)
        observations = observations[:-1][kept]
        old_log_probs = agent.log_prob(observations, actions)
    estimates = advantages(rollout, values.cpu().numpy(), resets, gamma=args.gamma, gae_lambda=args.gae_lambda)
    gains = torch.as_tensor(estimates, device=args.device)[kept]
    returns = gains + values[:-1][kept]
    for _ in range(args.epochs):
        for rows in torch.randperm(len(actions)).to(args.device).tensor_split(args.minibatches):
            log_probs, estimated, entropy = parallel(observations[rows], actions[rows])
            ratios = (log_probs - old_log_probs[rows]).exp()
            scaled = (gains[rows] - gains[rows].mean()) / (gains[rows].std(correction=0) + 1e-8)  # [E20] [H22]
            clipped = ratios.clamp(1 - args.clip, 1 + args.clip)
            policy_loss = -torch.min(scaled * ratios, scaled * clipped).mean()  # [S17]
            value_loss = 0.5 * (estimated - returns[rows]).square().mean()
            loss = policy_loss + args.value_weight * value_loss - args.entropy_weight * entropy
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(agent.parameters(), args.max_grad_norm)  # [E20]
            optimizer.step()


@torch.no_grad()
def mean_actions(agent: Agent, observations: np.ndarray, device: str) -> torch.Tensor:
    return agent.policy(torch.as_tensor(observations, dtype=torch.float32, device=device)).cpu()


def evaluate(agent: Agent, normalizers: list[Any], args: Args, step: int) -> np.ndarray:
    """Returns the true returns of `args.eval_episodes` episodes under the policy's mean actions.

    A pure function of the policy, the normalisers and (seed, step), on envs of its own. It draws from no stream that
    training draws from: cut off and redone, it changes nothing.
    """
    envs, frozen = make_envs(args, args.eval_episodes, "sync")
    if frozen:
        frozen[0].obs_rms, frozen[0].update_running_mean = copy.deepcopy(normalizers[0].obs_rms), False
    space, seed = envs.single_action_space, np.random.SeedSequence([args.seed, step]).generate_state(1)[0]
    returns, running = np.zeros(args.eval_episodes), np.ones(args.eval_episodes, dtype=bool)
    with contextlib.closing(envs):
        observations, _ = envs.reset(seed=int(seed))
        while running.any():  # one episode of each env: the first ones to end would be the short ones
            actions = mean_actions(agent, observations, args.device).numpy()
            observations, _, terminated, truncated, infos = envs.step(np.clip(actions, space.low, space.high))
            ended = running & (terminated | truncated)
            if ended.any():
                returns[ended] = infos["episode"]["r"][ended]
                running &= ~ended
    return returns


def train(args: Args) -> Agent:
    """Runs the whole training and returns the agent; all ranks call it."""
    run = simckpt.Store(args.store).start(args.run)
    free = {"total_steps", "device", "vectorization", "eval_every", "save_every", "store", "run", "rollback", "timeout"}
    args = run.configure(args, free=free)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    num_envs, remainder = divmod(args.num_envs, ranks)  # of this rank
    if remainder:
        raise SystemExit(f"--num-envs {args.num_envs} cannot be divided among {ranks} ranks")
    torch.set_num_threads(1)  # fastest for networks this small; and the order of sums, so the bits, depend on it
    torch.manual_seed(args.seed)  # the same parameters on all ranks
    envs, normalizers = make_envs(args, num_envs, args.vectorization)
    space = envs.single_action_space
    agent = Agent(envs.single_observation_space.shape[0], space.shape[0], args.initial_std).to(args.device)
    optimizer = torch.optim.Adam(agent.parameters(), lr=args.learning_rate, eps=1e-5, fused=True)  # eps [H22]
    parallel = data_parallel(agent, args.device)
    own_seed = int(np.random.SeedSequence([args.seed, rank]).generate_state(1)[0])
    random.seed(own_seed)
    np.random.seed(own_seed)
    torch.manual_seed(own_seed)  # what is drawn from here on is this rank's own
    before = copy.deepcopy(moments_of(normalizers))
    observations, _ = envs.reset(seed=args.seed + rank * num_envs)  # the seeds of as many envs on one rank
    share_moments(moments_of(normalizers), before, args.device)
    loop = simckpt.LoopState(step=0, observations=observations, dones=np.zeros(num_envs, dtype=bool))
    state = {"envs": envs, "agent": agent, "optimizer": optimizer, "rng": simckpt.RNGStreams(), "loop": loop}
    save_when = simckpt.EverySteps(args.save_every) | simckpt.AtSteps(args.total_steps) | simckpt.OnSignal()
    below = {"learning_rate", "total_steps", "epochs", "minibatches", "clip", "gae_lambda", "entropy_weight"}
    hyperparameters = simckpt.Hyperparameters(from_args=below)
    policy = simckpt.RollbackPolicy("eval/return", changes=simckpt.Scale(learning_rate=0.5)) if args.rollback else None
    checkpointer = run.checkpointer(
        state, save_when=save_when, hyperparameters=hyperparameters, rollback=policy, timeout=args.timeout
    )
    batch = args.num_envs * args.rollout_steps  # [env steps] of one iteration of all ranks, reset rows included
    with contextlib.closing(envs), run, checkpointer:
        checkpointer.restore_latest()
        first_step, started = loop.step, time.perf_counter()
        while loop.step < args.total_steps:
            # annealed [E20], by a function of the step alone: there is no scheduler to keep
            left = 1 - loop.step / args.total_steps if args.anneal else 1.0
            optimizer.param_groups[0]["lr"] = args.learning_rate * left

            std = agent.log_std.detach().exp().cpu()
            rows, previous_dones, episode_returns = [], loop.dones, []
            before = copy.deepcopy(moments_of(normalizers))
            for _ in range(args.rollout_steps):
                row = {"observations": loop.observations.astype(np.float32)}
                mean = mean_actions(agent, loop.observations, args.device)
                row["actions"] = (mean + std * torch.randn(mean.shape)).numpy()
                clipped = np.clip(row["actions"], space.low, space.high)  # for the env alone [H22]
                loop.observations, rewards, terminated, truncated, infos = envs.step(clipped)
                loop.dones = terminated | truncated
                rows.append(row | {"rewards": rewards, "terminated": terminated, "dones": loop.dones})
                if "episode" in infos:
                    episode_returns.extend(infos["episode"]["r"][loop.dones])
            share_moments(moments_of(normalizers), before, args.device)
            rollout = {name: np.stack([row[name] for row in rows]) for name in rows[0]}
            rollout["rewards"] = rollout["rewards"].astype(np.float32)
            last = loop.observations[None].astype(np.float32)
            rollout["observations"] = np.concatenate([rollout["observations"], last])
            update(parallel, agent, optimizer, rollout | {"previous_dones": previous_dones}, args)
            loop.step += batch

            metrics: dict[str, Any] = {}
            if rank == 0 and args.eval_every and loop.step // args.eval_every > (loop.step - batch) // args.eval_every:
                print(f"evaluating at step={loop.step}", flush=True)
                returns = evaluate(agent, normalizers, args, loop.step)
                metrics["eval/return"] = returns
                print(f"eval step={loop.step} return={returns.mean():.1f} std={returns.std():.1f}", flush=True)
            # the others wait for an evaluation here, in a collective of training's own
            total, count = gather(np.array([sum(episode_returns), len(episode_returns)], float), args.device).sum(0)
            if count:
                metrics["train/return"] = total / count
            checkpointer.step(loop.step, metrics)
            if rank == 0 and loop.step // batch % 10 == 0:
                speed = (loop.step - first_step) / (time.perf_counter() - started)
                training = metrics.get("train/return", float("nan"))
                print(f"step={loop.step} train/return={training:.1f} steps/s={speed:.0f}", flush=True)
    if rank == 0:
        print(f"complete step={loop.step}")
    return agent


def main() -> None:
    args = parse_args()
    if args.device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    backend = {"cpu": "gloo", "cuda": "nccl"}[args.device]
    dist.init_process_group(backend, timeout=timedelta(seconds=args.timeout))
    try:
        simckpt.supervise(train, args)
    except SystemExit:
        dist.destroy_process_group()  # after a signal all ranks end here together, with one checkpoint
        raise
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
