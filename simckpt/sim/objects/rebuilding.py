"""Putting a state into the live graph after it was paired: in place wherever identity can be kept."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from simckpt.sim.objects.classify import kind_of_node
from simckpt.sim.objects.kind import MISSING, PLAIN, same_bits
from simckpt.sim.objects.matching import GraphMatching, held_by_pairing, is_left_alone
from simckpt.state.compare import differences


class GraphRebuild:
    """One restore.

    Args:
        matching: the pairing, without problems.
        persistent: ids of live arrays and containers that are the env's own buffers, alive since it was registered.
    """

    def __init__(self, matching: GraphMatching, persistent: set[int]) -> None:
        self.matching = matching
        self._done: dict[int, Any] = {}
        # nodes must outlive the memo that knows them by id
        self._nodes: list[Any] = []
        self._release_what_others_hold(persistent)

    def value(self, node: Any, live: Any = MISSING) -> Any:
        """Returns the restored object of a node; `live` is what stands at its place now."""
        if type(node) in PLAIN:
            return self._plain(node, live)
        done = self._done.get(id(node), MISSING)
        if done is not MISSING:
            return done
        kind = kind_of_node(node, self.matching.find_class)
        assert kind is not None, "the state was checked before"
        if not kind.mutable:
            return kind.make(self, node, live)
        target = self.matching.partner(node)
        if target is MISSING:
            target = kind.create(self, node)
        self._done[id(node)] = target
        self._nodes.append(node)
        kind.fill(self, node, target)
        return target

    def _plain(self, node: Any, live: Any) -> Any:
        # a window or renderer that was opened since the snapshot stays open
        if node is None and live is not MISSING and live is not None and is_left_alone(self.matching.live_node(live)):
            return live
        return node

    def _release_what_others_hold(self, persistent: set[int]) -> None:
        """Rebuilds, instead of changing, arrays and containers that the program outside the env holds as well.

        An env that keeps the very observation it returned must not have it changed under the user's hands. That is safe
        for objects which the env itself has replaced since it was registered: whoever relied on their identity would
        already be wrong. The env's own long-lived buffers are always written in place.
        """
        matching = self.matching
        calibration: list[Any] = []
        # one reference is its name
        unheld = sys.getrefcount(calibration) - 1
        held = held_by_pairing(matching)
        for index in range(len(matching.visited)):
            # one name here, as `calibration` had above
            live = matching.visited[index][1]
            inside = matching.references[id(live)] + held[id(live)]
            if sys.getrefcount(live) - 1 - unheld <= inside or id(live) in persistent:
                continue
            node = matching.visited[index][0]
            if not isinstance(live, tuple):
                if not self._may_be_replaced(node, live):
                    continue
                matching.unpair(node)
            # the old container lives on with its holder: what is in it is held from outside as well
            kind = kind_of_node(node, matching.find_class)
            assert kind is not None
            for _, _, child in kind.children(node, live):
                matching.references[id(child)] -= 1
            child = None

    def _may_be_replaced(self, node: Any, live: Any) -> bool:
        if self.matching.partner(node) is not live:
            return False
        if isinstance(live, np.ndarray):
            alone = live.base is None and id(live) not in self.matching.survey.owners
            return isinstance(node, np.ndarray) and alone and not same_bits(live, node)
        return bool(differences(self.matching.live_node(live), node))
