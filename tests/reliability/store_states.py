"""States that depend on their step alone, savers of them, and a look at a store that compares every bit with them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from unittest import mock

import numpy as np
from shard_helpers import part_of, rows_cut
from source_helpers import read_source

from simckpt.errors import DamagedError, NotAStoreError
from simckpt.maintenance.check import Scope, check
from simckpt.state.leaf import Leaf, LogLeaf
from simckpt.state.tree import Encoded
from simckpt.storage import Commit, CommitDraft, CommitRecord, Shard, StoreFiles, exports, unchanged
from simckpt.storage.preparing import Prepared, write_prepared
from simckpt.storage.records import SHARDS_FILE
from simckpt.storage.shards import parse_listing

RUN, BRANCH = "run", "branch"
LIMIT = 3  # segments of a checkpoint: the fourth save merges
LARGE = 4096  # [bytes] from which on a leaf is looked at whether it has changed; a megabyte would only take time
SETTLED = 3  # the step from which on the table does not change: the save after it shares it


class BrokenError(AssertionError):
    """A store is not what it was promised to be."""


@contextlib.contextmanager
def small_leaves_count() -> Iterator[None]:
    """Lets leaves of a few kilobytes be large ones for the block."""
    with mock.patch.object(unchanged, "LARGE", LARGE):
        yield


@dataclass(frozen=True)
class States:
    """A family of states: what a run holds at each step.

    Attributes:
        seed: another one gives other sizes and values.
    """

    seed: int = 0

    @property
    def rows_per_step(self) -> int:
        return 2 + self.seed % 5

    def arrays(self, step: int) -> dict[str, dict[str, np.ndarray]]:
        """Returns {component: {leaf: array}}."""
        rng = np.random.default_rng([self.seed, step])
        count = self.rows_per_step * step
        rows = (np.arange(count * 6, dtype=np.float32) + self.seed).reshape(-1, 2, 3)
        table = np.arange(LARGE // 4 + 64 * (self.seed % 7), dtype=np.float32) + max(0, SETTLED - step)
        return {
            "replay": {"observations": rows},
            "agent": {"table": table},
            "envs": {"qpos": rng.standard_normal((3, 1 + self.seed % 4)), "empty": np.empty((0, 2))},
        }

    def structure(self, component: str, step: int) -> bytes:
        return f'{{"{component}":{step}}}'.encode()

    def compare(self, found: dict[str, Encoded], step: int, what: str) -> None:
        """Raises BrokenError unless these are the bits of the step."""
        expected = self.arrays(step)
        if found.keys() != expected.keys():
            raise BrokenError(f"{what}: components {sorted(found)}")
        for component, arrays in expected.items():
            leaves = found[component].leaves
            if found[component].structure != self.structure(component, step) or leaves.keys() != arrays.keys():
                raise BrokenError(f"{what}: {component} holds something else than it did at step {step}")
            for name, array in arrays.items():
                data = leaves[name].data
                if (data.dtype, data.shape) != (array.dtype, array.shape) or data.tobytes() != array.tobytes():
                    raise BrokenError(f"{what}: {component}/{name} is not what was saved at step {step}")


@dataclass(frozen=True)
class StatesOfRanks(States):
    """The same family, held by several ranks: the table in parts, replay and envs by each its own.

    Attributes:
        count: of ranks.
    """

    count: int = 2

    def arrays(self, step: int) -> dict[str, dict[str, np.ndarray]]:
        whole = super().arrays(step)
        found = {"agent": whole["agent"]}
        for rank in range(self.count):
            found[f"envs@{rank}"] = {name: array + rank for name, array in whole["envs"].items()}
            found[f"replay@{rank}"] = {name: array + 1000 * rank for name, array in whole["replay"].items()}
        return found


def _leaf(data: np.ndarray) -> Leaf:
    return Leaf(data, data.dtype.name, data.shape, "numpy")


class Saver:
    """What a training process keeps in mind between two saves of a run.

    Attributes:
        run: the run's name.
        head: id of its newest checkpoint.
        limit: how many segments a checkpoint may refer to; more are merged.
    """

    def __init__(self, states: States, run: str = RUN) -> None:
        self.states, self.run = states, run
        self.head: str | None = None
        self.pieces: tuple = ()
        self.rows = 0
        self.limit = LIMIT

    def prepare(self, store: StoreFiles, step: int) -> Prepared:
        arrays = self.states.arrays(step)
        everything = arrays["replay"]["observations"]
        if self.rows > len(everything) or store.missing_segments({piece.segment for piece in self.pieces}):
            self.pieces, self.rows = (), 0
        components = {
            component: Encoded(
                {name: _leaf(data) for name, data in leaves.items()},
                self.states.structure(component, step),
            )
            for component, leaves in arrays.items()
        }
        log = LogLeaf(everything[self.rows :], "float32", everything.shape, "numpy", self.pieces)
        components["replay"].leaves["observations"] = log
        job = replace(store.prepare_job(self.run), limit=self.limit)
        return write_prepared(store._disk, job, components)

    def publish(self, store: StoreFiles, step: int, prepared: Prepared, **fields: object) -> Commit:
        commit = store.publish(self.run, CommitDraft(self.head, step, **fields), prepared)
        self.note(commit, step)
        return commit

    def note(self, commit: Commit, step: int) -> None:
        self.head = commit.record.id
        self.pieces = commit.leaves["replay/observations"].pieces
        self.rows = self.states.rows_per_step * step

    def save(self, store: StoreFiles, step: int, **fields: object) -> Commit:
        store._learn({piece.segment for piece in self.pieces})
        return self.publish(store, step, self.prepare(store, step), **fields)


class SaverOfRanks(Saver):
    """What several ranks keep in mind: each the pieces of its own rows; they save in one process, by one disk."""

    def __init__(self, states: StatesOfRanks, run: str = RUN) -> None:
        super().__init__(states, run)
        self.pieces = ((),) * states.count

    def save(self, store: StoreFiles, step: int, **fields: object) -> Commit:
        count = len(self.pieces)
        stores = [store, *(StoreFiles.open(store.path, disk=store._disk) for _ in range(1, count))]
        known = {piece.segment for pieces in self.pieces for piece in pieces}
        if self.rows > self.states.rows_per_step * step or store.missing_segments(known):
            self.pieces, self.rows = ((),) * count, 0
        prepared: list[Prepared] = []
        try:
            for rank, own in enumerate(stores):
                own._learn({piece.segment for piece in self.pieces[rank]})
                job = replace(own.prepare_job(self.run, shard=Shard(rank, count)), limit=self.limit)
                prepared.append(write_prepared(own._disk, job, self._state_of(rank, step)))
            reports = [prepared[0], *(Prepared.from_json(store.path, each.to_json()) for each in prepared[1:])]
            commit = store.publish_shards(self.run, CommitDraft(self.head, step, **fields), reports)
        except BaseException:
            for own, each in zip(stores, prepared, strict=False):
                own.discard(each)
            raise
        for own, each in zip(stores, prepared, strict=True):
            own.conclude(self.run, each)
        self.head, self.rows = commit.record.id, self.states.rows_per_step * step
        self.pieces = tuple(each.leaves[f"replay%40{rank}/observations"].pieces for rank, each in enumerate(prepared))
        return commit

    def _state_of(self, rank: int, step: int) -> dict[str, Encoded]:
        arrays = self.states.arrays(step)
        table = arrays["agent"]["table"]
        part = part_of(_leaf(table), rows_cut(table.shape, len(self.pieces))[rank])
        everything = arrays[f"replay@{rank}"]["observations"]
        new = LogLeaf(everything[self.rows :], "float32", everything.shape, "numpy", self.pieces[rank])
        envs, replay = f"envs@{rank}", f"replay@{rank}"
        return {
            "agent": Encoded({"table": part}, self.states.structure("agent", step) if rank == 0 else b""),
            envs: Encoded(
                {name: _leaf(data) for name, data in arrays[envs].items()}, self.states.structure(envs, step)
            ),
            replay: Encoded({"observations": new}, self.states.structure(replay, step)),
        }


Look = dict[str, object] | None
EXPORTED = "out.h5"


def look(base: Path, states: States) -> Look:
    """Returns what the store in `base` offers, each checkpoint read and compared; None if there is no store.

    {run: (whether it is a branch, its checkpoints)}, a checkpoint being (kind, step, whether it is pruned, its marks,
    whether it continues the one before it, in its run or in its origin). Ids and times are left out.

    Raises:
        BrokenError, StoreError: something of it is not what was promised.
    """
    try:
        store = StoreFiles.open(base / "store")
    except NotAStoreError:
        return None
    check_clean(store)
    found: dict[str, object] = {}
    for run in store.runs():
        record = store.read_run(run)
        line, places = [], {}
        if record.branch is not None:
            origin = store.commit_record(record.branch.run, record.branch.seq)
            if origin.id != record.origin or not isinstance(origin, CommitRecord):
                raise BrokenError(f"run {run}: its origin is gone")
            places[origin.id] = 0
        for place, commit in enumerate(store.records(run), start=1):
            if commit.seq != place:
                raise BrokenError(f"run {run}: commit {commit.seq} stands at place {place}")
            if commit.parent is not None and commit.parent not in places:
                raise BrokenError(f"run {run}: commit {place} continues one that is not there")
            living = isinstance(commit, CommitRecord)
            if living:
                states.compare(store.read(run, place), commit.step, f"run {run}, commit {place}")
            marks = store.marks_of(run, commit.id)
            marked = (tuple(sorted(marks.tags)), marks.pinned, tuple(sorted(marks.metrics.items())))
            line.append((commit.kind, commit.step, not living, marked, places.get(commit.parent)))
            places[commit.id] = place
        found[run] = (record.branch is not None, tuple(line), len(list_starts(store, run)))
    if (base / EXPORTED).exists():
        exported = exports.open_export(base / EXPORTED)
        states.compare(read_source(exported), exported.commit.step, "the exported file")
        found[EXPORTED] = exported.commit.step
    return found


def check_clean(store: StoreFiles) -> None:
    """Raises DamagedError unless every byte and reference is as it should be; what nobody refers to may lie around."""
    # without HDF5's own metadata, which is written once with the rest and takes a process for each file
    report = check(store.path, Scope(structure=False))
    if not report:
        wrong = [f"{each.path} {each.problem}" for each in (*report.damage, *report.unchecked)]
        raise DamagedError("; ".join(wrong), path=store.path)


def list_starts(store: StoreFiles, run: str) -> list[str]:
    folder = store.path / "runs" / run / "starts"
    names = sorted(path.stem for path in folder.iterdir()) if folder.exists() else []
    for name in names:
        store.read_start(run, name)
    return names


def shard_files(folder: Path) -> set[str]:
    """Returns the names of what belongs to a checkpoint of several ranks, beside its record."""
    listing = parse_listing((folder / SHARDS_FILE).read_bytes(), folder)
    return {SHARDS_FILE, "job.json", *(file.name for file in listing.files)}


def leftovers(store: StoreFiles) -> list[str]:
    """Returns the paths of what lies in a store and nobody refers to."""
    root, used, found = store.path, set(), []
    for run in store.runs():
        for record in store.records(run):
            folder = root / "runs" / run / "checkpoints" / f"{record.seq:08d}"
            wanted = {"commit.json"}
            if isinstance(record, CommitRecord):
                used |= {f"{identity}.h5" for identity in store.index(run, record.seq).segments}
                wanted |= {"state.h5", "leaves.json", "job.json"} if record.shards == 0 else shard_files(folder)
            found += [path for path in folder.iterdir() if path.name not in wanted]
    for name in ("tmp", "trash"):
        found += list((root / name).iterdir()) if (root / name).exists() else []
    if (root / "segments").exists():
        found += [path for path in (root / "segments").iterdir() if path.name not in used]
    return [str(path.relative_to(root)) for path in found]
