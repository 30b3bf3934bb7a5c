import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from simckpt.errors import ConfigurationError
from simckpt.policies import (
    CheckpointFacts,
    Evaluation,
    Reseed,
    Rollback,
    RollbackDecision,
    RollbackMoment,
    RollbackPolicy,
    Scale,
)

POLICY = RollbackPolicy("eval/return", changes=[Reseed(), Reseed() & Scale(learning_rate=0.5)])
RISING = [0, 20, 40, 60, 80, 100, 101, 99, 99.5, 102, 98, 100]
FALLEN = [*RISING, 30, 35]
GO_ON = RollbackDecision("go on")


def evaluations(levels: Sequence[float], *, episodes: int = 10, noise: float = 3.0) -> list[Evaluation]:
    """Returns evaluations at steps 10, 20, ...; the same ones for the same levels."""
    rng = np.random.default_rng(0)
    spreads = noise * rng.normal(size=(len(levels), episodes))
    # their means are the levels, so that it is known which one is best
    spreads -= spreads.mean(axis=1, keepdims=True)
    pairs = zip(levels, spreads, strict=True)
    return [Evaluation(10 * place, tuple(level + each)) for place, (level, each) in enumerate(pairs, 1)]


def moment(
    levels: Sequence[float],
    *,
    steps: Sequence[int] | None = None,
    rollbacks: Sequence[Rollback] = (),
    non_finite: str = "",
    is_new: bool = True,
    **options,
) -> RollbackMoment:
    """Returns a moment right after the last of these evaluations; checkpoints are named by their steps."""
    history = evaluations(levels, **options)
    steps = [each.step for each in history] if steps is None else steps
    checkpoints = [CheckpointFacts(str(step), step) for step in steps]
    step = history[-1].step if history else 5
    return RollbackMoment(step, history, is_new, non_finite, checkpoints, rollbacks)


# the fall


def test_a_collapse_is_found_at_its_second_evaluation_and_not_before() -> None:
    assert POLICY.decide(moment(FALLEN[:-1])) == GO_ON
    decision = POLICY.decide(moment(FALLEN))
    assert decision.action == "roll back"
    assert (decision.level, decision.changes) == (1, Reseed())
    assert decision.reason.startswith("eval/return fell from ")
    # each of them is named, not a mean that none had
    assert " to 30, 35 in 2 evaluations (welch: p = " in decision.reason


@pytest.mark.parametrize("test", ["welch", "mann-whitney"])
@pytest.mark.parametrize("patience", [1, 2, 3])
def test_patience_is_the_number_of_evaluations_that_have_fallen(test: str, patience: int) -> None:
    policy = replace(POLICY, patience=patience, test=test)
    levels = [*RISING, 30, 35, 32, 31]
    actions = [policy.decide(moment(levels[:count], episodes=20)).action for count in range(1, len(levels) + 1)]
    assert actions.index("roll back") == len(RISING) + patience - 1


def test_nothing_is_tested_twice() -> None:
    assert POLICY.decide(moment(FALLEN, is_new=False)) == GO_ON


@pytest.mark.parametrize("seed", range(20))
def test_noise_is_no_fall(seed: int) -> None:
    rng = np.random.default_rng(seed)
    history = [Evaluation(step, tuple(100 + 30 * rng.normal(size=10))) for step in range(60)]
    for count in range(1, 61):
        assert POLICY.decide(RollbackMoment(count, history[:count], True)) == GO_ON


def test_one_lucky_evaluation_is_no_level() -> None:
    # a rule that compares with the best so far rolls back here
    assert POLICY.decide(moment([0, 50, 100, 300, 100, 101, 99, 100, 98, 100])) == GO_ON


def test_negative_returns_fall_by_a_fraction_of_what_was_gained() -> None:
    levels = [-500, -400, -300, -200, -150, -101, -100, -99, -100, -100, -101]
    # 400 were gained, of which a quarter is 100
    assert POLICY.decide(moment([*levels, -190, -195])).action == "go on"
    assert POLICY.decide(moment([*levels, -250, -245])).action == "roll back"
    assert replace(POLICY, min_effect=0.1).decide(moment([*levels, -190, -195])).action == "roll back"


def test_a_metric_that_should_be_small_falls_upward() -> None:
    levels = [-level for level in FALLEN]
    decision = replace(POLICY, mode="min").decide(moment(levels))
    assert "eval/return rose from -" in decision.reason
    assert decision.target == POLICY.decide(moment(FALLEN)).target
    assert POLICY.decide(moment(levels)) == GO_ON


def test_the_first_evaluations_are_compared_with_and_not_tested() -> None:
    early = [0, 90, 100, 10, 12]
    assert replace(POLICY, warm_up=3).decide(moment(early, episodes=20)).action == "roll back"
    assert replace(POLICY, warm_up=4).decide(moment(early, episodes=20)) == GO_ON


