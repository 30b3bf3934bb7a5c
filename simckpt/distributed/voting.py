"""Whether a save of several ranks is committed: a two-phase commit over a store of keys, without collectives.

Every rank writes its own files and reports. Rank 0 gathers the reports, decides, commits and tells. Nothing here is a
collective, so that a background thread may wait while training's process group goes on.

One key decides, `verdict`, and it is only set by compare-and-set from nothing: by rank 0 to `committing`, or by any
rank to `aborted`. Whoever finds `aborted` may discard what it has written, for nobody can commit any more; whoever
finds `committing` must not, until rank 0 has told how that ended. If it never tells, the outcome is unknown, and the
files say what it was.

How long a rank waits, from its own report on, with `patience` and `grace`:

- rank 0 for the others: `patience`, then it aborts and names those that are missing;
- the others for rank 0's report: `patience`; then for its verdict: `patience + grace`; then, while it commits, `grace`.

So a rank that dies or hangs before its report costs the others `patience`; one whose own work takes longer than
everybody else's by more than that is taken for missing. Where the store itself is lost, each of these waits ends
within `keys.ANSWER`.

Each rank deletes its report when the vote has ended for it. The keys that others may still look at go with a later
vote that is committed: see `Ballot.previous` and `clear`.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from simckpt.distributed.keys import Keys
from simckpt.errors import CoordinationError, LostError, OutcomeUnknownError, SimckptError, SupersededError

PATIENCE = 120.0  # [s]; shards are balanced, so this bounds how much longer one rank may write than another
GRACE = 30.0  # [s]; for a commit, which is a few small files,
# [s] and for each rank two renames, and the parsing of its index where that is new: 64 ranks of 200 leaves took 13 ms
# each, the first time 105 ms, on two cores with a load of 17
GRACE_OF_RANK = 0.2

_SHORTEST, _LONGEST = 0.001, 0.25  # [s] between two looks at the store while something is waited for
_SHOWN = 8  # leaves that a message names

Report = Mapping[str, Any]
# {group of ranks: {leaf: digest}}: what these ranks should have in common
Common = Mapping[str, Mapping[str, str]]


@dataclass(frozen=True, slots=True)
class Ballot:
    """One vote.

    Attributes:
        store: of keys.
        rank: of this process.
        size: how many ranks there are.
        name: of the vote: the same for all ranks, and never given twice.
        patience: see the module [s].
        grace: see the module [s].
        previous: names of votes that every rank has ended before it reports to this one; what is left of them is
            deleted once this one is committed.
    """

    store: Keys
    rank: int
    size: int
    name: str
    patience: float = PATIENCE
    grace: float = GRACE
    previous: Sequence[str] = ()

    def hold(
        self,
        report: Report,
        commit: Callable[[list[Any]], Mapping[str, Any]] | None = None,
        *,
        common: Common | None = None,
    ) -> dict[str, Any]:
        """Reports and returns what rank 0 has committed.

        Args:
            report: what rank 0 gets of this rank; goes through JSON.
            commit: what rank 0 does with the reports, in the order of ranks; it returns what all ranks are told, and
                raises only if nothing was committed. Needed on rank 0, ignored elsewhere.
            common: digests that must be equal among the ranks of a group that have it; else nothing is committed.

        Raises:
            CoordinationError: nothing was committed, nor will be; discard what was written. It names the ranks that
                are missing, or that have failed, or the leaves that differ.
            SupersededError: a rank has withdrawn, and said that this is no failure.
            OutcomeUnknownError: rank 0 or the store was lost while it may have been committing. Discard nothing, and
                look whether the checkpoint is there.
            Exception: on rank 0, whatever `commit` raises; the others get a CoordinationError that quotes it.
        """
        sent = {"report": report, "common": {group: _combined(leaves) for group, leaves in (common or {}).items()}}
        try:
            try:
                self._set(f"report/{self.rank}", sent)
                if self.rank == 0:
                    assert commit is not None
                    return self._lead(commit, common or {})
                found = self._follow(common or {})
            except LostError as error:
                if self.rank == 0:
                    raise CoordinationError(f"{self.name}: nothing was committed: {error}") from error
                message = f"{self.name}: {error}; whether rank 0 has committed shows in the run's folder"
                raise OutcomeUnknownError(message) from error
        except CoordinationError:
            self._tidy()
            raise
        self._tidy()
        return found

    def _tidy(self) -> None:
        """Deletes the report of this rank, for the vote has ended; rank 0's is what the others wait for first."""
        if self.rank:
            with contextlib.suppress(LostError):
                self.store.delete(self._key(f"report/{self.rank}"))

    def withdraw(self, reason: str, *, superseded: bool = False) -> None:
        """Tells the others at once that this rank cannot take part; instead of `hold`. Never raises.

        Args:
            reason: why.
            superseded: whether that is no failure, for a newer vote has taken the place of this one.
        """
        told = {"aborted": f"rank {self.rank}: {reason}", "ranks": [self.rank], "superseded": superseded}
        with contextlib.suppress(LostError):
            self._decide(json.dumps(told))

    def _lead(self, commit: Callable[[list[Any]], Mapping[str, Any]], common: Common) -> dict[str, Any]:
        names = [f"report/{rank}" for rank in range(self.size)]
        if not self._wait(names, time.monotonic() + self.patience):
            self._decide(json.dumps(self._told("", self.missing())))
        verdict = self._decide("committing")
        if verdict != "committing":
            raise self._aborted(json.loads(verdict), common)
        # not before, for whoever finds the vote aborted deletes its report
        reports = [json.loads(found) for found in self.store.multi_get([self._key(name) for name in names])]
        differing = _differing_groups([each["common"] for each in reports])
        if differing:
            why = "leaves that ranks should have in common differ"
            told = {"aborted": why, "ranks": [], "groups": differing, "explained": True}
            self._set("end", told)
            raise self._aborted(told, common)
        try:
            content = json.loads(json.dumps(commit([each["report"] for each in reports])))
        except BaseException as error:
            told = {"aborted": f"rank 0 could not commit: {type(error).__name__}: {error}", "ranks": [0]}
            with contextlib.suppress(LostError):
                self._set("end", told)
            raise
        with contextlib.suppress(LostError):
            # committed, whether the others hear of it or not
            self._set("end", {"committed": content})
        clear(self.store, self.previous)
        assert isinstance(content, dict)
        return content

    def _follow(self, common: Common) -> dict[str, Any]:
        if not self._wait(["report/0"], time.monotonic() + self.patience):
            return self._give_up("", common)
        if not self._wait(["verdict"], time.monotonic() + self.patience + self.grace):
            return self._give_up("rank 0 has reported, and then decided nothing", common)
        return self._ending(common)

    def _give_up(self, why: str, common: Common) -> dict[str, Any]:
        missing = [0] if why else self.missing()
        verdict = self._decide(json.dumps(self._told(why, missing)))
        if verdict == "committing":
            return self._ending(common)
        raise self._aborted(json.loads(verdict), common)

    def _ending(self, common: Common) -> dict[str, Any]:
        """Returns what was committed, once there is a verdict."""
        verdict = self._get("verdict")
        if verdict != "committing":
            raise self._aborted(json.loads(verdict), common)
        if not self._wait(["end"], time.monotonic() + self.grace):
            message = (
                f"{self.name}: rank 0 was committing and has not been heard of for {self.grace:g} s; whether the "
                "checkpoint is there shows in the run's folder"
            )
            raise OutcomeUnknownError(message, ranks=[0])
        end = json.loads(self._get("end"))
        if "committed" not in end:
            raise self._aborted(end, common)
        content = end["committed"]
        assert isinstance(content, dict)
        return content

    def missing(self) -> list[int]:
        """Returns the ranks that have not reported."""
        return [rank for rank in range(self.size) if not self._has(f"report/{rank}")]

    def _told(self, why: str, missing: Sequence[int]) -> dict[str, Any]:
        why = why or f"{ranks_text(missing)} did not report within {self.patience:g} s"
        return {"aborted": why, "ranks": list(missing)}

    def _aborted(self, told: Mapping[str, Any], common: Common) -> SimckptError:
        if told.get("explained"):
            return self._explain(told["groups"], common)
        message = f"{self.name}: nothing was committed: {told['aborted']}"
        kind = SupersededError if told.get("superseded") else CoordinationError
        return kind(message, ranks=told["ranks"])

    def _explain(self, groups: Sequence[str], common: Common) -> CoordinationError:
        """Returns the error that names leaves and ranks; all ranks call it, and wait for each other for `grace`."""
        generic = f"{self.name}: nothing was committed: leaves that ranks should have in common differ"
        mine = {group: {leaf: _short(digest) for leaf, digest in common.get(group, {}).items()} for group in groups}
        self._set(f"leaves/{self.rank}", mine)
        if self.rank == 0:
            everyone = [f"leaves/{rank}" for rank in range(self.size)]
            self._wait(everyone, time.monotonic() + self.grace, alone=True)
            found = {r: json.loads(self._get(f"leaves/{r}")) for r in range(self.size) if self._has(f"leaves/{r}")}
            self._set("explanation", _compare(found))
        elif not self._wait(["explanation"], time.monotonic() + 2 * self.grace, alone=True):
            return CoordinationError(generic)
        self.store.delete(self._key(f"leaves/{self.rank}"))
        leaves = json.loads(self._get("explanation"))
        shown = "; ".join(f"{leaf}: {_split(sides)}" for leaf, sides in list(leaves.items())[:_SHOWN])
        more = f"; and {len(leaves) - _SHOWN} more" if len(leaves) > _SHOWN else ""
        advice = "make them equal on all ranks, or register what belongs to each rank as a component of its own"
        odd = sorted({rank for sides in leaves.values() for side in sides[1:] for rank in side})
        return CoordinationError(f"{generic}: {shown}{more}: {advice}", ranks=odd, leaves=list(leaves))

    def _wait(self, names: Sequence[str], until: float, *, alone: bool = False) -> bool:
        """Waits for keys, or for a verdict against the save; returns whether there is a reason to go on."""
        keys, begun = [self._key(name) for name in names], time.monotonic()
        while not self.store.check(keys):
            if not alone and self._has("verdict") and self._get("verdict") != "committing":
                return True
            now = time.monotonic()
            if now >= until:
                return False
            # a quarter later than it could be
            time.sleep(min(max((now - begun) / 4, _SHORTEST), _LONGEST, until - now))
        return True

    def _decide(self, verdict: str) -> str:
        """Returns the verdict: this one, unless there was one already."""
        return self.store.compare_set(self._key("verdict"), "", verdict)

    def _has(self, name: str) -> bool:
        return self.store.check([self._key(name)])

    def _get(self, name: str) -> str:
        return self.store.get(self._key(name))

    def _set(self, name: str, value: Any) -> None:
        self.store.set(self._key(name), json.dumps(value))

    def _key(self, name: str) -> str:
        return f"{self.name}/{name}"


