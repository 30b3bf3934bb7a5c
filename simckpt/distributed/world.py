"""The ranks of a run: found from torch.distributed as the program has set it up, and never imported without it."""

from __future__ import annotations

import os
import secrets
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import count
from typing import Any

from simckpt.distributed.voting import GRACE, PATIENCE, Ballot
from simckpt.errors import ConfigurationError, CoordinationError

GROUP_TIMEOUT = 300.0  # [s] of the dedicated group


@dataclass(frozen=True, eq=False, slots=True)
class World:
    """This process among the ranks of a run.

    `exchange` and `largest` are collective: every rank calls them in the same order, on its main thread.

    Attributes:
        rank: of this process.
        size: how many ranks there are, at least 2.
        id: the same text on all ranks, another one for each start of the program.
        group: a gloo group for simckpt alone: what goes wrong in it leaves training's own group usable.
        store: of keys, for the thread that made the world; a thread of its own takes `own_store`.
    """

    rank: int
    size: int
    id: str
    group: Any
    store: Any
    _base: Any
    _numbers: Iterator[int] = field(default_factory=count)

    def own_store(self) -> Any:
        """Returns the same store over a connection of its own: a client does one thing at a time, waiting included."""
        return _prefixed(self._base, self.id)

    def exchange(self, value: Any, *, patience: float = PATIENCE, grace: float = GRACE) -> list[Any]:
        """Returns the values of all ranks, in the order of ranks; they go through JSON.

        Raises:
            CoordinationError: ranks are missing, by number.
        """
        number = next(self._numbers)
        name, previous = f"exchange {number}", f"exchange {number - 1}" if number else ""
        ballot = Ballot(self.store, self.rank, self.size, name, patience, grace, previous)
        values: list[Any] = ballot.hold({"value": value}, _all_values)["values"]
        return values

    def largest(self, *numbers: int) -> tuple[int, ...]:
        """Returns the largest of each number (64 bits) over all ranks: a small all-reduce, cheap enough for each step.

        Raises:
            CoordinationError: a rank is lost, or took longer than the group's timeout. The group is of no use any more.
        """
        import torch
        import torch.distributed as dist

        found = torch.tensor(numbers, dtype=torch.int64)
        try:
            dist.all_reduce(found, op=dist.ReduceOp.MAX, group=self.group)
        except RuntimeError as error:
            message = f"the ranks do not agree on how to go on, for one of them is lost or hangs: {error}"
            raise CoordinationError(message) from error
        return tuple(found.tolist())


def find_world(*, timeout: float = GROUP_TIMEOUT) -> World | None:
    """Returns the ranks of this program, or None if it is one process; collective, on the main thread.

    Programs that did not set up `torch.distributed` pay nothing: it is looked for, not imported.

    Args:
        timeout: of the dedicated group [s].

    Raises:
        ConfigurationError: `torchrun` has started several ranks, and the program has set up no process group.
        CoordinationError: other ranks do not take part.
    """
    dist: Any = sys.modules.get("torch.distributed")
    if dist is None or not dist.is_available() or not dist.is_initialized():
        if "TORCHELASTIC_RUN_ID" in os.environ and int(os.environ.get("WORLD_SIZE", "1")) > 1:
            message = (
                f"torchrun has started {os.environ['WORLD_SIZE']} ranks: call torch.distributed.init_process_group() "
                "before the run is started"
            )
            raise ConfigurationError(message)
        return None
    if dist.get_world_size() < 2:
        return None
    import torch

    try:
        group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout))
        token = torch.tensor(list(secrets.token_bytes(8)), dtype=torch.uint8)
        dist.broadcast(token, 0, group=group)
    except RuntimeError as error:
        raise CoordinationError(f"not all ranks take part in starting the run: {error}") from error
    base = dist.group.WORLD.get_group_store()
    id = bytes(token.tolist()).hex()
    return World(dist.get_rank(), dist.get_world_size(), id, group, _prefixed(base, id), base)


def _prefixed(store: Any, id: str) -> Any:
    dist: Any = sys.modules["torch.distributed"]
    return dist.PrefixStore(f"simckpt/{id}", store.clone())


def _all_values(reports: list[Any]) -> dict[str, Any]:
    return {"values": [report["value"] for report in reports]}
