"""From the checkpoints of a run to a verdict on each: what stays, what may go, and why."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from simckpt.policies.keeping import KeepPolicy
from simckpt.policies.records import CheckpointFacts


@dataclass(frozen=True)
class Verdict:
    """Whether one checkpoint stays, and the reasons that go into the log.

    Attributes:
        id: of the checkpoint.
        keep: whether it stays.
        reason: every reason to keep it, or why there is none.
    """

    id: str
    keep: bool
    reason: str


def retain(checkpoints: Sequence[CheckpointFacts], policy: KeepPolicy, protected: Mapping[str, str]) -> list[Verdict]:
    """Returns a verdict for each checkpoint, in the order given.

    No policy can drop a protected checkpoint, nor the newest one, which is what a crash goes back to. Applied again to
    what it kept, it keeps all of it.

    Args:
        checkpoints: all of a run, in commit order, oldest first.
        policy: what to keep.
        protected: {id: why it must stay}: pinned, the origin of a branch, restored from, the target of a rollback. Ids
            that are not among `checkpoints` are ignored.
    """
    kept = policy.keep(checkpoints)
    verdicts = []
    for place, checkpoint in enumerate(checkpoints, start=1):
        reasons = [protected[checkpoint.id]] if checkpoint.id in protected else []
        reasons += ["the newest"] if place == len(checkpoints) else []
        reasons += [kept[checkpoint.id]] if checkpoint.id in kept else []
        reason = "; ".join(dict.fromkeys(reasons))
        verdicts.append(Verdict(checkpoint.id, bool(reasons), reason or f"not kept by {policy!r}"))
    return verdicts
