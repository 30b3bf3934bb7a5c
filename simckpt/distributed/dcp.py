"""simckpt's files for programs that use `torch.distributed.checkpoint` themselves.

```python
dcp.save(state_dict, storage_writer=HDF5StorageWriter("experiments", "ant-ppo", step=1000), planner=JSONSavePlanner())
dcp.load(state_dict, storage_reader=HDF5StorageReader("experiments", "ant-ppo"), planner=JSONLoadPlanner())
```

A checkpoint made so is one of the run like any other: DCP plans and reshards, each rank writes its own shard, and the
vote of `voting` decides, within `write_data`, so that a rank that is missing is named and nothing waits for DCP's
collectives longer than that. Nothing is pickled in the files: the planners turn what is no tensor into simckpt's typed
JSON. Pass `process_group=` with a gloo group of its own to `dcp.async_save`, as torch's own collectives need it.
"""

from __future__ import annotations

import base64
import contextlib
import io
import json
import os
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    SavePlan,
    SavePlanner,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from simckpt.distributed.committing import commit_together
from simckpt.distributed.keys import Keys
from simckpt.distributed.voting import PATIENCE, Ballot, grace_of
from simckpt.errors import CheckpointNotFoundError, FormatError, NotAStoreError, RunNotFoundError
from simckpt.state import tensors
from simckpt.state.leaf import Leaf, PartLeaf, Slab
from simckpt.state.paths import path_part
from simckpt.state.tree import Encoded, decode, encode
from simckpt.storage import Commit, CommitDraft, CommitRecord, RunRecord, Shard, StoreFiles, names
from simckpt.storage.preparing import Prepared

_ended: list[str] = []  # votes of this process of which keys are left
_TENSORS, _OBJECTS = "tensors", "objects"  # components: of all ranks, and of each; the latter with "@" and its number


class HDF5StorageWriter(StorageWriter):
    """Writes one checkpoint of a run; make a new one for each save.

    Args:
        path: of the store, which is made if it does not exist.
        run: the run's name; it is begun if there is none.
        step: of the checkpoint [env steps].
        metrics: {name: number} of the checkpoint.
        patience: how much longer one rank may write than another [s].
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        run: str,
        *,
        step: int = 0,
        metrics: Mapping[str, float] | None = None,
        patience: float = PATIENCE,
    ) -> None:
        self._path, self._run, self._patience = path, run, patience
        self._draft = CommitDraft(None, step, dict(metrics or {}))
        self._rank, self._leads = 0, True
        self._structure = b""
        self._id = ""

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Does nothing: where the checkpoint goes is said in the constructor."""

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Returns True; an id of DCP's is not used."""
        return True

    def storage_meta(self) -> StorageMeta | None:
        """Returns the name of the save."""
        return StorageMeta(checkpoint_id=os.fspath(self._path), save_id=self._id)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Makes the store and the run if they are missing."""
        # DCP passes the rank if there is a parameter of the name kwargs
        self._rank, self._leads, self._id = int(kwargs.get("rank", 0)), is_coordinator, secrets.token_hex(8)
        if not is_coordinator:
            return
        try:
            files = StoreFiles.open(self._path)
        except NotAStoreError:
            files = StoreFiles.create(self._path)
        try:
            files.read_run(self._run)
        except RunNotFoundError:
            files.write_run(self._run, RunRecord(names.random_id(), self._run, time.time()))

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Returns the plan."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Returns the plans with the name of the save; on rank 0, which also notes what there is."""
        found = {item.index.fqn: None for plan in plans for item in plan.items if item.type != WriteItemType.BYTE_IO}
        # the structure names leaves, whatever is in them
        self._structure = encode({name: torch.zeros(()) for name in found}).structure
        return [replace(plan, storage_data={"save": self._id, "ranks": len(plans)}) for plan in plans]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Writes what the plan says, and commits it together with the other ranks.

        Raises:
            CoordinationError: nothing was committed; it names the ranks that are missing or have failed.
            OutcomeUnknownError: a rank was lost while it may have been committing.
        """
        facts = plan.storage_data
        files = StoreFiles.open(self._path)
        leaves: dict[str, Leaf] = {}
        objects: dict[str, str] = {}
        results = []
        for item in plan.items:
            data: Any = planner.resolve_data(item)
            if item.type == WriteItemType.BYTE_IO:
                objects[item.index.fqn] = data.getvalue().decode()
                results.append(WriteResult(item.index, len(objects[item.index.fqn]), None))
                continue
            leaf = _leaf(item, data)
            results.append(WriteResult(item.index, leaf.data.nbytes, None))
            if leaf.data.size or 0 in leaf.shape:
                leaves[path_part(item.index.fqn)] = leaf
        own = {
            "values": objects,
            "paths": {name: list(path) for name, path in getattr(planner, "mappings", {}).items()},
        }
        components = {f"{_OBJECTS}@{self._rank}": encode(own)}
        if leaves or self._structure:
            components[_TENSORS] = Encoded(leaves, self._structure if self._leads else b"")
        if facts["ranks"] == 1:
            files.commit(self._run, self._draft_of(files), components)
        else:
            self._commit_together(files, components, facts)
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    def _draft_of(self, files: StoreFiles) -> CommitDraft:
        known = [record for record in files.records(self._run) if isinstance(record, CommitRecord)]
        return replace(self._draft, parent=known[-1].id if known else None)

    def _commit_together(self, files: StoreFiles, components: Mapping[str, Encoded], facts: Mapping[str, Any]) -> None:
        ranks = facts["ranks"]
        base: Any = torch.distributed.group.WORLD
        store = Keys(base.get_group_store(), "simckpt/dcp")
        ballot = Ballot(store, self._rank, ranks, facts["save"], self._patience, grace_of(ranks), tuple(_ended))
        try:
            try:
                prepared = files.prepare(self._run, components, shard=Shard(self._rank, ranks))
            except BaseException as error:
                ballot.withdraw(f"{type(error).__name__}: {error}")
                raise

            def publish(of_ranks: list[Prepared], facts: Sequence[Any]) -> Commit:
                return files.publish_shards(self._run, self._draft_of(files), of_ranks)

            commit_together(files, self._run, prepared, ballot, publish, same={"step": self._draft.step})
            _ended.clear()
        finally:
            _ended.append(facts["save"])
            store.close()

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Does nothing: all is committed already, and what DCP calls metadata follows from the index."""


