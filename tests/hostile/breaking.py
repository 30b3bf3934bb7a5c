"""Checks left out on purpose, in the processes of this suite alone: whoever finds nothing then finds nothing at all."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from simckpt.storage import pieces, reader


def without_digests() -> None:
    """Leaves are taken whatever their bytes are."""

    def read(descriptor: int, leaf: Any, *, file_size: int, memory: Any) -> Any:
        array = memory(leaf)
        if leaf.offset is not None:
            reader.read_into(descriptor, array.reshape(-1).view("u1").data, leaf.offset)
        return array

    reader._read_leaf = read  # type: ignore[assignment]


def following_links() -> None:
    """Symbolic links are followed."""
    reader._FOLDER &= ~os.O_NOFOLLOW
    reader._FILE &= ~os.O_NOFOLLOW


def without_a_bound() -> None:
    """The same rows may be named any number of times."""
    pieces.check_overlaps = lambda leaves, path: None  # type: ignore[assignment]


# the first is caught by mutants, the others by the corpus
BROKEN: dict[str, Callable[[], None]] = {
    "digests": without_digests,
    "links": following_links,
    "bound": without_a_bound,
}
