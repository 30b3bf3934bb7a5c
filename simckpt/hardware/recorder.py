"""`Recorder`, an env wrapper that writes a session."""

from __future__ import annotations

import contextlib
import os
import platform
import time
import traceback
import weakref
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Literal

import gymnasium as gym
import numpy as np

from simckpt import provenance
from simckpt.checkpoint import Checkpoint
from simckpt.errors import CheckpointNotFoundError, ConfigurationError, StoreError
from simckpt.hardware import columns
from simckpt.hardware.held_links import links_of
from simckpt.hardware.link import Link
from simckpt.hardware.recording import Recording, Signals
from simckpt.hardware.recording_messages import Settings
from simckpt.hardware.triggers import Trigger, checked_triggers
from simckpt.run import Run
from simckpt.sim import register_adapter, register_stateless
from simckpt.storage import StoreFiles, names
from simckpt.storage.session_ending import remove_session
from simckpt.storage.session_records import LinkRecord, OriginRecord, SessionRecord
from simckpt.storage.session_writing import create_session
from simckpt.storage.sessions import read_session, session_names
from simckpt.store import Store

if TYPE_CHECKING:
    from simckpt.hardware.session import Session


class Recorder(gym.Wrapper[Any, Any, Any, Any]):
    """Records an env at work with a device: a session in a store, from which any moment can be played again.

    Every action, observation, reward, command and reading goes into the session with its times, and at intervals the
    whole state of the env. Another process writes, about a second at a time: no step waits for a disk, and if the
    program is killed the rows up to that step are in the session. A disk that refuses is warned of once
    (`RecordingWarning`); the loop goes on. So it does where something cannot be recorded, such as a signal that raises:
    the session has an event that tells the row, and a snapshot behind it, from which a replay goes on.

    ```python
    env = Recorder(env, "experiments", origin=run)
    with env:                                  # closes the session, too
        observation, info = env.reset()
        ...
    session = simckpt.Store("experiments").session(env.session_name)
    ```

    With `ring=60` nothing is written until a trigger fires; then the last 60 s are kept, and what comes `after`.

    Captured with a run, a recorder is a wrapper like any other: what it has recorded is no state. When a state is
    restored into its env, the session notes that, and takes a snapshot.

    One thread at a time steps and resets the env. `note`, `trigger`, `snapshot` and `close` may be called by any
    thread and by signal handlers; from there, or within a step, they act once that step is done, and before the next
    one. A loop that hangs makes no next one: that is what a `Watchdog` is for. If another thread than the loop's uses a
    link, as one does that receives all the time, what it sends and receives is recorded, but a replay cannot repeat
    when it did so, and says it: for an exact replay let the step call `link.receive_newest()`.

    Args:
        env: what to record; links to devices are found in it and its wrappers.
        store: where to, or its path.
        name: of the session; by default "session-" with the time.
        origin: the checkpoint that is driving, which is not pruned while the session is there; or a run, whose newest
            one is meant.
        snapshot_every: between two snapshots [s]; None for none, then nothing can be played again.
        part_seconds: how long a part lasts [s]. If all processes are killed at once, what is lost is at most that,
            0.2 s, and the time that the disk takes to write a part.
        ring: how much of the past a trigger keeps [s]; None to write all of it.
        after: how long to go on after a trigger [s].
        triggers: `OnError()`, `OutOfRange(...)`, `Watchdog(...)`; without a ring they are noted as events.
        signals: {name: function of the env and the step's info} that returns numbers to record, of one size. A row
            whose signals cannot be had is not recorded.
        links: in place of those that are found.

    Raises:
        ConfigurationError: arguments that make no sense, such as a trigger that can never fire; observations or actions
            without a fixed size, or an env that has a recorder already.
        UnsupportedStateError: the env cannot be captured; `snapshot_every=None` records it all the same.
        ConflictError: there is a session of that name, or the origin is being pruned.
        StorageError: the session cannot be written, or another process could not be started.
    """

    def __init__(
        self,
        env: gym.Env[Any, Any],
        store: Store | str | os.PathLike[str],
        name: str | None = None,
        *,
        origin: Checkpoint | Run | None = None,
        snapshot_every: float | None = 10.0,
        part_seconds: float = 0.5,
        ring: float | None = None,
        after: float = 0.0,
        triggers: Sequence[Trigger] = (),
        signals: Signals | None = None,
        links: Mapping[str, Link] | None = None,
    ) -> None:
        super().__init__(env)
        _check_env(env)
        signals = _checked_functions(signals or {})
        found = links_of(env) if links is None else _checked_links(links)
        checked = checked_triggers(
            triggers,
            forms=columns.forms_of(env),
            signals=signals,
            links={each: link.reading for each, link in found.items() if link.reading},
        )
        settings = _checked(Settings(snapshot_every, part_seconds, ring, after, checked))
        files = (store if isinstance(store, Store) else Store(store)).made()
        record = _record(env, files, name, origin, settings, signals, found)
        # the attributes of an env are state; what is not lies in these two
        try:
            if ring is None:
                create_session(files, record)
            self._recording = Recording(env, files.path, record, settings, signals=signals, links=found)
        except BaseException:
            if ring is None:
                # the name is not used up, unless it was somebody else's
                with contextlib.suppress(StoreError):
                    if read_session(files.path, record.name).id == record.id:
                        remove_session(files.path, record.name)
            raise
        self._restores = Restores(self._recording)
        # a program that ends without closing it has not been killed
        weakref.finalize(self, self._recording.close_at_exit)

    @property
    def session(self) -> Session:
        """The session so far, for reading; raises SessionNotFoundError for a ring, whose sessions triggers make."""
        return Store(self._recording.root).session(self.session_name)

    @property
    def session_name(self) -> str:
        """The name of the session; the sessions that a ring keeps are called so with -1, -2, ... behind."""
        return self._recording.name

    @property
    def row(self) -> int:
        """The number of the next row."""
        return self._recording.row

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """Steps the env, and takes the row; raises RecorderBusyError if another thread is in a step or reset."""
        recording = self._recording
        if not recording.active:
            return self.env.step(action)
        recording.begin(action)
        try:
            result = self.env.step(action)
        except BaseException as error:
            recording.failed(error, "step")
            raise
        recording.end(result)
        return result

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Resets the env, and takes note of that; raises RecorderBusyError as `step` does."""
        recording = self._recording
        if not recording.active:
            return self.env.reset(seed=seed, options=options)
        begun = recording.begin_reset(seed, options)
        try:
            result = self.env.reset(seed=seed, options=options)
        except BaseException as error:
            recording.failed(error, "reset")
            raise
        recording.end_reset(begun, result)
        return result

    def snapshot(self, reason: str = "asked for") -> None:
        """Takes a snapshot now, or, if a step is in progress or this is another thread, before the next step.

        Raises:
            ConfigurationError: `snapshot_every` is None.
        """
        self._recording.snapshot(reason)

    def note(self, text: str) -> None:
        """Notes an event in the session."""
        self._recording.note("note", text)

    def trigger(self, reason: str) -> None:
        """Has the ring kept; in a session without a ring the event is noted."""
        self._recording.trigger(reason)

    def end_session(self, how: str = "closed", text: str = "") -> None:
        """Ends the session once all of it is on the disk; the env goes on, and nothing more is recorded.

        A recording process that says nothing for 60 s is warned of, and left to end the session by itself.

        Args:
            how: "closed" or "error".
            text: for people.
        """
        if how not in ("closed", "error"):
            raise ConfigurationError(f"a session ends as 'closed' or 'error', got {how!r}", keys=["how"])
        self._recording.close(how, text)

    def close(self) -> None:
        """Ends the session, and closes the env."""
        self.end_session()
        super().close()

    def __exit__(self, *exception: Any) -> Literal[False]:
        error = exception[1] if len(exception) > 1 else None
        if isinstance(error, Exception):
            told = traceback.format_exception_only(error)
            self._recording.close("error", "".join(told).strip(), error)
        self.close()
        return False


class Restores:
    """Tells a recording that a state was restored into its env; part of the env's state for that reason alone."""

    def __init__(self, recording: Recording) -> None:
        self.recording = recording

    def noted(self) -> None:
        """Takes note of it; what comes next can be played again from a new snapshot only."""
        self.recording.note("restored", "a state was restored")
        self.recording.want_snapshot("restored")


