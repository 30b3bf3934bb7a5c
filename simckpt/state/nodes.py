"""The node of a state tree that stands for a Python object."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


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
