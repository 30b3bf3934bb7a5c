"""Which checkpoints to keep: small values, joined with `|`; whatever one of them keeps, stays."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from simckpt.errors import ConfigurationError
from simckpt.policies.arguments import check_count, check_duration, check_metric, written
from simckpt.policies.records import CheckpointFacts


class KeepPolicy(ABC):
    """A pure function from the checkpoints of a run to those that stay, with reasons."""

    @abstractmethod
    def keep(self, checkpoints: Sequence[CheckpointFacts]) -> dict[str, str]:
        """Returns {id: reason} of the checkpoints to keep, given all of them in commit order, oldest first."""

    def __or__(self, other: KeepPolicy) -> KeepPolicy:
        if not isinstance(other, KeepPolicy):
            return NotImplemented
        both = (self, other)
        # (a | b) | c and a | (b | c) are the same value
        return KeptByAny(
            tuple(part for each in both for part in (each.policies if isinstance(each, KeptByAny) else (each,)))
        )


@dataclass(frozen=True)
class KeepAll(KeepPolicy):
    """Keeps every checkpoint."""

    def keep(self, checkpoints: Sequence[CheckpointFacts]) -> dict[str, str]:
        """Returns all of them."""
        return {checkpoint.id: "all are kept" for checkpoint in checkpoints}


@dataclass(frozen=True, repr=False)
class KeepLast(KeepPolicy):
    """Keeps the last `count` checkpoints in commit order, never in order of steps."""

    count: int

    def __post_init__(self) -> None:
        check_count(self.count, policy="KeepLast", key="count")

    def __repr__(self) -> str:
        return written("KeepLast", self.count)

    def keep(self, checkpoints: Sequence[CheckpointFacts]) -> dict[str, str]:
        """Returns the newest `count` of them."""
        return {checkpoint.id: f"among the last {self.count}" for checkpoint in checkpoints[-self.count :]}


@dataclass(frozen=True, repr=False)
class KeepBest(KeepPolicy):
    """Keeps the `count` checkpoints with the best value of a metric; NaN never ranks, the oldest wins a tie.

    A checkpoint whose metric comes later, from an evaluation that runs elsewhere, is not kept by it until then.

    Args:
        count: how many.
        metric: such as "eval/return".
        mode: "max" or "min".
    """

    count: int
    metric: str
    mode: str = "max"

    def __post_init__(self) -> None:
        check_count(self.count, policy="KeepBest", key="count")
        check_metric(self.metric, self.mode, policy="KeepBest")

    def __repr__(self) -> str:
        return written("KeepBest", self.count, self.metric, mode=None if self.mode == "max" else self.mode)

    def keep(self, checkpoints: Sequence[CheckpointFacts]) -> dict[str, str]:
        """Returns the best of them, with rank and value."""
        ranked = [each for each in checkpoints if not math.isnan(each.metrics.get(self.metric, math.nan))]
        sign = -1.0 if self.mode == "max" else 1.0
        # sorting is stable, so that the oldest comes first among equals
        ranked.sort(key=lambda each: sign * each.metrics[self.metric])
        return {
            each.id: f"number {rank} of the best {self.count} by {self.metric}, {each.metrics[self.metric]:g}"
            for rank, each in enumerate(ranked[: self.count], start=1)
        }


@dataclass(frozen=True, kw_only=True, repr=False)
class KeepEvery(KeepPolicy):
    """Keeps the first checkpoint at or after each multiple of `steps`, or the first in each `minutes` of the clock.

    Args:
        steps: as in `KeepEvery(steps=1_000_000)` [env steps]; what lies before the first multiple is not kept.
        minutes: as in `KeepEvery(minutes=60)`: one for each hour of UTC in which there was one. Either this or `steps`.
    """

    steps: int | None = None
    minutes: float | None = None

    def __post_init__(self) -> None:
        if (self.steps is None) == (self.minutes is None):
            raise ConfigurationError("KeepEvery needs either steps or minutes", keys=["steps", "minutes"])
        if self.steps is not None:
            check_count(self.steps, policy="KeepEvery", key="steps")
        if self.minutes is not None:
            check_duration(self.minutes, policy="KeepEvery", key="minutes", unit="minutes")

    def __repr__(self) -> str:
        return written("KeepEvery", steps=self.steps, minutes=self.minutes)

    def keep(self, checkpoints: Sequence[CheckpointFacts]) -> dict[str, str]:
        """Returns the first of each interval in commit order: dropping the others never changes which one that is."""
        first: dict[int, CheckpointFacts] = {}
        for checkpoint in checkpoints:
            interval = self._interval(checkpoint)
            if interval is not None:
                first.setdefault(interval, checkpoint)
        if self.steps is not None:
            return {each.id: f"the first since step {place * self.steps}" for place, each in first.items()}
        return {each.id: f"the first in its {self.minutes:g} minutes" for each in first.values()}

    def _interval(self, checkpoint: CheckpointFacts) -> int | None:
        if self.steps is not None:
            return checkpoint.step // self.steps or None
        assert self.minutes is not None
        return math.floor(checkpoint.created / (60 * self.minutes))


@dataclass(frozen=True, init=False, repr=False)
class KeepTagged(KeepPolicy):
    """Keeps the checkpoints that have one of the tags; any tag, if none are given."""

    tags: tuple[str, ...]

    def __init__(self, *tags: str) -> None:
        for tag in tags:
            if not isinstance(tag, str) or not tag:
                raise ConfigurationError(f"KeepTagged needs tags, which are texts, got {tag!r}", keys=["tags"])
        object.__setattr__(self, "tags", tags)

    def __repr__(self) -> str:
        return written("KeepTagged", *self.tags)

    def keep(self, checkpoints: Sequence[CheckpointFacts]) -> dict[str, str]:
        """Returns those with a tag, with the tags that count."""
        wanted = {
            each.id: sorted(each.tags.intersection(self.tags) if self.tags else each.tags) for each in checkpoints
        }
        return {identity: f"tagged {', '.join(tags)}" for identity, tags in wanted.items() if tags}


@dataclass(frozen=True, repr=False)
class MaxBytes(KeepPolicy):
    """Keeps the newest checkpoints as long as what they added to the store is `limit` bytes or less in all.

    A limit on what this policy keeps: what others keep, as in `MaxBytes(10 * 10**9) | KeepBest(2, "eval/return")`, and
    what may never be dropped come on top. Replay rows count for the checkpoint that wrote them, and stay in the store
    as long as a later one needs them.

    Args:
        limit: [bytes].
    """

    limit: int

    def __post_init__(self) -> None:
        check_count(self.limit, policy="MaxBytes", key="limit")

    def __repr__(self) -> str:
        return written("MaxBytes", self.limit)

    def keep(self, checkpoints: Sequence[CheckpointFacts]) -> dict[str, str]:
        """Returns the newest of them, up to the first that does not fit."""
        kept: dict[str, str] = {}
        total = 0
        for checkpoint in reversed(checkpoints):
            total += checkpoint.size
            if total > self.limit:
                break
            kept[checkpoint.id] = f"within the newest {self.limit} bytes"
        return kept


@dataclass(frozen=True, repr=False)
class KeptByAny(KeepPolicy):
    """Keeps what any of its policies keeps: what `|` makes."""

    policies: tuple[KeepPolicy, ...]

    def __repr__(self) -> str:
        return " | ".join(map(repr, self.policies))

    def keep(self, checkpoints: Sequence[CheckpointFacts]) -> dict[str, str]:
        """Returns the union, with the reasons of each."""
        reasons: dict[str, dict[str, None]] = {}
        for policy in self.policies:
            for identity, reason in policy.keep(checkpoints).items():
                reasons.setdefault(identity, {})[reason] = None
        return {identity: "; ".join(each) for identity, each in reasons.items()}
