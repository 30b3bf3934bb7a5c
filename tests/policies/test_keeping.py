import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from policy_helpers import CHECKPOINT_LISTS, KEEP_POLICIES

from simckpt.errors import ConfigurationError
from simckpt.policies import (
    CheckpointFacts,
    KeepAll,
    KeepBest,
    KeepEvery,
    KeepLast,
    KeepPolicy,
    KeepTagged,
    MaxBytes,
)

# the same step twice and steps that go back, as after a rollback: order is commit order
CHECKPOINTS = [CheckpointFacts(str(place), step) for place, step in enumerate([10, 20, 30, 20, 25])]


def with_returns(*values: float | None) -> list[CheckpointFacts]:
    return [
        CheckpointFacts(str(place), place, {} if value is None else {"return": value})
        for place, value in enumerate(values)
    ]


def test_keep_last_goes_by_commit_order_and_not_by_step() -> None:
    assert set(KeepLast(2).keep(CHECKPOINTS)) == {"3", "4"}


def test_keep_last_keeps_all_where_there_are_fewer() -> None:
    assert set(KeepLast(9).keep(CHECKPOINTS)) == {"0", "1", "2", "3", "4"}


def test_keep_best_keeps_the_best_with_rank_and_value() -> None:
    kept = KeepBest(2, "return").keep(with_returns(1.0, 9.0, 4.5, 3.0))
    assert kept == {"1": "number 1 of the best 2 by return, 9", "2": "number 2 of the best 2 by return, 4.5"}


def test_keep_best_by_the_smallest_value() -> None:
    assert set(KeepBest(2, "return", mode="min").keep(with_returns(1.0, 9.0, 4.5, 3.0))) == {"0", "3"}


def test_nan_and_a_missing_metric_never_rank() -> None:
    checkpoints = with_returns(math.nan, None, 1.0, math.nan, 0.0)
    assert list(KeepBest(3, "return").keep(checkpoints)) == ["2", "4"]
    assert list(KeepBest(3, "return", mode="min").keep(checkpoints)) == ["4", "2"]


@pytest.mark.parametrize("mode", ["max", "min"])
def test_the_oldest_wins_a_tie(mode: str) -> None:
    assert list(KeepBest(2, "return", mode=mode).keep(with_returns(5.0, 5.0, 5.0))) == ["0", "1"]


def test_keep_every_steps_keeps_the_first_at_or_after_each_multiple() -> None:
    checkpoints = [CheckpointFacts(str(step), step) for step in range(30, 331, 60)]
    # 30, 90, 150, 210, 270, 330: multiples of 100 are followed by 150, 210, 330
    kept = KeepEvery(steps=100).keep(checkpoints)
    assert kept == {
        "150": "the first since step 100",
        "210": "the first since step 200",
        "330": "the first since step 300",
    }


def test_keep_every_minutes_keeps_the_first_of_each_interval() -> None:
    checkpoints = [CheckpointFacts(str(minute), 1, created=60.0 * minute) for minute in (61, 70, 119, 120, 185, 190)]
    assert set(KeepEvery(minutes=60).keep(checkpoints)) == {"61", "120", "185"}


def test_keep_tagged_keeps_any_tag_or_those_given() -> None:
    checkpoints = [
        CheckpointFacts("plain", 1),
        CheckpointFacts("paper", 2, tags=frozenset({"paper", "figure 3"})),
        CheckpointFacts("bug", 3, tags=frozenset({"bug"})),
    ]
    assert KeepTagged().keep(checkpoints) == {"paper": "tagged figure 3, paper", "bug": "tagged bug"}
    assert KeepTagged("paper", "release").keep(checkpoints) == {"paper": "tagged paper"}


def test_max_bytes_keeps_the_newest_that_fit_and_stops_at_the_first_that_does_not() -> None:
    checkpoints = [CheckpointFacts(str(place), place, size=size) for place, size in enumerate([1, 900, 30, 40, 50])]
    assert set(MaxBytes(120).keep(checkpoints)) == {"2", "3", "4"}
    assert set(MaxBytes(119).keep(checkpoints)) == {"3", "4"}
    # the oldest would fit, but lies behind one that does not
    assert set(MaxBytes(200).keep(checkpoints)) == {"2", "3", "4"}
    assert set(MaxBytes(49).keep(checkpoints)) == set()