def grace_of(size: int) -> float:
    """Returns how long rank 0 may take to commit what so many ranks have prepared [s]."""
    return GRACE + GRACE_OF_RANK * size


def clear(store: Keys, names: Sequence[str]) -> None:
    """Deletes what is left of votes that all ranks have ended; raises nothing."""
    left = ("report/0", "verdict", "end", "explanation")
    if names:
        with contextlib.suppress(LostError):
            store.delete(*(f"{name}/{key}" for name in names for key in left))


def ranks_text(ranks: Sequence[int]) -> str:
    """Returns how a message names ranks."""
    shown = ", ".join(map(str, ranks[:20])) + (f" and {len(ranks) - 20} more" if len(ranks) > 20 else "")
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"


def _combined(leaves: Mapping[str, str]) -> str:
    whole = hashlib.sha256()
    for leaf in sorted(leaves):
        whole.update(f"{leaf}\0{leaves[leaf]}\0".encode())
    return whole.hexdigest()[:32]


def _short(digest: str) -> str:
    return digest[-16:]


def _differing_groups(found: Sequence[Mapping[str, str]]) -> list[str]:
    seen: dict[str, set[str]] = defaultdict(set)
    for each in found:
        for group, digest in each.items():
            seen[group].add(digest)
    return sorted(group for group, digests in seen.items() if len(digests) > 1)


def _compare(found: Mapping[int, Mapping[str, Mapping[str, str]]]) -> dict[str, list[list[int]]]:
    """Returns {leaf: the ranks that agree, the largest side first} of the leaves on which not all agree."""
    sides: dict[tuple[str, str], dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
    members: dict[str, list[int]] = defaultdict(list)
    for rank, groups in found.items():
        for group, leaves in groups.items():
            # a group that a rank does not have is sent as an empty one
            if leaves:
                members[group].append(rank)
            for leaf, digest in leaves.items():
                sides[group, leaf][digest].append(rank)
    differing: dict[str, list[list[int]]] = {}
    for (group, leaf), by_digest in sides.items():
        having = [rank for side in by_digest.values() for rank in side]
        lacking = [rank for rank in members[group] if rank not in having]
        if len(by_digest) > 1 or lacking:
            parts = sorted(by_digest.values(), key=lambda side: (-len(side), side))
            differing[leaf] = [*parts, *([lacking] if lacking else [])]
    return differing


def _split(sides: Sequence[Sequence[int]]) -> str:
    return " and ".join(ranks_text(side) for side in sides) + " differ"
