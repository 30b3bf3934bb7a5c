"""All links of this process: where a walk through an env does not find one, it is known here."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from simckpt.hardware.simulated import Simulated
from simckpt.restore import call_before_envs

if TYPE_CHECKING:
    from simckpt.hardware.link import Link

_made: weakref.WeakSet[Link] = weakref.WeakSet()
_watching: list[Callable[[Link], None]] = []


def add(link: Link) -> None:
    """Takes note of a link, for as long as it lives."""
    _made.add(link)


def watch(function: Callable[[Link], None]) -> None:
    """Has a function called at each use of a link that has no observer."""
    _watching.append(function)


def unwatch(function: Callable[[Link], None]) -> None:
    """Ends that."""
    if function in _watching:
        _watching.remove(function)


def used(link: Link) -> None:
    """Tells those who watch that a link without an observer was used."""
    for function in tuple(_watching):
        function(link)


def disarm_others(links: Iterable[Link]) -> None:
    """Disarms all links to devices but these, and but those that a recorder or another replay has in its hands."""
    own = {id(link) for link in links}
    for link in list(_made):
        free = link.observer is None and link.source is None
        if id(link) not in own and free and not isinstance(link.transport, Simulated):
            link.disarm()


# an env may use a link that it does not hold: a global of the program, an attribute of a class
call_before_envs(lambda: disarm_others(()))
