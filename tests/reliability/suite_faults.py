"""Errors, short and torn writes, lies and kills at every disk operation of everything that a store does."""

from __future__ import annotations

import contextlib
import errno
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

from reliability import Line, Progress, Tally, folder, in_child, stride
from store_operations import CASES, CREATED, Case, World, case
from store_states import BRANCH, RUN, BrokenError, Look, States, leftovers, look, small_leaves_count

from simckpt.errors import DamagedError, SimckptError, StorageError, StorageFullError, StoreError
from simckpt.storage import StoreFiles, digests, durable, preparing, store_preparing, work
from simckpt.storage.store_pruning import StorePruning
from simckpt.testing.faults import FULL, Fault, FaultyDisk, fail, fail_and_drop, kill, lose, tear, write_short

NEXT, LATER = 11, 12  # steps of saves that must work afterwards, in the same process and in the next one
DONE, REFUSED, UNTYPED = 0, 1, 98  # how the process ended that did it


@dataclass(frozen=True)
class Mode:
    """A fault, and what it may lead to: an error, nothing at all, death, or a disk that has lied."""

    name: str
    fault: Fault
    sticky: bool = False
    leads_to: str = "error"
    only: str = ""  # the operation that it has an effect on, if there is one alone


MODES = [
    *(
        Mode(f"{errno.errorcode[number]} {'for good' if sticky else 'once'}", fail(number), sticky)
        for number in (errno.EIO, errno.ENOSPC, errno.EDQUOT)
        for sticky in (False, True)
    ),
    Mode("failed sync that drops", fail_and_drop, only="fsync"),
    Mode("short writes", write_short, True, "nothing", only="pwrite"),
    Mode("kill", kill, leads_to="death"),
    Mode("torn write and kill", tear, leads_to="death", only="pwrite"),
    Mode("lost operation", lose, leads_to="lie"),
]


def mode(name: str) -> Mode:
    (found,) = [mode for mode in MODES if mode.name == name]
    return found


class Trial:
    """A case with the looks before and after it, to be tried with any fault at any of its operations.

    Attributes:
        calls: names of the operations of the undisturbed case.
    """

    def __init__(self, case: Case, base: Path, states: States, disk: Callable[[], FaultyDisk] = FaultyDisk) -> None:
        self._case, self._base, self._disk = case, base, disk
        base.mkdir(parents=True)
        self._world = case.made(base / "template", states)
        self._states = self._world.states
        self._before = self._world.look()
        world, counting = self._world.copied(base / "counted"), FaultyDisk()
        world.opened(counting)
        with world.claimed(case.claims):
            counting.arm()
            case.operate(world)
            self.calls = list(counting.calls)
        self._after = world.look()
        self._allowed = [self._before, self._after, *case.between(self._before, self._after)]
        self._next = case.claims[0] if case.claims else CREATED if case.starts else RUN

    def attempt(self, mode: Mode, at: int) -> None:
        """Raises BrokenError or another error if a promise does not hold with this fault at operation `at`."""
        base = self._base / "tried"
        shutil.rmtree(base, ignore_errors=True)
        world = self._world.copied(base)
        report = self._base / "report.txt"
        code = in_child(lambda: self._disturbed(world, mode, at), report)
        if code not in (DONE, REFUSED) and not (code == -9 and mode.leads_to == "death"):
            raise BrokenError(f"the process ended with {code}: {report.read_text()[-600:] if report.exists() else ''}")
        if mode.leads_to == "death" and code != -9:
            raise BrokenError("the operation was never reached")
        if mode.leads_to == "lie":
            self._check_lie(base)
            return
        if mode.leads_to == "nothing" and code != DONE:
            raise BrokenError("an error, although nothing had failed")
        found = look(base, self._states)
        if code == REFUSED:
            found = _without(found, self._next, NEXT)
        if found not in ([self._after] if code == DONE else self._allowed):
            raise BrokenError(f"neither as before nor as after: {found}")
        self._go_on(base, world, code)

    def _disturbed(self, world: World, mode: Mode, at: int) -> int:
        disk, code = self._disk(), DONE
        world.opened(disk)
        with world.claimed(self._case.claims):
            disk.arm(mode.fault, at=at, sticky=mode.sticky)
            try:
                self._case.operate(world)
            except SimckptError as error:
                code = REFUSED
                if isinstance(error, StorageError) and (error.errno in FULL) != isinstance(error, StorageFullError):
                    raise
            disk.arm()
            if code == REFUSED:
                # what a lie has left may be refused once more, as the damage that it is
                with contextlib.suppress(DamagedError) if mode.leads_to == "lie" else contextlib.nullcontext():
                    if self._next not in (world.store.runs() if world.store else ()):
                        self._case.operate(world)
                    world.save(NEXT, self._next)
        return code

    def _go_on(self, base: Path, world: World, code: int) -> None:
        """The next process starts: it finds nothing lying around, and its save works."""
        if not (base / "store" / "store.json").exists():
            world.opened(FaultyDisk())
            self._case.operate(world)
        world.opened(FaultyDisk())
        if self._next not in world.store.runs():
            self._case.operate(world)
        before = look(base, self._states)
        with world.claimed((self._next,)):
            if lying := leftovers(world.store):
                raise BrokenError(f"left behind for good: {lying}")
            saver = world.savers[self._next]
            saver.head = None  # a process that starts again knows the head from its restore; here it is not needed
            world.save(LATER, self._next)
            # with a log whose rows lie in segments since: everything of it is read again
            world.store.read(self._next, world.store.sequence(self._next)[-1])
        if _without(look(base, self._states), self._next, LATER) != before:
            raise BrokenError("the next save changed what was there before it")

    def _check_lie(self, base: Path) -> None:
        """What was not under work is whole, and what is read is right or refused."""
        with contextlib.suppress(StoreError):
            look(base, self._states)  # wrong bits are no StoreError
        for run in set(self._before or ()) & {RUN, BRANCH}:
            store = StoreFiles.open(base / "store")
            for seq, (commit, later) in enumerate(zip(self._before[run][1], self._after[run][1], strict=False), 1):
                if not commit[2] and not later[2]:
                    self._states.compare(store.read(run, seq), commit[1], f"run {run}, commit {seq}")


