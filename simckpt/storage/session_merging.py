"""Decides which parts of a session become one: sixty that follow on each other, later many of these; nothing is read.

While a session is recorded each byte is written again at most twice, whatever its length, and the number of folders
stays bounded: by about one for each 8 MB, one for each 3,600 parts, and 120.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from simckpt.storage.session_records import PartRecord

MERGED = 64 << 20  # [bytes] that a merged part may have
MOST = 60  # parts that become one at most: those of half a minute, then those of half an hour
_LEAST = (2, 8)  # fewer, because of their size or of what was lost between them, are not worth it


class Tiers:
    """What of a session waits to be merged: parts as they were written, and those that were merged once.

    Args:
        parts: neighbours, in order, those of a session that is gone on with.
        limit: of the size of a merged part [bytes].
    """

    def __init__(self, parts: Iterable[PartRecord] = (), *, limit: int = MERGED) -> None:
        self._limit = limit
        self._waiting: tuple[list[PartRecord], list[PartRecord]] = ([], [])
        for part in parts:
            self._waiting[_is_merged(part)].append(part)

    @property
    def rest(self) -> list[PartRecord]:
        """All that waits, in order."""
        return [*self._waiting[1], *self._waiting[0]]

    def add(self, part: PartRecord) -> None:
        """Takes the next part that was written."""
        self._waiting[0].append(part)

    def due(self) -> list[PartRecord] | None:
        """Returns neighbours that should become one now, the same ones until `merged` is told of them; or None."""
        for tier, waiting in enumerate(self._waiting):
            while waiting:
                group = _first_group(waiting, self._limit, MOST)
                if len(group) < MOST and len(group) == len(waiting):
                    break
                if len(group) >= _LEAST[tier]:
                    return group
                self._move(tier, group, group)
        return None

    def merged(self, group: Sequence[PartRecord], result: Sequence[PartRecord]) -> None:
        """Takes note of what became of neighbours that were due."""
        tier = 0 if self._waiting[0][: len(group)] == list(group) else 1
        self._move(tier, group, result)

    def _move(self, tier: int, group: Sequence[PartRecord], result: Sequence[PartRecord]) -> None:
        del self._waiting[tier][: len(group)]
        if tier == 0:
            self._waiting[1].extend(result)


def waiting_numbers(folders: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Returns those of (first, last) of parts that a writer which goes on with a session has to know of.

    Args:
        folders: of all parts that are not covered by others, in order.
    """
    begin = len(folders)
    for tier in (False, True):
        while begin and (folders[begin - 1][0] < folders[begin - 1][1]) == tier and _span(folders[begin - 1]) <= MOST:
            begin -= 1
    return list(folders[begin:])


def merges(parts: Sequence[PartRecord], *, limit: int = MERGED) -> list[list[PartRecord]]:
    """Returns which neighbours become one: as many as the limit allows, where nothing is missing between them.

    Args:
        parts: in order.
        limit: of the size of a merged part [bytes].
    """
    groups = []
    rest = list(parts)
    while rest:
        group = _first_group(rest, limit, len(rest))
        rest = rest[len(group) :]
        if len(group) > 1:
            groups.append(group)
    return groups


def _first_group(parts: Sequence[PartRecord], limit: int, most: int) -> list[PartRecord]:
    group = [parts[0]]
    size = parts[0].size
    for part in parts[1:most]:
        size += part.size
        if size > limit or not _follows(group[-1], part):
            break
        group.append(part)
    return group


def _follows(before: PartRecord, after: PartRecord) -> bool:
    """Returns whether nothing was lost between two parts, neither rows nor entries, and both have the same tables."""
    joined = before.rows[1] == after.rows[0] and before.tables.keys() == after.tables.keys()
    return joined and all(before.tables[name][1] == after.tables[name][0] for name in before.tables)


def _is_merged(part: PartRecord) -> bool:
    return _span(part.numbers) > 1


def _span(numbers: tuple[int, int]) -> int:
    return numbers[1] - numbers[0] + 1
