"""The fixture that runs ranks."""

from collections.abc import Iterator

import pytest
from ranks import Ranks


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    """Starts ranks; the process that forks them imports torch once."""
    started = Ranks()
    yield started
    started.close()
