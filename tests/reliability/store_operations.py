"""The operations on a store that the suites interrupt, each with the store that it starts from.

**A new kind of operation is registered by one more `Case` in `CASES`** (archive uploads, say): a name, what to prepare,
what to do. The suites then fail, kill, tear and starve it at every one of its disk operations, and cut the power in it.
"""

from __future__ import annotations

import contextlib
import copy
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from reliability import in_child
from store_states import BRANCH, EXPORTED, RUN, Look, Saver, SaverOfRanks, States, StatesOfRanks, look

from simckpt.branching import importing
from simckpt.storage import BranchRecord, RunRecord, StartRecord, StoreFiles
from simckpt.storage.durable import Disk
from simckpt.testing.faults import FaultyDisk, Operation, kill

SAVED = 3  # checkpoints of the run
IMPORTED = "imported"
CREATED = "created"
START = StartRecord(1.8e9, {"learning_rate": 3e-4}, host="here")


@dataclass
class World:
    """A store, and what the processes that write it keep in mind.

    Attributes:
        base: the folder in which the store lies, as `store`, and files beside it.
        states: what is saved in it.
        store: opened; None before it is made.
        savers: {run: its saver}.
    """

    base: Path
    states: States
    store: StoreFiles | None = None
    savers: dict[str, Saver] = field(default_factory=dict)

    def copied(self, base: Path) -> World:
        """Returns the same in another folder. No file of a store is ever changed in place, so names are enough."""
        shutil.copytree(self.base, base, copy_function=os.link)
        return World(base, self.states, None, {run: copy.copy(saver) for run, saver in self.savers.items()})

    def opened(self, disk: Disk) -> World:
        """Opens the store on another disk, and returns this."""
        if (self.base / "store" / "store.json").exists():
            self.store = StoreFiles.open(self.base / "store", disk=disk)
        self.disk = disk
        return self

    def look(self) -> Look:
        return look(self.base, self.states)

    @contextlib.contextmanager
    def claimed(self, runs: tuple[str, ...]) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for run in runs:
                stack.enter_context(self.store.claim(run))
            yield

    def save(self, step: int, run: str = RUN, **fields: object) -> None:
        self.savers[run].save(self.store, step, **fields)


def _nothing(world: World) -> None:
    pass


@dataclass(frozen=True)
class Case:
    """An operation to be interrupted.

    Attributes:
        name: what it is.
        operate: does it.
        prepare: what it needs beside the store that `build` makes.
        claims: the runs that are claimed meanwhile.
        between: the looks that are allowed beside those before and after, given these two.
        starts: makes the world; `build` unless the case makes its store itself.
    """

    name: str
    operate: Callable[[World], object]
    prepare: Callable[[World], object] = _nothing
    claims: tuple[str, ...] = (RUN,)
    between: Callable[[Look, Look], list[Look]] = lambda before, after: []
    starts: Callable[[Path, States], World] | None = None

    def made(self, base: Path, states: States) -> World:
        """Returns the world that the operation starts from."""
        world = (self.starts or build)(base, states)
        self.prepare(world)
        return world


def build(base: Path, states: States) -> World:
    """Makes a run of three checkpoints, of which one has marks, and a branch that shares its segments."""
    base.mkdir()
    world = World(base, states)
    world.store = StoreFiles.create(base / "store", disk=FaultyDisk())
    world.store.write_run(RUN, RunRecord("ab" * 16, RUN, 1.8e9, {"learning_rate": 3e-4}))
    world.savers[RUN] = Saver(states)
    with world.claimed((RUN,)):
        for step in range(1, SAVED + 1):
            world.save(step)
            if step == 2:
                world.savers[BRANCH] = copy.copy(world.savers[RUN])
                world.savers[BRANCH].run = BRANCH
        world.store.pin(RUN, 2)
        world.store.tag(RUN, 2, "second")
        branch(world, BRANCH)
    with world.claimed((BRANCH,)):
        world.save(3, BRANCH)
    return world


def build_ranks(base: Path, states: States) -> World:
    """Makes a run of two ranks, of three checkpoints."""
    base.mkdir()
    world = World(base, StatesOfRanks(states.seed))
    world.store = StoreFiles.create(base / "store", disk=FaultyDisk())
    world.store.write_run(RUN, RunRecord("ab" * 16, RUN, 1.8e9))
    world.savers[RUN] = SaverOfRanks(world.states)
    with world.claimed((RUN,)):
        for step in range(1, SAVED + 1):
            world.save(step)
    return world


