"""What a pass between a store and its archive does for sessions; each step can be repeated, a kill loses nothing."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from simckpt.archive import contents
from simckpt.archive.contents import Listing
from simckpt.archive.objects import Objects
from simckpt.archive.session_objects import SessionUploads, read_whole
from simckpt.errors import ArchiveDamagedError, DamagedError, SessionNotFoundError
from simckpt.policies import KeepAll, KeepPolicy
from simckpt.session_pruning import retained
from simckpt.storage import StoreFiles, archived_sessions
from simckpt.storage.archived_sessions import ARCHIVED_FILE, ArchivedSession
from simckpt.storage.sessions import SessionFiles

if TYPE_CHECKING:
    from simckpt.archive.passes import Moved

Problems = Callable[[str], contextlib.AbstractContextManager[None]]


class SessionPass:
    """The part of a pass that is about sessions.

    Args:
        objects: of the archive.
        files: of the store.
        archive: id of the archive.
        listing: what is in the archive; brought up to date.
        uploads: of sessions.
        keep: which sessions stay on the disk.
        keep_fetched: how long one that came back stays there [s].
        going_on: asked between sessions; False ends the pass.
        problems: a context that keeps in mind what could not be done, told what it was about.
        moved: receives what was done.
    """

    def __init__(
        self,
        objects: Objects,
        files: StoreFiles,
        archive: str,
        listing: Listing,
        uploads: SessionUploads,
        *,
        keep: KeepPolicy,
        keep_fetched: float,
        going_on: Callable[[], bool],
        problems: Problems,
        moved: Moved,
    ) -> None:
        self._objects = objects
        self._files = files
        self._archive = archive
        self._listing = listing
        self._uploads = uploads
        self._keep = keep
        self._keep_fetched = keep_fetched
        self._going_on = going_on
        self._problems = problems
        self._moved = moved

    def remove(self) -> None:
        """Removes from the archive what was removed here; the note of that goes last."""
        for session, name in self._files.removed_sessions().items():
            if not self._going_on():
                return
            with self._problems(f"session {name!r}, which was removed here"):
                self._remove(session, name)

    def _remove(self, session: str, name: str) -> None:
        there = self._listing.of_session(name)
        if there and contents.session_there(self._objects, name) in (None, session):
            # its end first, without which it is not in the archive; the manifest last, which says whose the rest is
            for each in there:
                self._objects.delete(each)
                del self._listing.sizes[each]
            self._moved.removed_sessions.append(name)
        self._files.forget_removed(session)

    def move(self) -> None:
        """Copies what is new, and looks after what is there already; raises ArchiveUnavailableError."""
        here = self._files.sessions()
        for name in here:
            if not self._going_on():
                return
            with self._problems(f"session {name!r}"), contextlib.suppress(SessionNotFoundError):
                self._move(self._files.session(name))
        gone = set(self._files.removed_sessions().values())
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
            with self._problems(f"session {verdict.name!r}"), contextlib.suppress(SessionNotFoundError):
                files = self._files.session(verdict.name)
                noted = self._noted(files)
                if noted is None or not self._listing.has_session(noted) or self._is_back(files, noted):
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
