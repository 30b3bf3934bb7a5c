"""The variables of a training loop, as a component."""

from __future__ import annotations

from typing import Any

from simckpt.errors import ConfigurationError, StateMismatchError
from simckpt.state.rng import find_generator_problem, generator_state, is_generator, set_generator_state
from simckpt.state.tree import copy_tree


class LoopState:
    """The loop's own variables: every attribute is state, and may be any state tree.

    ```python
    loop = LoopState(step=0, observations=None)
    loop.step += 1
    ```

    A restore gives the attributes new values, so read them through the object afterwards. Random generators among them
    stay the same objects. Attributes that were saved but do not exist yet are set.

    Args:
        **values: the variables and what they are at the first start.

    Raises:
        ConfigurationError: a name that the class needs for itself.
    """

    def __init__(self, **values: Any) -> None:
        for name, value in values.items():
            setattr(self, name, value)

    def __setattr__(self, name: str, value: Any) -> None:
        if hasattr(LoopState, name):
            raise ConfigurationError(f"LoopState needs the name {name!r} for itself: choose another one", keys=(name,))
        object.__setattr__(self, name, value)

    def __getattr__(self, name: str) -> Any:
        # only asked for names that do not exist; typed Any, for the attributes are the user's
        raise AttributeError(f"the loop has no variable {name!r}; it has {', '.join(vars(self)) or 'none'}")

    def state_dict(self) -> dict[str, Any]:
        """Returns the variables by name; the values are the live ones, not copies."""
        return dict(vars(self))

    def validate_state_dict(self, state: Any) -> None:
        """Checks that a state has every variable of the loop.

        Raises:
            StateMismatchError: it lists the missing ones, and generators of another kind.
        """
        problems = _find_problems(vars(self), state)
        if problems:
            raise StateMismatchError("the loop's variables do not fit: " + "; ".join(problems), problems=problems)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Sets the variables to copies of the saved ones; variables that were not saved are removed.

        A restore asks `validate_state_dict` before, which does not let it come to that; an undo needs it.

        Raises:
            StateMismatchError: a name that no variable can have, or a generator of another kind; nothing was changed.
        """
        problems = _wrong_values(vars(self), state)
        if problems:
            raise StateMismatchError("the loop's variables do not fit: " + "; ".join(problems), problems=problems)
        for name in [name for name in vars(self) if name not in state]:
            delattr(self, name)
        for name, value in copy_tree(state).items():
            live = vars(self).get(name)
            if is_generator(live) and is_generator(value):
                set_generator_state(live, generator_state(value))
            else:
                object.__setattr__(self, name, value)

    def __repr__(self) -> str:
        return f"LoopState({', '.join(f'{name}={value!r}' for name, value in vars(self).items())})"


def _find_problems(live: dict[str, Any], state: Any) -> list[str]:
    missing = [f"{name}: it was not saved" for name in live if isinstance(state, dict) and name not in state]
    return missing + _wrong_values(live, state)


def _wrong_values(live: dict[str, Any], state: Any) -> list[str]:
    if not isinstance(state, dict) or not all(type(name) is str for name in state):
        return ["the state is not a dict of variables"]
    problems = [f"{name}: it cannot be the name of a variable" for name in state if hasattr(LoopState, name)]
    for name, value in state.items():
        if is_generator(live.get(name)) and is_generator(value):
            problem = find_generator_problem(live[name], generator_state(value))
            problems += [f"{name}: {problem}"] if problem else []
    return problems
