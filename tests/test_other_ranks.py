"""A process that trains alone: restoring costs what it must, and no name makes it one of several ranks."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import simckpt
from simckpt.state.torch_components import ModuleHandle
from simckpt.storage import index


def started(store: Path, agent: torch.nn.Module) -> tuple[simckpt.Run, Any]:
    components = {
        "agent": agent,
        "optimizer": torch.optim.Adam(agent.parameters()),
        "loop": simckpt.LoopState(step=0),
        "rng": simckpt.RNGStreams(),
        "extra": simckpt.LoopState(seen=1),
    }
    run = simckpt.Store(store).start("r")
    return run, run.checkpointer(components, save_when=simckpt.EverySteps(1))


def test_a_restore_reads_the_index_three_times_and_copies_each_module_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, checkpointer = started(tmp_path, torch.nn.Linear(2, 2))
    with run, checkpointer:
        checkpointer.restore_latest()
        checkpointer.save(1)
    read, copied, parse, capture = [], [], index.parse_index, ModuleHandle.capture

    def parse_index(*args: Any, **kwargs: Any) -> Any:
        read.append(args)
        return parse(*args, **kwargs)

    def captured(self: Any) -> Any:
        copied.append(self)
        return capture(self)

    run, checkpointer = started(tmp_path, torch.nn.Linear(2, 2))
    with run, checkpointer:
        monkeypatch.setattr(index, "parse_index", parse_index)
        monkeypatch.setattr(ModuleHandle, "capture", captured)
        assert checkpointer.restore_latest() is not None
        # the names, what is there of them, the values; whatever the number of components
        assert len(read) <= 3
        # to go back to it, and into the memory that saves use; nobody copies it to see whether it is in parts
        assert len(copied) == 2


@pytest.mark.parametrize("other", ["noise@0", "noise@1", "noise@7", "@0"])
def test_names_with_numbers_of_ranks_are_names_like_others(tmp_path: Path, other: str) -> None:
    def start() -> tuple[np.random.Generator, simckpt.LoopState, simckpt.Run, Any]:
        generator, loop = np.random.default_rng(3), simckpt.LoopState(step=0)
        run = simckpt.Store(tmp_path).start("r")
        components = {"noise": generator, "loop": loop, other: simckpt.LoopState(x=1)}
        return generator, loop, run, run.checkpointer(components, save_when=simckpt.EverySteps(1))

    generator, loop, run, checkpointer = start()
    with run, checkpointer:
        checkpointer.restore_latest()
        generator.random(5)
        loop.step = 1
        checkpointer.save(1)
    expected = generator.bit_generator.state
    generator, loop, run, checkpointer = start()
    with run, checkpointer:
        assert checkpointer.restore_latest() is not None
        assert loop.step == 1
        assert generator.bit_generator.state == expected
    events = simckpt.Store(tmp_path).files.events("r")
    assert "resharded" not in [event["event"] for event in events]


def test_a_component_that_the_program_does_not_have_any_more_is_refused_by_its_name(tmp_path: Path) -> None:
    def start(*more: str) -> tuple[simckpt.Run, Any]:
        run = simckpt.Store(tmp_path).start("r")
        components = {"loop": simckpt.LoopState(step=0), **{name: np.random.default_rng(1) for name in more}}
        return run, run.checkpointer(components, save_when=simckpt.EverySteps(1))

    run, checkpointer = start("noise", "noise@1")
    with run, checkpointer:
        checkpointer.restore_latest()
        checkpointer.save(1)
    run, checkpointer = start("noise")
    with run, checkpointer, pytest.raises(simckpt.errors.StateMismatchError, match="'noise@1' is in the checkpoint"):
        checkpointer.restore_latest()
