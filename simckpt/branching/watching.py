"""Whether hyperparameters that were set stay in force: looked at when an optimizer steps, told when the loop asks."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from simckpt.branching.targets import Loss, Target, holds
from simckpt.errors import OverrideNotAppliedError


@dataclass
class Watch:
    """A target that should hold a value, and what was seen of it since.

    Attributes:
        key: the hyperparameter.
        wanted: its value.
        target: what should hold it.
        origin: how the target came to it, for messages.
        begun: whether the target was told that the watch begins; the first look does.
        stepped: whether its optimizer has stepped.
        loss: the first time that it was seen without the value.
        stranger: an optimizer that the program steps on the parameters of the target's optimizer.
    """

    key: str
    wanted: Any
    target: Target
    origin: str = "was set to"
    begun: bool = False
    stepped: bool = False
    loss: Loss | None = None
    stranger: Any = None

    def look(self) -> None:
        """Takes note if the value is not there."""
        if self.loss is not None:
            return
        try:
            if not self.begun:
                self.target.begin_watch()
                self.begun = True
            self.loss = self.target.find_loss(self.wanted)
        except (LookupError, AttributeError) as error:
            advice = f"what held it is gone ({error}); restore once the program has made its objects what they stay"
            self.loss = Loss(self.target.where, self.wanted, None, advice)

    @property
    def awaits_step(self) -> bool:
        """Whether no step of an optimizer can have used the value yet."""
        return self.target.optimizer is not None and not self.stepped

    @property
    def proven(self) -> bool:
        """Whether everything that might take the value away has had its turn."""
        return not self.awaits_step and self.target.moved

    def raise_if_lost(self, when: str) -> None:
        """Raises OverrideNotAppliedError, if the value is not in force."""
        said = f"hyperparameter {self.key!r} {self.origin} {self.wanted!r}"
        if self.awaits_step and self.stranger is not None:
            raise OverrideNotAppliedError(
                f"{said} in {self.target.where}, but that optimizer has not stepped since, and another one, of "
                f"class {type(self.stranger).__name__}, steps its parameters: bind the optimizer that the loop steps, "
                "and make it before restore_latest",
                key=self.key,
                wanted=self.wanted,
            )
        if self.loss is None:
            return
        expected = "" if self.loss.expected == self.wanted else f", which makes {self.loss.expected!r} there by now"
        raise OverrideNotAppliedError(
            f"{said}{expected}, but {when} {self.loss.where} has {self.loss.found!r}: {self.loss.advice}",
            key=self.key,
            wanted=self.wanted,
            found=self.loss.found,
        )


@dataclass
class Rate:
    """A learning rate that a restore brought back, although the program says that it sets it itself.

    Attributes:
        key: the hyperparameter that it follows.
        wanted: its value.
        old: the one that was restored.
        component: the optimizer's name.
        group: of the optimizer.
        optimizer: the live one.
        kept: whether the old value was still there when the optimizer stepped; None until it does.
    """

    key: str
    wanted: Any
    old: Any
    component: str
    group: int
    optimizer: Any = None
    kept: bool | None = None

    def look(self) -> None:
        """Takes note, at a step of the optimizer, of whether the program has set the rate."""
        if self.kept is None:
            self.kept = holds(self.optimizer.param_groups[self.group]["lr"], self.old)

    def raise_if_kept(self) -> None:
        """Raises OverrideNotAppliedError if the optimizer has stepped with the restored value."""
        if self.kept:
            raise OverrideNotAppliedError(
                f"hyperparameter {self.key!r} is {self.wanted!r} and read from the arguments alone, by its "
                f"declaration, but component {self.component!r} took it when it was made, and has stepped with the "
                f"{self.old!r} that its saved state brought back: bind it instead, as in {{{self.key!r}: "
                f"{self.component}}}, or set it in the loop before each step",
                key=self.key,
                wanted=self.wanted,
                found=self.old,
            )


class Watches:
    """The targets that are watched until each is proven: used by a step of its optimizer, and not lost since."""

    def __init__(self) -> None:
        self._watches: list[Watch] = []
        self._rates: list[Rate] = []
        self._hook: Any = None
        self._told = False

    def add(self, watches: Iterable[Watch]) -> None:
        """Watches these too."""
        self._watches += watches
        self._told = False
        if any(watch.target.optimizer is not None for watch in self._watches):
            self._see_steps()

    def add_rates(self, rates: Iterable[Rate]) -> None:
        """Watches these rates at the next step of their optimizers."""
        self._rates += rates
        if self._rates:
            self._see_steps()

    def _see_steps(self) -> None:
        if self._hook is None:
            from torch.optim.optimizer import register_optimizer_step_post_hook

            # of all optimizers: the one that is bound may not be the one that trains
            self._hook = register_optimizer_step_post_hook(_hook_of(weakref.ref(self)))

    def clear(self) -> list[Watch]:
        """Watches nothing any more; returns what was watched."""
        if self._hook is not None:
            self._hook.remove()
        watches, self._watches, self._rates, self._hook = self._watches, [], [], None
        return watches

    def look(self, when: str) -> None:
        """Looks at all of them now; raises OverrideNotAppliedError, which says when, if a value was lost."""
        for watch in self._watches:
            watch.look()
            watch.raise_if_lost(when)

    def verify(self) -> bool:
        """Returns whether everything is proven by now, which ends the watch.

        Raises:
            OverrideNotAppliedError: a value was lost.
        """
        self.look("after training went on")
        for rate in self._rates:
            rate.raise_if_kept()
        proven = all(watch.proven for watch in self._watches) and all(rate.kept is False for rate in self._rates)
        if proven:
            self.clear()
        return proven

    def unproven(self, *, again: bool) -> dict[str, str]:
        """Returns {key: the target whose optimizer has not stepped}; once after each `add`, or `again`."""
        if self._told and not again:
            return {}
        found = {watch.key: watch.target.where for watch in self._watches if watch.awaits_step}
        self._told = self._told or bool(found)
        return found

    def note_step(self, optimizer: Any) -> None:
        """Looks at what a step has used; it is told at `verify`, for an optimizer's step is no place for errors."""
        for rate in self._rates:
            if _has_groups_of(optimizer, rate.optimizer):
                rate.look()
        for watch in self._watches:
            if watch.target.optimizer is None:
                continue
            if _has_groups_of(optimizer, watch.target.optimizer):
                watch.look()
                watch.stepped = True
            elif not watch.stepped and watch.stranger is None and self._is_stranger(optimizer, watch):
                watch.stranger = optimizer

    def _is_stranger(self, optimizer: Any, watch: Watch) -> bool:
        """Returns whether an optimizer trains all that a watched one should, and does not have the key itself."""
        if any(each.key == watch.key and each.target.optimizer is optimizer for each in self._watches):
            return False
        # all of them: actors and critics may share an encoder
        return _parameters(watch.target.optimizer) <= _parameters(optimizer)


def _hook_of(watches: weakref.ref[Watches]) -> Callable[[Any, Any, Any], None]:
    # torch keeps the hook as long as the process lives, if nobody removes it
    def hook(optimizer: Any, args: Any, kwargs: Any) -> None:
        live = watches()
        if live is not None:
            live.note_step(optimizer)

    return hook


def _has_groups_of(optimizer: Any, other: Any) -> bool:
    # an optimizer that wraps another one has the same groups, and may have a step of its own or none
    return optimizer is other or list(map(id, optimizer.param_groups)) == list(map(id, other.param_groups))


def _parameters(optimizer: Any) -> set[int]:
    return {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
