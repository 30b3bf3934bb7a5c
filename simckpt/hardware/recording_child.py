"""Starts the process that writes, and ends it."""

from __future__ import annotations

import os

from simckpt.errors import ConfigurationError
from simckpt.hardware.channel import Channel
from simckpt.storage import processes


class Child:
    """The recording process and the socket to it."""

    def __init__(self) -> None:
        if not hasattr(os, "memfd_create"):
            raise ConfigurationError("a recorder needs Linux, whose processes share memory that has no name")
        ours, self.process = processes.start_module("simckpt.hardware.recording_process")
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
