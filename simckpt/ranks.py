"""Who trains a run: one process by itself, or several ranks that come to their decisions together.

Whatever a program of several ranks has to agree on goes through a `Ranks`; a process that trains alone has one that
agrees with itself, so that nothing else asks which of the two it is.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from simckpt.errors import ConfigurationError, RunLockedError
from simckpt.storage.records import Shard
from simckpt.suggest import nearest

if TYPE_CHECKING:
    from simckpt.storage import StoreFiles

T = TypeVar("T")

_OWN = re.compile(r"(.+)@(\d+)\Z", re.DOTALL)


@dataclass(frozen=True)
class Agreed:
    """What all ranks do at a step.

    Attributes:
        due: whether they save.
        signal: the name of the signal that asks one of them to end, or None.
        judge: whether there is something that a rollback policy should look at.
    """

    due: bool
    signal: str | None
    judge: bool


class Held(Protocol):
    """The right to write a run: a `storage.Claim`, or what a rank has of the one that rank 0 holds."""

    is_idle: Callable[[], bool]

    @property
    def held(self) -> bool:
        """Whether this process holds it, as far as it knows."""
        ...

    def verify(self) -> None:
        """Raises ConflictError if it is somebody else's by now."""
        ...

    def beat(self, *, now: bool = False) -> None:
        """Tells other machines that this process lives."""
        ...

    def release(self) -> None:
        """Gives it back."""
        ...


class Phases(Protocol):
    """The two points of a restore at which ranks wait for each other: if one has failed by then, all raise."""

    def ready(self) -> None:
        """Nothing was changed so far; from here on live objects are."""
        ...

    def done(self) -> None:
        """All is restored; it is still known how to put everything back."""
        ...


class Ranks(Protocol):
    """The processes that train a run. All but `stored` is called by every rank, in the same order, in the main thread.

    Attributes:
        rank: of this process, from 0 on.
        size: how many there are.
        shard: which part of a checkpoint this process writes, or None if it writes all.
        busy: whether a save was in flight on some rank when they last agreed on a step.
        patience: how much longer one rank may take than the others for its part of a save [s]; for decisions, starts
            and restores at least as long as training's own process group waits.
    """

    rank: int
    size: int
    shard: Shard | None
    busy: bool
    patience: float

    @property
    def leads(self) -> bool:
        """Whether this process holds the claim, decides and writes the records; the others follow."""
        ...

    def at(self, call: str) -> None:
        """Takes note of the call of the program that is answered from here on, which is the same on all ranks."""
        ...

    def first(self, function: Callable[[], T]) -> T:
        """Returns what the leading rank's function returned, which goes through JSON; its error is raised by all."""
        ...

    def each(self, function: Callable[[], T]) -> T:
        """Returns what the function returned here, once it has on all ranks; an error of one is raised by all."""
        ...

    def gather(self, value: Any) -> list[Any]:
        """Returns the values of all ranks, in their order; they go through JSON."""
        ...

    def agree(
        self,
        step: int,
        *,
        due: bool,
        signal: str | None,
        judge: bool,
        busy: bool,
        signals: tuple[str, ...],
        explicit: bool = False,
    ) -> Agreed:
        """Returns what all ranks do at a step; raises ConfigurationError if they are not at the same one.

        Args:
            step: that the loop has reached [env steps].
            due: whether a policy says that a save is due; that of the leading rank counts.
            signal: that asks this process to end.
            judge: whether this rank has something for a rollback policy.
            busy: whether this rank has a save in flight.
            signals: the names that `signal` may have.
            explicit: whether the program asks for a save.
        """
        ...

    def claim(self, run: str) -> Held:
        """Returns what a rank that follows has of the claim."""
        ...

    def leave(self) -> None:
        """Ends the connections to the other ranks, for the run is closed here."""
        ...

    def part(self, signal: str | None) -> str | None:
        """Waits until no rank needs another one any more; returns the signal that one of them was asked to end by."""
        ...

    def phases(self) -> AbstractContextManager[Phases]:
        """Returns the phases of a restore; an error within the block is told to the others."""
        ...

    def stored(self, components: Mapping[str, Any], per_rank: Mapping[str, bool]) -> dict[str, str]:
        """Returns {component: its name in a checkpoint}, where each rank has its own of those that are not shared.

        Args:
            components: {name: live object}.
            per_rank: {name: whether each rank has its own}, where the class of the object tells the wrong thing.

        Raises:
            ConfigurationError: `per_rank` names what is no component, or a name that this needs for itself.
        """
        ...

    def component_of(self, stored: str) -> str:
        """Returns the name that the program gives a component, from its name in a checkpoint."""
        ...


