"""What may hold a hyperparameter: attributes, entries of dicts, options of optimizers; learning rates: `schedules`."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from collections.abc import Callable, Iterable, Mapping, MutableMapping
from typing import Any, Protocol

import numpy as np

from simckpt.branching.holders import Holder
from simckpt.configuration import same_values
from simckpt.errors import ConfigurationError
from simckpt.state.walk import qualified_name
from simckpt.suggest import nearest

PutBack = Callable[[], None]

_NOTHING = object()


@dataclasses.dataclass(frozen=True)
class Loss:
    """That a value which was set is not in force.

    Attributes:
        where: what should hold it.
        expected: what it should hold by now.
        found: what it holds.
        advice: what to do next.
    """

    where: str
    expected: Any
    found: Any
    advice: str


class Target(Protocol):
    """One thing that holds a hyperparameter.

    Attributes:
        where: for messages.
        optimizer: whose next step shows whether the value is used, or None.
        is_schedule: whether it is a rate that follows a schedule.
    """

    where: str
    optimizer: Any
    is_schedule: bool

    @property
    def moved(self) -> bool:
        """Whether everything that might take the value away has had its turn since `begin_watch`."""
        ...

    def set(self, value: Any) -> PutBack:
        """Sets the value; returns what puts the old one back. May raise whatever the object raises."""
        ...

    def begin_watch(self) -> None:
        """Called once all values are set."""
        ...

    def find_loss(self, value: Any) -> Loss | None:
        """Returns what is there instead of the value, or None if it is in force."""
        ...


class AttributeTarget:
    """An attribute of an object, or an entry of a dict."""

    optimizer = None
    is_schedule = False
    moved = True

    def __init__(self, where: str, holder: Holder) -> None:
        self.where = where
        self.holder = holder

    def set(self, value: Any) -> PutBack:
        """Sets it, in the type that it has: a tensor or array in place, a list as a tuple where there was one."""
        before = [(obj, self.holder.read(obj)) for obj in self.holder.objects()]
        kept = [(obj, live, copied(live)) for obj, live in before]

        def put_back() -> None:
            for obj, live, old in kept:
                if not fill(live, old):
                    self.holder.write(obj, live)

        try:
            for obj, live in before:
                if not fill(live, value):
                    self.holder.write(obj, like(live, value))
        except BaseException:
            # what cannot be set cannot be put back either, and has not changed
            with contextlib.suppress(Exception):
                put_back()
            raise
        return put_back

    def begin_watch(self) -> None:
        """Does nothing."""

    def find_loss(self, value: Any) -> Loss | None:
        """Returns what is there instead."""
        found = next((each for each in self._values() if not holds(each, value)), _NOTHING)
        if found is _NOTHING:
            return None
        return Loss(
            self.where,
            value,
            plainly(found),
            "let the program take it from the arguments that Run.configure returns. A value that the loop itself "
            "changes as it goes is no hyperparameter: bind what it is computed from, or name that in from_args",
        )

    def _values(self) -> list[Any]:
        return [self.holder.read(obj) for obj in self.holder.objects()]


class OptionTarget:
    """An option of an optimizer's parameter groups that follows no schedule."""

    is_schedule = False
    moved = True

    def __init__(self, optimizer: Any, option: str, groups: list[int]) -> None:
        self.optimizer = optimizer
        self._option = option
        self._groups = groups
        self.where = f"{option!r} of {type(optimizer).__name__}"

    def set(self, value: Any) -> PutBack:
        """Sets it in all groups."""
        # loading a state makes new groups: never keep one
        old = [(index, copied(self.optimizer.param_groups[index][self._option])) for index in self._groups]

        def put(values: Iterable[tuple[int, Any]]) -> None:
            for index, each in values:
                group = self.optimizer.param_groups[index]
                if not fill(group[self._option], each):
                    group[self._option] = like(group[self._option], each)

        put((index, value) for index in self._groups)
        return lambda: put(old)

    def begin_watch(self) -> None:
        """Does nothing."""

    def find_loss(self, value: Any) -> Loss | None:
        """Returns what is there instead, in the first group where it is not."""
        for index in self._groups:
            found = self.optimizer.param_groups[index].get(self._option)
            if not holds(found, value):
                return Loss(
                    f"group {index} of {type(self.optimizer).__name__}",
                    value,
                    plainly(found),
                    "something in the program sets it: let that take the value from the arguments that Run.configure "
                    "returns, or, if it is meant to change as training goes on, name the key in from_args",
                )
        return None


def targets_of(key: str, held: Any) -> list[Target]:
    """Returns the targets of one key of `Hyperparameters`.

    Raises:
        ConfigurationError: something that does not exist, or cannot hold a hyperparameter.
    """
    items = list(held) if isinstance(held, list) else [held]
    if not items:
        raise ConfigurationError(f"hyperparameter {key!r}: an empty list holds nothing", keys=[key])
    if sys.modules.get("torch") is None:
        return [_plain_target(key, item) for item in items]
    from simckpt.branching.schedulers import is_scheduler
    from simckpt.branching.schedules import RateTargets

    optimizer_class = sys.modules["torch"].optim.Optimizer
    targets: list[Target] = []
    rates = RateTargets(key)
    for item in items:
        owner, *rest = item if isinstance(item, tuple) and item else (item,)
        if is_scheduler(owner) and (not rest or type(rest[0]) is int):
            rates.add_scheduler(owner, *rest)
        elif isinstance(owner, optimizer_class):
            option, groups = _option(key, owner, *rest)
            if option == "lr":
                rates.add_optimizer(owner, groups)
            else:
                targets.append(OptionTarget(owner, option, _same_groups(key, owner, option, groups)))
        else:
            targets.append(_plain_target(key, item))
    if rates and any(isinstance(target, OptionTarget) for target in targets):
        message = f"hyperparameter {key!r} is bound to a scheduler, which sets 'lr', and to another option as well"
        raise ConfigurationError(message, keys=[key])
    return [*targets, *rates.targets()]


