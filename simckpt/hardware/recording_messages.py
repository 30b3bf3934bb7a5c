"""The recorder's end of the recording process: it is started, told of everything, and heard. Nothing here waits for it.

Only the beginning and the end do: `RecordingProcess.begin` and `close`.
"""

from __future__ import annotations

import os
import subprocess
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from simckpt.errors import ConfigurationError, RecordingWarning, StorageError
from simckpt.hardware.channel import Channel
from simckpt.hardware.transports import wait_readable
from simckpt.hardware.triggers import Trigger, trigger_to_json
from simckpt.storage import processes
from simckpt.storage.session_records import SessionRecord

OUTBOX = 64 << 20  # [bytes] that may wait for the recording process
_STARTING = 60.0  # [s] for it to begin
_SILENT = 60.0  # [s] without a word of it, after which a recorder that closes leaves it alone
_LEAVING = 10.0  # [s] for it to leave once all is written
_TEXT = 2000  # [characters] of an event

_left: list[subprocess.Popen[bytes]] = []  # processes that nobody waits for any longer


@dataclass(frozen=True)
class Settings:
    """How a recorder records; see `Recorder`."""

    snapshot_every: float | None = 10.0
    part_seconds: float = 0.5
    ring: float | None = None
    after: float = 0.0
    triggers: tuple[Trigger, ...] = ()


class RecordingProcess:
    """The process that writes.

    Attributes:
        pid: of it.
        channel: to it.
        is_there: whether it is, as far as was noticed.
        freed: (generation, number) of the buffers that are free again, for who has them to take away.

    Args:
        gone: is told once when it turns out to be gone.

    Raises:
        ConfigurationError: this system has no memory that processes share without a name.
    """

    def __init__(self, gone: Callable[[BaseException], None]) -> None:
        if not hasattr(os, "memfd_create"):
            raise ConfigurationError("a recorder needs Linux, whose processes share memory that has no name")
        self._gone = gone
        self.freed: list[tuple[int, int]] = []
        ours, self._process = processes.start_module("simckpt.hardware.recording_process")
        self.pid = self._process.pid
        self.is_there = True
        self.channel = Channel(ours)

    def begin(self, root: Path, record: SessionRecord, settings: Settings) -> None:
        """Has it begin, and waits until it can write.

        Raises:
            StorageError: it cannot.
        """
        begin = {
            "root": str(root),
            "ring": settings.ring,
            "after": settings.after,
            "part_seconds": settings.part_seconds,
            "triggers": [trigger_to_json(each) for each in settings.triggers],
        }
        try:
            self.channel.send({"begin": begin}, [record.to_bytes()])
            answer = self._wait_for("ready", _STARTING)
        except OSError as error:
            raise StorageError(f"the recording process could not be started: {error}") from error
        if "refused" in answer:
            raise StorageError(f"session {record.name!r} cannot be recorded: {answer['refused']}")

    def send(self, message: dict[str, Any], parts: Sequence[Any] = (), *, descriptors: Sequence[int] = ()) -> None:
        """Sends a message as `Channel.send` does, if it is there."""
        if self.is_there:
            try:
                self.channel.send(message, parts, descriptors=descriptors)
            except TimeoutError:  # of a signal handler: this socket has no such error
                raise
            except OSError as error:
                self._lose(error)

    def event(self, order: int, row: int, kind: str, text: str, *, monotonic: int = 0, wall: int = 0) -> None:
        """Tells it of an event, by default of this moment."""
        when = [monotonic or time.monotonic_ns(), wall or time.time_ns()]
        self.send({"event": [order, row, *when, kind, text[:_TEXT]]})

    def trigger(self, row: int, reason: str, *, error: bool = False, monotonic: int = 0) -> None:
        """Has a ring kept; `error`: only if `OnError` is among the triggers."""
        found = {"row": row, "monotonic": monotonic or time.monotonic_ns(), "reason": reason[:_TEXT]}
        self.send({"trigger": {"found": found, "error": error}})

    def flush(self) -> None:
        """Offers what it has not taken yet."""
        try:
            self.channel.flush()
        except TimeoutError:
            raise
        except OSError as error:
            self._lose(error)

    def listen(self) -> None:
        """Hears what it has to say."""
        if self.is_there:
            try:
                is_there = self.channel.take()
            except TimeoutError:
                raise
            except OSError as error:
                self._lose(error)
                return
            while (found := self.channel.next()) is not None:
                self._received(found[0])
            if not is_there:
                self._lose(ConnectionResetError(self._how_it_ended()))

    def close(self, how: str, text: str, row: int) -> None:
        """Has it end the session, and waits for that as long as it says that it gets on.

        Args:
            how: the session has ended.
            text: for people.
            row: one behind the last one that was stepped.
        """
        patience = 0.0
        try:
            if self.is_there:
                self.channel.send({"close": {"how": how, "text": text[:_TEXT], "row": row}})
                self._wait_for("closed", _SILENT)
                patience = _LEAVING
        except TimeoutError:
            warn(
                f"the recording process has said nothing for {_SILENT:g} s, and is left alone: it closes the session "
                "by itself, if it can go on"
            )
        except OSError as error:
            warn(f"the recording process ended before the session was closed: {error}")
        finally:
            self.end(patience)

    def end(self, seconds: float = _LEAVING) -> None:
        """Closes the connection, and waits for the process for so long; it leaves by itself."""
        self.is_there = False
        self.channel.close()
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            # its object must not be collected while it runs
            _left[:] = [each for each in (*_left, self._process) if each.poll() is None]

    def abandon(self) -> None:
        """Leaves it to the process that this one was forked from."""
        self.is_there = False
        self.channel.close()
        _left.append(self._process)

    def _wait_for(self, wanted: str, seconds: float) -> dict[str, Any]:
        """Returns the message of this kind, or one that refuses; it may be silent for so long.

        Raises:
            TimeoutError: it was silent for longer.
            OSError: it is gone.
        """
        deadline = time.monotonic() + seconds
        while True:
            self.channel.flush()
            wait_readable(self.channel.fileno(), 0.01 if self.channel.waiting else 1.0)
            is_there = self.channel.take()
            while (found := self.channel.next()) is not None:
                message, _ = found
                if wanted in message or "refused" in message:
                    return message
                self._received(message)
                deadline = time.monotonic() + seconds
            if not is_there:
                raise ConnectionResetError(self._how_it_ended())
            if time.monotonic() > deadline:
                raise TimeoutError(f"no answer within {seconds:g} s")

    def _received(self, message: dict[str, Any]) -> None:
        if "free" in message:
            generation, number = message["free"]
            self.freed.append((generation, number))
        elif "warning" in message:
            warn(message["warning"])

    def _how_it_ended(self) -> str:
        code = self._process.poll()
        return "it has closed the connection" if code is None else f"it ended with exit code {code}"

    def _lose(self, error: BaseException) -> None:
        if self.is_there:
            self.is_there = False
            self._gone(error)


def warn(text: str) -> None:
    """Warns of something that is lost or late."""
    warnings.warn(text, RecordingWarning, stacklevel=5)