def branch(world: World, name: str) -> None:
    """What `Checkpoint.branch` does to the disk."""
    origin = world.store.commit_record(RUN, 2)
    record = BranchRecord(RUN, 2, origin.step, {"learning_rate": 1e-4})
    world.store.write_run(name, RunRecord("cd" * 16, name, 1.8e9, origin=origin.id, branch=record))


def die_in(operate: Callable[[World], object], name: str, number: int, claims: tuple[str, ...] = (RUN,)):
    """Returns what leaves the world as it is after a kill before the `number`th operation of a name."""

    def prepare(world: World) -> None:
        seen = 0

        def fault(operation: Operation) -> object:
            nonlocal seen
            seen += operation.name == name
            return kill(operation) if seen == number else operation.perform()

        def die() -> None:
            disk = FaultyDisk()
            world.opened(disk)
            with world.claimed(claims):
                disk.arm(fault, at=1, sticky=True)
                operate(world)

        code = in_child(die)
        assert code == -9, f"the process that was to be killed ended with {code}"

    return prepare


def _save(world: World) -> None:
    world.save(SAVED + 1)


def _prune(world: World) -> None:
    world.store.prune(RUN, SAVED, "test")


def _roll_back(world: World) -> None:
    saver = world.savers[RUN]
    abandoned, saver.head = saver.head, world.store.commit_record(RUN, 1).id
    reason = {"abandoned": abandoned, "level": 1, "changes": {}, "reason": "test"}
    world.save(1, kind="rollback", rollback=reason)


def _exported(world: World) -> None:
    world.store.export(RUN, SAVED, world.base / "source.h5", metrics={})


def _import(world: World) -> None:
    source = importing.opened(world.base / "source.h5", run=IMPORTED)
    importing.import_checkpoint(world.store, source, run=IMPORTED)


def _between_import(before: Look, after: Look) -> list[Look]:
    """The run of an import may be there without its checkpoint, and with its start."""
    return [{**before, IMPORTED: (False, (), starts)} for starts in (0, 1)]


def _create(world: World) -> None:
    world.store = StoreFiles.create(world.base / "store", disk=world.disk)
    if CREATED not in world.store.runs():
        world.store.write_run(CREATED, RunRecord("ef" * 16, CREATED, 1.8e9))
    world.savers.setdefault(CREATED, Saver(world.states, CREATED))


def _empty(base: Path, states: States) -> World:
    base.mkdir()
    return World(base, states, None, {CREATED: Saver(states, CREATED)})


def _claim(world: World) -> None:
    with world.store.claim(RUN):
        pass


CASES = [
    # new rows, merged rows, a large leaf that has not changed: three segments
    Case("save", _save),
    Case("save of a branch", lambda world: world.save(SAVED + 1, BRANCH), claims=(BRANCH,)),
    Case("rollback", _roll_back),
    Case("prune, freeing segments", _prune),
    Case("prune, freeing none", lambda world: world.store.prune(RUN, 1, "test")),
    Case("sweep of a save", lambda world: world.store.sweep(), die_in(_save, "rename", 4), claims=()),
    Case("sweep of a prune", lambda world: world.store.sweep(), die_in(_prune, "unlink", 2), claims=()),
    Case("branch", lambda world: branch(world, "new"), claims=()),
    Case("import", _import, _exported, claims=(), between=_between_import),
    Case("export", lambda world: world.store.export(RUN, SAVED, world.base / EXPORTED, metrics={}), claims=()),
    Case("tag", lambda world: world.store.tag(RUN, 1, "good"), claims=()),
    Case("untag", lambda world: world.store.untag(RUN, 2, "second"), claims=()),
    Case("pin", lambda world: world.store.pin(RUN, 1), claims=()),
    Case("unpin", lambda world: world.store.unpin(RUN, 2), claims=()),
    Case("later metrics", lambda world: world.store.add_metrics(RUN, 2, {"a": 1.0}), claims=()),
    Case("start", lambda world: world.store.write_start(RUN, START), claims=()),
    Case("claim and release", _claim, claims=()),
    Case("new store", _create, claims=(), between=lambda before, after: [{}], starts=_empty),
]
if hasattr(StoreFiles, "compact"):
    CASES += [
        Case("compact after a save", lambda world: world.store.compact(), die_in(_save, "rename", 4), claims=()),
        Case("compact after a prune", lambda world: world.store.compact(), die_in(_prune, "unlink", 2), claims=()),
    ]

# each rank prepares its part, rank 0 gathers them
CASES += [
    Case("save of ranks", _save, starts=build_ranks),
    Case("prune of ranks", _prune, starts=build_ranks),
]


def case(name: str) -> Case:
    (found,) = [case for case in CASES if case.name == name]
    return found
