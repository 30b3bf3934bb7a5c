"""The second environment: an older MuJoCo with gymnasium-robotics and dm_control, and no torch."""

import importlib.util

import pytest

import envs
from simckpt.errors import SimckptError
from tests.exactness.cases import case, gymnasium_mujoco_ids
from tests.exactness.suite import Suite

pytestmark = [pytest.mark.compat, pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")]

ROBOTICS = (
    "FetchPickAndPlace-v4",
    "FetchPush-v4",
    "FetchReach-v4",
    "FetchSlide-v4",
    "HandReach-v3",
    "HandManipulateBlock-v1",
    "FrankaKitchen-v1",
    "AdroitHandDoor-v1",
    "AdroitHandHammer-v1",
    "AdroitHandPen-v1",
    "AdroitHandRelocate-v1",
    "AntMaze_UMaze-v5",
    "PointMaze_UMaze-v3",
)
# they draw parts of their model at every reset (reacher, fish, finger, swimmer, stacker, manipulator, point_mass, lqr,
# quadruped-escape), or feed the contacts of one step into the next (the walkers)
DM_CONTROL = (
    "dm_control/reacher-easy-v0",
    "dm_control/fish-swim-v0",
    "dm_control/finger-turn_hard-v0",
    "dm_control/swimmer-swimmer6-v0",
    "dm_control/stacker-stack_2-v0",
    "dm_control/manipulator-bring_ball-v0",
    "dm_control/manipulator-insert_peg-v0",
    "dm_control/point_mass-hard-v0",
    "dm_control/lqr-lqr_2_1-v0",
    "dm_control/quadruped-escape-v0",
    "dm_control/quadruped-walk-v0",
    "dm_control/walker-walk-v0",
    "dm_control/hopper-hop-v0",
    "dm_control/humanoid-walk-v0",
    "dm_control/humanoid_CMU-run-v0",
    "dm_control/dog-walk-v0",
    "dm_control/cheetah-run-v0",
    "dm_control/ball_in_cup-catch-v0",
)
MOMENTS = ("odd", "fresh", "reset", "terminal")


def test_torch_is_not_installed() -> None:
    assert importlib.util.find_spec("torch") is None


@pytest.mark.parametrize("env_id", [*ROBOTICS, *DM_CONTROL])
def test_env_goes_on_exactly(suite: Suite, env_id: str) -> None:
    # lqr draws its springs from the system's entropy when it is constructed
    suite.assert_exact(case(env_id, twins=not env_id.startswith("dm_control/lqr")))


@pytest.mark.parametrize("moment", ["fresh", "reset", "terminal"])
@pytest.mark.parametrize(
    "env_id",
    ["FetchPickAndPlace-v4", "FrankaKitchen-v1", "dm_control/reacher-easy-v0", "dm_control/walker-walk-v0"],
)
def test_moment_of_the_snapshot_does_not_matter(suite: Suite, env_id: str, moment: str) -> None:
    suite.assert_exact(case(env_id, moment=moment))


@pytest.mark.parametrize("vectorization", ["sync", "async", "async_pipes"])
@pytest.mark.parametrize("autoreset", ["NEXT_STEP", "SAME_STEP"])
@pytest.mark.parametrize("env_id", ["FetchPickAndPlace-v4", "dm_control/walker-walk-v0", "dm_control/reacher-easy-v0"])
def test_vector_env_goes_on_exactly(suite: Suite, env_id: str, vectorization: str, autoreset: str) -> None:
    suite.assert_exact(case(env_id, vectorization=vectorization, autoreset=autoreset))


@pytest.mark.parametrize("env_id", [*gymnasium_mujoco_ids(), *sorted(set(envs.ENTRY_POINTS) - envs.UNCAPTURABLE)])
def test_older_mujoco_runs_the_same_envs(suite: Suite, env_id: str) -> None:
    suite.assert_exact(case(env_id))


@pytest.mark.parametrize("env_id", ["FetchPickAndPlace-v4"])
@pytest.mark.parametrize("damage", ["positions", "integration"])
def test_naive_restore_of_the_physics_is_noticed(suite: Suite, env_id: str, damage: str) -> None:
    assert suite.compare(case(env_id, damage=damage)).count > 0


def test_walls_that_change_the_model_go_on_exactly(suite: Suite) -> None:
    # it renders its observations, which is slow without a graphics card
    suite.assert_exact(case("dm_control/CmuHumanoidRunWalls-v0", at=37, steps=20))


def test_env_that_swaps_in_another_model_is_refused_with_a_clear_error(suite: Suite) -> None:
    with pytest.raises((SimckptError, RuntimeError), match=r"ngeom|nbvh|model|size"):
        suite.compare(case("dm_control/CmuHumanoidRunGaps-v0", at=37, steps=20))
