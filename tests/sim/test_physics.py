"""MuJoCo state and model fields: exact, in place, refused when they do not fit."""

import mujoco
import numpy as np
import pytest

from simckpt.errors import UnsupportedStateError
from simckpt.sim.model import ModelAccess, shared_baseline
from simckpt.sim.physics import Physics

PENDULUM = """
<mujoco>
  <option timestep="0.01"/>
  <worldbody>
    <geom name="floor" type="plane" size="1 1 .1"/>
    <body name="pole" pos="0 0 1"><joint name="hinge" axis="0 1 0"/><geom name="rod" size=".1" pos=".5 0 0"/></body>
    <body name="ball" pos="0 0 .3"><freejoint/><geom name="ball" size=".1"/></body>
    <body name="target" mocap="true"><geom size=".01" contype="0"/></body>
  </worldbody>
  <actuator><motor joint="hinge"/></actuator>
  <sensor><framepos objtype="geom" objname="ball"/></sensor>
</mujoco>
"""


def make(xml=PENDULUM, steps=0, control=0.3):
    model = mujoco.MjModel.from_xml_string(xml)
    data = mujoco.MjData(model)
    for _ in range(steps):
        data.ctrl[:] = control
        mujoco.mj_step(model, data)
    return data


def run(data, steps):
    rows = []
    for step in range(steps):
        # derived fields are read before the step: they must be as stale as they were
        rows.append((data.xpos.tobytes(), data.cvel.tobytes(), data.sensordata.tobytes()))
        data.ctrl[:] = np.sin(step)
        mujoco.mj_step(data.model, data)
        rows.append((data.qpos.tobytes(), data.qvel.tobytes(), data.time))
    return rows


def restore(source, target):
    saved = Physics(source)
    state, model, baseline = saved.capture(), saved.capture_model(), saved.baseline.fields
    physics = Physics(target)
    assert physics.problems(state, model, baseline) == []
    physics.apply(state, model, baseline)
    return physics


def test_a_dirtied_simulation_continues_bit_for_bit():
    source, target = make(steps=137), make(steps=11, control=-1)
    source.mocap_pos[0] = 1, 2, 3
    source.xfrc_applied[1] = 0.1
    restore(source, target)
    assert run(target, 60) == run(source, 60)


def test_every_field_is_equal_after_the_restore():
    source, target = make(steps=50), make(steps=3, control=-1)
    physics = restore(source, target)
    after, before = physics.capture(), Physics(source).capture()
    assert after.keys() == before.keys()
    assert [name for name in before if after[name].tobytes() != before[name].tobytes()] == []
    assert {"qpos", "qacc_warmstart", "time", "flg_rnepost", "xpos", "mocap_pos"} <= before.keys()


def test_the_live_objects_and_their_arrays_stay():
    source, target = make(steps=50), make()
    model, qpos, mass = target.model, target.qpos, target.model.body_mass
    source.model.body_mass[1] *= 2
    restore(source, target)
    assert target.model is model
    assert qpos is target.qpos
    assert mass is target.model.body_mass
    assert mass.tobytes() == source.model.body_mass.tobytes()


def test_a_snapshot_shares_no_memory_with_the_simulation():
    data = make(steps=5)
    physics = Physics(data)
    state, model, expected = physics.capture(), physics.capture_model(), run(data, 20)
    data.model.body_mass[:] *= 3
    physics.apply(state, model, physics.baseline.fields)
    assert run(data, 20) == expected


def test_capturing_changes_nothing():
    source, twin = make(steps=5), make(steps=5)
    physics = Physics(source)
    rows = []
    for _ in range(30):
        physics.capture()
        physics.capture_model()
        rows += run(source, 1)
    expected = [row for _ in range(30) for row in run(twin, 1)]
    assert rows == expected


