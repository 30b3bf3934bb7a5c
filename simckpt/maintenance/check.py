"""Verifies a whole store: every record, every byte, every reference. Nothing is written into the store.

It may run beside savers, pruners and `compact`: what is not as it should be is looked at again, and counts only if
nothing has changed meanwhile. What a check of a part, or one that stops after a while, leaves out is left to others.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from simckpt.errors import ConfigurationError, DamagedError, FormatError, NotAStoreError, StoreError
from simckpt.errors import UnsupportedFormatError as Unsupported
from simckpt.maintenance.findings import (
    DAMAGE,
    FOREIGN,
    LEFTOVER,
    QUARANTINED,
    UNCHECKED,
    Affected,
    Counts,
    Finding,
    Notes,
    Report,
)
from simckpt.maintenance.leftovers import examine_quarantine, examine_segment_files, examine_work
from simckpt.maintenance.lineage import examine_lineage
from simckpt.maintenance.progress import Progress
from simckpt.maintenance.recorded_sessions import examine_sessions
from simckpt.maintenance.recording import (
    Run,
    examine_folders,
    examine_runs,
    examine_store_record,
    is_living,
    listed,
    merge,
    settled,
    stamp_of,
)
from simckpt.maintenance.structure import Structures
from simckpt.maintenance.verifying import (
    Needs,
    SegmentTrouble,
    affected,
    collect_needs,
    examine_arrays,
    examine_references,
    examine_segment,
    folder_of,
    piece_key,
    rest_key,
)
from simckpt.storage import CommitRecord, Index, StoreFiles, archived, hdf5_reader, segments
from simckpt.storage.store_reader import COMMIT_FILE

KEEP_EVERY = 60.0  # [s] after which a check that is done in pieces keeps how far it has come
_ORDER = (DAMAGE, UNCHECKED, LEFTOVER, QUARANTINED, FOREIGN)
_AWAY = "shared rows and large arrays lie there: no checkpoint that has any comes back whole without them"
_PER_FILE = ("leaves", "rest")  # kinds that a second, closer look at a file tells once more

Tell = Callable[[int, int], None]


@dataclass(frozen=True)
class Scope:
    """What a check is to look at.

    Attributes:
        quick: leave out arrays and HDF5 metadata.
        part: (k, n): the k-th of n parts of the arrays, from 1 on; records are in each part.
        resume: go on where the last call with the same part stopped.
        seconds: stop after so long, between two files [s].
        structure: compare HDF5's own metadata with the indexes, in processes that may die of it.
    """

    quick: bool = False
    part: tuple[int, int] | None = None
    resume: bool = False
    seconds: float | None = None
    structure: bool = True

    def __post_init__(self) -> None:
        if self.part is not None and not 1 <= self.part[0] <= self.part[1]:
            raise ConfigurationError(f"part {self.part[0]} of {self.part[1]} does not exist", keys=["part"])
        if self.seconds is not None and not self.seconds > 0:
            raise ConfigurationError(f"a check takes some time, got {self.seconds} s", keys=["seconds"])

    def has(self, id: str) -> bool:
        """Returns whether what has this id is in the part."""
        return self.part is None or int(id, 16) % self.part[1] == self.part[0] - 1


def check(path: str | os.PathLike[str], scope: Scope | None = None, *, tell: Tell | None = None) -> Report:
    """Returns what is wrong with a store, and what lies about in it.

    Args:
        path: of the store; `store.json` itself may be damaged.
        scope: what to look at; everything if None.
        tell: called with bytes done and bytes to do.

    Raises:
        NotAStoreError: there is no store.
        UnsupportedFormatError: it needs a newer simckpt.
        StorageError: it cannot be opened.
    """
    with hdf5_reader.Reader() as files:
        return _Check(opened(path), scope or Scope(), tell, files).run()


def opened(path: str | os.PathLike[str]) -> StoreFiles:
    """Returns the files of a store, also of one whose `store.json` is damaged or missing."""
    try:
        return StoreFiles.open(path)
    except (NotAStoreError, DamagedError, FormatError) as error:
        root = Path(path).expanduser().resolve()
        if isinstance(error, Unsupported) or not (root / "runs").is_dir():
            raise
        return StoreFiles.without_record(root)


class _Check:
    def __init__(self, store: StoreFiles, scope: Scope, tell: Tell | None, files: hdf5_reader.Reader) -> None:
        self._store = store
        self._scope = scope
        self._tell = tell
        self._begun = time.monotonic()
        self._kept = self._begun
        self._notes = Notes()
        self._needs: dict[str, Needs] = {}
        self._used: set[str] = set()
        self._done, self._total, self._left = 0, 0, 0
        self._structures = Structures(store, files)
        self._progress: Progress | None = None
        if not scope.quick and (scope.resume or scope.seconds is not None):
            self._progress = Progress(store.id, scope.part)
            if scope.resume:
                self._progress.read()

    def run(self) -> Report:
        examine_store_record(self._store, self._notes)
        examine_folders(self._store, self._notes)
        there = listed(self._store, (segments.FOLDER,), self._notes) or []
        examine_work(self._store, self._notes)
        runs = self._records()
        indexed = list(self._references(runs))
        self._total = sum(size for _, _, size in indexed)
        self._total += sum(needs.size() for identity, needs in self._needs.items() if self._scope.has(identity))
        try:
            if not self._scope.quick:
                for run, record, _ in indexed:
                    self._arrays(run, record)
            self._segments(runs)
        finally:
            if self._progress is not None:
                if self._left:
                    self._progress.write()
                else:
                    self._progress.forget()
        examine_segment_files(self._store, there, self._used, self._notes)
        examine_quarantine(self._store, self._notes)
        if self._scope.part is None or self._scope.part[0] == 1:
            examine_sessions(self._store, self._notes, quick=self._scope.quick, advance=self._advance)
        return Report(
            store=str(self._store.path),
            findings=_sorted(self._notes.findings),
            counts=self._notes.counts,
            duration=time.monotonic() - self._begun,
            quick=self._scope.quick,
            part=self._scope.part,
            left=self._left,
        )

    def _records(self) -> list[Run]:
        notes = Notes()
        runs = examine_runs(self._store, notes)
        first, second = Notes(), Notes()
        examine_lineage(runs, first)
        if first.findings:
            # what a run refers to may have been committed after its records were read: it is there by now
            notes = Notes()
            runs = examine_runs(self._store, notes)
            examine_lineage(runs, second)
        known = {(finding.path, finding.problem) for finding in first.findings}
        merge(self._notes, notes)
        self._notes.findings += [each for each in second.findings if (each.path, each.problem) in known]
        return runs

    def _references(self, runs: Collection[Run]) -> Iterator[tuple[str, CommitRecord, int]]:
        """Yields (run, record, bytes) of the checkpoints whose arrays are to be read; all indexes are read first."""
        for run in runs:
            gone = self._evicted(run.name)
            for record in run.records:
                if not isinstance(record, CommitRecord):
                    continue
                found: list[Index | None] = []

                def examine(notes: Notes, run: Run = run, record: CommitRecord = record, found: Any = found) -> None:
                    found[:] = [examine_references(self._store, run.name, record, notes)]

                notes = self._settled(run.name, record, examine)
                if notes is None:
                    continue
                is_evicted = record.seq in gone
                if not is_evicted and any(each.kind in _PER_FILE for each in notes.findings):
                    is_evicted = record.seq in self._evicted(run.name)  # by now
                if is_evicted:
                    notes.findings = [each for each in notes.findings if each.kind not in _PER_FILE]
                merge(self._notes, notes)
                (index,) = found
                if index is None:
                    continue
                self._used |= index.segments.keys()
                if is_evicted:
                    self._notes.count(archived=1)
                    continue
                if self._scope.quick:
                    self._notes.count(checkpoints=1)
                collect_needs(index, self._needs)
                if self._scope.has(record.id):
                    yield run.name, record, sum(index.sizes.values())

    def _evicted(self, run: str) -> set[int]:
        try:
            return archived.evicted(self._store.path, run)
        except StoreError:
            return set()

    def _settled(self, run: str, record: CommitRecord, examine: Callable[[Notes], None]) -> Notes | None:
        """Returns what was found in a checkpoint, or None if it has been pruned or removed meanwhile."""
        parts = folder_of(run, record.seq).split("/")
        # what comes back from an archive has its record all along
        files = (COMMIT_FILE, *(file.name for file in record.files))
        notes = settled(examine, lambda: [stamp_of(self._store, *parts, name) for name in files])
        if notes.findings and not is_living(self._store, run, record):
            return None
        return notes

    def _arrays(self, run: str, record: CommitRecord) -> None:
        mark = f"{folder_of(run, record.seq)}"
        if self._is_done(record.id, mark):
            return

        def examine(notes: Notes) -> None:
            try:
                index = self._store.index(run, record.seq)
            except StoreError:
                return  # told already, or pruned
            examine_arrays(self._store, run, index, notes, self._advance)
            if not notes.findings and self._scope.structure:
                self._structures.examine(run, index, notes)

        notes = self._settled(run, record, examine)
        if notes is not None and notes.findings and record.seq in self._evicted(run):
            self._notes.count(archived=1)  # it has left the disk since its index was read
        elif notes is not None:
            merge(self._notes, notes)
            if not any(each.kind == "leaves" for each in notes.findings):
                self._notes.count(checkpoints=1)
            if not notes.findings:
                self._note_done(record.id, mark)

    def _segments(self, runs: Collection[Run]) -> None:
        troubles: dict[str, SegmentTrouble] = {}
        if self._needs and (away := self._segments_away()) is not None:
            self._tell_of_segments(runs, dict.fromkeys(self._needs, away), away=True)
            return
        for identity, needs in sorted(self._needs.items()):
            if not self._scope.has(identity) or self._is_done(identity, needs.mark()):
                continue
            quick = self._scope.quick
            trouble, read = self._segment(identity, needs, self._advance)
            if trouble is not None:
                # a pruner moves what it looks at away and back
                trouble, read = self._segment(identity, needs, _silent)
            if trouble is None or not (trouble.missing or trouble.unchecked):
                good = len(needs.pieces) - (0 if trouble is None else len(trouble.pieces))
                self._notes.count(segments=1, **({} if quick else {"leaves": good, "nbytes": read}))
            if trouble is None:
                self._note_done(identity, needs.mark())
            else:
                troubles[identity] = trouble
        if troubles:
            self._tell_of_segments(runs, troubles)

    def _segment(
        self, identity: str, needs: Needs, advance: Callable[[int], None]
    ) -> tuple[SegmentTrouble | None, int]:
        """Returns what is wrong with a segment, and how many of its bytes were read."""
        read = 0

        def note(nbytes: int) -> None:
            nonlocal read
            read += nbytes
            advance(nbytes)

        trouble = examine_segment(self._store, identity, needs, quick=self._scope.quick, advance=note)
        return trouble, min(read, needs.size())

    def _segments_away(self) -> SegmentTrouble | None:
        """Returns what is wrong with all segments at once: their folder is no folder, cannot be opened or has none."""
        files = {segments.file_name(identity) for identity in self._needs}
        for _ in range(2):  # a pruner moves what it looks at away and back
            notes = Notes()
            found = listed(self._store, (segments.FOLDER,), notes)
            if found is not None and files & set(found):
                return None
        if found is None:
            (told,) = notes.findings
            return SegmentTrouble(told.problem, True, unchecked=told.severity == UNCHECKED)
        if (self._store.path / segments.FOLDER).is_dir():
            return SegmentTrouble(f"none of the {len(files)} segments that checkpoints use is there", True)
        return SegmentTrouble("is missing", True)

    def _tell_of_segments(
        self, runs: Collection[Run], troubles: dict[str, SegmentTrouble], *, away: bool = False
    ) -> None:
        """Names exactly the checkpoints and leaves that use the damaged bytes; those pruned meanwhile use none."""
        lost: dict[str, list[Affected]] = {}
        whole: dict[str, list[Affected]] = {}
        for run in runs:
            gone = self._evicted(run.name)
            for record in run.records:
                if not isinstance(record, CommitRecord) or not record.segments or record.seq in gone:
                    continue
                try:
                    index = self._store.index(run.name, record.seq)
                except StoreError:
                    continue
                for identity in index.segments.keys() & troubles.keys():
                    trouble = troubles[identity]
                    everything = trouble.unchecked or trouble.missing
                    found = (
                        line.path
                        for line in index.lines_in_segments
                        if any(
                            piece.segment == identity and (everything or piece_key(line, place) in trouble.pieces)
                            for place, piece in enumerate(line.pieces)
                        )
                    )
                    leaves = list(dict.fromkeys(found))
                    if leaves:
                        lost.setdefault(identity, []).append(affected(run.name, record, leaves=leaves))
                    elif everything or rest_key(index.segments[identity]) in trouble.rests:
                        whole.setdefault(identity, []).append(affected(run.name, record, restorable=True))
        if away:
            self._tell_of_folder(next(iter(troubles.values())), [each for found in lost.values() for each in found])
            return
        for identity, trouble in sorted(troubles.items()):
            where = f"{segments.FOLDER}/{segments.file_name(identity)}"
            told = (*lost.get(identity, ()), *whole.get(identity, ()))
            if not told or self._segment(identity, self._needs[identity], _silent)[0] is None:
                continue  # its checkpoints have gone, or it has come back
            severity = UNCHECKED if trouble.unchecked else DAMAGE
            kind = "segment" if identity in lost or trouble.unchecked else "segment rest"
            self._notes.add(severity, kind, where, trouble.problem, affected=told)

    def _tell_of_folder(self, trouble: SegmentTrouble, lost: list[Affected]) -> None:
        """Names each checkpoint that needs the folder of the segments once, in the one finding that tells of it."""
        if not lost:
            return
        report = Report("", (Finding(DAMAGE, "folder", segments.FOLDER, "", affected=tuple(lost)),), Counts(), 0.0)
        self._notes.findings = [
            each for each in self._notes.findings if (each.kind, each.path) != ("folder", segments.FOLDER)
        ]
        severity = UNCHECKED if trouble.unchecked else DAMAGE
        more = {"meaning": _AWAY} if severity == DAMAGE else {}
        self._notes.add(severity, "folder", segments.FOLDER, trouble.problem, affected=report.lost, **more)

    def _is_done(self, identity: str, mark: str) -> bool:
        """Returns whether a file need not be read: an earlier call has done so, or the time is up."""
        if self._progress is not None and self._progress.done.get(identity) == mark:
            return True
        seconds = self._scope.seconds
        if self._scope.quick or seconds is None or time.monotonic() - self._begun < seconds:
            return False
        self._left += 1
        return True

    def _note_done(self, identity: str, mark: str) -> None:
        if self._progress is not None:
            self._progress.done[identity] = mark
            if time.monotonic() - self._kept > KEEP_EVERY:
                self._kept = time.monotonic()
                self._progress.write()

    def _advance(self, nbytes: int) -> None:
        self._done += nbytes
        if self._tell is not None:
            self._tell(min(self._done, self._total), self._total)


def _silent(nbytes: int) -> None:
    """Has nothing to tell: these bytes were counted before."""


def _sorted(findings: list[Finding]) -> tuple[Finding, ...]:
    """Returns the findings, damage first; of two on the bytes of one file the later, closer one."""
    kept: dict[object, Finding] = {}
    for each in findings:
        key = (each.kind, each.path) if each.kind in _PER_FILE else (each.kind, each.path, each.problem)
        kept[key] = each
    for key in [key for key in kept if isinstance(key, tuple) and key[0] == "rest" and ("leaves", key[1]) in kept]:
        del kept[key]  # one file, of which arrays are gone as well
    return tuple(sorted(kept.values(), key=lambda each: (_ORDER.index(each.severity), each.path, each.kind)))
