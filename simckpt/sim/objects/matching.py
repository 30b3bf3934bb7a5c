"""Pairing a state with the live graph: which node belongs to which object, and what cannot be paired or built."""

from __future__ import annotations

import sys
import types
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import gymnasium as gym
import numpy as np

from simckpt.sim.objects import arrays
from simckpt.sim.objects.classify import PHYSICS, kind_of_node
from simckpt.sim.objects.functions import code_digest, reference_name
from simckpt.sim.objects.instances import RESOURCE, ObjectKind
from simckpt.sim.objects.kind import MISSING, PLAIN, Capture, Kind, MemoryMap
from simckpt.state.compare import differences
from simckpt.state.nodes import ObjectState
from simckpt.state.walk import qualified_name

# what envs return to their users as observations and infos
SHARED_WITH_USERS = (np.ndarray, dict, list, tuple)
# a state with more of these than are live cannot be restored by building them
_NEVER_BUILT = (gym.Env, gym.Wrapper, gym.Space, gym.vector.VectorEnv)


class GraphMatching:
    """The pairing of one state with one live graph; changes nothing.

    A node is paired with the first live object, in the state's order, that stands at one of its places and can become
    what the node says; each live object is paired once. So objects that share a name in the state share it again, and
    those that do not, do not.

    Args:
        survey: a capture of the live graph, just made, with its list of objects.
        memory: the memory of the live simulations.
        label: from the steps to an object to its path, for messages.
    """

    def __init__(self, survey: Capture, memory: MemoryMap, label: Callable[[list[str]], str]) -> None:
        assert survey.objects is not None
        self.memory = memory
        self.label = label
        self.survey = survey
        # how often the graph refers to a live object, and what the program outside may hold as well, outermost first
        self.references: Counter[int] = Counter()
        self.visited: list[tuple[Any, Any]] = []
        self.physics: dict[str, Any] = {}
        self._partners: dict[int, Any] = {}
        self._claimed: dict[int, Any] = {}
        self._spans: dict[int, list[Any]] = {}
        self._visited: dict[int, Any] = {}
        self._classes: dict[str, type] = {}
        self._modules: set[str] = set()
        self._named: dict[tuple[str, str | None], Any] = {}
        self._learn(survey.objects)

    def _learn(self, objects: Iterable[Any]) -> None:
        for value in objects:
            cls = type(value)
            for base in cls.__mro__:
                self._classes.setdefault(qualified_name(base), base)
            self._modules.add(cls.__module__)
            if isinstance(value, types.FunctionType | types.BuiltinFunctionType | types.ModuleType | type):
                self._named.setdefault((reference_name(value), code_digest(value)), value)
                self._named.setdefault((reference_name(value), None), value)
                self._modules.add(getattr(value, "__module__", None) or "builtins")

    # what kinds ask

    def live_node(self, live: Any) -> Any:
        """Returns what a live object looks like captured, or MISSING."""
        node = self.survey.memo.get(id(live), MISSING)
        if node is MISSING and type(live) not in PLAIN:
            kind = self.survey.kinds.get(type(live))
            if kind is not None and not kind.mutable:
                return kind.capture(self.survey, live)
        return node

    def partner(self, node: Any) -> Any:
        """Returns the live object that a node was paired with, or MISSING."""
        return self._partners.get(id(node), MISSING)

    def unpair(self, node: Any) -> None:
        """Makes a node one that is built anew."""
        del self._partners[id(node)]

    def find_class(self, type_name: str) -> type | None:
        """Returns a class by name: one seen in the live graph, or one defined in the module of such a class."""
        found = self._classes.get(type_name)
        if found is not None:
            return found
        value = self._in_modules(type_name)
        return value if isinstance(value, type) and qualified_name(value) == type_name else None

    def find_reference(self, name: str, code: str | None, live: Any) -> Any:
        """Returns the function, class or module of that name: the live one at its place, or another in the graph."""
        if live is not MISSING and reference_name(live) == name and code_digest(live) == code:
            return live
        for key in ((name, code), (name, None)):
            if key in self._named:
                return self._named[key]
        if live is not MISSING and reference_name(live) == name:
            return live
        found = self._in_modules(name)
        return found if found is not None and reference_name(found) == name else MISSING

    def _in_modules(self, name: str) -> Any:
        # modules of live objects only: a file must not be able to pick any function of the interpreter
        for module_name in self._modules:
            if name.startswith(f"{module_name}.") and module_name in sys.modules:
                found: Any = sys.modules[module_name]
                for part in name.removeprefix(f"{module_name}.").split("."):
                    found = getattr(found, "__dict__", {}).get(part)
                if found is not None and getattr(found, "__module__", None) == module_name:
                    return found
        return None

    def array_is_free(self, live: np.ndarray[Any, Any]) -> bool:
        """Returns whether no other paired array overlaps this one."""
        owner = arrays.memory_owner(live)
        taken = self._spans.get(id(owner), [])
        return not arrays.overlapping([*taken, live])

    # pairing

    def match(self, node: Any, live: Any) -> None:
        """Pairs a node and everything below it, with the live object at its place as the first candidate."""
        if type(node) in PLAIN:
            return
        if live is not MISSING and type(live) not in PLAIN:
            self.references[id(live)] += 1
        known = id(node) in self._visited
        if known and (id(node) in self._partners or live is MISSING):
            return
        kind = kind_of_node(node, self.find_class)
        if kind is None:
            self._visited[id(node)] = node
            return
        paired = False
        if kind.mutable:
            paired = live is not MISSING and id(live) not in self._claimed and kind.fits(self, node, live)
            if paired:
                self._pair(node, live)
        self._visited[id(node)] = node
        if known and not paired and kind.mutable:
            return
        below = live if paired or not kind.mutable else MISSING
        if type(below) in SHARED_WITH_USERS:
            self.visited.append((node, below))
        for _, child, live_child in kind.children(node, below):
            self.match(child, live_child)

    def _pair(self, node: Any, live: Any) -> None:
        self._partners[id(node)] = live
        self._claimed[id(live)] = live
        if isinstance(live, np.ndarray):
            self._spans.setdefault(id(arrays.memory_owner(live)), []).append(live)
        if isinstance(node, ObjectState) and node.type_name == PHYSICS:
            self.physics[node.attributes["physics"]] = live

    # checking

    def problems(self, node: Any, live: Any) -> list[str]:
        """Returns one line for everything in the state that can neither be paired nor built."""
        found: list[str] = []
        self._check(node, live, [], found, set(), in_space=False)
        return found

    def _check(
        self, node: Any, live: Any, steps: list[str], found: list[str], seen: set[int], *, in_space: bool
    ) -> None:
        if type(node) in PLAIN or id(node) in seen:
            return
        kind = kind_of_node(node, self.find_class)
        if kind is None or kind.mutable:
            seen.add(id(node))
        partner = self.partner(node)
        problem = self._problem(kind, node, live, partner, in_space=in_space)
        if problem is not None:
            found.append(f"{self.label(steps)} {problem}")
            return
        if kind is None:
            return
        below = partner if kind.mutable else live
        space = isinstance(below, gym.Space)
        for step, child, live_child in kind.children(node, below):
            self._check(child, live_child, [*steps, step], found, seen, in_space=space)

    def _problem(self, kind: Kind | None, node: Any, live: Any, partner: Any, *, in_space: bool) -> str | None:
        if kind is None:
            wanted = node.attributes.get("class", node.type_name) if isinstance(node, ObjectState) else type(node)
            return f"is a {wanted} in the state, {_describe(live)} in the live env"
        if not kind.mutable:
            if is_left_alone(node) and isinstance(live, _NEVER_BUILT) and not is_left_alone(self.live_node(live)):
                # a wrapper between what the state ends at and the live one would keep its own state
                return f"is where the state ends ({node.attributes.get('class')}), {_describe(live)} in the live env"
            problem = kind.problem(self, node, live)
            return None if problem is not None and self._is_equal(node, live) else problem
        if partner is not MISSING:
            return None
        if isinstance(kind, ObjectKind):
            if issubclass(kind.cls, _NEVER_BUILT):
                return f"is a {node.type_name} in the state, {_describe(live)} in the live env"
            return None
        if in_space and isinstance(node, np.ndarray):
            shape = f"{live.dtype}{live.shape}" if isinstance(live, np.ndarray) else _describe(live)
            return f"is {node.dtype}{node.shape} in the state, {shape} in the live space"
        return kind.problem(self, node, live)

    def _is_equal(self, node: Any, live: Any) -> bool:
        """Whether the live value is the saved one already: then it need not be built."""
        as_captured = MISSING if live is MISSING else self.live_node(live)
        return as_captured is not MISSING and not differences(as_captured, node)


def _describe(live: Any) -> str:
    return "missing" if live is MISSING else f"a {qualified_name(type(live))}"


def held_by_pairing(matching: GraphMatching) -> Counter[int]:
    """Returns how many references to each live object, by id, a pairing and its survey hold."""
    holders: list[Iterable[Any]] = [
        matching.survey.objects or (),
        matching._claimed.values(),
        matching._partners.values(),
        [live for _, live in matching.visited],
        *matching.survey.owners.values(),
        *matching._spans.values(),
    ]
    return Counter(id(value) for held in holders for value in held)


def is_left_alone(node: Any) -> bool:
    """Returns whether a node stands for something that a restore does not touch."""
    return isinstance(node, ObjectState) and node.type_name == RESOURCE
