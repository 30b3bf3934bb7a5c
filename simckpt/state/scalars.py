"""Which immutable Python and numpy values a state tree may hold."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from simckpt.state import atoms
from simckpt.state.registry import Handler, handlers, resolvers
from simckpt.state.walk import Walker, refusal


def _atom(to_json: Callable[[Any], Any]) -> Handler:
    def handle(walker: Walker, obj: Any, path: str) -> Any:
        return walker.atom(obj, to_json)

    return handle


def _plain(walker: Walker, obj: Any, path: str) -> Any:
    return obj


def _scalar(walker: Walker, obj: Any, path: str) -> Any:
    try:
        return walker.atom(obj, atoms.scalar_to_json)
    except TypeError as error:
        raise refusal(obj, path, f"cannot be captured: {error}") from error


def _range_to_json(value: range) -> Any:
    return {"range": [atoms.int_to_json(part) for part in (value.start, value.stop, value.step)]}


def _find(obj: Any) -> Handler | None:
    """Returns the handler of a numpy scalar."""
    return _scalar if isinstance(obj, np.generic) else None


handlers[bool] = handlers[type(None)] = _plain
handlers[str] = _atom(atoms.str_to_json)
handlers[int] = _atom(atoms.int_to_json)
handlers[float] = _atom(atoms.float_to_json)
handlers[complex] = _atom(atoms.complex_to_json)
handlers[range] = _atom(_range_to_json)
handlers[type(...)] = _atom(lambda _: {"ellipsis": ""})
handlers[type(NotImplemented)] = _atom(lambda _: {"not implemented": ""})
resolvers.append(_find)
