"""Writing a store: creating it, its runs, commits, pruning. FORMAT.md says why in this order.

Nothing here knows environments, modules or policies: it takes and gives encoded components and records.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from simckpt.errors import (
    CheckpointNotFoundError,
    ConflictError,
    DamagedError,
    InvalidNameError,
    NotAStoreError,
    StorageError,
    StoreError,
)
from simckpt.state.leaf import LogLeaf
from simckpt.state.tree import Encoded
from simckpt.storage import (
    archived,
    claims,
    copying,
    digests,
    durable,
    exports,
    names,
    processes,
    reader,
    sealed,
    segments,
    state_file,
    unchanged,
    usage,
    work,
)
from simckpt.storage import records as record_types
from simckpt.storage.copying import Source
from simckpt.storage.index import INDEX_FILE, LeafRecord
from simckpt.storage.preparing import (
    MAX_SEGMENTS,
    Attributes,
    Prepared,
    PrepareJob,
    discard,
    write_items,
    write_prepared,
)
from simckpt.storage.records import CommitDraft, CommitRecord, FileRecord, StoreRecord
from simckpt.storage.run_records import RunRecord
from simckpt.storage.store_compacting import StoreCompacting
from simckpt.storage.store_reader import COMMIT_FILE, EVENTS_FILE, RUN_FILE, STORE_FILE
from simckpt.storage.store_repairing import StoreRepairing

# as long as what the record will say of its files
_UNKNOWN_FILES = (
    FileRecord(state_file.STATE_FILE, 2**62, f"{digests.ALGORITHM}:{'0' * 32}", "metadata"),
    FileRecord(INDEX_FILE, 2**62, f"{digests.ALGORITHM}:{'0' * 32}", "file"),
)


Elsewhere = Callable[[PrepareJob, Mapping[str, Encoded], Attributes | None], Prepared]


@dataclass(frozen=True)
class Commit:
    """A checkpoint that was just committed.

    Attributes:
        record: of `commit.json`.
        leaves: {path: leaf}, its index.
    """

    record: CommitRecord
    leaves: Mapping[str, LeafRecord]


class StoreFiles(StoreCompacting, StoreRepairing):
    """A store on disk, for reading and writing.

    Attributes:
        path: the store's folder, symbolic links resolved.
        record: of `store.json`.
    """

    def __init__(
        self,
        path: Path,
        record: StoreRecord,
        *,
        disk: durable.Disk,
        clock: Callable[[], float],
        new_id: Callable[[], str],
    ) -> None:
        super().__init__(path, record, disk=disk, clock=clock)
        self._new_id = new_id
        self._large: dict[str, Mapping[str, unchanged.Large]] = {}
        self._damaged: set[str] = set()

    @classmethod
    def create(
        cls,
        path: str | os.PathLike[str],
        *,
        disk: durable.Disk | None = None,
        clock: Callable[[], float] = time.time,
        new_id: Callable[[], str] = names.random_id,
    ) -> StoreFiles:
        """Returns the store at `path`, which is created there if there is none.

        Args:
            path: missing, empty, or a store.
            disk: the system calls, for tests.
            clock: the time [s since 1970], for tests.
            new_id: gives random ids, for tests.

        Raises:
            NotAStoreError: a folder with other files in it, or no folder at all.
            UnsupportedFormatError, DamagedError: a store that this simckpt cannot read.
            StorageError: the disk refused.
        """
        disk = disk or durable.Disk()
        root = Path(path).expanduser().resolve()
        if not os.path.lexists(root / STORE_FILE):
            _create(disk, root, StoreRecord(new_id(), clock()))
        return cls.open(root, disk=disk, clock=clock, new_id=new_id)

    @classmethod
    def open(
        cls,
        path: str | os.PathLike[str],
        *,
        disk: durable.Disk | None = None,
        clock: Callable[[], float] = time.time,
        new_id: Callable[[], str] = names.random_id,
    ) -> StoreFiles:
        """Returns the store at `path`, writing nothing; see `create` for the arguments.

        Raises:
            NotAStoreError: there is none.
            UnsupportedFormatError: written by a newer simckpt, or with a feature that this one lacks.
            DamagedError: `store.json` differs from its digest.
        """
        root = Path(path).expanduser().resolve()
        file = root / STORE_FILE
        if root.is_file():
            raise NotAStoreError(f"{root} is not a store but a file")
        try:
            data = reader.read_small(root, STORE_FILE, limit=record_types.RECORD_LIMIT, path=file)
        except FileNotFoundError as error:
            raise NotAStoreError(f"{root} is not a store: it has no {STORE_FILE}") from error
        record = record_types.parse_store(data, file)
        return cls(root, record, disk=disk or durable.Disk(), clock=clock, new_id=new_id)

    @classmethod
    def without_record(cls, root: Path, *, disk: durable.Disk | None = None) -> StoreFiles:
        """Returns the store in a folder whose `store.json` cannot be read, for its check and its repair alone."""
        record = StoreRecord(archived.store_of(root) or "0" * 32, 0.0)
        return cls(root, record, disk=disk or durable.Disk(), clock=time.time, new_id=names.random_id)

    def write_run(self, run: str, record: RunRecord, *, orphan: bool = False) -> None:
        """Creates a run, or replaces the record of one that this process has claimed.

        The origin of a new branch is looked at once its record cannot be missed by a pruner; if it is gone, there is no
        such run, unless it is an `orphan`, which comes from elsewhere with checkpoints of its own.

        Raises:
            InvalidNameError: a name that cannot be a folder's.
            ConflictError: the run exists and this process does not hold its claim, or its id is another one; or the
                origin of a new branch is being pruned.
            CheckpointNotFoundError: the origin of a new branch has been pruned.
            ConfigurationError: hyperparameters or other fields that a record cannot hold.
            DamagedError: the folder of the runs is gone, and what they shared is there.
            StorageError: the disk refused; the record is as before.
        """
        names.check_run_name(run)
        if record.name != run:
            raise InvalidNameError(f"the record is of run {record.name!r}, the folder of run {run!r}")
        data = record.to_bytes()
        if not os.path.lexists(self.path / "runs") and (lost := usage.homeless(self.path)):
            raise DamagedError(
                f"{self.path / 'runs'} is missing, though {len(lost)} segments of its runs are there: put it back, or "
                f"free them by `simckpt compact --unknown` to begin anew",
                path=self.path / "runs",
            )
        folder = durable.make_folders(self._disk, self.path, "runs") / run
        with self._works.made() as made:
            durable.write_record(self._disk, made / RUN_FILE, data)
            if not os.path.lexists(folder):
                durable.make_folders(self._disk, made, "checkpoints")
                durable.sync_folder(self._disk, made)
                if record.branch is not None and not orphan:
                    self._origins.check_present(record)
                durable.publish_folder(self._disk, made, folder)
                return
            claim = claims.held_claim(self._run_folder(run))
            if claim is None:
                message = f"run {run!r} exists already: choose another name, or claim it to change its record"
                raise ConflictError(message)
            claim.verify()
            if self.read_run(run).id != record.id:
                raise ConflictError(f"run {run!r} has another id: a run keeps its identity")
            durable.replace_file(self._disk, made / RUN_FILE, folder / RUN_FILE)

    def commit(
        self,
        run: str,
        draft: CommitDraft,
        components: Mapping[str, Encoded],
        *,
        attributes: Mapping[str, Mapping[str, str]] | None = None,
    ) -> Commit:
        """Returns a new checkpoint, which survives a power failure from now on: `prepare`, then `publish`.

        The run's claim is taken for the duration, if this process does not hold it yet.

        Args:
            run: the run's name.
            draft: parent, step, metrics and so on.
            components: {name: encoded state}; nobody may change its arrays meanwhile.
            attributes: {path of a group or leaf: {name: text}}, for people who open `state.h5`.

        Raises:
            RunNotFoundError: no run of that name was written.
            ConflictError: another writer committed first, or took over the claim; this save is not in the store.
            RunLockedError: another process is writing the run.
            StorageFullError, StorageError: the disk refused; this save is not in the store and left nothing behind.
            ConfigurationError: metrics beyond the 4 KB of a commit record, or other fields that it cannot hold.
            FormatError: leaves that no file can hold.
            SegmentMissingError: a leaf refers to a segment that is gone.
            DamagedError: a segment that was to be merged is damaged.
        """
        with self._claimed(run) as claim:
            claim.verify()
            # what cannot fit is refused before the state is written
            replace(_record_of_draft(draft), files=_UNKNOWN_FILES, size=2**62, segments=MAX_SEGMENTS).to_bytes()
            return self.publish(run, draft, self.prepare(run, components, attributes=attributes))

    def prepare_job(self, run: str) -> PrepareJob:
        """Returns what `write_prepared` must know to do the heavy part of a save, in whatever process.

        Raises:
            RunNotFoundError: no run of that name was written.
        """
        self.read_run(run)
        if run not in self._large:
            self._large[run] = unchanged.large_leaves(self._newest_leaves(run))
        return PrepareJob(
            self.path,
            run,
            processes.this_process(),
            self._new_id,
            segments=dict(self._segments),
            large=self._large[run],
        )

    def compare_next_with(self, run: str, seq: int) -> None:
        """Has the next save look for unchanged leaves in this checkpoint, where the newest one is damaged.

        Raises:
            CheckpointNotFoundError, DamagedError, FormatError: as `index`.
        """
        self._large[run] = unchanged.large_leaves(self.index(run, seq))

    def _newest_leaves(self, run: str) -> Iterable[LeafRecord]:
        for seq in reversed(self.sequence(run)):
            try:
                return self.index(run, seq)
            except CheckpointNotFoundError:
                continue  # pruned
            except StoreError:
                return ()  # with what is damaged nothing is compared
        branch = self.read_run(run).branch
        if branch is not None:
            with contextlib.suppress(StoreError):
                return self.index(branch.run, branch.seq)
        return ()

    def missing_segments(self, ids: Iterable[str]) -> set[str]:
        """Returns those of some segments that a save cannot refer to: gone, cut short or found damaged.

        Costs one `stat` each. A log must write their rows anew.

        Raises:
            StorageError: the folder cannot be looked at for the moment.
        """
        ids = set(ids)
        self._learn(ids)
        unusable = (ids & self._damaged) | (ids - self._segments.keys())
        return unusable | segments.missing(self.path, ids, self._segments)

    def _learn(self, ids: set[str]) -> None:
        """Looks for what is not known of some segments: a branch refers to those of another run."""
        if unknown := ids - self._segments.keys():
            self._note_segments(self._usage.find(unknown))

    def _note_damage(self, error: DamagedError) -> None:
        """Keeps in mind which segment was found to be damaged."""
        path = Path(error.path)
        if path.parent == self.path / segments.FOLDER:
            self._damaged.add(path.stem)

    def prepare(
        self,
        run: str,
        components: Mapping[str, Encoded],
        *,
        attributes: Attributes | None = None,
        elsewhere: Elsewhere | None = None,
    ) -> Prepared:
        """Returns a checkpoint that is durable, all but its commit; see `write_prepared`. It needs no claim.

        Give it to `publish` or `discard`; after a crash the next claim in the store sweeps it.

        Args:
            run: the run's name.
            components: {name: encoded state}; nobody may change its arrays meanwhile.
            attributes: {path of a group or leaf: {name: text}}, for people who open `state.h5`.
            elsewhere: does what `write_prepared` does, in another process, which may die at it. When it raises, nobody
                may be at work in `job.folder` any longer.
        """
        self._learn({piece.segment for leaf in _logs(components) for piece in leaf.pieces})
        try:
            if elsewhere is None:
                return write_prepared(self._disk, self.prepare_job(run), components, attributes)
            return self._prepare_elsewhere(elsewhere, self.prepare_job(run), components, attributes)
        except DamagedError as error:
            # else the next save would meet the same damaged segment
            self._note_damage(error)
            raise

    def _prepare_elsewhere(
        self, elsewhere: Elsewhere, job: PrepareJob, components: Mapping[str, Encoded], attributes: Attributes | None
    ) -> Prepared:
        folder = self._works.make()
        try:
            return elsewhere(replace(job, folder=folder), components, attributes)
        except BaseException:
            # this process may live for weeks, and its folders are swept after its death
            with contextlib.suppress(StorageError):
                self._works.take_away(folder, self._finish)
            raise

    def publish(self, run: str, draft: CommitDraft, prepared: Prepared) -> Commit:
        """Returns the checkpoint that was prepared, which is in the store from now on; on an error it is discarded.

        Args:
            run: the run's name.
            draft: parent, step, metrics and so on.
            prepared: from `prepare`, or from `write_prepared` in another process.

        Raises:
            as `commit`.
        """
        try:
            run_id = self.read_run(run).id
            with self._claimed(run) as claim:
                claim.verify()
                record = replace(
                    _record_of_draft(draft),
                    id=self._new_id(),
                    run=run_id,
                    seq=self._next_seq(claim, run),
                    created=self._clock(),
                    files=prepared.files,
                    segments=len(prepared.segments),
                    size=prepared.size,
                )
                self._publish(claim, record, prepared)
                claim.beat(now=True)
        except BaseException:
            self.discard(prepared)
            raise
        self._large[run] = prepared.large
        self._note_segments(prepared.segments)
        self._usage.note(run, record.seq, prepared.segments)
        return Commit(record, prepared.leaves)

    def _next_seq(self, claim: claims.Claim, run: str) -> int:
        # listed once for each claim: a commit by somebody else must be a conflict, not a gap that is filled
        if claim.next_seq is None:
            durable.make_folders(self._disk, self.path / "runs" / run, "checkpoints")
            claim.next_seq = 1 + max(self.sequence(run), default=0)
        return claim.next_seq

    def _publish(self, claim: claims.Claim, record: CommitRecord, prepared: Prepared) -> None:
        # unless it is known whether the commit is in place, which after Ctrl-C just behind the rename it is not, the
        # folder is listed again and the next commit goes after it
        claim.next_seq = None
        try:
            durable.write_record(self._disk, prepared.folder / COMMIT_FILE, record.to_bytes())
            durable.sync_folder(self._disk, prepared.folder)
            claim.verify()  # again: what came before takes a while
            durable.publish_folder(self._disk, prepared.folder, self._checkpoint_path(claim.run, record.seq))
        except ConflictError:
            claim.next_seq = record.seq
            raise
        claim.next_seq = record.seq + 1

    def discard(self, prepared: Prepared) -> None:
        """Removes what was prepared and not published; raises nothing, for what cannot be removed is swept later."""
        discard(self._disk, self.path, prepared.folder, prepared.made)

    def prepare_copy(self, run: str, source: Source) -> Prepared:
        """Returns a copy of a checkpoint that is durable, all but its commit; see `prepare`.

        Args:
            run: name of the run that it is for, which need not be there yet.
            source: the checkpoint, whose bytes go through memory in portions.

        Raises:
            DamagedError, SegmentMissingError, FormatError: the source cannot be trusted; all damaged leaves are named.
            StorageFullError, StorageError: the disk refused.
        """
        job = PrepareJob(self.path, run, processes.this_process(), self._new_id)
        prepared = source.attempt(lambda: write_items(self._disk, job, source.components, source.items()))
        return replace(prepared, large=unchanged.large_leaves(prepared.leaves.values()))

    def export(self, run: str, seq: int, path: Path, *, metrics: Mapping[str, float], to: str = "h5") -> None:
        """Writes a checkpoint into one file outside of the store, durably; see `exports.write_export`.

        Args:
            run: the run's name.
            seq: commit number.
            path: of the file; nothing is replaced.
            metrics: in place of those that the commit has, to take later ones along.
            to: one of `exports.FORMS`.

        Raises:
            CheckpointNotFoundError, DamagedError, FormatError: as `read`; nothing was written.
            UnsupportedFormatError: torch is needed and missing.
            ConflictError: the path exists.
            ConfigurationError: metrics beyond the 4 KB of a commit record.
            StorageFullError, StorageError: the disk refused; there is no file then.
        """
        source = copying.source_of(self, run, seq, metrics=metrics)
        source.attempt(lambda: exports.write_export(self._disk, path, source, to=to))

    def log_event(self, run: str, event: Mapping[str, Any]) -> None:
        """Appends a line to the run's log for people; nothing is ever decided from it.

        Raises:
            StorageError: the disk refused.
        """
        content = {"time": sealed.time_to_json(self._clock())["utc"], **event}
        line = json.dumps(content, default=str, ensure_ascii=True).encode("ascii")
        durable.append_line(self._disk, self._run_folder(run) / EVENTS_FILE, line)


def _logs(components: Mapping[str, Encoded]) -> Iterator[LogLeaf]:
    for encoded in components.values():
        yield from (leaf for leaf in encoded.leaves.values() if isinstance(leaf, LogLeaf))


def _record_of_draft(draft: CommitDraft) -> CommitRecord:
    return CommitRecord(
        id="0" * 32,
        run="0" * 32,
        seq=1,
        parent=draft.parent,
        kind=draft.kind,
        step=draft.step,
        created=0.0,
        metrics=dict(draft.metrics),
        versions=dict(draft.versions),
        host=draft.host,
        rollback=draft.rollback,
        start=draft.start,
        duration=draft.duration,
    )


def _create(disk: durable.Disk, root: Path, record: StoreRecord) -> None:
    """Creates the folder and, first of all in it, `store.json`; if two processes do so at once, one record stays."""
    try:
        foreign = sorted({path.name for path in root.iterdir()} - {"tmp"})
    except FileNotFoundError:
        foreign = []
    except OSError as error:
        raise NotAStoreError(f"{root} cannot become a store: {error.strerror}") from error
    if STORE_FILE in foreign:
        return
    if foreign:
        shown = ", ".join(foreign[:3])
        raise NotAStoreError(f"{root} is no store and not empty ({shown}): give the path of a new folder")
    durable.made_folder(disk, root)
    with work.WorkFolders(disk, root).made() as made:
        durable.write_record(disk, made / STORE_FILE, record.to_bytes())
        durable.publish_file(disk, made / STORE_FILE, root / STORE_FILE)
