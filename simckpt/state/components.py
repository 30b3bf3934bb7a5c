"""Handles: how the live objects of a program are captured, checked against a state, and set."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any, Protocol

import numpy as np

from simckpt.errors import CaptureError, RestoreError, SimckptError, StateMismatchError, UnsupportedStateError
from simckpt.state import arrays
from simckpt.state.explanations import Attributes, explain_object
from simckpt.state.rng import find_generator_problem, generator_state, is_generator, set_generator_state
from simckpt.state.tree import copy_tree
from simckpt.state.walk import qualified_name


class Handle(Protocol):
    """What a checkpointer does with one component.

    A restore takes an undo with `capture`, calls `validate` on every component, then `apply`; if anything fails,
    `apply(undo)` brings the object back bit for bit. A state is never changed or kept by the object it was applied to.

    A handle may also have `take(state)`: as `apply`, for a state that nobody else holds, so that the object may keep
    parts of it.

    A handle may also have `attributes(paths)`. It is given the paths of the leaves of a captured state and returns
    {path of a leaf or group, "" for the component itself: {name: text}}, for people who open the file; the texts depend
    on nothing but the paths, and paths that do not exist are ignored.
    """

    def capture(self) -> Any:
        """Returns the state as a tree that shares no memory with the live object.

        Raises:
            CaptureError: it cannot be captured exactly.
        """
        ...

    def validate(self, state: Any) -> None:
        """Checks that a state fits the live object, and touches nothing.

        Raises:
            StateMismatchError: with every problem found.
        """
        ...

    def apply(self, state: Any) -> None:
        """Sets the live object to a state, in place.

        Raises:
            RestoreError: the object did not take it, and may be half changed.
        """
        ...


def handle_for(name: str, obj: Any) -> Handle:
    """Returns the handle of a component.

    Args:
        name: of the component, for messages.
        obj: a torch module, optimizer, scheduler or GradScaler; a random generator; a numpy array or a tensor, set in
            place; anything with `state_dict()` and `load_state_dict()`, and `validate_state_dict(state)` if it has one.

    Raises:
        UnsupportedStateError: none of these.
    """
    if sys.modules.get("torch") is not None:
        from simckpt.state.torch_components import torch_handle

        found = torch_handle(name, obj)
        if found is not None:
            return found
    if is_generator(obj):
        return GeneratorHandle(name, obj)
    if type(obj) in (np.ndarray, np.memmap):
        return ArrayHandle(name, obj)
    if callable(getattr(obj, "state_dict", None)) and callable(getattr(obj, "load_state_dict", None)):
        return ProtocolHandle(name, obj)
    type_name = qualified_name(type(obj))
    hint = (
        "put it into a LoopState"
        if isinstance(obj, (dict, list, set, tuple, int, float, str))
        else "give it state_dict() and load_state_dict()"
    )
    raise UnsupportedStateError(
        f"component {name!r} is of type {type_name}, which has no state that simckpt can set: {hint}",
        path=name,
        type_name=type_name,
    )


def attributes_of(handle: Handle, paths: Iterable[str]) -> Attributes:
    """Returns the texts that explain the leaves at these paths; none if the handle has no `attributes`."""
    explain = getattr(handle, "attributes", None)
    return {} if explain is None else dict(explain(paths))


def capture_copy(name: str, tree: Any) -> Any:
    """Returns a copy of a component's tree; an object that cannot be captured is named with the component.

    Raises:
        UnsupportedStateError: from `copy_tree`.
    """
    try:
        return copy_tree(tree)
    except UnsupportedStateError as error:
        path = f"{name}/{error.path}" if error.path else name
        raise UnsupportedStateError(f"component {name!r}, {error}", path=path, type_name=error.type_name) from error


def mismatch(name: str, problems: list[str]) -> StateMismatchError:
    """Returns the error for a component that a state does not fit."""
    shown = "; ".join(problems[:10]) + (f"; and {len(problems) - 10} more" if len(problems) > 10 else "")
    return StateMismatchError(
        f"component {name!r} does not fit the checkpoint: {shown}",
        problems=[f"{name}: {problem}" for problem in problems],
    )


class ProtocolHandle:
    """The handle of anything with `state_dict()` and `load_state_dict()`."""

    def __init__(self, name: str, obj: Any) -> None:
        self.name = name
        self.obj = obj

    def capture(self) -> Any:
        """Returns a copy of `state_dict()`."""
        return capture_copy(self.name, self.state())

    def state(self) -> Any:
        """Returns `state_dict()` itself.

        Raises:
            CaptureError: the method raised.
        """
        try:
            return self.obj.state_dict()
        except SimckptError:
            raise
        except Exception as error:
            raise CaptureError(
                f"component {self.name!r}: state_dict() raised {type(error).__name__}: {error}"
            ) from error

    def attributes(self, paths: Iterable[str]) -> Attributes:
        """Returns texts that explain the state in a file."""
        return explain_object(self.obj, paths)

    def validate(self, state: Any) -> None:
        """Calls the object's own `validate_state_dict(state)`, if it has one."""
        check = getattr(self.obj, "validate_state_dict", None)
        if check is None:
            return
        try:
            check(state)
        except StateMismatchError as error:
            raise mismatch(self.name, list(error.problems) or [str(error)]) from error
        except Exception as error:
            raise mismatch(self.name, [f"validate_state_dict() raised {type(error).__name__}: {error}"]) from error

    def apply(self, state: Any) -> None:
        """Calls `load_state_dict` with a copy, for many objects keep what they are given."""
        try:
            result = self.obj.load_state_dict(copy_tree(state))
        except SimckptError:
            raise
        except Exception as error:
            raise RestoreError(
                f"component {self.name!r}: load_state_dict() raised {type(error).__name__}: {error}"
            ) from error
        # torch's convention for a load that went on without some keys
        problems = [f"{key}: not in the checkpoint" for key in getattr(result, "missing_keys", ())]
        problems += [f"{key}: only in the checkpoint" for key in getattr(result, "unexpected_keys", ())]
        if problems:
            raise mismatch(self.name, problems)


