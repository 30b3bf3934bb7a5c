"""What a run's record says of where the run comes from; and a rollback in commit records and tombstones."""

from dataclasses import replace

import pytest
from storage_helpers import RUN_ID, run_record

from simckpt.errors import ConfigurationError, FormatError
from simckpt.storage import BranchRecord, CommitRecord, ImportRecord, sealed
from simckpt.storage.records import COMMIT_LIMIT, parse_commit, tombstone_of
from simckpt.storage.run_records import parse_run

BRANCH = BranchRecord("ant-ppo", 3, 411, {"learning_rate": float("inf"), "layers": (64, 32), "clip": None}, "reseed")
ROLLBACK = {
    "abandoned": "b" * 32,
    "level": 2,
    "changes": {"description": "Scale(learning_rate=0.5)", "hyperparameters": {"learning_rate": 1e-4}},
    "reason": "it fell",
}


def commit(**changes: object) -> CommitRecord:
    fields = {
        "id": "a" * 32,
        "run": RUN_ID,
        "seq": 4,
        "parent": "c" * 32,
        "kind": "rollback",
        "step": 5,
        "created": 1.0,
    }
    return CommitRecord(**{**fields, "rollback": ROLLBACK, **changes})


def resealed(data: bytes, **changes: object) -> bytes:
    """A record with other fields and a right digest."""
    fields = sealed.unseal(data, "run", path="p").content
    return sealed.seal("run", {key: value for key, value in {**fields, **changes}.items() if key not in _OWN})


_OWN = ("format", "version", "digest")


def test_a_branch_and_an_import_come_back_as_they_were_written():
    for record in (
        run_record(),
        run_record(origin="d" * 32, branch=BRANCH),
        run_record(imported=ImportRecord("e" * 32, "other", "d" * 32)),
    ):
        assert parse_run(record.to_bytes(), "p") == record


def test_a_record_from_before_branches_has_none():
    record = run_record(origin="d" * 32)
    fields = sealed.unseal(record.to_bytes(), "run", path="p").content
    old = {key: value for key, value in fields.items() if key not in (*_OWN, "branch", "imported")}
    assert parse_run(sealed.seal("run", old), "p") == record


@pytest.mark.parametrize(
    "changes",
    [
        {"origin": None},
        {"branch": []},
        {"branch": {"run": "../a", "seq": 3, "step": 411, "overrides": {}, "rng": "reseed"}},
        {"branch": {"run": "a", "seq": 0, "step": 411, "overrides": {}, "rng": "reseed"}},
        {"branch": {"run": "a", "seq": 3, "step": -1, "overrides": {}, "rng": "reseed"}},
        {"branch": {"run": "a", "seq": 3, "step": 411, "overrides": [], "rng": "reseed"}},
        {"branch": {"run": "a", "seq": 3, "step": 411, "overrides": {}, "rng": "copy"}},
        {"branch": {"run": "a", "seq": 3, "step": 411, "overrides": {}}},
        {"imported": {"store": "e" * 32, "run": "a", "checkpoint": "x"}},
        {"imported": {"store": "e" * 32, "run": "a/b", "checkpoint": "d" * 32}},
    ],
    ids=[
        "no origin",
        "no object",
        "path",
        "number",
        "step",
        "overrides",
        "rng",
        "no rng",
        "id",
        "name",
    ],
)
def test_a_record_that_breaks_a_rule_is_refused(changes):
    data = run_record(origin="d" * 32, branch=BRANCH).to_bytes()
    with pytest.raises(FormatError):
        parse_run(resealed(data, **changes), "p")


def test_no_record_is_written_that_no_reader_would_take():
    with pytest.raises(ConfigurationError, match="origin"):
        run_record(branch=BRANCH).to_bytes()
    with pytest.raises(ConfigurationError, match="override 'x'"):
        run_record(origin="d" * 32, branch=replace(BRANCH, overrides={"x": object()})).to_bytes()


def test_a_rollback_comes_back_from_a_commit_and_from_its_tombstone():
    record = commit()
    assert parse_commit(record.to_bytes(), "p", seq=4) == record
    tombstone = tombstone_of(record, pruned=2.0, reason="old")
    assert tombstone.rollback == ROLLBACK
    assert parse_commit(tombstone.to_bytes(), "p", seq=4) == tombstone
    other = tombstone_of(commit(kind="save", rollback=None), pruned=2.0, reason="old")
    assert b"rollback" not in other.to_bytes()


def test_the_tombstone_of_the_largest_rollback_keeps_it_and_fits():
    reason = "x" * 2000
    while len(commit(rollback={**ROLLBACK, "reason": reason}).to_bytes()) < COMMIT_LIMIT - 4:
        reason += "x"
    tombstone = tombstone_of(commit(rollback={**ROLLBACK, "reason": reason}), pruned=2.0, reason="y" * 5000)
    assert len(tombstone.to_bytes()) <= COMMIT_LIMIT
    assert tombstone.rollback == {**ROLLBACK, "reason": reason}
