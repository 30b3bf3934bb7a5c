"""Recordings: disks that refuse, lie or lose power, and kills, at every operation of a session until it is removed."""

from __future__ import annotations

import contextlib
import errno
import random
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from unittest import mock

import keeping_helpers
import numpy as np
from reliability import Line, Progress, Tally, folder, in_child, stride
from session_helpers import assert_equal, record, rows_of, snapshot_of, write_part, write_snapshot

from simckpt.errors import SessionNotFoundError, StoreError
from simckpt.maintenance import check
from simckpt.storage import StoreFiles, digests, durable, session_merging
from simckpt.storage.session_ending import close_session, remove_session
from simckpt.storage.session_writing import SessionWriter, create_session
from simckpt.storage.sessions import SessionFiles, session_names
from simckpt.testing.faults import Fault, FaultyDisk, fail, fail_and_drop, kill, lose, tear, write_short
from simckpt.testing.power_loss import Recording, RecordingDisk, Syncing

ROWS, MORE = 4, 2  # of a part, and of one that is written after what went wrong
PARTS = 5
CLOSED, REMOVING, REMOVED = 100, 101, 102  # what is promised, or has begun, besides so many rows
Note = Callable[[int], object]


class BrokenError(Exception):
    """A promise that was not kept."""


def life(path: Path, disk: durable.Disk, note: Note) -> None:
    """A session from its beginning to its end; tells what is promised from there on."""
    create_session(StoreFiles.open(path), record(), disk=disk)
    with SessionWriter(path, "pole", disk=disk) as writer:
        for number in range(PARTS):
            write_part(writer, ROWS * number, ROWS * (number + 1))
            note(ROWS * (number + 1))
            if number in (1, 3):
                write_snapshot(writer, ROWS * number)
            if number == 2:
                writer.merge_rest()
        writer.close(rows=(0, ROWS * PARTS))
        note(CLOSED)


def end_later(path: Path, disk: durable.Disk, note: Note) -> None:
    """What `simckpt session close` and `session remove` do."""
    close_session(path, "pole", disk=disk)
    note(CLOSED)
    note(REMOVING)
    remove_session(path, "pole", disk=disk)
    note(REMOVED)


def made(path: Path) -> None:
    StoreFiles.create(path, disk=FaultyDisk())


def unfinished(path: Path) -> None:
    """A session of some parts that nobody has closed, and one that a merge has left covered."""
    made(path)
    disk = FaultyDisk()
    create_session(StoreFiles.open(path), record(), disk=disk)
    with SessionWriter(path, "pole", disk=disk) as writer:
        for number in range(3):
            write_part(writer, ROWS * number, ROWS * (number + 1))
        write_snapshot(writer, ROWS)
    parts = path / "sessions/pole/parts"
    shutil.copytree(parts, path.parent / "parts")
    with SessionWriter(path, "pole", disk=disk) as writer:
        writer.merge_rest()
    shutil.copytree(path.parent / "parts", parts, dirs_exist_ok=True)
    shutil.rmtree(path.parent / "parts")


LIVES = {"a recording": (made, life, 0), "closing and removing": (unfinished, end_later, 3 * ROWS)}


def found(path: Path) -> list[int]:
    """Returns the rows of a session, after all of it was compared with what was written; raises StoreError."""
    files = SessionFiles(path, "pole")
    rows = rows_of(path)
    if rows != list(range(len(rows))):
        raise BrokenError(f"rows {rows}")
    for snapshot in files.snapshots():
        expected = snapshot_of(snapshot.row)
        expected["env"]["models"] = {keeping_helpers.MODEL: {"mass": np.arange(4.0)}}
        assert_equal(files.read_snapshot(snapshot), expected)
    closed = files.closed()
    if closed is not None and closed.rows not in (None, (0, len(rows))):
        raise BrokenError(f"it was closed with the rows {closed.rows}, and there are {rows}")
    return rows


