"""The archive of a store: the slow, cheap tier behind it."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING

from simckpt.archive import contents, fetching, naming, session_objects, verifying
from simckpt.archive.contents import Deed
from simckpt.archive.mover import Mover
from simckpt.archive.objects import Objects, Patience
from simckpt.archive.passes import Moved, Pass
from simckpt.archive.places import Place, parse_place
from simckpt.archive.verifying import Verified
from simckpt.errors import (
    ArchiveDamagedError,
    ArchiveNotNamedError,
    ArchiveUnavailableError,
    CheckpointNotFoundError,
    ConfigurationError,
    ConflictError,
    DamagedError,
    FormatError,
    SessionNotFoundError,
    StoreError,
)
from simckpt.policies import KeepAll, KeepPolicy
from simckpt.session_pruning import check_policy
from simckpt.storage import Claim, StoreFiles, TombstoneRecord, archived_sessions
from simckpt.storage.archived import ArchiveRecord
from simckpt.storage.sessions import ARCHIVED_FILE, CLOSED_FILE

if TYPE_CHECKING:
    from simckpt.checkpoint import Checkpoint

STOP = 5.0  # [s] of the grace of a scheduler, which the last save needs as well
KEEP_FETCHED = 86_400.0  # [s] that a checkpoint which came back stays on the disk


class Archive:
    """The archive of a store, made by `Store.archive`.

    It holds a verified copy of every checkpoint that `move` has seen; a policy says which of them stay on the disk as
    well. One that has left is listed like all others, and comes back by itself when it is read. As a context manager it
    moves in the background, from the beginning of the block to its end.

    Attributes:
        url: where it is. Credentials are no part of it: they come from the environment and the usual files.

    Args:
        files: of the store.
        url: of the archive; if None the one that the store knows, which this user must have named before.
        policy: which checkpoints stay on the disk.
        keep_sessions: which sessions stay there, of those that were closed; all of them if None.
        patience: how long to wait for the object store.
        keep_fetched: how long what came back stays on the disk, whatever the policies say [s].
        new: whether another archive may take the place of the one that the store knows, which is lost for good.
    """

    def __init__(
        self,
        files: StoreFiles,
        url: str | os.PathLike[str] | None = None,
        *,
        policy: KeepPolicy | None = None,
        keep_sessions: KeepPolicy | None = None,
        patience: Patience | None = None,
        keep_fetched: float = KEEP_FETCHED,
        new: bool = False,
    ) -> None:
        if policy is not None and not isinstance(policy, KeepPolicy):
            raise ConfigurationError(f"policy is a policy such as simckpt.KeepLast(3), got {policy!r}", keys=["policy"])
        self._files = files
        self._policy = policy or KeepAll()
        self._keep_sessions = check_policy(keep_sessions or KeepAll())
        self._patience = patience
        self._keep_fetched = keep_fetched
        self._new = new
        self._place = self._remembered(url)
        self._objects: Objects | None = None
        self._mover: Mover | None = None
        self.url = str(self._place)

    def __repr__(self) -> str:
        return f"<Archive {self.url!r} of {str(self._files.path)!r}>"

    def _remembered(self, url: str | os.PathLike[str] | None) -> Place:
        place = None if url is None else parse_place(url)
        try:
            known = self._files.archive()
        except StoreError:
            if place is None:
                raise
            known = None
        if place is None:
            if known is None:
                raise ConfigurationError(
                    f"store {self._files.path} has no archive yet: name one, as in store.archive('s3://bucket/prefix') "
                    f"or `simckpt archive STORE s3://bucket/prefix`",
                    keys=["url"],
                )
            return self._named(parse_place(known.url))
        naming.note_named(self._files.id, place)
        # the address of an archive that was reached before is replaced once the new one proves to be the same archive
        if known is None or (known.id is None and known.url != str(place)):
            self._files.write_archive(ArchiveRecord(None, str(place), time.time()))
        return place

    def _named(self, place: Place) -> Place:
        if naming.was_named(self._files.id, place):
            return place
        raise ArchiveNotNamedError(
            f"store {self._files.path} says that its archive is {str(place)!r}, which you have never named: a store "
            f"from somebody else could send you anywhere. If you trust it, name it once, as in "
            f"store.archive({str(place)!r}) or `simckpt fetch STORE CHECKPOINT --archive {place}`"
        )

    def _opened(self) -> Objects:
        if self._objects is None:
            known = self._files.archive()
            # a disk that is not mounted must not become an empty archive
            self._objects = Objects(self._place, self._patience, make=self._new or not self._noted(known))
        return self._objects

    def _noted(self, known: ArchiveRecord | None) -> set[str | None]:
        """Returns the id of the archive that the store has something in, by its record or else by what is there alone.

        It is None if what is there alone does not say so, as its own records are damaged.
        """
        if known is not None and known.id is not None:
            return {known.id}
        return set(self._alone().values())

    def _alone(self) -> dict[str, str | None]:
        """Returns {what is in the archive alone: id of the archive, None where its note is damaged}."""
        found: dict[str, str | None] = {}
        for run in self._files.runs():
            evicted = self._files.evicted(run)
            records = self._files.records(run, damaged={}, only=evicted)
            pruned = {record.seq for record in records if isinstance(record, TombstoneRecord)}
            for seq in sorted(evicted - pruned):
                noted = self._files.archived(run).get(seq)
                found[f"{run} number {seq}"] = None if noted is None else noted.archive
        for name in self._files.sessions():
            with contextlib.suppress(DamagedError, FormatError, SessionNotFoundError):
                session = self._files.session(name)
                record = archived_sessions.noted(session)
                if record is not None and archived_sessions.is_evicted(session):
                    found[f"session {name}"] = record.archive
        return found

    def _deed(self, objects: Objects, *, write: bool) -> Deed:
        """Returns whose the archive is, after a look whether it is this store's."""
        known = self._files.archive()
        deed = self._read_deed(objects, known)
        noted = self._noted(known)
        if self._new and write and known is not None and noted and (deed is None or deed.id not in noted):
            self._check_none_depends()
            known, noted = replace(known, id=None), set()
        if deed is None and write and not noted:
            deed = contents.write_deed(objects, owner=self._files.id)
        if deed is None and not noted:
            raise CheckpointNotFoundError(
                f"nothing was moved to {self.url} yet: call Archive.move, or `simckpt archive STORE URL`"
            )
        if deed is None:
            raise ArchiveUnavailableError(
                f"there is no archive at {self.url}: is it mounted? Was it moved? Name its place by "
                f"Store.archive(url). If it is lost for good, begin another one by Store.archive(url, new=True) or "
                f"`simckpt archive --new`"
            )
        is_known = (known is not None and known.id is not None) or self._files.has_other_record()
        if deed.owner not in (None, self._files.id) and noted == {deed.id} and is_known:
            # this store's, whose own id a repair has made anew: the archive remembers it
            self._files.rewrite_store(deed.owner)
            naming.note_named(self._files.id, self._place)
        if deed.owner != self._files.id:
            whose = "a place that runs are pushed to" if deed.owner is None else f"the archive of store {deed.owner}"
            raise ConflictError(f"{self.url} is {whose}: give this store a place of its own")
        if known is None or (noted and not noted & {None, deed.id}):
            raise ConflictError(
                f"{self.url} is another archive of this store ({deed.id}) than the one it knows: name its place by "
                f"Store.archive(url)"
            )
        if (known.id, known.url, known.store) != (deed.id, self.url, deed.owner):
            self._files.write_archive(replace(known, id=deed.id, url=self.url))
        return deed

    def _read_deed(self, objects: Objects, known: ArchiveRecord | None) -> Deed | None:
        """Returns whose the archive is, after its record was written again if it was lost there and is known here."""
        damaged = None
        try:
            deed = contents.read_deed(objects)
        except ArchiveDamagedError as error:
            deed, damaged = None, error
        if known is not None and known.id is not None:
            # only an archive that was this store's has that id; a push may have written its record again, as nobody's
            ours = contents.Deed(known.id, self._files.id)
            if deed == contents.Deed(known.id, None) or (
                deed is None and known.id in contents.ids_by_manifests(objects)
            ):
                return contents.rewrite_deed(objects, ours)
        if damaged is not None:
            raise damaged
        return deed

    def _check_none_depends(self) -> None:
        """Raises ConflictError if there are checkpoints or sessions whose arrays are in the old archive alone."""
        alone = list(self._alone())
        if alone:
            more = f" and {len(alone) - 5} more" if len(alone) > 5 else ""
            raise ConflictError(
                f"{len(alone)} checkpoints or sessions are in the old archive alone: {', '.join(alone[:5])}{more}. "
                f"Name its place and fetch them, or prune them, before another archive takes its place"
            )

    def move(self) -> Moved:
        """Makes one pass: copies what is new, reads it back, evicts what the policy lets go, removes what was pruned.

        A kill at any point loses nothing, and the next pass goes on from there.

        Returns:
            What was done, and what could not be done.

        Raises:
            ArchiveUnavailableError: the archive cannot be reached, or refuses; what is on the disk stays as it is.
            RunLockedError: another process is moving checkpoints of this store.
            ConflictError: the place is not this store's archive.
            ConfigurationError: its object store cannot tell who comes first, so that commits there are not safe.
        """
        return self._pass(lambda: True)

    def verify(self) -> Verified:
        """Reads the whole archive back, and puts right what is damaged on one side from the other.

        Raises:
            ArchiveUnavailableError, RunLockedError, ConflictError: as `move`.
        """
        with self._files.claim_archive() as claim:
            objects = self._opened()
            objects.going_on = _beating(claim, lambda: True)
            return verifying.verify(objects, self._files, self._deed(objects, write=False).id)

    def _pass(self, going_on: Callable[[], bool]) -> Moved:
        with self._files.claim_archive() as claim:
            objects = self._opened()
            objects.going_on = _beating(claim, going_on)
            deed = self._deed(objects, write=True)
            return Pass(
                objects,
                self._files,
                deed.id,
                policy=self._policy,
                keep_sessions=self._keep_sessions,
                keep_fetched=self._keep_fetched,
                going_on=objects.going_on,
            ).run()

    def fetch(self, checkpoint: Checkpoint) -> list[str]:
        """Returns the names of the files that were brought back: what of a checkpoint is missing here, or damaged.

        Every byte is verified before it replaces anything.

        Raises:
            CheckpointNotFoundError: the archive does not have it.
            ArchiveDamagedError, ArchiveUnavailableError: the copy is damaged, or cannot be reached.
            StorageError: the disk refused.
        """
        return self.bring_back(checkpoint.run, checkpoint.seq)

    def bring_back(self, run: str, seq: int, *, dry_run: bool = False) -> list[str]:
        """Does what `fetch` does, for a commit number; a dry run only names what the archive has of it."""
        objects = self._opened()
        self._deed(objects, write=False)
        if dry_run:
            return fetching.offered(objects, self._files, run, seq)
        brought = fetching.fetch(objects, self._files, run, seq)
        if brought:
            with contextlib.suppress(StoreError):
                self._files.log_event(run, {"event": "fetched", "seq": seq, "files": brought, "archive": self.url})
        return brought

    def fetch_session(self, name: str, *, dry_run: bool = False) -> list[str]:
        """Returns the names of the files that were brought back: what of a session is missing here, or damaged.

        One whose folder is gone comes back whole. Every byte is verified before it replaces anything.

        Args:
            name: of the session.
            dry_run: only name what the archive has of it.

        Raises:
            SessionNotFoundError: the archive does not have it, or it was removed meanwhile.
            ArchiveDamagedError, ArchiveUnavailableError: the copy is damaged, or cannot be reached.
            RunLockedError: somebody else has been at work with it for long.
            StorageError: the disk refused.
        """
        objects = self._opened()
        self._deed(objects, write=False)
        return (session_objects.offered if dry_run else session_objects.fetch)(objects, self._files, name)

    def small_file(self, run: str, file: str) -> bytes | None:
        """Returns what the archive has of a run's record, a start or a mark, or None; raises as `fetch`.

        Args:
            run: the run's name.
            file: its name below the run's folder.
        """
        objects = self._opened()
        self._deed(objects, write=False)
        return objects.read(f"runs/{run}/{file}")

    def start(self, *, every: float = 5.0) -> None:
        """Moves in the background from now on: what is new is looked for in short intervals.

        An archive that cannot be reached is tried again with growing pauses; that is told once, by a warning and in the
        logs of the runs, and training goes on.

        Args:
            every: between two looks [s].
        """
        if self._mover is None:
            # a store of its own: what a store keeps in mind is not made for two threads
            files = StoreFiles.open(self._files.path)
            twin = Archive(
                files,
                self.url,
                policy=self._policy,
                keep_sessions=self._keep_sessions,
                patience=self._patience,
                keep_fetched=self._keep_fetched,
                new=self._new,
            )
            self._mover = Mover(files, twin._pass, every=every)
            self._mover.start()

    def stop(self, *, timeout: float = STOP) -> None:
        """Ends moving in the background.

        What is new is moved first, as far as that takes less than `timeout`; then the request under way is given up,
        even if the server does not answer, and a later pass goes on from there. `move` waits until all is moved.

        Args:
            timeout: how long to wait [s]; it takes a second more at most.
        """
        if self._mover is not None:
            mover, self._mover = self._mover, None
            mover.stop(timeout)

    def __enter__(self) -> Archive:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


