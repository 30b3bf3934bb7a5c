"""Plays a session again without the device: the simulation repeats bit for bit, or it is said where it does not."""

from __future__ import annotations

import contextlib
import warnings
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import gymnasium as gym
import mujoco
import numpy as np

from simckpt import provenance, state
from simckpt.arguments import checked_whole
from simckpt.errors import ConfigurationError, DamageWarning, SimckptError, StateMismatchError, VersionWarning
from simckpt.hardware.all_links import disarm_others
from simckpt.hardware.calls import Call, calls, entry_of
from simckpt.hardware.columns import number
from simckpt.hardware.differences import Differences, ReplayDifference, ReplayReport, compare, without_models
from simckpt.hardware.held_links import links_of
from simckpt.hardware.link import Link, devices_out_of_reach
from simckpt.hardware.measuring import Signals, measured
from simckpt.hardware.playable_rows import PlayableRows
from simckpt.hardware.recorder import Recorder
from simckpt.hardware.reset_arguments import UNKNOWN, options_of, seed_of
from simckpt.hardware.session import TIME, Session
from simckpt.hardware.simulated import Simulated
from simckpt.hardware.tape import SENT, Tape
from simckpt.hardware.time_series import Excerpt
from simckpt.hardware.what_if import Models, Policy, WhatIf, play_what_if
from simckpt.sim.environment import StandaloneEnvHandle
from simckpt.sim.loading import load_or_put_back
from simckpt.storage.session_records import SnapshotRecord

Tree = Any
SIMULATED = "simulated"  # the address of a link with a model in place of a device


