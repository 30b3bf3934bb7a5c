import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from scipy import stats

from simckpt.errors import ConfigurationError
from simckpt.policies.degradation import SPANS, confirmed, degradation, least_fall, spans_of, usual_fall

STRICT = {"patience": 2, "min_effect": 0.25, "significance": 5e-5, "test": "welch"}


def curve(*levels: float, episodes: int = 10, noise: float = 5.0, seed: int = 0) -> list[list[float]]:
    """Returns the returns of evaluations with these means."""
    rng = np.random.default_rng(seed)
    return [(level + noise * rng.normal(size=episodes)).tolist() for level in levels]


@pytest.mark.parametrize("span", SPANS)
@pytest.mark.parametrize("seed", range(5))
def test_the_level_is_made_by_what_follows_the_best(span: int, seed: int) -> None:
    means = np.random.default_rng(seed).normal(size=40)
    starts = range(40 - 2 * span + 1)
    best = max(starts, key=lambda start: sum(means[start : start + span]))
    assert confirmed(means, span) == best + span


def test_the_level_is_not_raised_by_choosing_the_best() -> None:
    rng = np.random.default_rng(0)
    best, levels = [], []
    for _ in range(2000):
        means = rng.normal(size=50)
        start = confirmed(means, 2)
        best.append(means[start - 2 : start].mean())
        levels.append(means[start : start + 2].mean())
    # what follows the best has mean 0 by itself, with a standard error of 0.016, and less where it must not be better
    assert np.mean(best) > 1.4
    assert -0.2 < np.mean(levels) < 0.05


@pytest.mark.parametrize(
    ("evaluations", "episodes", "spans"),
    [(40, 20, [1, 2, 4, 8, 16]), (40, 10, [2, 4, 8, 16]), (31, 5, [4, 8]), (32, 1, [16]), (31, 1, []), (1, 20, [])],
)
def test_a_level_has_episodes_enough_and_evaluations_to_be_confirmed_by(evaluations, episodes, spans) -> None:
    assert spans_of(evaluations, episodes) == spans


def test_the_usual_fall_of_noise_is_what_one_difference_in_ten_exceeds() -> None:
    means = np.random.default_rng(0).normal(scale=3.0, size=20_000)
    # differences of two have standard deviation 3 sqrt(2); 1.2816 is the 90 % quantile of the normal distribution
    assert usual_fall(means) == pytest.approx(3.0 * np.sqrt(2) * 1.2816, rel=0.02)


def test_rising_returns_have_no_usual_fall() -> None:
    assert usual_fall(np.arange(20.0)) == 0
    assert usual_fall(np.array([1.0])) == 0


def test_the_least_fall_is_a_fraction_of_what_was_gained_or_more_than_the_usual() -> None:
    assert least_fall(-100.0, -500.0, 0.0, 0.25) == 100
    assert least_fall(-100.0, -500.0, 200.0, 0.25) == 300
    # a run that is worse than at its start has gained nothing
    assert least_fall(10.0, 20.0, 0.0, 0.25) == 0


def test_the_p_value_is_that_of_scipys_welch_test_times_the_tests_made() -> None:
    returns = curve(0, 90, 100, 101, 55, 50, noise=20)
    found = degradation(returns, **{**STRICT, "significance": 0.5})
    # of 4 evaluations before, 10 episodes each, only the span 2 is possible: the best two are those two themselves, but
    # the level must follow, so it is made by the last two
    expected = stats.ttest_ind(
        np.concatenate(returns[4:]), np.concatenate(returns[2:4]), equal_var=False, alternative="less"
    )
    assert np.var(np.concatenate(returns[4:])) > np.var(np.concatenate(returns[2:4])) / 2
    assert found.p_value == pytest.approx(expected.pvalue, rel=1e-9)
    assert found.level == pytest.approx(np.mean(returns[2:4]))
    assert found.recent == pytest.approx([np.mean(each) for each in returns[4:]])


def test_the_p_value_of_ranks_is_scipys() -> None:
    returns = curve(0, 90, 100, 101, 55, 50, noise=20)
    found = degradation(returns, **{**STRICT, "test": "mann-whitney", "significance": 0.5})
    expected = stats.mannwhitneyu(np.concatenate(returns[4:]), np.concatenate(returns[2:4]), alternative="less")
    assert found.p_value == pytest.approx(expected.pvalue, rel=1e-9)


