"""The attributes that explain a checkpoint to people who open its file in an HDF5 viewer."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from examples import Counter

import simckpt
from simckpt import state
from simckpt.storage import CommitDraft, RunRecord, StoreFiles


def save(folder: Path, components: dict[str, Any]) -> h5py.File:
    run = simckpt.Store(folder).start("a")
    run.checkpointer(components, save_when=simckpt.EverySteps(1)).save(1)
    run.close()
    (path,) = folder.glob("runs/a/checkpoints/*/state.h5")
    return h5py.File(path)


def texts(target: h5py.Group | h5py.Dataset) -> dict[str, str]:
    return {name: value.decode() for name, value in target.attrs.items()}


@pytest.fixture(scope="module")
def training(tmp_path_factory) -> Iterator[h5py.File]:
    envs = simckpt.make_vec("Ant-v5", 2, vectorization_mode="sync")
    observations, _ = envs.reset(seed=1)
    agent = torch.nn.Sequential(torch.nn.Linear(105, 8), torch.nn.BatchNorm1d(8))
    optimizer = torch.optim.Adam(agent.parameters())
    agent(torch.ones(3, 105)).sum().backward()
    optimizer.step()
    components = {
        "envs": envs,
        "agent": agent,
        "optimizer": optimizer,
        "rng": simckpt.RNGStreams(),
        "loop": simckpt.LoopState(step=0, observations=observations),
    }
    with save(tmp_path_factory.mktemp("attributes") / "s", components) as file:
        yield file
    envs.close()


def test_fields_of_the_simulation_are_explained_with_axes_and_units(training) -> None:
    assert training["envs/physics/qpos"].shape == (2, 15)
    found = texts(training["envs/physics/qpos"])
    assert found["axes"] == "num_envs, nq"
    assert "positions" in found["description"]
    assert "rad" in found["units"]
    assert texts(training["envs/physics/time"])["units"] == "s"
    assert all("description" in leaf.attrs for leaf in training["envs/physics"].values())


@pytest.mark.parametrize(
    "path", ["envs", "envs/physics", "envs/models", "envs/python", "envs/vector", "agent", "optimizer", "rng", "loop"]
)
def test_groups_are_explained(training, path) -> None:
    assert texts(training[path])["description"]


def test_a_component_stays_marked_as_one(training) -> None:
    for name in ("envs", "agent", "optimizer", "rng", "loop", "checkpointer"):
        assert texts(training[name])["kind"] == "component"
        assert texts(training[name])["name"] == name


def test_modules_tell_parameters_from_buffers(training) -> None:
    assert texts(training["agent/0.weight"])["description"] == "parameter of a Linear"
    assert texts(training["agent/1.running_mean"])["description"] == "buffer of a BatchNorm1d"
    assert texts(training["agent"])["class"] == "torch.nn.modules.container.Sequential"


def test_optimizers_tell_moments_and_parameters(training) -> None:
    assert "first moment" in texts(training["optimizer/state/0/exp_avg"])["description"]
    assert "second moment" in texts(training["optimizer/state/0/exp_avg_sq"])["description"]
    assert "(8, 105)" in texts(training["optimizer/state/0"])["description"]
    assert texts(training["optimizer"])["class"] == "torch.optim.adam.Adam"


def test_a_name_with_a_slash_is_one_group(tmp_path) -> None:
    with save(tmp_path / "s", {"eval/agent": torch.nn.Linear(2, 1)}) as file:
        assert texts(file["eval%2Fagent"])["class"] == "torch.nn.modules.linear.Linear"
        assert texts(file["eval%2Fagent/weight"])["description"] == "parameter of a Linear"


def test_texts_for_what_does_not_exist_are_left_out(tmp_path) -> None:
    files = StoreFiles.create(tmp_path / "s")
    files.write_run("a", RunRecord(id="0" * 32, name="a", created=0.0))
    given = {"c": {"description": "mine"}, "c/x": {"units": "m"}, "c/no/such": {"a": "b"}, "other": {"a": "b"}}
    files.commit("a", CommitDraft(parent=None, step=1), {"c": state.encode({"x": np.zeros(2)})}, attributes=given)
    (path,) = (tmp_path / "s").glob("runs/a/checkpoints/*/state.h5")
    with h5py.File(path) as file:
        assert set(file) == {"c"}
        assert set(file["c"]) == {"x", "_tree"}
        assert texts(file["c"]) == {"kind": "component", "name": "c", "description": "mine"}
        assert texts(file["c/x"]) == {"kind": "numpy", "units": "m"}


def test_the_next_save_of_the_same_structure_has_the_same_layout_and_texts(tmp_path) -> None:
    run = simckpt.Store(tmp_path / "s").start("a")
    module = torch.nn.Linear(2, 1)
    checkpointer = run.checkpointer({"module": module, "counter": Counter()}, save_when=simckpt.EverySteps(1))
    for step in range(3):
        checkpointer.save(step)
        torch.nn.init.ones_(module.weight)
    run.close()
    files = [h5py.File(path) for path in sorted((tmp_path / "s").glob("runs/a/checkpoints/*/state.h5"))]
    assert len({file["module/weight"].id.get_offset() for file in files}) == 1
    assert {texts(file["module/weight"])["description"] for file in files} == {"parameter of a Linear"}
    for file in files:
        file.close()