class Replay:
    """Plays stretches of a session: from the nearest snapshot before, with the recorded actions and readings.

    From its construction to its end the env's links are in the hands of the replay: no connection is opened or used,
    nothing is ever sent to a device, also by steps of your own in between; afterwards the links are disarmed. So is
    every other link of the process that no recorder has, once, when the replay is made: the env may hold one where
    nobody finds it, such as in a closure or as a global; `link.arm()` where another device is to go on. Where a
    model was recorded in place of a device (`Simulated`), it is part of the env, and is played again itself; where a
    device was, the env may have any link of that name and those values, a `Simulated` as well.

    In the thread that plays, the env cannot reach a device by other links either, which the session does not know: that
    raises LinkDisarmedError. Threads that the env starts, and devices that it reaches without a `Link`, are out of the
    replay's sight: build the env without them. One that speaks to its device while it is made has done so before there
    is a replay; make it within `simckpt.hardware.link.devices_out_of_reach()`, as the command line does.

    Args:
        session: what was recorded.
        env: built as it was for the recording, without the `Recorder`; it is reset once, and from then on stepped.
        links: in place of those that are found in the env, if the recorder was given some.

    Attributes:
        session: what was recorded.
        env: stands before the row `row`.
        row: that comes next; None before anything was played.
        observation: the last one.
        info: the last one.
        begun: when the last row that was played began in the session [ns, the recorder's monotonic clock].
        links: of the env, by name.
        simulated: names of those that had a model in place of a device when they were recorded.

    Raises:
        ConfigurationError: the env has a recorder, or other links than the session.
        UnsupportedStateError: the env cannot be captured.

    Warns:
        DamageWarning: snapshots or models of the session are missing; the rest is played.
        VersionWarning: recorded with other versions of libraries, or on another kind of machine.
    """

    def __init__(self, session: Session, env: gym.Env[Any, Any], *, links: Mapping[str, Link] | None = None) -> None:
        self.session = session
        self.env = env
        self.row: int | None = None
        self.observation: Tree = None
        self.info: dict[str, Any] = {}
        self.begun = session.started
        self.links = _checked_links(session, env, links)
        if absent := session.absent:
            message = f"session {session.name!r}: {'; '.join(absent)}. What only these lead to is not played"
            warnings.warn(message, DamageWarning, stacklevel=2)
        self.simulated = {link.name for link in session.links if link.transport == SIMULATED}
        changed = provenance.version_differences(session.versions, provenance.versions())
        if changed:
            message = f"session {session.name!r} was recorded elsewhere, and may not repeat bit for bit: "
            warnings.warn(message + "; ".join(changed), VersionWarning, stacklevel=2)
        self._closed = False
        self._begin()
        self._tapes = {name: Tape(name, len(link.reading), self._note) for name, link in self.links.items()}
        self._taken: dict[str, tuple[Any, Any]] = {}
        for name, link in self.links.items():
            link.disarm()
            self._taken[name] = (link.observer, link.source)
        self.take_links()
        disarm_others(self.links.values())
        # what an env makes when it is reset is in the states of the record: it has to be here, too
        with contextlib.suppress(Exception), devices_out_of_reach():
            env.reset()
        self._handle = StandaloneEnvHandle(env, "env")

    def __enter__(self) -> Replay:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Gives the links back, disarmed: nothing is sent before `link.arm()`. Nothing is played afterwards."""
        self._closed = True
        for name, (observer, source) in self._taken.items():
            link = self.links[name]
            link.disarm()
            link.observer, link.source = observer, source
        self._taken = {}

    def take_links(self) -> None:
        """Puts the record in the place of every device."""
        for name, link in self.links.items():
            tape = self._tapes[name]
            # a model plays its part itself only where it did so when it was recorded
            simulated = isinstance(link.transport, Simulated) and name in self.simulated
            link.source, link.observer = (None, tape) if simulated else (tape, None)
            if simulated:
                # it reaches nobody
                link.arm()

    def go_to(self, row: int | None = None, *, seconds: float | None = None) -> ReplayReport:
        """Brings the env to the state before a row, and returns what was not repeated on the way.

        The nearest snapshot before is restored, and the rows from there on are played. Resets that came before the row
        are carried out.

        Args:
            row: its number; one behind the last row is the end of the session.
            seconds: instead: a moment, counted from the session's start [s]; its row is the one then in progress.

        Raises:
            ConfigurationError: neither or both are given, or no snapshot leads to that row (the message names those
                that there are); or the replay was closed.
            StateMismatchError: the session is of another env; the message lists what differs, and nothing was changed.
            StateMismatchError: also where the env raised on the way, and had not when it was recorded.
            DamagedError: what was recorded cannot be trusted.
        """
        self._begin()
        snapshot = self._playable.snapshot_for(row := self._row_of(row, seconds))
        for _ in self._play(snapshot, row):
            pass
        if self._raised:
            error = self._raised[0]
            raise StateMismatchError(
                f"session {self.session.name!r}: row {row} is not reached: at row {error.row} {error}, and had not "
                "when it was recorded"
            ) from error.__cause__
        return self._report([])

    def run(self, start: int | None = None, stop: int | None = None) -> ReplayReport:
        """Plays rows and compares: observations, rewards, flags, commands, and the full state at every later snapshot.

        What differs does not end it: the next row goes on from what the env made of this one. Rows that were lost are
        passed over, up to the next snapshot; so are those after a call that raised, then or now, or whose record is not
        whole, and the report says where that was.

        Args:
            start: the first row; by default that of the first snapshot. The rows from the snapshot before are played
                and compared as well.
            stop: one behind the last row; by default the end of the session.

        Raises:
            ConfigurationError: there are no such rows, or there is no snapshot to start from.
            StateMismatchError, DamagedError: as for `go_to`.
        """
        self._begin()
        there = self._playable
        wanted = there.wanted(start, stop)
        snapshot = there.leading_to(wanted.start) or there.first_in(wanted)
        if snapshot is not None:
            for _ in self._play(snapshot, wanted.stop):
                pass
        if snapshot is None or not any(map(len, self._played)):
            raise ConfigurationError(
                f"session {self.session.name!r} has no snapshot to play rows {wanted.start} to {wanted.stop - 1} from",
                keys=["start"],
            )
        before = there.there_in(range(wanted.start, snapshot.row))
        return self._report([*before, *there.missing_in(wanted)])

    def steps(self, start: int | None = None, stop: int | None = None) -> Iterator[int]:
        """Goes to a row, plays from there on, and yields the number of each row after it was played.

        Between two rows the env may be looked at, and rendered. Rows that `run` passes over are not yielded: those that
        were lost, and those behind them up to the next snapshot. Raises as `go_to`.

        Args:
            start: the first row; by default that of the first snapshot.
            stop: one behind the last row; by default the end of the session.
        """
        self._begin()
        if start is None:
            start = self._playable.first_row()
        wanted = self._playable.wanted(start, stop)
        for row in self._play(self._playable.snapshot_for(wanted.start), wanted.stop):
            if row >= wanted.start:
                yield row

    def measure(
        self,
        signals: Signals,
        start: int | None = None,
        stop: int | None = None,
    ) -> Excerpt:
        """Returns what nobody recorded: signals of the env after each row, from a replay. Raises as `go_to`.

        The table of rows has those that were played and no others, see `steps`; `differences` tells whether they were
        played exactly. No device is in reach of the functions.

        Args:
            signals: as for a `Recorder`: {name: function of the env and the step's info that returns numbers, of the
                same shape each time}, such as `{"contact_force": simckpt.hardware.contact_force}`.
            start: the first row; by default that of the first snapshot.
            stop: one behind the last row; by default the end of the session.

        Raises:
            ConfigurationError: a function returned no numbers, or some of another shape than before.
        """
        return measured(self, signals, start, stop)

    def what_if(
        self,
        policy: Policy,
        *,
        model: Models | None = None,
        start: int | None = None,
        seconds: float | None = None,
        steps: int = 500,
        seed: int | None = None,
        lead: int = 0,
    ) -> WhatIf:
        """Returns what another policy would have done from a moment on, against a model of the device.

        Time is that of the model: a row takes as long as it usually did, and nothing waits. The same call has the same
        result every time. The links stay in the hands of the replay, and no device is in reach of the policy and
        the model; play or go to another row afterwards.

        Args:
            policy: `policy(observation)` returns an action.
            model: `model(command, time)` as for `Simulated`, or a `Simulated`, of which a copy is used; for several
                links {name: model}. None: what the env itself has in the place of a device goes on.
            start: the first row that is another.
            seconds: instead: a moment, counted from the session's start [s].
            steps: so many rows, or fewer if the episode ends.
            seed: derives the env's random streams anew, so that noise is another; None: they go on as they were.
            lead: the model is first sent what was sent in so many rows before, to be where the device was.

        Raises:
            ConfigurationError: a link without a model, arguments that make no sense, or as `go_to`.
            StateMismatchError, DamagedError: as `go_to`.
        """
        row = self._row_of(start, seconds)
        return play_what_if(self, policy, model=model, start=row, steps=steps, seed=seed, lead=lead)

    @property
    def differences(self) -> tuple[ReplayDifference, ...]:
        """What was not repeated since the last call of `go_to`, `run`, `steps`, `measure` or `what_if` began."""
        return self._differences.all()

    @property
    def simulation(self) -> mujoco.MjData | None:
        """The first MuJoCo simulation of the env, as it is now; None if there is none."""
        found = self._handle.simulations.get("physics")
        return None if found is None else found.data

    def capture(self) -> Any:
        """Returns the state of the env."""
        with devices_out_of_reach():
            return self._handle.capture()

    def apply(self, saved: Any) -> None:
        """Restores a state of the env; its links stay in the hands of the replay."""
        with devices_out_of_reach():
            load_or_put_back(self._handle, saved, "env")
        self.take_links()

    # where to start

    def _row_of(self, row: int | None, seconds: float | None) -> int:
        if row is not None and seconds is None:
            return checked_whole("the number of a row", row, least=None)
        if row is None and seconds is not None:
            return self.session.row_at(seconds)
        raise ConfigurationError("give the number of a row or seconds=, one of them", keys=["row", "seconds"])

    def _begin(self) -> None:
        """Begins anew, with what is on the disk by now."""
        if self._closed:
            raise ConfigurationError(
                f"the replay of session {self.session.name!r} was closed, and its links are given back: make another"
            )
        self._playable = PlayableRows(self.session)
        self._differences = Differences()
        self._compared = 0
        self._played: list[range] = []
        self._passed_over: list[range] = []
        self._raised: list[_EnvRaised] = []
        self._first: SnapshotRecord | None = None

    def _report(self, skipped: list[range]) -> ReplayReport:
        skipped = sorted([*skipped, *self._passed_over], key=lambda each: each.start)
        rows = tuple(each for each in self._played if len(each))
        order = 0 if self._first is None else self._first.order
        breaks = self._playable.breaks_between(order, max((each.stop for each in (*rows, *skipped)), default=0))
        breaks += tuple(f"row {error.row:,}: {error}, and had not when it was recorded" for error in self._raised)
        # from there on, so told once
        threads = self._playable.threads_before(max((each.stop for each in rows), default=0))
        name, found = self.session.name, self._differences.all()
        return ReplayReport(name, rows, self._compared, found, tuple(skipped), breaks, threads)

    def _note(self, leaf: str, far: float | None) -> None:
        assert self.row is not None
        self._differences.note(self.row, leaf, far)

    # playing

    def _play(self, snapshot: SnapshotRecord, stop: int) -> Iterator[int]:
        """Restores a snapshot, plays the rows up to `stop`, and yields the number of each after it was played."""
        behind = [each for each in self._playable.snapshots if each.order > snapshot.order and each.row <= stop]
        later = deque(sorted(behind, key=lambda each: each.order))
        # behind each of them what was recorded goes on from another state: that of the next snapshot
        breaks = deque(each for each in self._playable.breaks if each.last > snapshot.order)
        played = known_from = snapshot.order
        for tape in self._tapes.values():
            tape.clear()
        self._restore(snapshot)

        def is_broken(order: int) -> bool:
            nonlocal known_from
            while breaks and breaks[0].first <= order:
                known_from = max(known_from, breaks.popleft().last)
            return played < known_from

        for call in calls(self.session, snapshot, stop, self._tapes):
            while later and later[0].order < call.order:
                each = later.popleft()
                if is_broken(each.order):
                    self._restore(each)
                else:
                    self._compare_state(each)
                played = each.order
            if is_broken(call.order):
                self._pass_over(call)
                continue
            self._play_loose(call.order)
            try:
                if call.reset:
                    self._reset(call)
                else:
                    self._step(call)
            except _EnvRaised as error:
                self._raised.append(error)
                self._pass_over(call)
                known_from = max(known_from, call.order)
                continue
            if not call.reset:
                self._played[-1] = range(self._played[-1].start, call.row + 1)
                yield call.row
        for each in later:
            if not is_broken(each.order):
                self._compare_state(each)

    def _pass_over(self, call: Call) -> None:
        for tape in self._tapes.values():
            tape.skip(call.order)
        if call.reset:
            return
        if self._passed_over and self._passed_over[-1].stop == call.row:
            self._passed_over[-1] = range(self._passed_over[-1].start, call.row + 1)
        else:
            self._passed_over.append(range(call.row, call.row + 1))

    def _restore(self, snapshot: SnapshotRecord) -> None:
        self._first = self._first or snapshot
        saved = self.session.snapshot(snapshot)
        self.apply(saved["env"])
        self.observation, self.row = saved["observation"], snapshot.row
        if not self._played or self._played[-1].stop != snapshot.row:
            self._played.append(range(snapshot.row, snapshot.row))
        for tape in self._tapes.values():
            tape.skip(snapshot.order)

    def _compare_state(self, snapshot: SnapshotRecord) -> None:
        self._play_loose(snapshot.order)
        recorded = self.session.snapshot(snapshot)["env"]
        for each in state.differences(recorded, without_models(self.capture(), recorded)):
            self._note(f"env/{each.path}", each.max_abs)
        self._compared += 1

    def _play_loose(self, order: int) -> None:
        """Does with the links what the loop did with them between calls of the env."""
        for name, tape in self._tapes.items():
            while (entry := tape.before(order)) is not None:
                tape.begin(entry.row, entry.monotonic)
                if entry.kind == SENT:
                    self.links[name].send(entry.values)
                elif entry.kind == TIME:
                    self.links[name].time()
                else:
                    self.links[name].receive()
                tape.end()

    def _step(self, call: Call) -> None:
        self.row = call.row
        with self._tapes_running(call):
            observation, reward, terminated, truncated, self.info = self.env.step(
                entry_of(call.table["action"], call.place)
            )
        # the record has these three as numpy's numbers, whatever the env gave
        numbers = {
            "reward": np.float64(number(reward, "the reward")),
            "terminated": np.bool_(number(terminated, "terminated")),
            "truncated": np.bool_(number(truncated, "truncated")),
        }
        for leaf, value in {"observation": observation, **numbers}.items():
            compare(entry_of(call.table[leaf], call.place), value, leaf, self._note)
        self.observation, self.row, self.begun = observation, call.row + 1, int(call.table["started"][call.place])

    def _reset(self, call: Call) -> None:
        self.row = call.row
        table, place = call.table, call.place
        text = str(table["options"][place])
        seed = seed_of(text, int(table["seed"][place]), seeded=bool(table["seeded"][place]))
        options = None if text == UNKNOWN else options_of(text)
        if text == UNKNOWN:
            self._note("reset/options", None)
        with self._tapes_running(call):
            self.observation, self.info = self.env.reset(seed=seed, options=options)
        compare(entry_of(table["observation"], place), self.observation, "reset/observation", self._note)

    @contextlib.contextmanager
    def _tapes_running(self, call: Call) -> Iterator[None]:
        for tape in self._tapes.values():
            tape.begin(call.row, call.finished)
        try:
            with devices_out_of_reach():
                yield
        except SimckptError:
            raise
        except Exception as error:
            self._note("error", None)
            text = f"the env's {'reset' if call.reset else 'step'} raised {type(error).__name__}: {error}"
            raise _EnvRaised(call.row, text) from error
        finally:
            for tape in self._tapes.values():
                tape.end()


class _EnvRaised(Exception):
    """The env raised in a call that had not raised when it was recorded."""

    def __init__(self, row: int, text: str) -> None:
        super().__init__(text)
        self.row = row


def _checked_links(session: Session, env: gym.Env[Any, Any], links: Mapping[str, Link] | None) -> dict[str, Link]:
    """Returns the links of an env; raises ConfigurationError if they are not those of a session."""
    inner: Any = env
    while isinstance(inner, gym.Wrapper):
        if isinstance(inner, Recorder):
            raise ConfigurationError("a replay takes the env without the Recorder around it", keys=["env"])
        inner = inner.env
    found = links_of(env) if links is None else dict(links)
    recorded = {link.name: (link.command, link.reading) for link in session.links}
    own = {name: (link.command, link.reading) for name, link in found.items()}
    if own != recorded:
        raise ConfigurationError(
            f"session {session.name!r} was recorded with the links {_told(recorded)}, the env has {_told(own)}",
            keys=["env"],
        )
    return found


def _told(links: Mapping[str, tuple[Sequence[str], Sequence[str]]]) -> str:
    told = (f"{name!r} ({', '.join(sent)} -> {', '.join(read)})" for name, (sent, read) in links.items())
    return ", ".join(told) or "none"
