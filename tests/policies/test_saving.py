import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simckpt.errors import ConfigurationError
from simckpt.policies import (
    AtSteps,
    EveryMinutes,
    EverySteps,
    Moment,
    OnBest,
    OnException,
    OnSignal,
    OverheadBudget,
    SavePolicy,
)


def due_steps(policy: SavePolicy, calls: range) -> list[int]:
    """Drives a policy the way a checkpointer does, and returns the steps at which it saved."""
    saved, previous = [], 0
    for step in calls:
        if policy.decide(Moment(step, previous)).due:
            saved.append(step)
            previous = step
    return saved


def saved_values(policy: SavePolicy, values: list[float | None], metric: str = "return") -> list[float]:
    """Returns the values of the metric at which a policy saved; None is a call without it."""
    saved, memory = [], {}
    for step, value in enumerate(values, start=1):
        moment = Moment(step, step - 1, {} if value is None else {metric: value}, memory)
        if policy.decide(moment).due:
            saved.append(value)
            memory = dict(policy.remember(moment))
    return saved


def save_times(policy: SavePolicy, costs: list[float], *, until: float) -> list[float]:
    """Returns when a policy saved [s]: it is asked each second, the i-th save costs costs[i], the last cost goes on."""
    now, last, cost, times = 0.0, 0.0, None, []
    while now < until:
        if policy.decide(Moment(1, 0, elapsed=now - last, save_cost=cost)).due:
            times.append(now)
            cost = costs[min(len(times), len(costs)) - 1]
            last = now
            now += cost
        now += 1
    return times


# steps


def test_every_steps_saves_at_the_first_call_after_each_multiple() -> None:
    # calls at 300, 600, ..., multiples of 1000 are passed at 1200, 2100, 3000
    assert due_steps(EverySteps(1000), range(300, 3100, 300)) == [1200, 2100, 3000]


def test_every_steps_saves_once_where_one_call_passes_several_multiples() -> None:
    assert due_steps(EverySteps(10), range(100, 301, 100)) == [100, 200, 300]


def test_every_steps_is_not_due_at_the_start() -> None:
    assert not EverySteps(5).decide(Moment(0, 0)).due


def test_every_steps_after_a_resume_is_due_where_the_undisturbed_run_is() -> None:
    undisturbed = due_steps(EverySteps(1000), range(300, 9001, 300))
    resumed_from = undisturbed[3]
    later, previous = [], resumed_from
    for step in range(resumed_from + 300, 9001, 300):
        if EverySteps(1000).decide(Moment(step, previous)).due:
            later.append(step)
            previous = step
    assert undisturbed[4:] == later


