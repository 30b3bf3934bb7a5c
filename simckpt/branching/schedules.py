"""Learning rates under torch's schedulers: set from a new base, and watched. Imported only when torch is loaded."""

from __future__ import annotations

import math
from typing import Any

from torch.optim.lr_scheduler import CyclicLR, OneCycleLR, ReduceLROnPlateau
from torch.optim.swa_utils import SWALR

from simckpt.branching.foretelling import ABSOLUTE, Foretold, computed_rates, position
from simckpt.branching.schedulers import acting, has_chain, is_driven, keeper, leaves, put, rebase
from simckpt.branching.targets import Loss, PutBack, copied, holds, plainly, refuse_different, same
from simckpt.errors import ConfigurationError, OverrideNotAppliedError

_UNBOUND = "a scheduler drives this optimizer, and its next step would take the value away: bind the scheduler too"
# the order in which several schedulers step is not known, and changes how their product is rounded; float32 rates
_TOLERANCE = 1e-6


class RateTargets:
    """Collects what one key is bound to, and makes one target of each optimizer with its schedulers."""

    def __init__(self, key: str) -> None:
        self._key = key
        self._optimizers: dict[int, Any] = {}
        self._schedulers: dict[int, list[Any]] = {}
        self._groups: dict[int, set[int]] = {}

    def __bool__(self) -> bool:
        return any(self._schedulers.values())

    def add_optimizer(self, optimizer: Any, groups: list[int]) -> None:
        """Adds the rate of some groups."""
        self._optimizers[id(optimizer)] = optimizer
        known, more = self._groups.get(id(optimizer)), set(groups)
        # the narrower choice counts: [optimizer, (scheduler, 0)] means group 0
        self._groups[id(optimizer)] = more if known is None else (known & more) or (known | more)

    def add_scheduler(self, scheduler: Any, group: int | None = None, *rest: Any) -> None:
        """Adds a scheduler; raises ConfigurationError for one that cannot be bound."""
        optimizer = scheduler.optimizer
        count = len(optimizer.param_groups)
        if rest or not (group is None or 0 <= group < count):
            message = (
                f"hyperparameter {self._key!r}: a scheduler is bound as itself or as (scheduler, group), of {count}"
            )
            raise ConfigurationError(message, keys=[self._key])
        self.add_optimizer(optimizer, list(range(count)) if group is None else [group])
        found = self._schedulers.setdefault(id(optimizer), [])
        if all(each is not scheduler for each in found):
            found.append(scheduler)

    def targets(self) -> list[RateTarget]:
        """Returns the targets."""
        return [
            RateTarget(self._key, optimizer, self._schedulers.get(place, []), sorted(self._groups[place]))
            for place, optimizer in self._optimizers.items()
        ]


