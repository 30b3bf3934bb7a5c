"""The claim of the one process that writes a run.

A claim is the folder `runs/<run>/writer`, prepared elsewhere and renamed into place: a rename onto a non-empty folder
fails on every file system that was tried, weak shared ones included, where exclusive creation and `flock` had two
winners. Inside lie the owner's identity, a heartbeat, and a file that the owner holds by `lockf`.

A claim is stale, and the next claimer moves it away, when its lock is free and either

- the owner was a process of this machine (or of an earlier boot of it) and is gone: at once, or
- it cannot be seen from here (another machine or container) and its heartbeat is `STALE_AFTER` old.

Forked children, such as env workers, inherit neither the lock nor the claim. There is no heartbeat thread: commits and
`Claim.beat`, which the training loop calls at every step, touch the file. What this cannot guarantee: a machine that
froze for longer than `STALE_AFTER` loses its claim to another machine; its next commit then raises, because every
commit looks whether the claim is still its own, and commits are exclusive by themselves.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from simckpt.errors import ConflictError, DamagedError, FormatError, RunLockedError, SimckptError, StorageError
from simckpt.storage import durable, names, processes, reader, records, sealed

STALE_AFTER = 600.0  # [s] without a heartbeat, after which a writer that cannot be looked at counts as gone
BEAT_EVERY = 30.0  # [s] at least between two heartbeats of `Claim.beat`
RESERVE = 64 << 10  # [bytes] that a claim keeps, so that checkpoints can be pruned on a full disk
_beat_every = ContextVar("beat_every", default=BEAT_EVERY)
_WRITER, _OWNER, _LOCK, _HEARTBEAT, _RESERVE = "writer", "owner.json", "lock", "heartbeat", "reserve"

# by device and inode of the run's folder: one process may lock the same file twice, and closing either descriptor
# would free the lock
_held: dict[tuple[int, int], Claim | None] = {}
_held_lock = threading.Lock()


def _forget_after_fork() -> None:
    global _held_lock
    _held_lock = threading.Lock()
    _held.clear()


os.register_at_fork(after_in_child=_forget_after_fork)


@dataclass(frozen=True)
class Owner:
    """`writer/owner.json`: who holds a claim.

    Attributes:
        nonce: random; two claims of one process differ.
        process: the process.
        claimed: when [s since 1970, UTC].
    """

    nonce: str
    process: processes.Process
    claimed: float

    def to_bytes(self) -> bytes:
        """Returns the record as written to disk."""
        process = self.process
        fields = {
            "nonce": self.nonce,
            "host": process.host,
            "boot_id": process.boot_id,
            "namespace": process.namespace,
            "pid": process.pid,
            "started": process.started,
            "claimed": sealed.time_to_json(self.claimed),
        }
        return sealed.seal("writer", fields)


def parse_owner(data: bytes, path: object) -> Owner:
    """Returns the record of an `owner.json`; raises DamagedError, FormatError or UnsupportedFormatError."""
    fields = sealed.unseal(data, "writer", path=path)
    process = processes.Process(
        host=fields.text("host"),
        boot_id=fields.text("boot_id"),
        namespace=fields.integer("namespace"),
        pid=fields.integer("pid"),
        started=fields.integer("started"),
    )
    return Owner(fields.id("nonce"), process, fields.time("claimed"))


class Claim:
    """The right to write one run, held until `release` or the end of the process; a context manager.

    Attributes:
        run: the run's name.
        next_seq: number of the next commit, or None if the folder must be listed to know.
        is_idle: says whether nobody writes under it, so that a later claim of this process may take its place.
    """

    def __init__(
        self, disk: durable.Disk, folder: Path, work: Callable[[], Path], owner: Owner, lock: int, *, reserve: bool
    ) -> None:
        self.run = folder.name
        self.next_seq: int | None = None
        self.is_idle: Callable[[], bool] = lambda: False
        self._disk = disk
        self._folder = folder
        self._work = work
        self._owner = owner
        self._reserve = reserve
        self._lock: int | None = lock
        self._beaten = time.monotonic()

    def __enter__(self) -> Claim:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    @property
    def held(self) -> bool:
        """Whether this process holds the claim, as far as it knows; False in forked children."""
        return self._lock is not None and self._owner.process.pid == os.getpid()

    def verify(self) -> None:
        """Looks whether the claim is still this process's.

        Raises:
            ConflictError: it was released, taken over by somebody else, or inherited by a fork.
            StorageError: it cannot be looked at for the moment, which says nothing about whose it is.
        """
        if not self.held:
            raise ConflictError(
                f"the claim on run {self.run!r} was given back, perhaps because it was started once more by this "
                "process, or it belongs to the parent process"
            )
        found = _read_owner(self._folder / _WRITER)
        if found is None or found.nonce != self._owner.nonce:
            by = "" if found is None else f" by process {found.process.pid} on {found.process.host}"
            raise ConflictError(
                f"the claim on run {self.run!r} was taken over{by}: this process was silent for more than "
                f"{STALE_AFTER:.0f} s; nothing was committed, start the run again to go on"
            )

    def beat(self, *, now: bool = False) -> None:
        """Tells other machines that this process lives, at most every `BEAT_EVERY` seconds unless `now`.

        Costs a clock reading otherwise. Raises nothing: trouble shows at the next commit.
        """
        moment = time.monotonic()
        if self.held and (now or moment - self._beaten >= _beat_every.get()):
            self._beaten = moment
            with contextlib.suppress(OSError):
                self._disk.touch(self._folder / _WRITER / _HEARTBEAT)

    @contextlib.contextmanager
    def spending_reserve(self) -> Iterator[None]:
        """Frees the claim's reserve for the block, which makes room on a full disk; takes a new one afterwards.

        A claim without one, which is held for one prune alone, stays without.
        """
        if not self._reserve:
            yield
            return
        reserve = self._folder / _WRITER / _RESERVE
        with contextlib.suppress(OSError):
            self._disk.unlink(reserve)
        try:
            yield
        finally:
            with contextlib.suppress(SimckptError):
                durable.write_file(self._disk, reserve, [], size=RESERVE)

    def release(self) -> None:
        """Gives the claim back; further calls, and calls in forked children, do nothing.

        Raises:
            StorageError: the folder could not be looked at or removed; it counts as stale for this process at once,
                and for others once this process ends.
        """
        if not self.held:
            return
        lock, self._lock = self._lock, None
        assert lock is not None
        try:
            found = _read_owner(self._folder / _WRITER)
            if found is not None and found.nonce == self._owner.nonce:
                away = self._work()
                with durable.translated(self._folder / _WRITER):
                    self._disk.rename(self._folder / _WRITER, away / _WRITER)
                _sync_moved(self._disk, self._folder)
                durable.remove_tree(self._disk, away)
        finally:
            os.close(lock)
            with _held_lock:
                for key in [key for key, claim in _held.items() if claim is self]:
                    del _held[key]


@contextlib.contextmanager
def beating_every(seconds: float) -> Iterator[None]:
    """Has the claims that this thread beats do so every so many seconds, for the block, instead of `BEAT_EVERY`."""
    token = _beat_every.set(seconds)
    try:
        yield
    finally:
        _beat_every.reset(token)


def held_claim(folder: Path) -> Claim | None:
    """Returns the claim that this process holds on a run's folder, or None."""
    with _held_lock:
        return _held.get(_key(folder))


