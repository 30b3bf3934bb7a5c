"""What a check of a store found, as frozen values."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

from simckpt.errors import StoreError

# severities: bytes or records that are not what was written; what could not be looked at; what may go; what is not ours
DAMAGE, UNCHECKED, LEFTOVER, FOREIGN, QUARANTINED = "damage", "not checked", "leftover", "foreign", "quarantined"

KINDS = {
    "store record": "`store.json`",
    "folder": "a folder of the store that is a symbolic link, is missing or cannot be opened, with all it holds",
    "place": "a folder of a run or a checkpoint that was renamed or copied; what it holds says where it belongs",
    "run record": "a `run.json`",
    "commit record": "a `commit.json`, of a checkpoint or of what was one",
    "index": "a `leaves.json`",
    "leaves": "arrays in the files of a checkpoint",
    "rest": "a file of a checkpoint outside of its arrays, which viewers alone need",
    "structure": "the HDF5 structure of a file, which differs from the index",
    "segment": "shared rows or large arrays",
    "segment rest": "a segment outside of its arrays, which viewers alone need",
    "start": "a record in `starts/`",
    "mark": "a tag, a pin or later metrics",
    "job": "a `job.json`, which nobody needs any longer",
    "archive": "what is known of an archive",
    "claim": "the `owner.json` of a writer",
    "lineage": "references between records",
    "session": "a recording of hardware in the loop",
    "unfinished session": "one that its processes left without an end",
    "work": "in `tmp/`",
    "trash": "in `trash/`",
    "unused segment": "a segment that no checkpoint and no save in progress refers to",
    "pruned": "files beside the record of a pruned checkpoint",
    "foreign": "what simckpt did not make",
    "quarantine": "what a repair has put aside",
}

OUT_OF_PLACE = ("folder", "place")  # kinds of what comes back once a person has put a folder back


@dataclass(frozen=True)
class Affected:
    """A checkpoint that a finding is about.

    Attributes:
        run: the run's name.
        seq: the number of the commit in the run.
        id: of the checkpoint, or None if its record cannot be read.
        step: [env steps], or None.
        leaves: the paths of its leaves that cannot be read; empty if none can, or all.
        restorable: whether all of it comes back, bit for bit.
    """

    run: str
    seq: int
    id: str | None = None
    step: int | None = None
    leaves: tuple[str, ...] = ()
    restorable: bool = False

    def __str__(self) -> str:
        name = "of unknown id" if self.id is None else self.id
        step = "" if self.step is None else f" at step {self.step:,}"
        return f"checkpoint {name} (number {self.seq} of run {self.run!r}{step})"


@dataclass(frozen=True)
class Finding:
    """One thing that a check found.

    Attributes:
        severity: "damage", "not checked", "leftover", "foreign" or "quarantined".
        kind: what it is about, a key of `KINDS`.
        path: relative to the store.
        problem: what is wrong.
        meaning: what that means, for which checkpoints.
        advice: what to do.
        run: the name of the run that it lies in, or None.
        affected: the checkpoints that it is about: exactly those that use the bytes.
        size: of leftovers [bytes].
    """

    severity: str
    kind: str
    path: str
    problem: str
    meaning: str = ""
    advice: str = ""
    run: str | None = None
    affected: tuple[Affected, ...] = ()
    size: int = 0


@dataclass(frozen=True)
class Counts:
    """How much a check has verified.

    Attributes:
        runs: that the store has.
        records: of all kinds, read and compared with their digests, indexes included.
        checkpoints: whose own files were compared byte by byte; by `quick`, whose sizes and references were.
        pruned: tombstones.
        archived: checkpoints in the archive alone, of which only the records here were looked at.
        archived_sessions: sessions of which that holds.
        leaves: whose bytes are those that were saved, those in segments not counted again for each checkpoint.
        segments: that were read; by `quick`, whose sizes were compared.
        nbytes: that were read and compared with digests [bytes].
    """

    runs: int = 0
    records: int = 0
    checkpoints: int = 0
    pruned: int = 0
    archived: int = 0
    archived_sessions: int = 0
    leaves: int = 0
    segments: int = 0
    nbytes: int = 0

    def plus(self, **more: int) -> Counts:
        """Returns the counts with these added."""
        return dataclasses.replace(self, **{name: getattr(self, name) + each for name, each in more.items()})


@dataclass(frozen=True)
class Report:
    """What a check of a store found; true if nothing is damaged and all that was to be looked at was, nothing left.

    Attributes:
        store: the store's folder.
        findings: damage first.
        counts: what was really verified.
        duration: of the check [s].
        quick: whether arrays were left out.
        part: (k, n) if the k-th of n parts was checked.
        left: how many files of checkpoints and segments a later call has to look at, for the time was up.
    """

    store: str
    findings: tuple[Finding, ...]
    counts: Counts
    duration: float
    quick: bool = False
    part: tuple[int, int] | None = None
    left: int = 0

    def __bool__(self) -> bool:
        return not self.damage and not self.unchecked and not self.left

    @property
    def damage(self) -> tuple[Finding, ...]:
        """What is not as it was written."""
        return self.of(DAMAGE)

    @property
    def unchecked(self) -> tuple[Finding, ...]:
        """What could not be looked at, because of permissions or a newer version."""
        return self.of(UNCHECKED)

    def of(self, severity: str) -> tuple[Finding, ...]:
        """Returns the findings of one severity."""
        return tuple(finding for finding in self.findings if finding.severity == severity)

    @property
    def lost(self) -> tuple[Affected, ...]:
        """The checkpoints that do not come back whole, each once, with all their damaged leaves."""
        found: dict[tuple[str, int], Affected] = {}
        for finding in self.damage:
            for each in finding.affected:
                if not each.restorable:
                    before = found.get((each.run, each.seq), each)
                    leaves = tuple(dict.fromkeys((*before.leaves, *each.leaves)))
                    found[each.run, each.seq] = dataclasses.replace(before, leaves=leaves)
        return tuple(found[key] for key in sorted(found))

    def as_json(self) -> dict[str, Any]:
        """Returns all of it for programs."""
        return {"ok": bool(self), "lost": [dataclasses.asdict(each) for each in self.lost], **dataclasses.asdict(self)}


@dataclass
class Notes:
    """What a check in progress has found so far.

    Attributes:
        findings: in the order in which they were found.
        counts: what was verified.
    """

    findings: list[Finding] = field(default_factory=list)
    counts: Counts = field(default_factory=Counts)

    def add(self, severity: str, kind: str, path: str, problem: object, **more: Any) -> None:
        """Adds a finding; see `Finding`."""
        assert kind in KINDS
        text = str(problem)
        meaning, advice = _TEXTS.get(kind, ("", ""))
        if severity == LEFTOVER:
            advice = "`simckpt compact` frees it"
        if severity == UNCHECKED:
            advice = "check it again with the rights, or the version of simckpt, that it needs"
        if severity == DAMAGE:
            more = {"meaning": meaning, "advice": advice, **more}
        self.findings.append(Finding(severity, kind, path, text, **({"advice": advice} | more)))

    def count(self, **more: int) -> None:
        """Adds to the counts."""
        self.counts = self.counts.plus(**more)


_REPAIR = (
    "`simckpt check --repair` brings it back from an archive, or puts it into quarantine; `simckpt pull --verify` "
    "brings back what was pushed; else restore an older checkpoint"
)
_TEXTS = {
    "folder": (
        "simckpt follows no symbolic link out of a store: what belongs there is not read, and nothing is written there",
        "put the folder itself back in its place; `simckpt check --repair` leaves it alone",
    ),
    "place": (
        "what is in it is not found where it is looked for",
        "give the folder its name back; `simckpt check --repair` leaves it alone",
    ),
    "store record": (
        "no command but this one opens the store",
        "put `store.json` back from a copy, or `simckpt check --repair`; without an archive that gives it a new id",
    ),
    "run record": (
        "the run cannot be started, listed or branched, and nothing in the store is pruned; its checkpoints are whole",
        "`simckpt check --repair` brings it back from the archive, or makes it anew from its checkpoints and starts, "
        "where these tell all",
    ),
    "commit record": (
        "what the checkpoint is, and what it descends from, is not known, and no segment of the store is freed",
        _REPAIR,
    ),
    "index": ("where the checkpoint's arrays lie is not known, and no segment of the store is freed", _REPAIR),
    "leaves": ("these arrays are not what was saved; all others of the checkpoint are", _REPAIR),
    "rest": (
        "the checkpoint restores bit for bit; viewers of HDF5 may fail, and no archive takes a copy of it",
        "nothing need be done; a checkpoint saved later takes its place",
    ),
    "structure": ("the checkpoint restores bit for bit; viewers of HDF5 show something else", "report it to simckpt"),
    "segment": ("the checkpoints that use these bytes do not come back whole; all others do", _REPAIR),
    "segment rest": (
        "all checkpoints restore bit for bit; viewers of HDF5 may not show these rows",
        "nothing need be done; it goes with the checkpoints that use it",
    ),
    "start": (
        "checkpoints restore bit for bit; hyperparameters, git and device of those that this start saved are not known",
        "`simckpt check --repair` brings it back from the archive, or puts it aside; the next start of the same "
        "content writes it again",
    ),
    "mark": (
        "a tag or a pin says all by being there; later metrics are not known",
        "`simckpt check --repair` writes a tag or a pin again; metrics it brings back from the archive, or puts aside, "
        "to be added again",
    ),
    "job": ("nothing: its save has ended", "`simckpt check --repair` puts it aside"),
    "archive": (
        "which checkpoints have a copy in the archive is not known",
        "`simckpt archive` finds out again; a checkpoint whose state is in the archive alone comes back from there",
    ),
    "claim": ("who writes the run is not known; it can be claimed after 600 s of silence", "stop the run's writer"),
    "session": (
        "these rows, or the states in this snapshot, cannot be read; all else of the session can, and all checkpoints",
        "`simckpt check --repair` brings it back from an archive, or leaves it alone; `simckpt session pull --verify` "
        "brings back what was pushed; else put a copy of the file back",
    ),
    "lineage": ("what descends from what is not known beyond this place; each checkpoint restores by its id", ""),
}


def relative(path: object, root: object) -> str:
    """Returns a path as seen from the store."""
    text, prefix = str(path), f"{root}/"
    return text.removeprefix(prefix)


def problem(error: StoreError, root: object) -> str:
    """Returns what an error says, with paths as seen from the store."""
    return str(error).replace(f"{root}/", "")
