"""Who writes what of the components that all ranks share.

A leaf that every rank has whole is written by one of them; a part of a tensor by one of those that hold that part. What
only one rank holds lies where it is; the rest goes, the largest first, to the rank that has least to write. So the plan
is a pure function of the lists of all ranks, and is made anew only when a list changes; each save begins with a vote on
whether one has, for a rank may have a reason that others know nothing of.

DCP's `dedup_save_plans` deals in the order of the leaves, which leaves ranks up to a large leaf apart, and it does not
count what later ranks have to write themselves; so the dealing is done here.

What several ranks hold should be the same bits on all of them. Each rank reports digests of these leaves with its vote,
one for each group of ranks; if they differ, nothing is committed, and leaves and ranks are named. One kind of leaf is
excepted: what rank 0 sends to the others before each forward pass (`tensors.led_by_rank_0`), which it writes for all.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
import zlib
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from simckpt.distributed.several import error_from_json, error_to_json
from simckpt.distributed.voting import Ballot
from simckpt.errors import CoordinationError
from simckpt.state.leaf import Leaf, PartLeaf
from simckpt.state.tree import Encoded
from simckpt.storage import LeafRecord, digests
from simckpt.storage.names import STRUCTURE, encode_part

_SHOWN = 5  # differences that a message lists


class Item(NamedTuple):
    """A leaf, or the part of it that one rank holds.

    Attributes:
        path: in the checkpoint.
        dtype: its true type.
        shape: of the whole.
        nbytes: of what this rank holds of it.
        start: where its part begins; None for a leaf that all ranks have whole.
        size: of its part.
        led: whether rank 0's copy counts, whatever the others have.
    """

    path: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    start: tuple[int, ...] | None = None
    size: tuple[int, ...] = ()
    led: bool = False


@dataclass(frozen=True, slots=True)
class Share:
    """What one rank has to do.

    Attributes:
        writes: the places, in its list of items, of those that it writes.
        groups: {place: name of the ranks that hold the same}, of what must be equal among them.
    """

    writes: frozenset[int]
    groups: Mapping[int, str]


def items_of(components: Mapping[str, Encoded], *, led: Collection[str] = ()) -> list[Item]:
    """Returns what this rank holds of some components, structures included, by their paths in the checkpoint.

    Args:
        components: {name: encoded state}.
        led: paths of leaves of which rank 0's copy counts.
    """
    found = []
    for name, encoded in components.items():
        prefix = encode_part(name)
        for path, leaf in encoded.leaves.items():
            found.append(_item(f"{prefix}/{path}", leaf, led))
        # its length may differ between ranks only where its content does
        found.append(Item(f"{prefix}/{STRUCTURE}", "", (), 256))
    return found


def _item(path: str, leaf: Leaf, led: Collection[str]) -> Item:
    if isinstance(leaf, PartLeaf):
        return Item(path, leaf.dtype, tuple(leaf.shape), leaf.data.nbytes, tuple(leaf.offset), leaf.part_shape)
    return Item(path, leaf.dtype, tuple(leaf.shape), leaf.data.nbytes, led=path in led)


def assign(lists: Sequence[Sequence[Item]], *, alike: bool = False) -> list[Share]:
    """Returns the share of each rank.

    Args:
        lists: what each rank holds: the same leaves in the same order, with different parts.
        alike: whether that is known to be so.

    Raises:
        CoordinationError: the ranks hold different leaves, or parts that do not make up the whole.
    """
    if not alike:
        _check_same(lists)
    dealt = _Dealing(len(lists))
    everybody = tuple(range(len(lists)))
    for place, first in enumerate(lists[0]):
        if first.led:
            dealt.give(0, place, first.nbytes)
        elif first.start is None:
            dealt.offer(place, first.path, first.nbytes, everybody)
        else:
            _deal_parts(dealt, place, [items[place] for items in lists])
    return dealt.shares()


def _deal_parts(dealt: _Dealing, place: int, parts: Sequence[Item]) -> None:
    holders: dict[tuple[Any, ...], list[int]] = defaultdict(list)
    for rank, part in enumerate(parts):
        if 0 not in part.size:
            holders[part.start, part.size].append(rank)
    whole = parts[0].shape
    if 0 in whole:
        # nobody has any of it, but it must not get lost
        dealt.give(0, place, 0)
        return
    volume = sum(math.prod(size) for _, size in holders)
    if volume != math.prod(whole):
        raise CoordinationError(
            f"{parts[0].path}: the ranks hold parts of {volume} elements together, the whole {list(whole)} has "
            f"{math.prod(whole)}: where ranks train apart, register what each has as a component of its own",
            leaves=[parts[0].path],
        )
    for (start, _), ranks in holders.items():
        if len(ranks) == 1:
            dealt.give(ranks[0], place, parts[ranks[0]].nbytes)
        else:
            dealt.offer(place, f"{parts[0].path}@{start}", parts[ranks[0]].nbytes, tuple(ranks))


class _Dealing:
    """Shares that are being filled: first what is given, then what is offered."""

    def __init__(self, size: int) -> None:
        self._writes: list[set[int]] = [set() for _ in range(size)]
        self._groups: list[dict[int, str]] = [{} for _ in range(size)]
        self._loads = [0] * size
        self._offers: list[tuple[int, str, int, tuple[int, ...]]] = []

    def give(self, rank: int, place: int, nbytes: int) -> None:
        self._writes[rank].add(place)
        self._loads[rank] += nbytes

    def offer(self, place: int, key: str, nbytes: int, ranks: tuple[int, ...]) -> None:
        self._offers.append((-nbytes, key, place, ranks))

    def shares(self) -> list[Share]:
        names: dict[tuple[int, ...], str] = {}
        for negative, _, place, ranks in sorted(self._offers):
            # with equal loads the one that has fewest leaves, for each has its cost
            least = min(ranks, key=lambda rank: (self._loads[rank], len(self._writes[rank]), rank))
            self.give(least, place, -negative)
            name = names.setdefault(ranks, _group_name(ranks, len(self._loads)))
            for rank in ranks:
                self._groups[rank][place] = name
        return [Share(frozenset(w), g) for w, g in zip(self._writes, self._groups, strict=True)]


def _group_name(ranks: tuple[int, ...], size: int) -> str:
    if len(ranks) == size:
        return "all"
    return hashlib.sha256(repr(ranks).encode()).hexdigest()[:16]


def _check_same(lists: Sequence[Sequence[Item]]) -> None:
    expected = [_form(item) for item in lists[0]]
    for rank, items in enumerate(lists):
        if len(items) == len(expected) and all(_form(item) == form for item, form in zip(items, expected, strict=True)):
            continue
        mine, first = ({form[0]: form for form in forms} for forms in (map(_form, items), expected))
        problems = [f"{path}: only rank 0 has it" for path in first if path not in mine]
        problems += [f"{path}: only rank {rank} has it" for path in mine if path not in first]
        problems += [
            f"{path}: {form[1]} {list(form[2])} on rank 0, {mine[path][1]} {list(mine[path][2])} on rank {rank}"
            for path, form in first.items()
            if path in mine and mine[path] != form
        ]
        shown = "; ".join(problems[:_SHOWN] or ["the same leaves in another order"])
        more = f"; and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
        raise CoordinationError(
            f"the ranks do not hold the same leaves: {shown}{more}: register what belongs to each rank as a component "
            "of its own",
            ranks=[rank],
            leaves=[problem.partition(":")[0] for problem in problems],
        )


def _form(item: Item) -> tuple[Any, ...]:
    return item.path, item.dtype, item.shape, item.start is None, item.led


@dataclass(slots=True)
class Planner:
    """Plans saves, and goes by the same plan as long as the lists of all ranks stay the same."""

    _items: list[Item] = field(default_factory=list)
    _share: Share | None = None
    _name: str = ""  # of the vote that the plan is from

    def plan(self, ballot: Ballot, items: list[Item]) -> Share:
        """Returns what this rank has to do.

        Args:
            ballot: a vote of its own, for the ranks' lists.
            items: from `items_of`.

        Raises:
            CoordinationError: the lists do not fit together, or ranks are missing.
            OutcomeUnknownError: rank 0 was lost meanwhile.
        """
        known = self._name if self._share is not None and self._items == items else ""
        told = _agree(ballot, {"plan": known} if known else _report(items))
        if told == _LISTS:
            ballot = replace(ballot, name=second(ballot.name), previous=[ballot.name])
            told = _agree(ballot, _report(items))
        if told == _AS_BEFORE:
            assert self._share is not None
            return self._share
        key = f"{told}/{ballot.rank}"
        writes, groups = json.loads(ballot.store.get(key))
        ballot.store.delete(key)
        share = Share(frozenset(writes), {place: name for name, places in groups.items() for place in places})
        self._items, self._share, self._name = items, share, ballot.name
        return share


def second(name: str) -> str:
    """Returns the name of the vote that follows a vote of `Planner.plan` where the ranks have to send their lists."""
    return f"{name} of lists"


_AS_BEFORE, _LISTS = "as before", "lists"  # what rank 0 answers where it makes no plan


def _agree(ballot: Ballot, report: Mapping[str, Any]) -> str:
    """Returns where the shares of the ranks are, or one of the answers above."""

    def commit(reports: list[Any]) -> dict[str, Any]:
        names = {report.get("plan") for report in reports}
        if names != {None}:
            # a rank that has lost its plan, or has another list, sends a list
            return {"told": _AS_BEFORE if len(names) == 1 else _LISTS}
        try:
            shares = assign(_lists(reports), alike=len({report["digest"] for report in reports}) == 1)
        except CoordinationError as error:
            # told as an outcome, so that the same error is raised by all
            return {"failed": error_to_json(error)}
        for rank, share in enumerate(shares):
            ballot.store.set(f"{ballot.name}/share/{rank}", json.dumps([sorted(share.writes), _by_group(share.groups)]))
        return {"told": f"{ballot.name}/share"}

    told = ballot.hold(report, commit)
    if "failed" in told:
        raise error_from_json(told["failed"])
    return str(told["told"])


def _report(items: Sequence[Item]) -> dict[str, Any]:
    """Returns a list in a form of which rank 0 need not read what all have in common."""
    forms = [_form(item) for item in items]
    parts = [[place, item.start, item.size, item.nbytes] for place, item in enumerate(items) if item.start is not None]
    digest = hashlib.sha256(repr(forms).encode()).hexdigest()
    whole = [item.nbytes for item in items if item.start is None]
    # packed, for of a thousand ranks rank 0 looks at those of one, unless they differ
    packed = base64.b85encode(zlib.compress(json.dumps(forms).encode())).decode()
    return {"digest": digest, "forms": packed, "whole": whole, "parts": parts}


def _lists(reports: Sequence[Any]) -> list[list[Item]]:
    forms: dict[str, list[Any]] = {}
    lists = []
    for report in reports:
        known = forms.get(report["digest"])
        if known is None:
            rows = json.loads(zlib.decompress(base64.b85decode(report["forms"])))
            known = [(path, dtype, tuple(shape), whole, led) for path, dtype, shape, whole, led in rows]
            forms[report["digest"]] = known
        parts = {place: (tuple(start), tuple(size), nbytes) for place, start, size, nbytes in report["parts"]}
        whole = iter(report["whole"])
        items = []
        for place, (path, dtype, shape, is_whole, led) in enumerate(known):
            if is_whole:
                items.append(Item(path, dtype, shape, next(whole), led=led))
            else:
                start, size, nbytes = parts[place]
                items.append(Item(path, dtype, shape, nbytes, start, size))
        lists.append(items)
    return lists


def _by_group(groups: Mapping[int, str]) -> dict[str, list[int]]:
    found: dict[str, list[int]] = defaultdict(list)
    for place, name in groups.items():
        found[name].append(place)
    return found


def written(components: Mapping[str, Encoded], items: Sequence[Item], share: Share) -> dict[str, Encoded]:
    """Returns what of some components this rank writes; a structure that another rank writes is empty.

    Args:
        components: what `items` was made of.
        items: from `items_of`.
        share: of this rank.
    """
    mine = {items[place].path for place in share.writes}
    found = {}
    for name, encoded in components.items():
        prefix = encode_part(name)
        leaves = {path: leaf for path, leaf in encoded.leaves.items() if f"{prefix}/{path}" in mine}
        structure = encoded.structure if f"{prefix}/{STRUCTURE}" in mine else b""
        if leaves or structure:
            found[name] = Encoded(leaves, structure)
    return found


def common(
    components: Mapping[str, Encoded],
    items: Sequence[Item],
    share: Share,
    leaves: Mapping[str, LeafRecord] | None = None,
    *,
    digest: Callable[[Any], str] = digests.digest,
) -> dict[str, dict[str, str]]:
    """Returns {group: {path: digest}} of what this rank should have in common with others, for its vote.

    Args:
        components: what `items` was made of.
        items: from `items_of`.
        share: of this rank.
        leaves: {path: leaf} that this rank has written, of which the digest is known.
        digest: of what it has not.
    """
    known_already = {path: leaf.digest for path, leaf in (leaves or {}).items() if digests.is_own(leaf.digest)}
    by_path = {items[place].path: (items[place], name) for place, name in share.groups.items()}
    found: dict[str, dict[str, str]] = defaultdict(dict)
    for name, encoded in components.items():
        prefix = encode_part(name)
        if (known := by_path.get(f"{prefix}/{STRUCTURE}")) is not None:
            found[known[1]][known[0].path] = digest(encoded.structure)
        for path, leaf in encoded.leaves.items():
            if (known := by_path.get(f"{prefix}/{path}")) is not None:
                full = known[0].path
                found[known[1]][full] = known_already.get(full) or digest(leaf.data)
    return dict(found)
