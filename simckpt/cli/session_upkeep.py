"""Commands that keep sessions in order: `session prune`, `pin`, `unpin`, `fetch`, `push`, `pull`."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Annotated

import typer

from simckpt import presentation
from simckpt.cli.application import AsJson, StorePath, readable_errors
from simckpt.cli.archiving import Url
from simckpt.cli.marking import keep_policy
from simckpt.cli.printing import console, print_json, short, table
from simckpt.cli.sessions import Name, commands
from simckpt.errors import ConfigurationError
from simckpt.presentation import printable
from simckpt.store import Store

if TYPE_CHECKING:
    from simckpt.archive.session_transfer import SessionTransfer


@commands.command("prune")
def prune(
    store: StorePath,
    keep_last: Annotated[int | None, typer.Option(metavar="N", help="Keep the last N.")] = None,
    keep_every_minutes: Annotated[float | None, typer.Option(metavar="M", help="Keep one for each M minutes.")] = None,
    max_bytes: Annotated[int | None, typer.Option(metavar="N", help="Keep the newest that fit into N bytes.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show what would be removed, and why.")] = False,
    as_json: AsJson = False,
) -> None:
    """Remove the closed sessions of STORE that no option keeps, and show the reasons.

    Never removed: the newest, pinned ones, and those that are being recorded or were not closed. The checkpoints that
    were driving may be pruned then; `simckpt archive` removes the copies in the archive.
    """
    with readable_errors():
        policy = keep_policy(keep_last, None, "max", None, keep_every_minutes, False, max_bytes)
        if policy is None:
            raise ConfigurationError("say what to keep, such as --keep-last 3: without that all but one would go")
        verdicts = Store(store).prune_sessions(policy, dry_run=dry_run)
    if as_json:
        print_json([dataclasses.asdict(verdict) for verdict in verdicts])
        return
    shown = table("session", "id", "", "reason")
    for verdict in verdicts:
        done = "keep" if verdict.keep else "would remove" if dry_run else "removed"
        shown.add_row(printable(verdict.name), short(verdict.id), done, printable(verdict.reason))
    console().print(shown)


@commands.command("pin")
def pin(store: StorePath, name: Name) -> None:
    """Protect a session from `session prune`; also while it is recorded."""
    with readable_errors():
        session = Store(store).session(name)
        session.pin()
    print(f"{session!r}: pinned")


@commands.command("unpin")
def unpin(store: StorePath, name: Name) -> None:
    """End the protection of a session from `session prune`."""
    with readable_errors():
        session = Store(store).session(name)
        session.unpin()
    print(f"{session!r}: not pinned")


@commands.command("fetch")
def fetch(
    store: StorePath,
    name: Name,
    archive: Annotated[
        str | None, typer.Option(metavar="URL", help="The archive, where you have never named it before.")
    ] = None,
) -> None:
    """Bring a session back from the archive of STORE, every byte verified; also what is damaged here, or gone.

    Reading it would do that, too, as long as its folder is here. It stays on the disk for a day at least.
    """
    with readable_errors():
        opened = Store(store)
        brought = opened.archive(archive).fetch_session(name)
        session = opened.session(name)
    print(
        f"{session!r}: {presentation.count(len(brought), 'file')} brought back" if brought else f"{session!r} is here"
    )


@commands.command("push")
def push(
    store: StorePath,
    name: Name,
    url: Url,
    verify: Annotated[
        bool, typer.Option("--verify", help="Read back what is there, and write again what is damaged.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Bring a closed session to URL, from which other machines pull it; the checkpoint that was driving stays here.

    `simckpt push` brings a run with all sessions that its checkpoints were driving.
    """
    with readable_errors():
        done = Store(store).push_session(name, url, verify=verify)
    _print(done, as_json=as_json)


@commands.command("pull")
def pull(
    url: Url,
    store: StorePath,
    name: Name,
    verify: Annotated[
        bool, typer.Option("--verify", help="Read what is here, and bring again what is damaged.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Bring a session from URL into STORE, to read it and to play it; what is gone or cut here is put right.

    `simckpt pull` brings a run with all sessions that its checkpoints were driving, or all that is at URL.
    """
    with readable_errors():
        done = Store(store).pull_session(url, name, verify=verify)
    _print(done, as_json=as_json)


def _print(done: SessionTransfer, *, as_json: bool) -> None:
    if as_json:
        print_json(dataclasses.asdict(done))
        return
    told = presentation.size(done.nbytes) if done.nbytes else "all was there"
    repaired = ", which was not whole, put right" if done.repaired else ""
    console().print(f"session {printable(done.session)}{repaired}: {told}", soft_wrap=True)