class GeneratorHandle:
    """The handle of a random generator."""

    def __init__(self, name: str, generator: Any) -> None:
        self.name = name
        self.generator = generator

    def capture(self) -> Any:
        """Returns the state of the generator."""
        return generator_state(self.generator)

    def validate(self, state: Any) -> None:
        """Checks the kind of generator."""
        problem = find_generator_problem(self.generator, state)
        if problem:
            raise mismatch(self.name, [problem])

    def apply(self, state: Any) -> None:
        """Sets the state in place."""
        set_generator_state(self.generator, state)


class ArrayHandle:
    """The handle of a numpy array, which is overwritten in place."""

    def __init__(self, name: str, array: np.ndarray[Any, Any]) -> None:
        if array.dtype.hasobject:
            raise UnsupportedStateError(
                f"component {name!r} is an array of Python objects: put it into a LoopState",
                path=name,
                type_name="numpy.ndarray",
            )
        self.name = name
        self.array = array

    def capture(self) -> Any:
        """Returns a copy."""
        return arrays.copy_array(self.array)

    def validate(self, state: Any) -> None:
        """Checks dtype and shape, and that the array can be written."""
        problems = []
        if not isinstance(state, np.ndarray):
            problems.append(f"saved as {type(state).__name__}, live is an array")
        elif (state.dtype, state.shape) != (self.array.dtype, self.array.shape):
            problems.append(f"saved as {state.dtype} {state.shape}, live is {self.array.dtype} {self.array.shape}")
        if not self.array.flags.writeable:
            problems.append("the live array is read-only")
        if problems:
            raise mismatch(self.name, problems)

    def apply(self, state: Any) -> None:
        """Overwrites the array."""
        self.validate(state)
        self.array[...] = state
