"""Has the return fallen? The statistics of a rollback: the level that was reached, and a test against it.

The best of many noisy evaluations is high by luck, and the more evaluations, the higher: compared with it, training
always looks worse. So the best ones only choose; the level is the mean of those that follow, which were not chosen.
That is done for 1, 2, 4, 8 and 16 evaluations at a time, for one tells a high plateau early, and many tell it exactly.
Each such level is tested against, and the significance shared among them.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from simckpt.errors import ConfigurationError

SPANS = (1, 2, 4, 8, 16)  # [evaluations] that make a level
LEAST_EPISODES = 16  # of a level: the far tail of a test means nothing with fewer; the longest span may have fewer
FEW_EPISODES = 10  # under test; fewer say too little about their own variance
# of the best evaluation under test by itself, as a power of the significance: 5e-5 becomes 0.02; with 0.5 collapses of
# the worst kind are found less often, by 1 %, and with 0.3 three times as many single bad evaluations pass for one
ALONE = 0.4
LAGS = (1, 4)  # [evaluations] over which falls are looked at
USUAL = 0.1  # one in ten is deeper than the usual fall
NEWEST = 8  # [evaluations] before those under test in which the fall may have begun
SWING = 1.5  # how many times deeper than that a fall must be; with a normal error of std s it is 1.8 s, and this 2.7 s
TESTS = ("welch", "mann-whitney")

Returns = Sequence[Sequence[float]]
Array = NDArray[np.float64]


@dataclass(frozen=True)
class Degradation:
    """What a test found.

    Attributes:
        level: the return that was reached, as confirmed by fresh episodes.
        recent: mean return of each evaluation under test, oldest first.
        p_value: the chance of such a fall, or a deeper one, where there is none, times the number of tests made.
    """

    level: float
    recent: tuple[float, ...]
    p_value: float


def degradation(
    returns: Returns, *, patience: int, min_effect: float, significance: float, test: str
) -> Degradation | None:
    """Returns how far the newest evaluations lie below the level reached before; None if they do not.

    All must hold: each of the newest `patience` evaluations lies below every evaluation that makes the level, and below
    the level by `least_fall` or more; the test on all their episodes finds them lower; and so does the test on the
    episodes of the best of them alone, with the significance to the power of `ALONE`. One very bad evaluation makes the
    former test certain by itself, whatever the others are.

    Args:
        returns: of the episodes of each evaluation, oldest first; higher is better; all finite.
        patience: how many evaluations are under test.
        min_effect: see `least_fall`.
        significance: the chance of finding a fall where there is none, of all levels together.
        test: "welch" or "mann-whitney".
    """
    means = np.array([np.mean(each) for each in returns])
    before, recent = means[:-patience], means[-patience:]
    best, newest = returns[len(before) + int(recent.argmax())], _pooled(returns[-patience:])
    candidates = levels(before, len(returns[-1]))
    for start, span in candidates:
        fresh = before[start : start + span]
        level, highest = float(fresh.mean()), float(recent.max())
        if highest >= fresh.min():
            continue
        swing = usual_fall(before[: max(start + span, len(before) - NEWEST)])
        if level - highest < least_fall(level, float(means[0]), swing, min_effect):
            continue
        reference = _pooled(returns[start : start + span])
        p_value = _p_value(newest, reference, test) * len(candidates)
        if p_value > significance:
            continue
        if _p_value(_pooled([best]), reference, test) * len(candidates) <= significance**ALONE:
            return Degradation(level, tuple(recent.tolist()), p_value)
    return None


def levels(means: Array, episodes: int) -> list[tuple[int, int]]:
    """Returns (start, span) of the evaluations that make a level, one for each span, or two.

    A second one where the newest evaluations change it: they may be part of the fall already, if it was not found at
    once, and what follows the best is then no plateau.

    Args:
        means: of the evaluations before those under test.
        episodes: of an evaluation.
    """
    found = [
        (confirmed(known, span), span) for known in (means, means[:-NEWEST]) for span in spans_of(len(known), episodes)
    ]
    return list(dict.fromkeys(found))


def spans_of(evaluations: int, episodes: int) -> list[int]:
    """Returns the spans that so many evaluations of so many episodes before those under test allow, shortest first."""
    enough = [span for span in SPANS if span * episodes >= LEAST_EPISODES] or [SPANS[-1]]
    return [span for span in enough if 2 * span <= evaluations]


def confirmed(means: Array, span: int) -> int:
    """Returns where the `span` evaluations begin that follow the best `span` ones; needs twice as many."""
    sums = np.concatenate([[0.0], np.cumsum(means)])
    return int(np.argmax(sums[span:-span] - sums[: -2 * span])) + span


def usual_fall(means: Array) -> float:
    """Returns how deep falls from one evaluation to another are that mean nothing: one in ten is deeper; at least 0.

    Covers the noise of the episodes, and what a policy in training swings by itself.

    Args:
        means: of the evaluations up to the level, and of those after it but the newest: a fall that was not tested at
            once, in a cool-down or because one evaluation was good by luck, would pass for a swing from then on.
    """
    falls = [means[:-lag] - means[lag:] for lag in LAGS if len(means) > lag + 1]
    return max([0.0, *(float(np.quantile(each, 1 - USUAL)) for each in falls)])


def least_fall(level: float, first: float, swing: float, min_effect: float) -> float:
    """Returns how deep a fall must be at least.

    Args:
        level: that was reached.
        first: mean of the first evaluation.
        swing: see `usual_fall`.
        min_effect: a fraction of what was gained, level minus first, which negative returns have, too.
    """
    return max(min_effect * (level - first), SWING * swing)


def _pooled(returns: Returns) -> Array:
    return np.concatenate([np.asarray(each, dtype=np.float64) for each in returns])


def _p_value(recent: Array, reference: Array, test: str) -> float:
    stats = _scipy_stats()
    if np.ptp(recent) == 0 and np.ptp(reference) == 0:
        return 0.0 if recent[0] < reference[0] else 1.0
    if test == "mann-whitney":
        return float(stats.mannwhitneyu(recent, reference, alternative="less").pvalue)
    few = len(recent) < FEW_EPISODES
    variance = float(np.var(recent, ddof=1)) if len(recent) > 1 else 0.0
    # few episodes of a skewed or two-peaked kind may all be alike, which looks like certainty: their variance counts as
    # half of the level's at least
    variance = variance if few else max(variance, 0.5 * float(np.var(reference, ddof=1)))
    result = stats.ttest_ind_from_stats(
        np.mean(recent),
        np.sqrt(variance),
        len(recent),
        np.mean(reference),
        np.std(reference, ddof=1),
        len(reference),
        equal_var=few,
        alternative="less",
    )
    return float(result.pvalue)


def check_scipy() -> None:
    """Checks that what the tests need is installed, without the second that its import takes; raises as a test does."""
    if importlib.util.find_spec("scipy") is None:
        _scipy_stats()


def _scipy_stats() -> Any:
    try:
        from scipy import stats
    except ImportError as error:
        message = 'a RollbackPolicy tests by scipy, which is not installed: pip install "simckpt[rollback]"'
        raise ConfigurationError(message) from error
    return stats
