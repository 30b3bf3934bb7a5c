"""Saves, prunes and branches at once: threads over the real code, of which one runs at a time, from point to point.

Every change to the disk that others can see, and every look at what others did, is a point at which another thread may
go on. Schedules are tried in which a thread is interrupted at most once, or twice, in this order; some with more of
that are drawn at random. (Most races need no more than two: Musuvathi and Qadeer, PLDI 2007.) A thread may also be
killed at any point.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import random
import shutil
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

from reliability import Line, Progress, Tally, folder
from store_operations import Case, World, case
from store_states import BRANCH, RUN, BrokenError, States, leftovers, small_leaves_count

from simckpt.errors import CheckpointNotFoundError, ConflictError, SegmentMissingError
from simckpt.storage import BranchRecord, RunRecord, origins, preparing, segments, usage, work
from simckpt.storage.durable import Disk
from simckpt.storage.store_reader import StoreReader
from simckpt.testing.faults import FaultyDisk

CHANGES = ("rename", "unlink", "link", "create")
LOOKS = [
    (work, "folders"),
    (work, "read_job"),
    (usage, "by_saves"),
    (usage.SegmentUse, "_look_at"),
    (segments, "missing"),
    (origins, "_is_being_pruned"),
    (origins.Origins, "by_runs"),
    (StoreReader, "_record_of"),
]
STUCK = 120  # [s] for one step; then something is wrong with the explorer


class KilledError(BaseException):
    """Ends a thread at a point; whatever it still tries to do to the disk ends it again."""


class Threads:
    """Some functions in threads, of which one goes on at a time."""

    def __init__(self) -> None:
        self._mine = threading.local()
        self._go: dict[str, threading.Semaphore] = {}
        self._back = threading.Semaphore(0)
        self._ended: dict[str, BaseException | None] = {}
        self._killed: set[str] = set()
        self.points: list[tuple[str, str]] = []

    def point(self, what: str) -> None:
        """Called by the code under test: waits until this thread is chosen again."""
        name = getattr(self._mine, "name", None)
        if name is None:
            return  # the main thread
        if name not in self._killed:
            self.points.append((name, what))
            self._back.release()
            self._go[name].acquire()
        if name in self._killed:
            raise KilledError

    def _work(self, name: str, function: Callable[[], object]) -> None:
        self._mine.name = name
        self._go[name].acquire()
        try:
            if name in self._killed:
                raise KilledError
            function()
            self._ended[name] = None
        except BaseException as error:
            self._ended[name] = error
        finally:
            self._back.release()

    def run(
        self,
        functions: dict[str, Callable[[], object]],
        choose: Callable[[int, str | None, list[str]], tuple[str, bool]],
    ) -> dict[str, BaseException | None]:
        """Runs all to their ends; `choose(step, current, alive)` says who goes on, and whether it is killed there.

        Returns:
            {name: how it ended}, None being well.
        """
        self._go = {name: threading.Semaphore(0) for name in functions}
        threads = [threading.Thread(target=self._work, args=each, daemon=True) for each in functions.items()]
        for thread in threads:
            thread.start()
        current: str | None = None
        for step in itertools.count():
            alive = [name for name in functions if name not in self._ended]
            if not alive:
                break
            current, killed = choose(step, current if current in alive else None, alive)
            if killed:
                self._killed.add(current)
            self._go[current].release()
            if not self._back.acquire(timeout=STUCK):
                raise TimeoutError(f"{current} does not come to its next point")
        for thread in threads:
            thread.join()
        return self._ended


class PointDisk(Disk):
    """A disk at whose changes another thread may go on; nothing is synced."""

    def __init__(self, threads: Threads) -> None:
        self._threads = threads

    def fsync(self, descriptor: int) -> None:
        pass


def _pointed(name: str):
    operation = getattr(Disk, name)

    def method(self: PointDisk, *arguments: object) -> object:
        self._threads.point(name)
        return operation(self, *arguments)

    return method


for _name in CHANGES:
    setattr(PointDisk, _name, _pointed(_name))


@contextlib.contextmanager
def looking(threads: Threads) -> Iterator[None]:
    """Makes a point of every look at what others did."""
    with contextlib.ExitStack() as stack:
        for owner, name in LOOKS:
            real = getattr(owner, name)

            def look(*arguments, real=real, name=name, **keywords):
                threads.point(name)
                return real(*arguments, **keywords)

            stack.enter_context(mock.patch.object(owner, name, look))
        yield


Act = Callable[[World], object]


@dataclass(frozen=True)
class Scenario:
    """What is done at once, each by a `StoreFiles` of its own on the same store.

    Attributes:
        acts: {name: what it does}.
        claims: the runs that this process has claimed meanwhile.
        starts: the case whose store it begins with.
    """

    acts: dict[str, Act]
    claims: tuple[str, ...] = (RUN,)
    starts: Case = field(default_factory=lambda: case("save"))


def _prune(seq: int) -> Act:
    return lambda world: world.store.prune(RUN, seq, "test")


def _save(run: str) -> Act:
    return lambda world: world.save(4, run)


# what checkpoint 3 alone uses is freed by its prune, and needed by the save that goes on from it
SCENARIOS = {
    "save, prune": Scenario({"save": _save(RUN), "prune": _prune(3)}),
    "branch, prune": Scenario({"branch": lambda world: branch_from(world, 3), "prune": _prune(3)}),
    "save of a branch, prune": Scenario({"save": _save(BRANCH), "prune": _prune(1)}, (RUN, BRANCH)),
    "save, prune, branch": Scenario(
        {"save": _save(RUN), "prune": _prune(3), "branch": lambda world: branch_from(world, 3)}
    ),
    "save, sweep": Scenario(
        {"save": _save(RUN), "sweep": lambda world: world.store.sweep()}, starts=case("sweep of a save")
    ),
}


def branch_from(world: World, seq: int) -> None:
    """What `Checkpoint.branch` does to the disk."""
    origin = world.store.commit_record(RUN, seq)
    record = BranchRecord(RUN, seq, origin.step, {"learning_rate": 1e-4})
    world.store.write_run("new", RunRecord("cd" * 16, "new", 1.8e9, origin=origin.id, branch=record))


LOST_RACES = (ConflictError, CheckpointNotFoundError, SegmentMissingError)


class Explorer:
    """Runs schedules of one scenario, each on a fresh copy of its store."""

    def __init__(self, scenario: Scenario, base: Path, states: States) -> None:
        base.mkdir(parents=True)
        self._scenario, self._base, self._states = scenario, base, states
        self._template = scenario.starts.made(base / "template", states)
        for saver in self._template.savers.values():
            saver.limit = 128  # a save that merges has a copy of its own

    def run(self, schedule: dict[int, tuple[str, bool]], rng: random.Random | None = None) -> list[list[str]]:
        """Runs one schedule and checks what it left.

        Args:
            schedule: {step: (who goes on there, whether it is killed)}; otherwise whoever was going on does.
            rng: decides in the place of a schedule.

        Returns:
            who could have gone on, at each step.

        Raises:
            BrokenError, SimckptError: a promise was broken.
        """
        base = self._base / "tried"
        shutil.rmtree(base, ignore_errors=True)
        first = self._template.copied(base)
        options: list[list[str]] = []

        def choose(step: int, current: str | None, alive: list[str]) -> tuple[str, bool]:
            options.append(alive)
            if rng is not None:
                return (rng.choice(alive), rng.random() < 0.005) if rng.random() < 0.3 else (current or alive[0], False)
            name, killed = schedule.get(step, (current or alive[0], False))
            return (name, killed) if name in alive else (alive[0], False)

        threads = Threads()
        worlds = [World(base, self._states, None, first.savers).opened(PointDisk(threads)) for _ in self._acts]
        functions = {
            name: functools.partial(act, world) for (name, act), world in zip(self._acts.items(), worlds, strict=True)
        }
        owner = World(base, self._states).opened(FaultyDisk())
        before = owner.look()
        with owner.claimed(self._scenario.claims):
            with looking(threads):
                ended = threads.run(functions, choose)
            self._check(base, ended, before)
        if not any(isinstance(error, KilledError) for error in ended.values()):
            with owner.claimed(self._scenario.claims):
                for world in worlds:  # what one of them could not free yet it frees at its next sweep
                    world.store.sweep()
                if lying := leftovers(owner.store):
                    raise BrokenError(f"left behind for good: {lying}")
        return options

    @property
    def _acts(self) -> dict[str, Act]:
        return self._scenario.acts

    def _check(self, base: Path, ended: dict[str, BaseException | None], before: object) -> None:
        found = World(base, self._states).look()  # everything on offer is whole, each branch has its origin
        for name, error in ended.items():
            if error is None:
                if not _is_done(name, before, found):
                    raise BrokenError(f"{name} returned, and is not there: {found}")
            elif not isinstance(error, (*LOST_RACES, KilledError)):
                raise error
        for run, line in before.items():
            for old, new in zip(line[1], found[run][1], strict=False):
                if old[:2] != new[:2]:
                    raise BrokenError(f"run {run}: {old} became {new}")


def _is_done(name: str, before: dict, found: dict) -> bool:
    if name == "branch":
        return "new" in found
    if name == "prune":
        return sum(each[2] for each in found[RUN][1]) == 1 + sum(each[2] for each in before[RUN][1])
    if name == "save":
        return sum(len(found[run][1]) for run in before) == 1 + sum(len(before[run][1]) for run in before)
    return True


def schedules(explorer: Explorer, depth: int, *, kills: bool) -> Iterator[tuple[str, Callable[[], object]]]:
    """Yields schedules with at most `depth` interruptions, and with one kill; each is to be called."""
    known: dict[tuple, list[list[str]]] = {}

    def tried(schedule: dict[int, tuple[str, bool]]) -> Callable[[], object]:
        def action() -> None:
            known[tuple(sorted(schedule.items()))] = explorer.run(schedule)

        return action

    pending = [{0: (name, False)} for name in explorer._acts]
    while pending:
        schedule = pending.pop(0)
        yield str(schedule), tried(schedule)
        options = known.get(tuple(sorted(schedule.items())))
        if options is None or any(killed for _, killed in schedule.values()):
            continue
        last, current = max(schedule), schedule[max(schedule)][0]
        for step in range(last + 1, len(options)):
            current = current if current in options[step] else options[step][0]
            if len(schedule) <= depth:
                pending += [{**schedule, step: (name, False)} for name in options[step] if name != current]
            if kills and len(options[step]) > 1:
                pending.append({**schedule, step: (current, True)})


def explore(
    name: str, states: States, *, depth: int, kills: bool, wanted: float, drawn: int, until_broken: bool = False
) -> Tally:
    """Tries schedules of a scenario: about `wanted` of the systematic ones, and `drawn` random ones."""
    tally = Tally()
    with folder() as base, small_leaves_count():
        explorer = Explorer(SCENARIOS[name], base / "explored", states)
        for number, (schedule, action) in enumerate(schedules(explorer, depth, kills=kills)):
            if number >= wanted:
                break
            tally.attempt(f"{name}, {schedule}", action)
            if until_broken and tally.failures:
                return tally
        for seed in range(drawn):
            tally.attempt(f"{name}, random {seed}", lambda seed=seed: explorer.run({}, random.Random(seed)))
            if until_broken and tally.failures:
                return tally
    return tally


_check_present, _missing, _announce = segments.check_present, segments.missing, preparing.announce
_by_checkpoints = usage.SegmentUse.by_checkpoints


def _missing_but_in_trash(root, identities, known) -> set[str]:
    return _missing(root, identities, known) - segments.trashed(root).keys()


def _remembered():
    """A pruner that does not read the commits again once it has moved the segments."""
    last: dict[int, set[str] | None] = {}

    def by_checkpoints(self: usage.SegmentUse) -> set[str] | None:
        if id(self) in last:
            return last.pop(id(self))
        last[id(self)] = _by_checkpoints(self)
        return last[id(self)]

    return mock.patch.object(usage.SegmentUse, "by_checkpoints", by_checkpoints)


@contextlib.contextmanager
def _late() -> Iterator[None]:
    waiting: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def announce_later(*args: Any, **kwargs: Any) -> None:
        waiting.append((args, kwargs))

    def look_then_announce(*args: Any) -> None:
        _check_present(*args)
        for told, named in waiting:
            _announce(*told, **named)
        waiting.clear()

    with (
        mock.patch.object(preparing, "announce", announce_later),
        mock.patch.object(segments, "check_present", look_then_announce),
    ):
        yield


MUTANTS = {
    "prune without reading announcements": (
        "save, prune",
        lambda: mock.patch.object(usage, "by_saves", return_value=set()),
    ),
    "commits not read again after announcements": ("save, prune", _remembered),
    "save without an announcement": (
        "save, prune",
        lambda: mock.patch.object(preparing, "announce", return_value=None),
    ),
    "save that looks before it announces": ("save, prune", _late),
    "what lies in the trash counts as there": (
        "save, prune",
        lambda: mock.patch.object(segments, "missing", _missing_but_in_trash),
    ),
    "branch that does not look for its origin": (
        "branch, prune",
        lambda: mock.patch.object(origins.Origins, "check_present", return_value=None),
    ),
    "prune that does not look for branches": (
        "branch, prune",
        lambda: mock.patch.object(origins.Origins, "check_unused", return_value=None),
    ),
}


RARE = {"commits not read again after announcements", "what lies in the trash counts as there"}
"""Those that need two interruptions at the right places: hundreds of schedules come before one that shows them."""


def caught(name: str) -> bool:
    """Returns whether a schedule shows a mutant."""
    scenario, patch = MUTANTS[name]
    with patch():
        found = explore(scenario, States(), depth=2, kills=False, wanted=1500, drawn=200, until_broken=True)
    return found.failures > 0


def run(scale: float, progress: Progress) -> list[Line]:
    total, per = Tally(), []
    for name in SCENARIOS:
        progress(f"interleavings of {name}")
        found = explore(
            name,
            States(),
            depth=2 if scale >= 0.5 else 1,
            kills=True,
            wanted=max(10, 1200 * scale),
            drawn=round(200 * scale),
        )
        total.tried, total.failures = total.tried + found.tried, total.failures + found.failures
        total.examples += found.examples
        per.append(f"{name} {found.tried:,}")
    mutants = [name for name in MUTANTS if scale >= 0.5 or name not in RARE]
    return [total.line("interleavings, with kills", "; ".join(per), {name: caught(name) for name in mutants})]
