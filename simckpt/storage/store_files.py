"""Writing a store: creating it, its runs, commits, pruning. FORMAT.md says why in this order.

Nothing here knows environments, modules or policies: it takes and gives encoded components and records.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from simckpt.errors import (
    ConflictError,
    DamagedError,
    InvalidNameError,
    NotAStoreError,
)
from simckpt.state.tree import Encoded
from simckpt.storage import (
    archived,
    claims,
    copying,
    digests,
    durable,
    exports,
    gathering,
    names,
    reader,
    sealed,
    state_file,
    usage,
    work,
)
from simckpt.storage import records as record_types
from simckpt.storage.index import INDEX_FILE, LeafRecord
from simckpt.storage.preparing import (
    MAX_SEGMENTS,
    Prepared,
)
from simckpt.storage.records import CommitDraft, CommitRecord, FileRecord, StoreRecord
from simckpt.storage.run_records import RunRecord
from simckpt.storage.store_preparing import StorePreparing
from simckpt.storage.store_reader import COMMIT_FILE, EVENTS_FILE, RUN_FILE, STORE_FILE

# as long as what the record will say of its files
_UNKNOWN_FILES = (
    FileRecord(state_file.STATE_FILE, 2**62, f"{digests.ALGORITHM}:{'0' * 32}", "metadata"),
    FileRecord(INDEX_FILE, 2**62, f"{digests.ALGORITHM}:{'0' * 32}", "file"),
)


@dataclass(frozen=True)
class Commit:
    """A checkpoint that was just committed.

    Attributes:
        record: of `commit.json`.
        leaves: {path: leaf}, its index.
    """

    record: CommitRecord
    leaves: Mapping[str, LeafRecord]


class StoreFiles(StorePreparing):
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
        super().__init__(path, record, disk=disk, clock=clock, new_id=new_id)
        self._forms: dict[str, gathering.Forms] = {}

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
            hint = ""
            if (root / "runs").is_dir():
                hint = ", though it has runs: `simckpt check STORE --repair` writes it anew, if it was lost"
            raise NotAStoreError(f"{root} is not a store: it has no {STORE_FILE}{hint}") from error
        try:
            record = record_types.parse_store(data, file)
        except DamagedError as error:
            advice = "`simckpt check STORE --repair` writes it anew; no checkpoint is touched by that"
            raise DamagedError(f"{error}: {advice}", path=file) from error
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

    def publish(self, run: str, draft: CommitDraft, prepared: Prepared) -> Commit:
        """Returns the checkpoint that was prepared, which is in the store from now on; on an error it is discarded.

        Args:
            run: the run's name.
            draft: parent, step, metrics and so on.
            prepared: from `prepare`, or from `write_prepared` in another process.

        Raises:
            as `commit`.
        """
        record = self._published(run, _record_of_draft(draft), prepared)
        self._large[run, None] = prepared.large
        self._note_segments(prepared.segments)
        return Commit(record, prepared.leaves)

    def publish_shards(self, run: str, draft: CommitDraft, prepared: Sequence[Prepared]) -> Commit:
        """Returns the checkpoint that several ranks have prepared, which is in the store from now on.

        Whether it is or not, each rank has to end what it prepared, by `conclude` or `discard`, once it has been told.
        The commit's leaves are those that this process knows: `Prepared.from_json` knows none.

        Args:
            run: the run's name.
            draft: parent, step, metrics and so on.
            prepared: of all ranks, in any order.

        Raises:
            ConfigurationError: a rank is missing, or reported twice; or as `commit`.
            StorageError: the disk refused, or what a rank has prepared is gone, naming it.
            ...: as `commit`; nothing is in the store then.
        """
        gathered = gathering.gather(self._disk, self.path, run, prepared, known=self._forms.get(run))
        record = replace(_record_of_draft(draft), shards=gathered.shards, shards_size=gathered.shards_size)
        record = self._published(run, record, gathered.prepared)
        self._forms[run] = gathered.forms
        return Commit(record, {path: leaf for each in prepared for path, leaf in each.leaves.items()})

    def _published(self, run: str, record: CommitRecord, prepared: Prepared) -> CommitRecord:
        try:
            run_id = self.read_run(run).id
            with self._claimed(run) as claim:
                claim.verify()
                record = replace(
                    record,
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
        self._usage.note(run, record.seq, prepared.segments)
        return record

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