class HDF5StorageReader(StorageReader):
    """Reads one checkpoint of a run, of however many ranks.

    Args:
        path: of the store.
        run: the run's name.
        seq: number of the checkpoint; the newest if None.
    """

    def __init__(self, path: str | os.PathLike[str], run: str, *, seq: int | None = None) -> None:
        self._files = StoreFiles.open(path)
        self._run = run
        self._seq = seq
        self._objects: dict[str, str] = {}

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Does nothing: which checkpoint is read is said in the constructor."""

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Returns True; an id of DCP's is not used."""
        return True

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Returns what there is, by the index alone."""
        if self._seq is None:
            known = [record.seq for record in self._files.records(self._run) if isinstance(record, CommitRecord)]
            if not known:
                raise CheckpointNotFoundError(f"run {self._run!r} has no checkpoint")
            self._seq = known[-1]
        index = self._files.index(self._run, self._seq)
        own = [name for name in index.components if name.partition("@")[0] == _OBJECTS]
        paths: dict[str, tuple[Any, ...]] = {}
        for encoded in self._files.read(self._run, self._seq, own).values():
            tree = decode(encoded.leaves, encoded.structure)
            with _understood(f"checkpoint {self._seq} of run {self._run!r}"):
                self._objects |= tree["values"]
                paths |= {name: tuple(path) for name, path in tree["paths"].items()}
        known_names = {path_part(name): name for name in paths}
        described: dict[str, Any] = {name: BytesStorageMetadata() for name in self._objects}
        for leaf in index:
            if leaf.component == _TENSORS and leaf.key != names.STRUCTURE:
                boxes = [(part.start, part.shape) for part in leaf.parts] or [((0,) * len(leaf.shape), leaf.shape)]
                chunks = [ChunkStorageMetadata(torch.Size(start), torch.Size(shape)) for start, shape in boxes]
                with _understood(leaf.path):
                    properties = TensorProperties(dtype=vars(torch)[leaf.dtype])
                name = known_names.get(leaf.key, leaf.key)
                described[name] = TensorStorageMetadata(properties, torch.Size(leaf.shape), chunks)
        return Metadata(described, planner_data=paths)

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Does nothing."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Returns the plan."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Returns the plans."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Reads what the plan says, every byte verified; of each tensor the smallest box that has it all."""
        assert self._seq is not None
        boxes: dict[str, list[tuple[Any, tuple[int, ...], tuple[int, ...]]]] = {}
        for item in plan.items:
            name = item.storage_index.fqn
            if item.type == LoadItemType.BYTE_IO:
                planner.load_bytes(item, io.BytesIO(self._objects[name].encode()))
                continue
            begin = item.storage_index.offset or (0,) * len(item.lengths)
            start = tuple(a + b for a, b in zip(begin, item.storage_offsets, strict=True))
            boxes.setdefault(name, []).append((item, start, tuple(item.lengths)))
        slabs = {f"{_TENSORS}/{path_part(name)}": _hull([box[1:] for box in found]) for name, found in boxes.items()}
        leaves = self._files.read_leaves(self._run, self._seq, list(slabs), slabs=slabs) if slabs else {}
        for name, found in boxes.items():
            path = f"{_TENSORS}/{path_part(name)}"
            leaf, slab = leaves[path], slabs[path]
            read = tensors.tensor_from_leaf(Leaf(leaf.data, leaf.dtype, slab.shape, leaf.kind), None)
            for item, start, shape in found:
                place = tuple(slice(a - b, a - b + n) for a, b, n in zip(start, slab.offset, shape, strict=True))
                target = planner.resolve_tensor(item).detach()
                target.copy_(read[place])
                planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done


