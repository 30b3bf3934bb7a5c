"""Checks of what users give to calls that branch; what each call refuses is in the tests of the calls."""

import math

import pytest

from simckpt.branching.arguments import check_times
from simckpt.branching.engines import LocalEngine
from simckpt.errors import ConfigurationError


@pytest.mark.parametrize("times", [(None, None), (1, 1), (0.001, 1.0), (1e9, 1e9)], ids=str)
def test_times_that_make_sense_are_taken(times: tuple[float | None, float | None]) -> None:
    check_times(*times)


@pytest.mark.parametrize(
    ("times", "bound"),
    [((0, 1), "above 0, got 0"), ((1, math.nextafter(1, 0)), "of at least 1, got 0.99"), ((None, math.inf), "got inf")],
    ids=["deadline", "heartbeat", "infinite"],
)
def test_the_bound_of_a_time_is_told(times: tuple[float | None, float | None], bound: str) -> None:
    with pytest.raises(ConfigurationError, match=bound):
        check_times(*times)


def test_an_engine_may_kill_at_once() -> None:
    LocalEngine(1, grace=0).close()
