"""Population-based training: the decisions, as pure functions."""

import math
from collections import Counter

import pytest

from simckpt.branching.population import Member, PopulationBasedTraining, Range
from simckpt.errors import CheckpointNotFoundError, ConfigurationError

RATES = Range(1e-5, 1e-2, log=True)


def population(**changes: object) -> PopulationBasedTraining:
    settings = {"metric": "eval/return", "explore": {"learning_rate": RATES}, "size": 10, "interval": 100}
    return PopulationBasedTraining(**{**settings, **changes})  # type: ignore[arg-type]


def members(*scores: float | None, learning_rate: float = 1e-3) -> list[Member]:
    return [Member(score, {"learning_rate": learning_rate}) for score in scores]


def copies(decisions: list) -> dict[int, int]:
    return {number: decision.source for number, decision in enumerate(decisions) if decision.source != number}


def test_the_worst_fifth_copies_from_the_best_fifth() -> None:
    scores = [3.0, 9.0, 1.0, 7.0, 5.0, 8.0, 2.0, 6.0, 4.0, 0.0]
    sources = Counter()
    for generation in range(1, 101):
        made = copies(population().decide(generation, members(*scores)))
        assert made.keys() == {2, 9}
        sources.update(made.values())
    # members 1 and 5 are the best two; each is drawn half of 200 times, within five standard deviations
    assert sources.keys() == {1, 5}
    assert abs(sources[1] - 100) < 5 * math.sqrt(200 * 0.25)


@pytest.mark.parametrize(
    ("size", "truncation", "expected"), [(2, 0.2, 1), (3, 0.5, 1), (4, 0.2, 1), (5, 0.2, 1), (6, 0.2, 2), (35, 0.2, 7)]
)
def test_how_many_copy(size: int, truncation: float, expected: int) -> None:
    chosen = population(size=size, truncation=truncation)
    made = copies(chosen.decide(1, members(*map(float, range(size)))))
    assert made.keys() == set(range(expected))
    assert set(made.values()) <= set(range(size - expected, size))


def test_lower_is_better_where_asked_for() -> None:
    assert copies(population(size=4, mode="min").decide(1, members(4.0, 1.0, 9.0, 5.0))) == {2: 1}


def test_first_member_wins_a_tie() -> None:
    assert copies(population(size=4).decide(1, members(2.0, 2.0, 2.0, 2.0))) == {3: 0}


def test_members_without_a_score_always_copy_and_are_never_copied() -> None:
    made = copies(population(size=6).decide(1, members(None, math.nan, -math.inf, 3.0, math.inf, 2.0)))
    assert made.keys() == {0, 1, 2, 4}
    assert set(made.values()) <= {3, 5}


def test_sole_survivor_is_copied_by_all() -> None:
    assert copies(population(size=3).decide(1, members(None, 1.0, None))) == {0: 1, 2: 1}


def test_population_without_any_score_is_an_error() -> None:
    with pytest.raises(CheckpointNotFoundError, match="'eval/return' at the end of generation 7"):
        population(size=3).decide(7, members(None, math.nan, None))


def test_equal_settings_give_equal_decisions_and_other_seeds_others() -> None:
    scores = members(*map(float, range(10)))
    assert population().decide(3, scores) == population().decide(3, scores)
    # drawn from a continuous range every time, so that no two are alike by chance
    drawn = [population(seed=seed, resample=1.0).decide(3, scores) for seed in range(20)]
    drawn += [population(resample=1.0).decide(generation, scores) for generation in range(4, 24)]
    assert len(set(map(str, drawn))) == 40


def test_decision_on_a_member_does_not_depend_on_other_explored_keys() -> None:
    both = population(size=2, explore={"gamma": [0.9, 0.99], "learning_rate": RATES})
    with_both = [Member(score, {"learning_rate": 1e-3, "gamma": 0.9}) for score in (0.0, 1.0)]
    alone = population(size=2).decide(1, members(0.0, 1.0))
    assert both.decide(1, with_both)[0].overrides["learning_rate"] == alone[0].overrides["learning_rate"]


def test_a_quarter_is_drawn_anew_and_the_rest_is_perturbed() -> None:
    chosen = population(size=2)
    values = [chosen.decide(k, members(0.0, 1.0))[0].overrides["learning_rate"] for k in range(1, 1001)]
    perturbed = Counter(value for value in values if value in (1e-3 * 0.8, 1e-3 * 1.2))
    # within five standard deviations of 750, and of half of those
    assert abs(perturbed.total() - 750) < 5 * math.sqrt(1000 * 0.25 * 0.75)
    assert abs(perturbed[1e-3 * 0.8] - perturbed.total() / 2) < 5 * math.sqrt(750 * 0.25)
    assert all(1e-5 <= value <= 1e-2 for value in values)


