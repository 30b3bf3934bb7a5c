"""A store that is driven at random, against a model of plain dicts: what it holds, to the bit, and what it refuses."""

from __future__ import annotations

import contextlib
import copy
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar
from unittest import mock

from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from reliability import Line, Progress, in_child
from store_states import Saver, States, leftovers, small_leaves_count

from simckpt.errors import (
    CheckpointNotFoundError,
    ConflictError,
    RunLockedError,
    SegmentMissingError,
)
from simckpt.storage import BranchRecord, CommitRecord, RunRecord, StoreFiles, origins, records, store_marks, usage
from simckpt.testing.faults import FaultyDisk, kill

RUNS = ("a", "b", "c", "d")


@dataclass
class Kept:
    """What the model knows of a checkpoint: what a user was told, and nothing of how it is stored."""

    step: int
    parent: str | None
    kind: str = "save"
    pruned: bool = False
    tags: set[str] = field(default_factory=set)
    pinned: bool = False


class Machine(RuleBasedStateMachine):
    """The rules. `expected` is {run: {checkpoint id: Kept}} in the order of commits, `origins` {run: checkpoint id}."""

    counts: ClassVar[Counter[str]] = Counter()

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(dir="/dev/shm" if Path("/dev/shm").exists() else None))
        self.states = States()
        self.steps = 0
        self.expected: dict[str, dict[str, Kept]] = {}
        self.origins: dict[str, str | None] = {}
        self.savers: dict[str, Saver] = {}
        self.prepared: dict[str, tuple[int, Saver, object]] = {}
        self.stack = contextlib.ExitStack()
        self.stack.enter_context(small_leaves_count())

    def teardown(self) -> None:
        self.stack.close()
        shutil.rmtree(self.folder)

    @property
    def path(self) -> Path:
        return self.folder / "store"

    @initialize()
    def begin(self) -> None:
        self.store = StoreFiles.create(self.path, disk=FaultyDisk())
        self._start("a")

    def _start(self, run: str, origin: tuple[str, int] | None = None) -> None:
        number = f"{len(self.expected) + 1:032x}"
        if origin is None:
            self.store.write_run(run, RunRecord(number, run, 1.8e9))
            self.origins[run], self.savers[run] = None, Saver(self.states, run)
        else:
            found = self.store.commit_record(*origin)
            record = BranchRecord(*origin, found.step, {})
            self.store.write_run(run, RunRecord(number, run, 1.8e9, origin=found.id, branch=record))
            self.origins[run], self.savers[run] = found.id, Saver(self.states, run)
            self.savers[run].head = found.id
        self.expected[run] = {}

    def _next_step(self, run: str) -> int:
        return 1 + max((kept.step for kept in self.expected[run].values()), default=0) % 6

    def _pick(self, data: st.DataObject, *, living: bool = True) -> tuple[str, str, int] | None:
        """Draws (run, id, commit number) of a checkpoint."""
        found = [
            (run, identity, seq)
            for run, line in self.expected.items()
            for seq, (identity, kept) in enumerate(line.items(), start=1)
            if not (living and kept.pruned)
        ]
        return data.draw(st.sampled_from(found)) if found else None

    @rule(data=st.data())
    def save(self, data: st.DataObject) -> None:
        run = data.draw(st.sampled_from(sorted(self.expected)))
        saver, step = self.savers[run], self._next_step(run)
        parent = saver.head
        with self.store.claim(run):
            commit = saver.save(self.store, step)
        self.expected[run][commit.record.id] = Kept(step, parent)
        self.counts["save"] += 1

    @rule(data=st.data())
    def roll_back(self, data: st.DataObject) -> None:
        picked = self._pick(data)
        if picked is None:
            return
        run, identity, _ = picked
        saver = self.savers[run]
        step = self.expected[run][identity].step
        rollback = {"abandoned": saver.head, "level": 1, "changes": {}, "reason": "drawn"}
        saver.head = identity
        saver.rows, saver.pieces = 0, ()
        with self.store.claim(run):
            commit = saver.save(self.store, step, kind="rollback", rollback=rollback)
        self.expected[run][commit.record.id] = Kept(step, identity, "rollback")
        self.counts["rollback"] += 1

    @rule(data=st.data())
    def branch(self, data: st.DataObject) -> None:
        free = [run for run in RUNS if run not in self.expected]
        picked = self._pick(data)
        if not free or picked is None:
            return
        self._start(free[0], (picked[0], picked[2]))
        self.counts["branch"] += 1

    @rule(data=st.data())
    def branch_of_what_was_pruned(self, data: st.DataObject) -> None:
        free = [run for run in RUNS if run not in self.expected]
        picked = self._pick(data, living=False)
        if not free or picked is None or not self.expected[picked[0]][picked[1]].pruned:
            return
        record = BranchRecord(picked[0], picked[2], 1, {})
        with contextlib.suppress(CheckpointNotFoundError):
            self.store.write_run(free[0], RunRecord("e" * 32, free[0], 1.8e9, origin=picked[1], branch=record))
            raise AssertionError("a branch of a pruned checkpoint")
        self.counts["refused branch"] += 1

    @rule(data=st.data())
    def prune(self, data: st.DataObject) -> None:
        picked = self._pick(data)
        if picked is None:
            return
        run, identity, seq = picked
        try:
            with self.store.claim(run):
                self.store.prune(run, seq, "drawn")
        except ConflictError:
            assert identity in self.origins.values(), "a prune was refused for no reason"
            self.counts["refused prune"] += 1
        else:
            assert identity not in self.origins.values(), "the origin of a branch was pruned"
            self.expected[run][identity].pruned = True
            self.counts["prune"] += 1

    @rule(data=st.data(), marks=st.lists(st.sampled_from(["tag", "untag", "pin", "unpin"]), min_size=1, max_size=4))
    def mark(self, data: st.DataObject, marks: list[str]) -> None:
        picked = self._pick(data)
        if picked is None:
            return
        run, identity, seq = picked
        kept = self.expected[run][identity]
        for mark in marks:
            if mark in ("tag", "untag"):
                getattr(self.store, mark)(run, seq, "drawn")
                kept.tags = {"drawn"} if mark == "tag" else set()
            else:
                getattr(self.store, mark)(run, seq)
                kept.pinned = mark == "pin"
        self.counts["marks"] += 1

    @rule(data=st.data())
    def begin_a_save(self, data: st.DataObject) -> None:
        """A save in the background: other runs save, prune and branch before it is published."""
        free = [run for run in sorted(self.expected) if run not in self.prepared]
        if not free:
            return
        run = data.draw(st.sampled_from(free))
        saver, step = copy.copy(self.savers[run]), self._next_step(run)
        self.store._learn({piece.segment for piece in saver.pieces})
        self.prepared[run] = step, saver, saver.prepare(self.store, step)
        self.counts["save begun"] += 1

    @rule(data=st.data(), drop=st.booleans())
    def end_a_save(self, data: st.DataObject, drop: bool) -> None:
        if not self.prepared:
            return
        run = data.draw(st.sampled_from(sorted(self.prepared)))
        step, saver, prepared = self.prepared.pop(run)
        if drop:
            self.store.discard(prepared)
            return
        saver.head = parent = self.savers[run].head
        with self.store.claim(run):
            commit = saver.publish(self.store, step, prepared)
        self.savers[run] = saver
        self.expected[run][commit.record.id] = Kept(step, parent)
        self.counts["save ended"] += 1

    @rule(data=st.data())
    def a_second_writer(self, data: st.DataObject) -> None:
        run = data.draw(st.sampled_from(sorted(self.expected)))
        with self.store.claim(run):

            def intrude() -> int:
                try:
                    StoreFiles.open(self.path, disk=FaultyDisk()).claim(run)
                except RunLockedError:
                    return 7
                return 1

            assert in_child(intrude) == 7, "two writers of one run"
            with contextlib.suppress(RunLockedError):
                StoreFiles.open(self.path, disk=FaultyDisk()).claim(run)
                raise AssertionError("one process claimed a run twice")
        self.counts["refused writer"] += 1

    @rule(data=st.data(), at=st.integers(1, 70))
    def a_writer_that_dies(self, data: st.DataObject, at: int) -> None:
        """Another process saves and prunes, and is killed at an operation; what it left is the model from then on."""
        run = data.draw(st.sampled_from(sorted(self.expected)))
        saver, step = copy.copy(self.savers[run]), self._next_step(run)
        line = self.expected[run]
        living = [
            seq
            for seq, (identity, kept) in enumerate(line.items(), 1)
            if not kept.pruned and identity not in self.origins.values()
        ]
        victim = data.draw(st.sampled_from(living)) if living else None

        def die() -> None:
            disk = FaultyDisk()
            store = StoreFiles.open(self.path, disk=disk)
            with store.claim(run):
                disk.arm(kill, at=at)
                if victim is not None and at % 2:
                    store.prune(run, victim, "drawn")
                saver.save(store, step)

        code = in_child(die)
        assert code in (0, -9), code
        self._reopen()
        found = self.store.records(run)
        if victim is not None and at % 2:
            line[list(line)[victim - 1]].pruned = not isinstance(found[victim - 1], CommitRecord)
        if len(found) > len(line):
            assert len(found) == len(line) + 1
            line[found[-1].id] = Kept(step, self.savers[run].head)
            self.savers[run].head = found[-1].id
        assert code == -9 or len(found) == len(line)
        with self.store.claim(run):
            pass
        self.counts["kill" if code else "writer elsewhere"] += 1

    def _reopen(self) -> None:
        self.store = StoreFiles.open(self.path, disk=FaultyDisk())

    @precondition(lambda self: self.steps >= 4)
    @rule()
    def open_again_and_free_what_nobody_needs(self) -> None:
        """What lies in segments is known from the indexes alone then."""
        self.steps = 0
        self._reopen()
        self.store.compact() if hasattr(self.store, "compact") else self.store.sweep()
        if not self.prepared:
            assert leftovers(self.store) == []
        self.counts["compact"] += 1

    @invariant()
    def holds_what_it_was_given(self) -> None:
        if not self.expected:
            return
        self.steps += 1
        store = StoreFiles.open(self.path)
        assert store.runs() == sorted(self.expected)
        for run, line in self.expected.items():
            assert store.read_run(run).origin == self.origins[run]
            found = store.records(run)
            assert [record.id for record in found] == list(line)
            for record, kept in zip(found, line.values(), strict=True):
                said = record.step, record.parent, record.kind, not isinstance(record, CommitRecord)
                assert said == (kept.step, kept.parent, kept.kind, kept.pruned)
                if not kept.pruned:
                    self.states.compare(store.read(run, record.seq), kept.step, f"{run}, {record.seq}")
                    marks = store.marks_of(run, record.id)
                    assert (marks.tags, marks.pinned) == (frozenset(kept.tags), kept.pinned)
            self.counts["checkpoints compared"] += len(found)