def verify(path: Path, promised: list[int], *, goes_on: bool = True) -> None:
    """Raises BrokenError or a StoreError unless a session is as promised, can be gone on with, closed and removed."""
    if REMOVED in promised and "pole" in session_names(path):
        raise BrokenError("it was removed, and is there")
    least = max((note for note in promised if note < CLOSED), default=0)
    try:
        rows = found(path)
    except SessionNotFoundError:
        if least and REMOVING not in promised:
            raise
        return
    if len(rows) < least:
        raise BrokenError(f"{least} rows were promised, and {len(rows)} are there")
    if CLOSED in promised and SessionFiles(path, "pole").closed() is None:
        raise BrokenError("it was closed, and is not")
    if damage := [each for each in check.check(path).findings if each.severity == "damage"]:
        raise BrokenError(f"check tells of damage: {damage}")
    if not goes_on:
        return
    if SessionFiles(path, "pole").closed() is None:
        with SessionWriter(path, "pole", disk=FaultyDisk()) as writer:
            write_part(writer, len(rows), len(rows) + MORE)
        if close_session(path, "pole", disk=FaultyDisk()).rows is not None or len(found(path)) != len(rows) + MORE:
            raise BrokenError(f"it could not be gone on with: {found(path)}")
    remove_session(path, "pole", disk=FaultyDisk())
    if session_names(path):
        raise BrokenError("it could not be removed")


# refusals


MODES: dict[str, tuple[Fault, str]] = {
    **{errno.errorcode[number]: (fail(number), "") for number in (errno.EIO, errno.ENOSPC, errno.EDQUOT)},
    "failed sync that drops": (fail_and_drop, "fsync"),
}


def refusals(base: Path, wanted: float, progress: Progress) -> Tally:
    """Has a keeper's disk refuse once, for a while, and from then on, at every operation, in a ring and without."""
    tally = Tally()
    for way in keeping_helpers.WAYS:
        count = keeping_helpers.operations(base / "count", way, whole=True)
        begun = keeping_helpers.operations(base / "again", way, whole=False)
        for place, (name, (fault, _)) in enumerate(MODES.items()):
            for at in stride(count, wanted, place):
                progress(f"recordings, {name} at {at} of {count}, {way}")
                tries = {"once": False, "for a while": True} if at <= begun else {"once": False}
                for how, sticky in tries.items():
                    tally.attempt(
                        f"{name} {how} at operation {at} of a {way} recording",
                        lambda way=way, fault=fault, at=at, sticky=sticky: keeping_helpers.assert_late_and_not_lost(
                            _fresh(base), way, fault, at, sticky=sticky
                        ),
                    )
                tally.attempt(
                    f"{name} from operation {at} on of a {way} recording",
                    lambda way=way, fault=fault, at=at: keeping_helpers.assert_told_what_is_lost(
                        _fresh(base), way, fault, at
                    ),
                )
        shutil.rmtree(base / "count")
        shutil.rmtree(base / "again")
    return tally


def _fresh(base: Path) -> Path:
    shutil.rmtree(base / "tried", ignore_errors=True)
    return base / "tried"


# kills and lies


def calls_of(base: Path, name: str) -> list[str]:
    """Returns the operations of a life."""
    prepare, live, _ = LIVES[name]
    prepare(base / "counted")
    disk = FaultyDisk()
    disk.arm()
    live(base / "counted", disk, lambda note: None)
    shutil.rmtree(base / "counted")
    return disk.calls


def killed(base: Path, name: str, fault: Fault, at: int) -> None:
    """Kills a process at an operation: what was promised by then is there, and all else works."""
    prepare, live, before = LIVES[name]
    path = _fresh(base) / "store"
    path.parent.mkdir()
    prepare(path)
    told = path.parent / "told"
    told.touch()

    def note(value: int) -> None:
        with told.open("a") as file:
            file.write(f"{value}\n")
            file.flush()

    def run() -> None:
        disk = FaultyDisk()
        disk.arm(fault, at=at)
        live(path, disk, note)

    if (code := in_child(run, path.parent / "report")) not in (-9, 0):
        raise BrokenError(f"the process ended with {code}: {(path.parent / 'report').read_text()[-500:]}")
    verify(path, [before, *map(int, told.read_text().split())])


def kills(base: Path, wanted: float, progress: Progress) -> Tally:
    return _at_operations(base, wanted, progress, killed, [("kill", kill, ""), ("torn write and kill", tear, "pwrite")])


