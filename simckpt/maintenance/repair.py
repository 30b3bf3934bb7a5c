"""Repairs a store as far as that is certain: damaged parts go into quarantine, what can be proven is written again.

Nothing is removed, and nothing guessed. A repair can be interrupted at any point and done again.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any

from simckpt.archive import Archive
from simckpt.archive.mending import belongs
from simckpt.errors import (
    ArchiveDamagedError,
    CheckpointNotFoundError,
    DamagedError,
    FormatError,
    SimckptError,
    StorageError,
    StoreError,
)
from simckpt.fallbacks import has_archive
from simckpt.maintenance.bringing_back import (
    BACK,
    IN_SESSIONS,
    OF_FILES,
    Action,
    fetched_checkpoints,
    fetched_sessions,
    folder_of,
    gap,
)
from simckpt.maintenance.check import Scope, Tell, check, opened
from simckpt.maintenance.findings import OUT_OF_PLACE, Affected, Finding, Report
from simckpt.maintenance.rebuilding import rebuilt_index, rebuilt_run
from simckpt.storage import (
    CommitRecord,
    RunRecord,
    StoreFiles,
    archived,
    claims,
    index,
    marks,
    quarantine,
    usage,
)
from simckpt.storage.records import SHARDS_FILE
from simckpt.storage.run_records import parse_run
from simckpt.storage.session_ending import close_session
from simckpt.storage.store_reader import RUN_FILE

_LEFT = ("rest", "segment rest", "structure", "claim", "archive", "session")  # kinds of damage


@dataclass(frozen=True)
class Repair:
    """What a repair found and did.

    Attributes:
        before: the check that it began with.
        actions: in the order in which they were done.
        dry_run: whether nothing was done.
    """

    before: Report
    actions: tuple[Action, ...]
    dry_run: bool

    def __bool__(self) -> bool:
        return not any(action.problem for action in self.actions)

    @property
    def remaining(self) -> tuple[Finding, ...]:
        """The damage that a repair leaves as it is: nothing comes back wrong by it, or nothing can be done."""
        return tuple(finding for finding in self.before.damage if self._stays(finding))

    def _stays(self, finding: Finding) -> bool:
        if any((each.path, each.text) == (finding.path, BACK) and not each.problem for each in self.actions):
            return False
        if finding.kind == "start":
            return bool(finding.affected)  # until a start of the same content writes it again
        if finding.kind == "session":
            back = [each.path for each in self.actions if each.text == BACK and not each.problem]
            return not (self.dry_run and any(finding.path.startswith(f"{path}/") for path in back))
        moved = [each.path for each in self.actions if not (each.problem or each.path.startswith(IN_SESSIONS))]
        if any(finding.path == path or finding.path.startswith(f"{path}/") for path in moved):
            return False
        return finding.kind in _LEFT or (finding.kind == "lineage" and gap(finding) is None)

    def as_json(self) -> dict[str, Any]:
        """Returns all of it for programs."""
        return {
            "dry_run": self.dry_run,
            "actions": [dataclasses.asdict(action) for action in self.actions],
            "before": self.before.as_json(),
        }


def repair(
    path: str | os.PathLike[str], *, scope: Scope | None = None, dry_run: bool = False, tell: Tell | None = None
) -> Repair:
    """Returns what was done about the damage that a check of the whole store finds.

    Checkpoints that do not come back whole leave a tombstone and go to `quarantine/`, so that their numbers stay taken
    and prunes and `compact` work again.

    Args:
        path: of the store.
        scope: what the check looks at; everything if None.
        dry_run: only say what would be done.
        tell: called with bytes done and bytes to do.

    Raises:
        NotAStoreError, UnsupportedFormatError, StorageError: as `check`.
    """
    before = check(path, scope, tell=tell)
    store = opened(path)
    asked = fetched_checkpoints(store, before, dry_run=dry_run)
    recorded = fetched_sessions(store, before, dry_run=dry_run)
    held = {place: action for place, action in asked.items() if action.problem}
    fetched = {place: action for place, action in asked.items() if not action.problem}
    left = before
    if dry_run:
        left = _without(before, fetched)
    elif fetched or any(action.done for action in recorded):
        # what came back and is damaged all the same is treated like any other
        left = before = check(path, scope, tell=tell)
    actions = (*fetched.values(), *recorded, *_Repairer(store, left, held, fetched, dry_run).actions())
    return Repair(before, actions, dry_run)


def _without(report: Report, fetched: Collection[tuple[str, int]]) -> Report:
    """Returns what would be left of a report once these checkpoints are whole, with the segments that they use."""

    def stays(finding: Finding) -> bool:
        if finding.kind == "lineage":
            return (finding.run, gap(finding)) not in fetched
        return finding.kind not in OF_FILES or not any((each.run, each.seq) in fetched for each in finding.affected)

    return dataclasses.replace(report, findings=tuple(filter(stays, report.findings)))


class _Repairer:
    def __init__(
        self,
        store: StoreFiles,
        report: Report,
        held: dict[tuple[str, int], Action],
        fetched: Collection[tuple[str, int]],
        dry_run: bool,
    ) -> None:
        self._store = store
        self._report = report
        self._held = held  # by the archive: left alone
        self._fetched = fetched
        self._dry_run = dry_run
        self._rebuilt: dict[
            tuple[str, int], Collection[str]
        ] = {}  # {checkpoint whose index is made anew: its segments}
        self._gone: set[tuple[str, int]] = set()  # those that are, or would be, in quarantine
        self._remade: set[str] = set()  # runs whose record is, or would be, good again
        self._archive: Archive | None = None
        self._silent = ""  # why the archive cannot be asked

    def actions(self) -> Iterator[Action]:
        for finding in self._report.findings:
            if finding.kind in OUT_OF_PLACE:
                yield Action(finding.path, "is left alone", problem=f"{finding.problem}: {finding.advice}")
        for finding in self._of("store record"):
            yield from self._rewrite_store(finding)
        if not self._dry_run:
            self._store = opened(self._store.path)
        for finding in self._of("run record"):
            yield self._rewrite_run(finding)
        for finding in self._of("index"):
            yield from self._rewrite_index(finding)
        yield from self._quarantine_checkpoints()
        for finding in self._of("segment"):
            yield from self._put_segment_aside(finding)
        for finding in (*self._of("start"), *self._of("job")):
            if finding.kind == "start" and (action := self._small_back(finding)) is not None:
                yield action
                continue
            is_gone = any(finding.path.startswith(f"{folder_of(run, seq)}/") for run, seq in self._gone)
            if not is_gone and os.path.lexists(self._store.path / finding.path):
                yield self._put_aside(finding.path)
        for finding in self._of("mark"):
            yield self._repair_mark(finding)
        for finding in self._report.findings:
            if finding.kind == "unfinished session":
                close = functools.partial(close_session, self._store.path, finding.path.rpartition("/")[2])
                yield self._do(finding.path, "is closed: what its processes have written stays", close)

    def _of(self, kind: str) -> tuple[Finding, ...]:
        return tuple(finding for finding in self._report.damage if finding.kind == kind)

    def _do(self, path: str, text: str, work: Callable[[], object], *, claiming: str | None = None) -> Action:
        """Does one thing, or says that it would be done; `claiming` is the name of the run that is claimed for it."""
        if self._dry_run:
            return Action(path, text, problem="" if claiming is None else self._why_not_claimed(claiming))
        try:
            work()
        except StoreError as error:
            return Action(path, text, problem=str(error))
        return Action(path, text, done=True)

    def _why_not_claimed(self, run: str) -> str:
        try:
            if run not in self._remade:
                self._store.read_run(run)
            claims.check_free(self._store.path / "runs" / run)
        except StoreError as error:
            return str(error)
        return ""

    def _put_aside(self, where: str) -> Action:
        return self._do(where, f"is moved to {quarantine.FOLDER}/", lambda: self._store.put_aside(where))

    def _rewrite_store(self, finding: Finding) -> Iterator[Action]:
        root, where = self._store.path, f"{archived.ARCHIVE}/{archived.ARCHIVE_FILE}"
        has_archive = os.path.lexists(root / where) or any(archived.numbers(root, run) for run in self._store.runs())
        is_known = archived.store_of(root) is not None
        text = f"is made anew, with the id that {where} has" if is_known else "a record with a new id is written"
        yield self._do(finding.path, text, self._store.rewrite_store)
        if has_archive and not is_known:
            problem = (
                f"it asks for the id that the store had: name it once, by `simckpt archive {root} URL`, and the store "
                f"takes that id back. Until then no checkpoint comes back from there"
            )
            yield Action(where, "is not obeyed", problem=problem)

    def _rewrite_run(self, finding: Finding) -> Action:
        assert finding.run is not None
        record, unreachable = self._run_in_archive(finding.run)
        text, problem = BACK, ""
        if record is None:
            text = "is made anew from the run's checkpoints and starts"
            record, problem = rebuilt_run(self._store, finding.run)
        if record is None:
            return Action(finding.path, text, problem="; ".join(filter(None, (problem, unreachable))))
        self._remade.add(finding.run)
        return self._do(finding.path, text, lambda: self._store.rewrite_run(record), claiming=finding.run)

    def _run_in_archive(self, run: str) -> tuple[RunRecord | None, str]:
        """Returns the record of a run as the archive has it, or None, and why the archive cannot be asked."""
        data, unreachable = self._asked(run, RUN_FILE)
        with contextlib.suppress(StoreError):
            record = None if data is None else parse_run(data, f"the archive's {RUN_FILE} of run {run!r}")
            if record is not None and record.name == run and belongs(self._store, record):
                return record, ""
        return None, unreachable

    def _small_back(self, finding: Finding) -> Action | None:
        """Brings a start or a mark back from the archive, or returns None."""
        assert finding.run is not None
        run, file = finding.run, finding.path.split("/", 2)[2]
        data, _ = self._asked(run, file)
        with contextlib.suppress(DamagedError, FormatError):
            if data is not None:
                self._store.check_small(run, file, data)
                return self._do(finding.path, BACK, functools.partial(self._take_back, run, file, data))
        return None

    def _take_back(self, run: str, file: str, data: bytes) -> None:
        self._store.put_aside(f"runs/{run}/{file}")
        self._store.take_small(run, file, data)

    def _asked(self, run: str, file: str) -> tuple[bytes | None, str]:
        """Returns what the archive has of a small file, if it has one and can be asked, and why it cannot be."""
        if not has_archive(self._store) or self._silent:
            return None, self._silent
        try:
            self._archive = self._archive or Archive(self._store)
            return self._archive.small_file(run, file), ""
        except (ArchiveDamagedError, CheckpointNotFoundError):
            return None, ""
        except SimckptError as error:
            self._silent = f"the archive cannot be asked: {error}"
            return None, self._silent

    def _rewrite_index(self, finding: Finding) -> Iterator[Action]:
        (told,) = finding.affected
        path: str | None = finding.path
        used: set[str] = set()
        while path is not None:
            name = path.rpartition("/")[2]
            data = rebuilt_index(self._store, told.run, told.seq, name)
            if data is None:
                return
            text = "is made anew from the HDF5 files; its digest proves that it is the lost one"
            write = functools.partial(self._store.rewrite_index, told.run, told.seq, data, name)
            action = self._do(path, text, write, claiming=told.run)
            used |= frozenset() if name == SHARDS_FILE else index.parse_segment_ids(data, path)
            yield action
            if action.problem:
                return
            before, path = path, None if self._dry_run else self._next_index(told)
            if path == before:
                return
        self._rebuilt[told.run, told.seq] = used

    def _next_index(self, told: Affected) -> str | None:
        """Returns which index of a checkpoint of several ranks is damaged, too, now that one was made anew."""
        try:
            self._store.index(told.run, told.seq)
        except DamagedError as error:
            return os.path.relpath(error.path, self._store.path)
        except StoreError:
            return folder_of(told.run, told.seq)
        return None

    def _quarantine_checkpoints(self) -> Iterator[Action]:
        # what is out of place comes back whole once it has been put back
        report = dataclasses.replace(
            self._report, findings=tuple(each for each in self._report.damage if each.kind not in OUT_OF_PLACE)
        )
        lost = {(each.run, each.seq): each for each in report.lost}
        for finding in self._of("lineage"):
            seq = gap(finding)
            if finding.run is not None and seq is not None:
                lost.setdefault((finding.run, seq), Affected(finding.run, seq))
        others = {
            (each.run, each.seq)
            for finding in report.damage
            if finding.kind != "index"
            for each in finding.affected
            if not each.restorable
        }
        for place in sorted(lost.keys() | self._held.keys()):
            if place in self._rebuilt and place not in others:
                continue
            yield self._held[place] if place in self._held else self._quarantine(lost[place])

    def _quarantine(self, lost: Affected) -> Action:
        where = f"runs/{lost.run}/checkpoints/{lost.seq:08d}"
        problems = [
            finding.problem
            for finding in self._report.damage
            if any((each.run, each.seq) == (lost.run, lost.seq) and not each.restorable for each in finding.affected)
        ]
        reason = f"{quarantine.REASON}: {'; '.join(problems) or 'its folder was removed'}"
        text = f"is moved to {quarantine.FOLDER}/ and leaves a tombstone"
        if not os.path.lexists(self._store.path / where):
            text = "gets the record of a lost checkpoint: there is nothing else left of it"
        put_aside = functools.partial(self._store.quarantine, lost.run, lost.seq, reason)
        action = self._do(where, text, put_aside, claiming=lost.run)
        if not action.problem:
            self._gone.add((lost.run, lost.seq))
        return action

    def _put_segment_aside(self, finding: Finding) -> Iterator[Action]:
        if not (self._store.path / finding.path).exists():
            return
        identity = finding.path.rpartition("/")[2].removesuffix(".h5")
        text = f"is moved to {quarantine.FOLDER}/, for the next save to write its rows anew"
        if any(each.kind in OUT_OF_PLACE for each in self._report.findings):
            problem = "what is in the folders that are out of place may use it; put them back first"
            yield Action(finding.path, text, problem=problem)
            return
        try:
            needed = self._is_needed(identity)
        except StoreError as error:
            yield Action(finding.path, text, problem=str(error))
            return
        if not needed:
            yield self._do(finding.path, text, lambda: self._store.put_aside(finding.path))

    def _is_needed(self, identity: str) -> bool:
        """Returns whether a checkpoint, which then comes back whole, or a save in progress uses a segment."""
        announced = usage.by_saves(self._store.path)
        if announced is None or identity in announced:
            return True
        for run in usage.run_folders(self._store.path):
            damaged: dict[int, StoreError] = {}
            for record in self._store.records(run, damaged=damaged):
                if isinstance(record, CommitRecord) and identity in self._uses(run, record.seq):
                    return True
            if {(run, seq) for seq in damaged} - self._gone:
                raise StorageError(f"a record of run {run!r} is damaged: it is not known whether it uses {identity}")
        return False

    def _uses(self, run: str, seq: int) -> Collection[str]:
        """Returns the segments that a checkpoint uses, as it is, or would be, after what was done until now."""
        if (run, seq) in self._rebuilt:
            return self._rebuilt[run, seq]
        is_whole = (run, seq) not in self._gone and (run, seq) not in self._fetched
        return self._store.segment_ids(run, seq) if is_whole or not self._dry_run else ()

    def _repair_mark(self, finding: Finding) -> Action:
        assert finding.run is not None
        *_, checkpoint, name = finding.path.split("/")
        if marks.has_content(name):
            return self._small_back(finding) or self._put_aside(finding.path)
        run = finding.run
        return self._do(finding.path, "is written again", lambda: self._store.rewrite_mark(run, checkpoint, name))