def test_of_means_alone_only_a_long_history_tells_a_deep_fall() -> None:
    rng = np.random.default_rng(3)
    level = [Evaluation(step, (float(value),)) for step, value in enumerate(100 + 5 * rng.normal(size=40))]
    fall = [Evaluation(40 + step, (20.0 + step,)) for step in range(2)]
    checkpoints = [CheckpointFacts("a", 0)]
    assert POLICY.decide(RollbackMoment(42, level[:31] + fall, True, "", checkpoints)) == GO_ON
    assert POLICY.decide(RollbackMoment(42, level + fall, True, "", checkpoints)).action == "roll back"


def test_a_collapse_that_one_good_evaluation_interrupts_is_found_after_it() -> None:
    rising = list(range(0, 120, 10))
    assert POLICY.decide(moment([*rising, 30, 109, 30])) == GO_ON
    assert POLICY.decide(moment([*rising, 30, 109, 30, 28])).action == "roll back"


@pytest.mark.parametrize("levels", [[50.0] * 20, [*range(10, 50, 4), *[50.0] * 10]], ids=["flat", "levels-out"])
@pytest.mark.parametrize("patience", [2, 3])
@pytest.mark.parametrize("left", [0.04, 0.5])
def test_a_single_bad_evaluation_is_no_fall(levels: list[float], patience: int, left: float) -> None:
    policy, alarms = replace(POLICY, patience=patience), 0
    for seed in range(12):
        rng = np.random.default_rng(seed)
        factors = np.ones(len(levels))
        factors[16] = left
        returns = (np.array(levels) * factors)[:, None] * (1 + 0.1 * rng.normal(size=(len(levels), 12)))
        history = [Evaluation(step, tuple(each)) for step, each in enumerate(returns.tolist())]
        checkpoints = [CheckpointFacts("a", 0)]
        for count in range(16, len(levels) + 1):
            alarms += policy.decide(RollbackMoment(count, history[:count], True, "", checkpoints)).action != "go on"
    assert alarms == 0


@pytest.mark.parametrize("episodes", [1, 2, 3, 4, 10])
def test_the_first_test_is_where_it_is_said_to_be(episodes: int) -> None:
    first = POLICY.first_test(episodes)
    # a fall without any noise is found as soon as anything is tested
    for count in range(2, first + 2):
        history = [Evaluation(step, (100.0,) * episodes) for step in range(count - 2)]
        history += [Evaluation(count + step, (0.0,) * episodes) for step in range(2)]
        decision = POLICY.decide(RollbackMoment(count, history, True, "", [CheckpointFacts("a", 0)]))
        assert decision.action == ("roll back" if count >= first else "go on")


# the target


def test_the_best_confirmed_checkpoint_is_the_target() -> None:
    # it is the lower of two evaluations that counts: 102 at 100 has 98 after it, 101 at 70 has 99, 100 at 60 has 101
    assert POLICY.decide(moment(FALLEN)).target == "60"


def test_the_last_confirmed_checkpoint_is_the_target_if_wanted() -> None:
    # 100 at 120 was the last before the fall, but no good evaluation confirmed it
    assert replace(POLICY, target="last").decide(moment(FALLEN)).target == "110"


def test_a_lucky_evaluation_that_nothing_confirmed_is_no_target() -> None:
    levels = [0, 20, 40, 60, 80, 100, 101, 99, 200, 90, 98, 100, 30, 35]
    assert POLICY.decide(moment(levels)).target == "60"


def test_a_checkpoint_stands_for_the_first_evaluation_at_or_after_it() -> None:
    # 55 and 58 for the evaluation at 60, whose score is the best
    assert POLICY.decide(moment(FALLEN, steps=[5, 15, 55, 58, 101, 125, 135])).target == "58"


def test_without_a_checkpoint_of_the_best_the_best_of_those_there_are_is_the_target() -> None:
    assert POLICY.decide(moment(FALLEN, steps=[10, 40, 50, 130, 140])).target == "50"


def test_what_was_saved_while_returns_had_fallen_is_no_target() -> None:
    assert POLICY.decide(moment(FALLEN, steps=[115, 130, 140])).target == "115"
    decision = POLICY.decide(moment(FALLEN, steps=[130, 140]))
    assert (decision.action, decision.target) == ("go on", None)
    assert decision.reason.endswith("there is no checkpoint to go back to")


# what is not finite


@pytest.mark.parametrize("is_new", [True, False])
@pytest.mark.parametrize("levels", [FALLEN[:3], RISING], ids=["warming-up", "later"])
def test_what_is_not_finite_goes_back_at_once(levels: list[float], is_new: bool) -> None:
    decision = POLICY.decide(moment(levels, non_finite="loss/value is nan", is_new=is_new))
    assert (decision.action, decision.reason) == ("roll back", "loss/value is nan")
    assert decision.target == ("20" if len(levels) == 3 else "60")


