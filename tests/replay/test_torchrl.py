"""Buffers of torchrl: each goes on after a restore as if nothing had happened, and saves its new rows alone."""

import functools
import subprocess
import sys

import numpy as np
import pytest

import simckpt
from simckpt import replay, state
from simckpt.errors import ReplayWarning, StateMismatchError, UnsupportedStateError
from simckpt.testing.log_store import LogStore
from simckpt.testing.replay_conformance import CAPACITY, ReplayAdapterSuite

torch = pytest.importorskip("torch")
pytest.importorskip("torchrl")
# ruff: noqa: E402
from tensordict import NonTensorData, TensorDict
from torchrl.data import (
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    ReplayBuffer,
    TensorDictMaxValueWriter,
    TensorDictPrioritizedReplayBuffer,
    TensorDictReplayBuffer,
    TensorDictRoundRobinWriter,
    TensorStorage,
)
from torchrl.data.replay_buffers.samplers import PrioritizedSampler, SamplerWithoutReplacement, prioritized
from torchrl.envs.transforms import DoubleToFloat, RewardScaling

ENVS = 3


class Tree:
    """A segment tree as torchrl's extension has it: leaves, and each inner node made of its two children."""

    def __init__(self, size):
        self.capacity = 1 << size.bit_length()
        self.values = np.full(2 * self.capacity, self.identity_element, self.dtype)

    def __getitem__(self, index):
        return torch.from_numpy(self.values[np.asarray(index) + self.capacity])

    def __setitem__(self, index, value):
        places = np.atleast_1d(np.asarray(index)) + self.capacity
        for place, leaf in zip(places, np.broadcast_to(np.asarray(value, self.dtype), places.shape), strict=True):
            self.values[place] = leaf
            while place > 1:
                place //= 2
                self.values[place] = self.join(self.values[2 * place], self.values[2 * place + 1])

    def query(self, start, stop):
        found = self.identity_element
        for leaf in self.values[self.capacity + start : self.capacity + stop]:
            found = self.join(found, leaf)
        return found


class SumTree(Tree):
    dtype = np.float32
    identity_element = np.float32(0)
    join = staticmethod(np.add)

    def scan_lower_bound(self, values):
        sums = np.cumsum(self.values[self.capacity :], dtype=np.float32)
        return torch.from_numpy(np.searchsorted(sums, np.asarray(values)))


class MinTree(Tree):
    dtype = np.float32
    identity_element = np.finfo(np.float32).max
    join = staticmethod(np.minimum)


@pytest.fixture(autouse=True)
def trees(monkeypatch):
    """torchrl 0.14.1 has no extension for torch 2.13: where it does not load, its trees alone are replaced."""
    if prioritized.SumSegmentTreeFp32 is None:
        for dtype in ("Fp32", "Fp64"):
            monkeypatch.setattr(prioritized, f"SumSegmentTree{dtype}", SumTree)
            monkeypatch.setattr(prioritized, f"MinSegmentTree{dtype}", MinTree)


def generator():
    return torch.Generator().manual_seed(5)


# the cleanup of LazyMemmapStorage puts handlers for signals in place, for the whole process


def memmap_buffer(capacity):
    return TensorDictReplayBuffer(storage=LazyMemmapStorage(capacity, auto_cleanup=False), generator=generator())


def tensor_buffer(capacity):
    return ReplayBuffer(storage=LazyTensorStorage(capacity))


def prioritized_buffer(capacity, **arguments):
    return TensorDictPrioritizedReplayBuffer(
        storage=LazyMemmapStorage(capacity, auto_cleanup=False), alpha=0.7, beta=0.5, priority_key="error", **arguments
    )


def learner_buffer(capacity):
    return prioritized_buffer(capacity, sync=False, generator=generator())


def tracking_buffer(capacity):
    writer = TensorDictRoundRobinWriter(track_generations=True)
    return TensorDictReplayBuffer(storage=LazyTensorStorage(capacity), writer=writer, generator=generator())


def windowed_buffer(capacity):
    sampler = PrioritizedSampler(capacity, alpha=0.9, beta=0.4, max_priority_within_buffer=True)
    return TensorDictReplayBuffer(storage=LazyTensorStorage(capacity), sampler=sampler, priority_key="error")