def check_free(folder: Path) -> None:
    """Raises RunLockedError if `take` would, as far as that shows without writing: for a process of this machine.

    Raises:
        StorageError: who holds the claim cannot be read for the moment.
    """
    owner = _read_owner(folder / _WRITER)
    if owner is not None and held_claim(folder) is None and owner.process.is_alive():
        _check_stale(folder, owner, free=False, present=0.0)


def heard_of(folder: Path) -> float | None:
    """Returns when the writer of a run was last heard of, or None if there is none.

    By the clock of the file system [s since 1970]: to be compared with an earlier answer, not with this machine's time.
    """
    return _last_beat(folder / _WRITER) or None


def take(
    disk: durable.Disk,
    folder: Path,
    work: Callable[[], Path],
    *,
    clock: Callable[[], float],
    reserve: bool = True,
) -> Claim:
    """Claims a run for this process; a claim that this process has and that is idle is given back first.

    Args:
        disk: the system calls.
        folder: the run's folder, on the same file system as the work folders.
        work: makes a new folder under `tmp/` that carries this process's identity.
        clock: the time [s since 1970].
        reserve: whether it keeps `RESERVE` bytes for prunes.

    Raises:
        RunLockedError: a living process holds it, this one included, or one that cannot be looked at from here has been
            silent for less than `STALE_AFTER`.
        StorageError: the disk refused.
    """
    key = _key(folder)
    process = processes.this_process()
    held = held_claim(folder)
    if held is not None and held.is_idle():
        held.release()
    with _held_lock:
        if key in _held:
            raise RunLockedError(
                f"run {folder.name!r} is already being written by this process ({process.pid}): call `run.close()` of "
                f"the Run that it was started as, or end this process; `with store.start({folder.name!r}) as run:` "
                "closes by itself",
                host=process.host,
                pid=process.pid,
            )
        _held[key] = None
    try:
        claim = _take(disk, folder, work, Owner(names.random_id(), process, clock()), reserve=reserve)
    except BaseException:
        with _held_lock:
            _held.pop(key, None)
        raise
    with _held_lock:
        _held[key] = claim
    return claim


