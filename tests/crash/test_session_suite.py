"""The suite of `make reliability` on recordings, in small; all of what it has to notice in `make test-slow`."""

from pathlib import Path

import pytest
import suite_sessions
from reliability import Tally
from suite_sessions import LIVES, MODES


def quiet(text: str) -> None:
    pass


def test_refusals_kills_and_lies_at_some_operations_break_nothing(tmp_path: Path) -> None:
    for suite, least in (
        (suite_sessions.refusals, 2 * len(MODES)),
        (suite_sessions.kills, len(LIVES)),
        (suite_sessions.lies, len(LIVES)),
    ):
        tally = suite(tmp_path, 1, quiet)
        assert tally.tried >= least
        assert tally.examples == []


def test_power_failures_at_some_moments_lose_nothing_that_was_promised(tmp_path: Path) -> None:
    recording = suite_sessions.recorded(tmp_path, "closing and removing")
    tally = Tally()
    for what, attempt in suite_sessions.cut(recording, tmp_path, relaxed=False, samples=1, share=0.1):
        tally.attempt(what, attempt)
    assert tally.tried >= 20
    assert tally.examples == []


def test_a_sync_that_is_missing_is_noticed(tmp_path: Path) -> None:
    assert suite_sessions._without_sync(tmp_path, "a recording", "part.json")


@pytest.mark.slow
def test_all_that_the_suite_has_to_notice_is_noticed(tmp_path: Path) -> None:
    noticed = suite_sessions.mutants(tmp_path, quiet)
    assert noticed == dict.fromkeys(noticed, True)
