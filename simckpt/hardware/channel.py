"""Messages between a recorder and the process that writes: JSON with bytes behind it, over a pair of sockets.

A sender never waits: what the socket does not take stays in the outbox, and is offered again with the next message.

A signal handler may raise anywhere, such as between what the system did and the assignment that says so. Therefore a
message is never known by a count that is assigned: the socket's answers go into a deque by one call of C code, within
which no handler runs, and what is left to do follows from them. Such an exception goes on when the message is whole.
"""

from __future__ import annotations

import array
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
_RIGHTS = socket.CMSG_SPACE(8 * 4)  # [bytes] of descriptors that come with it

_Arrival = tuple[Any, Any, int, Any]  # what `recvmsg` returns


class Channel:
    """One end. One thread at a time may send, and one, maybe another one, may take.

    Attributes:
        waiting: how many bytes the other end has not taken yet; after an exception of a signal handler maybe too many.

    Args:
        end: of the pair of sockets; taken over.
    """

    def __init__(self, end: socket.socket) -> None:
        # not by flags: those of send_fds and recv_fds are not heeded (CPython 3.11)
        end.setblocking(False)
        self._socket = end
        # of each piece the place of its first byte among all bytes ever sent
        self._outbox: deque[tuple[int, memoryview, list[int]]] = deque()
        self._counts: deque[int] = deque((0,))  # of bytes that were sent, in all
        self._arrived: deque[_Arrival] = deque()
        self._descriptors: deque[int] = deque()
        self.waiting = 0

    def fileno(self) -> int:
        """The descriptor, to wait for."""
        return self._socket.fileno()

    def close(self) -> None:
        """Closes this end; what was not taken is gone."""
        self._socket.close()
        while self._outbox:
            _close_all(self._outbox.popleft()[2])
        self.waiting = 0

    def send(self, message: dict[str, Any], parts: Sequence[Any] = (), *, descriptors: Sequence[int] = ()) -> None:
        """Sends a message, as much of it as the socket takes now.

        Args:
            message: JSON.
            parts: bytes that follow; they must not change until they are sent.
            descriptors: of files, for the other end; copies of them stay open until they are sent.

        Raises:
            OSError: the other end is gone.
        """
        pieces: list[tuple[int, memoryview, list[int]]] = []
        try:
            pieces = self._pieces(message, parts, descriptors)
            self._put(pieces)
            self.flush()
        except BaseException:
            # of a signal handler, perhaps: it goes on when the message is on its way
            pieces = pieces or self._pieces(message, parts, descriptors)
            if self._stop() == pieces[0][0]:
                self._put(pieces)
            self.flush()
            raise

    def flush(self) -> None:
        """Offers the outbox once more; raises OSError if the other end is gone."""
        while self._outbox:
            start, view, descriptors = self._outbox[0]
            self._counts = deque((sum(self._counts),))
            done = self._counts[0] - start
            if done == view.nbytes:
                _close_all(descriptors)
                self._outbox.popleft()
                continue
            try:
                if descriptors and not done:
                    rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))
                    self._counts.extend(map(self._socket.sendmsg, ((view,),), ((rights,),)))
                else:
                    self._counts.extend(map(self._socket.send, (view[done:],)))
            except (BlockingIOError, InterruptedError):
                break
        self.waiting = self._stop() - sum(self._counts)

    def take(self) -> bool:
        """Takes what has arrived, without waiting; returns whether the other end is still there."""
        while True:
            try:
                self._arrived.extend(map(self._socket.recvmsg, (_CHUNK,), (_RIGHTS,)))
            except (BlockingIOError, InterruptedError):
                return True
            except ConnectionError:
                return False
            if not self._arrived[-1][0]:
                return False

    def next(self) -> tuple[dict[str, Any], memoryview] | None:
        """Returns the next whole message of those that were taken, with the bytes behind it, or None."""
        arrived = self._arrived
        total = sum(len(each[0]) for each in arrived)
        if total < _FRAME.size:
            return None
        if len(arrived[0][0]) < _FRAME.size:
            arrived = self._arrived = _joined(arrived)
        length, size = _FRAME.unpack_from(arrived[0][0])
        end = _FRAME.size + length + size
        if total < end:
            return None
        if len(arrived) > 1:
            arrived = _joined(arrived)
        ((data, ancillary, _, _),) = arrived
        view = memoryview(data)
        message = json.loads(bytes(view[_FRAME.size : _FRAME.size + length]))
        payload = memoryview(bytes(view[_FRAME.size + length : end]))
        for _, _, rights in ancillary:
            self._descriptors.extend(array.array("i", rights))
        self._arrived = deque(((view[end:], (), 0, None),) if total > end else ())
        return message, payload

    def _pieces(
        self, message: dict[str, Any], parts: Sequence[Any], descriptors: Sequence[int]
    ) -> list[tuple[int, memoryview, list[int]]]:
        """Returns a message as it stands in the outbox, its frame and JSON first."""
        text = json.dumps(message).encode()
        views = [memoryview(part).cast("B") for part in parts if len(part)]
        frame = memoryview(_FRAME.pack(len(text), sum(view.nbytes for view in views)) + text)
        pieces = []
        place = self._stop()
        for view in (frame, *views):
            pieces.append((place, view, list(map(os.dup, descriptors if view is frame else ()))))
            place += view.nbytes
        return pieces

    def _put(self, pieces: list[tuple[int, memoryview, list[int]]]) -> None:
        self.waiting += sum(view.nbytes for _, view, _ in pieces)
        self._outbox.extend(pieces)

    def _stop(self) -> int:
        """Returns the place behind the last byte of the outbox."""
        if not self._outbox:
            return sum(self._counts)
        start, view, _ = self._outbox[-1]
        return start + view.nbytes

    def descriptor(self) -> int:
        """Returns the next descriptor that came, which is the caller's now."""
        return self._descriptors.popleft()


def _joined(arrived: deque[_Arrival]) -> deque[_Arrival]:
    data = b"".join(each[0] for each in arrived)
    return deque(((data, [one for each in arrived for one in each[1]], 0, None),))


def _close_all(descriptors: list[int]) -> None:
    while descriptors:
        os.close(descriptors.pop())


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
