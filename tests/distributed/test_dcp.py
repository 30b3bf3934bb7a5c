"""`torch.distributed.checkpoint` with simckpt's files: saved on n ranks, loaded on m, a checkpoint like any other."""

import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from parallel_training import Training
from ranks import Ranks
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import simckpt
from simckpt.distributed.dcp import HDF5StorageReader, HDF5StorageWriter, JSONLoadPlanner, JSONSavePlanner, _from_json
from simckpt.errors import FormatError, UnsupportedStateError
from simckpt.storage import StoreFiles

NOTES = {"lr": 0.1, "names": ("a", "é"), "count": 2**70, "weights": np.arange(3), "none": None}


def app_state(training: Training, notes: Any) -> dict[str, Any]:
    model, optimizer = get_state_dict(training.module, training.optimizer)
    return {"model": model, "optimizer": optimizer, "notes": dict(notes)}


def save(rank: int, size: int, path: str, layout: str) -> dict[str, np.ndarray]:
    training = Training(layout, "adam", rank, size)
    for number in range(2):
        training.step(number)
        writer = HDF5StorageWriter(path, "ant-ppo", step=number, metrics={"loss": 0.5})
        dcp.save(app_state(training, NOTES), storage_writer=writer, planner=JSONSavePlanner())
    return training.whole()


def load(rank: int, size: int, path: str, layout: str) -> tuple[dict[str, np.ndarray], str]:
    training = Training(layout, "adam", rank, size, seed=1)
    training.step(7)
    found = app_state(training, dict.fromkeys(NOTES))
    dcp.load(found, storage_reader=HDF5StorageReader(path, "ant-ppo"), planner=JSONLoadPlanner())
    set_state_dict(
        training.module,
        training.optimizer,
        model_state_dict=found["model"],
        optim_state_dict=found["optimizer"],
    )
    return training.whole(), repr(found["notes"])


def test_a_state_goes_from_four_ranks_to_any_others(ranks: Ranks, tmp_path: Path) -> None:
    path = str(tmp_path / "store")
    expected = ranks.run(4, save, path, "2d")[0]
    for size, layout in ((1, "fsdp"), (2, "tp"), (4, "fsdp")):
        for found, notes in ranks.run(size, load, path, layout):
            assert notes == repr(NOTES)
            assert list(found) == list(expected)
            assert all(found[name].tobytes() == expected[name].tobytes() for name in found)
    store = simckpt.Store(path)
    first, second = store.run("ant-ppo").checkpoints()
    assert (first.step, second.step, second.parent, dict(second.metrics)) == (0, 1, first.id, {"loss": 0.5})
    assert not store.check().damage
    files = {file.name for file in (tmp_path / "store/runs/ant-ppo/checkpoints/00000002").iterdir()}
    assert {f"shard-{rank:05d}-of-00004.h5" for rank in range(4)} < files
    # nothing is left in progress
    assert not list((tmp_path / "store/tmp").iterdir())


def loses_a_rank(rank: int, size: int, path: str) -> tuple[str, str]:
    training = Training("fsdp", "adam", rank, size)

    class Dies(JSONSavePlanner):
        def resolve_data(self, write_item: Any) -> Any:
            if rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            return super().resolve_data(write_item)

    writer = HDF5StorageWriter(path, "ant-ppo", patience=1.0)
    group = dist.new_group(backend="gloo")
    try:
        dcp.save(app_state(training, NOTES), storage_writer=writer, planner=Dies(), process_group=group)
    except Exception as error:
        return type(error).__name__, str(error)
    return "saved", ""


def test_a_save_that_loses_a_rank_leaves_nothing(ranks: Ranks, tmp_path: Path) -> None:
    path = str(tmp_path / "store")
    outcomes = ranks.outcomes(2, loses_a_rank, path, destroy=False)
    assert outcomes[1].kind == "killed"
    assert outcomes[0].value[0] != "saved"
    assert simckpt.Store(path).run("ant-ppo").checkpoints() == []


def test_objects_that_are_no_state_are_refused() -> None:
    with pytest.raises(UnsupportedStateError):
        JSONSavePlanner().transform_object(_bytes_item(), object())


def _bytes_item() -> Any:
    from torch.distributed.checkpoint.planner_helpers import _create_write_item_for_bytesio

    return _create_write_item_for_bytesio("x", None)


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{}", '{"leaves": 1, "structure": ""}', '{"leaves": {"a": []}, "structure": ""}', "[" * 100_000,
     '{"leaves": {"a": ["float32", [1], "numpy", "<f4", [1], "?"]}, "structure": ""}'],
)  # fmt: skip
def test_what_a_stranger_wrote_in_place_of_an_object_is_an_error_of_ours(text: str) -> None:
    with pytest.raises(FormatError, match="not as HDF5StorageWriter writes it"):
        _from_json(text)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_the_newest_checkpoint_is_one_that_was_not_pruned(tmp_path: Path) -> None:
    for value in (1.0, 2.0):
        writer = HDF5StorageWriter(tmp_path / "store", "r")
        dcp.save({"w": torch.full((2,), value)}, storage_writer=writer, planner=JSONSavePlanner(), no_dist=True)
    StoreFiles.open(tmp_path / "store").prune("r", 2, "test")
    found = {"w": torch.zeros(2)}
    reader = HDF5StorageReader(tmp_path / "store", "r")
    dcp.load(found, storage_reader=reader, planner=JSONLoadPlanner(), no_dist=True)
    assert found["w"].tolist() == [1.0, 1.0]
