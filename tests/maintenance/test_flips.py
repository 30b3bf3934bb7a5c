"""No single flipped bit goes unnoticed."""

from flips import count_flips
from maintenance_helpers import everything

from simckpt.maintenance import verifying


def test_no_flipped_bit_goes_unnoticed(store):
    before = {name: data for name, (data, _) in everything(store.path).items()}
    found = count_flips(store, 1200)
    assert sum(tried for tried, _ in found.values()) == 1200
    assert all(tried > 20 for tried, _ in found.values())
    assert {name: missed for name, (_, missed) in found.items()} == {"payload": 0, "metadata": 0, "records": 0}
    assert {name: data for name, (data, _) in everything(store.path).items()} == before


def test_the_count_would_see_a_digest_that_nobody_compares(store, monkeypatch):
    monkeypatch.setattr(verifying, "_holds", lambda *arguments: True)
    found = count_flips(store, 240)
    assert found["payload"][1] == found["payload"][0] > 0
    assert found["records"][1] == 0
