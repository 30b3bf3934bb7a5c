"""Hyperparameters that a component took when it was made, so that its saved state would bring the old value back."""

from __future__ import annotations

import dataclasses
import math
import re
import sys
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import numpy as np

from simckpt.branching.watching import Rate
from simckpt.errors import OverrideNotAppliedError
from simckpt.state.nodes import ObjectState

WIDTH = 1000  # items; longer lists are logs of training, which no constructor makes
SHOWN = 3  # places that a message names
_RATE = re.compile(r"(^|/)param_groups/\d+/lr$")

Changed = Mapping[str, tuple[Any, Any]]
"""{hyperparameter: (value that the state was saved under, value of the program)}."""


def refuse_taken(
    saved: Mapping[str, Any],
    live: Mapping[str, Any],
    changed: Changed,
    *,
    fresh: Mapping[str, Collection[str]],
    loops: Collection[str],
    reseeded: bool,
) -> None:
    """Refuses a restore that would take from a component what it was made with; changes nothing.

    A place took a key if it was saved with the old value and is live with the new one. Of True, False, 0 and 1, which
    are in many places for other reasons, nothing is concluded; nor of the `lr` of an optimizer's groups: `kept_rates`.
    With a scheduler of torch's there is an `initial_lr`, which tells.

    Args:
        saved: {component: state tree} as it would be restored.
        live: the trees of the live objects, as the program made them.
        changed: the keys that the program reads from its arguments alone, as far as they have changed.
        fresh: key -> components, or `component/variable`, that a change of it leaves as the program made them.
        loops: the components that are a `LoopState`.
        reseeded: whether all random streams are derived anew, so that no place has to hold a seed.

    Raises:
        OverrideNotAppliedError: of the first such key; it names the places and what to do.
    """
    telling = {key: pair for key, pair in changed.items() if _is_telling(pair) and not (reseeded and key == "seed")}
    if not telling:
        return
    places: dict[str, list[str]] = {}
    for name, tree in saved.items():
        if name in live:
            for path, before, now in _differing(tree, live[name], name, set()):
                if _RATE.search(path):
                    continue
                for key, (old, new) in telling.items():
                    spared = any(path == each or path.startswith(f"{each}/") for each in fresh.get(key, ()))
                    if not spared and _holds(before, old) and _holds(now, new):
                        places.setdefault(key, []).append(path)
    for key in telling:
        if key in places:
            raise _refusal(key, places[key], *telling[key], loops=loops)


def kept_rates(
    saved: Mapping[str, Any], live: Mapping[str, Any], changed: Collection[tuple[str, Any, Any]]
) -> list[Rate]:
    """Returns the learning rates that a restore brings back; whether the loop sets them shows when it steps.

    Args:
        saved: {component: state tree} as it would be restored.
        live: the trees of the live objects, as the program made them.
        changed: (hyperparameter, a value that it had before, value of the program) of those that the program reads from
            its arguments alone.
    """
    found: list[Rate] = []
    for name, tree in saved.items():
        before, now = (_parts(_part(_part(each, ""), "param_groups")) or {} for each in (tree, live.get(name)))
        for number in before.keys() & now.keys():
            for key, old, new in changed:
                if _is_telling((old, new)) and _has_rate(before[number], old) and _has_rate(now[number], new):
                    found.append(Rate(key, new, old, name, number))
    return found


def _has_rate(group: Any, rate: Any) -> bool:
    found = _part(group, "lr")
    return _is_scalar(found) and _holds(found, rate)


def _part(tree: Any, name: str) -> Any:
    return (_parts(tree) or {}).get(name)


