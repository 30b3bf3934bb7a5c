"""Buffers in memory-mapped files."""

from __future__ import annotations

import errno
import os

import gymnasium as gym
import numpy as np
import pytest

from simckpt.errors import ConfigurationError, StorageFullError
from simckpt.replay import ReplayBuffer, mapped

BOX = gym.spaces.Box(-np.inf, np.inf, (3,), np.float64)


def make(folder, capacity=4):
    return ReplayBuffer(capacity, BOX, BOX, num_envs=1, seed=0, memory_map=folder)


def add(buffer, value):
    row = np.full((1, 3), float(value))
    buffer.add(row, row, [value], [False], [False], row)


def test_rows_lie_in_files_that_numpy_opens(tmp_path) -> None:
    buffer = make(tmp_path / "new" / "rows")
    for value in range(6):
        add(buffer, value)
    (file,) = (tmp_path / "new" / "rows").glob("*.observations.npy")
    there = np.load(file)
    assert there.shape == (4, 1, 3)
    assert there[:, 0, 0].tolist() == [4.0, 5.0, 2.0, 3.0]


def test_samples_equal_those_of_a_buffer_in_memory(tmp_path) -> None:
    plain, mapped_buffer = ReplayBuffer(4, BOX, BOX, num_envs=1, seed=0), make(tmp_path)
    for value in range(9):
        add(plain, value)
        add(mapped_buffer, value)
    assert all(np.array_equal(a, b) for a, b in zip(plain.sample(50), mapped_buffer.sample(50), strict=True))


def test_the_room_is_reserved_at_once(tmp_path) -> None:
    make(tmp_path, capacity=10_000)
    (file,) = tmp_path.glob("*.next_observations.npy")
    assert file.stat().st_blocks * 512 >= 10_000 * 3 * 8


def test_a_folder_of_an_earlier_buffer_is_taken_and_begins_empty(tmp_path) -> None:
    first = make(tmp_path, capacity=4)
    add(first, 7)
    second = make(tmp_path, capacity=6)
    assert len(second) == 0
    assert not second.observations.any()
    add(second, 1)
    # the earlier buffer, still in use, keeps its own rows
    assert first.observations[0, 0, 0] == 7.0


def test_a_folder_with_other_files_is_refused_and_untouched(tmp_path) -> None:
    make(tmp_path)
    (tmp_path / "observations.npy").write_bytes(b"somebody's")
    before = sorted(path.name for path in tmp_path.iterdir())
    with pytest.raises(ConfigurationError, match=r"observations\.npy"):
        make(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == before
    assert (tmp_path / "observations.npy").read_bytes() == b"somebody's"


def test_a_full_disk_is_an_error_rather_than_a_signal(tmp_path, monkeypatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(mapped.os, "posix_fallocate", refuse)
    with pytest.raises(StorageFullError) as caught:
        make(tmp_path, capacity=10)
    assert caught.value.needed == 10 * (3 * 3 * 8 + 4 + 3)
