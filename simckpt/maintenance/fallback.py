"""What a start goes on from when the newest checkpoint is damaged, and what a restore says of others that are not.

The line of the head is followed back, over pruned and damaged commits; where a record that cannot be read breaks it,
from the commit that was the head before that one: the run then goes on like one that was killed just before it.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

from simckpt.ancestry import ancestry
from simckpt.checkpoint import Checkpoint
from simckpt.errors import (
    ArchiveNotNamedError,
    ArchiveUnavailableError,
    CheckpointNotFoundError,
    ConfigurationError,
    DamagedError,
    DamageWarning,
    FormatError,
    StorageError,
    StoreError,
    UnsupportedFormatError,
)
from simckpt.maintenance.findings import Notes
from simckpt.maintenance.verifying import (
    Needs,
    collect_needs,
    examine_arrays,
    examine_references,
    examine_segment,
    piece_key,
)
from simckpt.storage import CommitRecord, StoreFiles, TombstoneRecord
from simckpt.storage.records import LOST

if TYPE_CHECKING:
    from simckpt.run import Run

FALL_BACK, ANYWAY, RAISE = "fall back", "fall back anyway", "raise"
AWAY = (ArchiveUnavailableError, ArchiveNotNamedError)  # of what is whole in an archive, to which there is no way now
Record = CommitRecord | TombstoneRecord


@dataclass(frozen=True)
class PassedOver:
    """A commit that a start could not go on from.

    Attributes:
        seq: its number.
        record: its record, or None if that cannot be read.
        error: what was wrong.
    """

    seq: int
    record: CommitRecord | None
    error: StoreError

    def as_json(self) -> dict[str, Any]:
        """Returns what the run's log says of it."""
        known = {} if self.record is None else {"checkpoint": self.record.id, "step": self.record.step}
        leaves = list(self.error.leaves) if isinstance(self.error, DamagedError) else []
        return {"number": self.seq, **known, "leaves": leaves, "error": str(self.error)}

    def __str__(self) -> str:
        name = f"number {self.seq}" if self.record is None else f"{self.record.id} at step {self.record.step:,}"
        return f"checkpoint {name}: {self.error}"


class Search:
    """Looks for the checkpoint that a run goes on from; the caller tries one after the other.

    Args:
        run: that is started, to write.
        damaged: "fall back": the newest one that is whole, with a `DamageWarning`, but none older than one that an
            archive out of reach has; "fall back anyway": that, too; "raise": the newest, or its error.

    Attributes:
        passed: what was damaged, newest first.
    """

    def __init__(self, run: Run, files: StoreFiles, *, damaged: str) -> None:
        if damaged not in (FALL_BACK, ANYWAY, RAISE):
            message = f"damaged is 'fall back', 'fall back anyway' or 'raise', got {damaged!r}"
            raise ConfigurationError(message, keys=["damaged"])
        self.passed: list[PassedOver] = []
        self._run = run
        self._files = files
        self._raises, self._anyway = damaged == RAISE, damaged == ANYWAY
        self._in_force: Mapping[str, Any] | None = None  # before this changed them
        unreadable: dict[int, StoreError] = {}
        self._records = files.records(run.name, damaged=unreadable)
        self._left = line_to_resume(self._records, unreadable)
        self._origin = run.record.origin is not None

    def next(self) -> Checkpoint | None:
        """Returns the next one to try, or None if there is nothing to restore.

        Raises:
            DamagedError, FormatError: nothing of what there is comes back; the first error.
            CheckpointNotFoundError: the origin of a branch is gone, or all checkpoints are.
        """
        while self._left:
            found = self._left.pop(0)
            if isinstance(found, PassedOver):
                self._pass_over(found)
                continue
            try:
                return self._trying(Checkpoint(self._files, self._run.name, found))
            except (DamagedError, FormatError, *AWAY) as damage:
                self._pass_over(PassedOver(found.seq, found, damage))
        if self._origin:
            self._origin = False
            origin = self._origin_of_run()
            if origin is not None:
                return self._trying(origin)
        if self.passed:
            error = self.passed[0].error
            error.add_note(f"no other checkpoint of run {self._run.name!r} comes back whole")
            self._give_up(error)
        if any(record.kind != "exception" for record in self._records):
            raise CheckpointNotFoundError(
                f"every checkpoint of run {self._run.name!r} was pruned or put into quarantine: put one back, or start "
                "a run of another name"
            )
        return None

    def _origin_of_run(self) -> Checkpoint | None:
        try:
            return self._run.origin()
        except StoreError:
            if not self.passed:
                raise
            return None

    def _trying(self, checkpoint: Checkpoint) -> Checkpoint:
        """Has the hyperparameters return to what they were there, where a rollback that is passed over changed them."""
        is_own = checkpoint.run == self._run.name
        kept = {record.id for record in ancestry(self._records, to=checkpoint.id)} if is_own else set()
        changed: set[str] = set()
        # pruned ones between them count as well
        for record in (*ancestry(self._records), *(each.record for each in self.passed)) if self.passed else ():
            if record is not None and record.id not in kept:
                changed |= ((record.rollback or {}).get("changes") or {}).get("hyperparameters", {}).keys()
        if changed:
            there = checkpoint.hyperparameters if is_own else self._run.hyperparameters
            self._in_force = self._in_force or dict(self._run.hyperparameters_in_force)
            self._run.change_hyperparameters({key: there[key] for key in sorted(changed) if key in there})
        return checkpoint

    def pass_over(self, checkpoint: Checkpoint, error: StoreError) -> None:
        """Takes note that a checkpoint is damaged; raises its error unless the next one is to be tried."""
        if checkpoint.run != self._run.name:
            if not self.passed:
                name_intact(error, checkpoint)
                error.add_note(
                    f"run {self._run.name!r} begins at this checkpoint, at step {checkpoint.step:,} of run "
                    f"{checkpoint.run!r}: branch from one that is whole"
                )
            self._give_up(self.passed[0].error if self.passed else error)
        records = (record for record in self._records if record.id == checkpoint.id)
        record = next((record for record in records if isinstance(record, CommitRecord)), None)
        self._pass_over(PassedOver(checkpoint.seq, record, error), checkpoint)

    def _pass_over(self, passed: PassedOver, checkpoint: Checkpoint | None = None) -> None:
        # what a newer simckpt wrote, or the disk refuses for the moment, is no damage
        if isinstance(passed.error, UnsupportedFormatError | StorageError):
            self._give_up(passed.error)
        if isinstance(passed.error, AWAY) and not self._anyway:
            passed.error.add_note(f"restore_latest(damaged={ANYWAY!r}) goes on from an older one, without it")
            self._give_up(passed.error)
        if self._raises:
            if checkpoint is not None:
                name_intact(passed.error, checkpoint)
            self._give_up(passed.error)
        self.passed.append(passed)

    def _give_up(self, error: StoreError) -> NoReturn:
        if self._in_force is not None:
            self._run.change_hyperparameters(self._in_force)
        raise error

    def tell(self, checkpoint: Checkpoint) -> None:
        """Says what was passed over, if anything was: by a warning and in the run's log."""
        if not self.passed:
            return
        told = "; ".join(map(str, self.passed))
        self._run.log(
            "fell back",
            checkpoint=checkpoint.id,
            step=checkpoint.step,
            damaged=[each.as_json() for each in self.passed],
        )
        where = "" if checkpoint.run == self._run.name else f", the origin of the run in run {checkpoint.run!r}"
        warnings.warn(
            f"run {self._run.name!r} goes on from checkpoint {checkpoint.id} at step {checkpoint.step:,}{where}, for "
            f"newer ones are damaged: {told}. What came after it is trained again; `simckpt check` shows all damage",
            DamageWarning,
            stacklevel=4,
        )