@pytest.mark.parametrize(
    "edit",
    [
        lambda m: m.body_mass.__setitem__(1, 9.0),
        lambda m: m.geom_friction.__setitem__((0, 0), 0.1),
        lambda m: setattr(m.opt, "timestep", 0.02),
        lambda m: m.opt.gravity.__setitem__(2, -3.0),
        lambda m: setattr(m.opt, "integrator", 1),
        lambda m: setattr(m.stat, "extent", 7.0),
        lambda m: setattr(m.vis.map, "force", 0.5),
        lambda m: m.vis.rgba.haze.__setitem__(0, 0.25),
        lambda m: m.jnt_limited.__setitem__(0, True),
        lambda m: setattr(m.opt, "disableflags", 16),
    ],
)
def test_an_edit_of_the_model_is_the_difference_and_is_undone_and_redone(edit):
    data = make(steps=20)
    physics = Physics(data)
    assert physics.capture_model()["difference"] == {}
    plain, plain_model = physics.capture(), physics.capture_model()
    edit(data.model)
    edited, edited_model = physics.capture(), physics.capture_model()
    assert len(edited_model["difference"]) == 1
    expected = run(data, 20)
    baseline = physics.baseline.fields
    physics.apply(plain, plain_model, baseline)
    assert physics.capture_model()["difference"] == {}
    physics.apply(edited, edited_model, baseline)
    assert run(data, 20) == expected
    other = make(steps=3)
    edit(other.model)
    other.model.body_mass[:] *= 1.5
    Physics(other).apply(plain, plain_model, baseline)
    assert ModelAccess(other.model).difference(shared_baseline(baseline)) == {}


def test_a_restore_does_not_depend_on_the_live_baseline_and_adopts_the_saved_one():
    source, target = make(steps=20), make()
    source.model.body_mass[1] = 2.0
    saved = Physics(source)
    source.model.body_mass[2] = 3.0
    target.model.geom_size[1] = 0.2
    physics = Physics(target)
    assert physics.baseline.digest != saved.baseline.digest
    physics.apply(saved.capture(), saved.capture_model(), saved.baseline.fields)
    assert physics.baseline.digest == saved.baseline.digest
    assert list(physics.capture_model()["difference"]) == ["body_mass"]
    assert run(target, 40) == run(source, 40)


def test_the_same_model_has_the_same_digest_and_one_baseline():
    assert Physics(make()).baseline is Physics(make()).baseline
    lighter = PENDULUM.replace('size=".1" pos', 'size=".09" pos')
    assert Physics(make()).baseline.digest != Physics(make(lighter)).baseline.digest


def test_models_of_other_sizes_or_names_are_refused_with_what_differs():
    saved = Physics(make(steps=3))
    state, model, baseline = saved.capture(), saved.capture_model(), saved.baseline.fields
    other = make(PENDULUM.replace("<freejoint/>", "<joint name='slide' type='slide'/>"))
    before = Physics(other).capture()
    found = "\n".join(Physics(other, path="env/physics").problems(state, model, baseline))
    assert "env/physics: model field nq: 8 in the state, 2 in the live env" in found
    assert "physics field qpos" in found
    renamed = make(PENDULUM.replace('name="ball" pos', 'name="bull" pos'))
    assert ["names" in line for line in Physics(renamed).problems(state, model, baseline)] == [True]
    assert all(Physics(other).capture()[name].tobytes() == before[name].tobytes() for name in before)


def test_missing_and_foreign_fields_are_named():
    data = make()
    physics = Physics(data)
    state, model = physics.capture(), physics.capture_model()
    state["extra"] = state.pop("qvel")
    found = "\n".join(physics.problems(state, model, physics.baseline.fields))
    assert "qvel: missing" in found
    assert "extra: unknown" in found


def test_a_state_of_another_version_of_mujoco_fits_where_both_have_a_field():
    source, target = make(steps=9), make()
    saved = Physics(source)
    state, model = saved.capture(), {**saved.capture_model(), "mujoco": "3.0.0"}
    del state["flg_rnepost"]
    state["field_of_the_past"] = np.zeros(3)
    physics = Physics(target)
    assert physics.problems(state, model, saved.baseline.fields) == []
    physics.apply(state, model, saved.baseline.fields)
    assert target.qpos.tobytes() == source.qpos.tobytes()


def test_plugins_with_data_behind_a_pointer_are_refused():
    xml = """
    <mujoco>
      <extension>
        <plugin plugin="mujoco.pid"><instance name="pid"><config key="kp" value="1"/></instance></plugin>
      </extension>
      <worldbody><body><joint name="j"/><geom size=".1"/></body></worldbody>
      <actuator><plugin joint="j" plugin="mujoco.pid" instance="pid" actdim="0"/></actuator>
    </mujoco>
    """
    try:
        data = make(xml)
    except ValueError as error:
        pytest.skip(f"this mujoco has no pid plugin: {error}")
    with pytest.raises(UnsupportedStateError, match="opaque pointer"):
        Physics(data)


def test_sleeping_trees_stay_asleep():
    xml = PENDULUM.replace('timestep="0.01"/>', 'timestep="0.01"><flag sleep="enable"/></option>')
    source, target = make(xml, steps=300, control=0), make(xml, steps=5)
    restore(source, target)
    assert run(target, 40) == run(source, 40)
