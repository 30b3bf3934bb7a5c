"""Commands on recordings of hardware in the loop: `session list`, `show`, `plot`, `export`, `close`, `remove`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from simckpt import presentation
from simckpt.cli.application import AsJson, StorePath, app, readable_errors
from simckpt.cli.printing import console, print_json, short, table
from simckpt.errors import ConfigurationError
from simckpt.presentation import printable
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
    """List the sessions of STORE, in the order in which they were begun."""
    with readable_errors():
        found = [_facts(session) for session in Store(store).sessions()]
    if as_json:
        print_json(found)
        return
    shown = table("session", "begun (UTC)", "rows", "seconds", "snapshots", "status", "origin")
    for facts in found:
        origin = facts["origin"]
        shown.add_row(
            facts["name"],
            presentation.moment(facts["created"]),
            f"{facts['rows']:,}",
            f"{facts['seconds']:.1f}",
            str(len(facts["snapshots"])),
            printable(facts["status"]),
            "" if origin is None else f"{origin['run']}@{origin['step']}",
        )
    console().print(shown)


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
        "rows": f"{facts['first']:,} to {facts['first'] + facts['rows'] - 1:,}" if facts["rows"] else "none",
        "lost rows": ", ".join(f"{start:,} to {stop - 1:,}" for start, stop in facts["missing"]),
        "seconds": f"{facts['seconds']:.1f}",
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
    start: Start = None,
    stop: Stop = None,
) -> None:
    """Draw a session as one HTML page: commands and readings, delays, step times, contact forces; or these SERIES."""
    with readable_errors():
        from simckpt.plots import session as drawing

        session = Store(store).session(name)
        page = drawing.page(session, series or (), start=start, stop=stop)
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
            from simckpt.hardware.video import export_video, made_env

            if env is None:
                raise ConfigurationError(
                    "a video is rendered from a replay: say what makes the env, --env MODULE:FUNCTION"
                )
            export_video(session, made_env(env), target, start=start, stop=stop)
    print(f"{target}: {session!r}")


@commands.command("close")
def close(store: StorePath, name: Name) -> None:
    """Close a session whose recorder was killed with all its processes: its parts are merged, its end is noted."""
    with readable_errors():
        from simckpt.storage.session_writing import SessionWriter

        opened = Store(store)
        session = opened.session(name)
        if session.closed is None:
            with SessionWriter(opened.files.path, name) as writer:
                writer.close("killed")
    print(f"{session!r}")


@commands.command("remove")
def remove(store: StorePath, name: Name) -> None:
    """Remove a session that nobody records, with all it holds; the checkpoint that was driving may be pruned then."""
    with readable_errors():
        from simckpt.storage.session_writing import remove_session

        remove_session(Store(store).files.path, name)
    print(f"{printable(name)}: removed")


def _facts(session: Session) -> dict[str, Any]:
    rows, closed, origin = session.rows, session.closed, session.origin
    return {
        "name": session.name,
        "id": session.id,
        "created": session.created,
        "status": session.status,
        "reason": "" if closed is None else closed.text,
        "mode": session.mode,
        "first": rows.start,
        "rows": len(rows) - sum(map(len, session.missing)),
        "missing": [[each.start, each.stop] for each in session.missing],
        "seconds": session.duration,
        "snapshots": [each.row for each in session.snapshots],
        "links": [
            {"name": each.name, "command": each.command, "reading": each.reading, "transport": each.transport}
            for each in session.links
        ],
        "origin": None if origin is None else dict(vars(origin)),
        "env": dict(session.env),
        "host": session.host,
        "versions": dict(session.versions),
    }


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
