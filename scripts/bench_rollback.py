"""Measures how often a RollbackPolicy is wrong and how quickly it is right, beside simple rules written by hand.

Curves of 200 evaluations are made up: their mean return stays where it is or slowly improves, and the episodes scatter
around it in a normal, skewed, heavy-tailed or two-peaked way. Printed are, for each coefficient of variation and number
of episodes per evaluation, over all these kinds and for the worst of them:

- false: the share of the curves that a rule would have rolled back, although nothing was wrong;
- found: the share of collapses to half the return, at a random evaluation from the 20th on, that a rule notices with
  the first or second evaluation after it. All returns halve; `shifted` are collapses that take half the mean off and
  leave the scatter as wide as before, which is harder to see and beyond the bar.

Then come curves whose policy itself swings from evaluation to evaluation, which no rule can tell from a fall that
lasts. The last table compares the targets: how many evaluations going back loses, and what the policy is truly worth
there, where the curve rises for 40 evaluations and levels out, or rises to the end; and falls at once, or loses a
quarter in the ten evaluations before it falls. Last come curves that stay where they are but for a single evaluation,
whose returns all fall to 4 % or to half: patience is to be longer than that.

    python scripts/bench_rollback.py
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from simckpt import RollbackPolicy
from simckpt.policies import CheckpointFacts, Evaluation, RollbackMoment
from simckpt.policies.degradation import NEWEST, spans_of

Array = NDArray[np.float64]

EVALUATIONS = 200
VARIATIONS = (0.1, 0.3, 0.5)
EPISODES = (5, 10, 20)
COLLAPSES = 4  # one in so many curves is made to collapse
EARLIEST = 20  # [evaluations] before a collapse
GLITCHES = (0.04, 0.5)  # what a single bad evaluation leaves of the return
CERTAIN = -3.8  # no t statistic above it is significant at 5e-5, whatever its degrees of freedom
MAX_FALSE, MIN_FOUND = 0.01, 0.95
POLICY = RollbackPolicy("eval/return")


# curves


def normal(rng: np.random.Generator, cv: float, shape: tuple[int, ...]) -> Array:
    return 1 + cv * rng.standard_normal(shape)


def heavy_tailed(rng: np.random.Generator, cv: float, shape: tuple[int, ...]) -> Array:
    # Student's t with 3 degrees of freedom, whose variance is 3
    return 1 + cv * rng.standard_t(3, shape) / np.sqrt(3)


def skewed(rng: np.random.Generator, cv: float, shape: tuple[int, ...]) -> Array:
    # log-normal with mean 1
    sigma = np.sqrt(np.log(1 + cv**2))
    return np.exp(sigma * rng.standard_normal(shape) - sigma**2 / 2)


def failing(rng: np.random.Generator, cv: float, shape: tuple[int, ...]) -> Array:
    # most episodes succeed, some return about nothing; 1 % of the variance is noise on top
    success = 1 / (1 + 0.99 * cv**2)
    return (rng.random(shape) < success) / success + 0.1 * cv * rng.standard_normal(shape)


def two_peaked(rng: np.random.Generator, cv: float, shape: tuple[int, ...]) -> Array:
    # half of the episodes are good, half bad; 4 % of the variance is noise on top
    return 1 + cv * (np.sqrt(0.96) * rng.choice([-1.0, 1.0], shape) + 0.2 * rng.standard_normal(shape))


SHAPES = (normal, heavy_tailed, skewed, failing, two_peaked)


def stationary(count: int) -> Array:
    return np.ones((count, EVALUATIONS))


def improving(count: int) -> Array:
    return np.tile(np.linspace(0.2, 1.0, EVALUATIONS), (count, 1))


TRENDS = (stationary, improving)


def swinging(rng: np.random.Generator, count: int, size: float, memory: float) -> Array:
    """Returns factors (count, EVALUATIONS) around 1 that a policy swings by: of this standard deviation, correlated."""
    steps = rng.standard_normal((count, EVALUATIONS))
    for place in range(1, EVALUATIONS):
        steps[:, place] = memory * steps[:, place - 1] + np.sqrt(1 - memory**2) * steps[:, place]
    return 1 + size * steps


def collapsed(returns: Array, means: Array, at: NDArray[np.int64], *, shifted: bool) -> Array:
    """Returns curves (count, evaluations, episodes) that fall to half of their mean at an evaluation each."""
    after = np.arange(returns.shape[1]) >= at[:, None]
    if shifted:
        return returns - 0.5 * (means * after)[:, :, None]
    return returns * np.where(after, 0.5, 1.0)[:, :, None]


# rules: (curves, evaluations, episodes) -> (curves, evaluations), whether it would roll back at that evaluation


def by_policy(returns: Array) -> NDArray[np.bool_]:
    alarms = np.zeros(returns.shape[:2], dtype=bool)
    for curve, place in np.argwhere(suspicious(returns)):
        alarms[curve, place] = policy_alarms(returns[curve], int(place))
    return alarms


def policy_alarms(returns: Array, place: int) -> bool:
    """Returns whether the policy rolls back at one evaluation of a curve (evaluations, episodes)."""
    history = [Evaluation(step, tuple(each)) for step, each in enumerate(returns[: place + 1].tolist())]
    moment = RollbackMoment(place, history, is_new=True, checkpoints=[CheckpointFacts("first", 0)])
    return POLICY.decide(moment).action == "roll back"


def suspicious(returns: Array) -> NDArray[np.bool_]:
    """Returns where the policy has to be asked: for all curves at once, two of the conditions that it needs all of.

    They are that the evaluations lie below all those that make the level, and a t statistic far below 0. A test holds
    this against asking the policy everywhere.
    """
    count, evaluations, episodes = returns.shape
    means = returns.mean(axis=2)
    sums = np.concatenate([np.zeros((count, 1)), np.cumsum(means, axis=1)], axis=1)
    squares = np.concatenate([np.zeros((count, 1)), np.cumsum((returns**2).mean(axis=2), axis=1)], axis=1)
    curves = np.arange(count)
    found = np.zeros((count, evaluations), dtype=bool)
    patience = POLICY.patience
    for place in range(POLICY.warm_up + patience - 1, evaluations):
        before = place + 1 - patience
        highest = means[:, before : place + 1].max(axis=1)
        mean, variance = moments(sums, squares, before, patience, curves, episodes)
        for known in (before, before - NEWEST):
            for span in spans_of(known, episodes):
                blocks = sums[:, span : known + 1] - sums[:, : known + 1 - span]
                start = np.argmax(blocks[:, :-span], axis=1) + span
                level, spread = moments(sums, squares, start, span, curves, episodes)
                lowest = means[curves[:, None], start[:, None] + np.arange(span)].min(axis=1)
                error = np.maximum(variance, spread / 2) / (patience * episodes) + spread / (span * episodes)
                with np.errstate(divide="ignore", invalid="ignore"):
                    found[:, place] |= (highest < lowest) & ((mean - level) / np.sqrt(error) < CERTAIN)
    return found


def moments(
    sums: Array, squares: Array, start: int | NDArray[np.int64], span: int, curves: NDArray[np.int64], episodes: int
) -> tuple[Array, Array]:
    """Returns mean and variance of all episodes of `span` evaluations of each curve."""
    mean = (sums[curves, start + span] - sums[curves, start]) / span
    square = (squares[curves, start + span] - squares[curves, start]) / span
    episodes *= span
    return mean, (square - mean**2) * episodes / (episodes - 1)


def half_of_best(returns: Array) -> NDArray[np.bool_]:
    means = returns.mean(axis=2)
    return means < 0.5 * np.maximum.accumulate(means, axis=1)


def twice_below_80_percent(returns: Array) -> NDArray[np.bool_]:
    means = returns.mean(axis=2)
    below = means < 0.8 * np.maximum.accumulate(means, axis=1)
    below[:, 1:] &= below[:, :-1]
    return below


def three_below_two_std(returns: Array) -> NDArray[np.bool_]:
    means = returns.mean(axis=2)
    best = np.maximum.accumulate(means, axis=1)
    alarms = np.zeros(means.shape, dtype=bool)
    for place in range(10, means.shape[1]):
        std = means[:, max(0, place - 20) : place - 2].std(axis=1, ddof=1)
        alarms[:, place] = means[:, place - 2 : place + 1].mean(axis=1) < best[:, place] - 2 * std
    return alarms


def no_best_in_20(returns: Array) -> NDArray[np.bool_]:
    means = returns.mean(axis=2)
    is_best = means >= np.maximum.accumulate(means, axis=1)
    newest = np.maximum.accumulate(np.where(is_best, np.arange(means.shape[1]), 0), axis=1)
    return np.arange(means.shape[1]) - newest >= 20


RULES: dict[str, Callable[[Array], NDArray[np.bool_]]] = {
    "RollbackPolicy": by_policy,
    "below 50 % of best": half_of_best,
    "twice below 80 %": twice_below_80_percent,
    "3 below best - 2 std": three_below_two_std,
    "no best in 20": no_best_in_20,
}


# the measurement


@dataclass(frozen=True)
class Figures:
    """Shares of one rule in one cell, over all kinds of curves, and of the worst kind."""

    false: float
    worst_false: float
    found: float
    worst_found: float
    shifted: float


def measure(rng: np.random.Generator, cv: float, episodes: int, count: int) -> dict[str, Figures]:
    """Returns the figures of each rule; `count` curves of each kind."""
    false: dict[str, list[float]] = {name: [] for name in RULES}
    found: dict[str, list[float]] = {name: [] for name in RULES}
    found_shifted: dict[str, list[float]] = {name: [] for name in RULES}
    for shape in SHAPES:
        for trend in TRENDS:
            means = trend(count)
            returns = means[:, :, None] * shape(rng, cv, (count, EVALUATIONS, episodes))
            # asking the policy about a collapse is slow, and a share near 1 needs fewer curves than one near 0
            few = max(count // COLLAPSES, 1)
            at = rng.integers(EARLIEST, EVALUATIONS - 1, few)
            falling, shifting = (
                collapsed(returns[:few], means[:few], at, shifted=shifted) for shifted in (False, True)
            )
            for name, rule in RULES.items():
                false[name].append(float(rule(returns).any(axis=1).mean()))
                found[name].append(share_found(rule, falling, at))
                found_shifted[name].append(share_found(rule, shifting, at))
    return {
        name: Figures(
            float(np.mean(false[name])),
            max(false[name]),
            float(np.mean(found[name])),
            min(found[name]),
            float(np.mean(found_shifted[name])),
        )
        for name in RULES
    }


def share_found(rule: Callable[[Array], NDArray[np.bool_]], returns: Array, at: NDArray[np.int64]) -> float:
    """Returns the share of collapses that a rule notices at the first or second evaluation, whatever it did before."""
    if rule is by_policy:
        pairs = list(zip(returns, at, strict=True))
        return float(np.mean([any(policy_alarms(each, place + after) for after in (0, 1)) for each, place in pairs]))
    marks = rule(returns)
    curves = np.arange(len(at))
    return float((marks[curves, at] | marks[curves, at + 1]).mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--curves", type=int, default=1000, help="of each shape and trend")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    began = time.perf_counter()
    kinds = f"{len(SHAPES)} shapes, stationary and improving"
    print(f"{POLICY!r}: {args.curves:,} curves each of {kinds}; {EVALUATIONS} evaluations")
    print(f"{'cv':>4} {'n':>3}  {'rule':<22}{'false':>7} {'worst':>7}   {'found':>6} {'worst':>7} {'shifted':>8}")
    rng = np.random.default_rng(args.seed)
    verdicts = []
    for cv in VARIATIONS:
        for episodes in EPISODES:
            figures = measure(rng, cv, episodes, args.curves)
            barred = (episodes >= 10 and cv <= 0.3) or (episodes == 20 and cv == 0.5)
            for name, each in figures.items():
                cell = f"{cv:>4} {episodes:>3}" if name == "RollbackPolicy" else " " * 8
                verdict = ""
                if name == "RollbackPolicy" and barred:
                    passed = each.worst_false <= MAX_FALSE and each.worst_found >= MIN_FOUND
                    verdict = "  PASS" if passed else "  MISS"
                    verdicts.append(passed)
                shares = f"{each.false:>7.2%} {each.worst_false:>7.2%}   {each.found:>6.1%} {each.worst_found:>7.1%}"
                print(f"{cell}  {name:<22}{shares} {each.shifted:>8.1%}{verdict}", flush=True)
    print(
        f"bar: at most {MAX_FALSE:.0%} false and at least {MIN_FOUND:.0%} found, of the worst kind, where marked: ",
        end="",
    )
    print(f"{sum(verdicts)} of {len(verdicts)} cells pass")
    print_swings(rng, args.curves // 2)
    print_targets(rng, args.curves // 10)
    print_glitches(rng, args.curves)
    print(f"{time.perf_counter() - began:.0f} s")


def print_swings(rng: np.random.Generator, count: int) -> None:
    """Prints the share of curves that each rule rolls back where the policy swings, cv 0.3 and 10 episodes."""
    print("\nrolled back where the policy itself swings (10 episodes, cv 0.3, normal):")
    print(f"{'swing, correlation':<24}" + "".join(f"{name:>22}" for name in RULES))
    for trend in TRENDS:
        for size, memory in ((0.05, 0.0), (0.1, 0.0), (0.1, 0.7), (0.2, 0.7)):
            means = trend(count) * swinging(rng, count, size, memory)
            returns = means[:, :, None] * normal(rng, 0.3, (count, EVALUATIONS, 10))
            shares = [float(rule(returns).any(axis=1).mean()) for rule in RULES.values()]
            label = f"{trend.__name__} {size}, {memory}"
            print(f"{label:<24}" + "".join(f"{share:>22.1%}" for share in shares), flush=True)


def print_targets(rng: np.random.Generator, count: int) -> None:
    """Prints what each target of a policy loses, where 160 evaluations end in a collapse; cv 0.3 and 10 episodes."""
    print("\ngoing back to (10 episodes, cv 0.3, normal; the most that the policy was worth is 1):")
    print(f"{'curve':<24}" + "".join(f"{name + ': lost':>14}{'worth':>8}" for name in ("best", "last")))
    for name, rising in (
        ("levels out", np.minimum(np.arange(1, 161) / 40, 1.0)),
        ("improving", np.linspace(0.2, 1, 160)),
    ):
        for slide in (0, 10):
            worth = rising * np.concatenate([np.ones(160 - slide), np.linspace(1, 0.75, slide)])
            means = np.concatenate([worth, 0.5 * worth[-1:], 0.5 * worth[-1:]])
            chosen: dict[str, list[int]] = {"best": [], "last": []}
            for returns in means[:, None] * normal(rng, 0.3, (count, len(means), 10)):
                history = [Evaluation(step, tuple(each)) for step, each in enumerate(returns.tolist())]
                checkpoints = [CheckpointFacts(str(each.step), each.step) for each in history]
                moment = RollbackMoment(len(means), history, is_new=True, checkpoints=checkpoints)
                for target, places in chosen.items():
                    decision = RollbackPolicy("eval/return", target=target).decide(moment)
                    places += [int(decision.target)] if decision.target is not None else []
            shares = [f"{159 - np.median(each):>14.0f}{worth[each].mean():>8.2f}" for each in chosen.values()]
            print(f"{name + (', slow fall' if slide else ', sudden fall'):<24}" + "".join(shares), flush=True)


def print_glitches(rng: np.random.Generator, count: int) -> None:
    """Prints the share of curves that the policy rolls back for a single evaluation that has fallen; normal."""
    print("\nrolled back for a single bad evaluation, which all windows of the policy's patience hold once:")
    print(f"{'cv':>4} {'n':>3}" + "".join(f"{f'fallen to {left:.0%}':>16}" for left in GLITCHES))
    for cv in VARIATIONS:
        for episodes in EPISODES:
            shares = []
            for left in GLITCHES:
                returns = normal(rng, cv, (count, EVALUATIONS, episodes))
                at = rng.integers(EARLIEST, EVALUATIONS - POLICY.patience + 1, count)
                returns[np.arange(count), at] *= left
                shares.append(share_within(returns, at))
            print(f"{cv:>4} {episodes:>3}" + "".join(f"{share:>16.2%}" for share in shares), flush=True)


def share_within(returns: Array, at: NDArray[np.int64]) -> float:
    """Returns the share of curves that the policy rolls back while one evaluation of theirs is under test."""
    pairs = zip(returns, at, strict=True)
    return float(
        np.mean([any(policy_alarms(each, place + after) for after in range(POLICY.patience)) for each, place in pairs])
    )


if __name__ == "__main__":
    main()
