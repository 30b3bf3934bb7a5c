"""What a pass between a store and its archive does for sessions; each step can be repeated, a kill loses nothing."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from simckpt.archive import contents
from simckpt.archive.session_objects import SessionUploads, read_whole
from simckpt.archive.uploading import Uploads
from simckpt.errors import ArchiveDamagedError, ConflictError, DamagedError, RunLockedError, SessionNotFoundError
from simckpt.policies import KeepAll, KeepPolicy
from simckpt.session_pruning import retained
from simckpt.storage import StoreFiles, archived_sessions
from simckpt.storage.archived_sessions import ArchivedSession, RemovedSession
from simckpt.storage.sessions import ARCHIVED_FILE, CLOSED_FILE, SessionFiles

if TYPE_CHECKING:
    from simckpt.archive.passes import Moved

Problems = Callable[[str], contextlib.AbstractContextManager[None]]


class SessionPass:
    """The part of a pass that is about sessions.

    Args:
        files: of the store.
        uploads: into the archive, which know what is there.
        keep: which sessions stay on the disk.
        keep_fetched: how long one that came back stays there [s].
        going_on: asked between sessions; False ends the pass.
        problems: a context that keeps in mind what could not be done, told what it was about.
        moved: receives what was done.
    """

    def __init__(
        self,
        files: StoreFiles,
        uploads: Uploads,
        *,
        keep: KeepPolicy,
        keep_fetched: float,
        going_on: Callable[[], bool],
        problems: Problems,
        moved: Moved,
    ) -> None:
        self._files = files
        self._objects = uploads.objects
        self._archive = uploads.archive
        self._listing = uploads.listing
        self._uploads = SessionUploads(files, uploads)
        self._keep = keep
        self._keep_fetched = keep_fetched
        self._going_on = going_on
        self._problems = problems
        self._moved = moved

    def remove(self) -> None:
        """Removes from the archive what was removed here; the note of that goes last.

        Notes of what is here after all are forgotten first: should it be lost one day, that was no removal.
        """
        with self._problems("notes of removed sessions"):
            self._files.forget_taken_back()
        for note in self._files.removed_sessions():
            if not self._going_on():
                return
            with self._problems(f"session {note.name!r}, which was removed here"):
                self._remove(note)

    def _remove(self, note: RemovedSession) -> None:
        there = self._listing.of_session(note.name)
        whose = contents.session_there(self._objects, note.name) if there else None
        if there and whose is None:
            raise DamagedError(
                f"nothing that can be read says whose {len(there)} objects of that name are: they stay",
                path=contents.session_object(note.name, ""),
            )
        if whose == note.session:
            try:
                self._check_end(note)
            except ConflictError:
                self._files.forget_removed(note.session)
                raise
            # its end first, without which it is not in the archive; the manifest last, which says whose the rest is
            for each in there:
                self._objects.delete(each)
                del self._listing.sizes[each]
            self._moved.removed_sessions.append(note.name)
        self._files.forget_removed(note.session)

    def _check_end(self, note: RemovedSession) -> None:
        """Raises ConflictError if the archive has another end of a session than was removed: it is another store's."""
        if note.any_end:
            return
        with contextlib.suppress(ArchiveDamagedError):
            manifest = contents.read_session_manifest(self._objects, note.name)
            if manifest is not None and manifest.files[CLOSED_FILE].digest == note.end:
                return
        last = self._objects.read(contents.session_object(note.name, CLOSED_FILE))
        if last is None or archived_sessions.end_digest(last) != note.end:
            raise ConflictError(
                "the archive has another end of it than the one that was removed, perhaps from a copy of this store: "
                "that stays, and `simckpt session fetch` brings it"
            )

    def move(self) -> None:
        """Copies what is new, and looks after what is there already; raises ArchiveUnavailableError."""
        here = self._files.sessions()
        for name in here:
            if not self._going_on():
                return
            with self._problems(f"session {name!r}"), contextlib.suppress(SessionNotFoundError):
                self._move(self._files.session(name))
        gone = {note.name for note in self._files.removed_sessions()}
        for name in sorted(set(self._listing.sessions()) - set(here) - gone):
            with self._problems(f"session {name!r}"):
                raise SessionNotFoundError(
                    f"it is in the archive, and gone here without `simckpt session remove`: `simckpt session fetch "
                    f"{self._files.path} {name}` brings it back"
                )

    def _move(self, files: SessionFiles) -> None:
        name, noted = files.record.name, self._noted(files)
        if noted is None and files.closed() is None:
            return  # it is being recorded, or may be closed later
        if noted is None and not self._has_states(files):
            # the note is gone or damaged; the archive has the same bytes
            noted = read_whole(self._objects, name)
            if (noted.session, noted.archive) != (files.record.id, self._archive):
                raise DamagedError(f"its arrays are not here: {files.path}", path=files.path)
            self._files.write_archived_session(noted)
        if noted is None or not self._listing.has_session(noted):
            if noted is not None and archived_sessions.is_evicted(files):
                raise DamagedError(
                    f"its arrays are neither here nor whole in the archive: {files.path}", path=files.path
                )
            self._bring(name)
        else:
            self._see_to_manifest(noted)
        self._uploads.bring_pin(files, mirror=True)

    def _bring(self, name: str) -> None:
        try:
            record = self._uploads.upload(name)
        except ArchiveDamagedError:
            raise
        except DamagedError as error:
            raise DamagedError(
                f"it is damaged here, so that there is no copy of it in the archive, nor will be: {error}; `simckpt "
                f"check` says what it means",
                path=error.path,
            ) from error
        self._files.write_archived_session(record)
        self._moved.sessions.append(name)

    def _noted(self, files: SessionFiles) -> ArchivedSession | None:
        record = archived_sessions.noted(files)
        return record if record is not None and record.archive == self._archive else None

    def _has_states(self, files: SessionFiles) -> bool:
        states = [name for each in archived_sessions.folders_of(files) for name in each.files if name.endswith(".h5")]
        return all(os.path.lexists(files.path / name) for name in states)

    def _see_to_manifest(self, noted: ArchivedSession) -> None:
        name, data = contents.session_object(noted.name, ARCHIVED_FILE), noted.to_bytes()
        if self._listing.sizes.get(name) != len(data):
            self._objects.put(name, data)
            self._listing.sizes[name] = len(data)

    def evict(self) -> None:
        """Removes the arrays of what the policy does not keep here, and the archive has as this pass has seen."""
        if isinstance(self._keep, KeepAll):
            return  # without a look at every record
        for verdict in retained(self._files, self._keep):
            if verdict.keep or not self._going_on():
                continue
            # one that somebody is at work with is passed over
            missed = contextlib.suppress(SessionNotFoundError, RunLockedError)
            with self._problems(f"session {verdict.name!r}"), missed:
                files = self._files.session(verdict.name)
                noted = self._noted(files)
                if (
                    noted is None
                    or noted.session != verdict.id
                    or not self._listing.has_session(noted)
                    or self._is_back(files, noted)
                ):
                    continue
                if any(os.path.lexists(files.path / name) for name in noted.states):
                    self._files.evict_session(verdict.name)
                    self._moved.evicted_sessions.append(verdict.name)

    def _is_back(self, files: SessionFiles, noted: ArchivedSession) -> bool:
        """Returns whether a session came back from the archive a short while ago: somebody is at work with it."""
        came = 0.0
        for name in noted.states:
            with contextlib.suppress(FileNotFoundError):  # others may be about to come
                came = max(came, (files.path / name).stat().st_mtime)
        # of what was recorded here the note came later
        note = (files.path / ARCHIVED_FILE).stat().st_mtime
        return came >= note and 0 <= time.time() - came < self._keep_fetched
