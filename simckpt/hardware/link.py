"""The link between an env and a device: commands out, readings in, with sequence numbers and times."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import Any, TypeVar

import numpy as np

from simckpt.errors import (
    ConfigurationError,
    LinkBusyError,
    LinkDisarmedError,
    LinkUnavailableError,
    StateMismatchError,
    UnsupportedStateError,
)
from simckpt.hardware import all_links
from simckpt.hardware.arrivals import Statistics
from simckpt.hardware.connection import Connection, SimulatedConnection
from simckpt.hardware.reading import Observer, Reading, Source
from simckpt.hardware.simulated import Simulated
from simckpt.hardware.transports import Transport
from simckpt.hardware.wire import LARGEST_COUNT
from simckpt.sim.resources import register_adapter

__all__ = ["Link", "Reading", "devices_out_of_reach"]

_LARGEST_DRAIN = 1000  # readings that one receive_newest looks through: a device that floods must not stop the loop
_LONGEST_TIMEOUT = 1e6  # [s]
_MODULUS = 2**64
_Result = TypeVar("_Result")
_out_of_reach: ContextVar[bool] = ContextVar("simckpt_devices_out_of_reach", default=False)


class Link:
    """Sends commands to a device and receives its readings.

    As part of an env a link is state: its count of commands and its last reading are captured, and so is a model in
    place of a device (`Simulated`). The connection is not. **A restore disarms**: after it nothing is sent, and nothing
    received, before `arm()` is called; with a model, too. (Envs in a vector env are reached by `envs.call("arm")`, if
    they have such a method.)

    The connection is opened by `arm()` or the first use. A send never waits; what the system does not take at once is
    dropped and counted. A link belongs to one thread at a time, and to the process that opened it.

    Args:
        transport: `UDP(...)`, `TCP(...)`, `Serial(...)`, a `Transport` of your own, or `Simulated(model)`.
        command: names of the values that are sent; none for a device that only measures.
        reading: names of the values that come back.
        name: of the link among those of an env, and in messages; without `/` and `%`.
        armed: whether it may be used before `arm()` is called.

    Attributes:
        last: the newest reading so far, or None.
        observer: is told of everything; None if nobody is.
        source: answers in place of the device, which is then out of reach, whether the link is armed or not.

    Raises:
        ConfigurationError: two names are equal, or there are none at all, or too many; or the link's own is refused.
    """

    # the walk through an env goes on into this attribute
    _simckpt_inner = "transport"

    def __init__(
        self,
        transport: Transport | Simulated,
        *,
        command: Sequence[str] = (),
        reading: Sequence[str] = (),
        name: str = "device",
        armed: bool = True,
    ) -> None:
        if not isinstance(transport, Transport | Simulated):
            raise ConfigurationError(
                f"a link needs a transport such as UDP('127.0.0.1:9000'), got {transport!r}", keys=["transport"]
            )
        self.transport = transport
        self.command = _checked_names("command", command)
        self.reading = _checked_names("reading", reading)
        if not self.command and not self.reading:
            raise ConfigurationError("a link without commands and without readings does nothing", keys=["command"])
        self.name = str(name)
        if not self.name or "/" in self.name or "%" in self.name:
            # it is one part of the paths under which a session keeps what the link does
            raise ConfigurationError(f"name= of a link is a text without '/' and '%', got {name!r}", keys=["name"])
        self.last: Reading | None = None
        self.observer: Observer | None = None
        self.source: Source | None = None
        self._sequence = 0
        self._statistics = Statistics()
        self._armed = bool(armed)
        self._connection: Connection | SimulatedConnection | None = None
        self._opened_by = 0
        self._in_use = threading.Lock()
        all_links.add(self)

    def __repr__(self) -> str:
        armed = "armed" if self._armed else "disarmed"
        return f"Link({self.name!r}, {self.address}, command={self.command}, reading={self.reading}, {armed})"

    @property
    def address(self) -> str:
        """Where the device is, such as `udp://127.0.0.1:9000`; it holds no secret."""
        return self.transport.address

    @property
    def armed(self) -> bool:
        """Whether the device may be reached."""
        return self._armed

    @property
    def connected(self) -> bool:
        """Whether the connection is open, as far as this side can know; a datagram's way is never known."""
        if not self._armed or self._connection is None or self._opened_by != os.getpid():
            return False
        return isinstance(self.transport, Simulated) or self.transport.connected

    @property
    def trouble(self) -> str | None:
        """What is wrong with the connection, for people; None if nothing is known to be."""
        return None if isinstance(self.transport, Simulated) else self.transport.trouble

    @property
    def next_sequence(self) -> int:
        """The number that the next command gets."""
        return self._sequence

    @property
    def statistics(self) -> Statistics:
        """What was counted so far: a copy."""
        return dataclasses.replace(self._statistics)

    def arm(self) -> None:
        """Opens the connection anew; from now on commands reach the device.

        In a replay, whose `source` answers in the device's place, nothing is opened.

        Raises:
            LinkUnavailableError: the device or the local port cannot be had; the link is disarmed.
        """
        self._alone(self._arm)

    def _arm(self) -> None:
        if self.source is None:
            self._check_reach()
        self._armed = True
        if self.source is None:
            self._open()

    def disarm(self) -> None:
        """Closes the connection; nothing is sent or received until `arm()`.

        Any thread may call this at any time: a call that another one is in is the last.
        """
        self._armed = False
        self._close_unused()

    close = disarm

    def __getstate__(self) -> dict[str, Any]:
        # a copy is a link of its own; where this one is in use, the device is not the copy's as well
        armed = self._armed and self._connection is None
        left = dict.fromkeys(("observer", "source", "_connection", "_in_use"))
        return {**vars(self), **left, "_armed": armed, "_statistics": self.statistics}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._in_use = threading.Lock()
        all_links.add(self)

    def __enter__(self) -> Link:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def send(self, values: Any) -> int:
        """Sends a command, without waiting, and returns its sequence number.

        Args:
            values: `(len(command),)` numbers, all finite.

        Raises:
            ConfigurationError: values that are no such numbers; nothing was sent.
            LinkDisarmedError: the link is not armed.
            LinkUnavailableError: the connection could not be opened; the link is disarmed.
        """
        return self._alone(self._send, self._checked(values))

    def _send(self, values: np.ndarray[Any, np.dtype[np.float64]]) -> int:
        if self.source is not None:
            sequence = self.source.send(values)
            monotonic, wall = time.monotonic_ns(), time.time_ns()
        else:
            connection = self._ready()
            sequence = self._sequence
            monotonic, wall = time.monotonic_ns(), time.time_ns()
            connection.send(sequence, values, monotonic, wall)
        self._sequence = (sequence + 1) % _MODULUS
        if self.observer is not None:
            self.observer.sent(self, sequence, values, monotonic, wall)
        else:
            all_links.used(self)
        return sequence

    def receive(self, timeout: float = 0.0) -> Reading | None:
        """Returns the next reading in the order of arrival, or None if there is none within `timeout` [s].

        Raises:
            LinkDisarmedError: the link is not armed.
            LinkUnavailableError: the connection could not be opened; the link is disarmed.
        """
        return self._alone(self._look, self._checked_timeout(timeout))

    def receive_newest(self, timeout: float = 0.0) -> Reading | None:
        """Returns the newest of all readings that have arrived since, or None; waits `timeout` [s] for the first.

        Late readings, which are older than what was there before, are passed over. Of what comes while nobody receives,
        the system keeps the first few hundred: after a pause, call this once to be rid of them.

        Raises:
            LinkDisarmedError: the link is not armed.
            LinkUnavailableError: the connection could not be opened; the link is disarmed.
        """
        return self._alone(self._look_for_newest, self._checked_timeout(timeout))

    def _look_for_newest(self, timeout: float) -> Reading | None:
        newest = None
        for look in range(_LARGEST_DRAIN):
            reading = self._look(timeout if look == 0 else 0.0)
            if reading is None:
                break
            if not reading.late:
                newest = reading
        return newest

    def time(self) -> int:
        """Returns `time.monotonic_ns()`, in a replay what it was: for an env whose steps depend on the time."""
        return self._alone(self._time)

    def _time(self) -> int:
        now = time.monotonic_ns() if self.source is None else self.source.time()
        if self.observer is not None:
            self.observer.timed(self, now, time.time_ns())
        else:
            all_links.used(self)
        return now

    def state_dict(self) -> dict[str, Any]:
        """Returns the names, the number of the next command, and the last reading without this process's times.

        Raises:
            UnsupportedStateError: the link has a model in place of a device; only the env that holds it captures that.
        """
        if isinstance(self.transport, Simulated):
            raise UnsupportedStateError(
                f"link {self.name!r} by itself does not hold the state of its model: register the env that holds the "
                "link",
                path=self.name,
                type_name="simckpt.hardware.link.Link",
            )
        return self._state()

    def _state(self) -> dict[str, Any]:
        last = self.last
        return {
            "command": list(self.command),
            "reading": list(self.reading),
            "sequence": self._sequence,
            "last": None
            if last is None
            else {"values": last.values.copy(), "sequence": last.sequence, "device_time": last.device_time},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes a state, and disarms the link: the device is not where it was when the state was saved.

        Raises:
            StateMismatchError: the state is of a link with other commands or readings; nothing was changed.
        """
        names = [(key, list(getattr(self, key)), list(state.get(key, ()))) for key in ("command", "reading")]
        problems = [f"{key} is {saved} in the state, {own} here" for key, own, saved in names if saved != own]
        last = state.get("last")
        if last is not None and np.shape(last["values"]) != (len(self.reading),):
            problems.append(f"the last reading has the shape {np.shape(last['values'])}")
        if problems:
            listed = "; ".join(problems)
            raise StateMismatchError(f"link {self.name!r}: the state is of another device: {listed}", problems=problems)
        self._armed = False
        self._alone(self._load, state)

    def _load(self, state: Mapping[str, Any]) -> None:
        last = state.get("last")
        self._sequence = int(state["sequence"]) % _MODULUS
        self.last = None
        if last is not None:
            values = np.array(last["values"], np.float64)
            values.flags.writeable = False
            self.last = Reading(values, int(last["sequence"]), int(last["device_time"]), 0, 0)

    # who has the link, and what is called by that one

    def _alone(self, work: Callable[..., _Result], *arguments: Any) -> _Result:
        """Does something while no other call has the link.

        A signal handler may raise anywhere, yet never is the link left locked: no handler runs within one call of C
        code, so that the lock is held if, and only if, the list says so; and none before the lock is released.
        """
        is_mine: list[bool] = []
        try:
            is_mine.extend(map(self._in_use.acquire, (False,)))
            if not is_mine[0]:
                raise LinkBusyError(
                    f"link {self.name!r} is in use by another thread, or by a call that this one has interrupted: a "
                    "link serves one call at a time",
                    link=self.name,
                )
            return work(*arguments)
        finally:
            if is_mine and is_mine[0]:
                try:
                    if not self._armed:
                        self._close()
                finally:
                    self._in_use.release()
                # disarmed meanwhile, by who found it in use
                if not self._armed and self._connection is not None:
                    self._close_unused()

    def _close_unused(self) -> None:
        """Closes the connection of a disarmed link, unless a call has it, which then does that."""
        with contextlib.suppress(LinkBusyError):
            self._alone(_nothing)

    def _open(self) -> None:
        self._close()
        if isinstance(self.transport, Simulated):
            self._connection = SimulatedConnection(self.transport, self.reading, self._statistics)
        else:
            try:
                self.transport.open()
            except BaseException as error:
                self._armed = False
                if not isinstance(error, OSError):
                    raise
                raise LinkUnavailableError(
                    f"link {self.name!r}: {self.address} cannot be opened ({error}); when that is mended, call "
                    "link.arm() (it is disarmed until then)",
                    link=self.name,
                ) from error
            self._connection = Connection(self.transport, self.command, self.reading, self._statistics)
        self._opened_by = os.getpid()

    def _close(self) -> None:
        if self._connection is not None:
            self._connection = None
            if isinstance(self.transport, Transport):
                self.transport.close()

    def _check_reach(self) -> None:
        if _out_of_reach.get() and not isinstance(self.transport, Simulated):
            self._armed = False
            raise LinkDisarmedError(
                f"link {self.name!r} to {self.address} is not one of those that the replay answers for, and a replay "
                "reaches no device: nothing was sent. Let the env hold it as an attribute when the session is recorded",
                link=self.name,
            )

    def _ready(self) -> Connection | SimulatedConnection:
        self._check_reach()
        if self._connection is None and self._armed:
            self._open()
        if self._connection is None or not self._armed:
            raise LinkDisarmedError(
                f"link {self.name!r} to {self.address} is disarmed: a state was restored, or it was closed. Nothing "
                "was sent. Where the device may move again, call link.arm()",
                link=self.name,
            )
        if self._opened_by != os.getpid():
            raise LinkDisarmedError(
                f"link {self.name!r} was opened by process {self._opened_by}, of which this one is a fork: two would "
                "speak to one device. Make the link in the process that uses it, or call link.arm() here",
                link=self.name,
            )
        return self._connection

    def _look(self, timeout: float) -> Reading | None:
        if self.source is not None:
            reading = self.source.receive(timeout)
            monotonic, wall = time.monotonic_ns(), time.time_ns()
        else:
            found = self._ready().receive(timeout)
            monotonic, wall = time.monotonic_ns(), time.time_ns()
            reading = None
            if found is not None:
                message, late = found
                reading = Reading(message.values, message.sequence, message.monotonic, monotonic, wall, late)
        if reading is not None and not reading.late:
            self.last = reading
        if self.observer is not None:
            self.observer.received(self, reading, monotonic, wall)
        else:
            all_links.used(self)
        return reading

    def _checked(self, values: Any) -> np.ndarray[Any, np.dtype[np.float64]]:
        try:
            checked = np.array(values, np.float64)
        except (TypeError, ValueError) as error:
            raise self._refused(values) from error
        if checked.shape != (len(self.command),) or not np.isfinite(checked).all():
            raise self._refused(values)
        checked.flags.writeable = False
        return checked

    def _checked_timeout(self, timeout: Any) -> float:
        if isinstance(timeout, int | float) and 0 <= timeout < _LONGEST_TIMEOUT:
            return float(timeout)
        raise ConfigurationError(
            f"link {self.name!r}: a timeout is a number of seconds from 0 on, got {timeout!r}", keys=["timeout"]
        )

    def _refused(self, values: Any) -> ConfigurationError:
        return ConfigurationError(
            f"link {self.name!r}: a command is {len(self.command)} finite numbers {self.command}, got "
            f"{str(values)[:200]}; nothing was sent",
            keys=self.command,
        )


register_adapter(Link, Link._state, Link.load_state_dict)


@contextlib.contextmanager
def devices_out_of_reach() -> Iterator[None]:
    """Refuses, in this thread and for a block, whatever would reach a device: of links without a source or a model."""
    before = _out_of_reach.set(True)
    try:
        yield
    finally:
        _out_of_reach.reset(before)


def _nothing() -> None:
    pass


def _checked_names(what: str, names: Sequence[str]) -> tuple[str, ...]:
    if isinstance(names, str):
        raise ConfigurationError(f"{what}= is a list of names, got the text {names!r}", keys=[what])
    checked = tuple(names)
    if not all(isinstance(name, str) and name for name in checked) or len(set(checked)) < len(checked):
        raise ConfigurationError(f"{what}= is a list of different names, got {checked}", keys=[what])
    if len(checked) > LARGEST_COUNT:
        raise ConfigurationError(f"{what}= has {len(checked)} names, at most {LARGEST_COUNT} fit", keys=[what])
    return checked