def _beating(claim: Claim, going_on: Callable[[], bool]) -> Callable[[], bool]:
    """Returns what asks whether to go on, and tells other machines that this process lives: large objects take long."""

    def beat() -> bool:
        claim.beat()
        return going_on()

    return beat


def bring_back(files: StoreFiles, run: str, seq: int, error: DamagedError | None = None) -> bool:
    """Brings back what is damaged or evicted of a checkpoint; returns whether anything was brought.

    Args:
        files: of the store.
        run: the run's name.
        seq: commit number.
        error: the damage, which says so if the archive cannot be reached.

    Raises:
        ArchiveUnavailableError: the archive has it, and cannot be reached.
        ArchiveNotNamedError: it is evicted, and the archive is not one that this user has named.
        ArchiveDamagedError: the archive has a copy that does not help.
    """
    try:
        return bool(Archive(files).bring_back(run, seq))
    except ArchiveUnavailableError as unreachable:
        told = f"commit {seq} of run {run!r} is not here" if error is None else str(error)
        told = f"{told}; its copy cannot be brought back: {unreachable}"
        if error is None or files.archived_file(run, seq).exists():
            raise ArchiveUnavailableError(told) from None
        error.args = (told, *error.args[1:])
        return False
    except ArchiveDamagedError:
        raise
    except StoreError:
        if seq in files.evicted(run):
            raise
        return False  # the archive does not have it, is not this store's or not to be trusted: the damage here is told


