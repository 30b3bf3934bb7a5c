"""Messages between a recorder and the process that writes: JSON with bytes behind it, over a pair of sockets.

A sender never waits: what the socket does not take stays in the outbox, and is offered again with the next message.
"""

from __future__ import annotations

import json
import os
import socket
import struct
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from simckpt.state.leaf import Leaf
from simckpt.state.tree import Encoded

_FRAME = struct.Struct("<II")  # bytes of the JSON, and of what follows
_CHUNK = 1 << 18  # [bytes]


class Channel:
    """One end.

    Attributes:
        waiting: how many bytes the other end has not taken yet.

    Args:
        end: of the pair of sockets; taken over.
    """

    def __init__(self, end: socket.socket) -> None:
        # not by flags: those of send_fds and recv_fds are not heeded (CPython 3.11)
        end.setblocking(False)
        self._socket = end
        self._outbox: deque[tuple[memoryview, tuple[int, ...]]] = deque()
        self._inbox = bytearray()
        self._descriptors: deque[int] = deque()
        self.waiting = 0
        self._is_torn = False

    def fileno(self) -> int:
        """The descriptor, to wait for."""
        return self._socket.fileno()

    def close(self) -> None:
        """Closes this end; what was not taken is gone."""
        self._socket.close()
        while self._outbox:
            for descriptor in self._outbox.popleft()[1]:
                os.close(descriptor)

    def send(self, message: dict[str, Any], parts: Sequence[Any] = (), *, descriptors: Sequence[int] = ()) -> None:
        """Sends a message, as much of it as the socket takes now.

        Args:
            message: JSON.
            parts: bytes that follow; they must not change until they are sent.
            descriptors: of files, for the other end; copies of them stay open until they are sent.

        Raises:
            OSError: the other end is gone.
        """
        text = json.dumps(message).encode()
        views = [memoryview(part).cast("B") for part in parts if len(part)]
        size = sum(view.nbytes for view in views)
        frame = memoryview(_FRAME.pack(len(text), size) + text)
        self._outbox.append((frame, tuple(map(os.dup, descriptors))))
        self._outbox.extend((view, ()) for view in views)
        self.waiting += frame.nbytes + size
        self.flush()

    def flush(self) -> None:
        """Offers the outbox once more; raises OSError if the other end is gone."""
        self._check_whole()
        while self._outbox:
            view, descriptors = self._outbox[0]
            self._is_torn = True
            try:
                if descriptors:
                    done = socket.send_fds(self._socket, [view], list(descriptors))
                else:
                    done = self._socket.send(view)
            except (BlockingIOError, InterruptedError):
                self._is_torn = False
                return
            self.waiting -= done
            for descriptor in descriptors:
                os.close(descriptor)
            if done == view.nbytes:
                self._outbox.popleft()
            else:
                self._outbox[0] = (view[done:], ())
            self._is_torn = False

    def take(self) -> bool:
        """Takes what has arrived, without waiting; returns whether the other end is still there."""
        self._check_whole()
        while True:
            self._is_torn = True
            try:
                data, descriptors, _, _ = socket.recv_fds(self._socket, _CHUNK, 8)
            except (BlockingIOError, InterruptedError):
                self._is_torn = False
                return True
            except ConnectionError:
                self._is_torn = False
                return False
            self._descriptors.extend(descriptors)
            self._inbox += data
            self._is_torn = False
            if not data:
                return False

    def _check_whole(self) -> None:
        # an exception of a signal handler has come between what the system did and what is known of it here
        if self._is_torn:
            raise ConnectionAbortedError("a message was interrupted by an exception of a signal handler")

    def next(self) -> tuple[dict[str, Any], memoryview] | None:
        """Returns the next whole message of those that were taken, with the bytes behind it, or None."""
        if len(self._inbox) < _FRAME.size:
            return None
        length, size = _FRAME.unpack_from(self._inbox)
        end = _FRAME.size + length + size
        if len(self._inbox) < end:
            return None
        message = json.loads(self._inbox[_FRAME.size : _FRAME.size + length])
        payload = memoryview(bytes(self._inbox[_FRAME.size + length : end]))
        del self._inbox[:end]
        return message, payload

    def descriptor(self) -> int:
        """Returns the next descriptor that came, which is the caller's now."""
        return self._descriptors.popleft()


@dataclass(frozen=True)
class Packed:
    """An encoded tree on its way: what JSON says of it, and its bytes."""

    form: dict[str, Any]
    parts: list[Any]


def pack(encoded: Encoded) -> Packed:
    """Returns an encoded tree for `Channel.send`; its arrays are not copied."""
    leaves = [
        [path, leaf.dtype, list(leaf.shape), leaf.kind, leaf.data.dtype.str, list(leaf.data.shape)]
        for path, leaf in encoded.leaves.items()
    ]
    flat = [np.ascontiguousarray(leaf.data).reshape(-1).view(np.uint8) for leaf in encoded.leaves.values()]
    return Packed({"structure": len(encoded.structure), "leaves": leaves}, [encoded.structure, *flat])


def unpack(form: dict[str, Any], payload: memoryview) -> Encoded:
    """Returns what `pack` was given."""
    place = form["structure"]
    structure = bytes(payload[:place])
    leaves = {}
    for path, dtype, shape, kind, stored, stored_shape in form["leaves"]:
        array = np.ndarray(stored_shape, np.dtype(stored), payload, place)
        leaves[path] = Leaf(array, dtype, tuple(shape), kind)
        place += array.nbytes
    return Encoded(leaves, structure)
