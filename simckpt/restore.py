"""Components bound to their handles, and a restore that happens whole or not at all."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from simckpt import resizing, state
from simckpt.errors import (
    ConfigurationError,
    HalfRestoredError,
    RestoreError,
    SimckptError,
    StateMismatchError,
    UnsupportedStateError,
)
from simckpt.state.leaf import Slab
from simckpt.state.paths import path_part
from simckpt.storage.names import encode_part
from simckpt.suggest import nearest

if TYPE_CHECKING:
    from simckpt.storage import LeafRecord

_TENSORS_IN_PARTS = "torch.distributed.tensor"  # without it there are none

# the order of a restore: physics may run user callbacks; what cannot be put back comes late; RNG streams come last
ENVS, PLAIN, LOGS, STREAMS = range(4)
_before_envs: list[Callable[[], None]] = []


@dataclass(frozen=True)
class BoundComponent:
    """A component, the handle that captures and restores it, and its place in the order of a restore.

    Attributes:
        own: another component of a checkpoint, with what this rank alone had of this one; see `overlaid`.
        ranks: how many there are, as otherwise that is somebody else's.
    """

    name: str
    handle: state.Handle
    order: int
    own: str = ""
    ranks: int = 0


@dataclass(frozen=True)
class Adjustment:
    """What is to differ between a saved state and the live objects it goes into: of a branch, or of a rollback.

    Attributes:
        seed: a text from which all random streams are derived anew, each by its place; None leaves them as saved.
        untouched: components, or `component/variable` of a `LoopState`, that stay as the program has them.
        then: called once all is restored, to set hyperparameters; if it raises, everything is put back.
        beginnings: {one of `untouched`: its state tree at the beginning, to which it returns instead}.
        changed: {hyperparameter: (value that the state was saved under, value of the program)} of what may change
            shapes. What does not fit for that is refused, in variables of loops too, which take any shape otherwise.
        inspect: called with the states by component, those of the live objects, and the names of the components that
            are loops, before anything changes; what it raises comes out as it is.
    """

    seed: str | None = None
    untouched: frozenset[str] = frozenset()
    then: Callable[[], None] | None = None
    beginnings: Mapping[str, Any] = field(default_factory=dict)
    changed: resizing.Changed = field(default_factory=dict)
    inspect: Callable[[Mapping[str, Any], Mapping[str, Any], Collection[str]], None] | None = None


def call_before_envs(function: Callable[[], None]) -> None:
    """Has a function called before envs get a saved state: for what must stand still then, such as a device."""
    _before_envs.append(function)


def bind(components: Mapping[str, Any], names: Mapping[str, str] | None = None) -> dict[str, BoundComponent]:
    """Returns the components with their handles, in the order in which a restore applies them.

    Args:
        components: {name: live object}.
        names: {name: what it is called in a checkpoint} where that is another name, which the result has then.

    Raises:
        ConfigurationError: a name that is empty or not a string.
        UnsupportedStateError: a component that cannot be captured exactly, by name.
    """
    bound = []
    for name, component in components.items():
        if not isinstance(name, str) or not name:
            raise ConfigurationError(f"a component's name must be a non-empty string, got {name!r}", keys=[str(name)])
        bound.append(_bind(name if names is None else names[name], component))
    bound.sort(key=lambda component: component.order)
    return {component.name: component for component in bound}


def _bind(name: str, component: Any) -> BoundComponent:
    if _may_have_parts():
        from simckpt.distributed import tensors  # noqa: F401  # importing it makes them known

    # an env cannot exist in a process that has not imported gymnasium
    if "gymnasium" in sys.modules:
        from simckpt import sim

        handle = sim.handle_for(component, name)
        if handle is not None:
            return BoundComponent(name, handle, ENVS)
    from simckpt import replay

    log = replay.handle_for(component, name)
    if log is not None:
        return BoundComponent(name, log, LOGS)
    order = STREAMS if isinstance(component, state.RNGStreams) else PLAIN
    return BoundComponent(name, state.handle_for(name, component), order)


def _may_have_parts() -> bool:
    """Returns whether there may be tensors in parts: each lies on a mesh of processes, which needs a process group."""
    # any torch optimizer imports the module of these tensors, so that alone says nothing
    distributed = sys.modules.get("torch.distributed")
    return _TENSORS_IN_PARTS in sys.modules and distributed is not None and bool(distributed.is_initialized())


def own_part(encoded: state.Encoded, paths: Collection[str]) -> state.Encoded:
    """Returns the component that keeps what one rank has at some paths of a component of all ranks."""
    return state.encode({path: state.leaf_value(encoded.leaves[path]) for path in sorted(paths)})


def overlaid(encoded: state.Encoded, own: state.Encoded) -> state.Encoded:
    """Returns a component of all ranks with the leaves that `own_part` has kept of one rank in their places."""
    leaves = {path: own.leaves.get(path_part(path), leaf) for path, leaf in encoded.leaves.items()}
    return state.Encoded(leaves, encoded.structure)


def wanted_parts(
    bound: Mapping[str, BoundComponent], checkpoint_leaves: Callable[[], Mapping[str, LeafRecord]]
) -> dict[str, Slab]:
    """Returns {path: part} of the leaves of a checkpoint of which this process wants no more than a part.

    Args:
        bound: the components to restore.
        checkpoint_leaves: returns the leaves of the checkpoint by their paths.
    """
    if not _may_have_parts():
        return {}
    from simckpt.distributed import tensors

    # a capture is a copy: of what can be seen to have no parts, none is made
    plain = {name: component.handle for name, component in bound.items() if component.order == PLAIN}
    live = {name: handle.capture() for name, handle in plain.items() if tensors.may_have_parts(handle)}
    if not live:
        return {}
    leaves = checkpoint_leaves()
    complete = {name: _with_stand_ins(bound[name], tree, _shapes(name, leaves)) for name, tree in live.items()}
    found = tensors.slabs(complete)
    return {path: slab for path, slab in found.items() if path in leaves}


def _with_stand_ins(component: BoundComponent, live: Any, shapes: Mapping[str, tuple[int, ...]]) -> Any:
    """Returns a live state completed by what an optimizer that was made just now has not yet."""
    if not _may_have_parts():
        return live
    from simckpt.distributed import tensors

    return tensors.with_moments(component.handle, live, shapes)


def _shapes(name: str, leaves: Mapping[str, LeafRecord]) -> dict[str, tuple[int, ...]]:
    prefix = f"{encode_part(name)}/"
    return {path.removeprefix(prefix): leaf.shape for path, leaf in leaves.items() if path.startswith(prefix)}


def capture(bound: Mapping[str, BoundComponent]) -> dict[str, Any]:
    """Returns the state tree of every component; shares no memory with the live objects."""
    return {name: component.handle.capture() for name, component in bound.items()}


def logs(bound: Mapping[str, BoundComponent]) -> dict[str, state.LogHandle]:
    """Returns the handles of the components that are logs."""
    return {name: each.handle for name, each in bound.items() if isinstance(each.handle, state.LogHandle)}


def pieces_of(name: str, leaves: Mapping[str, LeafRecord]) -> dict[str, tuple[state.Piece, ...]]:
    """Returns where the leaves of a component lie in segments, by their paths in the component."""
    prefix = f"{encode_part(name)}/"
    return {path.removeprefix(prefix): leaf.pieces for path, leaf in leaves.items() if path.startswith(prefix)}


class Explanations:
    """The texts for people who open a file; asked for only where the leaves of a component have changed.

    Args:
        bound: the components.
        more: {component: text for its group}.
    """

    def __init__(self, bound: Mapping[str, BoundComponent], more: Mapping[str, Mapping[str, str]]) -> None:
        self._bound = bound
        self._more = more
        self._asked: dict[str, tuple[str, ...]] = {}
        self._texts: dict[str, dict[str, dict[str, str]]] = {}

    def __bool__(self) -> bool:
        return bool(self._asked)

    def ask(self, paths: Mapping[str, tuple[str, ...]]) -> None:
        """Asks the live objects about the leaves at these paths, by component."""
        for name, found in paths.items():
            if self._asked.get(name) == found:
                continue
            texts = {**state.attributes_of(self._bound[name].handle, found)}
            if name in self._more:
                texts[""] = dict(self._more[name])
            prefix = encode_part(name)
            self._asked[name] = found
            self._texts[name] = {f"{prefix}/{path}".rstrip("/"): dict(text) for path, text in texts.items()}

    def texts(self) -> dict[str, dict[str, str]]:
        """Returns {path in the file: texts} of all components."""
        return {path: text for texts in self._texts.values() for path, text in texts.items()}


def rehearse(bound: Mapping[str, BoundComponent], states: Mapping[str, Any] | None = None) -> None:
    """Captures every component and checks that it could be restored from that, or from a given state; changes nothing.

    Of a log the capture alone is tried, for its state comes back only from files.

    Args:
        bound: the components.
        states: {component: its state tree}, captured from these components at another time.

    Raises:
        UnsupportedStateError: a component that cannot be captured, or that would not take back its own state.
    """
    for name, component in bound.items():
        try:
            live = component.handle.capture()
        except SimckptError:
            raise
        except Exception as error:
            message = f"component {name!r} cannot be captured: {type(error).__name__}: {error}"
            raise UnsupportedStateError(message, path=name, type_name=type(component.handle).__name__) from error
        if component.order == LOGS:
            continue
        encoded = state.encode(live if states is None else states[name])
        try:
            component.handle.validate(state.decode(encoded.leaves, encoded.structure, template=live))
        except SimckptError as error:
            message = f"component {name!r} can be captured, but would not take back its own state: {error}"
            raise UnsupportedStateError(message, path=name, type_name=type(component.handle).__name__) from error


def apply(
    bound: Mapping[str, BoundComponent],
    saved: Mapping[str, state.Encoded],
    *,
    source: str,
    adjustment: Adjustment | None = None,
    available: Collection[str] = (),
) -> None:
    """Puts the saved states into the live objects: all of them, or none.

    Args:
        bound: the components to restore, in order; each needs an entry in `saved`, unless it stays untouched.
        saved: what was read and verified, by component.
        source: the checkpoint's name for messages.
        available: the names of all components that were saved, for messages.
        adjustment: what is to differ from the saved states. What its `then` raises comes out as it is, after everything
            was put back.

    Raises:
        ConfigurationError: the adjustment leaves something untouched that is not there; nothing was touched.
        StateMismatchError: the states do not fit; all problems of all components are listed, nothing was touched.
        RestoreError: a component failed while it was being changed; all were put back.
        HalfRestoredError: it failed, and something could not be put back; such as a log, of which no copy is kept.
    """
    adjustment = Adjustment() if adjustment is None else adjustment
    kept = _kept_variables(bound, adjustment.untouched)
    beginnings = {name: state.copy_tree(tree) for name, tree in adjustment.beginnings.items()}
    stays = adjustment.untouched - beginnings.keys()
    bound = {name: component for name, component in bound.items() if name not in stays}
    undo = capture({name: component for name, component in bound.items() if component.order != LOGS})
    states = decode(
        {name: bound[name] for name in bound if name not in beginnings},
        saved,
        undo,
        source=source,
        adjustment=adjustment,
        available=available,
    )
    live = {name: undo[name] | _variables(beginnings, name) for name in kept}
    _adjust(states, live, kept, adjustment.seed)
    states |= {name: tree for name, tree in beginnings.items() if name in bound}
    _validate(bound, states, undo, source=source, adjustment=adjustment)
    if adjustment.inspect is not None:
        adjustment.inspect(states, undo, [name for name, component in bound.items() if _is_loop(component)])
    if any(component.order == ENVS for component in bound.values()):
        for function in _before_envs:
            function()
    touched: list[str] = []
    doing = ""
    try:
        for name, component in bound.items():
            touched.append(name)
            doing = f"component {name!r}"
            # nobody else holds this state: it need not be copied once more
            getattr(component.handle, "take", component.handle.apply)(states.pop(name))
        doing = ""
        if adjustment.then is not None:
            adjustment.then()
    except BaseException as error:
        _put_back(bound, undo, touched, source=source, error=error)
        if not (doing and isinstance(error, Exception)):
            raise
        reason = str(error) if isinstance(error, SimckptError) else f"{type(error).__name__}: {error}"
        message = f"restoring {source}: {doing} failed: {reason}. "
        raise RestoreError(message + "All live objects are as they were before the restore.") from error


def _kept_variables(bound: Mapping[str, BoundComponent], untouched: frozenset[str]) -> dict[str, list[str]]:
    """Returns {component: variables} of the variables that stay as the program has them."""
    kept: dict[str, list[str]] = {}
    for place in sorted(untouched - set(bound)):
        name, _, variable = place.rpartition("/")
        if name not in bound:
            message = f"{place!r} cannot be left as it is: there is no such component{nearest(place, bound)}"
            raise ConfigurationError(message, keys=[place])
        if not _is_loop(bound[name]):
            message = f"{place!r} cannot be left as it is: {name!r} is no LoopState; leave the whole component as it is"
            raise ConfigurationError(message, keys=[place])
        if name not in untouched:
            kept.setdefault(name, []).append(variable)
    return kept


def _variables(values: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Returns those of a component, by their names in it, from values by `component/variable`."""
    return {path.removeprefix(f"{name}/"): value for path, value in values.items() if path.startswith(f"{name}/")}


