"""What a changed hyperparameter does to the shapes of a state: found before a restore, and told with what to do."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

Changed = Mapping[str, tuple[Any, Any]]
"""{hyperparameter: (value that the state was saved under, value of the program)}."""


def find_resized(saved: Any, live: Any, changed: Changed, *, path: str) -> Iterator[tuple[str, str]]:
    """Yields the path and the problem of each array, tensor or list whose other size follows from a change.

    Sizes follow from a whole number if every one that differs is scaled as it was: 2 envs in 5, and 256 rows in 640;
    and from a name, such as that of an env, in any way. What was empty or is, grows as training goes on.

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
    if before != now:
        if any(_follows(before, now, *values) for values in changed.values()):
            yield path, f"{path}: saved with shape {before}, live has {now}"
    elif isinstance(saved, list | tuple):
        for index, (one, other) in enumerate(zip(saved, live, strict=True)):
            yield from find_resized(one, other, changed, path=f"{path}/{index}")


def advice(changed: Changed, places: Collection[str], *, untouched: Collection[str]) -> str:
    """Returns what to do about a state that does not fit, a line of its own; nothing where nothing was changed.

    Args:
        changed: what has changed.
        places: components, or `component/variable` of a loop, that do not fit.
        untouched: those that are declared already.
    """
    if not changed or not places:
        return ""
    told = ", ".join(f"{key!r} ({old!r} -> {new!r})" for key, (old, new) in changed.items())
    names = ", ".join(map(repr, sorted({*places, *untouched})))
    return (
        f"\nThe run changes {told}. Where other shapes follow from that, say in simckpt.Hyperparameters what begins "
        f"anew, as in fresh={{{next(iter(changed))!r}: {{{names}}}}}: that stays as the program makes it, and the rest "
        "is restored"
    )


def _shape(value: Any) -> tuple[int, ...] | None:
    if isinstance(value, list | tuple):
        return (len(value),)
    shape = getattr(value, "shape", None)
    return None if shape is None else tuple(shape)


def _follows(before: tuple[int, ...], now: tuple[int, ...], old: Any, new: Any) -> bool:
    if 0 in before or 0 in now:
        return False
    if type(old) is int and type(new) is int:
        return all(one == other or one * new == other * old for one, other in zip(before, now, strict=True))
    return type(old) is str and type(new) is str
