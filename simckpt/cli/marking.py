"""Commands that mark checkpoints, drop them and free space: `pin`, `unpin`, `tag`, `prune`, `compact`."""

from __future__ import annotations

import dataclasses
import functools
import operator
from typing import Annotated

import typer

from simckpt.checkpoint import Checkpoint
from simckpt.cli.application import Address, AsJson, StorePath, app, readable_errors
from simckpt.cli.printing import checkpoint_as_json, console, marks, print_json, short, table
from simckpt.errors import ConfigurationError
from simckpt.policies import KeepBest, KeepEvery, KeepLast, KeepPolicy, KeepTagged, MaxBytes
from simckpt.presentation import printable, size
from simckpt.store import Store


@app.command("pin")
def pin(store: StorePath, checkpoint: Address, as_json: AsJson = False) -> None:
    """Protect CHECKPOINT from pruning."""
    with readable_errors():
        found = Store(store).checkpoint(checkpoint)
        found.pin()
    _print_marks(found, as_json=as_json)


@app.command("unpin")
def unpin(store: StorePath, checkpoint: Address, as_json: AsJson = False) -> None:
    """End the protection of CHECKPOINT from pruning."""
    with readable_errors():
        found = Store(store).checkpoint(checkpoint)
        found.unpin()
    _print_marks(found, as_json=as_json)


@app.command("tag")
def tag(
    store: StorePath,
    checkpoint: Address,
    tags: Annotated[list[str], typer.Argument(metavar="TAG...", help="Letters, digits, dots, underscores, hyphens.")],
    remove: Annotated[bool, typer.Option("--remove", help="Remove the tags instead.")] = False,
    as_json: AsJson = False,
) -> None:
    """Tag CHECKPOINT; also while its run is training."""
    with readable_errors():
        found = Store(store).checkpoint(checkpoint)
        if remove:
            found.untag(*tags)
        else:
            found.tag(*tags)
    _print_marks(found, as_json=as_json)


@app.command("prune")
def prune(
    store: StorePath,
    run: Annotated[str, typer.Argument(metavar="RUN", help="The run's name.")],
    keep_last: Annotated[int | None, typer.Option(metavar="N", help="Keep the last N.")] = None,
    keep_best: Annotated[
        tuple[int, str] | None, typer.Option(metavar="N METRIC", help="Keep the N best by a metric.")
    ] = None,
    mode: Annotated[str, typer.Option(help="What is best: max or min.")] = "max",
    keep_every_steps: Annotated[int | None, typer.Option(metavar="N", help="Keep one for each N steps.")] = None,
    keep_every_minutes: Annotated[float | None, typer.Option(metavar="M", help="Keep one for each M minutes.")] = None,
    keep_tagged: Annotated[bool, typer.Option("--keep-tagged", help="Keep those with any tag.")] = False,
    max_bytes: Annotated[int | None, typer.Option(metavar="N", help="Keep the newest that fit into N bytes.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show what would be dropped, and why.")] = False,
    as_json: AsJson = False,
) -> None:
    """Drop the checkpoints of RUN that no option keeps, and show the reasons.

    Never dropped: the newest, pinned ones, the origins of other runs and the targets of rollbacks.
    """
    with readable_errors():
        policy = keep_policy(keep_last, keep_best, mode, keep_every_steps, keep_every_minutes, keep_tagged, max_bytes)
        if policy is None:
            raise ConfigurationError("say what to keep, such as --keep-last 3: without that all but one would go")
        opened = Store(store).run(run)
        steps = {checkpoint.id: checkpoint.step for checkpoint in opened.checkpoints()}
        verdicts = opened.prune(policy, dry_run=dry_run)
    if as_json:
        print_json([{"step": steps[verdict.id], **dataclasses.asdict(verdict)} for verdict in verdicts])
        return
    shown = table("step", "checkpoint", "", "reason")
    for verdict in verdicts:
        done = "keep" if verdict.keep else "would drop" if dry_run else "dropped"
        shown.add_row(f"{steps[verdict.id]:,}", short(verdict.id), done, printable(verdict.reason))
    console().print(shown)


def keep_policy(
    last: int | None,
    best: tuple[int, str] | None,
    mode: str,
    every_steps: int | None,
    every_minutes: float | None,
    tagged: bool,
    max_bytes: int | None,
) -> KeepPolicy | None:
    """Returns the policy that options stand for, or None if none was given; raises ConfigurationError."""
    policies: list[KeepPolicy] = [] if last is None else [KeepLast(last)]
    policies += [] if best is None else [KeepBest(*best, mode=mode)]
    policies += [] if every_steps is None else [KeepEvery(steps=every_steps)]
    policies += [] if every_minutes is None else [KeepEvery(minutes=every_minutes)]
    policies += [KeepTagged()] if tagged else []
    policies += [] if max_bytes is None else [MaxBytes(max_bytes)]
    return functools.reduce(operator.or_, policies) if policies else None


@app.command("compact")
def compact(
    store: StorePath,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show what would be freed.")] = False,
    unknown: Annotated[
        bool, typer.Option("--unknown", help="Also free segments that nothing in the store names at all.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Free what nobody refers to: left-over work of dead processes, unused segments, files of pruned checkpoints.

    Safe beside training and other commands, on other hosts too. Segments that may belong to a run whose folder was
    moved away stay, unless --unknown says that nothing is to be put back.
    """
    with readable_errors():
        freed = Store(store).compact(dry_run=dry_run, unknown=unknown)
    if as_json:
        print_json(dataclasses.asdict(freed))
        return
    shown = table("", "what")
    for name in freed.work:
        shown.add_row("unfinished work", printable(name))
    for identity in freed.segments:
        shown.add_row("segment", identity)
    for run, seq in freed.checkpoints:
        shown.add_row("files of a pruned checkpoint", printable(f"runs/{run}/checkpoints/{seq:08}"))
    if freed:
        console().print(shown)
    console().print(f"{'would free' if dry_run else 'freed'} {size(freed.nbytes)}")
    if freed.unknown:
        count = "1 segment" if len(freed.unknown) == 1 else f"{len(freed.unknown)} segments"
        told = (
            f"{count}, {size(freed.unknown_nbytes)}, {'stays' if len(freed.unknown) == 1 else 'stay'}: nothing in the "
        )
        told += (
            "store says whose. If no folder that was moved away is to be put back, --unknown frees what is told here"
        )
        console().print(told, soft_wrap=True)


def _print_marks(checkpoint: Checkpoint, *, as_json: bool) -> None:
    if as_json:
        print_json(checkpoint_as_json(checkpoint))
    else:
        console().print(f"{checkpoint!r}: {marks(checkpoint) or 'no tags, not pinned'}", soft_wrap=True)
