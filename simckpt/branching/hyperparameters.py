"""What holds each hyperparameter of a run, so that a branch or a rollback can change it and see that it is in force."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from simckpt.branching.targets import Loss, PutBack, Target, targets_of
from simckpt.configuration import plain
from simckpt.errors import ConfigurationError, OverrideNotAppliedError, SimckptError
from simckpt.suggest import nearest


@dataclass
class _Watch:
    """A target that was set, and what was seen of it since."""

    key: str
    wanted: Any
    target: Target
    stepped: bool = False
    loss: Loss | None = None

    def look(self) -> None:
        if self.loss is None:
            self.loss = self.target.find_loss(self.wanted)

    @property
    def proven(self) -> bool:
        return (self.target.optimizer is None or self.stepped) and self.target.moved


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
    have stepped.

    Args:
        controls: key -> what holds it, or a list of what does:
            an optimizer: the option of that name in all its groups, `lr` for `learning_rate` and for keys that end in
            `_lr`; `(optimizer, "option")`, `(optimizer, "option", group)`;
            a learning rate scheduler: its base rates, from which the schedule goes on as if it had begun there;
            `(scheduler, group)` for one group. Its optimizer needs not be named. `ReduceLROnPlateau` has no base: the
            rate itself is set;
            `(object, "attribute")`, `(dict, "key")`.
        from_args: keys that the program reads from its arguments alone; `Run.configure` has put them there.
        fresh: key -> components, or `component/variable` of a `LoopState`, that a change of this key leaves as the
            program built them, because the saved ones have other shapes.

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
        self._watches: list[_Watch] = []
        self._undo: list[PutBack] = []
        self._hooks: list[Any] = []

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
                    f'{{{key!r}: (object, "attribute")}}, or in from_args={{{key!r}}} if the program reads it from '
                    f"its arguments alone{nearest(key, sorted(self.keys))}",
                    key=key,
                )

    def untouched(self, keys: Iterable[str]) -> frozenset[str]:
        """Returns the components and variables that a change of these keys leaves as the program built them."""
        return frozenset().union(*(self._fresh.get(key, frozenset()) for key in keys))

    def apply(self, values: Mapping[str, Any]) -> None:
        """Sets hyperparameters in the live objects, checks that they are in force, and arms `verify`.

        If one cannot be set, those set before it are put back.

        Args:
            values: key -> value; of keys in `from_args` and `fresh` alone there is nothing to set.

        Raises:
            OverrideNotAppliedError: a key that is not declared, or a target that did not take its value.
        """
        self.check(values)
        self._disarm()
        self._undo = []
        watches = [
            _Watch(key, plain(key, value), target)
            for key, value in values.items()
            for target in self._targets.get(key, ())
        ]
        # schedules last: their rates follow from everything else
        watches.sort(key=lambda watch: watch.target.is_schedule)
        try:
            for watch in watches:
                self._undo.append(_set(watch))
            for watch in watches:
                watch.target.begin_watch()
                watch.look()
                _raise_if_lost(watch, "right after it was set")
        except BaseException:
            self.take_back()
            raise
        self._arm(watches)

    def take_back(self) -> None:
        """Puts back what the last `apply` has set, and ends the watch: for a restore that failed after it."""
        self._disarm()
        for put_back in reversed(self._undo):
            put_back()
        self._undo = []

    def verify(self) -> None:
        """Checks, after `apply`, that what was set is still in force; free once that is proven.

        Proven is a value that was seen in force at a step of its optimizer, after a step of its schedulers, and here.

        Raises:
            OverrideNotAppliedError: something has taken the value away.
        """
        if not self._watches:
            return
        for watch in self._watches:
            watch.look()
            _raise_if_lost(watch, "after training went on")
        if all(watch.proven for watch in self._watches):
            self._disarm()
            self._undo = []

    def _arm(self, watches: list[_Watch]) -> None:
        self._watches = watches
        optimizers = {id(watch.target.optimizer): watch.target.optimizer for watch in watches}
        for optimizer in optimizers.values():
            if optimizer is not None:
                self._hooks.append(optimizer.register_step_post_hook(self._note_step))

    def _disarm(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._watches, self._hooks = [], []

    def _note_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        # seen here is what the step used; raised at `verify`, for an optimizer's step is no place for it
        for watch in self._watches:
            if watch.target.optimizer is optimizer:
                watch.look()
                watch.stepped = True


def _set(watch: _Watch) -> PutBack:
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


def _raise_if_lost(watch: _Watch, when: str) -> None:
    loss = watch.loss
    if loss is None:
        return
    expected = "" if loss.expected == watch.wanted else f", which makes {loss.expected!r} there by now"
    raise OverrideNotAppliedError(
        f"hyperparameter {watch.key!r} was set to {watch.wanted!r}{expected}, but {when} {loss.where} has "
        f"{loss.found!r}: {loss.advice}",
        key=watch.key,
        wanted=watch.wanted,
        found=loss.found,
    )


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
