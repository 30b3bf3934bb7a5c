"""Recordings from strangers: whatever they hold, what reads them refuses it in words, or reads what is there."""

import pytest
import session_suite


@pytest.mark.parametrize("count", [4, pytest.param(500, marks=pytest.mark.slow)])
def test_mutants_of_a_recording_are_read_or_refused(tmp_path, count) -> None:
    outcome = session_suite.run(tmp_path, dict.fromkeys(session_suite.KINDS, count), seed=count)
    assert outcome.tried == 3 * count
    assert outcome.refused > count // 4
    assert (outcome.faults, outcome.foreign) == ([], [])