def env_buffer(capacity):
    """Rows of several envs: a storage of two dimensions, to which whole steps are written."""
    return TensorDictReplayBuffer(
        storage=LazyTensorStorage(capacity * ENVS, ndim=2), dim_extend=0, generator=generator()
    )


@functools.cache
def row(number, batch):
    """A transition that depends on its number alone, nested as torchrl's collectors nest them."""
    rng = np.random.default_rng(number)

    def normal(*shape):
        return torch.from_numpy(rng.standard_normal((*batch, *shape)))

    after = TensorDict({"pixels": (normal(2, 2) * 40).to(torch.uint8), "reward": normal(1).float()}, batch)
    entries = {
        "observation": normal(3),
        "action": normal(2).to(torch.bfloat16),
        "next": after,
        "done": normal(1) > 0,
        "error": normal().abs().float(),
    }
    return TensorDict(entries, batch)


def rows(first, count, batch=()):
    return torch.stack([row(number, batch) for number in range(first, first + count)])


def add_rows(buffer, first, count):
    batch = (ENVS,) if buffer.storage.ndim > 1 else ()
    # a batch of several rows at a time, and single ones
    while count:
        size = min(count, 1 + first % 7)
        data = rows(first, size, batch)
        if size == 1 and not batch and first % 2:
            buffer.add(data[0].clone())
        else:
            buffer.extend(data)
        first, count = first + size, count - size


def draw(buffer, seed=0, size=8):
    """A batch; the priorities of its rows are updated as a learner does."""
    torch.manual_seed(seed)
    np.random.seed(seed)
    batch = buffer.sample(size)
    if "priority_weight" in batch:
        errors = torch.rand(size, generator=torch.Generator().manual_seed(seed))
        buffer.update_tensordict_priority(batch.set("error", errors))
    return flat(batch)


def flat(tensordict):
    items = tensordict.items(include_nested=True, leaves_only=True)
    return {key: bits(value) for key, value in sorted(items, key=lambda item: str(item[0]))}


def bits(tensor):
    tensor = tensor.contiguous()
    return str(tensor.dtype), tuple(tensor.shape), tensor.reshape(-1).view(torch.uint8).numpy().tobytes()


def contents(buffer):
    return flat(buffer.storage._storage[: buffer.storage._len_along_dim0])


def restored(make, capacity, store, checkpoint):
    buffer = make(capacity)
    store.restore(replay.handle_for(buffer, "replay"), checkpoint)
    return buffer


class BufferSuite(ReplayAdapterSuite):
    make = None

    def make_buffer(self, capacity):
        return type(self).make(capacity)

    def add_rows(self, buffer, first, count):
        add_rows(buffer, first, count)

    def sample(self, buffer):
        return [draw(buffer, seed) for seed in range(3)] if len(buffer) else []

    def rewrites(self):
        return {
            "buffer[...] =": lambda buffer: buffer.__setitem__(slice(2, 4), rows(700, 2)),
            "set_": lambda buffer: buffer.set_("done", torch.zeros(CAPACITY, 1, dtype=torch.bool)),
            "set_at_": lambda buffer: buffer.set_at_("error", torch.ones(2), torch.tensor([1, 3])),
            "update_": lambda buffer: buffer.update_({"error": torch.zeros(CAPACITY)}),
            "write_at": lambda buffer: buffer.writer.write_at(torch.tensor([0, 5]), rows(800, 2)),
            "empty": lambda buffer: buffer.empty(),
        }


class TestMemmapBuffer(BufferSuite):
    make = memmap_buffer


class TestPrioritizedBuffer(BufferSuite):
    make = prioritized_buffer

    test_rows_written_directly_are_saved_or_refused = None  # as with any other sampler


class TestEnvBuffer(BufferSuite):
    make = env_buffer

    test_rows_written_directly_are_saved_or_refused = None  # as in any other storage

    def rewrites(self):
        return {}


EVERY = [
    memmap_buffer,
    tensor_buffer,
    prioritized_buffer,
    learner_buffer,
    windowed_buffer,
    tracking_buffer,
    env_buffer,
]