class JSONSavePlanner(DefaultSavePlanner):
    """DCP's planner, which turns what is no tensor into typed JSON instead of a pickle."""

    def transform_object(self, write_item: WriteItem, object: Any) -> Any:
        """Returns the bytes of an object; raises UnsupportedStateError for what is no state."""
        return io.BytesIO(_to_json(object).encode()) if write_item.type == WriteItemType.BYTE_IO else object


class JSONLoadPlanner(DefaultLoadPlanner):
    """DCP's planner, which reads what `JSONSavePlanner` wrote, and executes nothing."""

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        """Takes the live state; unlike torch's own it keeps values of types that torch does not know."""
        self.original_state_dict, self.mappings = state_dict, {}
        if self.flatten_state_dict:
            state_dict, self.mappings = flatten_state_dict(state_dict)
        self.state_dict, self.metadata, self.is_coordinator = state_dict, metadata, is_coordinator

    def load_bytes(self, read_item: Any, value: io.BytesIO) -> None:
        """Puts an object into its place."""
        name, found = read_item.dest_index.fqn, _from_json(value.read().decode())
        if not self.flatten_state_dict:
            self.state_dict[name] = found
            return
        *path, last = self.mappings[name]
        node: Any = self.original_state_dict
        for key in path:
            node = node[key]
        node[last] = found


def _leaf(item: WriteItem, data: Any) -> Leaf:
    leaf = tensors.tensor_to_leaf(data.detach())
    if item.type != WriteItemType.SHARD:
        return leaf
    assert item.tensor_data is not None
    chunk = item.tensor_data.chunk
    if chunk.sizes == item.tensor_data.size:
        return leaf
    return PartLeaf(leaf.data, leaf.dtype, tuple(item.tensor_data.size), leaf.kind, tuple(chunk.offsets))


def _hull(boxes: list[tuple[tuple[int, ...], tuple[int, ...]]]) -> Slab:
    starts = [min(column) for column in zip(*(start for start, _ in boxes), strict=True)]
    stops = [max(column) for column in zip(*(map(sum, zip(*box, strict=True)) for box in boxes), strict=True)]
    return Slab(tuple(starts), tuple(stop - start for start, stop in zip(starts, stops, strict=True)))


def _to_json(obj: Any) -> str:
    encoded = encode(obj)
    arrays = {
        path: [leaf.dtype, list(leaf.shape), leaf.kind, leaf.data.dtype.str, list(leaf.data.shape), _base64(leaf.data)]
        for path, leaf in encoded.leaves.items()
    }
    return json.dumps({"structure": encoded.structure.decode(), "leaves": arrays})


def _from_json(text: str) -> Any:
    with _understood("an object"):
        content = json.loads(text)
        leaves, structure = dict(_leaves(content["leaves"])), content["structure"].encode()
    return decode(leaves, structure)


@contextlib.contextmanager
def _understood(what: str) -> Iterator[None]:
    """Turns what a stranger's checkpoint may lead to into a FormatError."""
    try:
        yield
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        message = f"{what} is not as HDF5StorageWriter writes it ({type(error).__name__}: {error})"
        raise FormatError(message) from error


def _leaves(arrays: Mapping[str, Any]) -> Iterator[tuple[str, Leaf]]:
    for path, (dtype, shape, kind, stored, stored_shape, data) in arrays.items():
        array = np.frombuffer(base64.b64decode(data), np.dtype(stored)).reshape(stored_shape).copy()
        yield path, Leaf(array, dtype, tuple(shape), kind)


def _base64(array: np.ndarray[Any, Any]) -> str:
    return base64.b64encode(np.ascontiguousarray(array).tobytes()).decode()
