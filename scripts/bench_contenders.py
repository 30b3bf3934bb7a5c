"""The ways to save that bench_save.py compares, each as its documentation says is best.

What a restore fills are the live objects that exist already, wherever a library can do so. A peer's files and their
folders are synced after its own save returned, for which it is charged: only simckpt syncs both, and DCP its files.
"""

import logging
import os
import shutil
import sys
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from bench_states import SAC, Rows, Subject, sac_tensors

import simckpt


def sync(folder: Path) -> None:
    """Makes the files below a folder durable, and the names in it and of it."""
    for path in [folder.parent, folder, *folder.rglob("*")]:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def flip(arrays: Mapping[str, np.ndarray]) -> None:
    """Flips a bit at both ends of each array; done twice, nothing has changed."""
    for array in arrays.values():
        octets = array.reshape(-1).view(np.uint8)
        octets[:: max(octets.size - 1, 1)] ^= 1


@contextmanager
def silent_stderr() -> Iterator[None]:
    """Sends what this process, and processes started meanwhile for as long as they live, write to stderr nowhere."""
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


class Contender:
    """One way to save a subject; each save goes into a folder of its own, `self.latest`.

    Attributes:
        name: what the table calls it.
        home: its folder.
        wanted: {name: digest} of what was saved last, once somebody has noted it.
    """

    name: str
    wanted: Mapping[str, int]

    def __init__(self, subject: Subject, home: Path) -> None:
        self.subject = subject
        self.home = home
        self.latest = home

    def load(self) -> None:
        """Imports what it needs, so that the memory of libraries is not counted as its own."""

    def prepare(self) -> None:
        """Makes what it saves if that is its own: a replay buffer."""

    def open(self) -> None:
        """Does what happens once, before training starts."""
        self.home.mkdir(parents=True)

    def add(self, rows: Rows) -> None:
        """Adds rows to a replay buffer of its own, if it has one."""

    def save(self, number: int) -> None:
        """Saves; returns when training may go on."""
        before, self.latest = self.latest, self.home / f"{number:06d}"
        self.write(self.latest)
        if before != self.home:
            shutil.rmtree(before)

    def write(self, folder: Path) -> None:
        """Writes the state into a folder that does not exist yet."""
        raise NotImplementedError

    def finish(self) -> None:
        """Returns when what was saved last is durable."""
        sync(self.latest)

    def count_new_rows(self) -> int:
        """Returns how many rows of a replay buffer the last save wrote; 0 from those that do not know."""
        return 0

    def files(self) -> list[Path]:
        """Returns the files that a restore may read."""
        return [path for path in self.latest.rglob("*") if path.is_file()]

    def restore(self) -> None:
        """Restores what was saved last."""
        raise NotImplementedError

    def tensors(self) -> dict[str, torch.Tensor]:
        """Returns what it saves and what it restores into, live."""
        return self.subject.tensors()

    def arrays(self) -> dict[str, np.ndarray]:
        """Returns the same as arrays."""
        return {name: tensor.numpy() for name, tensor in self.tensors().items()}

    def spoil(self) -> None:
        """Changes something in everything it restores into."""
        flip({name: array for name, array in self.arrays().items() if array.flags.writeable})

    def close(self) -> None:
        """Ends what `open` has begun, after the last save; restores come later."""


class Simckpt(Contender):
    """simckpt's checkpointer; the write is a background save."""

    background: str | None = "thread"

    @property
    def name(self) -> str:  # type: ignore[override]
        """Names the mode."""
        return f"simckpt, {self.background or 'foreground'}"

    def components(self) -> dict[str, Any]:
        """Returns what is saved."""
        return self.subject.components()

    def open(self) -> None:
        """Starts a run of its own."""
        super().open()
        self.segments: set[str] = set()
        self.run = simckpt.Store(self.home / "store").start("bench")
        self.checkpointer = self.run.checkpointer(
            self.components(),
            save_when=simckpt.EverySteps(1),
            keep=simckpt.KeepLast(1),
            background=self.background,
        )
        self.checkpointer.__enter__()

    def save(self, number: int) -> None:
        """Saves as a training loop does."""
        self.checkpointer.step(number + 1)

    def finish(self) -> None:
        """Waits for the commit."""
        self.checkpointer.wait()
        if self.checkpointer.last_error is not None:
            raise self.checkpointer.last_error

    def count_new_rows(self) -> int:
        """Returns how many rows are in segments that were not there before."""
        leaves = self.run.latest().leaves()
        path = next((path for path, leaf in leaves.items() if path.startswith("replay/") and leaf.pieces), None)
        pieces = leaves[path].pieces if path else ()
        found = {piece.segment: piece.rows for piece in pieces if piece.segment not in self.segments}
        self.segments |= set(found)
        return sum(found.values())

    def files(self) -> list[Path]:
        """Returns the files of the store."""
        return [path for path in self.home.rglob("*") if path.is_file()]

    def close(self) -> None:
        """Gives the run and the buffers for staging back."""
        self.checkpointer.__exit__(None, None, None)
        self.run.close()
        del self.checkpointer, self.run

    def restore(self) -> None:
        """Restores, every byte verified."""
        simckpt.Store(self.home / "store").run("bench").latest().restore(self.components())