def _refusal(key: str, places: list[str], old: Any, new: Any, *, loops: Collection[str]) -> OverrideNotAppliedError:
    shown = ", ".join(places[:SHOWN]) + (f" and {len(places) - SHOWN} more" if len(places) > SHOWN else "")
    component, _, inner = places[0].partition("/")
    said = (
        f"hyperparameter {key!r} is read from the arguments alone, by its declaration, but component {component!r} "
        f"took it when it was made, and its saved state brings the old value back: {shown}: as built {new!r}, restored "
        f"{old!r}. All is as it was. "
    )
    if key == "seed":
        advice = (
            'Branch with checkpoint.branch(..., rng="reseed") instead, which derives all random streams anew; an '
            "override of the seed has nothing to say there"
        )
        return OverrideNotAppliedError(said + advice, key=key, wanted=new, found=old)
    if component in loops:
        variable = inner.partition("/")[0]
        bound, where, begun = f'({component}, "{variable}")', "", f"{component}/{variable}"
    else:
        attribute = inner.rpartition("/")[2] or key
        bound, begun = f'({component}, "{attribute}")', component
        where = f", where {component} stands for that part of it which has {attribute!r}"
    several = ", all of them in a list" if len(places) > 1 else ""
    advice = (
        f"Bind it instead, as in {{{key!r}: {bound}}}{where}{several}; or, for what is to begin as the program makes "
        f"it, name {begun!r} in fresh={{{key!r}: {{{begun!r}}}}}"
    )
    return OverrideNotAppliedError(said + advice, key=key, wanted=new, found=old)


def _is_telling(pair: tuple[Any, Any]) -> bool:
    """Returns whether a place that had the one value and has the other can hardly have them by chance."""
    return pair[0] != pair[1] and all(
        type(value) in (float, str) or (type(value) is int and value not in (0, 1)) for value in pair
    )


def _differing(saved: Any, live: Any, path: str, seen: set[int]) -> Iterator[tuple[str, Any, Any]]:
    """Yields (path, saved value, live value) of all numbers and texts that both trees have, and that differ."""
    if _is_scalar(saved):
        if _is_scalar(live):
            before, now = _plain(saved), _plain(live)
            if isinstance(before, str) == isinstance(now, str) and before != now:
                yield path, saved, live
        return
    if id(saved) in seen:
        return
    parts, others = _parts(saved), _parts(live)
    if parts is None or others is None:
        return
    # state trees may lead back to themselves; both are alive until the end
    seen.add(id(saved))
    for name, value in parts.items():
        if name in others:
            yield from _differing(value, others[name], f"{path}/{name}" if name != "" else path, seen)


def _parts(tree: Any) -> Mapping[Any, Any] | None:
    """Returns the children of a node of a state tree by name, or None if there are none to look at."""
    if isinstance(tree, Mapping):
        return tree
    if isinstance(tree, ObjectState):
        return {**tree.attributes, "": tree.items}
    batch = sys.modules.get("simckpt.sim.batch")
    if batch is not None and isinstance(tree, batch.Batched):
        return dict(enumerate(tree.trees))
    if isinstance(tree, list | tuple):
        return dict(enumerate(tree)) if len(tree) <= WIDTH else None
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        return {field.name: getattr(tree, field.name, None) for field in dataclasses.fields(tree)}
    return None


def _is_tensor(value: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def _is_scalar(value: Any) -> bool:
    """Returns whether something is a number or a text, or an array of one number."""
    if isinstance(value, np.ndarray):
        return value.size == 1 and value.dtype.kind in "iuf"
    if _is_tensor(value):
        return bool(value.numel() == 1 and not value.is_complex() and value.dtype != sys.modules["torch"].bool)
    return isinstance(value, int | float | str | np.integer | np.floating) and not isinstance(value, bool)


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value.reshape(()).item()
    if _is_tensor(value):
        return value.detach().reshape(()).item()
    return value.item() if isinstance(value, np.generic) else value


def _holds(found: Any, value: Any) -> bool:
    """Returns whether a place holds a value, as exactly as its type can."""
    held = _plain(found)
    if isinstance(held, str) or isinstance(value, str):
        return bool(type(held) is type(value) and held == value)
    if held == value:
        return True
    # single precision keeps another number, and so does half
    if not isinstance(held, float) or isinstance(found, float) or not math.isfinite(value):
        return False
    if _is_tensor(found):
        torch = sys.modules["torch"]
        return bool(torch.as_tensor(value, dtype=found.dtype).item() == held)
    with np.errstate(over="ignore"):
        return bool(np.asarray(value).astype(found.dtype).item() == held)
