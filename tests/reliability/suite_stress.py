"""Processes that save, prune, mark and branch in one store at once, killed at random moments and started again."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import time
from pathlib import Path
from unittest import mock

from reliability import Line, Progress, folder
from store_states import BrokenError, Saver, States, check_clean, leftovers, small_leaves_count

from simckpt.errors import CheckpointNotFoundError, ConflictError, SegmentMissingError, SimckptError
from simckpt.storage import BranchRecord, CommitRecord, RunRecord, StoreFiles, names, usage
from simckpt.testing.faults import FaultyDisk

STEPS = 8  # after which a run begins with few rows again


class Worker:
    """What one process does until it is killed. It says in a file what it is about to do, and what returned."""

    def __init__(self, path: Path, states: States, number: int, seed: int, report: Path) -> None:
        self._states, self._number, self._rng = states, number, random.Random(seed)
        self._report = os.open(report, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self._store = StoreFiles.open(path, disk=FaultyDisk())

    def say(self, *what: object) -> None:
        os.write(self._report, json.dumps(what).encode() + b"\n")

    def work(self) -> None:
        run = self._own_run()
        with self._store.claim(run):
            saver = self._saver(run)
            for count in range(1_000_000):
                self.say("begun", run)
                with contextlib.suppress(SegmentMissingError):
                    commit = saver.save(self._store, 1 + count % STEPS)
                    self.say("saved", run, commit.record.id, commit.record.step)
                if self._rng.random() < 0.6:
                    self._prune(run)
                if self._rng.random() < 0.1:
                    self._branch()
                if self._rng.random() < 0.1:
                    self._mark()

    def _own_run(self) -> str:
        found = [run for run in self._store.runs() if run.startswith(f"w{self._number}-")]
        if found and self._rng.random() < 0.9:
            return self._rng.choice(found)
        run = f"w{self._number}-{names.random_id()[:8]}"
        origin = self._any()
        if origin is None or not self._branched(run, *origin):
            self._store.write_run(run, RunRecord(names.random_id(), run, 1.8e9))
        return run

    def _saver(self, run: str) -> Saver:
        """As after a restore: what is known of the log is what the index of the newest checkpoint, or origin, says."""
        saver, record = Saver(self._states, run), self._store.read_run(run)
        living = [each for each in self._store.records(run) if isinstance(each, CommitRecord)]
        place = (run, living[-1].seq) if living else (record.branch.run, record.branch.seq) if record.branch else None
        if place is not None:
            found = self._store.index(*place)
            saver.head = found.commit.id
            saver.pieces = found.leaves["replay/observations"].pieces
            saver.rows = self._states.rows_per_step * found.commit.step
        return saver

    def _prune(self, run: str) -> None:
        living = [each for each in self._store.records(run) if isinstance(each, CommitRecord)][:-1]
        if living:
            record = self._rng.choice(living)
            self.say("pruning", run, record.id)
            with contextlib.suppress(ConflictError):
                self._store.prune(run, record.seq, "stress")
                self.say("pruned", run, record.id)

    def _any(self) -> tuple[str, CommitRecord] | None:
        """Returns a checkpoint of some run, which may be gone by now."""
        runs = self._store.runs()
        if runs:
            run = self._rng.choice(runs)
            found = [each for each in self._store.records(run, damaged={}) if isinstance(each, CommitRecord)]
            if found:
                return run, self._rng.choice(found)
        return None

    def _branch(self) -> None:
        origin = self._any()
        if origin is not None:
            self._branched(f"w{self._number}-{names.random_id()[:8]}", *origin)

    def _branched(self, name: str, run: str, origin: CommitRecord) -> bool:
        record = BranchRecord(run, origin.seq, origin.step, {})
        try:
            self._store.write_run(name, RunRecord(names.random_id(), name, 1.8e9, origin=origin.id, branch=record))
        except (ConflictError, CheckpointNotFoundError):
            return False
        self.say("branched", name, origin.id)
        return True

    def _mark(self) -> None:
        found = self._any()
        if found is not None:
            with contextlib.suppress(CheckpointNotFoundError):
                self._store.tag(found[0], found[1].seq, "stress")
                self.say("tagged", found[0], found[1].id)


def stress(base: Path, seconds: float, *, processes: int, seed: int, states: States) -> dict[str, int]:
    """Lets processes work for some time, kills them at random, and checks what they left.

    Returns:
        how often what was done.

    Raises:
        BrokenError, SimckptError: a promise was broken.
    """
    path, rng = base / "store", random.Random(seed)
    StoreFiles.create(path, disk=FaultyDisk())
    workers: dict[int, int] = {}
    started = kills = 0

    def start(number: int) -> None:
        nonlocal started
        started += 1
        child = os.fork()
        if child == 0:
            report = base / f"report-{number}-{started}"
            try:
                Worker(path, states, number, seed * 1000 + started, report).work()
            except BaseException as error:
                (base / f"error-{number}-{started}").write_text(f"{type(error).__name__}: {error}")
            finally:
                os._exit(3)
        workers[number] = child

    for number in range(processes):
        start(number)
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        time.sleep(rng.uniform(0.02, 0.3))
        number = rng.randrange(processes)
        kills += _kill(workers[number])
        start(number)
    for child in workers.values():
        kills += _kill(child)
    if errors := sorted(base.glob("error-*")):
        raise BrokenError(f"{len(errors)} processes ended by themselves: {errors[0].read_text()[:500]}")
    done = check(path, [json.loads(line) for file in base.glob("report-*") for line in _lines(file)], states)
    return {"kills": kills, **done}


def _kill(child: int) -> int:
    os.kill(child, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL


def _lines(file: Path) -> list[bytes]:
    return [line for line in file.read_bytes().split(b"\n") if line]


def check(path: Path, said: list[list], states: States) -> dict[str, int]:
    """Compares a store with what the processes said, and returns how often they said what."""
    store = StoreFiles.open(path, disk=FaultyDisk())
    check_clean(store)
    living: dict[str, CommitRecord] = {}
    known: dict[str, object] = {}
    for run in store.runs():
        for record in store.records(run):
            known[record.id] = record
            if isinstance(record, CommitRecord):
                living[record.id] = record
                states.compare(store.read(run, record.seq), record.step, f"{run}, {record.seq}")
    for run in store.runs():
        origin = store.read_run(run).origin
        if origin is not None and origin not in living:
            raise BrokenError(f"run {run}: its origin {origin} is gone")
    doomed = {identity for what, *rest in said if what == "pruning" for identity in rest[1:]}
    counts: dict[str, int] = {}
    for what, run, *rest in said:
        counts[what] = counts.get(what, 0) + 1
        if what == "saved" and rest[0] not in (living if rest[0] not in doomed else known):
            raise BrokenError(f"{run}: checkpoint {rest[0]} was reported and is gone")
        if what == "pruned" and rest[0] in living:
            raise BrokenError(f"{run}: checkpoint {rest[0]} was pruned and is there")
        if what == "branched" and store.read_run(run).origin != rest[0]:
            raise BrokenError(f"run {run} was branched from {rest[0]}")
    for run in store.runs()[:1]:
        with store.claim(run):
            if lying := leftovers(store):
                raise BrokenError(f"left behind for good: {lying[:5]}")
    counts["checkpoints compared"] = len(living)
    return counts


def freeing_others():
    """A pruner that takes the segments of all others for unused."""
    return mock.patch.object(usage.SegmentUse, "by_checkpoints", return_value=set())


def caught() -> bool:
    with folder() as base, small_leaves_count(), freeing_others():
        try:
            stress(base, 4.0, processes=2, seed=1, states=States())
        except (BrokenError, SimckptError):
            return True
    return False


def run(scale: float, progress: Progress) -> list[Line]:
    rounds, totals, failures = max(1, round(12 * scale)), {}, []
    for seed in range(rounds):
        progress(f"processes in one store, round {seed + 1} of {rounds}")
        with folder() as base, small_leaves_count():
            try:
                done = stress(base, 20 if scale >= 0.5 else 8, processes=4, seed=seed, states=States(seed))
            except (BrokenError, SimckptError) as error:
                failures.append(f"round {seed}: {type(error).__name__}: {error}"[:800])
            else:
                for name, count in done.items():
                    totals[name] = totals.get(name, 0) + count
    detail = f"{rounds} rounds of 4 processes; " + ", ".join(f"{name} {count:,}" for name, count in totals.items())
    mutants = {"segments of others taken for unused": caught()}
    return [
        Line("kills of processes in one store", totals.get("kills", 0), len(failures), detail, mutants, tuple(failures))
    ]
