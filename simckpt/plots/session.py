"""What happened in a session with a device: commands and readings, delays, step times, contact forces, gaps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from simckpt.errors import ConfigurationError, LeafNotFoundError
from simckpt.hardware import timing
from simckpt.hardware.session import Session
from simckpt.hardware.session_tables import needed
from simckpt.hardware.time_series import Recorded, Series, link_table, names_of, series, series_of
from simckpt.plots import figures

if TYPE_CHECKING:
    from simckpt.hardware.what_if import WhatIf

Array = np.ndarray[Any, Any]

PANEL = 170  # height of a panel [pixels]
MOST = 8  # panels, or lines in one of them
SECONDS = "since the start of the session [s]"
GAP = 10.0  # what lies further apart than so many usual intervals is not joined by a line


def commands_and_readings(
    session: Session, link: str | None = None, *, start: int | None = None, stop: int | None = None
) -> Any:
    """Returns a figure of what was sent to a device and what came back: a panel for each value, by its name.

    A line of readings is broken where none came; dashed lines mark what was noted beside the rows.

    Args:
        session: what was recorded.
        link: its name; the only one by default.
        start: the first row.
        stop: one behind the last row.

    Raises:
        ConfigurationError: there is no such link, or several and none was named; plotly is not installed.
        DamagedError: what was recorded cannot be trusted.
    """
    chosen = _chosen_link(session, link)
    values = list(dict.fromkeys([*chosen.command, *chosen.reading]))[:MOST]
    made = _panels(f"{session.name}: {chosen.name}", values, note=_note_of(session, start, stop))
    for kind, columns, color in (("command", chosen.command, 0), ("reading", chosen.reading, 1)):
        table = link_table(session, kind, chosen.name, start=start, stop=stop)
        for place, value in enumerate(values):
            if value in columns:
                found = series_of(session, kind, chosen, value, table)
                shape = "hv" if kind == "command" else "linear"
                _line(made, found, place, figures.color(color), name=kind, shape=shape, broken=kind == "reading")
    _mark_events(made, session, start, stop)
    return made


def delays(session: Session, link: str | None = None, *, start: int | None = None, stop: int | None = None) -> Any:
    """Returns a figure of how long readings were under way, and how far apart they arrived.

    The clock of a device is another one: shown is how much longer a reading took than the quickest ones, with the drift
    of the two clocks taken out.

    Args:
        session: what was recorded.
        link: its name; the only one by default.
        start: the first row.
        stop: one behind the last row.

    Raises:
        ConfigurationError, DamagedError: as `commands_and_readings`.
    """
    chosen = _chosen_link(session, link)
    table = link_table(session, "reading", chosen.name, start=start, stop=stop)
    rows, received, device_time = needed(table, "row", "received", "device_time")
    late = timing.delays(received, device_time) * 1e3
    seconds, apart = timing.seconds(received, session.started), np.diff(received) / 1e6
    note = (
        f"{len(late):,} readings; longer than the quickest: median {_quantile(late, 0.5)}, 99 % {_quantile(late, 0.99)}"
    )
    panels = ["delay beyond the quickest [ms]", "between two readings [ms]"]
    made = _panels(f"{session.name}: readings of {chosen.name}", panels, note=note)
    _line(made, Series("delay", seconds, rows, late), 0, figures.color(0), mode="markers")
    _line(made, Series("interval", seconds[1:], rows[1:], apart), 1, figures.color(1), mode="markers")
    made.update_layout(showlegend=False)
    _mark_events(made, session, start, stop)
    return made


def step_times(session: Session, *, start: int | None = None, stop: int | None = None) -> Any:
    """Returns a figure of how long steps took, and how far apart they began; snapshots are marked.

    Args:
        session: what was recorded.
        start: the first row.
        stop: one behind the last row.

    Raises:
        ConfigurationError: plotly is not installed.
        DamagedError: what was recorded cannot be trusted.
    """
    rows = session.read(["rows/row", "rows/started", "rows/finished"], start=start, stop=stop).get("rows")
    numbers, begun, ended = needed(rows, "row", "started", "finished")
    seconds, took, apart = timing.seconds(begun, session.started), (ended - begun) / 1e6, np.diff(begun) / 1e6
    note = f"{len(begun):,} steps; apart: median {_quantile(apart, 0.5)}, 99.9 % {_quantile(apart, 0.999)}"
    made = _panels(f"{session.name}: steps", ["a step took [ms]", "between two beginnings [ms]"], note=note)
    _line(made, Series("duration", seconds, numbers, took), 0, figures.color(0), mode="markers")
    _line(made, Series("interval", seconds[1:], numbers[1:], apart), 1, figures.color(1), mode="markers")
    for snapshot in session.snapshots:
        if (start is None or snapshot.row >= start) and (stop is None or snapshot.row < stop):
            moment = (snapshot.monotonic - session.started) / 1e9
            _mark(made, moment, figures.MUTED, "dot")
    made.update_layout(showlegend=False)
    _mark_events(made, session, start, stop)
    return made


def contact_forces(session: Recorded, env: Any = None, *, start: int | None = None, stop: int | None = None) -> Any:
    """Returns a figure of the signal "contact_force": its largest parts, or its only one.

    Where nobody recorded it, a replay in `env` has the same forces, to the last bit of a session that repeats exactly;
    nothing is sent to a device.

    Args:
        session: what was recorded, or what `Replay.measure` made of it.
        env: built as it was for the recording, for a session without the signal.
        start: the first row.
        stop: one behind the last row.

    Raises:
        LeafNotFoundError: it was not recorded, and there is no `env`.
        ConfigurationError: the env has no MuJoCo simulation, or as for a `Replay`; plotly is not installed.
        StateMismatchError: the session is of another env.
    """
    figures.graph_objects()
    if env is not None and isinstance(session, Session) and "contact_force" not in session.record.signals:
        from simckpt.hardware.contacts import contact_force
        from simckpt.hardware.replay import Replay

        with Replay(session, env) as replay:
            session = replay.measure({"contact_force": contact_force}, start, stop)
    names = [name for name in names_of(session) if name.partition("[")[0] == "signals/contact_force"]
    if not names:
        raise LeafNotFoundError(
            f"session {session.name!r} has no signal 'contact_force'; with env= a replay has the forces, "
            "`simckpt session plot --env MODULE:FUNCTION`"
        )
    found = [series(session, name, start=start, stop=stop) for name in names]
    found.sort(key=lambda each: -float(np.nanmax(np.abs(each.values), initial=0)))
    shown = found[:MOST]
    note = "" if len(shown) == len(found) else f"the {len(shown)} largest of {len(found)}"
    made = figures.figure(f"{session.name}: contact forces", x=SECONDS, y="force [N]", note=note)
    for place, each in enumerate(shown):
        name = each.name.removeprefix("signals/contact_force") or "force"
        # rows that were lost, or could not be played
        gaps = np.flatnonzero(np.diff(each.rows) > 1) + 1
        seconds, values, rows = _opened(each.seconds, each.values, each.rows, gaps)
        drawn = Series(each.name, seconds, rows, values)
        _line(made, drawn, 0, figures.color(place), name=name)
    made.update_layout(showlegend=len(shown) > 1)
    return made


def gap(
    session: Recorded, simulated: str | Series, measured: str, *, start: int | None = None, stop: int | None = None
) -> Any:
    """Returns a figure of a simulated signal, a measured one, and how far they are apart.

    The difference is taken where something was measured; the simulated signal is interpolated linearly to there.

    Args:
        session: what was recorded.
        simulated: name of a time series, such as "observation[0]"; or one that was made otherwise, such as by
            `model_readings`.
        measured: name of the other one, such as "reading/motor/position".
        start: the first row.
        stop: one behind the last row.

    Raises:
        LeafNotFoundError: there is no such series.
        ConfigurationError: plotly is not installed.
    """
    figures.graph_objects()
    first = simulated if isinstance(simulated, Series) else series(session, simulated, start=start, stop=stop)
    second = series(session, measured, start=start, stop=stop)
    inside = np.zeros(len(second.seconds), bool)
    apart = np.empty(0)
    if len(first.seconds):
        inside = (second.seconds >= first.seconds[0]) & (second.seconds <= first.seconds[-1])
        apart = second.values[inside] - np.interp(second.seconds[inside], first.seconds, first.values)
    known = apart[np.isfinite(apart)]
    root = float(np.sqrt(np.mean(known**2))) if len(known) else float("nan")
    note = (
        f"measured less simulated: mean {known.mean() if len(known) else float('nan'):.4g}, root mean square {root:.4g}"
    )
    made = _panels(f"{session.name}: {first.name} and {second.name}", ["", "difference"], note=note)
    _line(made, first, 0, figures.color(0), name=f"simulated: {first.name}")
    _line(made, second, 0, figures.color(1), name=f"measured: {second.name}", broken=True)
    difference = Series("difference", second.seconds[inside], second.rows[inside], apart)
    _line(made, difference, 1, figures.color(2), name="difference", broken=True)
    return made


def what_if(found: WhatIf, names: Sequence[str] | None = None) -> Any:
    """Returns a figure of what another policy would have done, over what was recorded.

    Args:
        found: what `Replay.what_if` returned.
        names: of the time series; by default the commands, or the action, and the first of the observation, and the
            reward.

    Raises:
        LeafNotFoundError: there is no such series.
        ConfigurationError: plotly is not installed.
    """
    figures.graph_objects()
    if names is None:
        there = names_of(found)
        commands = [name for name in there if name.startswith("command/")]
        acted = commands or [name for name in there if name.startswith("action")]
        seen = [name for name in there if name.startswith("observation")]
        names = [*acted[:2], *seen[:4], "reward"]
    made = _panels(f"{found.name}: what if, from row {found.start:,} on", list(names), note=found.told())
    for place, name in enumerate(names):
        for source, label, color in (
            (found.recorded, "recorded", figures.MUTED),
            (found, "what if", figures.COLORS[1]),
        ):
            each = series(source, name)
            shape = "hv" if name.startswith(("command/", "action")) else "linear"
            _line(made, each, place, color, name=label, shape=shape, broken=name.startswith("reading/"))
    return made


def time_series(session: Recorded, names: Sequence[str], *, start: int | None = None, stop: int | None = None) -> Any:
    """Returns a figure of time series, a panel for each.

    Args:
        session: what was recorded, or a `WhatIf`.
        names: as `simckpt.hardware.series` takes them, such as "observation[0]".
        start: the first row.
        stop: one behind the last row.

    Raises:
        LeafNotFoundError: there is no such series; the message lists those that there are.
        ConfigurationError: plotly is not installed.
    """
    figures.graph_objects()
    made = _panels(session.name, list(names))
    for place, name in enumerate(names):
        found = series(session, name, start=start, stop=stop)
        shape = "hv" if name.startswith(("command/", "action")) else "linear"
        _line(made, found, place, figures.color(place), shape=shape, broken=name.startswith("reading/"))
    made.update_layout(showlegend=False)
    return made


def page(
    session: Session,
    names: Sequence[str] = (),
    *,
    env: Any = None,
    start: int | None = None,
    stop: int | None = None,
) -> str:
    """Returns an HTML page that needs nothing else: the figures of a session, or those of some time series.

    Args:
        session: what was recorded.
        names: of time series; without any, all other figures that the session has something for.
        env: built as it was for the recording: with it the contact forces are shown also where nobody recorded them.
        start: the first row.
        stop: one behind the last row.

    Raises:
        LeafNotFoundError: there is no such series.
        ConfigurationError: plotly is not installed.
    """
    if names:
        made = [time_series(session, names, start=start, stop=stop)]
    else:
        made = [commands_and_readings(session, link.name, start=start, stop=stop) for link in session.links]
        made += [delays(session, link.name, start=start, stop=stop) for link in session.links if link.reading]
        made.append(step_times(session, start=start, stop=stop))
        if env is not None or "contact_force" in session.record.signals:
            made.append(contact_forces(session, env, start=start, stop=stop))
    return figures.page(f"session {session.name}", made)


def _chosen_link(session: Recorded, name: str | None) -> Any:
    figures.graph_objects()
    known = {link.name: link for link in session.links}
    if name is None and len(known) == 1:
        return next(iter(known.values()))
    if name is None or name not in known:
        asked = "no link" if not known else f"the links {', '.join(map(repr, known))}"
        named = "" if name is None else f", none called {name!r}"
        raise ConfigurationError(f"session {session.name!r} has {asked}{named}: name one of them", keys=["link"])
    return known[name]


def _panels(title: str, names: Sequence[str], *, note: str = "") -> Any:
    """Returns a figure of panels, one below the other over the same time, each with the title of its vertical axis."""
    count = max(len(names), 1)
    made = figures.figure(title, x=SECONDS, y="", height=120 + PANEL * max(count, 2), note=note)
    axis = made.layout.yaxis.to_plotly_json()
    gap_between = 0.08 / count
    for place, name in enumerate(names or [""]):
        top = 1 - place / count
        own = {
            **axis,
            "domain": [max(top - 1 / count + gap_between, 0), top],
            "title": figures.text(name),
            "anchor": "x",
        }
        own["title_font_size"] = 11
        made.update_layout({f"yaxis{place + 1 if place else ''}": own})
    made.update_xaxes(anchor=f"y{count if count > 1 else ''}")
    made.update_layout(legend={"y": -0.14 * 2 / max(count, 2)}, hovermode="closest")
    return made


def _line(
    made: Any,
    found: Series,
    panel: int,
    color: str,
    *,
    name: str = "",
    shape: str = "linear",
    mode: str = "lines",
    broken: bool = False,
) -> None:
    x, y, rows = found.seconds, found.values, found.rows.astype(np.float64)
    if broken:
        x, y, rows = _broken(x, y, rows)
    kept, drawn = figures.thinned(np.arange(len(x)), y)
    label = name or found.name
    made.add_trace(
        figures.graph_objects().Scatter(
            x=x[kept],
            y=drawn,
            mode=mode,
            name=figures.text(label),
            legendgroup=label,
            showlegend=not any(trace.legendgroup == label for trace in made.data),
            line={"color": color, "width": 1.6, "shape": shape},
            marker={"color": color, "size": 4, "opacity": 0.6},
            yaxis=f"y{panel + 1 if panel else ''}",
            customdata=rows[kept],
            hovertemplate="%{x:.4f} s, row %{customdata:,.0f}: %{y:.6g}<extra>" + figures.text(label) + "</extra>",
        )
    )


def _broken(x: Array, y: Array, rows: Array) -> tuple[Array, Array, Array]:
    """Returns a curve with a gap wherever two points lie much further apart than usual."""
    apart = np.diff(x)
    if not len(apart):
        return x, y, rows
    # the mean, for what comes in bursts has a median of almost nothing
    return _opened(x, y, rows, np.flatnonzero(apart > GAP * float(apart.mean())) + 1)


def _opened(x: Array, y: Array, rows: Array, gaps: Array) -> tuple[Array, Array, Array]:
    """Returns a curve with a gap before each of some points."""
    return np.insert(x, gaps, x[gaps]), np.insert(y.astype(np.float64), gaps, np.nan), np.insert(rows, gaps, rows[gaps])


def _mark_events(made: Any, session: Session, start: int | None, stop: int | None) -> None:
    events = [
        each for each in session.events if (start is None or each.row >= start) and (stop is None or each.row < stop)
    ]
    middle = session.duration / 2
    for event in events[:MOST]:
        moment = (event.monotonic - session.started) / 1e9
        _mark(made, moment, figures.ALARM, "dash")
        made.add_annotation(
            x=moment,
            y=1,
            yref="paper",
            yanchor="bottom",
            # inwards, for a text makes the axis longer
            xanchor="right" if moment > middle else "left",
            text=figures.text(f"{event.kind}: {event.text}"[:60]),
            showarrow=False,
            font_size=10,
        )


def _mark(made: Any, moment: float, color: str, dash: str) -> None:
    """Adds a vertical line through all panels."""
    line = {"color": color, "width": 1.2, "dash": dash}
    made.add_shape(type="line", x0=moment, x1=moment, y0=0, y1=1, yref="paper", line=line)


def _note_of(session: Session, start: int | None, stop: int | None) -> str:
    if start is None and stop is None:
        return f"{len(session.rows):,} rows, {session.duration:.1f} s, {session.status}"
    return f"rows {'' if start is None else f'{start:,}'} to {'the end' if stop is None else f'{stop - 1:,}'}"


def _quantile(values: Array, share: float) -> str:
    known = values[np.isfinite(values)]
    return f"{float(np.quantile(known, share)):.3g} ms" if len(known) else "unknown"
