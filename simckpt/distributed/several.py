"""Several ranks that train one run: how they come to decisions, and whose name which component has in a checkpoint."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

from simckpt import errors
from simckpt.distributed.voting import PATIENCE, ranks_text
from simckpt.distributed.world import World
from simckpt.errors import (
    ConfigurationError,
    ConflictError,
    CoordinationError,
    OutcomeUnknownError,
    SimckptError,
    UnsupportedStateError,
)
from simckpt.ranks import Agreed, check_per_rank, owner_of, stored_name
from simckpt.storage.records import Shard

T = TypeVar("T")


class Several:
    """The ranks of a run of several processes; see `simckpt.ranks.Ranks`.

    Args:
        world: the processes.

    Attributes:
        world: the processes.
        shard: which part of a checkpoint this rank writes.
        saves: how many saves were begun, so that each has a name.
    """

    def __init__(self, world: World) -> None:
        self.world = world
        self.rank = world.rank
        self.size = world.size
        self.shard: Shard | None = Shard(world.rank, world.size)
        self.busy = False
        self.saves = 0
        self._patience = PATIENCE
        self._met = -1  # exchanges, when all ranks were found to be at the same call

    def at(self, call: str) -> None:
        """Takes note of the call of the program that is answered from here on, which is the same on all ranks."""
        self.world.call = call

    @property
    def leads(self) -> bool:
        """Whether this is rank 0."""
        return self.rank == 0

    @property
    def patience(self) -> float:
        """How much longer one rank may take than the others for its part of a save [s]; for others no less."""
        return self._patience

    @patience.setter
    def patience(self, seconds: float) -> None:
        self._patience = seconds
        self.world.allow(seconds)

    def gather(self, value: Any) -> list[Any]:
        """Returns the values of all ranks; raises CoordinationError if some are missing, by number."""
        # what ranks do between two such points, as reading their parts of a checkpoint, may take longer than a save
        return self.world.exchange(value, patience=max(self.patience, self.world.timeout))

    def leave(self) -> None:
        """Ends the connections to the other ranks, for the run is closed here."""
        self.world.close()

    def first(self, function: Callable[[], T]) -> T:
        """Returns what rank 0's function returned; all raise its error."""
        own: BaseException | None = None
        told: dict[str, Any] | None = None
        if self.leads:
            try:
                told = {"value": function()}
                json.dumps(told)
            except BaseException as error:
                own, told = error, {"error": error_to_json(error)}
        found = self.gather(told)[0]
        if own is not None:
            raise own
        if "error" in found:
            raise error_from_json(found["error"])
        value: T = found["value"]
        return value

    def each(self, function: Callable[[], T]) -> T:
        """Returns what the function returned here; all raise the error of the first rank that has one."""
        with self.together():
            return function()

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """Waits for all ranks at the end of the block; if it has failed on one, all raise that."""
        own: BaseException | None = None
        try:
            yield
        except BaseException as error:
            own = error
        self.join(own)

    def join(self, own: BaseException | None) -> None:
        """Waits for all ranks, and raises the error of the first that has one."""
        told = self.gather(None if own is None else error_to_json(own))
        if own is not None and not isinstance(own, Exception):
            raise own
        for rank, found in enumerate(told):
            if found is not None:
                if rank == self.rank:
                    assert own is not None
                    own.add_note(f"raised by rank {rank} of {self.size}")
                    raise own
                raise error_from_json(found, rank=rank) from own

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
        """Returns what all ranks do at a step, by one small all-reduce."""
        asked = 0 if signal is None else signals.index(signal) + 1
        self.at("Checkpointer.save" if explicit else "Checkpointer.step")
        if self._met != self.world.exchanges:
            # for a rank that is at another call would be waited for in a collective, which tells nothing
            self.gather(None)
            self._met = self.world.exchanges
        told = (step, -step, due and self.leads, asked, judge, busy, self.saves, explicit, not explicit)
        try:
            highest, lowest, saves, asked, judges, flies, count, explicitly, implicitly = self.world.largest(*told)
        except CoordinationError as error:
            # a collective that fails names nobody
            if missing := self.world.missing(f"at step {step}"):
                message = f"{ranks_text(missing)} did not come to step {step}, which ends the run here: {error}"
                raise CoordinationError(message, ranks=missing) from error
            raise
        # a rank that has begun another number of saves gives the next one the same name all the same
        self.saves = count
        if explicitly and implicitly:
            raise ConfigurationError(
                f"some ranks call Checkpointer.save at step {step} and others Checkpointer.step: all of them make the "
                "same calls",
                keys=["step"],
            )
        if highest != -lowest:
            raise ConfigurationError(
                f"the ranks are at different steps, from {-lowest} to {highest}; rank {self.rank} is at {step}: "
                "all of them call Checkpointer.step with the same steps",
                keys=["step"],
            )
        self.busy = bool(flies)
        return Agreed(bool(saves), signals[asked - 1] if asked else None, bool(judges))

    def claim(self, run: str) -> Followed:
        """Returns what this rank has of the claim that rank 0 holds."""
        return Followed(run)

    def part(self, signal: str | None) -> str | None:
        """Waits until all ranks are here, for the store of keys may end with one of them; returns a signal of one."""
        self.at("the end of the loop")
        # whoever is lost now has ended too early for itself, not for this rank
        with contextlib.suppress(CoordinationError, OutcomeUnknownError):
            signals = self.world.exchange(signal, patience=self.patience)
            return next(filter(None, signals), None)
        return signal

    @contextlib.contextmanager
    def phases(self) -> Iterator[_Phases]:
        """Returns the phases of a restore."""
        phases = _Phases(self)
        try:
            yield phases
        except BaseException as error:
            phases.fail(error)
            raise

    def stored(self, components: Mapping[str, Any], per_rank: Mapping[str, bool]) -> dict[str, str]:
        """Returns {component: its name in a checkpoint}."""
        check_per_rank(components, per_rank)
        names = {}
        for name, component in components.items():
            if owner_of(name)[1] is not None:
                message = f"no component of several ranks can be called {name!r}: '@' and a number say whose it is"
                raise ConfigurationError(message, keys=[name])
            _refuse_other_forms(name, component)
            own = per_rank.get(name, not is_shared(component))
            names[name] = stored_name(name, self.rank) if own else name
        return names

    def component_of(self, stored: str) -> str:
        """Returns the name that the program gives a component."""
        return owner_of(stored)[0]