def _take(disk: durable.Disk, folder: Path, work: Callable[[], Path], owner: Owner, *, reserve: bool) -> Claim:
    prepared = work()
    lock: int | None = None
    try:
        durable.write_record(disk, prepared / _OWNER, owner.to_bytes())
        durable.write_record(disk, prepared / _LOCK, b"")
        durable.write_record(disk, prepared / _HEARTBEAT, b"")
        if reserve:
            durable.write_file(disk, prepared / _RESERVE, [], size=RESERVE)
        durable.sync_folder(disk, prepared)
        # locked under its temporary name, so that whoever sees the claim finds it locked
        with durable.translated(prepared):
            lock = disk.open_lock(prepared / _LOCK)
            durable.lock(lock)
        for _ in range(5):
            try:
                durable.publish_folder(disk, prepared, folder / _WRITER)
            except ConflictError:
                _remove_stale(disk, folder, work)
            else:
                return Claim(disk, folder, work, owner, lock, reserve=reserve)
        raise RunLockedError(f"run {folder.name!r}: several processes claim it at once; try again", host="", pid=0)
    except BaseException:
        if lock is not None:
            os.close(lock)
        with contextlib.suppress(SimckptError):
            durable.remove_tree(disk, prepared)
        raise


def _remove_stale(disk: durable.Disk, folder: Path, work: Callable[[], Path]) -> None:
    """Moves a stale claim away; raises RunLockedError if it is not stale."""
    writer = folder / _WRITER
    away = work()
    try:
        with _probed_lock(disk, writer / _LOCK) as free:
            owner = _read_owner(writer)
            _check_stale(folder, owner, free=free, present=away.lstat().st_mtime)
            try:
                disk.rename(writer, away / _WRITER)
            except FileNotFoundError:
                return  # another claimer was quicker
            except OSError as error:
                raise StorageError(f"{writer} is stale and cannot be moved away: {error.strerror}") from error
            stale = False
            try:
                stale = _read_owner(away / _WRITER) == owner
            finally:
                # without working locks another claimer may have come in between: its claim goes back
                if not stale:
                    with contextlib.suppress(OSError):
                        disk.rename(away / _WRITER, writer)
            if stale:
                _sync_moved(disk, folder)
    finally:
        with contextlib.suppress(SimckptError):
            durable.remove_tree(disk, away)


def _sync_moved(disk: durable.Disk, folder: Path) -> None:
    """Makes it durable that a claim was moved away, before what is in it goes.

    Else a power failure could bring it back without its owner, as a claim of somebody who cannot be looked at.
    """
    with contextlib.suppress(SimckptError):
        durable.sync_folder(disk, folder)


@contextlib.contextmanager
def _probed_lock(disk: durable.Disk, path: Path) -> Iterator[bool]:
    """Holds the lock of somebody else's claim for the block, or tells that it is taken (False)."""
    try:
        descriptor = disk.open_lock(path)
    except OSError:
        yield True  # no lock file: the other signs must tell
        return
    try:
        yield durable.lock(descriptor) is not False
    finally:
        os.close(descriptor)


def _check_stale(folder: Path, owner: Owner | None, *, free: bool, present: float) -> None:
    host, pid = (owner.process.host, owner.process.pid) if owner else ("unknown", 0)
    alive = owner.process.is_alive() if owner else None
    if free and (alive is False or (owner and owner.process == processes.this_process())):
        return  # the process is gone, or it is this one, which gave the claim up and could not remove it
    if free and alive is None:
        # both times come from the file system, so the machines' clocks need not agree
        silent = present - _last_beat(folder / _WRITER)
        if silent >= STALE_AFTER:
            return
        raise RunLockedError(
            f"run {folder.name!r} is being written by process {pid} on {host}, which was heard of {silent:.0f} s ago "
            f"and cannot be looked at from here; it counts as gone after {STALE_AFTER:.0f} s of silence",
            host=host,
            pid=pid,
        )
    raise RunLockedError(
        f"run {folder.name!r} is being written by process {pid} on {host}; stop it first, or choose another name",
        host=host,
        pid=pid,
    )


def _last_beat(writer: Path) -> float:
    for path in (writer / _HEARTBEAT, writer):
        with contextlib.suppress(OSError):
            return path.lstat().st_mtime
    return 0.0


def _read_owner(writer: Path) -> Owner | None:
    """Returns the owner, or None if there is none or its record is damaged.

    Raises:
        StorageError: the record cannot be read for the moment, which tells nothing about the owner.
    """
    path = writer / _OWNER
    try:
        with reader.opened_file(writer, _OWNER) as descriptor, durable.translated(path):
            data = reader.read_whole(descriptor, limit=records.RECORD_LIMIT, path=path)
        return parse_owner(data, path)
    except (FileNotFoundError, DamagedError, FormatError):
        return None


def _key(folder: Path) -> tuple[int, int]:
    try:
        status = folder.stat()
    except OSError as error:
        raise FormatError(f"{folder} cannot be claimed: {error.strerror}") from error
    return status.st_dev, status.st_ino
