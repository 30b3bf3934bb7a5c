"""A check beside an archive pass, and beside what comes back from there, raises no false alarm."""

import pytest
from archive_helpers import RUN, archive, filled, local_seqs

from simckpt.maintenance import check as check_module
from simckpt.maintenance.check import Scope, check

STATES = 3


@pytest.mark.parametrize("looked_at", ["examine_references", "examine_arrays", "examine_segment"])
@pytest.mark.parametrize(
    ("how", "call", "when"),
    [
        ("leave", 1, "before"),
        ("leave", 2, "after"),
        ("come back", 1, "before"),
        ("come and go", 1, "before"),
        ("come and go", 1, "after"),
    ],
)
def test_what_leaves_or_comes_back_while_it_is_looked_at_is_no_damage(
    tmp_path, monkeypatch, looked_at, when, call, how
):
    files, _ = filled(tmp_path / "store", STATES)
    there = archive(files, tmp_path / "archive", 1 if how == "come back" else STATES)
    there.move()
    real, calls = getattr(check_module, looked_at), []

    def move() -> None:
        if how == "leave":
            archive(files, tmp_path / "archive", 1).move()
        elif how == "come back":
            for seq in range(1, STATES):
                there.bring_back(RUN, seq)
        elif len(calls) % 2:
            archive(files, tmp_path / "archive", 1).move()
        else:
            for seq in range(1, STATES):
                there.bring_back(RUN, seq)

    def meanwhile(*arguments, **options):
        calls.append(looked_at)
        is_now = len(calls) in ((call, call + 1) if how == "come and go" else (call,))
        if is_now and when == "before":
            move()
        found = real(*arguments, **options)
        if is_now and when == "after":
            move()
        return found

    monkeypatch.setattr(check_module, looked_at, meanwhile)
    report = check(files.path, Scope(structure=False))
    assert (report.damage, report.unchecked) == ((), ())
    expected = {"leave": {STATES}, "come back": set(range(1, STATES + 1))}
    assert len(calls) >= call
    assert local_seqs(files) == expected.get(how, local_seqs(files))
    assert report.counts.checkpoints + report.counts.archived == STATES
