"""Starts the process that writes, and ends it."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

from simckpt.errors import ConfigurationError
from simckpt.hardware.channel import Channel


class Child:
    """The recording process and the socket to it."""

    def __init__(self) -> None:
        if not hasattr(os, "memfd_create"):
            raise ConfigurationError("a recorder needs Linux, whose processes share memory that has no name")
        ours, theirs = socket.socketpair()
        try:
            command = [sys.executable, "-P", "-m", "simckpt.hardware.recording_process", str(theirs.fileno())]
            path = os.pathsep.join(entry or str(Path.cwd()) for entry in sys.path)
            # a session of its own: signals to the terminal's or the scheduler's process group pass it by
            self.process = subprocess.Popen(
                command,
                env={**os.environ, "PYTHONPATH": path},
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        self.channel = Channel(ours)
        self._kept: list[int] = []

    def kept(self, descriptor: int) -> int:
        """Returns a copy of a descriptor that stays open until the next one, for a message that may have to wait."""
        copy = os.dup(descriptor)
        self._kept.append(copy)
        while len(self._kept) > 8:
            os.close(self._kept.pop(0))
        return copy

    def end(self) -> None:
        """Closes the socket, and waits for the process, which leaves by itself then."""
        self.channel.close()
        while self._kept:
            os.close(self._kept.pop())
        self.process.wait()