def test_perturbed_values_stay_within_their_range() -> None:
    chosen = population(size=2, resample=0.0)
    values = {
        chosen.decide(k, members(0.0, 1.0, learning_rate=9e-3))[0].overrides["learning_rate"] for k in range(1, 50)
    }
    assert values == {9e-3 * 0.8, 1e-2}


def test_value_of_a_list_moves_to_a_neighbour() -> None:
    chosen = population(size=2, resample=0.0, explore={"batch_size": [32, 64, 128, 256]})

    def reached(value: int) -> set[int]:
        worst_and_best = [Member(score, {"batch_size": value}) for score in (0.0, 1.0)]
        return {chosen.decide(k, worst_and_best)[0].overrides["batch_size"] for k in range(1, 50)}

    assert reached(64) == {32, 128}
    assert reached(32) == {32, 64}
    assert reached(256) == {128, 256}
    # a value that the list lacks, such as the origin's own
    assert reached(48) == {32, 64, 128, 256}


def test_whole_numbers_stay_whole_and_always_move() -> None:
    steps = Range(1, 10)
    assert [steps.perturb(value, 1.2) for value in (1, 2, 5, 9, 10)] == [2, 3, 6, 10, 10]
    assert [steps.perturb(value, 0.8) for value in (1, 2, 5, 10)] == [1, 1, 4, 8]
    assert Range(-10, 10).perturb(-2, 1.2) == -3
    assert all(type(value) is int for value in (steps.perturb(5, 1.2), steps.sample(lambda: 0.5)))


def test_whole_numbers_are_drawn_evenly_to_the_last() -> None:
    assert [Range(1, 4).sample(lambda at=at: at) for at in (0.0, 0.249, 0.25, 0.999)] == [1, 1, 2, 4]
    assert [Range(1, 7, log=True).sample(lambda at=at: at) for at in (0.0, 1 / 3 + 1e-9, 2 / 3 + 1e-9, 0.999)] == [
        1,
        2,
        4,
        7,
    ]


def test_first_hyperparameters_fill_the_range() -> None:
    exponents = [math.log10(population().first(member)["learning_rate"]) for member in range(1000)]
    assert -5 <= min(exponents) < -4.9
    assert -2.1 < max(exponents) <= -2
    # uniform in the exponent: mean -3.5, standard deviation 3 / sqrt(12) each
    assert abs(sum(exponents) / 1000 + 3.5) < 5 * 3 / math.sqrt(12 * 1000)


def test_reasons_say_who_is_copied_and_why() -> None:
    decisions = population(size=3).decide(1, members(0.5, None, 1234.5678))
    assert [decision.reason for decision in decisions] == [
        "rank 2 of 3 with score 0.5",
        "rank 3 of 3 with no score: copies member 2 with score 1234.57",
        "rank 1 of 3 with score 1234.57",
    ]


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"size": 1}, "size"),
        ({"size": True}, "size"),
        ({"interval": 0}, "interval"),
        ({"mode": "maximum"}, "mode"),
        ({"metric": ""}, "metric"),
        ({"truncation": 0}, "truncation"),
        ({"truncation": 0.6}, "truncation"),
        ({"resample": 1.5}, "resample"),
        ({"factors": ()}, "factors"),
        ({"factors": (0.8, -1.0)}, "factors"),
        ({"factors": 0.8}, "factors"),
        ({"factors": None}, "factors"),
        ({"factors": "12"}, "factors"),
        ({"truncation": math.nan}, "truncation"),
        ({"truncation": "0.2"}, "truncation"),
        ({"metric": 3}, "metric"),
        ({"interval": 0.5}, "interval"),
        ({"size": "4"}, "size"),
        ({"rng": "restart"}, "rng"),
        ({"seed": 1.5}, "seed"),
        ({"explore": {}}, "explore"),
        ({"explore": ["gamma"]}, "explore"),
        ({"explore": None}, "explore"),
        ({"explore": {"gamma": 0.9}}, "gamma"),
        ({"explore": {"gamma": []}}, "gamma"),
        ({"explore": {"gamma": "0.9"}}, "gamma"),
    ],
    ids=str,
)
def test_wrong_settings_are_refused_by_name(changes: dict, key: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        population(**changes)
    assert caught.value.keys == (key,)


@pytest.mark.parametrize("bounds", [(1.0, 1.0), (2.0, 1.0), (0.0, math.inf), (math.nan, 1.0), (False, 1.0)], ids=str)
def test_ranges_without_values_are_refused(bounds: tuple[float, float]) -> None:
    with pytest.raises(ConfigurationError, match="a Range needs two finite numbers"):
        Range(*bounds)


def test_logarithmic_range_starts_above_zero() -> None:
    with pytest.raises(ConfigurationError, match="above 0"):
        Range(0.0, 1.0, log=True)


def test_hyperparameter_that_is_no_number_cannot_be_perturbed() -> None:
    with pytest.raises(ConfigurationError, match="'learning_rate' is None"):
        population(size=2).decide(1, [Member(0.0, {"learning_rate": 1e-3}), Member(1.0, {"learning_rate": None})])
