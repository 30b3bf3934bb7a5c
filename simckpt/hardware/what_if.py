"""What another policy would have done from a moment of a session on, against a model of the device."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from simckpt.arguments import checked_whole
from simckpt.errors import ConfigurationError
from simckpt.hardware.arrivals import Statistics
from simckpt.hardware.connection import SimulatedConnection
from simckpt.hardware.differences import ReplayReport
from simckpt.hardware.link import Link, devices_out_of_reach
from simckpt.hardware.reading import Reading
from simckpt.hardware.session import NOTHING, READING, Session
from simckpt.hardware.session_tables import Array, needed
from simckpt.hardware.simulated import Model, Simulated
from simckpt.hardware.time_series import Excerpt, Series, link_table
from simckpt.hardware.timing import seconds
from simckpt.state.reseeding import reseed
from simckpt.state.tables import mapped

if TYPE_CHECKING:
    from simckpt.hardware.replay import Replay

Policy = Callable[[Any], Any]
Models = Model | Simulated | Mapping[str, Model | Simulated]

PERIOD = 0.002  # of a session that has too few rows to show its own [s]


@dataclass(frozen=True)
class WhatIf(Excerpt):
    """What another policy would have done; its tables are those of a session, and `series` takes it for one.

    Attributes:
        start: the first row that is another.
        recorded: the same rows as they were.
        way: the report of the replay that led to `start`.
        ended: whether the episode ended, so that there may be fewer rows than were asked for.
    """

    start: int
    recorded: Excerpt
    way: ReplayReport
    ended: bool

    @property
    def rows(self) -> range:
        """The numbers of its rows."""
        return range(self.start, self.start + len(self.tables["rows"]["row"]))

    @property
    def total_reward(self) -> float:
        """The sum of its rewards."""
        return float(np.sum(self.tables["rows"]["reward"]))

    def told(self) -> str:
        """Returns a line about it for people."""
        then = self.recorded.tables.get("rows", {}).get("reward", np.zeros(0))
        end = ", the episode ended" if self.ended else ""
        exact = "" if self.way.exact else "; the way to it was NOT exact"
        return (
            f"{len(self.rows):,} rows{end}; sum of rewards {self.total_reward:.6g}, recorded "
            f"{float(np.sum(then)):.6g} in {len(then):,} rows{exact}"
        )

    def __repr__(self) -> str:
        return f"<WhatIf of session {self.name!r} from row {self.start:,} on: {self.told()}>"


class _Modelled:
    """A model in the place of a device: what answers a link."""

    def __init__(self, device: Simulated, link: Link, started: int) -> None:
        self._connection = SimulatedConnection(device, link.reading, Statistics())
        self._device = device
        self._started, self._before = started, device.time
        self._sequence = link.next_sequence

    def send(self, values: Array) -> int:
        self._device.send(values)
        self._sequence += 1
        return self._sequence - 1

    def receive(self, timeout: float) -> Reading | None:
        found = self._connection.receive(timeout)
        if found is None:
            return None
        message, _ = found
        return Reading(message.values, message.sequence, message.monotonic, self.time(), 0)

    def time(self) -> int:
        return self._started + self._device.time - self._before


class _Notebook:
    """Notes what a link sends and receives."""

    def __init__(self, clock: Callable[[], int], row: Callable[[], int]) -> None:
        self._clock, self._row = clock, row
        self._commands: list[tuple[Any, ...]] = []
        self._readings: list[tuple[Any, ...]] = []

    def sent(self, link: Link, sequence: int, values: Array, monotonic: int, wall: int) -> None:
        self._commands.append((self._row(), sequence, self._clock(), values))

    def received(self, link: Link, reading: Reading | None, monotonic: int, wall: int) -> None:
        nothing = (self._row(), NOTHING, 0, -1, self._clock(), np.full(len(link.reading), np.nan))
        self._readings.append(
            nothing
            if reading is None
            else (self._row(), READING, reading.sequence, reading.device_time, self._clock(), reading.values)
        )

    def timed(self, link: Link, monotonic: int, wall: int) -> None:
        pass

    def tables(self, link: Link) -> tuple[dict[str, Array], dict[str, Array]]:
        """Returns the tables of commands and readings."""
        sent = _table(self._commands, ("row", "sequence", "monotonic"), len(link.command))
        return sent, _table(self._readings, ("row", "kind", "sequence", "device_time", "received"), len(link.reading))


def _table(lines: list[tuple[Any, ...]], names: tuple[str, ...], width: int) -> dict[str, Array]:
    columns = list(zip(*lines, strict=True)) or [()] * (len(names) + 1)
    found: dict[str, Array] = {name: np.array(column, np.int64) for name, column in zip(names, columns, strict=False)}
    return {**found, "values": np.array(columns[-1], np.float64).reshape(-1, width)}


def play_what_if(
    replay: Replay,
    policy: Policy,
    *,
    model: Models | None,
    start: int,
    steps: int,
    seed: int | None,
    lead: int,
) -> WhatIf:
    """Returns what another policy would have done; see `Replay.what_if`."""
    session = replay.session
    steps, lead = checked_whole("steps", steps, least=1), checked_whole("lead", lead)
    if not callable(policy):
        raise ConfigurationError(f"a policy is called as policy(observation), got {policy!r}", keys=["policy"])
    seed = None if seed is None else checked_whole("seed", seed)
    period = period_of(session)
    devices = _devices(replay, model, period)
    way = replay.go_to(start)
    if seed is not None:
        saved = replay.capture()
        reseed(saved, f"what if {seed}")
        replay.apply(saved)
    clock = _Clock(_time_of(session, start), round(period * 1e9))
    notebooks = {name: _Notebook(clock.now, lambda: clock.row) for name in replay.links}
    clock.row = start
    try:
        for name, link in replay.links.items():
            if name in devices:
                with devices_out_of_reach():
                    _lead(session, devices[name], name, start - lead, start)
                link.source = _Modelled(devices[name], link, clock.started)
            link.observer = notebooks[name]
        rows, ended = _roll(replay, policy, clock, steps)
    finally:
        replay.take_links()
        # where the env stands now is in no record
        replay.row = None
    tables: dict[str, Any] = {"rows": rows, "commands": {}, "readings": {}}
    for name, link in replay.links.items():
        tables["commands"][name], tables["readings"][name] = notebooks[name].tables(link)
    recorded = Excerpt(
        session.name, session.started, session.links, session.read(start=start, stop=start + len(rows["row"]))
    )
    return WhatIf(session.name, session.started, session.links, tables, start, recorded, way, ended)


@dataclass
class _Clock:
    """The time of a what-if: a row takes as long as it usually did."""

    started: int  # [ns]
    period: int  # [ns]
    row: int = 0
    first: int = 0

    def now(self) -> int:
        return self.started + (self.row - self.first) * self.period


def _roll(replay: Replay, policy: Policy, clock: _Clock, steps: int) -> tuple[dict[str, Any], bool]:
    """Returns the table of rows, and whether the episode ended."""
    clock.first = clock.row
    lines: list[dict[str, Any]] = []
    observation, ended = replay.observation, False
    usual = _usual_action(replay.session, clock.row)
    while len(lines) < steps and not ended:
        with devices_out_of_reach():
            action = policy(observation)
        _check_action(action, usual)
        started = clock.now()
        with devices_out_of_reach():
            observation, reward, terminated, truncated, _ = replay.env.step(action)
        ended = bool(terminated or truncated)
        lines.append(
            {
                "row": np.int64(clock.row),
                "started": np.int64(started),
                "finished": np.int64(started + clock.period),
                "action": mapped_leaves(action),
                "observation": mapped_leaves(observation),
                "reward": np.asarray(reward),
                "terminated": np.bool_(terminated),
                "truncated": np.bool_(truncated),
            }
        )
        clock.row += 1
    replay.observation = observation
    return mapped(lambda *arrays: np.stack(arrays), *lines), ended


def _usual_action(session: Session, row: int) -> Any:
    """Returns the column of actions at a row, or before it; None if there is none."""
    for tables in session.chunks(["rows/action"], start=row - 1, stop=row + 1):
        if "rows" in tables:
            return needed(tables["rows"], "action")[0]
    return None


def _check_action(action: Any, usual: Any, place: str = "") -> None:
    """Raises ConfigurationError unless an action is made as those that were recorded; dtypes may differ."""
    if isinstance(usual, Mapping):
        fits = isinstance(action, Mapping) and {str(key) for key in action} == set(usual)
        pairs = [(f"{place}[{key!r}]", part, usual[str(key)]) for key, part in action.items()] if fits else []
    elif isinstance(usual, tuple):
        fits = isinstance(action, tuple) and len(action) == len(usual)
        pairs = [(f"{place}[{at}]", *each) for at, each in enumerate(zip(action, usual, strict=True))] if fits else []
    else:
        pairs, fits = [], usual is None or np.shape(action) == usual.shape[1:]
    if not fits:
        wanted = type(usual).__name__ if isinstance(usual, Mapping | tuple) else f"an array of shape {usual.shape[1:]}"
        raise ConfigurationError(
            f"the policy returned {str(action)[:80]!r}; an action{place} of this session is {wanted}", keys=["policy"]
        )
    for each in pairs:
        _check_action(each[1], each[2], each[0])


def mapped_leaves(tree: Any) -> Any:
    """Returns nested dicts and tuples with copies of the arrays, and arrays in place of numbers."""
    if isinstance(tree, Mapping):
        return {str(key): mapped_leaves(part) for key, part in tree.items()}
    if isinstance(tree, tuple):
        return tuple(mapped_leaves(part) for part in tree)
    return np.array(tree)


def _devices(replay: Replay, model: Models | None, period: float) -> dict[str, Simulated]:
    """Returns a copy of the model for each link that has one; a model that was recorded goes on by itself."""
    links = replay.links
    if model is None:
        given: Mapping[str, Any] = {}
    elif isinstance(model, Mapping):
        given = model
    else:
        given = dict.fromkeys(links, model) if len(links) == 1 else {}
    without = [name for name, link in links.items() if name not in given and not isinstance(link.transport, Simulated)]
    if without or not given.keys() <= links.keys() or (model is not None and not given):
        raise ConfigurationError(
            f"the links of the env are {', '.join(map(repr, links)) or 'none'}: give a model of the device for each, "
            f"model={{name: model}}, or one for the only link; got {model!r}",
            keys=["model"],
        )
    # one where a device was recorded is in no state that a replay restores
    own = {
        name: link.transport
        for name, link in links.items()
        if isinstance(link.transport, Simulated) and name not in replay.simulated
    }
    return {name: _device(each, period) for name, each in {**own, **given}.items()}


def _device(model: Model | Simulated, period: float) -> Simulated:
    # a copy, so that the same question has the same answer every time
    model = copy.deepcopy(model)
    return model if isinstance(model, Simulated) else Simulated(model, period=period)


def _lead(session: Session, device: Simulated, link: str, start: int, stop: int) -> None:
    """Lets a model hear what was sent in some rows, so that it is where the device was."""
    if start < stop:
        for values in link_table(session, "command", link, start=max(start, 0), stop=stop)["values"]:
            device.send(values)
            while device.receive(0.0) is not None:
                pass


def period_of(session: Session) -> float:
    """Returns how far apart the rows of a session usually began [s]."""
    (begun,) = needed(session.read(["rows/started"]).get("rows"), "started")
    return float(np.median(np.diff(begun))) / 1e9 if len(begun) > 1 else PERIOD


def _time_of(session: Session, row: int) -> int:
    """Returns when a row began, or the last thing before it ended [ns]."""
    rows = session.read(["rows/finished"], start=max(row - 1, 0), stop=row + 1).get("rows")
    (finished,) = needed(rows, "finished")
    return int(finished[0]) if len(finished) else session.started


def model_readings(
    session: Session,
    model: Model | Simulated,
    value: str,
    *,
    link: str | None = None,
    start: int | None = None,
    stop: int | None = None,
) -> Series:
    """Returns what a model of the device would have answered to the recorded commands: one value of its readings.

    `plots.gap(session, model_readings(session, motor, "force"), "reading/motor/force")` shows how good the model is.

    Args:
        session: what was recorded.
        model: called as `Simulated` calls it, once for each command; a copy of it is used.
        value: the name of a value of the link's readings.
        link: its name; the only one by default.
        start: the first row.
        stop: one behind the last row.

    Raises:
        ConfigurationError: there is no such link or value, or the model returns no such readings.
        DamagedError: what was recorded cannot be trusted.
    """
    known = {each.name: each for each in session.links if link is None or each.name == link}
    chosen = next(iter(known.values())) if len(known) == 1 else None
    if chosen is None or value not in chosen.reading:
        there = ", ".join(f"{each.name} ({', '.join(each.reading)})" for each in session.links) or "none"
        raise ConfigurationError(
            f"session {session.name!r} has the links {there}; which reading is {value!r} of link {link!r}?",
            keys=["link", "value"],
        )
    sent = link_table(session, "command", chosen.name, start=start, stop=stop)
    device = _device(model, period_of(session))
    connection = SimulatedConnection(device, chosen.reading, Statistics())
    place = chosen.reading.index(value)
    times, rows, values = [], [], []
    for row, moment, command in zip(sent["row"].tolist(), sent["monotonic"].tolist(), sent["values"], strict=True):
        device.send(command)
        while (answer := connection.receive(0.0)) is not None:
            times.append(moment)
            rows.append(row)
            values.append(float(answer[0].values[place]))
    found = seconds(np.array(times, np.int64), session.started)
    return Series(f"model of {chosen.name}/{value}", found, np.array(rows, np.int64), np.array(values))
