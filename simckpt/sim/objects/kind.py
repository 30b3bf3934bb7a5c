"""What a kind of object must answer, and the run of one capture.

A *kind* turns live objects of some classes into nodes of a state tree and back. Mutable kinds are restored in two
steps, `create` and `fill`, so that cycles close; value kinds (tuples, bound methods, views) in one, `make`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar, Protocol

import numpy as np

from simckpt.errors import UnsupportedStateError

MISSING: Any = type("Missing", (), {"__repr__": lambda self: "<missing>"})()

# immutable and complete in themselves: they stand in the tree as they are
PLAIN: set[type] = {
    type(None),
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    *(kind for kind in np.sctypeDict.values() if not issubclass(kind, np.void | np.object_)),
}

# a piece of the way from the root to a value: attributes are joined by dots, items stand in brackets
Step = str
Child = tuple[Step, Any, Any]


class Unsupported(Exception):
    """An object that cannot be captured, on its way out to the root; collects the steps of the path."""

    def __init__(self, type_name: str, reason: str) -> None:
        super().__init__(reason)
        self.type_name = type_name
        self.reason = reason
        self.steps: list[Step] = []

    def at(self, step: Step) -> Unsupported:
        """Returns self with one more step, from the inside outward."""
        self.steps.append(step)
        return self


class Kind:
    """How objects of one sort become nodes and come back.

    Attributes:
        mutable: whether `create` and `fill` restore it (identity matters), or `make` does.
    """

    mutable: ClassVar[bool] = True

    def capture(self, run: Capture, value: Any) -> Any:
        """Returns the node of a live object; shares no memory with it."""
        raise NotImplementedError

    def fits(self, matching: Matching, node: Any, live: Any) -> bool:
        """Returns whether the live object can become what the node says by changing it in place; for mutable kinds."""
        raise NotImplementedError

    def children(self, node: Any, live: Any) -> Iterator[Child]:
        """Yields `(step, child node, child of the live object or MISSING)`; `live` may be MISSING."""
        return iter(())

    def problem(self, matching: Matching, node: Any, live: Any) -> str | None:
        """Returns why an object that no live one fits cannot be built, or None if it can."""
        return None

    def create(self, rebuild: Rebuild, node: Any) -> Any:
        """Returns a new object, to be filled."""
        raise NotImplementedError

    def fill(self, rebuild: Rebuild, node: Any, target: Any) -> None:
        """Changes `target` into what the node says."""
        raise NotImplementedError

    def make(self, rebuild: Rebuild, node: Any, live: Any) -> Any:
        """Returns the value of a node, `live` itself where that is already it."""
        raise NotImplementedError


class Capture:
    """One walk over a live graph.

    Attributes:
        memo: id of a live object -> its node, so that aliases stay aliases. What others capture is in it already.
        owners: id of an array that owns memory -> the views of it in the graph.
        shared_owners: keys of `owners` in which arrays are known to overlap: these are captured as views.
        physics: the simulations met, in order.
        objects: every object met, where the caller asked for a list.
    """

    __slots__ = (
        "classify",
        "kinds",
        "memo",
        "memory",
        "objects",
        "owners",
        "physics",
        "shared_owners",
    )

    def __init__(
        self,
        kinds: dict[type, Kind],
        classify: Callable[[type], Kind],
        *,
        memo: dict[int, Any],
        memory: MemoryMap,
        shared_owners: set[int],
        objects: list[Any] | None = None,
    ) -> None:
        self.kinds = kinds
        self.classify = classify
        self.memory = memory
        self.shared_owners = shared_owners
        self.memo = memo
        self.owners: dict[int, list[Any]] = {}
        self.physics: list[Any] = []
        self.objects = objects

    def node(self, value: Any) -> Any:
        """Returns the node of any value.

        Raises:
            Unsupported: it, or something in it, is neither state nor a known resource.
        """
        cls = type(value)
        if cls in PLAIN:
            return value
        kind = self.kinds.get(cls)
        if kind is None:
            kind = self.classify(cls)
        if self.objects is not None:
            self.objects.append(value)
        return kind.capture(self, value)

    def child(self, value: Any, step: Step) -> Any:
        """Returns the node of a value that was reached by `step`."""
        try:
            return self.node(value)
        except Unsupported as error:
            raise error.at(step) from None


class MemoryMap(Protocol):
    """Knows which memory belongs to a simulation."""

    def locate(self, array: np.ndarray[Any, Any]) -> tuple[str, str, int] | None:
        """Returns `(physics name, field, offset [bytes])` of an array that lies in a simulation's memory, else None."""

    def field(self, physics: str, field: str) -> np.ndarray[Any, Any] | None:
        """Returns the live array of a field."""


class Matching(Protocol):
    """The pairing of a state with a live graph, as kinds see it."""

    memory: MemoryMap
    survey: Capture

    def live_node(self, live: Any) -> Any:
        """Returns what the live object looks like captured, or MISSING."""

    def partner(self, node: Any) -> Any:
        """Returns the live object that a node was paired with, or MISSING."""

    def find_class(self, type_name: str) -> type | None:
        """Returns a class of that name among those of the live graph and their modules; imports nothing."""

    def find_reference(self, name: str, code: str | None, live: Any) -> Any:
        """Returns the function, class or module of that name from the live graph, or MISSING."""

    def array_is_free(self, live: np.ndarray[Any, Any]) -> bool:
        """Returns whether no other paired array overlaps this one."""


class Rebuild(Protocol):
    """The restoring of a state, as kinds see it."""

    @property
    def matching(self) -> Matching:
        """The pairing."""

    def value(self, node: Any, live: Any = MISSING) -> Any:
        """Returns the restored object of a node; `live` is what stands at its place now."""


def unsupported_error(error: Unsupported, full: str) -> UnsupportedStateError:
    """Returns the public error for the object at path `full`: its class, why, and the ways out."""
    return UnsupportedStateError(
        f"{full} is a {error.type_name}, which cannot be captured: {error.reason}. Ways out: give its class "
        "state_dict() and load_state_dict(), or call simckpt.register_adapter(cls, get, set) to say how it is read "
        "and written, or declare it stateless with simckpt.register_stateless(cls)",
        path=full,
        type_name=error.type_name,
    )


def join_path(path: str, steps: Sequence[Step]) -> str:
    """Returns a readable path: `path/attribute.attribute[item]`."""
    joined = "".join(step if step.startswith(("[", "(", "{")) else f".{step}" for step in steps).lstrip(".")
    return f"{path}/{joined}" if joined else path


def same_bits(one: np.ndarray[Any, Any], other: np.ndarray[Any, Any]) -> bool:
    """Returns whether two arrays of equal dtype and shape hold the same bytes (NaN payloads and -0.0 included)."""
    return one.tobytes() == other.tobytes()
