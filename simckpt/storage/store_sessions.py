"""Sessions as parts of a store that may have an archive behind it: evicting, taking in, removing, what merges left."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Collection, Iterator
from pathlib import Path

from simckpt.errors import (
    DamagedError,
    FormatError,
    RunLockedError,
    SessionNotFoundError,
    StorageError,
    StorageFullError,
    StoreError,
)
from simckpt.storage import (
    archived_sessions,
    claims,
    durable,
    names,
    quarantine,
    reader,
    session_ending,
    session_writing,
    sessions,
)
from simckpt.storage.archived_sessions import PIN, ArchivedSession, RemovedSession
from simckpt.storage.sessions import (
    ARCHIVED_FILE,
    CLOSED_FILE,
    MODELS,
    PARTS,
    SESSIONS,
    SNAPSHOTS,
    SessionFiles,
    covering,
)
from simckpt.storage.store_tiers import Incoming, StoreTiers

_PATIENCE = 60.0  # [s] for others who bring the same session back: their files are named, and synced
_POLL = 0.05  # [s]


class StoreSessions(StoreTiers):
    """A store whose sessions can leave the disk, come from elsewhere, and be removed."""

    def sessions(self) -> list[str]:
        """Returns the names of the sessions, sorted."""
        return sessions.session_names(self.path)

    def session(self, name: str) -> SessionFiles:
        """Returns the files of a session, for reading; raises SessionNotFoundError, DamagedError or FormatError."""
        return SessionFiles(self.path, name)

    def session_stamps(self) -> object:
        """Returns what differs once a session was closed, pinned or removed; raises StorageError."""
        files = [self.session_folder(name) / file for name in self.sessions() for file in (CLOSED_FILE, PIN)]
        found: dict[Path, tuple[int, int]] = {}
        for path in files:
            with durable.translated(path), contextlib.suppress(FileNotFoundError):
                status = path.lstat()
                found[path] = status.st_ino, status.st_mtime_ns
        return found, [session for session, _ in archived_sessions.notes(self.path)]

    def session_folder(self, name: str) -> Path:
        """Returns the path of a session's folder, whether it is there or not."""
        return self.path / SESSIONS / names.check_run_name(name)

    def write_archived_session(self, record: ArchivedSession) -> None:
        """Notes that a verified copy of a session is in the archive.

        Raises:
            SessionNotFoundError: it was removed.
            RunLockedError: somebody changes it at this moment.
            StorageError: the disk refused.
        """
        folder = self.session_folder(record.name)
        with self._claimed_session(record.name, record.session), self._works.made() as made:
            durable.write_record(self._disk, made / ARCHIVED_FILE, record.to_bytes())
            durable.replace_file(self._disk, made / ARCHIVED_FILE, folder / ARCHIVED_FILE)

    @contextlib.contextmanager
    def _claimed_session(self, name: str, session: str, *, patience: float = 0.0) -> Iterator[None]:
        """Holds the claim on the session of an id for the block, without which no other takes its place.

        Args:
            name: of the session.
            session: its id.
            patience: how long to wait for others who bring it back, evict or remove it [s].

        Raises:
            SessionNotFoundError: it was removed, and perhaps another one has its name.
            RunLockedError: somebody else has the claim.
            StorageError: the disk refused.
        """
        folder, until = self.session_folder(name), time.monotonic() + patience
        quarantine.check_inside(self.path, SESSIONS, name)
        while True:
            try:
                claim = session_writing.claimed(self._disk, folder, self._works, self._clock, reserve=False)
                break
            except RunLockedError:
                if time.monotonic() >= until:
                    raise
                time.sleep(_POLL)
            except (FormatError, StorageError):
                if not os.path.lexists(folder):
                    raise SessionNotFoundError(f"session {name!r} was removed meanwhile") from None
                raise
        try:
            self._check_identity(name, session)
            yield
        finally:
            with contextlib.suppress(StorageError):  # it counts as given back all the same
                claim.release()

    def _check_identity(self, name: str, session: str) -> None:
        if archived_sessions.identity(self.path, name) != session:
            raise SessionNotFoundError(
                f"session {name!r} of id {session} was removed meanwhile; what has its name now was not changed"
            )

    def evict_session(self, name: str) -> None:
        """Removes the arrays of a session that the archive has; all its records and indexes stay.

        Raises:
            SessionNotFoundError: it was removed.
            FormatError: nothing here says that it is in the archive; nothing was removed.
            RunLockedError: somebody else is at work with it.
            StorageError: the disk refused.
        """
        files = self.session(name)
        record = archived_sessions.noted(files)
        if record is None or files.closed() is None:
            raise FormatError(f"session {name!r} is not in the archive: it is not evicted")
        with contextlib.ExitStack() as stack:
            # on a disk that is too full for a claim this is what makes room: there each file is looked at alone
            with contextlib.suppress(StorageFullError):
                stack.enter_context(self._claimed_session(name, record.session))
            for state in record.states:
                self._check_identity(name, record.session)
                path = files.path / state
                with durable.translated(path), contextlib.suppress(FileNotFoundError):
                    # a store removes nothing behind a symbolic link
                    with reader.opened_folder(files.path, *state.split("/")[:-1]):
                        self._disk.unlink(path)
                    durable.sync_folder(self._disk, path.parent)

    @contextlib.contextmanager
    def incoming_session(self, name: str, folders: Collection[str], *, note: bytes | None = None) -> Iterator[Incoming]:
        """Gives a work folder for a session, or some of its files; what is left in it after the block is removed.

        They lie in `sessions/<name>/` there, as in a store, so that they can be read and verified as in one.

        Args:
            name: of the session.
            folders: paths below the session's folder that are made.
            note: what says that a session that comes whole is in the archive of this store. It comes before what it
                names, by which a pass knows that this has come back.
        """
        with self._works.made() as made:
            home = durable.make_folders(self._disk, made, SESSIONS, name)
            for folder in folders:
                durable.make_folders(self._disk, home, *folder.split("/"))
            if note is not None:
                durable.write_record(self._disk, home / ARCHIVED_FILE, note)
            yield Incoming(home, ())

    def adopt_session(self, incoming: Incoming, name: str, *, pin: bytes | None) -> None:
        """Gives a session that has come, whole and verified, its name here.

        Args:
            incoming: with all its files.
            name: of the session.
            pin: what protects it from pruning, or None.

        Raises:
            ConflictError: there is a session of that name.
            StorageError: the disk refused; there is no such session.
        """
        home = incoming.folder
        record = sessions.read_session(home.parent.parent, name)
        if record.origin is not None:
            session_writing.require_feature(self._disk, self._works, self.path)
        if pin is not None:
            durable.write_record(self._disk, home / PIN, pin)
        for kind in (PARTS, SNAPSHOTS, MODELS):
            folder = durable.make_folders(self._disk, home, kind)
            for each in sorted(path for path in folder.iterdir() if path.is_dir()):
                durable.sync_folder(self._disk, each)
            durable.sync_folder(self._disk, folder)
        durable.sync_folder(self._disk, home)
        durable.publish_folder(self._disk, home, durable.make_folders(self._disk, self.path, SESSIONS) / name)
        with contextlib.suppress(StorageError):  # that it was removed is taken back; else the next pass sees to it
            self.forget_removed(record.id)

    def replace_in_session(self, incoming: Incoming, name: str, files: Collection[str], *, session: str) -> None:
        """Puts verified files in the places of those that are damaged or gone in a session, `closed.json` last.

        A folder that lies in the place of a file goes into quarantine; nothing is written behind a symbolic link.

        Args:
            incoming: with these files.
            name: of the session.
            files: their paths below its folder.
            session: its id.

        Raises:
            SessionNotFoundError: it was removed meanwhile; another one of its name is as it was.
            RunLockedError: somebody else has been at work with it for long.
            StorageError: the disk refused; what was replaced is good.
        """
        home = self.session_folder(name)
        with self._claimed_session(name, session, patience=_PATIENCE):
            for file in sorted(files, key=lambda each: each == CLOSED_FILE):
                *folders, last = file.split("/")
                quarantine.check_inside(self.path, SESSIONS, name, *folders)
                target = durable.make_folders(self._disk, home, *folders) / last
                if target.is_dir() and not target.is_symlink():
                    quarantine.put_aside(self._disk, self.path, str(target.relative_to(self.path)))
                durable.replace_file(self._disk, incoming.folder / file, target)

    def take_pin(self, name: str, data: bytes) -> None:
        """Pins a session as elsewhere; raises DamagedError or FormatError if these bytes do not say so."""
        archived_sessions.parse_pin(data, f"{SESSIONS}/{name}/{PIN}", session=self.session(name).record.id)
        self.pin_session(name)

    def pin_session(self, name: str) -> None:
        """Protects a session from pruning; raises SessionNotFoundError or StorageError."""
        archived_sessions.pin_session(self.path, name, disk=self._disk)

    def unpin_session(self, name: str) -> None:
        """Ends the protection of a session, if there is one; raises SessionNotFoundError or StorageError."""
        archived_sessions.unpin_session(self.path, name, disk=self._disk)

    def remove_session(self, name: str, *, id: str | None = None, unless_pinned: bool = False) -> None:
        """Removes a session that nobody records; the archive's next pass removes its copy.

        Args:
            name: of the session.
            id: of the session that is meant: another one of that name stays.
            unless_pinned: whether one that is pinned stays.

        Raises:
            SessionNotFoundError: there is none of that name, or it is another one.
            ConflictError: it is pinned, and stays for that.
            RunLockedError: a process is recording it.
            StorageError: the disk refused; it is there as before, or gone.
        """
        session_ending.remove_session(self.path, name, disk=self._disk, id=id, unless_pinned=unless_pinned)

    def removed_sessions(self) -> list[RemovedSession]:
        """Returns the notes of the sessions that were removed here, and perhaps not yet in the archive."""
        return archived_sessions.removed(self.path)

    def forget_taken_back(self) -> None:
        """Forgets the notes of removals whose sessions are here: they came back, or a kill kept them here.

        One that somebody is removing at this moment keeps its note.

        Raises:
            StorageError: the disk refused.
        """
        for session, name in archived_sessions.noted_here(self.path).items():
            with (
                contextlib.suppress(RunLockedError, SessionNotFoundError),
                self._claimed_session(name, session),
            ):
                self.forget_removed(session)

    def forget_removed(self, session: str) -> None:
        """Notes that the archive has nothing of a removed session any more; raises StorageError."""
        archived_sessions.forget_removed(self._disk, self.path, session)

    def covered_parts(self) -> list[str]:
        """Returns the parts of closed sessions that merged ones cover, which a kill left: paths below the store."""
        found = []
        for name in self.sessions():
            with contextlib.suppress(StoreError):
                files = self.session(name)
                _, covered = covering(sessions.part_folders(files.path))
                if covered and files.closed() is not None:
                    found += [f"{SESSIONS}/{name}/{PARTS}/{first:08d}-{last:08d}" for first, last in covered]
        return found

    def free_covered(self) -> None:
        """Removes the parts of closed sessions that merged ones cover, once these were read, every byte.

        What is being recorded, or whose merged part is damaged or in the archive alone, is passed over.

        Raises:
            StorageError: the disk refused.
        """
        for where in self.covered_parts():
            _, name, _, folder = where.split("/")
            with contextlib.suppress(DamagedError, FormatError, RunLockedError, SessionNotFoundError):
                self._free_covered(name, folder)

    def _free_covered(self, name: str, folder: str) -> None:
        files = self.session(name)
        with claims.take(self._disk, files.path, self._works.make, clock=self._clock, reserve=False):
            kept, _ = covering(sessions.part_folders(files.path))
            first, last = map(int, folder.split("-"))
            (cover,) = (each for each in kept if each[0] <= first and last <= each[1])
            if cover == (first, last):
                return
            record = files.part(cover)
            files.verify(f"{PARTS}/{record.folder}", record)
            durable.remove_tree(self._disk, files.path / PARTS / folder)
            durable.sync_folder(self._disk, files.path / PARTS)
