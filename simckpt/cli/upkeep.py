"""The command that verifies and repairs a store: `check`."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from simckpt import presentation
from simckpt.cli.application import FAILED, AsJson, StorePath, app, readable_errors
from simckpt.cli.printing import console, print_json
from simckpt.errors import ConfigurationError
from simckpt.maintenance.check import Scope
from simckpt.maintenance.check import check as check_store
from simckpt.maintenance.findings import DAMAGE, LEFTOVER, OUT_OF_PLACE, UNCHECKED, Finding, Report
from simckpt.maintenance.repair import Repair
from simckpt.maintenance.repair import repair as repair_store
from simckpt.presentation import printable

DAMAGED = 3  # the exit code
_SHOWN = 20  # lines of one sort on a terminal


@app.command("check")
def check(
    store: StorePath,
    quick: Annotated[bool, typer.Option("--quick", help="Records, sizes and references alone, no arrays.")] = False,
    part: Annotated[str | None, typer.Option(metavar="K/N", help="The arrays of the K-th of N parts.")] = None,
    max_minutes: Annotated[float | None, typer.Option(metavar="M", help="Stop after M minutes.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on where the last such call stopped.")] = False,
    repair: Annotated[bool, typer.Option("--repair", help="Put what is damaged into quarantine.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="With --repair: only show what would be done.")] = False,
    as_json: AsJson = False,
) -> None:
    """Verify STORE: every record, every array, every reference; also beside running saves, and read-only.

    With --repair, checkpoints that do not come back whole leave a tombstone and are moved to STORE/quarantine; nothing
    is removed. Exit code 0: all is as it was written, or has been put right; 3: there is damage; 2: something could not
    be checked or repaired, or is left for --resume.
    """
    with readable_errors():
        scope = Scope(quick, _part(part), resume, None if max_minutes is None else 60 * max_minutes)
        if dry_run and not repair:
            raise ConfigurationError("--dry-run says what --repair would do: give both", keys=["dry_run"])
        if repair and (scope.part or scope.resume or scope.seconds is not None):
            raise ConfigurationError("--repair looks at the whole store: no --part, --resume or --max-minutes with it")
        with _bar(shown=not as_json) as tell:
            if repair:
                done = repair_store(store, scope=scope, dry_run=dry_run, tell=tell)
                report = done.before
            else:
                done, report = None, check_store(store, scope, tell=tell)
    if as_json:
        print_json(report.as_json() if done is None else done.as_json())
    else:
        _print_report(report)
        if done is not None:
            _print_repair(done)
    raise typer.Exit(_code(report, done))


def _code(report: Report, done: Repair | None) -> int:
    if done is not None and not done.dry_run:
        return FAILED if not done or report.unchecked else DAMAGED if done.remaining else 0
    return DAMAGED if report.damage else FAILED if not report else 0


def _part(text: str | None) -> tuple[int, int] | None:
    if text is None:
        return None
    first, slash, second = text.partition("/")
    if not (slash and first.isdecimal() and second.isdecimal()):
        raise ConfigurationError(f"a part is given as 2/5, got {text!r}", keys=["part"])
    return int(first), int(second)


@contextlib.contextmanager
def _bar(*, shown: bool) -> Iterator[Callable[[int, int], None]]:
    """Gives what shows how far it has come, on a terminal."""
    columns = TextColumn("verified"), BarColumn(), DownloadColumn(), TimeRemainingColumn()
    disable = not (shown and sys.stderr.isatty())
    with Progress(*columns, console=Console(stderr=True), transient=True, disable=disable) as bar:
        task = bar.add_task("", total=None)

        def tell(done: int, total: int) -> None:
            bar.update(task, completed=done, total=total)

        yield tell


def _print_report(report: Report) -> None:
    screen = console()
    for finding in (*report.damage, *report.unchecked):
        _print_finding(finding)
    for severity, what in ((LEFTOVER, "leftovers"), ("quarantined", "in quarantine"), ("foreign", "not simckpt's")):
        found = report.of(severity)
        if found:
            unfinished = [each for each in found if each.kind == "unfinished session"]
            for finding in unfinished:
                told = f"unfinished: {printable(finding.path)}: {finding.problem}; {finding.advice}"
                screen.print(told, soft_wrap=True)
            found = tuple(each for each in found if each not in unfinished)
        if found:
            size = presentation.size(sum(finding.size for finding in found))
            amount = "" if severity == "foreign" else f", {size}"
            advice = "; `simckpt compact` frees them" if severity == LEFTOVER else ""
            screen.print(f"{what}: {len(found)}{amount}{advice}", soft_wrap=True)
            for finding in found[:_SHOWN]:
                screen.print(f"  {printable(finding.path)}: {printable(finding.problem)}", soft_wrap=True)
            if len(found) > _SHOWN:
                screen.print(f"  and {len(found) - _SHOWN} more (--json)")
    counts = report.counts
    what = "sizes and references of" if report.quick else "all files of"
    part = "" if report.part is None else f", part {report.part[0]} of {report.part[1]}"
    screen.print(
        f"{counts.records:,} records, {what} {counts.checkpoints:,} checkpoints, {counts.segments:,} segments, "
        f"{counts.leaves:,} leaves, {presentation.size(counts.nbytes)} verified in {report.duration:.1f} s{part}",
        soft_wrap=True,
    )
    if counts.archived:
        told = f"{counts.archived:,} checkpoints in the archive alone, not looked at (`simckpt archive --verify`)"
        screen.print(told, soft_wrap=True)
    if counts.archived_sessions:
        told = f"{counts.archived_sessions:,} sessions in the archive alone, not looked at (`simckpt archive --verify`)"
        screen.print(told, soft_wrap=True)
    if report.left:
        screen.print(f"not finished: the time was up, {report.left:,} files are left; go on with --resume")
    lost = len(report.lost)
    if report:
        screen.print("no damage")
    elif report.damage:
        if lost:
            verdict = (
                "1 checkpoint does not come back whole" if lost == 1 else f"{lost} checkpoints do not come back whole"
            )
        elif report.left or report.unchecked or any(each.kind in OUT_OF_PLACE for each in report.damage):
            verdict = "every checkpoint that was looked at comes back whole"
        else:
            verdict = "every checkpoint comes back whole"
        screen.print(f"damage in {presentation.count(len(report.damage), 'place')}; {verdict}")


def _print_finding(finding: Finding) -> None:
    screen = console()
    label = {DAMAGE: "damaged", UNCHECKED: "not checked"}[finding.severity]
    screen.print(f"{label}: {finding.kind} {printable(finding.path)}", soft_wrap=True)
    for text in filter(None, (finding.problem, finding.meaning, finding.advice)):
        screen.print(f"  {printable(text)}", soft_wrap=True)
    for each in finding.affected[:_SHOWN]:
        leaves = ", ".join(each.leaves[:5]) + (f" and {len(each.leaves) - 5} more" if len(each.leaves) > 5 else "")
        if each.restorable:
            outcome = "comes back whole"
        elif finding.severity == UNCHECKED:
            outcome = "not known"
        elif finding.kind in OUT_OF_PLACE:
            outcome = "comes back with the folder"
        else:
            outcome = f"lost: {leaves or 'all of it'}"
        screen.print(f"  - {printable(f'{each}: {outcome}')}", soft_wrap=True)
    if len(finding.affected) > _SHOWN:
        screen.print(f"  - and {len(finding.affected) - _SHOWN} more (--json)")


def _print_repair(done: Repair) -> None:
    screen = console()
    if not done.actions:
        screen.print("nothing to repair")
    for finding in done.remaining:
        screen.print(f"stays as it is: {printable(finding.path)}: {printable(finding.advice)}", soft_wrap=True)
    for action in done.actions:
        label = "failed" if action.problem else "done" if action.done else "would be done"
        problem = f": {action.problem}" if action.problem else ""
        screen.print(f"{label}: {printable(action.path)} {action.text}{printable(problem)}", soft_wrap=True)
