"""Which checkpoints to keep: small values, joined with `|`; whatever one of them keeps, stays."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from simckpt.errors import ConfigurationError
from simckpt.policies.records import CheckpointFacts


class KeepPolicy(ABC):
    """A pure function from the checkpoints of a run to those that stay, with reasons."""

    @abstractmethod
    def keep(self, checkpoints: Sequence[CheckpointFacts]) -> dict[str, str]:
        """Returns {id: reason} of the checkpoints to keep, given all of them in commit order, oldest first."""

    def __or__(self, other: KeepPolicy) -> KeepPolicy:
        return KeptByAny((self, other))


@dataclass(frozen=True)
class KeepAll(KeepPolicy):
    """Keeps every checkpoint."""

    def keep(self, checkpoints: Sequence[CheckpointFacts]) -> dict[str, str]:
        """Returns all of them."""
        return {checkpoint.id: "all are kept" for checkpoint in checkpoints}


@dataclass(frozen=True)
class KeepLast(KeepPolicy):
    """Keeps the last `count` checkpoints in commit order, never in order of steps."""

    count: int

    def __post_init__(self) -> None:
        if not isinstance(self.count, int) or isinstance(self.count, bool) or self.count < 1:
            raise ConfigurationError(f"KeepLast needs a whole number of at least 1, got {self.count!r}", keys=["count"])

    def keep(self, checkpoints: Sequence[CheckpointFacts]) -> dict[str, str]:
        """Returns the newest `count` of them."""
        return {checkpoint.id: f"among the last {self.count}" for checkpoint in checkpoints[-self.count :]}


@dataclass(frozen=True)
class KeptByAny(KeepPolicy):
    """Keeps what any of its policies keeps: what `|` makes."""

    policies: tuple[KeepPolicy, ...]

    def keep(self, checkpoints: Sequence[CheckpointFacts]) -> dict[str, str]:
        """Returns the union, with the reasons of each."""
        kept: dict[str, str] = {}
        for policy in self.policies:
            for identity, reason in policy.keep(checkpoints).items():
                kept[identity] = f"{kept[identity]}; {reason}" if identity in kept else reason
        return kept