@pytest.mark.parametrize("make", EVERY)
@pytest.mark.parametrize("added", [4, CAPACITY, CAPACITY + 9])
def test_a_restored_buffer_goes_on_to_the_last_bit(make, added):
    buffer, store = make(CAPACITY), LogStore()
    handle = replay.handle_for(buffer, "replay")
    add_rows(buffer, 0, added // 2)
    draw(buffer, 77)
    store.save(handle)
    add_rows(buffer, added // 2, added - added // 2)
    draw(buffer, 78)
    if "priorit" in make.__name__:
        buffer.sampler.beta = 0.625
    twin = restored(make, CAPACITY, store, store.save(handle))
    assert contents(twin) == contents(buffer)
    for number in range(added, added + 2 * CAPACITY, 3):
        for each in (buffer, twin):
            add_rows(each, number, 3)
        assert draw(twin, number) == draw(buffer, number)
    assert contents(twin) == contents(buffer)
    assert (twin.write_count, len(twin)) == (buffer.write_count, len(buffer))


@pytest.mark.parametrize("make", [memmap_buffer, prioritized_buffer, env_buffer])
def test_a_full_ring_writes_its_new_rows_alone(make):
    buffer, store = make(200), LogStore()
    handle = replay.handle_for(buffer, "replay")
    add_rows(buffer, 0, 211)
    store.save(handle)
    add_rows(buffer, 211, 7)
    logs = {
        path: leaf for path, leaf in state.encode(handle.capture()).leaves.items() if isinstance(leaf, state.LogLeaf)
    }
    assert {len(leaf.data) for leaf in logs.values()} == {7}
    assert {"observation", "action", "done", "error", "next/pixels", "next/reward"} <= set(logs)
    assert {path: logs[path].dtype for path in ("action", "next/pixels")} == {
        "action": "bfloat16",
        "next/pixels": "uint8",
    }


@pytest.mark.parametrize("make", EVERY)
def test_a_buffer_without_rows_comes_back(make):
    buffer, store = make(CAPACITY), LogStore()
    handle = replay.handle_for(buffer, "replay")
    empty = store.save(handle)
    assert not empty.logs
    used = make(CAPACITY)
    add_rows(used, 50, CAPACITY)
    draw(used)
    store.restore(replay.handle_for(used, "replay"), empty)
    for twin in (restored(make, CAPACITY, store, empty), used):
        assert (len(twin), twin.write_count) == (0, 0)
        add_rows(twin, 0, 9)
        drawn = draw(twin)
        fresh = make(CAPACITY)
        add_rows(fresh, 0, 9)
        assert drawn == draw(fresh)


def test_emptied_storage_keeps_its_tensors_and_starts_again():
    buffer, store = memmap_buffer(CAPACITY), LogStore()
    handle = replay.handle_for(buffer, "replay")
    add_rows(buffer, 0, CAPACITY + 4)
    store.save(handle)
    buffer.empty()
    twin = restored(memmap_buffer, CAPACITY, store, store.save(handle))
    for each in (buffer, twin):
        add_rows(each, 90, 6)
    assert draw(twin) == draw(buffer)
    assert contents(restored(memmap_buffer, CAPACITY, store, store.save(handle))) == contents(buffer)


def test_storage_made_of_data_saves_it_once():
    def make(capacity):
        indexed = rows(0, capacity).set("index", torch.arange(capacity))
        return TensorDictReplayBuffer(storage=TensorStorage(indexed))

    buffer, store = make(CAPACITY), LogStore()
    handle = replay.handle_for(buffer, "replay")
    assert store.save(handle).written["error"] == CAPACITY
    for number in range(CAPACITY + 3):
        buffer.extend(rows(100 + number, 1))
        assert store.save(handle).written["error"] == 1
    twin = restored(make, CAPACITY, store, store.checkpoints[-1])
    assert contents(twin) == contents(buffer)
    assert draw(twin) == draw(buffer)


def test_entries_that_come_later_are_saved_for_all_rows():
    buffer, store = tensor_buffer(CAPACITY), LogStore()
    handle = replay.handle_for(buffer, "replay")
    add_rows(buffer, 0, CAPACITY + 2)
    store.save(handle)
    buffer.extend(rows(100, 2).set("value", torch.ones(2)))
    checkpoint = store.save(handle)
    assert checkpoint.written["value"] == checkpoint.written["error"] == CAPACITY
    twin = restored(tensor_buffer, CAPACITY, store, checkpoint)
    assert contents(twin) == contents(buffer)
    assert draw(twin) == draw(buffer)


def large_buffer():
    """Of 12 MB: too large for an audit to look at all of it."""
    buffer = TensorDictReplayBuffer(
        storage=LazyTensorStorage(3000), writer=TensorDictRoundRobinWriter(track_generations=True)
    )
    data = torch.arange(3000 * 1024, dtype=torch.float32).view(3000, 1024)
    buffer.extend(TensorDict({"observation": data, "reward": data[:, 0]}, [3000]))
    return buffer


def update_if_present(buffer):
    index = torch.tensor([1500])
    generation = buffer.writer.generations_of(index)
    patch = {"reward": torch.ones(1)}
    assert buffer.update_if_present(index=index, generation=generation, patch=patch).updated_count == 1


def submit_update_if_present(buffer):
    index = torch.tensor([1500])
    generation = buffer.writer.generations_of(index)
    buffer.submit_update_if_present(index=index, generation=generation, patch={"reward": torch.ones(1)})


@pytest.mark.parametrize(
    "rewrite",
    [
        lambda buffer: buffer.set_at_("reward", torch.ones(1), torch.tensor([1500])),
        lambda buffer: buffer.__setitem__(slice(1500, 1501), buffer[1500:1501].set("reward", torch.ones(1))),
        update_if_present,
        submit_update_if_present,
    ],
)
def test_a_row_rewritten_by_the_buffers_own_methods_never_escapes(rewrite):
    buffer, store = large_buffer(), LogStore()
    handle = replay.handle_for(buffer, "replay")
    store.save(handle)
    assert store.save(handle).written["reward"] == 0
    rewrite(buffer)
    checkpoint = store.save(handle)
    assert checkpoint.written["reward"] == 3000
    assert store.read(checkpoint)["reward"][1500] == 1
    assert store.save(handle).written["reward"] == 0


def test_a_row_written_into_the_tensors_is_found_by_the_audit():
    buffer, store = memmap_buffer(CAPACITY), LogStore()
    handle = replay.handle_for(buffer, "replay")
    add_rows(buffer, 0, CAPACITY)
    store.save(handle)
    buffer.storage._storage["next", "reward"][3] += 1
    with pytest.warns(ReplayWarning, match="next/reward"):
        checkpoint = store.save(handle)
    assert contents(restored(memmap_buffer, CAPACITY, store, checkpoint)) == contents(buffer)


def test_entries_declared_mutable_are_written_whole():
    class Relabelled(TensorDictReplayBuffer):
        pass

    with pytest.raises(UnsupportedStateError, match=r"'memory'.*Relabelled"):
        replay.handle_for(Relabelled(storage=LazyTensorStorage(CAPACITY)), "memory")

    from simckpt.replay.torchrl import TorchRLAdapter

    replay.register_replay_adapter(Relabelled, TorchRLAdapter(mutable=["next"]))
    buffer = Relabelled(storage=LazyTensorStorage(CAPACITY))
    add_rows(buffer, 0, 5)
    leaves = state.encode(replay.handle_for(buffer, "memory").capture()).leaves
    assert not isinstance(leaves["next/reward"], state.LogLeaf)
    assert isinstance(leaves["observation"], state.LogLeaf)


def test_transforms_without_state_are_no_obstacle():
    def make(capacity):
        return TensorDictReplayBuffer(
            storage=LazyTensorStorage(capacity), transform=DoubleToFloat(in_keys=["observation"])
        )

    buffer, store = make(CAPACITY), LogStore()
    add_rows(buffer, 0, 9)
    twin = restored(make, CAPACITY, store, store.save(replay.handle_for(buffer, "replay")))
    assert draw(twin) == draw(buffer)


def shared_storage_buffer():
    storage = LazyTensorStorage(CAPACITY)
    TensorDictReplayBuffer(storage=storage)
    return TensorDictReplayBuffer(storage=storage)


REFUSED = {
    "ListStorage": lambda: TensorDictReplayBuffer(storage=ListStorage(CAPACITY)),
    "SamplerWithoutReplacement": lambda: TensorDictReplayBuffer(
        storage=LazyTensorStorage(CAPACITY), sampler=SamplerWithoutReplacement()
    ),
    "TensorDictMaxValueWriter": lambda: TensorDictReplayBuffer(
        storage=LazyTensorStorage(CAPACITY), writer=TensorDictMaxValueWriter(rank_key="error")
    ),
    "RewardScaling": lambda: TensorDictReplayBuffer(
        storage=LazyTensorStorage(CAPACITY), transform=RewardScaling(0.0, 1.0)
    ),
    "ConsumingSampler": lambda: TensorDictReplayBuffer(storage=LazyTensorStorage(CAPACITY), consume_after_n_samples=1),
    "prefetch=None": lambda: TensorDictReplayBuffer(storage=LazyTensorStorage(CAPACITY), prefetch=2, batch_size=4),
    "shared=False": lambda: TensorDictReplayBuffer(storage=LazyTensorStorage(CAPACITY), shared=True),
    "another buffer": shared_storage_buffer,
}


@pytest.mark.parametrize("name", REFUSED)
def test_parts_that_cannot_be_captured_exactly_are_refused_by_name(name):
    with pytest.raises(UnsupportedStateError, match=f"'memory'.*{name}") as caught:
        replay.handle_for(REFUSED[name](), "memory")
    assert caught.value.path.startswith("memory/")


def test_entries_that_are_no_tensors_are_refused_by_name():
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(CAPACITY))
    handle = replay.handle_for(buffer, "memory")
    data = rows(0, 2).set("next", TensorDict({"task": NonTensorData("walk", [2])}, [2]))
    buffer.extend(data)
    with pytest.raises(UnsupportedStateError, match="next/task"):
        handle.capture()


def test_what_does_not_fit_is_refused_untouched():
    store = LogStore()
    buffer = prioritized_buffer(CAPACITY)
    add_rows(buffer, 0, 9)
    checkpoint = store.save(replay.handle_for(buffer, "replay"))
    for make, capacity, problem in (
        (prioritized_buffer, CAPACITY + 1, "priorities"),
        (tensor_buffer, CAPACITY, "prioritized"),
        (memmap_buffer, CAPACITY, "generator"),
        (env_buffer, CAPACITY, "ndim=1"),
    ):
        with pytest.raises(StateMismatchError, match=problem):
            restored(make, capacity, store, checkpoint)


def test_importing_the_adapters_imports_neither_library():
    code = (
        "import sys, simckpt.replay.sb3, simckpt.replay.torchrl\n"
        "assert not {'torch', 'torchrl', 'tensordict', 'stable_baselines3'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.parametrize("make", [memmap_buffer, prioritized_buffer, env_buffer])
def test_a_run_goes_on_from_its_store_to_the_last_bit(tmp_path, make):
    def train(store, steps):
        """Goes on to this step from the newest checkpoint; returns the last batch and the buffer."""
        buffer = make(CAPACITY)
        loop = simckpt.LoopState(step=0)
        components = {"replay": buffer, "rng": simckpt.RNGStreams(), "loop": loop}
        with (
            simckpt.Store(store).start("run") as run,
            run.checkpointer(components, save_when=simckpt.EverySteps(8), keep=simckpt.KeepLast(2)) as checkpointer,
        ):
            if checkpointer.restore_latest() is None:
                torch.manual_seed(3)
                np.random.seed(3)
            while loop.step < steps:
                add_rows(buffer, loop.step, 1)
                loop.step += 1
                batch = buffer.sample(4)
                if make is prioritized_buffer:
                    buffer.update_tensordict_priority(batch.set("error", batch["error"] / 2))
                checkpointer.step(loop.step)
        return flat(batch), contents(buffer)

    undisturbed = train(tmp_path / "whole", 61)
    # what came after the last checkpoint is lost, and done again
    for stop in (21, 45, 61):
        resumed = train(tmp_path / "resumed", stop)
    assert resumed == undisturbed
