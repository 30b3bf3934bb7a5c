"""What a changed hyperparameter does to the shapes of a state: found before a restore, and told with what to do."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from itertools import combinations
from math import prod
from typing import Any

Changed = Mapping[str, tuple[Any, Any]]
"""{hyperparameter: (value that the state was saved under, value of the program)}."""


def find_resized(saved: Any, live: Any, changed: Changed, *, path: str) -> Iterator[tuple[str, str, frozenset[str]]]:
    """Yields path, problem and keys of each array, tensor or list whose other size follows from changes of these keys.

    A size follows from a whole number, or from two of them together, if it is scaled as they were: 2 envs in 5, and 256
    rows in 640. That of an array or tensor follows from a name, such as an env's, in any way; not that of a list, which
    grows as training goes on. So does what was empty, or is.

    Args:
        saved: a state tree.
        live: the tree of the live object.
        changed: what has changed.
        path: of both.
    """
    if isinstance(saved, Mapping) and isinstance(live, Mapping):
        for key in saved:
            if key in live:
                yield from find_resized(saved[key], live[key], changed, path=f"{path}/{key}")
        return
    before, now = _shape(saved), _shape(live)
    if before is None or now is None or type(saved) is not type(live) or len(before) != len(now):
        return
    is_list = isinstance(saved, list | tuple)
    if before != now:
        keys = _causes(before, now, changed, by_name=not is_list)
        if keys:
            yield path, f"{path}: saved with shape {before}, live has {now}", keys
    elif is_list:
        for index, (one, other) in enumerate(zip(saved, live, strict=True)):
            yield from find_resized(one, other, changed, path=f"{path}/{index}")


def advice(changed: Changed, places: Mapping[str, Collection[str]]) -> str:
    """Returns what to do about a state that does not fit, a line of its own; nothing where nothing was changed.

    Args:
        changed: what has changed.
        places: {component, or `component/variable` of a loop, that does not fit: the keys from which that follows}.
    """
    if not changed or not places:
        return ""
    told = ", ".join(f"{key!r} ({old!r} -> {new!r})" for key, (old, new) in changed.items())
    # of what is not there at all, nobody knows the cause; a rate or a coefficient is none
    likely = min(changed, key=lambda key: isinstance(changed[key][1], float))
    fresh = {
        key: sorted(place for place, keys in places.items() if key in (keys or {likely})) for key in sorted(changed)
    }
    listing = ", ".join(f"{key!r}: {{{', '.join(map(repr, named))}}}" for key, named in fresh.items() if named)
    return (
        f"\nThe run changes {told}. Where other shapes follow from that, add what begins anew to the fresh of "
        f"simckpt.Hyperparameters, as in fresh={{{listing}}}: that stays as the program makes it, and the rest is "
        "restored"
    )


def _shape(value: Any) -> tuple[int, ...] | None:
    if isinstance(value, list | tuple):
        return (len(value),)
    shape = getattr(value, "shape", None)
    return None if shape is None else tuple(shape)


def _causes(before: tuple[int, ...], now: tuple[int, ...], changed: Changed, *, by_name: bool) -> frozenset[str]:
    """Returns the keys from which all sizes that differ follow; none, if one of the sizes follows from nothing."""
    if 0 in before or 0 in now:
        return frozenset()
    names = [key for key, (old, new) in changed.items() if type(old) is str and type(new) is str] if by_name else []
    found: set[str] = set()
    for one, other in zip(before, now, strict=True):
        if one != other:
            keys = _scaling(one, other, changed) or names[:1]
            if not keys:
                return frozenset()
            found.update(keys)
    return frozenset(found)


def _scaling(one: int, other: int, changed: Changed) -> tuple[str, ...]:
    """Returns the whole numbers, at most two, that scale one size to another; those that are the sizes come first."""
    counts = [key for key, pair in changed.items() if all(type(value) is int and value > 0 for value in pair)]
    counts.sort(key=lambda key: changed[key] != (one, other))
    for keys in [*combinations(counts, 1), *combinations(counts, 2)]:
        if one * prod(changed[key][1] for key in keys) == other * prod(changed[key][0] for key in keys):
            return keys
    return ()