def _adjust(states: dict[str, Any], live: Mapping[str, Any], kept: Mapping[str, list[str]], seed: str | None) -> None:
    """Changes the decoded states: streams derived anew, and of some variables the live value or none."""
    if seed is not None:
        for name, tree in states.items():
            state.reseed(tree, f"{seed} {name}")
    for name, variables in kept.items():
        if isinstance(states[name], dict):
            for variable in variables:
                if variable not in states[name] and variable not in live[name]:
                    message = f"'{name}/{variable}' cannot be left as it is: {name!r} has no such variable"
                    raise ConfigurationError(message + nearest(variable, live[name]), keys=[f"{name}/{variable}"])
                states[name].pop(variable, None)
                if variable in live[name]:
                    states[name][variable] = live[name][variable]


def _validate(
    bound: Mapping[str, BoundComponent],
    states: Mapping[str, Any],
    live: Mapping[str, Any],
    *,
    source: str,
    adjustment: Adjustment,
) -> None:
    problems: list[str] = []
    places: dict[str, set[str]] = {}
    for name, component in bound.items():
        resized: list[tuple[str, str, frozenset[str]]] = []
        try:
            if adjustment.changed and name in live:
                resized += resizing.find_resized(states[name], live[name], adjustment.changed, path=name)
            component.handle.validate(states[name])
            for path, problem, keys in resized:
                problems.append(problem)
                place = "/".join(path.split("/")[:2]) if _is_loop(component) else name
                places.setdefault(place, set()).update(keys)
        except StateMismatchError as error:
            problems += [_within(name, problem) for problem in error.problems or [str(error)]]
            places.setdefault(name, set()).update(*(keys for _, _, keys in resized))
        except SimckptError:
            raise
        except Exception as error:
            # a state of another form than any handle would have captured, such as one that a stranger made up
            found = f"{name}: the saved state has another form ({type(error).__name__}: {str(error)[:200]})"
            raise StateMismatchError(f"{source} does not fit the live objects: {found}", problems=[found]) from error
    if problems:
        raise _misfit(problems, places, source=source, adjustment=adjustment)


