"""Tables: nested dicts and tuples of arrays, whose first axis are the entries."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def mapped(change: Callable[..., Any], *trees: Any) -> Any:
    """Returns nested dicts and tuples like these, `change` of their arrays in place of each."""
    if isinstance(trees[0], dict):
        return {key: mapped(change, *(tree[key] for tree in trees)) for key in trees[0]}
    if isinstance(trees[0], tuple):
        return tuple(mapped(change, *each) for each in zip(*trees, strict=True))
    return change(*trees)
