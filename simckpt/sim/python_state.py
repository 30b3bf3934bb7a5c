"""The walker: captures whatever Python objects make up an env, class-independently, and restores them in place."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from simckpt.errors import StateMismatchError
from simckpt.sim.memory import SimulationMemory
from simckpt.sim.objects.arrays import shared_owners
from simckpt.sim.objects.classify import KINDS, classify
from simckpt.sim.objects.instances import RESOURCE
from simckpt.sim.objects.kind import Capture, MemoryMap, Unsupported, join_path, unsupported_error
from simckpt.sim.objects.matching import SHARED_WITH_USERS, GraphMatching
from simckpt.sim.objects.rebuilding import GraphRebuild
from simckpt.state.nodes import ObjectState


class GraphWalker:
    """Captures and restores the graph of Python objects behind a root.

    Args:
        path: of the root, for messages.
        elsewhere: objects that somebody else captures (sub-environments, say): the walk does not enter them, and a
            restore leaves them where they are.
        label: from the steps that lead to an object to its path in messages.
    """

    def __init__(
        self,
        path: str,
        *,
        elsewhere: Iterable[Any] = (),
        label: Callable[[list[str]], str] | None = None,
    ) -> None:
        self.path = path
        self._label = label or (lambda steps: join_path(path, steps))
        self._elsewhere_objects = list(elsewhere)
        self._elsewhere = {
            id(value): ObjectState(RESOURCE, {"class": "elsewhere"}) for value in self._elsewhere_objects
        }
        self._shared_owners: set[int] = set()
        # the env's own buffers, alive since the first capture: arrays weakly, containers (which cannot be) for good
        self._persistent: dict[int, Any] | None = None
        # what the latest capture met
        self.physics: list[Any] = []
        self.memory: MemoryMap = SimulationMemory({})

    def capture(self, root: Any) -> Any:
        """Returns the state tree of a root; it shares no memory with the live objects.

        Raises:
            UnsupportedStateError: something in it is neither state nor a known resource.
        """
        return self._run(root, survey=self._persistent is None)[0]

    def _run(self, root: Any, *, survey: bool) -> tuple[Any, Capture]:
        for _ in range(4):
            objects: list[Any] | None = [] if survey else None
            run = Capture(
                KINDS,
                classify,
                memo=dict(self._elsewhere),
                memory=self.memory,
                shared_owners=self._shared_owners,
                objects=objects,
            )
            try:
                node = run.node(root)
            except Unsupported as error:
                raise unsupported_error(error, self._label(error.steps[::-1])) from None
            except RecursionError:
                refused = Unsupported(
                    type(root).__name__, "its objects refer to each other in a chain that is too long"
                )
                raise unsupported_error(refused, self.path) from None
            shared = shared_owners(run)
            if shared == self._shared_owners:
                break
            # arrays that turned out to overlap are captured again, as views of what they share
            self._shared_owners = shared
        self.physics = run.physics
        if self._persistent is None:
            self._remember(run)
        return node, run

    def _remember(self, run: Capture) -> None:
        assert run.objects is not None
        self._persistent = {
            id(value): weakref.ref(value) if isinstance(value, np.ndarray) else value
            for value in run.objects
            if isinstance(value, SHARED_WITH_USERS)
        }

    def _is_persistent(self, kept: Any) -> bool:
        return not isinstance(kept, weakref.ref) or kept() is not None

    def match(self, state: Any, root: Any) -> GraphMatching:
        """Returns the pairing of a state with the live graph, its simulations included; changes nothing."""
        _, survey = self._run(root, survey=True)
        matching = GraphMatching(survey, self.memory, self._label)
        matching.match(state, root)
        return matching

    def problems(self, state: Any, root: Any) -> list[str]:
        """Returns one line for everything that keeps a state from being restored; changes nothing."""
        return self.match(state, root).problems(state, root)

    def apply(self, state: Any, root: Any, matching: GraphMatching | None = None) -> None:
        """Makes the live graph equal to a state, in place.

        Args:
            state: as `capture` returns it; it can be applied any number of times.
            root: the live root.
            matching: of this state with the live graph as it is, if it was made already.

        Raises:
            StateMismatchError: the state does not fit; nothing was changed.
        """
        if matching is None:
            matching = self.match(state, root)
        found = matching.problems(state, root)
        if found:
            raise mismatch_error(self.path, found)
        # views of the simulation are rebuilt on the live one's memory
        matching.memory = self.memory
        persistent = {key for key, kept in (self._persistent or {}).items() if self._is_persistent(kept)}
        # whoever called this holds the root
        persistent.add(id(root))
        result = GraphRebuild(matching, persistent).value(state, root)
        assert result is root, "the root itself is never replaced"


def mismatch_error(path: str, problems: Sequence[str]) -> StateMismatchError:
    """Returns the error that lists what does not fit."""
    return StateMismatchError(
        f"the state does not fit {path}; nothing was changed:{listing(problems)}", problems=problems
    )


def listing(problems: Sequence[str]) -> str:
    """Returns the problems as lines of a message, the first 20 of them."""
    shown = [*problems[:20], *([f"and {len(problems) - 20} more"] if len(problems) > 20 else [])]
    return "".join(f"\n  {line}" for line in shown)