def test_what_any_policy_keeps_stays_with_both_reasons() -> None:
    kept = (KeepLast(1) | KeepAll()).keep(CHECKPOINTS)
    assert len(kept) == 5
    assert kept["4"] == "among the last 1; all are kept"


@given(KEEP_POLICIES, KEEP_POLICIES, KEEP_POLICIES, CHECKPOINT_LISTS)
def test_joined_policies_keep_the_union_in_whatever_order_they_are_joined(a, b, c, checkpoints) -> None:
    union = set(a.keep(checkpoints)) | set(b.keep(checkpoints)) | set(c.keep(checkpoints))
    assert (a | b | c) == (a | (b | c))
    assert set((a | b | c).keep(checkpoints)) == set((c | b | a).keep(checkpoints)) == union
    assert (a | a).keep(checkpoints) == a.keep(checkpoints)


@given(KEEP_POLICIES, CHECKPOINT_LISTS)
def test_a_policy_keeps_what_exists_with_a_reason(policy: KeepPolicy, checkpoints) -> None:
    kept = policy.keep(checkpoints)
    assert set(kept) <= {checkpoint.id for checkpoint in checkpoints}
    assert all(kept.values())


@given(CHECKPOINT_LISTS, st.integers(1, 300))
def test_max_bytes_never_keeps_more(checkpoints, limit: int) -> None:
    kept = MaxBytes(limit).keep(checkpoints)
    assert sum(checkpoint.size for checkpoint in checkpoints if checkpoint.id in kept) <= limit


@given(CHECKPOINT_LISTS, st.integers(1, 8), st.sampled_from(["max", "min"]))
def test_nothing_that_keep_best_drops_is_better_than_what_it_keeps(checkpoints, count: int, mode: str) -> None:
    kept = KeepBest(count, "return", mode=mode).keep(checkpoints)
    ranked = {
        each.id: each.metrics["return"] for each in checkpoints if not math.isnan(each.metrics.get("return", math.nan))
    }
    assert len(kept) == min(count, len(ranked))
    dropped = [value for identity, value in ranked.items() if identity not in kept]
    for identity in kept:
        assert all(ranked[identity] >= value if mode == "max" else ranked[identity] <= value for value in dropped)


@pytest.mark.parametrize(
    "text",
    [
        "KeepAll()",
        "KeepLast(3)",
        "KeepBest(2, 'eval/return')",
        "KeepBest(2, 'loss', mode='min')",
        "KeepEvery(steps=1000000)",
        "KeepEvery(minutes=0.5)",
        "KeepTagged()",
        "KeepTagged('paper', 'release')",
        "MaxBytes(10000000000)",
        "KeepLast(3) | KeepBest(2, 'eval/return') | KeepEvery(steps=1000000)",
    ],
)
def test_policies_read_as_they_are_written(text: str) -> None:
    names = (KeepAll, KeepBest, KeepEvery, KeepLast, KeepTagged, MaxBytes)
    assert repr(eval(text, {each.__name__: each for each in names})) == text


@pytest.mark.parametrize("count", [0, -3, True, 1.0, None, "3"])
def test_a_senseless_count_is_refused(count: object) -> None:
    for make in (KeepLast, MaxBytes, lambda count: KeepBest(count, "return")):
        with pytest.raises(ConfigurationError):
            make(count)


@pytest.mark.parametrize(
    "options", [{}, {"steps": 5, "minutes": 5}, {"steps": 0}, {"steps": 1.5}, {"minutes": 0}, {"minutes": math.inf}]
)
def test_keep_every_needs_one_sensible_interval(options: dict) -> None:
    with pytest.raises(ConfigurationError):
        KeepEvery(**options)


def test_senseless_metrics_modes_and_tags_are_refused() -> None:
    for make in (
        lambda: KeepBest(2, ""),
        lambda: KeepBest(2, "r", mode="best"),
        lambda: KeepTagged(""),
        lambda: KeepTagged(3),
    ):
        with pytest.raises(ConfigurationError):
            make()


def test_a_policy_cannot_be_joined_with_something_else() -> None:
    with pytest.raises(TypeError):
        KeepLast(3) | None
