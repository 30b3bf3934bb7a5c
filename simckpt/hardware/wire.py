"""What travels between a link and its device: one message of numbers, with a checksum, sequence number and times.

A message is little-endian, and the same over datagrams and over streams of bytes:

    magic        4 bytes  b"sLnk": where a reader of a stream takes up again after damage
    version      1 byte   1
    kind         1 byte   1 a command (to the device), 2 a reading (from it)
    count        2 bytes  how many values follow
    stream       8 bytes  drawn anew whenever the sender starts counting; a device may leave it at 0
    sequence     8 bytes  of this message in its stream, from 0 on, one more each; wraps at 2**64
    monotonic    8 bytes  the sender's clock that never goes back [ns]
    wall         8 bytes  the sender's wall clock [ns since 1970], 0 if it has none
    values       count times 8 bytes, float64
    checksum     4 bytes  CRC-32 (zlib's) of everything before
"""

from __future__ import annotations

import struct
import zlib
from typing import Any, NamedTuple

import numpy as np

COMMAND = 1
READING = 2
LARGEST_COUNT = 4096  # of values: such a message, 32 KiB, still fits into one datagram

_MAGIC = b"sLnk"
_VERSION = 1
_HEADER = struct.Struct("<4sBBHQQqq")
_CHECKSUM = struct.Struct("<I")
_FLOAT64 = np.dtype("<f8")


class Message(NamedTuple):
    """A message as it arrived.

    Attributes:
        stream: which count `sequence` belongs to.
        sequence: its number in that stream.
        monotonic: the sender's own clock [ns]; where it starts is unknown.
        wall: the sender's wall clock [ns since 1970].
        values: `(count,)` float64, read-only.
    """

    stream: int
    sequence: int
    monotonic: int
    wall: int
    values: np.ndarray[Any, np.dtype[np.float64]]


class Codec:
    """Writes and reads the messages of one kind and width.

    Args:
        kind: `COMMAND` or `READING`.
        count: how many values a message has.
    """

    def __init__(self, kind: int, count: int) -> None:
        self.kind = kind
        self.count = count
        self.size = _HEADER.size + _FLOAT64.itemsize * count + _CHECKSUM.size  # [bytes]

    def encode(
        self,
        stream: int,
        sequence: int,
        monotonic: int,
        wall: int,
        values: np.ndarray[Any, Any],
    ) -> bytes:
        """Returns the bytes of a message; `values` is `(count,)` float64."""
        header = _HEADER.pack(_MAGIC, _VERSION, self.kind, self.count, stream, sequence, monotonic, wall)
        content = header + values.astype(_FLOAT64, copy=False).tobytes()
        return content + _CHECKSUM.pack(zlib.crc32(content))

    def decode(self, data: bytes) -> Message | None:
        """Returns the message that these bytes are, or None if they are damaged or something else."""
        if len(data) != self.size or data[:4] != _MAGIC:
            return None
        _, version, kind, count, stream, sequence, monotonic, wall = _HEADER.unpack_from(data)
        if (version, kind, count) != (_VERSION, self.kind, self.count):
            return None
        (checksum,) = _CHECKSUM.unpack_from(data, self.size - _CHECKSUM.size)
        if zlib.crc32(memoryview(data)[: -_CHECKSUM.size]) != checksum:
            return None
        # a copy of its own: whoever keeps the values does not keep the message
        values = np.frombuffer(data, _FLOAT64, count, _HEADER.size).astype(np.float64)
        values.flags.writeable = False
        return Message(stream, sequence, monotonic, wall, values)


class StreamReader:
    """Finds the messages in a stream of bytes that may start anywhere and be damaged anywhere.

    It never holds more than one message and what arrived with it. What looks like a start and is none delays the
    messages after it by no more than the size of one.

    Args:
        codec: of the messages.
    """

    def __init__(self, codec: Codec) -> None:
        self._codec = codec
        self._held = b""
        self.skipped = 0  # [bytes] that belonged to no whole message

    def feed(self, data: bytes) -> list[Message]:
        """Returns the messages that these bytes complete, in their order."""
        held = self._held + data
        size = self._codec.size
        messages = []
        start = 0
        while True:
            found = held.find(_MAGIC, start)
            # the beginning of a magic may be all that has come
            end = found if found >= 0 else max(start, len(held) - _partial_magic(held))
            self.skipped += end - start
            start = end
            if found < 0 or len(held) - start < size:
                break
            message = self._codec.decode(held[start : start + size])
            if message is None:
                self.skipped += 1
                start += 1
            else:
                messages.append(message)
                start += size
        self._held = held[start:]
        return messages


def _partial_magic(data: bytes) -> int:
    """Returns how many bytes at the end may be the beginning of a message."""
    return next((length for length in range(len(_MAGIC) - 1, 0, -1) if data.endswith(_MAGIC[:length])), 0)