def test_episodes_that_are_all_alike_are_no_certainty() -> None:
    # successes of 100 and failures of 0: ten failures in a row say less than their variance of 0 does
    returns = [[100.0, 0.0] * 5] * 16 + [[0.0] * 5] * 2
    certain = stats.ttest_ind([0.0] * 10, np.concatenate(returns[:8]), equal_var=False, alternative="less").pvalue
    found = degradation(returns, **{**STRICT, "significance": 0.5})
    assert certain < 1e-9 < 1e-4 < found.p_value


def test_returns_without_any_noise_need_no_test() -> None:
    steady = [[float(level)] * 20 for level in (0, 40, 80, 100, 100)]
    assert degradation([*steady, [60.0] * 20, [60.0] * 20], **STRICT).p_value == 0
    assert degradation([*steady, [80.0] * 20, [80.0] * 20], **STRICT) is None


def test_both_evaluations_must_have_fallen() -> None:
    steady = curve(0, *[100] * 20)
    assert degradation([*steady, *curve(10, 10)], **STRICT)
    assert degradation([*steady, *curve(10, 95)], **STRICT) is None
    assert degradation([*steady, *curve(95, 10)], **STRICT) is None


@pytest.mark.parametrize("test", ["welch", "mann-whitney"])
@pytest.mark.parametrize("order", [slice(None), slice(None, None, -1)], ids=["healthy-first", "healthy-last"])
@pytest.mark.parametrize("patience", [2, 3])
def test_one_very_bad_evaluation_does_not_make_the_others_bad(test: str, order: slice, patience: int) -> None:
    steady = curve(*[100] * 12, noise=20)
    # a healthy one that lies below all of the level, and is no surprise by its own episodes
    lowest = min(np.mean(each) for each in steady)
    healthy = np.array(curve(0, noise=20, seed=4)[0])
    healthy = (healthy - healthy.mean() + lowest - 1).tolist()
    recent = [*[healthy] * (patience - 1), curve(4, noise=2)[0]][order]
    options = {**STRICT, "test": test, "patience": patience, "min_effect": 0.0}
    alone = stats.ttest_ind(healthy, np.concatenate(steady), alternative="less").pvalue
    assert alone > 0.02
    assert degradation([*steady, *recent], **options) is None
    assert degradation([*steady, *[recent[-1] if order == slice(None) else recent[0]] * patience], **options)


def test_an_outlier_among_the_episodes_is_no_fall() -> None:
    steady = curve(0, *[100] * 20)
    wild = [[*each[:-1], -10_000.0] for each in curve(100, 100, seed=1)]
    assert degradation([*steady, *wild], **STRICT) is None


def test_scipy_is_named_where_it_is_missing(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "scipy", None)
    with pytest.raises(ConfigurationError, match=r'pip install "simckpt\[rollback\]"'):
        degradation([*curve(0, *[100] * 20), *curve(10, 10)], **STRICT)


@pytest.fixture(scope="module")
def bench() -> ModuleType:
    path = Path(__file__).parents[2] / "scripts" / "bench_rollback.py"
    spec = importlib.util.spec_from_file_location("bench_rollback", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules["bench_rollback"] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules["bench_rollback"]


@pytest.mark.parametrize(("cv", "episodes"), [(0.1, 20), (0.3, 10), (0.5, 5)])
def test_the_bench_misses_no_alarm_of_the_policy(bench: ModuleType, cv: float, episodes: int) -> None:
    rng = np.random.default_rng(1)
    means = np.concatenate([bench.stationary(2), bench.improving(2)])[:, :60]
    returns = means[:, :, None] * np.concatenate(
        [bench.two_peaked(rng, cv, (2, 60, episodes)), bench.skewed(rng, cv, (2, 60, episodes))]
    )
    falling = bench.collapsed(returns, means, np.array([30, 40, 50, 58]), shifted=False)
    quick = bench.by_policy(falling)
    slow = [[bench.policy_alarms(each, place) for place in range(60)] for each in falling]
    assert quick.tolist() == slow
    assert quick.any() or cv == 0.5


@pytest.mark.parametrize("name", ["normal", "heavy_tailed", "skewed", "failing", "two_peaked"])
def test_the_curves_of_the_bench_have_the_mean_and_variation_they_should(bench: ModuleType, name: str) -> None:
    episodes = getattr(bench, name)(np.random.default_rng(2), 0.3, (400_000,))
    assert episodes.mean() == pytest.approx(1, abs=0.003)
    # the variance of Student's t with 3 degrees of freedom is itself heavy-tailed
    assert episodes.std() == pytest.approx(0.3, rel=0.1 if name == "heavy_tailed" else 0.01)
