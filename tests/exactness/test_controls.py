"""The suite can fail: restores damaged in known ways are noticed."""

import pytest

from tests.exactness.cases import case
from tests.exactness.suite import Suite

pytestmark = pytest.mark.filterwarnings(r"ignore:.{0,8}WARN")


def assert_damage_is_noticed(suite: Suite, env_id: str, damage: str, **settings: object) -> None:
    """Fails unless the damaged restore differs, and differs in what the env returns.

    That the exact one passes is what `test_single.py` shows of the same envs.
    """
    answer = suite.compare(case(env_id, damage=damage, **settings))
    assert answer.count > 0
    assert any(name in line for line in answer.first for name in ("observations", "rewards", "info")), answer.first


@pytest.mark.parametrize(
    "env_id",
    [
        "Ant-v5",
        "Humanoid-v5",
        "Reacher-v4",
        "simckpt/ActuatorDelay-v0",
        "simckpt/IpcFlex-v0",
        "simckpt/MocapSwitch-v0",
        "simckpt/Sleep-v0",
        "simckpt/SpringYield-v0",
    ],
)
def test_restoring_positions_and_velocities_alone_is_noticed(suite: Suite, env_id: str) -> None:
    assert_damage_is_noticed(suite, env_id, "positions")


@pytest.mark.parametrize("env_id", ["Ant-v5", "Humanoid-v5", "Reacher-v4", "simckpt/IpcFlex-v0", "simckpt/Sleep-v0"])
def test_restoring_the_integration_state_alone_is_noticed(suite: Suite, env_id: str) -> None:
    assert_damage_is_noticed(suite, env_id, "integration")


@pytest.mark.parametrize("env_id", ["simckpt/ModelAtReset-v0", "simckpt/ModelMidEpisode-v0", "AdroitHandDoor-v1"])
def test_forgetting_the_model_is_noticed(suite: Suite, env_id: str) -> None:
    assert_damage_is_noticed(suite, env_id, "model")


@pytest.mark.parametrize(
    "env_id",
    [
        "simckpt/ControlCallback-v0",
        "simckpt/ControlClosure-v0",
        "simckpt/DictSpace-v0",
        "simckpt/HiddenPython-v0",
        "simckpt/OwnStateDict-v0",
        "simckpt/TorchState-v0",
    ],
)
def test_forgetting_python_state_is_noticed(suite: Suite, env_id: str) -> None:
    assert_damage_is_noticed(suite, env_id, "python")


def test_forgetting_a_pending_autoreset_is_noticed(suite: Suite) -> None:
    suite.assert_exact(case("Hopper-v5", vectorization="sync", moment="terminal"))
    assert_damage_is_noticed(suite, "Hopper-v5", "autoreset", vectorization="sync", moment="terminal")
