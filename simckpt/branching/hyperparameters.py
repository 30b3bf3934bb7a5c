"""What holds each hyperparameter of a run, so that a branch or a rollback can change it and see that it is in force."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from simckpt.branching.holders import locate
from simckpt.branching.targets import AttributeTarget, Loss, PutBack, Target, targets_of
from simckpt.branching.watching import Rate, Watch, Watches
from simckpt.configuration import plain
from simckpt.errors import BranchWarning, ConfigurationError, OverrideNotAppliedError, SimckptError
from simckpt.suggest import nearest


class Hyperparameters:
    """Binds hyperparameters to what holds them.

    ```python
    hyperparameters = simckpt.Hyperparameters(
        {"learning_rate": [optimizer, scheduler], "weight_decay": optimizer, "clip": (loop, "clip")},
        from_args={"gamma", "epochs"},
        fresh={"num_envs": {"envs", "loop/observations"}},
    )
    ```

    A restore brings back the hyperparameters of the origin with the state that holds them. So the overrides of a
    branch, and what a rollback changes, are set after it, and looked at again when the optimizer and the schedulers
    have stepped. Later starts of the run, whose state has them already, look at them in the same way.

    Args:
        controls: key -> what holds it, or a list of what does:
            an optimizer: the option of that name in all its groups, `lr` for `learning_rate` and for keys that end in
            `_lr`; `(optimizer, "option")`, `(optimizer, "option", group)`;
            a learning rate scheduler: its base rates, from which the schedule goes on as if it had begun there;
            `(scheduler, group)` for one group. Its optimizer needs not be named. `ReduceLROnPlateau` has no base: the
            rate itself is set;
            `(object, "attribute")`, `(dict, "key")`.
        from_args: keys that the program reads from its arguments alone, whenever it uses them; `Run.configure` has put
            them there. A component that takes one when it is made, as `Dropout(args["p"])` does, has it in its state,
            and the restore would bring the old value back. That is refused, where a number or text of the state has the
            old value and the live component the new one. Of True, False, 0 and 1 nothing is concluded, for they are in
            many places by chance: bind these. Nor is it seen in arrays, nor where only a result of the value is kept.
            An optimizer's `lr` may be set by the loop before each step; if the optimizer steps with the restored one,
            the next call of the checkpointer raises.
        fresh: key -> components, or `component/variable` of a `LoopState`, that a change of this key leaves as the
            program built them, because the saved ones have other shapes. An override that equals the origin's value
            changes nothing.

    Raises:
        ConfigurationError: something that does not exist or cannot be set; an optimizer whose scheduler is not bound; a
            scheduler of a kind that has no base rate.
    """

    def __init__(
        self,
        controls: Mapping[str, Any] | None = None,
        *,
        from_args: Iterable[str] = (),
        fresh: Mapping[str, Iterable[str]] | None = None,
    ) -> None:
        self._targets: dict[str, list[Target]] = {
            _checked_key(key): targets_of(key, held) for key, held in (controls or {}).items()
        }
        self._from_args = _names("from_args", from_args)
        self._fresh = {_checked_key(key): _names(f"fresh[{key!r}]", names) for key, names in (fresh or {}).items()}
        twice = sorted(self._from_args & set(self._targets))
        if twice:
            message = f"{', '.join(map(repr, twice))}: named both in the controls and in from_args; leave it out of one"
            raise ConfigurationError(message, keys=twice)
        self._watches = Watches()
        self._undo: list[PutBack] = []
        self._before: list[Watch] = []  # what was watched when the last `apply` began

    def __repr__(self) -> str:
        return f"Hyperparameters({', '.join(sorted(self.keys)) or 'none'})"

    @property
    def keys(self) -> frozenset[str]:
        """All keys that are declared in one way or another."""
        return frozenset(self._targets) | self._from_args | frozenset(self._fresh)

    @property
    def controls(self) -> frozenset[str]:
        """The keys that can be set in the live objects."""
        return frozenset(self._targets)

    @property
    def from_args(self) -> frozenset[str]:
        """The keys that the program reads from its arguments alone."""
        return self._from_args

    @property
    def fresh(self) -> Mapping[str, frozenset[str]]:
        """Key -> what a change of it leaves as the program built it."""
        return MappingProxyType(self._fresh)

    def check(self, keys: Iterable[str]) -> None:
        """Checks that each of these keys is declared; touches nothing.

        Raises:
            OverrideNotAppliedError: of the first that is not; it says how to declare it.
        """
        for key in keys:
            if key not in self.keys:
                raise OverrideNotAppliedError(
                    f"hyperparameter {key!r} is changed, but nothing says what holds it, so that the restored state "
                    f"would win in silence: declare it in simckpt.Hyperparameters, as {{{key!r}: optimizer}} or "
                    f'{{{key!r}: (object, "attribute")}}; {other_ways(key)}{nearest(key, sorted(self.keys))}',
                    key=key,
                )

    def rates_themselves(self, keys: Iterable[str]) -> dict[str, tuple[Any, int]]:
        """Returns key -> (optimizer, group) of those that are bound to a rate whose schedulers keep no base of it."""
        targets = ((key, target) for key in keys for target in self._targets.get(key, ()))
        found = {key: getattr(target, "rate_itself", None) for key, target in targets}
        return {key: place for key, place in found.items() if place is not None}

    def untouched(self, keys: Iterable[str]) -> frozenset[str]:
        """Returns the components and variables that a change of these keys leaves as the program built them."""
        return frozenset().union(*(self._fresh.get(key, frozenset()) for key in keys))

    def locate(self, components: Mapping[str, Any]) -> Hyperparameters:
        """Returns itself, once it knows where what is bound lies in the components, which a restore may replace.

        Call it before each restore after which `apply` is called.
        """
        targets = itertools.chain.from_iterable(self._targets.values())
        locate([target.holder for target in targets if isinstance(target, AttributeTarget)], components)
        return self

    def apply(self, values: Mapping[str, Any]) -> None:
        """Sets hyperparameters in the live objects, checks that they are in force, and arms `verify`.

        If one cannot be set, those set before it are put back.

        Args:
            values: key -> value; of keys in `from_args` and `fresh` alone there is nothing to set.

        Raises:
            OverrideNotAppliedError: a key that is not declared, or a target that did not take its value.
        """
        self.check(values)
        self._before, self._undo = self._watches.clear(), []
        watches = [
            Watch(key, plain(key, value), target)
            for key, value in values.items()
            for target in self._targets.get(key, ())
        ]
        # schedules last: their rates follow from everything else
        watches.sort(key=lambda watch: watch.target.is_schedule)
        try:
            for watch in watches:
                self._undo.append(_set(watch))
            for watch in watches:
                watch.look()
                watch.raise_if_lost("right after it was set")
        except BaseException:
            self.take_back()
            raise
        self._watches.add(watches)

    def lacking(self, values: Mapping[str, Any]) -> dict[str, Loss]:
        """Returns {key: where something else is} of the values that are not in force; sets nothing.

        Args:
            values: key -> value; keys that nothing holds are passed over.
        """
        found: dict[str, Loss] = {}
        for key, value in values.items():
            for target in self._targets.get(key, ()):
                target.begin_watch()
                loss = target.find_loss(plain(key, value))
                if loss is not None:
                    found.setdefault(key, loss)
        return found

    def watch(self, values: Mapping[str, Any]) -> None:
        """Arms `verify` for values that a restored state brings with it, and sets nothing.

        Call it after `apply`, which begins anew. What is not in force to begin with is not watched: the program may
        have changed it since, or it was lost before.

        Args:
            values: key -> value; keys that nothing holds are passed over.

        Warns:
            BranchWarning: by name, of each that is not in force.
        """
        lacking = self.lacking(values)
        for key, value in values.items():
            if key not in lacking:
                wanted, held = plain(key, value), self._targets.get(key, ())
                self._watches.add([Watch(key, wanted, target, "was restored as", begun=True) for target in held])
                continue
            warnings.warn(
                f"hyperparameter {key!r} is {value!r} since a branch or a rollback, but in the restored state "
                f"{lacking[key].where} has {lacking[key].found!r}. Where the program changes it as training goes on, "
                "name it in from_args, for it is no hyperparameter then; otherwise it was lost before the state was "
                "saved",
                BranchWarning,
                stacklevel=9,
            )

    def watch_rates(self, rates: Iterable[Rate]) -> None:
        """Arms `verify` for rates that the program is to set itself; call it after `apply`, which begins anew."""
        self._watches.add_rates(rates)

    def take_back(self) -> None:
        """Puts back what the last `apply` has set, for a restore that failed after it.

        What was watched before is watched again, from its next look on: the rest of the state is not put back yet.
        """
        self._watches.clear()
        for put_back in reversed(self._undo):
            put_back()
        self._watches.add([replace(watch, begun=False) for watch in self._before])
        self._before, self._undo = [], []

    def look(self, when: str) -> None:
        """Checks that what was set is in force now, and goes on watching it; raises as `verify`, and says when."""
        self._watches.look(when)

    def verify(self) -> None:
        """Checks, after `apply` and `watch`, that the values are still in force; free once that is proven.

        Proven is a value that was seen in force at a step of its optimizer, after a step of its schedulers, and here.

        Raises:
            OverrideNotAppliedError: something has taken a value away, or the program steps another optimizer than the
                one that is bound.
        """
        if self._watches.verify():
            self._before, self._undo = [], []

    def warn_if_unproven(self, what: str, *, again: bool = False, stacklevel: int = 2) -> None:
        """Warns, once after each `apply`, of values that no step of their optimizer has used yet.

        That is no error: a loop may collect experience for long before it learns. But the optimizer that is bound may
        also be one that the loop never steps, and nobody can tell the difference.

        Args:
            what: is done now, for the message.
            again: also if it was told before.
            stacklevel: whose call is blamed, as in `warnings.warn`; by default the caller's.

        Warns:
            BranchWarning: with the keys and the optimizers.
        """
        unproven = self._watches.unproven(again=again)
        if unproven:
            listing = "; ".join(f"{key!r} in {where}" for key, where in unproven.items())
            warnings.warn(
                f"{what}, and these hyperparameters were changed, but have not been seen in force yet, for the "
                f"optimizer that holds them has not stepped since: {listing}. If the loop has learned since, it steps "
                "another optimizer: bind that one in simckpt.Hyperparameters",
                BranchWarning,
                stacklevel=stacklevel,
            )


def other_ways(key: str) -> str:
    """Returns how to declare a key that no live object holds, for messages."""
    ways = (
        f"or in from_args={{{key!r}}} if the program reads it from its arguments alone; or, if it changes shapes, in "
        f"fresh={{{key!r}: {{...}}}}, which names the components, or component/variable of a LoopState, that begin "
        "anew with it"
    )
    if key == "seed":
        ways += '. For other random numbers branch with rng="reseed" and leave the seed alone'
    return ways


def _set(watch: Watch) -> PutBack:
    """Sets a target to its value; returns what puts the old one back."""
    try:
        return watch.target.set(watch.wanted)
    except SimckptError:
        raise
    except (AttributeError, TypeError, ValueError, LookupError, ArithmeticError, RuntimeError) as error:
        raise OverrideNotAppliedError(
            f"hyperparameter {watch.key!r} could not be set to {watch.wanted!r} in {watch.target.where}: "
            f"{type(error).__name__}: {error}",
            key=watch.key,
            wanted=watch.wanted,
        ) from error


def _checked_key(key: Any) -> str:
    if not isinstance(key, str) or not key:
        raise ConfigurationError(f"hyperparameters are named by strings, got {key!r}", keys=[str(key)])
    return key


def _names(what: str, names: Any) -> frozenset[str]:
    if isinstance(names, str) or not isinstance(names, Iterable):
        raise ConfigurationError(f"{what} is a set of names such as {{{names!r}}}, got {names!r}", keys=[what])
    found = frozenset(names)
    wrong = [name for name in found if not isinstance(name, str) or not name]
    if wrong:
        raise ConfigurationError(f"{what} is a set of names, got {wrong[0]!r} among them", keys=[what])
    return found
