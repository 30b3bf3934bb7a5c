"""Saves of several ranks that do not wait for each other: a step is a checkpoint once all of them have saved it.

Each rank writes its shard when its own policy says so, and trains on. Steps of which some rank's shard is still
missing are open, several at a time: the oldest ones, and the newest, which a newer one takes the place of. Rank 0
commits a step as soon as all shards are there; what is older and still open then can be no restart any more and is
given up. So the newest commit is the recovery line: the newest step that all have.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from simckpt.background import Preparer, Snapshot, Writer
from simckpt.decisions import DECISIONS
from simckpt.errors import SupersededError, UnsupportedStateError
from simckpt.ranks import owner_of
from simckpt.shard_writing import FollowingWriter, ShardPublisher, ballot_of, texts_of
from simckpt.state.leaf import PartLeaf
from simckpt.storage import Commit, CommitDraft, CommitRecord, digests
from simckpt.storage.names import STRUCTURE, encode_part
from simckpt.storage.preparing import Prepared

if TYPE_CHECKING:
    from simckpt.distributed.several import Several
    from simckpt.distributed.voting import Ballot
    from simckpt.policies import KeepPolicy
    from simckpt.restore import BoundComponent
    from simckpt.run import Run
    from simckpt.shard_writing import Common
    from simckpt.state import Encoded
    from simckpt.storage import StoreFiles

OPEN_STEPS = 4  # of one rank at a time: each holds the bytes of a shard on the disk, and a thread
FOREVER = 1e6  # [s] 12 days; an open step ends when a newer one is committed, or the loop


class IndependentPublisher(ShardPublisher):
    """Makes checkpoints of steps that ranks reach at their own time; see `ShardPublisher` for the arguments.

    Attributes:
        head: returns the id of the newest commit; set by `independent_writer`.
        note: takes note of a commit, in the order of commits; set by `independent_writer`.
        turn: of whoever changes the line or the store.
    """

    def __init__(
        self, ranks: Several, files: StoreFiles, run: str, prepare: Preparer, bound: Mapping[str, BoundComponent]
    ) -> None:
        super().__init__(ranks, files, run, prepare, bound)
        self.head: Callable[[], str | None] = lambda: None
        self.note: Callable[[CommitRecord], None] = lambda record: None
        self.turn = threading.Lock()
        # the same on all ranks, and another one for each checkpointer: they may come to the same steps
        self._number = ranks.world.exchanges
        self._open: dict[int, Ballot] = {}
        self._replaced: set[int] = set()  # of the open steps, those that a newer one has taken the place of
        self._last = self._newest = -1  # step that was begun, and that was committed last
        self._left: set[int] = set()  # steps that have ended here, of which rank 0 has not heard that
        self._closed: set[int] = set()  # on rank 0: steps that have ended on some rank, of which keys are left

    def announce(self) -> None:
        """Nobody waits for the snapshot."""
        from simckpt.distributed.tensors import led_by_rank_0

        self._led = [path for name, each in self._bound.items() for path in led_by_rank_0(name, each.handle)]

    def withdraw(self, error: BaseException) -> None:
        """Nobody waits for the snapshot."""

    def __call__(self, snapshot: Snapshot) -> Commit:
        """Returns the commit of the step, once there is one.

        Raises:
            SupersededError: a newer step was committed, or this one has waited too long for other ranks.
            ...: as of a save at which all ranks are.
        """
        step = snapshot.draft.step
        ballot = self._opened(step)
        try:
            try:
                components, common = self._share(snapshot)
                prepared = self._prepare(components, texts_of(snapshot.texts, components))
                same = common(prepared.leaves)
            except BaseException as error:
                ballot.withdraw(f"{type(error).__name__}: {error}")
                raise
            snapshot.release()
            with self.turn:
                told = set(self._left)
                facts = {"open": min(self._open), "ended": sorted(told)}
            commit = self._vote(snapshot, prepared, same, ballot, facts)
            with self.turn:
                self._left -= told
        finally:
            with self.turn:
                del self._open[step]
                self._replaced.discard(step)
                self._left.add(step)
        self._supersede(commit.record.step)
        return commit

    def give_up(self) -> None:
        """Ends what is open, at the end of the loop: nobody here will be there to conclude it."""
        with self.turn:
            still = list(self._open.values())
        for ballot in still:
            ballot.withdraw("the loop of this rank has ended", superseded=True)

    def _opened(self, step: int) -> Ballot:
        with self.turn:
            if step <= self._last:
                raise SupersededError(f"this rank has saved step {step} before, and a step has one vote of all ranks")
            open = sorted(self._open.keys() - self._replaced)
            # the oldest stay, for a slow rank comes to them next; the newest may be the last one of a run
            replaced = open[-1] if len(open) >= OPEN_STEPS else None
            if replaced is not None:
                self._replaced.add(replaced)
            self._last = step
            ballot = self._open[step] = ballot_of(self._ranks, self._name_of(step), patience=FOREVER)
            older = [self._open[each] for each in open]
        if replaced is not None:
            who = _waited_for(older[0].missing(), open[0])
            why = f"{len(open) - 1} older steps wait for {who}; step {step} takes its place"
            older[-1].withdraw(why, superseded=True)
        return ballot

    def _name_of(self, step: int) -> str:
        return f"save {self._number} of step {step}"

    def _supersede(self, step: int) -> None:
        with self.turn:
            self._newest = max(self._newest, step)
            older = [ballot for each, ballot in self._open.items() if each < self._newest]
        for ballot in older:
            ballot.withdraw(f"step {step} is a checkpoint", superseded=True)

    def _published(self, draft: CommitDraft, prepared: list[Prepared], facts: Sequence[Any]) -> Commit:
        """Commits, one step after the other, on rank 0."""
        from simckpt.distributed.voting import clear

        with self.turn:
            if draft.step <= self._newest:
                raise SupersededError(f"step {self._newest} is a checkpoint")
            commit = super()._published(replace(draft, parent=self.head() or draft.parent), prepared, facts)
            self._newest = draft.step
            self.note(commit.record)
            self._closed.update(each for of_rank in facts for each in of_rank["ended"])
            # no rank comes back to what is older than all that it has open
            over = [each for each in self._closed if each < min(of_rank["open"] for of_rank in facts)]
            self._closed.difference_update(over)
        clear(self._ranks.world.store, [self._name_of(each) for each in over])
        return commit

    def _share(self, snapshot: Snapshot) -> tuple[dict[str, Encoded], Common]:
        """Returns what this rank writes: all of its own, and on rank 0 what they share; and what should be equal."""
        encoded = snapshot.encode()
        mine, common = {}, dict[str, dict[str, str]]()
        for name, each in encoded.items():
            if owner_of(name)[1] is not None:
                mine[name] = each
                continue
            parts = [path for path, leaf in each.leaves.items() if isinstance(leaf, PartLeaf)]
            if parts:
                message = (
                    f"component {name!r} has tensors of which each rank holds a part, such as {parts[0]!r}: all ranks "
                    'have to save them at the same step, with coordination="barrier"'
                )
                raise UnsupportedStateError(message, path=f"{name}/{parts[0]}", type_name="DTensor")
            if self._ranks.leads:
                mine[name] = each
            if name != DECISIONS:
                prefix = encode_part(name)
                common[name] = {f"{prefix}/{STRUCTURE}": digests.digest(each.structure)}
                paths = {path: f"{prefix}/{path}" for path in each.leaves}
                common[name] |= {
                    full: digests.digest(each.leaves[path].data)
                    for path, full in paths.items()
                    if full not in self._led
                }
        shared = {name: each for name, each in encoded.items() if name in common}
        return mine | self._led_here(shared), lambda leaves: common


def _waited_for(ranks: Sequence[int], step: int) -> str:
    from simckpt.distributed.voting import ranks_text

    return f"{ranks_text(ranks) if ranks else 'other ranks'} to save step {step}, the first of them"


class IndependentWriter(Writer):
    """Takes note of several snapshots at a time, one after the other; most of what a save does is waiting.

    Attributes:
        turn: of whoever changes the line or the store.
    """

    turn: threading.Lock
    _noted = -1

    def note(self, record: CommitRecord) -> None:
        """Takes a commit for the head, unless that one or a newer one was noted before: threads end in any order."""
        if record.seq > self._noted:
            self._noted = record.seq
            super().note(record)

    def _finish(self, snapshot: Snapshot, commit: Commit) -> None:
        with self.turn:
            super()._finish(snapshot, commit)


class IndependentFollowingWriter(IndependentWriter, FollowingWriter):
    """The same on a rank that is not rank 0."""


def independent_writer(
    ranks: Several,
    files: StoreFiles,
    run: Run,
    keep: KeepPolicy,
    prepare: Preparer,
    bound: Mapping[str, BoundComponent],
) -> tuple[IndependentPublisher, Writer]:
    """Returns what makes checkpoints of steps that ranks reach at their own time, and what keeps the line."""
    publisher = IndependentPublisher(ranks, files, run.name, prepare, bound)
    kind = IndependentWriter if ranks.leads else IndependentFollowingWriter
    writer = kind(files, run.name, keep, publisher, run.protected, run_id=run.id)
    writer.turn = publisher.turn
    publisher.head = lambda: writer.head
    publisher.note = writer.note
    return publisher, writer
