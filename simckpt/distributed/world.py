"""The ranks of a run: found from torch.distributed as the program has set it up, and never imported without it."""

from __future__ import annotations

import os
import re
import secrets
import sys
from dataclasses import dataclass
from datetime import timedelta
from itertools import count
from typing import Any

from simckpt.distributed.keys import Keys
from simckpt.distributed.voting import GRACE, PATIENCE, Ballot, ranks_text
from simckpt.errors import ConfigurationError, CoordinationError, OutcomeUnknownError

ROLL_CALL = 15.0  # [s]; whoever waited in the same collective comes to it at about the same time
DEFAULT_TIMEOUT = 1800.0  # [s] of a process group of which it is not known; torch's own default for gloo


@dataclass(eq=False, slots=True)
class World:
    """This process among the ranks of a run.

    `exchange` and `largest` are collective: every rank calls them in the same order, on its main thread.

    Attributes:
        rank: of this process.
        size: how many ranks there are, at least 2.
        id: the same text on all ranks, another one for each start of the program.
        group: a gloo group for simckpt alone: what goes wrong in it leaves training's own group usable.
        store: of keys, for all threads.
        timeout: how long ranks wait for each other where nothing else says so, that of training's own group [s].
        exchanges: how many there were: at the same place of a program the same number on all ranks.
        call: of the program that is being answered, for messages.
    """

    rank: int
    size: int
    id: str
    group: Any
    store: Keys
    timeout: float
    exchanges: int = 0
    call: str = "Store.start"

    def allow(self, seconds: float) -> None:
        """Lets one rank take longer than the others than training's own group would [s]."""
        if seconds > self.timeout:
            from torch.distributed.distributed_c10d import _set_pg_timeout

            _set_pg_timeout(timedelta(seconds=seconds), self.group)
            self.timeout = seconds

    def close(self) -> None:
        """Gives up the group and the connection of this process; whoever still waits for it there is told so."""
        import torch.distributed as dist

        # a program may have ended all groups before
        if dist.is_initialized() and self.group in dist.distributed_c10d._world.pg_map:
            dist.destroy_process_group(self.group)
        self.store.close()

    def exchange(self, value: Any, *, patience: float = PATIENCE, grace: float = GRACE) -> list[Any]:
        """Returns the values of all ranks, in the order of ranks; they go through JSON.

        Raises:
            CoordinationError: ranks are missing, by number.
            ConfigurationError: they have come here from other calls than each other.
            OutcomeUnknownError: rank 0 or the store was lost, which is as bad.
        """
        number, self.exchanges = self.exchanges, self.exchanges + 1
        previous = [f"exchange {number - 1}"] if number else []
        ballot = Ballot(self.store, self.rank, self.size, f"exchange {number}", patience, grace, previous)
        try:
            told = ballot.hold({"value": value, "call": self.call}, _all_values)
        except CoordinationError as error:
            if not error.ranks:
                raise
            message = f"{self.call}: {ranks_text(error.ranks)} did not come to it within {patience:g} s: {_SAME_CALLS}"
            raise CoordinationError(message, ranks=error.ranks) from error
        if "calls" in told:
            calls: list[str] = told["calls"]
            other = next(rank for rank, call in enumerate(calls) if call != calls[0])
            message = f"rank 0 is at {calls[0]}, rank {other} at {calls[other]}: {_SAME_CALLS}"
            raise ConfigurationError(message)
        values: list[Any] = told["values"]
        return values

    def missing(self, occasion: str) -> list[int]:
        """Returns the ranks that do not answer within `ROLL_CALL`; empty if that cannot be found out.

        Args:
            occasion: the same text on all ranks that call the roll, and another one each time.
        """
        ballot = Ballot(self.store, self.rank, self.size, f"roll call {occasion}", ROLL_CALL, ROLL_CALL)
        try:
            ballot.hold({}, lambda reports: {})
        except CoordinationError as error:
            return list(error.ranks)
        except OutcomeUnknownError:
            pass
        return []

    def largest(self, *numbers: int) -> tuple[int, ...]:
        """Returns the largest of each number (64 bits) over all ranks: a small all-reduce, cheap enough for each step.

        Raises:
            CoordinationError: a rank is lost, or took longer than `timeout`. The group is of no use any more.
        """
        import torch
        import torch.distributed as dist

        found = torch.tensor(numbers, dtype=torch.int64)
        try:
            dist.all_reduce(found, op=dist.ReduceOp.MAX, group=self.group)
        except RuntimeError as error:
            message = f"{self.call}: one of the other ranks is lost, has ended or hangs ({first_words(error)})"
            raise CoordinationError(message) from error
        return tuple(found.tolist())


def find_world() -> World | None:
    """Returns the ranks of this program, or None if it is one process; collective, on the main thread.

    Programs that did not set up `torch.distributed` pay nothing: it is looked for, not imported.

    Raises:
        CoordinationError: other ranks do not take part, by number.
    """
    dist: Any = sys.modules.get("torch.distributed")
    if dist is None or not dist.is_available() or not dist.is_initialized() or dist.get_world_size() < 2:
        return None
    import torch

    timeout, rank, size = _timeout_of(dist.group.WORLD), dist.get_rank(), dist.get_world_size()
    base = dist.group.WORLD.get_group_store()
    # of no weight: who has come, for the message; another text for each start, and for each incarnation of a program
    present = Keys(base, f"simckpt/start {next(_starts)} {os.environ.get('TORCHELASTIC_RESTART_COUNT', '')}")
    present.set(str(rank), "")
    try:
        group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout))
        token = torch.tensor(list(secrets.token_bytes(8)), dtype=torch.uint8)
        dist.broadcast(token, 0, group=group)
        present.delete(str(rank))
    except RuntimeError as error:
        missing = [other for other in range(size) if not present.check([str(other)])]
        who = ranks_text(missing) if missing else "some rank"
        message = f"Store.start: {who} did not come to it within {timeout:g} s ({first_words(error)}): {_SAME_CALLS}"
        raise CoordinationError(message, ranks=missing) from error
    finally:
        present.close()
    id = bytes(token.tolist()).hex()
    return World(rank, size, id, group, Keys(base, f"simckpt/{id}"), timeout)


_starts = count()  # of this process


def first_words(error: BaseException) -> str:
    """Returns what torch says has happened, without the trace and the places in its source that it adds."""
    return re.sub(r"^(\[[^\]]*\] *)+", "", str(error).partition("\n")[0]).partition(". ")[0]


def _timeout_of(group: Any) -> float:
    """Returns how long collectives of a process group wait [s]; those of the slowest backend, if it has several."""
    found = []
    for device in group._device_types:
        try:
            found.append(group._get_backend(device).options._timeout.total_seconds())
        except (AttributeError, RuntimeError):
            # a backend of somebody else
            found.append(DEFAULT_TIMEOUT)
    return max(found, default=DEFAULT_TIMEOUT)


_SAME_CALLS = "all ranks of a program make the same calls of simckpt, in the same order"


def _all_values(reports: list[Any]) -> dict[str, Any]:
    calls = [report["call"] for report in reports]
    if len(set(calls)) > 1:
        return {"calls": calls}
    return {"values": [report["value"] for report in reports]}
