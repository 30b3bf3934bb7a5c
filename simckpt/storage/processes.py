"""Who is writing: an identity of a process that outlives it, and whether it is still alive."""

from __future__ import annotations

import functools
import os
import re
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

_TOKEN = re.compile(r"([0-9a-f]{0,32})-([0-9]+)-([0-9]+)-([0-9]+)-([A-Za-z0-9._-]{0,64})\.[0-9a-f]{8}")


@dataclass(frozen=True)
class Process:
    """A process as other processes and machines can tell it apart.

    Attributes:
        host: the machine's name, for people.
        boot_id: random id of the kernel's current boot, the same in all containers of a machine; empty where unknown.
        namespace: number of the process-id namespace, 0 where unknown: containers reuse each other's process ids.
        pid: process id within that namespace.
        started: start time [clock ticks since boot], 0 where unknown; tells a process from a later one with its pid.
    """

    host: str
    boot_id: str
    namespace: int
    pid: int
    started: int

    def token(self, nonce: str) -> str:
        """Returns a folder name that carries this identity and makes it unique by `nonce` (8 hex digits)."""
        host = re.sub(r"[^A-Za-z0-9._-]", "_", self.host)[:64]
        return f"{self.boot_id}-{self.namespace}-{self.pid}-{self.started}-{host}.{nonce}"

    @classmethod
    def from_token(cls, name: str) -> Process | None:
        """Returns the process that made a folder of this name, or None if the name is not a token."""
        match = _TOKEN.fullmatch(name)
        if match is None:
            return None
        boot_id, namespace, pid, started, host = match.groups()
        return cls(host, boot_id, int(namespace), int(pid), int(started))

    def is_alive(self) -> bool | None:
        """Returns whether the process runs, or None if that cannot be known from here.

        Known for a process of this machine and process-id namespace, and for one from an earlier boot of the machine
        of this name. Not known for other machines and other containers.
        """
        here = this_process()
        if not self.boot_id or not here.boot_id:
            return None
        if self.boot_id != here.boot_id:
            return False if self.host == here.host else None
        if self.namespace != here.namespace:
            return None
        return _start_time(self.pid) == self.started


def this_process() -> Process:
    """Returns the identity of the calling process; right in forked children, too."""
    host, boot_id, namespace = _machine()
    pid = os.getpid()
    return Process(host, boot_id, namespace, pid, _start_time(pid) or 0)


@functools.cache
def _machine() -> tuple[str, str, int]:
    try:
        boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip().replace("-", "")
        namespace = Path("/proc/self/ns/pid").stat().st_ino
    except OSError:
        boot_id, namespace = "", 0
    return socket.gethostname(), boot_id, namespace


def _start_time(pid: int) -> int | None:
    # the process name may hold spaces and brackets: the fields are counted from the last bracket
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return None
    if len(fields) < 20 or fields[0] in (b"Z", b"X"):  # a zombie has died already, its parent has not noticed
        return None
    return int(fields[19])


def start_module(module: str) -> tuple[socket.socket, subprocess.Popen[bytes]]:
    """Starts a module in a process of its own, with this one's paths; returns the socket to it, and the process.

    The descriptor of its end of the socket, which blocks, is its only argument.
    """
    ours, theirs = socket.socketpair()
    try:
        # a default timeout of the program would make them non-blocking
        ours.setblocking(True)
        theirs.setblocking(True)
        path = os.pathsep.join(entry or str(Path.cwd()) for entry in sys.path)
        # a session of its own: signals to the terminal's or the scheduler's process group pass it by
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", module, str(theirs.fileno())],
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
    return ours, process