class _NoPhases:
    def ready(self) -> None:
        pass

    def done(self) -> None:
        pass


class Alone:
    """One process, which agrees with itself."""

    rank = 0
    size = 1
    shard: Shard | None = None
    busy = False
    patience = 0.0
    leads = True

    def at(self, call: str) -> None:
        """There are no others that could be elsewhere."""

    def first(self, function: Callable[[], T]) -> T:
        """Calls it."""
        return function()

    def each(self, function: Callable[[], T]) -> T:
        """Calls it."""
        return function()

    def gather(self, value: Any) -> list[Any]:
        """Returns the value alone."""
        return [value]

    def agree(
        self,
        step: int,
        *,
        due: bool,
        signal: str | None,
        judge: bool,
        busy: bool,
        signals: tuple[str, ...],
        explicit: bool = False,
    ) -> Agreed:
        """Returns what was given."""
        return Agreed(due, signal, judge)

    def claim(self, run: str) -> Held:
        """A process that trains alone follows nobody."""
        raise AssertionError(run)

    def leave(self) -> None:
        """There are no others."""

    def part(self, signal: str | None) -> str | None:
        """Waits for nobody."""
        return signal

    def phases(self) -> AbstractContextManager[Phases]:
        """Returns phases in which nobody is waited for."""
        return nullcontext(_NoPhases())

    def stored(self, components: Mapping[str, Any], per_rank: Mapping[str, bool]) -> dict[str, str]:
        """Returns the names themselves."""
        check_per_rank(components, per_rank)
        return {name: name for name in components}

    def component_of(self, stored: str) -> str:
        """Returns the name itself."""
        return stored


def check_per_rank(components: Mapping[str, Any], per_rank: Any) -> None:
    """Checks that `per_rank` speaks of components; raises ConfigurationError."""
    if not isinstance(per_rank, Mapping) or not all(type(value) is bool for value in per_rank.values()):
        message = f"per_rank is a dict such as {{'normalizer': True, 'agent': False}}, got {per_rank!r}"
        raise ConfigurationError(message, keys=["per_rank"])
    for name in per_rank:
        if name not in components:
            message = f"per_rank names {name!r}, which is no component{nearest(str(name), components)}"
            raise ConfigurationError(message, keys=["per_rank"])


def check_names(of_ranks: Sequence[str]) -> None:
    """Checks that all ranks start the run of one name; raises ConfigurationError."""
    for rank, name in enumerate(of_ranks):
        if name != of_ranks[0]:
            message = f"the ranks of a program train one run, and rank 0 starts {of_ranks[0]!r}, rank {rank} {name!r}"
            raise ConfigurationError(message, keys=["name"])


def claimed(files: StoreFiles, run: str) -> Held:
    """Returns the claim on a run; raises RunLockedError, with a hint where ranks do not know of each other."""
    try:
        return files.claim(run)
    except RunLockedError as error:
        ranks = int(os.environ.get("WORLD_SIZE", "1"))
        if "TORCHELASTIC_RUN_ID" not in os.environ or ranks < 2:
            raise
        hint = (
            f"torchrun has started {ranks} ranks, each of which trains alone: call "
            "torch.distributed.init_process_group() before the run is started, or let each start a run of its own"
        )
        raise RunLockedError(f"{error}; {hint}", host=error.host, pid=error.pid) from error


def stored_name(name: str, rank: int) -> str:
    """Returns the name in a checkpoint of what a rank has of a component."""
    return f"{name}@{rank}"


def owner_of(stored: str) -> tuple[str, int | None]:
    """Returns a component's name and the rank whose it is, None if they share it, from a name in a checkpoint."""
    found = _OWN.match(stored)
    return (stored, None) if found is None else (found[1], int(found[2]))


ALONE = Alone()


def ranks_of_program() -> Ranks:
    """Returns the ranks of this program, or `ALONE`; every rank calls it where it starts a run.

    Raises:
        CoordinationError: other ranks do not take part.
    """
    if "torch.distributed" not in sys.modules:
        return ALONE
    from simckpt.distributed.world import find_world

    world = find_world()
    if world is None:
        return ALONE
    from simckpt.distributed.several import Several

    return Several(world)
