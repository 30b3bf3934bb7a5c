"""Snapshots used within one process: going back, branching, and what must stay untouched."""

import copy

import numpy as np
import pytest

from tests.exactness import bits, harness
from tests.exactness.cases import build, case
from tests.exactness.harness import Driver, Recording

pytestmark = pytest.mark.filterwarnings(r"ignore:.{0,8}WARN")

CASES = [
    case("Ant-v5", chain=True),
    case("simckpt/HiddenPython-v0"),
    case("simckpt/Sleep-v0"),
    case("Ant-v5", chain=True, outside=True, vectorization="sync"),
    case("Ant-v5", outside=True, vectorization="async"),
]
by_case = pytest.mark.parametrize("case", CASES, ids=str)


def resumed_driver(env: object, case: harness.Case, recording: Recording) -> Driver:
    """Returns a driver that stands where the recorded run took its snapshot."""
    harness.apply(env, case, recording)
    driver = Driver(env, case)
    driver.skip_actions(recording.actions_played)
    driver.over = copy.copy(recording.over)
    return driver


@by_case
def test_env_goes_back_in_place_again_and_again(case: harness.Case) -> None:
    recording = harness.record(case)
    env = build(case)
    try:
        harness.make_dirty(env, case)
        for _ in range(2):
            driver = resumed_driver(env, case, recording)
            harness.go_on(driver, case)
            assert not list(bits.differences(recording.expected, driver.log))
    finally:
        env.close()


@by_case
def test_two_envs_from_one_snapshot_do_not_disturb_each_other(case: harness.Case) -> None:
    recording = harness.record(case)
    first, second = build(case), build(case)
    try:
        harness.make_dirty(first, case)
        harness.make_dirty(second, case)
        one = resumed_driver(first, case, recording)
        other = resumed_driver(second, case, recording)
        one.look()
        for _ in range(case.steps // 2):
            one.step()
        harness.go_on(other, case)
        for _ in range(case.steps - case.steps // 2):
            one.step()
        assert not list(bits.differences(recording.expected, other.log))
        assert not list(bits.differences(recording.expected[: len(one.log)], one.log))
    finally:
        first.close()
        second.close()


@by_case
def test_restore_leaves_returned_observations_alone(case: harness.Case) -> None:
    recording = harness.record(case)
    env = build(case)
    try:
        env.reset(seed=4)
        observations = env.step(env.action_space.sample())[0]
        before = np.array(observations)
        harness.apply(env, case, recording)
        assert np.array(observations).tobytes() == before.tobytes()
    finally:
        env.close()
