"""The same through a real store: saved by a run's checkpointer, restored by the run that another process starts."""

import pytest

from tests.exactness.cases import Case, case
from tests.exactness.suite import Suite

pytestmark = pytest.mark.filterwarnings(r"ignore:.{0,8}WARN")

CASES = [
    case("Ant-v5", chain=True),
    case("Ant-v5", chain=True, moment="fresh"),
    case("Reacher-v4"),
    case("simckpt/DictSpace-v0"),
    case("simckpt/GlobalRandom-v0"),
    case("simckpt/HiddenPython-v0"),
    case("simckpt/ModelAtReset-v0"),
    case("simckpt/Sleep-v0"),
    case("simckpt/TorchState-v0"),
    case("Ant-v5", vectorization="sync", chain=True, outside=True),
    case("Ant-v5", vectorization="async", chain=True, outside=True, moment="terminal"),
    case("simckpt/HiddenPython-v0", "simckpt/OwnStateDict-v0", vectorization="async"),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_run_resumed_from_its_store_goes_on_exactly(suite: Suite, case: Case) -> None:
    suite.assert_exact(case, in_store=True)
