"""Commands on recordings of hardware in the loop: `session list`, `show`, `plot`, `export`, `close`, `remove`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from simckpt import presentation
from simckpt.cli.application import AsJson, StorePath, app, readable_errors
from simckpt.cli.printing import console, print_json, short, table
from simckpt.errors import ConfigurationError, SessionNotFoundError, StoreError
from simckpt.presentation import printable
from simckpt.storage.sessions import session_names
from simckpt.store import Store

if TYPE_CHECKING:
    from simckpt.hardware.session import Session

commands = typer.Typer(no_args_is_help=True, help="Recordings of hardware in the loop: look at them, export, close.")
app.add_typer(commands, name="session")

Name = Annotated[str, typer.Argument(metavar="NAME", help="The session.")]
Start = Annotated[int | None, typer.Option(metavar="ROW", help="The first row.")]
Stop = Annotated[int | None, typer.Option(metavar="ROW", help="One behind the last row.")]

FORMS = ("mcap", "minari", "video")
_SUFFIXES = {".mcap": "mcap", ".mp4": "video", ".gif": "video"}
_SHOWN = 20  # lines of one sort


@commands.command("list")
def list_sessions(store: StorePath, as_json: AsJson = False) -> None:
    """List the sessions of STORE, in the order in which they were begun.

    Damaged ones are listed as such and hide no others. Exit code 0: listed; 2: STORE cannot be read.
    """
    with readable_errors():
        found = _listed(Store(store))
    if as_json:
        print_json(found)
        return
    shown = table("session", "begun (UTC)", "rows", "seconds", "snapshots", "size", "status", "origin", "marks")
    for facts in found:
        if "damaged" in facts:
            continue
        origin = facts["origin"]
        shown.add_row(
            facts["name"],
            presentation.moment(facts["created"]),
            f"{facts['rows']:,}",
            f"{facts['seconds']:.1f}",
            str(len(facts["snapshots"])),
            presentation.size(facts["nbytes"]),
            printable(facts["status"]),
            "" if origin is None else f"{origin['run']}@{origin['step']}",
            _marks(facts),
        )
    screen = console()
    screen.print(shown)
    for facts in found:
        if "damaged" in facts:
            screen.print(f"{facts['name']}  damaged: {printable(facts['damaged'])}", soft_wrap=True)


@commands.command("show")
def show(store: StorePath, name: Name, as_json: AsJson = False) -> None:
    """Show one session: what it knows of itself, how regular its steps were, what became of commands and readings."""
    with readable_errors():
        session = Store(store).session(name)
        facts, statistics, events = _facts(session), session.statistics(), session.events
        series = _series_of(session)
    if as_json:
        print_json(facts | {"statistics": statistics, "events": [vars(event) for event in events], "series": series})
        return
    screen = console()
    screen.print(f"session {facts['name']}, {facts['id']}")
    origin = facts["origin"]
    lines = {
        "begun (UTC)": presentation.moment(facts["created"]),
        "status": f"{facts['status']} {facts['reason']}".strip(),
        "rows": f"{facts['first']:,} to {facts['stop'] - 1:,}" if facts["rows"] else "none",
        "lost rows": ", ".join(f"{start:,} to {stop - 1:,}" for start, stop in facts["missing"]),
        "not known": "" if facts["end_known"] else "whether rows behind the last one were lost",
        "missing": "; ".join(facts["absent"]),
        "seconds": f"{facts['seconds']:.1f}",
        "size": presentation.size(facts["nbytes"]),
        "marks": _marks(facts),
        "origin": "" if origin is None else f"{origin['run']}@{origin['step']}, {short(origin['checkpoint'])}",
        "env": str(facts["env"].get("id", "")),
        "snapshots at": ", ".join(f"{row:,}" for row in facts["snapshots"][:_SHOWN]),
        "rate": f"{statistics['rate']:.1f} rows/s",
        "step": _quantiles(statistics["step"]),
        "period": _quantiles(statistics["period"]),
    }
    for link, each in statistics["links"].items():
        told = ", ".join(f"{each[what]:,} {what}" for what in ("commands", "readings", "lost", "late"))
        lines[f"link {link}"] = f"{told}; delay beyond the quickest {_quantiles(each['delay'])}"
    for label, value in lines.items():
        if value:
            screen.print(f"  {printable(label):<16} {printable(value)}", soft_wrap=True)
    for event in events[:_SHOWN]:
        moment = (event.monotonic - session.started) / 1e9
        screen.print(
            f"  {moment:>10.3f} s, row {event.row:,}: {printable(f'{event.kind}: {event.text}')}", soft_wrap=True
        )
    screen.print(f"  time series: {printable(', '.join(series))}", soft_wrap=True)


@commands.command("plot")
def plot(
    store: StorePath,
    name: Name,
    series: Annotated[
        list[str] | None, typer.Argument(metavar="[SERIES]...", help="Such as observation[0]; see `session show`.")
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="A new HTML file; NAME.html by default.")
    ] = None,
    env: Annotated[
        str | None,
        typer.Option(metavar="MODULE:FUNCTION", help="What makes the env, or a Gymnasium id: for its contact forces."),
    ] = None,
    start: Start = None,
    stop: Stop = None,
) -> None:
    """Draw a session as one HTML page: commands and readings, delays, step times; or these SERIES.

    Contact forces are drawn where they were recorded, as the signal contact_force; with --env MuJoCo computes them in a
    replay, which sends nothing to a device.
    """
    with readable_errors():
        from simckpt.plots import session as drawing

        session = Store(store).session(name)
        made = None if env is None else _made(env)
        page = drawing.page(session, series or (), env=made, start=start, stop=stop)
        target = Path(f"{name}.html") if output is None else output
        _write(target, page)
    print(f"{target}: {len(page) / 1e6:.1f} MB")


@commands.command("export")
def export(
    store: StorePath,
    name: Name,
    path: Annotated[
        Path | None, typer.Argument(metavar="[FILE]", help="New; by default NAME.mcap, NAME-minari or NAME.mp4.")
    ] = None,
    to: Annotated[
        str | None, typer.Option(metavar="FORM", help="mcap, minari or video; by default what FILE ends in, or mcap.")
    ] = None,
    env: Annotated[
        str | None, typer.Option(metavar="MODULE:FUNCTION", help="What makes the env, for a video; or a Gymnasium id.")
    ] = None,
    dataset: Annotated[str | None, typer.Option(metavar="ID", help="Of a Minari data set; NAME-v0 by default.")] = None,
    start: Start = None,
    stop: Stop = None,
) -> None:
    """Write a session for other programs; nothing is replaced.

    mcap opens in Foxglove; minari is a folder of episodes that Minari opens; a video is rendered from a replay, which
    sends nothing to a device.
    """
    with readable_errors():
        form = _form(path, to)
        session = Store(store).session(name)
        target = path or Path({"mcap": f"{name}.mcap", "minari": f"{name}-minari", "video": f"{name}.mp4"}[form])
        if form == "mcap":
            from simckpt.hardware.mcap_export import export_mcap

            export_mcap(session, target, start=start, stop=stop)
        elif form == "minari":
            from simckpt.hardware.minari_export import export_minari

            if start is not None or stop is not None:
                raise ConfigurationError("a data set has whole episodes: no --start, no --stop", keys=["start", "stop"])
            export_minari(session, target, dataset=dataset)
        else:
            if not os.environ.get("DISPLAY"):
                # read when mujoco is imported, below
                os.environ.setdefault("MUJOCO_GL", "egl")
            from simckpt.hardware.video import export_video

            if env is None:
                raise ConfigurationError(
                    "a video is rendered from a replay: say what makes the env, --env MODULE:FUNCTION"
                )
            export_video(session, _made(env), target, start=start, stop=stop)
    print(f"{target}: {session!r}")


@commands.command("close")
def close(store: StorePath, name: Name) -> None:
    """Close a session whose recorder was killed with all its processes: its parts are merged, its end is noted."""
    with readable_errors():
        from simckpt.storage.session_ending import close_session

        opened = Store(store)
        session = opened.session(name)
        close_session(opened.files.path, name)
    print(f"{session!r}")


@commands.command("remove")
def remove(store: StorePath, name: Name) -> None:
    """Remove a session that nobody records, with all it holds; the checkpoint that was driving may be pruned then."""
    with readable_errors():
        from simckpt.storage.session_ending import remove_session

        remove_session(Store(store).files.path, name)
    print(f"{printable(name)}: removed")


def _listed(store: Store) -> list[dict[str, Any]]:
    """Returns what is known of each session, {"name", "damaged"} of those that cannot be trusted."""
    found = []
    for name in session_names(store.files.path):
        try:
            found.append(_facts(store.session(name)))
        except SessionNotFoundError:
            continue  # removed since it was listed
        except StoreError as error:
            found.append({"name": name, "damaged": str(error)})
    return sorted(found, key=lambda facts: (facts.get("created", float("inf")), facts["name"]))


def _facts(session: Session) -> dict[str, Any]:
    extent, closed, origin = session.extent, session.closed, session.origin
    rows = extent.rows
    return {
        "name": session.name,
        "id": session.id,
        "created": session.created,
        "status": session.status,
        "reason": "" if closed is None else closed.text,
        "mode": session.mode,
        "first": rows.start,
        "stop": rows.stop,
        "rows": extent.count,
        "missing": [[each.start, each.stop] for each in extent.missing],
        "end_known": closed is None or closed.rows is not None,
        "absent": session.absent,
        "seconds": extent.seconds,
        "snapshots": [each.row for each in session.snapshots],
        "links": [
            {"name": each.name, "command": each.command, "reading": each.reading, "transport": each.transport}
            for each in session.links
        ],
        "nbytes": session.nbytes,
        "tier": session.tier,
        "pinned": session.pinned,
        "origin": None if origin is None else dict(vars(origin)),
        "env": dict(session.env),
        "host": session.host,
        "versions": dict(session.versions),
    }


def _marks(facts: dict[str, Any]) -> str:
    return ", ".join(
        [*(["pinned"] if facts["pinned"] else []), *(["in the archive"] if facts["tier"] == "archive" else [])]
    )


def _made(env: str) -> Any:
    from simckpt.hardware.named_envs import made_env

    return made_env(env)


def _series_of(session: Session) -> list[str]:
    from simckpt.hardware.time_series import names_of

    return names_of(session)


def _quantiles(found: dict[str, float]) -> str:
    names = {"median": "median", "p99": "99 %", "p999": "99.9 %", "longest": "longest"}
    return ", ".join(f"{told} {1e3 * found[name]:.3g} ms" for name, told in names.items())


def _form(path: Path | None, to: str | None) -> str:
    form = _SUFFIXES.get(path.suffix.lower(), "mcap") if to is None and path is not None else to or "mcap"
    if form not in FORMS:
        raise ConfigurationError(f"a session is exported to one of {', '.join(FORMS)}, got {form!r}", keys=["to"])
    return form


def _write(path: Path, text: str) -> None:
    from simckpt.storage import durable, exports

    disk = durable.Disk()
    with exports.new_file(disk, path) as made:
        durable.write_record(disk, made, text.encode())
