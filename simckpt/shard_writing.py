"""A save of several ranks: each writes its shard and reports, rank 0 commits what all have written.

Nothing here is a collective: the thread that saves talks to the others by the store of keys alone, so that training
goes on meanwhile. It waits for them twice: once all have their snapshot, to agree on who writes what, and once all have
written.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from simckpt import restore
from simckpt.background import OwnPublisher, Preparer, Publisher, Snapshot, Writer, preparer
from simckpt.checkpoint import Checkpoint
from simckpt.decisions import DECISIONS, INDEPENDENT
from simckpt.ranks import Alone, owner_of, stored_name
from simckpt.storage import Commit, CommitDraft, Shard
from simckpt.storage.names import encode_part
from simckpt.storage.preparing import Prepared

if TYPE_CHECKING:
    from simckpt.distributed.several import Several
    from simckpt.distributed.voting import Ballot
    from simckpt.policies import KeepPolicy
    from simckpt.restore import BoundComponent
    from simckpt.run import Run
    from simckpt.state import Encoded
    from simckpt.storage import CommitRecord, LeafRecord, StoreFiles
    from simckpt.storage.writer_process import WriterProcess

    # given the leaves that this rank has written, returns {group of ranks: {path: digest}}
    Common = Callable[[Mapping[str, LeafRecord]], Mapping[str, Mapping[str, str]]]


def writer_of(
    run: Run,
    files: StoreFiles,
    keep: KeepPolicy,
    process: WriterProcess | None,
    bound: Mapping[str, BoundComponent],
    *,
    coordination: str,
    lent: bool = False,
) -> tuple[Publisher, Writer]:
    """Returns what makes the checkpoints of a run in this process, and what keeps its line.

    Args:
        run: to write.
        files: of its store.
        keep: which checkpoints stay.
        process: that writes, or None.
        bound: the components, by their names in a checkpoint.
        coordination: of several ranks: see `Run.checkpointer`.
        lent: see `StoreFiles.prepare`.
    """
    ranks = run.ranks
    if isinstance(ranks, Alone):
        publisher: Publisher = OwnPublisher(files, run.name, preparer(files, run.name, process, lent=lent))
        return publisher, Writer(files, run.name, keep, publisher, run.protected, run_id=run.id)
    from simckpt.distributed.several import Several

    assert isinstance(ranks, Several)
    prepare = preparer(files, run.name, process, Shard(ranks.rank, ranks.size), lent=lent)
    if coordination == INDEPENDENT:
        from simckpt.independent_writing import independent_writer

        return independent_writer(ranks, files, run, keep, prepare, bound)
    publisher = ShardPublisher(ranks, files, run.name, prepare, bound)
    kind = Writer if ranks.leads else FollowingWriter
    return publisher, kind(files, run.name, keep, publisher, run.protected, run_id=run.id)


class FollowingWriter(Writer):
    """The writer of a rank that follows: rank 0 keeps the line, prunes and logs; this one hears what was committed."""

    def read_line(self) -> dict[int, Any]:
        """Reads nothing."""
        return {}

    def go_on_from(self, id: str | None) -> None:
        """Forgets what it heard of: rank 0 knows the line."""
        self.line = [record for record in self.line if record.id == id]

    def note(self, record: CommitRecord) -> None:
        """Takes a commit for the head; of the line it keeps no more, for nothing is pruned here."""
        super().note(record)
        self.line = self.line[-1:]

    def note_restored(self, checkpoint: Checkpoint) -> None:
        """Takes a checkpoint for the head; what a branch begins from is none of its own."""
        self.head = checkpoint.id
        if checkpoint.run == self._run:
            self.line = [checkpoint.record]

    def _prune(self, snapshot: Snapshot) -> None:
        pass

    def _log(self, snapshot: Snapshot, event: str, **facts: Any) -> None:
        pass


class ShardPublisher:
    """Makes checkpoints together with the other ranks.

    Args:
        ranks: of the run.
        files: of the store.
        run: the run's name.
        prepare: writes the shard of this rank.
        bound: the components, by their names in a checkpoint.
    """

    def __init__(
        self,
        ranks: Several,
        files: StoreFiles,
        run: str,
        prepare: Preparer,
        bound: Mapping[str, BoundComponent],
    ) -> None:
        from simckpt.distributed.planning import Planner

        self._ranks = ranks
        self._files = files
        self._run = run
        self._prepare = prepare
        self._bound = bound
        self._planner = Planner()
        self._name = ""
        self._ended: list[str] = []  # votes of which keys are left
        self._led: list[str] = []

    def announce(self) -> None:
        """Gives the save its name, which is the same on all ranks."""
        from simckpt.distributed.tensors import led_by_rank_0

        # now, for the thread that saves touches no live object
        self._led = [path for name, each in self._bound.items() for path in led_by_rank_0(name, each.handle)]
        self._ranks.saves += 1
        # until all have agreed that none is in flight
        self._ranks.busy = True
        self._name = f"save {self._ranks.saves}"

    def withdraw(self, error: BaseException) -> None:
        """Tells the others that this rank has no snapshot for them."""
        for name in (_plan_of(self._name), self._name):
            self._ballot(name).withdraw(f"{type(error).__name__}: {error}")
        self._note_ended(self._name)

    def __call__(self, snapshot: Snapshot) -> Commit:
        """Returns the commit once rank 0 has told of it.

        Raises:
            CoordinationError: nothing was committed; it names the ranks that are missing or failed, or what differs.
            OutcomeUnknownError: rank 0 was lost while it may have been committing.
            ...: what this rank, or rank 0 in committing, has met; the others are told.
        """
        name, ballot = self._name, self._ballot(self._name)
        try:
            try:
                components, common = self._share(snapshot)
                prepared = self._prepare(components, texts_of(snapshot.texts, components))
                # behind it: what was written has its digest
                same = common(prepared.leaves)
            except BaseException as error:
                ballot.withdraw(f"{type(error).__name__}: {error}")
                raise
            commit = self._vote(snapshot, prepared, same, ballot)
            self._ended.clear()
            return commit
        finally:
            self._note_ended(name)

    def _note_ended(self, name: str) -> None:
        from simckpt.distributed.planning import second

        self._ended += [_plan_of(name), second(_plan_of(name)), name]

    def _share(self, snapshot: Snapshot) -> tuple[dict[str, Encoded], Common]:
        """Returns what this rank writes, and what tells digests of what it should have in common with others."""
        from simckpt.distributed import planning

        encoded = snapshot.encode()
        own = {name: each for name, each in encoded.items() if owner_of(name)[1] is not None}
        shared = {name: each for name, each in encoded.items() if name not in own and name != DECISIONS}
        items = planning.items_of(shared, led=self._led)
        share = self._planner.plan(self._ballot(_plan_of(self._name)), items)
        if self._ranks.leads:
            own[DECISIONS] = encoded[DECISIONS]
        own |= self._led_here(shared)
        mine = {**planning.written(shared, items, share), **own}
        return mine, functools.partial(planning.common, shared, items, share)

    def _led_here(self, shared: Mapping[str, Encoded]) -> dict[str, Encoded]:
        """Returns what this rank has where it is rank 0's copy that all share, by components of its own.

        Between two forward passes of a `DistributedDataParallel` each rank has running means of its own, and may act
        with them: without these a restart on as many ranks would not be exact.
        """
        found = {}
        for name, encoded in shared.items() if not self._ranks.leads else ():
            prefix = f"{encode_part(name)}/"
            paths = [path.removeprefix(prefix) for path in self._led if path.startswith(prefix)]
            if held := [path for path in paths if path in encoded.leaves]:
                found[stored_name(name, self._ranks.rank)] = restore.own_part(encoded, held)
        return found

    def _vote(
        self,
        snapshot: Snapshot,
        prepared: Prepared,
        common: Mapping[str, Mapping[str, str]],
        ballot: Ballot,
        facts: Any = None,
    ) -> Commit:
        from simckpt.distributed.committing import commit_together

        def publish(of_ranks: list[Prepared], facts: Sequence[Any]) -> Commit:
            draft = replace(snapshot.draft, duration=time.monotonic() - snapshot.due)
            return self._published(draft, of_ranks, facts)

        same = {"step": snapshot.draft.step, "kind": snapshot.draft.kind}
        return commit_together(self._files, self._run, prepared, ballot, publish, same=same, facts=facts, common=common)

    def _published(self, draft: CommitDraft, prepared: list[Prepared], facts: Sequence[Any]) -> Commit:
        """Commits what all ranks have prepared; on rank 0, which gets the facts of all."""
        return self._files.publish_shards(self._run, draft, prepared)

    def give_up(self) -> None:
        """Ends what waits for other ranks: nothing that could do so for long."""

    def _ballot(self, name: str) -> Ballot:
        return ballot_of(self._ranks, name, patience=self._ranks.patience, previous=tuple(self._ended))


def ballot_of(ranks: Several, name: str, *, patience: float, previous: Sequence[str] = ()) -> Ballot:
    """Returns a vote of the ranks on a save."""
    from simckpt.distributed.voting import Ballot, grace_of

    grace = grace_of(ranks.size)
    return Ballot(ranks.world.store, ranks.rank, ranks.size, name, patience, grace, previous)


def _plan_of(name: str) -> str:
    return f"{name} plan"


def texts_of(texts: Mapping[str, Mapping[str, str]], components: Mapping[str, Encoded]) -> dict[str, Any]:
    """Returns the explanations of what is written here."""
    return {path: text for path, text in texts.items() if path.partition("/")[0] in map(encode_part, components)}
