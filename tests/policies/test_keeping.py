import pytest

from simckpt.errors import ConfigurationError
from simckpt.policies import CheckpointFacts, KeepAll, KeepLast

# the same step twice and steps that go back, as after a rollback: order is commit order
CHECKPOINTS = [CheckpointFacts(str(place), step) for place, step in enumerate([10, 20, 30, 20, 25])]


def test_keep_last_goes_by_commit_order_and_not_by_step() -> None:
    assert set(KeepLast(2).keep(CHECKPOINTS)) == {"3", "4"}


def test_keep_last_keeps_all_where_there_are_fewer() -> None:
    assert set(KeepLast(9).keep(CHECKPOINTS)) == {"0", "1", "2", "3", "4"}


def test_what_any_policy_keeps_stays_with_both_reasons() -> None:
    kept = (KeepLast(1) | KeepAll()).keep(CHECKPOINTS)
    assert len(kept) == 5
    assert kept["4"] == "among the last 1; all are kept"


@pytest.mark.parametrize("count", [0, -3, True, 1.0])
def test_a_senseless_count_is_refused(count: object) -> None:
    with pytest.raises(ConfigurationError):
        KeepLast(count)