class RateTarget:
    """The learning rate of some groups of an optimizer, with the schedulers that drive it.

    Raises:
        ConfigurationError: the optimizer has a scheduler that is not bound, a scheduler is of a kind that has no base
            rate, or the groups have different ones.
    """

    def __init__(self, key: str, optimizer: Any, schedulers: list[Any], groups: list[int]) -> None:
        self._key = key
        self.optimizer = optimizer
        self._schedulers = schedulers
        self._groups = groups
        self.is_schedule = bool(schedulers)
        names = [type(each).__name__ for each in (optimizer, *schedulers)]
        self.where = f"'lr' of {' with '.join(names)}"
        self._leaves = [leaf for scheduler in schedulers for leaf in leaves(scheduler)]
        self._refuse_unfit()
        self._foretold: Foretold | None = None
        self._without: list[float] | None = None
        self._deaf: list[float] | None = None  # the rates that it will have whatever the base is
        self._start: list[Any] = []
        self._rates: list[float] = []

    def _refuse_unfit(self) -> None:
        problem = ""
        floors = [leaf for leaf in self._leaves if getattr(leaf, "eta_min", 0.0)]
        together = len(self._schedulers) > 1 or any(has_chain(scheduler) for scheduler in self._schedulers)
        if not self._schedulers and is_driven(self.optimizer):
            problem = _UNBOUND
        elif any(isinstance(leaf, CyclicLR) for leaf in self._leaves):
            problem = "CyclicLR goes between two rates, and no single one can be changed; name the key in from_args"
        elif any(isinstance(leaf, SWALR) for leaf in self._leaves):
            problem = (
                'SWALR goes to a rate of its own, whatever the base: bind that as (optimizer, "swa_lr"), and this key '
                "to the schedulers before it; without any, name the key in from_args"
            )
        elif any(isinstance(leaf, OneCycleLR) and leaf not in self._schedulers for leaf in self._leaves):
            problem = "OneCycleLR inside another scheduler keeps its rates where the others keep theirs"
        elif together and len(self._leaves) > 1 and (floors or any(isinstance(x, ABSOLUTE) for x in self._leaves)):
            names = ", ".join(type(leaf).__name__ for leaf in self._leaves)
            problem = f"of {names} together no single base rate follows: some compute the rate anew or have an eta_min"
        if problem:
            raise ConfigurationError(f"hyperparameter {self._key!r}, {self.where}: {problem}", keys=[self._key])
        bases = [plainly(self._base(index)) for index in self._groups]
        refuse_different(self._key, f"the groups of {type(self.optimizer).__name__}", "lr", bases)

    @property
    def moved(self) -> bool:
        """Whether all schedulers have stepped."""
        return all(position(each) != start for each, start in zip(self._schedulers, self._start, strict=True))

    @property
    def rate_itself(self) -> tuple[Any, int] | None:
        """The optimizer and a group whose rate is all there is to set, for its schedulers keep no base; or None."""
        plateaus = [isinstance(leaf, ReduceLROnPlateau) for leaf in self._leaves]
        return (self.optimizer, self._groups[0]) if plateaus and all(plateaus) else None

    def set(self, value: Any) -> PutBack:
        """Makes the value the base, and the rate what the schedule makes of that here."""
        if not self._schedulers and is_driven(self.optimizer):
            message = f"hyperparameter {self._key!r}: {_UNBOUND}"
            raise OverrideNotAppliedError(message, key=self._key, wanted=value)
        if type(value) not in (int, float):
            raise TypeError(f"a learning rate is a number, got {value!r}")
        self._refuse_half_restored(value)
        put_back = keeper(self.optimizer, self._leaves + self._schedulers)
        own = [leaf for leaf in self._leaves if not type(leaf).__module__.startswith("torch.")]
        before = {index: (float(plainly(self._base(index))), self._rate(index)) for index in self._groups}
        changes = any(base != value for base, _ in before.values())
        self._without = Foretold(self.optimizer, self._schedulers).rates_ahead() if own and changes else None
        try:
            for index in self._groups:
                for leaf in self._leaves:
                    rebase(leaf, index, value)
            for index, (base, rate) in before.items():
                new = value if not self._schedulers else self._scaled(index, value, base=base, rate=rate)
                put(self.optimizer.param_groups[index], "lr", new)
            for scheduler in self._leaves + self._schedulers:
                if hasattr(scheduler, "_last_lr"):
                    scheduler._last_lr = [copied(group["lr"]) for group in self.optimizer.param_groups]
        except BaseException:
            put_back()
            raise
        return put_back

    def _refuse_half_restored(self, value: float) -> None:
        """Refuses a scheduler that has the value already, as the program made it, while its optimizer has not.

        The factor from the old base to the new one would be 1, and the old rate stay. Every scheduler begins with the
        `initial_lr` of its optimizer's groups as its base; so with the state of both restored they agree.
        """
        for leaf in self._leaves:
            for index in [] if isinstance(leaf, OneCycleLR | ReduceLROnPlateau) else self._groups:
                base = plainly(leaf.base_lrs[index])
                initial = plainly(self.optimizer.param_groups[index].get("initial_lr", base))
                # a rate that is computed anew from the base needs nothing of the optimizer
                multiplied = not isinstance(leaf, ABSOLUTE)
                if same(base, initial) or not (same(base, value) or (multiplied and same(initial, value))):
                    continue
                names = type(leaf).__name__, type(self.optimizer).__name__
                restored, anew = names[::-1] if same(base, value) else names
                raise OverrideNotAppliedError(
                    f"hyperparameter {self._key!r} cannot be set to {value!r}, for {restored} has been restored, and "
                    f"{anew} is as the program made it: {names[0]} has the base rate {base!r} for group {index}, and "
                    f"{names[1]} had begun with {initial!r}. Register both as components, directly or as parts of "
                    f"others; or name both in fresh={{{self._key!r}: ...}}, where both are to begin anew",
                    key=self._key,
                    wanted=value,
                    found=initial if same(base, value) else base,
                )

    def _base(self, index: int) -> Any:
        """Returns the base rate of a group, or the rate where there is none."""
        group = self.optimizer.param_groups[index]
        for leaf in self._acting():
            if not isinstance(leaf, ReduceLROnPlateau):
                return group["max_lr"] if isinstance(leaf, OneCycleLR) else leaf.base_lrs[index]
        return group["lr"]

    def _rate(self, index: int) -> float:
        return float(plainly(self.optimizer.param_groups[index]["lr"]))

    def _acting(self) -> list[Any]:
        return [leaf for scheduler in self._schedulers for leaf in acting(scheduler)]

    def _scaled(self, index: int, value: float, *, base: float, rate: float) -> float:
        """Returns what the schedule makes of a new base at this point, from what it made of the old one."""
        movers = [leaf for leaf in self._acting() if not isinstance(leaf, ReduceLROnPlateau)]
        if not movers:
            return value
        if value == base:
            return rate
        floor = 0.0 if len(movers) > 1 else float(getattr(movers[0], "eta_min", 0.0))
        if len(movers) == 1 and (isinstance(movers[0], ABSOLUTE) or base == floor):
            rates = computed_rates(self.optimizer, movers[0])
            return value if rates is None else rates[index]
        return floor + (rate - floor) * ((value - floor) / (base - floor)) if base != floor else value

    def begin_watch(self) -> None:
        """Begins to foretell."""
        self._start = [position(each) for each in self._schedulers]
        self._rates = self._live()
        self._foretold = Foretold(self.optimizer, self._schedulers)
        without, self._without = self._without, None
        ahead = None if without is None else Foretold(self.optimizer, self._schedulers).rates_ahead()
        self._deaf = None
        if ahead is not None and without is not None:
            is_deaf = any(without[index] == ahead[index] != 0.0 for index in self._groups)
            self._deaf = without if is_deaf else None

    def find_loss(self, value: Any) -> Loss | None:
        """Returns the first group whose rate is not what the schedule makes of the value, or a base that is another."""
        for leaf in self._leaves:
            for index in [] if isinstance(leaf, ReduceLROnPlateau) else self._groups:
                group = self.optimizer.param_groups[index]
                base = group.get("max_lr") if isinstance(leaf, OneCycleLR) else leaf.base_lrs[index]
                if not holds(base, value):
                    where = f"the base rate of {type(leaf).__name__} for group {index}"
                    return Loss(where, value, plainly(base), "something in the program sets it, or has loaded a state")
        if self._deaf is not None:
            where = f"{type(self._leaves[0]).__name__} after its next step"
            advice = "it has that with and without the change: this scheduler does not compute its rates from base_lrs"
            return Loss(where, value, self._deaf, advice)
        live = self._live()
        expected = self._expected(live, value)
        for index in self._groups:
            if not _close(live[index], expected[index]):
                where = f"group {index} of {type(self.optimizer).__name__}"
                return Loss(where, expected[index], live[index], self._advice())
        return None

    def _advice(self) -> str:
        if not self._schedulers and is_driven(self.optimizer):
            return _UNBOUND
        return (
            "something in the program sets it: a scheduler, which then has to be bound too, or the loop, which has to "
            "take it from the arguments that Run.configure returns; if the loop computes it from these by a schedule "
            "of its own, name the key in from_args instead"
        )

    def _live(self) -> list[float]:
        return [self._rate(index) for index in range(len(self.optimizer.param_groups))]

    def _expected(self, live: list[float], value: float) -> list[float]:
        """Returns the rates that all groups should have by now."""
        if not self._schedulers:
            return [value] * len(live)
        if any(isinstance(leaf, ReduceLROnPlateau) for leaf in self._leaves):
            self._rates = self._reduced(live) if len(self._leaves) == 1 else self._last_set(live)
            return self._rates
        assert self._foretold is not None
        followed = self._foretold.follow()
        if followed:
            self._rates = self._foretold.rates()
            if self._agree(live, self._rates):
                return self._rates
        movers = self._acting()
        computed = computed_rates(self.optimizer, movers[0]) if len(movers) == 1 else None
        if computed is not None and self._agree(live, computed):
            # it was stepped to an epoch of the program's choice
            self._foretold = Foretold(self.optimizer, self._schedulers)
            return computed
        if not followed:
            # a scheduler of somebody's own, whose copies cannot step: its base is all that can be checked
            self._rates = self._last_set(live)
        return self._rates

    def _agree(self, live: list[float], rates: list[float]) -> bool:
        return all(_close(live[index], rates[index]) for index in self._groups)

    def _last_set(self, live: list[float]) -> list[float]:
        """Returns the rates that were set last by one of the schedulers."""
        known = [plainly(each._last_lr) for each in self._leaves + self._schedulers if hasattr(each, "_last_lr")]
        return next((rates for rates in known if self._agree(live, rates)), self._rates)

    def _reduced(self, live: list[float]) -> list[float]:
        """Returns the rates that ReduceLROnPlateau has made of the last ones, as many times as fits what is there."""
        (plateau,) = self._leaves
        rates = list(self._rates)
        for index in self._groups if self.moved else ():
            rate = rates[index]
            while not _close(rate, live[index]) and rate > max(live[index], plateau.min_lrs[index]):
                rate = max(rate * plateau.factor, plateau.min_lrs[index])
            rates[index] = rate
        return rates


def _close(left: float, right: float) -> bool:
    return math.isclose(left, right, rel_tol=_TOLERANCE)