def _misfit(
    problems: list[str], places: Mapping[str, Collection[str]], *, source: str, adjustment: Adjustment
) -> StateMismatchError:
    listing = "\n  ".join(problems)
    advice = resizing.advice(adjustment.changed, places)
    message = f"{source} does not fit the live objects, which are untouched:\n  {listing}{advice}"
    return StateMismatchError(message, problems=problems)


def _is_loop(component: BoundComponent) -> bool:
    return isinstance(getattr(component.handle, "obj", None), state.LoopState)


def decode(
    bound: Mapping[str, BoundComponent],
    saved: Mapping[str, state.Encoded],
    templates: Mapping[str, Any],
    *,
    source: str,
    adjustment: Adjustment,
    available: Collection[str] = (),
) -> dict[str, Any]:
    """Returns the saved states as trees, their classes taken from the live templates."""
    missing = [name for name in bound if name not in saved]
    if missing:
        there = sorted(available or saved)
        problems = [f"component {name!r} is not in the checkpoint, which has {there}" for name in missing]
        raise _misfit(problems, dict.fromkeys(missing, ()), source=source, adjustment=adjustment)
    found = {}
    for name, component in bound.items():
        leaves = saved[name].leaves
        shapes = {path: tuple(leaf.shape) for path, leaf in leaves.items()}
        template = _with_stand_ins(component, templates[name], shapes) if name in templates else None
        found[name] = state.decode(leaves, saved[name].structure, template=template)
    return found


def _within(name: str, problem: str) -> str:
    return problem if problem.startswith(name) else f"{name}: {problem}"


def _put_back(
    bound: Mapping[str, BoundComponent],
    undo: Mapping[str, Any],
    touched: list[str],
    *,
    source: str,
    error: BaseException,
) -> None:
    failures = {}
    for name in touched:
        if name not in undo:
            failures[name] = f"{name}: a log is too large for a copy to be kept"
            continue
        try:
            bound[name].handle.apply(undo[name])
        except Exception as second:
            failures[name] = f"{name}: {type(second).__name__}: {second}"
    if failures:
        message = (
            f"restoring {source} failed ({type(error).__name__}: {error}), and so did putting back "
            + "; ".join(failures.values())
            + ". These components are in an undefined state: build them anew before going on."
        )
        raise HalfRestoredError(message, components=list(failures)) from error