def _option(key: str, optimizer: Any, option: Any = None, group: Any = None, *rest: Any) -> tuple[str, list[int]]:
    """Returns the name of an option and the groups that are meant."""
    groups = optimizer.param_groups
    what = type(optimizer).__name__
    if rest or not isinstance(option, str | None) or not (group is None or type(group) is int):
        message = f'hyperparameter {key!r}: an optimizer is bound as itself, (optimizer, "option") or '
        raise ConfigurationError(message + '(optimizer, "option", group)', keys=[key])
    if group is not None and not 0 <= group < len(groups):
        raise ConfigurationError(f"hyperparameter {key!r}: {what} has {len(groups)} groups, no {group}", keys=[key])
    chosen = [group] if group is not None else list(range(len(groups)))
    options = [name for name in groups[chosen[0]] if name != "params"]
    name = key if option is None else option
    if option is None and name not in options and (key == "learning_rate" or key.endswith(("_lr", "_learning_rate"))):
        name = "lr"
    if any(name == "params" or name not in groups[index] for index in chosen):
        message = f"hyperparameter {key!r}: {what} has no option {name!r}"
        raise ConfigurationError(message + nearest(name, options), keys=[key])
    return name, chosen


def _same_groups(key: str, optimizer: Any, option: str, groups: list[int]) -> list[int]:
    values = [plainly(optimizer.param_groups[index][option]) for index in groups]
    refuse_different(key, f"the groups of {type(optimizer).__name__}", option, values)
    return groups


def refuse_different(key: str, what: str, option: str, values: list[Any]) -> None:
    """Refuses to set one value where there are several; raises ConfigurationError."""
    if any(not same(value, values[0]) for value in values):
        raise ConfigurationError(
            f"hyperparameter {key!r}: {what} hold different values of {option!r} ({', '.join(map(str, values))}); "
            f'name the group, as in (optimizer, "{option}", 0)',
            keys=[key],
        )


def _plain_target(key: str, item: Any) -> Target:
    if not isinstance(item, tuple) or len(item) != 2:
        raise ConfigurationError(
            f"hyperparameter {key!r} is bound to {item!r}: bind it to an optimizer, a learning rate scheduler, "
            '(object, "attribute"), (dict, "key"), or a list of these',
            keys=[key],
        )
    owner, name = item
    what = qualified_name(type(owner))
    if isinstance(owner, Mapping):
        if not isinstance(owner, MutableMapping) or name not in owner:
            known = nearest(str(name), map(str, owner))
            raise ConfigurationError(f"hyperparameter {key!r}: the {what} has no entry {name!r}{known}", keys=[key])
        where = f"the {what}'s entry {name!r}"
        return AttributeTarget(where, Holder(key, owner, name, where))
    if not isinstance(name, str) or not hasattr(owner, name):
        known = nearest(str(name), (each for each in dir(owner) if not each.startswith("_")))
        raise ConfigurationError(f"hyperparameter {key!r}: {what} has no attribute {name!r}{known}", keys=[key])
    if getattr(getattr(owner, "__dataclass_params__", None), "frozen", False):
        message = (
            f"hyperparameter {key!r}: a frozen {what} cannot be set; name the key in from_args if it is read there"
        )
        raise ConfigurationError(message, keys=[key])
    return AttributeTarget(f"{what}.{name}", Holder(key, owner, name, f"{what}.{name}"))


def fill(live: Any, value: Any) -> bool:
    """Sets a tensor or an array in place; returns False for anything else."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(live, torch.Tensor):
        with torch.no_grad():
            live.copy_(torch.as_tensor(value, dtype=live.dtype, device=live.device))
        return True
    if isinstance(live, np.ndarray):
        live[...] = value
        return True
    return False


def like(live: Any, value: Any) -> Any:
    """Returns the value as a tuple where a tuple was, for JSON knows lists alone."""
    return tuple(value) if isinstance(live, tuple) and isinstance(value, list) else value


def copied(value: Any) -> Any:
    """Returns a copy of a tensor or an array, and anything else as it is."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        return value.detach().clone()
    return value.copy() if isinstance(value, np.ndarray) else value


def plainly(value: Any) -> Any:
    """Returns the number or list in a tensor or an array, a list for a tuple, and anything else as it is."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        return value.detach().cpu().tolist()
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    return [plainly(each) for each in value] if isinstance(value, list | tuple) else value


def holds(found: Any, value: Any) -> bool:
    """Returns whether something holds a value, as exactly as its type can."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(found, torch.Tensor):
        value = torch.as_tensor(value, dtype=found.dtype)
    elif isinstance(found, np.ndarray):
        value = np.asarray(value, found.dtype)
    return same(plainly(found), plainly(value))


def same(left: Any, right: Any) -> bool:
    """Returns whether two plain values are equal, as JSON values or as Python sees it: a live object may hold any."""
    return same_values(left, right) or bool(left == right)
