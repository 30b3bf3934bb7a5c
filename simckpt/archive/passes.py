"""One pass between a store and its archive: copies what is new, evicts what may leave, removes what was pruned.

Each step can be repeated, and a kill between any two loses nothing: what is decided follows from the store, from one
listing of the archive, and from the records that say what was read back.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from simckpt.archive import contents
from simckpt.archive.contents import Listing
from simckpt.archive.objects import Objects, lost
from simckpt.archive.run_objects import mirror_metrics, remove_marks, upload_run
from simckpt.archive.session_passes import SessionPass
from simckpt.archive.uploading import Uploads
from simckpt.errors import (
    ArchiveDamagedError,
    ArchiveUnavailableError,
    CheckpointNotFoundError,
    DamagedError,
    RunNotFoundError,
    StoreError,
)
from simckpt.policies import KeepAll, KeepPolicy, retain
from simckpt.run import Run
from simckpt.storage import CommitRecord, StoreFiles, TombstoneRecord, archived
from simckpt.storage.archived import ArchivedRecord
from simckpt.storage.store_reader import COMMIT_FILE


@dataclass
class Moved:
    """What a pass did.

    Attributes:
        archived: ids of the checkpoints that the archive has now.
        evicted: ids of those whose state has left the disk.
        removed: ids of pruned ones that were removed from the archive.
        sessions: names of the sessions that the archive has now.
        evicted_sessions: names of those whose arrays have left the disk.
        removed_sessions: names of those that were removed here and now there.
        problems: what could not be done, and why; tried again by the next pass.
    """

    archived: list[str] = field(default_factory=list)
    evicted: list[str] = field(default_factory=list)
    removed: list[str] = field(default_factory=list)
    sessions: list[str] = field(default_factory=list)
    evicted_sessions: list[str] = field(default_factory=list)
    removed_sessions: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


class Pass:
    """One pass; whoever makes it holds the claim on the archive.

    Args:
        objects: of the archive.
        files: of the store.
        archive: id of the archive.
        policy: which checkpoints stay on the disk.
        keep_fetched: how long what came back stays there [s].
        going_on: asked between checkpoints; False ends the pass.
        keep_sessions: which sessions stay on the disk; all if None.
    """

    def __init__(
        self,
        objects: Objects,
        files: StoreFiles,
        archive: str,
        *,
        policy: KeepPolicy,
        keep_fetched: float,
        going_on: Callable[[], bool],
        keep_sessions: KeepPolicy | None = None,
    ) -> None:
        self._objects = objects
        self._files = files
        self._archive = archive
        self._policy = policy
        self._keep_fetched = keep_fetched
        self._going_on = going_on
        self._listing = Listing(objects.list())
        self._uploads = Uploads(objects, files, archive, self._listing)
        self.moved = Moved()
        self._sessions = SessionPass(
            files,
            self._uploads,
            keep=keep_sessions or KeepAll(),
            keep_fetched=keep_fetched,
            going_on=going_on,
            problems=self._problems,
            moved=self.moved,
        )

    def run(self) -> Moved:
        """Returns what was done; raises ArchiveUnavailableError, after which the next pass goes on from here.

        What was pruned is removed first, which makes room there; and what is there already leaves the disk even if
        nothing more can be written, as to an archive that is full.
        """
        runs, failed = self._files.runs(), None
        for name in runs:
            with self._problems(f"run {name!r}"):
                self._remove_pruned(name)
        with self._problems("segments in the archive"):
            self._free_segments()
        with self._problems("sessions"):
            self._sessions.remove()
        for name in runs:
            with self._problems(f"run {name!r}"):
                try:
                    if failed is None:
                        self._move_run(name)
                except ArchiveUnavailableError as error:
                    failed = error
                self._evict(name)
        with self._problems("segments here"):
            self._files.free_evicted()
        with self._problems("sessions"):
            try:
                if failed is None:
                    self._sessions.move()
            except ArchiveUnavailableError as error:
                failed = error
            self._sessions.evict()
        if failed is not None:
            raise failed
        return self.moved

    @contextlib.contextmanager
    def _problems(self, what: str) -> Iterator[None]:
        try:
            yield
        except ArchiveUnavailableError:
            raise
        except (StoreError, OSError) as error:  # also files that went away meanwhile
            self.moved.problems.append(f"{what}: {error}")

    def _remove_pruned(self, name: str) -> None:
        known = self._files.archived(name)
        for record in self._files.records(name, damaged={}):
            there = contents.manifest_object(name, record.seq) in self._listing.sizes
            if isinstance(record, TombstoneRecord) and there and self._going_on():
                noted = known.get(record.seq)
                with self._problems(f"checkpoint {record.id} of run {name!r}"):
                    self._remove(name, record, noted if noted and noted.archive == self._archive else None)

    def _move_run(self, name: str) -> None:
        records, evicted = self._files.records(name, damaged={}), self._files.evicted(name)
        known = {seq: record for seq, record in self._files.archived(name).items() if record.archive == self._archive}
        for noted in known.values():
            self._uploads.trust(noted)
        upload_run(self._objects, self._files, name, self._listing)
        mirror_metrics(self._objects, self._files, name, self._listing)
        remove_marks(self._objects, self._files, name, self._listing)
        for record in records:
            if not self._going_on():
                return
            with self._problems(f"checkpoint {record.id} of run {name!r}"):
                if isinstance(record, TombstoneRecord):
                    self._remove(name, record, known.get(record.seq))
                elif record.seq in evicted or not self._has_state(name, record):
                    self._look_after(name, record, known.get(record.seq))
                else:
                    self._bring(name, record, known.get(record.seq))

    def _has_state(self, run: str, record: CommitRecord) -> bool:
        first = next(filter(archived.is_first_state, record.names), COMMIT_FILE)
        return (self._files.folder_of(run, record.seq) / first).exists()

    def _bring(self, run: str, record: CommitRecord, known: ArchivedRecord | None) -> None:
        if known is not None and known.checkpoint == record.id and self._listing.holds(run, known):
            self._see_to_manifest(run, known)
            return
        with contextlib.suppress(CheckpointNotFoundError):  # pruned meanwhile: the next pass sees to it
            try:
                made = self._uploads.upload(run, record.seq)
            except ArchiveDamagedError:
                raise
            except DamagedError as error:
                self.moved.problems.append(
                    f"checkpoint {record.id} of run {run!r} at step {record.step:,} is damaged here, so that there is "
                    f"no copy of it in the archive, nor will be: {error}; `simckpt check` says what it means"
                )
                return
            self._files.write_archived(run, made)
            self.moved.archived.append(record.id)
            self._log(run, "archived", checkpoint=record.id, step=record.step, archive=str(self._objects.place))

    def _look_after(self, run: str, record: CommitRecord, known: ArchivedRecord | None) -> None:
        """Makes sure that a checkpoint whose state is in the archive alone is there, and noted here."""
        if known is None:
            # the note is damaged; the archive has the same bytes
            known = contents.read_manifest(self._objects, run, record.seq)
            if known is not None and (known.checkpoint, known.archive) == (record.id, self._archive):
                self._files.write_archived(run, known)
        if known is not None and self._listing.holds(run, known):
            self._see_to_manifest(run, known)
        else:
            self.moved.problems.append(
                f"checkpoint {record.id} of run {run!r}: its state is neither here nor whole in the archive"
            )

    def _see_to_manifest(self, run: str, known: ArchivedRecord) -> None:
        """Writes a manifest again that is gone from the archive, or cut: the record here has the same bytes."""
        name, data = contents.manifest_object(run, known.seq), known.to_bytes()
        if self._listing.sizes.get(name) != len(data):
            self._objects.put(name, data)
            self._listing.sizes[name] = len(data)

    def _evict(self, run: str) -> None:
        """Removes the state of what the policy does not keep here, and the archive has as this pass has seen."""
        try:
            opened = Run(self._files, run)
            line = opened.checkpoints(damaged={})
        except RunNotFoundError:
            return
        facts = [each.as_facts() for each in line]
        stay = {verdict.id: verdict.reason for verdict in retain(facts, self._policy, {}) if verdict.keep}
        # post-mortems and what a rollback left behind are on no line; a policy is asked for them all the same
        others = [each for each in opened.checkpoints(abandoned=True, damaged={}) if each not in line]
        stay |= self._policy.keep([each.as_facts() for each in others])
        known, evicted = self._files.archived(run), self._files.evicted(run)
        for checkpoint in [*line, *others]:
            record = known.get(checkpoint.seq)
            if not self._going_on():
                return
            if checkpoint.id in stay or checkpoint.seq in evicted or record is None:
                continue
            if record.archive != self._archive or not self._listing.holds(run, record) or self._is_back(run, record):
                continue
            with (
                self._problems(f"checkpoint {checkpoint.id} of run {run!r}"),
                contextlib.suppress(CheckpointNotFoundError),
            ):
                self._files.evict(run, checkpoint.seq)
                self.moved.evicted.append(checkpoint.id)
                self._log(run, "evicted", checkpoint=checkpoint.id, step=checkpoint.step)

    def _is_back(self, run: str, record: ArchivedRecord) -> bool:
        """Returns whether a checkpoint came back from the archive a short while ago: somebody is at work with it."""
        noted = self._files.archived_file(run, record.seq)
        first = next((name for name in record.files if archived.is_first_state(name)), COMMIT_FILE)
        state = self._files.folder_of(run, record.seq) / first
        with contextlib.suppress(FileNotFoundError):
            came = state.stat().st_mtime
            return came > noted.stat().st_mtime and 0 <= time.time() - came < self._keep_fetched
        return False

    def _remove(self, run: str, record: TombstoneRecord, known: ArchivedRecord | None) -> None:
        """Removes a pruned checkpoint from the archive: its record becomes a tombstone, then the rest goes."""
        manifest = contents.manifest_object(run, record.seq)
        commit = contents.file_object(run, record.seq, "commit.json")
        if self._files.was_put_aside(run, record):
            # not pruned, but damaged here: its copy is all that is left of it, and else its number is taken
            if commit not in self._listing.sizes:
                self._uploads.commit(run, record.seq)
            return
        if manifest not in self._listing.sizes:
            if commit not in self._listing.sizes:
                self._uploads.commit(run, record.seq)
            if known is not None:
                self._files.forget_archived(run, record.seq)
            return
        there = contents.read_commit(self._objects, run, record.seq)
        if there is not None and there[0].id != record.id:
            self._uploads.commit(run, record.seq)  # raises the conflict
        _, data = self._files.record_bytes(run, record.seq)
        self._objects.put(commit, data)
        self._listing.sizes[commit] = len(data)
        # the manifest last: as long as it is there, a pass has something to do
        for name in (*self._listing.files(run, record.seq), manifest):
            self._objects.delete(name)
            self._listing.sizes.pop(name, None)
        self._files.forget_archived(run, record.seq)
        self.moved.removed.append(record.id)
        self._log(run, "removed from the archive", checkpoint=record.id, step=record.step)

    def _free_segments(self) -> None:
        """Removes the segments that no checkpoint in the archive uses; none if it is not known of one what it uses."""
        there = self._listing.segments()
        if not there:
            return
        # a manifest may be gone from there, and a record from here
        known = {(run, seq): each for run in self._files.runs() for seq, each in self._files.archived(run).items()}
        used = {identity for record in known.values() for identity in record.segments}
        for run, seq in {*self._listing.manifests(), *self._listing.checkpoints()} - known.keys():
            record = contents.read_manifest(self._objects, run, seq)
            if record is None:
                raise lost(self._objects.place, contents.manifest_object(run, seq), "is gone")
            used |= record.segments.keys()
        for identity in there - used:
            name = contents.segment_object(identity)
            self._objects.delete(name)
            self._listing.sizes.pop(name, None)

    def _log(self, run: str, event: str, **facts: object) -> None:
        with contextlib.suppress(StoreError):
            self._files.log_event(run, {"event": event, **facts})