def _without(found: Look, run: str, step: int) -> Look:
    """Returns a look without the newest checkpoint of a run, which must be of this step."""
    branch, line, starts = found[run]
    if not line or line[-1][1] != step or line[-1][2]:
        raise BrokenError(f"the save of step {step} is not there: {line}")
    return {**found, run: (branch, line[:-1], starts)}


@dataclass(frozen=True)
class Mutant:
    """A library with a fault of its own, which some of the tries must show.

    Attributes:
        patch: puts the fault in for a block.
        case: the name of the case to try.
        mode: that of the mode.
        disk: of the process that is disturbed.
    """

    patch: Callable[[], contextlib.AbstractContextManager[object]]
    case: str
    mode: str
    disk: Callable[[], FaultyDisk] = FaultyDisk


class RetryingDisk(FaultyDisk):
    """Tries a failed sync once more."""

    def fsync(self, descriptor: int) -> None:
        try:
            super().fsync(descriptor)
        except OSError:
            super().fsync(descriptor)


class DeafDisk(FaultyDisk):
    """Hears of no error of a write."""

    def pwrite(self, descriptor: int, data: durable.Bytes, offset: int) -> int:
        try:
            return super().pwrite(descriptor, data, offset)
        except OSError:
            return len(data)


def _renamed_first(self: StoreFiles, claim, record, prepared) -> None:
    target = self._checkpoint_path(claim.run, record.seq)
    durable.publish_folder(self._disk, prepared.folder, target)
    durable.write_record(self._disk, target / "commit.json", record.to_bytes())
    claim.next_seq = record.seq + 1


def _cleared_first(self: StorePruning, run: str, tombstone) -> None:
    path = self._checkpoint_path(run, tombstone.seq)
    self._clear(path, besides=("commit.json",))
    _bury(self, run, tombstone)


_bury = StorePruning._bury


def _written_once(disk: durable.Disk, descriptor: int, data: durable.Bytes, offset: int) -> None:
    disk.pwrite(descriptor, data, offset)


@contextlib.contextmanager
def _untranslated(path: Path, *, needed: int | None = None) -> Iterator[None]:
    yield


def _kept(disk: durable.Disk, root: Path, prepared_folder: Path, made: object) -> None:
    """What `discard` does where it forgets the segments."""
    durable.remove_tree(disk, prepared_folder)


class _Anything(str):
    """A digest that equals all others."""

    def __eq__(self, other: object) -> bool:
        return True

    def __ne__(self, other: object) -> bool:
        return False

    __hash__ = str.__hash__


_digest = digests.Hasher.digest


