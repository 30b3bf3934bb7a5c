"""The simulations of many envs captured together, straight into arrays `(num_envs, ...)`.

MuJoCo keeps nearly all arrays of an MjData in one buffer, in the same order for equal models. So what costs 80 small
copies for one env field by field is one copy of 10 to 30 KB here; the fields are views of the copied block.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from simckpt.sim.batch import stack_arrays
from simckpt.sim.objects.arrays import address
from simckpt.sim.physics import Physics

# arrays that lie closer together than this [bytes] are copied as one; MuJoCo aligns to 64
_GAP = 128


class PhysicsBatch:
    """Captures one simulation of each env.

    Args:
        simulations: one for each env, in order; all with the same fields, or `fits` says no.
    """

    def __init__(self, simulations: Sequence[Physics]) -> None:
        self.simulations = list(simulations)
        self._datas = [physics.data for physics in simulations]
        first = self.simulations[0]
        self.fits = all(_fields(physics) == _fields(first) for physics in self.simulations)
        self._blocks: list[_Block] = []
        self._single: list[str] = []
        if not self.fits:
            return
        for names in _neighbours(first):
            block = _Block(self.simulations, names)
            if block.same_layout and len(names) > 1:
                self._blocks.append(block)
            else:
                self._single += names
        self._names = [*first.arrays, *first.scalars]

    def is_for(self, simulations: Sequence[Physics]) -> bool:
        """Returns whether these are the simulations it was made for."""
        return len(simulations) == len(self.simulations) and all(
            one is other for one, other in zip(simulations, self.simulations, strict=True)
        )

    def capture(self) -> dict[str, npt.NDArray[Any]]:
        """Returns a copy of every field as `(num_envs, ...)`; the arrays need not be contiguous."""
        found: dict[str, npt.NDArray[Any]] = {}
        for block in self._blocks:
            found |= block.copy()
        for name in self._single:
            found[name] = stack_arrays([physics.arrays[name] for physics in self.simulations])
        for name, kind in self.simulations[0].scalars.items():
            found[name] = np.array([getattr(data, name) for data in self._datas], kind)
        return {name: found[name] for name in self._names}


class _Block:
    """Fields that lie together in memory, in all simulations alike."""

    def __init__(self, simulations: Sequence[Physics], names: Sequence[str]) -> None:
        start, self._size = _extent(simulations[0], names)
        self._fields = [
            (name, address(array) - start, array.dtype, array.shape)
            for name, array in ((name, simulations[0].arrays[name]) for name in names)
        ]
        # rows start where every dtype may
        self._stride = -(-self._size // 64) * 64
        starts = [address(physics.arrays[names[0]]) for physics in simulations]
        self.same_layout = all(
            address(physics.arrays[name]) - begin == offset
            for physics, begin in zip(simulations, starts, strict=True)
            for name, offset, _, _ in self._fields
        )
        # each simulation outlives its view: PhysicsBatch holds both
        self._memory = [_memory(begin, self._size) for begin in starts] if self.same_layout else []

    def copy(self) -> dict[str, npt.NDArray[Any]]:
        """Returns the fields as views of one new block."""
        count = len(self._memory)
        block = np.empty((count, self._stride), np.uint8)
        for row, memory in zip(block[:, : self._size], self._memory, strict=True):
            row[...] = memory
        return {
            name: np.ndarray((count, *shape), dtype, block, offset, (self._stride, *_strides(shape, dtype.itemsize)))
            for name, offset, dtype, shape in self._fields
        }


def _fields(physics: Physics) -> dict[str, Any]:
    arrays = {name: (array.shape, array.dtype) for name, array in physics.arrays.items()}
    return {**arrays, **physics.scalars}


def _neighbours(physics: Physics) -> list[list[str]]:
    """Returns the names of the contiguous fields, grouped by closeness in memory."""
    groups: list[list[str]] = []
    end = None
    for name, array in sorted(physics.arrays.items(), key=lambda item: address(item[1])):
        start = address(array)
        if end is None or start - end > _GAP or not array.flags.c_contiguous:
            groups.append([])
        groups[-1].append(name)
        end = start + array.nbytes if array.flags.c_contiguous else None
    return groups


def _extent(physics: Physics, names: Sequence[str]) -> tuple[int, int]:
    """Returns the first address and the size [bytes] of neighbours."""
    last = physics.arrays[names[-1]]
    start = address(physics.arrays[names[0]])
    return start, address(last) + last.nbytes - start


def _memory(start: int, size: int) -> npt.NDArray[np.uint8]:
    found: npt.NDArray[np.uint8] = np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(start))
    return found


def _strides(shape: Sequence[int], itemsize: int) -> list[int]:
    strides: list[int] = []
    step = itemsize
    for size in reversed(shape):
        strides.insert(0, step)
        step *= size
    return strides