@given(st.integers(1, 50), st.lists(st.integers(1, 60), max_size=30))
def test_every_steps_saves_once_for_each_stretch_between_multiples(interval: int, advances: list[int]) -> None:
    calls = [sum(advances[: place + 1]) for place in range(len(advances))]
    saved = due_steps(EverySteps(interval), calls)
    # the first call of each interval but the very first one, which holds the start
    first_of_each = {step // interval: step for step in reversed(calls) if step >= interval}
    assert saved == sorted(first_of_each.values())


def test_at_steps_saves_when_passed_and_only_once() -> None:
    assert due_steps(AtSteps(250, 700), range(100, 1001, 100)) == [300, 700]


def test_at_steps_takes_its_steps_in_any_order_and_names_the_last_one_passed() -> None:
    assert due_steps(AtSteps(700, 250), range(100, 1001, 100)) == [300, 700]
    assert AtSteps(7, 5).decide(Moment(9, 0)).reason == "passed step 7"


@given(st.lists(st.integers(1, 300), min_size=1), st.lists(st.integers(1, 60), max_size=30))
def test_at_steps_saves_at_the_first_call_at_or_after_each(steps: list[int], advances: list[int]) -> None:
    calls = [sum(advances[: place + 1]) for place in range(len(advances))]
    expected = {min((call for call in calls if call >= step), default=None) for step in steps} - {None}
    assert due_steps(AtSteps(*steps), calls) == sorted(expected)


# time


def test_every_minutes_is_due_when_they_have_gone_by() -> None:
    assert not EveryMinutes(2).decide(Moment(5, 0, elapsed=119.9)).due
    decision = EveryMinutes(2).decide(Moment(5, 0, elapsed=120.0))
    assert decision.due
    assert decision.reason == "2.0 minutes since the last save"


def test_half_minutes_are_possible() -> None:
    assert save_times(EveryMinutes(0.5), [0.0], until=100) == [30, 60, 90]


def test_a_budget_saves_at_once_to_measure_and_then_waits_until_the_cost_is_paid() -> None:
    # each save costs 2 s, 1 % of 200 s: from one save to the next 200 s, on the grid of the calls
    assert save_times(OverheadBudget(0.01), [2.0], until=700) == [0, 200, 400, 600]


def test_a_budget_follows_a_state_that_grows() -> None:
    # the interval after a save is a hundred times what that save cost
    assert save_times(OverheadBudget(0.01), [1.0, 2.0, 4.0], until=1200) == [0, 100, 300, 700, 1100]


@given(st.floats(0.001, 0.5), st.lists(st.floats(0.001, 30), min_size=1, max_size=10))
def test_a_budget_is_kept_by_every_interval(fraction: float, costs: list[float]) -> None:
    times = save_times(OverheadBudget(fraction), costs, until=5000)
    for place, (start, end) in enumerate(pairwise(times)):
        # in float64, and the driver adds up the time
        assert costs[min(place, len(costs) - 1)] <= fraction * (end - start) * (1 + 1e-12)


def test_a_budget_and_a_shortest_interval_can_be_joined() -> None:
    # a save costs 0.1 s, the budget alone would save each 10 s
    assert save_times(OverheadBudget(0.01) & EveryMinutes(1), [0.1], until=200)[:2] == [60, pytest.approx(120.1)]


def test_a_budget_says_what_the_last_save_cost() -> None:
    decision = OverheadBudget(0.01).decide(Moment(5, 0, elapsed=250.0, save_cost=2.0))
    assert decision.reason == "the last save cost 2 s, at most 1.00% of the 250 s since"


# the best


def test_on_best_saves_what_is_strictly_better_than_all_saves_before() -> None:
    assert saved_values(OnBest("return"), [3.0, 1.0, 3.0, 4.0, None, 4.0, 5.0]) == [3.0, 4.0, 5.0]


def test_on_best_by_the_smallest_value() -> None:
    assert saved_values(OnBest("return", mode="min"), [3.0, 1.0, 3.0, 0.5, 0.5]) == [3.0, 1.0, 0.5]


def test_nan_never_ranks_best_not_even_as_the_first_value() -> None:
    assert saved_values(OnBest("return"), [math.nan, 1.0, math.nan, 2.0]) == [1.0, 2.0]
    assert saved_values(OnBest("return", mode="min"), [math.nan, 2.0, math.nan, 1.0]) == [2.0, 1.0]


@given(st.lists(st.none() | st.floats(allow_nan=True)), st.sampled_from(["max", "min"]))
def test_on_best_saves_the_records_of_the_sequence(values: list[float | None], mode: str) -> None:
    numbers = [value for value in values if value is not None and not math.isnan(value)]
    best = max if mode == "max" else min
    records = [
        value
        for place, value in enumerate(numbers)
        if place == 0 or best(value, best(numbers[:place])) != best(numbers[:place])
    ]
    assert saved_values(OnBest("return", mode=mode), values) == records


def test_a_save_that_another_policy_asked_for_raises_the_bar() -> None:
    policy = EverySteps(10) | OnBest("return")
    regular = Moment(10, 0, {"return": 7.0}, {"max return": 3.0})
    assert policy.decide(Moment(9, 0, {"return": 2.0}, {"max return": 3.0})).due is False
    assert policy.remember(regular) == {"max return": 7.0}


def test_a_save_without_the_metric_or_with_nan_keeps_the_best() -> None:
    for metrics in ({}, {"return": math.nan}, {"return": 2.0}):
        assert OnBest("return").remember(Moment(10, 0, metrics, {"max return": 3.0})) == {"max return": 3.0}


def test_nothing_is_remembered_before_there_is_a_value() -> None:
    assert OnBest("return").remember(Moment(10, 0, {"return": math.nan})) == {}


def test_two_metrics_and_both_directions_are_remembered_apart() -> None:
    policy = OnBest("return") | OnBest("loss", mode="min") | (EverySteps(5) & OnBest("return", mode="min"))
    moment = Moment(10, 0, {"return": 7.0, "loss": 1.0})
    assert policy.remember(moment) == {"max return": 7.0, "min loss": 1.0, "min return": 7.0}


def test_a_failed_save_is_due_again_with_the_memory_of_before() -> None:
    moment = Moment(10, 0, {"return": 7.0}, {"max return": 3.0})
    assert OnBest("return").decide(moment).due
    assert OnBest("return").decide(Moment(20, 10, {"return": 7.0}, moment.memory)).due


def test_on_best_says_what_is_better_than_what() -> None:
    assert OnBest("return").decide(Moment(1, 0, {"return": 2.5})).reason == "the first return, 2.5"
    moment = Moment(1, 0, {"return": 3.0}, {"max return": 2.5})
    assert OnBest("return").decide(moment).reason == "return of 3 is better than 2.5"


# joined


def test_either_and_both() -> None:
    assert due_steps(EverySteps(400) | AtSteps(1000), range(100, 1001, 100)) == [400, 800, 1000]
    assert due_steps(EverySteps(200) & EverySteps(300), range(100, 1001, 100)) == [300, 600, 900]


def test_the_reasons_of_all_policies_that_are_due_are_given() -> None:
    decision = (EverySteps(10) | AtSteps(10)).decide(Moment(10, 0))
    assert decision.reason == "passed a multiple of 10 steps; passed step 10"
    decision = (EverySteps(10) & AtSteps(10)).decide(Moment(10, 0))
    assert decision.reason == "passed a multiple of 10 steps and passed step 10"


POLICIES = st.sampled_from(
    [EverySteps(7), EverySteps(50), AtSteps(20, 30), EveryMinutes(1), OnBest("return"), OverheadBudget(0.1), OnSignal()]
)
IN_THE_LOOP = st.sampled_from([EverySteps(7), AtSteps(20, 30), EveryMinutes(1), OnBest("return"), OverheadBudget(0.1)])
MOMENTS = st.builds(
    Moment,
    step=st.integers(20, 100),
    previous_step=st.integers(0, 20),
    metrics=st.dictionaries(st.just("return"), st.floats(allow_nan=True)),
    memory=st.dictionaries(st.just("max return"), st.floats(allow_nan=False)),
    elapsed=st.floats(0, 200),
    save_cost=st.none() | st.floats(0, 20),
    signal=st.sampled_from([None, "SIGTERM", "SIGUSR2"]),
)


@given(POLICIES, POLICIES, POLICIES, MOMENTS)
def test_either_is_due_when_one_is_in_whatever_order_they_are_joined(a, b, c, moment: Moment) -> None:
    due = a.decide(moment).due or b.decide(moment).due or c.decide(moment).due
    assert (a | b | c) == (a | (b | c))
    assert (a | b | c).decide(moment).due == (c | b | a).decide(moment).due == due
    assert (a | a).decide(moment) == a.decide(moment)
    assert (a | b).remember(moment) == {**a.remember(moment), **b.remember(moment)}


@given(IN_THE_LOOP, IN_THE_LOOP, IN_THE_LOOP, MOMENTS)
def test_both_are_due_when_all_are_in_whatever_order_they_are_joined(a, b, c, moment: Moment) -> None:
    due = a.decide(moment).due and b.decide(moment).due and c.decide(moment).due
    assert (a & b & c) == (a & (b & c))
    assert (a & b & c).decide(moment).due == (c & b & a).decide(moment).due == due
    assert (a & a).decide(moment) == a.decide(moment)
    assert (a & (b | c)).decide(moment).due == ((a & b) | (a & c)).decide(moment).due


@given(POLICIES, MOMENTS)
def test_a_decision_changes_nothing_and_has_a_reason_if_it_is_due(policy: SavePolicy, moment: Moment) -> None:
    before = (dict(moment.metrics), dict(moment.memory))
    first = policy.decide(moment)
    policy.remember(moment)
    assert policy.decide(moment) == first
    assert bool(first.reason) == first.due
    # as texts, for NaN differs from itself
    assert repr((dict(moment.metrics), dict(moment.memory))) == repr(before)


def test_a_policy_of_ones_own_can_be_joined() -> None:
    class OnMondays(SavePolicy):
        def decide(self, moment):
            return AtSteps(1).decide(moment)

    assert due_steps(OnMondays() | EverySteps(3), range(1, 5)) == [1, 3]


@pytest.mark.parametrize("joined", [lambda: EverySteps(5) | None, lambda: EverySteps(5) & 3, lambda: OnSignal() | "x"])
def test_a_policy_cannot_be_joined_with_something_else(joined) -> None:
    with pytest.raises(TypeError):
        joined()


def test_an_exception_is_answered_by_on_exception_alone() -> None:
    policy = EverySteps(1) | OverheadBudget(0.1) | OnSignal() | OnException()
    moment = Moment(10, 0, elapsed=100.0, signal="SIGTERM", exception="ValueError: no")
    assert policy.decide(moment).reason == "the loop ended with ValueError: no"
    assert not (EverySteps(1) | OnSignal()).decide(moment).due


@pytest.mark.parametrize(
    "text",
    [
        "EverySteps(50000)",
        "AtSteps(10, 20)",
        "EveryMinutes(5)",
        "EveryMinutes(0.5)",
        "OnBest('eval/return')",
        "OnBest('loss', mode='min')",
        "OverheadBudget(0.01)",
        "OnSignal()",
        "OnSignal('SIGTERM', grace=120)",
        "OnException()",
        "EverySteps(5) | OnBest('r') | OnSignal()",
        "OverheadBudget(0.01) & EveryMinutes(5) | OnException()",
        "(EverySteps(5) | OnBest('r')) & EveryMinutes(5)",
    ],
)
def test_policies_read_as_they_are_written(text: str) -> None:
    names = (AtSteps, EveryMinutes, EverySteps, OnBest, OnException, OnSignal, OverheadBudget)
    policy = eval(text, {each.__name__: each for each in names})
    assert repr(policy) == text


@pytest.mark.parametrize("steps", [0, -1, 1.5, True, None, "5"])
def test_a_senseless_interval_is_refused(steps: object) -> None:
    with pytest.raises(ConfigurationError):
        EverySteps(steps)
    with pytest.raises(ConfigurationError):
        AtSteps(10, steps)


def test_at_steps_without_steps_is_refused() -> None:
    with pytest.raises(ConfigurationError):
        AtSteps()


@pytest.mark.parametrize("minutes", [0, -1, math.inf, math.nan, True, None, "5"])
def test_a_senseless_time_is_refused(minutes: object) -> None:
    with pytest.raises(ConfigurationError):
        EveryMinutes(minutes)
    with pytest.raises(ConfigurationError):
        OnSignal(grace=minutes)


@pytest.mark.parametrize("fraction", [0.0, 1.0, 1, -0.1, math.nan, True, None, "1%"])
def test_a_senseless_fraction_is_refused(fraction: object) -> None:
    with pytest.raises(ConfigurationError):
        OverheadBudget(fraction)


@pytest.mark.parametrize(
    ("metric", "mode"), [("", "max"), (None, "max"), (3, "max"), ("return", "best"), ("return", None)]
)
def test_a_senseless_metric_or_mode_is_refused(metric: object, mode: object) -> None:
    with pytest.raises(ConfigurationError):
        OnBest(metric, mode=mode)
