"""The texts that explain the state of envs."""

import gymnasium as gym
import mujoco
import pytest

from envs.ipc_flex import IpcFlexEnv
from simckpt.sim import descriptions
from simckpt.sim.physics import Physics

EVERYTHING = """
<mujoco>
  <option><flag energy="enable"/></option>
  <size nuserdata="3"/>
  <worldbody>
    <body name="ball" pos="0 0 .3"><freejoint/><geom size=".1"/><site name="a"/><camera name="eye"/><light/></body>
    <body name="pole" pos="1 0 1"><joint name="hinge"/><geom size=".1"/><site name="b" pos=".2 0 0"/></body>
    <body name="target" mocap="true"><geom size=".01" contype="0"/></body>
  </worldbody>
  <tendon><spatial name="rope"><site site="a"/><site site="b"/></spatial></tendon>
  <actuator><intvelocity joint="hinge" kp="1" actrange="-1 1"/></actuator>
  <equality><weld body1="ball" body2="target"/></equality>
  <sensor><framepos objtype="body" objname="ball"/></sensor>
</mujoco>
"""
CONSTANTS = {"mjNISLAND": mujoco.mjNISLAND, "mjNWARNING": int(mujoco.mjtWarning.mjNWARNING)}


def simulation(name: str) -> mujoco.MjData:
    if name == "everything":
        return mujoco.MjData(mujoco.MjModel.from_xml_string(EVERYTHING))
    env = IpcFlexEnv() if name == "flex" else gym.make(name)
    data = env.unwrapped.data
    env.close()
    return data


@pytest.mark.parametrize("name", ["Ant-v5", "Humanoid-v5", "flex", "everything"])
def test_every_stored_field_is_explained_and_its_axes_are_the_models_sizes(name: str) -> None:
    data = simulation(name)
    state = Physics(data).capture()
    texts = descriptions.explain([f"physics/{field}" for field in state], vector=False)
    for field, array in state.items():
        attributes = texts[f"physics/{field}"]
        assert attributes["description"], field
        axes = attributes["axes"].split(", ") if "axes" in attributes else []
        sizes = tuple(
            int(axis) if axis.isdigit() else CONSTANTS.get(axis) or getattr(data.model, axis) for axis in axes
        )
        assert sizes == array.shape, f"{field}: {axes}"


def test_the_first_axis_of_joined_envs_is_named() -> None:
    texts = descriptions.explain(["physics/qpos", "physics/time", "physics_2/qpos"], vector=True)
    assert texts["physics/qpos"]["axes"] == "num_envs, nq"
    assert texts["physics/time"]["axes"] == "num_envs"
    assert texts["physics_2/qpos"]["axes"] == "num_envs, nq"
    assert "Simulation 2" in texts["physics_2"]["description"]


def test_a_field_that_is_kept_for_each_env_has_no_axis_of_envs() -> None:
    texts = descriptions.explain(["physics/env_0/qpos"], vector=True)
    assert texts["physics/env_0/qpos"]["axes"] == "nq"


def test_what_nobody_knows_is_left_without_texts() -> None:
    texts = descriptions.explain(["physics/unheard_of", "elsewhere/x", "vector/elsewhere"], vector=True)
    assert set(texts) == {"", "physics", "vector"}