register_stateless(Recording)
register_adapter(Restores, lambda restores: {}, lambda restores, _: restores.noted())


def _check_env(env: Any) -> None:
    inner = env
    while isinstance(inner, gym.Wrapper):
        if isinstance(inner, Recorder):
            raise ConfigurationError(
                f"the env has a recorder already, that of session {inner.session_name!r}: one records all of it",
                keys=["env"],
            )
        inner = inner.env


def _checked_functions(signals: Any) -> Signals:
    if not isinstance(signals, Mapping) or not all(isinstance(name, str) and name for name in signals):
        raise ConfigurationError(f"signals= is a dict of functions by their names, got {signals!r}", keys=["signals"])
    for name, function in signals.items():
        if not callable(function):
            raise ConfigurationError(
                f"the signal {name!r} is a function of the env and the step's info, got {function!r}", keys=["signals"]
            )
    return dict(signals)


def _checked_links(links: Any) -> dict[str, Link]:
    if not isinstance(links, Mapping) or not all(isinstance(link, Link) for link in links.values()):
        raise ConfigurationError(f"links= is a dict of links by their names, got {links!r}", keys=["links"])
    for name in links:
        if not isinstance(name, str) or not name or "/" in name or "%" in name:
            raise ConfigurationError(f"the name of a link is a text without '/' and '%', got {name!r}", keys=["links"])
    return dict(links)


