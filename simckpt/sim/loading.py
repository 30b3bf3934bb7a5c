"""A restore that happens whole or not at all, for envs that are used without a run."""

from __future__ import annotations

from typing import Any

from simckpt.errors import HalfRestoredError, RestoreError, SimckptError
from simckpt.state.components import Handle


def load_or_put_back(handle: Handle, state: Any, path: str) -> None:
    """Sets the live object behind a handle to a state; if that fails, the object is as it was.

    Args:
        handle: of the object.
        state: as `handle.capture()` returns it.
        path: of the object, for messages.

    Raises:
        StateMismatchError: the state does not fit; nothing was changed.
        RestoreError: the object did not take it, and was put back.
        HalfRestoredError: the object did not take what it was before either.
    """
    handle.validate(state)
    undo = handle.capture()
    try:
        handle.apply(state)
    except BaseException as error:
        try:
            handle.apply(undo)
        except Exception as second:
            message = (
                f"{path}: the state could not be applied ({type(error).__name__}: {error}), and putting back failed "
                f"({type(second).__name__}: {second}): it is in an undefined state, build it anew"
            )
            raise HalfRestoredError(message, components=[path]) from error
        if isinstance(error, SimckptError) or not isinstance(error, Exception):
            raise
        message = f"{path}: the state could not be applied and all was put back: {type(error).__name__}: {error}"
        raise RestoreError(message) from error