def lied_to(base: Path, name: str, fault: Fault, at: int) -> None:
    """Has one operation not happen, or happen by half: what is read is right, or refused."""
    prepare, live, _ = LIVES[name]
    path = _fresh(base) / "store"
    path.parent.mkdir()
    prepare(path)
    disk = FaultyDisk()
    disk.arm(fault, at=at)
    with contextlib.suppress(StoreError):
        live(path, disk, lambda note: None)
    disk.arm()
    with contextlib.suppress(StoreError):
        found(path)
    check.check(path)


def lies(base: Path, wanted: float, progress: Progress) -> Tally:
    faults = [("lost operation", lose, ""), ("short write", write_short, "pwrite")]
    return _at_operations(base, wanted, progress, lied_to, faults)


def _at_operations(
    base: Path,
    wanted: float,
    progress: Progress,
    attempt: Callable[[Path, str, Fault, int], None],
    faults: Sequence[tuple[str, Fault, str]],
) -> Tally:
    """Attempts each fault, (what it is, itself, the one call that it fits or ""), at a share of all operations."""
    tally = Tally()
    for name in LIVES:
        calls = calls_of(base, name)
        for what, fault, only in faults:
            places = [at for at, call in enumerate(calls, 1) if only in ("", call)]
            for number in stride(len(places), wanted):
                at = places[number - 1]
                progress(f"recordings, {what} at {at} of {len(calls)}, {name}")
                tally.attempt(
                    f"{what} at operation {at} ({calls[at - 1]}) of {name}",
                    lambda name=name, fault=fault, at=at: attempt(base, name, fault, at),
                )
    return tally


# power failures


def recorded(base: Path, name: str) -> Recording:
    """Returns what a life does to the disk."""
    prepare, live, before = LIVES[name]
    path = base / "recorded" / "store"
    path.parent.mkdir(parents=True)
    prepare(path)
    disk = RecordingDisk(path.parent)
    disk.note(before)
    live(path, disk, disk.note)
    shutil.rmtree(path.parent)
    return disk.recording


def without(recording: Recording, ending: str) -> Recording:
    """Returns what would have happened without the syncs of files and folders whose paths end so."""
    kept = tuple(
        event for event in recording.events if not (isinstance(event, Syncing) and event.path.endswith(ending))
    )
    return replace(recording, events=kept)


def cut(
    recording: Recording, base: Path, *, relaxed: bool, samples: int, seed: int = 0, share: float = 1.0
) -> Iterator[tuple[str, Callable[[], None]]]:
    """Yields (what, attempt) of distinct states that a power failure may leave."""
    seen, draw = set(), random.Random(seed)
    for state in recording.states(relaxed=relaxed, samples=samples, seed=seed, every=16):
        if draw.random() >= share or (key := state.key()) in seen:
            continue
        seen.add(key)

        goes_on = draw.random() < 0.1

        def attempt(state=state, goes_on=goes_on) -> None:
            path = _fresh(base)
            state.write(path)
            verify(path / "store", list(state.notes), goes_on=goes_on)

        yield f"{'relaxed' if relaxed else 'ordered'}, moment {state.moment}", attempt


def power_losses(base: Path, scale: float, progress: Progress) -> Tally:
    tally = Tally()
    for name in LIVES:
        recording = recorded(base, name)
        for relaxed in (False, True):
            for what, attempt in cut(
                recording, base, relaxed=relaxed, samples=max(1, round(3 * scale)), share=min(1.0, scale)
            ):
                progress(f"recordings, power loss, {name}, {what}")
                tally.attempt(f"{name}, {what}", attempt)
    return tally


# what the suite has to notice


def _shown(attempts: Iterator[tuple[str, Callable[[], None]]]) -> bool:
    """Returns whether one of these fails; ends with the first."""
    tally = Tally()
    return any(not tally.attempt(what, attempt) for what, attempt in attempts)


def _without_sync(base: Path, name: str, ending: str) -> bool:
    recording = without(recorded(base, name), ending)
    return any(_shown(cut(recording, base, relaxed=relaxed, samples=2)) for relaxed in (False, True))


def _killed_somewhere(base: Path, name: str) -> bool:
    places = range(1, len(calls_of(base, name)) + 1)
    return _shown((str(at), lambda at=at: killed(base, name, kill, at)) for at in places)


