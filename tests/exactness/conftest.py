"""Fixtures of the exactness suite: one fresh process for all cases of a session."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.exactness.suite import FreshProcess, Suite


@pytest.fixture(scope="session")
def fresh_process() -> Iterator[FreshProcess]:
    process = FreshProcess()
    yield process
    process.close()


@pytest.fixture
def suite(fresh_process: FreshProcess, tmp_path: Path) -> Suite:
    return Suite(fresh_process, tmp_path)