def test_without_evaluations_the_newest_checkpoint_is_the_target() -> None:
    found = RollbackMoment(50, (), False, "loss is inf", [CheckpointFacts("a", 10), CheckpointFacts("b", 40)])
    assert POLICY.decide(found).target == "b"


def test_what_is_not_finite_and_has_no_target_stops() -> None:
    found = RollbackMoment(50, non_finite="loss is inf")
    assert POLICY.decide(found).action == "stop"
    assert replace(POLICY, then="continue").decide(found).action == "go on"


# one after another

FIRST = Rollback(140, 60, 1, 14)


def test_after_a_rollback_what_it_went_back_to_counts_as_confirmed() -> None:
    # it was confirmed by evaluations that are abandoned, and falls again at once
    levels = [*RISING[:6], 30, 28, 31, 29]
    decision = POLICY.decide(moment(levels, rollbacks=[FIRST]))
    assert (decision.action, decision.target, decision.level) == ("roll back", "60", 2)
    assert decision.changes == Reseed() & Scale(learning_rate=0.5)


def test_the_commit_of_a_rollback_is_the_newer_target() -> None:
    found = moment([*RISING[:6], 30, 28, 31, 29], rollbacks=[FIRST], steps=[10, 60, 70, 80, 90, 100])
    checkpoints = [*found.checkpoints[:2], CheckpointFacts("rollback", 60), *found.checkpoints[2:]]
    assert POLICY.decide(replace(found, checkpoints=checkpoints)).target == "rollback"


def test_evaluations_after_a_rollback_are_not_tested_while_it_cools_down() -> None:
    levels = [*RISING[:6], 30, 28, 31, 29]
    actions = [POLICY.decide(moment(levels[:count], rollbacks=[FIRST])).action for count in range(7, 11)]
    assert actions == ["go on", "go on", "go on", "roll back"]
    hasty = replace(POLICY, cool_down=0)
    actions = [hasty.decide(moment(levels[:count], rollbacks=[FIRST])).action for count in range(7, 9)]
    # those before the rollback are never under test with those after it
    assert actions == ["go on", "roll back"]


def test_the_last_changes_serve_all_levels_above() -> None:
    rollbacks = [FIRST, replace(FIRST, level=2)]
    decision = POLICY.decide(moment([*RISING[:6], 30, 28, 31, 29], rollbacks=rollbacks))
    assert (decision.level, decision.changes) == (3, Reseed() & Scale(learning_rate=0.5))


def test_a_new_best_that_is_confirmed_begins_with_the_first_changes_again() -> None:
    rollbacks = [FIRST, replace(FIRST, level=2)]
    better = [*RISING[:6], 120, 121, 119, 120]
    assert POLICY.decide(moment([*better, 30, 31], rollbacks=rollbacks)).level == 1
    # one lucky evaluation is none
    assert POLICY.decide(moment([*RISING[:6], 70, 120, 70, 71, 30, 31], rollbacks=rollbacks)).level == 3


def test_at_the_limit_it_stops_or_goes_on_without_tests() -> None:
    found = moment([*RISING[:6], 30, 28, 31, 29], rollbacks=[FIRST] * 3)
    decision = POLICY.decide(found)
    assert decision.action == "stop"
    assert decision.reason.endswith("; the run rolled back 3 times before")
    assert replace(POLICY, max_rollbacks=4).decide(found).action == "roll back"
    once = replace(POLICY, max_rollbacks=1).decide(moment([*RISING[:6], 30, 28, 31, 29], rollbacks=[FIRST]))
    assert once.reason.endswith("; the run rolled back 1 time before")
    carefree = replace(POLICY, then="continue")
    decision = carefree.decide(found)
    assert (decision.action, decision.target) == ("go on", None)
    assert decision.reason.endswith("; max_rollbacks=3 is reached, and training goes on")
    assert decision.reason.startswith("it would once more: eval/return fell from ")
    assert carefree.decide(replace(found, non_finite="loss is nan")).reason.startswith("it would once more: loss is")
    assert carefree.decide(moment(RISING, rollbacks=[FIRST] * 3)) == GO_ON


# what must not be pruned


def test_the_target_and_what_may_become_it_are_protected() -> None:
    found = moment(RISING[:7], steps=[50, 55, 60, 65, 70, 72, 75])
    # 60 has the best score so far, 70 is the newest evaluation, and 75 is for the next one
    assert POLICY.protects(found).keys() == {"60", "70", "75"}
    assert POLICY.protects(found)["60"] == "the best confirmed by eval/return, to roll back to"
    assert POLICY.protects(RollbackMoment(5)) == {}


