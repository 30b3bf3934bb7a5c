"""Saves of several ranks that do not wait for each other: a step is a checkpoint once all of them have saved it.

Each rank writes its shard when its own policy says so, and trains on. Steps of which some rank's shard is still missing
are open, several at a time. Rank 0 commits a step as soon as all shards are there; what is older and still open then
can be no restart any more and is given up. So the newest commit is the recovery line: the newest step that all have.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from simckpt.background import Preparer, Snapshot, Writer
from simckpt.decisions import DECISIONS
from simckpt.errors import CoordinationError, SupersededError, UnsupportedStateError
from simckpt.ranks import owner_of
from simckpt.shard_writing import FollowingWriter, ShardPublisher, texts_of
from simckpt.state.leaf import PartLeaf
from simckpt.storage import Commit, CommitDraft, CommitRecord, digests
from simckpt.storage.preparing import Prepared

if TYPE_CHECKING:
    from simckpt.distributed.several import Several
    from simckpt.distributed.voting import Ballot
    from simckpt.policies import KeepPolicy
    from simckpt.restore import BoundComponent
    from simckpt.run import Run
    from simckpt.state import Encoded
    from simckpt.storage import StoreFiles

OPEN_STEPS = 4  # of one rank at a time: each holds the bytes of a shard on the disk, and a thread
FOREVER = 1e6  # [s] 12 days; an open step ends when a newer one is committed, or the loop

Shared = Mapping[str, Mapping[str, str]]


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
        self._open: dict[int, Ballot] = {}
        self._begun: set[int] = set()
        self._newest = -1  # step that was committed last
        self._connections: list[Any] = [self._store]

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
            except BaseException as error:
                ballot.withdraw(f"{type(error).__name__}: {error}")
                raise
            snapshot.release()
            commit = self._vote(snapshot, prepared, common, ballot)
        except CoordinationError as error:
            with self.turn:
                is_old = step <= self._newest
            if is_old or _GIVEN_UP in str(error):
                raise SupersededError(str(error), ranks=error.ranks) from error
            raise
        finally:
            with self.turn:
                self._connections.append(self._open.pop(step).store)
        self._supersede(commit.record.step)
        return commit

    def give_up(self) -> None:
        """Ends what is open, at the end of the loop: nobody here will be there to conclude it."""
        with self.turn:
            still = list(self._open.values())
        for ballot in still:
            why = f"{_GIVEN_UP}: the loop of this rank has ended"
            replace(ballot, store=self._ranks.world.own_store()).withdraw(why)

    def _opened(self, step: int) -> Ballot:
        with self.turn:
            if step in self._begun:
                raise SupersededError(f"this rank has saved step {step} before, and a step has one vote of all ranks")
            self._begun.add(step)
            if len(self._open) >= OPEN_STEPS:
                # the oldest stays, for that is the one that a slow rank comes to next
                raise SupersededError(
                    f"{len(self._open)} older steps still wait for other ranks, from {min(self._open)} on"
                )
            # each of its own connection: a client of the store does one thing at a time
            connection = self._connections.pop() if self._connections else self._ranks.world.own_store()
            name = f"save of {self._run} at step {step}"
            ballot = self._open[step] = _ballot(connection, self._ranks, name)
        return ballot

    def _supersede(self, step: int) -> None:
        with self.turn:
            self._newest = max(self._newest, step)
            older = [ballot for each, ballot in self._open.items() if each < self._newest]
        for ballot in older:
            # over a connection that is not waited on
            replace(ballot, store=self._ranks.world.own_store()).withdraw(f"{_GIVEN_UP}: step {step} is a checkpoint")

    def _published(self, snapshot: Snapshot, draft: CommitDraft, prepared: list[Prepared]) -> Commit:
        """Commits, one step after the other, on rank 0."""
        with self.turn:
            if snapshot.draft.step <= self._newest:
                raise SupersededError(f"{_GIVEN_UP}: step {self._newest} is a checkpoint")
            commit = super()._published(snapshot, replace(draft, parent=self.head() or draft.parent), prepared)
            self._newest = snapshot.draft.step
            self.note(commit.record)
        return commit

    def _share(self, snapshot: Snapshot) -> tuple[dict[str, Encoded], Shared]:
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
                common[name] = {f"{name}/_tree": digests.digest(each.structure)}
                paths = {path: f"{name}/{path}" for path in each.leaves}
                common[name] |= {
                    full: digests.digest(each.leaves[path].data)
                    for path, full in paths.items()
                    if full not in self._led
                }
        return mine, common


_GIVEN_UP = "given up"


def _ballot(store: Any, ranks: Several, name: str) -> Ballot:
    from simckpt.distributed.voting import Ballot

    return Ballot(store, ranks.rank, ranks.size, name, patience=FOREVER)


class IndependentWriter(Writer):
    """Takes note of several snapshots at a time, one after the other; most of what a save does is waiting.

    Attributes:
        turn: of whoever changes the line or the store.
    """

    turn: threading.Lock

    def note(self, record: CommitRecord) -> None:
        """Takes a commit for the head, unless it was noted before."""
        if all(each.id != record.id for each in self.line):
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
