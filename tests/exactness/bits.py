"""Comparison by bits of whatever an env returns."""

import dataclasses
import struct
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

# the wall clock of RecordEpisodeStatistics, in `info["episode"]["t"]`: no two runs share it
EXEMPT = (("episode", "t"), ("outer_episode", "t"))
# lists that FrankaKitchen makes of sets of strings: their order is another one in every process
UNORDERED = frozenset({"tasks_to_complete", "step_task_completions", "episode_task_completions"})

Flat = dict[str, tuple[str, bytes]]


def flatten(value: Any) -> Flat:
    """Returns every number and string inside `value` by its path, with its exact type and its bytes.

    Written without simckpt's own trees, which are what is tested here.
    """
    return dict(_walk(value, ()))


def _walk(value: Any, path: tuple[str, ...]) -> Iterator[tuple[str, tuple[str, bytes]]]:
    if path[-2:] in EXEMPT:
        return
    name = "/".join(path)
    if path and path[-1] in UNORDERED:
        value = sorted(value)
    if isinstance(value, Mapping):
        yield name, (f"mapping of {sorted(map(repr, value))}", b"")
        for key in value:
            yield from _walk(value[key], (*path, str(key)))
    elif isinstance(value, (list, tuple)) or (isinstance(value, np.ndarray) and value.dtype.hasobject):
        yield name, (f"{type(value).__name__} of {len(value)}", b"")
        for index, child in enumerate(value):
            yield from _walk(child, (*path, str(index)))
    elif isinstance(value, (np.ndarray, np.generic)):
        yield name, (f"{type(value).__name__} {value.dtype.str} {value.shape}", value.tobytes())
    elif isinstance(value, float):
        yield name, ("float", struct.pack("<d", value))
    elif value is None or isinstance(value, (bool, int, str, bytes)):
        yield name, (type(value).__name__, repr(value).encode())
    elif dataclasses.is_dataclass(value):
        yield from _walk(vars(value), path)
    else:
        raise TypeError(f"{name}: no way to compare a {type(value)} by bits")


def differences(expected: list[Flat], actual: list[Flat]) -> Iterator[str]:
    """Yields each difference of two logs, first step first: entry, path, both values."""
    for entry, (left, right) in enumerate(zip(expected, actual, strict=True)):
        for path in sorted(left.keys() | right.keys()):
            a, b = left.get(path), right.get(path)
            if a != b:
                yield f"entry {entry}, {path}: expected {_show(a)}, got {_show(b)}"


def _show(item: tuple[str, bytes] | None) -> str:
    if item is None:
        return "nothing"
    kind, data = item
    if kind == "float":
        return repr(struct.unpack("<d", data)[0])
    parts = kind.split(" ", 2)
    if parts[0] == "ndarray" or (len(parts) == 3 and parts[1][:1] in "<>|"):
        return f"{kind} {np.frombuffer(data, parts[1]).ravel()[:6]}"
    return f"{kind} {data[:60]!r}"