def is_shared(component: Any) -> bool:
    """Returns whether several ranks have one component together, by its class: what torch trains."""
    torch = sys.modules.get("torch")
    if torch is None:
        return False
    return isinstance(
        component,
        torch.nn.Module | torch.optim.Optimizer | torch.optim.lr_scheduler.LRScheduler | torch.amp.GradScaler,
    )


def _refuse_other_forms(name: str, component: Any) -> None:
    """Raises UnsupportedStateError for what keeps the parts of ranks in forms of its own."""
    torch, zero = sys.modules.get("torch"), sys.modules.get("torch.distributed.optim")
    fsdp, remedy = sys.modules.get("torch.distributed.fsdp"), ""
    modules = component.modules() if torch is not None and isinstance(component, torch.nn.Module) else ()
    if zero is not None and isinstance(component, getattr(zero, "ZeroRedundancyOptimizer", ())):
        remedy = "fully_shard the module, and take a plain optimizer, which is sharded with it"
    elif fsdp is not None and any(isinstance(module, fsdp.FullyShardedDataParallel) for module in modules):
        remedy = "take torch.distributed.fsdp.fully_shard, its successor"
    if remedy:
        kind = type(component).__name__
        message = f"component {name!r}, a {kind}, cannot be saved: {remedy}"
        raise UnsupportedStateError(message, path=name, type_name=kind)


class _Phases:
    def __init__(self, ranks: Several) -> None:
        self._ranks = ranks
        self._left = 2
        self._joining = False

    def ready(self) -> None:
        """Waits until all have come here; raises if one has failed."""
        self._join()

    def done(self) -> None:
        """Waits until all have come here; raises if one has failed."""
        self._join()

    def _join(self, error: BaseException | None = None) -> None:
        self._left -= 1
        # whoever finds here that others have failed has told them nothing more to wait for
        try:
            self._ranks.join(error)
        except BaseException:
            self._left = 0
            raise

    def fail(self, error: BaseException) -> None:
        """Tells the others, if they still wait to hear of this rank; raises the error of the first that has failed."""
        if self._left:
            self._join(error)


class Followed:
    """What a rank has of the claim that rank 0 holds: it lasts as long as the run is open here.

    Attributes:
        is_idle: see `storage.Claim`.
    """

    def __init__(self, run: str) -> None:
        self.is_idle: Callable[[], bool] = lambda: False
        self._run = run
        self._pid: int | None = os.getpid()

    @property
    def held(self) -> bool:
        """Whether the run is open here; False in forked children."""
        return self._pid == os.getpid()

    def verify(self) -> None:
        """Raises ConflictError if the run was closed here; whose the claim is, rank 0 finds out."""
        if not self.held:
            raise ConflictError(f"run {self._run!r} was closed by this rank, or this is a fork of it")

    def beat(self, *, now: bool = False) -> None:
        """Does nothing: rank 0 tells other machines that the run is alive."""

    def release(self) -> None:
        """Closes the run here."""
        self._pid = None


def error_to_json(error: BaseException) -> dict[str, Any]:
    """Returns an error as other ranks are told it; fields that JSON cannot hold are left out."""
    fields = {}
    for name, value in vars(error).items():
        with contextlib.suppress(TypeError, ValueError):
            json.dumps(value)
            if not name.startswith("_"):
                fields[name] = value
    return {"type": type(error).__name__, "message": str(error), "fields": fields}


def error_from_json(told: Mapping[str, Any], *, rank: int | None = None) -> SimckptError:
    """Returns the error that another rank has told: of the same class if it is one of simckpt's, with its fields.

    Args:
        told: by `error_to_json`.
        rank: which one; None where it speaks for all.
    """
    cls = getattr(errors, told["type"], None)
    whose = "" if rank is None else f"rank {rank}: "
    if not (isinstance(cls, type) and issubclass(cls, SimckptError)):
        whose = whose or "rank 0: "
        return CoordinationError(f"{whose}{told['type']}: {told['message']}", ranks=[] if rank is None else [rank])
    error = cls.__new__(cls)
    error.args = (f"{whose}{told['message']}",)
    fields = told["fields"].items()
    vars(error).update({key: tuple(value) if isinstance(value, list) else value for key, value in fields})
    return error