@contextlib.contextmanager
def _trusting() -> Iterator[None]:
    with (
        mock.patch.object(digests, "matches", return_value=True),
        mock.patch.object(digests.Hasher, "digest", lambda self: _Anything(_digest(self))),
    ):
        yield


@contextlib.contextmanager
def _forgetful() -> Iterator[None]:
    with mock.patch.object(preparing, "discard", _kept), mock.patch.object(store_preparing, "discard", _kept):
        yield


MUTANTS = {
    "folder renamed before its record is in it": Mutant(
        lambda: mock.patch.object(StoreFiles, "_publish", _renamed_first), "save", "kill"
    ),
    "files of a pruned checkpoint removed before the tombstone": Mutant(
        lambda: mock.patch.object(StorePruning, "_bury", _cleared_first), "prune, freeing segments", "kill"
    ),
    "short write taken for a whole one": Mutant(
        lambda: mock.patch.object(durable, "_write_all", _written_once), "save", "short writes"
    ),
    "failed sync tried again": Mutant(contextlib.nullcontext, "save", "failed sync that drops", RetryingDisk),
    "error of a write not noticed": Mutant(contextlib.nullcontext, "save", "EIO once", DeafDisk),
    "error without a type": Mutant(
        lambda: mock.patch.object(durable, "translated", _untranslated), "save", "ENOSPC once"
    ),
    "left-overs not swept": Mutant(
        lambda: mock.patch.object(work.WorkFolders, "sweep", return_value=[]), "save", "kill"
    ),
    "segments of a failed save forgotten": Mutant(_forgetful, "save", "EIO once"),
    "digests not compared": Mutant(_trusting, "save", "lost operation"),
}


def caught(name: str, *, wanted: float = 1e9) -> bool:
    """Returns whether some try shows a mutant; they end with the first that does."""
    mutant = MUTANTS[name]
    with folder() as base, small_leaves_count():
        trial = Trial(case(mutant.case), base / "trial", States(), mutant.disk)
        with mutant.patch():
            for at in stride(len(trial.calls), wanted):
                try:
                    trial.attempt(mode(mutant.mode), at)
                except (BrokenError, SimckptError):
                    return True
    return False


def tries(trial: Trial, mode: Mode, wanted: float, offset: int) -> list[int]:
    """Returns the operations to try a mode at: about `wanted` of those on which it has an effect."""
    places = [at for at, name in enumerate(trial.calls, 1) if mode.only in ("", name)]
    return [places[number - 1] for number in stride(len(places), wanted, offset)]


def faults(cases: list[Case], seeds: range, wanted: float, progress: Progress) -> dict[str, Tally]:
    """Tries all modes in all cases, at about `wanted` operations of each; returns {mode: its tally}."""
    tallies = {mode.name: Tally() for mode in MODES}
    with folder() as base, small_leaves_count():
        for seed in seeds:
            for number, each in enumerate(cases):
                progress(f"faults, states {seed}, {each.name}")
                trial = Trial(each, base / "trial", States(seed))
                for place, mode in enumerate(MODES):
                    for at in tries(trial, mode, wanted, seed + number + place):
                        what = f"{mode.name} at operation {at} ({trial.calls[at - 1]}) of {each.name}, states {seed}"
                        tallies[mode.name].attempt(what, lambda at=at, mode=mode, trial=trial: trial.attempt(mode, at))
                shutil.rmtree(base / "trial")
    return tallies


KINDS = {
    "storage errors injected": ("error", "nothing"),
    "kills at an operation": ("death",),
    "operations silently lost": ("lie",),
}


def run(scale: float, progress: Progress) -> list[Line]:
    # a quick run tries a share of the operations of one family of states, a full one all operations of several
    tallies = faults(CASES, range(max(1, round(4 * scale))), 1e9 if scale >= 0.25 else max(1.0, 24 * scale), progress)
    found = {name: caught(name) for name in MUTANTS}
    lines = []
    for name, leads_to in KINDS.items():
        line = Tally()
        for mode in MODES:
            if mode.leads_to in leads_to:
                line.tried += tallies[mode.name].tried
                line.failures += tallies[mode.name].failures
                line.examples += tallies[mode.name].examples
        kinds = ", ".join(f"{mode.name} {tallies[mode.name].tried:,}" for mode in MODES if mode.leads_to in leads_to)
        lines.append(line.line(name, f"{len(CASES)} operations of a store: {kinds}"))
    lines[0] = Line(**{**vars(lines[0]), "mutants": found})
    return lines
