import pytest

from simckpt.errors import ConfigurationError
from simckpt.policies import AtSteps, EverySteps, Moment


def due_steps(policy, calls: range) -> list[int]:
    """Drives a policy the way a checkpointer does, and returns the steps at which it saved."""
    saved, previous = [], 0
    for step in calls:
        if policy.decide(Moment(step, previous)).due:
            saved.append(step)
            previous = step
    return saved


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


def test_at_steps_saves_when_passed_and_only_once() -> None:
    assert due_steps(AtSteps(250, 700), range(100, 1001, 100)) == [300, 700]


def test_either_and_both() -> None:
    assert due_steps(EverySteps(400) | AtSteps(1000), range(100, 1001, 100)) == [400, 800, 1000]
    assert due_steps(EverySteps(200) & EverySteps(300), range(100, 1001, 100)) == [300, 600, 900]


def test_the_reasons_of_all_policies_that_are_due_are_given() -> None:
    decision = (EverySteps(10) | AtSteps(10)).decide(Moment(10, 0))
    assert decision.reason == "passed a multiple of 10 steps; passed step 10"


@pytest.mark.parametrize("steps", [0, -1, 1.5, True, None])
def test_a_senseless_interval_is_refused(steps: object) -> None:
    with pytest.raises(ConfigurationError):
        EverySteps(steps)
