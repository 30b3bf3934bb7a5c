"""Buffers in memory-mapped files."""

from __future__ import annotations

import errno
import os

import gymnasium as gym
import numpy as np
import pytest

from simckpt.errors import ConfigurationError, StorageError, StorageFullError
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


@pytest.mark.parametrize("column", range(7))
def test_a_failure_at_any_column_leaves_no_file(tmp_path, monkeypatch, column: int) -> None:
    real, calls = os.posix_fallocate, []

    def refuse(*arguments: int) -> None:
        calls.append(arguments)
        if len(calls) > column:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(*arguments)

    monkeypatch.setattr(mapped.os, "posix_fallocate", refuse)
    with pytest.raises(StorageFullError):
        make(tmp_path)
    assert len(calls) == column + 1
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_another_buffer_has_just_made_is_left_alone(tmp_path, monkeypatch) -> None:
    real = os.posix_fallocate

    def race(*arguments: int) -> None:
        real(*arguments)
        (tmp_path / "simckpt-replay.01.next_observations.npy").write_bytes(b"another's")

    monkeypatch.setattr(mapped.os, "posix_fallocate", race)
    with pytest.raises(StorageError):
        make(tmp_path)
    assert [path.read_bytes() for path in tmp_path.iterdir()] == [b"another's"]


@pytest.mark.parametrize("refusal", [None, errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS])
def test_where_room_cannot_be_reserved_it_is_written(tmp_path, monkeypatch, refusal: int | None) -> None:
    def refuse(*_: object) -> None:
        raise OSError(refusal, os.strerror(refusal))

    if refusal is None:
        monkeypatch.delattr(mapped.os, "posix_fallocate")
    else:
        monkeypatch.setattr(mapped.os, "posix_fallocate", refuse)
    buffer = make(tmp_path, capacity=100_000)
    (file,) = tmp_path.glob("*.next_observations.npy")
    assert file.stat().st_blocks * 512 >= 100_000 * 3 * 8
    add(buffer, 7)
    there = np.load(file)
    assert there.shape == (100_000, 1, 3)
    assert there.sum() == 3 * 7.0
