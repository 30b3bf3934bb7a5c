"""Disks that hold a save up, and a small loop to interrupt."""

import threading

import numpy as np

import simckpt
from simckpt.storage import durable


class GatedDisk(durable.Disk):
    """Holds up the writes of other threads while its gate is closed: a save stays in flight as long as a test wants.

    Attributes:
        failure: what writes raise, if anything.
        broken: what every operation raises, if anything.
    """

    broken: OSError | None = None

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.gate.set()
        self.writing = threading.Event()
        self.failure: OSError | None = None

    def pwrite(self, descriptor: int, data: durable.Bytes, offset: int) -> int:
        # the record of the start is written by the training thread, at its first save
        if threading.current_thread() is not threading.main_thread():
            self.writing.set()
            assert self.gate.wait(20)
        if self.failure is not None:
            raise self.failure
        return super().pwrite(descriptor, data, offset)

    def hold(self) -> None:
        self.writing.clear()
        self.gate.clear()

    def wait_until_writing(self) -> None:
        assert self.writing.wait(20)


def _breakable(name: str):
    operation = getattr(GatedDisk, name)

    def method(self, *arguments):
        if self.broken is not None:
            raise self.broken
        return operation(self, *arguments)

    return method


for _name in [name for name in vars(durable.Disk) if not name.startswith("_") and name != "close"]:
    setattr(GatedDisk, _name, _breakable(_name))


class Weights:
    """Large arrays that change in place, as parameters do."""

    def __init__(self, leaves: int = 4, size: int = 50_000) -> None:
        self.arrays = {f"layer_{index}": np.zeros(size) for index in range(leaves)}

    def train(self, step: int) -> None:
        for array in self.arrays.values():
            array[...] = step

    def state_dict(self) -> dict[str, np.ndarray]:
        return self.arrays

    def load_state_dict(self, state: dict[str, np.ndarray]) -> None:
        for name, array in state.items():
            self.arrays[name][...] = array


def saved_values(checkpoint: simckpt.Checkpoint) -> set[float]:
    """Returns every value that the weights of a checkpoint hold."""
    tree = checkpoint["weights"]
    return {float(value) for array in tree.values() for value in np.unique(array)}
