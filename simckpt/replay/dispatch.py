"""`handle_for`: which handle captures and restores a replay buffer."""

from __future__ import annotations

import importlib
from typing import Any

from simckpt.errors import UnsupportedStateError
from simckpt.replay.adapter import registered_adapter
from simckpt.replay.handle import ReplayHandle
from simckpt.state.walk import qualified_name

# package of the class -> module of this package that finds its adapter
_ADAPTERS = {"stable_baselines3": "simckpt.replay.sb3", "torchrl": "simckpt.replay.torchrl"}


def handle_for(obj: Any, name: str) -> ReplayHandle | None:
    """Returns the handle of a replay buffer, and None for anything else.

    Args:
        obj: any object.
        name: of the component, for messages.

    Raises:
        UnsupportedStateError: a replay buffer of a class that has no adapter, be it a subclass of one that has.
    """
    cls = type(obj)
    bases = [base for base in cls.__mro__ if base is not object]
    adapter = registered_adapter(cls)
    for package in sorted({base.__module__.partition(".")[0] for base in bases} & set(_ADAPTERS)):
        adapter = adapter or importlib.import_module(_ADAPTERS[package]).find_adapter(obj, name)
    if adapter is not None:
        return ReplayHandle(name, obj, adapter)
    known = next((base for base in bases if registered_adapter(base) is not None or _is_foreign_buffer(base)), None)
    if known is None:
        return None
    type_name = qualified_name(cls)
    what = f"a {qualified_name(known)}" if known is not cls else "a replay buffer"
    raise UnsupportedStateError(
        f"component {name!r} is of type {type_name}, {what} that simckpt has no adapter for: it may have more "
        "state, or rewrite rows. Write one (simckpt.replay.ReplayAdapter), test it with "
        f"simckpt.testing.replay_conformance, and call simckpt.replay.register_replay_adapter({cls.__name__}, ...)",
        path=name,
        type_name=type_name,
    )


def _is_foreign_buffer(cls: type) -> bool:
    return cls.__module__.partition(".")[0] in _ADAPTERS and cls.__name__.endswith("Buffer")