class SimckptProcess(Simckpt):
    """The same with a writer process."""

    background = "process"


class SimckptForeground(Simckpt):
    """The same without a background."""

    background = None


class SimckptOwnBuffer(Simckpt):
    """simckpt with its own `ReplayBuffer` beside SB3's networks."""

    name = "simckpt, own buffer"  # type: ignore[assignment]
    subject: SAC

    def prepare(self) -> None:
        """Fills the buffer with the rows of SB3's."""
        model = self.subject.model
        spaces = model.observation_space, model.action_space
        self.replay = simckpt.ReplayBuffer(self.subject.buffer.buffer_size, *spaces, num_envs=1, seed=1)
        for rows in self.subject.rows():
            self.add(rows)

    def add(self, rows: Rows) -> None:
        """Adds them one by one, as a training loop does."""
        columns = [rows[name] for name in ("observations", "actions", "rewards")]
        ends = rows["dones"].astype(bool), rows["timeouts"].astype(bool)
        for row in zip(*columns, *ends, rows["next_observations"], strict=True):
            self.replay.add(*row)

    def components(self) -> dict[str, Any]:
        """Returns the subject's with the buffer in the place of SB3's."""
        return self.subject.components() | {"replay": self.replay}

    def arrays(self) -> dict[str, np.ndarray]:
        """Returns the networks' arrays and the buffer's columns, which can only be read."""
        settled = self.subject.settled()
        columns = {f"replay/{name}": getattr(self.replay, name) for name in ("observations", "next_observations")}
        columns |= {f"replay/{name}": getattr(self.replay, name) for name in ("actions", "rewards", "terminated")}
        return {name: array for name, array in super().arrays().items() if name not in settled} | columns

    def spoil(self) -> None:
        """Changes the networks and adds a row."""
        super().spoil()
        for rows in self.subject.rows():
            self.add({name: column[:1] for name, column in rows.items()})
            break


class TorchSave(Contender):
    """`torch.save` of the flat dict; `torch.load(mmap=True)`, copied into the live tensors."""

    name = "torch.save"

    def write(self, folder: Path) -> None:
        """Writes one file."""
        folder.mkdir()
        torch.save(self.tensors(), folder / "state.pt")

    def restore(self) -> None:
        """Reads the mapped file whole by copying it."""
        loaded = torch.load(self.latest / "state.pt", mmap=True, weights_only=True)
        for name, tensor in self.tensors().items():
            tensor.copy_(loaded[name])


class Safetensors(Contender):
    """`save_file`; `safe_open`, each tensor copied into the live one."""

    name = "safetensors"

    def load(self) -> None:
        """Imports it."""
        import safetensors.torch  # noqa: F401

    def write(self, folder: Path) -> None:
        """Writes one file."""
        from safetensors.torch import save_file

        folder.mkdir()
        save_file(self.tensors(), folder / "state.safetensors")

    def restore(self) -> None:
        """Reads tensor by tensor, so that there is never a second state in memory."""
        from safetensors import safe_open

        with safe_open(self.latest / "state.safetensors", framework="pt") as file:
            for name, tensor in self.tensors().items():
                tensor.copy_(file.get_tensor(name))


