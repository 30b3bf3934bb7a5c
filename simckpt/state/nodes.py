"""The node of a state tree that stands for a Python object."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

ELAPSED = "simckpt.elapsed"
"""Type name of nodes that hold real time which has passed: no two runs share it."""

UNSEEDED = "simckpt.unseeded"
"""Type name of nodes that hold a random stream which the operating system seeded and nobody has drawn from."""

INCOMPARABLE = frozenset({ELAPSED, UNSEEDED})
"""Type names of nodes that are state, and whose content two runs that are otherwise equal do not share."""


@dataclass(eq=False, slots=True)
class ObjectState:
    """The attributes of a Python object, as a walker took them; compared and hashed by identity.

    A file keeps the name of the class as text. Reading it back imports nothing: whoever restores finds the live object
    at the same place and fills it.

    Attributes:
        type_name: the qualified name of the class, such as `gymnasium.wrappers.common.TimeLimit`.
        attributes: attribute name -> state tree. It may lead back to this node: cycles are kept.
        items: the content of an object that is also a container (a list with attributes, say), else None.
            Its leaves lie at the same path as the node itself.
    """

    type_name: str
    attributes: dict[str, Any] = field(default_factory=dict)
    items: Any = None
