"""The file in memory that libhdf5 lays a file out in: it keeps the few KB that are written, and none of the payload."""

# ruff: noqa: D102 (the methods are those of io.RawIOBase)
from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

_PAGE = 4096  # [bytes]


class Image(io.RawIOBase):
    """A file in memory that holds the pages which were written, and none of the payload's."""

    def __init__(self) -> None:
        self.size = 0
        self._position = 0
        self._pages: dict[int, bytearray] = {}

    def copy(self) -> Image:
        """Returns an image of the same content that can be changed without this one."""
        other = Image()
        other.size = self.size
        other._pages = {number: bytearray(page) for number, page in self._pages.items()}
        return other

    def readable(self) -> bool:
        return True

    def writable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._position = offset + (0, self._position, self.size)[whence]
        return self._position

    def tell(self) -> int:
        return self._position

    def truncate(self, size: int | None = None) -> int:
        self.size = self._position if size is None else size
        return self.size

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        done = 0
        while done < len(view):
            number, start = divmod(self._position + done, _PAGE)
            step = min(_PAGE - start, len(view) - done)
            page = self._pages.setdefault(number, bytearray(_PAGE))
            page[start : start + step] = view[done : done + step]
            done += step
        self._position += done
        self.size = max(self.size, self._position)
        return done

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        view[:] = self._bytes(self._position, self._position + len(view))
        self._position += len(view)
        return len(view)

    def _bytes(self, start: int, stop: int) -> bytes:
        pieces = []
        while start < stop:
            number, first = divmod(start, _PAGE)
            step = min(_PAGE - first, stop - start)
            page = self._pages.get(number)
            pieces.append(bytes(step) if page is None else bytes(page[first : first + step]))
            start += step
        return b"".join(pieces)

    def without(self, payloads: Sequence[tuple[int | None, int]]) -> tuple[tuple[int, bytes], ...]:
        """Returns (offset, bytes) of everything outside of the payloads, which must not overlap."""
        rest, position = [], 0
        for offset, size in sorted((offset, size) for offset, size in payloads if offset is not None):
            assert offset >= position, "libhdf5 gave two datasets the same bytes"
            if offset > position:
                rest.append((position, self._bytes(position, offset)))
            position = offset + size
        if self.size > position:
            rest.append((position, self._bytes(position, self.size)))
        return tuple(rest)
