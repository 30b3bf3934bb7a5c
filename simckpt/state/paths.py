"""Where a leaf lies inside its component: percent-encoded parts joined by "/".

The path is for people and for HDF5; the true keys are in the structure. So a path has to be unique and safe, but not
reversible: names that simckpt makes up start with "%~", which percent-encoding never yields.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Container
from typing import Any
from urllib.parse import quote

# printable ASCII without "/" and "%" stays as it is
_PLAIN = re.compile(r"[ -$&-.0-~]+").fullmatch
_KEPT = "".join(chr(code) for code in range(0x20, 0x7F) if chr(code) not in "/%")
_RESERVED = {"": "%~empty", ".": "%2E", "..": "%2E%2E", "_tree": "%5Ftree"}

# HDF5 has no limit of its own that bites here; these keep listings readable and layouts small
_LONGEST_PART = 200
_LONGEST_PATH = 1000
_PLAIN_SCALARS = (str, int, float, bool, type(None))


def path_part(key: str) -> str:
    """Returns the part of a path that stands for a string key: printable, without "/", never "_tree", "." or ".."."""
    if _PLAIN(key) and len(key) <= _LONGEST_PART:
        return _RESERVED.get(key, key)
    if not key:
        return _RESERVED[key]
    encoded = quote(key, safe=_KEPT, errors="surrogatepass")
    if len(encoded) <= _LONGEST_PART:
        return encoded
    digest = hashlib.blake2b(key.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()
    # an escape cut in two would not decode
    head = encoded[: _LONGEST_PART - 20]
    head = head[: head.rindex("%")] if "%" in head[-2:] else head
    return f"{head}%~{digest}"


def key_part(key: Any, index: int, taken: Container[str] = ()) -> str:
    """Returns the part for the `index`-th key of a dict, of any type, different from all parts in `taken`."""
    part = path_part(key) if type(key) is str else path_part(_spell(key, index))
    if part not in taken:
        return part
    number = 1
    while f"{part}%~{number}" in taken:
        number += 1
    return f"{part}%~{number}"


def _spell(key: Any, index: int) -> str:
    """Returns a readable name for a key that is no string; `index` where its repr might differ between processes."""
    if isinstance(key, _PLAIN_SCALARS):
        return repr(key) if type(key) in _PLAIN_SCALARS else str(key)
    if type(key) is tuple and all(type(item) in _PLAIN_SCALARS for item in key):
        return repr(key)
    return f"key {index}"


def join(parent: str, part: str) -> str:
    """Returns the path of a child; one that grows beyond all measure (a long linked list) starts over at "%~deep"."""
    if not parent:
        return part
    if len(parent) > _LONGEST_PATH:
        return f"%~deep/{part}"
    return f"{parent}/{part}"


class Places:
    """Gives each leaf a path of its own, so that no path is both a dataset and a group."""

    def __init__(self) -> None:
        self._leaves: set[str] = set()
        self._groups: set[str] = set()
        self._counters: dict[str, int] = {}

    def take(self, path: str) -> str:
        """Returns `path`, or where it is taken, the same with a suffix "%~<number>"; the root is called "value"."""
        path = path or "value"
        parent = path.rpartition("/")[0]
        if parent and parent not in self._groups:
            parent = self._open_groups(parent)
            path = f"{parent}/{path.rpartition('/')[2]}"
        if path in self._leaves or path in self._groups:
            path = self._number(path)
        self._leaves.add(path)
        return path

    def _open_groups(self, path: str) -> str:
        """Returns the group path after renaming every part that is already a leaf."""
        opened = ""
        for part in path.split("/"):
            opened = f"{opened}/{part}" if opened else part
            if opened in self._leaves:
                # the same clash always gets the same answer, so that siblings stay together
                opened = f"{opened}%~group"
            self._groups.add(opened)
        return opened

    def _number(self, path: str) -> str:
        number = self._counters.get(path, 0)
        while True:
            number += 1
            candidate = f"{path}%~{number}"
            if candidate not in self._leaves and candidate not in self._groups:
                self._counters[path] = number
                return candidate