def bring_session_back(files: StoreFiles, name: str, error: DamagedError | None = None) -> bool:
    """Brings back what is damaged or evicted of a session; returns whether anything was brought.

    Args:
        files: of the store.
        name: of the session.
        error: the damage, which says so if the archive cannot be reached.

    Raises:
        ArchiveUnavailableError: the archive has it, and cannot be reached.
        ArchiveNotNamedError: it is evicted, and the archive is not one that this user has named.
        ArchiveDamagedError: the archive has a copy that does not help.
    """
    folder = files.session_folder(name)
    noted = os.path.lexists(folder / ARCHIVED_FILE)
    if not noted and not os.path.lexists(folder / CLOSED_FILE):
        return False  # it is being recorded: no archive has it
    try:
        return bool(Archive(files).fetch_session(name))
    except ArchiveUnavailableError as unreachable:
        told = f"session {name!r} is not here" if error is None else str(error)
        told = f"{told}; its copy cannot be brought back: {unreachable}"
        if error is None or noted:
            raise ArchiveUnavailableError(told) from None
        error.args = (told, *error.args[1:])
        return False
    except ArchiveDamagedError:
        raise
    except StoreError:
        if noted:
            raise
        return False  # the archive does not have it, is not this store's or not to be trusted: the damage here is told