class H5py(Contender):
    """One contiguous dataset for each tensor; `read_direct` into the live arrays."""

    name = "h5py"

    def load(self) -> None:
        """Imports it."""
        import h5py  # noqa: F401

    def write(self, folder: Path) -> None:
        """Writes one file."""
        import h5py

        folder.mkdir()
        with h5py.File(folder / "state.h5", "w") as file:
            for name, tensor in self.tensors().items():
                file.create_dataset(name, data=tensor.numpy())

    def restore(self) -> None:
        """Reads dataset by dataset."""
        import h5py

        with h5py.File(self.latest / "state.h5", "r") as file:
            for name, tensor in self.tensors().items():
                if tensor.numel():
                    file[name].read_direct(tensor.numpy())


class DCPSave(Contender):
    """`torch.distributed.checkpoint.save` and `load`, which fills the live tensors."""

    name = "DCP save"

    def load(self) -> None:
        """Imports it."""
        import torch.distributed.checkpoint  # noqa: F401

    def write(self, folder: Path) -> None:
        """Writes a folder; DCP syncs its files itself."""
        import torch.distributed.checkpoint as dcp

        dcp.save(self.tensors(), checkpoint_id=folder, no_dist=True)

    def restore(self) -> None:
        """Restores in place."""
        import torch.distributed.checkpoint as dcp

        dcp.load(self.tensors(), checkpoint_id=self.latest, no_dist=True)


class DCPAsync(DCPSave):
    """`async_save` with a stager that keeps its buffers, filled once before the first save."""

    name = "DCP async, thread"
    shared = False

    def open(self) -> None:
        """Makes the stager touch its buffers."""
        from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

        super().open()
        # pinned memory, asynchronous staging and non-blocking copies need an accelerator
        self.stager = DefaultStager(StagingOptions(False, self.shared, False, False))
        self.stager.stage(self.tensors())
        self.future: Future[Any] | None = None

    def write(self, folder: Path) -> None:
        """Stages; a thread or a process writes."""
        self.future = self.begin(self.tensors(), folder)

    def begin(self, tensors: Mapping[str, torch.Tensor], folder: Path) -> Future[Any]:
        """Begins a save; returns its end."""
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

        response = dcp.async_save(
            tensors,
            checkpoint_id=folder,
            async_stager=self.stager,
            async_checkpointer_type=AsyncCheckpointerType.PROCESS if self.shared else AsyncCheckpointerType.THREAD,
            no_dist=not self.shared,
        )
        return getattr(response, "upload_completion", response)

    def finish(self) -> None:
        """Waits, then syncs the folders."""
        assert self.future is not None
        self.future.result()
        super().finish()

    def close(self) -> None:
        """Frees the stager's buffers."""
        self.stager.close()
        del self.stager, self.future


class DCPProcess(DCPAsync):
    """The same with a process, which needs a process group of one rank and stages into shared memory."""

    name = "DCP async, process"
    shared = True

    def open(self) -> None:
        """Makes the process group, and the writer process, which the first save of all would start."""
        import torch.distributed as dist

        os.environ["MASTER_ADDR"] = "127.0.0.1"
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        super().open()
        with silent_stderr():
            self.begin({"nothing": torch.zeros(1)}, self.home / "start").result()

    def close(self) -> None:
        """Leaves the process group; the writer process ends with this one."""
        import torch.distributed as dist

        super().close()
        dist.destroy_process_group()


class TorchRL(Contender):
    """`torchrl.checkpoint.Checkpoint` of the live objects, consolidated: its default, many small files, is slower."""

    name = "torchrl.checkpoint"

    def load(self) -> None:
        """Imports it."""
        import torchrl.checkpoint
        import torchrl.data  # noqa: F401

        logging.getLogger("torchrl").setLevel(logging.WARNING)

    def components(self) -> dict[str, Any]:
        """Returns what is saved."""
        return self.subject.components()

    def open(self) -> None:
        """Registers the components."""
        from torchrl.checkpoint import Checkpoint, StateDictCheckpointAdapter

        super().open()
        self.checkpoint = Checkpoint()
        for name, component in self.components().items():
            own = hasattr(component, "dump")
            adapter = None if own else StateDictCheckpointAdapter("consolidated")
            self.checkpoint.register(name, component, adapter=adapter)

    def write(self, folder: Path) -> None:
        """Writes a folder."""
        self.checkpoint.save(folder)

    def restore(self) -> None:
        """Restores in place."""
        self.checkpoint.load(self.latest)


