"""SIGKILL of the mover at its requests, and that the harness catches movers that are broken on purpose."""

import pytest
from kills import VARIANTS, kill_at_every_request


def test_a_mover_killed_at_some_requests_loses_nothing(tmp_path):
    tried, losses = kill_at_every_request(tmp_path, every=31)
    assert losses == []
    assert tried >= 2


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_mover_killed_at_any_request_loses_nothing(tmp_path):
    tried, losses = kill_at_every_request(tmp_path)
    assert losses == []
    assert tried > 80


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("variant", ["commit object first", "remove content before the tombstone"])
def test_a_mover_in_the_wrong_order_is_caught_by_kills(tmp_path, variant):
    _, losses = kill_at_every_request(tmp_path, variant=variant)
    assert losses != []


def test_a_mover_that_reads_nothing_back_is_caught_by_a_server_that_damages(tmp_path):
    tried, losses = kill_at_every_request(tmp_path / "good", fault="flip")
    assert tried > 0
    assert losses == []
    tried, losses = kill_at_every_request(tmp_path / "bad", variant="evict before read back")
    assert losses != []
    assert set(VARIANTS) >= {"evict before read back"}
