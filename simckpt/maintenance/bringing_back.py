"""Brings back from the archive what is damaged in a store, before a repair puts anything aside."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from simckpt.archive import Archive
from simckpt.errors import (
    ArchiveDamagedError,
    ArchiveUnavailableError,
    CheckpointNotFoundError,
    DamagedError,
    RunLockedError,
    SessionNotFoundError,
    SimckptError,
    StorageError,
)
from simckpt.fallbacks import has_archive
from simckpt.maintenance.findings import Affected, Finding, Report
from simckpt.maintenance.lineage import MISSING
from simckpt.storage import StoreFiles, names, sessions

BACK = "comes back from the archive"
IN_SESSIONS = f"{sessions.SESSIONS}/"
OF_FILES = ("commit record", "index", "leaves", "rest", "structure", "segment", "segment rest")  # kinds of damage


@dataclass(frozen=True)
class Action:
    """One thing that a repair does, would do, or could not do.

    Attributes:
        path: what it is about, relative to the store.
        text: what is done.
        done: whether it was.
        problem: why it was not, or will not be; empty otherwise.
    """

    path: str
    text: str
    done: bool = False
    problem: str = ""


def folder_of(run: str, seq: int) -> str:
    """Returns the folder of a checkpoint, as seen from the store."""
    return f"runs/{run}/checkpoints/{names.sequence_name(seq)}"


def fetched_checkpoints(store: StoreFiles, report: Report, *, dry_run: bool) -> dict[tuple[str, int], Action]:
    """Brings damaged checkpoints back from the archive; returns what came, and what may be there out of reach.

    The archive is asked for each of them: a kill may have kept this store from noting what it has.
    """
    held: dict[tuple[str, int], Action] = {}
    archive, unreachable, came = None, "", False
    for run, seq in _lost_places(report):
        if not store.archived_file(run, seq).exists() and not has_archive(store):
            continue
        where, problem = folder_of(run, seq), unreachable
        try:
            if not unreachable:
                archive = archive or Archive(store)
                came = bool(archive.bring_back(run, seq, dry_run=dry_run)) or came
                if not came:
                    continue  # else all that it lacked may have come with another one
        except (ArchiveDamagedError, CheckpointNotFoundError):
            continue  # the archive does not have it either
        except (StorageError, RunLockedError) as error:
            problem = str(error)
        except SimckptError as error:
            problem = f"the archive cannot be reached: {error}"
            if isinstance(error, ArchiveUnavailableError):
                unreachable = problem  # which takes its time to find out
        if problem:
            held[run, seq] = Action(where, "is left alone", problem=problem)
        else:
            held[run, seq] = Action(where, BACK, done=not dry_run)
    return held


def fetched_sessions(store: StoreFiles, report: Report, *, dry_run: bool) -> list[Action]:
    """Brings back what is damaged of sessions, as far as the archive has it; the rest of a session stays as it is."""
    damaged = [each.path for each in report.damage if each.kind == "session" and each.path.startswith(IN_SESSIONS)]
    wanted = dict.fromkeys(path.split("/")[1] for path in damaged)
    found: list[Action] = []
    archive, unreachable = None, ""
    for name in wanted if has_archive(store) else ():
        where, problem = f"{sessions.SESSIONS}/{name}", unreachable
        try:
            if not unreachable:
                archive = archive or Archive(store)
                if not archive.fetch_session(name, dry_run=dry_run):
                    continue
        except (ArchiveDamagedError, CheckpointNotFoundError, SessionNotFoundError, DamagedError):
            continue  # the archive does not have it either, or nothing here says which one it is
        except (StorageError, RunLockedError) as error:
            problem = str(error)
        except SimckptError as error:
            problem = f"the archive cannot be reached: {error}"
            if isinstance(error, ArchiveUnavailableError):
                unreachable = problem
        text = "is left alone" if problem else BACK
        found.append(Action(where, text, done=not (dry_run or problem), problem=problem))
    return found


def _lost_places(report: Report) -> list[tuple[str, int]]:
    """Returns (run, number) of the checkpoints whose files, or whose folders, are not what was written."""
    found = {(each.run, each.seq) for kind in OF_FILES for each in _affected(report, kind)}
    gaps = ((finding.run, gap(finding)) for finding in report.damage if finding.kind == "lineage")
    return sorted(found | {(run, seq) for run, seq in gaps if run is not None and seq is not None})


def _affected(report: Report, kind: str) -> Iterator[Affected]:
    for finding in report.damage:
        if finding.kind == kind:
            yield from finding.affected


def gap(finding: Finding) -> int | None:
    """Returns the number of a commit whose folder was removed, if a finding tells of that."""
    return int(finding.path.rpartition("/")[2]) if finding.problem.startswith(MISSING) else None