@pytest.mark.parametrize("target", ["best", "last"])
@pytest.mark.parametrize("patience", [2, 5, 8])
@pytest.mark.parametrize("seed", range(8))
def test_pruning_all_that_is_not_protected_changes_no_target(target: str, patience: int, seed: int) -> None:
    policy = replace(POLICY, target=target, patience=patience)
    rng = np.random.default_rng(seed)
    levels = np.concatenate(
        [np.linspace(0, 100, 12), 100 + 8 * rng.normal(size=15), [20, 25] * (patience // 2), [22] * (patience % 2)]
    )
    history = [
        Evaluation(10 * (place + 1), tuple(level + 20 * rng.normal(size=20))) for place, level in enumerate(levels)
    ]
    every: list[CheckpointFacts] = []
    kept: list[CheckpointFacts] = []
    for place, evaluation in enumerate(history):
        for step in sorted({evaluation.step - int(rng.integers(1, 9)), evaluation.step}):
            new = CheckpointFacts(str(step), step)
            every.append(new)
            known = history[: place + (step == evaluation.step)]
            # as the checkpointer does it: what is protected is asked for before the new one is there
            protected = policy.protects(RollbackMoment(step, known, False, "", [*kept, new]))
            kept = [each for each in [*kept, new] if each.id in protected]
        assert len(kept) <= patience + 2
    decided = [policy.decide(RollbackMoment(history[-1].step, history, True, "", each)) for each in (every, kept)]
    assert decided[0].action == "roll back"
    assert decided[0] == decided[1]


# arguments


@pytest.mark.parametrize(
    "policy",
    [
        RollbackPolicy("eval/return"),
        POLICY,
        RollbackPolicy("loss", mode="min", target="last", test="mann-whitney", patience=3, changes=Scale(clip=0.5)),
        RollbackPolicy("r", losses=["loss/*", "q"], min_effect=0, warm_up=0, cool_down=0, then="continue"),
    ],
    ids=repr,
)
def test_a_policy_reads_as_written_and_is_a_value(policy: RollbackPolicy) -> None:
    names = {"RollbackPolicy": RollbackPolicy, "Reseed": Reseed, "Scale": Scale}
    again = eval(repr(policy), names)
    assert again == policy
    assert hash(again) == hash(policy)


def test_losses_are_found_by_their_names() -> None:
    assert [name for name in ("loss", "train/value_loss", "losses", "eval/return") if POLICY.is_loss(name)] == [
        "loss",
        "train/value_loss",
        "losses",
    ]
    assert all(POLICY.is_loss(name) for name in ("Loss/actor", "train/Loss", "LOSS"))
    assert replace(POLICY, losses="Loss/*").is_loss("loss/q")
    picky = replace(POLICY, losses=["td", "loss/*"])
    assert [picky.is_loss(name) for name in ("td", "td_error", "loss/q", "my loss")] == [True, False, True, False]


SENSELESS = {
    "metric": ["", None, 3, ["eval/return"]],
    "mode": ["maximum", "MAX", None, True, ["max"], np.array(["max"])],
    **{key: ["first", None, 1, ["best"], np.array(["best", "last"])] for key in ("target", "test", "then")},
    **{key: [0, -1, 1.5, 2.0, True, None, "2", math.nan, [1], np.array([1])] for key in ("patience", "max_rollbacks")},
    **{key: [-1, 1.5, 0.0, False, None, "2", math.nan, [1], np.array([1])] for key in ("warm_up", "cool_down")},
    "min_effect": [1, 1.5, -0.1, math.nan, math.inf, True, None, "0.1", [0.1], 1j, np.float32("nan"), np.zeros(1)],
    "significance": [0, 1, -0.1, math.nan, math.inf, True, None, "0.1", [0.1], 1j, np.float64("nan"), np.zeros(1)],
    "changes": ["reseed", None, [], (), [Reseed(), None], {Reseed()}, Reseed, [[Reseed()]]],
    "losses": [3, None, "", [], (), [None], [""], ["*loss*", ""], {"*loss*"}, b"loss"],
}


@pytest.mark.parametrize(("key", "value"), [(key, value) for key, values in SENSELESS.items() for value in values])
def test_an_argument_without_meaning_is_refused(key: str, value: object) -> None:
    with pytest.raises(ConfigurationError) as caught:
        RollbackPolicy(**{"metric": "eval/return", key: value})
    assert caught.value.keys == (key,)


def test_numpys_scalars_are_plain_numbers() -> None:
    given = {"patience": np.int64(3), "warm_up": np.uint8(0), "min_effect": np.float32(0.5), "target": np.str_("last")}
    policy = RollbackPolicy("eval/return", **given)
    assert repr(policy) == "RollbackPolicy('eval/return', target='last', min_effect=0.5, patience=3, warm_up=0)"
    assert type(policy.min_effect) is float
