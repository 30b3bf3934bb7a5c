"""Tells of records that a look at a store has passed over because they are damaged."""

from __future__ import annotations

import warnings
from collections.abc import Mapping

from simckpt.errors import DamageWarning, StoreError

ADVICE = "`simckpt check STORE --repair` puts aside what is damaged and writes anew what other records prove"


def warn_of_damage(damaged: Mapping[str, StoreError], *, stacklevel: int = 2) -> None:
    """Warns of what was passed over, all at once; of nothing if there is none.

    Args:
        damaged: {what it is: error}.
        stacklevel: as of `warnings.warn`, counted from the caller.
    """
    if damaged:
        told = "; ".join(f"{what} was passed over: {error}" for what, error in damaged.items())
        warnings.warn(f"{told}. {ADVICE}", DamageWarning, stacklevel=stacklevel + 1)


def of_commits(run: str, damaged: Mapping[int, StoreError]) -> dict[str, StoreError]:
    """Returns {what it is: error} of the commits of a run, given {commit number: error}."""
    return {f"checkpoint number {seq} of run {run!r}": error for seq, error in damaged.items()}


def unread(damaged: Mapping[str, StoreError]) -> str:
    """Returns the end of a message that says what could not be looked at, or ""."""
    return "".join(f"; {what} cannot be read: {error}" for what, error in damaged.items())