def line_to_resume(records: Sequence[Record], damaged: Mapping[int, StoreError]) -> list[CommitRecord | PassedOver]:
    """Returns what a start may go on from, best first, and among them the records that cannot be read.

    Args:
        records: of a run, in the order of commits.
        damaged: {commit number: error} of those that cannot be read.
    """
    lost = damaged.keys() | {record.seq for record in records if record.kind == LOST}
    found: list[CommitRecord | PassedOver] = []
    limit = max((*lost, *(record.seq for record in records)), default=0) + 1
    while True:
        before = [record for record in records if record.seq < limit and record.kind != LOST]
        line = ancestry(before)
        newest, oldest = (line[-1].seq, line[0]) if line else (0, None)
        for seq in sorted((each for each in lost if newest < each < limit), reverse=True):
            if seq in damaged:
                found.append(PassedOver(seq, None, damaged[seq]))
        found += [record for record in reversed(line) if isinstance(record, CommitRecord)]
        if oldest is None or oldest.parent is None:
            return found
        # its parent is lost, or is the run's origin
        below = [seq for seq in lost if seq < oldest.seq]
        if not below or any(record.id == oldest.parent for record in records if record.kind != LOST):
            return found
        limit = max(below)
        if limit in damaged:
            found.append(PassedOver(limit, None, damaged[limit]))


def is_intact(files: StoreFiles, run: str, record: CommitRecord) -> bool:
    """Returns whether every array of a checkpoint comes back; reads them all, in little memory."""
    notes, needs = Notes(), dict[str, Needs]()
    index = examine_references(files, run, record, notes)
    if index is None:
        return False
    examine_arrays(files, run, index, notes, _silent)
    if any(not each.restorable for finding in notes.findings for each in finding.affected):
        return False
    collect_needs(index, needs)
    for identity, need in needs.items():
        trouble = examine_segment(files, identity, need, quick=False, advance=_silent)
        used = {
            piece_key(leaf, place)
            for leaf in index.lines_in_segments
            for place, piece in enumerate(leaf.pieces)
            if piece.segment == identity
        }
        if trouble is not None and (trouble.unchecked or trouble.pieces & used):
            return False
    return True


def _silent(nbytes: int) -> None:
    pass


def newest_intact(checkpoint: Checkpoint) -> CommitRecord | None:
    """Returns the newest other checkpoint, of those that the head of its run descends from, of which all comes back."""
    files, run = checkpoint.files, checkpoint.run
    damaged: dict[int, StoreError] = {}
    records = files.records(run, damaged=damaged)
    for record in line_to_resume(records, damaged):
        if isinstance(record, CommitRecord) and record.id != checkpoint.id and is_intact(files, run, record):
            return record
    return None


def name_intact(error: StoreError, checkpoint: Checkpoint) -> None:
    """Has the error of a restore name the newest checkpoint of the run that comes back whole."""
    if not isinstance(error, DamagedError) or error.intact is not None:
        return
    try:
        found = newest_intact(checkpoint)
    except (StoreError, OSError):
        return
    if found is None:
        told = f"no other checkpoint of run {checkpoint.run!r} that its head descends from comes back whole"
    else:
        told = f"the newest of run {checkpoint.run!r} that comes back whole is {found.id} at step {found.step:,}"
    error.intact = None if found is None else found.id
    error.args = (f"checkpoint {checkpoint.id}: {error.args[0]}; {told}", *error.args[1:])
