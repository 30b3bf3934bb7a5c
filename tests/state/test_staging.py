"""Copies of a save in buffers that are used again."""

import os
from pathlib import Path

import numpy as np
import pytest
import torch

from simckpt.errors import ConfigurationError
from simckpt.state import copy_tree, encode, staging
from simckpt.state.shared_memory import AttachedSlabs, Slabs
from simckpt.state.staging import Arena

LARGE = 20_000  # float64s: 160 kB


def address(array: np.ndarray) -> int:
    return array.__array_interface__["data"][0]


def leaf_bytes(tree: object) -> bytes:
    (leaf,) = encode(tree).leaves.values()
    return leaf.data.tobytes()


def staged(arena: Arena, *trees: object) -> list:
    with arena.recording():
        return [copy_tree(tree) for tree in trees]


def test_a_large_copy_lands_in_the_same_memory_each_time() -> None:
    arena, array = Arena(), np.arange(LARGE, dtype=float)
    (first,) = staged(arena, array)
    place = address(first)
    arena.release()
    array += 1
    (second,) = staged(arena, array)
    assert address(second) == place
    assert second.tobytes() == array.tobytes()
    assert not np.shares_memory(second, array)


def test_copies_outside_of_a_recording_are_ordinary() -> None:
    arena, array = Arena(), np.zeros(LARGE)
    (inside,) = staged(arena, array)
    outside = copy_tree(array)
    arena.release()
    (again,) = staged(arena, array)
    assert not np.shares_memory(outside, inside)
    assert np.shares_memory(again, inside)


@pytest.mark.parametrize(
    "array",
    [
        np.arange(LARGE, dtype=">f4"),
        np.arange(3 * LARGE).reshape(3, LARGE).T,
        np.zeros(LARGE, "datetime64[ns]"),
        np.zeros(LARGE, [("a", "i4"), ("b", "f8")]),
        np.full(LARGE, "words", "<U7"),
        np.arange(LARGE, dtype=complex)[::-1],
    ],
    ids=["swapped", "transposed", "time", "record", "text", "backwards"],
)
def test_arrays_of_every_kind_are_copied_exactly(array: np.ndarray) -> None:
    (copy,) = staged(Arena(), array)
    assert (copy.dtype, copy.shape) == (array.dtype, array.shape)
    assert copy.tobytes() == array.tobytes()
    assert leaf_bytes(copy) == leaf_bytes(array.copy())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e4m3fn", "bool", "complex64", "int64"])
def test_tensors_of_every_dtype_are_copied_exactly(dtype: str) -> None:
    tensor = torch.arange(4 * LARGE).remainder(7).to(getattr(torch, dtype)).view(LARGE, 4)
    for each in (tensor, tensor.t()):
        (copy,) = staged(Arena(), each)
        assert (copy.dtype, copy.shape) == (each.dtype, each.shape)
        assert leaf_bytes(copy) == leaf_bytes(each)


def test_views_of_one_memory_are_copied_once_and_marks_stay() -> None:
    parameter = torch.nn.Parameter(torch.zeros(LARGE))
    arena = Arena()
    (copy,) = staged(arena, {"a": parameter, "b": parameter, "c": parameter.detach()})
    assert copy["a"] is copy["b"]
    assert isinstance(copy["a"], torch.nn.Parameter)
    assert copy["a"].data_ptr() == copy["c"].data_ptr() != parameter.data_ptr()
    assert arena.nbytes < 2 * parameter.nbytes


def test_a_conjugate_view_is_copied_as_what_it_shows() -> None:
    tensor = torch.complex(torch.arange(float(LARGE)), torch.arange(float(LARGE))).conj()
    (copy,) = staged(Arena(), tensor)
    assert torch.equal(copy.resolve_conj(), tensor.resolve_conj())


def test_a_length_that_varies_a_little_finds_the_same_buffer() -> None:
    arena, rng = Arena(), np.random.default_rng(1)
    (first,) = staged(arena, np.zeros(LARGE))
    place, bound = address(first), arena.nbytes
    for _ in range(50):
        arena.release()
        size = int(LARGE * rng.uniform(0.97, 1.0))
        (copy,) = staged(arena, np.ones(size))
        assert copy.size == size
        assert address(copy) == place
        assert arena.nbytes == bound


def test_memory_is_at_most_a_quarter_more_than_what_is_staged() -> None:
    arena, rng = Arena(), np.random.default_rng(2)
    for _ in range(30):
        sizes = rng.integers(staging.THRESHOLD, 20 * staging.THRESHOLD, 20)
        staged(arena, [np.empty(size, np.uint8) for size in sizes])
        assert arena.nbytes <= 1.25 * sizes.sum()
        arena.release()


def test_a_failed_capture_leaves_all_buffers_free() -> None:
    arena = Arena()

    class Broken:
        pass

    with pytest.raises(TypeError), arena.recording():
        copy_tree({"a": np.zeros(LARGE), "b": Broken()})
    (copy,) = staged(arena, np.ones(LARGE))
    assert copy.all()
    assert arena.nbytes <= 1.25 * copy.nbytes


def test_only_one_snapshot_lives_in_an_arena() -> None:
    arena = Arena()
    staged(arena, np.zeros(LARGE))
    with pytest.raises(AssertionError), arena.recording():
        pass


@pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="no anonymous shared files on this system")
class TestSharedMemory:
    def test_another_mapping_sees_the_staged_array(self) -> None:
        slabs, attached = Slabs(), AttachedSlabs()
        arena = Arena(slabs.allocate, discard=slabs.discard, pinned=False)
        array, tensor = np.arange(LARGE, dtype=float), torch.arange(LARGE)
        copy, other = staged(arena, array, tensor)
        for number, descriptor in slabs.descriptors().items():
            attached.attach(number, os.dup(descriptor))
        places = [slabs.find(copy), slabs.find(other.numpy())]
        assert attached.array(places[0]).tobytes() == array.tobytes()
        assert attached.array(places[1]).tobytes() == tensor.numpy().tobytes()
        assert slabs.find(array) is None
        assert slabs.find(copy[::2]) is None

    def test_slabs_are_few_and_end_with_their_buffers(self) -> None:
        before = len(list(Path("/proc/self/fd").iterdir()))
        slabs = Slabs()
        arena = Arena(slabs.allocate, discard=slabs.discard, pinned=False)
        trees = staged(arena, [np.zeros(LARGE + index) for index in range(600)])
        assert len(slabs.descriptors()) <= 3
        trees.clear()
        arena.release()
        staged(arena, np.zeros(10))
        arena.release()
        del arena, slabs
        assert len(list(Path("/proc/self/fd").iterdir())) == before

    def test_a_buffer_that_is_given_up_costs_no_memory(self) -> None:
        slabs = Slabs()
        arena = Arena(slabs.allocate, discard=slabs.discard, pinned=False)
        for round_ in range(20):
            staged(arena, [np.ones(LARGE), np.ones(2_000_000 + 300_000 * round_)])
            arena.release()
        (descriptor,) = list(slabs.descriptors().values())[-1:]
        used = sum(os.fstat(each).st_blocks * 512 for each in slabs.descriptors().values())
        assert used <= 1.3 * arena.nbytes
        assert descriptor

    def test_without_such_files_another_way_is_named(self, monkeypatch) -> None:
        monkeypatch.delattr(os, "memfd_create")
        with pytest.raises(ConfigurationError, match="thread"):
            Slabs()


class TestGPU:
    """Copies from a GPU, which arrive later than the capture returns."""

    @pytest.fixture(autouse=True)
    def _needs_a_gpu(self) -> None:
        if not torch.cuda.is_available():
            pytest.skip("no CUDA device: torch.cuda.is_available() is False")

    def test_a_change_that_is_queued_after_the_capture_does_not_leak(self) -> None:
        arena = Arena()
        tensor = torch.randn(1 << 26, device="cuda")
        for _ in range(3):
            expected = tensor.cpu()
            with arena.recording():
                copy = copy_tree({"a": tensor, "b": tensor.view(1 << 13, -1).t()})
            tensor.mul_(-2).add_(1)
            arena.wait_for_copies()
            assert copy["a"].device.type == "cpu"
            assert torch.equal(copy["a"], expected)
            assert torch.equal(copy["b"], expected.view(1 << 13, -1).t())
            arena.release()

    def test_the_capture_does_not_wait_for_the_gpu(self) -> None:
        arena = Arena()
        tensor = torch.randn(1 << 26, device="cuda")
        staged(arena, tensor)
        arena.wait_for_copies()
        arena.release()
        torch.cuda.synchronize()
        torch.cuda._sleep(10**9)
        staged(arena, tensor)
        assert not torch.cuda.current_stream().query()
        arena.wait_for_copies()
        assert torch.cuda.current_stream().query()

    def test_a_tensor_that_is_freed_after_the_capture_is_saved_whole(self) -> None:
        arena = Arena()
        tensor = torch.full((1 << 26,), 3.0, device="cuda")
        torch.cuda._sleep(10**8)
        (copy,) = staged(arena, tensor)
        del tensor
        torch.cuda.synchronize()
        others = [torch.zeros(1 << 26, device="cuda") for _ in range(4)]
        arena.wait_for_copies()
        assert bool((copy == 3.0).all())
        assert len(others) == 4

    def test_shared_memory_is_filled_before_the_capture_returns(self) -> None:
        slabs = Slabs()
        arena = Arena(slabs.allocate, discard=slabs.discard, pinned=False)
        tensor = torch.randn(1 << 22, device="cuda")
        (copy,) = staged(arena, tensor)
        assert torch.equal(copy, tensor.cpu())
        assert slabs.find(copy.numpy()) is not None


def test_an_arena_that_lends_gives_large_tensors_themselves_and_copies_all_else() -> None:
    arena, large = Arena(lends=True), torch.arange(LARGE * 4.0).view(4, LARGE)
    whole = torch.nn.Parameter(large.clone())
    others = {"turned": large.t(), "small": torch.ones(3), "array": large.numpy()}
    lent, again, copies = staged(arena, {"w": whole}, {"w": whole}, others)
    for each in (lent["w"], again["w"]):
        assert each.data_ptr() == whole.data_ptr()
        assert each is not whole
    held = [large.data_ptr(), others["small"].data_ptr()]
    assert copies["turned"].data_ptr() not in held
    assert copies["small"].data_ptr() not in held
    assert not np.shares_memory(copies["array"], large.numpy())
    for name, wanted in others.items():
        assert leaf_bytes(copies[name]) == np.ascontiguousarray(wanted).tobytes(), name
    conjugate = torch.complex(large, large).conj()
    assert leaf_bytes(*staged(Arena(lends=True), conjugate)) == conjugate.resolve_conj().numpy().tobytes()