def _refused_somewhere(base: Path) -> bool:
    count = keeping_helpers.operations(base / "count", "continuous", whole=False)
    shutil.rmtree(base / "count")
    return _shown(
        (
            str(at),
            lambda at=at: keeping_helpers.assert_late_and_not_lost(
                _fresh(base), "continuous", fail(errno.EIO), at, sticky=True
            ),
        )
        for at in range(1, count + 1)
    )


def _covered_first(self: SessionWriter, run) -> list:
    """Removes what is merged before what it is merged into is there."""
    if len(run) < 2:
        return [part for part, _ in run]
    for part, _ in run:
        durable.remove_tree(self._disk, self.files.path / "parts" / part.folder)
    return _merge_run(self, run)


_merge_run = SessionWriter._merge_run


class _Anything(str):
    """A digest that equals all others."""

    def __eq__(self, other: object) -> bool:
        return True

    def __ne__(self, other: object) -> bool:
        return False

    __hash__ = str.__hash__


_digest = digests.Hasher.digest


def _lied_somewhere(base: Path) -> bool:
    calls = calls_of(base, "a recording")
    places = [at for at, call in enumerate(calls, 1) if call == "pwrite"]
    return _shown((str(at), lambda at=at: lied_to(base, "a recording", lose, at)) for at in places)


def _mutant(patch: contextlib.AbstractContextManager[object], shows: Callable[[], bool]) -> bool:
    with patch:
        return shows()


def mutants(base: Path, progress: Progress) -> dict[str, bool]:
    """Returns {deliberately broken variant: whether some try shows it}."""
    patch = mock.patch.object
    tries: dict[str, Callable[[], bool]] = {
        "merged parts removed before the one that covers them is there": lambda: _mutant(
            patch(SessionWriter, "_merge_run", _covered_first), lambda: _killed_somewhere(base, "a recording")
        ),
        "a name that may not survive is not taken back": lambda: _mutant(
            patch(SessionWriter, "_take_back", lambda self: None), lambda: _refused_somewhere(base)
        ),
        "parts merged over lost rows": lambda: _mutant(
            patch(session_merging, "_follows", lambda before, after: True), lambda: not _keeps_gaps(_fresh(base))
        ),
        "digests not compared": lambda: _mutant(_trusting(), lambda: _lied_somewhere(base)),
        **{
            f"a recording without the sync of {ending}": lambda ending=ending: _without_sync(
                base, "a recording", ending
            )
            for ending in ("/parts", "state.h5", "leaves.json", "part.json", "sessions", "session.json")
        },
        "a recording without the sync of its end": lambda: _without_sync(base, "a recording", "sessions/pole"),
        "removing without the sync of sessions": lambda: _without_sync(base, "closing and removing", "sessions"),
    }
    noticed = {}
    for name, attempt in tries.items():
        progress(f"recordings, mutant: {name}")
        noticed[name] = attempt()
    return noticed


@contextlib.contextmanager
def _trusting() -> Iterator[None]:
    with (
        mock.patch.object(digests, "matches", return_value=True),
        mock.patch.object(digests.Hasher, "digest", lambda self: _Anything(_digest(self))),
    ):
        yield


def _keeps_gaps(path: Path) -> bool:
    """Returns whether rows that are lost between two parts are missing after the merge as well."""
    keeping = keeping_helpers.keeper(path, FaultyDisk(), [])
    keeping.add(keeping_helpers.part(0, 3))
    keeping.lost((3, 6), "test")
    keeping.add(keeping_helpers.part(6, 9))
    keeping.close("closed", "")
    return keeping_helpers.session_of(path).missing == [range(3, 6)]


def run(scale: float, progress: Progress) -> list[Line]:
    wanted = 1e9 if scale >= 0.5 else max(1.0, 120 * scale)
    with folder() as base:
        found = mutants(base, progress)
        return [
            refusals(base, wanted, progress).line("recordings, storage errors", "once, for a while, for good", found),
            kills(base, wanted, progress).line("recordings, kills at an operation", ", ".join(LIVES)),
            lies(base, wanted, progress).line("recordings, operations silently lost", ", ".join(LIVES)),
            power_losses(base, scale, progress).line("recordings, power-loss states", ", ".join(LIVES)),
        ]