def _checked(settings: Settings) -> Settings:
    limits = {
        "snapshot_every": (settings.snapshot_every, 0.0),
        "part_seconds": (settings.part_seconds, 0.0),
        "ring": (settings.ring, 0.0),
        "after": (settings.after, -1.0),
    }
    for key, (value, least) in limits.items():
        if value is not None and not (isinstance(value, int | float) and least < value < 1e6):
            raise ConfigurationError(f"{key}= is a number of seconds, got {value!r}", keys=[key])
    if settings.after < 0 or (settings.after and settings.ring is None):
        raise ConfigurationError(
            "after= is how long to go on after a trigger of a ring: give ring= as well", keys=["after"]
        )
    return settings


def _record(
    env: gym.Env[Any, Any],
    files: StoreFiles,
    name: str | None,
    origin: Checkpoint | Run | None,
    settings: Settings,
    signals: Signals,
    links: Mapping[str, Link],
) -> SessionRecord:
    now = time.time()
    return SessionRecord(
        id=names.random_id(),
        name=names.check_run_name(name) if name is not None else _free_name(files, now),
        created=now,
        monotonic=time.monotonic_ns(),
        mode="continuous" if settings.ring is None else "ring",
        origin=_origin(files, origin),
        env=_env_facts(env),
        spaces={"observation": space_to_json(env.observation_space), "action": space_to_json(env.action_space)},
        links=tuple(LinkRecord(each, link.command, link.reading, link.address) for each, link in links.items()),
        signals=tuple(signals),
        versions=provenance.versions(),
        host=platform.node(),
    )


def _free_name(files: StoreFiles, now: float) -> str:
    name = f"session-{datetime.fromtimestamp(now, UTC):%Y%m%d-%H%M%S}"
    taken = set(session_names(files.path))
    number = 2
    free = name
    while free in taken:
        free, number = f"{name}-{number}", number + 1
    return free


def _origin(files: StoreFiles, origin: Checkpoint | Run | None) -> OriginRecord | None:
    if isinstance(origin, Run):
        try:
            origin = origin.latest()
        except CheckpointNotFoundError:
            return None
    if origin is None:
        return None
    if not isinstance(origin, Checkpoint):
        raise ConfigurationError(f"origin= is a checkpoint or a run, got {origin!r}", keys=["origin"])
    if origin.files.path != files.path:
        raise ConfigurationError(
            f"origin= is a checkpoint of {origin.files.path}, and the session goes to {files.path}: import it there "
            "first, by Store.import_checkpoint",
            keys=["origin"],
        )
    return OriginRecord(origin.id, origin.run, origin.seq, origin.step)


def _env_facts(env: gym.Env[Any, Any]) -> dict[str, Any]:
    facts: dict[str, Any] = {}
    if env.spec is not None:
        facts["id"] = env.spec.id
        kwargs = {key: value for key, value in env.spec.kwargs.items() if _is_plain(value)}
        facts["kwargs"] = kwargs
    dt = getattr(env.unwrapped, "dt", None)
    if isinstance(dt, float):
        facts["dt"] = float(dt)
    return facts


def _is_plain(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return type(value) in (list, tuple) and all(_is_plain(each) for each in value)
    if isinstance(value, dict):
        return type(value) is dict and all(type(key) is str and _is_plain(each) for key, each in value.items())
    return value is None or type(value) in (bool, int, float, str)


def space_to_json(space: gym.Space[Any]) -> dict[str, Any]:
    """Returns a space as a record holds it: its type, and what else `gymnasium.spaces` needs to make it again."""
    kind = type(space).__name__
    if isinstance(space, gym.spaces.Box):
        limits = {key: _limits(np.asarray(getattr(space, key))) for key in ("low", "high")}
        return {"type": kind, "dtype": str(space.dtype), "shape": list(space.shape), **limits}
    if isinstance(space, gym.spaces.Discrete):
        return {"type": kind, "dtype": str(space.dtype), "n": int(space.n), "start": int(space.start)}
    if isinstance(space, gym.spaces.MultiDiscrete):
        return {"type": kind, "dtype": str(space.dtype), "nvec": space.nvec.tolist(), "start": space.start.tolist()}
    if isinstance(space, gym.spaces.MultiBinary):
        shape = space.n if isinstance(space.n, int) else [int(each) for each in space.shape]
        return {"type": kind, "n": int(shape) if isinstance(shape, int | np.integer) else shape}
    if isinstance(space, gym.spaces.Dict):
        return {"type": kind, "subspaces": {key: space_to_json(each) for key, each in space.spaces.items()}}
    if isinstance(space, gym.spaces.Tuple):
        return {"type": kind, "subspaces": [space_to_json(each) for each in space.spaces]}
    return {"type": kind}


def _limits(values: np.ndarray[Any, Any]) -> Any:
    """Returns the one number that all limits are, or else all of them."""
    plain = values.astype(np.float64) if values.dtype.kind == "f" else values
    with contextlib.suppress(IndexError):
        first = plain.reshape(-1)[0]
        if (plain == first).all():
            return first.item()
    return plain.tolist()
