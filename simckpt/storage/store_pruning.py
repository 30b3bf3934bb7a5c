"""Pruning, which frees files and segments that nobody else needs, and sweeping what dead processes left."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from simckpt.errors import (
    CheckpointNotFoundError,
    DamagedError,
    FormatError,
    InvalidNameError,
    RunNotFoundError,
    SegmentsKeptError,
    SimckptError,
    StorageError,
    StorageFullError,
    StoreError,
)
from simckpt.storage import claims, durable, names, origins, quarantine, sealed, segments, usage, work
from simckpt.storage import records as record_types
from simckpt.storage.index import INDEX_FILE
from simckpt.storage.records import CommitRecord, StoreRecord, TombstoneRecord
from simckpt.storage.store_marks import StoreMarks
from simckpt.storage.store_reader import COMMIT_FILE

RESERVE_FILE = "reserve"
RESERVE = 128 << 10  # [bytes] that a store keeps, so that it can be pruned on a full disk that no trainer is left on
_NAMING = (INDEX_FILE, record_types.SHARDS_FILE)  # one of them names the segments of a checkpoint
_WORTHLESS = (FileNotFoundError, InvalidNameError, FormatError, DamagedError)


@dataclass
class _Buried:
    """A checkpoint that this process has pruned, whose segments are not all freed yet.

    Attributes:
        segments: that it used.
        job: the work folder that says so to the sweep of a later process, or None.
    """

    segments: frozenset[str]
    job: Path | None


class StorePruning(StoreMarks):
    """A store whose runs can be claimed, whose checkpoints can be pruned and whose left-over work can be swept."""

    def __init__(self, path: Path, record: StoreRecord, *, disk: durable.Disk, clock: Callable[[], float]) -> None:
        super().__init__(path, record, disk=disk)
        self._clock = clock
        self._usage = usage.SegmentUse(self)
        self._origins = origins.Origins(self)
        self._buried: dict[Path, _Buried] = {}
        self._told = False
        self._spent = False  # the reserve, by this process

    def claim(self, run: str, *, reserve: bool = True) -> claims.Claim:
        """Claims a run for this process, and sweeps what dead processes left in the store.

        Args:
            run: the run's name.
            reserve: whether the claim keeps room for prunes; one that is given back at once need not.

        Raises:
            InvalidNameError, RunNotFoundError: no run can have, or none has, that name.
            DamagedError, FormatError: the run's record cannot be trusted, or its folder of checkpoints is missing.
            RunLockedError: another process is writing it.
            StorageError: the disk refused.
        """
        try:
            self.read_run(run)
        except DamagedError as error:
            advice = "`simckpt check STORE --repair` writes it again where other records prove what it was"
            raise DamagedError(f"{error}; {advice}. Its checkpoints can be read", path=error.path) from error
        folder = self._run_folder(run)
        path = folder / "checkpoints"
        if not os.path.lexists(path):
            # a run has it from the beginning: who goes on without would train all of it again
            raise DamagedError(
                f"{path} is missing, with all checkpoints of the run: put it back, or make an empty folder there; "
                f"`simckpt check --repair` then brings back what an archive has, and without one the run begins anew",
                path=path,
            )
        claim = claims.take(self._disk, folder, self._works.make, clock=self._clock, reserve=reserve)
        try:
            self.sweep()
        except BaseException:
            claim.release()
            raise
        return claim

    def prune(self, run: str, seq: int, reason: str) -> TombstoneRecord:
        """Returns the tombstone that replaces a checkpoint; its state is gone, its id and place in the lineage stay.

        Interrupted at any point, the checkpoint is whole or has a tombstone. Pruning a tombstone frees what an
        interruption left. The run's claim is taken for the duration, if this process does not hold it yet. On a full
        disk what is of no use makes room first: the store's reserve, or where there is none what dead processes left.

        Raises:
            CheckpointNotFoundError: no such number.
            DamagedError, FormatError: the commit record cannot be trusted.
            RunLockedError: another process is writing the run.
            ConflictError: a run was branched from it; nothing was pruned.
            SegmentsKeptError: it is pruned, but no segment is freed while a record or index of the store cannot be
                read. Said once; later prunes and sweeps try again.
            StorageError: the disk refused.
        """
        self._run_folder(run)
        ways = iter((self._spend_reserve, self._sweep_anything, self._drop_jobs))
        while True:
            try:
                tombstone = self._prune(run, seq, reason)
            except StorageFullError:
                if not any(makes_room(run) for makes_room in ways):
                    raise
            else:
                if self._spent:
                    self.keep_reserve()
                return tombstone

    def keep_reserve(self) -> None:
        """Has the store keep room for prunes on a full disk, unless it does or there is none; raises nothing."""
        path = self.path / RESERVE_FILE
        with contextlib.suppress(SimckptError):
            if not os.path.lexists(path):
                with self._works.made() as made:
                    # written, not only allocated, which not every file system can do
                    durable.write_file(self._disk, made / RESERVE_FILE, [(0, bytes(RESERVE))], size=RESERVE)
                    durable.publish_file(self._disk, made / RESERVE_FILE, path)
            self._spent = False

    def _spend_reserve(self, _run: str) -> bool:
        try:
            self._disk.unlink(self.path / RESERVE_FILE)
        except OSError:
            return False
        self._spent = True
        return True

    def _sweep_anything(self, _run: str) -> bool:
        return bool(self.sweep())

    def _drop_jobs(self, run: str) -> bool:
        """Removes the announcements of a run's saves, which moved along with the commits and say nothing any longer."""
        dropped = False
        for seq in self.sequence(run):
            with contextlib.suppress(StoreError, OSError):
                self.segment_ids(run, seq)  # else the announcement alone says what it uses
                self._disk.unlink(self._checkpoint_path(run, seq) / work.JOB_FILE)
                dropped = True
        return dropped

    def _prune(self, run: str, seq: int, reason: str) -> TombstoneRecord:
        with self._claimed(run) as claim:
            claim.verify()
            record = self._record_of(run, seq)
            if isinstance(record, TombstoneRecord):
                path = self._checkpoint_path(run, seq)
                self._free(path, self._segments_in(path))
                return record
            tombstone = record_types.tombstone_of(record, pruned=self._clock(), reason=reason)
            with claim.spending_reserve():
                self._bury(run, tombstone)
            return tombstone

    def origins(self) -> dict[str, str]:
        """Returns {"run 'name'" or "session 'name'": id of the checkpoint that it was branched from, or that drove it}.

        Raises:
            DamagedError, FormatError, StorageError: a record of one cannot be read; what it needs is not known.
        """
        runs, sessions = self._origins.by_runs(), self._origins.by_sessions()
        return {f"run {name!r}": origin for name, origin in runs.items()} | {
            f"session {name!r}": origin for name, origin in sessions.items()
        }

    @contextlib.contextmanager
    def _claimed(self, run: str) -> Iterator[claims.Claim]:
        held = claims.held_claim(self._run_folder(run))
        if held is not None:
            yield held
        else:
            with self.claim(run, reserve=False) as claim:
                yield claim

    def _bury(self, run: str, tombstone: TombstoneRecord) -> None:
        path = self._checkpoint_path(run, tombstone.seq)
        freed = self._segments_in(path)
        job = sealed.seal("job", {"job": "prune", "run": run, "seq": tombstone.seq, "segments": freed})
        made, begun = self._works.make(), False
        try:
            durable.write_record(self._disk, made / work.JOB_FILE, job)
            durable.write_record(self._disk, made / COMMIT_FILE, tombstone.to_bytes())
            durable.sync_folder(self._disk, made)
            self._origins.check_unused(tombstone.id)
            # from the rename on the job stays, so that the sweep of a later process frees what this one cannot
            begun = True
            durable.replace_file(self._disk, made / COMMIT_FILE, path / COMMIT_FILE)
        finally:
            if not begun:
                self._works.remove(made)
        self._free(path, freed, made)

    def _segments_in(self, checkpoint: Path) -> list[str]:
        """Returns the ids of the segments that a checkpoint's index names, or else what its save has announced."""
        return sorted(quarantine.uses(checkpoint))

    def _free(self, checkpoint: Path, freed: Iterable[str], job: Path | None = None) -> None:
        """Removes what belongs to a checkpoint whose record is a tombstone; its index last, for it names the rest.

        Raises:
            SegmentsKeptError: it cannot be known whether anybody uses them; said once.
            StorageError: the disk refused.
        """
        before = self._buried.get(checkpoint, _Buried(frozenset(), None))
        self._buried[checkpoint] = _Buried(before.segments | set(freed), job or before.job)
        self._free_buried(checkpoint)

    def _free_buried(self, asked: Path | None = None) -> None:
        """Goes on with all that this process has pruned; what the disk refuses is raised for the one that was asked."""
        kept = self._free_segments({identity for each in self._buried.values() for identity in each.segments})
        for checkpoint, buried in list(self._buried.items()):
            done = not buried.segments if kept is None else not buried.segments & kept
            try:
                self._clear(checkpoint, besides=(COMMIT_FILE,) if done else (COMMIT_FILE, *_NAMING))
            except StorageError:
                if checkpoint == asked:
                    raise
                continue
            if done:
                del self._buried[checkpoint]
                if buried.job is not None:
                    self._works.remove(buried.job)
        told, self._told = self._told, kept is None
        if self._told and not told:
            raise kept_error()

    def _clear(self, folder: Path, *, besides: Collection[str]) -> None:
        """Removes the files in a folder, last what names its segments; one that is gone with all it had is no error."""
        with durable.translated(folder):
            try:
                with os.scandir(folder) as entries:
                    paths = [Path(entry.path) for entry in entries if entry.name not in besides]
            except FileNotFoundError:
                return
            for path in sorted(paths, key=lambda path: path.name in _NAMING):
                with contextlib.suppress(FileNotFoundError):  # a sweep of another process was quicker
                    self._disk.unlink(path)
        durable.sync_folder(self._disk, folder)

    def _free_segments(self, candidates: Collection[str], *, besides: Collection[Path] = ()) -> set[str] | None:
        """Removes those of some segments that nobody uses; returns those that stay although no checkpoint uses them.

        A save in progress may come to use them, or another pruner, which looked before, has moved them back. These
        stay, as do all if it cannot be known what is used (None): whoever names them must not forget them.

        They are moved to `trash/`, then announcements are read, **then** commits; in this order a save that is
        published meanwhile is seen in one or the other. One that has not announced itself yet will not find them, and
        fails. What a dead pruner left in the trash is moved back if it is used after all.

        Args:
            candidates: their ids.
            besides: work folders whose announcements do not count.

        Raises:
            StorageError: the disk refused, or something cannot be looked at for the moment; they stay.
        """
        if not candidates:
            return set()
        home, trash = self.path / segments.FOLDER, self.path / segments.TRASH
        used = self._usage.by_checkpoints()
        if used is None:
            return None
        # neither of them may be a symbolic link: what lies elsewhere is not the store's to move
        durable.make_folders(self._disk, self.path, segments.FOLDER)
        durable.make_folders(self._disk, self.path, segments.TRASH)
        places = {identity: [home / segments.file_name(identity)] for identity in candidates if identity not in used}
        for identity, files in segments.trashed(self.path).items():
            if identity in used:
                self._move(trash / files[0], home / segments.file_name(identity))
            elif identity in places:
                places[identity] += [trash / file for file in files]
        if not places:
            return set()
        # under names of its own: what this pruner removes there it has itself put there, before it looked
        moved: list[tuple[str, Path]] = []
        try:
            for identity, sources in places.items():
                for source in sources:
                    target = trash / segments.trash_name(identity)
                    moved.append((identity, target))
                    self._move(source, target)
            announced, committed = usage.by_saves(self.path, besides=besides), self._usage.by_checkpoints()
        except BaseException:
            for identity, target in moved:
                with contextlib.suppress(StorageError):
                    self._move(target, home / segments.file_name(identity))
            raise
        unknown = announced is None or committed is None
        needed, staying = (announced or set()) | (committed or set()), set()
        for identity, target in moved:
            place = home / segments.file_name(identity)
            if unknown or identity in needed:
                self._move(target, place)
                staying.add(identity)
                continue
            with durable.translated(target):
                try:
                    self._disk.unlink(target)
                except FileNotFoundError:
                    # by a pruner whose look at the commits is older than what was pruned here
                    staying |= {identity} if os.path.lexists(place) else set()
        durable.sync_folder(self._disk, home)
        durable.sync_folder(self._disk, trash)
        return None if unknown else staying - (committed or set())

    def _move(self, source: Path, target: Path) -> None:
        with durable.translated(source), contextlib.suppress(FileNotFoundError):  # another pruner was quicker
            self._disk.rename(source, target)

    def sweep(self) -> list[str]:
        """Removes what dead processes left in `tmp/`, as far as it can, and returns the names of these folders."""
        swept: list[str] = []
        # again while something goes: what one of them has announced keeps another from being ended
        while found := self._works.sweep(self._finish):
            swept += found
        if self._buried:
            with contextlib.suppress(StorageError):
                self._free_buried()
        return swept

    def _finish(self, made: Path) -> None:
        """Ends what a dead process had begun: frees what it was pruning, removes the segments of its failed save.

        Raises:
            StorageError: that cannot be done for the moment; the job has to stay.
        """
        try:
            job = work.read_job(made)
            if job.text("job") == "save":
                candidates = job_ids(job, "made")
                run, seq = None, 0
            else:
                candidates = job_ids(job, "segments")
                run, seq = job.text("run", names.RUN_NAME), job.integer("seq", minimum=1)
                names.sequence_name(seq)
        except _WORTHLESS:
            return
        if run is None:
            # where the store was copied while it was written, a checkpoint may use what its save has made
            self._clear(made, besides=(work.JOB_FILE,))
            if self._free_segments(candidates, besides=[made]) != set():
                raise kept_error()
            return
        checkpoint = self._dead_checkpoint(run, seq)
        if checkpoint is None:
            return
        kept = self._free_segments(candidates) != set()
        self._clear(checkpoint, besides=(COMMIT_FILE, *_NAMING) if kept else (COMMIT_FILE,))
        if kept:
            raise kept_error()

    def _dead_checkpoint(self, run: str, seq: int) -> Path | None:
        """Returns the folder of a checkpoint that was pruned, or None if its record is not a tombstone.

        Raises:
            StorageError: it is damaged, so that this is not known.
        """
        try:
            record = self._record_of(run, seq)
        except (CheckpointNotFoundError, RunNotFoundError):
            return self.path / "runs" / run / "checkpoints" / names.sequence_name(seq)
        except (DamagedError, FormatError) as error:
            raise StorageError(f"it is not known whether a checkpoint was pruned: {error}") from error
        return None if isinstance(record, CommitRecord) else self._checkpoint_path(run, seq)


def kept_error() -> SegmentsKeptError:
    """Returns the error of a store in which it is not known which segments are used."""
    return SegmentsKeptError(
        "segments of what was pruned stay for now: a record or an index of the store is damaged or newer than this "
        "simckpt, or the folder of a checkpoint is missing, so that it is not known what else uses them. `simckpt "
        "check` shows what that is, `--repair` puts it aside; prunes and starts after that free them"
    )


def job_ids(job: sealed.Fields, key: str) -> list[str]:
    """Returns the ids of segments that a job names."""
    # a record of version 0.1 has none
    found = () if job.content.get(key) is None else work.segments_in(job, key)
    return [identity for identity in found if names.ID.fullmatch(identity)]
