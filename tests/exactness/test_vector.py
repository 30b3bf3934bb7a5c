"""Vector envs: in one process and in workers, in every autoreset mode, with wrappers inside and outside."""

import itertools
from collections.abc import Sequence
from typing import Any

import pytest

from simckpt.errors import UnsupportedStateError
from simckpt.sim import handle_for
from tests.exactness.cases import AUTORESET_MODES, VECTORIZATIONS, build, case, gymnasium_mujoco_ids
from tests.exactness.suite import Suite
from tests.exactness.test_single import BITING, CAPTURABLE

pytestmark = pytest.mark.filterwarnings(r"ignore:.{0,8}WARN")

MOMENTS = ("odd", "fresh", "reset", "terminal")
# the wrappers of the chain and those outside want observations that are one array
FLAT = sorted(set(CAPTURABLE) - {"simckpt/DictSpace-v0", "simckpt/Image-v0"})


def equal_twins(vectorization: str, *ids: str) -> bool:
    """Returns whether two runs equal each other: Python reseeds `random` from the system in each forked worker."""
    return vectorization == "sync" or "simckpt/GlobalRandom-v0" not in ids


def squared(*axes: Sequence[Any]) -> list[Any]:
    """Returns all combinations of three values each of three axes; all but a Latin square of them are slow.

    In the square every two values of two axes meet once.
    """
    return [
        pytest.param(*values, marks=[] if sum(places) % 3 == 0 else pytest.mark.slow)
        for places, values in (
            zip(*combination, strict=True) for combination in itertools.product(*(enumerate(axis) for axis in axes))
        )
    ]


by_vectorization = pytest.mark.parametrize("vectorization", VECTORIZATIONS)
by_autoreset = pytest.mark.parametrize("autoreset", AUTORESET_MODES)
by_wrapping = pytest.mark.parametrize("wrapped", [False, True], ids=["plain", "wrapped"])


@pytest.mark.parametrize(
    ("vectorization", "autoreset", "env"),
    squared(VECTORIZATIONS, AUTORESET_MODES, ["Ant-v5 wrapped", "Ant-v5", "Walker2d-v5 wrapped"]),
)
def test_vector_env_goes_on_exactly(suite: Suite, vectorization: str, autoreset: str, env: str) -> None:
    env_id, _, wrapping = env.partition(" ")
    wrapped = bool(wrapping)
    settings = {"vectorization": vectorization, "autoreset": autoreset, "chain": wrapped, "outside": wrapped}
    suite.assert_exact(case(env_id, **settings))


@pytest.mark.parametrize(
    ("vectorization", "autoreset", "moment"), squared(VECTORIZATIONS, AUTORESET_MODES, ["fresh", "reset", "terminal"])
)
def test_moment_of_the_snapshot_does_not_matter(suite: Suite, vectorization: str, autoreset: str, moment: str) -> None:
    settings = {"vectorization": vectorization, "autoreset": autoreset, "moment": moment}
    suite.assert_exact(case("Ant-v5", outside=True, **settings))


@by_vectorization
@pytest.mark.parametrize("env_id", ["Reacher-v4", "Humanoid-v5", "CartPole-v1"])
def test_other_envs_go_on_exactly(suite: Suite, env_id: str, vectorization: str) -> None:
    suite.assert_exact(case(env_id, vectorization=vectorization, outside=True))


# what workers send is the same with pipes: there a few kinds are enough, and `make test-slow` has all
PIPED = ("simckpt/DictSpace-v0", "simckpt/HiddenPython-v0", "simckpt/Image-v0", "simckpt/OwnStateDict-v0")


@pytest.mark.parametrize(
    ("env_id", "vectorization"),
    [
        pytest.param(env_id, name, marks=[] if name != "async_pipes" or env_id in PIPED else pytest.mark.slow)
        for env_id in sorted(set(CAPTURABLE) - {"simckpt/ControlCallback-v0", "simckpt/ControlClosure-v0"})
        for name in VECTORIZATIONS
    ],
)
def test_envs_with_hidden_state_go_on_exactly(suite: Suite, env_id: str, vectorization: str) -> None:
    # forked workers would inherit the parent's OpenGL without its threads, and wait for them for ever
    context = "spawn" if env_id == "simckpt/Image-v0" else None
    settings = {"context": context, "twins": equal_twins(vectorization, env_id)}
    suite.assert_exact(case(env_id, vectorization=vectorization, **settings))


@by_vectorization
def test_control_callback_of_one_env_goes_on_exactly(suite: Suite, vectorization: str) -> None:
    # one per process: mjcb_control is global
    num_envs = 1 if vectorization == "sync" else 2
    suite.assert_exact(case("simckpt/ControlClosure-v0", vectorization=vectorization, num_envs=num_envs))


@pytest.mark.parametrize("moment", MOMENTS)
def test_env_that_is_a_vector_itself_goes_on_exactly(suite: Suite, moment: str) -> None:
    suite.assert_exact(case("CartPole-v1", vectorization="entry_point", moment=moment))


@by_vectorization
def test_envs_of_different_classes_go_on_exactly(suite: Suite, vectorization: str) -> None:
    ids = ("simckpt/HiddenPython-v0", "simckpt/GlobalRandom-v0", "simckpt/OwnStateDict-v0")
    suite.assert_exact(case(*ids, vectorization=vectorization, twins=equal_twins(vectorization, *ids)))


@by_vectorization
def test_vector_env_that_cannot_be_captured_is_refused_by_name(vectorization: str) -> None:
    envs = build(case("simckpt/PythonGenerator-v0", vectorization=vectorization))
    try:
        envs.reset(seed=0)
        with pytest.raises(UnsupportedStateError, match="pushes"):
            handle_for(envs).capture()
        envs.step(envs.action_space.sample())
    finally:
        envs.close()


@pytest.mark.slow
@by_wrapping
@by_autoreset
@by_vectorization
@pytest.mark.parametrize("env_id", [*gymnasium_mujoco_ids(), *FLAT])
def test_every_vector_env(suite: Suite, env_id: str, vectorization: str, autoreset: str, wrapped: bool) -> None:
    num_envs = 1 if env_id.startswith("simckpt/Control") and vectorization == "sync" else 3
    settings = {"vectorization": vectorization, "autoreset": autoreset, "chain": wrapped, "outside": wrapped}
    suite.assert_exact(case(env_id, num_envs=num_envs, twins=equal_twins(vectorization, env_id), **settings))


@pytest.mark.slow
@pytest.mark.parametrize("moment", MOMENTS)
@by_wrapping
@by_autoreset
@by_vectorization
@pytest.mark.parametrize("env_id", BITING)
def test_every_combination_of_biting_envs(
    suite: Suite, env_id: str, vectorization: str, autoreset: str, wrapped: bool, moment: str
) -> None:
    settings = {"vectorization": vectorization, "autoreset": autoreset, "chain": wrapped, "outside": wrapped}
    suite.assert_exact(case(env_id, moment=moment, **settings))
