"""Commands on the archive, `archive` and `fetch`, and on what passes between machines, `push` and `pull`."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Annotated

import typer

from simckpt import presentation
from simckpt.cli.application import FAILED, Address, AsJson, StorePath, app, readable_errors
from simckpt.cli.marking import keep_policy
from simckpt.cli.printing import console, print_json
from simckpt.policies import KeepLast
from simckpt.store import Store

if TYPE_CHECKING:
    from simckpt.archive.transfer import Transfer

Url = Annotated[
    str, typer.Argument(metavar="URL", help="s3://bucket/prefix, gs://..., az://..., file:///folder or a folder.")
]


@app.command("archive")
def archive(
    store: StorePath,
    url: Annotated[
        str | None, typer.Argument(metavar="[URL]", help="Of the archive; once given, the store knows it.")
    ] = None,
    keep_last: Annotated[int | None, typer.Option(metavar="N", help="The last N stay on the disk.")] = None,
    keep_best: Annotated[
        tuple[int, str] | None, typer.Option(metavar="N METRIC", help="The N best by a metric stay.")
    ] = None,
    mode: Annotated[str, typer.Option(help="What is best: max or min.")] = "max",
    keep_every_steps: Annotated[int | None, typer.Option(metavar="N", help="One for each N steps stays.")] = None,
    keep_every_minutes: Annotated[float | None, typer.Option(metavar="M", help="One for each M minutes stays.")] = None,
    keep_tagged: Annotated[bool, typer.Option("--keep-tagged", help="Those with any tag stay.")] = False,
    max_bytes: Annotated[int | None, typer.Option(metavar="N", help="The newest that fit into N bytes stay.")] = None,
    keep_last_sessions: Annotated[
        int | None, typer.Option(metavar="N", help="The last N sessions stay on the disk; all by default.")
    ] = None,
    verify: Annotated[bool, typer.Option("--verify", help="Read all of the archive back, and repair it.")] = False,
    new: Annotated[bool, typer.Option("--new", help="Begin another archive; the old one is lost for good.")] = False,
    as_json: AsJson = False,
) -> None:
    """Copy the checkpoints and closed sessions of STORE to its archive, verified; what no --keep keeps leaves.

    Without any --keep all stay on the disk as well. What was pruned or removed here is removed from the archive. Exit
    code 0: done; 2: the archive cannot be reached, or something could not be done: it is tried again by the next such
    command.
    """
    with readable_errors():
        policy = keep_policy(keep_last, keep_best, mode, keep_every_steps, keep_every_minutes, keep_tagged, max_bytes)
        sessions = None if keep_last_sessions is None else KeepLast(keep_last_sessions)
        opened = Store(store).archive(url, policy=policy, keep_sessions=sessions, new=new)
        moved = opened.move()
        verified = opened.verify() if verify else None
    if as_json:
        known = {} if verified is None else {"verified": dataclasses.asdict(verified)}
        print_json({"url": opened.url, **dataclasses.asdict(moved), **known})
    else:
        print(
            f"{opened.url}: {len(moved.archived)} archived, {len(moved.evicted)} evicted from the disk, "
            f"{len(moved.removed)} pruned ones removed"
        )
        if moved.sessions or moved.evicted_sessions or moved.removed_sessions:
            print(
                f"  sessions: {len(moved.sessions)} archived, {len(moved.evicted_sessions)} evicted from the disk, "
                f"{len(moved.removed_sessions)} removed"
            )
        if verified is not None:
            print(f"{verified.objects} objects read back")
            for repaired in verified.repaired:
                print(f"  was damaged, put right: {presentation.printable(repaired)}")
        for problem in [*moved.problems, *(verified.damaged if verified is not None else ())]:
            print(f"  problem: {presentation.printable(problem)}")
    if moved.problems or (verified is not None and verified.damaged):
        raise typer.Exit(FAILED)


@app.command("fetch")
def fetch(
    store: StorePath,
    checkpoint: Address,
    archive: Annotated[
        str | None, typer.Option(metavar="URL", help="The archive, where you have never named it before.")
    ] = None,
) -> None:
    """Bring CHECKPOINT back from the archive of STORE, with every byte verified; also what is damaged here.

    Reading it would do that, too. It stays on the disk for a day at least.
    """
    with readable_errors():
        opened = Store(store)
        found = opened.checkpoint(checkpoint)
        brought = opened.archive(archive).fetch(found)
    print(f"{found!r}: {presentation.count(len(brought), 'file')} brought back" if brought else f"{found!r} is here")


@app.command("push")
def push(
    store: StorePath,
    run: Annotated[str, typer.Argument(metavar="RUN", help="The run.")],
    url: Url,
    verify: Annotated[
        bool, typer.Option("--verify", help="Read back what is there, and write again what is damaged.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Bring RUN, with the runs it was branched from and its sessions, to URL, from which other machines `pull` it.

    What is there already is not brought again, and nothing good there is replaced. Exit code 2 if both sides have
    written.
    """
    with readable_errors():
        done = Store(store).push(run, url, verify=verify)
    _print(done, as_json=as_json)


@app.command("pull")
def pull(
    url: Url,
    store: StorePath,
    run: Annotated[str | None, typer.Argument(metavar="[RUN]", help="The run; all that are there by default.")] = None,
    verify: Annotated[
        bool, typer.Option("--verify", help="Read what is here, and bring again what is damaged.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Bring RUN, with the runs it was branched from and its sessions, from URL into STORE, to go on bit for bit.

    URL is a place that was pushed to, or the archive of a store that was lost. Nothing good here is replaced; what is
    gone or cut here is put right. Exit code 2 if both sides have written, or some of it is damaged there: then all else
    was brought.
    """
    with readable_errors():
        done = Store(store).pull(url, run, verify=verify)
    _print(done, as_json=as_json)


def _print(done: list[Transfer], *, as_json: bool) -> None:
    if as_json:
        print_json([dataclasses.asdict(each) for each in done])
        return
    for each in done:
        repaired = f", {each.repaired} that were damaged put right" if each.repaired else ""
        told = f"{presentation.count(each.commits, 'commit')}, {presentation.size(each.nbytes)}{repaired}"
        sessions = f"; sessions {presentation.printable(', '.join(each.sessions))}" if each.sessions else ""
        console().print(f"{each.run or 'without a run'}: {told}{sessions}", soft_wrap=True)
