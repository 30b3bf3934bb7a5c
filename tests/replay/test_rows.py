"""Rows copied and digested from numpy arrays and from tensors, on the CPU or a GPU."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from simckpt.replay import Ring
from simckpt.replay.rows import LiveRows
from simckpt.state.staging import Arena


def live(array, ring, end) -> LiveRows:
    return LiveRows({("values",): array}, ring, end)


def numbers(rows) -> list[float]:
    return [float(value) for value in rows.reshape(len(rows), -1)[:, 0]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_rows_of_a_tensor_keep_dtype_and_order(dtype) -> None:
    tensor = torch.arange(10).reshape(5, 2).to(dtype)
    # rows 20 to 24, the oldest in slot 3
    rows = live(tensor, Ring(5, 5, 3), 25).copy(("values",), 20, 24)
    assert type(rows) is torch.Tensor
    assert torch.equal(rows, torch.cat([tensor[3:], tensor[:2]]))
    tensor.zero_()
    assert rows.any()


def test_rows_of_a_memory_mapped_array_are_plain(tmp_path) -> None:
    array = np.memmap(tmp_path / "rows", np.float64, "w+", shape=(4, 3))
    array[:] = np.arange(12).reshape(4, 3)
    rows = live(array, Ring(4, 4, 2), 4).copy(("values",), 1, 4)
    assert type(rows) is np.ndarray
    assert numbers(rows) == [9.0, 0.0, 3.0]


def test_no_rows_keep_the_shape_of_a_row() -> None:
    rows = live(np.zeros((4, 3, 2), np.float32), Ring(4, 0, 0), 0).copy(("values",), 0, 0)
    assert (rows.shape, rows.dtype) == ((0, 3, 2), np.float32)


@pytest.mark.parametrize("make", [np.array, torch.tensor])
def test_digests_follow_the_bits_and_not_the_slots(make) -> None:
    values = [[1.5, 2.0], [3.0, 4.0], [5.0, 6.0], [7.0, 8.0]]
    turned = values[2:] + values[:2]
    first, second = live(make(values), Ring(4, 4, 0), 4), live(make(turned), Ring(4, 4, 2), 4)
    assert first.digests(1, 4) == second.digests(1, 4)
    assert first.digests(0, 4) != first.digests(1, 4)
    turned[3][1] = -2.0
    assert first.digests(0, 4) != live(make(turned), Ring(4, 4, 2), 4).digests(0, 4)


def test_an_array_that_is_not_contiguous_is_read_in_its_logical_order() -> None:
    array = np.asfortranarray(np.arange(12.0).reshape(4, 3))
    rows = live(array, Ring(4, 4, 0), 4)
    assert rows.copy(("values",), 0, 4).tolist() == array.tolist()
    assert rows.digests(0, 4) == live(array.copy(order="C"), Ring(4, 4, 0), 4).digests(0, 4)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_rows_on_a_gpu_arrive_on_the_cpu() -> None:
    tensor = torch.arange(200_000, device="cuda", dtype=torch.float32).reshape(50_000, 4)
    rows = live(tensor, Ring(50_000, 50_000, 20_000), 50_000)
    expected = torch.cat([tensor[20_000:], tensor[:20_000]]).cpu()
    assert torch.equal(rows.copy(("values",), 0, 50_000), expected)
    assert rows.digests(0, 50_000) == live(expected, Ring(50_000, 50_000, 0), 50_000).digests(0, 50_000)
    arena = Arena()
    with arena.recording():
        copy = rows.copy(("values",), 0, 50_000)
        tensor.zero_()
    arena.wait_for_copies()
    assert torch.equal(copy, expected)