class TorchRLBuffer(TorchRL):
    """The same with a `TensorDictReplayBuffer` over a `LazyMemmapStorage`, which holds the rows of SB3's buffer."""

    subject: SAC

    def components(self) -> dict[str, Any]:
        """Returns the subject's with the buffer in the place of SB3's."""
        return self.subject.components() | {"replay": self.replay}

    def prepare(self) -> None:
        """Fills the buffer."""
        from torchrl.data import LazyMemmapStorage, TensorDictReplayBuffer

        capacity = self.subject.buffer.buffer_size
        storage = LazyMemmapStorage(capacity, scratch_dir=self.home.with_name(self.home.name + "-live"))
        self.replay = TensorDictReplayBuffer(storage=storage, batch_size=256)
        for rows in self.subject.rows():
            self.add(rows)

    def add(self, rows: Rows) -> None:
        """Adds them as one batch."""
        from tensordict import TensorDict

        tensors = {name: torch.from_numpy(np.ascontiguousarray(column)) for name, column in rows.items()}
        self.replay.extend(TensorDict(tensors, batch_size=[len(rows["rewards"])]))

    def tensors(self) -> dict[str, torch.Tensor]:
        """Returns the networks' tensors and the storage's."""
        columns = {f"replay/{name}": self.replay[:][name] for name in SAC.COLUMNS}
        return self.subject.tensors() | columns


class SB3(Contender):
    """`model.save` and `save_replay_buffer`; `SAC.load` and `load_replay_buffer`, which make a new model."""

    name = "SB3 save"
    subject: SAC

    def open(self) -> None:
        """Knows no other model yet than the live one."""
        super().open()
        self.model = self.subject.model

    def write(self, folder: Path) -> None:
        """Writes the networks into a zip file and the buffer into a pickle."""
        folder.mkdir()
        self.subject.model.save(folder / "model")
        self.subject.model.save_replay_buffer(folder / "buffer")

    def restore(self) -> None:
        """Makes a new model."""
        self.model = self.subject.model
        self.model = type(self.subject.model).load(self.latest / "model")
        self.model.load_replay_buffer(self.latest / "buffer")

    def tensors(self) -> dict[str, torch.Tensor]:
        """Returns those of the model that was made last."""
        return sac_tensors(self.model)

    def spoil(self) -> None:
        """Leaves the live model alone: a restore makes a new one."""


class Orbax(Contender):
    """`StandardCheckpointer`, which saves in the background; restored arrays are copied into the live ones."""

    name = "Orbax"

    def load(self) -> None:
        """Imports it."""
        import orbax.checkpoint  # noqa: F401

    def tree(self) -> dict[str, np.ndarray]:
        """Returns the live arrays under names that are one part of a path."""
        return {name.replace("/", "."): array for name, array in self.arrays().items()}

    def open(self) -> None:
        """Makes the checkpointer with its thread."""
        import orbax.checkpoint

        super().open()
        self.checkpointer = orbax.checkpoint.StandardCheckpointer()

    def write(self, folder: Path) -> None:
        """Starts a save."""
        self.checkpointer.save(folder.absolute(), self.tree())

    def finish(self) -> None:
        """Waits, then syncs the files."""
        self.checkpointer.wait_until_finished()
        super().finish()

    def restore(self) -> None:
        """Restores and copies."""
        import orbax.checkpoint

        arrays = self.tree()
        with orbax.checkpoint.StandardCheckpointer() as checkpointer:
            restored = checkpointer.restore(self.latest.absolute(), arrays)
        for name, array in arrays.items():
            np.copyto(array, restored[name])

    def close(self) -> None:
        """Ends the thread."""
        self.checkpointer.close()
        del self.checkpointer


def available(kinds: list[type[Contender]]) -> list[type[Contender]]:
    """Returns the contenders whose libraries are installed; says which are not."""
    found = []
    for kind in kinds:
        try:
            kind.load(kind.__new__(kind))
        except ImportError as error:
            print(f"left out: {kind.name}: {error}", file=sys.stderr)
            continue
        found.append(kind)
    return found


GENERAL = [TorchSave, Safetensors, H5py, DCPSave, DCPAsync, TorchRL, Orbax]