def drive(examples: int, steps: int, *, fixed: bool = True) -> None:
    """Runs the machine; raises what it finds, shrunk."""
    run_state_machine_as_test(
        Machine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            deadline=None,
            database=None,
            derandomize=fixed,
            suppress_health_check=list(HealthCheck),
            phases=[Phase.generate],  # shrinking thousands of disk operations takes long; the seed repeats it
        ),
    )


_tombstone_of = records.tombstone_of


def _orphaned(record: CommitRecord, **fields: object) -> object:
    tombstone = _tombstone_of(record, **fields)
    return type(tombstone)(**{**vars(tombstone), "parent": None})


MUTANTS = {
    "pruned without a parent": lambda: mock.patch.object(records, "tombstone_of", _orphaned),
    "unpin that forgets to": lambda: mock.patch.object(store_marks.StoreMarks, "unpin", return_value=None),
    "prune of origins": lambda: mock.patch.object(origins.Origins, "check_unused", return_value=None),
    "segments of other runs freed": lambda: mock.patch.object(usage.SegmentUse, "by_checkpoints", return_value=set()),
}


def caught(name: str, examples: int = 60) -> bool:
    """Returns whether the machine finds a mutant."""
    with MUTANTS[name]():
        try:
            drive(examples, 40)
        except (AssertionError, SegmentMissingError, ExceptionGroup):
            return True
    return False


@contextlib.contextmanager
def counted() -> Iterator[Counter[str]]:
    Machine.counts = Counter()
    yield Machine.counts


def run(scale: float, progress: Progress) -> list[Line]:
    progress("state machine")
    failures: tuple[str, ...] = ()
    with counted() as counts:
        try:
            drive(max(5, round(250 * scale)), 50)
        except Exception as error:
            failures = (f"{type(error).__name__}: {error}"[:800],)
    steps = sum(count for name, count in counts.items() if name != "checkpoints compared")
    detail = ", ".join(f"{name} {count:,}" for name, count in sorted(counts.items()))
    mutants = {name: caught(name) for name in MUTANTS}
    return [Line("state-machine steps against a model", steps, len(failures), detail, mutants, failures)]
